"""Rare stacks, kernels and instructions, which `--percent-limit` folds into what is above them while adding up.

Two passes over the profiles: the first counts samples by stack prefix, kernel and instruction, the second one folds
those with a smaller share. Counts are kept by the hash of what they are of, in an array of fixed size: others with the
same hash can make a count too large, so that something rare is kept, but nothing frequent is folded. So what is folded
does not depend on the order of the answers, and memory only on the limit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from iaprof.formats.profile import Code, CodeKind, Launch, Origin
from iaprof.report.fleet.samples import GOLDEN, NO_CALLERS, HashedKernel, Prefixes, Samples, hashed

RARE_STACKS, RARE_KERNELS = "[rarer stacks]", "[rarer kernels]"
_RARE_PROCESSES = "[rarer processes]"
_BITS = 21  # of a place's number
_PLACES = 1 << _BITS  # 16 MB of counts
_MIX = np.uint64(GOLDEN)
_RARE_KERNEL = HashedKernel(RARE_KERNELS, "", "")
_NO_CODE = Code("", (), ())
_Ints = NDArray[np.int64]
_T = TypeVar("_T", bound=Samples)


@dataclass(frozen=True, eq=False)
class Counts:
    """Samples by hash, of those hashes that occur."""

    place: NDArray[np.int32]  # [n], ascending
    samples: _Ints  # [n]


class Counting:
    """Adds up counts."""

    def __init__(self) -> None:
        """Starts with nothing."""
        self._samples = np.zeros(_PLACES, np.int64)
        self._total = 0

    def add(self, counts: Counts, samples: int) -> None:
        """Adds the counts of some captures, which have so many samples."""
        self._samples[counts.place] += counts.samples
        self._total += samples

    def frequent(self, percent: float) -> NDArray[np.int32]:
        """Returns the places of what has at least this share of all samples: int32[n], ascending."""
        return np.flatnonzero(self._samples >= max(math.ceil(self._total * percent / 100), 1)).astype(np.int32)


@dataclass(frozen=True)
class Folded:
    """Samples that were folded, by what they were folded from."""

    stacks: int = 0
    kernels: int = 0
    instructions: int = 0

    def __add__(self, other: Folded) -> Folded:
        return Folded(self.stacks + other.stacks, self.kernels + other.kernels, self.instructions + other.instructions)


def counts_of(samples: Samples) -> Counts:
    """Counts samples by stack prefix, kernel and instruction."""
    rows = samples.rows
    counts = rows.counts.sum(axis=1)
    prefixes = Prefixes()
    paths = [_path(launch, prefixes) for launch in samples.launches]
    of_launch = np.bincount(rows.launch, counts, len(paths)).astype(np.int64)
    kernels, instructions = _code_places(samples)
    sums = np.zeros(_PLACES, np.int64)
    if paths:
        np.add.at(sums, np.concatenate(paths), np.repeat(of_launch, list(map(len, paths))))
    np.add.at(sums, kernels, counts)
    np.add.at(sums, instructions, counts)
    found = np.flatnonzero(sums)
    return Counts(found.astype(np.int32), sums[found])


def folded(samples: _T, frequent: NDArray[np.int32]) -> tuple[_T, Folded]:
    """Folds what is rare: a stack ends at the last frame that is frequent.

    Args:
        samples: some of all.
        frequent: of Counting.

    Returns:
        The samples; and how many of them were folded. The tables may have equal entries.
    """
    stays = np.zeros(_PLACES, bool)
    stays[frequent] = True
    rows = samples.rows
    counts = rows.counts.sum(axis=1)
    prefixes = Prefixes()
    launches = [_cut(launch, stays[_path(launch, prefixes)]) for launch in samples.launches]
    is_cut = np.array([new is not old for new, old in zip(launches, samples.launches, strict=True)], bool)
    kernels, instructions = _code_places(samples)
    known = stays[rows.fork % _PLACES] | (rows.fork == NO_CALLERS)
    rare_kernel = ~stays[kernels]
    rare_instruction = ~stays[instructions] & ~rare_kernel
    new_rows = replace(
        rows,
        kernel=np.where(rare_kernel, len(samples.kernels), rows.kernel),
        code=np.where(rare_kernel | rare_instruction, len(samples.codes), rows.code),
        offset=np.where(rare_kernel | rare_instruction, 0, rows.offset),
        # Stacks that part below a rare prefix are one stack now: nothing is divided among them.
        fork=np.where(known, rows.fork, 0),
        divided=np.where(known, rows.divided, 0),
    )
    found = replace(
        samples,
        rows=new_rows,
        launches=launches,
        kernels=[*samples.kernels, _RARE_KERNEL],
        codes=[*samples.codes, _NO_CODE],
    )
    return found, Folded(
        int(counts[is_cut[rows.launch]].sum()) if len(rows) else 0,
        int(counts[rare_kernel].sum()),
        int(counts[rare_instruction].sum()),
    )


def _path(launch: Launch | None, prefixes: Prefixes) -> NDArray[np.int32]:
    """Returns the place of each prefix of a launch's stack, the process first: int32[n]."""
    if launch is None:
        return np.zeros(1, np.int32)
    return (prefixes.of(launch) % _PLACES).astype(np.int32)


def _cut(launch: Launch | None, stays: NDArray[np.bool_]) -> Launch | None:
    """Ends a launch's stack before the first prefix that does not stay: bool[n], of each one of `_path`."""
    if launch is None or stays.all():
        return launch
    frames = int(stays.argmin()) - 1
    if frames < 0:
        return Launch(_RARE_PROCESSES, 0, ())
    operators = launch.operators[:frames]
    frames -= len(operators)
    stack = launch.stack[:frames]
    kernel_stack = launch.kernel_stack[: frames - len(stack)]
    origins = launch.origins[: len(stack)]
    if kernel_stack:
        kernel_stack = (*kernel_stack, RARE_STACKS)
    else:
        stack = (*stack, RARE_STACKS)
        origins = (*origins, Origin(CodeKind.UNKNOWN, "")) if launch.origins else ()
    return replace(launch, stack=stack, kernel_stack=kernel_stack, origins=origins, operators=operators)


def _code_places(samples: Samples) -> tuple[_Ints, _Ints]:
    """Returns the place of each row's kernel, and of its instruction: int64[n] each."""
    rows = samples.rows
    kernel = _hashes([repr(each) for each in samples.kernels])[rows.kernel]
    code = _hashes([repr(each) for each in samples.codes])[rows.code]
    instruction = kernel ^ (code * _MIX + rows.offset.astype(np.uint64)) * _MIX
    return _placed(kernel), _placed(instruction)


def _hashes(texts: Sequence[str]) -> NDArray[np.uint64]:
    return np.fromiter(map(hashed, texts), np.uint64, len(texts))


def _placed(hashes: NDArray[np.uint64]) -> _Ints:
    return ((hashes * _MIX) >> np.uint64(64 - _BITS)).astype(np.int64)
