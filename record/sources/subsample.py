"""Keeps one of N records, chosen so that these represent all, for GPUs that sample more than one wants to store."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


class Subsample:
    """Chooses one of each N successive records at random: a periodic pattern in the stream distorts nothing."""

    def __init__(self, n: int, random: np.random.Generator | None = None) -> None:
        """Begins with the stream's first record.

        Args:
            n: one of so many records is kept; 1 keeps all.
            random: the source of randomness.
        """
        self._n = n
        self._random = random or np.random.default_rng()
        self._position = 0  # of the next record within its N
        self._chosen = self._choose(1)  # the position that is kept in that N

    def _choose(self, blocks: int) -> NDArray[np.int64]:
        return self._random.integers(0, self._n, blocks)

    def keep(self, count: int) -> NDArray[np.int64]:
        """Returns which of the next `count` records to keep: ascending indices, int64[about count / n]."""
        end = self._position + count
        blocks = -(-end // self._n)
        chosen = np.concatenate([self._chosen, self._choose(blocks - 1)]) if blocks > 1 else self._chosen
        places = np.arange(max(blocks, 1)) * self._n + chosen - self._position
        self._position = end % self._n
        self._chosen = chosen[-1:] if self._position or not count else self._choose(1)
        return places[(places >= 0) & (places < count)]
