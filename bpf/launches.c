// SPDX-License-Identifier: GPL-2.0
/* Launches and compiled modules, as the runtime's two USDT probes tell them; handles.c has those of drivers without probes.
 *
 * One program serves every library: where a probe's arguments live is read from the `probes` map, at the slot that
 * the attachment's cookie names. What leaves for user space leaves in records of one size per ring buffer, so that
 * the reader takes thousands of them at once as an array (formats/launches.py has the same layouts).
 *
 * A user stack travels once. Its id is a hash of the process and the addresses; `stacks_sent` remembers which ids
 * have travelled and a second hash to tell two stacks of one id apart. Nothing depends on that memory being large:
 * an id that was forgotten makes its stack travel again, and a stack whose id is taken by another travels under an
 * id of its own.
 *
 * Each new output file gets every stack again: the epoch in `settings` is part of the id.
 *
 * Numbers without a definition here: MAX_DEPTH and LOOKED_AT (powers of two) and what handles.c names are set by the compiler (programs.py);
 * STACK_DEPTH (at most MAX_DEPTH), STACK_ID_BITS and *_WAKE_EVERY by the loader, which also says how many elements a map has where
 * this says ANY: see NAMED.
 */
#include <uapi/linux/ptrace.h>

#define ANY 1
#define MAX_ARGS 4
#define NAME_BYTES 64
#define PATH_BYTES 4096

/* Helpers by their numbers, which are the kernel's ABI. bcc 0.26 does not know the first one's name in every build (Linux
 * 5.15); where it meets the names of the others (Linux 5.5) it reads all of the kernel's symbols to see whether they are
 * there, which would take as long as all the rest of compiling. */
static u64 (*attach_cookie)(void *ctx) = (void *)174;
static long (*read_user)(void *to, u32 size, const void *from) = (void *)112;
static long (*read_user_text)(void *to, u32 size, const void *from) = (void *)114;

/* A number that the loader fills in: a 64-bit immediate load of a number that stands for it, which bytecode.py finds. To the verifier
 * it is a constant, and to clang any number. */
#define NAMED(magic)                                                                                                                    \
    ({                                                                                                                                 \
        u64 named;                                                                                                                     \
        asm("%0 = " #magic " ll" : "=r"(named));                                                                                       \
        named;                                                                                                                         \
    })

/* What the verifier makes of these programs must not depend on which clang compiled them: newer ones drop a mask that they can
 * prove to have no effect, though it tells the verifier a bound, and turn arithmetic into branches, of which the verifier follows
 * each to the end of the program. */

/* Clang knows nothing about what this returns. */
static __always_inline u64 hidden(u64 value) {
    asm volatile("" : "+r"(value));
    return value;
}

/* Nor does the verifier, which else goes on separately for each value that it knows a register to have. `unknown` is a number that
 * the verifier knows nothing about, such as the time. */
static __always_inline u64 forgotten(u64 value, u64 unknown) {
    asm volatile("%0 ^= %1\n\t%0 ^= %1" : "+r"(value) : "r"(unknown));
    return value;
}

/* An index below `size`, a power of two. */
static __always_inline u64 below(u64 size, u64 index) {
    return hidden(index) & (size - 1);
}

/* The smaller of the two, of which the verifier knows that it is no more than `most`. */
static __always_inline u64 at_most(u64 most, u64 value) {
    asm volatile("if %0 <= %1 goto +1\n\t%0 = %1" : "+r"(value) : "i"(most));
    return value;
}

/* One of two values, without a branch: `condition` is 0 or 1. */
static __always_inline u64 choose(u64 condition, u64 if_1, u64 if_0) {
    return if_0 ^ ((if_0 ^ if_1) & -hidden(condition));
}

enum arg_kind { ARG_NONE, ARG_CONSTANT, ARG_REGISTER, ARG_MEMORY };

struct arg {
    s64 value;   /* the constant, or the displacement */
    u8 kind;
    u8 base;     /* index into the register array of read_registers(); NO_REGISTER is always 0 */
    u8 index;
    u8 scale;    /* as a shift */
    u8 bits;     /* 8, 16, 32 or 64 */
    u8 is_signed;
    u8 shift;    /* 8 for %ah, %bh, %ch and %dh */
    u8 pad;
};

struct probe {
    struct arg args[MAX_ARGS];
};

struct launch {
    u64 time;
    u32 pid;
    u32 tid;
    u32 cpu;
    u32 flags;
    u64 iba;
    u64 address;
    u64 size;
    u64 stack;
    char comm[16];
    char name[NAME_BYTES];
};

enum launch_flags { LAUNCH_BAD_ARGS = 1, LAUNCH_NO_STACK = 2, LAUNCH_NO_NAME = 4, LAUNCH_OTHER = 8 };

struct stack {
    u64 id;
    u64 time;
    u32 pid;
    u32 depth;
    u64 ips[]; /* STACK_DEPTH; then of LOOKED_AT each the 8 bytes before it and the 8 from it on, 0 where they cannot be read */
};

struct compiled {
    u64 time;
    u32 pid;
    u32 tid;
    u32 uid;
    u32 gid;
    char path[PATH_BYTES];
};

/* Each thing is counted once: what a launch lacks is counted only if the launch itself arrives. */
enum counter {
    LAUNCHES,        /* the probe fired */
    LAUNCHES_LOST,   /* no room in the ring buffer, or more than MOST_AT_ONCE of one call */
    BAD_ARGS,        /* launches whose arguments could not be read */
    STACKS,          /* travelled */
    STACKS_LOST,     /* launches without one: no room in the ring buffer; tried again at the next with that stack */
    STACKS_FAILED,   /* launches without one: the kernel could not walk it */
    STACKS_COLLIDED, /* travelled under an id of their own */
    COMPILED,        /* the probe fired */
    COMPILED_LOST,   /* no room, or the path could not be read */
    PROBE_NS,        /* time spent in these programs */
    OTHERS,          /* launches of processes that are not to be recorded */
    STACKS_TRUNCATED, /* launches whose stack is as deep as the limit, and so may be deeper */
    HANDLES_UNREADABLE, /* launches of which a pointer led nowhere */
    HANDLES_UNKNOWN,  /* launches whose handle is none that the driver's layout knows */
    HANDLES_ASTRAY,   /* launches whose address is none, or not in the memory that holds the code */
    HANDLES_CHANGED,  /* launches whose handle had another address before */
    KERNELS,          /* described */
    PIECES_LOST,      /* of names, code and modules: no room, or not to be read */
    COUNTERS,
};

struct counters {
    u64 values[COUNTERS];
};

struct settings {
    u64 epoch;
    u64 scoped;      /* whether `others` holds anything */
};

BPF_ARRAY(probes, struct probe, ANY);
BPF_ARRAY(settings, struct settings, 1);
/* The processes that are not to be recorded. One that was forgotten, or of which nobody knows yet, is recorded. */
BPF_TABLE("lru_hash", u32, u32, others, ANY);
BPF_PERCPU_ARRAY(counters, struct counters, 1);
BPF_RINGBUF_OUTPUT(launches, ANY);
BPF_RINGBUF_OUTPUT(stacks, ANY);
BPF_RINGBUF_OUTPUT(compilations, ANY);
BPF_TABLE("lru_hash", u64, u64, stacks_sent, ANY);

/* A program on a uprobe can be preempted, and another thread's run on the same CPU then uses the same scratch.
 * `owner` tells: who finds another owner after its work starts again. */
struct scratch {
    u64 owner;
    u32 depth;
    u64 frame[2];        /* the frame pointer and the return address that a function saved */
    u64 ips[MAX_DEPTH];
    u64 around[LOOKED_AT][2];
};
BPF_PERCPU_ARRAY(scratches, struct scratch, 1);

/* Returns how many it makes on this CPU, which is only exact enough to wake the reader by. */
static __always_inline u64 count(enum counter what, u64 n) {
    u32 zero = 0;
    struct counters *counted = counters.lookup(&zero);
    if (!counted)
        return 0;
    u64 which = __builtin_constant_p(what) ? what : at_most(COUNTERS - 1, what);
    __sync_fetch_and_add(&counted->values[which], n); /* atomic: a preempted program may be about to add, too */
    return counted->values[which];
}

#define NO_REGISTER 17

static __always_inline void read_registers(struct pt_regs *ctx, u64 *regs) {
    regs[0] = ctx->ax;
    regs[1] = ctx->dx;
    regs[2] = ctx->cx;
    regs[3] = ctx->bx;
    regs[4] = ctx->si;
    regs[5] = ctx->di;
    regs[6] = ctx->bp;
    regs[7] = ctx->sp;
    regs[8] = ctx->r8;
    regs[9] = ctx->r9;
    regs[10] = ctx->r10;
    regs[11] = ctx->r11;
    regs[12] = ctx->r12;
    regs[13] = ctx->r13;
    regs[14] = ctx->r14;
    regs[15] = ctx->r15;
    regs[16] = ctx->ip;
    regs[NO_REGISTER] = 0;
}

static __always_inline int read_arg(const u64 *regs, const struct arg *arg, u64 *out) {
    u32 unused = (64 - arg->bits) & 63;
    u64 value = arg->value;
    if (arg->kind == ARG_NONE)
        return -1;
    if (arg->kind == ARG_REGISTER)
        value = regs[arg->base & 31] >> (arg->shift & 63);
    if (arg->kind == ARG_MEMORY) {
        u64 where = value + regs[arg->base & 31] + (regs[arg->index & 31] << (arg->scale & 3));
        value = 0;
        /* 8 bytes may cross into an unmapped page where fewer would not */
        int failed = arg->bits == 64   ? read_user(&value, 8, (void *)where)
                     : arg->bits == 32 ? read_user(&value, 4, (void *)where)
                     : arg->bits == 16 ? read_user(&value, 2, (void *)where)
                                       : read_user(&value, 1, (void *)where);
        if (failed)
            return -1;
    }
    if (arg->is_signed)
        *out = (u64)((s64)(value << unused) >> unused);
    else
        *out = value << unused >> unused;
    return 0;
}

/* The reader looks every so often anyway, and waking it costs the application: so only once in `every` of this CPU's
 * records, which the loader chooses as a fraction of what the buffer holds. */
static __always_inline u64 wakeup(u64 nth, u64 every) {
    return nth % every == 0 ? BPF_RB_FORCE_WAKEUP : BPF_RB_NO_WAKEUP;
}

enum stack_result { STACK_SENT, STACK_NO_ROOM, STACK_OVERWRITTEN };

static __always_inline enum stack_result send_stack(u64 id, u64 time, u32 pid, u32 depth, struct scratch *scratch,
                                                    u64 owner) {
    struct stack *record = stacks.ringbuf_reserve(sizeof(struct stack) + sizeof(scratch->around) + sizeof(u64) * STACK_DEPTH);
    if (!record)
        return STACK_NO_ROOM;
    record->id = id;
    record->time = time;
    record->pid = pid;
    record->depth = depth;
    bpf_probe_read_kernel(record->ips, sizeof(u64) * STACK_DEPTH, scratch->ips);
    bpf_probe_read_kernel(record->ips + STACK_DEPTH, sizeof(scratch->around), scratch->around);
    if (*(volatile u64 *)&scratch->owner != owner) {
        stacks.ringbuf_discard(record, BPF_RB_NO_WAKEUP);
        return STACK_OVERWRITTEN;
    }
    stacks.ringbuf_submit(record, wakeup(count(STACKS, 1), STACK_WAKE_EVERY));
    return STACK_SENT;
}

/* Reads what stands around the innermost addresses. Not around all that a stack can have: the verifier would find a third loop of
 * that length too complex. */
static __always_inline void look_around(struct scratch *scratch, u64 depth) {
#pragma clang loop unroll(disable)
    for (u32 i = 0; i < STACK_DEPTH; i++) {
        u64 at = below(LOOKED_AT, i);
        if (hidden(i) >= depth || hidden(i) >= LOOKED_AT)
            break;
        read_user(scratch->around[at], sizeof(scratch->around[at]), (void *)(scratch->ips[at] - 8)); /* 0 if that fails */
    }
}

/* Where a function that has not made its own frame has its caller's, in bytes from the stack pointer. */
struct caller {
    u16 stack;           /* to the return address */
    s16 frame;           /* to the caller's frame pointer; -1: that is in rbp */
};

/* As bpf_get_stack walks by frame pointers, and gives bytes, but from the caller on: bpf_get_stack would miss that one, or take
 * whatever the function has in rbp for a frame.
 *
 * The depth is kept in memory, where the verifier forgets it: it need not go on for each. */
static __always_inline long walk(struct pt_regs *ctx, struct scratch *scratch, const struct caller *caller) {
    u64 at = ctx->bp;
    scratch->ips[0] = ctx->ip;
    read_user(&scratch->ips[1], 8, (void *)ctx->sp + caller->stack);
    if (caller->frame >= 0) {
        read_user(scratch->frame, 8, (void *)ctx->sp + caller->frame);
        at = scratch->frame[0];
    }
    scratch->depth = 2;
#pragma clang loop unroll(disable)
    for (u32 i = 2; i < STACK_DEPTH; i++) {
        if (read_user(scratch->frame, sizeof(scratch->frame), (void *)at))
            break;
        at = scratch->frame[0];
        scratch->ips[below(MAX_DEPTH, i)] = scratch->frame[1];
        scratch->depth = i + 1;
    }
    return 8 * *(volatile u32 *)&scratch->depth;
}

/* Returns the stack's id; 0 where there is none. `remark` is what is to be counted of it, COUNTERS for nothing. `caller` is
 * that of a function that has not made its frame, else NULL. */
static __always_inline u64 user_stack(struct pt_regs *ctx, u64 time, u32 pid, u32 tid, u64 epoch,
                                      const struct caller *caller, enum counter *remark) {
    u32 zero = 0;
    struct scratch *scratch = scratches.lookup(&zero);
    *remark = STACKS_FAILED;
    if (!scratch)
        return 0;
    u64 owner = time ^ ((u64)tid << 32);
    for (int attempt = 0; attempt < 3; attempt++) {
        *(volatile u64 *)&scratch->owner = owner;
        long bytes = caller ? walk(ctx, scratch, caller)
                            : bpf_get_stack(ctx, scratch->ips, sizeof(u64) * STACK_DEPTH, BPF_F_USER_STACK);
        if (bytes <= 0)
            return 0;
        u64 depth = forgotten((u64)bytes / 8, time);
        u64 id = (pid ^ epoch << 32) * 0x9e3779b97f4a7c15ULL, check = pid + (epoch << 32);
#pragma clang loop unroll(disable)
        for (u32 i = 0; i < STACK_DEPTH; i++) {
            if (hidden(i) >= depth)
                break;
            u64 ip = scratch->ips[below(MAX_DEPTH, i)];
            id = (id ^ ip) * 0xff51afd7ed558ccdULL;
            id ^= id >> 32;
            check = (check + ip) * 0xc4ceb9fe1a85ec53ULL;
            check ^= check >> 29;
        }
        depth = forgotten(depth, time);
        if (*(volatile u64 *)&scratch->owner != owner)
            continue;
        id = (id & ((1ULL << STACK_ID_BITS) - 1)) | 1; /* 0 says that there is none */
        u64 *known = stacks_sent.lookup(&id);
        enum counter whole_or_not = depth >= STACK_DEPTH ? STACKS_TRUNCATED : COUNTERS;
        if (known && *known == check) {
            *remark = whole_or_not;
            return id;
        }
        look_around(scratch, depth);
        u64 sent_as = known ? 1ULL << 63 | time << 8 | (bpf_get_smp_processor_id() & 255) : id;
        enum stack_result result = send_stack(sent_as, time, pid, depth, scratch, owner);
        if (result == STACK_OVERWRITTEN)
            continue;
        if (result == STACK_NO_ROOM) {
            *remark = STACKS_LOST;
            return 0;
        }
        if (known)
            count(STACKS_COLLIDED, 1);
        else
            stacks_sent.update(&id, &check);
        *remark = whole_or_not;
        return sent_as;
    }
    return 0;
}

/* What a launch is, however that was found out. */
struct launched {
    u64 time;
    u32 pid;
    u32 tid;
    u64 fired;       /* how many this CPU has counted with it */
    u64 stack;
    enum counter remark;
    u32 flags;
};

/* Who launches, and from where, as user_stack has it; returns 0 when the programs are not set up. */
static __always_inline int begin_launch(struct pt_regs *ctx, u64 time, const struct caller *caller,
                                        struct launched *launch) {
    u64 who = bpf_get_current_pid_tgid();
    u32 zero = 0, pid = who >> 32;
    struct settings *set = settings.lookup(&zero);
    if (!set)
        return 0;
    launch->time = time;
    launch->pid = pid;
    launch->tid = who;
    launch->fired = count(LAUNCHES, 1);
    launch->stack = 0;
    launch->remark = OTHERS;
    launch->flags = 0;
    if (set->scoped && others.lookup(&pid)) {
        launch->flags = LAUNCH_OTHER;
    } else {
        launch->stack = user_stack(ctx, time, pid, who, set->epoch, caller, &launch->remark);
        if (!launch->stack)
            launch->flags = LAUNCH_NO_STACK;
    }
    /* Copied onto itself, so that the verifier forgets by which of many ways it came here, and goes on but once. */
    bpf_probe_read_kernel(launch, sizeof(*launch), launch);
    return 1;
}

/* A record for it, to be submitted with the address, size, flags and name in it; NULL where there is no room.
 *
 * After the stack, which a launch is never ahead of, and late: a thread that is preempted while it holds a record holds up
 * those behind it. */
static __always_inline struct launch *reserve_launch(const struct launched *launch) {
    struct launch *record = launches.ringbuf_reserve(sizeof(struct launch));
    if (!record) {
        count(LAUNCHES_LOST, 1);
        return 0;
    }
    if (launch->remark != COUNTERS)
        count(launch->remark, 1);
    record->time = launch->time;
    record->pid = launch->pid;
    record->tid = launch->tid;
    record->cpu = bpf_get_smp_processor_id();
    record->stack = launch->stack;
    __builtin_memset(record->comm, 0, sizeof(record->comm));
    __builtin_memset(record->name, 0, sizeof(record->name));
    if (!(launch->flags & LAUNCH_OTHER))
        bpf_get_current_comm(record->comm, sizeof(record->comm));
    return record;
}

static __always_inline void launched(struct pt_regs *ctx, u64 time, const struct probe *probe) {
    struct launched launch;
    u64 regs[32] = {};
    u64 iba = 0, address = 0, size = 0, name = 0;
    if (!begin_launch(ctx, time, 0, &launch))
        return;
    read_registers(ctx, regs);
    if (read_arg(regs, &probe->args[0], &iba) | read_arg(regs, &probe->args[1], &address) |
        read_arg(regs, &probe->args[2], &size))
        launch.flags |= LAUNCH_BAD_ARGS;
    struct launch *record = reserve_launch(&launch);
    if (!record)
        return;
    if (launch.flags & LAUNCH_BAD_ARGS)
        count(BAD_ARGS, 1);
    record->iba = iba;
    record->address = address;
    record->size = size;
    /* The patched driver passes a C++ smart pointer here: on some builds it is the string's address. */
    if (!(launch.flags & LAUNCH_OTHER) &&
        (read_arg(regs, &probe->args[3], &name) ||
         read_user_text(record->name, sizeof(record->name), (void *)name) <= 1))
        launch.flags |= LAUNCH_NO_NAME;
    record->flags = launch.flags;
    launches.ringbuf_submit(record, wakeup(launch.fired, LAUNCH_WAKE_EVERY));
}

static __always_inline void compiled(struct pt_regs *ctx, u64 time, const struct probe *probe) {
    count(COMPILED, 1);
    u64 regs[32] = {};
    u64 path = 0;
    read_registers(ctx, regs);
    int failed = read_arg(regs, &probe->args[0], &path);
    struct compiled *record = compilations.ringbuf_reserve(sizeof(struct compiled));
    if (!record) {
        count(COMPILED_LOST, 1);
        return;
    }
    u64 who = bpf_get_current_pid_tgid(), user = bpf_get_current_uid_gid();
    record->time = time;
    record->pid = who >> 32;
    record->tid = who;
    record->uid = user;
    record->gid = user >> 32;
    if (failed || read_user_text(record->path, sizeof(record->path), (void *)path) <= 1) {
        count(COMPILED_LOST, 1);
        compilations.ringbuf_discard(record, BPF_RB_NO_WAKEUP);
        return;
    }
    /* The file may be gone soon: the reader is woken at once. */
    compilations.ringbuf_submit(record, BPF_RB_FORCE_WAKEUP);
}

int on_launch(struct pt_regs *ctx) {
    u64 time = bpf_ktime_get_ns();
    u32 slot = attach_cookie(ctx);
    struct probe *probe = probes.lookup(&slot);
    if (probe)
        launched(ctx, time, probe);
    count(PROBE_NS, bpf_ktime_get_ns() - time);
    return 0;
}

int on_compile(struct pt_regs *ctx) {
    u64 time = bpf_ktime_get_ns();
    u32 slot = attach_cookie(ctx);
    struct probe *probe = probes.lookup(&slot);
    if (probe)
        compiled(ctx, time, probe);
    count(PROBE_NS, bpf_ktime_get_ns() - time);
    return 0;
}
