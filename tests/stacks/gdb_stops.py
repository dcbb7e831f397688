# SPDX-License-Identifier: Apache-2.0
"""Run by gdb: `gdb -batch -nx -x gdb_stops.py --args PROGRAM...` writes what it sees at calls of probe_me to $STOPS.

A pickled dictionary a stop: pid, tid, number; pcs of all frames but inlined and tail-call ones, which are in no stack;
with $MEMORY also registers by their numbers in DWARF, executable mappings, and the pages that the frames lie in. With
$HOLD the program does not end before the file of that name is gone; $HOLD.reached is made then.
"""

import contextlib
import os
import pickle
import time

import gdb

REGISTERS = [
    "rax",
    "rdx",
    "rcx",
    "rbx",
    "rsi",
    "rdi",
    "rbp",
    "rsp",
    "r8",
    "r9",
    "r10",
    "r11",
    "r12",
    "r13",
    "r14",
    "r15",
    "rip",
]
PAGE, PAGES = 4096, 16
MASK = (1 << 64) - 1

SETTINGS = (
    "set pagination off",
    "set confirm off",
    "set backtrace past-main on",
    "set backtrace past-entry on",
    "set backtrace limit 400",
    "set breakpoint pending on",
    "set debuginfod enabled off",
    "set disable-randomization off",
    "set print thread-events off",
    "handle all nostop noprint pass",
    "handle SIGTRAP stop",
)
for setting in SETTINGS:
    with contextlib.suppress(gdb.error):  # an older one
        gdb.execute(setting, to_string=True)


def number(value: gdb.Value) -> int:
    return int(value) & MASK


def frames():
    frame = gdb.newest_frame()
    while frame is not None:
        if frame.type() not in (gdb.INLINE_FRAME, gdb.TAILCALL_FRAME):
            yield frame
        frame = frame.older()


def memory(pid: int, tops: list[int]) -> dict[int, bytes]:
    pages = {}
    with open(f"/proc/{pid}/mem", "rb", 0) as file:
        for top in tops:
            for page in range(top & -PAGE, (top & -PAGE) + PAGES * PAGE, PAGE):
                if page not in pages:
                    try:
                        pages[page] = os.pread(file.fileno(), PAGE, page)
                    except OSError:
                        break
    return pages


class Stop(gdb.Breakpoint):
    def stop(self) -> bool:
        pid, tid, _ = gdb.selected_thread().ptid
        registers = {n: number(gdb.newest_frame().read_register(name)) for n, name in enumerate(REGISTERS)}
        found, tops = [], []
        try:
            for frame in frames():
                found.append(frame.pc())
                tops.append(number(frame.read_register("rsp")))
        except gdb.error:
            pass  # it goes no further
        seen = {"pid": pid, "tid": tid, "number": registers[5], "pcs": found}
        if "MEMORY" in os.environ:
            with open(f"/proc/{pid}/maps") as maps:
                seen["maps"] = [line.split(maxsplit=5) for line in maps]
            seen |= {"registers": registers, "pages": memory(pid, [registers[7], *tops])}
        pickle.dump(seen, out)
        return False


class End(gdb.Breakpoint):
    def stop(self) -> bool:
        open(os.environ["HOLD"] + ".reached", "w").close()
        while os.path.exists(os.environ["HOLD"]):
            time.sleep(0.005)
        return False


out = open(os.environ["STOPS"], "wb")
Stop("probe_me_after")
if "HOLD" in os.environ:
    End("_exit")
gdb.execute("run")
out.close()
