/* SPDX-License-Identifier: Apache-2.0
 * A program of OpenCL that copies and fills in every way, and keeps a ledger of it.
 *
 *     copies_opencl [--calls N] [--gpu N] [--own FILE] [--dispatched FILE --output FILE]
 *
 * On a queue that is in order and on one that is not, each way is taken N times by a function of its own name. Behind its calls
 * comes a JSON line: the function that was called (empty for one whose purpose is another), how often, the bytes of a call
 * (-1: of images) and the mean time of one.
 *
 * Files say what the stand-in's GPU is to execute (own.h), and how the program learns what the runtime does (dispatched.h). What the
 * device cannot do (images) is left out. */
#define _GNU_SOURCE
#define CL_TARGET_OPENCL_VERSION 300
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include <CL/cl_ext.h>

#include "dispatched.h"
#include "own.h"

/* Call paths are what a recorder is tested with: such a function keeps its name and its frame. */
#define ON_THE_STACK __attribute__((noipa))

#define PROGRAM "copies_opencl"
#define RESULT "%d"
#include "must.h"

static double now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1e9 + time.tv_nsec;
}

enum { BYTES = 1 << 20, SIDE = 64 };

static cl_platform_id platform;
static cl_device_id device;
static cl_context context;
static cl_mem to, from;
static cl_mem images[2]; /* none where the device has no images */
static char *shared, *more; /* SVM, and memory of the device (USM) */
static _Alignas(4096) char host[BYTES]; /* the kernels of a copy depend on it */
static const char pattern[16] = "a pattern of 16";
static int calls = 1, which;
static const char *output;

/* Intel's extensions. */
static clEnqueueMemcpyINTEL_fn memcpy_intel;
static clEnqueueMemFillINTEL_fn memfill_intel;
static cl_int(CL_API_CALL *memset_intel)(cl_command_queue, void *, cl_int, size_t, cl_uint, const cl_event *, cl_event *);

static const size_t origin[3] = {0}, plane[3] = {100, 50, 1}, block[3] = {100, 50, 4}, whole[3] = {SIDE, SIDE, 1};
static const cl_uint color[4] = {1, 2, 3, 4};

#define NO_EVENTS 0, NULL, NULL
#define PITCHES 128, 8192
#define WAY(name, call) \
    ON_THE_STACK static cl_int name(cl_command_queue queue) { return call; }

WAY(copy, clEnqueueCopyBuffer(queue, from, to, 0, 0, 65536, NO_EVENTS))
WAY(copy_unaligned, clEnqueueCopyBuffer(queue, from, to, 3, 3, 100001, NO_EVENTS))
WAY(copy_plane, clEnqueueCopyBufferRect(queue, from, to, origin, origin, plane, PITCHES, PITCHES, NO_EVENTS))
WAY(copy_block, clEnqueueCopyBufferRect(queue, from, to, origin, origin, block, PITCHES, PITCHES, NO_EVENTS))
WAY(fill, clEnqueueFillBuffer(queue, to, pattern, 1, 0, 65536, NO_EVENTS))
WAY(fill_unaligned, clEnqueueFillBuffer(queue, to, pattern, 1, 3, 65531, NO_EVENTS))
WAY(fill_words, clEnqueueFillBuffer(queue, to, pattern, 4, 0, 65532, NO_EVENTS))
WAY(fill_patterns, clEnqueueFillBuffer(queue, to, pattern, 16, 16, 65552, NO_EVENTS))
WAY(read_buffer, clEnqueueReadBuffer(queue, from, CL_FALSE, 0, 4096, host, NO_EVENTS))
WAY(read_blocking, clEnqueueReadBuffer(queue, from, CL_TRUE, 5, 8191, host, NO_EVENTS))
WAY(write_buffer, clEnqueueWriteBuffer(queue, to, CL_FALSE, 0, 12288, host, NO_EVENTS))
WAY(read_plane, clEnqueueReadBufferRect(queue, from, CL_FALSE, origin, origin, plane, PITCHES, PITCHES, host, NO_EVENTS))
WAY(write_block, clEnqueueWriteBufferRect(queue, to, CL_FALSE, origin, origin, block, PITCHES, PITCHES, host, NO_EVENTS))
WAY(svm_copy, clEnqueueSVMMemcpy(queue, CL_FALSE, shared, shared + 65536, 16384, NO_EVENTS))
WAY(svm_fill, clEnqueueSVMMemFill(queue, shared, pattern, 4, 20480, NO_EVENTS))
WAY(usm_copy, memcpy_intel(queue, CL_FALSE, more, more + 65536, 24576, NO_EVENTS))
WAY(usm_fill, memfill_intel(queue, more, pattern, 8, 28672, NO_EVENTS))
WAY(usm_set, memset_intel(queue, more, 7, 32768, NO_EVENTS))
WAY(image_copy, clEnqueueCopyImage(queue, images[0], images[1], origin, origin, whole, NO_EVENTS))
WAY(image_to_buffer, clEnqueueCopyImageToBuffer(queue, images[0], to, origin, whole, 0, NO_EVENTS))
WAY(image_from_buffer, clEnqueueCopyBufferToImage(queue, from, images[0], 0, origin, whole, NO_EVENTS))
WAY(image_fill, clEnqueueFillImage(queue, images[0], color, origin, whole, NO_EVENTS))
WAY(image_read, clEnqueueReadImage(queue, images[0], CL_FALSE, origin, whole, 0, 0, host, NO_EVENTS))
WAY(image_write, clEnqueueWriteImage(queue, images[0], CL_FALSE, origin, whole, 0, 0, host, NO_EVENTS))

/* No transfers, but kernels do it where the device has memory of its own. */
ON_THE_STACK static cl_int svm_map(cl_command_queue queue)
{
    return clEnqueueSVMMap(queue, CL_FALSE, CL_MAP_READ | CL_MAP_WRITE, shared, BYTES, NO_EVENTS);
}

ON_THE_STACK static cl_int svm_unmap(cl_command_queue queue)
{
    return clEnqueueSVMUnmap(queue, shared, NO_EVENTS);
}

static const struct {
    const char *name, *function;
    cl_int (*call)(cl_command_queue);
    long bytes;
} WAYS[] = {
#define ONE(way, function, bytes) {#way, function, way, bytes}
    ONE(copy, "clEnqueueCopyBuffer", 65536),
    ONE(copy_unaligned, "clEnqueueCopyBuffer", 100001),
    ONE(copy_plane, "clEnqueueCopyBufferRect", 100 * 50),
    ONE(copy_block, "clEnqueueCopyBufferRect", 100 * 50 * 4),
    ONE(fill, "clEnqueueFillBuffer", 65536),
    ONE(fill_unaligned, "clEnqueueFillBuffer", 65531),
    ONE(fill_words, "clEnqueueFillBuffer", 65532),
    ONE(fill_patterns, "clEnqueueFillBuffer", 65552),
    ONE(read_buffer, "clEnqueueReadBuffer", 4096),
    ONE(read_blocking, "clEnqueueReadBuffer", 8191),
    ONE(write_buffer, "clEnqueueWriteBuffer", 12288),
    ONE(read_plane, "clEnqueueReadBufferRect", 100 * 50),
    ONE(write_block, "clEnqueueWriteBufferRect", 100 * 50 * 4),
    ONE(svm_copy, "clEnqueueSVMMemcpy", 16384),
    ONE(svm_fill, "clEnqueueSVMMemFill", 20480),
    ONE(usm_copy, "clEnqueueMemcpyINTEL", 24576),
    ONE(usm_fill, "clEnqueueMemFillINTEL", 28672),
    ONE(usm_set, "clEnqueueMemsetINTEL", 32768),
    ONE(image_copy, "clEnqueueCopyImage", -1),
    ONE(image_to_buffer, "clEnqueueCopyImageToBuffer", -1),
    ONE(image_from_buffer, "clEnqueueCopyBufferToImage", -1),
    ONE(image_fill, "clEnqueueFillImage", -1),
    ONE(image_read, "clEnqueueReadImage", -1),
    ONE(image_write, "clEnqueueWriteImage", -1),
    ONE(svm_map, "", 0),
    ONE(svm_unmap, "", 0),
};

ON_THE_STACK static void copy_all(const char *name, cl_command_queue queue)
{
    for (unsigned way = 0; way < sizeof WAYS / sizeof *WAYS; way++) {
        if (WAYS[way].bytes < 0 && !(images[0] && images[1]))
            continue;
        dispatching_way = WAYS[way].name;
        double begin = now();
        for (int i = 0; i < calls; i++)
            must(WAYS[way].call(queue), WAYS[way].name);
        double end = now();
        for (int i = 0; i < calls; i++)
            execute_all(name, WAYS[way].name);
        printf("{\"pid\": %d, \"list\": \"%s\", \"way\": \"%s\", \"function\": \"%s\", \"calls\": %d, \"bytes\": %ld, \"ns\": %.1f}\n",
               getpid(), name, WAYS[way].name, WAYS[way].function, calls, WAYS[way].bytes, (end - begin) / calls);
    }
    MUST(clFinish(queue));
}

static void create_images(void)
{
    const cl_image_format format = {CL_RGBA, CL_UNSIGNED_INT8};
    const cl_image_desc desc = {.image_type = CL_MEM_OBJECT_IMAGE2D, .image_width = SIDE, .image_height = SIDE};
    cl_bool has;
    MUST(clGetDeviceInfo(device, CL_DEVICE_IMAGE_SUPPORT, sizeof has, &has, NULL));
    for (int i = 0; has && i < 2; i++)
        images[i] = clCreateImage(context, CL_MEM_READ_WRITE, &format, &desc, NULL, NULL);
}

static void *extension(const char *name)
{
    void *function = clGetExtensionFunctionAddressForPlatform(platform, name);
    must(function ? CL_SUCCESS : CL_INVALID_VALUE, name);
    return function;
}

static void begin(void)
{
    cl_int result;
    MUST(clGetPlatformIDs(1, &platform, NULL));
    cl_device_id gpus[16];
    cl_uint count;
    MUST(clGetDeviceIDs(platform, CL_DEVICE_TYPE_GPU, 16, gpus, &count));
    must((cl_uint)which < count ? CL_SUCCESS : CL_INVALID_DEVICE, "--gpu");
    device = gpus[which];
    context = clCreateContext(NULL, 1, &device, NULL, NULL, &result);
    must(result, "clCreateContext");
    to = clCreateBuffer(context, CL_MEM_READ_WRITE, BYTES, NULL, &result);
    must(result, "clCreateBuffer");
    from = clCreateBuffer(context, CL_MEM_READ_WRITE, BYTES, NULL, &result);
    must(result, "clCreateBuffer");
    shared = clSVMAlloc(context, CL_MEM_READ_WRITE, BYTES, 0);
    must(shared ? CL_SUCCESS : CL_OUT_OF_RESOURCES, "clSVMAlloc");
    memcpy_intel = extension("clEnqueueMemcpyINTEL");
    memfill_intel = extension("clEnqueueMemFillINTEL");
    memset_intel = extension("clEnqueueMemsetINTEL");
    clDeviceMemAllocINTEL_fn allocate = extension("clDeviceMemAllocINTEL");
    more = allocate(context, device, NULL, BYTES, 0, &result);
    must(result, "clDeviceMemAllocINTEL");
    create_images();
}

ON_THE_STACK static void use(const char *name, const cl_queue_properties *properties)
{
    cl_int result;
    cl_command_queue queue = clCreateCommandQueueWithProperties(context, device, properties, &result);
    must(result, "clCreateCommandQueueWithProperties");
    copy_all(name, queue);
}

int main(int argc, char **argv)
{
    const cl_queue_properties any_order[] = {CL_QUEUE_PROPERTIES, CL_QUEUE_OUT_OF_ORDER_EXEC_MODE_ENABLE, 0};
    for (int i = 1; i < argc; i += 2) {
        if (i + 1 < argc && !strcmp(argv[i], "--calls"))
            calls = atoi(argv[i + 1]);
        else if (i + 1 < argc && !strcmp(argv[i], "--gpu"))
            which = atoi(argv[i + 1]);
        else if (i + 1 < argc && !strcmp(argv[i], "--own"))
            own = argv[i + 1];
        else if (i + 1 < argc && !strcmp(argv[i], "--dispatched"))
            dispatched = argv[i + 1];
        else if (i + 1 < argc && !strcmp(argv[i], "--output"))
            output = argv[i + 1];
        else
            return 2;
    }
    gpu_connect();
    begin();
    if (own)
        read_own();
    if (dispatched)
        tell_dispatched(output);
    use("in-order", NULL);
    use("out-of-order", any_order);
    gpu_wait();
    fflush(stdout);
    _exit(0);
}
