"""Tracks in Perfetto's format: a process for each rank and each host process, their threads, and counters."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from iaprof.basics.clean import clean
from iaprof.formats.distinct import distinct_values, groups
from iaprof.formats.perfetto.packets import PacketWriter
from iaprof.formats.texts import clean_texts
from iaprof.timelines.arguments import Arguments, members_of
from iaprof.timelines.dialects import Kind, find
from iaprof.timelines.outputs.perfetto_descriptors import Counters, Names, Processes, Threads, write
from iaprof.timelines.trace import MADE, Trace

_MOST_NAMED = 1 << 20  # metadata events that are read


@dataclass(frozen=True)
class Tracks:
    """The track of each event, by kind."""

    slices: NDArray[np.int64]
    points: NDArray[np.int64]
    flows: NDArray[np.int64]
    instants: NDArray[np.int64]


def names(trace: Trace, arguments: Arguments | None) -> Names:
    """Returns the names in metadata events, the last one for each process and thread."""
    processes: dict[int, str] = {}
    labels: dict[int, str] = {}
    threads: dict[tuple[int, int], str] = {}
    instants = trace.instants
    is_named = trace.texts.matches(instants.phase, "^M$") & (instants.row != MADE)
    is_named &= trace.texts.matches(instants.name, "^(process_name|process_labels|thread_name)$")
    rows = np.flatnonzero(is_named)[:_MOST_NAMED]
    if arguments is None or not len(rows):
        return Names(processes, labels, threads)
    kinds = trace.texts.taken(instants.name[rows]).to_pylist()
    texts = arguments.take(instants.row[rows]).dictionary_encode(null_encoding="encode")
    members = [members_of(text) for text in texts.dictionary.to_pylist()]
    for kind, pid, tid, text in zip(
        kinds, instants.pid[rows].tolist(), instants.tid[rows].tolist(), texts.indices.to_pylist(), strict=True
    ):
        name = members[text].get("labels" if kind == "process_labels" else "name")
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
    slices, points, flows = trace.slices, trace.points, trace.flows
    shown = ~trace.texts.matches(trace.instants.phase, "^M$")  # metadata name tracks, and are in none
    instants = trace.instants.take(shown)
    on_device = find(trace, Kind.DEVICE)
    sizes = [len(slices), len(flows), len(instants)]
    pids = np.concatenate([slices.pid, flows.pid, instants.pid])
    tids = np.concatenate([slices.tid, flows.tid, instants.tid])
    level = np.concatenate([levels, np.zeros(sizes[1] + sizes[2], np.int64)])
    row, first = groups(pids, tids, level)
    pids, tids, level = pids[first], tids[first], level[first]
    thread, _ = groups(pids, tids)
    of_device = np.zeros(len(first), bool)
    of_device[thread[row[: sizes[0]][on_device]]] = True
    threads = Threads(pids, tids, level, of_device[thread], named)
    counter, first = groups(points.pid, points.name, points.series)
    counters = Counters(points.pid[first], _cleaned(trace, points.name[first]), _cleaned(trace, points.series[first]))
    uuids = write(threads, counters, Processes(named, distinct_values(slices.pid[on_device])), out)
    of_threads, of_counters = np.split(uuids, [len(pids)])
    of_instants = np.zeros(len(trace.instants), np.int64)
    of_slices, of_flows, of_instants[shown] = np.split(of_threads[row], np.cumsum(sizes)[:-1])
    return Tracks(of_slices, of_counters[counter], of_flows, of_instants)


def _cleaned(trace: Trace, codes: NDArray[np.int32]) -> pa.StringArray:
    """Returns texts by their codes, as they can be shown."""
    number, first = groups(codes)
    distinct = pc.fill_null(clean_texts(trace.texts.taken(codes[first])), "")
    return distinct.cast(pa.string()).take(pa.array(number))
