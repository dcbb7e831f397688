"""Perfetto's native trace format: launches as slices of threads; stalls, CPU samples and metrics as counters.

The messages are those in protos/perfetto/trace/ of Perfetto's sources, from the `perfetto` package. Timestamps are
CLOCK_MONOTONIC as recorded, so that other traces from the same boot can be combined with this one.
"""

from __future__ import annotations

from typing import IO, Any

import numpy as np
from numpy.typing import NDArray
from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as pb

from iaprof.formats.export import Export, Launches, Thread
from iaprof.formats.profile import StackOptions, clean
from iaprof.formats.writers.timeline import Intervals, cpu_samples, per_interval, rows, run_name, stalls, unit
from iaprof.formats.writers.writer import Needs, Writer

_SEQUENCE = 1
_PACKETS_AT_ONCE = 4096
_LATEST_S = 4e9  # limits times: their ns, added to those of time 0, fit into 63 bits
_MOST_PID = (1 << 31) - 1  # ProcessDescriptor.pid is an int32
_LAUNCHES, _WAITS = 1, 2  # ids of interned annotation names


class Perfetto(Writer):
    """The format of ui.perfetto.dev."""

    interval_s = 0.1
    needs = Needs.TIME | Needs.CPU | Needs.SERIES | Needs.LAUNCHES
    binary = True
    readable = False
    has_stacks = False

    def write(self, export: Export, options: StackOptions, out: IO[bytes]) -> None:
        """Writes the trace in chunks."""
        trace = _Trace(out, export)
        order = 0
        for found in stalls(export):
            group = trace.group(f"GPU stalls {found.place}".strip(), order)
            _stalls(trace, group, found, per_interval(export, "samples"))
            order += 1
        if export.series:
            group = trace.group("Metrics", order)
            for rank, series in enumerate(export.series):
                name, of = unit(series.name)
                track = trace.counter(f"{name} {series.place}".strip(), of, group, rank)
                trace.values(track, series.seconds, series.values)
        cpu = cpu_samples(export)
        if cpu is not None:
            track = trace.counter("CPU samples", per_interval(export, "samples"), rank=order + 1)
            trace.values(track, cpu.seconds, cpu.counts[:, 0])
        if export.launches is not None:
            _runs(trace, export.launches, _LAUNCHES)
        if export.waits is not None:
            _runs(trace, export.waits, _WAITS)
        trace.flush()


def _stalls(trace: _Trace, group: int, found: Intervals, per: str) -> None:
    trace.values(trace.counter("all reasons", per, group, rank=0), found.seconds, found.counts.sum(axis=1))
    for number, reason in enumerate(found.names):
        if found.counts[:, number].any():
            track = trace.counter(reason, per, group, rank=1 + number, shared="reasons")
            trace.values(track, found.seconds, found.counts[:, number])


def _runs(trace: _Trace, launches: Launches, what: int) -> None:
    for row in rows(launches):
        kernel = clean(launches.kernels[row.kernel])
        track = trace.track(kernel, trace.thread(launches.threads[row.thread]))
        begins, ends = trace.times(np.array(row.begins)), trace.times(np.array(row.ends))
        for begin, end, count in zip(begins, ends, row.counts, strict=True):
            trace.slice(track, run_name(kernel, count), begin, end, what, count)


class _Trace:
    """A trace that is being written."""

    def __init__(self, out: IO[bytes], export: Export) -> None:
        self._out = out
        self._trace = pb.Trace()
        self._tracks = 0  # the number of tracks, which are numbered from 1
        self._processes: dict[tuple[str, int], int] = {}
        self._threads: dict[tuple[str, int, int], int] = {}
        self._names: dict[str, int] = {}
        intervals = export.profile.intervals or (export.by_time.intervals if export.by_time is not None else ())
        self._zero_ns = round(min(max(intervals[0], 0), _LATEST_S) * 1e9) if intervals else 0
        self._begin(export.about.begun)

    def _begin(self, wall_s: float) -> None:
        packet = self._packet()
        packet.sequence_flags = pb.TracePacket.SEQ_INCREMENTAL_STATE_CLEARED
        packet.trace_packet_defaults.timestamp_clock_id = pb.BUILTIN_CLOCK_MONOTONIC
        packet.interned_data.debug_annotation_names.add(iid=_LAUNCHES, name="launches")
        packet.interned_data.debug_annotation_names.add(iid=_WAITS, name="waits")
        packet = self._packet()
        snapshot = packet.clock_snapshot
        snapshot.primary_trace_clock = pb.BUILTIN_CLOCK_MONOTONIC
        snapshot.clocks.add(clock_id=pb.BUILTIN_CLOCK_MONOTONIC, timestamp=self._zero_ns)
        if wall_s > 0:
            snapshot.clocks.add(clock_id=pb.BUILTIN_CLOCK_REALTIME, timestamp=round(min(wall_s, _LATEST_S) * 1e9))

    def _packet(self) -> Any:
        if len(self._trace.packet) >= _PACKETS_AT_ONCE:
            self.flush()
        return self._trace.packet.add(trusted_packet_sequence_id=_SEQUENCE)

    def flush(self) -> None:
        """Writes the buffered packets: serialized traces can be concatenated."""
        self._out.write(self._trace.SerializeToString())
        self._trace.Clear()

    def times(self, seconds: NDArray[np.float64]) -> list[int]:
        """Converts seconds since time 0 to CLOCK_MONOTONIC ns."""
        since = np.rint(np.clip(seconds, -_LATEST_S, _LATEST_S) * 1e9).astype(np.int64)
        found: list[int] = np.maximum(since + self._zero_ns, 0).tolist()
        return found

    def _describe(self, parent: int = 0, rank: int | None = None) -> Any:
        """Adds a track and returns its descriptor."""
        self._tracks += 1
        found = self._packet().track_descriptor
        found.uuid = self._tracks
        if parent:
            found.parent_uuid = parent
        if rank is not None:
            found.sibling_order_rank = rank
        return found

    def track(self, name: str, parent: int) -> int:
        """Adds a track and returns its number."""
        self._describe(parent).name = name
        return self._tracks

    def group(self, name: str, rank: int) -> int:
        """Adds a parent track whose children are sorted by rank; returns its number."""
        found = self._describe(rank=rank)
        found.name = name
        found.child_ordering = pb.TrackDescriptor.EXPLICIT
        return self._tracks

    def counter(self, name: str, of: str, parent: int = 0, rank: int = 0, shared: str = "") -> int:
        """Adds a counter track; counters with the same `shared` and parent have a common scale. Returns its number."""
        found = self._describe(parent, rank)
        found.name = clean(name)
        found.counter.unit_name = clean(of)
        if shared:
            found.counter.y_axis_share_key = f"{shared} {parent}"
        return self._tracks

    def thread(self, thread: Thread) -> int:
        """The track of a thread, below that of its process."""
        process = thread.host, thread.pid
        named = not thread.host and 0 < thread.pid <= _MOST_PID  # pids of several machines could collide
        if process not in self._processes:
            found = self._describe()
            if named:
                found.process.pid, found.process.process_name = thread.pid, clean(thread.comm)
            else:
                found.name = clean(" ".join(filter(None, (thread.host, thread.comm, str(thread.pid)))))
            self._processes[process] = self._tracks
        key = (*process, thread.tid)
        if key not in self._threads:
            found = self._describe(self._processes[process])
            if named:
                found.thread.pid, found.thread.tid, found.thread.thread_name = (
                    thread.pid,
                    thread.tid,
                    clean(thread.comm),
                )
            else:
                found.name = clean(f"{thread.comm} {thread.tid}")
            self._threads[key] = self._tracks
        return self._threads[key]

    def values(self, track: int, seconds: NDArray[np.float64], values: NDArray[Any]) -> None:
        """Adds the values of a counter, each valid from its time on."""
        whole = values.dtype.kind == "i"
        for time, value in zip(self.times(seconds), values.tolist(), strict=True):
            event = self._event(track, time, pb.TrackEvent.TYPE_COUNTER).track_event
            if whole:
                event.counter_value = value
            else:
                event.double_counter_value = value

    def slice(self, track: int, name: str, begin: int, end: int, what: int, count: int) -> None:
        """Adds a run of launches or waits; times in ns."""
        packet = self._event(track, begin, pb.TrackEvent.TYPE_SLICE_BEGIN)
        if name not in self._names:
            self._names[name] = len(self._names) + 1
            packet.interned_data.event_names.add(iid=self._names[name], name=name)
        packet.track_event.name_iid = self._names[name]
        packet.track_event.debug_annotations.add(name_iid=what, uint_value=count)
        self._event(track, end, pb.TrackEvent.TYPE_SLICE_END)

    def _event(self, track: int, time: int, type_: int) -> Any:
        packet = self._packet()
        packet.timestamp = time
        packet.sequence_flags = pb.TracePacket.SEQ_NEEDS_INCREMENTAL_STATE
        packet.track_event.track_uuid = track
        packet.track_event.type = type_
        return packet
