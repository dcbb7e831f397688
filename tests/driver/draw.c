/* SPDX-License-Identifier: Apache-2.0
 * Vulkan graphics: a program that draws into an image, without a window, from a function for each pipeline.
 *
 *     draw [OPTION...] VERTEX.spv FRAGMENT.spv GEOMETRY.spv CONTROL.spv EVALUATION.spv SPECIAL.spv [MESH.spv TASK.spv]
 *
 *   --draws N        (3) with each pipeline, each time that it is bound
 *   --rounds N       (2) how often the command buffer is filled
 *   --submits N      (2) of each filling
 *   --secondary      draws go to a secondary command buffer, which the primary one executes twice
 *   --names          pipelines have debug names, pipeline_30 and so on
 *   --entries        entry points are called vert, frag and so on, not main
 *   --anew           pipelines are destroyed and made again in each round, with other shaders
 *   --indirect       every other draw is indirect, and of those with mesh shaders every other of these has its number in memory
 *   --seconds S      goes on with rounds for as long, whatever --rounds says
 *   --bind           each draw binds its pipeline anew
 *
 * Pipeline n draws n vertices, by draw_n, so that the primitives in a batch say by which function: 30 and 60 have a vertex and a
 * fragment shader, 90 all five stages, and 120 a vertex shader that 30 has, too. With mesh shaders there are 150, of groups, which has a
 * mesh and a fragment shader, and 180, which has a task shader, too. Between draws a compute shader is dispatched, in 7
 * groups. Prints its process, how often each function drew, and how often that was submitted, and the mean time of a draw, as JSON. */
#include "vulkan_program.h"

enum { PIPELINES = 6, MESH_FROM = 4, VERTICES = 30, GROUPS = 7, SIDE = 64 };
enum { VERTEX, FRAGMENT, GEOMETRY, CONTROL, EVALUATION, COMPUTE, MESH, TASK, MODULES };
static int draws = 3, rounds = 2, submits = 2;
static double seconds;
static bool secondary, names, entries, anew, indirect, bind_always;
static const char *const entry_names[] = {"vert", "frag", "geom", "ctrl", "eval", "disp", "mesh", "task"}; /* by module */

static VkPipeline pipelines[PIPELINES], compute;
static VkPipelineLayout layout;
static VkDescriptorSet set;
static VkBuffer vertices; /* VkDrawIndirectCommand of each pipeline */
static VkImage image;
static VkImageView view;
static VkCommandPool pool;
static VkShaderModule modules[MODULES];
static unsigned long appended[PIPELINES + 1], submitted[PIPELINES + 1]; /* dispatches last */
static PFN_vkCmdDrawMeshTasksEXT draw_mesh;
static PFN_vkCmdDrawMeshTasksIndirectEXT draw_mesh_indirect;
static PFN_vkCmdDrawMeshTasksIndirectCountEXT draw_mesh_counted;
enum { GROUPS_AT = 1024, COUNT_AT = 2048 }; /* in the buffer: numbers of groups of each pipeline, and a number of draws */
static double appending; /* seconds that draws took */
static const VkFormat format = VK_FORMAT_R8G8B8A8_UNORM;

static void append(VkCommandBuffer commands, uint32_t number)
{
    vkCmdBindPipeline(commands, VK_PIPELINE_BIND_POINT_GRAPHICS, pipelines[number - 1]);
    double begun = now();
    for (int i = 0; i < draws; i++) {
        if (bind_always && i)
            vkCmdBindPipeline(commands, VK_PIPELINE_BIND_POINT_GRAPHICS, pipelines[number - 1]);
        bool has_mesh = number > MESH_FROM;
        VkDeviceSize groups_at = GROUPS_AT + 12 * (number - 1);
        if (has_mesh && indirect && i % 4 == 3)
            draw_mesh_counted(commands, vertices, groups_at, vertices, COUNT_AT, 1, 12);
        else if (has_mesh && indirect && i % 2)
            draw_mesh_indirect(commands, vertices, groups_at, 1, 12);
        else if (has_mesh)
            draw_mesh(commands, VERTICES * number, 1, 1);
        else if (indirect && i % 2)
            vkCmdDrawIndirect(commands, vertices, 16 * (number - 1), 1, 16);
        else
            vkCmdDraw(commands, VERTICES * number, 1, 0, 0);
        appended[number - 1]++;
    }
    appending += now() - begun;
}

#define DRAW(vertices, number)                                                                                                             \
    __attribute__((noinline)) void draw_##vertices(VkCommandBuffer commands)                                                               \
    {                                                                                                                                      \
        append(commands, number);                                                                                                          \
        __asm__ volatile("");                                                                                                              \
    }
DRAW(30, 1)
DRAW(60, 2)
DRAW(90, 3)
DRAW(120, 4)
DRAW(150, 5)
DRAW(180, 6)

__attribute__((noinline)) void dispatch_7(VkCommandBuffer commands)
{
    uint32_t n = 64;
    vkCmdBindPipeline(commands, VK_PIPELINE_BIND_POINT_COMPUTE, compute);
    vkCmdBindDescriptorSets(commands, VK_PIPELINE_BIND_POINT_COMPUTE, layout, 0, 1, &set, 0, NULL);
    vkCmdPushConstants(commands, layout, VK_SHADER_STAGE_COMPUTE_BIT, 0, 4, &n);
    vkCmdDispatch(commands, GROUPS, 1, 1);
    appended[PIPELINES]++;
    __asm__ volatile("");
}

static void begin(VkCommandBuffer commands, bool is_secondary)
{
    VkCommandBufferInheritanceRenderingInfo rendering = {.sType = VK_STRUCTURE_TYPE_COMMAND_BUFFER_INHERITANCE_RENDERING_INFO,
                                                         .colorAttachmentCount = 1,
                                                         .pColorAttachmentFormats = &format,
                                                         .rasterizationSamples = VK_SAMPLE_COUNT_1_BIT};
    VkCommandBufferInheritanceInfo inherited = {.sType = VK_STRUCTURE_TYPE_COMMAND_BUFFER_INHERITANCE_INFO, .pNext = &rendering};
    VkCommandBufferBeginInfo info = {
        .sType = VK_STRUCTURE_TYPE_COMMAND_BUFFER_BEGIN_INFO,
        .pInheritanceInfo = is_secondary ? &inherited : NULL,
        .flags = VK_COMMAND_BUFFER_USAGE_SIMULTANEOUS_USE_BIT | (is_secondary ? VK_COMMAND_BUFFER_USAGE_RENDER_PASS_CONTINUE_BIT : 0),
    };
    CHECK(vkBeginCommandBuffer(commands, &info));
}

static void begin_rendering(VkCommandBuffer commands, bool clear)
{
    VkRenderingAttachmentInfo attachment = {.sType = VK_STRUCTURE_TYPE_RENDERING_ATTACHMENT_INFO,
                                            .imageView = view,
                                            .imageLayout = VK_IMAGE_LAYOUT_GENERAL,
                                            .loadOp = clear ? VK_ATTACHMENT_LOAD_OP_CLEAR : VK_ATTACHMENT_LOAD_OP_LOAD,
                                            .storeOp = VK_ATTACHMENT_STORE_OP_STORE,
                                            .clearValue = {.color = {.float32 = {0.1f, 0.2f, 0.3f, 0.4f}}}};
    VkRenderingInfo info = {.sType = VK_STRUCTURE_TYPE_RENDERING_INFO,
                            .flags = secondary ? VK_RENDERING_CONTENTS_SECONDARY_COMMAND_BUFFERS_BIT : 0,
                            .renderArea = {{0, 0}, {SIDE, SIDE}},
                            .layerCount = 1,
                            .colorAttachmentCount = 1,
                            .pColorAttachments = &attachment};
    vkCmdBeginRendering(commands, &info);
}

__attribute__((noinline)) void fill_commands(VkCommandBuffer commands)
{
    draw_30(commands);
    draw_60(commands);
    draw_30(commands);
    draw_90(commands);
    draw_120(commands);
    if (with_mesh) {
        draw_150(commands);
        draw_180(commands);
        draw_150(commands);
    }
    draw_30(commands);
}

static void make_pipelines(VkInstance instance, uint32_t generation)
{
    static const VkShaderStageFlagBits bits[] = {VK_SHADER_STAGE_VERTEX_BIT, VK_SHADER_STAGE_FRAGMENT_BIT, VK_SHADER_STAGE_GEOMETRY_BIT,
                                                 VK_SHADER_STAGE_TESSELLATION_CONTROL_BIT, VK_SHADER_STAGE_TESSELLATION_EVALUATION_BIT};
    static const VkShaderStageFlagBits mesh_bits[] = {VK_SHADER_STAGE_MESH_BIT_EXT, VK_SHADER_STAGE_FRAGMENT_BIT, VK_SHADER_STAGE_TASK_BIT_EXT};
    static const int mesh_modules[] = {MESH, FRAGMENT, TASK};
    PFN_vkSetDebugUtilsObjectNameEXT set_name = (void *)vkGetInstanceProcAddr(instance, "vkSetDebugUtilsObjectNameEXT");
    VkSpecializationMapEntry entry = {0, 0, 4};
    for (uint32_t i = 0; i < (with_mesh ? PIPELINES : MESH_FROM); i++) {
        bool all = i == 2, has_mesh = i >= MESH_FROM;
        uint32_t values[2] = {3 + 5 * (i % 3) + 2 * generation, 4 + 5 * i + 2 * generation}; /* of the vertex shader, and of the others */
        VkSpecializationInfo special[2] = {{1, &entry, 4, &values[0]}, {1, &entry, 4, &values[1]}};
        VkPipelineShaderStageCreateInfo stages[5];
        for (int stage = VERTEX; stage <= EVALUATION; stage++)
            stages[stage] = (VkPipelineShaderStageCreateInfo){.sType = VK_STRUCTURE_TYPE_PIPELINE_SHADER_STAGE_CREATE_INFO,
                                                              .stage = bits[stage],
                                                              .module = modules[stage],
                                                              .pName = entries ? entry_names[stage] : "main",
                                                              .pSpecializationInfo = &special[stage != VERTEX]};
        for (int stage = 0; has_mesh && stage < 3; stage++) {
            stages[stage].stage = mesh_bits[stage];
            stages[stage].module = modules[mesh_modules[stage]];
            stages[stage].pName = entries ? entry_names[mesh_modules[stage]] : "main";
        }
        VkPipelineVertexInputStateCreateInfo input = {.sType = VK_STRUCTURE_TYPE_PIPELINE_VERTEX_INPUT_STATE_CREATE_INFO};
        VkPipelineInputAssemblyStateCreateInfo assembly = {.sType = VK_STRUCTURE_TYPE_PIPELINE_INPUT_ASSEMBLY_STATE_CREATE_INFO,
                                                           .topology = all ? VK_PRIMITIVE_TOPOLOGY_PATCH_LIST : VK_PRIMITIVE_TOPOLOGY_TRIANGLE_LIST};
        VkPipelineTessellationStateCreateInfo tessellation = {.sType = VK_STRUCTURE_TYPE_PIPELINE_TESSELLATION_STATE_CREATE_INFO,
                                                              .patchControlPoints = 3};
        VkViewport whole = {0, 0, SIDE, SIDE, 0, 1};
        VkRect2D scissor = {{0, 0}, {SIDE, SIDE}};
        VkPipelineViewportStateCreateInfo viewport = {.sType = VK_STRUCTURE_TYPE_PIPELINE_VIEWPORT_STATE_CREATE_INFO,
                                                      .viewportCount = 1,
                                                      .pViewports = &whole,
                                                      .scissorCount = 1,
                                                      .pScissors = &scissor};
        VkPipelineRasterizationStateCreateInfo raster = {.sType = VK_STRUCTURE_TYPE_PIPELINE_RASTERIZATION_STATE_CREATE_INFO, .lineWidth = 1};
        VkPipelineMultisampleStateCreateInfo samples = {.sType = VK_STRUCTURE_TYPE_PIPELINE_MULTISAMPLE_STATE_CREATE_INFO,
                                                        .rasterizationSamples = VK_SAMPLE_COUNT_1_BIT};
        VkPipelineColorBlendAttachmentState blended = {.colorWriteMask = 0xf};
        VkPipelineColorBlendStateCreateInfo blend = {
            .sType = VK_STRUCTURE_TYPE_PIPELINE_COLOR_BLEND_STATE_CREATE_INFO, .attachmentCount = 1, .pAttachments = &blended};
        VkPipelineRenderingCreateInfo rendering = {
            .sType = VK_STRUCTURE_TYPE_PIPELINE_RENDERING_CREATE_INFO, .colorAttachmentCount = 1, .pColorAttachmentFormats = &format};
        VkGraphicsPipelineCreateInfo info = {.sType = VK_STRUCTURE_TYPE_GRAPHICS_PIPELINE_CREATE_INFO,
                                             .pNext = &rendering,
                                             .stageCount = all ? 5 : i == PIPELINES - 1 ? 3 : 2,
                                             .pStages = stages,
                                             .pVertexInputState = &input,
                                             .pInputAssemblyState = &assembly,
                                             .pTessellationState = &tessellation,
                                             .pViewportState = &viewport,
                                             .pRasterizationState = &raster,
                                             .pMultisampleState = &samples,
                                             .pColorBlendState = &blend,
                                             .layout = layout};
        if (pipelines[i])
            vkDestroyPipeline(device, pipelines[i], NULL);
        CHECK(vkCreateGraphicsPipelines(device, VK_NULL_HANDLE, 1, &info, NULL, &pipelines[i]));
        char name[32];
        snprintf(name, sizeof(name), "pipeline_%u", VERTICES * (i + 1));
        VkDebugUtilsObjectNameInfoEXT named = {.sType = VK_STRUCTURE_TYPE_DEBUG_UTILS_OBJECT_NAME_INFO_EXT,
                                               .objectType = VK_OBJECT_TYPE_PIPELINE,
                                               .objectHandle = (uint64_t)pipelines[i],
                                               .pObjectName = name};
        if (names)
            CHECK(set_name(device, &named));
    }
}

static void make_compute(void)
{
    set = make_set(vertices, &layout);
    VkComputePipelineCreateInfo info = {
        .sType = VK_STRUCTURE_TYPE_COMPUTE_PIPELINE_CREATE_INFO,
        .stage = {.sType = VK_STRUCTURE_TYPE_PIPELINE_SHADER_STAGE_CREATE_INFO, .stage = VK_SHADER_STAGE_COMPUTE_BIT, .module = modules[COMPUTE], .pName = entries ? entry_names[COMPUTE] : "main"},
        .layout = layout,
    };
    CHECK(vkCreateComputePipelines(device, VK_NULL_HANDLE, 1, &info, NULL, &compute));
}

static void make_target(void)
{
    image = make_image(format, SIDE, VK_SAMPLE_COUNT_1_BIT, 0);
    VkImageViewCreateInfo view_info = {.sType = VK_STRUCTURE_TYPE_IMAGE_VIEW_CREATE_INFO,
                                       .image = image,
                                       .viewType = VK_IMAGE_VIEW_TYPE_2D,
                                       .format = format,
                                       .subresourceRange = {VK_IMAGE_ASPECT_COLOR_BIT, 0, 1, 0, 1}};
    CHECK(vkCreateImageView(device, &view_info, NULL, &view));
}

static void run_round(VkCommandBuffer primary, VkCommandBuffer second)
{
    unsigned long before[PIPELINES + 1];
    memcpy(before, appended, sizeof(before));
    if (secondary) {
        begin(second, true);
        fill_commands(second);
        CHECK(vkEndCommandBuffer(second));
    }
    begin(primary, false);
    for (int i = 0; i < 2; i++) { /* in two parts, with a dispatch before each */
        dispatch_7(primary);
        begin_rendering(primary, !i);
        if (secondary)
            vkCmdExecuteCommands(primary, 1, &second);
        else
            fill_commands(primary);
        vkCmdEndRendering(primary);
    }
    CHECK(vkEndCommandBuffer(primary));
    for (int i = 0; i < submits; i++) {
        VkSubmitInfo submit = {.sType = VK_STRUCTURE_TYPE_SUBMIT_INFO, .commandBufferCount = 1, .pCommandBuffers = &primary};
        CHECK(vkQueueSubmit(queue, 1, &submit, VK_NULL_HANDLE));
        CHECK(vkQueueWaitIdle(queue));
    }
    for (int i = 0; i <= PIPELINES; i++)
        submitted[i] += (appended[i] - before[i]) * (unsigned long)(submits * (secondary && i < PIPELINES ? 2 : 1));
}

int main(int argc, char **argv)
{
    const char *paths[MODULES] = {0};
    int given = 0;
    for (int i = 1; i < argc; i++) {
        const char *option = argv[i];
        if (strncmp(option, "--", 2) && given < MODULES)
            paths[given++] = option;
        secondary |= !strcmp(option, "--secondary");
        names |= !strcmp(option, "--names");
        entries |= !strcmp(option, "--entries");
        anew |= !strcmp(option, "--anew");
        indirect |= !strcmp(option, "--indirect");
        bind_always |= !strcmp(option, "--bind");
        if (i + 1 < argc && !strcmp(option, "--draws"))
            draws = atoi(argv[++i]);
        if (i + 1 < argc && !strcmp(option, "--rounds"))
            rounds = atoi(argv[++i]);
        if (i + 1 < argc && !strcmp(option, "--submits"))
            submits = atoi(argv[++i]);
        if (i + 1 < argc && !strcmp(option, "--seconds"))
            seconds = atof(argv[++i]);
    }
    if (given < MODULES && given != MESH)
        return 2;
    with_mesh = given == MODULES;
    VkInstance instance = make_device();
    draw_mesh = (PFN_vkCmdDrawMeshTasksEXT)vkGetDeviceProcAddr(device, "vkCmdDrawMeshTasksEXT");
    draw_mesh_indirect = (PFN_vkCmdDrawMeshTasksIndirectEXT)vkGetDeviceProcAddr(device, "vkCmdDrawMeshTasksIndirectEXT");
    draw_mesh_counted = (PFN_vkCmdDrawMeshTasksIndirectCountEXT)vkGetDeviceProcAddr(device, "vkCmdDrawMeshTasksIndirectCountEXT");
    static uint32_t content[1024] = {[COUNT_AT / 4] = 1};
    for (uint32_t i = 0; i < PIPELINES; i++) {
        memcpy(&content[4 * i], (uint32_t[]){VERTICES * (i + 1), 1, 0, 0}, 16);
        memcpy(&content[GROUPS_AT / 4 + 3 * i], (uint32_t[]){VERTICES * (i + 1), 1, 1}, 12);
    }
    vertices = make_buffer(sizeof(content), content, sizeof(content));
    make_target();
    for (int i = 0; i < given; i++)
        modules[i] = read_module(paths[i], entries ? entry_names[i] : "main");
    make_compute();
    VkCommandPoolCreateInfo pool_info = {.sType = VK_STRUCTURE_TYPE_COMMAND_POOL_CREATE_INFO,
                                         .flags = VK_COMMAND_POOL_CREATE_RESET_COMMAND_BUFFER_BIT};
    CHECK(vkCreateCommandPool(device, &pool_info, NULL, &pool));
    VkCommandBuffer commands[2];
    for (int i = 0; i < 2; i++)
        commands[i] = make_commands(pool, i);
    double end = now() + seconds;
    for (int i = 0; i < rounds || now() < end; i++) {
        if (!i || anew)
            make_pipelines(instance, (uint32_t)i);
        run_round(commands[0], commands[1]);
    }
    unsigned long all = 0;
    printf("{\"pid\": %d", getpid());
    for (int which = 0; which < 2; which++) {
        printf(", \"%s\": [", which ? "submitted" : "appended");
        for (int i = 0; i <= PIPELINES; i++)
            printf("%s%lu", i ? ", " : "", (which ? submitted : appended)[i]);
        printf("]");
    }
    for (int i = 0; i < PIPELINES; i++)
        all += appended[i];
    printf(", \"ns\": %.1f}\n", appending * 1e9 / (double)all);
    fflush(stdout);
    vkDestroyCommandPool(device, pool, NULL);
    vkDestroyDevice(device, NULL);
    return 0;
}
