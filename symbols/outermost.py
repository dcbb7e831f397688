"""Which code has no caller: where programs and threads begin, found without names.

Unwind data marks some functions: their return address is undefined (_start, and what clone's child runs). These call
two functions of the C library: the one that calls main, and the one that calls a thread's function. Only debug files
have their names, but they end the thread themselves, with the system call exit and a jump back to it.
"""

from __future__ import annotations

import re
import struct

import numpy as np
from numpy.typing import NDArray

from iaprof.symbols.elf import Elf

MOST_FUNCTIONS = 1 << 14  # that are looked at: 1 s
MOST_ENTRIES = 1 << 22  # of the table of functions: 32 MiB
_MOST_FUNCTION_BYTES = 1 << 14  # of one that may end a thread: that of glibc has 1 KiB
_MOST_CFI_BYTES = 1 << 9  # of one function's unwind data
_PT_GNU_EH_FRAME = 0x6474E550
_HEADER = struct.Struct("<4BiI")
_USUAL_ENCODINGS = (
    1,
    0x1B,
    0x03,
    0x3B,
)  # version; 4 bytes, relative to where they stand, or to the header, or absolute
_POINTER_BYTES = {0x0B: 4, 0x1B: 4, 0x03: 4, 0x0C: 8, 0x1C: 8, 0x04: 8, 0x00: 8}  # by how they are encoded
_RETURN_ADDRESS = 16  # DWARF's number for it
_UNDEFINED = b"\x07\x10"  # DW_CFA_undefined of the return address
# mov $60,%r32 (the number of exit); a few instructions; syscall; jmp back, as exit does not return.
_ENDS_THREAD = re.compile(rb"[\xb8-\xbf]\x3c\x00\x00\x00.{0,24}?\x0f\x05\xeb[\x80-\xff]", re.DOTALL)


def outermost(elf: Elf, addresses: NDArray[np.uint64]) -> NDArray[np.bool_] | None:
    """Whether the code at each address has no caller: bool[n].

    None if the file has no table of unwind data, or if the addresses are in more than MOST_FUNCTIONS functions.

    Args:
        elf: whose code it is.
        addresses: uint64[n], as its program header has them; of a return address the byte before it.
    """
    table = _table(elf)
    if table is None:
        return None
    starts, entries = table
    at = np.searchsorted(starts, addresses.astype(np.int64), side="right") - 1
    functions, which = np.unique(at, return_inverse=True)
    if len(functions) > MOST_FUNCTIONS:
        return None
    found = np.zeros(len(addresses), bool)
    for number, function in enumerate(functions.tolist()):
        if function < 0:
            continue
        cfi = _Cfi.read(elf, int(entries[function]), int(starts[function]))
        if cfi is None:
            continue
        mine = np.flatnonzero(which == number)
        inside = addresses[mine].astype(np.int64) - int(starts[function])
        code = elf.at(int(starts[function]), cfi.size) if cfi.size <= _MOST_FUNCTION_BYTES else b""
        ends_thread = _ENDS_THREAD.search(code)
        for index, offset in zip(mine.tolist(), inside.tolist(), strict=True):
            found[index] = offset < cfi.size and (bool(ends_thread) or cfi.is_undefined_at(offset))
    return found


def _table(elf: Elf) -> tuple[NDArray[np.int64], NDArray[np.int64]] | None:
    """The sorted addresses of functions, and where the unwind data of each is: int64[n] each."""
    segments = elf.segments[elf.segments["type"] == _PT_GNU_EH_FRAME]
    if not len(segments):
        return None
    address = int(segments["address"][0])
    head = elf.at(address, _HEADER.size)
    if len(head) < _HEADER.size:
        return None
    *encodings, _, count = _HEADER.unpack(head)
    if tuple(encodings) != _USUAL_ENCODINGS or not 0 < count <= MOST_ENTRIES:
        return None
    data = elf.at(address + _HEADER.size, 8 * count)
    pairs = np.frombuffer(data[: len(data) // 8 * 8], "<i4").astype(np.int64).reshape(-1, 2) + address
    order = np.argsort(pairs[:, 0], kind="stable")  # it is sorted, unless somebody lies
    return pairs[order, 0], pairs[order, 1]


class _Cfi:
    """The unwind data of one function."""

    def __init__(self, size: int, instructions: bytes, code_unit: int) -> None:
        self.size, self._instructions, self._code_unit = size, instructions, code_unit

    @classmethod
    def read(cls, elf: Elf, entry: int, start: int) -> _Cfi | None:
        """The unwind data at an address; None if it cannot be read, or belongs to another function."""
        try:
            return cls._read(elf, entry, start)
        except (LookupError, struct.error, ValueError):
            return None

    @classmethod
    def _read(cls, elf: Elf, entry: int, start: int) -> _Cfi | None:
        fde = elf.at(entry, _MOST_CFI_BYTES)
        length, back = struct.unpack_from("<II", fde)
        if not 0 < length < 0xFFFFFFF0 or not back:
            return None
        fde = fde[: 4 + length]
        cie = elf.at(entry + 4 - back, _MOST_CFI_BYTES)
        cie = cie[: 4 + struct.unpack_from("<I", cie)[0]]
        text_end = cie.index(b"\0", 9)
        augmentation = cie[9:text_end]
        code_unit, at = _uleb(cie, text_end + 1)
        _, at = _uleb(cie, at)  # what offsets are multiplied with
        at += 1  # the register of the return address
        encoding = 0
        if augmentation[:1] == b"z":
            size, at = _uleb(cie, at)
            behind, data = at + size, at
            for letter in augmentation[1:].decode("ascii", "replace"):
                if letter == "R":
                    encoding = cie[data]
                    data += 1
                elif letter == "L":
                    data += 1
                elif letter == "P":
                    data += 1 + _POINTER_BYTES[cie[data] & 0x1F]
            at = behind
        pointer = _POINTER_BYTES.get(encoding & 0x1F)
        if pointer is None:
            return None
        kind = "<i" if pointer == 4 else "<q"
        begin = struct.unpack_from(kind, fde, 8)[0] + (entry + 8 if encoding & 0x70 == 0x10 else 0)
        size = struct.unpack_from(kind.upper(), fde, 8 + pointer)[0]
        behind = 8 + 2 * pointer
        if augmentation[:1] == b"z":
            more, behind = _uleb(fde, behind)
            behind += more
        return cls(size, cie[at:] + fde[behind:], code_unit) if begin == start else None

    def is_undefined_at(self, offset: int) -> bool:
        """Whether the rule for the return address is that there is none, so many bytes from the function's start."""
        if _UNDEFINED not in self._instructions:
            return False
        try:
            return self._interpreted(offset)
        except (IndexError, struct.error, ValueError):
            return False

    def _interpreted(self, offset: int) -> bool:
        code, at, location, undefined, last = self._instructions, 0, 0, False, False
        while at < len(code):
            instruction, at = code[at], at + 1
            high, low = instruction & 0xC0, instruction & 0x3F
            if high == 0x40:  # advance
                location += low * self._code_unit
            elif high == 0x80:  # offset
                register, (_, at) = low, _uleb(code, at)
                undefined &= register != _RETURN_ADDRESS
            elif high == 0xC0:  # restore
                undefined &= low != _RETURN_ADDRESS
            elif low in (0x02, 0x03, 0x04):  # advance by one, two or four bytes
                size = 1 << (low - 2)
                location += int.from_bytes(code[at : at + size], "little") * self._code_unit
                at += size
            elif low in (0x07, 0x08, 0x06):  # undefined, same value, restore
                register, at = _uleb(code, at)
                if register == _RETURN_ADDRESS:
                    undefined = low == 0x07
            elif low in (0x05, 0x09, 0x0C, 0x11, 0x12, 0x14, 0x15, 0x2F):  # two operands
                register, at = _uleb(code, at)
                _, at = _uleb(code, at)
                undefined &= register != _RETURN_ADDRESS or low in (0x0C, 0x12)
            elif low in (0x0D, 0x0E, 0x13, 0x2E):  # one operand
                _, at = _uleb(code, at)
            elif low == 0x0F:  # an expression
                size, at = _uleb(code, at)
                at += size
            elif low in (0x10, 0x16):  # an expression of a register
                _, at = _uleb(code, at)
                size, at = _uleb(code, at)
                at += size
            elif low not in (0x00, 0x0A, 0x0B, 0x2D):  # nothing; remember and restore all
                raise ValueError("an unknown instruction")
            if location > offset:
                break
            last = undefined
        return last


def _uleb(data: bytes, at: int) -> tuple[int, int]:
    """A number of variable length, and what is behind it; that of a signed one is not its value."""
    value = 0
    for shift in range(0, 70, 7):
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise ValueError("a number without an end")
