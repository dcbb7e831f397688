/* SPDX-License-Identifier: Apache-2.0 */
/* prog WORD...: a program that uses CUDA as its words say, one after the other. It finds libcuda.so.1 as every program does.
 *
 *   init                              cuInit, device 0 (every word that needs it does this, too)
 *   device I, context, primary        another device; a context of its own, or the device's, becomes current
 *   use I                             the I-th context (from 0) becomes current
 *   destroy                           the current context
 *   load FILE                         a cubin becomes the current module
 *   library FILE                      a cubin as a library: launches use the library's handles
 *   module I                          the I-th module or library that was loaded (from 0) becomes current
 *   unload                            the current module (or library)
 *   how plain|ex|cooperative|ptsz|ex-ptsz     how launches are made from now on
 *   pace US                           between launches, from now on
 *   stream                            a new stream is used from now on (at first, the context's own)
 *   launch NAME PLACE COUNT US        launch a kernel from place A, B, C or D (functions of this program), each taking US
 *   fail NAME COUNT                   launches that the driver refuses
 *   threads T NAME PLACE COUNT US     the same from T threads, each with a stream of its own
 *   graph NAME K COUNT US             a graph of K kernels is made, and launched COUNT times from place D
 *   graph-of-all NAME COUNT US        the same, of the kernels with this name in all modules
 *   copy BYTES COUNT                  copies to the device, sets, and copies back
 *   sync                              wait for the current context
 *   sleep MS
 *   say TEXT                          print a line
 *   wait                              for a line of the standard input
 *   repeat N WORD... end              may contain another one
 *   fork N                            N children say what is left, and this process does, too; it waits for them at its end
 *   exec WORD...                      replace this process by another program
 *   dlopen PATH                       a library is loaded, and stays
 *   profile                           subscribe to CUPTI, as a profiler in the program would, and print "PID subscribe RESULT"
 *   ledger                            written now, and from then on whenever something is handed out
 *   stop CODE                         exit at once, by exit(3); "vanish" by _exit, "kill" by SIGKILL, "abort" by abort: these write
 *                                     the ledger before
 *
 * Prints "PID PLACE launches COUNT" for what it launched, at its end. SIGTERM and SIGINT: ends as if there were no more words. */
#define _GNU_SOURCE
#include "abi.h"

#include <dlfcn.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define LAUNCH_ARGUMENTS CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, CUstream, void **

static CUresult (*init)(unsigned);
static CUresult (*device_get)(CUdevice *, int);
static CUresult (*ctx_create)(CUcontext *, void *, unsigned, CUdevice);
static CUresult (*ctx_destroy)(CUcontext);
static CUresult (*ctx_set)(CUcontext);
static CUresult (*ctx_sync)(void);
static CUresult (*primary_retain)(CUcontext *, CUdevice);
static CUresult (*primary_release)(CUdevice);
static CUresult (*module_load)(CUmodule *, const void *);
static CUresult (*module_unload)(CUmodule);
static CUresult (*module_function)(CUfunction *, CUmodule, const char *);
static CUresult (*library_load)(CUlibrary *, const void *, void *, void **, unsigned, void *, void **, unsigned);
static CUresult (*library_unload)(CUlibrary);
static CUresult (*library_kernel)(CUkernel *, CUlibrary, const char *);
static CUresult (*stream_create)(CUstream *, unsigned);
static CUresult (*stream_destroy)(CUstream);
static CUresult (*begin_capture)(CUstream, int);
static CUresult (*end_capture)(CUstream, CUgraph *);
static CUresult (*instantiate)(CUgraphExec *, CUgraph, unsigned long long);
static CUresult (*graph_launch)(CUgraphExec, CUstream);
static CUresult (*exec_destroy)(CUgraphExec);
static CUresult (*graph_destroy)(CUgraph);
static CUresult (*mem_alloc)(CUdeviceptr *, size_t);
static CUresult (*mem_free)(CUdeviceptr);
static CUresult (*to_device)(CUdeviceptr, const void *, size_t);
static CUresult (*from_device)(void *, CUdeviceptr, size_t);
static CUresult (*set_device)(CUdeviceptr, unsigned char, size_t, CUstream);
static CUresult (*launch_plain)(LAUNCH_ARGUMENTS, void **);
static CUresult (*launch_ptsz)(LAUNCH_ARGUMENTS, void **);
static CUresult (*launch_cooperative)(LAUNCH_ARGUMENTS);
static CUresult (*launch_ex)(const CUlaunchConfig *, CUfunction, void **, void **);
static CUresult (*launch_ex_ptsz)(const CUlaunchConfig *, CUfunction, void **, void **);

static const struct {
    const char *name;
    void *function;
} functions[] = {
    {"cuInit", &init},
    {"cuDeviceGet", &device_get},
    {"cuCtxCreate_v4", &ctx_create},
    {"cuCtxDestroy_v2", &ctx_destroy},
    {"cuCtxSetCurrent", &ctx_set},
    {"cuCtxSynchronize", &ctx_sync},
    {"cuDevicePrimaryCtxRetain", &primary_retain},
    {"cuDevicePrimaryCtxRelease_v2", &primary_release},
    {"cuModuleLoadData", &module_load},
    {"cuModuleUnload", &module_unload},
    {"cuModuleGetFunction", &module_function},
    {"cuLibraryLoadData", &library_load},
    {"cuLibraryUnload", &library_unload},
    {"cuLibraryGetKernel", &library_kernel},
    {"cuStreamCreate", &stream_create},
    {"cuStreamDestroy_v2", &stream_destroy},
    {"cuStreamBeginCapture_v2", &begin_capture},
    {"cuStreamEndCapture", &end_capture},
    {"cuGraphInstantiateWithFlags", &instantiate},
    {"cuGraphLaunch", &graph_launch},
    {"cuGraphExecDestroy", &exec_destroy},
    {"cuGraphDestroy", &graph_destroy},
    {"cuMemAlloc_v2", &mem_alloc},
    {"cuMemFree_v2", &mem_free},
    {"cuMemcpyHtoD_v2", &to_device},
    {"cuMemcpyDtoH_v2", &from_device},
    {"cuMemsetD8Async", &set_device},
    {"cuLaunchKernel", &launch_plain},
    {"cuLaunchKernel_ptsz", &launch_ptsz},
    {"cuLaunchCooperativeKernel", &launch_cooperative},
    {"cuLaunchKernelEx", &launch_ex},
    {"cuLaunchKernelEx_ptsz", &launch_ex_ptsz},
};

enum how { PLAIN, EX, COOPERATIVE, PTSZ, EX_PTSZ };
static const char *const hows[] = {"plain", "ex", "cooperative", "ptsz", "ex-ptsz"};

static atomic_bool ending;
static bool initialized;
static CUdevice device;
static CUcontext contexts[64];
static int context_count, context; /* the current one */
static bool is_primary[64];
static CUmodule module;
static CUlibrary library;
static struct {
    CUmodule module;
    CUlibrary library;
} loaded[64];
static int loaded_count;
static CUstream stream;
static enum how how;
static unsigned pace_us;
static atomic_ulong launched[4];
static int children;

static void fail(const char *what, CUresult result)
{
    fprintf(stderr, "prog: %s: %d\n", what, result);
    exit(1);
}

#define MUST(call)                                                                                                                 \
    do {                                                                                                                           \
        CUresult result_ = (call);                                                                                                 \
        if (result_)                                                                                                               \
            fail(#call, result_);                                                                                                  \
    } while (0)

static void rest(unsigned us)
{
    struct timespec t = {us / 1000000, (long)(us % 1000000) * 1000};
    while (us && !ending && nanosleep(&t, &t))
        ;
}

static void need_cuda(void)
{
    void *cuda = initialized ? NULL : dlopen("libcuda.so.1", RTLD_NOW);
    if (initialized)
        return;
    if (!cuda)
        fail(dlerror(), 0);
    for (size_t i = 0; i < sizeof(functions) / sizeof(*functions); i++) {
        *(void **)functions[i].function = dlsym(cuda, functions[i].name);
        if (!*(void **)functions[i].function)
            fail(functions[i].name, 0);
    }
    initialized = true;
    MUST(init(0));
    MUST(device_get(&device, 0));
}

static void need_context(void)
{
    need_cuda();
    if (context_count)
        return;
    MUST(primary_retain(&contexts[0], device));
    MUST(ctx_set(contexts[0]));
    is_primary[0] = true;
    context_count = 1;
}

static void *contents(const char *path)
{
    struct stat told;
    FILE *file = fopen(path, "r");
    char *bytes;
    if (!file || fstat(fileno(file), &told))
        fail(path, 0);
    bytes = malloc((size_t)told.st_size + 1);
    if (!bytes || fread(bytes, 1, (size_t)told.st_size, file) != (size_t)told.st_size)
        fail(path, 0);
    fclose(file);
    return bytes;
}

static CUfunction function_named(const char *name)
{
    CUfunction function;
    if (library) {
        CUkernel kernel;
        MUST(library_kernel(&kernel, library, name));
        return (CUfunction)(void *)kernel;
    }
    MUST(module_function(&function, module, name));
    return function;
}

/* ---- places ---- */

#define PLACE __attribute__((noinline, noclone))

PLACE static CUresult launch_once(CUfunction function, unsigned us, unsigned site, CUstream on)
{
    CUlaunchConfig config = {us, site, 1, 128, 1, 1, 0, on, NULL, 0};
    switch (how) {
    case EX: return launch_ex(&config, function, NULL, NULL);
    case EX_PTSZ: return launch_ex_ptsz(&config, function, NULL, NULL);
    case COOPERATIVE: return launch_cooperative(function, us, site, 1, 128, 1, 1, 0, on, NULL);
    case PTSZ: return launch_ptsz(function, us, site, 1, 128, 1, 1, 0, on, NULL, NULL);
    default: return launch_plain(function, us, site, 1, 128, 1, 1, 0, on, NULL, NULL);
    }
}

/* `volatile`: the call is not the function's last, so its frame stays. */
PLACE CUresult place_a(CUfunction function, unsigned us, CUstream on)
{
    volatile CUresult result = launch_once(function, us, 1, on);
    return result;
}

PLACE CUresult place_b(CUfunction function, unsigned us, CUstream on)
{
    volatile CUresult result = launch_once(function, us, 2, on);
    return result;
}

PLACE CUresult inside_c(CUfunction function, unsigned us, CUstream on)
{
    volatile CUresult result = launch_once(function, us, 3, on);
    return result;
}

PLACE CUresult place_c(CUfunction function, unsigned us, CUstream on)
{
    volatile CUresult result = inside_c(function, us, on);
    return result;
}

PLACE CUresult place_d(CUfunction function, unsigned us, CUstream on)
{
    volatile CUresult result = launch_once(function, us, 4, on);
    return result;
}

PLACE CUresult graph_place(CUgraphExec exec, CUstream on)
{
    volatile CUresult result = graph_launch(exec, on);
    return result;
}

static CUresult (*const places[])(CUfunction, unsigned, CUstream) = {place_a, place_b, place_c, place_d};

struct launching {
    CUfunction function;
    int place;
    unsigned long count;
    unsigned us;
};

static void launch_all(const struct launching *what, CUstream on)
{
    for (unsigned long i = 0; i < what->count && !ending; i++) {
        MUST(places[what->place](what->function, what->us, on));
        launched[what->place]++;
        rest(pace_us);
    }
}

static void *launch_in_thread(void *argument)
{
    CUstream own = NULL;
    MUST(ctx_set(contexts[context]));
    if (how != PTSZ && how != EX_PTSZ)
        MUST(stream_create(&own, 0));
    launch_all(argument, own);
    return NULL;
}

/* ---- words ---- */

static char **words, **last;

static char *next(void)
{
    if (words == last)
        fail("a word is missing", 0);
    return *words++;
}

static unsigned long number(void)
{
    char *word = next(), *end;
    unsigned long value = strtoul(word, &end, 10);
    if (*end || !*word)
        fail(word, 0);
    return value;
}

static struct launching launching(void)
{
    struct launching what = {0};
    char *place;
    need_context();
    what.function = function_named(next());
    place = next();
    if (place[0] < 'A' || place[0] > 'D' || place[1])
        fail(place, 0);
    what.place = place[0] - 'A';
    what.count = number();
    what.us = (unsigned)number();
    return what;
}

static void with_threads(unsigned long count)
{
    struct launching what = launching();
    pthread_t threads[256];
    if (count > 256)
        fail("too many threads", 0);
    for (unsigned long i = 0; i < count; i++)
        pthread_create(&threads[i], NULL, launch_in_thread, &what);
    for (unsigned long i = 0; i < count; i++)
        pthread_join(threads[i], NULL);
}

static void use_loaded(unsigned long which)
{
    if (which >= (unsigned long)loaded_count)
        fail("there is no such module", 0);
    module = loaded[which].module;
    library = loaded[which].library;
}

static void with_graph(bool is_of_all)
{
    const char *name = next();
    unsigned long kernels = is_of_all ? (unsigned long)loaded_count : number(), count = number();
    unsigned us = (unsigned)number();
    CUstream on;
    CUgraph graph;
    CUgraphExec exec;
    need_context();
    MUST(stream_create(&on, 0));
    MUST(begin_capture(on, 0));
    for (unsigned long i = 0; i < kernels; i++) {
        if (is_of_all)
            use_loaded(i);
        MUST(place_c(function_named(name), us, on));
    }
    MUST(end_capture(on, &graph));
    MUST(instantiate(&exec, graph, 0));
    for (unsigned long i = 0; i < count && !ending; i++) {
        MUST(graph_place(exec, on));
        rest(pace_us);
    }
    MUST(exec_destroy(exec));
    MUST(graph_destroy(graph));
}

static void copy(size_t bytes, unsigned long count)
{
    char *memory = calloc(1, bytes);
    CUdeviceptr there;
    need_context();
    MUST(mem_alloc(&there, bytes));
    for (unsigned long i = 0; i < count && !ending; i++) {
        MUST(to_device(there, memory, bytes));
        MUST(set_device(there, 1, bytes, stream));
        MUST(from_device(memory, there, bytes));
    }
    MUST(mem_free(there));
    free(memory);
}

static void read_line(void)
{
    char byte;
    while (!ending && read(0, &byte, 1) == 1 && byte != '\n')
        ;
}

static void add_context(bool primary)
{
    need_cuda();
    if (context_count == 64)
        fail("too many contexts", 0);
    context = context_count;
    is_primary[context] = primary;
    if (primary)
        MUST(primary_retain(&contexts[context], device));
    else
        MUST(ctx_create(&contexts[context], NULL, 0, device));
    context_count++;
    MUST(ctx_set(contexts[context]));
    stream = NULL;
    module = NULL;
    library = NULL;
}

/* Keeps what was loaded, for the word "module". */
static void note_loaded(void)
{
    if (loaded_count == sizeof(loaded) / sizeof(*loaded))
        return;
    loaded[loaded_count].module = module;
    loaded[loaded_count++].library = library;
}

static void use_library(const char *path)
{
    void *bytes = contents(path);
    need_context();
    MUST(library_load(&library, bytes, NULL, NULL, 0, NULL, NULL, 0));
    free(bytes);
    note_loaded();
}

static void use_module(const char *path)
{
    void *bytes = contents(path);
    need_context();
    MUST(module_load(&module, bytes));
    free(bytes);
    library = NULL;
    note_loaded();
}

static void unload(void)
{
    if (library)
        MUST(library_unload(library));
    else
        MUST(module_unload(module));
    library = NULL;
    module = NULL;
}

static void destroy(void)
{
    if (is_primary[context])
        MUST(primary_release(device));
    else
        MUST(ctx_destroy(contexts[context]));
    module = NULL;
    library = NULL;
    stream = NULL;
}

static void be_more(unsigned long count)
{
    fflush(NULL);
    for (unsigned long i = 0; i < count; i++) {
        if (!fork()) {
            children = 0;
            for (int place = 0; place < 4; place++)
                launched[place] = 0;
            return;
        }
        children++;
    }
}

static void follow(void);

static void repeat(unsigned long count)
{
    char **first = words;
    int deep = 1;
    char **end = words;
    for (; end < last; end++) {
        deep += !strcmp(*end, "repeat") - !strcmp(*end, "end");
        if (!deep)
            break;
    }
    if (deep)
        fail("repeat without end", 0);
    for (unsigned long i = 0; i < count && !ending; i++) {
        char **behind = last;
        words = first;
        last = end;
        follow();
        last = behind;
    }
    words = end + 1;
}

static void nothing(void *user, int domain, uint32_t cbid, const void *data)
{
    (void)user;
    (void)domain;
    (void)cbid;
    (void)data;
}

static void profile(void)
{
    static CUpti_SubscriberHandle handle;
    CUptiResult (*subscribe)(CUpti_SubscriberHandle *, CUpti_CallbackFunc, void *);
    void *cupti = dlopen("libcupti.so.13", RTLD_NOW);
    if (!cupti)
        fail(dlerror(), 0);
    *(void **)&subscribe = dlsym(cupti, "cuptiSubscribe");
    printf("%d subscribe %d\n", getpid(), subscribe(&handle, nothing, NULL));
    fflush(stdout);
}

static void write_ledger(void)
{
    void (*write)(void);
    *(void **)&write = initialized ? dlsym(dlopen("libcuda.so.1", RTLD_NOW), "standin_cuda_ledger") : NULL;
    if (write)
        write();
}

static void stop(const char *word)
{
    fflush(NULL);
    if (*word < '0' || *word > '9')
        write_ledger();
    if (!strcmp(word, "vanish"))
        _exit(0);
    if (!strcmp(word, "kill"))
        kill(getpid(), SIGKILL);
    if (!strcmp(word, "abort"))
        abort();
    exit(atoi(word));
}

static void follow(void)
{
    while (words < last && !ending) {
        const char *word = next();
        if (!strcmp(word, "init"))
            need_cuda();
        else if (!strcmp(word, "device")) {
            need_cuda();
            MUST(device_get(&device, (int)number()));
        } else if (!strcmp(word, "context"))
            add_context(false);
        else if (!strcmp(word, "primary"))
            add_context(true);
        else if (!strcmp(word, "use")) {
            context = (int)number();
            MUST(ctx_set(contexts[context]));
            stream = NULL;
        } else if (!strcmp(word, "destroy"))
            destroy();
        else if (!strcmp(word, "load"))
            use_module(next());
        else if (!strcmp(word, "library"))
            use_library(next());
        else if (!strcmp(word, "module"))
            use_loaded(number());
        else if (!strcmp(word, "unload"))
            unload();
        else if (!strcmp(word, "how")) {
            const char *given = next();
            for (how = PLAIN; strcmp(hows[how], given); how++)
                if (how == EX_PTSZ)
                    fail(given, 0);
        } else if (!strcmp(word, "pace"))
            pace_us = (unsigned)number();
        else if (!strcmp(word, "stream")) {
            need_context();
            MUST(stream_create(&stream, 0));
        } else if (!strcmp(word, "launch")) {
            struct launching what = launching();
            launch_all(&what, stream);
        } else if (!strcmp(word, "fail")) {
            CUfunction function = (need_context(), function_named(next()));
            for (unsigned long left = number(); left; left--)
                if (!launch_once(function, 0, 1, stream))
                    fail("an empty grid", 0);
        } else if (!strcmp(word, "threads"))
            with_threads(number());
        else if (!strcmp(word, "graph"))
            with_graph(false);
        else if (!strcmp(word, "graph-of-all"))
            with_graph(true);
        else if (!strcmp(word, "copy")) {
            size_t bytes = number();
            copy(bytes, number());
        } else if (!strcmp(word, "sync"))
            MUST(ctx_sync());
        else if (!strcmp(word, "sleep"))
            rest((unsigned)number() * 1000);
        else if (!strcmp(word, "say")) {
            puts(next());
            fflush(stdout);
        } else if (!strcmp(word, "wait"))
            read_line();
        else if (!strcmp(word, "repeat"))
            repeat(number());
        else if (!strcmp(word, "fork"))
            be_more(number());
        else if (!strcmp(word, "exec")) {
            execvp(*words, words); /* the words end with a null */
            fail("exec", 0);
        } else if (!strcmp(word, "dlopen")) {
            const char *path = next();
            if (!dlopen(path, RTLD_NOW))
                fail(dlerror(), 0);
        } else if (!strcmp(word, "profile"))
            profile();
        else if (!strcmp(word, "ledger"))
            write_ledger();
        else if (!strcmp(word, "stop"))
            stop(next());
        else
            fail(word, 0);
    }
}

static void end(int number_)
{
    (void)number_;
    ending = true;
}

int main(int count, char **given)
{
    struct sigaction action = {.sa_handler = end};
    sigaction(SIGTERM, &action, NULL);
    sigaction(SIGINT, &action, NULL);
    signal(SIGPIPE, SIG_IGN); /* whoever reads may be gone: the ledger is written all the same */
    words = given + 1;
    last = given + count;
    follow();
    for (int place = 0; place < 4; place++)
        if (launched[place])
            printf("%d %c launches %lu\n", getpid(), 'A' + place, launched[place]);
    fflush(stdout);
    for (; children; children--)
        wait(NULL);
    return 0;
}
