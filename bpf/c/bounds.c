// SPDX-License-Identifier: GPL-2.0
/* The basis of all programs (compiled first): BPF helpers, constants that the loader fills in, and functions that keep the
 * verifier's bounds whichever clang compiles the programs.
 */
#include <uapi/linux/ptrace.h>
#include <uapi/linux/bpf_perf_event.h>

#define ANY 1 /* size of maps whose size the loader sets */

/* Helpers by their numbers, which are part of the kernel's ABI. Not every build of bcc 0.26 has a name for the first one
 * (Linux 5.15). If bcc finds the names of the others (Linux 5.5) in a program, it reads all of the kernel's symbols to check
 * whether the kernel has them, which would double the time to compile. */
static u64 (*attach_cookie)(void *ctx) = (void *)174;
static long (*signal_thread)(u32 number) = (void *)117;
static u64 (*this_task)(void) = (void *)158; /* with BTF: its members can be read without a helper */
static long (*read_user)(void *to, u32 size, const void *from) = (void *)112;
static long (*read_user_text)(void *to, u32 size, const void *from) = (void *)114;
static long (*read_kernel_text)(void *to, u32 size, const void *from) = (void *)115;

/* A constant that the loader fills in: a 64-bit immediate load of a placeholder, which bytecode.py finds. The verifier sees
 * a constant, clang an unknown number. */
#define NAMED(placeholder)                                                                                                     \
    ({                                                                                                                         \
        u64 named;                                                                                                             \
        asm("%0 = " #placeholder " ll" : "=r"(named));                                                                         \
        named;                                                                                                                 \
    })

/* The verifier has to accept the programs whichever clang compiles them. Newer versions remove masks that have no effect,
 * although the verifier needs them to know a bound, and replace arithmetic by branches, each of which the verifier follows
 * to the end of the program. The following functions prevent that. */

/* Returns `value`; clang knows nothing about the result. */
static __always_inline u64 hidden(u64 value) {
    asm volatile("" : "+r"(value));
    return value;
}

/* Returns `value`; the verifier knows nothing about the result. Otherwise it examines the rest of the program once for each
 * value that a register may have. `unknown` is a number about which the verifier knows nothing, such as the time. */
static __always_inline u64 forgotten(u64 value, u64 unknown) {
    asm volatile("%0 ^= %1\n\t%0 ^= %1" : "+r"(value) : "r"(unknown));
    return value;
}

/* The kernel's iterator of numbers (Linux 6.4), by which the verifier examines a loop only until nothing new happens in it,
 * instead of as often as it may run:
 *
 *     u64 numbers;
 *     begin_numbers(&numbers, 0, most);
 *     for (u64 i = 0; next_number(&numbers, i, most); i = number_after(i, unknown))
 *         ...
 *     end_numbers(&numbers);
 *
 * The body may leave such a loop by `break` only. What it changes has to be forgotten(), or in memory whose content the
 * verifier does not track. These are functions of the kernel, not helpers: the loader replaces the placeholders by their
 * numbers in the kernel's BTF. If it has none, their result is 1 and ITERATES is 0; the verifier then knows `i`.
 *
 * An iteration takes about 10 ns more than that of a bounded loop, so whatever runs for each frame has bounded loops. */
static long (*begin_numbers)(u64 *numbers, int first, int end) = (void *)ITERATOR_NEW;
static void *(*next_of)(u64 *numbers) = (void *)ITERATOR_NEXT;
static void (*end_numbers)(u64 *numbers) = (void *)ITERATOR_DESTROY;

static __always_inline int next_number(u64 *numbers, u64 i, u64 most) {
    return hidden(i) < most && next_of(numbers);
}

static __always_inline u64 number_after(u64 i, u64 unknown) {
    return forgotten(i + 1, unknown & ITERATES);
}

/* Returns `index` modulo `size`, a power of two: an index that the verifier knows to be below `size`. */
static __always_inline u64 below(u64 size, u64 index) {
    return hidden(index) & (size - 1);
}

/* Returns the smaller of the two, which the verifier knows to be at most `most`. */
static __always_inline u64 at_most(u64 most, u64 value) {
    asm volatile("if %0 <= %1 goto +1\n\t%0 = %1" : "+r"(value) : "i"(most));
    return value;
}

/* Returns 1 if `value` is not 0, else 0, without a branch. */
static __always_inline u64 is_set(u64 value) {
    return hidden(value | -value) >> 63;
}

/* Returns one of two values without a branch; `condition` is 0 or 1. */
static __always_inline u64 choose(u64 condition, u64 if_1, u64 if_0) {
    return if_0 ^ ((if_0 ^ if_1) & -hidden(condition));
}
