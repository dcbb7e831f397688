"""Names addresses of ELF files: sandboxed children read the files, and this module checks their answers.

One child describes files and looks up addresses (symbols/files/binary_reader.py). Before that, other children make
tables of a file's debug information (symbols/files/dwarf.py), which are cached (symbols/files/cache.py). Such a child
reads one file only: a hostile file that takes over its reader cannot spoil the cached tables of another file.

A file is an open descriptor. The caller opens it, and checks that it is the build that was mapped.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from iaprof.basics.errors import IaprofError
from iaprof.formats.ranges import ranges
from iaprof.sandbox.deadline import patient_clock
from iaprof.sandbox.parent import (
    AnswerError,
    Limits,
    Sandbox,
    SandboxError,
    any_list,
    integer,
    sentence,
    string,
    string_list,
)
from iaprof.sandbox.worker import Closing
from iaprof.symbols.files.cache import Cache, default_folder, key_of
from iaprof.symbols.names.names import LONGEST_NAME, SOURCES, Names, Symbolized

# Memory is limited to less than 1 GB. Mapped files come on top of that, and belong to the page cache.
_MEMORY, _MAPPED, _TABLE, _ANSWER = 896 << 20, 16 << 30, 512 << 20, 256 << 20
_READING = Limits(memory_bytes=_MEMORY, seconds=10.0, files=32, mapped_bytes=_MAPPED, written_bytes=_ANSWER)
_MAKING = Limits(memory_bytes=_MEMORY, seconds=10.0, files=2, mapped_bytes=_MAPPED, written_bytes=_TABLE)
_MOST_DWO = 64  # files of split units for one child
_SPLITTING = Limits(memory_bytes=_MEMORY, seconds=10.0, files=2 + _MOST_DWO, mapped_bytes=_MAPPED, written_bytes=_TABLE)
_MOST_SPLIT = 16 * _MOST_DWO  # units that are read of one file

# A damaged file may keep its readers busy for ever, but a healthy one of 1 GB is worth waiting for. So each file gets a
# fixed time plus one in proportion to its size. Healthy files are read at 70 MB/s and more.
_FACTS_SECONDS = 3.0  # for a few ms of work
_SECONDS = 4.5  # for naming addresses, all stages together
_NAMING_SECONDS = 1.5  # the part of it that is reserved for looking up addresses,
_SYMBOLS_SECONDS = 0.5  # and the part of this for looking up once more without debug information
_BYTES_PER_SECOND = 20e6

_PART_BYTES, _MOST_PARTS = 48 << 20, 4  # of debug information for one child: a second of work, 300 MB of memory


class BinaryError(IaprofError):
    """The file is not a readable ELF file; the text says why."""


@dataclass(frozen=True)
class Facts:
    """What an ELF file says about itself."""

    build_id: bytes | None
    debuglink: tuple[str, int] | None  # the separate debug file's name, without '/', and CRC-32
    has_debug_info: bool
    has_symbols: bool  # .symtab or .gnu_debugdata
    frame_pointers: bool | None  # whether the code was built with frame pointers; None if unknown
    has_code: bool  # False for separate debug files


@dataclass(frozen=True)
class Companions:
    """Opens files that belong to an ELF file: those with its split debug information."""

    path: str  # of the ELF file, absolute
    open: Callable[[str], int | None]  # opens a regular file for reading; returns None if it cannot


@dataclass(frozen=True)
class _Source:
    """A file that may have debug information."""

    file: int
    status: os.stat_result
    facts: Facts
    debug_bytes: int
    second_file: bool  # whether a part of its debug information is in yet another file, which dwz made
    is_split: bool  # whether units of its debug information are in .dwo files or a .dwp file

    @property
    def pieces(self) -> int:
        """The number of pieces in which its debug information is read."""
        return min(1 + self.debug_bytes // _PART_BYTES, _MOST_PARTS)


@dataclass(frozen=True)
class _Unit:
    """A unit of split debug information."""

    dwo_id: str  # hexadecimal
    name: str  # of its .dwo
    folder: str  # in which it was compiled

    def paths(self, program: str) -> Iterator[str]:
        """Yields the paths where the .dwo may be: where the compiler wrote it, and beside the program."""
        beside = os.path.dirname(program)
        yield from dict.fromkeys(
            os.path.normpath(os.path.join(beside, folder, name))
            for folder, name in ((self.folder, self.name), ("", self.name), ("", os.path.basename(self.name)))
            if name and "\0" not in folder + name
        )


class Binaries(Closing):
    """Reads ELF files in child processes; also a context manager."""

    def __init__(self, cache: Path | None = None) -> None:
        """Starts nothing yet. `cache` is the folder for tables of debug information; None for the default one."""
        self._cache = Cache(cache or default_folder())
        self._sandbox = Sandbox("iaprof.symbols.files.binary_reader", _READING)

    def begin(self, nice: int = 0) -> None:
        """Starts the child process, with a nice value: it gets ready while this process does something else."""
        self._sandbox.begin()
        if nice and self._sandbox.pid is not None:
            with contextlib.suppress(OSError):  # it has ended, which a call will tell
                os.setpriority(os.PRIO_PROCESS, self._sandbox.pid, nice)

    def close(self) -> None:
        """Ends the child process."""
        self._sandbox.close()

    def facts(self, file: int) -> Facts:
        """Returns what a file says about itself; `file` is an open descriptor.

        Raises:
            BinaryError: the file is not a regular file, or not a readable ELF file.
        """
        return self._source(file).facts

    def addresses(self, file: int, offsets: NDArray[np.uint64]) -> dict[int, int]:
        """Returns the address of each offset of the file, by offset, if a loaded segment contains it.

        Args:
            file: open descriptor.
            offsets: uint64[n], offsets in the file, bytes.

        Raises:
            BinaryError: the file is not a readable ELF file.
        """
        try:
            answer = any_list(
                self._sandbox.call("addresses", {}, offsets.astype("<u8").tobytes(), fds=[file], seconds=_FACTS_SECONDS)
            )
            if len(answer) != len(offsets):
                raise AnswerError
            pairs = zip(offsets.tolist(), answer, strict=True)
            return {offset: integer(address, 1 << 64) for offset, address in pairs if address is not None}
        except (SandboxError, AnswerError) as error:
            raise BinaryError(sentence(str(error))) from None

    def name(
        self,
        file: int,
        offsets: NDArray[np.uint64],
        debug: int | None = None,
        everything: bool = False,
        companions: Companions | None = None,
    ) -> Symbolized:
        """Names offsets of a file. Whatever is wrong with the file goes into `problem` and is never raised.

        Args:
            file: open descriptor of the mapped file.
            offsets: uint64[n], offsets in the file, bytes; sorted and distinct.
            debug: open descriptor of its separate debug file.
            everything: add a range, with its size, for every function symbol of the file.
            companions: opens its split debug information; None: it is not read.
        """
        end = patient_clock() + _SECONDS
        try:
            main = self._source(file)
        except BinaryError as error:
            return Symbolized(problem=str(error))
        end += main.status.st_size / _BYTES_PER_SECOND
        problems: list[str] = []
        apart = None
        if debug is not None:
            try:
                apart = self._source(debug)
                end += apart.status.st_size / _BYTES_PER_SECOND
            except BinaryError as error:
                problems.append(f"its separate debug file: {error}")
        if apart and None is not apart.facts.build_id != main.facts.build_id is not None:
            problems.append("its separate debug file is of another build")
            apart = None
        source = apart if apart and apart.facts.has_debug_info else main
        tables = self._tables(source, end - _NAMING_SECONDS, problems)
        split = self._split_tables(main, source, offsets, companions, end - _NAMING_SECONDS, problems)
        try:
            if not tables and not split:
                return self._ask_names(main, offsets, apart, ([], []), everything, end, problems)
            try:
                before = end - _SYMBOLS_SECONDS
                return self._ask_names(main, offsets, apart, (tables, split), everything, before, problems)
            except (SandboxError, AnswerError) as error:
                self._cache.forget(_key(source), source.pieces)  # the cached tables may be damaged
                problems.append(sentence(f"its debug information was left unread: {error}"))
                return self._ask_names(main, offsets, apart, ([], []), everything, end, problems)
        except (SandboxError, AnswerError) as error:
            problems.append(sentence(str(error)))
            return Symbolized(problem=_joined(problems), frame_pointers=main.facts.frame_pointers)
        finally:
            for table in (*tables, *split):
                os.close(table)

    def _source(self, file: int) -> _Source:
        """Has the child describe a file; raises BinaryError."""
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode):
            raise BinaryError("it is not a regular file")
        try:
            answer = self._sandbox.call(
                "facts", fds=[file], seconds=_FACTS_SECONDS + status.st_size / _BYTES_PER_SECOND
            )
            facts, debug_bytes, second_file, is_split = _checked_facts(answer)
        except (SandboxError, AnswerError) as error:
            raise BinaryError(sentence(str(error))) from None
        return _Source(file, status, facts, debug_bytes, second_file, is_split)

    def _tables(self, source: _Source, end: float, problems: list[str]) -> list[int]:
        """Returns open files with the tables of the source's debug information; none if it has no debug information."""
        if not source.facts.has_debug_info:
            return []
        if source.second_file:
            problems.append("a part of its debug information is in a second file, made by dwz, which is not read")
        key = _key(source)
        cached = self._cache.find(key, source.pieces)
        if cached is not None:
            return cached
        files = [self._cache.new_file() for _ in range(source.pieces)]
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            results = list(pool.map(lambda piece: _make(source, files, piece, end), range(len(files))))
        errors = [result for result in results if isinstance(result, str)]
        names_nothing = not errors and not sum(result for result in results if isinstance(result, int))
        if names_nothing and source.is_split:
            for file in files:
                os.close(file)
            return []
        if names_nothing:
            errors = ["it names no code"] * len(files)
        if errors:
            problems.append(f"its debug information was left unread: {sentence(errors[0])}")
        if len(errors) == len(files):
            for file in files:
                os.close(file)
            return []
        if not errors:
            self._cache.keep(key, files)
        return files

    def _split_tables(
        self,
        main: _Source,
        source: _Source,
        offsets: NDArray[np.uint64],
        companions: Companions | None,
        end: float,
        problems: list[str],
    ) -> list[int]:
        """Returns open files with the tables of split units.

        Args:
            main: the mapped file.
            source: has the skeletons of the units.
            offsets: see `name`.
            companions: opens the other files.
            end: when the children have to have answered, by patient_clock().
            problems: gets a sentence if units are missing.
        """
        if not source.is_split:
            return []
        if companions is None:
            problems.append("its split debug information is not read here")
            return []
        try:
            answer = self._sandbox.call(
                "split_units", {"most": _MOST_SPLIT}, offsets.astype("<u8").tobytes(), fds=[main.file, source.file],
                seconds=max(end - patient_clock(), 0.1),
            )  # fmt: skip
            missing = {unit.dwo_id: unit for unit in map(_checked_unit, any_list(answer)[:_MOST_SPLIT])}
        except (SandboxError, AnswerError) as error:
            problems.append(sentence(f"its split debug information was left unread: {error}"))
            return []
        tables: list[int] = []
        if (package := companions.open(f"{companions.path}.dwp")) is not None:
            tables += _make_split(source, [(unit, package) for unit in missing.values()], missing, end)
        others = list(missing.values())
        for first in range(0, len(others), _MOST_DWO):
            opened = []
            for unit in others[first : first + _MOST_DWO]:
                paths = unit.paths(companions.path) if patient_clock() < end else ()
                file = next((file for path in paths if (file := companions.open(path)) is not None), None)
                opened += [(unit, file)] if file is not None else []
            tables += _make_split(source, opened, missing, end)
        if missing:
            name = next(iter(missing.values())).name
            more = f" and {len(missing) - 1} more files" if len(missing) > 1 else ""
            are = "are" if more else "is"
            problems.append(sentence(f"its lines are in {name}{more}, which {are} not there, or of another build"))
        return tables

    def _ask_names(
        self,
        main: _Source,
        offsets: NDArray[np.uint64],
        apart: _Source | None,
        tables: tuple[Sequence[int], Sequence[int]],
        everything: bool,
        end: float,
        problems: list[str],
    ) -> Symbolized:
        """Has the child look up names; raises SandboxError or AnswerError.

        Args:
            main: the mapped file.
            offsets: see `name`.
            apart: its separate debug file.
            tables: open files with tables of debug information; those of split units.
            everything: see `name`.
            end: when the child has to have answered, by patient_clock().
            problems: known so far.
        """
        columns = os.memfd_create("iaprof names", os.MFD_CLOEXEC)
        try:
            answer = self._sandbox.call(
                "name",
                {"debug": apart is not None, "everything": everything, "split": len(tables[1])},
                offsets.astype("<u8").tobytes(),
                fds=[main.file, *([apart.file] if apart else []), *tables[0], *tables[1], columns],
                seconds=max(end - patient_clock(), _SYMBOLS_SECONDS),
            )
            names, sources, new_problems = _checked_names(answer, columns)
            outermost, no_calls = (_checked_offsets(answer, member, offsets) for member in ("outermost", "no_calls"))
        finally:
            os.close(columns)
        all_problems = [*problems, *new_problems]
        if not len(names) and not all_problems and len(offsets):
            stripped = not main.facts.has_symbols and not main.facts.has_debug_info
            all_problems.append(("it is stripped: " if stripped else "") + "it has no names for these addresses")
        return Symbolized(
            names, " and ".join(sources), _joined(all_problems), main.facts.frame_pointers, outermost, no_calls
        )


def _key(source: _Source) -> str:
    return key_of(source.facts.build_id, source.status)


def _joined(problems: Sequence[str]) -> str:
    return "; ".join(dict.fromkeys(problems))


def _make(source: _Source, files: Sequence[int], piece: int, end: float) -> int | str:
    """Has a new child fill the file of one piece; returns its number of address ranges, or why the child failed."""
    with Sandbox("iaprof.symbols.files.dwarf", _MAKING) as sandbox:
        try:
            answer = sandbox.call(
                "make",
                {"piece": piece, "pieces": len(files)},
                fds=[source.file, files[piece]],
                seconds=max(end - patient_clock(), 0.1),
            )
            return integer(answer)
        except (SandboxError, AnswerError) as error:
            with contextlib.suppress(OSError):
                os.ftruncate(files[piece], 0)
            return str(error)


def _make_split(
    source: _Source, files: Sequence[tuple[_Unit, int]], missing: dict[str, _Unit], end: float
) -> list[int]:
    """Has a new child make tables of split units, and removes these from `missing`; closes the units' files."""
    distinct = list(dict.fromkeys(file for _, file in files))
    table = os.memfd_create("iaprof symbols", os.MFD_CLOEXEC)
    try:
        with Sandbox("iaprof.symbols.files.dwarf", _SPLITTING) as sandbox:
            units = [[unit.dwo_id, 2 + distinct.index(file)] for unit, file in files]
            answer = sandbox.call(
                "make_split", {"units": units}, fds=[source.file, table, *distinct],
                seconds=max(end - patient_clock(), 0.1),
            ) if units else []  # fmt: skip
        for (unit, _), was_found in zip(files, any_list(answer), strict=True):
            if was_found is True:
                missing.pop(unit.dwo_id, None)
        return [table]
    except (SandboxError, AnswerError, ValueError):
        os.ftruncate(table, 0)
        return [table]
    finally:
        for file in distinct:
            os.close(file)


def _checked_unit(answer: Any) -> _Unit:
    match answer:
        case [str(dwo_id), str(name), str(folder)] if re.fullmatch("[0-9a-f]{1,16}", dwo_id):
            return _Unit(dwo_id, string(name), string(folder))
    raise AnswerError


def _checked_facts(answer: Any) -> tuple[Facts, int, bool, bool]:
    match answer:
        case {
            "build_id": None | str() as build_id,
            "debuglink": None | [str(), int()] as debuglink,
            "has_debug_info": bool(has_debug_info),
            "has_symbols": bool(has_symbols),
            "has_code": bool(has_code),
            "frame_pointers": None | bool() as frame_pointers,
            "debug_bytes": debug_bytes,
            "second_file": bool(second_file),
            "is_split": bool(is_split),
        }:
            link = None
            if debuglink is not None:
                link = string(debuglink[0]), integer(debuglink[1], 1 << 32)
                if "/" in link[0] or "\0" in link[0] or link[0] in ("", ".", ".."):
                    raise AnswerError
            try:
                identity = None if build_id is None else bytes.fromhex(build_id)
            except ValueError:
                raise AnswerError from None
            facts = Facts(identity, link, has_debug_info, has_symbols, frame_pointers, has_code)
            return facts, integer(debug_bytes), second_file, is_split
    raise AnswerError


def _checked_names(answer: Any, file: int) -> tuple[Names, list[str], list[str]]:
    """Checks the columns that the child wrote into a file; raises AnswerError.

    Returns:
        The names, sorted; their sources; problems.
    """
    match answer:
        case {
            "rows": rows,
            "frames": frames,
            "strings": strings,
            "string_bytes": string_bytes,
            "sources": sources,
            "problems": problems,
        }:
            counts = [integer(count, _ANSWER) for count in (rows, rows, rows, frames, frames, frames)]
            content = _content(file, 8 * sum(counts) + integer(string_bytes, _ANSWER))
        case _:
            raise AnswerError
    numbers = np.frombuffer(content, "<i8", sum(counts))
    addresses, sizes, chains, functions, files, lines = np.split(numbers, np.cumsum(counts)[:-1])
    texts = str(memoryview(content)[numbers.nbytes :], "utf-8", "replace").split("\0")
    bounds = (addresses, 0, 1 << 62), (sizes, 1, 1 << 62), (chains, 1, len(functions) + 1), (lines, 0, 1 << 32)
    for column, lowest, limit in (*bounds, (functions, 0, len(texts)), (files, 0, len(texts))):
        if len(column) and (column.min() < lowest or column.max() >= limit):
            raise AnswerError
    if chains.sum() != len(functions) or len(texts) != strings or max(map(len, texts)) > LONGEST_NAME:
        raise AnswerError
    order = np.lexsort((-sizes, addresses))
    starts = np.cumsum(np.append(0, chains[order]))
    frame = ranges((np.cumsum(chains) - chains)[order], chains[order])
    names = Names(
        addresses[order].astype(np.uint64),
        sizes[order].astype(np.uint64),
        starts,
        functions[frame].astype(np.int32),
        files[frame].astype(np.int32),
        lines[frame].astype(np.uint32),
        texts,
    )
    sentences = [sentence(problem) for problem in string_list(any_list(problems)[:8])]
    if not all(source in SOURCES for source in any_list(sources)):
        raise AnswerError
    return names, any_list(sources)[: len(SOURCES)], sentences


def _checked_offsets(answer: Any, member: str, offsets: NDArray[np.uint64]) -> NDArray[np.uint64] | None:
    """Returns which of the given offsets are in this member of the child's answer; None if the member is None."""
    if member not in answer:
        raise AnswerError
    if answer[member] is None:
        return None
    listed = np.array([integer(offset) for offset in any_list(answer[member])], np.uint64)
    return np.intersect1d(offsets, listed).astype(np.uint64)


def _content(file: int, size: int) -> bytes:
    """Returns the content of a file; raises AnswerError unless it has this size."""
    content = os.pread(file, size, 0) if size == os.fstat(file).st_size else b""
    if len(content) != size:
        raise AnswerError
    return content
