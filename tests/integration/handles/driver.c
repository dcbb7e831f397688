/* A driver without probes, as far as a recorder sees one: functions that begin as a compiler's do, and a virtual table. */
#define _GNU_SOURCE
#include "driver.h"
#include <time.h>

const void *const kernel_class[4] = {&kernel_class}, *const other_class[4] = {&other_class};

#define FUNCTION(name, first, last)                                                                                     \
    __asm__(".globl " #name "\n.type " #name ", @function\n" #name ": .cfi_startproc\nendbr64\n" first                  \
            "\nxor %eax, %eax\n" last "\nret\n.cfi_endproc\n.size " #name ", . - " #name)
#define PUSH "push %rbp\n.cfi_def_cfa_offset 16\n.cfi_offset %rbp, -16"

FUNCTION(launch, PUSH, "pop %rbp");
FUNCTION(launch_sub, "sub $24, %rsp\n.cfi_def_cfa_offset 32", "add $24, %rsp");
FUNCTION(launch_start, PUSH, "pop %rbp"); /* is probed at its endbr64 */
/* Is probed at its je, where rbp is not a frame pointer and another is on the stack. */
FUNCTION(launch_frame,
         "sub $40, %rsp\n.cfi_def_cfa_offset 48\nmov %rbp, 24(%rsp)\n.cfi_offset %rbp, -24\n"
         "mov $16, %ebp\ntest %rdi, %rdi\nje 1f\n1:",
         "mov 24(%rsp), %rbp\nadd $40, %rsp");
FUNCTION(launch_many, PUSH, "pop %rbp");
FUNCTION(kernel_gone, PUSH, "pop %rbp");
FUNCTION(module_gone, PUSH, "pop %rbp");
FUNCTION(execute, PUSH, "pop %rbp");
FUNCTION(list_closed, PUSH, "pop %rbp");
FUNCTION(list_reset, PUSH, "pop %rbp");
FUNCTION(list_gone, PUSH, "pop %rbp");

/* Waits: as in a real driver, what is called jumps to another function, by a pointer. */
__attribute__((visibility("hidden"))) int wait_for(struct work *work, uint64_t timeout) {
    uint64_t ns = work->ns < timeout ? work->ns : timeout;
    struct timespec until;
    if (work->meanwhile)
        work->meanwhile(work);
    clock_gettime(CLOCK_MONOTONIC, &until);
    ns += until.tv_nsec;
    until.tv_sec += ns / 1000000000;
    until.tv_nsec = ns % 1000000000;
    while (work->ns && timeout && clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &until, 0))
        ;
    return timeout < work->ns ? 1 : work->result;
}
#define WAITS(name, first)                                                                                              \
    __asm__(".globl " #name "\n.type " #name ", @function\n" #name ": .cfi_startproc\nendbr64\n" first                  \
            "\nlea wait_for(%rip), %rax\njmp *%rax\n1: mov $7, %eax\nret\n.cfi_endproc\n.size " #name ", . - " #name)
WAITS(wait_event, "test %rdi, %rdi\nje 1f"); /* is probed at its je */
WAITS(wait_queue, "");                       /* at its endbr64 */

/* Calls of one launch with `depth` frames above it, each a function's own. */
int deep(int (*how)(void *, struct handle *), struct handle *kernel, int depth) {
    int result = depth ? deep(how, kernel, depth - 1) : how(0, kernel);
    __asm__ volatile("" : "+r"(result)); /* no tail call */
    return result;
}

/* with_frame(how, kernel, frame): a launch by a function that has this in rbp, without call frame information. */
__asm__(".globl with_frame\n.type with_frame, @function\nwith_frame: push %rbp\nmov %rdx, %rbp\nmov %rdi, %rax\n"
        "xor %edi, %edi\ncall *%rax\npop %rbp\nret\n.size with_frame, . - with_frame");
