"""The header's member `traces`: the files that time lines were imported from, and their clocks. Headers are untrusted.

A file's member `clock` says how its times became those of the capture.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

MEMBER = "traces"
_LIMIT = 1 << 63

KEY = "clock"
MOST_THREADS = 4096  # of a trace, in the header
MOST_RATE = 1e-3  # clocks are off by a tenth of it at most
_CLOCK_LIMIT = 1 << 62
TOLD_DRIFT_NS = 10_000  # less is how exactly launches tell
_Thread = tuple[int, int]
"""Process and thread."""


@dataclass(frozen=True)
class TraceFile:
    """A file, as its import described it."""

    name: str
    dialect: str
    ranks: list[int]  # of its devices; files of before there was this member have one
    events: int
    dropped: int
    merged: int  # into others


def trace_files(header: dict[str, Any], cleaned: Callable[[str], str]) -> list[TraceFile]:
    """Returns the files of a capture; `cleaned` makes texts safe for a terminal."""
    found = header.get(MEMBER)
    files = [each if isinstance(each, dict) else {} for each in (found if isinstance(found, list) else [])]
    return [
        TraceFile(
            cleaned(_text(each.get("name"))),
            cleaned(_text(each.get("dialect"))),
            _ranks(each),
            *(_number(_counts(each).get("events")), _sum(_counts(each), "dropped"), _sum(_counts(each), "merged")),
        )
        for each in files
    ]


def _ranks(file: dict[str, Any]) -> list[int]:
    ranks = file.get("ranks")
    return [_number(each) for each in ranks] if isinstance(ranks, list) else [_number(file.get("rank"))]


def _counts(file: dict[str, Any]) -> dict[str, Any]:
    counts = file.get("counts")
    return counts if isinstance(counts, dict) else {}


def _sum(counts: dict[str, Any], name: str) -> int:
    found = counts.get(name)
    return sum(map(_number, found.values())) if isinstance(found, dict) else 0


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _number(value: Any) -> int:
    return value if type(value) is int and 0 <= value < _LIMIT else 0


class JoinedBy(StrEnum):
    """What related the two clocks."""

    LAUNCHES = "launches"  # the same launches are in the trace and in the capture
    WALL = "wall clock"  # the trace's times are of the wall clock, which the capture's header relates
    MONOTONIC = "monotonic clock"  # they are of CLOCK_MONOTONIC already


@dataclass(frozen=True)
class TraceClock:
    """How a trace's times relate to CLOCK_MONOTONIC of the capture that it was joined to."""

    by: JoinedBy
    offset_ns: int  # was added to the times of the trace
    is_guess: bool
    launches: int = 0  # of the trace, while the capture was recorded
    fitting: int = 0  # of these: have a launch of the same kernel in the capture, close enough
    median_ns: int = 0  # of the distances between these
    largest_ns: int = 0
    drift_ns: int = 0  # how much later the trace's clock was at its last launches than at its first
    rate: float = 0.0  # of the drift, by which the times were corrected: ns that the trace's clock gets ahead in a ns
    steady_ns: int = 0  # the trace's time that was not corrected
    threads: Mapping[_Thread, _Thread] = field(default_factory=dict)  # the capture's for those of the trace, if known

    def as_dict(self) -> dict[str, Any]:
        """Returns JSON, for the header."""
        threads = [[*theirs, *ours] for theirs, ours in self.threads.items()]
        return {**vars(self), "by": str(self.by), "threads": threads}


def trace_clocks(header: dict[str, Any]) -> list[TraceClock | None]:
    """Returns the clock of each trace of a capture; None: its times are of a clock of its own."""
    found = header.get(MEMBER)
    files = found if isinstance(found, list) else []
    return [trace_clock(each) if isinstance(each, dict) else None for each in files]


def trace_clock(trace: dict[str, Any]) -> TraceClock | None:
    """Returns the clock of a trace's entry in the header; None if it has a clock of its own."""
    return _clock(trace.get(KEY))


def describe_clock(clock: TraceClock) -> str:
    """Returns a sentence for people, without a name."""
    distances = f"{_short(clock.median_ns)} apart in the median, {_short(clock.largest_ns)} at most"
    fitting = f"{clock.fitting:,} of {clock.launches:,} launches fit, {distances}"
    match clock.by:
        case JoinedBy.LAUNCHES:
            how = f"clocks joined by launches: {fitting}"
        case JoinedBy.WALL:
            how = "clocks joined by the wall clock"
        case JoinedBy.MONOTONIC:
            how = "its clock is CLOCK_MONOTONIC, like the capture's"
    if clock.by is not JoinedBy.LAUNCHES:
        how += f"; {fitting}" if clock.fitting else "; no launches show how well"
    if abs(clock.drift_ns) >= TOLD_DRIFT_NS:
        direction = "behind" if clock.drift_ns < 0 else "ahead"
        how += f"; from the first to the last launches the trace's clock gets {_short(abs(clock.drift_ns))} {direction}"
        how += ", which was corrected" if clock.rate else ""
    return f"{how} (a guess)" if clock.is_guess else how


def _short(ns: int) -> str:
    if ns < 1000:
        return f"{ns} ns"
    return f"{ns / 1e3:,.1f} us" if ns < 1_000_000 else f"{ns / 1e6:,.1f} ms"


def _clock(found: Any) -> TraceClock | None:
    match found:
        case {"by": str(by), "offset_ns": offset, "is_guess": bool(is_guess)} if by in set(JoinedBy):
            pass
        case _:
            return None
    if type(offset) is not int or not -_CLOCK_LIMIT < offset < _CLOCK_LIMIT:
        return None
    numbers = {name: _clock_number(found.get(name)) for name in ("launches", "fitting", "median_ns", "largest_ns")}
    drift = found.get("drift_ns")
    numbers["drift_ns"] = drift if type(drift) is int and -_CLOCK_LIMIT < drift < _CLOCK_LIMIT else 0
    rate, steady = found.get("rate"), found.get("steady_ns")
    rate = rate if type(rate) is float and abs(rate) <= MOST_RATE else 0.0
    rows = found.get("threads")
    threads = {}
    for row in rows[:MOST_THREADS] if isinstance(rows, list) else ():
        if (
            isinstance(row, list)
            and len(row) == 4
            and all(type(each) is int and 0 <= each < _CLOCK_LIMIT for each in row)
        ):
            threads[row[0], row[1]] = (row[2], row[3])
    steady = steady if type(steady) is int and -_CLOCK_LIMIT < steady < _CLOCK_LIMIT else 0
    return TraceClock(JoinedBy(by), offset, is_guess, **numbers, rate=rate, steady_ns=steady, threads=threads)


def _clock_number(value: Any) -> int:
    return value if type(value) is int and 0 <= value < _CLOCK_LIMIT else 0
