"""What events mean in each dialect: regular expressions for the names and categories that runtimes give them.

A new dialect is an entry in each of these tables. Regular expressions have RE2's syntax and match anywhere in a text.

Slices of devices get the categories of PyTorch's profiler, `kernel` and `gpu_memcpy`, where tools have others: unitrace
uses `gpu_op` for everything that a device does; in rocprof's and torch_npu's JSON the name of the process tells it. So
stages, tables and viewers need to know the categories of one tool only. Host slices keep theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from iaprof.formats.distinct import groups
from iaprof.timelines.arguments import Arguments, members_of
from iaprof.timelines.trace import NO_TEXT, Dialect, Slices, Texts, Trace


class Kind(StrEnum):
    """The kinds of slices. A slice can be of several kinds."""

    DEVICE = "device"  # something that the device did
    KERNEL = "kernel"
    PREPARATION = "preparation"
    COPY_IN = "copy in"
    COPY_OUT = "copy out"
    COLLECTIVE = "collective"  # belongs to a collective operation
    BARRIER = "barrier"
    ROUND_TRIP = "round trip"
    CONVERSION = "conversion"
    WIRE_UP = "wire-up"


class Where(StrEnum):
    """Which column of a slice tells its kind."""

    NAME = "name"
    CATEGORY = "category"
    COUNTERS = "counters"  # it has TS1
    GROUP = "group"  # it has a CollGroup


@dataclass(frozen=True)
class Sign:
    """How slices of a kind are recognized."""

    where: Where
    pattern: str = ""
    unless: str = ""  # a regular expression: slices that match it are of another kind


def _name(pattern: str, unless: str = "") -> Sign:
    return Sign(Where.NAME, pattern, unless)


_TORCH: Mapping[Kind, Sign] = {
    Kind.DEVICE: Sign(Where.CATEGORY, "gpu|kernel"),
    Kind.KERNEL: Sign(Where.CATEGORY, "kernel"),
    Kind.PREPARATION: _name("Cmpt Prep$"),
    Kind.COPY_IN: _name(r"[Mm]emcpy \(HtoD\)"),
    Kind.COPY_OUT: _name(r"[Mm]emcpy \(DtoH\)"),
    Kind.COLLECTIVE: _name("HCOLL|^(void )?(nccl|rccl|oneccl)[^:]"),  # kernels, not `nccl:all_reduce` around them
    Kind.BARRIER: _name("[Bb]arrier:"),
    Kind.ROUND_TRIP: _name("aiuLaunchSuperNode|aiuSuperNodeExecution"),
    Kind.CONVERSION: _name("aiuDataConvert"),
    Kind.WIRE_UP: _name("aiuPrepareAndSyncRdma"),
}
# Loading gives the slices of these tools' devices the categories of PyTorch's, see categorize_device_slices.
_COPIES = {
    Kind.COPY_IN: _name(r"[(]?[HM]2D\b|CopyHostToDevice|HOST_TO_DEVICE|MEMCPY_ASYNC:H2D"),
    Kind.COPY_OUT: _name(r"[(]?D2[HM]\b|CopyDeviceToHost|DEVICE_TO_HOST|MEMCPY_ASYNC:D2H"),
}

SIGNS: Mapping[Dialect, Mapping[Kind, Sign]] = {
    Dialect.FLEX: {
        Kind.DEVICE: Sign(Where.COUNTERS),
        Kind.KERNEL: _name("Cmpt Exec$"),
        Kind.PREPARATION: _name("Cmpt Prep$"),
        Kind.COPY_IN: _name(" DmaI"),
        Kind.COPY_OUT: _name(" DmaO"),
        Kind.COLLECTIVE: Sign(Where.GROUP),
        Kind.BARRIER: _name("[Bb]arrier:"),
        Kind.ROUND_TRIP: _name("^Flex RoundTrip$"),
        Kind.CONVERSION: _name("Compute of ", unless="Compute of .*SenFusedDeviceNode"),
        Kind.WIRE_UP: _name("PrepareAndSyncRdma"),
    },
    Dialect.TORCH: _TORCH,
    Dialect.TORCH_NPU: {**_TORCH, **_COPIES},
    Dialect.UNITRACE: {**_TORCH, **_COPIES},
    Dialect.ROCPROF: {**_TORCH, **_COPIES},
    Dialect.UNKNOWN: _TORCH,
}

WINDOWS = (("[ _]DmaI$", 0, 1), (" Cmpt Prep$", 1, 2), ("( Cmpt Exec|_Cmpt)$", 2, 3), ("[ _]DmaO$", 3, 4))
"""Between which two of the device's counters TS1 to TS5 a FLEX slice runs: their indexes, by the end of its name.

`_DmaI`, `_Cmpt` and `_DmaO` end the names that --split makes.
"""
OTHER_WINDOW = (0, 4)


def find(trace: Trace, kind: Kind, slices: Slices | None = None) -> NDArray[np.bool_]:
    """Tells which slices are of a kind, in the dialects of their files.

    Args:
        trace: the trace.
        kind: the kind to find.
        slices: slices of the trace; None for all of them.
    """
    slices = trace.slices if slices is None else slices
    used = sorted({file.dialect for file in trace.files})
    found = np.zeros(len(slices), bool)
    if len(used) > 1:
        number = np.array([used.index(file.dialect) for file in trace.files], np.int8)[slices.file]
    for place, dialect in enumerate(used):
        of_kind = _found(trace, SIGNS[dialect][kind], slices)
        if len(used) > 1:
            of_kind &= number == place
        found |= of_kind
    return found


def communicates(trace: Trace) -> NDArray[np.bool_]:
    """Tells which slices of devices move data between ranks and compute nothing.

    Kernels that belong to a collective are such slices in PyTorch's and other profilers' files (`ncclDevKernel_...`).
    In FLEX files they add up what was received.
    """
    found = find(trace, Kind.COLLECTIVE) & find(trace, Kind.DEVICE) & ~find(trace, Kind.PREPARATION)
    return found & (trace.is_torch(trace.slices) | ~find(trace, Kind.KERNEL))


def _found(trace: Trace, sign: Sign, slices: Slices) -> NDArray[np.bool_]:
    if sign.where is Where.COUNTERS:
        return slices.has_counters
    if sign.where is Where.GROUP:
        return np.asarray(slices.group != NO_TEXT, bool)
    codes = slices.name if sign.where is Where.NAME else slices.category
    found = trace.texts.matches(codes, sign.pattern)
    return found & ~trace.texts.matches(codes, sign.unless) if sign.unless else found


def windows(texts: Texts, names: NDArray[np.int32]) -> tuple[NDArray[np.int8], NDArray[np.int8]]:
    """Returns the indexes of the first and the last counter of each name's window: int8[n] each, 0 to 4."""
    first, last = (np.full(len(names), index, np.int8) for index in OTHER_WINDOW)
    for pattern, start, end in WINDOWS:
        found = texts.matches(names, pattern)
        first[found], last[found] = start, end
    return first, last


KERNEL, COPY = "kernel", "gpu_memcpy"
_MOST_PROCESSES = 1 << 16


@dataclass(frozen=True)
class Device:
    """How a dialect's slices of devices are recognized: regular expressions (RE2). All other slices are of hosts."""

    categories: str = ""
    processes: str = ""  # by their names
    copies: str = ""  # by the names of slices, categories or processes
    others: str = ""  # by the names of slices that are neither copies nor kernels: waits and markers


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
    """Sets the categories of slices of devices to those of PyTorch's profiler.

    Args:
        trace: as it was loaded.
        arguments: opens the arguments of the events of a kind.
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
        found_in = [texts.matches(codes, device.copies) for codes in (slices.name, slices.category, process)]
        copies &= np.logical_or.reduce(found_in)
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
