// SPDX-License-Identifier: GPL-2.0
/* Copies and fills, and the kernels of the driver's own that these launch (compiled behind handles.c).
 *
 * A program calls one function of the driver for a copy. The driver then launches none of its kernels, if a copy engine or the
 * CPU does it, or up to three. The call is a record, a struct launch with LAUNCH_TRANSFER; each kernel is a launch, and has the
 * call's stack: only the call's is walked. `calls` has the last call of each thread; that a launch is of that call, the
 * command list and the stack pointer tell. Where they do not, the launch's own stack is walked, which has the driver's functions in it.
 */

#define LIST 112 /* the first argument, by its offset in pt_regs */

enum unit { BYTES, REGION, NO_NUMBER }; /* what an entry's argument says of how much is copied */

#define UNKNOWN_BYTES (~0ULL)

struct call {
    u64 list;
    u64 sp;
    u64 epoch;
    u64 stack;
    u64 flags;
};
BPF_TABLE("lru_hash", u32, struct call, calls, ANY); /* by thread */

struct region {          /* ze_copy_region_t, in bytes, rows and slices */
    u32 origin[3];
    u32 width;
    u32 height;
    u32 depth;
};

static __always_inline u64 bytes_of(struct pt_regs *ctx, const struct entry *entry) {
    u64 argument = integer_argument(ctx, entry->handle);
    struct region region = {};
    if (entry->unit == BYTES)
        return argument;
    if (entry->unit != REGION || read_user(&region, sizeof(region), (void *)argument))
        return UNKNOWN_BYTES;
    return (u64)region.width * (region.height ? region.height : 1) * (region.depth ? region.depth : 1);
}

static __always_inline void send_transfer(struct pt_regs *ctx, const struct entry *entry, const struct launched *launch) {
    u64 bytes = bytes_of(ctx, entry);
    struct launch *record = reserve_launch(launch);
    if (!record)
        return;
    record->iba = entry->transfer;
    record->address = 0;
    record->size = bytes;
    record->list = 0;
    record->flags = launch->flags | LAUNCH_TRANSFER;
    launches.ringbuf_submit(record, wakeup(launch->fired, LAUNCH_WAKE_EVERY));
}

int on_transfer(struct pt_regs *ctx) {
    u64 time = bpf_ktime_get_ns();
    if (entry_of(ctx))
        begin_call(ctx, time, TRANSFERRED, TRANSFERS, LAUNCHES_LOST);
    return 0;
}

int on_transferred(struct pt_regs *ctx) {
    struct entry *entry = entry_of(ctx);
    struct scratch *scratch = launched_before();
    if (!scratch)
        return 0;
    if (entry) {
        struct launched *launch = &room_of(scratch)->launched;
        u32 tid = launch->tid;
        struct call call = {
            .list = integer_argument(ctx, LIST) + entry->list_offset,
            .sp = ctx->sp,
            .epoch = scratch->epoch,
            .stack = launch->stack,
            .flags = launch->flags,
        };
        calls.update(&tid, &call);
        if (!(launch->flags & LAUNCH_OTHER))
            send_transfer(ctx, entry, launch);
    }
    end_launch(scratch);
    return 0;
}

/* A launch with the stack of a call, if that is where it is from. */
static __always_inline void begin_given(struct pt_regs *ctx, u64 time, const struct call *call) {
    u64 fired = count(LAUNCHES, 1);
    struct scratch *scratch = take_scratch(owner_of(0));
    if (scratch) {
        struct launched *launch = &room_of(scratch)->launched;
        launch->time = time;
        launch->pid = bpf_get_current_pid_tgid() >> 32;
        launch->tid = bpf_get_current_pid_tgid();
        launch->fired = fired;
        launch->stack = call->stack;
        launch->flags = call->flags | LAUNCH_GIVEN;
        room_of(scratch)->kernels_sent = room_of(scratch)->undescribed = 0;
        launch->remark = COUNTERS; /* what the call's record lacks, it was counted with */
        phases.call(ctx, HANDLE_LAUNCHED);
        give_back(scratch);
    }
    count(LAUNCHES_LOST, 1);
}

int on_own_launch(struct pt_regs *ctx) {
    u64 time = bpf_ktime_get_ns();
    struct entry *entry = entry_of(ctx);
    u32 zero = 0, tid = bpf_get_current_pid_tgid();
    struct settings *set = settings.lookup(&zero);
    struct call *call = calls.lookup(&tid);
    if (!entry || !set)
        return 0;
    if (call && call->list == integer_argument(ctx, LIST) + entry->list_offset && call->sp > ctx->sp &&
        call->epoch == set->epoch)
        begin_given(ctx, time, call);
    else
        begin_launch(ctx, time, HANDLE_LAUNCHED);
    return 0;
}
