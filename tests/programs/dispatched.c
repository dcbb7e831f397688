/* SPDX-License-Identifier: Apache-2.0
 * Tells the stand-in's GPU (tests/driver/gpu.h) which kernels Intel's drivers dispatch, their own included, and where these lie:
 * the GPU then stalls at their addresses. Compiled into the library that preloaded.c is. It knows this from the drivers:
 *
 * With PrintKernelDispatchParameters=1 the Level Zero driver prints a line with the name of each kernel that it dispatches. Then
 * a pointer to that kernel is on the stack: to an object that begins like those of the program's kernels, and for whose handle
 * zeKernelGetName says that name. The driver's public calls also say address and code.
 *
 * With PrintTimestampPacketUsage=1 the OpenCL driver prints a line for each kernel that it dispatches, without a name. The nearest
 * kernel on the stack is that one: a pointer to an object that points to a cl_kernel, which points back. clGetKernelInfo says name,
 * address and code. Kernels that the program enqueues are left out, as preloaded.c tells of them. As this takes long, only the
 * first ones are looked for, and then one in a thousand.
 *
 * These lines are not printed. Only the first executions of each kernel are told the GPU. At the end the file PROGRAMS_DISPATCHED
 * has a line per kernel: how often it was found, a space, its name. Before the name of one that was not on the stack is
 * "not found: "; so it is in Level Zero for all that are dispatched before the program has created a kernel of its own. */
#define _GNU_SOURCE
#define CL_TARGET_OPENCL_VERSION 300
#include <CL/cl.h>
#include <dlfcn.h>
#include <level_zero/ze_api.h>
#include <level_zero/ze_ddi.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>
#include <unistd.h>

#include "../driver/gpu.h"
#include "dispatched.h"

enum { KERNELS = 4096, TOLD = 10, FIRST = 500, SELDOM = 1000, LONGEST_CODE = 1 << 18, LONGEST_NAME = 4096 };
enum { STACK = 8192, HEAD = 6, PART = 128, OBJECT = 64 }; /* words: of the stack, and of objects to which it points */
enum { CL_KERNEL_BINARY_PROGRAM_INTEL = 0x407D, CL_KERNEL_BINARY_GPU_ADDRESS_INTEL = 0x10010 };

typedef uintptr_t word;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct {
    char *name;
    uint64_t address;
    long count;
} kernels[KERNELS];
static word stack[STACK]; /* under the lock, like `kernels` */

/* Words that can be read at `from`: what lies there may be anything. */
static size_t copy_words(word from, word *to, size_t words)
{
    struct iovec here = {to, words * sizeof *to}, there = {(void *)from, words * sizeof *to};
    if (from % sizeof(word) || from < 4096)
        return 0;
    ssize_t bytes = process_vm_readv(getpid(), &here, 1, &there, 1, 0);
    return bytes < 0 ? 0 : bytes / sizeof *to;
}

static void dispatched(const char *name, uint64_t address, const uint8_t *code, size_t size)
{
    int i = 0;
    while (i < KERNELS - 1 && kernels[i].name && (kernels[i].address != address || strcmp(kernels[i].name, name)))
        i++;
    if (!kernels[i].name) {
        kernels[i].name = strdup(name);
        kernels[i].address = address;
        if (size <= LONGEST_CODE)
            gpu_kernel(name, address, code, size);
    }
    if (kernels[i].count++ < TOLD && size <= LONGEST_CODE)
        gpu_launch(address, "");
}

static void not_found(const char *name)
{
    char text[LONGEST_NAME];
    snprintf(text, sizeof text, "not found: %s", name);
    dispatched(text, 0, NULL, LONGEST_CODE + 1);
}

/* --- Level Zero */

static ze_pfnKernelCreate_t next_create;
static ze_pfnKernelGetName_t kernel_name;
static ze_pfnKernelGetBinaryExp_t kernel_binary;
static ze_result_t (*kernel_address)(ze_kernel_handle_t, uint64_t *); /* zexKernelGetBaseAddress, the driver's extension */
/* How objects of kernels begin: with their virtual table; a handle leads to the word behind it. Here the bits are inverted, so that
 * this is not found in the place of a kernel. */
static word head[HEAD];

static void find_functions(void)
{
    void *loader = dlopen("libze_loader.so.1", RTLD_LAZY | RTLD_NOLOAD);
    ze_pfnDriverGet_t drivers = (ze_pfnDriverGet_t)dlsym(loader, "zeDriverGet");
    ze_pfnDriverGetExtensionFunctionAddress_t extension =
        (ze_pfnDriverGetExtensionFunctionAddress_t)dlsym(loader, "zeDriverGetExtensionFunctionAddress");
    kernel_name = (ze_pfnKernelGetName_t)dlsym(loader, "zeKernelGetName");
    kernel_binary = (ze_pfnKernelGetBinaryExp_t)dlsym(loader, "zeKernelGetBinaryExp");
    ze_driver_handle_t driver;
    uint32_t one = 1;
    if (drivers(&one, &driver) || extension(driver, "zexKernelGetBaseAddress", (void **)&kernel_address))
        _exit(1);
}

static ze_result_t create_kernel(ze_module_handle_t module, const ze_kernel_desc_t *desc, ze_kernel_handle_t *kernel)
{
    ze_result_t result = next_create(module, desc, kernel);
    pthread_mutex_lock(&lock);
    if (!result && !kernel_name)
        find_functions();
    if (!result)
        copy_words((word)*kernel - sizeof(word), head, HEAD);
    for (int i = 0; !result && i < HEAD; i++)
        head[i] = ~head[i];
    pthread_mutex_unlock(&lock);
    return result;
}

void *dispatched_create_kernel(void *next)
{
    next_create = (ze_pfnKernelCreate_t)next;
    return getenv("PrintKernelDispatchParameters") ? (void *)create_kernel : next;
}

static void tell_kernel(ze_kernel_handle_t kernel, const char *name)
{
    uint64_t address = 0;
    size_t size = 0;
    kernel_address(kernel, &address);
    kernel_binary(kernel, &size, NULL);
    uint8_t *code = malloc(size);
    kernel_binary(kernel, &size, code);
    dispatched(name, address, code, size);
    free(code);
}

static int is_kernel(word at)
{
    word object[HEAD], alike = 0;
    if (copy_words(at, object, HEAD) < HEAD)
        return 0;
    while (alike < HEAD && object[alike] == ~head[alike])
        alike++;
    memset(object, 0, sizeof object);
    __asm__ volatile("" : : "r"(object) : "memory"); /* nothing stays on the stack that looks like a kernel */
    return alike == HEAD;
}

static void find_kernel(const char *printed)
{
    size_t words = copy_words((word)__builtin_frame_address(0), stack, STACK);
    for (size_t i = 0; head[0] && i < words; i++) {
        if (!is_kernel(stack[i]))
            continue;
        ze_kernel_handle_t kernel = (ze_kernel_handle_t)(stack[i] + sizeof(word));
        char name[LONGEST_NAME] = "";
        size_t size = sizeof name;
        if (kernel_name(kernel, &size, name) || strcmp(name, printed))
            continue;
        tell_kernel(kernel, name);
        return;
    }
    not_found(printed);
}

/* --- OpenCL */

typedef cl_int ask(cl_kernel, cl_kernel_info, size_t, void *, size_t *);
typedef cl_int list_platforms(cl_uint, cl_platform_id *, cl_uint *);

static ask *kernel_info;
static word calls; /* the table of functions with which all objects of this driver begin */

static void find_calls(void)
{
    void *loader = dlopen("libOpenCL.so.1", RTLD_LAZY | RTLD_NOLOAD);
    list_platforms *platforms = (list_platforms *)dlsym(loader, "clGetPlatformIDs");
    kernel_info = (ask *)dlsym(loader, "clGetKernelInfo");
    cl_platform_id platform;
    if (platforms(1, &platform, NULL) || !copy_words((word)platform, &calls, 1))
        _exit(1);
}

static void tell_cl_kernel(cl_kernel kernel, const char *name)
{
    cl_ulong address = 0;
    size_t size = 0;
    kernel_info(kernel, CL_KERNEL_BINARY_GPU_ADDRESS_INTEL, sizeof address, &address, NULL);
    if (enqueued_by_program(address))
        return;
    kernel_info(kernel, CL_KERNEL_BINARY_PROGRAM_INTEL, 0, NULL, &size);
    uint8_t *code = malloc(size);
    kernel_info(kernel, CL_KERNEL_BINARY_PROGRAM_INTEL, size, code, NULL);
    dispatched(name, address, code, size);
    free(code);
}

/* Whether `at` leads to an object that has a handle in one of its first words, and that points to `owner`. */
static int tells_cl_kernel(word at, word owner)
{
    word object[OBJECT];
    size_t words = copy_words(at, object, OBJECT), handle = 0;
    while (handle < words && handle < HEAD && object[handle] != calls)
        handle++;
    for (size_t i = 0; handle < HEAD && i < words; i++) {
        char name[LONGEST_NAME] = "";
        cl_kernel kernel = (cl_kernel)(at + handle * sizeof(word));
        /* The driver knows its kernels from other objects. */
        if (object[i] != owner || kernel_info(kernel, CL_KERNEL_FUNCTION_NAME, sizeof name, name, NULL))
            continue;
        tell_cl_kernel(kernel, name);
        return 1;
    }
    return 0;
}

static void find_cl_kernel(void)
{
    static long dispatches;
    if (dispatches++ >= FIRST && dispatches % SELDOM)
        return;
    if (!kernel_info)
        find_calls();
    size_t words = copy_words((word)__builtin_frame_address(0), stack, STACK);
    for (size_t i = 0; i < words; i++) {
        word object[PART];
        size_t parts = copy_words(stack[i], object, PART);
        for (size_t part = 0; part < parts; part++)
            if (tells_cl_kernel(object[part], stack[i]))
                return;
    }
    not_found("a kernel of OpenCL");
}

/* --- what the drivers print */

int vfprintf(FILE *file, const char *format, va_list values)
{
    static int (*next)(FILE *, const char *, va_list);
    if (!next)
        next = (int (*)(FILE *, const char *, va_list))dlvsym(RTLD_NEXT, "vfprintf", "GLIBC_2.2.5");
    int level_zero = !!strstr(format, "kernel, %s, grfCount"), opencl = !!strstr(format, "TSP used for Walker");
    if (!level_zero && !opencl)
        return strstr(format, ", TSP ") ? 0 : next(file, format, values);
    pthread_mutex_lock(&lock);
    if (gpu < 0)
        gpu_connect();
    if (level_zero)
        find_kernel(va_arg(values, char *));
    else
        find_cl_kernel();
    pthread_mutex_unlock(&lock);
    return 0;
}

__attribute__((destructor)) static void write_dispatched(void)
{
    if (!kernels[0].name)
        return;
    gpu_wait();
    FILE *file = fopen(getenv("PROGRAMS_DISPATCHED"), "w");
    for (int i = 0; i < KERNELS && kernels[i].name; i++)
        fprintf(file, "%ld %s\n", kernels[i].count, kernels[i].name);
    fclose(file);
}
