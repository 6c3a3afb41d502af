/* What Host.java calls: a region as a buffer of Java, and its leaps; leaps of buffers of Java's. */
#include "../check.h"

#include <jni.h>
#include <signal.h>
#include <stdatomic.h>

static struct sigaction of_the_jvm;
static atomic_ulong faults;
static pageleap_pool *pools[2];
static pageleap_region *region;
static uint32_t nodes[2];
static int leaps, leaps_of_memory;
static char why_not[512];

/* Stands between the library's handler and the JVM's, to count what comes through. */
static void count_and_pass_on(int signal, siginfo_t *info, void *context) {
    atomic_fetch_add(&faults, 1);
    of_the_jvm.sa_sigaction(signal, info, context);
}

JNIEXPORT jobject JNICALL Java_Host_start(JNIEnv *env, jclass host, jlong bytes) {
    (void)host;
    CHECK(sigaction(SIGSEGV, NULL, &of_the_jvm) == 0 && (of_the_jvm.sa_flags & SA_SIGINFO));
    struct sigaction action = of_the_jvm;
    action.sa_sigaction = count_and_pass_on;
    CHECK(sigaction(SIGSEGV, &action, NULL) == 0);
    OK(pageleap_install_fault_handler());
    two_nodes(nodes);
    for (int i = 0; i < 2; i++) {
        pools[i] = pool_on(nodes[i], (uint64_t)bytes);
    }
    OK(pageleap_region_new(pools[0], NULL, (size_t)bytes, &region));
    return (*env)->NewDirectByteBuffer(env, pageleap_region_start(region), bytes);
}

JNIEXPORT void JNICALL Java_Host_leap(JNIEnv *env, jclass host, jint engine) {
    (void)env, (void)host;
    leap(region, pools[++leaps % 2], (uint32_t)engine);
}

/* The whole pages of a buffer. */
static size_t pages_of(JNIEnv *env, jobject buffer) {
    const uintptr_t start = (uintptr_t)(*env)->GetDirectBufferAddress(env, buffer);
    const uintptr_t end = start + (uintptr_t)(*env)->GetDirectBufferCapacity(env, buffer);
    return end / 4096 - (start + 4095) / 4096;
}

JNIEXPORT jlong JNICALL Java_Host_pages(JNIEnv *env, jclass host, jobject buffer) {
    (void)host;
    return (jlong)pages_of(env, buffer);
}

JNIEXPORT jlong JNICALL Java_Host_leapMemory(JNIEnv *env, jclass host, jobject buffer) {
    (void)host;
    pageleap_job *job;
    pageleap_report *report;
    pageleap_placement place = PAGELEAP_INIT(pageleap_placement);
    pageleap_memory_range range = PAGELEAP_INIT(pageleap_memory_range);
    pageleap_memory_options options = PAGELEAP_INIT(pageleap_memory_options);
    pageleap_report_figures figures = PAGELEAP_INIT(pageleap_report_figures);
    place.nodes = &nodes[++leaps_of_memory % 2];
    place.node_count = 1;
    range.address = (*env)->GetDirectBufferAddress(env, buffer);
    range.length = (size_t)(*env)->GetDirectBufferCapacity(env, buffer);
    range.place = &place;
    options.renew = nodes[0] == nodes[1];
    OK(pageleap_leap_memory(&range, 1, &options, &job));
    OK(pageleap_job_wait(job, &report));
    OK(pageleap_report_get_figures(report, &figures));
    if (figures.bytes != pages_of(env, buffer) * 4096) {
        fprintf(stderr, "%s\n", pageleap_report_text(report));
        exit(1);
    }
    if (nodes[0] == nodes[1] && figures.engine != PAGELEAP_ENGINE_UFFD_MOVE) {
        snprintf(why_not, sizeof why_not, "one memory node; %s", figures.engine_reason);
    }
    pageleap_report_free(report);
    pageleap_job_free(job);
    return (jlong)figures.pages_migrated;
}

JNIEXPORT jstring JNICALL Java_Host_whyNot(JNIEnv *env, jclass host) {
    (void)host;
    return why_not[0] == 0 ? NULL : (*env)->NewStringUTF(env, why_not);
}

/* How many faults were the JVM's. */
JNIEXPORT jlong JNICALL Java_Host_faults(JNIEnv *env, jclass host) {
    (void)env, (void)host;
    return (jlong)atomic_load(&faults);
}

JNIEXPORT void JNICALL Java_Host_end(JNIEnv *env, jclass host) {
    (void)env, (void)host;
    pageleap_region_free(region);
    pageleap_pool_free(pools[0]);
    pageleap_pool_free(pools[1]);
}
