/* SPDX-License-Identifier: Apache-2.0 */
/* libcupti.so.13 of the stand-in: callbacks, PC sampling in continuous mode and activity records of what libcuda.so.1 executes.
 *
 * The GPU has 1.5 GHz. Every 2^period cycles a kernel that executes gives a sample for each multiprocessor. Which instruction the
 * n-th sample of a kernel is at, and why it waits there, depends on the kernel's name and n alone. As with NVIDIA's, samples are
 * handed out some time after they were taken (the workers' sleep span, 100 ms), and what was not handed out when sampling ends is put
 * into the buffer of the configuration, as far as there is room.
 *
 * As with NVIDIA's, a GPU samples one process at a time: where a second one launches in a context that is to be sampled, there are no
 * callbacks at calls and no activity records from then on in it, and cuptiPCSamplingGetData fails with CUPTI_ERROR_UNKNOWN.
 *
 * Faults (STANDIN_CUDA_FAULTS, with commas between them):
 *   second-subscriber     cuptiSubscribe says that another one has subscribed
 *   no-permission         cuptiPCSamplingEnable says CUPTI_ERROR_INSUFFICIENT_PRIVILEGES
 *   not-supported         cuptiPCSamplingEnable says CUPTI_ERROR_NOT_SUPPORTED
 *   no-configuration      cuptiPCSamplingSetConfigurationAttribute fails
 *   no-reasons            cuptiPCSamplingGetStallReasons fails
 *   unknown-reason        "misc" has the name "something_new"
 *   dropped               a fifth of the samples is dropped by the hardware
 *   nonuser               one sample in twenty more, of the driver's own kernels
 *   full, full-quiet      each second time that there is something new, the hardware buffer is full, and that is lost: with
 *                         CUPTI_ERROR_OUT_OF_MEMORY, without
 *   getdata-fails         each second cuptiPCSamplingGetData fails with CUPTI_ERROR_UNKNOWN; nothing is lost
 *   getdata-fails-always, getdata-hangs
 *   nonsense-count        each third cuptiPCSamplingGetData says more rows than there is room for; nothing is lost
 *   nonsense-remaining    it never says that nothing remains
 *   nonsense-name, nonsense-reason, nonsense-reasons, nonsense-pc, nonsense-function, nonsense-crc
 *                         one row more in each answer: without a name, of a reason that does not exist, with more reasons than there
 *                         is room for, of an instruction or a function that does not exist, of a cubin that was never loaded
 *   nonsense              all of them
 *   not-looked-up         each third row is one whose function was not looked up yet: the rest of it is 0, and its name is what
 *                         strdup(NULL) returns, as with NVIDIA's
 *   cubin-truncated, cubin-damaged, cubin-empty, cubin-brief
 *                         what MODULE_LOADED shows: half of it, other bytes, nothing, one that is gone after the callback
 *   unload                what was not handed out of a module's samples when it was unloaded is lost
 *   no-owners             the driver does not say whose function or kernel a handle is
 *   unloads-at-destroy    a context that ends tells of its modules' end, behind CONTEXT_DESTROY_STARTING
 *   no-activity           cuptiActivityEnable fails
 *   activity-dropped      each tenth record is dropped, and counted
 *   activity-nonsense     each tenth record has no times, ends before it begins, has no name, or another correlation, in turns */
#define _GNU_SOURCE
#include "shared.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))
#define MS 1000000ull
#define VERSION 130001
#define FIRST_REASON 2
#define REASON_KINDS ((STANDIN_REASONS - FIRST_REASON) / 2)
#define PREFIX "smsp__pcsamp_"
#define STALLED PREFIX "warps_issue_stalled_"
#define SHORTEST 5 /* sampling periods, as powers of two */
#define LONGEST 31
#define DEFAULT_PERIOD 11

/* The names of reasons 2, 4, ...; behind each is the one with _not_issued. */
static const char *const kinds[REASON_KINDS] = {
    "barrier",      "branch_resolving", "dispatch_stall", "drain",    "imc_miss",         "lg_throttle", "long_scoreboard",
    "math_pipe_throttle", "membar",     "mio_throttle",   "misc",     "no_instructions",  "not_selected", "selected",
    "short_scoreboard",   "sleeping",   "tex_throttle",   "wait",     "warpgroup_arrive",
};
/* In the order in which one real chip told them, which is that of no list. */
static const uint8_t told_order[STANDIN_REASONS] = {39, 37, 36, 35, 33, 31, 30, 10, 12, 8,  14, 7,  6, 38, 19, 4,  5,  11, 0,  2,
                                                    34, 15, 1,  25, 3,  9,  22, 24, 13, 17, 32, 18, 21, 20, 23, 26, 29, 16, 27, 28};
enum { MISC = 22, NOT_SELECTED = 26, SELECTED = 28, WAIT = 36, LONG_SCOREBOARD = 14 };

struct CUpti_Subscriber_st {
    CUpti_CallbackFunc call;
    void *user;
    uint8_t enabled[CUPTI_CB_DOMAINS][CBID_COUNT];
};

static struct CUpti_Subscriber_st subscriber;
static atomic_bool subscribed;
static pthread_mutex_t subscribe_lock = PTHREAD_MUTEX_INITIALIZER;
static __thread bool in_callback; /* what a callback calls calls no callback */
static void (*compute_crc)(const void *cubin, size_t size, uint64_t *crc);

static struct standin_cuda *driver(void)
{
    static _Atomic(struct standin_cuda *) found;
    struct standin_cuda *cuda = found;
    if (!cuda) {
        void *library = dlopen("libcuda.so.1", RTLD_NOW);
        cuda = library ? dlsym(library, STANDIN_CUDA_SYMBOL) : NULL;
        if (cuda && cuda->size != sizeof(*cuda)) {
            fprintf(stderr, "libcupti of the stand-in: libcuda.so.1 is of another build\n");
            abort();
        }
        found = cuda;
    }
    return cuda && !cuda->dead ? cuda : NULL;
}

static bool fault(const char *name)
{
    struct standin_cuda *cuda = driver();
    return cuda && cuda->fault(name);
}

static bool nonsense(const char *name)
{
    return fault(name) || fault("nonsense");
}

#define NEED_DRIVER                                                                                                                \
    struct standin_cuda *cuda = driver();                                                                                          \
    if (!cuda)                                                                                                                     \
    return CUPTI_ERROR_NOT_INITIALIZED

/* ---- results ---- */

EXPORT CUptiResult cuptiGetVersion(uint32_t *version)
{
    *version = VERSION;
    return CUPTI_SUCCESS;
}

EXPORT CUptiResult cuptiGetResultString(CUptiResult result, const char **text)
{
    static const struct {
        CUptiResult result;
        const char *text;
    } known[] = {
        {CUPTI_SUCCESS, "CUPTI_SUCCESS"},
        {CUPTI_ERROR_INVALID_PARAMETER, "CUPTI_ERROR_INVALID_PARAMETER"},
        {CUPTI_ERROR_INVALID_CONTEXT, "CUPTI_ERROR_INVALID_CONTEXT"},
        {CUPTI_ERROR_INVALID_OPERATION, "CUPTI_ERROR_INVALID_OPERATION"},
        {CUPTI_ERROR_OUT_OF_MEMORY, "CUPTI_ERROR_OUT_OF_MEMORY"},
        {CUPTI_ERROR_MAX_LIMIT_REACHED, "CUPTI_ERROR_MAX_LIMIT_REACHED"},
        {CUPTI_ERROR_NOT_INITIALIZED, "CUPTI_ERROR_NOT_INITIALIZED"},
        {CUPTI_ERROR_INVALID_KIND, "CUPTI_ERROR_INVALID_KIND"},
        {CUPTI_ERROR_NOT_SUPPORTED, "CUPTI_ERROR_NOT_SUPPORTED"},
        {CUPTI_ERROR_INSUFFICIENT_PRIVILEGES, "CUPTI_ERROR_INSUFFICIENT_PRIVILEGES"},
        {CUPTI_ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED, "CUPTI_ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED"},
        {CUPTI_ERROR_UNKNOWN, "CUPTI_ERROR_UNKNOWN"},
    };
    for (size_t i = 0; i < sizeof(known) / sizeof(*known); i++)
        if (known[i].result == result) {
            *text = known[i].text;
            return CUPTI_SUCCESS;
        }
    return CUPTI_ERROR_INVALID_PARAMETER;
}

EXPORT CUptiResult cuptiGetErrorMessage(CUptiResult result, const char **text)
{
    return cuptiGetResultString(result, text);
}

/* ---- one process at a time ---- */

static atomic_bool has_failed; /* another process had the GPU */
static int owned[STANDIN_DEVICES]; /* a socket for each GPU that this process has: the kernel gives its name to one process */
static pthread_mutex_t owned_lock = PTHREAD_MUTEX_INITIALIZER;

static void take_gpu(CUdevice device)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    CUuuid uuid;
    pthread_mutex_lock(&owned_lock);
    if (!owned[device]) {
        driver()->uuid(&uuid, device);
        memcpy(address.sun_path + 1, "standin-gpu", 11);
        memcpy(address.sun_path + 12, uuid.bytes, sizeof(uuid.bytes));
        owned[device] = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
        if (bind(owned[device], (struct sockaddr *)&address, offsetof(struct sockaddr_un, sun_path) + 12 + sizeof(uuid.bytes)))
            has_failed = true;
    }
    pthread_mutex_unlock(&owned_lock);
}

static void leave_gpu(CUdevice device)
{
    pthread_mutex_lock(&owned_lock);
    if (owned[device])
        close(owned[device]);
    owned[device] = 0;
    pthread_mutex_unlock(&owned_lock);
}

/* ---- callbacks ---- */

static bool wanted(int domain, uint32_t cbid)
{
    return subscribed && !in_callback && cbid < CBID_COUNT && subscriber.enabled[domain][cbid];
}

static void call_subscriber(int domain, uint32_t cbid, const void *data)
{
    in_callback = true;
    subscriber.call(subscriber.user, domain, cbid, data);
    in_callback = false;
}

static void on_call(struct standin_call *call)
{
    CUpti_CallbackData data = {
        .callbackSite = call->result ? CUPTI_API_EXIT : CUPTI_API_ENTER,
        .functionName = call->function,
        .functionParams = call->params,
        .functionReturnValue = call->result,
        .symbolName = call->symbol,
        .context = call->context,
        .contextUid = call->context ? call->context->id : 0,
        .correlationData = &call->user,
        .correlationId = call->correlation,
    };
    if (call->symbol && call->context && call->context->sampling.enabled)
        take_gpu(call->context->device);
    if (wanted(CUPTI_CB_DOMAIN_DRIVER_API, call->cbid) && !has_failed)
        call_subscriber(CUPTI_CB_DOMAIN_DRIVER_API, call->cbid, &data);
}

/* The cubin as a callback sees it, in memory of its own where it is not the module's. */
static const char *shown_cubin(CUmodule module, size_t *size)
{
    char *copy;
    bool damaged = fault("cubin-damaged");
    *size = module->size;
    if (fault("cubin-empty")) {
        *size = 0;
        return NULL;
    }
    if (fault("cubin-truncated"))
        *size = module->size / 2;
    else if (!damaged && !fault("cubin-brief"))
        return module->bytes;
    copy = mmap(NULL, *size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (copy == MAP_FAILED)
        abort();
    memcpy(copy, module->bytes, *size);
    for (size_t i = 40; damaged && i < *size; i += 7)
        copy[i] = (char)(copy[i] ^ (char)(i * 31));
    return copy;
}

static void on_resource(uint32_t cbid, CUcontext context, CUstream stream, CUmodule module)
{
    CUpti_ModuleResourceData of_module = {0};
    CUpti_ResourceData data = {context, stream, NULL};
    if (module && compute_crc && cbid == CUPTI_CBID_RESOURCE_MODULE_LOADED)
        compute_crc(module->bytes, module->size, &module->crc);
    if (!wanted(CUPTI_CB_DOMAIN_RESOURCE, cbid))
        return;
    if (module) {
        of_module.moduleId = module->id;
        of_module.pCubin = shown_cubin(module, &of_module.cubinSize);
        data.resourceDescriptor = &of_module;
    }
    call_subscriber(CUPTI_CB_DOMAIN_RESOURCE, cbid, &data);
    if (module && of_module.pCubin && of_module.pCubin != module->bytes)
        munmap((void *)of_module.pCubin, of_module.cubinSize);
}

static void on_graph_node(uint32_t cbid, CUgraphNode node, CUgraphNode original)
{
    CUpti_GraphData of_node = {.node = node, .originalNode = original};
    CUpti_ResourceData data = {NULL, NULL, &of_node};
    if (wanted(CUPTI_CB_DOMAIN_RESOURCE, cbid))
        call_subscriber(CUPTI_CB_DOMAIN_RESOURCE, cbid, &data);
}

static void on_context_end(CUcontext context);
static void on_module_end(CUmodule module);

EXPORT CUptiResult cuptiSubscribe(CUpti_SubscriberHandle *handle, CUpti_CallbackFunc call, void *user)
{
    CUptiResult result = CUPTI_SUCCESS;
    NEED_DRIVER;
    if (!handle)
        return CUPTI_ERROR_INVALID_PARAMETER;
    pthread_mutex_lock(&subscribe_lock);
    if (subscribed || fault("second-subscriber"))
        result = CUPTI_ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED;
    else {
        memset(&subscriber, 0, sizeof(subscriber));
        subscriber.call = call;
        subscriber.user = user;
        *handle = &subscriber;
        subscribed = true;
        cuda->on_context_end = on_context_end;
        cuda->on_module_end = on_module_end;
        cuda->on_call = on_call;
        cuda->on_resource = on_resource;
        cuda->on_graph_node = on_graph_node;
    }
    pthread_mutex_unlock(&subscribe_lock);
    return result;
}

EXPORT CUptiResult cuptiUnsubscribe(CUpti_SubscriberHandle handle)
{
    if (handle != &subscriber || !subscribed)
        return CUPTI_ERROR_INVALID_PARAMETER;
    subscribed = false;
    return CUPTI_SUCCESS;
}

EXPORT CUptiResult cuptiEnableCallback(uint32_t enable, CUpti_SubscriberHandle handle, int domain, uint32_t cbid)
{
    if (handle != &subscriber || !subscribed || domain <= 0 || domain >= CUPTI_CB_DOMAINS || !cbid || cbid >= CBID_COUNT)
        return CUPTI_ERROR_INVALID_PARAMETER;
    subscriber.enabled[domain][cbid] = enable != 0;
    return CUPTI_SUCCESS;
}

EXPORT CUptiResult cuptiEnableDomain(uint32_t enable, CUpti_SubscriberHandle handle, int domain)
{
    if (handle != &subscriber || !subscribed || domain <= 0 || domain >= CUPTI_CB_DOMAINS)
        return CUPTI_ERROR_INVALID_PARAMETER;
    memset(subscriber.enabled[domain], enable != 0, sizeof(subscriber.enabled[domain]));
    return CUPTI_SUCCESS;
}

EXPORT CUptiResult cuptiGetContextId(CUcontext context, uint32_t *id)
{
    if (!context || !id)
        return CUPTI_ERROR_INVALID_PARAMETER;
    *id = context->id;
    return CUPTI_SUCCESS;
}

EXPORT CUptiResult cuptiGetDeviceId(CUcontext context, uint32_t *id)
{
    if (!context)
        return CUPTI_ERROR_INVALID_CONTEXT;
    *id = (uint32_t)context->device;
    return CUPTI_SUCCESS;
}

EXPORT CUptiResult cuptiGetGraphExecId(CUgraphExec exec, uint32_t *id)
{
    *id = *(uint32_t *)exec;
    return CUPTI_SUCCESS;
}

EXPORT CUptiResult cuptiGetGraphNodeId(CUgraphNode node, uint64_t *id)
{
    if (!node)
        return CUPTI_ERROR_INVALID_PARAMETER;
    *id = node->id;
    return CUPTI_SUCCESS;
}

EXPORT CUptiResult cuptiGetCubinCrc(CUpti_GetCubinCrcParams *params)
{
    if (!params || params->size < sizeof(*params) || !params->cubin || !params->cubinSize)
        return CUPTI_ERROR_INVALID_PARAMETER;
    if (compute_crc)
        compute_crc(params->cubin, params->cubinSize, &params->cubinCrc);
    else
        params->cubinCrc = standin_crc(params->cubin, params->cubinSize);
    return CUPTI_SUCCESS;
}

EXPORT CUptiResult cuptiRegisterComputeCrcCallback(void (*function)(const void *cubin, size_t size, uint64_t *crc))
{
    if (!function)
        return CUPTI_ERROR_INVALID_PARAMETER;
    compute_crc = function;
    return CUPTI_SUCCESS;
}

/* ---- what the GPU samples ---- */

static uint64_t mixed(uint64_t value)
{
    value = (value ^ value >> 30) * 0xbf58476d1ce4e5b9ull;
    value = (value ^ value >> 27) * 0x94d049bb133111ebull;
    return value ^ value >> 31;
}

static uint64_t seed_of(const char *name)
{
    uint64_t hash = 1469598103934665603ull;
    while (*name)
        hash = (hash ^ (unsigned char)*name++) * 1099511628211ull;
    return hash;
}

/* Of STANDIN_CHOICES samples the instruction of rank r has about 1 in r. */
static void choose_instructions(CUfunction function)
{
    uint64_t seed = seed_of(function->name);
    uint32_t count = function->instructions, at = 0;
    double all = 0, sum = 0;
    function->choice = calloc(STANDIN_CHOICES, sizeof(*function->choice));
    if (!function->choice)
        abort();
    for (uint32_t rank = 1; rank <= count; rank++)
        all += 1.0 / rank;
    for (uint32_t rank = 1; rank <= count; rank++) {
        uint32_t instruction = (uint32_t)((seed + (uint64_t)rank * 0x9e3779b1u) % count);
        sum += 1.0 / rank;
        while (at < STANDIN_CHOICES && at < sum / all * STANDIN_CHOICES)
            function->choice[at++] = (uint16_t)instruction;
    }
}

static void choose(const CUfunction function, uint64_t seed, uint64_t n, uint32_t *instruction, uint32_t *reason, bool *not_issued)
{
    static const uint8_t others[] = {SELECTED, WAIT, NOT_SELECTED, LONG_SCOREBOARD};
    uint64_t hash = mixed(seed + n);
    *instruction = function->choice[hash % STANDIN_CHOICES];
    if ((hash >> 10) % 8 < 5)
        *reason = FIRST_REASON + 2 * (uint32_t)(mixed(seed ^ ((uint64_t)*instruction << 32)) % REASON_KINDS);
    else
        *reason = others[(hash >> 13) % 4];
    *not_issued = *reason != SELECTED && (hash >> 15) % 4;
}

static struct standin_row *row_of(CUfunction function, uint32_t instruction)
{
    struct standin_row **row = &function->rows[instruction];
    if (!*row) {
        *row = calloc(1, sizeof(**row));
        if (!*row)
            abort();
        (*row)->function = function;
        (*row)->instruction = instruction;
    }
    return *row;
}

static void take_samples(struct standin_execution *execution, uint64_t count, bool lost)
{
    CUfunction function = execution->function;
    struct standin_sampling *sampling = &execution->context->sampling;
    uint64_t seed = seed_of(function->name);
    bool drops = fault("dropped"), more = fault("nonuser");
    if (!function->choice)
        choose_instructions(function);
    for (uint64_t i = 0; i < count; i++) {
        struct standin_row *row;
        uint32_t instruction, reason;
        bool not_issued;
        uint64_t n = function->sampled++, *counts;
        if (more && n % 20 == 0)
            sampling->new_nonuser++;
        if (drops && n % 5 == 0) {
            sampling->new_dropped++;
            continue;
        }
        choose(function, seed, n, &instruction, &reason, &not_issued);
        row = row_of(function, instruction);
        counts = lost ? row->lost : row->pending;
        counts[reason]++;
        counts[reason + 1] += not_issued;
        sampling->lost += lost;
        execution->samples++;
        if (!lost && !row->queued) {
            row->queued = true;
            row->next = NULL;
            *sampling->last_row = row;
            sampling->last_row = &row->next;
            sampling->row_count++;
        }
    }
}

static uint64_t period_of(uint64_t ns, uint32_t period)
{
    return (ns * 3 / 2) >> period;
}

/* Make the samples up to `to`, with the lock held. */
static void decode(struct standin_cuda *cuda, CUcontext context, uint64_t to, bool lost)
{
    struct standin_sampling *s = &context->sampling;
    struct standin_execution **link = &s->first, *execution;
    bool counts = !s->start_stop || s->started;
    while ((execution = *link)) {
        uint64_t until = execution->end < to ? execution->end : to;
        uint64_t from = execution->sampled_to > s->since ? execution->sampled_to : s->since;
        if (until > from && counts)
            take_samples(execution, (period_of(until, s->period) - period_of(from, s->period)) * cuda->multiprocessors, lost);
        if (until > execution->sampled_to)
            execution->sampled_to = until;
        if (execution->end <= to)
            *link = execution->sampling;
        else
            link = &execution->sampling;
    }
    s->last = link;
    s->decoded_to = to;
}

/* ---- PC sampling ---- */

static bool known(struct standin_cuda *cuda, CUcontext context)
{
    for (CUcontext each = cuda->contexts; each; each = each->next)
        if (each == context)
            return !context->dead;
    return false;
}

static uint64_t first_kinds(const uint64_t *counts)
{
    uint64_t sum = 0;
    for (int reason = FIRST_REASON; reason < STANDIN_REASONS; reason += 2)
        sum += counts[reason];
    return sum;
}

/* Returns a function's name; NULL if the function is unknown. */
static __attribute__((noipa)) const char *name_of(const struct CUfunc_st *function)
{
    return function ? function->name : NULL;
}

/* One row of an answer; false: none of its reasons is wanted. */
static bool put_row(struct standin_sampling *s, struct standin_row *row, CUpti_PCSamplingPCData *to)
{
    size_t count = 0;
    for (uint32_t at = 0; at < STANDIN_REASONS; at++) {
        uint32_t reason = told_order[at];
        if (row->pending[reason] && s->reasons >> reason & 1) {
            to->stallReason[count].pcSamplingStallReasonIndex = reason;
            to->stallReason[count++].samples = (uint32_t)row->pending[reason];
        }
        row->handed[reason] += row->pending[reason];
    }
    memset(row->pending, 0, sizeof(row->pending));
    to->cubinCrc = row->function->module->crc;
    to->pcOffset = (uint64_t)row->instruction * STANDIN_INSTRUCTION;
    to->functionIndex = row->function->symbol;
    to->functionName = (char *)name_of(row->function); /* one for all rows */
    to->stallReasonCount = count;
    to->correlationId = 0;
    if (fault("not-looked-up") && ++s->looked_up % 3 == 0) {
        static char *of_none; /* one for all, and not freed */
        to->cubinCrc = to->pcOffset = to->functionIndex = 0;
        of_none = of_none ? of_none : strdup(name_of(NULL));
        to->functionName = of_none;
    }
    return count != 0;
}

/* Rows that make no sense, behind those that do. */
static void put_nonsense(struct standin_sampling *s, CUpti_PCSamplingData *data)
{
    static const char *const names[] = {"nonsense-name", "nonsense-reason",   "nonsense-reasons",
                                        "nonsense-pc",   "nonsense-function", "nonsense-crc"};
    static char some_name[] = "a_kernel";
    for (int i = 0; i < 6 && data->totalNumPcs < data->collectNumPcs; i++) {
        CUpti_PCSamplingPCData *row = &data->pPcData[data->totalNumPcs];
        const CUpti_PCSamplingPCData *good = data->pPcData;
        if (!nonsense(names[i]))
            continue;
        if (data->totalNumPcs) {
            row->cubinCrc = good->cubinCrc;
            row->pcOffset = good->pcOffset;
            row->functionIndex = good->functionIndex;
            row->functionName = good->functionName;
        } else {
            row->cubinCrc = row->pcOffset = 0;
            row->functionIndex = 1;
            row->functionName = some_name;
        }
        row->stallReasonCount = 1;
        row->stallReason[0] = (CUpti_PCSamplingStallReason){WAIT, 7};
        row->correlationId = 0;
        switch (i) {
        case 0: row->functionName = NULL; break;
        case 1: row->stallReason[0].pcSamplingStallReasonIndex = 0xfffffff0u; break;
        case 2: row->stallReasonCount = (size_t)1 << 40; break;
        case 3: row->pcOffset = 1ull << 40; break;
        case 4: row->functionIndex = 0xffffffffu; break;
        case 5: row->cubinCrc ^= 0x123456789abcdefull; break;
        }
        data->totalNumPcs++;
        s->spoiled++;
    }
}

/* Hand out as many rows as there is room for, with the lock held. */
static void hand_out(struct standin_sampling *s, CUpti_PCSamplingData *data)
{
    uint64_t samples = 0;
    data->totalNumPcs = 0;
    data->hardwareBufferFull = 0;
    data->rangeId = 0;
    while (s->rows && data->totalNumPcs < data->collectNumPcs) {
        struct standin_row *row = s->rows;
        s->rows = row->next;
        s->row_count--;
        row->queued = false;
        samples += first_kinds(row->pending);
        data->totalNumPcs += put_row(s, row, &data->pPcData[data->totalNumPcs]);
    }
    if (!s->rows)
        s->last_row = &s->rows;
    data->remainingNumPcs = s->row_count;
    data->droppedSamples = s->new_dropped;
    data->nonUsrKernelsTotalSamples = s->new_nonuser;
    data->totalSamples = samples + s->new_dropped + s->new_nonuser;
    s->handed += samples;
    s->dropped += s->new_dropped;
    s->nonuser += s->new_nonuser;
    s->new_dropped = s->new_nonuser = 0;
}

static void lose(struct standin_sampling *s, struct standin_row *row)
{
    for (int reason = 0; reason < STANDIN_REASONS; reason++)
        row->lost[reason] += row->pending[reason];
    s->lost += first_kinds(row->pending);
    memset(row->pending, 0, sizeof(row->pending));
}

/* Sampling ends, with the lock held: what is left goes into the buffer of the configuration. */
static void finish(struct standin_cuda *cuda, CUcontext context)
{
    struct standin_sampling *s = &context->sampling;
    CUpti_PCSamplingData *buffer = s->buffer;
    decode(cuda, context, cuda->now(), false);
    if (buffer)
        hand_out(s, buffer);
    for (; s->rows; s->rows = s->rows->next) {
        s->rows->queued = false;
        lose(s, s->rows);
    }
    if (buffer)
        buffer->remainingNumPcs = s->row_count;
    s->row_count = 0;
    s->last_row = &s->rows;
    s->first = NULL;
    s->last = &s->first;
    s->enabled = s->started = false;
}

static void on_context_end(CUcontext context)
{
    struct standin_cuda *cuda = driver();
    if (!cuda)
        return;
    pthread_mutex_lock(&cuda->lock);
    if (context->sampling.enabled)
        finish(cuda, context);
    pthread_mutex_unlock(&cuda->lock);
}

static void on_module_end(CUmodule module)
{
    struct standin_cuda *cuda = driver();
    struct standin_sampling *s = &module->context->sampling;
    if (!cuda || !fault("unload"))
        return;
    pthread_mutex_lock(&cuda->lock);
    if (s->enabled)
        decode(cuda, module->context, cuda->now(), false);
    for (struct standin_row *row = s->rows; row; row = row->next)
        if (row->function->module == module)
            lose(s, row);
    pthread_mutex_unlock(&cuda->lock);
}

#define LOCK_CONTEXT(params, needs_enabled)                                                                                        \
    NEED_DRIVER;                                                                                                                   \
    if (!(params) || (params)->size < sizeof(*(params)))                                                                           \
        return CUPTI_ERROR_INVALID_PARAMETER;                                                                                      \
    pthread_mutex_lock(&cuda->lock);                                                                                               \
    if (!known(cuda, (params)->ctx)) {                                                                                             \
        pthread_mutex_unlock(&cuda->lock);                                                                                         \
        return CUPTI_ERROR_INVALID_CONTEXT;                                                                                        \
    }                                                                                                                              \
    struct standin_sampling *s = &(params)->ctx->sampling;                                                                         \
    if ((needs_enabled) && !s->enabled) {                                                                                          \
        pthread_mutex_unlock(&cuda->lock);                                                                                         \
        return CUPTI_ERROR_INVALID_OPERATION;                                                                                      \
    }

EXPORT CUptiResult cuptiPCSamplingEnable(CUpti_PCSamplingContextParams *params)
{
    if (fault("no-permission"))
        return CUPTI_ERROR_INSUFFICIENT_PRIVILEGES;
    if (fault("not-supported"))
        return CUPTI_ERROR_NOT_SUPPORTED;
    LOCK_CONTEXT(params, false);
    if (s->enabled) {
        pthread_mutex_unlock(&cuda->lock);
        return CUPTI_ERROR_INVALID_OPERATION;
    }
    s->enabled = true;
    s->start_stop = s->started = false;
    s->period = DEFAULT_PERIOD;
    s->sleep_span_ms = 100;
    s->mode = CUPTI_PC_SAMPLING_COLLECTION_MODE_CONTINUOUS;
    s->hardware_bytes = (size_t)512 << 20;
    s->scratch_bytes = (size_t)1 << 20;
    s->reasons = ~0ull;
    s->buffer = NULL;
    s->since = s->decoded_to = cuda->now();
    for (struct standin_execution *e = cuda->executions; e; e = e->next)
        if (e->context == params->ctx && e->end > s->since) { /* launched before */
            e->sampling = NULL;
            *s->last = e;
            s->last = &e->sampling;
        }
    pthread_mutex_unlock(&cuda->lock);
    return CUPTI_SUCCESS;
}

EXPORT CUptiResult cuptiPCSamplingDisable(CUpti_PCSamplingContextParams *params)
{
    LOCK_CONTEXT(params, true);
    finish(cuda, params->ctx);
    pthread_mutex_unlock(&cuda->lock);
    leave_gpu(params->ctx->device);
    cuda->write_ledger();
    return CUPTI_SUCCESS;
}

static CUptiResult start_or_stop(CUpti_PCSamplingContextParams *params, bool start)
{
    CUptiResult result = CUPTI_SUCCESS;
    LOCK_CONTEXT(params, true);
    if (!s->start_stop || s->started == start)
        result = CUPTI_ERROR_INVALID_OPERATION;
    else {
        decode(cuda, params->ctx, cuda->now(), false);
        s->started = start;
    }
    pthread_mutex_unlock(&cuda->lock);
    return result;
}

EXPORT CUptiResult cuptiPCSamplingStart(CUpti_PCSamplingContextParams *params)
{
    return start_or_stop(params, true);
}

EXPORT CUptiResult cuptiPCSamplingStop(CUpti_PCSamplingContextParams *params)
{
    return start_or_stop(params, false);
}

static CUptiResult set(struct standin_sampling *s, CUpti_PCSamplingConfigurationInfo *info)
{
    switch (info->attributeType) {
    case ATTR_SAMPLING_PERIOD:
        if (info->u32 < SHORTEST || info->u32 > LONGEST)
            return CUPTI_ERROR_INVALID_OPERATION;
        s->period = info->u32;
        return CUPTI_SUCCESS;
    case ATTR_STALL_REASON:
        s->reasons = 0;
        for (size_t i = 0; i < info->reasons.stallReasonCount; i++) {
            if (info->reasons.pStallReasonIndex[i] >= STANDIN_REASONS)
                return CUPTI_ERROR_INVALID_OPERATION;
            s->reasons |= 1ull << info->reasons.pStallReasonIndex[i];
        }
        return CUPTI_SUCCESS;
    case ATTR_SCRATCH_BUFFER_SIZE: s->scratch_bytes = info->bytes; return CUPTI_SUCCESS;
    case ATTR_HARDWARE_BUFFER_SIZE: s->hardware_bytes = info->bytes; return CUPTI_SUCCESS;
    case ATTR_COLLECTION_MODE:
        if (info->u32 != CUPTI_PC_SAMPLING_COLLECTION_MODE_CONTINUOUS)
            return CUPTI_ERROR_INVALID_OPERATION;
        return CUPTI_SUCCESS;
    case ATTR_ENABLE_START_STOP_CONTROL: s->start_stop = info->u32 != 0; return CUPTI_SUCCESS;
    case ATTR_OUTPUT_DATA_FORMAT: return info->u32 == 1 ? CUPTI_SUCCESS : CUPTI_ERROR_INVALID_OPERATION;
    case ATTR_SAMPLING_DATA_BUFFER:
        s->buffer = info->samplingDataBuffer;
        return s->buffer ? CUPTI_SUCCESS : CUPTI_ERROR_INVALID_OPERATION;
    case ATTR_WORKER_THREAD_PERIODIC_SLEEP_SPAN: s->sleep_span_ms = info->u32; return CUPTI_SUCCESS;
    default: return CUPTI_ERROR_INVALID_PARAMETER;
    }
}

static CUptiResult get(const struct standin_sampling *s, CUpti_PCSamplingConfigurationInfo *info)
{
    memset(info->data, 0, sizeof(info->data));
    switch (info->attributeType) {
    case ATTR_SAMPLING_PERIOD: info->u32 = s->period; return CUPTI_SUCCESS;
    case ATTR_SCRATCH_BUFFER_SIZE: info->bytes = s->scratch_bytes; return CUPTI_SUCCESS;
    case ATTR_HARDWARE_BUFFER_SIZE: info->bytes = s->hardware_bytes; return CUPTI_SUCCESS;
    case ATTR_COLLECTION_MODE: info->u32 = s->mode; return CUPTI_SUCCESS;
    case ATTR_ENABLE_START_STOP_CONTROL: info->u32 = s->start_stop; return CUPTI_SUCCESS;
    case ATTR_WORKER_THREAD_PERIODIC_SLEEP_SPAN: info->u32 = s->sleep_span_ms; return CUPTI_SUCCESS;
    default: return CUPTI_ERROR_INVALID_PARAMETER;
    }
}

EXPORT CUptiResult cuptiPCSamplingSetConfigurationAttribute(CUpti_PCSamplingConfigurationInfoParams *params)
{
    CUptiResult result = CUPTI_SUCCESS;
    bool fails = fault("no-configuration");
    LOCK_CONTEXT(params, true);
    for (size_t i = 0; i < params->numAttributes; i++) {
        CUpti_PCSamplingConfigurationInfo *info = &params->pPCSamplingConfigurationInfo[i];
        info->attributeStatus = fails ? CUPTI_ERROR_INVALID_OPERATION : set(s, info);
        if (info->attributeStatus)
            result = info->attributeStatus;
    }
    pthread_mutex_unlock(&cuda->lock);
    return result;
}

EXPORT CUptiResult cuptiPCSamplingGetConfigurationAttribute(CUpti_PCSamplingConfigurationInfoParams *params)
{
    CUptiResult result = CUPTI_SUCCESS;
    LOCK_CONTEXT(params, true);
    for (size_t i = 0; i < params->numAttributes; i++) {
        CUpti_PCSamplingConfigurationInfo *info = &params->pPCSamplingConfigurationInfo[i];
        info->attributeStatus = get(s, info);
        if (info->attributeStatus)
            result = info->attributeStatus;
    }
    pthread_mutex_unlock(&cuda->lock);
    return result;
}

EXPORT CUptiResult cuptiPCSamplingGetNumStallReasons(CUpti_PCSamplingGetNumStallReasonsParams *params)
{
    LOCK_CONTEXT(params, true);
    (void)s;
    *params->numStallReasons = STANDIN_REASONS;
    pthread_mutex_unlock(&cuda->lock);
    return CUPTI_SUCCESS;
}

EXPORT CUptiResult cuptiPCSamplingGetStallReasons(CUpti_PCSamplingGetStallReasonsParams *params)
{
    bool fails = fault("no-reasons"), unknown = fault("unknown-reason");
    LOCK_CONTEXT(params, true);
    (void)s;
    for (size_t i = 0; !fails && i < params->numStallReasons && i < STANDIN_REASONS; i++) {
        uint32_t reason = told_order[i];
        const char *name = reason == 0 ? PREFIX "sample_count" : PREFIX "samples_data_dropped";
        params->stallReasonIndex[i] = reason;
        if (reason < FIRST_REASON)
            snprintf(params->stallReasons[i], STALL_REASON_NAME_SIZE, "%s", name);
        else
            snprintf(params->stallReasons[i], STALL_REASON_NAME_SIZE, STALLED "%s%s",
                     unknown && reason / 2 == MISC / 2 ? "something_new" : kinds[(reason - FIRST_REASON) / 2],
                     reason % 2 ? "_not_issued" : "");
    }
    pthread_mutex_unlock(&cuda->lock);
    return fails ? CUPTI_ERROR_UNKNOWN : CUPTI_SUCCESS;
}

EXPORT CUptiResult cuptiPCSamplingGetData(CUpti_PCSamplingGetDataParams *params)
{
    CUptiResult result = CUPTI_SUCCESS;
    uint64_t now, span, until;
    CUpti_PCSamplingData *data;
    bool full = fault("full") || fault("full-quiet");
    while (fault("getdata-hangs"))
        pause();
    LOCK_CONTEXT(params, true);
    data = params->pcSamplingData;
    if (!data || data->size < offsetof(CUpti_PCSamplingData, hardwareBufferFull) || !data->pPcData) {
        pthread_mutex_unlock(&cuda->lock);
        return CUPTI_ERROR_INVALID_PARAMETER;
    }
    now = cuda->now();
    span = s->sleep_span_ms ? s->sleep_span_ms * MS : 1;
    until = s->since + (now - s->since) / span * span; /* what the workers have decoded */
    s->calls++;
    if (has_failed || fault("getdata-fails-always") || (fault("getdata-fails") && s->calls % 2 == 0)) {
        s->failures++;
        result = CUPTI_ERROR_UNKNOWN;
    } else if (nonsense("nonsense-count") && s->calls % 3 == 0) {
        data->totalNumPcs = data->collectNumPcs + 1000000;
        data->totalSamples = 1ull << 60;
        data->remainingNumPcs = 0;
        s->spoiled++;
    } else if (full && until > s->decoded_to && s->decodings++ % 2) {
        decode(cuda, params->ctx, until, true);
        memset((char *)data + offsetof(CUpti_PCSamplingData, totalSamples), 0,
               offsetof(CUpti_PCSamplingData, pPcData) - offsetof(CUpti_PCSamplingData, totalSamples));
        data->nonUsrKernelsTotalSamples = 0;
        data->hardwareBufferFull = 1;
        s->full++;
        result = fault("full-quiet") ? CUPTI_SUCCESS : CUPTI_ERROR_OUT_OF_MEMORY;
    } else {
        if (until > s->decoded_to)
            decode(cuda, params->ctx, until, false);
        hand_out(s, data);
        put_nonsense(s, data);
        if (nonsense("nonsense-remaining")) {
            data->remainingNumPcs++;
            s->spoiled++;
        }
    }
    pthread_mutex_unlock(&cuda->lock);
    cuda->write_ledger();
    return result;
}

/* ---- activity records ---- */

static CUpti_BuffersCallbackRequestFunc request_buffer;
static CUpti_BuffersCallbackCompleteFunc complete_buffer;
static CUpti_TimestampCallbackFunc own_time;
static pthread_mutex_t delivery_lock = PTHREAD_MUTEX_INITIALIZER;
static uint8_t *buffer;
static size_t buffer_size, buffer_used;
static uint64_t record_number, dropped_records; /* dropped since the last question */
static bool enabled_kinds[CUPTI_ACTIVITY_KINDS];
static pthread_t worker;
static atomic_bool worker_runs;
static atomic_uint flush_period_ms;

static uint64_t real_time(void)
{
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    return (uint64_t)t.tv_sec * 1000000000ull + (uint64_t)t.tv_nsec;
}

/* What is to be added to CLOCK_MONOTONIC. */
static int64_t clock_difference(struct standin_cuda *cuda)
{
    uint64_t before = cuda->now(), theirs = own_time ? own_time() : real_time(), after = cuda->now();
    if (theirs >= before && theirs <= after)
        return 0; /* the same clock */
    return (int64_t)(theirs - (before + after) / 2);
}

static void give_back_buffer(void)
{
    uint8_t *full = buffer;
    buffer = NULL;
    if (full)
        complete_buffer(NULL, 0, full, buffer_size, buffer_used);
}

static CUpti_ActivityKernel10 *new_record(void)
{
    size_t most = 0;
    CUpti_ActivityKernel10 *record;
    if (buffer && buffer_used + sizeof(*record) > buffer_size)
        give_back_buffer();
    if (!buffer) {
        buffer_size = buffer_used = 0;
        request_buffer(&buffer, &buffer_size, &most);
    }
    if (!buffer || buffer_used + sizeof(*record) > buffer_size)
        return NULL;
    record = (void *)(buffer + buffer_used);
    buffer_used += sizeof(*record);
    memset(record, 0, sizeof(*record));
    return record;
}

static void put_record(struct standin_cuda *cuda, struct standin_execution *e, int64_t difference)
{
    uint64_t number = record_number++;
    bool tenth = number % 10 == 9;
    CUpti_ActivityKernel10 *record = tenth && fault("activity-dropped") ? NULL : new_record();
    if (!record) {
        dropped_records++;
        cuda->activity.dropped++;
        return;
    }
    cuda->activity.delivered++;
    record->kind = CUPTI_ACTIVITY_KIND_KERNEL;
    if (enabled_kinds[CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL])
        record->kind = CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL;
    record->start = e->begin + (uint64_t)difference;
    record->end = record->completed = e->end + (uint64_t)difference;
    record->deviceId = (uint32_t)e->context->device;
    record->contextId = e->context->id;
    record->streamId = e->stream;
    record->gridX = (int32_t)e->grid[0];
    record->gridY = (int32_t)e->grid[1];
    record->gridZ = (int32_t)e->grid[2];
    record->blockX = (int32_t)e->block[0];
    record->blockY = (int32_t)e->block[1];
    record->blockZ = (int32_t)e->block[2];
    record->dynamicSharedMemory = (int32_t)e->shared_bytes;
    record->registersPerThread = 32;
    record->correlationId = e->correlation;
    record->gridId = (int64_t)number;
    record->name = e->function->name;
    record->graphNodeId = e->node;
    record->graphId = e->graph;
    e->told = !(tenth && fault("activity-nonsense"));
    if (!e->told)
        switch (number / 10 % 4) {
        case 0: record->start = record->end = 0; break;
        case 1: record->end = record->start - 1000; break;
        case 2: record->name = NULL; break;
        case 3: record->correlationId ^= 0x80000000u; break;
        }
}

/* Make records of what has ended. */
static void make_records(struct standin_cuda *cuda)
{
    struct standin_execution *batch[256];
    int64_t difference = clock_difference(cuda);
    size_t count;
    do {
        struct standin_execution *e;
        uint64_t now = cuda->now();
        count = 0;
        pthread_mutex_lock(&cuda->lock);
        for (e = cuda->undelivered; e && count < sizeof(batch) / sizeof(*batch); e = e->next)
            if (!e->delivered && e->end <= now) {
                e->delivered = true;
                batch[count++] = e;
            }
        while (cuda->undelivered && cuda->undelivered->delivered)
            cuda->undelivered = cuda->undelivered->next;
        pthread_mutex_unlock(&cuda->lock);
        for (size_t i = 0; i < count && !has_failed; i++)
            put_record(cuda, batch[i], difference);
    } while (count);
}

static void *work(void *nothing)
{
    unsigned waited = 0;
    pthread_setname_np(pthread_self(), "cupti-worker");
    (void)nothing;
    while (worker_runs) {
        struct standin_cuda *cuda = driver();
        unsigned period = flush_period_ms;
        usleep(20000);
        waited += 20;
        if (!cuda || waited < (period ? period : 100))
            continue;
        waited = 0;
        pthread_mutex_lock(&delivery_lock);
        if (complete_buffer) {
            make_records(cuda);
            if (period)
                give_back_buffer();
        }
        pthread_mutex_unlock(&delivery_lock);
    }
    return NULL;
}

__attribute__((destructor)) static void unloaded(void)
{
    if (atomic_exchange(&worker_runs, false) && driver())
        pthread_join(worker, NULL);
}

EXPORT CUptiResult cuptiActivityRegisterCallbacks(CUpti_BuffersCallbackRequestFunc request, CUpti_BuffersCallbackCompleteFunc complete)
{
    NEED_DRIVER;
    if (!request || !complete)
        return CUPTI_ERROR_INVALID_PARAMETER;
    pthread_mutex_lock(&delivery_lock);
    request_buffer = request;
    complete_buffer = complete;
    pthread_mutex_unlock(&delivery_lock);
    return CUPTI_SUCCESS;
}

EXPORT CUptiResult cuptiActivityRegisterTimestampCallback(CUpti_TimestampCallbackFunc function)
{
    NEED_DRIVER;
    if (!function)
        return CUPTI_ERROR_INVALID_PARAMETER;
    own_time = function;
    return CUPTI_SUCCESS;
}

static CUptiResult enable_kind(uint32_t kind, bool enable)
{
    NEED_DRIVER;
    if (!kind || kind >= CUPTI_ACTIVITY_KINDS)
        return CUPTI_ERROR_INVALID_KIND;
    if (enable && fault("no-activity"))
        return CUPTI_ERROR_NOT_SUPPORTED;
    enabled_kinds[kind] = enable;
    cuda->recording = enabled_kinds[CUPTI_ACTIVITY_KIND_KERNEL] || enabled_kinds[CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL];
    if (cuda->recording && !atomic_exchange(&worker_runs, true))
        pthread_create(&worker, NULL, work, NULL);
    return CUPTI_SUCCESS;
}

EXPORT CUptiResult cuptiActivityEnable(uint32_t kind)
{
    return enable_kind(kind, true);
}

EXPORT CUptiResult cuptiActivityDisable(uint32_t kind)
{
    return enable_kind(kind, false);
}

EXPORT CUptiResult cuptiActivityFlushAll(uint32_t flag)
{
    NEED_DRIVER;
    (void)flag;
    if (!complete_buffer)
        return CUPTI_ERROR_INVALID_OPERATION;
    pthread_mutex_lock(&delivery_lock);
    make_records(cuda);
    give_back_buffer();
    pthread_mutex_unlock(&delivery_lock);
    cuda->write_ledger();
    return CUPTI_SUCCESS;
}

EXPORT CUptiResult cuptiActivityFlushPeriod(uint32_t ms)
{
    flush_period_ms = ms;
    return CUPTI_SUCCESS;
}

EXPORT CUptiResult cuptiActivitySetAttribute(int attribute, size_t *size, void *value)
{
    NEED_DRIVER;
    (void)attribute;
    return size && value ? CUPTI_SUCCESS : CUPTI_ERROR_INVALID_PARAMETER;
}

EXPORT CUptiResult cuptiActivityGetNextRecord(uint8_t *from, size_t valid, CUpti_Activity **record)
{
    uint8_t *next = *record ? (uint8_t *)*record + sizeof(CUpti_ActivityKernel10) : from;
    if (!from)
        return CUPTI_ERROR_INVALID_PARAMETER;
    if (next + sizeof(CUpti_ActivityKernel10) > from + valid)
        return CUPTI_ERROR_MAX_LIMIT_REACHED;
    *record = (CUpti_Activity *)next;
    return CUPTI_SUCCESS;
}

EXPORT CUptiResult cuptiActivityGetNumDroppedRecords(CUcontext context, uint32_t stream, size_t *dropped)
{
    NEED_DRIVER;
    (void)context;
    (void)stream;
    if (!dropped)
        return CUPTI_ERROR_INVALID_PARAMETER;
    *dropped = dropped_records;
    dropped_records = 0;
    return CUPTI_SUCCESS;
}

EXPORT CUptiResult cuptiGetTimestamp(uint64_t *ns)
{
    NEED_DRIVER;
    *ns = own_time ? own_time() : real_time();
    return CUPTI_SUCCESS;
}

EXPORT CUptiResult cuptiFinalize(void)
{
    NEED_DRIVER;
    cuda->on_call = NULL;
    cuda->on_resource = NULL;
    cuda->on_graph_node = NULL;
    cuda->recording = false;
    subscribed = false;
    pthread_mutex_lock(&cuda->lock);
    for (CUcontext context = cuda->contexts; context; context = context->next)
        if (context->sampling.enabled)
            finish(cuda, context);
    pthread_mutex_unlock(&cuda->lock);
    return CUPTI_SUCCESS;
}
