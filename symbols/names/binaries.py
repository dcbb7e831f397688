"""Names for addresses of ELF files: asks sandboxed children, which read them, and checks what they answer.

One child says what files are and looks addresses up (symbols.binary_reader). Before that, children that live for one
file only turn its debug information into a table, which is kept (symbols.dwarf, symbols.cache): what one file's bytes
may do to its reader does not get into what is kept of another.

A file is an open descriptor: who opens it, and whether it is the very build that was mapped, is for the caller to know.
"""

from __future__ import annotations

import contextlib
import os
import stat
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from iaprof.basics.errors import IaprofError
from iaprof.formats.ranges import ranges
from iaprof.sandbox.answers import AnswerError, any_list, integer, sentence, string, string_list
from iaprof.sandbox.closing import Closing
from iaprof.sandbox.parent import Limits, Sandbox, SandboxError
from iaprof.symbols.files.cache import Cache, key_of, usual_folder
from iaprof.symbols.names.names import LONGEST_NAME, Named, Names
from iaprof.symbols.names.sources import SOURCES

# Memory is bounded below 1 GB; what is mapped of files comes on top, and is the page cache's.
_MEMORY, _MAPPED, _TABLE, _ANSWER = 896 << 20, 16 << 30, 512 << 20, 256 << 20
_READING = Limits(memory_bytes=_MEMORY, seconds=10.0, files=8, mapped_bytes=_MAPPED, written_bytes=_ANSWER)
_MAKING = Limits(memory_bytes=_MEMORY, seconds=10.0, files=2, mapped_bytes=_MAPPED, written_bytes=_TABLE)

# A damaged file may keep its readers busy for ever, and a healthy one of 1 GB is worth waiting for. So there is a time
# for every file, and more in proportion to its size: healthy files are read at 70 MB/s and more.
_FACTS_SECONDS = 1.0
_SECONDS = 4.5  # for naming, all stages together
_NAMING_SECONDS = 1.5  # of those, kept back for looking up,
_SYMBOLS_SECONDS = 0.5  # and of these, for looking up once more without debug information
_BYTES_PER_SECOND = 20e6

_PART_BYTES, _MOST_PARTS = 48 << 20, 4  # of debug information for one child: a second of work, 300 MB of memory


class BinaryError(IaprofError):
    """It is no ELF file that can be read; the text says why."""


@dataclass(frozen=True)
class Facts:
    """What an ELF file says about itself."""

    build_id: bytes | None
    debuglink: tuple[str, int] | None  # of its separate debug file: the name, without any '/', and the CRC-32
    has_debug_info: bool
    has_symbols: bool  # .symtab or .gnu_debugdata
    frame_pointers: bool | None  # whether the code keeps them; None where that cannot be told
    has_code: bool  # False for separate debug files


@dataclass(frozen=True)
class _Source:
    """A file that debug information may be read from."""

    file: int
    status: os.stat_result
    facts: Facts
    debug_bytes: int
    second_file: bool  # whether a part of its debug information is in yet another file, as dwz makes them

    @property
    def parts(self) -> int:
        """In how many parts its debug information is read."""
        return min(1 + self.debug_bytes // _PART_BYTES, _MOST_PARTS)


class Binaries(Closing):
    """Reads ELF files in child processes; also a context manager."""

    def __init__(self, cache: Path | None = None) -> None:
        """Starts nothing yet. `cache` is where what was read of debug information is kept; None for the usual place."""
        self._cache = Cache(cache or usual_folder())
        self._sandbox = Sandbox("iaprof.symbols.files.binary_reader", _READING)

    def close(self) -> None:
        """Ends the child process."""
        self._sandbox.close()

    def facts(self, file: int) -> Facts:
        """What the file says about itself; `file` is an open descriptor.

        Raises:
            BinaryError: it is no regular file, or no ELF file that can be read.
        """
        return self._source(file).facts

    def addresses(self, file: int, offsets: NDArray[np.uint64]) -> dict[int, int]:
        """The addresses of places in the file by their offsets, of those that its program header has one for.

        Args:
            file: open descriptor.
            offsets: [n] in the file, bytes.

        Raises:
            BinaryError: it is no ELF file that can be read.
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

    def name(self, file: int, offsets: NDArray[np.uint64], debug: int | None = None, everything: bool = False) -> Named:
        """Names of places in the file. What is wrong with it is told in `problem`, never raised.

        Args:
            file: open descriptor of the file that was mapped.
            offsets: [n] in the file, bytes; sorted and distinct.
            debug: of its separate debug file.
            everything: add a range, with its size, for every function symbol of the file.
        """
        end = time.monotonic() + _SECONDS
        try:
            main = self._source(file)
        except BinaryError as error:
            return Named(problem=str(error))
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
        try:
            if not tables:
                return self._ask_names(main, offsets, apart, [], everything, end, problems)
            try:
                return self._ask_names(main, offsets, apart, tables, everything, end - _SYMBOLS_SECONDS, problems)
            except (SandboxError, AnswerError) as error:
                self._cache.forget(_key(source), source.parts)  # that may be why
                problems.append(sentence(f"its debug information was left unread: {error}"))
                return self._ask_names(main, offsets, apart, [], everything, end, problems)
        except (SandboxError, AnswerError) as error:
            problems.append(sentence(str(error)))
            return Named(problem=_joined(problems), frame_pointers=main.facts.frame_pointers)
        finally:
            for table in tables:
                os.close(table)

    def _source(self, file: int) -> _Source:
        """Raises BinaryError."""
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode):
            raise BinaryError("it is no regular file")
        try:
            answer = self._sandbox.call(
                "facts", fds=[file], seconds=_FACTS_SECONDS + status.st_size / _BYTES_PER_SECOND
            )
            facts, debug_bytes, second_file = _checked_facts(answer)
        except (SandboxError, AnswerError) as error:
            raise BinaryError(sentence(str(error))) from None
        return _Source(file, status, facts, debug_bytes, second_file)

    def _tables(self, source: _Source, end: float, problems: list[str]) -> list[int]:
        """Open files with what the source's debug information says; none where there is none."""
        if not source.facts.has_debug_info:
            return []
        if source.second_file:
            problems.append("a part of its debug information is in a second file, made by dwz, which is not read")
        key = _key(source)
        kept = self._cache.find(key, source.parts)
        if kept is not None:
            return kept
        files = [self._cache.new_file() for _ in range(source.parts)]
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            made = list(pool.map(lambda part: _make(source, files, part, end), range(len(files))))
        told = [each for each in made if isinstance(each, str)]
        if not told and not sum(each for each in made if isinstance(each, int)):
            told = ["it names no code"] * len(files)
        if told:
            problems.append(f"its debug information was left unread: {sentence(told[0])}")
        if len(told) == len(files):
            for file in files:
                os.close(file)
            return []
        if not told:
            self._cache.keep(key, files)
        return files

    def _ask_names(
        self,
        main: _Source,
        offsets: NDArray[np.uint64],
        apart: _Source | None,
        tables: Sequence[int],
        everything: bool,
        end: float,
        problems: list[str],
    ) -> Named:
        """Raises SandboxError or AnswerError."""
        columns = os.memfd_create("iaprof names", os.MFD_CLOEXEC)
        try:
            answer = self._sandbox.call(
                "name",
                {"debug": apart is not None, "everything": everything},
                offsets.astype("<u8").tobytes(),
                fds=[main.file, *([apart.file] if apart else []), *tables, columns],
                seconds=max(end - time.monotonic(), _SYMBOLS_SECONDS),
            )
            names, sources, more = _checked_names(answer, columns)
            outermost, no_calls = (_checked_offsets(answer, what, offsets) for what in ("outermost", "no_calls"))
        finally:
            os.close(columns)
        told = [*problems, *more]
        if not len(names) and not told and len(offsets):
            stripped = not main.facts.has_symbols and not main.facts.has_debug_info
            told.append(("it is stripped: " if stripped else "") + "nothing of it is known at these addresses")
        return Named(names, " and ".join(sources), _joined(told), main.facts.frame_pointers, outermost, no_calls)


def _key(source: _Source) -> str:
    return key_of(source.facts.build_id, source.status)


def _joined(problems: Sequence[str]) -> str:
    return "; ".join(dict.fromkeys(problems))


def _make(source: _Source, files: Sequence[int], part: int, end: float) -> int | str:
    """Has a child of its own fill the file of one part: how many ranges of code are in it, or why there are none."""
    with Sandbox("iaprof.symbols.files.dwarf", _MAKING) as sandbox:
        try:
            answer = sandbox.call(
                "make",
                {"part": part, "parts": len(files)},
                fds=[source.file, files[part]],
                seconds=max(end - time.monotonic(), 0.1),
            )
            return integer(answer)
        except (SandboxError, AnswerError) as error:
            with contextlib.suppress(OSError):
                os.ftruncate(files[part], 0)
            return str(error)


def _checked_facts(answer: Any) -> tuple[Facts, int, bool]:
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
            return facts, integer(debug_bytes), second_file
    raise AnswerError


def _checked_names(answer: Any, file: int) -> tuple[Names, list[str], list[str]]:
    """The child's columns, which it wrote into a file, as names, sorted; sources and problems."""
    match answer:
        case {
            "rows": rows,
            "frames": frames,
            "strings": strings,
            "string_bytes": string_bytes,
            "sources": sources,
            "problems": problems,
        }:
            counts = [integer(each, _ANSWER) for each in (rows, rows, rows, frames, frames, frames)]
            content = _content(file, 8 * sum(counts) + integer(string_bytes, _ANSWER))
        case _:
            raise AnswerError
    numbers = np.frombuffer(content, "<i8", sum(counts))
    addresses, sizes, chains, functions, files, lines = np.split(numbers, np.cumsum(counts)[:-1])
    texts = str(memoryview(content)[numbers.nbytes :], "utf-8", "replace").split("\0")
    within = (addresses, 0, 1 << 62), (sizes, 1, 1 << 62), (chains, 1, len(functions) + 1), (lines, 0, 1 << 32)
    for column, lowest, limit in (*within, (functions, 0, len(texts)), (files, 0, len(texts))):
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
    told = [sentence(each) for each in string_list(any_list(problems)[:8])]
    if not all(each in SOURCES for each in any_list(sources)):
        raise AnswerError
    return names, any_list(sources)[: len(SOURCES)], told


def _checked_offsets(answer: Any, what: str, offsets: NDArray[np.uint64]) -> NDArray[np.uint64] | None:
    """Of the offsets that were asked for, those that the child names under `what`; None where it cannot tell."""
    if what not in answer:
        raise AnswerError
    if answer[what] is None:
        return None
    found = np.array([integer(each) for each in any_list(answer[what])], np.uint64)
    return np.intersect1d(offsets, found).astype(np.uint64)


def _content(file: int, size: int) -> bytes:
    """All of a file that has to have so many bytes."""
    content = os.pread(file, size, 0) if size == os.fstat(file).st_size else b""
    if len(content) != size:
        raise AnswerError
    return content
