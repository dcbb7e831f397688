"""Reads call frame information (CFI), which says how to find the caller of each instruction of an ELF image.

Compilers write it to .eh_frame: an entry (FDE) for each function. A sorted table in the segment PT_GNU_EH_FRAME leads
to the entry of a function, so a look-up does not depend on the size of the file. Only an image without that table is
read through once. Formats: Linux Standard Base Core 5.0, section 10.6; DWARF 5, section 6.4.

The image may be hostile. Damage raises CfiError, and one look-up executes at most MOST_INSTRUCTIONS. x86-64 only.
"""

from __future__ import annotations

import bisect
import contextlib
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property
from mmap import mmap
from typing import NamedTuple, TypeAlias

from iaprof.basics.elf import EM_X86_64, PT_GNU_EH_FRAME, ElfFile, in_memory

_MASK = (1 << 64) - 1
_LONGEST_BLOCK = 1 << 12  # bytes; real expressions have fewer than 100
Bytes: TypeAlias = bytes | mmap

MOST_INSTRUCTIONS = 1 << 16  # 20 ms; the longest real functions need a few thousand
_MOST_REMEMBERED = 1 << 6  # states at once; compilers remember one or two
MOST_SCANNED = 1 << 17  # entries of an image without a sorted table: 0.2 s
MOST_SEGMENTS = 1 << 10
MOST_SECTIONS = 1 << 12
ENTRY_BYTES = 128  # from the entry point on, that count as code without a caller

RBX, RBP, RSP, R12, R13, R14, R15, RETURN_ADDRESS = 3, 6, 7, 12, 13, 14, 15, 16
"""DWARF numbers of registers (System V ABI for x86-64, table 3.36)."""
_MOST_REGISTERS = 144

_OMITTED, _USUAL_TABLE = 0xFF, 0x3B  # pointer encodings: no pointer; 4 bytes relative to the header
_PC_RELATIVE, _DATA_RELATIVE = 0x10, 0x30
_PAIR = struct.Struct("<ii")
_FORMS = {0x00: "<Q", 0x02: "<H", 0x03: "<I", 0x04: "<Q", 0x0A: "<h", 0x0B: "<i", 0x0C: "<q"}
_ULEB, _SLEB = 0x01, 0x09


class CfiError(Exception):
    """The data are not call frame information for x86-64, or damaged."""


class DwarfReader:
    """Reads numbers one after the other.

    Attributes:
        at: where the next number begins, in bytes from the start of `data`.

    Every method raises CfiError, IndexError or struct.error if the data ends before the number.
    """

    __slots__ = ("at", "data")

    def __init__(self, data: Bytes, at: int) -> None:
        """Begins at offset `at` of `data`."""
        self.data, self.at = data, at

    def byte(self) -> int:
        """Reads an unsigned number of one byte."""
        value = self.data[self.at]
        self.at += 1
        return value

    def number(self, form: str, size: int) -> int:
        """Reads a number of `size` bytes in a format of the module struct."""
        (value,) = struct.unpack_from(form, self.data, self.at)
        self.at += size
        return int(value)

    def uleb(self) -> int:
        """Reads a ULEB128, cut to 64 bits."""
        value = self.data[self.at]
        self.at += 1
        if value < 128:
            return value
        value &= 127
        for shift in range(7, 70, 7):
            byte = self.data[self.at]
            self.at += 1
            value |= (byte & 127) << shift
            if byte < 128:
                return value & _MASK
        raise CfiError("a number without an end")

    def sleb(self) -> int:
        """Reads an SLEB128."""
        value = 0
        for shift in range(0, 70, 7):
            byte = self.data[self.at]
            self.at += 1
            value |= (byte & 127) << shift
            if byte < 128:
                return value - (1 << shift + 7) if byte & 64 else value
        raise CfiError("a number without an end")

    def block(self) -> bytes:
        """Reads a block: its length as a ULEB128, then its bytes."""
        size = self.uleb()
        if size > _LONGEST_BLOCK:
            raise CfiError(f"an expression of {size} bytes")
        value = bytes(self.data[self.at : self.at + size])
        if len(value) != size:
            raise CfiError("an expression without an end")
        self.at += size
        return value


class RegisterRuleKind(IntEnum):
    """The kinds of register rules, which say how to find the caller's value of a register (DWARF 5, section 6.4.1)."""

    UNDEFINED = 0  # the value is lost
    SAME = 1  # the register still has it
    OFFSET = 2  # it is in memory, at the CFA plus an offset
    VALUE_OFFSET = 3  # it is the CFA plus an offset
    REGISTER = 4  # it is in another register
    EXPRESSION = 5  # it is in memory, at the address that an expression gives
    VALUE_EXPRESSION = 6  # it is the value of an expression


RegisterRule: TypeAlias = tuple[RegisterRuleKind, int | bytes]
"""A kind of rule with its operand: an offset, a register's number or a DWARF expression."""


@dataclass(slots=True)
class Row:
    """The rules for one instruction: a row of the table that call frame information stands for.

    The canonical frame address (CFA) is the stack pointer that the caller has after the return.
    """

    cfa: tuple[int, int] | bytes | None = None  # register and offset, or a DWARF expression
    registers: dict[int, RegisterRule] = field(default_factory=dict)  # by number; SAME for registers without an entry
    is_signal_frame: bool = False
    before: int = 0  # the row also holds for so many bytes before the address that was looked up,
    behind: int = 0  # and for so many bytes from that address on

    @property
    def is_outermost(self) -> bool:
        """Whether the function has no caller."""
        return self.registers.get(RETURN_ADDRESS, (RegisterRuleKind.SAME, 0))[0] is RegisterRuleKind.UNDEFINED


OUTERMOST = Row((RSP, 0), {RETURN_ADDRESS: (RegisterRuleKind.UNDEFINED, 0)})


class _Cie(NamedTuple):
    """A common information entry: what the entries of several functions have in common."""

    code_unit: int  # the code alignment factor
    data_unit: int  # the data alignment factor
    encoding: int  # of pointers, DW_EH_PE_*
    is_signal_frame: bool
    has_size: bool  # whether a function's entry has augmentation data before its instructions
    start: int  # offset of the initial CFA instructions
    end: int  # offset after them


class Function(NamedTuple):
    """A function, as its entry (FDE) describes it."""

    start: int  # address in the image
    size: int
    cie: _Cie
    bias: int  # what turns offsets of the entry into addresses
    instructions: int  # offset of its CFA instructions
    end: int  # offset after them


class CallFrames(ElfFile):
    """The call frame information of an ELF image."""

    def __init__(self, data: Bytes) -> None:
        """Reads the image's headers.

        Args:
            data: the content of a file, or the vDSO.

        Raises:
            CfiError: the data are not a 64-bit ELF image for x86-64, or its headers are damaged.
        """
        self.data = data
        self._cies: dict[int, _Cie] = {}
        with _damaged("its headers cannot be read"):
            super().__init__(in_memory(data))
            if self.header.machine != EM_X86_64:
                raise CfiError("it is not a 64-bit ELF image for x86-64")
            self.segments = self.segments[:MOST_SEGMENTS]
            tables = [segment for segment in self.segments if segment.type == PT_GNU_EH_FRAME]
            self._count = 0
            if tables:
                self._read_table(tables[-1].offset, tables[-1].address)

    def _read_table(self, offset: int, address: int) -> None:
        """Reads the header of the sorted table; ignores a table with unusual pointer encodings."""
        version, frame_encoding, count_encoding, table_encoding = self.data[offset : offset + 4]
        if version != 1 or count_encoding == _OMITTED or table_encoding != _USUAL_TABLE:
            return
        reader = DwarfReader(self.data, offset + 4)
        self._pointer(reader, frame_encoding, address - offset, address)
        self._count = self._pointer(reader, count_encoding, address - offset, address)
        self._table, self._table_address = reader.at, address
        if self._count > (len(self.data) - self._table) // _PAIR.size:
            raise CfiError("its table of functions is longer than the file")

    def address_of(self, offset: int) -> int | None:
        """Returns the address of a file offset; None if it is not loaded."""
        for segment in self.loads:
            # The kernel maps whole pages: also the bytes before the segment in its first page.
            if segment.offset & ~4095 <= offset < segment.offset + segment.size:
                return offset - segment.offset + segment.address
        return None

    def _offset_of(self, address: int) -> int:
        for segment in self.loads:
            if segment.address <= address < segment.address + segment.size:
                return address - segment.address + segment.offset
        raise CfiError("an address outside of the image")

    @property
    def has_functions(self) -> bool:
        """Whether the image has call frame information."""
        return bool(self._count or self._scanned[0])

    def function(self, address: int) -> Function | None:
        """Returns the function that has an address; None if call frame information does not cover the address.

        Raises:
            CfiError: the function's entry is damaged.
        """
        with _damaged():
            at, _ = self._entry_of(address)
            function = None if at is None else self._function(at)
        return function if function and function.start <= address < function.start + function.size else None

    def gap(self, address: int) -> tuple[int, int]:
        """Returns start and end of the code around an address that call frame information does not cover.

        Raises:
            CfiError: the entry of the function before it is damaged.
        """
        with _damaged():
            at, end = self._entry_of(address)
            previous = None if at is None else self._function(at)
            return 0 if previous is None else previous.start + previous.size, end

    def row(self, address: int) -> Row | None:
        """Returns the rules for an instruction; None if call frame information does not cover it.

        Args:
            address: virtual address of any byte of the instruction.

        Raises:
            CfiError: the entry of its function is damaged.
        """
        return self.row_in(self.function(address), address)

    def row_in(self, function: Function | None, address: int) -> Row | None:
        """Like `row`, if the function of the address is known."""
        if function is None:
            # The dynamic linker's start may have no entry. The Linux kernel jumps there, so it has no caller.
            is_start = self.header.entry and 0 <= address - self.header.entry < ENTRY_BYTES
            return OUTERMOST if is_start else None
        with _damaged():
            return self._row(function, address)

    def _entry_of(self, address: int) -> tuple[int | None, int]:
        """Returns the offset of the entry of the last function up to an address, and where the next function begins."""
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
        """The sorted starts of functions and the offsets of their entries, for an image without a table.

        The scan ends at the first damaged entry.
        """
        entries: list[tuple[int, int]] = []
        with contextlib.suppress(CfiError), _damaged():
            entries.extend(self._entries())
        entries.sort()
        return [start for start, _ in entries], [entry for _, entry in entries]

    def _entries(self) -> Iterator[tuple[int, int]]:
        """Yields the start of each function, and the offset of its entry."""
        index = self.indices.get(".eh_frame") if len(self.sections) <= MOST_SECTIONS else None
        at = 0 if index is None else self.sections[index].offset
        end = 0 if index is None else min(at + self.sections[index].size, len(self.data))
        for _ in range(MOST_SCANNED):
            if at + 8 > end:
                break
            length, to_cie = struct.unpack_from("<II", self.data, at)
            if not 0 < length < 0xFFFF_FFF0:
                break
            if to_cie:  # 0 in a CIE
                reader = DwarfReader(self.data, at + 8)
                encoding = self._cie(at + 4 - to_cie).encoding
                yield self._pointer(reader, encoding, self._bias(reader.at), 0), at
            at += 4 + length

    def _bias(self, offset: int) -> int:
        """Returns what has to be added to an offset of the file to get its address."""
        address = self.address_of(offset)
        if address is None:
            raise CfiError("its call frame information is not loaded")
        return address - offset

    def _pointer(self, reader: DwarfReader, encoding: int, bias: int, data_base: int) -> int:
        """Reads a pointer.

        Args:
            reader: stands at the pointer.
            encoding: a DW_EH_PE_* of the Linux Standard Base.
            bias: what turns offsets into addresses here.
            data_base: the address that _DATA_RELATIVE pointers are relative to.
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
        """Reads the common information entry at an offset, once."""
        cached = self._cies.get(at)
        if cached is not None:
            return cached
        reader = DwarfReader(self.data, at)
        length = reader.number("<I", 4)
        end = reader.at + length
        if not 0 < length < 0xFFFF_FFF0 or reader.number("<I", 4) != 0:
            raise CfiError("an entry without a common one")
        version = reader.byte()
        if version not in (1, 3, 4):
            raise CfiError(f"call frame information of version {version}")
        text = bytearray()
        while (byte := reader.byte()) and len(text) < 16:
            text.append(byte)
        if text and text[0] != ord("z"):
            raise CfiError("call frame information with unknown additions")
        if version == 4 and (reader.byte(), reader.byte()) != (8, 0):  # sizes of addresses and segment selectors
            raise CfiError("call frame information of another machine")
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
                    break  # the length of an unknown letter's data is unknown
            reader.at = start
        cie = _Cie(code_unit, data_unit, encoding, is_signal_frame, bool(text), reader.at, min(end, len(self.data)))
        self._cies[at] = cie
        return cie

    def _function(self, at: int) -> Function:
        """Reads the function whose entry is at an offset."""
        reader = DwarfReader(self.data, at)
        length = reader.number("<I", 4)
        end = min(reader.at + length, len(self.data))
        cie = self._cie(reader.at - reader.number("<I", 4))
        bias = self._bias(reader.at)
        start = self._pointer(reader, cie.encoding, bias, 0)
        size = self._pointer(reader, cie.encoding & 0x0F, 0, 0)
        if cie.has_size:
            augmentation_bytes = reader.uleb()
            reader.at += augmentation_bytes
        return Function(start, size, cie, bias, reader.at, end)

    def _row(self, function: Function, address: int) -> Row:
        cie, start = function.cie, function.start
        row = Row(is_signal_frame=cie.is_signal_frame)
        remaining = self._execute(row, cie.start, cie.end, start, _MASK, cie, function.bias, {}, MOST_INSTRUCTIONS)
        initial = dict(row.registers)
        row.before, row.behind = address - start, start + function.size - address
        self._execute(row, function.instructions, function.end, start, address, cie, function.bias, initial, remaining)
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
        initial: dict[int, RegisterRule],
        most: int,
    ) -> int:
        """Executes CFA instructions until they pass an address.

        Args:
            row: is changed.
            at: offset of the first instruction.
            end: offset after the last one.
            location: the address that the first instruction is for.
            address: the address to stop at.
            cie: of the function.
            bias: what turns offsets into addresses.
            initial: the rules of the CIE, for DW_CFA_restore.
            most: how many instructions may be executed.

        Returns:
            How many more instructions may be executed.
        """
        reader = DwarfReader(self.data, at)
        registers = row.registers
        remembered: list[tuple[tuple[int, int] | bytes | None, dict[int, RegisterRule]]] = []
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
                registers[low] = (RegisterRuleKind.OFFSET, reader.uleb() * data_unit)
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
                if len(remembered) == _MOST_REMEMBERED:
                    raise CfiError("too many remembered states")
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
            elif code in _REGISTER_INSTRUCTIONS:
                number = reader.uleb()
                if number >= _MOST_REGISTERS:
                    raise CfiError(f"register {number}")
                registers[number] = (
                    initial.get(number, _SAME) if code == 0x06 else _REGISTER_INSTRUCTIONS[code](reader, data_unit)
                )
            else:
                raise CfiError(f"instruction {code:#x}")
        return most


@contextlib.contextmanager
def _damaged(what: str = "its call frame information is damaged") -> Iterator[None]:
    """Turns the exceptions that damaged data cause into CfiError."""
    try:
        yield
    except (struct.error, IndexError, OverflowError, ValueError, KeyError, TypeError) as error:
        raise CfiError(f"{what} ({error})") from None


_SAME: RegisterRule = (RegisterRuleKind.SAME, 0)
_SIZES = {1: "<B", 2: "<H", 4: "<I"}
# Instructions that set the rule of one register, whose number comes first.
_REGISTER_INSTRUCTIONS: dict[int, Callable[[DwarfReader, int], RegisterRule]] = {
    0x05: lambda reader, unit: (RegisterRuleKind.OFFSET, reader.uleb() * unit),
    0x06: lambda reader, unit: _SAME,  # restore
    0x07: lambda reader, unit: (RegisterRuleKind.UNDEFINED, 0),
    0x08: lambda reader, unit: _SAME,
    0x09: lambda reader, unit: (RegisterRuleKind.REGISTER, reader.uleb()),
    0x10: lambda reader, unit: (RegisterRuleKind.EXPRESSION, reader.block()),
    0x11: lambda reader, unit: (RegisterRuleKind.OFFSET, reader.sleb() * unit),
    0x14: lambda reader, unit: (RegisterRuleKind.VALUE_OFFSET, reader.uleb() * unit),
    0x15: lambda reader, unit: (RegisterRuleKind.VALUE_OFFSET, reader.sleb() * unit),
    0x16: lambda reader, unit: (RegisterRuleKind.VALUE_EXPRESSION, reader.block()),
    0x2F: lambda reader, unit: (RegisterRuleKind.OFFSET, -reader.uleb() * unit),
}


def _register_of(row: Row) -> int:
    if not isinstance(row.cfa, tuple):
        raise CfiError("an offset without a register")
    return row.cfa[0]


def _offset_of(row: Row) -> int:
    if not isinstance(row.cfa, tuple):
        raise CfiError("a register without an offset")
    return row.cfa[1]
