/* What the parts of the stand-in say to each other.
 *
 *   ze.c (libze_intel_gpu.so.1, in the profiled process)  --launches, kernels-->  gpu.c (the GPU, a process of its own)
 *   gpu.c  --records in shared memory, a byte in a pipe when data is visible-->       xe.c (the xe driver, preloaded into the recorder)
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
    uint32_t gt;          /* 0 any that is there (all runtimes say so), else 1 + which main GT, counted over all cards */
    uint64_t address;     /* which kernel */
    uint64_t delay_ns;    /* how long after now the kernel starts to execute */
    uint64_t duration_ns; /* how long it executes: the GPU makes stalls in proportion */
    char stack[512];      /* the launching functions of the program, outermost first, joined with ';' */
};

/* A runtime that waits until the GPU has executed all that it launched sends the type alone and gets it back. A test that waits until the
 * GPU has nothing to do any more sends a second word that is not 0. */
struct standin_sync {
    uint32_t type; /* STANDIN_MSG_SYNC */
};

/* ---- Between the driver (xe.c) and the GPU (gpu.c). Nothing below concerns the runtime. ----
 *
 * Question and answer, one connection each: so that a fork of the recorder cannot mix up answers. */
enum { STANDIN_DRIVER_HELLO = 1, STANDIN_DRIVER_OPEN = 2, STANDIN_DRIVER_ENABLE = 3, STANDIN_DRIVER_DISABLE = 4 };

struct standin_driver {
    uint32_t type; /* STANDIN_MSG_DRIVER */
    uint32_t op;   /* STANDIN_DRIVER_* */
    uint32_t gt;   /* OPEN, ENABLE, DISABLE: which main GT, counted from 0 over all cards (not its GT_ID) */
    uint32_t rate; /* OPEN: the sampling rate in GPU cycles */
    uint64_t wait_reports; /* OPEN */
    uint64_t stream;       /* ENABLE, DISABLE: the number that OPEN gave */
};

enum { STANDIN_MAX_CARDS = 4, STANDIN_MAX_XECORES = 64 };
enum { STANDIN_MAX_GTS = 8, STANDIN_MAX_STREAMS = 16 }; /* GTs of a card, media ones too; main GTs of all cards */
enum { STANDIN_XECORE_BYTES = 512 * 1024, STANDIN_RECORD_BYTES = 64 };

struct standin_gt {
    uint16_t type, tile, id, major, minor, revision; /* type 0 main, 1 media */
};

/* What the driver tells of a card; the GPU process is the only place that knows. */
struct standin_device {
    char name[16];
    uint16_t device_id, revision;
    uint32_t va_bits, has_vram, reference_clock;
    uint32_t mains; /* how many main GTs: each can have one stream */
    uint32_t first; /* the number of its first main GT among those of all cards */
    uint32_t xecores; /* of each main GT */
    uint32_t gts;
    struct standin_gt gt[STANDIN_MAX_GTS];
};

/* HELLO's answer comes with the shared memory's descriptor, OPEN's with the stream's: the reading end of a pipe. A byte in it is
 * POLLIN. A pipe and not an eventfd, because the GPU then sees when the last copy of the descriptor is gone, as the kernel does,
 * however it went: closed, killed, inherited by a child that ended later. */
struct standin_driver_reply {
    uint32_t type;  /* STANDIN_MSG_DRIVER */
    int32_t error;  /* 0 or an errno */
    uint64_t stream;
    uint32_t cards; /* HELLO */
    struct standin_device devices[STANDIN_MAX_CARDS];
};

/* Tests ask the GPU for things that hardware does by itself. The answer is the first two words with code set to 0 or an errno. A
 * message may end before `card`: that means all cards. */
enum {
    STANDIN_FAULT_RESET = 1,    /* every stream dies with ENODEV */
    STANDIN_FAULT_FLOOD = 2,    /* make `records` records in duration_ns, as with --flood */
    STANDIN_FAULT_LEDGER = 3,   /* write the ledger now */
    STANDIN_FAULT_UNPLUG = 4,   /* the card is gone, what it executed with it */
    STANDIN_FAULT_PLUG = 5,     /* it is back; `records` is its generation, as its files are marked */
    STANDIN_FAULT_FREEZE = 6,   /* it stands still and does not answer */
    STANDIN_FAULT_THAW = 7,     /* and goes on where it stood */
    STANDIN_FAULT_OVERFLOW = 8, /* `records` times, every duration_ns: a buffer is filled and `drops` more records are dropped */
};
struct standin_fault {
    uint32_t type; /* STANDIN_MSG_FAULT */
    uint32_t code;
    uint64_t records, duration_ns;
    int32_t card;   /* -1: all. RESET, UNPLUG, PLUG, FREEZE, THAW */
    uint32_t drops; /* OVERFLOW */
};

/* ---- Between the tree (sysfs.py) and the driver (xe.c) ----
 *
 * A file for which the driver answers has a time of modification that says what it is: seconds STANDIN_MARK + its card's generation
 * (1, and one more each time that the card is plugged in), nanoseconds kind * 1000000 + card * 10000 + number. So the driver knows a
 * descriptor by one fstat, whenever the file was made. A test that writes into such a file gets what it wrote. */
enum { STANDIN_MARK = 1000000000, STANDIN_MARK_GENERATIONS = 86400 };
enum {
    STANDIN_NODE = 1,   /* a device node; number: its minor */
    STANDIN_ENERGY = 2, /* below hwmon, number as in the name of the file: 1 the card, 2 the package */
    STANDIN_TEMPERATURE = 3,
    STANDIN_FAN = 4,
    STANDIN_ACTUAL = 5, /* below freq0; number: the GT's id */
    STANDIN_REQUESTED = 6,
    STANDIN_KINDS = 7,
};
enum { STANDIN_PMU_TYPE = 1000061 }; /* of the first card, the others follow; the kernel's own are far smaller */

#ifdef STANDIN_WITH_SHARED_MEMORY
#include <pthread.h>
#include <stdatomic.h>

/* One XeCore's buffer. Positions count records and never wrap; the slot is position % (buffer's records). */
struct standin_xecore {
    _Alignas(64) _Atomic uint64_t visible; /* written by the GPU at its poll: the reader may read up to here */
    _Atomic uint32_t drop;    /* 0 nothing dropped, 1 the hardware dropped, 2 and the poll saw it. GPU: 0->1->2, reader: 2->0 */
    char gap[52];
    _Atomic uint64_t read; /* written by the reader, and by the GPU at enable */
    char gap2[56];
};

struct standin_stream {
    pthread_mutex_t lock; /* held by a reader that copies, and by the GPU to end what it copies from. Robust: readers get killed */
    _Atomic uint64_t id;  /* of the open stream, 0: none */
    _Atomic uint32_t enabled, reset;
    uint32_t reported; /* EIO was returned and the read after it has not happened yet; under the lock */
    struct standin_xecore xecores[STANDIN_MAX_XECORES];
};

/* How long a main GT has executed. Written by the GPU at each step, in between time goes on by itself: at time t (CLOCK_MONOTONIC) it
 * has been busy for busy_ns, and for what of as_of..until is over at t. */
struct standin_work {
    _Alignas(64) _Atomic uint32_t turn; /* odd while the others change */
    _Atomic uint64_t busy_ns, as_of, until;
};

/* The buffers follow at data_offset: main GT after main GT, XeCore after XeCore. */
struct standin_shared {
    uint64_t data_offset, size;
    _Atomic uint32_t plugged[STANDIN_MAX_CARDS];   /* the card's generation, 0: it is not there */
    _Atomic uint64_t frozen_ns[STANDIN_MAX_CARDS]; /* since when the card stands still, 0: it does not */
    struct standin_work work[STANDIN_MAX_STREAMS];
    struct standin_stream streams[STANDIN_MAX_STREAMS];
};
#endif

#endif
