// SPDX-License-Identifier: GPL-2.0
/* The recorder's settings, the programs' counters, and when a program wakes the reader of a ring buffer (compiled after
 * unwind.c).
 *
 * The loader sets *_WAKE_BYTES, which the other files use.
 */

#define RECORD_HEADER 8 /* bytes, in a ring buffer */

BPF_ARRAY(settings, struct settings, 1);

struct counters {
    u64 values[COUNTERS];
};

BPF_PERCPU_ARRAY(counters, struct counters, 1);

/* Adds `n` to a counter. */
static __always_inline void count(enum counter what, u64 n) {
    u32 zero = 0;
    struct counters *counted = counters.lookup(&zero);
    if (!counted)
        return;
    u64 which = __builtin_constant_p(what) ? what : at_most(COUNTERS - 1, what);
    __sync_fetch_and_add(&counted->values[which], n); /* atomic, as this program may have preempted another one that adds */
}

/* Returns the flag for submitting a record of a ring buffer whose records all have `bytes`: one record in each `every` bytes
 * of the buffer wakes the reader, because a wakeup costs the application time and the reader also polls. `every` is a fraction
 * of the buffer's size, and a power of two. */
static __always_inline u64 wakeup(const void *record, u64 bytes, u64 every) {
    u32 zero = 0;
    const u8 *origin = (const u8 *)settings.lookup(&zero); /* the verifier allows nothing but differences of addresses */
    u64 at = origin ? (const u8 *)record - origin : 0;
    return (at & (every - 1)) < bytes + RECORD_HEADER ? BPF_RB_FORCE_WAKEUP : BPF_RB_NO_WAKEUP;
}
