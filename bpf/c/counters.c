// SPDX-License-Identifier: GPL-2.0
/* What the programs count, and by that when they wake the reader (compiled behind unwind.c).
 *
 * Numbers without a definition in the other files: *_WAKE_EVERY are set by the loader.
 */
/* Each thing is counted once: what a launch lacks is counted only if the launch itself arrives. */
enum counter {
    LAUNCHES,        /* the probe fired */
    LAUNCHES_LOST,   /* no room in the ring buffer, or very many of one call */
    BAD_ARGS,        /* launches whose arguments could not be read */
    STACKS,          /* travelled */
    STACKS_LOST,     /* launches without one: no room in the ring buffer; tried again at the next with that stack */
    STACKS_FAILED,   /* launches without one: other programs used the scratch, too */
    STACKS_COLLIDED, /* travelled under an id of their own */
    COMPILED,        /* the probe fired */
    COMPILED_LOST,   /* no room, or the path could not be read */
    PROBE_NS,        /* time spent in these programs */
    OTHERS,          /* launches of processes that are not to be recorded */
    STACKS_TRUNCATED, /* launches whose stack is as deep as the limit, and so may be deeper */
    HANDLES_UNREADABLE, /* launches of which a pointer led nowhere */
    HANDLES_UNKNOWN,  /* launches whose handle is none that the driver's layout knows */
    HANDLES_ASTRAY,   /* launches whose address is none, or not in the memory that holds the code */
    HANDLES_CHANGED,  /* launches whose handle had another address before */
    KERNELS,          /* described */
    PIECES_LOST,      /* of names, code and modules: no room, or not to be read */
    STACKS_MISSED,    /* launches whose stack lacked a rule: it was copied */
    STACKS_PRESUMED,  /* launches that lacked the same rule while that copy was on its way: they are said to have its stack */
    COPIES_LOST,      /* no room for all of it */
    SAMPLES,          /* of CPUs */
    SAMPLES_LOST,     /* no room in the ring buffer */
    SAMPLE_NS,        /* time spent in on_sample */
    CODES_SENT,       /* code objects of Python */
    CODES_LOST,       /* no room, or not to be read: tried again */
    PYTHON_LOST,      /* stacks without their frames of Python: no room */
    EXECUTIONS,       /* calls that execute command lists */
    LIST_EVENTS,      /* lists that were closed, reset or destroyed */
    LISTS_LOST,       /* executions of lists, or events: no room in the ring buffer, or not to be read */
    TRANSFERS,        /* calls that copy or fill */
    WAITS,            /* that were begun and are followed */
    WAITS_LOST,       /* no room, or the beginning is not known */
    WAITS_INSIDE,     /* of others: they are part of these */
    WAITS_ASTRAY,     /* where no return address was found */
    WAIT_POLLS,       /* with a timeout of 0: none */
    WAIT_NS,          /* time spent in on_wait */
    COUNTERS,
};

struct counters {
    u64 values[COUNTERS];
};

BPF_PERCPU_ARRAY(counters, struct counters, 1);

/* Returns how many it makes on this CPU, which is only exact enough to wake the reader by. */
static __always_inline u64 count(enum counter what, u64 n) {
    u32 zero = 0;
    struct counters *counted = counters.lookup(&zero);
    if (!counted)
        return 0;
    u64 which = __builtin_constant_p(what) ? what : at_most(COUNTERS - 1, what);
    __sync_fetch_and_add(&counted->values[which], n); /* atomic: a preempted program may be about to add, too */
    return counted->values[which];
}

/* The reader looks every so often anyway, and waking it costs the application: so only once in `every` of this CPU's
 * records, which the loader chooses as a fraction of what the buffer holds. */
static __always_inline u64 wakeup(u64 nth, u64 every) {
    return nth % every == 0 ? BPF_RB_FORCE_WAKEUP : BPF_RB_NO_WAKEUP;
}
