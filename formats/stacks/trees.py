"""Stacks as a tree: what flame graphs are drawn from, and what formats with tables of stacks are written from.

There is no Python per row: each part of a stack stands once, and a step of all rows through one frame of it is a few
operations on whole columns.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from iaprof.formats.export import CpuSamples
from iaprof.formats.profile import Launch, Profile, Shape
from iaprof.formats.stacks.frames import Frame
from iaprof.formats.stacks.stack_columns import StackColumn, cpu_columns, is_mark, stack_columns

NO_REASON = -1
_Ints = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Tree:
    """Nodes of stacks, parents before children; node 0 is the root of all and has no frame."""

    frames: Sequence[Frame]
    parent: _Ints  # [nodes]; -1 of the root
    frame: _Ints  # [nodes], index into frames; -1 of the root
    launches: Sequence[Launch | None]
    devices: Sequence[str]
    node: _Ints  # [rows], where a row's stack ends
    launch: _Ints  # [rows], index into launches
    device: _Ints  # [rows], index into devices
    interval: _Ints  # [rows]
    reason: _Ints  # [rows], index into the reasons of the profile; NO_REASON of CPU samples
    count: _Ints  # [rows], samples

    def own(self) -> _Ints:
        """Samples of the stacks that end in each node: int64[nodes]."""
        return np.bincount(self.node, self.count, len(self.parent)).astype(np.int64)

    def total(self) -> _Ints:
        """Samples of the stacks that go through each node: int64[nodes]."""
        return self.with_callees(self.own())

    def with_callees(self, values: NDArray[np.int64]) -> _Ints:
        """Sums over each node and all below it.

        Args:
            values: [nodes, ...].
        """
        found = values.copy()
        depth = self.depth()
        order = np.argsort(depth, kind="stable")
        ends = np.searchsorted(depth[order], np.arange(1, int(depth.max()) + 2))
        for level in range(len(ends) - 1, 0, -1):
            nodes = order[ends[level - 1] : ends[level]]
            np.add.at(found, self.parent[nodes], found[nodes])
        return found

    def depth(self) -> _Ints:
        """How far each node is from the root: int64[nodes]."""
        at = np.maximum(self.parent, 0)
        found = (self.parent >= 0).astype(np.int64)
        while at.any():  # each time twice as far up, as stacks of strangers are thousands of frames deep
            found += found[at]
            at = at[at]
        return found


def stall_tree(profile: Profile, shape: Shape, key: Callable[[Frame], Hashable], marked: bool = False) -> Tree:
    """The stacks of a profile's stalls.

    Args:
        profile: the profile.
        shape: which parts stacks have, and from which end. Its limit is the writer's matter.
        key: frames of one are one frame.
        marked: a frame stands between those of CPU and GPU, as in folded stacks.
    """
    row, reason = np.nonzero(profile.counts)
    reason = reason.astype(np.int64)
    columns = [each for each in stack_columns(profile, shape, row, reason) if marked or not is_mark(each[0])]
    counts = profile.counts[row, reason].astype(np.int64)
    rest = (profile.launch[row], profile.device[row], profile.interval[row], reason, counts)
    return _tree(columns, shape.inverted, key, profile.launches, profile.devices, rest)


def cpu_tree(samples: CpuSamples, shape: Shape, key: Callable[[Frame], Hashable]) -> Tree:
    """The stacks of CPU samples: of the shape's parts those of the CPU."""
    columns = [cpu_columns(samples, shape)]
    none = np.zeros(len(samples.launch), np.int64)
    rest = (samples.launch, none, samples.interval, none + NO_REASON, samples.count)
    return _tree(columns, shape.inverted, key, samples.launches, ("",), rest)


def _tree(
    columns: Sequence[StackColumn],
    inverted: bool,
    key: Callable[[Frame], Hashable],
    launches: Sequence[Launch | None],
    devices: Sequence[str],
    rest: tuple[_Ints, _Ints, _Ints, _Ints, _Ints],
) -> Tree:
    numbers: dict[Hashable, int] = {}
    frames: list[Frame] = []
    parents, frame_of = [np.array([-1])], [np.array([-1])]
    nodes = 1
    node = np.zeros(len(rest[0]), np.int64)
    for texts, number in reversed(columns) if inverted else columns:
        stacks = [_numbered(each[::-1] if inverted else each, key, numbers, frames) for each in texts]
        lengths = np.array([len(each) for each in stacks], np.int64)
        table = np.full((len(stacks), int(lengths.max(initial=0))), -1, np.int64)
        for index, each in enumerate(stacks):
            table[index, : len(each)] = each
        # Rows of one node so far and one stack go the same way.
        ways, way_of = np.unique(node * max(len(stacks), 1) + number, return_inverse=True)
        at, stack = np.divmod(ways, max(len(stacks), 1))
        for depth in range(table.shape[1]):
            going = np.flatnonzero(lengths[stack] > depth)
            steps, step_of = np.unique(at[going] * len(frames) + table[stack[going], depth], return_inverse=True)
            parent, frame = np.divmod(steps, max(len(frames), 1))
            parents.append(parent)
            frame_of.append(frame)
            at[going] = nodes + step_of
            nodes += len(steps)
        node = at[way_of]
    return Tree(frames, np.concatenate(parents), np.concatenate(frame_of), launches, devices, node, *rest)


def _numbered(
    stack: Sequence[Frame], key: Callable[[Frame], Hashable], numbers: dict[Hashable, int], frames: list[Frame]
) -> list[int]:
    found = []
    for frame in stack:
        number = numbers.setdefault(key(frame), len(frames))
        if number == len(frames):
            frames.append(frame)
        elif frames[number].line and frames[number].line != frame.line:
            frames[number] = replace(frames[number], line=0)  # calls in several lines are one frame
        found.append(number)
    return found
