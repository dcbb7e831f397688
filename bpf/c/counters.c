// SPDX-License-Identifier: GPL-2.0
/* What the programs count, and by that when they wake the reader (compiled behind unwind.c).
 *
 * Numbers without a definition in the other files: *_WAKE_EVERY are set by the loader.
 */

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
