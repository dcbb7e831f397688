/* SPDX-License-Identifier: Apache-2.0
 * What the Vulkan programs of this folder have in common: a device with a queue, modules, buffers and command buffers. Not each uses
 * all of it. */
#ifndef DRIVER_VULKAN_PROGRAM_H
#define DRIVER_VULKAN_PROGRAM_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>
#include <vulkan/vulkan.h>

#define CHECK(call)                                                                                                                        \
    do {                                                                                                                                   \
        VkResult result_ = (call);                                                                                                         \
        if (result_) {                                                                                                                     \
            fprintf(stderr, "%s: %d\n", #call, result_);                                                                                   \
            exit(1);                                                                                                                       \
        }                                                                                                                                  \
    } while (0)

static VkDevice device;
static bool with_mesh; /* set before make_device: mesh shaders are wanted */
static VkQueue queue;

static double now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + (double)time.tv_nsec / 1e9;
}

/* `entry` is what its entry point `main` is called instead, with as many letters. */
__attribute__((unused)) static VkShaderModule read_module(const char *path, const char *entry)
{
    static uint32_t code[1 << 18];
    FILE *file = fopen(path, "rb");
    if (!file) {
        perror(path);
        exit(1);
    }
    VkShaderModuleCreateInfo info = {.sType = VK_STRUCTURE_TYPE_SHADER_MODULE_CREATE_INFO, .pCode = code};
    info.codeSize = fread(code, 1, sizeof(code), file);
    fclose(file);
    for (char *at = (char *)code; at < (char *)code + info.codeSize; at += 4) /* texts begin at words */
        if (!memcmp(at, "main", 5))
            memcpy(at, entry, 4);
    VkShaderModule module;
    CHECK(vkCreateShaderModule(device, &info, NULL, &module));
    return module;
}

static VkBuffer make_buffer(VkDeviceSize size, const void *content, size_t bytes)
{
    VkBufferCreateInfo info = {.sType = VK_STRUCTURE_TYPE_BUFFER_CREATE_INFO,
                               .size = size,
                               .usage = VK_BUFFER_USAGE_STORAGE_BUFFER_BIT | VK_BUFFER_USAGE_INDIRECT_BUFFER_BIT | VK_BUFFER_USAGE_TRANSFER_SRC_BIT |
                                        VK_BUFFER_USAGE_TRANSFER_DST_BIT};
    VkBuffer made;
    VkDeviceMemory memory;
    VkMemoryRequirements requirements;
    CHECK(vkCreateBuffer(device, &info, NULL, &made));
    vkGetBufferMemoryRequirements(device, made, &requirements);
    /* The last type is one that the host can map, on all of these devices. */
    uint32_t type = 31 - (uint32_t)__builtin_clz(requirements.memoryTypeBits);
    VkMemoryAllocateInfo allocate = {
        .sType = VK_STRUCTURE_TYPE_MEMORY_ALLOCATE_INFO, .allocationSize = requirements.size, .memoryTypeIndex = content ? type : 0};
    CHECK(vkAllocateMemory(device, &allocate, NULL, &memory));
    CHECK(vkBindBufferMemory(device, made, memory, 0));
    if (content) {
        void *at;
        CHECK(vkMapMemory(device, memory, 0, VK_WHOLE_SIZE, 0, &at));
        memcpy(at, content, bytes);
        vkUnmapMemory(device, memory);
    }
    return made;
}

/* Makes an image of side * side pixels, which one can draw into, and whose memory is bound. */
__attribute__((unused)) static VkImage make_image(VkFormat format, uint32_t side, VkSampleCountFlagBits samples, VkImageUsageFlags more)
{
    VkImageCreateInfo info = {.sType = VK_STRUCTURE_TYPE_IMAGE_CREATE_INFO,
                              .imageType = VK_IMAGE_TYPE_2D,
                              .format = format,
                              .extent = {side, side, 1},
                              .mipLevels = 1,
                              .arrayLayers = 1,
                              .samples = samples,
                              .usage = VK_IMAGE_USAGE_COLOR_ATTACHMENT_BIT | more};
    VkImage made;
    VkMemoryRequirements requirements;
    VkDeviceMemory memory;
    CHECK(vkCreateImage(device, &info, NULL, &made));
    vkGetImageMemoryRequirements(device, made, &requirements);
    VkMemoryAllocateInfo allocate = {.sType = VK_STRUCTURE_TYPE_MEMORY_ALLOCATE_INFO,
                                     .allocationSize = requirements.size,
                                     .memoryTypeIndex = (uint32_t)__builtin_ctz(requirements.memoryTypeBits)};
    CHECK(vkAllocateMemory(device, &allocate, NULL, &memory));
    CHECK(vkBindImageMemory(device, made, memory, 0));
    return made;
}

/* Makes a descriptor set of a compute shader whose two bindings are a buffer, and the layout of its pipeline. */
__attribute__((unused)) static VkDescriptorSet make_set(VkBuffer buffer, VkPipelineLayout *layout)
{
    VkDescriptorSetLayoutBinding bindings[2] = {{0, VK_DESCRIPTOR_TYPE_STORAGE_BUFFER, 1, VK_SHADER_STAGE_COMPUTE_BIT, NULL},
                                                {1, VK_DESCRIPTOR_TYPE_STORAGE_BUFFER, 1, VK_SHADER_STAGE_COMPUTE_BIT, NULL}};
    VkDescriptorSetLayoutCreateInfo set_info = {
        .sType = VK_STRUCTURE_TYPE_DESCRIPTOR_SET_LAYOUT_CREATE_INFO, .bindingCount = 2, .pBindings = bindings};
    VkDescriptorSetLayout set_layout;
    CHECK(vkCreateDescriptorSetLayout(device, &set_info, NULL, &set_layout));
    VkPushConstantRange range = {VK_SHADER_STAGE_COMPUTE_BIT, 0, 4};
    VkPipelineLayoutCreateInfo layout_info = {.sType = VK_STRUCTURE_TYPE_PIPELINE_LAYOUT_CREATE_INFO,
                                              .setLayoutCount = 1,
                                              .pSetLayouts = &set_layout,
                                              .pushConstantRangeCount = 1,
                                              .pPushConstantRanges = &range};
    CHECK(vkCreatePipelineLayout(device, &layout_info, NULL, layout));
    VkDescriptorPoolSize size = {VK_DESCRIPTOR_TYPE_STORAGE_BUFFER, 2};
    VkDescriptorPoolCreateInfo pool_info = {
        .sType = VK_STRUCTURE_TYPE_DESCRIPTOR_POOL_CREATE_INFO, .maxSets = 1, .poolSizeCount = 1, .pPoolSizes = &size};
    VkDescriptorPool descriptors;
    VkDescriptorSet set;
    CHECK(vkCreateDescriptorPool(device, &pool_info, NULL, &descriptors));
    VkDescriptorSetAllocateInfo allocate = {
        .sType = VK_STRUCTURE_TYPE_DESCRIPTOR_SET_ALLOCATE_INFO, .descriptorPool = descriptors, .descriptorSetCount = 1, .pSetLayouts = &set_layout};
    CHECK(vkAllocateDescriptorSets(device, &allocate, &set));
    for (uint32_t i = 0; i < 2; i++) {
        VkDescriptorBufferInfo info = {buffer, 0, VK_WHOLE_SIZE};
        VkWriteDescriptorSet write = {.sType = VK_STRUCTURE_TYPE_WRITE_DESCRIPTOR_SET,
                                      .dstSet = set,
                                      .dstBinding = i,
                                      .descriptorCount = 1,
                                      .descriptorType = VK_DESCRIPTOR_TYPE_STORAGE_BUFFER,
                                      .pBufferInfo = &info};
        vkUpdateDescriptorSets(device, 1, &write, 0, NULL);
    }
    return set;
}

static VkInstance make_device(void)
{
    const char *debug_utils = "VK_EXT_debug_utils";
    VkApplicationInfo application = {.sType = VK_STRUCTURE_TYPE_APPLICATION_INFO, .apiVersion = VK_API_VERSION_1_3};
    VkInstanceCreateInfo instance_info = {.sType = VK_STRUCTURE_TYPE_INSTANCE_CREATE_INFO,
                                          .pApplicationInfo = &application,
                                          .enabledExtensionCount = 1,
                                          .ppEnabledExtensionNames = &debug_utils};
    VkInstance instance;
    CHECK(vkCreateInstance(&instance_info, NULL, &instance));
    uint32_t count = 1;
    VkPhysicalDevice physical;
    if (vkEnumeratePhysicalDevices(instance, &count, &physical) < 0 || !count) {
        fprintf(stderr, "there is no device\n");
        exit(1);
    }
    float priority = 1;
    VkDeviceQueueCreateInfo queue_info = {.sType = VK_STRUCTURE_TYPE_DEVICE_QUEUE_CREATE_INFO, .queueCount = 1, .pQueuePriorities = &priority};
    VkPhysicalDeviceVulkan13Features features = {.sType = VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_VULKAN_1_3_FEATURES, .dynamicRendering = VK_TRUE, .subgroupSizeControl = VK_TRUE};
    VkPhysicalDeviceMeshShaderFeaturesEXT mesh = {
        .sType = VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_MESH_SHADER_FEATURES_EXT, .pNext = &features, .taskShader = VK_TRUE, .meshShader = VK_TRUE};
    const char *mesh_shader = VK_EXT_MESH_SHADER_EXTENSION_NAME;
    VkPhysicalDeviceFeatures more = {.geometryShader = VK_TRUE, .tessellationShader = VK_TRUE};
    VkDeviceCreateInfo info = {.sType = VK_STRUCTURE_TYPE_DEVICE_CREATE_INFO,
                               .pNext = with_mesh ? (void *)&mesh : &features,
                               .queueCreateInfoCount = 1,
                               .pQueueCreateInfos = &queue_info,
                               .enabledExtensionCount = with_mesh,
                               .ppEnabledExtensionNames = &mesh_shader,
                               .pEnabledFeatures = &more};
    CHECK(vkCreateDevice(physical, &info, NULL, &device));
    vkGetDeviceQueue(device, 0, 0, &queue);
    return instance;
}

/* Makes a command buffer. */
static VkCommandBuffer make_commands(VkCommandPool pool, bool is_secondary)
{
    VkCommandBufferAllocateInfo info = {.sType = VK_STRUCTURE_TYPE_COMMAND_BUFFER_ALLOCATE_INFO,
                                        .commandPool = pool,
                                        .level = is_secondary ? VK_COMMAND_BUFFER_LEVEL_SECONDARY : VK_COMMAND_BUFFER_LEVEL_PRIMARY,
                                        .commandBufferCount = 1};
    VkCommandBuffer commands;
    CHECK(vkAllocateCommandBuffers(device, &info, &commands));
    return commands;
}

#endif
