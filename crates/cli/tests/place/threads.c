/* Programs whose threads print the CPUs on which the kernel lets them run. The first argument is the
 * name of one of them. */
#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <threads.h>
#include <unistd.h>

extern char **environ;

/* A failed call ends the program. */
static void check(int failed, const char *call) {
    if (failed) {
        fprintf(stderr, "%s: %d\n", call, failed);
        exit(1);
    }
}

/* The kernel's list of the calling thread: what sched_getaffinity says may be another one. */
static void own_cpus(char *list) {
    const char *name = "Cpus_allowed_list:";
    char line[4096];
    FILE *file = fopen("/proc/thread-self/status", "r");
    check(!file, "fopen");
    while (fgets(line, sizeof line, file))
        if (!strncmp(line, name, strlen(name)))
            sscanf(line + strlen(name), "%s", list);
    fclose(file);
}

static void *print(void *word) {
    char list[4096];
    own_cpus(list);
    printf("%s %s\n", (const char *)word, list);
    fflush(stdout);
    return NULL;
}

static pthread_t started(void *(*run)(void *), void *argument) {
    pthread_t thread;
    check(pthread_create(&thread, NULL, run, argument), "pthread_create");
    return thread;
}

static void joined(pthread_t thread) { check(pthread_join(thread, NULL), "pthread_join"); }

static void every_cpu(cpu_set_t *cpus) {
    CPU_ZERO(cpus);
    check(sched_getaffinity(0, sizeof *cpus, cpus), "sched_getaffinity");
}

static int last_of(const cpu_set_t *cpus) {
    int last = CPU_SETSIZE - 1;
    while (!CPU_ISSET(last, cpus))
        last--;
    return last;
}

static void only(int cpu, cpu_set_t *cpus) {
    CPU_ZERO(cpus);
    CPU_SET(cpu, cpus);
}

/* 1,000 threads of 1 ms, 64 at a time: each batch lives until its last thread has begun. */
enum { THREADS = 1000, BATCH = 64 };
static pthread_barrier_t together;

static void *short_life(void *unused) {
    print("thread");
    pthread_barrier_wait(&together);
    usleep(1000);
    return unused;
}

static void many(void) {
    pthread_t batch[BATCH];
    for (int begun = 0; begun < THREADS; begun += BATCH) {
        int size = THREADS - begun < BATCH ? THREADS - begun : BATCH;
        check(pthread_barrier_init(&together, NULL, size), "pthread_barrier_init");
        for (int i = 0; i < size; i++)
            batch[i] = started(short_life, NULL);
        for (int i = 0; i < size; i++)
            joined(batch[i]);
        pthread_barrier_destroy(&together);
    }
}

/* Threads that choose CPUs. */
static cpu_set_t chosen;

static void *choose(void *word) {
    check(sched_setaffinity(0, sizeof chosen, &chosen), "sched_setaffinity");
    return print(word);
}

static void choices(void) {
    every_cpu(&chosen);
    print("main");
    pthread_attr_t attributes;
    pthread_t thread;
    pthread_attr_init(&attributes);
    check(pthread_create(&thread, &attributes, print, "plain"), "pthread_create");
    joined(thread);
    pthread_attr_setaffinity_np(&attributes, sizeof chosen, &chosen);
    check(pthread_create(&thread, &attributes, print, "attribute"), "pthread_create");
    joined(thread);
    joined(started(choose, "call"));
    /* A choice of the thread that creates others: the last CPU. */
    cpu_set_t one;
    only(last_of(&chosen), &one);
    check(sched_setaffinity(0, sizeof one, &one), "sched_setaffinity");
    joined(started(print, "inherited"));
}

/* Choices that come after the pin. */
static void *sleep_and_print(void *word) {
    usleep(2000);
    return print(word);
}

static void *choose_the_same(void *word) {
    char list[4096];
    cpu_set_t cpus;
    own_cpus(list);
    only(atoi(list), &cpus);
    check(sched_setaffinity(0, sizeof cpus, &cpus), "sched_setaffinity");
    joined(started(print, word));
    every_cpu(&cpus);
    printf("told %d\n", CPU_COUNT(&cpus));
    fflush(stdout);
    return NULL;
}

static void *move_from_outside(void *word) {
    char line[100];
    snprintf(line, sizeof line, "taskset -pc %d %ld >/dev/null", last_of(&chosen),
             syscall(SYS_gettid));
    check(system(line), "taskset");
    return print(word);
}

static void later(void) {
    cpu_set_t one;
    every_cpu(&chosen);
    only(last_of(&chosen), &one);
    for (int i = 0; i < 20; i++) {
        pthread_t thread = started(sleep_and_print, "creator");
        check(pthread_setaffinity_np(thread, sizeof one, &one), "pthread_setaffinity_np");
        joined(thread);
    }
    joined(started(choose_the_same, "same"));
    joined(started(move_from_outside, "outside"));
}

/* A main thread that chooses all CPUs of the machine. */
static void wider(void) {
    memset(&chosen, 0xff, sizeof chosen);
    check(sched_setaffinity(0, sizeof chosen, &chosen), "sched_setaffinity");
    joined(started(print, "thread"));
}

/* Threads that choose one CPU, the last, and live on; the main thread may have chosen it before. */
static void *choose_and_wait(void *word) {
    cpu_set_t one;
    only(last_of(&chosen), &one);
    check(sched_setaffinity(0, sizeof one, &one), "sched_setaffinity");
    usleep(200000);
    return print(word);
}

static void *wait_and_print(void *word) {
    usleep(200000);
    return print(word);
}

static void alone(void) {
    cpu_set_t one;
    pthread_t threads[3];
    every_cpu(&chosen);
    for (int i = 0; i < 3; i++)
        threads[i] = started(choose_and_wait, "own");
    for (int i = 0; i < 3; i++)
        joined(threads[i]);
    only(last_of(&chosen), &one);
    check(sched_setaffinity(0, sizeof one, &one), "sched_setaffinity");
    for (int i = 0; i < 3; i++)
        threads[i] = started(wait_and_print, "inherited");
    for (int i = 0; i < 3; i++)
        joined(threads[i]);
}

/* Threads that end in each way, one after the other. */
static void *by_exit(void *word) {
    print(word);
    pthread_exit(NULL);
}

static void note(void *unused) {
    puts("cleaned up");
    fflush(stdout);
    (void)unused;
}

static pthread_barrier_t prints;

static void *by_cancel(void *word) {
    pthread_cleanup_push(note, NULL);
    print(word);
    pthread_barrier_wait(&prints);
    for (;;)
        pause();
    pthread_cleanup_pop(0);
    return NULL;
}

static int of_c11(void *word) {
    print(word);
    return 3;
}

static void ends(void) {
    for (int i = 0; i < 3; i++)
        joined(started(by_exit, "exit"));
    check(pthread_barrier_init(&prints, NULL, 2), "pthread_barrier_init");
    for (int i = 0; i < 3; i++) {
        pthread_t thread = started(by_cancel, "cancel");
        pthread_barrier_wait(&prints);
        check(pthread_cancel(thread), "pthread_cancel");
        joined(thread);
    }
    for (int i = 0; i < 3; i++) {
        thrd_t thread;
        int result = 0;
        check(thrd_create(&thread, of_c11, "c11") != thrd_success, "thrd_create");
        check(thrd_join(thread, &result) != thrd_success, "thrd_join");
        check(result != 3, "thrd_join");
    }
}

/* Processes of a pinned thread. */
static void spawned(char *const *words) {
    pid_t child;
    check(posix_spawnp(&child, words[0], NULL, NULL, words, environ), "posix_spawnp");
    check(waitpid(child, NULL, 0) != child, "waitpid");
}

static int become_true(void *unused) {
    char *const words[] = {"true", NULL};
    execve("/bin/true", words, environ);
    (void)unused;
    return 1;
}

/* A child on a stack of one page, below which there is no memory. */
static void *small_stack(void *word) {
    size_t page = sysconf(_SC_PAGESIZE);
    int status = -1, access = PROT_READ | PROT_WRITE;
    char *stack = mmap(NULL, 2 * page, access, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    check(stack == MAP_FAILED || mprotect(stack, page, PROT_NONE), "mmap");
    pid_t child = clone(become_true, stack + 2 * page, CLONE_VM | CLONE_VFORK | SIGCHLD, NULL);
    check(waitpid(child, &status, 0) != child, "waitpid");
    printf("%s %d\n", (char *)word, status);
    fflush(stdout);
    return NULL;
}

static void *children(void *unused) {
    cpu_set_t cpus;
    every_cpu(&cpus);
    printf("told %d\n", CPU_COUNT(&cpus));
    CPU_ZERO(&cpus);
    check(pthread_getaffinity_np(pthread_self(), sizeof cpus, &cpus), "pthread_getaffinity_np");
    printf("told %d\n", CPU_COUNT(&cpus));
    print("before");
    char *const words[] = {"sed", "-n", "s/^Cpus_allowed_list:/spawn/p", "/proc/self/status", NULL};
    spawned(words);
    check(system("sed -n s/^Cpus_allowed_list:/system/p /proc/self/status"), "system");
    char line[4096] = "";
    FILE *pipe = popen("sed -n s/^Cpus_allowed_list:/popen/p /proc/self/status", "r");
    check(!pipe || !fgets(line, sizeof line, pipe), "popen");
    fputs(line, stdout);
    pclose(pipe);
    fflush(stdout);
    pid_t child = vfork();
    if (child == 0) {
        char *const words[] = {"sed", "-n", "s/^Cpus_allowed_list:/exec/p", "/proc/self/status", NULL};
        execvp(words[0], words);
        _exit(1);
    }
    check(waitpid(child, NULL, 0) != child, "waitpid");
    child = fork();
    if (child == 0) {
        print("fork");
        joined(started(print, "thread of fork"));
        exit(0);
    }
    check(waitpid(child, NULL, 0) != child, "waitpid");
    print("after");
    return unused;
}

/* Threads that wait until somebody pins them, as many as the second argument says. */
static void *wait_for_pin(void *word) {
    char list[4096];
    do {
        usleep(1000);
        own_cpus(list);
    } while (strpbrk(list, ",-"));
    pthread_barrier_wait(&together);
    return print(word);
}

static void waiting(int number) {
    pthread_t *threads = calloc(number, sizeof *threads);
    check(pthread_barrier_init(&together, NULL, number), "pthread_barrier_init");
    for (int i = 0; i < number; i++)
        threads[i] = started(wait_for_pin, "thread");
    for (int i = 0; i < number; i++)
        joined(threads[i]);
    print("main");
    free(threads);
}

int main(int count, char **words) {
    const char *name = count > 1 ? words[1] : "";
    if (!strcmp(name, "many"))
        many();
    else if (!strcmp(name, "choices"))
        choices();
    else if (!strcmp(name, "later"))
        later();
    else if (!strcmp(name, "wider"))
        wider();
    else if (!strcmp(name, "alone"))
        alone();
    else if (!strcmp(name, "small stack"))
        joined(started(small_stack, "status"));
    else if (!strcmp(name, "ends"))
        ends();
    else if (!strcmp(name, "children"))
        joined(started(children, NULL));
    else if (!strcmp(name, "waiting") && count > 2)
        waiting(atoi(words[2]));
    else
        return 2;
    return 0;
}
