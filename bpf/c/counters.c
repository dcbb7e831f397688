// SPDX-License-Identifier: GPL-2.0
/* The programs' counters, which also decide when a program wakes the reader (compiled after unwind.c).
 *
 * The loader sets *_WAKE_EVERY, which the other files use.
 */

struct counters {
    u64 values[COUNTERS];
};

BPF_PERCPU_ARRAY(counters, struct counters, 1);

/* Adds `n` to a counter. Returns its value on this CPU, which is inexact if another program interrupts, but good enough for
 * wakeup(). */
static __always_inline u64 count(enum counter what, u64 n) {
    u32 zero = 0;
    struct counters *counted = counters.lookup(&zero);
    if (!counted)
        return 0;
    u64 which = __builtin_constant_p(what) ? what : at_most(COUNTERS - 1, what);
    __sync_fetch_and_add(&counted->values[which], n); /* atomic, as this program may have preempted another one that adds */
    return counted->values[which];
}

/* Returns the flag for submitting this CPU's nth record: wakes the reader only once in `every` records, because a wakeup
 * costs the application time and the reader also polls. The loader chooses `every` as a fraction of the buffer's size. */
static __always_inline u64 wakeup(u64 nth, u64 every) {
    return nth % every == 0 ? BPF_RB_FORCE_WAKEUP : BPF_RB_NO_WAKEUP;
}
