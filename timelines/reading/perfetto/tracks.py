"""The tracks of a trace: the process and thread, or the counter, of events.

A track that is not a thread's has a number from 2^48 on as its tid. A track without a process has such a number of the
outermost track above it as its pid. Names in descriptors become metadata events, as in Chrome's format.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace

from iaprof.timelines.reading.answer import MADE
from iaprof.timelines.reading.perfetto import wire
from iaprof.timelines.reading.perfetto.protos import (
    CounterDescriptor,
    ProcessDescriptor,
    ThreadDescriptor,
    TrackDescriptor,
)

_MOST_TRACKS = 1 << 17
_MOST_NAME = 1 << 14  # bytes
_DEEPEST = 64  # tracks above a track
_LOW = (1 << 40) - 1
_INT64 = 1 << 63


@dataclass(frozen=True)
class CounterTrack:
    """The unit and form of a counter's values."""

    unit: str = "value"
    factor: int = 1
    is_incremental: bool = False
    category: str = ""


@dataclass(frozen=True)
class Track:
    """A track, as its descriptors say."""

    parent: int = 0
    name: str = ""
    pid: int | None = None  # of a process or a thread
    tid: int | None = None  # of a thread
    counter: CounterTrack | None = None
    reference_us: int | None = None  # of a thread: see Clocks.reference


@dataclass(frozen=True)
class Place:
    """The pid and tid of a track's events."""

    pid: int
    tid: int
    is_known: bool = True  # whether it and all tracks above it were described


@dataclass(frozen=True)
class Name:
    """The name of a process (tid 0) or of a thread."""

    what: str  # process_name or thread_name
    pid: int
    tid: int
    name: str


@dataclass
class Tracks:
    """The tracks of a trace by uuid."""

    known: dict[int, Track] = field(default_factory=dict)
    threads: dict[int, tuple[int, int]] = field(default_factory=dict)  # pid and tid of sequences, in old traces
    given_names: dict[tuple[str, int, int], str] = field(default_factory=dict)  # that new_names has returned
    left_out: Counter[str] = field(default_factory=Counter)

    def describe(self, message: bytes) -> tuple[int, Track] | None:
        """Reads a TrackDescriptor; returns the track, None if it has no uuid or there are too many."""
        uuid = 0
        found = Track()
        for number, kind, value, place in wire.message_fields(message)[0]:
            inside = message[place : place + value] if kind == wire.BYTES else b""
            match number:
                case TrackDescriptor.UUID if kind == wire.VARINT:
                    uuid = value
                case TrackDescriptor.PARENT_UUID if kind == wire.VARINT:
                    found = replace(found, parent=value)
                case TrackDescriptor.NAME | TrackDescriptor.STATIC_NAME | TrackDescriptor.ATRACE_NAME:
                    found = replace(found, name=_text(inside))
                case TrackDescriptor.PROCESS if kind == wire.BYTES:
                    found = _with_process(found, inside)
                case TrackDescriptor.THREAD if kind == wire.BYTES:
                    found = _with_thread(found, inside)
                case TrackDescriptor.COUNTER if kind == wire.BYTES:
                    found = _with_counter(found, inside)
        if uuid not in self.known and len(self.known) >= _MOST_TRACKS:
            self.left_out["tracks, of which there are too many"] += 1
            return None
        old = self.known.get(uuid)
        if old is not None and old.name and not found.name:
            found = replace(found, name=old.name)
        self.known[uuid] = found
        return uuid, found

    def describe_thread(self, sequence: int, message: bytes) -> Track:
        """Reads a ThreadDescriptor of a packet, from before there were tracks: the thread of its sequence's events."""
        found = _with_thread(Track(), message)
        if len(self.threads) < _MOST_TRACKS and found.pid is not None and found.tid is not None:
            self.threads[sequence] = found.pid, found.tid
        return found

    def place(self, uuid: int) -> Place:
        """Returns the pid and tid of the events of a track."""
        track = self.known.get(uuid)
        if track is None:
            return Place(0, _made(uuid) if uuid else 0, is_known=not uuid)
        if track.tid is not None and track.pid is not None:
            return Place(track.pid, track.tid)
        top, parent = uuid, track
        for _ in range(_DEEPEST):
            if parent.pid is not None:
                return Place(parent.pid, _made(uuid))
            if not parent.parent:
                break
            top = parent.parent
            above = self.known.get(top)
            if above is None:
                return Place(_made(top), _made(uuid), is_known=False)
            parent = above
        return Place(_made(top), _made(uuid))

    def new_names(self, uuids: list[int]) -> list[Name]:
        """Returns the names of these tracks that are new."""
        found = []
        for uuid in uuids:
            track = self.known.get(uuid)
            if track is None or not track.name or track.counter is not None:
                continue
            place = self.place(uuid)
            names = (
                [] if track.pid is not None and track.tid is None else [Name("thread_name", place.pid, place.tid, "")]
            )
            if track.tid is None and (track.pid is not None or place.pid == _made(uuid)):
                names.append(Name("process_name", place.pid, 0, ""))
            for name in names:
                key = name.what, name.pid, name.tid
                if self.given_names.get(key) != track.name:
                    self.given_names[key] = track.name
                    found.append(replace(name, name=track.name))
        return found


def _made(uuid: int) -> int:
    return MADE + (uuid & _LOW)


def _text(content: bytes) -> str:
    return content[:_MOST_NAME].decode("utf-8", "replace")


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= _INT64 else value


def _with_process(track: Track, message: bytes) -> Track:
    pid, name = 0, track.name
    for number, kind, value, place in wire.message_fields(message)[0]:
        if number == ProcessDescriptor.PID and kind == wire.VARINT:
            pid = _signed(value)
        elif number == ProcessDescriptor.PROCESS_NAME and kind == wire.BYTES:
            name = _text(message[place : place + value]) or name
    return replace(track, pid=pid, name=name)


def _with_thread(track: Track, message: bytes) -> Track:
    pid = tid = 0
    name, reference = track.name, None
    for number, kind, value, place in wire.message_fields(message)[0]:
        if number == ThreadDescriptor.PID and kind == wire.VARINT:
            pid = _signed(value)
        elif number == ThreadDescriptor.TID and kind == wire.VARINT:
            tid = _signed(value)
        elif number == ThreadDescriptor.THREAD_NAME and kind == wire.BYTES:
            name = _text(message[place : place + value]) or name
        elif number == ThreadDescriptor.REFERENCE_TIMESTAMP_US and kind == wire.VARINT:
            reference = value
    return replace(track, pid=pid, tid=tid, name=name, reference_us=reference)


def _with_counter(track: Track, message: bytes) -> Track:
    counter = CounterTrack()
    unit, given, type_ = 0, "", 0
    categories = []
    for number, kind, value, place in wire.message_fields(message)[0]:
        inside = message[place : place + value] if kind == wire.BYTES else b""
        match number:
            case CounterDescriptor.TYPE:
                type_ = value
            case CounterDescriptor.UNIT:
                unit = value
            case CounterDescriptor.UNIT_NAME:
                given = _text(inside)
            case CounterDescriptor.UNIT_MULTIPLIER if kind == wire.VARINT:
                counter = replace(counter, factor=_signed(value) or 1)
            case CounterDescriptor.IS_INCREMENTAL:
                counter = replace(counter, is_incremental=bool(value))
            case CounterDescriptor.CATEGORIES:
                categories.append(_text(inside))
    units, names = CounterDescriptor.UNITS, CounterDescriptor.NAMES
    unit_name = given or (units[unit] if unit < len(units) else "") or "value"
    name = track.name or (names[type_] if type_ < len(names) else "")
    return replace(
        track, name=name, counter=replace(counter, unit=unit_name, category=_text(",".join(categories).encode()))
    )
