/* A host that blocks all signals in its threads, as servers with one thread for signals do. */
#include "check.h"

#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>

enum { BYTES = 8 << 20 };

static atomic_ulong stop, started;
static atomic_ullong *words;

static void *write_words(void *written) {
    sigset_t all;
    sigfillset(&all);
    CHECK(pthread_sigmask(SIG_BLOCK, &all, NULL) == 0);
    atomic_fetch_add(&started, 1);
    size_t i = 0;
    for (; !atomic_load(&stop); i++) {
        atomic_fetch_add(&words[i * 4099 % (BYTES / 8)], 1);
    }
    *(size_t *)written = i;
    return NULL;
}

static int note_the_start(void *nothing, const pageleap_progress *progress) {
    (void)nothing;
    (void)progress;
    atomic_store(&started, 3);
    return 0;
}

static void *wait_for_it(void *job) {
    OK(pageleap_job_wait_with_progress(job, 20, note_the_start, NULL, NULL));
    pthread_testcancel();
    return NULL;
}

static unsigned long long sum(void) {
    unsigned long long sum = 0;
    for (size_t i = 0; i < BYTES / 8; i++) {
        sum += atomic_load(&words[i]);
    }
    return sum;
}

/* Waits for a job and frees it. Returns whether it has moved nothing because of blocked signals. */
static int is_refused(pageleap_job *job) {
    pageleap_report *report;
    pageleap_report_figures figures = PAGELEAP_INIT(pageleap_report_figures);
    OK(pageleap_job_wait(job, &report));
    OK(pageleap_report_get_figures(report, &figures));
    int refused = figures.ended == PAGELEAP_FAILED;
    CHECK(refused || figures.ended == PAGELEAP_COMPLETED);
    CHECK(!refused || strstr(figures.ended_text, "SIGSEGV"));
    pageleap_report_free(report);
    pageleap_job_free(job);
    return refused;
}

int main(void) {
    uint32_t nodes[2];
    two_nodes(nodes);
    pageleap_pool *pools[2] = { pool_on(nodes[0], BYTES), pool_on(nodes[1], BYTES) };
    pageleap_region *region;
    OK(pageleap_region_new(pools[0], NULL, BYTES, &region));
    words = pageleap_region_start(region);
    size_t written[2];
    pthread_t writers[2];
    for (int i = 0; i < 2; i++) {
        CHECK(pthread_create(&writers[i], NULL, write_words, &written[i]) == 0);
    }
    while (atomic_load(&started) < 2) {
    }

    pageleap_range all = PAGELEAP_INIT(pageleap_range);
    pageleap_job_options options = PAGELEAP_INIT(pageleap_job_options);
    pageleap_job *job;
    all.region = region;
    all.pool = pools[1];
    /* The signal would kill a writer that blocks it. */
    options.engine = PAGELEAP_ENGINE_MPROTECT;
    OK(pageleap_job_start(&all, 1, &options, &job));
    CHECK(is_refused(job));
    int here = 0;
    for (int i = 0; i < 10; i++) {
        options.engine = PAGELEAP_ENGINE_AUTO;
        all.pool = pools[1 - here];
        OK(pageleap_job_start(&all, 1, &options, &job));
        if (is_refused(job)) {
            break;
        }
        here = 1 - here;
    }
    /* A thread that is cancelled during a call ends after the call. */
    pthread_t waiter;
    void *result;
    options.rate_limit_bytes_per_s = 1; /* it does not end by itself */
    all.pool = pools[1 - here];
    OK(pageleap_job_start(&all, 1, &options, &job));
    CHECK(pthread_create(&waiter, NULL, wait_for_it, job) == 0);
    while (atomic_load(&started) < 3) {
    }
    CHECK(pthread_cancel(waiter) == 0);
    OK(pageleap_job_cancel(job));
    CHECK(pthread_join(waiter, &result) == 0 && result == PTHREAD_CANCELED);
    pageleap_job_free(job);
    atomic_store(&stop, 1);
    for (int i = 0; i < 2; i++) {
        CHECK(pthread_join(writers[i], NULL) == 0);
    }
    CHECK(sum() == written[0] + written[1]);
    leap(region, pools[1 - here], PAGELEAP_ENGINE_MPROTECT); /* now no thread blocks it */
    CHECK(pageleap_pool_free_bytes(pools[here]) == BYTES);
    CHECK(sum() == written[0] + written[1]);
    pageleap_region_free(region);
    pageleap_pool_free(pools[0]);
    pageleap_pool_free(pools[1]);
    return 0;
}
