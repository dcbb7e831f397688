"""The `loss` rows of a capture, and their sums for its header."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from iaprof.record.capture.single_rows import single_row


class LossRows:
    """Losses, until they are enough for a row group, and the sums of all.

    Attributes:
        sums: for each source and kind of loss how much was lost (None if that is not known), and how often.
    """

    def __init__(self) -> None:
        """Holds none."""
        self.sums: dict[tuple[str, str], dict[str, Any]] = {}
        self._rows: list[pa.StructArray] = []

    def __len__(self) -> int:
        """How many rows it holds."""
        return len(self._rows)

    def add(self, begin: int, time: int, source: str, what: str, count: int | None, detail: str) -> None:
        """Takes a loss that fell between two times, CLOCK_MONOTONIC ns.

        Raises:
            ValueError, TypeError, OverflowError: a value is not of its member's type.
        """
        row = {"begin_ns": begin, "time_ns": time, "source": source, "what": what, "count": count, "detail": detail}
        self._rows.append(single_row("loss", row))
        total = self.sums.setdefault((source, what), {"source": source, "what": what, "count": None, "events": 0})
        total["events"] += 1
        if count is not None:
            total["count"] = (total["count"] or 0) + count

    def take(self) -> list[pa.StructArray]:
        """The rows, of which it then holds none."""
        rows, self._rows = self._rows, []
        return rows
