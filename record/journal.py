"""The journal: what the parts of a recording write to, and the totals for its status.

The spool behind it changes when the output is rotated; the writers do not notice.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from iaprof.formats.wire.launches import LaunchFlags
from iaprof.gpu.code import ADDRESS_MASK, canonical
from iaprof.record.spool import FrameKind, Spool

MessageHandler = Callable[[str], None]
OVERLAP_NS = 1_000_000_000  # records begun this long before a spool may still come into it: threads may be held up
WRONG_LENGTH = "records of unexpected length in the ring buffer: they were skipped"


@dataclass
class Totals:
    """What was recorded since the start, in all output files together."""

    records: int = 0
    launches: int = 0
    modules: int = 0
    lost: int = 0  # as far as the number is known
    losses: int = 0  # events, each of which lost something
    kernels: LaunchedKernels | None = None  # None unless a status is shown: it costs a little for each read


class Journal:
    """The spool, the user's messages, and the totals."""

    def __init__(self, spool: Spool, warn: MessageHandler, inform: MessageHandler) -> None:
        """Takes the first spool.

        Args:
            spool: to write to.
            warn: gets warnings for the user.
            inform: gets details, for users who ask for them.
        """
        self.spool = spool
        self.warn, self.inform = warn, inform
        self.totals = Totals()
        self.write = spool.write
        self.earlier_bytes = 0  # of the spools before this one
        self._previous: Spool | None = None  # the previous spool, as long as stacks may come for it
        self._began_ns = 0  # when the current spool began

    def switch_to(self, spool: Spool) -> None:
        """Writes to another spool from now on; `write_late` still writes to the previous one, until `end_previous`."""
        self.earlier_bytes += self.spool.size
        self._previous, self._began_ns = self.spool, time.monotonic_ns()
        self.spool, self.write = spool, spool.write

    def end_previous(self) -> None:
        """Stops writing to the previous spool."""
        self._previous = None

    def write_late(self, kind: FrameKind, payload: bytes, since_ns: int, shape: int) -> None:
        """Writes a frame to each spool that may contain what it refers to.

        Args:
            kind: the frame's kind.
            payload: the frame's payload.
            since_ns: when what it is about began, CLOCK_MONOTONIC ns.
            shape: see FrameKind.
        """
        now = time.monotonic_ns()
        if self._previous is not None and since_ns < self._began_ns:
            self._previous.write(kind, payload, time=now, shape=shape)
        if since_ns >= self._began_ns - OVERLAP_NS:
            self.write(kind, payload, time=now, shape=shape)

    def json(self, kind: FrameKind, value: object, time_ns: int = 0, begin_ns: int = 0) -> None:
        """Writes a frame with a JSON payload; its time is now unless `time_ns` is given."""
        self.write(kind, json.dumps(value).encode(), time=time_ns or time.monotonic_ns(), begin=begin_ns)

    def append(self, name: str, item: object) -> None:
        """Appends an item to a list of the header, which has been written already."""
        self.json(FrameKind.APPEND, {name: [item]})

    def loss(self, source: str, what: str, count: int | None, detail: str, begin: int, end: int) -> None:
        """Writes a loss.

        Args:
            source: what it is a loss of, for instance `launches`.
            what: the kind of loss, for instance `lost`.
            count: how many were lost; None if unknown.
            detail: a sentence.
            begin: start of the time in which it happened, CLOCK_MONOTONIC ns.
            end: end of that time.
        """
        self.totals.losses += 1
        self.totals.lost += count or 0
        row: dict[str, Any] = {"source": source, "what": what, "count": count, "detail": detail}
        self.json(FrameKind.LOSS, row, time_ns=end, begin_ns=begin)


class LaunchedKernels:
    """Counts the distinct kernels that were launched, and those of them in a code object that was taken."""

    def __init__(self) -> None:
        self._launched = np.empty(0, np.uint64)  # distinct addresses
        self._starts: list[int] = []
        self._ends: list[int] = []
        self._matched = 0
        self._changed = False

    def add_launches(self, launches: NDArray[np.void]) -> None:
        """Adds the kernels of LAUNCH[n]."""
        readable = (launches["flags"] & LaunchFlags.BAD_ARGS) == 0
        addresses = np.unique(launches["address"][readable] & np.uint64(ADDRESS_MASK))
        if not np.isin(addresses, self._launched, assume_unique=True).all():
            self._launched = np.union1d(self._launched, addresses)
            self._changed = True

    def add_code(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Adds address ranges of code that was taken: (address, size)."""
        for address, size in ranges:
            start = canonical(address)
            self._starts.append(start)
            self._ends.append(start + size)
            self._changed = True

    def counts(self) -> tuple[int, int]:
        """Returns how many distinct kernels were launched, and how many of them have known code."""
        if self._changed:
            self._changed = False
            starts = np.sort(np.array(self._starts, np.uint64))
            ends = np.sort(np.array(self._ends, np.uint64))
            # A kernel is inside a range if more ranges have begun than ended at its address.
            begun = np.searchsorted(starts, self._launched, "right")
            self._matched = int((begun > np.searchsorted(ends, self._launched, "right")).sum())
        return len(self._launched), self._matched
