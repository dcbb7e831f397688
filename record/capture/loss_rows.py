"""The `loss` rows of a capture, and their sums for its header."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from iaprof.record.capture.single_rows import single_row

_TOGETHER = 1 << 10  # rows that become one array: an array of one row takes kilobytes


class LossRows:
    """Collects losses until they fill a row group, and sums them up.

    Attributes:
        sums: by source and kind of loss: how much was lost (None if unknown), and in how many events.
    """

    def __init__(self) -> None:
        """Begins without losses."""
        self.sums: dict[tuple[str, str], dict[str, Any]] = {}
        self._arrays: list[pa.StructArray] = []
        self._single: list[pa.StructArray] = []

    def __len__(self) -> int:
        """The number of rows that `take` would return."""
        return len(self._arrays) * _TOGETHER + len(self._single)

    def add(self, begin: int, time: int, source: str, what: str, count: int | None, detail: str) -> None:
        """Adds a loss that happened between two times, CLOCK_MONOTONIC ns.

        Raises:
            ValueError, TypeError, OverflowError: a value does not have its member's type.
        """
        row = {"begin_ns": begin, "time_ns": time, "source": source, "what": what, "count": count, "detail": detail}
        self._single.append(single_row("loss", row))
        if len(self._single) == _TOGETHER:
            self._arrays.append(pa.concat_arrays(self._single))
            self._single = []
        total = self.sums.setdefault((source, what), {"source": source, "what": what, "count": None, "events": 0})
        total["events"] += 1
        if count is not None:
            total["count"] = (total["count"] or 0) + count

    def take(self) -> list[pa.StructArray]:
        """Returns the rows collected since the last call."""
        rows = [*self._arrays, *self._single]
        self._arrays, self._single = [], []
        return rows
