"""Writes Perfetto's packets: tracks, interned texts and events, one by one or as whole columns.

The messages are those in protos/perfetto/trace/ of Perfetto's sources, from the `perfetto` package. Slices are pairs of
begin and end, so those of a track must be nested. Functions that return fields of an event or of a track return bytes
for one value, and a column (columns.py) for n of them.
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

from iaprof.formats.distinct import groups
from iaprof.formats.perfetto import columns

_SEQUENCE = 1
_PACKET, _IID, _TEXT = 1, 1, 2  # Trace.packet; the members of interned texts
MOST_PID = (1 << 31) - 1  # ProcessDescriptor.pid is an int32


def _fields(message: Any) -> dict[str, int]:
    return {name: int(field.number) for name, field in message.DESCRIPTOR.fields_by_name.items()}


_Packet = _fields(pb.TracePacket)
EVENT, TRACK, ANNOTATION = map(_fields, (pb.TrackEvent, pb.TrackDescriptor, pb.DebugAnnotation))
"""The numbers of the fields of messages, by name."""
_LEGACY = _fields(pb.TrackEvent.LegacyEvent)
_PROCESS, _THREAD, _COUNTER = map(_fields, (pb.ProcessDescriptor, pb.ThreadDescriptor, pb.CounterDescriptor))
_NAMES = {
    kind: _fields(pb.InternedData)[kind]
    for kind in ("event_names", "event_categories", "debug_annotation_names", "debug_annotation_string_values")
}
EVENT_NAMES, CATEGORIES, ANNOTATION_NAMES, TEXTS = _NAMES

_OF_SEQUENCE = columns.one(_Packet["trusted_packet_sequence_id"], _SEQUENCE)
_NEEDS_STATE = _OF_SEQUENCE + columns.one(_Packet["sequence_flags"], pb.TracePacket.SEQ_NEEDS_INCREMENTAL_STATE)
_TIME_TAG = columns.tag(_Packet["timestamp"], columns.VARINT)
_EVENT_TAG = columns.tag(_Packet["track_event"], columns.BYTES)
_TRACK_TAG = columns.tag(_Packet["track_descriptor"], columns.BYTES)
_SORTED = columns.one(TRACK["child_ordering"], pb.TrackDescriptor.EXPLICIT)


# What tracks are: fields of TrackDescriptor


def named(names: Any) -> Any:
    """A track that is no process, thread or counter, or the name of a counter."""
    return columns.field(TRACK["name"], names)


def process(pids: Any, names: Any) -> Any:
    """The track of a process."""
    inside = columns.field(_PROCESS["pid"], pids), columns.field(_PROCESS["process_name"], names)
    return columns.nested(TRACK["process"], *inside)


def thread(pids: Any, tids: Any, names: Any) -> Any:
    """The track of a thread, whose parent is that of its process."""
    inside = (("pid", pids), ("tid", tids), ("thread_name", names))
    return columns.nested(TRACK["thread"], *(columns.field(_THREAD[name], values) for name, values in inside))


def counter(units: Any, scale: str = "") -> Any:
    """What makes a counter of a track with a name. Those with the same `scale` below one track are drawn to one."""
    shared = [columns.one(_COUNTER["y_axis_share_key"], scale.encode())] if scale else []
    return columns.nested(TRACK["counter"], columns.field(_COUNTER["unit_name"], units), *shared)


def below(parents: NDArray[np.int64]) -> Bytes:
    """The tracks that tracks are below; 0: none."""
    return columns.numbers(TRACK["parent_uuid"], parents, parents == 0)


# What events are: fields of TrackEvent


def on_tracks(type_: int, tracks: NDArray[np.int64]) -> Bytes:
    """The type and the track of events, most of which are of few tracks."""
    number, first = groups(tracks)
    fields = [columns.one(EVENT["type"], type_), columns.numbers(EVENT["track_uuid"], tracks[first])]
    return columns.message(fields, len(first)).take(pa.array(number))


def called(names: NDArray[np.int64], categories: NDArray[np.int64]) -> list[Bytes]:
    """The names and categories of events: numbers of interned texts; 0: none."""
    return [
        columns.numbers(EVENT["name_iid"], names, names == 0),
        columns.numbers(EVENT["category_iids"], categories, categories == 0),
    ]


def begins(tracks: NDArray[np.int64]) -> Bytes:
    """Begins of slices."""
    return on_tracks(pb.TrackEvent.TYPE_SLICE_BEGIN, tracks)


def ends(tracks: NDArray[np.int64]) -> Bytes:
    """Ends of slices."""
    return on_tracks(pb.TrackEvent.TYPE_SLICE_END, tracks)


def instants(tracks: NDArray[np.int64]) -> Bytes:
    """Events without a length."""
    return on_tracks(pb.TrackEvent.TYPE_INSTANT, tracks)


def values(tracks: NDArray[np.int64], values_: NDArray[Any]) -> list[Bytes]:
    """Values of counters, each valid from its time on."""
    is_whole = values_.dtype.kind in "iu"
    return [
        on_tracks(pb.TrackEvent.TYPE_COUNTER, tracks),
        columns.numbers(EVENT["counter_value"], values_)
        if is_whole
        else columns.doubles(EVENT["double_counter_value"], values_),
    ]


def chrome_events(
    tracks: NDArray[np.int64], phases: NDArray[np.int64], ids: NDArray[np.int64], no_id: NDArray[np.bool_],
    names: Sequence[Bytes],
) -> list[Bytes]:  # fmt: skip
    """Instants, and what has no type of Perfetto's as events of Chrome's format.

    Args:
        tracks: int64[n].
        phases: int64[n], characters; 0: an instant.
        ids: int64[n], of events that belong together.
        no_id: bool[n], which have none.
        names: their names and categories, see `called`.
    """
    count, plain = len(tracks), phases == 0
    legacy = columns.message(
        [columns.numbers(_LEGACY["phase"], phases), columns.numbers(_LEGACY["unscoped_id"], ids, no_id)], count
    )
    hidden = pc.if_else(pa.array(plain), pa.scalar(None, pa.binary()), legacy)
    return [
        columns.numbers(EVENT["type"], np.full(count, pb.TrackEvent.TYPE_INSTANT), ~plain),
        columns.numbers(EVENT["track_uuid"], tracks),
        *names,
        columns.contents(EVENT["legacy_event"], hidden),
    ]


def flows(ids: NDArray[np.int64], are_ends: NDArray[np.bool_]) -> Bytes:
    """Flows that go on from events, or that end there."""
    numbers = ids.astype(np.uint64)
    return pc.if_else(
        pa.array(are_ends),
        columns.fixed(EVENT["terminating_flow_ids"], numbers),
        columns.fixed(EVENT["flow_ids"], numbers),
    )


def flows_together(fields: Bytes, firsts: NDArray[np.int64]) -> Bytes:
    """The flows of n events, of which each has several: n + 1 places tell where those of each begin in `fields`."""
    lists = pa.ListArray.from_arrays(pa.array(firsts.astype(np.int32)), fields)
    return pc.binary_join(lists, pa.scalar(b"", pa.binary()))


class PacketWriter:
    """Writes the packets of one sequence."""

    def __init__(self, out: IO[bytes], clock: int) -> None:
        """Writes the packet with which a sequence starts.

        Args:
            out: receives the packets.
            clock: of their times, a BuiltinClock.
        """
        self._out = out
        self._tracks = 0  # the number of tracks, which are numbered from 1
        self._interned: dict[str, dict[str, int]] = {kind: {} for kind in _NAMES}
        start = pb.TracePacket(sequence_flags=pb.TracePacket.SEQ_INCREMENTAL_STATE_CLEARED)
        start.trace_packet_defaults.timestamp_clock_id = clock
        self.packet(start)

    def packet(self, packet: pb.TracePacket) -> None:
        """Writes a packet of another kind."""
        packet.trusted_packet_sequence_id = _SEQUENCE
        self._out.write(columns.one(_PACKET, packet.SerializeToString()))

    def track(
        self, what: bytes, parent: int = 0, rank: int | None = None, *, is_sorted: bool = False, counter: bytes = b""
    ) -> int:
        """Writes a track and returns its number.

        Args:
            what: `named`, `process` or `thread`.
            parent: the track that it is below; 0: none.
            rank: its place below that, if that is sorted.
            is_sorted: whether the tracks below it have ranks.
            counter: makes a counter of it.
        """
        self._tracks += 1
        track = columns.one(TRACK["uuid"], self._tracks) + what
        track += columns.one(TRACK["parent_uuid"], parent) if parent else b""
        track += counter + (_SORTED if is_sorted else b"")
        track += columns.one(TRACK["sibling_order_rank"], rank) if rank is not None else b""
        self._out.write(columns.one(_PACKET, _OF_SEQUENCE + columns.one(_Packet["track_descriptor"], track)))
        return self._tracks

    def number_tracks(self, count: int) -> NDArray[np.int64]:
        """Returns the numbers of n further tracks, which `tracks` writes."""
        self._tracks += count
        return np.arange(self._tracks - count, self._tracks) + 1

    def tracks(self, numbers: NDArray[np.int64], fields: Sequence[bytes | Bytes]) -> None:
        """Writes tracks: n numbers, and their further fields."""
        count = len(numbers)
        if not count:
            return
        track = columns.message([columns.numbers(TRACK["uuid"], numbers), *fields], count)
        length = columns.varints(columns.lengths_of(track))
        self._out.write(columns.joined(columns.contents(_PACKET, _OF_SEQUENCE + _TRACK_TAG, length, track)))

    def intern(self, kind: str, text: str) -> int:
        """Returns the number of a text, which it writes if it is new."""
        known = self._interned[kind]
        if text not in known:
            known[text] = len(known) + 1
            entry = columns.one(_IID, known[text]) + columns.one(_TEXT, text.encode())
            interned = columns.one(_Packet["interned_data"], columns.one(_NAMES[kind], entry))
            self._out.write(columns.one(_PACKET, _OF_SEQUENCE + interned))
        return known[text]

    def intern_all(self, kind: str, iids: NDArray[np.int64], texts: pa.Array) -> None:
        """Writes texts with these numbers, which are none that `intern` gives."""
        if not len(iids):
            return
        entries = columns.message([columns.numbers(_IID, iids), columns.field(_TEXT, texts)], len(iids))
        content = columns.joined(columns.contents(_NAMES[kind], entries))
        self._out.write(columns.one(_PACKET, _NEEDS_STATE + columns.one(_Packet["interned_data"], content)))

    def annotation(self, name: str, field: str, values: Any, absent: NDArray[np.bool_] | None = None) -> Bytes:
        """Returns an argument of n events: a field of these.

        Args:
            name: of the argument.
            field: of DebugAnnotation: uint_value, int_value, double_value, bool_value, string_value, string_value_iid.
            values: numbers as arrays, texts as Arrow's.
            absent: which do not have it; texts that are null do not, either.
        """
        number = ANNOTATION[field]
        start = columns.one(ANNOTATION["name_iid"], self.intern(ANNOTATION_NAMES, name))
        if field == "string_value":
            value = columns.field(number, values)
        elif field == "double_value":
            value = columns.doubles(number, values, absent)
        else:
            start += columns.tag(number, columns.VARINT)
            value = columns.varints(values, absent)
        return columns.contents(EVENT["debug_annotations"], start, value)

    def events(self, times: NDArray[np.int64], fields: Sequence[bytes | Bytes]) -> None:
        """Writes events: n times in ns, and their fields."""
        count = len(times)
        if not count:
            return
        event = columns.message(fields, count)
        packets = columns.contents(
            _PACKET, _TIME_TAG, columns.varints(times), _NEEDS_STATE + _EVENT_TAG,
            columns.varints(columns.lengths_of(event)), event,
        )  # fmt: skip
        self._out.write(columns.joined(packets))

    def slices(
        self, tracks: NDArray[np.int64], times: tuple[NDArray[np.int64], NDArray[np.int64]],
        names: NDArray[np.int64], category: str, more: Sequence[Bytes] = (),
    ) -> None:  # fmt: skip
        """Writes slices, those of a track after each other.

        Args:
            tracks: int64[n].
            times: of begins and ends, int64[n] in ns.
            names: int64[n], numbers of interned names.
            category: of all of them.
            more: further fields of the begins, each of n messages.
        """
        kind = self.intern(CATEGORIES, category)
        for part in parts(len(tracks)):
            count = len(tracks[part])
            fields = [*called(names[part], np.full(count, kind)), *(each[part] for each in more)]
            both = [columns.message([begins(tracks[part]), *fields], count), ends(tracks[part])]
            order = np.arange(2 * count).reshape(2, count).T.reshape(-1)
            self.events(np.stack(times)[:, part].T.reshape(-1), [pa.concat_arrays(both).take(pa.array(order))])


def parts(count: int) -> Iterable[slice]:
    """Returns the rows that may be written at once."""
    return (slice(start, start + columns.MOST_ROWS) for start in range(0, count, columns.MOST_ROWS))
