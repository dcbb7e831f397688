"""When samples of each launching site were seen on the GPU: runs of successive reads with some."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from iaprof.formats.energy import whole_parts
from iaprof.formats.export import Executions, Track
from iaprof.formats.profile import Profile, kernel_name
from iaprof.report.runs import MAX_NS, MAX_RUNS, OTHERS, Runs

_MAX_RUNS_AT_ONCE = 1 << 20  # kept while stalls are joined, before sites are left out; some 50 MB
_MAX_PAIRS = 20_000  # of a stream and a site that have runs of their own; those with the most samples
_LONGEST_READ_NS = 20_000_000
"""While there are samples, reads follow each other within some 10 ms; that after a pause begins before it."""
_UNIT = 1 << 10  # of samples: sites have fractions of them


class Seen:
    """Collects when samples of sites were seen."""

    def __init__(self, reasons: NDArray[np.bool_], streams: int) -> None:
        """Starts with nothing.

        Args:
            reasons: bool[reasons], those of which samples count.
            streams: the number of streams.
        """
        self._reasons = reasons
        self._streams = max(streams, 1)
        self._runs = Runs(_MAX_RUNS_AT_ONCE)

    def samples(self, counts: Sequence[NDArray[np.float64]]) -> NDArray[np.float64]:
        """Adds up the counts of reasons whose samples count: float64[n]."""
        wanted = (count for count, is_wanted in zip(counts, self._reasons.tolist(), strict=True) if is_wanted)
        return sum(wanted, np.zeros_like(counts[0]))

    def add(
        self,
        stream: int,
        sites: NDArray[np.int64],
        begins: NDArray[np.uint64],
        ends: NDArray[np.uint64],
        samples: NDArray[np.float64],
    ) -> None:
        """Adds reads of a stream with samples of sites: [n] each; times in ns."""
        some = samples > 0
        begin, end = (np.minimum(times[some], np.uint64(MAX_NS)).astype(np.int64) for times in (begins, ends))
        count = np.rint(samples[some] * _UNIT).astype(np.int64)
        begin = np.clip(begin, end - _LONGEST_READ_NS, end)
        self._runs.add(sites[some] * self._streams + stream, begin, end, count)

    def renumber(self, numbers: NDArray[np.int64]) -> None:
        """Gives sites other numbers: int64[sites]."""
        pair, *columns = self._runs.all()
        site, stream = np.divmod(pair, self._streams)
        self._runs = Runs(_MAX_RUNS_AT_ONCE)
        self._runs.add(numbers[site] * self._streams + stream, *columns)

    def executions(
        self,
        site: NDArray[np.int64],
        stream: NDArray[np.int64],
        samples: NDArray[np.int64],
        profile: Profile,
        queue: NDArray[np.uint64],
        start_ns: int,
    ) -> Executions:
        """Returns the runs of sites that a profile has, with as many samples as it has.

        Args:
            site: int64[rows], of the profile's rows.
            stream: int64[rows].
            samples: int64[rows].
            profile: rows have their numbers of launches, kernels and devices.
            queue: uint64[sites with launches], handle of the site's queue; 0: unknown.
            start_ns: time 0.
        """
        pairs, first, pair_of = np.unique(site * self._streams + stream, return_index=True, return_inverse=True)
        pair, *columns = self._runs.all()
        known = np.isin(pair, pairs)
        if not known.any():
            none = np.empty(0, np.int64)
            return Executions([], none, none / 1e9, none / 1e9, none)
        # Sites with few samples share a row of each device.
        totals = np.bincount(pair_of, samples, len(pairs))
        row_of = np.arange(len(pairs))
        few = np.argsort(-totals, kind="stable")[_MAX_PAIRS:]
        row_of[few] = len(pairs) + profile.device[first[few]]
        runs = Runs(MAX_RUNS)
        runs.add(row_of[np.searchsorted(pairs, pair[known])], *(column[known] for column in columns))
        row, begin, end, weight = runs.all()
        rows, track = np.unique(row, return_inverse=True)
        # As many samples as the profile has of each row, divided among its runs.
        totals = np.bincount(row_of, totals, len(pairs) + len(profile.devices))[rows]
        count = whole_parts(weight / np.bincount(track, weight, len(rows))[track] * totals[track], int(totals.sum()))
        tracks = [
            _track(profile, int(first[each]), int(queue[at]) if (at := int(site[first[each]])) < len(queue) else 0)
            if each < len(pairs)
            else Track(profile.devices[each - len(pairs)], OTHERS)
            for each in rows.tolist()
        ]
        return Executions(tracks, track, (begin - start_ns) / 1e9, (end - start_ns) / 1e9, count)


def _track(profile: Profile, row: int, queue: int) -> Track:
    kernel, code = profile.kernels[profile.kernel[row]], profile.codes[profile.code[row]]
    device, launch = profile.devices[profile.device[row]], profile.launches[profile.launch[row]]
    return Track(device, kernel_name(kernel, code), launch, queue)
