/*
 * malloc for a whole program, with its memory in a region that leaps back and forth between two
 * pools, without a pause. It is preloaded into programs that need no change:
 *
 *     cc -D_GNU_SOURCE -shared -fPIC -O2 -o malloc_in_region.so malloc_in_region.c \
 *         $(pkg-config --cflags --libs pageleap) -pthread -ldl
 *     MALLOC_IN_REGION_MB=512 LD_PRELOAD=./malloc_in_region.so PROGRAM ARGUMENTS
 *
 * Variables of the environment:
 *     MALLOC_IN_REGION_MB      the size of each of the two pools; else 64
 *     MALLOC_IN_REGION_ENGINE  the engine of the jobs, such as wp-sync; else auto
 *     MALLOC_IN_REGION_REPORT  a file, to which each process appends a line when it ends
 *
 * Rules for an allocator over a region:
 *
 * 1. The library allocates by malloc(), too, and its memory must not lie in pages that it moves: a
 *    thread of a job that waits for a page that this job has closed waits for ever. So allocations
 *    of the library's threads (pageleap_thread_is_ours()), and within a call of the library, come
 *    from the C library's own malloc. free() tells the two apart by the address.
 * 2. A child of fork() does not get the region. So before a fork the contents are copied into
 *    private memory, which the child moves to the region's addresses. The child's memory does not
 *    leap, and the child never calls the library. vfork() and posix_spawn() need nothing.
 * 3. fork() has an order. The pthread_atfork() handlers of this file are registered before those of
 *    the program, so they run last before the fork and first in the child. Even earlier in the child
 *    the C library resets the lock of each FILE, so FILEs that the program opens lie elsewhere (those
 *    that getpwent() opens do not). Before the fork the C library takes the lock of the list of FILEs
 *    after all handlers. fflush(NULL) takes this lock, and then waits for threads that allocate, so
 *    the handler takes it before the allocator's lock.
 * 4. Memory cannot be given back while a job moves it (PAGELEAP_RANGE_BUSY, or a call that waits). So
 *    one thread leaps, and gives free memory back between two leaps.
 * 5. A leap needs room in the pool that it goes to, and memory that is taken meanwhile comes from
 *    there. So the region has at most one pool of memory; the C library's malloc gives the rest.
 * 6. System calls must not fail in a program that was not written for leaps. So only engines with
 *    which none fails will do (see pageleap_engine). They need root, or a userfaultfd.
 * 7. The bookkeeping lies outside of the region, so that a leap never waits for the lock of the
 *    allocator, and free memory is not touched.
 * 8. The thread that leaps blocks all signals, because a program that waits for a signal in its only
 *    thread would miss a signal that another thread takes.
 * 9. A program with one thread may close a descriptor and count on getting its number again: a shell
 *    does so when it redirects. So the thread that leaps has its own table of descriptors (unshared,
 *    see CLONE_FILES), which the threads of jobs share. In this table it closes the program's
 *    descriptors, because the reader of a pipe would otherwise not see its end.
 *
 * The allocator is simple on purpose: one lock, blocks of 64 KB with objects of one size each, and
 * runs of blocks, the first that fits.
 */
#include <pageleap.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

enum {
    BLOCK = 64 << 10,
    LARGEST_SMALL = BLOCK / 2,
    SIZES = 48,
    /* Addresses are this many times as large as a pool, because runs of blocks leave gaps. */
    ADDRESSES = 8,
    MOST_RANGES = 4096,
    MOST_INHERITED = 1024,
};

/* The use of a block of the region. */
enum state { NEVER, WITHOUT_MEMORY, FREE, SMALL, LARGE, REST_OF_LARGE };

/* A free object holds the next one's address. */
struct object {
    struct object *next;
};

struct block {
    enum state state;
    uint32_t size;       /* of its objects, if SMALL */
    uint32_t used;       /* objects, if SMALL; blocks of the run, if LARGE */
    uint32_t untouched;  /* the first byte that was never an object, if SMALL */
    struct object *free; /* objects that were freed */
    struct block *next, *previous; /* blocks of this size with free objects */
};

/* The C library's own, for the library's memory. */
void *__libc_malloc(size_t size);
void *__libc_calloc(size_t count, size_t size);
void *__libc_realloc(void *memory, size_t size);
void *__libc_memalign(size_t alignment, size_t size);
void __libc_free(void *memory);
/* The C library's lock on its list of FILEs. */
void _IO_list_lock(void);
void _IO_list_unlock(void);
void _IO_list_resetlock(void);

static pageleap_pool *pools[2];
static pageleap_region *region;
static char *start;
static size_t block_count, pool_bytes;
static struct block *blocks;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
/* The lock protects the variables of this group. */
static struct block *with_free[SIZES];
static size_t end, in_use_from, with_memory; /* blocks */
static size_t home;
static unsigned long long given_back, taken_again, elsewhere;
/* A forked child has private memory at the region's addresses. */
static bool is_child;
static char *snapshot;

static atomic_bool is_ready, stop;
static uint32_t engine;
static pthread_t leaper;
static unsigned long long leaps, jobs, failed, bytes_moved, busy;
/* How many calls of the library this thread is in. */
static __thread unsigned inside __attribute__((tls_model("initial-exec")));

static bool is_ours(const void *memory) {
    return (uintptr_t)memory - (uintptr_t)start < block_count * BLOCK && start != NULL;
}

/* Whether the region may serve this thread now. */
static bool may_serve(void) {
    return inside == 0 && atomic_load(&is_ready) && !pageleap_thread_is_ours();
}

/* ---- Blocks ---- */

/* The classes of sizes: four for each power of two, from 16 to LARGEST_SMALL. */
static unsigned class_of(size_t size) {
    if (size <= 64) {
        return size == 0 ? 0 : (unsigned)((size - 1) / 16);
    }
    unsigned log = 63 - (unsigned)__builtin_clzll(size - 1); /* 2^log <= size - 1 */
    return (log - 6) * 4 + 4 + (unsigned)((size - 1) >> (log - 2) & 3);
}

static uint32_t size_of(unsigned class) {
    return class < 4 ? 16 * (class + 1) : (uint32_t)(5 + (class & 3)) << ((class - 4) / 4 + 4);
}

static struct block *block_at(const void *memory) {
    return &blocks[(size_t)((const char *)memory - start) / BLOCK];
}

static char *memory_of(const struct block *block) {
    return start + (size_t)(block - blocks) * BLOCK;
}

/* Makes the region reach a block that is behind its end. The new part has no memory. */
static bool reach(size_t at) {
    if (pageleap_region_grow(region, (at + 1) * BLOCK, NULL, NULL) != PAGELEAP_OK) {
        return false;
    }
    while (end <= at) {
        blocks[end++].state = WITHOUT_MEMORY;
    }
    return true;
}

static bool back(size_t at) {
    return pageleap_region_back(region, at * BLOCK, BLOCK, pools[home], NULL) == PAGELEAP_OK;
}

/* Gives memory to blocks that have none. A child has it at all addresses. */
static bool take(size_t first, size_t count) {
    bool done = true;
    inside++;
    for (size_t at = first; done && at < first + count; at++) {
        if (blocks[at].state != NEVER && blocks[at].state != WITHOUT_MEMORY) {
            continue;
        }
        bool again = at < end;
        done = with_memory < pool_bytes / BLOCK && (is_child || ((again || reach(at)) && back(at)));
        if (done) {
            blocks[at].state = FREE;
            taken_again += again;
            with_memory++;
        }
    }
    inside--;
    return done;
}

/* Finds consecutive free blocks, and gives them memory. */
static struct block *take_run(size_t count, size_t alignment) {
    size_t step = alignment > BLOCK ? alignment / BLOCK : 1, length = 0;
    for (size_t at = in_use_from, first = at; at < block_count; at++) {
        if (blocks[at].state > FREE) {
            length = 0;
            continue;
        }
        if (length == 0) {
            if (((uintptr_t)start / BLOCK + at) % step != 0) {
                continue;
            }
            first = at;
        }
        if (++length == count) {
            if (!take(first, count)) {
                return NULL;
            }
            in_use_from = first == in_use_from ? first + count : in_use_from;
            return &blocks[first];
        }
    }
    return NULL;
}

static void give_run(struct block *block, size_t count) {
    size_t first = (size_t)(block - blocks);
    for (size_t i = 0; i < count; i++) {
        block[i].state = FREE;
    }
    in_use_from = first < in_use_from ? first : in_use_from;
}

/* ---- Objects ---- */

static void link_block(struct block *block, unsigned class) {
    block->previous = NULL;
    block->next = with_free[class];
    if (block->next != NULL) {
        block->next->previous = block;
    }
    with_free[class] = block;
}

static void unlink_block(struct block *block, unsigned class) {
    if (block->next != NULL) {
        block->next->previous = block->previous;
    }
    *(block->previous != NULL ? &block->previous->next : &with_free[class]) = block->next;
}

static bool is_full(const struct block *block) {
    return block->free == NULL && block->untouched + block->size > BLOCK;
}

static void *small(unsigned class) {
    struct block *block = with_free[class];
    if (block == NULL) {
        block = take_run(1, BLOCK);
        if (block == NULL) {
            return NULL;
        }
        *block = (struct block){ .state = SMALL, .size = size_of(class) };
        link_block(block, class);
    }
    void *made = block->free;
    if (made != NULL) {
        block->free = block->free->next;
    } else {
        made = memory_of(block) + block->untouched;
        block->untouched += block->size;
    }
    block->used++;
    if (is_full(block)) {
        unlink_block(block, class);
    }
    return made;
}

static void *large(size_t size, size_t alignment) {
    size_t count = (size + BLOCK - 1) / BLOCK;
    struct block *block = take_run(count, alignment);
    if (block == NULL) {
        return NULL;
    }
    for (size_t i = 1; i < count; i++) {
        block[i].state = REST_OF_LARGE;
    }
    block->state = LARGE;
    block->used = (uint32_t)count;
    return memory_of(block);
}

/* Memory of the region, or NULL. Alignments are powers of two; objects whose size is a power of two
 * are aligned to it. */
static void *from_region(size_t size, size_t alignment) {
    if (size > block_count * BLOCK) {
        return NULL;
    }
    size_t small_size = size;
    if (alignment > 16) {
        for (small_size = alignment; small_size < size; small_size *= 2) {
        }
    }
    pthread_mutex_lock(&lock);
    void *made = small_size <= LARGEST_SMALL ? small(class_of(small_size)) : large(size, alignment);
    elsewhere += made == NULL;
    pthread_mutex_unlock(&lock);
    return made;
}

static size_t usable(const void *memory) {
    const struct block *block = block_at(memory);
    return block->state == SMALL ? block->size : (size_t)block->used * BLOCK;
}

static void give(void *memory) {
    pthread_mutex_lock(&lock);
    struct block *block = block_at(memory);
    if (block->state == LARGE) {
        give_run(block, block->used);
    } else {
        unsigned class = class_of(block->size);
        if (is_full(block)) {
            link_block(block, class);
        }
        struct object *object = memory;
        object->next = block->free;
        block->free = object;
        if (--block->used == 0) {
            unlink_block(block, class);
            give_run(block, 1);
        }
    }
    pthread_mutex_unlock(&lock);
}

/* ---- malloc and its relatives ---- */

void *malloc(size_t size) {
    void *made = may_serve() ? from_region(size, 16) : NULL;
    return made != NULL ? made : __libc_malloc(size);
}

void *calloc(size_t count, size_t size) {
    size_t bytes;
    if (__builtin_mul_overflow(count, size, &bytes)) {
        errno = ENOMEM;
        return NULL;
    }
    void *made = may_serve() ? from_region(bytes, 16) : NULL;
    return made != NULL ? memset(made, 0, bytes) : __libc_calloc(count, size);
}

void free(void *memory) {
    int kept = errno;
    if (is_ours(memory)) {
        give(memory);
    } else {
        __libc_free(memory);
    }
    errno = kept;
}

void *realloc(void *memory, size_t size) {
    if (memory == NULL) {
        return malloc(size);
    }
    if (!is_ours(memory)) {
        return __libc_realloc(memory, size);
    }
    if (size == 0) {
        free(memory);
        return NULL;
    }
    size_t now = usable(memory);
    if (size <= now && size >= now / 2) {
        return memory;
    }
    void *made = malloc(size);
    if (made != NULL) {
        memcpy(made, memory, size < now ? size : now);
        free(memory);
    }
    return made;
}

static void *aligned(size_t alignment, size_t size) {
    void *made = may_serve() ? from_region(size, alignment) : NULL;
    return made != NULL ? made : __libc_memalign(alignment, size);
}

void *memalign(size_t alignment, size_t size) {
    if (alignment == 0 || (alignment & (alignment - 1)) != 0) {
        errno = EINVAL;
        return NULL;
    }
    return aligned(alignment, size);
}

void *aligned_alloc(size_t alignment, size_t size) { return memalign(alignment, size); }

void *valloc(size_t size) { return aligned(4096, size); }

void *pvalloc(size_t size) { return aligned(4096, (size + 4095) & ~(size_t)4095); }

int posix_memalign(void **memory, size_t alignment, size_t size) {
    if (alignment % sizeof(void *) != 0 || alignment == 0 || (alignment & (alignment - 1)) != 0) {
        return EINVAL;
    }
    int kept = errno;
    void *made = aligned(alignment, size);
    errno = kept;
    if (made == NULL) {
        return ENOMEM;
    }
    *memory = made;
    return 0;
}

size_t malloc_usable_size(void *memory) {
    if (memory == NULL) {
        return 0;
    }
    /* The word before memory of the C library has the size of its chunk, and three flags; a chunk
     * that was mapped by itself has two words that are not usable, another one has one. */
    size_t chunk = is_ours(memory) ? 0 : ((const size_t *)memory)[-1];
    return is_ours(memory) ? usable(memory) : (chunk & ~(size_t)7) - (chunk & 2 ? 16 : 8);
}

/* ---- FILEs ---- */

/* A function that makes a FILE: the C library's own, with its memory from elsewhere. */
#define MAKES_FILE(name, parameters, ...)                                                          \
    FILE *name parameters {                                                                        \
        FILE *(*next) parameters;                                                                  \
        inside++;                                                                                  \
        *(void **)&next = dlsym(RTLD_NEXT, #name);                                                 \
        FILE *made = next(__VA_ARGS__);                                                            \
        inside--;                                                                                  \
        return made;                                                                               \
    }

MAKES_FILE(fopen, (const char *path, const char *mode), path, mode)
MAKES_FILE(fopen64, (const char *path, const char *mode), path, mode)
MAKES_FILE(fdopen, (int descriptor, const char *mode), descriptor, mode)
MAKES_FILE(popen, (const char *command, const char *mode), command, mode)
MAKES_FILE(tmpfile, (void), )
MAKES_FILE(tmpfile64, (void), )
MAKES_FILE(fmemopen, (void *memory, size_t size, const char *mode), memory, size, mode)
MAKES_FILE(open_memstream, (char **memory, size_t *size), memory, size)
MAKES_FILE(fopencookie, (void *cookie, const char *mode, cookie_io_functions_t functions), cookie,
           mode, functions)

/* ---- fork ---- */

static void before_fork(void) {
    inside++;
    _IO_list_lock();
    pthread_mutex_lock(&lock);
    snapshot = NULL;
    if (is_child || end == 0) {
        return;
    }
    snapshot = mmap(NULL, end * BLOCK, PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (snapshot == MAP_FAILED) {
        static const char words[] = "malloc_in_region: no memory for a fork\n";
        (void)!write(2, words, sizeof words - 1);
        abort();
    }
    for (size_t at = 0; at < end; at++) {
        if (blocks[at].state > FREE) {
            memcpy(snapshot + at * BLOCK, start + at * BLOCK, BLOCK);
        }
    }
}

static void after_fork_in_parent(void) {
    if (snapshot != NULL) {
        munmap(snapshot, end * BLOCK);
    }
    pthread_mutex_unlock(&lock);
    _IO_list_unlock();
    inside--;
}

static void after_fork_in_child(void) {
    if (!is_child) {
        /* The library has taken the region out of the child: its addresses are free. */
        void *at = mmap(start, block_count * BLOCK, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
        if (at != (void *)start || (snapshot != NULL &&
                                    mremap(snapshot, end * BLOCK, end * BLOCK,
                                           MREMAP_MAYMOVE | MREMAP_FIXED, start) != start)) {
            abort();
        }
        is_child = true;
    }
    pthread_mutex_init(&lock, NULL);
    _IO_list_resetlock(); /* the C library does it only if the parent had threads */
    inside--;
}

/* ---- The leaps ---- */

/* Takes the memory away from free blocks, and lists the others in runs. */
static size_t tidy(pageleap_range *ranges) {
    size_t count = 0;
    pthread_mutex_lock(&lock);
    home = 1 - home; /* memory that is taken from now on need not move */
    for (size_t at = 0, length; at < end; at += length) {
        enum state state = blocks[at].state;
        bool is_used = state > FREE;
        for (length = 1; at + length < end; length++) {
            enum state next = blocks[at + length].state;
            if (is_used ? next <= FREE : next != state) {
                break;
            }
        }
        if (state == FREE && count < MOST_RANGES &&
            pageleap_region_discard(region, at * BLOCK, length * BLOCK) == PAGELEAP_OK) {
            for (size_t i = at; i < at + length; i++) {
                blocks[i].state = WITHOUT_MEMORY;
            }
            with_memory -= length;
            given_back += length;
        } else if (is_used && count < MOST_RANGES) {
            ranges[count] = (pageleap_range){ .size = sizeof *ranges, .region = region };
            ranges[count].offset = at * BLOCK;
            ranges[count].length = length * BLOCK;
            ranges[count++].pool = pools[home];
        }
    }
    pthread_mutex_unlock(&lock);
    return count;
}

static void leap(void) {
    static pageleap_range ranges[MOST_RANGES];
    size_t count = tidy(ranges);
    pageleap_job *job;
    pageleap_report *report;
    pageleap_job_options options = PAGELEAP_INIT(pageleap_job_options);
    pageleap_report_figures figures = PAGELEAP_INIT(pageleap_report_figures);
    options.engine = engine;
    pageleap_status started =
        count == 0 ? PAGELEAP_NO_THREAD : pageleap_job_start(ranges, count, &options, &job);
    if (started == PAGELEAP_NO_THREAD) { /* while another thread is in execve(): EAGAIN */
        nanosleep(&(struct timespec){ .tv_nsec = 1000000 }, NULL);
        return;
    }
    jobs++;
    if (started != PAGELEAP_OK) {
        failed++;
        fprintf(stderr, "malloc_in_region: %s\n", pageleap_last_error());
        return;
    }
    if (pageleap_job_wait(job, &report) != PAGELEAP_OK ||
        pageleap_report_get_figures(report, &figures) != PAGELEAP_OK) {
        abort();
    }
    if (figures.ended != PAGELEAP_COMPLETED) {
        failed++;
        fprintf(stderr, "malloc_in_region: %s\n", pageleap_report_text(report));
    }
    leaps++;
    busy += figures.pages_busy;
    bytes_moved += figures.pages_migrated * 4096;
    pageleap_report_free(report);
    pageleap_job_free(job);
}

/* Descriptors that the process had before the library. */
static bool is_inherited[MOST_INHERITED];

static uint32_t wanted_engine(void) {
    const char *name = getenv("MALLOC_IN_REGION_ENGINE");
    for (uint32_t number = 0; strcmp(pageleap_engine_name(number), "unknown") != 0; number++) {
        if (strcmp(pageleap_engine_name(number), name != NULL ? name : "auto") == 0) {
            return number;
        }
    }
    fprintf(stderr, "malloc_in_region: there is no engine %s\n", name);
    exit(2);
}

static pthread_barrier_t separated;

static void *leap_until_the_end(void *nothing) {
    (void)nothing;
    inside++; /* to the end: the thread does nothing but call the library */
    if (unshare(CLONE_FILES) != 0) {
        abort();
    }
    for (int number = 0; number < MOST_INHERITED; number++) {
        if (number != STDERR_FILENO && is_inherited[number]) {
            close(number);
        }
    }
    pthread_barrier_wait(&separated);
    while (!atomic_load(&stop)) {
        leap();
    }
    /* Two more leaps, of memory that the program no longer changes. */
    leap();
    leap();
    return NULL;
}

/* How many mappings the region has, and all else. */
static void count_mappings(size_t count[2]) {
    FILE *maps = fopen("/proc/self/maps", "re");
    char line[4200];
    unsigned long at;
    count[0] = count[1] = 0;
    while (maps != NULL && fgets(line, sizeof line, maps) != NULL) {
        count[sscanf(line, "%lx", &at) != 1 || !is_ours((void *)at)]++;
    }
    if (maps != NULL) {
        fclose(maps);
    }
}

/* ---- The beginning and the end ---- */

static void need(pageleap_status status) {
    if (status != PAGELEAP_OK) {
        fprintf(stderr, "malloc_in_region: %s\n", pageleap_last_error());
        exit(2);
    }
}

__attribute__((constructor)) static void begin(void) {
    inside++;
    for (int number = 0; number < MOST_INHERITED; number++) {
        is_inherited[number] = fcntl(number, F_GETFD) != -1;
    }
    const char *megabytes = getenv("MALLOC_IN_REGION_MB");
    long wanted = megabytes != NULL ? atol(megabytes) : 64;
    pool_bytes = (size_t)(wanted < 1 ? 1 : wanted) << 20;
    block_count = ADDRESSES * pool_bytes / BLOCK;
    engine = wanted_engine();
    if (pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child) != 0) {
        abort();
    }
    pageleap_topology *topology;
    uint32_t nodes[2];
    size_t count = 0;
    need(pageleap_topology_read(&topology));
    need(pageleap_topology_parse_nodes(topology, "all", nodes, 2, &count));
    pageleap_topology_free(topology);
    for (size_t i = 0; i < 2; i++) {
        uint32_t node = nodes[i < count ? i : 0];
        need(pageleap_pool_new(PAGELEAP_ON(node), pool_bytes, NULL, &pools[i]));
    }
    need(pageleap_region_reserve(ADDRESSES * pool_bytes, PAGELEAP_PAGE_4K, &region));
    blocks = mmap(NULL, block_count * sizeof *blocks, PROT_READ | PROT_WRITE,
                  MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (blocks == MAP_FAILED) {
        perror("malloc_in_region: mmap");
        exit(2);
    }
    start = pageleap_region_start(region);
    atomic_store(&is_ready, true);
    sigset_t all, kept;
    pthread_barrier_init(&separated, NULL, 2);
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &kept);
    if (pthread_create(&leaper, NULL, leap_until_the_end, NULL) != 0) {
        abort();
    }
    pthread_sigmask(SIG_SETMASK, &kept, NULL);
    /* Descriptors that the program opens from here on are not in that thread's table. */
    pthread_barrier_wait(&separated);
    inside--;
}

/* Writes the line of the report after the last leaps. The memory stays: threads may still use it. */
__attribute__((destructor)) static void finish(void) {
    inside++;
    const char *path = getenv("MALLOC_IN_REGION_REPORT");
    if (atomic_load(&is_ready) && !is_child && !atomic_exchange(&stop, true)) {
        pthread_join(leaper, NULL);
        size_t mappings[2], runs = 0;
        count_mappings(mappings);
        pthread_mutex_lock(&lock);
        for (size_t at = 0; at < end; at++) {
            runs += blocks[at].state > FREE && (at == 0 || blocks[at - 1].state <= FREE);
        }
        long long lost = 2 * (long long)pool_bytes - (long long)(with_memory * BLOCK) -
                         (long long)pageleap_pool_free_bytes(pools[0]) -
                         (long long)pageleap_pool_free_bytes(pools[1]);
        char line[512];
        int length = snprintf(
            line, sizeof line,
            "program %s engine %s pid %d jobs %llu leaps %llu failed %llu busy %llu moved_kb %llu "
            "in_use_kb %zu given_back_kb %llu taken_again_kb %llu elsewhere %llu runs %zu "
            "mappings %zu other_mappings %zu lost_bytes %lld\n",
            program_invocation_short_name, pageleap_engine_name(engine), (int)getpid(), jobs, leaps,
            failed, busy, bytes_moved >> 10, with_memory * BLOCK / 1024, given_back * BLOCK / 1024,
            taken_again * BLOCK / 1024, elsewhere, runs, mappings[0], mappings[1], lost);
        pthread_mutex_unlock(&lock);
        int file = path != NULL ? open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666) : -1;
        if (file >= 0) {
            (void)!write(file, line, (size_t)length);
            close(file);
        }
    }
    inside--;
}
