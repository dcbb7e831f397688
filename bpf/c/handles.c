// SPDX-License-Identifier: GPL-2.0
/* Launches in drivers without probes: functions of the driver that are given a kernel's handle (compiled behind launches.c).
 *
 * Where things lie behind a handle is the `layouts` map's, a layout a driver (bpf/probes/driver_layout.py); which argument of which
 * function is the handle is in `entries`, at the slot that the attachment's cookie names.
 *
 * Nothing read this way is believed by itself. A handle's first word that points into the driver must be one of the virtual
 * tables that the layout knows, which the probe's own address tells wherever the driver is loaded. The code must lie inside the
 * memory that the driver has for it, where no other kernel is, and where it did before, until the handle is given back. What
 * fails is counted.
 *
 * A kernel that was not seen before is described: its name, its code, and then the module that it came in, in pieces. Whoever takes
 * them puts them together. `kernels_seen` and `modules_seen` may forget: then they are sent again.
 *
 * A call may launch several kernels. First all launches are sent, MOST_AT_ONCE in a program, then the kernels that need it are
 * described, one in a program. Linux ends such a chain after 33 programs: the launches that are left then are counted as lost, the
 * kernels described at their next launch.
 *
 * Set by the compiler: MAX_STEPS, CLASSES, PIECE_BYTES, MOST_CODE_PIECES, MOST_MODULE_PIECES; by the loader: PIECE_WAKE_EVERY,
 * MODULE_WAKE_EVERY.
 */

#define GPU_ADDRESS_MASK ((1ULL << 48) - 1)
#define MOST_CODE_BYTES (1ULL << 28)
#define MOST_BINARY_BYTES (1ULL << 26)
#define MOST_MEMORY_BYTES (1ULL << 32) /* an instruction pointer's lower half */
#define MOST_AT_ONCE 8 /* kernels of one call that one program sends; the next one goes on */
#define TRIES 3 /* to describe a kernel */
#define DESCRIBED 255 /* more than TRIES */
#define HAS_NAME (1ULL << 63)

/* Values by their number; the first is the handle, the last are for what lies on the way. */
#define VALUES 16
#define GPU 15 /* of which the kernel is, where a handle has one for each; else 0 */
#define OTHER_MODULE 14 /* what no step leads to: the programs have no room for it elsewhere */

BPF_ARRAY(layouts, struct layout, ANY);
BPF_ARRAY(entries, struct entry, ANY);

struct handle {
    u64 value;
    u32 pid;
    u32 loaded_at;       /* page of the driver: a process that executes another program keeps its pid */
};

struct kernel {
    u64 address;
    u64 size;
    u64 described;       /* how often that failed, or DESCRIBED */
    u64 sent;            /* bytes of its code; and HAS_NAME when its name was */
    char name[NAME_BYTES];
};

BPF_TABLE("lru_hash", struct handle, struct kernel, kernels_seen, ANY);

struct occupant {
    u64 handle;
    u64 code;            /* where the process has it: two handles of one kernel have the same */
};
BPF_TABLE("lru_hash", struct handle, struct occupant, occupants, ANY); /* of GPU addresses */

struct module {
    u64 time;            /* of the launch at which it was sent first */
    u64 sent;            /* bytes of its binary */
};
BPF_TABLE("lru_hash", struct handle, struct module, modules_seen, ANY);

BPF_RINGBUF_OUTPUT(pieces, ANY); /* of names and code */
BPF_RINGBUF_OUTPUT(modules, ANY);

/* Takes steps; gives 0 when all led somewhere, those that did not to 0.
 *
 * Here and in is_known nothing branches on what is read: the verifier follows each branch to the end of the program. */
static __always_inline long follow(const struct step *steps, u64 many, u64 *values) {
    long failed = 0;
#pragma clang loop unroll(disable)
    for (u32 i = 0; i < MAX_STEPS; i++) {
        if (hidden(i) >= many)
            break;
        u64 value[2] = {}; /* twice what is read, as the verifier sees no more of `bytes` than its mask */
        u64 where = values[steps[i].from & (VALUES - 1)] + steps[i].offset + steps[i].per_gpu * values[GPU];
        failed |= read_user(value, steps[i].bytes & 15, (void *)where);
        values[steps[i].to & (VALUES - 1)] = value[0];
    }
    return failed;
}

/* By its offset in pt_regs. */
static __always_inline u64 integer_argument(struct pt_regs *ctx, u8 where) {
    u64 value = 0;
    bpf_probe_read_kernel(&value, 8, (void *)ctx + where);
    return value;
}

/* A handle with the number of the GPU that a launch is for in its lowest bits, if that has a kernel of its own; 0 if it is not
 * known. */
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

/* Puts such a handle where steps begin. */
static __always_inline void begin_values(const struct layout *layout, u64 handle, u64 *values) {
    values[HANDLE] = handle & ~layout->gpu_mask;
    values[GPU] = handle & layout->gpu_mask;
}

/* What is to be known of a kernel. A module for several GPUs counts as one for each. */
static __always_inline void follow_what(const struct layout *layout, u64 *values) {
    follow(layout->what, layout->what_steps, values);
    u64 module = values[MODULE];
    values[MODULE] = module | (values[GPU] & -(hidden(module | -module) >> 63));
}

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

static __always_inline int is_known(const struct layout *layout, u64 class) {
    u64 unlike = 1;
#pragma clang loop unroll(disable)
    for (u32 i = 0; i < CLASSES; i++) {
        u64 difference = class ^ layout->classes[i];
        unlike &= hidden(difference | -difference) >> 63;
    }
    return !unlike;
}

static __always_inline int lies_inside(u64 address, u64 size, u64 start, u64 bytes) {
    u64 sign = address >> 48, from_start = (address - start) & GPU_ADDRESS_MASK;
    return (sign == 0 || sign == 0xffff) && size && size <= MOST_CODE_BYTES && from_start < bytes &&
           size <= bytes - from_start && bytes <= MOST_MEMORY_BYTES;
}

/* Whether another kernel is at an address, of which `values` has the code: then the layout is wrong for one of them. Of another
 * module it may be, as each GPU has its own memory. */
static __always_inline int is_taken(struct pt_regs *ctx, const struct entry *entry, const struct layout *layout,
                                    const struct handle *key, u64 address, u64 *values) {
    struct handle place = {.value = address, .pid = key->pid, .loaded_at = key->loaded_at};
    struct occupant fresh = {.handle = key->value, .code = values[CODE]};
    struct occupant *occupant = occupants.lookup(&place);
    if (occupant && occupant->handle != fresh.handle && occupant->code != fresh.code) {
        begin_values(layout, occupant->handle, values);
        values[OTHER_MODULE] = values[MODULE];
        /* One that was never given back may have left its place all the same. */
        if (!follow(layout->where, layout->where_steps, values) &&
            is_known(layout, values[CLASS] - loaded_at(ctx, entry)) && address == values[ADDRESS] + values[ADDRESS_MORE]) {
            follow_what(layout, values);
            if (values[MODULE] == values[OTHER_MODULE])
                return 1;
        }
    }
    occupants.update(&place, &fresh);
    return 0;
}

/* What is known of a handle's kernel after it was looked at; NULL, and why, where that is not to be believed. */
static __always_inline struct kernel *known_kernel(struct pt_regs *ctx, const struct entry *entry,
                                                   const struct layout *layout, const struct handle *key, u64 *values,
                                                   enum counter *failure) {
    __builtin_memset(values, 0, VALUES * sizeof(*values));
    begin_values(layout, key->value, values);
    *failure = HANDLES_UNREADABLE;
    if (follow(layout->where, layout->where_steps, values))
        return 0;
    *failure = HANDLES_UNKNOWN;
    if (!is_known(layout, values[CLASS] - loaded_at(ctx, entry)))
        return 0;
    u64 address = values[ADDRESS] + values[ADDRESS_MORE];
    struct kernel *known = kernels_seen.lookup(key);
    if (known) {
        if (known->address == address)
            return known;
        *failure = HANDLES_CHANGED;
        kernels_seen.delete(key);
        return 0;
    }
    *failure = HANDLES_ASTRAY;
    begin_values(layout, key->value, values);
    follow_what(layout, values);
    if (!lies_inside(address, values[CODE_BYTES], values[ALLOCATION], values[ALLOCATION_BYTES]))
        return 0;
    struct kernel fresh = {.address = address, .size = values[CODE_BYTES]};
    read_user_text(fresh.name, sizeof(fresh.name), (void *)values[NAME]);
    if (is_taken(ctx, entry, layout, key, address, values))
        return 0;
    kernels_seen.update(key, &fresh);
    return kernels_seen.lookup(key);
}

static __always_inline void send_launch(const struct launched *launch, const struct kernel *kernel, u64 list,
                                        enum counter failure) {
    struct launch *record = reserve_launch(launch);
    if (!record)
        return;
    record->list = list;
    u32 flags = launch->flags;
    if (kernel) {
        record->iba = kernel->address & ~0xffffffffULL; /* so it was on all devices tried */
        record->address = kernel->address;
        record->size = kernel->size;
        if (!(flags & LAUNCH_OTHER) && bpf_probe_read_kernel(record->name, sizeof(record->name), kernel->name) == 0 &&
            !record->name[0])
            flags |= LAUNCH_NO_NAME;
    } else {
        count(failure, 1);
        record->iba = record->address = record->size = 0;
        flags |= LAUNCH_BAD_ARGS | LAUNCH_NO_NAME;
    }
    record->flags = flags;
    launches.ringbuf_submit(record, wakeup(launch->fired, LAUNCH_WAKE_EVERY));
}

/* `what` is a constant: modules have a ring buffer of their own, so that names and code have room whatever came before. */
static __always_inline struct piece *reserve_piece(const struct about *about, enum piece_of what, u64 offset, u64 total) {
    struct piece *piece;
    if (what == PIECE_OF_MODULE)
        piece = modules.ringbuf_reserve(sizeof(struct piece));
    else
        piece = pieces.ringbuf_reserve(sizeof(struct piece));
    if (piece) {
        *(struct about *)piece = *about;
        piece->what = what;
        piece->offset = offset;
        piece->total = total;
    }
    return piece;
}

enum name_result { NAME_SENT, NAME_UNREADABLE, NAME_NO_ROOM };

static __always_inline enum name_result send_name(const struct about *about, u64 name) {
    struct piece *piece = reserve_piece(about, PIECE_OF_NAME, 0, 0);
    if (!piece)
        return NAME_NO_ROOM;
    long bytes = read_user_text(piece->data, PIECE_BYTES, (void *)name);
    if (bytes <= 1) {
        pieces.ringbuf_discard(piece, BPF_RB_NO_WAKEUP);
        return NAME_UNREADABLE;
    }
    piece->bytes = piece->total = bytes - 1;
    pieces.ringbuf_submit(piece, BPF_RB_NO_WAKEUP);
    return NAME_SENT;
}

#define UNREADABLE 1 /* some of it, which was left empty */
#define NO_ROOM 2 /* in the ring buffer */

/* Sends what is left of `total` bytes, of which `sent` were, at most `most` pieces; gives how many bytes are sent then. `what` and
 * `most` are constants. To `failures` go UNREADABLE and NO_ROOM. */
static __always_inline u64 send_pieces(const struct about *about, enum piece_of what, u32 most, u64 from, u64 total, u64 sent,
                                       u64 *failures) {
    u64 failed = 0;
#pragma clang loop unroll(disable)
    for (u32 number = 0; number < most; number++) {
        sent = forgotten(sent, about->time);
        failed = forgotten(failed, about->time);
        if (sent >= total)
            break;
        struct piece *piece = reserve_piece(about, what, sent, total);
        if (!piece) {
            failed |= NO_ROOM;
            break;
        }
        u64 bytes = at_most(PIECE_BYTES, total - sent);
        u64 unreadable = hidden(read_user(piece->data, bytes, (void *)(from + sent))) >> 63;
        bytes = forgotten(bytes, about->time);
        failed |= unreadable;
        piece->bytes = choose(unreadable, 0, bytes);
        pieces.ringbuf_submit(piece, wakeup(number, what == PIECE_OF_MODULE ? MODULE_WAKE_EVERY : PIECE_WAKE_EVERY));
        sent += bytes;
    }
    *failures |= failed;
    return sent;
}

/* Its name, its code, and then its module's binary unless that was sent: a kernel that is launched but once has its
 * instructions, however large its module is. What is too much for once, or has no room, goes on at the next launch. */
static __always_inline void describe(u64 time, const struct layout *layout, const struct handle *key, u64 *values,
                                     struct kernel *kernel) {
    __builtin_memset(values, 0, VALUES * sizeof(*values));
    begin_values(layout, key->value, values);
    follow_what(layout, values);
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
        enum name_result result = send_name(&about, name);
        has_name = forgotten(result == NAME_SENT, time);
        failures = forgotten(result == NAME_UNREADABLE ? UNREADABLE : result == NAME_NO_ROOM ? NO_ROOM : 0, time);
    }
    u64 of_code = 0;
    sent = send_pieces(&about, PIECE_OF_CODE, MOST_CODE_PIECES, code, kernel->size, sent, &of_code);
    kernel->sent = choose(of_code & UNREADABLE, 0, sent) | has_name << 63;
    failures |= of_code;
    u64 is_whole = sent >= kernel->size, too_large = binary_bytes > MOST_BINARY_BYTES;
    if (module && !too_large) {
        module->sent = send_pieces(&about, PIECE_OF_MODULE, MOST_MODULE_PIECES, binary, binary_bytes, module->sent, &failures);
        is_whole &= module->sent >= binary_bytes;
    }
    is_whole = forgotten(is_whole, time);
    failures = forgotten(failures, time);
    if (is_whole && has_name && !failures) {
        kernel->described = DESCRIBED;
        count(KERNELS, 1);
        count(PIECES_LOST, too_large);
    } else {
        kernel->described += failures & UNREADABLE;
        count(PIECES_LOST, !!failures);
    }
}

/* How many kernels a call launches. */
static __always_inline u32 kernels_of(struct pt_regs *ctx, const struct entry *entry) {
    return entry->is_array ? integer_argument(ctx, entry->count) : 1;
}

/* A launch of one kernel, or of the next ones of an array; then what is left, and what is to be described: the verifier has no
 * room for that in this loop. */
static __always_inline void send_launches_by_handle(struct pt_regs *ctx, struct scratch *scratch, const struct entry *entry,
                                                    const struct layout *layout) {
    struct room *room = room_of(scratch);
    struct launched *launch = &room->launched;
    u64 *values = room->regs;
    u64 given = integer_argument(ctx, entry->handle) + entry->offset, time = launch->time;
    u64 many = kernels_of(ctx, entry), first = room->kernels_sent, undescribed = room->undescribed;
    enum counter failure;
    struct handle key = handle_of(ctx, entry, with_gpu(ctx, entry, layout, given));
    u64 list = entry->in_list ? ctx->di + entry->list_offset : 0;
#pragma clang loop unroll(disable)
    for (u32 i = 0; i < MOST_AT_ONCE; i++) {
        u64 number = hidden(i) + first;
        if (number >= many)
            break;
        struct kernel *kernel = 0;
        failure = HANDLES_UNREADABLE;
        if (!entry->is_array || !read_user(&key.value, 8, (void *)(given + 8 * number)))
            kernel = known_kernel(ctx, entry, layout, &key, values, &failure);
        send_launch(launch, kernel, list, forgotten(failure, time));
        u64 wanting = forgotten(kernel && kernel->described < TRIES, time);
        room->handles[below(MOST_UNDESCRIBED, undescribed)] = key.value;
        undescribed = forgotten(undescribed + (wanting & (undescribed < MOST_UNDESCRIBED - 1)), time);
    }
    room->kernels_sent = first + MOST_AT_ONCE;
    room->undescribed = undescribed;
    if (!first && many > 1)
        count(LAUNCHES, many - 1);
    if (room->kernels_sent < many) {
        launch->flags |= LAUNCH_GIVEN;
        phases.call(ctx, HANDLE_LAUNCHED);
        count(LAUNCHES_LOST, many - room->kernels_sent);
    }
    if (undescribed && !(launch->flags & LAUNCH_OTHER))
        phases.call(ctx, DESCRIBE);
}

/* Which function was called; NULL where there is no such one. */
static __always_inline struct entry *entry_of(struct pt_regs *ctx) {
    u32 slot = attach_cookie(ctx);
    return entries.lookup(&slot);
}

/* Of its driver; NULL likewise. */
static __always_inline struct layout *layout_of(const struct entry *entry) {
    u32 which = entry ? entry->layout : -1;
    return layouts.lookup(&which);
}

int on_handle_launch(struct pt_regs *ctx) {
    u64 time = bpf_ktime_get_ns();
    struct entry *entry = entry_of(ctx);
    if (entry && kernels_of(ctx, entry))
        begin_launch(ctx, time, HANDLE_LAUNCHED);
    return 0;
}

typedef void send_t(struct pt_regs *ctx, struct scratch *scratch, const struct entry *entry, const struct layout *layout);

/* Goes on where the walk of a launch ended; `send` sends its kernels. */
static __always_inline int end_launch_by(struct pt_regs *ctx, send_t *send) {
    struct entry *entry = entry_of(ctx);
    struct layout *layout = layout_of(entry);
    struct scratch *scratch = launched_before();
    if (!scratch)
        return 0;
    if (entry && layout) {
        room_of(scratch)->launched.flags |= entry->flags;
        send(ctx, scratch, entry, layout);
    }
    end_launch(scratch);
    return 0;
}

int on_handle_launched(struct pt_regs *ctx) {
    return end_launch_by(ctx, send_launches_by_handle);
}

int on_describe(struct pt_regs *ctx) {
    struct entry *entry = entry_of(ctx);
    struct layout *layout = layout_of(entry);
    struct scratch *scratch = own_scratch(owner_of(0));
    if (!scratch)
        return 0;
    struct room *room = room_of(scratch);
    if (entry && layout && room->undescribed) {
        u64 left = --room->undescribed;
        struct handle key = handle_of(ctx, entry, room->handles[below(MOST_UNDESCRIBED, left)]);
        struct kernel *kernel = kernels_seen.lookup(&key);
        if (kernel && kernel->described < TRIES)
            describe(room->launched.time, layout, &key, room->regs, kernel);
        if (room->undescribed)
            phases.call(ctx, DESCRIBE);
    }
    end_launch(scratch);
    return 0;
}

typedef void forget_t(struct handle *key);

/* Forgets what ends, for each GPU on which it can be. */
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
    occupants.delete(&place); /* what is left in the process's memory may look like a kernel for long */
    kernels_seen.delete(key);
}

int on_kernel_gone(struct pt_regs *ctx) {
    return forget_by(ctx, forget_kernel);
}

static __always_inline void forget_module(struct handle *key) {
    modules_seen.delete(key);
}

int on_module_gone(struct pt_regs *ctx) {
    return forget_by(ctx, forget_module);
}
