/* SPDX-License-Identifier: Apache-2.0
 *
 * `launching`, an extension module of CPython: launch() launches a kernel, wait() waits until the GPU has executed all of them.
 *
 *   LAUNCHING_ELF      debug ELF of the module with the kernel
 *   LAUNCHING_KERNEL   the kernel's name
 *
 * CPython's headers need not be there: what is used of them is the stable ABI, which is the same in all versions. */
#include "one_kernel.h"

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

enum { METH_NOARGS = 4, API_VERSION = 1013, DURATION_NS = 5000000 };
#define OPAQUE __attribute__((noipa))

struct method {
    const char *name;
    void *(*function)(void *self, void *nothing);
    int flags;
    const char *doc;
};

struct module {
    struct {
        intptr_t references;
        void *type;
        void *(*init)(void);
        intptr_t index;
        void *copy;
    } base;
    const char *name, *doc;
    intptr_t size;
    struct method *methods;
    void *slots, *traverse, *clear, *free;
};

void *PyModule_Create2(struct module *module, int api_version);
void *PyLong_FromLong(long value);

static ze_kernel_handle_t kernel;

OPAQUE void launch_kernel(void)
{
    const ze_group_count_t groups = {1, 1, 1};
    zeCommandListAppendLaunchKernel(NULL, kernel, &groups, NULL, 0, NULL);
    __asm__ volatile(""); /* no tail call */
}

OPAQUE void *launching_launch(void *self, void *nothing)
{
    (void)self, (void)nothing;
    launch_kernel();
    return PyLong_FromLong(0);
}

static void *launching_wait(void *self, void *nothing)
{
    (void)self, (void)nothing;
    return PyLong_FromLong(zeCommandQueueSynchronize(NULL, UINT64_MAX));
}

static struct method methods[] = {
    {"launch", launching_launch, METH_NOARGS, NULL}, {"wait", launching_wait, METH_NOARGS, NULL}, {NULL, NULL, 0, NULL}};
static struct module module = {.base = {.references = 1}, .name = "launching", .size = -1, .methods = methods};

ZE_APIEXPORT void *PyInit_launching(void)
{
    ze_module_handle_t gpu_module;
    if (make_kernel(getenv("LAUNCHING_ELF"), getenv("LAUNCHING_KERNEL"), &gpu_module, &kernel))
        return NULL;
    zexStandinSetLaunch("launch_kernel", 0, DURATION_NS);
    return PyModule_Create2(&module, API_VERSION);
}
