// Copies the middle of its own text into anonymous memory at the same addresses, as Intel's iodlr, node
// --use-largepages and BOLT's -hugify do, and spins there, in innermost() below middle() below outer().
//
// hugepages SECONDS: prints "ready" first.
#define _GNU_SOURCE
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#define HUGE ((uintptr_t)2 << 20)
#define FILLED(name) asm(".text\n" #name ": .fill 0x140000, 2, 0x9066\n") // two-byte nops

extern const char etext[];
volatile unsigned long sink;

// In the first part of the text, which stays.
__attribute__((noinline)) static void remap(uintptr_t low, uintptr_t high) {
    void *copy = malloc(high - low);
    memcpy(copy, (void *)low, high - low);
    void *there = mmap((void *)low, high - low, PROT_READ | PROT_WRITE | PROT_EXEC,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
    if (there != (void *)low)
        abort();
    memcpy(there, copy, high - low);
    mprotect(there, high - low, PROT_READ | PROT_EXEC);
    free(copy);
}

FILLED(filled_before);

__attribute__((noinline)) int innermost(double seconds) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    double end = now.tv_sec + now.tv_nsec / 1e9 + seconds;
    do {
        for (int i = 0; i < 100000; i++)
            sink += i;
        clock_gettime(CLOCK_MONOTONIC, &now);
    } while (now.tv_sec + now.tv_nsec / 1e9 < end);
    return sink & 1;
}
__attribute__((noinline)) int middle(double seconds) { return innermost(seconds) + 1; }
__attribute__((noinline)) int outer(double seconds) { return middle(seconds) + 2; }

FILLED(filled_behind);

int main(int count, char **words) {
    uintptr_t low = ((uintptr_t)remap + HUGE) & -HUGE, high = (uintptr_t)etext & -HUGE;
    if ((uintptr_t)innermost < low || (uintptr_t)outer >= high)
        abort();
    remap(low, high);
    puts("ready");
    fflush(stdout);
    return outer(atof(words[count - 1])) < 0;
}
