"""Stacks as a tree, for flame graphs, for formats with tables of stacks, and for the viewers of other programs.

No Python runs per row: each component of a stack is stored once, and advancing all rows by one frame takes a few
operations on whole columns.

Where samples were divided among the stacks that launched a kernel at about the same time, the share of each is an
estimate. How many samples a frame has is certain where all stacks among which they were divided run through it, as
through `main`. docs/attribution.md says how samples are divided.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from iaprof.formats.distinct import distinct_rows, numbered
from iaprof.formats.export import CpuSamples, Export
from iaprof.formats.profile import DEFAULT_COMPONENTS, CodeKind, Launch, Profile, StackOptions
from iaprof.formats.stacks.frame_lists import StackColumn, cpu_columns, is_separator, stack_columns
from iaprof.formats.stacks.frames import CPU_COMPONENTS, GPU_COMPONENTS, UNKNOWN_FRAME, Frame

NO_REASON = -1
_Ints = NDArray[np.int64]
_Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Tree:
    """A call tree: parents before children; node 0 is the root and has no frame."""

    frames: Sequence[Frame]
    parent: _Ints  # [nodes]; -1 for the root
    frame: _Ints  # [nodes], index into frames; -1 for the root
    launches: Sequence[Launch | None]
    devices: Sequence[str]
    node: _Ints  # [rows], the last node of a row's stack
    launch: _Ints  # [rows], index into launches
    device: _Ints  # [rows], index into devices
    interval: _Ints  # [rows]
    reason: _Ints  # [rows], index into the profile's reasons; NO_REASON for CPU samples
    count: _Ints  # [rows], samples
    divided: NDArray[np.float64] | None = None  # [rows], samples of which several stacks can be the launch's; None: no
    place: _Ints = field(default_factory=lambda: np.empty(0, np.int64))
    """[rows]: divided samples of one number are divided among their stacks."""

    def own(self) -> _Ints:
        """Samples of the stacks that end in each node: int64[nodes]."""
        return np.bincount(self.node, self.count, len(self.parent)).astype(np.int64)

    def total(self) -> _Ints:
        """Samples of the stacks through each node: int64[nodes]."""
        return self.with_callees(self.own())

    def with_callees(self, values: NDArray[Any]) -> NDArray[Any]:
        """Sums over each node and its descendants.

        Args:
            values: [nodes, ...].
        """
        found = values.copy()
        depth = self.depth()
        order = np.argsort(depth, kind="stable")
        ends = np.cumsum(np.bincount(depth))
        for level in range(len(ends) - 1, 0, -1):
            nodes = order[ends[level - 1] : ends[level]]
            np.add.at(found, self.parent[nodes], found[nodes])
        return found

    def depth(self) -> _Ints:
        """The distance of each node from the root: int64[nodes]."""
        at = np.maximum(self.parent, 0)
        found = (self.parent >= 0).astype(np.int64)
        while at.any():  # doubles the distance each time, as hostile stacks have thousands of frames
            found += found[at]
            at = at[at]
        return found


def stall_tree(profile: Profile, options: StackOptions, key: Callable[[Frame], Hashable]) -> Tree:
    """The call tree of a profile's stalls, without the separator that folded stacks have.

    Args:
        profile: the profile.
        options: the stack options; applying `percent_limit` is up to the writer.
        key: frames with equal keys are merged.
    """
    row, reason, counts = profile.entries()
    columns = [each for each in stack_columns(profile, options, row, reason) if not is_separator(each[0])]
    rest = (profile.launch[row], profile.device[row], profile.interval[row], reason, counts)
    tree = _tree(columns, options.inverted, key, profile.launches, profile.devices, rest)
    if profile.divided is None:
        return tree
    share = profile.divided / np.maximum(profile.counts.sum(axis=1), 1)
    return replace(tree, divided=share[row] * counts, place=_places(profile, options, row, reason))


@dataclass(frozen=True, eq=False)
class TreeByTime:
    """A tree with a row for each stack and reason, whatever the interval, and the samples of these rows by interval."""

    tree: Tree  # its intervals mean nothing
    interval: _Ints  # [entries]
    row: _Ints  # [entries], of the tree
    count: _Ints  # [entries], samples
    divided: _Floats | None = None  # [entries], as those of a tree

    @classmethod
    def of_rows(cls, tree: Tree) -> TreeByTime:
        """Makes one of a tree with an interval for each of its rows."""
        return cls(tree, tree.interval, np.arange(len(tree.interval)), tree.count, tree.divided)


def stall_tree_by_time(
    profile: Profile, options: StackOptions, key: Callable[[Frame], Hashable]
) -> tuple[TreeByTime, _Ints]:
    """What `stall_tree` returns, by time. It is smaller, as most stacks are those of many intervals.

    Returns:
        The tree, and for each of its rows a row of the profile that has its stack: int64[rows].
    """
    entry, reason, counts = profile.entries()
    first, stack = distinct_rows(
        profile.launch,
        profile.kernel,
        profile.code,
        profile.places,
        *(getattr(profile, each) for each in ("interval", "offset") if each in options.components),
    )
    reasons = len(profile.reasons)
    stacks, number = numbered(stack[entry] * reasons + reason)
    row, its_reason = first[stacks // reasons], stacks % reasons
    columns = [each for each in stack_columns(profile, options, row, its_reason) if not is_separator(each[0])]
    samples = np.bincount(number, counts, len(stacks)).astype(np.int64)
    rest = (profile.launch[row], profile.device[row], profile.interval[row], its_reason, samples)
    tree = _tree(columns, options.inverted, key, profile.launches, profile.devices, rest)
    divided = None
    if profile.divided is not None:
        divided = (profile.divided / np.maximum(profile.counts.sum(axis=1), 1))[entry] * counts
        of_rows: _Floats = np.bincount(number, divided, len(stacks)).astype(np.float64)
        tree = replace(tree, divided=of_rows, place=_places(profile, options, row, its_reason))
    return TreeByTime(tree, profile.interval[entry], number, counts, divided), row


def _places(profile: Profile, options: StackOptions, row: _Ints, reason: _Ints) -> _Ints:
    """The number of what is divided among launches: `places`, with all that the tree has nearer to its root."""
    walked = options.components[::-1] if options.inverted else options.components
    before = walked[: max((at for at, each in enumerate(walked) if each in CPU_COMPONENTS), default=0)]
    columns: list[NDArray[Any]] = [profile.places[row]]
    if any(each in GPU_COMPONENTS for each in before):
        columns.append(profile.code[row])
    if "offset" in before:
        columns.append(profile.offset[row])
    if "reason" in before:
        columns.append(reason)
    return distinct_rows(*columns)[1] if len(columns) > 1 and len(row) else columns[0]


def cpu_tree(samples: CpuSamples, options: StackOptions, key: Callable[[Frame], Hashable]) -> Tree:
    """The call tree of CPU samples, with the chosen components that CPU samples have."""
    columns = [cpu_columns(samples, options)]
    none = np.zeros(len(samples.launch), np.int64)
    rest = (samples.launch, none, samples.interval, none + NO_REASON, samples.count)
    return _tree(columns, options.inverted, key, samples.launches, ("",), rest)


def _tree(
    columns: Sequence[StackColumn],
    inverted: bool,
    key: Callable[[Frame], Hashable],
    launches: Sequence[Launch | None],
    devices: Sequence[str],
    rest: tuple[_Ints, _Ints, _Ints, _Ints, _Ints],
) -> Tree:
    numbers = _FrameNumbers(key)
    frames = numbers.frames
    parents, frame_of = [np.array([-1], np.int32)], [np.array([-1], np.int32)]
    nodes = 1
    # Most rows of intervals have the stack of others: each stack is walked once.
    numbers_of = [number for _, number in columns] or [np.zeros(len(rest[0]), np.int64)]
    first, stack_of = distinct_rows(*numbers_of)
    node = np.zeros(len(first), np.int64)
    for upright, number in reversed(columns) if inverted else columns:
        lists = upright.reversed() if inverted else upright
        lengths, starts = lists.lengths, lists.starts
        # List i has the frames in_order[starts[i]:][: lengths[i]].
        in_order = numbers.of(lists.frames)[lists.numbers]
        # Rows at the same node that have the same stack take the same path.
        ways, way_of = numbered(node * max(len(lengths), 1) + number[first])
        at, stack = np.divmod(ways, max(len(lengths), 1))
        going = np.arange(len(ways))
        for depth in range(int(lengths.max(initial=0))):
            going = going[lengths[stack[going]] > depth]
            frame = in_order[starts[stack[going]] + depth]
            steps, step_of = numbered(at[going] * len(frames) + frame)
            parent, frame = np.divmod(steps, max(len(frames), 1))
            parents.append(parent.astype(np.int32))
            frame_of.append(frame.astype(np.int32))
            at[going] = nodes + step_of
            nodes += len(steps)
        node = at[way_of]
    return Tree(frames, _emptied(parents), _emptied(frame_of), launches, devices, node[stack_of], *rest)


def _emptied(columns: list[NDArray[np.int32]]) -> _Ints:
    """Returns the columns as one, and frees them, as a tree may have ten million nodes."""
    whole = np.concatenate(columns, dtype=np.int64)
    columns.clear()
    return whole


class _FrameNumbers:
    """Numbers frames; those with equal keys get one number."""

    def __init__(self, key: Callable[[Frame], Hashable]) -> None:
        self.frames: list[Frame] = []
        self._key = key
        self._numbers: dict[Hashable, int] = {}

    def of(self, frames: Sequence[Frame]) -> NDArray[np.int32]:
        """Returns the number of each frame."""
        return np.fromiter(map(self._add, frames), np.int32, len(frames))

    def _add(self, frame: Frame) -> int:
        number = self._numbers.setdefault(self._key(frame), len(self.frames))
        if number == len(self.frames):
            self.frames.append(frame)
        elif self.frames[number].line and self.frames[number].line != frame.line:
            # Calls from several lines are one frame without a line.
            self.frames[number] = replace(self.frames[number], line=0)
        return number


def divided_nodes(tree: Tree, by_time: TreeByTime | None = None) -> _Ints:
    """Samples of each node that were divided between it and nodes beside it: int64[nodes].

    Args:
        tree: any tree.
        by_time: what the tree's rows have the sums of; those of nodes are then rounded as if each entry were a row.
    """
    if tree.divided is None or not tree.divided.any():
        return np.zeros(len(tree.parent), np.int64)
    rows = np.flatnonzero(tree.divided)
    node, divided = tree.node[rows], tree.divided[rows]
    # Where the stacks of a place meet, and above, nothing of its samples is estimated.
    places, number = numbered(tree.place[rows])
    meetings = _meetings(tree, number, node, len(places))
    if by_time is not None and by_time.divided is not None:
        place_of_row = np.zeros(len(tree.node), np.int64)  # of rows without divided samples, any
        place_of_row[rows] = number
        node, number, divided = tree.node[by_time.row], place_of_row[by_time.row], by_time.divided
    found: _Floats = np.bincount(node, divided, len(tree.parent)).astype(np.float64)
    np.subtract.at(found, meetings, np.bincount(number, divided, len(places)))
    sums: _Floats = tree.with_callees(found)
    return np.rint(np.maximum(sums, 0)).astype(np.int64)


def _meetings(tree: Tree, place: _Ints, node: _Ints, places: int) -> _Ints:
    """The innermost node that is above or at all nodes of each place: int64[places]."""
    depth = tree.depth()
    meeting = np.zeros(places, np.int64)
    while len(place):
        place, node = np.divmod(np.unique(place * len(depth) + node), len(depth))
        single = np.bincount(place, minlength=places)[place] == 1
        meeting[place[single]] = node[single]
        place, node = place[~single], node[~single]
        deepest = np.zeros(places, np.int64)
        np.maximum.at(deepest, place, depth[node])
        node = np.where(depth[node] == deepest[place], tree.parent[node], node)
    return meeting


def divided_rows(number: _Ints, place: _Ints, divided: NDArray[np.uint64]) -> _Ints:
    """What is an estimate of rows that are added up by numbers, which depend on the launch only: int64[n].

    Where a number has all divided samples of a place, it has them for certain.

    Args:
        number: int64[n].
        place: int64[n]: divided samples of one place are divided among its numbers.
        divided: uint64[n], samples.
    """
    both, both_of = np.unique(number * (int(place.max(initial=0)) + 1) + place, return_inverse=True)
    of_both = np.bincount(both_of, divided, len(both))[both_of]
    of_place = np.bincount(place, divided)[place] if len(place) else of_both
    return np.where(of_both < of_place, divided, 0).astype(np.int64)


def viewer_tree(source: Profile | CpuSamples, options: StackOptions, key: Callable[[Frame], Hashable]) -> Tree:
    """The call tree of a profile's stalls or of CPU samples, in which every stack has at least one frame.

    Stacks with a share below `percent_limit` become one frame, `[below P %]`.

    Args:
        source: stalls or CPU samples.
        options: the stack options.
        key: frames with equal keys are merged.
    """
    tree = cpu_tree(source, options, key) if isinstance(source, CpuSamples) else stall_tree(source, options, key)
    tree = _ended(tree, tree.node == 0, UNKNOWN_FRAME)
    if options.percent_limit:
        own = tree.own()
        small = own * 100.0 < options.percent_limit * int(own.sum())
        tree = _ended(tree, small[tree.node], f"[below {options.percent_limit:g} %]")
    return _pruned(tree)


def without_components(options: StackOptions, components: Sequence[str]) -> StackOptions:
    """The options without some components, for formats that store these elsewhere."""
    return replace(
        options, components=tuple(component for component in options.components if component not in components)
    )


def without_offsets(options: StackOptions) -> StackOptions:
    """The options without offsets, unless the user chose components.

    For viewers that list functions by self samples: they would list offsets, and merge equal offsets of different
    kernels.
    """
    return without_components(options, ("offset",)) if options.components == DEFAULT_COMPONENTS else options


def stalls_by_time(export: Export, options: StackOptions) -> tuple[Profile, StackOptions]:
    """Stalls by interval, with the options for their stacks, which end in the kernel if the capture is large."""
    if export.by_time is None:
        return export.profile, options
    return export.by_time, without_components(options, ("line", "instruction", "offset"))


def ancestor_paths(tree: Tree, nodes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Each of `nodes` [n] followed by its ancestors without the root: int64[n, depth], padded with -1."""
    at = np.where(nodes > 0, nodes, -1)
    found = []
    while (inside := at > 0).any():
        found.append(at)
        at = np.where(inside, tree.parent[at], -1)
        at[at == 0] = -1
    return np.array(found, np.int64).reshape(len(found), len(nodes)).T


def _ended(tree: Tree, rows: NDArray[np.bool_], text: str) -> Tree:
    """Moves some rows, bool[rows], to a new node below the root with this text; no node is added if there are none."""
    if not rows.any():
        return tree
    return replace(
        tree,
        frames=[*tree.frames, Frame(text, CodeKind.UNKNOWN, name=text)],
        parent=np.append(tree.parent, 0),
        frame=np.append(tree.frame, len(tree.frames)),
        node=np.where(rows, len(tree.parent), tree.node),
    )


def _pruned(tree: Tree) -> Tree:
    """Removes nodes without samples, and frames that no node has."""
    kept = tree.total() > 0
    kept[0] = True
    parent, frame, node = tree.parent, tree.frame, tree.node
    if not kept.all():
        number = np.cumsum(kept) - 1
        parent = parent[kept]
        parent, frame, node = np.where(parent < 0, -1, number[parent]), frame[kept], number[node]
    # Not np.unique: a tree can have ten million nodes, of few frames.
    is_used = np.zeros(len(tree.frames), bool)
    is_used[frame[1:]] = True
    place = np.append(np.cumsum(is_used) - 1, -1)  # the root's -1 stays
    used = np.flatnonzero(is_used).tolist()
    return replace(tree, frames=[tree.frames[each] for each in used], parent=parent, frame=place[frame], node=node)
