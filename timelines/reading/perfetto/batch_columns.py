"""Makes the columns of a capture from the events of a batch of packets."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from iaprof.timelines.reading import answer
from iaprof.timelines.reading.answer import ABSENT, NO_TEXT
from iaprof.timelines.reading.event_columns import Texts
from iaprof.timelines.reading.perfetto import debug_annotations, render_stages, wire
from iaprof.timelines.reading.perfetto.counters import Counters, repeated
from iaprof.timelines.reading.perfetto.packets import Batch
from iaprof.timelines.reading.perfetto.protos import ABOUT_TRACE, ENVELOPE, KINDS, LegacyEvent, TracePacket, TrackEvent
from iaprof.timelines.reading.perfetto.sequences import State, inverse
from iaprof.timelines.reading.perfetto.trace_state import PHASES, TraceState
from iaprof.timelines.reading.perfetto.track_events import NO_EVENT, Events, EventTexts, Finder
from iaprof.timelines.reading.perfetto.tracks import Name
from iaprof.timelines.reading.perfetto.wire import Fields, Places

_SLICES = answer.PHASES.encode()
_READ = frozenset(value for name, value in vars(TrackEvent).items() if name.isupper() and not name.startswith("TYPE_"))
_READ_PACKETS = (TracePacket.TRACK_EVENT, TracePacket.GPU_RENDER_STAGE_EVENT)
_FLOW = "flow"  # flows have neither a name nor a category
_MOST_KINDS = 32  # of packets that are not read: the most that are counted apart
_MOST_LATEST = 1 << 18  # tracks whose last slice is remembered
_LONGEST_US = 1 << 52
_BEFORE_ALL = -(1 << 62)

WithArgs = Callable[[Places, bool], dict[str, NDArray[Any]]]


@dataclass
class Found:
    """The content of a batch."""

    columns: answer.Columns
    events: int = 0
    dropped: Counter[str] = field(default_factory=Counter)


def read(trace: TraceState, batch: Batch) -> Found:
    """Reads the events of a batch of a trace's packets."""
    packets = batch.fields()
    content = batch.data.tobytes()
    state = trace.sequences.read(batch.data, packets)
    names = trace.read_descriptors(content, packets, state)
    found = _Table(trace, batch, content, packets, state).found(names)
    trace.end_batch()
    return found


class _Table:
    """The columns of one batch."""

    def __init__(self, trace: TraceState, batch: Batch, content: bytes, packets: Fields, state: State) -> None:
        self._trace, self._data, self._content = trace, batch.data, content
        self._packets, self._state = packets, state
        self._texts = Texts()
        self._event_texts = EventTexts(self._texts, content, trace.sequences)
        self._dropped: Counter[str] = Counter(batch.dropped)
        self._more = sum(batch.dropped.values())  # events beside those of track events

    def found(self, names: list[Name]) -> Found:
        """Reads everything."""
        owner, starts, ends = self._packets.spans(TracePacket.TRACK_EVENT)
        fields = wire.fields(self._data, starts, ends)
        damaged = fields.damaged | self._packets.damaged[owner]
        valid = self._state.is_valid[owner]
        self._dropped["damaged"] += int(damaged.sum())
        self._dropped["after lost packets"] += int((~valid & ~damaged).sum())
        self._unread_packets(owner)
        times = self._trace.times(self._content, self._packets, self._state)
        stages = self._stages(*times)
        names = names + stages.names
        finder = Finder(self._trace, self._data, self._state, *times, self._dropped)
        events = finder.events(fields, owner, valid & ~damaged)
        reader = debug_annotations.Reader(self._data, self._content, self._trace.sequences)
        annotated, begins, stops = fields.spans(TrackEvent.DEBUG_ANNOTATIONS)
        members = reader.read(annotated, begins, stops, self._state.generation[owner][annotated])
        name, category = self._event_texts.names(events), self._event_texts.categories(events)
        is_slice = np.isin(events.phase, list(_SLICES))
        is_counter = events.phase == ord("C")
        is_flow = np.isin(events.phase, list(PHASES.encode()))
        columns = answer.Columns()
        more = self._more_args(events)
        counts = [0, 0]

        def with_args(rows: Places, takes_known: bool) -> dict[str, NDArray[Any]]:
            place = np.full(len(fields.damaged), NO_EVENT, np.int64)
            place[events.row[rows]] = np.arange(len(rows))
            found = debug_annotations.Columns(members, place, len(rows), self._texts)
            known = found.known() if takes_known else {}
            extra = {int(place[row]): each for row, each in more.items() if place[row] >= 0}
            known |= found.rest(extra)
            counts[0] += found.bad_values
            counts[1] += found.cut_args
            return known

        rows = np.flatnonzero(is_slice)
        rows = rows[np.argsort(events.time[rows], kind="stable")]
        if len(rows):
            columns.slices = self._slices(events, rows, name, category) | with_args(rows, True)
        columns.slices = render_stages.joined(columns.slices, stages.slices)
        rows = np.flatnonzero(~is_slice & ~is_counter & ~is_flow)
        if len(rows) or names:
            columns.instants = self._instants(events, rows, name, category, names, with_args(rows, False))
        columns.flows = self._flow_rows(events, np.flatnonzero(is_flow), name, category, with_args)
        counters = Counters(self._trace, self._content, self._state, self._texts, self._dropped)
        columns.counters = counters.rows(events, np.flatnonzero(is_counter))
        self._more += counters.more
        self._trace.refused += reader.refused
        columns.texts = self._texts.values_cut()
        columns.cut_texts, columns.bad_values, columns.cut_args = self._texts.cut, counts[0], counts[1]
        self._count_unread(fields)
        return Found(columns, len(owner) + self._more + len(names), self._dropped)

    def _stages(self, times: NDArray[np.int64], has_time: NDArray[np.bool_]) -> render_stages.Stages:
        """Reads the stages of GPUs' queues."""
        state, trace = self._state, self._trace
        reader = render_stages.Reader(
            self._data, self._content, trace.sequences, trace.queues, self._texts, self._dropped
        )
        spans = self._packets.spans(TracePacket.GPU_RENDER_STAGE_EVENT)
        found = reader.read(spans, state.generation, state.is_valid, times, has_time)
        self._more += found.packets
        return found

    def _unread_packets(self, events: Places) -> None:
        """Counts packets of other kinds, and packets without a field that is read."""
        packets = self._packets
        numbers = packets.number
        other = ~np.isin(numbers, [*ENVELOPE, *ABOUT_TRACE, *_READ_PACKETS])
        kinds = np.zeros(len(packets.damaged), np.int64)
        kinds[packets.owner[other]] = numbers[other]
        kinds[events] = 0
        values, counts = np.unique(kinds[kinds > 0], return_counts=True)
        for place in np.argsort(-counts, kind="stable").tolist():
            number, count = int(values[place]), int(counts[place])
            kind = KINDS.get(number, f"field {number}") if place < _MOST_KINDS else "other kinds"
            self._dropped[f"packets of {kind}"] += count
            self._more += count
        damaged = packets.damaged & (kinds == 0)
        damaged[events] = False
        self._dropped["damaged"] += int(damaged.sum())
        self._more += int(damaged.sum())

    def _count_unread(self, fields: Fields) -> None:
        odd = fields.number[~np.isin(fields.number, list(_READ))]
        values, counts = np.unique(odd, return_counts=True)
        unread = self._trace.unread
        for value, count in zip(values.tolist(), counts.tolist(), strict=True):
            unread[value if len(unread) < 256 else 0] += count

    def _more_args(self, events: Events) -> dict[int, dict[str, Any]]:
        """Returns arguments made of other fields, by row of `fields`: the ids of slices."""
        if events.legacy is None:
            return {}
        slices = np.isin(events.phase, list(_SLICES))
        ids = events.ids()
        rows = np.flatnonzero(slices & (ids != ABSENT))
        return {int(events.row[row]): {"id": int(ids[row])} for row in rows.tolist()}

    def _common(
        self, events: Events, rows: Places, name: NDArray[np.int32], category: NDArray[np.int32]
    ) -> dict[str, NDArray[Any]]:
        found: dict[str, NDArray[Any]] = {
            "time_ns": events.time[rows], "pid": events.pid[rows], "tid": events.tid[rows], "name": name[rows],
        }  # fmt: skip
        if (category[rows] != NO_TEXT).any():
            found["category"] = category[rows]
        return found

    def _slices(
        self, events: Events, rows: Places, name: NDArray[np.int32], category: NDArray[np.int32]
    ) -> dict[str, NDArray[Any]]:
        found = self._common(events, rows, name, category)
        phase = events.phase[rows]
        numbers = np.zeros(256, np.uint8)
        numbers[list(answer.PHASES.encode())] = np.arange(len(answer.PHASES))
        durations = np.full(len(rows), ABSENT, np.int64)
        is_x = phase == ord("X")
        if is_x.any() and events.legacy is not None:
            own = np.clip(events.legacy.signed(LegacyEvent.DURATION_US)[events.row[rows]], 0, _LONGEST_US)
            durations[is_x] = 1000 * own[is_x]
        if not is_x.all():
            found["phase"] = numbers[phase]
        self._check_order(events.uuid[rows], found["time_ns"])
        return found | {"duration_ns": durations}

    def _check_order(self, uuid: NDArray[np.uint64], times: NDArray[np.int64]) -> None:
        """Counts slices that begin or end before slices of their track in an earlier batch."""
        latest = self._trace.latest
        of_row, first = inverse(uuid.view(np.int64))
        tracks = uuid[first].tolist()
        before = np.array([latest.get(track, _BEFORE_ALL) for track in tracks], np.int64)
        self._trace.late += int((times < before[of_row]).sum())
        most = before.copy()
        np.maximum.at(most, of_row, times)
        if len(latest) > _MOST_LATEST:
            latest.clear()
        latest.update(zip(tracks, most.tolist(), strict=True))

    def _instants(
        self, events: Events, rows: Places, name: NDArray[np.int32], category: NDArray[np.int32], names: list[Name],
        args: dict[str, NDArray[Any]],
    ) -> dict[str, NDArray[Any]]:  # fmt: skip
        """Makes rows of instants and other events, then metadata rows of names."""
        found = self._common(events, rows, name, category)
        found["phase"] = self._event_texts.letters(events.phase[rows])
        found["id"] = events.ids()[rows]
        if not names:
            return found | args
        count = len(names)
        texts = self._texts
        also: dict[str, NDArray[Any]] = {
            "time_ns": np.zeros(count, np.int64),
            "pid": np.array([each.pid for each in names], np.int64),
            "tid": np.array([each.tid for each in names], np.int64),
            "name": np.array([texts[each.what] for each in names], np.int32),
            "phase": np.full(count, texts["M"], np.int32),
            "id": np.full(count, ABSENT, np.int64),
        }
        if "category" in found:
            also["category"] = np.full(count, NO_TEXT, np.int32)
        described = [debug_annotations.json_text({"name": each.name}).encode("utf-8", "replace") for each in names]
        none = np.empty(0, np.int64)
        args = {
            "args_row": np.concatenate([args.get("args_row", none), len(rows) + np.arange(count)]),
            "args_length": np.concatenate([args.get("args_length", none), np.array([*map(len, described)], np.int64)]),
            "args": np.concatenate(
                [args.get("args", np.empty(0, np.uint8)), np.frombuffer(b"".join(described), np.uint8)]
            ),
        }
        return {key: np.concatenate([values, also[key]]) for key, values in found.items()} | args

    def _flow_rows(
        self, events: Events, own: Places, name: NDArray[np.int32], category: NDArray[np.int32], with_args: WithArgs
    ) -> dict[str, NDArray[Any]]:
        """Makes rows of the flows that events refer to, and of events that are flows (`own`)."""
        fields = events.fields
        place = events.places()
        owners, ids, ends = [np.empty(0, np.int64)], [np.empty(0, np.uint64)], [np.empty(0, bool)]
        sources = ((TrackEvent.FLOW_IDS, wire.FIXED64, False), (TrackEvent.FLOW_IDS_OLD, wire.VARINT, False),
                   (TrackEvent.TERMINATING_FLOW_IDS, wire.FIXED64, True),
                   (TrackEvent.TERMINATING_FLOW_IDS_OLD, wire.VARINT, True))  # fmt: skip
        for number, kind, ends_flow in sources:
            found_owner, values = repeated(self._content, fields, number, kind)
            kept = place[found_owner] >= 0
            owners.append(place[found_owner[kept]])
            ids.append(values[kept])
            ends.append(np.full(int(kept.sum()), ends_flow))
        if events.legacy is not None:
            direction = events.legacy.column(LegacyEvent.FLOW_DIRECTION)[events.row]
            bound = np.flatnonzero(events.legacy.has(LegacyEvent.BIND_ID)[events.row] & (direction > 0))
            owners.append(bound)
            ids.append(events.legacy.column(LegacyEvent.BIND_ID)[events.row][bound])
            ends.append(direction[bound] == LegacyEvent.FLOW_IN)
        owner, id_, is_last = np.concatenate(owners), np.concatenate(ids), np.concatenate(ends)
        self._more += len(owner)
        order = np.argsort(owner, kind="stable")
        owner, id_, is_last = owner[order], id_[order], is_last[order]
        if not len(owner) and not len(own):
            return {}
        rows = np.concatenate([own, owner])
        common = self._common(events, own, name, category)
        phases = np.array([self._texts[letter] for letter in PHASES], np.int32)
        of_flows = phases[self._trace.flows.phases(id_, events.time[owner], is_last)]
        codes = np.full(len(owner), self._texts[_FLOW], np.int32)
        table = self._common(events, rows, name, category) | {
            "name": np.concatenate([common["name"], codes]),
            "category": np.concatenate([category[own], codes]),
            "phase": np.concatenate([self._event_texts.letters(events.phase[own]), of_flows]),
            "id": np.concatenate([events.ids()[own], id_.view(np.int64)]),
        }
        return table | with_args(own, False)
