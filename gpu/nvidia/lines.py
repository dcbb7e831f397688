"""The lines of cubins: DWARF's line programs, with NVIDIA's rows for inlined calls.

Each sequence of rows belongs to a section with code, which a relocation of its first address names. Before the rows of
an inlined function, the extended opcode 0x90 has the number of the row of its call, an earlier one, counted from 1 in
the sequence, and the place of its name in .debug_str; zeros end that. A program's files have DWARF's numbers.

The tables are untrusted: the work is bounded by their length, and what is damaged is left out. Sources: DWARF 2 to 4,
section 6.2; readelf and nvdisasm -gi on cubins of CUDA 13 and Triton 3.
"""

from __future__ import annotations

import posixpath
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from iaprof.basics import elf
from iaprof.gpu.code import CodePlace, Lines
from iaprof.gpu.elf_code import Section, StringTable
from iaprof.gpu.nvidia.cubin import cubin_sections

_MOST_ROWS = 1 << 20  # of all programs of a cubin
_DEEPEST = 32  # inlined calls
_MOST_FILES = 1 << 14  # and folders, of a program
_LONGEST_NAME = 4096
_MAX_LINE = 0x7FFF_FFFF
_UNIT = 4  # bytes of a program's length
_END_SEQUENCE, _SET_ADDRESS, _INLINED_CALL = 1, 2, 0x90
_COPY, _ADVANCE_PC, _ADVANCE_LINE, _SET_FILE, _CONST_ADD_PC, _FIXED_ADVANCE_PC = 1, 2, 3, 4, 8, 9


class _Damaged(Exception):
    """A program ends where something should follow, or declares what cannot be."""


class _Row(NamedTuple):
    address: int  # in the section
    file: str
    line: int
    call: int  # number of the row of the call; 0: the function was not inlined
    function: int  # of that call, the place of its name


@dataclass
class _Reader:
    data: bytes
    at: int
    end: int

    def take(self, size: int) -> int:
        """An unsigned number of so many bytes."""
        if self.at + size > self.end:
            raise _Damaged
        self.at += size
        return int.from_bytes(self.data[self.at - size : self.at], "little")

    def uleb(self) -> int:
        value = shift = 0
        while True:
            byte = self.take(1)
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value
            if shift > 63:
                raise _Damaged

    def sleb(self) -> int:
        start = self.at
        value = self.uleb()
        bits = 7 * (self.at - start)
        return value - (1 << bits) if value >> (bits - 1) else value

    def text(self) -> str:
        end = self.data.find(b"\0", self.at, self.end)
        if end < 0:
            raise _Damaged
        found = self.data[self.at : min(end, self.at + _LONGEST_NAME)].decode("utf-8", "backslashreplace")
        self.at = end + 1
        return found


def read_lines(data: bytes) -> dict[int, Lines]:
    """Reads the lines of a cubin's kernels.

    Returns:
        By a kernel's address: its lines.

    Raises:
        CodeObjectError: the file is no cubin, or its section table or its names are damaged.
    """
    sections = cubin_sections(data)
    of_name = {section.name: section for section in sections if section.type == elf.SHT_PROGBITS}
    table, names = of_name.get(".debug_line"), of_name.get(".debug_str")
    if table is None:
        return {}
    strings = StringTable(b"" if names is None else data[names.offset : names.offset + names.size])
    places = _relocated(data, sections)
    found: dict[int, Lines] = {}
    left = _MOST_ROWS
    programs = _Reader(data, table.offset, table.offset + table.size)
    while programs.end - programs.at > _UNIT:
        length = programs.take(_UNIT)
        end = programs.at + length
        if end > programs.end:
            break
        unit = _Reader(data, programs.at, end)
        programs.at = end
        try:
            for section, rows in _sequences(unit, table.offset, places, left):
                left -= len(rows)
                if section < len(sections) and sections[section].offset not in found:
                    found[sections[section].offset] = _lines(rows, strings)
        except _Damaged:
            continue
    return found


def _relocated(data: bytes, sections: Sequence[Section]) -> dict[int, tuple[int, int]]:
    """By place in .debug_line: the section and the offset in it of the address that belongs there."""
    symbols = next((each for each in sections if each.type == elf.SHT_SYMTAB), None)
    entries = next((each for each in sections if each.name in (".rela.debug_line", ".rel.debug_line")), None)
    found: dict[int, tuple[int, int]] = {}
    if symbols is None or entries is None or entries.type not in (elf.SHT_RELA, elf.SHT_REL):
        return found
    entry = elf.RELA if entries.type == elf.SHT_RELA else elf.REL
    count = min(entries.size // entry.size, _MOST_ROWS)
    for place, _, number, *addend in entry.iter_unpack(data[entries.offset : entries.offset + count * entry.size]):
        if (number + 1) * elf.SYMBOL.size <= symbols.size:
            symbol = elf.Symbol._make(elf.SYMBOL.unpack_from(data, symbols.offset + number * elf.SYMBOL.size))
            found[place] = symbol.section, symbol.value + (addend[0] if addend else 0)
    return found


def _sequences(
    unit: _Reader, table: int, places: Mapping[int, tuple[int, int]], most: int
) -> Iterator[tuple[int, list[_Row]]]:
    """Yields the sequences of a program whose section is known, each with its rows and the row that ends it.

    Args:
        unit: behind the program's length.
        table: offset of .debug_line in the file.
        places: as `_relocated` returns them.
        most: rows that may be made.
    """
    version = unit.take(2)
    if not 2 <= version <= 4:
        return
    header = unit.take(4)
    begin = unit.at + header
    step = unit.take(1)
    if version >= 4:
        unit.take(1)  # operations of an instruction
    unit.take(1)  # whether rows are statements
    base = (unit.take(1) ^ 0x80) - 0x80
    span, opcodes = unit.take(1), unit.take(1)
    arguments = [0, *(unit.take(1) for _ in range(max(opcodes - 1, 0)))]
    files = _Files(unit)
    if begin > unit.end or not span:
        raise _Damaged
    unit.at = begin
    while unit.at < unit.end:
        section, address, file, line, call, function = -1, 0, 1, 1, 0, 0
        rows: list[_Row] = []
        while True:
            emits = False
            code = unit.take(1)
            if code >= opcodes:
                address += step * ((code - opcodes) // span)
                line += base + (code - opcodes) % span
                emits = True
            elif code == 0:
                size = unit.uleb()
                next_at = unit.at + size
                kind = unit.take(1) if size else 0
                if kind == _SET_ADDRESS:
                    section, address = places.get(unit.at - table, (-1, 0))
                elif kind == _INLINED_CALL:
                    call, function = unit.uleb(), unit.uleb()
                if next_at > unit.end:
                    raise _Damaged
                unit.at = next_at
                if kind == _END_SEQUENCE:
                    rows.append(_Row(address, "", 0, 0, 0))
                    break
            elif code == _COPY:
                emits = True
            elif code == _ADVANCE_PC:
                address += step * unit.uleb()
            elif code == _ADVANCE_LINE:
                line += unit.sleb()
            elif code == _SET_FILE:
                file = unit.uleb()
            elif code == _CONST_ADD_PC:
                address += step * ((255 - opcodes) // span)
            elif code == _FIXED_ADVANCE_PC:
                address += unit.take(2)
            else:
                for _ in range(arguments[code]):
                    unit.uleb()
            if emits:
                most -= 1
                if most < 0:
                    raise _Damaged
                rows.append(_Row(address, files.path(file), line if 0 <= line <= _MAX_LINE else 0, call, function))
        if section >= 0:
            yield section, rows


class _Files:
    """The paths of a program's files, by number from 1 on."""

    def __init__(self, unit: _Reader) -> None:
        self._folders = [""]
        while (folder := unit.text()) and len(self._folders) < _MOST_FILES:
            self._folders.append(folder)
        self._files: list[tuple[str, int]] = []
        while (name := unit.text()) and len(self._files) < _MOST_FILES:
            self._files.append((name, unit.uleb()))
            unit.uleb(), unit.uleb()  # time and size
        self._paths: dict[int, str] = {}

    def path(self, number: int) -> str:
        """The path of a file; "" if there is none of that number."""
        if number not in self._paths:
            name, folder = self._files[number - 1] if 0 < number <= len(self._files) else ("", 0)
            self._paths[number] = posixpath.join(self._folders[folder] if folder < len(self._folders) else "", name)
        return self._paths[number]


def _lines(rows: Sequence[_Row], strings: StringTable) -> Lines:
    """The places at each address at which they change."""
    found: dict[int, tuple[CodePlace, ...]] = {}
    of_rows: list[tuple[CodePlace, ...]] = []
    made: dict[tuple[int, int, str, int], tuple[CodePlace, ...]] = {}
    names: dict[int, str] = {}  # of functions
    for number, row in enumerate(rows):
        outer: tuple[CodePlace, ...] = ()
        if 0 < row.call <= number and len(of_rows[row.call - 1]) < _DEEPEST:
            outer = of_rows[row.call - 1]
        key = id(outer), row.function, row.file, row.line  # of a tuple that `of_rows` keeps
        if key not in made:
            if outer and row.function not in names:
                names[row.function] = strings.at(row.function)
            own = CodePlace(names[row.function] if outer else "", row.file, row.line)
            made[key] = (*outer, own) if row.file else outer
        of_rows.append(made[key])
        found[row.address] = made[key]  # if several rows have one address, the last one counts
    return tuple(sorted(found.items()))
