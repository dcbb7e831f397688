"""Whether an address can be a return address: whether a call instruction ends there. x86-64.

The bytes before an address are kept as one 64-bit word, called its code here: the low byte has Flags, the others are
the seven bytes before the address, the nearest one in the highest byte. The code is 0 if the bytes could not be read.
"""

from __future__ import annotations

from enum import IntFlag

import numpy as np
from numpy.typing import NDArray

BYTES_BEFORE, BYTES_FROM = 8, 8  # of an address, that its code is made of
_SIGNAL_RETURN = int.from_bytes(bytes.fromhex("48c7c00f0000000f"), "little")  # mov $15,%rax; the syscall's first byte
_RELATIVE_CALL, _NOP, _INDIRECT = 0xE8, 0x90, 0xFF


class Flags(IntFlag):
    """The low byte of a code."""

    READ = 1  # the bytes were read
    SIGNAL_RETURN = 2  # at the address is the code that a signal handler returns to, which nothing calls
    CALL_FOLLOWS = 4  # at the address is a relative call


def codes(before: NDArray[np.uint64], after: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The codes of addresses: uint64[n].

    Args:
        before: uint64[n], the 8 bytes before each address, little-endian.
        after: uint64[n], the 8 bytes from each address on; both are 0 where they could not be read.
    """
    flags = np.full(len(before), Flags.READ, np.uint64)
    flags[after == np.uint64(_SIGNAL_RETURN)] |= np.uint64(Flags.SIGNAL_RETURN)
    flags[after & np.uint64(0xFF) == _RELATIVE_CALL] |= np.uint64(Flags.CALL_FOLLOWS)
    return np.where(before | after > 0, before & ~np.uint64(0xFF) | flags, np.uint64(0))


def is_known(code: NDArray[np.uint64]) -> NDArray[np.bool_]:
    """Whether the bytes could be read: bool[n]."""
    known: NDArray[np.bool_] = code != 0
    return known


def begins_goroutine(code: NDArray[np.uint64]) -> NDArray[np.bool_]:
    """Whether a goroutine begins there: Go puts the address behind runtime.goexit's first nop on its stack: bool[n]."""
    begins: NDArray[np.bool_] = (_byte(code, 1) == _NOP) & (code & np.uint64(Flags.CALL_FOLLOWS) > 0)
    return begins


def can_be_returned_to(code: NDArray[np.uint64]) -> NDArray[np.bool_]:
    """Whether a call ends there, or code returns there without a call: bool[n]."""
    return ends_a_call(code) | begins_goroutine(code) | (code & np.uint64(Flags.SIGNAL_RETURN) > 0)


def ends_a_call(code: NDArray[np.uint64]) -> NDArray[np.bool_]:
    """Whether the bytes before it are a call instruction, relative or indirect, however long: bool[n]."""
    found: NDArray[np.bool_] = _byte(code, 5) == _RELATIVE_CALL
    for length in (2, 3, 4, 6, 7):
        is_call = (_byte(code, length) == _INDIRECT) & (_byte(code, length - 1) >> np.uint64(3) & np.uint64(7) == 2)
        found |= is_call & (_length(_byte(code, length - 1), _byte(code, max(length - 2, 1))) == length)
    return found & is_known(code)


def _length(operand: NDArray[np.uint64], index: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Bytes of an indirect call from its opcode on, by the byte that tells its operand, and the one behind it."""
    mode, base = operand >> np.uint64(6), operand & np.uint64(7)
    has_index = (mode != 3) & (base == 4)
    is_absolute = (mode == 0) & ((base == 5) | (has_index & (index & np.uint64(7) == 5)))
    displacement = np.where(mode == 1, 1, np.where((mode == 2) | is_absolute, 4, 0))
    length: NDArray[np.int64] = 2 + has_index.astype(np.int64) + displacement
    return length


def _byte(code: NDArray[np.uint64], before: int) -> NDArray[np.uint64]:
    """The byte `before` bytes before the address."""
    return code >> np.uint64(8 * (BYTES_BEFORE - before)) & np.uint64(0xFF)
