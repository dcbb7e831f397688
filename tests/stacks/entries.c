/* SPDX-License-Identifier: Apache-2.0
 * entries SECONDS: calls each function of entries.S in a tight loop, for so long. After each turn it gives back the page of the
 * kernel's trampoline, so that each turn's first probe by it waits for the page again. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#define EACH(with) with(push_rbx) with(push_rbp) with(push_r12) with(nop) with(endbr64) with(sub) with(nop5) with(ret) with(jmp) with(call) with(mov)
#define DECLARE(name) void enter_##name(void);
#define CALL(name) enter_##name();
EACH(DECLARE)

static void *trampoline(void) {
    char line[512];
    unsigned long start = 0, found = 0;
    FILE *maps = fopen("/proc/self/maps", "r");
    while (maps && fgets(line, sizeof(line), maps))
        if (strstr(line, "[uprobes-trampoline]") && sscanf(line, "%lx", &start) == 1)
            found = start;
    if (maps)
        fclose(maps);
    return (void *)found;
}

__attribute__((noinline)) void inner(void) {
    for (int i = 0; i < 100; i++) {
        EACH(CALL)
    }
}

__attribute__((noinline)) void middle(double seconds) {
    struct timespec now, began;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &began);
    void *page = 0;
    do {
        inner();
        if (!page)
            page = trampoline();
        if (page)
            madvise(page, 4096, MADV_DONTNEED);
        clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
    } while (now.tv_sec - began.tv_sec + (now.tv_nsec - began.tv_nsec) / 1e9 < seconds);
}

int main(int argc, char **argv) {
    middle(argc > 1 ? atof(argv[1]) : 1);
    return 0;
}
