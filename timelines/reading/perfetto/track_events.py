"""The track events of a batch (TrackEvent): their times, tracks and types, and their names and categories."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from iaprof.timelines.reading.answer import ABSENT, NO_TEXT
from iaprof.timelines.reading.event_columns import Texts
from iaprof.timelines.reading.perfetto import wire
from iaprof.timelines.reading.perfetto.protos import InternedData, LegacyEvent, TrackEvent
from iaprof.timelines.reading.perfetto.sequences import Sequences, State
from iaprof.timelines.reading.perfetto.trace_state import TraceState
from iaprof.timelines.reading.perfetto.wire import Fields, Places

NO_EVENT = -1
_TYPES = {TrackEvent.TYPE_SLICE_BEGIN: "B", TrackEvent.TYPE_SLICE_END: "E", TrackEvent.TYPE_INSTANT: "i",
          TrackEvent.TYPE_COUNTER: "C"}  # fmt: skip
_IDS = (LegacyEvent.UNSCOPED_ID, LegacyEvent.LOCAL_ID, LegacyEvent.GLOBAL_ID)


@dataclass
class Events:
    """The events of a batch that have a time, n of them, in the order of the file."""

    fields: Fields  # of all events, also of those without a time
    row: Places  # [n], index of each event in `fields`
    packet: Places  # [n]
    generation: NDArray[np.int64]  # [n]
    time: NDArray[np.int64]  # [n], ns
    phase: NDArray[np.uint8]  # [n], a letter, as in Chrome's format
    uuid: NDArray[np.uint64]  # [n], of the track
    pid: NDArray[np.int64]  # [n]
    tid: NDArray[np.int64]  # [n]
    legacy: Fields | None = None  # [n] messages

    def places(self) -> NDArray[np.int64]:
        """Returns for each message in `fields` the index of its event; NO_EVENT for messages without a time."""
        found = np.full(len(self.fields.damaged), NO_EVENT, np.int64)
        found[self.row] = np.arange(len(self.row))
        return found

    def ids(self) -> NDArray[np.int64]:
        """Returns the ids of events, which the events of one operation share; ABSENT for events without one."""
        found = np.full(len(self.row), ABSENT, np.int64)
        if self.legacy is not None:
            for number in _IDS:
                has = self.legacy.has(number)[self.row]
                found[has] = self.legacy.signed(number)[self.row][has]
        return found


@dataclass
class Finder:
    """Finds the events of a batch."""

    trace: TraceState
    data: NDArray[np.uint8]
    state: State
    times: NDArray[np.int64]  # of packets
    has_time: NDArray[np.bool_]  # likewise
    dropped: Counter[str]  # events that have no time or type

    def events(self, fields: Fields, owner: Places, valid: NDArray[np.bool_]) -> Events:
        """Finds the times, tracks and types of events."""
        state = self.state
        time, has_time = self.times[owner], self.has_time[owner]
        time, has_time = self._own_times(fields, owner, valid, time, has_time)
        legacy_owner, starts, ends = fields.spans(TrackEvent.LEGACY_EVENT)
        phase = np.zeros(len(owner), np.uint8)
        types = fields.column(TrackEvent.TYPE)
        for type_, letter in _TYPES.items():
            phase[types == type_] = ord(letter)
        legacy = None
        if len(legacy_owner):
            begin, end = np.zeros(len(owner), np.int64), np.zeros(len(owner), np.int64)
            begin[legacy_owner], end[legacy_owner] = starts, ends
            legacy = wire.fields(self.data, begin, end)
            letters = legacy.column(LegacyEvent.PHASE)
            given = (letters > 32) & (letters < 127) & (phase == 0)
            phase[given] = letters[given].astype(np.uint8)
            phase[phase == ord("I")] = ord("i")
        kept = valid & has_time & (phase > 0)
        self.dropped["without a time"] += int((valid & ~has_time).sum())
        self.dropped["without a type"] += int((valid & has_time & (phase == 0)).sum())
        defaults = np.array([each.track for each in state.all_defaults], np.uint64)
        uuid = np.where(
            fields.has(TrackEvent.TRACK_UUID), fields.column(TrackEvent.TRACK_UUID), defaults[state.defaults[owner]]
        )
        row = np.flatnonzero(kept)
        packet = owner[row]
        uuid = uuid[row]
        pid, tid = self.trace.places(uuid, state.sequence[packet])
        if legacy is not None:
            for number, column in ((LegacyEvent.PID_OVERRIDE, pid), (LegacyEvent.TID_OVERRIDE, tid)):
                value = legacy.signed(number)[row]
                column[value > 0] = value[value > 0]
        return Events(fields, row, packet, state.generation[packet], time[row], phase[row], uuid, pid, tid, legacy)

    def _own_times(
        self, fields: Fields, owner: Places, valid: NDArray[np.bool_], time: NDArray[np.int64],
        has_time: NDArray[np.bool_],
    ) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:  # fmt: skip
        """Replaces times of packets by those that events have, as in old traces."""
        clocks = self.trace.clocks
        for number, is_difference in ((TrackEvent.TIMESTAMP_ABSOLUTE_US, False), (TrackEvent.TIMESTAMP_DELTA_US, True)):
            rows = np.flatnonzero(fields.has(number) & valid)
            if not len(rows):
                continue
            values = fields.column(number)[rows]
            sequence = self.state.sequence[owner[rows]]
            for own in np.unique(sequence).tolist():
                of_own = np.flatnonzero(sequence == own)
                at = rows[of_own]
                if is_difference and not clocks.has_reference(own):
                    has_time[at] = False
                    continue
                time[at], has_time[at] = clocks.event_times(own, owner[at], values[of_own], is_difference)
        return time, has_time


_MOST_CATEGORIES = 64  # of an event


class EventTexts:
    """The texts of a batch."""

    def __init__(self, texts: Texts, content: bytes, sequences: Sequences) -> None:
        """Args: the numbers of texts, the batch's bytes, and the interned texts."""
        self._texts, self._content, self._sequences = texts, content, sequences
        self._codes: dict[bytes, int] = {}

    def _code(self, content: bytes | None) -> int:
        content = content or b""
        if content not in self._codes:
            self._codes[content] = self._texts[content.decode("utf-8", "replace")]
        return self._codes[content]

    def names(self, events: Events) -> NDArray[np.int32]:
        """Returns the codes of names; NO_TEXT for events without one."""
        fields, row = events.fields, events.row
        iids = fields.column(TrackEvent.NAME_IID)[row]
        if events.legacy is not None:
            iids = np.where(iids == 0, events.legacy.column(LegacyEvent.NAME_IID)[row], iids)
        found = self._interned(InternedData.EVENT_NAMES, events.generation, iids)
        owner, starts, ends = fields.spans(TrackEvent.NAME)
        if len(owner):
            codes = np.full(len(fields.damaged), NO_TEXT, np.int32)
            codes[owner] = self._inline(starts, ends)
            found = np.where(codes[row] != NO_TEXT, codes[row], found)
        nameless = (found == NO_TEXT) & (events.phase != ord("E"))
        if nameless.any():
            found[nameless] = self._code(b"")
        return found

    def _interned(self, kind: int, generation: NDArray[np.int64], iids: NDArray[np.uint64]) -> NDArray[np.int32]:
        found = np.full(len(iids), NO_TEXT, np.int32)
        rows = np.flatnonzero(iids)
        if len(rows):
            texts, of_row = self._sequences.distinct(kind, generation[rows], iids[rows])
            found[rows] = np.array([self._code(text) for text in texts], np.int32)[of_row]
            missing = np.array([text is None for text in texts], bool)[of_row]
            self._sequences.left_out["interned texts that nobody defined"] += int(missing.sum())
        return found

    def _inline(self, starts: Places, ends: Places) -> NDArray[np.int32]:
        content = self._content
        return np.array(
            [self._code(content[start:end]) for start, end in zip(starts.tolist(), ends.tolist(), strict=True)],
            np.int32,
        )

    def categories(self, events: Events) -> NDArray[np.int32]:
        """Returns the codes of categories, joined with commas; NO_TEXT for events without one."""
        fields = events.fields
        place = events.places()
        found = np.full(len(events.row), NO_TEXT, np.int32)
        rows = fields.of(TrackEvent.CATEGORY_IIDS, wire.VARINT)
        rows = rows[place[fields.owner[rows]] >= 0]
        at = place[fields.owner[rows]]
        codes = self._interned(InternedData.EVENT_CATEGORIES, events.generation[at], fields.value[rows])
        owner, starts, ends = fields.spans(TrackEvent.CATEGORIES)
        kept = place[owner] >= 0
        at = np.concatenate([at, place[owner[kept]]])
        codes = np.concatenate([codes, self._inline(starts[kept], ends[kept])])
        found[at] = codes
        several = np.flatnonzero((np.bincount(at, minlength=len(found)) > 1)[at]) if len(at) else at
        if len(several):
            texts = list(self._texts)
            by_row: dict[int, list[str]] = defaultdict(list)
            for row, code in zip(at[several].tolist(), codes[several].tolist(), strict=True):
                if code != NO_TEXT and len(by_row[row]) < _MOST_CATEGORIES:
                    by_row[row].append(texts[code])
            for row, each in by_row.items():
                found[row] = self._texts[",".join(each)]
        return found

    def letters(self, phases: NDArray[np.uint8]) -> NDArray[np.int32]:
        """Returns the codes of phases."""
        codes = np.zeros(256, np.int32)
        for phase in np.unique(phases).tolist():
            codes[phase] = self._texts[chr(phase)]
        return codes[phases]
