/* SPDX-License-Identifier: Apache-2.0
 * Vulkan compute: a program that dispatches shaders, from a function for each.
 *
 *     compute [OPTION...] SPECIAL.spv TABLE.spv
 *
 *   --dispatches N   (3) of each shader in each command buffer
 *   --rounds N       (2) how often the command buffers are filled
 *   --submits N      (2) of each filling
 *   --secondary      dispatches go to secondary command buffers, which a primary one executes twice
 *   --pool           the pool is reset before each filling, in place of vkBeginCommandBuffer's own reset
 *   --anew           pipelines are destroyed and made again in each round, with other shaders
 *   --names          pipelines have debug names, shader_1 and so on
 *   --depth N        (0) frames between the program's main function and those that dispatch, besides
 *   --entries        entry points are called calc and look, not main
 *   --lanes          shaders 1 and 3 have 16 lanes, 2 and 4 have 32
 *   --hostile-names  pipelines have names that are no text, that control terminals, and of 64 KiB
 *   --direct         every function is the driver's own, by vkGetDeviceProcAddr, as most engines call it
 *   --indirect       half of the dispatches are indirect
 *   --threads N      as many threads instead, each with its own pool and command buffer, which it fills and submits in each round
 *   --seconds S      goes on with rounds for as long, whatever --rounds says
 *
 * Shader n is dispatched by dispatch_n, in n groups of threads, so that the walkers in a batch say by which function. Prints
 * its process, how often each function dispatched, how often each walker was submitted, and the mean CPU time of a dispatch, as JSON. */
#include <pthread.h>

#include "vulkan_program.h"

enum { SHADERS = 4 };
static int dispatches = 3, rounds = 2, submits = 2, threads, depth;
static double seconds;
static bool secondary, reset_pool, anew, names, lanes, entries, hostile_names, direct, indirect;

static VkPipeline pipelines[SHADERS];
static VkPipelineLayout layout;
static VkDescriptorSet set;
static VkBuffer buffer, groups; /* groups: VkDispatchIndirectCommand of each shader */
static VkCommandPool pool;
static VkShaderModule modules[2];
static unsigned long appended[SHADERS], submitted[SHADERS];
static double appending; /* seconds that dispatches took */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* of these numbers, and of the queue */

static PFN_vkCmdBindPipeline bind_pipeline = vkCmdBindPipeline;
static PFN_vkCmdDispatch dispatch = vkCmdDispatch;
static PFN_vkCmdDispatchIndirect dispatch_indirect = vkCmdDispatchIndirect;
static PFN_vkQueueSubmit queue_submit = vkQueueSubmit;
static PFN_vkBeginCommandBuffer begin_commands = vkBeginCommandBuffer;
static PFN_vkEndCommandBuffer end_commands = vkEndCommandBuffer;

static double cpu_seconds(void)
{
    struct timespec time;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
    return (double)time.tv_sec + (double)time.tv_nsec / 1e9;
}

static void append(VkCommandBuffer commands, uint32_t number)
{
    uint32_t n = 64;
    bind_pipeline(commands, VK_PIPELINE_BIND_POINT_COMPUTE, pipelines[number - 1]);
    vkCmdBindDescriptorSets(commands, VK_PIPELINE_BIND_POINT_COMPUTE, layout, 0, 1, &set, 0, NULL);
    vkCmdPushConstants(commands, layout, VK_SHADER_STAGE_COMPUTE_BIT, 0, 4, &n);
    double begun = cpu_seconds();
    for (int i = 0; i < dispatches; i++) {
        if (indirect && i % 2)
            dispatch_indirect(commands, groups, 12 * (number - 1));
        else
            dispatch(commands, number, 1, 1);
    }
    double took = cpu_seconds() - begun;
    pthread_mutex_lock(&lock);
    appended[number - 1] += (unsigned long)dispatches;
    appending += took;
    pthread_mutex_unlock(&lock);
}

#define DISPATCH(number)                                                                                                                   \
    __attribute__((noinline)) void dispatch_##number(VkCommandBuffer commands)                                                             \
    {                                                                                                                                      \
        append(commands, number);                                                                                                          \
        __asm__ volatile("");                                                                                                              \
    }
DISPATCH(1)
DISPATCH(2)
DISPATCH(3)
DISPATCH(4)

static void begin(VkCommandBuffer commands, bool is_secondary)
{
    VkCommandBufferInheritanceInfo inherited = {.sType = VK_STRUCTURE_TYPE_COMMAND_BUFFER_INHERITANCE_INFO};
    VkCommandBufferBeginInfo info = {
        .sType = VK_STRUCTURE_TYPE_COMMAND_BUFFER_BEGIN_INFO,
        .pInheritanceInfo = is_secondary ? &inherited : NULL,
        .flags = VK_COMMAND_BUFFER_USAGE_SIMULTANEOUS_USE_BIT,
    };
    CHECK(begin_commands(commands, &info));
}

__attribute__((noinline)) void fill_commands(VkCommandBuffer commands)
{
    dispatch_1(commands);
    dispatch_2(commands);
    dispatch_3(commands);
    dispatch_4(commands);
}

static __attribute__((noinline)) void fill_deeper(VkCommandBuffer commands, int left)
{
    if (left)
        fill_deeper(commands, left - 1);
    else
        fill_commands(commands);
    __asm__ volatile("");
}

__attribute__((noinline)) void submit_commands(VkCommandBuffer commands)
{
    VkSubmitInfo submit = {.sType = VK_STRUCTURE_TYPE_SUBMIT_INFO, .commandBufferCount = 1, .pCommandBuffers = &commands};
    CHECK(queue_submit(queue, 1, &submit, VK_NULL_HANDLE));
    CHECK(vkQueueWaitIdle(queue));
}

static const char *entry_name(bool second)
{
    return !entries ? "main" : second ? "look" : "calc";
}

static void make_pipelines(VkInstance instance, int generation)
{
    PFN_vkSetDebugUtilsObjectNameEXT set_name = (void *)vkGetInstanceProcAddr(instance, "vkSetDebugUtilsObjectNameEXT");
    for (uint32_t i = 0; i < SHADERS; i++) {
        uint32_t value = 3 + 5 * i + 2 * (uint32_t)generation;
        VkSpecializationMapEntry entry = {0, 0, 4};
        VkSpecializationInfo special = {1, &entry, 4, &value};
        VkPipelineShaderStageRequiredSubgroupSizeCreateInfo size = {
            .sType = VK_STRUCTURE_TYPE_PIPELINE_SHADER_STAGE_REQUIRED_SUBGROUP_SIZE_CREATE_INFO, .requiredSubgroupSize = i % 2 ? 32 : 16};
        VkComputePipelineCreateInfo info = {
            .sType = VK_STRUCTURE_TYPE_COMPUTE_PIPELINE_CREATE_INFO,
            .stage = {.sType = VK_STRUCTURE_TYPE_PIPELINE_SHADER_STAGE_CREATE_INFO,
                      .pNext = lanes ? &size : NULL,
                      .stage = VK_SHADER_STAGE_COMPUTE_BIT,
                      .module = modules[i == SHADERS - 1],
                      .pName = entry_name(i == SHADERS - 1),
                      .pSpecializationInfo = &special},
            .layout = layout,
        };
        if (pipelines[i])
            vkDestroyPipeline(device, pipelines[i], NULL);
        CHECK(vkCreateComputePipelines(device, VK_NULL_HANDLE, 1, &info, NULL, &pipelines[i]));
        static char name[1 << 16];
        static const char *hostile[] = {"\x1b[2J\x1b]0;x\a;a\nb", "\xff\xfe\xc0\x80\xed\xa0\x80", "../../../etc/passwd\r\xe2\x80\xae", NULL};
        snprintf(name, sizeof(name), "shader_%u", i + 1);
        if (hostile_names) {
            memset(name, 'A' , sizeof(name) - 1);
            if (hostile[i])
                strcpy(name, hostile[i]);
        }
        VkDebugUtilsObjectNameInfoEXT named = {.sType = VK_STRUCTURE_TYPE_DEBUG_UTILS_OBJECT_NAME_INFO_EXT,
                                               .objectType = VK_OBJECT_TYPE_PIPELINE,
                                               .objectHandle = (uint64_t)pipelines[i],
                                               .pObjectName = name};
        if (names || hostile_names)
            CHECK(set_name(device, &named));
    }
}

static void make_objects(void)
{
    buffer = make_buffer(1 << 20, NULL, 0);
    uint32_t commands[SHADERS][3];
    for (uint32_t i = 0; i < SHADERS; i++)
        commands[i][0] = i + 1, commands[i][1] = commands[i][2] = 1;
    groups = make_buffer(4096, commands, sizeof(commands));
    set = make_set(buffer, &layout);
    VkCommandPoolCreateInfo commands_info = {.sType = VK_STRUCTURE_TYPE_COMMAND_POOL_CREATE_INFO,
                                             .flags = VK_COMMAND_POOL_CREATE_RESET_COMMAND_BUFFER_BIT};
    CHECK(vkCreateCommandPool(device, &commands_info, NULL, &pool));
}

static void run_round(VkCommandBuffer primary, VkCommandBuffer second)
{
    unsigned long before[SHADERS];
    int times = secondary ? 2 : 1;
    memcpy(before, appended, sizeof(before));
    if (reset_pool)
        CHECK(vkResetCommandPool(device, pool, 0));
    if (secondary) {
        begin(second, true);
        fill_commands(second);
        CHECK(end_commands(second));
    }
    begin(primary, false);
    if (secondary)
        for (int i = 0; i < times; i++)
            vkCmdExecuteCommands(primary, 1, &second);
    else
        fill_deeper(primary, depth);
    CHECK(end_commands(primary));
    for (int i = 0; i < submits; i++)
        submit_commands(primary);
    for (int i = 0; i < SHADERS; i++)
        submitted[i] += (appended[i] - before[i]) * (unsigned long)(submits * times);
}

static void *run_thread(void *unused)
{
    (void)unused;
    VkCommandPoolCreateInfo info = {.sType = VK_STRUCTURE_TYPE_COMMAND_POOL_CREATE_INFO,
                                    .flags = VK_COMMAND_POOL_CREATE_RESET_COMMAND_BUFFER_BIT};
    VkCommandPool own;
    CHECK(vkCreateCommandPool(device, &info, NULL, &own));
    VkCommandBuffer commands = make_commands(own, false);
    for (int round = 0; round < rounds; round++) {
        begin(commands, false);
        fill_commands(commands);
        CHECK(end_commands(commands));
        pthread_mutex_lock(&lock);
        for (int i = 0; i < submits; i++)
            submit_commands(commands);
        for (int i = 0; i < SHADERS; i++)
            submitted[i] += (unsigned long)(dispatches * submits);
        pthread_mutex_unlock(&lock);
    }
    return NULL;
}

static void run_threads(void)
{
    pthread_t *started = calloc((size_t)threads, sizeof(*started));
    for (int i = 0; i < threads; i++)
        if (pthread_create(&started[i], NULL, run_thread, NULL))
            abort();
    for (int i = 0; i < threads; i++)
        pthread_join(started[i], NULL);
    rounds = 0;
}

int main(int argc, char **argv)
{
    const char *paths[2] = {0};
    int given = 0;
    for (int i = 1; i < argc; i++) {
        const char *option = argv[i];
        if (strncmp(option, "--", 2) && given < 2)
            paths[given++] = option;
        secondary |= !strcmp(option, "--secondary");
        reset_pool |= !strcmp(option, "--pool");
        anew |= !strcmp(option, "--anew");
        names |= !strcmp(option, "--names");
        entries |= !strcmp(option, "--entries");
        lanes |= !strcmp(option, "--lanes");
        hostile_names |= !strcmp(option, "--hostile-names");
        direct |= !strcmp(option, "--direct");
        indirect |= !strcmp(option, "--indirect");
        if (i + 1 < argc && !strcmp(option, "--dispatches"))
            dispatches = atoi(argv[++i]);
        if (i + 1 < argc && !strcmp(option, "--rounds"))
            rounds = atoi(argv[++i]);
        if (i + 1 < argc && !strcmp(option, "--submits"))
            submits = atoi(argv[++i]);
        if (i + 1 < argc && !strcmp(option, "--threads"))
            threads = atoi(argv[++i]);
        if (i + 1 < argc && !strcmp(option, "--depth"))
            depth = atoi(argv[++i]);
        if (i + 1 < argc && !strcmp(option, "--seconds"))
            seconds = atof(argv[++i]);
    }
    if (given < 2)
        return 2;
    VkInstance instance = make_device();
    if (direct) {
        bind_pipeline = (void *)vkGetDeviceProcAddr(device, "vkCmdBindPipeline");
        dispatch = (void *)vkGetDeviceProcAddr(device, "vkCmdDispatch");
        dispatch_indirect = (void *)vkGetDeviceProcAddr(device, "vkCmdDispatchIndirect");
        queue_submit = (void *)vkGetDeviceProcAddr(device, "vkQueueSubmit");
        begin_commands = (void *)vkGetDeviceProcAddr(device, "vkBeginCommandBuffer");
        end_commands = (void *)vkGetDeviceProcAddr(device, "vkEndCommandBuffer");
    }
    make_objects();
    for (int i = 0; i < 2; i++)
        modules[i] = read_module(paths[i], entry_name(i));
    VkCommandBuffer commands[2];
    for (int i = 0; i < 2; i++)
        commands[i] = make_commands(pool, i);
    double end = now() + seconds;
    if (threads) {
        make_pipelines(instance, 0);
        run_threads();
    }
    for (int i = 0; i < rounds || now() < end; i++) {
        if (!i || anew)
            make_pipelines(instance, i);
        run_round(commands[0], commands[1]);
    }
    printf("{\"pid\": %d, \"appended\": [%lu, %lu, %lu, %lu], \"submitted\": [%lu, %lu, %lu, %lu], \"ns\": %.1f}\n", getpid(), appended[0], appended[1],
           appended[2], appended[3], submitted[0], submitted[1], submitted[2], submitted[3], appending * 1e9 / (double)(appended[0] + appended[1] + appended[2] + appended[3]));
    fflush(stdout);
    vkDestroyCommandPool(device, pool, NULL);
    vkDestroyDevice(device, NULL);
    return 0;
}
