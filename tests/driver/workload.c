/* SPDX-License-Identifier: Apache-2.0
 * A program of Level Zero that keeps a ledger: what it launched, how often, and what the runtime itself says of each kernel.
 *
 *     workload [--processes N] [--threads N] [--rounds N] [--launches N] [--ways WAY,...] MODULE...
 *
 * A MODULE that ends in .spv is SPIR-V for the runtime to compile, any other a native binary. Each process creates every module,
 * lets each thread launch every kernel of it N times in each way, and destroys it; that is a round.
 *
 * The ledger is a JSON line per (process, round, module, thread, kernel). The module's debug ELF and the kernel's code lie in the
 * working folder, in the files that the line names. Whatever the runtime refuses ends the program with status 1 and the
 * call on stderr, but for what only some devices can do: then `launches` lacks that way.
 *
 * Arguments of kernels are not set, and memory is not looked at: this runs where nothing is computed. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <level_zero/ze_api.h>
#include <level_zero/zet_api.h>

enum { MAX_THREADS = 64, MAX_MODULES = 64, MAX_KERNELS = 64, MAX_ARGUMENTS = 64 };

static void must(ze_result_t result, const char *call)
{
    if (result == ZE_RESULT_SUCCESS)
        return;
    fprintf(stderr, "workload: %s: 0x%x\n", call, result);
    _exit(1);
}
#define MUST(call) must(call, #call)

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

static ze_result_t launch(ze_command_list_handle_t list, ze_kernel_handle_t kernel)
{
    return zeCommandListAppendLaunchKernel(list, kernel, &GROUPS, NULL, 0, NULL);
}

static ze_result_t launch_cooperative(ze_command_list_handle_t list, ze_kernel_handle_t kernel)
{
    return zeCommandListAppendLaunchCooperativeKernel(list, kernel, &GROUPS, NULL, 0, NULL);
}

static ze_result_t launch_indirect(ze_command_list_handle_t list, ze_kernel_handle_t kernel)
{
    return zeCommandListAppendLaunchKernelIndirect(list, kernel, in_device, NULL, 0, NULL);
}

static ze_result_t launch_multiple(ze_command_list_handle_t list, ze_kernel_handle_t kernel)
{
    return zeCommandListAppendLaunchMultipleKernelsIndirect(list, 1, &kernel, in_device, in_device, NULL, 0, NULL);
}

static ze_result_t launch_with_parameters(ze_command_list_handle_t list, ze_kernel_handle_t kernel)
{
    return zeCommandListAppendLaunchKernelWithParameters(list, kernel, &GROUPS, NULL, NULL, 0, NULL);
}

static ze_result_t launch_with_arguments(ze_command_list_handle_t list, ze_kernel_handle_t kernel)
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
    int immediate; /* or a regular list, which is executed once */
    ze_result_t (*append)(ze_command_list_handle_t, ze_kernel_handle_t);
} way_t;

static const way_t WAYS[] = {
    {"immediate", 1, launch},
    {"regular", 0, launch},
    {"cooperative", 1, launch_cooperative},
    {"indirect", 1, launch_indirect},
    {"multiple", 1, launch_multiple},
    {"parameters", 1, launch_with_parameters},
    {"arguments", 1, launch_with_arguments},
};
enum { N_WAYS = sizeof WAYS / sizeof *WAYS };

/* --- the command line */

static int processes = 1, threads = 1, rounds = 1, launches = 1, n_modules;
static unsigned ways = 3; /* a bit for each of WAYS */

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

static unsigned read_ways(char *words)
{
    unsigned found = 0;
    for (char *word = strtok(words, ","); word; word = strtok(NULL, ",")) {
        int way = 0;
        while (way < N_WAYS && strcmp(word, WAYS[way].name))
            way++;
        if (way == N_WAYS) {
            fprintf(stderr, "workload: no way is called %s\n", word);
            exit(2);
        }
        found |= 1u << way;
    }
    return found;
}

static void read_command_line(int argc, char **argv)
{
    const struct {
        const char *name;
        int *value, highest;
    } numbers[] = {{"--processes", &processes, 64},
                   {"--threads", &threads, MAX_THREADS},
                   {"--rounds", &rounds, 1 << 20},
                   {"--launches", &launches, 1 << 30}};
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
            ways = read_ways(argv[++i]);
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
    pthread_t id;
    int index, round;
    ze_command_queue_handle_t queue;
    ze_command_list_handle_t immediate, regular;
} thread_t;

static int launch_all(thread_t *thread, ze_kernel_handle_t kernel, const way_t *way)
{
    ze_command_list_handle_t list = way->immediate ? thread->immediate : thread->regular;
    for (int i = 0; i < launches; i++) {
        ze_result_t result = way->append(list, kernel);
        if (!i && result == ZE_RESULT_ERROR_UNSUPPORTED_FEATURE)
            return 0;
        must(result, way->name);
    }
    if (way->immediate) {
        MUST(zeCommandListHostSynchronize(list, UINT64_MAX));
    } else {
        MUST(zeCommandListClose(list));
        MUST(zeCommandQueueExecuteCommandLists(thread->queue, 1, &list, NULL));
        MUST(zeCommandQueueSynchronize(thread->queue, UINT64_MAX));
        MUST(zeCommandListReset(list));
    }
    return 1;
}

static void use_kernel(thread_t *thread, int module, const char *name, int number)
{
    ze_kernel_desc_t desc = {.stype = ZE_STRUCTURE_TYPE_KERNEL_DESC, .pKernelName = name};
    ze_kernel_handle_t kernel;
    MUST(zeKernelCreate(modules[module].handle, &desc, &kernel));
    MUST(zeKernelSetGroupSize(kernel, GROUP_SIZE.groupSizeX, GROUP_SIZE.groupSizeY, GROUP_SIZE.groupSizeZ));

    void *pointer = NULL; /* NEO leaves it as it is where it is something else */
    MUST(zeModuleGetFunctionPointer(modules[module].handle, name, &pointer));
    uint64_t base;
    MUST(kernel_base_address(kernel, &base));
    size_t size = 0;
    MUST(zeKernelGetBinaryExp(kernel, &size, NULL));
    uint8_t *code = malloc(size);
    MUST(zeKernelGetBinaryExp(kernel, &size, code));
    char file[80];
    sprintf(file, "%d-%d-%d-%d-%d.isa", getpid(), thread->round, module, thread->index, number);
    write_file(file, code, size);
    free(code);

    char counts[256] = "", *end = counts;
    for (int way = 0; way < N_WAYS; way++)
        if (ways & 1u << way && launch_all(thread, kernel, &WAYS[way]))
            end += sprintf(end, "%s\"%s\": %d", end == counts ? "" : ", ", WAYS[way].name, launches);
    printf("{\"pid\": %d, \"tid\": %d, \"round\": %d, \"module\": \"%s\", \"kernel\": \"%s\", "
           "\"handle\": %lu, \"function_pointer\": %lu, \"base_address\": %lu, \"debug_elf\": \"%s\", \"isa\": \"%s\", "
           "\"launches\": {%s}}\n",
           getpid(), gettid(), thread->round, modules[module].name, name, (unsigned long)kernel,
           (unsigned long)pointer, (unsigned long)base, modules[module].debug_elf, file, counts);
    MUST(zeKernelDestroy(kernel));
}

static void *run_thread(void *argument)
{
    thread_t *thread = argument;
    ze_command_queue_desc_t queue = {.stype = ZE_STRUCTURE_TYPE_COMMAND_QUEUE_DESC, .ordinal = ordinal};
    MUST(zeCommandQueueCreate(context, device, &queue, &thread->queue));
    queue.mode = ZE_COMMAND_QUEUE_MODE_ASYNCHRONOUS;
    MUST(zeCommandListCreateImmediate(context, device, &queue, &thread->immediate));
    ze_command_list_desc_t list = {.stype = ZE_STRUCTURE_TYPE_COMMAND_LIST_DESC, .commandQueueGroupOrdinal = ordinal};
    MUST(zeCommandListCreate(context, device, &list, &thread->regular));

    for (int module = 0; module < n_modules; module++) {
        const char *names[MAX_KERNELS];
        uint32_t count = MAX_KERNELS;
        MUST(zeModuleGetKernelNames(modules[module].handle, &count, names));
        for (uint32_t number = 0; number < count; number++)
            use_kernel(thread, module, names[number], number);
    }

    MUST(zeCommandListDestroy(thread->regular));
    MUST(zeCommandListDestroy(thread->immediate));
    MUST(zeCommandQueueDestroy(thread->queue));
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
