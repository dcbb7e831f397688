/* SPDX-License-Identifier: Apache-2.0 */
/* What the stand-in's libcuda and libcupti know of each other. libcuda has it all, in `standin_cuda`, which libcupti finds by name. */
#ifndef STANDIN_CUDA_SHARED_H
#define STANDIN_CUDA_SHARED_H

#include "abi.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>

#define STANDIN_CUDA_SYMBOL "standin_cuda"
enum {
    STANDIN_DEVICES = 16,
    STANDIN_REASONS = 40, /* of a chip of compute capability 9.0: two that are no reasons, then 19, each twice */
    STANDIN_CHOICES = 1024,
    STANDIN_DEPTH = 1024, /* launches that a stream takes before the next one waits */
    STANDIN_INSTRUCTION = 16,
};

/* An instruction's samples, by reason. */
struct standin_row {
    uint64_t pending[STANDIN_REASONS]; /* decoded, and not yet handed out */
    uint64_t handed[STANDIN_REASONS];
    uint64_t lost[STANDIN_REASONS]; /* no room for them in the buffer when sampling was disabled, or a full hardware buffer */
    bool queued;
    CUfunction function;
    uint32_t instruction;
    struct standin_row *next; /* of its context's rows with pending samples */
};

struct CUfunc_st {
    CUmodule module;
    char *name;
    uint32_t symbol; /* its index in the cubin's table of symbols: NVIDIA's functionIndex */
    uint32_t instructions;
    uint64_t launches[16]; /* by call site */
    uint64_t captured;     /* launches into a graph that was being made */
    uint64_t sampled;      /* samples of it made so far: the number of the next one */
    uint16_t *choice;      /* STANDIN_CHOICES instructions: how often one is here is how often it is sampled */
    struct standin_row **rows;
};

struct CUmod_st {
    CUmodule next;
    CUcontext context;
    uint32_t id;
    uint64_t crc;
    char *bytes;
    size_t size;
    bool unloaded;
    uint32_t count;
    CUfunction functions;
};

/* One execution of a kernel. Its times are known when it is launched: nothing else decides how long it takes. */
struct standin_execution {
    struct standin_execution *next;     /* of all, in order of their launches */
    struct standin_execution *sampling; /* of its context's that are not sampled to their end */
    CUfunction function;
    CUcontext context;
    uint32_t correlation, stream, graph, site;
    uint64_t node; /* 0: not of a graph */
    uint64_t begin, end; /* CLOCK_MONOTONIC */
    uint64_t sampled_to, samples;
    uint32_t grid[3], block[3], shared_bytes;
    bool delivered; /* as an activity record, or nobody wanted one */
    bool told;      /* there was an activity record of it that made sense */
};

struct standin_sampling {
    bool enabled, start_stop, started;
    uint32_t period, sleep_span_ms, mode;
    size_t hardware_bytes, scratch_bytes;
    uint64_t reasons; /* a bit for each that is wanted */
    void *buffer;     /* SAMPLING_DATA_BUFFER: takes what is left when sampling ends */
    uint64_t since, decoded_to;
    uint64_t handed, dropped, nonuser, spoiled; /* samples told, of all kinds */
    uint64_t new_dropped, new_nonuser;          /* not yet told */
    uint64_t lost, full;                        /* samples lost by a full hardware buffer; how often it was full */
    uint64_t looked_up;                         /* rows whose functions were looked up, or should have been */
    uint64_t calls, failures, decodings;        /* of cuptiPCSamplingGetData; those that found something new */
    struct standin_execution *first, **last;
    struct standin_row *rows, **last_row; /* with pending samples */
    size_t row_count;
};

struct CUctx_st {
    CUcontext next;
    uint32_t id;
    CUdevice device;
    bool primary, dead;
    unsigned references;
    CUstream streams;
    struct CUstream_st *null_stream;
    struct standin_sampling sampling;
};

/* A call of the driver's interface, at its beginning and at its end. */
struct standin_call {
    uint32_t cbid, correlation;
    const char *function, *symbol;
    const void *params;
    CUresult *result; /* NULL at the beginning */
    CUcontext context;
    uint64_t user; /* correlationData */
};

struct CUgraphNode_st {
    uint64_t id;
};

struct standin_cuda {
    uint32_t size; /* of this structure, to find libraries of different builds */
    pthread_mutex_t lock; /* guards contexts, modules, executions and sampling; never held while a callback runs */
    uint32_t devices, multiprocessors;
    CUcontext contexts;
    CUmodule modules;
    struct standin_execution *executions, **last_execution;
    struct standin_execution *undelivered; /* the first one that no activity record was made of */
    atomic_bool dead; /* a child of a process that had called cuInit: nothing works here */
    /* What libcupti puts here: */
    _Atomic(void (*)(struct standin_call *)) on_call;
    _Atomic(void (*)(uint32_t cbid, CUcontext, CUstream, CUmodule)) on_resource;
    _Atomic(void (*)(uint32_t cbid, CUgraphNode, CUgraphNode original)) on_graph_node;
    _Atomic(void (*)(CUcontext)) on_context_end; /* behind CONTEXT_DESTROY_STARTING, when everything has executed */
    _Atomic(void (*)(CUmodule)) on_module_end;   /* the same, behind MODULE_UNLOAD_STARTING */
    atomic_bool recording; /* activity records of kernels are wanted */
    struct {
        uint64_t delivered, dropped;
    } activity;
    /* What libcuda has for it: */
    uint64_t (*now)(void);
    CUresult (*uuid)(CUuuid *, CUdevice);
    bool (*fault)(const char *name);
    void (*write_ledger)(void); /* again, if it was written already */
};

/* NVIDIA's is another one, of 32 bits as well. It leaves out most of a cubin, too: on an H100 none of the sections counted. */
static inline uint64_t standin_crc(const void *bytes, size_t size)
{
    const unsigned char *at = bytes;
    uint32_t crc = ~(uint32_t)size;
    for (size_t i = 0; i < size && i < 64; i++) { /* the header of the file */
        crc ^= at[i];
        for (int bit = 0; bit < 8; bit++)
            crc = crc >> 1 ^ (0xedb88320u & -(crc & 1));
    }
    return ~crc & 0xffffffffu;
}

#endif
