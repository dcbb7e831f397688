// SPDX-License-Identifier: Apache-2.0
// For Python's ctypes: prepare(ELF, KERNEL), then launch(); call_in_a_thread(FUNCTION) as long as that gives more than 0;
// the same between launches of the thread's own, where perhaps it keeps its state of Python;
// launches_take(COUNT), and the same in a thread that runs no Python, below so many functions.
#define _GNU_SOURCE
#include <dlfcn.h>
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

static void *call_between(void *keeps_state)
{
    int (*take_state)(void) = (int (*)(void))dlsym(RTLD_DEFAULT, "PyGILState_Ensure");
    void *(*release_lock)(void) = (void *(*)(void))dlsym(RTLD_DEFAULT, "PyEval_SaveThread");
    if (keeps_state) {
        take_state();
        release_lock();
    }
    do
        for (int i = 0; i < 3; i++)
            launch();
    while (called());
    return NULL;
}

__attribute__((visibility("default"))) void call_between_launches(int (*function)(void), int keeps_state)
{
    pthread_t thread;
    called = function;
    pthread_create(&thread, NULL, call_between, keeps_state ? &thread : NULL);
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

__attribute__((noipa)) static double take_deeper(int functions, int count)
{
    double taken = functions ? take_deeper(functions - 1, count) : launches_take(count);
    __asm__ volatile(""); /* no tail call */
    return taken;
}

static int functions_in_thread, count_in_thread;

static void *take_in_thread(void *taken)
{
    *(double *)taken = take_deeper(functions_in_thread, count_in_thread);
    return NULL;
}

__attribute__((visibility("default"))) double launches_take_in_a_thread(int functions, int count)
{
    pthread_t thread;
    double taken = 0;
    functions_in_thread = functions;
    count_in_thread = count;
    pthread_create(&thread, NULL, take_in_thread, &taken);
    pthread_join(thread, NULL);
    return taken;
}
