/*
 * An arena of jemalloc that leaps: threads allocate, write, read and free objects of it while it
 * moves back and forth between two nodes.
 *
 *     jemalloc_arena [POOL_MB [SECONDS [FROM [TO]]]]
 *
 * The defaults are 256 and 6, and the first two nodes that may be used. JEMALLOC_ARENA_ENGINE in the
 * environment names the engine; else it is auto. Under valgrind it has to be mprotect: with the others
 * a thread that waits for a page keeps valgrind's lock, which the job needs to go on.
 *
 * The arena takes its memory from a region, by extent hooks. The region grows with the arena, and
 * memory that the arena has not used for a while goes back to the pool (decommit is discard, commit
 * is back). The region moves part by part. A thread that gives back or takes memory of a moving
 * part waits for that part. Memory by which the arena grows during a leap comes from the
 * destination.
 * Each object is filled with words that follow from its stamp, and checked when it is touched.
 *
 * The arena is for objects that are allocated by mallocx(). The library itself allocates by
 * malloc(), and its memory must not lie in pages that it moves. So a thread that calls the library
 * must not have such an arena as its own ("thread.arena").
 *
 * Exit code: 0 if all objects were right, 1 if one was wrong, 2 if a call failed.
 */
#include <pageleap.h>

#include <errno.h>
#include <jemalloc/jemalloc.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { THREADS = 3, PAGE = 4096, LARGEST = 128 << 10, PART = 8 << 20 };

/* The contents of an object: length in words, stamp, and words that follow from the stamp. */
struct object {
    uint32_t words;
    uint32_t stamp;
    uint64_t word[];
};

static pageleap_pool *pools[2];
static pageleap_region *region;
static size_t capacity;
/* Excludes a leap that begins while memory is being taken: one of the two sees the other. */
static pthread_mutex_t books = PTHREAD_MUTEX_INITIALIZER;
static size_t home;
static unsigned arena;
static size_t slot_count;
static atomic_ullong operations, refused, taken_back, given_back, waits;
static atomic_bool stop, wrong;

static void die(const char *what, int error) {
    fprintf(stderr, "jemalloc_arena: %s: %s\n", what,
            error != 0 ? strerror(error) : pageleap_last_error());
    exit(2);
}

static void pause_a_moment(void) { nanosleep(&(struct timespec){ .tv_nsec = 50000 }, NULL); }

static size_t offset_of(void *address) {
    return (size_t)((char *)address - (char *)pageleap_region_start(region));
}

/* ---- The hooks ---- */

/* Hooks run in the thread that needs memory. They refuse by returning NULL or true. */

static void *extent_alloc(extent_hooks_t *hooks, void *at, size_t size, size_t alignment,
                          bool *zero, bool *commit, unsigned index) {
    (void)hooks, (void)index;
    void *extent = NULL;
    pthread_mutex_lock(&books);
    uintptr_t start = (uintptr_t)pageleap_region_start(region);
    uintptr_t next = start + pageleap_region_length(region);
    size_t first = (size_t)(((next + alignment - 1) & ~(uintptr_t)(alignment - 1)) - start);
    /* The gap between two extents has addresses, but no memory. */
    if ((at == NULL || offset_of(at) == first) && first + size <= capacity &&
        pageleap_region_grow(region, first, NULL, NULL) == PAGELEAP_OK &&
        pageleap_region_grow(region, first + size, pools[home], NULL) == PAGELEAP_OK) {
        extent = (char *)pageleap_region_start(region) + first;
        *zero = *commit = true;
    }
    pthread_mutex_unlock(&books);
    return extent;
}

static pageleap_status change_within(size_t at, size_t length, bool take, uint64_t timeout_ns) {
    pthread_mutex_lock(&books);
    pageleap_status status =
        take ? pageleap_region_back_within(region, at, length, pools[home], NULL, timeout_ns)
             : pageleap_region_discard_within(region, at, length, timeout_ns);
    pthread_mutex_unlock(&books);
    return status;
}

/* Gives an extent memory again, or takes it away. Waits for the parts that are moving. */
static bool change(void *extent, size_t offset, size_t length, bool take) {
    size_t at = offset_of(extent) + offset;
    pageleap_status status = change_within(at, length, take, 0);
    if (status == PAGELEAP_RANGE_BUSY) {
        atomic_fetch_add(&waits, 1);
        status = change_within(at, length, take, UINT64_MAX);
    }
    if (status == PAGELEAP_OK) {
        atomic_fetch_add(take ? &taken_back : &given_back, 1);
    } else if (!take) {
        die("discard", 0); /* too many mappings: part of the extent may have no memory any more */
    }
    return status != PAGELEAP_OK;
}

static bool extent_commit(extent_hooks_t *hooks, void *extent, size_t size, size_t offset,
                          size_t length, unsigned index) {
    (void)hooks, (void)size, (void)index;
    return change(extent, offset, length, true);
}

static bool extent_decommit(extent_hooks_t *hooks, void *extent, size_t size, size_t offset,
                            size_t length, unsigned index) {
    (void)hooks, (void)size, (void)index;
    return change(extent, offset, length, false);
}

static bool extent_split(extent_hooks_t *hooks, void *extent, size_t size, size_t left,
                         size_t right, bool committed, unsigned index) {
    (void)hooks, (void)extent, (void)size, (void)left, (void)right, (void)committed, (void)index;
    return false;
}

static bool extent_merge(extent_hooks_t *hooks, void *left, size_t left_size, void *right,
                         size_t right_size, bool committed, unsigned index) {
    (void)hooks, (void)left, (void)left_size, (void)right, (void)right_size, (void)committed,
        (void)index;
    return false;
}

/* There is no dalloc: memory that the arena does not need stays its own, decommitted. */
static extent_hooks_t hooks = {
    .alloc = extent_alloc,
    .commit = extent_commit,
    .decommit = extent_decommit,
    .split = extent_split,
    .merge = extent_merge,
};

static void control(const char *name, void *old, size_t *old_size, void *new, size_t new_size) {
    int error = mallctl(name, old, old_size, new, new_size);
    if (error != 0) {
        die(name, error);
    }
}

static void arena_control(const char *what, void *new, size_t new_size) {
    char name[64];
    snprintf(name, sizeof name, "arena.%u.%s", arena, what);
    control(name, NULL, NULL, new, new_size);
}

static void make_the_arena(void) {
    extent_hooks_t *ours = &hooks;
    size_t size = sizeof arena;
    control("arenas.create", &arena, &size, &ours, sizeof ours);
    /* The most that the arena grows by at a time, and how long it keeps memory that it does not
     * use. */
    size_t step = 4 << 20;
    ssize_t patience_ms = 200;
    arena_control("retain_grow_limit", &step, sizeof step);
    arena_control("dirty_decay_ms", &patience_ms, sizeof patience_ms);
}

/* ---- The threads ---- */

static uint64_t next(uint64_t *random) {
    *random ^= *random << 13;
    *random ^= *random >> 7;
    *random ^= *random << 17;
    return *random;
}

static uint64_t word_of(uint32_t stamp, size_t place) {
    return (((uint64_t)stamp << 20) + place) * 0x9e3779b97f4a7c15u;
}

/* The thread's note of an object, outside of the arena. */
struct slot {
    struct object *object;
    uint32_t words, stamp;
};

static void fill(struct slot *slot, size_t bytes, uint32_t stamp) {
    struct object *object = slot->object;
    slot->words = object->words = (uint32_t)((bytes - sizeof *object) / 8);
    slot->stamp = object->stamp = stamp;
    for (size_t i = 0; i < object->words; i++) {
        object->word[i] = word_of(stamp, i);
    }
}

/* Checks an object, of which `bytes` bytes are left. */
static void check(const struct slot *slot, size_t bytes) {
    const struct object *object = slot->object;
    size_t left = (bytes - sizeof *object) / 8;
    bool right = object->stamp == slot->stamp && object->words == slot->words;
    for (size_t i = 0; right && i < slot->words && i < left; i++) {
        right = object->word[i] == word_of(slot->stamp, i);
    }
    if (!right && !atomic_exchange(&wrong, true)) {
        fprintf(stderr, "jemalloc_arena: an object of %u words at %p is wrong\n", slot->words,
                (const void *)object);
    }
}

static void *work(void *number) {
    uint64_t random = ((uint64_t)(uintptr_t)number + 1) * 0x2545f4914f6cdd1du;
    unsigned cache;
    size_t size = sizeof cache;
    control("tcache.create", &cache, &size, NULL, 0);
    const int flags = MALLOCX_ARENA(arena) | MALLOCX_TCACHE(cache);
    struct slot *slots = calloc(slot_count, sizeof *slots);
    for (uint32_t stamp = 1; slots != NULL && !atomic_load(&stop); stamp++) {
        struct slot *slot = &slots[next(&random) % slot_count];
        uint64_t choice = next(&random);
        /* Most objects are small; some have an extent of their own. */
        size_t largest = choice % 64 == 0 ? LARGEST : 2048;
        size_t bytes = sizeof(struct object) + (choice >> 16) % (largest - sizeof(struct object));
        struct object *old = slot->object, *made = NULL;
        if (old != NULL) {
            check(slot, SIZE_MAX);
        }
        if (old != NULL && (choice >> 8 & 3) == 0) {
            slot->object = NULL;
            dallocx(old, flags);
        } else {
            made = old != NULL ? rallocx(old, bytes, flags) : mallocx(bytes, flags);
            atomic_fetch_add(&refused, made == NULL);
        }
        if (made != NULL) {
            slot->object = made;
            if (old != NULL) {
                check(slot, bytes); /* the bytes that rallocx has kept */
            }
            fill(slot, bytes, stamp);
        }
        atomic_fetch_add(&operations, 1);
    }
    for (size_t i = 0; slots != NULL && i < slot_count; i++) {
        if (slots[i].object != NULL) {
            check(&slots[i], SIZE_MAX);
            dallocx(slots[i].object, flags);
        }
    }
    free(slots);
    control("tcache.destroy", NULL, NULL, &cache, sizeof cache);
    return NULL;
}

/* ---- The leaps ---- */

static uint32_t wanted_engine(void) {
    const char *name = getenv("JEMALLOC_ARENA_ENGINE");
    for (uint32_t engine = 0; name != NULL && engine < 8; engine++) {
        if (strcmp(pageleap_engine_name(engine), name) == 0) {
            return engine;
        }
    }
    return PAGELEAP_ENGINE_AUTO;
}

/* Moves all memory of the arena to the other pool, part by part. Returns how many pages moved. */
static uint64_t leap(void) {
    uint64_t moved = 0;
    pthread_mutex_lock(&books);
    home = 1 - home; /* memory that is taken from now on need not move */
    size_t end = pageleap_region_length(region);
    pthread_mutex_unlock(&books);
    for (size_t first = 0; first < end; first += PART) {
        pageleap_range range = PAGELEAP_INIT(pageleap_range);
        range.region = region;
        range.offset = first;
        range.length = end - first < PART ? end - first : PART;
        range.pool = pools[home];
        pageleap_job_options options = PAGELEAP_INIT(pageleap_job_options);
        options.engine = wanted_engine();
        pageleap_job *job;
        pageleap_report *report;
        pageleap_status status = pageleap_job_start(&range, 1, &options, &job);
        /* An extent of the part is being taken or given back. Or the arena has grown, and other
         * extents must be given back first: pools should be larger than the memory that the
         * arena uses. */
        for (int tries = 0;
             tries < 100000 && (status == PAGELEAP_RANGE_BUSY || status == PAGELEAP_POOL_EXHAUSTED);
             tries++) {
            pause_a_moment();
            status = pageleap_job_start(&range, 1, &options, &job);
        }
        pageleap_report_figures figures = PAGELEAP_INIT(pageleap_report_figures);
        if (status != PAGELEAP_OK || pageleap_job_wait(job, &report) != PAGELEAP_OK ||
            pageleap_report_get_figures(report, &figures) != PAGELEAP_OK) {
            die("leap", 0);
        }
        if (figures.ended != PAGELEAP_COMPLETED) {
            fprintf(stderr, "jemalloc_arena: %s\n", pageleap_report_text(report));
            exit(2);
        }
        moved += figures.pages_migrated;
        pageleap_report_free(report);
        pageleap_job_free(job);
    }
    /* Memory that was taken meanwhile came from the destination, and nothing is left behind. */
    uint64_t left =
        pageleap_pool_bytes(pools[1 - home]) - pageleap_pool_free_bytes(pools[1 - home]);
    if (left > 0 && !atomic_exchange(&wrong, true)) {
        fprintf(stderr, "jemalloc_arena: %llu bytes have not moved\n", (unsigned long long)left);
    }
    return moved;
}

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + (double)time.tv_nsec / 1e9;
}

/* Lets the threads work for a while, with leaps or without, and prints how fast they were. */
static double phase(const char *name, double seconds, bool leaps, double compared) {
    double start = now(), operations_before = (double)atomic_load(&operations), leaping = 0;
    unsigned long long moved = 0, times = 0;
    do {
        if (leaps) {
            double from = now();
            moved += leap();
            leaping += now() - from;
            times++;
        } else {
            pause_a_moment();
        }
    } while (now() < start + seconds);
    double rate = ((double)atomic_load(&operations) - operations_before) / (now() - start);
    double taken = (double)(2 * pageleap_pool_bytes(pools[0]) - pageleap_pool_free_bytes(pools[0]) -
                            pageleap_pool_free_bytes(pools[1]));
    printf("%-8s %9.0f operations/s, %.2f of those before; %4.0f MB in use", name, rate,
           compared > 0 ? rate / compared : 1.0, taken / 1048576);
    if (leaps) {
        printf("; %llu leaps, %.0f ms and %.0f MB each", times, leaping * 1e3 / (double)times,
               (double)moved * PAGE / 1048576 / (double)times);
    }
    printf("\n");
    return rate;
}

static void choose_nodes(uint32_t nodes[2]) {
    pageleap_topology *topology;
    size_t count = 0;
    if (pageleap_topology_read(&topology) != PAGELEAP_OK ||
        pageleap_topology_parse_nodes(topology, "all", nodes, 2, &count) != PAGELEAP_OK) {
        die("topology", 0);
    }
    nodes[1] = count > 1 ? nodes[1] : nodes[0];
    pageleap_topology_free(topology);
}

int main(int argc, char **argv) {
    uint32_t nodes[2];
    choose_nodes(nodes);
    double pool_mb = argc > 1 ? atof(argv[1]) : 256, seconds = argc > 2 ? atof(argv[2]) : 6;
    for (int i = 3; i < argc && i < 5; i++) {
        nodes[i - 3] = (uint32_t)atoi(argv[i]);
    }
    if (argc > 5 || pool_mb < 32 || seconds <= 0) {
        fprintf(stderr,
                "usage: jemalloc_arena [POOL_MB [SECONDS [FROM [TO]]]], with 32 MB or more\n");
        return 2;
    }
    const size_t pool_bytes = (size_t)pool_mb << 20;
    capacity = 16 * pool_bytes; /* addresses cost nothing */
    slot_count = pool_bytes / 4 / THREADS / 2048;
    for (int i = 0; i < 2; i++) {
        if (pageleap_pool_new(PAGELEAP_ON(nodes[i]), pool_bytes, NULL, &pools[i]) != PAGELEAP_OK) {
            die("pool", 0);
        }
    }
    if (pageleap_region_reserve(capacity, PAGELEAP_PAGE_4K, &region) != PAGELEAP_OK) {
        die("region", 0);
    }
    make_the_arena();
    printf("arena    pools of %.0f MB, %d threads with %zu objects each; node %u -> node %u%s\n",
           pool_mb, THREADS, slot_count, nodes[0], nodes[1],
           nodes[0] == nodes[1] ? ": other frames of one node; this is no NUMA speed-up" : "");

    pthread_t threads[THREADS];
    for (int i = 0; i < THREADS; i++) {
        int error = pthread_create(&threads[i], NULL, work, (void *)(uintptr_t)i);
        if (error != 0) {
            die("thread", error);
        }
    }
    phase("fill", seconds / 4, false, 0);
    double before = phase("before", seconds / 4, false, 0);
    phase("leaping", seconds / 4, true, before);
    phase("after", seconds / 4, false, before);
    atomic_store(&stop, true);
    for (int i = 0; i < THREADS; i++) {
        pthread_join(threads[i], NULL);
    }
    printf("calls    %llu extents given back, %llu taken again, %llu waits for a part that was "
           "moving; %llu objects had no room\n",
           atomic_load(&given_back), atomic_load(&taken_back), atomic_load(&waits),
           atomic_load(&refused));

    pageleap_verification here = PAGELEAP_INIT(pageleap_verification);
    if (pageleap_region_verify(region, &here) != PAGELEAP_OK) {
        die("verify", 0);
    }
    bool is_right = !atomic_load(&wrong) && here.misplaced == 0;
    printf("%s\n", is_right
                       ? "verified every object was right, and each leap has moved all of the arena"
                       : "FAILED");
    arena_control("destroy", NULL, 0);
    pageleap_region_free(region);
    pageleap_pool_free(pools[0]);
    pageleap_pool_free(pools[1]);
    return is_right ? 0 : 1;
}
