/* A host that loads the library late, into a process whose threads are older, and unloads it while
 * they still use a region. */
#include <dlfcn.h>
#include <pageleap.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>

enum { BYTES = 8 << 20 };

#define CHECK(holds)                                                                               \
    do {                                                                                           \
        if (!(holds)) {                                                                            \
            fprintf(stderr, "%s:%d: %s does not hold\n", __FILE__, __LINE__, #holds);              \
            exit(1);                                                                               \
        }                                                                                          \
    } while (0)

static _Atomic(atomic_ullong *) words;
static atomic_ulong stop;

static void *write_words(void *written) {
    atomic_ullong *mine;
    while ((mine = atomic_load(&words)) == NULL) {
    }
    size_t i = 0;
    for (; !atomic_load(&stop); i++) {
        atomic_fetch_add(&mine[i * 4099 % (BYTES / 8)], 1);
    }
    *(size_t *)written = i;
    return NULL;
}

static void *symbol(void *library, const char *name) {
    void *found = dlsym(library, name);
    if (found == NULL) {
        fprintf(stderr, "%s: %s\n", name, dlerror());
        exit(1);
    }
    return found;
}

/* POSIX lets dlsym return functions as pointers to objects. */
#define LOAD(name) \
    __extension__ __typeof__(name) *name##_ = (__typeof__(name) *)symbol(library, #name)

int main(void) {
    size_t written;
    pthread_t writer;
    CHECK(pthread_create(&writer, NULL, write_words, &written) == 0);

    const char *path = getenv("PAGELEAP_LIBRARY");
    CHECK(path != NULL);
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (library == NULL) {
        fprintf(stderr, "%s\n", dlerror());
        return 1;
    }
    LOAD(pageleap_topology_read);
    LOAD(pageleap_topology_node);
    LOAD(pageleap_topology_free);
    LOAD(pageleap_pool_new);
    LOAD(pageleap_pool_free);
    LOAD(pageleap_region_new);
    LOAD(pageleap_region_start);
    LOAD(pageleap_region_free);
    LOAD(pageleap_job_start);
    LOAD(pageleap_job_wait);
    LOAD(pageleap_job_free);
    LOAD(pageleap_report_get_figures);
    LOAD(pageleap_report_free);

    pageleap_topology *topology;
    pageleap_node node = PAGELEAP_INIT(pageleap_node);
    CHECK(pageleap_topology_read_(&topology) == PAGELEAP_OK);
    CHECK(pageleap_topology_node_(topology, 0, &node) == PAGELEAP_OK);
    pageleap_topology_free_(topology);
    pageleap_pool *pools[2];
    pageleap_region *region;
    for (int i = 0; i < 2; i++) {
        CHECK(pageleap_pool_new_(PAGELEAP_ON(node.id), BYTES, NULL, &pools[i]) == PAGELEAP_OK);
    }
    CHECK(pageleap_region_new_(pools[0], NULL, BYTES, &region) == PAGELEAP_OK);
    atomic_store(&words, pageleap_region_start_(region));
    for (int i = 0; i < 20; i++) {
        if (i == 10) {
            /* The threads of the process still need the SIGSEGV handler. */
            CHECK(dlclose(library) == 0);
        }
        pageleap_range all = PAGELEAP_INIT(pageleap_range);
        pageleap_job_options options = PAGELEAP_INIT(pageleap_job_options);
        pageleap_report_figures figures = PAGELEAP_INIT(pageleap_report_figures);
        pageleap_job *job;
        pageleap_report *report;
        all.region = region;
        all.pool = pools[1 - i % 2];
        options.engine = PAGELEAP_ENGINE_MPROTECT;
        CHECK(pageleap_job_start_(&all, 1, &options, &job) == PAGELEAP_OK);
        CHECK(pageleap_job_wait_(job, &report) == PAGELEAP_OK);
        CHECK(pageleap_report_get_figures_(report, &figures) == PAGELEAP_OK);
        CHECK(figures.ended == PAGELEAP_COMPLETED);
        pageleap_report_free_(report);
        pageleap_job_free_(job);
    }
    atomic_store(&stop, 1);
    CHECK(pthread_join(writer, NULL) == 0);
    unsigned long long sum = 0;
    for (size_t i = 0; i < BYTES / 8; i++) {
        sum += atomic_load(&atomic_load(&words)[i]);
    }
    CHECK(sum == written);
    pageleap_region_free_(region);
    pageleap_pool_free_(pools[0]);
    pageleap_pool_free_(pools[1]);
    return 0;
}
