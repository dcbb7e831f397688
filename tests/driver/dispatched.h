/* SPDX-License-Identifier: Apache-2.0
 * What Intel's OpenCL runtime says of each kernel of its own, when it is about to launch it.
 *
 * The process sets breakpoints in itself, where the function begins that all kernels pass by on their way into commands. There
 * it asks the runtime's public call for the kernel's name, GPU address and code, and writes a line of JSON. (gdb 13 cannot call
 * functions on processors with AMX, whose registers it does not know.)
 *
 * A file says how: a line "place LIBRARY ADDRESS" for each such function, and "kernels FIRST MANY SIZE A B OFFSET" for where the
 * function's second argument has the kernels' handles (as in the layouts of drivers). */
#ifndef DRIVER_DISPATCHED_H
#define DRIVER_DISPATCHED_H

#define _GNU_SOURCE
#include <fcntl.h>
#include <link.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <ucontext.h>
#include <unistd.h>

#include <CL/cl_ext.h>

enum { NEO_ADDRESS = 0x10010, NEO_CODE = 0x407D }; /* NEO's own questions, as in opencl.c */
enum { MAX_PLACES = 16, MOST_TOLD = 1 << 20, SINGLE_STEP = 1 << 8 };

static const char *dispatched; /* the file */
static const char *dispatching_way; /* the program's function that calls */
static struct {
    unsigned long address;
    unsigned char instruction; /* the first byte, which the breakpoint replaces */
} places[MAX_PLACES];
static int n_places, stepping = -1, code_of_process;
static struct {
    unsigned long first, many, size, a, b, offset;
} in_argument;
static FILE *dispatched_output;

static void dispatched_fail(const char *what)
{
    fprintf(stderr, "what the runtime dispatches: %s\n", what);
    _exit(1);
}

static void write_code(unsigned long address, unsigned char byte)
{
    /* (the mapping stays as it is) */
    if (pwrite(code_of_process, &byte, 1, address) != 1)
        dispatched_fail("/proc/self/mem");
}

static unsigned long word_at(unsigned long address)
{
    return *(unsigned long *)address;
}

static size_t ask(cl_kernel kernel, cl_kernel_info what, void *answer)
{
    size_t size;
    if (clGetKernelInfo(kernel, what, MOST_TOLD, answer, &size) != CL_SUCCESS)
        dispatched_fail("clGetKernelInfo");
    return size;
}

static void tell_of(cl_kernel kernel)
{
    static char name[MOST_TOLD];
    static unsigned char code[MOST_TOLD];
    unsigned long address;
    ask(kernel, CL_KERNEL_FUNCTION_NAME, name);
    ask(kernel, NEO_ADDRESS, &address);
    size_t size = ask(kernel, NEO_CODE, code);
    fprintf(dispatched_output, "{\"way\": \"%s\", \"name\": \"%s\", \"address\": %lu, \"code\": \"", dispatching_way,
            name, address);
    for (size_t i = 0; i < size; i++)
        fprintf(dispatched_output, "%02x", code[i]);
    fprintf(dispatched_output, "\"}\n");
    fflush(dispatched_output);
}

static void at_breakpoint(int signal, siginfo_t *info, void *state)
{
    (void)signal, (void)info;
    greg_t *registers = ((ucontext_t *)state)->uc_mcontext.gregs;
    if (stepping >= 0) {
        write_code(places[stepping].address, 0xCC);
        stepping = -1;
        registers[REG_EFL] &= ~SINGLE_STEP;
        return;
    }
    for (int i = 0; i < n_places; i++)
        if (places[i].address == (unsigned long)registers[REG_RIP] - 1)
            stepping = i;
    if (stepping < 0)
        dispatched_fail("a breakpoint of somebody else");
    unsigned long argument = registers[REG_RSI], first = word_at(argument + in_argument.first);
    for (int i = 0, many = *(unsigned char *)(argument + in_argument.many); i < many; i++) {
        unsigned long object = word_at(first + i * in_argument.size + in_argument.a);
        tell_of((cl_kernel)(word_at(object + in_argument.b) + in_argument.offset));
    }
    write_code(places[stepping].address, places[stepping].instruction);
    registers[REG_RIP] = places[stepping].address;
    registers[REG_EFL] |= SINGLE_STEP;
}

struct file {
    const char *path;
    unsigned long base;
};

static int is_file(struct dl_phdr_info *object, size_t size, void *wanted)
{
    (void)size;
    struct file *file = wanted;
    char path[4096];
    if (realpath(object->dlpi_name, path) && !strcmp(path, file->path))
        file->base = object->dlpi_addr;
    return file->base != 0;
}

static void add_place(const char *library, unsigned long address)
{
    struct file file = {library, 0};
    dl_iterate_phdr(is_file, &file);
    if (!file.base || n_places == MAX_PLACES)
        dispatched_fail(library);
    places[n_places].address = file.base + address;
    places[n_places].instruction = *(unsigned char *)places[n_places].address;
    n_places++;
}

/* When the runtime is loaded, and before it launches. The lines go to the file `output`. */
static void tell_dispatched(const char *output)
{
    char line[8192], library[4096];
    unsigned long address;
    int known = 0;
    FILE *file = fopen(dispatched, "r");
    while (file && fgets(line, sizeof line, file))
        if (sscanf(line, "place %4095s %lu", library, &address) == 2)
            add_place(library, address);
        else
            known = sscanf(line, "kernels %lu %lu %lu %lu %lu %lu", &in_argument.first, &in_argument.many, &in_argument.size,
                           &in_argument.a, &in_argument.b, &in_argument.offset);
    dispatched_output = fopen(output, "w");
    code_of_process = open("/proc/self/mem", O_RDWR | O_CLOEXEC);
    if (!n_places || known != 6 || !dispatched_output || code_of_process < 0)
        dispatched_fail(dispatched);
    fclose(file);
    struct sigaction action = {.sa_sigaction = at_breakpoint, .sa_flags = SA_SIGINFO};
    sigaction(SIGTRAP, &action, NULL);
    for (int i = 0; i < n_places; i++)
        write_code(places[i].address, 0xCC);
}

#endif
