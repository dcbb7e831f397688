"""Finds the launches of kernels that can be running while reads are sampled, or that came last; launches.c does it.

To count them, launches are sorted by (placement, time bucket, site, time), so the launches of a placement in a time
range are a few slices of one site each, and bisection finds their lengths. A bucket is as long as the attribution
window.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from iaprof.formats.distinct import order_by
from iaprof.report.join.library import ADDRESS, NUMBER, check, data, library
from iaprof.report.join.placements import Placed

_Ints = NDArray[np.int64]
_Times = NDArray[np.uint64]


class _Launches(ctypes.Structure):
    """struct launches."""

    _fields_ = (
        *((name, NUMBER) for name in ("window", "placements", "slices", "launches")),
        *((name, ADDRESS) for name in ("first_slice", "bucket", "same_site", "site", "first", "time", "before")),
        *((name, ADDRESS) for name in ("first_launch", "by_time")),
    )


class _LookedAt(ctypes.Structure):
    """struct looked_at."""

    _fields_ = (
        ("pair", ADDRESS), ("placement", ADDRESS), ("count", NUMBER), ("begins", ADDRESS), ("ends", ADDRESS),
        ("pairs", NUMBER),
    )  # fmt: skip


@dataclass(frozen=True)
class Running:
    """Where the launches are that can be running, of (pair, placement) rows."""

    looked_at: _LookedAt
    columns: tuple[NDArray[Any], ...]  # what `looked_at` points to
    since: _Times  # [n], ns: from when on launches count
    first: _Ints  # [n], the first slice that can have some
    stop: _Ints  # [n], the one behind the last
    single: NDArray[np.bool_]  # [n]: a single site has all launches of the window
    slices: int  # in all


class Launches:
    """The launches of one capture."""

    def __init__(self, placed: Placed, placement: _Ints, window_ns: int) -> None:
        """Sorts the launches.

        Args:
            placed: kernels and launches.
            placement: int64[launches], the placement of each.
            window_ns: the attribution window, above 0.
        """
        bucket = placed.time // np.uint64(window_ns)
        order = order_by(placement, bucket, placed.site)  # and by time, as they are already
        of_slices, bucket, site = placement[order], bucket[order], placed.site[order]
        new = np.ones(len(order), bool)
        new[1:] = (of_slices[1:] != of_slices[:-1]) | (bucket[1:] != bucket[:-1]) | (site[1:] != site[:-1])
        first = np.flatnonzero(new)
        of_slices, site = of_slices[first], site[first].astype(np.int32)
        differs = np.ones(len(first), bool)
        differs[1:] = (of_slices[1:] != of_slices[:-1]) | (site[1:] != site[:-1])
        numbers = np.arange(len(placed.placements) + 1)
        columns = {
            "first_slice": np.searchsorted(of_slices, numbers),
            "bucket": bucket[first],
            "same_site": np.maximum.accumulate(np.where(differs, np.arange(len(first)), 0)),
            "site": site,
            "first": np.append(first, len(order)),
            "time": placed.time[order],
            "before": np.concatenate([[0], np.cumsum(placed.count[order])]),
        }
        order = order_by(placement)
        columns |= {"first_launch": np.searchsorted(placement[order], numbers), "by_time": placed.time[order]}
        # The rank by time, among all launches, of each that is in `by_time`.
        self._rank = order.astype(np.uint32)
        self._columns = columns  # what the structure points to
        self._launches = _Launches(window_ns, len(placed.placements), len(first), len(order))
        for name, column in columns.items():
            setattr(self._launches, name, data(column))

    def running(self, pair: _Ints, placement: _Ints, begins: _Times, ends: _Times) -> Running:
        """Finds the launches that can be running during each pair's time.

        Kernels launched together wait in the queue together. So of the launches within the attribution window, only
        those count that are at most one and a half times as old as the kernel's latest, or were made while the read
        was sampled.

        Args:
            pair: int64[n].
            placement: int64[n], of which launches are looked for.
            begins: uint64[pairs], ns.
            ends: uint64[pairs], ns, not before its begin.
        """
        assert len(pair) == len(placement) and len(begins) == len(ends)
        columns = tuple(map(np.ascontiguousarray, (pair, placement, begins, ends)))
        looked_at = _LookedAt(
            data(columns[0]), data(columns[1]), len(pair), data(columns[2]), data(columns[3]), len(begins)
        )
        since, first, stop = (
            np.empty(len(pair), np.uint64),
            np.empty(len(pair), np.int64),
            np.empty(len(pair), np.int64),
        )
        single = np.empty(len(pair), bool)
        slices = library().launches_find(
            ctypes.byref(self._launches), ctypes.byref(looked_at), data(since), data(first), data(stop),
            single.ctypes.data,
        )  # fmt: skip
        check(slices)
        return Running(looked_at, columns, since, first, stop, single, slices)

    def count(self, running: Running) -> tuple[_Ints, _Ints, _Ints, NDArray[np.float64]]:
        """Counts the launches that were found, by site: pairs, placements, sites and numbers, [entries] each."""
        found = [np.empty(running.slices, np.int64) for _ in range(3)]
        weight = np.empty(running.slices, np.float64)
        entries = library().launches_count(
            ctypes.byref(self._launches), ctypes.byref(running.looked_at), data(running.since), data(running.first),
            data(running.stop), *map(data, found), data(weight),
        )  # fmt: skip
        check(entries)
        pair, placement, site = (each[:entries] for each in found)
        return pair, placement, site, weight[:entries]

    def last(self, placement: _Ints, times: _Times) -> _Ints:
        """Finds the last launch of each placement up to a time: its rank by time among all launches, -1 for none.

        Args:
            placement: int64[n].
            times: uint64[n], ns.
        """
        assert len(placement) == len(times)
        placement, times, last = np.ascontiguousarray(placement), np.ascontiguousarray(times), np.empty_like(placement)
        check(
            library().launches_last(
                ctypes.byref(self._launches), data(placement), data(times), len(placement), data(last)
            )
        )
        return np.where(last >= 0, self._rank[last].astype(np.int64), -1) if len(self._rank) else last

    def first(self, placement: int) -> int:
        """Returns the rank by time of the first launch of a placement, which has some."""
        return int(self._rank[self._columns["first_launch"][placement]])
