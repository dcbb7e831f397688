"""Finds direct calls in a driver's machine code."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

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
