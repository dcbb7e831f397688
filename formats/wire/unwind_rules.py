"""How stacks are walked: the rules of bpf/c/unwind.c, and how a walk ends."""

from __future__ import annotations

import struct
from enum import IntEnum, IntFlag
from typing import NamedTuple

_RULE = struct.Struct("<ihBB")  # struct rule of unwind.c


class RuleKind(IntEnum):
    """How to get from a frame to its caller, whose stack pointer is the CFA; the return address is 8 bytes below it."""

    NONE = 0
    BY_RSP = 1  # CFA = rsp + cfa
    BY_RBP = 2  # CFA = rbp + cfa
    BY_DEREF = 3  # CFA = what lies at rbp + cfa: a stack that was aligned anew, and rbp saved
    BY_RBX = 4  # CFA = rbx + cfa; only where a walk begins, as rbx is known only there
    SIGNAL = 5  # rsp points to the ucontext of a signal
    END = 6  # nothing called it
    HARD = 7  # none of the above: user space finishes such stacks


class Walked(IntEnum):
    """How a walk ended."""

    WHOLE = 0  # where the program or thread began
    DEEP = 1  # at the limit
    MISSED = 2  # at an address for which BPF had no rule: user space finishes it
    NOWHERE = 3  # at an address in no code
    MEMORY = 4  # at a part of the stack that was not copied
    DAMAGED = 5  # at call frame information that is damaged
    STUCK = 6  # in code without call frame information, from where nothing likely leads on


class Mark(IntFlag):
    """What is to be known of one address of a stack."""

    GUESSED = 1  # it was found without call frame information
    INTERRUPTED = 2  # it is an instruction's, no return address: a signal came there


class RuleFlags(IntFlag):
    """What is to be known of the caller that a rule leads to."""

    GUESS = 1  # there is no call frame information; BPF believes it where it leads to an address that has a rule
    OTHER_STACK = 2  # the caller's frame lies on another stack, so it may lie further down, and BPF believes it


class RuleScope(IntEnum):
    """What a rule is for, at an address."""

    RETURN = 0  # a return address
    INSTRUCTION = 1
    BLOCK = 2  # all instructions of so many bytes, aligned, that have none of their own


BLOCK_BYTES = 64


class Rule(NamedTuple):
    """One rule, of one process image."""

    kind: RuleKind
    cfa: int = 0  # int32
    rbp: int = 0  # int16: from the CFA to the caller's rbp, 0 if it is in rbp still; for BY_DEREF from rbp
    flags: RuleFlags = RuleFlags(0)

    def pack(self) -> int:
        """As a 64-bit number."""
        return int.from_bytes(_RULE.pack(self.cfa, self.rbp, self.kind, self.flags), "little")

    @classmethod
    def unpack(cls, packed: int) -> Rule:
        """What `pack` made. ValueError if that is no rule."""
        cfa, rbp, kind, flags = _RULE.unpack(packed.to_bytes(8, "little"))
        return cls(RuleKind(kind), cfa, rbp, RuleFlags(flags))


HARD = Rule(RuleKind.HARD)
END = Rule(RuleKind.END)
SIGNAL = Rule(RuleKind.SIGNAL)
BY_FRAME_POINTER = Rule(RuleKind.BY_RBP, 16, -16, RuleFlags.GUESS)
TO_OTHER_STACK = BY_FRAME_POINTER._replace(flags=RuleFlags.GUESS | RuleFlags.OTHER_STACK)
