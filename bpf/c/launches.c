// SPDX-License-Identifier: GPL-2.0
/* Launches and compiled modules, as the runtime's two USDT probes tell them (compiled behind unwind.c); handles.c has those of drivers
 * without probes.
 *
 * One program serves every library: where a probe's arguments live is read from the `probes` map, at the slot that
 * the attachment's cookie names. What leaves for user space leaves in records of one size per ring buffer, so that
 * the reader takes thousands of them at once as an array.
 *
 * A user stack travels once. Its id is a hash of the process and the addresses; `stacks_sent` remembers which ids
 * have travelled and a second hash to tell two stacks of one id apart. Nothing depends on that memory being large:
 * an id that was forgotten makes its stack travel again, and a stack whose id is taken by another travels under an
 * id of its own.
 *
 * Each new output file gets every stack again: the epoch in `settings` is part of the id.
 *
 * Numbers without a definition here: MAX_DEPTH (a power of two) is set by the compiler (programs.py), STACK_DEPTH (at most MAX_DEPTH),
 * STACK_ID_BITS and *_WAKE_EVERY by the loader.
 */
#define LAUNCH_GIVEN (1 << 16) /* of a launch's flags: its stack is known without a walk; never sent */

BPF_ARRAY(probes, struct probe, ANY);
BPF_ARRAY(settings, struct settings, 1);
/* The processes that are not to be recorded. One that was forgotten, or of which nobody knows yet, is recorded. */
BPF_TABLE("lru_hash", u32, u32, others, ANY);
BPF_RINGBUF_OUTPUT(launches, ANY);
BPF_RINGBUF_OUTPUT(stacks, ANY);
BPF_RINGBUF_OUTPUT(python_stacks, ANY);
BPF_RINGBUF_OUTPUT(compilations, ANY);
BPF_TABLE("lru_hash", u64, u64, stacks_sent, ANY);

static __always_inline void read_registers(struct pt_regs *ctx, u64 *regs) {
    regs[0] = ctx->ax;
    regs[1] = ctx->dx;
    regs[2] = ctx->cx;
    regs[3] = ctx->bx;
    regs[4] = ctx->si;
    regs[5] = ctx->di;
    regs[6] = ctx->bp;
    regs[7] = ctx->sp;
    regs[8] = ctx->r8;
    regs[9] = ctx->r9;
    regs[10] = ctx->r10;
    regs[11] = ctx->r11;
    regs[12] = ctx->r12;
    regs[13] = ctx->r13;
    regs[14] = ctx->r14;
    regs[15] = ctx->r15;
    regs[16] = ctx->ip;
    regs[NO_REGISTER] = 0;
}

static __always_inline int read_arg(const u64 *regs, const struct arg *arg, u64 *out) {
    u32 unused = (64 - arg->bits) & 63;
    u64 value = arg->value;
    if (arg->kind == ARG_NONE)
        return -1;
    if (arg->kind == ARG_REGISTER)
        value = regs[arg->base & 31] >> (arg->shift & 63);
    if (arg->kind == ARG_MEMORY) {
        u64 where = value + regs[arg->base & 31] + (regs[arg->index & 31] << (arg->scale & 3));
        value = 0;
        /* 8 bytes may cross into an unmapped page where fewer would not */
        int failed = arg->bits == 64   ? read_user(&value, 8, (void *)where)
                     : arg->bits == 32 ? read_user(&value, 4, (void *)where)
                     : arg->bits == 16 ? read_user(&value, 2, (void *)where)
                                       : read_user(&value, 1, (void *)where);
        if (failed)
            return -1;
    }
    if (arg->is_signed)
        *out = (u64)((s64)(value << unused) >> unused);
    else
        *out = value << unused >> unused;
    return 0;
}

/* What a launch is, however that was found out. */
struct launched {
    u64 time;
    u32 pid;
    u32 tid;
    u64 fired;       /* how many this CPU has counted with it */
    u64 stack;       /* 0 where there is none */
    u64 remark;      /* enum counter: what is to be counted of it, COUNTERS for nothing */
    u64 flags;
};

#define MOST_UNDESCRIBED 32 /* kernels of one call; a power of two */

/* What the scratch has room for besides. */
struct room {
    struct launched launched;
    struct launched kernel; /* of a sample */
    u64 kernels_sent;       /* of a call that launches several */
    u64 undescribed;        /* how many of `handles` there are */
    u64 handles[MOST_UNDESCRIBED]; /* of kernels that are to be described */
    u64 regs[32];
};
static __always_inline struct room *room_of(struct scratch *scratch) {
    return (struct room *)scratch->more;
}

static __always_inline void send_python(struct scratch *scratch, const struct launched *launch, u64 id) {
    struct python_stack *record = python_stacks.ringbuf_reserve(sizeof(struct python_stack));
    if (!record) {
        count(PYTHON_LOST, 1);
        return;
    }
    record->id = id;
    record->time = bpf_ktime_get_ns(); /* its code objects were sent before */
    record->pid = launch->pid;
    record->depth = scratch->depth;
    record->count = scratch->python;
    record->state = scratch->python_state;
    record->kept = 0;
    record->sp = scratch->copied.start.sp;
    bpf_probe_read_kernel(record->cfas, sizeof(scratch->cfas), scratch->cfas);
    if (scratch->walked == MISSED) /* the last one's caller is not known */
        record->cfas[below(MAX_DEPTH, scratch->depth - 1)] = 0;
    bpf_probe_read_kernel(record->frames, sizeof(scratch->frames), scratch->frames);
    python_stacks.ringbuf_submit(record, BPF_RB_NO_WAKEUP);
}

/* Gives 0 when there was room. */
static __always_inline long send_stack(struct scratch *scratch, const struct launched *launch, u64 id) {
    struct stack *record = stacks.ringbuf_reserve(sizeof(struct stack) + sizeof(u64) * STACK_DEPTH);
    if (!record)
        return -1;
    record->id = id;
    record->time = launch->time;
    record->pid = launch->pid;
    record->depth = scratch->depth;
    record->walked = scratch->walked;
    bpf_probe_read_kernel(record->guessed, sizeof(scratch->guessed), scratch->guessed);
    bpf_probe_read_kernel(record->interrupted, sizeof(scratch->interrupted), scratch->interrupted);
    bpf_probe_read_kernel(record->ips, sizeof(u64) * STACK_DEPTH, scratch->ips);
    if (scratch->python_state != PYTHON_NONE)
        send_python(scratch, launch, id);
    stacks.ringbuf_submit(record, wakeup(count(STACKS, 1), STACK_WAKE_EVERY));
    return 0;
}

/* An id that no other stack has, for one whose hash is no good. */
static __always_inline u64 own_id(u64 time) {
    return 1ULL << 63 | time << 8 | (bpf_get_smp_processor_id() & 255);
}

/* A stack that is known to its end, or as far as it is walked. */
static __always_inline void met(struct scratch *scratch, struct launched *launch) {
    u64 id = (scratch->hashes[0] & ((1ULL << STACK_ID_BITS) - 1)) | 1; /* 0 says that there is none */
    u64 *known = stacks_sent.lookup(&id);
    if (!known || *known != scratch->hashes[1]) {
        u64 sent_as = known ? own_id(launch->time) : id;
        launch->remark = STACKS_LOST;
        if (send_stack(scratch, launch, sent_as))
            return;
        if (known)
            count(STACKS_COLLIDED, 1);
        else
            stacks_sent.update(&id, &scratch->hashes[1]);
        id = sent_as;
    }
    launch->stack = id;
    launch->remark = scratch->walked == DEEP ? STACKS_TRUNCATED : COUNTERS;
}

/* The walks of a thread that end alike, whatever its functions of Python are: the rule that is missing is the same. */
static __always_inline u64 alike(struct scratch *scratch, u32 tid) {
    return mixed(scratch->ip ^ scratch->depth << ADDRESS_BITS, ~(u64)tid);
}

/* A walk that lacked a rule: a copy of the stack has to be sent, unless one of the same path is on its way. Where so many of others that
 * end alike were sent, it stays as it is; but where nothing is known of a process yet, all walks end alike. Gives what follows. */
static __always_inline u32 missed(struct scratch *scratch) {
    struct launched *launch = &room_of(scratch)->launched;
    u64 key = way_of(scratch, launch->tid), of_all = alike(scratch, launch->tid);
    scratch->copied.way = key;
    struct way *known = ways.lookup(&key), *all = ways.lookup(&of_all);
    if (known && hidden(known->until) > launch->time) {
        launch->stack = known->id;
        launch->flags |= LAUNCH_PRESUMED;
        launch->remark = STACKS_PRESUMED;
        return scratch->then;
    }
    u64 is_other = hidden(all ? all->until : 0) > launch->time, copies = hidden(all ? all->copies : 0);
    if (!hidden(is_other & (copies >= MOST_COPIES) & (scratch->depth > 1)))
        return COPY;
    met(scratch, launch);
    return scratch->then;
}

/* Sends the copy. Gives what follows. */
static __always_inline u32 copied(struct scratch *scratch, u64 is_sample) {
    struct launched *launch = &room_of(scratch)->launched;
    u64 key = scratch->copied.way, of_all = alike(scratch, launch->tid);
    struct way fresh = {.id = own_id(launch->time), .until = launch->time + WAY_NS, .copies = 1};
    launch->remark = STACKS_LOST;
    if (send_stack(scratch, launch, fresh.id))
        return scratch->then;
    launch->stack = fresh.id;
    launch->remark = STACKS_MISSED;
    scratch->copied.id = fresh.id;
    scratch->copied.time = launch->time;
    scratch->copied.pid = launch->pid;
    scratch->copied.tid = launch->tid;
    scratch->copied.is_sample = is_sample;
    scratch->copied.has_python = scratch->python_state != PYTHON_NONE;
    if (send_copy(scratch)) {
        count(COPIES_LOST, 1);
        return scratch->then;
    }
    ways.update(&key, &fresh);
    struct way *all = ways.lookup(&of_all);
    if (all && all->until > launch->time)
        __sync_fetch_and_add(&all->copies, 1);
    else
        ways.update(&of_all, &fresh);
    return scratch->then;
}

int on_miss(struct pt_regs *ctx) {
    struct scratch *scratch = own_scratch(owner_of(0));
    if (scratch)
        phases.call(ctx, missed(scratch));
    return 0;
}

int on_copy(struct pt_regs *ctx) {
    struct scratch *scratch = own_scratch(owner_of(0));
    if (scratch)
        phases.call(ctx, copied(scratch, 0));
    return 0;
}

int on_sample_miss(struct bpf_perf_event_data *ctx) {
    struct scratch *scratch = own_scratch(owner_of(1));
    if (scratch)
        sample_phases.call(ctx, missed(scratch));
    return 0;
}

int on_sample_copy(struct bpf_perf_event_data *ctx) {
    struct scratch *scratch = own_scratch(owner_of(1));
    if (scratch)
        sample_phases.call(ctx, copied(scratch, 1));
    return 0;
}

/* Sends what a walk came to, unless on_miss did. */
static __always_inline void end_walk(struct scratch *scratch, struct launched *launch) {
    if (scratch->walked != MISSED || FRAME_POINTERS_ONLY)
        met(scratch, launch);
}

/* Who calls, and from where; a program for `then` goes on with it. `calls` counts the call, `lost` what nobody goes on with. */
static __always_inline void begin_call(struct pt_regs *ctx, u64 time, enum phase then, enum counter calls, enum counter lost) {
    u32 zero = 0, pid = bpf_get_current_pid_tgid() >> 32;
    struct settings *set = settings.lookup(&zero);
    u64 fired = count(calls, 1);
    struct scratch *scratch = set ? take_scratch(owner_of(0)) : 0;
    if (scratch) {
        struct launched *launch = &room_of(scratch)->launched;
        launch->time = time;
        launch->pid = pid;
        launch->tid = bpf_get_current_pid_tgid();
        launch->fired = fired;
        launch->stack = 0;
        launch->flags = LAUNCH_NO_STACK;
        launch->remark = OTHERS;
        room_of(scratch)->kernels_sent = room_of(scratch)->undescribed = 0;
        if (set->scoped && others.lookup(&pid)) {
            launch->flags = LAUNCH_OTHER;
            phases.call(ctx, then);
        } else {
            BEGIN_WALK(scratch, pid, ctx);
            start_walk(scratch, pid, set->epoch, then);
            phases.call(ctx, begin_python(scratch, bpf_get_current_pid_tgid(), time));
        }
        give_back(scratch);
    }
    count(lost, 1); /* nobody goes on with it */
}

static __always_inline void begin_launch(struct pt_regs *ctx, u64 time, enum phase then) {
    begin_call(ctx, time, then, LAUNCHES, LAUNCHES_LOST);
}

/* What begin_call began, with the stack that it is from; NULL where another thread has taken the scratch. */
static __always_inline struct scratch *called_before(enum counter lost) {
    struct scratch *scratch = own_scratch(owner_of(0));
    if (!scratch) {
        count(lost, 1);
        return 0;
    }
    struct launched *launch = &room_of(scratch)->launched;
    if (!(launch->flags & (LAUNCH_OTHER | LAUNCH_GIVEN))) {
        end_walk(scratch, launch);
        launch->flags &= ~(launch->stack ? (u64)LAUNCH_NO_STACK : 0);
    }
    launch->flags &= ~(u64)LAUNCH_GIVEN;
    return scratch;
}

static __always_inline struct scratch *launched_before(void) {
    return called_before(LAUNCHES_LOST);
}

static __always_inline void end_launch(struct scratch *scratch) {
    count(PROBE_NS, bpf_ktime_get_ns() - room_of(scratch)->launched.time);
    give_back(scratch);
}

/* A record for it, to be submitted with the address, size, flags and name in it; NULL where there is no room.
 *
 * After the stack, which a launch is never ahead of, and late: a thread that is preempted while it holds a record holds up
 * those behind it. */
static __always_inline struct launch *reserve_launch(const struct launched *launch) {
    struct launch *record = launches.ringbuf_reserve(sizeof(struct launch));
    if (!record) {
        count(LAUNCHES_LOST, 1);
        return 0;
    }
    if (launch->remark != COUNTERS)
        count(hidden(launch->remark), 1);
    record->time = launch->time;
    record->pid = launch->pid;
    record->tid = launch->tid;
    record->cpu = bpf_get_smp_processor_id();
    record->stack = launch->stack;
    __builtin_memset(record->comm, 0, sizeof(record->comm));
    __builtin_memset(record->name, 0, sizeof(record->name));
    if (!(launch->flags & LAUNCH_OTHER))
        bpf_get_current_comm(record->comm, sizeof(record->comm));
    return record;
}

static __always_inline void send_probed_launch(struct pt_regs *ctx, struct scratch *scratch, const struct probe *probe) {
    struct launched *launch = &room_of(scratch)->launched;
    u64 *regs = room_of(scratch)->regs;
    u64 iba = 0, address = 0, size = 0, name = 0, list = 0;
    read_registers(ctx, regs);
    if (read_arg(regs, &probe->args[0], &iba) | read_arg(regs, &probe->args[1], &address) |
        read_arg(regs, &probe->args[2], &size)) {
        launch->flags |= LAUNCH_BAD_ARGS;
        count(BAD_ARGS, 1);
    }
    struct launch *record = reserve_launch(launch);
    if (!record)
        return;
    record->iba = iba;
    record->address = address;
    record->size = size;
    read_arg(regs, &probe->args[4], &list); /* which only the injected library says */
    record->list = list;
    /* The patched driver passes a C++ smart pointer here: on some builds it is the string's address. */
    if (!(launch->flags & LAUNCH_OTHER) &&
        (read_arg(regs, &probe->args[3], &name) || read_user_text(record->name, sizeof(record->name), (void *)name) <= 1))
        launch->flags |= LAUNCH_NO_NAME;
    record->flags = launch->flags;
    launches.ringbuf_submit(record, wakeup(launch->fired, LAUNCH_WAKE_EVERY));
}

static __always_inline void compiled(struct pt_regs *ctx, u64 time, const struct probe *probe) {
    count(COMPILED, 1);
    u64 regs[32] = {};
    u64 path = 0;
    read_registers(ctx, regs);
    int failed = read_arg(regs, &probe->args[0], &path);
    struct compiled *record = compilations.ringbuf_reserve(sizeof(struct compiled));
    if (!record) {
        count(COMPILED_LOST, 1);
        return;
    }
    u64 who = bpf_get_current_pid_tgid(), user = bpf_get_current_uid_gid();
    record->time = time;
    record->pid = who >> 32;
    record->tid = who;
    record->uid = user;
    record->gid = user >> 32;
    if (failed || read_user_text(record->path, sizeof(record->path), (void *)path) <= 1) {
        count(COMPILED_LOST, 1);
        compilations.ringbuf_discard(record, BPF_RB_NO_WAKEUP);
        return;
    }
    /* The file may be gone soon: the reader is woken at once. */
    compilations.ringbuf_submit(record, BPF_RB_FORCE_WAKEUP);
}

int on_launch(struct pt_regs *ctx) {
    begin_launch(ctx, bpf_ktime_get_ns(), LAUNCHED);
    return 0;
}

int on_launched(struct pt_regs *ctx) {
    u32 slot = attach_cookie(ctx);
    struct probe *probe = probes.lookup(&slot);
    struct scratch *scratch = launched_before();
    if (!scratch)
        return 0;
    if (probe)
        send_probed_launch(ctx, scratch, probe);
    end_launch(scratch);
    return 0;
}

int on_compile(struct pt_regs *ctx) {
    u64 time = bpf_ktime_get_ns();
    u32 slot = attach_cookie(ctx);
    struct probe *probe = probes.lookup(&slot);
    if (probe)
        compiled(ctx, time, probe);
    count(PROBE_NS, bpf_ktime_get_ns() - time);
    return 0;
}
