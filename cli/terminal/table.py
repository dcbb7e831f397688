"""Tables as plain text: columns that line up, in colour on a terminal, and never wider than it.

A terminal gets one flexible column shortened in the middle, as both ends of names tell them apart; a pipe gets
everything. Colours, and characters of two cells or none (CJK, accents), are why widths are asked of a library.
"""

from __future__ import annotations

import os
import shutil
import sys
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from rich.cells import cell_len

from iaprof.formats.profile import clean

HEADING, STRONG, WEAK, WARM, COLD = "1", "1", "2", "31", "34"
"""Styles: parameters of the terminal's SGR sequence (ECMA-48, 8.3.117)."""
_GAP = "  "
_NARROWEST = 12  # cells that a flexible column keeps, however narrow the terminal is
_CUT = "…"


@dataclass(frozen=True)
class Column:
    """One of a table."""

    heading: str
    right: bool = False  # numbers stand right
    flexible: bool = False  # shortened until the table fits; one column at most


class Table:
    """Rows of cells, each row in one style."""

    def __init__(self, *columns: Column) -> None:
        self._columns = columns
        self._rows: list[tuple[list[str], Sequence[str]]] = []
        self.add(*(column.heading for column in columns), style=HEADING)

    def add(self, *cells: str, style: str | Sequence[str] = "") -> None:
        """A row, with the style of all cells or one for each. Names may be anyone's: cells are cleaned."""
        styles = [style] * len(self._columns) if isinstance(style, str) else style
        self._rows.append(([clean(cell) for cell in cells], styles))

    def print(self) -> None:
        """Prints it as stdout is."""
        print("\n".join(self.lines(terminal_width(), coloured())))

    def lines(self, width: int | None, colours: bool) -> list[str]:
        """The rows as text.

        Args:
            width: cells of a terminal; None where any width will do.
            colours: whether to use them.
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
        last = max((at for at, cell in enumerate(cells) if cell), default=-1)  # no spaces at a line's end
        for column, cell, style, width in zip(self._columns[: last + 1], cells, styles, widths, strict=False):
            space = " " * (width - cell_len(cell))
            text = f"\x1b[{style}m{cell}\x1b[0m" if style and cell else cell
            padded.append(space + text if column.right else text + space)
        if padded and not self._columns[last].right:
            padded[-1] = padded[-1].rstrip(" ")
        return _GAP.join(padded)


def terminal_width() -> int | None:
    """Cells of the terminal that stdout is; None where it is none."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def coloured() -> bool:
    """Whether stdout is a terminal whose user wants colours (no-color.org)."""
    return sys.stdout.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"


def shortened(text: str, width: int) -> str:
    """At most `width` cells of a text: its beginning and its end."""
    if cell_len(text) <= width:
        return text
    room = width - cell_len(_CUT)
    end = bisect_right(range(1, len(text)), room - room // 2, key=lambda at: cell_len(text[:at]))
    begin = bisect_left(range(len(text)), -(room // 2), key=lambda at: -cell_len(text[at:]))
    return f"{text[:end]}{_CUT}{text[begin:]}"
