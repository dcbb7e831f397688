"""The stacks of a profile by component, as columns.

Many rows share a component of a stack, such as the CPU frames: each distinct one is stored once, with an index for each
row.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from iaprof.formats.export import CpuSamples
from iaprof.formats.profile import CodeKind, Profile, StackOptions
from iaprof.formats.stacks.frame_lists import FrameLists, launches_frames
from iaprof.formats.stacks.frames import (
    CPU_COMPONENTS,
    CPU_GPU_SEPARATOR,
    GPU_COMPONENTS,
    Frame,
    gpu_frames,
    reason_frame,
)

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
            pairs, pair_of = np.unique(profile.kernel * len(profile.codes) + profile.code, return_inverse=True)
            each = [divmod(pair, len(profile.codes)) for pair in pairs.tolist()]
            frames = [
                gpu_frames(profile.kernels[kernel], profile.codes[code], options, components) for kernel, code in each
            ]
            columns.append((FrameLists.of(frames), pair_of[row]))
        elif components[0] == "interval":
            of_intervals = [[frame] for frame in interval_frames(profile.intervals)]
            columns.append((FrameLists.of(of_intervals), profile.interval[row]))
        elif components[0] == "reason":
            columns.append((FrameLists.of([[reason_frame(name)] for name in profile.reasons]), reason))
        elif components[0] == "offset":
            offsets, offset_of = np.unique(profile.offset, return_inverse=True)
            frames = [[_offset_frame(offset)] for offset in offsets.tolist()]
            columns.append((FrameLists.of(frames), offset_of[row]))
        else:
            columns.append((FrameLists.of([[SEPARATOR]]), np.zeros(len(row), np.int64)))
    return columns


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
