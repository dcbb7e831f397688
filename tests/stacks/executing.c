// SPDX-License-Identifier: Apache-2.0
// Calls probe_me from a frame of FRAME bytes, and executes the other program in its place, after itself: that calls nothing.
// Arguments: the other program, and how many are to come.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

void probe_me(long number);

static __attribute__((noinline)) void inner(long number) {
    char room[FRAME];
    memset(room, 0, sizeof room);
    __asm__ volatile("" : : "r"(room) : "memory");
    probe_me(number);
    __asm__ volatile("");
}

int main(int argc, char **argv) {
    int left = argc > 2 ? atoi(argv[2]) : 0;
    for (int i = 0; left % 2 == 0 && i < 4; i++) {
        inner(FRAME);
        usleep(i == 1 ? 20000 : 0); // in which the learner learns rules
    }
    if (left == 0)
        return 0;
    char next[16];
    snprintf(next, sizeof next, "%d", left - 1);
    if (left % 2)
        execl(argv[1], argv[1], argv[0], next, NULL);
    else
        execl(argv[0], argv[0], argv[1], next, NULL);
    return 1;
}
