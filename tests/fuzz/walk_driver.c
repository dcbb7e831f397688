/* SPDX-License-Identifier: Apache-2.0 */
/* Runs walks of symbols/unwind/walk.c for fuzz_unwinding.py, which compiles both with sanitizers.
 *
 * Reads commands from stdin: struct command and `size` bytes; writes struct reply and `size` bytes to stdout. DAMAGE runs
 * `extra` walks, each with random damage to the last image, space and request, in a child process, and replies how many
 * microseconds of CPU time the slowest took. A walk that a sanitizer ends is told on stderr.
 *
 * Images are copied to memory of exactly their size, so that a sanitizer sees each read beyond them: walk.c is compiled
 * with -Dmmap=copied_file. */

#define _GNU_SOURCE
#undef mmap /* here it is the real one */
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/types.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

typedef uint8_t u8;
typedef uint64_t u64;

enum { IMAGE, SPACE, RUN, DAMAGE };
enum { MAPPING_BYTES = 32, ANSWER_BYTES = 1 << 18, MOST_BYTES = 1 << 22, REQUEST_BYTES = 23 * 8 };

struct command {
    u64 kind, number, size, extra;
};

struct reply {
    u64 value, size;
};

struct part {
    u64 number, size, count;
    u8 *bytes;
};

int walk_add_image(u64 number, int file);
int walk_set_space(u64 number, const void *mappings, u64 count);
u64 walk_run(const u8 *data, u64 size, u64 *taken, u8 *out, u64 room);

static struct part image, space, request;
static u8 answer[ANSWER_BYTES];

void *copied_file(void *address, size_t size, int protection, int flags, int file, off_t offset) {
    (void)address, (void)protection, (void)flags;
    u8 *copy = malloc(size);
    return copy && pread(file, copy, size, offset) == (ssize_t)size ? copy : MAP_FAILED;
}

static bool transfer(int file, void *data, u64 size) {
    for (u64 done = 0; done < size;) {
        ssize_t count = file ? write(file, (u8 *)data + done, size - done) : read(file, (u8 *)data + done, size - done);
        if (count <= 0)
            return false;
        done += count;
    }
    return true;
}

static u64 add_image(const struct part *part) {
    int file = memfd_create("image", 0);
    if (file < 0 || pwrite(file, part->bytes, part->size, 0) != (ssize_t)part->size)
        abort();
    int result = walk_add_image(part->number, file);
    close(file);
    return (u64)(int64_t)result;
}

static u64 chance(u64 *state) { /* splitmix64 */
    u64 z = *state += 0x9E3779B97F4A7C15ULL;
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9ULL;
    z = (z ^ z >> 27) * 0x94D049BB133111EBULL;
    return z ^ z >> 31;
}

/* Changes numbers: anywhere, or in the first bytes or the last ones, where an image has its headers. */
static void damage(u8 *bytes, u64 size, u64 header, u64 times, u64 *state) {
    static const u64 hostile[] = {0, 1, 7, 8, 0x7F, 0x80, 0xFFFF, 0x7FFFFFFF, 0x80000000, 1ULL << 62, 1ULL << 63, ~0ULL, ~7ULL};
    while (size >= 8 && times--) {
        u64 where = chance(state) % 4, room = where < 2 && header < size ? header : size;
        u64 at = chance(state) % room, width = 1ULL << chance(state) % 4, value = chance(state), kind = chance(state) % 4;
        at = where == 1 ? size - 1 - at : at;
        width = width > size - at ? size - at : width;
        if (kind < 2) {
            value = hostile[value % (sizeof(hostile) / sizeof(*hostile))];
        } else if (kind == 2) { /* a little more or less */
            u64 old = 0;
            memcpy(&old, bytes + at, width);
            value = old + value % 33 - 16;
        }
        memcpy(bytes + at, &value, width);
    }
}

static struct part copied(const struct part *part, u64 size) {
    struct part copy = *part;
    copy.size = size;
    copy.bytes = malloc(size);
    memcpy(copy.bytes, part->bytes, size);
    return copy;
}

static u64 microseconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
    return now.tv_sec * 1000000ULL + now.tv_nsec / 1000;
}

static void run_damaged(u64 state) {
    static const u64 times[] = {0, 1, 1, 2, 3, 8, 30};
    u64 taken, kind = chance(&state) % 8;
    u64 image_bytes = kind == 0 ? chance(&state) % (image.size + 1) : image.size;
    struct part own_image = copied(&image, image_bytes), own_request = copied(&request, request.size);
    damage(own_image.bytes, image_bytes, 256, times[chance(&state) % 7], &state);
    if (kind == 1)
        damage(own_request.bytes, request.size, REQUEST_BYTES, times[chance(&state) % 7], &state);
    else if (kind < 6) /* other words on the stack, another address to begin with */
        damage(own_request.bytes + REQUEST_BYTES, request.size - REQUEST_BYTES, 256, times[chance(&state) % 7], &state);
    if (kind == 2) {
        struct part own_space = copied(&space, space.size);
        damage(own_space.bytes, space.size, space.size, 2, &state);
        walk_set_space(space.number, own_space.bytes, space.count);
        free(own_space.bytes);
    }
    if (kind == 3) {
        u64 ip = chance(&state) % 0x800 + 0x400000, known;
        memcpy(own_request.bytes + 20 * 8, &ip, 8);
        memcpy(&known, own_request.bytes + 24, 8);
        known |= chance(&state);
        memcpy(own_request.bytes + 24, &known, 8);
    }
    add_image(&own_image);
    walk_run(own_request.bytes, own_request.size, &taken, answer, kind == 4 ? chance(&state) % 4096 : ANSWER_BYTES);
    if (kind == 2)
        walk_set_space(space.number, space.bytes, space.count);
    free(own_image.bytes);
    free(own_request.bytes);
}

/* Returns the CPU time of the slowest walk in microseconds; ~0 if one was ended. */
static u64 run_all_damaged(u64 seed, u64 count) {
    struct { u64 at, slowest, which; } *shared = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    pid_t child = fork();
    if (!child) {
        for (shared->at = 0; shared->at < count; shared->at++) {
            u64 begin = microseconds();
            alarm(30);
            run_damaged(seed * 1000003 + shared->at);
            u64 took = microseconds() - begin;
            if (took > shared->slowest)
                shared->slowest = took, shared->which = shared->at;
        }
        _exit(0);
    }
    int status = 0;
    waitpid(child, &status, 0);
    u64 slowest = status ? ~0ULL : shared->slowest;
    if (status)
        fprintf(stderr, "damage %llu of %llu: status %#x\n", (unsigned long long)shared->at, (unsigned long long)seed, status);
    munmap(shared, 4096);
    return slowest;
}

int main(void) {
    struct command command;
    while (transfer(0, &command, sizeof(command))) {
        struct reply reply = {};
        u64 taken = 0;
        struct part part = {command.number, command.size, command.extra, malloc(command.size)};
        if (command.size > MOST_BYTES || !transfer(0, part.bytes, command.size))
            abort();
        struct part *kept = command.kind == IMAGE ? &image : command.kind == SPACE ? &space : command.kind == RUN ? &request : NULL;
        if (command.kind == IMAGE)
            reply.value = add_image(&part);
        else if (command.kind == SPACE)
            reply.value = (u64)(int64_t)walk_set_space(part.number, part.bytes, part.count);
        else if (command.kind == RUN) {
            alarm(30);
            reply.size = walk_run(part.bytes, part.size, &taken, answer, ANSWER_BYTES), reply.value = taken;
            alarm(0);
        } else
            reply.value = run_all_damaged(command.number, command.extra);
        if (kept) {
            free(kept->bytes);
            *kept = part;
        } else {
            free(part.bytes);
        }
        if (!transfer(1, &reply, sizeof(reply)) || !transfer(1, answer, reply.size))
            abort();
    }
}
