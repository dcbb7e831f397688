"""The first and the last time of traces, without placeholders: runtimes write 0, -1 or the like for an unknown time.

With one 0 among times since 1970, a trace would last 50 years.
"""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

LATEST_NS = 1 << 61
"""Times from here on, in 2043, can be placeholders, and so can those up to 0."""
FAR_NS, FAR_SPANS = 60_000_000_000, 10
"""A placeholder is farther from all other times than a minute and than their span times this."""


@dataclass(frozen=True)
class Extent:
    """The first and the last time of events, in ns; None before the first event."""

    first: int | None = None
    last: int | None = None
    first_real: int | None = None  # of events that cannot be placeholders
    last_real: int | None = None

    @classmethod
    def of(cls, begins: pa.ChunkedArray, ends: pa.ChunkedArray) -> Extent:
        """Returns the extent of events with these times, int64[n] each, in ns."""
        if not len(begins):
            return cls()
        first, last = pc.min(begins).as_py(), pc.max(ends).as_py()
        if first > 0 and last < LATEST_NS:
            return cls(first, last, first, last)
        real = pc.and_(pc.greater(begins, 0), pc.less(ends, LATEST_NS))
        return cls(first, last, pc.min(begins.filter(real)).as_py(), pc.max(ends.filter(real)).as_py())

    def joined(self, other: Extent) -> Extent:
        """Returns the extent of both."""
        sides = [
            least((each for each in pair if each is not None), default=None)
            for least, pair in (
                (min, (self.first, other.first)), (max, (self.last, other.last)),
                (min, (self.first_real, other.first_real)), (max, (self.last_real, other.last_real)),
            )
        ]  # fmt: skip
        return Extent(*sides)

    def without_placeholders(self) -> tuple[int | None, int | None]:
        """Returns the first and the last time that is not a placeholder."""
        if self.first is None or self.last is None or self.first_real is None or self.last_real is None:
            return self.first, self.last
        far = max(FAR_NS, FAR_SPANS * (self.last_real - self.first_real))
        first = self.first_real if self.first_real - self.first > far else self.first
        return first, self.last_real if self.last - self.last_real > far else self.last
