// SPDX-License-Identifier: Apache-2.0
// Stacks with generated code in them, of which no call frame information tells: jit TOLD KIND..., KIND "framed", "frameless", or "new"
// for code that is made each time anew, in further memory that can be written, too.
//
// C calls generated code, which calls C, and so on; the innermost calls probe_me with a number of its own, or with LAUNCHING launches a
// kernel (LAUNCHING_ELF, LAUNCHING_KERNEL). Each time a line of TOLD has the return addresses, in hexadecimal, as the functions
// themselves know them: from that of the innermost to that of the outermost that main called. The first line is the process id. The
// program leaves a perf map in /tmp/perf-PID.map.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define NOINLINE __attribute__((noinline, noclone))
#define KEEP __asm__ volatile("" ::: "memory") // so that what comes before it is not a tail call

enum { SPACE = 4096, EACH = 256, DEEPEST = 6, TIMES = 20 };

typedef void function(int left, void *unused, void *above);
typedef void generated(int left, function *next);

// push %rbp; mov %rsp,%rbp; sub $48,%rsp; mov 8(%rbp),%rdx; call *%rsi; leave; ret
static const unsigned char with_frame[] = "\x55\x48\x89\xe5\x48\x83\xec\x30\x48\x8b\x55\x08\xff\xd6\xc9\xc3";
// sub $56,%rsp; mov 56(%rsp),%rdx; call *%rsi; add $56,%rsp; ret
static const unsigned char without_frame[] = "\x48\x83\xec\x38\x48\x8b\x54\x24\x38\xff\xd6\x48\x83\xc4\x38\xc3";

static FILE *told, *map;
static generated *jit;
static void *chain[2 * DEEPEST + 2]; // the outermost first
static int known;

static void tell(void)
{
    for (int i = known; i--;)
        fprintf(told, "%lx%c", (long)chain[i], i ? ' ' : '\n');
    fflush(told);
}

#ifdef LAUNCHING
#include "one_kernel.h"

enum { DURATION_NS = 1000000 };

static ze_kernel_handle_t kernel;

static void prepare(void)
{
    ze_module_handle_t module;
    if (make_kernel(getenv("LAUNCHING_ELF"), getenv("LAUNCHING_KERNEL"), &module, &kernel))
        abort();
    zexStandinSetLaunch("launch", 0, DURATION_NS);
}

NOINLINE static void look(void)
{
    const ze_group_count_t groups = {1, 1, 1};
    zeCommandListAppendLaunchKernel(NULL, kernel, &groups, NULL, 0, NULL);
    KEEP;
}
static void finish(void)
{
    zeCommandQueueSynchronize(NULL, UINT64_MAX);
}
#else
void probe_me(long);

static void prepare(void) {}

static void finish(void) {}

NOINLINE static void look(void)
{
    static long number;
    probe_me(++number);
    KEEP;
}
#endif

NOINLINE static void stop(void)
{
    chain[known++] = __builtin_return_address(0);
    look();
    tell();
    known--;
}

// Keeps no frame pointer.
NOINLINE static void in_c(int left, void *unused, void *above)
{
    volatile char room[24];
    int before = known;
    room[0] = left;
    if (above)
        chain[known++] = above;
    chain[known++] = __builtin_return_address(0);
    if (left)
        jit(left - 1, in_c);
    else
        stop();
    known = before;
    room[1] = room[0] + !unused;
}

static generated *put(char *at, const void *code, size_t size, const char *name)
{
    fprintf(map, "%lx %zx %s\n", (long)at, size, name);
    return memcpy(at, code, size);
}

static char *memory(int rights)
{
    return mmap(NULL, SPACE, rights, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
}

int main(int count, char **words)
{
    char path[64], *space = memory(PROT_READ | PROT_WRITE);
    snprintf(path, sizeof path, "/tmp/perf-%d.map", getpid());
    map = fopen(path, "w");
    generated *framed = put(space, with_frame, sizeof with_frame, "jit_with_frame");
    generated *frameless = put(space + EACH, without_frame, sizeof without_frame, "jit_without_frame");
    mprotect(space, SPACE, PROT_READ | PROT_EXEC);
    told = fopen(words[1], "w");
    fprintf(told, "%d\n", getpid());
    prepare();
    for (int i = 2; i < count; i++) {
        jit = strcmp(words[i], "framed") ? frameless : framed;
        for (int round = 0; round < TIMES; round++) {
            if (!strcmp(words[i], "new"))
                jit = put(memory(PROT_READ | PROT_WRITE | PROT_EXEC), with_frame, sizeof with_frame, "jit_with_frame");
            in_c(round % DEEPEST, NULL, NULL);
        }
    }
    finish();
    return fclose(map) | fclose(told);
}
