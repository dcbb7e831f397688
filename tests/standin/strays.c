/* SPDX-License-Identifier: Apache-2.0
 *
 * A program that launches through a library without frame pointers, in whose place the register holds data.
 *
 * Compiled twice: with LIBRARY as that library, and without as the program. HOLE is the bytes of a local array of the library's.
 *
 *   program N KIND...    N launches with each kind of data:
 *       heap   an object whose second word is the address of another one; of OBJECTS in turn
 *       code   an object whose second word is the address of a function, which no call stands before
 *       none   no data: the register is 0
 *
 *   LAUNCHING_ELF, LAUNCHING_KERNEL, LAUNCHING_TOLD: module, kernel, and a file for the pid */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define OPAQUE __attribute__((noipa))

void through_library(void (*launch)(void), void *data);

#ifdef LIBRARY

OPAQUE static void deeper(void (*launch)(void), void *data)
{
    char hole[HOLE];
    __asm__ volatile("" : : "r"(hole) : "memory");
    register void *kept __asm__("rbp") = data; /* across the call, which keeps it */
    __asm__ volatile("" : "+r"(kept));
    launch();
    __asm__ volatile("" : : "r"(kept));
}

__attribute__((visibility("default"))) void through_library(void (*launch)(void), void *data)
{
    deeper(launch, data);
    __asm__ volatile("");
}

#else

#include "one_kernel.h"

enum { DURATION_NS = 5000000, OBJECTS = 64 };

static ze_kernel_handle_t kernel;

OPAQUE void launch_kernel(void)
{
    const ze_group_count_t groups = {1, 1, 1};
    zeCommandListAppendLaunchKernel(NULL, kernel, &groups, NULL, 0, NULL);
    __asm__ volatile("");
}

OPAQUE static void step(const char *kind)
{
    static uintptr_t *objects[OBJECTS], *others[OBJECTS];
    static unsigned next;
    unsigned which = next++ % OBJECTS;
    if (!objects[which]) {
        objects[which] = calloc(4, sizeof(uintptr_t));
        others[which] = calloc(64, sizeof(uintptr_t));
    }
    uintptr_t *object = objects[which], *other = others[which];
    object[0] = (uintptr_t)other;
    object[1] = strcmp(kind, "code") ? (uintptr_t)other : (uintptr_t)launch_kernel;
    through_library(launch_kernel, strcmp(kind, "none") ? object : NULL);
    __asm__ volatile("");
}

int main(int argc, char **argv)
{
    ze_module_handle_t module;
    if (make_kernel(getenv("LAUNCHING_ELF"), getenv("LAUNCHING_KERNEL"), &module, &kernel))
        return 1;
    zexStandinSetLaunch("launch_kernel", 0, DURATION_NS);
    for (int kind = 2; kind < argc; kind++)
        for (int i = 0; i < atoi(argv[1]); i++)
            step(argv[kind]);
    zeCommandQueueSynchronize(NULL, UINT64_MAX);
    FILE *file = fopen(getenv("LAUNCHING_TOLD"), "w");
    fprintf(file, "%d", getpid());
    return fclose(file);
}

#endif
