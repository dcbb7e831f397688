// SPDX-License-Identifier: Apache-2.0
// For each line of its input, BYTES WORD, calls probe_me from `through`, which has no call frame information and takes
// so many bytes of the stack, full of this word; then `plain`, 256 bytes of code for which the same row is in force.
// Tells where `through` and its caller go on, and the address of main. For a third word, COUNT, calls so often, from `odd`
// and `even` by turns, with more bytes and another word each time; and tells where these two are instead.
#include <stdio.h>

void through(long number, long bytes, long word);
void plain(long number);
int main(void);
extern char behind_probe_me[];
void *caller;

__asm__(".text\n"
        "through:\n"
        "    mov (%rsp), %rax\n"
        "    mov %rax, caller(%rip)\n"
        "    push %rbx\n"
        "    push %r12\n"
        "    push %r13\n"
        "    mov %rdi, %r12\n"
        "    mov %rsi, %rbx\n"
        "    sub %rbx, %rsp\n"
        "    mov %rsp, %rdi\n"
        "    mov %rbx, %rcx\n"
        "    shr $3, %rcx\n"
        "    mov %rdx, %rax\n"
        "    rep stosq\n"
        "    mov %r12, %rdi\n"
        "    call probe_me\n"
        ".globl behind_probe_me\n"
        "behind_probe_me:\n"
        "    add %rbx, %rsp\n"
        "    pop %r13\n"
        "    pop %r12\n"
        "    pop %rbx\n"
        "    ret\n"
        ".globl plain\n"
        ".type plain, @function\n"
        ".p2align 6\n"
        "plain:\n"
        "    .cfi_startproc\n"
        "    .skip 256, 0x90\n"
        "    ret\n"
        "    .cfi_endproc\n"
        ".size plain, . - plain\n");

__attribute__((noipa)) void odd(long number, long bytes, long word)
{
    through(number, bytes, word);
    __asm__ volatile("" ::: "memory");
}

__attribute__((noipa)) void even(long number, long bytes, long word)
{
    through(number, bytes, word);
    __asm__ volatile("nop" ::: "memory");
}

int main(void)
{
    long number = 0, bytes, word, count;
    char line[100];
    while (fgets(line, sizeof(line), stdin)) {
        int words = sscanf(line, "%ld %ld %ld", &bytes, &word, &count);
        if (words == 2) {
            through(++number, bytes, word);
            plain(number);
            printf("%p %p %p\n", (void *)behind_probe_me, caller, (void *)main);
        }
        for (long i = 0; words == 3 && i < count; i++) {
            number++;
            (number & 1 ? odd : even)(number, bytes + 16 * (i & 63), word + number);
        }
        if (words == 3)
            printf("%p %p\n", (void *)odd, (void *)even);
        fflush(stdout);
    }
    return 0;
}
