"""Plain-text tables: aligned columns, coloured on a terminal, and no wider than it.

On a terminal, one flexible column is shortened in the middle, as the ends of names distinguish them; a pipe gets full
texts. rich measures widths in cells, as some characters take two or none (CJK, combining accents).
"""

from __future__ import annotations

import os
import shutil
import sys
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from rich.cells import cell_len

from iaprof.basics.clean import clean

HEADING, STRONG, WEAK, WARM, COLD = "1", "1", "2", "31", "34"
"""Styles: parameters of the terminal's SGR sequence (ECMA-48, 8.3.117)."""
_GAP = "  "
_NARROWEST = 12  # minimum width of a flexible column in cells, on any terminal
_CUT = "…"


@dataclass(frozen=True)
class Column:
    """A column of a table."""

    heading: str
    right: bool = False  # right-aligned, for numbers
    flexible: bool = False  # shortened until the table fits; at most one column


class Table:
    """Rows of cells, with styles."""

    def __init__(self, *columns: Column) -> None:
        self._columns = columns
        self._rows: list[tuple[list[str], Sequence[str]]] = []
        self.add(*(column.heading for column in columns), style=HEADING)

    def add(self, *cells: str, style: str | Sequence[str] = "") -> None:
        """Adds a row, with a style for all cells or one for each. Cleans the cells, as names are untrusted."""
        styles = [style] * len(self._columns) if isinstance(style, str) else style
        self._rows.append(([clean(cell) for cell in cells], styles))

    def print(self) -> None:
        """Prints the table, with the width and colours of stdout."""
        print("\n".join(self.lines(terminal_width(), coloured())))

    def lines(self, width: int | None, colours: bool) -> list[str]:
        """The rows as lines of text.

        Args:
            width: of the terminal, cells; None for no limit.
            colours: whether to use styles.
        """
        widths = [max(cell_len(cells[at]) for cells, _ in self._rows) for at in range(len(self._columns))]
        room = {}
        for at, column in enumerate(self._columns):
            if column.flexible and width is not None:
                spare = width - sum(widths) - len(_GAP) * (len(widths) - 1)
                room[at] = widths[at] = max(min(widths[at], _NARROWEST), widths[at] + min(spare, 0))
        lines = []
        for cells, styles in self._rows:
            shown = [shortened(cell, room[at]) if at in room else cell for at, cell in enumerate(cells)]
            lines.append(self._line(shown, styles if colours else [""] * len(shown), widths))
        return lines

    def _line(self, cells: list[str], styles: Sequence[str], widths: list[int]) -> str:
        padded = []
        last = max((at for at, cell in enumerate(cells) if cell), default=-1)  # lines have no trailing spaces
        for column, cell, style, width in zip(self._columns[: last + 1], cells, styles, widths, strict=False):
            space = " " * (width - cell_len(cell))
            text = f"\x1b[{style}m{cell}\x1b[0m" if style and cell else cell
            padded.append(space + text if column.right else text + space)
        if padded and not self._columns[last].right:
            padded[-1] = padded[-1].rstrip(" ")
        return _GAP.join(padded)


def terminal_width() -> int | None:
    """The width of stdout in cells; None if it is not a terminal."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def coloured() -> bool:
    """Whether stdout is a terminal and the user wants colours (no-color.org)."""
    return sys.stdout.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"


def shortened(text: str, width: int) -> str:
    """Shortens a text to `width` cells by cutting its middle."""
    if cell_len(text) <= width:
        return text
    room = width - cell_len(_CUT)
    end = bisect_right(range(1, len(text)), room - room // 2, key=lambda at: cell_len(text[:at]))
    begin = bisect_left(range(len(text)), -(room // 2), key=lambda at: -cell_len(text[at:]))
    return f"{text[:end]}{_CUT}{text[begin:]}"
