// SPDX-License-Identifier: Apache-2.0
/* What the parts of libiaprof_inject.so share: inject.c raises the probes for Level Zero and inject_opencl.c for OpenCL,
 * inject_recording.c knows the recording, and inject_children.c sees to the environment and to programs that are started. */
#ifndef INJECT_H
#define INJECT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define _SDT_HAS_SEMAPHORES 1
#include <sys/sdt.h>
#include "probe.h"

#define INJECT_PATH_BYTES 512

/* The path of this library; its folder is the recording's. Empty where it is too long. */
extern char inject_library[INJECT_PATH_BYTES];
extern int inject_folder_length; /* of that path, without the last slash */

/* The next library's dlsym, which is there after inject_begin. */
extern void *(*inject_dlsym)(void *handle, const char *name);

/* Finds what all parts need, once; whatever runs first calls it. */
void inject_begin(void);

/* What dlsym is to give for this name of OpenCL's; NULL for what it gives without us. */
void *inject_opencl(void *handle, const char *name);

/* --- the recording */

/* A driver's library, as it is loaded. */
struct inject_image {
    char *base; /* NULL: none is */
    char *data, *data_end; /* what it can write to */
};

/* Whether `found` is of the driver that probes are raised for: the first that is loaded whose file's name begins with
 * `name`, if the recorder does not take it in another way. `image` is what was found before, and becomes that driver's. */
bool inject_is_driver(struct inject_image *image, void *found, const char *name);

static inline bool inject_is_code(const struct inject_image *image, const void *function)
{
    const char *at = function;
    return image->base <= at && at < image->data;
}

static inline bool inject_is_data(const struct inject_image *image, const void *start, size_t bytes)
{
    const char *at = start;
    return image->data <= at && at < image->data_end && bytes <= (size_t)(image->data_end - at) && !((uintptr_t)at % 8);
}

/* Writes a debug ELF into the recording's folder and raises the probe that tells of it. */
void inject_tell_debug_elf(const uint8_t *elf, size_t size);

/* --- probes, which have the names of a patched driver's */

extern volatile unsigned short level_zero_launch_kernel_semaphore;
extern volatile unsigned short level_zero_compile_kernel_semaphore;

struct inject_kernel {
    uint64_t address, size;
    char name[4096]; /* drivers give a name as a whole or not at all, and C++ makes long ones */
};

/* In each function that launches, so that a stack begins there and not in a function that nobody knows. `described` fills
 * kernel_, and says whether it could; `list` is 0 where there are no command lists. */
#define INJECT_LAUNCHED(described, list)                                                                               \
    do {                                                                                                               \
        struct inject_kernel kernel_;                                                                                  \
        if (__builtin_expect(level_zero_launch_kernel_semaphore, 0) && described)                                      \
            DTRACE_PROBE5(level_zero, launch_kernel, kernel_.address & ~0xffffffffULL, kernel_.address, kernel_.size,  \
                          kernel_.name, list);                                                                         \
    } while (0)

/* A jump to the driver's function, in place of it. A recorder finds it by the label, and probes it: arguments are where the
 * driver takes them from, and nothing is on the stack but the return address. The label has no size, so that stacks show the
 * function's name. */
#define INJECT_JUMP_TO(name)                                                                                           \
    __attribute__((used)) static int (*driver_##name)(void);                                                           \
    __attribute__((naked, used)) static int name(void)                                                                 \
    {                                                                                                                  \
        __asm__(".globl iaprof_" #name "\n\t"                                                                          \
                ".type iaprof_" #name ", @function\n"                                                                  \
                "iaprof_" #name ":\n\t"                                                                                \
                "nop\n\t"                                                                                              \
                "jmp *driver_" #name "(%rip)");                                                                        \
    }

#endif
