/* What the parts of the stand-in say to each other.
 *
 *   ze.c (libze_intel_gpu.so.1, in the profiled process)  --launches, kernels-->  gpu.c (the GPU, a process of its own)
 *   gpu.c  --records in shared memory, eventfd when data becomes visible-->        xe.c (the xe driver, preloaded into the recorder)
 *
 * All files of one stand-in live in one folder, named by the environment variable STANDIN_DIR:
 *   gpu.sock     SOCK_SEQPACKET, the runtimes and the driver connect to it
 *   ledger.tsv   written by gpu.c when it is told to stop: what was produced, and what of it was dropped
 *   sysfs/       the prepared tree that xe.c shows as /sys/class/drm, /sys/bus/event_source/devices, /dev/dri
 */
#ifndef STANDIN_PROTOCOL_H
#define STANDIN_PROTOCOL_H

#include <stdint.h>

enum { STANDIN_MSG_KERNEL = 1, STANDIN_MSG_LAUNCH = 2, STANDIN_MSG_DRIVER = 3, STANDIN_MSG_SYNC = 4, STANDIN_MSG_FAULT = 5 };

/* From a runtime, once per kernel that it places: where it is and where its instructions start. */
struct standin_kernel {
    uint32_t type; /* STANDIN_MSG_KERNEL */
    uint32_t pid;
    uint64_t address; /* GPU address, as the runtime reports it (sign-extended on some devices) */
    uint64_t size;
    char name[128];
    uint32_t instructions; /* how many of the offsets below are there */
    uint32_t offsets[];    /* bytes from address, ascending; each is the start of an instruction */
};

/* From a runtime, at each launch, after the probe fired. */
struct standin_launch {
    uint32_t type; /* STANDIN_MSG_LAUNCH */
    uint32_t pid;
    uint32_t tid;
    uint32_t pad;
    uint64_t address;     /* which kernel */
    uint64_t delay_ns;    /* how long after now the kernel starts to execute */
    uint64_t duration_ns; /* how long it executes: the GPU makes stalls in proportion */
    char stack[512];      /* the launching functions of the program, outermost first, joined with ';' */
};

/* A runtime that waits until the GPU has executed all that it launched sends the type alone and gets it back. */
struct standin_sync {
    uint32_t type; /* STANDIN_MSG_SYNC */
};

#endif
