// SPDX-License-Identifier: Apache-2.0
/* Launches whose stack is known, of libiaprof_cuda.so: see inject_cuda_paths.c. */
#ifndef INJECT_CUDA_PATHS_H
#define INJECT_CUDA_PATHS_H

#include <stdbool.h>
#include <stdint.h>

/* What the probe of a launch asks of the recorder: PATH_ASKED in formats/wire/launches.py. */
struct path_asked {
    uint64_t path, offset, inode;
    uint32_t descriptor, is_known; /* 0, or: */
};
#define KNOWN 1             /* the launch should be on the path, which was answered when the process was not known to be Python */
#define KNOWN_WITH_PYTHON 2 /* likewise, and it was known */
/* A launch on a known path. */
struct path_row {
    uint64_t time; /* CLOCK_MONOTONIC, ns */
    uint32_t path, correlation, cpu, unused;
};

/* Makes the memory that is shared with the recorder. Without it, every launch raises the probe. */
void paths_begin(void);

/* Whether a launch is on a known path. Then its row is kept for paths_send(), and nothing else has to be done.
 *
 * frame: the frame that raises the probe if the path is unknown.
 * asked: set to what the probe then asks; NULL for nothing. */
bool paths_have(const void *frame, const void *kernel, uint32_t correlation, const struct path_asked **asked);

/* Hands rows to `send` as often as necessary, at most `most` at once: those of a thread from its row number `first` on. Only
 * our thread calls it, and it also looks for what makes all paths unknown. */
void paths_send(void (*send)(uint32_t thread, uint64_t first, const struct path_row *rows, uint32_t many), uint32_t most);

/* From now on every launch raises the probe. */
void paths_end(void);

#endif
