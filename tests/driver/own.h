/* SPDX-License-Identifier: Apache-2.0
 * What the stand-in's GPU (gpu.h) is to execute for a program that copies: the driver's own kernels.
 *
 * A file says it: a line "kernel NAME ADDRESS PATH" for each of these, with the file that has its code, and a line
 * "way LIST WAY NAME..." for the kernels that a call launches by one of the program's functions. */
#ifndef DRIVER_OWN_H
#define DRIVER_OWN_H

#include "gpu.h"

static void own_fail(const char *what)
{
    fprintf(stderr, "what the GPU is to execute: %s\n", what);
    _exit(1);
}

enum { MAX_KERNELS = 64, MAX_NAME = 100 };
static struct {
    char name[MAX_NAME];
    unsigned long address;
} kernels[MAX_KERNELS];
static int n_kernels;
static const char *own; /* the file */

static void read_kernel(const char *line)
{
    char path[4096];
    static uint8_t code[1 << 16];
    if (n_kernels == MAX_KERNELS ||
        sscanf(line, "kernel %99s %lu %4095s", kernels[n_kernels].name, &kernels[n_kernels].address, path) != 3)
        own_fail(line);
    FILE *file = fopen(path, "rb");
    size_t size = file ? fread(code, 1, sizeof code, file) : 0;
    if (!size)
        own_fail(path);
    fclose(file);
    gpu_kernel(kernels[n_kernels].name, kernels[n_kernels].address, code, size);
    n_kernels++;
}

static void execute(const char *name, const char *way)
{
    char stack[256];
    snprintf(stack, sizeof stack, "main;use;copy_all;%s", way);
    for (int i = 0; i < n_kernels; i++)
        if (!strcmp(kernels[i].name, name))
            gpu_launch(kernels[i].address, stack);
}

/* After a call: what it launched. */
static void execute_all(const char *list, const char *way)
{
    char line[8192], begin[128];
    FILE *file = own ? fopen(own, "r") : NULL;
    int length = snprintf(begin, sizeof begin, "way %s %s ", list, way);
    while (file && fgets(line, sizeof line, file))
        if (!strncmp(line, begin, length))
            for (char *name = strtok(line + length, " \n"); name; name = strtok(NULL, " \n"))
                execute(name, way);
    if (file)
        fclose(file);
}

static void read_own(void)
{
    char line[8192];
    FILE *file = fopen(own, "r");
    while (file && fgets(line, sizeof line, file))
        if (!strncmp(line, "kernel ", 7))
            read_kernel(line);
    if (file)
        fclose(file);
}

#endif
