/* A host that forks, and starts programs, while pages move. Its children have no region, and may
 * free their handles. */
#include "check.h"

#include <pthread.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

enum { BYTES = 8 << 20 };

static void expect_success(pid_t child) {
    int status;
    CHECK(child > 0 && waitpid(child, &status, 0) == child && WIFEXITED(status) &&
          WEXITSTATUS(status) == 0);
}

int main(void) {
    uint32_t nodes[2];
    two_nodes(nodes);
    pageleap_pool *pools[2] = { pool_on(nodes[0], BYTES), pool_on(nodes[1], BYTES) };
    pageleap_region *region;
    OK(pageleap_region_new(pools[0], NULL, BYTES, &region));
    uint64_t *words = pageleap_region_start(region);
    for (size_t i = 0; i < BYTES / 8; i++) {
        words[i] = i;
    }
    for (int i = 0; i < 20; i++) {
        pageleap_range all = PAGELEAP_INIT(pageleap_range);
        pageleap_job_options options = PAGELEAP_INIT(pageleap_job_options);
        pageleap_job *job;
        all.region = region;
        all.pool = pools[1 - i % 2];
        options.rate_limit_bytes_per_s = 400 << 20; /* so that it lasts */
        OK(pageleap_job_start(&all, 1, &options, &job));
        pid_t child = fork();
        if (child == 0) {
            unsigned char resident;
            CHECK(mincore(words, 4096, &resident) != 0); /* nothing is mapped there */
            pageleap_job_free(job);
            pageleap_region_free(region);
            pageleap_pool_free(pools[0]);
            pageleap_pool_free(pools[1]);
            _exit(0);
        }
        expect_success(child);
        child = fork();
        if (child == 0) {
            execlp("true", "true", (char *)NULL);
            _exit(1);
        }
        expect_success(child);
        pageleap_report *report;
        pageleap_report_figures figures = PAGELEAP_INIT(pageleap_report_figures);
        OK(pageleap_job_wait(job, &report));
        OK(pageleap_report_get_figures(report, &figures));
        CHECK(figures.ended == PAGELEAP_COMPLETED);
        pageleap_report_free(report);
        pageleap_job_free(job);
    }
    for (size_t i = 0; i < BYTES / 8; i++) {
        CHECK(words[i] == i);
    }
    pageleap_region_free(region);
    pageleap_pool_free(pools[0]);
    pageleap_pool_free(pools[1]);
    return 0;
}
