"""speedscope's own JSON (https://www.speedscope.app/file-format-schema.json)."""

from __future__ import annotations

from typing import IO

from iaprof.formats.export import Export
from iaprof.formats.profile import Shape
from iaprof.formats.writers.writer import Needs, Writer


class Speedscope(Writer):
    """The format of the viewer at speedscope.app, which runs without network, too."""

    name = "speedscope"
    extensions = (".speedscope.json",)
    description = "flame graphs and functions, for speedscope"
    needs = Needs.CPU

    def write(self, export: Export, shape: Shape, out: IO[str]) -> None:
        """Writes a profile of the stalls and one of the CPU samples, or only the latter."""
        # Imported here, as other verbs need no Arrow for knowing of this format.
        from iaprof.formats.writers.speedscope_json import write_profiles

        write_profiles(export, shape, out)
