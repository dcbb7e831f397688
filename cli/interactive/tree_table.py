"""The tree with its columns: a widget that draws the lines that are on the screen, however many there are."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, NamedTuple

from rich.cells import cell_len, set_cell_size
from rich.segment import Segment
from rich.style import Style
from textual import events
from textual.binding import Binding, BindingType
from textual.geometry import Size
from textual.message import Message
from textual.scroll_view import ScrollView
from textual.strip import Strip

from iaprof.basics.clean import clean
from iaprof.cli.interactive.contents import Contents
from iaprof.cli.terminal.table import shortened
from iaprof.formats.estimates import MARK, is_marked
from iaprof.report.views.browsing.tree import Line, Node, Sums, Tree

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


OPEN, CLOSED, LEAF = "▾ ", "▸ ", "  "
_GAP = "  "
_MOST_INDENT = 0.4  # of the cells for names
_STYLES = {
    "process": Style(bold=True),
    "operator": Style(color="magenta"),
    "kernel": Style(color="cyan", bold=True),
    "rank": Style(bold=True),
    "slice": Style(color="cyan", bold=True),
    "inlined": Style(color="cyan"),
    "line": Style(color="green"),
    "reason": Style(color="yellow"),
}
_HEADING, _WEAK, _FOUND = Style(bold=True, underline=True), Style(dim=True), Style(bold=True, underline=True)
_MORE, _LESS = Style(color="red"), Style(color="blue")
_CURSOR = Style(reverse=True)


class TreeTable(ScrollView, can_focus=True):
    """A tree of stalls. The first line of the widget is the heading."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up,k", "move(-1)", show=False),
        Binding("down,j", "move(1)", show=False),
        Binding("pageup", "page(-1)", show=False),
        Binding("pagedown", "page(1)", show=False),
        Binding("home,g", "end(False)", show=False),
        Binding("end,G", "end(True)", show=False),
        Binding("right,l,plus", "open", show=False),
        Binding("left,h,minus", "close", show=False),
        Binding("space", "turn", show=False),
        Binding("enter", "choose", "Annotate"),
        Binding("enter", "turn", show=False),  # where nothing can be annotated
    ]

    class Chosen(Message):
        """Enter was pressed on a node."""

        def __init__(self, node: Node) -> None:
            super().__init__()
            self.node = node

    class Moved(Message):
        """Another line is the current one."""

    def __init__(self, contents: Contents, tree: Tree) -> None:
        super().__init__()
        self.contents, self.stalls = contents, tree
        self.lines: list[Line] = []
        self.cursor = 0
        self._columns: list[Column] = []

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool:
        """Whether a key has its effect."""
        return action != "choose" or self.contents.listing is not None

    def on_mount(self) -> None:
        """Shows the first lines."""
        self.show_tree()

    def show_contents(self, contents: Contents, tree: Tree) -> None:
        """Shows other stalls, with the cursor and the open nodes where they were as far as there are such nodes."""
        line = self.line
        path = self.stalls.path(line.node) if line else ()
        for each in self.stalls.open_paths():
            node, is_it = tree.find(each)
            if is_it:
                tree.open(node)
        node, _ = tree.find(path)
        self.contents, self.stalls = contents, tree
        self.show_tree(node)

    def show_tree(self, at: Node | None = None) -> None:
        """Draws the tree anew, with the cursor at a node, or else in the line where it was."""
        self.lines = self.stalls.visible()
        if at is not None:
            self.cursor = next((number for number, line in enumerate(self.lines) if line.node is at), self.cursor)
        self.cursor = max(min(self.cursor, len(self.lines) - 1), 0)
        self.virtual_size = Size(self.size.width, len(self.lines) + 1)
        self._show_cursor()

    @property
    def line(self) -> Line | None:
        """The line with the cursor; None if there is none."""
        return self.lines[self.cursor] if self.lines else None

    def on_resize(self, event: events.Resize) -> None:
        """Chooses the columns for the width."""
        self._columns = columns(self.contents, event.size.width)
        self.virtual_size = Size(event.size.width, len(self.lines) + 1)
        self._show_cursor()

    def _show_cursor(self) -> None:
        height = max(self.size.height - 1, 1)
        top = self.scroll_offset.y
        wanted = min(max(top, self.cursor - height + 1), self.cursor)
        if wanted != top:
            self.scroll_to(y=wanted, animate=False, force=True, immediate=True)
        self.refresh()
        self.post_message(self.Moved())

    # Drawing

    def render_line(self, y: int) -> Strip:
        """Draws a line of the widget."""
        width = self.size.width - 1  # less the scroll bar
        if y == 0:
            return self._heading(width)
        number = self.scroll_offset.y + y - 1
        if number >= len(self.lines):
            return Strip.blank(width, self.rich_style)
        strip = self._strip(self.lines[number], width)
        return strip.apply_style(_CURSOR) if number == self.cursor else strip

    def _heading(self, width: int) -> Strip:
        self._columns = columns(self.contents, width)
        cells = [_aligned(column.heading, column) for column in self._columns]
        text = _GAP.join([*cells, self.stalls.grouping.upper() + (" (inverted)" if self.stalls.is_inverted else "")])
        return self._line([Segment(set_cell_size(text, width), _HEADING)], width)

    def _strip(self, line: Line, width: int) -> Strip:
        node, tree = line.node, self.stalls
        if line.hidden:
            before = " " * (sum(column.width + len(_GAP) for column in self._columns) + 2 * line.indent)
            return self._line([Segment(f"{before}{LEAF}({line.hidden:,} more: Enter shows them)", _WEAK)], width)
        sums, whole = tree.sums(node), tree.sums(tree.root)
        kernel = tree.text(node) if tree.kind(node) == "kernel" else ""
        segments = []
        for column in self._columns:
            text = column.cell(sums, whole, kernel)
            style = (
                (_MORE if text.startswith("+") else _LESS if text.startswith("-") else None)
                if column.is_change
                else None
            )
            segments += [Segment(_aligned(text, column), style), Segment(_GAP)]
        room = width - sum(column.width + len(_GAP) for column in self._columns) - 2
        indent = min(2 * line.indent, int(_MOST_INDENT * max(room, 0)))
        mark = LEAF if tree.is_leaf(node) else OPEN if node.is_open else CLOSED
        name = shortened(clean(tree.text(node)) or "[unknown]", max(room - indent, 8))
        style = _STYLES.get(tree.kind(node), Style())
        if name.endswith("_[k]"):
            style = _WEAK
        segments += [Segment(" " * indent + mark), Segment(name, style + _FOUND if tree.matches(node) else style)]
        return self._line(segments, width)

    def _line(self, segments: list[Segment], width: int) -> Strip:
        return Strip(segments).adjust_cell_length(width).apply_style(self.rich_style)

    # Keys

    def action_move(self, lines: int) -> None:
        """Moves the cursor."""
        self._move_to(self.cursor + lines)

    def action_page(self, pages: int) -> None:
        """Moves the cursor by a page."""
        self._move_to(self.cursor + pages * max(self.size.height - 2, 1))

    def action_end(self, is_last: bool) -> None:
        """Moves the cursor to the first line, or the last."""
        self._move_to(len(self.lines) if is_last else 0)

    def _move_to(self, number: int) -> None:
        self.cursor = max(min(number, len(self.lines) - 1), 0)
        self._show_cursor()

    def action_open(self) -> None:
        """Opens the node, or moves to its first child."""
        if self.line is None or self.line.hidden:
            return
        node = self.line.node
        if not node.is_open:
            self.stalls.open_branch(node)
            self.show_tree()
        elif node.rank:
            self.action_move(1)

    def action_close(self) -> None:
        """Closes the node, or moves to its parent."""
        if self.line is None:
            return
        node = self.line.node
        if node.is_open and node.rank and not self.line.hidden:
            node.is_open = False
            self.show_tree()
        elif node.parent is not None and node.parent.parent is not None:
            self.show_tree(node if self.line.hidden else node.parent)

    def action_turn(self) -> None:
        """Opens or closes the node, or shows more of its siblings."""
        if self.line is None:
            return
        node = self.line.node
        if self.line.hidden:
            self.stalls.more(node)
        elif node.is_open:
            node.is_open = False
        else:
            self.stalls.open_branch(node)
        self.show_tree()

    def action_choose(self) -> None:
        """Says that Enter was pressed."""
        if self.line is not None and self.line.hidden:
            self.action_turn()
        elif self.line is not None:
            self.post_message(self.Chosen(self.line.node))

    def on_click(self, event: events.Click) -> None:
        """Moves the cursor to a line; a second click there opens or closes the node."""
        number = self.scroll_offset.y + event.y - 1
        if event.y == 0 or number >= len(self.lines):
            return
        if number == self.cursor:
            self.action_turn()
        else:
            self._move_to(number)


def _aligned(text: str, column: Column) -> str:
    text = shortened(text, column.width)
    space = " " * (column.width - cell_len(text))
    return space + text if column.is_right else text + space
