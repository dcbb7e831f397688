"""Makes traces with the `perfetto` package's classes."""

from __future__ import annotations

import random
import zlib
from typing import Any

import pyarrow as pa
from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as pb

CLEARED, NEEDS = 1, 2
BEGIN, END, INSTANT, COUNTER = 1, 2, 3, 4
BOOTTIME, MONOTONIC, OWN = 6, 3, 64
NAMES = ("event_names", "event_categories", "debug_annotation_names")


class Maker:
    """A trace that is being made."""

    def __init__(self) -> None:
        self.trace = pb.Trace()

    def packet(self, sequence: int = 1, **members: Any) -> Any:
        """Adds a packet."""
        return self.trace.packet.add(trusted_packet_sequence_id=sequence, **members)

    def begin(self, sequence: int = 1) -> Any:
        """Adds a packet that clears a sequence's state."""
        return self.packet(sequence, sequence_flags=CLEARED)

    def process(self, uuid: int, pid: int, name: str = "") -> None:
        """Describes a process."""
        track = self.packet().track_descriptor
        track.uuid, track.process.pid = uuid, pid
        if name:
            track.process.process_name = name

    def thread(self, uuid: int, pid: int, tid: int, name: str = "", parent: int = 0) -> None:
        """Describes a thread."""
        track = self.packet().track_descriptor
        track.uuid, track.thread.pid, track.thread.tid = uuid, pid, tid
        if name:
            track.thread.thread_name = name
        if parent:
            track.parent_uuid = parent

    def track(self, uuid: int, name: str, parent: int = 0) -> Any:
        """Describes a track that is neither."""
        track = self.packet().track_descriptor
        track.uuid, track.name = uuid, name
        if parent:
            track.parent_uuid = parent
        return track

    def event(self, type_: int, time: int | None, track: int, name: str = "", sequence: int = 1) -> Any:
        """Adds an event."""
        packet = self.packet(sequence)
        if time is not None:
            packet.timestamp = time
        event = packet.track_event
        event.type, event.track_uuid = type_, track
        if name:
            event.name = name
        return event

    def slice(self, time: int, end: int, track: int, name: str) -> Any:
        """Adds a slice; returns its beginning."""
        found = self.event(BEGIN, time, track, name)
        self.event(END, end, track)
        return found

    def bytes(self) -> bytes:
        """Returns the file."""
        return bytes(self.trace.SerializeToString())


def zstd(content: bytes) -> bytes:
    """Compresses with zstd."""
    return bytes(pa.compress(content, codec="zstd", asbytes=True))


def compressed(content: bytes) -> bytes:
    """Packs a trace into one compressed packet."""
    return bytes(pb.Trace(packet=[pb.TracePacket(compressed_packets=zlib.compress(content))]).SerializeToString())


def annotate(event: Any, name: str, value: Any) -> None:
    """Adds an argument."""
    set_value(event.debug_annotations.add(name=name), value)


def set_value(annotation: Any, value: Any) -> None:
    """Sets an annotation's value."""
    match value:
        case bool():
            annotation.bool_value = value
        case int():
            annotation.int_value = value
        case float():
            annotation.double_value = value
        case str():
            annotation.string_value = value
        case dict():
            for name, inside in value.items():
                set_value(annotation.dict_entries.add(name=name), inside)
        case list():
            for inside in value:
                set_value(annotation.array_values.add(), inside)


def random_trace(seed: int, count: int = 400) -> bytes:
    """A trace of three sequences with everything that an import reads, in order of time."""
    rng = random.Random(seed)
    made = Maker()
    for process in (1, 2):
        made.process(process, 40 + process, f"process {process}")
    for thread in range(3, 7):
        made.thread(thread, 41 + thread % 2, 100 + thread, f"thread {thread}", 1 + thread % 2)
    made.track(7, "lane", 1)
    made.track(8, "free")
    made.track(9, "below", 8)
    for uuid in range(20, 24):
        track = made.track(uuid, f"counter {uuid}", 1)
        track.counter.unit_name = rng.choice(["", "W", "MHz"])
        track.counter.is_incremental = uuid % 2 == 0
        track.counter.unit_multiplier = rng.choice([0, 1, 1000])
    now = 5_000_000_000
    clocks = {}
    known: dict[int, dict[tuple[str, str], int]] = {}

    def restart(sequence: int) -> None:
        packet = made.begin(sequence)
        known[sequence] = {}
        clock = rng.choice([0, BOOTTIME, MONOTONIC, OWN])
        defaults = packet.trace_packet_defaults
        defaults.timestamp_clock_id = clock
        if rng.random() < 0.5:
            defaults.track_event_defaults.track_uuid = rng.randrange(3, 10)
            defaults.track_event_defaults.extra_counter_track_uuids.extend([20, 21])
        clocks[sequence] = clock
        snapshot = packet.clock_snapshot
        snapshot.clocks.add(clock_id=BOOTTIME, timestamp=now)
        snapshot.clocks.add(clock_id=MONOTONIC, timestamp=now - 777)
        if clock == OWN:
            snapshot.clocks.add(clock_id=OWN, timestamp=now // 1000, is_incremental=True, unit_multiplier_ns=1000)
            last[sequence] = now // 1000

    def intern(packet: Any, sequence: int, kind: str, text: str) -> int:
        texts = known[sequence]
        if (kind, text) not in texts:
            texts[kind, text] = len(texts) + rng.choice([1, 1000, 1 << 40])
            getattr(packet.interned_data, kind).add(iid=texts[kind, text], name=text)
        return texts[kind, text]

    last: dict[int, int] = {}
    for sequence in (1, 2, 3):
        restart(sequence)
    for _ in range(count):
        now += rng.choice([0, 1000, 5000, 123_000])
        sequence = rng.choice([1, 2, 3])
        if rng.random() < 0.02:
            restart(sequence)
        packet = made.packet(sequence, sequence_flags=NEEDS)
        if rng.random() < 0.02:
            packet.previous_packet_dropped = 1
        clock = clocks[sequence]
        packet.timestamp = now if clock in (0, BOOTTIME) else now - 777
        if clock == OWN:
            packet.timestamp, last[sequence] = max(now // 1000 - last[sequence], 0), max(now // 1000, last[sequence])
        event = packet.track_event
        event.type = rng.choice([BEGIN, BEGIN, END, END, INSTANT, COUNTER])
        if event.type == COUNTER:
            event.track_uuid = rng.randrange(20, 24)
            if rng.random() < 0.5:
                event.counter_value = rng.randrange(-5, 1 << 40)
            else:
                event.double_counter_value = rng.uniform(-1, 1)
            continue
        if rng.random() < 0.9:
            event.track_uuid = rng.randrange(3, 10)
        if event.type != END:
            name = rng.choice(["k_1 Cmpt Exec", "é", "", "x" * 50])
            if name and rng.random() < 0.5:
                event.name = name
            elif name:
                event.name_iid = intern(packet, sequence, "event_names", name)
            for category in rng.sample(["a", "b", "c"], rng.choice([0, 1, 1, 2])):
                if rng.random() < 0.7:
                    event.category_iids.append(intern(packet, sequence, "event_categories", category))
                else:
                    event.categories.append(category)
            for name in rng.sample(["TS1", "note", "deep", "n", "f"], rng.choice([0, 1, 3])):
                annotation = event.debug_annotations.add()
                if rng.random() < 0.5:
                    annotation.name = name
                else:
                    annotation.name_iid = intern(packet, sequence, "debug_annotation_names", name)
                set_value(
                    annotation,
                    {
                        "TS1": rng.choice([5, "0x10", "77"]), "note": 'a"\n', "deep": {"x": [1, {"y": 2.5}], "z": "q"},
                        "n": rng.randrange(-(1 << 62), 1 << 62), "f": rng.random(),
                    }[name],
                )  # fmt: skip
        if rng.random() < 0.2:
            event.flow_ids.append(rng.randrange(1 << 64))
        if rng.random() < 0.1:
            event.terminating_flow_ids.append(rng.randrange(5))
        if rng.random() < 0.2:
            event.extra_counter_track_uuids.extend([22, 23])
            event.extra_counter_values.extend([rng.randrange(100), rng.randrange(100)])
        if rng.random() < 0.2:
            event.extra_double_counter_track_uuids.append(21)
            event.extra_double_counter_values.append(rng.random())
    return made.bytes()
