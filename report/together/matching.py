"""Finds the distance of two clocks from the same launches in both.

Runs of kernels' names that both have are laid over each other; each way to do that proposes a distance. Steps of a
training loop look alike, so there are many: the launches' times decide, as those of a wrong step fit less closely.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from iaprof.formats.header.traces import MOST_RATE, TOLD_DRIFT_NS
from iaprof.report.together.launches import SeenLaunches

NEAR_NS = 1_000_000  # launches farther apart than this are not the same one
_RUNS = (64, 16, 4, 2, 1)  # lengths of runs of names, the longest first
_FEWEST_ANCHORS = 8
_ANCHORS = 256
_MOST_PLACES = 4096  # of a run in the capture that are tried
_WINDOWS_NS = (10_000, 100_000, NEAR_NS)
_MOST_PROPOSALS = 8  # of each of these
_MOST_WINDOWS = 4096  # that are looked at
_SAMPLE = 1 << 15  # launches that a proposal is judged by
_ALMOST = 0.9  # of the launches that fit best: a proposal with fewer is worse whatever the distances
_FEWEST_OF_DRIFT = 4  # launches at each end
_FEWEST_OF_PIECE, _MOST_PIECES = 20, 1024  # launches that a drift is measured by first; spans of the trace
_AS_NEAR = 2.0  # times the smallest median: a place that is no farther may be the true one
_MIX = np.uint64(0x9E3779B97F4A7C15)  # 2^64 / golden ratio: spreads the bits of hashes
_Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Fit:
    """How well launches of a trace fit those of a capture with a distance of the clocks."""

    offset_ns: int  # to add to the trace's times
    launches: int  # of the trace, in the time of the capture's
    place: _Ints  # [m], launches of the trace that fit
    partner: _Ints  # [m], the capture's launch for each; none is in it twice
    distance: _Ints  # [m], ns, without a sign

    @property
    def median_ns(self) -> int:
        """The median of the distances."""
        return int(np.median(self.distance)) if len(self.distance) else 0

    @property
    def share(self) -> float:
        """How many of the launches fit."""
        return len(self.place) / self.launches if self.launches else 0.0


@dataclass(frozen=True)
class Drift:
    """A trace's clock that gets ahead of the capture's evenly."""

    rate: float  # ns in a ns
    steady_ns: int  # the time of the trace at which it is not ahead

    def corrected(self, times: _Ints) -> _Ints:
        """Returns times, int64[n], of a clock that does not."""
        return np.asarray(times - np.rint((times - self.steady_ns) * self.rate).astype(np.int64), np.int64)


class Recorded:
    """The launches of a capture, to be searched by name and time."""

    def __init__(self, launches: SeenLaunches) -> None:
        """Sorts them."""
        self.launches = launches
        self._order = np.lexsort((launches.time, launches.name))
        self._keys = self._key(launches.name, np.searchsorted(launches.time, launches.time))[self._order]

    def _key(self, name: _Ints, rank: _Ints) -> _Ints:
        return np.asarray(name * (len(self.launches) + 1) + rank, np.int64)

    def fit(self, trace: SeenLaunches, offset_ns: int, near_ns: int = NEAR_NS) -> Fit:
        """Looks for each launch's nearest one of the same kernel."""
        times, launches = trace.time + offset_ns, self.launches
        if not len(launches):
            none = np.empty(0, np.int64)
            return Fit(offset_ns, 0, none, none, none)
        inside = (times >= launches.time[0] - near_ns) & (times <= launches.time[-1] + near_ns)
        place = np.flatnonzero(inside)
        name = trace.name[place]
        after = np.searchsorted(self._keys, self._key(name, np.searchsorted(launches.time, times[place])))
        best = np.full(len(place), -1)
        distance = np.full(len(place), near_ns + 1)
        for each in (after - 1, after):
            partner = self._order[np.clip(each, 0, len(launches) - 1)]
            apart = np.abs(launches.time[partner] - times[place])
            nearer = (launches.name[partner] == name) & (apart < distance)
            best[nearer], distance[nearer] = partner[nearer], apart[nearer]
        fits = np.flatnonzero(best >= 0)
        # A launch of the capture has one partner: the nearest.
        nearest = fits[np.lexsort((distance[fits], best[fits]))]
        once = np.sort(nearest[np.unique(best[nearest], return_index=True)[1]])
        return Fit(offset_ns, int(inside.sum()), place[once], best[once], distance[once])

    def drift_ns(self, trace: SeenLaunches, fit: Fit) -> int:
        """Returns how far the trace's clock gets ahead from the first tenth of the launches to the last, by medians."""
        count = len(fit.place) // 10
        if count < _FEWEST_OF_DRIFT:
            return 0
        ahead = (trace.time[fit.place] - self.launches.time[fit.partner])[np.argsort(trace.time[fit.place])]
        return int(np.median(ahead[-count:]) - np.median(ahead[:count]))

    def steadied(self, trace: SeenLaunches, fit: Fit) -> tuple[Fit, Drift | None]:
        """Corrects an even drift of a trace's clock, if that brings its launches closer and no fewer fit.

        With a drift, launches farther away fit others of their kernel. So the drift is measured where launches fit
        best, and then around that place in a span that doubles, as what is known of the drift allows.
        """
        count = min(len(fit.place) // _FEWEST_OF_PIECE, _MOST_PIECES)
        if count < 2:
            return fit, None
        pieces = np.array_split(np.argsort(trace.time[fit.place], kind="stable"), count)
        best = min(pieces, key=lambda rows: float(np.median(fit.distance[rows])))
        low, high = int(fit.place[best].min()), int(fit.place[best].max()) + 1
        steady, rate, offset = int(np.median(trace.time[fit.place[best]])), 0.0, fit.offset_ns
        while True:
            some = _steady(trace, slice(low, high), Drift(rate, steady))
            near = self.fit(some, offset)
            if len(near.place) < _FEWEST_OF_PIECE:
                return fit, None
            left = some.time[near.place] + offset - self.launches.time[near.partner]
            more, behind = _line(some.time[near.place] - steady, left)
            rate, offset = rate + more, offset - behind
            if abs(rate) > MOST_RATE:
                return fit, None
            if high - low == len(trace):
                break
            low, high = max(low - (high - low), 0), min(high + (high - low), len(trace))
        drift = Drift(rate, steady)
        closer = self.refined(_steady(trace, slice(None), drift), offset)
        is_better = len(closer.place) >= len(fit.place) and closer.median_ns < fit.median_ns
        if not is_better or abs(self.drift_ns(trace, closer)) < TOLD_DRIFT_NS:
            return fit, None
        return closer, drift

    def refined(self, trace: SeenLaunches, offset_ns: int) -> Fit:
        """Fits twice: moves the offset by the median of what is left, which outliers do not disturb."""
        fit = self.fit(trace, offset_ns)
        if not len(fit.place):
            return fit
        left = self.launches.time[fit.partner] - trace.time[fit.place] - offset_ns
        return self.fit(trace, offset_ns + int(np.median(left)))


def _steady(trace: SeenLaunches, piece: slice, drift: Drift) -> SeenLaunches:
    """Returns some launches of a trace, with times of a clock that does not drift."""
    return replace(trace, time=drift.corrected(trace.time[piece]), thread=trace.thread[piece], name=trace.name[piece])


def _line(times: _Ints, values: _Ints) -> tuple[float, int]:
    """Returns the slope of values over times, by medians of their first and last quarters, and the value at 0."""
    order = np.argsort(times, kind="stable")
    times, values = times[order], values[order]
    count = max(len(times) // 4, 1)
    long = float(np.median(times[-count:]) - np.median(times[:count]))
    slope = float(np.median(values[-count:]) - np.median(values[:count])) / long if long > 0 else 0.0
    return slope, round(float(np.median(values - slope * times)))


def match(trace: SeenLaunches, recorded: Recorded, known: Sequence[int] = ()) -> tuple[Fit, bool] | None:
    """Finds the offset with which most launches of a trace fit those of a capture.

    Args:
        trace: its launches.
        recorded: the capture's.
        known: offsets that clocks propose; they decide between those that fit equally well.

    Returns:
        The best fit, and whether another one, at another time, is as good; None if nothing fits.
    """
    offsets = [*known, *_proposals(trace, recorded.launches)]
    step = -(-len(trace) // _SAMPLE)
    some = SeenLaunches(trace.time[::step], trace.thread[::step], trace.name[::step], trace.threads)
    fits = [fit for fit in (recorded.refined(some, offset) for offset in offsets) if len(fit.place)]
    if not fits:
        return None
    most = max(len(fit.place) for fit in fits)
    good = sorted((fit for fit in fits if len(fit.place) >= _ALMOST * most), key=lambda fit: fit.median_ns)
    best = good[0]
    as_good = [fit for fit in good if fit.median_ns <= _AS_NEAR * best.median_ns and len(fit.place) >= len(best.place)]
    expected = [fit for fit in as_good if any(abs(fit.offset_ns - each) <= NEAR_NS for each in known)]
    best = expected[0] if expected else best
    is_ambiguous = not expected and any(abs(fit.offset_ns - best.offset_ns) > NEAR_NS for fit in as_good)
    return recorded.refined(trace, best.offset_ns), is_ambiguous


def _proposals(trace: SeenLaunches, recorded: SeenLaunches) -> list[int]:
    """Returns offsets that lay runs of equal names over each other, those that most runs agree in first."""
    names = max(int(each.name.max(initial=0)) for each in (trace, recorded)) + 1
    for length in _RUNS:
        ours, first = _runs(trace, length, names)
        theirs, places = _runs(recorded, length, names)
        order = np.argsort(theirs, kind="stable")
        theirs, places = theirs[order], places[order]
        low, high = np.searchsorted(theirs, ours), np.searchsorted(theirs, ours, "right")
        found = np.flatnonzero(high > low)
        if len(found) >= min(_FEWEST_ANCHORS, max(len(trace) // 4, 1)):
            break
    else:
        return []
    rarest = np.argsort((high - low)[found], kind="stable")[: 4 * _ANCHORS]
    anchors = found[rarest[:: -(-len(rarest) // _ANCHORS)]]
    differences = []
    for anchor in anchors.tolist():
        at = places[low[anchor] : high[anchor]]
        at = at[:: -(-len(at) // _MOST_PLACES)]
        differences.append(recorded.time[at] - trace.time[first[anchor]])
    return _densest(np.sort(np.concatenate(differences)))


def _runs(launches: SeenLaunches, length: int, names: int) -> tuple[NDArray[np.uint64], _Ints]:
    """Returns a hash of each run of so many launches of one thread, and the first launch of each."""
    order = np.lexsort((np.arange(len(launches)), launches.thread))
    if len(order) < length:
        return np.empty(0, np.uint64), np.empty(0, np.int64)
    name, thread = launches.name[order].astype(np.uint64) + np.uint64(1), launches.thread[order]
    count = len(order) - length + 1
    found = np.zeros(count, np.uint64)
    for each in range(length):
        found = (found ^ name[each : each + count]) * _MIX
        found ^= found >> np.uint64(29)
    whole = thread[:count] == thread[length - 1 :]
    return found[whole], order[:count][whole]


def _densest(differences: _Ints) -> list[int]:
    """Returns the medians of the windows with most differences, which are ascending.

    A narrow window tells the true distance from those of other steps, whose launches differ by more; a wide one
    finds it if the clocks drift or the calls are slow.
    """
    found: list[int] = []
    for width in _WINDOWS_NS:
        end = np.searchsorted(differences, differences + width, "right")
        count = end - np.arange(len(differences))
        own = 0
        for first in np.argsort(-count, kind="stable")[:_MOST_WINDOWS].tolist():
            middle = int(np.median(differences[first : end[first]]))
            if all(abs(middle - other) > width for other in found):
                found.append(middle)
                own += 1
                if own == _MOST_PROPOSALS:
                    break
    return found
