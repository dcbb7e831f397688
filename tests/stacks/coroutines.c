// SPDX-License-Identifier: Apache-2.0
// Calls probe_me in coroutines, to which main switches at different depths: some of makecontext, whose links differ, and one on
// a stack made by hand, as Boost.Context, libaco and others do. The argument's hundreds tell which coroutine it is; 0 is main.
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <ucontext.h>

#define COROUTINES 4
#define STACK_BYTES (64 << 10)
#define ROUNDS 20

void probe_me(long);
void switch_stack(void **left, void *entered);
extern char made_by_hand[];

static ucontext_t of_main, contexts[COROUTINES];
static void *stack_of_main, *stack_by_hand;

static void back(int which)
{
    if (which == COROUTINES - 1)
        switch_stack(&stack_by_hand, stack_of_main);
    else
        swapcontext(&contexts[which], &of_main);
}

__attribute__((noinline)) void inner(int which, int depth)
{
    if (depth)
        inner(which, depth - 1);
    else
        probe_me(100 * (which + 1));
    __asm__ volatile("");
}

__attribute__((noinline)) void coroutine(int which)
{
    for (int round = 0;; round++) {
        inner(which, round % 3);
        back(which);
    }
}

void by_hand(void)
{
    coroutine(COROUTINES - 1);
}

__attribute__((noinline)) void enter(int which, int depth)
{
    if (depth)
        enter(which, depth - 1);
    else if (which == COROUTINES - 1)
        switch_stack(&stack_of_main, stack_by_hand);
    else
        swapcontext(&of_main, &contexts[which]);
    __asm__ volatile("");
}

int main(void)
{
    for (int which = 0; which < COROUTINES - 1; which++) {
        getcontext(&contexts[which]);
        contexts[which].uc_stack.ss_sp = malloc(STACK_BYTES);
        contexts[which].uc_stack.ss_size = STACK_BYTES;
        contexts[which].uc_link = which == 0 ? NULL : which == 1 ? &of_main : &contexts[0];
        makecontext(&contexts[which], (void (*)(void))coroutine, 1, which);
    }
    // what switch_stack pops, the function that it returns to, and where that one returns
    uintptr_t *top = (uintptr_t *)((char *)malloc(STACK_BYTES) + STACK_BYTES - 64);
    top[8] = (uintptr_t)main; // as words that are left there may be
    top[7] = (uintptr_t)made_by_hand;
    top[6] = (uintptr_t)by_hand;
    stack_by_hand = top;
    for (int round = 0; round < ROUNDS; round++) {
        probe_me(0);
        for (int which = 0; which < COROUTINES; which++)
            enter(which, round % 5);
    }
    return getchar() != EOF; // the stacks are finished meanwhile
}

// Saves the registers that functions keep, leaves a stack, and enters another one. No call frame information, like Boost's.
__asm__(".text\n"
        ".type switch_stack, @function\n"
        "switch_stack:\n"
        "push %rbp\n push %rbx\n push %r12\n push %r13\n push %r14\n push %r15\n"
        "mov %rsp, (%rdi)\n mov %rsi, %rsp\n"
        "pop %r15\n pop %r14\n pop %r13\n pop %r12\n pop %rbx\n pop %rbp\n"
        "ret\n"
        ".size switch_stack, . - switch_stack\n"
        ".type made_by_hand, @function\n"
        "made_by_hand:\n"
        "ud2\n"
        ".size made_by_hand, . - made_by_hand\n");
