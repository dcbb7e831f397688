"""Keeping one record of N, so that the kept ones stand for all: for GPUs that sample more than one wants to store."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


class Subsample:
    """Chooses one of each N records that follow one another, at random: a rhythm in the stream finds no echo."""

    def __init__(self, n: int, random: np.random.Generator | None = None) -> None:
        """Begins.

        Args:
            n: of how many one is kept; 1 keeps all.
            random: where chance comes from.
        """
        self._n = n
        self._random = random or np.random.default_rng()
        self._position = 0  # of the next record in its N
        self._chosen = self._choose(1)  # in that N

    def _choose(self, blocks: int) -> NDArray[np.int64]:
        return self._random.integers(0, self._n, blocks)

    def keep(self, count: int) -> NDArray[np.int64]:
        """Which of the next `count` records stay: ascending indices, int64[about count / n]."""
        end = self._position + count
        blocks = -(-end // self._n)
        chosen = np.concatenate([self._chosen, self._choose(blocks - 1)]) if blocks > 1 else self._chosen
        places = np.arange(max(blocks, 1)) * self._n + chosen - self._position
        self._position = end % self._n
        self._chosen = chosen[-1:] if self._position or not count else self._choose(1)
        return places[(places >= 0) & (places < count)]
