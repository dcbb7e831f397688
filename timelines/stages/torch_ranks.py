"""Puts the devices of PyTorch's and other profilers' files on their ranks: PyTorch calls its device process 0.

Otherwise the devices of two ranks would be one. The pid of a rank's device is the rank, as in the files of the AIU's
runtime, and its label and place in viewers follow.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from iaprof.formats.distinct import groups
from iaprof.timelines.arguments import Arguments, members_of
from iaprof.timelines.dialects import Kind, find
from iaprof.timelines.grouped import Groups
from iaprof.timelines.trace import ABSENT, MADE, NO_TEXT, Dialect, Marks, Trace, TraceFile

_DEVICE_PID = 0
_RANK_STEP, _DEVICE_STEP = 123_000, 15  # of sort indexes: devices come after their hosts, as in the reference
_MOST_LABELS = 1 << 16
_PID_STEP = 10_000_000  # more than Linux's pids
_SEPARATE = frozenset({Dialect.TORCH_NPU, Dialect.UNITRACE, Dialect.ROCPROF})
_LAST_DIGIT = re.compile(r"\d$")


def place_on_ranks(trace: Trace, arguments: Callable[[], Arguments]) -> None:
    """Moves pid 0 of PyTorch's files to the rank, and `device` with it; labels and sorts processes by rank.

    Args:
        trace: as it was loaded.
        arguments: opens the arguments of its instants.
    """
    _separate_files(trace)
    torch = np.array([file.dialect is Dialect.TORCH and not file.is_output for file in trace.files] or [False])
    ranks = np.array([file.rank for file in trace.files] or [0], np.int64)
    if not (torch & (ranks > 0)).any():
        return
    for columns in (trace.slices, trace.points, trace.flows, trace.instants):
        on_device = torch[columns.file] & (columns.pid == _DEVICE_PID)
        columns.pid = np.where(on_device, ranks[columns.file], columns.pid)
        if columns is trace.slices:
            known = on_device & (trace.slices.device != ABSENT)
            trace.slices.device = np.where(known, ranks[columns.file], trace.slices.device)
    trace.files = [_with_rank(file) for file in trace.files]
    _sort_processes(trace, torch, ranks)
    _label_processes(trace, torch, ranks, arguments)


def _separate_files(trace: Trace) -> None:
    """Gives the one device of each file its rank for a process, in files of tools that number devices by themselves.

    Processes of several such files that have the same number, or that of a rank, get other ones. If all files have the
    same rank, nothing changes.
    """
    files = [file for file in trace.files if not file.is_output]
    if len({file.rank for file in files if file.dialect in _SEPARATE or file.dialect is Dialect.TORCH}) < 2:
        return
    ranks = np.array([file.rank for file in trace.files], np.int64)
    of_tools = np.array([file.dialect in _SEPARATE and not file.is_output for file in trace.files])
    of_pytorch = np.array([file.dialect is Dialect.TORCH and not file.is_output for file in trace.files])
    slices = trace.slices
    number, first = groups(slices.file.astype(np.int64), slices.pid)
    file, pid = slices.file[first], slices.pid[first]
    is_device = np.zeros(len(first), bool)
    is_device[number[find(trace, Kind.KERNEL)]] = True
    is_device &= (of_tools | of_pytorch)[file]
    single = is_device & (np.bincount(file[is_device], minlength=len(ranks))[file] == 1)
    single &= of_tools[file] | (pid != _DEVICE_PID)
    movable = (of_tools[file] | (of_pytorch[file] & ~is_device & (pid != _DEVICE_PID))) & ~single
    movable &= (pid > 0) & (pid < _PID_STEP)
    of_pid, rank = Groups(pid), ranks[file]
    several = (of_pid.min(rank) < of_pid.max(rank))[of_pid.numbers]
    is_rank = np.isin(pid, rank[is_device])
    step = np.where(is_rank, rank + 1, rank)  # those of rank 0 stay, but for the number of a rank
    found = np.where(single, rank, np.where(movable & (several | is_rank), pid + _PID_STEP * step, pid))
    changed = np.flatnonzero(found != pid)
    moved = dict(
        zip(zip(file[changed].tolist(), pid[changed].tolist(), strict=True), found[changed].tolist(), strict=True)
    )
    for columns in (trace.slices, trace.points, trace.flows, trace.instants):
        number, first = groups(columns.file.astype(np.int64), columns.pid)
        pairs = zip(columns.file[first].tolist(), columns.pid[first].tolist(), strict=True)
        columns.pid = np.array([moved.get(pair, pair[1]) for pair in pairs], np.int64)[number]


def _with_rank(file: TraceFile) -> TraceFile:
    """Gives the device of a file its rank for an id, if the file has one device."""
    if (
        file.dialect is not Dialect.TORCH
        or file.is_output
        or len(file.devices) != 1
        or file.devices[0].get("id") != _DEVICE_PID
    ):
        return file
    device: Mapping[str, Any] = {**file.devices[0], "id": file.rank}
    return replace(file, devices=(device,))


def _metadata(trace: Trace, name: str, torch: NDArray[np.bool_]) -> NDArray[np.int64]:
    marks = trace.instants
    of_name = trace.texts.matches(marks.phase, "^M$") & trace.texts.matches(marks.name, f"^{name}$")
    return np.flatnonzero(of_name & torch[marks.file])


def _sort_processes(trace: Trace, torch: NDArray[np.bool_], ranks: NDArray[np.int64]) -> None:
    marks = trace.instants
    rows = _metadata(trace, "process_sort_index", torch)
    rank = ranks[marks.file[rows]]
    index = np.full(len(marks), ABSENT, np.int64)
    index[rows] = rank * _RANK_STEP + np.where(marks.pid[rows] <= rank, _DEVICE_STEP, 0)
    _replace(marks, rows, "sort_index", index)


def _label_processes(
    trace: Trace, torch: NDArray[np.bool_], ranks: NDArray[np.int64], arguments: Callable[[], Arguments]
) -> None:
    """Replaces the digit at the end of a label by the rank."""
    marks = trace.instants
    rows = _metadata(trace, "process_labels", torch)[:_MOST_LABELS]
    if not len(rows):
        return
    with arguments() as given:
        members = given.take(marks.row[rows]).to_pylist()
    labels = np.full(len(marks), NO_TEXT, np.int32)
    for row, text in zip(rows.tolist(), members, strict=True):
        label = _label(text)
        if label is not None and _LAST_DIGIT.search(label):
            labels[row] = trace.texts.code(_LAST_DIGIT.sub(str(ranks[marks.file[row]]), label))
    _replace(marks, np.flatnonzero(labels != NO_TEXT), "labels", labels)


def _label(members: str | None) -> str | None:
    label = members_of(members).get("labels")
    return label if isinstance(label, str) else None


def _replace(marks: Marks, rows: NDArray[np.int64], name: str, values: NDArray[Any]) -> None:
    """Replaces the imported arguments of some marks by one member."""
    if len(rows):
        marks.extra[name] = values
        marks.row = marks.row.copy()
        marks.row[rows] = MADE
