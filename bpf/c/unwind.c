// SPDX-License-Identifier: GPL-2.0
/* User stacks without frame pointers (compiled between bounds.c and launches.c).
 *
 * For each address that a walk meets, a rule says how to get to the caller: the same that call frame information says, in 8 bytes.
 * `rules` begins empty. Where a walk lacks a rule, it ends, and a copy of the stack goes to user space, which finishes the walk and
 * adds the rules that were missing (record/unwinding).
 *
 * A rule holds for one state of a process's mappings, its space. `spaces` says which one that is, and by what it is recognised: when
 * the process began, the address of its mm, how many pages of code are mapped, and how often a library was loaded. A process whose
 * state is another now has no rules, until user space gives it a new space.
 *
 * What is done at a launch is done by several programs, one after the other: one that begins, `on_walk` as often as it takes (it walks
 * FRAMES_A_TURN frames), where a rule is missing `on_miss` and perhaps `on_copy`, and one that sends what came of it. Each has to be
 * small: the verifier follows every way through a program. They leave to each other what they know in the scratch.
 * Numbers without a definition here: MAX_DEPTH is set by the compiler; STACK_DEPTH, COPY_PAGES, FRAME_POINTERS_ONLY,
 * TASK_* and MM_* (where the kernel has members of structures) by the loader.
 */

#define WINDOW 2048      /* bytes of the stack that are read at once */
#define MOST_ABSENT 16   /* pages in a row; behind so many nothing of the stack is expected */
#define WAY_NS 1000000000ULL
#define MOST_COPIES 64   /* in that time, of the walks of a thread that end alike: rules may never lead on from there */
#define SCANNED 6144     /* bytes of a signal's stack, for what the kernel has saved there */
#define WAY_WORDS 1024   /* of the stack above the end of a walk, that tell paths apart */
#define LEAST_CODE 21    /* binary logarithm of the lowest address that code has: 2 or 4 MiB where it is not moved */
#define SCRATCHES 4
#define FRAMES_A_TURN 32
#define ROOM 96

/* struct rule, as a number: s32 cfa; s16 rbp; u8 kind; u8 flags (formats/wire/unwind_rules.py). */
#define RULE_CFA(rule) ((s64)(s32)(rule))
#define RULE_RBP(rule) ((s64)((rule) << 16) >> 48)
#define RULE_KIND(rule) ((rule) >> 48 & 255)
#define RULE_GUESSES(rule) ((rule) >> 56 & 1)
#define RULE_LEAVES(rule) ((rule) >> 57 & 1) /* the stack: Go's calls of C, and of its runtime, have one of their own */
#define BY_FRAME_POINTER (16ULL | (u64)(u16)-16 << 32 | (u64)RULE_BY_RBP << 48 | 1ULL << 56)

struct bucket {
    struct {
        u64 key;
        u64 rule;
    } slots[4];
};
/* An array that user space writes through a mapping, as a look-up in it is no call: one line of cache a frame. */
BPF_F_TABLE("array", u32, struct bucket, rules, ANY, BPF_F_MMAPABLE);

BPF_TABLE("lru_hash", u32, struct space, spaces, ANY);
BPF_TABLE("lru_hash", u32, u64, loads, ANY);

/* Copies that are on their way, and the stack that launches of the same path get until then; and of all paths of a thread whose walks
 * end alike, how many were copied. */
BPF_TABLE("lru_hash", u64, struct way, ways, ANY);

/* A page of a stack; the last record has none. */
BPF_RINGBUF_OUTPUT(copies, ANY);

/* What a program works on. A program on a uprobe can be preempted, and another thread's run on the same CPU then takes another one.
 * `owner` is 0 while nobody has it. */
struct scratch {
    u64 owner;
    u64 depth;
    u64 walked;          /* enum walked */
    u64 hashes[2];       /* of the stack, the first one is its id */
    u64 pair[2];
    u64 base;            /* of the window */
    u64 limit;           /* offset of the last word in it */
    u64 then;            /* enum phase: what follows the walk */
    u64 space;           /* whose rules it goes by */
    u64 shift;           /* of that */
    u64 ip;              /* where it is */
    u64 sp;
    u64 bp;
    u64 bp_at;           /* where the caller's rbp is, which is read only when a rule asks for it: nearly never; 0: it is bp */
    u64 exact;           /* 1: ip is an instruction's; 0: a return address */
    u64 is_guess;        /* how ip was found */
    struct {             /* where the last guess was made */
        u64 ip;
        u64 sp;
        u64 bp;
        u64 bp_at;
        u64 exact;
        u64 depth;
        u64 hashes[2];
    } before;
    u64 sent;            /* pages */
    u64 absent;          /* pages in a row */
    u64 epoch;           /* of the output file */
    u64 python;          /* frames of Python, and ends of loops */
    u64 python_state;    /* enum python_state */
    u64 interpreter;     /* where the thread's state is looked for */
    u64 thread;
    u64 states_left;     /* that are looked at */
    u64 frame;           /* the next one of Python */
    u64 cframe;          /* what ends its loop */
    u64 frames_base;     /* of their window */
    u64 frames_limit;
    u64 codes;           /* code objects of them that were seen to */
    u64 code_offset;     /* from which on the next one's table is still to be sent */
    u64 code_turns;
    u64 slot;            /* of the stack, where a probe on a function's return has put another address; 0: nowhere */
    u64 returns_to;      /* what belongs there */
    u64 guessed[MAX_DEPTH / 64]; /* bits: the address was found by a frame pointer, in code of which nothing is told */
    u64 interrupted[MAX_DEPTH / 64]; /* bits: no return address, a signal came there */
    u64 ips[MAX_DEPTH];
    u64 cfas[MAX_DEPTH]; /* where each one's caller has its frame */
    u64 window[WINDOW / 8];
    u64 frames_window[WINDOW / 8];
    struct python_frame frames[MAX_PYTHON]; /* the innermost first */
    struct copied copied;
    u64 more[ROOM];      /* what launches.c and handles.c keep here */
};
BPF_PERCPU_ARRAY(scratches, struct scratch, SCRATCHES);

/* For a thread, or for a sample that interrupts it. */
static __always_inline u64 owner_of(u64 is_sample) {
    u64 who = bpf_get_current_pid_tgid();
    return is_sample ? ~who : who;
}

/* The first that nobody has; NULL where there is none. */
static __always_inline struct scratch *take_scratch(u64 owner) {
#pragma clang loop unroll(disable)
    for (u32 i = 0; i < SCRATCHES; i++) {
        u32 which = i;
        struct scratch *scratch = scratches.lookup(&which);
        u64 now = scratch ? *(volatile u64 *)&scratch->owner : owner;
        if (scratch && (!now || now == owner)) {
            *(volatile u64 *)&scratch->owner = owner;
            return scratch;
        }
    }
    return 0;
}

/* The one that was taken; NULL where two took it in the same moment, and the other one has it. */
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

/* The word of the stack at `at`; 0 when it was read. Many are read at once, but none of the next page, which may not be there: that
 * would cost a microsecond. */
static __always_inline long read_word(struct scratch *scratch, u64 at, u64 *word) {
    u64 offset = at - scratch->base;
    if (offset > scratch->limit) {
        u64 bytes = at_most(WINDOW, PAGE - (at & (PAGE - 1)));
        if (bytes < 8 || read_user(scratch->window, bytes, (void *)at))
            return -1;
        scratch->base = at;
        scratch->limit = bytes - 8;
        offset = 0;
    }
    *word = scratch->window[below(WINDOW / 8, offset / 8)];
    return 0;
}

static __always_inline void generation_of(u32 pid, struct generation *now) {
    if (FRAME_POINTERS_ONLY) { /* it is not known where the kernel has it; a thread of the kernel's is one without a frame pointer */
        now->born = now->exec_vm = now->loads = 0;
        now->mm = 1;
        return;
    }
    u8 *task = (u8 *)task_now();
    u64 mm = *(u64 *)(task + TASK_MM), leader = *(u64 *)(task + TASK_GROUP_LEADER);
    u64 *loaded = loads.lookup(&pid);
    now->born = leader ? *(u64 *)((u8 *)leader + TASK_START_BOOTTIME) : 0;
    now->mm = mm;
    now->exec_vm = mm ? *(u64 *)((u8 *)mm + MM_EXEC_VM) : 0;
    now->loads = loaded ? *loaded : 0;
}

/* Sets up the scratch for a walk from these registers. */
#define BEGIN_WALK(scratch, who, regs)                                                                                                  \
    ({                                                                                                                                 \
        struct start *start = &(scratch)->copied.start;                                                                                \
        start->ip = (regs)->ip;                                                                                                        \
        start->sp = (regs)->sp;                                                                                                        \
        start->bp = (regs)->bp;                                                                                                        \
        start->bx = (regs)->bx;                                                                                                        \
        start->r12 = (regs)->r12;                                                                                                      \
        start->r13 = (regs)->r13;                                                                                                      \
        start->r14 = (regs)->r14;                                                                                                      \
        start->r15 = (regs)->r15;                                                                                                      \
        __builtin_memset((scratch)->guessed, 0, sizeof((scratch)->guessed));                                                           \
        __builtin_memset((scratch)->interrupted, 0, sizeof((scratch)->interrupted));                                                   \
        generation_of(who, &(scratch)->copied.of);                                                                                     \
    })

/* Whose rules a walk goes by. */
static __always_inline void find_space(struct scratch *scratch, u32 pid) {
    const struct generation *now = &scratch->copied.of;
    struct space *space = spaces.lookup(&pid);
    scratch->space = 0;
    scratch->shift = 63;
    if (!space || (space->of.born ^ now->born) | (space->of.mm ^ now->mm) | (space->of.exec_vm ^ now->exec_vm) |
                      (space->of.loads ^ now->loads))
        return;
    scratch->space = space->number;
    scratch->shift = space->shift;
}

/* A value, or 0, without a branch. */
static __always_inline u64 if_equal(u64 one, u64 other, u64 value) {
    u64 difference = one ^ other;
    return value & ((hidden(difference | -difference) >> 63) - 1);
}

/* The rule of this key; RULE_NONE where there is none. */
static __always_inline u64 rule_of(u64 key, u64 shift) {
    u32 index = (key ^ key >> 13) * 0x9e3779b97f4a7c15ULL >> (shift & 63); /* by one number alone, those of a stride would crowd */
    struct bucket *bucket = rules.lookup(&index);
    if (!bucket)
        return 0;
    return if_equal(bucket->slots[0].key, key, bucket->slots[0].rule) | if_equal(bucket->slots[1].key, key, bucket->slots[1].rule) |
           if_equal(bucket->slots[2].key, key, bucket->slots[2].rule) | if_equal(bucket->slots[3].key, key, bucket->slots[3].rule);
}

/* The rule for an address of a space. A return address has its own. An instruction may have one, or the block that it is in: a CPU
 * sample comes at any instruction, and most of them would be met for the first time. */
static __always_inline u64 rule_for(u64 ip, u64 exact, u64 space, u64 shift) {
    u64 key = ip | exact << ADDRESS_BITS | space << 48, rule = rule_of(key, shift);
    if (hidden(exact) && !rule)
        rule = rule_of((key & -(u64)BLOCK) | 1ULL << 63, shift);
    return forgotten(rule, ip);
}

/* Sets a bit, if it is 1, for the address behind the one at `at`. */
static __always_inline void mark_next(u64 *bits, u64 at, u64 bit) {
    u64 next = below(MAX_DEPTH, at + 1);
    bits[next / 64] |= bit << (next & 63);
}

BPF_PROG_ARRAY(phases, PHASES);
BPF_PROG_ARRAY(sample_phases, PHASES); /* programs on perf events, which are of another type */
BPF_PROG_ARRAY(wait_phases, PHASES);   /* of uprobe sessions: the same ones, loaded once more */

/* Begins a walk, after BEGIN_WALK. */
static __always_inline void start_walk(struct scratch *scratch, u32 pid, u64 epoch, enum phase then) {
    find_space(scratch, pid);
    scratch->hashes[0] = (pid ^ epoch << 32) * 0x9e3779b97f4a7c15ULL + scratch->space;
    scratch->hashes[1] = pid + (epoch << 32) + (scratch->space << 16);
    scratch->then = then;
    scratch->epoch = epoch;
    scratch->ip = scratch->copied.start.ip;
    scratch->sp = scratch->copied.start.sp;
    scratch->bp = scratch->copied.start.bp;
    scratch->bp_at = 0;
    scratch->exact = 1;
    scratch->is_guess = scratch->depth = scratch->base = scratch->limit = scratch->slot = 0;
}

/* Walks some frames; gives what follows. */
static __always_inline u32 walk(struct scratch *scratch) {
    u64 ip = scratch->ip, sp = scratch->sp, bp = scratch->bp, bp_at = scratch->bp_at, exact = scratch->exact;
    u64 id = scratch->hashes[0], check = scratch->hashes[1], depth = scratch->depth, space = scratch->space;
    u64 is_guess = scratch->is_guess, shift = scratch->shift;
    int goes_on = 0;
#pragma clang loop unroll(disable)
    for (u32 i = 0; i <= FRAMES_A_TURN; i++) {
        goes_on = 1;
        if (i == FRAMES_A_TURN)
            break;
        goes_on = 0;
        scratch->walked = DEEP;
        if (depth >= STACK_DEPTH)
            break;
        u64 at = below(MAX_DEPTH, depth);
        /* Or the verifier walks once more for each value that it knows these to have. */
        exact = forgotten(exact, ip);
        bp_at = forgotten(bp_at, ip);
        is_guess = forgotten(is_guess, ip);
        scratch->ips[at] = ip;
        depth++;
        add_to_hashes(&id, &check, ip);
        scratch->walked = MISSED;
        u64 rule = ip >> ADDRESS_BITS ? RULE_NONE : FRAME_POINTERS_ONLY ? BY_FRAME_POINTER : rule_for(ip, exact, space, shift);
        u64 kind = RULE_KIND(rule);
        if (hidden(is_guess) && kind == RULE_NONE) {
            /* Nobody knows the address that it led to, so it may be none. */
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
            scratch->walked = WHOLE;
            break;
        }
        is_guess = FRAME_POINTERS_ONLY ? 0 : RULE_GUESSES(rule) & ~RULE_LEAVES(rule); /* the other stack has to be copied first */
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
            /* sp is at the ucontext: rsp and rip are at 160 of it, rbp at 120 */
            if (read_user(scratch->pair, 16, (void *)(sp + 160)))
                break;
            bp_at = sp + 120;
            sp = scratch->cfas[at] = scratch->pair[0];
            ip = scratch->pair[1];
            exact = 1;
            continue;
        }
        kind = hidden(kind);
        u64 by_bp = (1 << RULE_BY_RBP | 1 << RULE_BY_DEREF) >> kind & 1, deref = 1 << RULE_BY_DEREF >> kind & 1, by_bx = 1 << RULE_BY_RBX >> kind & 1;
        if (hidden(by_bp) && bp_at) {
            if (read_user(&scratch->pair[0], 8, (void *)bp_at))
                break;
            bp = scratch->pair[0];
            bp_at = 0;
        }
        by_bp = forgotten(by_bp, ip);
        bp_at = forgotten(bp_at, ip);
        u64 base = choose(by_bp, bp, choose(by_bx, scratch->copied.start.bx, sp));
        u64 cfa = base + RULE_CFA(rule), of_bp = choose(deref, bp, cfa) + RULE_RBP(rule);
        if (hidden(deref)) {
            if (read_user(&scratch->pair[0], 8, (void *)cfa))
                break;
            cfa = scratch->pair[0];
        }
        bp_at = choose(deref | !!RULE_RBP(rule), of_bp, bp_at);
        /* A caller's frame lies further up, or on another stack. */
        if (cfa & 7 || (cfa <= sp && !RULE_LEAVES(rule)) || read_word(scratch, cfa - 8, &scratch->pair[1]))
            break;
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
    scratch->ip = ip;
    scratch->sp = sp;
    scratch->bp = bp;
    scratch->bp_at = bp_at;
    scratch->exact = exact;
    scratch->is_guess = is_guess;
    scratch->depth = depth;
    scratch->hashes[0] = id;
    scratch->hashes[1] = check;
    if (goes_on)
        return WALK;
    return scratch->walked == MISSED && !FRAME_POINTERS_ONLY ? MISS : scratch->then;
}

int on_walk(struct pt_regs *ctx) {
    struct scratch *scratch = own_scratch(owner_of(0));
    if (scratch)
        phases.call(ctx, walk(scratch));
    return 0;
}

int on_sample_walk(struct bpf_perf_event_data *ctx) {
    struct scratch *scratch = own_scratch(owner_of(1));
    if (scratch)
        sample_phases.call(ctx, walk(scratch));
    return 0;
}

/* Tells the paths apart that end a walk alike: by the words on the stack above that may be addresses, as return addresses are. */
static __always_inline u64 way_of(struct scratch *scratch, u32 tid) {
    u64 hash = mixed(mixed(scratch->hashes[0], tid), scratch->sp), from = scratch->sp;
#pragma clang loop unroll(disable)
    for (u32 i = 0; i < WAY_WORDS; i++, from += 8) {
        scratch->pair[0] = 0;
        if (read_word(scratch, from, &scratch->pair[0]))
            from |= PAGE - 8; /* a page that was never touched; those above may be there */
        u64 word = scratch->pair[0];
        hash = choose(!!(word >> LEAST_CODE) & !(word >> ADDRESS_BITS), mixed(hash, word), hash);
    }
    return hash;
}

/* Copies pages from an address on. Gives 0 when there was room. */
static __always_inline long send_pages(struct scratch *scratch, u64 from) {
    scratch->sent = scratch->absent = 0; /* in memory, where the verifier forgets them: or it goes on for each combination */
#pragma clang loop unroll(disable)
    for (u32 i = 0; i < 4 * COPY_PAGES; i++) {
        if (*(volatile u64 *)&scratch->sent >= COPY_PAGES || *(volatile u64 *)&scratch->absent >= MOST_ABSENT)
            break;
        struct copied *page = copies.ringbuf_reserve(sizeof(struct copied) + PAGE);
        if (!page)
            return -1;
        bpf_probe_read_kernel(page, sizeof(struct copied), &scratch->copied);
        page->address = from + (u64)i * PAGE;
        /* A page of the stack that was never touched is not there; those above it may be. */
        long failed = read_user(page + 1, PAGE, (void *)(from + (u64)i * PAGE));
        if (failed) {
            copies.ringbuf_discard(page, BPF_RB_NO_WAKEUP);
            scratch->absent++;
            continue;
        }
        u64 *words = (u64 *)(page + 1), which = below(PAGE / 8, scratch->slot / 8);
        words[which] ^= if_equal(page->address, scratch->slot & -(u64)PAGE, words[which] ^ scratch->returns_to);
        scratch->absent = 0;
        scratch->sent++;
        copies.ringbuf_submit(page, BPF_RB_NO_WAKEUP);
    }
    return 0;
}

/* The stack pointer of what a signal interrupted, if its handler runs on a stack of its own: the kernel has saved it there, together
 * with where that stack is (struct ucontext). 0 where there is no such thing. */
static __always_inline u64 interrupted_stack(struct scratch *scratch) {
    u8 *task = (u8 *)task_now();
    u64 start = *(u64 *)(task + TASK_SAS_SS_SP), size = *(u64 *)(task + TASK_SAS_SS_SIZE);
    u64 at = (scratch->sp + 15) & -16ULL;
    if (scratch->sp - start >= size)
        return 0;
#pragma clang loop unroll(disable)
    for (u32 i = 0; i < SCANNED / 16; i++, at += 16) {
        if (read_word(scratch, at, &scratch->pair[0]))
            break;
        /* It is aligned to 16 bytes; ss_sp is at 16 of it, ss_size at 32, rsp at 160. A signal that came to the handler of another
         * one came to this stack, too. */
        if (scratch->pair[0] == start && !read_user(&scratch->pair[0], 8, (void *)(at + 16)) && scratch->pair[0] == size &&
            !read_user(&scratch->pair[1], 8, (void *)(at + 144)) && scratch->pair[1] - start >= size)
            return scratch->pair[1];
    }
    return 0;
}

/* Copies the stack from where the walk began; from where it ended, if that is far above. Gives 0 when there was room. */
static __always_inline long send_copy(struct scratch *scratch) {
    if (scratch->bp_at && !read_user(&scratch->pair[0], 8, (void *)scratch->bp_at))
        scratch->bp = scratch->pair[0];
    scratch->copied.ip = scratch->ip;
    scratch->copied.sp = scratch->sp;
    scratch->copied.bp = scratch->bp;
    scratch->copied.is_exact = scratch->exact;
    scratch->copied.depth = scratch->depth;
    u64 begin = scratch->copied.start.sp, end = scratch->sp;
    u64 interrupted = interrupted_stack(scratch);
    scratch->pair[0] = end - begin < COPY_PAGES * PAGE / 2 ? begin : end;
    scratch->pair[1] = interrupted;
#pragma clang loop unroll(disable)
    for (u32 i = 0; i < 2; i++) {
        u64 from = scratch->pair[i & 1];
        if (hidden(from) && send_pages(scratch, from & -(u64)PAGE))
            return -1;
    }
    struct copied *last = copies.ringbuf_reserve(sizeof(struct copied) + PAGE);
    if (!last)
        return -1;
    bpf_probe_read_kernel(last, sizeof(struct copied), &scratch->copied);
    last->address = 0;
    copies.ringbuf_submit(last, BPF_RB_FORCE_WAKEUP);
    return 0;
}

/* Before a library is loaded or unloaded by dlopen, in the thread that does it. */
int on_load(struct pt_regs *ctx) {
    u32 pid = bpf_get_current_pid_tgid() >> 32;
    u64 one = 1, *count = loads.lookup(&pid);
    if (count)
        __sync_fetch_and_add(count, 1);
    else
        loads.update(&pid, &one);
    return 0;
}
