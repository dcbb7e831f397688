// SPDX-License-Identifier: Apache-2.0
/* libiaprof_cuda.so, which NVIDIA's driver loads into the command that `iaprof record` starts, and into its children, as
 * CUDA_INJECTION64_PATH names it. It gets from NVIDIA's profiling library CUPTI what only the process itself can get: samples
 * of each context's instructions, cubins, the times of executions, and a callback at each launch.
 *
 * It opens no file, and connects to nothing. A launch raises the USDT probe cuda:launch_kernel; everything else is a message in memory,
 * which the recorder's BPF program copies when the probe cuda:message is raised (bpf/c/messages.c). While nobody records, the
 * probes' semaphores are 0, and the library lets go of CUPTI.
 *
 * Addresses: samples name a cubin by its CRC, a function by its number, and an offset. Each cubin that is launched or sampled
 * gets a base: the address of an instruction is that base, plus where the instruction is in the file. The recorder adds where
 * the process's range of addresses begins, as a process in a container does not know its number.
 *
 * CUPTI's and the driver's structures are declared here as far as they are used, from the documentation and by measuring
 * (CUDA 12 and 13); they have `size` members or have never moved a member. What fails here says so in a message, and the
 * program goes on without it. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <elf.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <link.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/auxv.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#define _SDT_HAS_SEMAPHORES 1
#include <sys/sdt.h>

#include "inject_cuda_paths.h"
#include "probe.h"

__extension__ volatile unsigned short cuda_launch_kernel_semaphore __attribute__((section(".probes")));
__extension__ volatile unsigned short cuda_message_semaphore __attribute__((section(".probes")));

#define ELEMENTS(array) (sizeof(array) / sizeof *(array))
#define DRAIN_NS 100000000
#define DECODE_MS 10 /* between two looks of CUPTI's own thread at the hardware's buffers */
#define WAIT_NS 2000000000 /* how long the program waits for us at most, if CUPTI does not return */
#define LATE_NS 20000000 /* a sample may have been taken so long before a drain that did not get it yet */
#define MOST_CONTEXTS 256 /* at a time */
#define MOST_GPUS 64      /* those beyond are sampled though another process may sample them */
#define UNKNOWN_GPU UINT32_MAX
#define MOST_METRICS 128
#define MOST_PCS 8192     /* of one answer */
#define MOST_ANSWERS 256  /* of one drain: CUPTI gives what is left at the next one */
#define MOST_KEPT (1UL << 29) /* bytes of cubins that wait for a sample */
#define END_REST_NS 10000000 /* for the recorder to take what was sent */
#define ROWS_OF_LAUNCHES (MESSAGE_BYTES / sizeof(struct path_row)) /* of a message */
#define MOST_SENT (2UL << 20) /* bytes of cubins that one drain sends: the ring buffer has room for four times as much */
#define END_WAIT_NS 1500000000 /* how long the program's end waits for a recorder that takes no cubins: less than WAIT_NS */

/* --- as much of the driver and of CUPTI as is needed */

enum { DOMAIN_DRIVER = 1, DOMAIN_RESOURCE = 3 };
enum {
    CONTEXT_CREATED = 1,
    CONTEXT_DESTROY_STARTING = 2,
    MODULE_LOADED = 6,
    MODULE_UNLOAD_STARTING = 7,
    GRAPH_NODE_CREATED = 13,
    GRAPH_NODE_CLONED = 20,
};
enum { AT_EXIT = 1 };
enum {
    CU_MODULE_LOAD = 18,
    CU_MODULE_LOAD_DATA = 19,
    CU_MODULE_LOAD_DATA_EX = 20,
    CU_MODULE_LOAD_FAT_BINARY = 21,
    CU_MODULE_UNLOAD = 22,
    CU_LAUNCH_KERNEL = 307,
    CU_LAUNCH_KERNEL_PTSZ = 442,
    CU_LAUNCH_COOPERATIVE_KERNEL = 477,
    CU_LAUNCH_COOPERATIVE_KERNEL_PTSZ = 478,
    CU_GRAPH_LAUNCH = 514,
    CU_GRAPH_LAUNCH_PTSZ = 515,
    CU_LAUNCH_KERNEL_EX = 652,
    CU_LAUNCH_KERNEL_EX_PTSZ = 653,
    CU_LIBRARY_LOAD_DATA = 678,
    CU_LIBRARY_LOAD_FROM_FILE = 679,
    CU_LIBRARY_UNLOAD = 680,
    CU_LIBRARY_GET_MODULE = 682,
    CU_KERNEL_GET_FUNCTION = 683,
};
/* These make and end handles of modules and libraries, or load a module into a context. */
static const uint32_t LOADS[] = {CU_MODULE_LOAD,        CU_MODULE_LOAD_DATA,  CU_MODULE_LOAD_DATA_EX,    CU_MODULE_LOAD_FAT_BINARY,
                                 CU_MODULE_UNLOAD,      CU_LIBRARY_LOAD_DATA, CU_LIBRARY_LOAD_FROM_FILE, CU_LIBRARY_UNLOAD,
                                 CU_LIBRARY_GET_MODULE, CU_KERNEL_GET_FUNCTION};
static const uint32_t LAUNCHES[] = {CU_LAUNCH_KERNEL,
                                    CU_LAUNCH_KERNEL_PTSZ,
                                    CU_LAUNCH_COOPERATIVE_KERNEL,
                                    CU_LAUNCH_COOPERATIVE_KERNEL_PTSZ,
                                    CU_GRAPH_LAUNCH,
                                    CU_GRAPH_LAUNCH_PTSZ,
                                    CU_LAUNCH_KERNEL_EX,
                                    CU_LAUNCH_KERNEL_EX_PTSZ};
enum { OUT_OF_MEMORY = 8, INSUFFICIENT_PRIVILEGES = 35, MULTIPLE_SUBSCRIBERS = 39 };
enum { ACTIVITY_CONCURRENT_KERNEL = 10 };
#define STREAM_OF_THREAD ((void *)2) /* what no stream means in functions whose names end with _ptsz */
enum { CAPABILITY_MAJOR = 75, CAPABILITY_MINOR = 76, MULTIPROCESSORS = 16 };

struct call {
    int site;
    const char *function;
    void *const *parameters;
    const int *result;
    const char *symbol; /* of a launch: the kernel's */
    void *context;
    uint32_t context_uid;
    uint64_t *data;
    uint32_t correlation;
};
struct resource {
    void *context;
    void *handle;
    const void *about;
};
struct loaded {
    uint32_t id;
    size_t bytes;
    const uint8_t *cubin;
};
struct of_graph {
    void *graph, *original_graph;
    void *node, *original; /* of a node that was cloned */
    int kind; /* 0: of a kernel */
};
struct counted {
    uint32_t metric;
    uint32_t samples;
};
struct pc {
    size_t size;
    uint64_t crc;
    uint64_t offset; /* from the function's first instruction */
    uint32_t function; /* number of its symbol in the cubin */
    uint32_t unused;
    const char *name; /* shared: not to be freed */
    size_t counts;
    struct counted *counted;
    uint64_t correlation;
};
struct answer {
    size_t size;
    size_t room;
    uint64_t total;
    uint64_t dropped;
    size_t pcs;
    size_t left;
    uint64_t range;
    struct pc *pc;
    uint64_t of_driver; /* samples in kernels of the driver's own; part of `total`, as is `dropped` */
    uint8_t full;
};
_Static_assert(sizeof(struct pc) == 64 && sizeof(struct answer) == 80, "CUPTI");
struct setting {
    int type;
    int status;
    union {
        uint32_t number;
        void *buffer;
        uint64_t data[3];
    } value;
};
enum { SETTING_PERIOD = 1, SETTING_MODE = 5, SETTING_BUFFER = 8, SETTING_SLEEP = 9 };
enum { MODE_CONTINUOUS = 1 };
struct of_context { /* the parameters of most functions for samples */
    size_t size;
    void *unused;
    void *context;
    union {
        struct answer *answer;
        size_t *number;
        size_t many;
    } with;
    void *more[2];
};
/* Members of an activity record of a kernel, by offset: the same in all of its versions since CUDA 11. */
enum { KERNEL_START = 16, KERNEL_END = 24, KERNEL_DEVICE = 40, KERNEL_STREAM = 48, KERNEL_CORRELATION = 92, KERNEL_NAME = 104,
       KERNEL_GRAPH_NODE = 144 };

static struct {
    int (*subscribe)(void **subscriber, void *callback, void *data);
    int (*unsubscribe)(void *subscriber);
    int (*enable)(uint32_t enable, void *subscriber, int domain, uint32_t id);
    int (*text)(int result, const char **text);
    int (*start)(struct of_context *);
    int (*stop)(struct of_context *);
    int (*set)(struct of_context *);
    int (*data)(struct of_context *);
    int (*metric_number)(struct of_context *);
    int (*metrics)(struct of_context *);
    int (*on_crc)(void *compute);
    int (*device)(void *context, uint32_t *device);
    int (*activity)(int kind);
    int (*no_activity)(int kind);
    int (*on_buffers)(void *request, void *done);
    int (*next)(uint8_t *buffer, size_t bytes, uint8_t **record);
    int (*flush)(uint32_t all);
    int (*dropped)(void *context, uint32_t stream, size_t *dropped);
    int (*clock)(void *now);
    int (*node_id)(void *node, uint64_t *id);
} cupti;
static const char *const CUPTI_NAMES[] = {
    "cuptiSubscribe", "cuptiUnsubscribe", "cuptiEnableCallback", "cuptiGetResultString", "cuptiPCSamplingEnable",
    "cuptiPCSamplingDisable", "cuptiPCSamplingSetConfigurationAttribute", "cuptiPCSamplingGetData",
    "cuptiPCSamplingGetNumStallReasons", "cuptiPCSamplingGetStallReasons", "cuptiRegisterComputeCrcCallback", "cuptiGetDeviceId",
    "cuptiActivityEnable", "cuptiActivityDisable", "cuptiActivityRegisterCallbacks", "cuptiActivityGetNextRecord",
    "cuptiActivityFlushAll", "cuptiActivityGetNumDroppedRecords", "cuptiActivityRegisterTimestampCallback",
    "cuptiGetGraphNodeId"};
_Static_assert(sizeof cupti == sizeof(void *) * ELEMENTS(CUPTI_NAMES), "CUPTI_NAMES");

static struct {
    int (*attribute)(int *value, int which, int device);
    int (*name)(char *name, int bytes, int device);
    int (*bus)(char *text, int bytes, int device);
    int (*uuid)(uint8_t *uuid, int device);
    int (*capturing)(void *stream, int *status);
} driver;
static const char *const DRIVER_NAMES[] = {"cuDeviceGetAttribute", "cuDeviceGetName", "cuDeviceGetPCIBusId", "cuDeviceGetUuid_v2",
                                           "cuStreamIsCapturing"};
_Static_assert(sizeof driver == sizeof(void *) * ELEMENTS(DRIVER_NAMES), "DRIVER_NAMES");
static int (*module_of_function)(void **module, void *function); /* NULL in a driver before CUDA 11; both refuse other handles */
static int (*library_of_kernel)(void **library, void *kernel);   /* NULL in a driver before CUDA 12.5 */

/* --- messages: formats/wire/launches.py has MESSAGE and MessageOf */

enum { OF_CONTEXT = 1, OF_SAMPLES, OF_SUMS, OF_MODULE, OF_KERNEL, OF_EXECUTIONS, OF_PROBLEM, OF_LAUNCHES };
#define MESSAGE_BYTES ((16 << 10) - 72)

struct message {
    uint64_t id, begin, end, offset, total;
    uint32_t what, bytes;
    uint8_t data[MESSAGE_BYTES];
};

static pthread_mutex_t sending = PTHREAD_MUTEX_INITIALIZER; /* for the message of send_bytes(); taken last */

static bool is_recorded(void)
{
    return cuda_message_semaphore;
}

/* A function of its own, as the probe's argument has to be in a register or in memory. */
static __attribute__((noinline)) void send_message(const struct message *message)
{
    DTRACE_PROBE1(cuda, message, message);
}

/* Sends at most MESSAGE_BYTES. */
static void send_bytes(uint32_t what, uint64_t id, uint64_t begin, uint64_t end, const void *bytes, size_t many)
{
    static struct message message; /* not on a stack: the program's threads may have small ones */
    many = many < MESSAGE_BYTES ? many : MESSAGE_BYTES;
    pthread_mutex_lock(&sending);
    message.id = id;
    message.begin = begin;
    message.end = end;
    message.what = what;
    message.total = message.bytes = many;
    memcpy(message.data, bytes, many);
    send_message(&message);
    pthread_mutex_unlock(&sending);
}

__attribute__((format(printf, 1, 2))) static void send_problem(const char *format, ...)
{
    char text[512];
    va_list values;
    va_start(values, format);
    int bytes = vsnprintf(text, sizeof text, format, values);
    va_end(values);
    send_bytes(OF_PROBLEM, 0, 0, 0, text, bytes < (int)sizeof text ? bytes : (int)sizeof text - 1);
}

static uint64_t now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1000000000ULL + time.tv_nsec;
}

static unsigned progress; /* of our thread, at the end of the process */

static void made_progress(void)
{
    __atomic_add_fetch(&progress, 1, __ATOMIC_RELAXED);
}

static void rest(uint64_t ns)
{
    const struct timespec time = {.tv_sec = ns / 1000000000, .tv_nsec = ns % 1000000000};
    nanosleep(&time, NULL);
}

static const char *said(int result)
{
    const char *text = "";
    if (cupti.text(result, &text) || !text)
        text = "an unknown error";
    return text;
}

/* --- modules, their functions, and the addresses of both */

struct function {
    const char *name;
    uint64_t offset, size; /* in the file, bytes */
    struct module *module;
    struct function *next; /* of those whose names have the same hash */
};
/* A module was loaded into a context, and was not unloaded. */
struct load {
    struct load *next;
    void *context;
    uint32_t id;
};
struct module {
    struct module *next;
    struct module *later; /* the one that was loaded after it; if it is wanted, the one that was wanted after it */
    uint64_t crc;
    uint64_t loaded_ns;
    uint64_t last_load; /* the number of the load that was its last */
    struct load *loads;
    uint64_t base; /* 0: nothing was launched or sampled yet */
    uint8_t *cubin; /* NULL: it was sent, or there was no room for it */
    size_t bytes;
    bool is_wanted; /* it has samples */
    size_t sent; /* bytes of the cubin */
    uint32_t functions; /* as many as the cubin has symbols */
    struct function *function;
    char *names;
};
/* A kernel as it was launched; never freed. */
struct kernel {
    struct kernel *next;
    const struct module *module; /* NULL: not found */
    uint64_t address, size;
    char name[];
};

#define MODULE_SLOTS 1024
#define NAME_SLOTS 16384
#define HANDLE_SLOTS 8192
static pthread_mutex_t tables = PTHREAD_MUTEX_INITIALIZER;
static struct module *modules[MODULE_SLOTS]; /* by CRC */
static struct module *unwanted, **last_unwanted = &unwanted, *wanted, **last_wanted = &wanted; /* with cubins, in order */
static struct function *functions[NAME_SLOTS]; /* by name */
static struct kernel *kernels[NAME_SLOTS];     /* by name */
/* What a handle of the driver stands for in a context: never freed, and read without the lock. */
struct handle {
    struct handle *next;
    void *handle, *context;
    struct kernel *kernel; /* of a function or kernel that was launched; NULL if it has to be found again */
    struct module *module; /* of a module or library; NULL: unknown */
};
static struct handle *handles[HANDLE_SLOTS];
static uint64_t loads, used = 1 << 12, kept; /* number of loads, addresses that have an owner, bytes of cubins */
/* Kernels of graphs' nodes, by CUPTI's number of the node. A bucket has the last ones that belong there, the newest first. */
#define NODE_BUCKET_BITS 14
#define NODES_A_BUCKET 4
static struct node {
    uint64_t id;
    struct kernel *kernel;
} nodes[1 << NODE_BUCKET_BITS][NODES_A_BUCKET];
static __thread void *captured_here; /* the node that the launch that this thread is in has made; NULL for none */
static __thread struct module *loaded_here; /* by the call of the driver that this thread is in; NULL for none */
#define RANGE_BITS 30
#define MOST_USED (1UL << RANGE_BITS)

static uint32_t hash(const char *name)
{
    uint32_t found = 2166136261u;
    for (; *name; name++)
        found = (found ^ (uint8_t)*name) * 16777619u;
    return found;
}

static bool lies_in(uint64_t offset, uint64_t bytes, uint64_t whole)
{
    return offset <= whole && bytes <= whole - offset;
}

/* Of cubins inside other files: these are not aligned. */
typedef Elf64_Ehdr elf_header __attribute__((aligned(1)));
typedef Elf64_Shdr elf_section __attribute__((aligned(1)));
typedef Elf64_Sym elf_symbol __attribute__((aligned(1)));

/* Reads the functions of a cubin: symbols in sections with code. */
static bool read_functions(struct module *module, const uint8_t *cubin, size_t bytes)
{
    const elf_header *header = (const void *)cubin;
    if (bytes < sizeof *header || memcmp(header->e_ident, ELFMAG, SELFMAG) || header->e_ident[EI_CLASS] != ELFCLASS64 ||
        header->e_shentsize != sizeof(Elf64_Shdr) || !lies_in(header->e_shoff, header->e_shnum * sizeof(Elf64_Shdr), bytes))
        return false;
    const elf_section *section = (const void *)(cubin + header->e_shoff), *symbols = NULL;
    for (const elf_section *each = section; each < section + header->e_shnum; each++)
        if (each->sh_type == SHT_SYMTAB && each->sh_link < header->e_shnum)
            symbols = each;
    if (!symbols || !lies_in(symbols->sh_offset, symbols->sh_size, bytes))
        return false;
    const elf_section *strings = section + symbols->sh_link;
    if (!lies_in(strings->sh_offset, strings->sh_size, bytes) || !strings->sh_size)
        return false;
    uint32_t many = symbols->sh_size / sizeof(Elf64_Sym);
    const elf_symbol *symbol = (const void *)(cubin + symbols->sh_offset);
    module->function = calloc(many ? many : 1, sizeof *module->function);
    module->names = malloc(strings->sh_size);
    if (!module->function || !module->names)
        return false;
    memcpy(module->names, cubin + strings->sh_offset, strings->sh_size);
    module->names[strings->sh_size - 1] = 0;
    module->functions = many;
    for (uint32_t i = 0; i < many; i++) {
        uint32_t in = symbol[i].st_shndx;
        if (ELF64_ST_TYPE(symbol[i].st_info) != STT_FUNC || in >= header->e_shnum || symbol[i].st_name >= strings->sh_size ||
            !lies_in(section[in].sh_offset, section[in].sh_size, bytes) || symbol[i].st_value > section[in].sh_size)
            continue;
        module->function[i].name = module->names + symbol[i].st_name;
        module->function[i].module = module;
        module->function[i].offset = section[in].sh_offset + symbol[i].st_value;
        module->function[i].size = symbol[i].st_size ? symbol[i].st_size : section[in].sh_size - symbol[i].st_value;
    }
    return true;
}

static void free_module(struct module *module)
{
    free(module->function);
    free(module->names);
    free(module->cubin);
    free(module);
}

/* Frees cubins without samples that were loaded first, until there is room for another one. */
static bool make_room_for_cubin(size_t bytes)
{
    while (bytes <= MOST_KEPT && kept + bytes > MOST_KEPT && unwanted) {
        struct module *module = unwanted;
        unwanted = module->later;
        if (!unwanted)
            last_unwanted = &unwanted;
        kept -= module->bytes;
        free(module->cubin);
        module->cubin = NULL;
    }
    return kept + bytes <= MOST_KEPT;
}

/* Keeps a copy of a module's cubin, as the program may free it. */
static void keep_cubin(struct module *module, const uint8_t *cubin)
{
    if (!make_room_for_cubin(module->bytes) || !(module->cubin = malloc(module->bytes)))
        return;
    memcpy(module->cubin, cubin, module->bytes);
    kept += module->bytes;
    module->later = NULL;
    *last_unwanted = module;
    last_unwanted = &module->later;
}

/* Notes that a module has samples, so that its cubin is sent. */
static void want(struct module *module)
{
    struct module **at = &unwanted;
    if (module->is_wanted)
        return;
    module->is_wanted = true;
    if (!module->cubin) {
        send_problem("a module of %zu bytes has no instructions: the process has loaded too many to keep them all", module->bytes);
        return;
    }
    while (*at != module)
        at = &(*at)->later;
    *at = module->later;
    if (!*at)
        last_unwanted = at;
    module->later = NULL;
    *last_wanted = module;
    last_wanted = &module->later;
}

static void add_load(struct module *module, struct load *load)
{
    module->last_load = ++loads;
    load->next = module->loads;
    module->loads = load;
    loaded_here = module;
}

/* What CUPTI calls a cubin by: a hash of all of it. CUPTI's own CRC is of 26 bytes, evenly spread, of a cubin of 7,648 (CUDA 13):
 * kernels that differ in a constant had the same. */
static void compute_crc(const void *cubin, size_t bytes, uint64_t *crc)
{
    uint64_t hash = bytes, word = 0;
    size_t at = 0;
    for (; at + sizeof word <= bytes; at += sizeof word) {
        memcpy(&word, (const char *)cubin + at, sizeof word);
        hash = (hash ^ word) * 0x9e3779b97f4a7c15ULL;
        hash ^= hash >> 32;
    }
    word = 0;
    memcpy(&word, (const char *)cubin + at, bytes - at);
    hash = (hash ^ word) * 0x9e3779b97f4a7c15ULL;
    *crc = hash ^ hash >> 32;
}

static void on_module_loaded(void *context, const struct loaded *loaded)
{
    if (!loaded->cubin)
        return;
    struct module *module = calloc(1, sizeof *module);
    struct load *load = malloc(sizeof *load);
    if (!module || !load) {
        free(module);
        free(load);
        return;
    }
    *load = (struct load){.context = context, .id = loaded->id};
    compute_crc(loaded->cubin, loaded->bytes, &module->crc);
    module->bytes = loaded->bytes;
    module->loaded_ns = now();
    bool is_read = read_functions(module, loaded->cubin, loaded->bytes);
    pthread_mutex_lock(&tables);
    struct module **slot = &modules[module->crc % MODULE_SLOTS], *known = *slot;
    while (known && known->crc != module->crc)
        known = known->next;
    if (known) /* another context has it, too, or it was unloaded */
        add_load(known, load);
    if (known || !is_read) {
        pthread_mutex_unlock(&tables);
        if (!known) {
            free(load);
            send_problem("a module of %zu bytes is not a cubin that iaprof can read: its samples have no kernel", loaded->bytes);
        }
        free_module(module);
        return;
    }
    keep_cubin(module, loaded->cubin);
    add_load(module, load);
    module->next = *slot;
    *slot = module;
    for (struct function *each = module->function; each < module->function + module->functions; each++) {
        struct function **first = each->name ? &functions[hash(each->name) % NAME_SLOTS] : NULL;
        if (!first)
            continue;
        each->next = *first;
        *first = each;
    }
    pthread_mutex_unlock(&tables);
}

/* Gives a module addresses; false if there are none left. */
static bool place(struct module *module)
{
    uint64_t bytes = (module->bytes + 4095) / 4096 * 4096;
    if (!module->base && bytes <= MOST_USED - used) {
        module->base = used;
        used += bytes;
    }
    return module->base;
}

/* Whether a module is in a context; in any, if that is NULL. */
static bool is_loaded_into(const struct module *module, const void *context)
{
    const struct load *load = module->loads;
    while (load && context && load->context != context)
        load = load->next;
    return load;
}

/* Returns the function with this name in a module; NULL if it has none. */
static const struct function *function_in(const struct module *module, const char *name)
{
    const struct function *each = functions[hash(name) % NAME_SLOTS];
    while (each && (each->module != module || strcmp(each->name, name)))
        each = each->next;
    return each;
}

/* Returns the function with this name in the module that was loaded last, of those that are in the context, if there are any.
 * Sets `are_several` if several are. */
static const struct function *last_function(const char *name, const void *context, bool *are_several)
{
    const struct function *found = NULL;
    bool is_here = false;
    for (const struct function *each = functions[hash(name) % NAME_SLOTS]; each; each = each->next) {
        if (strcmp(each->name, name))
            continue;
        bool is_in = is_loaded_into(each->module, context);
        *are_several |= found && is_in == is_here && each->module != found->module;
        if (!found || is_in > is_here || (is_in == is_here && each->module->last_load > found->module->last_load)) {
            *are_several &= is_in == is_here;
            found = each;
            is_here = is_in;
        }
    }
    return found;
}

/* Returns the kernel of a function, which is NULL if no module has one with the name. Call it with the lock. */
static struct kernel *kernel_of(const struct function *function, const char *name)
{
    struct kernel **slot = &kernels[hash(name) % NAME_SLOTS];
    struct module *in = function ? function->module : NULL;
    if (in && !place(in))
        in = NULL;
    for (struct kernel *known = *slot; known; known = known->next)
        if (known->module == in && !strcmp(known->name, name))
            return known;
    uint64_t address = in ? in->base + function->offset : 0, size = in ? function->size : 16;
    if (!in && used + size <= MOST_USED) { /* an address of its own, without code */
        address = used;
        used += size;
    }
    size_t length = strlen(name);
    struct kernel *kernel = malloc(sizeof *kernel + length + 1);
    if (!kernel)
        return NULL;
    kernel->next = *slot;
    kernel->module = in;
    kernel->address = address;
    kernel->size = size;
    memcpy(kernel->name, name, length + 1);
    *slot = kernel;
    send_bytes(OF_KERNEL, address, in ? in->loaded_ns : now(), size, name, length);
    return kernel;
}

static struct handle **slot_of(const void *handle)
{
    return &handles[(uintptr_t)handle / 16 * 2654435761u % HANDLE_SLOTS];
}

static struct handle *known_handle(void *handle, const void *context)
{
    struct handle *each = __atomic_load_n(slot_of(handle), __ATOMIC_ACQUIRE);
    while (each && (each->handle != handle || each->context != context))
        each = each->next;
    return each;
}

/* Returns what is known of a handle, in the table from now on; NULL if there is no memory. Call it with the lock. */
static struct handle *get_handle(void *handle, void *context)
{
    struct handle **slot = slot_of(handle), *found = known_handle(handle, context);
    if (found || !(found = malloc(sizeof *found)))
        return found;
    *found = (struct handle){.next = *slot, .handle = handle, .context = context};
    __atomic_store_n(slot, found, __ATOMIC_RELEASE);
    return found;
}

/* Notes the module that a handle of a module or library stands for in a context. */
static void note_module(void *handle, void *context, struct module *module)
{
    struct handle *noted = module ? get_handle(handle, context) : known_handle(handle, context);
    if (noted)
        noted->module = module;
}

/* Asks the driver whose function a handle is; NULL if it does not say. */
static void *owner_of(void *handle)
{
    void *owner = NULL;
    if (module_of_function && !module_of_function(&owner, handle))
        return owner;
    if (library_of_kernel && !library_of_kernel(&owner, handle))
        return owner;
    return NULL;
}

static void presume(const char *name)
{
    static bool was_said;
    if (!__atomic_exchange_n(&was_said, true, __ATOMIC_RELAXED))
        send_problem("several modules have a kernel %.200s, and the driver does not say which one's is launched: iaprof presumes "
                     "the one loaded last, as for other such kernels",
                     name);
}

static struct node *bucket_of(uint64_t id)
{
    return nodes[id * 0x9e3779b97f4a7c15ULL >> (64 - NODE_BUCKET_BITS)];
}

static void note_node(uint64_t id, struct kernel *kernel)
{
    struct node *bucket = bucket_of(id);
    memmove(bucket + 1, bucket, (NODES_A_BUCKET - 1) * sizeof *bucket);
    bucket[0] = (struct node){id, kernel};
}

static struct kernel *known_node(uint64_t id)
{
    struct node *bucket = bucket_of(id);
    for (unsigned i = 0; i < NODES_A_BUCKET; i++)
        if (bucket[i].id == id)
            return bucket[i].kernel;
    return NULL;
}

/* The nodes of an executable graph are clones of those of the graph that was captured. */
static void on_node_cloned(const struct of_graph *about)
{
    uint64_t from, to;
    if (about->kind || !about->original || cupti.node_id(about->original, &from) || cupti.node_id(about->node, &to))
        return;
    pthread_mutex_lock(&tables);
    struct kernel *kernel = known_node(from);
    if (kernel)
        note_node(to, kernel);
    pthread_mutex_unlock(&tables);
}

/* Finds the kernel of a graph's node; by its name, if the node was not captured. */
static struct kernel *kernel_of_node(uint64_t id, const char *name)
{
    bool are_several = false;
    pthread_mutex_lock(&tables);
    struct kernel *found = known_node(id);
    if (!found || strcmp(found->name, name))
        found = kernel_of(last_function(name, NULL, &are_several), name);
    pthread_mutex_unlock(&tables);
    if (are_several)
        presume(name);
    return found;
}

/* Finds the kernel of a function's handle: its name, in the module that has it. If several modules have such a kernel, as those
 * of compilers that run while the program does, it is the module that owns the handle. */
static struct kernel *find_kernel(void *handle, const char *name, void *context)
{
    void *owner = owner_of(handle);
    pthread_mutex_lock(&tables);
    const struct handle *owning = owner ? known_handle(owner, context) : NULL;
    const struct function *function = owning && owning->module ? function_in(owning->module, name) : NULL;
    bool are_several = false;
    if (!function && loaded_here && (function = function_in(loaded_here, name)) && owner)
        note_module(owner, context, loaded_here); /* the launch has loaded what it needs */
    if (!function)
        function = last_function(name, context, &are_several);
    struct kernel *found = kernel_of(function, name);
    struct handle *launched = get_handle(handle, context);
    if (launched)
        __atomic_store_n(&launched->kernel, found, __ATOMIC_RELEASE);
    pthread_mutex_unlock(&tables);
    if (are_several)
        presume(name);
    return found;
}

/* Returns the kernel of a function's handle; NULL if there is no memory. */
static struct kernel *launched_kernel(void *handle, const char *name, void *context)
{
    const struct handle *known = known_handle(handle, context);
    struct kernel *found = known ? __atomic_load_n(&known->kernel, __ATOMIC_ACQUIRE) : NULL;
    return found && !strcmp(found->name, name) ? found : find_kernel(handle, name, context);
}

/* Forgets what an owner of functions stood for, in all contexts. */
static void forget_owner(const void *owner)
{
    for (struct handle *each = *slot_of(owner); each; each = each->next)
        if (each->handle == owner)
            each->module = NULL;
}

/* Notes which module a call of LOADS has loaded: for the handle that it made, or for that of the kernel that it got. */
static void on_load(uint32_t id, const struct call *call)
{
    void *context = call->context;
    if (id == CU_MODULE_UNLOAD || id == CU_LIBRARY_UNLOAD) {
        if (call->site == AT_EXIT) /* too late: another thread may have a module with the same handle */
            return;
        pthread_mutex_lock(&tables);
        forget_owner(call->parameters[0]);
        pthread_mutex_unlock(&tables);
        return;
    }
    if (call->site != AT_EXIT || !call->result || *call->result)
        return;
    void *made = *(void **)call->parameters[0], *from = call->parameters[1];
    if (id == CU_KERNEL_GET_FUNCTION) { /* what was loaded is the module of the function, and of the kernel's library */
        if (!loaded_here)
            return;
        made = owner_of(made);
        from = owner_of(from);
    }
    pthread_mutex_lock(&tables);
    if (id == CU_KERNEL_GET_FUNCTION || id == CU_LIBRARY_GET_MODULE) {
        const struct handle *known = known_handle(from, context);
        struct module *module = loaded_here ? loaded_here : known ? known->module : NULL;
        if (made)
            note_module(made, context, module);
        if (from)
            note_module(from, context, module);
    } else {
        forget_owner(made);
        note_module(made, context, loaded_here);
    }
    pthread_mutex_unlock(&tables);
}

/* A module is not in a context any more, or, with 0, none is. Its functions' handles may come to be those of others. */
static void forget_loads(const void *context, uint32_t id)
{
    pthread_mutex_lock(&tables);
    for (unsigned i = 0; i < MODULE_SLOTS; i++)
        for (struct module *module = modules[i]; module; module = module->next)
            for (struct load **at = &module->loads, *load = *at; load; load = *at) {
                if (load->context != context || (id && load->id != id)) {
                    at = &load->next;
                    continue;
                }
                *at = load->next;
                free(load);
            }
    for (unsigned i = 0; i < HANDLE_SLOTS; i++)
        for (struct handle *each = handles[i]; each; each = each->next)
            if (each->context == context)
                __atomic_store_n(&each->kernel, NULL, __ATOMIC_RELEASE);
    pthread_mutex_unlock(&tables);
}

/* --- samples */

/* In the order of gpu/nvidia/reasons.py. */
static const char *const REASONS[] = {
    "selected", "long_scoreboard", "short_scoreboard", "wait", "barrier", "membar", "warpgroup_arrive", "math_pipe_throttle",
    "lg_throttle", "mio_throttle", "tex_throttle", "branch_resolving", "no_instructions", "imc_miss", "drain", "dispatch_stall",
    "sleeping", "not_selected", "misc", "other"};
#define OTHER (ELEMENTS(REASONS) - 1)
#define COUNTS_A_WORD 4
#define REASON_WORDS ((ELEMENTS(REASONS) + COUNTS_A_WORD - 1) / COUNTS_A_WORD)
#define ROW_WORDS (1 + 2 * REASON_WORDS)
#define ROWS_A_MESSAGE (MESSAGE_BYTES / (8 * ROW_WORDS))
#define METRIC_BYTES 128
#define NO_COLUMN 255

/* Of a context, as the message OF_CONTEXT says it. */
enum sampled { NOT_SAMPLED, SAMPLED, OTHER_SAMPLED /* its GPU samples another process */ };

struct context {
    void *handle; /* NULL: it was destroyed */
    enum sampled sampled;
    uint32_t number, gpu, metrics; /* the GPU's number for the driver, UNKNOWN_GPU if it does not say */
    uint64_t begin_ns; /* of the samples that the next drain gets */
    uint8_t column[MOST_METRICS]; /* of each metric, among twice the reasons */
    struct answer answer;
    struct answer last; /* what CUPTI has left when sampling ends */
    uint32_t failures;
};
static struct context contexts[MOST_CONTEXTS];
static unsigned context_count;
static pthread_mutex_t draining = PTHREAD_MUTEX_INITIALIZER; /* taken before `tables` */
static struct message rows; /* of samples that were not sent yet */
static bool is_stuck;       /* CUPTI did not return in time once */

/* Locks `draining` in a callback. The program's thread may have locks of the driver's there that CUPTI waits for in the
 * thread that drains: so it waits for some time only. */
static bool begin_draining(void)
{
    for (uint64_t since = now(); pthread_mutex_trylock(&draining); rest(50000)) {
        if (!__atomic_load_n(&is_stuck, __ATOMIC_RELAXED) && now() - since < WAIT_NS)
            continue;
        if (!__atomic_exchange_n(&is_stuck, true, __ATOMIC_RELAXED))
            send_problem("CUPTI did not return for %d s: samples are missing", WAIT_NS / 1000000000);
        return false;
    }
    return true;
}

static void begin_rows(const struct context *context, uint64_t end)
{
    rows.what = OF_SAMPLES;
    rows.id = context->number;
    rows.begin = context->begin_ns;
    rows.end = end;
    rows.bytes = 0;
}

static void send_rows(void)
{
    if (rows.bytes) {
        rows.total = rows.bytes;
        send_message(&rows);
    }
    rows.bytes = 0;
}

static void add_rows(uint64_t address, uint32_t *counts)
{
    bool more = true;
    while (more) {
        uint64_t *row = (uint64_t *)(rows.data + rows.bytes);
        memset(row, 0, 8 * ROW_WORDS);
        row[0] = address;
        more = false;
        for (unsigned i = 0; i < 2 * ELEMENTS(REASONS); i++) {
            uint64_t some = counts[i] < 0xffff ? counts[i] : 0xffff;
            unsigned reason = i % ELEMENTS(REASONS), word = 1 + i / ELEMENTS(REASONS) * REASON_WORDS + reason / COUNTS_A_WORD;
            row[word] |= some << 16 * (reason % COUNTS_A_WORD);
            counts[i] -= some;
            more |= counts[i] > 0;
        }
        rows.bytes += 8 * ROW_WORDS;
        if (rows.bytes + 8 * ROW_WORDS > MESSAGE_BYTES)
            send_rows();
    }
}

struct sums { /* of a drain: the message OF_SUMS */
    uint64_t samples, dropped, of_driver, unknown, full, invalid;
};

static uint64_t address_of(const struct pc *pc)
{
    struct module *module = modules[pc->crc % MODULE_SLOTS];
    while (module && module->crc != pc->crc)
        module = module->next;
    const struct function *function = module && pc->function < module->functions ? &module->function[pc->function] : NULL;
    if (!function || !function->name || pc->offset >= function->size || !place(module))
        return 0;
    want(module);
    return module->base + function->offset + pc->offset;
}

static void add_answer(struct context *context, const struct answer *answer, struct sums *sums)
{
    sums->samples += answer->total;
    sums->dropped += answer->dropped;
    sums->of_driver += answer->of_driver;
    sums->full += answer->full;
    if (answer->pcs > MOST_PCS) {
        sums->invalid++;
        return;
    }
    pthread_mutex_lock(&tables);
    for (const struct pc *pc = answer->pc; pc < answer->pc + answer->pcs; pc++) {
        uint32_t counts[2 * ELEMENTS(REASONS)] = {0};
        uint64_t all = 0;
        for (size_t i = 0; i < pc->counts && i < context->metrics; i++) {
            const struct counted *counted = &pc->counted[i];
            uint8_t column = counted->metric < MOST_METRICS ? context->column[counted->metric] : NO_COLUMN;
            if (column == NO_COLUMN)
                continue;
            counts[column] += counted->samples;
            all += column < ELEMENTS(REASONS) ? counted->samples : 0;
        }
        uint64_t address = address_of(pc);
        if (address)
            add_rows(address, counts);
        else
            sums->unknown += all;
    }
    pthread_mutex_unlock(&tables);
}

/* Sends the samples of a context since the last drain. */
static void drain(struct context *context)
{
    if (!context->handle || context->sampled != SAMPLED)
        return;
    struct sums sums = {0};
    uint64_t began = now();
    struct of_context with = {.size = 32, .context = context->handle, .with.answer = &context->answer};
    begin_rows(context, began);
    for (unsigned i = 0; i < MOST_ANSWERS; i++) {
        struct answer *answer = &context->answer;
        answer->total = answer->dropped = answer->of_driver = answer->pcs = answer->left = answer->full = 0;
        int result = cupti.data(&with);
        if (result == OUT_OF_MEMORY) { /* of the GPU's buffer: what it had is in the answer */
            answer->full = 1;
        } else if (result) {
            if (!context->failures++)
                send_problem("CUPTI gives no samples: %s; launches may be missing, too, as when another profiler has the GPU",
                             said(result));
            break;
        }
        rows.end = now();
        add_answer(context, answer, &sums);
        if (!answer->left || !answer->pcs)
            break;
    }
    send_rows();
    if (sums.samples || sums.full || sums.invalid)
        send_bytes(OF_SUMS, context->number, context->begin_ns, rows.end, &sums, sizeof sums);
    context->begin_ns = began - LATE_NS;
}

/* A piece of a cubin for which the recorder has no room, its BPF program tells us by a signal to the thread that sends it
 * (bpf/c/messages.c). Our thread blocks all signals; by default this one is ignored. */
#define AGAIN SIGURG

static bool is_told_again(void)
{
    sigset_t pending;
    return !sigpending(&pending) && sigismember(&pending, AGAIN) == 1;
}

static struct message piece = {.what = OF_MODULE}; /* of our thread */

/* Sends the piece; returns whether it was taken, or nobody can tell. */
static bool send_piece(void)
{
    const struct timespec nothing = {0};
    sigset_t again;
    sigemptyset(&again);
    sigaddset(&again, AGAIN);
    bool is_program_s = is_told_again(); /* all of its threads block that signal, too, and it has not taken one yet */
    send_message(&piece);
    return is_program_s || !is_told_again() || sigtimedwait(&again, NULL, &nothing) != AGAIN;
}

static void begin_piece(const struct module *module, uint64_t offset)
{
    piece.id = module->crc;
    piece.begin = module->loaded_ns;
    piece.end = module->base;
    piece.offset = offset;
    piece.total = module->bytes;
    piece.bytes = 0;
}

static struct module *first_wanted(void)
{
    pthread_mutex_lock(&tables);
    struct module *module = wanted; /* only our thread frees its cubin */
    pthread_mutex_unlock(&tables);
    return module;
}

/* Sends pieces of cubins with samples, as much as is good at a time and the recorder has room for; returns the number of bytes
 * that it took. Only our thread does. */
static size_t send_modules(void)
{
    size_t sent = 0;
    for (struct module *module = first_wanted(); module && sent < MOST_SENT; sent += piece.bytes) {
        begin_piece(module, module->sent);
        piece.bytes = module->bytes - module->sent < MESSAGE_BYTES ? module->bytes - module->sent : MESSAGE_BYTES;
        memcpy(piece.data, module->cubin + module->sent, piece.bytes);
        if (!send_piece())
            break;
        module->sent += piece.bytes;
        if (module->sent < module->bytes)
            continue;
        pthread_mutex_lock(&tables);
        kept -= module->bytes;
        free(module->cubin);
        module->cubin = NULL;
        wanted = module->later;
        if (!wanted)
            last_wanted = &wanted;
        module = wanted;
        pthread_mutex_unlock(&tables);
    }
    return sent;
}

/* Sends the cubins that are left, at the end of the process. If the recorder takes nothing for some time, it is only told where
 * cubins are of which it has no piece: another process may send them, and it counts those that nobody sends. */
static void send_last_modules(void)
{
    for (uint64_t since = now(); is_recorded() && first_wanted(); rest(END_REST_NS)) {
        if (send_modules()) {
            made_progress();
            since = now();
        } else if (now() - since > END_WAIT_NS) {
            for (const struct module *module = first_wanted(); module; module = module->later) {
                begin_piece(module, 0);
                if (!module->sent)
                    send_message(&piece);
            }
            return;
        }
    }
}

static void read_metrics(struct context *context)
{
    static char texts[MOST_METRICS][METRIC_BYTES];
    static const char prefix[] = "smsp__pcsamp_warps_issue_stalled_", latency[] = "_not_issued";
    size_t many = 0;
    char *names[MOST_METRICS];
    uint32_t indices[MOST_METRICS];
    struct of_context number = {.size = 32, .context = context->handle, .with.number = &many};
    memset(context->column, NO_COLUMN, sizeof context->column);
    if (cupti.metric_number(&number) || many > MOST_METRICS)
        return;
    for (size_t i = 0; i < many; i++) {
        names[i] = texts[i];
        *texts[i] = 0;
    }
    struct of_context all = {.size = 48, .context = context->handle, .with.many = many, .more = {indices, names}};
    if (cupti.metrics(&all))
        return;
    context->metrics = many;
    for (size_t i = 0; i < many; i++) {
        texts[i][METRIC_BYTES - 1] = 0;
        if (strncmp(texts[i], prefix, sizeof prefix - 1) || indices[i] >= MOST_METRICS)
            continue;
        char *state = texts[i] + sizeof prefix - 1;
        size_t length = strlen(state), cut = sizeof latency - 1;
        bool is_latency = length > cut && !strcmp(state + length - cut, latency);
        state[is_latency ? length - cut : length] = 0;
        unsigned reason = 0;
        while (reason < OTHER && strcmp(REASONS[reason], state))
            reason++;
        context->column[indices[i]] = reason + (is_latency ? ELEMENTS(REASONS) : 0);
    }
}

static bool make_room(struct context *context, struct answer *answer)
{
    memset(answer, 0, sizeof *answer);
    answer->size = sizeof *answer;
    answer->room = MOST_PCS;
    answer->pc = calloc(MOST_PCS, sizeof *answer->pc);
    struct counted *counted = answer->pc ? calloc((size_t)MOST_PCS * context->metrics, sizeof *counted) : NULL;
    for (size_t i = 0; counted && i < MOST_PCS; i++) {
        answer->pc[i].size = sizeof *answer->pc;
        answer->pc[i].counted = counted + i * context->metrics;
    }
    return counted;
}

static void free_room(struct answer *answer)
{
    if (answer->pc)
        free(answer->pc->counted);
    free(answer->pc);
    answer->pc = NULL;
}

struct device { /* the message OF_CONTEXT */
    char bus[32], name[96];
    uint8_t uuid[16];
    uint32_t major, minor, multiprocessors, period, ordinal, sampled;
};

static uint32_t period = 18; /* as a power of 2, cycles */

static void describe(const struct context *context)
{
    struct device device = {.period = period, .ordinal = context->gpu, .sampled = context->sampled};
    int value = 0, ordinal = context->gpu;
    if (context->gpu == UNKNOWN_GPU)
        return;
    driver.bus(device.bus, sizeof device.bus - 1, ordinal);
    driver.name(device.name, sizeof device.name - 1, ordinal);
    driver.uuid(device.uuid, ordinal);
    device.major = driver.attribute(&value, CAPABILITY_MAJOR, ordinal) ? 0 : value;
    device.minor = driver.attribute(&value, CAPABILITY_MINOR, ordinal) ? 0 : value;
    device.multiprocessors = driver.attribute(&value, MULTIPROCESSORS, ordinal) ? 0 : value;
    send_bytes(OF_CONTEXT, context->number, now(), 0, &device, sizeof device);
}

/* A GPU samples one process at a time. If two sample it, CUPTI fails in one of them at its first launch, and tells it of no launch
 * and no execution any more. So the process that samples a GPU has a Unix socket whose abstract name is the GPU's: the kernel gives
 * a name to one only, and takes it back at the process's end. Nobody connects to it. */
struct gpu {
    int socket; /* -1: there is none, and nobody can know */
    unsigned contexts;
};
static struct gpu gpus[MOST_GPUS]; /* by number; with `draining` */

/* Returns a socket with a GPU's name: -1 if there can be none, -2 if another process has it. */
static int bind_name(int ordinal)
{
    uint8_t uuid[16] = {0};
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    char *end = address.sun_path + 1;
    end += sprintf(end, "iaprof-gpu-");
    driver.uuid(uuid, ordinal);
    for (unsigned i = 0; i < sizeof uuid; i++)
        end += sprintf(end, "%02x", uuid[i]);
    int made = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    int fd = made < 0 ? -1 : fcntl(made, F_DUPFD_CLOEXEC, 3); /* a program may have closed its standard output */
    if (made >= 0)
        close(made);
    if (fd < 0 || !bind(fd, (const struct sockaddr *)&address, end - (char *)&address))
        return fd;
    bool is_taken = errno == EADDRINUSE;
    close(fd);
    return is_taken ? -2 : -1;
}

/* Whether this process may sample a context's GPU; if so, release_gpu() is to follow. */
static bool claim_gpu(const struct context *context)
{
    if (context->gpu >= MOST_GPUS)
        return true;
    struct gpu *gpu = &gpus[context->gpu];
    if (!gpu->contexts && (gpu->socket = bind_name(context->gpu)) == -2)
        return false;
    gpu->contexts++;
    return true;
}

static void release_gpu(const struct context *context)
{
    if (context->gpu < MOST_GPUS && !--gpus[context->gpu].contexts && gpus[context->gpu].socket >= 0)
        close(gpus[context->gpu].socket);
}

/* Starts to sample a context; returns what CUPTI says of it. */
static int start_sampling(struct context *context)
{
    struct of_context with = {.size = 24, .context = context->handle};
    int result = cupti.start(&with);
    if (result)
        return result;
    read_metrics(context);
    if (!context->metrics || !make_room(context, &context->answer) || !make_room(context, &context->last)) {
        cupti.stop(&with);
        return -1;
    }
    struct setting settings[] = {
        {.type = SETTING_MODE, .value.number = MODE_CONTINUOUS},
        {.type = SETTING_PERIOD, .value.number = period},
        {.type = SETTING_BUFFER, .value.buffer = &context->last},
        {.type = SETTING_SLEEP, .value.number = DECODE_MS},
    };
    struct of_context all = {.size = 40, .context = context->handle, .with.many = ELEMENTS(settings), .more = {settings}};
    result = cupti.set(&all);
    if (result)
        cupti.stop(&with);
    return result;
}

/* Samples a context, unless its GPU samples another process: then it may be called again. */
static void begin_sampling(struct context *context)
{
    if (!claim_gpu(context)) {
        if (context->sampled != OTHER_SAMPLED) {
            context->sampled = OTHER_SAMPLED;
            describe(context);
        }
        return;
    }
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, &before); /* CUPTI starts threads: the program's signals are for its own ones */
    context->begin_ns = now();
    int result = start_sampling(context);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    context->sampled = result ? NOT_SAMPLED : SAMPLED;
    describe(context);
    if (!result)
        return;
    release_gpu(context);
    context->handle = NULL;
    free_room(&context->answer);
    free_room(&context->last);
    if (result == INSUFFICIENT_PRIVILEGES)
        send_problem("the driver lets only administrators sample: run the program as root, or set "
                     "NVreg_RestrictProfilingToAdminUsers=0 for the nvidia module");
    else
        send_problem("a context is not sampled: CUPTI says %s", result < 0 ? "nothing of its reasons" : said(result));
}

static void on_context_created(void *handle)
{
    if (!begin_draining())
        return;
    unsigned number = 0;
    while (number < context_count && contexts[number].handle)
        number++;
    if (number == MOST_CONTEXTS) {
        send_problem("the process has more than %d contexts: those beyond are not sampled", MOST_CONTEXTS);
    } else {
        context_count += number == context_count;
        contexts[number] = (struct context){.handle = handle, .number = number, .gpu = UNKNOWN_GPU};
        cupti.device(handle, &contexts[number].gpu);
        begin_sampling(&contexts[number]);
    }
    pthread_mutex_unlock(&draining);
}

static void end_sampling(struct context *context)
{
    struct of_context with = {.size = 24, .context = context->handle};
    struct sums sums = {0};
    if (context->sampled != SAMPLED) {
        context->handle = NULL;
        return;
    }
    drain(context);
    if (!cupti.stop(&with)) { /* gives the rest */
        begin_rows(context, now());
        add_answer(context, &context->last, &sums);
        send_rows();
        if (sums.samples || sums.full || sums.invalid)
            send_bytes(OF_SUMS, context->number, context->begin_ns, rows.end, &sums, sizeof sums);
    }
    release_gpu(context);
    context->handle = NULL;
    free_room(&context->answer);
    free_room(&context->last);
}

static void on_context_destroyed(void *handle)
{
    if (!begin_draining())
        return;
    for (unsigned i = 0; i < context_count; i++)
        if (contexts[i].handle == handle)
            end_sampling(&contexts[i]);
    pthread_mutex_unlock(&draining);
    forget_loads(handle, 0);
}

static void on_module_unloaded(const void *context, uint32_t id)
{
    if (!begin_draining())
        return;
    for (unsigned i = 0; i < context_count; i++)
        drain(&contexts[i]);
    pthread_mutex_unlock(&draining);
    forget_loads(context, id);
}

/* --- executions */

struct execution {
    uint64_t correlation, address, begin, end;
    uint32_t device, stream;
};
#define ACTIVITY_BYTES (1 << 20)
#define RECORDS_ALIGNED 8

static void give_buffer(uint8_t **buffer, size_t *bytes, size_t *most)
{
    *buffer = aligned_alloc(RECORDS_ALIGNED, ACTIVITY_BYTES);
    *bytes = *buffer ? ACTIVITY_BYTES : 0;
    *most = 0;
}

static uint64_t member(const uint8_t *record, unsigned offset, unsigned bytes)
{
    uint64_t value = 0;
    memcpy(&value, record + offset, bytes);
    return value;
}

static void take_buffer(void *context, uint32_t stream, uint8_t *buffer, size_t bytes, size_t valid)
{
    (void)bytes;
    struct message *message = malloc(sizeof *message);
    uint8_t *record = NULL;
    size_t dropped = 0;
    if (!message) {
        free(buffer);
        return;
    }
    *message = (struct message){.what = OF_EXECUTIONS};
    while (valid && !cupti.next(buffer, valid, &record)) {
        if (member(record, 0, 4) != ACTIVITY_CONCURRENT_KERNEL)
            continue;
        struct execution execution = {
            .correlation = member(record, KERNEL_CORRELATION, 4),
            .begin = member(record, KERNEL_START, 8),
            .end = member(record, KERNEL_END, 8),
            .device = member(record, KERNEL_DEVICE, 4),
            .stream = member(record, KERNEL_STREAM, 4),
        };
        const char *name = (const char *)member(record, KERNEL_NAME, 8);
        uint64_t node = member(record, KERNEL_GRAPH_NODE, 8);
        if (node && name) { /* of a graph: which kernel it is, the launch does not say */
            const struct kernel *kernel = kernel_of_node(node, name);
            execution.address = kernel ? kernel->address : 0;
        }
        memcpy(message->data + message->bytes, &execution, sizeof execution);
        message->bytes += sizeof execution;
        if (message->bytes + sizeof execution > MESSAGE_BYTES) {
            message->total = message->bytes;
            send_message(message);
            message->bytes = 0;
        }
    }
    if (!cupti.dropped(context, stream, &dropped) && dropped)
        message->id = dropped;
    message->total = message->bytes;
    if (message->bytes || message->id)
        send_message(message);
    free(message);
    free(buffer);
}

/* --- callbacks */

/* A launch of no kernel of its own. */
static struct kernel graph = {.name = "[graph]"};

/* Raises the probe of a launch, unless its stack is known. The function's frame is the innermost of the stack that the recorder
 * walks. */
static __attribute__((noinline, noclone)) void raise_launch(const struct kernel *kernel, uint32_t correlation)
{
    const struct path_asked *asked;
    if (!paths_have(__builtin_frame_address(0), kernel, correlation, &asked))
        DTRACE_PROBE7(cuda, launch_kernel, 0, kernel->address, kernel->size, (const char *)kernel->name, 0, (uint64_t)correlation, asked);
}

static void send_launches(uint32_t thread, uint64_t first, const struct path_row *rows, uint32_t many)
{
    static struct message message = {.what = OF_LAUNCHES}; /* of our thread */
    message.id = thread;
    message.begin = first;
    message.total = message.bytes = many * sizeof *rows;
    memcpy(message.data, rows, message.bytes);
    send_message(&message);
}

/* The stream of a launch: of cuLaunchKernel and cuLaunchCooperativeKernel an argument, of cuLaunchKernelEx in the structure
 * that the first argument points to. */
static void *stream_of(const struct call *call, bool is_ex)
{
    const char *structure = is_ex ? call->parameters[0] : (const char *)call->parameters;
    void *stream = NULL;
    if (structure)
        memcpy(&stream, structure + (is_ex ? 32 : 40), sizeof stream);
    return stream;
}

static bool is_of_own_stream(uint32_t id)
{
    return id == CU_LAUNCH_KERNEL_PTSZ || id == CU_LAUNCH_COOPERATIVE_KERNEL_PTSZ || id == CU_LAUNCH_KERNEL_EX_PTSZ;
}

static void on_launched(uint32_t id, const struct call *call)
{
    if (!cuda_launch_kernel_semaphore || !call->result || *call->result)
        return;
    if (id == CU_GRAPH_LAUNCH || id == CU_GRAPH_LAUNCH_PTSZ) {
        raise_launch(&graph, call->correlation);
        return;
    }
    bool is_second = id == CU_LAUNCH_KERNEL_EX || id == CU_LAUNCH_KERNEL_EX_PTSZ; /* the function's argument */
    int is_captured = 0;
    void *stream = stream_of(call, is_second);
    if (!stream && is_of_own_stream(id))
        stream = STREAM_OF_THREAD;
    bool is_of_graph = !driver.capturing(stream, &is_captured) && is_captured;
    struct kernel *kernel = launched_kernel(call->parameters[is_second], call->symbol ? call->symbol : "", call->context);
    uint64_t node;
    if (is_of_graph && kernel && captured_here && !cupti.node_id(captured_here, &node)) {
        pthread_mutex_lock(&tables);
        note_node(node, kernel);
        pthread_mutex_unlock(&tables);
    }
    if (kernel && !is_of_graph)
        raise_launch(kernel, call->correlation);
}

static bool is_load(uint32_t id)
{
    unsigned i = 0;
    while (i < ELEMENTS(LOADS) && LOADS[i] != id)
        i++;
    return i < ELEMENTS(LOADS);
}

static bool is_child; /* of a fork, without our thread: NVIDIA's driver does not work in it */

static void on_event(void *data, int domain, uint32_t id, const void *about)
{
    (void)data;
    const struct resource *resource = about;
    int before = errno;
    if (is_child)
        return;
    if (domain == DOMAIN_DRIVER) {
        const struct call *call = about;
        if (is_load(id))
            on_load(id, call);
        else if (call->site == AT_EXIT)
            on_launched(id, call);
        loaded_here = NULL;
        captured_here = NULL;
    } else if (id == CONTEXT_CREATED) {
        on_context_created(resource->context);
    } else if (id == CONTEXT_DESTROY_STARTING) {
        on_context_destroyed(resource->context);
    } else if (id == MODULE_LOADED) {
        on_module_loaded(resource->context, resource->about);
    } else if (id == GRAPH_NODE_CREATED) {
        const struct of_graph *made = resource->about;
        captured_here = made->kind ? NULL : made->node;
    } else if (id == GRAPH_NODE_CLONED) {
        on_node_cloned(resource->about);
    } else if (id == MODULE_UNLOAD_STARTING) {
        on_module_unloaded(resource->context, ((const struct loaded *)resource->about)->id);
    }
    errno = before;
}

/* --- from the first call of the driver to the end of the process */

static void *subscriber;
static pthread_t thread;
static pthread_mutex_t ending = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t ended;
static bool is_ending;    /* with `ending` */

static void in_child(void)
{
    is_child = true;
    for (struct gpu *gpu = gpus; gpu < gpus + MOST_GPUS; gpu++)
        if (gpu->contexts && gpu->socket >= 0)
            close(gpu->socket);
}

/* Waits for the next drain; false if the process ends. */
static bool wait_for_turn(void)
{
    uint64_t until = now() + DRAIN_NS;
    const struct timespec time = {.tv_sec = until / 1000000000, .tv_nsec = until % 1000000000};
    pthread_mutex_lock(&ending);
    while (!is_ending && !pthread_cond_timedwait(&ended, &ending, &time))
        ;
    bool goes_on = !is_ending;
    pthread_mutex_unlock(&ending);
    return goes_on;
}

static void let_go(void)
{
    paths_end();
    paths_send(send_launches, ROWS_OF_LAUNCHES);
    made_progress();
    pthread_mutex_lock(&draining);
    for (unsigned i = 0; i < context_count; i++)
        if (contexts[i].handle) {
            end_sampling(&contexts[i]);
            made_progress();
        }
    pthread_mutex_unlock(&draining);
    cupti.flush(1);
    made_progress();
    cupti.no_activity(ACTIVITY_CONCURRENT_KERNEL);
    cupti.unsubscribe(subscriber);
    paths_send(send_launches, ROWS_OF_LAUNCHES); /* of launches that had begun before paths_end() */
    made_progress();
    send_last_modules();
}

static void *drain_all(void *unused)
{
    (void)unused;
    unsigned unrecorded = 0;
    pthread_setname_np(pthread_self(), "iaprof");
    for (unsigned turn = 1; unrecorded < 3 && wait_for_turn(); turn++) { /* later, the recording is over */
        unrecorded = is_recorded() ? 0 : unrecorded + 1;
        paths_send(send_launches, ROWS_OF_LAUNCHES);
        pthread_mutex_lock(&draining);
        for (unsigned i = 0; i < context_count; i++) {
            drain(&contexts[i]);
            if (contexts[i].handle && contexts[i].sampled == OTHER_SAMPLED)
                begin_sampling(&contexts[i]);
        }
        pthread_mutex_unlock(&draining);
        send_modules();
        if (turn % 5 == 0)
            cupti.flush(0);
    }
    let_go();
    return NULL;
}

/* Our thread sends the rest: this one may have been interrupted by a signal while it had a lock, of ours or of CUPTI's. */
static void at_exit(void)
{
    if (is_child)
        return;
    pthread_mutex_lock(&ending); /* our thread has it for moments only */
    is_ending = true;
    pthread_cond_signal(&ended);
    pthread_mutex_unlock(&ending);
    unsigned before = 0;
    for (uint64_t since = now(); pthread_tryjoin_np(thread, NULL) && now() - since < WAIT_NS; rest(200000)) {
        unsigned made = __atomic_load_n(&progress, __ATOMIC_RELAXED);
        since = made == before ? since : now();
        before = made;
    }
}

static bool find_all(void *library, const char *const *names, void **functions, size_t many, const char **missing)
{
    for (size_t i = 0; i < many; i++)
        if (!(functions[i] = dlsym(library, names[i]))) {
            *missing = names[i];
            return false;
        }
    return true;
}

/* Opens CUPTI: the one that the process has, or that the recorder knows of. */
static void *open_cupti(void)
{
    static const char *const versions[] = {"libcupti.so.14", "libcupti.so.13", "libcupti.so.12", "libcupti.so"};
    void *found = NULL;
    for (unsigned i = 0; !found && i < ELEMENTS(versions); i++)
        found = dlopen(versions[i], RTLD_NOW | RTLD_NOLOAD);
    const char *paths = secure_getenv("IAPROF_CUPTI"); /* not in programs with more rights than their user */
    char path[4096];
    for (const char *from = paths ? paths : "", *end; !found && *from; from = *end ? end + 1 : end) {
        end = strchrnul(from, ':');
        if (end - from < (long)sizeof path) {
            memcpy(path, from, end - from);
            path[end - from] = 0;
            found = dlopen(path, RTLD_NOW | RTLD_LOCAL);
        }
    }
    for (unsigned i = 0; !found && i < ELEMENTS(versions); i++)
        found = dlopen(versions[i], RTLD_NOW | RTLD_LOCAL);
    return found;
}

/* What CUPTI calls as strdup(). cuptiPCSamplingGetData() looks up the functions of the instructions that CUPTI's own thread has
 * decoded, lets go of the lock, takes it again, and copies their names. If its thread adds an instruction in between, the name is
 * NULL, and strdup() ends the program: with CUDA 13.0, twice in twenty minutes of trainings. With a name, CUPTI hands out these
 * samples with the CRC 0, and they are counted as those of no known function. */
static char *copy_of_name(const char *name)
{
    return strdup(name ? name : "");
}

/* Makes a library call `function` in place of the function with this name that it imports. */
static void replace_imported(void *library, const char *name, void *function)
{
    const Elf64_Rela *relocations = NULL;
    const Elf64_Sym *symbols = NULL;
    const char *names = NULL;
    size_t bytes = 0;
    uintptr_t page = getauxval(AT_PAGESZ);
    struct link_map *map;
    if (dlinfo(library, RTLD_DI_LINKMAP, &map))
        return;
    for (const Elf64_Dyn *each = map->l_ld; each->d_tag != DT_NULL; each++) {
        if (each->d_tag == DT_JMPREL)
            relocations = (const void *)each->d_un.d_ptr;
        else if (each->d_tag == DT_PLTRELSZ)
            bytes = each->d_un.d_val;
        else if (each->d_tag == DT_SYMTAB)
            symbols = (const void *)each->d_un.d_ptr;
        else if (each->d_tag == DT_STRTAB)
            names = (const void *)each->d_un.d_ptr;
    }
    if (!relocations || !symbols || !names)
        return;
    for (size_t i = 0; i < bytes / sizeof *relocations; i++) {
        uintptr_t slot = map->l_addr + relocations[i].r_offset;
        /* In NVIDIA's libraries it can be written to; in one that is linked with -z now, it can from now on. */
        if (!strcmp(names + symbols[ELF64_R_SYM(relocations[i].r_info)].st_name, name) &&
            !mprotect((void *)(slot & -page), page, PROT_READ | PROT_WRITE))
            __atomic_store_n((void **)slot, function, __ATOMIC_RELEASE);
    }
}

/* Subscribes to what is needed; returns what CUPTI says of the first that fails. */
static int begin(void)
{
    static const uint32_t resources[] = {CONTEXT_CREATED,        CONTEXT_DESTROY_STARTING, MODULE_LOADED,
                                         MODULE_UNLOAD_STARTING, GRAPH_NODE_CREATED,       GRAPH_NODE_CLONED};
    int result = cupti.subscribe(&subscriber, on_event, NULL);
    for (unsigned i = 0; !result && i < ELEMENTS(resources); i++)
        result = cupti.enable(1, subscriber, DOMAIN_RESOURCE, resources[i]);
    for (unsigned i = 0; !result && i < ELEMENTS(LAUNCHES); i++) /* an older CUPTI does not know them all; likewise below */
        cupti.enable(1, subscriber, DOMAIN_DRIVER, LAUNCHES[i]);
    for (unsigned i = 0; !result && i < ELEMENTS(LOADS); i++)
        cupti.enable(1, subscriber, DOMAIN_DRIVER, LOADS[i]);
    if (!result) {
        cupti.clock(now);
        result = cupti.on_crc(compute_crc);
    }
    if (!result)
        result = cupti.on_buffers(give_buffer, take_buffer);
    if (!result)
        result = cupti.activity(ACTIVITY_CONCURRENT_KERNEL);
    return result;
}

static void read_period(void)
{
    const char *text = secure_getenv("IAPROF_CUDA_PERIOD");
    unsigned long bits = text ? strtoul(text, NULL, 10) : 0;
    if (bits >= 5 && bits <= 31)
        period = bits;
}

/* Starts the thread; false if that fails. */
static bool start_thread(void)
{
    pthread_condattr_t monotonic;
    if (pthread_condattr_init(&monotonic))
        return false;
    bool is_started = !pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC) && !pthread_cond_init(&ended, &monotonic) &&
                      !pthread_atfork(NULL, NULL, in_child) && !pthread_create(&thread, NULL, drain_all, NULL);
    pthread_condattr_destroy(&monotonic);
    return is_started;
}

static void start(void)
{
    const char *missing = NULL;
    read_period();
    void *library = open_cupti(), *cuda = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
    if (!library || !cuda) {
        send_problem("CUPTI was not found, so nothing is sampled: install it (pip install nvidia-cuda-cupti)");
        return;
    }
    if (!find_all(library, CUPTI_NAMES, (void **)&cupti, ELEMENTS(CUPTI_NAMES), &missing) ||
        !find_all(cuda, DRIVER_NAMES, (void **)&driver, ELEMENTS(DRIVER_NAMES), &missing)) {
        send_problem("NVIDIA's library lacks %s, so nothing is sampled: install a newer one", missing);
        return;
    }
    *(void **)&module_of_function = dlsym(cuda, "cuFuncGetModule");
    *(void **)&library_of_kernel = dlsym(cuda, "cuKernelGetLibrary");
    replace_imported(library, "strdup", copy_of_name);
    paths_begin();
    int result = begin();
    if (!result && start_thread()) {
        atexit(at_exit);
        return;
    }
    if (result == MULTIPLE_SUBSCRIBERS)
        send_problem("another profiler uses CUPTI in this process, so iaprof samples nothing in it");
    else
        send_problem("nothing is sampled: CUPTI says %s", result ? said(result) : "nothing: there is no thread");
    if (subscriber) {
        cupti.no_activity(ACTIVITY_CONCURRENT_KERNEL);
        cupti.unsubscribe(subscriber);
    }
}

/* What the driver calls when it has loaded the library; 1 lets it go on. */
__attribute__((visibility("default"))) int InitializeInjection(void)
{
    static bool was_called;
    int before = errno;
    if (!is_recorded() || __atomic_exchange_n(&was_called, true, __ATOMIC_RELAXED))
        return 1;
    sigset_t all, mask;
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, &mask); /* the program's signals are for its own threads, not for ours and CUPTI's */
    start();
    pthread_sigmask(SIG_SETMASK, &mask, NULL);
    errno = before;
    return 1;
}
