/* SPDX-License-Identifier: Apache-2.0 */
/* libdrainer.so: the least that a library does which is injected to sample a program. It takes all that is handed out, every
 * DRAINER_MS milliseconds (20), and prints at the end of the process, in JSON: samples, dropped ones and those of kernels that are not
 * the program's; rows, calls that failed, times that the hardware's buffer was full; samples by kernel; launches; activity records of
 * launches, and their time; cubins and their bytes; answers, rows and records that made no sense. DRAINER_PERIOD is the sampling
 * period (14), DRAINER_ROWS the room for rows in a call (1000). */
#define _GNU_SOURCE
#include "abi.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))
enum { CONTEXTS = 16, REASONS = 64, KERNELS = 16, CUBINS = 64, LAUNCHES = 1 << 20 };

/* Found by name: the library must load where there is no CUPTI. */
#define FUNCTIONS(X)                                                                                                               \
    X(Subscribe, (CUpti_SubscriberHandle *, CUpti_CallbackFunc, void *))                                                           \
    X(EnableCallback, (uint32_t, CUpti_SubscriberHandle, int, uint32_t))                                                           \
    X(GetResultString, (CUptiResult, const char **))                                                                               \
    X(GetCubinCrc, (CUpti_GetCubinCrcParams *))                                                                                    \
    X(PCSamplingEnable, (CUpti_PCSamplingContextParams *))                                                                         \
    X(PCSamplingDisable, (CUpti_PCSamplingContextParams *))                                                                        \
    X(PCSamplingSetConfigurationAttribute, (CUpti_PCSamplingConfigurationInfoParams *))                                            \
    X(PCSamplingGetNumStallReasons, (CUpti_PCSamplingGetNumStallReasonsParams *))                                                  \
    X(PCSamplingGetStallReasons, (CUpti_PCSamplingGetStallReasonsParams *))                                                        \
    X(PCSamplingGetData, (CUpti_PCSamplingGetDataParams *))                                                                        \
    X(ActivityRegisterCallbacks, (CUpti_BuffersCallbackRequestFunc, CUpti_BuffersCallbackCompleteFunc))                            \
    X(ActivityRegisterTimestampCallback, (CUpti_TimestampCallbackFunc))                                                            \
    X(ActivityEnable, (uint32_t))                                                                                                  \
    X(ActivityFlushAll, (uint32_t))                                                                                                \
    X(ActivityGetNextRecord, (uint8_t *, size_t, CUpti_Activity **))
#define DECLARE(name, arguments) static CUptiResult(*name) arguments;
FUNCTIONS(DECLARE)

struct context {
    CUcontext handle;
    bool live;
    CUpti_PCSamplingData data, rest;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct context contexts[CONTEXTS];
static int context_count;
static bool counts[REASONS]; /* whether it is a reason whose samples are to be added up */
static struct {
    const char *name;
    uint64_t samples;
} kernels[KERNELS];
static uint64_t samples, told, dropped, nonuser, rows, failures, full, calls;
static uint64_t launches, records, record_ns, cubins, cubin_bytes, crcs[CUBINS], nonsense, nonsense_records;
static size_t reason_count;
static uint8_t launched[LAUNCHES]; /* by correlation number */
static atomic_bool ending;
static pthread_t thread;

static unsigned number(const char *variable, unsigned otherwise)
{
    const char *value = getenv(variable);
    return value ? (unsigned)strtoul(value, NULL, 10) : otherwise;
}

static bool failed(const char *what, CUptiResult result)
{
    const char *text = "?";
    if (!result)
        return false;
    GetResultString(result, &text);
    fprintf(stderr, "drainer: %s: %s\n", what, text);
    return true;
}

static bool makes_sense(const CUpti_PCSamplingPCData *row)
{
    bool known = false;
    for (uint64_t i = 0; i < cubins && i < CUBINS; i++)
        known |= crcs[i] == row->cubinCrc;
    if (!known || !row->functionName || row->functionIndex > 1 << 20 || row->pcOffset > 1 << 30 || row->stallReasonCount > reason_count)
        return false;
    for (size_t i = 0; i < row->stallReasonCount; i++)
        if (row->stallReason[i].pcSamplingStallReasonIndex >= REASONS)
            return false;
    return true;
}

static void add_rows(const CUpti_PCSamplingData *data)
{
    told += data->totalSamples;
    dropped += data->droppedSamples;
    nonuser += data->nonUsrKernelsTotalSamples;
    full += data->hardwareBufferFull;
    for (size_t i = 0; i < data->totalNumPcs; i++) {
        const CUpti_PCSamplingPCData *row = &data->pPcData[i];
        int kernel = 0;
        if (!makes_sense(row)) {
            nonsense++;
            continue;
        }
        rows++;
        while (kernel < KERNELS - 1 && kernels[kernel].name && strcmp(kernels[kernel].name, row->functionName))
            kernel++;
        kernels[kernel].name = row->functionName;
        for (size_t j = 0; j < row->stallReasonCount; j++)
            if (counts[row->stallReason[j].pcSamplingStallReasonIndex]) {
                kernels[kernel].samples += row->stallReason[j].samples;
                samples += row->stallReason[j].samples;
            }
    }
}

static void drain(struct context *context)
{
    do {
        CUpti_PCSamplingGetDataParams params = {sizeof(params), NULL, context->handle, &context->data};
        CUptiResult result = PCSamplingGetData(&params);
        calls++;
        if (result) {
            failures++;
            full += result == CUPTI_ERROR_OUT_OF_MEMORY;
            return;
        }
        if (context->data.totalNumPcs > context->data.collectNumPcs) {
            nonsense++;
            return;
        }
        add_rows(&context->data);
        if (context->data.remainingNumPcs && context->data.totalNumPcs < context->data.collectNumPcs) {
            nonsense++; /* there was room for them */
            return;
        }
    } while (context->data.remainingNumPcs);
}

static void drain_all(void)
{
    pthread_mutex_lock(&lock);
    for (int i = 0; i < context_count; i++)
        if (contexts[i].live)
            drain(&contexts[i]);
    pthread_mutex_unlock(&lock);
}

static void *run(void *nothing)
{
    (void)nothing;
    while (!ending) {
        usleep(number("DRAINER_MS", 20) * 1000);
        drain_all();
    }
    return NULL;
}

static void make_room(CUpti_PCSamplingData *data, size_t count, size_t reasons)
{
    memset(data, 0, sizeof(*data));
    data->size = sizeof(*data);
    data->collectNumPcs = count;
    data->pPcData = calloc(count, sizeof(*data->pPcData));
    for (size_t i = 0; i < count; i++) {
        data->pPcData[i].size = sizeof(*data->pPcData);
        data->pPcData[i].stallReason = calloc(reasons, sizeof(CUpti_PCSamplingStallReason));
    }
}

static void learn_reasons(CUcontext handle, size_t count)
{
    uint32_t indices[REASONS];
    char names[REASONS][STALL_REASON_NAME_SIZE], *list[REASONS];
    CUpti_PCSamplingGetStallReasonsParams params = {sizeof(params), NULL, handle, count, indices, list};
    for (size_t i = 0; i < REASONS; i++)
        list[i] = names[i];
    if (failed("GetStallReasons", PCSamplingGetStallReasons(&params)))
        return;
    for (size_t i = 0; i < count; i++)
        counts[indices[i] % REASONS] = strstr(names[i], "_stalled_") && !strstr(names[i], "_not_issued");
}

static void begin(CUcontext handle)
{
    CUpti_PCSamplingContextParams enable = {sizeof(enable), NULL, handle};
    size_t count = 0;
    CUpti_PCSamplingGetNumStallReasonsParams ask = {sizeof(ask), NULL, handle, &count};
    CUpti_PCSamplingConfigurationInfo info[3] = {
        {.attributeType = ATTR_COLLECTION_MODE, .u32 = CUPTI_PC_SAMPLING_COLLECTION_MODE_CONTINUOUS},
        {.attributeType = ATTR_SAMPLING_PERIOD, .u32 = number("DRAINER_PERIOD", 14)},
        {.attributeType = ATTR_SAMPLING_DATA_BUFFER},
    };
    CUpti_PCSamplingConfigurationInfoParams configure = {sizeof(configure), NULL, handle, 3, info};
    struct context *context;
    pthread_mutex_lock(&lock);
    context = &contexts[context_count];
    if (context_count < CONTEXTS && !failed("Enable", PCSamplingEnable(&enable)) &&
        !failed("GetNumStallReasons", PCSamplingGetNumStallReasons(&ask)) && count <= REASONS) {
        reason_count = count;
        learn_reasons(handle, count);
        make_room(&context->data, number("DRAINER_ROWS", 1000), count);
        make_room(&context->rest, 10000, count);
        info[2].samplingDataBuffer = &context->rest;
        failed("SetConfigurationAttribute", PCSamplingSetConfigurationAttribute(&configure));
        context->handle = handle;
        context->live = true;
        context_count++;
    }
    pthread_mutex_unlock(&lock);
}

/* What is left is in `rest` when the context is gone. */
static void leave(CUcontext handle)
{
    pthread_mutex_lock(&lock);
    for (int i = 0; i < context_count; i++)
        if (contexts[i].live && contexts[i].handle == handle) {
            drain(&contexts[i]);
            contexts[i].live = false;
        }
    pthread_mutex_unlock(&lock);
}

static void on_callback(void *user, int domain, uint32_t cbid, const void *data)
{
    const CUpti_ResourceData *resource = data;
    const CUpti_CallbackData *call = data;
    (void)user;
    if (domain == CUPTI_CB_DOMAIN_DRIVER_API) {
        if (call->callbackSite != CUPTI_API_EXIT || *(CUresult *)call->functionReturnValue)
            return;
        __atomic_fetch_add(&launches, 1, __ATOMIC_RELAXED);
        launched[call->correlationId % LAUNCHES] = 1;
    } else if (cbid == CUPTI_CBID_RESOURCE_CONTEXT_CREATED)
        begin(resource->context);
    else if (cbid == CUPTI_CBID_RESOURCE_CONTEXT_DESTROY_STARTING)
        leave(resource->context);
    else if (cbid == CUPTI_CBID_RESOURCE_MODULE_LOADED) {
        const CUpti_ModuleResourceData *module = resource->resourceDescriptor;
        CUpti_GetCubinCrcParams params = {sizeof(params), module->cubinSize, module->pCubin, 0};
        failed("GetCubinCrc", GetCubinCrc(&params));
        pthread_mutex_lock(&lock);
        crcs[cubins++ % CUBINS] = params.cubinCrc;
        cubin_bytes += module->cubinSize;
        pthread_mutex_unlock(&lock);
    } else
        drain_all();
}

static void request(uint8_t **buffer, size_t *size, size_t *most)
{
    *size = 1 << 16;
    *buffer = aligned_alloc(8, *size);
    *most = 0;
}

static void complete(CUcontext none, uint32_t stream, uint8_t *buffer, size_t size, size_t valid)
{
    CUpti_Activity *record = NULL;
    (void)none;
    (void)stream;
    (void)size;
    while (!ActivityGetNextRecord(buffer, valid, &record)) {
        const CUpti_ActivityKernel10 *kernel = (const void *)record;
        if (!kernel->start || kernel->end < kernel->start || !kernel->name ||
            kernel->correlationId >= LAUNCHES || !launched[kernel->correlationId]) {
            nonsense_records++;
            continue;
        }
        records++;
        record_ns += kernel->end - kernel->start;
    }
    free(buffer);
}

static uint64_t monotonic(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000ull + (uint64_t)t.tv_nsec;
}

static void end(void)
{
    const char *comma = "";
    ending = true;
    pthread_join(thread, NULL);
    for (int i = 0; i < context_count; i++) {
        CUpti_PCSamplingContextParams params = {sizeof(params), NULL, contexts[i].handle};
        if (contexts[i].live) {
            drain(&contexts[i]);
            failed("Disable", PCSamplingDisable(&params));
        }
        add_rows(&contexts[i].rest);
    }
    ActivityFlushAll(1);
    printf("{\"samples\": %lu, \"told\": %lu, \"dropped\": %lu, \"nonuser\": %lu, \"rows\": %lu, \"calls\": %lu, \"failures\": %lu, ",
           samples, told, dropped, nonuser, rows, calls, failures);
    printf("\"full\": %lu, \"launches\": %lu, \"records\": %lu, \"record_ns\": %lu, \"nonsense\": %lu, \"nonsense_records\": %lu, ", full,
           launches, records, record_ns, nonsense, nonsense_records);
    printf("\"cubins\": %lu, \"cubin_bytes\": %lu, \"kernels\": {", cubins, cubin_bytes);
    for (int i = 0; i < KERNELS && kernels[i].name; i++, comma = ", ")
        printf("%s\"%s\": %lu", comma, kernels[i].name, kernels[i].samples);
    printf("}}\n");
    fflush(stdout);
}

EXPORT int InitializeInjection(void)
{
    static const uint32_t of_resources[] = {
        CUPTI_CBID_RESOURCE_CONTEXT_CREATED, CUPTI_CBID_RESOURCE_CONTEXT_DESTROY_STARTING, CUPTI_CBID_RESOURCE_MODULE_LOADED,
        CUPTI_CBID_RESOURCE_MODULE_UNLOAD_STARTING};
    static const uint32_t of_driver[] = {
        CBID_cuLaunchKernel,       CBID_cuLaunchKernel_ptsz,           CBID_cuLaunchKernelEx, CBID_cuLaunchKernelEx_ptsz,
        CBID_cuLaunchCooperativeKernel, CBID_cuLaunchCooperativeKernel_ptsz, CBID_cuGraphLaunch,    CBID_cuGraphLaunch_ptsz};
    void *cupti = dlopen("libcupti.so.13", RTLD_NOW);
    CUpti_SubscriberHandle subscriber;
    if (!cupti) {
        fprintf(stderr, "drainer: %s\n", dlerror());
        return 0;
    }
#define FIND(name, arguments) *(void **)&name = dlsym(cupti, "cupti" #name);
    FUNCTIONS(FIND)
    if (failed("Subscribe", Subscribe(&subscriber, on_callback, NULL)))
        return 0;
    for (size_t i = 0; i < sizeof(of_resources) / sizeof(*of_resources); i++)
        failed("EnableCallback", EnableCallback(1, subscriber, CUPTI_CB_DOMAIN_RESOURCE, of_resources[i]));
    for (size_t i = 0; i < sizeof(of_driver) / sizeof(*of_driver); i++)
        failed("EnableCallback", EnableCallback(1, subscriber, CUPTI_CB_DOMAIN_DRIVER_API, of_driver[i]));
    failed("ActivityRegisterCallbacks", ActivityRegisterCallbacks(request, complete));
    failed("ActivityRegisterTimestampCallback", ActivityRegisterTimestampCallback(monotonic));
    failed("ActivityEnable", ActivityEnable(CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL));
    pthread_create(&thread, NULL, run, NULL);
    atexit(end);
    return 1;
}
