// SPDX-License-Identifier: Apache-2.0
// Stacks of a program in C that any C library can run: plain. Each calls probe_me with a number of its own.
#include <alloca.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#define NOINLINE __attribute__((noinline, noclone))
#define KEEP __asm__ volatile("" ::: "memory") // so that what comes before it is not a tail call

void probe_me(long);

enum { THREADS = 3, ROUNDS = 4, DEEPEST = 30, STACK = 65536 };

static atomic_long serial;

NOINLINE void stop(void)
{
    probe_me(++serial);
    KEEP;
}

NOINLINE static int deep(int left)
{
    volatile char room[40];
    room[0] = left;
    int result = left ? deep(left - 1) + room[0] : (stop(), 1);
    KEEP;
    return result;
}

NOINLINE static int variable(int left)
{
    char *room = alloca(16 + left * 8 % 200);
    memset(room, left, 16);
    int result = left ? variable(left - 1) : (stop(), 0);
    KEEP;
    return result + room[3];
}

NOINLINE static int aligned(int left)
{
    _Alignas(64) volatile char room[64];
    room[1] = left;
    int result = left ? aligned(left - 1) : (stop(), 0);
    KEEP;
    return result + room[1];
}

NOINLINE _Noreturn static void jumps(jmp_buf *where)
{
    stop();
    longjmp(*where, 1);
}

NOINLINE static void without_return(void)
{
    jmp_buf where;
    if (!setjmp(where))
        jumps(&where);
    stop();
    KEEP;
}

static void *own(void *unused)
{
    for (int round = 0; round < ROUNDS; round++)
        deep(round * DEEPEST / ROUNDS);
    variable(5);
    aligned(4);
    without_return();
    KEEP;
    return unused;
}

// Called by the C library.
static int compare(const void *one, const void *other)
{
    if (*(const int *)one == 7)
        stop();
    return *(const int *)one - *(const int *)other;
}

static void sorting(void)
{
    int numbers[] = {3, 7, 1, 9, 4};
    qsort(numbers, 5, sizeof(int), compare);
    KEEP;
}

static void handler(int number)
{
    stop();
    if (number == SIGUSR1)
        raise(SIGUSR2);
    KEEP;
}

static void signals(void)
{
    struct sigaction action = {.sa_handler = handler};
    sigaction(SIGTERM, &action, NULL);
    raise(SIGTERM);
    stack_t alternate = {.ss_size = STACK, .ss_sp = malloc(STACK)};
    sigaltstack(&alternate, NULL);
    action.sa_flags = SA_ONSTACK;
    sigaction(SIGUSR1, &action, NULL);
    sigaction(SIGUSR2, &action, NULL);
    raise(SIGUSR1);
}

int main(void)
{
    pthread_t threads[THREADS];
    own(NULL);
    for (int i = 0; i < THREADS; i++)
        pthread_create(&threads[i], NULL, own, NULL);
    for (int i = 0; i < THREADS; i++)
        pthread_join(threads[i], NULL);
    sorting();
    signals();
    atexit(stop);
    return 0;
}
