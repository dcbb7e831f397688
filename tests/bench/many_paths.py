"""A program that launches from many paths, compiled without frame pointers.

Each path ends in functions of its own, which no other path goes through: a profiler has never met their return
addresses when the path is launched first. Below them all paths go through the same functions.
"""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

from standin import runtime

FRAMES = 16  # of each stack
_KERNEL = "attention_scores"
_HEAD = """\
#define _GNU_SOURCE
#include "one_kernel.h"
#include <execinfo.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#define OPAQUE __attribute__((noipa))
static ze_kernel_handle_t kernel;
static const ze_group_count_t groups = {1, 1, 1};
typedef int path(void);
"""
_INNERMOST = (
    "OPAQUE static int f{path}_0(void) "
    "{{ return zeCommandListAppendLaunchKernel(NULL, kernel, &groups, NULL, 0, NULL) + 1; }}\n"
)
_OTHER = "OPAQUE static int f{path}_{number}(void) {{ return f{path}_{callee}() + 1; }}\n"
_TAIL = """\
OPAQUE static int deeper(path *which, int calls)
{
    return (calls ? deeper(which, calls - 1) : which()) + 1;
}

/* ELF LAUNCHES PER_SECOND FRAMES OWN: launches from all paths in turn, at that rate, and tells how many. */
int main(int argc, char **argv)
{
    static void *callers[512];
    ze_module_handle_t module;
    struct timespec turn;
    if (argc != 6)
        return 2;
    long launches = atol(argv[2]), rate = atol(argv[3]), at_once = rate / 1000 ? rate / 1000 : 1, launched = 0;
    /* Around those of its own: the launching function's, those of main and before main, and one of deeper. */
    int calls = atoi(argv[4]) - atoi(argv[5]) - 2 - backtrace(callers, 512);
    if (calls < 0 || make_kernel(argv[1], KERNEL, &module, &kernel))
        return 1;
    clock_gettime(CLOCK_MONOTONIC, &turn);
    while (launched < launches) {
        for (long i = 0; i < at_once; i++)
            deeper(paths[launched++ % (long)(sizeof(paths) / sizeof(*paths))], calls);
        turn.tv_nsec += 1000000000L / rate * at_once;
        while (turn.tv_nsec >= 1000000000L) {
            turn.tv_nsec -= 1000000000L;
            turn.tv_sec++;
        }
        clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &turn, NULL);
    }
    printf("{\\"launches\\": %ld}\\n", launched);
    zeKernelDestroy(kernel);
    zeModuleDestroy(module);
    return 0;
}
"""


@dataclass(frozen=True)
class ManyPaths:
    """The program."""

    path: Path
    paths: int
    own: int  # functions of each path, of its own

    def start(self, launches: int, rate: int) -> subprocess.Popen[str]:
        """Starts it: so many launches, of all paths in turn, so many a second."""
        words = [self.path, runtime.debug_elf("bmg", "attention"), launches, rate, FRAMES, self.own]
        return subprocess.Popen(list(map(str, words)), stdout=subprocess.PIPE, text=True)


def launched(process: subprocess.Popen[str]) -> int:
    """Waits for its end; gives how many launches there were."""
    out, _ = process.communicate()
    if process.returncode:
        raise RuntimeError(f"the program that launches from many paths ended with {process.returncode}")
    return int(json.loads(out)["launches"])


def build(folder: Path, paths: int, own: int) -> ManyPaths:
    """Compiles it."""
    programs = runtime.build()
    functions = [
        (_OTHER if number else _INNERMOST).format(path=path, number=number, callee=number - 1)
        for path in range(paths)
        for number in range(own)
    ]
    outermost = ", ".join(f"f{path}_{own - 1}" for path in range(paths))
    source, output = folder / f"paths-{paths}-{own}.c", folder / f"paths-{paths}-{own}"
    source.write_text("".join([_HEAD, *functions, f"static path *const paths[] = {{{outermost}}};\n", _TAIL]))
    flags = ["-std=gnu11", "-O1", "-fomit-frame-pointer", "-Wall", "-Wextra", "-Werror", "-Wl,-z,now"]
    library = [str(programs.library), f"-Wl,-rpath,{programs.library.parent}"]
    words = [*flags, f'-DKERNEL="{_KERNEL}"', f"-I{runtime.SOURCES}", "-o", str(output), str(source), *library]
    subprocess.run([os.environ.get("CC", "cc"), *words], check=True)
    return ManyPaths(output, paths, own)
