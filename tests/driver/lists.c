/* SPDX-License-Identifier: Apache-2.0
 * A program of Level Zero that executes closed command lists again and again, and keeps a ledger of what that launched.
 *
 *     lists [--wait-file PATH] ROUNDS MODULE...
 *
 * Of the modules, which are native, the first four kernels are used. One list gets two of the first kernel and one of the second,
 * another one the third. In each round the lists are executed from several places, once both in one call. Then the first list
 * is reset, gets two of the fourth kernel, and is executed ROUNDS times.
 *
 *   --wait-file PATH   when the lists are filled, wait until PATH is there; PATH.ready appears then
 *
 * Prints one line of JSON: how often each kernel ran, how often each list was executed (`executions`), in how many calls, and
 * the mean time of such a call (`ns`).
 *
 * The stand-in's GPU, if there is one, executes a list's kernels when the list is executed. What its ledger calls their stack is the
 * function that appended, a bar, and the function that executed. */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <level_zero/ze_api.h>

#include "gpu.h"

/* Call paths are what a recorder is tested with: such a function keeps its name and its frame. */
#define ON_THE_STACK __attribute__((noipa))

enum { KERNELS = 4, MOST = 8 };

#define PROGRAM "lists"
#define RESULT "0x%x"
#include "must.h"

static struct {
    ze_kernel_handle_t handle;
    uint64_t address;
    char name[128];
    long ran;
} kernels[KERNELS];
static int n_kernels;

typedef struct {
    ze_command_list_handle_t handle;
    int kernels[MOST], count;
    const char *filled_by;
} list_t;

static ze_driver_handle_t driver;
static ze_device_handle_t device;
static ze_context_handle_t context;
static ze_command_queue_handle_t queue;
static ze_command_list_handle_t immediate;
static list_t first, second;
static long executions, calls, here;
static double here_ns;

static double now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1e9 + now.tv_nsec;
}

static void append(list_t *list, int kernel, const char *filled_by)
{
    static const ze_group_count_t groups = {4, 2, 1};
    MUST(zeCommandListAppendLaunchKernel(list->handle, kernels[kernel].handle, &groups, NULL, 0, NULL));
    list->kernels[list->count++] = kernel;
    list->filled_by = filled_by;
}

ON_THE_STACK static void fill_first(void)
{
    append(&first, 0, __func__);
    append(&first, 0, __func__);
    append(&first, 1, __func__);
    MUST(zeCommandListClose(first.handle));
}

ON_THE_STACK static void fill_second(void)
{
    append(&second, 2, __func__);
    MUST(zeCommandListClose(second.handle));
}

ON_THE_STACK static void fill_again(void)
{
    MUST(zeCommandListReset(first.handle));
    first.count = 0;
    append(&first, 3, __func__);
    append(&first, 3, __func__);
    MUST(zeCommandListClose(first.handle));
}

/* After an execution: what it launched. */
static void launched(const list_t *list, const char *executed_by)
{
    char stack[256];
    snprintf(stack, sizeof stack, "%s|%s", list->filled_by, executed_by);
    for (int i = 0; i < list->count; i++) {
        kernels[list->kernels[i]].ran++;
        gpu_launch(kernels[list->kernels[i]].address, stack);
    }
    executions++;
}

static void finish(void)
{
    MUST(zeCommandQueueSynchronize(queue, UINT64_MAX));
    MUST(zeCommandListHostSynchronize(immediate, UINT64_MAX));
    gpu_wait();
    calls++;
}

ON_THE_STACK static void execute_here(list_t *list)
{
    double start = now_ns();
    MUST(zeCommandQueueExecuteCommandLists(queue, 1, &list->handle, NULL));
    here_ns += now_ns() - start;
    here++;
    launched(list, __func__);
    finish();
}

ON_THE_STACK static void execute_there(list_t *list)
{
    MUST(zeCommandQueueExecuteCommandLists(queue, 1, &list->handle, NULL));
    launched(list, __func__);
    finish();
}

ON_THE_STACK static void execute_both(void)
{
    ze_command_list_handle_t both[] = {first.handle, second.handle};
    MUST(zeCommandQueueExecuteCommandLists(queue, 2, both, NULL));
    launched(&first, __func__);
    launched(&second, __func__);
    finish();
}

ON_THE_STACK static void execute_in_immediate(list_t *list)
{
    MUST(zeCommandListImmediateAppendCommandListsExp(immediate, 1, &list->handle, NULL, 0, NULL));
    launched(list, __func__);
    finish();
}

static void begin(void)
{
    gpu_connect();
    MUST(zeInit(ZE_INIT_FLAG_GPU_ONLY));
    uint32_t one = 1, ordinal = 0;
    MUST(zeDriverGet(&one, &driver));
    one = 1;
    MUST(zeDeviceGet(driver, &one, &device));
    ze_context_desc_t desc = {.stype = ZE_STRUCTURE_TYPE_CONTEXT_DESC};
    MUST(zeContextCreate(driver, &desc, &context));
    ze_command_queue_group_properties_t groups[16] = {{.stype = ZE_STRUCTURE_TYPE_COMMAND_QUEUE_GROUP_PROPERTIES}};
    uint32_t count = sizeof groups / sizeof *groups;
    MUST(zeDeviceGetCommandQueueGroupProperties(device, &count, groups));
    while (ordinal < count && !(groups[ordinal].flags & ZE_COMMAND_QUEUE_GROUP_PROPERTY_FLAG_COMPUTE))
        ordinal++;
    ze_command_queue_desc_t of_queue = {.stype = ZE_STRUCTURE_TYPE_COMMAND_QUEUE_DESC, .ordinal = ordinal};
    MUST(zeCommandQueueCreate(context, device, &of_queue, &queue));
    of_queue.mode = ZE_COMMAND_QUEUE_MODE_ASYNCHRONOUS;
    MUST(zeCommandListCreateImmediate(context, device, &of_queue, &immediate));
    ze_command_list_desc_t of_list = {.stype = ZE_STRUCTURE_TYPE_COMMAND_LIST_DESC, .commandQueueGroupOrdinal = ordinal};
    MUST(zeCommandListCreate(context, device, &of_list, &first.handle));
    MUST(zeCommandListCreate(context, device, &of_list, &second.handle));
}

static void create_kernel(ze_module_handle_t module, const char *name)
{
    ze_kernel_desc_t desc = {.stype = ZE_STRUCTURE_TYPE_KERNEL_DESC, .pKernelName = name};
    ze_kernel_handle_t kernel;
    MUST(zeKernelCreate(module, &desc, &kernel));
    MUST(zeKernelSetGroupSize(kernel, 16, 1, 1));
    void *address = NULL;
    MUST(zeModuleGetFunctionPointer(module, name, &address));
    size_t size = 0;
    MUST(zeKernelGetBinaryExp(kernel, &size, NULL));
    uint8_t *code = malloc(size);
    MUST(zeKernelGetBinaryExp(kernel, &size, code));
    gpu_kernel(name, (uint64_t)address, code, size);
    free(code);
    kernels[n_kernels].handle = kernel;
    kernels[n_kernels].address = (uint64_t)address;
    snprintf(kernels[n_kernels].name, sizeof kernels[n_kernels].name, "%s", name);
    n_kernels++;
}

static void create_module(const char *path)
{
    FILE *file = fopen(path, "rb");
    struct stat stat;
    if (!file || fstat(fileno(file), &stat)) {
        perror(path);
        exit(1);
    }
    uint8_t *bytes = malloc(stat.st_size);
    if (fread(bytes, 1, stat.st_size, file) != (size_t)stat.st_size)
        exit(1);
    fclose(file);
    ze_module_desc_t desc = {.stype = ZE_STRUCTURE_TYPE_MODULE_DESC, .format = ZE_MODULE_FORMAT_NATIVE};
    desc.inputSize = stat.st_size;
    desc.pInputModule = bytes;
    ze_module_handle_t module;
    MUST(zeModuleCreate(context, device, &desc, &module, NULL));
    const char *names[MOST];
    uint32_t count = MOST;
    MUST(zeModuleGetKernelNames(module, &count, names));
    for (uint32_t i = 0; i < count && n_kernels < KERNELS; i++)
        create_kernel(module, names[i]);
    free(bytes);
}

static void wait_for(const char *path)
{
    char ready[4096];
    snprintf(ready, sizeof ready, "%s.ready", path);
    fclose(fopen(ready, "w"));
    while (access(path, F_OK))
        usleep(1000);
}

int main(int argc, char **argv)
{
    const char *wait_file = NULL;
    int next = 1;
    if (argc > 2 && !strcmp(argv[1], "--wait-file")) {
        wait_file = argv[2];
        next = 3;
    }
    int rounds = next < argc ? atoi(argv[next++]) : 0;
    begin();
    while (next < argc)
        create_module(argv[next++]);
    if (n_kernels < KERNELS || rounds < 1) {
        fprintf(stderr, "lists: it takes a number of rounds, and modules with %d kernels\n", KERNELS);
        return 2;
    }
    fill_first();
    fill_second();
    if (wait_file)
        wait_for(wait_file);
    for (int round = 0; round < rounds; round++) {
        execute_here(&first);
        execute_there(&second);
        execute_here(&first);
        execute_both();
        execute_in_immediate(&first);
    }
    fill_again();
    for (int round = 0; round < rounds; round++)
        execute_here(&first);
    MUST(zeCommandListDestroy(first.handle));
    MUST(zeCommandListDestroy(second.handle));
    MUST(zeCommandListDestroy(immediate));
    printf("{\"pid\": %d, \"executions\": %ld, \"calls\": %ld, \"ns\": %.0f, \"kernels\": {", getpid(), executions, calls,
           here_ns / here);
    for (int i = 0; i < KERNELS; i++)
        printf("%s\"%s\": %ld", i ? ", " : "", kernels[i].name, kernels[i].ran);
    printf("}}\n");
    return 0;
}
