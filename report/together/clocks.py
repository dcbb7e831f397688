"""Decides how the times of a trace become those of a capture of the same run.

The best way is by launches, which both have. Without them the wall clock tells, to which PyTorch's times refer and
which the capture's header relates to CLOCK_MONOTONIC; some traces are of CLOCK_MONOTONIC already.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from iaprof.basics.errors import IaprofError
from iaprof.formats.distinct import distinct_rows
from iaprof.formats.header.traces import MOST_THREADS, JoinedBy, TraceClock
from iaprof.report.together.launches import SeenLaunches
from iaprof.report.together.matching import Drift, Fit, Recorded, match

BASE = "baseTimeNanoseconds"
"""The member of PyTorch's traces with the time since 1970 to which `ts` is relative, ns (libkineto, since 2024)."""
_FEWEST_LAUNCHES = 3
_FITTING = 0.5  # of the launches in the time of both
_MOST_SET_NS = 1_000_000  # that the wall clock may have moved against CLOCK_MONOTONIC while recording
_LIMIT = 1 << 62
_Ints = NDArray[np.int64]


@dataclass(frozen=True)
class RecordedClocks:
    """What a capture's header says of its clocks: CLOCK_MONOTONIC ns, and what the wall clock was ahead of it."""

    begin_ns: int
    end_ns: int  # 0: unknown
    wall_ns: int | None  # None: unknown
    was_set: bool  # the wall clock was set while recording

    @classmethod
    def of(cls, header: Mapping[str, Any]) -> RecordedClocks:
        """Reads a header, which is untrusted."""
        first, last = _pair(header.get("clock")), _pair(header.get("clock_end"))
        begin = first[0] if first else 0
        ahead = [pair[1] - pair[0] for pair in (first, last) if pair and pair[1]]
        end = header.get("end_ns")
        return cls(
            begin,
            end if type(end) is int and begin < end < _LIMIT else 0,
            ahead[0] if ahead and first and first[1] else None,
            len(ahead) == 2 and abs(ahead[1] - ahead[0]) > _MOST_SET_NS,
        )

    def overlaps(self, begin_ns: int, end_ns: int) -> bool:
        """Whether a span on CLOCK_MONOTONIC is, in part, in the time of the capture."""
        return begin_ns <= (self.end_ns or _LIMIT) and end_ns >= self.begin_ns


def _pair(found: Any) -> tuple[int, int] | None:
    match found:
        case {"monotonic_ns": int(first), "realtime_ns": int(wall)} if 0 <= first < _LIMIT and 0 <= wall < _LIMIT:
            return first, wall
    return None


@dataclass(frozen=True)
class TraceTimes:
    """What a trace tells of its clock."""

    name: str  # of its file
    base_ns: int | None  # what its times are relative to, since 1970; None: it does not say
    begin_ns: int  # its first time
    end_ns: int  # its last

    @classmethod
    def of(cls, described: Mapping[str, Any], begin_ns: int, end_ns: int) -> TraceTimes:
        """Reads a trace's entry in the header."""
        members, name = described.get("members"), described.get("name")
        base = members.get(BASE) if isinstance(members, dict) else None
        return cls(
            name if isinstance(name, str) else "",
            base if type(base) is int and 0 <= base < _LIMIT else None,
            begin_ns,
            end_ns,
        )


def clock_of(
    trace: TraceTimes, launches: SeenLaunches | None, recorded: Recorded, clocks: RecordedClocks
) -> TraceClock:
    """Joins the clock of a trace to a capture's.

    Args:
        trace: what the trace tells of its clock.
        launches: those in it; None if there are none.
        recorded: the capture's launches.
        clocks: the capture's clocks.

    Raises:
        IaprofError: nothing relates the two.
    """
    known = _known_clocks(trace, clocks)
    found = None if launches is None else match(launches, recorded, [clock.offset_ns for clock in known])
    if found is not None and launches is not None:
        fit, is_ambiguous = found
        fit, drift = recorded.steadied(launches, fit)
        if len(fit.place) >= _FEWEST_LAUNCHES and fit.share >= _FITTING:
            return _of_fit(JoinedBy.LAUNCHES, fit, launches, recorded, is_ambiguous, drift)
    if not known:
        raise IaprofError(_nothing_fits(trace, None if found is None else found[0], clocks))
    clock = known[0]
    if launches is None:
        return clock
    return _of_fit(clock.by, recorded.fit(launches, clock.offset_ns), launches, recorded, clock.is_guess)


def _known_clocks(trace: TraceTimes, clocks: RecordedClocks) -> list[TraceClock]:
    """Returns what clocks alone propose, the surest first: those that put the trace into the time of the capture."""
    found = []
    if clocks.wall_ns is not None:
        offset = (trace.base_ns or 0) - clocks.wall_ns
        found.append(TraceClock(JoinedBy.WALL, offset, trace.base_ns is None or clocks.was_set))
    if trace.base_ns is None:
        found.append(TraceClock(JoinedBy.MONOTONIC, 0, True))
    return [
        clock
        for clock in found
        if abs(clock.offset_ns) < _LIMIT
        and clocks.overlaps(trace.begin_ns + clock.offset_ns, trace.end_ns + clock.offset_ns)
    ]


def _of_fit(
    by: JoinedBy, fit: Fit, launches: SeenLaunches, recorded: Recorded, is_guess: bool, drift: Drift | None = None
) -> TraceClock:
    return TraceClock(
        by,
        fit.offset_ns,
        is_guess,
        fit.launches,
        len(fit.place),
        fit.median_ns,
        int(fit.distance.max(initial=0)),
        recorded.drift_ns(launches, fit),
        0.0 if drift is None else drift.rate,
        0 if drift is None else drift.steady_ns,
        _threads(fit, launches, recorded.launches),
    )


def _threads(fit: Fit, trace: SeenLaunches, recorded: SeenLaunches) -> dict[tuple[int, int], tuple[int, int]]:
    """Returns the capture's process and thread for each of the trace that has launches: that of most of its launches.

    They differ in containers, whose processes have other numbers inside.
    """
    ours, theirs = trace.thread[fit.place], recorded.thread[fit.partner]
    first, pair = distinct_rows(ours, theirs)
    count = np.bincount(pair, minlength=len(first))
    order = np.lexsort((-count, ours[first]))
    best = order[np.unique(ours[first][order], return_index=True)[1]]
    best = best[np.argsort(-count[best], kind="stable")][:MOST_THREADS]
    rows = first[best]
    return {
        trace.threads[one]: recorded.threads[other]
        for one, other in zip(ours[rows].tolist(), theirs[rows].tolist(), strict=True)
    }


def _nothing_fits(trace: TraceTimes, fit: Fit | None, clocks: RecordedClocks) -> str:
    of_launches = (
        "none of its launches is in the capture"
        if fit is None or not len(fit.place)
        else f"{len(fit.place):,} of {fit.launches:,} launches in the time that both cover fit"
    )
    if trace.base_ns is None:
        of_clock = "its times are neither those of the wall clock nor of CLOCK_MONOTONIC then"
    elif clocks.wall_ns is None:
        of_clock = "the capture does not say what the wall clock was"
    else:
        of_clock = "by the wall clock it was recorded at another time"
    return f"{trace.name} does not fit the capture: {of_launches}, and {of_clock}: pass the capture of the same run"


def moved(times: _Ints, files: _Ints, clocks: Sequence[TraceClock]) -> _Ints:
    """Puts times of traces on the capture's clock; those that no clock shows stay in 64 bits.

    Args:
        times: int64[n], ns.
        files: int64[n], indexes into `clocks`.
        clocks: of the traces.
    """
    plain = np.clip(times, 1 - _LIMIT, _LIMIT - 1)
    for file, clock in enumerate(clocks):
        if clock.rate:
            rows = np.flatnonzero(files == file)
            corrected = Drift(clock.rate, clock.steady_ns).corrected(plain[rows])
            plain[rows] = np.clip(corrected, 1 - _LIMIT, _LIMIT - 1)
    offsets = np.array([clock.offset_ns for clock in clocks], np.int64)
    return np.asarray(plain + offsets[files], np.int64)


def lasting(durations: _Ints, files: _Ints, clocks: Sequence[TraceClock]) -> _Ints:
    """Returns durations of traces on the capture's clock: int64[n], ns. See `moved`."""
    rates = np.array([clock.rate for clock in clocks])
    less = np.rint(np.clip(durations, 0, _LIMIT - 1) * rates[files])
    return np.asarray(durations - less.astype(np.int64), np.int64)
