// SPDX-License-Identifier: Apache-2.0
// Calls probe_me from main, and from a thread's function.
#include <pthread.h>

void probe_me(long);

static void *thread(void *unused)
{
    probe_me(2);
    __asm__ volatile("");
    return unused;
}

int main(void)
{
    pthread_t id;
    probe_me(1);
    pthread_create(&id, 0, thread, 0);
    return pthread_join(id, 0);
}
