// SPDX-License-Identifier: Apache-2.0
// Code that changes: lineage TOLD ROUNDS CHILDREN LIBRARY... loads the libraries in turn at one address, forks, and executes itself.
// Without libraries it forks, and each child launches once and ends.
//
// Behind each launch it writes to TOLD, a line a launch, what libgcc's unwinder says then: process, thread and return addresses, in
// hexadecimal. A line "at ADDRESS" tells where a library was loaded. LAUNCHING_ELF and LAUNCHING_KERNEL: module and kernel.
// PARENT_PAUSES: each stack of the first process is known before its mappings change, and none of its children's that end.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <execinfo.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "one_kernel.h"

enum { MOST = 64, AGAIN = 4, PAUSE_US = 3000, DURATION_NS = 1000 };

static int told;
static int pauses = -1; // in all rounds, in none, or -1: in half of them
static ze_kernel_handle_t kernel;

static void prepare(void)
{
    ze_module_handle_t module;
    if (make_kernel(getenv("LAUNCHING_ELF"), getenv("LAUNCHING_KERNEL"), &module, &kernel))
        abort();
    zexStandinSetLaunch("launch", 0, DURATION_NS);
    void *frame;
    backtrace(&frame, 1); // which loads libgcc
}

__attribute__((noipa)) static void launch(void)
{
    const ze_group_count_t groups = {1, 1, 1};
    void *frames[MOST];
    char line[MOST * 20];
    zeCommandListAppendLaunchKernel(NULL, kernel, &groups, NULL, 0, NULL);
    int count = backtrace(frames, MOST), length = sprintf(line, "launch %x %x", getpid(), gettid());
    for (int i = 1; i < count; i++)
        length += sprintf(line + length, " %lx", (long)frames[i]);
    line[length++] = '\n';
    if (write(told, line, length) != length)
        abort();
}

__attribute__((noipa)) static void deeper(int left)
{
    volatile char room[24];
    room[0] = left;
    if (left)
        deeper(left - 1);
    else
        launch();
    room[1] = left;
}

static void load(int round, int count, char **libraries)
{
    void *library = dlopen(libraries[round % count], RTLD_NOW);
    void (*work)(void (*)(void), int) = dlsym(library, "work");
    dprintf(told, "at %lx\n", (long)work);
    for (int again = 0; again < AGAIN; again++) {
        work(launch, 3);
        if (pauses < 0 ? round & 2 : pauses)
            usleep(PAUSE_US); // so that the stacks of some rounds are known before the end, and of others are not
    }
    dlclose(library);
}

int main(int count, char **words)
{
    told = open(words[1], O_WRONLY | O_CREAT | O_APPEND, 0600);
    int rounds = atoi(words[2]), children = atoi(words[3]);
    prepare();
    if (getenv("PARENT_PAUSES"))
        pauses = 1;
    for (int round = 0; round < rounds; round++)
        load(round, count - 4, words + 4);
    for (int child = 0; child < children; child++) {
        if (!fork()) {
            if (pauses > 0)
                pauses = 0;
            deeper(child % 3);
            if (count == 4)
                _exit(0);
            load(child, count - 4, words + 4);
            deeper(1);
            char *others[] = {words[0], words[1], "0", "0", NULL};
            if (child & 1)
                execv(words[0], others);
            _exit(0);
        }
        if (child & 4 || count == 4)
            wait(NULL);
    }
    for (int again = 0; !children && again < AGAIN; again++)
        deeper(again);
    while (wait(NULL) > 0)
        ;
    return 0;
}
