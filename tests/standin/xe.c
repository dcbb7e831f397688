/* SPDX-License-Identifier: Apache-2.0
 *
 * libstandin_xe.so: the xe driver of the stand-in, preloaded into the recorder.
 *
 * It answers at the system-call boundary: paths below /dev/dri, /sys/class/drm and so on lead into the tree that sysfs.py made in
 * STANDIN_DIR/sysfs, ioctls on a device node and on a stream get the kernel's answers and the kernel's refusals, reads give the
 * records that the GPU process (gpu.c) put into shared memory. What the kernel refuses is taken from spec/eu-stall.md and, where that
 * is silent, from the behaviour of Linux's xe_eu_stall.c, xe_query.c and xe_observation.c. Two things are stricter than Linux 6.15:
 * a sampling rate has to be in the list (Linux rounds down to one), and disabling and enabling does not revive a stream after a reset.
 *
 * Descriptors are real ones: a device node is a file of the tree, a stream is the reading end of a pipe that holds a byte while POLLIN
 * is set. So fcntl, dup, poll, epoll, close and inheritance need no answer from here: a descriptor is known by its inode.
 *
 * It leaves the environment of everything that the recorder starts: the profiled command never sees it.
 *
 * Faults, a list in STANDIN_FAULTS or in the file STANDIN_DIR/faults: no-device, not-xe (an i915), no-eu-stall, busy, eacces,
 * slow-reader (each read of a stream takes STANDIN_SLOW_MS longer, 100 by default). */
#define _GNU_SOURCE
#define STANDIN_WITH_SHARED_MEMORY
#include "protocol.h"

#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <poll.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <sys/uio.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))
#define REAL(name)                                       \
    static __typeof__(&name) real_##name;                \
    if (!real_##name)                                    \
        real_##name = (__typeof__(&name))dlsym(RTLD_NEXT, #name)

/* ---- the C library's own functions, for this file's use ---- */

static int real_open_at(int dir, const char *path, int flags, mode_t mode)
{
    REAL(openat);
    return real_openat(dir, path, flags, mode);
}

static int real_fd_stat(int fd, struct stat *st)
{
    REAL(fstat);
    return real_fstat(fd, st);
}

static ssize_t real_fd_read(int fd, void *buffer, size_t count)
{
    REAL(read);
    return real_read(fd, buffer, count);
}

static int fail(int error)
{
    errno = error;
    return -1;
}

/* ---- where things are ---- */

static char root[PATH_MAX]; /* STANDIN_DIR/sysfs; empty: this library does nothing */
static char directory[PATH_MAX];
static struct {
    dev_t device;
    ino_t inode;
    unsigned minor;
} nodes[2];

static bool has_fault(const char *name)
{
    char text[512];
    const char *lists[2] = {getenv("STANDIN_FAULTS"), NULL};
    char path[PATH_MAX + 16];
    snprintf(path, sizeof(path), "%s/faults", directory);
    int fd = real_open_at(AT_FDCWD, path, O_RDONLY | O_CLOEXEC, 0);
    if (fd >= 0) {
        ssize_t size = real_fd_read(fd, text, sizeof(text) - 1);
        close(fd);
        text[size > 0 ? size : 0] = 0;
        lists[1] = text;
    }
    for (int i = 0; i < 2; i++)
        for (const char *at = lists[i]; at && *at; at += strcspn(at, ", \n")) {
            at += strspn(at, ", \n");
            if (strcspn(at, ", \n") == strlen(name) && !strncmp(at, name, strlen(name)))
                return true;
        }
    return false;
}

static bool below(const char *path, const char *prefix)
{
    size_t n = strlen(prefix);
    return !strncmp(path, prefix, n) && (path[n] == 0 || path[n] == '/');
}

/* Where the path leads: itself, or into the tree (written to space). */
static const char *shown(const char *path, char space[PATH_MAX])
{
    static const char *const whole[] = {"/dev/dri", "/sys/class/drm", "/proc/sys/dev/xe"};
    static const char *const shared_with_real[] = {"/sys/devices", "/sys/dev/char", "/sys/bus/pci"};
    static const char pmus[] = "/sys/bus/event_source/devices";
    char clean[PATH_MAX];
    size_t n = 0;
    bool ours = false, maybe = false;

    if (!root[0] || !path || path[0] != '/' || (strncmp(path, "/dev", 4) && strncmp(path, "/sys", 4) && strncmp(path, "/proc/sys", 9)))
        return path;
    for (const char *c = path; *c && n < sizeof(clean) - 1; c++)
        if (!(c[0] == '/' && c[1] == '/'))
            clean[n++] = *c;
    while (n > 1 && clean[n - 1] == '/')
        n--;
    clean[n] = 0;
    for (size_t i = 0; i < sizeof(whole) / sizeof(*whole); i++)
        ours |= below(clean, whole[i]);
    if (below(clean, pmus)) /* the listing shows the real ones, too; they are links there */
        ours |= clean[sizeof(pmus) - 1] == 0 || !strncmp(clean + sizeof(pmus), "xe_", 3);
    for (size_t i = 0; i < sizeof(shared_with_real) / sizeof(*shared_with_real); i++)
        maybe |= below(clean, shared_with_real[i]) && clean[strlen(shared_with_real[i])];
    if (!ours && !maybe)
        return path;
    if (has_fault("no-device")) {
        if (maybe || !strcmp(clean, pmus))
            return path;
        if ((size_t)snprintf(space, PATH_MAX, "%s/absent%s", root, clean) >= PATH_MAX)
            return path;
        return space;
    }
    if ((size_t)snprintf(space, PATH_MAX, "%s%s", root, clean) >= PATH_MAX)
        return path;
    if (maybe) {
        struct stat st;
        int error = errno;
        REAL(lstat);
        bool there = real_lstat(space, &st) == 0;
        errno = error;
        if (!there)
            return path;
    }
    return space;
}

static int node_of(dev_t device, ino_t inode)
{
    for (int i = 0; i < 2; i++)
        if (nodes[i].inode && nodes[i].inode == inode && nodes[i].device == device)
            return i;
    return -1;
}

static bool is_device(int fd)
{
    struct stat st;
    return root[0] && real_fd_stat(fd, &st) == 0 && node_of(st.st_dev, st.st_ino) >= 0;
}

/* The launchers between whoever set LD_PRELOAD and the recorder hand it on; everyone else takes it out. */
static void leave_environment(void)
{
    static const char *const launchers[] = {"env", "sh", "dash", "bash", "timeout", "nice", "taskset", "setsid", "stdbuf", "time"};
    const char *list = getenv("LD_PRELOAD");
    char rest[PATH_MAX * 2];
    size_t n = 0;
    for (size_t i = 0; i < sizeof(launchers) / sizeof(*launchers); i++)
        if (!strcmp(program_invocation_short_name, launchers[i]))
            return;
    rest[0] = 0;
    for (const char *at = list; at && *at;) {
        at += strspn(at, ": ");
        size_t length = strcspn(at, ": ");
        if (length && !memmem(at, length, "libstandin_xe.so", 16) && n + length + 2 < sizeof(rest))
            n += (size_t)snprintf(rest + n, sizeof(rest) - n, "%s%.*s", n ? ":" : "", (int)length, at);
        at += length;
    }
    if (n)
        setenv("LD_PRELOAD", rest, 1);
    else
        unsetenv("LD_PRELOAD");
}

__attribute__((constructor)) static void start(void)
{
    static const struct {
        const char *path;
        unsigned minor;
    } files[2] = {{"dev/dri/card0", 0}, {"dev/dri/renderD128", 128}};
    const char *dir = getenv("STANDIN_DIR");
    leave_environment();
    if (!dir || strlen(dir) > PATH_MAX - 64)
        return;
    snprintf(directory, sizeof(directory), "%s", dir);
    for (int i = 0; i < 2; i++) {
        char path[PATH_MAX + 32];
        struct stat st;
        snprintf(path, sizeof(path), "%s/sysfs/%s", dir, files[i].path);
        REAL(stat);
        if (real_stat(path, &st) == 0) {
            nodes[i].device = st.st_dev;
            nodes[i].inode = st.st_ino;
            nodes[i].minor = files[i].minor;
        }
    }
    snprintf(root, sizeof(root), "%.*s/sysfs", (int)(sizeof(root) - 16), dir);
}

/* ---- the GPU process ---- */

static struct standin_device device;
static struct standin_shared *shared;
/* This process's streams, by main GT. The GPU allows one for each. */
static struct stream {
    dev_t device;
    ino_t inode;
    uint64_t id;
} streams[STANDIN_MAX_GTS];
static _Atomic int streams_known;

static int ask(struct standin_driver question, struct standin_driver_reply *reply, int *passed, int flags)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    struct iovec iov = {reply, sizeof(*reply)};
    union {
        char space[CMSG_SPACE(sizeof(int))];
        struct cmsghdr align;
    } control;
    struct msghdr header = {.msg_iov = &iov, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof(control)};
    ssize_t size;

    question.type = STANDIN_MSG_DRIVER;
    int dir = real_open_at(AT_FDCWD, directory, O_PATH | O_DIRECTORY | O_CLOEXEC, 0);
    snprintf(address.sun_path, sizeof(address.sun_path), "/proc/self/fd/%d/gpu.sock", dir);
    int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    bool good = fd >= 0 && connect(fd, (struct sockaddr *)&address, sizeof(address)) == 0 &&
                send(fd, &question, sizeof(question), MSG_NOSIGNAL) == sizeof(question);
    close(dir);
    if (good)
        do
            size = recvmsg(fd, &header, flags);
        while (size < 0 && errno == EINTR);
    good = good && size == sizeof(*reply);
    close(fd);
    if (!good)
        return ENODEV; /* the GPU is gone */
    struct cmsghdr *c = CMSG_FIRSTHDR(&header);
    if (c && passed)
        memcpy(passed, CMSG_DATA(c), sizeof(int));
    return reply->error;
}

/* The device's facts and buffers, once in a process's life. */
static int meet_gpu(void)
{
    struct standin_driver_reply reply;
    int memory = -1;
    struct stat st;
    if (shared)
        return 0;
    int error = ask((struct standin_driver){.op = STANDIN_DRIVER_HELLO}, &reply, &memory, MSG_CMSG_CLOEXEC);
    if (error)
        return error;
    if (real_fd_stat(memory, &st))
        return ENODEV;
    void *map = mmap(NULL, (size_t)st.st_size, PROT_READ | PROT_WRITE, MAP_SHARED, memory, 0);
    close(memory);
    if (map == MAP_FAILED)
        return ENOMEM;
    device = reply.device;
    shared = map;
    return 0;
}

/* ---- ioctls on a device node ---- */

/* The caller's memory, as the kernel takes it: a bad address is EFAULT. Where a sandbox forbids the careful way, the plain one. */
static int copy_in(void *to, uint64_t from, size_t size)
{
    struct iovec ours = {to, size}, theirs = {(void *)from, size};
    if (process_vm_readv(getpid(), &ours, 1, &theirs, 1, 0) == (ssize_t)size)
        return 0;
    if (errno != EPERM && errno != ENOSYS)
        return EFAULT;
    memcpy(to, (void *)from, size);
    return 0;
}

static int copy_out(uint64_t to, const void *from, size_t size)
{
    struct iovec ours = {(void *)from, size}, theirs = {(void *)to, size};
    if (!size || process_vm_writev(getpid(), &ours, 1, &theirs, 1, 0) == (ssize_t)size)
        return 0;
    if (errno != EPERM && errno != ENOSYS)
        return EFAULT;
    memcpy((void *)to, from, size);
    return 0;
}

/* struct drm_version, drm.h. A name is copied as far as the caller has room; its length is always told. */
static int answer_version(uint64_t arg)
{
    struct {
        int major, minor, patch;
        size_t name_size;
        uint64_t name;
        size_t date_size;
        uint64_t date;
        size_t text_size;
        uint64_t text;
    } v;
    bool xe = !has_fault("not-xe");
    const char *name = xe ? "xe" : "i915", *text = xe ? "Intel Xe2 Graphics" : "Intel Graphics", *date = "0";
    struct {
        const char *value;
        size_t *size;
        uint64_t to;
    } fields[3];
    if (copy_in(&v, arg, sizeof(v)))
        return EFAULT;
    v.major = 1;
    v.minor = xe ? 1 : 6;
    v.patch = 0;
    fields[0].value = name, fields[0].size = &v.name_size, fields[0].to = v.name;
    fields[1].value = date, fields[1].size = &v.date_size, fields[1].to = v.date;
    fields[2].value = text, fields[2].size = &v.text_size, fields[2].to = v.text;
    for (int i = 0; i < 3; i++) {
        size_t size = strlen(fields[i].value), room = *fields[i].size;
        *fields[i].size = size;
        if (fields[i].to && copy_out(fields[i].to, fields[i].value, size < room ? size : room))
            return EFAULT;
    }
    return copy_out(arg, &v, sizeof(v));
}

struct query {
    uint64_t extensions;
    uint32_t query, size;
    uint64_t data, reserved[2];
};

/* The two calls of a query: the first learns the size, the second has to come with exactly that one. */
static int give(struct query *query, uint64_t arg, const void *answer, uint32_t size)
{
    if (query->size == 0) {
        query->size = size;
        return copy_out(arg, query, sizeof(*query));
    }
    if (query->size != size)
        return EINVAL;
    return copy_out(query->data, answer, size);
}

static int query_config(struct query *query, uint64_t arg)
{
    struct {
        uint32_t count, pad;
        uint64_t info[5];
    } config = {.count = 5};
    config.info[0] = (uint64_t)device.revision << 16 | device.device_id;
    config.info[1] = device.has_vram ? 1 : 0;
    config.info[2] = device.has_vram ? 65536 : 4096;
    config.info[3] = device.va_bits;
    config.info[4] = 2;
    return give(query, arg, &config, sizeof(config));
}

static int query_gts(struct query *query, uint64_t arg)
{
    struct {
        uint32_t count, pad;
        struct {
            uint16_t type, tile, id, pad[3];
            uint32_t reference_clock;
            uint64_t near, far;
            uint16_t major, minor, revision, pad2;
            uint64_t reserved[7];
        } gt[STANDIN_MAX_GTS];
    } list = {.count = device.gts};
    for (uint32_t i = 0; i < device.gts; i++) {
        uint64_t all = device.has_vram ? 3 : 1;
        list.gt[i].type = device.gt[i].type;
        list.gt[i].tile = device.gt[i].tile;
        list.gt[i].id = device.gt[i].id;
        list.gt[i].reference_clock = device.reference_clock;
        list.gt[i].near = device.has_vram ? 2ull << device.gt[i].tile : 1;
        list.gt[i].far = all & ~list.gt[i].near;
        list.gt[i].major = device.gt[i].major;
        list.gt[i].minor = device.gt[i].minor;
        list.gt[i].revision = device.gt[i].revision;
    }
    return give(query, arg, &list, 8 + 96 * device.gts);
}

enum { CYCLES = 251, RATES = 7 };

static int query_eu_stall(struct query *query, uint64_t arg)
{
    struct {
        uint64_t extensions, capabilities, record_size, buffer_size, reserved[5], count, rates[RATES];
    } answer = {.capabilities = 1, .record_size = STANDIN_RECORD_BYTES, .buffer_size = STANDIN_XECORE_BYTES, .count = RATES};
    if (has_fault("no-eu-stall"))
        return ENODEV;
    for (int i = 0; i < RATES; i++)
        answer.rates[i] = CYCLES * (uint64_t)(i + 1);
    return give(query, arg, &answer, sizeof(answer));
}

static int query_cycles(struct query *query, uint64_t arg)
{
    static const int clocks[] = {CLOCK_MONOTONIC, CLOCK_MONOTONIC_RAW, CLOCK_REALTIME, CLOCK_BOOTTIME, CLOCK_TAI};
    struct {
        uint16_t engine, instance, gt, pad;
        int32_t clock;
        uint32_t width;
        uint64_t cycles, cpu_time, cpu_delta;
    } c;
    struct timespec t, gpu;
    bool known = false, engine = false;
    if (query->size == 0 || query->size != sizeof(c))
        return give(query, arg, &c, sizeof(c));
    if (copy_in(&c, query->data, sizeof(c)))
        return EFAULT;
    for (size_t i = 0; i < sizeof(clocks) / sizeof(*clocks); i++)
        known |= clocks[i] == c.clock;
    for (uint32_t i = 0; i < device.gts; i++) /* classes: 0 render (not on PVC), 1 copy, 2 and 3 video, 4 compute */
        if (device.gt[i].id == c.gt)
            engine = c.instance == 0 && (device.gt[i].type ? c.engine == 2 || c.engine == 3
                                                           : c.engine == 1 || c.engine == 4 ||
                                                                 (c.engine == 0 && device.gt[i].major != 12));
    if (!known || !engine)
        return EINVAL;
    clock_gettime(c.clock, &t);
    clock_gettime(CLOCK_MONOTONIC_RAW, &gpu);
    c.cpu_time = (uint64_t)t.tv_sec * 1000000000ull + (uint64_t)t.tv_nsec;
    c.cpu_delta = 500;
    c.cycles = (uint64_t)gpu.tv_sec * device.reference_clock +
               (uint64_t)((double)gpu.tv_nsec * device.reference_clock / 1e9);
    c.width = device.gt[0].major >= 20 ? 64 : 36;
    if (c.width < 64)
        c.cycles &= (1ull << c.width) - 1;
    return copy_out(query->data, &c, sizeof(c));
}

static int answer_query(uint64_t arg)
{
    struct query query;
    if (copy_in(&query, arg, sizeof(query)))
        return EFAULT;
    if (query.extensions || query.reserved[0] || query.reserved[1])
        return EINVAL;
    switch (query.query) {
    case 2:
        return query_config(&query, arg);
    case 3:
        return query_gts(&query, arg);
    case 6:
        return query_cycles(&query, arg);
    case 10:
        return query_eu_stall(&query, arg);
    default: /* others that Linux knows are not needed by a recorder */
        return EINVAL;
    }
}

struct wishes {
    int gt; /* which main GT; -1 none given; -2 a media GT, which has no XeCores */
    uint32_t rate, wait_reports;
};

static int read_property(uint64_t name, uint64_t value, struct wishes *wishes)
{
    int mains = 0;
    switch (name) {
    case 1: /* GT_ID */
        for (uint32_t i = 0; i < device.gts; i++) {
            if (device.gt[i].id == value) {
                wishes->gt = device.gt[i].type ? -2 : mains;
                return 0;
            }
            mains += !device.gt[i].type;
        }
        return EINVAL;
    case 2: /* SAMPLE_RATE */
        if (value == 0 || value % CYCLES || value / CYCLES > RATES)
            return EINVAL;
        wishes->rate = (uint32_t)value;
        return 0;
    case 3: /* WAIT_NUM_REPORTS; Linux keeps 32 bits of it, and looks at them when the stream is made */
        wishes->wait_reports = (uint32_t)value;
        return 0;
    default:
        return EINVAL;
    }
}

static int answer_observation(uint64_t arg, int *fd)
{
    struct {
        uint64_t extensions, type, op, param;
    } observation;
    struct {
        uint64_t next;
        uint32_t name, pad, property, pad2;
        uint64_t value, reserved[2];
    } ext = {0};
    struct wishes wishes = {-1, CYCLES * 4, 1};
    struct standin_driver_reply reply;
    struct stat st;

    if (copy_in(&observation, arg, sizeof(observation)))
        return EFAULT;
    if (observation.extensions || observation.type != 1 || observation.op != 0)
        return EINVAL;
    if (has_fault("no-eu-stall"))
        return ENODEV;
    if (has_fault("eacces"))
        return EACCES;
    ext.next = observation.param;
    for (int i = 0; i == 0 || ext.next; i++) {
        if (i >= 5)
            return E2BIG;
        if (copy_in(&ext, ext.next, sizeof(ext)))
            return EFAULT;
        if (ext.pad || ext.name || ext.pad2)
            return EINVAL;
        int error = read_property(ext.property, ext.value, &wishes);
        if (error)
            return error;
    }
    if (wishes.gt < 0)
        return EINVAL;
    if (has_fault("busy"))
        return EBUSY;
    int error = ask((struct standin_driver){.op = STANDIN_DRIVER_OPEN, .gt = (uint32_t)wishes.gt, .rate = wishes.rate,
                                            .wait_reports = wishes.wait_reports}, &reply, fd, 0);
    if (error)
        return error;
    if (real_fd_stat(*fd, &st))
        return errno;
    streams[wishes.gt] = (struct stream){st.st_dev, st.st_ino, reply.stream};
    streams_known = 1;
    return 0;
}

static int device_ioctl(unsigned long request, uint64_t arg)
{
    int fd = -1, error = meet_gpu();
    if (error)
        return fail(error);
    switch ((uint32_t)request) {
    case 0xc0406400:
        error = answer_version(arg);
        break;
    case 0xc0286440:
        error = has_fault("not-xe") ? EINVAL : answer_query(arg);
        break;
    case 0x4020644b:
        error = has_fault("not-xe") ? EINVAL : answer_observation(arg, &fd);
        break;
    default:
        error = (request >> 8 & 0xff) == 'd' ? EINVAL : ENOTTY;
    }
    if (error)
        return fail(error);
    return fd >= 0 ? fd : 0;
}

/* ---- a stream ---- */

/* Which stream the descriptor is, or -1. By inode, so that copies of it are it, and a number that was closed is not. */
static int stream_of(int fd)
{
    struct stat st;
    if (!streams_known)
        return -1;
    int error = errno, found = -1;
    if (real_fd_stat(fd, &st) == 0 && S_ISFIFO(st.st_mode))
        for (int g = 0; g < STANDIN_MAX_GTS; g++)
            if (streams[g].id && streams[g].inode == st.st_ino && streams[g].device == st.st_dev)
                found = g;
    errno = error;
    return found;
}

static int stream_ioctl(int g, unsigned long request)
{
    struct standin_driver_reply reply;
    struct standin_driver question = {.gt = (uint32_t)g, .stream = streams[g].id};
    if (request == 0x6900)
        question.op = STANDIN_DRIVER_ENABLE;
    else if (request == 0x6901)
        question.op = STANDIN_DRIVER_DISABLE;
    else
        return fail(EINVAL);
    int error = ask(question, &reply, NULL, 0);
    return error ? fail(error) : 0;
}

static void lock(struct standin_stream *stream)
{
    if (pthread_mutex_lock(&stream->lock) == EOWNERDEAD)
        pthread_mutex_consistent(&stream->lock);
}

/* What is visible of one XeCore's buffer, as far as there is room. */
static size_t empty_xecore(int g, uint32_t xecore, char *to, size_t room)
{
    enum { SLOTS = STANDIN_XECORE_BYTES / STANDIN_RECORD_BYTES };
    struct standin_xecore *state = &shared->streams[g].xecores[xecore];
    const char *buffer =
        (char *)shared + shared->data_offset + ((size_t)g * device.xecores + xecore) * STANDIN_XECORE_BYTES;
    uint64_t read = atomic_load_explicit(&state->read, memory_order_relaxed);
    uint64_t count = atomic_load_explicit(&state->visible, memory_order_acquire) - read;
    if (count > room / STANDIN_RECORD_BYTES)
        count = room / STANDIN_RECORD_BYTES;
    uint64_t slot = read % SLOTS, first = count < SLOTS - slot ? count : SLOTS - slot;
    memcpy(to, buffer + slot * STANDIN_RECORD_BYTES, first * STANDIN_RECORD_BYTES);
    memcpy(to + first * STANDIN_RECORD_BYTES, buffer, (count - first) * STANDIN_RECORD_BYTES);
    atomic_store_explicit(&state->read, read + count, memory_order_release);
    uint32_t seen = 2;
    atomic_compare_exchange_strong(&state->drop, &seen, 0);
    return count * STANDIN_RECORD_BYTES;
}

static ssize_t read_locked(int g, char *to, size_t count)
{
    struct standin_stream *stream = &shared->streams[g];
    bool dropped = false;
    size_t total = 0;
    if (stream->id != streams[g].id || !stream->enabled)
        return -EINVAL;
    if (stream->reset)
        return -ENODEV;
    for (uint32_t x = 0; x < device.xecores; x++)
        dropped |= stream->xecores[x].drop == 2;
    if (dropped && !stream->reported) { /* once; the next read goes on */
        stream->reported = 1;
        return -EIO;
    }
    if (dropped)
        stream->reported = 0;
    for (uint32_t x = 0; x < device.xecores && total < count; x++)
        total += empty_xecore(g, x, to + total, count - total);
    return total ? (ssize_t)total : -EAGAIN;
}

/* Takes POLLIN away. False: the GPU process is gone. */
static bool clear_pollin(int fd)
{
    char bytes[64];
    struct pollfd p = {.fd = fd, .events = POLLIN};
    while (poll(&p, 1, 0) == 1 && p.revents & POLLIN)
        if (real_fd_read(fd, bytes, sizeof(bytes)) < (ssize_t)sizeof(bytes))
            break;
    return !(p.revents & POLLHUP);
}

static ssize_t stream_read(int fd, int g, void *buffer, size_t count)
{
    struct standin_stream *stream = &shared->streams[g];
    ssize_t result;
    count -= count % STANDIN_RECORD_BYTES;
    if (count == 0 || stream->id != streams[g].id || !stream->enabled)
        return fail(EINVAL);
    if (has_fault("slow-reader")) {
        const char *ms = getenv("STANDIN_SLOW_MS");
        long wait = ms ? atol(ms) : 100;
        struct timespec t = {wait / 1000, wait % 1000 * 1000000};
        nanosleep(&t, NULL);
    }
    bool waits = !(fcntl(fd, F_GETFL) & O_NONBLOCK);
    do {
        struct pollfd p = {.fd = fd, .events = POLLIN};
        if (waits && poll(&p, 1, -1) < 0)
            return -1;
        lock(stream);
        result = read_locked(g, buffer, count);
        if (!stream->reset && !clear_pollin(fd) && result == -EAGAIN)
            result = -ENODEV;
        pthread_mutex_unlock(&stream->lock);
    } while (waits && result == -EAGAIN);
    return result < 0 ? fail((int)-result) : result;
}

/* ---- the C library's functions that are answered ---- */

EXPORT int ioctl(int fd, unsigned long request, ...)
{
    va_list list;
    va_start(list, request);
    uint64_t arg = va_arg(list, uint64_t);
    va_end(list);
    REAL(ioctl);
    unsigned kind = request >> 8 & 0xff;
    if (kind != 'T') { /* FIONBIO, FIOCLEX: the kernel does these to any file */
        int g = stream_of(fd);
        if (g >= 0)
            return stream_ioctl(g, request & 0xffffffff);
        if (kind == 'd' && is_device(fd))
            return device_ioctl(request, arg);
    }
    return real_ioctl(fd, request, arg);
}

EXPORT ssize_t read(int fd, void *buffer, size_t count)
{
    int g = stream_of(fd);
    return g >= 0 ? stream_read(fd, g, buffer, count) : real_fd_read(fd, buffer, count);
}

EXPORT ssize_t __read_chk(int fd, void *buffer, size_t count, size_t room)
{
    if (count > room)
        abort();
    return read(fd, buffer, count);
}

/* As the kernel does for a file that only knows read: one read after the other, until one is short or fails. */
EXPORT ssize_t readv(int fd, const struct iovec *parts, int count)
{
    ssize_t total = 0;
    int g = stream_of(fd);
    REAL(readv);
    if (g < 0)
        return real_readv(fd, parts, count);
    for (int i = 0; i < count; i++) {
        ssize_t size = parts[i].iov_len ? stream_read(fd, g, parts[i].iov_base, parts[i].iov_len) : 0;
        if (size < 0)
            return total ? total : size;
        total += size;
        if ((size_t)size < parts[i].iov_len)
            break;
    }
    return total;
}

EXPORT ssize_t pread64(int fd, void *buffer, size_t count, off64_t offset)
{
    int g = stream_of(fd);
    REAL(pread64);
    return g >= 0 ? stream_read(fd, g, buffer, count) : real_pread64(fd, buffer, count, offset);
}

EXPORT ssize_t pread(int fd, void *buffer, size_t count, off_t offset)
{
    return pread64(fd, buffer, count, offset);
}

/* A node of a machine without a device is not there; one of an i915 is. */
static int open_shown(int dir, const char *path, int flags, mode_t mode)
{
    char space[PATH_MAX];
    return real_open_at(dir, shown(path, space), flags, mode);
}

#define MODE_OF(flags, last)                                       \
    mode_t mode = 0;                                               \
    if ((flags) & O_CREAT || ((flags) & O_TMPFILE) == O_TMPFILE) { \
        va_list list;                                              \
        va_start(list, last);                                      \
        mode = va_arg(list, mode_t);                               \
        va_end(list);                                              \
    }

EXPORT int open(const char *path, int flags, ...)
{
    MODE_OF(flags, flags)
    return open_shown(AT_FDCWD, path, flags, mode);
}

EXPORT int open64(const char *path, int flags, ...)
{
    MODE_OF(flags, flags)
    return open_shown(AT_FDCWD, path, flags | O_LARGEFILE, mode);
}

EXPORT int openat(int dir, const char *path, int flags, ...)
{
    MODE_OF(flags, flags)
    return open_shown(dir, path, flags, mode);
}

EXPORT int openat64(int dir, const char *path, int flags, ...)
{
    MODE_OF(flags, flags)
    return open_shown(dir, path, flags | O_LARGEFILE, mode);
}

EXPORT int __open_2(const char *path, int flags)
{
    return open_shown(AT_FDCWD, path, flags, 0);
}

EXPORT int __open64_2(const char *path, int flags)
{
    return open_shown(AT_FDCWD, path, flags | O_LARGEFILE, 0);
}

EXPORT int __openat_2(int dir, const char *path, int flags)
{
    return open_shown(dir, path, flags, 0);
}

EXPORT int __openat64_2(int dir, const char *path, int flags)
{
    return open_shown(dir, path, flags | O_LARGEFILE, 0);
}

/* In the tree the nodes are ordinary files; here they become what they stand for. */
#define AS_NODE(st)                                                           \
    do {                                                                      \
        int node = node_of((st)->st_dev, (st)->st_ino);                       \
        if (node >= 0) {                                                      \
            (st)->st_mode = S_IFCHR | ((st)->st_mode & 07777);                \
            (st)->st_rdev = makedev(226, nodes[node].minor);                  \
            (st)->st_size = 0;                                                \
        }                                                                     \
    } while (0)

#define STAT_BY_PATH(name, type)                          \
    EXPORT int name(const char *path, struct type *st)    \
    {                                                     \
        char space[PATH_MAX];                             \
        REAL(name);                                       \
        int result = real_##name(shown(path, space), st); \
        if (result == 0)                                  \
            AS_NODE(st);                                  \
        return result;                                    \
    }
STAT_BY_PATH(stat, stat)
STAT_BY_PATH(lstat, stat)
STAT_BY_PATH(stat64, stat64)
STAT_BY_PATH(lstat64, stat64)

#define STAT_BY_FD(name, type)                \
    EXPORT int name(int fd, struct type *st)  \
    {                                         \
        REAL(name);                           \
        int result = real_##name(fd, st);     \
        if (result == 0)                      \
            AS_NODE(st);                      \
        return result;                        \
    }
STAT_BY_FD(fstat, stat)
STAT_BY_FD(fstat64, stat64)

#define STAT_AT(name, type)                                                \
    EXPORT int name(int dir, const char *path, struct type *st, int flags) \
    {                                                                      \
        char space[PATH_MAX];                                              \
        REAL(name);                                                        \
        int result = real_##name(dir, shown(path, space), st, flags);      \
        if (result == 0)                                                   \
            AS_NODE(st);                                                   \
        return result;                                                     \
    }
STAT_AT(fstatat, stat)
STAT_AT(fstatat64, stat64)

EXPORT int statx(int dir, const char *restrict path, int flags, unsigned mask, struct statx *restrict st)
{
    char space[PATH_MAX];
    REAL(statx);
    int result = real_statx(dir, shown(path, space), flags, mask, st);
    int node = result ? -1 : node_of(makedev(st->stx_dev_major, st->stx_dev_minor), st->stx_ino);
    if (node >= 0) {
        st->stx_mode = (uint16_t)(S_IFCHR | (st->stx_mode & 07777));
        st->stx_rdev_major = 226;
        st->stx_rdev_minor = nodes[node].minor;
        st->stx_size = 0;
    }
    return result;
}

/* What programs that were linked before glibc 2.33 call. */
int __xstat(int version, const char *path, struct stat *st);
int __lxstat(int version, const char *path, struct stat *st);
int __fxstat(int version, int fd, struct stat *st);
EXPORT int __xstat(int version, const char *path, struct stat *st)
{
    (void)version;
    return stat(path, st);
}

EXPORT int __lxstat(int version, const char *path, struct stat *st)
{
    (void)version;
    return lstat(path, st);
}

EXPORT int __fxstat(int version, int fd, struct stat *st)
{
    (void)version;
    return fstat(fd, st);
}

EXPORT DIR *opendir(const char *path)
{
    char space[PATH_MAX];
    REAL(opendir);
    return real_opendir(shown(path, space));
}

#define READDIR(name, type)                                                                       \
    EXPORT struct type *name(DIR *dir)                                                            \
    {                                                                                             \
        REAL(name);                                                                               \
        struct type *entry = real_##name(dir);                                                    \
        for (int i = 0; entry && i < 2; i++)                                                      \
            if (entry->d_type == DT_REG && nodes[i].inode && entry->d_ino == nodes[i].inode &&    \
                !strcmp(entry->d_name, i ? "renderD128" : "card0"))                               \
                entry->d_type = DT_CHR;                                                           \
        return entry;                                                                             \
    }
READDIR(readdir, dirent)
READDIR(readdir64, dirent64)

EXPORT int scandir(const char *path, struct dirent ***names, int (*wanted)(const struct dirent *),
                   int (*compare)(const struct dirent **, const struct dirent **))
{
    char space[PATH_MAX];
    REAL(scandir);
    return real_scandir(shown(path, space), names, wanted, compare);
}

EXPORT ssize_t readlink(const char *path, char *buffer, size_t size)
{
    char space[PATH_MAX];
    REAL(readlink);
    return real_readlink(shown(path, space), buffer, size);
}

EXPORT ssize_t readlinkat(int dir, const char *path, char *buffer, size_t size)
{
    char space[PATH_MAX];
    REAL(readlinkat);
    return real_readlinkat(dir, shown(path, space), buffer, size);
}

/* A path inside the tree is told as the path that it is shown at. */
EXPORT char *realpath(const char *path, char *resolved)
{
    char space[PATH_MAX];
    size_t n = strlen(root);
    REAL(realpath);
    const char *asked = shown(path, space);
    char *result = real_realpath(asked, resolved);
    if (result && asked == space) {
        char tree[PATH_MAX];
        if (real_realpath(root, tree) && below(result, tree) && result[(n = strlen(tree))])
            memmove(result, result + n, strlen(result + n) + 1);
    }
    return result;
}

EXPORT char *__realpath_chk(const char *path, char *resolved, size_t room)
{
    if (room < PATH_MAX)
        abort();
    return realpath(path, resolved);
}

EXPORT int access(const char *path, int mode)
{
    char space[PATH_MAX];
    REAL(access);
    return real_access(shown(path, space), mode);
}

EXPORT int faccessat(int dir, const char *path, int mode, int flags)
{
    char space[PATH_MAX];
    REAL(faccessat);
    return real_faccessat(dir, shown(path, space), mode, flags);
}

EXPORT FILE *fopen(const char *restrict path, const char *restrict mode)
{
    char space[PATH_MAX];
    REAL(fopen);
    return real_fopen(shown(path, space), mode);
}

EXPORT FILE *fopen64(const char *restrict path, const char *restrict mode)
{
    char space[PATH_MAX];
    REAL(fopen64);
    return real_fopen64(shown(path, space), mode);
}
