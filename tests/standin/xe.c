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
 * is set, an event of the PMU is an empty file in memory. So fcntl, dup, poll, epoll, close and inheritance need no answer from here: a
 * descriptor is known by its inode, one of the tree by its mark (protocol.h).
 *
 * The PMU follows xe_pmu.c of Linux 6.18: what it does not know is ENOENT, frequencies are added up at each read, an event whose card is
 * gone reads as empty. An event stays in its group until the leader is closed, and events of other PMUs cannot be in it. Unlike on a real
 * card an open event does not keep the GT from C6, and what a library reads through stdio below hwmon is the tree's text as it stands.
 *
 * A card whose folder in the tree has prelim_uapi_version is driven by Intel's i915 from outside the Linux kernel instead, whose
 * answers and refusals follow i915_query.c and i915_perf_stall_cntr.c of its version 25.1. Stricter than that one: a read has to be of
 * whole records (the driver would cut one in two), and after a reset nothing is sampled until the stream is opened again (there, after
 * a reset of an engine it goes on, with pointers at 0). It polls every 5 ms whatever it is told, and its buffers have 512 KiB.
 *
 * It leaves the environment of everything that the recorder starts: the profiled command never sees it.
 *
 * Faults, a list in STANDIN_FAULTS or in the file STANDIN_DIR/faults: no-device, not-xe (Linux's i915), no-eu-stall, busy, eacces,
 * old-driver (Intel's i915 does not know property 1006, nor the query for the IP version),
 * slow-reader (each read of a stream takes STANDIN_SLOW_MS longer, 100 by default). With @CARD they are that card's only, and busy, eacces
 * and slow-reader with @CARD.GT that main GT's (both counted from 0). */
#define _GNU_SOURCE
#define STANDIN_WITH_SHARED_MEMORY
#include "protocol.h"

#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/perf_event.h>
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
#include <sys/syscall.h>
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

/* Does the fault stand in the list for this card and main GT (-1: none in particular)? */
static bool has_fault(const char *name, int card, int gt)
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
            size_t n = strlen(name);
            if (strncmp(at, name, n))
                continue;
            if (strcspn(at, ", \n") == n)
                return true;
            char *end;
            if (at[n] == '@' && strtol(at + n + 1, &end, 10) == card && (*end != '.' || strtol(end + 1, NULL, 10) == gt))
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
    static const char *const whole[] = {"/dev/dri", "/sys/class/drm", "/proc/sys/dev/xe", "/proc/sys/dev/i915", "/proc/driver/nvidia"};
    static const char *const shared_with_real[] = {"/sys/devices", "/sys/dev/char", "/sys/bus/pci"};
    static const char pmus[] = "/sys/bus/event_source/devices";
    char clean[PATH_MAX];
    size_t n = 0;
    bool ours = false, maybe = false;

    if (!root[0] || !path || path[0] != '/' || (strncmp(path, "/dev", 4) && strncmp(path, "/sys", 4) && strncmp(path, "/proc/sys", 9) &&
                                          strncmp(path, "/proc/driver", 12)))
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
        ours |= clean[sizeof(pmus) - 1] == 0 || !strncmp(clean + sizeof(pmus), "xe_", 3) ||
                !strncmp(clean + sizeof(pmus), "i915_", 5);
    for (size_t i = 0; i < sizeof(shared_with_real) / sizeof(*shared_with_real); i++)
        maybe |= below(clean, shared_with_real[i]) && clean[strlen(shared_with_real[i])];
    if (!ours && !maybe)
        return path;
    if (has_fault("no-device", -1, -1)) {
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

/* What a file of the tree is marked as (protocol.h); kind 0: nothing. */
struct mark {
    unsigned kind, card, number, generation;
};

static struct mark mark_of(int64_t seconds, int64_t nanoseconds)
{
    struct mark mark = {(unsigned)(nanoseconds / 1000000), (unsigned)(nanoseconds / 10000 % 100), (unsigned)(nanoseconds % 10000),
                        (unsigned)(seconds - STANDIN_MARK)};
    if (!root[0] || seconds <= STANDIN_MARK || seconds > STANDIN_MARK + STANDIN_MARK_GENERATIONS || mark.kind >= STANDIN_KINDS ||
        mark.card >= STANDIN_MAX_CARDS)
        mark.kind = 0;
    return mark;
}

static struct mark mark_of_fd(int fd)
{
    struct stat st;
    int error = errno;
    struct mark none = {0};
    bool there = root[0] && real_fd_stat(fd, &st) == 0 && S_ISREG(st.st_mode);
    errno = error;
    return there ? mark_of(st.st_mtim.tv_sec, st.st_mtim.tv_nsec) : none;
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
    const char *dir = getenv("STANDIN_DIR");
    leave_environment();
    if (!dir || strlen(dir) > PATH_MAX - 64)
        return;
    snprintf(directory, sizeof(directory), "%s", dir);
    snprintf(root, sizeof(root), "%.*s/sysfs", (int)(sizeof(root) - 16), dir);
}

/* ---- the GPU process ---- */

static struct standin_device cards[STANDIN_MAX_CARDS];
static uint32_t cards_known;
static struct standin_shared *shared;
/* This process's streams. The GPU allows one for each main GT, so a new one takes the place of the last; only what is left of a card that
 * was unplugged stays, as long as there is room. */
static struct stream {
    dev_t device;
    ino_t inode;
    uint64_t id;
    uint32_t gt, card, generation;
    bool i915, counted; /* counted: its end is among the resets of its card */
} streams[64];
static _Atomic int streams_known;

static bool is_there(uint32_t card, uint32_t generation)
{
    return generation && shared->plugged[card] == generation;
}

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
    cards_known = reply.cards < STANDIN_MAX_CARDS ? reply.cards : STANDIN_MAX_CARDS;
    memcpy(cards, reply.devices, sizeof(cards));
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

static int number_of(const struct standin_device *device)
{
    return (int)(device - cards);
}

/* Whether Intel's i915 drives the card. */
static bool is_i915(int card)
{
    char path[PATH_MAX + 64];
    int error = errno;
    REAL(access);
    snprintf(path, sizeof(path), "%s/sys/class/drm/card%d/prelim_uapi_version", root, card);
    bool is = real_access(path, F_OK) == 0;
    errno = error;
    return is;
}

/* struct drm_version, drm.h. A name is copied as far as the caller has room; its length is always told. */
static int answer_version(const struct standin_device *device, uint64_t arg)
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
    bool xe = !has_fault("not-xe", number_of(device), -1) && !is_i915(number_of(device));
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

/* The engine classes of a GT, a bit each: 0 render (not on PVC), 1 copy, 2 and 3 video, 4 compute. Each has instance 0. */
static unsigned engines_of(const struct standin_gt *gt)
{
    return gt->type ? 1 << 2 | 1 << 3 : 1 << 1 | 1 << 4 | (gt->major != 12);
}

static bool has_engine(const struct standin_device *device, unsigned gt, unsigned class, unsigned instance)
{
    for (uint32_t i = 0; i < device->gts; i++)
        if (device->gt[i].id == gt)
            return instance == 0 && class < 5 && engines_of(&device->gt[i]) >> class & 1;
    return false;
}

/* struct drm_xe_query_engines: 32 bytes for each, in the driver's order. */
static int query_engines(const struct standin_device *device, struct query *query, uint64_t arg)
{
    struct {
        uint32_t count, pad;
        struct {
            uint16_t class, instance, gt, pad;
            uint64_t reserved[3];
        } engine[STANDIN_MAX_GTS * 5];
    } list = {0};
    for (uint32_t i = 0; i < device->gts; i++)
        for (uint16_t class = 0; class < 5; class++)
            if (engines_of(&device->gt[i]) >> class & 1) {
                list.engine[list.count].class = class;
                list.engine[list.count++].gt = device->gt[i].id;
            }
    return give(query, arg, &list, 8 + 32 * list.count);
}

/* One struct drm_xe_query_topology_mask after the other. A DSS is what is called XeCore now; some of them are fused off. */
static int query_topology(const struct standin_device *device, struct query *query, uint64_t arg)
{
    enum { GEOMETRY = 1, COMPUTE, L3_BANK, EU_PER_DSS, SIMD16_EU_PER_DSS };
    static const struct {
        uint16_t type;
        uint32_t bytes;
    } masks[] = {{GEOMETRY, 16}, {COMPUTE, 16}, {L3_BANK, 8}, {SIMD16_EU_PER_DSS, 8}}; /* as long as the driver's bitmaps */
    char answer[STANDIN_MAX_GTS * 80];
    uint32_t size = 0;
    memset(answer, 0, sizeof(answer));
    for (uint32_t i = 0; i < device->gts; i++) {
        const struct standin_gt *gt = &device->gt[i];
        for (size_t m = 0; m < sizeof(masks) / sizeof(*masks); m++) {
            if (masks[m].type == L3_BANK && gt->type && gt->major == 30) /* left out where the driver cannot know it */
                continue;
            memcpy(answer + size, &gt->id, 2);
            memcpy(answer + size + 2, &masks[m].type, 2);
            memcpy(answer + size + 4, &masks[m].bytes, 4);
            char *mask = answer + size + 8;
            size += 8 + masks[m].bytes;
            if (gt->type || (masks[m].type == GEOMETRY && gt->major == 12)) /* PVC draws nothing */
                continue;
            if (masks[m].type == L3_BANK || masks[m].type == SIMD16_EU_PER_DSS)
                mask[0] = (char)0xff;
            else
                for (uint32_t x = 0; x < device->xecores; x++)
                    mask[(x + x / 10) / 8] |= (char)(1 << (x + x / 10) % 8);
        }
    }
    return give(query, arg, answer, size);
}

static int query_config(const struct standin_device *device, struct query *query, uint64_t arg)
{
    struct {
        uint32_t count, pad;
        uint64_t info[5];
    } config = {.count = 5};
    config.info[0] = (uint64_t)device->revision << 16 | device->device_id;
    config.info[1] = device->has_vram ? 1 : 0;
    config.info[2] = device->has_vram ? 65536 : 4096;
    config.info[3] = device->va_bits;
    config.info[4] = 2;
    return give(query, arg, &config, sizeof(config));
}

static int query_gts(const struct standin_device *device, struct query *query, uint64_t arg)
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
    } list = {.count = device->gts};
    for (uint32_t i = 0; i < device->gts; i++) {
        uint64_t all = device->has_vram ? 3 : 1;
        list.gt[i].type = device->gt[i].type;
        list.gt[i].tile = device->gt[i].tile;
        list.gt[i].id = device->gt[i].id;
        list.gt[i].reference_clock = device->reference_clock;
        list.gt[i].near = device->has_vram ? 2ull << device->gt[i].tile : 1;
        list.gt[i].far = all & ~list.gt[i].near;
        list.gt[i].major = device->gt[i].major;
        list.gt[i].minor = device->gt[i].minor;
        list.gt[i].revision = device->gt[i].revision;
    }
    return give(query, arg, &list, 8 + 96 * device->gts);
}

enum { CYCLES = 251, RATES = 7 };

static int query_eu_stall(const struct standin_device *device, struct query *query, uint64_t arg)
{
    struct {
        uint64_t extensions, capabilities, record_size, buffer_size, reserved[5], count, rates[RATES];
    } answer = {.capabilities = 1, .record_size = STANDIN_RECORD_BYTES, .buffer_size = STANDIN_XECORE_BYTES, .count = RATES};
    if (has_fault("no-eu-stall", number_of(device), -1))
        return ENODEV;
    for (int i = 0; i < RATES; i++)
        answer.rates[i] = CYCLES * (uint64_t)(i + 1);
    return give(query, arg, &answer, sizeof(answer));
}

static int query_cycles(const struct standin_device *device, struct query *query, uint64_t arg)
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
    engine = has_engine(device, c.gt, c.engine, c.instance);
    if (!known || !engine)
        return EINVAL;
    clock_gettime(c.clock, &t);
    clock_gettime(CLOCK_MONOTONIC_RAW, &gpu);
    c.cpu_time = (uint64_t)t.tv_sec * 1000000000ull + (uint64_t)t.tv_nsec;
    c.cpu_delta = 500;
    c.cycles = (uint64_t)gpu.tv_sec * device->reference_clock +
               (uint64_t)((double)gpu.tv_nsec * device->reference_clock / 1e9);
    c.width = device->gt[0].major >= 20 ? 64 : 36;
    if (c.width < 64)
        c.cycles &= (1ull << c.width) - 1;
    return copy_out(query->data, &c, sizeof(c));
}

static int answer_query(const struct standin_device *device, uint64_t arg)
{
    struct query query;
    if (copy_in(&query, arg, sizeof(query)))
        return EFAULT;
    if (query.extensions || query.reserved[0] || query.reserved[1])
        return EINVAL;
    switch (query.query) {
    case 0:
        return query_engines(device, &query, arg);
    case 2:
        return query_config(device, &query, arg);
    case 3:
        return query_gts(device, &query, arg);
    case 5:
        return query_topology(device, &query, arg);
    case 6:
        return query_cycles(device, &query, arg);
    case 10:
        return query_eu_stall(device, &query, arg);
    default: /* others that Linux knows are not needed by a recorder */
        return EINVAL;
    }
}

struct wishes {
    int gt; /* which main GT of the card; -1 none given; -2 a media GT, which has no XeCores */
    uint32_t rate, wait_reports;
};

static int read_property(const struct standin_device *device, uint64_t name, uint64_t value, struct wishes *wishes)
{
    int mains = 0;
    switch (name) {
    case 1: /* GT_ID */
        for (uint32_t i = 0; i < device->gts; i++) {
            if (device->gt[i].id == value) {
                wishes->gt = device->gt[i].type ? -2 : mains;
                return 0;
            }
            mains += !device->gt[i].type;
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

/* Opens a stream at the GPU, and knows it by its descriptor from now on. */
static int make_stream(const struct standin_device *device, const struct wishes *wishes, bool i915, int flags, int *fd)
{
    struct standin_driver_reply reply;
    struct stat st;
    uint32_t gt = device->first + (uint32_t)wishes->gt, card = (uint32_t)number_of(device);
    int error = ask((struct standin_driver){.op = STANDIN_DRIVER_OPEN, .gt = gt, .rate = wishes->rate,
                                            .wait_reports = wishes->wait_reports}, &reply, fd, flags);
    if (error)
        return error;
    if (real_fd_stat(*fd, &st))
        return errno;
    int place = 0;
    while (place < streams_known && !(streams[place].gt == gt && is_there(card, streams[place].generation)))
        place++;
    if (place == (int)(sizeof(streams) / sizeof(*streams)))
        place = (int)(reply.stream % (sizeof(streams) / sizeof(*streams)));
    streams[place] = (struct stream){st.st_dev, st.st_ino, reply.stream, gt, card, shared->plugged[card], i915, false};
    if (place >= streams_known)
        streams_known = place + 1;
    return 0;
}

static int answer_observation(const struct standin_device *device, uint64_t arg, int *fd)
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

    if (copy_in(&observation, arg, sizeof(observation)))
        return EFAULT;
    if (observation.extensions || observation.type != 1 || observation.op != 0)
        return EINVAL;
    if (has_fault("no-eu-stall", number_of(device), -1))
        return ENODEV;
    if (has_fault("eacces", number_of(device), -1))
        return EACCES;
    ext.next = observation.param;
    for (int i = 0; i == 0 || ext.next; i++) {
        if (i >= 5)
            return E2BIG;
        if (copy_in(&ext, ext.next, sizeof(ext)))
            return EFAULT;
        if (ext.pad || ext.name || ext.pad2)
            return EINVAL;
        int error = read_property(device, ext.property, ext.value, &wishes);
        if (error)
            return error;
    }
    if (wishes.gt < 0)
        return EINVAL;
    if (has_fault("eacces", number_of(device), wishes.gt))
        return EACCES;
    if (has_fault("busy", number_of(device), wishes.gt))
        return EBUSY;
    return make_stream(device, &wishes, false, 0, fd);
}

/* How long the driver waits for a GT that stands still (XE_FORCE_WAKE_ACK_TIMEOUT_MS). */
static int waited(int error)
{
    struct timespec t = {0, 50 * 1000000};
    if (error == ETIMEDOUT)
        nanosleep(&t, NULL);
    return error;
}

static struct stream *stream_of(int fd);
static int stream_ioctl(const struct stream *opened, unsigned long request);

/* ---- ioctls on a node of Intel's i915 ---- */

enum { CCS_A_TILE = 4 }; /* its compute engines are numbered through all tiles; a copy engine for each tile */

/* The tile of an engine; -1: there is no such engine. */
static int tile_of(const struct standin_device *device, unsigned class, unsigned instance)
{
    unsigned tile = class == 4 ? instance / CCS_A_TILE : instance;
    return (class == 1 || class == 4) && tile < device->mains ? (int)tile : -1;
}

static int i915_param(const struct standin_device *device, uint64_t arg)
{
    struct {
        int32_t param, pad;
        uint64_t value;
    } request;
    if (copy_in(&request, arg, sizeof(request)))
        return EFAULT;
    if (request.param != 4 && request.param != 32)
        return EINVAL;
    int value = request.param == 4 ? device->device_id : device->revision;
    return copy_out(request.value, &value, sizeof(value));
}

struct item {
    uint64_t id;
    int32_t length;
    uint32_t flags;
    uint64_t data;
};

/* As copy_query_item does: the length that is needed, and what the caller asks about. */
static int take(const struct item *item, void *asked, size_t asked_size, size_t needed)
{
    if (item->length == 0)
        return (int)needed;
    if ((size_t)item->length < needed || item->length < 0)
        return -EINVAL;
    return copy_in(asked, item->data, asked_size) ? -EFAULT : 0;
}

static int i915_engines(const struct standin_device *device, const struct item *item)
{
    struct {
        uint32_t count, reserved[3];
        struct {
            uint16_t class, instance;
            uint32_t oa_unit;
            uint64_t flags, capabilities, known_capabilities;
            uint16_t logical_instance, reserved[3];
            uint64_t reserved2[2];
        } engine[STANDIN_MAX_GTS * (1 + CCS_A_TILE)];
    } list = {0};
    _Static_assert(sizeof(list.engine[0]) == 56, "an engine has 56 bytes");
    uint32_t count = device->mains * (1 + CCS_A_TILE), head[4];
    size_t size = 16 + 56 * (size_t)count;
    int error = item->flags ? -EINVAL : take(item, head, sizeof(head), size);
    if (error)
        return error;
    if (head[0] || head[1] || head[2] || head[3])
        return -EINVAL;
    for (uint32_t i = 0; i < device->mains; i++)
        list.engine[list.count++].class = 1, list.engine[list.count - 1].instance = (uint16_t)i;
    for (uint32_t i = 0; i < device->mains * CCS_A_TILE; i++)
        list.engine[list.count++].class = 4, list.engine[list.count - 1].instance = (uint16_t)i;
    return copy_out(item->data, &list, size) ? -EFAULT : (int)size;
}

static int i915_distance(const struct standin_device *device, const struct item *item)
{
    struct {
        uint16_t class, instance, memory, memory_instance;
        int32_t distance;
        uint32_t reserved[3];
    } asked;
    int error = take(item, &asked, sizeof(asked), sizeof(asked));
    if (error)
        return error;
    int tile = tile_of(device, asked.class, asked.instance);
    if (tile < 0 || asked.memory > 1 || (asked.memory == 1 && asked.memory_instance >= device->mains) || asked.reserved[0] ||
        asked.reserved[1] || asked.reserved[2])
        return -EINVAL;
    asked.distance = asked.memory == 0 ? 10000 : tile == asked.memory_instance ? 0 : 1000;
    return copy_out(item->data, &asked, sizeof(asked)) ? -EFAULT : (int)sizeof(asked);
}

/* struct drm_i915_query_topology_info: one slice with all XeCores, some of which are fused off. */
static int i915_xecores(const struct standin_device *device, const struct item *item)
{
    struct {
        uint16_t flags, slices, xecores, eus, xecore_offset, xecore_stride, eu_offset, eu_stride;
        uint8_t slice, xecore[(STANDIN_MAX_XECORES + STANDIN_MAX_XECORES / 10 + 7) / 8], eu[2 * STANDIN_MAX_XECORES];
    } answer = {.slices = 1, .eus = 8, .xecore_offset = 1, .xecore_stride = sizeof(answer.xecore),
                .eu_offset = 1 + sizeof(answer.xecore), .eu_stride = 1, .slice = 1};
    uint16_t head[8];
    if (tile_of(device, item->flags & 0xff, item->flags >> 8 & 0xff) < 0)
        return -EINVAL;
    int error = take(item, head, sizeof(head), sizeof(answer));
    if (error)
        return error;
    answer.xecores = (uint16_t)device->xecores;
    for (uint32_t x = 0; x < device->xecores; x++)
        answer.xecore[(x + x / 10) / 8] |= (uint8_t)(1 << (x + x / 10) % 8);
    memset(answer.eu, 0xff, sizeof(answer.eu));
    return copy_out(item->data, &answer, sizeof(answer)) ? -EFAULT : (int)sizeof(answer);
}

static int i915_cycles(const struct standin_device *device, const struct item *item)
{
    struct {
        uint16_t class, instance;
        uint32_t flags;
        uint64_t cycles, frequency, cpu_time;
        int32_t clock;
        uint32_t reserved;
    } asked;
    struct timespec t, gpu;
    int error = take(item, &asked, sizeof(asked), sizeof(asked));
    if (error)
        return error;
    if (tile_of(device, asked.class, asked.instance) < 0 || asked.flags || asked.reserved || clock_gettime(asked.clock, &t))
        return -EINVAL;
    clock_gettime(CLOCK_MONOTONIC_RAW, &gpu);
    asked.cpu_time = (uint64_t)t.tv_sec * 1000000000ull + (uint64_t)t.tv_nsec;
    asked.frequency = device->reference_clock;
    asked.cycles = (uint64_t)gpu.tv_sec * device->reference_clock +
                   (uint64_t)((double)gpu.tv_nsec * device->reference_clock / 1e9);
    return copy_out(item->data, &asked, sizeof(asked)) ? -EFAULT : (int)sizeof(asked);
}

static int i915_ip_version(const struct standin_device *device, const struct item *item)
{
    struct {
        uint16_t class, instance;
        uint8_t flags, major, minor, stepping;
    } asked;
    int error = take(item, &asked, sizeof(asked), sizeof(asked));
    if (error)
        return error;
    if (asked.flags || item->flags || tile_of(device, asked.class, asked.instance) < 0)
        return -EINVAL;
    asked.major = (uint8_t)device->gt[0].major;
    asked.minor = (uint8_t)device->gt[0].minor;
    asked.stepping = 7;
    return copy_out(item->data, &asked, sizeof(asked)) ? -EFAULT : (int)sizeof(asked);
}

/* An item's refusal is in the item: the ioctl itself works. */
static int i915_query(const struct standin_device *device, uint64_t arg)
{
    struct {
        uint32_t count, flags;
        uint64_t items;
    } request;
    struct item item;
    if (copy_in(&request, arg, sizeof(request)))
        return EFAULT;
    if (request.flags)
        return EINVAL;
    for (uint32_t i = 0; i < request.count; i++) {
        uint64_t at = request.items + i * sizeof(item);
        if (copy_in(&item, at, sizeof(item)))
            return EFAULT;
        switch (item.id) {
        case 0:
            return EINVAL;
        case 0x10005:
            item.length = i915_distance(device, &item);
            break;
        case 0x10008:
            item.length = i915_xecores(device, &item);
            break;
        case 0x10009:
            item.length = i915_cycles(device, &item);
            break;
        case 0x1000c:
            item.length = has_fault("old-driver", number_of(device), -1) ? -EINVAL : i915_ip_version(device, &item);
            break;
        case 0x1000d:
            item.length = i915_engines(device, &item);
            break;
        default:
            item.length = -EINVAL;
        }
        if (copy_out(at + 8, &item.length, sizeof(item.length)))
            return EFAULT;
    }
    return 0;
}

static int i915_perf_open(const struct standin_device *device, uint64_t arg, int *fd)
{
    enum { CLOEXEC = 1, NONBLOCK = 2, DISABLED = 4, EU_STALL = 0x10000 };
    struct {
        uint32_t flags, count;
        uint64_t properties;
    } request;
    struct wishes wishes = {0, 4, 1};
    int card = number_of(device), class = -1, instance = -1, last = has_fault("old-driver", card, -1) ? 1005 : 1006;
    if (copy_in(&request, arg, sizeof(request)))
        return EFAULT;
    if (request.flags & ~(unsigned)(CLOEXEC | NONBLOCK | DISABLED | EU_STALL) || !(request.flags & EU_STALL))
        return EINVAL; /* without the last one it is for OA */
    if (!request.count || request.count > (uint32_t)last)
        return EINVAL;
    for (uint32_t i = 0; i < request.count; i++) {
        uint64_t pair[2];
        if (copy_in(pair, request.properties + i * sizeof(pair), sizeof(pair)))
            return EFAULT;
        if (pair[0] > (uint64_t)last)
            return EINVAL;
        switch (pair[0]) {
        case 1001:
            if (pair[1] != 128 * 1024 && pair[1] != 256 * 1024 && pair[1] != 512 * 1024)
                return EINVAL;
            break;
        case 1002:
            if (pair[1] == 0 || pair[1] > RATES)
                return EINVAL;
            wishes.rate = (uint32_t)pair[1];
            break;
        case 1003:
            if (pair[1] < 100000)
                return EINVAL;
            break;
        case 1004:
            class = (uint16_t)pair[1];
            break;
        case 1005:
            instance = (uint16_t)pair[1];
            break;
        case 1006:
            if (!(wishes.wait_reports = (uint32_t)pair[1]))
                return EINVAL;
            break;
        default:
            return EINVAL;
        }
    }
    wishes.rate *= CYCLES;
    if (class >= 0 || instance >= 0)
        wishes.gt = tile_of(device, (unsigned)class, (unsigned)instance);
    if (wishes.gt < 0)
        return EINVAL;
    if (has_fault("no-eu-stall", card, -1))
        return EPERM;
    if (has_fault("eacces", card, wishes.gt))
        return EACCES;
    if (has_fault("busy", card, wishes.gt))
        return EBUSY;
    int error = make_stream(device, &wishes, true, request.flags & CLOEXEC ? MSG_CMSG_CLOEXEC : 0, fd);
    if (!error && request.flags & NONBLOCK)
        fcntl(*fd, F_SETFL, O_NONBLOCK);
    if (!error && !(request.flags & DISABLED))
        stream_ioctl(stream_of(*fd), 0x6900);
    return error;
}

/* struct drm_i915_reset_stats of context 0. A reset is counted once it has met a stream of this process. */
static int i915_reset_stats(const struct standin_device *device, uint64_t arg)
{
    static uint32_t resets[STANDIN_MAX_CARDS];
    uint32_t stats[6], card = (uint32_t)number_of(device);
    if (copy_in(stats, arg, sizeof(stats)))
        return EFAULT;
    if (stats[0])
        return ENOENT;
    if (stats[1])
        return EINVAL;
    for (int i = 0; i < streams_known; i++) {
        struct standin_stream *stream = &shared->streams[streams[i].gt];
        if (streams[i].card == card && !streams[i].counted && stream->id == streams[i].id && stream->reset) {
            streams[i].counted = true;
            resets[card]++;
        }
    }
    stats[2] = geteuid() ? 0 : resets[card];
    return copy_out(arg, stats, sizeof(stats));
}

static int i915_ioctl(const struct standin_device *device, uint32_t request, uint64_t arg, int *fd)
{
    switch (request) {
    case 0xc0106446:
        return i915_param(device, arg);
    case 0xc0106479:
        return i915_query(device, arg);
    case 0x40106476:
        return waited(i915_perf_open(device, arg, fd));
    case 0xc0186472:
        return i915_reset_stats(device, arg);
    default:
        return (request >> 8 & 0xff) == 'd' ? EINVAL : ENOTTY;
    }
}

static int device_ioctl(struct mark node, unsigned long request, uint64_t arg)
{
    int fd = -1, error = meet_gpu();
    if (!error && (node.card >= cards_known || !is_there(node.card, node.generation)))
        error = ENODEV;
    if (error)
        return fail(error);
    const struct standin_device *device = &cards[node.card];
    if ((uint32_t)request != 0xc0406400 && is_i915((int)node.card)) {
        error = i915_ioctl(device, (uint32_t)request, arg, &fd);
        return error ? fail(error) : fd >= 0 ? fd : 0;
    }
    switch ((uint32_t)request) {
    case 0xc0406400:
        error = answer_version(device, arg);
        break;
    case 0xc0286440:
        error = has_fault("not-xe", (int)node.card, -1) ? EINVAL : answer_query(device, arg);
        break;
    case 0x4020644b:
        error = has_fault("not-xe", (int)node.card, -1) ? EINVAL : waited(answer_observation(device, arg, &fd));
        break;
    default:
        error = (request >> 8 & 0xff) == 'd' ? EINVAL : ENOTTY;
    }
    if (error)
        return fail(error);
    return fd >= 0 ? fd : 0;
}

/* ---- a stream ---- */

static struct stream *stream_with(const struct stat *st)
{
    for (int i = 0; S_ISFIFO(st->st_mode) && i < streams_known; i++)
        if (streams[i].inode == st->st_ino && streams[i].device == st->st_dev)
            return &streams[i];
    return NULL;
}

/* Which stream the descriptor is, or none. By inode, so that copies of it are it, and a number that was closed is not. */
static struct stream *stream_of(int fd)
{
    struct stat st;
    if (!streams_known)
        return NULL;
    int error = errno;
    bool known = real_fd_stat(fd, &st) == 0;
    errno = error;
    return known ? stream_with(&st) : NULL;
}

static int stream_ioctl(const struct stream *opened, unsigned long request)
{
    struct standin_driver_reply reply;
    struct standin_driver question = {.gt = opened->gt, .stream = opened->id};
    if (!is_there(opened->card, opened->generation))
        return fail(ENODEV);
    if (request == 0x6900)
        question.op = STANDIN_DRIVER_ENABLE;
    else if (request == 0x6901)
        question.op = STANDIN_DRIVER_DISABLE;
    else
        return fail(EINVAL);
    int error = waited(ask(question, &reply, NULL, 0));
    return error ? fail(error) : 0;
}

static void lock(struct standin_stream *stream)
{
    if (pthread_mutex_lock(&stream->lock) == EOWNERDEAD)
        pthread_mutex_consistent(&stream->lock);
}

/* What is visible of one XeCore's buffer, as far as there is room. What it dropped is forgotten only if `told`, as the driver may
 * see it after the read looked. Intel's i915 writes into each record whose it is, and into those of one read whether the hardware
 * dropped some of this XeCore. */
static size_t empty_xecore(uint32_t g, uint32_t xecores, uint32_t xecore, char *to, size_t room, bool i915, bool told)
{
    enum { SLOTS = STANDIN_XECORE_BYTES / STANDIN_RECORD_BYTES };
    struct standin_xecore *state = &shared->streams[g].xecores[xecore];
    const char *buffer =
        (char *)shared + shared->data_offset + ((size_t)g * xecores + xecore) * STANDIN_XECORE_BYTES;
    uint64_t read = atomic_load_explicit(&state->read, memory_order_relaxed);
    uint64_t count = atomic_load_explicit(&state->visible, memory_order_acquire) - read;
    if (count > room / STANDIN_RECORD_BYTES)
        count = room / STANDIN_RECORD_BYTES;
    uint64_t slot = read % SLOTS, first = count < SLOTS - slot ? count : SLOTS - slot;
    memcpy(to, buffer + slot * STANDIN_RECORD_BYTES, first * STANDIN_RECORD_BYTES);
    memcpy(to + first * STANDIN_RECORD_BYTES, buffer, (count - first) * STANDIN_RECORD_BYTES);
    uint32_t seen = 2;
    if (!i915) {
        atomic_store_explicit(&state->read, read + count, memory_order_release);
        if (told)
            atomic_compare_exchange_strong(&state->drop, &seen, 0);
    } else if (count) {
        uint16_t said[2] = {(uint16_t)xecore, atomic_compare_exchange_strong(&state->drop, &seen, 0) ? 0x100 : 0};
        for (uint64_t i = 0; i < count; i++)
            memcpy(to + i * STANDIN_RECORD_BYTES + 48, said, sizeof(said));
        atomic_store_explicit(&state->read, read + count, memory_order_release);
    }
    return count * STANDIN_RECORD_BYTES;
}

static ssize_t read_locked(const struct stream *opened, char *to, size_t count)
{
    struct standin_stream *stream = &shared->streams[opened->gt];
    uint32_t xecores = cards[opened->card].xecores;
    bool dropped = false;
    size_t total = 0;
    if (!is_there(opened->card, opened->generation))
        return -ENODEV;
    if (stream->id != opened->id || !stream->enabled)
        return opened->i915 ? -EIO : -EINVAL;
    if (stream->reset)
        return opened->i915 ? -EAGAIN : -ENODEV; /* that driver does not tell */
    for (uint32_t x = 0; x < xecores && !opened->i915; x++)
        dropped |= stream->xecores[x].drop == 2;
    if (dropped && !stream->reported) { /* once; the next read goes on */
        stream->reported = 1;
        return -EIO;
    }
    if (dropped)
        stream->reported = 0;
    for (uint32_t x = 0; x < xecores && total < count; x++)
        total += empty_xecore(opened->gt, xecores, x, to + total, count - total, opened->i915, dropped);
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

static ssize_t stream_read(int fd, const struct stream *opened, void *buffer, size_t count)
{
    struct standin_stream *stream = &shared->streams[opened->gt];
    ssize_t result;
    if (!opened->i915)
        count -= count % STANDIN_RECORD_BYTES;
    if (!is_there(opened->card, opened->generation))
        return fail(ENODEV);
    if (opened->i915 && (stream->id != opened->id || !stream->enabled))
        return fail(EIO);
    if (count == 0 || count % STANDIN_RECORD_BYTES || stream->id != opened->id || !stream->enabled)
        return fail(EINVAL);
    if (has_fault("slow-reader", (int)opened->card, (int)(opened->gt - cards[opened->card].first))) {
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
        result = read_locked(opened, buffer, count);
        if (!stream->reset && !clear_pollin(fd) && result == -EAGAIN)
            result = -ENODEV;
        pthread_mutex_unlock(&stream->lock);
    } while (waits && result == -EAGAIN);
    return result < 0 ? fail((int)-result) : result;
}

/* ---- how busy the GPU is: the PMU, hwmon and freq0 ---- */

enum { C6_RESIDENCY = 1, ACTIVE_TICKS, TOTAL_TICKS, ACTUAL_FREQUENCY, REQUESTED_FREQUENCY }; /* xe_pmu.c */
enum { IDLE_MHZ = 400, BUSY_MHZ = 2400, REQUESTED_MHZ = 2850 };
enum { IDLE_WATTS = 20, BUSY_WATTS = 150 };     /* BUSY: more for each main GT that executes */
static const uint64_t SLOW_DOWN_NS = 5000000; /* after the last execution */

static uint64_t monotonic_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000ull + (uint64_t)t.tv_nsec;
}

/* The card's time: it stands still with the card. */
static uint64_t card_ns(uint32_t card)
{
    uint64_t frozen = shared->frozen_ns[card];
    return frozen ? frozen : monotonic_ns();
}

static void work_of(uint32_t gt, uint64_t now, uint64_t *busy_ns, bool *fast)
{
    struct standin_work *work = &shared->work[gt];
    uint32_t turn;
    uint64_t as_of, until;
    do {
        turn = work->turn;
        *busy_ns = work->busy_ns;
        as_of = work->as_of;
        until = work->until;
    } while (turn & 1 || turn != work->turn);
    uint64_t end = now < until ? now : until;
    *busy_ns += end > as_of ? end - as_of : 0;
    *fast = now < until + SLOW_DOWN_NS;
}

enum { I915_BUSY = 0x10000a }; /* ns in which any engine was busy: i915_drm_prelim.h */

/* What a counter stands at. A GT's media engines, and all its engines but the compute one, never have anything to do. */
static uint64_t counter_value(uint32_t card, uint64_t config)
{
    const struct standin_device *device = &cards[card];
    uint64_t now = card_ns(card), busy = 0;
    uint32_t main = 0, gt = config >> 60, class = config >> 20 & 0xff;
    bool fast = false;
    for (uint32_t i = 0; i < device->gts && device->gt[i].id != gt; i++)
        main += !device->gt[i].type;
    for (uint32_t i = 0; i < device->gts; i++)
        if (device->gt[i].id == gt && !device->gt[i].type)
            work_of(device->first + main, now, &busy, &fast);
    if ((config & 0xffffff) == I915_BUSY)
        return busy;
    switch (config & 0xfff) {
    case C6_RESIDENCY:
        return (now - busy) / 1000000;
    case ACTIVE_TICKS:
        return class == 4 ? (uint64_t)((unsigned __int128)busy * device->reference_clock / 1000000000) : 0;
    case TOTAL_TICKS:
        return (uint64_t)((unsigned __int128)now * device->reference_clock / 1000000000);
    case ACTUAL_FREQUENCY:
        return fast ? BUSY_MHZ : IDLE_MHZ;
    default:
        return fast ? REQUESTED_MHZ : IDLE_MHZ;
    }
}

static bool counter_exists(const struct standin_device *device, uint64_t config)
{
    unsigned gt = config >> 60, function = config >> 44 & 0xffff, class = config >> 20 & 0xff, instance = config >> 12 & 0xff;
    bool known = false;
    for (uint32_t i = 0; i < device->gts; i++)
        known |= device->gt[i].id == gt;
    if (is_i915(number_of(device)))
        return known && (config & ~(15ull << 60)) == I915_BUSY;
    switch (config & 0xfff) {
    case C6_RESIDENCY:
    case ACTUAL_FREQUENCY:
    case REQUESTED_FREQUENCY:
        return known && !class && !instance && !function;
    case ACTIVE_TICKS:
    case TOTAL_TICKS:
        return has_engine(device, gt, class, instance) && !function;
    default:
        return false;
    }
}

/* The text of a file of hwmon or freq0 as it is now; its length, or -1 if the card is gone. */
static int sensor_text(struct mark mark, char text[32])
{
    uint64_t value, busy = 0;
    bool fast = false;
    if (meet_gpu() || mark.card >= cards_known || !is_there(mark.card, mark.generation))
        return -1;
    const struct standin_device *device = &cards[mark.card];
    uint64_t now = card_ns(mark.card), wobble = now / 100000000 % 10;
    for (uint32_t i = 0; i < device->mains; i++) {
        uint64_t one;
        bool runs;
        work_of(device->first + i, now, &one, &runs);
        busy += one;
        fast |= runs;
    }
    switch (mark.kind) {
    case STANDIN_ENERGY: /* in microjoules; the package's is a part of the card's */
        value = now / 1000 * IDLE_WATTS + busy / 1000 * BUSY_WATTS;
        value = mark.number == 1 ? value : value / 10 * 7;
        break;
    case STANDIN_TEMPERATURE:
        value = 41000 + 2000 * mark.number + (fast ? 20000 : 0) + 100 * wobble;
        break;
    case STANDIN_FAN:
        value = (fast ? 1800 : 1180) + wobble;
        break;
    case STANDIN_ACTUAL:
        value = counter_value(mark.card, (uint64_t)mark.number << 60 | ACTUAL_FREQUENCY);
        break;
    default:
        value = counter_value(mark.card, (uint64_t)mark.number << 60 | REQUESTED_FREQUENCY);
    }
    return snprintf(text, 32, "%llu\n", (unsigned long long)value);
}

static ssize_t sensor_read(struct mark mark, void *buffer, size_t count, off64_t offset)
{
    char text[32];
    int length = sensor_text(mark, text);
    if (length < 0)
        return fail(ENODEV);
    if (offset >= length)
        return 0;
    size_t size = (size_t)(length - offset) < count ? (size_t)(length - offset) : count;
    memcpy(buffer, text + offset, size);
    return (ssize_t)size;
}

/* Events of this process, a descriptor each: an empty file in memory that is as long as its place here, plus one. A new one takes the
 * oldest one's place. */
static struct event {
    dev_t device;
    ino_t inode;
    uint32_t card, generation;
    uint64_t config, read_format, id;
    uint64_t count, last;                  /* last: what the counter stood at when `count` was counted */
    uint64_t enabled_ns, since;            /* how long it was enabled, and since when it has been */
    bool enabled;
    int leader, members, member[63]; /* places; the leader's members are those after it */
} events[1024];
static _Atomic uint64_t events_made;

static struct event *event_with(const struct stat *st)
{
    size_t place = (size_t)st->st_size - 1;
    if (!S_ISREG(st->st_mode) || st->st_nlink || place >= sizeof(events) / sizeof(*events) || events[place].inode != st->st_ino ||
        events[place].device != st->st_dev)
        return NULL;
    return &events[place];
}

static struct event *event_of(int fd)
{
    struct stat st;
    if (!events_made)
        return NULL;
    int error = errno;
    bool known = real_fd_stat(fd, &st) == 0;
    errno = error;
    return known ? event_with(&st) : NULL;
}

static bool counts(const struct event *event)
{
    return event->enabled && events[event->leader].enabled;
}

/* Counters only grow, also where the GPU has corrected itself since the last look. */
static void count_up(struct event *event, uint64_t now)
{
    if (!counts(event))
        return;
    uint64_t value = counter_value(event->card, event->config);
    if ((event->config & 0xffffff) != I915_BUSY && (event->config & 0xfff) >= ACTUAL_FREQUENCY) {
        event->count += value;
    } else if (value > event->last) {
        event->count += value - event->last;
        event->last = value;
    }
    event->enabled_ns += now - event->since;
    event->since = now;
}

static void restart(struct event *event, uint64_t now)
{
    event->last = counter_value(event->card, event->config);
    event->since = now;
}

static void switch_event(struct event *event, bool on)
{
    uint64_t now = monotonic_ns();
    for (int i = -1; i < event->members; i++) /* only a leader has members, and they count while it does */
        count_up(i < 0 ? event : &events[event->member[i]], now);
    event->enabled = on;
    for (int i = -1; i < event->members; i++)
        restart(i < 0 ? event : &events[event->member[i]], now);
}

static int event_ioctl(struct event *event, unsigned long request, uint64_t arg)
{
    struct event *leader = &events[event->leader];
    int members = arg & PERF_IOC_FLAG_GROUP ? leader->members : -1;
    if (request == PERF_EVENT_IOC_ID)
        return copy_out(arg, &event->id, 8) ? fail(EFAULT) : 0;
    if (request != PERF_EVENT_IOC_ENABLE && request != PERF_EVENT_IOC_DISABLE && request != PERF_EVENT_IOC_RESET)
        return fail(ENOTTY);
    for (int i = -1; i == -1 || i < members; i++) {
        struct event *each = members < 0 ? event : i < 0 ? leader : &events[leader->member[i]];
        if (request == PERF_EVENT_IOC_RESET) {
            count_up(each, monotonic_ns());
            each->count = 0;
        } else if (each->enabled != (request == PERF_EVENT_IOC_ENABLE)) {
            switch_event(each, request == PERF_EVENT_IOC_ENABLE);
        }
    }
    return 0;
}

static ssize_t event_read(struct event *event, void *buffer, size_t count)
{
    uint64_t words[4 + 3 * 64], now = monotonic_ns();
    struct event *leader = &events[event->leader];
    bool group = event->read_format & PERF_FORMAT_GROUP;
    size_t n = 0;
    if (!is_there(event->card, event->generation))
        return 0;
    for (int i = -1; i < (group ? leader->members : 0); i++) {
        struct event *each = !group ? event : i < 0 ? leader : &events[leader->member[i]];
        count_up(each, now);
        if (i < 0) {
            if (group)
                words[n++] = 1 + (uint64_t)leader->members;
            else
                words[n++] = each->count;
            if (event->read_format & PERF_FORMAT_TOTAL_TIME_ENABLED)
                words[n++] = each->enabled_ns;
            if (event->read_format & PERF_FORMAT_TOTAL_TIME_RUNNING)
                words[n++] = each->enabled_ns;
        }
        if (group)
            words[n++] = each->count;
        if (event->read_format & PERF_FORMAT_ID)
            words[n++] = each->id;
        if (event->read_format & PERF_FORMAT_LOST)
            words[n++] = 0;
    }
    if (count < 8 * n)
        return fail(ENOSPC);
    memcpy(buffer, words, 8 * n);
    return (ssize_t)(8 * n);
}

/* In the kernel's order: the attributes, the group's descriptor, the PMU's own refusals, what the group wants. */
static int open_event(uint64_t where, int pid, int cpu, int group_fd, unsigned long flags)
{
    struct perf_event_attr attr = {0};
    struct stat st;
    uint32_t head[2];
    if (flags & ~(unsigned long)(PERF_FLAG_FD_NO_GROUP | PERF_FLAG_FD_OUTPUT | PERF_FLAG_PID_CGROUP | PERF_FLAG_FD_CLOEXEC))
        return fail(EINVAL);
    if (copy_in(head, where, sizeof(head)))
        return fail(EFAULT);
    size_t size = head[1] ? head[1] : PERF_ATTR_SIZE_VER0;
    if (size < PERF_ATTR_SIZE_VER0 || size > 4096)
        return fail(E2BIG);
    if (copy_in(&attr, where, size < sizeof(attr) ? size : sizeof(attr)))
        return fail(EFAULT);
    if (attr.read_format & ~31ull)
        return fail(EINVAL);
    if (group_fd != -1 && !event_of(group_fd))
        return fail(EBADF);
    struct event *leader = group_fd == -1 || flags & PERF_FLAG_FD_NO_GROUP ? NULL : event_of(group_fd);
    if (cpu < -1 || cpu >= sysconf(_SC_NPROCESSORS_CONF))
        return fail(EINVAL);
    int error = meet_gpu();
    uint32_t card = attr.type - STANDIN_PMU_TYPE;
    if (error || card >= cards_known || !shared->plugged[card])
        return fail(ENOENT);
    if (attr.sample_period || cpu < 0)
        return fail(EINVAL);
    if (!counter_exists(&cards[card], attr.config))
        return fail(ENOENT);
    if (attr.sample_type & PERF_SAMPLE_BRANCH_STACK)
        return fail(EOPNOTSUPP);
    if (shared->frozen_ns[card] && (attr.config & 0xfff) != C6_RESIDENCY)
        return waited(ETIMEDOUT), fail(EINVAL); /* the GT cannot be kept awake */
    if (pid != -1)
        return fail(EINVAL); /* it counts for all, not for a task */
    if (leader && (leader != &events[leader->leader] || leader->card != card || attr.exclusive || attr.pinned ||
                   leader->members == (int)(sizeof(leader->member) / sizeof(*leader->member))))
        return fail(EINVAL);
    int fd = memfd_create("perf_event", flags & PERF_FLAG_FD_CLOEXEC ? MFD_CLOEXEC : 0);
    size_t place = (size_t)(events_made % (sizeof(events) / sizeof(*events)));
    if (fd < 0 || ftruncate(fd, (off_t)place + 1) || real_fd_stat(fd, &st))
        return -1;
    struct event *event = &events[place];
    *event = (struct event){.device = st.st_dev, .inode = st.st_ino, .card = card, .generation = shared->plugged[card],
                            .config = attr.config, .read_format = attr.read_format, .id = ++events_made, .enabled = !attr.disabled,
                            .leader = leader ? (int)(leader - events) : (int)place};
    if (leader)
        leader->member[leader->members++] = (int)place;
    restart(event, monotonic_ns());
    return fd;
}

/* ---- the C library's functions that are answered ---- */

/* perf_event_open has no function of its own. All arguments are words, whatever they mean. */
EXPORT long syscall(long number, ...)
{
    long a[6];
    uint32_t type = 0;
    va_list list;
    va_start(list, number);
    for (int i = 0; i < 6; i++)
        a[i] = va_arg(list, long);
    va_end(list);
    if (number == SYS_perf_event_open && root[0] && copy_in(&type, (uint64_t)a[0], sizeof(type)) == 0 &&
        type - STANDIN_PMU_TYPE < STANDIN_MAX_CARDS)
        return open_event((uint64_t)a[0], (int)a[1], (int)a[2], (int)a[3], (unsigned long)a[4]);
    REAL(syscall);
    return real_syscall(number, a[0], a[1], a[2], a[3], a[4], a[5]);
}

EXPORT int ioctl(int fd, unsigned long request, ...)
{
    va_list list;
    va_start(list, request);
    uint64_t arg = va_arg(list, uint64_t);
    va_end(list);
    REAL(ioctl);
    unsigned kind = request >> 8 & 0xff;
    if (kind != 'T') { /* FIONBIO, FIOCLEX: the kernel does these to any file */
        struct stream *stream = stream_of(fd);
        if (stream)
            return stream_ioctl(stream, request & 0xffffffff);
        struct event *event = kind == '$' ? event_of(fd) : NULL;
        if (event)
            return event_ioctl(event, request & 0xffffffff, arg);
        struct mark mark = kind == 'd' ? mark_of_fd(fd) : (struct mark){0};
        if (mark.kind == STANDIN_NODE)
            return device_ioctl(mark, request, arg);
    }
    return real_ioctl(fd, request, arg);
}

/* What the descriptor is of what this library answers reads for: one fstat, and no more for what it does not know. */
static ssize_t read_as(int fd, void *buffer, size_t count, off64_t offset, bool *ours)
{
    struct stat st;
    struct stream *stream;
    struct event *event;
    int error = errno;
    *ours = false;
    if (!root[0] || real_fd_stat(fd, &st)) {
        errno = error;
        return 0;
    }
    *ours = true;
    if ((stream = stream_with(&st)))
        return stream_read(fd, stream, buffer, count);
    if (S_ISREG(st.st_mode)) {
        struct mark mark = mark_of(st.st_mtim.tv_sec, st.st_mtim.tv_nsec);
        if (mark.kind > STANDIN_NODE) {
            ssize_t size = sensor_read(mark, buffer, count, offset >= 0 ? offset : lseek(fd, 0, SEEK_CUR));
            if (offset < 0 && size > 0)
                lseek(fd, size, SEEK_CUR);
            return size;
        }
        if ((event = event_with(&st)))
            return event_read(event, buffer, count);
    }
    *ours = false;
    return 0;
}

EXPORT ssize_t read(int fd, void *buffer, size_t count)
{
    bool ours;
    ssize_t result = read_as(fd, buffer, count, -1, &ours);
    return ours ? result : real_fd_read(fd, buffer, count);
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
    struct stream *stream = stream_of(fd);
    REAL(readv);
    if (!stream)
        return real_readv(fd, parts, count);
    for (int i = 0; i < count; i++) {
        ssize_t size = parts[i].iov_len ? stream_read(fd, stream, parts[i].iov_base, parts[i].iov_len) : 0;
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
    bool ours;
    ssize_t result = read_as(fd, buffer, count, offset < 0 ? 0 : offset, &ours);
    REAL(pread64);
    return ours ? result : real_pread64(fd, buffer, count, offset);
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
#define AS_NODE(st)                                                              \
    do {                                                                         \
        struct mark mark = mark_of((st)->st_mtim.tv_sec, (st)->st_mtim.tv_nsec); \
        if (mark.kind == STANDIN_NODE && S_ISREG((st)->st_mode)) {               \
            (st)->st_mode = S_IFCHR | ((st)->st_mode & 07777);                   \
            (st)->st_rdev = makedev(226, mark.number);                           \
            (st)->st_size = 0;                                                   \
        }                                                                        \
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
    struct mark mark = result ? (struct mark){0} : mark_of(st->stx_mtime.tv_sec, st->stx_mtime.tv_nsec);
    if (mark.kind == STANDIN_NODE && S_ISREG(st->stx_mode)) {
        st->stx_mode = (uint16_t)(S_IFCHR | (st->stx_mode & 07777));
        st->stx_rdev_major = 226;
        st->stx_rdev_minor = mark.number;
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

static bool is_node_in(DIR *dir, const char *name)
{
    struct stat st;
    int error = errno;
    REAL(fstatat);
    bool known = (!strncmp(name, "card", 4) || !strncmp(name, "renderD", 7)) &&
                 real_fstatat(dirfd(dir), name, &st, AT_SYMLINK_NOFOLLOW) == 0 && S_ISREG(st.st_mode);
    errno = error;
    return known && mark_of(st.st_mtim.tv_sec, st.st_mtim.tv_nsec).kind == STANDIN_NODE;
}

#define READDIR(name, type)                                                     \
    EXPORT struct type *name(DIR *dir)                                          \
    {                                                                           \
        REAL(name);                                                             \
        struct type *entry = real_##name(dir);                                  \
        if (entry && entry->d_type == DT_REG && is_node_in(dir, entry->d_name)) \
            entry->d_type = DT_CHR;                                             \
        return entry;                                                           \
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
