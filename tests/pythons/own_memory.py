# SPDX-License-Identifier: Apache-2.0
"""Walks the frames of its own threads in its own memory, as an interpreter's file says that they lie there.

    own_memory.py FILE PREFERRED RUNTIME LAYOUT      whichever Python this runs in says what is right

FILE has the interpreter; PREFERRED is the address of its first segment, RUNTIME that of its _PyRuntime, and LAYOUT a
Layout as JSON. Three threads and the main one stop in a C function that releases the interpreter's lock; another one
walks their frames. As JSON it prints two lists for each thread, innermost first: what sys._getframe told at the stop
(file, name, line, address and first line of the code object, offset of the instruction), and what was found, the first
bytes of objects as hexadecimal text.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import struct
import sys
import threading
from collections.abc import Iterator
from typing import Any

OWNED_BY_C, CODE_TAGS = 3, 7
COPIED = 1 << 12  # bytes of an object
PAGE = 4096
library = ctypes.CDLL(None)
library.pthread_self.restype = ctypes.c_ulong
memory = os.open("/proc/self/mem", os.O_RDONLY)
told: dict[int, list[Any]] = {}
locks: list[Any] = []


def word(address: int, form: str = "<Q") -> int:
    return struct.unpack(form, os.pread(memory, struct.calcsize(form), address))[0]  # type: ignore[no-any-return]


def copied(address: int) -> str:
    """The first bytes, as many as can be read."""
    content = os.pread(memory, PAGE - address % PAGE, address)
    while len(content) < COPIED:
        try:
            content += os.pread(memory, PAGE, address + len(content))
        except OSError:
            break
    return content.hex()


class Walk:
    def __init__(self, file: str, preferred: int, runtime: int, layout: dict[str, int]) -> None:
        with open("/proc/self/maps") as maps:
            lines = [line.split() for line in maps]
        (first,) = [line[0] for line in lines if line[5:] == [file] and int(line[2], 16) == 0]
        self.runtime = int(first.split("-")[0], 16) - preferred + runtime
        self.layout = layout

    def interpreters(self) -> Iterator[int]:
        """From the newest to the main one."""
        interpreter = word(self.runtime + self.layout["interpreters_head"])
        while interpreter:
            yield interpreter
            interpreter = word(interpreter + self.layout["interpreter_next"])

    def thread(self, thread_id: int) -> int:
        """The state of a thread that has frames: one that made another interpreter may have a state there, too."""
        at = self.layout
        for interpreter in self.interpreters():
            thread = word(interpreter + at["threads_head"])
            while thread:
                if word(thread + at["thread_id"]) == thread_id and self.top(thread):
                    return thread
                thread = word(thread + at["thread_next"])
        raise LookupError(thread_id)

    def top(self, thread: int) -> int:
        """Its innermost frame."""
        at = self.layout
        if at["thread_frame"] is not None:
            return word(thread + at["thread_frame"])
        return word(self.cframes(thread)[0] + at["cframe_frame"])

    def cframes(self, thread: int) -> list[int]:
        """The _PyCFrame of each evaluation loop and one below them; 3.11 and 3.12."""
        at, found = self.layout, []
        cframe = word(thread + at["thread_cframe"])
        while cframe:
            found.append(cframe)
            cframe = word(cframe + at["cframe_previous"])
        return found

    def frames(self, thread: int) -> Iterator[dict[str, Any]]:
        """Those of functions; the last of each evaluation loop has `is_last`."""
        at = self.layout
        frame = self.top(thread)
        while frame:
            content = os.pread(memory, at["frame_bytes"], frame)
            code, previous, instruction = (
                struct.unpack_from("<Q", content, at[f"frame_{name}"])[0]
                for name in ("code", "previous", "instruction")
            )
            if not self.is_by_c(frame):
                is_entry = at["frame_is_entry"]
                is_last = self.is_by_c(previous) if is_entry is None else bool(content[is_entry])
                more = {"is_last": is_last, "owner": content[at["frame_owner"]]}
                yield {**self.code(code & ~CODE_TAGS, instruction), **more}
            frame = previous

    def is_by_c(self, frame: int) -> bool:
        """Whether a frame is not a function's; always false in 3.11."""
        has_entries = self.layout["frame_is_entry"] is not None
        return not has_entries and word(frame + self.layout["frame_owner"], "B") >= OWNED_BY_C

    def code(self, code: int, instruction: int) -> dict[str, Any]:
        at = self.layout
        objects = {
            name: copied(word(code + at[f"code_{name}"])) for name in ("filename", "name", "qualname", "linetable")
        }
        version = at["code_version"]
        return {
            **objects,
            "code": code,
            "first_line": word(code + at["code_first_line"], "<i"),
            "version": None if version is None else word(code + version, "<I"),
            "offset": instruction - code - at["code_bytecode"],
        }


def note() -> None:
    """What this thread's stop is, which is one in the caller."""
    frames: list[Any] = []
    frame = sys._getframe(1)
    while frame:
        code = frame.f_code
        frames.append(
            [code.co_filename, code.co_qualname, frame.f_lineno, id(code), code.co_firstlineno, frame.f_lasti]
        )
        frame = frame.f_back  # type: ignore[assignment]
    told[library.pthread_self()] = frames


def stop(lock: Any) -> None:
    note(), lock.acquire()  # type: ignore[func-returns-value]


class Größe:
    """Its name is not ASCII: a string of the kind 1; those of 尺 and 𐎠 are of the kinds 2 and 4."""

    def __init__(self, lock: Any) -> None:
        stop(lock)

    @property
    def 尺(self) -> None:
        def 𐎠(lock: Any) -> None:
            stop(
                lock
            )  # fmt: skip

        𐎠(locks[2])


def generated(lock: Any) -> Iterator[int]:
    yield 1
    stop(lock)
    yield 2


def in_a_class(lock: Any) -> None:
    Größe(lock)


def in_a_generator(lock: Any) -> None:
    sorted(generated(lock), key=lambda number: -number)


def through_c(lock: Any) -> None:
    # exec makes code, and sorted is a C function: there are several evaluation loops
    words = "\n\nlist(map(lambda lock: sorted([lock], key=lambda lock: stop(lock) or 1), [lock]))"
    exec(compile(words, "/ohne/Endung/\udcff\u5c3a.py", "exec"), {"stop": stop, "lock": lock})


def with_strings(lock: Any) -> None:
    assert object.__new__(Größe).尺 is None


def wait_for(walk: Walk, thread: int) -> list[dict[str, Any]]:
    """The frames of a thread once it has noted its stop and waits."""
    while True:
        if thread in told:
            frames = list(walk.frames(walk.thread(thread)))
            if frames[0]["code"] == id(stop.__code__):
                return frames


def walk_all(walk: Walk, threads: list[int]) -> None:
    result = []
    for thread in threads:
        found = wait_for(walk, thread)
        cframes = 0 if walk.layout["thread_cframe"] is None else len(walk.cframes(walk.thread(thread)))
        result.append({"told": told[thread], "found": found, "cframes": cframes})
    print(json.dumps({"threads": result, "interpreters": len(list(walk.interpreters()))}), flush=True)
    os._exit(0)


def failed(arguments: Any) -> None:
    """Ends the process where a thread fails: the others would wait for ever."""
    sys.__excepthook__(*arguments[:3])
    os._exit(1)


def main(file: str, preferred: str, runtime: str, layout: str) -> None:
    walk = Walk(file, int(preferred), int(runtime), json.loads(layout))
    threading.excepthook = failed
    name = "_interpreters" if sys.version_info >= (3, 13) else "_xxsubinterpreters"
    kept = importlib.import_module(name).create()
    threads = []
    for function in (in_a_generator, through_c, with_strings, None):
        locks.append(threading.Lock())
        locks[-1].acquire()
        if function:
            threads.append(threading.Thread(target=function, args=(locks[-1],)))
    for thread in threads:
        thread.start()
    every = [library.pthread_self(), *(thread.ident for thread in threads)]
    threading.Thread(target=walk_all, args=(walk, every)).start()
    in_a_class(locks[-1])
    del kept


main(*sys.argv[1:])
