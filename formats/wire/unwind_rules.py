"""How stacks are walked: the rules of bpf/c/unwind.c, and how a walk ends."""

from __future__ import annotations

import struct
from enum import IntEnum, IntFlag
from typing import NamedTuple

_RULE = struct.Struct("<ihBB")  # struct rule in unwind.c


class RuleKind(IntEnum):
    """How to find a frame's caller: its stack pointer is the CFA, and the return address is 8 bytes below it."""

    NONE = 0
    BY_RSP = 1  # CFA = rsp + cfa
    BY_RBP = 2  # CFA = rbp + cfa
    BY_DEREF = 3  # CFA = the value at rbp + cfa: a realigned stack with a saved rbp
    BY_RBX = 4  # CFA = rbx + cfa; only for the innermost frame, where rbx is known
    SIGNAL = 5  # rsp points to a signal's ucontext
    END = 6  # the outermost frame
    HARD = 7  # any other rule: user space finishes the stack


class Walked(IntEnum):
    """How a walk ended."""

    WHOLE = 0  # at the start of the program or thread
    DEEP = 1  # at the maximum depth
    MISSED = 2  # at an address without a rule in BPF: user space finishes the stack
    NOWHERE = 3  # at an address outside of code
    MEMORY = 4  # at stack memory that was not copied
    DAMAGED = 5  # at damaged call frame information
    STUCK = 6  # in code without call frame information, with no plausible caller


class Mark(IntFlag):
    """Properties of an address in a stack."""

    GUESSED = 1  # found without call frame information
    INTERRUPTED = 2  # interrupted by a signal: the address of an instruction, not a return address


class RuleFlags(IntFlag):
    """Properties of the caller that a rule finds."""

    GUESS = 1  # no call frame information: BPF accepts the caller only if there is a rule for its address
    OTHER_STACK = 2  # the caller's frame is on another stack and may have a lower address, which BPF accepts


class RuleScope(IntEnum):
    """The addresses that a rule applies to."""

    RETURN = 0  # a return address
    INSTRUCTION = 1
    BLOCK = 2  # all instructions in an aligned block of BLOCK_BYTES without a rule of their own


BLOCK_BYTES = 64
ADDRESS_BITS = 47


class Rule(NamedTuple):
    """An unwind rule in a process."""

    kind: RuleKind
    cfa: int = 0  # int32
    rbp: int = 0  # int16: offset of the saved rbp from the CFA, 0 if rbp is unchanged; for BY_DEREF, from rbp
    flags: RuleFlags = RuleFlags(0)

    def pack(self) -> int:
        """The rule as a 64-bit number."""
        return int.from_bytes(_RULE.pack(self.cfa, self.rbp, self.kind, self.flags), "little")

    @classmethod
    def unpack(cls, packed: int) -> Rule:
        """Inverse of `pack`; ValueError if the number is not a rule."""
        cfa, rbp, kind, flags = _RULE.unpack(packed.to_bytes(8, "little"))
        return cls(RuleKind(kind), cfa, rbp, RuleFlags(flags))


HARD = Rule(RuleKind.HARD)
END = Rule(RuleKind.END)
SIGNAL = Rule(RuleKind.SIGNAL)
BY_FRAME_POINTER = Rule(RuleKind.BY_RBP, 16, -16, RuleFlags.GUESS)
