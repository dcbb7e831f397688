"""Perfetto's own trace format: launches as slices of threads; stalls, CPU samples and metrics as counters."""

from __future__ import annotations

from typing import IO

from iaprof.formats.export import Export
from iaprof.formats.profile import Shape
from iaprof.formats.writers.writer import Needs, Writer


class Perfetto(Writer):
    """The format of ui.perfetto.dev."""

    name = "perfetto"
    extensions = (".perfetto-trace", ".pftrace")
    description = "launches, stalls, metrics over time, for ui.perfetto.dev"
    interval_s = 0.1
    needs = Needs.TIME | Needs.CPU | Needs.SERIES | Needs.LAUNCHES
    binary = True
    readable = False
    has_stacks = False

    def write(self, export: Export, shape: Shape, out: IO[bytes]) -> None:
        """Writes the trace, a piece at a time."""
        # Imported here, as who only wants to know of this format needs no protobuf.
        from iaprof.formats.writers.perfetto_trace import write_trace

        write_trace(export, out)
