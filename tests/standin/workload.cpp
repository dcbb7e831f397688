// SPDX-License-Identifier: Apache-2.0
// The program that is profiled: a small application that launches kernels from several places, in threads and processes.
//
// It knows its own launching stack without looking: each function on the way to a launch holds a Scope with its name as a
// symbolizer prints it, and what the GPU's ledger says of a launch is those names joined. That is the other half of what a profiler
// finds by walking frame pointers; the tests compare the two. So no function here may be inlined, cloned or called as a tail.
//
//   workload --elf FILE... [options]
//     --seconds S (1), --launches N     how long, or else exactly how many launches per thread
//     --rate R (1000)                   launches per second and process; 0: as fast as possible
//     --threads N (1)                   launching threads, the main one included
//     --processes N (1)                 processes, each with modules of its own, at addresses of its own
//     --same-addresses                  ... or all at the same
//     --fork                            a child forked after the modules were created launches them, too
//     --duration-us D (500), --delay-us D (0)   how long a launch executes, and how long after the call it starts
//     --depth N (0)                     adds a call path that is N calls deep by recursion
//     --only PATH                       train, infer, warm_up, attend, deep: launches from that path only
//     --one-place                       each kernel is launched from one place only (one path of one thread)
//     --recompile-ms M (0)              this often all modules are destroyed and created again, where they were
//     --churn-ms M (0)                  this often a further module goes and another comes: at changing addresses
//     --bursts-ms M (0)                 for so long launches, then for as long work on the CPU alone, and so on
//     --mixed SEED                      none of the above but --seconds: phases with queues of launches of all kinds (see Mixed)
//     --no-gpu                          no GPU is looked for
//
// --launch-rate and --recompile-every-ms are other names for --rate and --recompile-ms. A stack that is longer than the 512 bytes of
// the ledger is cut there; 80 calls deep is safe.
//
// Unless asked otherwise the first kernel is launched from one place, the others from several. SIGINT and SIGTERM end it early, but
// cleanly. At the end it waits until the GPU has executed everything, and each process prints one line of JSON.
#include "ze_api.h"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cmath>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <map>
#include <memory>
#include <pthread.h>
#include <random>
#include <string>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>
#include <vector>

#define OPAQUE [[gnu::noipa]]

namespace {

/* The names of the functions that this thread is in, joined. Its size is that of the stack in a launch's message. */
thread_local char current_stack[512] = "main";
thread_local size_t current_length = 4;

/* "This function is `name`", as long as it lives. */
class Scope {
public:
    [[gnu::always_inline]] inline explicit Scope(const char *name, size_t size) : before_(current_length)
    {
        const size_t room = sizeof(current_stack) - 1;
        if (current_length && current_length < room)
            current_stack[current_length++] = ';';
        if (size > room - current_length)
            size = room - current_length;
        memcpy(current_stack + current_length, name, size);
        current_stack[current_length += size] = 0;
    }
    [[gnu::always_inline]] inline ~Scope() { current_stack[current_length = before_] = 0; }
    Scope(const Scope &) = delete;
    Scope &operator=(const Scope &) = delete;

private:
    size_t before_;
};
#define SCOPE(name) const Scope scope(name, sizeof(name) - 1)

volatile sig_atomic_t stopped = 0;
std::atomic<bool> gpu_lost{false};

[[noreturn]] void fail(const std::string &what)
{
    fprintf(stderr, "workload: %s\n", what.c_str());
    exit(1);
}

void check(ze_result_t result, const std::string &what)
{
    if (result != ZE_RESULT_SUCCESS) {
        char code[32];
        snprintf(code, sizeof(code), ": 0x%x", static_cast<unsigned>(result));
        fail(what + code);
    }
}

uint64_t now_ns()
{
    timespec t{};
    clock_gettime(CLOCK_MONOTONIC, &t);
    return static_cast<uint64_t>(t.tv_sec) * 1000000000u + static_cast<uint64_t>(t.tv_nsec);
}

} // namespace

namespace gpu {

/* One kernel of one module. `number` counts names over all files: the same kernel of a module created again keeps it. */
struct Kernel {
    ze_kernel_handle_t handle;
    size_t number;
    OPAQUE void launch() const;
};

struct Timing {
    uint64_t delay_ns = 0, duration_ns = 500000;
};
Timing timing;

void Kernel::launch() const
{
    SCOPE("gpu::Kernel::launch() const");
    const ze_group_count_t groups = {64, 1, 1};
    zexStandinSetLaunch(current_stack, timing.delay_ns, timing.duration_ns);
    ze_result_t result = zeCommandListAppendLaunchKernel(nullptr, handle, &groups, nullptr, 0, nullptr);
    if (result == ZE_RESULT_ERROR_DEVICE_LOST)
        gpu_lost = true; /* as an application would that cannot do without: it goes on, to see whether others cope */
    else
        check(result, "launch");
}

} // namespace gpu

namespace nn {

template <typename T> struct Tensor {
    T scale;
};

template <typename T> OPAQUE void forward(const gpu::Kernel &kernel, Tensor<T> input)
{
    SCOPE("void nn::forward<float>(gpu::Kernel const&, nn::Tensor<float>)");
    if (input.scale > T(0))
        kernel.launch();
    asm volatile("");
}

template <typename T, int Heads> class Attention {
public:
    OPAQUE T apply(const gpu::Kernel &kernel) const
    {
        SCOPE("nn::Attention<double, 8>::apply(gpu::Kernel const&) const");
        kernel.launch();
        return T(Heads);
    }
};

} // namespace nn

/* A function with C's linkage in between, as a callback through a C library has. Its short name keeps a deep stack within what the
 * ledger holds. */
extern "C" OPAQUE int dig(const gpu::Kernel *kernel, int depth)
{
    SCOPE("dig");
    if (depth <= 1) {
        kernel->launch();
        return 0;
    }
    return dig(kernel, depth - 1) + 1;
}

namespace app {

int depth = 0;

OPAQUE void epoch(const gpu::Kernel &kernel, unsigned long step)
{
    SCOPE("app::epoch(gpu::Kernel const&, unsigned long)");
    nn::forward<float>(kernel, {1.0f + static_cast<float>(step & 1)});
    asm volatile("");
}

OPAQUE void train(const gpu::Kernel &kernel, unsigned long step)
{
    SCOPE("app::train(gpu::Kernel const&, unsigned long)");
    epoch(kernel, step);
    asm volatile("");
}

OPAQUE void infer(const gpu::Kernel &kernel, const char *prompt)
{
    SCOPE("app::infer(gpu::Kernel const&, char const*)");
    auto decode = [&kernel](float scale) __attribute__((noipa)) {
        SCOPE("app::infer(gpu::Kernel const&, char const*)::{lambda(float)#1}::operator()(float) const");
        nn::forward<float>(kernel, {scale});
        asm volatile("");
    };
    if (*prompt)
        decode(0.5f);
    asm volatile("");
}

namespace {
OPAQUE void warm_up(const gpu::Kernel &kernel)
{
    SCOPE("app::(anonymous namespace)::warm_up(gpu::Kernel const&)");
    kernel.launch();
    asm volatile("");
}
} // namespace

OPAQUE void attend(const gpu::Kernel &kernel)
{
    SCOPE("app::attend(gpu::Kernel const&)");
    const nn::Attention<double, 8> attention;
    if (attention.apply(kernel) < 0)
        abort();
}

OPAQUE void deep(const gpu::Kernel &kernel)
{
    SCOPE("app::deep(gpu::Kernel const&)");
    if (dig(&kernel, depth) != depth - 1)
        abort();
}

enum Path : unsigned { TRAIN, INFER, WARM_UP, ATTEND, DEEP, PATHS };
const char *const path_names[PATHS] = {"train", "infer", "warm_up", "attend", "deep"};

struct Options {
    std::vector<std::string> files;
    double seconds = 1, rate = 1000;
    uint64_t launches = 0, recompile_ns = 0, churn_ns = 0, burst_ns = 0;
    unsigned threads = 1, processes = 1;
    std::vector<unsigned> paths = {TRAIN, INFER, WARM_UP, ATTEND};
    uint64_t seed = 0;
    bool mixed = false, exact = false, same_addresses = false, fork_child = false, one_place = false, gpu = true;
};
Options options;

/* A module with its kernels. */
class Module {
public:
    explicit Module(size_t file) : file_(file) { create(); }
    ~Module() { destroy(); }
    Module(const Module &) = delete;
    Module &operator=(const Module &) = delete;
    void create();
    void destroy();
    std::vector<gpu::Kernel> kernels;

private:
    size_t file_;
    ze_module_handle_t handle_ = nullptr;
};

std::vector<std::string> contents;     // of options.files
std::vector<std::string> kernel_names; // by gpu::Kernel::number
std::vector<std::unique_ptr<Module>> modules;

/* The kernels stay where they are: threads point at them while the module is created again. */
void Module::create()
{
    const std::string &bytes = contents[file_];
    const ze_module_desc_t desc = {ZE_MODULE_FORMAT_NATIVE, bytes.size(), reinterpret_cast<const uint8_t *>(bytes.data())};
    check(zeModuleCreate(nullptr, nullptr, &desc, &handle_, nullptr), options.files[file_]);
    uint32_t count = 0;
    check(zeModuleGetKernelNames(handle_, &count, nullptr), "kernel names");
    std::vector<const char *> names(count);
    check(zeModuleGetKernelNames(handle_, &count, names.data()), "kernel names");
    kernels.resize(count);
    for (uint32_t i = 0; i < count; i++) {
        const char *name = names[i];
        const ze_kernel_desc_t kernel_desc = {name};
        gpu::Kernel &kernel = kernels[i];
        check(zeKernelCreate(handle_, &kernel_desc, &kernel.handle), name);
        auto known = std::find(kernel_names.begin(), kernel_names.end(), name);
        kernel.number = static_cast<size_t>(known - kernel_names.begin());
        if (known == kernel_names.end())
            kernel_names.emplace_back(name);
    }
}

void Module::destroy()
{
    for (const gpu::Kernel &kernel : kernels)
        zeKernelDestroy(kernel.handle);
    zeModuleDestroy(handle_);
}

/* Held while launching where modules may be compiled again meanwhile: what is launched must be there. */
pthread_rwlock_t modules_lock;

class Launching {
public:
    Launching() : locked_(options.recompile_ns != 0)
    {
        if (locked_)
            pthread_rwlock_rdlock(&modules_lock);
    }
    ~Launching()
    {
        if (locked_)
            pthread_rwlock_unlock(&modules_lock);
    }
    Launching(const Launching &) = delete;
    Launching &operator=(const Launching &) = delete;

private:
    bool locked_;
};

/* Every so often, beginning after a while. */
class Every {
public:
    explicit Every(uint64_t period) : period_(period), next_(now_ns() + period) {}
    bool due()
    {
        if (!period_ || now_ns() < next_)
            return false;
        next_ = now_ns() + period_;
        return true;
    }

private:
    uint64_t period_, next_;
};

/* What still executes may not lose its code. */
void recompile()
{
    pthread_rwlock_wrlock(&modules_lock);
    zeCommandQueueSynchronize(nullptr, UINT64_MAX);
    for (auto module = modules.rbegin(); module != modules.rend(); ++module)
        (*module)->destroy();
    for (const auto &module : modules)
        module->create();
    pthread_rwlock_unlock(&modules_lock);
}

/* A further module that comes and goes while others are in use. It is created before or after the one before it is destroyed, in
 * turn, so that it moves, and so that different kernels follow each other at one address. */
class Churn {
public:
    void turn()
    {
        zeCommandQueueSynchronize(nullptr, UINT64_MAX);
        std::unique_ptr<Module> old = std::move(module_);
        if (cycles_ % 2)
            old.reset();
        module_ = std::make_unique<Module>(cycles_++ % contents.size());
    }
    const Module &module() const { return *module_; }

private:
    std::unique_ptr<Module> module_;
    uint64_t cycles_ = 0;
};

/* What one launching thread has to do and what it did. */
struct Worker {
    unsigned thread = 0;
    uint64_t launched = 0, busy_ns = 0, compiled = 0;
    std::vector<const gpu::Kernel *> kernels;
    std::map<size_t, uint64_t> counts;
};

/* Which kernels a thread launches. The first one is the main thread's alone, unless there is no other. */
bool launches(unsigned thread, size_t number)
{
    if (options.one_place)
        return number % options.threads == thread;
    return thread == 0 || number != 0 || kernel_names.size() == 1;
}

unsigned choose_path(const Worker &worker, size_t number, uint64_t round)
{
    size_t turn = options.one_place ? number : number == 0 && kernel_names.size() > 1 ? 0 : round + worker.thread;
    return options.paths[turn % options.paths.size()];
}

OPAQUE void launch_from(unsigned path, const gpu::Kernel &kernel, unsigned long step)
{
    SCOPE("app::launch_from(unsigned int, gpu::Kernel const&, unsigned long)");
    switch (path) {
    case TRAIN:
        train(kernel, step);
        break;
    case INFER:
        infer(kernel, "The answer is");
        break;
    case WARM_UP:
        warm_up(kernel);
        break;
    case ATTEND:
        attend(kernel);
        break;
    default:
        deep(kernel);
    }
    asm volatile("");
}

void sleep_until(uint64_t ns)
{
    const timespec t = {static_cast<time_t>(ns / 1000000000u), static_cast<long>(ns % 1000000000u)};
    clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &t, nullptr);
}

/* When launch `index` is due. Threads take turns, so that a process launches evenly. */
uint64_t due(const Worker &worker, uint64_t start, uint64_t index)
{
    double per_launch = 1e9 * options.threads / options.rate;
    return start + static_cast<uint64_t>((static_cast<double>(index) + 1.0 * worker.thread / options.threads) * per_launch);
}

/* What a program does on the CPU between two bursts of launches. */
OPAQUE void prepare_batch(uint64_t until)
{
    SCOPE("app::prepare_batch(unsigned long)");
    volatile double sum = 0;
    while (!stopped && now_ns() < until)
        for (int i = 1; i < 1000; i++)
            sum = sum + 1.0 / i;
}

OPAQUE void work(Worker &worker)
{
    SCOPE("app::work(app::Worker&)");
    constexpr uint64_t nap_ns = 500000; /* fewer, longer sleeps: a timer per launch would cost more than the launches */
    Churn churn;
    std::vector<const gpu::Kernel *> kernels = worker.kernels;
    const uint64_t begun = now_ns(), end = begun + static_cast<uint64_t>(options.seconds * 1e9);
    uint64_t start = begun; /* from which launches are due */
    Every recompiling(worker.thread == 0 ? options.recompile_ns : 0), churning(worker.thread == 0 ? options.churn_ns : 0);
    while (!stopped && !kernels.empty() && (options.exact ? worker.launched < options.launches : now_ns() < end)) {
        if (options.burst_ns && (now_ns() - begun) / options.burst_ns % 2) {
            const uint64_t until = begun + ((now_ns() - begun) / options.burst_ns + 1) * options.burst_ns;
            prepare_batch(std::min(until, end));
            start += options.burst_ns;
            continue;
        }
        if (options.rate > 0 && due(worker, start, worker.launched) > now_ns()) {
            uint64_t until = std::max(due(worker, start, worker.launched), now_ns() + nap_ns);
            sleep_until(options.exact ? until : std::min(until, end));
            continue;
        }
        if (recompiling.due()) {
            recompile();
            worker.compiled += modules.size();
        }
        if (churning.due()) {
            churn.turn();
            worker.compiled++;
            kernels = worker.kernels;
            for (const gpu::Kernel &kernel : churn.module().kernels)
                if (launches(0, kernel.number))
                    kernels.push_back(&kernel);
        }
        const gpu::Kernel &kernel = *kernels[worker.launched % kernels.size()];
        const Launching launching;
        launch_from(choose_path(worker, kernel.number, worker.launched / kernels.size()), kernel, worker.launched);
        worker.counts[kernel.number]++;
        worker.launched++;
    }
    worker.busy_ns = now_ns() - begun;
    zeCommandQueueSynchronize(nullptr, UINT64_MAX); /* before the churned module goes */
}

/* What a program with one queue does for a while: launches of one kernel, mostly, from places that follow each other in a way that
 * real programs have. Each phase draws all of it from the seed. */
class Mixed {
public:
    explicit Mixed(uint64_t seed) : random_(seed) {}

    /* Another phase: what is launched is one of `kernels`. */
    void turn(const std::vector<const gpu::Kernel *> &kernels)
    {
        end_ns_ = now_ns() + static_cast<uint64_t>(between(100e6, 400e6));
        kind_ = static_cast<Kind>(random_() % KINDS);
        kernel_ = kernels[random_() % kernels.size()];
        duration_ns_ = between(10e3, 50e6);
        work_ns_ = between(2e6, 40e6);
        first_ = static_cast<unsigned>(random_() % PLACES);
        for (double &factor : factors_)
            factor = between(0.7, 1.4);
    }
    bool is_over() const { return now_ns() >= end_ns_; }
    bool is_pause() const { return kind_ == PAUSE; }
    const gpu::Kernel &kernel() const { return *kernel_; }
    double work_ns() const { return work_ns_; }

    /* From where launch `index` of a phase comes: layer after layer; nearly always from one place; in turns of some length. */
    unsigned place(uint64_t index)
    {
        switch (kind_) {
        case LAYERS:
            return (first_ + static_cast<unsigned>(index)) % PLACES;
        case SKEWED:
            return (first_ + (random_() % 10 == 0)) % PLACES;
        default:
            return (first_ + (index / 32) % 2) % PLACES;
        }
    }
    uint64_t duration_ns(unsigned place) { return static_cast<uint64_t>(std::clamp(duration_ns_ * factors_[place], 10e3, 50e6)); }
    /* One in eight waits for something else that the GPU does, a copy for example. */
    uint64_t delay_ns() { return random_() % 8 ? 0 : static_cast<uint64_t>(between(0.1e6, 40e6)); }
    uint64_t think_ns() { return kind_ == LAYERS ? 0 : static_cast<uint64_t>(between(0.1e6, 20e6)); }
    /* In SKEWED and ALTERNATING a program launches ahead, and waits every other time only. */
    bool waits() { return kind_ == LAYERS || ++rounds_ % 2 == 0; }
    bool is_time_to_compile() { return random_() % 2; }
    uint64_t compiling_ns() { return static_cast<uint64_t>(between(1e6, 50e6)); }

private:
    enum Kind : unsigned { LAYERS, SKEWED, ALTERNATING, PAUSE, KINDS };
    static constexpr unsigned PLACES = ATTEND + 1;

    /* As often between 1 and 2 as between 10 and 20. */
    double between(double low, double high)
    {
        return low * std::pow(high / low, static_cast<double>(random_() >> 11) * 0x1p-53);
    }

    std::mt19937_64 random_;
    Kind kind_ = PAUSE;
    const gpu::Kernel *kernel_ = nullptr;
    uint64_t end_ns_ = 0;
    double duration_ns_ = 0, work_ns_ = 0, factors_[PLACES] = {};
    unsigned first_ = 0, rounds_ = 0;
};

constexpr unsigned MOST_AHEAD = 256; /* launches, before the next look at the time */

/* All launches are made from here, not from members of Mixed: those may be inlined, and would be on the stack or not. */
OPAQUE void mix(Worker &worker)
{
    SCOPE("app::mix(app::Worker&)");
    Churn churn;
    Mixed mixed(options.seed);
    std::vector<const gpu::Kernel *> kernels = worker.kernels;
    const uint64_t start = now_ns(), end = start + static_cast<uint64_t>(options.seconds * 1e9);
    while (!stopped && now_ns() < end) {
        if (mixed.is_time_to_compile()) {
            sleep_until(now_ns() + mixed.compiling_ns());
            churn.turn();
            worker.compiled++;
            kernels = worker.kernels;
            for (const gpu::Kernel &kernel : churn.module().kernels)
                kernels.push_back(&kernel);
        }
        mixed.turn(kernels);
        for (uint64_t index = 0; !stopped && now_ns() < end && !mixed.is_over();) {
            const gpu::Kernel &kernel = mixed.kernel();
            double work = 0;
            for (unsigned left = MOST_AHEAD; left && work < mixed.work_ns() && !mixed.is_pause(); left--, index++) {
                const unsigned place = mixed.place(index);
                gpu::timing.delay_ns = mixed.delay_ns();
                gpu::timing.duration_ns = mixed.duration_ns(place);
                launch_from(place, kernel, index);
                work += static_cast<double>(gpu::timing.duration_ns);
                worker.counts[kernel.number]++;
                worker.launched++;
            }
            if (mixed.waits())
                zeCommandQueueSynchronize(nullptr, UINT64_MAX);
            sleep_until(now_ns() + mixed.think_ns());
        }
        zeCommandQueueSynchronize(nullptr, UINT64_MAX);
    }
    worker.busy_ns = now_ns() - start;
}

OPAQUE void *thread_main(void *argument)
{
    current_stack[current_length = 0] = 0; /* this thread has no main */
    SCOPE("app::thread_main(void*)");
    work(*static_cast<Worker *>(argument));
    return nullptr;
}

void share_out(std::vector<Worker> &workers)
{
    for (unsigned i = 0; i < workers.size(); i++) {
        workers[i].thread = i;
        for (const auto &module : modules)
            for (const gpu::Kernel &kernel : module->kernels)
                if (launches(i, kernel.number))
                    workers[i].kernels.push_back(&kernel);
    }
}

void print_summary(const std::vector<Worker> &workers, double seconds)
{
    uint64_t launched = 0, busy = 0, compiled = modules.size();
    std::map<std::string, uint64_t> counts;
    for (const Worker &worker : workers) {
        launched += worker.launched;
        busy += worker.busy_ns;
        compiled += worker.compiled;
        for (const auto &[number, count] : worker.counts)
            counts[kernel_names[number]] += count;
    }
    const char *gpu = zexStandinGpu() == 0 ? "none" : gpu_lost || zexStandinGpu() < 0 ? "lost" : "done";
    std::string line = "{\"pid\": " + std::to_string(getpid()) + ", \"launches\": " + std::to_string(launched) +
                       ", \"modules\": " + std::to_string(compiled) + ", \"seconds\": " + std::to_string(seconds) + ", \"gpu\": \"" +
                       gpu + "\"";
    if (options.rate <= 0 && launched)
        line += ", \"ns_per_launch\": " + std::to_string(busy / launched);
    line += ", \"kernels\": {"; /* a kernel's name is a symbol, which JSON holds as it is */
    for (const auto &[name, count] : counts)
        line += (line.back() == '{' ? "\"" : ", \"") + name + "\": " + std::to_string(count);
    line += "}}\n";
    /* In one piece: other processes write to the same place. */
    if (write(STDOUT_FILENO, line.data(), line.size()) < 0)
        perror("workload: stdout");
}

void load_files()
{
    for (const std::string &file : options.files) {
        std::ifstream stream(file, std::ios::binary);
        if (!stream)
            fail(file + ": " + strerror(errno));
        contents.emplace_back(std::istreambuf_iterator<char>(stream), std::istreambuf_iterator<char>());
    }
}

void move_addresses(unsigned process)
{
    const char *base = getenv("STANDIN_ADDRESS_DELTA");
    long long delta = (base ? strtoll(base, nullptr, 0) : 0) - process * 0x100000ll;
    setenv("STANDIN_ADDRESS_DELTA", std::to_string(delta).c_str(), 1);
}

void read_options(int argc, char **argv)
{
    auto usage = [&](const std::string &what) {
        fprintf(stderr, "workload: %s (its source says what there is)\n", what.c_str());
        exit(2);
    };
    std::string only;
    for (int i = 1; i < argc; i++) {
        const std::string name = argv[i];
        auto flag = [&](const char *which, bool &target, bool to) { return name == which ? (target = to, true) : false; };
        if (flag("--same-addresses", options.same_addresses, true) || flag("--fork", options.fork_child, true) ||
            flag("--one-place", options.one_place, true) || flag("--no-gpu", options.gpu, false))
            continue;
        if (i + 1 == argc)
            usage(name + ": no such option, or its value is missing");
        const char *text = argv[++i];
        char *rest = nullptr;
        const double value = strtod(text, &rest);
        const bool number = *text && !*rest && value >= 0 && value < 1e15;
        if (name == "--elf")
            options.files.emplace_back(text);
        else if (name == "--only")
            only = text;
        else if (!number)
            usage(name + " " + text);
        else if (name == "--seconds")
            options.seconds = value;
        else if (name == "--launches")
            options.launches = static_cast<uint64_t>(value), options.exact = true;
        else if (name == "--rate" || name == "--launch-rate")
            options.rate = value;
        else if (name == "--threads" && value >= 1 && value <= 256)
            options.threads = static_cast<unsigned>(value);
        else if (name == "--processes" && value >= 1 && value <= 64)
            options.processes = static_cast<unsigned>(value);
        else if (name == "--duration-us")
            gpu::timing.duration_ns = static_cast<uint64_t>(value * 1000);
        else if (name == "--delay-us")
            gpu::timing.delay_ns = static_cast<uint64_t>(value * 1000);
        else if (name == "--depth" && value <= 10000)
            depth = static_cast<int>(value);
        else if (name == "--recompile-ms" || name == "--recompile-every-ms")
            options.recompile_ns = static_cast<uint64_t>(value * 1e6);
        else if (name == "--bursts-ms")
            options.burst_ns = static_cast<uint64_t>(value * 1e6);
        else if (name == "--mixed")
            options.seed = static_cast<uint64_t>(value), options.mixed = true;
        else if (name == "--churn-ms")
            options.churn_ns = static_cast<uint64_t>(value * 1e6);
        else
            usage(name + " " + text);
    }
    if (options.files.empty())
        usage("--elf FILE is missing");
    if (depth > 0)
        options.paths.push_back(DEEP);
    if (!only.empty()) {
        auto found = std::find(std::begin(path_names), std::end(path_names), only);
        if (found == std::end(path_names) || (only == "deep" && depth < 1))
            usage("--only " + only);
        options.paths = {static_cast<unsigned>(found - std::begin(path_names))};
    }
}

int wait_for(const std::vector<pid_t> &children)
{
    int failed = 0;
    for (pid_t child : children) {
        int status = 0;
        while (waitpid(child, &status, 0) < 0 && errno == EINTR)
            ;
        failed |= !WIFEXITED(status) || WEXITSTATUS(status) != 0;
    }
    return failed;
}

pid_t split()
{
    pid_t child = fork();
    if (child < 0)
        fail(std::string("fork: ") + strerror(errno));
    return child;
}

} // namespace app

int main(int argc, char **argv)
{
    using namespace app;
    struct sigaction action = {};
    action.sa_handler = [](int) { stopped = 1; };
    action.sa_flags = static_cast<int>(SA_RESETHAND); /* the second one kills */
    sigaction(SIGINT, &action, nullptr);
    sigaction(SIGTERM, &action, nullptr);
    prctl(PR_SET_TIMERSLACK, 1);
    pthread_rwlockattr_t fair;
    pthread_rwlockattr_init(&fair);
    pthread_rwlockattr_setkind_np(&fair, PTHREAD_RWLOCK_PREFER_WRITER_NONRECURSIVE_NP);
    pthread_rwlock_init(&modules_lock, &fair);

    read_options(argc, argv);
    load_files();
    if (!options.gpu)
        unsetenv("STANDIN_DIR");

    std::vector<pid_t> children;
    for (unsigned process = 1; process < options.processes; process++) {
        pid_t child = split();
        if (child == 0) {
            children.clear();
            if (!options.same_addresses)
                move_addresses(process);
            break;
        }
        children.push_back(child);
    }
    check(zeInit(0), "zeInit");
    for (size_t file = 0; file < contents.size(); file++)
        modules.push_back(std::make_unique<Module>(file));
    if (options.fork_child) {
        pid_t child = split();
        if (child == 0)
            children.clear();
        else
            children.push_back(child);
    }

    std::vector<Worker> workers(options.threads);
    share_out(workers);
    const uint64_t start = now_ns();
    std::vector<pthread_t> threads(options.threads);
    for (unsigned i = 1; i < options.threads; i++)
        if (pthread_create(&threads[i], nullptr, thread_main, &workers[i]))
            fail("no thread");
    if (options.mixed)
        mix(workers[0]);
    else
        work(workers[0]);
    for (unsigned i = 1; i < options.threads; i++)
        pthread_join(threads[i], nullptr);
    const double seconds = static_cast<double>(now_ns() - start) / 1e9;
    zeCommandQueueSynchronize(nullptr, UINT64_MAX);
    print_summary(workers, seconds);
    modules.clear();
    return wait_for(children);
}
