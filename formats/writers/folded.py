"""Folded stacks (stackcollapse): `frame;frame;...;frame COUNT`, a line per distinct stack, sorted.

From the root: process name and id, user frames, kernel frames `_[k]`, a `-`, then the GPU's part: source file and
functions `_[G]`, mnemonic, reason and offset `_[g]`. A Shape can choose and order these parts.
"""

from __future__ import annotations

from typing import IO

from iaprof.formats.export import Export
from iaprof.formats.profile import Shape
from iaprof.formats.writers.writer import Writer


class Folded(Writer):
    """The format of flamegraph.pl, speedscope and many others."""

    name = "folded"
    extensions: tuple[str, ...] = (".folded", ".collapsed")
    description = "a line per stack and its count, for flamegraph.pl, others"

    def write(self, export: Export, shape: Shape, out: IO[str]) -> None:
        """Writes every stack with its count, sorted by text; those below the limit add up in a last line."""
        # Imported here, as other verbs need no Arrow for knowing of this format.
        from iaprof.formats.writers.folded_lines import write_cpu_lines, write_lines

        if shape.cpu_samples:
            write_cpu_lines(export, shape, out)
        else:
            write_lines(export.profile, shape, out)


class Collapsed(Folded):
    """Folded stacks by the name that some programs have for them."""

    name = "collapsed"
    extensions = ()
    description = "another name for folded"
