"""Waits for the GPU: what bpf/c/waits.c sends of them, and what a capture says."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from enum import IntFlag
from typing import Any

import numpy as np
from numpy.typing import NDArray

SHORT_NS = 10_000
"""Waits that took less are added up by thread and call site."""

FUNCTIONS = {
    1: "zeEventHostSynchronize",
    2: "zeCommandQueueSynchronize",
    3: "zeFenceHostSynchronize",
    4: "zeCommandListHostSynchronize",
    5: "zeDeviceSynchronize",
    6: "clFinish",
    7: "clWaitForEvents",
}
"""The functions in which programs wait, by the number that records have."""

UNKNOWN_FUNCTION = "[unknown function]"

WAIT = np.dtype(
    [
        ("begin", "<u8"),  # CLOCK_MONOTONIC, ns
        ("end", "<u8"),
        ("waited", "<u8"),  # ns; of several waits, of which the first began and the last ended then, the sum
        ("count", "<u8"),  # waits
        ("handle", "<u8"),  # for what was waited
        ("stack", "<u8"),  # stack id, 0 for none
        ("pid", "<u4"),
        ("tid", "<u4"),
        ("function", "<u4"),  # of FUNCTIONS
        ("flags", "<u4"),  # WaitFlags
        ("comm", "S16"),
    ]
)
"""A wait, or several short ones of one thread at one call site."""

WAITING = np.dtype(
    [
        *((name, "<u8") for name in ("since", "whose", "slot", "returns_to", "ip", "handle", "stack", "epoch")),
        *((name, "<u4") for name in ("pid", "flags", "which", "function")),
    ]
)
"""`struct waiting`, of a thread (uint32)."""

SITE_KEY = np.dtype([("returns_to", "<u8"), ("slot", "<u8"), ("tid", "<u4"), ("which", "<u4")])
SITE = np.dtype(
    [
        *((name, "<u8") for name in ("begin", "end", "waited", "count", "handle", "stack", "epoch")),
        *((name, "<u4") for name in ("pid", "function", "flags", "is_known")),
        ("comm", "S16"),
    ]
)
"""`struct site_key` and `struct site`."""


class WaitFlags(IntFlag):
    """How a wait ended, and what its row is."""

    NOT_ENDED = 1  # it went on when the recording ended, or its thread ended in it
    TIMED_OUT = 2  # what it waited for was not ready in the time that the program gave it
    FAILED = 4  # the function gave an error
    ADDED_UP = 8  # several short ones; the stack is that of one of them
    PRESUMED = 32  # its stack is presumed to be that of another wait: formats.launches.LaunchFlags


def added_up_waits(keys: NDArray[np.void], sites: NDArray[np.void]) -> NDArray[np.void]:
    """WAIT[m] of SITE_KEY[n] and SITE[n]: those that have a sum."""
    has = sites["count"] > 0
    rows = np.zeros(int(has.sum()), WAIT)
    for name in ("begin", "end", "waited", "count", "handle", "stack", "pid", "function", "flags", "comm"):
        rows[name] = sites[name][has]
    rows["tid"] = keys["tid"][has]
    return rows


def unended_waits(tids: NDArray[np.uint32], waiting: NDArray[np.void], end_ns: int) -> NDArray[np.void]:
    """WAIT[m] of threads (uint32[n]) and WAITING[n]: those that wait, until a time (CLOCK_MONOTONIC)."""
    waits = waiting["since"] > 0
    rows = np.zeros(int(waits.sum()), WAIT)
    for name in ("handle", "stack", "pid", "function"):
        rows[name] = waiting[name][waits]
    rows["tid"], rows["count"] = tids[waits], 1
    rows["begin"] = waiting["since"][waits]
    rows["end"] = np.maximum(rows["begin"], np.uint64(end_ns))
    rows["waited"] = rows["end"] - rows["begin"]
    rows["flags"] = (waiting["flags"][waits] & np.uint32(WaitFlags.PRESUMED)) | np.uint32(WaitFlags.NOT_ENDED)
    return rows


MEMBER = "waits"
"""Of the capture's header."""
_MOST = 1 << 64


@dataclass(frozen=True)
class WaitTotals:
    """All waits of a recording, added up."""

    waits: int = 0
    waited_ns: int = 0
    short: int = 0  # of the waits, those that were added up
    not_ended: int = 0

    @classmethod
    def of(cls, waits: NDArray[np.void]) -> WaitTotals:
        """Of WAIT[n]."""
        flags, count = waits["flags"], waits["count"].astype(object)
        return cls(
            int(count.sum()),
            int(waits["waited"].astype(object).sum()),
            int(count[flags & WaitFlags.ADDED_UP > 0].sum()),
            int(count[flags & WaitFlags.NOT_ENDED > 0].sum()),
        )

    def __add__(self, other: WaitTotals) -> WaitTotals:
        """Of both."""
        pairs = zip(asdict(self).values(), asdict(other).values(), strict=True)
        return WaitTotals(*(one + another for one, another in pairs))

    def to_json(self) -> dict[str, int]:
        """As the header has it."""
        return asdict(self)

    @classmethod
    def from_header(cls, header: Mapping[str, Any]) -> WaitTotals | None:
        """What a header says, which may be anybody's; None if that is nothing."""
        told = header.get(MEMBER)
        if not isinstance(told, dict):
            return None
        numbers = [told.get(name) for name in asdict(cls())]
        valid = [number for number in numbers if type(number) is int and 0 <= number < _MOST]
        return cls(*valid) if len(valid) == len(numbers) else None

    def sentence(self) -> str:
        """What is said of them: no full stop."""
        of_them = [f"{self.short:,} shorter than {SHORT_NS // 1000} us, added up"] if self.short else []
        of_them += [f"{self.not_ended:,} not ended"] if self.not_ended else []
        more = f" ({', '.join(of_them)})" if of_them else ""
        return f"{self.waits:,} wait{'s' if self.waits != 1 else ''} for the GPU, {self.waited_ns / 1e9:,.3f} s{more}"


def of_all(headers: Iterable[Mapping[str, Any]]) -> WaitTotals | None:
    """The sum of what several headers say; None if none of them says anything."""
    told = [totals for header in headers if (totals := WaitTotals.from_header(header)) is not None]
    return sum(told[1:], told[0]) if told else None
