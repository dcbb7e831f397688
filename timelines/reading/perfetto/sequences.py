"""The state that packets of a sequence share: interned texts and defaults, until a packet clears them.

A generation is the time between two packets of a sequence that clear its state. Generations of all sequences are
numbered together.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from iaprof.timelines.reading.perfetto import wire
from iaprof.timelines.reading.perfetto.protos import (
    InternedData,
    TracePacket,
    TracePacketDefaults,
    TrackEventDefaults,
)
from iaprof.timelines.reading.perfetto.wire import Fields, Places

TEXT_KINDS = (
    InternedData.EVENT_CATEGORIES,
    InternedData.EVENT_NAMES,
    InternedData.DEBUG_ANNOTATION_NAMES,
    InternedData.DEBUG_ANNOTATION_STRING_VALUES,
    InternedData.GPU_SPECIFICATIONS,
)
_MOST_TEXTS, _MOST_TEXT_BYTES = 1 << 19, 48 << 20  # that are kept at a time
_MOST_TEXT = 1 << 16  # bytes of one
_MOST_SEQUENCES = 1 << 16
_MOST_EXTRA = 64  # counters of a sequence's events
_NONE = -1


@dataclass(frozen=True)
class Defaults:
    """Defaults of events."""

    clock: int = 0  # 0: the trace's
    track: int = 0
    extra: tuple[int, ...] = ()  # tracks of counters
    extra_doubles: tuple[int, ...] = ()


NO_DEFAULTS = Defaults()


@dataclass
class Sequence:
    """The state of a sequence at the end of a batch."""

    generation: int
    is_valid: bool = False  # whether nothing was lost, so that its packets refer to these texts and defaults
    defaults: Defaults = NO_DEFAULTS


@dataclass
class State:
    """The state that applies to each packet of a batch."""

    sequence: NDArray[np.int64]  # [n], trusted_packet_sequence_id
    generation: NDArray[np.int64]  # [n]
    is_valid: NDArray[np.bool_]  # [n], whether nothing of the generation was lost
    defaults: NDArray[np.int64]  # [n], index into `all_defaults`
    all_defaults: list[Defaults]


@dataclass
class Sequences:
    """The sequences of a trace."""

    known: dict[int, Sequence] = field(default_factory=dict)
    texts: dict[tuple[int, int], dict[int, bytes]] = field(default_factory=dict)  # by kind and generation, then iid
    computing: set[tuple[int, int]] = field(default_factory=set)  # generations and iids of a GPU's stages
    left_out: Counter[str] = field(default_factory=Counter)
    _generations: int = 0
    _text_count: int = 0
    _text_bytes: int = 0

    def read(self, data: NDArray[np.uint8], packets: Fields) -> State:
        """Reads the state of a batch's packets, and their interned texts."""
        count = len(packets.damaged)
        sequence = packets.column(TracePacket.TRUSTED_PACKET_SEQUENCE_ID).view(np.int64)
        flags = packets.column(TracePacket.SEQUENCE_FLAGS)
        cleared = (flags & np.uint64(TracePacket.SEQ_INCREMENTAL_STATE_CLEARED)) > 0
        cleared |= packets.column(TracePacket.INCREMENTAL_STATE_CLEARED) > 0
        lost = (packets.column(TracePacket.PREVIOUS_PACKET_DROPPED) > 0) & ~cleared
        owner, starts, ends = packets.spans(TracePacket.TRACE_PACKET_DEFAULTS)
        given = {
            int(row): _defaults(data[start:end].tobytes())
            for row, start, end in zip(owner, starts.tolist(), ends.tolist(), strict=True)
        }
        generation = np.zeros(count, np.int64)
        is_valid = np.zeros(count, bool)
        defaults = np.zeros(count, np.int64)
        all_defaults = [NO_DEFAULTS]
        has_event = cleared | lost
        has_event[list(given)] = True
        # Sequences change their state rarely: the packets between two changes are one span.
        for number, rows in _by_value(sequence):
            own = self._sequence(number)
            marks = rows[has_event[rows]]
            bounds = np.searchsorted(rows, marks)
            index = self._add(all_defaults, own.defaults)
            begin = 0
            for mark, bound in zip([*marks.tolist(), _NONE], [*bounds.tolist(), len(rows)], strict=True):
                span = rows[begin:bound]
                generation[span], is_valid[span], defaults[span] = own.generation, own.is_valid, index
                begin = bound
                if mark == _NONE:
                    break
                if cleared[mark]:
                    self._generations += 1
                    own.generation, own.is_valid, own.defaults = self._generations, True, NO_DEFAULTS
                elif lost[mark]:
                    own.is_valid = False
                own.defaults = given.get(mark, own.defaults)
                index = self._add(all_defaults, own.defaults)
        needs = (flags & np.uint64(TracePacket.SEQ_NEEDS_INCREMENTAL_STATE)) > 0
        self._intern(data, packets, generation)
        return State(sequence, generation, is_valid | ~needs, defaults, all_defaults)

    def end_batch(self) -> None:
        """Drops the texts of generations that have ended."""
        current = {each.generation for each in self.known.values()}
        for key in [key for key in self.texts if key[1] not in current]:
            texts = self.texts.pop(key)
            self._text_count -= len(texts)
            self._text_bytes -= sum(map(len, texts.values()))
        self.computing = {each for each in self.computing if each[0] in current}

    def _sequence(self, number: int) -> Sequence:
        if number not in self.known:
            if len(self.known) >= _MOST_SEQUENCES:
                self.known.pop(next(iter(self.known)))
                self.left_out["sequences, of which there are too many"] += 1
            self._generations += 1
            self.known[number] = Sequence(self._generations)
        return self.known[number]

    @staticmethod
    def _add(all_defaults: list[Defaults], defaults: Defaults) -> int:
        if defaults is NO_DEFAULTS:
            return 0
        if all_defaults[-1] is not defaults:
            all_defaults.append(defaults)
        return len(all_defaults) - 1

    def _intern(self, data: NDArray[np.uint8], packets: Fields, generation: NDArray[np.int64]) -> None:
        """Keeps the texts of a batch."""
        owner, starts, ends = packets.spans(TracePacket.INTERNED_DATA)
        if not len(owner):
            return
        found = wire.fields(data, starts, ends)
        for kind in TEXT_KINDS:
            inside, begins, stops = found.spans(kind)
            if not len(inside):
                continue
            entries = wire.fields(data, begins, stops)
            iids = entries.column(InternedData.IID).tolist()
            generations = generation[owner[inside]].tolist()
            of, at, until = entries.spans(InternedData.TEXT)
            texts = [b""] * len(iids)
            for row, begin, stop in zip(of.tolist(), at.tolist(), until.tolist(), strict=True):
                texts[row] = data[begin : min(stop, begin + _MOST_TEXT)].tobytes()
            for each, iid, text in zip(generations, iids, texts, strict=True):
                self._keep(self.texts.setdefault((kind, each), {}), iid, text)
            if kind == InternedData.GPU_SPECIFICATIONS:
                category = entries.column(InternedData.STAGE_CATEGORY)
                for row in np.flatnonzero(category == InternedData.COMPUTE).tolist():
                    if len(self.computing) < _MOST_TEXTS:
                        self.computing.add((generations[row], iids[row]))

    def _keep(self, texts: dict[int, bytes], iid: int, text: bytes) -> None:
        old = texts.get(iid)
        if old is None:
            if self._text_count >= _MOST_TEXTS:
                self.left_out["interned texts, of which there are too many"] += 1
                return
            self._text_count += 1
        more = len(text) - len(old or b"")
        if self._text_bytes + more > _MOST_TEXT_BYTES:
            self.left_out["interned texts, of which there are too many"] += 1
            text, more = b"", -len(old or b"")
        texts[iid] = text
        self._text_bytes += more

    def distinct(
        self, kind: int, generation: NDArray[np.int64], iids: NDArray[np.uint64]
    ) -> tuple[list[bytes | None], NDArray[np.int64]]:
        """Returns distinct interned texts, None for undefined ones, and for each row the index of its text."""
        of_row, first = inverse(generation, iids.view(np.int64))
        found = [self.texts.get((kind, int(generation[row])), {}).get(int(iids[row])) for row in first.tolist()]
        return found, of_row


def inverse(*keys: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Returns a number for each row, equal for equal keys, and for each number a row that has it."""
    numbers = np.zeros(len(keys[0]), np.int64)
    for key in keys:
        if len(key) and (key[0] == key).all():
            continue
        least = int(key.min(initial=0))
        if least >= -1 and int(key.max(initial=0)) < 4 * len(key) + 1024:
            dense = key + 1
        else:
            dense = np.unique(key, return_inverse=True)[1].reshape(-1)
        most = int(dense.max(initial=0)) + 1
        numbers = _compact(numbers * most + dense)
    count = int(numbers.max(initial=-1)) + 1
    first = np.zeros(count, np.int64)
    first[numbers[::-1]] = np.arange(len(numbers) - 1, -1, -1)
    return numbers, first


def _compact(numbers: NDArray[np.int64]) -> NDArray[np.int64]:
    most = int(numbers.max(initial=0)) + 1
    if most > 1 << 23:
        return np.unique(numbers, return_inverse=True)[1].reshape(-1)
    used = np.zeros(most, bool)
    used[numbers] = True
    return np.asarray((np.cumsum(used) - 1)[numbers], np.int64)


def _by_value(values: NDArray[np.int64]) -> list[tuple[int, Places]]:
    """Returns each value, and the rows that have it, in ascending order."""
    if not len(values):
        return []
    if (values == values[0]).all():
        return [(int(values[0]), np.arange(len(values)))]
    order = np.argsort(values, kind="stable")
    firsts = np.flatnonzero(np.diff(values[order], prepend=values[order[0]] - 1))
    return [(int(values[rows[0]]), rows) for rows in np.split(order, firsts[1:])]


def _defaults(message: bytes) -> Defaults:
    clock = track = 0
    extra: dict[int, list[int]] = defaultdict(list)
    for number, kind, value, place in wire.message_fields(message)[0]:
        if number == TracePacketDefaults.TIMESTAMP_CLOCK_ID and kind == wire.VARINT:
            clock = value
        elif number == TracePacketDefaults.TRACK_EVENT_DEFAULTS and kind == wire.BYTES:
            for inner, inner_kind, inner_value, at in wire.message_fields(message[place : place + value])[0]:
                if inner_kind == wire.BYTES:
                    extra[inner] += _packed(message[place + at : place + at + inner_value])
                elif inner_kind == wire.VARINT:
                    extra[inner].append(inner_value)
    tracks = extra[TrackEventDefaults.TRACK_UUID]
    track = tracks[-1] if tracks else 0
    return Defaults(
        clock, track, tuple(extra[TrackEventDefaults.EXTRA_COUNTER_TRACK_UUIDS][:_MOST_EXTRA]),
        tuple(extra[TrackEventDefaults.EXTRA_DOUBLE_COUNTER_TRACK_UUIDS][:_MOST_EXTRA]),
    )  # fmt: skip


def _packed(content: bytes) -> list[int]:
    """Returns the numbers of packed varints."""
    found: list[int] = []
    at = 0
    try:
        while at < len(content) and len(found) < _MOST_EXTRA:
            value, at = wire.varint(content, at)
            found.append(value)
    except IndexError:
        pass
    return found
