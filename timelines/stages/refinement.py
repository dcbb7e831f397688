"""Names, categories and processes as TensorBoard and trace viewers expect them."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from iaprof.formats.distinct import distinct_values
from iaprof.timelines.dialects import Kind, find
from iaprof.timelines.grouped import Groups
from iaprof.timelines.intervals import ends
from iaprof.timelines.made_events import EVERYWHERE
from iaprof.timelines.options import Options
from iaprof.timelines.trace import ABSENT, HOST_PIDS, MADE, NO_TEXT, Dialect, Marks, Points, Slices, Trace

MEMORY_COPY, ANNOTATION, KERNEL, HOST_OPERATION = "gpu_memcpy", "user_annotation", "kernel", "cpu_op"

COLLECTIVE = "^(gloo|nccl):(broadcast|reduce|all_reduce|all_gather|reduce_scatter)$"
"""The names of collectives for TensorBoard's plugin (torch_tb_profiler 0.4.3, profiler/trace.py)."""
EXTERNAL_ID = "External id"
_LARGEST_ID = 1 << 62

_OF_ROWS = ("file", "pid", "tid", "start", "duration")
"""The columns with the place of slices: all columns of millions of slices need much memory."""

# Digits after anything but a V are removed, with a "_" before them; digits at the start of a name stay.
DIGITS, WITHOUT_DIGITS = r"(V\d+)|(^\d+)|_?\d+", r"\1\2"


def strip_numbers(trace: Trace, options: Options) -> None:
    """Takes numbers out of the names of device slices, so that viewers add them up; `orig_name` keeps the names."""
    slices, texts = trace.slices, trace.texts
    device = find(trace, Kind.DEVICE)
    names = np.where(
        device, texts.replaced(np.where(device, slices.name, NO_TEXT), DIGITS, WITHOUT_DIGITS), slices.name
    )
    changed = (names != slices.name) & ~texts.matches(names, "^$")
    known = slices.extra.get("orig_name", np.full(len(slices), NO_TEXT, np.int32))
    slices.extra["orig_name"] = np.where(changed & (known == NO_TEXT), slices.name, known).astype(np.int32)
    slices.name = np.where(changed, names, slices.name).astype(np.int32)


def place_on_devices(trace: Trace, options: Options) -> None:
    """Puts FLEX slices on the process of their rank's device or host, with all that belongs to them.

    The pid of a device is its rank, and that of its host 1000 more. `rank` has the rank of all slices. In TORCH files,
    marks and counters follow the slices of a device, which were moved from pid 0 to their rank.
    """
    slices = trace.slices
    flex = _of_dialect(trace, slices, Dialect.FLEX)
    ranks = np.array([file.rank for file in trace.files] or [0], np.int64)
    slices.extra["rank"] = np.where(flex, slices.pid, ranks[slices.file])
    device = find(trace, Kind.DEVICE)
    on_device, on_host = flex & device, flex & ~device
    slices.category = _categories(trace, on_device, on_host)
    slices.device = np.where(on_device, slices.pid, slices.device)
    devices, hosts = (slices.take(each, _OF_ROWS) for each in (on_device, on_host))
    moved = distinct_values(hosts.pid)
    slices.pid = np.where(on_host, slices.pid + HOST_PIDS, slices.pid)
    for marks in (trace.flows, trace.instants):
        of_host = _of_dialect(trace, marks, Dialect.FLEX) & np.isin(marks.pid, moved)
        of_host &= ~_are_on_device(marks, devices, hosts)
        marks.pid = np.where(of_host, marks.pid + HOST_PIDS, marks.pid)
    points = trace.points
    inputs = _of_dialect(trace, points, Dialect.FLEX) & (points.row != MADE) & np.isin(points.pid, moved)
    points.pid = np.where(inputs, points.pid + HOST_PIDS, points.pid)
    for events in (trace.flows, trace.instants, trace.points):
        _follow_devices(trace, events)
    _name_processes(trace, devices, hosts)
    _identify_collectives(trace)


def _of_dialect(trace: Trace, events: Slices | Points | Marks, dialect: Dialect) -> NDArray[np.bool_]:
    if not trace.files:
        return np.full(len(events), dialect is Dialect.FLEX)
    return np.asarray(trace.is_torch(events) == (dialect is not Dialect.FLEX), bool)


def _categories(trace: Trace, on_device: NDArray[np.bool_], on_host: NDArray[np.bool_]) -> NDArray[np.int32]:
    texts, names, category = trace.texts, trace.slices.name, trace.slices.category.copy()
    copies = texts.matches(names, "DmaI|DmaO")
    remote = copies & texts.matches(names, "Rdma")
    remote |= texts.matches(names, "AllReduce_all_reduce") & texts.matches(names, "Cmpt Exec")
    category[on_device] = texts.code(KERNEL)
    category[on_device & copies] = texts.code(MEMORY_COPY)
    category[on_device & remote] = texts.code(ANNOTATION)
    category[on_host & (category == NO_TEXT)] = texts.code(HOST_OPERATION)
    return category


def _are_on_device(marks: Marks, devices: Slices, hosts: Slices) -> NDArray[np.bool_]:
    """Tells which marks belong to a device: they are inside of its slices, or their row has no slices of a host."""
    return _inside(marks, devices) | (_have_row(marks, devices) & ~_have_row(marks, hosts))


def _have_row(marks: Marks, slices: Slices) -> NDArray[np.bool_]:
    count = len(marks)
    if not count or not len(slices):
        return np.zeros(count, bool)
    rows = Groups(np.append(marks.pid, slices.pid), np.append(marks.tid, slices.tid))
    has = np.zeros(len(rows), bool)
    has[rows.numbers[count:]] = True
    return has[rows.numbers[:count]]


def _inside(marks: Marks, slices: Slices) -> NDArray[np.bool_]:
    """Tells which marks are within a slice of their row, its ends included."""
    count = len(marks)
    if not count or not len(slices):
        return np.zeros(count, bool)
    rows = Groups(np.append(marks.pid, slices.pid), np.append(marks.tid, slices.tid)).numbers
    starts, until = slices.start, ends(slices)
    steps = np.concatenate([np.zeros(count, np.int64), np.ones(len(slices), np.int64), -np.ones(len(slices), np.int64)])
    # At one instant, slices start before marks, and end after them.
    turn = np.concatenate([np.ones(count), np.zeros(len(slices)), np.full(len(slices), 2)])
    times = np.concatenate([marks.time, starts, until])
    row = np.concatenate([rows[:count], rows[count:], rows[count:]])
    order = np.lexsort((turn, times, row))
    open_ = np.empty(len(order), np.int64)
    open_[order] = np.cumsum(steps[order])
    return open_[:count] > 0


def _follow_devices(trace: Trace, events: Marks | Points) -> None:
    """Moves TORCH events of pid 0, the device, to the rank to which all slices of that pid have moved."""
    slices = trace.slices
    for number, file in enumerate(trace.files):
        if file.dialect is Dialect.TORCH and file.rank:
            of_file = (events.file == number) & (events.pid == 0)
            if of_file.any() and not ((slices.file == number) & (slices.pid == 0)).any():
                events.pid = np.where(of_file, file.rank, events.pid)


def _identify_collectives(trace: Trace) -> None:
    """Gives slices of collectives without an `External id` one of their own.

    TensorBoard's plugin treats slices with one id, or without one, as one collective, with all kernels of that id
    (torch_tb_profiler 0.4.3, profiler/event_parser.py: communication_data).
    """
    slices = trace.slices
    ids = slices.extra.get(EXTERNAL_ID, np.full(len(slices), ABSENT))
    lacking = np.flatnonzero(trace.texts.matches(slices.name, COLLECTIVE) & (ids <= 0))
    if not len(lacking):
        return
    largest = int(ids.max(initial=0))
    ids = ids.copy()
    ids[lacking] = np.arange(len(lacking)) + (largest + 1 if largest < _LARGEST_ID else 1)
    slices.extra[EXTERNAL_ID] = ids


def _name_processes(trace: Trace, devices: Slices, hosts: Slices) -> None:
    """Adds metadata that name and sort the processes of FLEX ranks.

    Args:
        trace: gets the metadata.
        devices: slices of devices, whose pid is their rank.
        hosts: slices of hosts, before they are moved: their pid is also their rank.
    """
    for some, name, is_host in ((hosts, "Host", True), (devices, "AIU Device", False)):
        groups = Groups(some.pid)
        ranks = groups.key(some.pid)
        labels = trace.texts.codes(pc.binary_join_element_wise(name, pa.array(ranks).cast(pa.string()), ""))
        pids, order = ranks + (HOST_PIDS if is_host else 0), ranks * 3 + (0 if is_host else 1)
        _add_metadata(trace, groups.key(some.file), pids, groups.min(some.start), labels, order)
    points = trace.points
    of_all = np.flatnonzero((points.pid == EVERYWHERE) & (points.row == MADE))[:1]
    if len(of_all):
        label, none = trace.texts.codes(["CollectiveBW"]), np.zeros(1, np.int64)
        _add_metadata(trace, points.file[of_all], points.pid[of_all], points.time[of_all], label, none)


def _add_metadata(
    trace: Trace,
    file: NDArray[np.int32],
    pid: NDArray[np.int64],
    time: NDArray[np.int64],
    label: NDArray[np.int32],
    order: NDArray[np.int64],
) -> None:
    count, none = len(pid), np.full(len(pid), NO_TEXT, np.int32)
    members: tuple[tuple[str, dict[str, NDArray[np.int32] | NDArray[np.int64]]], ...] = (
        ("process_name", {"name": label}),
        ("process_labels", {"labels": label}),
        ("process_sort_index", {"sort_index": order}),
    )
    for name, extra in members:
        made = Marks(
            file=file.astype(np.int32), pid=pid, tid=np.zeros(count, np.int64),
            phase=np.full(count, trace.texts.code("M"), np.int32),
            name=np.full(count, trace.texts.code(name), np.int32), category=none,
            id=np.full(count, ABSENT), time=time, row=np.full(count, MADE, np.int64), extra=dict(extra),
        )  # fmt: skip
        trace.instants = trace.instants.joined(made)
    trace.made["names and places of processes"] += 3 * count


def keep_phases(trace: Trace, options: Options) -> None:
    """Drops the events of phases that are not asked for, by the letters of Chrome's format."""
    if not options.phases:
        return
    if "X" not in options.phases:
        trace.keep(np.zeros(len(trace.slices), bool), "phases not asked for")
    if "C" not in options.phases and len(trace.points):
        trace.dropped["phases not asked for"] += len(trace.points)
        trace.points = trace.points.take(np.zeros(len(trace.points), bool))
    for name in ("flows", "instants"):
        marks: Marks = getattr(trace, name)
        asked = np.isin(marks.phase, trace.texts.codes(list(options.phases)))
        trace.dropped["phases not asked for"] += int((~asked).sum())
        setattr(trace, name, marks.take(asked))
