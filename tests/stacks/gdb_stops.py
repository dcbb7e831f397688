# SPDX-License-Identifier: Apache-2.0
"""Run by gdb: `gdb -batch -nx -x gdb_stops.py --args PROGRAM...` writes the program's stacks to $STOPS.

It stops at calls of probe_me (probe.S), or at the instructions that $AT names: a JSON object of lists of offsets by the
file that they are in. Each stop is a pickled dictionary: pid, tid, number; pcs of all frames but inlined and tail-call
ones, which are in no stack; with $MEMORY also registers by their numbers in DWARF, executable mappings, and the pages
that the frames lie in. With $HOLD the program does not end before the file of that name is gone; $HOLD.reached is made
then. gdb exits with the program's exit code, or 1 if a signal ended the program.
"""

import contextlib
import json
import os
import pickle
import struct
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
PT_LOAD = 1
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
    "set startup-with-shell off",
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


def mappings():
    """Start, end, offset in the file, and the file, of the program's executable memory."""
    with open(f"/proc/{gdb.selected_inferior().pid}/maps") as maps:
        for line in maps:
            span, rights, offset, _, _, *path = line.rstrip("\n").split(maxsplit=5)
            if "x" in rights and path and path[0].startswith("/"):
                yield *(int(each, 16) for each in span.split("-")), int(offset, 16), path[0]


def load_program():
    """Has gdb read a program that its dynamic linker was started with: its name is in no list of libraries."""
    known = {os.path.realpath(objfile.filename) for objfile in gdb.objfiles() if objfile.filename}
    for start, _, offset, path in list(mappings()):
        if path not in known:
            known.add(path)
            gdb.execute(f'add-symbol-file "{path}" -o {start - address_of(path, offset):#x}', to_string=True)


def address_of(path: str, offset: int) -> int:
    """The virtual address, in the file, of the segment that has the page at an offset."""
    with open(path, "rb") as file:
        header = file.read(64)
        (at,), (count,) = struct.unpack_from("<Q", header, 32), struct.unpack_from("<H", header, 56)
        file.seek(at)
        for kind, _, begin, address, size in struct.iter_unpack("<IIQQ8xQ16x", file.read(56 * count)):
            if kind == PT_LOAD and begin - PAGE < offset < begin + size:
                return offset - begin + address
    raise ValueError(f"{path} has nothing to load at {offset:#x}")


class Places:
    """Sets the breakpoints of a file when the program has loaded it."""

    def __init__(self, offsets: dict[str, list[int]]) -> None:
        self._offsets = offsets

    def loaded(self, event: gdb.NewObjFileEvent) -> None:
        file = os.path.realpath(event.new_objfile.filename or "")
        for offset in self._offsets.pop(file, []):
            load_program()
            for start, end, begin, path in mappings():
                if path == file and start <= start + offset - begin < end:
                    Stop(f"*{start + offset - begin:#x}")


out = open(os.environ["STOPS"], "wb")
if "AT" in os.environ:
    gdb.events.new_objfile.connect(Places(json.loads(os.environ["AT"])).loaded)
else:
    Stop("probe_me_after")
if "HOLD" in os.environ:
    End("_exit")
    End("_Exit")  # which musl calls
gdb.execute("run")
out.close()
code = gdb.convenience_variable("_exitcode")
gdb.execute(f"quit {1 if code is None else int(code)}")
