/*
 * pageleap.h - moves pages of this process between memory nodes while threads keep reading and
 * writing them, and always finishes.
 *
 * A program makes a pool: memory of one or several nodes, faulted in. It makes a region, which is
 * a range of addresses that never changes, backed by frames of pools, and puts its data there. Then
 * it starts jobs, which move ranges of regions to frames of another node or another pool. Threads
 * go on reading and writing meanwhile, and no write is lost.
 *
 *     pageleap_pool *near_pool, *far_pool;
 *     pageleap_region *region;
 *     pageleap_job *job;
 *
 *     if (pageleap_pool_new(PAGELEAP_ON(0), 1 << 30, NULL, &near_pool) != PAGELEAP_OK ||
 *         pageleap_pool_new(PAGELEAP_ON(1), 1 << 30, NULL, &far_pool) != PAGELEAP_OK ||
 *         pageleap_region_new(near_pool, NULL, 1 << 30, &region) != PAGELEAP_OK) {
 *         fprintf(stderr, "%s\n", pageleap_last_error());
 *         exit(1);
 *     }
 *     char *data = pageleap_region_start(region);   // zeroed; any thread may use it
 *
 *     pageleap_range all = PAGELEAP_INIT(pageleap_range);
 *     all.region = region;                           // offset and length are 0: the whole region
 *     all.pool = far_pool;
 *     if (pageleap_job_start(&all, 1, NULL, &job) != PAGELEAP_OK) { ... }
 *     ...                                            // threads go on
 *     pageleap_job_wait(job, NULL);
 *     pageleap_job_free(job);
 *
 * Words:
 *
 * Frame.    A page of physical memory. A pool has frames; each is free, or holds a page of one
 *           region. A page of a region has an address, and a frame unless it was discarded.
 * Area.     A group of pages that a job copies in one go and gives new frames together. The job
 *           chooses its size.
 * Window.   The time for which an area is closed to writers, so that it can change its frames.
 *           A thread that writes there waits in the kernel, or in a SIGSEGV handler.
 * Engine.   A way to move an area: how writes are noticed, and how the area is closed.
 * Recycle.  To make the frames that pages have left ready for other pages. A job recycles after it
 *           has moved its pages.
 * Guard.    Keeps pages in their frames while a device works on them.
 *
 * Rules for all functions:
 *
 * Errors.   Functions that can fail return a pageleap_status, and keep a text for the calling
 *           thread: pageleap_last_error(). After a failure nothing has changed, unless the
 *           function says otherwise, and a handle or address that it should have given out is
 *           NULL.
 * Threads.  Any thread may call any function. Several threads may do so at a time, also on the same
 *           handle; but while a function frees a handle, no other may use that handle. A signal
 *           handler must not call any function. No function is a cancellation point: a thread that
 *           is cancelled during a call ends after it. A thread that calls the library must not have
 *           asynchronous cancellation enabled.
 * Handles.  The program frees each handle that it was given, once, with the function that the
 *           handle's type names. Handles may be freed in any order. `const` means that the handle
 *           stays valid, not that the object behind it stays the same.
 * NULL.     May be passed where the function's comment says so, and for an array of no elements.
 *           Elsewhere it gives PAGELEAP_BAD_ARGUMENT or, from functions that return no status, 0,
 *           false, NULL or -1.
 * Structs.  Structures begin with their size, because later versions may append fields. Make them
 *           with PAGELEAP_INIT (inside a function), which sets the size and leaves all other fields
 *           0, the default of each field that has one. Set the size of structures that a function
 *           fills in, too. A size that no version can have had gives PAGELEAP_BAD_ARGUMENT. Fields
 *           that only a newer header has must be 0 when passed in (else PAGELEAP_UNSUPPORTED), and
 *           are set to 0 when filled in.
 * fork.     A child does not have the regions of its parent, and must not touch their addresses. It
 *           may use its parent's handles only to free them.
 * close.    The program must not close descriptors that it has not opened (closefrom, a close too
 *           many). The library checks a descriptor before it uses it, and gives
 *           PAGELEAP_DESCRIPTOR_LOST if it was closed, even if its number stands for another file by
 *           then. Regions keep their pages, but these can move no more. A close in the middle of a
 *           job can lose the contents of the pages that are being moved at that moment. A daemon
 *           closes descriptors before it makes its first pool.
 * Tracing.  While a debugger traces the threads of a job (ptrace: strace -f, gdb, py-spy), the job
 *           moves pages by the engine wp-sync, because its readers never wait: a debugger that waits
 *           for a page waits for the thread that it has stopped. If the program has asked by name
 *           for an engine whose readers wait, pages stay (PAGELEAP_REASON_TRACED). If a debugger
 *           attaches at the moment at which an area is closed, it may wait for ever, and the
 *           program with it: kill -9 the debugger.
 * Signals.  The library's own threads take none of the program's signals. The library blocks the
 *           signals of the calling thread for moments: when it starts threads, and in
 *           pageleap_probe(). In pageleap_job_run() they are blocked as long as the thread runs the
 *           job. The first job installs a SIGSEGV handler: see pageleap_install_fault_handler().
 * Text.     Arguments and texts are in UTF-8. A text that is marked "Constant" is never freed.
 *
 * Neither a C++ exception nor a Rust panic ever passes through these functions. Once the library is
 * loaded, it stays loaded (dlclose does not unload it).
 */

#ifndef PAGELEAP_H
#define PAGELEAP_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* The version of this header. pageleap_version() has that of the library. */
#define PAGELEAP_VERSION "0.1.0"
/* The parts of the header's version, as numbers. */
#define PAGELEAP_VERSION_MAJOR 0
#define PAGELEAP_VERSION_MINOR 1
#define PAGELEAP_VERSION_PATCH 0
/* A version as one number; a later version has a larger number. */
#define PAGELEAP_MAKE_VERSION(major, minor, patch) ((major) * 1000000 + (minor) * 1000 + (patch))
/* The header's version as one number, also for #if. pageleap_version_number() has the library's. */
#define PAGELEAP_VERSION_NUMBER                                                                    \
    PAGELEAP_MAKE_VERSION(PAGELEAP_VERSION_MAJOR, PAGELEAP_VERSION_MINOR, PAGELEAP_VERSION_PATCH)

#ifdef __cplusplus
/* A structure with its size set, and all else 0. */
#define PAGELEAP_INIT(type) ([] { type made = {}; made.size = sizeof(type); return made; }())
#else
/* A structure with its size set, and all else 0. */
#define PAGELEAP_INIT(type) ((type){ .size = sizeof(type) })
/* The placement "all on this node", for the call in which it stands. For C++ see pageleap.hpp. */
#define PAGELEAP_ON(node)                                                                          \
    (&(const pageleap_placement){ .size = sizeof(pageleap_placement),                              \
                                  .nodes = (const uint32_t[]){ (node) },                           \
                                  .node_count = 1 })
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* ---- Errors ---------------------------------------------------------------------------------- */

/* The kind of an error. The text, pageleap_last_error(), says the rest.
 *
 * Later versions may add kinds: treat a kind that you do not know as an error like any other. */
typedef enum pageleap_status {
    /* The function has done what was asked. */
    PAGELEAP_OK = 0,
    /* An argument is not possible, or a pointer that must not be NULL is NULL. Nothing was
     * attempted. */
    PAGELEAP_BAD_ARGUMENT = 1,
    /* A byte range is not inside the region, or not as the function demands it: whole pages, not
     * empty, with memory throughout, or without any memory. */
    PAGELEAP_BAD_RANGE = 2,
    /* The machine has no such node, or the node has no memory or is offline. */
    PAGELEAP_UNKNOWN_NODE = 3,
    /* The cpuset of the process does not allow memory of the node. */
    PAGELEAP_NODE_NOT_ALLOWED = 4,
    /* The kernel did not make pages of the size asked for. */
    PAGELEAP_NOT_HUGE = 5,
    /* A job or another call works on part of the range. */
    PAGELEAP_RANGE_BUSY = 6,
    /* A guard keeps pages of the range in their frames. */
    PAGELEAP_PINNED = 7,
    /* The pool has fewer free frames than needed. */
    PAGELEAP_POOL_EXHAUSTED = 8,
    /* The machine, the node or the memory cgroup has too little free memory. */
    PAGELEAP_OUT_OF_MEMORY = 9,
    /* Pages are not on the node for which they were asked. */
    PAGELEAP_MISPLACED = 10,
    /* The engine cannot work here. */
    PAGELEAP_ENGINE_REFUSED = 11,
    /* A system call failed. pageleap_last_error_detail() has its name, its addresses and its
     * errno. */
    PAGELEAP_SYSTEM_CALL = 12,
    /* A file of /proc or /sys could not be read, or its contents could not be understood. */
    PAGELEAP_SYSTEM_FILE = 13,
    /* The library cannot work on this machine, or does not know a structure of a newer header. */
    PAGELEAP_UNSUPPORTED = 14,
    /* A fixed limit of the library was reached. */
    PAGELEAP_LIMIT = 15,
    /* A defect of the library. It was caught where it would have ended the process. Please
     * report the text. */
    PAGELEAP_DEFECT = 16,
    /* Other code of this process has closed a descriptor of the library's. Its number may stand
     * for another file now, which is not touched. */
    PAGELEAP_DESCRIPTOR_LOST = 17,
    /* A thread that the work needs could not be started. pageleap_last_error_detail() has the
     * errno of pthread_create. With EAGAIN another thread of the process may be in execve: the
     * kernel starts no thread during execve, and if execve fails, the next call succeeds. */
    PAGELEAP_NO_THREAD = 18,
} pageleap_status;

/* The name of a status, such as "PAGELEAP_RANGE_BUSY"; "unknown" for other numbers. Constant. */
const char *pageleap_status_name(uint32_t status);

/* The version of the library, such as "0.1.0". Constant. */
const char *pageleap_version(void);

/* The version of the library as one number, which PAGELEAP_MAKE_VERSION makes of its parts. */
uint32_t pageleap_version_number(void);

/* ---- The last error of a thread -------------------------------------------------------------- */

/* An error, with its parts in fields. */
typedef struct pageleap_error {
    /* sizeof(pageleap_error). */
    size_t size;
    /* The kind; PAGELEAP_OK if no call of this thread has failed yet. */
    pageleap_status status;
    /* errno of the system call that failed, or 0. */
    int error_number;
    /* The name of that system call, or NULL. Constant. */
    const char *call;
    /* The first byte that the error is about. With PAGELEAP_BAD_RANGE and PAGELEAP_RANGE_BUSY
     * it is an offset in the region, else an address. 0 if the error is about no bytes. */
    size_t start;
    /* How many bytes the error is about. */
    size_t length;
    /* The whole text, in English: what was tried, on which range, what went wrong and why, and
     * after a semicolon what to do. Valid until the next call of this thread fails, or the
     * thread ends. */
    const char *message;
} pageleap_error;

/* The text of the last error of this thread, in English: what was tried, on which range, what
 * went wrong and why, and what to do. Empty if no call of this thread has failed yet; never
 * NULL. Calls that succeed leave the text as it is. Valid until the next call of this thread
 * fails, or the thread ends. */
const char *pageleap_last_error(void);

/* Fills in `error` with the last error of this thread. The returned status is that of this call
 * and not the last error: PAGELEAP_OK means that `error` was filled in. */
pageleap_status pageleap_last_error_detail(pageleap_error *error);

/* ---- Page sizes ------------------------------------------------------------------------------ */

/* The size of the pages of a pool and of the regions over it. */
typedef enum pageleap_page_size {
    /* 4 KB pages. */
    PAGELEAP_PAGE_4K = 0,
    /* Transparent huge pages (THP) of 2 MB: ordinary memory whose 4 KB pages the kernel has
     * joined. */
    PAGELEAP_PAGE_THP = 1,
    /* 2 MB pages of hugetlb; an administrator must have reserved them (nr_hugepages). */
    PAGELEAP_PAGE_2M = 2,
    /* 1 GB pages of hugetlb; an administrator must have reserved them (nr_hugepages). */
    PAGELEAP_PAGE_1G = 3,
} pageleap_page_size;

/* Bytes of one page of a size, one of pageleap_page_size; 0 for other numbers. */
size_t pageleap_page_bytes(uint32_t page_size);

/* ---- The machine ----------------------------------------------------------------------------- */

/* The machine at the moment when it was read: its nodes, their CPUs, memory and huge pages,
 * their distances, and which of them this process may use. A topology never changes; read
 * another one to see what is free now. */
typedef struct pageleap_topology pageleap_topology;

/* One memory node. */
typedef struct pageleap_node {
    /* sizeof(pageleap_node). */
    size_t size;
    /* The kernel's number of the node. Numbers are sparse: a machine may have the nodes 0 and
     * 4. */
    uint32_t id;
    /* The memory tier of the node: the smaller, the faster. -1 if the kernel does not say. */
    int32_t tier;
    /* Memory in bytes; 0 for a node that has only CPUs. */
    uint64_t total_bytes;
    /* Bytes that can be allocated without swapping. */
    uint64_t free_bytes;
    /* How many CPUs are online; 0 for a node that has only memory. */
    size_t cpu_count;
    /* The node itself if it has CPUs, else the nearest node with CPUs: the one that the firmware
     * names as initiator, or else the one at the shortest distance. */
    uint32_t nearest_with_cpus;
    /* Whether the cpuset of this process allows memory of the node. Also true if the cpuset is
     * not known: pageleap_topology_knows_allowed_nodes(). */
    bool is_allowed;
    /* Set to 0. */
    uint8_t reserved[3];
} pageleap_node;

/* The huge pages of one size that a node has reserved. */
typedef struct pageleap_huge_pages {
    /* sizeof(pageleap_huge_pages). */
    size_t size;
    /* Bytes of one page. */
    uint64_t page_bytes;
    /* How many pages the node has reserved (nr_hugepages). */
    uint64_t total;
    /* How many of these are free (free_hugepages). */
    uint64_t free;
    /* How many of these the kernel takes back once they are free (surplus_hugepages). */
    uint64_t surplus;
} pageleap_huge_pages;

/* Bandwidth and latency of the memory of a node for its initiators, the nodes nearest to it, as
 * the firmware states them (HMAT); nothing is measured. A figure is 0 where the firmware states
 * none. */
typedef struct pageleap_access {
    /* sizeof(pageleap_access). */
    size_t size;
    /* Which initiators the figures apply to. 0: all devices that access memory, such as CPUs and
     * network cards; 1: CPUs only. */
    uint32_t access_class;
    /* Megabytes per second. */
    uint64_t read_bandwidth_mb_per_s;
    /* Megabytes per second. */
    uint64_t write_bandwidth_mb_per_s;
    /* Nanoseconds. */
    uint64_t read_latency_ns;
    /* Nanoseconds. */
    uint64_t write_latency_ns;
} pageleap_access;

/* Reads the machine. Free the topology with pageleap_topology_free(). */
pageleap_status pageleap_topology_read(pageleap_topology **topology);

/* Frees a topology and its texts; NULL is allowed. */
void pageleap_topology_free(pageleap_topology *topology);

/* How many nodes are online; 0 for NULL. */
size_t pageleap_topology_node_count(const pageleap_topology *topology);

/* Fills in `node` with the node at an index, 0 to pageleap_topology_node_count() - 1, in the
 * order of the nodes' numbers. */
pageleap_status pageleap_topology_node(const pageleap_topology *topology,
                                       size_t index,
                                       pageleap_node *node);

/* The online CPUs of a node: writes the first `capacity` of them to `cpus`, and their number to
 * `count`, which may be NULL. */
pageleap_status pageleap_topology_cpus(const pageleap_topology *topology,
                                       uint32_t node_id,
                                       uint32_t *cpus,
                                       size_t capacity,
                                       size_t *count);

/* Fills in the huge pages of `page_bytes` that a node has reserved. All counts are 0 if the
 * node has none of that size. */
pageleap_status pageleap_topology_huge_pages(const pageleap_topology *topology,
                                             uint32_t node_id,
                                             uint64_t page_bytes,
                                             pageleap_huge_pages *huge_pages);

/* Fills in the bandwidth and latency of a node's memory for one access class, as the firmware
 * states them. All figures are 0 if it states none. */
pageleap_status pageleap_topology_access(const pageleap_topology *topology,
                                         uint32_t node_id,
                                         uint32_t access_class,
                                         pageleap_access *access);

/* The initiators of a node's memory, to which the figures of pageleap_topology_access() apply:
 * writes the first `capacity` of them to `initiators`, and their number to `count`, which may be
 * NULL. */
pageleap_status pageleap_topology_initiators(const pageleap_topology *topology,
                                             uint32_t node_id,
                                             uint32_t access_class,
                                             uint32_t *initiators,
                                             size_t capacity,
                                             size_t *count);

/* The distance of the firmware (SLIT): the relative cost of memory on node `to` for CPUs of node
 * `from`. 10 is that of the same node, 20 twice as much; it is never a latency. 0 if a node is not
 * online, if the kernel does not say, or if the topology is NULL. */
uint32_t pageleap_topology_distance(const pageleap_topology *topology,
                                    uint32_t from,
                                    uint32_t to);

/* The nodes that a text in numactl's notation names, such as "0,2-3", "all", "!1" or "+0":
 * writes the numbers of the first `capacity` of them to `nodes`, and how many the text names to
 * `count`, which may be NULL. A text that names no node, or one that does not exist, gives
 * PAGELEAP_BAD_ARGUMENT. */
pageleap_status pageleap_topology_parse_nodes(const pageleap_topology *topology,
                                              const char *text,
                                              uint32_t *nodes,
                                              size_t capacity,
                                              size_t *count);

/* Whether the nodes that the cpuset of this process allows are known. If not, all nodes count as
 * allowed. False for NULL. */
bool pageleap_topology_knows_allowed_nodes(const pageleap_topology *topology);

/* Whether the cpuset of this process allows memory of a node. False for NULL. */
bool pageleap_topology_is_allowed(const pageleap_topology *topology, uint32_t node_id);

/* One warning: a sentence about a file of the kernel that is damaged or cannot be read, and the
 * facts that are missing because of it. `index` counts from 0; NULL beyond the last. Valid until
 * the topology is freed. */
const char *pageleap_topology_warning(const pageleap_topology *topology, size_t index);

/* ---- What machine, user and container allow -------------------------------------------------- */

/* The state of a finding. */
typedef enum pageleap_state {
    /* It was tried, or read, and works. */
    PAGELEAP_WORKS = 0,
    /* It works, with a restriction that the reason names. */
    PAGELEAP_LIMITED = 1,
    /* It does not work here. */
    PAGELEAP_MISSING = 2,
    /* It could be neither tried nor read. */
    PAGELEAP_UNKNOWN = 3,
} pageleap_state;

/* What was found out about this machine, user and container by trying calls and reading files.
 * Capabilities never change. */
typedef struct pageleap_capabilities pageleap_capabilities;

/* What a program intends to do. */
typedef struct pageleap_demand {
    /* sizeof(pageleap_demand). */
    size_t size;
    /* Bytes of the region that is to move; 0 for a few pages. */
    uint64_t bytes;
    /* The size of its pages. */
    uint32_t page_size;
    /* Whether to move a few pages as a trial, which gives the finding "leap". The trial
     * installs the SIGSEGV handler, as a job does. */
    bool try_leap;
    /* Must be 0. */
    uint8_t reserved[3];
} pageleap_demand;

/* One finding. Texts are valid until the capabilities are freed, and never NULL. */
typedef struct pageleap_finding {
    /* sizeof(pageleap_finding). */
    size_t size;
    /* The topic: a name that stays the same from version to version, such as "cpuset",
     * "hugetlb-2m" or "free-memory". pageleap_engine has the topic of each engine. */
    const char *topic;
    /* Its state. */
    enum pageleap_state state;
    /* Whether the finding rules out the move that the demand describes. */
    bool blocks;
    /* The finding in one line. */
    const char *summary;
    /* What is wrong or restricted; empty if everything works. */
    const char *reason;
    /* What was seen, line by line: calls with their results, files with their contents. */
    const char *observed;
    /* How many remedies there are: pageleap_capabilities_remedy(). */
    size_t remedy_count;
} pageleap_finding;

/* One way to change a finding. Texts are valid until the capabilities are freed, and never
 * NULL. */
typedef struct pageleap_remedy {
    /* sizeof(pageleap_remedy). */
    size_t size;
    /* Who can apply the remedy. */
    const char *who;
    /* The exact line to type or to add. */
    const char *line;
    /* What else the line grants, or takes away: the price. */
    const char *grants;
} pageleap_remedy;

/* Finds out what this machine, user and container allow. It tries each call that matters on
 * memory of its own, and leaves everything as it was. It takes tens of milliseconds. `demand`
 * may be NULL: a few pages of 4 KB. Free the capabilities with pageleap_capabilities_free(). */
pageleap_status pageleap_probe(const pageleap_demand *demand,
                               pageleap_capabilities **capabilities);

/* Frees capabilities; NULL is allowed. */
void pageleap_capabilities_free(pageleap_capabilities *capabilities);

/* The number of findings; 0 for NULL. */
size_t pageleap_capabilities_count(const pageleap_capabilities *capabilities);

/* Whether a topic works, perhaps with a restriction: its state is PAGELEAP_WORKS or
 * PAGELEAP_LIMITED. False for topics that were not looked at, and for unknown names. */
bool pageleap_capabilities_has(const pageleap_capabilities *capabilities,
                               const char *topic);

/* Fills in `finding` with the finding at an index, 0 to pageleap_capabilities_count() - 1. */
pageleap_status pageleap_capabilities_finding(const pageleap_capabilities *capabilities,
                                              size_t index,
                                              pageleap_finding *finding);

/* Fills in `remedy` with a remedy of the finding at an index. Remedies are in order, the least
 * intrusive first: 0 to the finding's remedy_count - 1. */
pageleap_status pageleap_capabilities_remedy(const pageleap_capabilities *capabilities,
                                             size_t finding_index,
                                             size_t remedy_index,
                                             pageleap_remedy *remedy);

/* ---- Where pages should go, and where they lie ----------------------------------------------- */

/* How pages are spread over nodes, and on which node the page tables lie that map the pages.
 *
 * With one node all pages lie there. With several, stripes of the range go to the nodes in
 * turn. A node that is named twice, or is not one of the pool's, gives PAGELEAP_BAD_ARGUMENT.
 * In pageleap_pool_new(), a node that the machine lacks gives PAGELEAP_UNKNOWN_NODE. */
typedef struct pageleap_placement {
    /* sizeof(pageleap_placement). */
    size_t size;
    /* The nodes' numbers. The array belongs to the caller and is not needed after the call. */
    const uint32_t *nodes;
    /* How many nodes `nodes` has; at least 1. */
    size_t node_count;
    /* How many stripes of each round a node gets, 1 to 255, in the order of `nodes`; NULL: one
     * stripe each. */
    const uint32_t *weights;
    /* Bytes of a stripe, a multiple of the page size; 0: a size from one page to 2 MB, so that
     * a region has at least 256 stripes. */
    size_t stripe_bytes;
    /* Whether page tables go to page_tables_node. If not, they go to the node of the data, or, if
     * that has no CPUs, to the nearest node with CPUs. */
    bool has_page_tables_node;
    /* The node for page tables. */
    uint32_t page_tables_node;
} pageleap_placement;

/* The result of comparing where pages lie with where they should lie. */
typedef struct pageleap_verification {
    /* sizeof(pageleap_verification). */
    size_t size;
    /* Pages that were looked at. */
    uint64_t pages;
    /* Pages that are present, but on another node than their placement says. */
    uint64_t misplaced;
    /* Pages that are not present, for example because they are swapped out. */
    uint64_t absent;
} pageleap_verification;

/* How many pages lie on a node. The structure has no size field, because it is used in arrays;
 * later versions will not change it. */
typedef struct pageleap_node_pages {
    /* The node's number. */
    uint32_t node;
    /* Set to 0. */
    uint32_t reserved;
    /* How many pages. */
    uint64_t pages;
} pageleap_node_pages;

/* ---- Pools ----------------------------------------------------------------------------------- */

/* Memory of one or several nodes: faulted in, verified, and free to be used by regions.
 *
 * The memory goes back to the system when the pool has been freed and no region has frames of
 * it any more. */
typedef struct pageleap_pool pageleap_pool;

/* How a pool is made. If all fields but size are 0, the pool has 4 KB pages and is not locked. */
typedef struct pageleap_pool_options {
    /* sizeof(pageleap_pool_options). */
    size_t size;
    /* The size of its pages, one of pageleap_page_size. */
    uint32_t page_size;
    /* Whether the pool is locked, so that it is never swapped out. Locked memory counts against
     * RLIMIT_MEMLOCK. hugetlb pages are never swapped out in any case. */
    bool is_locked;
    /* How many threads fault the memory in, at most one for each 32 MB; 0: one for each CPU of
     * a node, at most 8. */
    size_t threads;
    /* A callback for progress, called about every 32 MB with the bytes done and the bytes to do;
     * NULL: none. The threads that fault the memory in call it, possibly several at once. It must
     * not call functions of this library, throw or longjmp. */
    void (*progress)(void *data, uint64_t done, uint64_t total);
    /* Passed to the callback as it is. */
    void *progress_data;
} pageleap_pool_options;

/* Makes a pool: takes `bytes` bytes (at most 2^46, rounded up to whole pages) of the nodes of a
 * placement, and faults them in. Then it asks the kernel whether they lie on their nodes, in pages
 * of the size asked for. `options` may be NULL. The call takes some 100 ms per GB of 4 KB pages.
 * If it fails, everything has been given back.
 *
 * The pool is freed with pageleap_pool_free(). */
pageleap_status pageleap_pool_new(const pageleap_placement *place,
                                  uint64_t bytes,
                                  const pageleap_pool_options *options,
                                  pageleap_pool **pool);

/* Frees a pool; NULL is allowed. Jobs and regions that have frames of the pool go on, and its
 * memory goes back to the system after the last of them. */
void pageleap_pool_free(pageleap_pool *pool);

/* The size of a pool's pages, one of pageleap_page_size. 0, which is also PAGELEAP_PAGE_4K, for
 * NULL. */
uint32_t pageleap_pool_page_size(const pageleap_pool *pool);

/* The size of a pool in bytes; 0 for NULL. */
uint64_t pageleap_pool_bytes(const pageleap_pool *pool);

/* The free bytes of a pool; 0 for NULL. Frames that a job is recycling do not count as free,
 * but a call that needs them gets them. */
uint64_t pageleap_pool_free_bytes(const pageleap_pool *pool);

/* The free bytes of a pool on one node; 0 for a node that is not one of the pool's, and for
 * NULL. */
uint64_t pageleap_pool_free_bytes_on(const pageleap_pool *pool, uint32_t node);

/* The nodes of a pool: writes the first `capacity` of them to `nodes`, and their number to
 * `count`, which may be NULL. */
pageleap_status pageleap_pool_nodes(const pageleap_pool *pool,
                                    uint32_t *nodes,
                                    size_t capacity,
                                    size_t *count);

/* Asks the kernel where all frames of a pool lie, free or not. It takes some 60 ms per GB of 4
 * KB pages; jobs may go on meanwhile. */
pageleap_status pageleap_pool_verify(const pageleap_pool *pool,
                                     pageleap_verification *verification);

/* ---- Regions --------------------------------------------------------------------------------- */

/* A range of addresses that stays where it is for as long as the region lives, while its pages
 * change their frames.
 *
 * Threads of this process may read and write the range at any time, also while it moves, with
 * ordinary loads, stores and atomic operations; nothing is lost. In return the program keeps to
 * these rules:
 *
 * - System calls that write into a part that is moving (read, recv, io_uring) may fail with
 *   EFAULT, or end early with a short count, with the engines mprotect and precopy-protect.
 *   They can be repeated where a failed call consumes nothing (files, pipes, stream sockets),
 *   but not with datagrams and eventfds.
 * - No device, nor the kernel for one, may use its pages without a guard (pageleap_region_pin),
 *   because a device goes on using the old frames, and its writes are lost: O_DIRECT, RDMA,
 *   registered io_uring buffers, vmsplice, process_vm_writev, MSG_ZEROCOPY.
 * - No process-shared, priority-inheriting or robust mutexes, semaphores or condition variables
 *   in it. Ordinary private ones are fine.
 * - No stacks and no thread-local storage in it.
 * - No allocations of this library in it: a malloc() that takes memory from regions must serve
 *   threads of the library (pageleap_thread_is_ours) and calls of the library from elsewhere.
 * - No userfaultfd and no protection keys on it, and nothing else mapped into its range.
 * - Children made by fork do not get it, and must not touch it.
 * - With the engines mprotect and precopy-protect, no thread may write into it while that
 *   thread blocks SIGSEGV.
 * - mlock and madvise may be used on any part of it at any time, and their effects survive moves.
 *   The exception is MADV_REMOVE, which takes the memory away. mprotect may be used, too, with two
 *   rules: pages that a job is to move must stay readable until it has ended, and pages that
 *   nobody could write must not become writable while they move. The effect of a call that comes
 *   some milliseconds before pages move may be lost for them. */
typedef struct pageleap_region pageleap_region;

/* The address, size and identity of a region. */
typedef struct pageleap_region_info {
    /* sizeof(pageleap_region_info). */
    size_t size;
    /* The first byte, which never changes. */
    void *start;
    /* The length in bytes. */
    size_t length;
    /* The identity of the region in reports. */
    uint64_t id;
    /* The size of the pages, one of pageleap_page_size. */
    uint32_t page_size;
    /* Set to 0. */
    uint32_t reserved;
} pageleap_region_info;

/* Makes a region of `length` bytes (rounded up to whole pages), all zero, of frames of a pool.
 * `place` names nodes of the pool; NULL: the placement of the pool. If the region needs frames
 * that a job is still recycling, the call waits for them. The region cannot grow. It is freed with
 * pageleap_region_free(), and does not need the pool's handle. */
pageleap_status pageleap_region_new(const pageleap_pool *pool,
                                    const pageleap_placement *place,
                                    size_t length,
                                    pageleap_region **region);

/* Makes a region of no bytes, which can grow to `capacity` bytes (rounded up to whole pages) at
 * the same address: pageleap_region_grow(). `page` is the size of its pages, one of
 * pageleap_page_size. The region takes address space only, and is freed with
 * pageleap_region_free(). */
pageleap_status pageleap_region_reserve(size_t capacity,
                                        uint32_t page,
                                        pageleap_region **region);

/* Frees a region; NULL is allowed. The call cancels the jobs that work on the region, waits for
 * them, unmaps the region, and gives its frames back to their pools. From the call on no thread
 * may touch the memory or use the handle. While a guard is left, the whole region stays mapped and
 * keeps its frames, so that devices can finish; dropping the last guard gives them back. */
void pageleap_region_free(pageleap_region *region);

/* The first byte of a region, which never changes; NULL for NULL. */
void *pageleap_region_start(const pageleap_region *region);

/* The length of a region in bytes; 0 for NULL. */
size_t pageleap_region_length(const pageleap_region *region);

/* Fills in `info` with a region's figures. */
pageleap_status pageleap_region_describe(const pageleap_region *region,
                                         pageleap_region_info *info);

/* Gives the address of a part of a region, after checking that the part is inside the region
 * and has memory everywhere. The part may be any bytes. */
pageleap_status pageleap_region_view(const pageleap_region *region,
                                     size_t offset,
                                     size_t length,
                                     void **address);

/* Extends a region to `length` bytes (rounded up to whole pages); nothing changes if it is that
 * long already, or longer. The new part is zero; addresses do not change. More than the
 * capacity gives PAGELEAP_BAD_RANGE. `place` may be NULL, as for pageleap_region_new(). If
 * `pool` is NULL, `place` must be NULL, too: the new part then has no memory, and must not be
 * touched before pageleap_region_back(). */
pageleap_status pageleap_region_grow(const pageleap_region *region,
                                     size_t length,
                                     const pageleap_pool *pool,
                                     const pageleap_placement *place);

/* Gives the frames of a part, whole pages, back to their pools. The contents are gone, and
 * touching the part raises SIGSEGV until pageleap_region_back(), so no thread may use the part
 * during and after the call. Pages without memory stay as they are.
 *
 * The part may belong to the range of a running job, which leaves the pages then
 * (PAGELEAP_REASON_DISCARDED). The call gives PAGELEAP_RANGE_BUSY while the job is moving pages of
 * the part, while it begins or ends, and as long as it lasts if it moves hugetlb pages;
 * pageleap_region_discard_within() waits instead. A guard on the part gives PAGELEAP_PINNED. If
 * the call fails, no page has changed, unless the limit of mappings (vm.max_map_count) was reached
 * on the way. */
pageleap_status pageleap_region_discard(const pageleap_region *region,
                                        size_t offset,
                                        size_t length);

/* As pageleap_region_discard(), but waits for at most `timeout_ns` nanoseconds (UINT64_MAX: as
 * long as it takes) until no job is moving pages of the part, and no other call works on it.
 * Meanwhile jobs try no pages of the part, and no new job gets it (PAGELEAP_RANGE_BUSY). So the
 * call waits for one attempt of a job, some milliseconds; with hugetlb pages it waits for the end
 * of the job. Signal handlers of the program run meanwhile, and do not end the wait. A program
 * that may want to end it makes several calls with short times. */
pageleap_status pageleap_region_discard_within(const pageleap_region *region,
                                               size_t offset,
                                               size_t length,
                                               uint64_t timeout_ns);

/* Gives zeroed frames of a pool to a part, whole pages, that has no memory. If some of it has
 * memory, the call gives PAGELEAP_BAD_RANGE. `place` may be NULL, as for pageleap_region_new(). The
 * part may belong to the range of a running job, as for pageleap_region_discard(). */
pageleap_status pageleap_region_back(const pageleap_region *region,
                                     size_t offset,
                                     size_t length,
                                     const pageleap_pool *pool,
                                     const pageleap_placement *place);

/* As pageleap_region_back(), but waits as pageleap_region_discard_within() does. */
pageleap_status pageleap_region_back_within(const pageleap_region *region,
                                            size_t offset,
                                            size_t length,
                                            const pageleap_pool *pool,
                                            const pageleap_placement *place,
                                            uint64_t timeout_ns);

/* Asks the kernel whether each page of a region that has memory is present, on the node that
 * the page was placed on. Jobs may go on meanwhile. */
pageleap_status pageleap_region_verify(const pageleap_region *region,
                                       pageleap_verification *verification);

/* The nodes on which the pages of a region lie, as the kernel says, with the number of pages:
 * writes the first `capacity` nodes to `nodes`, and their number to `count`, which may be NULL. */
pageleap_status pageleap_region_placement(const pageleap_region *region,
                                          pageleap_node_pages *nodes,
                                          size_t capacity,
                                          size_t *count);

/* ---- Guards ---------------------------------------------------------------------------------- */

/* A guard: keeps pages of a region in their frames. */
typedef struct pageleap_guard pageleap_guard;

/* Makes a guard, which keeps the pages of a part of a region in their frames until
 * pageleap_guard_drop(). Hold a guard as long as a device, or the kernel for a device, may use the
 * frames: from before the submission of O_DIRECT, RDMA, MSG_ZEROCOPY, vmsplice or
 * process_vm_writev until after its completion, and from before the registration of an io_uring
 * buffer until after its unregistration, in either direction. Once such a page is pinned, its
 * frame is used directly, whatever the page tables say, and no engine can notice the writes. The
 * part may be any bytes that have memory; the guard is on the pages that they touch. The call
 * returns once no job moves these pages. Jobs move everything else meanwhile. Guards may overlap. */
pageleap_status pageleap_region_pin(const pageleap_region *region,
                                    size_t offset,
                                    size_t length,
                                    pageleap_guard **guard);

/* Drops a guard, so that its pages may move; NULL is allowed. */
void pageleap_guard_drop(pageleap_guard *guard);

/* ---- Migration contexts ---------------------------------------------------------------------- */

/* A migration context keeps threads and userfaultfd descriptors of a job for the next job. Many
 * small jobs, one after the other, take a fraction of the time with a context, because no job has
 * to make these anew. Without a context each job makes its own, and between two jobs the process
 * has no thread and no descriptor of a job.
 *
 * The field context of pageleap_job_options gives a context to a job. The context makes nothing
 * before the first job needs it. Then it has about as many threads as jobs have run at the same
 * time, up to three more that read messages of userfaultfds, and at most ten descriptors. Between
 * jobs the threads sleep. Jobs of several threads may use a context at the same time.
 *
 * A kept thread has the scheduling policy, nice value, affinity, memory policy and cgroup of the
 * thread that started the job for which it was made. The thread that starts a later job passes
 * none of these on to it. A program whose threads differ in these makes several contexts.
 *
 * A context works only in the process that has made it. In a child made by fork() it keeps
 * nothing, and a job with this context works as without one. The child may free it. */
typedef struct pageleap_migration_context pageleap_migration_context;

/* Makes a migration context that keeps nothing yet. It is freed with
 * pageleap_migration_context_free(). */
pageleap_status pageleap_migration_context_new(pageleap_migration_context **context);

/* Frees a migration context; NULL is allowed. The call does not wait for jobs that use the
 * context: they keep their threads and descriptors until they end. Sleeping threads of the context
 * end soon after the call. */
void pageleap_migration_context_free(pageleap_migration_context *context);

/* ---- What is to move, and how ---------------------------------------------------------------- */

/* The method by which pages are moved, and its effect on the threads that use them meanwhile. With
 * every engine nothing is lost, and no thread keeps a page from moving by writing to it. Threads
 * wait for milliseconds at most while the job gets a CPU; see pageleap_job_start() for what that
 * depends on. Where all CPUs are busy, expect waits of some 20 ms. If the comment of an engine names
 * a topic of pageleap_finding, the engine works where the topic does. */
typedef enum pageleap_engine {
    /* The library chooses the best engine that works here: for each job, and again for each area,
     * by how many threads waited for earlier areas. Where an engine is refused, another one stands
     * in. */
    PAGELEAP_ENGINE_AUTO = 0,
    /* Pre-copy: copies pages while threads write to them, and copies dirty pages again. Then it
     * unmaps the area for a moment, and copies the rest. System calls do not fail because of it.
     * Needs Linux 6.7, and a userfaultfd that also holds up the kernel's own accesses (not
     * UFFD_USER_MODE_ONLY: root, vm.unprivileged_userfaultfd=1 or access to /dev/userfaultfd). Not
     * for hugetlb pages. Topic: "freeze". */
    PAGELEAP_ENGINE_PRECOPY = 1,
    /* Write-protects pages while it copies them (UFFDIO_WRITEPROTECT). A thread that writes to one
     * waits in the page fault until the library lifts the protection of that page, which is then
     * copied again. System calls do not fail because of it. Needs Linux 6.6 and a userfaultfd as
     * precopy does. Also for hugetlb pages. Topic: "write-barrier". */
    PAGELEAP_ENGINE_WP_SYNC = 2,
    /* Pre-copy as precopy does it, but at the end the area becomes read-only (mprotect) for a
     * moment: system calls that write into it in that moment fail with EFAULT. Needs Linux 6.7 and
     * no privilege. Topic: "write-tracking". */
    PAGELEAP_ENGINE_PRECOPY_PROTECT = 3,
    /* Makes pages read-only (mprotect) while they are copied: system calls that write into them
     * fail with EFAULT. Works wherever the library does (Linux 5.14), without privilege, so
     * it has no topic. */
    PAGELEAP_ENGINE_MPROTECT = 4,
    /* Stop-and-copy: unmaps an area, copies it, and maps the copy. A thread that touches the area
     * meanwhile, to read or to write, waits in the page fault until it has been copied. System
     * calls do not fail because of it. Needs Linux 5.14, and a userfaultfd as precopy does; for
     * hugetlb pages of 2 MB Linux 5.18. Not for those of 1 GB. Topic: "hold", for hugetlb pages of
     * 2 MB "hold-hugetlb". */
    PAGELEAP_ENGINE_STOP_COPY = 5,
    /* The kernel's move_pages(2), for memory that no pool owns: pageleap_leap_memory(). It has
     * no topic of its own. */
    PAGELEAP_ENGINE_KERNEL = 6,
    /* Moves private anonymous memory that no pool owns in place (UFFDIO_MOVE):
     * pageleap_leap_memory(). System calls do not fail because of it. Needs Linux 6.8, and a
     * userfaultfd as precopy does. Topic: "memory-in-place". */
    PAGELEAP_ENGINE_UFFD_MOVE = 7,
} pageleap_engine;

/* A range of a job: bytes of a region, in whole pages, and where they go. */
typedef struct pageleap_range {
    /* sizeof(pageleap_range), the same in all elements of an array. */
    size_t size;
    /* The region whose pages are to move. */
    const pageleap_region *region;
    /* The first byte, from the start of the region. */
    size_t offset;
    /* How many bytes. If length and offset are 0: the whole region. */
    size_t length;
    /* The pool whose frames the pages get. Pages that already have a frame of this pool on the
     * right node, and pages without memory, stay as they are. */
    const pageleap_pool *pool;
    /* The nodes of the pool that the pages go to; NULL: as the pool is placed. */
    const pageleap_placement *place;
} pageleap_range;

/* How a job works. If all fields but size are 0, the library chooses. */
typedef struct pageleap_job_options {
    /* sizeof(pageleap_job_options). */
    size_t size;
    /* The engine, one of pageleap_engine. If an engine other than PAGELEAP_ENGINE_AUTO cannot
     * work here, the job is refused (PAGELEAP_ENGINE_REFUSED). */
    uint32_t engine;
    /* The most threads that copy, up to 64; 0: one for each four CPUs of the destination and
     * one for each 2 MB of the ranges, whichever is fewer; at least 1 and at most 8. */
    uint32_t threads;
    /* The initial size of an area in bytes, a multiple of the page size; 0: chosen by the job,
     * which may change it as it goes. */
    size_t area_bytes;
    /* Nanoseconds after which the job begins no new area; 0: no limit. */
    uint64_t timeout_ns;
    /* The longest time, in nanoseconds, for which a thread of the program should have to wait
     * for the job; 0: one millisecond. This is a target, not a limit: jobs that choose their
     * areas fit them to it, and every page moves in any case. */
    uint64_t wait_budget_ns;
    /* The most bytes that all threads together copy per second, repeated copies included; 0: no
     * limit. Each thread may run ahead of the limit by one area. That is area_bytes if it is
     * set, else at most the largest of 2 MB, one page and the bytes that the rate copies in 10
     * ms. */
    uint64_t rate_limit_bytes_per_s;
    /* How long, in nanoseconds, the job waits for guards once everything else has moved. The
     * time starts anew whenever a guard is dropped. 0: one second; -1: the job does not wait. */
    int64_t pin_patience_ns;
    /* How many copies of an area may be spoilt by writes before its writers must wait until the
     * area has moved (engines mprotect and wp-sync, and for hugetlb pages precopy-protect). 0: 3.
     * -1: writers wait from the start. */
    int32_t max_disturbed_copies;
    /* Into how many parts an area is split when writes have spoilt its copy (engine mprotect); 0:
     * 2 parts; 1: areas are not split. */
    uint32_t reduction_factor;
    /* The context whose threads and descriptors the job uses, and leaves there for the next job;
     * NULL: the job makes its own. The context may be freed once the job has started: the job
     * keeps what it uses until it ends. */
    const pageleap_migration_context *context;
    /* The most rounds in which an engine that follows writes copies dirty pages again, before it
     * closes the area and copies the rest. 0: 4 rounds. -1: none. */
    int32_t max_rounds;
    /* Set to 0. */
    uint32_t reserved;
} pageleap_job_options;

/* The name of an engine, such as "wp-sync"; "unknown" for other numbers. Constant. */
const char *pageleap_engine_name(uint32_t engine);

/* Installs the library's SIGSEGV handler in front of the present one, which goes on getting
 * every fault that is not about a moving page. Without this call the first job installs the
 * handler. The engines mprotect and precopy-protect need it; the others need it where their own
 * way is refused.
 *
 * If another handler has been installed over the library's since, that one would get the faults of
 * writers. The engines that raise signals are refused then, and `auto` leaves them out.
 *
 * If your handler passes faults that are not its own to the handler that it replaced, with all
 * three arguments, call this function before you install yours. The call is your promise that your
 * handler does so. These engines are then not refused, provided your handler has SA_SIGINFO and
 * not SA_RESETHAND. While your handler runs, no other signal handler may store into a region: if
 * one might, let yours block all signals (sa_mask). */
pageleap_status pageleap_install_fault_handler(void);

/* ---- Warnings of reports --------------------------------------------------------------------- */

/* The subject of a warning. */
typedef enum pageleap_warning_kind {
    /* None of those below. */
    PAGELEAP_WARNING_OTHER = 0,
    /* The engine keeps writers away by mprotect and SIGSEGV: system calls that write into a moving
     * area may fail with EFAULT. */
    PAGELEAP_WARNING_SYSTEM_CALLS_MAY_FAIL = 1,
    /* Another SIGSEGV handler was installed over the library's. Areas that only the engine
     * mprotect could move stay where they are. */
    PAGELEAP_WARNING_NO_FAULT_HANDLER = 2,
    /* The job's threads do not run on the CPUs of the destination's node: it has none, or the
     * process may not use them. */
    PAGELEAP_WARNING_AFFINITY = 3,
    /* The job's threads keep a low priority, so threads that wait for a page may wait until such a
     * thread gets a CPU. */
    PAGELEAP_WARNING_PRIORITY = 4,
    /* Fewer threads copy than asked for. */
    PAGELEAP_WARNING_THREADS = 5,
    /* Page tables do not lie where they were asked to lie. */
    PAGELEAP_WARNING_PAGE_TABLES = 6,
    /* The cpuset no longer allows a node of the destination. */
    PAGELEAP_WARNING_CPUSET = 7,
    /* Another process traces the job's threads (ptrace: strace, a debugger). Pages have stayed, or
     * another engine has moved them. */
    PAGELEAP_WARNING_TRACER = 8,
    /* Too few mappings are left (vm.max_map_count) to go around all guards: pages between guards
     * have stayed, too. */
    PAGELEAP_WARNING_GUARDS = 9,
    /* Neighbouring mappings of hugetlb pages could be one, and were not joined. */
    PAGELEAP_WARNING_MAPPINGS = 10,
    /* An attribute of a range (madvise, mlock) is lost, or the range has one that its user has not
     * set. */
    PAGELEAP_WARNING_ATTRIBUTES = 11,
    /* Core dumps may contain the data twice. */
    PAGELEAP_WARNING_CORE_DUMPS = 12,
    /* Frames that pages have left are out of circulation until the pool's next attempt. */
    PAGELEAP_WARNING_RECYCLING = 13,
    /* Pages were tried again for one reason, and stay for another reason. */
    PAGELEAP_WARNING_LATER_REASON = 14,
    /* Pages may lie elsewhere than the report says. */
    PAGELEAP_WARNING_PLACES = 15,
    /* A range ends within a huge page, which moves as a whole. */
    PAGELEAP_WARNING_EDGES = 16,
} pageleap_warning_kind;

/* A warning of a report: something went less well than asked. */
typedef struct pageleap_warning {
    /* sizeof(pageleap_warning). */
    size_t size;
    /* In words. Valid until the report is freed, and never NULL. */
    const char *text;
    /* The name of the call that failed, or NULL if the warning is about none. Constant. */
    const char *call;
    /* The error number of that call, or 0. */
    int error_number;
    /* The subject of the warning. */
    enum pageleap_warning_kind kind;
} pageleap_warning;

/* ---- Reports --------------------------------------------------------------------------------- */

/* The reason why a job has ended. In any case pages that have moved stay moved, all others stay
 * where they were, and all are whole. */
typedef enum pageleap_ended {
    /* Every page was dealt with. */
    PAGELEAP_COMPLETED = 0,
    /* The program cancelled or freed the job. */
    PAGELEAP_CANCELLED = 1,
    /* The time was up. */
    PAGELEAP_TIMED_OUT = 2,
    /* The program freed a region that the job worked on. */
    PAGELEAP_REGION_FREED = 3,
    /* The cpuset of the process was changed and no longer allows a node that pages were to
     * move to. */
    PAGELEAP_CPUSET_CHANGED = 4,
    /* Some pages could not be moved, or a guard has kept them where they are. */
    PAGELEAP_FAILED = 5,
} pageleap_ended;

/* The kind of memory that a job moves. */
typedef enum pageleap_source {
    /* Pages of a region. source_id is its identity, pageleap_region_describe(), and offsets count
     * from its start. Later versions may add other sources. */
    PAGELEAP_SOURCE_REGION = 0,
    /* Pages of a process that lie in no region. source_id is the number of the process (pid), and
     * offsets are addresses. */
    PAGELEAP_SOURCE_PROCESS = 1,
} pageleap_source;

/* The outcome of a page. */
typedef enum pageleap_outcome {
    /* The page lies in a frame of the destination now. */
    PAGELEAP_MIGRATED = 0,
    /* There was nothing to do: the page lay in such a frame already, has no memory, or was not to
     * move, for the reason that its run gives. */
    PAGELEAP_UNCHANGED = 1,
    /* The page was tried without success, and the job was stopped before the next try; or a guard
     * kept it in its frame. */
    PAGELEAP_BUSY = 2,
    /* The job has given the page up: a system call was refused each time the page was tried. */
    PAGELEAP_NOT_MOVABLE = 3,
    /* The job was stopped before it tried the page. */
    PAGELEAP_NOT_ATTEMPTED = 4,
} pageleap_outcome;

/* Why pages stay where they are. */
typedef enum pageleap_reason {
    /* They have moved, or did not have to. */
    PAGELEAP_REASON_NONE = 0,
    /* Threads wrote to them while they were copied, and the job was stopped before the next try. */
    PAGELEAP_REASON_WRITTEN = 1,
    /* A guard keeps them in their frames: pageleap_region_pin(). */
    PAGELEAP_REASON_GUARDED = 2,
    /* A system call was refused; reason_errno has its error number. */
    PAGELEAP_REASON_CALL_REFUSED = 3,
    /* A thread blocks SIGSEGV, and the only engine that is left would kill it. */
    PAGELEAP_REASON_SIGNAL_BLOCKED = 4,
    /* The job was stopped before it tried them. */
    PAGELEAP_REASON_STOPPED = 5,
    /* No page is present there: the process has not touched them. */
    PAGELEAP_REASON_ABSENT = 6,
    /* They have been swapped out. */
    PAGELEAP_REASON_SWAPPED_OUT = 7,
    /* Nothing is mapped there. */
    PAGELEAP_REASON_UNMAPPED = 8,
    /* They are the kernel's zero page, which stands for pages that were only read. */
    PAGELEAP_REASON_ZERO_PAGE = 9,
    /* They are mapped more than once, by a child of fork() for instance. */
    PAGELEAP_REASON_SHARED = 10,
    /* No pages of such mappings move: memory of a device, of the kernel, or secret. */
    PAGELEAP_REASON_UNMOVABLE = 11,
    /* The kernel did not move them each time they were tried: they are pinned for I/O, locked, or
     * being written back. */
    PAGELEAP_REASON_IN_USE = 12,
    /* The node of the destination has no room for them. */
    PAGELEAP_REASON_NO_ROOM = 13,
    /* The process has ended, or runs another program now. */
    PAGELEAP_REASON_PROCESS_ENDED = 14,
    /* The process ended, or began to run another program, during the call that was to move them;
     * it is not known whether they moved. */
    PAGELEAP_REASON_UNCERTAIN = 15,
    /* They lie on a node from which no page was to move. */
    PAGELEAP_REASON_OTHER_NODE = 16,
    /* They arrived, and have moved on since: they belong to a huge page of which another part was
     * to go elsewhere, or something else has moved them. */
    PAGELEAP_REASON_MOVED_ON = 17,
    /* They belong to a transparent huge page, and the node of the destination has no free block of
     * 2 MB. */
    PAGELEAP_REASON_NO_FREE_BLOCK = 18,
    /* Other code of this process has closed a descriptor that the job needs. */
    PAGELEAP_REASON_DESCRIPTOR_LOST = 19,
    /* Another SIGSEGV handler was installed over the library's, and would get the faults that the
     * only engine left raises. */
    PAGELEAP_REASON_HANDLER_REPLACED = 20,
    /* Another process traces the job's threads (strace, a debugger), and would wait for ever for a
     * page that the engine has unmapped. */
    PAGELEAP_REASON_TRACED = 21,
    /* The program went on changing the mapping (madvise, mprotect, mlock, munmap) each time they
     * were to be moved, or has set attributes on a part of a huge page. */
    PAGELEAP_REASON_MAPPING_CHANGED = 22,
    /* The program has discarded or backed them while the job ran, or was about to. */
    PAGELEAP_REASON_DISCARDED = 23,
    /* Only page tables were to move, and theirs also map other mappings. */
    PAGELEAP_REASON_SHARED_TABLE = 24,
    /* Another reason, which reason_text tells. */
    PAGELEAP_REASON_OTHER = 255,
} pageleap_reason;

/* A loop that copies pages. */
typedef enum pageleap_copy_loop {
    /* One word after the other. Later versions may add other loops, and name them so. */
    PAGELEAP_COPY_WORDS = 0,
    /* Four pages in turns, with streaming stores (x86-64). */
    PAGELEAP_COPY_FOUR_PAGES = 1,
    /* memcpy of the C library. */
    PAGELEAP_COPY_MEMCPY = 2,
} pageleap_copy_loop;

/* The report of a job. It never changes. */
typedef struct pageleap_report pageleap_report;

/* The figures of a report. Texts are valid until the report is freed, and never NULL. */
typedef struct pageleap_report_figures {
    /* sizeof(pageleap_report_figures). */
    size_t size;
    /* Why the job has ended. */
    enum pageleap_ended ended;
    /* The engine that was chosen, and used wherever it was not refused. */
    pageleap_engine engine;
    /* Why the job has ended, in words: for PAGELEAP_FAILED the first error. */
    const char *ended_text;
    /* Why this engine was chosen, in words. */
    const char *engine_reason;
    /* Pages that have moved. */
    uint64_t pages_migrated;
    /* Pages with nothing to do (PAGELEAP_UNCHANGED). */
    uint64_t pages_unchanged;
    /* Pages that were tried and stay where they were. */
    uint64_t pages_busy;
    /* Pages that could not be moved. */
    uint64_t pages_not_movable;
    /* Pages that were not tried. */
    uint64_t pages_not_attempted;
    /* Bytes of all ranges. */
    uint64_t bytes;
    /* Bytes copied, including worthless copies. */
    uint64_t bytes_copied;
    /* Bytes of worthless copies: they were written meanwhile. */
    uint64_t bytes_recopied;
    /* The time from the start of the job until the last page had moved, in nanoseconds. */
    uint64_t migrate_ns;
    /* The time after that, in which vacated frames were made ready for use again, in nanoseconds. */
    uint64_t recycle_ns;
    /* The longest window, in nanoseconds. A window is the time for which an area is closed to
     * writers (with the engines precopy, stop-copy and uffd-move to readers, too). */
    uint64_t window_max_ns;
    /* The 99th percentile of the windows, in nanoseconds. */
    uint64_t window_p99_ns;
    /* How many windows there were. */
    uint64_t windows;
    /* How many of them were longer than the wait budget. */
    uint64_t windows_over_budget;
    /* The longest time for which a thread had to wait in the SIGSEGV handler, in nanoseconds. */
    uint64_t wait_max_ns;
    /* Areas whose writers had to wait although much of the area was still to be copied. */
    uint64_t holds;
    /* How often a refused system call was repeated because giving up would have left part of a
     * region inaccessible. */
    uint64_t repairs;
    /* The largest size of an area, in bytes. */
    size_t area_bytes;
    /* Threads that copied, at most. */
    uint32_t threads;
    /* How many of them still copied at the end. Fewer than threads means that more of them were
     * hardly faster. */
    uint32_t threads_settled;
    /* How many warnings there are: pageleap_report_warning(). */
    size_t warning_count;
    /* How many runs of pages there are: pageleap_report_run(). */
    size_t run_count;
    /* How many uses of engines there are: pageleap_report_get_engine_use(). */
    size_t engine_use_count;
    /* How many pairs of nodes pages were copied between: pageleap_report_get_copy_use(). */
    size_t copy_use_count;
    /* In how many windows the thread that kept the area closed ran before ordinary threads
     * (SCHED_FIFO). */
    uint64_t windows_first;
    /* CPU time of the job's threads until the last page had moved, in nanoseconds; UINT64_MAX if the
     * kernel does not say. */
    uint64_t migrate_cpu_ns;
    /* CPU time of the recycling after that, in nanoseconds; UINT64_MAX if the kernel does not say. */
    uint64_t recycle_cpu_ns;
    /* Copies that writes have spoilt, with the engine mprotect. */
    uint64_t disturbed_copies;
    /* Areas that were split because writes had spoilt their copies. */
    uint64_t splits;
    /* How many different system calls were made: pageleap_report_get_call_use(). */
    size_t call_use_count;
    /* How many more mappings the regions consist of than before, or fewer if negative. Pages over
     * consecutive frames of a pool count as one. A page that leaves its neighbours behind adds two.
     * 0 for memory that is no region. */
    int64_t mappings_added;
} pageleap_report_figures;

/* Consecutive pages of one source that had the same outcome, for the same reason. */
typedef struct pageleap_page_run {
    /* sizeof(pageleap_page_run). */
    size_t size;
    /* The kind of memory. */
    enum pageleap_source source;
    /* The outcome of these pages. */
    enum pageleap_outcome outcome;
    /* The region or process. */
    uint64_t source_id;
    /* The first byte of the source. */
    size_t offset;
    /* How many bytes. */
    size_t length;
    /* Why these pages stay where they are. */
    enum pageleap_reason reason;
    /* The error number of the refused call; 0 without one. */
    int32_t reason_errno;
    /* The reason in words; empty without one. Valid until the report is freed, and never NULL. */
    const char *reason_text;
} pageleap_page_run;

/* The pages of a range that one engine has moved. */
typedef struct pageleap_engine_use {
    /* sizeof(pageleap_engine_use). */
    size_t size;
    /* The kind of memory. */
    enum pageleap_source source;
    /* The engine. */
    pageleap_engine engine;
    /* The region or process. */
    uint64_t source_id;
    /* The first byte of the range, in the source. */
    size_t offset;
    /* How many bytes the range has. */
    size_t length;
    /* How many pages of the range this engine has moved. */
    uint64_t pages;
    /* Why this engine was taken, in words. Valid until the report is freed, and never NULL. */
    const char *why;
} pageleap_engine_use;

/* How pages were copied from one node to another. */
typedef struct pageleap_copy_use {
    /* sizeof(pageleap_copy_use). */
    size_t size;
    /* The node of the old frames. */
    uint32_t from_node;
    /* The node of the new frames. */
    uint32_t to_node;
    /* The copy loop. */
    enum pageleap_copy_loop by;
    /* 1 if a trial in this process has found this loop with these steps to be the fastest, else 0. */
    uint32_t tried;
    /* Bytes that the loop copies at a time. */
    size_t step_bytes;
} pageleap_copy_use;

/* How often a job has made one system call. */
typedef struct pageleap_call_use {
    /* sizeof(pageleap_call_use). */
    size_t size;
    /* The name of the call. Constant. */
    const char *name;
    /* The calls made by attempts and by the SIGSEGV handler. Calls that prepare a job or recycle
     * frames do not count. */
    uint64_t count;
} pageleap_call_use;

/* Frees a report and its texts; NULL is allowed. */
void pageleap_report_free(pageleap_report *report);

/* The figures of a report. */
pageleap_status pageleap_report_get_figures(const pageleap_report *report,
                                            pageleap_report_figures *figures);

/* The run of pages at an index, 0 to run_count - 1, in the order in which the ranges were
 * given. */
pageleap_status pageleap_report_run(const pageleap_report *report,
                                    size_t index,
                                    pageleap_page_run *run);

/* The use of an engine at an index, 0 to engine_use_count - 1. */
pageleap_status pageleap_report_get_engine_use(const pageleap_report *report,
                                               size_t index,
                                               pageleap_engine_use *engine_use);

/* How pages were copied between one pair of nodes: `index` is 0 to copy_use_count - 1. */
pageleap_status pageleap_report_get_copy_use(const pageleap_report *report,
                                             size_t index,
                                             pageleap_copy_use *copy_use);

/* How often a system call was made: `index` is 0 to call_use_count - 1, in the order of the names. */
pageleap_status pageleap_report_get_call_use(const pageleap_report *report,
                                             size_t index,
                                             pageleap_call_use *call_use);

/* One warning, something that went less well than asked: `index` is 0 to warning_count - 1. */
pageleap_status pageleap_report_get_warning(const pageleap_report *report,
                                            size_t index,
                                            pageleap_warning *warning);

/* The text of one warning: `index` is 0 to warning_count - 1; NULL beyond. Valid until the report
 * is freed. */
const char *pageleap_report_warning(const pageleap_report *report, size_t index);

/* The report as text for people: several lines, the last without a newline. NULL for NULL. Valid
 * until the report is freed. */
const char *pageleap_report_text(const pageleap_report *report);

/* The report as one JSON object on one line; NULL for NULL. Valid until the report is freed.
 *
 * Its keys are named as the fields of pageleap_report_figures, except that page counts are in
 * "pages" ("migrated", "unchanged", "busy", "not-movable", "not-attempted"), "waits" and "windows"
 * are objects ("count", "total_ns", "p50_ns", "p99_ns", "max_ns"), and "runs", "engines", "copies"
 * and "warnings" are arrays with the results of the functions above. In "copies", "by" is
 * "four-pages", "memcpy" or "words", and "tried" true or false. There "source" is an object
 * ("kind", "id"), and "reason" an object ("code", "errno", "text") or null. "calls" counts system
 * calls by name, "disturbed_copies" the copies that writes have spoilt and "splits" the areas that
 * were split (both with the engine mprotect), "windows_first" the windows in which the thread that
 * kept the area closed ran before ordinary threads (SCHED_FIFO); "migrate_cpu_ns" is the CPU time
 * of the job's threads until the last page had moved, "recycle_cpu_ns" that of recycling; each may
 * be null. Later versions may add keys. */
const char *pageleap_report_json(const pageleap_report *report);

/* ---- Jobs ------------------------------------------------------------------------------------ */

/* The phase of a job. */
typedef enum pageleap_phase {
    /* The job moves pages. */
    PAGELEAP_MIGRATING = 0,
    /* Pages have moved, and may be moved again or discarded. The job makes vacated frames, which
     * the pages have left, ready for use again. */
    PAGELEAP_RECYCLING = 1,
    /* The job has ended, and has its report. */
    PAGELEAP_FINISHED = 2,
} pageleap_phase;

/* A job that moves pages, or has ended. */
typedef struct pageleap_job pageleap_job;

/* How far a job is. */
typedef struct pageleap_progress {
    /* sizeof(pageleap_progress). */
    size_t size;
    /* The phase. */
    enum pageleap_phase phase;
    /* Bytes that have to move. */
    uint64_t bytes_total;
    /* Bytes that have moved. */
    uint64_t bytes_migrated;
    /* Bytes copied so far, including copies that are worthless because the bytes were written
     * meanwhile. */
    uint64_t bytes_copied;
} pageleap_progress;

/* Starts a job that moves all these ranges while the program goes on. The call returns at once,
 * unless the job needs frames that another job is still recycling. `options` may be NULL. If
 * the call fails, nothing has changed.
 *
 * At least one range is needed. All regions and pools must have the same page size (else
 * PAGELEAP_BAD_ARGUMENT). Ranges must not overlap each other or those of another job that still
 * moves them (PAGELEAP_RANGE_BUSY), nor be empty (PAGELEAP_BAD_RANGE).
 *
 * The job's threads inherit scheduling policy, nice value, affinity, memory policy and cgroup from
 * the calling thread, as all threads do. The library changes some of these, for its own threads
 * only. They run on those CPUs of the destination's node on which the calling thread may run; if
 * there are none, they stay on the calling thread's CPUs, and the report has a warning. They have
 * a memory policy of their own only where page tables are to lie on a node. Their cgroup stays, so
 * a quota of CPU time (cpu.max) that runs out holds up the job, and with it the threads that wait
 * for the job.
 *
 * If the calling thread ranks below ordinary threads (SCHED_IDLE, SCHED_BATCH or a nice value
 * above 0), only copies for which no thread waits are made at that low priority. The job does
 * everything else at ordinary priority, because the threads of the program that wait for it would
 * otherwise wait behind others. If the process may not raise its threads (CAP_SYS_NICE, or an
 * RLIMIT_NICE of 20), the report has a warning (pageleap_report_warning()), and waits may take as
 * long as others keep the job from the CPU.
 *
 * While threads wait for a page, the job runs before ordinary threads (SCHED_FIFO) if it may
 * (CAP_SYS_NICE or RLIMIT_RTPRIO); where an area is copied meanwhile, for at most about half of
 * the time. A real-time policy of the calling thread stays as it is. A thread with SCHED_DEADLINE
 * starts no job unless it has SCHED_FLAG_RESET_ON_FORK (PAGELEAP_NO_THREAD).
 *
 * Pools may be freed while the job runs; freeing a region ends the job. The job is freed with
 * pageleap_job_free(). */
pageleap_status pageleap_job_start(const pageleap_range *ranges,
                                   size_t range_count,
                                   const pageleap_job_options *options,
                                   pageleap_job **job);

/* Moves all these ranges in the calling thread, and gives the report, which the caller frees with
 * pageleap_report_free(). The call does what pageleap_job_start(), pageleap_job_wait() and
 * pageleap_job_free() do, but it starts no thread for the job and waits for none, which saves a
 * good part of the time of a small job. Arguments and errors are those of pageleap_job_start().
 * `report` may be NULL. If the job was stopped, or could not move some pages, the call succeeds
 * and the report says so.
 *
 * While the calling thread runs the job, all signals but those of faults are blocked in it,
 * because a handler that touches a closed page would wait for the thread in which it runs.
 * pageleap_thread_is_ours() is true for the thread meanwhile. The thread stays on its CPUs. When
 * the call returns, its signal mask, its priority and its memory policy are as before.
 *
 * In three cases the library starts a thread that runs the job, and the calling thread only waits:
 *
 * - Several threads copy. The field threads of pageleap_job_options says how many. 0 means several
 *   if the destination has eight CPUs or more and the ranges have 4 MB or more.
 * - The calling thread ranks below ordinary threads (SCHED_IDLE, SCHED_BATCH or a nice value above
 *   0), so that the job would have to raise it; or it has SCHED_DEADLINE.
 * - The stack of the calling thread lies within 1 MB of the pages, because the thread needs its stack
 *   while pages are closed.
 *
 * Nobody has a handle to cancel the job; timeout_ns bounds it. The job waits for guards as long as
 * pin_patience_ns says; it does so in vain for a guard that only the calling thread would drop.
 * Until the call returns, no thread may free the regions, pools and context that it was given. */
pageleap_status pageleap_job_run(const pageleap_range *ranges,
                                 size_t range_count,
                                 const pageleap_job_options *options,
                                 pageleap_report **report);

/* Whether the calling thread works for a job or fills a pool: it is a thread of the library, or a
 * thread of the program that runs a job at the moment (pageleap_job_run()).
 *
 * An allocator whose memory is a region asks this, and gives such threads memory from elsewhere,
 * because their allocations must not lie in pages that they are moving. Other calls allocate in
 * the program's thread, for which this is false: the program itself knows that it is in such a
 * call.
 *
 * The function takes no lock and no memory, makes no system call, and leaves the thread's last error
 * as it is: it may be called from malloc() and from a signal handler. */
bool pageleap_thread_is_ours(void);

/* Fills in how far a job is. */
pageleap_status pageleap_job_progress(const pageleap_job *job,
                                      pageleap_progress *progress);

/* Asks a job to stop once the areas under way have moved, and returns at once. Moved pages keep
 * their new frames, all others their old ones, and all are whole. */
pageleap_status pageleap_job_cancel(const pageleap_job *job);

/* Whether a job has ended, so that pageleap_job_wait() returns at once. False for NULL. */
bool pageleap_job_is_finished(const pageleap_job *job);

/* A descriptor that becomes readable when the job has ended: for poll, epoll, io_uring. It
 * belongs to the job: do not read from it, and do not close it. -1 for NULL. */
int pageleap_job_fd(const pageleap_job *job);

/* Waits until a job moves no more pages. From then on they may be moved again, discarded or
 * freed. */
pageleap_status pageleap_job_wait_until_moved(const pageleap_job *job);

/* Waits until a job has ended, and gives its report, which the caller frees with
 * pageleap_report_free(). `report` may be NULL. If the job was stopped, or could not move some
 * pages, the call succeeds and the report says so. Any number of threads may wait. */
pageleap_status pageleap_job_wait(const pageleap_job *job, pageleap_report **report);

/* Waits as pageleap_job_wait() does, and calls `callback` with the progress from this thread:
 * at once, every `interval_ms` milliseconds (at least 1), and at the end. If the callback
 * returns anything but 0, the job is cancelled. It may call this library, but must not free the
 * job, throw or longjmp. `callback` may be NULL. The structure that the callback gets is as
 * large as its size says, which may be less than in a newer header. */
pageleap_status pageleap_job_wait_with_progress(const pageleap_job *job,
                                                uint32_t interval_ms,
                                                int (*callback)(void *data,
                                                                const pageleap_progress *progress),
                                                void *data,
                                                pageleap_report **report);

/* Frees a job; NULL is allowed. If the job has not ended, it is cancelled, and the call waits
 * until its ranges are whole. From the call on no thread may use the handle. */
void pageleap_job_free(pageleap_job *job);

/* ---- Memory that no pool owns ---------------------------------------------------------------- */

/* A reserve: populated memory of a node, for leaps of memory that no pool owns. A leap copies into
 * populated memory, and populating 4 KB pages takes the time of five copies. A program that wants
 * fast leaps makes a reserve beforehand. The memory that a leap takes from it becomes the
 * program's. */
typedef struct pageleap_reserve pageleap_reserve;

/* A range of memory of this process, and where its pages are to lie. */
typedef struct pageleap_memory_range {
    /* sizeof(pageleap_memory_range), the same in all elements of an array. */
    size_t size;
    /* Its first byte. */
    void *address;
    /* How many bytes. The whole pages among them move. */
    size_t length;
    /* The nodes that the pages go to. */
    const pageleap_placement *place;
} pageleap_memory_range;

/* How a job moves memory that no pool owns. If all fields but size are 0, the library chooses. */
typedef struct pageleap_memory_options {
    /* sizeof(pageleap_memory_options). */
    size_t size;
    /* The engine. PAGELEAP_ENGINE_UFFD_MOVE: only this one; memory that it cannot move is refused,
     * and pages that it leaves stay where they are. PAGELEAP_ENGINE_KERNEL: the kernel moves
     * everything. PAGELEAP_ENGINE_AUTO: uffd-move where it works, and the kernel for the rest. */
    uint32_t engine;
    /* Whether pages that already lie on the right node move, too, to other frames of that node:
     * for measurements on machines with one node. */
    bool renew;
    /* Reserves from which copies take their memory, as long as a reserve of the right node and
     * page size has some. The array is not needed after the call. */
    const pageleap_reserve *const *reserves;
    /* How many reserves there are. */
    size_t reserve_count;
    /* Nanoseconds after which the job moves no more pages; 0: no limit. */
    uint64_t timeout_ns;
    /* The longest time, in nanoseconds, for which a thread of the program should have to wait for
     * the job; 0: half a millisecond. A target, not a limit. */
    uint64_t wait_budget_ns;
    /* The most bytes that the job copies per second; 0: no limit. */
    uint64_t rate_limit_bytes_per_s;
} pageleap_memory_options;

/* Takes `bytes` bytes of a node, rounded up to 2 MB, in pages of PAGELEAP_PAGE_4K or
 * PAGELEAP_PAGE_THP. The reserve is freed with pageleap_reserve_free(). */
pageleap_status pageleap_reserve_new(uint32_t node,
                                     size_t bytes,
                                     uint32_t page_size,
                                     pageleap_reserve **reserve);

/* The bytes of a reserve that leaps can still take; 0 for NULL. */
size_t pageleap_reserve_free_bytes(const pageleap_reserve *reserve);

/* Populates as much memory as leaps have taken from the reserve. No job may use it meanwhile. */
pageleap_status pageleap_reserve_refill(const pageleap_reserve *reserve);

/* Frees a reserve; NULL is allowed. Jobs that use it go on, and keep the memory that they have
 * taken. */
void pageleap_reserve_free(pageleap_reserve *reserve);

/* Starts a job that moves memory that no pool owns: memory of malloc() and mmap(). The addresses
 * stay, and the program goes on. The call returns at once. `options` may be NULL. If the call
 * fails, no page has moved. The job is freed with pageleap_job_free().
 *
 * Private anonymous memory moves in place by the engine uffd-move (Linux 6.8, and a userfaultfd
 * as for the engine precopy). Everything else in the ranges, and all of it where that engine does
 * not work, moves by the kernel (move_pages(2)): files, shared memory, hugetlb pages, memory that
 * cannot be written.
 *
 * The program promises, until the job has ended: no thread frees, reallocates, unmaps, remaps or
 * protects the ranges, and none makes a child by the bare system call (fork(), vfork() and
 * posix_spawn() may be used). Ranges contain allocations of the program only; other allocations of
 * the same heap may come and go. The ranges have no mutexes with priority inheritance, no word for
 * FUTEX_WAKE_OP, and no memory of the library such as a reserve, and no O_DIRECT read of a network
 * file system into them is under way. Everything else is allowed: loads, stores, system calls that
 * read and write the memory, madvise(MADV_DONTNEED), threads that begin and end. Pages that are
 * pinned for I/O stay where they are, and so do pages that a child shares. A thread whose stack,
 * thread-local memory or held robust mutexes lie in the ranges must not end.
 *
 * The job's threads have ordinary priority even if the calling thread has a lower one, as far as
 * the process may raise it, because threads of the program wait for their calls. Everything else
 * they inherit as the threads of pageleap_job_start() do. Threads that move pages in place run on
 * CPUs of the destination's node.
 *
 * PAGELEAP_BAD_ARGUMENT: a range has no whole page, a hole, a stack, memory of a region, or memory
 * that the allocator hands out to others; or ranges overlap. PAGELEAP_ENGINE_REFUSED: the engine
 * that was asked for does not work here. */
pageleap_status pageleap_leap_memory(const pageleap_memory_range *ranges,
                                     size_t range_count,
                                     const pageleap_memory_options *options,
                                     pageleap_job **job);

/* ---- Lists of pages -------------------------------------------------------------------------- */

/* Moves pages of a process to nodes, or tells where they lie if `nodes` is NULL. It takes the
 * arguments of numa_move_pages() of libnuma and of move_pages(2), and can stand in their place:
 * pid 0 is this process, pages[i] is any address in a page, nodes[i] its node, and flags is
 * MPOL_MF_MOVE (2), or MPOL_MF_MOVE_ALL (4) to move pages as well that are mapped more than once
 * (needs CAP_SYS_NICE). The memory need not belong to a region.
 *
 * The differences from these two: a page that cannot move does not keep others from moving,
 * status[i] is right for each page in any case, and single calls to the kernel take about 20 ms,
 * so that the process is not stuck for long. Pages that are in use are tried four times. A node is
 * not filled beyond its high watermark and a reserve, because the kernel would drop or swap out
 * memory of other programs for it.
 *
 * status[i] becomes the node on which the page lies, or a negated errno: -ENOENT no page is
 * present; -EFAULT nothing is mapped, or it is the kernel's zero page; -EACCES the page is mapped
 * more than once, or the cpuset of the process forbids the node; -EBUSY it is in use (pinned,
 * locked, being written back); -ENOMEM the node has no room; -ENODEV there is no such node; -ESRCH
 * the process ended meanwhile. `status` may be NULL.
 *
 * Returns how many pages were present and have not moved to their nodes, at most INT_MAX, and 0
 * where `nodes` is NULL. Pages for a node that does not exist count here, too; the kernel's call
 * would fail with ENODEV. Returns -1 if nothing could be done: errno says why, and
 * pageleap_last_error() says it in words. */
int pageleap_move_pages(int pid,
                        unsigned long count,
                        void *const *pages,
                        const int *nodes,
                        int *status,
                        int flags);

#ifdef __cplusplus
}
#endif

#endif /* PAGELEAP_H */
