/* Many small jobs, one after the other: in the calling thread, and with threads and descriptors that
 * a migration context keeps for the next job. The contents stay whole, and nothing is left over. */
#include "check.h"

#include <dirent.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { PAGES = 64, BYTES = PAGES * 4096, WORDS = BYTES / 8, ROUNDS = 100 };

static const uint64_t minute = 60000000000;

static pageleap_pool *pools[2];
static pageleap_region *region;
static uint64_t *words;
static bool may_lend_itself;

static void sleep_ms(int ms) {
    nanosleep(&(struct timespec){ .tv_sec = ms / 1000, .tv_nsec = ms % 1000 * 1000000L }, NULL);
}

/* Stamps the words of a part, or checks that they have this stamp. */
static void stamp(size_t offset, size_t length, uint64_t seed) {
    for (size_t i = offset / 8; i < (offset + length) / 8; i++) {
        words[i] = seed * WORDS + i;
    }
}

static void check_stamp(size_t offset, size_t length, uint64_t seed) {
    for (size_t i = offset / 8; i < (offset + length) / 8; i++) {
        CHECK(words[i] == seed * WORDS + i);
    }
}

/* A range of the region that goes to the pool with this number. */
static pageleap_range part_to(int pool, size_t offset, size_t length) {
    pageleap_range part = PAGELEAP_INIT(pageleap_range);
    part.region = region;
    part.pool = pools[pool];
    part.offset = offset;
    part.length = length;
    return part;
}

/* Options of a job whose one thread may be the calling one. */
static pageleap_job_options options_with(const pageleap_migration_context *context) {
    pageleap_job_options options = PAGELEAP_INIT(pageleap_job_options);
    options.threads = 1;
    options.context = context;
    return options;
}

static pageleap_migration_context *new_context(void) {
    pageleap_migration_context *context;
    OK(pageleap_migration_context_new(&context));
    return context;
}

/* Checks that so many pages have moved, and frees the report. */
static void expect_moved(pageleap_report *report, size_t pages) {
    pageleap_report_figures figures = PAGELEAP_INIT(pageleap_report_figures);
    OK(pageleap_report_get_figures(report, &figures));
    if (figures.ended != PAGELEAP_COMPLETED || figures.pages_migrated != pages) {
        fprintf(stderr, "%s\n", pageleap_report_text(report));
        exit(1);
    }
    pageleap_report_free(report);
}

static void run(int to, size_t offset, size_t length, const pageleap_job_options *options) {
    pageleap_range part = part_to(to, offset, length);
    pageleap_report *report;
    OK(pageleap_job_run(&part, 1, options, &report));
    CHECK(!pageleap_thread_is_ours());
    expect_moved(report, length / 4096);
}

static pageleap_job *start(int to, size_t offset, size_t length,
                           const pageleap_job_options *options) {
    pageleap_range part = part_to(to, offset, length);
    pageleap_job *job;
    OK(pageleap_job_start(&part, 1, options, &job));
    return job;
}

static void wait_for(pageleap_job *job, size_t pages) {
    pageleap_report *report;
    OK(pageleap_job_wait(job, &report));
    expect_moved(report, pages);
    pageleap_job_free(job);
}

/* How many entries a folder has. */
static int entries(const char *path) {
    DIR *folder = opendir(path);
    CHECK(folder != NULL);
    int count = 0;
    while (readdir(folder) != NULL) {
        count++;
    }
    closedir(folder);
    return count;
}

static int threads(void) {
    return entries("/proc/self/task");
}

static int descriptors(void) {
    return entries("/proc/self/fd");
}

/* Threads that are no longer needed end by themselves, and close what they have. */
static void wait_for_so_many(int wanted_threads, int wanted_descriptors) {
    for (int ms = 0; threads() != wanted_threads || descriptors() != wanted_descriptors; ms++) {
        CHECK(ms < 30000);
        sleep_ms(1);
    }
}

/* One page and all pages go back and forth. */
static void back_and_forth(const pageleap_migration_context *context) {
    const pageleap_job_options options = options_with(context);
    const size_t page = 5 * 4096;
    for (int round = 0; round < ROUNDS; round++) {
        int away = 1 - round % 2;
        stamp(0, BYTES, round);
        run(away, page, 4096, round % 4 < 2 ? &options : NULL);
        check_stamp(0, BYTES, round);
        run(1 - away, page, 4096, &options);
        run(away, 0, BYTES, &options);
        check_stamp(0, BYTES, round);
        if (context == NULL) {
            OK(pageleap_job_run(&(pageleap_range){ .size = sizeof(pageleap_range),
                                                   .region = region,
                                                   .pool = pools[away] },
                                1, NULL, NULL)); /* nothing to do, and nobody asks for a report */
        }
    }
}

/* What was kept goes with the context, and without one nothing is kept. */
static void see_what_is_kept(void) {
    int alone = threads(), opened = descriptors();
    back_and_forth(NULL);
    wait_for_so_many(alone, opened);
    pageleap_migration_context *context = new_context();
    CHECK(threads() == alone && descriptors() == opened);
    for (uint32_t engine = PAGELEAP_ENGINE_AUTO; engine <= PAGELEAP_ENGINE_STOP_COPY; engine++) {
        pageleap_job_options options = options_with(context);
        options.engine = engine;
        pageleap_range all = part_to(1, 0, BYTES);
        pageleap_job *job;
        pageleap_status started = pageleap_job_start(&all, 1, &options, &job);
        if (started == PAGELEAP_ENGINE_REFUSED) {
            printf("%s: %s\n", pageleap_engine_name(engine), pageleap_last_error());
            continue;
        }
        OK(started);
        wait_for(job, PAGES);
        run(0, 0, BYTES, &options);
        /* As the comment of the type says, besides the thread of the one job that ran at a time.
         * While a thread of a job that has ended is not yet asleep, the next job gets another one. */
        CHECK(descriptors() <= opened + 10);
    }
    back_and_forth(context);
    CHECK(threads() > alone);
    pageleap_migration_context_free(context);
    wait_for_so_many(alone, opened);
}

/* A job keeps what it uses when its context is freed. A guard keeps the job from ending before. */
static void free_a_context_beside_its_job(void) {
    int alone = threads(), opened = descriptors();
    for (int round = 0; round < 20; round++) {
        pageleap_migration_context *context = new_context();
        pageleap_job_options options = options_with(context);
        options.pin_patience_ns = minute;
        stamp(0, BYTES, round);
        pageleap_guard *guard;
        OK(pageleap_region_pin(region, 7 * 4096, 1, &guard));
        pageleap_job *job = start(1 - round % 2, 0, BYTES, &options);
        pageleap_migration_context_free(context);
        CHECK(!pageleap_job_is_finished(job));
        check_stamp(0, BYTES, round);
        pageleap_guard_drop(guard);
        wait_for(job, PAGES);
        check_stamp(0, BYTES, round);
    }
    for (int round = 0; round < ROUNDS; round++) {
        pageleap_migration_context *context = new_context();
        const pageleap_job_options options = options_with(context);
        pageleap_job *job = start(1 - round % 2, 0, BYTES, &options);
        pageleap_migration_context_free(context);
        wait_for(job, PAGES);
    }
    check_stamp(0, BYTES, 19);
    wait_for_so_many(alone, opened);
}

struct part {
    pthread_t thread;
    const pageleap_migration_context *context;
    size_t offset;
};

static void *leap_a_part(void *given) {
    const struct part *part = given;
    const pageleap_job_options options = options_with(part->context);
    for (int round = 0; round < ROUNDS; round++) {
        int to = 1 - round % 2;
        stamp(part->offset, BYTES / 2, round);
        if (part->offset == 0) {
            run(to, part->offset, BYTES / 2, &options);
        } else {
            wait_for(start(to, part->offset, BYTES / 2, &options), PAGES / 2);
        }
        check_stamp(part->offset, BYTES / 2, round);
    }
    return NULL;
}

/* Two threads use one context at the same time. */
static void share_a_context(void) {
    pageleap_migration_context *context = new_context();
    struct part parts[2] = { { .context = context }, { .context = context, .offset = BYTES / 2 } };
    for (int i = 0; i < 2; i++) {
        CHECK(pthread_create(&parts[i].thread, NULL, leap_a_part, &parts[i]) == 0);
    }
    for (int i = 0; i < 2; i++) {
        CHECK(pthread_join(parts[i].thread, NULL) == 0);
    }
    pageleap_migration_context_free(context);
}

static atomic_int handled;
static atomic_bool guard_is_dropped;

static void handle(int number) {
    (void)number;
    /* The job waits for the guard. */
    CHECK(atomic_load(&guard_is_dropped) && !pageleap_thread_is_ours());
    atomic_fetch_add(&handled, 1);
}

/* Whether a thread blocks SIGUSR1. */
static bool blocks_the_signal(pid_t thread) {
    char path[64], line[128];
    snprintf(path, sizeof path, "/proc/self/task/%d/status", thread);
    FILE *status = fopen(path, "r");
    CHECK(status != NULL);
    unsigned long long blocked = 0;
    while (fgets(line, sizeof line, status) != NULL && sscanf(line, "SigBlk: %llx", &blocked) != 1) {
    }
    fclose(status);
    return blocked >> (SIGUSR1 - 1) & 1;
}

struct sender {
    pid_t to;
    pageleap_guard *guard;
};

static void *send_a_signal(void *given) {
    const struct sender *sender = given;
    for (int ms = 0; !blocks_the_signal(sender->to); ms++) {
        CHECK(ms < 30000); /* or another thread runs the job */
        sleep_ms(1);
    }
    CHECK(syscall(SYS_tgkill, getpid(), sender->to, SIGUSR1) == 0);
    sleep_ms(10);
    CHECK(atomic_load(&handled) == 0);
    atomic_store(&guard_is_dropped, true);
    pageleap_guard_drop(sender->guard);
    return NULL;
}

/* The calling thread runs the job, and gets a signal when the job is over. */
static void signals_wait(void) {
    if (!may_lend_itself) {
        printf("signals_wait: not run, because this thread has a low priority\n");
        return;
    }
    struct sigaction action = { .sa_handler = handle };
    CHECK(sigaction(SIGUSR1, &action, NULL) == 0);
    pageleap_job_options options = options_with(NULL);
    options.pin_patience_ns = minute;
    options.timeout_ns = minute;
    struct sender sender = { .to = (pid_t)syscall(SYS_gettid) };
    OK(pageleap_region_pin(region, 4096, 4096, &sender.guard));
    run(1, BYTES / 2, BYTES / 2, &options);
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, send_a_signal, &sender) == 0);
    run(1, 0, BYTES / 2, &options);
    CHECK(atomic_load(&handled) == 1);
    CHECK(pthread_join(thread, NULL) == 0);
    CHECK(!blocks_the_signal(sender.to));
    run(0, 0, BYTES, &options);
}

/* Nobody can cancel a job that has no handle. Its time limit ends it. */
static void time_is_up(void) {
    pageleap_job_options options = options_with(NULL);
    options.rate_limit_bytes_per_s = 1; /* it does not end by itself */
    options.area_bytes = 4096;
    options.timeout_ns = minute / 60000;
    pageleap_range all = part_to(1, 0, BYTES);
    pageleap_report *report;
    pageleap_report_figures figures = PAGELEAP_INIT(pageleap_report_figures);
    OK(pageleap_job_run(&all, 1, &options, &report));
    OK(pageleap_report_get_figures(report, &figures));
    CHECK(figures.ended == PAGELEAP_TIMED_OUT && figures.pages_migrated < PAGES);
    pageleap_report_free(report);
    options = options_with(NULL);
    OK(pageleap_job_run(&all, 1, &options, NULL));
    run(0, 0, BYTES, &options);
}

/* Jobs of a child, which has pools and a region of its own, make what they need themselves. */
static void leap_in_a_child(const pageleap_job_options *options) {
    uint32_t nodes[2];
    two_nodes(nodes);
    pools[0] = pool_on(nodes[0], BYTES);
    pools[1] = pool_on(nodes[1], BYTES);
    OK(pageleap_region_new(pools[0], NULL, BYTES, &region));
    words = pageleap_region_start(region);
    stamp(0, BYTES, 1);
    run(1, 0, BYTES, options);
    wait_for(start(0, 0, BYTES, options), PAGES);
    check_stamp(0, BYTES, 1);
}

/* A context serves the process that has made it. */
static void see_children(void) {
    if (!may_lend_itself) {
        printf("see_children: not run, because this thread has a low priority\n");
        return;
    }
    pageleap_migration_context *context = new_context();
    const pageleap_job_options options = options_with(context);
    stamp(0, BYTES, 2);
    for (int round = 0; round < 3; round++) {
        run(1, 0, BYTES, &options);
        pid_t child = fork();
        if (child == 0) {
            leap_in_a_child(&options);
            pageleap_migration_context_free(context);
            _exit(0);
        }
        int ended;
        CHECK(child > 0 && waitpid(child, &ended, 0) == child && ended == 0);
        run(0, 0, BYTES, &options);
    }
    check_stamp(0, BYTES, 2);
    pageleap_migration_context_free(context);
}

int main(void) {
    uint32_t nodes[2];
    two_nodes(nodes);
    /* A job raises a thread of low priority, and so does not run in it. */
    may_lend_itself = sched_getscheduler(0) == SCHED_OTHER && getpriority(PRIO_PROCESS, 0) <= 0;
    pools[0] = pool_on(nodes[0], BYTES);
    pools[1] = pool_on(nodes[1], BYTES);
    OK(pageleap_region_new(pools[0], NULL, BYTES, &region));
    words = pageleap_region_start(region);
    see_what_is_kept();
    free_a_context_beside_its_job();
    share_a_context();
    signals_wait();
    time_is_up();
    see_children();
    CHECK(pageleap_pool_free_bytes(pools[1]) == BYTES);
    pageleap_region_free(region);
    pageleap_pool_free(pools[0]);
    pageleap_pool_free(pools[1]);
    return 0;
}
