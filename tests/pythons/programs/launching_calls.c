// SPDX-License-Identifier: Apache-2.0
// For Python's ctypes: prepare(ELF, KERNEL), then launch(); call_in_a_thread(FUNCTION) as long as that gives more than 0.
#include <pthread.h>
#include <time.h>

#include "one_kernel.h"

enum { DURATION_NS = 1000 };

static ze_kernel_handle_t kernel;

__attribute__((visibility("default"))) int prepare(const char *elf, const char *name)
{
    ze_module_handle_t module;
    int failed = make_kernel(elf, name, &module, &kernel);
    zexStandinSetLaunch("launch", 0, DURATION_NS);
    return failed;
}

__attribute__((visibility("default"))) void launch(void)
{
    const ze_group_count_t groups = {1, 1, 1};
    zeCommandListAppendLaunchKernel(NULL, kernel, &groups, NULL, 0, NULL);
    __asm__ volatile(""); /* no tail call */
}

static int (*called)(void);

static void *call(void *unused)
{
    while (called())
        ;
    return unused;
}

__attribute__((visibility("default"))) void call_in_a_thread(int (*function)(void))
{
    pthread_t thread;
    called = function;
    pthread_create(&thread, NULL, call, NULL);
    pthread_join(thread, NULL);
}

// Nanoseconds that each of so many launches takes.
__attribute__((visibility("default"))) double launches_take(int count)
{
    struct timespec start, end;
    clock_gettime(CLOCK_MONOTONIC, &start);
    for (int i = 0; i < count; i++)
        launch();
    clock_gettime(CLOCK_MONOTONIC, &end);
    return ((end.tv_sec - start.tv_sec) * 1e9 + (end.tv_nsec - start.tv_nsec)) / count;
}
