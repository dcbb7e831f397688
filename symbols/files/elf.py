"""One ELF file, as far as names need it: its sections by name, build-id, debug link, and whole symbol tables.

pyelftools reads the structure and the notes, NumPy whole tables: no Python runs per symbol. Nothing of the file is
believed: what is read is bounded, and whatever is wrong raises ElfError. Only little-endian x86-64 files are read, as
only their code is profiled.
"""

from __future__ import annotations

import contextlib
import io
import lzma
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, BinaryIO

import numpy as np
from elftools.elf.elffile import ELFFile
from elftools.elf.sections import StringTableSection
from numpy.typing import NDArray

# System V ABI, gABI 4.2 and its x86-64 supplement; linux/elf.h
_MAGIC, _IDENT_BYTES = b"\x7fELF", 16
_PT_LOAD, PT_DYNAMIC = 1, 2
SHT_SYMTAB, _SHT_NOBITS, SHT_DYNSYM = 2, 8, 11
SHF_COMPRESSED = 0x800
_SHF_EXECINSTR = 4
_GLOBAL, _FUNCTION, _IFUNC = 1, 2, 10
_FIRST_RESERVED_SECTION = 0xFF00

_SECTION = np.dtype(
    [("name", "<u4"), ("type", "<u4"), ("flags", "<u8"), ("address", "<u8"), ("offset", "<u8"), ("size", "<u8"),
     ("link", "<u4"), ("info", "<u4"), ("align", "<u8"), ("entry", "<u8")]
)  # fmt: skip
_SEGMENT = np.dtype(
    [("type", "<u4"), ("flags", "<u4"), ("offset", "<u8"), ("address", "<u8"), ("physical", "<u8"), ("size", "<u8"),
     ("memory", "<u8"), ("align", "<u8")]
)  # fmt: skip
_SYMBOL = np.dtype(
    [("name", "<u4"), ("info", "u1"), ("other", "u1"), ("section", "<u2"), ("value", "<u8"), ("size", "<u8")]
)

_MOST_SECTIONS = 1 << 16
_MOST_TABLE_BYTES = 1 << 28  # of a symbol table, and of its names
_MOST_UNPACKED_BYTES = 1 << 26  # of .gnu_debugdata, which has a few MB even for large programs
_LZMA_BYTES = 1 << 27  # what unpacking it may use
_LONGEST_BUILD_ID = 64
_LONGEST_FILE_NAME = 255


class ElfError(ValueError):
    """The file is damaged, or no ELF file of the kind that is read; the text says which."""


@dataclass(frozen=True, eq=False)
class SymbolTable:
    """The functions of one symbol table, as they come."""

    symbols: NDArray[np.void] = field(default_factory=lambda: np.empty(0, _SYMBOL))  # [n]
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


class Elf:
    """An ELF file."""

    def __init__(self, stream: BinaryIO) -> None:
        """Reads the tables of sections and segments.

        Raises:
            ElfError: it is no such file, or a damaged one.
        """
        self._stream = stream
        head = self._read(0, _IDENT_BYTES)
        if head[:4] != _MAGIC:
            raise ElfError("it is no ELF file")
        with _damaged("its header"):
            self._elf = ELFFile(stream)
        if self._elf.elfclass != 64:
            raise ElfError("it is no 64-bit ELF file")
        if not self._elf.little_endian:
            raise ElfError("it is a big-endian ELF file, and only little-endian ones are read")
        if self._elf["e_machine"] != "EM_X86_64":
            raise ElfError(f"it is for another processor ({self._elf['e_machine']}) than x86-64")
        with _damaged("its table of sections or segments"):
            sections, segments = self._elf.num_sections(), self._elf.num_segments()
            if (sections and self._elf["e_shentsize"] != _SECTION.itemsize) or (
                segments and self._elf["e_phentsize"] != _SEGMENT.itemsize
            ):
                raise ValueError("its entries have an odd size")
        if sections > _MOST_SECTIONS:
            raise ElfError(f"it claims {sections} sections; more than {_MOST_SECTIONS} are not read")
        self.segments_at, self.sections_at = int(self._elf["e_phoff"]), int(self._elf["e_shoff"])
        self.segments = self._table(self.segments_at, _SEGMENT, segments, "table of segments")
        self.loads = self.segments[(self.segments["type"] == _PT_LOAD) & (self.segments["size"] > 0)]
        self.sections = self._table(self.sections_at, _SECTION, sections, "table of sections")
        with _damaged("its sections' names"):
            strings = self._elf.get_section(self._elf.get_shstrndx()) if sections else None
            names: list[str] = []
            if isinstance(strings, StringTableSection):
                names = [str(strings.get_string(start)) for start in self.sections["name"].tolist()]
        # Of several of one name the first is meant.
        self._indices = {name[:_LONGEST_FILE_NAME]: index for index, name in reversed(list(enumerate(names)))}

    def _read(self, offset: int, size: int) -> bytes:
        try:
            self._stream.seek(offset)
            return self._stream.read(size)
        except (OSError, OverflowError, ValueError):  # an offset that no file has
            return b""

    def _table(self, offset: int, entry: np.dtype[np.void], count: int, what: str) -> NDArray[np.void]:
        data = self._read(offset, entry.itemsize * count) if count else b""
        if len(data) != entry.itemsize * count:
            raise ElfError(f"its {what} lies outside the file")
        return np.frombuffer(data, entry)

    def section(self, name: str) -> int | None:
        """The index of the first section of that name that has bytes in the file."""
        index = self._indices.get(name)
        if index is None or self.sections[index]["type"] == _SHT_NOBITS or not self.sections[index]["size"]:
            return None
        return index

    def named(self) -> Iterable[tuple[str, int]]:
        """All sections with a name of their own: names and indices."""
        return self._indices.items()

    def head(self, index: int, count: int) -> bytes:
        """The first bytes of a section, fewer where it has no more."""
        section = self.sections[index]
        return self._read(int(section["offset"]), min(count, int(section["size"])))

    def data(self, index: int, most: int) -> bytes:
        """A section's bytes as they stand in the file.

        Raises:
            ElfError: it has more than `most`, or lies outside the file.
        """
        section = self.sections[index]
        size = int(section["size"])
        if section["type"] == _SHT_NOBITS:
            return b""
        if size > most:
            raise ElfError(f"a section of it claims {size} bytes; more than {most} are not read")
        data = self._read(int(section["offset"]), size)
        if len(data) != size:
            raise ElfError("a section of it lies outside the file")
        return data

    @cached_property
    def build_id(self) -> bytes | None:
        """From its notes; None where it has none."""
        with _damaged("its notes"):
            named = self._indices.get(".note.gnu.build-id")
            places = [self._elf.get_section(named)] if named is not None else []
            for place in [*places, *self._elf.iter_segments("PT_NOTE")]:
                for note in place.iter_notes() if hasattr(place, "iter_notes") else ():
                    if note["n_type"] == "NT_GNU_BUILD_ID" and 0 < len(note["n_desc"]) <= 2 * _LONGEST_BUILD_ID:
                        return bytes.fromhex(note["n_desc"])
        return None

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
        return bool((self.sections["type"] == SHT_SYMTAB).any()) or self.section(".gnu_debugdata") is not None

    @cached_property
    def has_code(self) -> bool:
        """Whether its code is in it: separate debug files have the sections, without their bytes."""
        executable = self.sections["flags"] & _SHF_EXECINSTR > 0
        return bool((executable & (self.sections["type"] != _SHT_NOBITS)).any()) or not len(self.sections)

    @property
    def first_address(self) -> int:
        """Of the first segment that is loaded, whether or not this file has its bytes."""
        loads = self.segments["address"][self.segments["type"] == _PT_LOAD]
        return int(loads[0]) if len(loads) else 0

    def addresses(self, offsets: NDArray[np.uint64]) -> tuple[NDArray[np.uint64], NDArray[np.bool_]]:
        """What the program header makes of offsets in the file: addresses uint64[n], and which have one: bool[n]."""
        addresses, known = np.zeros(len(offsets), np.uint64), np.zeros(len(offsets), np.bool_)
        for load in self.loads[::-1]:  # of several for one byte the first is meant
            within = (offsets >= load["offset"]) & (offsets - load["offset"] < load["size"])
            addresses[within] = offsets[within] - load["offset"] + load["address"]
            known |= within
        return addresses, known

    def offsets(self, addresses: NDArray[np.uint64]) -> tuple[NDArray[np.uint64], NDArray[np.bool_]]:
        """The way back: offsets uint64[n], and which addresses are in the file: bool[n]."""
        offsets, known = np.zeros(len(addresses), np.uint64), np.zeros(len(addresses), np.bool_)
        for load in self.loads[::-1]:
            within = (addresses >= load["address"]) & (addresses - load["address"] < load["size"])
            offsets[within] = addresses[within] - load["address"] + load["offset"]
            known |= within
        return offsets, known

    def at(self, address: int, count: int) -> bytes:
        """The bytes that are loaded at an address, as many as one segment has there."""
        for start, offset, size in self._loaded:
            if start <= address < start + size:
                return self._read(offset + address - start, min(count, start + size - address))
        return b""

    @cached_property
    def _loaded(self) -> list[tuple[int, int, int]]:
        """Address, offset and bytes of each segment that is loaded."""
        loaded: list[tuple[int, int, int]] = self.loads[["address", "offset", "size"]].tolist()
        return loaded

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
        return Elf(io.BytesIO(content)).symbols(dynamic=False)

    def symbols(self, dynamic: bool) -> SymbolTable:
        """The functions of .symtab, or of .dynsym."""
        indices = np.flatnonzero(self.sections["type"] == (SHT_DYNSYM if dynamic else SHT_SYMTAB))
        if not len(indices):
            return SymbolTable()
        section = self.sections[indices[0]]
        strings = int(section["link"])
        if section["entry"] != _SYMBOL.itemsize or strings >= len(self.sections):
            raise ElfError("its symbol table is damaged")
        data = self.data(int(indices[0]), _MOST_TABLE_BYTES)
        symbols = np.frombuffer(data[: len(data) // _SYMBOL.itemsize * _SYMBOL.itemsize], _SYMBOL)
        names = self.data(strings, _MOST_TABLE_BYTES)
        kinds = symbols["info"] & 15
        functions = (kinds == _FUNCTION) | (kinds == _IFUNC)
        symbols = symbols[functions & (symbols["section"] != 0) & (symbols["name"] < len(names))]
        return SymbolTable(symbols, self._section_ends(symbols), names)

    def _section_ends(self, symbols: NDArray[np.void]) -> NDArray[np.uint64]:
        """Where the section of each symbol ends; its own address for what is in none."""
        known = symbols["section"] < min(len(self.sections), _FIRST_RESERVED_SECTION)
        ends: NDArray[np.uint64] = symbols["value"].copy()
        where = self.sections[symbols["section"][known]]
        ends[known] = where["address"] + where["size"]
        return ends


class _Whole(io.RawIOBase):
    """An open file, read by position: other processes may share the descriptor, and with it where it stands."""

    def __init__(self, file: int) -> None:
        self._file, self._at = file, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: os.fstat(self._file).st_size}[whence]
        if base + offset < 0:
            raise ValueError("a place before the beginning")
        self._at = base + offset
        return self._at

    def readinto(self, buffer: Any) -> int:
        data = os.pread(self._file, len(buffer), self._at)
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)


def read_elf(file: int) -> Elf:
    """An open ELF file. Raises ElfError."""
    return Elf(io.BufferedReader(_Whole(file)))


@contextlib.contextmanager
def _damaged(what: str) -> Iterator[None]:
    try:
        yield
    except (MemoryError, ElfError):
        raise
    except Exception as error:  # noqa: BLE001 (pyelftools on damaged input raises nearly anything)
        raise ElfError(f"{what} cannot be read ({type(error).__name__}: {error})"[:300]) from None


def functions_of(tables: list[SymbolTable]) -> Functions:
    """The functions of several symbol tables of which the first is the best."""
    symbols = np.concatenate([np.empty(0, _SYMBOL), *(table.symbols for table in tables)])
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
