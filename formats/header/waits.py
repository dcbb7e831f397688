"""Waits for the GPU: what bpf/c/waits.c sends of them, and what a capture says."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from enum import IntFlag
from typing import Any

import numpy as np
from numpy.typing import NDArray

SHORT_NS = 10_000
"""BPF adds up shorter waits (ns) by thread and call site."""

FUNCTIONS = {
    1: "zeEventHostSynchronize",
    2: "zeCommandQueueSynchronize",
    3: "zeFenceHostSynchronize",
    4: "zeCommandListHostSynchronize",
    5: "zeDeviceSynchronize",
    6: "clFinish",
    7: "clWaitForEvents",
    8: "cuStreamSynchronize",
    9: "cuEventSynchronize",
    10: "cuCtxSynchronize",
}
"""The functions that wait, by their number in records."""

UNKNOWN_FUNCTION = "[unknown function]"

WAIT = np.dtype(
    [
        ("begin", "<u8"),  # CLOCK_MONOTONIC, ns
        ("end", "<u8"),
        ("waited", "<u8"),  # ns; of several waits (COUNT > 1) the sum, while begin and end span all of them
        ("count", "<u8"),  # number of waits
        ("handle", "<u8"),  # the object that was waited for
        ("stack", "<u8"),  # stack id, 0 for none
        ("pid", "<u4"),
        ("tid", "<u4"),
        ("function", "<u4"),  # key of FUNCTIONS
        ("flags", "<u4"),  # WaitFlags
        ("comm", "S16"),
    ]
)
"""A wait, or the sum of short waits of one thread at one call site."""

WAITING = np.dtype(
    [
        *((name, "<u8") for name in ("since", "whose", "slot", "returns_to", "ip", "handle", "stack", "epoch")),
        *((name, "<u4") for name in ("pid", "flags", "which", "function")),
    ]
)
"""`struct waiting` of bpf/c/waits.c: a thread's current wait; the map's key is the thread id (uint32)."""

SITE_KEY = np.dtype([("returns_to", "<u8"), ("slot", "<u8"), ("generation", "<u8"), ("tid", "<u4"), ("which", "<u4")])
SITE = np.dtype(
    [
        *((name, "<u8") for name in ("begin", "end", "waited", "count", "handle", "stack", "epoch")),
        *((name, "<u4") for name in ("pid", "function", "flags", "is_known")),
        ("comm", "S16"),
    ]
)
"""`struct site_key` and `struct site` of bpf/c/waits.c: short waits by thread and call site."""


class WaitFlags(IntFlag):
    """How a wait ended, and what its row stands for."""

    NOT_ENDED = 1  # it lasted until the recording or its thread ended
    TIMED_OUT = 2  # the object was not ready within the program's timeout
    FAILED = 4  # the function returned an error
    ADDED_UP = 8  # the sum of several short waits, with the stack of one of them
    PRESUMED = 32  # the stack of another wait is presumed to be its own: wire.launches.LaunchFlags


def added_up_waits(keys: NDArray[np.void], sites: NDArray[np.void]) -> NDArray[np.void]:
    """The sums of short waits: WAIT[m] from SITE_KEY[n] and SITE[n], without empty sites."""
    has = sites["count"] > 0
    rows = np.zeros(int(has.sum()), WAIT)
    for name in ("begin", "end", "waited", "count", "handle", "stack", "pid", "function", "flags", "comm"):
        rows[name] = sites[name][has]
    rows["tid"] = keys["tid"][has]
    return rows


def unended_waits(tids: NDArray[np.uint32], waiting: NDArray[np.void], end_ns: int) -> NDArray[np.void]:
    """Waits that had not ended at `end_ns` (CLOCK_MONOTONIC): WAIT[m] from thread ids uint32[n] and WAITING[n]."""
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
"""The header member with the totals."""
_MOST = 1 << 64


@dataclass(frozen=True)
class WaitTotals:
    """The sums over all waits of a recording."""

    waits: int = 0
    waited_ns: int = 0
    short: int = 0  # of the waits, those shorter than SHORT_NS
    not_ended: int = 0

    @classmethod
    def from_rows(cls, waits: NDArray[np.void]) -> WaitTotals:
        """Adds up WAIT[n] records."""
        flags, count = waits["flags"], waits["count"].astype(object)
        return cls(
            int(count.sum()),
            int(waits["waited"].astype(object).sum()),
            int(count[flags & WaitFlags.ADDED_UP > 0].sum()),
            int(count[flags & WaitFlags.NOT_ENDED > 0].sum()),
        )

    def __add__(self, other: WaitTotals) -> WaitTotals:
        """The sum of two."""
        pairs = zip(asdict(self).values(), asdict(other).values(), strict=True)
        return WaitTotals(*(one + another for one, another in pairs))

    def to_json(self) -> dict[str, int]:
        """The header member."""
        return asdict(self)

    @classmethod
    def from_header(cls, header: Mapping[str, Any]) -> WaitTotals | None:
        """Reads the member of a header (untrusted); None if it is missing or invalid."""
        member = header.get(MEMBER)
        if not isinstance(member, dict):
            return None
        numbers = [member.get(name) for name in asdict(cls())]
        valid = [number for number in numbers if type(number) is int and 0 <= number < _MOST]
        return cls(*valid) if len(valid) == len(numbers) else None

    def sentence(self) -> str:
        """A clause without a full stop."""
        of_them = [f"{self.short:,} shorter than {SHORT_NS // 1000} us, added up"] if self.short else []
        of_them += [f"{self.not_ended:,} not ended"] if self.not_ended else []
        more = f" ({', '.join(of_them)})" if of_them else ""
        return f"{self.waits:,} wait{'s' if self.waits != 1 else ''} for the GPU, {self.waited_ns / 1e9:,.3f} s{more}"


def total_waits(headers: Iterable[Mapping[str, Any]]) -> WaitTotals | None:
    """The sum over several headers; None if no header has the member."""
    totals_of_headers = [totals for header in headers if (totals := WaitTotals.from_header(header)) is not None]
    return sum(totals_of_headers[1:], totals_of_headers[0]) if totals_of_headers else None
