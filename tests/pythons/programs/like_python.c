// SPDX-License-Identifier: Apache-2.0
// A process that says it is CPython 3.14, and may lie: like_python ELF KERNEL MODE TIMES START
// It begins when there is a file START, and launches so many times.
#include <pthread.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "one_kernel.h"

enum { MANY = 1000000, FEW = 200, TABLE_BYTES = 200000 };
enum { FUNCTION, OF_C = 3 }; // owners of frames

struct type {
    long unused;
};
struct text {
    long references;
    struct type *type;
    int64_t length;
    uint32_t hash[2], state, unused;
    char characters[64];
};
struct bytes {
    long references;
    struct type *type;
    int64_t length, hash;
    unsigned char content[TABLE_BYTES];
};
struct code {
    long references, unused[7];
    int32_t unused2, first_line, unused3[5], version, unused4[4];
    struct text *filename, *name, *qualname;
    struct bytes *table;
    long unused5[8];
    char instructions[64];
};
struct frame {
    struct code *code;
    struct frame *previous;
    long unused[5];
    char *instruction;
    char unused2[10], owner, unused3[5];
};
struct thread {
    struct thread *previous, *next;
    struct frame *frame;
    unsigned long id;
    long unused[4];
};
struct interpreter {
    struct interpreter *next;
    struct thread *threads;
    long unused[6];
};

static struct thread own, other;
static struct interpreter interpreter = {.threads = &own};
struct type PyUnicode_Type, PyBytes_Type;
const unsigned long Py_Version = 0x030E0AF0;
// What _Py_DebugOffsets of 3.14 says, by its place divided by 8: sizes of structures, and where members are.
struct {
    long published[100];
    struct interpreter *interpreters;
} _PyRuntime = {{
    [0] = 0x7970677562656478, [1] = 0x030E0AF0, [3] = 808, [5] = 800, [6] = sizeof(struct interpreter), [8] = 0, [9] = 8,
    [22] = sizeof(struct thread), [24] = 8, [26] = 16, [27] = 24,
    [31] = sizeof(struct frame), [32] = 8, [33] = 0, [34] = 56, [36] = 74,
    [39] = sizeof(struct code), [40] = 112, [41] = 120, [42] = 128, [43] = 136, [44] = 68, [48] = 208,
    [74] = 33, [75] = 16, [76] = 32, [77] = 64, [78] = 32, [79] = 16, [80] = 40,
}, &interpreter};

static struct code codes[2];
static struct frame *frames;
static struct text names[2] = {{.type = &PyUnicode_Type, .length = 5, .state = 1 << 2 | 3 << 5, .characters = "inner"},
                               {.type = &PyUnicode_Type, .length = 5, .state = 1 << 2 | 3 << 5, .characters = "outer"}};
static struct text file = {.type = &PyUnicode_Type, .length = 8, .state = 1 << 2 | 3 << 5, .characters = "/fake.py"};
static struct bytes table = {.type = &PyBytes_Type, .length = 2, .content = {0xff, 0x80}};
static ze_kernel_handle_t kernel;
static const char *mode;
static volatile int is_over;
static volatile unsigned changes;

static int is(const char *wanted)
{
    return !strcmp(mode, wanted);
}

static void make_frames(void)
{
    int count = is("million") ? MANY : FEW;
    frames = calloc(count, sizeof(*frames));
    for (int i = 0; i < 2; i++) {
        codes[i].first_line = 10 * (i + 1);
        codes[i].version = i + 1;
        codes[i].filename = &file;
        codes[i].name = codes[i].qualname = &names[i];
        codes[i].table = &table;
    }
    for (int i = 0; i < count; i++) {
        frames[i].code = &codes[i % 2];
        frames[i].instruction = codes[i % 2].instructions;
        frames[i].previous = i + 1 < count ? &frames[i + 1] : NULL;
    }
    if (!is("million"))
        frames[1].previous = NULL;
    if (is("circle"))
        frames[1].previous = &frames[0];
    if (is("kernel"))
        frames[1].previous = (struct frame *)0xffffffff81000000;
    if (is("unmapped"))
        frames[1].previous = (struct frame *)0x10008;
    if (is("odd"))
        frames[1].previous = (struct frame *)((char *)&frames[2] + 1);
    if (is("no code"))
        codes[1].filename = (struct text *)0x10;
    if (is("wrong type"))
        names[1].type = &PyBytes_Type;
    if (is("wrong table"))
        table.type = &PyUnicode_Type;
    if (is("endless text"))
        names[1].length = 1L << 61;
    if (is("long table"))
        table.length = 1L << 40;
    if (is("negative"))
        table.length = -1;
}

static void *change(void *unused)
{
    static struct text *const texts[] = {&names[0], &names[1], (struct text *)0x10, NULL};
    for (unsigned i = 0; !is_over; i++) {
        codes[1].qualname = texts[i % 4];
        codes[1].version++;
        frames[1].previous = i & 1 ? &frames[0] : i & 2 ? (struct frame *)~0UL : NULL;
        own.frame = i & 8 ? &frames[i % 100] : (struct frame *)&codes;
        names[1].length = i * 7919L;
        _PyRuntime.interpreters = i & 16 ? &interpreter : (struct interpreter *)&_PyRuntime;
        changes = i + 1;
        __asm__ volatile("" ::: "memory"); // or the compiler writes all of it once, behind the loop
    }
    return unused;
}

// One evaluation loop: what ends its frames lies here.
static __attribute__((noinline)) void evaluate(void)
{
    const ze_group_count_t groups = {1, 1, 1};
    struct frame end = {.owner = OF_C};
    if (!frames[1].previous)
        frames[1].previous = &end;
    zeCommandListAppendLaunchKernel(NULL, kernel, &groups, NULL, 0, NULL);
    if (frames[1].previous == &end)
        frames[1].previous = NULL;
    __asm__ volatile("" ::"r"(&end) : "memory");
}

int main(int argc, char **argv)
{
    ze_module_handle_t module;
    pthread_t changing;
    if (argc != 6 || make_kernel(argv[1], argv[2], &module, &kernel))
        return 1;
    mode = argv[3];
    zexStandinSetLaunch("launch", 0, 1000);
    own.id = pthread_self();
    make_frames();
    own.frame = frames;
    if (is("circle of threads")) {
        interpreter.threads = other.next = &other;
        other.id = 1;
    }
    if (is("circle of interpreters")) {
        interpreter.next = &interpreter;
        interpreter.threads = NULL;
    }
    while (access(argv[5], F_OK))
        usleep(10000);
    usleep(100000); // a CPU sample may have come before there was a state: none is looked for in the next 20 ms
    if (is("changing"))
        pthread_create(&changing, NULL, change, NULL);
    for (int i = atoi(argv[4]); i; i--) {
        // On a busy machine one thread may do all of its work before the other gets to run.
        for (unsigned before = changes; is("changing") && i % 100 == 0 && changes == before;)
            sched_yield();
        evaluate();
    }
    is_over = 1;
    if (is("changing"))
        pthread_join(changing, NULL);
    unlink(argv[5]); // says that it is over, and stays: the recorder may have to read its code yet
    for (;;)
        pause();
}
