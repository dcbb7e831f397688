// SPDX-License-Identifier: GPL-2.0
/* Waits for the GPU: calls of the driver's functions that return when the GPU is done (compiled behind launches.c).
 *
 * on_wait is the program of a uprobe session (Linux 6.13): it runs where such a function begins, and where it returns if it asked
 * for that. The kernel puts the address of a trampoline in place of the return address meanwhile. So walks of a thread that waits
 * put the address back that they read (scratch->slot), and nothing is asked for within a wait that is under way.
 *
 * The stack is walked when a wait begins, while the GPU works: so it is known of waits that never end. Where waits are short,
 * time matters: if the last wait of a call site was short and its stack complete, the next one has this stack, and is walked at
 * its end if it was not short. Short waits are added up by thread and call site, and a sum is sent once in SITE_NS.
 *
 * Set by the loader: WAIT_SHORT_NS, WAIT_WAKE_EVERY.
 */
#define SITE_NS 1000000000ULL

BPF_ARRAY(wait_entries, struct wait_entry, ANY);

/* Not sent: */
#define WAIT_OF_SITE 64 /* the stack is that of its site */
#define WAIT_MISSED 128 /* the stack is incomplete: a rule was missing */

/* A thread that waits. */
BPF_F_TABLE("hash", u32, struct waiting, waits, ANY, BPF_F_NO_PREALLOC);

/* Where a thread waits. */
BPF_F_TABLE("hash", struct site_key, struct site, wait_sites, ANY, BPF_F_NO_PREALLOC);

BPF_RINGBUF_OUTPUT(waited, ANY);

/* A number for the thread and the program that it executes: a thread's own number may be another's later. */
static __always_inline u64 thread_now(void) {
    if (FRAME_POINTERS_ONLY)
        return 1;
    u8 *task = (u8 *)task_now();
    u64 mm = 0;
    bpf_probe_read_kernel(&mm, 8, task + TASK_MM); /* as a number: the verifier knows a pointer otherwise */
    return mixed(*(u64 *)(task + TASK_START_BOOTTIME), mm);
}

/* For a walk through a thread that waits. */
static __always_inline void put_return_back(struct scratch *scratch, u32 tid) {
    struct waiting *waiting = waits.lookup(&tid);
    if (waiting && waiting->since && waiting->whose == thread_now()) {
        scratch->slot = waiting->slot;
        scratch->returns_to = waiting->returns_to;
    }
}

static __always_inline u64 wait_argument(struct pt_regs *ctx, u8 where) {
    u64 value = 0;
    bpf_probe_read_kernel(&value, 8, (void *)ctx + where);
    return value;
}

/* Whether a call instruction ends at an address: only then is it taken for a return address, which the kernel replaces. */
static __always_inline int follows_a_call(u64 address) {
    u8 b[8] = {};
    if (read_user(b, 7, (void *)(address - 7)))
        return 0;
    return b[2] == 0xe8 ||                                                 /* relative */
           (b[5] == 0xff && ((b[6] & 0xf8) == 0xd0 || (b[6] & 0xf8) == 0x10)) || /* register, or where it points */
           (b[4] == 0xff && ((b[5] & 0xf8) == 0x50 || b[5] == 0x14)) ||    /* with a displacement of a byte, or two registers */
           (b[3] == 0xff && b[4] == 0x54) ||                               /* both */
           (b[1] == 0xff && ((b[2] & 0xf8) == 0x90 || b[2] == 0x15)) ||    /* four bytes */
           (b[0] == 0xff && (b[1] == 0x94 || b[1] == 0x14));
}

static __always_inline void send_wait(const struct waiting *waiting, u32 tid, u64 end, u32 flags) {
    struct wait *record = waited.ringbuf_reserve(sizeof(struct wait));
    if (!record) {
        count(WAITS_LOST, 1);
        return;
    }
    record->begin = waiting->since;
    record->end = end;
    record->waited = end - waiting->since;
    record->count = 1;
    record->handle = waiting->handle;
    record->stack = waiting->stack;
    record->pid = waiting->pid;
    record->tid = tid;
    record->function = waiting->function;
    record->flags = (waiting->flags & WAIT_PRESUMED) | flags;
    bpf_get_current_comm(record->comm, sizeof(record->comm));
    waited.ringbuf_submit(record, wakeup(end >> 10, WAIT_WAKE_EVERY));
}

static __always_inline void send_site(const struct site *site, u32 tid) {
    struct wait *record = waited.ringbuf_reserve(sizeof(struct wait));
    if (!record) {
        count(WAITS_LOST, site->count);
        return;
    }
    record->begin = site->begin;
    record->end = site->end;
    record->waited = site->waited;
    record->count = site->count;
    record->handle = site->handle;
    record->stack = site->stack;
    record->pid = site->pid;
    record->tid = tid;
    record->function = site->function;
    record->flags = site->flags;
    bpf_probe_read_kernel(record->comm, sizeof(record->comm), site->comm);
    waited.ringbuf_submit(record, BPF_RB_NO_WAKEUP);
}

/* Begins a walk from where the function was called; a program for `then` goes on with it. */
static __always_inline void walk_wait(struct pt_regs *ctx, u64 time, const struct waiting *waiting, enum phase then) {
    struct scratch *scratch = take_scratch(owner_of(0));
    if (!scratch)
        return;
    struct launched *launch = &room_of(scratch)->launched;
    u64 who = bpf_get_current_pid_tgid();
    launch->time = time;
    launch->pid = waiting->pid;
    launch->tid = who;
    launch->fired = launch->stack = launch->flags = 0;
    launch->remark = COUNTERS;
    BEGIN_WALK(scratch, waiting->pid, ctx);
    scratch->copied.start.ip = waiting->ip;
    scratch->copied.start.sp = waiting->slot;
    start_walk(scratch, waiting->pid, waiting->epoch, then);
    if (then == WAITED) {
        scratch->slot = waiting->slot;
        scratch->returns_to = waiting->returns_to;
    }
    wait_phases.call(ctx, begin_python(scratch, who, time));
    give_back(scratch); /* nobody goes on with it */
}

/* Takes what a walk came to. */
static __always_inline void end_wait_walk(struct scratch *scratch, struct waiting *waiting) {
    struct launched *launch = &room_of(scratch)->launched;
    end_walk(scratch, launch);
    if (launch->remark == STACKS_LOST)
        count(STACKS_LOST, 1);
    waiting->stack = launch->stack;
    waiting->flags = launch->flags & LAUNCH_PRESUMED ? WAIT_PRESUMED : 0;
    if (scratch->walked == MISSED)
        waiting->flags |= WAIT_MISSED;
}

/* Whether a wait is still under way at another one further down the stack. The kernel has put the address of a trampoline, which
 * is a page's, where the return address was; what a program has jumped out of is likely to have something else there by now. */
static __always_inline int is_under_way(const struct waiting *waiting) {
    u64 there = 0;
    read_user(&there, 8, (void *)waiting->slot);
    return there && !(there & (PAGE - 1));
}

/* Gives 0 if it is to be told when the function returns. */
static __always_inline int begin_wait(struct pt_regs *ctx, u64 time, u32 which, const struct wait_entry *entry,
                                      struct waiting *before) {
    u32 zero = 0, tid = bpf_get_current_pid_tgid(), pid = bpf_get_current_pid_tgid() >> 32;
    struct settings *set = settings.lookup(&zero);
    if (!set || (set->scoped && others.lookup(&pid)))
        return 1;
    if (entry->timeout && !wait_argument(ctx, entry->timeout)) {
        count(WAIT_POLLS, 1);
        return 1;
    }
    struct waiting fresh = {
        .since = time,
        .whose = thread_now(),
        .slot = ctx->sp,
        .ip = ctx->ip,
        .handle = wait_argument(ctx, entry->handle),
        .epoch = set->epoch,
        .pid = pid,
        .which = which,
        .function = entry->function,
    };
    if (before && before->since) {
        if (before->whose == fresh.whose && before->slot > fresh.slot && is_under_way(before)) {
            count(WAITS_INSIDE, 1);
            return 1;
        }
        send_wait(before, tid, time, WAIT_NOT_ENDED); /* it was left by a jump, or its thread has ended */
        before->since = 0;
    }
    if (entry->is_array)
        read_user(&fresh.handle, 8, (void *)fresh.handle);
    if (fresh.slot & 7 || read_user(&fresh.returns_to, 8, (void *)fresh.slot)) {
        count(WAITS_ASTRAY, 1);
        return 1;
    }
    struct site_key key = {.returns_to = fresh.returns_to, .slot = fresh.slot, .tid = tid, .which = which};
    struct site *site = wait_sites.lookup(&key);
    if (!site && !follows_a_call(fresh.returns_to)) {
        count(WAITS_ASTRAY, 1);
        return 1;
    }
    u64 is_known = site && site->is_known && site->stack && site->epoch == fresh.epoch;
    if (is_known) {
        fresh.stack = site->stack;
        fresh.flags = WAIT_PRESUMED | WAIT_OF_SITE;
    }
    if (before) {
        fresh.since = 0;
        *before = fresh;
        asm volatile("" ::: "memory"); /* a sample may come in between */
        *(volatile u64 *)&before->since = fresh.since = time;
    } else if (waits.update(&tid, &fresh)) {
        count(WAITS_LOST, 1);
        return 1;
    }
    count(WAITS, 1);
    if (!is_known)
        walk_wait(ctx, time, &fresh, WAIT_BEGUN);
    return 0;
}

/* Of one that was short. */
static __always_inline void add_up(struct waiting *waiting, const struct site_key *key, struct site *site, u64 time) {
    struct site fresh = {
        .begin = waiting->since,
        .end = time,
        .waited = time - waiting->since,
        .count = 1,
        .handle = waiting->handle,
        .stack = waiting->stack,
        .epoch = waiting->epoch,
        .pid = waiting->pid,
        .function = waiting->function,
        .flags = WAIT_ADDED_UP,
        .is_known = !(waiting->flags & WAIT_MISSED),
    };
    if (site && site->count && (time - site->begin >= SITE_NS || site->epoch != fresh.epoch)) {
        send_site(site, key->tid);
        site->count = 0;
    }
    if (site && site->count) {
        site->end = time;
        site->waited += fresh.waited;
        site->count++;
        site->handle = fresh.handle;
        site->stack = fresh.stack;
        site->is_known = fresh.is_known;
        return;
    }
    bpf_get_current_comm(fresh.comm, sizeof(fresh.comm));
    if (wait_sites.update((struct site_key *)key, &fresh))
        count(WAITS_LOST, 1);
}

static __always_inline u32 result_flags(struct pt_regs *ctx) {
    u32 result = ctx->ax;
    return result == 0 ? 0 : result == 1 ? WAIT_TIMED_OUT : WAIT_FAILED; /* 1 is ZE_RESULT_NOT_READY; OpenCL's are negative */
}

static __always_inline void end_wait(struct pt_regs *ctx, u64 time, u32 tid, struct waiting *waiting) {
    u32 zero = 0;
    struct settings *set = settings.lookup(&zero);
    struct site_key key = {.returns_to = waiting->returns_to, .slot = waiting->slot, .tid = tid, .which = waiting->which};
    struct site *site = wait_sites.lookup(&key);
    if (time - waiting->since < WAIT_SHORT_NS) {
        add_up(waiting, &key, site, time);
        waiting->since = 0;
        return;
    }
    if (site)
        site->is_known = 0;
    u64 epoch = set ? set->epoch : waiting->epoch;
    if (!waiting->stack || waiting->flags & WAIT_OF_SITE || waiting->epoch != epoch) {
        waiting->epoch = epoch;
        waiting->stack = waiting->flags = 0;
        walk_wait(ctx, time, waiting, WAITED);
    }
    send_wait(waiting, tid, time, result_flags(ctx));
    waiting->since = 0;
}

/* Gives 1 where the function begins and its return is not asked for. */
int on_wait(struct pt_regs *ctx) {
    u64 time = bpf_ktime_get_ns();
    u32 which = attach_cookie(ctx), tid = bpf_get_current_pid_tgid();
    struct wait_entry *entry = wait_entries.lookup(&which);
    if (!entry)
        return 1;
    struct waiting *waiting = waits.lookup(&tid);
    if (waiting && waiting->since && waiting->which == which && ctx->ip == waiting->returns_to && ctx->sp == waiting->slot + 8) {
        end_wait(ctx, time, tid, waiting);
        count(WAIT_NS, bpf_ktime_get_ns() - time);
        return 0;
    }
    if ((ctx->ip - entry->address) & (PAGE - 1)) { /* it returns, and nobody knows since when it waited */
        count(WAITS_LOST, 1);
        return 1;
    }
    int is_left = begin_wait(ctx, time, which, entry, waiting);
    count(WAIT_NS, bpf_ktime_get_ns() - time);
    return is_left;
}

int on_wait_begun(struct pt_regs *ctx) {
    u32 tid = bpf_get_current_pid_tgid();
    struct scratch *scratch = own_scratch(owner_of(0));
    struct waiting *waiting = waits.lookup(&tid);
    if (!scratch)
        return 0;
    u64 now = bpf_ktime_get_ns();
    if (waiting) {
        end_wait_walk(scratch, waiting);
        waiting->since = now; /* the walk is no part of it */
    }
    count(WAIT_NS, now - room_of(scratch)->launched.time);
    give_back(scratch);
    return 0;
}

int on_waited(struct pt_regs *ctx) {
    u32 tid = bpf_get_current_pid_tgid();
    struct scratch *scratch = own_scratch(owner_of(0));
    struct waiting *waiting = waits.lookup(&tid);
    if (waiting) {
        u64 end = scratch ? room_of(scratch)->launched.time : bpf_ktime_get_ns();
        if (scratch)
            end_wait_walk(scratch, waiting);
        send_wait(waiting, tid, end, result_flags(ctx));
        waiting->since = 0;
    }
    if (scratch) {
        count(WAIT_NS, bpf_ktime_get_ns() - room_of(scratch)->launched.time);
        give_back(scratch);
    }
    return 0;
}
