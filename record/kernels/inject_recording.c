// SPDX-License-Identifier: Apache-2.0
/* The recording that libiaprof_inject.so was put into a program for: which drivers it wants to have recorded in this way, and
 * the folder where debug ELFs go. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <link.h>
#include <stdio.h>
#include <string.h>
#include <sys/random.h>
#include <sys/resource.h>
#include <unistd.h>

#include "inject.h"

__extension__ volatile unsigned short level_zero_launch_kernel_semaphore __attribute__((section(".probes")));
__extension__ volatile unsigned short level_zero_compile_kernel_semaphore __attribute__((section(".probes")));

/* --- drivers */

struct search {
    struct inject_image image;
    char build_id[2 * 64 + 2]; /* as a line of the file `skip` */
};

static void read_build_id(char *notes, char *end, char *line)
{
    while (end - notes >= (long)sizeof(ElfW(Nhdr))) {
        const ElfW(Nhdr) *note = (void *)notes;
        uint8_t *id = (uint8_t *)(note + 1) + (note->n_namesz + 3) / 4 * 4;
        notes = (char *)id + (note->n_descsz + 3) / 4 * 4;
        if (note->n_type != NT_GNU_BUILD_ID || note->n_descsz > 64)
            continue;
        for (unsigned i = 0; i < note->n_descsz; i++)
            line += sprintf(line, "%02x", id[i]);
        strcpy(line, "\n");
        return;
    }
}

static int look_at(struct dl_phdr_info *info, size_t size, void *argument)
{
    (void)size;
    struct search *search = argument;
    struct inject_image *image = &search->image;
    if ((char *)info->dlpi_addr != image->base)
        return 0;
    for (const ElfW(Phdr) *segment = info->dlpi_phdr; segment < info->dlpi_phdr + info->dlpi_phnum; segment++) {
        char *start = image->base + segment->p_vaddr, *end = start + segment->p_memsz;
        if (segment->p_type == PT_LOAD && segment->p_flags & PF_W) {
            image->data = image->data > start ? image->data : start;
            image->data_end = end;
        } else if (segment->p_type == PT_GNU_RELRO) {
            image->data = end; /* what is before was made read-only */
        } else if (segment->p_type == PT_NOTE) {
            read_build_id(start, end, search->build_id);
        }
    }
    return 1;
}

/* Whether the recorder takes the driver, or this build of it, in another way. */
static bool is_skipped(const char *name, const char *build_id)
{
    char path[INJECT_PATH_BYTES], lines[1 << 14];
    snprintf(path, sizeof path, "%.*s/skip", inject_folder_length, inject_library);
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NOFOLLOW);
    ssize_t size = fd < 0 ? -1 : read(fd, lines, sizeof lines - 1);
    if (fd >= 0)
        close(fd);
    if (size < 0)
        return true; /* the recording is over, or out of reach */
    lines[size] = 0;
    return strstr(lines, name) || (*build_id && strstr(lines, build_id));
}

bool inject_is_driver(struct inject_image *image, void *found, const char *name)
{
    Dl_info where, before;
    if (!dladdr(found, &where) || !where.dli_fname)
        return false;
    const char *slash = strrchr(where.dli_fname, '/');
    if (strncmp(slash ? slash + 1 : where.dli_fname, name, strlen(name)))
        return false;
    if (image->base == where.dli_fbase)
        return true;
    if (image->base && dladdr(image->base, &before) && before.dli_fbase == image->base)
        return false; /* that one is still there */
    struct search search = {.image = {.base = where.dli_fbase}};
    dl_iterate_phdr(look_at, &search);
    if (!search.image.data || is_skipped(name, search.build_id)) /* dlmopen hides what it loads from us */
        return false;
    *image = search.image;
    return true;
}

/* --- debug ELFs */

/* Writes a file that nobody had before; false leaves none, and errno says why. */
static bool write_new(const char *path, const uint8_t *bytes, size_t size)
{
    struct rlimit limit; /* beyond which a signal would end the program */
    if (getrlimit(RLIMIT_FSIZE, &limit))
        return false;
    if (limit.rlim_cur < size) {
        errno = EFBIG;
        return false;
    }
    int fd = open(path, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
    if (fd < 0)
        return false;
    size_t written = 0;
    while (written < size) {
        ssize_t n = write(fd, bytes + written, size - written);
        if (n > 0)
            written += n;
        else if (n == 0 || errno != EINTR)
            break;
    }
    int reason = errno;
    close(fd);
    if (written < size)
        unlink(path);
    errno = reason;
    return written == size;
}

void inject_tell_debug_elf(const uint8_t *elf, size_t size)
{
    int before = errno;
    char path[INJECT_PATH_BYTES];
    uint64_t random; /* nobody else knows the name, so nobody can take it first */
    if (getrandom(&random, sizeof random, GRND_NONBLOCK) != sizeof random)
        random = (uintptr_t)elf ^ (uint64_t)getpid() << 32;
    int length = snprintf(path, sizeof path, "%.*s/%d-%016" PRIx64 ".elf", inject_folder_length, inject_library, getpid(), random);
    if (length >= (int)sizeof path)
        return; /* the library would not have been loaded from there */
    if (!write_new(path, elf, size)) /* the recorder finds no file, and counts a loss with this text */
        snprintf(path + length, sizeof path - length, ": %m");
    DTRACE_PROBE1(level_zero, compile_kernel, path);
    errno = before;
}
