"""Tracks in Perfetto's format: a process for each rank and each host process, their threads, and counters."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from iaprof.formats.perfetto.packets import MOST_PID, PacketWriter
from iaprof.formats.profile import clean
from iaprof.report.timeline.arguments import Arguments
from iaprof.report.timeline.dialects import Kind, find
from iaprof.report.timeline.grouped import groups
from iaprof.report.timeline.trace import HOST_PIDS, Slices, Trace

_MOST_TID = (1 << 47) - 1  # larger numbers stand for texts
_MOST_NAMED = 1 << 20  # metadata events that are read
_ALL_RANKS = -1  # the pid of counters of all ranks together


@dataclass(frozen=True)
class Tracks:
    """The track of each event, by kind."""

    slices: NDArray[np.int64]
    points: NDArray[np.int64]
    flows: NDArray[np.int64]
    instants: NDArray[np.int64]


@dataclass(frozen=True)
class Names:
    """What metadata events say."""

    processes: Mapping[int, str]
    labels: Mapping[int, str]
    threads: Mapping[tuple[int, int], str]


def names(trace: Trace, arguments: Arguments | None) -> Names:
    """Returns the names in metadata events, the last one for each process and thread."""
    found = Names({}, {}, {})
    processes: dict[int, str] = {}
    labels: dict[int, str] = {}
    threads: dict[tuple[int, int], str] = {}
    instants = trace.instants
    is_named = trace.texts.matches(instants.phase, "^M$")
    is_named &= trace.texts.matches(instants.name, "^(process_name|process_labels|thread_name)$")
    rows = np.flatnonzero(is_named)[:_MOST_NAMED]
    if arguments is None or not len(rows):
        return found
    kinds = trace.texts.taken(instants.name[rows]).to_pylist()
    texts = arguments.take(instants.row[rows]).to_pylist()
    for kind, pid, tid, text in zip(
        kinds, instants.pid[rows].tolist(), instants.tid[rows].tolist(), texts, strict=True
    ):
        try:
            members = json.loads(f"{{{text or ''}}}")
        except (ValueError, RecursionError):
            continue
        name = members.get("labels" if kind == "process_labels" else "name")
        if not isinstance(name, str) or not name:
            continue
        match kind:
            case "process_name":
                processes[pid] = clean(name)
            case "process_labels":
                labels[pid] = clean(name)
            case _:
                threads[pid, tid] = clean(name)
    return Names(processes, labels, threads)


def describe(trace: Trace, levels: NDArray[np.int64], named: Names, out: PacketWriter) -> Tracks:
    """Writes the descriptors of all tracks.

    Args:
        trace: the trace.
        levels: of its slices, see stages.overlap.levels: each level of a row is a track.
        named: names of processes and threads.
        out: receives them.
    """
    slices, flows = trace.slices, trace.flows
    shown = ~trace.texts.matches(trace.instants.phase, "^M$")  # metadata name tracks, and are in none
    instants = trace.instants.take(shown)
    on_device = find(trace, Kind.DEVICE)
    device_pids = set(np.unique(slices.pid[on_device]).tolist())
    processes = _Processes(named, device_pids, out)
    sizes = [len(slices), len(flows), len(instants)]
    pids = np.concatenate([slices.pid, flows.pid, instants.pid])
    tids = np.concatenate([slices.tid, flows.tid, instants.tid])
    level = np.concatenate([levels, np.zeros(sizes[1] + sizes[2], np.int64)])
    row, first = groups(pids, tids, level)
    devices = _rows_of_devices(slices, on_device)
    uuids = np.empty(len(first), np.int64)
    for number, at in enumerate(first.tolist()):
        pid, tid, lane = int(pids[at]), int(tids[at]), int(level[at])
        name = named.threads.get((pid, tid)) or _thread_name(tid, (pid, tid) in devices)
        uuids[number] = processes.thread(pid, tid, lane, name)
    of_instants = np.zeros(len(trace.instants), np.int64)
    of_slices, of_flows, of_instants[shown] = np.split(uuids[row], np.cumsum(sizes)[:-1])
    return Tracks(of_slices, _counters(trace, processes, out), of_flows, of_instants)


def _rows_of_devices(slices: Slices, on_device: NDArray[np.bool_]) -> set[tuple[int, int]]:
    pids, tids = slices.pid[on_device], slices.tid[on_device]
    _, first = groups(pids, tids)
    return set(zip(pids[first].tolist(), tids[first].tolist(), strict=True))


def _thread_name(tid: int, is_device: bool) -> str:
    return f"device {tid}" if is_device else f"thread {tid}"


def _counters(trace: Trace, processes: _Processes, out: PacketWriter) -> NDArray[np.int64]:
    points, texts = trace.points, trace.texts
    row, first = groups(points.pid, points.name, points.series)
    uuids = np.empty(len(first), np.int64)
    pids, names_, series = (getattr(points, column)[first].tolist() for column in ("pid", "name", "series"))
    for number, (pid, name, of_name) in enumerate(zip(pids, names_, series, strict=True)):
        uuids[number] = out.counter(clean(texts[name]), clean(texts[of_name]), processes.of(pid))
    return np.asarray(uuids[row], np.int64)


class _Processes:
    """Tracks of processes, each described when it is first used."""

    def __init__(self, named: Names, device_pids: set[int], out: PacketWriter) -> None:
        self._named, self._device_pids, self._out = named, device_pids, out
        self._tracks: dict[int, int] = {}
        self._threads: dict[tuple[int, int], int] = {}

    def of(self, pid: int) -> int:
        """Returns the track of a process; 0 for what is of all ranks together."""
        if pid == _ALL_RANKS:
            return 0
        if pid not in self._tracks:
            name = self._name(pid)
            self._tracks[pid] = self._out.process(pid, name) if 0 <= pid <= MOST_PID else self._out.track(name, 0)
        return self._tracks[pid]

    def _name(self, pid: int) -> str:
        name, label = self._named.processes.get(pid), self._named.labels.get(pid)
        if name is None:
            name = f"process {pid}"
            if pid in self._device_pids:
                name = f"rank {pid}"
            elif pid - HOST_PIDS in self._device_pids:
                name = f"host of rank {pid - HOST_PIDS}"
        return f"{name} ({label})" if label else name

    def thread(self, pid: int, tid: int, lane: int, name: str) -> int:
        """Adds a thread, or a further row of one, whose slices would overlap."""
        parent = self.of(pid)
        if lane:
            return self._out.track(f"{name} (row {lane + 1})", parent)
        if 0 <= pid <= MOST_PID and 0 <= tid <= _MOST_TID:
            return self._out.thread(pid, tid, name, parent)
        return self._out.track(name, parent)
