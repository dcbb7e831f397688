"""Lists of frames as columns: each distinct frame once, and its number wherever a list has it.

Captures have millions of frames and few distinct ones. Python runs for each distinct frame and for each list, but not
for each frame of each list. The stacks of a profile are such columns by component: many rows share a component, such as
the CPU frames, and each distinct one is stored once, with an index for each row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from iaprof.formats.distinct import numbered
from iaprof.formats.export import CpuSamples
from iaprof.formats.profile import UNKNOWN_PROCESS, CodeKind, Launch, Origin, Profile, StackOptions
from iaprof.formats.ranges import ranges
from iaprof.formats.stacks.frames import (
    CPU_COMPONENTS,
    CPU_GPU_SEPARATOR,
    GPU_COMPONENTS,
    Frame,
    cpu_frame,
    gpu_frames,
    kernel_frame,
    process_frame,
    reason_frame,
    truncated_frame,
)

_Item = TypeVar("_Item")
_Ints = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class FrameLists:
    """Lists of frames, outermost first."""

    frames: Sequence[Frame]  # in the order in which the lists have them first; equal ones may be there twice
    numbers: NDArray[np.int32]  # [sum of lengths], indices into frames, one list after the other
    lengths: _Ints  # [lists]

    @classmethod
    def of(cls, lists: Sequence[Sequence[Frame]]) -> FrameLists:
        """Takes a few lists: Python runs for each of their frames."""
        found = list(chain.from_iterable(lists))
        lengths = np.fromiter(map(len, lists), np.int64, len(lists))
        return cls(found, np.arange(len(found), dtype=np.int32), lengths)

    def __len__(self) -> int:
        """The number of lists."""
        return len(self.lengths)

    @property
    def starts(self) -> _Ints:
        """Where the numbers of each list begin: int64[lists]."""
        return np.cumsum(self.lengths) - self.lengths

    def reversed(self) -> FrameLists:
        """The same lists, each from its other end."""
        numbers = self.numbers[::-1][ranges((len(self.numbers) - self.starts - self.lengths), self.lengths)]
        order, numbers = _distinct(numbers)
        return replace(self, frames=[self.frames[each] for each in order.tolist()], numbers=numbers)

    def texts(self, text: Callable[[Frame], str]) -> list[list[str]]:
        """The texts of each list's frames. `text` is called once for each frame."""
        texts = list(map(text, self.frames))
        ends = np.cumsum(self.lengths)
        return [
            list(map(texts.__getitem__, self.numbers[end - length : end].tolist()))
            for end, length in zip(ends.tolist(), self.lengths.tolist(), strict=True)
        ]

    def joined(self, text: Callable[[Frame], str]) -> list[str]:
        """The texts of each list's frames, joined. `text` is called once for each frame."""
        return list(map("".join, self.texts(text)))


def launches_frames(launches: Sequence[Launch | None], options: StackOptions, components: Sequence[str]) -> FrameLists:
    """The CPU frames of launches' stacks.

    Args:
        launches: the launches.
        options: the stack options.
        components: the chosen ones, in their order.
    """
    table = _Table()
    known = [each for each in launches if each is not None]
    is_known = np.fromiter((each is not None for each in launches), bool, len(launches))
    parts = [table.unknown(~is_known)]
    for component in components:
        for numbers, lengths in _component(component, known, options, table):
            all_lengths = np.zeros(len(launches), np.int64)
            all_lengths[is_known] = lengths
            parts.append((numbers, all_lengths))
    lengths = np.sum([each for _, each in parts], axis=0, dtype=np.int64)
    at = np.cumsum(lengths) - lengths
    whole = np.empty(int(lengths.sum()), np.int32)
    for numbers, its in parts:
        whole[ranges(at, its)] = numbers
        at = at + its
    order, whole = _distinct(whole)
    return FrameLists([table.frames[each] for each in order.tolist()], whole, lengths)


_Part = tuple[NDArray[np.int32], _Ints]
"""Numbers of frames, one list after the other, and how many each list has: int64[launches]."""


class _Table:
    """Distinct frames."""

    def __init__(self) -> None:
        self.frames: list[Frame] = []
        self._processes: dict[str, int] = {}

    def add(self, frames: Sequence[Frame]) -> int:
        """Adds frames; returns the number of the first one."""
        first = len(self.frames)
        self.frames += frames
        return first

    def process(self, text: str) -> int:
        """Returns the number of the frame of a process, host, or the like."""
        number = self._processes.get(text)
        if number is None:
            number = self._processes[text] = self.add([process_frame(text)])
        return number

    def unknown(self, which: NDArray[np.bool_]) -> _Part:
        """The frame of an unknown process, for some of the launches."""
        number = self.process(UNKNOWN_PROCESS) if which.any() else 0
        return np.full(int(which.sum()), number, np.int32), which.astype(np.int64)


def _component(component: str, launches: Sequence[Launch], options: StackOptions, table: _Table) -> list[_Part]:
    if component == "cpu":
        return _stacks(launches, options.max_stack, table)
    texts: list[Sequence[str]] = []
    if component == "host":
        texts = [(each.host,) if each.host else () for each in launches]
    elif component == "process":
        texts = [(each.comm or UNKNOWN_PROCESS,) for each in launches]
    elif component == "pid":  # 0 stands for several processes
        texts = [(str(each.pid),) if each.pid else () for each in launches]
    elif component == "operator":  # no code either: the trace has only its name
        texts = [each.operators for each in launches]
    lengths = np.fromiter(map(len, texts), np.int64, len(texts))
    numbers = np.fromiter(map(table.process, chain.from_iterable(texts)), np.int32, int(lengths.sum()))
    return [(numbers, lengths)] if len(texts) else []


def _stacks(launches: Sequence[Launch], most: int, table: _Table) -> list[_Part]:
    """The frames of the stacks themselves; of at most `most` frames, unless it is 0, below a frame that says so."""
    user, users = _distinct_frames([each.stack for each in launches], [each.origins for each in launches], table)
    kernels = [each.kernel_stack for each in launches]
    kernel, of_kernel = _distinct_frames(kernels, [()] * len(kernels), table, of_kernel=True)
    if not most:
        return [(user, users), (kernel, of_kernel)]
    cut = users + of_kernel > most
    number = table.add([truncated_frame()]) if cut.any() else 0
    gone = np.where(cut, users + of_kernel - most, 0)
    parts = [(np.full(int(cut.sum()), number, np.int32), cut.astype(np.int64))]
    for numbers, lengths in ((user, users), (kernel, of_kernel)):
        less = np.minimum(gone, lengths)
        gone = gone - less
        parts.append((numbers[ranges(np.cumsum(lengths) - lengths + less, lengths - less)], lengths - less))
    return parts


def _distinct_frames(
    stacks: Sequence[Sequence[str]], origins: Sequence[Sequence[Origin]], table: _Table, of_kernel: bool = False
) -> _Part:
    """Adds the distinct frames of stacks; returns the number of each frame."""
    lengths = np.fromiter(map(len, stacks), np.int64, len(stacks))
    whole = int(lengths.sum())
    # Stacks share their frames' objects: the identities of these are far fewer than the frames.
    first, number = _first_of(np.fromiter(map(id, chain.from_iterable(stacks)), np.int64, whole))
    texts = _at(stacks, lengths, first)
    numbered: dict[str, int] = {}
    number = np.fromiter((numbered.setdefault(text, len(numbered)) for text in texts), np.int32, len(texts))[number]
    have = np.fromiter(map(len, origins), np.int64, len(origins))
    if (wrong := (have > 0) & (have != lengths)).any():
        raise ValueError(f"a stack has {lengths[wrong][0]} frames, but {have[wrong][0]} origins")
    origin_of = np.zeros(whole, np.int32)
    known: list[Origin | None] = [None]
    if have.any():
        its_first, its = _first_of(np.fromiter(map(id, chain.from_iterable(origins)), np.int64, int(have.sum())))
        known += _at(origins, have, its_first)
        origin_of[np.repeat(have > 0, lengths)] = its + 1
    pairs = number * np.int64(len(known))
    pairs += origin_of
    pair_first, pair = _first_of(pairs)
    all_texts = list(numbered)
    added = table.add(
        [
            kernel_frame(all_texts[text]) if of_kernel else cpu_frame(all_texts[text], known[origin])
            for text, origin in zip(number[pair_first].tolist(), origin_of[pair_first].tolist(), strict=True)
        ]
    )
    return pair + np.int32(added), lengths


def _distinct(values: NDArray[np.integer]) -> tuple[NDArray[np.integer], NDArray[np.int32]]:
    """The distinct values in the order in which they come first, and the place of each value among these."""
    found = pa.array(values).dictionary_encode()
    return found.dictionary.to_numpy(), found.indices.to_numpy()


def _first_of(values: NDArray[np.int64]) -> tuple[_Ints, NDArray[np.int32]]:
    """The position of the first of each distinct value, in their order; and the number of each value among these."""
    number = _distinct(values)[1]
    first = np.flatnonzero(np.diff(np.maximum.accumulate(number), prepend=-1))  # each new one has the highest number
    return first, number


def _at(lists: Sequence[Sequence[_Item]], lengths: _Ints, places: _Ints) -> list[_Item]:
    """The items at these places of all lists, one after the other."""
    ends = np.cumsum(lengths)
    which = np.searchsorted(ends, places, side="right")
    inside = places - (ends - lengths)[which]
    return [lists[each][at] for each, at in zip(which.tolist(), inside.tolist(), strict=True)]


SEPARATOR = Frame(CPU_GPU_SEPARATOR, CodeKind.PROCESS, name=CPU_GPU_SEPARATOR)
"""The separator of CPU and GPU frames; compared by identity, as a function may have this name."""
StackColumn = tuple[FrameLists, NDArray[np.int64]]
"""Lists of frames, from the root, and the index of each row's list: int64[n]."""


def is_separator(lists: FrameLists) -> bool:
    """Whether a column is SEPARATOR, and not a frame of that name."""
    return len(lists) == 1 and any(frame is SEPARATOR for frame in lists.frames)


def stack_columns(
    profile: Profile, options: StackOptions, row: NDArray[np.int64], reason: NDArray[np.int64]
) -> list[StackColumn]:
    """The components of stacks, from the root.

    Args:
        profile: the profile.
        options: the stack options; `inverted` has no effect here.
        row: int64[n], rows of the profile.
        reason: int64[n], an index into the profile's reasons for each.
    """
    columns: list[StackColumn] = []
    for components in _runs(options.components):
        if components[0] in CPU_COMPONENTS:
            columns.append((launches_frames(profile.launches, options, components), profile.launch[row]))
        elif components[0] in GPU_COMPONENTS:
            pairs, pair_of = numbered(profile.kernel * len(profile.codes) + profile.code)
            each = [divmod(pair, len(profile.codes)) for pair in pairs.tolist()]
            columns.append((FrameLists.of(_gpu_frames(profile, each, options, components)), pair_of[row]))
        elif components[0] == "interval":
            of_intervals = [[frame] for frame in interval_frames(profile.intervals)]
            columns.append((FrameLists.of(of_intervals), profile.interval[row]))
        elif components[0] == "reason":
            columns.append((FrameLists.of([[reason_frame(name)] for name in profile.reasons]), reason))
        elif components[0] == "offset":
            offsets, offset_of = numbered(profile.offset)
            frames = [[_offset_frame(offset)] for offset in offsets.tolist()]
            columns.append((FrameLists.of(frames), offset_of[row]))
        else:
            columns.append((FrameLists.of([[SEPARATOR]]), np.zeros(len(row), np.int64)))
    return columns


def _gpu_frames(
    profile: Profile, pairs: Sequence[tuple[int, int]], options: StackOptions, components: Sequence[str]
) -> list[list[Frame]]:
    """The frames of pairs of a kernel and a code; those of each component are made once for what they depend on."""
    known: dict[tuple[Any, ...], list[Frame]] = {}
    found: list[list[Frame]] = []
    for number, code_number in pairs:
        kernel, code, frames = profile.kernels[number], profile.codes[code_number], []
        place = number, code.functions, code.lines, code.files
        for component in components:
            key = (kernel is None, code.mnemonic) if component == "instruction" else (component, place)
            if (its := known.get(key)) is None:
                its = known[key] = gpu_frames(kernel, code, options, (component,))
            frames += its
        found.append(frames)
    return found


def cpu_columns(samples: CpuSamples, options: StackOptions) -> StackColumn:
    """The frames of CPU samples: the chosen CPU components, or all CPU components if none was chosen."""
    components = [component for component in options.components if component in CPU_COMPONENTS] or CPU_COMPONENTS
    return launches_frames(samples.launches, options, components), samples.launch


def _offset_frame(offset: int) -> Frame:
    text = f"0x{offset:x}"
    return Frame(f"{text}_[g]", CodeKind.INSTRUCTION, name=text)


def interval_frames(intervals: Sequence[float]) -> list[Frame]:
    """Each interval as a frame: its start in seconds since the first, padded to the same width so that texts sort."""
    since = [f"{begin - intervals[0]:.3f}" for begin in intervals]
    width = max(map(len, since), default=0)
    texts = (f"{text:0>{width}} s" for text in since)
    return [Frame(text, CodeKind.PROCESS, name=text) for text in texts]


def _runs(components: Sequence[str]) -> list[list[str]]:
    """Groups neighbouring components that come from the same columns, and puts `-` where the GPU's follow the CPU's."""
    runs: list[list[str]] = []
    for component in components:
        side = next((group for group in (CPU_COMPONENTS, GPU_COMPONENTS) if component in group), (component,))
        if runs and runs[-1][0] in CPU_COMPONENTS and side is not CPU_COMPONENTS and component != "interval":
            runs.append([CPU_GPU_SEPARATOR])
        if runs and runs[-1][0] in side:
            runs[-1].append(component)
        else:
            runs.append([component])
    return runs
