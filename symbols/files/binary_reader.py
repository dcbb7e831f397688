"""What the sandbox's child does with ELF files: says what one is, and names addresses of it, answered in columns.

Debug information comes as SymCaches, which other children made (symbols.dwarf). What it does not cover, assembly for
one, is looked up in symbol tables. symbols.binaries is the reader of these answers.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from iaprof.formats.elf import ElfError
from iaprof.sandbox.reader import Operation, Refusal
from iaprof.symbols.files.elf import Elf, Functions, SymbolTable, functions_of, read_elf
from iaprof.symbols.files.symcache import SymCache, SymCacheError
from iaprof.symbols.names.names import LONGEST_NAME
from iaprof.symbols.names.sources import DEBUG_INFORMATION, DYNAMIC_SYMBOLS, SOURCES, SYMBOL_TABLE
from iaprof.symbols.unwind.calls_in_file import without_call
from iaprof.symbols.unwind.frame_pointers import read_openings
from iaprof.symbols.unwind.outermost import outermost

_AT_ONCE = 1 << 14  # addresses; each may have hundreds of frames
_DYNAMIC = 3  # the index of .dynsym among the tables


def operations(_stage_seconds: float) -> dict[str, Operation]:
    """What the sandbox can be asked for."""
    np.unique(np.zeros(1))  # imports a module at its first use, which must not wait until nothing can be opened
    return {"facts": facts, "name": name, "addresses": addresses}


def facts(_parameters: dict[str, Any], _data: bytearray, files: list[int]) -> object:
    """What a file says about itself."""
    elf = _opened(files[0])
    openings = read_openings(files[0])
    index = elf.section(".debug_info")
    return {
        "build_id": elf.build_id.hex() if elf.build_id is not None else None,
        "debuglink": elf.debuglink,
        "has_debug_info": elf.has_debug_info,
        "has_symbols": elf.has_symbols,
        "has_code": elf.has_code,
        "frame_pointers": openings.kept if openings and openings.functions else None,
        "debug_bytes": min(elf.sections[index].size, os.fstat(files[0]).st_size) if index is not None else 0,
        "second_file": elf.section(".gnu_debugaltlink") is not None,
    }


def addresses(_parameters: dict[str, Any], data: bytearray, files: list[int]) -> object:
    """What the program header of a file makes of offsets, uint64[n] in data: for each an address, or None."""
    found, known = _opened(files[0]).addresses(np.frombuffer(bytes(data), np.uint64))
    return [address if is_known else None for address, is_known in zip(found.tolist(), known.tolist(), strict=True)]


def name(parameters: dict[str, Any], data: bytearray, files: list[int]) -> object:
    """Names offsets of a file.

    parameters: "debug" says whether the second file is a separate debug file; the files behind are SymCaches, and the
    last one is for the answer. "everything" asks for a range for every function symbol. data: the offsets, uint64[n],
    sorted and distinct.

    The answer's file gets int64 columns: `rows` first addresses, sizes and counts of frames, then `frames` numbers of
    functions and files among the strings, and lines. Then the strings, a zero byte between two of them.
    """
    elf = _opened(files[0])
    problems: list[str] = []
    rest = files[1:-1]
    debug = _opened(rest.pop(0)) if parameters["debug"] else None
    functions = _functions(elf, debug, problems)
    offsets = np.frombuffer(bytes(data), np.uint64)
    addresses, known = elf.addresses(offsets)
    answer = _Answer()
    caches = _caches(rest)
    base = (debug or elf).first_address
    for first in range(0, len(offsets), _AT_ONCE):
        part = slice(first, first + _AT_ONCE)
        _name_some(answer, offsets[part], addresses[part], known[part], caches, base, functions)
    if parameters["everything"]:
        starts, ends, which = _pieces(functions, addresses[known])
        at, inside = elf.offsets(starts)  # a function is in one segment
        numbers = _numbers(answer, which, functions.names_of)
        inside &= numbers > 0
        answer.add(at[inside], (ends - starts)[inside], np.ones(inside.sum(), int), numbers[inside])
        answer.sources.update(_sources(functions, which[inside]))
    with mmap.mmap(files[0], 0, mmap.MAP_PRIVATE, mmap.PROT_READ) as content:
        beginnings = outermost(content, addresses[known])
    about = {"outermost": beginnings, "no_calls": without_call(elf, addresses[known])}
    chosen = {what: None if which is None else offsets[known][which].tolist() for what, which in about.items()}
    return {**answer.written(files[-1], problems), **chosen}


class _Answer:
    """Rows of names in columns, as they come."""

    def __init__(self) -> None:
        self._strings: dict[bytes, int] = {b"": 0}
        self._columns: list[list[NDArray[np.int64]]] = [[np.empty(0, "<i8")] for _ in range(6)]
        self.sources: set[str] = set()

    def numbers(self, texts: list[bytes]) -> NDArray[np.int64]:
        """The numbers of texts; 0 is that of an empty one."""
        number = self._strings.setdefault
        return np.array([number(text, len(self._strings)) for text in texts], np.int64)

    def add(
        self,
        addresses: NDArray[np.uint64],
        sizes: NDArray[np.uint64],
        frames: NDArray[np.int64],
        functions: NDArray[np.int64],
        files: NDArray[np.int64] | None = None,
        lines: NDArray[np.uint32] | None = None,
    ) -> None:
        """Rows, of which each has so many frames; for those the numbers of strings."""
        unknown = np.zeros(len(functions), np.int64)
        columns: list[NDArray[Any]] = [addresses, sizes, frames, functions]
        columns += [unknown if files is None else files, unknown if lines is None else lines]
        for column, values in zip(self._columns, columns, strict=True):
            column.append(values.astype("<i8"))

    def written(self, file: int, problems: list[str]) -> dict[str, object]:
        """Writes all of it, sorted by nothing, into a file; gives what describes it."""
        columns = [np.concatenate(parts) for parts in self._columns]
        strings = b"\0".join(self._strings)
        try:
            for part in (*(column.tobytes() for column in columns), strings):
                view = memoryview(part)
                while view:
                    view = view[os.write(file, view) :]
        except OSError as error:
            raise Refusal("TooLarge", f"there are more names in it than are kept ({error.strerror})") from None
        return {
            "rows": len(columns[0]),
            "frames": len(columns[-1]),
            "strings": len(self._strings),
            "string_bytes": len(strings),
            "sources": [each for each in SOURCES if each in self.sources],
            "problems": problems,
        }


def _name_some(
    answer: _Answer,
    offsets: NDArray[np.uint64],
    addresses: NDArray[np.uint64],
    known: NDArray[np.bool_],
    caches: list[SymCache],
    base: int,
    functions: Functions,
) -> None:
    """Rows for some offsets: from debug information where it knows them, else from symbols."""
    left = np.flatnonzero(known)
    for cache in caches:
        chains = cache.find(addresses[left] - np.uint64(base))  # addresses below it wrap around, to where nothing is
        numbers = _numbers(answer, chains.functions, cache.function_names)
        files = _numbers(answer, chains.files, cache.file_names)
        # The outermost function goes by its symbol: DWARF often lacks the linkage names of templates.
        outermost = (np.cumsum(chains.counts) - chains.counts)[chains.counts > 0]
        symbols = functions.find(addresses[left[chains.counts > 0]])
        better = _numbers(answer, symbols, functions.names_of)
        numbers[outermost[better > 0]] = better[better > 0]
        # A function without a name is no answer; a symbol may be.
        named = chains.counts > 0
        rows = np.repeat(np.arange(len(left)), chains.counts)
        named[rows[numbers == 0]] = False
        frames = named[rows]
        at = left[named]
        answer.add(
            offsets[at],
            np.ones(len(at), np.uint64),
            chains.counts[named],
            numbers[frames],
            files[frames],
            chains.lines[frames],
        )
        answer.sources.update([DEBUG_INFORMATION] if len(at) else [])
        left = left[~named]
    which = functions.find(addresses[left])
    left, which = left[which >= 0], which[which >= 0]
    numbers = _numbers(answer, which, functions.names_of)
    left, which, numbers = left[numbers > 0], which[numbers > 0], numbers[numbers > 0]
    answer.add(offsets[left], np.ones(len(left), np.uint64), np.ones(len(left), int), numbers)
    answer.sources.update(_sources(functions, which))


def _numbers(
    answer: _Answer, keys: NDArray[np.int64], texts: Callable[[NDArray[np.int64], int], list[bytes]]
) -> NDArray[np.int64]:
    """The numbers of the strings that `texts` gives for keys; it is asked once for each."""
    distinct, inverse = np.unique(keys, return_inverse=True)
    return answer.numbers(texts(distinct, LONGEST_NAME))[inverse]


def _sources(functions: Functions, which: NDArray[np.int64]) -> list[str]:
    """What these functions are from."""
    dynamic = functions.tables[which] == _DYNAMIC
    return [text for text, there in ((SYMBOL_TABLE, (~dynamic).any()), (DYNAMIC_SYMBOLS, dynamic.any())) if there]


def _pieces(
    functions: Functions, exact: NDArray[np.uint64]
) -> tuple[NDArray[np.uint64], NDArray[np.uint64], NDArray[np.int64]]:
    """What is left of functions besides the exact addresses: first addresses, ends, and which function each is of.

    Pieces do not overlap one another: for an address in several functions the one that begins last counts.
    """
    edges = np.unique(np.concatenate([functions.starts, functions.ends, exact, exact + np.uint64(1)]))
    starts, ends = edges[:-1], edges[1:]
    which = functions.find(starts)
    kept = (which >= 0) & ~np.isin(starts, exact, assume_unique=True)
    return starts[kept], ends[kept], which[kept]


def _opened(file: int) -> Elf:
    try:
        return read_elf(file)
    except ElfError as error:
        raise Refusal("ElfError", str(error)) from None


def _functions(elf: Elf, debug: Elf | None, problems: list[str]) -> Functions:
    """The functions of all symbol tables, .dynsym at _DYNAMIC. What is wrong with one costs that one."""
    readings: list[Callable[[], SymbolTable]] = [
        partial(debug.symbols, dynamic=False) if debug else SymbolTable,
        partial(elf.symbols, dynamic=False),
        elf.packed_symbols,
        partial(elf.symbols, dynamic=True),
    ]
    tables = []
    for reading in readings:
        try:
            tables.append(reading())
        except (ElfError, MemoryError) as error:
            problems.append(str(error) or "its symbol table takes too much memory to read")
            tables.append(SymbolTable())
    return functions_of(tables)


def _caches(files: list[int]) -> list[SymCache]:
    """SymCaches in memory; an empty file is one without anything."""
    found = []
    for file in files:
        size = os.fstat(file).st_size
        if size:
            try:
                found.append(SymCache(mmap.mmap(file, size, mmap.MAP_PRIVATE, mmap.PROT_READ)))
            except SymCacheError as error:
                raise Refusal("SymCacheError", f"what was kept of it is damaged: {error}") from None
    return found
