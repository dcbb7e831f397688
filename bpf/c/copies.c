// SPDX-License-Identifier: GPL-2.0
/* Copies and fills, and the driver's own kernels that they launch (compiled after handles.c).
 *
 * For a copy, a program calls one function of the driver. The driver then launches up to three of its own kernels, or none if a
 * copy engine or the CPU copies. The call becomes a record, a struct launch with LAUNCH_TRANSFER, and each kernel becomes a
 * launch. Only the call's stack is walked; its launches get the same stack. `calls` has the last call of each thread. A launch
 * belongs to that call if it has the same command list, and a stack pointer below the call's. Otherwise the launch's own stack
 * is walked, which includes the driver's functions.
 */

#define LIST 112 /* offset in pt_regs of the first argument */

#define MOST_DISPATCHED 16 /* kernels that are launched together; a copy has at most four */

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

/* Returns the size in bytes of a copy or fill. */
static __always_inline u64 bytes_of(struct pt_regs *ctx, const struct entry *entry) {
    u64 argument = integer_argument(ctx, entry->handle);
    struct region region = {};
    u64 sizes[3] = {};
    if (entry->size_kind == BYTES)
        return argument;
    if (entry->size_kind == SIZES)
        return read_user(sizes, sizeof(sizes), (void *)argument) ? UNKNOWN_BYTES : sizes[0] * sizes[1] * sizes[2];
    if (entry->size_kind != REGION || read_user(&region, sizeof(region), (void *)argument))
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
    launches.ringbuf_submit(record, wakeup(record, sizeof(*record), LAUNCH_WAKE_BYTES));
}

/* Whether the driver itself called this function. */
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
        begin_call(ctx, time, TRANSFERRED, TRANSFERS, LAUNCHES_LOST, 1);
    return 0;
}

int on_transferred(struct pt_regs *ctx) {
    keep_kernel_stack(ctx);
    struct entry *entry = entry_of(ctx);
    struct scratch *scratch = walked_launch();
    if (!scratch)
        return 0;
    if (entry) {
        struct launched *launch = &launch_state_of(scratch)->launched;
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

/* At a function that may copy but is no transfer: its launches do not belong to the call before it. */
int on_may_copy(struct pt_regs *ctx) {
    keep_kernel_stack(ctx);
    u32 tid = bpf_get_current_pid_tgid();
    calls.delete(&tid);
    return 0;
}

/* Begins a launch that belongs to a call and gets its stack; continues with the program for `after_walk`. */
static __always_inline void begin_with_stack_of(struct pt_regs *ctx, u64 time, const struct call *call, enum phase after_walk) {
    count(LAUNCHES, 1);
    struct scratch *scratch = take_scratch(owner_of(0));
    if (scratch) {
        struct launched *launch = &launch_state_of(scratch)->launched;
        launch->time = time;
        launch->pid = bpf_get_current_pid_tgid() >> 32;
        launch->tid = bpf_get_current_pid_tgid();
        launch->stack = call->stack;
        launch->flags = call->flags | LAUNCH_NO_WALK;
        launch_state_of(scratch)->kernels_sent = launch_state_of(scratch)->undescribed = 0;
        launch->counter = COUNTERS; /* problems of the stack were counted with the call */
        phases.call(ctx, after_walk);
        give_back(scratch);
    }
    count(LAUNCHES_LOST, 1);
}

static __always_inline void begin_own_launch(struct pt_regs *ctx, enum phase after_walk) {
    u64 time = bpf_ktime_get_ns();
    struct entry *entry = entry_of(ctx);
    u32 zero = 0, tid = bpf_get_current_pid_tgid();
    struct settings *set = settings.lookup(&zero);
    struct call *call = calls.lookup(&tid);
    if (!entry || !set)
        return;
    if (call && call->list == integer_argument(ctx, LIST) + entry->list_offset && call->sp > ctx->sp &&
        call->epoch == set->epoch)
        begin_with_stack_of(ctx, time, call, after_walk);
    else
        begin_launch(ctx, time, after_walk);
}

int on_own_launch(struct pt_regs *ctx) {
    begin_own_launch(ctx, HANDLE_LAUNCHED);
    return 0;
}

/* At a launch of several own kernels together: an array of structures, each with a pointer that leads to a kernel (struct
 * layout). */

int on_own_launches(struct pt_regs *ctx) {
    begin_own_launch(ctx, DISPATCHED);
    return 0;
}

/* Sends a launch of the next kernel in the array; then continues with the kernels after it, and finally describes new
 * kernels. */
static __always_inline void send_dispatched(struct pt_regs *ctx, struct scratch *scratch, const struct entry *entry,
                                            const struct layout *layout) {
    struct launch_state *state = launch_state_of(scratch);
    struct launched *launch = &state->launched;
    struct kernel *kernel = 0;
    enum counter failure = HANDLES_UNREADABLE;
    u64 argument = integer_argument(ctx, entry->handle), number = state->kernels_sent, undescribed = state->undescribed;
    u64 first = 0, many = 0, of_kernel = 0, handle = 0;
    struct handle key = handle_of(ctx, entry, 0);
    read_user(&many, 1, (void *)(argument + layout->many));
    if (many - 1 < MOST_DISPATCHED && !read_user(&first, 8, (void *)(argument + layout->first)) &&
        !read_user(&of_kernel, 8, (void *)(first + number * layout->size + layout->kernel[0])) &&
        !read_user(&handle, 8, (void *)(of_kernel + layout->kernel[1]))) {
        key.value = with_gpu(ctx, entry, layout, handle + entry->offset);
        kernel = checked_kernel(ctx, entry, layout, &key, state->regs, &failure);
    } else {
        many = 1; /* one launch of an unknown kernel */
    }
    send_launch(launch, kernel, 0, 0, failure);
    state->kernels_sent = number + 1;
    if (!number && many > 1)
        count(LAUNCHES, many - 1);
    if (kernel && kernel->described < MAX_TRIES && undescribed < MOST_UNDESCRIBED - 1) {
        state->handles[below(MOST_UNDESCRIBED, undescribed)] = key.value;
        state->undescribed = undescribed + 1;
    }
    if (number + 1 < many) {
        launch->flags |= LAUNCH_NO_WALK;
        phases.call(ctx, DISPATCHED);
        count(LAUNCHES_LOST, many - number - 1); /* reached only if the tail call fails */
    }
    if (state->undescribed && !(launch->flags & LAUNCH_OTHER))
        phases.call(ctx, DESCRIBE);
}

int on_dispatched(struct pt_regs *ctx) {
    return end_launch_by(ctx, send_dispatched);
}
