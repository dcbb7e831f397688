// SPDX-License-Identifier: Apache-2.0
/* Intel's OpenCL driver, in libiaprof_inject.so: it raises the same two probes as Level Zero's.
 *
 * Loaders get at the driver by two functions that it exports, and call by the table to which each object of the driver's
 * points. Programs ask the driver by name for what is in no table. Loaders and programs get the functions below instead.
 *
 * The driver is asked for address, size and name at each launch, and only while somebody records. If a program is for several
 * GPUs, it tells the address on one of them only; debug ELFs have those on the others. They are asked for at a kernel's first
 * launch on a GPU, and the address is kept until the program releases a kernel with that handle.
 *
 * Whatever fails here fails silently: the program comes first. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <elf.h>
#include <errno.h>
#include <string.h>
#include <sys/mman.h>

#include "inject.h"

/* --- as much of OpenCL as is needed: cl.h and cl_icd.h of its version 3.0, and NEO's own questions */

typedef int cl_int; /* 0 is success */
typedef uint32_t cl_uint;
typedef void *cl_handle;
typedef cl_int ask_t(cl_handle object, cl_uint what, size_t size, void *answer, size_t *answer_size);

enum { DEVICE_PARENT = 0x1042, QUEUE_DEVICE = 0x1091, PROGRAM_NUM_DEVICES = 0x1162, PROGRAM_DEVICES = 0x1163 };
enum { PROGRAM_DEBUG_INFO = 0x4100, PROGRAM_DEBUG_INFO_SIZES = 0x4101 }; /* a debug ELF for each of its devices */
enum { KERNEL_NAME = 0x1190, KERNEL_PROGRAM = 0x1194, KERNEL_CODE = 0x407D, KERNEL_ADDRESS = 0x10010 };
enum { DEVICE_INFO_SLOT = 3, QUEUE_INFO_SLOT = 12, PROGRAM_INFO_SLOT = 32, KERNEL_INFO_SLOT = 39 };
enum { SLOTS = 131 }; /* of the table since OpenCL 2.0 */

static struct {
    struct inject_image image;
    ask_t *device_info, *queue_info, *program_info, *kernel_info;
} driver;

/* --- debug ELFs: one for each GPU that a program is for */

enum { MOST_DEVICES = 64 };

struct elfs {
    cl_uint count;
    size_t sizes[MOST_DEVICES];
    uint8_t *starts[MOST_DEVICES];
    size_t bytes; /* of all of them, from the first one's start */
};

static bool take_elfs(cl_handle program, struct elfs *elfs)
{
    if (driver.program_info(program, PROGRAM_NUM_DEVICES, sizeof elfs->count, &elfs->count, NULL) || !elfs->count ||
        elfs->count > MOST_DEVICES)
        return false;
    memset(elfs->sizes, 0, sizeof elfs->sizes);
    if (driver.program_info(program, PROGRAM_DEBUG_INFO_SIZES, elfs->count * sizeof *elfs->sizes, elfs->sizes, NULL))
        return false;
    elfs->bytes = 0;
    for (cl_uint i = 0; i < elfs->count; i++)
        elfs->bytes += (elfs->sizes[i] + 15) / 16 * 16;
    if (!elfs->bytes)
        return false;
    void *room = mmap(NULL, elfs->bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (room == MAP_FAILED)
        return false;
    elfs->starts[0] = room;
    for (cl_uint i = 1; i < elfs->count; i++)
        elfs->starts[i] = elfs->starts[i - 1] + (elfs->sizes[i - 1] + 15) / 16 * 16;
    if (!driver.program_info(program, PROGRAM_DEBUG_INFO, elfs->count * sizeof *elfs->starts, elfs->starts, NULL))
        return true;
    munmap(room, elfs->bytes);
    return false;
}

static void release_elfs(const struct elfs *elfs)
{
    munmap(elfs->starts[0], elfs->bytes);
}

/* The first device of a program whose debug ELF this one is, too: sub-devices share their GPU's. */
static cl_uint first_with_elf(const struct elfs *elfs, cl_uint number)
{
    for (cl_uint i = 0; i < number; i++)
        if (elfs->sizes[i] == elfs->sizes[number] && !memcmp(elfs->starts[i], elfs->starts[number], elfs->sizes[i]))
            return i;
    return number;
}

static void tell_program(cl_handle program)
{
    struct elfs elfs;
    int error = errno;
    if (program && driver.program_info && take_elfs(program, &elfs)) {
        for (cl_uint i = 0; i < elfs.count; i++)
            if (elfs.sizes[i] && first_with_elf(&elfs, i) == i)
                inject_tell_debug_elf(elfs.starts[i], elfs.sizes[i]);
        release_elfs(&elfs);
    }
    errno = error;
}

/* The section of a kernel's code, which has the kernel's name. */
static bool find_code(const uint8_t *elf, size_t size, struct inject_kernel *kernel)
{
    const Elf64_Ehdr *header = (const void *)elf;
    if (size < sizeof *header || memcmp(header->e_ident, ELFMAG, SELFMAG) || header->e_shoff > size ||
        header->e_shoff % 8 || header->e_shnum > (size - header->e_shoff) / sizeof(Elf64_Shdr) ||
        header->e_shstrndx >= header->e_shnum)
        return false;
    const Elf64_Shdr *sections = (const void *)(elf + header->e_shoff), *names = sections + header->e_shstrndx;
    if (names->sh_offset > size || names->sh_size > size - names->sh_offset)
        return false;
    const char prefix[] = ".text.";
    size_t before = sizeof prefix - 1, length = strlen(kernel->name) + 1;
    for (const Elf64_Shdr *section = sections; section < sections + header->e_shnum; section++) {
        if (section->sh_name > names->sh_size || names->sh_size - section->sh_name < before + length)
            continue;
        const char *name = (const char *)elf + names->sh_offset + section->sh_name;
        if (memcmp(name, prefix, before) || memcmp(name + before, kernel->name, length))
            continue;
        kernel->address = section->sh_addr;
        kernel->size = section->sh_size;
        return section->sh_addr;
    }
    return false;
}

/* --- where kernels lie whose programs are for several GPUs */

enum { MOST_KERNELS = 256, MOST_GPUS = 8 };

/* There is one entry where a kernel can be, and another kernel may take it. The handle of a kernel may become another's, but
 * not before it was released. Nobody waits for an entry: who finds it busy does without, as after a fork it may stay busy. */
static struct entry {
    char busy;
    unsigned releases; /* how many there were when this began to hold */
    cl_handle kernel;
    struct place {
        cl_handle device;
        uint64_t address, size;
    } places[MOST_GPUS];
} entries[MOST_KERNELS];
static unsigned releases[MOST_KERNELS]; /* of kernels that have this entry */

static size_t number_of(cl_handle kernel)
{
    return (uintptr_t)kernel * 0x9e3779b97f4a7c15 >> 56;
}

/* The place in `entry`, which is held, of a kernel on a device: a new one is empty. */
static struct place *place_in(struct entry *entry, cl_handle kernel, cl_handle device, unsigned now)
{
    if (entry->kernel != kernel || entry->releases != now) {
        memset(entry->places, 0, sizeof entry->places);
        entry->kernel = kernel;
        entry->releases = now;
    }
    for (struct place *place = entry->places; place < entry->places + MOST_GPUS; place++)
        if (!place->device || place->device == device)
            return place;
    return entry->places;
}

static bool find_on(cl_handle device, cl_handle program, struct inject_kernel *kernel)
{
    struct elfs elfs;
    cl_handle devices[MOST_DEVICES];
    if (!*kernel->name || !take_elfs(program, &elfs))
        return false;
    bool found = false;
    if (!driver.program_info(program, PROGRAM_DEVICES, elfs.count * sizeof *devices, devices, NULL))
        /* A program that is for a whole GPU is also for its parts. */
        for (int depth = 0; !found && device && depth < 4; depth++) {
            for (cl_uint i = 0; !found && i < elfs.count; i++)
                found = devices[i] == device && find_code(elfs.starts[i], elfs.sizes[i], kernel);
            if (driver.device_info(device, DEVICE_PARENT, sizeof device, &device, NULL))
                break;
        }
    release_elfs(&elfs);
    return found;
}

static bool find_or_remember(cl_handle queue, cl_handle handle, cl_handle program, struct inject_kernel *kernel)
{
    cl_handle device;
    if (driver.queue_info(queue, QUEUE_DEVICE, sizeof device, &device, NULL) || !device)
        return false;
    size_t number = number_of(handle);
    struct entry *entry = &entries[number];
    unsigned now = __atomic_load_n(&releases[number], __ATOMIC_ACQUIRE);
    if (__atomic_exchange_n(&entry->busy, 1, __ATOMIC_ACQUIRE))
        return find_on(device, program, kernel);
    struct place *place = place_in(entry, handle, device, now);
    bool found = place->device == device;
    if (!found && (found = find_on(device, program, kernel)))
        *place = (struct place){device, kernel->address, kernel->size};
    if (found) {
        kernel->address = place->address;
        kernel->size = place->size;
    }
    __atomic_store_n(&entry->busy, 0, __ATOMIC_RELEASE);
    return found;
}

/* --- launches */

static bool locate(cl_handle queue, cl_handle handle, struct inject_kernel *kernel)
{
    cl_handle program;
    cl_uint devices;
    if (driver.kernel_info(handle, KERNEL_PROGRAM, sizeof program, &program, NULL) ||
        driver.program_info(program, PROGRAM_NUM_DEVICES, sizeof devices, &devices, NULL))
        return false;
    if (devices != 1)
        return find_or_remember(queue, handle, program, kernel);
    size_t size;
    if (driver.kernel_info(handle, KERNEL_ADDRESS, sizeof kernel->address, &kernel->address, NULL) ||
        driver.kernel_info(handle, KERNEL_CODE, 0, NULL, &size))
        return false;
    kernel->size = size;
    return true;
}

static __attribute__((noinline)) bool describe(cl_handle queue, cl_handle handle, struct inject_kernel *kernel)
{
    int error = errno;
    kernel->name[0] = kernel->name[sizeof kernel->name - 1] = 0;
    bool told = queue && handle && driver.kernel_info;
    if (told)
        driver.kernel_info(handle, KERNEL_NAME, sizeof kernel->name - 1, kernel->name, NULL);
    told = told && locate(queue, handle, kernel);
    errno = error;
    return told;
}

#define LAUNCHED(queue, handle) INJECT_LAUNCHED(describe(queue, handle, &kernel_), 0)

/* One of the driver's functions, and ours in its place, which begins here. Stacks show the name, so it is OpenCL's. */
#define IN_PLACE_OF(type, name, ...)                                                                                   \
    static type (*driver_##name)(__VA_ARGS__);                                                                         \
    static type name(__VA_ARGS__)

IN_PLACE_OF(cl_int, clEnqueueNDRangeKernel, cl_handle queue, cl_handle kernel, cl_uint dimensions, const size_t *offset,
            const size_t *global, const size_t *local, cl_uint n, const cl_handle *waits, cl_handle *event)
{
    LAUNCHED(queue, kernel);
    return driver_clEnqueueNDRangeKernel(queue, kernel, dimensions, offset, global, local, n, waits, event);
}

IN_PLACE_OF(cl_int, clEnqueueNDCountKernelINTEL, cl_handle queue, cl_handle kernel, cl_uint dimensions,
            const size_t *offset, const size_t *groups, const size_t *local, cl_uint n, const cl_handle *waits,
            cl_handle *event)
{
    LAUNCHED(queue, kernel);
    return driver_clEnqueueNDCountKernelINTEL(queue, kernel, dimensions, offset, groups, local, n, waits, event);
}

IN_PLACE_OF(cl_int, clEnqueueTask, cl_handle queue, cl_handle kernel, cl_uint n, const cl_handle *waits,
            cl_handle *event)
{
    LAUNCHED(queue, kernel);
    return driver_clEnqueueTask(queue, kernel, n, waits, event);
}

IN_PLACE_OF(cl_int, clReleaseKernel, cl_handle kernel)
{
    __atomic_fetch_add(&releases[number_of(kernel)], 1, __ATOMIC_RELEASE);
    return driver_clReleaseKernel(kernel);
}

/* --- programs */

typedef void notify_t(cl_handle program, void *data);

IN_PLACE_OF(cl_int, clBuildProgram, cl_handle program, cl_uint n, const cl_handle *devices, const char *options,
            notify_t *notify, void *data)
{
    cl_int result = driver_clBuildProgram(program, n, devices, options, notify, data);
    if (!result && level_zero_compile_kernel_semaphore)
        tell_program(program);
    return result;
}

IN_PLACE_OF(cl_handle, clLinkProgram, cl_handle context, cl_uint n, const cl_handle *devices, const char *options,
            cl_uint n_programs, const cl_handle *programs, notify_t *notify, void *data, cl_int *error)
{
    cl_handle program = driver_clLinkProgram(context, n, devices, options, n_programs, programs, notify, data, error);
    if (program && level_zero_compile_kernel_semaphore)
        tell_program(program);
    return program;
}

/* --- functions of which a recorder sees the calls by itself: they wait for the GPU, copy and fill */

INJECT_JUMP_TO(clFinish)
INJECT_JUMP_TO(clWaitForEvents)
INJECT_JUMP_TO(clEnqueueReadBuffer)
INJECT_JUMP_TO(clEnqueueWriteBuffer)
INJECT_JUMP_TO(clEnqueueCopyBuffer)
INJECT_JUMP_TO(clEnqueueReadBufferRect)
INJECT_JUMP_TO(clEnqueueWriteBufferRect)
INJECT_JUMP_TO(clEnqueueCopyBufferRect)
INJECT_JUMP_TO(clEnqueueFillBuffer)
INJECT_JUMP_TO(clEnqueueReadImage)
INJECT_JUMP_TO(clEnqueueWriteImage)
INJECT_JUMP_TO(clEnqueueCopyImage)
INJECT_JUMP_TO(clEnqueueCopyImageToBuffer)
INJECT_JUMP_TO(clEnqueueCopyBufferToImage)
INJECT_JUMP_TO(clEnqueueFillImage)
INJECT_JUMP_TO(clEnqueueSVMMemcpy)
INJECT_JUMP_TO(clEnqueueSVMMemFill)
INJECT_JUMP_TO(clEnqueueMemcpyINTEL)
INJECT_JUMP_TO(clEnqueueMemFillINTEL)
INJECT_JUMP_TO(clEnqueueMemsetINTEL)

/* --- the ways to the driver's functions */

static cl_int clIcdGetPlatformIDsKHR(cl_uint n, cl_handle *platforms, cl_uint *count);
static void *clGetExtensionFunctionAddress(const char *name);
static void *clGetExtensionFunctionAddressForPlatform(cl_handle platform, const char *name);
static cl_int (*driver_clIcdGetPlatformIDsKHR)(cl_uint n, cl_handle *platforms, cl_uint *count);
static void *(*driver_clGetExtensionFunctionAddress)(const char *name);
static void *(*driver_clGetExtensionFunctionAddressForPlatform)(cl_handle platform, const char *name);

enum { NONE = -1 };

/* A function's slot in the table. */
static const struct hook {
    const char *name;
    int slot;
    void *ours, **drivers;
} HOOKS[] = {
#define HOOK(slot, name) {#name, slot, name, (void **)&driver_##name}
    HOOK(NONE, clIcdGetPlatformIDsKHR),
    HOOK(65, clGetExtensionFunctionAddress),
    HOOK(107, clGetExtensionFunctionAddressForPlatform),
    HOOK(30, clBuildProgram),
    HOOK(99, clLinkProgram),
    HOOK(37, clReleaseKernel),
    HOOK(59, clEnqueueNDRangeKernel),
    HOOK(60, clEnqueueTask),
    HOOK(NONE, clEnqueueNDCountKernelINTEL),
    HOOK(41, clWaitForEvents),
    HOOK(47, clFinish),
    HOOK(48, clEnqueueReadBuffer),
    HOOK(49, clEnqueueWriteBuffer),
    HOOK(50, clEnqueueCopyBuffer),
    HOOK(51, clEnqueueReadImage),
    HOOK(52, clEnqueueWriteImage),
    HOOK(53, clEnqueueCopyImage),
    HOOK(54, clEnqueueCopyImageToBuffer),
    HOOK(55, clEnqueueCopyBufferToImage),
    HOOK(86, clEnqueueReadBufferRect),
    HOOK(87, clEnqueueWriteBufferRect),
    HOOK(88, clEnqueueCopyBufferRect),
    HOOK(102, clEnqueueFillBuffer),
    HOOK(103, clEnqueueFillImage),
    HOOK(129, clEnqueueSVMMemcpy),
    HOOK(130, clEnqueueSVMMemFill),
    HOOK(NONE, clEnqueueMemcpyINTEL),
    HOOK(NONE, clEnqueueMemFillINTEL),
    HOOK(NONE, clEnqueueMemsetINTEL),
};
enum { N_HOOKS = sizeof HOOKS / sizeof *HOOKS };

static void take_table_of(cl_handle object)
{
    void **table = object ? *(void ***)object : NULL;
    if (!inject_is_data(&driver.image, table, SLOTS * sizeof *table))
        return;
    driver.device_info = (ask_t *)table[DEVICE_INFO_SLOT];
    driver.queue_info = (ask_t *)table[QUEUE_INFO_SLOT];
    driver.program_info = (ask_t *)table[PROGRAM_INFO_SLOT];
    driver.kernel_info = (ask_t *)table[KERNEL_INFO_SLOT];
    for (const struct hook *hook = HOOKS; hook < HOOKS + N_HOOKS; hook++) {
        if (hook->slot == NONE || !inject_is_code(&driver.image, table[hook->slot]))
            continue;
        *hook->drivers = table[hook->slot];
        __atomic_store_n(&table[hook->slot], hook->ours, __ATOMIC_RELEASE);
    }
}

/* What is given for a function that the driver gave by name. */
static void *instead_of(void *function, const char *name)
{
    if (name && inject_is_code(&driver.image, function))
        for (const struct hook *hook = HOOKS; hook < HOOKS + N_HOOKS; hook++)
            if (!strcmp(name, hook->name)) {
                __atomic_store_n(hook->drivers, function, __ATOMIC_RELEASE);
                return hook->ours;
            }
    return function;
}

static cl_int clIcdGetPlatformIDsKHR(cl_uint n, cl_handle *platforms, cl_uint *count)
{
    cl_int result = driver_clIcdGetPlatformIDsKHR(n, platforms, count);
    if (!result && n && platforms)
        take_table_of(platforms[0]);
    return result;
}

static void *clGetExtensionFunctionAddress(const char *name)
{
    return instead_of(driver_clGetExtensionFunctionAddress(name), name);
}

static void *clGetExtensionFunctionAddressForPlatform(cl_handle platform, const char *name)
{
    return instead_of(driver_clGetExtensionFunctionAddressForPlatform(platform, name), name);
}

void *inject_opencl(void *handle, const char *name)
{
    if (strcmp(name, "clGetExtensionFunctionAddress") && strcmp(name, "clIcdGetPlatformIDsKHR"))
        return NULL;
    int error = errno;
    void *found = inject_dlsym(handle, name), *ours = NULL;
    if (found && inject_is_driver(&driver.image, found, "libigdrcl.so"))
        ours = instead_of(found, name);
    errno = error;
    return ours == found ? NULL : ours;
}
