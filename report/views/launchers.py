"""Finds the function that launched a kernel: the frame of a stack that means most to the program's developer."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from iaprof.formats.guesses import unmarked
from iaprof.formats.profile import UNKNOWN_PROCESS, CodeKind, Launch
from iaprof.symbols.python.frames import python_function

NO_STACK = "[no stack]"
# Files and functions of GPU runtimes: Level Zero, OpenCL, and SYCL with its adapters.
_RUNTIME = re.compile(r"lib(ze_\w+|OpenCL|igdrcl|sycl|ur_\w+|pi_\w+)\.so[0-9.]*")
_ENTRIES = re.compile(r"(ze|cl|ur|pi)[A-Z]\w*(@@?[\w.]+)?|[\w ]*\bsycl::.*", re.DOTALL)
_LABEL = re.compile(r"\[.*\]|0x[0-9a-f]+", re.DOTALL)


def launcher(launch: Launch | None) -> str:
    """Returns the frame of the function that launched.

    This is the innermost Python function if there is one, as native frames below it are of libraries. Otherwise it is
    the innermost function with a name that does not belong to a GPU runtime, or else the innermost frame.
    """
    if launch is None:
        return UNKNOWN_PROCESS
    frames = launch.stack[::-1]
    found = next((frame for frame in frames if python_function(frame) is not None), None)
    if found is not None:
        return found
    origins = launch.origins[::-1]
    for index, frame in enumerate(frames):
        name = unmarked(frame)
        is_unknown = bool(_LABEL.fullmatch(name)) or (bool(origins) and origins[index].kind is CodeKind.UNKNOWN)
        module = os.path.basename(origins[index].module) if origins else ""
        if not (is_unknown or _RUNTIME.fullmatch(module) or _ENTRIES.fullmatch(name)):
            return frame
    return frames[0] if frames else NO_STACK


def by_launcher(launches: Sequence[Launch | None], of: NDArray[np.int64], counts: NDArray[np.uint64]) -> dict[str, int]:
    """Returns the samples of each launching function, most first.

    Args:
        launches: a profile's launches.
        of: int64[n], indices into them.
        counts: uint64[n], samples.
    """
    samples = np.bincount(of, counts, len(launches)).astype(np.int64)
    found: dict[str, int] = {}
    for index in np.flatnonzero(samples).tolist():
        name = launcher(launches[index])
        found[name] = found.get(name, 0) + int(samples[index])
    return dict(sorted(found.items(), key=lambda each: (-each[1], each[0])))
