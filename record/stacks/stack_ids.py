"""Ids of stacks by their content: equal stacks of the same process have the same id."""

from __future__ import annotations

import os

import numpy as np
from numpy.typing import NDArray

from iaprof.formats.ranges import ranges

_ODD = np.uint64(0x9E3779B97F4A7C15)
_OTHER_ODD = np.uint64(0xC4CEB9FE1A85EC53)


class StackIds:
    """Hashes stacks with a random secret."""

    def __init__(self) -> None:
        # Processes control the addresses of their stacks: without a secret, they could choose the id of another stack.
        self._secret = np.frombuffer(os.urandom(8), np.uint64)[0]

    def hashes(
        self, depths: NDArray[np.int64], ips: NDArray[np.uint64], owners: NDArray[np.uint64]
    ) -> NDArray[np.uint64]:
        """Hashes each stack's addresses, in their order, and its owner: uint64[n], 0 for a stack without addresses.

        Args:
            depths: int64[n], the number of addresses of each stack.
            ips: uint64[sum of depths], one stack after the other.
            owners: uint64[n], distinguishes stacks with the same addresses.
        """
        starts = np.cumsum(depths) - depths
        mixed = _mixed(ips ^ _mixed(ranges(0, depths).astype(np.uint64) + self._secret))
        sums = np.zeros(len(depths), np.uint64)
        has = depths > 0
        if has.any():
            sums[has] = np.add.reduceat(mixed, starts[has])
        ids = _mixed(sums ^ _mixed(owners ^ self._secret))
        ids[~has] = 0
        return ids


def _mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    values = (values ^ values >> np.uint64(32)) * _ODD
    values = (values ^ values >> np.uint64(29)) * _OTHER_ODD
    return values ^ values >> np.uint64(32)
