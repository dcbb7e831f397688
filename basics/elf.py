"""The one reader of ELF files: header, segments, sections, notes, what lies at an address, and what a file exports.

A file may be anybody's and of any size. It is never read as a whole: each table is read when somebody asks for it, so
that a damaged one costs what depends on it and nothing else, and never more of it than the limits below. Only 64-bit
little-endian files are read. symbols/files/elf.py reads whole symbol tables with NumPy, report/gpu/frames.py DWARF with
pyelftools.

This module imports neither: the children that read strangers' files have to stay small, and pyelftools takes 3 ms to
find a section of the C library. Sources: System V ABI 4.1 and gABI 4.2, elf.h; DT_GNU_HASH as the dynamic linkers of
glibc and musl read it.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Container, Iterator
from functools import cached_property
from mmap import mmap
from typing import BinaryIO, NamedTuple, TypeAlias

MAGIC = b"\x7fELF"
CLASS_64, LITTLE_ENDIAN = 2, 1  # in the header's `ident`, behind the magic
EM_X86_64 = 62  # a machine
PT_LOAD, PT_DYNAMIC, PT_NOTE, PT_GNU_EH_FRAME = 1, 2, 4, 0x6474E550
PF_EXECUTE, PF_WRITE = 1, 2
SHT_NULL, SHT_PROGBITS, SHT_SYMTAB, SHT_STRTAB, SHT_RELA, SHT_NOTE, SHT_NOBITS, SHT_REL, SHT_DYNSYM = (
    *range(5), 7, 8, 9, 11,
)  # fmt: skip
SHF_EXECINSTR, SHF_COMPRESSED = 4, 0x800
SHN_UNDEF, SHN_LORESERVE, SHN_ABS, SHN_COMMON, SHN_XINDEX = 0, 0xFF00, 0xFFF1, 0xFFF2, 0xFFFF
STT_NOTYPE, STT_OBJECT, STT_FUNC, STT_GNU_IFUNC = 0, 1, 2, 10
_PN_XNUM = 0xFFFF
_NT_GNU_BUILD_ID = 3
_DT_NULL, _DT_HASH, _DT_STRTAB, _DT_SYMTAB, _DT_GNU_HASH = 0, 4, 5, 6, 0x6FFFFEF5

HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
SECTION = struct.Struct("<IIQQQQIIQQ")
SEGMENT = struct.Struct("<IIQQQQQQ")
SYMBOL = struct.Struct("<IBBHQQ")
REL, RELA = struct.Struct("<QII"), struct.Struct("<QIIQ")
_NOTE, _ENTRY, _WORD = struct.Struct("<III"), struct.Struct("<QQ"), struct.Struct("<I")

MOST_SECTIONS = 1 << 16
LONGEST_CHAIN = 1 << 10
"""At most so many symbols with one hash are looked at; linkers make chains of a few."""
_MOST_NAME_BYTES = 1 << 26  # of sections
_MOST_NOTE_BYTES = 1 << 20  # of a section or segment
_MOST_TABLE_BYTES = 1 << 24  # of symbols
_MOST_ENTRIES = 1 << 12  # of the dynamic section, which has some thirty
_LONGEST_NAME = 255  # of a section; what is behind is cut off

Read: TypeAlias = Callable[[int, int], bytes]
"""Gives so many bytes from an offset of a file on; fewer where it ends."""


class ElfError(ValueError):
    """The file is damaged, or no ELF file of the kind that is read; the text says which."""


class TooLarge(ElfError):
    """It claims to have more of something than is read."""


class Header(NamedTuple):
    """Elf64_Ehdr."""

    ident: bytes
    type: int
    machine: int
    version: int
    entry: int
    segments: int  # offset of their table
    sections: int
    flags: int
    size: int
    segment_size: int
    segment_count: int
    section_size: int
    section_count: int
    names: int  # index of the section with the sections' names


class Segment(NamedTuple):
    """Elf64_Phdr."""

    type: int
    flags: int
    offset: int
    address: int
    physical: int
    size: int  # in the file
    memory: int
    align: int


class Section(NamedTuple):
    """Elf64_Shdr."""

    name: int
    type: int
    flags: int
    address: int
    offset: int
    size: int
    link: int
    info: int
    align: int
    entry_size: int


class Symbol(NamedTuple):
    """Elf64_Sym."""

    name: int
    info: int
    other: int
    section: int
    value: int
    size: int


class Relocation(NamedTuple):
    """Elf64_Rela."""

    offset: int
    kind: int
    symbol: int
    addend: int  # modulo 2^64


class Note(NamedTuple):
    """One note of a section or a segment."""

    name: bytes
    type: int
    description: bytes

    @property
    def is_build_id(self) -> bool:
        """Whether `description` is the file's build-id."""
        return self.name == b"GNU" and self.type == _NT_GNU_BUILD_ID


def in_memory(data: bytes | bytearray | mmap) -> Read:
    """Reads a file that is in memory."""
    return lambda offset, size: bytes(data[offset : offset + size])


def in_file(file: int) -> Read:
    """Reads an open file by position: other processes may share the descriptor, and with it where it stands."""

    def read(offset: int, size: int) -> bytes:
        try:
            return os.pread(file, size, offset)
        except (OSError, OverflowError):  # an offset that no file has
            return b""

    return read


def in_stream(file: BinaryIO) -> Read:
    """Reads an open file of Python's."""

    def read(offset: int, size: int) -> bytes:
        try:
            file.seek(offset)
            return file.read(size)
        except (OSError, OverflowError, ValueError):
            return b""

    return read


class ElfFile:
    """An ELF file, or an image of one in memory."""

    def __init__(self, read: Read, most_sections: int = MOST_SECTIONS) -> None:
        """Reads the header.

        Args:
            read: the file.
            most_sections: with more of them it is refused, once somebody asks for its sections.

        Raises:
            ElfError: it is not a 64-bit little-endian ELF file.
        """
        self.read, self._most_sections = read, most_sections
        head = read(0, HEADER.size)
        if head[:4] != MAGIC:
            raise ElfError("it is not an ELF file")
        if len(head) < HEADER.size:
            raise ElfError(f"its header cannot be read (it has {len(head)} bytes)")
        if head[4] != CLASS_64:
            raise ElfError("it is not a 64-bit ELF file")
        if head[5] != LITTLE_ENDIAN:
            raise ElfError("it is a big-endian ELF file, and only little-endian ones are read")
        self.header = Header._make(HEADER.unpack(head))

    @cached_property
    def segments(self) -> list[Segment]:
        """The program header. Raises ElfError where it is damaged."""
        count = self.header.segment_count
        if count == _PN_XNUM:  # then it is in the first section's header
            count = self._first_section.info
        entries = self._rows(self.header.segments, SEGMENT, self.header.segment_size, count, "table of segments")
        return list(map(Segment._make, entries))

    @cached_property
    def loads(self) -> list[Segment]:
        """The segments that are loaded."""
        return [segment for segment in self.segments if segment.type == PT_LOAD]

    @cached_property
    def sections(self) -> list[Section]:
        """The section table; empty where there is none. Raises ElfError where it is damaged, or has too many."""
        if not self.header.sections:
            return []
        count = self.header.section_count or self._first_section.size
        if count > self._most_sections:
            raise TooLarge(f"it claims {count} sections; more than {self._most_sections} are not read")
        entries = self._rows(self.header.sections, SECTION, self.header.section_size, count, "table of sections")
        return list(map(Section._make, entries))

    @property
    def _first_section(self) -> Section:
        """What the header has no room for is here."""
        return Section._make(next(self._rows(self.header.sections, SECTION, SECTION.size, 1, "table of sections")))

    def _rows(
        self, offset: int, entry: struct.Struct, entry_size: int, count: int, what: str
    ) -> Iterator[tuple[int, ...]]:
        if count and entry_size != entry.size:
            raise ElfError(
                "its table of sections or segments cannot be read (ValueError: its entries have an odd size)"
            )
        data = self.read(offset, entry.size * count) if count else b""
        if len(data) != entry.size * count:
            raise ElfError(f"its {what} lies outside the file")
        return entry.iter_unpack(data)

    @cached_property
    def names(self) -> Section | None:
        """The section with the sections' names; None where it is missing."""
        index = self.header.names if self.header.names != SHN_XINDEX else self._first_section.link
        return self.sections[index] if 0 < index < len(self.sections) else None

    @cached_property
    def indices(self) -> dict[str, int]:
        """The sections by name, the first one of each name; no section where their names are missing."""
        if self.names is None:
            return {}
        if self.names.size > _MOST_NAME_BYTES:
            raise TooLarge(f"its sections' names claim {self.names.size} bytes")
        strings = self.read(self.names.offset, self.names.size)
        found: dict[str, int] = {}
        for index, section in enumerate(self.sections):
            end = strings.find(b"\0", section.name, section.name + _LONGEST_NAME)
            name = strings[section.name : end if end >= 0 else section.name + _LONGEST_NAME]
            found.setdefault(name.decode("utf-8", "replace"), index)
        return found

    def section(self, name: str) -> int | None:
        """The index of the first section of that name that has bytes in the file."""
        index = self.indices.get(name)
        if index is None or self.sections[index].type == SHT_NOBITS or not self.sections[index].size:
            return None
        return index

    def notes(self, place: Section | Segment) -> Iterator[Note]:
        """The notes of a section or segment, of its first _MOST_NOTE_BYTES, up to the first that is cut off."""
        data, at = self.read(place.offset, min(place.size, _MOST_NOTE_BYTES)), 0
        while at + _NOTE.size <= len(data):
            name_size, size, kind = _NOTE.unpack_from(data, at)
            start = at + _NOTE.size + (name_size + 3 & ~3)
            if start + size > len(data):
                return
            yield Note(data[at + _NOTE.size :][:name_size].split(b"\0")[0], kind, data[start : start + size])
            at = start + (size + 3 & ~3)

    def notes_of(self, name: str) -> Iterator[Note]:
        """The notes of the section of that name; none where it is not there, or holds something else."""
        index = self.section(name)
        if index is not None and self.sections[index].type == SHT_NOTE:
            yield from self.notes(self.sections[index])

    def named_symbols(self, name: str) -> Iterator[tuple[bytes, Symbol]]:
        """The symbols of the section of that name, with their names, for small files; none where it holds no symbols.

        Raises:
            TooLarge: it has more than _MOST_TABLE_BYTES, or its names have; also written out, as one may end another.
        """
        index = self.section(name)
        table = self.sections[index] if index is not None else None
        if table is None or table.type not in (SHT_SYMTAB, SHT_DYNSYM) or table.link >= len(self.sections):
            return
        names = self.sections[table.link]
        if max(table.size, names.size) > _MOST_TABLE_BYTES:
            raise TooLarge("its symbols are more than are read")
        strings, left = self.read(names.offset, names.size), _MOST_TABLE_BYTES
        entries = self.read(table.offset, table.size // SYMBOL.size * SYMBOL.size)
        for symbol in map(Symbol._make, SYMBOL.iter_unpack(entries[: len(entries) // SYMBOL.size * SYMBOL.size])):
            text = strings[symbol.name : max(strings.find(b"\0", symbol.name), symbol.name)]
            left -= len(text)
            if left < 0:
                raise TooLarge("its symbols' names are more than are read")
            yield text, symbol

    def at(self, address: int, count: int) -> bytes:
        """The bytes from an address on; fewer at the end of its segment, none if it is not loaded."""
        for segment in self.loads:
            within = address - segment.address
            if 0 <= within < segment.size:
                return self.read(segment.offset + within, min(count, segment.size - within))
        return b""

    @cached_property
    def _dynamic(self) -> dict[int, int]:
        """The first of each tag of the dynamic section."""
        found: dict[int, int] = {}
        for segment in [each for each in self.segments if each.type == PT_DYNAMIC][-1:]:
            content = self.at(segment.address, min(segment.size, _MOST_ENTRIES * _ENTRY.size))
            for tag, value in _ENTRY.iter_unpack(content[: len(content) // _ENTRY.size * _ENTRY.size]):
                if tag == _DT_NULL:
                    break
                found.setdefault(tag, value)
        return found

    def exported(self, name: bytes, kinds: Container[int] = (STT_OBJECT, STT_FUNC)) -> int | None:
        """The address of a variable or function that the file exports; None if there is none of that name.

        Found by the file's hash table, as the dynamic linker does: a table of all symbols is tens of megabytes in
        large libraries, and a file need not have sections.
        """
        symbols, strings = self._dynamic.get(_DT_SYMTAB), self._dynamic.get(_DT_STRTAB)
        if symbols is None or strings is None:
            return None
        for number in self._candidates(name):
            entry = self.at(symbols + number * SYMBOL.size, SYMBOL.size)
            if len(entry) < SYMBOL.size:
                return None
            symbol = Symbol._make(SYMBOL.unpack(entry))
            is_defined = symbol.section != SHN_UNDEF and symbol.info & 15 in kinds
            if is_defined and self.at(strings + symbol.name, len(name) + 1) == name + b"\0":
                return symbol.value
        return None

    def _candidates(self, name: bytes) -> Iterator[int]:
        """The numbers of symbols that may have a name."""
        if _DT_GNU_HASH in self._dynamic:
            return self._by_gnu_hash(self._dynamic[_DT_GNU_HASH], name)
        if _DT_HASH in self._dynamic:
            return self._by_hash(self._dynamic[_DT_HASH], name)
        return iter(())

    def _by_gnu_hash(self, table: int, name: bytes) -> Iterator[int]:
        head = self.at(table, 16)
        if len(head) < 16:
            return
        bucket_count, first_symbol, bloom_words, _ = struct.unpack("<4I", head)
        buckets = table + 16 + 8 * bloom_words
        hashed = 5381
        for byte in name:
            hashed = hashed * 33 + byte & 0xFFFF_FFFF
        number = self._word(buckets + 4 * (hashed % bucket_count)) if bucket_count else None
        if not number or number < first_symbol:
            return
        chain = self.at(buckets + 4 * bucket_count + 4 * (number - first_symbol), 4 * LONGEST_CHAIN)
        for index, (of_symbol,) in enumerate(_WORD.iter_unpack(chain[: len(chain) & ~3])):
            if of_symbol | 1 == hashed | 1:
                yield number + index
            if of_symbol & 1:
                return

    def _by_hash(self, table: int, name: bytes) -> Iterator[int]:
        head = self.at(table, 8)
        if len(head) < 8:
            return
        bucket_count, _ = struct.unpack("<II", head)
        hashed = 0
        for byte in name:
            hashed = (hashed << 4) + byte & 0xFFFF_FFFF
            high = hashed & 0xF000_0000
            hashed = (hashed ^ high >> 24) & ~high
        number = self._word(table + 8 + 4 * (hashed % bucket_count)) if bucket_count else None
        for _ in range(LONGEST_CHAIN):
            if not number:
                return
            yield number
            number = self._word(table + 8 + 4 * bucket_count + 4 * number)

    def _word(self, address: int) -> int | None:
        content = self.at(address, 4)
        return _WORD.unpack(content)[0] if len(content) == 4 else None
