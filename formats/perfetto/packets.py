"""Writes Perfetto's packets: tracks and other single messages, and tracks and events as whole columns.

The messages are those in protos/perfetto/trace/ of Perfetto's sources, from the `perfetto` package.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import IO, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as pb
from pyarrow import BinaryArray as Bytes

from iaprof.formats.perfetto import columns

_SEQUENCE = 1
_PACKETS_AT_ONCE = 4096
_PACKET, _IID, _TEXT = 1, 1, 2  # Trace.packet; the members of interned texts
MOST_PID = (1 << 31) - 1  # ProcessDescriptor.pid is an int32

_Packet, _Event, _Annotation = pb.TracePacket.DESCRIPTOR, pb.TrackEvent.DESCRIPTOR, pb.DebugAnnotation.DESCRIPTOR
_OF_SEQUENCE = columns.one(_Packet.fields_by_name["trusted_packet_sequence_id"].number, _SEQUENCE)
_NEEDS_STATE = _OF_SEQUENCE + columns.one(
    _Packet.fields_by_name["sequence_flags"].number, pb.TracePacket.SEQ_NEEDS_INCREMENTAL_STATE
)
_TIME = columns.tag(_Packet.fields_by_name["timestamp"].number, columns.VARINT)
_EVENT = columns.tag(_Packet.fields_by_name["track_event"].number, columns.BYTES)
_TRACK = columns.tag(_Packet.fields_by_name["track_descriptor"].number, columns.BYTES)


def event_field(name: str) -> int:
    """Returns the number of a field of TrackEvent."""
    return int(_Event.fields_by_name[name].number)


def track_field(name: str) -> int:
    """Returns the number of a field of TrackDescriptor."""
    return int(pb.TrackDescriptor.DESCRIPTOR.fields_by_name[name].number)


def annotation_field(name: str) -> int:
    """Returns the number of a field of DebugAnnotation."""
    return int(_Annotation.fields_by_name[name].number)


_NAMES = {
    kind: int(pb.InternedData.DESCRIPTOR.fields_by_name[kind].number)
    for kind in ("event_names", "event_categories", "debug_annotation_names", "debug_annotation_string_values")
}
EVENT_NAMES, CATEGORIES, ANNOTATION_NAMES, TEXTS = _NAMES


class PacketWriter:
    """Writes the packets of one sequence."""

    def __init__(self, out: IO[bytes]) -> None:
        """Args: what receives them."""
        self._out = out
        self._trace = pb.Trace()
        self._tracks = 0  # the number of tracks, which are numbered from 1
        self._interned: dict[str, dict[str, int]] = {kind: {} for kind in _NAMES}

    def packet(self) -> Any:
        """Adds a packet, and returns it."""
        if len(self._trace.packet) >= _PACKETS_AT_ONCE:
            self.flush()
        return self._trace.packet.add(trusted_packet_sequence_id=_SEQUENCE)

    def flush(self) -> None:
        """Writes the buffered packets: serialized traces can be concatenated."""
        self._out.write(self._trace.SerializeToString())
        self._trace.Clear()

    def begin(self, clock: int) -> None:
        """Adds the packet with which a sequence starts. Its times are of a clock."""
        packet = self.packet()
        packet.sequence_flags = pb.TracePacket.SEQ_INCREMENTAL_STATE_CLEARED
        packet.trace_packet_defaults.timestamp_clock_id = clock

    # Tracks

    def describe(self, parent: int = 0, rank: int | None = None) -> Any:
        """Adds a track and returns its descriptor; `uuid` is its number."""
        self._tracks += 1
        found = self.packet().track_descriptor
        found.uuid = self._tracks
        if parent:
            found.parent_uuid = parent
        if rank is not None:
            found.sibling_order_rank = rank
        return found

    def track(self, name: str, parent: int, rank: int | None = None) -> int:
        """Adds a track and returns its number. Its rank matters below a group or a thread, which sort by it."""
        self.describe(parent, rank).name = name
        return self._tracks

    def group(self, name: str, rank: int | None = None, parent: int = 0) -> int:
        """Adds a track whose children are sorted by rank; returns its number."""
        found = self.describe(parent, rank)
        found.name = name
        found.child_ordering = pb.TrackDescriptor.EXPLICIT
        return self._tracks

    def counter(self, name: str, unit: str, parent: int = 0, rank: int | None = None, shared: str = "") -> int:
        """Adds a counter track; counters with the same `shared` and parent have a common scale. Returns its number."""
        found = self.describe(parent, rank)
        found.name = name
        found.counter.unit_name = unit
        if shared:
            found.counter.y_axis_share_key = f"{shared} {parent}"
        return self._tracks

    def process(self, pid: int, name: str) -> int:
        """Adds the track of a process, and returns its number."""
        found = self.describe()
        found.process.pid, found.process.process_name = pid, name
        return self._tracks

    def thread(self, pid: int, tid: int, name: str, parent: int, by_rank: bool = False) -> int:
        """Adds the track of a thread below that of its process, and returns its number. Its children can have ranks."""
        found = self.describe(parent)
        if by_rank:
            found.child_ordering = pb.TrackDescriptor.EXPLICIT
        found.thread.pid, found.thread.tid, found.thread.thread_name = pid, tid, name
        return self._tracks

    # Tracks and events, as columns

    def number_tracks(self, count: int) -> NDArray[np.int64]:
        """Returns the numbers of n further tracks, which `tracks` describes."""
        self._tracks += count
        return np.arange(self._tracks - count, self._tracks) + 1

    def tracks(self, numbers: NDArray[np.int64], fields: Sequence[bytes | Bytes]) -> None:
        """Writes tracks: n numbers, and their further fields of TrackDescriptor, see columns.py."""
        count = len(numbers)
        if not count:
            return
        self.flush()
        track = columns.message([columns.numbers(track_field("uuid"), numbers), *fields], count)
        length = columns.varints(columns.lengths_of(track))
        self._out.write(columns.joined(columns.contents(_PACKET, _OF_SEQUENCE + _TRACK, length, track)))

    def intern(self, kind: str, text: str) -> int:
        """Returns the number of a text, which is written before the next events."""
        known = self._interned[kind]
        if text not in known:
            known[text] = len(known) + 1
            entry = getattr(self.packet().interned_data, kind).add(iid=known[text])
            if kind == TEXTS:
                entry.str = text.encode()
            else:
                entry.name = text
        return known[text]

    def intern_all(self, kind: str, iids: NDArray[np.int64], texts: pa.Array) -> None:
        """Writes texts with these numbers, which are none that `intern` gives."""
        if not len(iids):
            return
        entries = columns.message(
            [columns.numbers(_IID, iids), columns.contents(_TEXT, texts.cast(pa.binary()))], len(iids)
        )
        content = columns.joined(columns.contents(_NAMES[kind], entries))
        number = _Packet.fields_by_name["interned_data"].number
        self.flush()
        self._out.write(columns.one(_PACKET, _NEEDS_STATE + columns.one(number, content)))

    def events(self, times: NDArray[np.int64], fields: Sequence[bytes | Bytes]) -> None:
        """Writes events: n times in ns, and their fields, see columns.py."""
        count = len(times)
        if not count:
            return
        self.flush()
        event = columns.message(fields, count)
        packets = columns.contents(
            _PACKET, _TIME, columns.varints(times), _NEEDS_STATE + _EVENT,
            columns.varints(columns.lengths_of(event)), event,
        )  # fmt: skip
        self._out.write(columns.joined(packets))

    def annotation(self, name: str, field: str, values: Any, absent: NDArray[np.bool_] | None = None) -> Bytes:
        """Returns an argument of n events: a field of these.

        Args:
            name: of the argument.
            field: of DebugAnnotation: uint_value, int_value, double_value, bool_value, string_value, string_value_iid.
            values: numbers as arrays, texts as Arrow's.
            absent: which do not have it; texts that are null do not, either.
        """
        number = annotation_field(field)
        start = columns.one(annotation_field("name_iid"), self.intern(ANNOTATION_NAMES, name))
        if field == "string_value":
            value = columns.contents(number, values.cast(pa.binary()))
        elif field == "double_value":
            value = columns.doubles(number, values, absent)
        else:
            start += columns.tag(number, columns.VARINT)
            value = columns.varints(values, absent)
        return columns.contents(event_field("debug_annotations"), start, value)

    def values(self, track: int, times: NDArray[np.int64], values: NDArray[Any]) -> None:
        """Writes the values of a counter, each valid from its time on."""
        for part in _parts(len(times)):
            some = values[part]
            is_whole = some.dtype.kind in "iu"
            value = (
                columns.numbers(event_field("counter_value"), some)
                if is_whole
                else columns.doubles(event_field("double_counter_value"), some)
            )
            type_ = columns.one(event_field("type"), pb.TrackEvent.TYPE_COUNTER)
            self.events(times[part], [type_, columns.one(event_field("track_uuid"), track), value])

    def slices(
        self, tracks: NDArray[np.int64], begins: NDArray[np.int64], ends: NDArray[np.int64], names: Sequence[str],
        category: str = "", more: Sequence[Bytes] = (),
    ) -> None:  # fmt: skip
        """Writes slices of tracks, those of a track after each other, with further fields of each, see columns.py."""
        iids = np.array([self.intern(EVENT_NAMES, name) for name in names], np.int64)
        self.slices_of(tracks, begins, ends, iids, category, more)

    def slices_of(
        self, tracks: NDArray[np.int64], begins: NDArray[np.int64], ends: NDArray[np.int64],
        names: NDArray[np.int64], category: str = "", more: Sequence[Bytes] = (),
    ) -> None:  # fmt: skip
        """Writes slices, those of a track after each other.

        Args:
            tracks: int64[n].
            begins: int64[n], ns.
            ends: int64[n], ns.
            names: int64[n], numbers of interned names.
            category: of all of them; "": none.
            more: further fields, each of n messages.
        """
        kind = columns.one(event_field("category_iids"), self.intern(CATEGORIES, category)) if category else b""
        for part in _parts(len(begins)):
            count = len(begins[part])
            is_end = np.arange(2 * count) % 2 == 1
            begin_only = pa.array(np.arange(2 * count) // 2, mask=is_end)
            times = np.stack([begins[part], ends[part]], axis=1).reshape(-1)
            types = np.where(is_end, pb.TrackEvent.TYPE_SLICE_END, pb.TrackEvent.TYPE_SLICE_BEGIN)
            fields: list[bytes | Bytes] = [
                columns.numbers(event_field("type"), types),
                columns.numbers(event_field("track_uuid"), np.repeat(tracks[part], 2)),
                columns.numbers(event_field("name_iid"), np.repeat(names[part], 2), is_end),
                *([pa.repeat(pa.scalar(kind, pa.binary()), count).take(begin_only)] if kind else []),
                *(each[part.start : part.stop].take(begin_only) for each in more),
            ]
            self.events(times, fields)


def flows(ids: NDArray[np.int64], count: int, of: NDArray[np.int64], field: str) -> Bytes:
    """Returns a field of flows of n slices: null where there are none.

    Args:
        ids: int64[m], numbers of flows.
        count: n.
        of: int64[m], the slice that each flow begins or ends at.
        field: `flow_ids` or `terminating_flow_ids`.
    """
    order = np.argsort(of, kind="stable")
    each = columns.fixed(event_field(field), ids[order].astype(np.uint64))
    ends = np.searchsorted(of[order], np.arange(count + 1)).astype(np.int32)
    lists = pa.ListArray.from_arrays(pa.array(ends), each)
    joined = pc.binary_join(lists, b"")
    return pc.if_else(pa.array(np.diff(ends) > 0), joined, pa.scalar(None, pa.binary()))


def _parts(count: int) -> Iterable[slice]:
    return (slice(start, start + columns.MOST_ROWS) for start in range(0, count, columns.MOST_ROWS))
