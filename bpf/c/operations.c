// SPDX-License-Identifier: GPL-2.0
/* The kernels with which Mesa's Vulkan driver copies and clears: operations of its blorp (compiled after copies.c).
 *
 * Each operation is one call of a function of the driver, with two arguments (driver_layout.Operations): a structure with the
 * address of blorp's table of functions and the command buffer, and one with the operation's number, its kernel, and what the
 * compiler said of that. As for shaders, all that is read is checked: the table has to have the probed function.
 *
 * A kernel's code is sent when the driver gives it to the GPU, once in a process. A recorder that comes later knows its place,
 * size and name, and not its instructions. The kernel's address in the process, plus 1, is the key of `kernels_seen` and
 * `modules_seen`: shaders are at even addresses.
 */

#define MOST_FUNCTION_BYTES 64 /* from a function's beginning to its probe */
#define MOST_UPLOADED_CHUNKS 4 /* 64 KiB; the largest that was seen had 4 KiB */
#define STACK_ARGUMENTS 24 /* from the stack pointer at a function's first instruction to its ninth argument */

/* A call that gives the GPU a kernel, by tid. */
struct uploading {
    u64 sp;              /* stack pointer at its begin, and at its return */
    u64 code;            /* in the process's memory, until the caller goes on */
    u64 bytes;
    u64 kernel;          /* where the kernel's place will be, and what the compiler says of it */
    u64 data;
};
BPF_TABLE("lru_hash", u32, struct uploading, uploadings, ANY);

/* Returns the key of a kernel, given the address of what the compiler says of it. */
static __always_inline struct handle operation_key(struct pt_regs *ctx, const struct entry *entry, u64 data) {
    return handle_of(ctx, entry, data + 1);
}

int on_upload(struct pt_regs *ctx) {
    keep_kernel_stack(ctx);
    u32 zero = 0, tid = bpf_get_current_pid_tgid(), pid = bpf_get_current_pid_tgid() >> 32;
    struct settings *set = settings.lookup(&zero);
    struct uploading uploading = {.sp = ctx->sp, .code = ctx->r8, .bytes = (u32)ctx->r9};
    u64 results[2] = {};
    if (!set || (set->scoped && others.lookup(&pid)) ||
        read_user(results, sizeof(results), (void *)(ctx->sp + STACK_ARGUMENTS)))
        return 0;
    uploading.kernel = results[0];
    uploading.data = results[1];
    uploadings.update(&tid, &uploading);
    return 0;
}

/* At the instruction that returns: sends the code of the kernel, whose place is now known. */
int on_uploaded(struct pt_regs *ctx) {
    keep_kernel_stack(ctx);
    u64 time = bpf_ktime_get_ns(), data = 0, failures = 0;
    u32 tid = bpf_get_current_pid_tgid(), start = 0;
    struct entry *entry = entry_of(ctx);
    struct layout *layout = layout_of(entry);
    struct uploading *known = uploadings.lookup(&tid);
    if (!entry || !layout || !known || known->sp != ctx->sp)
        return 0;
    struct uploading uploaded = *known;
    uploadings.delete(&tid);
    if (read_user(&start, 4, (void *)uploaded.kernel) || read_user(&data, 8, (void *)uploaded.data) || !data)
        return 0;
    struct about about = {
        .time = time,
        .pid = bpf_get_current_pid_tgid() >> 32,
        .tid = tid,
        .module = data + 1,
        .module_time = time,
        .address = layout->window_start + start,
        .size = uploaded.bytes,
    };
    if (!lies_inside(about.address, about.size, layout->window_start, layout->window_bytes)) {
        count(HANDLES_ASTRAY, 1);
        return 0;
    }
    struct handle key = operation_key(ctx, entry, data);
    struct module fresh = {.time = time};
    modules_seen.update(&key, &fresh);
    kernels_seen.delete(&key); /* its name is sent with its first operation */
    send_chunks(&about, CHUNK_OF_CODE, CHUNK_OF_CODE, 0, MOST_UPLOADED_CHUNKS, uploaded.code, uploaded.bytes, 0, &failures);
    count(CHUNKS_LOST, !!failures);
    return 0;
}

int on_operation(struct pt_regs *ctx) {
    u64 time = bpf_ktime_get_ns(), data = 0;
    struct entry *entry = entry_of(ctx);
    struct layout *layout = layout_of(entry);
    if (!entry || !layout || (!read_user(&data, 8, (void *)(ctx->si + layout->of_operations[2])) && !data))
        return 0; /* some operations need no kernel */
    begin_launch(ctx, time, OPERATED);
    return 0;
}

/* Names a kernel whose code was sent, once. */
static __always_inline void name_operation(struct pt_regs *ctx, const struct entry *entry, const struct launched *launch,
                                           const struct kernel *kernel, u64 data) {
    struct handle key = operation_key(ctx, entry, data);
    struct module *module = modules_seen.lookup(&key);
    struct kernel *known = kernels_seen.lookup(&key);
    if (!module || (known && known->address == kernel->address && known->size == kernel->size))
        return;
    struct about about = {
        .time = launch->time,
        .pid = key.pid,
        .tid = launch->tid,
        .module = key.value,
        .module_time = module->time,
        .address = kernel->address,
        .size = kernel->size,
    };
    if (send_name(&about, 0, kernel, 1) != NAME_SENT) {
        count(CHUNKS_LOST, 1);
        return;
    }
    count(KERNELS, 1);
    kernels_seen.update(&key, kernel);
}

static __always_inline void send_operation(struct pt_regs *ctx, struct scratch *scratch, const struct entry *entry,
                                           const struct layout *layout) {
    struct launched *launch = &launch_state_of(scratch)->launched;
    u64 batch[2] = {}, function = 0, data = 0; /* batch: the table of functions, the command buffer */
    u32 start = 0, bytes = 0, kind = 0;
    struct kernel kernel = {}, *checked = 0;
    enum counter failure = HANDLES_UNREADABLE;
    if (!read_user(batch, sizeof(batch), (void *)ctx->di) &&
        !read_user(&function, 8, (void *)(batch[0] + layout->of_operations[0])) &&
        !read_user(&start, 4, (void *)(ctx->si + layout->of_operations[1])) &&
        !read_user(&data, 8, (void *)(ctx->si + layout->of_operations[2])) &&
        !read_user(&bytes, 4, (void *)(data + layout->of_operations[3])) &&
        !read_user(&kind, 4, (void *)(ctx->si + layout->of_operations[4]))) {
        failure = HANDLES_UNKNOWN;
        if (ctx->ip - function < MOST_FUNCTION_BYTES) {
            failure = HANDLES_ASTRAY;
            kernel.address = layout->window_start + start;
            kernel.size = bytes;
            u64 named = below(MAX_OPERATIONS, at_most(MAX_OPERATIONS - 1, kind)); /* the last name has no kind */
            __builtin_memcpy(kernel.name, &layout->operation_names[2 * named], 16);
            if (lies_inside(kernel.address, kernel.size, layout->window_start, layout->window_bytes))
                checked = &kernel;
        }
    }
    send_launch(launch, checked, batch[1], 0, forgotten(failure, launch->time));
    if (checked && !(launch->flags & LAUNCH_OTHER))
        name_operation(ctx, entry, launch, &kernel, data);
}

int on_operated(struct pt_regs *ctx) {
    keep_kernel_stack(ctx);
    return end_launch_by(ctx, send_operation);
}
