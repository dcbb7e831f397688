"""The columns of numbers beside the tree."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from iaprof.cli.interactive.contents import Contents
from iaprof.formats.estimates import MARK, is_marked
from iaprof.report.views.browsing.tree import Sums

NARROW = 70
"""A view with fewer cells leaves out the last column of numbers."""


class Column(NamedTuple):
    """A column."""

    heading: str
    width: int
    cell: Callable[[Sums, Sums, str], str]  # of a node's samples, those of all, and the kernel's name or ""
    is_right: bool = True
    is_change: bool = False  # coloured by its sign


def columns(contents: Contents, width: int) -> list[Column]:
    """The columns for a view of that many cells."""
    if contents.sides > 1:
        unit = _share if contents.is_relative else _samples
        found = [
            Column("BEFORE", 11, lambda node, all_, _: unit(node, all_, 0)),
            Column("AFTER", 11, lambda node, all_, _: unit(node, all_, 1)),
            Column("CHANGE", 10, lambda node, all_, _: _change(node, all_, contents.is_relative), is_change=True),
        ]
        last = Column("MOST CHANGED", 16, lambda node, all_, _: _most_changed(node, all_, contents.is_relative), False)
    else:
        found = [
            Column(contents.measure.heading, 11, lambda node, *_: _estimated(node, contents.measure.text)),
            Column("SHARE", 7, lambda node, all_, _: _share(node, all_, 0)),
        ]
        last = Column(f"TOP {contents.measure.part.upper()}", 16, lambda node, *_: _mostly(node), False)
    if contents.launches:
        launches = contents.launches
        found.append(Column("LAUNCHES/S", 10, lambda *cells: _rate(launches.get(cells[2]))))
    return [*found, last] if width >= NARROW else found


def _estimated(node: Sums, text: Callable[[int], str]) -> str:
    """The samples, marked if they are an estimate."""
    return f"{MARK if is_marked(node.divided, node.samples[0]) else ''}{text(node.samples[0])}"


def _samples(node: Sums, _all: Sums, side: int) -> str:
    return f"{node.samples[side]:,}"


def _share(node: Sums, all_: Sums, side: int) -> str:
    return f"{_percent(node.samples[side], all_.samples[side]):.1f} %"


def _percent(part: float, whole: float) -> float:
    return 100 * part / whole if whole else 0.0


def _mostly(node: Sums) -> str:
    counts = node.counts[0]
    most = max(counts, default=0)
    return f"{node.reasons[counts.index(most)]} {_percent(most, sum(counts)):.0f} %" if most else ""


def _changes(node: Sums, all_: Sums, is_relative: bool) -> list[float]:
    """The change of each reason's samples, or of their share of all."""
    before, after = (100 / max(total, 1) if is_relative else 1.0 for total in all_.samples)
    return [b * after - a * before for a, b in zip(*node.counts, strict=True)]


def _signed(change: float, is_relative: bool) -> str:
    if not is_relative:
        return f"{change:+,.0f}" if change else "0"
    return f"{change:+.1f}" if abs(change) >= 0.05 else "0.0"


def _change(node: Sums, all_: Sums, is_relative: bool) -> str:
    return _signed(sum(_changes(node, all_, is_relative)), is_relative)


def _most_changed(node: Sums, all_: Sums, is_relative: bool) -> str:
    changes = _changes(node, all_, is_relative)
    at = max(range(len(changes)), key=lambda at: abs(changes[at]))
    text = _signed(changes[at], is_relative)
    return f"{node.reasons[at]} {text}" if text[0] in "+-" else ""


def _rate(rate: float | None) -> str:
    return "" if rate is None else f"{rate:,.0f}"
