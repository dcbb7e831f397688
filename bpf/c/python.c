// SPDX-License-Identifier: GPL-2.0
/* Frames of CPython 3.11 and later, as the interpreter itself keeps them (compiled behind unwind.c).
 *
 * User space tells in which processes an interpreter is, and where that keeps what a walk reads. Of the current thread the state is
 * found by its thread id, which is what the fs register points to: that holds while the thread has released the GIL, and in any pid
 * namespace. From the state on, frames are linked, callers behind callees. They are walked before the C stack is, and are part of a
 * stack's id.
 *
 * One evaluation loop, a C function, runs many Python frames. What ends the frames of a loop lies in that function's frame on the C
 * stack: by that address user space puts the Python frames in its place.
 *
 * Names and line tables are in code objects, which may be gone when user space looks. Each is copied when a stack with it is first met,
 * and again when another one has its address.
 *
 * Numbers without a definition here: TASK_FSBASE is set by the loader.
 */
#define PYTHON_A_TURN 64
#define CODES_A_TURN 64
#define STATES_A_TURN 64
#define MOST_STATES 512     /* of threads and interpreters that are looked through for a thread's */
#define FIRST_STATES 8      /* where new ones are: a thread of C has another one each time that it calls Python */
#define NO_STATE_NS 20000000ULL /* for how long a thread without a state is not looked for again among all */
#define TICK_NS 10000000ULL
#define CHECKED_NS 10000000ULL  /* after that time it is seen again whether code objects are still the same */
#define CODE_TURNS 6        /* the rest of what is new comes with the next stack */
#define MOST_TABLE (21 * TABLE_BYTES) /* of it in all: 64 KiB */

BPF_TABLE("lru_hash", u32, struct python, pythons, ANY);

struct python_thread {
    u64 state;              /* that it had last; 0: none */
    u64 interpreter;        /* whose that is */
    u64 until;              /* it is not looked for among all before */
};
BPF_TABLE("lru_hash", u64, struct python_thread, python_threads, ANY);
BPF_TABLE("lru_hash", u64, u64, codes_checked, ANY); /* when, by the hash of the frames of Python */

struct code_key {
    u64 code;
    u32 pid;
    u32 epoch;              /* each output file gets all of them */
};
BPF_TABLE("lru_hash", struct code_key, u64, codes_sent, ANY); /* what it was recognised by */

BPF_RINGBUF_OUTPUT(codes, ANY);

static __always_inline u64 word_of(u64 at) {
    u64 word = 0;
    if (read_user(&word, 8, (void *)at))
        return 0;
    return word;
}

/* A word of the frame at `at`, in the window. */
static __always_inline u64 field(const struct scratch *scratch, u64 at, u16 offset) {
    return scratch->frames_window[below(WINDOW / 8, (at - scratch->frames_base + offset) / 8)];
}

static __always_inline u64 byte_field(const struct scratch *scratch, u64 at, u16 offset) {
    return field(scratch, at, offset) >> (offset & 7) * 8 & 255;
}

/* Reads the frame at `at`, and what lies below it in its page, where its callers are. */
static __always_inline long read_frame(struct scratch *scratch, u64 at, u64 frame_bytes) {
    if (at - scratch->frames_base <= scratch->frames_limit)
        return 0;
    u64 page = at & -(u64)PAGE, start = at + frame_bytes - WINDOW;
    start = start > at || start < page ? page : start;
    u64 bytes = at_most(WINDOW, at + frame_bytes - start);
    if (bytes < frame_bytes || read_user(scratch->frames_window, bytes, (void *)start))
        return -1;
    scratch->frames_base = start;
    scratch->frames_limit = bytes - frame_bytes;
    return 0;
}

static __always_inline u64 first_frame(const struct python_layout *layout, u64 state) {
    if (layout->thread_cframe)
        state = word_of(state + layout->thread_cframe);
    return word_of(state + layout->thread_frame);
}

/* Begins with the frames of a thread; gives what follows: if it has none, no walk through them. */
static __always_inline enum phase begin_frames(struct scratch *scratch, const struct python *python, u64 state) {
    scratch->cframe = 0;
    if (python->layout.thread_cframe)
        state = scratch->cframe = word_of(state + python->layout.thread_cframe);
    scratch->frame = word_of(state + python->layout.thread_frame);
    scratch->frames_base = scratch->frames_limit = 0;
    scratch->hashes[0] = mixed(scratch->hashes[0], python->changes);
    return scratch->frame ? PYTHON : WALK;
}

static __always_inline u64 thread_pointer(void) {
    return *(u64 *)((u8 *)task_now() + TASK_FSBASE);
}

/* Whether this is the thread's state, and still in the list of its interpreter's: what is freed keeps much of its content. The link to
 * the one before it precedes that to the next. */
static __always_inline int is_state(const struct python_layout *layout, u64 state, u64 interpreter) {
    u64 before = word_of(state + layout->thread_next - 8);
    u64 link = before ? before + layout->thread_next : interpreter + layout->threads_head;
    return word_of(state + layout->thread_id) == thread_pointer() && word_of(link) == state;
}

/* Begins; gives what follows. */
static __always_inline enum phase begin_python(struct scratch *scratch, u64 who, u64 now) {
    u32 pid = who >> 32;
    struct python *python = FRAME_POINTERS_ONLY ? 0 : pythons.lookup(&pid);
    scratch->python = 0;
    scratch->python_state = PYTHON_NONE;
    if (!python || python->born != scratch->copied.of.born / TICK_NS)
        return WALK;
    struct python_thread *known = python_threads.lookup(&who);
    u64 state = known ? known->state : 0;
    if (state && is_state(&python->layout, state, known->interpreter) && begin_frames(scratch, python, state) == PYTHON)
        return PYTHON;
    u64 is_soon = known && now < known->until;
    if (is_soon && !state)
        return WALK;
    scratch->interpreter = word_of(python->runtime + python->layout.interpreters_head);
    scratch->thread = scratch->interpreter ? word_of(scratch->interpreter + python->layout.threads_head) : 0;
    scratch->states_left = is_soon ? FIRST_STATES : MOST_STATES;
    return STATE;
}

/* Looks for the thread's state; gives what follows. */
static __always_inline enum phase find_state(struct scratch *scratch, u64 who, u64 now) {
    u32 pid = who >> 32;
    struct python *python = pythons.lookup(&pid);
    struct python_thread *known = python_threads.lookup(&who), found = {.until = now + NO_STATE_NS};
    if (known) {
        found.state = known->state;
        found.interpreter = known->interpreter;
    }
    u64 is_found = 0;
    if (!python)
        return WALK;
    const struct python_layout *layout = &python->layout;
    u64 id = thread_pointer();
#pragma clang loop unroll(disable)
    for (u32 i = 0; i < STATES_A_TURN; i++) {
        u64 interpreter = *(volatile u64 *)&scratch->interpreter, state = *(volatile u64 *)&scratch->thread;
        u64 left = *(volatile u64 *)&scratch->states_left;
        if (!interpreter || !left)
            break;
        scratch->states_left = left - 1;
        /* Who creates a subinterpreter has a state in that, too, without frames. */
        if (state && word_of(state + layout->thread_id) == id && first_frame(layout, state)) {
            found.state = state;
            found.interpreter = interpreter;
            is_found = 1;
            break;
        }
        if (state) {
            scratch->thread = word_of(state + layout->thread_next);
            continue;
        }
        interpreter = word_of(interpreter + layout->interpreter_next);
        scratch->interpreter = interpreter;
        scratch->thread = interpreter ? word_of(interpreter + layout->threads_head) : 0;
    }
    if (!is_found && scratch->interpreter && scratch->states_left)
        return STATE;
    if (is_found || !known || now >= known->until)
        python_threads.update(&who, &found);
    return is_found ? begin_frames(scratch, python, found.state) : WALK;
}

/* Walks some frames; gives what follows. */
static __always_inline enum phase walk_python(struct scratch *scratch, u32 pid, u64 now) {
    struct python *python = pythons.lookup(&pid);
    u64 at = scratch->frame, cframe = scratch->cframe, count = scratch->python, id = scratch->hashes[0], check = scratch->hashes[1];
    int goes_on = 0;
    if (!python)
        return WALK;
    const struct python_layout *layout = &python->layout;
    scratch->python_state = PYTHON_DAMAGED;
#pragma clang loop unroll(disable)
    for (u32 i = 0; i <= PYTHON_A_TURN; i++) {
        goes_on = 1;
        if (i == PYTHON_A_TURN)
            break;
        goes_on = 0;
        if (!at) {
            scratch->python_state = PYTHON_WHOLE;
            break;
        }
        if (count >= MAX_PYTHON - 1) {
            scratch->python_state = PYTHON_DEEP;
            break;
        }
        if (at & 7 || read_frame(scratch, at, layout->frame_bytes))
            break;
        u64 code = field(scratch, at, layout->frame_code) & ~7ULL, instruction = field(scratch, at, layout->frame_instruction);
        u64 has_entry = layout->frame_is_entry != 0;
        u64 is_shim = !has_entry & (byte_field(scratch, at, layout->frame_owner) >= 3);
        u64 is_last = has_entry & (byte_field(scratch, at, layout->frame_is_entry) != 0);
        u64 to = below(MAX_PYTHON, count);
        scratch->frames[to].code = choose(is_shim, 0, code);
        scratch->frames[to].instruction = choose(is_shim, at, instruction);
        add_to_hashes(&id, &check, choose(is_shim, 1, code + (instruction << 16)));
        count++;
        if (hidden(is_last)) {
            to = below(MAX_PYTHON, count);
            scratch->frames[to].code = 0;
            scratch->frames[to].instruction = cframe;
            add_to_hashes(&id, &check, 1);
            count++;
            cframe = word_of(cframe + layout->cframe_previous);
        }
        at = field(scratch, at, layout->frame_previous);
        count = forgotten(count, now);
        cframe = forgotten(cframe, now);
    }
    scratch->frame = at;
    scratch->cframe = cframe;
    scratch->python = count;
    scratch->hashes[0] = id;
    scratch->hashes[1] = check;
    if (goes_on)
        return PYTHON;
    u64 *checked = codes_checked.lookup(&id);
    scratch->codes = scratch->code_offset = scratch->code_turns = 0;
    return checked && now < *checked + CHECKED_NS ? WALK : CODES;
}

/* What tells a code object apart from another one at its address. */
static __always_inline u64 identity_of(const struct python_layout *layout, u64 code) {
    if (layout->code_version)
        return (u32)word_of(code + layout->code_version) | 1ULL << 32;
    return mixed(mixed(word_of(code + layout->code_filename), word_of(code + layout->code_qualname)),
                 word_of(code + layout->code_linetable)) | 1;
}

/* What lies behind an object may be no memory. */
static __always_inline long read_object(u8 *to, u64 size, u64 at) {
    if (!read_user(to, size, (void *)at))
        return 0;
    u64 bytes = at_most(size, PAGE - (at & (PAGE - 1)));
    return read_user(to, bytes, (void *)at);
}

/* Sends a code object, or from an offset on more of its table. Gives the offset of the rest, 0 where there is none. */
static __always_inline u64 send_code(const struct python_layout *layout, const struct code_key *key, u64 identity, u64 offset, u64 now) {
    u64 table = word_of(key->code + layout->code_linetable);
    struct code *record = codes.ringbuf_reserve(sizeof(struct code));
    if (!record) {
        count(CODES_LOST, 1);
        return 0;
    }
    record->time = now;
    record->pid = key->pid;
    record->code = key->code;
    record->identity = identity;
    record->offset = offset;
    record->first_line = word_of(key->code + layout->code_first_line);
    long failed = read_object(record->filename, TEXT_BYTES, word_of(key->code + layout->code_filename));
    failed |= read_object(record->qualname, TEXT_BYTES, word_of(key->code + layout->code_qualname));
    failed |= read_object(record->table, TABLE_BYTES, table + offset);
    if (failed) {
        codes.ringbuf_discard(record, BPF_RB_NO_WAKEUP);
        count(CODES_LOST, 1);
        return 0;
    }
    codes.ringbuf_submit(record, wakeup(count(CODES_SENT, 1), CODE_WAKE_EVERY));
    u64 bytes = at_most(MOST_TABLE, word_of(table + layout->bytes_length) + layout->bytes_data);
    if (offset + TABLE_BYTES < bytes)
        return offset + TABLE_BYTES;
    codes_sent.update((struct code_key *)key, &identity);
    return 0;
}

/* Sends the code objects of some frames that are new, or others than before; gives what follows. */
static __always_inline enum phase send_codes(struct scratch *scratch, u32 pid, u64 now) {
    struct python *python = pythons.lookup(&pid);
    if (!python)
        return WALK;
#pragma clang loop unroll(disable)
    for (u32 i = 0; i < CODES_A_TURN; i++) {
        u64 at = *(volatile u64 *)&scratch->codes, offset = *(volatile u64 *)&scratch->code_offset;
        if (at >= *(volatile u64 *)&scratch->python) {
            codes_checked.update(&scratch->hashes[0], &now);
            return WALK;
        }
        scratch->codes = at + 1;
        scratch->code_offset = 0;
        struct code_key key = {.code = scratch->frames[below(MAX_PYTHON, at)].code, .pid = pid, .epoch = scratch->epoch};
        if (!key.code)
            continue;
        /* After exec, other code may be at the same address, without a random layout. */
        u64 identity = mixed(identity_of(&python->layout, key.code), scratch->copied.of.mm), *known = codes_sent.lookup(&key);
        if (known && *known == identity)
            continue;
        if (known && !offset) { /* stacks with it are others now */
            __sync_fetch_and_add(&python->changes, 1);
            scratch->hashes[0] = mixed(scratch->hashes[0], identity);
        }
        offset = send_code(&python->layout, &key, identity, offset, now);
        if (offset) {
            scratch->codes = at;
            scratch->code_offset = offset;
        }
    }
    return ++scratch->code_turns < CODE_TURNS ? CODES : WALK;
}

int on_state(struct pt_regs *ctx) {
    struct scratch *scratch = own_scratch(owner_of(0));
    if (scratch)
        phases.call(ctx, find_state(scratch, bpf_get_current_pid_tgid(), bpf_ktime_get_ns()));
    return 0;
}

int on_sample_state(struct bpf_perf_event_data *ctx) {
    struct scratch *scratch = own_scratch(owner_of(1));
    if (scratch)
        sample_phases.call(ctx, find_state(scratch, bpf_get_current_pid_tgid(), bpf_ktime_get_ns()));
    return 0;
}

int on_python(struct pt_regs *ctx) {
    struct scratch *scratch = own_scratch(owner_of(0));
    if (scratch)
        phases.call(ctx, walk_python(scratch, bpf_get_current_pid_tgid() >> 32, bpf_ktime_get_ns()));
    return 0;
}

int on_codes(struct pt_regs *ctx) {
    struct scratch *scratch = own_scratch(owner_of(0));
    if (scratch)
        phases.call(ctx, send_codes(scratch, bpf_get_current_pid_tgid() >> 32, bpf_ktime_get_ns()));
    return 0;
}

int on_sample_python(struct bpf_perf_event_data *ctx) {
    struct scratch *scratch = own_scratch(owner_of(1));
    if (scratch)
        sample_phases.call(ctx, walk_python(scratch, bpf_get_current_pid_tgid() >> 32, bpf_ktime_get_ns()));
    return 0;
}

int on_sample_codes(struct bpf_perf_event_data *ctx) {
    struct scratch *scratch = own_scratch(owner_of(1));
    if (scratch)
        sample_phases.call(ctx, send_codes(scratch, bpf_get_current_pid_tgid() >> 32, bpf_ktime_get_ns()));
    return 0;
}
