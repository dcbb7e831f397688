"""The journal: what the parts of a recording write to, and the totals for its status.

The spool behind it changes when the output is rotated; the writers do not notice.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from iaprof.record.launched_kernels import LaunchedKernels
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

    def write_late(self, kind: FrameKind, payload: bytes, since_ns: int, part: int) -> None:
        """Writes a frame to each spool that may contain what it refers to.

        Args:
            kind: the frame's kind.
            payload: the frame's payload.
            since_ns: when what it is about began, CLOCK_MONOTONIC ns.
            part: see FrameKind.
        """
        now = time.monotonic_ns()
        if self._previous is not None and since_ns < self._began_ns:
            self._previous.write(kind, payload, time=now, part=part)
        if since_ns >= self._began_ns - OVERLAP_NS:
            self.write(kind, payload, time=now, part=part)

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
