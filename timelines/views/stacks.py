"""Slices as stacks with their self times, for the formats that show stacks: `rank 0;kernel;aten::mm;launch;gemm 5100`.

A stack begins with the rank, and the category of a device's slice or the thread of a host's. Then come the slices
around it, the outermost first. Those of a device follow the host's slices that launched them, where a correlation
tells; the time of the host's slices stays with their thread, so that a device's stacks only have its own time.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from iaprof.basics.clean import clean
from iaprof.formats.export import CpuSamples
from iaprof.formats.profile import Code, CodeKind, Kernel, Launch, Origin, Profile
from iaprof.timelines.grouped import Groups
from iaprof.timelines.intervals import FARTHEST
from iaprof.timelines.trace import NO_TEXT, Trace
from iaprof.timelines.views import labels, nesting

_DEEPEST = 200  # frames; deeper slices count for the slice at this depth
_MOST_STACKS = 200_000
_LONGEST = 2_000  # characters of a name
_PROCESS, _HOST, _PYTHON = Origin(CodeKind.PROCESS), Origin(CodeKind.CPP), Origin(CodeKind.PYTHON)
_DEVICE, _UNKNOWN = Origin(CodeKind.SOURCE), Origin(CodeKind.UNKNOWN)


def stacks(trace: Trace) -> CpuSamples:
    """Returns the distinct stacks of a trace's slices, with ns of self time in place of samples."""
    slices = trace.slices
    none = np.zeros(0, np.int64)
    if not len(slices):
        return CpuSamples([], none, none, none)
    device, ranks, names = labels.on_devices(trace), labels.ranks(trace), labels.names(trace)
    inside = nesting.parents(nesting.tracks(slices, ranks, device).numbers, *nesting.times(slices))
    own = nesting.self_times(slices, inside)
    launched = nesting.launches(slices, device)
    around = np.where(launched != nesting.NONE, launched, inside)
    chain, chains = _chains(around, names.astype(np.int64))
    where = np.where(device, slices.category, slices.tid)
    # A device's stack can include slices of the host, so the root is that of the slice itself.
    groups = Groups(ranks, device, where, chain)
    ns = np.bincount(groups.numbers, own, len(groups))
    timed = np.flatnonzero(ns > 0)
    kept = np.sort(timed[np.argsort(-ns[timed], kind="stable")[:_MOST_STACKS]])
    roots = [groups.key(each)[kept].tolist() for each in (ranks, device, where)]
    texts = _Texts(trace)
    found = [
        _stack(texts, rank, is_device, place, chains.names(code))
        for rank, is_device, place, code in zip(*roots, groups.key(chain)[kept].tolist(), strict=True)
    ]
    counts = np.minimum(ns[kept], FARTHEST / max(len(timed), 1))
    if rest := float(ns[timed].sum() - ns[kept].sum()):
        text = f"[{len(timed) - len(kept):,} smaller stacks]"
        found.append(Launch(text, 0, (), origins=()))
        counts = np.append(counts, min(rest, FARTHEST / 2))
    numbers = np.arange(len(found))
    return CpuSamples(found, numbers, np.zeros(len(found), np.int64), np.rint(counts).astype(np.int64))


class _Chains:
    """Distinct sequences of names, each with the number of the one that it continues."""

    def __init__(self, before: NDArray[np.int64], name: NDArray[np.int64]) -> None:
        self._before, self._name = before.tolist(), name.tolist()

    def names(self, chain: int) -> list[int]:
        """Returns the codes of a chain's names, the outermost first."""
        found = []
        while chain >= 0:
            found.append(self._name[chain])
            chain = self._before[chain]
        return found[::-1]


def _chains(around: NDArray[np.int64], names: NDArray[np.int64]) -> tuple[NDArray[np.int64], _Chains]:
    """Returns the number of each slice's chain of names, and the chains: in a pass for each depth."""
    depth, at = (around >= 0).astype(np.int64), around.copy()
    # Doubles the distance each time, as untrusted traces can be nested deeply.
    while (going := np.flatnonzero(at >= 0)).size:
        depth[going] += depth[at[going]]
        at[going] = at[at[going]]
    shown = np.arange(len(around))
    deep = np.flatnonzero(depth >= _DEEPEST)
    shown[deep] = _ancestors(around, deep, depth[deep] - _DEEPEST + 1)
    order = np.argsort(depth, kind="stable")
    limits = np.searchsorted(depth[order], np.arange(min(int(depth.max()) + 1, _DEEPEST) + 1))
    chain = np.full(len(around), -1, np.int64)
    befores, texts, count = [], [], 0
    names = names - NO_TEXT  # from 0 on
    width = int(names.max()) + 1
    for low, high in zip(limits[:-1].tolist(), limits[1:].tolist(), strict=True):
        rows = order[low:high]
        outer = around[rows]
        before = np.where(outer >= 0, chain[outer], -1)
        distinct, number = np.unique((before + 1) * width + names[rows], return_inverse=True)
        chain[rows] = count + number
        befores.append(distinct // width - 1)
        texts.append(distinct % width + NO_TEXT)
        count += len(distinct)
    return chain[shown], _Chains(np.concatenate(befores), np.concatenate(texts))


def _ancestors(around: NDArray[np.int64], rows: NDArray[np.int64], up: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns the row `up` levels outside of each row, by powers of two."""
    jump, found = around, rows.copy()
    while up.any():
        found = np.where(up & 1, jump[found], found)
        jump = np.where(jump >= 0, jump[jump], -1)
        up = up >> 1
    return found


class _Texts:
    """Names of slices as frames."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._known: dict[int, str] = {}

    def of(self, code: int) -> str:
        """Returns a name; that of a slice without one is a placeholder."""
        if code not in self._known:
            text = self._trace.texts[code] if code >= 0 else ""
            self._known[code] = clean(text)[:_LONGEST] or "[unnamed]"
        return self._known[code]


def _stack(texts: _Texts, rank: int, is_device: bool, place: int, names: list[int]) -> Launch:
    root = (texts.of(place) if place >= 0 else "device") if is_device else f"thread {place}"
    frames = [texts.of(code) for code in names]
    origins = [_origin(text) for text in frames]
    if is_device:
        origins[-1] = _DEVICE
    return Launch(f"rank {rank}", rank, (root, *frames), origins=(_PROCESS, *origins))


def _origin(text: str) -> Origin:
    """The origin of a host's slice: PyTorch's profiler names Python functions `file.py(line): function`."""
    if text == "[unnamed]":
        return _UNKNOWN
    return _PYTHON if ".py(" in text or text.startswith("<built-in") else _HOST


HOST = "host"
OTHERS = "others"
_MOST_CATEGORIES = 100  # further categories are counted together: a profile has a column of counts for each


def browsable(trace: Trace) -> Profile:
    """Makes a profile of a trace's slices; counts are ns."""
    found = stacks(trace)
    launches: dict[Launch | None, int] = {}
    kernels: dict[str, int] = {}
    categories: dict[str, int] = {}
    numbers = np.zeros((len(found.launches), 3), np.int64)
    for row, each in enumerate(found.launches):  # one for each distinct stack
        *around, name = each.stack or (each.comm,)
        is_on_device = bool(each.origins) and each.origins[-1].kind is CodeKind.SOURCE
        category = each.stack[0] if is_on_device else HOST if each.stack else OTHERS
        if category not in categories and len(categories) >= _MOST_CATEGORIES:
            category = OTHERS
        launch = Launch(each.comm, 0, tuple(around))
        numbers[row] = (
            launches.setdefault(launch, len(launches)),
            kernels.setdefault(name, len(kernels)),
            categories.setdefault(category, len(categories)),
        )
    launch, kernel, category = numbers[found.launch].T
    counts = np.zeros((len(launch), max(len(categories), 1)), np.uint64)
    counts[np.arange(len(launch)), category] = found.count
    none = np.zeros(len(launch), np.int64)
    return Profile(
        list(launches), [Kernel(0, name, "") for name in kernels], [Code("", (), ())], none, launch, kernel, none,
        none.astype(np.uint64), counts, none, list(categories) or [OTHERS], (0.0,),
    )  # fmt: skip
