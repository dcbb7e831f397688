"""Text as `perf script` prints it, for FlameScope (https://github.com/Netflix/flamescope) and others that read it."""

from __future__ import annotations

from typing import IO

from iaprof.formats.export import Export
from iaprof.formats.profile import Shape
from iaprof.formats.writers.writer import Needs, Writer


class Flamescope(Writer):
    """Events over time, as many as the stalls are, or as a file can hold."""

    name = "flamescope"
    extensions = (".perf.txt",)
    description = "perf script text, for FlameScope's heat maps"
    needs = Needs.TIME
    interval_s = 0.02  # a cell of FlameScope's heat map, which has 50 to the second

    def write(self, export: Export, shape: Shape, out: IO[str]) -> None:
        """Writes the events in the order of time."""
        # Imported here, as other verbs need no Arrow for knowing of this format.
        from iaprof.formats.writers.flamescope_events import write_events

        write_events(export, shape, out)
