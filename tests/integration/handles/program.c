/* program NAME KERNELS THREADS CHILDREN LAUNCHES MICROSECONDS [NAME]
 *
 * Makes kernels, NAME_0 and so on, and launches them in turn from threads and forked children, with rests. Given another name it
 * then becomes the same program with kernels of that name, at the same addresses. */
#define _GNU_SOURCE
#include "driver.h"
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#define MOST 64
static struct allocation memory = {1, 0x800100000000, 1 << 20};
static struct code codes[MOST];
static struct kernel kernels[MOST];
static struct handle *handles;
static char names[MOST][40], isa[MOST][100];
static int many, threads, launches, rest;

static void *work(void *nothing) {
    for (int i = 0; i < launches; i++) {
        launch(nothing, &handles[i % many]);
        if (rest)
            usleep(rest);
    }
    return nothing;
}

int main(int count, char **words) {
    if (count < 7)
        return 2;
    many = atoi(words[2]), threads = atoi(words[3]), launches = atoi(words[5]), rest = atoi(words[6]);
    handles = mmap((void *)0x10000000000, 4096, PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
    if (handles == MAP_FAILED)
        return 3;
    for (int i = 0; i < many; i++) {
        snprintf(names[i], sizeof names[i], "%s_%d", words[1], i);
        for (unsigned byte = 0; byte < sizeof isa[i]; byte++)
            isa[i][byte] = words[1][0] + i + byte;
        codes[i] = (struct code){names[i], isa[i], sizeof isa[i], 0, &memory};
        kernels[i] = (struct kernel){kernel_class, &codes[i], 4096 * i, 0};
        handles[i] = (struct handle){7, &kernels[i]};
    }
    for (int child = atoi(words[4]); child; child--)
        if (!fork())
            break;
    pthread_t started[MOST];
    for (int i = 1; i < threads; i++)
        pthread_create(&started[i], 0, work, 0);
    work(0);
    for (int i = 1; i < threads; i++)
        pthread_join(started[i], 0);
    while (wait(0) > 0)
        ;
    if (count == 8)
        execl(words[0], words[0], words[7], words[2], words[3], words[4], words[5], words[6], (char *)0);
    return 0;
}
