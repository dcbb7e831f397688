// SPDX-License-Identifier: GPL-2.0
/* Messages of a library of ours in a process, such as samples of a GPU that only the process itself can get (compiled after
 * launches.c).
 *
 * The library raises a USDT probe whose argument points to a message in its memory: the members of struct message from
 * `id` on. What a process sends is its own claim; the pid is not.
 *
 * Processes of one user, such as those of a training on several GPUs, send the same cubins at the same time. One of them is
 * the sender: of the others, only the first piece is taken, which says where the cubin is in their process. A sender that sends
 * nothing for some time, or of whose pieces one is lost, is none any more.
 *
 * Pieces of cubins have a ring buffer of their own, as they can wait, and samples cannot. Where it is full, the thread that sends a
 * piece gets the signal AGAIN, and sends the piece again later. The library blocks that signal in its thread; it is one that does
 * nothing to a process that is not prepared for it.
 *
 * The compiler sets MESSAGE_BYTES; the loader sets *_WAKE_BYTES.
 */
#define SENDER_NS 2000000000ULL
#define AGAIN 23 /* SIGURG; inject_cuda.c has it, too */

BPF_RINGBUF_OUTPUT(messages, ANY);
BPF_RINGBUF_OUTPUT(pieces, ANY);

struct cubin {
    u64 crc;
    u64 bytes;
    u32 uid;
    u32 epoch; /* each output file gets its own */
};
struct sender {
    u64 until; /* ~0: everything was sent */
    u64 pid;
};
BPF_TABLE("lru_hash", struct cubin, struct sender, senders, ANY);

#define MESSAGE_HEAD (__builtin_offsetof(struct message, data) - __builtin_offsetof(struct message, id))

/* The members of struct message before its data. */
struct message_head {
    u64 time;
    u32 pid, uid;
    u64 id, begin, end, offset, total;
    u32 what, bytes;
};
_Static_assert(sizeof(struct message_head) == __builtin_offsetof(struct message, data), "struct message has other members");

/* Whether a piece of a cubin is wanted: it is the first, or its process is the cubin's sender. */
static __always_inline u64 is_wanted(const struct message_head *head, const struct cubin *cubin) {
    struct sender *known = senders.lookup((struct cubin *)cubin), next = {.until = head->time + SENDER_NS, .pid = head->pid};
    u64 is_open = !known || hidden(known->until) < head->time, is_own = known && hidden(known->pid) == head->pid;
    if (head->offset && !is_own)
        return 0;
    if (is_own || is_open)
        senders.update((struct cubin *)cubin, &next);
    return 1;
}

/* Notes that a piece of a cubin was taken. */
static __always_inline void note_taken(const struct message_head *head, const struct cubin *cubin) {
    struct sender *known = senders.lookup((struct cubin *)cubin);
    if (known && hidden(known->pid) == head->pid && head->offset + head->bytes == head->total)
        known->until = ~0ULL;
}

static __always_inline void send_message(u64 from, u64 time, u32 epoch) {
    struct message_head head = {};
    u64 who = bpf_get_current_pid_tgid(), is_piece = 0;
    if (read_user(&head.id, MESSAGE_HEAD, (void *)from)) {
        count(MESSAGES_LOST, 1);
        return;
    }
    head.time = time;
    head.pid = who >> 32;
    head.uid = bpf_get_current_uid_gid();
    struct cubin cubin = {.crc = head.id, .bytes = head.total, .uid = head.uid, .epoch = epoch};
    is_piece = head.what == MESSAGE_OF_MODULE && head.bytes;
    if (is_piece && !is_wanted(&head, &cubin))
        return;
    struct message *message;
    if (is_piece)
        message = pieces.ringbuf_reserve(sizeof(struct message));
    else
        message = messages.ringbuf_reserve(sizeof(struct message));
    if (is_piece && !message && !signal_thread(AGAIN))
        return;
    if (message) {
        __builtin_memcpy(message, &head, sizeof(head));
        if (!read_user(message->data, at_most(MESSAGE_BYTES, head.bytes), (void *)(from + MESSAGE_HEAD))) {
            count(MESSAGES, 1);
            messages.ringbuf_submit(message, wakeup(message, sizeof(*message), is_piece ? PIECE_WAKE_BYTES : MESSAGE_WAKE_BYTES));
            if (is_piece)
                note_taken(&head, &cubin);
            return;
        }
        messages.ringbuf_discard(message, BPF_RB_NO_WAKEUP);
    }
    count(MESSAGES_LOST, 1);
    if (is_piece)
        senders.delete(&cubin);
}

int on_message(struct pt_regs *ctx) {
    keep_kernel_stack(ctx);
    u64 time = bpf_ktime_get_ns(), from = 0, regs[32] = {};
    u32 slot = attach_cookie(ctx), zero = 0, pid = bpf_get_current_pid_tgid() >> 32;
    struct probe *probe = probes.lookup(&slot);
    struct settings *set = settings.lookup(&zero);
    read_registers(ctx, regs);
    if (probe && set && !(set->scoped && others.lookup(&pid)) && !read_arg(regs, &probe->args[0], &from))
        send_message(from, time, set->epoch);
    count(PROBE_NS, bpf_ktime_get_ns() - time);
    return 0;
}
