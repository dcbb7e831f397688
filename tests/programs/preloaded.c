/* SPDX-License-Identifier: Apache-2.0
 * Preloaded into the programs. The file PROGRAMS_PID gets the process id, and two functions are others:
 *
 * zeContextMakeMemoryResident succeeds, which SYCL's Level Zero v2 adapter asks for and the driver refuses where there is no GPU.
 *
 * clEnqueueNDRangeKernel counts launches by the kernel's name, as the runtime says it (CL_KERNEL_FUNCTION_NAME). At the end
 * the file PROGRAMS_LEDGER has a line per name: a number, a space, the name. Where PROGRAMS_HOLD names a file, the third
 * launch makes FILE.ready and waits for FILE; the ledger has the launches from then on. Each kernel's first launches there
 * are told the stand-in's GPU (tests/driver/gpu.h): it stalls where the runtime placed the kernel.
 *
 * dispatched.c, which is part of this library, is for kernels that no function of OpenCL launches. */
#define _GNU_SOURCE
#define CL_TARGET_OPENCL_VERSION 300
#include <CL/cl.h>
#include <dlfcn.h>
#include <link.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "../driver/gpu.h"
#include "dispatched.h"

enum { KERNELS = 4096, HELD = 3, TOLD = 10, LONGEST_CODE = 1 << 18 };
enum { CL_KERNEL_BINARY_PROGRAM_INTEL = 0x407D, CL_KERNEL_BINARY_GPU_ADDRESS_INTEL = 0x10010 };

typedef void *find(void *, const char *);
typedef cl_int enqueue(cl_command_queue, cl_kernel, cl_uint, const size_t *, const size_t *, const size_t *, cl_uint,
                       const cl_event *, cl_event *);
typedef cl_int ask(cl_kernel, cl_kernel_info, size_t, void *, size_t *);

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct {
    char *name;
    cl_ulong address;
    long count;
} kernels[KERNELS];
static long launches;
static find *next_dlsym;
static enqueue *next_enqueue;
static ask *kernel_info;

static int resident(void)
{
    return 0; /* ZE_RESULT_SUCCESS */
}

/* Both libraries, and oneDNN in OpenVINO, look functions up like this. */
void *dlsym(void *handle, const char *name)
{
    if (!next_dlsym)
        next_dlsym = (find *)dlvsym(RTLD_NEXT, "dlsym", "GLIBC_2.2.5");
    if (!strcmp(name, "zeContextMakeMemoryResident"))
        return (void *)resident;
    if (!strcmp(name, "clEnqueueNDRangeKernel"))
        return (void *)clEnqueueNDRangeKernel;
    if (!strcmp(name, "zeKernelCreate"))
        return dispatched_create_kernel(next_dlsym(handle, name));
    return next_dlsym(handle, name); /* compiled to a jump: what RTLD_NEXT means goes by the caller */
}

/* The loader of this program: one that Python loaded with a module is not among those of RTLD_NEXT. */
static int find_loader(struct dl_phdr_info *file, size_t size, void *data)
{
    (void)size, (void)data;
    if (!strstr(file->dlpi_name, "/libOpenCL"))
        return 0;
    void *loader = dlopen(file->dlpi_name, RTLD_LAZY | RTLD_NOLOAD);
    kernel_info = (ask *)dlsym(loader, "clGetKernelInfo");
    next_enqueue = (enqueue *)next_dlsym(loader, "clEnqueueNDRangeKernel");
    return 1;
}

static void hold(const char *file)
{
    char ready[4096];
    snprintf(ready, sizeof ready, "%s.ready", file);
    fclose(fopen(ready, "w"));
    while (access(file, F_OK))
        usleep(10000);
    for (int i = 0; i < KERNELS && kernels[i].name; i++)
        kernels[i].count = 0;
}

static void place(cl_kernel kernel, const char *name, cl_ulong address)
{
    size_t size = 0;
    kernel_info(kernel, CL_KERNEL_BINARY_PROGRAM_INTEL, 0, NULL, &size);
    uint8_t *code = malloc(size);
    kernel_info(kernel, CL_KERNEL_BINARY_PROGRAM_INTEL, size, code, NULL);
    if (size <= LONGEST_CODE)
        gpu_kernel(name, address, code, size);
    free(code);
}

static void count(cl_kernel kernel)
{
    char name[4096] = "";
    pthread_mutex_lock(&lock);
    if (!next_enqueue) {
        dl_iterate_phdr(find_loader, NULL);
        gpu_connect();
    }
    if (++launches == HELD && getenv("PROGRAMS_HOLD"))
        hold(getenv("PROGRAMS_HOLD"));
    cl_ulong address = 0;
    kernel_info(kernel, CL_KERNEL_FUNCTION_NAME, sizeof name, name, NULL);
    kernel_info(kernel, CL_KERNEL_BINARY_GPU_ADDRESS_INTEL, sizeof address, &address, NULL);
    int i = 0;
    while (i < KERNELS - 1 && kernels[i].name && (kernels[i].address != address || strcmp(kernels[i].name, name)))
        i++;
    if (!kernels[i].name) {
        kernels[i].name = strdup(name);
        kernels[i].address = address;
        place(kernel, name, address);
    }
    if (kernels[i].count++ < TOLD)
        gpu_launch(address, "");
    pthread_mutex_unlock(&lock);
}

int enqueued_by_program(uint64_t address)
{
    int i = 0;
    pthread_mutex_lock(&lock);
    while (i < KERNELS && kernels[i].name && kernels[i].address != address)
        i++;
    int found = i < KERNELS && kernels[i].name;
    pthread_mutex_unlock(&lock);
    return found;
}

cl_int clEnqueueNDRangeKernel(cl_command_queue queue, cl_kernel kernel, cl_uint dimensions, const size_t *offset,
                              const size_t *global, const size_t *local, cl_uint waits, const cl_event *wait, cl_event *event)
{
    count(kernel);
    return next_enqueue(queue, kernel, dimensions, offset, global, local, waits, wait, event);
}

__attribute__((constructor)) static void write_pid(void)
{
    FILE *file = fopen(getenv("PROGRAMS_PID"), "w");
    fprintf(file, "%d\n", getpid());
    fclose(file);
}

__attribute__((destructor)) static void write_ledger(void)
{
    if (!launches)
        return;
    gpu_wait();
    FILE *file = fopen(getenv("PROGRAMS_LEDGER"), "w");
    for (int i = 0; i < KERNELS && kernels[i].name; i++)
        if (kernels[i].count)
            fprintf(file, "%ld %s\n", kernels[i].count, kernels[i].name);
    fclose(file);
}
