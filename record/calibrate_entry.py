"""Where in a function to put a uprobe, so that it costs least, and where its caller is found there.

Some instructions the kernel emulates (arch/x86/kernel/uprobes.c, Linux 6.1): pushes, nops, relative jumps and calls. A
uprobe there costs 1.5 us. Others, such as the endbr64 that begins a function, it executes apart, which costs 10 us.

So what a function begins with is followed up to the first that is emulated, as long as it only makes room on the stack
and moves registers and what is there. Encodings are those of Intel's Software Developer's Manual, volume 2.
"""

from __future__ import annotations

import re
from collections.abc import Set
from dataclasses import dataclass

from iaprof.bpf.driver_layout import MAX_OFFSET

# push, with the prefix for r8 to r15; nop; jump if, near and far; jump and call.
_EMULATED = re.compile(rb"\x41?[\x50-\x57]|\x90|[\x70-\x7f]|\x0f[\x80-\x8f]|[\xe8\xe9\xeb]", re.DOTALL)
_ENDBR64 = re.compile(rb"\xf3\x0f\x1e\xfa")
_SUB_RSP = re.compile(rb"\x48(?:\x83\xec([\x00-\x7f])|\x81\xec(..\x00\x00))", re.DOTALL)
_CANARY = re.compile(rb"\x64([\x48\x4c])\x8b([\x04-\x3c])\x25\x28\x00\x00\x00")  # mov %fs:0x28, to a register
# test, xor and mov (from the register that ModRM names first, or to it) of two registers.
_REGISTERS = re.compile(rb"([\x40-\x4f]?)([\x85\x31\x89\x8b])([\xc0-\xff])")
# mov and lea of a register and disp(%rsp), with a displacement of no, one and four bytes.
_STACK = re.compile(
    rb"([\x40\x44\x48\x4c]?)([\x89\x8b\x8d])(?:([\x04-\x3c])\x24()|([\x44-\x7c])\x24(.)|([\x84-\xbc])\x24(.{4}))",
    re.DOTALL,
)
_TEST, _STORE, _LOAD = 0x85, 0x89, 0x8B
_RSP, _RBP = 4, 5
_ARGUMENTS = (7, 6, 2, 1, 8, 9)  # registers in the order of the System V ABI
LENGTH = 192  # bytes of a function that are looked at


@dataclass(frozen=True)
class Place:
    """An instruction to probe."""

    offset: int = 0  # bytes from the function's beginning
    stack: int = 0  # bytes from the stack pointer to the return address
    frame: int | None = None  # bytes from the stack pointer to the caller's frame pointer; None: that is in rbp


class _UnknownError(Exception):
    """What comes may change what a probe needs."""


def probe_place(code: bytes, arguments: Set[int]) -> Place:
    """Where to probe a function that begins with `code`: these of its arguments are in their registers there.

    Its beginning, where any other instruction than those that are known comes first.
    """
    prologue = _Prologue({_ARGUMENTS[argument] for argument in arguments} | {_RSP})
    at = 0
    try:
        while not _EMULATED.match(code, at):
            at = prologue.after(code, at)
    except _UnknownError:
        return Place()
    frame = prologue.stack - prologue.saved if prologue.is_overwritten else None
    return Place(at, prologue.stack, frame)


class _Prologue:
    """What a function's instructions so far have done."""

    def __init__(self, kept: Set[int]) -> None:
        self._kept = kept  # registers that must not be written to
        self.stack = 0  # bytes that the stack has grown
        self.saved = 0  # bytes from the caller's frame pointer on the stack to the return address; 0: it is not there
        self.is_overwritten = False  # rbp

    def after(self, code: bytes, at: int) -> int:
        """Where the next instruction is."""
        if found := _ENDBR64.match(code, at):
            pass
        elif found := _SUB_RSP.match(code, at):
            self.stack += int.from_bytes(found[1] or found[2], "little")
            if self.stack > MAX_OFFSET:
                raise _UnknownError
        elif found := _CANARY.match(code, at):
            self._write(_register(found[1], found[2][0] >> 3))
        elif found := _REGISTERS.match(code, at):
            opcode, registers = found[2][0], found[3][0]
            if opcode == _LOAD:
                self._write(_register(found[1], registers >> 3))
            elif opcode != _TEST:
                self._write(_register(found[1], registers, extended_by=1))
        elif found := _STACK.match(code, at):
            registers, displacement = (each for each in found.groups()[2:] if each is not None)
            if registers[0] & 7 != _RSP:
                raise _UnknownError
            register = _register(found[1], registers[0] >> 3)
            if found[2][0] == _STORE:
                is_wide = found[1] and found[1][0] & 8
                self._store(register, int.from_bytes(displacement, "little", signed=True), 8 if is_wide else 4)
            else:
                self._write(register)
        else:
            raise _UnknownError
        return found.end()

    def _write(self, register: int) -> None:
        if register in self._kept or (register == _RBP and not self.saved):
            raise _UnknownError
        self.is_overwritten |= register == _RBP

    def _store(self, register: int, displacement: int, size: int) -> None:
        below = self.stack - displacement  # bytes from there to the return address
        if displacement < 0 or below < size or -size < self.saved - below < 8:
            raise _UnknownError  # what the caller has, and its frame pointer, stay
        if register == _RBP and size == 8 and not self.is_overwritten:
            self.saved = below


def _register(rex: bytes, number: int, extended_by: int = 4) -> int:
    """A register's number, of which the prefix may have the fourth bit."""
    return number & 7 | (8 if rex and rex[0] & extended_by else 0)
