"""Runs in a sandboxed child: describes ELF files, and names addresses in them, which it returns as columns.

Debug information comes as SymCaches, which other children made (symbols/files/dwarf.py). Symbol tables name what debug
information does not cover, such as assembly. symbols/symbolizers/binaries.py reads the answers.
"""

from __future__ import annotations

import mmap
import os
import re
import struct
from collections.abc import Callable
from functools import cached_property, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from iaprof.basics.elf import SHF_COMPRESSED, ElfError
from iaprof.basics.libraries import leave_out_masked_arrays
from iaprof.formats.distinct import distinct
from iaprof.formats.file_names import as_text
from iaprof.sandbox.reader import Operation, Refusal
from iaprof.symbols.files.elf import Elf, Functions, SymbolTable, functions_of, read_elf
from iaprof.symbols.files.split_dwarf import Sections, skeletons
from iaprof.symbols.files.stubs import plt_symbols, signal_trampolines
from iaprof.symbols.files.symcache import SymCache, SymCacheError
from iaprof.symbols.names.names import (
    CODE,
    DEBUG_INFORMATION,
    DYNAMIC_SYMBOLS,
    LONGEST_NAME,
    LONGEST_READ,
    RELOCATIONS,
    SOURCES,
    SYMBOL_TABLE,
    shortened,
)
from iaprof.symbols.unwind.file_code import outermost, read_prologues, without_call

_REPLACED = "\ufffd".encode()
_PATH_SECTIONS = (".debug_line_str", ".debug_line", ".debug_str")
_MOST_BYTES = 1 << 27  # of such a section
_MOST_COMPONENTS = 1 << 8  # of paths, that are looked for

_AT_ONCE = 1 << 14  # addresses; each may have hundreds of frames
# The sources of the tables that `_functions` reads.
_TABLE_SOURCES = (SYMBOL_TABLE, SYMBOL_TABLE, SYMBOL_TABLE, DYNAMIC_SYMBOLS, RELOCATIONS, CODE)


class RawPaths:
    """The paths of one file's debug information, whose bytes that are not UTF-8 `symbolic` replaces by U+FFFD.

    The strings of the debug information still have them. A component of a path is restored if there is one string there
    that it can come from; otherwise it keeps the replacement characters.
    """

    def __init__(self, elf: Elf) -> None:
        """Reads nothing yet."""
        self._elf = elf
        self._components: dict[bytes, bytes] = {}

    def restored(self, path: bytes) -> bytes:
        """Returns a path with the bytes that it has in the debug information."""
        return b"/".join(map(self._component, path.split(b"/"))) if _REPLACED in path else path

    def _component(self, name: bytes) -> bytes:
        if _REPLACED not in name:
            return name
        if name not in self._components and len(self._components) < _MOST_COMPONENTS:
            self._components[name] = self._found(name)
        return self._components.get(name, name)

    def _found(self, name: bytes) -> bytes:
        # A replacement character stands for up to three bytes.
        pieces = re.split(rb"((?:%b)+)" % _REPLACED, name)
        counts = [len(piece) // len(_REPLACED) for piece in pieces]
        pattern = b"".join(
            rb"[\x80-\xff]{%d,%d}" % (count, 3 * count) if at % 2 else re.escape(piece)
            for at, (piece, count) in enumerate(zip(pieces, counts, strict=True))
        )
        text = name.decode("utf-8", "replace")
        found = {match[0] for strings in self._strings for match in re.finditer(pattern + rb"(?=[/\x00])", strings)}
        fitting = {each for each in found if each.decode("utf-8", "replace") == text}
        return fitting.pop() if len(fitting) == 1 else name

    @cached_property
    def _strings(self) -> list[bytes]:
        """The sections with the strings, without compressed ones and those that cannot be read."""
        contents = []
        for section in _PATH_SECTIONS:
            index = self._elf.section(section)
            if index is not None and not self._elf.sections[index].flags & SHF_COMPRESSED:
                try:
                    contents.append(self._elf.data(index, _MOST_BYTES))
                except ElfError:
                    continue
        return contents


def operations(_stage_seconds: float) -> dict[str, Operation]:
    """Returns the operations of this child, by name."""
    leave_out_masked_arrays()
    np.unique(np.zeros(1))  # makes NumPy import what it needs, before the sandbox forbids opening files
    return {"facts": facts, "name": name, "addresses": addresses, "split_units": split_units}


def facts(_parameters: dict[str, Any], _data: bytearray, files: list[int]) -> object:
    """Returns what a file says about itself."""
    elf = _opened(files[0])
    prologues = read_prologues(files[0])
    index = elf.section(".debug_info")
    return {
        "build_id": elf.build_id.hex() if elf.build_id is not None else None,
        "debuglink": elf.debuglink,
        "has_debug_info": elf.has_debug_info,
        "has_symbols": elf.has_symbols,
        "has_code": elf.has_code,
        "frame_pointers": prologues.frame_pointers if prologues and prologues.functions else None,
        "debug_bytes": min(elf.sections[index].size, os.fstat(files[0]).st_size) if index is not None else 0,
        "second_file": elf.section(".gnu_debugaltlink") is not None,
        "is_split": _is_split(elf),
    }


def _is_split(elf: Elf) -> bool:
    try:
        return next(skeletons(Sections(elf)), None) is not None
    except ElfError:
        return False


def addresses(_parameters: dict[str, Any], data: bytearray, files: list[int]) -> object:
    """Returns the address of each file offset, or None if it is in no loaded segment. data: the offsets, uint64[n]."""
    values, known = _opened(files[0]).addresses(np.frombuffer(bytes(data), np.uint64))
    return [address if is_known else None for address, is_known in zip(values.tolist(), known.tolist(), strict=True)]


def split_units(parameters: dict[str, Any], data: bytearray, files: list[int]) -> object:
    """Returns which split units of a program have some of the given offsets.

    parameters: "most": return so many at most. data: the offsets, uint64[n], sorted and distinct. files: the file, and
    the one with its debug information.

    Returns:
        Of each: its id, the name of its .dwo, and the folder it was compiled in.
    """
    addresses, known = _opened(files[0]).addresses(np.frombuffer(bytes(data), np.uint64))
    wanted = np.sort(addresses[known])
    units: list[tuple[str, str, str]] = []
    try:
        for unit in skeletons(Sections(_opened(files[-1]))):
            bounds = np.array([range_ for range_ in unit.ranges if 0 <= range_[0] < range_[1] < 1 << 64], np.uint64)
            starts, ends = np.searchsorted(wanted, bounds.reshape(-1, 2)).T
            if (starts < ends).any():
                units.append((f"{unit.dwo_id:x}", _text(unit.name).decode(), _text(unit.folder).decode()))
            if len(units) == parameters["most"]:
                break
    except ElfError as error:
        raise Refusal("ElfError", str(error)) from None
    return units


def name(parameters: dict[str, Any], data: bytearray, files: list[int]) -> object:
    """Names offsets of a file.

    parameters: "debug": whether the second file is a separate debug file. "everything": add a range for every function
    symbol. "split": how many of the SymCaches are of split units. data: the offsets, uint64[n], sorted and distinct.
    files: the file, its debug file if there is one, then SymCaches, those of split units last, and last a file for the
    answer.

    The answer's file gets int64 columns: first addresses, sizes and numbers of frames (`rows` of each), then functions,
    files (both indices into the strings) and lines (`frames` of each). The strings follow, separated by zero bytes.
    """
    elf = _opened(files[0])
    problems: list[str] = []
    more_files = files[1:-1]
    debug = _opened(more_files.pop(0)) if parameters["debug"] else None
    offsets = np.frombuffer(bytes(data), np.uint64)
    addresses, known = elf.addresses(offsets)
    with mmap.mmap(files[0], 0, mmap.MAP_PRIVATE, mmap.PROT_READ) as content:
        are_outermost = outermost(content, addresses[known])
        trampolines = signal_trampolines(elf, content, addresses[known])
    functions = _functions(elf, debug, trampolines, problems)
    answer = _Answer()
    whole = len(more_files) - parameters["split"]
    caches = _caches(more_files[:whole]) + [cache for file in more_files[whole:] for cache in _split_caches(file)]
    base = (debug or elf).first_address
    raw_paths = RawPaths(debug if debug and debug.has_debug_info else elf)
    for first in range(0, len(offsets), _AT_ONCE):
        piece = slice(first, first + _AT_ONCE)
        _name_some(answer, offsets[piece], addresses[piece], known[piece], caches, base, raw_paths, functions)
    if parameters["everything"]:
        starts, ends, indices = _remaining_ranges(functions, addresses[known])
        start_offsets, inside = elf.offsets(starts)  # a function is in one segment
        numbers = _numbers(answer, indices, functions.names_of)
        inside &= numbers > 0
        answer.add(start_offsets[inside], (ends - starts)[inside], np.ones(inside.sum(), int), numbers[inside])
        answer.sources.update(_sources(functions, indices[inside]))
    flags = {"outermost": are_outermost, "no_calls": without_call(elf, addresses[known])}
    flagged = {member: None if flag is None else offsets[known][flag].tolist() for member, flag in flags.items()}
    return {**answer.written(files[-1], problems), **flagged}


class _Answer:
    """Collects rows of names as columns."""

    def __init__(self) -> None:
        self._strings: dict[bytes, int] = {b"": 0}
        self._columns: list[list[NDArray[np.int64]]] = [[np.empty(0, "<i8")] for _ in range(6)]
        self.sources: set[str] = set()

    def numbers(self, texts: list[bytes]) -> NDArray[np.int64]:
        """Returns the numbers of texts, which are added; an empty text has number 0."""
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
        """Adds rows.

        Args:
            addresses: [rows].
            sizes: [rows].
            frames: [rows], the number of frames of each row.
            functions: [frames], numbers of strings.
            files: [frames], numbers of strings; None if unknown.
            lines: [frames]; None if unknown.
        """
        unknown = np.zeros(len(functions), np.int64)
        columns: list[NDArray[Any]] = [addresses, sizes, frames, functions]
        columns += [unknown if files is None else files, unknown if lines is None else lines]
        for column, values in zip(self._columns, columns, strict=True):
            column.append(values.astype("<i8"))

    def written(self, file: int, problems: list[str]) -> dict[str, object]:
        """Writes all rows, unsorted, into a file; returns a description of the file's content."""
        columns = [np.concatenate(pieces) for pieces in self._columns]
        strings = b"\0".join(self._strings)
        try:
            for piece in (*(column.tobytes() for column in columns), strings):
                view = memoryview(piece)
                while view:
                    view = view[os.write(file, view) :]
        except OSError as error:
            raise Refusal("TooLarge", f"there are more names in it than are kept ({error.strerror})") from None
        return {
            "rows": len(columns[0]),
            "frames": len(columns[-1]),
            "strings": len(self._strings),
            "string_bytes": len(strings),
            "sources": [source for source in SOURCES if source in self.sources],
            "problems": problems,
        }


def _name_some(
    answer: _Answer,
    offsets: NDArray[np.uint64],
    addresses: NDArray[np.uint64],
    known: NDArray[np.bool_],
    caches: list[SymCache],
    base: int,
    raw_paths: RawPaths,
    functions: Functions,
) -> None:
    """Adds rows for some offsets: from debug information if it covers them, else from symbols.

    Args:
        answer: gets the rows.
        offsets: uint64[n], to name.
        addresses: uint64[n], of these offsets.
        known: bool[n], whether an offset has an address.
        caches: debug information.
        base: the address that addresses in SymCaches are relative to.
        raw_paths: the paths of source files in the debug information.
        functions: the functions of all symbol tables.
    """
    unnamed = np.flatnonzero(known)
    for cache in caches:
        chains = cache.find(addresses[unnamed] - np.uint64(base))  # addresses below base wrap around, to unused ones
        numbers = _numbers(answer, chains.functions, cache.function_names)
        files = _numbers(answer, chains.files, partial(_file_names, cache, raw_paths))
        # The outermost function gets the name of its symbol: DWARF often lacks the linkage names of templates.
        outermost = (np.cumsum(chains.counts) - chains.counts)[chains.counts > 0]
        symbols = functions.find(addresses[unnamed[chains.counts > 0]])
        better = _numbers(answer, symbols, functions.names_of)
        numbers[outermost[better > 0]] = better[better > 0]
        # A chain with an unnamed function does not count: a symbol may name the address.
        named = chains.counts > 0
        rows = np.repeat(np.arange(len(unnamed)), chains.counts)
        named[rows[numbers == 0]] = False
        frames = named[rows]
        positions = unnamed[named]
        answer.add(
            offsets[positions],
            np.ones(len(positions), np.uint64),
            chains.counts[named],
            numbers[frames],
            files[frames],
            chains.lines[frames],
        )
        answer.sources.update([DEBUG_INFORMATION] if len(positions) else [])
        unnamed = unnamed[~named]
    indices = functions.find(addresses[unnamed])
    unnamed, indices = unnamed[indices >= 0], indices[indices >= 0]
    numbers = _numbers(answer, indices, functions.names_of)
    unnamed, indices, numbers = unnamed[numbers > 0], indices[numbers > 0], numbers[numbers > 0]
    answer.add(offsets[unnamed], np.ones(len(unnamed), np.uint64), np.ones(len(unnamed), int), numbers)
    answer.sources.update(_sources(functions, indices))


def _numbers(
    answer: _Answer, keys: NDArray[np.int64], texts: Callable[[NDArray[np.int64], int], list[bytes]]
) -> NDArray[np.int64]:
    """Returns the numbers of the strings that `texts` gives for keys; it gets each distinct key once."""
    different, inverse = np.unique(keys, return_inverse=True)
    names = [
        name if name.isascii() and len(name) <= LONGEST_NAME else _text(name) for name in texts(different, LONGEST_READ)
    ]
    return answer.numbers(names)[inverse]


def _file_names(cache: SymCache, raw_paths: RawPaths, numbers: NDArray[np.int64], longest: int) -> list[bytes]:
    return [raw_paths.restored(path) for path in cache.file_names(numbers, longest)]


def _text(name: bytes) -> bytes:
    """Returns a name as UTF-8, not longer than LONGEST_NAME."""
    return shortened(as_text(name)).encode()


def _sources(functions: Functions, indices: NDArray[np.int64]) -> list[str]:
    """Returns the sources of the functions with these indices."""
    return [_TABLE_SOURCES[table] for table in np.unique(functions.tables[indices]).tolist()]


def _remaining_ranges(
    functions: Functions, exact: NDArray[np.uint64]
) -> tuple[NDArray[np.uint64], NDArray[np.uint64], NDArray[np.int64]]:
    """Returns the address ranges of functions without the exact addresses, which have rows of their own.

    The ranges do not overlap: of several functions at an address, the one that begins last counts.

    Returns:
        uint64[n], first addresses; uint64[n], ends; int64[n], the index of each range's function.
    """
    edges = distinct(np.concatenate([functions.starts, functions.ends, exact, exact + np.uint64(1)]))
    starts, ends = edges[:-1], edges[1:]
    indices = functions.find(starts)
    kept = (indices >= 0) & ~np.isin(starts, exact, assume_unique=True)
    return starts[kept], ends[kept], indices[kept]


def _opened(file: int) -> Elf:
    try:
        return read_elf(file)
    except ElfError as error:
        raise Refusal("ElfError", str(error)) from None


def _functions(elf: Elf, debug: Elf | None, trampolines: SymbolTable, problems: list[str]) -> Functions:
    """Returns the functions of all symbol tables, in the order of _TABLE_SOURCES. A damaged table counts as empty."""
    tables: list[SymbolTable] = []
    readers: list[Callable[[], SymbolTable]] = [
        partial(debug.symbols, dynamic=False) if debug else SymbolTable,
        partial(elf.symbols, dynamic=False),
        elf.packed_symbols,
        partial(elf.symbols, dynamic=True),
        lambda: plt_symbols(elf, tables),
        lambda: trampolines,
    ]
    for read_table in readers:
        try:
            tables.append(read_table())
        except (ElfError, MemoryError) as error:
            problems.append(str(error) or "its symbol table takes too much memory to read")
            tables.append(SymbolTable())
    return functions_of(tables, elf.frame_starts())


def _caches(files: list[int]) -> list[SymCache]:
    """Maps the SymCaches; empty files are skipped."""
    caches = []
    for file in files:
        size = os.fstat(file).st_size
        if size:
            try:
                caches.append(SymCache(mmap.mmap(file, size, mmap.MAP_PRIVATE, mmap.PROT_READ)))
            except SymCacheError as error:
                raise Refusal("SymCacheError", f"what was kept of it is damaged: {error}") from None
    return caches


def _split_caches(file: int) -> list[SymCache]:
    """Reads the SymCaches of split units, as symbols/files/dwarf.py writes them."""
    caches, content, at = [], os.pread(file, os.fstat(file).st_size, 0), 0
    try:
        while at + 16 <= len(content):
            folder_bytes, size = struct.unpack_from("<QQ", content, at)
            begin = at + 16 + folder_bytes
            caches.append(SymCache(content[begin : begin + size], content[at + 16 : begin]))
            at = begin + size
    except SymCacheError as error:
        raise Refusal("SymCacheError", f"what was made of its split debug information is damaged: {error}") from None
    return caches
