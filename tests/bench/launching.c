/* SPDX-License-Identifier: Apache-2.0
 *
 * launching ELF KERNEL LAUNCHES FRAMES...: how long a launch takes this program, by the number of frames of its stack.
 *
 * For each line that comes on stdin, and for each number of frames: a line with the mean time of a launch in ns, in each of ten
 * equal parts of LAUNCHES. Between the parts it rests, so that a reader of what the probes send keeps up: what is measured is the
 * time that this thread spends, not how many launches fit through a buffer. Ends when stdin does.
 *
 * FRAMES counts all of a stack, from the runtime's function to the program's first one. */
#include "one_kernel.h"

#include <execinfo.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

enum { PARTS = 10, REST_NS = 30000000 };
#define OPAQUE __attribute__((noipa))

static ze_kernel_handle_t kernel;
static const ze_group_count_t groups = {1, 1, 1};

static uint64_t now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static void tell(int part, uint64_t start, long launches)
{
    const struct timespec rest = {0, REST_NS};
    printf("%.1f%c", (double)(now_ns() - start) / (double)launches, part == PARTS - 1 ? '\n' : ' ');
    nanosleep(&rest, NULL);
}

OPAQUE static int from_here(long launches)
{
    int failed = 0;
    for (int part = 0; part < PARTS; part++) {
        uint64_t start = now_ns();
        for (long i = 0; i < launches; i++)
            failed |= zeCommandListAppendLaunchKernel(NULL, kernel, &groups, NULL, 0, NULL) != ZE_RESULT_SUCCESS;
        tell(part, start, launches);
    }
    return failed;
}

OPAQUE static int from_deeper(int calls, long launches)
{
    int failed = calls > 1 ? from_deeper(calls - 1, launches) : from_here(launches);
    __asm__ volatile("" : "+r"(failed)); /* no tail call */
    return failed;
}

int main(int argc, char **argv)
{
    static void *callers[512];
    ze_module_handle_t module;
    char line[16];
    const int around = 2 + backtrace(callers, 512); /* the runtime's function, from_here; main and what called it */
    if (argc < 5)
        return 2;
    if (make_kernel(argv[1], argv[2], &module, &kernel))
        return 1;
    while (fgets(line, sizeof(line), stdin)) {
        for (int i = 4; i < argc; i++)
            if (from_deeper(atoi(argv[i]) - around, atol(argv[3]) / PARTS))
                return 1;
        fflush(stdout);
    }
    zeKernelDestroy(kernel);
    zeModuleDestroy(module);
    return 0;
}
