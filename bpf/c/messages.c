// SPDX-License-Identifier: GPL-2.0
/* Messages of a library of ours in a process, such as samples of a GPU that only the process itself can get (compiled after
 * launches.c).
 *
 * The library raises a USDT probe whose argument points to a message in its memory: the members of struct message from
 * `id` on. What a process sends is its own claim; the pid is not.
 *
 * The compiler sets MESSAGE_BYTES; the loader sets MESSAGE_WAKE_EVERY.
 */
BPF_RINGBUF_OUTPUT(messages, ANY);

#define MESSAGE_HEAD (__builtin_offsetof(struct message, data) - __builtin_offsetof(struct message, id))

static __always_inline void send_message(u64 from, u64 time) {
    struct message *message = messages.ringbuf_reserve(sizeof(struct message));
    if (!message) {
        count(MESSAGES_LOST, 1);
        return;
    }
    u64 who = bpf_get_current_pid_tgid();
    message->time = time;
    message->pid = who >> 32;
    message->tid = who;
    if (read_user(&message->id, MESSAGE_HEAD, (void *)from) ||
        read_user(message->data, at_most(MESSAGE_BYTES, message->bytes), (void *)(from + MESSAGE_HEAD))) {
        count(MESSAGES_LOST, 1);
        messages.ringbuf_discard(message, BPF_RB_NO_WAKEUP);
        return;
    }
    messages.ringbuf_submit(message, wakeup(count(MESSAGES, 1), MESSAGE_WAKE_EVERY));
}

int on_message(struct pt_regs *ctx) {
    u64 time = bpf_ktime_get_ns(), from = 0, regs[32] = {};
    u32 slot = attach_cookie(ctx), zero = 0, pid = bpf_get_current_pid_tgid() >> 32;
    struct probe *probe = probes.lookup(&slot);
    struct settings *set = settings.lookup(&zero);
    read_registers(ctx, regs);
    if (probe && set && !(set->scoped && others.lookup(&pid)) && !read_arg(regs, &probe->args[0], &from))
        send_message(from, time);
    count(PROBE_NS, bpf_ktime_get_ns() - time);
    return 0;
}
