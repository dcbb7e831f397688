"""A flame graph as one SVG file: a whole picture anywhere, and one to zoom and search in where scripts may run."""

from __future__ import annotations

from typing import IO

from iaprof.formats.export import Export
from iaprof.formats.profile import Shape
from iaprof.formats.writers.writer import Writer


class FlameSvg(Writer):
    """An interactive flame graph, in the manner of flamegraph.pl; of inverted stacks an icicle graph."""

    name = "svg"
    extensions = (".svg",)
    description = "a flame graph to zoom and search in"

    def write(self, export: Export, shape: Shape, out: IO[str]) -> None:
        """Writes the picture; what is too small for it is added up per parent, and said."""
        # Imported here, as other verbs need no NumPy for knowing of this format.
        from iaprof.formats.stacks.flame_layout import frame_key, laid_out
        from iaprof.formats.stacks.trees import cpu_tree, stall_tree
        from iaprof.formats.writers.flame_picture import draw

        if shape.cpu_samples:
            assert export.cpu is not None
            tree = cpu_tree(export.cpu, shape, frame_key)
        else:
            tree = stall_tree(export.profile, shape, frame_key, marked=True)
        draw(laid_out(tree, shape.percent_limit), export.about, shape, out)
