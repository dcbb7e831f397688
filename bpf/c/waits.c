// SPDX-License-Identifier: GPL-2.0
/* Waits for the GPU: calls of the driver's functions that return when the GPU is done (compiled after launches.c).
 *
 * on_wait is the program of a uprobe session (Linux 6.13): it runs when such a function begins, and if it then returned 0, also
 * when the function returns. Meanwhile the kernel replaces the return address on the stack by the address of a trampoline.
 * Walks of a waiting thread therefore use the original return address (scratch->slot), and a wait inside another wait is not
 * followed.
 *
 * The stack is walked when a wait begins, while the GPU works, so waits that never end have a stack, too. Short waits must cost
 * little: if the previous wait at a call site was short and its stack complete, the next wait is presumed to have the same
 * stack, and is walked at its end if it was not short. Short waits are summed up by thread and call site, and a sum is sent
 * once per SITE_NS. User space takes the other sums: first it starts a new generation of sums, and waits until no program that
 * has seen the old one runs. Otherwise a program could add a wait to a sum that was just taken.
 *
 * The loader sets WAIT_SHORT_NS and WAIT_WAKE_BYTES.
 */
#define SITE_NS 1000000000ULL

BPF_ARRAY(wait_entries, struct wait_entry, ANY);

/* Flags that are never sent. */
#define WAIT_OF_SITE 64 /* the stack is that of the site's previous wait */
#define WAIT_MISSED 128 /* the stack is incomplete: a rule was missing */

/* The current or last wait of a thread, by tid. */
BPF_TABLE("hash", u32, struct waiting, waits, ANY);

/* The call sites at which a thread waits, by generation, with the sums of their short waits. */
BPF_TABLE("hash", struct site_key, struct site, wait_sites, ANY);

BPF_RINGBUF_OUTPUT(waited, ANY);

/* Returns a number that identifies the thread and the program that it executes, as tids are reused. */
static __always_inline u64 thread_identity(void) {
    if (FRAME_POINTERS_ONLY)
        return 1;
    u8 *task = (u8 *)this_task();
    u64 mm = 0;
    bpf_probe_read_kernel(&mm, 8, task + TASK_MM); /* as a number, which the verifier lets us compute with, not as a pointer */
    return mixed(*(u64 *)(task + TASK_START_BOOTTIME), mm);
}

/* Makes a walk of a waiting thread use the original return address. */
static __always_inline void restore_return_address(struct scratch *scratch, u32 tid) {
    struct waiting *waiting = waits.lookup(&tid);
    if (waiting && waiting->since && waiting->whose == thread_identity()) {
        scratch->slot = waiting->slot;
        scratch->returns_to = waiting->returns_to;
    }
}

static __always_inline u64 wait_argument(struct pt_regs *ctx, u8 where) {
    u64 value = 0;
    bpf_probe_read_kernel(&value, 8, (void *)ctx + where);
    return value;
}

/* Whether a call instruction ends at an address. Other addresses are not accepted as return addresses, which the kernel
 * would replace. */
static __always_inline int follows_a_call(u64 address) {
    u8 b[8] = {};
    if (read_user(b, 7, (void *)(address - 7)))
        return 0;
    return b[2] == 0xe8 ||                                                 /* relative */
           (b[5] == 0xff && ((b[6] & 0xf8) == 0xd0 || (b[6] & 0xf8) == 0x10)) || /* register, or memory at a register */
           (b[4] == 0xff && ((b[5] & 0xf8) == 0x50 || b[5] == 0x14)) ||    /* with one byte of displacement, or two registers */
           (b[3] == 0xff && b[4] == 0x54) ||                               /* both */
           (b[1] == 0xff && ((b[2] & 0xf8) == 0x90 || b[2] == 0x15)) ||    /* with a displacement of four bytes */
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
    waited.ringbuf_submit(record, wakeup(record, sizeof(*record), WAIT_WAKE_BYTES));
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

/* Begins a walk from the call of the function; continues with the program for `after_walk`. */
static __always_inline void walk_wait(struct pt_regs *ctx, u64 time, const struct waiting *waiting, enum phase after_walk) {
    struct scratch *scratch = take_scratch(owner_of(0));
    if (!scratch)
        return;
    struct launched *launch = &launch_state_of(scratch)->launched;
    u64 who = bpf_get_current_pid_tgid();
    launch->time = time;
    launch->pid = waiting->pid;
    launch->tid = who;
    launch->stack = launch->flags = 0;
    launch->counter = COUNTERS;
    BEGIN_WALK(scratch, waiting->pid, ctx);
    scratch->copied.start.ip = waiting->ip;
    scratch->copied.start.sp = waiting->slot;
    start_walk(scratch, waiting->pid, waiting->epoch, after_walk);
    if (after_walk == WAITED) {
        scratch->slot = waiting->slot;
        scratch->returns_to = waiting->returns_to;
    }
    wait_phases.call(ctx, begin_python(scratch, who, time));
    give_back(scratch); /* reached only if the tail call fails */
}

/* Sends the stack of a finished walk, and stores its id in the wait. */
static __always_inline void end_wait_walk(struct scratch *scratch, struct waiting *waiting) {
    struct launched *launch = &launch_state_of(scratch)->launched;
    end_walk(scratch, launch);
    if (launch->counter == STACKS_LOST)
        count(STACKS_LOST, 1);
    waiting->stack = launch->stack;
    waiting->flags = launch->flags & LAUNCH_PRESUMED ? WAIT_PRESUMED : 0;
    if (scratch->walked == MISSED)
        waiting->flags |= WAIT_MISSED;
}

/* Whether a wait has not ended when another one begins deeper on the stack. While it has not, the return address is that of
 * the kernel's trampoline, at the start of a page. If the program has left the wait by a jump, the stack has probably been
 * overwritten. */
static __always_inline int is_under_way(const struct waiting *waiting) {
    u64 there = 0;
    read_user(&there, 8, (void *)waiting->slot);
    return there && !(there & (PAGE - 1));
}

/* Returns the key of the call site of a thread's wait. */
static __always_inline struct site_key site_of(const struct waiting *waiting, u32 tid, u64 generation) {
    struct site_key key = {
        .returns_to = waiting->returns_to,
        .slot = waiting->slot,
        .generation = generation,
        .tid = tid,
        .which = waiting->which,
    };
    return key;
}

/* Begins a wait; returns 0 if on_wait has to run at the function's return, too. */
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
        .whose = thread_identity(),
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
        send_wait(before, tid, time, WAIT_NOT_ENDED); /* the program has left it by a jump, or its thread has ended */
        before->since = 0;
    }
    if (entry->is_array)
        read_user(&fresh.handle, 8, (void *)fresh.handle);
    if (fresh.slot & 7 || read_user(&fresh.returns_to, 8, (void *)fresh.slot)) {
        count(WAITS_ASTRAY, 1);
        return 1;
    }
    struct site_key key = site_of(&fresh, tid, set->generation);
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
        asm volatile("" ::: "memory"); /* a sample may interrupt: `since` must be set last */
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

/* Adds a short wait to the sum of its site. */
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
    struct site_key key = site_of(waiting, tid, set ? set->generation : 0);
    struct site *site = wait_sites.lookup(&key);
    u64 epoch = set ? set->epoch : waiting->epoch;
    if (time - waiting->since < WAIT_SHORT_NS && waiting->epoch == epoch) {
        add_up(waiting, &key, site, time);
        waiting->since = 0;
        return;
    }
    if (site)
        site->is_known = 0;
    if (!waiting->stack || waiting->flags & WAIT_OF_SITE || waiting->epoch != epoch) {
        waiting->epoch = epoch;
        waiting->stack = waiting->flags = 0;
        walk_wait(ctx, time, waiting, WAITED);
    }
    send_wait(waiting, tid, time, result_flags(ctx));
    waiting->since = 0;
}

/* Returns 1 at the beginning of a function if it need not run at the function's return. */
int on_wait(struct pt_regs *ctx) {
    u64 time = bpf_ktime_get_ns();
    u32 which = attach_cookie(ctx), tid = bpf_get_current_pid_tgid();
    struct wait_entry *entry = wait_entries.lookup(&which);
    if (!entry)
        return 1;
    struct waiting *waiting = waits.lookup(&tid);
    if (waiting && waiting->since && waiting->which == which && ctx->ip == waiting->returns_to &&
        ctx->sp == waiting->slot + 8) {
        end_wait(ctx, time, tid, waiting);
        count(WAIT_NS, bpf_ktime_get_ns() - time);
        return 0;
    }
    if ((ctx->ip - entry->address) & (PAGE - 1)) { /* a return of a wait whose beginning is unknown */
        count(WAITS_LOST, 1);
        return 1;
    }
    int skips_return = begin_wait(ctx, time, which, entry, waiting);
    count(WAIT_NS, bpf_ktime_get_ns() - time);
    return skips_return;
}

int on_wait_begun(struct pt_regs *ctx) {
    keep_kernel_stack_of_session(ctx);
    u32 tid = bpf_get_current_pid_tgid();
    struct scratch *scratch = own_scratch(owner_of(0));
    struct waiting *waiting = waits.lookup(&tid);
    if (!scratch)
        return 0;
    u64 now = bpf_ktime_get_ns();
    if (waiting) {
        end_wait_walk(scratch, waiting);
        waiting->since = now; /* excludes the time of the walk */
    }
    count(WAIT_NS, now - launch_state_of(scratch)->launched.time);
    give_back(scratch);
    return 0;
}

int on_waited(struct pt_regs *ctx) {
    keep_kernel_stack_of_session(ctx);
    u32 tid = bpf_get_current_pid_tgid();
    struct scratch *scratch = own_scratch(owner_of(0));
    struct waiting *waiting = waits.lookup(&tid);
    if (waiting) {
        u64 end = scratch ? launch_state_of(scratch)->launched.time : bpf_ktime_get_ns();
        if (scratch)
            end_wait_walk(scratch, waiting);
        send_wait(waiting, tid, end, result_flags(ctx));
        waiting->since = 0;
    }
    if (scratch) {
        count(WAIT_NS, bpf_ktime_get_ns() - launch_state_of(scratch)->launched.time);
        give_back(scratch);
    }
    return 0;
}
