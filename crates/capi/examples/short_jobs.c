/*
 * Measures short jobs from C: one range of 4 KB to 16 MB, and many ranges with gaps between them.
 *
 *     short_jobs [RUNS [FROM [TO]]]
 *
 * The defaults are 20, and the first two nodes that may be used. `pageleap bench engines --load
 * small,scattered` measures the same shapes from Rust, for each engine.
 *
 * Each run writes the ranges, copies them by memcpy, and moves them in two ways: by
 * pageleap_job_start and pageleap_job_wait, and by pageleap_job_run with a migration context. After
 * each job all words are compared with what was written. Times are medians in microseconds.
 *
 * Exit code: 0 if all words were right, 1 if a word was wrong, 2 if a call failed.
 */
#include <pageleap.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { PAGE = 4096, GAP = 13, MOST_RUNS = 1000 };

/* Equal ranges, with GAP pages between two of them. */
struct shape {
    size_t ranges, pages;
};

static const struct shape shapes[] = {
    { 1, 1 },    { 1, 16 },   { 1, 64 },    { 1, 256 },  { 1, 1024 },
    { 1, 4096 }, { 128, 1 },  { 512, 1 },   { 2048, 1 }, { 512, 16 },
};
enum { SHAPES = sizeof shapes / sizeof shapes[0], MOST_RANGES = 2048 };

/* Bytes of the region, which holds 2048 ranges of a page with their gaps, and the most bytes that one
 * job moves. */
enum { MOST_BYTES = MOST_RANGES * (1 + GAP) * PAGE, MOST_MOVED = 512 * 16 * PAGE };

/* The columns of the table, in nanoseconds. */
enum { START, WAIT, RUN, COPY, COLUMNS };

static pageleap_pool *pools[2];
static pageleap_region *region;
static pageleap_migration_context *context;
static char *memory, *copies;
static double times[COLUMNS][MOST_RUNS];

static void die(const char *what) {
    fprintf(stderr, "short_jobs: %s: %s\n", what, pageleap_last_error());
    exit(2);
}

static double now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec * 1e9 + (double)now.tv_nsec;
}

static size_t offset_of(const struct shape *shape, size_t range) {
    return range * (shape->pages + GAP) * PAGE;
}

static uint64_t word_of(size_t offset, uint64_t seed) {
    return (seed << 32 ^ offset) * 0x9e3779b97f4a7c15u;
}

static void write_ranges(const struct shape *shape, uint64_t seed) {
    for (size_t range = 0; range < shape->ranges; range++) {
        size_t start = offset_of(shape, range), end = start + shape->pages * PAGE;
        for (size_t at = start; at < end; at += 8) {
            *(uint64_t *)(memory + at) = word_of(at, seed);
        }
    }
}

static void check_ranges(const struct shape *shape, uint64_t seed) {
    for (size_t range = 0; range < shape->ranges; range++) {
        size_t start = offset_of(shape, range), end = start + shape->pages * PAGE;
        for (size_t at = start; at < end; at += 8) {
            if (*(uint64_t *)(memory + at) != word_of(at, seed)) {
                fprintf(stderr, "short_jobs: the word at %zu is wrong\n", at);
                exit(1);
            }
        }
    }
}

static double copy_ranges(const struct shape *shape) {
    double began = now_ns();
    for (size_t range = 0; range < shape->ranges; range++) {
        size_t at = offset_of(shape, range);
        memcpy(copies + at, memory + at, shape->pages * PAGE);
    }
    return now_ns() - began;
}

/* Moves the ranges to a pool, and back to the other one, which is not measured. */
static void leap(const struct shape *shape, bool by_run, size_t run) {
    static pageleap_range ranges[MOST_RANGES];
    for (int way = 1; way >= 0; way--) {
        for (size_t range = 0; range < shape->ranges; range++) {
            ranges[range] = PAGELEAP_INIT(pageleap_range);
            ranges[range].region = region;
            ranges[range].pool = pools[way];
            ranges[range].offset = offset_of(shape, range);
            ranges[range].length = shape->pages * PAGE;
        }
        pageleap_job_options options = PAGELEAP_INIT(pageleap_job_options);
        options.threads = 1;
        pageleap_report *report;
        double began = now_ns(), started = began;
        if (by_run) {
            options.context = context;
            if (pageleap_job_run(ranges, shape->ranges, &options, &report) != PAGELEAP_OK) {
                die("pageleap_job_run");
            }
        } else {
            pageleap_job *job;
            if (pageleap_job_start(ranges, shape->ranges, &options, &job) != PAGELEAP_OK) {
                die("pageleap_job_start");
            }
            started = now_ns();
            if (pageleap_job_wait(job, &report) != PAGELEAP_OK) {
                die("pageleap_job_wait");
            }
            pageleap_job_free(job);
        }
        double ended = now_ns();
        pageleap_report_figures figures = PAGELEAP_INIT(pageleap_report_figures);
        if (pageleap_report_get_figures(report, &figures) != PAGELEAP_OK) {
            die("pageleap_report_get_figures");
        }
        if (figures.pages_migrated != shape->ranges * shape->pages) {
            fprintf(stderr, "%s\n", pageleap_report_text(report));
            exit(2);
        }
        pageleap_report_free(report);
        if (way == 1 && by_run) {
            times[RUN][run] = ended - began;
        } else if (way == 1) {
            times[START][run] = started - began;
            times[WAIT][run] = ended - began;
        }
    }
}

static int by_size(const void *left, const void *right) {
    double a = *(const double *)left, b = *(const double *)right;
    return (a > b) - (a < b);
}

/* The median of a column, in microseconds. */
static double median(int column, size_t runs) {
    qsort(times[column], runs, sizeof(double), by_size);
    double middle = (times[column][runs / 2] + times[column][(runs - 1) / 2]) / 2;
    return middle / 1e3;
}

static void find_nodes(uint32_t nodes[2]) {
    pageleap_topology *topology;
    if (pageleap_topology_read(&topology) != PAGELEAP_OK) {
        die("pageleap_topology_read");
    }
    size_t found = 0;
    for (size_t i = 0; i < pageleap_topology_node_count(topology) && found < 2; i++) {
        pageleap_node node = PAGELEAP_INIT(pageleap_node);
        if (pageleap_topology_node(topology, i, &node) == PAGELEAP_OK && node.is_allowed &&
            node.total_bytes > 0) {
            nodes[found++] = node.id;
        }
    }
    if (found == 1) {
        nodes[1] = nodes[0];
    }
    pageleap_topology_free(topology);
}

int main(int count, char **arguments) {
    long runs = count > 1 ? atol(arguments[1]) : 20;
    uint32_t nodes[2] = { 0, 0 };
    find_nodes(nodes);
    for (int i = 2; i < count && i < 4; i++) {
        nodes[i - 2] = (uint32_t)atol(arguments[i]);
    }
    if (count > 4 || runs < 1 || runs > MOST_RUNS) {
        fprintf(stderr, "short_jobs [RUNS [FROM [TO]]], with 1 to %d runs\n", MOST_RUNS);
        return 2;
    }
    const uint64_t bytes[2] = { MOST_BYTES, MOST_MOVED };
    for (int i = 0; i < 2; i++) {
        if (pageleap_pool_new(PAGELEAP_ON(nodes[i]), bytes[i], NULL, &pools[i]) != PAGELEAP_OK) {
            die("pageleap_pool_new");
        }
    }
    if (pageleap_region_new(pools[0], NULL, MOST_BYTES, &region) != PAGELEAP_OK ||
        pageleap_migration_context_new(&context) != PAGELEAP_OK) {
        die("making the region and the context");
    }
    memory = pageleap_region_start(region);
    copies = malloc(MOST_BYTES);
    if (copies == NULL) {
        die("malloc");
    }
    memset(copies, 1, MOST_BYTES);
    if (nodes[0] == nodes[1]) {
        printf("one node: both pools lie on node %u\n", nodes[0]);
    }
    printf("%8s %8s %12s %12s %12s %12s %12s\n", "ranges", "pages", "start us", "wait us",
           "run us", "run/range us", "memcpy us");
    for (size_t i = 0; i < SHAPES; i++) {
        const struct shape *shape = &shapes[i];
        for (size_t run = 0; run < (size_t)runs; run++) {
            for (int by_run = 0; by_run < 2; by_run++) {
                uint64_t seed = (i * MOST_RUNS + run) * 2 + (size_t)by_run;
                write_ranges(shape, seed);
                times[COPY][run] = copy_ranges(shape);
                leap(shape, by_run, run);
                check_ranges(shape, seed);
            }
        }
        double by_run = median(RUN, (size_t)runs);
        printf("%8zu %8zu %12.1f %12.1f %12.1f %12.2f %12.2f\n", shape->ranges, shape->pages,
               median(START, (size_t)runs), median(WAIT, (size_t)runs), by_run,
               by_run / (double)shape->ranges, median(COPY, (size_t)runs));
    }
    free(copies);
    pageleap_migration_context_free(context);
    pageleap_region_free(region);
    for (int i = 0; i < 2; i++) {
        pageleap_pool_free(pools[i]);
    }
    return 0;
}
