// SPDX-License-Identifier: GPL-2.0
/* Copies and fills, and the kernels of the driver's own that these launch (compiled behind handles.c).
 *
 * A program calls one function of the driver for a copy. The driver then launches none of its kernels, if a copy engine or the
 * CPU does it, or up to three. The call is a record, a struct launch with LAUNCH_TRANSFER; each kernel is a launch, and has the
 * call's stack: only the call's is walked. `calls` has the last call of each thread; that a launch is of that call, the
 * command list and the stack pointer tell. Where they do not, the launch's own stack is walked, which has the driver's functions in it.
 */

#define LIST 112 /* the first argument, by its offset in pt_regs */

#define MOST_DISPATCHED 16 /* kernels that are launched together; a copy has no more than four */

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
    u64 sizes[3] = {};
    if (entry->unit == BYTES)
        return argument;
    if (entry->unit == SIZES)
        return read_user(sizes, sizeof(sizes), (void *)argument) ? UNKNOWN_BYTES : sizes[0] * sizes[1] * sizes[2];
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

/* Whether the driver calls one of its functions itself, within another one of them. */
static __always_inline int is_nested(struct pt_regs *ctx, const struct entry *entry) {
    struct layout *layout = entry->nested ? layout_of(entry) : 0;
    u64 returns_to = 0;
    if (!layout || read_user(&returns_to, 8, (void *)ctx->sp))
        return 0;
    return returns_to - loaded_at(ctx, entry) - layout->code_start < layout->code_bytes;
}

int on_transfer(struct pt_regs *ctx) {
    u64 time = bpf_ktime_get_ns();
    struct entry *entry = entry_of(ctx);
    if (entry && !is_nested(ctx, entry))
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

/* A function that may copy and is no transfer: what it launches is of no call before it. */
int on_may_copy(struct pt_regs *ctx) {
    u32 tid = bpf_get_current_pid_tgid();
    calls.delete(&tid);
    return 0;
}

/* A launch with the stack of a call, if that is where it is from; a program for `then` goes on with it. */
static __always_inline void begin_given(struct pt_regs *ctx, u64 time, const struct call *call, enum phase then) {
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
        phases.call(ctx, then);
        give_back(scratch);
    }
    count(LAUNCHES_LOST, 1);
}

static __always_inline void begin_own(struct pt_regs *ctx, enum phase then) {
    u64 time = bpf_ktime_get_ns();
    struct entry *entry = entry_of(ctx);
    u32 zero = 0, tid = bpf_get_current_pid_tgid();
    struct settings *set = settings.lookup(&zero);
    struct call *call = calls.lookup(&tid);
    if (!entry || !set)
        return;
    if (call && call->list == integer_argument(ctx, LIST) + entry->list_offset && call->sp > ctx->sp &&
        call->epoch == set->epoch)
        begin_given(ctx, time, call, then);
    else
        begin_launch(ctx, time, then);
}

int on_own_launch(struct pt_regs *ctx) {
    begin_own(ctx, HANDLE_LAUNCHED);
    return 0;
}

/* Several kernels at once: structures in a row, each with a pointer to a kernel, which has one to what its handle points into. */

int on_own_launches(struct pt_regs *ctx) {
    begin_own(ctx, DISPATCHED);
    return 0;
}

/* Sends the next one; then those behind it, and what is to be described. */
static __always_inline void send_dispatched(struct pt_regs *ctx, struct scratch *scratch, const struct entry *entry,
                                            const struct layout *layout) {
    struct room *room = room_of(scratch);
    struct launched *launch = &room->launched;
    struct kernel *kernel = 0;
    enum counter failure = HANDLES_UNREADABLE;
    u64 argument = integer_argument(ctx, entry->handle), number = room->kernels_sent, undescribed = room->undescribed;
    u64 first = 0, many = 0, of_kernel = 0, handle = 0;
    struct handle key = handle_of(ctx, entry, 0);
    read_user(&many, 1, (void *)(argument + layout->many));
    if (many - 1 < MOST_DISPATCHED && !read_user(&first, 8, (void *)(argument + layout->first)) &&
        !read_user(&of_kernel, 8, (void *)(first + number * layout->size + layout->kernel[0])) &&
        !read_user(&handle, 8, (void *)(of_kernel + layout->kernel[1]))) {
        key.value = with_gpu(ctx, entry, layout, handle + entry->offset);
        kernel = known_kernel(ctx, entry, layout, &key, room->regs, &failure);
    } else {
        many = 1; /* a launch of nobody knows what */
    }
    send_launch(launch, kernel, 0, failure);
    room->kernels_sent = number + 1;
    if (!number && many > 1)
        count(LAUNCHES, many - 1);
    if (kernel && kernel->described < TRIES && undescribed < MOST_UNDESCRIBED - 1) {
        room->handles[below(MOST_UNDESCRIBED, undescribed)] = key.value;
        room->undescribed = undescribed + 1;
    }
    if (number + 1 < many) {
        launch->flags |= LAUNCH_GIVEN;
        phases.call(ctx, DISPATCHED);
        count(LAUNCHES_LOST, many - number - 1); /* nobody goes on with them */
    }
    if (room->undescribed && !(launch->flags & LAUNCH_OTHER))
        phases.call(ctx, DESCRIBE);
}

int on_dispatched(struct pt_regs *ctx) {
    return end_launch_by(ctx, send_dispatched);
}
