"""The data of flame graphs and heat maps on the page of `--format=html`: trees of stacks with samples by time.

The payload is gzipped: the length of a JSON text (4 bytes, little-endian), the JSON, then the arrays that it describes.
An array is stored in byte planes, the lowest bytes of all numbers first; `assets/model.js` unpacks it.

A large capture's tree has more nodes than a page can hold. The nodes with the fewest samples are merged into one frame
`[N smaller]` of their caller, which gets their samples, so that all sums are kept.
"""

from __future__ import annotations

import gzip
import json
import math
import os
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from iaprof.basics.clean import clean
from iaprof.formats.distinct import numbered, sums_of
from iaprof.formats.estimates import divided_text, explanation
from iaprof.formats.export import Export
from iaprof.formats.guesses import NOTE, SUFFIX, is_guess
from iaprof.formats.profile import UNKNOWN_KERNEL, CodeKind, Profile, StackOptions, kernel_name
from iaprof.formats.stacks.frames import Frame
from iaprof.formats.stacks.trees import (
    Tree,
    TreeByTime,
    cpu_tree,
    divided_nodes,
    stall_tree_by_time,
    without_offsets,
)
from iaprof.gpu.vendors import meanings

_LONGEST_KERNEL = 2_000  # characters

# Half the maximum per tree: each node that is kept may get one `[N smaller]` child.
_MOST_NODES = 75_000
_MOST_ENTRIES = 6_000_000  # counts by interval and leaf: about 10 MB of the page
_DIVISORS = (1, 4, 16)  # for the number of nodes, before intervals get longer
_MOST_INTERVALS = 1 << 20
_MOST_TEXT = 4_000_000  # characters in all names of one sort
_SHORTEST = 40  # characters: names may have this length however many there are

_Ints = NDArray[np.int64]


def shown_name(symbol: str) -> str:
    """A kernel's name on the page: clean, and of bounded length."""
    return clean(symbol or UNKNOWN_KERNEL)[:_LONGEST_KERNEL]


def kernels_of_rows(profile: Profile) -> tuple[list[str], NDArray[np.int64]]:
    """The distinct names of kernels, and the index of each profile row's name: int64[rows]."""
    width = max(len(profile.codes), 1)
    pairs, pair_of = numbered(profile.kernel * width + profile.code)
    numbers: dict[str, int] = {}
    number_of = [
        numbers.setdefault(shown_name(kernel_name(profile.kernels[kernel], profile.codes[code])), len(numbers))
        for kernel, code in (divmod(pair, width) for pair in pairs.tolist())
    ]
    return list(numbers), np.array(number_of, np.int64)[pair_of]


def frame_key(frame: Frame) -> Hashable:
    """Frames with equal keys are merged: a process and its function of the same name stay apart."""
    return frame.text, frame.kind, frame.module


def payload(
    export: Export,
    options: StackOptions,
    panels: Mapping[str, Any],
    most_nodes: int = _MOST_NODES,
    most_entries: int = _MOST_ENTRIES,
    key: Callable[[Frame], Hashable] = frame_key,
) -> bytes:
    """All data of the page, compressed.

    Args:
        export: what to show.
        options: the stack options; `inverted` only sets the initial view, as the page can invert stacks itself.
        panels: the panels' data, as JSON.
        most_nodes: nodes of a tree that are kept.
        most_entries: counts by interval and leaf, per tree.
        key: frames with equal keys are merged.
    """
    # Kernel listings show offsets; as frames they would be the most numerous and the least useful.
    upright = replace(without_offsets(options), inverted=False)
    with ThreadPoolExecutor(1) as thread:  # NumPy holds no lock of Python's while it works on large arrays
        by_time = None if export.by_time is None else thread.submit(_stalls, export.by_time, upright, key)
        stalls = _stalls(export.profile, upright, key)
        to_pack = [_TreeToPack("stalls", stalls, None if by_time is None else by_time.result())]
    if export.cpu is not None and len(export.cpu.count):
        tree = cpu_tree(export.cpu, upright, key)
        stacks = _KernelTree(TreeByTime.of_rows(tree), np.zeros(len(tree.node), np.int64), ("",))
        to_pack.append(_TreeToPack("cpu", stacks))
    packing = _Packing(_intervals(export), most_nodes, most_entries, options.percent_limit / 100)
    packing.pack(to_pack)
    if export.by_time is not None:
        packing.notes.append("In a selected range, kernels are not split into instructions: the recording is large.")
    if packing.has_guesses:
        packing.notes.append(NOTE)
    divided, timed = export.profile.divided_samples, export.profile.timed
    samples = int(export.profile.counts.sum())
    head = {
        "panels": panels,
        "reasons": list(export.profile.reasons),
        "meanings": meanings(export.profile.reasons),
        "kinds": list(CodeKind),
        "modules": list(packing.modules),
        "kernels": list(packing.kernels),
        "notes": packing.notes,
        "divided": [divided_text(divided, samples, timed), explanation(timed)] if divided else [],
        "source": "cpu" if options.cpu_samples and "cpu" in packing.trees else "stalls",
        "inverted": options.inverted,
        "intervalSeconds": export.interval_s * packing.step,
        "intervals": -(-packing.intervals // packing.step),
        "trees": packing.trees,
    }
    return packed(head, packing.arrays)


def packed(head: Mapping[str, Any], arrays: Sequence[bytes]) -> bytes:
    """Returns a payload: JSON, and the bytes of the arrays that its `trees` describe, in their order."""
    text = json.dumps(head, separators=(",", ":"), allow_nan=False).encode()
    return gzip.compress(b"".join([len(text).to_bytes(4, "little"), text, *arrays]), 6, mtime=0)


def _intervals(export: Export) -> int:
    """The number of intervals; 0 if times are unknown."""
    if not export.interval_s:
        return 0
    ends = [len(each.intervals) for each in (export.profile, export.by_time) if each is not None]
    if export.cpu is not None:
        ends.append(int(export.cpu.interval.max(initial=-1)) + 1)
    whole = export.about.seconds / export.interval_s
    return max(*ends, math.ceil(whole - 1e-6) if whole < _MOST_INTERVALS else 0)


@dataclass(frozen=True, eq=False)
class _KernelTree:
    """A tree, and the kernel of each of its rows."""

    by_time: TreeByTime
    kernel: _Ints  # [rows], index into kernels
    kernels: Sequence[str]  # names, as in the page's table of kernels

    @property
    def tree(self) -> Tree:
        """The tree itself."""
        return self.by_time.tree


@dataclass(frozen=True, eq=False)
class _TreeToPack:
    """A tree to pack, and its name in the payload."""

    name: str
    stacks: _KernelTree
    by_time: _KernelTree | None = None  # the same samples by interval, if `stacks` has no intervals


@dataclass(frozen=True, eq=False)
class _Samples:
    """Samples by leaf, which is a node, reason and kernel, in total and by interval."""

    node: _Ints  # [leaves], ascending
    reason: _Ints  # [leaves]
    kernel: _Ints  # [leaves]
    total: _Ints  # [leaves], samples
    interval: _Ints  # [entries], ascending
    leaf: _Ints  # [entries], ascending within an interval
    count: _Ints  # [entries], samples


def _stalls(profile: Profile, options: StackOptions, key: Callable[[Frame], Hashable]) -> _KernelTree:
    by_time, row = stall_tree_by_time(profile, options, key)
    names, number = kernels_of_rows(profile)
    return _KernelTree(by_time, number[row], names)


def _pruned(tree: Tree, most: int, least: float) -> Tree:
    """Keeps the largest nodes of a tree, in depth-first order, and merges the others below each node into one.

    Args:
        tree: any tree.
        most: nodes to keep, besides the root.
        least: nodes with a smaller share of all samples are merged.
    """
    total = tree.total()
    stays = total >= math.ceil(least * int(total[0]))
    if len(total) > most + 1:  # of equal nodes, keep those nearer the root, as a kept node needs its parent
        stays[np.lexsort((tree.depth(), -total))[most + 1 :]] = False
    stays[0] = True
    at = np.where(stays, np.arange(len(total)), tree.parent)
    while not stays[at].all():
        at = at[at]  # doubles the distance each time, as hostile stacks have thousands of frames
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
    return Frame(text, CodeKind.UNKNOWN, name=text)


def _walked(tree: Tree) -> Tree:
    """The tree with its nodes in depth-first order, siblings with more samples first."""
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


def _samples(tree: Tree, stacks: _KernelTree, step: int) -> _Samples:
    """Samples of a tree by leaf, and, unless `step` is 0, by time in steps of `step` intervals.

    Args:
        tree: that of the stacks, or what is left of it.
        stacks: what the tree's rows are.
        step: the number of intervals.
    """
    kernel, by_time = stacks.kernel, stacks.by_time
    kernels = int(kernel.max(initial=0)) + 1
    reason = np.maximum(tree.reason, 0)  # CPU samples have no reason
    reasons = int(reason.max(initial=0)) + 1
    leaves, leaf = numbered((tree.node * reasons + reason) * kernels + kernel)
    rest, kernel_of = np.divmod(leaves, kernels)
    node, reason_of = np.divmod(rest, reasons)
    total = np.bincount(leaf, tree.count, len(leaves)).astype(np.int64)
    if not step:
        none = np.empty(0, np.int64)
        return _Samples(node, reason_of, kernel_of, total, none, none, none)
    moments, count = sums_of(by_time.interval // step * max(len(leaves), 1) + leaf[by_time.row], by_time.count)
    interval, leaf_of = np.divmod(moments, max(len(leaves), 1))
    return _Samples(node, reason_of, kernel_of, total, interval, leaf_of, count)


class _Packing:
    """Reduces the trees of a page and packs them into arrays."""

    def __init__(self, intervals: int, most_nodes: int, most_entries: int, least: float) -> None:
        """Starts without trees; frames with a smaller share of all samples than `least` are merged."""
        self.intervals = intervals
        self.step = 1  # intervals that the page shows as one
        self.trees: dict[str, Any] = {}
        self.arrays: list[bytes] = []
        self.notes: list[str] = []
        self.has_guesses = False  # among the frames
        self.modules: dict[str, int] = {"": 0}
        self.kernels: dict[str, int] = {}
        self._most_nodes = most_nodes
        self._most_entries = most_entries
        self._least = least

    def pack(self, to_pack: Sequence[_TreeToPack]) -> None:
        """Packs trees; if one has too many counts by time, also a smaller one, NAMERanges, for ranges of time."""
        wholes = [_pruned(each.stacks.tree, self._most_nodes, self._least) for each in to_pack]
        while not all(found := [self._by_time(each, whole) for each, whole in zip(to_pack, wholes, strict=True)]):
            self.step *= 2
        for each, whole, by_time in zip(to_pack, wholes, found, strict=True):
            assert by_time is not None
            self._note_merged("", each.stacks.tree, whole)
            timed, (ranges, samples, divided) = each.by_time or each.stacks, by_time
            if ranges is whole:
                self._pack(each.name, whole, samples, divided, timed.kernels)
                continue
            of_whole = _samples(whole, each.stacks, 0)
            self._pack(each.name, whole, of_whole, divided_nodes(whole, each.stacks.by_time), each.stacks.kernels)
            self._note_merged("In a selected range: ", timed.tree, ranges)
            self._pack(f"{each.name}Ranges", ranges, samples, divided, timed.kernels)

    def _by_time(self, to_pack: _TreeToPack, whole: Tree) -> tuple[Tree, _Samples, _Ints] | None:
        """A tree, with fewer nodes if necessary, its samples by time, and which of each node's are divided.

        None if intervals must get longer first.
        """
        timed = to_pack.by_time or to_pack.stacks
        for divisor in _DIVISORS:
            as_it_is = divisor == 1 and not to_pack.by_time
            tree = whole if as_it_is else _pruned(timed.tree, self._most_nodes // divisor, self._least)
            with ThreadPoolExecutor(1) as thread:
                divided = thread.submit(divided_nodes, tree, timed.by_time)
                samples = _samples(tree, timed, self.step if self.intervals else 0)
            if len(samples.count) <= self._most_entries:
                return tree, samples, divided.result()
        return None if self.step < self.intervals else (tree, samples, divided.result())

    def _note_merged(self, where: str, tree: Tree, pruned: Tree) -> None:
        """Adds a note about frames that were merged."""
        frames = [index for index, frame in enumerate(pruned.frames) if index >= len(tree.frames)]
        merged = np.isin(pruned.frame, frames)
        if not merged.any():
            return
        total = pruned.total()
        gone = len(tree.parent) - len(pruned.parent) + int(merged.sum())
        share = 100 * int(total[merged].sum()) / max(int(total[0]), 1)
        what = "CPU samples" if not len(tree.reason) or tree.reason[0] < 0 else "GPU samples"
        self.notes.append(
            f"{where}{gone:,} of {len(tree.parent) - 1:,} frames of {what} are summed up as “[N smaller]”, "
            f"with {share:.1f} % of the samples."
        )

    def _pack(self, name: str, tree: Tree, samples: _Samples, divided: _Ints, kernels: Sequence[str]) -> None:
        used, frame = numbered(tree.frame[1:])
        frames = [tree.frames[index] for index in used.tolist()]
        columns = {
            "depth": tree.depth(),
            "frame": np.concatenate([[0], frame]),
            "leafNode": samples.node,
            "leafReason": samples.reason,
            "leafKernel": self._numbered(self.kernels, kernels)[samples.kernel],
            "leafCount": samples.total,
        }
        self.has_guesses |= any(is_guess(frame.text) for frame in frames)
        if divided.any():  # the part of each node's samples, in 255ths
            columns["divided"] = np.ceil(255 * divided / np.maximum(tree.total(), 1)).astype(np.int64)
        if self.intervals:
            first = np.concatenate([[True], samples.interval[1:] != samples.interval[:-1]])[: len(samples.leaf)]
            columns["perInterval"] = np.bincount(samples.interval, minlength=-(-self.intervals // self.step))
            columns["entryLeaf"] = np.where(first, samples.leaf, np.diff(samples.leaf, prepend=0))
            columns["entryCount"] = samples.count
        arrays = [(key, *planes(values)) for key, values in columns.items()]
        self.arrays += [data for _, _, _, data in arrays]
        kinds = list(CodeKind)
        self.trees[name] = {
            "gpu": name.startswith("stalls"),
            "texts": short_texts([frame.name or frame.text for frame in frames]),
            "kinds": [kinds.index(frame.kind) for frame in frames],
            "modules": self._numbered(self.modules, [_module(frame) for frame in frames]).tolist(),
            "places": short_texts([_place(frame) for frame in frames]),
            "arrays": [(key, width, count) for key, width, count, _ in arrays],
        }

    @staticmethod
    def _numbered(numbers: dict[str, int], texts: Sequence[str]) -> _Ints:
        return np.array([numbers.setdefault(text, len(numbers)) for text in short_texts(texts)], np.int64)


def planes(values: _Ints) -> tuple[int, int, bytes]:
    """The bytes per number, the number of numbers, and the byte planes, lowest bytes first."""
    width = max((int(values.max(initial=0)).bit_length() + 7) // 8, 1)
    return width, len(values), values.astype("<i8").view(np.uint8).reshape(-1, 8)[:, :width].T.tobytes()


def short_texts(texts: Sequence[str]) -> list[str]:
    """Cleans texts and truncates very long ones, but for the marks of guesses."""
    longest = max(_MOST_TEXT // max(len(texts), 1), _SHORTEST)
    marks = [SUFFIX if is_guess(text) else "" for text in texts]
    found = [clean(text[: longest + 1]) for text in texts]
    return [
        text if len(text) <= longest else f"{text[: longest - 1]}…{mark}"
        for text, mark in zip(found, marks, strict=True)
    ]


def _module(frame: Frame) -> str:
    """The base name of a frame's module, which chooses its colour."""
    if frame.on_gpu:
        return os.path.basename(frame.file) or "GPU"
    return os.path.basename(frame.module) if frame.kind is not CodeKind.PROCESS else ""


def _place(frame: Frame) -> str:
    """Source file and line of a frame, as far as known."""
    return f"{frame.file}:{frame.line}" if frame.file and frame.line else frame.file
