// SPDX-License-Identifier: GPL-2.0
/* Stacks of launches that were walked before (compiled after launches.c): what a program repeats need not be walked again.
 *
 * A walk reads certain words: return addresses, saved frame pointers, where code that aligns its stack has kept the old stack
 * pointer, and of each Python frame its code object, its instruction, its caller and whether an evaluation loop ends there. If a
 * walk begins at the same place in the same state of the process, and all these words are what they were, then the stack is what
 * it was. To see that takes a third of the time of a walk.
 *
 * That the list of interpreters is what it was, and that the thread's state is in it, or in none, need not be seen: each evaluation
 * loop has a frame on the C stack, and a state that does not run Python has no frames. But a stack without Python frames has to
 * reach the start of the thread's own stack: Python may have switched to one of a coroutine.
 *
 * Of each CPU's stacks, each knows the one that followed it the last time. As programs repeat sequences of launches, the next
 * stack is that one nine times of ten. Only this one is compared, so that another one costs hardly more than without.
 */
#define KNOWN_STACKS 512   /* of each CPU; a power of two */
#define HALF_WORDS (HELD_PAGES * PAGE / 8ULL) /* as many words of the stack, and of Python frames elsewhere, are read */
#define WAYS 4             /* places for a stack, of which it takes one */
#define MOST_WORDS 128     /* of the stack, a power of two; stacks of which a walk reads more are not kept */
#define MOST_FRAMES 64     /* of Python, a power of two; the same */
#define MOST_KEPT (4 * KNOWN_STACKS) /* if so many were kept, and not met again, few of the next ones are kept */
#define KEPT_OF 64
#define KNOWN_NS 1000000000ULL /* after this time, a stack is walked again */
#define THREAD_BYTES (1 << 16) /* between the start of a thread's stack and what fs points to, above it */

struct known_stack {
    u64 stack;             /* the stack's id, which was sent; 0 for none */
    u64 writers;           /* threads that are about to write here: they preempt each other, on one CPU */
    u64 next;              /* number of the stack that followed, + 1; 0 for none */
    u64 until;             /* when it has to be walked again */
    u64 start;             /* hash of the process, its space and the output file */
    u64 salt;              /* the state of mappings */
    u64 python;            /* see python_of */
    u64 ip;                /* registers at the launch */
    u64 sp;
    u64 bp;                /* if the walk has used it, else 0 */
    u64 hash;              /* of all words */
    u64 state;             /* address of the word that leads to the Python frames; 0 if that is a word of the stack */
    u64 frame;             /* address of the lowest Python frame */
    u64 frame_bytes;       /* from there to the end of the highest one */
    u64 frames;            /* number of Python frames, */
    u16 frames_at[MOST_FRAMES]; /* and where they are, in words above the lowest one */
    u64 bytes;             /* from sp to the end of the highest word of the stack */
    u64 words;             /* number of words of the stack, */
    u16 words_at[MOST_WORDS]; /* and where they are, in words above sp */
};
BPF_PERCPU_ARRAY(known_stacks, struct known_stack, KNOWN_STACKS);

/* Returns the stack with a number + 1. */
static __always_inline struct known_stack *known_with(u64 number) {
    u32 index = below(KNOWN_STACKS, number - 1);
    return number ? known_stacks.lookup(&index) : 0;
}

/* Returns 0 if the process is not known to run Python, else how often code objects have changed, + 1. */
static __always_inline u64 python_of(const struct known_process *process) {
    return process->has_python ? process->python.changes + 1 : 0;
}

/* Returns the hash of the words of a stack; 0 if one is unreadable. A read takes some 180 ns, and 50 more for each 4096 bytes:
 * there is one for all words of the stack, and one for all Python frames. */
static __always_inline u64 hash_of(const struct scratch *scratch, struct memory *memory, const struct known_stack *known) {
    const struct python_layout *layout = &scratch->process.python.layout;
    u64 sp = scratch->copied.start.sp, frames = known->frames, words = known->words, hash = frames;
    u64 *others = memory->words + HALF_WORDS, has_entry = is_set(layout->frame_is_entry);
    if ((known->state && read_user(&hash, 8, (void *)known->state)) ||
        read_user(memory->words, at_most(8 * HALF_WORDS, known->bytes), (void *)sp) ||
        (frames && read_user(others, at_most(8 * HALF_WORDS, known->frame_bytes), (void *)known->frame)))
        return 0;
#pragma clang loop unroll(disable)
    for (u32 i = 0; i < MOST_FRAMES; i++) {
        if (hidden(i) >= forgotten(frames, sp))
            break;
        u64 at = known->frames_at[i];
        hash = mixed(hash, others[below(HALF_WORDS, at + layout->frame_code / 8)]);
        hash = mixed(hash, others[below(HALF_WORDS, at + layout->frame_instruction / 8)]);
        hash = mixed(hash, others[below(HALF_WORDS, at + layout->frame_previous / 8)]);
        u64 is_entry = others[below(HALF_WORDS, at + layout->frame_is_entry / 8)] >> (layout->frame_is_entry & 7) * 8 & 255;
        hash = forgotten(hash ^ (is_entry & -has_entry), sp);
    }
#pragma clang loop unroll(disable)
    for (u32 i = 0; i < MOST_WORDS; i++) {
        if (hidden(i) >= forgotten(words, sp))
            break;
        hash = forgotten(mixed(hash, memory->words[below(HALF_WORDS, known->words_at[i])]), sp);
    }
    return hash;
}

/* Sets the launch's stack. */
static __always_inline void set_known(struct scratch *scratch, u64 id) {
    struct launched *launch = &launch_state_of(scratch)->launched;
    launch->stack = id;
    launch->counter = COUNTERS;
    launch->flags = (launch->flags & ~(u64)LAUNCH_NO_STACK) | LAUNCH_NO_WALK;
}

/* Whether the stack is the expected one, which it then becomes. */
static __always_inline int is_expected(struct scratch *scratch, u64 now) {
    const struct start *start = &scratch->copied.start;
    struct memory *memory = memory_of(scratch);
    u64 number = scratch->expected;
    struct known_stack *known = known_with(number);
    u64 id = known ? *(volatile u64 *)&known->stack : 0;
    if (!scratch->may_be_known || !memory || !known || !id || now >= known->until)
        return 0;
    if ((known->start ^ scratch->hashes[0]) | (known->salt ^ scratch->salt) | (known->python ^ python_of(&scratch->process)) |
        (known->ip ^ start->ip) | (known->sp ^ start->sp) | ((known->bp ^ start->bp) & -is_set(known->bp)))
        return 0;
    u64 hash = hash_of(scratch, memory, known);
    /* If another thread has kept another stack there meanwhile, on this CPU, it has cleared the id first. */
    if (!hash || *(volatile u64 *)&known->hash != hash || *(volatile u64 *)&known->stack != id)
        return 0;
    scratch->last_known = number;
    scratch->expected = known->next;
    scratch->kept -= is_set(scratch->kept);
    set_known(scratch, id);
    return 1;
}

/* Returns 1 if a number is less than another one, else 0, without a branch; both are below 2^63. */
static __always_inline u64 is_less(u64 one, u64 other) {
    return hidden(one - other) >> 63;
}

/* Returns 1 if an address is on the part of the stack that is read, else 0. */
static __always_inline u64 is_near(u64 at, u64 sp) {
    return 1 - is_set((at - sp) & -(8 * HALF_WORDS));
}

/* Adds the place of a word of the stack, if `is_read`; the number of words becomes too large if it is on another stack. */
static __always_inline void add_word(struct known_stack *known, u64 sp, u64 at, u64 is_read) {
    u64 place = (at - sp) / 8, count = known->words, is_here = is_near(at, sp) & (1 - is_set((at - sp) & 7));
    known->words_at[below(MOST_WORDS, count)] = place;
    known->words = count + is_read + (is_read & ~is_here) * MOST_WORDS;
    known->bytes = choose(is_read & is_here & is_less(known->bytes, 8 * place + 8), 8 * place + 8, known->bytes);
}

/* Adds the words of a Python frame, or the one by which the end of an evaluation loop leads to the next one. */
static __always_inline void add_frame(struct scratch *scratch, struct known_stack *known, u64 sp, u64 i) {
    const struct python_layout *layout = &scratch->process.python.layout;
    u64 at = scratch->frames_at[below(MAX_PYTHON, i)] & ~7ULL, cframe = scratch->frames[below(MAX_PYTHON, i)].instruction;
    u64 is_end = 1 - is_set(at), is_on_stack = ~is_end & is_near(at, sp), place = (at - known->frame) / 8, count = known->frames;
    add_word(known, sp, cframe + layout->cframe_previous, is_end);
    add_word(known, sp, at + layout->frame_code, is_on_stack);
    add_word(known, sp, at + layout->frame_instruction, is_on_stack);
    add_word(known, sp, at + layout->frame_previous, is_on_stack);
    known->frames_at[below(MOST_FRAMES, count)] = place;
    known->frames = count + (1 - is_end) * (1 - is_on_stack);
}

/* Sets where the Python frames are that are not on the stack. */
static __always_inline void bound_frames(struct scratch *scratch, struct known_stack *known, u64 sp, u64 frames) {
    u64 lowest = 1ULL << ADDRESS_BITS, highest = 0, numbers;
    begin_numbers(&numbers, 0, MOST_FRAMES);
#pragma clang loop unroll(disable)
    for (u64 i = 0; next_number(&numbers, i, MOST_FRAMES); i = number_after(i, sp)) {
        lowest = forgotten(lowest, sp);
        highest = forgotten(highest, sp);
        if (hidden(i) >= forgotten(frames, sp))
            break;
        u64 at = scratch->frames_at[below(MOST_FRAMES, i)] & ~7ULL, is_one = is_set(at) & ~is_near(at, sp);
        lowest = forgotten(choose(is_one & is_less(at, lowest), at, lowest), sp);
        highest = forgotten(choose(is_one & is_less(highest, at), at, highest), sp);
    }
    end_numbers(&numbers);
    known->frame = lowest;
    known->frame_bytes = highest ? highest - lowest + scratch->process.python.layout.frame_bytes : 0;
}

/* Keeps a stack whose walk has ended; returns whether that was possible. */
static __always_inline int keep(struct scratch *scratch, struct known_stack *known, u64 now) {
    const struct start *start = &scratch->copied.start;
    const struct python_layout *layout = &scratch->process.python.layout;
    struct memory *memory = memory_of(scratch);
    u64 sp = start->sp, reads = scratch->depth - is_set(scratch->ip); /* a return address of 0 was read, too */
    u64 has_python = forgotten(is_set(scratch->python_state ^ PYTHON_NONE), sp), frames = scratch->python & -has_python, numbers;
    *(volatile u64 *)&known->stack = 0;
    known->frames = known->words = known->bytes = 0;
    bound_frames(scratch, known, sp, frames);
    begin_numbers(&numbers, 0, MOST_FRAMES);
#pragma clang loop unroll(disable)
    for (u64 i = 0; next_number(&numbers, i, MOST_FRAMES); i = number_after(i, sp)) {
        if (hidden(i) >= forgotten(frames, sp))
            break;
        add_frame(scratch, known, sp, i);
    }
    end_numbers(&numbers);
    add_word(known, sp, scratch->first_cframe + layout->thread_frame, has_python & is_set(layout->thread_cframe));
    begin_numbers(&numbers, 0, MOST_WORDS);
#pragma clang loop unroll(disable)
    for (u64 i = 0; next_number(&numbers, i, MOST_WORDS); i = number_after(i, sp)) {
        if (hidden(i) >= forgotten(reads, sp))
            break;
        u64 frame = below(MOST_WORDS, i);
        add_word(known, sp, scratch->cfas[frame] - 8, 1);
        add_word(known, sp, scratch->bases[frame], is_set(scratch->bases[frame]));
        add_word(known, sp, scratch->kept_at[frame], is_set(scratch->kept_at[frame]));
    }
    end_numbers(&numbers);
    if (!memory || reads > MOST_WORDS || known->words > MOST_WORDS || frames > MOST_FRAMES ||
        known->frame_bytes > 8 * HALF_WORDS || (scratch->uses_bp && !start->bp))
        return 0;
    known->until = choose(has_python, scratch->checked_until, now + KNOWN_NS);
    known->start = scratch->start_hash;
    known->salt = scratch->salt;
    known->python = python_of(&scratch->process);
    known->ip = start->ip;
    known->sp = sp;
    known->bp = start->bp & -is_set(scratch->uses_bp);
    known->state = (scratch->first_state + layout->thread_frame) & -(has_python & ~is_set(layout->thread_cframe));
    known->hash = hash_of(scratch, memory, known);
    return known->hash != 0;
}

/* Handles a stack that was walked to its end. If it was sent before, it is kept, and expected after the one before it; returns
 * the next phase. */
static __always_inline u32 keep_stack(struct scratch *scratch) {
    const struct launched *launch = &launch_state_of(scratch)->launched;
    u64 id = id_of_stack(scratch), *sent = stacks_sent.lookup(&id), sp = scratch->copied.start.sp;
    if (!sent || *sent != scratch->hashes[1])
        return scratch->after_walk;
    set_known(scratch, id);
    u64 has_all_python = !scratch->process.has_python ||
                         (scratch->python_state == PYTHON_NONE
                              ? scratch->runs_no_python && thread_pointer() - scratch->sp < THREAD_BYTES
                              : scratch->python_state == PYTHON_WHOLE && scratch->checked_until);
    if (scratch->is_odd || scratch->several || !has_all_python)
        return scratch->after_walk;
    u64 first = mixed(id, sp) & -(u64)WAYS, at = first + (launch->time / 64 & (WAYS - 1)), is_there = 0;
#pragma clang loop unroll(disable)
    for (u32 way = 0; way < WAYS; way++) {
        struct known_stack *other = known_with(below(KNOWN_STACKS, first + way) + 1);
        if (other && other->stack == id && other->sp == sp) {
            at = first + way;
            is_there = 1;
            break;
        }
    }
    u64 number = below(KNOWN_STACKS, forgotten(at, sp)) + 1;
    is_there = forgotten(is_there, sp);
    struct known_stack *known = known_with(number);
    if (!known)
        return scratch->after_walk;
    if (!is_there || number == scratch->expected || launch->time >= known->until) {
        if (scratch->kept >= MOST_KEPT && launch->time / 64 & (KEPT_OF - 1))
            return scratch->after_walk;
        scratch->kept++;
        u64 next = known->next & -is_there, is_kept = 0;
        __sync_fetch_and_add(&known->writers, 1);
        if (*(volatile u64 *)&known->writers == 1 && keep(scratch, known, launch->time)) {
            known->next = next;
            *(volatile u64 *)&known->stack = id;
            is_kept = 1;
        }
        __sync_fetch_and_add(&known->writers, -1);
        if (!is_kept)
            return scratch->after_walk;
    }
    struct known_stack *last = known_with(scratch->last_known);
    if (last)
        last->next = number;
    scratch->last_known = number;
    scratch->expected = known->next;
    return scratch->after_walk;
}

int on_known(struct pt_regs *ctx) {
    struct scratch *scratch = own_scratch(owner_of(0));
    if (scratch) {
        u64 time = launch_state_of(scratch)->launched.time, who = bpf_get_current_pid_tgid();
        scratch->start_hash = scratch->hashes[0];
        phases.call(ctx, is_expected(scratch, time) ? scratch->after_walk : begin_python(scratch, who, time));
        give_back(scratch);
    }
    count(LAUNCHES_LOST, 1); /* another thread has taken the scratch, or the tail call failed */
    return 0;
}

int on_keep(struct pt_regs *ctx) {
    struct scratch *scratch = own_scratch(owner_of(0));
    if (scratch)
        phases.call(ctx, keep_stack(scratch));
    return 0;
}
