/* SPDX-License-Identifier: Apache-2.0 */
/* inject_cuda.c as if it was recorded: what its probes are raised with is written to the file INJECTED_OUTPUT.PID instead. Each record
 * is struct message without the rest of its data; a launch is one whose `what` is 100, with the name as data.
 *
 *   INJECTED_SECONDS    the recorder is gone after so many seconds
 *   INJECTED_ROOM       of so many pieces of cubins one is taken; 0: none. The others are answered as BPF does
 *   INJECTED_URGENT     the program has a signal of its own, the one that these answers are, which it never takes */
#define _GNU_SOURCE
#include <signal.h>
#include <stddef.h>
#include <stdint.h>

struct message;
struct path_asked;
static void probe_message(const struct message *message);
static void probe_launch_kernel(uint64_t iba, uint64_t address, uint64_t size, const char *name, uint64_t list, uint64_t correlation,
                                const struct path_asked *asked);
#include "../../../../record/kernels/inject_cuda.c"

#include <fcntl.h>
#include <sys/uio.h>
#include <unistd.h>

enum { OF_LAUNCH = 100 };

static void write_message(const struct message *message, const void *data)
{
    static int file = -1;
    static pid_t owner;
    static pthread_mutex_t opening = PTHREAD_MUTEX_INITIALIZER;
    char path[4096];
    struct iovec parts[] = {{(void *)message, offsetof(struct message, data)}, {(void *)data, message->bytes}};
    pthread_mutex_lock(&opening);
    if (owner != getpid()) {
        owner = getpid();
        snprintf(path, sizeof path, "%s.%d", getenv("INJECTED_OUTPUT"), owner);
        file = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    }
    if (file < 0 || writev(file, parts, 2) != (ssize_t)(parts[0].iov_len + parts[1].iov_len))
        abort();
    pthread_mutex_unlock(&opening);
}

static bool is_taken(const struct message *message)
{
    static unsigned pieces;
    const char *room = getenv("INJECTED_ROOM");
    if (!room || message->what != OF_MODULE || !message->bytes)
        return true;
    unsigned one_of = atoi(room);
    return one_of && ++pieces % one_of == 0;
}

static void probe_message(const struct message *message)
{
    if (!is_recorded())
        return;
    if (is_taken(message))
        write_message(message, message->data);
    else
        pthread_kill(pthread_self(), SIGURG);
}

static void probe_launch_kernel(uint64_t iba, uint64_t address, uint64_t size, const char *name, uint64_t list, uint64_t correlation,
                                const struct path_asked *asked)
{
    struct message message;
    memset(&message, 0, offsetof(struct message, data));
    (void)iba;
    (void)list;
    (void)asked; /* nobody answers: every launch comes here */
    message.what = OF_LAUNCH;
    message.id = address;
    message.begin = message.end = now();
    message.total = size;
    message.offset = correlation;
    message.bytes = strlen(name) < MESSAGE_BYTES ? strlen(name) : MESSAGE_BYTES;
    write_message(&message, name);
}

static void *end_recording(void *seconds)
{
    rest(strtod(seconds, NULL) * 1e9);
    cuda_message_semaphore = cuda_launch_kernel_semaphore = 0;
    return NULL;
}

__attribute__((constructor)) static void begin_recording(void)
{
    pthread_t waiting;
    char *seconds = getenv("INJECTED_SECONDS");
    const char *output = getenv("INJECTED_OUTPUT");
    cuda_message_semaphore = cuda_launch_kernel_semaphore = output && *output;
    sigset_t urgent;
    sigemptyset(&urgent);
    sigaddset(&urgent, SIGURG);
    if (getenv("INJECTED_URGENT") && !pthread_sigmask(SIG_BLOCK, &urgent, NULL))
        kill(getpid(), SIGURG);
    if (seconds && !pthread_create(&waiting, NULL, end_recording, seconds))
        pthread_detach(waiting);
}

__attribute__((destructor)) static void expect_signal(void)
{
    sigset_t pending;
    if (getenv("INJECTED_URGENT") && (sigpending(&pending) || !sigismember(&pending, SIGURG)))
        abort(); /* somebody has taken it */
}
