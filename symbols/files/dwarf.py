"""Runs in a sandboxed child: converts debug information into a SymCache with the `symbolic` library.

The library takes 2 s for 190 MB and uses one thread. So several children share the units of a large file, and each
makes a SymCache of its piece. A piece is the same file mapped with changed headers: .debug_info begins and ends with
the units of that piece. Only the pages of the headers are copied. Units of split debug information become files of
their own (symbols/files/split_dwarf.py).
"""

from __future__ import annotations

import ctypes
import mmap
import os
import re
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
from symbolic import exceptions
from symbolic._lowlevel import ffi, lib
from symbolic.utils import rustcall as _untyped_rustcall

from iaprof.basics.elf import (
    PT_DYNAMIC,
    SECTION,
    SEGMENT,
    SHF_COMPRESSED,
    SHT_DYNSYM,
    SHT_NULL,
    SHT_SYMTAB,
    ElfError,
)
from iaprof.sandbox.reader import Operation, Refusal
from iaprof.symbols.files.elf import Elf, read_elf
from iaprof.symbols.files.split_dwarf import Sections, skeletons, whole_unit
from iaprof.symbols.files.symcache import HEADER_BYTES, SymCacheError, range_count

_MOST_UNPACKED_BYTES = 1 << 29  # of compressed debug information
_MOST_RATIO = 1 << 11  # of unpacked to packed bytes; DEFLATE's own limit is 1,032
_MOST_ABBREVIATION_BYTES = 1 << 24
_MOST_UNITS = 1 << 20
_PT_NULL = 0

# A declaration in .debug_abbrev: code, tag, children, then attribute and form pairs up to two zeros (DWARF 5, 7.5.3).
# It matches if no pair refers to a function of another unit, that is, if no pair is DW_AT_abstract_origin or
# DW_AT_specification with DW_FORM_ref_addr.
_NUMBER = rb"[\x80-\xff]*+[\x00-\x7f]"
_OWN_DECLARATION = re.compile(
    rb"\x00|%(n)s%(n)s[\x00\x01](?>(?!\x00\x00|[\x31\x47]\x10)%(n)s(?>\x21%(n)s|(?!\x21)%(n)s))*+\x00\x00"
    % {b"n": _NUMBER}
)

_LIBC = ctypes.CDLL(None)
_rustcall: Callable[..., Any] = _untyped_rustcall  # calls a function of the library, and raises its errors


def operations(_stage_seconds: float) -> dict[str, Operation]:
    """Returns the operations of this child, by name."""
    return {"make": make, "make_split": make_split}


def make(parameters: dict[str, Any], _data: bytearray, files: list[int]) -> object:
    """Writes the SymCache of one piece of a file's debug information; writes nothing if the piece has no units.

    parameters: "piece" from 0 up to, not including, "pieces". files: the file to read, and the file to write.

    Returns:
        The number of address ranges in the SymCache.
    """
    source, target = files
    try:
        elf = read_elf(source)
        _check_sizes(elf, os.fstat(source).st_size)
        bounds = _bounds(elf, source, parameters["piece"], parameters["pieces"])
    except ElfError as error:
        raise Refusal("ElfError", str(error)) from None
    if bounds is not None and bounds[0] == bounds[1]:
        return 0
    with mmap.mmap(source, 0, mmap.MAP_PRIVATE, mmap.PROT_READ) as content:
        start = ffi.from_buffer("uint8_t[]", content)
        _edit_headers(elf, start, bounds)
        try:
            return _write_symcache(start, len(content), target)
        except (exceptions.SymbolicError, SymCacheError) as error:
            raise Refusal("DwarfError", str(error)) from None
        finally:
            ffi.release(start)


def make_split(parameters: dict[str, Any], _data: bytearray, files: list[int]) -> object:
    """Writes the SymCaches of split units: two sizes of 8 bytes, then the unit's folder, and then the SymCache.

    parameters: "units": the id of each unit, and the index of its .dwo or .dwp in `files`. files: the program, or its
    debug file, then the file to write, then the others.

    Returns:
        For each unit, whether its file has it.
    """
    try:
        wanted = {int(dwo_id, 16): index for dwo_id, index in parameters["units"]}
        program, opened = Sections(read_elf(files[0])), dict[int, Sections]()
        found = set()
        for skeleton in skeletons(program):
            index = wanted.pop(skeleton.dwo_id, None)
            if index is None:
                continue
            try:
                opened[index] = opened.get(index) or Sections(read_elf(files[index]))
                content = whole_unit(program, skeleton, opened[index])
            except ElfError:
                continue
            if content is None:
                continue
            at = os.fstat(files[1]).st_size
            begin = at + 16 + len(skeleton.folder)
            start = ffi.from_buffer("uint8_t[]", content)
            try:
                _write_symcache(start, len(content), files[1], begin)
            except (exceptions.SymbolicError, SymCacheError):
                os.ftruncate(files[1], at)
                continue
            finally:
                ffi.release(start)
            sizes = struct.pack("<QQ", len(skeleton.folder), os.fstat(files[1]).st_size - begin)
            os.pwrite(files[1], sizes + skeleton.folder, at)
            found.add(f"{skeleton.dwo_id:x}")
    except ElfError as error:
        raise Refusal("ElfError", str(error)) from None
    return [dwo_id in found for dwo_id, _ in parameters["units"]]


def _write_symcache(start: Any, length: int, target: int, at: int = 0) -> int:
    archive = _rustcall(lib.symbolic_archive_from_bytes, start, length)
    binary = _rustcall(lib.symbolic_archive_get_object, archive, 0)
    if binary == ffi.NULL:
        raise Refusal("DwarfError", "the library does not recognise it as an ELF file")
    cache = _rustcall(lib.symbolic_symcache_from_object, binary)
    content = ffi.buffer(
        _rustcall(lib.symbolic_symcache_get_bytes, cache), _rustcall(lib.symbolic_symcache_get_size, cache)
    )
    done = 0
    try:
        while done < len(content):
            done += os.pwrite(target, content[done : done + (1 << 24)], at + done)
    except OSError as error:
        raise Refusal("WriteError", f"what was read of it cannot be kept ({error.strerror})") from None
    return range_count(content[:HEADER_BYTES])


def _check_sizes(elf: Elf, size: int) -> None:
    """Raises ElfError if the debug information lies outside the file or compressed sections claim too much."""
    index = elf.section(".debug_info")
    if index is not None and elf.sections[index].offset + elf.sections[index].size > size:
        raise ElfError("it lies outside the file")
    unpacked = 0
    for name, index in elf.indices.items():
        section = elf.sections[index]
        if name.startswith(".zdebug_"):  # "ZLIB", then the size as a big-endian number
            claimed = int.from_bytes(elf.head(index, 12)[4:], "big")
        elif section.flags & SHF_COMPRESSED:  # Elf64_Chdr: type, reserved, size, alignment
            claimed = int.from_bytes(elf.head(index, 16)[8:], "little")
        else:
            continue
        unpacked += claimed
        if claimed > _MOST_RATIO * max(section.size, 1) or unpacked > _MOST_UNPACKED_BYTES:
            raise ElfError(
                f"it claims to unpack to {unpacked >> 20} MiB and more, where {_MOST_UNPACKED_BYTES >> 20} are read"
            )


def _bounds(elf: Elf, source: int, piece: int, pieces: int) -> tuple[int, int] | None:
    """Returns where a piece's units begin and end in .debug_info; None if the first piece must have all units."""
    index = elf.section(".debug_info")
    if pieces == 1 or index is None or elf.sections[index].flags & SHF_COMPRESSED or _has_references_across_units(elf):
        return None if piece == 0 else (0, 0)
    offset, size = elf.sections[index].offset, elf.sections[index].size
    starts = [0]
    while starts[-1] < size and len(starts) < _MOST_UNITS:
        head = os.pread(source, 12, offset + starts[-1])
        length = int.from_bytes(head[:4], "little")
        if length == 0xFFFF_FFFF:  # 64-bit DWARF
            length = int.from_bytes(head[4:], "little") + 8
        starts.append(starts[-1] + length + 4)
    if starts[-1] != size:
        return None if piece == 0 else (0, 0)  # the units are damaged: the library reports the error
    edges = [starts[int(np.searchsorted(starts, size * number // pieces))] for number in range(pieces + 1)]
    return edges[piece], edges[piece + 1]


def _has_references_across_units(elf: Elf) -> bool:
    """Tells whether units may refer to functions of other units, as link-time optimisation and dwz have them do."""
    index = elf.section(".debug_abbrev")
    if index is None:
        return True
    table = elf.data(index, _MOST_ABBREVIATION_BYTES)
    at = 0
    while (declaration := _OWN_DECLARATION.match(table, at)) is not None:
        at = declaration.end()
    return at != len(table)


def _edit_headers(elf: Elf, start: Any, bounds: tuple[int, int] | None) -> None:
    """Changes the headers in memory: the library sees no symbols, and only these bytes of .debug_info.

    With symbols, the library would name a whole function after the symbol at its lowest address, which may belong to a
    part that the compiler split off (foo.cold).
    """
    sections = [
        section._replace(type=SHT_NULL) if section.type in (SHT_SYMTAB, SHT_DYNSYM) else section
        for section in elf.sections
    ]
    index = elf.section(".debug_info")
    if bounds is not None and index is not None:
        debug_info = sections[index]
        sections[index] = debug_info._replace(offset=debug_info.offset + bounds[0], size=bounds[1] - bounds[0])
    _write(start, elf.header.sections, b"".join(SECTION.pack(*section) for section in sections))
    # The dynamic section leads to .dynsym, too.
    segments = [segment._replace(type=_PT_NULL) if segment.type == PT_DYNAMIC else segment for segment in elf.segments]
    _write(start, elf.header.segments, b"".join(SEGMENT.pack(*segment) for segment in segments))


def _write(start: Any, at: int, content: bytes) -> None:
    """Writes into the private mapping of a file, which copies only the pages that change."""
    address = int(ffi.cast("uintptr_t", start)) + at
    first = address & -mmap.PAGESIZE
    length = address + len(content) - first
    if _LIBC.mprotect(ctypes.c_void_p(first), ctypes.c_size_t(length), mmap.PROT_READ | mmap.PROT_WRITE) != 0:
        raise MemoryError
    ffi.memmove(ffi.cast("uint8_t *", address), content, len(content))
