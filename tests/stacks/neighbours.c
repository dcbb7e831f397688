// SPDX-License-Identifier: Apache-2.0
// neighbours: a thread calls probe_me(1) whose stack is between other memory; prints the addresses of its frame and of its control block.
#define _GNU_SOURCE
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>

#define STACK (64 << 10)
#define ALL (1 << 20)

void probe_me(long);

static void *thread(void *unused)
{
    printf("%lu %lu\n", (unsigned long)__builtin_frame_address(0), (unsigned long)__builtin_thread_pointer());
    probe_me(1);
    return unused;
}

int main(void)
{
    char *memory = mmap(NULL, ALL, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    pthread_attr_t attributes;
    pthread_t made;
    memset(memory, 1, ALL);
    pthread_attr_init(&attributes);
    pthread_attr_setstack(&attributes, memory + ALL / 2, STACK);
    return pthread_create(&made, &attributes, thread, NULL) || pthread_join(made, NULL);
}
