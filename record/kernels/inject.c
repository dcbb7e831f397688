// SPDX-License-Identifier: Apache-2.0
/* libiaprof_inject.so, which `iaprof record` preloads into the command it starts: Intel's Level Zero driver raises the two
 * USDT probes of a patched one, whatever its build. docs/inject.md says what a program can notice of it. inject_opencl.c has
 * the same for OpenCL's driver.
 *
 * The loader, and every other way to the driver, asks for tables of functions: by dlsym for a function that fills one, and
 * newer loaders by a handle of the driver's, which begins with a pointer to the driver's own tables. In both places the
 * launches and zeModuleCreate become those below, which call the driver's. Nothing is remembered of Level Zero's kernels: the
 * driver is asked at each launch, and only while somebody records, so there is no lock, and nothing that a fork could break.
 *
 * Whatever fails here fails silently: the program comes first. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <string.h>
#include <sys/mman.h>

#include "inject.h"

__extension__ volatile unsigned short level_zero_execute_lists_semaphore __attribute__((section(".probes")));
__extension__ volatile unsigned short level_zero_list_event_semaphore __attribute__((section(".probes")));

/* --- as much of Level Zero as is needed: ze_api.h, ze_ddi.h and ze_ddi_common.h of its version 1.17 */

typedef int ze_result_t; /* 0 is success */
typedef void *ze_handle;
typedef struct {
    uint32_t x, y, z;
} ze_size3;

#define VERSION(major, minor) ((uint32_t)(major) << 16 | (minor))

enum {
    GLOBAL,
    DRIVER,
    MODULE,
    COMMAND_LIST,
    COMMAND_LIST_EXP,
    COMMAND_QUEUE,
    EVENT,
    FENCE,
    DEVICE,
    TABLES
};
static const char *const TABLE_NAMES[TABLES] = {"zeGetGlobalProcAddrTable", "zeGetDriverProcAddrTable",
                                                "zeGetModuleProcAddrTable", "zeGetCommandListProcAddrTable",
                                                "zeGetCommandListExpProcAddrTable", "zeGetCommandQueueProcAddrTable",
                                                "zeGetEventProcAddrTable", "zeGetFenceProcAddrTable",
                                                "zeGetDeviceProcAddrTable"};

/* --- the driver */

static struct {
    struct inject_image image;
    ze_result_t (*fill[TABLES])(uint32_t version, void **table);
    /* Its exports... */
    ze_result_t (*debug_info)(ze_handle module, int format, size_t *size, uint8_t *info);
    ze_result_t (*extension)(ze_handle driver, const char *name, void **function);
    ze_result_t (*kernel_name)(ze_handle kernel, size_t *size, char *name);
    /* ... and its extensions, which it has since NEO 24.39 */
    ze_result_t (*kernel_address)(ze_handle kernel, uint64_t *address);
    ze_result_t (*kernel_binary)(ze_handle kernel, size_t *size, char *binary);
} driver;

/* --- launches */

static __attribute__((noinline)) bool describe(ze_handle handle, struct inject_kernel *kernel)
{
    size_t size, name_size = sizeof kernel->name;
    int error = errno;
    bool told = handle && driver.kernel_address && driver.kernel_binary &&
                !driver.kernel_address(handle, &kernel->address) && !driver.kernel_binary(handle, &size, NULL);
    if (told) {
        kernel->size = size;
        kernel->name[0] = kernel->name[sizeof kernel->name - 1] = 0;
        driver.kernel_name(handle, &name_size, kernel->name);
    }
    errno = error;
    return told;
}

#define LAUNCHED(list, handle) INJECT_LAUNCHED(describe(handle, &kernel_), list)

/* One of the driver's functions, and ours in its place, which begins here. Stacks show the name, so it is Level Zero's. */
#define IN_PLACE_OF(name, ...)                                                                                         \
    static ze_result_t (*driver_##name)(__VA_ARGS__);                                                                  \
    static ze_result_t name(__VA_ARGS__)

IN_PLACE_OF(zeCommandListAppendLaunchKernel, ze_handle list, ze_handle kernel, const ze_size3 *groups, ze_handle signal,
            uint32_t n, ze_handle *waits)
{
    LAUNCHED(list, kernel);
    return driver_zeCommandListAppendLaunchKernel(list, kernel, groups, signal, n, waits);
}

IN_PLACE_OF(zeCommandListAppendLaunchCooperativeKernel, ze_handle list, ze_handle kernel, const ze_size3 *groups,
            ze_handle signal, uint32_t n, ze_handle *waits)
{
    LAUNCHED(list, kernel);
    return driver_zeCommandListAppendLaunchCooperativeKernel(list, kernel, groups, signal, n, waits);
}

IN_PLACE_OF(zeCommandListAppendLaunchKernelIndirect, ze_handle list, ze_handle kernel, const ze_size3 *groups,
            ze_handle signal, uint32_t n, ze_handle *waits)
{
    LAUNCHED(list, kernel);
    return driver_zeCommandListAppendLaunchKernelIndirect(list, kernel, groups, signal, n, waits);
}

IN_PLACE_OF(zeCommandListAppendLaunchMultipleKernelsIndirect, ze_handle list, uint32_t count, ze_handle *kernels,
            const uint32_t *how_many, const ze_size3 *groups, ze_handle signal, uint32_t n, ze_handle *waits)
{
    for (uint32_t i = 0; kernels && i < count; i++)
        LAUNCHED(list, kernels[i]);
    return driver_zeCommandListAppendLaunchMultipleKernelsIndirect(list, count, kernels, how_many, groups, signal, n,
                                                                   waits);
}

IN_PLACE_OF(zeCommandListAppendLaunchKernelWithParameters, ze_handle list, ze_handle kernel, const ze_size3 *groups,
            const void *next, ze_handle signal, uint32_t n, ze_handle *waits)
{
    LAUNCHED(list, kernel);
    return driver_zeCommandListAppendLaunchKernelWithParameters(list, kernel, groups, next, signal, n, waits);
}

IN_PLACE_OF(zeCommandListAppendLaunchKernelWithArguments, ze_handle list, ze_handle kernel, ze_size3 groups,
            ze_size3 group_size, void **arguments, const void *next, ze_handle signal, uint32_t n, ze_handle *waits)
{
    LAUNCHED(list, kernel);
    return driver_zeCommandListAppendLaunchKernelWithArguments(list, kernel, groups, group_size, arguments, next,
                                                               signal, n, waits);
}

/* --- functions of which a recorder sees the calls by itself */

/* Those that wait for the GPU. */
INJECT_JUMP_TO(zeEventHostSynchronize)
INJECT_JUMP_TO(zeCommandQueueSynchronize)
INJECT_JUMP_TO(zeFenceHostSynchronize)
INJECT_JUMP_TO(zeCommandListHostSynchronize)
INJECT_JUMP_TO(zeDeviceSynchronize)

/* Those that copy and fill. */
INJECT_JUMP_TO(zeCommandListAppendMemoryCopy)
INJECT_JUMP_TO(zeCommandListAppendMemoryCopyRegion)
INJECT_JUMP_TO(zeCommandListAppendMemoryCopyFromContext)
INJECT_JUMP_TO(zeCommandListAppendMemoryCopyWithParameters)
INJECT_JUMP_TO(zeCommandListAppendMemoryFill)
INJECT_JUMP_TO(zeCommandListAppendMemoryFillWithParameters)
INJECT_JUMP_TO(zeCommandListAppendImageCopy)
INJECT_JUMP_TO(zeCommandListAppendImageCopyRegion)
INJECT_JUMP_TO(zeCommandListAppendImageCopyToMemory)
INJECT_JUMP_TO(zeCommandListAppendImageCopyFromMemory)
INJECT_JUMP_TO(zeCommandListAppendImageCopyToMemoryExt)
INJECT_JUMP_TO(zeCommandListAppendImageCopyFromMemoryExt)
INJECT_JUMP_TO(zexCommandListAppendMemoryCopyWithParameters)
INJECT_JUMP_TO(zexCommandListAppendMemoryFillWithParameters)

/* --- command lists: what is appended to one runs when it is executed, until it is reset or destroyed */

enum { LISTS_EXECUTED, LIST_CLOSED, LIST_RESET, LIST_DESTROYED }; /* as in bpf/c/lists.c */

#define EXECUTED(queue, count, lists)                                                                                  \
    do {                                                                                                               \
        if (__builtin_expect(level_zero_execute_lists_semaphore, 0) && count && lists)                                 \
            DTRACE_PROBE3(level_zero, execute_lists, queue, count, lists);                                             \
    } while (0)

#define HAPPENED(event, list)                                                                                          \
    do {                                                                                                               \
        if (__builtin_expect(level_zero_list_event_semaphore, 0))                                                      \
            DTRACE_PROBE2(level_zero, list_event, event, list);                                                        \
    } while (0)

IN_PLACE_OF(zeCommandQueueExecuteCommandLists, ze_handle queue, uint32_t count, ze_handle *lists, ze_handle fence)
{
    EXECUTED(queue, count, lists);
    return driver_zeCommandQueueExecuteCommandLists(queue, count, lists, fence);
}

IN_PLACE_OF(zeCommandListImmediateAppendCommandListsExp, ze_handle immediate, uint32_t count, ze_handle *lists,
            ze_handle signal, uint32_t n, ze_handle *waits)
{
    EXECUTED(immediate, count, lists);
    return driver_zeCommandListImmediateAppendCommandListsExp(immediate, count, lists, signal, n, waits);
}

IN_PLACE_OF(zeCommandListImmediateAppendCommandListsWithParameters, ze_handle immediate, uint32_t count,
            ze_handle *lists, const void *next, ze_handle signal, uint32_t n, ze_handle *waits)
{
    EXECUTED(immediate, count, lists);
    return driver_zeCommandListImmediateAppendCommandListsWithParameters(immediate, count, lists, next, signal, n,
                                                                         waits);
}

IN_PLACE_OF(zeCommandListClose, ze_handle list)
{
    HAPPENED(LIST_CLOSED, list);
    return driver_zeCommandListClose(list);
}

IN_PLACE_OF(zeCommandListReset, ze_handle list)
{
    HAPPENED(LIST_RESET, list);
    return driver_zeCommandListReset(list);
}

IN_PLACE_OF(zeCommandListDestroy, ze_handle list)
{
    HAPPENED(LIST_DESTROYED, list);
    return driver_zeCommandListDestroy(list);
}

/* --- modules */

static void tell_debug_elf(ze_handle module)
{
    size_t size = 0;
    if (driver.debug_info(module, 0, &size, NULL) || !size)
        return;
    uint8_t *elf = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (elf == MAP_FAILED)
        return;
    size_t filled = size;
    if (!driver.debug_info(module, 0, &filled, elf))
        inject_tell_debug_elf(elf, size);
    munmap(elf, size);
}

IN_PLACE_OF(zeModuleCreate, ze_handle context, ze_handle device, const void *desc, ze_handle *module, ze_handle *log)
{
    ze_result_t result = driver_zeModuleCreate(context, device, desc, module, log);
    if (!result && level_zero_compile_kernel_semaphore) {
        int error = errno;
        tell_debug_elf(*module);
        errno = error;
    }
    return result;
}

/* --- the way to the driver's own tables, by a handle of its */

static void take_tables_of(ze_handle driver_handle);

IN_PLACE_OF(zeDriverGet, uint32_t *count, ze_handle *drivers)
{
    ze_result_t result = driver_zeDriverGet(count, drivers);
    if (!result && count && *count && drivers)
        take_tables_of(drivers[0]);
    return result;
}

IN_PLACE_OF(zeInitDrivers, uint32_t *count, ze_handle *drivers, const void *types)
{
    ze_result_t result = driver_zeInitDrivers(count, drivers, types);
    if (!result && count && *count && drivers)
        take_tables_of(drivers[0]);
    return result;
}

/* --- functions that are in no table: the driver gives them by name */

static const struct extension {
    const char *name;
    void *ours, **drivers;
} EXTENSIONS[] = {
#define EXTENSION(name) {#name, name, (void **)&driver_##name}
    EXTENSION(zexCommandListAppendMemoryCopyWithParameters),
    EXTENSION(zexCommandListAppendMemoryFillWithParameters),
};
enum { N_EXTENSIONS = sizeof EXTENSIONS / sizeof *EXTENSIONS };

IN_PLACE_OF(zeDriverGetExtensionFunctionAddress, ze_handle handle, const char *name, void **function)
{
    ze_result_t result = driver_zeDriverGetExtensionFunctionAddress(handle, name, function);
    for (const struct extension *each = EXTENSIONS; !result && each < EXTENSIONS + N_EXTENSIONS; each++) {
        if (strcmp(name, each->name) || !inject_is_code(&driver.image, *function))
            continue;
        __atomic_store_n(each->drivers, *function, __ATOMIC_RELEASE);
        *function = each->ours;
    }
    return result;
}

/* --- the tables */

/* A function's place in its table, and the version of Level Zero since which tables reach that far. */
static const struct hook {
    int table, slot;
    uint32_t since;
    void *ours, **drivers;
} HOOKS[] = {
#define HOOK(table, slot, since, name) {table, slot, since, name, (void **)&driver_##name}
    HOOK(GLOBAL, 1, VERSION(1, 10), zeInitDrivers),
    HOOK(DRIVER, 0, VERSION(1, 0), zeDriverGet),
    HOOK(DRIVER, 5, VERSION(1, 1), zeDriverGetExtensionFunctionAddress),
    HOOK(MODULE, 0, VERSION(1, 0), zeModuleCreate),
    HOOK(COMMAND_LIST, 2, VERSION(1, 0), zeCommandListDestroy),
    HOOK(COMMAND_LIST, 3, VERSION(1, 0), zeCommandListClose),
    HOOK(COMMAND_LIST, 4, VERSION(1, 0), zeCommandListReset),
    HOOK(COMMAND_LIST, 22, VERSION(1, 0), zeCommandListAppendLaunchKernel),
    HOOK(COMMAND_LIST, 23, VERSION(1, 0), zeCommandListAppendLaunchCooperativeKernel),
    HOOK(COMMAND_LIST, 24, VERSION(1, 0), zeCommandListAppendLaunchKernelIndirect),
    HOOK(COMMAND_LIST, 25, VERSION(1, 0), zeCommandListAppendLaunchMultipleKernelsIndirect),
    HOOK(COMMAND_LIST, 36, VERSION(1, 14), zeCommandListAppendLaunchKernelWithParameters),
    HOOK(COMMAND_LIST, 37, VERSION(1, 14), zeCommandListAppendLaunchKernelWithArguments),
    HOOK(COMMAND_LIST, 40, VERSION(1, 16), zeCommandListImmediateAppendCommandListsWithParameters),
    HOOK(COMMAND_LIST_EXP, 1, VERSION(1, 9), zeCommandListImmediateAppendCommandListsExp),
    HOOK(COMMAND_QUEUE, 2, VERSION(1, 0), zeCommandQueueExecuteCommandLists),
    HOOK(COMMAND_LIST, 28, VERSION(1, 6), zeCommandListHostSynchronize),
    HOOK(COMMAND_QUEUE, 3, VERSION(1, 0), zeCommandQueueSynchronize),
    HOOK(EVENT, 3, VERSION(1, 0), zeEventHostSynchronize),
    HOOK(FENCE, 2, VERSION(1, 0), zeFenceHostSynchronize),
    HOOK(DEVICE, 22, VERSION(1, 14), zeDeviceSynchronize),
    HOOK(COMMAND_LIST, 8, VERSION(1, 0), zeCommandListAppendMemoryCopy),
    HOOK(COMMAND_LIST, 9, VERSION(1, 0), zeCommandListAppendMemoryFill),
    HOOK(COMMAND_LIST, 10, VERSION(1, 0), zeCommandListAppendMemoryCopyRegion),
    HOOK(COMMAND_LIST, 11, VERSION(1, 0), zeCommandListAppendMemoryCopyFromContext),
    HOOK(COMMAND_LIST, 12, VERSION(1, 0), zeCommandListAppendImageCopy),
    HOOK(COMMAND_LIST, 13, VERSION(1, 0), zeCommandListAppendImageCopyRegion),
    HOOK(COMMAND_LIST, 14, VERSION(1, 0), zeCommandListAppendImageCopyToMemory),
    HOOK(COMMAND_LIST, 15, VERSION(1, 0), zeCommandListAppendImageCopyFromMemory),
    HOOK(COMMAND_LIST, 26, VERSION(1, 3), zeCommandListAppendImageCopyToMemoryExt),
    HOOK(COMMAND_LIST, 27, VERSION(1, 3), zeCommandListAppendImageCopyFromMemoryExt),
    HOOK(COMMAND_LIST, 38, VERSION(1, 16), zeCommandListAppendMemoryCopyWithParameters),
    HOOK(COMMAND_LIST, 39, VERSION(1, 16), zeCommandListAppendMemoryFillWithParameters),
};
enum { N_HOOKS = sizeof HOOKS / sizeof *HOOKS };

/* The slot of a function of the driver's that was seen before becomes ours; any other stays as it is. */
static void replace(void **slot, const struct hook *hook)
{
    if (*slot && *slot == *hook->drivers)
        __atomic_store_n(slot, hook->ours, __ATOMIC_RELEASE);
}

static void take_tables_of(ze_handle driver_handle)
{
    if (!driver_handle)
        return;
    driver.extension(driver_handle, "zexKernelGetBaseAddress", (void **)&driver.kernel_address);
    driver.extension(driver_handle, "zeIntelKernelGetBinaryExp", (void **)&driver.kernel_binary);
    /* Handles of drivers before ze_ddi_common.h begin with something else, which does not point to data. The order of the
     * tables changed between versions of Level Zero: a table is known by the functions in it. */
    enum { MOST_TABLES = 64 };
    void ***tables = *(void ****)driver_handle;
    for (int i = 1; i <= MOST_TABLES && inject_is_data(&driver.image, tables, (i + 1) * sizeof *tables); i++)
        for (const struct hook *hook = HOOKS; hook < HOOKS + N_HOOKS; hook++)
            if (inject_is_data(&driver.image, tables[i], (hook->slot + 1) * sizeof(void *)))
                replace(tables[i] + hook->slot, hook);
}

/* --- the way to the tables that the driver fills */

static ze_result_t fill(int table, uint32_t version, void **slots)
{
    ze_result_t result = driver.fill[table](version, slots);
    for (const struct hook *hook = HOOKS; !result && hook < HOOKS + N_HOOKS; hook++) {
        if (hook->table != table || version < hook->since)
            continue;
        void *function = slots[hook->slot]; /* an older driver's may be any, as it fills less of the table */
        if (!*hook->drivers && inject_is_code(&driver.image, function))
            *hook->drivers = function;
        replace(slots + hook->slot, hook);
    }
    return result;
}

#define FILL(table)                                                                                                    \
    static ze_result_t fill_##table(uint32_t version, void **slots)                                                    \
    {                                                                                                                  \
        return fill(table, version, slots);                                                                            \
    }
FILL(GLOBAL)
FILL(DRIVER)
FILL(MODULE)
FILL(COMMAND_LIST)
FILL(COMMAND_LIST_EXP)
FILL(COMMAND_QUEUE)
FILL(EVENT)
FILL(FENCE)
FILL(DEVICE)
static void *const FILLS[TABLES] = {fill_GLOBAL, fill_DRIVER, fill_MODULE, fill_COMMAND_LIST, fill_COMMAND_LIST_EXP,
                                    fill_COMMAND_QUEUE, fill_EVENT, fill_FENCE, fill_DEVICE};

/* --- meeting the driver */

/* Whether `found`, which `handle` gave, is of the driver that probes are raised for. */
static bool is_driver(void *handle, void *found)
{
    struct inject_image image = driver.image;
    if (!inject_is_driver(&image, found, "libze_intel_gpu.so"))
        return false;
    if (image.base == driver.image.base)
        return true;
    void *debug_info = inject_dlsym(handle, "zetModuleGetDebugInfo"), *name = inject_dlsym(handle, "zeKernelGetName"),
         *extension = inject_dlsym(handle, "zeDriverGetExtensionFunctionAddress");
    if (!debug_info || !name || !extension)
        return false;
    driver.debug_info = debug_info;
    driver.kernel_name = name;
    driver.extension = extension;
    driver.kernel_address = NULL;
    driver.kernel_binary = NULL;
    for (const struct hook *hook = HOOKS; hook < HOOKS + N_HOOKS; hook++)
        *hook->drivers = NULL;
    driver.image = image;
    return true;
}

void *(*inject_dlsym)(void *, const char *);

/* What dlsym is to give; NULL for what it gives without us. */
__attribute__((used)) void *inject_instead(void *handle, const char *name)
{
    inject_begin();
    if (handle == RTLD_NEXT || handle == RTLD_DEFAULT || !name)
        return NULL;
    if (!strncmp(name, "cl", 2))
        return inject_opencl(handle, name);
    if (strncmp(name, "zeGet", 5))
        return NULL;
    for (int table = 0; table < TABLES; table++) {
        if (strcmp(name, TABLE_NAMES[table]))
            continue;
        int error = errno;
        void *found = inject_dlsym(handle, name);
        bool ours = found && is_driver(handle, found);
        errno = error;
        if (!ours)
            return NULL;
        driver.fill[table] = found;
        return FILLS[table];
    }
    return NULL;
}

/* A jump, not a call: dlsym looks at who called it, for RTLD_NEXT and for namespaces. */
__attribute__((naked, visibility("default"))) void *dlsym(void *restrict handle __attribute__((unused)),
                                                          const char *restrict name __attribute__((unused)))
{
    __asm__("push %rdi\n\t"
            "push %rsi\n\t"
            "sub $8, %rsp\n\t"
            "call inject_instead\n\t"
            "add $8, %rsp\n\t"
            "pop %rsi\n\t"
            "pop %rdi\n\t"
            "test %rax, %rax\n\t"
            "jnz 1f\n\t"
            "jmp *inject_dlsym(%rip)\n"
            "1:\n\t"
            "ret");
}
