// SPDX-License-Identifier: Apache-2.0
// bursts: for each number in its input, calls probe_me so often. No two stacks are alike, and none is where an earlier one was.
#include <alloca.h>
#include <stdio.h>

void probe_me(long);

static __attribute__((noinline)) void call(long number)
{
    volatile unsigned long word = 0x500000000000 + (number << 12); // it may be a return address, for all that is known
    probe_me(number);
    (void)word;
}

int main(void)
{
    static long number;
    int count;
    while (scanf("%d", &count) == 1) {
        *(volatile char *)alloca(1024) = 1;
        while (count--)
            call(++number);
    }
    return 0;
}
