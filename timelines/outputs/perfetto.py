"""Perfetto's native trace format, for https://ui.perfetto.dev: smaller than Chrome's, and with units and exact times.

Slices are pairs of begin and end, so those of a track must be nested: slices that are not get a track of their own.
Ends are rounded down to ns. A flow is attached to the begin or the end of the innermost slice around it, whichever is
closer in time; where there is no slice, it is an instant.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import IO, Any, Literal, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as pb
from pyarrow import BinaryArray as Bytes

from iaprof.basics.clean import clean
from iaprof.formats.distinct import distinct_values, few, groups
from iaprof.formats.perfetto import columns, packets
from iaprof.formats.perfetto.columns import MOST_ROWS
from iaprof.formats.perfetto.packets import CATEGORIES, EVENT_NAMES, MOST_PID, PacketWriter
from iaprof.formats.profile import StackOptions
from iaprof.formats.texts import clean_texts
from iaprof.timelines.arguments import Arguments, members_of
from iaprof.timelines.dialects import Kind, find
from iaprof.timelines.made_events import EVERYWHERE, unique_ids
from iaprof.timelines.outputs.chrome import INTERNAL
from iaprof.timelines.outputs.event_order import EventKind, EventOrder, by_time
from iaprof.timelines.outputs.formats import TimeLine
from iaprof.timelines.outputs.perfetto_arguments import ImportedArguments
from iaprof.timelines.own_output import EVENT, described
from iaprof.timelines.stages.overlap import levels
from iaprof.timelines.trace import ABSENT, HOST_PIDS, MADE, Marks, Slices, Trace

_TRACKS_AT_ONCE = MOST_ROWS
_MOST_TID = (1 << 47) - 1  # larger numbers stand for texts


@dataclass(frozen=True)
class Names:
    """The names that metadata events give to processes and threads."""

    processes: Mapping[int, str]
    labels: Mapping[int, str]
    threads: Mapping[tuple[int, int], str]


class _Tracks(Protocol):
    """Tracks of one kind."""

    @property
    def pids(self) -> NDArray[np.int64]: ...

    def messages(self, rows: slice, parents: NDArray[np.int64]) -> Bytes:
        """Returns the descriptors of a range of tracks, without their numbers. A parent of 0 means no parent."""


@dataclass(frozen=True)
class Processes:
    """The names of processes."""

    names: Names
    device_pids: NDArray[np.int64]

    def messages(self, pids: NDArray[np.int64]) -> Bytes:
        """Returns the descriptors of some processes, without their numbers."""
        is_rank = np.isin(pids, self.device_pids)
        is_host = np.isin(pids - HOST_PIDS, self.device_pids) & ~is_rank
        starts = pa.array(["process ", "rank ", "host of rank "]).take(pa.array(is_rank + 2 * is_host))
        made = _joined(starts, _decimal(np.where(is_host, pids - HOST_PIDS, pids)))
        name = pc.coalesce(pa.array(map(self.names.processes.get, pids.tolist()), pa.string()), made)
        label = pa.array(map(self.names.labels.get, pids.tolist()), pa.string())
        name = pc.coalesce(_joined(name, " (", label, ")"), name)
        has_number = pa.array((pids >= 0) & (pids <= MOST_PID))
        return pc.if_else(has_number, packets.process(pids, name), packets.named(name))


@dataclass(frozen=True)
class Threads:
    """Threads, and the further rows of threads whose slices would overlap in one."""

    pids: NDArray[np.int64]
    tids: NDArray[np.int64]
    levels: NDArray[np.int64]  # 0 for the thread itself
    of_device: NDArray[np.bool_]
    names: Names

    def messages(self, rows: slice, parents: NDArray[np.int64]) -> Bytes:
        """Returns the descriptors of a range of tracks, without their numbers. A parent of 0 means no parent."""
        pids, tids, levels = self.pids[rows], self.tids[rows], self.levels[rows]
        starts = pa.array(["thread ", "device "]).take(pa.array(self.of_device[rows].astype(np.int8)))
        keys = zip(pids.tolist(), tids.tolist(), strict=True)
        name = pc.coalesce(pa.array(map(self.names.threads.get, keys), pa.string()), _joined(starts, _decimal(tids)))
        row = pc.if_else(pa.array(levels > 0), _joined(" (row ", _decimal(levels + 1), ")"), "")
        name = _joined(name, row)
        has_number = (levels == 0) & (pids >= 0) & (pids <= MOST_PID) & (tids >= 0) & (tids <= _MOST_TID)
        what = pc.if_else(pa.array(has_number), packets.thread(pids, tids, name), packets.named(name))
        return columns.message([what, packets.below(parents)], len(name))


@dataclass(frozen=True)
class Counters:
    """Counters."""

    pids: NDArray[np.int64]
    names: pa.StringArray
    units: pa.StringArray

    def messages(self, rows: slice, parents: NDArray[np.int64]) -> Bytes:
        """Returns the descriptors of a range of tracks, without their numbers. A parent of 0 means no parent."""
        fields = [packets.named(self.names[rows]), packets.below(parents), packets.counter(self.units[rows])]
        return columns.message(fields, len(parents))


def write_tracks(threads: Threads, counters: Counters, processes: Processes, out: PacketWriter) -> NDArray[np.int64]:
    """Writes tracks, each process before its first track.

    Returns:
        int64[n], the numbers of the threads and then of the counters.
    """
    pids = np.concatenate([threads.pids, counters.pids])
    process, first = groups(pids)
    is_first = np.zeros(len(pids), bool)
    is_first[first] = pids[first] != EVERYWHERE
    place = np.arange(len(pids)) + np.cumsum(is_first)  # among all tracks
    numbers = out.number_tracks(len(pids) + int(is_first.sum()))
    parents = np.where(pids == EVERYWHERE, 0, numbers[place[first] - 1][process])
    kinds: tuple[_Tracks, ...] = (threads, counters)
    begin = 0
    for kind in kinds:
        for at in range(0, len(kind.pids), _TRACKS_AT_ONCE):
            rows = slice(at, min(at + _TRACKS_AT_ONCE, len(kind.pids)))
            all_ = slice(begin + rows.start, begin + rows.stop)
            new = np.flatnonzero(is_first[all_])
            messages = [processes.messages(pids[all_][new]), kind.messages(rows, parents[all_])]
            order = np.insert(len(new) + np.arange(rows.stop - rows.start), new, np.arange(len(new)))
            last = place[all_.stop - 1] + 1
            out.tracks(numbers[last - len(order) : last], [pa.concat_arrays(messages).take(pa.array(order))])
        begin += len(kind.pids)
    return np.asarray(numbers[place], np.int64)


def _decimal(numbers: NDArray[np.int64]) -> pa.StringArray:
    return pa.array(numbers).cast(pa.string())


def _joined(*texts: pa.StringArray | str) -> pa.StringArray:
    return pc.binary_join_element_wise(*texts, "")


_MOST_NAMES = 1 << 20  # metadata events that are read


@dataclass(frozen=True)
class Tracks:
    """The track of each event, by kind."""

    slices: NDArray[np.int64]
    points: NDArray[np.int64]
    flows: NDArray[np.int64]
    instants: NDArray[np.int64]


def names_in_metadata(trace: Trace, arguments: Arguments | None) -> Names:
    """Returns the names in metadata events, the last one for each process and thread."""
    processes: dict[int, str] = {}
    labels: dict[int, str] = {}
    threads: dict[tuple[int, int], str] = {}
    instants = trace.instants
    has_name = trace.texts.matches(instants.phase, "^M$") & (instants.row != MADE)
    has_name &= trace.texts.matches(instants.name, "^(process_name|process_labels|thread_name)$")
    rows = np.flatnonzero(has_name)[:_MOST_NAMES]
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


def describe_tracks(trace: Trace, levels: NDArray[np.int64], names: Names, out: PacketWriter) -> Tracks:
    """Writes the descriptors of all tracks.

    Args:
        trace: the trace.
        levels: of its slices, see stages.overlap.levels: each level of a row is a track.
        names: those of processes and threads.
        out: receives them.
    """
    slices, points, flows = trace.slices, trace.points, trace.flows
    shown = ~trace.texts.matches(trace.instants.phase, "^M$")  # metadata events give names to tracks, and are on none
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
    threads = Threads(pids, tids, level, of_device[thread], names)
    counter, first = groups(points.pid, points.name, points.series)
    counters = Counters(points.pid[first], _cleaned(trace, points.name[first]), _cleaned(trace, points.series[first]))
    uuids = write_tracks(threads, counters, Processes(names, distinct_values(slices.pid[on_device])), out)
    of_threads, of_counters = np.split(uuids, [len(pids)])
    of_instants = np.zeros(len(trace.instants), np.int64)
    of_slices, of_flows, of_instants[shown] = np.split(of_threads[row], np.cumsum(sizes)[:-1])
    return Tracks(of_slices, of_counters[counter], of_flows, of_instants)


def _cleaned(trace: Trace, codes: NDArray[np.int32]) -> pa.StringArray:
    """Returns texts by their codes, cleaned for display."""
    number, first = groups(codes)
    distinct = pc.fill_null(clean_texts(trace.texts.taken(codes[first])), "")
    return distinct.cast(pa.string()).take(pa.array(number))


_NONE = -1
_AT_ONCE = 1 << 19  # slices
_FARTHEST = (1 << 63) - 1


@dataclass(frozen=True)
class Flows:
    """Which slices the flows of a trace are attached to."""

    is_free: NDArray[np.bool_]  # [flows], those without a slice
    _fields: Bytes  # [flows], each flow as a field of an event
    _keys: NDArray[np.int64]  # [m], twice a slice's row, plus 1 for its end; ascending
    _lists: Bytes  # [m], the fields of its flows

    def fields(self, slices: NDArray[np.int64], at_end: bool) -> Bytes:
        """Returns the flows of slices; null for slices without flows."""
        wanted = 2 * slices + at_end
        place = np.searchsorted(self._keys, wanted)
        inside = np.minimum(place, max(len(self._keys) - 1, 0))
        absent = np.ones(len(slices), bool) if not len(self._keys) else self._keys[inside] != wanted
        return self._lists.take(pa.array(inside, mask=absent))

    def free_fields(self, rows: NDArray[np.int64]) -> Bytes:
        """Returns flows that are events of their own."""
        return self._fields.take(pa.array(rows))


def attached_flows(trace: Trace, slices: Slices, where: Tracks) -> Flows:
    """Finds the slice of each flow.

    Args:
        trace: the trace.
        slices: its slices, with durations of whole ns, none of which partly overlap within a track.
        where: the tracks of all events.
    """
    flows = trace.flows
    unique = unique_ids(flows)
    ids = np.where(unique == ABSENT, 0, unique)
    is_last = trace.texts.matches(flows.phase, "^f$")
    fields = packets.flows(ids, is_last)
    slice_ = _enclosing(slices, where.slices, flows.time, where.flows, ends_first=True)
    other = np.flatnonzero(slice_ == _NONE)
    slice_[other] = _enclosing(slices, where.slices, flows.time[other], where.flows[other], ends_first=False)
    is_free = slice_ == _NONE
    bound = np.flatnonzero(~is_free)
    start = slices.start[slice_[bound]]
    half = slices.duration[slice_[bound]] / 2
    keys = 2 * slice_[bound] + (flows.time[bound] - start > half)
    order = np.lexsort((flows.time[bound], keys))
    keys = keys[order]
    firsts = np.flatnonzero(np.diff(keys, prepend=_NONE))
    joined = packets.flows_together(fields.take(pa.array(bound[order])), np.append(firsts, len(keys)))
    return Flows(is_free, fields, keys[firsts], joined if len(firsts) else pa.array([b""], pa.binary()))


def _enclosing(
    slices: Slices, tracks: NDArray[np.int64], times: NDArray[np.int64], marked: NDArray[np.int64], ends_first: bool
) -> NDArray[np.int64]:
    """Returns the innermost slice of the same track at some times; _NONE where there is none.

    Args:
        slices: n of them, nested within each track.
        tracks: int64[n].
        times: int64[m].
        marked: int64[m], tracks of the times.
        ends_first: whether a slice that ends at a time is over.
    """
    found = np.full(len(times), _NONE, np.int64)
    used = np.flatnonzero(np.isin(tracks, marked) & (slices.duration > 0))
    if not len(times) or not len(used):
        return found
    start, length = slices.start, slices.duration
    used = used[np.lexsort((start[used], tracks[used]))]
    asked = np.lexsort((times, marked))
    for those, these in _apart(start, length, tracks, used, times, marked, asked):
        begin, long = start[those], length[those].astype(np.int64)
        inner = _innermost(begin, long, tracks[those], times[these], marked[these], ends_first)
        found[these] = np.where(inner == _NONE, _NONE, those[inner])
    return found


def _apart(
    start: NDArray[np.int64],
    length: NDArray[np.float64],
    tracks: NDArray[np.int64],
    used: NDArray[np.int64],
    times: NDArray[np.int64],
    marked: NDArray[np.int64],
    asked: NDArray[np.int64],
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """Yields slices and marks in groups, such that no slice is around a mark of another group.

    All of them at once need much memory.

    Args:
        start: int64[n] of slices.
        length: float64[n].
        tracks: int64[n].
        used: slices, by track and start.
        times: int64[m] of marks.
        marked: int64[m], their tracks.
        asked: marks, by track and time.
    """
    track, of_marks = tracks[used], marked[asked]
    begin = 0
    while begin < len(used):
        end = min(begin + _AT_ONCE, len(used))
        if end < len(used) and track[end] == track[end - 1]:
            if track[begin] != track[end]:  # whole tracks
                end = int(np.searchsorted(track, track[end]))
            else:
                last = int(np.searchsorted(track, track[end], "right"))
                mine = used[begin:last]
                until = np.maximum.accumulate(start[mine] + length[mine].astype(np.int64))
                free = np.flatnonzero(start[mine][_AT_ONCE:] > until[_AT_ONCE - 1 : -1])
                end = end + int(free[0]) if len(free) else last
        low = _place(times, of_marks, asked, start[used[begin]], track[begin]) if begin else 0
        high = _place(times, of_marks, asked, start[used[end]], track[end]) if end < len(used) else len(asked)
        yield used[begin:end], asked[low:high]
        begin = end


def _place(
    times: NDArray[np.int64], of_marks: NDArray[np.int64], asked: NDArray[np.int64], time: int, track: int
) -> int:
    """Returns how many marks are on earlier tracks, or on the same track at an earlier time."""
    low, high = (int(np.searchsorted(of_marks, track, side)) for side in ("left", "right"))
    return low + int(np.searchsorted(times[asked[low:high]], time))


def _innermost(
    start: NDArray[np.int64],
    length: NDArray[np.int64],
    tracks: NDArray[np.int64],
    times: NDArray[np.int64],
    marked: NDArray[np.int64],
    ends_first: bool,
) -> NDArray[np.int64]:
    """Returns what `_enclosing` does, for slices none of which is empty."""
    found = np.full(len(times), _NONE, np.int64)
    distinct = distinct_values(tracks)
    marked_here = np.searchsorted(distinct, marked)
    known = np.flatnonzero(distinct[np.minimum(marked_here, len(distinct) - 1)] == marked)
    begin, end, mark = _on_one_line(
        np.searchsorted(distinct, tracks), start, start + length, marked_here[known], times[known]
    )
    order = by_time(begin, -length)  # at one instant, the longest first
    begin, end = begin[order], np.sort(end, kind="stable")
    depth = np.arange(len(begin)) - np.searchsorted(end, begin, "right")  # slices around each one
    # A mark is after the begins, and before the ends, of the slices around it.
    side: Literal["left", "right"] = "right" if ends_first else "left"
    latest = np.searchsorted(begin, mark, side) - 1
    level = latest - np.searchsorted(end, mark, side)
    inside = np.flatnonzero(level >= 0)
    latest, level = latest[inside], level[inside]
    # The latest begin of a level is the slice that is open there.
    higher = np.flatnonzero(depth[latest] != level)
    if len(higher):
        by_level = _stable(depth)
        keys = depth[by_level] * len(depth) + by_level
        latest[higher] = by_level[np.searchsorted(keys, level[higher] * len(depth) + latest[higher], "right") - 1]
    found[known[inside]] = order[latest]
    return found


def _on_one_line(
    tracks: NDArray[np.int64],
    begins: NDArray[np.int64],
    ends: NDArray[np.int64],
    marked: NDArray[np.int64],
    times: NDArray[np.int64],
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Returns the times of slices and marks, shifted so that each track comes after the tracks before it."""
    first, last = min(begins.min(), times.min(initial=_FARTHEST)), max(ends.max(), times.max(initial=-_FARTHEST))
    span = int(last) - int(first) + 1
    if span * (int(tracks.max()) + 1) > _FARTHEST:  # only their order matters
        numbers = np.unique(np.concatenate([begins, ends, times]), return_inverse=True)[1]
        begins, ends, times = np.split(numbers, np.cumsum([len(begins), len(ends)]))
        first, span = 0, len(numbers)
    return begins - first + span * tracks, ends - first + span * tracks, times - first + span * marked


def _stable(values: NDArray[Any]) -> NDArray[np.int64]:
    """Returns rows in order of non-negative integers (stable). Small integers are sorted ten times as fast."""
    return np.argsort(values.astype(np.uint16) if values.max(initial=0) < 1 << 16 else values, kind="stable")


_BEGIN, _END, _POINT, _FLOW, _INSTANT = range(5)  # kinds of packets
_LAST = np.int64(1 << 62)  # ranks events of one instant: ends, begins (the longest first), slices without a length
_LONGEST = float(1 << 60)  # ns


def write_report(shown: TimeLine, _: StackOptions, out: IO[bytes]) -> None:
    """Writes what `iaprof timeline -o` writes as trace.pftrace."""
    with shown.arguments() as given:
        write_perfetto(shown.trace, given, out)


def write_perfetto(
    trace: Trace, arguments: Mapping[str, Arguments], output: IO[bytes], prepared: Callable[[], None] = lambda: None
) -> None:
    """Writes a trace, its events in order of time. If that is before 0, all times are moved so that they start at 0.

    Args:
        trace: the trace.
        arguments: of imported events, by kind of row: slice, flow and instant.
        output: receives the packets.
        prepared: called before events are written, after the steps that need most memory.
    """
    whole = np.floor(np.clip(np.nan_to_num(trace.slices.duration), 0, _LONGEST) + 1e-6)
    slices = trace.slices.changed(duration=whole)
    out = PacketWriter(output, pb.BUILTIN_CLOCK_BOOTTIME)
    level = levels(slices)
    named = names_in_metadata(trace, arguments.get("instant"))
    where = describe_tracks(trace, level, named, out)
    writer = _Writer(trace, slices, where, arguments, out)
    prepared()
    for number, (kinds, rows, times) in enumerate(writer.chunks()):
        if not number:
            _name_files(trace, out, int(times[0]))
        writer.write(kinds, rows, times)


def _name_files(trace: Trace, out: PacketWriter, time: int) -> None:
    """Writes which files the events are from, see own_output.py, at the time of the first event."""
    for each in described(trace):
        packet = pb.TracePacket(timestamp=time, sequence_flags=pb.TracePacket.SEQ_NEEDS_INCREMENTAL_STATE)
        packet.track_event.track_uuid, packet.track_event.name = 1, EVENT
        packet.track_event.legacy_event.phase = ord("M")
        for name, value in each.items():
            annotation = packet.track_event.debug_annotations.add(name=name)
            if isinstance(value, int):
                annotation.int_value = value
            else:
                annotation.string_value = value
        out.packet(packet)


class _Writer:
    def __init__(
        self, trace: Trace, slices: Slices, where: Tracks, arguments: Mapping[str, Arguments], out: PacketWriter
    ) -> None:
        self._trace, self._slices, self._where, self._arguments, self._out = trace, slices, where, arguments, out
        self._imported = ImportedArguments(out)
        self._known = {kind: np.zeros(len(trace.texts), bool) for kind in (EVENT_NAMES, CATEGORIES)}
        self._flows = attached_flows(trace, slices, where)
        self._ids = unique_ids(trace.instants)  # of asynchronous events
        self._jobs = pa.array(trace.job_names, pa.string())

    def chunks(self) -> Iterator[tuple[NDArray[np.int8], NDArray[np.int64], NDArray[np.int64]]]:
        """Yields kinds, row numbers and times of packets, in order of time."""
        trace, slices = self._trace, self._slices
        instants = np.flatnonzero(~trace.texts.matches(trace.instants.phase, "^M$"))  # metadata are descriptors
        free = np.flatnonzero(self._flows.is_free)
        count = len(slices)
        sizes = [count, count, len(trace.points), len(free), len(instants)]
        begins = np.cumsum([0, *sizes[:-1]])  # of kinds among all events
        start, duration = slices.start, slices.duration
        of_points, of_flows, of_instants = trace.points.time, trace.flows.time, trace.instants.time
        times = [
            lambda span: start[span],
            lambda span: start[span] + duration[span].astype(np.int64),
            lambda span: of_points[span],
            lambda span: of_flows[free[span]],
            lambda span: of_instants[instants[span]],
        ]
        order = EventOrder([EventKind(size, each) for size, each in zip(sizes, times, strict=True)])

        def rank(events: NDArray[np.int64]) -> NDArray[np.int64]:
            """Returns what tells the order of events at one instant."""
            of_slices = events < 2 * count
            rows = np.where(of_slices, events % max(count, 1), 0)
            lengths = duration[rows].astype(np.int64) if count else rows
            at_end = events >= count
            found = np.where(lengths == 0, _LAST + 2 * rows + at_end, np.where(at_end, 0, _LAST - lengths))
            return np.where(of_slices, found, 0)

        first = min(order.earliest, 0)
        for events, at in order.chunks(rank, MOST_ROWS):
            kinds = np.searchsorted(np.cumsum(sizes), events, "right").astype(np.int8)
            rows = events - begins[kinds]
            for kind, chosen in ((_FLOW, free), (_INSTANT, instants)):
                of_kind = kinds == kind
                rows[of_kind] = chosen[rows[of_kind]]
            yield kinds, rows, at - first

    def write(self, kinds: NDArray[np.int8], rows: NDArray[np.int64], times: NDArray[np.int64]) -> None:
        """Writes a chunk of packets."""
        made, places = [], []
        makers = (self._begins, self._end_fields, self._points, self._free_flows, self._instants)
        for kind, make in enumerate(makers):
            at = np.flatnonzero(kinds == kind)
            if len(at):
                made.append(columns.message(make(rows[at]), len(at)))
                places.append(at)
        back = np.empty(len(rows), np.int64)
        back[np.concatenate(places)] = np.arange(len(rows))
        self._out.events(times, [pa.concat_arrays(made).take(pa.array(back))])

    def _begins(self, rows: NDArray[np.int64]) -> list[bytes | Bytes]:
        slices = self._slices.take(rows)
        return [
            packets.begins(self._where.slices[rows]),
            *self._names(slices),
            *self._slice_arguments(slices, rows),
            self._flows.fields(rows, at_end=False),
        ]

    def _end_fields(self, rows: NDArray[np.int64]) -> list[bytes | Bytes]:
        return [
            packets.ends(self._where.slices[rows]),
            self._flows.fields(rows, at_end=True),
        ]

    def _points(self, rows: NDArray[np.int64]) -> list[bytes | Bytes]:
        values = self._trace.points.value[rows]
        return [*packets.values(self._where.points[rows], np.where(np.isfinite(values), values, 0.0))]

    def _free_flows(self, rows: NDArray[np.int64]) -> list[bytes | Bytes]:
        marks = self._trace.flows.take(rows)
        return [
            packets.instants(self._where.flows[rows]),
            *self._names(marks),
            self._flows.free_fields(rows),
            *self._mark_arguments("flow", marks),
        ]

    def _instants(self, rows: NDArray[np.int64]) -> list[bytes | Bytes]:
        """Returns instants; events for which Perfetto has no type are written as events of Chrome's format."""
        marks = self._trace.instants.take(rows)
        plain = self._trace.texts.matches(marks.phase, "^[iI]$")
        letters = np.zeros(len(self._trace.texts), np.int64)
        for code in np.unique(marks.phase[~plain]).tolist():
            letters[code] = ord((self._trace.texts[code] or "i")[0])
        phase = np.where(plain, 0, letters[marks.phase])
        return [
            *packets.chrome_events(
                self._where.instants[rows], phase, self._ids[rows], marks.id == ABSENT, self._names(marks)
            ),
            *self._mark_arguments("instant", marks),
        ]

    def _names(self, events: Slices | Marks) -> list[Bytes]:
        """Returns the names and categories of events, after writing those that are new."""
        for kind, codes in ((EVENT_NAMES, events.name), (CATEGORIES, events.category)):
            known = self._known[kind]
            new = np.unique(codes[codes >= 0])
            new = new[~known[new]]
            known[new] = True
            self._out.intern_all(kind, new.astype(np.int64) + 1, clean_texts(self._trace.texts.taken(new)))
        return packets.called(*(np.maximum(codes.astype(np.int64) + 1, 0) for codes in (events.name, events.category)))

    def _slice_arguments(self, slices: Slices, rows: NDArray[np.int64]) -> list[Bytes]:
        found = self._counters(slices, rows)
        integers = {"bytes": slices.bytes, "correlation": slices.correlation, "device": slices.device}
        found += [self._column(name, values) for name, values in integers.items()]
        found.append(self._column("memory bandwidth (GB/s)", slices.bandwidth))
        found += [
            self._column(name, codes)
            for name, codes in (("CollGroup", slices.group), ("Type", slices.type), ("Peer", slices.peers))
        ]
        found.append(self._texts("jobname", self._jobs, slices.file))
        found += [self._column(name, values) for name, values in slices.extra.items() if name not in INTERNAL]
        return [each for each in (*found, self._given("slice", slices.row)) if each is not None]

    def _counters(self, slices: Slices, rows: NDArray[np.int64]) -> list[Bytes | None]:
        """Returns the counters of slices. Counters that several slices have are formatted once."""
        shared = self._slices.shared_counters(rows)
        number, first = shared or (None, rows)
        distinct = slices if number is None else self._slices.take(first, ("counters", "power"))
        counters = distinct.counters
        found = [self._column(f"TS{n}", counters[:, n - 1]) for n in range(1, 6)]
        if number is None:
            return [*found, self._column("Power", slices.power)]
        is_shared = np.array_equal(distinct.power[number], slices.power)
        if is_shared:
            found.append(self._column("Power", distinct.power))
        made = [each for each in found if each is not None]
        joined = columns.message(made, len(first)).take(pa.array(number)) if made else None
        return [joined] if is_shared else [joined, self._column("Power", slices.power)]

    def _mark_arguments(self, kind: str, marks: Marks) -> list[Bytes]:
        found = [self._column(name, values) for name, values in marks.extra.items() if name not in INTERNAL]
        return [each for each in (*found, self._given(kind, marks.row)) if each is not None]

    def _given(self, kind: str, rows: NDArray[np.int64]) -> Bytes | None:
        """Returns the arguments as they were imported; None if there are none."""
        arguments = self._arguments.get(kind)
        members = arguments.take(rows) if arguments is not None else None
        if members is None or members.null_count == len(members):
            return None
        return self._imported.annotations(members)

    def _column(self, name: str, values: NDArray[Any]) -> Bytes | None:
        """Returns an argument of events, as the type of its column says; None if none of them has it."""
        field = "int_value"
        if values.dtype == np.int32:
            return None if (values < 0).all() else self._texts(name, self._trace.texts.values, values)
        if values.dtype == bool:
            absent, field = ~values, "bool_value"
        elif values.dtype.kind == "f":
            absent, field = ~np.isfinite(values), "double_value"
        else:
            absent = values == ABSENT
        if absent.all():
            return None
        distinct = few(values, absent) if field == "int_value" else None
        if distinct is None:
            return self._out.annotation(name, field, values, absent)
        return self._out.annotation(name, field, distinct[1]).take(distinct[0])

    def _texts(self, name: str, texts: pa.Array, codes: NDArray[np.int32]) -> Bytes:
        """Returns an argument of events whose values are codes of texts. Each distinct text is formatted once."""
        number, first = groups(codes)
        distinct = codes[first]
        found = clean_texts(texts.take(pa.array(distinct, mask=distinct < 0)))
        made = self._out.annotation(name, "string_value", found)
        return made.take(pa.array(number))
