"""Sums of samples by interval, stream, site and address, with their energy.

They are shares while stalls are joined, then whole counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from iaprof.formats.distinct import order_by

_Floats = NDArray[np.float64]
_Ints = NDArray[np.int64]

_MIN_SHARE = 1e-6  # of a sample; smaller differences are rounding errors
_STEP_BITS = 20
_STEPS = 1 << _STEP_BITS  # into which a sample is divided: finer than any share
# 2^64 / x, / x^2 and / x^3 with x^4 = x + 1, made odd: their multiples fill 64 bits evenly in three dimensions, as
# those of the golden ratio do in one (M. Roberts, "The Unreasonable Effectiveness of Quasirandom Sequences", 2018).
R3_MULTIPLIERS = (0xD1B54A32D192ED03, 0xABC98388FB8FAC03, 0x8CB92BA72F3D8DD7)


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


@dataclass(frozen=True)
class Joined:
    """Counts of samples by (interval, stream, site, address): each combination once, sorted in that order."""

    interval: NDArray[np.int64]  # [n]
    stream: NDArray[np.int64]  # [n]
    site: NDArray[np.int64]  # [n], index into Placed.sites
    ip: NDArray[np.uint64]  # [n], bytes; only the address bits that the records hold
    counts: NDArray[np.uint64]  # [n, reasons]
    alone: NDArray[np.uint64]  # [n], samples for which this site was the only candidate
    joules: NDArray[np.float64]  # [n]; 0 without a meter

    def only(self, rows: NDArray[np.bool_]) -> Joined:
        """Returns the rows that the mask selects: bool[n]."""
        return Joined(*(getattr(self, each.name)[rows] for each in fields(self)))


@dataclass(frozen=True)
class JoinedShares:
    """Fractional counts of samples by (interval, stream, site, address); `Joined` has whole counts."""

    interval: NDArray[np.int64]  # [n]
    stream: NDArray[np.int64]  # [n]
    site: NDArray[np.int64]  # [n]
    ip: NDArray[np.uint64]  # [n], bytes
    shares: NDArray[np.float64]  # [reasons + 2, n]; then of all reasons, with this site the only candidate; and joules


def merge_shares(results: list[JoinedShares]) -> JoinedShares:
    """Merges one or more results: sorted, each (interval, stream, site, address) once."""
    names = ("interval", "stream", "site", "ip")
    columns: list[Any] = [np.concatenate([getattr(result, name) for result in results]) for name in names]
    order = order_by(*columns)
    columns = [column[order] for column in columns]
    new = np.ones(len(order), bool)
    if len(order):
        new[1:] = np.any([column[1:] != column[:-1] for column in columns], axis=0)
    first = np.flatnonzero(new)
    shares = np.empty((len(results[0].shares), len(first)))
    for index in range(len(shares) if len(order) else 0):  # row by row: all at once takes several times the memory
        shares[index] = np.add.reduceat(np.concatenate([result.shares[index] for result in results])[order], first)
    interval, stream, site, ip = (column[new] for column in columns)
    return JoinedShares(interval, stream, site, ip, shares)


def to_whole_counts(result: JoinedShares) -> Joined:
    """Rounds shares to whole counts: each within 1 of its share, and the sum at each address exact.

    Rounding down leaves fractions of samples. Each such sample goes to one of the sites that share it, which wins as
    often as its fraction says. If the largest fraction always won, the other sites would lose most of their samples
    where intervals are short and samples few.
    """
    order = order_by(result.interval, result.stream, result.ip, result.site)
    new = np.ones(len(order), bool)
    if len(order):
        new[1:] = np.any([c[order][1:] != c[order][:-1] for c in (result.interval, result.stream, result.ip)], axis=0)
    group = np.cumsum(new) - 1
    first = order[new]
    # The phases are even over the addresses of an interval and over the intervals of an address, and reproducible.
    turn = result.interval[first].astype(np.uint64) * np.uint64(R3_MULTIPLIERS[0])
    turn += (result.ip[first] >> np.uint64(3)) * np.uint64(R3_MULTIPLIERS[1])
    *by_reason, alone_shares, joules = result.shares
    whole = np.empty((len(order), len(by_reason)), np.uint64)
    for column, shares in enumerate(by_reason):
        counts = np.floor(shares + _MIN_SHARE)
        left = np.rint((shares - counts)[order] * _STEPS).astype(np.int64)
        sharing = np.flatnonzero(left > 0)
        phase = (turn + np.uint64(column * R3_MULTIPLIERS[2] % (1 << 64)) >> np.uint64(64 - _STEP_BITS)).astype(
            np.int64
        )
        counts[order[sharing[_winners(left[sharing], group[sharing], phase)]]] += 1
        whole[:, column] = counts
    alone = np.minimum(np.rint(alone_shares).astype(np.uint64), whole.sum(axis=1))
    some = whole.any(axis=1)
    # The energy of an address's reads goes to whoever has their samples.
    if joules.any():
        number = np.empty(len(order), np.int64)
        number[order] = group
        joules = divided_again(joules, number, whole.sum(axis=1, dtype=np.uint64), len(first))
    columns: list[Any] = [result.interval, result.stream, result.site, result.ip, whole, alone, joules]
    return Joined(*(column if some.all() else column[some] for column in columns))


def _winners(left: NDArray[np.int64], group: NDArray[np.int64], phase: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Selects the rows that get one of their group's remaining samples: bool[n].

    This is systematic sampling: a group's fractions lie side by side on a line that has a mark at every whole number
    plus the phase, and a row wins if a mark falls on its fraction. So a group has as many winners as its fractions add
    up to.

    Args:
        left: int64[n], fractions of a sample in units of 1 / _STEPS, above 0 and at most _STEPS.
        group: int64[n], ascending.
        phase: int64[groups], 0 to _STEPS - 1.
    """
    begins = np.flatnonzero(np.diff(group, prepend=-1))
    number = np.repeat(np.arange(len(begins)), np.diff(np.append(begins, len(group))))
    reach = np.cumsum(left)
    reach -= (reach - left)[begins][number]
    # A group's fractions add up to whole samples, but for the rounding of each to steps.
    total = np.maximum.reduceat(reach, begins)[number] if len(begins) else reach
    exact = (total + _STEPS // 2) // _STEPS * _STEPS
    reach = np.where(reach == total, exact, np.minimum(reach, exact))
    marks = (reach + phase[group]) // _STEPS
    before = np.append(0, marks[:-1])
    before[begins] = 0
    drawn: NDArray[np.bool_] = marks > before
    return drawn
