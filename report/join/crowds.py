"""Divides samples among so many candidates that not every sample can have a share of each: it draws a few of them.

Each row's candidates lie side by side on a line, as long as their shares, and marks at even distances select some of
them. A candidate is drawn as often as its share says, so sums over many rows are right, and each row's sum is exact.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from iaprof.report.join.shares import R3_MULTIPLIERS

MOST_CANDIDATES = 64
"""The most among which all samples are divided."""
_MOST_DRAWN = 16
_Ints = NDArray[np.int64]
_Floats = NDArray[np.float64]


def drawn(
    share: _Floats, first: _Ints, stop: _Ints, samples: _Floats, ips: NDArray[np.uint64], times: NDArray[np.uint64]
) -> tuple[_Ints, _Ints, _Floats]:
    """Draws candidates for rows: as many as a row has samples, and at least 1, but not more than _MOST_DRAWN.

    Args:
        share: float64[n], of all pairs' candidates, those of a pair together; the shares of a pair add up to 1.
        first: int64[rows], the first candidate of the row's pair.
        stop: int64[rows], the one behind the last.
        samples: float64[rows].
        ips: uint64[rows], bytes; with `times`, which candidates are drawn depends on these.
        times: uint64[rows], ns, of the read.

    Returns:
        The drawn candidates: their rows, ascending, their indices, and the part of the row's samples that each gets.
    """
    number = np.clip(samples, 1, _MOST_DRAWN).astype(np.int64)
    row = np.repeat(np.arange(len(number)), number)
    turn = times * np.uint64(R3_MULTIPLIERS[0]) + (ips >> np.uint64(3)) * np.uint64(R3_MULTIPLIERS[1])
    phase = (turn >> np.uint64(11)) * 2.0**-53
    mark = np.arange(len(row)) - (np.cumsum(number) - number)[row]
    reach = np.cumsum(share)
    position = (reach - share)[first][row] + (mark + phase[row]) / number[row]
    candidate = np.searchsorted(reach, position, side="right")
    return row, np.clip(candidate, first[row], stop[row] - 1), 1 / number[row]
