// SPDX-License-Identifier: Apache-2.0
/* Recognises launches whose stack is known, so that they need not enter the kernel.
 *
 * A stack is the result of a walk, and the walk depends on nothing but the words of memory that it reads: return addresses, the
 * frame pointers that it uses, and the frames of Python. With the first launch on a path, the library asks which ones these were.
 * The recorder answers in memory that both share (record/sources/launch_paths.py), with the words' addresses and values. A launch
 * from the same frame, of the same kernel, in the same thread, with the same words, has the same stack: of it, only the time and
 * CUPTI's number are kept, and sent with those of others.
 *
 * The words are compared in the order in which the walk has read them, up to the first difference. So each address comes from words
 * that have just been found to be what they were: the walk would read it now, and it is mapped.
 *
 * Once in PROVE_NS, a launch on each path raises the probe all the same. Code objects of Python that have come to the place of
 * others are found then, as without this. */
#define _GNU_SOURCE
#include "inject_cuda_paths.h"

#include <dlfcn.h>
#include <errno.h>
#include <link.h>
#include <pthread.h>
#include <sched.h>
#include <stddef.h>
#include <stdlib.h>
#include <sys/auxv.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define MOST_THREADS 32
#define MOST_PATHS 1024 /* of a thread */
#define BUCKETS 256
#define MOST_ALIKE 64 /* paths with the same frame and kernel */
#define MOST_ROWS 65536 /* that were not sent yet, of a thread; a power of two */
#define SLOT_BYTES 8192
#define MOST_WORDS ((SLOT_BYTES - 32) / 16)
#define PROVE_NS 1000000000
#define ASK_NS 20000000     /* after this time, what was not answered is asked again; twice as long each time, */
#define MOST_ASK_NS PROVE_NS /* but not longer than this */
#define IDLE_NS 10000000000 /* a path without launches for this time makes room for another one */

/* --- shared memory: record/sources/launch_paths.py has the same layout */

struct slot {
    uint64_t path;  /* whose words these are: written last */
    uint64_t state; /* of Python, of the thread; 0 for none */
    uint64_t count;
    uint64_t knows_python; /* 1: the recorder knew where the process has its frames of Python, if it is Python */
    struct {
        const uint64_t *address;
        uint64_t value;
    } words[MOST_WORDS];
};
struct shared_thread {
    uint64_t head; /* number of rows so far */
    uint8_t unused[4096 - 8];
    struct path_row rows[MOST_ROWS];
    struct slot slots[MOST_PATHS];
};
struct shared {
    /* From the recorder: */
    uint64_t epoch; /* of the output file: with a new one, every path is unproven */
    uint64_t python; /* where a thread's state of Python has its frames; 0: unknown. See has_frames() */
    uint8_t unused[4096 - 16];
    struct shared_thread threads[MOST_THREADS];
};
_Static_assert(sizeof(struct slot) == SLOT_BYTES && sizeof(struct path_row) == 24, "launch_paths.py");

static struct shared *shared; /* NULL: there is none */
static uint64_t inode;
static uint32_t descriptor;

/* --- threads and their paths */

struct path {
    struct path_asked asked;
    const void *frame, *kernel;
    uint64_t proven_ns, used_ns, epoch; /* the last launches that raised the probe, and all; see struct shared */
    uint64_t wait_ns;                   /* for an answer */
    struct path *next;  /* of its bucket */
    struct path *after; /* which the thread's next launch was on, the last time */
};
struct thread {
    struct shared_thread *shared;
    uint64_t sent;  /* number of rows */
    bool is_taken, is_over;
    uint64_t unloads;
    uint32_t paths, oldest; /* number of paths; which one is looked at next if there is no room */
    struct path *last;
    struct path *buckets[BUCKETS];
    struct path path[MOST_PATHS];
};
static pthread_mutex_t joining = PTHREAD_MUTEX_INITIALIZER;
static struct thread *threads[MOST_THREADS];
static unsigned thread_count; /* with `joining`; it only grows */
static __thread struct thread *own;
static __thread bool has_none; /* there was no room for this thread, or it ends */
static pthread_key_t ends;
static uint32_t paths;    /* number of the last one */
static uint64_t unloads;  /* how often the dynamic linker has unmapped libraries */
static bool is_over;
static void *(*python_state)(void); /* the state of the current thread; NULL: unknown */

static uint64_t now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1000000000ULL + time.tv_nsec;
}

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

/* Takes memory for whole pages; false if there is none, where touching them would end the program. Before Linux 5.14 that cannot
 * be known. */
static bool has_room(void *pages, size_t bytes)
{
    int before = errno; /* the program's */
    bool found = !madvise(pages, bytes, MADV_POPULATE_WRITE) || errno == EINVAL;
    errno = before;
    return found;
}

static void on_thread_end(void *thread)
{
    own = NULL;
    has_none = true;
    __atomic_store_n(&((struct thread *)thread)->is_over, true, __ATOMIC_RELEASE);
}

void paths_begin(void)
{
    struct stat about;
    struct rlimit most;
    if (getrlimit(RLIMIT_FSIZE, &most) || most.rlim_cur < sizeof *shared) /* a signal would end the program */
        return;
    int fd = memfd_create("iaprof", MFD_CLOEXEC);
    if (fd < 0)
        return;
    if (ftruncate(fd, sizeof *shared) || fstat(fd, &about) || pthread_key_create(&ends, on_thread_end)) {
        close(fd);
        return;
    }
    void *memory = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
    if (memory == MAP_FAILED) {
        close(fd);
        return;
    }
    madvise(memory, sizeof *shared, MADV_DONTFORK);
    madvise(memory, sizeof *shared, MADV_DONTDUMP);
    descriptor = fd;
    inode = about.st_ino;
    __atomic_store_n(&shared, memory, __ATOMIC_RELEASE);
}

/* Gives the current thread room for its paths; NULL if there is none. */
static struct thread *join(void)
{
    struct thread *found = NULL;
    pthread_mutex_lock(&joining);
    for (unsigned i = 0; i < thread_count && !found; i++)
        if (!__atomic_load_n(&threads[i]->is_taken, __ATOMIC_ACQUIRE))
            found = threads[i];
    if (!found && thread_count < MOST_THREADS && has_room(&shared->threads[thread_count], offsetof(struct shared_thread, slots)) &&
        (found = calloc(1, sizeof *found))) {
        found->shared = &shared->threads[thread_count];
        __atomic_store_n(&threads[thread_count], found, __ATOMIC_RELEASE);
        __atomic_store_n(&thread_count, thread_count + 1, __ATOMIC_RELEASE);
    }
    if (found && pthread_setspecific(ends, found))
        found = NULL;
    if (found) {
        found->paths = 0;
        found->unloads = ~0ULL;
        found->is_over = false;
        __atomic_store_n(&found->is_taken, true, __ATOMIC_RELEASE);
    }
    pthread_mutex_unlock(&joining);
    own = found;
    has_none = !found;
    return found;
}

static void forget_all(struct thread *thread, uint64_t after)
{
    thread->unloads = after;
    thread->paths = thread->oldest = 0;
    thread->last = NULL;
    for (unsigned i = 0; i < BUCKETS; i++)
        thread->buckets[i] = NULL;
}

static struct slot *slot_of(const struct thread *thread, const struct path *path)
{
    return &thread->shared->slots[path - thread->path];
}

static struct path **bucket_of(struct thread *thread, const void *frame, const void *kernel)
{
    uint64_t hash = ((uintptr_t)frame ^ (uintptr_t)kernel << 8) * 0x9e3779b97f4a7c15ULL;
    return &thread->buckets[hash >> 56];
}

/* Whether a thread with this state of Python runs Python code: whether its pointer to the innermost frame is not 0. In Python 3.11
 * and 3.12 that is in a structure to which the state points. */
static bool has_frames(uint64_t state)
{
    uint64_t layout = __atomic_load_n(&shared->python, __ATOMIC_RELAXED);
    uint16_t frame = layout, cframe = layout >> 16;
    if (layout && cframe && !(state = *(const uint64_t *)(state + cframe)))
        return false;
    return !layout || *(const uint64_t *)(state + frame);
}

static bool is_from(const struct path *path, const void *frame, const void *kernel)
{
    return path->frame == frame && path->kernel == kernel;
}

static bool is_answered(const struct thread *thread, const struct path *path)
{
    /* Where there was no room to ask, the slot is not even read: that would take memory, too. */
    return path->asked.path && __atomic_load_n(&slot_of(thread, path)->path, __ATOMIC_ACQUIRE) == path->asked.path;
}

/* Whether a launch from the path's frame would have its stack. */
static bool is_on(const struct thread *thread, const struct path *path, uint64_t state)
{
    const struct slot *slot = slot_of(thread, path);
    if (!is_answered(thread, path) || slot->state != state || slot->count > MOST_WORDS)
        return false;
    for (uint64_t i = 0; i < slot->count; i++)
        if (*slot->words[i].address != slot->words[i].value)
            return false;
    return true;
}

/* Returns the path that a launch is on, and makes it the first of its bucket; NULL if none is known. */
static struct path *find(struct thread *thread, const void *frame, const void *kernel, uint64_t state)
{
    struct path *found = thread->last ? thread->last->after : NULL;
    if (found && is_from(found, frame, kernel) && is_on(thread, found, state))
        return found;
    struct path **bucket = bucket_of(thread, frame, kernel), **at = bucket;
    unsigned alike = 0;
    for (; (found = *at) && alike < MOST_ALIKE; at = &found->next) {
        if (!is_from(found, frame, kernel))
            continue;
        alike++;
        if (is_on(thread, found, state)) {
            *at = found->next;
            found->next = *bucket;
            *bucket = found;
            return found;
        }
    }
    return NULL;
}

/* Returns a path that nothing is known of; NULL if there is no room. */
static struct path *take_path(struct thread *thread, uint64_t time)
{
    if (thread->paths < MOST_PATHS)
        return &thread->path[thread->paths++];
    struct path *found = &thread->path[thread->oldest++ % MOST_PATHS];
    if (time - found->used_ns < IDLE_NS)
        return NULL;
    struct path **at = bucket_of(thread, found->frame, found->kernel);
    while (*at && *at != found)
        at = &(*at)->next;
    if (*at)
        *at = found->next;
    return found;
}

/* Returns a number that no path has had, neither in this program nor in one that the process was before: those began earlier. */
static uint32_t new_number(uint64_t time)
{
    uint32_t before = 0, number;
    __atomic_compare_exchange_n(&paths, &before, (uint32_t)(time >> 14) | 1, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
    do
        number = __atomic_add_fetch(&paths, 1, __ATOMIC_RELAXED);
    while (!number);
    return number;
}

/* Returns what the probe of a launch on an unknown path asks; NULL if it has been asked, or there is no room. */
static const struct path_asked *ask(struct thread *thread, const void *frame, const void *kernel, uint64_t time)
{
    struct path **bucket = bucket_of(thread, frame, kernel), *path = *bucket;
    unsigned alike = 0;
    for (; path; path = path->next)
        if (is_from(path, frame, kernel) && (++alike == MOST_ALIKE || !is_answered(thread, path)))
            break;
    if (path && (is_answered(thread, path) || time - path->proven_ns < path->wait_ns))
        return NULL;
    if (!path) {
        if (!(path = take_path(thread, time)))
            return NULL;
        *path = (struct path){.frame = frame, .kernel = kernel, .next = *bucket, .wait_ns = ASK_NS / 2};
        *bucket = path;
    }
    if (!has_room(slot_of(thread, path), SLOT_BYTES))
        return NULL;
    path->wait_ns = path->wait_ns < MOST_ASK_NS / 2 ? 2 * path->wait_ns : MOST_ASK_NS;
    path->proven_ns = path->used_ns = time;
    path->epoch = __atomic_load_n(&shared->epoch, __ATOMIC_ACQUIRE);
    path->asked = (struct path_asked){
        .path = new_number(time),
        .offset = (const char *)slot_of(thread, path) - (const char *)shared,
        .inode = inode,
        .descriptor = descriptor,
    };
    return &path->asked;
}

/* Keeps the row of a launch; false if there is no room. */
static bool keep_row(struct thread *thread, uint64_t time, uint32_t path, uint32_t correlation)
{
    struct shared_thread *to = thread->shared;
    uint64_t head = to->head;
    if (head - __atomic_load_n(&thread->sent, __ATOMIC_ACQUIRE) >= MOST_ROWS)
        return false;
    to->rows[head % MOST_ROWS] = (struct path_row){time, path, correlation, sched_getcpu(), 0};
    __atomic_store_n(&to->head, head + 1, __ATOMIC_RELEASE);
    return true;
}

bool paths_have(const void *frame, const void *kernel, uint32_t correlation, const struct path_asked **asked)
{
    struct thread *thread = own;
    *asked = NULL;
    if (!__atomic_load_n(&shared, __ATOMIC_ACQUIRE) || __atomic_load_n(&is_over, __ATOMIC_ACQUIRE) || has_none ||
        (!thread && !(thread = join())))
        return false;
    uint64_t after = __atomic_load_n(&unloads, __ATOMIC_ACQUIRE);
    if (thread->unloads != after)
        forget_all(thread, after);
    void *(*state_of_thread)(void) = __atomic_load_n(&python_state, __ATOMIC_ACQUIRE);
    if (!state_of_thread && __atomic_load_n(&shared->python, __ATOMIC_RELAXED)) /* it is in a library that dlsym() does not see */
        return false;
    uint64_t state = state_of_thread ? (uintptr_t)state_of_thread() : 0, time = now();
    if (state && !has_frames(state))
        state = 0;
    struct path *path = find(thread, frame, kernel, state);
    if (!path) {
        *asked = ask(thread, frame, kernel, time);
        thread->last = NULL;
        return false;
    }
    if (thread->last)
        thread->last->after = path;
    thread->last = path;
    path->used_ns = time;
    uint64_t epoch = __atomic_load_n(&shared->epoch, __ATOMIC_ACQUIRE);
    if (time - path->proven_ns < PROVE_NS && path->epoch == epoch && keep_row(thread, time, path->asked.path, correlation))
        return true;
    path->proven_ns = time;
    path->epoch = epoch;
    path->asked.is_known = slot_of(thread, path)->knows_python ? KNOWN_WITH_PYTHON : KNOWN;
    *asked = &path->asked;
    return false;
}

static int note_unloads(struct dl_phdr_info *info, size_t bytes, void *unused)
{
    (void)unused;
    if (bytes >= offsetof(struct dl_phdr_info, dlpi_subs) + sizeof info->dlpi_subs)
        __atomic_store_n(&unloads, info->dlpi_subs, __ATOMIC_RELEASE);
    return 1; /* the number is the same for all libraries */
}

/* Finds Python's function, and keeps its library loaded. */
static void find_python(void)
{
    Dl_info of_function, of_program;
    void *found = dlsym(RTLD_DEFAULT, "PyGILState_GetThisThreadState");
    if (!found || !dladdr(found, &of_function) || !dladdr((void *)getauxval(AT_PHDR), &of_program))
        return;
    if (of_function.dli_fbase == of_program.dli_fbase || dlopen(of_function.dli_fname, RTLD_LAZY | RTLD_NOLOAD | RTLD_NODELETE))
        __atomic_store_n((void **)&python_state, found, __ATOMIC_RELEASE);
}

static void send_rows(struct thread *thread, uint32_t number, uint32_t most,
                      void (*send)(uint32_t, uint64_t, const struct path_row *, uint32_t))
{
    uint64_t head = __atomic_load_n(&thread->shared->head, __ATOMIC_ACQUIRE);
    while (thread->sent < head) {
        uint64_t first = thread->sent, many = head - first, at = first % MOST_ROWS;
        many = many < most ? many : most;
        many = many < MOST_ROWS - at ? many : MOST_ROWS - at;
        send(number, first, &thread->shared->rows[at], many);
        __atomic_store_n(&thread->sent, first + many, __ATOMIC_RELEASE);
    }
}

void paths_send(void (*send)(uint32_t thread, uint64_t first, const struct path_row *rows, uint32_t many), uint32_t most)
{
    if (!__atomic_load_n(&shared, __ATOMIC_ACQUIRE))
        return;
    dl_iterate_phdr(note_unloads, NULL);
    if (!python_state)
        find_python();
    unsigned many = __atomic_load_n(&thread_count, __ATOMIC_ACQUIRE);
    for (unsigned i = 0; i < many; i++) {
        struct thread *thread = threads[i];
        bool has_ended = __atomic_load_n(&thread->is_over, __ATOMIC_ACQUIRE);
        send_rows(thread, i, most, send);
        if (has_ended)
            __atomic_store_n(&thread->is_taken, false, __ATOMIC_RELEASE);
    }
}

void paths_end(void)
{
    __atomic_store_n(&is_over, true, __ATOMIC_RELEASE);
}
