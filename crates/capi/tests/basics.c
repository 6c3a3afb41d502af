/* Calls every function of the header once, as it is meant, and checks what becomes of the
 * memory. */
#include "check.h"

#include <poll.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

enum { PAGES = 2048, BYTES = PAGES * 4096 };

#if PAGELEAP_VERSION_NUMBER < PAGELEAP_MAKE_VERSION(0, 1, 0)
#error "the macros can be used by the preprocessor"
#endif

/* This program runs with the library that its header came with. */
static void see_the_version(void) {
    char of_its_parts[64];
    snprintf(of_its_parts, sizeof of_its_parts, "%d.%d.%d", PAGELEAP_VERSION_MAJOR,
             PAGELEAP_VERSION_MINOR, PAGELEAP_VERSION_PATCH);
    /* A version before a release has more after its numbers: "1.0.0-rc.1". */
    CHECK(strncmp(PAGELEAP_VERSION, of_its_parts, strlen(of_its_parts)) == 0);
    CHECK(strcmp(pageleap_version(), PAGELEAP_VERSION) == 0);
    CHECK(pageleap_version_number() == PAGELEAP_VERSION_NUMBER);
    CHECK(PAGELEAP_MAKE_VERSION(0, 10, 0) > PAGELEAP_MAKE_VERSION(0, 9, 999));
    printf("pageleap %s\n", pageleap_version());
}

static void see_the_machine(void) {
    pageleap_topology *topology;
    OK(pageleap_topology_read(&topology));
    size_t nodes = pageleap_topology_node_count(topology), cpus = 0;
    CHECK(nodes > 0);
    for (size_t i = 0; i < nodes; i++) {
        pageleap_node node = PAGELEAP_INIT(pageleap_node);
        pageleap_huge_pages huge = PAGELEAP_INIT(pageleap_huge_pages);
        pageleap_access access = PAGELEAP_INIT(pageleap_access);
        uint32_t first_cpu = UINT32_MAX;
        size_t count = 0, initiators = 99;
        OK(pageleap_topology_node(topology, i, &node));
        CHECK(node.size == sizeof node && node.free_bytes <= node.total_bytes);
        CHECK(node.is_allowed == pageleap_topology_is_allowed(topology, node.id));
        /* Whether the node is allowed is known wherever /proc is mounted. */
        CHECK(pageleap_topology_knows_allowed_nodes(topology));
        OK(pageleap_topology_cpus(topology, node.id, &first_cpu, 1, &count));
        CHECK(count == node.cpu_count && (count == 0) == (first_cpu == UINT32_MAX));
        cpus += count;
        OK(pageleap_topology_huge_pages(topology, node.id, 2 << 20, &huge));
        /* How many there are, and how many are free, others may change between the two reads. */
        CHECK(huge.page_bytes == 2 << 20);
        OK(pageleap_topology_access(topology, node.id, 0, &access));
        OK(pageleap_topology_initiators(topology, node.id, 0, NULL, 0, &initiators));
        CHECK(initiators <= nodes);
        uint32_t near = pageleap_topology_distance(topology, node.id, node.id);
        CHECK(near == 0 || near == 10 || nodes > 1);
    }
    CHECK(cpus > 0);
    uint32_t all[64];
    size_t found = 0;
    OK(pageleap_topology_parse_nodes(topology, "all", all, 64, &found));
    CHECK(found >= 1 && found <= nodes);
    FAILS(PAGELEAP_BAD_ARGUMENT, "`x`",
          pageleap_topology_parse_nodes(topology, "x", all, 64, &found));
    FAILS(PAGELEAP_UNKNOWN_NODE, "4000", pageleap_topology_cpus(topology, 4000, NULL, 0, &found));
    FAILS(PAGELEAP_BAD_ARGUMENT, "999 of", pageleap_topology_node(topology, 999, NULL));
    for (size_t i = 0; pageleap_topology_warning(topology, i) != NULL; i++) {
        printf("warning: %s\n", pageleap_topology_warning(topology, i));
    }
    pageleap_topology_free(topology);
}

/* Whether memory that no pool owns moves in place here. */
static bool moves_in_place;

static void see_what_is_allowed(void) {
    pageleap_capabilities *found;
    pageleap_demand demand = PAGELEAP_INIT(pageleap_demand);
    demand.bytes = BYTES;
    demand.try_leap = true;
    OK(pageleap_probe(&demand, &found));
    size_t count = pageleap_capabilities_count(found);
    CHECK(count > 20);
    for (size_t i = 0; i < count; i++) {
        pageleap_finding finding = PAGELEAP_INIT(pageleap_finding);
        OK(pageleap_capabilities_finding(found, i, &finding));
        CHECK(strlen(finding.topic) > 0 && strlen(finding.summary) > 0);
        CHECK(!finding.blocks);
        bool good = finding.state == PAGELEAP_WORKS || finding.state == PAGELEAP_LIMITED;
        CHECK(good == pageleap_capabilities_has(found, finding.topic));
        for (size_t r = 0; r < finding.remedy_count; r++) {
            pageleap_remedy remedy = PAGELEAP_INIT(pageleap_remedy);
            OK(pageleap_capabilities_remedy(found, i, r, &remedy));
            CHECK(strlen(remedy.who) > 0 && strlen(remedy.line) > 0);
        }
    }
    CHECK(pageleap_capabilities_has(found, "leap") &&
          !pageleap_capabilities_has(found, "no such topic"));
    moves_in_place = pageleap_capabilities_has(found, "memory-in-place");
    pageleap_capabilities_free(found);
}

struct told {
    uint64_t done, total, calls;
};

static void pool_progress(void *data, uint64_t done, uint64_t total) {
    struct told *told = data;
    told->done = done;
    told->total = total;
    told->calls++;
}

static int job_progress(void *data, const pageleap_progress *progress) {
    struct told *told = data;
    CHECK(progress->bytes_migrated <= progress->bytes_total &&
          progress->bytes_migrated >= told->done);
    told->done = progress->bytes_migrated;
    told->total = progress->bytes_total;
    told->calls++;
    return 0;
}

static int stop_at_once(void *data, const pageleap_progress *progress) {
    (void)data;
    (void)progress;
    return 1;
}

static void fill(uint64_t *words, uint64_t seed) {
    for (size_t i = 0; i < BYTES / 8; i++) {
        words[i] = seed + i * 3;
    }
}

static void check(const uint64_t *words, uint64_t seed) {
    for (size_t i = 0; i < BYTES / 8; i++) {
        CHECK(words[i] == seed + i * 3);
    }
}

static void read_the_report(const pageleap_report *report, const pageleap_region *region,
                            uint32_t engine) {
    pageleap_report_figures figures = PAGELEAP_INIT(pageleap_report_figures);
    pageleap_region_info info = PAGELEAP_INIT(pageleap_region_info);
    OK(pageleap_region_describe(region, &info));
    OK(pageleap_report_get_figures(report, &figures));
    CHECK(figures.ended == PAGELEAP_COMPLETED &&
          strcmp(figures.ended_text, "every page was dealt with") == 0);
    CHECK(figures.pages_migrated == PAGES && figures.bytes == BYTES &&
          figures.bytes_copied >= BYTES);
    CHECK(figures.migrate_ns > 0 && figures.threads >= 1 && strlen(figures.engine_reason) > 0);
    CHECK(figures.run_count == 1 && figures.engine_use_count >= 1);
    CHECK(engine == PAGELEAP_ENGINE_AUTO || (uint32_t)figures.engine == engine);
    pageleap_page_run run = PAGELEAP_INIT(pageleap_page_run);
    OK(pageleap_report_run(report, 0, &run));
    CHECK(run.source == PAGELEAP_SOURCE_REGION && run.source_id == info.id);
    CHECK(run.offset == 0 && run.length == BYTES && run.outcome == PAGELEAP_MIGRATED);
    CHECK(run.reason == PAGELEAP_REASON_NONE && run.reason_errno == 0 &&
          strlen(run.reason_text) == 0);
    pageleap_copy_use copied = PAGELEAP_INIT(pageleap_copy_use);
    CHECK(figures.copy_use_count == 1);
    OK(pageleap_report_get_copy_use(report, 0, &copied));
    CHECK(copied.step_bytes > 0 && copied.tried <= 1 && copied.by <= PAGELEAP_COPY_MEMCPY);
    FAILS(PAGELEAP_BAD_ARGUMENT, "1 of 1 uses", pageleap_report_get_copy_use(report, 1, &copied));
    pageleap_engine_use use = PAGELEAP_INIT(pageleap_engine_use);
    OK(pageleap_report_get_engine_use(report, 0, &use));
    CHECK(use.source == PAGELEAP_SOURCE_REGION && use.source_id == info.id &&
          use.pages <= PAGES && strlen(use.why) > 0);
    CHECK(engine == PAGELEAP_ENGINE_AUTO || (uint32_t)use.engine == engine);
    FAILS(PAGELEAP_BAD_ARGUMENT, "1 of 1 runs", pageleap_report_run(report, 1, &run));
    CHECK(pageleap_report_warning(report, figures.warning_count) == NULL);
    pageleap_warning warning = PAGELEAP_INIT(pageleap_warning);
    for (size_t i = 0; i < figures.warning_count; i++) {
        OK(pageleap_report_get_warning(report, i, &warning));
        CHECK(warning.text == pageleap_report_warning(report, i));
        CHECK((warning.call != NULL) == (warning.error_number != 0));
        CHECK(warning.kind != PAGELEAP_WARNING_OTHER);
    }
    FAILS(PAGELEAP_BAD_ARGUMENT, "warnings",
          pageleap_report_get_warning(report, figures.warning_count, &warning));
    pageleap_call_use called = PAGELEAP_INIT(pageleap_call_use);
    CHECK(figures.call_use_count >= 1);
    for (size_t i = 0; i < figures.call_use_count; i++) {
        OK(pageleap_report_get_call_use(report, i, &called));
        CHECK(called.count > 0 && strstr(pageleap_report_text(report), called.name) != NULL);
    }
    FAILS(PAGELEAP_BAD_ARGUMENT, "calls",
          pageleap_report_get_call_use(report, figures.call_use_count, &called));
    CHECK(figures.windows_first <= figures.windows && figures.splits <= figures.disturbed_copies);
    CHECK(figures.mappings_added == 0);
    CHECK(figures.migrate_cpu_ns > 0 && figures.recycle_cpu_ns > 0);
    CHECK(!pageleap_thread_is_ours());
    CHECK(strstr(pageleap_report_text(report), "completed after") != NULL);
    const char *json = pageleap_report_json(report);
    CHECK(json[0] == '{' && strstr(json, "\"ended\":\"completed\"") != NULL &&
          strchr(json, '\n') == NULL);
    CHECK(strstr(json, pageleap_engine_name(figures.engine)) != NULL);
}

/* A region that lies in one of two pools. */
struct scene {
    uint32_t nodes[2];
    pageleap_pool *near, *far;
    pageleap_region *region;
    uint64_t *words;
    /* The pool that has most of the region's pages. */
    const pageleap_pool *home;
};

/* The pool to leap to. */
static const pageleap_pool *away(const struct scene *scene) {
    return scene->home == scene->near ? scene->far : scene->near;
}

/* The whole region, to the other pool. */
static pageleap_range all_of(const struct scene *scene) {
    pageleap_range all = PAGELEAP_INIT(pageleap_range);
    all.region = scene->region;
    all.pool = away(scene);
    return all;
}

static void make_pools(struct scene *scene) {
    two_nodes(scene->nodes);
    scene->far = pool_on(scene->nodes[1], BYTES + BYTES / 2);
    struct told told = {0};
    pageleap_pool_options options = PAGELEAP_INIT(pageleap_pool_options);
    options.progress = pool_progress;
    options.progress_data = &told;
    options.threads = 1;
    pageleap_pool *near;
    OK(pageleap_pool_new(PAGELEAP_ON(scene->nodes[0]), BYTES, &options, &near));
    CHECK(told.calls > 0 && told.done == told.total);
    CHECK(pageleap_pool_bytes(near) == BYTES && pageleap_pool_free_bytes(near) == BYTES);
    CHECK(pageleap_pool_free_bytes_on(near, scene->nodes[0]) == BYTES &&
          pageleap_pool_free_bytes_on(near, 4000) == 0);
    CHECK(pageleap_pool_page_size(near) == PAGELEAP_PAGE_4K &&
          pageleap_page_bytes(PAGELEAP_PAGE_2M) == 2 << 20);
    uint32_t its_node = 99;
    size_t its_nodes = 0;
    OK(pageleap_pool_nodes(near, &its_node, 1, &its_nodes));
    CHECK(its_nodes == 1 && its_node == scene->nodes[0]);
    pageleap_verification right = PAGELEAP_INIT(pageleap_verification);
    OK(pageleap_pool_verify(near, &right));
    CHECK(right.pages == PAGES && right.misplaced == 0 && right.absent == 0);
    scene->near = near;
    scene->home = near;
}

static void make_the_region(struct scene *scene) {
    pageleap_region *region;
    OK(pageleap_region_new(scene->near, NULL, BYTES, &region));
    uint64_t *words = pageleap_region_start(region);
    CHECK(pageleap_region_length(region) == BYTES && words[0] == 0 && words[BYTES / 8 - 1] == 0);
    fill(words, 1);
    void *part;
    OK(pageleap_region_view(region, 4096, 100, &part));
    CHECK(part == (char *)words + 4096);
    pageleap_node_pages where[2];
    size_t its_nodes = 0;
    OK(pageleap_region_placement(region, where, 2, &its_nodes));
    CHECK(its_nodes == 1 && where[0].node == scene->nodes[0] && where[0].pages == PAGES);
    scene->region = region;
    scene->words = words;
}

static void leap_with_progress(struct scene *scene) {
    pageleap_range all = all_of(scene);
    pageleap_job *job;
    pageleap_report *report;
    OK(pageleap_job_start(&all, 1, NULL, &job));
    struct told told = {0};
    OK(pageleap_job_wait_with_progress(job, 1, job_progress, &told, &report));
    CHECK(told.calls >= 1 && told.done == BYTES && told.total == BYTES);
    read_the_report(report, scene->region, PAGELEAP_ENGINE_AUTO);
    pageleap_report_free(report);
    struct pollfd ready = { .fd = pageleap_job_fd(job), .events = POLLIN };
    CHECK(poll(&ready, 1, 0) == 1 && pageleap_job_is_finished(job));
    pageleap_progress progress = PAGELEAP_INIT(pageleap_progress);
    OK(pageleap_job_progress(job, &progress));
    CHECK(progress.phase == PAGELEAP_FINISHED && progress.bytes_copied >= BYTES);
    OK(pageleap_job_wait(job, &report)); /* any number of times */
    pageleap_report_free(report);
    pageleap_job_free(job);
    check(scene->words, 1);
    CHECK(pageleap_pool_free_bytes(scene->home) == pageleap_pool_bytes(scene->home));
    scene->home = all.pool;
    pageleap_verification right = PAGELEAP_INIT(pageleap_verification);
    OK(pageleap_region_verify(scene->region, &right));
    CHECK(right.pages == PAGES && right.misplaced == 0);
}

/* A job in the calling thread; a context keeps what it and the next one need. */
static void leap_here(struct scene *scene) {
    pageleap_migration_context *context;
    OK(pageleap_migration_context_new(&context));
    pageleap_job_options options = PAGELEAP_INIT(pageleap_job_options);
    options.context = context;
    for (int i = 0; i < 2; i++) {
        pageleap_range all = all_of(scene);
        pageleap_report *report;
        OK(pageleap_job_run(&all, 1, &options, &report));
        read_the_report(report, scene->region, PAGELEAP_ENGINE_AUTO);
        pageleap_report_free(report);
        check(scene->words, 1);
        CHECK(pageleap_pool_free_bytes(scene->home) == pageleap_pool_bytes(scene->home));
        scene->home = all.pool;
    }
    pageleap_migration_context_free(context);
}

static void leap_with(struct scene *scene, uint32_t engine) {
    pageleap_job_options chosen = PAGELEAP_INIT(pageleap_job_options);
    chosen.engine = engine;
    chosen.threads = 2;
    chosen.timeout_ns = 60000000000;
    chosen.wait_budget_ns = 500000;
    chosen.area_bytes = 1 << 20;
    pageleap_range all = all_of(scene);
    pageleap_job *job;
    pageleap_report *report;
    pageleap_status started = pageleap_job_start(&all, 1, &chosen, &job);
    if (started == PAGELEAP_ENGINE_REFUSED && engine != PAGELEAP_ENGINE_AUTO) {
        printf("%s: %s\n", pageleap_engine_name(engine), pageleap_last_error());
        CHECK(job == NULL);
        return;
    }
    OK(started);
    OK(pageleap_job_wait(job, &report));
    struct pollfd ended = { .fd = pageleap_job_fd(job), .events = POLLIN };
    CHECK(poll(&ended, 1, 0) == 1);
    read_the_report(report, scene->region, engine);
    pageleap_report_figures asked = PAGELEAP_INIT(pageleap_report_figures);
    OK(pageleap_report_get_figures(report, &asked));
    CHECK(asked.threads == 2 && asked.area_bytes == 1 << 20);
    pageleap_report_free(report);
    pageleap_job_free(job);
    check(scene->words, 1);
    scene->home = all.pool;
}

/* A guard keeps its page. */
static void keep_what_is_guarded(struct scene *scene) {
    leap(scene->region, away(scene), PAGELEAP_ENGINE_AUTO);
    scene->home = away(scene);
    pageleap_range all = all_of(scene);
    pageleap_guard *guard;
    OK(pageleap_region_pin(scene->region, 5 * 4096 + 7, 1, &guard));
    pageleap_job_options impatient = PAGELEAP_INIT(pageleap_job_options);
    impatient.pin_patience_ns = -1;
    pageleap_job *job;
    pageleap_report *report;
    OK(pageleap_job_start(&all, 1, &impatient, &job));
    OK(pageleap_job_wait(job, &report));
    pageleap_report_figures figures = PAGELEAP_INIT(pageleap_report_figures);
    OK(pageleap_report_get_figures(report, &figures));
    CHECK(figures.pages_busy == 1 && figures.pages_migrated == PAGES - 1);
    pageleap_page_run run = PAGELEAP_INIT(pageleap_page_run);
    OK(pageleap_report_run(report, 1, &run));
    CHECK(run.offset == 5 * 4096 && run.length == 4096 && run.outcome == PAGELEAP_BUSY);
    CHECK(run.reason == PAGELEAP_REASON_GUARDED && strstr(run.reason_text, "guard") != NULL);
    CHECK(strstr(pageleap_report_json(report), "{\"code\":\"guarded\"") != NULL);
    pageleap_report_free(report);
    pageleap_job_free(job);
    FAILS(PAGELEAP_PINNED, "guard", pageleap_region_discard(scene->region, 4096, 8 * 4096));
    pageleap_guard_drop(guard);
    scene->home = all.pool;
}

/* Cancels jobs in each way, and starts a second job on the same range. */
static void cancel_jobs(struct scene *scene) {
    pageleap_range all = all_of(scene);
    pageleap_job_options slow = PAGELEAP_INIT(pageleap_job_options), brief = slow;
    slow.rate_limit_bytes_per_s = 1; /* it does not end by itself */
    pageleap_job *job;
    pageleap_report *report;
    OK(pageleap_job_start(&all, 1, &slow, &job));
    pageleap_job *second = job;
    FAILS(PAGELEAP_RANGE_BUSY, "in use by a running job",
          pageleap_job_start(&all, 1, NULL, &second));
    CHECK(second == NULL);
    OK(pageleap_job_cancel(job));
    OK(pageleap_job_wait_until_moved(job));
    OK(pageleap_job_wait(job, &report));
    pageleap_report_figures figures = PAGELEAP_INIT(pageleap_report_figures);
    OK(pageleap_report_get_figures(report, &figures));
    CHECK(figures.ended == PAGELEAP_CANCELLED && figures.pages_migrated < PAGES);
    pageleap_report_free(report);
    pageleap_job_free(job);
    OK(pageleap_job_start(&all, 1, &slow, &job));
    OK(pageleap_job_wait_with_progress(job, 1, stop_at_once, NULL, NULL));
    pageleap_job_free(job);
    brief.timeout_ns = 1;
    OK(pageleap_job_start(&all, 1, &brief, &job));
    OK(pageleap_job_wait(job, &report));
    OK(pageleap_report_get_figures(report, &figures));
    CHECK(figures.ended == PAGELEAP_TIMED_OUT);
    pageleap_report_free(report);
    pageleap_job_free(job);
    OK(pageleap_job_start(&all, 1, &slow, &job));
    pageleap_job_free(job); /* cancels */
    check(scene->words, 1);

    OK(pageleap_job_start(&all, 1, NULL, &job));
    OK(pageleap_job_wait(job, NULL));
    pageleap_job_free(job);
    scene->home = all.pool;
}

/* Two ranges in one job, one of them without a length. */
static void leap_two_ranges(struct scene *scene) {
    pageleap_range two[2] = { all_of(scene), all_of(scene) };
    two[0].length = 16 * 4096;
    two[1].offset = 32 * 4096;
    two[1].length = BYTES - two[1].offset;
    pageleap_job *job;
    pageleap_report *report;
    OK(pageleap_job_start(two, 2, NULL, &job));
    OK(pageleap_job_wait(job, &report));
    pageleap_report_figures figures = PAGELEAP_INIT(pageleap_report_figures);
    OK(pageleap_report_get_figures(report, &figures));
    CHECK(figures.pages_migrated == PAGES - 16);
    pageleap_report_free(report);
    pageleap_job_free(job);
    two[1].length = 0; /* computed wrongly, perhaps */
    FAILS(PAGELEAP_BAD_RANGE, "empty", pageleap_job_start(two, 2, NULL, &job));
    check(scene->words, 1);
    scene->home = away(scene);
}

/* Gives memory back, and takes it again. */
static void discard_and_back(const struct scene *scene) {
    void *part;
    OK(pageleap_region_discard(scene->region, 0, 4096));
    FAILS(PAGELEAP_BAD_RANGE, "unbacked", pageleap_region_view(scene->region, 0, 8, &part));
    OK(pageleap_region_back(scene->region, 0, 4096, scene->home, NULL));
    CHECK(scene->words[0] == 0 && scene->words[512] == 1 + 512 * 3);

    /* Pages of a running job, which leaves them. */
    const uint64_t minute = 60000000000;
    const size_t last = BYTES - 4096;
    pageleap_range all = all_of(scene);
    pageleap_job_options slow = PAGELEAP_INIT(pageleap_job_options);
    slow.rate_limit_bytes_per_s = 1; /* it does not end by itself */
    pageleap_job *job;
    OK(pageleap_job_start(&all, 1, &slow, &job));
    OK(pageleap_region_discard_within(scene->region, last, 4096, minute));
    OK(pageleap_region_back_within(scene->region, last, 4096, scene->home, NULL, UINT64_MAX));
    CHECK(scene->words[last / 8] == 0);
    pageleap_job_free(job);
    FAILS(PAGELEAP_BAD_RANGE, "memory already",
          pageleap_region_back_within(scene->region, last, 4096, scene->home, NULL, 0));
    OK(pageleap_job_start(&all, 1, NULL, &job));
    OK(pageleap_job_wait(job, NULL));
    pageleap_job_free(job);
    CHECK(scene->words[512] == 1 + 512 * 3 && scene->words[last / 8] == 0);
}

static void grow_another_region(const struct scene *scene) {
    pageleap_region *growing;
    void *part;
    OK(pageleap_region_reserve(1 << 30, PAGELEAP_PAGE_4K, &growing));
    CHECK(pageleap_region_length(growing) == 0);
    OK(pageleap_region_grow(growing, 10000, scene->far, NULL));
    CHECK(pageleap_region_length(growing) == 3 * 4096);
    memset(pageleap_region_start(growing), 7, 3 * 4096);
    OK(pageleap_region_grow(growing, 5 * 4096, scene->far, PAGELEAP_ON(scene->nodes[1])));
    CHECK(((char *)pageleap_region_start(growing))[10000] == 7);
    OK(pageleap_region_grow(growing, 9 * 4096, NULL, NULL));
    FAILS(PAGELEAP_BAD_RANGE, "unbacked", pageleap_region_view(growing, 8 * 4096, 8, &part));
    OK(pageleap_region_back(growing, 7 * 4096, 2 * 4096, scene->far, NULL));
    OK(pageleap_region_view(growing, 8 * 4096, 8, &part));
    CHECK(*(uint64_t *)part == 0);
    pageleap_region_free(growing);
}

/* Memory that no pool owns. On a machine with one node it gets other frames of that node. */
static void leap_memory(const struct scene *scene) {
    size_t bytes = 4 << 20;
    uint64_t *words = malloc(bytes);
    CHECK(words);
    for (size_t i = 0; i < bytes / 8; i++) {
        words[i] = i;
    }
    pageleap_reserve *reserve;
    FAILS(PAGELEAP_BAD_ARGUMENT, "2m", pageleap_reserve_new(scene->nodes[1], 1, PAGELEAP_PAGE_2M,
                                                            &reserve));
    CHECK(reserve == NULL && pageleap_reserve_free_bytes(NULL) == 0);
    OK(pageleap_reserve_new(scene->nodes[1], bytes, PAGELEAP_PAGE_4K, &reserve));
    CHECK(pageleap_reserve_free_bytes(reserve) == bytes);
    const pageleap_reserve *reserves[] = { reserve };
    pageleap_memory_options options = PAGELEAP_INIT(pageleap_memory_options);
    options.renew = true;
    options.reserves = reserves;
    options.reserve_count = 1;
    options.wait_budget_ns = 500000;
    pageleap_memory_range range = PAGELEAP_INIT(pageleap_memory_range);
    range.address = words;
    range.length = bytes;
    pageleap_job *job;
    FAILS(PAGELEAP_BAD_ARGUMENT, "place", pageleap_leap_memory(&range, 1, NULL, &job));
    const uint32_t nodes[] = { scene->nodes[1] };
    pageleap_placement place = PAGELEAP_INIT(pageleap_placement);
    place.nodes = nodes;
    place.node_count = 1;
    place.has_page_tables_node = true;
    place.page_tables_node = scene->nodes[1];
    range.place = &place;
    FAILS(PAGELEAP_BAD_ARGUMENT, "no range", pageleap_leap_memory(NULL, 0, NULL, &job));
    options.engine = PAGELEAP_ENGINE_PRECOPY;
    FAILS(PAGELEAP_ENGINE_REFUSED, "regions", pageleap_leap_memory(&range, 1, &options, &job));
    for (options.engine = PAGELEAP_ENGINE_AUTO;; options.engine = PAGELEAP_ENGINE_KERNEL) {
        OK(pageleap_leap_memory(&range, 1, &options, &job));
        pageleap_report *report;
        OK(pageleap_job_wait(job, &report));
        pageleap_report_figures figures = PAGELEAP_INIT(pageleap_report_figures);
        OK(pageleap_report_get_figures(report, &figures));
        CHECK(figures.ended == PAGELEAP_COMPLETED);
        /* Page tables stay where they are. */
        CHECK(figures.warning_count == 1 &&
              strstr(pageleap_report_warning(report, 0), "page tables stay") != NULL &&
              pageleap_report_warning(report, 1) == NULL);
        CHECK(strstr(pageleap_report_json(report), "\"warnings\":[\"page tables stay") != NULL);
        bool in_place = moves_in_place && options.engine == PAGELEAP_ENGINE_AUTO;
        CHECK(figures.engine ==
              (in_place ? PAGELEAP_ENGINE_UFFD_MOVE : PAGELEAP_ENGINE_KERNEL));
        /* The whole pages of it. */
        CHECK(!in_place || figures.pages_migrated >= bytes / 4096 - 1);
        pageleap_report_free(report);
        pageleap_job_free(job);
        if (options.engine == PAGELEAP_ENGINE_KERNEL) {
            break;
        }
    }
    OK(pageleap_reserve_refill(reserve));
    CHECK(pageleap_reserve_free_bytes(reserve) == bytes);
    for (size_t i = 0; i < bytes / 8; i++) {
        CHECK(words[i] == i);
    }
    pageleap_reserve_free(reserve);
    pageleap_reserve_free(NULL);
    free(words);
}

/* Faults that are not the library's end the process, as without the library. A sanitizer has a
 * handler of its own. */
static void leave_other_faults_alone(void) {
#ifndef __SANITIZE_ADDRESS__
    OK(pageleap_install_fault_handler());
    pid_t child = fork();
    if (child == 0) {
        volatile char *volatile nowhere = (volatile char *)64;
        *nowhere = 1;
        _exit(0);
    }
    int status;
    CHECK(waitpid(child, &status, 0) == child && WIFSIGNALED(status) &&
          WTERMSIG(status) == SIGSEGV);
#endif
}

int main(void) {
    see_the_version();
    CHECK(strcmp(pageleap_last_error(), "") == 0);
    see_the_machine();
    see_what_is_allowed();

    struct scene scene = {0};
    make_pools(&scene);
    make_the_region(&scene);
    leap_with_progress(&scene);
    leap_here(&scene);
    for (uint32_t engine = PAGELEAP_ENGINE_AUTO; engine <= PAGELEAP_ENGINE_STOP_COPY; engine++) {
        leap_with(&scene, engine);
    }
    keep_what_is_guarded(&scene);
    cancel_jobs(&scene);
    leap_two_ranges(&scene);
    discard_and_back(&scene);
    grow_another_region(&scene);
    leap_memory(&scene);
    leave_other_faults_alone();

    /* Handles in any order. */
    pageleap_pool_free(scene.near);
    CHECK(scene.words[512] == 1 + 512 * 3);
    pageleap_region_free(scene.region);
    pageleap_pool_free(scene.far);
    return 0;
}
