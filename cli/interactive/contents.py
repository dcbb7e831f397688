"""What an interactive view shows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from iaprof.formats.profile import Profile
from iaprof.report.views.browsing.levels import GROUPINGS, OF_SLICES

Listing = Callable[[Profile, str, int], list[str]]
"""Lists a kernel: from the stalls that are selected, the kernel's name and a width, lines with SGR sequences."""


@dataclass(frozen=True)
class Measure:
    """What is counted, in which words, and the trees of it."""

    heading: str  # of the column
    unit: str  # of a number that `text` writes
    text: Callable[[int], str]
    part: str  # what a reason is
    groupings: Mapping[str, Sequence[str]]
    without_times: str  # said where no time can be chosen


SAMPLES = Measure(
    "SAMPLES", "samples", lambda count: f"{count:,}", "reason", GROUPINGS,
    "Choose a time with --time when you open this view.",
)  # fmt: skip
SLICES = Measure(
    "TIME ms", "ms", lambda ns: f"{ns / 1e6:,.3f}", "category", OF_SLICES, "Time lines are shown whole here."
)
"""Self times of slices, whose categories are in place of reasons."""


@dataclass(frozen=True)
class Contents:
    """The stalls that a view shows, and how."""

    title: str
    profile: Profile
    grouping: str = "stack"  # one of the measure's
    is_inverted: bool = False
    sides: int = 1  # 2: intervals 0 and 1 of the profile are compared
    is_relative: bool = True  # compare shares, not samples
    interval_s: float = 0.0  # length of the profile's intervals; 0: it is not divided
    listing: Listing | None = None  # None: no code is known
    launches: Mapping[str, float] = field(default_factory=dict)  # launches of each kernel per second; empty: unknown
    measure: Measure = SAMPLES
    costs: str = ""  # what recording and showing this takes, while it is recorded
