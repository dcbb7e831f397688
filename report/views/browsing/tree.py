"""A tree of stalls whose nodes are made when they are opened.

Each sample count of a row and reason is an entry. All entries are kept in one order, in which those of a node are a
range: opening a node sorts its range by the next frame, and sums of nodes are differences of running sums. So a node
costs no memory for its entries, and what is never opened costs nothing. A search opens only what leads to matches.

Samples of a node are an estimate where they were divided between stacks in the node and others (docs/attribution.md).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from iaprof.formats.distinct import distinct_rows
from iaprof.formats.profile import Profile
from iaprof.report.views.browsing.levels import GROUPINGS, NO_FRAME, Level, make_levels

_OF_LAUNCHES = frozenset(("process", "operator", "cpu", "callers"))
_OF_OFFSETS = frozenset(("instruction", "place"))

MOST_CHILDREN = 500
"""So many children of a node are made at once, those with most samples."""
REASON = "reason"
Path = tuple[tuple[str, str], ...]
"""A node, wherever it is: level and text of each node from the root to it."""
_LEVEL = 40  # bits of a frame's number
_Ints = NDArray[np.int64]


class Estimates:
    """The divided entries of a tree, by place: entries of one place are divided among their stacks."""

    def __init__(self, profile: Profile, row: _Ints, reason: NDArray[np.int8], names: Sequence[str]) -> None:
        """Numbers the places.

        Args:
            profile: the stalls.
            row: [entries], the row of each entry.
            reason: [entries], its reason.
            names: the levels of the tree, from its root.
        """
        before = names[: max((at for at, name in enumerate(names) if name in _OF_LAUNCHES), default=0)]
        self._share: NDArray[np.float64] | None = None
        if profile.divided is None or not profile.divided.any() or not _OF_LAUNCHES.intersection(names):
            return
        columns: list[NDArray[Any]] = [profile.places[row]]
        # What is nearer to the root than the stacks is certain: only within it, samples are divided.
        if any(name not in _OF_LAUNCHES and name != REASON for name in before):
            columns.append(profile.code[row])
        if _OF_OFFSETS.intersection(before):
            columns.append(profile.offset[row])
        if REASON in before:
            columns.append(reason)
        self._place = distinct_rows(*columns)[1]
        self._share = (profile.divided / np.maximum(profile.counts.sum(axis=1), 1))[row]
        self.select(np.ones(len(row), bool))

    def select(self, is_selected: NDArray[np.bool_]) -> None:
        """Leaves out entries of some reasons and times, but not of some stacks: bool[entries]."""
        if self._share is not None:
            divided = self._place[(self._share > 0) & is_selected]
            self._in_place = np.bincount(divided, minlength=int(self._place.max(initial=0)) + 1)

    def of(self, entries: _Ints, weight: _Ints) -> int:
        """Samples of a node that are an estimate.

        Args:
            entries: [n], those of the node.
            weight: [entries of the tree], samples that are counted.
        """
        if self._share is None:
            return 0
        entries = entries[(self._share[entries] > 0) & (weight[entries] > 0)]
        places, place_of, here = np.unique(self._place[entries], return_inverse=True, return_counts=True)
        # A node with all entries of a place has their samples for certain.
        is_part = (here < self._in_place[places])[place_of]
        return round(float((self._share[entries] * weight[entries])[is_part].sum()))


@dataclass(eq=False, slots=True)
class Node:
    """A node: the entries of a range whose stacks begin alike."""

    begin: int
    end: int
    level: int  # index of the level of its frame; -1 for the root
    depth: int  # of its frame in the level's list
    frame: int  # number of the frame, in its level
    parent: Node | None
    indent: int  # distance from the root
    is_open: bool = False
    most: int = MOST_CHILDREN  # children that are shown
    children: Children | None = None  # None until it is opened for the first time
    rank: list[Node] = field(default_factory=list)  # the children with most samples, as they are shown
    hidden: int = 0  # other children with samples


@dataclass(eq=False, slots=True)
class Children:
    """A node's children, of which only those that are shown become nodes."""

    begin: _Ints  # [children], the ranges of their entries
    end: _Ints  # [children]
    frame: _Ints  # [children], level << _LEVEL | number of the frame
    made: dict[int, Node] = field(default_factory=dict)


class Line(NamedTuple):
    """A line of the tree as it is shown."""

    node: Node
    indent: int
    hidden: int = 0  # not 0: the line stands for so many hidden children of the node


@dataclass(frozen=True)
class Selection:
    """What of the stalls is counted."""

    reasons: frozenset[str] | None = None  # None: all
    intervals: tuple[int, int] | None = None  # first, and the one after the last; None: all
    text: str = ""  # stacks with a frame that contains this, whatever the case


@dataclass(frozen=True)
class Sums:
    """Samples of a node."""

    reasons: Sequence[str]
    counts: Sequence[tuple[int, ...]]  # by side, by reason
    divided: int = 0  # samples that are divided between stacks in the node and others; 0 with two sides

    @property
    def samples(self) -> tuple[int, ...]:
        """Samples of all reasons, by side."""
        return tuple(map(sum, self.counts))


class Tree:
    """A profile's stalls as a tree. With two sides, interval 0 is before and interval 1 after, as in `difference`."""

    def __init__(
        self,
        profile: Profile,
        grouping: str = "stack",
        is_inverted: bool = False,
        sides: int = 1,
        is_relative: bool = True,
        groupings: Mapping[str, Sequence[str]] = GROUPINGS,
    ) -> None:
        """Makes the root and its children.

        Args:
            profile: the stalls.
            grouping: one of the groupings.
            is_inverted: from the leaves to the root.
            sides: 2 to compare the intervals 0 and 1.
            is_relative: compare shares, not samples.
            groupings: by name, the levels of a tree from its root; "stack" is among them.
        """
        self.groupings = groupings
        self.profile, self.sides, self._is_relative = profile, sides, is_relative
        self._row, reason = np.nonzero(profile.counts)
        self._reason = reason.astype(np.int8)
        self._all = profile.counts[self._row, reason].astype(np.int64)
        self._side = profile.interval[self._row] if sides > 1 else None
        self._order = np.arange(len(self._row))
        self._selection = Selection()
        self._by_name = False
        self._weight = self._all
        self.sought = ""  # what is searched for
        self._found: NDArray[np.bool_] | None = None  # the entries with that
        self._sums_of: dict[tuple[int, int], Sums] = {}
        self._levels: list[Level | None] = []
        self._whole: list[Level | None] | None = None  # those of whole stacks, once they are needed
        self.group(grouping, is_inverted)

    def group(self, grouping: str, is_inverted: bool) -> None:
        """Makes another tree of the same stalls."""
        self.grouping, self.is_inverted = grouping, is_inverted
        names = self.groupings[grouping]
        made: list[Level | None] = list(make_levels(self.profile, names, is_inverted))
        names = names[::-1] if is_inverted else names
        if REASON in names:
            made.insert(names.index(REASON), None)
        self._levels = made
        self._estimates = Estimates(self.profile, self._row, self._reason, names)
        self.root = Node(0, len(self._row), -1, 0, NO_FRAME, None, 0, is_open=True)
        self._found = None
        self._sum()
        self.open(self.root)
        if self.sought:
            self.search(self.sought)

    # Nodes

    def open(self, node: Node) -> None:
        """Shows a node's children; makes them when it is opened for the first time."""
        node.is_open = True
        if node.children is None:
            node.children = self._children(node)
            self._rank(node)

    def open_branch(self, node: Node) -> None:
        """Opens a node, and below it all that have no siblings."""
        self.open(node)
        while len(node.rank) == 1 and not node.hidden:
            node = node.rank[0]
            self.open(node)

    def open_hottest(self, node: Node) -> Node:
        """Opens a node and the child with most samples, and so on; returns the last one."""
        while True:
            self.open(node)
            if not node.rank:
                return node
            node = max(node.rank, key=lambda child: sum(self.totals(child)))

    def more(self, node: Node) -> None:
        """Shows more of a node's children."""
        node.most *= 4
        self._rank(node)

    def is_leaf(self, node: Node) -> bool:
        """Whether a node has no children, as far as that is known without making them."""
        if node.children is not None:
            return not len(node.children.begin)
        return node.level == len(self._levels) - 1 and self._levels[node.level] is None

    def text(self, node: Node) -> str:
        """The text of a node's frame, not cleaned; "" for the root."""
        if node.level < 0:
            return ""
        level = self._levels[node.level]
        return self.profile.reasons[node.frame] if level is None else level.text(node.frame)

    def kind(self, node: Node) -> str:
        """The name of the level of a node's frame; "" for the root."""
        level = self._levels[node.level] if node.level >= 0 else None
        return level.name if level is not None else REASON if node.level >= 0 else ""

    def path(self, node: Node) -> Path:
        """What `find` finds this node by, in this tree or another of the same grouping."""
        return () if node.parent is None else (*self.path(node.parent), (self.kind(node), self.text(node)))

    def find(self, path: Path) -> tuple[Node, bool]:
        """Opens what leads to a node; returns it, or the last one on the way that there is, and whether it is it."""
        node = self.root
        for each in path:
            self.open(node)
            found = next((child for child in node.rank if (self.kind(child), self.text(child)) == each), None)
            if found is None:
                return node, False
            node = found
        return node, True

    def open_paths(self) -> list[Path]:
        """The open nodes, parents before children."""
        return [self.path(line.node) for line in self.visible() if line.node.is_open and not line.hidden]

    def kernel_rows(self, node: Node) -> _Ints:
        """The rows of the profile that have samples in a node, ascending: int64[n]."""
        entries = self._order[node.begin : node.end]
        return np.unique(self._row[entries[self._weight[entries] > 0]])

    def visible(self) -> list[Line]:
        """The nodes below open ones, in their order; after a node's last child a line for those that are hidden."""
        found: list[Line] = []
        waiting = self._lines_below(self.root, 0)
        while waiting:
            line = waiting.pop()
            found.append(line)
            if line.node.is_open and not line.hidden:
                waiting += self._lines_below(line.node, line.indent + 1)
        return found

    def _lines_below(self, node: Node, indent: int) -> list[Line]:
        """The lines of a node's children, the last first. A child with all of the node's samples is not indented."""
        if len(node.rank) == 1 and node.parent is not None and self.totals(node.rank[0]) == self.totals(node):
            indent -= 1
        lines = [Line(child, indent) for child in node.rank]
        return [*([Line(node, indent, node.hidden)] if node.hidden else []), *reversed(lines)]

    def _children(self, node: Node) -> Children:
        entries = self._order[node.begin : node.end]
        key = self._next_frames(node, entries)
        if len(key) and not (key == key[0]).all():
            order = np.argsort(key, kind="stable")
            key = key[order]
            self._reorder(node, order)
        begin = np.flatnonzero(np.diff(key, prepend=NO_FRAME))  # after the stacks that end here, which are first
        end = np.append(begin[1:], len(key))[: len(begin)]
        return Children(node.begin + begin, node.begin + end, key[begin])

    def _child(self, node: Node, place: int) -> Node:
        children = node.children
        assert children is not None
        if place not in children.made:
            level, frame = divmod(int(children.frame[place]), 1 << _LEVEL)
            depth = node.depth + 1 if level == node.level else 0
            begin, end = int(children.begin[place]), int(children.end[place])
            children.made[place] = Node(begin, end, level, depth, frame, node, node.indent + 1)
        return children.made[place]

    def selected(self) -> Profile:
        """The profile without the counts that are not selected."""
        counts = np.zeros_like(self.profile.counts)
        counts[self._row, self._reason] = self._weight
        return replace(self.profile, counts=counts)

    def _next_frames(self, node: Node, entries: _Ints) -> _Ints:
        """What follows a node in the stacks of some entries: level << _LEVEL | number of the frame, or NO_FRAME."""
        rows = self._row[entries]
        found = np.full(len(entries), NO_FRAME)
        left = np.arange(len(entries))
        level, depth = (node.level, node.depth + 1) if node.level >= 0 else (0, 0)
        while len(left) and level < len(self._levels):
            of = self._levels[level]
            if of is not None:
                frames = of.frames_at(rows[left], depth)
            elif depth == 0:
                frames = self._reason[entries[left]].astype(np.int64)
            else:
                frames = np.full(len(left), NO_FRAME)
            has = frames != NO_FRAME
            found[left[has]] = (level << _LEVEL) | frames[has]
            left = left[~has]
            level, depth = level + 1, 0
        return found

    def _reorder(self, node: Node, order: _Ints) -> None:
        self._order[node.begin : node.end] = self._order[node.begin : node.end][order]
        entries = self._order[node.begin : node.end]
        for upto, values in self._running():
            upto[node.begin + 1 : node.end + 1] = upto[node.begin] + np.cumsum(values[entries])

    # Sums

    def select(self, selection: Selection) -> None:
        """Counts only some of the stalls. Nodes stay open; those without samples are left out."""
        self._selection = selection
        self._sum()
        if self.sought:
            self.search(self.sought)
        for node in self._made():
            self._rank(node)

    @property
    def selection(self) -> Selection:
        """What is counted."""
        return self._selection

    def sort(self, by_name: bool) -> None:
        """Sorts the children of each node by their texts instead of their samples."""
        self._by_name = by_name
        for node in self._made():
            self._rank(node)

    @property
    def is_by_name(self) -> bool:
        """Whether children are sorted by their texts."""
        return self._by_name

    def totals(self, node: Node) -> tuple[int, ...]:
        """Samples of a node, by side."""
        return tuple(int(upto[node.end] - upto[node.begin]) for upto in self._upto)

    def sums(self, node: Node) -> Sums:
        """Samples of a node by reason."""
        key = node.begin, node.end
        if key not in self._sums_of:
            entries = self._order[node.begin : node.end]
            number = self._reason[entries].astype(np.int64)
            most = len(self.profile.reasons)
            if self._side is not None:
                number += self._side[entries] * most
            counts = np.bincount(number, self._weight[entries], self.sides * most).astype(np.int64)
            rows = counts.reshape(self.sides, most).tolist()
            divided = 0 if self.sides > 1 else self._estimates.of(entries, self._weight)
            self._sums_of[key] = Sums(self.profile.reasons, tuple(map(tuple, rows)), divided)
        return self._sums_of[key]

    def _sum(self) -> None:
        """Applies the selection: which entries count, and the running sums."""
        self._weight, is_counted = self._all, np.ones(len(self._row), bool)
        wanted, profile = self._selection, self.profile
        if wanted.reasons is not None:
            is_counted &= np.array([name in wanted.reasons for name in profile.reasons], bool)[self._reason]
        if wanted.intervals is not None:
            interval = profile.interval[self._row]
            is_counted &= (interval >= wanted.intervals[0]) & (interval < wanted.intervals[1])
        self._estimates.select(is_counted)
        if wanted.text:
            if self._whole is None:
                self._whole = [*make_levels(profile, self.groupings["stack"]), None]
            is_counted &= self._entries_with(wanted.text, self._whole)
        if not is_counted.all():
            self._weight = np.where(is_counted, self._all, 0)
        self._of_side = [
            self._weight if self._side is None else np.where(self._side == side, self._weight, 0)
            for side in range(self.sides)
        ]
        self._upto = [np.concatenate(([0], np.cumsum(values[self._order]))) for values in self._of_side]
        self._sums_of = {}

    def _running(self) -> Iterator[tuple[_Ints, NDArray[np.int64]]]:
        """Running sums in the order of the entries, and what they are sums of, which has the order of the profile."""
        yield from zip(self._upto, self._of_side, strict=True)
        if self._found is not None:
            yield self._found_upto, self._found.astype(np.int64)

    def _made(self) -> Iterator[Node]:
        """The nodes whose children were made."""
        waiting = [self.root]
        while waiting:
            node = waiting.pop()
            if node.children is not None:
                yield node
                waiting += node.children.made.values()

    def _rank(self, node: Node) -> None:
        """Chooses which of a node's children are shown, and their order."""
        children = node.children
        assert children is not None
        samples = [upto[children.end] - upto[children.begin] for upto in self._upto]
        size = samples[0].astype(float)
        if self.sides > 1:  # their change
            before, after = (max(total, 1) if self._is_relative else 1 for total in self.totals(self.root))
            size = np.abs(samples[1] / after - samples[0] / before)
        has_samples = np.logical_or.reduce([each > 0 for each in samples])
        places = np.flatnonzero(has_samples)
        places = places[np.argsort(-size[places], kind="stable")]
        chosen, others = places[: node.most], places[node.most :]
        if self._found is not None:
            is_match = self._found_upto[children.end[others]] > self._found_upto[children.begin[others]]
            chosen = np.concatenate((chosen, others[is_match][: node.most]))
        node.hidden = len(places) - len(chosen)
        shown = [(-size[place], self._child(node, place)) for place in chosen.tolist()]
        shown.sort(key=lambda each: (0 if self._by_name else each[0], self.text(each[1])))
        node.rank = [child for _, child in shown]

    # Searching

    def search(self, text: str) -> int:
        """Begins to search for stacks with a frame that contains `text`; returns their samples."""
        self._found = self._entries_with(text, self._levels) & (self._weight > 0)
        self._found_upto = np.concatenate(([0], np.cumsum(self._found[self._order])))
        self.sought = text
        for node in self._made():
            self._rank(node)
        return int(self._weight[self._found].sum())

    def matches(self, node: Node) -> bool:
        """Whether a node's text is what is searched for."""
        return self._found is not None and self.sought.casefold() in self.text(node).casefold()

    @property
    def is_searched(self) -> bool:
        """Whether something is searched for."""
        return self._found is not None

    def has_match(self, node: Node) -> bool:
        """Whether a node or one below it matches, as far as its stacks tell."""
        return bool(self._found_upto[node.end] > self._found_upto[node.begin])

    def children(self, node: Node) -> list[Node]:
        """The children of a node that are shown once it is open."""
        is_open = node.is_open
        self.open(node)
        node.is_open = is_open
        return node.rank

    def _entries_with(self, text: str, levels: Sequence[Level | None]) -> NDArray[np.bool_]:
        """Whether an entry's frames in some levels contain a text: bool[entries]. A level of None is the reasons'."""
        sought = text.casefold()

        def is_wanted(frame: str) -> bool:
            return sought in frame.casefold()

        found = np.zeros(len(self._row), bool)
        for level in levels:
            if level is not None:
                found |= level.rows_with(is_wanted)[self._row]
            else:
                found |= np.array([is_wanted(name) for name in self.profile.reasons], bool)[self._reason]
        return found


def next_match(tree: Tree, after: Node | None, is_backward: bool = False) -> Node | None:
    """Finds the next node that matches, or the one before, and opens what leads to it; None if there is none.

    Args:
        tree: in which something is searched for.
        after: where to begin; None for the begin, or the end.
        is_backward: search towards the begin.
    """
    if not tree.is_searched:
        return None
    found = _before(tree, after) if is_backward else _after(tree, after or tree.root)
    above = found.parent if found is not None else None
    while above is not None:
        tree.open(above)
        above = above.parent
    return found


def _after(tree: Tree, node: Node) -> Node | None:
    found = _first(tree, tree.children(node)) if tree.has_match(node) else None
    while found is None and node.parent is not None:
        found = _first(tree, node.parent.rank[_place(node) + 1 :])
        node = node.parent
    return found


def _before(tree: Tree, node: Node | None) -> Node | None:
    if node is None:
        return _last(tree, tree.root.rank)
    while node.parent is not None:
        found = _last(tree, node.parent.rank[: _place(node)])
        if found is not None:
            return found
        node = node.parent
        if node.parent is not None and tree.matches(node):
            return node
    return None


def _first(tree: Tree, nodes: Sequence[Node]) -> Node | None:
    """The first match in some nodes and below them."""
    waiting = list(reversed(nodes))
    while waiting:
        node = waiting.pop()
        if tree.has_match(node):
            if tree.matches(node):
                return node
            waiting += reversed(tree.children(node))
    return None


def _last(tree: Tree, nodes: Sequence[Node]) -> Node | None:
    """The last match in some nodes and below them."""
    waiting = [(node, False) for node in nodes]
    while waiting:
        node, are_children_done = waiting.pop()
        if are_children_done:
            if tree.matches(node):
                return node
        elif tree.has_match(node):
            waiting.append((node, True))
            waiting += ((child, False) for child in tree.children(node))
    return None


def _place(node: Node) -> int:
    """A node's place among its parent's children."""
    assert node.parent is not None
    return node.parent.rank.index(node)
