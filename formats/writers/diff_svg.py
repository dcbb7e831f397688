"""A differential flame graph as one SVG file: widths are the samples after, colours the change.

Stacks without samples after have no width; a line above the picture counts them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import IO

import numpy as np
from numpy.typing import NDArray

from iaprof.basics.clean import clean
from iaprof.formats.export import About
from iaprof.formats.profile import Profile, StackOptions
from iaprof.formats.stacks.flame_layout import Box, FlameLayout, frame_key, lay_out
from iaprof.formats.stacks.trees import stall_tree
from iaprof.formats.writers.flame_svg import dark, draw, rules_of

_LESS = ("#b2d5f0", "#7db5e0", "#4a90c8", "#1f68a8")  # weak to strong
_MORE = ("#f6c9b8", "#ee9f84", "#de6f52", "#b93b26")
_SAME = "#e9e9e9"
_SAME_DARK = "#4e4e4e"
_STEPS = len(_LESS)


def write(both: Profile, names: tuple[str, str], options: StackOptions, relative: bool, out: IO[str]) -> None:
    """Writes the picture.

    Args:
        both: interval 0 is before, interval 1 is after.
        names: of the two captures.
        options: the stack options.
        relative: compare shares of all samples, not samples.
        out: receives the text of the file.
    """
    tree = stall_tree(both, options, frame_key)
    after = replace(tree, count=np.where(tree.interval == 1, tree.count, 0))
    before = replace(tree, count=np.where(tree.interval == 0, tree.count, 0))
    gone = int(before.own()[after.own() == 0].sum())
    of_gone = f"{gone:,} samples before belong to stacks that are gone: swap the captures to see them"
    about = About(command=clean(" → ".join(names)), warnings=[of_gone] if gone else [])
    layout = lay_out(after, options.percent_limit)
    totals = after.total()
    layout = replace(layout, left_out=layout.left_out - int((totals == 0).sum()))
    draw(layout, about, options, out, colours=_Change(before.total(), totals, relative))


class _Change:
    """Colours that show whether a box has more samples than before, or less."""

    def __init__(self, before: NDArray[np.int64], after: NDArray[np.int64], relative: bool) -> None:
        """Takes the samples of each node of the tree: int64[nodes]."""
        wholes = [max(int(each[0]), 1) / 100 if relative else 1 for each in (before, after)]
        self._before, self._after = before / wholes[0], after / wholes[1]
        self._change = self._after - self._before
        shown = np.abs(self._change[1:][after[1:] > 0])
        self._most = float(shown.max(initial=0)) or 1.0
        self._relative = relative
        self._form = "{:.2f} %" if relative else "{:,.0f}"

    def rules(self) -> str:
        """The style rules of all classes."""
        shades = {f"less{step}": colour for step, colour in enumerate(_LESS)}
        shades |= {f"more{step}": colour for step, colour in enumerate(_MORE)}
        return rules_of({"same": _SAME, **shades}) + dark({"same": _SAME_DARK})

    def painted(self, box: Box) -> tuple[str, str]:
        """The class of a box, and the beginning of what is said of it."""
        if box.node < 0:
            return "same", ""
        values = [self._form.format(float(each[box.node])) for each in (self._before, self._after)]
        change = float(self._change[box.node])
        changed = f"{change:+.2f}" if self._relative else f"{change:+,.0f}"
        return self._class(change), f"{values[0]} before, {values[1]} after: {changed}; "

    def _class(self, change: float) -> str:
        step = min(int(abs(change) / self._most * _STEPS), _STEPS - 1)
        if abs(change) < self._most / (2 * _STEPS):
            return "same"
        return f"{'more' if change > 0 else 'less'}{step}"

    def legend(self, _: FlameLayout) -> list[tuple[str, str]]:
        """The classes to explain, and their names."""
        return [("more3", "more than before"), ("more0", "a little more"), ("same", "unchanged"),
                ("less0", "a little less"), ("less3", "less than before")]  # fmt: skip
