/* SPDX-License-Identifier: Apache-2.0
 * A program of OpenCL that keeps a ledger: what it launched, how often, and what the runtime itself says of each kernel.
 *
 *     opencl [--threads N] [--rounds N] [--launches N] [--gpu N] [--parts 1] [--one 1] [--link 1] [--brief 1] [--twins 1]
 *            [--step] PROGRAM...
 *
 * A PROGRAM that ends in .cl is source, with its headers in the same folder, one in .spv is SPIR-V, any other a native binary.
 * All GPUs share a context, and the work is the one's with the given number; with --parts these are the sub-devices of the first
 * GPU. Each program is built (with --one for that GPU only; with --link, one of source is compiled and then linked), lets each
 * thread launch every kernel of it N times in each way, and is released, before the last thread's kernels are; that is a round.
 * With --brief, a kernel is released before the thread creates the next one. With --twins, each program is built once more
 * before, and released by the function that the runtime calls when it is built.
 *
 * The ledger is a JSON line per (round, program, thread, kernel). The program's debug ELF and the kernel's code lie in the
 * working folder, in the files that the line names. With --step, a thread waits after each line, the kernel still there, until
 * it reads one from stdin. Whatever the runtime refuses ends the program with status 1 and the call on stderr.
 *
 * Arguments of kernels are zero, and memory is not looked at: this runs where nothing is computed. */
#define _GNU_SOURCE
#define CL_TARGET_OPENCL_VERSION 300
#define CL_USE_DEPRECATED_OPENCL_1_2_APIS /* clEnqueueTask */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <CL/cl_ext.h>

/* NEO's own questions, in no public header (opencl/extensions/public/cl_ext_private.h). */
enum {
    CL_PROGRAM_DEBUG_INFO_INTEL = 0x4100,
    CL_PROGRAM_DEBUG_INFO_SIZES_INTEL = 0x4101,
    CL_KERNEL_BINARY_PROGRAM_INTEL = 0x407D,
    CL_KERNEL_BINARY_GPU_ADDRESS_INTEL = 0x10010,
};

enum { MAX_THREADS = 64, MAX_PROGRAMS = 64, MAX_KERNELS = 512, MAX_GPUS = 16 };

#define PROGRAM "opencl"
#define RESULT "%d"
#include "must.h"

static void fail(const char *what)
{
    perror(what);
    _exit(1);
}

/* --- what all threads share */

static cl_context context;
static cl_device_id gpus[MAX_GPUS], gpu;
static cl_uint n_gpus;

/* Intel's extension, in no header: as clEnqueueNDRangeKernel, with the number of groups as the global size. */
static cl_int (*enqueue_nd_count_kernel)(cl_command_queue, cl_kernel, cl_uint, const size_t *, const size_t *, const size_t *,
                                         cl_uint, const cl_event *, cl_event *);

/* --- the ways to launch */

static const size_t GLOBAL[] = {64, 16, 1}, LOCAL[] = {16, 16, 1}, GROUPS[] = {4, 1, 1};

static cl_int launch(cl_command_queue queue, cl_kernel kernel)
{
    return clEnqueueNDRangeKernel(queue, kernel, 3, NULL, GLOBAL, LOCAL, 0, NULL, NULL);
}

static cl_int launch_task(cl_command_queue queue, cl_kernel kernel)
{
    return clEnqueueTask(queue, kernel, 0, NULL, NULL);
}

static cl_int launch_count(cl_command_queue queue, cl_kernel kernel)
{
    return enqueue_nd_count_kernel(queue, kernel, 3, NULL, GROUPS, LOCAL, 0, NULL, NULL);
}

static const struct {
    const char *name;
    int in_order;
    cl_int (*enqueue)(cl_command_queue, cl_kernel);
} WAYS[] = {
    {"in-order", 1, launch},
    {"out-of-order", 0, launch},
    {"task", 1, launch_task},
    {"count", 1, launch_count},
};
enum { N_WAYS = sizeof WAYS / sizeof *WAYS };

/* --- the command line */

static int threads = 1, rounds = 1, launches = 1, gpu_number, parts, one, links, brief, twins, step, n_programs;

static struct {
    const char *path, *name;
    cl_program handle; /* of this round */
    char debug_elf[64];
} programs[MAX_PROGRAMS];

static void read_command_line(int argc, char **argv)
{
    const struct {
        const char *name;
        int *value, lowest, highest;
    } numbers[] = {{"--threads", &threads, 1, MAX_THREADS},
                   {"--rounds", &rounds, 1, 1 << 20},
                   {"--launches", &launches, 1, 1 << 30},
                   {"--gpu", &gpu_number, 0, MAX_GPUS - 1},
                   {"--parts", &parts, 0, 1},
                   {"--one", &one, 0, 1},
                   {"--link", &links, 0, 1},
                   {"--brief", &brief, 0, 1},
                   {"--twins", &twins, 0, 1}};
    for (int i = 1; i < argc; i++) {
        size_t n = 0;
        while (n < sizeof numbers / sizeof *numbers && strcmp(argv[i], numbers[n].name))
            n++;
        if (n < sizeof numbers / sizeof *numbers && i + 1 < argc) {
            *numbers[n].value = atoi(argv[++i]);
            if (*numbers[n].value < numbers[n].lowest || *numbers[n].value > numbers[n].highest) {
                fprintf(stderr, "opencl: %s is %d to %d\n", numbers[n].name, numbers[n].lowest, numbers[n].highest);
                exit(2);
            }
        } else if (!strcmp(argv[i], "--step")) {
            step = 1;
        } else if (argv[i][0] == '-' || n_programs == MAX_PROGRAMS) {
            fprintf(stderr, "opencl: %s?\n", argv[i]);
            exit(2);
        } else {
            const char *slash = strrchr(argv[i], '/');
            programs[n_programs].path = argv[i];
            programs[n_programs++].name = slash ? slash + 1 : argv[i];
        }
    }
}

static unsigned char *read_file(const char *path, size_t *size)
{
    FILE *file = fopen(path, "rb");
    if (!file || fseek(file, 0, SEEK_END) || (*size = ftell(file)) == (size_t)-1)
        fail(path);
    unsigned char *bytes = malloc(*size + 1);
    rewind(file);
    if (fread(bytes, 1, *size, file) != *size)
        fail(path);
    fclose(file);
    return bytes;
}

static void write_file(const char *name, const void *bytes, size_t size)
{
    FILE *file = fopen(name, "wb");
    if (!file || fwrite(bytes, 1, size, file) != size || fclose(file))
        fail(name);
}

static int ends_with(const char *text, const char *end)
{
    size_t length = strlen(text), most = strlen(end);
    return length >= most && !strcmp(text + length - most, end);
}

/* --- programs */

static void begin(void)
{
    cl_platform_id platform;
    MUST(clGetPlatformIDs(1, &platform, NULL));
    MUST(clGetDeviceIDs(platform, CL_DEVICE_TYPE_GPU, MAX_GPUS, gpus, &n_gpus));
    if (parts) {
        const cl_device_partition_property by[] = {CL_DEVICE_PARTITION_BY_AFFINITY_DOMAIN,
                                                   CL_DEVICE_AFFINITY_DOMAIN_NEXT_PARTITIONABLE, 0};
        cl_device_id whole = gpus[0];
        MUST(clCreateSubDevices(whole, by, MAX_GPUS, gpus, &n_gpus));
    }
    if ((cl_uint)gpu_number >= n_gpus) {
        fprintf(stderr, "opencl: there are only %u GPUs\n", n_gpus);
        exit(2);
    }
    gpu = gpus[gpu_number];
    cl_int result;
    context = clCreateContext(NULL, n_gpus, gpus, NULL, NULL, &result);
    must(result, "clCreateContext");
    enqueue_nd_count_kernel = clGetExtensionFunctionAddressForPlatform(platform, "clEnqueueNDCountKernelINTEL");
}

static cl_program create_program(const char *path)
{
    size_t size;
    const unsigned char *bytes = read_file(path, &size);
    cl_int result;
    cl_program program;
    if (ends_with(path, ".cl"))
        program = clCreateProgramWithSource(context, 1, (const char **)&bytes, &size, &result);
    else if (ends_with(path, ".spv"))
        program = clCreateProgramWithIL(context, bytes, size, &result);
    else
        program = clCreateProgramWithBinary(context, 1, &gpu, &size, &bytes, NULL, &result);
    must(result, path);
    free((void *)bytes);
    return program;
}

static void release_program(cl_program program, void *nothing)
{
    (void)nothing;
    MUST(clReleaseProgram(program));
}

static void build_program(int index, int round)
{
    const char *path = programs[index].path;
    cl_program program = create_program(path);
    char options[4200]; /* where the headers of source are */
    snprintf(options, sizeof options, "-I %.*s", (int)(programs[index].name - path), path);
    if (links && ends_with(path, ".cl")) {
        cl_int result;
        cl_program compiled = program;
        MUST(clCompileProgram(compiled, 0, NULL, options, 0, NULL, NULL, NULL, NULL));
        program = clLinkProgram(context, 0, NULL, NULL, 1, &compiled, NULL, NULL, &result);
        must(result, "clLinkProgram");
        MUST(clReleaseProgram(compiled));
    } else {
        const char *given = ends_with(path, ".cl") ? options : NULL;
        if (twins)
            MUST(clBuildProgram(create_program(path), one, one ? &gpu : NULL, given, release_program, NULL));
        MUST(clBuildProgram(program, one, one ? &gpu : NULL, given, NULL, NULL));
    }

    cl_uint devices; /* of the program, in the context's order */
    MUST(clGetProgramInfo(program, CL_PROGRAM_NUM_DEVICES, sizeof devices, &devices, NULL));
    size_t sizes[MAX_GPUS] = {0}, most = 0; /* of those that it is built for, one after the other */
    unsigned char *elfs[MAX_GPUS] = {NULL}; /* of all */
    MUST(clGetProgramInfo(program, CL_PROGRAM_DEBUG_INFO_SIZES_INTEL, devices * sizeof *sizes, sizes, NULL));
    for (cl_uint i = 0; i < devices; i++)
        most = sizes[i] > most ? sizes[i] : most;
    for (cl_uint i = 0; i < devices; i++)
        elfs[i] = malloc(most);
    MUST(clGetProgramInfo(program, CL_PROGRAM_DEBUG_INFO_INTEL, devices * sizeof *elfs, elfs, NULL));
    int mine = devices > 1 ? gpu_number : 0;
    sprintf(programs[index].debug_elf, "%d-%d-%d.debug.elf", getpid(), round, index);
    write_file(programs[index].debug_elf, elfs[mine], sizes[one ? 0 : mine]);
    for (cl_uint i = 0; i < devices; i++)
        free(elfs[i]);
    programs[index].handle = program;
}

/* --- a thread: it has its own kernels, as kernels are not to be used by two threads at a time, and its own queues */

typedef struct {
    pthread_t id;
    int index, round;
    cl_command_queue in_order, out_of_order;
    cl_kernel kernels[MAX_PROGRAMS][MAX_KERNELS];
    cl_uint n_kernels[MAX_PROGRAMS];
} thread_t;

static void set_arguments(cl_kernel kernel)
{
    cl_uint count;
    MUST(clGetKernelInfo(kernel, CL_KERNEL_NUM_ARGS, sizeof count, &count, NULL));
    for (cl_uint i = 0; i < count; i++) {
        /* Eight zero bytes are a null pointer or an integer; local memory has a size only. */
        const uint64_t zero = 0;
        if (clSetKernelArg(kernel, i, sizeof zero, &zero))
            MUST(clSetKernelArg(kernel, i, 1024, NULL));
    }
}

static void use_kernel(thread_t *thread, int program, cl_uint number)
{
    cl_kernel kernel = thread->kernels[program][number];
    set_arguments(kernel);
    char name[256];
    MUST(clGetKernelInfo(kernel, CL_KERNEL_FUNCTION_NAME, sizeof name, name, NULL));
    cl_ulong address;
    MUST(clGetKernelInfo(kernel, CL_KERNEL_BINARY_GPU_ADDRESS_INTEL, sizeof address, &address, NULL));
    size_t size;
    MUST(clGetKernelInfo(kernel, CL_KERNEL_BINARY_PROGRAM_INTEL, 0, NULL, &size));
    void *code = malloc(size);
    MUST(clGetKernelInfo(kernel, CL_KERNEL_BINARY_PROGRAM_INTEL, size, code, NULL));
    char file[80];
    sprintf(file, "%d-%d-%d-%d-%u.isa", getpid(), thread->round, program, thread->index, number);
    write_file(file, code, size);
    free(code);

    char counts[256] = "", *end = counts;
    for (int way = 0; way < N_WAYS; way++) {
        for (int i = 0; i < launches; i++)
            must(WAYS[way].enqueue(WAYS[way].in_order ? thread->in_order : thread->out_of_order, kernel), WAYS[way].name);
        end += sprintf(end, "%s\"%s\": %d", way ? ", " : "", WAYS[way].name, launches);
    }
    MUST(clFinish(thread->in_order));
    MUST(clFinish(thread->out_of_order));
    printf("{\"pid\": %d, \"tid\": %d, \"round\": %d, \"program\": \"%s\", \"kernel\": \"%s\", \"handle\": %lu, "
           "\"gpu_address\": %lu, \"debug_elf\": \"%s\", \"isa\": \"%s\", \"launches\": {%s}}\n",
           getpid(), gettid(), thread->round, programs[program].name, name, (unsigned long)kernel, (unsigned long)address,
           programs[program].debug_elf, file, counts);
    for (int c = 0; step && c != '\n' && c != EOF;)
        c = getchar();
}

/* Leaves none of the program's kernels. */
static void use_briefly(thread_t *thread, int program)
{
    cl_uint *count = &thread->n_kernels[program];
    char names[MAX_KERNELS][256];
    for (cl_uint i = 0; i < *count; i++) {
        MUST(clGetKernelInfo(thread->kernels[program][i], CL_KERNEL_FUNCTION_NAME, sizeof *names, names[i], NULL));
        MUST(clReleaseKernel(thread->kernels[program][i]));
    }
    for (cl_uint i = 0; i < *count; i++) {
        cl_int result;
        thread->kernels[program][i] = clCreateKernel(programs[program].handle, names[i], &result);
        must(result, "clCreateKernel");
        use_kernel(thread, program, i);
        MUST(clReleaseKernel(thread->kernels[program][i]));
    }
    *count = 0;
}

static void *run_thread(void *argument)
{
    thread_t *thread = argument;
    const cl_queue_properties any_order[] = {CL_QUEUE_PROPERTIES, CL_QUEUE_OUT_OF_ORDER_EXEC_MODE_ENABLE, 0};
    cl_int result;
    thread->in_order = clCreateCommandQueueWithProperties(context, gpu, NULL, &result);
    must(result, "clCreateCommandQueueWithProperties");
    thread->out_of_order = clCreateCommandQueueWithProperties(context, gpu, any_order, &result);
    must(result, "clCreateCommandQueueWithProperties");

    for (int program = 0; program < n_programs; program++) {
        cl_uint *count = &thread->n_kernels[program];
        MUST(clCreateKernelsInProgram(programs[program].handle, MAX_KERNELS, thread->kernels[program], count));
        if (brief)
            use_briefly(thread, program);
        for (cl_uint i = 0; i < *count; i++)
            use_kernel(thread, program, i);
    }

    MUST(clReleaseCommandQueue(thread->out_of_order));
    MUST(clReleaseCommandQueue(thread->in_order));
    return NULL;
}

static void release_kernels(const thread_t *thread)
{
    for (int program = 0; program < n_programs; program++)
        for (cl_uint i = 0; i < thread->n_kernels[program]; i++)
            MUST(clReleaseKernel(thread->kernels[program][i]));
}

int main(int argc, char **argv)
{
    read_command_line(argc, argv);
    setvbuf(stdout, NULL, _IOLBF, 4096);
    begin();
    static thread_t all[MAX_THREADS];
    for (int round = 0; round < rounds; round++) {
        for (int program = 0; program < n_programs; program++)
            build_program(program, round);
        for (int i = 0; i < threads; i++) {
            all[i] = (thread_t){.index = i, .round = round};
            if (pthread_create(&all[i].id, NULL, run_thread, &all[i]))
                fail("pthread_create");
        }
        for (int i = 0; i < threads; i++) {
            pthread_join(all[i].id, NULL);
            if (i)
                release_kernels(&all[i]);
        }
        /* Its kernels keep a program alive. */
        for (int program = 0; program < n_programs; program++)
            MUST(clReleaseProgram(programs[program].handle));
        release_kernels(&all[0]);
    }
    MUST(clReleaseContext(context));
    return 0;
}
