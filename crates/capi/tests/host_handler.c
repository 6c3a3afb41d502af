/* A host with a SIGSEGV handler of its own. The handler gets the host's faults, also while pages
 * move. */
#include "check.h"

#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

enum { BYTES = 8 << 20, FAULTS = 500 };

/* A page that raises a signal when it is touched, as garbage collectors use it. */
static char *barrier;
static atomic_ulong caught, stop;
static atomic_ullong *words;

static void on_fault(int signal, siginfo_t *info, void *context) {
    (void)context;
    if ((char *)info->si_addr < barrier || (char *)info->si_addr >= barrier + 4096) {
        static const char text[] = "a fault that is not the host's has reached its handler\n";
        (void)!write(2, text, sizeof text - 1);
        _exit(1);
    }
    (void)signal;
    atomic_fetch_add(&caught, 1);
    mprotect(barrier, 4096, PROT_READ | PROT_WRITE);
}

static void *touch_the_barrier(void *nothing) {
    (void)nothing;
    for (int i = 0; i < FAULTS; i++) {
        CHECK(mprotect(barrier, 4096, PROT_NONE) == 0);
        *(volatile char *)barrier = 1;
    }
    return NULL;
}

static void *write_words(void *nothing) {
    (void)nothing;
    for (size_t i = 0; !atomic_load(&stop); i++) {
        atomic_fetch_add(&words[i * 4099 % (BYTES / 8)], 1);
    }
    return NULL;
}

static struct sigaction before;

/* A handler that is installed late, and passes on the faults that are not its own. */
static void count_and_pass_on(int signal, siginfo_t *info, void *context) {
    atomic_fetch_add(&caught, 1);
    before.sa_sigaction(signal, info, context);
}

/* Runs in a child whose jobs have installed the handler. A handler that is installed over it
 * without notice is named in the error. */
static int is_refused(const uint32_t nodes[2]) {
    pageleap_pool *pools[2] = { pool_on(nodes[0], BYTES), pool_on(nodes[1], BYTES) };
    pageleap_region *region;
    OK(pageleap_region_new(pools[0], NULL, BYTES, &region));
    leap(region, pools[1], PAGELEAP_ENGINE_AUTO);
    /* signal() loses the flags of a handler that it saves and restores; the flags come back. */
    void (*ours)(int) = signal(SIGSEGV, SIG_DFL);
    CHECK(ours != SIG_ERR && signal(SIGSEGV, ours) != SIG_ERR);
    leap(region, pools[0], PAGELEAP_ENGINE_MPROTECT);
    struct sigaction again;
    CHECK(sigaction(SIGSEGV, NULL, &again) == 0 && (again.sa_flags & SA_SIGINFO) &&
          sigismember(&again.sa_mask, SIGUSR1));
    CHECK(signal(SIGSEGV, SIG_DFL) != SIG_ERR);
    pageleap_range all = PAGELEAP_INIT(pageleap_range);
    all.region = region;
    all.pool = pools[0];
    pageleap_job *job;
    pageleap_job_options options = PAGELEAP_INIT(pageleap_job_options);
    options.engine = PAGELEAP_ENGINE_MPROTECT; /* it raises signals; others do without */
    FAILS(PAGELEAP_ENGINE_REFUSED, "install_fault_handler",
          pageleap_job_start(&all, 1, &options, &job));
    FAILS(PAGELEAP_ENGINE_REFUSED, "was set to the default", pageleap_install_fault_handler());
    return 0;
}

/* Runs in a child, too. A handler that cannot pass faults on is refused, whatever was promised. */
static int is_refused_in_spite_of_a_promise(const uint32_t nodes[2]) {
    pageleap_pool *pool = pool_on(nodes[0], BYTES);
    pageleap_range all = PAGELEAP_INIT(pageleap_range);
    pageleap_region *region;
    OK(pageleap_region_new(pool, NULL, BYTES, &region));
    all.region = region;
    all.pool = pool;
    pageleap_job *job;
    pageleap_job_options options = PAGELEAP_INIT(pageleap_job_options);
    options.engine = PAGELEAP_ENGINE_MPROTECT;
    OK(pageleap_install_fault_handler());
    const struct sigaction useless[] = {
        { .sa_handler = SIG_DFL },
        { .sa_handler = SIG_IGN, .sa_flags = SA_SIGINFO },
        { .sa_handler = SIG_DFL, .sa_flags = SA_SIGINFO },
        { .sa_sigaction = count_and_pass_on, .sa_flags = SA_SIGINFO | SA_RESETHAND },
        { .sa_sigaction = count_and_pass_on },
    };
    for (size_t i = 0; i < sizeof useless / sizeof useless[0]; i++) {
        CHECK(sigaction(SIGSEGV, &useless[i], NULL) == 0);
        FAILS(PAGELEAP_ENGINE_REFUSED, "SA_SIGINFO and not SA_RESETHAND",
              pageleap_job_start(&all, 1, &options, &job));
    }
    return 0;
}

static int ends_well(pid_t child) {
    int status;
    return waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

int main(void) {
    uint32_t nodes[2];
    two_nodes(nodes);
    pid_t refused = fork();
    if (refused == 0) {
        _exit(is_refused(nodes));
    }
    CHECK(ends_well(refused));
    refused = fork();
    if (refused == 0) {
        _exit(is_refused_in_spite_of_a_promise(nodes));
    }
    CHECK(ends_well(refused));
    barrier = mmap(NULL, 4096, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    struct sigaction action = { .sa_sigaction = on_fault, .sa_flags = SA_SIGINFO };
    CHECK(sigaction(SIGSEGV, &action, NULL) == 0);
    pageleap_pool *pools[2] = { pool_on(nodes[0], BYTES), pool_on(nodes[1], BYTES) };
    pageleap_region *region;
    OK(pageleap_region_new(pools[0], NULL, BYTES, &region));
    words = pageleap_region_start(region);
    OK(pageleap_install_fault_handler());

    pthread_t hosts, writer;
    CHECK(pthread_create(&hosts, NULL, touch_the_barrier, NULL) == 0);
    CHECK(pthread_create(&writer, NULL, write_words, NULL) == 0);
    for (int i = 1; i <= 20 || atomic_load(&caught) < FAULTS; i++) {
        leap(region, pools[i % 2], PAGELEAP_ENGINE_MPROTECT);
    }
    CHECK(pthread_join(hosts, NULL) == 0);
    CHECK(atomic_load(&caught) == FAULTS);

    /* This handler passes on faults that are not its own, as the call above has promised. */
    CHECK(sigaction(SIGSEGV, NULL, &before) == 0);
    struct sigaction late = { .sa_sigaction = count_and_pass_on, .sa_flags = SA_SIGINFO };
    CHECK(sigaction(SIGSEGV, &late, NULL) == 0);
    OK(pageleap_install_fault_handler());
    for (int i = 1; i <= 20 || atomic_load(&caught) == FAULTS; i++) {
        leap(region, pools[i % 2], PAGELEAP_ENGINE_MPROTECT);
    }
    atomic_store(&stop, 1);
    CHECK(pthread_join(writer, NULL) == 0);
    CHECK(sigaction(SIGSEGV, &before, NULL) == 0);

    /* Faults that belong to neither reach the host, which ends the process. */
    pid_t child = fork();
    if (child == 0) {
        volatile char *volatile nowhere = (volatile char *)64;
        *nowhere = 1;
        _exit(0);
    }
    int status;
    CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 1);
    pageleap_region_free(region);
    pageleap_pool_free(pools[0]);
    pageleap_pool_free(pools[1]);
    return 0;
}
