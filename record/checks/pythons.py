"""Running Pythons: whether their functions will have names."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from iaprof.record.checks.processes import mapped, opened, read_some, shortened
from iaprof.record.checks.result import Check, Level

GROUP = "Stacks"
MOST_LINES = 8
PERF_SUPPORT = (3, 12)
_VARIABLE = b"PYTHONPERFSUPPORT"
_INTERPRETER = re.compile(rb"(lib)?python3(?:\.\d+)?[td]*(?(1)\.so[0-9.]*)")
_MOST_BYTES = 4 << 20


@dataclass
class _Interpreter:
    """One file that is CPython, and the processes that run it."""

    path: str
    pids: list[int] = field(default_factory=list)

    @property
    def version(self) -> tuple[int, int] | None:
        found = re.search(r"python3\.(\d{1,3})", os.path.basename(self.path))
        return (3, int(found[1])) if found else None


def checks() -> Iterator[Check]:
    """Checks the Pythons that run, this one not counted."""
    interpreters = _interpreters()
    for interpreter in interpreters[:MOST_LINES]:
        yield _check(interpreter)
    if len(interpreters) > MOST_LINES:
        yield Check(GROUP, "Python", Level.WARNING, f"and {len(interpreters) - MOST_LINES} more that run")
    if not interpreters:
        yield Check(GROUP, "Python", Level.OK, "none runs, or none that can be seen")


def _interpreters() -> list[_Interpreter]:
    """Those that run, the ones with the most processes first."""
    by_pid = {}
    for file in mapped(_INTERPRETER):
        # The library comes after the executable that is linked to it, and it is the interpreter then.
        if file.pid != os.getpid() and (file.pid not in by_pid or os.path.basename(file.path).startswith("lib")):
            by_pid[file.pid] = file
    found: dict[tuple[int, int], _Interpreter] = {}
    for pid, file in by_pid.items():
        with opened(file.location) as fd:
            if fd is None:
                continue
            status = os.fstat(fd)
            inode = status.st_dev, status.st_ino
            if inode not in found:
                found[inode] = _Interpreter(file.path)
            found[inode].pids.append(pid)
    return sorted(found.values(), key=lambda interpreter: -len(interpreter.pids))


def _check(interpreter: _Interpreter) -> Check:
    version = interpreter.version
    name = f"Python {version[0]}.{version[1]}" if version else "Python"
    without = [pid for pid in interpreter.pids if not has_perf_support(pid)]
    who, file = _processes(interpreter.pids), shortened(interpreter.path)
    if version and version < PERF_SUPPORT:
        return Check(GROUP, name, Level.WARNING, f"names of its functions came with 3.12 ({who})", file=file)
    if without:
        text = f"PYTHONPERFSUPPORT is not set in {_processes(without)} ({who})"
        mend = f"export PYTHONPERFSUPPORT=1    # and start {'it' if len(without) == 1 else 'them'} again"
        return Check(GROUP, name, Level.WARNING, text, mend, file)
    return Check(GROUP, name, Level.OK, f"names its functions ({who})", file=file)


def _processes(pids: list[int]) -> str:
    return f"process {pids[0]}" if len(pids) == 1 else f"{len(pids)} processes"


def has_perf_support(pid: int) -> bool:
    """Whether a running Python writes the names of its functions for perf; only root sees it of others' processes."""
    for variable in read_some(f"/proc/{pid}/environ", _MOST_BYTES).split(b"\0"):
        name, _, value = variable.partition(b"=")
        if name == _VARIABLE and value not in (b"", b"0"):
            return True
    return _asks_for_perf(read_some(f"/proc/{pid}/cmdline", _MOST_BYTES).split(b"\0"))


def _asks_for_perf(command: list[bytes]) -> bool:
    """Whether the interpreter's own options, which end where the program begins, say -X perf or -X perf_jit."""
    rest = iter(command[1:])
    for argument in rest:
        if argument in (b"-c", b"-m") or not argument.startswith(b"-"):
            return False
        value = next(rest, b"") if argument in (b"-X", b"-W") else argument[2:]
        if argument.startswith(b"-X") and value in (b"perf", b"perf_jit"):
            return True
    return False
