/* waiting MODE WAITS NANOSECONDS THREADS: waits, and a line for each wait with what this program measured of it:
 *
 *     THREAD BEGIN END RESULT   (ns, CLOCK_MONOTONIC)
 *
 * MODE is one of those below. "ready" is written first, and a line read, so that a recorder can be waited for. */
#define _GNU_SOURCE
#include "driver.h"
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define OWN_FRAME __attribute__((noipa))
static const char *mode;
static int many;
static uint64_t ns;
static struct work works[64], inner = {.ns = 2000000};
static uint64_t timeout = -1;
static sigjmp_buf back;

static uint64_t now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1000000000ull + time.tv_nsec;
}

OWN_FRAME static int waits_for_event(struct work *work) {
    return wait_event(work, timeout);
}

OWN_FRAME static int waits_for_queue(struct work *work) {
    return wait_queue(work, timeout);
}

OWN_FRAME static void wait_inside(struct work *work) {
    (void)work;
    waits_for_event(&inner);
}

OWN_FRAME static void compute(struct work *work) {
    (void)work;
    for (uint64_t end = now() + ns; now() < end;)
        ;
}

static void leave(int signal) {
    (void)signal;
    siglongjmp(back, 1);
}

OWN_FRAME static void jump_out(void) {
    static struct work never = {.ns = 3600000000000};
    if (!sigsetjmp(back, 1)) {
        ualarm(200000, 0);
        waits_for_event(&never);
    }
}

static void wait_and_tell(int (*waits)(struct work *), struct work *work) {
    uint64_t begin = now();
    int result = waits(work);
    uint64_t end = now();
    if (strcmp(mode, "short") && strcmp(mode, "poll"))
        printf("%ld %lu %lu %d\n", syscall(SYS_gettid), begin, end, result);
}

OWN_FRAME static void *work(void *mine) {
    uint64_t begin = now();
    for (int i = 0; i < many; i++) {
        wait_and_tell(waits_for_event, mine);
        if (!strcmp(mode, "both"))
            wait_and_tell(waits_for_queue, mine);
    }
    if (!strcmp(mode, "short") || !strcmp(mode, "poll"))
        printf("%ld %lu %lu 0\n", syscall(SYS_gettid), begin, now());
    return mine;
}

static void deeper(int depth) {
    if (depth)
        deeper(depth - 1);
    else
        work(&works[0]);
    __asm__ volatile("");
}

int main(int count, char **words) {
    pthread_t started[64];
    int threads;
    if (count < 5)
        return 2;
    mode = words[1], many = atoi(words[2]), ns = atol(words[3]), threads = atoi(words[4]);
    for (int i = 0; i < 64; i++) {
        works[i].ns = ns;
        if (!strcmp(mode, "inside"))
            works[i].meanwhile = wait_inside;
        if (!strcmp(mode, "computes"))
            works[i].meanwhile = compute, works[i].ns = 0;
        if (!strcmp(mode, "fails"))
            works[i].result = 0x70000001;
    }
    if (!strcmp(mode, "poll"))
        timeout = 0;
    if (!strcmp(mode, "times-out"))
        timeout = ns / 2;
    puts("ready");
    fflush(stdout);
    getchar();
    if (!strcmp(mode, "jumps")) { /* out of a wait that takes longer than anybody waits, by a signal */
        struct sigaction leaves = {.sa_handler = leave};
        sigaction(SIGALRM, &leaves, 0);
        for (int i = 0; i < many; i++)
            jump_out();
    }
    if (!strcmp(mode, "cancelled")) { /* threads that end in a wait */
        for (int i = 0; i < threads; i++)
            works[i].ns = 3600000000000, pthread_create(&started[i], 0, work, &works[i]);
        usleep(100000);
        for (int i = 0; i < threads; i++)
            pthread_cancel(started[i]), pthread_join(started[i], 0);
        works[0].ns = ns;
        threads = 1;
    }
    for (int i = 1; i < threads; i++)
        pthread_create(&started[i], 0, work, &works[i]);
    deeper(5);
    for (int i = 1; i < threads; i++)
        pthread_join(started[i], 0);
    fflush(stdout);
    getchar();
    return 0;
}
