"""A driver's file and its machine code: direct calls, and where to probe a function so that it costs least."""

from __future__ import annotations

import re
from collections.abc import Set
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from iaprof.basics.elf import PF_EXECUTE
from iaprof.bpf.probes.library_file import EMULATED, LibraryFile
from iaprof.symbols.unwind.cfi import RSP, CallFrames, CfiError


class Problem(Exception):
    """Why there is no layout: a clause about the library."""


def address_of(elf: LibraryFile, place: int, executable: bool) -> int:
    """Returns the virtual address of a place in the file, in a segment of code or of data.

    Raises:
        Problem: the place is in no such segment.
    """
    for segment in elf.loads:
        if 0 <= place - segment.offset < segment.size and bool(segment.flags & PF_EXECUTE) is executable:
            return place - segment.offset + segment.address
    raise Problem(_NO_CODE if executable else "it answers with an address that is in no segment of data")


@dataclass(frozen=True)
class Code:
    """The driver's file."""

    elf: LibraryFile
    file: BinaryIO

    def beginning(self, place: int) -> bytes:
        """Reads the first LENGTH bytes of a function."""
        self.file.seek(place)
        return self.file.read(LENGTH)

    def probe(self, place: int, needed: set[int], keeps_stack: bool = False, keeps_memory: bool = True) -> int:
        """Returns where to probe a function, as a virtual address: see `probe_offset`.

        Raises:
            Problem: the place is not code of the driver.
        """
        start = address_of(self.elf, place, executable=True)
        return start + probe_offset(self.beginning(place), needed, keeps_stack, keeps_memory)

    def call(self, place: int) -> int:
        """Returns the virtual address of an instruction that calls directly, or a function at disp32(%rax).

        Raises:
            Problem: there is no such instruction: a probe there would change other code.
        """
        address = address_of(self.elf, place, executable=True)
        if not self.beginning(place).startswith((bytes([CALL]), _CALL_BY_RAX)):
            raise Problem("it answers with a call where there is none")
        return address

    def returns(self, place: int) -> list[int]:
        """Returns the virtual addresses of the `ret` instructions of a function; empty if none is known for sure.

        Where call frame information begins a row, an instruction begins, and one that begins with 0xC3 is a `ret`. A
        probe on another byte would change the instruction that it belongs to.
        """
        self.file.seek(0)
        data = self.file.read()
        try:
            frames = CallFrames(data)
            function = frames.function(address_of(self.elf, place, executable=True))
            if function is None or max(function.size, function.end - function.instructions) > _MOST_BYTES:
                return []
            found = [at for at in range(function.size) if data[place + at] == _RET]
            rows = [(function.start + at, frames.row_in(function, function.start + at)) for at in found[:_MOST_RETURNS]]
        except (CfiError, IndexError):
            return []
        return [address for address, row in rows if row and row.cfa == (RSP, 8) and not row.before]

    def segment(self, place: int) -> tuple[int, int, int]:
        """Returns the segment of code with a place in the file: place and address of its beginning, and its bytes.

        Raises:
            Problem: the place is in no segment of code.
        """
        for segment in self.elf.loads:
            if segment.flags & PF_EXECUTE and 0 <= place - segment.offset < segment.size:
                return segment.offset, segment.address, segment.size
        raise Problem(_NO_CODE)

    def called(self, places: Set[int]) -> frozenset[int]:
        """Returns those of the functions that are called within the segment of code of the first of them."""
        if not places:
            return frozenset()
        functions = np.array(sorted(places), np.int64)
        start, _, length = self.segment(int(functions[0]))
        self.file.seek(start)
        code = np.frombuffer(self.file.read(length), np.uint8)
        _, targets = calls_in(code, start)
        return frozenset(functions[np.isin(functions, targets)].tolist())

    def calls(self, function: int, other: int) -> bool:
        """Whether a function calls or jumps to another, in its first LENGTH bytes."""
        code = self.beginning(function)
        return any(
            function + at + CALL_BYTES + int.from_bytes(code[at + 1 : at + CALL_BYTES], "little", signed=True) == other
            for at in range(len(code) - CALL_BYTES + 1)
            if code[at] in (CALL, JUMP)
        )


_RET = 0xC3
_MOST_BYTES, _MOST_RETURNS = 1 << 14, 256  # of a function, and of its call frame information; that may be in it
CALL, JUMP = 0xE8, 0xE9  # opcodes, followed by a distance of four bytes
CALL_BYTES = 5


def calls_in(code: NDArray[np.uint8], start: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Returns the place of each byte 0xE8, and the target if it begins a call, which not each one does.

    Args:
        code: machine code, uint8[n].
        start: address of its first byte, or its place in the file; the results are the same kind of number.

    Returns:
        Places and targets: two int64 arrays of equal length.
    """
    at = np.flatnonzero(code[: 1 - CALL_BYTES] == CALL).astype(np.int64)
    distances = np.stack([code[at + byte] for byte in range(1, CALL_BYTES)], axis=1).view("<i4")[:, 0]
    sites = start + at
    return sites, sites + CALL_BYTES + distances


_ENDBR64 = re.compile(rb"\xf3\x0f\x1e\xfa")
_SUB_RSP = re.compile(rb"\x48(?:\x83\xec([\x00-\x7f])|\x81\xec(..\x00\x00))", re.DOTALL)
_CANARY = re.compile(rb"\x64([\x48\x4c])\x8b([\x04-\x3c])\x25\x28\x00\x00\x00")  # mov %fs:0x28, to a register
# test, xor and mov of two registers, where ModRM's first register is the source or the destination.
_REGISTERS = re.compile(rb"([\x40-\x4f]?)([\x85\x31\x89\x8b])([\xc0-\xff])")
# mov and lea of a register and disp(%rsp), with a displacement of none, one or four bytes.
_STACK = re.compile(
    rb"([\x40\x44\x48\x4c]?)([\x89\x8b\x8d])(?:([\x04-\x3c])\x24()|([\x44-\x7c])\x24(.)|([\x84-\xbc])\x24(.{4}))",
    re.DOTALL,
)
# Vector registers: pxor and xorps of two; movups and movaps to disp(%rsp). And mov of a number to disp(%rsp).
_VECTORS = re.compile(rb"(?:\x66[\x40-\x4f]?\x0f\xef|[\x40-\x4f]?\x0f\x57)[\xc0-\xff]")
_VECTOR_STORE = re.compile(
    rb"[\x40\x44]?\x0f[\x11\x29]"
    rb"(?:[\x04\x0c\x14\x1c\x24\x2c\x34\x3c]\x24|[\x44\x4c\x54\x5c\x64\x6c\x74\x7c]\x24."
    rb"|[\x84\x8c\x94\x9c\xa4\xac\xb4\xbc]\x24.{4})",
    re.DOTALL,
)
# movdqa and movdqu of disp(%rsp) to a vector register.
_VECTOR_LOAD = re.compile(
    rb"[\x66\xf3]\x0f\x6f(?:[\x04\x0c\x14\x1c\x24\x2c\x34\x3c]\x24|[\x44\x4c\x54\x5c\x64\x6c\x74\x7c]\x24.)", re.DOTALL
)
_NUMBER_STORE = re.compile(
    rb"[\x40\x48]?(?:\xc6(?:\x04\x24|\x44\x24.|\x84\x24.{4}).|\xc7(?:\x04\x24|\x44\x24.|\x84\x24.{4}).{4})", re.DOTALL
)
# add, cmp, mov and lea of two registers, or of a register and memory at a register, with or without displacement, or
# at rip.
_ANYWHERE = re.compile(
    rb"([\x40-\x4f]?)([\x01\x39\x3b\x89\x8b\x8d])"
    rb"(?:([\xc0-\xff])|((?![\x04\x05\x0c\x0d\x14\x15\x1c\x1d\x24\x25\x2c\x2d\x34\x35\x3c\x3d])[\x00-\x3f])"
    rb"|([\x05\x0d\x15\x1d\x25\x2d\x35\x3d]).{4}"
    rb"|((?![\x44\x4c\x54\x5c\x64\x6c\x74\x7c])[\x40-\x7f])."
    rb"|((?![\x84\x8c\x94\x9c\xa4\xac\xb4\xbc])[\x80-\xbf]).{4})",
    re.DOTALL,
)
_TEST_AL = re.compile(rb"\xa8.", re.DOTALL)  # test $number,%al
_CHANGE_NO_REGISTER = (_ENDBR64, _SUB_RSP, _VECTORS, _VECTOR_STORE, _NUMBER_STORE, _TEST_AL)  # that holds an argument
_ADD, _TEST, _STORE, _LOAD, _LEA = 0x01, 0x85, 0x89, 0x8B, 0x8D
_OF_REGISTERS = 0xC0  # ModRM of two registers is this or higher
_RSP = 4
_ARGUMENTS = (7, 6, 2, 1, 8, 9)  # registers in the order of the System V ABI
LENGTH = 192  # bytes of a function that are searched


class _UnknownError(Exception):
    """The next instruction may change what a probe needs."""


def probe_offset(code: bytes, arguments: Set[int], keeps_stack: bool = False, keeps_memory: bool = True) -> int:
    """Returns where to probe a function so that it costs least, in bytes from its beginning.

    The arguments are in their registers there. The kernel emulates some instructions (bpf/probes/library_file.py):
    pushes, nops, relative jumps and calls. A uprobe on them costs 1.5 us. It single-steps others, such as the endbr64
    at a function's beginning, which costs up to 10 us. So the search goes from the function's beginning to its first
    emulated instruction, past instructions that only make room on the stack, move registers and stack contents, or
    write numbers to the stack. Encodings: Intel's Software Developer's Manual, volume 2. 0 if an unknown instruction
    comes before the first emulated one.

    Args:
        code: the function's first LENGTH bytes.
        arguments: numbers of the arguments that the probe needs.
        keeps_stack: the stack pointer must also be as it was at the call.
        keeps_memory: what the arguments point to must also be as it was at the call.
    """
    kept = {_ARGUMENTS[argument] for argument in arguments} | {_RSP}
    at = 0
    try:
        while not EMULATED.match(code, at):
            if keeps_stack and _SUB_RSP.match(code, at):
                return 0
            at = _after(code, at, kept, keeps_memory)
    except _UnknownError:
        return 0
    return at


def _after(code: bytes, at: int, kept: Set[int], keeps_memory: bool) -> int:
    """Returns where the instruction after the one at `at` is; raises if that one writes to a register that is kept."""
    written = None
    if match := next(filter(None, (pattern.match(code, at) for pattern in _CHANGE_NO_REGISTER)), None):
        pass
    elif match := _CANARY.match(code, at):
        written = _register(match[1], match[2][0] >> 3)
    elif match := _REGISTERS.match(code, at):
        opcode, registers = match[2][0], match[3][0]
        if opcode == _LOAD:
            written = _register(match[1], registers >> 3)
        elif opcode != _TEST:
            written = _register(match[1], registers, extended_by=1)
    elif match := _STACK.match(code, at):
        registers = next(group for group in match.groups()[2:] if group is not None)[0]
        if registers & 7 != _RSP:
            raise _UnknownError
        if match[2][0] != _STORE:
            written = _register(match[1], registers >> 3)
    elif not keeps_memory and (match := _VECTOR_LOAD.match(code, at)):
        pass
    elif not keeps_memory and (match := _ANYWHERE.match(code, at)):
        opcode, registers = match[2][0], next(group for group in match.groups()[2:] if group is not None)[0]
        if opcode in (_LOAD, _LEA):
            written = _register(match[1], registers >> 3)
        elif opcode in (_ADD, _STORE) and registers >= _OF_REGISTERS:
            written = _register(match[1], registers, extended_by=1)
    else:
        raise _UnknownError
    if written in kept:
        raise _UnknownError
    return match.end()


def _register(rex: bytes, number: int, extended_by: int = 4) -> int:
    """Returns a register's number, whose fourth bit may be in the prefix."""
    return number & 7 | (8 if rex and rex[0] & extended_by else 0)


_NO_CODE = "it answers with an address that is in no segment of code"
_CALL_BY_RAX = b"\xff\x90"
