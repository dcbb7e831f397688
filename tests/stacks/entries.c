/* SPDX-License-Identifier: Apache-2.0
 * entries SECONDS: calls each function of entries.S in a tight loop, for so long. */
#include <stdlib.h>
#include <time.h>

#define EACH(with) with(push_rbx) with(push_rbp) with(push_r12) with(nop) with(endbr64) with(sub) with(nop5) with(ret) with(jmp) with(call) with(mov)
#define DECLARE(name) void enter_##name(void);
#define CALL(name) enter_##name();
EACH(DECLARE)

__attribute__((noinline)) void inner(void) {
    for (int i = 0; i < 100; i++) {
        EACH(CALL)
    }
}

__attribute__((noinline)) void middle(double seconds) {
    struct timespec now, began;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &began);
    do {
        inner();
        clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
    } while (now.tv_sec - began.tv_sec + (now.tv_nsec - began.tv_nsec) / 1e9 < seconds);
}

int main(int argc, char **argv) {
    middle(argc > 1 ? atof(argv[1]) : 1);
    return 0;
}
