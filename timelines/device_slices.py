"""Gives slices of devices the categories of PyTorch's profiler, `kernel` and `gpu_memcpy`, where tools have others.

unitrace calls all that a device does `gpu_op`; rocprof's JSON and torch_npu say it by the name of the process. So
stages, tables and viewers need to know the categories of one tool only. Host slices keep theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from iaprof.formats.distinct import groups
from iaprof.timelines.arguments import Arguments, members_of
from iaprof.timelines.trace import Dialect, Trace

KERNEL, COPY = "kernel", "gpu_memcpy"
_MOST_PROCESSES = 1 << 16


@dataclass(frozen=True)
class Device:
    """What of a dialect a device does: regular expressions (RE2); what none of them finds is a host's."""

    categories: str = ""
    processes: str = ""  # by their names
    copies: str = ""  # by the names of slices, categories or processes
    others: str = ""  # names of what is neither a copy nor a kernel: waits and markers


DEVICES: Mapping[Dialect, Device] = {
    # unitrace/src/chromelogger.h: kernels have their own names, all else that of the call which queued it
    Dialect.UNITRACE: Device(
        categories="^gpu_op$",
        copies="(Memory|Image|Buffer)\\w*(Copy|Fill)|EnqueueCopy",
        others="^(Tile #\\d+: )?(ze|cl)[A-Z]",
    ),
    # rocprof's tblextr.py names processes; rocprofiler-systems has categories in Perfetto's format
    Dialect.ROCPROF: Device(
        categories="^(rocm_)?(kernel_dispatch|memory_copy)$",
        processes="^(\\d+ )?(GPU ?\\d+|COPY)$",
        copies="^(\\d+ )?COPY$|memory_copy|^(Copy|MEMORY_COPY_|hipMemcpy)",
    ),
    Dialect.TORCH_NPU: Device(
        processes="^Ascend Hardware$", copies="^MEMCPY", others="^(EVENT_|NOTIFY_|Notify_|MODEL_|PLACE_HOLDER|CAPTURE_)"
    ),
}


def categorize_device_slices(trace: Trace, arguments: Callable[[str], Arguments]) -> None:
    """Sets the categories.

    Args:
        trace: as it was loaded.
        arguments: opens those of the events of a kind.
    """
    used = {file.dialect for file in trace.files if not file.is_output} & DEVICES.keys()
    if not used:
        return
    slices, texts = trace.slices, trace.texts
    process = _process_names(trace, arguments)
    category = slices.category.copy()
    for dialect in used:
        device = DEVICES[dialect]
        is_own = np.array([file.dialect is dialect for file in trace.files])[slices.file]
        found = np.zeros(len(slices), bool)
        for codes, pattern in ((slices.category, device.categories), (process, device.processes)):
            if pattern:
                found |= is_own & texts.matches(codes, pattern)
        copies = found.copy()
        named = [texts.matches(codes, device.copies) for codes in (slices.name, slices.category, process)]
        copies &= np.logical_or.reduce(named)
        kernels = found & ~copies
        if device.others:
            others = kernels & texts.matches(slices.name, device.others)
            kernels &= ~others
        category[copies] = texts.code(COPY)
        category[kernels] = texts.code(KERNEL)
    slices.category = category


def _process_names(trace: Trace, arguments: Callable[[str], Arguments]) -> NDArray[np.int32]:
    """Returns the code of the name of each slice's process; NO_TEXT without one."""
    marks, texts = trace.instants, trace.texts
    is_name = texts.matches(marks.phase, "^M$") & texts.matches(marks.name, "^process_name$")
    rows = np.flatnonzero(is_name)[:_MOST_PROCESSES]
    found: dict[tuple[int, int], str] = {}
    if len(rows):
        with arguments("instant") as given:
            members = given.take(marks.row[rows]).to_pylist()
        for file, pid, text in zip(marks.file[rows].tolist(), marks.pid[rows].tolist(), members, strict=True):
            if isinstance(name := members_of(text).get("name"), str):
                found[file, pid] = name
    number, first = groups(trace.slices.file.astype(np.int64), trace.slices.pid)
    keys = zip(trace.slices.file[first].tolist(), trace.slices.pid[first].tolist(), strict=True)
    return texts.codes([found.get(key) for key in keys])[number]
