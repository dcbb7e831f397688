/* SPDX-License-Identifier: Apache-2.0
 * As much of a Level Zero driver as `iaprof calibrate` calls, which keeps its kernels in objects of another shape than NEO 26.27:
 * like NEO before 2026 it has no object between a kernel and what is the same for all kernels of a name, and
 * like NEO before 2024 each kernel's code has an allocation of its own.
 *
 *     -DONLY='"bmg"'    it runs as that device only
 *     -DRESTLESS        the objects' shape depends on the device
 *     -DHANGS           it never comes back where memory is allocated for copies */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
    const void *virtual_table;
    uint64_t unused[5], gpu_address, zero, bytes;
} allocation_t;

typedef struct {
    const void *virtual_table;
    void *unused[2];
    const uint8_t *code;
    uint32_t flags, code_size;
    allocation_t *allocation;
    const char *name;
} immutable_t;

static const char *const NAMES[] = {"one", "another_with_a_longer_name", "third"};
enum { KERNELS = sizeof NAMES / sizeof *NAMES, UNINITIALIZED = 0x78000001 };

typedef struct {
    const void *virtual_table;
    uint64_t handle; /* what programs have is its address */
    uint8_t *binary;
    size_t binary_size;
    immutable_t *immutables[KERNELS];
} module_t;

typedef struct {
    const void *virtual_table;
    struct {
        uint64_t magic, unused[3];
        module_t *module;
        immutable_t *immutable, *immutable_of_others;
    } handle;
} kernel_t;

#define OFFSET(type, field) __builtin_offsetof(type, field)
#define IN_HANDLE(field) (OFFSET(kernel_t, handle.field) - OFFSET(kernel_t, handle))
const uint32_t where[] = {IN_HANDLE(immutable), IN_HANDLE(module), OFFSET(immutable_t, code), OFFSET(immutable_t, code_size),
                          OFFSET(immutable_t, allocation), OFFSET(immutable_t, name), OFFSET(allocation_t, gpu_address),
                          OFFSET(allocation_t, bytes), OFFSET(module_t, binary), OFFSET(module_t, binary_size),
                          OFFSET(module_t, handle)};

__attribute__((noinline)) static int nothing(void) { return 0; }
static int (*const OF_ALLOCATIONS[])(void) = {nothing, nothing}, (*const OF_MODULES[])(void) = {nothing, nothing},
           (*const OF_KERNELS[])(void) = {nothing, nothing};
int (*const of_immutables[])(void) = {nothing, nothing};

static kernel_t *kernel_of(void *handle) { return (void *)((char *)handle - OFFSET(kernel_t, handle)); }
static module_t *module_of(void *handle) { return (void *)((char *)handle - OFFSET(module_t, handle)); }

static immutable_t *immutable_of(void *handle)
{
    kernel_t *kernel = kernel_of(handle);
    return kernel->handle.immutable ? kernel->handle.immutable : kernel->handle.immutable_of_others;
}

static immutable_t **named(void *module, const char *name)
{
    int i = 0;
    while (strcmp(name, NAMES[i]))
        i++;
    return &module_of(module)->immutables[i];
}

static int is_device(const char *name) { return !strcmp(getenv("ProductFamilyOverride"), name); }

int zeInit(int flags)
{
    (void)flags;
#ifdef ONLY
    if (!is_device(ONLY))
        return UNINITIALIZED;
#endif
    return is_device("none") ? UNINITIALIZED : 0;
}

int zeDriverGet(uint32_t *count, void **driver) { return *count = 1, *driver = driver, 0; }
int zeDeviceGet(void *driver, uint32_t *count, void **device) { return *count = 1, *device = driver, 0; }
int zeContextCreate(void *driver, void *desc, void **context) { return (void)desc, *context = driver, 0; }

static immutable_t *new_immutable(const char *name, const module_t *module)
{
    static uint64_t next = 0x800000000000;
    allocation_t *allocation = calloc(1, sizeof *allocation);
    *allocation = (allocation_t){.virtual_table = OF_ALLOCATIONS, .gpu_address = next += 0x10000, .bytes = 0x4000};
    uint32_t size = 0x100 * strlen(name) + 0x40 * (module->binary_size % 7);
    uint8_t *code = malloc(size);
    for (uint32_t i = 0; i < size; i++)
        code[i] = module->binary[i % module->binary_size] ^ (i + 1 + size / 64);
    immutable_t *new = calloc(1, sizeof *new);
    *new = (immutable_t){.virtual_table = of_immutables, .code = code, .code_size = size, .allocation = allocation};
    new->name = strdup(name);
    return new;
}

struct module_desc {
    uint32_t type;
    void *next;
    uint32_t format;
    size_t size;
    const uint8_t *module;
};

int zeModuleCreate(void *context, void *device, const struct module_desc *desc, void **handle, void *log)
{
    (void)context, (void)device, (void)log;
    module_t *module = calloc(1, sizeof *module);
    *module = (module_t){OF_MODULES, 0, malloc(desc->size), desc->size, {NULL}};
    memcpy(module->binary, desc->module, desc->size);
    for (int i = 0; i < KERNELS; i++)
        module->immutables[i] = new_immutable(NAMES[i], module);
    *handle = &module->handle;
    return 0;
}

int zeModuleGetKernelNames(void *module, uint32_t *count, const char **names)
{
    (void)module;
    *count = KERNELS;
    memcpy(names, NAMES, sizeof NAMES);
    return 0;
}

struct kernel_desc {
    uint32_t type;
    void *next;
    uint32_t flags;
    const char *name;
};

int zeKernelCreate(void *module, const struct kernel_desc *desc, void **handle)
{
    kernel_t *kernel = calloc(1, 4096);
    *kernel = (kernel_t){OF_KERNELS, {.module = module_of(module), .immutable = *named(module, desc->name)}};
#ifdef RESTLESS
    if (is_device("bmg")) {
        kernel->handle.immutable_of_others = kernel->handle.immutable;
        kernel->handle.immutable = NULL;
    }
#endif
    *handle = &kernel->handle;
    return 0;
}

static int give(size_t *size, void *out, const void *what, size_t length)
{
    if (out)
        memcpy(out, what, length);
    *size = length;
    return 0;
}

int zeKernelGetName(void *kernel, size_t *size, void *out)
{
    return give(size, out, immutable_of(kernel)->name, strlen(immutable_of(kernel)->name) + 1);
}

int zeKernelGetBinaryExp(void *kernel, size_t *size, void *out)
{
    return give(size, out, immutable_of(kernel)->code, immutable_of(kernel)->code_size);
}

int zeModuleGetNativeBinary(void *module, size_t *size, void *out)
{
    return give(size, out, module_of(module)->binary, module_of(module)->binary_size);
}

int zeModuleGetFunctionPointer(void *module, const char *name, uint64_t *out)
{
    return *out = (*named(module, name))->allocation->gpu_address, 0;
}

static int base_address(void *kernel, uint64_t *out) { return *out = immutable_of(kernel)->allocation->gpu_address, 0; }

int zeDriverGetExtensionFunctionAddress(void *driver, const char *name, void **out)
{
    (void)driver;
    *out = strcmp(name, "zexKernelGetBaseAddress") ? NULL : (void *)base_address;
    return *out ? 0 : 0x78000003;
}

/* What launches and destroys: each begins in a way of its own. */
__asm__(".globl launch\nlaunch: endbr64\n push %rbx\n pop %rbx\n ret\n"
        ".globl launch_indirect\nlaunch_indirect: endbr64\n sub $8, %rsp\n add $8, %rsp\n ret\n"
        ".globl kernel_gone\nkernel_gone: endbr64\n test %rdi, %rdi\n je 1f\n1: ret\n"
        ".globl module_gone\nmodule_gone: xor %eax, %eax\n ret\n");
int launch(void *), launch_indirect(void *), kernel_gone(void *), module_gone(void *);


static int fill(void **table, int place, int (*function)(void *)) { return table[place] = (void *)function, 0; }

int zeGetCommandListProcAddrTable(int version, void **table)
{
    return (void)version, fill(table, 22, launch), fill(table, 24, launch_indirect);
}

int zeGetCommandListExpProcAddrTable(int version, void **table) { return (void)version, (void)table, 0; }
int zeGetCommandQueueProcAddrTable(int version, void **table) { return (void)version, (void)table, 0; }
int zeGetKernelProcAddrTable(int version, void **table) { return (void)version, fill(table, 1, kernel_gone); }
int zeGetModuleProcAddrTable(int version, void **table) { return (void)version, fill(table, 1, module_gone); }
#ifdef HANGS
#include <unistd.h>
int zeMemAllocDevice(void)
{
    while (1)
        pause();
}
#endif
int zeKernelDestroy(void *kernel) { return (void)kernel, 0; }
int zeModuleDestroy(void *module) { return (void)module, 0; }
