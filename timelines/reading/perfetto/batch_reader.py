"""Runs in a sandboxed child: reads batches of a trace's packets, one after the other, and keeps what they share."""

from __future__ import annotations

from collections import Counter
from typing import Any

from iaprof.sandbox.reader import Refusal
from iaprof.timelines.reading import answer
from iaprof.timelines.reading.perfetto import batch_columns, packets
from iaprof.timelines.reading.perfetto.trace_state import TraceState
from iaprof.timelines.reading.perfetto.tracks import Tracks

_MARKER_BYTES = 32  # bytes of a marker that may be cut off at the end of the data


class BatchReader:
    """Reads batches, and keeps the state of the trace between calls."""

    def __init__(self) -> None:
        """Starts without a trace."""
        self._trace: TraceState | None = None

    def read(self, parameters: dict[str, Any], content: bytes, file: int) -> object:
        """Reads packets, and writes their columns into a file.

        parameters: `begins`: they are the first of a trace; `again`: the trace was read before, so its tracks are
        known; `is_lost`: the data may start inside of a packet; `is_last`: nothing follows them.
        """
        if parameters["begins"] or self._trace is None:
            if not parameters["begins"]:
                raise Refusal("Lost", "its packets could not be read")
            tracks = self._trace.tracks if parameters["again"] and self._trace else Tracks()
            tracks.given_names.clear()
            self._trace = TraceState(tracks)
        skipped = 0
        if parameters["is_lost"]:
            found = packets.find(content)
            if found is None:
                kept = 0 if parameters["is_last"] else min(_MARKER_BYTES, len(content))
                return self._answer(answer.write(answer.Columns(), file), len(content) - kept, is_lost=True)
            skipped = found
            content = content[found:]
        batch = packets.read(content)
        read = batch_columns.read(self._trace, batch)
        try:
            written = answer.write(read.columns, file)
        except OSError as error:
            raise Refusal("TooLarge", f"there is more in it than is kept ({error.strerror})") from None
        return {
            **self._answer(written, skipped + batch.consumed),
            "events": read.events,
            "dropped": {reason: count for reason, count in read.dropped.items() if count},
            "is_damaged": batch.is_damaged,
            "longer": batch.longer,
            "needs_zstd": batch.needs_zstd,
        }

    def _answer(self, written: dict[str, Any], consumed: int, is_lost: bool = False) -> dict[str, Any]:
        trace = self._trace
        assert trace is not None
        later = sum(trace.tracks.place(uuid).is_known for uuid in trace.undescribed)
        left_out = Counter(trace.sequences.left_out) + trace.tracks.left_out
        facts = {
            "late": trace.late, "undescribed": len(trace.undescribed), "described_later": later,
            "refused": trace.refused, "unread": sum(trace.unread.values()),
            "unrelated": sum(trace.clocks.unrelated.values()), "flows": trace.flows.left_out,
        }  # fmt: skip
        return {
            **written, "events": 0, "dropped": {}, "consumed": consumed, "is_damaged": False, "longer": 0,
            "needs_zstd": False, "is_lost": is_lost, "facts": facts, "left_out": dict(left_out),
        }  # fmt: skip
