/* SPDX-License-Identifier: Apache-2.0
 *
 * The program that is profiled: a small application with several ways to its kernels, in threads and processes.
 *
 *   workload --elf FILE [--elf FILE]... [--seconds S] [--launches N] [--threads N] [--processes N] [--rate N]
 *            [--depth N] [--duration-us N] [--delay-us N] [--recompile-ms N] [--one-place]
 *
 * Every thread launches every kernel in turn, N times a second in all (0: as fast as it can), until its time is over or
 * its launches are done. Each launch tells the runtime the stack that it comes from, in the words in which a symbolizer
 * prints it, for the ledger: a Scope stands at the top of each function that is on it.
 */
#include "ze_api.h"

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <fstream>
#include <iterator>
#include <string>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>
#include <vector>

#define NOINLINE __attribute__((noinline, noclone))

namespace {
struct Options {
    std::vector<std::string> elfs;
    double seconds = 1, rate = 1000;
    long launches = 0, threads = 1, processes = 1, depth = 20, duration_us = 500, delay_us = 0, recompile_ms = 0;
    bool one_place = false;
} options;

std::atomic<long> launched;

thread_local char stack_text[512];
thread_local size_t stack_length;

/* While it lives, `name` is the innermost frame. */
class Scope {
    size_t before = stack_length;

  public:
    explicit Scope(const char *name) {
        int written = snprintf(stack_text + stack_length, sizeof stack_text - stack_length, "%s%s", before ? ";" : "", name);
        stack_length = before + written < sizeof stack_text ? before + written : sizeof stack_text - 1;
    }
    ~Scope() {
        stack_length = before;
        stack_text[before] = 0;
    }
};

double now() {
    timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec + time.tv_nsec * 1e-9;
}
} // namespace

struct Kernel {
    ze_kernel_handle_t handle;
};

namespace nn {
template <typename T> NOINLINE void forward(const Kernel &kernel) {
    Scope scope("void nn::forward<float>(Kernel const&)");
    zeCommandListAppendLaunchKernel(kernel.handle, stack_text, options.delay_us * 1000, options.duration_us * 1000);
}
} // namespace nn

/* One name of few letters, so that a deep stack fits the ledger's 512 bytes. */
extern "C" NOINLINE void dive(const Kernel &kernel, long depth) {
    Scope scope("dive");
    if (depth > 1)
        dive(kernel, depth - 1);
    else
        nn::forward<float>(kernel);
}

namespace app {
NOINLINE void train(const Kernel &kernel) {
    Scope scope("app::train(Kernel const&)");
    nn::forward<float>(kernel);
}

struct Server {
    NOINLINE void infer(const Kernel &kernel, int) {
        Scope scope("app::Server::infer(Kernel const&, int)");
        nn::forward<float>(kernel);
    }
};

NOINLINE void explore(const Kernel &kernel) {
    Scope scope("app::explore(Kernel const&)");
    dive(kernel, options.depth);
}

/* Ways to a kernel. */
NOINLINE void launch(const Kernel &kernel, long way) {
    Scope scope("app::launch(Kernel const&, long)");
    Server server;
    switch (way % 3) {
    case 0:
        train(kernel);
        break;
    case 1:
        server.infer(kernel, 1);
        break;
    default:
        explore(kernel);
    }
}

using Modules = std::vector<ze_module_handle_t>;

Modules load() {
    Modules modules;
    for (const std::string &path : options.elfs) {
        std::ifstream file(path, std::ios::binary);
        std::string elf((std::istreambuf_iterator<char>(file)), {});
        ze_module_handle_t module;
        if (!file || zeModuleCreate(elf.data(), elf.size(), &module)) {
            fprintf(stderr, "workload: %s is no debug ELF\n", path.c_str());
            exit(1);
        }
        modules.push_back(module);
    }
    return modules;
}

std::vector<Kernel> kernels(const Modules &modules) {
    std::vector<Kernel> all;
    for (ze_module_handle_t module : modules)
        for (size_t i = 0; i < zeModuleGetKernelCount(module); i++)
            all.push_back({zeKernelCreate(module, i)});
    return all;
}

/* One thread's work. A thread of a number other than 0 has its modules for itself when they are compiled again. */
NOINLINE void work(long thread, Modules modules) {
    Scope scope("app::work(long, std::vector<standin_module*, std::allocator<standin_module*>>)");
    std::vector<Kernel> all = kernels(modules);
    const double start = now(), end = start + options.seconds;
    double compiled = start;
    for (long i = 0; options.launches ? i < options.launches : now() < end; i++) {
        double at = options.rate > 0 ? start + i * options.threads / options.rate : 0, wait = at - now();
        if (wait > 0)
            usleep(wait * 1e6);
        if (options.recompile_ms && thread == 0 && now() - compiled > options.recompile_ms * 1e-3) {
            Modules old = std::move(modules);
            modules = load();
            all = kernels(modules);
            if (options.threads == 1)
                for (ze_module_handle_t module : old)
                    zeModuleDestroy(module);
            compiled = now();
        }
        size_t which = i % all.size();
        launch(all[which], options.one_place ? which : i / all.size());
        launched++;
    }
}

NOINLINE void run(const Modules &modules) {
    std::vector<std::thread> threads;
    for (long i = 1; i < options.threads; i++)
        threads.emplace_back([i, &modules] { work(i, modules); });
    {
        Scope scope("main");
        Scope own("app::run(std::vector<standin_module*, std::allocator<standin_module*>> const&)");
        work(0, modules);
    }
    for (std::thread &thread : threads)
        thread.join();
}
} // namespace app

static void parse(int count, char **words) {
    for (int i = 1; i < count; i++) {
        std::string name = words[i];
        if (name == "--one-place") {
            options.one_place = true;
            continue;
        }
        const char *value = i + 1 < count ? words[++i] : "";
        struct {
            const char *name;
            long *number;
        } numbers[] = {{"--launches", &options.launches},       {"--threads", &options.threads},
                       {"--processes", &options.processes},     {"--depth", &options.depth},
                       {"--duration-us", &options.duration_us}, {"--delay-us", &options.delay_us},
                       {"--recompile-ms", &options.recompile_ms}};
        bool known = true;
        if (name == "--elf")
            options.elfs.push_back(value);
        else if (name == "--seconds")
            options.seconds = atof(value);
        else if (name == "--rate")
            options.rate = atof(value);
        else {
            known = false;
            for (auto &number : numbers)
                if (name == number.name) {
                    *number.number = atol(value);
                    known = true;
                }
        }
        if (!known) {
            fprintf(stderr, "workload: no option %s\n", name.c_str());
            exit(2);
        }
    }
}

int main(int count, char **words) {
    parse(count, words);
    for (long i = 1; i < options.processes; i++)
        if (fork() == 0)
            break;
    zeInit(0);
    double start = now();
    app::run(app::load());
    double took = now() - start;
    zeCommandQueueSynchronize();
    printf("%d: %ld launches, %.0f ns each\n", getpid(), launched.load(), took / launched * options.threads * 1e9);
    while (wait(nullptr) > 0)
        ;
    return 0;
}
