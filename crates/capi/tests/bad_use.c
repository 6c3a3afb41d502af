/* Arguments that are not possible are refused by name, and nothing is written where nothing may
 * be written. */
#include "check.h"

#include <errno.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stddef.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

static void *has_no_error_yet(void *nothing) {
    (void)nothing;
    CHECK(strcmp(pageleap_last_error(), "") == 0);
    FAILS(PAGELEAP_BAD_ARGUMENT, "job", pageleap_job_cancel(NULL));
    return NULL;
}

/* A call that fails sets what it should have given out to NULL. */
#define GIVES_NOTHING(out, expected, part, call)                                                   \
    do {                                                                                           \
        out = (void *)0x1234;                                                                      \
        FAILS(expected, part, call);                                                               \
        CHECK(out == NULL);                                                                        \
    } while (0)

static pageleap_error late;

static void at_exit(void) {
    /* At this point the thread may have lost its texts and its place for them. */
    pageleap_job_cancel(NULL);
    CHECK(pageleap_last_error() != NULL && pageleap_last_error_detail(&late) == PAGELEAP_OK);
}

static uint32_t nodes[2];
static pageleap_pool *pool, *no_pool;
static pageleap_region *region, *no_region;
static pageleap_capabilities *no_capabilities;
static pageleap_job *job;
static void *part;

static pageleap_range the_whole_region(void) {
    pageleap_range all = PAGELEAP_INIT(pageleap_range);
    all.region = region;
    all.pool = pool;
    return all;
}

static void see_null(void) {
    size_t count;
    GIVES_NOTHING(no_pool, PAGELEAP_BAD_ARGUMENT, "placement: it is NULL",
                  pageleap_pool_new(NULL, 4096, NULL, &no_pool));
    FAILS(PAGELEAP_BAD_ARGUMENT, "pool: it is NULL",
          pageleap_pool_new(PAGELEAP_ON(nodes[0]), 4096, NULL, NULL));
    GIVES_NOTHING(no_region, PAGELEAP_BAD_ARGUMENT, "pool: it is NULL",
                  pageleap_region_new(NULL, NULL, 4096, &no_region));
    FAILS(PAGELEAP_BAD_ARGUMENT, "region: it is NULL", pageleap_region_new(pool, NULL, 4096, NULL));
    GIVES_NOTHING(part, PAGELEAP_BAD_ARGUMENT, "region: it is NULL",
                  pageleap_region_view(NULL, 0, 8, &part));
    FAILS(PAGELEAP_BAD_ARGUMENT, "address: it is NULL", pageleap_region_view(region, 0, 8, NULL));
    FAILS(PAGELEAP_BAD_ARGUMENT, "structure: it is NULL", pageleap_region_verify(region, NULL));
    FAILS(PAGELEAP_BAD_ARGUMENT, "topology: it is NULL", pageleap_topology_read(NULL));
    FAILS(PAGELEAP_BAD_ARGUMENT, "nodes: it is NULL", pageleap_pool_nodes(pool, NULL, 1, &count));
    GIVES_NOTHING(job, PAGELEAP_BAD_ARGUMENT, "ranges: it is NULL",
                  pageleap_job_start(NULL, 1, NULL, &job));
    GIVES_NOTHING(job, PAGELEAP_BAD_ARGUMENT, "names no range",
                  pageleap_job_start(NULL, 0, NULL, &job));
    FAILS(PAGELEAP_BAD_ARGUMENT, "job: it is NULL", pageleap_job_wait(NULL, NULL));
    FAILS(PAGELEAP_BAD_ARGUMENT, "job: it is NULL",
          pageleap_job_wait_with_progress(NULL, 1, NULL, NULL, NULL));
    FAILS(PAGELEAP_BAD_ARGUMENT, "guard: it is NULL", pageleap_region_pin(region, 0, 1, NULL));
    pageleap_guard *guard;
    GIVES_NOTHING(guard, PAGELEAP_BAD_ARGUMENT, "region: it is NULL",
                  pageleap_region_pin(NULL, 0, 1, &guard));
    pageleap_report *no_report;
    GIVES_NOTHING(no_report, PAGELEAP_BAD_ARGUMENT, "job: it is NULL",
                  pageleap_job_wait(NULL, &no_report));
    GIVES_NOTHING(no_report, PAGELEAP_BAD_ARGUMENT, "ranges: it is NULL",
                  pageleap_job_run(NULL, 1, NULL, &no_report));
    FAILS(PAGELEAP_BAD_ARGUMENT, "names no range", pageleap_job_run(NULL, 0, NULL, NULL));
    FAILS(PAGELEAP_BAD_ARGUMENT, "context: it is NULL", pageleap_migration_context_new(NULL));
    pageleap_demand of_no_size = { .size = 4 };
    GIVES_NOTHING(no_capabilities, PAGELEAP_BAD_ARGUMENT, "size, is 4",
                  pageleap_probe(&of_no_size, &no_capabilities));
    pageleap_topology_free(NULL);
    pageleap_capabilities_free(NULL);
    pageleap_pool_free(NULL);
    pageleap_region_free(NULL);
    pageleap_guard_drop(NULL);
    pageleap_migration_context_free(NULL);
    pageleap_report_free(NULL);
    pageleap_job_free(NULL);
    CHECK(pageleap_region_start(NULL) == NULL && pageleap_region_length(NULL) == 0);
    CHECK(pageleap_pool_bytes(NULL) == 0 && pageleap_topology_node_count(NULL) == 0);
    CHECK(pageleap_job_fd(NULL) == -1 && !pageleap_job_is_finished(NULL));
    CHECK(pageleap_report_json(NULL) == NULL && pageleap_report_text(NULL) == NULL);
    CHECK(!pageleap_topology_knows_allowed_nodes(NULL));
    CHECK(pageleap_topology_warning(NULL, 0) == NULL &&
          pageleap_topology_distance(NULL, 0, 0) == 0);
}

/* Structures without a size, of an older header, and of a newer one. */
static void see_sizes_of_structures(void) {
    pageleap_placement place = { 0 };
    GIVES_NOTHING(no_pool, PAGELEAP_BAD_ARGUMENT, "size, is 0",
                  pageleap_pool_new(&place, 4096, NULL, &no_pool));
    place.size = sizeof place;
    GIVES_NOTHING(no_pool, PAGELEAP_BAD_ARGUMENT, "names no node",
                  pageleap_pool_new(&place, 4096, NULL, &no_pool));
    pageleap_job_options pointer = PAGELEAP_INIT(pageleap_job_options);
    pointer.size = sizeof(&pointer); /* a frequent mistake */
    pageleap_range all = the_whole_region();
    GIVES_NOTHING(job, PAGELEAP_BAD_ARGUMENT, "size, is 8",
                  pageleap_job_start(&all, 1, &pointer, &job));
    OK(pageleap_job_start(&all, 1, NULL, &job));
    pageleap_report *report;
    pageleap_report_figures figures = PAGELEAP_INIT(pageleap_report_figures);
    OK(pageleap_job_wait(job, &report));
    OK(pageleap_report_get_figures(report, &figures));
    CHECK(figures.ended == PAGELEAP_COMPLETED);
    struct {
        pageleap_progress known;
        uint64_t unknown[4];
    } newer = { .known = { .size = sizeof newer }, .unknown = { 1, 1, 1, 1 } };
    OK(pageleap_job_progress(job, &newer.known));
    CHECK(newer.known.phase == PAGELEAP_FINISHED && newer.known.size == sizeof newer);
    CHECK(newer.unknown[0] == 0 && newer.unknown[3] == 0);
    pageleap_report_free(report);
    pageleap_job_free(job);
    struct {
        pageleap_job_options known;
        uint64_t unknown;
    } asks_more = { .known = PAGELEAP_INIT(pageleap_job_options), .unknown = 1 };
    asks_more.known.size = sizeof asks_more;
    GIVES_NOTHING(job, PAGELEAP_UNSUPPORTED, "newer pageleap.h",
                  pageleap_job_start(&all, 1, &asks_more.known, &job));
    asks_more.unknown = 0;
    OK(pageleap_job_start(&all, 1, &asks_more.known, &job));
    pageleap_job_free(job);
    /* The options of an older header end before the context: what lies there is not read. */
    pageleap_job_options older = PAGELEAP_INIT(pageleap_job_options);
    older.size = offsetof(pageleap_job_options, context);
    older.context = (const pageleap_migration_context *)8;
    OK(pageleap_job_run(&all, 1, &older, NULL));
}

static void see_numbers(void) {
    pageleap_error detail = PAGELEAP_INIT(pageleap_error);
    pageleap_pool_options strange = PAGELEAP_INIT(pageleap_pool_options);
    strange.page_size = 9;
    GIVES_NOTHING(no_pool, PAGELEAP_BAD_ARGUMENT, "page size: 9",
                  pageleap_pool_new(PAGELEAP_ON(nodes[0]), 4096, &strange, &no_pool));
    GIVES_NOTHING(no_region, PAGELEAP_BAD_ARGUMENT, "page size: 4",
                  pageleap_region_reserve(4096, 4, &no_region));
    GIVES_NOTHING(no_pool, PAGELEAP_UNKNOWN_NODE, "4000",
                  pageleap_pool_new(PAGELEAP_ON(4000), 4096, NULL, &no_pool));
    FAILS(PAGELEAP_BAD_ARGUMENT, "weight 0",
          pageleap_pool_new(&(pageleap_placement){ .size = sizeof(pageleap_placement),
                                                   .nodes = nodes,
                                                   .node_count = 1,
                                                   .weights = (const uint32_t[]){ 0 } },
                            4096, NULL, &no_pool));
    GIVES_NOTHING(part, PAGELEAP_BAD_RANGE, "not inside the region",
                  pageleap_region_view(region, 1 << 19, 1, &part));
    GIVES_NOTHING(part, PAGELEAP_BAD_RANGE, "beyond all addresses",
                  pageleap_region_view(region, SIZE_MAX, 2, &part));
    FAILS(PAGELEAP_BAD_RANGE, "not aligned", pageleap_region_discard(region, 0, 100));
    GIVES_NOTHING(no_region, PAGELEAP_POOL_EXHAUSTED, "free of",
                  pageleap_region_new(pool, NULL, 1 << 20, &no_region));
    OK(pageleap_last_error_detail(&detail));
    CHECK(detail.status == PAGELEAP_POOL_EXHAUSTED && detail.call == NULL &&
          detail.error_number == 0);
    CHECK(strcmp(detail.message, pageleap_last_error()) == 0);
    pageleap_demand demand = PAGELEAP_INIT(pageleap_demand);
    demand.reserved[1] = 1;
    GIVES_NOTHING(no_capabilities, PAGELEAP_BAD_ARGUMENT, "reserved",
                  pageleap_probe(&demand, &no_capabilities));
    FAILS(PAGELEAP_BAD_ARGUMENT, "no pool to place",
          pageleap_region_grow(region, 1 << 19, NULL, PAGELEAP_ON(nodes[0])));
    CHECK(strcmp(pageleap_status_name(7), "PAGELEAP_PINNED") == 0 &&
          strcmp(pageleap_status_name(99), "unknown") == 0);
    CHECK(strcmp(pageleap_engine_name(9), "unknown") == 0 && pageleap_page_bytes(9) == 0);
}

static void see_ranges_and_options(void) {
    pageleap_error detail = PAGELEAP_INIT(pageleap_error);
    pageleap_range all = the_whole_region();
    all.offset = 4096;
    all.length = 3;
    GIVES_NOTHING(job, PAGELEAP_BAD_RANGE, "not aligned",
                  pageleap_job_start(&all, 1, NULL, &job));
    OK(pageleap_last_error_detail(&detail));
    CHECK(detail.start == 4096 && detail.length == 3);
    all.offset = all.length = 0;
    pageleap_job_options options = PAGELEAP_INIT(pageleap_job_options);
    options.engine = 77;
    GIVES_NOTHING(job, PAGELEAP_BAD_ARGUMENT, "engine: 77",
                  pageleap_job_start(&all, 1, &options, &job));
    options.engine = PAGELEAP_ENGINE_AUTO;
    options.threads = 100000;
    GIVES_NOTHING(job, PAGELEAP_BAD_ARGUMENT, "threads",
                  pageleap_job_start(&all, 1, &options, &job));
    options.threads = 0;
    options.pin_patience_ns = -2;
    GIVES_NOTHING(job, PAGELEAP_BAD_ARGUMENT, "pin_patience_ns: -2",
                  pageleap_job_start(&all, 1, &options, &job));
    options.pin_patience_ns = 0;
    options.max_disturbed_copies = INT32_MIN;
    GIVES_NOTHING(job, PAGELEAP_BAD_ARGUMENT, "max_disturbed_copies: -2147483648",
                  pageleap_job_start(&all, 1, &options, &job));
    pageleap_range two[2] = { all, all };
    two[1].size += 8; /* nothing behind the array is read */
    GIVES_NOTHING(job, PAGELEAP_BAD_ARGUMENT, "size 56", pageleap_job_start(two, 2, NULL, &job));
    two[1].size = two[0].size;
    two[0].length = two[1].offset = two[1].length = 1 << 18;
    OK(pageleap_job_start(two, 2, NULL, &job));
    pageleap_job_free(job);
    two[1].offset = 0;
    GIVES_NOTHING(job, PAGELEAP_RANGE_BUSY, "named twice", pageleap_job_start(two, 2, NULL, &job));
}

/* Lists of pages in place of move_pages(): a wild count is refused, and errno says why. */
static void see_lists_of_pages(void) {
    static char memory[3 * 4096] __attribute__((aligned(4096)));
    void *pages[2] = { memory, memory + 4096 };
    int to[2] = { nodes[0], nodes[0] }, status[2];
    memset(memory, 1, sizeof memory);
    CHECK(pageleap_move_pages(0, ULONG_MAX, pages, to, status, 2) == -1 && errno == EINVAL);
    CHECK(pageleap_move_pages(0, ULONG_MAX / 16, pages, to, status, 2) == -1 && errno == EINVAL);
    CHECK(pageleap_move_pages(0, 2, NULL, to, status, 2) == -1 && errno == EINVAL);
    CHECK(pageleap_move_pages(0, 2, pages, to, status, 64) == -1 && errno == EINVAL);
    CHECK(pageleap_move_pages(0, 2, pages, to, status, 1) == -1 && errno == EINVAL);
    CHECK(pageleap_move_pages(-1, 2, pages, to, status, 2) == -1 && errno == ESRCH);
    CHECK(pageleap_move_pages(INT_MAX, 2, pages, to, status, 2) == -1 && errno == ESRCH);
    CHECK(pageleap_move_pages(0, 0, NULL, NULL, NULL, 2) == 0);
    CHECK(pageleap_move_pages(0, 2, pages, NULL, status, 0) == 0 && status[0] >= 0);
    /* A page that is not present is no page that has stayed. */
    pages[1] = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(pageleap_move_pages(0, 2, pages, to, status, 2) == 0 && status[1] == -ENOENT);
    munmap(pages[1], 4096);
    /* No page is at these addresses, and nothing is read or written there. */
    void *wild[] = { NULL, (void *)1, (void *)(1L << 47), (void *)LONG_MIN, (void *)-1L };
    enum { WILD = sizeof wild / sizeof *wild };
    int anywhere[WILD] = { 0 }, told[WILD];
    for (int at = 0; at < WILD; at++)
        anywhere[at] = nodes[0];
    CHECK(pageleap_move_pages(0, WILD, wild, anywhere, told, 2) == 0);
    for (int at = 0; at < WILD; at++)
        CHECK(told[at] == -EFAULT);
    /* Nodes that there are not: the page stays, and counts. */
    for (int none = 0; none < 3; none++) {
        to[0] = (int[]){ -1, INT_MIN, INT_MAX }[none];
        CHECK(pageleap_move_pages(0, 1, pages, to, status, 2) == 1 && status[0] == -ENODEV);
    }
    CHECK(pageleap_move_pages(0, 1, pages, to, NULL, 2) == 1);
}

/* Pages that several processes map move with CAP_SYS_NICE only. */
static void see_a_list_without_privileges(void) {
    static char memory[4096] __attribute__((aligned(4096)));
    void *pages[1] = { memory };
    int to[1] = { nodes[0] }, status[1], ended;
    memory[0] = 1;
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        CHECK(geteuid() != 0 || setuid(65534) == 0);
        CHECK(pageleap_move_pages(0, 1, pages, to, status, 4) == -1 && errno == EPERM);
        CHECK(strstr(pageleap_last_error(), "CAP_SYS_NICE") != NULL);
        _exit(0);
    }
    CHECK(waitpid(child, &ended, 0) == child && ended == 0);
}

/* The name of a call stays valid, whatever fails later. */
static void see_a_call_that_failed(void) {
    pageleap_error detail = PAGELEAP_INIT(pageleap_error);
    struct rlimit before, small = { 4096, 4096 };
    CHECK(getrlimit(RLIMIT_FSIZE, &before) == 0 && signal(SIGXFSZ, SIG_IGN) != SIG_ERR);
    small.rlim_max = before.rlim_max;
    CHECK(setrlimit(RLIMIT_FSIZE, &small) == 0);
    GIVES_NOTHING(no_pool, PAGELEAP_SYSTEM_CALL, "RLIMIT_FSIZE",
                  pageleap_pool_new(PAGELEAP_ON(nodes[0]), 1 << 20, NULL, &no_pool));
    CHECK(setrlimit(RLIMIT_FSIZE, &before) == 0);
    OK(pageleap_last_error_detail(&detail));
    CHECK(detail.error_number == EFBIG && detail.length == 1 << 20);
    FAILS(PAGELEAP_BAD_ARGUMENT, "job", pageleap_job_cancel(NULL));
    CHECK(strcmp(detail.call, "memfd_create") == 0);
}

/* The last error is the thread's own. */
static void see_errors_of_threads(void) {
    pageleap_range all = the_whole_region();
    pageleap_job_options options = PAGELEAP_INIT(pageleap_job_options);
    options.max_disturbed_copies = INT32_MIN;
    FAILS(PAGELEAP_BAD_ARGUMENT, "max_disturbed", pageleap_job_start(&all, 1, &options, &job));
    pthread_t other;
    CHECK(pthread_create(&other, NULL, has_no_error_yet, NULL) == 0 &&
          pthread_join(other, NULL) == 0);
    CHECK(strstr(pageleap_last_error(), "max_disturbed") != NULL);
}

int main(void) {
    late.size = sizeof late;
    CHECK(atexit(at_exit) == 0);
    two_nodes(nodes);
    pool = pool_on(nodes[0], 1 << 20);
    OK(pageleap_region_new(pool, NULL, 1 << 19, &region));
    see_null();
    see_sizes_of_structures();
    see_numbers();
    see_ranges_and_options();
    see_lists_of_pages();
    see_a_list_without_privileges();
    see_a_call_that_failed();
    see_errors_of_threads();
    pageleap_region_free(region);
    pageleap_pool_free(pool);
    return 0;
}
