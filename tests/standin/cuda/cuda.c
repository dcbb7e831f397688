/* SPDX-License-Identifier: Apache-2.0 */
/* libcuda.so.1 of the stand-in: NVIDIA's driver as a program and CUPTI see it, with a GPU that is made up.
 *
 * It computes nothing. A kernel takes as many microseconds as its launch's gridDimX says, and the kernels of a stream execute one
 * after the other, in real time (CLOCK_MONOTONIC); those of different streams do not wait for each other. So when an execution is
 * launched, its begin and end are known, and no thread is needed. gridDimY is the call site's number (0 to 15), for the ledger.
 *
 *   CUDA_INJECTION64_PATH       cuInit loads this library and calls its InitializeInjection, as NVIDIA's does
 *   STANDIN_CUDA_LEDGER         when the process exits, what it did is written to this path with ".PID" behind it (runtime.py reads it)
 *   STANDIN_CUDA_DEVICES        how many GPUs there are (1)
 *   STANDIN_CUDA_SMS            multiprocessors of each; each gives one sample a sampling period (16)
 *   STANDIN_CUDA_CAPABILITY     compute capability (9.0)
 *   STANDIN_CUDA_FAULTS         names with commas between them; cupti.c has the list
 *
 * In a child of a process that had called cuInit every call fails, as with NVIDIA's; it writes no ledger. */
#define _GNU_SOURCE
#include "shared.h"

#include <dlfcn.h>
#include <elf.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))
#define MACHINE 190 /* EM_CUDA */
#define STO_ENTRY 0x10
#define US 1000ull
#define LAUNCH_DELAY (2 * US) /* from a launch to its begin, at the earliest */
#define GAP 500ull            /* between kernels of a stream, ns */
#define DRIVER_VERSION 13000

struct CUstream_st {
    CUstream next;
    CUcontext context;
    uint32_t id;
    uint64_t busy_until;
    CUgraph capture;
    uint64_t launched, ends[STANDIN_DEPTH];
};

struct node {
    struct CUgraphNode_st *handle; /* of a graph's */
    CUfunction function;
    uint32_t grid[3], block[3], shared_bytes, site;
};

struct CUgraph_st {
    size_t count, room;
    struct node *nodes;
};

struct CUgraphExec_st {
    uint32_t id;
    size_t count;
    struct node nodes[];
};

struct CUkern_st {
    CUlibrary library;
    char *name;
    CUkernel next;
};

struct CUlib_st {
    void *image;
    CUmodule modules[64]; /* by context number, modulo; a library is loaded into a context when it is first used there */
    CUkernel kernels;
};

EXPORT struct standin_cuda standin_cuda = {.size = sizeof(struct standin_cuda), .lock = PTHREAD_MUTEX_INITIALIZER};
#define shared standin_cuda

static atomic_bool initialized;
static atomic_uint next_correlation = 1, next_context = 1, next_stream = 7, next_module = 1, next_graph = 1;
static atomic_ullong next_node = 1ull << 63; /* of graphs that are not instantiated */
static CUcontext primaries[16];
static pthread_mutex_t primary_lock = PTHREAD_RECURSIVE_MUTEX_INITIALIZER_NP; /* callbacks run under it */
static __thread CUcontext stack[16];
static __thread int depth; /* of stack; its last one is current */
static __thread CUstream thread_streams[16];
static bool ledger_written;
static void write_ledger_again(void);
static struct {
    const char *_Atomic name;
    atomic_ulong done, failed;
} calls[CBID_COUNT]; /* that callbacks can see */

static uint64_t now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000ull + (uint64_t)t.tv_nsec;
}

static void sleep_until(uint64_t ns)
{
    struct timespec t = {(time_t)(ns / 1000000000ull), (long)(ns % 1000000000ull)};
    while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &t, NULL) == EINTR)
        ;
}

static bool fault(const char *name)
{
    const char *list = getenv("STANDIN_CUDA_FAULTS");
    size_t length = strlen(name);
    while (list && *list) {
        if (!strncmp(list, name, length) && (list[length] == ',' || !list[length]))
            return true;
        list = strchr(list, ',');
        list = list ? list + 1 : NULL;
    }
    return false;
}

static unsigned number(const char *variable, unsigned otherwise, unsigned most)
{
    const char *value = getenv(variable);
    unsigned long given = value ? strtoul(value, NULL, 10) : otherwise;
    return given > most ? most : (unsigned)given;
}

static void *zeroed(size_t count, size_t size)
{
    void *memory = calloc(count ? count : 1, size);
    if (!memory)
        abort();
    return memory;
}

static bool usable(void)
{
    return initialized && !shared.dead;
}

static CUcontext current(void)
{
    return depth ? stack[depth - 1] : NULL;
}

/* ---- the calls that callbacks see ---- */

static struct standin_call entered(uint32_t cbid, const char *function, const void *params, const char *symbol)
{
    struct standin_call call = {cbid, atomic_fetch_add(&next_correlation, 1), function, symbol, params, NULL, current(), 0};
    void (*hook)(struct standin_call *) = shared.on_call;
    if (hook)
        hook(&call);
    return call;
}

static CUresult left(struct standin_call *call, CUresult result)
{
    void (*hook)(struct standin_call *) = shared.on_call;
    calls[call->cbid].name = call->function;
    atomic_fetch_add(result ? &calls[call->cbid].failed : &calls[call->cbid].done, 1);
    call->result = &result;
    call->context = current();
    if (hook)
        hook(call);
    return result;
}

static void resource(uint32_t cbid, CUcontext context, CUstream stream, CUmodule module)
{
    void (*hook)(uint32_t, CUcontext, CUstream, CUmodule) = shared.on_resource;
    if (hook)
        hook(cbid, context, stream, module);
}

/* Makes a node of a graph, or of an executable graph from another one's. */
static struct CUgraphNode_st *make_node(uint64_t id, struct CUgraphNode_st *original)
{
    void (*hook)(uint32_t, CUgraphNode, CUgraphNode) = shared.on_graph_node;
    struct CUgraphNode_st *made = zeroed(1, sizeof(*made));
    made->id = id;
    if (hook)
        hook(original ? CUPTI_CBID_RESOURCE_GRAPHNODE_CLONED : CUPTI_CBID_RESOURCE_GRAPHNODE_CREATED, made, original);
    return made;
}

#define PARAMS(...)                                                                                                                \
    struct {                                                                                                                       \
        __VA_ARGS__                                                                                                                \
    }

/* ---- start, devices ---- */

CUresult cuDeviceGetUuid(CUuuid *uuid, CUdevice device);

static void in_child(void)
{
    pthread_mutex_init(&shared.lock, NULL);
    if (initialized)
        shared.dead = true;
}

static void before_fork(void)
{
    pthread_mutex_lock(&shared.lock);
}

static void in_parent(void)
{
    pthread_mutex_unlock(&shared.lock);
}

__attribute__((constructor)) static void loaded(void)
{
    shared.devices = number("STANDIN_CUDA_DEVICES", 1, STANDIN_DEVICES);
    shared.multiprocessors = number("STANDIN_CUDA_SMS", 16, 1024);
    shared.last_execution = &shared.executions;
    shared.now = now;
    shared.uuid = cuDeviceGetUuid;
    shared.fault = fault;
    shared.write_ledger = write_ledger_again;
    pthread_atfork(before_fork, in_parent, in_child);
}

static void inject(void)
{
    const char *path = getenv("CUDA_INJECTION64_PATH");
    void *library = path && *path ? dlopen(path, RTLD_NOW | RTLD_LOCAL) : NULL;
    int (*start)(void) = NULL;
    if (library)
        *(void **)&start = dlsym(library, "InitializeInjection");
    if (start)
        start();
    resource(CUPTI_CBID_RESOURCE_CU_INIT_FINISHED, NULL, NULL, NULL);
}

EXPORT CUresult cuInit(unsigned flags)
{
    static pthread_mutex_t once = PTHREAD_MUTEX_INITIALIZER;
    static __thread bool inside; /* the injected library may call cuInit */
    if (flags)
        return CUDA_ERROR_INVALID_VALUE;
    if (shared.dead)
        return CUDA_ERROR_NOT_INITIALIZED;
    if (!shared.devices)
        return CUDA_ERROR_NO_DEVICE;
    if (inside)
        return CUDA_SUCCESS;
    pthread_mutex_lock(&once);
    if (!initialized) {
        inside = true;
        initialized = true;
        inject();
        inside = false;
    }
    pthread_mutex_unlock(&once);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDriverGetVersion(int *version)
{
    *version = DRIVER_VERSION;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuGetErrorString(CUresult error, const char **text)
{
    static const struct {
        CUresult error;
        const char *text;
    } known[] = {
        {CUDA_SUCCESS, "no error"},
        {CUDA_ERROR_INVALID_VALUE, "invalid argument"},
        {CUDA_ERROR_OUT_OF_MEMORY, "out of memory"},
        {CUDA_ERROR_NOT_INITIALIZED, "initialization error"},
        {CUDA_ERROR_NO_DEVICE, "no CUDA-capable device is detected"},
        {CUDA_ERROR_INVALID_DEVICE, "invalid device ordinal"},
        {CUDA_ERROR_INVALID_IMAGE, "device kernel image is invalid"},
        {CUDA_ERROR_INVALID_CONTEXT, "invalid device context"},
        {CUDA_ERROR_INVALID_HANDLE, "invalid resource handle"},
        {CUDA_ERROR_NOT_FOUND, "named symbol not found"},
    };
    for (size_t i = 0; i < sizeof(known) / sizeof(*known); i++)
        if (known[i].error == error) {
            *text = known[i].text;
            return CUDA_SUCCESS;
        }
    *text = NULL;
    return CUDA_ERROR_INVALID_VALUE;
}

EXPORT CUresult cuGetErrorName(CUresult error, const char **text)
{
    return cuGetErrorString(error, text);
}

#define CHECK_DEVICE(device)                                                                                                       \
    do {                                                                                                                           \
        if (!usable())                                                                                                             \
            return CUDA_ERROR_NOT_INITIALIZED;                                                                                     \
        if ((device) < 0 || (unsigned)(device) >= shared.devices)                                                                  \
            return CUDA_ERROR_INVALID_DEVICE;                                                                                      \
    } while (0)

EXPORT CUresult cuDeviceGet(CUdevice *device, int ordinal)
{
    CHECK_DEVICE(ordinal);
    *device = ordinal;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGetCount(int *count)
{
    if (!usable())
        return CUDA_ERROR_NOT_INITIALIZED;
    *count = (int)shared.devices;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGetName(char *name, int length, CUdevice device)
{
    CHECK_DEVICE(device);
    snprintf(name, (size_t)length, "NVIDIA Stand-in GPU");
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGetAttribute(int *value, int attribute, CUdevice device)
{
    int major = 9, minor = 0;
    const char *capability = getenv("STANDIN_CUDA_CAPABILITY");
    CHECK_DEVICE(device);
    if (capability)
        sscanf(capability, "%d.%d", &major, &minor);
    switch (attribute) {
    case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK: *value = 1024; break;
    case CU_DEVICE_ATTRIBUTE_WARP_SIZE: *value = 32; break;
    case CU_DEVICE_ATTRIBUTE_CLOCK_RATE: *value = 1500000; break;
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: *value = (int)shared.multiprocessors; break;
    case CU_DEVICE_ATTRIBUTE_PCI_BUS_ID: *value = 0x1b + device; break;
    case CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID:
    case CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID: *value = 0; break;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: *value = major; break;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: *value = minor; break;
    default: *value = 0; break;
    }
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGetPCIBusId(char *name, int length, CUdevice device)
{
    CHECK_DEVICE(device);
    snprintf(name, (size_t)length, "0000:%02X:00.0", 0x1b + device);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGetUuid(CUuuid *uuid, CUdevice device)
{
    const char *machine = getenv("STANDIN_CUDA_LEDGER"); /* programs with another ledger are on another machine */
    uint64_t hash = 0xcbf29ce484222325;
    CHECK_DEVICE(device);
    while (machine && *machine)
        hash = (hash ^ (unsigned char)*machine++) * 0x100000001b3;
    for (int i = 0; i < 16; i++)
        uuid->bytes[i] = (unsigned char)(i < 8 ? hash >> 8 * i : (uint64_t)(17 * i + device));
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGetUuid_v2(CUuuid *uuid, CUdevice device)
{
    return cuDeviceGetUuid(uuid, device);
}

EXPORT CUresult cuDeviceTotalMem_v2(size_t *bytes, CUdevice device)
{
    CHECK_DEVICE(device);
    *bytes = 80ull << 30;
    return CUDA_SUCCESS;
}

/* ---- contexts and streams ---- */

static bool alive(CUcontext context)
{
    bool found = false;
    pthread_mutex_lock(&shared.lock);
    for (CUcontext each = shared.contexts; each && !found; each = each->next)
        found = each == context && !each->dead;
    pthread_mutex_unlock(&shared.lock);
    return found;
}

static CUstream add_stream(CUcontext context)
{
    CUstream stream = zeroed(1, sizeof(*stream));
    stream->context = context;
    stream->id = atomic_fetch_add(&next_stream, 1);
    pthread_mutex_lock(&shared.lock);
    stream->next = context->streams;
    context->streams = stream;
    pthread_mutex_unlock(&shared.lock);
    return stream;
}

static CUcontext add_context(CUdevice device, bool primary)
{
    CUcontext context = zeroed(1, sizeof(*context));
    context->id = atomic_fetch_add(&next_context, 1);
    context->device = device;
    context->primary = primary;
    context->references = 1;
    context->sampling.last = &context->sampling.first;
    context->sampling.last_row = &context->sampling.rows;
    context->null_stream = add_stream(context);
    pthread_mutex_lock(&shared.lock);
    context->next = shared.contexts;
    shared.contexts = context;
    pthread_mutex_unlock(&shared.lock);
    return context;
}

static void wait_for_streams(CUcontext context)
{
    uint64_t until = 0;
    pthread_mutex_lock(&shared.lock);
    for (CUstream stream = context->streams; stream; stream = stream->next)
        if (stream->busy_until > until)
            until = stream->busy_until;
    pthread_mutex_unlock(&shared.lock);
    if (until > now())
        sleep_until(until);
}

static void forget_modules(CUcontext context);

static void end_context(CUcontext context)
{
    void (*ended)(CUcontext) = shared.on_context_end;
    resource(CUPTI_CBID_RESOURCE_CONTEXT_DESTROY_STARTING, context, NULL, NULL);
    wait_for_streams(context);
    if (ended)
        ended(context);
    forget_modules(context);
    pthread_mutex_lock(&shared.lock);
    context->dead = true;
    pthread_mutex_unlock(&shared.lock);
    for (int i = 0; i < depth; i++)
        if (stack[i] == context)
            stack[i] = NULL;
}

static CUresult create_context(CUcontext *made, CUdevice device)
{
    CHECK_DEVICE(device);
    if (depth == 16)
        return CUDA_ERROR_OUT_OF_MEMORY;
    *made = add_context(device, false);
    stack[depth++] = *made;
    resource(CUPTI_CBID_RESOURCE_CONTEXT_CREATED, *made, NULL, NULL);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxCreate_v2(CUcontext *made, unsigned flags, CUdevice device)
{
    PARAMS(CUcontext *pctx; unsigned flags; CUdevice dev;) params = {made, flags, device};
    struct standin_call call = entered(CBID_cuCtxCreate_v2, "cuCtxCreate_v2", &params, NULL);
    return left(&call, create_context(made, device));
}

EXPORT CUresult cuCtxCreate_v4(CUcontext *made, void *how, unsigned flags, CUdevice device)
{
    PARAMS(CUcontext *pctx; void *ctxCreateParams; unsigned flags; CUdevice dev;) params = {made, how, flags, device};
    struct standin_call call = entered(CBID_cuCtxCreate_v4, "cuCtxCreate_v4", &params, NULL);
    return left(&call, create_context(made, device));
}

/* The oldest one, of CUDA 3.1, which programs that do not include cuda.h may still mean. */
EXPORT CUresult cuCtxCreate(CUcontext *made, unsigned flags, CUdevice device)
{
    return cuCtxCreate_v2(made, flags, device);
}

EXPORT CUresult cuCtxDestroy_v2(CUcontext context)
{
    PARAMS(CUcontext ctx;) params = {context};
    struct standin_call call;
    if (!usable())
        return CUDA_ERROR_NOT_INITIALIZED;
    call = entered(CBID_cuCtxDestroy_v2, "cuCtxDestroy_v2", &params, NULL);
    if (!alive(context) || context->primary)
        return left(&call, CUDA_ERROR_INVALID_CONTEXT);
    end_context(context);
    if (depth && !stack[depth - 1])
        depth--;
    return left(&call, CUDA_SUCCESS);
}

EXPORT CUresult cuCtxDestroy(CUcontext context)
{
    return cuCtxDestroy_v2(context);
}

EXPORT CUresult cuCtxSetCurrent(CUcontext context)
{
    if (!usable())
        return CUDA_ERROR_NOT_INITIALIZED;
    if (context && !alive(context))
        return CUDA_ERROR_INVALID_CONTEXT;
    if (!depth)
        depth = 1;
    stack[depth - 1] = context;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxGetCurrent(CUcontext *context)
{
    if (!usable())
        return CUDA_ERROR_NOT_INITIALIZED;
    *context = current();
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxPushCurrent_v2(CUcontext context)
{
    if (!usable())
        return CUDA_ERROR_NOT_INITIALIZED;
    if (depth == 16 || !alive(context))
        return CUDA_ERROR_INVALID_CONTEXT;
    stack[depth++] = context;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxPopCurrent_v2(CUcontext *context)
{
    if (!depth)
        return CUDA_ERROR_INVALID_CONTEXT;
    depth--;
    if (context)
        *context = stack[depth];
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxGetDevice(CUdevice *device)
{
    if (!usable())
        return CUDA_ERROR_NOT_INITIALIZED;
    if (!current())
        return CUDA_ERROR_INVALID_CONTEXT;
    *device = current()->device;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxGetId(CUcontext context, unsigned long long *id)
{
    context = context ? context : current();
    if (!context)
        return CUDA_ERROR_INVALID_CONTEXT;
    *id = context->id;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxSynchronize(void)
{
    struct standin_call call;
    if (!usable())
        return CUDA_ERROR_NOT_INITIALIZED;
    call = entered(CBID_cuCtxSynchronize, "cuCtxSynchronize", NULL, NULL);
    if (!current())
        return left(&call, CUDA_ERROR_INVALID_CONTEXT);
    wait_for_streams(current());
    return left(&call, CUDA_SUCCESS);
}

EXPORT CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device)
{
    bool fresh;
    CHECK_DEVICE(device);
    pthread_mutex_lock(&primary_lock);
    fresh = !primaries[device];
    if (fresh)
        primaries[device] = add_context(device, true);
    else
        primaries[device]->references++;
    *context = primaries[device];
    if (fresh)
        resource(CUPTI_CBID_RESOURCE_CONTEXT_CREATED, *context, NULL, NULL);
    pthread_mutex_unlock(&primary_lock);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device)
{
    CUresult result = CUDA_SUCCESS;
    CHECK_DEVICE(device);
    pthread_mutex_lock(&primary_lock);
    if (!primaries[device])
        result = CUDA_ERROR_INVALID_CONTEXT;
    else if (!--primaries[device]->references) {
        end_context(primaries[device]);
        primaries[device] = NULL;
    }
    pthread_mutex_unlock(&primary_lock);
    return result;
}

EXPORT CUresult cuDevicePrimaryCtxRelease(CUdevice device)
{
    return cuDevicePrimaryCtxRelease_v2(device);
}

EXPORT CUresult cuStreamCreate(CUstream *stream, unsigned flags)
{
    (void)flags;
    if (!usable())
        return CUDA_ERROR_NOT_INITIALIZED;
    if (!current())
        return CUDA_ERROR_INVALID_CONTEXT;
    *stream = add_stream(current());
    resource(CUPTI_CBID_RESOURCE_STREAM_CREATED, current(), *stream, NULL);
    return CUDA_SUCCESS;
}

/* The stream that a handle means: 0 and 1 (CU_STREAM_LEGACY) the context's own, 2 (CU_STREAM_PER_THREAD) and 0 of a _ptsz function
 * the thread's. */
static CUstream meant(CUstream stream, bool per_thread)
{
    CUcontext context = current();
    uintptr_t value = (uintptr_t)stream;
    unsigned slot;
    if (value > 2)
        return stream;
    if (!context)
        return NULL;
    if (value == 1 || (!value && !per_thread))
        return context->null_stream;
    slot = context->id % 16;
    if (!thread_streams[slot] || thread_streams[slot]->context != context)
        thread_streams[slot] = add_stream(context);
    return thread_streams[slot];
}

static CUresult synchronize(CUstream stream, bool per_thread)
{
    uint64_t until;
    stream = meant(stream, per_thread);
    if (!stream)
        return CUDA_ERROR_INVALID_CONTEXT;
    pthread_mutex_lock(&shared.lock);
    until = stream->busy_until;
    pthread_mutex_unlock(&shared.lock);
    if (until > now())
        sleep_until(until);
    return CUDA_SUCCESS;
}

static CUresult stream_synchronize(CUstream stream, uint32_t cbid, const char *name)
{
    PARAMS(CUstream hStream;) params = {stream};
    struct standin_call call;
    if (!usable())
        return CUDA_ERROR_NOT_INITIALIZED;
    call = entered(cbid, name, &params, NULL);
    return left(&call, synchronize(stream, cbid == CBID_cuStreamSynchronize_ptsz));
}

EXPORT CUresult cuStreamSynchronize(CUstream stream)
{
    return stream_synchronize(stream, CBID_cuStreamSynchronize, "cuStreamSynchronize");
}

EXPORT CUresult cuStreamSynchronize_ptsz(CUstream stream)
{
    return stream_synchronize(stream, CBID_cuStreamSynchronize_ptsz, "cuStreamSynchronize_ptsz");
}

EXPORT CUresult cuStreamDestroy_v2(CUstream stream)
{
    if (!usable())
        return CUDA_ERROR_NOT_INITIALIZED;
    if ((uintptr_t)stream <= 2)
        return CUDA_ERROR_INVALID_HANDLE;
    resource(CUPTI_CBID_RESOURCE_STREAM_DESTROY_STARTING, stream->context, stream, NULL);
    return CUDA_SUCCESS; /* what it executes goes on; it stays with its context */
}

EXPORT CUresult cuStreamGetId(CUstream stream, unsigned long long *id)
{
    stream = meant(stream, false);
    if (!stream)
        return CUDA_ERROR_INVALID_CONTEXT;
    *id = stream->id;
    return CUDA_SUCCESS;
}

/* ---- modules ---- */

/* How many bytes an ELF has, by its headers; 0 if it is none of NVIDIA's. */
static size_t elf_size(const char *bytes)
{
    const Elf64_Ehdr *header = (const void *)bytes;
    size_t size;
    if (memcmp(bytes, ELFMAG, SELFMAG) || header->e_ident[EI_CLASS] != ELFCLASS64 || header->e_machine != MACHINE)
        return 0;
    size = header->e_shoff + (size_t)header->e_shnum * header->e_shentsize;
    for (unsigned i = 0; i < header->e_shnum; i++) {
        const Elf64_Shdr *section = (const void *)(bytes + header->e_shoff + (size_t)i * header->e_shentsize);
        if (section->sh_type != SHT_NOBITS && section->sh_offset + section->sh_size > size)
            size = section->sh_offset + section->sh_size;
    }
    if (header->e_phoff && header->e_phoff + (size_t)header->e_phnum * header->e_phentsize > size)
        size = header->e_phoff + (size_t)header->e_phnum * header->e_phentsize;
    return size;
}

static bool is_padding(const char *instruction)
{
    uint64_t word;
    memcpy(&word, instruction, sizeof(word));
    return (word & 0xfff) == 0x918; /* NOP */
}

static void find_functions(CUmodule module)
{
    const Elf64_Ehdr *header = (const void *)module->bytes;
    const Elf64_Shdr *sections = (const void *)(module->bytes + header->e_shoff);
    for (unsigned i = 0; i < header->e_shnum; i++) {
        const Elf64_Sym *symbols = (const void *)(module->bytes + sections[i].sh_offset);
        const char *names;
        size_t count = sections[i].sh_size / sizeof(*symbols);
        if (sections[i].sh_type != SHT_SYMTAB)
            continue;
        names = module->bytes + sections[sections[i].sh_link].sh_offset;
        module->functions = zeroed(count, sizeof(*module->functions));
        for (size_t s = 0; s < count; s++) {
            CUfunction function = &module->functions[module->count];
            const char *code;
            if (ELF64_ST_TYPE(symbols[s].st_info) != STT_FUNC || !(symbols[s].st_other & STO_ENTRY) ||
                symbols[s].st_shndx >= header->e_shnum)
                continue;
            code = module->bytes + sections[symbols[s].st_shndx].sh_offset + symbols[s].st_value;
            function->module = module;
            function->name = strdup(names + symbols[s].st_name);
            function->symbol = (uint32_t)s;
            function->instructions = (uint32_t)(symbols[s].st_size / STANDIN_INSTRUCTION);
            while (function->instructions > 1 && is_padding(code + (function->instructions - 1) * STANDIN_INSTRUCTION))
                function->instructions--;
            function->rows = zeroed(function->instructions, sizeof(*function->rows));
            module->count++;
        }
        return;
    }
}

static CUresult load_module(CUmodule *made, const void *image, CUcontext context)
{
    size_t size = elf_size(image);
    CUmodule module;
    if (!context)
        return CUDA_ERROR_INVALID_CONTEXT;
    if (!size)
        return CUDA_ERROR_INVALID_IMAGE;
    module = zeroed(1, sizeof(*module));
    module->context = context;
    module->id = atomic_fetch_add(&next_module, 1);
    module->size = size;
    module->bytes = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (module->bytes == MAP_FAILED)
        abort();
    memcpy(module->bytes, image, size);
    module->crc = standin_crc(image, size);
    find_functions(module);
    pthread_mutex_lock(&shared.lock);
    module->next = shared.modules;
    shared.modules = module;
    pthread_mutex_unlock(&shared.lock);
    resource(CUPTI_CBID_RESOURCE_MODULE_LOADED, context, NULL, module);
    *made = module;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuModuleLoadData(CUmodule *module, const void *image)
{
    PARAMS(CUmodule *module; const void *image;) params = {module, image};
    struct standin_call call;
    if (!usable())
        return CUDA_ERROR_NOT_INITIALIZED;
    call = entered(CBID_cuModuleLoadData, "cuModuleLoadData", &params, NULL);
    return left(&call, load_module(module, image, current()));
}

EXPORT CUresult cuModuleLoadDataEx(CUmodule *module, const void *image, unsigned count, void *options, void **values)
{
    PARAMS(CUmodule *module; const void *image; unsigned numOptions; void *options; void **optionValues;)
    params = {module, image, count, options, values};
    struct standin_call call;
    if (!usable())
        return CUDA_ERROR_NOT_INITIALIZED;
    call = entered(CBID_cuModuleLoadDataEx, "cuModuleLoadDataEx", &params, NULL);
    return left(&call, load_module(module, image, current()));
}

/* The module itself stays, as what is known of its samples does. Whoever reads its cubin from now on is killed. */
static void forget_bytes(CUmodule module)
{
    pthread_mutex_lock(&shared.lock);
    if (!module->unloaded)
        munmap(module->bytes, module->size);
    module->unloaded = true;
    pthread_mutex_unlock(&shared.lock);
}

/* A context takes its modules with it. Whether callbacks are told of each is said nowhere: both must do. */
static void forget_modules(CUcontext context)
{
    bool tells = fault("unloads-at-destroy");
    for (CUmodule module = shared.modules; module; module = module->next)
        if (module->context == context && !module->unloaded) {
            if (tells)
                resource(CUPTI_CBID_RESOURCE_MODULE_UNLOAD_STARTING, context, NULL, module);
            forget_bytes(module);
        }
}

static CUresult unload_module(CUmodule module)
{
    void (*ended)(CUmodule) = shared.on_module_end;
    if (!module || module->unloaded)
        return CUDA_ERROR_INVALID_HANDLE;
    resource(CUPTI_CBID_RESOURCE_MODULE_UNLOAD_STARTING, module->context, NULL, module);
    wait_for_streams(module->context);
    if (ended)
        ended(module);
    forget_bytes(module);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuModuleUnload(CUmodule module)
{
    PARAMS(CUmodule hmod;) params = {module};
    struct standin_call call;
    if (!usable())
        return CUDA_ERROR_NOT_INITIALIZED;
    call = entered(CBID_cuModuleUnload, "cuModuleUnload", &params, NULL);
    return left(&call, unload_module(module));
}

EXPORT CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name)
{
    if (!usable())
        return CUDA_ERROR_NOT_INITIALIZED;
    if (!module || module->unloaded)
        return CUDA_ERROR_INVALID_HANDLE;
    for (uint32_t i = 0; i < module->count; i++)
        if (!strcmp(module->functions[i].name, name)) {
            *function = &module->functions[i];
            return CUDA_SUCCESS;
        }
    return CUDA_ERROR_NOT_FOUND;
}

/* A library's kernels are launched by handles of their own, which name no module until a context is known. */
static pthread_mutex_t library_lock = PTHREAD_MUTEX_INITIALIZER;
static CUkernel known_kernels[4096];
static size_t known_kernel_count;

static CUkernel as_kernel(const void *handle)
{
    CUkernel found = NULL;
    pthread_mutex_lock(&library_lock);
    for (size_t i = 0; i < known_kernel_count && !found; i++)
        if (known_kernels[i] == handle)
            found = known_kernels[i];
    pthread_mutex_unlock(&library_lock);
    return found;
}

static CUresult function_of(CUfunction *function, CUkernel kernel)
{
    CUcontext context = current();
    CUmodule *module;
    CUresult result = CUDA_SUCCESS;
    if (!context)
        return CUDA_ERROR_INVALID_CONTEXT;
    module = &kernel->library->modules[context->id % 64];
    if (!*module)
        result = load_module(module, kernel->library->image, context);
    return result ? result : cuModuleGetFunction(function, *module, kernel->name);
}

EXPORT CUresult cuFuncGetModule(CUmodule *module, CUfunction function)
{
    if (!usable())
        return CUDA_ERROR_NOT_INITIALIZED;
    if (!function || as_kernel(function) || fault("no-owners"))
        return CUDA_ERROR_INVALID_HANDLE;
    *module = function->module;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuFuncGetName(const char **name, CUfunction function)
{
    if (!usable())
        return CUDA_ERROR_NOT_INITIALIZED;
    if (!function)
        return CUDA_ERROR_INVALID_HANDLE;
    *name = as_kernel(function) ? ((CUkernel)(void *)function)->name : function->name;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuLibraryLoadData(CUlibrary *made, const void *code, void *a, void **b, unsigned c, void *d, void **e, unsigned f)
{
    PARAMS(CUlibrary *library; const void *code; void *a; void **b; unsigned c; void *d; void **e; unsigned f;)
    params = {made, code, a, b, c, d, e, f};
    struct standin_call call;
    size_t size;
    if (!usable())
        return CUDA_ERROR_NOT_INITIALIZED;
    call = entered(CBID_cuLibraryLoadData, "cuLibraryLoadData", &params, NULL);
    size = elf_size(code);
    if (!size)
        return left(&call, CUDA_ERROR_INVALID_IMAGE);
    *made = zeroed(1, sizeof(**made));
    (*made)->image = zeroed(1, size);
    memcpy((*made)->image, code, size);
    return left(&call, CUDA_SUCCESS);
}

EXPORT CUresult cuLibraryUnload(CUlibrary library)
{
    PARAMS(CUlibrary library;) params = {library};
    struct standin_call call;
    if (!usable())
        return CUDA_ERROR_NOT_INITIALIZED;
    call = entered(CBID_cuLibraryUnload, "cuLibraryUnload", &params, NULL);
    for (int i = 0; i < 64; i++)
        if (library->modules[i])
            unload_module(library->modules[i]);
    return left(&call, CUDA_SUCCESS);
}

EXPORT CUresult cuLibraryGetKernel(CUkernel *made, CUlibrary library, const char *name)
{
    CUkernel kernel;
    if (!usable())
        return CUDA_ERROR_NOT_INITIALIZED;
    pthread_mutex_lock(&library_lock);
    for (kernel = library->kernels; kernel && strcmp(kernel->name, name); kernel = kernel->next)
        ;
    if (!kernel && known_kernel_count < sizeof(known_kernels) / sizeof(*known_kernels)) {
        kernel = zeroed(1, sizeof(*kernel));
        kernel->library = library;
        kernel->name = strdup(name);
        kernel->next = library->kernels;
        library->kernels = kernel;
        known_kernels[known_kernel_count++] = kernel;
    }
    pthread_mutex_unlock(&library_lock);
    *made = kernel;
    return kernel ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

EXPORT CUresult cuKernelGetFunction(CUfunction *function, CUkernel kernel)
{
    if (!usable())
        return CUDA_ERROR_NOT_INITIALIZED;
    if (!as_kernel(kernel))
        return CUDA_ERROR_INVALID_HANDLE;
    return function_of(function, kernel);
}

EXPORT CUresult cuKernelGetLibrary(CUlibrary *library, CUkernel kernel)
{
    if (!usable())
        return CUDA_ERROR_NOT_INITIALIZED;
    if (!as_kernel(kernel) || fault("no-owners"))
        return CUDA_ERROR_INVALID_HANDLE;
    *library = kernel->library;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuKernelGetName(const char **name, CUkernel kernel)
{
    *name = kernel->name;
    return CUDA_SUCCESS;
}

/* ---- launches ---- */

static void execute(CUstream stream, const struct node *node, uint32_t correlation, uint32_t graph, uint64_t graph_node)
{
    struct standin_execution *made = zeroed(1, sizeof(*made));
    CUcontext context = stream->context;
    uint64_t *slot, room_at;
    made->function = node->function;
    made->context = context;
    made->correlation = correlation;
    made->stream = stream->id;
    made->graph = graph;
    made->node = graph_node;
    made->site = node->site;
    made->shared_bytes = node->shared_bytes;
    memcpy(made->grid, node->grid, sizeof(made->grid));
    memcpy(made->block, node->block, sizeof(made->block));
    pthread_mutex_lock(&shared.lock);
    slot = &stream->ends[stream->launched++ % STANDIN_DEPTH];
    room_at = *slot;
    made->begin = now() + LAUNCH_DELAY;
    if (made->begin < stream->busy_until + GAP)
        made->begin = stream->busy_until + GAP;
    made->end = made->begin + node->grid[0] * US;
    made->sampled_to = made->begin;
    stream->busy_until = *slot = made->end;
    node->function->launches[node->site]++;
    *shared.last_execution = made;
    shared.last_execution = &made->next;
    made->delivered = !shared.recording;
    if (!shared.undelivered)
        shared.undelivered = made;
    if (context->sampling.enabled) {
        *context->sampling.last = made;
        context->sampling.last = &made->sampling;
    }
    pthread_mutex_unlock(&shared.lock);
    if (room_at > now())
        sleep_until(room_at);
}

static CUresult launch(CUfunction function, CUstream stream, const struct node *given, bool per_thread, uint32_t correlation)
{
    struct node node = *given;
    CUkernel kernel = as_kernel(function);
    CUresult result = kernel ? function_of(&function, kernel) : CUDA_SUCCESS;
    if (result)
        return result;
    stream = meant(stream, per_thread);
    if (!stream)
        return CUDA_ERROR_INVALID_CONTEXT;
    if (stream->context->dead)
        return CUDA_ERROR_INVALID_CONTEXT;
    if (!function || function->module->unloaded || function->module->context != stream->context)
        return CUDA_ERROR_INVALID_HANDLE;
    if (!node.grid[0] || !node.grid[1] || !node.grid[2] || !node.block[0] || !node.block[1] || !node.block[2])
        return CUDA_ERROR_INVALID_VALUE;
    node.function = function;
    node.site = node.grid[1] < 16 ? node.grid[1] : 15;
    if (stream->capture) {
        CUgraph graph = stream->capture;
        if (graph->count == graph->room) {
            graph->room = graph->room ? 2 * graph->room : 16;
            graph->nodes = realloc(graph->nodes, graph->room * sizeof(*graph->nodes));
            if (!graph->nodes)
                abort();
        }
        node.handle = make_node(atomic_fetch_add(&next_node, 1), NULL);
        graph->nodes[graph->count++] = node;
        pthread_mutex_lock(&shared.lock);
        function->captured++;
        pthread_mutex_unlock(&shared.lock);
        return CUDA_SUCCESS;
    }
    execute(stream, &node, correlation, 0, 0);
    return CUDA_SUCCESS;
}

static const char *name_of(CUfunction function)
{
    CUkernel kernel = as_kernel(function);
    return kernel ? kernel->name : function ? function->name : NULL;
}

static CUresult launch_kernel(const struct launch_params *p, uint32_t cbid, const char *name, bool per_thread)
{
    struct node node = {NULL, NULL, {p->gridDimX, p->gridDimY, p->gridDimZ}, {p->blockDimX, p->blockDimY, p->blockDimZ}, p->sharedMemBytes, 0};
    struct standin_call call;
    if (!usable())
        return CUDA_ERROR_NOT_INITIALIZED;
    call = entered(cbid, name, p, name_of(p->f));
    return left(&call, launch(p->f, p->hStream, &node, per_thread, call.correlation));
}

static CUresult launch_ex(const struct launch_ex_params *p, uint32_t cbid, const char *name, bool per_thread)
{
    const CUlaunchConfig *c = p->config;
    struct node node = {NULL, NULL, {c->gridDimX, c->gridDimY, c->gridDimZ}, {c->blockDimX, c->blockDimY, c->blockDimZ}, c->sharedMemBytes, 0};
    struct standin_call call;
    if (!usable())
        return CUDA_ERROR_NOT_INITIALIZED;
    call = entered(cbid, name, p, name_of(p->f));
    return left(&call, launch(p->f, c->hStream, &node, per_thread, call.correlation));
}

#define LAUNCH_ARGUMENTS                                                                                                           \
    CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned bytes, CUstream stream,   \
        void **arguments

EXPORT CUresult cuLaunchKernel(LAUNCH_ARGUMENTS, void **extra)
{
    struct launch_params params = {f, gx, gy, gz, bx, by, bz, bytes, stream, arguments, extra};
    return launch_kernel(&params, CBID_cuLaunchKernel, "cuLaunchKernel", false);
}

EXPORT CUresult cuLaunchKernel_ptsz(LAUNCH_ARGUMENTS, void **extra)
{
    struct launch_params params = {f, gx, gy, gz, bx, by, bz, bytes, stream, arguments, extra};
    return launch_kernel(&params, CBID_cuLaunchKernel_ptsz, "cuLaunchKernel_ptsz", true);
}

EXPORT CUresult cuLaunchCooperativeKernel(LAUNCH_ARGUMENTS)
{
    struct launch_params params = {f, gx, gy, gz, bx, by, bz, bytes, stream, arguments, NULL};
    return launch_kernel(&params, CBID_cuLaunchCooperativeKernel, "cuLaunchCooperativeKernel", false);
}

EXPORT CUresult cuLaunchCooperativeKernel_ptsz(LAUNCH_ARGUMENTS)
{
    struct launch_params params = {f, gx, gy, gz, bx, by, bz, bytes, stream, arguments, NULL};
    return launch_kernel(&params, CBID_cuLaunchCooperativeKernel_ptsz, "cuLaunchCooperativeKernel_ptsz", true);
}

EXPORT CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction f, void **arguments, void **extra)
{
    struct launch_ex_params params = {config, f, arguments, extra};
    return launch_ex(&params, CBID_cuLaunchKernelEx, "cuLaunchKernelEx", false);
}

EXPORT CUresult cuLaunchKernelEx_ptsz(const CUlaunchConfig *config, CUfunction f, void **arguments, void **extra)
{
    struct launch_ex_params params = {config, f, arguments, extra};
    return launch_ex(&params, CBID_cuLaunchKernelEx_ptsz, "cuLaunchKernelEx_ptsz", true);
}

/* ---- graphs ---- */

static CUresult begin_capture(CUstream stream, bool per_thread)
{
    if (!usable())
        return CUDA_ERROR_NOT_INITIALIZED;
    if ((uintptr_t)stream <= 1 && !per_thread)
        return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    stream = meant(stream, per_thread);
    if (!stream || stream->capture)
        return CUDA_ERROR_INVALID_VALUE;
    stream->capture = zeroed(1, sizeof(*stream->capture));
    return CUDA_SUCCESS;
}

static CUresult end_capture(CUstream stream, CUgraph *graph, bool per_thread)
{
    if (!usable())
        return CUDA_ERROR_NOT_INITIALIZED;
    stream = meant(stream, per_thread);
    if (!stream || !stream->capture)
        return CUDA_ERROR_INVALID_VALUE;
    *graph = stream->capture;
    stream->capture = NULL;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuStreamBeginCapture_v2(CUstream stream, int mode)
{
    (void)mode;
    return begin_capture(stream, false);
}

EXPORT CUresult cuStreamBeginCapture_v2_ptsz(CUstream stream, int mode)
{
    (void)mode;
    return begin_capture(stream, true);
}

EXPORT CUresult cuStreamEndCapture(CUstream stream, CUgraph *graph)
{
    return end_capture(stream, graph, false);
}

EXPORT CUresult cuStreamEndCapture_ptsz(CUstream stream, CUgraph *graph)
{
    return end_capture(stream, graph, true);
}

EXPORT CUresult cuStreamIsCapturing(CUstream stream, int *status)
{
    stream = meant(stream, false);
    *status = stream && stream->capture;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuGraphInstantiateWithFlags(CUgraphExec *made, CUgraph graph, unsigned long long flags)
{
    CUgraphExec exec;
    (void)flags;
    if (!usable())
        return CUDA_ERROR_NOT_INITIALIZED;
    exec = zeroed(1, sizeof(*exec) + graph->count * sizeof(*exec->nodes));
    exec->id = atomic_fetch_add(&next_graph, 1);
    exec->count = graph->count;
    if (graph->count)
        memcpy(exec->nodes, graph->nodes, graph->count * sizeof(*exec->nodes));
    for (size_t i = 0; i < exec->count; i++)
        exec->nodes[i].handle = make_node((uint64_t)exec->id << 32 | (i + 1), graph->nodes[i].handle);
    *made = exec;
    return CUDA_SUCCESS;
}

static CUresult launch_graph(CUgraphExec exec, CUstream stream, uint32_t cbid, const char *name, bool per_thread)
{
    struct graph_launch_params params = {exec, stream};
    struct standin_call call;
    if (!usable())
        return CUDA_ERROR_NOT_INITIALIZED;
    call = entered(cbid, name, &params, NULL);
    stream = meant(stream, per_thread);
    if (!exec || !stream)
        return left(&call, CUDA_ERROR_INVALID_VALUE);
    for (size_t i = 0; i < exec->count; i++)
        execute(stream, &exec->nodes[i], call.correlation, exec->id, exec->nodes[i].handle->id);
    return left(&call, CUDA_SUCCESS);
}

EXPORT CUresult cuGraphLaunch(CUgraphExec exec, CUstream stream)
{
    return launch_graph(exec, stream, CBID_cuGraphLaunch, "cuGraphLaunch", false);
}

EXPORT CUresult cuGraphLaunch_ptsz(CUgraphExec exec, CUstream stream)
{
    return launch_graph(exec, stream, CBID_cuGraphLaunch_ptsz, "cuGraphLaunch_ptsz", true);
}

EXPORT CUresult cuGraphExecDestroy(CUgraphExec exec)
{
    for (size_t i = 0; i < exec->count; i++)
        free(exec->nodes[i].handle);
    free(exec);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuGraphDestroy(CUgraph graph)
{
    for (size_t i = 0; i < graph->count; i++)
        free(graph->nodes[i].handle);
    free(graph->nodes);
    free(graph);
    return CUDA_SUCCESS;
}

/* ---- memory ---- */

EXPORT CUresult cuMemAlloc_v2(CUdeviceptr *pointer, size_t bytes)
{
    void *memory;
    if (!usable())
        return CUDA_ERROR_NOT_INITIALIZED;
    memory = bytes ? malloc(bytes) : NULL;
    if (!memory)
        return bytes ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_ERROR_INVALID_VALUE;
    *pointer = (uintptr_t)memory;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemFree_v2(CUdeviceptr pointer)
{
    free((void *)(uintptr_t)pointer);
    return CUDA_SUCCESS;
}

static CUresult copy(void *to, const void *from, size_t bytes, CUstream stream, uint32_t cbid, const char *name, bool to_device)
{
    PARAMS(CUdeviceptr dst; const void *src; size_t bytes; CUstream hStream;) in = {(uintptr_t)to, from, bytes, stream};
    PARAMS(void *dst; CUdeviceptr src; size_t bytes;) out = {to, (uintptr_t)from, bytes};
    struct standin_call call;
    if (!usable())
        return CUDA_ERROR_NOT_INITIALIZED;
    call = entered(cbid, name, to_device ? (void *)&in : (void *)&out, NULL);
    if (cbid == CBID_cuMemcpyDtoH_v2 || cbid == CBID_cuMemcpyDtoH_v2_ptds)
        synchronize(stream, cbid == CBID_cuMemcpyDtoH_v2_ptds);
    memcpy(to, from, bytes);
    return left(&call, CUDA_SUCCESS);
}

#define AT(pointer) ((void *)(uintptr_t)(pointer))
#define COPY_TO(function)                                                                                                          \
    EXPORT CUresult function(CUdeviceptr to, const void *from, size_t bytes)                                                       \
    {                                                                                                                              \
        return copy(AT(to), from, bytes, NULL, CBID_##function, #function, true);                                                  \
    }
#define COPY_TO_ASYNC(function)                                                                                                    \
    EXPORT CUresult function(CUdeviceptr to, const void *from, size_t bytes, CUstream stream)                                      \
    {                                                                                                                              \
        return copy(AT(to), from, bytes, stream, CBID_##function, #function, true);                                                \
    }
#define COPY_FROM(function)                                                                                                        \
    EXPORT CUresult function(void *to, CUdeviceptr from, size_t bytes)                                                             \
    {                                                                                                                              \
        return copy(to, AT(from), bytes, NULL, CBID_##function, #function, false);                                                 \
    }
#define SET(function)                                                                                                              \
    EXPORT CUresult function(CUdeviceptr to, unsigned char value, size_t count, CUstream stream)                                   \
    {                                                                                                                              \
        PARAMS(CUdeviceptr dst; unsigned char uc; size_t N; CUstream hStream;) params = {to, value, count, stream};                \
        struct standin_call call;                                                                                                  \
        if (!usable())                                                                                                             \
            return CUDA_ERROR_NOT_INITIALIZED;                                                                                     \
        call = entered(CBID_##function, #function, &params, NULL);                                                                 \
        memset(AT(to), value, count);                                                                                              \
        return left(&call, CUDA_SUCCESS);                                                                                          \
    }
COPY_TO(cuMemcpyHtoD_v2)
COPY_TO(cuMemcpyHtoD_v2_ptds)
COPY_TO_ASYNC(cuMemcpyHtoDAsync_v2)
COPY_TO_ASYNC(cuMemcpyHtoDAsync_v2_ptsz)
COPY_FROM(cuMemcpyDtoH_v2)
COPY_FROM(cuMemcpyDtoH_v2_ptds)
SET(cuMemsetD8Async)
SET(cuMemsetD8Async_ptsz)

/* ---- functions by name ---- */

/* The exported function itself, as with NVIDIA's: the newest one of its name that the program's version of CUDA knows. */
EXPORT CUresult cuGetProcAddress_v2(const char *symbol, void **function, int version, uint64_t flags, int *status)
{
    static const char *const endings[] = {"_v4", "_v3", "_v2", ""};
    static void *self;
    Dl_info info;
    if (!self && dladdr(&standin_cuda, &info))
        self = dlopen(info.dli_fname, RTLD_NOW | RTLD_NOLOAD);
    *function = NULL;
    for (int i = version < 13000 ? 2 : 0; self && i < 4 && !*function; i++) {
        char name[256];
        if (flags & 2) { /* per-thread default stream */
            snprintf(name, sizeof(name), "%s%s_ptsz", symbol, endings[i]);
            *function = dlsym(self, name);
            if (!*function) {
                snprintf(name, sizeof(name), "%s%s_ptds", symbol, endings[i]);
                *function = dlsym(self, name);
            }
        }
        snprintf(name, sizeof(name), "%s%s", symbol, endings[i]);
        if (!*function)
            *function = dlsym(self, name);
    }
    if (status)
        *status = *function ? 0 : 1;
    return *function ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

EXPORT CUresult cuGetProcAddress(const char *symbol, void **function, int version, uint64_t flags)
{
    return cuGetProcAddress_v2(symbol, function, version, flags, NULL);
}

/* ---- the ledger ---- */

static void put_string(FILE *out, const char *text)
{
    fputc('"', out);
    for (; *text; text++)
        if (*text == '"' || *text == '\\')
            fprintf(out, "\\%c", *text);
        else if ((unsigned char)*text < 32)
            fprintf(out, "\\u%04x", *text);
        else
            fputc(*text, out);
    fputc('"', out);
}

static void put_rows(FILE *out, const char *name, size_t member)
{
    const char *comma = "";
    fprintf(out, ",\n\"%s\": [", name);
    for (CUmodule module = shared.modules; module; module = module->next)
        for (uint32_t f = 0; f < module->count; f++)
            for (uint32_t i = 0; i < module->functions[f].instructions; i++) {
                const struct standin_row *row = module->functions[f].rows[i];
                const uint64_t *counts = row ? (const void *)((const char *)row + member) : NULL;
                for (uint32_t reason = 0; row && reason < STANDIN_REASONS; reason++)
                    if (counts[reason]) {
                        fprintf(out, "%s\n[", comma);
                        put_string(out, module->functions[f].name);
                        fprintf(out, ", %llu, %u, %u, %u, %u, %u, %llu]", (unsigned long long)module->crc, module->functions[f].symbol,
                                i * STANDIN_INSTRUCTION, reason, module->context->id, module->id, (unsigned long long)counts[reason]);
                        comma = ",";
                    }
            }
    fprintf(out, "]");
}

static void put_ledger(FILE *out)
{
    const char *comma = "";
    fprintf(out, "{\"pid\": %d, \"written\": %llu", getpid(), (unsigned long long)now());
    fprintf(out, ", \"records\": {\"delivered\": %llu, \"dropped\": %llu}", (unsigned long long)shared.activity.delivered,
            (unsigned long long)shared.activity.dropped);
    fprintf(out, ",\n\"calls\": {");
    for (int i = 0; i < CBID_COUNT; i++)
        if (calls[i].name) {
            fprintf(out, "%s\"%s\": [%lu, %lu]", comma, calls[i].name, calls[i].done, calls[i].failed);
            comma = ", ";
        }
    comma = "";
    fprintf(out, "},\n\"contexts\": [");
    for (CUcontext context = shared.contexts; context; context = context->next) {
        const struct standin_sampling *s = &context->sampling;
        fprintf(out, "%s\n{\"id\": %u, \"device\": %d, \"period\": %u, \"enabled\": %s, ", comma, context->id, context->device, s->period,
                s->enabled ? "true" : "false");
        fprintf(out, "\"handed\": %llu, \"dropped\": %llu, \"nonuser\": %llu, \"lost\": %llu, ", (unsigned long long)s->handed,
                (unsigned long long)s->dropped, (unsigned long long)s->nonuser, (unsigned long long)s->lost);
        fprintf(out, "\"full\": %llu, \"calls\": %llu, \"failures\": %llu, \"nonsense\": %llu}", (unsigned long long)s->full,
                (unsigned long long)s->calls, (unsigned long long)s->failures, (unsigned long long)s->spoiled);
        comma = ",";
    }
    comma = "";
    fprintf(out, "],\n\"cubins\": [");
    for (CUmodule module = shared.modules; module; module = module->next) {
        fprintf(out, "%s\n{\"module\": %u, \"context\": %u, \"crc\": %llu, \"size\": %zu, \"unloaded\": %s}", comma, module->id,
                module->context->id, (unsigned long long)module->crc, module->size, module->unloaded ? "true" : "false");
        comma = ",";
    }
    comma = "";
    fprintf(out, "],\n\"launches\": [");
    for (CUmodule module = shared.modules; module; module = module->next)
        for (uint32_t f = 0; f < module->count; f++)
            for (int site = 0; site < 16; site++)
                if (module->functions[f].launches[site]) {
                    fprintf(out, "%s\n[", comma);
                    put_string(out, module->functions[f].name);
                    fprintf(out, ", %d, %llu]", site, (unsigned long long)module->functions[f].launches[site]);
                    comma = ",";
                }
    comma = "";
    fprintf(out, "],\n\"captured\": [");
    for (CUmodule module = shared.modules; module; module = module->next)
        for (uint32_t f = 0; f < module->count; f++)
            if (module->functions[f].captured) {
                fprintf(out, "%s\n[", comma);
                put_string(out, module->functions[f].name);
                fprintf(out, ", %llu]", (unsigned long long)module->functions[f].captured);
                comma = ",";
            }
    comma = "";
    fprintf(out, "],\n\"executions\": [");
    for (const struct standin_execution *e = shared.executions; e; e = e->next) {
        fprintf(out, "%s\n[%u, ", comma, e->correlation);
        put_string(out, e->function->name);
        fprintf(out, ", %u, %u, %u, %d, %llu, %llu, %llu, %u, %llu, %s]", e->site, e->stream, e->context->id, e->context->device,
                (unsigned long long)e->begin, (unsigned long long)e->end, (unsigned long long)e->samples, e->graph,
                (unsigned long long)e->node, e->told ? "true" : "false");
        comma = ",";
    }
    fprintf(out, "]");
    put_rows(out, "samples", offsetof(struct standin_row, handed));
    put_rows(out, "unread", offsetof(struct standin_row, pending));
    put_rows(out, "lost", offsetof(struct standin_row, lost));
    fprintf(out, "}\n");
}

static void write_ledger(void)
{
    const char *path = getenv("STANDIN_CUDA_LEDGER");
    char name[4096], fresh[4096 + 8];
    FILE *out;
    if (!path || !*path || !initialized || shared.dead)
        return;
    snprintf(name, sizeof(name), "%s.%d", path, getpid());
    snprintf(fresh, sizeof(fresh), "%s.new", name);
    pthread_mutex_lock(&shared.lock); /* whoever hands something out waits for this ledger, and then writes the next */
    out = fopen(fresh, "w");
    if (out) {
        put_ledger(out);
        if (!fclose(out))
            rename(fresh, name);
        ledger_written = true;
    }
    pthread_mutex_unlock(&shared.lock);
}

/* For a program that is about to end in another way. */
EXPORT void standin_cuda_ledger(void)
{
    write_ledger();
}

static void write_ledger_again(void)
{
    if (ledger_written)
        write_ledger();
}

__attribute__((destructor)) static void unloaded(void)
{
    write_ledger();
}
