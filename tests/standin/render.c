/* SPDX-License-Identifier: Apache-2.0
 *
 * Preloaded into a Vulkan program: render nodes under the xe driver that are not there, so that Mesa's anv creates devices, compiles,
 * records and submits on a machine without a GPU. Nothing is computed; whatever is submitted is complete at once.
 *
 *   STANDIN_RENDER    PCI ids of the devices in hexadecimal, joined with ',': e20b is Battlemage, 64a0 Lunar Lake,
 *                     b080 Panther Lake; all of these by default
 *   STANDIN_WALKERS   a file to which a line is appended for each COMPUTE_WALKER in a submitted batch:
 *                     "PID KERNEL SIMD X Y Z", with the kernel's offset from the instruction base, in hexadecimal, the SIMD width,
 *                     and the numbers of thread groups. That is the truth about what was submitted.
 *   STANDIN_DRAWS     a file to which a line is appended for each 3DPRIMITIVE and 3DMESH_3D: "PID VERTICES VS HS DS GS PS TS MS",
 *                     with the numbers of vertices, or of groups, and the offsets of the kernels that are on, or '-'. Mesa itself draws to clear and to copy
 *   STANDIN_DIR       the folder of the stand-in's GPU (gpu.c), which then executes each of these kernels, and stalls in it. In its
 *                     ledger the stack of a launch is "dispatch_X", with the number of thread groups,
 *                     or "draw_X", with that of vertices
 *
 * How: the node that a program opens is a sparse memfd. A buffer object is a range of it, and its mmap offset is the range's start,
 * so mmap() needs no interception and /proc/PID/maps shows which object is mapped where, as with the real driver. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <drm/drm.h>
#include <drm/xe_drm.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/dma-buf.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/sysmacros.h>
#include <time.h>
#include <unistd.h>

#include "../driver/gpu.h"

enum { FIRST_NODE = 128, MAX_DEVICES = 8, CARD = -2, OTHER_FILE = -1 };
enum { MAX_FDS = 4096, MAX_OBJECTS = 1 << 16, MAX_SYNCS = 1 << 16 };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static uint8_t node_of[MAX_FDS]; /* 1 + the number of the device; 0 for other files */
static uint64_t object_size[MAX_OBJECTS], object_offset[MAX_OBJECTS];
static uint64_t sync_point[MAX_SYNCS]; /* the latest point that was signalled */
static uint32_t next_object = 1, next_sync = 1, next_id = 1;
static uint64_t next_offset = 1 << 20;
static int shared_memory = -1;

/* ---- The devices ---- */

static uint16_t ids[MAX_DEVICES];
static int devices;
static FILE *walkers, *draws;

static FILE *open_ledger(const char *variable)
{
    const char *path = getenv(variable);
    FILE *file = path ? fopen(path, "ae") : NULL;
    if (file)
        setvbuf(file, NULL, _IOLBF, 0);
    return file;
}

/* At the start of the process: it may give up the right to make large files before it opens a node. */
__attribute__((constructor)) static void begin(void)
{
    const char *list = getenv("STANDIN_RENDER");
    char *end = (char *)(list ? list : "e20b,64a0,b080");
    for (; *end && devices < MAX_DEVICES; end += *end == ',')
        ids[devices++] = (uint16_t)strtoul(end, &end, 16);
    shared_memory = memfd_create("renderD128", MFD_CLOEXEC);
    if (shared_memory < 0 || ftruncate(shared_memory, 1ll << 42))
        perror("the stand-in's render nodes");
    walkers = open_ledger("STANDIN_WALKERS");
    draws = open_ledger("STANDIN_DRAWS");
}
static bool integrated(uint16_t id) { return id >> 8 == 0x64 || id >> 8 == 0xb0; }
static int ip_major(uint16_t id) { return id >> 8 == 0xb0 ? 30 : 20; }
static int ip_minor(uint16_t id) { return id >> 8 == 0xb0 ? 0 : id >> 8 == 0x64 ? 4 : 1; }

/* ---- The node ---- */

static int open_node(int device, int flags)
{
    int fd = fcntl(shared_memory, flags & O_CLOEXEC ? F_DUPFD_CLOEXEC : F_DUPFD, 3);
    if (fd >= 0 && fd < MAX_FDS)
        node_of[fd] = (uint8_t)(device + 1);
    return fd;
}

/* Returns the number of the device whose render node this is, CARD for its other node, or OTHER_FILE. */
static int device_at(const char *path)
{
    int number = -1, length = 0;
    if (sscanf(path, "/dev/dri/renderD%d%n", &number, &length) == 1 && !path[length] && number >= FIRST_NODE && number < FIRST_NODE + devices)
        return number - FIRST_NODE;
    if (sscanf(path, "/dev/dri/card%d%n", &number, &length) == 1 && !path[length] && number >= 0 && number < devices)
        return CARD;
    return OTHER_FILE;
}

int open(const char *path, int flags, ...)
{
    va_list list;
    va_start(list, flags);
    mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(list, mode_t) : 0;
    va_end(list);
    int device = device_at(path);
    if (device == CARD) { /* no display */
        errno = EACCES;
        return -1;
    }
    return device >= 0 ? open_node(device, flags) : (int)syscall(SYS_openat, AT_FDCWD, path, flags, mode);
}
int open64(const char *path, int flags, ...) __attribute__((alias("open")));
int __open_2(const char *path, int flags) { return open(path, flags); }
int __open64_2(const char *path, int flags) { return open(path, flags); }

int close(int fd)
{
    if (fd >= 0 && fd < MAX_FDS)
        node_of[fd] = 0;
    return (int)syscall(SYS_close, fd);
}

int fcntl(int fd, int command, ...)
{
    va_list list;
    va_start(list, command);
    long argument = va_arg(list, long);
    va_end(list);
    int result = (int)syscall(SYS_fcntl, fd, command, argument);
    if ((command == F_DUPFD || command == F_DUPFD_CLOEXEC) && result >= 0 && result < MAX_FDS && fd >= 0 && fd < MAX_FDS)
        node_of[result] = node_of[fd];
    return result;
}
int fcntl64(int fd, int command, ...) __attribute__((alias("fcntl")));

static void node_stat(struct stat *st, unsigned minor)
{
    memset(st, 0, sizeof(*st));
    st->st_mode = S_IFCHR | 0660;
    st->st_rdev = makedev(226, minor);
    st->st_nlink = 1;
}
int stat(const char *path, struct stat *st)
{
    int device = device_at(path);
    if (device == OTHER_FILE)
        return (int)syscall(SYS_newfstatat, AT_FDCWD, path, st, 0);
    node_stat(st, device == CARD ? (unsigned)atoi(path + strlen("/dev/dri/card")) : (unsigned)(FIRST_NODE + device));
    return 0;
}
int stat64(const char *path, struct stat64 *st) { return stat(path, (struct stat *)st); }
int fstat(int fd, struct stat *st)
{
    if (fd < 0 || fd >= MAX_FDS || !node_of[fd])
        return (int)syscall(SYS_fstat, fd, st);
    node_stat(st, FIRST_NODE + node_of[fd] - 1u);
    return 0;
}
int fstat64(int fd, struct stat64 *st) { return fstat(fd, (struct stat *)st); }

/* ---- libdrm: which devices there are ---- */

typedef struct { uint16_t domain; uint8_t bus, dev, func; } pci_bus;
typedef struct { uint16_t vendor_id, device_id, subvendor_id, subdevice_id; uint8_t revision_id; } pci_device;
typedef struct {
    char **nodes;
    int available_nodes, bustype;
    pci_bus *businfo;
    pci_device *deviceinfo;
} drm_device;

static drm_device *make_device(int number)
{
    drm_device *device = calloc(1, sizeof(*device));
    device->nodes = calloc(3, sizeof(char *));
    if (asprintf(&device->nodes[0], "/dev/dri/card%d", number) < 0 || asprintf(&device->nodes[2], "/dev/dri/renderD%d", FIRST_NODE + number) < 0)
        abort();
    device->available_nodes = 1 << 0 | 1 << 2;
    device->businfo = calloc(1, sizeof(pci_bus));
    device->businfo->bus = (uint8_t)(3 + number);
    device->deviceinfo = calloc(1, sizeof(pci_device));
    *device->deviceinfo = (pci_device){0x8086, ids[number], 0x8086, 0x1100, 0};
    return device;
}
int drmGetDevices2(uint32_t flags, drm_device **found, int max)
{
    (void)flags;
    for (int number = 0; found && number < max && number < devices; number++)
        found[number] = make_device(number);
    return devices;
}
int drmGetDevices(drm_device **found, int max) { return drmGetDevices2(0, found, max); }
int drmGetDevice2(int fd, uint32_t flags, drm_device **device)
{
    (void)flags;
    *device = make_device(fd >= 0 && fd < MAX_FDS && node_of[fd] ? node_of[fd] - 1 : 0);
    return 0;
}
int drmGetDevice(int fd, drm_device **device) { return drmGetDevice2(fd, 0, device); }
int drmGetDeviceFromDevId(dev_t id, uint32_t flags, drm_device **device)
{
    (void)flags;
    int number = (int)minor(id) % FIRST_NODE;
    *device = make_device(number < devices ? number : 0);
    return 0;
}
void drmFreeDevice(drm_device **device) { *device = NULL; }
void drmFreeDevices(drm_device **found, int count)
{
    for (int i = 0; i < count; i++)
        found[i] = NULL;
}

/* ---- What the device answers ---- */

static int answer(struct drm_xe_device_query *query, const void *data, uint32_t size)
{
    if (query->size == 0) {
        query->size = size;
        return 0;
    }
    if (query->size != size)
        return -EINVAL;
    memcpy((void *)(uintptr_t)query->data, data, size);
    return 0;
}

static int query_device(uint16_t id, struct drm_xe_device_query *query)
{
    static const uint64_t giga = 1ull << 30;
    switch (query->query) {
    case DRM_XE_DEVICE_QUERY_ENGINES: {
        struct {
            uint32_t count, pad;
            struct drm_xe_engine engine[3];
        } engines = {.count = 3};
        engines.engine[0].instance.engine_class = DRM_XE_ENGINE_CLASS_RENDER;
        engines.engine[1].instance.engine_class = DRM_XE_ENGINE_CLASS_COMPUTE;
        engines.engine[2].instance.engine_class = DRM_XE_ENGINE_CLASS_COPY;
        return answer(query, &engines, sizeof(engines));
    }
    case DRM_XE_DEVICE_QUERY_MEM_REGIONS: {
        struct {
            uint32_t count, pad;
            struct drm_xe_mem_region region[2];
        } regions = {.count = integrated(id) ? 1 : 2};
        regions.region[0] = (struct drm_xe_mem_region){.mem_class = DRM_XE_MEM_REGION_CLASS_SYSMEM, .min_page_size = 4096, .total_size = 16 * giga};
        regions.region[1] = (struct drm_xe_mem_region){
            .mem_class = DRM_XE_MEM_REGION_CLASS_VRAM, .instance = 1, .min_page_size = 65536, .total_size = 12 * giga, .cpu_visible_size = 12 * giga};
        return answer(query, &regions, (uint32_t)(8 + regions.count * sizeof(regions.region[0])));
    }
    case DRM_XE_DEVICE_QUERY_CONFIG: {
        struct {
            uint32_t count, pad;
            uint64_t info[5];
        } config = {.count = 5};
        config.info[DRM_XE_QUERY_CONFIG_REV_AND_DEVICE_ID] = id;
        config.info[DRM_XE_QUERY_CONFIG_FLAGS] = integrated(id) ? 0 : DRM_XE_QUERY_CONFIG_FLAG_HAS_VRAM;
        config.info[DRM_XE_QUERY_CONFIG_MIN_ALIGNMENT] = integrated(id) ? 4096 : 65536;
        config.info[DRM_XE_QUERY_CONFIG_VA_BITS] = 48;
        config.info[DRM_XE_QUERY_CONFIG_MAX_EXEC_QUEUE_PRIORITY] = 1;
        return answer(query, &config, sizeof(config));
    }
    case DRM_XE_DEVICE_QUERY_GT_LIST: {
        struct {
            uint32_t count, pad;
            struct drm_xe_gt gt[1];
        } gts = {.count = 1};
        gts.gt[0] = (struct drm_xe_gt){.type = DRM_XE_QUERY_GT_TYPE_MAIN,
                                       .reference_clock = 19200000,
                                       .near_mem_regions = integrated(id) ? 1 : 2,
                                       .far_mem_regions = integrated(id) ? 0 : 1,
                                       .ip_ver_major = (uint16_t)ip_major(id),
                                       .ip_ver_minor = (uint16_t)ip_minor(id)};
        return answer(query, &gts, sizeof(gts));
    }
    case DRM_XE_DEVICE_QUERY_GT_TOPOLOGY: { /* four masks of eight bytes: 20 XeCores (or 8) of eight XVEs */
        uint64_t xecores = integrated(id) ? 0xff : 0xfffff;
        struct {
            uint16_t gt, type;
            uint32_t bytes;
            uint64_t mask;
        } __attribute__((packed)) masks[] = {{0, DRM_XE_TOPO_DSS_GEOMETRY, 8, xecores},
                                             {0, DRM_XE_TOPO_DSS_COMPUTE, 8, xecores},
                                             {0, DRM_XE_TOPO_L3_BANK, 8, 0xff},
                                             {0, DRM_XE_TOPO_SIMD16_EU_PER_DSS, 8, 0xff}};
        return answer(query, masks, sizeof(masks));
    }
    case DRM_XE_DEVICE_QUERY_HWCONFIG: { /* key, number of values, values. Mesa 26 refuses a device without; the figures matter little */
        static const uint32_t table[] = {1,  1, 8,    2,  1, 32,   3,  1, 8,    15, 1, 8,    16, 1, 1024, 17, 1, 1024, 18, 1, 1024, 19, 1, 1024,
                                         21, 1, 1024, 23, 1, 1,    24, 1, 1,    29, 1, 64,   30, 1, 4608, 33, 1, 32,   34, 1, 1548, 35, 1, 2,
                                         36, 1, 2384, 37, 1, 34,   38, 1, 3176, 64, 1, 512,  65, 1, 128,  70, 1, 32,   71, 1, 8};
        return answer(query, table, sizeof(table));
    }
    case DRM_XE_DEVICE_QUERY_ENGINE_CYCLES: {
        struct drm_xe_query_engine_cycles *cycles = (void *)(uintptr_t)query->data;
        if (query->size == 0) {
            query->size = sizeof(*cycles);
            return 0;
        }
        struct timespec now;
        clock_gettime(cycles->clockid, &now);
        cycles->cpu_timestamp = (uint64_t)now.tv_sec * 1000000000 + (uint64_t)now.tv_nsec;
        cycles->cpu_delta = 100;
        cycles->width = 36;
        cycles->engine_cycles = (uint64_t)((__uint128_t)cycles->cpu_timestamp * 19200000 / 1000000000) & ((1ull << 36) - 1);
        return 0;
    }
    default:
        return -EINVAL;
    }
}

static void signal_syncs(uint64_t address, uint32_t count)
{
    struct drm_xe_sync *syncs = (void *)(uintptr_t)address;
    for (uint32_t i = 0; i < count; i++) {
        if (!(syncs[i].flags & DRM_XE_SYNC_FLAG_SIGNAL))
            continue;
        if (syncs[i].type == DRM_XE_SYNC_TYPE_USER_FENCE)
            *(uint64_t *)(uintptr_t)syncs[i].addr = syncs[i].timeline_value;
        else if (syncs[i].handle < MAX_SYNCS) {
            uint64_t point = syncs[i].type == DRM_XE_SYNC_TYPE_TIMELINE_SYNCOBJ ? syncs[i].timeline_value : 1;
            if (sync_point[syncs[i].handle] < point)
                sync_point[syncs[i].handle] = point;
        }
    }
}

/* ---- What is submitted: the batch is walked as the hardware would ---- */

enum { MAX_BINDS = 1 << 14, MAX_QUEUES = 1 << 12 };
static struct {
    uint32_t vm;
    uint64_t address, range, file;
} bindings[MAX_BINDS];
static uint32_t bound;
static uint32_t vm_of[MAX_QUEUES]; /* by queue */
static uint32_t vm;                /* that of the batch which is walked */

/* Returns where some bytes of the GPU's memory are in the file; -1 if nothing is bound there. */
static off_t place(uint64_t address, size_t size)
{
    address &= (1ull << 48) - 1; /* some come sign-extended */
    for (uint32_t i = 0; i < bound; i++)
        if (bindings[i].vm == vm && address >= bindings[i].address && address + size <= bindings[i].address + bindings[i].range)
            return (off_t)(bindings[i].file + address - bindings[i].address);
    return -1;
}
static bool read_gpu(uint64_t address, void *into, size_t size)
{
    off_t at = place(address, size);
    return at >= 0 && pread(shared_memory, into, size, at) == (ssize_t)size;
}
static bool write_gpu(uint64_t address, const void *from, size_t size)
{
    off_t at = place(address, size);
    return at >= 0 && pwrite(shared_memory, from, size, at) == (ssize_t)size;
}

enum { CODE = 1 << 17, MAX_KERNELS = 1 << 12 };
enum { COMPUTE_WALKER = 0x7208, WALKER_WORDS = 40, STATE_BASE_ADDRESS = 0x6101 };
enum { INDIRECT_DISPATCH = 0x7c01, INDIRECT_WORDS = 45, BODY = 5 }; /* EXECUTE_INDIRECT_DISPATCH: a walker's words are 5 further on */
static uint64_t instruction_base;
static struct {
    uint64_t address, checksum;
} placed[MAX_KERNELS]; /* those that the GPU of this process knows */
static int placed_count;
static pid_t connected;

/* Returns the bytes of a kernel to the end of its thread's last instruction, as in Intel's manual: send or sendc with EOT. */
static size_t kernel_size(const uint8_t *code)
{
    for (size_t at = 0; at + 16 <= CODE;) {
        uint64_t word;
        memcpy(&word, code + at, sizeof word);
        size_t bytes = word >> 29 & 1 ? 8 : 16;
        at += bytes;
        if (bytes == 16 && ((word & 0x7f) == 0x31 || (word & 0x7f) == 0x32) && word >> 34 & 1)
            return at;
    }
    return 0;
}

/* `what` and `many` say of the launch by which function of the program it may be. */
static void execute(uint32_t kernel, const char *what, uint32_t many)
{
    static uint8_t code[CODE];
    char text[32];
    if (!getenv("STANDIN_DIR"))
        return;
    if (connected != getpid()) {
        connected = getpid();
        placed_count = 0;
        gpu_connect();
    }
    uint64_t address = instruction_base + kernel;
    memset(code, 0, sizeof code);
    for (size_t at = 0; at < CODE && read_gpu(address + at, code + at, 4096); at += 4096)
        ;
    size_t size = kernel_size(code);
    uint64_t checksum = size;
    for (size_t at = 0; at < size; at++)
        checksum = checksum * 0x100000001b3 ^ code[at];
    int index = 0;
    while (index < placed_count && placed[index].address != address)
        index++;
    if (!size || index == MAX_KERNELS)
        return;
    if (index == placed_count || placed[index].checksum != checksum) { /* another shader may have been there */
        placed[index].address = address;
        placed[index].checksum = checksum;
        placed_count += index == placed_count;
        snprintf(text, sizeof text, "%x", kernel);
        gpu_kernel(text, address, code, size);
    }
    snprintf(text, sizeof text, "%s_%u", what, many);
    gpu_launch(address, text);
}

/* `words` are those of a COMPUTE_WALKER, `groups` how many groups of threads it starts in each dimension. */
static void walker(const uint32_t *words, const uint32_t *groups)
{
    static const unsigned widths[] = {8, 16, 32, 0};
    uint32_t kernel = words[19] & ~63u;
    if (walkers)
        fprintf(walkers, "%d %x %u %u %u %u\n", getpid(), kernel, widths[words[4] >> 30], groups[0], groups[1], groups[2]);
    execute(kernel, "dispatch", groups[0]);
}

/* Which kernels draw: the commands that say so stay in force. The words of each command are those of Xe2's and Xe3's. */
enum { VS, HS, DS, GS, PS, TS, MS, STAGES, PS_EXTRA, TS_ON, MS_ON, MOST_STAGES };
static const struct {
    uint32_t command, length, start, on, bit; /* words: where the kernel begins, and where it is said to be on */
} stages[] = {[VS] = {0x7810, 9, 1, 7, 0},  [HS] = {0x781b, 8, 3, 2, 31}, [DS] = {0x781d, 11, 1, 7, 0},
              [GS] = {0x7811, 10, 1, 7, 0}, [PS] = {0x7820, 12, 1, 0, 0}, [PS_EXTRA] = {0x784f, 2, 0, 1, 31},
              [TS] = {0x787d, 7, 1, 0, 0},  [MS] = {0x787a, 8, 1, 0, 0},  [TS_ON] = {0x787c, 3, 0, 1, 31}, [MS_ON] = {0x7877, 3, 0, 1, 31}};
enum { PRIMITIVE = 0x7b00, PRIMITIVE_WORDS = 10, MESH_PRIMITIVE = 0x7b02, INDIRECT = 1 << 10, INDIRECT_DRAW = 0x7c00 };
static uint32_t kernels[STAGES];
static bool on[STAGES];

static void set_stage(unsigned stage, const uint32_t *words)
{
    static bool valid, dispatched;
    bool is_on = words[stages[stage].on] >> stages[stage].bit & 1;
    if (stage < STAGES)
        kernels[stage] = words[stages[stage].start] & ~63u;
    if (stage == PS) { /* it has two kernels; the lowest bit says whether one is on */
        dispatched = (words[1] | words[8]) & 1;
        kernels[PS] = (words[1] & 1 ? words[1] : words[8]) & ~63u;
    } else if (stage == PS_EXTRA)
        valid = is_on;
    else if (stage >= TS_ON)
        on[stage == TS_ON ? TS : MS] = is_on;
    else if (stage < TS)
        on[stage] = is_on;
    on[PS] = valid && dispatched;
}

static void primitive(uint32_t vertices)
{
    if (draws)
        fprintf(draws, "%d %u", getpid(), vertices);
    for (unsigned stage = 0; stage < STAGES; stage++) {
        if (draws && on[stage])
            fprintf(draws, " %x", kernels[stage]);
        else if (draws)
            fprintf(draws, " -");
        if (on[stage])
            execute(kernels[stage], "draw", vertices);
    }
    if (draws)
        fprintf(draws, "\n");
}

/* MI_STORE_DATA_IMM: that is how secondary command buffers get the address to which they return. */
static void store(const uint32_t *words, uint32_t length)
{
    if (length > 3)
        write_gpu(words[1] | (uint64_t)words[2] << 32, words + 3, (length - 3) * 4);
}

static void walk_batch(uint64_t address)
{
    for (int steps = 0; steps < 1 << 20; steps++) {
        uint32_t words[INDIRECT_WORDS] = {0}, groups[3];
        if (!read_gpu(address, words, 4)) {
            fprintf(stderr, "stand-in: cannot read the batch at 0x%llx\n", (unsigned long long)address);
            return;
        }
        uint32_t type = words[0] >> 29, length = (words[0] & 0xff) + 2;
        if (type == 0) {
            uint32_t opcode = words[0] >> 23 & 0x3f;
            if (opcode == 0x0a) /* MI_BATCH_BUFFER_END */
                return;
            if (opcode < 0x10)
                length = 1;
            if (opcode == 0x20 && length <= INDIRECT_WORDS && read_gpu(address, words, length * 4))
                store(words, length);
            if (opcode == 0x31) { /* MI_BATCH_BUFFER_START */
                if (!read_gpu(address, words, 12))
                    return;
                if (words[0] & 1 << 22) { /* second level: goes on behind */
                    walk_batch(words[1] | (uint64_t)words[2] << 32);
                    address += 12;
                    continue;
                }
                address = words[1] | (uint64_t)words[2] << 32;
                continue;
            }
        } else if (type == 3) {
            if ((words[0] >> 27 & 3) == 1 && (words[0] >> 24 & 7) <= 1)
                length = words[0] >> 16 == STATE_BASE_ADDRESS ? length : 1; /* PIPELINE_SELECT and the like */
            uint32_t command = words[0] >> 16;
            if (command == STATE_BASE_ADDRESS && length >= 12 && read_gpu(address, words, 48) && words[10] & 1)
                instruction_base = (words[10] & ~0xfffu) | (uint64_t)words[11] << 32;
            for (unsigned stage = 0; stage < MOST_STAGES; stage++)
                if (stage != STAGES && command == stages[stage].command && read_gpu(address, words, stages[stage].length * 4))
                    set_stage(stage, words);
            if (command == PRIMITIVE && read_gpu(address, words, 12))
                primitive(words[2]);
            if (command == MESH_PRIMITIVE && read_gpu(address, words, 16))
                primitive(words[0] & INDIRECT ? 0 : words[1] * words[2] * words[3]);
            if (command == INDIRECT_DRAW) /* EXECUTE_INDIRECT_DRAW, of either kind: its arguments, of one draw, are in memory */
                primitive(0);
            if (command == COMPUTE_WALKER && length == WALKER_WORDS && read_gpu(address, words, length * 4))
                walker(words, words + 7);
            if (command == INDIRECT_DISPATCH && length == INDIRECT_WORDS && read_gpu(address, words, length * 4) &&
                read_gpu(words[4] | (uint64_t)words[5] << 32, groups, sizeof groups))
                walker(words + BODY, groups);
        }
        address += length * 4ull;
    }
}

static void add_binding(uint32_t into, uint64_t address, uint64_t end, uint64_t file)
{
    if (address >= end)
        return;
    if (bound == MAX_BINDS) {
        fprintf(stderr, "stand-in: too many bindings\n");
        abort();
    }
    bindings[bound].vm = into;
    bindings[bound].address = address;
    bindings[bound].range = end - address;
    bindings[bound++].file = file;
}

static void bind_one(uint32_t into, const struct drm_xe_vm_bind_op *op)
{
    uint64_t start = op->addr & ((1ull << 48) - 1), end = start + op->range;
    for (uint32_t i = 0; i < bound;) { /* what is bound or unbound now takes the place of what lay there, or of a part of it */
        uint64_t address = bindings[i].address, last = address + bindings[i].range, file = bindings[i].file;
        if (bindings[i].vm != into || address >= end || last <= start) {
            i++;
            continue;
        }
        bindings[i] = bindings[--bound];
        add_binding(into, address, start, file);
        add_binding(into, end, last, file + (end - address));
    }
    if (op->op == DRM_XE_VM_BIND_OP_MAP && op->obj && op->obj < MAX_OBJECTS)
        add_binding(into, start, end, object_offset[op->obj] + op->obj_offset);
}

static int xe_ioctl(uint16_t id, unsigned long request, void *data)
{
    switch (_IOC_NR(request)) {
    case _IOC_NR(DRM_IOCTL_VERSION): {
        struct drm_version *version = data;
        static const char name[] = "xe", date[] = "20240101", text[] = "stand-in";
        if (version->name && version->name_len >= 2)
            memcpy(version->name, name, 2);
        if (version->date && version->date_len >= 8)
            memcpy(version->date, date, 8);
        if (version->desc && version->desc_len >= 8)
            memcpy(version->desc, text, 8);
        version->version_major = 1;
        version->version_minor = 1;
        version->name_len = 2;
        version->date_len = version->desc_len = 8;
        return 0;
    }
    case _IOC_NR(DRM_IOCTL_GET_CAP): {
        struct drm_get_cap *cap = data;
        cap->value = cap->capability == DRM_CAP_SYNCOBJ || cap->capability == DRM_CAP_SYNCOBJ_TIMELINE || cap->capability == DRM_CAP_PRIME ? 1 : 0;
        if (cap->capability == DRM_CAP_PRIME)
            cap->value = 3;
        return 0;
    }
    case _IOC_NR(DRM_IOCTL_SYNCOBJ_CREATE): {
        struct drm_syncobj_create *create = data;
        create->handle = next_sync++ % MAX_SYNCS;
        sync_point[create->handle] = create->flags & DRM_SYNCOBJ_CREATE_SIGNALED ? 1 : 0;
        return 0;
    }
    case _IOC_NR(DRM_IOCTL_SYNCOBJ_WAIT): {
        struct drm_syncobj_wait *wait = data;
        uint32_t *handles = (void *)(uintptr_t)wait->handles;
        uint32_t signalled = 0;
        for (uint32_t i = 0; i < wait->count_handles; i++)
            if (sync_point[handles[i] % MAX_SYNCS]) {
                signalled++;
                wait->first_signaled = i;
            }
        return signalled == wait->count_handles || (signalled && !(wait->flags & DRM_SYNCOBJ_WAIT_FLAGS_WAIT_ALL)) ? 0 : -ETIME;
    }
    case _IOC_NR(DRM_IOCTL_SYNCOBJ_TIMELINE_WAIT): {
        struct drm_syncobj_timeline_wait *wait = data;
        uint32_t *handles = (void *)(uintptr_t)wait->handles;
        uint64_t *points = (void *)(uintptr_t)wait->points;
        uint32_t signalled = 0;
        for (uint32_t i = 0; i < wait->count_handles; i++)
            if (sync_point[handles[i] % MAX_SYNCS] >= points[i]) {
                signalled++;
                wait->first_signaled = i;
            }
        return signalled == wait->count_handles || (signalled && !(wait->flags & DRM_SYNCOBJ_WAIT_FLAGS_WAIT_ALL)) ? 0 : -ETIME;
    }
    case _IOC_NR(DRM_IOCTL_SYNCOBJ_RESET):
    case _IOC_NR(DRM_IOCTL_SYNCOBJ_SIGNAL): {
        struct drm_syncobj_array *array = data;
        uint32_t *handles = (void *)(uintptr_t)array->handles;
        for (uint32_t i = 0; i < array->count_handles; i++)
            sync_point[handles[i] % MAX_SYNCS] = _IOC_NR(request) == _IOC_NR(DRM_IOCTL_SYNCOBJ_SIGNAL);
        return 0;
    }
    case _IOC_NR(DRM_IOCTL_SYNCOBJ_TIMELINE_SIGNAL):
    case _IOC_NR(DRM_IOCTL_SYNCOBJ_QUERY): {
        struct drm_syncobj_timeline_array *array = data;
        uint32_t *handles = (void *)(uintptr_t)array->handles;
        uint64_t *points = (void *)(uintptr_t)array->points;
        for (uint32_t i = 0; i < array->count_handles; i++)
            if (_IOC_NR(request) == _IOC_NR(DRM_IOCTL_SYNCOBJ_QUERY))
                points[i] = sync_point[handles[i] % MAX_SYNCS];
            else
                sync_point[handles[i] % MAX_SYNCS] = points[i];
        return 0;
    }
    case _IOC_NR(DRM_IOCTL_SYNCOBJ_TRANSFER): {
        struct drm_syncobj_transfer *transfer = data;
        sync_point[transfer->dst_handle % MAX_SYNCS] = transfer->dst_point ? transfer->dst_point : 1;
        return 0;
    }
    case _IOC_NR(DRM_IOCTL_PRIME_HANDLE_TO_FD): { /* headless swapchains export their images; nobody looks into them */
        struct drm_prime_handle *prime = data;
        prime->fd = memfd_create("dmabuf", MFD_CLOEXEC);
        return prime->fd < 0 || ftruncate(prime->fd, (off_t)object_size[prime->handle % MAX_OBJECTS]) ? -ENOMEM : 0;
    }
    case _IOC_NR(DRM_IOCTL_SYNCOBJ_HANDLE_TO_FD): {
        struct drm_syncobj_handle *handle = data;
        handle->fd = memfd_create("sync", MFD_CLOEXEC);
        return handle->fd < 0 ? -ENOMEM : 0;
    }
    case _IOC_NR(DRM_IOCTL_SYNCOBJ_FD_TO_HANDLE): {
        struct drm_syncobj_handle *handle = data;
        if (!(handle->flags & DRM_SYNCOBJ_FD_TO_HANDLE_FLAGS_IMPORT_SYNC_FILE))
            handle->handle = next_sync++ % MAX_SYNCS;
        sync_point[handle->handle % MAX_SYNCS] = 1;
        return 0;
    }
    case _IOC_NR(DRM_IOCTL_SYNCOBJ_DESTROY):
    case _IOC_NR(DRM_IOCTL_GEM_CLOSE):
        return 0;
    case DRM_COMMAND_BASE + DRM_XE_DEVICE_QUERY:
        return query_device(id, data);
    case DRM_COMMAND_BASE + DRM_XE_GEM_CREATE: {
        struct drm_xe_gem_create *create = data;
        if (next_object == MAX_OBJECTS)
            return -ENOMEM;
        create->handle = next_object++;
        object_size[create->handle] = create->size;
        object_offset[create->handle] = next_offset;
        next_offset += (create->size + 0xffff) & ~0xffffull;
        return 0;
    }
    case DRM_COMMAND_BASE + DRM_XE_GEM_MMAP_OFFSET: {
        struct drm_xe_gem_mmap_offset *map = data;
        map->offset = object_offset[map->handle % MAX_OBJECTS];
        return 0;
    }
    case DRM_COMMAND_BASE + DRM_XE_VM_CREATE:
        ((struct drm_xe_vm_create *)data)->vm_id = next_id++;
        return 0;
    case DRM_COMMAND_BASE + DRM_XE_VM_BIND: {
        struct drm_xe_vm_bind *bind = data;
        if (bind->num_binds == 1)
            bind_one(bind->vm_id, &bind->bind);
        else
            for (uint32_t i = 0; i < bind->num_binds; i++)
                bind_one(bind->vm_id, (struct drm_xe_vm_bind_op *)(uintptr_t)bind->vector_of_binds + i);
        signal_syncs(bind->syncs, bind->num_syncs);
        return 0;
    }
    case DRM_COMMAND_BASE + DRM_XE_EXEC_QUEUE_CREATE:
        ((struct drm_xe_exec_queue_create *)data)->exec_queue_id = next_id;
        vm_of[next_id++ % MAX_QUEUES] = ((struct drm_xe_exec_queue_create *)data)->vm_id;
        return 0;
    case DRM_COMMAND_BASE + DRM_XE_EXEC_QUEUE_GET_PROPERTY:
        ((struct drm_xe_exec_queue_get_property *)data)->value = 0;
        return 0;
    case DRM_COMMAND_BASE + DRM_XE_VM_DESTROY:
    case DRM_COMMAND_BASE + DRM_XE_EXEC_QUEUE_DESTROY:
        return 0;
    case DRM_COMMAND_BASE + DRM_XE_EXEC: {
        struct drm_xe_exec *exec = data;
        vm = vm_of[exec->exec_queue_id % MAX_QUEUES];
        if (exec->num_batch_buffer == 1)
            walk_batch(exec->address);
        if (connected == getpid()) /* what is submitted is complete at once, also on that GPU */
            gpu_wait();
        signal_syncs(exec->syncs, exec->num_syncs);
        return 0;
    }
    default:
        return -EINVAL;
    }
}

int ioctl(int fd, unsigned long request, ...)
{
    va_list list;
    va_start(list, request);
    void *data = va_arg(list, void *);
    va_end(list);
    if (request == DMA_BUF_IOCTL_EXPORT_SYNC_FILE) { /* of a swapchain's image: nothing is to be waited for */
        ((struct dma_buf_export_sync_file *)data)->fd = memfd_create("sync", MFD_CLOEXEC);
        return 0;
    }
    if (request == DMA_BUF_IOCTL_IMPORT_SYNC_FILE)
        return 0;
    if (fd < 0 || fd >= MAX_FDS || !node_of[fd])
        return (int)syscall(SYS_ioctl, fd, request, data);
    pthread_mutex_lock(&lock);
    int result = xe_ioctl(ids[node_of[fd] - 1], request, data);
    pthread_mutex_unlock(&lock);
    if (result < 0) {
        errno = -result;
        return -1;
    }
    return result;
}
