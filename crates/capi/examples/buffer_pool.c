/*
 * A buffer pool that leaps: threads read pages of a file through it while its frames move to
 * another node, a part at a time.
 *
 *     buffer_pool [FILE_MB [BUFFER_MB [SECONDS [FROM [TO]]]]]
 *
 * The defaults are 512, 128 and 6, and the first two nodes that may be used.
 *
 * Every page of the file has an address of its own in one region. A page that is in the buffer has
 * memory at its address. Evicting the page discards this memory; loading it takes frames (back) and
 * fills them by pread. While a part of the region moves, its pages can be read, but neither evicted
 * nor loaded: a thread that loads a page waits for the part, and pages of other parts are evicted.
 * Each page that is read is compared with what was written to the file.
 *
 * Exit code: 0 if all pages were right, 1 if a page was wrong, 2 if a call failed.
 */
#include <pageleap.h>

#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { PAGE = 64 << 10, WORDS = PAGE / 8, THREADS = 3, PARTS = 16 };

/* A page of the file. The thread that holds the lock may use the page's memory. */
struct page {
    pthread_mutex_t lock;
    bool is_loaded;
    bool was_used;
};

static int file;
static size_t page_count;
static struct page *pages;
static pageleap_region *region;
static pageleap_pool *pools[2];
static atomic_size_t home, clock_hand, loaded, most_loaded;
static atomic_ullong reads, loads, evictions, repeats, waits;
static atomic_bool stop, wrong;

static void *at(size_t number) { return (char *)pageleap_region_start(region) + number * PAGE; }

static uint64_t word_of(size_t number, size_t word) {
    return (number << 20 ^ word) * 0x9e3779b97f4a7c15u;
}

static void die(const char *what) {
    fprintf(stderr, "buffer_pool: %s: %s\n", what,
            errno != 0 ? strerror(errno) : pageleap_last_error());
    exit(2);
}

static void pause_a_moment(void) { nanosleep(&(struct timespec){ .tv_nsec = 50000 }, NULL); }

/* Evicts one page that no thread has used since the clock's hand passed it last. */
static void evict(void) {
    for (size_t tries = 0; tries < 3 * page_count; tries++) {
        size_t number = atomic_fetch_add(&clock_hand, 1) % page_count;
        struct page *victim = &pages[number];
        if (pthread_mutex_trylock(&victim->lock) != 0) {
            continue;
        }
        bool evicted = false;
        if (victim->is_loaded && victim->was_used) {
            victim->was_used = false;
        } else if (victim->is_loaded) {
            pageleap_status status = pageleap_region_discard(region, number * PAGE, PAGE);
            /* Busy: the page's part is moving. */
            if (status != PAGELEAP_OK && status != PAGELEAP_RANGE_BUSY) {
                errno = 0;
                die("discard");
            }
            evicted = status == PAGELEAP_OK;
            victim->is_loaded = !evicted;
        }
        pthread_mutex_unlock(&victim->lock);
        if (evicted) {
            atomic_fetch_sub(&loaded, 1);
            atomic_fetch_add(&evictions, 1);
            return;
        }
    }
    pause_a_moment();
}

/* Reads a page of the file into its place. The caller has its lock. */
static void load(size_t number) {
    while (atomic_fetch_add(&loaded, 1) >= most_loaded) {
        atomic_fetch_sub(&loaded, 1);
        evict();
    }
    for (;;) {
        size_t from = atomic_load(&home);
        pageleap_status status =
            pageleap_region_back(region, number * PAGE, PAGE, pools[from], NULL);
        if (status == PAGELEAP_OK && from == atomic_load(&home)) {
            break; /* a leap that begins from now on moves it */
        }
        if (status == PAGELEAP_OK) { /* a leap has begun, and may have passed this part */
            status = pageleap_region_discard(region, number * PAGE, PAGE);
            while (status == PAGELEAP_RANGE_BUSY) {
                pause_a_moment();
                status = pageleap_region_discard(region, number * PAGE, PAGE);
            }
            if (status != PAGELEAP_OK) {
                errno = 0;
                die("discard");
            }
            continue;
        }
        if (status == PAGELEAP_POOL_EXHAUSTED) { /* pages that have not moved yet have the frames */
            evict();
        } else if (status != PAGELEAP_RANGE_BUSY) {
            errno = 0;
            die("back");
        }
        atomic_fetch_add(&waits, 1);
        pause_a_moment();
    }
    for (size_t done = 0; done < PAGE;) {
        ssize_t got =
            pread(file, (char *)at(number) + done, PAGE - done, (off_t)(number * PAGE + done));
        if (got > 0) {
            done += (size_t)got;
        } else if (got < 0 && (errno == EFAULT || errno == EINTR)) {
            atomic_fetch_add(&repeats, 1); /* an engine has protected the page; nothing was read */
        } else {
            die("pread");
        }
    }
    pages[number].is_loaded = true;
    atomic_fetch_add(&loads, 1);
}

static void *read_pages(void *seed) {
    uint64_t random = (uint64_t)(uintptr_t)seed * 0x2545f4914f6cdd1du | 1;
    while (!atomic_load(&stop)) {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        /* Three of four reads go to an eighth of the pages. */
        size_t number = (random >> 8) % (random % 4 == 0 ? page_count : page_count / 8 + 1);
        struct page *page = &pages[number];
        pthread_mutex_lock(&page->lock);
        if (!page->is_loaded) {
            load(number);
        }
        page->was_used = true;
        const uint64_t *words = at(number);
        for (size_t word = random >> 32 & 63; word < WORDS; word += 64) {
            if (words[word] != word_of(number, word) && !atomic_exchange(&wrong, true)) {
                fprintf(stderr, "buffer_pool: page %zu is wrong at word %zu\n", number, word);
            }
        }
        pthread_mutex_unlock(&page->lock);
        atomic_fetch_add(&reads, 1);
    }
    return NULL;
}

/* Moves the whole buffer to the other pool, part by part; returns how many pages moved. */
static uint64_t leap(void) {
    uint64_t moved = 0;
    size_t to = 1 - atomic_load(&home);
    atomic_store(&home, to); /* pages that are loaded from now on need not move */
    for (size_t part = 0; part < PARTS; part++) {
        size_t first = page_count * part / PARTS, end = page_count * (part + 1) / PARTS;
        pageleap_range range = PAGELEAP_INIT(pageleap_range);
        range.region = region;
        range.offset = first * PAGE;
        range.length = (end - first) * PAGE;
        range.pool = pools[to];
        for (;;) {
            pageleap_job *job;
            pageleap_report *report;
            pageleap_status status = pageleap_job_start(&range, 1, NULL, &job);
            if (status == PAGELEAP_RANGE_BUSY || status == PAGELEAP_POOL_EXHAUSTED) {
                pause_a_moment(); /* a thread loads or evicts a page of the part */
                continue;
            }
            errno = 0;
            pageleap_report_figures figures = PAGELEAP_INIT(pageleap_report_figures);
            if (status != PAGELEAP_OK || pageleap_job_wait(job, &report) != PAGELEAP_OK ||
                pageleap_report_get_figures(report, &figures) != PAGELEAP_OK) {
                die("leap");
            }
            moved += figures.pages_migrated;
            bool completed = figures.ended == PAGELEAP_COMPLETED;
            if (!completed) {
                fprintf(stderr, "buffer_pool: %s\n", pageleap_report_text(report));
                exit(2);
            }
            pageleap_report_free(report);
            pageleap_job_free(job);
            break;
        }
    }
    return moved;
}

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + (double)time.tv_nsec / 1e9;
}

struct figures {
    double at, reads, loads;
};

static struct figures look(void) {
    return (struct figures){ now(), (double)atomic_load(&reads), (double)atomic_load(&loads) };
}

static double tell(const char *name, struct figures from, double compared) {
    struct figures to = look();
    double rate = (to.reads - from.reads) / (to.at - from.at);
    printf("%-8s %9.0f reads/s, %.2f of those before; %4.1f %% of them from the file\n", name, rate,
           compared > 0 ? rate / compared : 1.0,
           100 * (to.loads - from.loads) / (to.reads - from.reads));
    return rate;
}

static void make_the_file(void) {
    char name[] = "/tmp/buffer_pool.XXXXXX";
    file = mkstemp(name);
    if (file < 0 || unlink(name) != 0) {
        die(name);
    }
    static uint64_t words[WORDS];
    for (size_t number = 0; number < page_count; number++) {
        for (size_t word = 0; word < WORDS; word++) {
            words[word] = word_of(number, word);
        }
        if (pwrite(file, words, PAGE, (off_t)(number * PAGE)) != PAGE) {
            die("pwrite");
        }
    }
}

static void choose_nodes(uint32_t nodes[2]) {
    pageleap_topology *topology;
    size_t count = 0;
    if (pageleap_topology_read(&topology) != PAGELEAP_OK ||
        pageleap_topology_parse_nodes(topology, "all", nodes, 2, &count) != PAGELEAP_OK) {
        die("topology");
    }
    nodes[1] = count > 1 ? nodes[1] : nodes[0];
    pageleap_topology_free(topology);
}

/* Reads the arguments: sizes in MB and seconds, then nodes. */
static bool read_arguments(int argc, char **argv, double sizes[3], uint32_t nodes[2]) {
    for (int i = 1; i < argc; i++) {
        double number = atof(argv[i]);
        if (i > 5 || (i <= 3 && number <= 0)) {
            fprintf(stderr, "usage: buffer_pool [FILE_MB [BUFFER_MB [SECONDS [FROM [TO]]]]]\n");
            return false;
        }
        if (i <= 3) {
            sizes[i - 1] = number;
        } else {
            nodes[i - 4] = (uint32_t)number;
        }
    }
    return true;
}

int main(int argc, char **argv) {
    uint32_t nodes[2];
    errno = 0;
    choose_nodes(nodes);
    double sizes[3] = { 512, 128, 6 };
    if (!read_arguments(argc, argv, sizes, nodes)) {
        return 2;
    }
    page_count = (size_t)(sizes[0] * 1048576) / PAGE;
    most_loaded = (size_t)(sizes[1] * 1048576) / PAGE;
    if (page_count < 2 * PARTS || most_loaded < 2 * THREADS) {
        fprintf(stderr, "buffer_pool: use a file of at least %d MB and a buffer of 1 MB\n",
                2 * PARTS * PAGE >> 20);
        return 2;
    }
    make_the_file();
    errno = 0;
    for (int i = 0; i < 2; i++) {
        if (pageleap_pool_new(PAGELEAP_ON(nodes[i]), most_loaded * PAGE, NULL, &pools[i]) !=
            PAGELEAP_OK) {
            die("pool");
        }
    }
    /* An address for each page of the file, and memory for none of them yet. */
    if (pageleap_region_reserve(page_count * PAGE, PAGELEAP_PAGE_4K, &region) != PAGELEAP_OK ||
        pageleap_region_grow(region, page_count * PAGE, NULL, NULL) != PAGELEAP_OK) {
        die("region");
    }
    pages = calloc(page_count, sizeof *pages);
    for (size_t number = 0; number < page_count; number++) {
        pthread_mutex_init(&pages[number].lock, NULL);
    }
    printf("buffer   %zu of %zu pages of 64 KiB, %d threads; node %u -> node %u%s\n",
           (size_t)most_loaded, page_count, THREADS, nodes[0], nodes[1],
           nodes[0] == nodes[1] ? ": other frames of one node; this is no NUMA speed-up" : "");

    pthread_t threads[THREADS];
    for (int i = 0; i < THREADS; i++) {
        if (pthread_create(&threads[i], NULL, read_pages, (void *)(uintptr_t)(i + 1)) != 0) {
            die("thread");
        }
    }
    const long long third_ns = (long long)(sizes[2] / 3 * 1e9);
    const struct timespec third = { .tv_sec = third_ns / 1000000000,
                                    .tv_nsec = third_ns % 1000000000 };
    nanosleep(&third, NULL);
    struct figures from = look();
    nanosleep(&third, NULL);
    double before = tell("before", from, 0);
    from = look();
    uint64_t moved = leap();
    double took = look().at - from.at;
    tell("leaping", from, before);
    printf("leap     %.0f ms for %llu pages of 4 KiB, in %d parts\n", took * 1e3,
           (unsigned long long)moved, PARTS);
    from = look();
    nanosleep(&third, NULL);
    tell("after", from, before);
    atomic_store(&stop, true);
    for (int i = 0; i < THREADS; i++) {
        pthread_join(threads[i], NULL);
    }
    printf("calls    %llu pages loaded, %llu discarded; %llu waits for a part that was moving; "
           "%llu preads repeated\n",
           atomic_load(&loads), atomic_load(&evictions), atomic_load(&waits),
           atomic_load(&repeats));

    pageleap_verification here = PAGELEAP_INIT(pageleap_verification);
    errno = 0;
    if (pageleap_region_verify(region, &here) != PAGELEAP_OK) {
        die("verify");
    }
    bool is_right = !atomic_load(&wrong) && here.misplaced == 0 &&
                    pageleap_pool_free_bytes(pools[0]) == pageleap_pool_bytes(pools[0]);
    printf("%s\n", is_right
                       ? "verified every page that was read was right, and all of them have moved"
                       : "FAILED");
    pageleap_region_free(region);
    pageleap_pool_free(pools[0]);
    pageleap_pool_free(pools[1]);
    free(pages);
    return is_right ? 0 : 1;
}
