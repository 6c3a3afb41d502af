/* Prints the CPUs on which the kernel lets each thread of a parallel region run, and then the main
 * thread. */
#include <omp.h>
#include <stdio.h>
#include <string.h>

static void print(int number) {
    const char *name = "Cpus_allowed_list:";
    char line[4096], list[4096] = "";
    FILE *file = fopen("/proc/thread-self/status", "r");
    while (file && fgets(line, sizeof line, file))
        if (!strncmp(line, name, strlen(name)))
            sscanf(line + strlen(name), "%s", list);
#pragma omp critical
    printf("%d %s\n", number, list);
}

int main(void) {
#pragma omp parallel
    print(omp_get_thread_num());
    print(-1);
    return 0;
}
