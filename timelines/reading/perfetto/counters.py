"""Values of counters: events of counter tracks, and values of other counters that events have."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from iaprof.timelines.reading.answer import NO_TEXT
from iaprof.timelines.reading.event_columns import Texts
from iaprof.timelines.reading.perfetto import wire
from iaprof.timelines.reading.perfetto.protos import TrackEvent
from iaprof.timelines.reading.perfetto.sequences import State, inverse
from iaprof.timelines.reading.perfetto.trace_state import TraceState
from iaprof.timelines.reading.perfetto.track_events import Events
from iaprof.timelines.reading.perfetto.tracks import CounterTrack
from iaprof.timelines.reading.perfetto.wire import Fields, Places

_LARGEST = 1e300


class Counters:
    """Makes the rows of a batch's counters."""

    def __init__(self, trace: TraceState, content: bytes, state: State, texts: Texts, dropped: Counter[str]) -> None:
        """Args: the trace, the batch's bytes and state, the numbers of texts, and the counts of dropped events."""
        self._trace, self._content, self._state, self._texts, self._dropped = trace, content, state, texts, dropped
        self.more = 0  # values beside those of the counters' own events

    def rows(self, events: Events, own: Places) -> dict[str, NDArray[Any]]:
        """Makes rows of counters, and of the values of other counters that events have."""
        fields = events.fields
        integer, double = (
            fields.has(TrackEvent.COUNTER_VALUE),
            fields.has(TrackEvent.DOUBLE_COUNTER_VALUE, wire.FIXED64),
        )
        values = np.where(
            integer, fields.signed(TrackEvent.COUNTER_VALUE), fields.doubles(TrackEvent.DOUBLE_COUNTER_VALUE)
        )
        has = (integer | double)[events.row[own]]
        self._dropped["counter without a value"] += int((~has).sum())
        own = own[has]
        extra = [(own, events.uuid[own], values[events.row[own]]), *self._extra(events)]
        self.more += sum(len(rows) for rows, _, _ in extra[1:])
        row, uuid, value = (np.concatenate([each[column] for each in extra]) for column in range(3))
        if not len(row):
            return {}
        if len(extra) > 1:
            order = np.argsort(row, kind="stable")
            row, uuid, value = row[order], uuid[order], value[order]
        return self._counter_rows(events, row, uuid, value)

    def _counter_rows(
        self, events: Events, row: Places, uuid: NDArray[np.uint64], value: NDArray[np.float64]
    ) -> dict[str, NDArray[Any]]:
        of_row, first = inverse(uuid.view(np.int64))
        names, series, factors, categories = [], [], [], []
        for at in first.tolist():
            track = self._trace.tracks.known.get(int(uuid[at]))
            counter = (track.counter if track is not None else None) or CounterTrack()
            names.append(self._texts[track.name if track is not None else ""])
            series.append(self._texts[counter.unit])
            factors.append(counter.factor)
            categories.append(self._texts[counter.category] if counter.category else NO_TEXT)
            if counter.is_incremental:
                at_track = np.flatnonzero(of_row == of_row[at])
                value[at_track] = self._summed(events.generation[row[at_track]], int(uuid[at]), value[at_track])
        value = value * np.array(factors, float)[of_row]
        finite = np.abs(value) < _LARGEST
        self._dropped["counter without a value"] += int((~finite).sum())
        pid, tid = self._trace.places(uuid, self._state.sequence[events.packet[row]])
        table: dict[str, NDArray[Any]] = {
            "time_ns": events.time[row], "pid": pid, "tid": tid, "name": np.array(names, np.int32)[of_row],
            "category": np.array(categories, np.int32)[of_row], "series": np.array(series, np.int32)[of_row],
            "value": value, "event": np.arange(len(row)),
        }  # fmt: skip
        return {name: column[finite] for name, column in table.items()}

    def _summed(
        self, generation: NDArray[np.int64], uuid: int, differences: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        """Returns the values of an incremental counter, which starts from 0 in each generation."""
        sums = self._trace.sums
        found = differences.copy()
        for own in np.unique(generation).tolist():
            rows = np.flatnonzero(generation == own)
            # Added from left to right, so that results do not depend on the size of batches.
            found[rows] = np.cumsum(np.append(sums.get((own, uuid), 0.0), differences[rows]))[1:]
            sums[own, uuid] = float(found[rows[-1]])
        return found

    def _extra(self, events: Events) -> Iterator[tuple[Places, NDArray[np.uint64], NDArray[np.float64]]]:
        """Yields rows of events, tracks and values, of integers and of doubles."""
        fields = events.fields
        place = events.places()
        kinds = (
            (TrackEvent.EXTRA_COUNTER_VALUES, TrackEvent.EXTRA_COUNTER_TRACK_UUIDS, wire.VARINT, "extra"),
            (TrackEvent.EXTRA_DOUBLE_COUNTER_VALUES, TrackEvent.EXTRA_DOUBLE_COUNTER_TRACK_UUIDS, wire.FIXED64,
             "extra_doubles"),
        )  # fmt: skip
        for values_of, tracks_of, kind, default in kinds:
            owner, values = repeated(self._content, fields, values_of, kind)
            kept = place[owner] >= 0
            owner, values = owner[kept], values[kept]
            if not len(owner):
                continue
            track_owner, tracks = repeated(self._content, fields, tracks_of, wire.VARINT)
            rank = np.arange(len(owner)) - np.searchsorted(owner, owner)
            at = np.searchsorted(track_owner, owner) + rank
            inside = np.minimum(at, max(len(track_owner) - 1, 0))
            given = np.isin(owner, track_owner)
            has = given & (at < len(track_owner))
            uuid = np.zeros(len(owner), np.uint64)
            if len(track_owner):
                has &= track_owner[inside] == owner
                uuid[has] = tracks[inside[has]]
            for index, defaults in enumerate(self._state.all_defaults):
                other = np.flatnonzero(~given & (self._state.defaults[events.packet[place[owner]]] == index))
                own = np.array(getattr(defaults, default), np.uint64)
                fits = rank[other] < len(own)
                uuid[other[fits]] = own[rank[other[fits]]]
                has[other[fits]] = True
            lost = int((~has).sum())
            self._dropped["counter without a track"] += lost
            self.more += lost
            numbers = values.view(np.float64) if kind == wire.FIXED64 else values.view(np.int64).astype(float)
            yield place[owner[has]], uuid[has], numbers[has]


def repeated(content: bytes, fields: Fields, number: int, kind: int) -> tuple[Places, NDArray[np.uint64]]:
    """Returns the numbers of a repeated field, packed or not, and their owners."""
    rows = fields.of(number, kind)
    owner, values = fields.owner[rows], fields.value[rows]
    order = np.argsort(fields.place[rows], kind="stable")
    owner, values = owner[order], values[order]
    packed = fields.of(number, wire.BYTES)
    if len(packed):
        owners, found = [], []
        for row in packed.tolist():
            start = int(fields.place[row])
            for value in _unpacked(content[start : start + int(fields.value[row])], kind):
                owners.append(int(fields.owner[row]))
                found.append(value)
        owner = np.concatenate([owner, np.array(owners, np.int64)])
        values = np.concatenate([values, np.array(found, np.uint64)])
        order = np.argsort(owner, kind="stable")
        owner, values = owner[order], values[order]
    return owner, values


def _unpacked(content: bytes, kind: int) -> list[int]:
    if kind == wire.FIXED64:
        return [int.from_bytes(content[at : at + 8], "little") for at in range(0, len(content) - 7, 8)]
    found = []
    at = 0
    try:
        while at < len(content):
            value, at = wire.varint(content, at)
            found.append(value)
    except IndexError:
        pass
    return found
