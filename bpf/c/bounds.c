// SPDX-License-Identifier: GPL-2.0
/* What all of the programs are written with (compiled before them): helpers by their numbers, numbers that the loader fills in, and
 * how to keep the verifier's bounds whichever clang compiles them.
 */
#include <uapi/linux/ptrace.h>
#include <uapi/linux/bpf_perf_event.h>

#define ANY 1 /* elements of a map of which the loader says how many there are */

/* Helpers by their numbers, which are the kernel's ABI. bcc 0.26 does not know the first one's name in every build (Linux
 * 5.15); where it meets the names of the others (Linux 5.5) it reads all of the kernel's symbols to see whether they are
 * there, which would take as long as all the rest of compiling. */
static u64 (*attach_cookie)(void *ctx) = (void *)174;
static u64 (*task_now)(void) = (void *)158; /* its members are read without a helper */
static long (*read_user)(void *to, u32 size, const void *from) = (void *)112;
static long (*read_user_text)(void *to, u32 size, const void *from) = (void *)114;

/* A number that the loader fills in: a 64-bit immediate load of a number that stands for it, which bytecode.py finds. To the verifier
 * it is a constant, and to clang any number. */
#define NAMED(magic)                                                                                                                    \
    ({                                                                                                                                 \
        u64 named;                                                                                                                     \
        asm("%0 = " #magic " ll" : "=r"(named));                                                                                       \
        named;                                                                                                                         \
    })

/* What the verifier makes of these programs must not depend on which clang compiled them: newer ones drop a mask that they can
 * prove to have no effect, though it tells the verifier a bound, and turn arithmetic into branches, of which the verifier follows
 * each to the end of the program. */

/* Clang knows nothing about what this returns. */
static __always_inline u64 hidden(u64 value) {
    asm volatile("" : "+r"(value));
    return value;
}

/* Nor does the verifier, which else goes on separately for each value that it knows a register to have. `unknown` is a number that
 * the verifier knows nothing about, such as the time. */
static __always_inline u64 forgotten(u64 value, u64 unknown) {
    asm volatile("%0 ^= %1\n\t%0 ^= %1" : "+r"(value) : "r"(unknown));
    return value;
}

/* An index below `size`, a power of two. */
static __always_inline u64 below(u64 size, u64 index) {
    return hidden(index) & (size - 1);
}

/* The smaller of the two, of which the verifier knows that it is no more than `most`. */
static __always_inline u64 at_most(u64 most, u64 value) {
    asm volatile("if %0 <= %1 goto +1\n\t%0 = %1" : "+r"(value) : "i"(most));
    return value;
}

/* One of two values, without a branch: `condition` is 0 or 1. */
static __always_inline u64 choose(u64 condition, u64 if_1, u64 if_0) {
    return if_0 ^ ((if_0 ^ if_1) & -hidden(condition));
}
