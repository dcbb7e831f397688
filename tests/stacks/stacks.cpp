// SPDX-License-Identifier: Apache-2.0
// Stacks of many shapes: stacks [THREADS]. Each calls probe_me with a number of its own.
#include <alloca.h>
#include <sys/time.h>
#include <link.h>
#include <pthread.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <csetjmp>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#define NOINLINE __attribute__((noinline))
#define KEEP asm volatile("" ::: "memory") // so that what comes before it is no tail call

extern "C" void probe_me(long);

static std::atomic<long> serial{0};
static thread_local volatile int sink;

extern "C" NOINLINE void stop() {
    probe_me(++serial);
    KEEP;
}

// Exceptions: stops in destructors while the stack is unwound, and in handlers.
struct Guard {
    ~Guard() {
        stop();
        KEEP;
    }
};

NOINLINE void throws(int does) {
    Guard guard;
    if (does)
        throw std::runtime_error("thrown");
    stop();
}

NOINLINE void passes(int does) {
    Guard guard;
    try {
        throws(does);
    } catch (std::logic_error &) {
        stop();
    }
    KEEP;
}

NOINLINE void catches(int does) {
    try {
        passes(does);
    } catch (std::exception &error) {
        stop();
        sink = error.what()[0];
    }
    KEEP;
}

// Frames of known, variable and aligned sizes.
NOINLINE int deep(int left) {
    if (!left) {
        stop();
        return 1;
    }
    volatile char room[40];
    room[0] = left;
    int result = deep(left - 1) + room[0];
    KEEP;
    return result;
}

NOINLINE int aligned(int left);

NOINLINE int variable(int left) {
    char *room = static_cast<char *>(alloca(16 + left * 8 % 200));
    memset(room, left, 16);
    int result = left ? aligned(left - 1) : (stop(), 0);
    KEEP;
    return result + room[3];
}

NOINLINE int aligned(int left) {
    alignas(64) volatile char room[64];
    room[1] = left;
    int result = left ? variable(left - 1) : (stop(), 0);
    KEEP;
    return result + room[1];
}

// A call that is a function's last instruction.
NOINLINE __attribute__((noreturn)) void jumps(jmp_buf *where) {
    stop();
    longjmp(*where, 1);
}

NOINLINE __attribute__((noreturn)) void ends_in_a_call(jmp_buf *where) { jumps(where); }

NOINLINE void after_the_jump() {
    stop();
    KEEP;
}

NOINLINE void without_return() {
    jmp_buf where;
    if (!setjmp(where))
        ends_in_a_call(&where);
    after_the_jump();
    KEEP;
}

NOINLINE int tail(int left) {
    if (left)
        return tail(left - 1);
    stop();
    return 3;
}

// Callbacks of the C library.
static int compare(const void *one, const void *other) {
    if (*static_cast<const int *>(one) == 7)
        stop();
    return *static_cast<const int *>(one) - *static_cast<const int *>(other);
}

static int module(dl_phdr_info *info, size_t, void *) {
    if (!info->dlpi_name || !info->dlpi_name[0])
        return 0;
    stop();
    return 1;
}

static void once() {
    stop();
    KEEP;
}

struct Base {
    virtual void go(int) = 0;
    virtual ~Base() { stop(); }
};

struct Derived : Base {
    std::string text;
    void go(int left) override {
        text += "x";
        left ? go(left - 1) : stop();
        KEEP;
    }
};

// Constructors that the dynamic linker or the C library's start runs, and destructors at the end.
struct Early {
    Early() { stop(); }
    ~Early() {
        stop();
        KEEP;
    }
} early;

// Signals.
static void handler(int) {
    stop();
    KEEP;
}

static void raising_handler(int number, siginfo_t *, void *) {
    stop();
    if (number == SIGUSR1)
        raise(SIGUSR2);
    KEEP;
}

static const int TICKS = 60;
static std::atomic<int> ticks{0};

static void tick(int) {
    if (ticks++ < TICKS)
        stop();
    KEEP;
}

static void all() {
    for (int round = 0; round < 2; round++) {
        catches(1);
        try {
            catches(0);
        } catch (...) {
        }
    }
    deep(30);
    deep(110);
    aligned(9);
    variable(20);
    without_return();
    tail(4);
    int numbers[] = {3, 7, 1, 9, 4};
    qsort(numbers, 5, 4, compare);
    dl_iterate_phdr(module, nullptr);
    Derived derived;
    static_cast<Base *>(&derived)->go(3);
    std::vector<int> sorted{5, 2, 8};
    std::sort(sorted.begin(), sorted.end(), [](int one, int other) {
        if (one == 8)
            stop();
        return one < other;
    });
    std::function<void(int)> calls = [&](int left) {
        left ? calls(left - 1) : stop();
        KEEP;
    };
    calls(3);
    KEEP;
}

static void signals() {
    struct sigaction action = {};
    action.sa_handler = handler;
    sigaction(SIGTERM, &action, nullptr);
    raise(SIGTERM);
    kill(getpid(), SIGTERM);
    action.sa_sigaction = raising_handler;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    stack_t alternate = {};
    alternate.ss_size = 65536;
    alternate.ss_sp = malloc(65536);
    sigaltstack(&alternate, nullptr);
    sigaction(SIGUSR1, &action, nullptr);
    sigaction(SIGUSR2, &action, nullptr);
    raise(SIGUSR1);
}

// At any instruction: in the vDSO, in stubs of the PLT, in prologues and epilogues.
static void interrupted(const char *text) {
    struct sigaction action = {};
    action.sa_handler = tick;
    action.sa_flags = SA_RESTART | SA_ONSTACK;
    sigaction(SIGALRM, &action, nullptr);
    itimerval every{{0, 3000}, {0, 3000}};
    setitimer(ITIMER_REAL, &every, nullptr);
    timespec now;
    char printed[64];
    volatile long sum = 0;
    while (ticks < TICKS) {
        for (int i = 0; i < 50; i++) {
            clock_gettime(CLOCK_MONOTONIC, &now);
            sum += strlen(text) + labs(sum) + toupper(sum & 63);
        }
        snprintf(printed, sizeof printed, "%ld", sum);
        std::map<int, std::string> kept;
        kept[1] = printed;
    }
    itimerval never{};
    setitimer(ITIMER_REAL, &never, nullptr);
}

int main(int count, char **words) {
    int threads = count > 1 ? atoi(words[1]) : 2;
    all();
    std::once_flag flag;
    std::call_once(flag, [] {
        stop();
        KEEP;
    });
    pthread_once_t control = PTHREAD_ONCE_INIT;
    pthread_once(&control, once);
    signals();
    std::vector<std::thread> pool;
    for (int i = 0; i < threads; i++)
        pool.emplace_back(all);
    for (std::thread &thread : pool)
        thread.join();
    atexit([] {
        stop();
        KEEP;
    });
    interrupted(words[0]);
    deep(200);
    return 0;
}
