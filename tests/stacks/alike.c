// SPDX-License-Identifier: Apache-2.0
// alike: for each number in its input, calls probe_me with it. Of its lowest LEVELS bits, each tells by which of two calls in one
// function it gets there: these stacks are in the same place, and differ in nothing but return addresses.
#include <alloca.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

void probe_me(long);

static volatile unsigned room = 64;

#define BEHIND_1 asm volatile("nop")
#define BEHIND_0 asm volatile("xchg %ax, %ax; nop")
#define LEVEL(name, next, bit, frame)                                                                                          \
    static __attribute__((noinline)) void name(long number)                                                                    \
    {                                                                                                                          \
        frame;                                                                                                                 \
        if (number >> bit & 1) {                                                                                               \
            next(number);                                                                                                      \
            BEHIND_1;                                                                                                          \
        } else {                                                                                                               \
            next(number);                                                                                                      \
            BEHIND_0;                                                                                                          \
        }                                                                                                                      \
    }
#define FIXED
#define BY_RBP *(volatile char *)alloca(room) = 1 // its size is unknown to the compiler, so its caller is found by rbp

LEVEL(level_0, probe_me, 0, FIXED)
LEVEL(level_1, level_0, 1, FIXED)
LEVEL(level_2, level_1, 2, BY_RBP)
LEVEL(level_3, level_2, 3, FIXED)
LEVEL(level_4, level_3, 4, BY_RBP)
LEVEL(level_5, level_4, 5, FIXED)

static long *numbers, count;

static void *all(void *unused)
{
    for (long i = 0; i < count; i++)
        level_5(numbers[i]);
    return unused;
}

int main(int argc, char **argv)
{
    pthread_t threads[16];
    int others = argc > 1 ? atoi(argv[1]) : 0;
    numbers = malloc(sizeof(long) << 20);
    while (scanf("%ld", &numbers[count]) == 1)
        count++;
    for (int i = 0; i < others; i++)
        pthread_create(&threads[i], 0, all, 0);
    all(0);
    for (int i = 0; i < others; i++)
        pthread_join(threads[i], 0);
    return 0;
}
