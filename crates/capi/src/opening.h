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
#define PAGELEAP_VERSION "@VERSION@"
/* The parts of the header's version, as numbers. */
#define PAGELEAP_VERSION_MAJOR @MAJOR@
#define PAGELEAP_VERSION_MINOR @MINOR@
#define PAGELEAP_VERSION_PATCH @PATCH@
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
