// SPDX-License-Identifier: GPL-2.0
/* CPU samples: stacks of all CPUs, at a fixed rate (compiled after waits.c). The programs run on a perf event of each CPU.
 *
 * A sample may interrupt a program on a uprobe, and then takes another scratch.
 *
 * A sample may find a thread between a probed instruction's breakpoint and what the kernel runs in its place. Its walk begins
 * where the thread would be without the probe.
 *
 * The loader sets SAMPLE_WAKE_BYTES, TASK_UTASK and UTASK_* (offsets in bytes), TASK_IN_EXECVE (in bits), and where kernel code
 * is: ASM_EXC_INT3, which is entered for a breakpoint, and UPROBE_EMULATION, which does what pushes and calls do. They are 0 if
 * the kernel does not tell.
 */
static u64 (*registers_of)(u64 task) = (void *)175; /* registers of user space at the last entry into the kernel */

/* Whether a sample interrupted user space. BPF reads whole registers; in newer kernels' headers cs is a part of one. */
#define IN_USER(ctx) (*(u64 *)&(ctx)->regs.cs & 3)

#define BREAKPOINT 0xcc
#define LONGEST_INSTRUCTION 15 /* bytes, Intel's manual, volume 2, 2.3.11 */
#define CALL 5                 /* bytes of a direct call or jump, and of the nop that the kernel replaces by a call */
#define SHORT_BRANCH 2         /* bytes of a jump to an address near by, */
#define BRANCH 6               /* and of a conditional jump to any other */
#define TRAMPOLINE 18          /* bytes */
#define TRAMPOLINE_PUSHED 0x1afffff94ULL /* two bits for each byte of it: how many words it has pushed before */

BPF_RINGBUF_OUTPUT(samples, ANY);

/* In the copy of a probed instruction, the thread is at the instruction (struct uprobe_task, include/linux/uprobes.h). */
static __always_inline void leave_copy(struct start *start) {
    u64 utask = 0, at = 0, copy = 0;
    if (!TASK_UTASK)
        return;
    bpf_probe_read_kernel(&utask, 8, (u8 *)this_task() + TASK_UTASK);
    if (!utask || bpf_probe_read_kernel(&at, 8, (u8 *)utask + UTASK_VADDR) ||
        bpf_probe_read_kernel(&copy, 8, (u8 *)utask + UTASK_XOL_VADDR))
        return;
    if (copy && start->ip - copy <= LONGEST_INSTRUCTION)
        start->ip = at + (start->ip - copy);
}

/* Returns the target of the direct call that ends at an address; 0 if there is none. */
static __always_inline u64 called_before(u64 after) {
    u64 code = 0;
    return read_user(&code, 8, (void *)(after - CALL)) || (code & 0xff) != 0xe8 ? 0 : after + (s32)(code >> 8);
}

/* In the trampoline of optimised probes, the thread is at the instruction that calls it, before the call
 * (uprobe_trampoline_entry in arch/x86/kernel/uprobes.c, Linux 6.18). The trampoline is at the start of a page:
 * push %rcx; push %r11; push %rax; mov $__NR_uprobe, %rax; syscall; pop %rax; pop %r11; pop %rcx; ret
 * While the kernel serves the system call, the stack pointer can be moved already, while the address is not yet.
 * Its page cannot be read before a thread has touched it: then the thread is at its start. */
static __always_inline void leave_trampoline(struct start *start) {
    u64 offset = start->ip & (PAGE - 1), code[2] = {}, after = 0;
    if (offset >= TRAMPOLINE)
        return;
    if (read_user(code, sizeof(code), (void *)(start->ip - offset))) {
        if (offset)
            return;
    } else if (code[0] << 8 != 0xc0c7485053415100 || code[1] >> 24 != 0x5b4158050f) {
        return;
    }
    u64 call = start->sp + (TRAMPOLINE_PUSHED >> 2 * offset & 3) * 8;
    if (read_user(&after, 8, (void *)call) || called_before(after) != start->ip - offset) {
        call = start->sp - 8;
        if (read_user(&after, 8, (void *)call) || called_before(after) != start->ip - offset)
            return;
    }
    start->ip = after - CALL;
    start->sp = call + 8;
}

/* When the kernel has begun or ended to serve a trampoline, its thread can be at the call already, or still, but for the stack
 * pointer, below which the trampoline has pushed three words and the call one. */
static __always_inline void leave_served_call(struct start *start) {
    u64 after = 0;
    if (read_user(&after, 8, (void *)(start->sp + 24)) || after != start->ip + CALL)
        return;
    u64 target = called_before(after);
    if (target && !(target & (PAGE - 1))) /* the trampoline is at the start of a page */
        start->sp += 32;
}

/* Whether user space entered the kernel by a breakpoint: the call of its handler left an address in the entry code. */
static __always_inline int is_at_int3(struct pt_regs *regs) {
    u64 event = *(u64 *)&regs->ss >> 32, handler = 0;
    if (event) /* FRED puts the event there: vector 3, a software exception (struct fred_ss, asm/ptrace.h) */
        return (event & 0xff) == 3 && (event >> 16 & 15) == 6;
    bpf_probe_read_kernel(&handler, 8, (u64 *)regs - 1);
    return handler - ASM_EXC_INT3 < ASM_EXC_INT3_BYTES;
}

/* Whether a register is on top of the stack, as after a push. */
static __always_inline u64 is_pushed(const struct pt_regs *regs, u64 top) {
    return (top == regs->ax) | (top == regs->bx) | (top == regs->cx) | (top == regs->dx) | (top == regs->si) |
           (top == regs->di) | (top == regs->bp) | (top == regs->r8) | (top == regs->r9) | (top == regs->r10) |
           (top == regs->r11) | (top == regs->r12) | (top == regs->r13) | (top == regs->r14) | (top == regs->r15) |
           (top == regs->sp + 8);
}

/* While the kernel handles a breakpoint, the thread is at the instruction that the breakpoint replaces, until the kernel has
 * done what this instruction does. First the address is the one behind the breakpoint. At the end of a push the stack pointer
 * can be moved already, while the address is not yet. Of a jump or call, the address is first the one behind the instruction;
 * a call's return address can be pushed already (branch_emulate_op). */
static __always_inline void leave_breakpoint(struct start *start, struct pt_regs *regs, u64 kernel_ip) {
    u64 top = 0;
    u8 bytes[BRANCH + 1] = {}; /* those before the address, and the one there */
    if (!is_at_int3(regs) || read_user(bytes, sizeof(bytes), (void *)(start->ip - BRANCH)) ||
        read_user(&top, 8, (void *)start->sp))
        return;
    if (kernel_ip - UPROBE_EMULATION >= UPROBE_EMULATION_BYTES) {
        if (bytes[BRANCH - 1] == BREAKPOINT && !is_pushed(regs, top))
            start->ip--;
    } else if (bytes[BRANCH] == BREAKPOINT) {
        start->sp += is_pushed(regs, top) ? 8 : 0;
    } else if (bytes[BRANCH - SHORT_BRANCH] == BREAKPOINT) {
        start->ip -= SHORT_BRANCH;
    } else if (bytes[BRANCH - CALL] == BREAKPOINT) {
        start->sp += top == start->ip ? 8 : 0;
        start->ip -= CALL;
    } else if (bytes[0] == BREAKPOINT) {
        start->ip -= BRANCH;
    }
}

/* Whether the thread is executing another program, and has left the memory of the one whose registers it still has. */
static __always_inline u64 is_between_programs(u64 sp) {
    u64 bit = TASK_IN_EXECVE, word;
    u8 flags = 0;
    bpf_probe_read_kernel(&flags, 1, (u8 *)this_task() + bit / 8);
    return bit && flags >> (bit & 7) & 1 && read_user(&word, 8, (void *)sp);
}

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
    user->counter = kernel->counter = COUNTERS;
    count(SAMPLES, 1);
    if (IN_USER(ctx)) {
        BEGIN_WALK(scratch, user->pid, &ctx->regs);
    } else {
        struct pt_regs *regs = (struct pt_regs *)registers_of(this_task());
        BEGIN_WALK(scratch, user->pid, regs);
        leave_breakpoint(&scratch->copied.start, regs, *(u64 *)&ctx->regs.ip);
        leave_served_call(&scratch->copied.start);
        if (is_between_programs(scratch->copied.start.sp))
            scratch->copied.start.ip = 0;
    }
    leave_copy(&scratch->copied.start);
    leave_trampoline(&scratch->copied.start);
    if (!scratch->copied.of.mm || !scratch->copied.start.ip) { /* a thread of the Linux kernel, or one between two programs */
        scratch->walked = WHOLE;
        scratch->depth = 0;
        sample_phases.call(ctx, SAMPLED);
    }
    start_walk(scratch, user->pid, epoch, SAMPLED);
    restore_return_address(scratch, user->tid);
    sample_phases.call(ctx, begin_python(scratch, who, time));
}

static __always_inline void send_sample(const struct launched *user, const struct launched *kernel) {
    struct sample *record = samples.ringbuf_reserve(sizeof(struct sample));
    if (!record) {
        count(SAMPLES_LOST, 1);
        return;
    }
    if (user->counter == STACKS_LOST || kernel->counter == STACKS_LOST)
        count(SAMPLE_STACKS_LOST, 1);
    record->time = user->time;
    record->pid = user->pid;
    record->tid = user->tid;
    record->stack = user->stack;
    record->kernel_stack = kernel->stack;
    record->cpu = bpf_get_smp_processor_id();
    record->flags = user->flags;
    samples.ringbuf_submit(record, wakeup(record, sizeof(*record), SAMPLE_WAKE_BYTES));
}

int on_sample(struct bpf_perf_event_data *ctx) {
    u64 time = bpf_ktime_get_ns(), who = bpf_get_current_pid_tgid();
    u32 zero = 0, pid = who >> 32;
    struct settings *set = settings.lookup(&zero);
    if (who && others.lookup(&pid)) {
        struct launched other = {.time = time, .pid = pid, .tid = who, .counter = COUNTERS};
        count(SAMPLES, 1);
        send_sample(&other, &other);
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
    send_sample(user, kernel);
    count(SAMPLE_NS, bpf_ktime_get_ns() - user->time);
    give_back(scratch);
    return 0;
}
