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
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "inject.h"

/* As much of OpenCL as is needed here: cl.h and cl_icd.h of its version 3.0, and NEO's own questions. */
typedef int cl_int; /* 0 is success */
typedef uint32_t cl_uint;
typedef void *cl_handle;
typedef cl_int ask_t(cl_handle object, cl_uint what, size_t size, void *answer, size_t *answer_size);

enum { DEVICE_PARENT = 0x1042, QUEUE_DEVICE = 0x1091, PROGRAM_NUM_DEVICES = 0x1162, PROGRAM_DEVICES = 0x1163 };
enum { PROGRAM_DEBUG_INFO = 0x4100, PROGRAM_DEBUG_INFO_SIZES = 0x4101 }; /* a debug ELF for each of its devices */
enum { KERNEL_NAME = 0x1190, KERNEL_PROGRAM = 0x1194, KERNEL_CODE = 0x407D, KERNEL_ADDRESS = 0x10010 };
enum { DEVICE_INFO_SLOT = 3, QUEUE_INFO_SLOT = 12, PROGRAM_INFO_SLOT = 32, KERNEL_INFO_SLOT = 39 };
enum { SLOTS = 131 }; /* as many of the table as are used */

static struct {
    struct inject_image image;
    ask_t *device_info, *queue_info, *program_info, *kernel_info;
} driver;

/* Takes something that one thread has at a time, which gives it back by storing 0. A forked process has it no longer if
 * another thread of its parent's had it. */
static bool take(pid_t *taken_by, int attempts)
{
    pid_t self = getpid(), other = 0;
    while (!__atomic_compare_exchange_n(taken_by, &other, self, false, __ATOMIC_ACQUIRE, __ATOMIC_RELAXED)) {
        if (other != self)
            continue; /* the parent's, which is replaced, or given back */
        if (!--attempts)
            return false;
        sched_yield();
        other = 0;
    }
    return true;
}

/* --- debug ELFs: one for each GPU that a program is for */

enum { MOST_DEVICES = 64 };

struct elfs {
    cl_uint count;
    size_t sizes[MOST_DEVICES];
    uint8_t *starts[MOST_DEVICES];
    size_t bytes; /* of all of them, from the first one's start */
};

static bool ask_for_elfs(cl_handle program, struct elfs *elfs)
{
    if (driver.program_info(program, PROGRAM_NUM_DEVICES, sizeof elfs->count, &elfs->count, NULL) || !elfs->count ||
        elfs->count > MOST_DEVICES)
        return false;
    /* The driver gives no size for a device that the program is not built for, but does not say which devices these are: each
     * has room for the largest debug ELF, and those that got one are in the order of the sizes. */
    size_t given, most = 0;
    if (driver.program_info(program, PROGRAM_DEBUG_INFO_SIZES, elfs->count * sizeof *elfs->sizes, elfs->sizes, &given))
        return false;
    cl_uint left = given / sizeof *elfs->sizes <= elfs->count ? given / sizeof *elfs->sizes : 0;
    for (cl_uint i = 0; i < left; i++)
        most = elfs->sizes[i] > most ? elfs->sizes[i] : most;
    most = (most + 15) / 16 * 16;
    if (!most)
        return false;
    elfs->bytes = elfs->count * most;
    uint8_t *room = mmap(NULL, elfs->bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (room == MAP_FAILED)
        return false;
    for (cl_uint i = 0; i < elfs->count; i++)
        elfs->starts[i] = room + i * most;
    if (!driver.program_info(program, PROGRAM_DEBUG_INFO, elfs->count * sizeof *elfs->starts, elfs->starts, NULL)) {
        for (cl_uint i = elfs->count; i-- > 0;) {
            while (left && !elfs->sizes[left - 1])
                left--;
            elfs->sizes[i] = left && *elfs->starts[i] ? elfs->sizes[--left] : 0;
        }
        return true;
    }
    munmap(room, elfs->bytes);
    return false;
}

/* NEO makes a debug ELF when it is first asked for, without a lock. */
static bool take_elfs(cl_handle program, struct elfs *elfs)
{
    static pid_t asking;
    if (!take(&asking, 1 << 20))
        return false;
    bool given = ask_for_elfs(program, elfs);
    __atomic_store_n(&asking, 0, __ATOMIC_RELEASE);
    return given;
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

enum { SET_BITS = 8, SETS = 1 << SET_BITS, WAYS = 4, MOST_GPUS = 8 };

/* A kernel's entry is in one set, where a new one takes the place of another if there is no room. The handle of a kernel may
 * become another's, but not before it was released, and its entry with it. No thread waits long for a set: it asks the driver. */
static struct set {
    pid_t taken_by;
    unsigned char next; /* which entry a new kernel gets */
    struct entry {
        cl_handle kernel; /* NULL: it was released */
        struct place {
            cl_handle device;
            uint64_t address, size;
        } places[MOST_GPUS];
    } entries[WAYS];
} sets[SETS];

static struct set *set_of(cl_handle kernel)
{
    return &sets[(uintptr_t)kernel * 0x9e3779b97f4a7c15 >> (64 - SET_BITS)];
}

/* The place in `set`, which is held, of a kernel on a device: a new one is empty. */
static struct place *place_in(struct set *set, cl_handle kernel, cl_handle device)
{
    struct entry *entry = NULL;
    for (int i = 0; i < WAYS && (!entry || entry->kernel != kernel); i++)
        if (!set->entries[i].kernel || set->entries[i].kernel == kernel)
            entry = &set->entries[i];
    if (!entry)
        entry = &set->entries[set->next++ % WAYS];
    if (entry->kernel != kernel) {
        memset(entry->places, 0, sizeof entry->places);
        __atomic_store_n(&entry->kernel, kernel, __ATOMIC_RELEASE);
    }
    for (struct place *place = entry->places; place < entry->places + MOST_GPUS; place++)
        if (!place->device || place->device == device)
            return place;
    return entry->places;
}

static void forget(cl_handle kernel)
{
    struct set *set = set_of(kernel);
    for (struct entry *entry = set->entries; entry < set->entries + WAYS; entry++) {
        cl_handle released = kernel;
        __atomic_compare_exchange_n(&entry->kernel, &released, NULL, false, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED);
    }
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
    struct set *set = set_of(handle);
    if (!take(&set->taken_by, 8))
        return find_on(device, program, kernel);
    struct place *place = place_in(set, handle, device);
    bool found = place->device == device;
    if (!found && (found = find_on(device, program, kernel)))
        *place = (struct place){device, kernel->address, kernel->size};
    if (found) {
        kernel->address = place->address;
        kernel->size = place->size;
    }
    __atomic_store_n(&set->taken_by, 0, __ATOMIC_RELEASE);
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
    forget(kernel);
    return driver_clReleaseKernel(kernel);
}

/* --- programs */

typedef void notify_t(cl_handle program, void *data);

/* What the program wants to be told. It may launch kernels then, or release the program, whose debug ELFs are told before. */
struct notified {
    notify_t *notify;
    void *data;
};

static void tell_and_notify(cl_handle program, void *data)
{
    struct notified *given = data, notified = *given;
    free(given);
    tell_program(program);
    notified.notify(program, notified.data);
}

/* Replaces `notify` and `data`, so that the program's debug ELFs are told first. There may be none, or no memory for it. */
static void tell_when_notified(notify_t **notify, void **data)
{
    int error = errno;
    struct notified *notified = *notify && level_zero_compile_kernel_semaphore ? malloc(sizeof *notified) : NULL;
    errno = error;
    if (!notified)
        return;
    *notified = (struct notified){*notify, *data};
    *notify = tell_and_notify;
    *data = notified; /* lost if the driver refuses the call, as it does not notify then */
}

IN_PLACE_OF(cl_int, clBuildProgram, cl_handle program, cl_uint n, const cl_handle *devices, const char *options,
            notify_t *notify, void *data)
{
    tell_when_notified(&notify, &data);
    cl_int result = driver_clBuildProgram(program, n, devices, options, notify, data);
    if (!result && notify != tell_and_notify && level_zero_compile_kernel_semaphore)
        tell_program(program);
    return result;
}

IN_PLACE_OF(cl_handle, clLinkProgram, cl_handle context, cl_uint n, const cl_handle *devices, const char *options,
            cl_uint n_programs, const cl_handle *programs, notify_t *notify, void *data, cl_int *error)
{
    cl_int result;
    error = error ? error : &result;
    tell_when_notified(&notify, &data);
    cl_handle program = driver_clLinkProgram(context, n, devices, options, n_programs, programs, notify, data, error);
    if (program && !*error && notify != tell_and_notify && level_zero_compile_kernel_semaphore)
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

static const int ASKED[] = {DEVICE_INFO_SLOT, QUEUE_INFO_SLOT, PROGRAM_INFO_SLOT, KERNEL_INFO_SLOT};

static void take_table_of(cl_handle object)
{
    void **table = object ? *(void ***)object : NULL;
    if (!inject_is_data(&driver.image, table, SLOTS * sizeof *table))
        return;
    for (unsigned i = 0; i < sizeof ASKED / sizeof *ASKED; i++)
        if (!inject_is_code(&driver.image, table[ASKED[i]]))
            return;
    driver.device_info = (ask_t *)table[DEVICE_INFO_SLOT];
    driver.queue_info = (ask_t *)table[QUEUE_INFO_SLOT];
    driver.program_info = (ask_t *)table[PROGRAM_INFO_SLOT];
    driver.kernel_info = (ask_t *)table[KERNEL_INFO_SLOT];
    for (const struct hook *hook = HOOKS; hook < HOOKS + N_HOOKS; hook++) {
        void *function = hook->slot == NONE ? NULL : __atomic_load_n(&table[hook->slot], __ATOMIC_ACQUIRE);
        if (!inject_is_code(&driver.image, function)) /* another thread may have been here */
            continue;
        *hook->drivers = function;
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
