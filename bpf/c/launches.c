// SPDX-License-Identifier: GPL-2.0
/* Launches and compiled modules, from the runtime's two USDT probes (compiled after unwind.c); handles.c has launches in
 * drivers without probes.
 *
 * One program serves every library: the map `probes` has the places of a probe's arguments; the attachment's cookie is the
 * probe's index. All records in a ring buffer have one size, so that the reader gets thousands of them at once as an array.
 *
 * A user stack is sent once. Its id is a hash of the process and the addresses. `stacks_sent` has the ids that were sent, with
 * a second hash that distinguishes two stacks with one id. This map may lose elements: a stack whose id is missing is sent
 * again. A stack whose id another stack has is sent with an id of its own.
 *
 * Each new output file gets every stack again, because the epoch in `settings` is part of the id.
 *
 * The compiler (programs.py) sets MAX_DEPTH, a power of two; the loader sets STACK_DEPTH (at most MAX_DEPTH), STACK_ID_BITS and
 * *_WAKE_BYTES.
 */
#define LAUNCH_NO_WALK (1 << 16) /* a launch's flag, never sent: its stack is known without a walk */

BPF_ARRAY(probes, struct probe, ANY);
/* The processes out of scope: CPU samples of them have no stack, and if `scoped` is set, launches come in short. As the map
 * may lose elements, and new processes are added late, some are recorded all the same. */
BPF_TABLE("lru_hash", u32, u32, others, ANY);
BPF_RINGBUF_OUTPUT(launches, ANY);
BPF_RINGBUF_OUTPUT(stacks, ANY);
BPF_RINGBUF_OUTPUT(python_stacks, ANY);
BPF_RINGBUF_OUTPUT(compilations, ANY);
BPF_RINGBUF_OUTPUT(paths, ANY);
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

/* Reads an argument of a USDT probe; returns 0 on success. */
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
        /* Reads no more than the argument's size: more might cross into an unmapped page. */
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

/* A launch, or another call whose stack is walked. */
struct launched {
    u64 time;
    u32 pid;
    u32 tid;
    u64 stack;       /* id; 0 for none */
    u64 counter;     /* enum counter: the problem of its stack that is counted when it is sent; COUNTERS for none */
    u64 flags;
};

#define MOST_UNDESCRIBED 32 /* kernels of one call; a power of two */

/* The part of the scratch for this file and those after it: the launch in progress. */
struct launch_state {
    struct launched launched;
    struct launched kernel; /* a CPU sample's stack in the Linux kernel */
    u64 kernels_sent;       /* number of launches sent of a call with several kernels */
    u64 lists_sent;         /* number of command lists sent of a call that executes them */
    u64 undescribed;        /* number of elements of `handles` */
    u64 handles[MOST_UNDESCRIBED]; /* of kernels that have to be described */
    u64 regs[32];           /* registers, or the values of steps */
};
static __always_inline struct launch_state *launch_state_of(struct scratch *scratch) {
    return (struct launch_state *)scratch->launch_state;
}

/* Sends a stack's frames of Python; returns 0 unless the ring buffer is full. */
static __always_inline long send_python(struct scratch *scratch, const struct launched *launch, u64 id) {
    struct python_stack *record = python_stacks.ringbuf_reserve(sizeof(struct python_stack));
    if (!record) {
        count(PYTHON_LOST, 1);
        return -1;
    }
    record->id = id;
    record->time = bpf_ktime_get_ns(); /* after its code objects were sent */
    record->pid = launch->pid;
    record->depth = scratch->depth;
    record->count = scratch->python;
    record->state = scratch->python_state;
    record->kept = 0;
    record->sp = scratch->copied.start.sp;
    bpf_probe_read_kernel(record->cfas, sizeof(scratch->cfas), scratch->cfas);
    if (scratch->walked == MISSED) /* the outermost address's caller is unknown */
        record->cfas[below(MAX_DEPTH, scratch->depth - 1)] = 0;
    bpf_probe_read_kernel(record->frames, sizeof(scratch->frames), scratch->frames);
    python_stacks.ringbuf_submit(record, wakeup(record, sizeof(*record), PYTHON_WAKE_BYTES));
    return 0;
}

/* Sends a stack; returns 0 unless the ring buffer is full. */
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
    scratch->lacks_python = scratch->python_state != PYTHON_NONE && send_python(scratch, launch, id);
    stacks.ringbuf_submit(record, wakeup(record, sizeof(*record) + sizeof(u64) * STACK_DEPTH, STACK_WAKE_BYTES));
    count(STACKS, 1);
    return 0;
}

/* Returns an id that no other stack has, for stacks without a unique hash. */
static __always_inline u64 own_id(u64 time) {
    return 1ULL << 63 | time << 8 | (bpf_get_smp_processor_id() & 255);
}

/* Returns the id of a stack: never 0, which means no stack. */
static __always_inline u64 id_of_stack(const struct scratch *scratch) {
    return (scratch->hashes[0] & ((1ULL << STACK_ID_BITS) - 1)) | 1;
}

/* Sends a launch's stack unless it was sent before, and sets the launch's stack id. */
static __always_inline void send_new_stack(struct scratch *scratch, struct launched *launch) {
    u64 id = id_of_stack(scratch);
    u64 *known = stacks_sent.lookup(&id);
    if (!known || *known != scratch->hashes[1]) {
        u64 sent_as = known ? own_id(launch->time) : id;
        launch->counter = STACKS_LOST;
        if (send_stack(scratch, launch, sent_as))
            return;
        if (known)
            count(STACKS_COLLIDED, 1);
        else if (!scratch->lacks_python) /* else it is sent again with the next launch that has it */
            stacks_sent.update(&id, &scratch->hashes[1]);
        id = sent_as;
    }
    launch->stack = id;
    launch->counter = scratch->walked == DEEP ? STACKS_TRUNCATED : COUNTERS;
}

/* Returns a key for all walks of a thread that end at the same address and depth: they lack the same rule. */
static __always_inline u64 end_key(struct scratch *scratch, u32 tid) {
    return mixed(scratch->ip ^ scratch->depth << ADDRESS_BITS, ~(u64)tid);
}

/* Handles a walk that lacked a rule; returns the next phase. A copy of the stack has to be sent, unless a copy of the same
 * path was sent a short time ago. If no rule leads on from there, as user space has found, and many copies of other paths
 * with the same end were sent, the stack stays incomplete. That limit does not hold for walks of one frame: as long as a
 * process has no rules, all its walks end there. */
static __always_inline u32 handle_miss(struct scratch *scratch, u64 is_sample) {
    struct launched *launch = &launch_state_of(scratch)->launched;
    if (!may_copy(launch->pid, is_sample, launch->time)) {
        count(COPIES_LOST, 1);
        send_new_stack(scratch, launch);
        return scratch->after_walk;
    }
    u64 key = missed_path_key(scratch, launch->tid), of_all = end_key(scratch, launch->tid);
    scratch->copied.missed_path = key;
    struct missed_path *known = missed_paths.lookup(&key), *all = missed_paths.lookup(&of_all);
    if (known && hidden(known->until) > launch->time) {
        launch->stack = known->id;
        launch->flags |= LAUNCH_PRESUMED;
        launch->counter = STACKS_PRESUMED;
        return scratch->after_walk;
    }
    u64 is_other = hidden(all ? all->until : 0) > launch->time, copies = hidden(all && !all->id ? all->copies : 0);
    if (!hidden(is_other & (copies >= MOST_COPIES) & (scratch->depth > 1)))
        return COPY;
    send_new_stack(scratch, launch);
    return scratch->after_walk;
}

/* Sends an incomplete stack with a copy of the stack memory; returns the next phase. */
static __always_inline u32 send_copied_stack(struct scratch *scratch, u64 is_sample) {
    struct launched *launch = &launch_state_of(scratch)->launched;
    u64 key = scratch->copied.missed_path, of_all = end_key(scratch, launch->tid);
    struct missed_path fresh = {.id = own_id(launch->time), .until = launch->time + MISSED_PATH_NS, .copies = 1};
    launch->counter = STACKS_LOST;
    if (send_stack(scratch, launch, fresh.id))
        return scratch->after_walk;
    launch->stack = fresh.id;
    launch->counter = STACKS_MISSED;
    scratch->copied.id = fresh.id;
    scratch->copied.time = launch->time;
    scratch->copied.pid = launch->pid;
    scratch->copied.tid = launch->tid;
    scratch->copied.is_sample = is_sample;
    scratch->copied.has_python = scratch->python_state != PYTHON_NONE;
    u32 copied = copies_key(launch->pid, is_sample);
    if (send_copy(scratch, pages_of_copy(is_sample), wakes(copied, is_sample))) {
        count(COPIES_LOST, 1);
        return scratch->after_walk;
    }
    note_copy(copied, launch->time, scratch->sent + 1);
    missed_paths.update(&key, &fresh);
    struct missed_path *all = missed_paths.lookup(&of_all);
    if (all && all->until > launch->time) {
        __sync_fetch_and_add(&all->copies, 1);
    } else {
        fresh.id = all ? all->id : fresh.id;
        missed_paths.update(&of_all, &fresh);
    }
    return scratch->after_walk;
}

int on_miss(struct pt_regs *ctx) {
    struct scratch *scratch = own_scratch(owner_of(0));
    if (scratch)
        phases.call(ctx, handle_miss(scratch, 0));
    return 0;
}

int on_copy(struct pt_regs *ctx) {
    struct scratch *scratch = own_scratch(owner_of(0));
    if (scratch)
        phases.call(ctx, send_copied_stack(scratch, 0));
    return 0;
}

int on_sample_miss(struct bpf_perf_event_data *ctx) {
    struct scratch *scratch = own_scratch(owner_of(1));
    if (scratch)
        sample_phases.call(ctx, handle_miss(scratch, 1));
    return 0;
}

int on_sample_copy(struct bpf_perf_event_data *ctx) {
    struct scratch *scratch = own_scratch(owner_of(1));
    if (scratch)
        sample_phases.call(ctx, send_copied_stack(scratch, 1));
    return 0;
}

/* Sends the stack of a finished walk, unless on_miss did. */
static __always_inline void end_walk(struct scratch *scratch, struct launched *launch) {
    if (scratch->walked != MISSED || FRAME_POINTERS_ONLY)
        send_new_stack(scratch, launch);
}

/* Begins a launch or another call: notes the thread, and walks its stack; continues with the program for `after_walk`.
 * Counts the call in `calls`, and in `lost` if no program continues. `may_be_known`: 1 if nothing but the stack's id is needed,
 * else 0. */
static __always_inline void begin_call(struct pt_regs *ctx, u64 time, enum phase after_walk, enum counter calls,
                                       enum counter lost, u64 may_be_known) {
    u64 who = bpf_get_current_pid_tgid();
    u32 zero = 0, pid = who >> 32;
    struct settings *set = settings.lookup(&zero);
    count(calls, 1);
    struct scratch *scratch = set ? take_scratch(who) : 0;
    if (scratch) {
        struct launched *launch = &launch_state_of(scratch)->launched;
        launch->time = time;
        launch->pid = pid;
        launch->tid = who;
        launch->stack = 0;
        launch->flags = LAUNCH_NO_STACK;
        launch->counter = OTHERS;
        struct launch_state *state = launch_state_of(scratch);
        state->kernels_sent = state->lists_sent = state->undescribed = 0;
        if (set->scoped && others.lookup(&pid)) {
            launch->flags = LAUNCH_OTHER;
            phases.call(ctx, after_walk);
        } else {
            BEGIN_WALK(scratch, pid, ctx);
            start_walk(scratch, pid, set->epoch, after_walk);
            scratch->may_be_known = may_be_known & is_set(scratch->salt);
            phases.call(ctx, KNOWN);
        }
        give_back(scratch);
    }
    count(lost, 1); /* no scratch is free, or the tail call failed */
}

static __always_inline void begin_launch(struct pt_regs *ctx, u64 time, enum phase after_walk) {
    begin_call(ctx, time, after_walk, LAUNCHES, LAUNCHES_LOST, 1);
}

/* Continues a call that begin_call began, after the walk; returns NULL if another thread has taken the scratch. */
static __always_inline struct scratch *walked_call(enum counter lost) {
    struct scratch *scratch = own_scratch(owner_of(0));
    if (!scratch) {
        count(lost, 1);
        return 0;
    }
    struct launched *launch = &launch_state_of(scratch)->launched;
    if (!(launch->flags & (LAUNCH_OTHER | LAUNCH_NO_WALK))) {
        end_walk(scratch, launch);
        launch->flags &= ~(launch->stack ? (u64)LAUNCH_NO_STACK : 0);
    }
    launch->flags &= ~(u64)LAUNCH_NO_WALK;
    return scratch;
}

static __always_inline struct scratch *walked_launch(void) {
    return walked_call(LAUNCHES_LOST);
}

static __always_inline void end_launch(struct scratch *scratch) {
    count(PROBE_NS, bpf_ktime_get_ns() - launch_state_of(scratch)->launched.time);
    give_back(scratch);
}

/* Reserves a launch's record; the caller fills in address, size, flags and name and submits it. NULL if the ring buffer is
 * full.
 *
 * Call it after the stack was sent, as a launch must not arrive before its stack, and as late as possible: while a preempted
 * thread holds a reserved record, the reader cannot get later records. */
static __always_inline struct launch *reserve_launch(const struct launched *launch) {
    struct launch *record = launches.ringbuf_reserve(sizeof(struct launch));
    if (!record) {
        count(LAUNCHES_LOST, 1);
        return 0;
    }
    if (launch->counter != COUNTERS)
        count(hidden(launch->counter), 1);
    record->time = launch->time;
    record->pid = launch->pid;
    record->tid = launch->tid;
    record->cpu = bpf_get_smp_processor_id();
    record->stack = launch->stack;
    record->correlation = 0;
    record->more = record->path = 0;
    __builtin_memset(record->comm, 0, sizeof(record->comm));
    __builtin_memset(record->name, 0, sizeof(record->name));
    if (!(launch->flags & LAUNCH_OTHER))
        bpf_get_current_comm(record->comm, sizeof(record->comm));
    return record;
}

/* Whether a stack depends on nothing but its return addresses, the frame pointers that were used, and the frames of Python. */
static __always_inline u64 is_plain(const struct scratch *scratch, const struct launched *launch) {
    u64 has_all_python = scratch->python_state == PYTHON_NONE || scratch->python_state == PYTHON_WHOLE;
    return launch->stack && launch->counter == COUNTERS && scratch->walked == WHOLE && !scratch->is_odd && !scratch->several &&
           has_all_python && !FRAME_POINTERS_ONLY;
}

/* Sends a launch's path: what the library asks for, or that it is not what it was, as the process is known to be Python only since
 * then. If the ring buffer is full, the library asks again. */
static __always_inline void send_path(struct scratch *scratch, const struct launched *launch, const struct path_asked *asked) {
    const struct known_process *process = &scratch->process;
    struct launch_path *record = paths.ringbuf_reserve(sizeof(struct launch_path));
    if (!record)
        return;
    u64 runs_python = process->has_python && scratch->python_state == PYTHON_WHOLE;
    record->asked = *asked;
    record->pid = launch->pid;
    record->depth = scratch->depth;
    record->born = scratch->copied.of.born;
    record->ends_at_zero = !scratch->ip;
    record->state = runs_python ? scratch->first_state : 0;
    record->count = runs_python ? scratch->python : 0;
    record->cframe = scratch->first_cframe;
    record->has_layout = process->has_python;
    record->layout = process->python.layout;
    bpf_probe_read_kernel(record->ips, sizeof(scratch->ips), scratch->ips);
    bpf_probe_read_kernel(record->cfas, sizeof(scratch->cfas), scratch->cfas);
    bpf_probe_read_kernel(record->bases, sizeof(scratch->bases), scratch->bases);
    bpf_probe_read_kernel(record->base_values, sizeof(scratch->base_values), scratch->base_values);
    bpf_probe_read_kernel(record->kept_at, sizeof(scratch->kept_at), scratch->kept_at);
    bpf_probe_read_kernel(record->frames, sizeof(scratch->frames), scratch->frames);
    bpf_probe_read_kernel(record->frames_at, sizeof(scratch->frames_at), scratch->frames_at);
    paths.ringbuf_submit(record, BPF_RB_FORCE_WAKEUP);
}

static __always_inline void send_probed_launch(struct pt_regs *ctx, struct scratch *scratch, const struct probe *probe) {
    struct launched *launch = &launch_state_of(scratch)->launched;
    u64 *regs = launch_state_of(scratch)->regs;
    u64 iba = 0, address = 0, size = 0, name = 0, list = 0, correlation = 0, from = 0, known = 0;
    struct path_asked asked = {};
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
    read_arg(regs, &probe->args[4], &list); /* only our libraries pass these */
    record->list = list;
    read_arg(regs, &probe->args[5], &correlation);
    record->correlation = correlation;
    if (!read_arg(regs, &probe->args[6], &from) && from && !(launch->flags & LAUNCH_OTHER) && is_plain(scratch, launch) &&
        !read_user(&asked, sizeof(asked), (void *)from)) {
        known = 1 + scratch->process.has_python;
        record->path = choose(asked.is_known == 0 | asked.is_known == known, asked.path, 0);
    }
    /* The patched driver passes a C++ smart pointer here, whose value is the string's address in some builds. */
    if (!(launch->flags & LAUNCH_OTHER) &&
        (read_arg(regs, &probe->args[3], &name) || read_user_text(record->name, sizeof(record->name), (void *)name) <= 1))
        launch->flags |= LAUNCH_NO_NAME;
    record->flags = launch->flags;
    launches.ringbuf_submit(record, wakeup(record, sizeof(*record), LAUNCH_WAKE_BYTES));
    if (asked.path && asked.is_known != known) /* then a known path is told to be forgotten */
        send_path(scratch, launch, &asked);
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
    /* Wakes the reader at once, as the file may be removed soon. */
    compilations.ringbuf_submit(record, BPF_RB_FORCE_WAKEUP);
}

int on_launch(struct pt_regs *ctx) {
    u64 time = bpf_ktime_get_ns();
    u32 slot = attach_cookie(ctx);
    struct probe *probe = probes.lookup(&slot);
    /* Our libraries may ask for the launch's path. */
    begin_call(ctx, time, LAUNCHED, LAUNCHES, LAUNCHES_LOST, probe && probe->args[6].kind == ARG_NONE);
    return 0;
}

int on_launched(struct pt_regs *ctx) {
    keep_kernel_stack(ctx);
    u32 slot = attach_cookie(ctx);
    struct probe *probe = probes.lookup(&slot);
    struct scratch *scratch = walked_launch();
    if (!scratch)
        return 0;
    if (probe)
        send_probed_launch(ctx, scratch, probe);
    end_launch(scratch);
    return 0;
}

int on_compile(struct pt_regs *ctx) {
    keep_kernel_stack(ctx);
    u64 time = bpf_ktime_get_ns();
    u32 slot = attach_cookie(ctx);
    struct probe *probe = probes.lookup(&slot);
    if (probe)
        compiled(ctx, time, probe);
    count(PROBE_NS, bpf_ktime_get_ns() - time);
    return 0;
}
