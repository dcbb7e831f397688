"""Divides the energy of reads among the samples in them, by whole columns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

_Floats = NDArray[np.float64]
_Ints = NDArray[np.int64]


class EnergyOfReads(Protocol):
    """What knows the energy of reads, see energy.py."""

    def of_reads(self, stream: int, times: NDArray[np.uint64]) -> _Floats:
        """Returns the joules of reads, by their stream and times: float64[n]."""


def joules_of_rows(joules: _Floats, read_of: _Ints, counts: Sequence[_Floats]) -> _Floats:
    """Divides the joules of reads among rows in proportion to their samples: float64[n].

    Args:
        joules: float64[reads].
        read_of: int64[n].
        counts: float64[n] for each reason.
    """
    samples = np.sum(counts, axis=0)
    of_read = np.bincount(read_of, samples, len(joules))
    per_sample = np.divide(joules, of_read, out=np.zeros(len(joules)), where=of_read > 0)
    return np.asarray(samples * per_sample[read_of], np.float64)


def divided_again(joules: _Floats, group: _Ints, samples: NDArray[np.uint64], groups: int) -> _Floats:
    """Adds up the joules of each group, and divides them among its rows in proportion to their samples: float64[n]."""
    weights = samples.astype(np.float64)
    in_group, all_weights = (np.bincount(group, each, groups)[group] for each in (joules, weights))
    return np.divide(in_group * weights, all_weights, out=np.zeros(len(group)), where=all_weights > 0)
