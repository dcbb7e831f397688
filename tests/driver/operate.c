/* SPDX-License-Identifier: Apache-2.0
 * Vulkan without shaders of the program: what the driver copies, blits, resolves and clears by kernels of its own.
 *
 *     operate [OPTION...]
 *
 *   --rounds N       (2) how often each operation is recorded
 *   --submits N      (2) of each recorded operation
 *   --seconds S      goes on with rounds for as long, whatever --rounds says
 *
 * Each operation has a function, do_fill and so on, and a submission of its own, in the order of the list below. So the
 * primitives of a batch say which kernel is of which function. Prints its process, and how often it did each, as JSON. */
#include "vulkan_program.h"

enum { SIDE = 64, BYTES = 4096, COPIED = VK_IMAGE_USAGE_TRANSFER_SRC_BIT | VK_IMAGE_USAGE_TRANSFER_DST_BIT };
static VkBuffer buffers[2];
static VkImage images[2], sampled;
static const VkImageSubresourceLayers layer = {VK_IMAGE_ASPECT_COLOR_BIT, 0, 0, 1};
static const VkImageSubresourceRange whole = {VK_IMAGE_ASPECT_COLOR_BIT, 0, 1, 0, 1};
static const VkExtent3D extent = {16, 16, 1};
static const VkClearColorValue color = {.float32 = {0.1f, 0.2f, 0.3f, 0.4f}};
#define GENERAL VK_IMAGE_LAYOUT_GENERAL

#define DO(name, call)                                                                                                                     \
    __attribute__((noinline)) static void do_##name(VkCommandBuffer commands)                                                              \
    {                                                                                                                                      \
        call;                                                                                                                              \
        __asm__ volatile("");                                                                                                              \
    }
DO(fill, vkCmdFillBuffer(commands, buffers[0], 0, BYTES, 7))
DO(update, vkCmdUpdateBuffer(commands, buffers[0], 0, 8, "content"))
DO(copy, vkCmdCopyBuffer(commands, buffers[0], buffers[1], 1, &(VkBufferCopy){0, 0, 1024}))
DO(copy_image, vkCmdCopyImage(commands, images[0], GENERAL, images[1], GENERAL, 1, &(VkImageCopy){layer, {0}, layer, {0}, extent}))
DO(blit, vkCmdBlitImage(commands, images[0], GENERAL, images[1], GENERAL, 1,
                        &(VkImageBlit){layer, {{0}, {16, 16, 1}}, layer, {{0}, {8, 8, 1}}}, VK_FILTER_LINEAR))
DO(clear, vkCmdClearColorImage(commands, images[0], GENERAL, &color, 1, &whole))
DO(upload, vkCmdCopyBufferToImage(commands, buffers[0], images[0], GENERAL, 1, &(VkBufferImageCopy){.imageSubresource = layer, .imageExtent = extent}))
DO(download, vkCmdCopyImageToBuffer(commands, images[0], GENERAL, buffers[0], 1, &(VkBufferImageCopy){.imageSubresource = layer, .imageExtent = extent}))
DO(resolve, vkCmdResolveImage(commands, sampled, GENERAL, images[0], GENERAL, 1, &(VkImageResolve){layer, {0}, layer, {0}, extent}))

static void (*const operations[])(VkCommandBuffer) = {do_fill, do_update, do_copy, do_copy_image, do_blit, do_clear, do_upload, do_download, do_resolve};
enum { OPERATIONS = sizeof(operations) / sizeof(*operations) };

int main(int argc, char **argv)
{
    int rounds = 2, submits = 2, done = 0;
    double seconds = 0;
    for (int i = 1; i + 1 < argc; i += 2) {
        if (!strcmp(argv[i], "--rounds"))
            rounds = atoi(argv[i + 1]);
        if (!strcmp(argv[i], "--submits"))
            submits = atoi(argv[i + 1]);
        if (!strcmp(argv[i], "--seconds"))
            seconds = atof(argv[i + 1]);
    }
    make_device();
    for (int i = 0; i < 2; i++) {
        buffers[i] = make_buffer(BYTES, NULL, 0);
        images[i] = make_image(VK_FORMAT_R8G8B8A8_UNORM, SIDE, VK_SAMPLE_COUNT_1_BIT, COPIED);
    }
    sampled = make_image(VK_FORMAT_R8G8B8A8_UNORM, SIDE, VK_SAMPLE_COUNT_4_BIT, COPIED);
    VkCommandPoolCreateInfo pool_info = {.sType = VK_STRUCTURE_TYPE_COMMAND_POOL_CREATE_INFO,
                                         .flags = VK_COMMAND_POOL_CREATE_RESET_COMMAND_BUFFER_BIT};
    VkCommandPool pool;
    CHECK(vkCreateCommandPool(device, &pool_info, NULL, &pool));
    VkCommandBuffer commands = make_commands(pool, false);
    VkCommandBufferBeginInfo begin = {.sType = VK_STRUCTURE_TYPE_COMMAND_BUFFER_BEGIN_INFO};
    VkSubmitInfo submit = {.sType = VK_STRUCTURE_TYPE_SUBMIT_INFO, .commandBufferCount = 1, .pCommandBuffers = &commands};
    for (double end = now() + seconds; done < rounds || now() < end; done++) {
        for (int which = 0; which < OPERATIONS; which++) {
            CHECK(vkBeginCommandBuffer(commands, &begin));
            operations[which](commands);
            CHECK(vkEndCommandBuffer(commands));
            for (int i = 0; i < submits; i++) {
                CHECK(vkQueueSubmit(queue, 1, &submit, VK_NULL_HANDLE));
                CHECK(vkQueueWaitIdle(queue));
            }
        }
    }
    printf("{\"pid\": %d, \"rounds\": %d}\n", getpid(), done);
    fflush(stdout);
    vkDestroyCommandPool(device, pool, NULL);
    vkDestroyDevice(device, NULL);
    return 0;
}
