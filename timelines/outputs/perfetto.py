"""Perfetto's native trace format, for https://ui.perfetto.dev: smaller than Chrome's, and with units and exact times.

Slices are pairs of begin and end, so those of a track must be nested: slices that are not get a track of their own.
Ends are rounded down to ns. A flow is a part of the innermost slice around it, of its begin or its end, whichever is
closer in time; where there is no slice, it is an instant.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import IO, Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as pb
from pyarrow import BinaryArray as Bytes

from iaprof.formats.distinct import few, groups
from iaprof.formats.perfetto import columns, packets
from iaprof.formats.perfetto.columns import MOST_ROWS
from iaprof.formats.perfetto.packets import CATEGORIES, EVENT_NAMES, PacketWriter
from iaprof.formats.profile import StackOptions
from iaprof.formats.texts import clean_texts
from iaprof.timelines.arguments import Arguments
from iaprof.timelines.arrows import unique_ids
from iaprof.timelines.outputs import perfetto_flows as flows, perfetto_tracks as tracks
from iaprof.timelines.outputs.chrome import INTERNAL
from iaprof.timelines.outputs.event_order import EventOrder, Kind
from iaprof.timelines.outputs.formats import TimeLine
from iaprof.timelines.outputs.perfetto_arguments import ImportedArguments
from iaprof.timelines.own_output import EVENT, described
from iaprof.timelines.stages.overlap import levels
from iaprof.timelines.trace import ABSENT, Marks, Slices, Trace

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
        prepared: called once events are going to be written, after what needs most memory.
    """
    whole = np.floor(np.clip(np.nan_to_num(trace.slices.duration), 0, _LONGEST) + 1e-6)
    slices = trace.slices.changed(duration=whole)
    out = PacketWriter(output, pb.BUILTIN_CLOCK_BOOTTIME)
    level = levels(slices)
    named = tracks.names(trace, arguments.get("instant"))
    where = tracks.describe(trace, level, named, out)
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
        self, trace: Trace, slices: Slices, where: tracks.Tracks, arguments: Mapping[str, Arguments], out: PacketWriter
    ) -> None:
        self._trace, self._slices, self._where, self._arguments, self._out = trace, slices, where, arguments, out
        self._imported = ImportedArguments(out)
        self._known = {kind: np.zeros(len(trace.texts), bool) for kind in (EVENT_NAMES, CATEGORIES)}
        self._flows = flows.attached(trace, slices, where)
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
        order = EventOrder([Kind(size, each) for size, each in zip(sizes, times, strict=True)])

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
        parts, places = [], []
        makers = (self._begins, self._end_fields, self._points, self._free_flows, self._instants)
        for kind, make in enumerate(makers):
            at = np.flatnonzero(kinds == kind)
            if len(at):
                parts.append(columns.message(make(rows[at]), len(at)))
                places.append(at)
        back = np.empty(len(rows), np.int64)
        back[np.concatenate(places)] = np.arange(len(rows))
        self._out.events(times, [pa.concat_arrays(parts).take(pa.array(back))])

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
        """Returns instants, and what has no type of Perfetto's as events of Chrome's format."""
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
        """Returns the counters of slices, which stand in some rows: those that several have are made once."""
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
        """Returns an argument of events, of texts by their codes. Events have few different ones: each is made once."""
        number, first = groups(codes)
        distinct = codes[first]
        found = clean_texts(texts.take(pa.array(distinct, mask=distinct < 0)))
        made = self._out.annotation(name, "string_value", found)
        return made.take(pa.array(number))
