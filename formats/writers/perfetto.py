"""Perfetto's native trace format: launches as slices of threads; stalls, CPU samples and metrics as counters.

The messages are those in protos/perfetto/trace/ of Perfetto's sources, from the `perfetto` package. Timestamps are
CLOCK_MONOTONIC as recorded, so that other traces from the same boot can be combined with this one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import IO, Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as pb

from iaprof.basics.clean import clean
from iaprof.formats.export import Executions, Export, Launches, OperatorSlices, Thread
from iaprof.formats.perfetto import packets
from iaprof.formats.perfetto.packets import EVENT_NAMES, MOST_PID, TEXTS, PacketWriter
from iaprof.formats.profile import StackOptions
from iaprof.formats.stacks.frames import StackTexts
from iaprof.formats.writers.timeline import (
    Intervals,
    cpu_samples,
    in_rows,
    kernels_title,
    lanes,
    lanes_title,
    launch_runs_of,
    nanoseconds,
    per_interval,
    process_text,
    queue_text,
    stalls,
    times_of,
    unit,
)
from iaprof.formats.writers.writer import Needs, Writer


class Perfetto(Writer):
    """The format of ui.perfetto.dev."""

    interval_s = 0.1
    needs = Needs.TIME | Needs.CPU | Needs.SERIES | Needs.LAUNCHES | Needs.ABOUT
    binary = True
    readable = False
    has_stacks = False

    def write(self, export: Export, options: StackOptions, out: IO[bytes]) -> None:
        """Writes the trace in chunks."""
        trace = _Trace(out, export)
        order = 0
        for found in stalls(export):
            group = trace.group(f"GPU samples {found.place}".strip(), order)
            _stalls(trace, group, found, per_interval(export, "samples"))
            order += 1
        if export.series:
            group = trace.group("Metrics", order)
            for rank, series in enumerate(export.series):
                name, of = unit(series.name)
                track = trace.counter(clean(f"{name} {series.place}".strip()), clean(of), group, rank)
                trace.add_values(track, series.seconds, series.values)
        cpu = cpu_samples(export)
        if cpu is not None:
            track = trace.counter("CPU samples", per_interval(export, "samples"), rank=order + 1)
            trace.add_values(track, cpu.seconds, cpu.counts[:, 0])
        if export.operators is not None:
            _operators(trace, export.operators)
        sources = None
        if export.executions is not None and export.launches is not None:
            sources = launch_runs_of(export.executions, export.launches)
        if export.executions is not None:
            _executions(trace, export.executions, export.launches, sources, options)
        if export.launches is not None:
            _runs(trace, export.launches, "launches", sources)
        if export.waits is not None:
            _runs(trace, export.waits, "waits")


def _stalls(trace: _Trace, group: int, found: Intervals, per: str) -> None:
    trace.add_values(trace.counter("all reasons", per, group, rank=0), found.seconds, found.counts.sum(axis=1))
    for number, reason in enumerate(found.names):
        if found.counts[:, number].any():
            track = trace.counter(reason, per, group, rank=1 + number, scale=f"reasons {group}")
            trace.add_values(track, found.seconds, found.counts[:, number])


def _executions(
    trace: _Trace,
    executions: Executions,
    launches: Launches | None,
    sources: NDArray[np.int64] | None,
    options: StackOptions,
) -> None:
    """Adds when kernels were seen: a track for each stack that launches one; the viewer shows those of a name as one.

    Tracks are in a group for each GPU and, where all launches of a stack are known to be of one queue, for each queue.
    The GPU's records say nothing of queues: a queue is as certain as the stack to which the samples were given.

    A flow begins at the run of launches that each run came from, and has its number.
    """
    groups: dict[str, int] = {}
    samples = np.bincount(executions.track, executions.count, len(executions.tracks))
    ranks = {executions.tracks[at].kernel: rank for rank, at in reversed([*enumerate(np.argsort(-samples).tolist())])}
    tracks, names, processes, stacks, queues = [], [], [], [], []
    texts = StackTexts(options)
    for each in executions.tracks:
        title = kernels_title(each)
        if title not in groups:
            groups[title] = trace.group(title, -1)
        kernel = clean(each.kernel)
        tracks.append(trace.track(packets.named(kernel), groups[title], ranks[each.kernel]))
        names.append(trace.intern(EVENT_NAMES, kernel))
        processes.append(trace.intern(TEXTS, process_text(each.launch)))
        stacks.append(trace.intern(TEXTS, texts.of(each.launch)))
        queues.append(trace.intern(TEXTS, queue_text(each)))
    track, names_, processes_, stacks_, queues_ = (
        np.array(values, np.int64)[executions.track] for values in (tracks, names, processes, stacks, queues)
    )
    more = [
        trace.annotation("samples", "uint_value", executions.count),
        trace.annotation("process", "string_value_iid", processes_),
        trace.annotation("queue", "string_value_iid", queues_),
        trace.annotation("stack", "string_value_iid", stacks_),
    ]
    if sources is not None:
        more.append(_flows(sources >= 0, np.arange(len(sources)), len(sources), are_ends=True))
    begins, ends = times_of(executions, launches, sources)
    trace.slices(track, (trace.times(begins), trace.times(ends)), names_, "gpu", more)


def _flows(known: NDArray[np.bool_], of: NDArray[np.int64], count: int, *, are_ends: bool) -> pa.BinaryArray:
    """Returns the flows of n slices: those of runs of samples whose launches are known, by the slices they are of."""
    numbers = np.flatnonzero(known)
    order = np.argsort(of[numbers], kind="stable")
    fields = packets.flows(numbers[order] + 1, np.full(len(numbers), are_ends))
    return packets.flows_together(fields, np.searchsorted(of[numbers][order], np.arange(count + 1)))


def _runs(trace: _Trace, launches: Launches, what: str, sources: NDArray[np.int64] | None = None) -> None:
    found = in_rows(launches)
    tracks = [
        trace.track(packets.named(clean(launches.kernels[kernel])), trace.thread_of(launches.threads[thread]), rank=1)
        for thread, kernel in found.rows
    ]
    more = [trace.annotation(what, "uint_value", found.counts)]
    if sources is not None:
        more.append(_flows(sources >= 0, sources, len(launches.begin), are_ends=False).take(pa.array(found.order)))
    times = trace.times(found.begins), trace.times(found.ends)
    trace.slices(np.array(tracks, np.int64)[found.row], times, trace.names(found.names), what, more)


def _operators(trace: _Trace, operators: OperatorSlices) -> None:
    """Adds a track for each depth; the viewer shows those of one name and thread as one, the outermost on top."""
    for lane in lanes(operators):
        track = trace.track(
            packets.named(lanes_title(operators)), trace.thread_of(operators.threads[lane.thread]), rank=0
        )
        begins, ends = (trace.times(times[lane.rows]) for times in (operators.begin, operators.end))
        names = trace.names([clean(operators.names[name]) for name in operators.name[lane.rows].tolist()])
        trace.slices(np.full(len(names), track), (begins, ends), names, "operators")


class _Trace(PacketWriter):
    """A trace that is being written. Its times are of CLOCK_MONOTONIC."""

    def __init__(self, out: IO[bytes], export: Export) -> None:
        super().__init__(out, pb.BUILTIN_CLOCK_MONOTONIC)
        self._processes: dict[tuple[str, int], int] = {}
        self._threads: dict[tuple[str, int, int], int] = {}
        intervals = export.profile.intervals or (export.by_time.intervals if export.by_time is not None else ())
        self._zero_ns = max(int(nanoseconds(intervals[:1])[0]), 0) if intervals else 0
        packet = pb.TracePacket()
        snapshot = packet.clock_snapshot
        snapshot.primary_trace_clock = pb.BUILTIN_CLOCK_MONOTONIC
        snapshot.clocks.add(clock_id=pb.BUILTIN_CLOCK_MONOTONIC, timestamp=self._zero_ns)
        wall_s = export.about.begun
        if wall_s > 0:
            snapshot.clocks.add(clock_id=pb.BUILTIN_CLOCK_REALTIME, timestamp=int(nanoseconds([wall_s])[0]))
        self.packet(packet)

    def times(self, seconds: NDArray[np.float64]) -> NDArray[np.int64]:
        """Converts seconds since time 0 to CLOCK_MONOTONIC ns."""
        return np.maximum(nanoseconds(seconds) + self._zero_ns, 0)

    def thread_of(self, thread: Thread) -> int:
        """The track of a thread, below that of its process."""
        process = thread.host, thread.pid
        has_number = not thread.host and 0 < thread.pid <= MOST_PID  # pids of several machines could collide
        comm = clean(thread.comm)
        if process not in self._processes:
            name = clean(" ".join(filter(None, (thread.host, thread.comm, str(thread.pid)))))
            what = packets.process(thread.pid, comm) if has_number else packets.named(name)
            self._processes[process] = self.track(what)
        key = (*process, thread.tid)
        if key not in self._threads:
            name = clean(f"{thread.comm} {thread.tid}")
            what = packets.thread(thread.pid, thread.tid, comm) if has_number else packets.named(name)
            self._threads[key] = self.track(what, self._processes[process], is_sorted=True)
        return self._threads[key]

    def names(self, names: Sequence[str]) -> NDArray[np.int64]:
        """The numbers of names of events."""
        return np.array([self.intern(EVENT_NAMES, name) for name in names], np.int64)

    def group(self, name: str, rank: int) -> int:
        """Adds a track whose children are sorted by rank."""
        return self.track(packets.named(name), rank=rank, is_sorted=True)

    def counter(self, name: str, unit: str, group: int = 0, rank: int | None = None, scale: str = "") -> int:
        """Adds a counter; those of one scale are drawn to it."""
        return self.track(packets.named(name), group, rank, counter=packets.counter(unit, scale))

    def add_values(self, track: int, seconds: NDArray[np.float64], values: NDArray[Any]) -> None:
        """Adds the values of a counter, each valid from its time on."""
        times, tracks = self.times(seconds), np.full(len(values), track)
        for part in packets.parts(len(values)):
            self.events(times[part], packets.values(tracks[part], values[part]))
