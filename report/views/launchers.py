"""Which function launched a kernel: of all frames of a stack the one that its reader wrote, or called."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from iaprof.formats.profile import UNKNOWN_PROCESS, Kind, Launch
from iaprof.symbols.python.without_interpreter import python_function

NO_STACK = "[no stack]"
# What is between a program and the GPU: files and functions of Level Zero, OpenCL, and SYCL with its adapters.
_RUNTIME = re.compile(r"lib(ze_\w+|OpenCL|igdrcl|sycl|ur_\w+|pi_\w+)\.so[0-9.]*")
_ENTRIES = re.compile(r"(ze|cl|ur|pi)[A-Z]\w*(@@?[\w.]+)?|[\w ]*\bsycl::.*", re.DOTALL)
_LABEL = re.compile(r"\[.*\]|0x[0-9a-f]+", re.DOTALL)


def launcher(launch: Launch | None) -> str:
    """The frame of the function that launched.

    It is the innermost function of Python, if there is one: what it called is an extension that it uses. Else it is
    the innermost function that has a name and is not of a GPU runtime; else the innermost frame.
    """
    if launch is None:
        return UNKNOWN_PROCESS
    frames = launch.stack[::-1]
    found = next((frame for frame in frames if python_function(frame) is not None), None)
    if found is not None:
        return found
    origins = launch.origins[::-1]
    for index, frame in enumerate(frames):
        is_unknown = bool(_LABEL.fullmatch(frame)) or (bool(origins) and origins[index].kind is Kind.UNKNOWN)
        module = os.path.basename(origins[index].module) if origins else ""
        if not (is_unknown or _RUNTIME.fullmatch(module) or _ENTRIES.fullmatch(frame)):
            return frame
    return frames[0] if frames else NO_STACK


def by_launcher(launches: Sequence[Launch | None], of: NDArray[np.int64], counts: NDArray[np.uint64]) -> dict[str, int]:
    """The samples that each function launched, most first.

    Args:
        launches: of a profile.
        of: int64[n], indices into them.
        counts: uint64[n], samples.
    """
    samples = np.bincount(of, counts, len(launches)).astype(np.int64)
    found: dict[str, int] = {}
    for index in np.flatnonzero(samples).tolist():
        name = launcher(launches[index])
        found[name] = found.get(name, 0) + int(samples[index])
    return dict(sorted(found.items(), key=lambda each: (-each[1], each[0])))
