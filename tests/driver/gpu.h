/* SPDX-License-Identifier: Apache-2.0
 * The stand-in's GPU (tests/standin), told by a program of this folder what the real runtime placed and launched, so that it
 * executes and stalls there. Each process connects once. Where STANDIN_DIR names no GPU's folder, nothing happens. */
#ifndef DRIVER_GPU_H
#define DRIVER_GPU_H

#include <fcntl.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "protocol.h"

enum { GPU_EXECUTION_NS = 2000000 }; /* of a launch */
enum { GPU_COMPACTED = 1 << 29 };    /* in an instruction's first four bytes: it has 8 bytes, not 16 */

static int gpu = -1; /* this process's connection */

static void gpu_fail(void)
{
    perror("the stand-in's GPU");
    _exit(1);
}

/* The folder's path may be longer than a socket's address can be: it is reached through its descriptor. */
static int gpu_connected(const char *folder)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    int directory = open(folder, O_PATH | O_DIRECTORY | O_CLOEXEC);
    int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    sprintf(address.sun_path, "/proc/self/fd/%d/gpu.sock", directory);
    if (fd < 0 || connect(fd, (struct sockaddr *)&address, sizeof address))
        gpu_fail();
    close(directory);
    return fd;
}

static void gpu_tell(int fd, const void *message, size_t size)
{
    if (send(fd, message, size, MSG_NOSIGNAL) != (ssize_t)size)
        gpu_fail();
}

static void gpu_connect(void)
{
    const char *folder = getenv("STANDIN_DIR");
    gpu = folder ? gpu_connected(folder) : -1;
}

/* A kernel was placed at `address`. Its code ends with padding, which is zeros. */
static void gpu_kernel(const char *name, uint64_t address, const uint8_t *code, size_t size)
{
    if (gpu < 0)
        return;
    size_t end = size;
    while (end && !code[end - 1])
        end--;
    struct standin_kernel *message = calloc(1, sizeof *message + (size / 8 + 1) * sizeof(uint32_t));
    message->type = STANDIN_MSG_KERNEL;
    message->pid = getpid();
    message->address = address;
    message->size = size;
    strncpy(message->name, name, sizeof message->name - 1);
    for (size_t offset = 0; offset < end;) {
        uint32_t first;
        memcpy(&first, code + offset, sizeof first);
        message->offsets[message->instructions++] = offset;
        offset += first & GPU_COMPACTED ? 8 : 16;
    }
    gpu_tell(gpu, message, offsetof(struct standin_kernel, offsets) + message->instructions * sizeof(uint32_t));
    free(message);
}

/* The kernel at `address` was launched; `stack`: by which functions of the program, outermost first, joined with ';'. */
static void gpu_launch(uint64_t address, const char *stack)
{
    if (gpu < 0)
        return;
    struct standin_launch message = {.type = STANDIN_MSG_LAUNCH, .pid = getpid(), .tid = gettid(), .address = address};
    message.duration_ns = GPU_EXECUTION_NS;
    strcpy(message.stack, stack);
    gpu_tell(gpu, &message, offsetof(struct standin_launch, stack) + strlen(stack) + 1);
}

/* Until all that this process launched has executed. A connection of its own: no thread gets another's answer. */
static void gpu_wait(void)
{
    if (gpu < 0)
        return;
    struct standin_sync sync = {STANDIN_MSG_SYNC};
    int fd = gpu_connected(getenv("STANDIN_DIR"));
    gpu_tell(fd, &sync, sizeof sync);
    if (recv(fd, &sync, sizeof sync, 0) != sizeof sync)
        gpu_fail();
    close(fd);
}

#endif
