"""Call trees for the viewers of other programs."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from iaprof.formats.export import CpuSamples, Export
from iaprof.formats.profile import DEFAULT_COMPONENTS, CodeKind, Profile, StackOptions
from iaprof.formats.stacks.frames import UNKNOWN_FRAME, Frame
from iaprof.formats.stacks.trees import Tree, cpu_tree, stall_tree


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
