// SPDX-License-Identifier: GPL-2.0
/* Python frames of CPython 3.11 and later, read from the interpreter's own structures (compiled after unwind.c).
 *
 * User space tells which processes have an interpreter, and the offsets of the structures' members. The current thread's state
 * is found by its thread id, the address in the fs register, which is valid while the thread has released the GIL, and in any
 * pid namespace. The state leads to a linked list of frames, from callees to callers. The frames are walked before the C stack,
 * and are part of a stack's id.
 *
 * A thread that runs code of several interpreters at once has a state with frames in each. The frames of one state follow those
 * of another; user space sorts them by where their evaluation loops are on the C stack.
 *
 * One evaluation loop, a C function, runs many Python frames. They end at a structure in that function's frame on the C stack:
 * a _PyCFrame in 3.11, a shim frame in later versions. By its address user space puts the loop's Python frames into the C
 * stack.
 *
 * Names and line tables are in code objects, which may have been freed when user space reads. Each is copied when it is first
 * seen in a stack, and again when another code object has its address.
 *
 * The loader sets TASK_FSBASE.
 */
#define PYTHON_FRAMES_PER_PROGRAM 32
#define CODES_PER_PROGRAM 64
#define STATES_PER_PROGRAM 64
#define NEAR_STACK (1ULL << 23) /* bytes above the stack pointer that may be the stack */
#define STATE_BYTES 256     /* the start of a PyThreadState, with the members that are read at each launch */
#define MOST_STATES 512     /* maximum number of thread states and interpreters in a search */
#define FIRST_STATES 8      /* new states are at the start of the list: a C thread gets a new one for each call of Python */
#define NO_STATE_NS 20000000ULL /* after a search, only FIRST_STATES are searched for this time */
#define TICK_NS 10000000ULL
#define CHECKED_NS 10000000ULL  /* after this time, code objects are checked again for changes, */
#define MOST_CHECKED_NS 320000000ULL /* and then, as long as nothing changes, after twice the time each time, up to this */
#define CODE_PROGRAMS 4     /* tail calls that send code objects; the remaining ones are sent with the next stack */
#define MOST_TABLE (21 * TABLE_BYTES) /* maximum length of a line table: 64 KiB */

struct python_thread {
    u64 state;              /* the last known one, which may have no frames; 0 for none */
    u64 interpreter;        /* of that state */
    u64 until;              /* before this time, a search ends after FIRST_STATES, */
    u64 head;               /* and is not made while this is the first state of the list, and another thread's, */
    u64 second;             /* and this is the one after it */
    u64 is_sure;            /* the search that found no frames has seen all states */
};
BPF_TABLE("lru_hash", u64, struct python_thread, python_threads, ANY);
struct check {
    u64 until;              /* before this time, code objects are not checked again */
    u64 after;              /* how long that is, in ns */
};
BPF_TABLE("lru_hash", u64, struct check, codes_checked, ANY); /* by the hash of a stack's Python frames */

struct code_key {
    u64 code;
    u32 pid;
    u32 epoch;              /* each output file gets all code objects */
};
BPF_TABLE("lru_hash", struct code_key, u64, codes_sent, ANY); /* identity of the code object that was sent */

BPF_RINGBUF_OUTPUT(codes, ANY);

/* Reads a word of the process; 0 if it is unreadable: the helper then clears it. */
static __always_inline u64 word_at(u64 at) {
    u64 word;
    read_user(&word, 8, (void *)at);
    return word;
}

/* The same; notes whether it is unreadable. */
static __always_inline u64 noted_word_at(struct scratch *scratch, u64 at) {
    u64 word;
    scratch->unreadable |= is_set(read_user(&word, 8, (void *)at));
    return word;
}

/* Returns the half of the memory for a frame at `at`: evaluation loops have some on the stack. */
static __always_inline u64 half_of(const struct scratch *scratch, u64 at) {
    return hidden(at - scratch->copied.start.sp) < NEAR_STACK ? STACK_HALF : OTHER_HALF;
}

/* Returns a word of the frame at `at`, whose pages the memory has. */
static __always_inline u64 field(const struct memory *memory, u64 at, u64 half, u16 offset) {
    return memory->words[index_of(at + offset, half)];
}

static __always_inline u64 byte_field(const struct memory *memory, u64 at, u64 half, u16 offset) {
    return field(memory, at, half, offset) >> (offset & 7) * 8 & 255;
}

/* Returns a word of the stack; 0 if it is unreadable, which is noted. */
static __always_inline u64 stack_word(struct scratch *scratch, u64 at) {
    struct memory *memory = memory_of(scratch);
    if (memory && !read_word(scratch, memory, at, &scratch->pair[0]))
        return scratch->pair[0];
    scratch->unreadable = 1;
    return 0;
}

/* Returns the address of a thread's innermost frame. */
static __always_inline u64 first_frame(struct scratch *scratch, const struct python_layout *layout, u64 state) {
    if (layout->thread_cframe)
        state = noted_word_at(scratch, state + layout->thread_cframe);
    return noted_word_at(scratch, state + layout->thread_frame);
}

/* Returns the offset of a thread's state at which its frames begin, or the structure that points to them. */
static __always_inline u16 start_of_frames(const struct python_layout *layout) {
    return layout->thread_cframe ? layout->thread_cframe : layout->thread_frame;
}

/* Prepares the walk of a thread's frames from the word at start_of_frames; returns the next phase: PYTHON, or WALK if the
 * thread has no frames. */
static __always_inline enum phase begin_frames(struct scratch *scratch, u64 start) {
    const struct python *python = &scratch->process.python;
    u64 has_cframe = is_set(python->layout.thread_cframe);
    scratch->first_cframe = scratch->cframe = start & -has_cframe;
    u64 at = start + python->layout.thread_frame, is_on_stack = hidden(at - scratch->copied.start.sp) < NEAR_STACK;
    scratch->frame = hidden(!has_cframe) ? start : is_on_stack ? stack_word(scratch, at) : noted_word_at(scratch, at);
    if (!scratch->frame)
        return WALK;
    scratch->hashes[0] = mixed(scratch->hashes[0], python->changes);
    return PYTHON;
}

/* Returns a word of the thread's state that is in the window: one read costs less than one for each member. */
static __always_inline u64 state_word(const struct scratch *scratch, u64 state, u64 offset) {
    return offset <= STATE_BYTES - 8 ? scratch->window[below(STATE_BYTES / 8, offset / 8)] : word_at(state + offset);
}

/* Whether this is the current thread's state, and still in its interpreter's list: freed memory may keep its content. The
 * pointer to the previous state precedes the pointer to the next one. Puts the state into the window. */
static __always_inline int is_state(struct scratch *scratch, const struct python_layout *layout, u64 state, u64 interpreter) {
    read_user(scratch->window, STATE_BYTES, (void *)state); /* all zeros on failure */
    u64 before = state_word(scratch, state, layout->thread_next - 8);
    u64 link = before ? before + layout->thread_next : interpreter + layout->threads_head;
    return state_word(scratch, state, layout->thread_id) == thread_pointer() && word_at(link) == state;
}

/* Sets the position of a search to the start of an interpreter's states. */
static __always_inline void go_to(struct scratch *scratch, const struct python_layout *layout, u64 interpreter) {
    scratch->interpreter = interpreter;
    scratch->thread = interpreter ? noted_word_at(scratch, interpreter + layout->threads_head) : 0;
}

/* Whether a state runs on the current thread's C stack. In 3.11 and 3.12 another thread may have created it. Above the stack of
 * a thread there is what fs points to; above that of the main thread there is nothing. */
static __always_inline u64 runs_here(const struct scratch *scratch, const struct python_layout *layout, u64 state) {
    u64 pointer = thread_pointer(), sp = scratch->copied.start.sp, end = choose(hidden(pointer < sp), 1ULL << ADDRESS_BITS, pointer);
    if (layout->thread_cframe)
        return word_at(state + layout->thread_cframe) - sp < end - sp;
    return word_at(state + layout->thread_id) == pointer;
}

/* Begins the walk of the frames of the thread's first state; its states in other interpreters, if there are any, follow. */
static __always_inline enum phase begin_first(struct scratch *scratch, u64 state, u64 start) {
    go_to(scratch, &scratch->process.python.layout, scratch->several);
    scratch->first_state = state;
    scratch->states_left = MOST_STATES;
    return begin_frames(scratch, start);
}

/* Ends the walk of Python frames; returns the next phase. */
static __always_inline enum phase end_python(struct scratch *scratch, u64 now) {
    u64 id = scratch->hashes[0];
    struct check *checked = codes_checked.lookup(&id);
    scratch->codes = scratch->code_offset = scratch->code_programs = 0;
    scratch->checked_until = checked ? checked->until : 0;
    return now < scratch->checked_until ? WALK : CODES;
}

/* Begins the walk of Python frames; returns the next phase. */
static __always_inline enum phase begin_python(struct scratch *scratch, u64 who, u64 now) {
    struct known_process *process = &scratch->process;
    const struct python_layout *layout = &process->python.layout;
    scratch->now = now;
    scratch->python = 0;
    scratch->python_state = PYTHON_NONE;
    scratch->several = scratch->first_state = scratch->checked_until = 0;
    scratch->runs_no_python = scratch->unreadable = scratch->own_state = 0;
    if (!process->has_python || process->python.born != scratch->copied.of.born / TICK_NS)
        return WALK;
    u64 interpreter = noted_word_at(scratch, process->python.runtime + layout->interpreters_head);
    if (interpreter != process->last) { /* new interpreters come before it: if it is the first one, it is the only one */
        scratch->several = word_at(interpreter + layout->interpreter_next) ? interpreter : 0;
        process->last = scratch->several ? 0 : interpreter;
    }
    struct python_thread *known = 0;
    u64 state = scratch->last_state, of = scratch->last_interpreter;
    if (scratch->last_thread != who) {
        known = python_threads.lookup(&who);
        state = known ? known->state : 0;
        of = known ? known->interpreter : 0;
    }
    scratch->last_thread = 0;
    if (hidden(state) && is_state(scratch, layout, state, of) && (!scratch->several || runs_here(scratch, layout, state))) {
        if (begin_first(scratch, state, state_word(scratch, state, start_of_frames(layout))) == PYTHON) {
            scratch->last_thread = who;
            scratch->last_state = state;
            scratch->last_interpreter = of;
            return PYTHON;
        }
        scratch->own_state = state;
        scratch->own_interpreter = of;
    }
    scratch->first_state = 0;
    known = python_threads.lookup(&who);
    u64 is_soon = known && now < known->until;
    go_to(scratch, layout, interpreter);
    /* A new state is the first one. It may be where another thread's was, whose memory was freed. */
    u64 first = hidden(scratch->thread), is_own = first == scratch->own_state;
    if (is_soon && first && first == known->head &&
        (is_own || (noted_word_at(scratch, first + layout->thread_id) != thread_pointer() &&
                    noted_word_at(scratch, first + layout->thread_next) == known->second))) {
        scratch->runs_no_python = known->is_sure & ~scratch->unreadable;
        return WALK;
    }
    scratch->states_left = is_soon ? FIRST_STATES : MOST_STATES;
    return STATE;
}

/* Continues with the frames of the state that a search found after the first one; returns the next phase. */
static __always_inline enum phase begin_other(struct scratch *scratch, u64 state, u64 interpreter, u64 now) {
    const struct python_layout *layout = &scratch->process.python.layout;
    u64 at = scratch->python;
    if (!state || at >= MAX_PYTHON - 2) {
        scratch->python_state = choose(hidden(state | scratch->interpreter) > 0, PYTHON_DEEP, PYTHON_WHOLE);
        return end_python(scratch, now);
    }
    scratch->frames[below(MAX_PYTHON, at)].code = 0; /* between the frames of two states */
    scratch->frames[below(MAX_PYTHON, at)].instruction = 0;
    scratch->python = at + 1;
    go_to(scratch, layout, word_at(interpreter + layout->interpreter_next));
    u64 start = word_at(state + start_of_frames(layout));
    return begin_frames(scratch, start) == PYTHON ? PYTHON : end_python(scratch, now);
}

/* Searches a state of the thread, the first one or another; returns the next phase. */
static __always_inline enum phase find_state(struct scratch *scratch, u64 who, u64 now) {
    const struct python *python = &scratch->process.python;
    struct python_thread *known = python_threads.lookup(&who), found = {.until = now + NO_STATE_NS};
    if (known) {
        found.state = known->state;
        found.interpreter = known->interpreter;
    }
    u64 is_found = 0, until = known ? known->until : 0, first = scratch->first_state;
    const struct python_layout *layout = &python->layout;
    u64 id = thread_pointer(), numbers;
    begin_numbers(&numbers, 0, STATES_PER_PROGRAM);
#pragma clang loop unroll(disable)
    for (u64 i = 0; next_number(&numbers, i, STATES_PER_PROGRAM); i = number_after(i, now)) {
        u64 interpreter = *(volatile u64 *)&scratch->interpreter, state = *(volatile u64 *)&scratch->thread;
        u64 left = *(volatile u64 *)&scratch->states_left;
        if (!interpreter || !left)
            break;
        scratch->states_left = left - 1;
        /* A thread that created a subinterpreter has a state without frames in it, too. */
        u64 is_here = state && state != first &&
                      (scratch->several ? runs_here(scratch, layout, state) : noted_word_at(scratch, state + layout->thread_id) == id);
        if (is_here && first_frame(scratch, layout, state)) {
            found.state = state;
            found.interpreter = interpreter;
            is_found = 1;
            break;
        }
        if (is_here && !scratch->own_state) {
            scratch->own_state = state;
            scratch->own_interpreter = interpreter;
        }
        if (state) {
            scratch->thread = noted_word_at(scratch, state + layout->thread_next);
            continue;
        }
        go_to(scratch, layout, noted_word_at(scratch, interpreter + layout->interpreter_next));
    }
    end_numbers(&numbers);
    if (!is_found && scratch->interpreter && scratch->states_left)
        return STATE;
    if (first)
        return begin_other(scratch, is_found ? found.state : 0, found.interpreter, now);
    if (!is_found) {
        found.state = scratch->own_state ? scratch->own_state : found.state;
        found.interpreter = scratch->own_state ? scratch->own_interpreter : found.interpreter;
        found.head = word_at(word_at(python->runtime + layout->interpreters_head) + layout->threads_head);
        found.second = word_at(found.head + layout->thread_next);
        found.is_sure = scratch->runs_no_python = found.head && !scratch->interpreter && !scratch->unreadable;
    }
    if (!is_found && now < until)
        found.until = until;
    python_threads.update(&who, &found);
    return is_found ? begin_first(scratch, found.state, word_at(found.state + start_of_frames(layout))) : WALK;
}

/* Walks PYTHON_FRAMES_PER_PROGRAM frames; returns the next phase. For samples, which are few, an iterator counts them, with which
 * the verifier is done in a fraction of the time. */
static __always_inline enum phase walk_python(struct scratch *scratch, u64 is_sample) {
    u64 at = scratch->frame, cframe = scratch->cframe, count = scratch->python, id = scratch->hashes[0],
        check = scratch->hashes[1];
    const struct python_layout *layout = &scratch->process.python.layout;
    struct memory *memory = memory_of(scratch);
    u64 goes_on = 0, numbers;
    if (!memory)
        return WALK;
    scratch->python_state = PYTHON_DAMAGED;
    if (is_sample)
        begin_numbers(&numbers, 0, PYTHON_FRAMES_PER_PROGRAM + 1);
#pragma clang loop unroll(disable)
    for (u64 i = 0; is_sample ? next_number(&numbers, i, PYTHON_FRAMES_PER_PROGRAM + 1) : i <= PYTHON_FRAMES_PER_PROGRAM;
         i = is_sample ? number_after(i, at) : i + 1) {
        goes_on = 1;
        if (i == PYTHON_FRAMES_PER_PROGRAM)
            break;
        goes_on = 0;
        if (is_sample) {
            u64 unknown = *(volatile u64 *)&scratch->owner;
            at = forgotten(at, unknown);
            count = forgotten(count, unknown);
            id = forgotten(id, unknown);
            check = forgotten(check, unknown);
            cframe = forgotten(cframe, unknown);
        }
        if (!at) {
            scratch->python_state = PYTHON_WHOLE;
            break;
        }
        if (count >= MAX_PYTHON - 1) {
            scratch->python_state = PYTHON_DEEP;
            break;
        }
        u64 half = half_of(scratch, at);
        u64 end = at + layout->frame_bytes - 8;
        if (at & 7 || hold(scratch, memory, at, half) || (hidden(at ^ end) >= PAGE && hold(scratch, memory, end, half)))
            break;
        u64 code = field(memory, at, half, layout->frame_code) & ~7ULL;
        u64 instruction = field(memory, at, half, layout->frame_instruction);
        u64 has_entry = is_set(layout->frame_is_entry);
        u64 is_shim = ~has_entry & (2 - byte_field(memory, at, half, layout->frame_owner)) >> 63; /* owner 3 and above */
        u64 is_last = has_entry & is_set(byte_field(memory, at, half, layout->frame_is_entry));
        u64 to = below(MAX_PYTHON, count);
        scratch->frames[to].code = choose(is_shim, 0, code);
        scratch->frames[to].instruction = choose(is_shim, at, instruction);
        scratch->frames_at[to] = at | (field(memory, at, half, layout->frame_code) & 7);
        add_to_hashes(&id, &check, choose(is_shim, 1, code + (instruction << 16)));
        count++;
        at = field(memory, at, half, layout->frame_previous); /* first: the next read may take the place of the frame's page */
        if (hidden(is_last)) {
            to = below(MAX_PYTHON, count);
            scratch->frames[to].code = 0;
            scratch->frames[to].instruction = cframe;
            scratch->frames_at[to] = 0;
            add_to_hashes(&id, &check, 1);
            count++;
            if (read_word(scratch, memory, cframe + layout->cframe_previous, &scratch->pair[0]))
                scratch->pair[0] = 0;
            cframe = scratch->pair[0];
        }
        count = forgotten(count, at);
        cframe = forgotten(cframe, at);
    }
    if (is_sample)
        end_numbers(&numbers);
    scratch->frame = at;
    scratch->cframe = cframe;
    scratch->python = count;
    scratch->hashes[0] = id;
    scratch->hashes[1] = check;
    if (goes_on)
        return PYTHON;
    return scratch->python_state == PYTHON_WHOLE && scratch->interpreter ? STATE : end_python(scratch, scratch->now);
}

/* Returns a number that distinguishes code objects at the same address. */
static __always_inline u64 identity_of(const struct python_layout *layout, u64 code) {
    if (layout->code_version)
        return (u32)word_at(code + layout->code_version) | 1ULL << 32;
    return mixed(mixed(word_at(code + layout->code_filename), word_at(code + layout->code_qualname)),
                 word_at(code + layout->code_linetable)) | 1;
}

/* Reads the start of an object; the memory after the object's page may be unmapped. Returns 0 on success. */
static __always_inline long read_object(u8 *to, u64 size, u64 at) {
    if (!read_user(to, size, (void *)at))
        return 0;
    u64 bytes = at_most(size, PAGE - (at & (PAGE - 1)));
    return read_user(to, bytes, (void *)at);
}

/* Sends a code object with its line table from an offset on. Returns the offset of the rest, 0 if nothing is left. */
static __always_inline u64 send_code(const struct python_layout *layout, const struct code_key *key, u64 identity, u64 offset,
                                     u64 now) {
    u64 table = word_at(key->code + layout->code_linetable);
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
    record->first_line = word_at(key->code + layout->code_first_line);
    long failed = read_object(record->filename, TEXT_BYTES, word_at(key->code + layout->code_filename));
    failed |= read_object(record->qualname, TEXT_BYTES, word_at(key->code + layout->code_qualname));
    failed |= read_object(record->table, TABLE_BYTES, table + offset);
    if (failed) {
        codes.ringbuf_discard(record, BPF_RB_NO_WAKEUP);
        count(CODES_LOST, 1);
        return 0;
    }
    codes.ringbuf_submit(record, wakeup(record, sizeof(*record), CODE_WAKE_BYTES));
    count(CODES_SENT, 1);
    u64 bytes = at_most(MOST_TABLE, word_at(table + layout->bytes_length) + layout->bytes_data);
    if (offset + TABLE_BYTES < bytes)
        return offset + TABLE_BYTES;
    codes_sent.update((struct code_key *)key, &identity);
    return 0;
}

/* Sends code objects of the stack that are new or have changed; returns the next phase. */
static __always_inline enum phase send_codes(struct scratch *scratch, u32 pid, u64 now) {
    struct python *python = pythons.lookup(&pid);
    u64 is_end = 0, numbers;
    if (!python)
        return WALK;
    begin_numbers(&numbers, 0, CODES_PER_PROGRAM);
#pragma clang loop unroll(disable)
    for (u64 i = 0; next_number(&numbers, i, CODES_PER_PROGRAM); i = number_after(i, now)) {
        u64 at = *(volatile u64 *)&scratch->codes, offset = *(volatile u64 *)&scratch->code_offset;
        if (at >= *(volatile u64 *)&scratch->python) {
            is_end = 1;
            break;
        }
        scratch->codes = at + 1;
        scratch->code_offset = 0;
        struct code_key key = {.code = scratch->frames[below(MAX_PYTHON, at)].code, .pid = pid, .epoch = scratch->epoch};
        if (!key.code)
            continue;
        /* Includes mm: without address-space randomisation, another program after exec may have other code at the same
         * address. */
        u64 identity = mixed(identity_of(&python->layout, key.code), scratch->copied.of.mm), *known = codes_sent.lookup(&key);
        if (known && *known == identity)
            continue;
        if (known && !offset) { /* from now on, stacks with this address are different ones */
            __sync_fetch_and_add(&python->changes, 1);
            note_change();
            scratch->hashes[0] = mixed(scratch->hashes[0], identity);
        }
        offset = send_code(&python->layout, &key, identity, offset, now);
        if (offset) {
            scratch->codes = at;
            scratch->code_offset = offset;
        }
    }
    end_numbers(&numbers);
    if (is_end) {
        struct check *before = codes_checked.lookup(&scratch->hashes[0]), next = {.after = CHECKED_NS};
        if (before)
            next.after = at_most(MOST_CHECKED_NS, 2 * before->after);
        next.until = scratch->checked_until = now + next.after;
        codes_checked.update(&scratch->hashes[0], &next);
        return WALK;
    }
    return ++scratch->code_programs < CODE_PROGRAMS ? CODES : WALK;
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
        phases.call(ctx, walk_python(scratch, 0));
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
        sample_phases.call(ctx, walk_python(scratch, 1));
    return 0;
}

int on_sample_codes(struct bpf_perf_event_data *ctx) {
    struct scratch *scratch = own_scratch(owner_of(1));
    if (scratch)
        sample_phases.call(ctx, send_codes(scratch, bpf_get_current_pid_tgid() >> 32, bpf_ktime_get_ns()));
    return 0;
}
