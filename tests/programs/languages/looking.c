// SPDX-License-Identifier: Apache-2.0
// A native library for Stacks.java: look(number, methods) calls probe_me; with LAUNCHING it launches a kernel (LAUNCHING_ELF,
// LAUNCHING_KERNEL) and waits until it was executed. TOLD names a file; a line of it has both numbers, and in
// hexadecimal the return addresses that frame pointers lead to, from the native function's on, as long as they lie on the stack.
#define _GNU_SOURCE
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

#ifdef LAUNCHING
#include "one_kernel.h"

static void call(long number)
{
    static const ze_group_count_t groups = {1, 1, 1};
    static ze_module_handle_t module;
    static ze_kernel_handle_t kernel;
    if (number == 1 && make_kernel(getenv("LAUNCHING_ELF"), getenv("LAUNCHING_KERNEL"), &module, &kernel))
        abort();
    zexStandinSetLaunch("look", 0, 1000000);
    zeCommandListAppendLaunchKernel(NULL, kernel, &groups, NULL, 0, NULL);
    zeCommandQueueSynchronize(NULL, UINT64_MAX);
}
#else
void probe_me(long);

static void call(long number)
{
    probe_me(number);
}
#endif

static FILE *told;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

__attribute__((optimize("no-omit-frame-pointer"))) void Java_Stacks_look(void *java, void *class, long number, long methods)
{
    void *low;
    size_t size;
    pthread_attr_t attributes;
    (void)java, (void)class;
    call(number);
    pthread_getattr_np(pthread_self(), &attributes);
    pthread_attr_getstack(&attributes, &low, &size);
    pthread_attr_destroy(&attributes);
    pthread_mutex_lock(&lock);
    if (!told)
        told = fopen(getenv("TOLD"), "w");
    fprintf(told, "%ld %ld", number, methods);
    char *end = (char *)low + size;
    for (void **frame = __builtin_frame_address(0); (char *)frame >= (char *)low && (char *)frame < end && !((long)frame & 7); frame = *frame)
        fprintf(told, " %lx", (long)frame[1]);
    fputc('\n', told);
    fflush(told);
    pthread_mutex_unlock(&lock);
}
