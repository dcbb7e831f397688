"""Direct calls in a driver's machine code, as `iaprof calibrate` looks for them in its file."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

CALL, JUMP = 0xE8, 0xE9  # with a distance of four bytes
CALL_BYTES = 5


def calls_in(code: NDArray[np.uint8], start: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Where each byte 0xE8 of some code lies, and where that leads if it begins a call, which not every one does.

    Args:
        code: bytes.
        start: address of the first, or its place in the file; the result has the same.

    Returns:
        two arrays of equal length.
    """
    at = np.flatnonzero(code[: 1 - CALL_BYTES] == CALL).astype(np.int64)
    distances = np.stack([code[at + byte] for byte in range(1, CALL_BYTES)], axis=1).view("<i4")[:, 0]
    sites = start + at
    return sites, sites + CALL_BYTES + distances
