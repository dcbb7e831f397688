// SPDX-License-Identifier: GPL-2.0
/* Walks that lack a rule: which path a walk took, and a copy of the stack, by which user space finishes the walk (compiled after
 * unwind.c). launches.c decides whether a copy is sent.
 */
#define MOST_ABSENT 16   /* absent pages in a row that end a copy */
#define MISSED_PATH_NS 1000000000ULL /* time until another copy of a path is sent */
#define MOST_COPIES 64   /* in that time, of walks of a thread that end alike, for one of which user space has found no rule */
#define COPIES_OF_SAMPLES (1U << 31)
#define PAGES_IN_FLIGHT 6400 /* those of copies of a process that user space has not answered; the ring buffer has 8192 */
#define PAGES_OF_SAMPLES 3200 /* the same, of CPU samples' stacks */
#define SAMPLES_TOGETHER 16 /* copies of CPU samples' stacks of a process for which user space is woken; it also polls */
#define SCANNED (4 * WINDOW) /* bytes of a signal handler's stack that are searched for the saved registers */
#define MISSED_PATH_WINDOWS 5 /* of the stack above the end of a walk: these distinguish paths */
#define LARGEST_STACK (64ULL << 20) /* bytes; a start farther above is another stack's: coroutines have stacks of their own */
#define LEAST_CODE 21    /* binary logarithm of the lowest address of code: 2 or 4 MiB in executables with fixed addresses */

/* By missed_path_key(): paths of which a copy was sent. By end_key(): the number of copies of all paths that end alike; the id
 * is 0 if user space has found no rule for one of them. */
BPF_TABLE("lru_hash", u64, struct missed_path, missed_paths, ANY);

/* By process, with COPIES_OF_SAMPLES for stacks of CPU samples: what was sent, and how many records of it user space has
 * answered; the highest bit says that it wants none. */
BPF_TABLE("lru_hash", u32, struct copying, copying, ANY);
BPF_TABLE("lru_hash", u32, u64, copies_done, ANY);

BPF_RINGBUF_OUTPUT(copies, ANY); /* each record has a page of a stack; the last record of a copy has none */

/* Returns a key that distinguishes the paths of walks that end alike, by the words above that may be return addresses. A window
 * that cannot be read is all zeros: the helper clears it. */
static __always_inline u64 missed_path_key(struct scratch *scratch, u32 tid) {
    u64 hash = mixed(mixed(scratch->hashes[0], tid), scratch->sp), window = scratch->sp & -(u64)WINDOW;
/* The verifier forgets the states that it has examined of a loop in a loop, and would examine them again and again. */
#pragma clang loop unroll(full)
    for (u32 number = 0; number < MISSED_PATH_WINDOWS; number++, window += WINDOW) {
        /* Skip untouched pages; pages above may be present. */
#pragma clang loop unroll(disable)
        for (u32 i = 0; i < MOST_ABSENT * PAGE / WINDOW && read_user(scratch->window, WINDOW, (void *)window); i++)
            window = forgotten(window + WINDOW, hash); /* otherwise the verifier examines the rest for each number of windows */
        u64 before = hidden(scratch->sp - window); /* bytes of the window that are not above */
#pragma clang loop unroll(disable)
        for (u32 i = 0; i < WINDOW / 8; i++, before -= 8) {
            u64 word = scratch->window[i];
            /* The highest bits tell whether each of these holds. */
            u64 is_above = before - 1, has_low_bits = (word >> ADDRESS_BITS) - 1, has_high_bits = -(word >> LEAST_CODE);
            hash = choose((is_above & has_low_bits & has_high_bits) >> 63, mixed(hash, word), hash);
        }
    }
    return hash;
}

static __always_inline u32 copies_key(u32 pid, u64 is_sample) {
    return pid | is_sample * COPIES_OF_SAMPLES;
}

/* Returns the maximum number of pages of a copy. That of a CPU sample has more: the address where its walk ended is hardly met
 * again, so its stack is whole only if the copy reaches to the next frame for which there is a rule. */
static __always_inline u64 pages_of_copy(u64 is_sample) {
    return is_sample ? SAMPLE_COPY_PAGES : COPY_PAGES;
}

/* Whether another copy of a process's stack may be sent. If user space is late, further copies would cost the program more
 * than they are worth: the rules that the first ones lack are those that the next ones lack, too. */
static __always_inline int may_copy(u32 pid, u64 is_sample, u64 time) {
    u32 key = copies_key(pid, is_sample);
    struct copying *known = copying.lookup(&key);
    u64 *answered = copies_done.lookup(&key), done = hidden(answered ? *answered : 0);
    if (done >> 63)
        return 0;
    if (!known || (s64)(known->records - done) < (is_sample ? PAGES_OF_SAMPLES : PAGES_IN_FLIGHT))
        return 1;
    if (time < known->last + MISSED_PATH_NS)
        return 0;
    known->records = done; /* some answers never came, as the process that finishes stacks was replaced */
    return 1;
}

/* Whether the next copy wakes user space. Launches may wait for the rule that a copy of theirs lacks; those of CPU samples are
 * finished together. */
static __always_inline u64 wakes(u32 key, u64 is_sample) {
    struct copying *known = copying.lookup(&key);
    return !is_sample || !known || known->copies % SAMPLES_TOGETHER == 0;
}

static __always_inline void note_copy(u32 key, u64 time, u64 records) {
    struct copying *known = copying.lookup(&key), first = {.copies = 1, .records = records, .last = time};
    if (known) {
        known->copies++;
        __sync_fetch_and_add(&known->records, records);
        known->last = time;
    } else {
        copying.update(&key, &first);
    }
}

/* Sends pages from an address on; returns 0 unless the ring buffer is full. */
static __always_inline long send_pages(struct scratch *scratch, u64 from, u64 pages) {
    u64 numbers, most = 4 * pages, is_full = 0, last = scratch->sent + pages;
    scratch->absent = 0; /* in memory, so that the verifier does not examine the loop for each combination */
    begin_numbers(&numbers, 0, most);
#pragma clang loop unroll(disable)
    for (u64 i = 0; next_number(&numbers, i, most); i = number_after(i, from)) {
        if (*(volatile u64 *)&scratch->sent >= last || *(volatile u64 *)&scratch->absent >= MOST_ABSENT)
            break;
        struct copied *page = copies.ringbuf_reserve(sizeof(struct copied) + PAGE);
        if (!page) {
            is_full = 1;
            break;
        }
        bpf_probe_read_kernel(page, sizeof(struct copied), &scratch->copied);
        page->address = from + i * PAGE;
        /* An untouched page of the stack is absent; pages above it may be present. */
        long failed = read_user(page + 1, PAGE, (void *)(from + i * PAGE));
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
    end_numbers(&numbers);
    return is_full;
}

/* Returns the stack pointer of the code that a signal interrupted, if the handler runs on an alternate stack, else 0. The
 * kernel has saved it on that stack in a struct ucontext, which also contains the stack's address and size. */
static __always_inline u64 interrupted_stack(struct scratch *scratch) {
    u8 *task = (u8 *)this_task();
    u64 start = *(u64 *)(task + TASK_SAS_SS_SP), size = *(u64 *)(task + TASK_SAS_SS_SIZE), sp = scratch->sp;
    if (sp - start >= size || !ITERATES) /* without iterators, the verifier examines the search too often */
        return 0;
    u64 window = sp & -(u64)WINDOW, found = 0, numbers;
    begin_numbers(&numbers, 0, SCANNED / 16);
#pragma clang loop unroll(disable)
    for (u64 i = 0; next_number(&numbers, i, SCANNED / 16); i = number_after(i, sp)) {
        /* struct ucontext is aligned to 16 bytes; `at` is the address of its ss_sp, at offset 16; ss_size is at 32, rsp at
         * 160. If the saved rsp is on this stack, too, a signal interrupted another handler: search on. */
        u64 at = window + 16 * i, word = below(WINDOW / 8, 2 * i);
        if (!word && read_user(scratch->window, WINDOW, (void *)at))
            break;
        if (scratch->window[word] == start && at >= sp && !read_user(&scratch->pair[0], 8, (void *)(at + 16)) &&
            scratch->pair[0] == size && !read_user(&scratch->pair[1], 8, (void *)(at + 144)) &&
            scratch->pair[1] - start >= size) {
            found = forgotten(scratch->pair[1], sp);
            break;
        }
    }
    end_numbers(&numbers);
    return found;
}

/* Returns the address of the current thread's control block; 0 if its runtime has none that begins with its own address, as those
 * of glibc and musl do. */
static __always_inline u64 control_block(void) {
    u64 block = thread_pointer(), first;
    return read_user(&first, 8, (void *)block) ? 0 : if_equal(first, block, block);
}

/* Returns where the kernel has put the first thread's stack; 0 if that is unknown. */
static __always_inline u64 first_stack(void) {
    if (FRAME_POINTERS_ONLY) /* the offsets are unknown, and nothing is copied */
        return 0;
    u8 *mm = *(u8 **)((u8 *)this_task() + TASK_MM);
    return mm ? *(u64 *)(mm + MM_START_STACK) : 0;
}

/* Returns how many pages there are from one of a stack up to the one where it starts: below the thread's control block, or at
 * `start`, the first thread's. Memory above that is not the stack's. ~0 if both are below, or too far above. */
static __always_inline u64 pages_of_stack(u64 from, u64 block, u64 start) {
    u64 most = LARGEST_STACK / PAGE;
    u64 to_block = ((block & -(u64)PAGE) - from) / PAGE, to_start = ((start & -(u64)PAGE) - from) / PAGE;
    return hidden(to_block) < most ? to_block + 1 : hidden(to_start) < most ? to_start + 1 : ~0ULL;
}

/* Sends a copy of the stack, and of one that a signal interrupted. Where it does not reach up to the stack's start, a quarter
 * of it is of the outermost pages: a large frame may be in between, as one of 3.6 MB in CUPTI. Returns 0 unless the ring
 * buffer is full. */
static __always_inline long send_copy(struct scratch *scratch, u64 pages, u64 wakes) {
    if (scratch->bp_at && !read_user(&scratch->pair[0], 8, (void *)scratch->bp_at))
        scratch->bp = scratch->pair[0];
    scratch->copied.ip = scratch->ip;
    scratch->copied.sp = scratch->sp;
    scratch->copied.bp = scratch->bp;
    scratch->copied.is_exact = scratch->exact;
    scratch->copied.depth = scratch->depth;
    u64 begin = scratch->copied.start.sp, end = scratch->sp;
    u64 interrupted = interrupted_stack(scratch);
    u64 from = (end - begin < pages * PAGE / 2 ? begin : end) & -(u64)PAGE; /* from the walk's end if that is far above */
    u64 block = control_block(), start = scratch->copied.start_stack = first_stack(), all = pages_of_stack(from, block, start);
    u64 outermost = is_set(interrupted) | (hidden(all) <= pages) | (all == ~0ULL) ? 0 : pages / 4;
    scratch->pair[0] = from;
    scratch->pair[1] = choose(is_set(outermost), from + (all - outermost) * PAGE, interrupted & -(u64)PAGE);
    u64 most = pages - hidden(outermost);
    scratch->sent = 0;
#pragma clang loop unroll(disable)
    for (u32 i = 0; i < 2; i++) {
        from = scratch->pair[i & 1];
        all = pages_of_stack(from, block, start);
        if (hidden(from) && send_pages(scratch, from, hidden(all) < most ? all : most))
            return -1;
        most = pages;
    }
    struct copied *last = copies.ringbuf_reserve(sizeof(struct copied) + PAGE);
    if (!last)
        return -1;
    bpf_probe_read_kernel(last, sizeof(struct copied), &scratch->copied);
    last->address = 0;
    copies.ringbuf_submit(last, wakes ? BPF_RB_FORCE_WAKEUP : BPF_RB_NO_WAKEUP);
    return 0;
}
