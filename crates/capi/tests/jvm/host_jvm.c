/* What Host.java calls: a region, as a buffer of Java, and its leaps. */
#include "../check.h"

#include <jni.h>
#include <signal.h>
#include <stdatomic.h>

static struct sigaction of_the_jvm;
static atomic_ulong faults;
static pageleap_pool *pools[2];
static pageleap_region *region;
static int leaps;

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
    uint32_t nodes[2];
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
