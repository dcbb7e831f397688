/* SPDX-License-Identifier: Apache-2.0
 * A program of Level Zero that keeps a ledger: what it launched, how often, and what the runtime itself says of each kernel.
 *
 *     workload [--processes N] [--threads N] [--rounds N] [--launches N] [--ways WAY,...] [--one-way]
 *              [--pause-us N] [--deeper N] [--wait-file PATH] MODULE...
 *
 * A MODULE that ends in .spv is SPIR-V for the runtime to compile, any other a native binary. Each process creates every module,
 * lets each thread create every kernel and launch it N times in each way, and destroys all; that is a round.
 *
 *   --one-way          each kernel in one of the ways only, which take turns: all its launches then come from one call path
 *   --pause-us N       rest after each launch
 *   --deeper N         launch from so many calls deeper
 *   --wait-file PATH   the first launch waits until PATH is there; PATH.ready appears when all threads of all processes wait
 *
 * The ledger is a JSON line per (process, round, module, thread, kernel). The module's debug ELF and the kernel's code lie in the
 * working folder, in the files that the line names. Whatever the runtime refuses ends the program with status 1 and the
 * call on stderr, but for what only some devices can do: then `launches` lacks that way.
 *
 * Arguments of kernels are not set, and memory is not looked at: this runs where nothing is computed. The stand-in's GPU, if
 * there is one, is told what to execute (gpu.h). */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <level_zero/ze_api.h>
#include <level_zero/zet_api.h>

#include "gpu.h"

/* Call paths are what a recorder is tested with: such a function keeps its name and its frame. */
#define ON_THE_STACK __attribute__((noipa))

enum { MAX_THREADS = 64, MAX_MODULES = 64, MAX_KERNELS = 64, MAX_ARGUMENTS = 64 };
enum { AT_ONCE = 9 }; /* launches of one call of the multiple form */

#define PROGRAM "workload"
#define RESULT "0x%x"
#include "must.h"

static void fail(const char *what)
{
    perror(what);
    _exit(1);
}

/* --- what all threads of a process share */

static ze_driver_handle_t driver;
static ze_device_handle_t device;
static ze_context_handle_t context;
static uint32_t ordinal; /* of the queue group that computes */
static void *in_device;  /* what indirect launches read: a count and sizes of groups */

/* The driver's own extension, in no header: the GPU address of the kernel's code. */
static ze_result_t (*kernel_base_address)(ze_kernel_handle_t, uint64_t *);

static const ze_group_count_t GROUPS = {4, 2, 1};
static const ze_group_size_t GROUP_SIZE = {16, 1, 1};

/* --- the ways to launch */

typedef ze_result_t append_t(ze_command_list_handle_t, ze_kernel_handle_t);

ON_THE_STACK static ze_result_t launch_immediate(ze_command_list_handle_t list, ze_kernel_handle_t kernel)
{
    return zeCommandListAppendLaunchKernel(list, kernel, &GROUPS, NULL, 0, NULL);
}

ON_THE_STACK static ze_result_t launch_regular(ze_command_list_handle_t list, ze_kernel_handle_t kernel)
{
    return zeCommandListAppendLaunchKernel(list, kernel, &GROUPS, NULL, 0, NULL);
}

ON_THE_STACK static ze_result_t launch_cooperative(ze_command_list_handle_t list, ze_kernel_handle_t kernel)
{
    return zeCommandListAppendLaunchCooperativeKernel(list, kernel, &GROUPS, NULL, 0, NULL);
}

ON_THE_STACK static ze_result_t launch_indirect(ze_command_list_handle_t list, ze_kernel_handle_t kernel)
{
    return zeCommandListAppendLaunchKernelIndirect(list, kernel, in_device, NULL, 0, NULL);
}

ON_THE_STACK static ze_result_t launch_multiple(ze_command_list_handle_t list, ze_kernel_handle_t kernel)
{
    ze_kernel_handle_t kernels[AT_ONCE];
    for (int i = 0; i < AT_ONCE; i++)
        kernels[i] = kernel;
    return zeCommandListAppendLaunchMultipleKernelsIndirect(list, AT_ONCE, kernels, in_device, in_device, NULL, 0, NULL);
}

ON_THE_STACK static ze_result_t launch_parameters(ze_command_list_handle_t list, ze_kernel_handle_t kernel)
{
    return zeCommandListAppendLaunchKernelWithParameters(list, kernel, &GROUPS, NULL, NULL, 0, NULL);
}

ON_THE_STACK static ze_result_t launch_arguments(ze_command_list_handle_t list, ze_kernel_handle_t kernel)
{
    /* Eight zero bytes are a null pointer, an integer, or a size of local memory, whichever the kernel wants. */
    static uint64_t zero;
    void *arguments[MAX_ARGUMENTS];
    for (int i = 0; i < MAX_ARGUMENTS; i++)
        arguments[i] = &zero;
    return zeCommandListAppendLaunchKernelWithArguments(list, kernel, GROUPS, GROUP_SIZE, arguments, NULL, NULL, 0, NULL);
}

typedef struct {
    const char *name;
    append_t *append;
    const char *stack; /* functions from which it is called, as gpu.h wants them */
    int at_once;       /* launches of one call */
    int regular;       /* the list, which is executed once; or an immediate one */
} way_t;

#define WAY(way) #way, launch_##way, "run_thread;use_kernel;launch_all;launch_" #way
static const way_t WAYS[] = {
    {WAY(immediate), .at_once = 1},
    {WAY(regular), .at_once = 1, .regular = 1},
    {WAY(cooperative), .at_once = 1},
    {WAY(indirect), .at_once = 1},
    {WAY(multiple), .at_once = AT_ONCE},
    {WAY(parameters), .at_once = 1},
    {WAY(arguments), .at_once = 1},
};
enum { N_WAYS = sizeof WAYS / sizeof *WAYS };

/* --- the command line */

static int processes = 1, threads = 1, rounds = 1, launches = 1, pause_us, deeper, one_way, n_modules;
static const way_t *ways[N_WAYS] = {&WAYS[0], &WAYS[1]}; /* which are wanted */
static int n_ways = 2;
static const char *wait_file;

static struct {
    const char *name;
    uint8_t *bytes;
    size_t size;
    ze_module_handle_t handle; /* of this round */
    char debug_elf[64];
} modules[MAX_MODULES];

static void read_module(const char *path)
{
    if (n_modules == MAX_MODULES) {
        fprintf(stderr, "workload: more than %d modules\n", MAX_MODULES);
        exit(2);
    }
    FILE *file = fopen(path, "rb");
    struct stat stat;
    if (!file || fstat(fileno(file), &stat))
        fail(path);
    uint8_t *bytes = malloc(stat.st_size);
    if (fread(bytes, 1, stat.st_size, file) != (size_t)stat.st_size)
        fail(path);
    fclose(file);
    const char *slash = strrchr(path, '/');
    modules[n_modules].name = slash ? slash + 1 : path;
    modules[n_modules].bytes = bytes;
    modules[n_modules++].size = stat.st_size;
}

static void read_ways(char *words)
{
    n_ways = 0;
    for (char *word = strtok(words, ","); word; word = strtok(NULL, ",")) {
        int way = 0;
        while (way < N_WAYS && strcmp(word, WAYS[way].name))
            way++;
        if (way == N_WAYS || n_ways == N_WAYS) {
            fprintf(stderr, "workload: no way is called %s, or there are too many\n", word);
            exit(2);
        }
        ways[n_ways++] = &WAYS[way];
    }
}

static void read_command_line(int argc, char **argv)
{
    const struct {
        const char *name;
        int *value, highest;
    } numbers[] = {{"--processes", &processes, 64},
                   {"--threads", &threads, MAX_THREADS},
                   {"--rounds", &rounds, 1 << 20},
                   {"--launches", &launches, 1 << 30},
                   {"--pause-us", &pause_us, 1000000},
                   {"--deeper", &deeper, 1000}};
    for (int i = 1; i < argc; i++) {
        size_t n = 0;
        while (n < sizeof numbers / sizeof *numbers && strcmp(argv[i], numbers[n].name))
            n++;
        if (n < sizeof numbers / sizeof *numbers && i + 1 < argc) {
            *numbers[n].value = atoi(argv[++i]);
            if (*numbers[n].value < 1 || *numbers[n].value > numbers[n].highest) {
                fprintf(stderr, "workload: %s is 1 to %d\n", numbers[n].name, numbers[n].highest);
                exit(2);
            }
        } else if (!strcmp(argv[i], "--ways") && i + 1 < argc) {
            read_ways(argv[++i]);
        } else if (!strcmp(argv[i], "--one-way")) {
            one_way = 1;
        } else if (!strcmp(argv[i], "--wait-file") && i + 1 < argc) {
            wait_file = argv[++i];
        } else if (argv[i][0] == '-') {
            fprintf(stderr, "workload: %s?\n", argv[i]);
            exit(2);
        } else {
            read_module(argv[i]);
        }
    }
}

/* --- a process */

static void begin(void)
{
    gpu_connect();
    MUST(zeInit(ZE_INIT_FLAG_GPU_ONLY));
    uint32_t one = 1;
    MUST(zeDriverGet(&one, &driver));
    one = 1;
    MUST(zeDeviceGet(driver, &one, &device));
    ze_context_desc_t desc = {.stype = ZE_STRUCTURE_TYPE_CONTEXT_DESC};
    MUST(zeContextCreate(driver, &desc, &context));
    MUST(zeDriverGetExtensionFunctionAddress(driver, "zexKernelGetBaseAddress", (void **)&kernel_base_address));

    ze_command_queue_group_properties_t groups[16] = {{.stype = ZE_STRUCTURE_TYPE_COMMAND_QUEUE_GROUP_PROPERTIES}};
    uint32_t count = sizeof groups / sizeof *groups;
    MUST(zeDeviceGetCommandQueueGroupProperties(device, &count, groups));
    while (ordinal < count && !(groups[ordinal].flags & ZE_COMMAND_QUEUE_GROUP_PROPERTY_FLAG_COMPUTE))
        ordinal++;

    ze_device_mem_alloc_desc_t memory = {.stype = ZE_STRUCTURE_TYPE_DEVICE_MEM_ALLOC_DESC};
    MUST(zeMemAllocDevice(context, &memory, 4096, 4096, device, &in_device));
}

static void write_file(const char *name, const uint8_t *bytes, size_t size)
{
    FILE *file = fopen(name, "wb");
    if (!file || fwrite(bytes, 1, size, file) != size || fclose(file))
        fail(name);
}

static void create_module(int index, int round)
{
    ze_module_desc_t desc = {.stype = ZE_STRUCTURE_TYPE_MODULE_DESC};
    desc.format = strstr(modules[index].name, ".spv") ? ZE_MODULE_FORMAT_IL_SPIRV : ZE_MODULE_FORMAT_NATIVE;
    desc.inputSize = modules[index].size;
    desc.pInputModule = modules[index].bytes;
    ze_module_handle_t *module = &modules[index].handle;
    MUST(zeModuleCreate(context, device, &desc, module, NULL));

    size_t size = 0;
    MUST(zetModuleGetDebugInfo(*module, ZET_MODULE_DEBUG_INFO_FORMAT_ELF_DWARF, &size, NULL));
    uint8_t *elf = malloc(size);
    MUST(zetModuleGetDebugInfo(*module, ZET_MODULE_DEBUG_INFO_FORMAT_ELF_DWARF, &size, elf));
    sprintf(modules[index].debug_elf, "%d-%d-%d.debug.elf", getpid(), round, index);
    write_file(modules[index].debug_elf, elf, size);
    free(elf);
}

/* --- a thread: it has its own kernels, as kernels are not to be used by two threads at a time, and its own lists */

typedef struct {
    int module;
    const char *name;
    ze_kernel_handle_t handle;
    void *function_pointer;
    uint64_t base_address;
    char isa[80]; /* the file's name */
} kernel_t;

typedef struct {
    pthread_t id;
    int index, round;
    ze_command_queue_handle_t queue;
    ze_command_list_handle_t immediate, regular;
    kernel_t *kernels;
    int n_kernels;
} thread_t;

/* One thread at a time is in the driver, but for appends to its own regular list: else one of some 1,500 runs dies in NEO without
 * a GPU, recorded or not, as it makes resident what another thread has freed. */
static pthread_mutex_t driver_lock = PTHREAD_MUTEX_INITIALIZER;

static void create_lists(thread_t *thread)
{
    ze_command_queue_desc_t queue = {.stype = ZE_STRUCTURE_TYPE_COMMAND_QUEUE_DESC, .ordinal = ordinal};
    MUST(zeCommandQueueCreate(context, device, &queue, &thread->queue));
    queue.mode = ZE_COMMAND_QUEUE_MODE_ASYNCHRONOUS;
    MUST(zeCommandListCreateImmediate(context, device, &queue, &thread->immediate));
    ze_command_list_desc_t list = {.stype = ZE_STRUCTURE_TYPE_COMMAND_LIST_DESC, .commandQueueGroupOrdinal = ordinal};
    MUST(zeCommandListCreate(context, device, &list, &thread->regular));
}

static void destroy_lists(thread_t *thread)
{
    MUST(zeCommandListDestroy(thread->regular));
    MUST(zeCommandListDestroy(thread->immediate));
    MUST(zeCommandQueueDestroy(thread->queue));
}

static void create_kernel(thread_t *thread, int module, const char *name)
{
    kernel_t *kernel = &thread->kernels[thread->n_kernels];
    *kernel = (kernel_t){.module = module, .name = name}; /* NEO leaves function_pointer as it is where it is something else */
    ze_kernel_desc_t desc = {.stype = ZE_STRUCTURE_TYPE_KERNEL_DESC, .pKernelName = name};
    MUST(zeKernelCreate(modules[module].handle, &desc, &kernel->handle));
    MUST(zeKernelSetGroupSize(kernel->handle, GROUP_SIZE.groupSizeX, GROUP_SIZE.groupSizeY, GROUP_SIZE.groupSizeZ));

    MUST(zeModuleGetFunctionPointer(modules[module].handle, name, &kernel->function_pointer));
    MUST(kernel_base_address(kernel->handle, &kernel->base_address));
    size_t size = 0;
    MUST(zeKernelGetBinaryExp(kernel->handle, &size, NULL));
    uint8_t *code = malloc(size);
    MUST(zeKernelGetBinaryExp(kernel->handle, &size, code));
    sprintf(kernel->isa, "%d-%d-%d-%d.isa", getpid(), thread->round, thread->index, thread->n_kernels);
    write_file(kernel->isa, code, size);
    gpu_kernel(name, (uint64_t)kernel->function_pointer, code, size);
    free(code);
    thread->n_kernels++;
}

static void create_kernels(thread_t *thread)
{
    thread->kernels = malloc(n_modules * MAX_KERNELS * sizeof *thread->kernels);
    for (int module = 0; module < n_modules; module++) {
        const char *names[MAX_KERNELS];
        uint32_t count = MAX_KERNELS;
        MUST(zeModuleGetKernelNames(modules[module].handle, &count, names));
        for (uint32_t i = 0; i < count; i++)
            create_kernel(thread, module, names[i]);
    }
}

static double now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1e9 + now.tv_nsec;
}

/* Gives the mean time of a launch in ns, -1 where the device cannot do it in that way. */
ON_THE_STACK static double launch_all(thread_t *thread, const kernel_t *kernel, const way_t *way)
{
    ze_command_list_handle_t list = way->regular ? thread->regular : thread->immediate;
    double start = now_ns();
    for (int i = 0; i < launches; i++) {
        if (!way->regular)
            pthread_mutex_lock(&driver_lock);
        ze_result_t result = way->append(list, kernel->handle);
        if (!way->regular)
            pthread_mutex_unlock(&driver_lock);
        if (!i && result == ZE_RESULT_ERROR_UNSUPPORTED_FEATURE)
            return -1;
        must(result, way->name);
        for (int n = 0; n < way->at_once && !way->regular; n++)
            gpu_launch((uint64_t)kernel->function_pointer, way->stack);
        if (pause_us)
            usleep(pause_us);
    }
    double took = now_ns() - start;
    pthread_mutex_lock(&driver_lock);
    if (way->regular) {
        MUST(zeCommandListClose(list));
        MUST(zeCommandQueueExecuteCommandLists(thread->queue, 1, &list, NULL));
        for (int n = 0; n < launches * way->at_once; n++)
            gpu_launch((uint64_t)kernel->function_pointer, way->stack);
        MUST(zeCommandQueueSynchronize(thread->queue, UINT64_MAX));
        MUST(zeCommandListReset(list));
    } else {
        MUST(zeCommandListHostSynchronize(list, UINT64_MAX));
    }
    pthread_mutex_unlock(&driver_lock);
    gpu_wait();
    return took / launches;
}

ON_THE_STACK static double launch_deeper(thread_t *thread, const kernel_t *kernel, const way_t *way, int calls)
{
    double took = calls > 1 ? launch_deeper(thread, kernel, way, calls - 1) : launch_all(thread, kernel, way);
    __asm__ volatile("" : "+x"(took)); /* no tail call */
    return took;
}

ON_THE_STACK static void use_kernel(thread_t *thread, int number)
{
    kernel_t *kernel = &thread->kernels[number];
    char counts[256] = "", times[256] = "", *count = counts, *time = times;
    int first = one_way ? number % n_ways : 0, end = one_way ? first + 1 : n_ways;
    for (int i = first; i < end; i++) {
        double ns = deeper ? launch_deeper(thread, kernel, ways[i], deeper) : launch_all(thread, kernel, ways[i]);
        if (ns < 0)
            continue;
        const char *comma = count == counts ? "" : ", ";
        count += sprintf(count, "%s\"%s\": %d", comma, ways[i]->name, launches * ways[i]->at_once);
        time += sprintf(time, "%s\"%s\": %.1f", comma, ways[i]->name, ns);
    }
    printf("{\"pid\": %d, \"tid\": %d, \"round\": %d, \"module\": \"%s\", \"kernel\": \"%s\", "
           "\"handle\": %lu, \"function_pointer\": %lu, \"base_address\": %lu, \"debug_elf\": \"%s\", \"isa\": \"%s\", "
           "\"launches\": {%s}, \"ns\": {%s}}\n",
           getpid(), gettid(), thread->round, modules[kernel->module].name, kernel->name, (unsigned long)kernel->handle,
           (unsigned long)kernel->function_pointer, (unsigned long)kernel->base_address, modules[kernel->module].debug_elf,
           kernel->isa, counts, times);
    pthread_mutex_lock(&driver_lock);
    MUST(zeKernelDestroy(kernel->handle));
    pthread_mutex_unlock(&driver_lock);
}

static atomic_int *waiting; /* threads of all processes that have created their kernels */

static void wait_for_file(void)
{
    if (atomic_fetch_add(waiting, 1) + 1 == processes * threads) {
        char ready[4096];
        snprintf(ready, sizeof ready, "%s.ready", wait_file);
        write_file(ready, NULL, 0);
    }
    while (access(wait_file, F_OK))
        usleep(1000);
}

ON_THE_STACK static void *run_thread(void *argument)
{
    thread_t *thread = argument;
    pthread_mutex_lock(&driver_lock);
    create_lists(thread);
    create_kernels(thread);
    pthread_mutex_unlock(&driver_lock);
    if (wait_file && !thread->round)
        wait_for_file();
    for (int number = 0; number < thread->n_kernels; number++)
        use_kernel(thread, number);
    free(thread->kernels);
    pthread_mutex_lock(&driver_lock);
    destroy_lists(thread);
    pthread_mutex_unlock(&driver_lock);
    return NULL;
}

static void run_process(void)
{
    begin();
    for (int round = 0; round < rounds; round++) {
        for (int module = 0; module < n_modules; module++)
            create_module(module, round);
        thread_t all[MAX_THREADS];
        for (int i = 0; i < threads; i++) {
            all[i] = (thread_t){.index = i, .round = round};
            if (pthread_create(&all[i].id, NULL, run_thread, &all[i]))
                fail("pthread_create");
        }
        for (int i = 0; i < threads; i++)
            pthread_join(all[i].id, NULL);
        for (int module = 0; module < n_modules; module++)
            MUST(zeModuleDestroy(modules[module].handle));
    }
    MUST(zeMemFree(context, in_device));
    MUST(zeContextDestroy(context));
}

int main(int argc, char **argv)
{
    read_command_line(argc, argv);
    setvbuf(stdout, NULL, _IOLBF, 4096); /* whole lines, of whichever process */
    waiting = mmap(NULL, sizeof *waiting, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (waiting == MAP_FAILED)
        fail("mmap");
    for (int i = 1; i < processes; i++) {
        pid_t child = fork();
        if (child < 0)
            fail("fork");
        if (child == 0) {
            run_process();
            exit(0);
        }
    }
    run_process();
    int status, worst = 0;
    while (wait(&status) > 0)
        worst |= status;
    return worst != 0;
}
