"""Tells whether an address can be a return address, from the code around it. x86-64 only."""

from __future__ import annotations

import re

BYTES_BEFORE, BYTES_FROM = 8, 8  # the bytes before an address and from it on that have to be known
# Intel's Software Developer's Manual, volume 2: E8 is a relative call. FF with reg 2 in its ModRM byte is an indirect
# call; the ModRM and SIB bytes say how many bytes of displacement follow.
_BASE_5 = bytes(range(0x05, 0x100, 8))  # SIB bytes after which a displacement follows
_CALL = re.compile(
    rb"(?:\xe8.{4}"
    rb"|\xff(?:[\x10-\x13\x16\x17\xd0-\xd7]"
    rb"|\x14[^" + re.escape(_BASE_5) + rb"]"
    rb"|[\x50-\x53\x55-\x57]."
    rb"|\x54.{2}"
    rb"|[\x15\x90-\x93\x95-\x97].{4}"
    rb"|\x14[" + re.escape(_BASE_5) + rb"].{4}"
    rb"|\x94.{5}))\Z",
    re.DOTALL,
)
_LONGEST_CALL = 7
_SIGNAL_RETURN = bytes.fromhex("48c7c00f0000000f")  # mov $15,%rax; the syscall's first byte
_RELATIVE_CALL, _NOP = b"\xe8", b"\x90"


def ends_a_call(before: bytes) -> bool:
    """Tells whether the bytes before an address end with a call instruction, relative or indirect, of any length."""
    return any(_CALL.match(before, at) for at in range(max(len(before) - _LONGEST_CALL, 0), len(before) - 1))


def begins_goroutine(before: bytes, after: bytes) -> bool:
    """Tells whether a goroutine begins there: Go pushes the address after runtime.goexit's first nop on its stack."""
    return before.endswith(_NOP) and after.startswith(_RELATIVE_CALL)


def can_be_returned_to(before: bytes, after: bytes) -> bool:
    """Tells whether a call ends at an address, or code returns there without a call.

    Args:
        before: the BYTES_BEFORE bytes before the address.
        after: the BYTES_FROM bytes from it on.
    """
    return ends_a_call(before) or begins_goroutine(before, after) or after.startswith(_SIGNAL_RETURN)
