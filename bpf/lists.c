// SPDX-License-Identifier: GPL-2.0
/* What happens to closed command lists (compiled behind handles.c).
 *
 * A launch that is appended to a list says which one (`list` of struct launch). Here is what tells when such a list ran: a record for
 * each execution, with the lists of the call and the stack that it is from, and one for each list that was closed, reset or destroyed,
 * as from then on its handle means something else. Nothing here looks into a list, so an execution costs the same however much was
 * appended. formats/launches.py has the same layout, and report/executions.py puts launches and executions together.
 *
 * Set by the loader: LIST_WAKE_EVERY.
 */
#define LISTS_A_RECORD 8
#define MOST_LIST_RECORDS 512 /* of one call; what is beyond is counted as lost */

enum list_event { LISTS_EXECUTED, LIST_CLOSED, LIST_RESET, LIST_DESTROYED };

struct list_record {
    u64 time;
    u32 pid;
    u32 tid;
    u32 cpu;
    u32 flags;           /* enum launch_flags */
    u32 event;           /* enum list_event */
    u32 count;           /* of `lists` */
    u64 queue;           /* that executes: a queue's handle, or an immediate list's */
    u64 stack;           /* 0 where there is none */
    char comm[16];
    u64 lists[LISTS_A_RECORD];
};
BPF_RINGBUF_OUTPUT(list_events, ANY);

static __always_inline void begin_record(struct list_record *record, const struct launched *launch, enum list_event event) {
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
static __always_inline void send_executions(struct pt_regs *ctx, const struct launched *launch, const struct entry *entry) {
    u64 from = integer_argument(ctx, entry->handle), queue = ctx->di, time = launch->time, sent = 0, lost = 0;
    u64 many = (u32)integer_argument(ctx, entry->count);
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
        begin_record(record, launch, LISTS_EXECUTED);
        record->count = choose(unreadable, 0, some);
        record->queue = queue;
        list_events.ringbuf_submit(record, wakeup(launch->fired, LIST_WAKE_EVERY));
        sent += some;
    }
    lost += many - sent;
    if (lost)
        count(LISTS_LOST, lost);
}

static __always_inline void send_event(struct pt_regs *ctx, enum list_event event, u64 list) {
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
    struct launched *launch = &room_of(scratch)->launched;
    if (launch->remark != COUNTERS)
        count(hidden(launch->remark), 1);
    if (entry)
        send_executions(ctx, launch, entry);
    end_launch(scratch);
    return 0;
}

int on_list_event(struct pt_regs *ctx) {
    struct entry *entry = entry_of(ctx);
    if (entry)
        send_event(ctx, entry->event, integer_argument(ctx, entry->handle));
    return 0;
}
