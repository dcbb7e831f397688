// SPDX-License-Identifier: GPL-2.0
/* What the CPUs do, at a fixed rate (compiled behind launches.c): a program on a perf event of each CPU.
 *
 * It may interrupt a program on a uprobe, and then takes another scratch.
 *
 * Numbers without a definition here: SAMPLE_WAKE_EVERY is set by the loader.
 */
static u64 (*registers_of)(u64 task) = (void *)175; /* of user space, where it entered the kernel last */

/* Whether a sample interrupted the process itself. BPF reads whole registers; in newer kernels' headers cs is a part of one. */
#define IN_USER(ctx) (*(u64 *)&(ctx)->regs.cs & 3)

BPF_RINGBUF_OUTPUT(samples, ANY);

/* The kernel's stack; its id is that of a process 0. */
static __always_inline void kernel_stack(struct bpf_perf_event_data *ctx, struct scratch *scratch, struct launched *kernel, u64 epoch) {
    long bytes = bpf_get_stack(ctx, scratch->ips, sizeof(u64) * STACK_DEPTH, 0);
    if (bytes <= 0)
        return;
    u64 depth = forgotten((u64)bytes / 8, kernel->time);
    u64 id = (epoch << 32) * 0x9e3779b97f4a7c15ULL, check = epoch << 32;
#pragma clang loop unroll(disable)
    for (u32 i = 0; i < STACK_DEPTH; i++) {
        if (hidden(i) >= depth)
            break;
        add_to_hashes(&id, &check, scratch->ips[below(MAX_DEPTH, i)]);
    }
    scratch->hashes[0] = id;
    scratch->hashes[1] = check;
    scratch->depth = depth;
    scratch->walked = WHOLE;
    scratch->python_state = PYTHON_NONE;
    __builtin_memset(scratch->guessed, 0, sizeof(scratch->guessed));
    __builtin_memset(scratch->interrupted, 0, sizeof(scratch->interrupted));
    met(scratch, kernel);
}

static __always_inline void begin_sample(struct bpf_perf_event_data *ctx, u64 time, u64 who, struct scratch *scratch, u64 epoch) {
    struct launched *user = &room_of(scratch)->launched, *kernel = &room_of(scratch)->kernel;
    user->time = kernel->time = time;
    user->pid = who >> 32;
    user->tid = who;
    kernel->pid = kernel->tid = 0;
    user->stack = kernel->stack = user->flags = kernel->flags = 0;
    user->fired = count(SAMPLES, 1);
    if (IN_USER(ctx)) {
        BEGIN_WALK(scratch, user->pid, &ctx->regs);
    } else {
        struct pt_regs *regs = (struct pt_regs *)registers_of(task_now());
        BEGIN_WALK(scratch, user->pid, regs);
    }
    if (!scratch->copied.of.mm || !scratch->copied.start.ip) { /* one of the kernel's own threads */
        scratch->walked = WHOLE;
        scratch->depth = 0;
        sample_phases.call(ctx, SAMPLED);
    }
    start_walk(scratch, user->pid, epoch, SAMPLED);
    put_return_back(scratch, user->tid);
    sample_phases.call(ctx, begin_python(scratch, who, time));
}

int on_sample(struct bpf_perf_event_data *ctx) {
    u64 time = bpf_ktime_get_ns(), who = bpf_get_current_pid_tgid();
    u32 zero = 0;
    struct settings *set = settings.lookup(&zero);
    struct scratch *scratch = set && who ? take_scratch(owner_of(1)) : 0;
    if (scratch) {
        begin_sample(ctx, time, who, scratch, set->epoch);
        give_back(scratch);
        count(SAMPLES_LOST, 1); /* nobody goes on with it */
    }
    return 0; /* perf itself keeps nothing of it */
}

int on_sampled(struct bpf_perf_event_data *ctx) {
    u32 zero = 0;
    struct settings *set = settings.lookup(&zero);
    struct scratch *scratch = own_scratch(owner_of(1));
    if (!scratch || !set) {
        count(SAMPLES_LOST, 1);
        return 0;
    }
    struct launched *user = &room_of(scratch)->launched, *kernel = &room_of(scratch)->kernel;
    if (scratch->depth)
        end_walk(scratch, user);
    if (!IN_USER(ctx))
        kernel_stack(ctx, scratch, kernel, set->epoch);
    struct sample *record = samples.ringbuf_reserve(sizeof(struct sample));
    if (record) {
        record->time = user->time;
        record->pid = user->pid;
        record->tid = user->tid;
        record->stack = user->stack;
        record->kernel_stack = kernel->stack;
        record->cpu = bpf_get_smp_processor_id();
        record->flags = user->flags;
        samples.ringbuf_submit(record, wakeup(user->fired, SAMPLE_WAKE_EVERY));
    } else {
        count(SAMPLES_LOST, 1);
    }
    count(SAMPLE_NS, bpf_ktime_get_ns() - user->time);
    give_back(scratch);
    return 0;
}
