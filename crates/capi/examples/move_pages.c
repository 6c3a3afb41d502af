/*
 * pageleap_move_pages() in the place of numa_move_pages() of libnuma, which takes the same
 * arguments: moves a list of pages of ordinary memory, of which some cannot move.
 *
 *     move_pages [TO]
 *
 * The default is the last node that may be used. With libnuma:
 *
 *     cc -DWITH_LIBNUMA move_pages.c -lnuma
 *
 * The two differ if a page cannot move: then libnuma's call may leave the rest of the list where it
 * is, and gives no status for it.
 *
 * Exit code: 0 if each page has a status and its contents, 1 if not, 2 if a call failed.
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#ifdef WITH_LIBNUMA
#include <numa.h>
#include <numaif.h>
#else
#include <pageleap.h>
enum { MPOL_MF_MOVE = 1 << 1 };
#define numa_move_pages pageleap_move_pages /* the only line to change */
#endif

enum { PAGES = 1000, PAGE = 4096, NONE = -9999 };

static int last_node(void) {
    int last = 0;
#ifdef WITH_LIBNUMA
    last = numa_max_node();
#else
    pageleap_topology *topology;
    uint32_t nodes[64];
    size_t count = 0;
    if (pageleap_topology_read(&topology) != PAGELEAP_OK ||
        pageleap_topology_parse_nodes(topology, "all", nodes, 64, &count) != PAGELEAP_OK) {
        fprintf(stderr, "move_pages: %s\n", pageleap_last_error());
        exit(2);
    }
    last = (int)nodes[(count < 64 ? count : 64) - 1];
    pageleap_topology_free(topology);
#endif
    return last;
}

int main(int argc, char **argv) {
    int to = argc > 1 ? atoi(argv[1]) : last_node();
    char *memory = mmap(NULL, PAGES * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS,
                        -1, 0);
    if (memory == MAP_FAILED) {
        perror("move_pages: mmap");
        return 2;
    }
    /* Small pages, so that each is moved by itself. */
    madvise(memory, PAGES * PAGE, MADV_NOHUGEPAGE);
    static void *pages[PAGES];
    static int nodes[PAGES], status[PAGES];
    for (int i = 0; i < PAGES; i++) {
        pages[i] = memory + (size_t)i * PAGE;
        nodes[i] = to;
        status[i] = NONE;
        /* Every tenth page is not touched: it is not present. */
        if (i % 10 != 9) {
            memset(pages[i], i % 100, PAGE);
        }
    }
    /* And one page is to go to a node that does not exist. */
    nodes[5] = 999;
    int left = numa_move_pages(0, PAGES, pages, nodes, status, MPOL_MF_MOVE);
    if (left < 0) {
        perror("move_pages: numa_move_pages");
        return 2;
    }
    int there = 0, absent = 0, refused = 0, unknown = 0, lost = 0;
    for (int i = 0; i < PAGES; i++) {
        there += status[i] == to;
        absent += status[i] < 0 && i % 10 == 9;
        refused += status[i] < 0 && i % 10 != 9;
        unknown += status[i] == NONE;
        lost += i % 10 != 9 && memory[(size_t)i * PAGE + 7] != i % 100;
    }
    printf("to node %d: %d pages there, %d not present, %d refused, %d without a status, %d lost\n",
           to, there, absent, refused, unknown, lost);
    munmap(memory, PAGES * PAGE);
    return there == PAGES - absent - refused && absent == PAGES / 10 && refused == 1 &&
                   unknown == 0 && lost == 0 && left == refused
               ? 0
               : 1;
}
