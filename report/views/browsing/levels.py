"""The levels of a tree of stalls, such as processes, CPU frames, kernels and reasons, as columns of numbered frames."""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from iaprof.formats.profile import UNKNOWN_PROCESS, Code, Kernel, Launch, Profile, kernel_name

NO_FRAME = -1
GROUPINGS: dict[str, tuple[str, ...]] = {
    "stack": ("process", "operator", "cpu", "kernel", "inlined", "line", "instruction", "reason"),
    "kernel": ("kernel", "inlined", "line", "instruction", "reason"),
    "launcher": ("kernel", "callers", "process"),
    "process": ("process", "kernel", "line", "instruction", "reason"),
    "line": ("line", "kernel", "instruction", "reason"),
    "instruction": ("place", "reason", "callers", "process"),
    "reason": ("reason", "kernel", "line", "instruction"),
}
"""By name: the levels of a tree, from its root."""
OF_SLICES: dict[str, tuple[str, ...]] = {
    "stack": ("rank", "slices"),
    "slice": ("outwards", "rank"),
    "rank": ("rank", "slice"),
    "category": ("reason", "slice"),
}
"""The same for slices of time lines (timeline.views.browsable), whose categories are in place of reasons."""
_Ints = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Level:
    """A level: lists of frames, and which list each row of the profile has. A list can be empty."""

    name: str
    list_of: _Ints  # [rows], index of the row's list
    frames: _Ints  # the frames of all lists, one list after the other, as numbers
    begin: _Ints  # [lists + 1], where each list begins in `frames`
    count: int  # of distinct frames
    text: Callable[[int], str]  # of a frame's number; not cleaned
    is_inverted: bool = False  # the last frame of each list comes first

    def frames_at(self, rows: _Ints, depth: int) -> _Ints:
        """The frames of some rows' lists at a depth: int64[rows], NO_FRAME where a list is shorter."""
        lists = self.list_of[rows]
        first, end = self.begin[lists], self.begin[lists + 1]
        at = end - 1 - depth if self.is_inverted else first + depth
        is_there = depth < end - first
        if not len(self.frames):
            return np.full(len(rows), NO_FRAME)
        return np.where(is_there, self.frames[np.where(is_there, at, 0)], NO_FRAME)

    def rows_with(self, is_wanted: Callable[[str], bool]) -> NDArray[np.bool_]:
        """Whether the text of one of a row's frames is wanted: bool[rows]."""
        found = np.fromiter(map(is_wanted, map(self.text, range(self.count))), bool, self.count)
        upto = np.concatenate(([0], np.cumsum(found[self.frames])))
        return (upto[self.begin[1:]] > upto[self.begin[:-1]])[self.list_of]


class _Numbers(dict[Any, int]):
    """Numbers distinct values in the order in which they come."""

    def __missing__(self, value: Hashable) -> int:
        self[value] = number = len(self)
        return number

    def of(self, values: Iterable[Hashable]) -> _Ints:
        return np.fromiter(map(self.__getitem__, values), np.int64)


def make_levels(profile: Profile, grouping: Sequence[str], is_inverted: bool = False) -> list[Level]:
    """Makes the levels of a grouping of stalls, without that of reasons, which rows do not have.

    Args:
        profile: the stalls.
        grouping: the names of the levels, from the root: one of GROUPINGS or OF_SLICES.
        is_inverted: from the leaves to the root.
    """
    names = [name for name in grouping if name != "reason"]
    levels = [_MAKERS[name](profile, name, is_inverted != (name in _FROM_THE_LEAF)) for name in names]
    return levels[::-1] if is_inverted else levels


def _of_lists(
    name: str, list_of: _Ints, lists: Sequence[Sequence[Hashable]], is_inverted: bool, text: Callable[[Any], str] = str
) -> Level:
    numbers = _Numbers()
    frames = numbers.of(chain.from_iterable(lists))
    values = list(numbers)
    return Level(name, list_of, frames, _begins(lists), len(values), lambda at: text(values[at]), is_inverted)


def _begins(lists: Sequence[Sequence[Any]]) -> _Ints:
    lengths = np.fromiter(map(len, lists), np.int64, len(lists))
    return np.concatenate(([0], np.cumsum(lengths)))


def _processes(profile: Profile, name: str, is_inverted: bool) -> Level:
    def process(launch: Launch | None) -> Hashable:
        return (launch.comm or UNKNOWN_PROCESS, launch.pid, launch.host) if launch else (UNKNOWN_PROCESS, 0, "")

    def text(key: tuple[str, int, str]) -> str:
        comm, pid, host = key
        return f"{comm}{f' {pid}' if pid else ''}{f' on {host}' if host else ''}"

    return _of_lists(name, profile.launch, [(process(launch),) for launch in profile.launches], is_inverted, text)


def _operators(profile: Profile, name: str, is_inverted: bool) -> Level:
    lists = [launch.operators if launch else () for launch in profile.launches]
    return _of_lists(name, profile.launch, lists, is_inverted)


def _cpu_frames(profile: Profile, name: str, is_inverted: bool) -> Level:
    return _of_lists(name, profile.launch, list(map(_stack, profile.launches)), is_inverted)


def _stack(launch: Launch | None) -> tuple[str, ...]:
    if launch is None:
        return ()
    in_kernel = tuple(f"{frame}_[k]" for frame in launch.kernel_stack)
    return (*launch.stack, *in_kernel) if in_kernel else launch.stack


def _slices(profile: Profile, _: str, is_inverted: bool) -> Level:
    """A slice within those around it: one list, so that a slice is one frame whether others are in it or not."""
    kernels = max(len(profile.kernels), 1)
    pairs, list_of = np.unique(profile.launch * kernels + profile.kernel, return_inverse=True)
    each = (divmod(pair, kernels) for pair in pairs.tolist())
    names = [kernel.symbol if kernel else "" for kernel in profile.kernels]
    lists = [(*_stack(profile.launches[launch]), names[kernel]) for launch, kernel in each]
    return _of_lists("slice", list_of, lists, is_inverted)


def _of_code(
    profile: Profile, name: str, is_inverted: bool, frames_of: Callable[[Kernel | None, Code], Sequence[Hashable]],
    text: Callable[[Any], str] = str,
) -> Level:  # fmt: skip
    """A level whose frames depend on kernel and code."""
    codes = max(len(profile.codes), 1)
    pairs, list_of = np.unique(profile.kernel * codes + profile.code, return_inverse=True)
    each = (divmod(pair, codes) for pair in pairs.tolist())
    lists = [frames_of(profile.kernels[kernel], profile.codes[code]) for kernel, code in each]
    return _of_lists(name, list_of, lists, is_inverted, text)


def _kernels(profile: Profile, name: str, is_inverted: bool) -> Level:
    """Kernels; those with the same name in several files have their file beside it."""

    def frames(kernel: Kernel | None, code: Code) -> Sequence[Hashable]:
        return ((kernel_name(kernel, code), kernel.file if kernel else ""),)

    files: dict[str, set[str]] = {}
    for kernel in profile.kernels:
        if kernel is not None:
            files.setdefault(kernel.symbol, set()).add(kernel.file)

    def text(key: tuple[str, str]) -> str:
        symbol, file = key
        return f"{symbol} {file}".rstrip() if len(files.get(symbol, ())) > 1 else symbol

    return _of_code(profile, name, is_inverted, frames, text)


def _inlined(profile: Profile, name: str, is_inverted: bool) -> Level:
    return _of_code(profile, name, is_inverted, lambda kernel, code: code.functions[1:] if kernel else ())


def _lines(profile: Profile, name: str, is_inverted: bool) -> Level:
    def frames(kernel: Kernel | None, code: Code) -> Sequence[Hashable]:
        line = code.lines[-1] if code.lines else 0
        file = (code.files[-1] if code.files else "") or (kernel.file if kernel else "")
        return ((file, line),) if line and kernel else ()

    return _of_code(profile, name, is_inverted, frames, lambda key: f"{os.path.basename(key[0]) or '?'}:{key[1]}")


def _instructions(profile: Profile, name: str, is_inverted: bool) -> Level:
    """Instructions by kernel, offset and mnemonic: as many as the profile has rows, perhaps, so texts are made late."""
    with_kernel = name == "place"
    mnemonics, kernels = _Numbers(), _Numbers()
    codes = max(len(profile.codes), 1)
    pairs, pair_of = np.unique(profile.kernel * codes + profile.code, return_inverse=True)
    each = [divmod(pair, codes) for pair in pairs.tolist()]
    mnemonic = mnemonics.of(profile.codes[code].mnemonic for _, code in each)
    kernel = kernels.of(
        kernel_name(profile.kernels[kernel], profile.codes[code]) if with_kernel else "" for kernel, code in each
    )
    offsets, offset_of = np.unique(profile.offset, return_inverse=True)
    kind = kernel * max(len(mnemonics), 1) + mnemonic
    keys, list_of = np.unique(kind[pair_of] * max(len(offsets), 1) + offset_of, return_inverse=True)
    mnemonic_texts, kernel_texts = list(mnemonics), list(kernels)

    def text(number: int) -> str:
        kind, offset = divmod(int(keys[number]), len(offsets))
        kernel, mnemonic = divmod(kind, len(mnemonic_texts))
        place = f"{kernel_texts[kernel]}+" if with_kernel else ""
        return f"{place}0x{int(offsets[offset]):x} {mnemonic_texts[mnemonic]}"

    numbers = np.arange(len(keys))
    return Level(name, list_of, numbers, np.arange(len(keys) + 1), len(keys), text, is_inverted)


_MAKERS: dict[str, Callable[[Profile, str, bool], Level]] = {
    "process": _processes,
    "operator": _operators,
    "cpu": _cpu_frames,
    "callers": _cpu_frames,
    "kernel": _kernels,
    "inlined": _inlined,
    "line": _lines,
    "instruction": _instructions,
    "place": _instructions,
    "rank": _processes,
    "slices": _slices,
    "outwards": _slices,
    "slice": _kernels,
}
_FROM_THE_LEAF = ("callers", "outwards")
