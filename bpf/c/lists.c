// SPDX-License-Identifier: GPL-2.0
/* What happens to closed command lists (compiled behind handles.c).
 *
 * A launch that is appended to a list says which one (`list` of struct launch). Here is what tells when such a list ran: a record for
 * each execution, with the lists of the call and the stack that it is from, and one for each list that was closed, reset or destroyed,
 * as from then on its handle means something else. Nothing here looks into a list, so an execution costs the same however much was
 * appended. report/join/executions.py puts launches and executions together.
 *
 * Set by the loader: LIST_WAKE_EVERY.
 */
#define MOST_LIST_RECORDS 512 /* of one call; what is beyond is counted as lost */

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

/* The call's lists, in as many records as it takes. */
static __always_inline void send_executions(const struct launched *launch, u64 queue, u64 many, u64 from) {
    u64 time = launch->time, sent = 0, lost = 0;
#pragma clang loop unroll(disable)
    for (u32 number = 0; number < MOST_LIST_RECORDS; number++) {
        sent = forgotten(sent, time);
        lost = forgotten(lost, time);
        if (sent >= many)
            break;
        struct list_record *record = list_events.ringbuf_reserve(sizeof(struct list_record));
        if (!record)
            break;
        u64 some = at_most(LISTS_A_RECORD, many - sent);
        u64 unreadable = hidden(read_user(record->lists, some * 8, (void *)(from + sent * 8))) >> 63;
        some = forgotten(some, time);
        lost += choose(unreadable, some, 0);
        begin_record(record, launch, LIST_EXECUTE);
        record->count = choose(unreadable, 0, some);
        record->queue = queue;
        list_events.ringbuf_submit(record, wakeup(launch->fired, LIST_WAKE_EVERY));
        sent += some;
    }
    lost += many - sent;
    if (lost)
        count(LISTS_LOST, lost);
}

static __always_inline void send_event(u64 event, u64 list) {
    u64 who = bpf_get_current_pid_tgid();
    struct launched call = {
        .time = bpf_ktime_get_ns(),
        .pid = who >> 32,
        .tid = who,
        .flags = LAUNCH_NO_STACK | LAUNCH_OTHER, /* nobody asks for more */
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
    list_events.ringbuf_submit(record, wakeup(count(LIST_EVENTS, 1), LIST_WAKE_EVERY));
}

/* The call, of which is counted what its stack lacks. */
static __always_inline const struct launched *called(struct scratch *scratch) {
    struct launched *launch = &room_of(scratch)->launched;
    if (launch->remark != COUNTERS)
        count(hidden(launch->remark), 1);
    return launch;
}

int on_execute(struct pt_regs *ctx) {
    u64 time = bpf_ktime_get_ns();
    struct entry *entry = entry_of(ctx);
    if (entry && (u32)integer_argument(ctx, entry->count))
        begin_call(ctx, time, EXECUTED, EXECUTIONS, LISTS_LOST);
    return 0;
}

int on_executed(struct pt_regs *ctx) {
    struct entry *entry = entry_of(ctx);
    struct scratch *scratch = called_before(LISTS_LOST);
    if (!scratch)
        return 0;
    if (entry)
        send_executions(called(scratch), ctx->di, (u32)integer_argument(ctx, entry->count),
                        integer_argument(ctx, entry->handle));
    end_launch(scratch);
    return 0;
}

int on_list_event(struct pt_regs *ctx) {
    struct entry *entry = entry_of(ctx);
    if (entry)
        send_event(entry->event, integer_argument(ctx, entry->handle));
    return 0;
}

/* The same, as the probes of the library tell it that a command is started with. */

int on_probed_execute(struct pt_regs *ctx) {
    begin_call(ctx, bpf_ktime_get_ns(), PROBED_EXECUTED, EXECUTIONS, LISTS_LOST);
    return 0;
}

int on_probed_executed(struct pt_regs *ctx) {
    u32 slot = attach_cookie(ctx);
    struct probe *probe = probes.lookup(&slot);
    struct scratch *scratch = called_before(LISTS_LOST);
    if (!scratch)
        return 0;
    u64 queue = 0, many = 0, from = 0, *regs = room_of(scratch)->regs;
    read_registers(ctx, regs);
    if (probe && !(read_arg(regs, &probe->args[0], &queue) | read_arg(regs, &probe->args[1], &many) |
                   read_arg(regs, &probe->args[2], &from)))
        send_executions(called(scratch), queue, (u32)many, from);
    else
        count(LISTS_LOST, 1);
    end_launch(scratch);
    return 0;
}

int on_probed_list_event(struct pt_regs *ctx) {
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
