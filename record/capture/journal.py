"""What the parts of a recording write into, and the totals that tell how it goes.

The spool behind it changes when the output is rotated; who writes does not notice.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from iaprof.record.capture.spool import FrameKind, Spool
from iaprof.record.launched_kernels import Kernels

Tell = Callable[[str], None]
BOTH_NS = 1_000_000_000  # what began so long before a spool may be in it, too: threads and the recorder may be held up
WRONG_LENGTH = "records in the ring buffer whose length is not the one that this iaprof expects: they were skipped"


@dataclass
class Totals:
    """What was recorded since the start, all output files together."""

    records: int = 0
    launches: int = 0
    modules: int = 0
    lost: int = 0  # as far as it is known how many
    losses: int = 0  # times that something was lost
    kernels: Kernels | None = None  # only where somebody is shown how many: it costs a little for each read


class Journal:
    """The spool, with what is said on the side."""

    def __init__(self, spool: Spool, warn: Tell, inform: Tell) -> None:
        """Begins.

        Args:
            spool: to write to.
            warn: gets what the user should know now.
            inform: gets what only who asks for details wants to know.
        """
        self.spool = spool
        self.warn, self.inform = warn, inform
        self.totals = Totals()
        self.write = spool.write
        self.earlier_bytes = 0  # in the spools before this one
        self._before: Spool | None = None  # the one before, as long as stacks for it may come
        self._began_ns = 0  # when this one began

    def go_on_in(self, spool: Spool) -> None:
        """Writes to another spool from now on; `write_late` still writes to the one before, until `end_before`."""
        self.earlier_bytes += self.spool.size
        self._before, self._began_ns = self.spool, time.monotonic_ns()
        self.spool, self.write = spool, spool.write

    def end_before(self) -> None:
        """From now on nothing more is written to the spool before."""
        self._before = None

    def write_late(self, kind: FrameKind, payload: bytes, since_ns: int, part: int) -> None:
        """Writes a frame about what began earlier: into each spool that may have its beginning.

        Args:
            kind: of the frame.
            payload: likewise.
            since_ns: when it began, CLOCK_MONOTONIC ns.
            part: see FrameKind.
        """
        now = time.monotonic_ns()
        if self._before is not None and since_ns < self._began_ns:
            self._before.write(kind, payload, time=now, part=part)
        if since_ns >= self._began_ns - BOTH_NS:
            self.write(kind, payload, time=now, part=part)

    def json(self, kind: FrameKind, value: object, time_ns: int = 0, begin_ns: int = 0) -> None:
        """Writes a frame whose payload is JSON; at this moment unless a time is given."""
        self.write(kind, json.dumps(value).encode(), time=time_ns or time.monotonic_ns(), begin=begin_ns)

    def append(self, name: str, item: object) -> None:
        """Adds to a list in the capture's header that was written already."""
        self.json(FrameKind.APPEND, {name: [item]})

    def loss(self, source: str, what: str, count: int | None, detail: str, begin: int, end: int) -> None:
        """Writes down that something is missing.

        Args:
            source: of what, for instance `launches`.
            what: happened, for instance `lost`.
            count: how many; None where nobody knows.
            detail: a sentence.
            begin: of the span in which it happened, CLOCK_MONOTONIC ns.
            end: of that span.
        """
        self.totals.losses += 1
        self.totals.lost += count or 0
        row: dict[str, Any] = {"source": source, "what": what, "count": count, "detail": detail}
        self.json(FrameKind.LOSS, row, time_ns=end, begin_ns=begin)
