"""What an interactive view shows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from iaprof.formats.profile import Profile

Listing = Callable[[Profile, str, int], list[str]]
"""Lists a kernel: from the stalls that are selected, the kernel's name and a width, lines with SGR sequences."""


@dataclass(frozen=True)
class Contents:
    """The stalls that a view shows, and how."""

    title: str
    profile: Profile
    grouping: str = "stack"  # one of browsing.levels.GROUPINGS
    is_inverted: bool = False
    sides: int = 1  # 2: intervals 0 and 1 of the profile are compared
    is_relative: bool = True  # compare shares, not samples
    interval_s: float = 0.0  # length of the profile's intervals; 0: it is not divided
    listing: Listing | None = None  # None: no code is known
    launches: Mapping[str, float] = field(default_factory=dict)  # launches of each kernel per second; empty: unknown
    costs: str = ""  # what recording and showing this takes, while it is recorded
