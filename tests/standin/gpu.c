/* SPDX-License-Identifier: Apache-2.0
 *
 * standin-gpu DIR [options]: the GPU of the stand-in, a process of its own on the wall clock (CLOCK_MONOTONIC).
 *
 * Runtimes (ze.c) tell it of kernels and launches, the driver (xe.c) opens a stream and reads what it samples. While a launch
 * executes and a stream is enabled, records are made at the kernel's instructions and put into one buffer per XeCore; a full buffer
 * drops them. Everything that was made is in the ledger, by (pid, launching stack, kernel, offset, reason): what of it was dropped,
 * and what nobody read. produced - dropped - unread is what a reader got, exactly.
 *
 *   --device bmg|lnl|ptl|pvc|xe3p|future   what the driver says of a card; sets its layout, too (default bmg). Once for each card
 *   --layout pvc|xe2|xe3p           where the fields of a record are, on all cards
 *   --unplugged CARD                is not there until it is plugged in (counted from 0)
 *   --xecores N (20)  --gts N (1; 2 for pvc)   of each card
 *   --rate R (2000)   records per second of execution and XeCore
 *   --seed S (1)      of everything that looks random
 *   --zipf X (1.5)    an instruction's weight is its rank to the power of -X
 *   --saturated P (0.004)   part of the counters that are full, at 255; the others are 7 at most
 *   --in-order        a process's launches execute one after the other, and processes take turns (else all at once). Then the ledger
 *                     has what executed when, and a record says in bits that the hardware does not use whose it is
 *   --flood RECORDS SECONDS         once a stream is enabled and a kernel is known: that many records, evenly over that time
 *   --with-parent     ends when the process that started it ends
 *
 * Prints "ready" when it listens. SIGTERM and SIGINT: write the ledger and end. SIGUSR1: a GPU reset. */
#define _GNU_SOURCE
#define STANDIN_WITH_SHARED_MEMORY
#include "protocol.h"

#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <poll.h>
#include <signal.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/timerfd.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

enum { REASONS = 10, LAYOUTS = 3, CLASSES = 16, PATTERNS = 512, SLOTS = STANDIN_XECORE_BYTES / STANDIN_RECORD_BYTES };
#define MS 1000000ull
#define POLL_PERIOD (5 * MS)    /* the driver looks at the buffers this often */
#define STEP (1 * MS)           /* how finely execution is simulated */
#define TIME_SLICE (1 * MS)     /* of a process while another has something to execute, as xe has it (timeslice_duration_us) */
#define LONGEST_STEP (10 * MS)  /* when this process did not get to run: time in which the GPU stood still */

static const char *const reason_names[REASONS] = {"active", "control", "pipestall", "send", "dist_acc",
                                                  "sbid",   "sync",    "inst_fetch", "other", "tdr"};

/* The first bit of each counter, in the order of reason_names; -1: this layout has none. */
struct layout {
    const char *name;
    unsigned ip_bits;
    int bit[REASONS];
    int ex_id, end_flag;
    int unused; /* the first of 15 bits that hold nothing */
};
static const struct layout layouts[LAYOUTS] = {
    {"pvc", 29, {29, 45, 53, 61, 69, 77, 85, 93, 37, -1}, -1, -1, 113},
    {"xe2", 29, {101, 45, 53, 61, 69, 77, 85, 93, 37, 29}, 109, 112, 113},
    {"xe3p", 61, {133, 77, 85, 93, 101, 109, 117, 125, 69, 61}, 141, 144, 145},
};

/* Each device that the tree can show. A media GT follows each main one where `media` is not 0. */
static const struct device {
    const char *name, *layout;
    uint16_t id, major, minor, media, media_minor, gts;
    uint32_t va_bits, vram, reference_clock;
} devices[] = {
    {"bmg", "xe2", 0xe20b, 20, 1, 13, 1, 1, 48, 1, 19200000},
    {"lnl", "xe2", 0x64a0, 20, 4, 20, 0, 1, 48, 0, 19200000},
    {"ptl", "xe2", 0xb080, 30, 0, 30, 2, 1, 48, 0, 19200000},
    {"pvc", "pvc", 0x0bd5, 12, 60, 0, 0, 2, 57, 1, 25000000},
    {"xe3p", "xe3p", 0xd750, 35, 10, 35, 3, 1, 57, 0, 19200000},
    {"future", "xe3p", 0xfff0, 41, 2, 35, 3, 1, 57, 0, 19200000}, /* one that nobody knows yet */
};

/* One possible set of counters, as numbers and as bits of a record. */
struct pattern {
    uint64_t words[3];
    uint8_t counts[REASONS];
};

struct kernel {
    uint32_t pid, instructions, size;
    uint64_t address;
    char name[128];
    uint32_t *offsets;
    /* The alias method: column i is instruction i with probability keep[i] / 2^16, else other[i]. */
    uint16_t *keep;
    uint32_t *other;
    uint64_t *ip;
    uint8_t *class;
};

/* A kernel as launched from one stack; its ledger rows are rows[first + instruction]. */
struct site {
    uint32_t kernel, pid, first;
    uint64_t launches;
    char *stack;
};

struct row {
    uint64_t produced[REASONS], dropped[REASONS], unread[REASONS];
};

struct launch {
    uint32_t site, gt;
    uint64_t start, end;
    /* With --in-order `start` is the earliest, and `end` is not known: */
    uint32_t process;
    uint64_t number, launched, left; /* left: of its execution */
};

/* A piece of a launch's execution. */
struct execution {
    uint32_t site;
    uint64_t number, launched, begin, end;
};

struct overflow {
    uint32_t gt, xecore;
    uint64_t first, last, records;
};

struct process {
    pid_t pid;
    uint64_t end; /* when the last of what it launched has executed */
};

struct client {
    int fd;
    pid_t pid;
    bool waits, settled; /* settled: `until` is known */
    bool for_all;        /* waits for everybody's, not its process's */
    uint64_t until;
};

/* The GPU's own view of a main GT; what the reader sees of it is in struct standin_stream. */
struct gt {
    bool open, enabled, reset;
    int pipe;
    uint32_t card;
    const struct layout *layout;
    uint64_t produced, dropped, unread;
    uint64_t id, wait_reports, next_poll, last_poll;
    double carry;
    uint32_t cursor;
    uint64_t write[STANDIN_MAX_XECORES];
    int64_t overflow[STANDIN_MAX_XECORES]; /* which of overflows[] is going on, -1: none */
    uint32_t turn;                         /* of which process it is to execute */
    uint64_t turn_ends;
    uint32_t *owner;                       /* [xecores * SLOTS]: the ledger row of the record in that slot */
};

static struct {
    const struct layout *layout;
    uint32_t mains, xecores;
    double rate, zipf, saturated;
    uint64_t seed;
    uint32_t unplugged; /* a bit for each card */
    struct {
        double records, produced;
        uint64_t duration, elapsed, done; /* done: when it was over */
        bool wanted;
    } flood;
    bool with_parent, in_order;
} options = {.xecores = 20, .rate = 2000, .zipf = 1.5, .saturated = 0.004, .seed = 1};

static struct standin_device cards[STANDIN_MAX_CARDS];
static uint32_t cards_count;
static struct standin_shared *shared;
static int shared_fd, dir_fd, epoll_fd, listen_fd, timer_fd, signal_fd;
static struct gt gts[STANDIN_MAX_STREAMS];
static struct pattern patterns[LAYOUTS][CLASSES][PATTERNS];
/* Overflows that are still to be made, one every `period`. */
static struct {
    uint64_t left, period, next, made;
    uint32_t drops;
} overfill;
static uint64_t random_state;
static uint64_t streams_opened, records_produced, records_dropped, records_unread, launches_seen, now_ns, stepped_ns;

#define GROWING(type, name)    \
    static type *name;         \
    static size_t name##_count, name##_room
GROWING(struct kernel, kernels);
GROWING(struct site, sites);
GROWING(struct row, rows);
GROWING(struct launch, launches);
GROWING(struct execution, executions);
GROWING(struct overflow, overflows);
GROWING(struct process, processes);
GROWING(struct client *, clients);

static void *must(void *pointer)
{
    if (!pointer) {
        perror("standin-gpu: memory");
        exit(1);
    }
    return pointer;
}

static void *make_room(void *array, size_t count, size_t *room, size_t size)
{
    if (count <= *room)
        return array;
    *room = count * 2 + 64;
    return must(realloc(array, *room * size));
}
#define ROOM(name, more) (name = make_room(name, name##_count + (more), &name##_room, sizeof(*name)))

static void check(bool good, const char *what)
{
    if (!good) {
        fprintf(stderr, "standin-gpu: %s: %s\n", what, strerror(errno));
        exit(1);
    }
}

static uint64_t clock_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000ull + (uint64_t)t.tv_nsec;
}

/* splitmix64: one multiplication chain, good enough and cheap. */
static inline uint64_t mix(uint64_t z)
{
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
}

static inline uint64_t random64(void)
{
    return mix(random_state += 0x9e3779b97f4a7c15ull);
}

static double random_unit(void)
{
    return (double)(random64() >> 11) / 9007199254740992.0;
}

static void put_bits(uint64_t words[3], int bit, unsigned width, uint64_t value)
{
    value &= (1ull << width) - 1;
    words[bit / 64] |= value << (bit % 64);
    if (bit % 64 + width > 64)
        words[bit / 64 + 1] |= value >> (64 - bit % 64);
}

/* Every class of instructions waits for one reason most of the time; over all, a counter is non-zero in a quarter of the records. */
static void make_patterns(const struct layout *layout)
{
    for (int c = 0; c < CLASSES; c++) {
        for (int p = 0; p < PATTERNS; p++) {
            struct pattern *pattern = &patterns[layout - layouts][c][p];
            bool any = false;
            for (int r = 0; r < REASONS; r++) {
                if (layout->bit[r] < 0 || random_unit() >= (r == c % REASONS ? 0.7 : 0.2))
                    continue;
                unsigned value = 1;
                while (value < 7 && random_unit() < 0.45)
                    value++;
                if (random_unit() < options.saturated)
                    value = 255;
                pattern->counts[r] = (uint8_t)value;
                any = true;
            }
            if (!any)
                pattern->counts[c % (REASONS - 1)] = 1;
            for (int r = 0; r < REASONS; r++)
                if (layout->bit[r] >= 0)
                    put_bits(pattern->words, layout->bit[r], 8, pattern->counts[r]);
            if (layout->ex_id >= 0)
                put_bits(pattern->words, layout->ex_id, 3, random64());
            if (layout->end_flag >= 0)
                put_bits(pattern->words, layout->end_flag, 1, random64());
        }
    }
}

/* ---- kernels and launches ---- */

/* A few instructions are hot: weights fall with a power of the rank, ranks are shuffled. Vose's alias tables. */
static void make_weights(struct kernel *k)
{
    uint32_t n = k->instructions, smalls = 0, larges = 0;
    double *weight = must(calloc(n, sizeof(*weight))), sum = 0;
    uint32_t *order = must(calloc(n, sizeof(*order)));
    uint32_t *small = must(calloc(n, sizeof(*small))), *large = must(calloc(n, sizeof(*large)));
    uint64_t state = mix(options.seed ^ mix(k->address));

    for (uint32_t i = 0; i < n; i++) {
        uint32_t j = (uint32_t)(mix(state += 0x9e3779b97f4a7c15ull) % (i + 1));
        order[i] = order[j];
        order[j] = i;
    }
    for (uint32_t i = 0; i < n; i++) {
        weight[i] = pow(order[i] + 1.0, -options.zipf);
        sum += weight[i];
    }
    for (uint32_t i = 0; i < n; i++) {
        weight[i] *= n / sum;
        k->other[i] = i;
        if (weight[i] < 1)
            small[smalls++] = i;
        else
            large[larges++] = i;
    }
    while (smalls && larges) {
        uint32_t s = small[--smalls], l = large[larges - 1];
        k->keep[s] = (uint16_t)(weight[s] * 65535);
        k->other[s] = l;
        weight[l] -= 1 - weight[s];
        if (weight[l] < 1) {
            larges--;
            small[smalls++] = l;
        }
    }
    while (smalls)
        k->keep[small[--smalls]] = 65535;
    while (larges)
        k->keep[large[--larges]] = 65535;
    free(weight), free(order), free(small), free(large);
}

static uint32_t find_kernel(uint32_t pid, uint64_t address)
{
    for (size_t i = kernels_count; i-- > 0;)
        if (kernels[i].pid == pid && kernels[i].address == address)
            return (uint32_t)i;
    return UINT32_MAX;
}

static void add_kernel(uint32_t pid, uint64_t address, uint64_t size, const char *name, const uint32_t *offsets, uint32_t count)
{
    uint32_t known = find_kernel(pid, address);
    if (known != UINT32_MAX && kernels[known].instructions == count && !strcmp(kernels[known].name, name) &&
        !memcmp(kernels[known].offsets, offsets, count * sizeof(*offsets)))
        return;
    ROOM(kernels, 1);
    struct kernel *k = &kernels[kernels_count++];
    memset(k, 0, sizeof(*k));
    k->pid = pid;
    k->address = address;
    k->size = (uint32_t)size;
    k->instructions = count;
    snprintf(k->name, sizeof(k->name), "%s", name);
    k->offsets = must(calloc(count, sizeof(*k->offsets)));
    memcpy(k->offsets, offsets, count * sizeof(*offsets));
    k->keep = must(calloc(count, sizeof(*k->keep)));
    k->other = must(calloc(count, sizeof(*k->other)));
    k->ip = must(calloc(count, sizeof(*k->ip)));
    k->class = must(calloc(count, sizeof(*k->class)));
    for (uint32_t i = 0; i < count; i++) {
        k->ip[i] = (address + offsets[i]) >> 3; /* of which a record has as many bits as its layout */
        k->class[i] = (uint8_t)(mix(options.seed + address + offsets[i]) % CLASSES);
    }
    make_weights(k);
}

/* Open hashing from (kernel, stack) to its site: with many call paths a search through all would be felt. */
static uint32_t *site_table;
static size_t site_table_size;

static uint64_t site_hash(uint32_t kernel, const char *stack)
{
    uint64_t h = mix(kernel + 1);
    for (; *stack; stack++)
        h = (h ^ (uint8_t)*stack) * 0x100000001b3ull;
    return mix(h);
}

static size_t site_slot(uint32_t kernel, const char *stack)
{
    size_t i = site_hash(kernel, stack) & (site_table_size - 1);
    while (site_table[i] && (sites[site_table[i] - 1].kernel != kernel || strcmp(sites[site_table[i] - 1].stack, stack)))
        i = (i + 1) & (site_table_size - 1);
    return i;
}

static uint32_t find_site(uint32_t kernel, const char *stack)
{
    if (sites_count * 2 >= site_table_size) {
        free(site_table);
        site_table_size = site_table_size ? site_table_size * 2 : 1024;
        site_table = must(calloc(site_table_size, sizeof(*site_table)));
        for (size_t s = 0; s < sites_count; s++)
            site_table[site_slot(sites[s].kernel, sites[s].stack)] = (uint32_t)s + 1;
    }
    size_t slot = site_slot(kernel, stack);
    if (!site_table[slot]) {
        uint32_t count = kernels[kernel].instructions;
        ROOM(sites, 1);
        ROOM(rows, count);
        memset(&rows[rows_count], 0, count * sizeof(*rows));
        sites[sites_count] = (struct site){.kernel = kernel, .pid = kernels[kernel].pid, .first = (uint32_t)rows_count,
                                           .stack = must(strdup(stack))};
        rows_count += count;
        site_table[slot] = (uint32_t)++sites_count;
    }
    return site_table[slot] - 1;
}

static struct process *find_process(pid_t pid)
{
    for (size_t i = 0; i < processes_count; i++)
        if (processes[i].pid == pid)
            return &processes[i];
    return NULL;
}

static bool there(uint32_t g)
{
    return shared->plugged[gts[g].card];
}

static bool frozen(uint32_t g)
{
    return shared->frozen_ns[gts[g].card];
}

static bool sampling(uint32_t g)
{
    return gts[g].enabled && !gts[g].reset && !frozen(g);
}

/* The main GT that gets a launch: the one that was asked for, else each in turn; none: options.mains. */
static uint32_t choose_gt(uint32_t wanted)
{
    uint64_t turn = launches_seen++;
    if (wanted)
        return wanted <= options.mains && there(wanted - 1) ? wanted - 1 : options.mains;
    for (uint32_t i = 0; i < options.mains; i++)
        if (there((uint32_t)((turn + i) % options.mains)))
            return (uint32_t)((turn + i) % options.mains);
    return options.mains;
}

static void add_launch(struct client *client, const struct standin_launch *message)
{
    uint32_t kernel = find_kernel(message->pid, message->address);
    if (kernel == UINT32_MAX) { /* a runtime's mistake: shown in the ledger, at the one offset that is sure to exist */
        fprintf(stderr, "standin-gpu: pid %u launches at %#llx, where it placed no kernel\n", message->pid,
                (unsigned long long)message->address);
        add_kernel(message->pid, message->address, 16, "[never placed]", &(uint32_t){0}, 1);
        kernel = find_kernel(message->pid, message->address);
    }
    uint32_t site = find_site(kernel, message->stack);
    sites[site].launches++;
    uint64_t now = clock_ns(), start = now + message->delay_ns, end = start + message->duration_ns;
    uint32_t gt = choose_gt(message->gt);
    if (gt == options.mains) /* there is no card: a launch into the void */
        return;
    struct process *process = find_process(client->pid);
    if (!process) {
        ROOM(processes, 1);
        process = &processes[processes_count++];
        *process = (struct process){.pid = client->pid};
    }
    if (end > process->end && !options.in_order)
        process->end = end;
    ROOM(launches, 1);
    launches[launches_count++] = (struct launch){site, gt, start, end, (uint32_t)(process - processes), launches_seen, now,
                                                 message->duration_ns + !message->duration_ns};
}

/* ---- sampling ---- */

static inline uint8_t *buffer_of(uint32_t gt, uint32_t xecore)
{
    return (uint8_t *)shared + shared->data_offset + ((size_t)gt * options.xecores + xecore) * STANDIN_XECORE_BYTES;
}

static void note_drop(uint32_t g, uint32_t xecore)
{
    struct gt *gt = &gts[g];
    uint32_t none = 0;
    if (atomic_compare_exchange_strong(&shared->streams[g].xecores[xecore].drop, &none, 1) || gt->overflow[xecore] < 0) {
        ROOM(overflows, 1);
        gt->overflow[xecore] = (int64_t)overflows_count;
        overflows[overflows_count++] = (struct overflow){g, xecore, now_ns, now_ns, 0};
    }
    struct overflow *overflow = &overflows[gt->overflow[xecore]];
    overflow->last = now_ns;
    overflow->records++;
}

/* `count` records of one launch into one XeCore's buffer. This is the loop that has to be fast. */
static void sample(uint32_t g, uint32_t xecore, uint32_t site_number, uint64_t count)
{
    struct gt *gt = &gts[g];
    struct standin_xecore *state = &shared->streams[g].xecores[xecore];
    const struct site *site = &sites[site_number];
    const struct kernel *kernel = &kernels[site->kernel];
    uint8_t *buffer = buffer_of(g, xecore);
    uint32_t *owner = gt->owner + (size_t)xecore * SLOTS;
    const struct pattern(*classes)[PATTERNS] = patterns[gt->layout - layouts];
    const uint64_t ip_mask = (1ull << gt->layout->ip_bits) - 1;
    const uint64_t whose = options.in_order ? (uint64_t)site_number << gt->layout->unused % 64 : 0;
    uint64_t write = gt->write[xecore], read = atomic_load_explicit(&state->read, memory_order_acquire);

    for (uint64_t i = 0; i < count; i++) {
        uint64_t dice = random64();
        uint32_t instruction = (uint32_t)((dice >> 32) * kernel->instructions >> 32);
        if ((uint16_t)dice > kernel->keep[instruction])
            instruction = kernel->other[instruction];
        const struct pattern *pattern = &classes[kernel->class[instruction]][(dice >> 16) % PATTERNS];
        struct row *row = &rows[site->first + instruction];
        for (int r = 0; r < REASONS; r++)
            row->produced[r] += pattern->counts[r];
        if (write - read >= SLOTS) {
            read = atomic_load_explicit(&state->read, memory_order_acquire);
            if (write - read >= SLOTS) {
                for (int r = 0; r < REASONS; r++)
                    row->dropped[r] += pattern->counts[r];
                records_dropped++;
                gt->dropped++;
                note_drop(g, xecore);
                continue;
            }
        }
        uint64_t *record = (uint64_t *)(buffer + write % SLOTS * STANDIN_RECORD_BYTES);
        record[0] = pattern->words[0] | (kernel->ip[instruction] & ip_mask);
        record[1] = pattern->words[1];
        record[2] = pattern->words[2];
        record[gt->layout->unused / 64] |= whose;
        memset(record + 3, 0, STANDIN_RECORD_BYTES - 24);
        owner[write % SLOTS] = site->first + instruction;
        write++;
    }
    gt->write[xecore] = write;
    gt->produced += count;
    records_produced += count;
}

static void sample_all(uint32_t g, uint32_t site, uint64_t count)
{
    struct gt *gt = &gts[g];
    uint64_t each = count / options.xecores, rest = count % options.xecores;
    for (uint32_t i = 0; i < options.xecores; i++)
        if (each + (i < rest))
            sample(g, (gt->cursor + i) % options.xecores, site, each + (i < rest));
    gt->cursor = (uint32_t)((gt->cursor + rest) % options.xecores);
}

/* What of a step a launch fills, in 64ths of it: the union of many is then one OR. */
static uint64_t filled(uint64_t from, uint64_t first, uint64_t last)
{
    double slice = (double)(now_ns - from) / 64;
    int a = (int)((double)(first - from) / slice + 0.5), b = (int)((double)(last - from) / slice + 0.5);
    uint64_t below_b = b > 63 ? ~0ull : (1ull << b) - 1;
    return a > 63 ? 0 : below_b & ~((1ull << a) - 1);
}

static void publish_work(uint32_t g, uint64_t from, uint64_t slices, uint64_t until)
{
    struct standin_work *work = &shared->work[g];
    if (slices && until < now_ns)
        until = now_ns;
    if (until < work->until)
        until = work->until;
    work->turn++;
    work->busy_ns += (now_ns - from) / 64 * (uint64_t)__builtin_popcountll(slices);
    work->as_of = now_ns;
    work->until = until;
    work->turn++;
}

static void flood(uint64_t from, uint64_t slices[])
{
    for (uint32_t g = 0; g < options.mains; g++)
        if (sampling(g)) {
            options.flood.elapsed += now_ns - from;
            double part = (double)options.flood.elapsed / (double)options.flood.duration;
            options.flood.wanted = part < 1;
            if (part >= 1)
                options.flood.done = now_ns;
            double due = options.flood.records * (part < 1 ? part : 1) - options.flood.produced;
            due = options.flood.wanted ? (double)(uint64_t)due : due + 0.5;
            options.flood.produced += due;
            slices[g] = ~0ull;
            if (due >= 1)
                sample_all(g, find_site(0, "flood"), (uint64_t)due);
            break;
        }
}

static void execute(uint32_t g, uint32_t site, uint64_t from, uint64_t to)
{
    struct gt *gt = &gts[g];
    gt->carry += options.rate * options.xecores * (double)(to - from) / 1e9;
    uint64_t due = (uint64_t)gt->carry;
    gt->carry -= (double)due;
    if (due)
        sample_all(g, site, due);
}

/* The first launch of a process that a main GT has still to execute. */
static struct launch *head(uint32_t g, uint32_t process)
{
    for (size_t i = 0; i < launches_count; i++)
        if (launches[i].gt == g && launches[i].process == process && launches[i].left)
            return &launches[i];
    return NULL;
}

/* The launch to go on with at a time. Without any: NULL, and `soonest` is when there may be one. */
static struct launch *next_in_turn(uint32_t g, uint64_t at, uint64_t *soonest)
{
    struct gt *gt = &gts[g];
    uint32_t first = gt->turn + (at >= gt->turn_ends);
    for (uint32_t i = 0; i < processes_count; i++) {
        uint32_t process = (uint32_t)((first + i) % processes_count);
        struct launch *launch = head(g, process);
        if (!launch || launch->start > at) {
            if (launch && launch->start < *soonest)
                *soonest = launch->start;
            continue;
        }
        if (process != gt->turn || at >= gt->turn_ends)
            gt->turn_ends = at + TIME_SLICE;
        gt->turn = process;
        return launch;
    }
    return NULL;
}

/* In --in-order what a main GT executes from `at` to now_ns; which of the 64ths of that since `from`. */
static uint64_t take_turns(uint32_t g, uint64_t from, uint64_t at)
{
    uint64_t slices = 0;
    while (at < now_ns) {
        uint64_t to = now_ns;
        struct launch *launch = next_in_turn(g, at, &to);
        if (launch) {
            if (at + launch->left < to)
                to = at + launch->left;
            if (gts[g].turn_ends < to)
                to = gts[g].turn_ends;
            if (sampling(g))
                execute(g, launch->site, at, to);
            slices |= filled(from, at, to);
            launch->left -= to - at;
            processes[launch->process].end = to;
            struct execution *last = executions_count ? &executions[executions_count - 1] : NULL;
            if (last && last->number == launch->number && last->end == at) {
                last->end = to;
            } else {
                ROOM(executions, 1);
                executions[executions_count++] = (struct execution){launch->site, launch->number, launch->launched, at, to};
            }
        }
        at = to;
    }
    return slices;
}

static void step_in_order(uint64_t from, uint64_t slices[])
{
    uint64_t kept = 0, at = now_ns - from > LONGEST_STEP ? now_ns - LONGEST_STEP : from;
    for (uint32_t g = 0; g < options.mains; g++)
        if (there(g) && !frozen(g))
            slices[g] = take_turns(g, from, at);
    for (size_t i = 0; i < launches_count; i++)
        if (launches[i].left && there(launches[i].gt))
            launches[kept++] = launches[i];
    launches_count = kept;
}

/* Execution from stepped_ns to now_ns. Records are made for less of it when this process did not get to run; work is counted whole. */
static void step(void)
{
    uint64_t from = stepped_ns, since = stepped_ns, kept = 0;
    uint64_t slices[STANDIN_MAX_STREAMS] = {0}, until[STANDIN_MAX_STREAMS] = {0};
    if (now_ns == since)
        return;
    if (now_ns - from > LONGEST_STEP)
        from = now_ns - LONGEST_STEP;
    stepped_ns = now_ns;
    if (options.in_order)
        step_in_order(since, slices);
    for (size_t i = 0; i < launches_count && !options.in_order; i++) {
        struct launch launch = launches[i];
        if (!there(launch.gt))
            continue;
        uint64_t first = launch.start > since ? launch.start : since, last = launch.end < now_ns ? launch.end : now_ns;
        if (first < last && !frozen(launch.gt)) {
            slices[launch.gt] |= filled(since, first, last);
            if (launch.end > until[launch.gt])
                until[launch.gt] = launch.end;
        }
        uint64_t seen = first < from ? from : first;
        if (first < last && seen >= last && launch.start >= since) /* it came and went meanwhile: some records tell of it */
            seen = last - first > STEP ? last - STEP : first;
        if (sampling(launch.gt) && seen < last)
            execute(launch.gt, launch.site, seen, last);
        if (launch.end > now_ns || frozen(launch.gt))
            launches[kept++] = launch;
    }
    if (!options.in_order)
        launches_count = kept;
    if (options.flood.wanted && kernels_count)
        flood(from, slices);
    for (uint32_t g = 0; g < options.mains; g++)
        if (!frozen(g) && there(g))
            publish_work(g, since, slices[g], until[g]);
}

/* One of the overflows that were ordered, on one XeCore after the other. The next waits until the reader has met the last. */
static void overflow_when_due(void)
{
    uint32_t g = 0, x;
    if (!overfill.left || now_ns < overfill.next || !kernels_count)
        return;
    while (g < options.mains && !sampling((uint32_t)((overfill.made + g) % options.mains)))
        g++;
    if (g == options.mains)
        return;
    g = (uint32_t)((overfill.made + g) % options.mains);
    for (x = 0; x < options.xecores; x++)
        if (shared->streams[g].xecores[x].drop)
            return;
    x = (uint32_t)(overfill.made++ / options.mains % options.xecores);
    uint32_t site = find_site(0, "overflow");
    uint64_t room = SLOTS - (gts[g].write[x] - shared->streams[g].xecores[x].read), before = records_dropped;
    sample(g, x, site, room);
    while (records_dropped - before < overfill.drops) {
        now_ns = clock_ns();
        sample(g, x, site, 1);
    }
    overfill.next = now_ns + overfill.period;
    if (--overfill.left == 0)
        options.flood.done = now_ns;
}

/* POLLIN on the stream's descriptor. One byte is enough, and the reader takes all of them away. */
static void wake(struct gt *gt)
{
    int waiting = 0;
    if (ioctl(gt->pipe, FIONREAD, &waiting) == 0 && waiting == 0)
        (void)!write(gt->pipe, "!", 1);
}

/* What the driver does every 5 ms: it makes visible what the hardware has written, and sees that it dropped. */
static void poll_buffers(uint32_t g)
{
    struct gt *gt = &gts[g];
    struct standin_stream *stream = &shared->streams[g];
    uint64_t total = 0;
    if (!sampling(g) || now_ns < gt->next_poll)
        return;
    for (uint32_t i = 0; i < options.xecores; i++) {
        uint32_t dropped = 1;
        atomic_compare_exchange_strong(&stream->xecores[i].drop, &dropped, 2);
        atomic_store_explicit(&stream->xecores[i].visible, gt->write[i], memory_order_release);
        total += gt->write[i] - atomic_load_explicit(&stream->xecores[i].read, memory_order_acquire);
    }
    if (total >= gt->wait_reports)
        wake(gt);
    gt->last_poll = now_ns;
    gt->next_poll += POLL_PERIOD;
    if (gt->next_poll <= now_ns)
        gt->next_poll = now_ns + POLL_PERIOD;
}

/* ---- streams ---- */

static void lock(struct standin_stream *stream)
{
    if (pthread_mutex_lock(&stream->lock) == EOWNERDEAD)
        pthread_mutex_consistent(&stream->lock);
}

static void count_unread(uint32_t g)
{
    struct gt *gt = &gts[g];
    for (uint32_t x = 0; x < options.xecores; x++) {
        struct standin_xecore *state = &shared->streams[g].xecores[x];
        for (uint64_t at = atomic_load(&state->read); at != gt->write[x]; at++) {
            const uint64_t *record = (uint64_t *)(buffer_of(g, x) + at % SLOTS * STANDIN_RECORD_BYTES);
            struct row *row = &rows[gt->owner[(size_t)x * SLOTS + at % SLOTS]];
            for (int r = 0; r < REASONS; r++) {
                int bit = gt->layout->bit[r];
                if (bit < 0)
                    continue;
                uint64_t value = record[bit / 64] >> (bit % 64);
                if (bit % 64 > 56)
                    value |= record[bit / 64 + 1] << (64 - bit % 64);
                row->unread[r] += value & 0xff;
            }
            records_unread++;
            gt->unread++;
        }
        atomic_store(&state->visible, gt->write[x]);
        atomic_store(&state->read, gt->write[x]);
        atomic_store(&state->drop, 0);
        gt->overflow[x] = -1;
    }
}

static void disable(uint32_t g)
{
    struct standin_stream *stream = &shared->streams[g];
    if (!gts[g].enabled)
        return;
    lock(stream);
    atomic_store(&stream->enabled, 0);
    if (!gts[g].reset)
        count_unread(g);
    gts[g].enabled = false;
    pthread_mutex_unlock(&stream->lock);
}

static void enable(uint32_t g)
{
    struct gt *gt = &gts[g];
    struct standin_stream *stream = &shared->streams[g];
    if (gt->enabled)
        return;
    lock(stream);
    stream->reported = 0;
    atomic_store(&stream->enabled, 1);
    pthread_mutex_unlock(&stream->lock);
    gt->enabled = true;
    gt->next_poll = clock_ns() + POLL_PERIOD;
}

static void close_stream(uint32_t g)
{
    if (!gts[g].open)
        return;
    disable(g);
    atomic_store(&shared->streams[g].id, 0);
    close(gts[g].pipe);
    gts[g].open = gts[g].reset = false;
}

/* Is the last copy of the reading end gone? */
static bool abandoned(const struct gt *gt)
{
    struct pollfd p = {.fd = gt->pipe};
    return poll(&p, 1, 0) == 1 && p.revents & POLLERR;
}

static bool is_of(uint32_t g, int card)
{
    return card < 0 || gts[g].card == (uint32_t)card;
}

static void reset(int card)
{
    for (uint32_t g = 0; g < options.mains; g++) {
        if (!is_of(g, card) || !gts[g].open || gts[g].reset)
            continue;
        struct standin_stream *stream = &shared->streams[g];
        lock(stream);
        if (gts[g].enabled)
            count_unread(g);
        gts[g].reset = true;
        atomic_store(&stream->reset, 1);
        pthread_mutex_unlock(&stream->lock);
        wake(&gts[g]);
    }
}

/* What was open of the card is dead, and unlike after a reset does not keep anyone from opening it when it is back. */
static void unplug(int card)
{
    reset(card);
    for (uint32_t c = 0; c < cards_count; c++)
        if (card < 0 || c == (uint32_t)card)
            shared->plugged[c] = shared->frozen_ns[c] = 0;
    for (uint32_t g = 0; g < options.mains; g++)
        if (is_of(g, card))
            close_stream(g);
}

static void freeze(int card)
{
    step();
    for (uint32_t c = 0; c < cards_count; c++)
        if ((card < 0 || c == (uint32_t)card) && shared->plugged[c] && !shared->frozen_ns[c])
            shared->frozen_ns[c] = now_ns;
}

/* What had not been executed comes that much later. */
static void thaw(int card)
{
    step();
    for (uint32_t c = 0; c < cards_count; c++) {
        uint64_t since = shared->frozen_ns[c];
        if (!since || !(card < 0 || c == (uint32_t)card))
            continue;
        for (size_t i = 0; i < launches_count; i++)
            if (gts[launches[i].gt].card == c) {
                launches[i].start += launches[i].start > since ? now_ns - since : 0;
                launches[i].end += now_ns - since;
            }
        for (size_t i = 0; i < processes_count; i++)
            processes[i].end += processes[i].end > since ? now_ns - since : 0;
        shared->frozen_ns[c] = 0;
    }
}

static void send_reply(int fd, const void *message, size_t size, int passed)
{
    struct iovec iov = {(void *)message, size};
    union {
        char space[CMSG_SPACE(sizeof(int))];
        struct cmsghdr align;
    } control = {0};
    struct msghdr header = {.msg_iov = &iov, .msg_iovlen = 1};
    if (passed >= 0) {
        header.msg_control = &control;
        header.msg_controllen = sizeof(control);
        struct cmsghdr *c = CMSG_FIRSTHDR(&header);
        c->cmsg_level = SOL_SOCKET;
        c->cmsg_type = SCM_RIGHTS;
        c->cmsg_len = CMSG_LEN(sizeof(int));
        memcpy(CMSG_DATA(c), &passed, sizeof(int));
    }
    (void)!sendmsg(fd, &header, MSG_DONTWAIT | MSG_NOSIGNAL);
}

static void answer_driver(int fd, const struct standin_driver *question)
{
    struct standin_driver_reply reply = {.type = STANDIN_MSG_DRIVER};
    uint32_t g = question->gt;
    int passed = -1, ends[2];
    if (question->op == STANDIN_DRIVER_HELLO) {
        reply.cards = cards_count;
        memcpy(reply.devices, cards, sizeof(cards));
        send_reply(fd, &reply, sizeof(reply), shared_fd);
        return;
    }
    if (g >= options.mains) {
        reply.error = EINVAL;
    } else if (!there(g)) {
        reply.error = ENODEV;
    } else if (frozen(g) && question->op != STANDIN_DRIVER_DISABLE) {
        reply.error = ETIMEDOUT; /* as when the GT does not answer to a forcewake */
    } else if (question->op == STANDIN_DRIVER_OPEN) {
        if (gts[g].open && abandoned(&gts[g]))
            close_stream(g);
        if (gts[g].open) {
            reply.error = EBUSY;
        } else if (question->wait_reports == 0 || question->wait_reports > (uint64_t)options.xecores * SLOTS) {
            reply.error = EINVAL;
        } else if (pipe2(ends, O_CLOEXEC)) {
            reply.error = errno;
        } else {
            fcntl(ends[1], F_SETFL, O_NONBLOCK);
            struct epoll_event event = {.events = 0, .data.u64 = 1 + g}; /* EPOLLERR comes unasked */
            epoll_ctl(epoll_fd, EPOLL_CTL_ADD, ends[1], &event);
            gts[g].open = true;
            gts[g].pipe = ends[1];
            gts[g].wait_reports = question->wait_reports;
            gts[g].id = reply.stream = ++streams_opened;
            atomic_store(&shared->streams[g].reset, 0);
            atomic_store(&shared->streams[g].id, gts[g].id);
            passed = ends[0];
        }
    } else if (!gts[g].open || gts[g].id != question->stream) {
        reply.error = EBADF;
    } else if (question->op == STANDIN_DRIVER_ENABLE) {
        enable(g);
    } else if (question->op == STANDIN_DRIVER_DISABLE) {
        disable(g);
    } else {
        reply.error = EINVAL;
    }
    send_reply(fd, &reply, sizeof(reply), passed);
    if (passed >= 0)
        close(passed);
}

/* ---- the ledger ---- */

static void put_name(FILE *file, const char *name)
{
    for (; *name; name++)
        fputc(*name == '\t' || *name == '\n' || *name == '\r' ? '?' : *name, file);
}

static void put_site(FILE *file, const struct site *site)
{
    fprintf(file, "%u\t", site->pid);
    put_name(file, site->stack);
    fputc('\t', file);
    put_name(file, kernels[site->kernel].name);
    fprintf(file, "\t0x%llx\t", (unsigned long long)kernels[site->kernel].address);
}

static int write_ledger(void)
{
    int fd = openat(dir_fd, "ledger.tsv.new", O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
    FILE *file = fd < 0 ? NULL : fdopen(fd, "w");
    if (!file)
        return errno;
    fputs("pid\tstack\tkernel\taddress\toffset\treason\tproduced\tdropped\tunread\n", file);
    for (size_t s = 0; s < sites_count; s++) {
        const struct kernel *kernel = &kernels[sites[s].kernel];
        for (uint32_t i = 0; i < kernel->instructions; i++) {
            const struct row *row = &rows[sites[s].first + i];
            for (int r = 0; r < REASONS; r++) {
                if (!row->produced[r])
                    continue;
                put_site(file, &sites[s]);
                fprintf(file, "0x%x\t%s\t%llu\t%llu\t%llu\n", kernel->offsets[i], reason_names[r],
                        (unsigned long long)row->produced[r], (unsigned long long)row->dropped[r],
                        (unsigned long long)row->unread[r]);
            }
        }
    }
    fprintf(file, "#records\tproduced\t%llu\n#records\tdropped\t%llu\n#records\tunread\t%llu\n",
            (unsigned long long)records_produced, (unsigned long long)records_dropped, (unsigned long long)records_unread);
    for (uint32_t g = 0; g < options.mains; g++)
        fprintf(file, "#gt\t%u\t%u\t%llu\t%llu\t%llu\n", gts[g].card, g - cards[gts[g].card].first,
                (unsigned long long)gts[g].produced, (unsigned long long)gts[g].dropped, (unsigned long long)gts[g].unread);
    for (size_t i = 0; i < overflows_count; i++)
        fprintf(file, "#overflow\t%u\t%u\t%u\t%llu\t%llu\t%llu\n", gts[overflows[i].gt].card,
                overflows[i].gt - cards[gts[overflows[i].gt].card].first, overflows[i].xecore,
                (unsigned long long)overflows[i].first, (unsigned long long)overflows[i].last,
                (unsigned long long)overflows[i].records);
    for (size_t s = 0; s < sites_count; s++) {
        if (!sites[s].launches)
            continue;
        fputs("#launch\t", file);
        put_site(file, &sites[s]);
        fprintf(file, "%llu\n", (unsigned long long)sites[s].launches);
    }
    for (size_t s = 0; s < sites_count && options.in_order; s++) {
        fprintf(file, "#site\t%zu\t", s);
        put_site(file, &sites[s]);
        fprintf(file, "%u\n", kernels[sites[s].kernel].size);
    }
    for (size_t i = 0; i < executions_count; i++)
        fprintf(file, "#execution\t%llu\t%u\t%llu\t%llu\t%llu\n", (unsigned long long)executions[i].number, executions[i].site,
                (unsigned long long)executions[i].launched, (unsigned long long)executions[i].begin,
                (unsigned long long)executions[i].end);
    if (fclose(file) || renameat(dir_fd, "ledger.tsv.new", dir_fd, "ledger.tsv"))
        return errno;
    return 0;
}

/* ---- messages ---- */

static int obey(const struct standin_fault *fault)
{
    bool of_one = fault->code == STANDIN_FAULT_UNPLUG || fault->code == STANDIN_FAULT_PLUG;
    if (fault->card >= (int)cards_count || (of_one && fault->card < 0))
        return EINVAL;
    now_ns = clock_ns();
    switch (fault->code) {
    case STANDIN_FAULT_RESET:
        reset(fault->card);
        return 0;
    case STANDIN_FAULT_FLOOD:
        if (!fault->duration_ns)
            return EINVAL;
        options.flood.records = (double)fault->records;
        options.flood.duration = fault->duration_ns;
        options.flood.produced = 0;
        options.flood.elapsed = 0;
        options.flood.wanted = fault->records > 0;
        return 0;
    case STANDIN_FAULT_LEDGER:
        return write_ledger();
    case STANDIN_FAULT_UNPLUG:
        unplug(fault->card);
        return 0;
    case STANDIN_FAULT_PLUG:
        if (!shared->plugged[fault->card])
            shared->plugged[fault->card] = (uint32_t)fault->records;
        return 0;
    case STANDIN_FAULT_FREEZE:
        freeze(fault->card);
        return 0;
    case STANDIN_FAULT_THAW:
        thaw(fault->card);
        return 0;
    case STANDIN_FAULT_OVERFLOW:
        if (!fault->drops)
            return EINVAL;
        overfill.left = fault->records;
        overfill.period = fault->duration_ns;
        overfill.drops = fault->drops;
        overfill.next = now_ns;
        return 0;
    default:
        return EINVAL;
    }
}

static void answer_fault(int fd, const void *message, size_t size)
{
    struct standin_fault fault = {.card = -1};
    memcpy(&fault, message, size < sizeof(fault) ? size : sizeof(fault));
    fault.code = (uint32_t)obey(&fault);
    send_reply(fd, &fault, 2 * sizeof(uint32_t), -1);
}

/* A launch that was cut short after its stack's end is whole: the rest of the array carries nothing. */
static void handle(struct client *client, char *message, size_t size)
{
    uint32_t type = 0;
    if (size >= sizeof(type))
        memcpy(&type, message, sizeof(type));
    if (type == STANDIN_MSG_KERNEL && size >= offsetof(struct standin_kernel, offsets)) {
        struct standin_kernel *kernel = (void *)message;
        kernel->name[sizeof(kernel->name) - 1] = 0;
        if (kernel->instructions && size - offsetof(struct standin_kernel, offsets) >= kernel->instructions * sizeof(uint32_t))
            add_kernel(kernel->pid, kernel->address, kernel->size, kernel->name, kernel->offsets, kernel->instructions);
        else
            fprintf(stderr, "standin-gpu: a kernel's message of %zu bytes is too short for it\n", size);
    } else if (type == STANDIN_MSG_LAUNCH && size > offsetof(struct standin_launch, stack)) {
        struct standin_launch launch = {0};
        memcpy(&launch, message, size < sizeof(launch) ? size : sizeof(launch));
        launch.stack[sizeof(launch.stack) - 1] = 0;
        add_launch(client, &launch);
    } else if (type == STANDIN_MSG_SYNC) {
        client->waits = true;
        client->for_all = size >= 8 && message[4];
        client->settled = false;
    } else if (type == STANDIN_MSG_DRIVER && size == sizeof(struct standin_driver)) {
        answer_driver(client->fd, (void *)message);
    } else if (type == STANDIN_MSG_FAULT && size >= offsetof(struct standin_fault, card)) {
        answer_fault(client->fd, message, size);
    } else {
        fprintf(stderr, "standin-gpu: a message of type %u and %zu bytes makes no sense\n", type, size);
    }
}

static bool queued(const struct process *process)
{
    for (size_t i = 0; i < launches_count; i++)
        if (!process || &processes[launches[i].process] == process)
            return true;
    return false;
}

/* With --in-order a process goes on as soon as its launches have executed, as with real hardware; else when their records are visible,
 * too, so that nothing of them is lost if the recorder ends then.
 *
 * A runtime waits for what its process launched, also over other connections: those may still hold messages that were sent before,
 * so what to wait for is decided one round after the question. Who launched nothing (a test that looks on) waits for everything. */
static void answer_syncs(void)
{
    for (size_t i = 0; i < clients_count; i++) {
        struct client *client = clients[i];
        struct process *process = client->for_all ? NULL : find_process(client->pid);
        if (!client->waits)
            continue;
        if (options.in_order && queued(process)) { /* how long that takes, nobody knows */
            client->settled = false;
            continue;
        }
        if (!client->settled) {
            client->settled = true;
            client->until = process ? process->end : options.flood.done;
            for (size_t p = 0; !process && p < processes_count; p++)
                if (processes[p].end > client->until)
                    client->until = processes[p].end;
            continue;
        }
        bool done = now_ns >= client->until;
        if (!process && (options.flood.wanted || overfill.left || options.flood.done > client->until)) {
            client->until = options.flood.done;
            done = false;
        }
        for (uint32_t g = 0; done && g < options.mains && !(options.in_order && process); g++)
            done = !frozen(g) && (!gts[g].enabled || gts[g].reset || gts[g].last_poll >= client->until);
        if (done) {
            struct standin_sync sync = {STANDIN_MSG_SYNC};
            send_reply(client->fd, &sync, sizeof(sync), -1);
            client->waits = false;
        }
    }
}

static void drop_client(struct client *client)
{
    for (size_t i = 0; i < clients_count; i++)
        if (clients[i] == client)
            clients[i] = clients[--clients_count];
    close(client->fd);
    free(client);
}

static void drain_client(struct client *client)
{
    static _Alignas(8) char message[1 << 20];
    ssize_t size;
    while ((size = recv(client->fd, message, sizeof(message), MSG_DONTWAIT)) > 0)
        handle(client, message, (size_t)size);
    if (size == 0 || (errno != EAGAIN && errno != EINTR))
        drop_client(client);
}

static void accept_clients(void)
{
    int fd;
    while ((fd = accept4(listen_fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK)) >= 0) {
        struct client *client = must(calloc(1, sizeof(*client)));
        struct ucred peer = {0};
        socklen_t length = sizeof(peer);
        getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &length);
        client->fd = fd;
        client->pid = peer.pid;
        ROOM(clients, 1);
        clients[clients_count++] = client;
        struct epoll_event event = {.events = EPOLLIN, .data.ptr = client};
        check(epoll_ctl(epoll_fd, EPOLL_CTL_ADD, fd, &event) == 0, "epoll");
    }
}

/* The clock ticks only while something can happen: an idle GPU costs nothing. */
static void set_timer(void)
{
    static bool running;
    bool wanted = launches_count > 0 || overfill.left;
    for (uint32_t g = 0; g < options.mains; g++)
        wanted |= gts[g].enabled;
    for (size_t i = 0; i < clients_count; i++)
        wanted |= clients[i]->waits;
    if (wanted == running)
        return;
    struct itimerspec t = {.it_interval.tv_nsec = wanted ? STEP : 0, .it_value.tv_nsec = wanted ? STEP : 0};
    timerfd_settime(timer_fd, 0, &t, NULL);
    running = wanted;
    stepped_ns = clock_ns();
}

static void run(void)
{
    for (;;) {
        struct epoll_event events[64];
        int count = epoll_wait(epoll_fd, events, 64, -1);
        for (int i = 0; i < count; i++) {
            uint64_t tag = events[i].data.u64, value;
            if (tag == 0) {
                accept_clients();
            } else if (tag <= STANDIN_MAX_STREAMS) {
                if (gts[tag - 1].open && abandoned(&gts[tag - 1]))
                    close_stream((uint32_t)tag - 1);
            } else if (tag == STANDIN_MAX_STREAMS + 1) {
                (void)!read(timer_fd, &value, sizeof(value));
            } else if (tag == STANDIN_MAX_STREAMS + 2) {
                struct signalfd_siginfo info;
                if (read(signal_fd, &info, sizeof(info)) != sizeof(info))
                    continue;
                if (info.ssi_signo != SIGUSR1)
                    return;
                reset(-1);
            } else {
                drain_client(events[i].data.ptr);
            }
        }
        now_ns = clock_ns();
        if (now_ns - stepped_ns >= STEP) {
            step();
            overflow_when_due();
            for (uint32_t g = 0; g < options.mains; g++)
                poll_buffers(g);
            answer_syncs();
        }
        set_timer();
    }
}

/* ---- the start ---- */

static const struct layout *find_layout(const char *name)
{
    for (size_t l = 0; l < LAYOUTS; l++)
        if (!strcmp(layouts[l].name, name))
            return &layouts[l];
    return NULL;
}

static void refuse(void)
{
    fprintf(stderr, "standin-gpu: a device, a layout or a number that there is not\n");
    exit(2);
}

static void add_card(const char *name, int mains)
{
    const struct device *d = devices;
    while (d < devices + sizeof(devices) / sizeof(*devices) && strcmp(d->name, name))
        d++;
    if (d == devices + sizeof(devices) / sizeof(*devices) || cards_count == STANDIN_MAX_CARDS)
        refuse();
    struct standin_device *card = &cards[cards_count];
    uint32_t tiles = mains > 0 ? (uint32_t)mains : d->gts;
    /* Every main GT needs its place in the lists, and where there are media GTs they take half of the card's. */
    if (tiles > (d->media ? STANDIN_MAX_GTS / 2 : STANDIN_MAX_GTS) || options.mains + tiles > STANDIN_MAX_STREAMS)
        refuse();
    *card = (struct standin_device){.device_id = d->id, .va_bits = d->va_bits, .has_vram = d->vram, .mains = tiles,
                                    .reference_clock = d->reference_clock, .first = options.mains,
                                    .xecores = options.xecores};
    snprintf(card->name, sizeof(card->name), "%s", d->name);
    for (uint32_t tile = 0; tile < tiles; tile++) {
        uint16_t id = (uint16_t)card->gts, t = (uint16_t)tile;
        card->gt[card->gts++] = (struct standin_gt){0, t, id, d->major, d->minor, 0};
        if (d->media)
            card->gt[card->gts++] = (struct standin_gt){1, t, (uint16_t)(id + 1), d->media, d->media_minor, 0};
        gts[options.mains].layout = options.layout ? options.layout : find_layout(d->layout);
        gts[options.mains++].card = cards_count;
    }
    cards_count++;
}

static void read_options(int argc, char **argv)
{
    const char *chosen[STANDIN_MAX_CARDS] = {"bmg"};
    int mains = 0, wanted = 0;
    for (int i = 2; i < argc; i++) {
        const char *value = i + 1 < argc ? argv[i + 1] : "";
        if (!strcmp(argv[i], "--with-parent")) {
            options.with_parent = true;
            continue;
        }
        if (!strcmp(argv[i], "--in-order")) {
            options.in_order = true;
            continue;
        }
        if (!strcmp(argv[i], "--flood") && i + 2 < argc) {
            options.flood.records = atof(value);
            options.flood.duration = (uint64_t)(atof(argv[i + 2]) * 1e9);
            options.flood.wanted = options.flood.duration > 0;
            i += 2;
            continue;
        }
        if (!strcmp(argv[i], "--device")) {
            if (wanted == STANDIN_MAX_CARDS)
                refuse();
            chosen[wanted++] = value;
        } else if (!strcmp(argv[i], "--unplugged"))
            options.unplugged |= 1u << (atoi(value) & 31);
        else if (!strcmp(argv[i], "--xecores"))
            options.xecores = (uint32_t)atoi(value);
        else if (!strcmp(argv[i], "--gts"))
            mains = atoi(value);
        else if (!strcmp(argv[i], "--rate"))
            options.rate = atof(value);
        else if (!strcmp(argv[i], "--zipf"))
            options.zipf = atof(value);
        else if (!strcmp(argv[i], "--saturated"))
            options.saturated = atof(value);
        else if (!strcmp(argv[i], "--seed"))
            options.seed = strtoull(value, NULL, 0);
        else if (!strcmp(argv[i], "--layout")) {
            options.layout = find_layout(value);
            if (!options.layout)
                refuse();
        } else {
            fprintf(stderr, "standin-gpu: no such option: %s\n", argv[i]);
            exit(2);
        }
        i++;
    }
    if (options.xecores < 1 || options.xecores > STANDIN_MAX_XECORES)
        refuse();
    for (int i = 0; i == 0 || i < wanted; i++)
        add_card(chosen[i], mains);
    random_state = mix(options.seed);
}

static void make_shared_memory(void)
{
    uint64_t head = (sizeof(*shared) + 4095) & ~4095ull;
    uint64_t size = head + (uint64_t)options.mains * options.xecores * STANDIN_XECORE_BYTES;
    pthread_mutexattr_t attributes;
    shared_fd = memfd_create("standin-xe", MFD_CLOEXEC);
    check(shared_fd >= 0 && ftruncate(shared_fd, (off_t)size) == 0, "shared memory");
    shared = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, shared_fd, 0);
    check(shared != MAP_FAILED, "shared memory");
    shared->data_offset = head;
    shared->size = size;
    for (uint32_t c = 0; c < cards_count; c++)
        shared->plugged[c] = !(options.unplugged >> c & 1);
    pthread_mutexattr_init(&attributes);
    pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
    pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST);
    for (uint32_t g = 0; g < options.mains; g++) {
        pthread_mutex_init(&shared->streams[g].lock, &attributes);
        gts[g].owner = must(calloc((size_t)options.xecores * SLOTS, sizeof(uint32_t)));
        for (int x = 0; x < STANDIN_MAX_XECORES; x++)
            gts[g].overflow[x] = -1;
    }
}

/* The folder's path may be longer than a socket's address: it is reached through its descriptor. */
static void listen_in(const char *dir)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    dir_fd = open(dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    check(dir_fd >= 0, dir);
    unlinkat(dir_fd, "gpu.sock", 0);
    snprintf(address.sun_path, sizeof(address.sun_path), "/proc/self/fd/%d/gpu.sock", dir_fd);
    listen_fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    check(listen_fd >= 0 && bind(listen_fd, (struct sockaddr *)&address, sizeof(address)) == 0 && listen(listen_fd, 256) == 0,
          "gpu.sock");
    /* the profiled program may belong to another user */
    check(fchmodat(dir_fd, "gpu.sock", 0666, 0) == 0, "gpu.sock");
}

static void watch(int fd, uint64_t tag)
{
    struct epoll_event event = {.events = EPOLLIN, .data.u64 = tag};
    check(fd >= 0 && epoll_ctl(epoll_fd, EPOLL_CTL_ADD, fd, &event) == 0, "epoll");
}

int main(int argc, char **argv)
{
    if (argc < 2 || argv[1][0] == '-') {
        fprintf(stderr, "usage: standin-gpu DIR [options]\n");
        return 2;
    }
    read_options(argc, argv);
    if (options.with_parent) {
        pid_t parent = getppid();
        prctl(PR_SET_PDEATHSIG, SIGTERM);
        if (getppid() != parent)
            return 1;
    }
    signal(SIGPIPE, SIG_IGN);
    setpriority(PRIO_PROCESS, 0, -15); /* hardware does not wait for a CPU; without the right to it, so be it */
    for (size_t l = 0; l < LAYOUTS; l++)
        for (uint32_t g = 0, made = 0; g < options.mains && !made; g++)
            if (gts[g].layout == &layouts[l]) {
                make_patterns(&layouts[l]);
                made = 1;
            }
    make_shared_memory();
    listen_in(argv[1]);

    sigset_t signals;
    sigemptyset(&signals);
    sigaddset(&signals, SIGTERM);
    sigaddset(&signals, SIGINT);
    sigaddset(&signals, SIGUSR1);
    sigprocmask(SIG_BLOCK, &signals, NULL);
    epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    timer_fd = timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK);
    signal_fd = signalfd(-1, &signals, SFD_CLOEXEC | SFD_NONBLOCK);
    watch(listen_fd, 0);
    watch(timer_fd, STANDIN_MAX_STREAMS + 1);
    watch(signal_fd, STANDIN_MAX_STREAMS + 2);
    stepped_ns = clock_ns();
    puts("ready");
    fflush(stdout);
    run();
    for (uint32_t g = 0; g < options.mains; g++)
        close_stream(g);
    unlinkat(dir_fd, "gpu.sock", 0);
    int error = write_ledger();
    if (error)
        fprintf(stderr, "standin-gpu: ledger.tsv: %s\n", strerror(error));
    return error != 0;
}
