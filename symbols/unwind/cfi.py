"""Call frame information (CFI): how to get from an instruction of an ELF image to its caller.

Compilers leave it in .eh_frame. A sorted table in the segment PT_GNU_EH_FRAME leads to the entry of a function, so
nothing is indexed and the size of the file does not matter; only an image without that table is read through once.
Formats: Linux Standard Base Core 5.0, section 10.6; DWARF 5, section 6.4.

The image is a stranger's. Whatever is wrong with it raises CfiError, and one look-up executes no more than
MOST_INSTRUCTIONS. x86-64 only.
"""

from __future__ import annotations

import bisect
import contextlib
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property
from typing import NamedTuple, TypeAlias

from iaprof.formats.elf import EM_X86_64, PT_GNU_EH_FRAME, ElfError, ElfFile, in_memory
from iaprof.symbols.unwind.dwarf_reader import _MASK, Bytes, CfiError, DwarfReader

MOST_INSTRUCTIONS = 1 << 16  # 20 ms; the functions with the most have some thousand
MOST_SCANNED = 1 << 17  # entries of an image without a sorted table: 0.2 s
MOST_SEGMENTS = 1 << 10
MOST_SECTIONS = 1 << 12
ENTRY_BYTES = 128  # behind the entry point, that count as code which nothing calls

RBX, RBP, RSP, R12, R13, R14, R15, RETURN_ADDRESS = 3, 6, 7, 12, 13, 14, 15, 16
"""Registers by their numbers in DWARF (System V ABI for x86-64, table 3.36)."""
_MOST_REGISTERS = 144

_OMITTED, _USUAL_TABLE = 0xFF, 0x3B  # encodings of pointers: none; relative to the header, 4 bytes
_PC_RELATIVE, _DATA_RELATIVE = 0x10, 0x30
_PAIR = struct.Struct("<ii")
_FORMS = {0x00: "<Q", 0x02: "<H", 0x03: "<I", 0x04: "<Q", 0x0A: "<h", 0x0B: "<i", 0x0C: "<q"}
_ULEB, _SLEB = 0x01, 0x09


class How(IntEnum):
    """How a register of the caller is found."""

    UNDEFINED = 0  # it is lost
    SAME = 1
    OFFSET = 2  # in memory at the CFA plus the value
    VALUE_OFFSET = 3  # it is the CFA plus the value
    REGISTER = 4  # it is in the register of that number
    EXPRESSION = 5  # in memory at what the expression gives
    VALUE_EXPRESSION = 6  # it is what the expression gives


Where: TypeAlias = tuple[How, int | bytes]
"""How a register is found, and the value, number or DWARF expression for that."""


@dataclass(slots=True)
class Row:
    """What is in force at one instruction.

    The canonical frame address (CFA) is the stack pointer that the caller has after the return.
    """

    cfa: tuple[int, int] | bytes | None = None  # register and what is added to it, or a DWARF expression
    registers: dict[int, Where] = field(default_factory=dict)  # those that are not told of are the same
    is_signal_frame: bool = False
    before: int = 0  # bytes in front of the address that it was asked for, for which it is in force, too
    behind: int = 0  # and from that address on

    @property
    def is_outermost(self) -> bool:
        """Whether the function has no caller."""
        return self.registers.get(RETURN_ADDRESS, (How.SAME, 0))[0] is How.UNDEFINED


OUTERMOST = Row((RSP, 0), {RETURN_ADDRESS: (How.UNDEFINED, 0)})


class _Cie(NamedTuple):
    """What the entries of several functions have in common."""

    code_unit: int
    data_unit: int
    encoding: int
    is_signal_frame: bool
    has_size: bool  # whether data of the function's own goes before its instructions
    start: int  # of the first instructions
    end: int


class Function(NamedTuple):
    """A function, as its entry tells it."""

    start: int  # address in the image
    size: int
    cie: _Cie
    bias: int  # from offsets of its entry to addresses
    instructions: int  # offset of the first of its own
    end: int  # behind the last


class CallFrames(ElfFile):
    """An ELF image, and its call frame information."""

    def __init__(self, data: Bytes) -> None:
        """Reads its headers.

        Args:
            data: the image: a file's content, or that of the vDSO.

        Raises:
            CfiError: it is no 64-bit ELF image for x86-64, or has no call frame information.
        """
        self.data = data
        self._cies: dict[int, _Cie] = {}
        with _damaged("its headers cannot be read"):
            super().__init__(in_memory(data))
            if self.header.machine != EM_X86_64:
                raise CfiError("it is no 64-bit ELF image for x86-64")
            self.segments = self.segments[:MOST_SEGMENTS]
            tables = [each for each in self.segments if each.type == PT_GNU_EH_FRAME]
            self._count = 0
            if tables:
                self._read_table(tables[-1].offset, tables[-1].address)

    def _read_table(self, offset: int, address: int) -> None:
        """The header of the sorted table; one of another form counts as none."""
        version, encoding, of_count, of_table = self.data[offset : offset + 4]
        if version != 1 or of_count == _OMITTED or of_table != _USUAL_TABLE:
            return
        reader = DwarfReader(self.data, offset + 4)
        self._pointer(reader, encoding, address - offset, address)
        self._count = self._pointer(reader, of_count, address - offset, address)
        self._table, self._table_address = reader.at, address
        if self._count > (len(self.data) - self._table) // _PAIR.size:
            raise CfiError("its table of functions is longer than the file")

    def address_of(self, offset: int) -> int | None:
        """Where the byte at an offset of the file is in the image; None if it is not loaded."""
        for segment in self.loads:
            # The page that a segment begins in is mapped as a whole.
            if segment.offset & ~4095 <= offset < segment.offset + segment.size:
                return offset - segment.offset + segment.address
        return None

    def _offset_of(self, address: int) -> int:
        for segment in self.loads:
            if segment.address <= address < segment.address + segment.size:
                return address - segment.address + segment.offset
        raise CfiError("an address outside of the image")

    def code_before(self, address: int, count: int) -> bytes:
        """The bytes before an address of the image; fewer at the beginning of a segment, none if it is not loaded."""
        for segment in self.loads:
            if segment.address < address <= segment.address + segment.size:
                end = address - segment.address + segment.offset
                return bytes(self.data[max(end - count, segment.offset) : end])
        return b""

    @property
    def has_functions(self) -> bool:
        """Whether there is call frame information in it."""
        return bool(self._count or self._scanned[0])

    def function(self, address: int) -> Function | None:
        """The function that an address of the image is in; None if nothing is told of it.

        Raises:
            CfiError: its entry is damaged.
        """
        with _damaged():
            at, _ = self._entry_of(address)
            function = None if at is None else self._function(at)
        return function if function and function.start <= address < function.start + function.size else None

    def untold(self, address: int) -> tuple[int, int]:
        """Around an address of which nothing is told: from where to where that is so.

        Raises:
            CfiError: the entry of the function before it is damaged.
        """
        with _damaged():
            at, end = self._entry_of(address)
            before = None if at is None else self._function(at)
            return 0 if before is None else before.start + before.size, end

    def row(self, address: int) -> Row | None:
        """What is in force at an instruction; None if nothing is told of it.

        Args:
            address: of the instruction, or any byte of it, as the program headers have it.

        Raises:
            CfiError: the entry of its function is damaged.
        """
        return self.row_in(self.function(address), address)

    def row_in(self, function: Function | None, address: int) -> Row | None:
        """Likewise, for who has asked for the function."""
        if function is None:
            # The dynamic linker's start may have no entry; the kernel jumps there, and nothing calls it.
            is_start = self.header.entry and 0 <= address - self.header.entry < ENTRY_BYTES
            return OUTERMOST if is_start else None
        with _damaged():
            return self._row(function, address)

    def _entry_of(self, address: int) -> tuple[int | None, int]:
        """The offset of the entry of the function that may hold an address, and where the next function begins."""
        if not self._count:
            starts, entries = self._scanned
            index = bisect.bisect_right(starts, address)
            return entries[index - 1] if index else None, starts[index] if index < len(starts) else _MASK
        data, table, relative = self.data, self._table, address - self._table_address
        unpack, low, high = _PAIR.unpack_from, 0, self._count
        while low < high:
            middle = (low + high) // 2
            if unpack(data, table + 8 * middle)[0] <= relative:
                low = middle + 1
            else:
                high = middle
        end = _MASK if low == self._count else unpack(data, table + 8 * low)[0] + self._table_address
        if not low:
            return None, end
        return self._offset_of(unpack(data, table + 8 * (low - 1))[1] + self._table_address), end

    @cached_property
    def _scanned(self) -> tuple[list[int], list[int]]:
        """For an image without a table: the sorted starts of functions, and the offsets of their entries.

        It ends at the first entry that is damaged.
        """
        found: list[tuple[int, int]] = []
        with contextlib.suppress(CfiError), _damaged():
            found.extend(self._entries())
        found.sort()
        return [start for start, _ in found], [entry for _, entry in found]

    def _entries(self) -> Iterator[tuple[int, int]]:
        """The start of each function, and the offset of its entry."""
        index = self.indices.get(".eh_frame") if len(self.sections) <= MOST_SECTIONS else None
        at = 0 if index is None else self.sections[index].offset
        end = 0 if index is None else min(at + self.sections[index].size, len(self.data))
        for _ in range(MOST_SCANNED):
            if at + 8 > end:
                break
            length, back = struct.unpack_from("<II", self.data, at)
            if not 0 < length < 0xFFFF_FFF0:
                break
            if back:  # else it is a CIE
                reader = DwarfReader(self.data, at + 8)
                encoding = self._cie(at + 4 - back).encoding
                yield self._pointer(reader, encoding, self._bias(reader.at), 0), at
            at += 4 + length

    @cached_property
    def is_go(self) -> bool:
        """Whether Go's compiler made it: such code keeps frame pointers, and has no call frame information."""
        with contextlib.suppress(ElfError):
            return len(self.sections) <= MOST_SECTIONS and ".go.buildinfo" in self.indices
        return False

    def _bias(self, offset: int) -> int:
        """What is added to an offset to get the address."""
        address = self.address_of(offset)
        if address is None:
            raise CfiError("its call frame information is not loaded")
        return address - offset

    def _pointer(self, reader: DwarfReader, encoding: int, bias: int, data_base: int) -> int:
        """An address as DW_EH_PE_* of the Linux Standard Base encode it.

        Args:
            reader: stands where it is.
            encoding: how it is encoded.
            bias: from offsets to addresses, here.
            data_base: the address that _DATA_RELATIVE ones are relative to.
        """
        base = {_PC_RELATIVE: reader.at + bias, _DATA_RELATIVE: data_base}.get(encoding & 0x70, 0)
        form = encoding & 0x0F
        if form == _ULEB:
            value = reader.uleb()
        elif form == _SLEB:
            value = reader.sleb()
        else:
            layout = _FORMS[form]
            value = reader.number(layout, struct.calcsize(layout))
        return value + base & _MASK

    def _cie(self, at: int) -> _Cie:
        known = self._cies.get(at)
        if known is not None:
            return known
        reader = DwarfReader(self.data, at)
        length = reader.number("<I", 4)
        end = reader.at + length
        if not 0 < length < 0xFFFF_FFF0 or reader.number("<I", 4) != 0:
            raise CfiError("an entry without a common one")
        version = reader.byte()
        if version not in (1, 3):
            raise CfiError(f"call frame information of version {version}")
        text = bytearray()
        while (byte := reader.byte()) and len(text) < 16:
            text.append(byte)
        if text and text[0] != ord("z"):
            raise CfiError("call frame information with unknown additions")
        code_unit, data_unit = reader.uleb(), reader.sleb()
        if (reader.byte() if version == 1 else reader.uleb()) != RETURN_ADDRESS:
            raise CfiError("call frame information of another machine")
        encoding, is_signal_frame = 0, False
        if text:
            size = reader.uleb()
            start = reader.at + size
            for letter in text[1:].decode("latin-1"):
                if letter == "R":
                    encoding = reader.byte()
                elif letter == "P":  # the personality routine
                    self._pointer(reader, reader.byte(), 0, 0)
                elif letter == "L":
                    reader.byte()
                elif letter == "S":
                    is_signal_frame = True
                else:
                    break  # what is behind an unknown letter cannot be told
            reader.at = start
        cie = _Cie(code_unit, data_unit, encoding, is_signal_frame, bool(text), reader.at, min(end, len(self.data)))
        self._cies[at] = cie
        return cie

    def _function(self, at: int) -> Function:
        """By its entry at an offset."""
        reader = DwarfReader(self.data, at)
        length = reader.number("<I", 4)
        end = min(reader.at + length, len(self.data))
        cie = self._cie(reader.at - reader.number("<I", 4))
        bias = self._bias(reader.at)
        start = self._pointer(reader, cie.encoding, bias, 0)
        size = self._pointer(reader, cie.encoding & 0x0F, 0, 0)
        if cie.has_size:
            own = reader.uleb()
            reader.at += own
        return Function(start, size, cie, bias, reader.at, end)

    def _row(self, function: Function, address: int) -> Row:
        cie, start = function.cie, function.start
        row = Row(is_signal_frame=cie.is_signal_frame)
        left = self._execute(row, cie.start, cie.end, start, _MASK, cie, function.bias, {}, MOST_INSTRUCTIONS)
        initial = dict(row.registers)
        row.before, row.behind = address - start, start + function.size - address
        self._execute(row, function.instructions, function.end, start, address, cie, function.bias, initial, left)
        return row

    def _execute(
        self,
        row: Row,
        at: int,
        end: int,
        location: int,
        address: int,
        cie: _Cie,
        bias: int,
        initial: dict[int, Where],
        most: int,
    ) -> int:
        """Executes instructions up to an address; gives how many more may be."""
        reader = DwarfReader(self.data, at)
        registers = row.registers
        remembered: list[tuple[tuple[int, int] | bytes | None, dict[int, Where]]] = []
        data_unit = cie.data_unit
        while reader.at < end:
            most -= 1
            if most < 0:
                raise CfiError("too many instructions")
            code = reader.byte()
            high, low = code & 0xC0, code & 0x3F
            if high == 0x40 or 0x01 <= code <= 0x04:  # advance
                if high:
                    location += low * cie.code_unit
                elif code == 0x01:
                    location = self._pointer(reader, cie.encoding, bias, 0)
                else:
                    size = 1 << (code - 2)
                    location += reader.number(_SIZES[size], size) * cie.code_unit
                if location > address:
                    row.behind = location - address
                    break
                row.before = address - location
            elif high == 0x80:
                registers[low] = (How.OFFSET, reader.uleb() * data_unit)
            elif high == 0xC0:
                registers[low] = initial.get(low, _SAME)
            elif code == 0x00:
                pass
            elif code == 0x0E:
                row.cfa = _register_of(row), reader.uleb()
            elif code == 0x0C:
                row.cfa = reader.uleb(), reader.uleb()
            elif code == 0x0D:
                number = reader.uleb()
                row.cfa = number, _offset_of(row)
            elif code == 0x0A:
                remembered.append((row.cfa, dict(registers)))
            elif code == 0x0B:
                row.cfa, row.registers = remembered.pop()
                registers = row.registers
            elif code == 0x0F:
                row.cfa = reader.block()
            elif code == 0x12:
                row.cfa = reader.uleb(), reader.sleb() * data_unit
            elif code == 0x13:
                row.cfa = _register_of(row), reader.sleb() * data_unit
            elif code == 0x2E:
                reader.uleb()  # the size of arguments
            elif code in _OF_REGISTERS:
                number = reader.uleb()
                if number >= _MOST_REGISTERS:
                    raise CfiError(f"register {number}")
                registers[number] = (
                    initial.get(number, _SAME) if code == 0x06 else _OF_REGISTERS[code](reader, data_unit)
                )
            else:
                raise CfiError(f"instruction {code:#x}")
        return most


@contextlib.contextmanager
def _damaged(what: str = "its call frame information is damaged") -> Iterator[None]:
    """Raises CfiError for whatever cannot be read."""
    try:
        yield
    except (struct.error, IndexError, OverflowError, ValueError, KeyError, TypeError) as error:
        raise CfiError(f"{what} ({error})") from None


_SAME: Where = (How.SAME, 0)
_SIZES = {1: "<B", 2: "<H", 4: "<I"}
# Instructions that are about one register, whose number comes first.
_OF_REGISTERS: dict[int, Callable[[DwarfReader, int], Where]] = {
    0x05: lambda reader, unit: (How.OFFSET, reader.uleb() * unit),
    0x06: lambda reader, unit: _SAME,  # restore
    0x07: lambda reader, unit: (How.UNDEFINED, 0),
    0x08: lambda reader, unit: _SAME,
    0x09: lambda reader, unit: (How.REGISTER, reader.uleb()),
    0x10: lambda reader, unit: (How.EXPRESSION, reader.block()),
    0x11: lambda reader, unit: (How.OFFSET, reader.sleb() * unit),
    0x14: lambda reader, unit: (How.VALUE_OFFSET, reader.uleb() * unit),
    0x15: lambda reader, unit: (How.VALUE_OFFSET, reader.sleb() * unit),
    0x16: lambda reader, unit: (How.VALUE_EXPRESSION, reader.block()),
    0x2F: lambda reader, unit: (How.OFFSET, -reader.uleb() * unit),
}


def _register_of(row: Row) -> int:
    if not isinstance(row.cfa, tuple):
        raise CfiError("an offset without a register")
    return row.cfa[0]


def _offset_of(row: Row) -> int:
    if not isinstance(row.cfa, tuple):
        raise CfiError("a register without an offset")
    return row.cfa[1]
