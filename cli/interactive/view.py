"""The application, and its main screen: a tree of stalls with its filters, and what keys do."""

from __future__ import annotations

import math
import os
import re
import signal
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import ClassVar

import numpy as np
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.screen import Screen
from textual.widgets import Footer, Static

from iaprof.basics.clean import clean
from iaprof.basics.errors import UsageError
from iaprof.basics.quantities import percent
from iaprof.cli.interactive.contents import SAMPLES, Contents
from iaprof.cli.interactive.dialogs import Prompt, ReasonChooser, TextScreen
from iaprof.cli.interactive.tree_table import TreeTable
from iaprof.cli.terminal.table import shortened
from iaprof.formats.profile import Profile, samples_text
from iaprof.report.join.selection import TimeRange
from iaprof.report.views.browsing.levels import GROUPINGS
from iaprof.report.views.browsing.tree import REASON, Node, Selection, Tree, next_match

_GROUPINGS = {
    "stack": "process, stack, kernel, instruction, reason",
    "kernel": "kernel, inlined function, line, instruction, reason",
    "launcher": "kernel, and who launched it: the innermost frame first",
    "process": "process, kernel, line, instruction, reason",
    "line": "source line, kernel, instruction, reason",
    "instruction": "instructions of all kernels, and who launched them",
    "reason": "reason, kernel, line, instruction",
}
_OF_SLICES = {
    "stack": "rank, thread or category, slices and those within them",
    "slice": "slices by their own time, and the slices around them",
    "rank": "rank, slice",
    "category": "category, slice",
}
_BEFORE = (
    ("Up Down k j", "move by a line; PageUp, PageDown, Home and End by more"),
    ("Right l +", "open the line, and each only child below it"),
    ("Left h -", "close the line, or go to its parent"),
    ("Space", "open or close the line"),
    ("e", "open the largest child, then its largest, down to a leaf"),
    ("c", "close everything"),
    ("Enter", "annotate the kernel: its instructions with their stalls"),
)
_AFTER = (
    ("Tab", "the next of these trees; Shift-Tab the one before"),
    ("i", "invert the tree: from the leaves to the root"),
    ("o", "order by samples or by name"),
    ("/", "search: go to the first name with a text; n next, N previous"),
    ("f", "filter: only stacks with a text in a name"),
    ("r", "only some stall reasons, or some categories of slices"),
    ("t", "only a part of the recording"),
    ("x", "clear all filters"),
    ("?", "this list"),
    ("q Ctrl-C", "quit; Escape or q leaves a list like this one"),
)


def keys_for(groupings: Sequence[str], width: int) -> list[str]:
    """The keys of a view with these trees, as lines."""
    texts = _GROUPINGS if "kernel" in groupings else _OF_SLICES
    keys = (*_BEFORE, *((str(number), texts[name]) for number, name in enumerate(groupings, 1)), *_AFTER)
    return [f"  {key:12} {what}"[:width] for key, what in keys]


_TERMINAL = 0  # descriptor that textual reads keys from
_LOOK_S = 1.0  # how often to look whether it is still a terminal
_BARS = " ▁▂▃▄▅▆▇█"
_NARROW = 8  # cells of a time line that is worth drawing


class View(App[None]):
    """The interactive view."""

    CSS = """
    .title { background: $primary; color: $text; padding: 0 1; height: 1; }
    #state { height: auto; max-height: 2; padding: 0 1; color: $text-muted; }
    #time { height: 1; padding: 0 1; }
    #name { height: auto; max-height: 3; padding: 0 1; background: $surface; }
    TreeTable, Lines { height: 1fr; overflow-x: hidden; overflow-y: scroll; scrollbar-size-vertical: 1; }
    """
    TITLE = "iaprof"
    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar[list[BindingType]] = [Binding("ctrl+c", "quit", show=False, priority=True)]

    def __init__(self, contents: Contents) -> None:
        """Args: what to show."""
        super().__init__()
        self.stalls = StallsScreen(contents)

    def on_mount(self) -> None:
        """Begins to look whether the terminal is still there: textual reads the end of one again and again."""
        if os.isatty(_TERMINAL):
            self.set_interval(_LOOK_S, _end_without_terminal)

    def get_default_screen(self) -> StallsScreen:
        """The main screen."""
        return self.stalls


class StallsScreen(Screen[None]):
    """The tree with its filters."""

    BINDINGS: ClassVar[list[BindingType]] = [
        *(Binding(str(number), f"group({number})", show=False) for number in range(1, len(GROUPINGS) + 1)),
        Binding("tab", "next_grouping(1)", "Group by", priority=True),
        Binding("shift+tab", "next_grouping(-1)", show=False, priority=True),
        Binding("i", "invert", show=False),
        Binding("o", "sort", show=False),
        Binding("e", "hottest", show=False),
        Binding("c", "close_all", show=False),
        Binding("slash", "search", "Search", key_display="/"),
        Binding("n", "next(False)", show=False),
        Binding("N", "next(True)", show=False),
        Binding("f", "filter", "Filter"),
        Binding("r", "reasons", "Reasons"),
        Binding("t", "time", "Time"),
        Binding("x", "clear", show=False),
        Binding("question_mark", "help", "Keys", key_display="?"),
        Binding("q", "app.quit", "Quit"),
    ]

    def __init__(self, contents: Contents) -> None:
        """Args: what to show."""
        super().__init__()
        self.contents = contents
        self.stalls = _tree_of(contents, contents.grouping, contents.is_inverted)
        self.table = TreeTable(contents, self.stalls)
        self._said = ""  # about the last search, until the next key

    def compose(self) -> ComposeResult:
        """The title, the filters, the tree, the whole name of the line with the cursor, and the keys."""
        yield Static("", classes="title", id="title", markup=False)
        yield Static("", id="time", markup=False)
        yield Static("", id="state", markup=False)
        yield self.table
        yield Static("", id="name", markup=False)
        yield Footer(show_command_palette=False)

    def on_mount(self) -> None:
        """Opens the first branch."""
        if self.stalls.root.rank:
            self.stalls.open_branch(self.stalls.root.rank[0])
        self.table.focus()
        self._show()

    def show_contents(self, contents: Contents) -> None:
        """Shows other stalls in the same way."""
        before = self.stalls
        tree = _tree_of(contents, before.grouping, before.is_inverted)
        tree.select(before.selection)
        tree.sort(before.is_by_name)
        if before.sought:
            tree.search(before.sought)
        self.contents, self.stalls = contents, tree
        self.table.show_contents(contents, tree)
        self._show(self.table.line.node if self.table.line else None)

    def _show(self, at: Node | None = None) -> None:
        self.table.show_tree(at)
        contents, width = self.contents, self.size.width
        self.query_one("#title", Static).update(shortened(clean(contents.title), max(width - 2, 8)))
        self.query_one("#state", Static).update(self._state())
        time = self.query_one("#time", Static)
        time.display = len(contents.profile.intervals) > 1 and contents.sides == 1 and width >= _NARROW
        if time.display:
            time.update(_time_line(self.stalls, contents.interval_s, width - 2))

    def _state(self) -> str:
        """What is shown: grouping, order, filters, costs."""
        tree, selection, measure = self.stalls, self.stalls.selection, self.contents.measure
        totals = [measure.text(each) for each in tree.totals(tree.root)]
        parts = [f"{totals[0]} {measure.unit}" + (f" before, {totals[1]} after" if len(totals) > 1 else "")]
        if selection != Selection():
            parts[0] += f" of {measure.text(int(tree.profile.counts.sum()))}"
        elif len(totals) == 1 and measure is SAMPLES:
            parts = _about_samples(tree.profile)
        if selection.reasons is not None:
            chosen = clean(", ".join(sorted(selection.reasons))) or "none"
            parts.append(f"{'reasons' if measure.part == 'reason' else 'categories'}: {chosen}")
        if selection.intervals is not None:
            first, last = (each * self.contents.interval_s for each in selection.intervals)
            parts.append(f"time: {first:g} s to {last:g} s")
        if selection.text:
            parts.append(f"with '{clean(selection.text)}'")
        if tree.is_by_name:
            parts.append("by name")
        if self.contents.costs:
            parts.append(self.contents.costs)
        if self._said:
            parts.append(self._said)
        return "; ".join(parts)

    def on_tree_table_moved(self) -> None:
        """Shows the whole name of the line with the cursor."""
        line = self.table.line
        node = line.node if line else None
        text = ""
        if node is not None and not (line and line.hidden):
            kind = self.stalls.kind(node)
            text = clean(f"{self.contents.measure.part if kind == REASON else kind}: {self.stalls.text(node)}")
        self.query_one("#name", Static).update(text)

    def on_tree_table_chosen(self, message: TreeTable.Chosen) -> None:
        """Annotates the kernel of a node, or opens it if it has several."""
        kernels = self._kernels(message.node)
        if len(kernels) != 1 or self.contents.listing is None:
            self.table.action_turn()
            return
        make = partial(self.contents.listing, self.stalls.selected(), kernels[0])
        first = partial(_line_of, self._offset(message.node))
        self.app.push_screen(TextScreen(shortened(clean(kernels[0]), max(self.size.width - 2, 8)), make, first))

    def _kernels(self, node: Node) -> list[str]:
        """The names of the kernels that have samples in a node."""
        profile = self.contents.profile
        found = np.unique(profile.kernel[self.stalls.kernel_rows(node)]).tolist()
        kernels = [profile.kernels[each] for each in found]
        return list(dict.fromkeys(kernel.symbol for kernel in kernels if kernel is not None))

    def _offset(self, node: Node) -> int | None:
        """The offset of the only instruction of a node; None if it has several."""
        offsets = np.unique(self.contents.profile.offset[self.stalls.kernel_rows(node)])
        return int(offsets[0]) if len(offsets) == 1 else None

    # Keys

    def action_group(self, number: int) -> None:
        """Shows another tree: that with a number, from 1 on."""
        names = list(self.stalls.groupings)
        if number > len(names):
            self.app.bell()
            return
        self.stalls.group(names[number - 1], self.stalls.is_inverted)
        self._show_anew()

    def action_next_grouping(self, step: int) -> None:
        """Shows the next tree, or the one before."""
        names = list(self.stalls.groupings)
        self.action_group((names.index(self.stalls.grouping) + step) % len(names) + 1)

    def action_invert(self) -> None:
        """Turns the tree around."""
        self.stalls.group(self.stalls.grouping, not self.stalls.is_inverted)
        self._show_anew()

    def _show_anew(self) -> None:
        if self.stalls.root.rank:
            self.stalls.open_branch(self.stalls.root.rank[0])
        self._show(self.stalls.root.rank[0] if self.stalls.root.rank else None)

    def action_sort(self) -> None:
        """Sorts by samples, or by name."""
        self.stalls.sort(not self.stalls.is_by_name)
        self._show(self.table.line.node if self.table.line else None)

    def action_hottest(self) -> None:
        """Opens what has most samples, from the line with the cursor on."""
        if self.table.line is not None:
            self._show(self.stalls.open_hottest(self.table.line.node))

    def action_close_all(self) -> None:
        """Closes all nodes."""
        for line in self.stalls.visible():
            line.node.is_open = False
        self._show()

    def action_search(self) -> None:
        """Asks for a text, and goes to the first line that contains it."""
        measure = self.contents.measure

        def found(text: str | None) -> None:
            if text:
                samples = self.stalls.search(text)
                self._said = (
                    f"'{clean(text)}' is in stacks with {measure.text(samples)} {measure.unit}: n and N"
                    if samples
                    else f"no '{clean(text)}'"
                )
                self._go_to(next_match(self.stalls, None))

        self.app.push_screen(Prompt("Search for a part of a name:"), found)

    def action_next(self, is_backward: bool) -> None:
        """Goes to the next line that contains what is searched for, or the one before."""
        line = self.table.line
        if line is not None:
            self._go_to(next_match(self.stalls, line.node, is_backward))

    def _go_to(self, node: Node | None) -> None:
        if node is None:
            self.app.bell()
        self._show(node)

    def _select(self, selection: Selection) -> None:
        node = self.table.line.node if self.table.line else None
        self.stalls.select(selection)
        self._show(node)

    def action_filter(self) -> None:
        """Asks for a text that stacks must contain."""

        def chosen(text: str | None) -> None:
            if text is not None:
                self._select(replace(self.stalls.selection, text=text))

        self.app.push_screen(
            Prompt("Only stacks with this in a name (empty: all):", self.stalls.selection.text), chosen
        )

    def action_reasons(self) -> None:
        """Asks for reasons."""
        profile = self.contents.profile
        there = [
            (name, self.contents.measure.text(samples))
            for name, samples in zip(profile.reasons, profile.counts.sum(axis=0).tolist(), strict=True)
            if samples
        ]
        names = frozenset(name for name, _ in there)

        def chosen(reasons: frozenset[str] | None) -> None:
            if reasons is not None:
                self._select(replace(self.stalls.selection, reasons=None if reasons == names else reasons))

        self.app.push_screen(ReasonChooser(there, self.stalls.selection.reasons or names), chosen)

    def action_time(self) -> None:
        """Asks for a range of time."""
        intervals = len(self.contents.profile.intervals)
        if self.contents.sides > 1 or intervals < 2:
            self.notify(self.contents.measure.without_times, markup=False)
            return

        def chosen(text: str | None) -> None:
            if text is not None:
                some = self._intervals(text) if text.strip() else None
                self._select(replace(self.stalls.selection, intervals=some))

        question = (
            f"A part of the recording, such as 1s-10s or 10%-20% (empty: all); steps of {self.contents.interval_s:g} s:"
        )
        self.app.push_screen(
            Prompt(question, check=lambda text: self._intervals(text) if text.strip() else None), chosen
        )

    def _intervals(self, text: str) -> tuple[int, int]:
        """The intervals of a range of time; UsageError if the text is none."""
        count, length = len(self.contents.profile.intervals), self.contents.interval_s
        chosen = TimeRange.parse(text).in_seconds(round(count * length * 1e9))
        first = min(int(chosen.begin / length + 1e-9), count)
        last = count if chosen.end >= count * length else math.ceil(chosen.end / length - 1e-9)
        if first >= count:
            raise UsageError(f"the recording ends at {count * length:g} s")
        return first, min(max(last, first + 1), count)

    def action_clear(self) -> None:
        """Clears all filters."""
        self._said = ""
        self._select(Selection())

    def action_help(self) -> None:
        """Shows the keys."""
        self.app.push_screen(TextScreen("Keys", partial(keys_for, list(self.stalls.groupings))))


def _end_without_terminal() -> None:
    """Ends the process as SIGHUP does, which only a terminal that controls a session sends when it goes."""
    if not os.isatty(_TERMINAL):
        if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # as nohup does
            signal.signal(signal.SIGHUP, signal.SIG_DFL)
        signal.raise_signal(signal.SIGHUP)


def _tree_of(contents: Contents, grouping: str, is_inverted: bool) -> Tree:
    groupings = contents.measure.groupings
    return Tree(contents.profile, grouping, is_inverted, contents.sides, contents.is_relative, groupings)


def _about_samples(profile: Profile) -> list[str]:
    """How many samples there are, and which shares of them were active, and are divided among stacks."""
    samples, divided = int(profile.counts.sum()), profile.divided_samples
    texts = [samples_text(samples, profile.active)]
    return [*texts, f"{percent(divided / samples)} divided among stacks: estimates"] if divided else texts


def _time_line(tree: Tree, interval_s: float, width: int) -> str:
    """Samples by time as bars; what is not selected is a dot."""
    profile = tree.profile
    count = len(profile.intervals)
    samples = np.bincount(profile.interval, profile.counts.sum(axis=1), count)
    label = f" {count * interval_s:g} s"
    cells = min(count, width - len(label))
    cell_of = np.arange(count) * cells // count
    heights = np.bincount(cell_of, samples, cells)
    levels = np.ceil(heights / max(heights.max(), 1) * (len(_BARS) - 1)).astype(int).tolist()
    first, last = tree.selection.intervals or (0, count)
    chosen = set(cell_of[first:last].tolist())
    return "".join(_BARS[level] if cell in chosen else "·" for cell, level in enumerate(levels)) + label


def _line_of(offset: int | None, lines: Sequence[str]) -> int:
    """The number of an annotated kernel's line: that of an offset, or else the hottest one."""
    mark = re.compile(r">\s+0x[0-9a-f]+  " if offset is None else rf"[ >]\s*{offset:#x}  ")
    return next((number for number, line in enumerate(lines) if mark.search(line)), 0)
