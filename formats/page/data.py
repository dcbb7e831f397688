"""What the page of `--format=html` draws from: trees of stacks with their samples by time, small enough to open.

The payload is a JSON text behind its length (4 bytes, little endian), then the arrays that it describes, one after
the other, all in one gzip. An array is stored by bytes, the lowest of all numbers first: `assets/model.js` unpacks it.

A tree of a large capture has more nodes than a page can hold. Those with the fewest samples become one frame
`[N smaller]` of what called them, which has the sum of their samples, so that all sums stay what they were.
"""

from __future__ import annotations

import gzip
import json
import math
import os
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from iaprof.formats.export import Export
from iaprof.formats.page.kernels import kernels_of_rows
from iaprof.formats.profile import Kind, Profile, Shape, clean
from iaprof.formats.stacks.frames import Frame
from iaprof.formats.stacks.trees import Tree, cpu_tree, stall_tree
from iaprof.formats.stacks.viewer_tree import without_offsets

# Half of what a tree can have: each node that stays may get one more, for what is too small below it.
_MOST_NODES = 75_000
_MOST_ENTRIES = 6_000_000  # numbers of samples by interval and leaf: some 10 MB of the page
_DIVISORS = (1, 4, 16)  # of nodes, before intervals get longer
_MOST_INTERVALS = 1 << 20
_MOST_TEXT = 4_000_000  # characters of all names of one kind
_SHORTEST = 40  # characters that a name can have, however many there are

_Ints = NDArray[np.int64]


def payload(
    export: Export,
    shape: Shape,
    panels: Mapping[str, Any],
    most_nodes: int = _MOST_NODES,
    most_entries: int = _MOST_ENTRIES,
) -> bytes:
    """All that the page shows, compressed.

    Args:
        export: what to show.
        shape: how stacks are to look; its end is only where the page begins, as it can turn them around.
        panels: what the panels draw from, as JSON.
        most_nodes: of a tree, that stay what they are.
        most_entries: numbers of samples by interval and leaf, of a tree.
    """
    # Offsets are what the listings of kernels show; as frames they would be the most and say the least.
    upright = replace(without_offsets(shape), inverted=False)
    wanted = [_Wanted("stalls", _stalls(export.profile, upright))]
    if export.by_time is not None:
        wanted[0] = replace(wanted[0], by_time=_stalls(export.by_time, upright))
    if export.cpu is not None and len(export.cpu.count):
        tree = cpu_tree(export.cpu, upright, _key)
        wanted.append(_Wanted("cpu", _Stacks(tree, np.zeros(len(tree.node), np.int64), ("",))))
    packing = _Packing(_intervals(export), most_nodes, most_entries, shape.percent_limit / 100)
    packing.pack(wanted)
    if export.by_time is not None:
        packing.notes.append("In a selected range, kernels are not split into instructions: the recording is large.")
    head = {
        "panels": panels,
        "reasons": list(export.profile.reasons),
        "kinds": list(Kind),
        "modules": list(packing.modules),
        "kernels": list(packing.kernels),
        "notes": packing.notes,
        "source": "cpu" if shape.cpu_samples and "cpu" in packing.trees else "stalls",
        "inverted": shape.inverted,
        "intervalSeconds": export.interval_s * packing.step,
        "intervals": -(-packing.intervals // packing.step),
        "trees": packing.trees,
    }
    text = json.dumps(head, separators=(",", ":"), allow_nan=False).encode()
    return gzip.compress(b"".join([len(text).to_bytes(4, "little"), text, *packing.arrays]), 6, mtime=0)


def _intervals(export: Export) -> int:
    """How many intervals there are; 0 where nothing is known of when."""
    if not export.interval_s:
        return 0
    ends = [len(each.intervals) for each in (export.profile, export.by_time) if each is not None]
    if export.cpu is not None:
        ends.append(int(export.cpu.interval.max(initial=-1)) + 1)
    whole = export.about.seconds / export.interval_s
    return max(*ends, math.ceil(whole - 1e-6) if whole < _MOST_INTERVALS else 0)


def _key(frame: Frame) -> Hashable:
    """Frames are one if they look the same: a process and its function of one name are two."""
    return frame.text, frame.kind, frame.module


@dataclass(frozen=True, eq=False)
class _Stacks:
    """A tree, and which kernel its rows are of."""

    tree: Tree
    kernel: _Ints  # [rows], index into kernels
    kernels: Sequence[str]  # as the page's table calls them


@dataclass(frozen=True, eq=False)
class _Wanted:
    """What is to be packed under a name."""

    name: str
    stacks: _Stacks
    by_time: _Stacks | None = None  # the same samples by interval, if stacks have no intervals


@dataclass(frozen=True, eq=False)
class _Samples:
    """How often stacks end in a node with a reason and a kernel, which is a leaf; and when."""

    node: _Ints  # [leaves], ascending
    reason: _Ints  # [leaves]
    kernel: _Ints  # [leaves]
    total: _Ints  # [leaves], samples
    interval: _Ints  # [entries], ascending
    leaf: _Ints  # [entries], ascending within an interval
    count: _Ints  # [entries], samples


def _stalls(profile: Profile, shape: Shape) -> _Stacks:
    tree = stall_tree(profile, shape, _key)
    row, _ = np.nonzero(profile.counts)  # the rows of the tree
    names, number = kernels_of_rows(profile)
    return _Stacks(tree, number[row], names)


def _pruned(tree: Tree, most: int, least: float) -> Tree:
    """The tree with the largest of its nodes, in the order of a walk down; what is below a node and goes, becomes one.

    Args:
        tree: any.
        most: nodes that stay, beside the root.
        least: the share of all samples that nodes have to have to stay.
    """
    total = tree.total()
    stays = total >= math.ceil(least * int(total[0]))
    if len(total) > most + 1:  # of those with as many samples those nearer the root: what stays has to hang together
        stays[np.lexsort((tree.depth(), -total))[most + 1 :]] = False
    stays[0] = True
    at = np.arange(len(total))
    while not stays[at].all():
        at = np.where(stays[at], at, tree.parent[at])
    smaller = np.bincount(at[~stays], minlength=len(total))
    merging = np.flatnonzero(smaller)
    numbers, number = np.unique(smaller[merging], return_inverse=True)
    kept = np.flatnonzero(stays)
    new = np.cumsum(stays) - 1
    merged = np.zeros(len(total), np.int64)
    merged[merging] = len(kept) + np.arange(len(merging))
    return _walked(
        replace(
            tree,
            frames=[*tree.frames, *map(_merged, numbers.tolist())],
            parent=np.concatenate([np.where(kept == 0, -1, new[tree.parent[kept]]), new[merging]]),
            frame=np.concatenate([tree.frame[kept], len(tree.frames) + number]),
            node=np.where(stays[tree.node], new[tree.node], merged[at[tree.node]]),
        )
    )


def _merged(number: int) -> Frame:
    text = f"[{number:,} smaller]"
    return Frame(text, Kind.UNKNOWN, name=text)


def _walked(tree: Tree) -> Tree:
    """The tree with its nodes in the order of a walk down it, of siblings those with most samples first."""
    total, size = tree.total(), tree.with_callees(np.ones(len(tree.parent), np.int64))
    order = np.lexsort((-total, tree.parent))  # siblings side by side
    before = np.cumsum(size[order]) - size[order]
    ahead = np.empty(len(total), np.int64)  # nodes of the siblings before each
    ahead[order] = before - before[np.searchsorted(tree.parent[order], tree.parent[order])]
    depth = tree.depth()
    place = np.zeros(len(total), np.int64)
    by_depth = np.argsort(depth, kind="stable")
    ends = np.searchsorted(depth[by_depth], np.arange(1, int(depth.max()) + 2))
    for begin, end in pairwise(ends.tolist()):
        nodes = by_depth[begin:end]
        place[nodes] = place[tree.parent[nodes]] + 1 + ahead[nodes]
    walk = np.argsort(place)
    parent = np.where(walk == 0, -1, place[tree.parent[walk]])
    return replace(tree, parent=parent, frame=tree.frame[walk], node=place[tree.node])


def _samples(tree: Tree, kernel: _Ints, step: int) -> _Samples:
    """The samples of a tree; by time, in steps of so many intervals, unless that is 0."""
    kernels = int(kernel.max(initial=0)) + 1
    reason = np.maximum(tree.reason, 0)  # CPU samples have none
    reasons = int(reason.max(initial=0)) + 1
    leaves, leaf = np.unique((tree.node * reasons + reason) * kernels + kernel, return_inverse=True)
    rest, kernel_of = np.divmod(leaves, kernels)
    node, reason_of = np.divmod(rest, reasons)
    total = np.bincount(leaf, tree.count, len(leaves)).astype(np.int64)
    if not step:
        none = np.empty(0, np.int64)
        return _Samples(node, reason_of, kernel_of, total, none, none, none)
    moments, moment = np.unique(tree.interval // step * max(len(leaves), 1) + leaf, return_inverse=True)
    count = np.bincount(moment, tree.count, len(moments)).astype(np.int64)
    interval, leaf_of = np.divmod(moments, max(len(leaves), 1))
    return _Samples(node, reason_of, kernel_of, total, interval, leaf_of, count)


class _Packing:
    """The trees of a page, made small and packed."""

    def __init__(self, intervals: int, most_nodes: int, most_entries: int, least: float) -> None:
        """Takes what is allowed; `least` is the share of all samples that a frame has to have."""
        self.intervals = intervals
        self.step = 1  # intervals that are one on the page
        self.trees: dict[str, Any] = {}
        self.arrays: list[bytes] = []
        self.notes: list[str] = []
        self.modules: dict[str, int] = {"": 0}
        self.kernels: dict[str, int] = {}
        self._most_nodes = most_nodes
        self._most_entries = most_entries
        self._least = least

    def pack(self, wanted: Sequence[_Wanted]) -> None:
        """Packs stacks, and those that ranges are drawn from: as NAMERanges, if by time there is too much of them."""
        wholes = [_pruned(each.stacks.tree, self._most_nodes, self._least) for each in wanted]
        while not all(found := [self._by_time(each, whole) for each, whole in zip(wanted, wholes, strict=True)]):
            self.step *= 2
        for each, whole, by_time in zip(wanted, wholes, found, strict=True):
            assert by_time is not None
            self._say("", each.stacks.tree, whole)
            timed, (ranges, samples) = each.by_time or each.stacks, by_time
            if ranges is whole:
                self._pack(each.name, whole, samples, timed.kernels)
                continue
            self._pack(each.name, whole, _samples(whole, each.stacks.kernel, 0), each.stacks.kernels)
            self._say("In a selected range: ", timed.tree, ranges)
            self._pack(f"{each.name}Ranges", ranges, samples, timed.kernels)

    def _by_time(self, wanted: _Wanted, whole: Tree) -> tuple[Tree, _Samples] | None:
        """A tree and its samples by time; of fewer nodes, if these are too many, and None if that does not help."""
        timed = wanted.by_time or wanted.stacks
        for divisor in _DIVISORS:
            as_it_is = divisor == 1 and not wanted.by_time
            tree = whole if as_it_is else _pruned(timed.tree, self._most_nodes // divisor, self._least)
            samples = _samples(tree, timed.kernel, self.step if self.intervals else 0)
            if len(samples.count) <= self._most_entries:
                return tree, samples
        return None if self.step < self.intervals else (tree, samples)

    def _say(self, where: str, tree: Tree, pruned: Tree) -> None:
        """Notes what became smaller."""
        frames = [index for index, frame in enumerate(pruned.frames) if index >= len(tree.frames)]
        merged = np.isin(pruned.frame, frames)
        if not merged.any():
            return
        total = pruned.total()
        gone = len(tree.parent) - len(pruned.parent) + int(merged.sum())
        share = 100 * int(total[merged].sum()) / max(int(total[0]), 1)
        what = "CPU samples" if not len(tree.reason) or tree.reason[0] < 0 else "stalls"
        self.notes.append(
            f"{where}{gone:,} of {len(tree.parent) - 1:,} frames of {what} are summed up as “[N smaller]”, "
            f"with {share:.1f} % of the samples."
        )

    def _pack(self, name: str, tree: Tree, samples: _Samples, kernels: Sequence[str]) -> None:
        used, frame = np.unique(tree.frame[1:], return_inverse=True)
        frames = [tree.frames[index] for index in used.tolist()]
        columns = {
            "depth": tree.depth(),
            "frame": np.concatenate([[0], frame]),
            "leafNode": samples.node,
            "leafReason": samples.reason,
            "leafKernel": self._numbered(self.kernels, kernels)[samples.kernel],
            "leafCount": samples.total,
        }
        if self.intervals:
            first = np.concatenate([[True], samples.interval[1:] != samples.interval[:-1]])[: len(samples.leaf)]
            columns["perInterval"] = np.bincount(samples.interval, minlength=-(-self.intervals // self.step))
            columns["entryLeaf"] = np.where(first, samples.leaf, np.diff(samples.leaf, prepend=0))
            columns["entryCount"] = samples.count
        arrays = [(key, *_planes(values)) for key, values in columns.items()]
        self.arrays += [data for _, _, _, data in arrays]
        kinds = list(Kind)
        self.trees[name] = {
            "gpu": name.startswith("stalls"),
            "texts": _short([frame.name or frame.text for frame in frames]),
            "kinds": [kinds.index(frame.kind) for frame in frames],
            "modules": self._numbered(self.modules, [_module(frame) for frame in frames]).tolist(),
            "places": _short([_place(frame) for frame in frames]),
            "arrays": [(key, width, count) for key, width, count, _ in arrays],
        }

    @staticmethod
    def _numbered(numbers: dict[str, int], texts: Sequence[str]) -> _Ints:
        return np.array([numbers.setdefault(text, len(numbers)) for text in _short(texts)], np.int64)


def _planes(values: _Ints) -> tuple[int, int, bytes]:
    """How many bytes a number takes, how many there are, and the bytes: all lowest ones first."""
    width = max((int(values.max(initial=0)).bit_length() + 7) // 8, 1)
    return width, len(values), values.astype("<i8").view(np.uint8).reshape(-1, 8)[:, :width].T.tobytes()


def _short(texts: Sequence[str]) -> list[str]:
    """Clean texts, those that are very long without their end."""
    longest = max(_MOST_TEXT // max(len(texts), 1), _SHORTEST)
    found = [clean(text[: longest + 1]) for text in texts]
    return [text if len(text) <= longest else f"{text[: longest - 1]}…" for text in found]


def _module(frame: Frame) -> str:
    """What a frame is part of, without folders: two of one name are one colour."""
    if frame.on_gpu:
        return os.path.basename(frame.file) or "GPU"
    return os.path.basename(frame.module) if frame.kind is not Kind.PROCESS else ""


def _place(frame: Frame) -> str:
    """Where a frame's source is."""
    return f"{frame.file}:{frame.line}" if frame.file and frame.line else frame.file
