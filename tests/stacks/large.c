// SPDX-License-Identifier: Apache-2.0
// large [thread]: calls probe_me(1) below a function with a frame of 1 MiB, in the first thread or another one; then it ends when its
// input does.
#include <pthread.h>
#include <stdio.h>

void probe_me(long);

static __attribute__((noinline)) void large(void)
{
    volatile char space[1 << 20];
    space[sizeof(space) / 2] = 1;
    probe_me(space[sizeof(space) / 2]);
}

static void *thread(void *unused)
{
    large();
    getchar();
    return unused;
}

int main(int count, char **words)
{
    pthread_t made;
    if (count < 2)
        return thread(words) != words;
    return pthread_create(&made, NULL, thread, NULL) || pthread_join(made, NULL);
}
