"""Code objects that are ELF files with a section `.text.NAME` for each kernel, as several vendors have them.

The file may come from anyone: all that it declares is checked before use, and the work and memory that reading takes
are bounded by its length. basics/elf.py has the layout of ELF files.
"""

from __future__ import annotations

from typing import NamedTuple

from iaprof.basics import elf
from iaprof.gpu.code import CodeFunction, CodeObjectError, canonical

TEXT_PREFIX = ".text."  # a kernel's section is named .text.<kernel>


class Section(NamedTuple):
    """An entry of the section table."""

    name: str
    type: int
    address: int
    offset: int
    size: int
    link: int
    info: int
    entry_size: int


def read_sections(data: bytes, machine: int, whose: str) -> list[Section]:
    """The checked section table: every section that has bytes has them inside the file.

    Args:
        data: the file, untrusted.
        machine: that the header has to name.
        whose: for the error, such as "an Intel GPU".

    Raises:
        CodeObjectError: the file is damaged, or none for that machine.
    """
    if data[:4] != elf.MAGIC:
        raise CodeObjectError("it is not an ELF file")
    if len(data) < elf.HEADER.size:
        raise CodeObjectError(f"it is cut short: {len(data)} bytes are less than an ELF header")
    header = elf.Header._make(elf.HEADER.unpack_from(data))
    if header.ident[4] != elf.CLASS_64 or header.ident[5] != elf.LITTLE_ENDIAN:
        raise CodeObjectError("it is not a 64-bit little-endian ELF file")
    if header.machine != machine:
        raise CodeObjectError(f"it is an ELF file for machine {header.machine}, not for {whose} ({machine})")
    table = header.sections
    if table == 0:
        raise CodeObjectError("it has no section table, so nothing in it has a name")
    if header.section_size != elf.SECTION.size:
        raise CodeObjectError(
            f"its section table has entries of {header.section_size} bytes instead of {elf.SECTION.size}"
        )
    if table + elf.SECTION.size > len(data):
        raise CodeObjectError(f"it is cut short: its section table starts at byte {table} of {len(data)}")
    # More than 65279 sections are counted in the first section's size, and a names' index as large in its link.
    first = elf.Section._make(elf.SECTION.unpack_from(data, table))
    count = header.section_count or first.size
    names = first.link if header.names == elf.SHN_XINDEX else header.names
    if table + count * elf.SECTION.size > len(data):
        raise CodeObjectError(
            f"it is cut short: its section table of {count} entries ends outside of its {len(data)} bytes"
        )
    entries = elf.SECTION.iter_unpack(data[table : table + count * elf.SECTION.size])
    sections = list(map(elf.Section._make, entries))
    if not 0 < names < count:
        raise CodeObjectError("its section names are missing")
    for each in sections:
        if each.type not in (elf.SHT_NULL, elf.SHT_NOBITS) and each.offset + each.size > len(data):
            raise CodeObjectError(f"it is cut short: a section ends at byte {each.offset + each.size} of {len(data)}")
    strings = StringTable(data[sections[names].offset : sections[names].offset + sections[names].size])
    return [
        Section(
            strings.at(each.name),
            each.type,
            each.address,
            each.offset,
            each.size,
            each.link,
            each.info,
            each.entry_size,
        )
        for each in sections
    ]


def kernel_sections(sections: list[Section]) -> dict[int, Section]:
    """The kernels' sections by section index, in the order of the file."""
    return {
        index: section
        for index, section in enumerate(sections)
        if section.type == elf.SHT_PROGBITS
        and section.name.startswith(TEXT_PREFIX)
        and len(section.name) > len(TEXT_PREFIX)
    }


def check_size(data: bytes, texts: dict[int, Section]) -> None:
    """Raises CodeObjectError if these sections hold more code than the file has bytes."""
    if sum(section.size for section in texts.values()) > len(data):
        raise CodeObjectError("its sections overlap: they hold more code than the file has bytes")


def functions(
    data: bytes, sections: list[Section], texts: dict[int, Section], are_placed: bool
) -> dict[int, list[CodeFunction]]:
    """The FUNC symbols of each text section, by section index.

    Args:
        data: the file.
        sections: its section table.
        texts: the kernels' sections.
        are_placed: symbols hold addresses, not offsets in their sections.
    """
    found: dict[int, list[CodeFunction]] = {}
    table = next((section for section in sections if section.type == elf.SHT_SYMTAB), None)
    if table is None:
        return found
    if table.entry_size != elf.SYMBOL.size or not 0 < table.link < len(sections):
        raise CodeObjectError("its symbol table is damaged")
    names = sections[table.link]
    if names.type in (elf.SHT_NULL, elf.SHT_NOBITS):
        raise CodeObjectError("its symbols' names are missing")
    strings = StringTable(data[names.offset : names.offset + names.size])
    symbols = memoryview(data)[table.offset : table.offset + table.size // elf.SYMBOL.size * elf.SYMBOL.size]
    for name, info, _, index, value, size in elf.SYMBOL.iter_unpack(symbols):
        if info & 0xF != elf.STT_FUNC or index not in texts:
            continue
        section = texts[index]
        offset = canonical(value - section.address) if are_placed else value
        if offset < max(section.size, 1):
            size = min(size, section.size - offset)
            found.setdefault(index, []).append(CodeFunction(strings.at(name), offset, size))
    return found


def kernel_names(data: bytes, shortest: int, longest: int, are_placed: bool) -> list[tuple[bytes, int]]:
    """The kernels of a code object whose names have a length within bounds.

    Args:
        data: the file, untrusted.
        shortest: minimum length of a name, bytes.
        longest: maximum length of a name, bytes.
        are_placed: sections have addresses; else the address of a kernel is the offset of its section in the file.

    Returns:
        Name and canonical address (0 if it was not relocated) of each; empty if `data` is no ELF file.
    """
    try:
        file = elf.ElfFile(elf.in_memory(data), most_sections=len(data))
        names, sections = file.names, file.sections
    except elf.ElfError:
        return []
    if names is None:
        return []
    found: list[tuple[bytes, int]] = []
    left = names.size  # sections may share their names
    for section in sections:
        at = names.offset + section.name
        start = at + len(TEXT_PREFIX)
        last = min(start + longest + 1, names.offset + names.size)
        if section.type == elf.SHT_PROGBITS and data.startswith(TEXT_PREFIX.encode(), at):
            end = data.find(b"\0", start, last)
            left -= max(end - start, 0)
            if end - start >= shortest and left >= 0:
                found.append((data[start:end], canonical(section.address if are_placed else section.offset)))
    return found


class StringTable:
    """An untrusted string table: limits the total length of the names read, as many entries may share one string."""

    def __init__(self, strings: bytes) -> None:
        self._strings = strings
        self._left = 16 * len(strings) + 4096

    def at(self, offset: int) -> str:
        """The name that starts at `offset`; empty outside the table."""
        end = self._strings.find(b"\0", offset)
        name = self._strings[offset : end if end >= 0 else len(self._strings)]
        self._left -= len(name)
        if self._left < 0:
            raise CodeObjectError("its names overlap: they are many times as long as their table")
        return name.decode("utf-8", "backslashreplace")
