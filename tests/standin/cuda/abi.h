/* SPDX-License-Identifier: Apache-2.0 */
/* What libcuda.so.1 and libcupti.so.13 of CUDA 13 look like to a program: as much of it as the stand-ins have, and their users need.
 * Written by hand from the documents: names, numbers and places of members are those of NVIDIA's, nothing else is. */
#ifndef STANDIN_CUDA_ABI_H
#define STANDIN_CUDA_ABI_H

#include <stddef.h>
#include <stdint.h>

/* ---- libcuda ---- */

typedef int CUresult;
typedef int CUdevice;
typedef unsigned long long CUdeviceptr;
typedef struct CUctx_st *CUcontext;
typedef struct CUmod_st *CUmodule;
typedef struct CUfunc_st *CUfunction;
typedef struct CUstream_st *CUstream;
typedef struct CUgraph_st *CUgraph;
typedef struct CUgraphNode_st *CUgraphNode;
typedef struct CUgraphExec_st *CUgraphExec;
typedef struct CUlib_st *CUlibrary;
typedef struct CUkern_st *CUkernel;

enum {
    CUDA_SUCCESS = 0,
    CUDA_ERROR_INVALID_VALUE = 1,
    CUDA_ERROR_OUT_OF_MEMORY = 2,
    CUDA_ERROR_NOT_INITIALIZED = 3,
    CUDA_ERROR_DEINITIALIZED = 4,
    CUDA_ERROR_NO_DEVICE = 100,
    CUDA_ERROR_INVALID_DEVICE = 101,
    CUDA_ERROR_INVALID_IMAGE = 200,
    CUDA_ERROR_INVALID_CONTEXT = 201,
    CUDA_ERROR_NO_BINARY_FOR_GPU = 209,
    CUDA_ERROR_FILE_NOT_FOUND = 301,
    CUDA_ERROR_INVALID_HANDLE = 400,
    CUDA_ERROR_NOT_FOUND = 500,
    CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED = 900,
};

enum {
    CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK = 1,
    CU_DEVICE_ATTRIBUTE_WARP_SIZE = 10,
    CU_DEVICE_ATTRIBUTE_CLOCK_RATE = 13, /* kHz */
    CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT = 16,
    CU_DEVICE_ATTRIBUTE_PCI_BUS_ID = 33,
    CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID = 34,
    CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID = 50,
    CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR = 75,
    CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR = 76,
};

typedef struct {
    unsigned char bytes[16];
} CUuuid;

typedef struct {
    unsigned gridDimX, gridDimY, gridDimZ, blockDimX, blockDimY, blockDimZ, sharedMemBytes;
    CUstream hStream;
    void *attrs;
    unsigned numAttrs;
} CUlaunchConfig;

/* The arguments of a call, as a callback sees them: those of the C function, in its order. */
struct launch_params { /* cuLaunchKernel; cuLaunchCooperativeKernel has no `extra` */
    CUfunction f;
    unsigned gridDimX, gridDimY, gridDimZ, blockDimX, blockDimY, blockDimZ, sharedMemBytes;
    CUstream hStream;
    void **kernelParams, **extra;
};
struct launch_ex_params {
    const CUlaunchConfig *config;
    CUfunction f;
    void **kernelParams, **extra;
};
struct graph_launch_params {
    CUgraphExec hGraph;
    CUstream hStream;
};

/* ---- libcupti ---- */

typedef int CUptiResult;
enum {
    CUPTI_SUCCESS = 0,
    CUPTI_ERROR_INVALID_PARAMETER = 1,
    CUPTI_ERROR_INVALID_CONTEXT = 3,
    CUPTI_ERROR_INVALID_OPERATION = 7,
    CUPTI_ERROR_OUT_OF_MEMORY = 8,
    CUPTI_ERROR_MAX_LIMIT_REACHED = 12,
    CUPTI_ERROR_NOT_INITIALIZED = 15,
    CUPTI_ERROR_INVALID_KIND = 21,
    CUPTI_ERROR_NOT_SUPPORTED = 27,
    CUPTI_ERROR_INSUFFICIENT_PRIVILEGES = 35,
    CUPTI_ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED = 39,
    CUPTI_ERROR_UNKNOWN = 999,
};

enum { CUPTI_API_ENTER = 0, CUPTI_API_EXIT = 1 };
enum { CUPTI_CB_DOMAIN_DRIVER_API = 1, CUPTI_CB_DOMAIN_RUNTIME_API = 2, CUPTI_CB_DOMAIN_RESOURCE = 3, CUPTI_CB_DOMAINS = 7 };
enum {
    CUPTI_CBID_RESOURCE_CONTEXT_CREATED = 1,
    CUPTI_CBID_RESOURCE_CONTEXT_DESTROY_STARTING = 2,
    CUPTI_CBID_RESOURCE_STREAM_CREATED = 3,
    CUPTI_CBID_RESOURCE_STREAM_DESTROY_STARTING = 4,
    CUPTI_CBID_RESOURCE_CU_INIT_FINISHED = 5,
    CUPTI_CBID_RESOURCE_MODULE_LOADED = 6,
    CUPTI_CBID_RESOURCE_MODULE_UNLOAD_STARTING = 7,
    CUPTI_CBID_RESOURCE_GRAPHNODE_CREATED = 13,
    CUPTI_CBID_RESOURCE_GRAPHNODE_CLONED = 20,
};
/* Numbers of driver functions in callbacks. */
enum {
    CBID_cuCtxSynchronize = 17,
    CBID_cuModuleLoadData = 19,
    CBID_cuModuleLoadDataEx = 20,
    CBID_cuModuleUnload = 22,
    CBID_cuStreamSynchronize = 126,
    CBID_cuMemsetD8Async = 216,
    CBID_cuCtxCreate_v2 = 235,
    CBID_cuMemcpyHtoD_v2 = 276,
    CBID_cuMemcpyHtoDAsync_v2 = 277,
    CBID_cuMemcpyDtoH_v2 = 278,
    CBID_cuLaunchKernel = 307,
    CBID_cuCtxDestroy_v2 = 322,
    CBID_cuMemcpyHtoD_v2_ptds = 397,
    CBID_cuMemcpyDtoH_v2_ptds = 398,
    CBID_cuMemcpyHtoDAsync_v2_ptsz = 421,
    CBID_cuMemsetD8Async_ptsz = 428,
    CBID_cuStreamSynchronize_ptsz = 440,
    CBID_cuLaunchKernel_ptsz = 442,
    CBID_cuLaunchCooperativeKernel = 477,
    CBID_cuLaunchCooperativeKernel_ptsz = 478,
    CBID_cuGraphLaunch = 514,
    CBID_cuGraphLaunch_ptsz = 515,
    CBID_cuLaunchKernelEx = 652,
    CBID_cuLaunchKernelEx_ptsz = 653,
    CBID_cuLibraryLoadData = 678,
    CBID_cuLibraryUnload = 680,
    CBID_cuCtxCreate_v4 = 757,
    CBID_COUNT = 1024,
};

typedef struct {
    int callbackSite;
    const char *functionName;
    const void *functionParams;
    void *functionReturnValue;
    const char *symbolName;
    CUcontext context;
    uint32_t contextUid;
    uint64_t *correlationData;
    uint32_t correlationId;
} CUpti_CallbackData;

typedef struct {
    CUcontext context;
    CUstream stream;
    void *resourceDescriptor;
} CUpti_ResourceData;

typedef struct {
    uint32_t moduleId;
    size_t cubinSize;
    const char *pCubin;
} CUpti_ModuleResourceData;

typedef struct {
    CUgraph graph, originalGraph;
    CUgraphNode node, originalNode;
    int nodeType; /* 0: a kernel */
    CUgraphNode dependency;
    CUgraphExec graphExec;
} CUpti_GraphData;

typedef struct CUpti_Subscriber_st *CUpti_SubscriberHandle;
typedef void (*CUpti_CallbackFunc)(void *user, int domain, uint32_t cbid, const void *data);

/* Every structure of PC sampling begins with its size. */
#define PACKED __attribute__((packed, aligned(8)))
typedef struct PACKED {
    uint32_t pcSamplingStallReasonIndex, samples;
} CUpti_PCSamplingStallReason;

typedef struct PACKED {
    size_t size;
    uint64_t cubinCrc, pcOffset;
    uint32_t functionIndex, pad;
    char *functionName;
    size_t stallReasonCount;
    CUpti_PCSamplingStallReason *stallReason;
    uint32_t correlationId;
} CUpti_PCSamplingPCData;

typedef struct PACKED {
    size_t size, collectNumPcs;
    uint64_t totalSamples, droppedSamples;
    size_t totalNumPcs, remainingNumPcs;
    uint64_t rangeId;
    CUpti_PCSamplingPCData *pPcData;
    uint64_t nonUsrKernelsTotalSamples;
    uint8_t hardwareBufferFull;
} CUpti_PCSamplingData;

enum { CUPTI_PC_SAMPLING_COLLECTION_MODE_CONTINUOUS = 1, CUPTI_PC_SAMPLING_COLLECTION_MODE_KERNEL_SERIALIZED = 2 };
enum {
    ATTR_SAMPLING_PERIOD = 1,
    ATTR_STALL_REASON = 2,
    ATTR_SCRATCH_BUFFER_SIZE = 3,
    ATTR_HARDWARE_BUFFER_SIZE = 4,
    ATTR_COLLECTION_MODE = 5,
    ATTR_ENABLE_START_STOP_CONTROL = 6,
    ATTR_OUTPUT_DATA_FORMAT = 7,
    ATTR_SAMPLING_DATA_BUFFER = 8,
    ATTR_WORKER_THREAD_PERIODIC_SLEEP_SPAN = 9, /* ms */
};
#define STALL_REASON_NAME_SIZE 128

typedef struct {
    int attributeType;
    CUptiResult attributeStatus;
    union {
        uint64_t data[3];
        uint32_t u32; /* samplingPeriod, collectionMode, enableStartStopControl, outputDataFormat, the workers' sleep span */
        size_t bytes; /* scratchBufferSize, hardwareBufferSize */
        void *samplingDataBuffer;
        struct {
            size_t stallReasonCount;
            uint32_t *pStallReasonIndex;
        } reasons;
    };
} CUpti_PCSamplingConfigurationInfo;

typedef struct {
    size_t size;
    void *pPriv;
    CUcontext ctx;
    size_t numAttributes;
    CUpti_PCSamplingConfigurationInfo *pPCSamplingConfigurationInfo;
} CUpti_PCSamplingConfigurationInfoParams;

typedef struct {
    size_t size;
    void *pPriv;
    CUcontext ctx;
    void *pcSamplingData;
} CUpti_PCSamplingGetDataParams;

/* of Enable, Disable, Start and Stop */
typedef struct {
    size_t size;
    void *pPriv;
    CUcontext ctx;
} CUpti_PCSamplingContextParams;

typedef struct {
    size_t size;
    void *pPriv;
    CUcontext ctx;
    size_t *numStallReasons;
} CUpti_PCSamplingGetNumStallReasonsParams;

typedef struct {
    size_t size;
    void *pPriv;
    CUcontext ctx;
    size_t numStallReasons;
    uint32_t *stallReasonIndex;
    char **stallReasons;
} CUpti_PCSamplingGetStallReasonsParams;

typedef struct {
    size_t size, cubinSize;
    const void *cubin;
    uint64_t cubinCrc;
} CUpti_GetCubinCrcParams;

enum { CUPTI_ACTIVITY_KIND_KERNEL = 3, CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL = 10, CUPTI_ACTIVITY_KINDS = 64 };

typedef struct PACKED {
    uint32_t kind;
} CUpti_Activity;

typedef struct PACKED {
    uint32_t kind;
    uint8_t cacheConfig, sharedMemoryConfig;
    uint16_t registersPerThread;
    uint32_t partitionedGlobalCacheRequested, partitionedGlobalCacheExecuted;
    uint64_t start, end, completed;
    uint32_t deviceId, contextId, streamId;
    int32_t gridX, gridY, gridZ, blockX, blockY, blockZ, staticSharedMemory, dynamicSharedMemory;
    uint32_t localMemoryPerThread, localMemoryTotal, correlationId;
    int64_t gridId;
    const char *name;
    void *reserved0;
    uint64_t queued, submitted;
    uint8_t launchType, isSharedMemoryCarveoutRequested, sharedMemoryCarveoutRequested, padding;
    uint32_t sharedMemoryExecuted;
    uint64_t graphNodeId;
    uint32_t shmemLimitConfig, graphId;
    void *pAccessPolicyWindow;
    uint32_t channelID, channelType, clusterX, clusterY, clusterZ, clusterSchedulingPolicy;
    uint64_t localMemoryTotal_v2;
    uint32_t maxPotentialClusterSize, maxActiveClusters;
    uint8_t isDeviceLaunched, padding3[7];
} CUpti_ActivityKernel10;

typedef void (*CUpti_BuffersCallbackRequestFunc)(uint8_t **buffer, size_t *size, size_t *most_records);
typedef void (*CUpti_BuffersCallbackCompleteFunc)(CUcontext none, uint32_t stream, uint8_t *buffer, size_t size, size_t valid);
typedef uint64_t (*CUpti_TimestampCallbackFunc)(void);

#endif
