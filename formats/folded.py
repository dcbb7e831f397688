"""Folded stacks (stackcollapse): `frame;frame;...;frame COUNT`, a line per distinct stack, sorted.

From the root: process name and id, user frames, kernel frames `_[k]`, a `-`, then the GPU's part: source file and
functions `_[G]`, mnemonic, reason and offset `_[g]`. A Shape can choose and order these parts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import IO

from iaprof.formats.frames import clean_frame, launch_frames
from iaprof.formats.profile import Launch, Profile, Shape


class Folded:
    """The format of flamegraph.pl, speedscope and many others."""

    name = "folded"
    extensions: tuple[str, ...] = (".folded", ".collapsed")
    description = "one line per stack and a count, for flamegraph.pl, speedscope and others"
    hides_cpython = True
    per_interval = False

    def write(self, profile: Profile, shape: Shape, out: IO[str]) -> None:
        """Writes every stack with its count, sorted by text; those below the limit add up in a last line."""
        # Imported here, as other verbs need no Arrow for knowing of this format.
        from iaprof.formats.folded_lines import write_lines

        write_lines(profile, shape, out)


def write_cpu(samples: Iterable[tuple[Launch, int]], out: IO[str]) -> None:
    """Writes CPU samples in the same way: process, user frames, kernel frames `_[k]`, and how often."""
    lines: dict[str, int] = defaultdict(int)
    for launch, count in samples:
        lines[";".join(map(clean_frame, launch_frames(launch, Shape())))] += count
    for line in sorted(lines):
        out.write(f"{line} {lines[line]}\n")
