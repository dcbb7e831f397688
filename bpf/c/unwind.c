// SPDX-License-Identifier: GPL-2.0
/* Walks user stacks without frame pointers (compiled after bounds.c and the declarations).
 *
 * For each address in a stack, a rule of 8 bytes tells how to get to the caller, as call frame information does. `rules` is
 * empty at first. A walk that lacks a rule ends, and a copy of the stack goes to user space, which finishes the walk and adds
 * the missing rules (record/unwinding).
 *
 * A rule holds for one state of a process's mappings, its space. `spaces` has a process's space, and the state (struct
 * mapping_state) for which it is valid. After a change, the process has no rules until user space gives it a new space.
 *
 * Each launch is handled by a chain of programs: one that begins, `on_known` (known_stacks.c), `on_walk` as often as necessary
 * (it walks FRAMES_PER_PROGRAM frames), `on_miss` and perhaps `on_copy` if a rule is missing, and one that sends the result. Each
 * has to be small, because the verifier follows every path through a program. They hand on their state in the scratch.
 *
 * The compiler sets MAX_DEPTH; the loader sets STACK_DEPTH, COPY_PAGES, SAMPLE_COPY_PAGES, FRAME_POINTERS_ONLY, TASK_* and MM_* (offsets).
 */

#define WINDOW 2048      /* bytes of stacks to which no rule leads that are read at once */
#define SCRATCHES 4
#define HELD_PAGES 4     /* of the stack, and as many of Python frames elsewhere */
#define FRAMES_PER_PROGRAM 32
enum { LOAD, UNLOAD, IN_ESI }; /* class Change in bpf/probes/library_file.py */
#define RT_DELETE 2            /* link.h */
#define LAUNCH_STATE_WORDS 96
#define REMEMBERED 512         /* rules */

/* A rule is a u64: s32 cfa; s16 rbp; u8 kind; u8 flags (formats/wire/unwind_rules.py). */
#define RULE_CFA(rule) ((s64)(s32)(rule))
#define RULE_RBP(rule) ((s64)((rule) << 16) >> 48)
#define RULE_KIND(rule) ((rule) >> 48 & 255)
#define RULE_GUESSES(rule) ((rule) >> 56 & 1)
#define RULE_LEAVES(rule) ((rule) >> 57 & 1) /* the caller is on another stack: Go runs C and its own runtime on one */
#define BY_FRAME_POINTER (16ULL | (u64)(u16)-16 << 32 | (u64)RULE_BY_RBP << 48 | 1ULL << 56)

struct bucket {
    struct {
        u64 key;
        u64 rule;
    } slots[4];
};
/* An array, which user space writes through a mapping: a look-up is inlined, and costs one cache line per frame. It has tables of
 * several sizes: a process's space tells which one to use, so that walks go on while user space fills a larger one. */
BPF_F_TABLE("array", u32, struct bucket, rules, ANY, BPF_F_MMAPABLE);

BPF_TABLE("lru_hash", u32, struct space, spaces, ANY);
BPF_TABLE("lru_hash", u32, u64, process_unloads, ANY);
BPF_TABLE("lru_hash", u32, struct python, pythons, ANY);
/* How often user space, and these programs, have changed one of the three for any process. */
BPF_ARRAY(process_changes, u64, 2);
enum changed_by { USER_SPACE, PROGRAMS };

/* What the three have of a process, as each look-up takes some 70 ns. */
struct known_process {
    u64 pid;
    u64 changes;         /* the sum of `process_changes` when it was so */
    u64 unloads;         /* as in struct mapping_state */
    u64 has_python;
    struct space space;  /* all zeros for none */
    struct python python;
    u64 last;            /* the interpreter without a next one, which was created first; 0 until it is met */
};

/* A rule that a walk on this CPU used: the CFA is rsp or rbp plus a number, and no guess, or the stack ends. Most frames of a
 * walk were in the last ones, too, and a bucket of `rules` is seldom in the CPU's caches. */
struct remembered {
    u64 key;             /* of the rule, for which and for `salt` it is right; ~0 for none */
    u64 rule;
};

/* The state of a chain of programs. A program on a uprobe can be preempted; a chain for another thread on the same CPU then
 * takes another scratch. `owner` is 0 while a scratch is free. */
struct scratch {
    u64 owner;
    u64 takers;          /* threads that are about to take it: they preempt each other */
    u64 depth;
    u64 walked;          /* enum walked */
    u64 hashes[2];       /* of the stack; the first one is its id */
    u64 pair[2];         /* temporary */
    u64 number;          /* of this scratch, and of its `memory` */
    struct known_process process; /* of the last launch */
    u64 held[2 * HELD_PAGES]; /* numbers of the pages in it */
    u64 after_walk;      /* enum phase: what follows the walk */
    u64 space;           /* number of the space whose rules are used */
    u64 shift;           /* of that space */
    u64 salt;            /* for `remembered`; differs between states of mappings */
    u64 ip;              /* registers of the frame that the walk has reached */
    u64 sp;
    u64 bp;
    u64 bp_at;           /* address of the caller's rbp, which is read only when a rule needs it, which is rare; 0: it is bp */
    u64 bp_from;         /* where bp was read; 0: it is still that of the start */
    u64 is_odd;          /* the walk has read more than return addresses and frame pointers */
    u64 uses_bp;         /* the walk has used the frame pointer of the start */
    u64 start_hash;      /* hashes[0] at the start */
    u64 may_be_known;    /* the stack may be one of `known_stacks` */
    u64 last_known;      /* of these, the number of the last one + 1; 0 for none */
    u64 expected;        /* and of the one that followed it the last time */
    u64 kept;            /* how many stacks were kept lately, and not met since */
    u64 exact;           /* 1: ip is the address of an instruction; 0: a return address */
    u64 is_guess;        /* ip was found by a guess */
    struct {             /* the state before the last guess */
        u64 ip;
        u64 sp;
        u64 bp;
        u64 bp_at;
        u64 exact;
        u64 depth;
        u64 hashes[2];
    } before;
    u64 sent;            /* number of pages sent */
    u64 absent;          /* number of absent pages in a row */
    u64 epoch;           /* of the output file */
    u64 python;          /* number of `frames`: Python frames, and ends of evaluation loops */
    u64 python_state;    /* enum python_state */
    u64 lacks_python;    /* there was no room for the frames */
    u64 runs_no_python;  /* the process runs Python, but this thread surely does not */
    u64 unreadable;      /* memory that tells so could not be read */
    u64 own_state;       /* a state of the thread without frames; 0: none was met */
    u64 own_interpreter; /* of that state */
    u64 interpreter;     /* position of the search for the thread's state: interpreter and state */
    u64 thread;
    u64 states_left;     /* of that search */
    u64 several;         /* the first interpreter, if there are several; else 0 */
    u64 first_state;     /* the state whose frames are walked first; 0: it is not found yet */
    u64 frame;           /* the next Python frame */
    u64 last_thread;     /* whose Python frames were walked last; 0 for none */
    u64 last_state;      /* its state, */
    u64 last_interpreter; /* and of which interpreter */
    u64 now;             /* when that walk began */
    u64 checked_until;   /* for how long its code objects need no check; 0 if they were not all checked */
    u64 first_cframe;    /* the one of the innermost loop */
    u64 cframe;          /* the structure that ends its evaluation loop */
    u64 codes;           /* number of `frames` whose code objects were handled */
    u64 code_offset;     /* of the next code object's line table: the part before it was sent */
    u64 code_programs;   /* number of programs that sent code objects */
    u64 slot;            /* where on the stack a probe at a function's return has replaced the return address; 0 for none */
    u64 returns_to;      /* the original return address */
    u64 guessed[MAX_DEPTH / 64]; /* bitmap of addresses found by frame pointer in code without call frame information */
    u64 interrupted[MAX_DEPTH / 64]; /* bitmap of addresses where a signal came, no return addresses */
    struct copied copied;
    u64 launch_state[LAUNCH_STATE_WORDS]; /* struct launch_state */
    u64 ips[MAX_DEPTH];
    u64 cfas[MAX_DEPTH]; /* the canonical frame address of each address's caller */
    u64 bases[MAX_DEPTH]; /* where the frame pointer was read that gave it, */
    u64 base_values[MAX_DEPTH]; /* and what it was */
    u64 kept_at[MAX_DEPTH]; /* where code that aligns its stack has kept it; 0 for none */
    u64 frames_at[MAX_PYTHON]; /* see struct launch_path */
    u64 window[WINDOW / 8]; /* temporary */
    struct python_frame frames[MAX_PYTHON]; /* innermost first */
    struct remembered remembered[REMEMBERED];
};
BPF_PERCPU_ARRAY(scratches, struct scratch, SCRATCHES);

/* Pages of the process that a chain of programs has read, as a read takes some 180 ns, and 50 more for each page: the one with
 * number N is the page N % HELD_PAGES of its half. The first half has the stack, on which Python's frames are in part, too. */
struct memory {
    u64 words[2 * HELD_PAGES * PAGE / 8];
};
BPF_PERCPU_ARRAY(memories, struct memory, SCRATCHES);
enum half { STACK_HALF, OTHER_HALF };

/* Returns the owner of a scratch: the current thread, or a sample that interrupts it. */
static __always_inline u64 owner_of(u64 is_sample) {
    u64 who = bpf_get_current_pid_tgid();
    return is_sample ? ~who : who;
}

/* Takes the first free scratch; NULL if all are taken. */
static __always_inline struct scratch *take_scratch(u64 owner) {
#pragma clang loop unroll(disable)
    for (u32 i = 0; i < SCRATCHES; i++) {
        u32 which = i;
        struct scratch *scratch = scratches.lookup(&which);
        if (!scratch)
            return 0;
        __sync_fetch_and_add(&scratch->takers, 1);
        u64 now = *(volatile u64 *)&scratch->owner, is_alone = *(volatile u64 *)&scratch->takers == 1;
        if (is_alone && (!now || now == owner))
            *(volatile u64 *)&scratch->owner = owner;
        else
            is_alone = 0;
        __sync_fetch_and_add(&scratch->takers, -1);
        if (hidden(is_alone)) {
            scratch->number = i;
            return scratch;
        }
    }
    return 0;
}

/* Returns the scratch that the owner has taken; NULL if another one took the same scratch at the same moment. */
static __always_inline struct scratch *own_scratch(u64 owner) {
#pragma clang loop unroll(disable)
    for (u32 i = 0; i < SCRATCHES; i++) {
        u32 which = i;
        struct scratch *scratch = scratches.lookup(&which);
        if (scratch && *(volatile u64 *)&scratch->owner == owner)
            return scratch;
    }
    return 0;
}

static __always_inline void give_back(struct scratch *scratch) {
    *(volatile u64 *)&scratch->owner = 0;
}

static __always_inline u64 mixed(u64 hash, u64 value) {
    hash = (hash ^ value) * 0xff51afd7ed558ccdULL;
    return hash ^ hash >> 32;
}

/* Adds an address to the two hashes of a stack. */
static __always_inline void add_to_hashes(u64 *id, u64 *check, u64 ip) {
    *id = mixed(*id, ip);
    *check = (*check + ip) * 0xc4ceb9fe1a85ec53ULL;
    *check ^= *check >> 29;
}

static __always_inline struct memory *memory_of(const struct scratch *scratch) {
    u32 number = scratch->number;
    return memories.lookup(&number);
}

/* Makes the memory have the page of `at`; returns 0 on success. */
static __always_inline long hold(struct scratch *scratch, struct memory *memory, u64 at, u64 half) {
    u64 page = at / PAGE, place = below(2 * HELD_PAGES, half * HELD_PAGES + (page & (HELD_PAGES - 1)));
    if (scratch->held[place] == page)
        return 0;
    scratch->held[place] = ~0ULL;
    if (read_user(&memory->words[place * (PAGE / 8)], PAGE, (void *)(page * PAGE)))
        return -1;
    scratch->held[place] = page;
    return 0;
}

/* The same for the stack: also the next page, if it is next in the memory, too, as callers are there. */
static __always_inline long hold_stack(struct scratch *scratch, struct memory *memory, u64 at) {
    u64 page = at / PAGE, place = below(HELD_PAGES, page), *words = &memory->words[place * (PAGE / 8)];
    if (scratch->held[place] == page)
        return 0;
    scratch->held[place] = ~0ULL;
    if (hidden(place) < HELD_PAGES - 1) {
        scratch->held[place + 1] = ~0ULL;
        if (!read_user(words, 2 * PAGE, (void *)(page * PAGE))) {
            scratch->held[place] = page;
            scratch->held[place + 1] = page + 1;
            return 0;
        }
    }
    if (read_user(words, PAGE, (void *)(page * PAGE)))
        return -1;
    scratch->held[place] = page;
    return 0;
}

/* Returns the index of the word at `at`, which the memory has, and whose address is a multiple of 8. */
static __always_inline u64 index_of(u64 at, u64 half) {
    return below(2 * HELD_PAGES * PAGE / 8, half * (HELD_PAGES * PAGE / 8) + (at / 8 & (HELD_PAGES * PAGE / 8 - 1)));
}

/* Reads the word of the stack at `at`; returns 0 on success. */
static __always_inline long read_word(struct scratch *scratch, struct memory *memory, u64 at, u64 *word) {
    if (at & 7 || hold_stack(scratch, memory, at))
        return -1;
    *word = memory->words[index_of(at, STACK_HALF)];
    return 0;
}

/* Returns what the fs register points to. */
static __always_inline u64 thread_pointer(void) {
    return *(u64 *)((u8 *)this_task() + TASK_FSBASE);
}

/* Has the scratch know the process. */
static __always_inline void know_process(struct scratch *scratch, u32 pid) {
    struct known_process *process = &scratch->process;
    u32 by_user_space = USER_SPACE, by_programs = PROGRAMS;
    u64 *one = process_changes.lookup(&by_user_space), *other = process_changes.lookup(&by_programs);
    u64 changes = one && other ? *one + *other : 0; /* first: after a change during the look-ups, they are made again */
    if (hidden(process->pid) == pid && hidden(process->changes) == changes)
        return;
    u64 *unloads = process_unloads.lookup(&pid);
    struct space *space = spaces.lookup(&pid);
    struct python *python = FRAME_POINTERS_ONLY ? 0 : pythons.lookup(&pid);
    process->pid = pid;
    process->changes = changes;
    process->unloads = unloads ? *unloads + 1 : 0;
    process->has_python = !!python;
    process->last = 0;
    if (space)
        process->space = *space;
    else
        __builtin_memset(&process->space, 0, sizeof(process->space));
    if (python)
        process->python = *python;
}

static __always_inline void note_change(void) {
    u32 by_programs = PROGRAMS;
    u64 *changes = process_changes.lookup(&by_programs);
    if (changes)
        __sync_fetch_and_add(changes, 1);
}

static __always_inline void mapping_state_of(const struct known_process *process, struct mapping_state *now) {
    if (FRAME_POINTERS_ONLY) { /* the offsets are unknown; mm must not be 0, which would mean a thread of the Linux kernel */
        now->born = now->exec_vm = now->unloads = 0;
        now->mm = 1;
        return;
    }
    u8 *task = (u8 *)this_task();
    u64 mm = *(u64 *)(task + TASK_MM), leader = *(u64 *)(task + TASK_GROUP_LEADER);
    now->born = leader ? *(u64 *)((u8 *)leader + TASK_START_BOOTTIME) : 0;
    now->mm = mm;
    now->exec_vm = 0;
    if (mm) { /* a program may have the mm of an earlier one of the same process; no arithmetic with the pointer: see find_space */
        now->mm = *(volatile u64 *)&now->mm ^ *(u64 *)(task + TASK_SELF_EXEC_ID) << 48;
        now->exec_vm = *(u64 *)((u8 *)mm + MM_EXEC_VM);
    }
    now->unloads = process->unloads;
}

/* Prepares the scratch for a walk from these registers. */
#define BEGIN_WALK(scratch, who, regs)                                                                                         \
    ({                                                                                                                         \
        struct start *start = &(scratch)->copied.start;                                                                        \
        start->ip = (regs)->ip;                                                                                                \
        start->sp = (regs)->sp;                                                                                                \
        start->bp = (regs)->bp;                                                                                                \
        start->bx = (regs)->bx;                                                                                                \
        start->ax = (regs)->ax;                                                                                                \
        start->dx = (regs)->dx;                                                                                                \
        start->cx = (regs)->cx;                                                                                                \
        start->si = (regs)->si;                                                                                                \
        start->di = (regs)->di;                                                                                                \
        start->r8 = (regs)->r8;                                                                                                \
        start->r9 = (regs)->r9;                                                                                                \
        start->r10 = (regs)->r10;                                                                                              \
        start->r11 = (regs)->r11;                                                                                              \
        start->r12 = (regs)->r12;                                                                                              \
        start->r13 = (regs)->r13;                                                                                              \
        start->r14 = (regs)->r14;                                                                                              \
        start->r15 = (regs)->r15;                                                                                              \
        __builtin_memset((scratch)->guessed, 0, sizeof((scratch)->guessed));                                                   \
        __builtin_memset((scratch)->interrupted, 0, sizeof((scratch)->interrupted));                                           \
        know_process(scratch, who);                                                                                            \
        mapping_state_of(&(scratch)->process, &(scratch)->copied.of);                                                          \
    })

/* Sets the space whose rules a walk uses. Rules stay valid when a process maps more code, as programs do that load libraries
 * while they run, if it is known that it has unmapped none. */
static __always_inline void find_space(struct scratch *scratch) {
    const struct mapping_state *now = &scratch->copied.of;
    const struct space *space = &scratch->process.space;
    scratch->space = 0;
    scratch->shift = 63;
    scratch->salt = 0;
    u64 mm = *(volatile u64 *)&now->mm; /* the verifier allows no arithmetic with the pointer that was stored there */
    if ((space->of.born ^ now->born) | (space->of.mm ^ mm) | (space->of.unloads ^ now->unloads))
        return;
    if (hidden(now->exec_vm) != space->of.exec_vm && (!now->unloads || hidden(now->exec_vm) < space->of.exec_vm))
        return;
    scratch->space = space->number;
    scratch->shift = space->shift;
    u64 number = space->number ^ (u64)space->shift << 56; /* a larger table has rules for which there was no room */
    scratch->salt = mixed(mixed(mixed(space->of.born ^ number, space->of.mm), space->of.exec_vm), space->of.unloads);
}

/* Returns `value` if the two numbers are equal, else 0, without a branch. */
static __always_inline u64 if_equal(u64 one, u64 other, u64 value) {
    return value & (is_set(one ^ other) - 1);
}

/* Returns the rule with this key; RULE_NONE if there is none. */
static __always_inline u64 rule_with_key(u64 key, u64 shift) {
    u64 hash = (key ^ key >> 13) * 0x9e3779b97f4a7c15ULL; /* ^: equally spaced keys would share few buckets */
    u32 index = hash >> (shift & 63) | 1ULL << (-shift & 63); /* a table of 2^n buckets begins at bucket 2^n */
    struct bucket *bucket = rules.lookup(&index);
    if (!bucket)
        return 0;
    return if_equal(bucket->slots[0].key, key, bucket->slots[0].rule) |
           if_equal(bucket->slots[1].key, key, bucket->slots[1].rule) |
           if_equal(bucket->slots[2].key, key, bucket->slots[2].rule) |
           if_equal(bucket->slots[3].key, key, bucket->slots[3].rule);
}

/* Returns the rule for an address in a space. An instruction may have that of its block, as CPU samples come anywhere. */
static __always_inline u64 rule_for_address(u64 ip, u64 exact, u64 space, u64 shift) {
    u64 key = ip | exact << ADDRESS_BITS | space << 48, rule = rule_with_key(key, shift);
    if (hidden(exact) && !rule)
        rule = rule_with_key((key & -(u64)BLOCK) | 1ULL << 63, shift);
    return forgotten(rule, ip);
}

/* Sets the bit of the address after index `at` if `bit` is 1. */
static __always_inline void mark_next(u64 *bits, u64 at, u64 bit) {
    u64 next = below(MAX_DEPTH, at + 1);
    bits[next / 64] |= bit << (next & 63);
}

BPF_PROG_ARRAY(phases, PHASES);
BPF_PROG_ARRAY(sample_phases, PHASES); /* programs on perf events, which have another type */
BPF_PROG_ARRAY(wait_phases, PHASES);   /* programs on uprobe sessions: the same as in `phases`, loaded a second time */

/* Has a program keep its variables on the thread's own stack, as those with a tail call do. Since Linux 6.13 others have theirs
 * in memory of the CPU. A thread that preempts the program of a uprobe, and runs it, too, would overwrite them. */
static __always_inline void keep_kernel_stack(struct pt_regs *ctx) {
    if (hidden(0))
        phases.call(ctx, 0);
}

static __always_inline void keep_kernel_stack_of_session(struct pt_regs *ctx) {
    if (hidden(0))
        wait_phases.call(ctx, 0);
}

/* Begins a walk; call it after BEGIN_WALK. */
static __always_inline void start_walk(struct scratch *scratch, u32 pid, u64 epoch, enum phase after_walk) {
    find_space(scratch);
    /* A sample's stack is another one than an equal one of a launch: the learner may leave its copy unfinished. */
    scratch->hashes[0] = (pid ^ epoch << 32) * 0x9e3779b97f4a7c15ULL + scratch->space + ((u64)(after_walk == SAMPLED) << 32);
    scratch->hashes[1] = pid + (epoch << 32) + (scratch->space << 16);
    scratch->after_walk = after_walk;
    scratch->epoch = epoch;
    scratch->ip = scratch->copied.start.ip;
    scratch->sp = scratch->copied.start.sp;
    scratch->bp = scratch->copied.start.bp;
    scratch->bp_at = 0;
    scratch->exact = 1;
    scratch->is_guess = scratch->depth = scratch->slot = 0;
    __builtin_memset(scratch->held, 255, sizeof(scratch->held));
    scratch->bp_from = scratch->is_odd = scratch->uses_bp = scratch->may_be_known = 0;
}

/* Walks FRAMES_PER_PROGRAM frames; returns the next phase. For samples, which are few, an iterator counts them, with which the
 * verifier is done in a third of the time. */
static __always_inline u32 walk(struct scratch *scratch, u64 is_sample) {
    struct memory *memory = memory_of(scratch);
    if (!memory)
        return scratch->after_walk;
    u64 ip = scratch->ip, sp = scratch->sp, bp = scratch->bp, bp_at = scratch->bp_at, exact = scratch->exact;
    u64 id = scratch->hashes[0], check = scratch->hashes[1], depth = scratch->depth, space = scratch->space;
    u64 is_guess = scratch->is_guess, shift = scratch->shift, salt = scratch->salt, bp_from = scratch->bp_from;
    u64 uses_bp = scratch->uses_bp;
    u64 goes_on = 0, numbers;
    if (is_sample)
        begin_numbers(&numbers, 0, FRAMES_PER_PROGRAM + 1);
#pragma clang loop unroll(disable)
    for (u64 i = 0; is_sample ? next_number(&numbers, i, FRAMES_PER_PROGRAM + 1) : i <= FRAMES_PER_PROGRAM;
         i = is_sample ? number_after(i, ip) : i + 1) {
        goes_on = 1;
        if (i == FRAMES_PER_PROGRAM)
            break;
        goes_on = 0;
        scratch->walked = DEEP;
        if (hidden(depth) >= STACK_DEPTH) /* else the compiler makes two loops of it for the verifier */
            break;
        u64 at = below(MAX_DEPTH, depth);
        /* Otherwise the verifier examines the loop once for each value that these may have. */
        if (is_sample) {
            u64 unknown = *(volatile u64 *)&scratch->owner;
            ip = forgotten(ip, unknown);
            sp = forgotten(sp, unknown);
            bp = forgotten(bp, unknown);
            id = forgotten(id, unknown);
            check = forgotten(check, unknown);
            depth = forgotten(depth, unknown);
            uses_bp = forgotten(uses_bp, unknown);
        }
        ip = forgotten(ip, id);
        exact = forgotten(exact, ip);
        bp_at = forgotten(bp_at, ip);
        bp_from = forgotten(bp_from, ip);
        is_guess = forgotten(is_guess, ip);
        scratch->ips[at] = ip;
        depth++;
        add_to_hashes(&id, &check, ip);
        scratch->walked = MISSED;
        struct remembered *remembered = &scratch->remembered[below(REMEMBERED, ip)];
        u64 key = (ip | exact << ADDRESS_BITS) ^ salt, rule = remembered->rule, leaves = 0, used_from = 0, kept_at = 0;
        u64 is_by_bp = RULE_KIND(rule) >> 1, cfa = choose(is_by_bp & 1, bp, sp) + RULE_CFA(rule);
        if (hidden((remembered->key ^ key) | (bp_at & -is_by_bp)) == 0) {
            if (hidden(RULE_KIND(rule)) == RULE_END) {
                scratch->walked = WHOLE;
                break;
            }
            bp_at = choose(is_set(RULE_RBP(rule)), cfa + RULE_RBP(rule), bp_at);
            is_guess = 0;
            used_from = bp_from & -(is_by_bp & 1);
            uses_bp |= is_by_bp & 1 & ~is_set(bp_from);
        } else {
            rule = ip >> ADDRESS_BITS ? RULE_NONE
                                      : FRAME_POINTERS_ONLY ? BY_FRAME_POINTER : rule_for_address(ip, exact, space, shift);
            u64 kind = RULE_KIND(rule);
            if (hidden(is_guess) && kind == RULE_NONE) {
                /* The guess led to an unknown address, which may be wrong: undo it. */
                ip = scratch->before.ip;
                sp = scratch->before.sp;
                bp = scratch->before.bp;
                bp_at = scratch->before.bp_at;
                exact = scratch->before.exact;
                depth = scratch->before.depth;
                id = scratch->before.hashes[0];
                check = scratch->before.hashes[1];
                break;
            }
            if (kind == RULE_NONE || kind >= RULE_HARD || (kind == RULE_BY_RBX && hidden(depth) != 1))
                break;
            if (kind == RULE_END) {
                remembered->rule = rule;
                remembered->key = key;
                scratch->walked = WHOLE;
                break;
            }
            leaves = RULE_LEAVES(rule);
            is_guess = FRAME_POINTERS_ONLY ? 0 : RULE_GUESSES(rule) & ~leaves; /* another stack has to be copied first */
            if (hidden(is_guess)) {
                scratch->before.ip = ip;
                scratch->before.sp = sp;
                scratch->before.bp = bp;
                scratch->before.bp_at = bp_at;
                scratch->before.exact = exact;
                scratch->before.depth = depth;
                scratch->before.hashes[0] = id;
                scratch->before.hashes[1] = check;
            }
            mark_next(scratch->guessed, at, RULE_GUESSES(rule));
            if (kind == RULE_SIGNAL) {
                mark_next(scratch->interrupted, at, 1);
                /* sp points to struct ucontext, which has rsp and rip at offset 160, and rbp at 120. */
                if (read_user(scratch->pair, 16, (void *)(sp + 160)))
                    break;
                bp_at = sp + 120;
                sp = scratch->cfas[at] = scratch->pair[0];
                ip = scratch->pair[1];
                exact = 1;
                scratch->is_odd = 1;
                continue;
            }
            kind = hidden(kind);
            u64 by_bp = (1 << RULE_BY_RBP | 1 << RULE_BY_DEREF) >> kind & 1, deref = 1 << RULE_BY_DEREF >> kind & 1,
                by_bx = 1 << RULE_BY_RBX >> kind & 1;
            if (hidden(by_bp) && bp_at) {
                if (read_user(&scratch->pair[0], 8, (void *)bp_at))
                    break;
                bp = scratch->pair[0];
                bp_from = bp_at;
                bp_at = 0;
            }
            by_bp = forgotten(by_bp, ip);
            bp_at = forgotten(bp_at, ip);
            bp_from = forgotten(bp_from, ip);
            used_from = bp_from & -by_bp;
            uses_bp |= by_bp & ~is_set(bp_from);
            scratch->is_odd |= forgotten(by_bx | leaves | RULE_GUESSES(rule), ip);
            u64 base = choose(by_bp, bp, choose(by_bx, scratch->copied.start.bx, sp));
            cfa = base + RULE_CFA(rule);
            u64 of_bp = choose(deref, bp, cfa) + RULE_RBP(rule);
            kept_at = cfa & -deref;
            if (hidden(deref)) {
                if (read_user(&scratch->pair[0], 8, (void *)cfa))
                    break;
                cfa = scratch->pair[0];
            }
            bp_at = choose(deref | is_set(RULE_RBP(rule)), of_bp, bp_at);
            remembered->rule = rule;
            remembered->key = choose(is_set(rule >> 48 ^ RULE_BY_RSP) & is_set(rule >> 48 ^ RULE_BY_RBP), ~0ULL, key);
        }
        leaves = forgotten(leaves, ip); /* otherwise the verifier examines the rest for both branches */
        is_guess = forgotten(is_guess, ip);
        bp_at = forgotten(bp_at, ip);
        scratch->bases[at] = forgotten(used_from, ip);
        scratch->base_values[at] = bp;
        scratch->kept_at[at] = forgotten(kept_at, ip);
        /* A caller's frame is at a higher address, or on another stack. */
        if ((cfa <= sp && !leaves) || read_word(scratch, memory, cfa - 8, &scratch->pair[1]))
            break;
        u64 is_held = 1 - is_set((bp_at ^ (cfa - 8)) & ~(u64)(PAGE - 8)); /* the caller's rbp is in the same page */
        bp = choose(is_held, memory->words[index_of(bp_at, STACK_HALF)], bp);
        bp_from = choose(is_held, bp_at, bp_from);
        bp_at = choose(is_held, 0, bp_at);
        ip = scratch->pair[1] ^ if_equal(cfa - 8, scratch->slot, scratch->pair[1] ^ scratch->returns_to);
        if (!ip && hidden(is_guess))
            break;
        sp = scratch->cfas[at] = cfa;
        exact = 0;
        if (!ip) {
            scratch->walked = WHOLE;
            break;
        }
    }
    if (is_sample)
        end_numbers(&numbers);
    scratch->ip = ip;
    scratch->sp = sp;
    scratch->bp = bp;
    scratch->bp_at = bp_at;
    scratch->bp_from = bp_from;
    scratch->exact = exact;
    scratch->is_guess = is_guess;
    scratch->uses_bp = uses_bp;
    scratch->depth = depth;
    scratch->hashes[0] = id;
    scratch->hashes[1] = check;
    if (goes_on)
        return WALK;
    if (scratch->walked == MISSED && !FRAME_POINTERS_ONLY)
        return MISS;
    return scratch->walked == WHOLE && scratch->may_be_known ? KEEP : scratch->after_walk;
}

int on_walk(struct pt_regs *ctx) {
    struct scratch *scratch = own_scratch(owner_of(0));
    if (scratch)
        phases.call(ctx, walk(scratch, 0));
    return 0;
}

int on_sample_walk(struct bpf_perf_event_data *ctx) {
    struct scratch *scratch = own_scratch(owner_of(1));
    if (scratch)
        sample_phases.call(ctx, walk(scratch, 1));
    return 0;
}

/* Where the dynamic linker maps or unmaps libraries: see class Change in bpf/probes/library_file.py. */
int on_link_map_change(struct pt_regs *ctx) {
    keep_kernel_stack(ctx);
    u32 pid = bpf_get_current_pid_tgid() >> 32;
    u64 change = attach_cookie(ctx), is_unload = change == UNLOAD || (change == IN_ESI && (u32)ctx->si == RT_DELETE);
    u64 *known = process_unloads.lookup(&pid);
    if (!known)
        process_unloads.update(&pid, &is_unload);
    else if (is_unload)
        __sync_fetch_and_add(known, 1);
    note_change();
    return 0;
}
