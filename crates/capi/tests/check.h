/* Shared by the programs of this folder. On a failure they print the line whose check does not
 * hold, and exit. */
#ifndef CHECK_H
#define CHECK_H

#include <pageleap.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CHECK(holds)                                                                               \
    do {                                                                                           \
        if (!(holds)) {                                                                            \
            fprintf(stderr, "%s:%d: %s does not hold; last error: %s\n", __FILE__, __LINE__,      \
                    #holds, pageleap_last_error());                                                \
            exit(1);                                                                               \
        }                                                                                          \
    } while (0)

/* A call that must succeed. */
#define OK(call) CHECK((call) == PAGELEAP_OK)

/* A call that must fail with this status, and with a text that contains this part. */
#define FAILS(expected, part, call)                                                                \
    do {                                                                                           \
        pageleap_status was = (call);                                                              \
        if (was != (expected) || strstr(pageleap_last_error(), (part)) == NULL) {                  \
            fprintf(stderr, "%s:%d: %s gave %s: %s\n", __FILE__, __LINE__, #call,                 \
                    pageleap_status_name(was), pageleap_last_error());                             \
            exit(1);                                                                               \
        }                                                                                          \
    } while (0)

/* The first two nodes that this process may take memory from, or the only one twice. */
static inline void two_nodes(uint32_t nodes[2]) {
    pageleap_topology *topology;
    OK(pageleap_topology_read(&topology));
    size_t found = 0;
    for (size_t i = 0; i < pageleap_topology_node_count(topology) && found < 2; i++) {
        pageleap_node node = PAGELEAP_INIT(pageleap_node);
        OK(pageleap_topology_node(topology, i, &node));
        if (node.total_bytes > 0 && node.is_allowed) {
            nodes[found++] = node.id;
        }
    }
    CHECK(found > 0);
    if (found == 1) {
        nodes[1] = nodes[0];
    }
    pageleap_topology_free(topology);
}

/* A pool of 4 KB pages on a node. */
static inline pageleap_pool *pool_on(uint32_t node, uint64_t bytes) {
    pageleap_pool *pool;
    pageleap_placement place = PAGELEAP_INIT(pageleap_placement);
    place.nodes = &node;
    place.node_count = 1;
    OK(pageleap_pool_new(&place, bytes, NULL, &pool));
    return pool;
}

/* Moves a whole region, waits, and checks that every page has arrived. */
static inline void leap(const pageleap_region *region, const pageleap_pool *to, uint32_t engine) {
    pageleap_job *job;
    pageleap_report *report;
    pageleap_range all = PAGELEAP_INIT(pageleap_range);
    pageleap_job_options options = PAGELEAP_INIT(pageleap_job_options);
    pageleap_report_figures figures = PAGELEAP_INIT(pageleap_report_figures);
    all.region = region;
    all.pool = to;
    options.engine = engine;
    OK(pageleap_job_start(&all, 1, &options, &job));
    OK(pageleap_job_wait(job, &report));
    OK(pageleap_report_get_figures(report, &figures));
    if (figures.ended != PAGELEAP_COMPLETED ||
        (figures.pages_migrated + figures.pages_unchanged) * 4096 != figures.bytes) {
        fprintf(stderr, "%s\n", pageleap_report_text(report));
        exit(1);
    }
    pageleap_report_free(report);
    pageleap_job_free(job);
}

#endif
