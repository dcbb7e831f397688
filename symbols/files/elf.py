"""One ELF file, as far as names need it: its build-id, debug link, and whole symbol tables.

formats.elf reads the structure, NumPy whole tables: no Python runs per symbol. Nothing of the file is believed: what is
read is bounded, and whatever is wrong raises ElfError. Only x86-64 files are read, as only their code is profiled.
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
_LZMA_BYTES = 1 << 27  # what unpacking it may use
_LONGEST_BUILD_ID = 64
_LONGEST_FILE_NAME = 255
_MASK = (1 << 64) - 1


@dataclass(frozen=True, eq=False)
class SymbolTable:
    """The functions of one symbol table, as they come."""

    symbols: NDArray[np.void] = field(default_factory=lambda: np.empty(0, SYMBOL))  # [n]
    section_ends: NDArray[np.uint64] = field(default_factory=lambda: np.empty(0, np.uint64))  # [n] addresses
    names: bytes = b""


@dataclass(frozen=True, eq=False)
class Functions:
    """Functions of symbol tables, sorted by address; one for each address."""

    starts: NDArray[np.uint64]  # [n] addresses, distinct
    ends: NDArray[np.uint64]  # [n] behind the last byte
    name_at: NDArray[np.int64]  # [n] where in `names`, up to the next zero byte
    tables: NDArray[np.int64]  # [n] the index of the table that it is from
    names: bytes

    def find(self, addresses: NDArray[np.uint64]) -> NDArray[np.int64]:
        """The function that contains each address, -1 for none: int64[m]."""
        if not len(self.starts):
            return np.full(len(addresses), -1, np.int64)
        found = np.searchsorted(self.starts, addresses, side="right") - 1
        at = np.maximum(found, 0)
        return np.where((found >= 0) & (addresses < self.ends[at]), found, -1)

    def names_of(self, indices: NDArray[np.int64], longest: int) -> list[bytes]:
        """The names of functions, cut off after so many bytes; empty for -1."""
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
            ElfError: it is no such file, or a damaged one.
        """
        super().__init__(read)
        if self.header.machine != EM_X86_64:
            names = {number: name for name, number in ENUM_E_MACHINE.items()}
            machine = names.get(self.header.machine, self.header.machine)
            raise ElfError(f"it is for another processor ({machine}) than x86-64")
        _ = self.segments, self.sections, self.indices

    def head(self, index: int, count: int) -> bytes:
        """The first bytes of a section, fewer where it has no more."""
        return self.read(self.sections[index].offset, min(count, self.sections[index].size))

    def data(self, index: int, most: int) -> bytes:
        """A section's bytes as they stand in the file.

        Raises:
            ElfError: it has more than `most`, or lies outside the file.
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
        """From its notes; None where it has none."""
        places = [segment for segment in self.segments if segment.type == PT_NOTE]
        notes = chain(self.notes_of(".note.gnu.build-id"), *map(self.notes, places))
        return next(
            (each.description for each in notes if each.is_build_id and 0 < len(each.description) <= _LONGEST_BUILD_ID),
            None,
        )

    @cached_property
    def debuglink(self) -> tuple[str, int] | None:
        """Name and CRC-32 of its separate debug file; None for none, or for a name that no file should have."""
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
        """Whether there is DWARF in it."""
        return self.section(".debug_info") is not None or self.section(".zdebug_info") is not None

    @cached_property
    def has_symbols(self) -> bool:
        """Whether there are names of local functions in it."""
        return any(each.type == SHT_SYMTAB for each in self.sections) or self.section(".gnu_debugdata") is not None

    @cached_property
    def has_code(self) -> bool:
        """Whether its code is in it: separate debug files have the sections, without their bytes."""
        has_bytes = (each.flags & SHF_EXECINSTR and each.type != SHT_NOBITS for each in self.sections)
        return any(has_bytes) or not self.sections

    @property
    def first_address(self) -> int:
        """Of the first segment that is loaded, whether or not this file has its bytes."""
        return self.loads[0].address if self.loads else 0

    def addresses(self, offsets: NDArray[np.uint64]) -> tuple[NDArray[np.uint64], NDArray[np.bool_]]:
        """What the program header makes of offsets in the file: addresses uint64[n], and which have one: bool[n]."""
        addresses, known = np.zeros(len(offsets), np.uint64), np.zeros(len(offsets), np.bool_)
        for load in self.loads[::-1]:  # of several for one byte the first is meant
            within = (offsets >= load.offset) & (offsets - np.uint64(load.offset) < load.size)
            addresses[within] = offsets[within] - np.uint64(load.offset) + np.uint64(load.address)
            known |= within
        return addresses, known

    def offsets(self, addresses: NDArray[np.uint64]) -> tuple[NDArray[np.uint64], NDArray[np.bool_]]:
        """The way back: offsets uint64[n], and which addresses are in the file: bool[n]."""
        offsets, known = np.zeros(len(addresses), np.uint64), np.zeros(len(addresses), np.bool_)
        for load in self.loads[::-1]:
            within = (addresses >= load.address) & (addresses - np.uint64(load.address) < load.size)
            offsets[within] = addresses[within] - np.uint64(load.address) + np.uint64(load.offset)
            known |= within
        return offsets, known

    def packed_symbols(self) -> SymbolTable:
        """The functions of .gnu_debugdata, a small ELF file packed with xz, which has the names of local functions."""
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
        """The functions of .symtab, or of .dynsym."""
        kind = SHT_DYNSYM if dynamic else SHT_SYMTAB
        index = next((index for index, each in enumerate(self.sections) if each.type == kind), None)
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
        """Where the section of each symbol ends; its own address for what is in none."""
        known = symbols["section"] < min(len(self.sections), SHN_LORESERVE)
        ends: NDArray[np.uint64] = symbols["value"].copy()
        of_sections = np.array([each.address + each.size & _MASK for each in self.sections], np.uint64)
        ends[known] = of_sections[symbols["section"][known]]
        return ends


def read_elf(file: int) -> Elf:
    """An open ELF file. Raises ElfError."""
    return Elf(in_file(file))


def functions_of(tables: list[SymbolTable]) -> Functions:
    """The functions of several symbol tables of which the first is the best."""
    symbols = np.concatenate([np.empty(0, SYMBOL), *(table.symbols for table in tables)])
    section_ends = np.concatenate([np.empty(0, np.uint64), *(table.section_ends for table in tables)])
    source = np.repeat(np.arange(len(tables)), [len(table.symbols) for table in tables])
    bases = np.cumsum([0, *(len(table.names) + 1 for table in tables)])
    # Of several at one address: the larger, then the global before the weak before the local, then the better table.
    rank = np.array([2, 0, 1] + [3] * 13, np.uint8)[symbols["info"] >> 4]
    order = np.lexsort((source, rank, ~symbols["size"], symbols["value"]))
    values = symbols["value"][order]
    order = order[np.flatnonzero(np.diff(values, prepend=~values[:1]) != 0)]
    starts, sizes = symbols["value"][order].astype(np.uint64), symbols["size"][order]
    following = np.append(starts[1:], np.uint64(2**64 - 1)) if len(starts) else starts
    # Assembly leaves sizes out: such a function reaches to the next one, at most to the end of its section.
    ends = np.where(sizes > 0, starts + sizes, np.minimum(following, np.maximum(section_ends[order], starts)))
    ends = np.where(ends < starts, starts, ends)  # a size that goes round the end of all addresses
    return Functions(
        starts,
        ends.astype(np.uint64),
        symbols["name"][order].astype(np.int64) + bases[source[order]],
        source[order],
        b"".join(table.names + b"\0" for table in tables),
    )
