"""ELF files and DWARF made by hand: a few lines that say what is in them, and what is wrong with them.

zebin([kernel("k", code, 0x1000), *dwarf(Die(COMPILE_UNIT, children=[...]), rows=[(0x1000, 1, 7)])])
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field

INTEL_GPU, X86_64 = 205, 62
REL, EXEC = 1, 2
PROGBITS, SYMTAB, STRTAB, RELA, NOBITS, RELOCATIONS = 1, 2, 3, 4, 8, 9
FUNC, NOTYPE = 2, 0

COMPILE_UNIT, SUBPROGRAM, INLINED, BLOCK, NAMESPACE, CLASS = 0x11, 0x2E, 0x1D, 0x0B, 0x39, 0x02
NAME, STMT_LIST, LOW_PC, HIGH_PC, COMP_DIR, ORIGIN, SIBLING = 0x03, 0x10, 0x11, 0x12, 0x1B, 0x31, 0x01
DECL_FILE, DECL_LINE, CALL_FILE, CALL_LINE, SPECIFICATION, LINKAGE, RANGES = 0x3A, 0x3B, 0x58, 0x59, 0x47, 0x6E, 0x55
_ADDR, _DATA4, _STRING, _REF4, _SEC_OFFSET = 0x01, 0x06, 0x08, 0x13, 0x17


@dataclass
class Section:
    name: str
    data: bytes = b""
    address: int = 0
    type: int = PROGBITS
    link: int = 0
    info: int = 0
    entry_size: int = 0
    claimed_size: int | None = None  # what the table says instead of the data's length
    claimed_offset: int | None = None


@dataclass
class Symbol:
    name: str
    section: int  # index of a section given to zebin(), from 0
    value: int
    size: int = 0
    type: int = FUNC


def kernel(name: str, code: bytes = bytes(64), address: int = 0) -> Section:
    return Section(f".text.{name}", code, address)


def zebin(
    sections: list[Section],
    symbols: list[Symbol] | None = None,
    *,
    machine: int = INTEL_GPU,
    type: int = EXEC,
    bits: int = 2,
    order: int = 1,
    count: int | None = None,
    table: int | None = None,
    entry_size: int = 64,
) -> bytes:
    """An ELF file; keywords after the symbols are for lies."""
    every = [Section("", type=0), *sections]
    if symbols is not None:
        strings = b"\0" + b"".join(symbol.name.encode() + b"\0" for symbol in symbols)
        entries, position = bytes(24), 1
        for symbol in symbols:
            entries += struct.pack("<IBBHQQ", position, symbol.type, 0, symbol.section + 1, symbol.value, symbol.size)
            position += len(symbol.name.encode()) + 1
        every += [
            Section(".symtab", entries, type=SYMTAB, link=len(every) + 1, entry_size=24),
            Section(".strtab", strings, type=STRTAB),
        ]
    names = b"".join(section.name.encode() + b"\0" for section in every) + b".shstrtab\0"
    every.append(Section(".shstrtab", names, type=STRTAB))
    body, headers, name = b"", b"", 0
    start = 64 + 64 * len(every)
    for section in every:
        offset = start + len(body) if section.claimed_offset is None else section.claimed_offset
        size = len(section.data) if section.claimed_size is None else section.claimed_size
        headers += struct.pack(
            "<IIQQQQIIQQ", name, section.type, 2, section.address & (1 << 64) - 1, offset, size, section.link,
            section.info, 8, section.entry_size,
        )  # fmt: skip
        body += section.data
        name += len(section.name.encode()) + 1
    header = struct.pack(
        "<16sHHIQQQIHHHHHH", b"\x7fELF" + bytes([bits, order, 1]), type, machine, 1, 0, 0,
        64 if table is None else table, 0, 64, 0, 0, entry_size, len(every) if count is None else count, len(every) - 1,
    )  # fmt: skip
    return header + headers + body


@dataclass(eq=False)
class Die:
    """A DWARF entry. Values: int for data, str for strings, Addr for addresses, another Die for a reference to it."""

    tag: int
    attributes: dict[int, object] = field(default_factory=dict)
    children: list[Die] = field(default_factory=list)
    offset: int = 0  # in .debug_info, once written


class Addr(int):
    pass


def _form(value: object, name: int) -> int:
    if isinstance(value, Die):
        return _REF4
    if isinstance(value, str):
        return _STRING
    if isinstance(value, Addr):
        return _ADDR
    return _SEC_OFFSET if name in (STMT_LIST, RANGES) else _DATA4


def dwarf(
    unit: Die,
    rows: list[tuple[int, int, int | None]] | None = None,
    files: list[str] | None = None,
    ranges: bytes = b"",
) -> list[Section]:
    """The .debug sections of one DWARF 4 unit; rows are (address, file, line), line None where the sequence ends."""
    abbreviations = b""
    numbers: dict[tuple[object, ...], int] = {}

    def write(die: Die, info: bytearray, final: bool) -> None:
        nonlocal abbreviations
        die.offset = len(info)
        shape = (die.tag, bool(die.children), *((name, _form(value, name)) for name, value in die.attributes.items()))
        if shape not in numbers:
            numbers[shape] = len(numbers) + 1
            specs = b"".join(uleb(name) + uleb(_form(value, name)) for name, value in die.attributes.items())
            abbreviations += uleb(numbers[shape]) + uleb(die.tag) + bytes([bool(die.children)]) + specs + b"\0\0"
        info += uleb(numbers[shape])
        for value in die.attributes.values():
            if isinstance(value, Die):
                info += struct.pack("<I", value.offset)
            elif isinstance(value, str):
                info += value.encode() + b"\0"
            elif isinstance(value, Addr):
                info += struct.pack("<Q", value & (1 << 64) - 1)
            else:
                info += struct.pack("<I", value)
        for child in die.children:
            write(child, info, final)
        if die.children:
            info += b"\0"

    for _ in range(2):  # the first time finds the offsets that the second refers to
        info = bytearray(struct.pack("<IHIB", 0, 4, 0, 8))
        write(unit, info, False)
    struct.pack_into("<I", info, 0, len(info) - 4)
    return [
        Section(".debug_info", bytes(info)),
        Section(".debug_abbrev", abbreviations + b"\0"),
        Section(".debug_line", _line_program(rows or [], files or ["a.cl"])),
        Section(".debug_ranges", ranges),
    ]


def _line_program(rows: list[tuple[int, int, int | None]], files: list[str]) -> bytes:
    program, line = bytearray(), 1
    for address, file, to in rows:
        program += b"\0\x09\x02" + struct.pack("<Q", address & (1 << 64) - 1)
        if to is None:
            program += b"\0\x01\x01"
            line = 1
        else:
            program += b"\x04" + uleb(file) + b"\x03" + _sleb(to - line) + b"\x01"
            line = to
    lengths = bytes([0, 1, 1, 1, 1, 0, 0, 0, 1, 0, 0, 1])
    tables = b"\0" + b"".join(name.encode() + b"\0\0\0\0" for name in files) + b"\0"
    rest = struct.pack("<BBBbBB", 1, 1, 1, -5, 14, 13) + lengths + tables
    whole = struct.pack("<HI", 4, len(rest)) + rest + program
    return struct.pack("<I", len(whole)) + whole


def uleb(value: int) -> bytes:
    """An unsigned LEB128 number."""
    out = bytearray()
    while True:
        out.append(value & 0x7F | (0x80 if value > 0x7F else 0))
        value >>= 7
        if not value:
            return bytes(out)


def _sleb(value: int) -> bytes:
    out = bytearray()
    while True:
        byte, value = value & 0x7F, value >> 7
        done = (value == 0 and not byte & 0x40) or (value == -1 and byte & 0x40)
        out.append(byte if done else byte | 0x80)
        if done:
            return bytes(out)
