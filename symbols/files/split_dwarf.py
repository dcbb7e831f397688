"""Split DWARF: debug information that the compiler left in .dwo files, or that dwp collected in a .dwp file.

The program keeps a skeleton of each unit, with the line table, the addresses and the name of the .dwo. The `symbolic`
library does not read split units. `whole_unit` makes an ELF file of one unit as it would be without -gsplit-dwarf: the
bytes of the .dwo with another beginning. References within a unit count from its start, so that nothing may move: the
line table and the base address of ranges take the eight bytes of the id that tells which skeleton a unit belongs to.

Formats: DWARF 5, sections 7.3 and 7.5; for DWARF 4, GCC's wiki, "DebugFission" and "DebugFissionDWP".
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from iaprof.basics.elf import (
    EM_X86_64,
    HEADER,
    MAGIC,
    PT_LOAD,
    SECTION,
    SEGMENT,
    SHF_COMPRESSED,
    SHT_PROGBITS,
    SHT_STRTAB,
    ElfError,
    Read,
    in_memory,
)
from iaprof.symbols.files.elf import Elf
from iaprof.symbols.unwind.cfi import Bytes, CfiError, DwarfReader

_MOST_BYTES = 1 << 28  # of a section
_MOST_UNITS = 1 << 17
_MOST_RANGES = 1 << 16  # of a unit
_MOST_ATTRIBUTES = 1 << 8
_LONGEST_SKELETON = 1 << 14
_MOST_UNIT_BYTES = 1 << 20  # of addresses and ranges
_COMPILE, _SKELETON, _SPLIT_COMPILE = 0x01, 0x04, 0x05  # DW_UT_*
_STMT_LIST, _LOW_PC, _HIGH_PC, _COMP_DIR, _RANGES = 0x10, 0x11, 0x12, 0x1B, 0x55  # DW_AT_*
_STR_OFFSETS_BASE, _ADDR_BASE, _RNGLISTS_BASE, _DWO_NAME = 0x72, 0x73, 0x74, 0x76
_GNU_DWO_NAME, _GNU_DWO_ID, _GNU_RANGES_BASE, _GNU_ADDR_BASE = 0x2130, 0x2131, 0x2132, 0x2133
_ADDR, _STRING, _SEC_OFFSET, _STRP, _LINE_STRP = 0x01, 0x08, 0x17, 0x0E, 0x1F  # DW_FORM_*
_RNGLISTX, _DATA8, _ADDRX4, _GNU_ADDR_INDEX, _IMPLICIT = 0x23, 0x07, 0x2C, 0x1F01, 0x21
_FIXED = {
    _ADDR: 8, 0x0B: 1, 0x05: 2, 0x06: 4, _DATA8: 8, 0x0C: 1, _SEC_OFFSET: 4, _STRP: 4, _LINE_STRP: 4, 0x19: 0,
    0x25: 1, 0x26: 2, 0x28: 4, 0x29: 1, 0x2A: 2, _ADDRX4: 4, _IMPLICIT: 0, 0x1E: 16,
}  # fmt: skip
_ULEBS = {0x0F, 0x1A, 0x1B, _RNGLISTX, _GNU_ADDR_INDEX, 0x1F02}
_STRX = {0x1A, 0x25, 0x26, 0x28}
_ADDRX = {0x1B, 0x29, 0x2A, _ADDRX4, _GNU_ADDR_INDEX}
_INFO, _ABBREV, _STR_OFFSETS, _RNGLISTS = 1, 3, 6, 8  # DW_SECT_*
_HEADER_5, _LISTS_HEADER, _OFFSETS_HEADER = 12, 12, 8  # bytes, of DWARF 5
_OF_DWP = {_INFO: ".debug_info.dwo", _ABBREV: ".debug_abbrev.dwo", _STR_OFFSETS: ".debug_str_offsets.dwo"}


class Skeleton(NamedTuple):
    """What a program has of a split unit."""

    version: int
    dwo_id: int
    name: bytes  # of the .dwo, relative to the folder
    folder: bytes  # in which the compiler ran
    ranges: list[tuple[int, int]]  # addresses of its code, without the last ones
    low_pc: int
    line_table: int  # offsets in the program's sections
    addresses: int
    old_ranges: int  # in .debug_ranges, which DWARF 4 has


@dataclass
class _Unit:
    """A unit in .debug_info or .debug_info.dwo."""

    start: int
    end: int
    version: int
    kind: int
    dwo_id: int | None  # in the header
    abbreviations: int
    root: int  # offset of its first entry


class Sections:
    """The sections of a file, each read once; empty for those that it does not have."""

    def __init__(self, elf: Elf) -> None:
        """Reads nothing yet."""
        self.elf = elf
        self._read: dict[str, bytes] = {}

    def __getitem__(self, name: str) -> bytes:
        if name not in self._read:
            index = self.elf.section(name)
            self._read[name] = b"" if index is None else self.elf.data(index, _MOST_BYTES)
        return self._read[name]


def skeletons(sections: Sections) -> Iterator[Skeleton]:
    """Yields the skeletons in a program.

    Raises:
        ElfError: its debug information is damaged.
    """
    elf = sections.elf
    if elf.section(".debug_addr") is None:
        return
    index = elf.section(".debug_info")
    if index is None or elf.sections[index].flags & SHF_COMPRESSED:
        return
    section = elf.sections[index]

    def read(offset: int, size: int) -> bytes:
        return elf.read(section.offset + offset, min(size, section.size - offset))

    try:
        for unit in _units(read, section.size):
            if unit.kind == _SKELETON or unit.version == 4:
                skeleton = _skeleton(sections, unit, read(unit.start, min(unit.end - unit.start, _LONGEST_SKELETON)))
                if skeleton is not None:
                    yield skeleton
    except (ValueError, IndexError, struct.error, KeyError, OverflowError, CfiError) as error:
        raise ElfError(f"its debug information is damaged ({error})") from None


def _units(read: Read, size: int) -> Iterator[_Unit]:
    """Yields the units of DWARF 4 and 5 in a section of this size, up to the first that does not lie in it."""
    at = 0
    for _ in range(_MOST_UNITS):
        head = read(at, 20)
        if len(head) < 20:
            return
        length, version = struct.unpack_from("<IH", head)
        end = at + 4 + length
        if length >= 0xFFFF_FFF0 or end > size:  # 64-bit DWARF, which compilers make only if told to
            return
        if version == 5:
            kind, _, abbreviations, dwo_id = struct.unpack_from("<BBIQ", head, 6)
            has_id = kind in (_SKELETON, _SPLIT_COMPILE)
            yield _Unit(at, end, version, kind, dwo_id if has_id else None, abbreviations, at + (20 if has_id else 12))
        elif version == 4:
            (abbreviations,) = struct.unpack_from("<I", head, 6)
            yield _Unit(at, end, version, _COMPILE, None, abbreviations, at + 11)
        at = end


def _declaration(table: bytes, at: int, code: int) -> tuple[int, int, list[tuple[int, int, int]]]:
    """Finds an abbreviation: its start, its end, and attribute, form and implicit value of each attribute."""
    reader = DwarfReader(table, at)
    while True:
        start = reader.at
        found = reader.uleb()
        if not found:
            raise ValueError("an entry without an abbreviation")
        reader.uleb()
        reader.byte()
        attributes = []
        while (pair := (reader.uleb(), reader.uleb())) != (0, 0):
            attributes.append((*pair, reader.sleb() if pair[1] == _IMPLICIT else 0))
            if len(attributes) > _MOST_ATTRIBUTES:
                raise ValueError("an abbreviation without end")
        if found == code:
            return start, reader.at, attributes


def _value(reader: DwarfReader, form: int, implicit: int) -> int | bytes:
    """Reads an attribute's value: a number, or the bytes of a string in place."""
    if form == _IMPLICIT:
        return implicit
    if form in _ULEBS:
        return reader.uleb()
    if form == 0x0D:
        return reader.sleb()
    if form == _STRING:
        text = _text(reader.data, reader.at)
        reader.at += len(text) + 1
        return text
    value = int.from_bytes(reader.data[reader.at : reader.at + _FIXED[form]], "little")
    reader.at += _FIXED[form]
    return value


def _text(strings: Bytes, at: int) -> bytes:
    """Returns the bytes up to the next zero byte."""
    end = strings.find(b"\0", at)
    if end < 0:
        raise ValueError("a string without end")
    return strings[at:end]


def _word(content: bytes, at: int, size: int) -> int:
    return int.from_bytes(content[at : at + size], "little")


def _root(sections: Sections, unit: _Unit, content: bytes) -> dict[int, tuple[int, int | bytes]]:
    """Returns form and value of the attributes of a unit's first entry."""
    reader = DwarfReader(content, unit.root - unit.start)
    _, _, attributes = _declaration(sections[".debug_abbrev"], unit.abbreviations, reader.uleb())
    return {name: (form, _value(reader, form, implicit)) for name, form, implicit in attributes}


def _skeleton(sections: Sections, unit: _Unit, content: bytes) -> Skeleton | None:
    root = _root(sections, unit, content)

    def number(*names: int) -> int:
        return next((value for name in names if name in root and isinstance(value := root[name][1], int)), 0)

    addr_base = number(_ADDR_BASE, _GNU_ADDR_BASE)

    def address(index: int) -> int:
        return _word(sections[".debug_addr"], addr_base + 8 * index, 8)

    def text(*names: int) -> bytes:
        for form, value in (root[name] for name in names if name in root):
            if isinstance(value, bytes):
                return value
            if form in _STRX:
                value = _word(sections[".debug_str_offsets"], number(_STR_OFFSETS_BASE) + 4 * value, 4)
            return _text(sections[".debug_line_str" if form == _LINE_STRP else ".debug_str"], value)
        return b""

    dwo_id = unit.dwo_id if unit.dwo_id is not None else number(_GNU_DWO_ID)
    name = text(_DWO_NAME, _GNU_DWO_NAME)
    if not name:
        return None
    low_pc = number(_LOW_PC)
    if _LOW_PC in root and root[_LOW_PC][0] in _ADDRX:
        low_pc = address(low_pc)
    if _RANGES in root:
        at = number(_RANGES)
        if unit.version == 5:
            if root[_RANGES][0] == _RNGLISTX:
                base = number(_RNGLISTS_BASE)
                at = base + _word(sections[".debug_rnglists"], base + 4 * at, 4)
            ranges = list(_ranges(DwarfReader(sections[".debug_rnglists"], at), low_pc, address))
        else:
            ranges = list(_old_ranges(DwarfReader(sections[".debug_ranges"], at), low_pc))
    else:
        high = number(_HIGH_PC)
        ranges = [(low_pc, high if root.get(_HIGH_PC, (0, 0))[0] == _ADDR else low_pc + high)]
    return Skeleton(
        unit.version, dwo_id, name, text(_COMP_DIR), ranges, low_pc, number(_STMT_LIST), addr_base,
        number(_GNU_RANGES_BASE),
    )  # fmt: skip


def _ranges(reader: DwarfReader, base: int, address: Callable[[int], int]) -> Iterator[tuple[int, int]]:
    """Yields the ranges of a list in .debug_rnglists (DWARF 5, section 2.17.3)."""
    for _ in range(_MOST_RANGES):
        match reader.byte():
            case 0x01:
                base = address(reader.uleb())
            case 0x02:
                yield address(reader.uleb()), address(reader.uleb())
            case 0x03:
                start = address(reader.uleb())
                yield start, start + reader.uleb()
            case 0x04:
                yield base + reader.uleb(), base + reader.uleb()
            case 0x05:
                base = reader.number("<Q", 8)
            case 0x06:
                yield reader.number("<Q", 8), reader.number("<Q", 8)
            case 0x07:
                start = reader.number("<Q", 8)
                yield start, start + reader.uleb()
            case _:
                return


def _old_ranges(reader: DwarfReader, base: int) -> Iterator[tuple[int, int]]:
    """Yields the ranges of a list in .debug_ranges (DWARF 4, section 2.17.3)."""
    for _ in range(_MOST_RANGES):
        start, end = reader.number("<Q", 8), reader.number("<Q", 8)
        if start == (1 << 64) - 1:
            base = end
        elif start or end:
            yield base + start, base + end
        else:
            return


def whole_unit(program: Sections, skeleton: Skeleton, split: Sections) -> bytes | None:
    """Makes an ELF file with one unit, as the library reads it.

    Args:
        program: has the skeleton.
        skeleton: of the unit.
        split: the .dwo or .dwp.

    Returns:
        The file; None if `split` does not have the unit.

    Raises:
        ElfError: one of the files is damaged.
    """
    try:
        return _whole_unit(program, skeleton, _parts(split, skeleton))
    except (ValueError, IndexError, struct.error, KeyError, OverflowError, CfiError) as error:
        raise ElfError(f"its split debug information is damaged ({error})") from None


def _parts(sections: Sections, skeleton: Skeleton) -> dict[str, bytes]:
    """Returns the sections of a .dwo, or the parts of those of a .dwp that belong to a unit."""
    names = {**_OF_DWP, **({_RNGLISTS: ".debug_rnglists.dwo"} if skeleton.version == 5 else {})}
    pieces = {name: sections[name] for name in (*names.values(), ".debug_str.dwo")}
    index = sections[".debug_cu_index"]
    if not index:
        return pieces
    _, columns, units, slots = struct.unpack_from("<4I", index)  # the version has two bytes in DWARF 5, then zeros
    signatures = np.frombuffer(index, "<u8", slots, 16)
    rows = np.frombuffer(index, "<u4", slots, 16 + 8 * slots)
    (found,) = np.nonzero((signatures == skeleton.dwo_id) & (rows > 0))
    if not len(found):
        return {}
    tables = np.frombuffer(index, "<u4", columns * (2 * units + 1), 16 + 12 * slots).reshape(2 * units + 1, columns)
    row = int(rows[found[0]])
    for column, kind in enumerate(tables[0].tolist()):
        if kind in names:
            start, size = int(tables[row][column]), int(tables[units + row][column])
            pieces[names[kind]] = pieces[names[kind]][start : start + size]
    offsets, header = pieces[".debug_str_offsets.dwo"], _OFFSETS_HEADER if skeleton.version == 5 else 0
    new, pieces[".debug_str.dwo"] = _own_strings(offsets[header:], pieces[".debug_str.dwo"])
    pieces[".debug_str_offsets.dwo"] = offsets[:header] + new
    return pieces


def _own_strings(offsets: bytes, strings: bytes) -> tuple[bytes, bytes]:
    """Returns the strings at these offsets alone, of all units' strings, and their new offsets."""
    new, own = [], bytearray()
    for (at,) in struct.iter_unpack("<I", offsets[: len(offsets) & ~3]):
        new.append(len(own))
        own += _text(strings, at) + b"\0"
        if len(own) > _MOST_BYTES:
            raise ValueError("strings that repeat without end")
    return struct.pack(f"<{len(new)}I", *new), bytes(own)


def _whole_unit(program: Sections, skeleton: Skeleton, pieces: dict[str, bytes]) -> bytes | None:
    info, table = pieces.get(".debug_info.dwo", b""), pieces.get(".debug_abbrev.dwo", b"")
    line_table = program[".debug_line"]
    line_table = line_table[skeleton.line_table :][: 4 + _word(line_table, skeleton.line_table, 4)]
    # How many addresses and ranges of all units belong to this one is not known, but where they begin.
    addresses = program[".debug_addr"][skeleton.addresses : skeleton.addresses + _MOST_UNIT_BYTES]
    addresses = addresses[: len(addresses) // 8 * 8]
    if skeleton.version == 5:
        lists, ranges = ".debug_rnglists", pieces.get(".debug_rnglists.dwo", b"")[_LISTS_HEADER:]
    else:
        lists, ranges = (
            ".debug_ranges",
            program[".debug_ranges"][skeleton.old_ranges : skeleton.old_ranges + _MOST_UNIT_BYTES],
        )
    # The base of the unit's ranges. If it is 0, the library skips the unit unless it has ranges: an empty list.
    if not skeleton.low_pc:
        base = _RANGES, _SEC_OFFSET, struct.pack("<I", len(ranges))
        ranges += bytes(16)
    else:
        number = len(addresses) // 8
        addresses += struct.pack("<Q", skeleton.low_pc)
        padded = bytes(number >> 7 * piece & 127 | (128 if piece < 3 else 0) for piece in range(4))
        base = (
            (_LOW_PC, _ADDRX4, struct.pack("<I", number))
            if skeleton.version == 5
            else (_LOW_PC, _GNU_ADDR_INDEX, padded)
        )
    for unit in _units(in_memory(info), len(info)):
        if unit.version != skeleton.version or (unit.version == 5 and unit.kind != _SPLIT_COMPILE):
            continue
        found = _without_id(info, table, unit, base[:2])
        if found is None or found[0] != skeleton.dwo_id:
            continue
        _, body, place, abbreviations = found
        body[place : place + 8] = bytes(4) + base[2]  # the only line table is at 0
        sections = {
            ".debug_info": bytes(body),
            ".debug_abbrev": abbreviations,
            ".debug_str": pieces[".debug_str.dwo"],
            ".debug_str_offsets": pieces[".debug_str_offsets.dwo"][_OFFSETS_HEADER if unit.version == 5 else 0 :],
            ".debug_addr": addresses,
            ".debug_line": line_table,
            ".debug_line_str": program[".debug_line_str"],
            lists: ranges,
        }
        return _elf({name: content for name, content in sections.items() if content}, program.elf.first_address)
    return None


def _without_id(
    info: bytes, table: bytes, unit: _Unit, base: tuple[int, int]
) -> tuple[int, bytearray, int, bytes] | None:
    """Returns a unit with a first entry that has a line table and a base of ranges in place of the unit's id.

    Args:
        info: has the unit.
        table: has its abbreviations.
        unit: where it is.
        base: attribute and form of the base of ranges, which has four bytes.

    Returns:
        The id, the unit, the place for the two values in it, and its abbreviations; None if the unit has no id.
    """
    reader = DwarfReader(info, unit.root)
    start, end, attributes = _declaration(table, unit.abbreviations, reader.uleb())
    body, place = bytearray(info[unit.start : unit.end]), reader.at - unit.start
    new = [(_STMT_LIST, _SEC_OFFSET, 0), (*base, 0)]
    if unit.dwo_id is not None:
        # The id is in the header, which other units do not have: the abbreviation's code moves there.
        dwo_id, place = unit.dwo_id, place - 8
        body[_HEADER_5:place] = info[unit.root : reader.at]
        body[6] = _COMPILE
        struct.pack_into("<I", body, 8, 0)
        attributes = [*new, *attributes]
    else:
        for at, (name, form, implicit) in enumerate(attributes):
            place, value = reader.at - unit.start, _value(reader, form, implicit)
            if name == _GNU_DWO_ID and form == _DATA8 and isinstance(value, int):
                dwo_id, attributes = value, [*attributes[:at], *new, *attributes[at + 1 :]]
                break
        else:
            return None
        struct.pack_into("<I", body, 6, 0)
    own = DwarfReader(table, start)
    own.uleb()
    own.uleb()
    declaration = table[start : own.at + 1] + b"".join(
        _uleb(name) + _uleb(form) + (_sleb(implicit) if form == _IMPLICIT else b"")
        for name, form, implicit in [*attributes, (0, 0, 0)]
    )
    return dwo_id, body, place, table[unit.abbreviations : start] + declaration + table[end:]


def _uleb(value: int) -> bytes:
    encoded = bytearray()
    while value > 127:
        encoded.append(value & 127 | 128)
        value >>= 7
    return bytes([*encoded, value])


def _sleb(value: int) -> bytes:
    encoded = bytearray()
    while not -64 <= value < 64:
        encoded.append(value & 127 | 128)
        value >>= 7
    return bytes([*encoded, value & 127])


def _elf(sections: dict[str, bytes], first_address: int) -> bytes:
    """Writes an ELF file for x86-64 with one loaded segment, whose address the library subtracts from all others."""
    names = b"\0" + b"".join(name.encode() + b"\0" for name in sections) + b".shstrtab\0"
    at = HEADER.size + SEGMENT.size
    headers, name_at = [bytes(SECTION.size)], 1
    for name, content in [*sections.items(), (".shstrtab", names)]:
        kind = SHT_STRTAB if name == ".shstrtab" else SHT_PROGBITS
        headers.append(SECTION.pack(name_at, kind, 0, 0, at, len(content), 0, 0, 1, 0))
        name_at, at = name_at + len(name) + 1, at + len(content)
    ident = (MAGIC + bytes([2, 1, 1])).ljust(16, b"\0")
    header = HEADER.pack(
        ident, 3, EM_X86_64, 1, 0, HEADER.size, at, 0, HEADER.size, SEGMENT.size, 1, SECTION.size, len(headers),
        len(headers) - 1,
    )  # fmt: skip
    segment = SEGMENT.pack(PT_LOAD, 5, 0, first_address, first_address, HEADER.size, HEADER.size, 4096)
    return header + segment + b"".join(sections.values()) + names + b"".join(headers)
