"""What a trace of Perfetto's says, read packet by packet with the `perfetto` package's classes.

It follows Perfetto's definitions as plainly as it can.
"""

from __future__ import annotations

import zlib
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as pb

MADE = 1 << 48
BOOTTIME = 6


@dataclass
class Sequence:
    """What the packets of a sequence share."""

    valid: bool = False
    texts: dict[tuple[str, int], Any] = field(default_factory=dict)
    defaults: Any = field(default_factory=pb.TracePacketDefaults)
    clocks: dict[int, int] = field(default_factory=dict)  # of incremental clocks, ns


@dataclass
class Expected:
    """What an import should find."""

    # Time, duration, pid, tid, name and category.
    slices: list[tuple[int, int, int, int, str, str | None]] = field(default_factory=list)
    counters: list[tuple[int, int, int, str, str, float]] = field(default_factory=list)
    instants: list[tuple[int, int, int, str, str]] = field(default_factory=list)
    flows: list[tuple[int, int, int, int]] = field(default_factory=list)  # time, pid, tid, id
    args: list[dict[str, Any]] = field(default_factory=list)  # of slices, in their order
    dropped: Counter[str] = field(default_factory=Counter)


class Oracle:
    """Reads a trace."""

    def __init__(self, content: bytes) -> None:
        self.packets = list(self._packets(content))
        self.tracks: dict[int, Any] = {}
        self.sequences: dict[int, Sequence] = {}
        self.trace_clock: int | None = None
        self.units: dict[tuple[int, int], int] = {}
        self.relations: dict[tuple[int, int], list[tuple[int, int]]] = {}
        self.edges: list[tuple[Any, ...]] = []  # beginnings and ends of slices
        self.open: dict[tuple[int, int], list[tuple[Any, ...]]] = {}
        self.sums: dict[tuple[int, int], float] = {}
        self.found = Expected()

    def _packets(self, content: bytes) -> Any:
        for packet in pb.Trace.FromString(content).packet:
            if packet.HasField("compressed_packets"):
                yield from pb.Trace.FromString(zlib.decompress(packet.compressed_packets)).packet
            else:
                yield packet

    def read(self) -> Expected:
        """Reads everything. Descriptors of tracks are read first."""
        for packet in self.packets:
            if packet.HasField("track_descriptor"):
                self.tracks[packet.track_descriptor.uuid] = packet.track_descriptor
        for packet in self.packets:
            self._packet(packet)
        for edge in sorted(self.edges, key=lambda edge: edge[0]):
            self._edge(*edge)
        for left in self.open.values():
            self.found.dropped["beginning without an end"] += len(left)
        self.found.dropped = +self.found.dropped
        return self.found

    def _edge(
        self, time: int, phase: str, pid: int, tid: int, name: str, category: str | None, args: dict[str, Any]
    ) -> None:
        stack = self.open.setdefault((pid, tid), [])
        if phase == "B":
            stack.append((time, name, category, args))
        elif stack:
            begin, first, of, given = stack.pop()
            self.found.slices.append((begin, time - begin, pid, tid, first, of))
            self.found.args.append(given | args)
        else:
            self.found.dropped["end without a beginning"] += 1

    def _packet(self, packet: Any) -> None:
        own = self.sequences.setdefault(packet.trusted_packet_sequence_id, Sequence())
        if packet.sequence_flags & 1 or packet.incremental_state_cleared:
            self.sequences[packet.trusted_packet_sequence_id] = own = Sequence(True, clocks=own.clocks)
            self.sums = {key: value for key, value in self.sums.items() if key[0] != packet.trusted_packet_sequence_id}
        elif packet.previous_packet_dropped:
            own.valid = False
        if packet.HasField("trace_packet_defaults"):
            own.defaults = packet.trace_packet_defaults
        for kind in ("event_names", "event_categories", "debug_annotation_names"):
            own.texts |= {(kind, each.iid): each.name for each in getattr(packet.interned_data, kind)}
        own.texts |= {
            ("strings", each.iid): each.str.decode() for each in packet.interned_data.debug_annotation_string_values
        }
        if packet.HasField("clock_snapshot"):
            self._snapshot(packet, own)
        time = self._time(packet, own) if packet.HasField("timestamp") else None
        if packet.HasField("track_event"):
            if packet.sequence_flags & 2 and not own.valid:
                self.found.dropped["after lost packets"] += 1
            elif time is None:
                self.found.dropped["without a time"] += 1
            else:
                self._event(packet, packet.track_event, own, time)

    def _snapshot(self, packet: Any, own: Sequence) -> None:
        shown = {}
        for clock in packet.clock_snapshot.clocks:
            scope = packet.trusted_packet_sequence_id if 64 <= clock.clock_id < 128 else 0
            time = clock.timestamp * (clock.unit_multiplier_ns or 1)
            shown[scope, clock.clock_id] = time
            self.units[scope, clock.clock_id] = clock.unit_multiplier_ns or 1
            if clock.is_incremental:
                own.clocks[clock.clock_id] = time
        if self.trace_clock is None and packet.clock_snapshot.primary_trace_clock:
            self.trace_clock = packet.clock_snapshot.primary_trace_clock
        at = shown.get((0, self.trace_clock or BOOTTIME))
        if at is None:
            at = next((self._converted(key, time) for key, time in shown.items() if key in self.relations), None)
        for key, time in shown.items():
            if at is not None:
                self.relations.setdefault(key, []).append((time, at))

    def _converted(self, key: tuple[int, int], time: int) -> int:
        known = sorted(self.relations.get(key, [(0, 0)]))
        before = [each for each in known if each[0] <= time] or known[:1]
        return time + before[-1][1] - before[-1][0]

    def _time(self, packet: Any, own: Sequence) -> int:
        clock = packet.timestamp_clock_id or own.defaults.timestamp_clock_id or BOOTTIME
        key = (packet.trusted_packet_sequence_id if 64 <= clock < 128 else 0), clock
        time = packet.timestamp * self.units.get(key, 1)
        if clock in own.clocks:
            own.clocks[clock] += time
            time = own.clocks[clock]
        is_given = bool(packet.timestamp_clock_id or own.defaults.timestamp_clock_id)
        return self._converted(key, time) if is_given and clock != (self.trace_clock or BOOTTIME) else time

    def place(self, uuid: int) -> tuple[int, int]:
        """Returns pid and tid."""
        if uuid not in self.tracks:
            return 0, MADE + uuid % (1 << 40) if uuid else 0
        track = self.tracks[uuid]
        if track.HasField("thread"):
            return track.thread.pid, track.thread.tid
        top = track
        while not top.HasField("process") and not top.HasField("thread") and top.parent_uuid in self.tracks:
            top = self.tracks[top.parent_uuid]
        pid = top.process.pid if top.HasField("process") else top.thread.pid
        if not top.HasField("process") and not top.HasField("thread"):
            pid = MADE + (top.parent_uuid or top.uuid) % (1 << 40)
        return pid, MADE + uuid % (1 << 40)

    def _event(self, packet: Any, event: Any, own: Sequence, time: int) -> None:
        defaults = own.defaults.track_event_defaults
        uuid = event.track_uuid if event.HasField("track_uuid") else defaults.track_uuid
        pid, tid = self.place(uuid)
        legacy = event.legacy_event
        if legacy.pid_override > 0:
            pid = legacy.pid_override
        if legacy.tid_override > 0:
            tid = legacy.tid_override
        phase = {1: "B", 2: "E", 3: "i", 4: "C"}.get(event.type) or chr(legacy.phase).replace("I", "i")
        if phase == "\0":
            self.found.dropped["without a type"] += 1
            return
        iid = event.name_iid or legacy.name_iid
        name = event.name if event.HasField("name") else own.texts.get(("event_names", iid))
        categories = [own.texts.get(("event_categories", iid), "") for iid in event.category_iids] + [*event.categories]
        category = ",".join(categories) if categories else None
        flows = [*event.flow_ids, *event.terminating_flow_ids, *event.flow_ids_old, *event.terminating_flow_ids_old]
        if legacy.HasField("bind_id") and legacy.flow_direction:
            flows.append(legacy.bind_id)
        self.found.flows += [(time, pid, tid, flow - (1 << 64) if flow >= 1 << 63 else flow) for flow in flows]
        self._counters(packet, event, own, time)
        args = {self._name(each, own): self._value(each, own) for each in event.debug_annotations}
        match phase:
            case "B" | "E":
                self.edges.append((time, phase, pid, tid, name or "", category, args))
            case "X":
                self.found.slices.append((time, 1000 * legacy.duration_us, pid, tid, name or "", category))
                self.found.args.append(args)
            case "C":
                value = event.counter_value if event.HasField("counter_value") else event.double_counter_value
                self._value_of(packet, uuid, time, value)
            case "s" | "t" | "f":
                self.found.flows.append((time, pid, tid, self._id(legacy)))
            case _:
                self.found.instants.append((time, pid, tid, phase, name or ""))

    def _id(self, legacy: Any) -> int:
        return int(legacy.unscoped_id or legacy.local_id or legacy.global_id)

    def _counters(self, packet: Any, event: Any, own: Sequence, time: int) -> None:
        defaults = own.defaults.track_event_defaults
        for kind in ("extra_counter", "extra_double_counter"):
            tracks = getattr(event, f"{kind}_track_uuids") or getattr(defaults, f"{kind}_track_uuids")
            values = getattr(event, f"{kind}_values")
            self.found.dropped["counter without a track"] += max(len(values) - len(tracks), 0)
            for uuid, value in zip(tracks, values, strict=False):
                self._value_of(packet, uuid, time, value)

    def _value_of(self, packet: Any, uuid: int, time: int, value: float) -> None:
        track = self.tracks.get(uuid, pb.TrackDescriptor())
        counter = track.counter
        if counter.is_incremental:
            key = packet.trusted_packet_sequence_id, uuid
            value = self.sums[key] = self.sums.get(key, 0) + value
        unit = counter.unit_name or ("", "ns", "count", "bytes")[counter.unit] or "value"
        name = track.name or track.static_name or ("", "thread_time", "thread_instruction_count")[counter.type]
        self.found.counters.append((time, *self.place(uuid), name, unit, float(value * (counter.unit_multiplier or 1))))

    def _name(self, each: Any, own: Sequence) -> str:
        return str(each.name or own.texts.get(("debug_annotation_names", each.name_iid), ""))

    def _value(self, each: Any, own: Sequence) -> Any:
        if each.dict_entries:
            return {self._name(entry, own): self._value(entry, own) for entry in each.dict_entries}
        if each.array_values:
            return [self._value(entry, own) for entry in each.array_values]
        match each.WhichOneof("value"):
            case "string_value_iid":
                return own.texts.get(("strings", each.string_value_iid), "")
            case "pointer_value":
                return f"0x{each.pointer_value:x}"
            case None:
                return None
            case kind:
                return getattr(each, kind)
