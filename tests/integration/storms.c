/* SPDX-License-Identifier: Apache-2.0
 *
 * A program that launches 30,000 times a second from many paths, from its first moment on, while another thread loads and
 * unloads libraries, as PyTorch does when it trains for the first steps. Stacks have other words each time, so that no two
 * look alike.
 *
 *   program LAUNCHES keep|unload LIBRARY...
 *       launches in two threads, half of them each; another thread loads the libraries in turn, twice each, and unloads
 *       them once or twice, until half of the launches are made.
 *
 *   LAUNCHING_ELF, LAUNCHING_KERNEL: module and kernel */
#define _GNU_SOURCE
#include "one_kernel.h"
#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define OPAQUE __attribute__((noipa))
#define LEVELS 20   /* of functions below those of main */
#define EVERY_US 66 /* in each of two threads */

static ze_kernel_handle_t kernel;
static const ze_group_count_t groups = {1, 1, 1};
static atomic_long launched;
static long launches;

typedef long step(long path, int level, volatile void **words);
static step *const steps[16];

OPAQUE static long next(long path, int level, volatile void **words)
{
    if (!level)
        return zeCommandListAppendLaunchKernel(NULL, kernel, &groups, NULL, 0, NULL) + 1;
    return steps[(path >> level % 12) & 15](path, level - 1, words) + 1;
}

/* Sixteen functions, each with a frame of its own size, with pointers that look like those of code. */
#define STEP(number)                                                                                                           \
    OPAQUE static long step##number(long path, int level, volatile void **words)                                               \
    {                                                                                                                          \
        volatile void *own[number + 2];                                                                                        \
        for (int i = 0; i < number + 2; i++)                                                                                   \
            own[i] = (char *)words + 16 * (path + i) + launched;                                                               \
        return next(path, level, own) + (own[0] != words) + number;                                                            \
    }
STEP(0) STEP(1) STEP(2) STEP(3) STEP(4) STEP(5) STEP(6) STEP(7)
STEP(8) STEP(9) STEP(10) STEP(11) STEP(12) STEP(13) STEP(14) STEP(15)
static step *const steps[16] = {step0, step1, step2, step3, step4, step5, step6, step7,
                                step8, step9, step10, step11, step12, step13, step14, step15};

static double now_us(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1e6 + time.tv_nsec / 1e3;
}

static void *launch(void *of)
{
    long number = (long)of;
    double turn = now_us();
    for (long i = 0; i < launches / 2; i++, launched++) {
        volatile void *words[1] = {&number};
        next((i * 2654435761u) >> 8 & 0xFFF, LEVELS, words);
        for (turn += EVERY_US; now_us() < turn;)
            ;
        turn = now_us() > turn + 1000 ? now_us() : turn; /* it does not make up for time without a CPU */
    }
    return NULL;
}

static char **libraries;
static int keeps;

static void *load(void *unused)
{
    while (launched < launches / 2)
        for (char **library = libraries; *library; library++) {
            void *loaded = dlopen(*library, RTLD_NOW), *again = dlopen(*library, RTLD_NOW);
            struct timespec rest = {0, 100000000};
            if (!loaded || !again)
                abort();
            nanosleep(&rest, NULL);
            dlclose(again);
            if (!keeps)
                dlclose(loaded);
        }
    return unused;
}

int main(int argc, char **argv)
{
    pthread_t threads[3];
    ze_module_handle_t module;
    if (argc < 3 || make_kernel(getenv("LAUNCHING_ELF"), getenv("LAUNCHING_KERNEL"), &module, &kernel))
        return 1;
    launches = atol(argv[1]);
    keeps = !strcmp(argv[2], "keep");
    libraries = argv + 3;
    for (long i = 0; i < 2; i++)
        pthread_create(&threads[i], NULL, launch, (void *)i);
    pthread_create(&threads[2], NULL, load, NULL);
    for (int i = 0; i < 3; i++)
        pthread_join(threads[i], NULL);
}
