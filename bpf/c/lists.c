// SPDX-License-Identifier: GPL-2.0
/* Executions and other events of closed command lists (compiled after handles.c).
 *
 * A launch that is appended to a list has the list's handle (`list` of struct launch). The programs in this file send a record
 * for each call that executes lists, with their handles and the call's stack, and a record for each list that is closed, reset
 * or destroyed, as the handle then refers to another filling. They do not read the lists, so the cost of an execution does not
 * depend on how much was appended. report/join/executions.py matches launches with executions.
 *
 * The loader sets LIST_WAKE_BYTES.
 */
#define RECORDS_PER_PROGRAM 64
#define MOST_LISTS (8 * RECORDS_PER_PROGRAM * LISTS_A_RECORD) /* of one call; lists beyond are counted as lost */

BPF_RINGBUF_OUTPUT(list_events, ANY);

static __always_inline void begin_record(struct list_record *record, const struct launched *launch, u64 event) {
    record->time = launch->time;
    record->pid = launch->pid;
    record->tid = launch->tid;
    record->cpu = bpf_get_smp_processor_id();
    record->flags = launch->flags;
    record->event = event;
    record->stack = launch->stack;
    __builtin_memset(record->comm, 0, sizeof(record->comm));
    if (!(launch->flags & LAUNCH_OTHER))
        bpf_get_current_comm(record->comm, sizeof(record->comm));
}

/* Sends the lists that a call executes or includes, in as many records as necessary; continues with the program for `again` if
 * there are more than RECORDS_PER_PROGRAM. */
static __always_inline void send_executions(struct pt_regs *ctx, struct scratch *scratch, u64 event, u64 queue, u64 many,
                                            u64 from, enum phase again) {
    struct launch_state *state = launch_state_of(scratch);
    struct launched *launch = &state->launched;
    u64 time = launch->time, sent = state->lists_sent, lost = 0, is_full = 0;
    if (launch->counter != COUNTERS)
        count(hidden(launch->counter), 1); /* the problem of its stack */
    launch->counter = COUNTERS;
    u64 numbers;
    begin_numbers(&numbers, 0, RECORDS_PER_PROGRAM);
#pragma clang loop unroll(disable)
    for (u64 number = 0; next_number(&numbers, number, RECORDS_PER_PROGRAM); number = number_after(number, time)) {
        sent = forgotten(sent, time);
        lost = forgotten(lost, time);
        if (sent >= many)
            break;
        struct list_record *record = list_events.ringbuf_reserve(sizeof(struct list_record));
        if (!record) {
            is_full = 1;
            break;
        }
        u64 some = at_most(LISTS_A_RECORD, many - sent);
        u64 unreadable = hidden(read_user(record->lists, some * 8, (void *)(from + sent * 8))) >> 63;
        some = forgotten(some, time);
        lost += choose(unreadable, some, 0);
        begin_record(record, launch, event);
        record->count = choose(unreadable, 0, some);
        record->queue = queue;
        list_events.ringbuf_submit(record, wakeup(record, sizeof(*record), LIST_WAKE_BYTES));
        sent += some;
    }
    end_numbers(&numbers);
    if (lost)
        count(LISTS_LOST, lost);
    if (sent < many && sent < MOST_LISTS && !is_full) {
        state->lists_sent = sent;
        launch->flags |= LAUNCH_NO_WALK;
        phases.call(ctx, again);
    }
    if (sent < many)
        count(LISTS_LOST, many - sent);
}

/* VkSubmitInfo2, as far as needed, and VkCommandBufferSubmitInfo. */
struct submit_info {
    u64 before[4];
    u32 count; /* of command buffers */
    u32 pad;
    u64 first;
};
#define SUBMIT_INFO_BYTES 64
#define BUFFER_INFO_BYTES 32
#define BUFFER_AT 16

/* Sends the command buffers that a call submits, one record for up to eight of one VkSubmitInfo2; continues with the program
 * for SUBMITTED if there are more than RECORDS_PER_PROGRAM. */
static __always_inline void send_submissions(struct pt_regs *ctx, struct scratch *scratch, u64 queue, u64 many, u64 from) {
    struct launch_state *state = launch_state_of(scratch);
    struct launched *launch = &state->launched;
    u64 time = launch->time, batch = state->kernels_sent, sent = state->lists_sent, lost = 0, is_full = 0;
    if (launch->counter != COUNTERS)
        count(hidden(launch->counter), 1); /* the problem of its stack */
    launch->counter = COUNTERS;
    u64 numbers;
    begin_numbers(&numbers, 0, RECORDS_PER_PROGRAM);
#pragma clang loop unroll(disable)
    for (u64 number = 0; next_number(&numbers, number, RECORDS_PER_PROGRAM); number = number_after(number, time)) {
        batch = forgotten(batch, time);
        sent = forgotten(sent, time);
        lost = forgotten(lost, time);
        if (batch >= many)
            break;
        struct submit_info info = {}; /* stays so if it cannot be read */
        lost += hidden(read_user(&info, sizeof(info), (void *)(from + SUBMIT_INFO_BYTES * batch))) >> 63;
        u64 of_batch = forgotten(info.count, time);
        if (sent >= of_batch) {
            batch++;
            sent = 0;
            continue;
        }
        struct list_record *record = list_events.ringbuf_reserve(sizeof(struct list_record));
        if (!record) {
            is_full = 1;
            break;
        }
        u64 some = at_most(LISTS_A_RECORD, of_batch - sent);
        some = forgotten(some, time);
        u64 at = info.first + BUFFER_INFO_BYTES * sent + BUFFER_AT;
        u64 unreadable = 0; /* a bit for each; what lies behind the array may be unreadable */
#pragma clang loop unroll(full)
        for (u64 i = 0; i < LISTS_A_RECORD; i++)
            unreadable |= hidden(read_user(&record->lists[i], 8, (void *)(at + BUFFER_INFO_BYTES * i))) >> 63 << i;
        lost += is_set(unreadable & ((1ULL << (some & 15)) - 1));
        begin_record(record, launch, LIST_EXECUTE);
        record->count = some;
        record->queue = queue;
        list_events.ringbuf_submit(record, wakeup(record, sizeof(*record), LIST_WAKE_BYTES));
        sent += some;
    }
    end_numbers(&numbers);
    if (lost)
        count(LISTS_LOST, lost);
    state->kernels_sent = batch;
    state->lists_sent = sent;
    launch->flags |= LAUNCH_NO_WALK;
    if (batch < many && batch < MOST_LISTS && !is_full)
        phases.call(ctx, SUBMITTED);
    if (batch < many)
        count(LISTS_LOST, many - batch);
}

static __always_inline void send_event(u64 event, u64 list) {
    u64 who = bpf_get_current_pid_tgid();
    struct launched call = {
        .time = bpf_ktime_get_ns(),
        .pid = who >> 32,
        .tid = who,
        .flags = LAUNCH_NO_STACK | LAUNCH_OTHER, /* these events need neither stack nor comm */
    };
    struct list_record *record = list_events.ringbuf_reserve(sizeof(struct list_record));
    if (!record) {
        count(LISTS_LOST, 1);
        return;
    }
    begin_record(record, &call, event);
    record->queue = 0;
    __builtin_memset(record->lists, 0, sizeof(record->lists));
    record->lists[0] = list;
    record->count = 1;
    list_events.ringbuf_submit(record, wakeup(record, sizeof(*record), LIST_WAKE_BYTES));
    count(LIST_EVENTS, 1);
}

/* Begins a call that is given an array, unless the array is empty; continues with the program for `after_walk`. */
static __always_inline int begin_lists(struct pt_regs *ctx, enum phase after_walk) {
    u64 time = bpf_ktime_get_ns();
    struct entry *entry = entry_of(ctx);
    if (entry && (u32)integer_argument(ctx, entry->count))
        begin_call(ctx, time, after_walk, EXECUTIONS, LISTS_LOST, 1);
    return 0;
}

int on_execute(struct pt_regs *ctx) {
    return begin_lists(ctx, EXECUTED);
}

int on_executed(struct pt_regs *ctx) {
    struct entry *entry = entry_of(ctx);
    struct scratch *scratch = walked_call(LISTS_LOST);
    if (!scratch)
        return 0;
    if (entry)
        send_executions(ctx, scratch, entry->event, ctx->di, (u32)integer_argument(ctx, entry->count),
                        integer_argument(ctx, entry->handle), EXECUTED);
    end_launch(scratch);
    return 0;
}

int on_submit(struct pt_regs *ctx) {
    return begin_lists(ctx, SUBMITTED);
}

int on_submitted(struct pt_regs *ctx) {
    struct entry *entry = entry_of(ctx);
    struct scratch *scratch = walked_call(LISTS_LOST);
    if (!scratch)
        return 0;
    if (entry)
        send_submissions(ctx, scratch, ctx->di, (u32)integer_argument(ctx, entry->count),
                         integer_argument(ctx, entry->handle));
    end_launch(scratch);
    return 0;
}

int on_list_event(struct pt_regs *ctx) {
    keep_kernel_stack(ctx);
    struct entry *entry = entry_of(ctx);
    struct layout *layout = layout_of(entry);
    if (entry) {
        u64 list = integer_argument(ctx, entry->handle);
        if (layout && layout->drawn_count)
            end_draws(ctx, entry, entry->event, list);
        send_event(entry->event, list);
    }
    return 0;
}

/* The same events, from the probes of the injected library. */

int on_probed_execute(struct pt_regs *ctx) {
    begin_call(ctx, bpf_ktime_get_ns(), PROBED_EXECUTED, EXECUTIONS, LISTS_LOST, 1);
    return 0;
}

int on_probed_executed(struct pt_regs *ctx) {
    u32 slot = attach_cookie(ctx);
    struct probe *probe = probes.lookup(&slot);
    struct scratch *scratch = walked_call(LISTS_LOST);
    if (!scratch)
        return 0;
    u64 queue = 0, many = 0, from = 0, *regs = launch_state_of(scratch)->regs;
    read_registers(ctx, regs);
    if (probe && !(read_arg(regs, &probe->args[0], &queue) | read_arg(regs, &probe->args[1], &many) |
                   read_arg(regs, &probe->args[2], &from)))
        send_executions(ctx, scratch, LIST_EXECUTE, queue, (u32)many, from, PROBED_EXECUTED);
    else
        count(LISTS_LOST, 1);
    end_launch(scratch);
    return 0;
}

int on_probed_list_event(struct pt_regs *ctx) {
    keep_kernel_stack(ctx);
    u32 slot = attach_cookie(ctx);
    struct probe *probe = probes.lookup(&slot);
    u64 regs[32] = {}, event = 0, list = 0;
    read_registers(ctx, regs);
    if (probe && !(read_arg(regs, &probe->args[0], &event) | read_arg(regs, &probe->args[1], &list)) &&
        event <= LIST_DESTROY)
        send_event(event, list);
    else
        count(LISTS_LOST, 1);
    return 0;
}
