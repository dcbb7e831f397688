"""Running Pythons: whether stacks will have their functions, searched for as a recording does."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from iaprof.basics.quantities import counted
from iaprof.bpf.processes import running_pids
from iaprof.bpf.sizes import kernel_offsets
from iaprof.record.checks.result import Check, Level, shortened
from iaprof.record.symbolize.opener import Opener
from iaprof.record.unwinding.interpreters import InterpreterSearch
from iaprof.record.unwinding.mappings import Images, executable
from iaprof.sandbox.worker import Closing
from iaprof.symbols.python.layout import FIRST_MINOR, LAST_MINOR
from iaprof.symbols.unwind.finishing import Finishing, Mapping

GROUP = "Stacks"
MOST_LINES = 8
SECONDS = 3.0
_INTERPRETER = re.compile(r"(lib)?python(\d(?:\.\d{1,3})?)?[a-z]{0,3}(?(1)\.so[0-9.]*)")
_DELETED = " (deleted)"
_READABLE = "let the users who run it read the file"
_ANOTHER = f"run the program with a release of CPython 3.{FIRST_MINOR} to 3.{LAST_MINOR} that is not free-threaded"
_UNKNOWN = "no CPython was found in its file: it is older than 3.7, another implementation, or exports no symbols"
_REFUSED = "its process's user may not read its file"


@dataclass
class _Interpreter:
    """A file with an interpreter, and the processes that run it."""

    path: str
    version: str  # such as "3.11.2"; only what the file's name says, if its frames cannot be walked
    problem: str  # why its frames cannot be walked; empty if they can
    pids: list[int] = field(default_factory=list)


def checks() -> Iterator[Check]:
    """Checks the running Pythons but our own."""
    if os.geteuid() != 0:
        yield Check(GROUP, "Python", Level.WARNING, "only root can tell whether running Pythons will be seen")
        return
    if kernel_offsets() is None:
        text = "stacks will have no Python functions: the kernel's BTF lacks what finding them needs"
        yield Check(GROUP, "Python", Level.WARNING, text)
        return
    pids = [pid for pid in running_pids() if pid != os.getpid()]  # before we start children
    with PythonSearch() as search:
        unsearched = search.run(pids, time.monotonic() + SECONDS)
    yield from _lines(search.found)
    if unsearched:
        text = f"{counted(unsearched, 'process', 'processes')} could not be checked in {SECONDS:g} s"
        yield Check(GROUP, "Python", Level.WARNING, text)
    elif not search.found:
        yield Check(GROUP, "Python", Level.OK, "none runs")


def _lines(interpreters: Sequence[_Interpreter]) -> Iterator[Check]:
    """Yields a check for each file: those with problems first, then those with most processes."""
    ordered = sorted(interpreters, key=lambda interpreter: (not interpreter.problem, -len(interpreter.pids)))
    for interpreter in ordered[:MOST_LINES]:
        yield _check(interpreter)
    if rest := ordered[MOST_LINES:]:
        unseen = sum(bool(interpreter.problem) for interpreter in rest)
        text = f"and {len(rest)} more files; functions of {unseen or 'none'} of them will not be in stacks"
        yield Check(GROUP, "Python", Level.WARNING if unseen else Level.OK, text)


def _check(interpreter: _Interpreter) -> Check:
    name, file = f"Python {interpreter.version}".rstrip(), shortened(interpreter.path)
    who = f"process {interpreter.pids[0]}" if len(interpreter.pids) == 1 else f"{len(interpreter.pids)} processes"
    if not interpreter.problem:
        return Check(GROUP, name, Level.OK, f"its functions will be in stacks ({who})", file=file)
    what_to_do = _READABLE if interpreter.problem == _REFUSED else _ANOTHER
    text = f"its functions will not be in stacks ({who}): {interpreter.problem}. To see them, {what_to_do}"
    return Check(GROUP, name, Level.WARNING, text, file=file)


class _OutOfTime(Exception):
    """No more files are opened."""


class PythonSearch(Closing):
    """Searches processes for interpreters; also a context manager."""

    def __init__(self) -> None:
        self._opener = Opener()
        self._images = Images(self._opener)
        self._finishing = Finishing(self._open)
        self._search = InterpreterSearch(self._finishing, self._images)
        self._end = 0.0
        self._refused: set[int] = set()  # numbers of files that cannot be read
        self._paths: dict[int, str] = {}  # by number of the file
        self._found: dict[tuple[str, str, str], _Interpreter] = {}

    def close(self) -> None:
        """Ends the children, which open and read files."""
        self._finishing.close()
        self._opener.close()

    @property
    def found(self) -> list[_Interpreter]:
        """The interpreters that were found."""
        return list(self._found.values())

    def run(self, pids: Sequence[int], end: float) -> int:
        """Searches processes until `end`, time.monotonic(); returns how many of them were not searched."""
        self._end = end
        for number, pid in enumerate(pids):
            try:
                interpreter = self._interpreter(pid, executable(pid, self._images))
            except _OutOfTime:
                return len(pids) - number
            if time.monotonic() > end:
                return len(pids) - number
            if interpreter is not None:
                self._found.setdefault(interpreter, _Interpreter(*interpreter)).pids.append(pid)
        return 0

    def _open(self, number: int) -> int | None:
        if time.monotonic() > self._end:
            raise _OutOfTime  # a process may have mapped thousands of files
        file = self._images.open(number)
        if file is None:
            self._refused.add(number)
        return file

    def _interpreter(self, pid: int, mappings: Sequence[Mapping]) -> tuple[str, str, str] | None:
        """Returns path, version and problem of the interpreter that a process runs; None if it runs none."""
        found = self._search.find(mappings)
        if found is not None:
            mapping, interpreter = found
            path = self._path(pid, mapping)
            return _without(path, interpreter) if isinstance(interpreter, str) else (path, interpreter.version, "")
        for mapping in mappings:
            if mapping.image >= 0 and self._images.may_be_python(mapping.image):
                path = self._path(pid, mapping)
                if _INTERPRETER.fullmatch(os.path.basename(path)):
                    return _without(path, _REFUSED if mapping.image in self._refused else _UNKNOWN)
        return None

    def _path(self, pid: int, mapping: Mapping) -> str:
        """Returns the path of a mapped file; empty if the process has ended."""
        if mapping.image not in self._paths:
            path = b""
            with contextlib.suppress(OSError):
                path = os.readlink(f"/proc/{pid}/map_files/{mapping.start:x}-{mapping.end:x}".encode())
            self._paths[mapping.image] = path.decode("utf-8", "backslashreplace").removesuffix(_DELETED)
        return self._paths[mapping.image]


def _without(path: str, problem: str) -> tuple[str, str, str]:
    """Returns path, version and problem of an interpreter whose frames cannot be walked; its name tells the version."""
    match = _INTERPRETER.fullmatch(os.path.basename(path))
    version = (match[2] or "") if match else ""
    older = re.fullmatch(r"2\.\d+|3\.(\d+)", version)
    if older and int(older[1] or 0) < FIRST_MINOR:
        return path, version, f"it is older than Python 3.{FIRST_MINOR}"
    return path, version, problem
