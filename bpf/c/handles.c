// SPDX-License-Identifier: GPL-2.0
/* Launches in drivers without probes: functions of the driver that get a kernel's handle (compiled after launches.c).
 *
 * The map `layouts` has a layout for each driver (bpf/driver_layout.py), with the paths of pointers from a handle. The
 * map `entries` says which argument of a function is the handle; the attachment's cookie is the function's index.
 *
 * All data that is read this way is checked. The handle's pointer to a virtual table must point to one that the layout knows;
 * the probe's own address shows where the driver is loaded. The code must be inside the memory that the driver has allocated
 * for code, and no other kernel may be at its address. Until the handle is destroyed, the kernel must keep its address.
 * Failures are counted.
 *
 * A kernel is described when it is first seen: its name, its code, and its module are sent in chunks, which the recorder puts
 * together. `kernels_seen` and `modules_seen` may lose elements; these kernels are then sent again.
 *
 * A Vulkan driver has shaders in place of kernels. A launch's argument is a command buffer, which leads to the shader that is
 * bound there; the shader's address in the process is the handle. Shaders have no module: each counts as its own. A shader's
 * name is the one that the program gave its pipeline (`shader_names`), or else its entry point's, unless that is `main`.
 *
 * A draw launches the shaders of up to as many stages as the layout says. Those that follow with the same shaders are counted in
 * `draws`.
 *
 * A call may launch several kernels. First all launches are sent, MOST_AT_ONCE by each program, then new kernels are described,
 * one by each program. Linux ends a chain of tail calls after 33 programs: the remaining launches are counted as lost, and the
 * remaining kernels are described at their next launch.
 *
 * The compiler sets MAX_STEPS, CLASSES, MOST_MORE, CHUNK_BYTES, MOST_CODE_CHUNKS and MOST_MODULE_CHUNKS; the loader sets
 * CHUNK_WAKE_BYTES and MODULE_WAKE_BYTES.
 */

#define GPU_ADDRESS_MASK ((1ULL << 48) - 1)
#define MOST_CODE_BYTES (1ULL << 28)
#define MOST_BINARY_BYTES (1ULL << 26)
#define MOST_MEMORY_BYTES (1ULL << 32) /* the range of an instruction pointer's lower half */
#define MOST_AT_ONCE 8 /* launches of one call that one program sends; the next program continues */
#define MAX_TRIES 3 /* to describe a kernel */
#define DESCRIBED 255 /* more than MAX_TRIES */
#define HAS_NAME (1ULL << 63)

/* The values that steps read and write, by index: the handle first, then enum address_value or enum description_value, then
 * pointers in the middle of paths. */
#define VALUES 16
#define GPU 15 /* number of the kernel's GPU if a handle has a kernel for each; else 0 */
#define OTHER_MODULE 14 /* no step uses it; is_occupied() keeps a module here for lack of space on BPF's stack */

BPF_ARRAY(layouts, struct layout, ANY);
BPF_ARRAY(entries, struct entry, ANY);

struct handle {
    u64 value;
    u32 pid;
    u32 loaded_at;       /* page number of the driver, as a process keeps its pid when it executes another program */
};

struct kernel {
    u64 address;
    u64 size;
    u64 described;       /* number of failed tries to describe it, or DESCRIBED */
    u64 sent;            /* bytes of its code that were sent; and HAS_NAME if its name was sent */
    u64 stage;           /* of a shader that draws: 1 + its number; else 0 */
    char name[NAME_BYTES];
    u64 is_entry;        /* of shader_name */
};

BPF_TABLE("lru_hash", struct handle, struct kernel, kernels_seen, ANY);

struct occupant {
    u64 handle;
    u64 code;            /* its address in the process: equal for two handles of one kernel */
};
BPF_TABLE("lru_hash", struct handle, struct occupant, occupants, ANY); /* which kernel is at a GPU address */

struct module {
    u64 time;            /* of the launch at which it was first sent */
    u64 sent;            /* bytes of its binary that were sent */
};
BPF_TABLE("lru_hash", struct handle, struct module, modules_seen, ANY);

struct shader_name {
    char text[NAME_BYTES];
    u64 is_entry;        /* the name of its entry point, not one of its pipeline */
};
BPF_TABLE("lru_hash", struct handle, struct shader_name, shader_names, ANY);

#define COMPUTE_STAGE 5 /* its place among the stages, which no draw has */

/* The latest draw of a command buffer, and the number of those that followed with the same shaders. */
struct drawn {
    u64 shaders[STAGES];
    u64 more;
    u64 epoch;
    struct launched launched;
};
/* Each has draws that were not sent yet, so it loses none: if it is full, each draw is sent. */
BPF_TABLE("hash", struct handle, struct drawn, draws, ANY);

BPF_RINGBUF_OUTPUT(chunks, ANY); /* of kernels' names and code */
BPF_RINGBUF_OUTPUT(modules, ANY);

/* Follows steps. Returns 0 if all addresses were readable; the values of unreadable addresses become 0.
 *
 * Here and in is_kernel_class(), no branch depends on data that was read, as the verifier follows each branch to the end of the
 * program. */
static __always_inline long follow(const struct step *steps, u64 many, u64 *values) {
    long failed = 0;
#pragma clang loop unroll(disable)
    for (u32 i = 0; i < MAX_STEPS; i++) {
        if (hidden(i) >= many)
            break;
        u64 value[2] = {}; /* 16 bytes, as all that the verifier knows of `bytes` is the mask */
        u64 where = values[steps[i].from & (VALUES - 1)] + steps[i].offset + steps[i].per_gpu * values[GPU];
        failed |= read_user(value, steps[i].bytes & 15, (void *)where);
        values[steps[i].to & (VALUES - 1)] = value[0];
    }
    return failed;
}

/* Returns an argument of the probed function, by its offset in pt_regs. */
static __always_inline u64 integer_argument(struct pt_regs *ctx, u8 where) {
    u64 value = 0;
    bpf_probe_read_kernel(&value, 8, (void *)ctx + where);
    return value;
}

/* Returns a handle with the number of the launch's GPU in its lowest bits, if the driver has a kernel for each GPU; 0 if the
 * GPU is unknown. */
static __always_inline u64 with_gpu(struct pt_regs *ctx, const struct entry *entry, const struct layout *layout, u64 handle) {
    u64 at = ctx->di + entry->list_offset;
    u32 gpu = 0;
    if (!layout->gpu_mask)
        return handle;
    if (read_user(&at, 8, (void *)(at + layout->gpu[0])) || read_user(&at, 8, (void *)(at + layout->gpu[1])) ||
        read_user(&gpu, 4, (void *)(at + layout->gpu[2])) || gpu > layout->gpu_mask)
        return 0;
    return (handle & ~layout->gpu_mask) | gpu;
}

/* Sets the values from which steps start, from a handle that with_gpu() returned. */
static __always_inline void begin_values(const struct layout *layout, u64 handle, u64 *values) {
    values[HANDLE] = handle & ~layout->gpu_mask;
    values[GPU] = handle & layout->gpu_mask;
}

/* Returns 1 for the layout of a Vulkan driver, else 0. */
static __always_inline u64 has_shaders(const struct layout *layout) {
    return is_set(layout->window_bytes);
}

/* Returns the shader that is bound in a command buffer, or the handle as it is if the driver has no shaders; 0 if it cannot be
 * read. */
static __always_inline u64 bound_handle(const struct layout *layout, u64 given) {
    if (layout->bound_count && read_user(&given, 8, (void *)(given + layout->bound[0])))
        return 0;
    if (layout->bound_count > 1 && read_user(&given, 8, (void *)(given + layout->bound[1])))
        return 0;
    return given;
}

/* Reads the values that describe a kernel. A module for several GPUs counts as a different one for each. */
static __always_inline void follow_description(const struct layout *layout, u64 *values) {
    follow(layout->description_steps, layout->description_step_count, values);
    u64 module = values[MODULE] | (values[HANDLE] & -has_shaders(layout));
    values[MODULE] = module | (values[GPU] & -is_set(module));
}

/* Returns the address at which the driver is loaded. */
static __always_inline u64 loaded_at(struct pt_regs *ctx, const struct entry *entry) {
    return ctx->ip - entry->address;
}

static __always_inline struct handle handle_of(struct pt_regs *ctx, const struct entry *entry, u64 value) {
    struct handle handle = {
        .value = value,
        .pid = bpf_get_current_pid_tgid() >> 32,
        .loaded_at = loaded_at(ctx, entry) >> 12,
    };
    return handle;
}

/* Whether `class` is one of the layout's virtual tables. */
static __always_inline int is_kernel_class(const struct layout *layout, u64 class) {
    u64 unlike = 1;
#pragma clang loop unroll(disable)
    for (u32 i = 0; i < CLASSES; i++) {
        unlike &= is_set(class ^ layout->classes[i]);
    }
    return !unlike;
}

/* Whether a kernel's code is inside the allocation at `start`, and all numbers are plausible. */
static __always_inline int lies_inside(u64 address, u64 size, u64 start, u64 bytes) {
    u64 sign = address >> 48, from_start = (address - start) & GPU_ADDRESS_MASK;
    return (sign == 0 || sign == 0xffff) && size && size <= MOST_CODE_BYTES && from_start < bytes &&
           size <= bytes - from_start && bytes <= MOST_MEMORY_BYTES;
}

/* Whether another kernel of the same module is at this GPU address, which means that the layout is wrong for one of them.
 * `values` is that of the new kernel, and is overwritten. Kernels of different modules may have one address, as each GPU has
 * its own memory. */
static __always_inline int is_occupied(struct pt_regs *ctx, const struct entry *entry, const struct layout *layout,
                                    const struct handle *key, u64 address, u64 *values) {
    struct handle place = {.value = address, .pid = key->pid, .loaded_at = key->loaded_at};
    struct occupant fresh = {.handle = key->value, .code = values[CODE]};
    struct occupant *occupant = occupants.lookup(&place);
    if (occupant && occupant->handle != fresh.handle && occupant->code != fresh.code) {
        begin_values(layout, occupant->handle, values);
        values[OTHER_MODULE] = values[MODULE];
        /* The other kernel may have moved or ended without a call that was seen. */
        if (!follow(layout->address_steps, layout->address_step_count, values) &&
            is_kernel_class(layout, values[CLASS] - loaded_at(ctx, entry)) &&
            address == values[ADDRESS] + values[ADDRESS_MORE]) {
            follow_description(layout, values);
            if (values[MODULE] == values[OTHER_MODULE])
                return 1;
        }
    }
    occupants.update(&place, &fresh);
    return 0;
}

/* Reads and checks a handle's kernel; returns NULL and sets `failure` if a check fails. */
static __always_inline struct kernel *checked_kernel(struct pt_regs *ctx, const struct entry *entry,
                                                   const struct layout *layout, const struct handle *key, u64 *values,
                                                   enum counter *failure) {
    __builtin_memset(values, 0, VALUES * sizeof(*values));
    begin_values(layout, key->value, values);
    *failure = HANDLES_UNREADABLE;
    if (follow(layout->address_steps, layout->address_step_count, values))
        return 0;
    *failure = HANDLES_UNKNOWN;
    if (!is_kernel_class(layout, values[CLASS] - loaded_at(ctx, entry)))
        return 0;
    u64 of_shaders = has_shaders(layout), size = values[ADDRESS_MORE];
    u64 address = values[ADDRESS] + choose(of_shaders, layout->window_start, values[ADDRESS_MORE]);
    struct kernel *known = kernels_seen.lookup(key);
    if (known) {
        u64 is_other = (known->address ^ address) | (of_shaders & is_set(known->size ^ size));
        if (!is_other)
            return known;
        *failure = HANDLES_CHANGED;
        kernels_seen.delete(key);
        modules_seen.delete(key); /* of a shader */
        shader_names.delete(key);
        return 0;
    }
    *failure = HANDLES_ASTRAY;
    begin_values(layout, key->value, values);
    follow_description(layout, values);
    if (!lies_inside(address, values[CODE_BYTES], choose(of_shaders, layout->window_start, values[ALLOCATION]),
                     choose(of_shaders, layout->window_bytes, values[ALLOCATION_BYTES])))
        return 0;
    struct kernel fresh = {.address = address, .size = values[CODE_BYTES]};
    struct shader_name *name = shader_names.lookup(key);
    if (name) {
        bpf_probe_read_kernel(fresh.name, sizeof(fresh.name), name);
        fresh.is_entry = name->is_entry;
    } else
        read_user_text(fresh.name, sizeof(fresh.name), (void *)values[NAME]); /* 0 in a layout with shaders */
    if (is_occupied(ctx, entry, layout, key, address, values))
        return 0;
    kernels_seen.update(key, &fresh);
    return kernels_seen.lookup(key);
}

static __always_inline void send_launch(const struct launched *launch, const struct kernel *kernel, u64 list, u64 more,
                                        enum counter failure) {
    struct launch *record = reserve_launch(launch);
    if (!record)
        return;
    record->list = list;
    record->more = more;
    u32 flags = launch->flags;
    if (kernel) {
        record->iba = kernel->address & ~0xffffffffULL; /* true of all devices that were tried */
        record->address = kernel->address;
        record->size = kernel->size;
        /* The recorder puts the stage of a shader that draws before its name, and a hash behind the name of an entry point. */
        if (kernel->stage | kernel->is_entry)
            flags |= LAUNCH_NO_NAME;
        else if (!(flags & LAUNCH_OTHER) &&
                 bpf_probe_read_kernel(record->name, sizeof(record->name), kernel->name) == 0 && !record->name[0])
            flags |= LAUNCH_NO_NAME;
    } else {
        count(failure, 1 + more);
        record->iba = record->address = record->size = 0;
        flags |= LAUNCH_BAD_ARGS | LAUNCH_NO_NAME;
    }
    record->flags = flags;
    launches.ringbuf_submit(record, wakeup(record, sizeof(*record), LAUNCH_WAKE_BYTES));
}

/* Reserves a record for a chunk; `what` must be a constant. Modules have their own ring buffer, so that they never displace
 * names and code. */
static __always_inline struct chunk *reserve_chunk(const struct about *about, enum chunk_of what, u64 offset, u64 total) {
    struct chunk *chunk;
    if (what == CHUNK_OF_MODULE)
        chunk = modules.ringbuf_reserve(sizeof(struct chunk));
    else
        chunk = chunks.ringbuf_reserve(sizeof(struct chunk));
    if (chunk) {
        *(struct about *)chunk = *about;
        chunk->what = what;
        chunk->simd = 0;
        chunk->offset = offset;
        chunk->total = total;
    }
    return chunk;
}

enum name_result { NAME_SENT, NAME_UNREADABLE, NAME_NO_ROOM };

/* Sends a kernel's name, from the process's memory at `name`, or if it is a shader, from `kernel`. (A null pointer to a shader
 * would not do: before Linux 6.4 the verifier also follows it where the compiler compared the flag instead.) */
static __always_inline enum name_result send_name(const struct about *about, u64 name, const struct kernel *kernel,
                                                  u64 is_shader) {
    if (is_shader && !kernel->name[0])
        return NAME_SENT; /* it has none */
    struct chunk *chunk = reserve_chunk(about, CHUNK_OF_NAME, 0, 0);
    if (!chunk)
        return NAME_NO_ROOM;
    long bytes = is_shader ? read_kernel_text(chunk->data, NAME_BYTES, kernel->name)
                           : read_user_text(chunk->data, CHUNK_BYTES, (void *)name);
    if (bytes <= 1) {
        chunks.ringbuf_discard(chunk, BPF_RB_NO_WAKEUP);
        return NAME_UNREADABLE;
    }
    chunk->bytes = chunk->total = bytes - 1;
    chunk->what = choose(is_shader && kernel->is_entry, CHUNK_OF_ENTRY, CHUNK_OF_NAME);
    chunks.ringbuf_submit(chunk, BPF_RB_NO_WAKEUP);
    return NAME_SENT;
}

#define UNREADABLE 1 /* some chunks could not be read, and were sent empty */
#define NO_ROOM 2 /* in the ring buffer */

/* Sends the rest of `total` bytes after the first `sent`, at most `most` chunks; returns the new number of sent bytes.
 * `what` and `most` must be constants; the chunks have `kind` and `simd`. Adds UNREADABLE and NO_ROOM to `failures`. */
static __always_inline u64 send_chunks(const struct about *about, enum chunk_of what, u64 kind, u64 simd, u32 most, u64 from,
                                       u64 total, u64 sent, u64 *failures) {
    u64 failed = 0, numbers;
    begin_numbers(&numbers, 0, most);
#pragma clang loop unroll(disable)
    for (u64 number = 0; next_number(&numbers, number, most); number = number_after(number, about->time)) {
        sent = forgotten(sent, about->time);
        failed = forgotten(failed, about->time);
        if (sent >= total)
            break;
        struct chunk *chunk = reserve_chunk(about, what, sent, total);
        if (!chunk) {
            failed |= NO_ROOM;
            break;
        }
        chunk->what = kind;
        chunk->simd = simd;
        u64 bytes = at_most(CHUNK_BYTES, total - sent);
        u64 unreadable = hidden(read_user(chunk->data, bytes, (void *)(from + sent))) >> 63;
        bytes = forgotten(bytes, about->time);
        failed |= unreadable;
        chunk->bytes = choose(unreadable, 0, bytes);
        u64 every = what == CHUNK_OF_MODULE ? MODULE_WAKE_BYTES : CHUNK_WAKE_BYTES;
        chunks.ringbuf_submit(chunk, wakeup(chunk, sizeof(*chunk), every));
        sent += bytes;
    }
    end_numbers(&numbers);
    *failures |= failed;
    return sent;
}

/* Returns the number of lanes of a shader that dispatches; 0 if it is unknown. */
static __always_inline u64 lanes(const struct layout *layout, const struct kernel *kernel, u64 shader) {
    u32 number = 0;
    if (layout->simd && !kernel->stage)
        read_user(&number, 4, (void *)(shader + layout->simd));
    return at_most(255, number); /* fits a chunk, and is no number of lanes */
}

/* Sends a kernel's name, its code, and then its module's binary unless that was sent. The code precedes the module, so that
 * a kernel that is launched only once has its instructions, however large its module is. Data that exceeds the limit for one
 * launch, or the space in the ring buffer, is sent at the next launch. */
static __always_inline void describe(u64 time, const struct layout *layout, const struct handle *key, u64 *values,
                                     struct kernel *kernel) {
    __builtin_memset(values, 0, VALUES * sizeof(*values));
    begin_values(layout, key->value, values);
    follow_description(layout, values);
    u64 name = values[NAME], code = values[CODE], binary = values[BINARY], binary_bytes = values[BINARY_BYTES];
    u64 of_module = values[MODULE], failures = 0;
    struct about about = {
        .time = time,
        .pid = key->pid,
        .tid = bpf_get_current_pid_tgid(),
        .module = of_module,
        .module_time = time,
        .address = kernel->address,
        .size = kernel->size,
    };
    struct module *module = 0;
    if (of_module) {
        struct handle handle = {.value = of_module, .pid = key->pid, .loaded_at = key->loaded_at};
        struct module fresh = {.time = time};
        modules_seen.insert(&handle, &fresh);
        module = modules_seen.lookup(&handle);
    }
    if (module)
        about.module_time = module->time;
    u64 has_name = kernel->sent >> 63, sent = kernel->sent & ~HAS_NAME;
    if (!has_name) {
        enum name_result result = send_name(&about, name, kernel, has_shaders(layout));
        has_name = forgotten(result == NAME_SENT, time);
        failures = forgotten(result == NAME_UNREADABLE ? UNREADABLE : result == NAME_NO_ROOM ? NO_ROOM : 0, time);
    }
    u64 of_code = 0;
    u64 kind = choose(has_shaders(layout), CHUNK_OF_SHADER + kernel->stage, CHUNK_OF_CODE);
    u64 simd = lanes(layout, kernel, key->value);
    sent = send_chunks(&about, CHUNK_OF_CODE, kind, simd, MOST_CODE_CHUNKS, code, kernel->size, sent, &of_code);
    kernel->sent = choose(of_code & UNREADABLE, 0, sent) | has_name << 63;
    failures |= of_code;
    u64 is_whole = sent >= kernel->size, too_large = binary_bytes > MOST_BINARY_BYTES;
    if (module && !too_large) {
        module->sent = send_chunks(&about, CHUNK_OF_MODULE, CHUNK_OF_MODULE, 0, MOST_MODULE_CHUNKS, binary, binary_bytes,
                                   module->sent, &failures);
        is_whole &= module->sent >= binary_bytes;
    }
    is_whole = forgotten(is_whole, time);
    failures = forgotten(failures, time);
    if (is_whole && has_name && !failures) {
        kernel->described = DESCRIBED;
        count(KERNELS, 1);
        count(CHUNKS_LOST, too_large);
    } else {
        kernel->described += failures & UNREADABLE;
        count(CHUNKS_LOST, !!failures);
    }
}

/* Returns the address of the array of the shaders with which a command buffer draws; 0 if it cannot be read. */
static __always_inline u64 drawn_array(const struct layout *layout, u64 commands) {
    if (layout->drawn_count > 1 && read_user(&commands, 8, (void *)(commands + layout->drawn[0])))
        return 0;
    return commands + (layout->drawn_count > 1 ? layout->drawn[1] : layout->drawn[0]);
}

/* Returns the bits of an element of that array that count: none if no draw of this driver has a shader of that stage. */
static __always_inline u64 drawn_mask(const struct entry *entry, u64 stage) {
    return stage == COMPUTE_STAGE ? 0 : (u64)((s64)(stage - hidden(entry->stages)) >> 63);
}

/* Returns the number of kernels that a call launches. */
static __always_inline u32 kernel_count(struct pt_regs *ctx, const struct entry *entry) {
    if (entry->stages)
        return entry->stages;
    return entry->is_array ? integer_argument(ctx, entry->count) : 1;
}

/* Sends the launch of one kernel, or of the next kernels in an array; then continues with the rest of the array, and with
 * descriptions, which are too complex for the verifier inside this loop. */
static __always_inline void send_launches_by_handle(struct pt_regs *ctx, struct scratch *scratch, const struct entry *entry,
                                                    const struct layout *layout) {
    struct launch_state *state = launch_state_of(scratch);
    struct launched *launch = &state->launched;
    u64 *values = state->regs;
    u64 given = integer_argument(ctx, entry->handle) + entry->offset, time = launch->time;
    u64 many = kernel_count(ctx, entry), first = state->kernels_sent, undescribed = state->undescribed;
    enum counter failure;
    struct handle key = handle_of(ctx, entry, with_gpu(ctx, entry, layout, bound_handle(layout, given)));
    u64 list = entry->in_list ? ctx->di + entry->list_offset : 0, unused = 0;
    if (entry->stages)
        given = drawn_array(layout, given);
#pragma clang loop unroll(disable)
    for (u32 i = 0; i < MOST_AT_ONCE; i++) {
        u64 number = hidden(i) + first;
        if (number >= many)
            break;
        struct kernel *kernel = 0;
        failure = HANDLES_UNREADABLE;
        u64 is_readable = !(entry->is_array | entry->stages) || !read_user(&key.value, 8, (void *)(given + 8 * number));
        u64 is_empty = 1 ^ (is_set(key.value) & is_set(number ^ COMPUTE_STAGE));
        if (forgotten(is_set(entry->stages) & is_readable & is_empty, time)) {
            unused = forgotten(unused + 1, time); /* this pipeline has no shader of this stage */
            continue;
        }
        if (is_readable)
            kernel = checked_kernel(ctx, entry, layout, &key, values, &failure);
        if (kernel && entry->stages)
            kernel->stage = 1 + number;
        send_launch(launch, kernel, list, 0, forgotten(failure, time));
        u64 wanting = forgotten(kernel && kernel->described < MAX_TRIES, time);
        state->handles[below(MOST_UNDESCRIBED, undescribed)] = key.value;
        undescribed = forgotten(undescribed + (wanting & (undescribed < MOST_UNDESCRIBED - 1)), time);
    }
    state->kernels_sent = first + MOST_AT_ONCE;
    state->undescribed = undescribed;
    if (!first && many - unused > 1)
        count(LAUNCHES, many - unused - 1);
    if (state->kernels_sent < many) {
        launch->flags |= LAUNCH_NO_WALK;
        phases.call(ctx, HANDLE_LAUNCHED);
        count(LAUNCHES_LOST, many - state->kernels_sent);
    }
    if (undescribed && !(launch->flags & LAUNCH_OTHER))
        phases.call(ctx, DESCRIBE);
}

/* Returns the entry of the probed function; NULL if there is none. */
static __always_inline struct entry *entry_of(struct pt_regs *ctx) {
    u32 slot = attach_cookie(ctx);
    return entries.lookup(&slot);
}

/* Returns the layout of an entry's driver; NULL if there is none. */
static __always_inline struct layout *layout_of(const struct entry *entry) {
    u32 which = entry ? entry->layout : -1;
    return layouts.lookup(&which);
}

int on_handle_launch(struct pt_regs *ctx) {
    u64 time = bpf_ktime_get_ns();
    struct entry *entry = entry_of(ctx);
    if (entry && kernel_count(ctx, entry))
        begin_launch(ctx, time, HANDLE_LAUNCHED);
    return 0;
}

typedef void send_t(struct pt_regs *ctx, struct scratch *scratch, const struct entry *entry, const struct layout *layout);

/* Ends a launch after its stack was walked; `send` sends its kernels. */
static __always_inline int end_launch_by(struct pt_regs *ctx, send_t *send) {
    struct entry *entry = entry_of(ctx);
    struct layout *layout = layout_of(entry);
    struct scratch *scratch = walked_launch();
    if (!scratch)
        return 0;
    if (entry && layout) {
        launch_state_of(scratch)->launched.flags |= entry->flags;
        send(ctx, scratch, entry, layout);
    }
    end_launch(scratch);
    return 0;
}

int on_handle_launched(struct pt_regs *ctx) {
    return end_launch_by(ctx, send_launches_by_handle);
}

/* Sends the draws that were counted since the last one that was sent. */
static __always_inline void send_counted(struct pt_regs *ctx, const struct entry *entry, const struct drawn *drawn, u64 list) {
    u32 zero = 0;
    u64 time = bpf_ktime_get_ns();
    u64 more = at_most(MOST_MORE, drawn->more); /* it is more if threads share the command buffer, which they must not */
    struct settings *set = settings.lookup(&zero);
    struct launched launched = drawn->launched;
    if (!more)
        return;
    launched.time = time;
    launched.counter = COUNTERS;
    if (!set || set->epoch != drawn->epoch) { /* the stack was sent to an earlier output file */
        launched.stack = 0;
        launched.flags |= LAUNCH_NO_STACK;
        launched.counter = STACKS_LOST;
    }
#pragma clang loop unroll(disable)
    for (u32 i = 0; i < STAGES; i++) {
        u64 shader = drawn->shaders[i];
        if (!shader)
            continue;
        struct handle key = handle_of(ctx, entry, shader);
        count(LAUNCHES, more);
        send_launch(&launched, kernels_seen.lookup(&key), list, more - 1, HANDLES_UNREADABLE);
    }
}

/* Sends the counted draws of a command buffer that ends, or forgets those of one that begins anew. */
static __always_inline void end_draws(struct pt_regs *ctx, const struct entry *entry, u64 event, u64 commands) {
    struct handle key = handle_of(ctx, entry, commands);
    struct drawn *drawn = draws.lookup(&key);
    if (!drawn)
        return;
    if (event == LIST_CLOSE)
        send_counted(ctx, entry, drawn, commands);
    draws.delete(&key);
}

/* A draw launches the shaders that are bound in its command buffer. Only the first one after each change of these is sent as
 * others are; those that follow are counted, and sent together when the shaders change, or the command buffer ends. What is
 * in a command buffer that never ends is never executed. */
int on_draw(struct pt_regs *ctx) {
    u64 time = bpf_ktime_get_ns(), shaders[STAGES] = {}, differs = 0;
    u32 zero = 0;
    struct entry *entry = entry_of(ctx);
    struct layout *layout = layout_of(entry);
    struct settings *set = settings.lookup(&zero);
    if (!entry || !layout || !set)
        return 0;
    struct handle key = handle_of(ctx, entry, ctx->di);
    struct drawn *drawn = draws.lookup(&key);
    if (drawn && !read_user(shaders, sizeof(shaders), (void *)drawn_array(layout, ctx->di))) {
#pragma clang loop unroll(full)
        for (u32 i = 0; i < STAGES; i++)
            differs |= (shaders[i] & drawn_mask(entry, i)) ^ drawn->shaders[i];
        if (!differs && drawn->more < MOST_MORE && drawn->epoch == set->epoch) {
            __sync_fetch_and_add(&drawn->more, 1);
            count(PROBE_NS, bpf_ktime_get_ns() - time);
            return 0;
        }
    }
    begin_launch(ctx, time, DRAWN);
    return 0;
}

/* After the walk: sends what was counted before this draw, and begins to count those that follow. */
int on_drawn(struct pt_regs *ctx) {
    u32 zero = 0;
    struct entry *entry = entry_of(ctx);
    struct layout *layout = layout_of(entry);
    struct settings *set = settings.lookup(&zero);
    struct scratch *scratch = walked_launch();
    if (!scratch)
        return 0;
    if (entry && layout && set) {
        struct launched *launch = &launch_state_of(scratch)->launched;
        struct handle key = handle_of(ctx, entry, ctx->di);
        struct drawn *drawn = draws.lookup(&key), fresh = {.epoch = set->epoch, .launched = *launch};
        if (drawn)
            send_counted(ctx, entry, drawn, ctx->di);
        long failed = read_user(fresh.shaders, sizeof(fresh.shaders), (void *)drawn_array(layout, ctx->di));
#pragma clang loop unroll(full)
        for (u32 i = 0; i < STAGES; i++)
            fresh.shaders[i] &= drawn_mask(entry, i);
        if (failed)
            draws.delete(&key);
        else
            draws.update(&key, &fresh);
        launch->flags |= LAUNCH_NO_WALK;
        phases.call(ctx, HANDLE_LAUNCHED);
    }
    end_launch(scratch);
    return 0;
}

int on_describe(struct pt_regs *ctx) {
    struct entry *entry = entry_of(ctx);
    struct layout *layout = layout_of(entry);
    struct scratch *scratch = own_scratch(owner_of(0));
    if (!scratch)
        return 0;
    struct launch_state *state = launch_state_of(scratch);
    if (entry && layout && state->undescribed) {
        u64 left = --state->undescribed;
        struct handle key = handle_of(ctx, entry, state->handles[below(MOST_UNDESCRIBED, left)]);
        struct kernel *kernel = kernels_seen.lookup(&key);
        if (kernel && kernel->described < MAX_TRIES)
            describe(state->launched.time, layout, &key, state->regs, kernel);
        if (state->undescribed)
            phases.call(ctx, DESCRIBE);
    }
    end_launch(scratch);
    return 0;
}

typedef void forget_t(struct handle *key);

/* Calls `forget` with the handle that the driver destroys, and with its variants for other GPUs if the driver has those. */
static __always_inline int forget_by(struct pt_regs *ctx, forget_t *forget) {
    struct entry *entry = entry_of(ctx);
    struct layout *layout = layout_of(entry);
    if (!entry || !layout)
        return 0;
    struct handle key = handle_of(ctx, entry, integer_argument(ctx, entry->handle) + entry->offset);
#pragma clang loop unroll(disable)
    for (u32 gpu = 0; gpu < MOST_GPUS; gpu++) {
        forget(&key);
        if (!layout->gpu_mask)
            break;
        key.value++;
    }
    return 0;
}

static __always_inline void forget_kernel(struct handle *key) {
    struct kernel *kernel = kernels_seen.lookup(key);
    struct handle place = {.value = kernel ? kernel->address : 0, .pid = key->pid, .loaded_at = key->loaded_at};
    occupants.delete(&place); /* a destroyed kernel's memory may look like a kernel for a long time */
    kernels_seen.delete(key);
}

int on_kernel_gone(struct pt_regs *ctx) {
    keep_kernel_stack(ctx);
    return forget_by(ctx, forget_kernel);
}

static __always_inline void forget_module(struct handle *key) {
    modules_seen.delete(key);
}

int on_module_gone(struct pt_regs *ctx) {
    keep_kernel_stack(ctx);
    return forget_by(ctx, forget_module);
}

/* Where a pipeline has the pointers to its shaders: one that dispatches has one, one that draws up to as many as the layout says. */
struct shader_places {
    u64 first;
    u64 stride;
    u64 many;
};

static __always_inline struct shader_places shader_places(const struct layout *layout, u64 pipeline) {
    struct shader_places places = {.first = pipeline + layout->pipeline, .many = 1};
    u32 kind = 0;
    if (!layout->drawn_count)
        return places;
    places.many = !read_user(&kind, 4, (void *)(pipeline + layout->kind[0])) && kind == layout->kind[1];
    if (kind == layout->kind[2]) {
        places.first = pipeline + layout->stages[0];
        places.stride = layout->stages[1];
        places.many = layout->stage_count;
    }
    return places;
}

/* Returns a shader of a pipeline, as a key of `kernels_seen`; its value is 0 if there is none, or it cannot be read. */
static __always_inline struct handle shader_of(struct pt_regs *ctx, const struct entry *entry,
                                               const struct shader_places *places, u64 number) {
    u64 shader = 0;
    read_user(&shader, 8, (void *)(places->first + places->stride * number));
    return handle_of(ctx, entry, shader);
}

int on_shader_gone(struct pt_regs *ctx) {
    keep_kernel_stack(ctx);
    struct entry *entry = entry_of(ctx);
    struct layout *layout = layout_of(entry);
    if (!entry || !layout)
        return 0;
    struct shader_places places = shader_places(layout, integer_argument(ctx, entry->handle));
#pragma clang loop unroll(disable)
    for (u32 i = 0; i < STAGES; i++) {
        if (hidden(i) >= places.many)
            break;
        struct handle key = shader_of(ctx, entry, &places, i);
        forget_kernel(&key);
        modules_seen.delete(&key);
        shader_names.delete(&key);
    }
    return 0;
}

/* VkDebugUtilsObjectNameInfoEXT. */
struct object_name {
    u32 structure_type;
    u32 pad;
    u64 next;
    u32 type;
    u32 pad2;
    u64 object;
    u64 name;
};
#define VK_OBJECT_TYPE_PIPELINE 19

int on_named(struct pt_regs *ctx) {
    keep_kernel_stack(ctx);
    struct entry *entry = entry_of(ctx);
    struct layout *layout = layout_of(entry);
    struct object_name info = {};
    struct shader_name name = {};
    if (!entry || !layout || read_user(&info, sizeof(info), (void *)integer_argument(ctx, entry->handle)) ||
        info.type != VK_OBJECT_TYPE_PIPELINE || read_user_text(name.text, sizeof(name.text), (void *)info.name) <= 1)
        return 0;
    struct shader_places places = shader_places(layout, info.object);
#pragma clang loop unroll(disable)
    for (u32 i = 0; i < STAGES; i++) {
        if (hidden(i) >= places.many)
            break;
        struct handle key = shader_of(ctx, entry, &places, i);
        if (!key.value)
            continue;
        shader_names.update(&key, &name);
        kernels_seen.delete(&key); /* it is described again, with its name */
    }
    return 0;
}

/* VkPipelineShaderStageCreateInfo. */
struct stage_info {
    u32 structure_type;
    u32 pad;
    u64 next;
    u32 flags;
    u32 stage;           /* a bit of VkShaderStageFlagBits */
    u64 module;
    u64 name;
    u64 special;
};
/* Bytes of a VkComputePipelineCreateInfo and of a VkGraphicsPipelineCreateInfo; at STAGE_IN_INFO the former has its stage, and
 * the latter a pointer to its stages, whose number is at MANY_IN_INFO. */
#define COMPUTE_INFO_BYTES 96
#define GRAPHICS_INFO_BYTES 144
#define MANY_IN_INFO 20
#define STAGE_IN_INFO 24
#define MAIN 0x6e69616dULL /* the text "main" */
#define MOST_MADE 8 /* pipelines of one call whose shaders get names */

/* A call that makes pipelines, by tid. */
struct making {
    u64 sp;              /* stack pointer at its begin, and at its return */
    u64 infos;
    u64 pipelines;
    u64 many;
};
BPF_TABLE("lru_hash", u32, struct making, makings, ANY);

/* Keeps the name of a shader's entry point, unless its pipeline has a name. */
static __always_inline void name_entry(const struct handle *key, u64 text) {
    struct shader_name name = {.is_entry = 1};
    struct shader_name *known = shader_names.lookup(key);
    if (!text || (known && !known->is_entry))
        return;
    if (read_user_text(name.text, sizeof(name.text), (void *)text) <= 1 || *(u64 *)name.text == MAIN) {
        if (!known)
            return;
        shader_names.delete(key);
    } else
        shader_names.update(key, &name);
    kernels_seen.delete(key); /* it is described again, with its name */
}

/* Keeps the names of a pipeline's entry points. */
static __always_inline void name_entries(struct pt_regs *ctx, const struct entry *entry, const struct layout *layout,
                                         u64 pipeline, u64 info) {
    u64 first = info + STAGE_IN_INFO, names[8] = {}; /* by number of the stage; 0 of one that dispatches */
    u32 many = 1;
    struct shader_places places = shader_places(layout, pipeline);
    if ((places.many > 1) != !!entry->stages)
        return;
    if (entry->stages && (read_user(&first, 8, (void *)first) | read_user(&many, 4, (void *)(info + MANY_IN_INFO))))
        return;
#pragma clang loop unroll(disable)
    for (u32 i = 0; i < STAGES; i++) {
        struct stage_info stage = {};
        if (hidden(i) >= many || read_user(&stage, sizeof(stage), (void *)(first + sizeof(stage) * hidden(i))))
            break;
        u64 bit = stage.stage & -is_set(entry->stages), place = 0;
#pragma clang loop unroll(full)
        for (u32 number = 1; number < STAGES; number++)
            place += is_set(bit >> number);
        names[hidden(place) & 7] = stage.name;
    }
#pragma clang loop unroll(disable)
    for (u32 i = 0; i < STAGES; i++) {
        u32 number = 0;
        if (hidden(i) >= places.many)
            break;
        struct handle key = shader_of(ctx, entry, &places, i);
        if (!key.value || (entry->stages && read_user(&number, 4, (void *)(key.value + layout->stage))) || number >= STAGES)
            continue;
        name_entry(&key, names[number & 7]);
        names[number & 7] = 0; /* what the place behind the last shader points to may look like one */
    }
}

int on_make(struct pt_regs *ctx) {
    keep_kernel_stack(ctx);
    u32 tid = bpf_get_current_pid_tgid();
    struct entry *entry = entry_of(ctx);
    if (!entry)
        return 0;
    struct making making = {
        .sp = ctx->sp,
        .infos = integer_argument(ctx, entry->handle),
        .pipelines = ctx->r9,
        .many = (u32)integer_argument(ctx, entry->count),
    };
    makings.update(&tid, &making);
    return 0;
}

/* At the instruction that returns. */
int on_made(struct pt_regs *ctx) {
    keep_kernel_stack(ctx);
    u32 tid = bpf_get_current_pid_tgid();
    struct entry *entry = entry_of(ctx);
    struct layout *layout = layout_of(entry);
    struct making *making = makings.lookup(&tid);
    if (!entry || !layout || !making || making->sp != ctx->sp)
        return 0;
    struct making made = *making;
    makings.delete(&tid);
#pragma clang loop unroll(disable)
    for (u32 i = 0; i < MOST_MADE; i++) {
        u64 pipeline = 0, at = hidden(i), bytes = choose(is_set(entry->stages), GRAPHICS_INFO_BYTES, COMPUTE_INFO_BYTES);
        if (at >= made.many)
            break;
        if (!read_user(&pipeline, 8, (void *)(made.pipelines + 8 * at)) && pipeline)
            name_entries(ctx, entry, layout, pipeline, made.infos + bytes * at);
    }
    return 0;
}
