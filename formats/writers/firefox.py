"""The Firefox Profiler's processed profile (https://profiler.firefox.com), as JSON."""

from __future__ import annotations

from typing import IO

from iaprof.formats.export import Export
from iaprof.formats.profile import Shape
from iaprof.formats.writers.writer import Needs, Writer


class Firefox(Writer):
    """Stalls and CPU samples over time, as tracks of each process."""

    name = "firefox"
    extensions = (".firefox.json",)
    description = "call trees of any range of time, for the Firefox Profiler"
    needs = Needs.TIME | Needs.CPU
    interval_s = 0.05  # finer ones make the file larger, and a screen shows some hundred

    def write(self, export: Export, shape: Shape, out: IO[str]) -> None:
        """Writes the threads of stalls and those of CPU samples, or only the latter."""
        # Imported here, as other verbs need no NumPy for knowing of this format.
        from iaprof.formats.writers.firefox_profile import write_profile

        write_profile(export, shape, out)
