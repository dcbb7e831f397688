// SPDX-License-Identifier: GPL-2.0
/* CPU samples: stacks of all CPUs, at a fixed rate (compiled after waits.c). The programs run on a perf event of each CPU.
 *
 * A sample may interrupt a program on a uprobe, and then takes another scratch.
 *
 * The loader sets SAMPLE_WAKE_EVERY.
 */
static u64 (*registers_of)(u64 task) = (void *)175; /* registers of user space at the last entry into the kernel */

/* Whether a sample interrupted user space. BPF reads whole registers; in newer kernels' headers cs is a part of one. */
#define IN_USER(ctx) (*(u64 *)&(ctx)->regs.cs & 3)

BPF_RINGBUF_OUTPUT(samples, ANY);

/* Sends the Linux kernel's stack; its id is that of process 0. */
static __always_inline void kernel_stack(struct bpf_perf_event_data *ctx, struct scratch *scratch, struct launched *kernel,
                                         u64 epoch) {
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
    send_new_stack(scratch, kernel);
}

static __always_inline void begin_sample(struct bpf_perf_event_data *ctx, u64 time, u64 who, struct scratch *scratch,
                                         u64 epoch) {
    struct launched *user = &launch_state_of(scratch)->launched, *kernel = &launch_state_of(scratch)->kernel;
    user->time = kernel->time = time;
    user->pid = who >> 32;
    user->tid = who;
    kernel->pid = kernel->tid = 0;
    user->stack = kernel->stack = user->flags = kernel->flags = 0;
    user->nth = count(SAMPLES, 1);
    if (IN_USER(ctx)) {
        BEGIN_WALK(scratch, user->pid, &ctx->regs);
    } else {
        struct pt_regs *regs = (struct pt_regs *)registers_of(this_task());
        BEGIN_WALK(scratch, user->pid, regs);
    }
    if (!scratch->copied.of.mm || !scratch->copied.start.ip) { /* a thread of the Linux kernel */
        scratch->walked = WHOLE;
        scratch->depth = 0;
        sample_phases.call(ctx, SAMPLED);
    }
    start_walk(scratch, user->pid, epoch, SAMPLED);
    restore_return_address(scratch, user->tid);
    sample_phases.call(ctx, begin_python(scratch, who, time));
}

static __always_inline void send_sample(const struct launched *user, u64 kernel_stack) {
    struct sample *record = samples.ringbuf_reserve(sizeof(struct sample));
    if (!record) {
        count(SAMPLES_LOST, 1);
        return;
    }
    record->time = user->time;
    record->pid = user->pid;
    record->tid = user->tid;
    record->stack = user->stack;
    record->kernel_stack = kernel_stack;
    record->cpu = bpf_get_smp_processor_id();
    record->flags = user->flags;
    samples.ringbuf_submit(record, wakeup(user->nth, SAMPLE_WAKE_EVERY));
}

int on_sample(struct bpf_perf_event_data *ctx) {
    u64 time = bpf_ktime_get_ns(), who = bpf_get_current_pid_tgid();
    u32 zero = 0, pid = who >> 32;
    struct settings *set = settings.lookup(&zero);
    if (who && others.lookup(&pid)) {
        struct launched other = {.time = time, .pid = pid, .tid = who, .nth = count(SAMPLES, 1)};
        send_sample(&other, 0);
        return 0;
    }
    struct scratch *scratch = set && who ? take_scratch(owner_of(1)) : 0;
    if (scratch) {
        begin_sample(ctx, time, who, scratch, set->epoch);
        give_back(scratch);
        count(SAMPLES_LOST, 1); /* reached only if the tail call fails */
    }
    return 0; /* perf itself records no sample */
}

int on_sampled(struct bpf_perf_event_data *ctx) {
    u32 zero = 0;
    struct settings *set = settings.lookup(&zero);
    struct scratch *scratch = own_scratch(owner_of(1));
    if (!scratch || !set) {
        count(SAMPLES_LOST, 1);
        return 0;
    }
    struct launched *user = &launch_state_of(scratch)->launched, *kernel = &launch_state_of(scratch)->kernel;
    if (scratch->depth)
        end_walk(scratch, user);
    if (!IN_USER(ctx))
        kernel_stack(ctx, scratch, kernel, set->epoch);
    send_sample(user, kernel->stack);
    count(SAMPLE_NS, bpf_ktime_get_ns() - user->time);
    give_back(scratch);
    return 0;
}
