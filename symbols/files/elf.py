"""Reads from an ELF file what names need: its build-id, its debug link, and whole symbol tables.

formats/elf.py reads the structure, NumPy whole tables: no Python runs per symbol. The file may be hostile: all reads
are bounded, and damage raises ElfError. Only x86-64 files are read, as only x86-64 code is profiled.
"""

from __future__ import annotations

import lzma
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain

import numpy as np
from elftools.elf.enums import ENUM_E_MACHINE
from numpy.typing import NDArray

from iaprof.formats.elf import (
    EM_X86_64,
    PT_NOTE,
    SHF_EXECINSTR,
    SHN_LORESERVE,
    SHT_DYNSYM,
    SHT_NOBITS,
    SHT_SYMTAB,
    STT_FUNC,
    STT_GNU_IFUNC,
    ElfError,
    ElfFile,
    Read,
    in_file,
    in_memory,
)
from iaprof.formats.elf_tables import SYMBOL

_MOST_TABLE_BYTES = 1 << 28  # of a symbol table, and of its names
_MOST_UNPACKED_BYTES = 1 << 26  # of .gnu_debugdata, which has a few MB even for large programs
_LZMA_BYTES = 1 << 27  # of memory for unpacking it
_LONGEST_BUILD_ID = 64
_LONGEST_FILE_NAME = 255
_MASK = (1 << 64) - 1


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
    name_at: NDArray[np.int64]  # [n] where the name begins in `names`; it ends at the next zero byte
    tables: NDArray[np.int64]  # [n] the index of the function's symbol table
    names: bytes  # all string tables

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
            start = int(self.name_at[index]) if index >= 0 else len(self.names)
            end = self.names.find(b"\0", start, start + longest)
            texts.append(self.names[start : end if end >= 0 else start + longest])
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
        """Reads the functions of .symtab, or of .dynsym."""
        kind = SHT_DYNSYM if dynamic else SHT_SYMTAB
        index = next((index for index, section in enumerate(self.sections) if section.type == kind), None)
        if index is None:
            return SymbolTable()
        section = self.sections[index]
        if section.entry_size != SYMBOL.itemsize or section.link >= len(self.sections):
            raise ElfError("its symbol table is damaged")
        data = self.data(index, _MOST_TABLE_BYTES)
        symbols = np.frombuffer(data[: len(data) // SYMBOL.itemsize * SYMBOL.itemsize], SYMBOL)
        names = self.data(section.link, _MOST_TABLE_BYTES)
        kinds = symbols["info"] & 15
        functions = (kinds == STT_FUNC) | (kinds == STT_GNU_IFUNC)
        symbols = symbols[functions & (symbols["section"] != 0) & (symbols["name"] < len(names))]
        return SymbolTable(symbols, self._section_ends(symbols), names)

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


def functions_of(tables: list[SymbolTable]) -> Functions:
    """Joins the functions of several symbol tables, the best table first."""
    symbols = np.concatenate([np.empty(0, SYMBOL), *(table.symbols for table in tables)])
    section_ends = np.concatenate([np.empty(0, np.uint64), *(table.section_ends for table in tables)])
    source = np.repeat(np.arange(len(tables)), [len(table.symbols) for table in tables])
    bases = np.cumsum([0, *(len(table.names) + 1 for table in tables)])
    # Of several functions at one address the largest counts, then global before weak before local, then the best table.
    rank = np.array([2, 0, 1] + [3] * 13, np.uint8)[symbols["info"] >> 4]
    order = np.lexsort((source, rank, ~symbols["size"], symbols["value"]))
    values = symbols["value"][order]
    order = order[np.flatnonzero(np.diff(values, prepend=~values[:1]) != 0)]
    starts, sizes = symbols["value"][order].astype(np.uint64), symbols["size"][order]
    following = np.append(starts[1:], np.uint64(2**64 - 1)) if len(starts) else starts
    # Assembly often has no sizes: such a function ends where the next one begins, at most at the end of its section.
    ends = np.where(sizes > 0, starts + sizes, np.minimum(following, np.maximum(section_ends[order], starts)))
    ends = np.where(ends < starts, starts, ends)  # the end overflows: the size is damaged
    return Functions(
        starts,
        ends.astype(np.uint64),
        symbols["name"][order].astype(np.int64) + bases[source[order]],
        source[order],
        b"".join(table.names + b"\0" for table in tables),
    )
