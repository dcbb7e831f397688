/* SPDX-License-Identifier: Apache-2.0
 * A program of Level Zero that copies and fills in every way, and keeps a ledger of it.
 *
 *     copies [--calls N] [--executions N] [--own FILE] [--places 1]
 *
 * On a command list that is executed later, on an immediate one, and on one for a copy engine, each way is taken N times by a
 * function of its own name. Behind its calls comes a JSON line: the function that was called, how often, the bytes of a call
 * (-1: of images), and the nanoseconds of a call, by this program's clock. The lists that are executed later are executed so often. With PrintKernelDispatchParameters=1 the driver itself prints a line before that for each kernel that it launches.
 *
 * FILE says what the stand-in's GPU is to execute (own.h).
 *
 * With --places there is one line only: the offsets in the driver's file of these functions, as the driver itself says.
 *
 * What the device cannot do (images, patterns on a copy engine) is left out, and is not called a second time. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include <level_zero/ze_api.h>
#include <level_zero/ze_ddi.h>

#include "gpu.h"
#include "own.h"

/* Call paths are what a recorder is tested with: such a function keeps its name and its frame. */
#define ON_THE_STACK __attribute__((noipa))

#define PROGRAM "copies"
#define RESULT "0x%x"
#include "must.h"

enum { BYTES = 1 << 20, SIDE = 64, MAX_LISTS = 3 };

static ze_driver_handle_t driver;
static ze_device_handle_t device;
static ze_context_handle_t context;
static char *to, *from; /* memory of the device */
static ze_image_handle_t images[2]; /* none where the device has no images */
static const char pattern[16] = "a pattern of 16";
static int calls = 1, executions = 1;

typedef ze_result_t copy_with_parameters_t(ze_command_list_handle_t, void *, const void *, size_t, const void *, ze_event_handle_t,
                                           uint32_t, ze_event_handle_t *);
typedef ze_result_t fill_with_parameters_t(ze_command_list_handle_t, void *, const void *, size_t, size_t, const void *,
                                           ze_event_handle_t, uint32_t, ze_event_handle_t *);
static copy_with_parameters_t *extended_copy; /* the driver's extensions, in no header */
static fill_with_parameters_t *extended_fill;

#define NO_EVENTS NULL, 0, NULL
#define WAY(name, call) \
    ON_THE_STACK static ze_result_t name(ze_command_list_handle_t list) { return call; }

static ze_copy_region_t plane = {0, 0, 0, 100, 50, 1}, block = {0, 0, 0, 100, 50, 4};

WAY(copy, zeCommandListAppendMemoryCopy(list, to, from, 65536, NO_EVENTS))
WAY(copy_unaligned, zeCommandListAppendMemoryCopy(list, to + 3, from + 3, 100001, NO_EVENTS))
WAY(copy_plane, zeCommandListAppendMemoryCopyRegion(list, to, &plane, 128, 0, from, &plane, 128, 0, NO_EVENTS))
WAY(copy_block, zeCommandListAppendMemoryCopyRegion(list, to, &block, 128, 8192, from, &block, 128, 8192, NO_EVENTS))
WAY(copy_from_context, zeCommandListAppendMemoryCopyFromContext(list, to, context, from, 4096, NO_EVENTS))
WAY(copy_with_parameters, zeCommandListAppendMemoryCopyWithParameters(list, to, from, 8192, NULL, NO_EVENTS))
WAY(copy_extended, extended_copy(list, to, from, 12288, NULL, NO_EVENTS))
WAY(fill, zeCommandListAppendMemoryFill(list, to, pattern, 1, 65536, NO_EVENTS))
WAY(fill_unaligned, zeCommandListAppendMemoryFill(list, to + 3, pattern, 1, 65531, NO_EVENTS))
WAY(fill_words, zeCommandListAppendMemoryFill(list, to, pattern, 4, 65536, NO_EVENTS))
WAY(fill_patterns, zeCommandListAppendMemoryFill(list, to, pattern, 16, 65552, NO_EVENTS))
WAY(fill_halves, zeCommandListAppendMemoryFill(list, to + 2, pattern, 2, 65534, NO_EVENTS))
WAY(fill_with_parameters, zeCommandListAppendMemoryFillWithParameters(list, to, pattern, 1, 4096, NULL, NO_EVENTS))
WAY(fill_extended, extended_fill(list, to, pattern, 1, 8192, NULL, NO_EVENTS))
WAY(image_from_memory, zeCommandListAppendImageCopyFromMemory(list, images[0], from, NULL, NO_EVENTS))
WAY(image_from_rows, zeCommandListAppendImageCopyFromMemoryExt(list, images[0], from, NULL, 0, 0, NO_EVENTS))
WAY(image_to_memory, zeCommandListAppendImageCopyToMemory(list, to, images[0], NULL, NO_EVENTS))
WAY(image_to_rows, zeCommandListAppendImageCopyToMemoryExt(list, to, images[0], NULL, 0, 0, NO_EVENTS))
WAY(image_copy, zeCommandListAppendImageCopy(list, images[1], images[0], NO_EVENTS))
WAY(image_copy_region, zeCommandListAppendImageCopyRegion(list, images[1], images[0], NULL, NULL, NO_EVENTS))

static const struct {
    const char *name, *function;
    ze_result_t (*call)(ze_command_list_handle_t);
    long bytes;
} WAYS[] = {
#define ONE(way, function, bytes) {#way, function, way, bytes}
    ONE(copy, "zeCommandListAppendMemoryCopy", 65536),
    ONE(copy_unaligned, "zeCommandListAppendMemoryCopy", 100001),
    ONE(copy_plane, "zeCommandListAppendMemoryCopyRegion", 100 * 50),
    ONE(copy_block, "zeCommandListAppendMemoryCopyRegion", 100 * 50 * 4),
    ONE(copy_from_context, "zeCommandListAppendMemoryCopyFromContext", 4096),
    ONE(copy_with_parameters, "zeCommandListAppendMemoryCopyWithParameters", 8192),
    ONE(copy_extended, "zexCommandListAppendMemoryCopyWithParameters", 12288),
    ONE(fill, "zeCommandListAppendMemoryFill", 65536),
    ONE(fill_unaligned, "zeCommandListAppendMemoryFill", 65531),
    ONE(fill_words, "zeCommandListAppendMemoryFill", 65536),
    ONE(fill_patterns, "zeCommandListAppendMemoryFill", 65552),
    ONE(fill_halves, "zeCommandListAppendMemoryFill", 65534),
    ONE(fill_with_parameters, "zeCommandListAppendMemoryFillWithParameters", 4096),
    ONE(fill_extended, "zexCommandListAppendMemoryFillWithParameters", 8192),
    ONE(image_from_memory, "zeCommandListAppendImageCopyFromMemory", -1),
    ONE(image_from_rows, "zeCommandListAppendImageCopyFromMemoryExt", -1),
    ONE(image_to_memory, "zeCommandListAppendImageCopyToMemory", -1),
    ONE(image_to_rows, "zeCommandListAppendImageCopyToMemoryExt", -1),
    ONE(image_copy, "zeCommandListAppendImageCopy", -1),
    ONE(image_copy_region, "zeCommandListAppendImageCopyRegion", -1),
};

static int takes(unsigned way, int computes)
{
    if (WAYS[way].bytes < 0)
        return images[0] && images[1] && computes;
    if (WAYS[way].call == copy_extended || WAYS[way].call == fill_extended)
        return extended_copy && extended_fill;
    return 1;
}

static int made[sizeof WAYS / sizeof *WAYS]; /* calls of each way by the last copy_all */

/* What is on the list. */
static void execute_made(const char *list)
{
    for (unsigned way = 0; way < sizeof WAYS / sizeof *WAYS; way++)
        for (int i = 0; i < made[way]; i++)
            execute_all(list, WAYS[way].name);
}

static double now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1e9 + time.tv_nsec;
}

ON_THE_STACK static void copy_all(const char *name, ze_command_list_handle_t list, int computes, int is_immediate)
{
    for (unsigned way = 0; way < sizeof WAYS / sizeof *WAYS; way++) {
        made[way] = 0;
        if (!takes(way, computes))
            continue;
        ze_result_t result = ZE_RESULT_SUCCESS;
        double begin = now();
        for (; made[way] < calls && !result; made[way]++) {
            result = WAYS[way].call(list);
            if (is_immediate)
                execute_all(name, WAYS[way].name);
        }
        double ns = (now() - begin) / made[way];
        if (result && computes)
            must(result, WAYS[way].name);
        printf("{\"pid\": %d, \"list\": \"%s\", \"way\": \"%s\", \"function\": \"%s\", \"calls\": %d, \"bytes\": %ld, \"ns\": %.1f}\n",
               getpid(), name, WAYS[way].name, WAYS[way].function, made[way], WAYS[way].bytes, ns);
    }
}

static unsigned long offset(void *function)
{
    Dl_info where;
    return dladdr(function, &where) ? (char *)function - (char *)where.dli_fbase : 0;
}

static void print_places(void)
{
    void *library = dlopen(getenv("ZE_ENABLE_ALT_DRIVERS"), RTLD_NOW | RTLD_NOLOAD);
    ze_result_t (*fill_table)(ze_api_version_t, ze_command_list_dditable_t *) =
        library ? dlsym(library, "zeGetCommandListProcAddrTable") : NULL;
    if (!fill_table)
        must(ZE_RESULT_ERROR_UNINITIALIZED, "zeGetCommandListProcAddrTable");
    ze_command_list_dditable_t table = {0};
    MUST(fill_table(ZE_API_VERSION_CURRENT, &table));
#define PLACE(name) printf("\"zeCommandListAppend%s\": %lu, ", #name, offset(table.pfnAppend##name));
    printf("{");
    PLACE(MemoryCopy)
    PLACE(MemoryCopyRegion)
    PLACE(MemoryCopyFromContext)
    PLACE(MemoryCopyWithParameters)
    PLACE(MemoryFill)
    PLACE(MemoryFillWithParameters)
    PLACE(ImageCopy)
    PLACE(ImageCopyRegion)
    PLACE(ImageCopyToMemory)
    PLACE(ImageCopyFromMemory)
    PLACE(ImageCopyToMemoryExt)
    PLACE(ImageCopyFromMemoryExt)
    printf("\"zexCommandListAppendMemoryCopyWithParameters\": %lu, ", offset(extended_copy));
    printf("\"zexCommandListAppendMemoryFillWithParameters\": %lu}\n", offset(extended_fill));
    fflush(stdout);
    _exit(0);
}

static void create_images(void)
{
    ze_image_desc_t desc = {.stype = ZE_STRUCTURE_TYPE_IMAGE_DESC, .type = ZE_IMAGE_TYPE_2D, .width = SIDE, .height = SIDE, .depth = 1};
    desc.format.layout = ZE_IMAGE_FORMAT_LAYOUT_8_8_8_8;
    desc.format.type = ZE_IMAGE_FORMAT_TYPE_UINT;
    for (int i = 0; i < 2; i++)
        if (zeImageCreate(context, device, &desc, &images[i]))
            images[i] = NULL;
}

static void begin(void)
{
    MUST(zeInit(ZE_INIT_FLAG_GPU_ONLY));
    uint32_t one = 1;
    MUST(zeDriverGet(&one, &driver));
    one = 1;
    MUST(zeDeviceGet(driver, &one, &device));
    ze_context_desc_t desc = {.stype = ZE_STRUCTURE_TYPE_CONTEXT_DESC};
    MUST(zeContextCreate(driver, &desc, &context));
    ze_device_mem_alloc_desc_t memory = {.stype = ZE_STRUCTURE_TYPE_DEVICE_MEM_ALLOC_DESC};
    MUST(zeMemAllocDevice(context, &memory, BYTES, 4096, device, (void **)&to));
    MUST(zeMemAllocDevice(context, &memory, BYTES, 4096, device, (void **)&from));
    zeDriverGetExtensionFunctionAddress(driver, "zexCommandListAppendMemoryCopyWithParameters", (void **)&extended_copy);
    zeDriverGetExtensionFunctionAddress(driver, "zexCommandListAppendMemoryFillWithParameters", (void **)&extended_fill);
    create_images();
}

ON_THE_STACK static void use(uint32_t ordinal, int computes)
{
    ze_command_queue_desc_t desc = {.stype = ZE_STRUCTURE_TYPE_COMMAND_QUEUE_DESC, .ordinal = ordinal};
    ze_command_queue_handle_t queue;
    MUST(zeCommandQueueCreate(context, device, &desc, &queue));
    ze_command_list_desc_t of = {.stype = ZE_STRUCTURE_TYPE_COMMAND_LIST_DESC, .commandQueueGroupOrdinal = ordinal};
    ze_command_list_handle_t list;
    MUST(zeCommandListCreate(context, device, &of, &list));
    copy_all(computes ? "regular" : "engine", list, computes, 0);
    MUST(zeCommandListClose(list));
    for (int i = 0; i < executions; i++) {
        MUST(zeCommandQueueExecuteCommandLists(queue, 1, &list, NULL));
        if (computes)
            execute_made("regular");
        MUST(zeCommandQueueSynchronize(queue, UINT64_MAX));
    }
    if (!computes)
        return;
    desc.mode = ZE_COMMAND_QUEUE_MODE_ASYNCHRONOUS;
    MUST(zeCommandListCreateImmediate(context, device, &desc, &list));
    copy_all("immediate", list, computes, 1);
    MUST(zeCommandListHostSynchronize(list, UINT64_MAX));
}

int main(int argc, char **argv)
{
    int places = 0;
    for (int i = 1; i < argc; i += 2) {
        if (i + 1 < argc && !strcmp(argv[i], "--calls"))
            calls = atoi(argv[i + 1]);
        else if (i + 1 < argc && !strcmp(argv[i], "--executions"))
            executions = atoi(argv[i + 1]);
        else if (i + 1 < argc && !strcmp(argv[i], "--own"))
            own = argv[i + 1];
        else if (i + 1 < argc && !strcmp(argv[i], "--places"))
            places = atoi(argv[i + 1]);
        else
            return 2;
    }
    gpu_connect();
    begin();
    if (places)
        print_places();
    if (own)
        read_own();
    ze_command_queue_group_properties_t groups[16] = {{.stype = ZE_STRUCTURE_TYPE_COMMAND_QUEUE_GROUP_PROPERTIES}};
    uint32_t count = sizeof groups / sizeof *groups;
    MUST(zeDeviceGetCommandQueueGroupProperties(device, &count, groups));
    int used[2] = {0};
    for (uint32_t ordinal = 0; ordinal < count; ordinal++) {
        int computes = !!(groups[ordinal].flags & ZE_COMMAND_QUEUE_GROUP_PROPERTY_FLAG_COMPUTE);
        if (!used[computes]++)
            use(ordinal, computes);
    }
    gpu_wait();
    fflush(stdout);
    _exit(0);
}
