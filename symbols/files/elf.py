"""Reads from an ELF file what names need: its build-id, its debug link, and whole symbol tables.

basics/elf.py reads the structure, NumPy whole tables: no Python runs per symbol. The file may be hostile: all reads
are bounded, and damage raises ElfError. Only x86-64 files are read, as only x86-64 code is profiled.
"""

from __future__ import annotations

import lzma
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np
from elftools.elf.enums import ENUM_E_MACHINE
from numpy.typing import NDArray

from iaprof.basics.elf import (
    EM_X86_64,
    PT_GNU_EH_FRAME,
    PT_NOTE,
    SHF_EXECINSTR,
    SHN_ABS,
    SHN_COMMON,
    SHN_LORESERVE,
    SHN_UNDEF,
    SHT_DYNSYM,
    SHT_NOBITS,
    SHT_SYMTAB,
    STT_FUNC,
    STT_GNU_IFUNC,
    STT_NOTYPE,
    ElfError,
    ElfFile,
    Read,
    in_file,
    in_memory,
)
from iaprof.formats.distinct import distinct, order_by
from iaprof.formats.elf_tables import SYMBOL

MOST_TABLE_BYTES = 1 << 28  # of a symbol table, and of its names
_MOST_UNPACKED_BYTES = 1 << 26  # of .gnu_debugdata, which has a few MB even for large programs
_LZMA_BYTES = 1 << 27  # of memory for unpacking it
_LONGEST_BUILD_ID = 64
_LONGEST_FILE_NAME = 255
_MASK = (1 << 64) - 1
_NO_SECTIONS = SHN_UNDEF, SHN_ABS, SHN_COMMON
_FRAME_TABLE = bytes([1, 0x1B, 0x03, 0x3B])  # version and pointer encodings of .eh_frame_hdr, as all linkers write them
_FRAME = np.dtype([("start", "<i4"), ("entry", "<i4")])  # of its table, relative to the address of .eh_frame_hdr
_MOST_FRAMES = 1 << 22
_NO_FRAMES = np.empty(0, np.uint64)


@dataclass(frozen=True, eq=False)
class SymbolTable:
    """The functions of one symbol table, in its order."""

    symbols: NDArray[np.void] = field(default_factory=lambda: np.empty(0, SYMBOL))  # [n]
    section_ends: NDArray[np.uint64] = field(default_factory=lambda: np.empty(0, np.uint64))  # [n] addresses
    names: bytes = b""  # the string table


@dataclass(frozen=True, eq=False)
class Functions:
    """Functions of symbol tables, sorted by address; one for each address."""

    starts: NDArray[np.uint64]  # [n] addresses, distinct
    ends: NDArray[np.uint64]  # [n] the addresses after the last byte
    name_at: NDArray[np.int64]  # [n] where the name begins in its table's `names`; it ends at the next zero byte
    tables: NDArray[np.int64]  # [n] the index of the function's symbol table
    names: list[bytes]  # the string table of each symbol table; PyTorch's has 78 MB, and is not copied

    def find(self, addresses: NDArray[np.uint64]) -> NDArray[np.int64]:
        """Returns the index of the function that contains each address: int64[m]; -1 for none."""
        if not len(self.starts):
            return np.full(len(addresses), -1, np.int64)
        indices = np.searchsorted(self.starts, addresses, side="right") - 1
        at = np.maximum(indices, 0)
        return np.where((indices >= 0) & (addresses < self.ends[at]), indices, -1)

    def names_of(self, indices: NDArray[np.int64], longest: int) -> list[bytes]:
        """Returns the names of functions, cut to `longest` bytes; empty for -1."""
        texts = []
        for index in indices.tolist():
            names = self.names[self.tables[index]] if index >= 0 else b""
            start = int(self.name_at[index]) if index >= 0 else 0
            end = names.find(b"\0", start, start + longest)
            texts.append(names[start : end if end >= 0 else start + longest])
        return texts


class Elf(ElfFile):
    """An x86-64 file."""

    def __init__(self, read: Read) -> None:
        """Reads the tables of sections and segments.

        Raises:
            ElfError: the file is not an x86-64 ELF file, or is damaged.
        """
        super().__init__(read)
        if self.header.machine != EM_X86_64:
            names = {number: name for name, number in ENUM_E_MACHINE.items()}
            machine = names.get(self.header.machine, self.header.machine)
            raise ElfError(f"it is for another processor ({machine}) than x86-64")
        _ = self.segments, self.sections, self.indices

    def head(self, index: int, count: int) -> bytes:
        """Returns the first bytes of a section, fewer if it is shorter."""
        return self.read(self.sections[index].offset, min(count, self.sections[index].size))

    def data(self, index: int, most: int) -> bytes:
        """Returns a section's bytes as they are in the file.

        Raises:
            ElfError: the section has more than `most` bytes, or lies outside the file.
        """
        section = self.sections[index]
        if section.type == SHT_NOBITS:
            return b""
        if section.size > most:
            raise ElfError(f"a section of it claims {section.size} bytes; more than {most} are not read")
        data = self.read(section.offset, section.size)
        if len(data) != section.size:
            raise ElfError("a section of it lies outside the file")
        return data

    @cached_property
    def build_id(self) -> bytes | None:
        """The build-id from the file's notes; None if there is none."""
        segments = [segment for segment in self.segments if segment.type == PT_NOTE]
        notes = chain(self.notes_of(".note.gnu.build-id"), *map(self.notes, segments))
        return next(
            (note.description for note in notes if note.is_build_id and 0 < len(note.description) <= _LONGEST_BUILD_ID),
            None,
        )

    @cached_property
    def debuglink(self) -> tuple[str, int] | None:
        """Name and CRC-32 of the separate debug file; None if there is none, or its name is not a plain file name."""
        index = self.section(".gnu_debuglink")
        if index is None:
            return None
        data = self.data(index, 4 * _LONGEST_FILE_NAME)
        name, _, rest = data.partition(b"\0")
        at = (len(name) + 4) & ~3
        if not rest or len(data) < at + 4 or b"/" in name or name in (b"", b".", b"..") or len(name) > 255:
            return None
        try:
            return name.decode(), int.from_bytes(data[at : at + 4], "little")
        except UnicodeDecodeError:
            return None

    @cached_property
    def has_debug_info(self) -> bool:
        """Whether the file has DWARF."""
        return self.section(".debug_info") is not None or self.section(".zdebug_info") is not None

    @cached_property
    def has_symbols(self) -> bool:
        """Whether the file has names of local functions."""
        has_symtab = any(section.type == SHT_SYMTAB for section in self.sections)
        return has_symtab or self.section(".gnu_debugdata") is not None

    @cached_property
    def has_code(self) -> bool:
        """Whether the file has the bytes of its code: separate debug files have the sections only."""
        has_bytes = (section.flags & SHF_EXECINSTR and section.type != SHT_NOBITS for section in self.sections)
        return any(has_bytes) or not self.sections

    @property
    def first_address(self) -> int:
        """The address of the first loaded segment, whether or not this file has the segment's bytes."""
        return self.loads[0].address if self.loads else 0

    def addresses(self, offsets: NDArray[np.uint64]) -> tuple[NDArray[np.uint64], NDArray[np.bool_]]:
        """Converts file offsets to addresses: uint64[n], and bool[n], whether a loaded segment has the offset."""
        addresses, known = np.zeros(len(offsets), np.uint64), np.zeros(len(offsets), np.bool_)
        for load in self.loads[::-1]:  # the first of several segments with a byte counts
            within = (offsets >= load.offset) & (offsets - np.uint64(load.offset) < load.size)
            addresses[within] = offsets[within] - np.uint64(load.offset) + np.uint64(load.address)
            known |= within
        return addresses, known

    def offsets(self, addresses: NDArray[np.uint64]) -> tuple[NDArray[np.uint64], NDArray[np.bool_]]:
        """Converts addresses to file offsets: uint64[n], and bool[n], whether a loaded segment has the address."""
        offsets, known = np.zeros(len(addresses), np.uint64), np.zeros(len(addresses), np.bool_)
        for load in self.loads[::-1]:
            within = (addresses >= load.address) & (addresses - np.uint64(load.address) < load.size)
            offsets[within] = addresses[within] - np.uint64(load.address) + np.uint64(load.offset)
            known |= within
        return offsets, known

    def packed_symbols(self) -> SymbolTable:
        """Reads the functions of .gnu_debugdata: an ELF file, packed with xz, with the symbols of local functions."""
        index = self.section(".gnu_debugdata")
        if index is None:
            return SymbolTable()
        try:
            unpacking = lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=_LZMA_BYTES)
            content = unpacking.decompress(self.data(index, _MOST_UNPACKED_BYTES), _MOST_UNPACKED_BYTES + 1)
        except (lzma.LZMAError, EOFError) as error:
            raise ElfError(f"its .gnu_debugdata is damaged ({error})") from None
        if len(content) > _MOST_UNPACKED_BYTES:
            raise ElfError(f"its .gnu_debugdata unpacks to more than {_MOST_UNPACKED_BYTES >> 20} MiB")
        return Elf(in_memory(content)).symbols(dynamic=False)

    def symbols(self, dynamic: bool) -> SymbolTable:
        """Reads the functions of .symtab, or of .dynsym: also labels in code, which assemblers give no type."""
        kind = SHT_DYNSYM if dynamic else SHT_SYMTAB
        index = next((index for index, section in enumerate(self.sections) if section.type == kind), None)
        if index is None:
            return SymbolTable()
        section = self.sections[index]
        if section.entry_size != SYMBOL.itemsize or section.link >= len(self.sections):
            raise ElfError("its symbol table is damaged")
        data = self.data(index, MOST_TABLE_BYTES)
        symbols = np.frombuffer(data[: len(data) // SYMBOL.itemsize * SYMBOL.itemsize], SYMBOL)
        names = self.data(section.link, MOST_TABLE_BYTES)
        symbols = symbols[(symbols["name"] < len(names)) & ~np.isin(symbols["section"], _NO_SECTIONS)]
        functions = np.isin(symbols["info"] & 15, (STT_FUNC, STT_GNU_IFUNC))
        symbols = symbols[functions | self._are_labels(symbols, names)]
        return SymbolTable(symbols, self._section_ends(symbols), names)

    def _are_labels(self, symbols: NDArray[np.void], names: bytes) -> NDArray[np.bool_]:
        """Tells which symbols are names of code without a type: bool[n].

        Local labels of assemblers (.L1) are not, nor are mapping symbols ($x), which tell code from data.
        """
        is_code = np.zeros(1 << 16, bool)  # by section
        is_code[: len(self.sections)] = [bool(section.flags & SHF_EXECINSTR) for section in self.sections][: 1 << 16]
        is_code[SHN_LORESERVE:] = False
        is_label: NDArray[np.bool_] = ((symbols["info"] & 15) == STT_NOTYPE) & is_code[symbols["section"]]
        starts = symbols["name"][is_label].astype(np.int64)
        text = np.frombuffer(names or b"\0", np.uint8)
        inside = ((starts + at, starts + at < len(text)) for at in range(3))
        first, second, third = (text[np.where(is_inside, at, 0)] * is_inside for at, is_inside in inside)
        is_local = (first == ord(".")) & (second == ord("L"))
        is_mapping = (first == ord("$")) & np.isin(second, list(b"adtx")) & np.isin(third, list(b"\0."))
        is_label[is_label] = (first != 0) & ~is_local & ~is_mapping
        return is_label

    def frame_starts(self) -> NDArray[np.uint64]:
        """Returns the addresses at which functions with call frame information begin: uint64[n], sorted.

        They are from the sorted table in .eh_frame_hdr; without one, there are none.
        """
        for segment in self.segments:
            if segment.type == PT_GNU_EH_FRAME and self.read(segment.offset, 4) == _FRAME_TABLE:
                count = int.from_bytes(self.read(segment.offset + 8, 4), "little")
                table = self.read(segment.offset + 12, min(count, _MOST_FRAMES) * _FRAME.itemsize)
                starts = np.frombuffer(table[: len(table) // _FRAME.itemsize * _FRAME.itemsize], _FRAME)["start"]
                return distinct(starts.astype(np.int64).astype(np.uint64) + np.uint64(segment.address))
        return _NO_FRAMES

    def _section_ends(self, symbols: NDArray[np.void]) -> NDArray[np.uint64]:
        """Returns the end of each symbol's section: uint64[n]; the symbol's own address if it has no section."""
        known = symbols["section"] < min(len(self.sections), SHN_LORESERVE)
        ends: NDArray[np.uint64] = symbols["value"].copy()
        section_ends = np.array([section.address + section.size & _MASK for section in self.sections], np.uint64)
        ends[known] = section_ends[symbols["section"][known]]
        return ends


def read_elf(file: int) -> Elf:
    """Reads an open ELF file. Raises ElfError."""
    return Elf(in_file(file))


def _best_of_each(values: NDArray[np.uint64], worse: tuple[NDArray[Any], ...]) -> NDArray[np.intp]:
    """Returns, for each distinct value, the row that np.lexsort with these keys puts first: intp[m], by value.

    Most values have one row: only the others need the keys, whose sorting takes longest.
    """
    order = order_by(values)
    values = values[order]
    is_new = np.diff(values, prepend=~values[:1]) != 0
    is_single = is_new & np.append(is_new[1:], True)[: len(values)]
    shared = order[~is_single]
    ranked = shared[np.lexsort((*(key[shared] for key in worse), values[~is_single]))]
    order[~is_single] = ranked
    best: NDArray[np.intp] = order[is_new]
    return best


def functions_of(tables: list[SymbolTable], frame_starts: NDArray[np.uint64] = _NO_FRAMES) -> Functions:
    """Joins the functions of several symbol tables.

    Symbols without a size, as assembly often has them, name the code up to the next symbol, to the next function with
    call frame information of its own, or to the end of their section. In a function with a size they are labels, which
    name nothing; gdb decides so, too.

    Args:
        tables: the best table first.
        frame_starts: where functions with call frame information begin, uint64[n], sorted.
    """
    symbols = np.concatenate([np.empty(0, SYMBOL), *(table.symbols for table in tables)])
    section_ends = np.concatenate([np.empty(0, np.uint64), *(table.section_ends for table in tables)])
    source = np.repeat(np.arange(len(tables)), [len(table.symbols) for table in tables])
    # Of several symbols at one address the largest counts, then functions before labels, then global before weak before
    # local, then the best table.
    binding = np.array([2, 0, 1] + [3] * 13, np.uint8)[symbols["info"] >> 4]
    is_label = (symbols["info"] & 15) == STT_NOTYPE
    order = _best_of_each(symbols["value"].copy(), (source, binding, is_label, ~symbols["size"]))
    starts, sizes = symbols["value"][order].astype(np.uint64), symbols["size"][order]
    ends = np.maximum(starts + sizes, starts)  # the end of a damaged size overflows
    reach = np.maximum.accumulate(np.append(np.uint64(0), ends))[:-1].astype(np.uint64)  # of the functions before
    kept = (sizes > 0) | (reach <= starts)
    starts, sizes, ends, order = starts[kept], sizes[kept], ends[kept], order[kept]
    last = np.uint64(_MASK)
    following = np.append(starts[1:], last)[: len(starts)]
    frames = np.append(frame_starts, last)[np.searchsorted(frame_starts, starts, side="right")]
    open_ends = np.minimum(np.minimum(following, frames), np.maximum(section_ends[order], starts))
    return Functions(
        starts,
        np.where(sizes > 0, ends, open_ends).astype(np.uint64),
        symbols["name"][order].astype(np.int64),
        source[order],
        [table.names for table in tables],
    )
