"""Perfetto traces, parsed by the definitions in the `perfetto` package; trace_processor is not available offline."""

from __future__ import annotations

import io
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as pb

from iaprof.formats.export import Export, Launches
from iaprof.formats.profile import StackOptions, empty_profile, reason_name
from iaprof.formats.writers.registry import WRITERS
from iaprof.gpu.intel.reasons import REASONS
from unit.made_timelines import HOSTILE, executed, export

ZERO = 50_000_000_000
MS = 1_000_000


@dataclass
class Read:
    """A parsed trace: tracks by their paths from the root."""

    tracks: dict[tuple[str, ...], Any] = field(default_factory=dict)
    values: dict[tuple[str, ...], list[tuple[int, float]]] = field(default_factory=dict)
    slices: dict[tuple[str, ...], list[tuple[str, int, int, int]]] = field(default_factory=dict)
    categories: dict[tuple[str, ...], set[str]] = field(default_factory=dict)
    arguments: dict[tuple[str, int], dict[str, Any]] = field(default_factory=dict)  # of slices, by name and begin
    flows: dict[int, list[tuple[str, str, int]]] = field(default_factory=dict)  # what, slice, begin; by number
    snapshot: Any = None


def name_of(track: Any) -> str:
    if track.HasField("process"):
        return f"{track.process.process_name} ({track.process.pid})"
    if track.HasField("thread"):
        return f"{track.thread.thread_name} ({track.thread.pid}/{track.thread.tid})"
    return str(track.name)


def read(given: Export) -> Read:
    """Parses a trace by the rules of protos/perfetto/trace/ in Perfetto's sources."""
    out = io.BytesIO()
    WRITERS["perfetto"].write(given, StackOptions(), out)
    found = Read()
    paths: dict[int, tuple[str, ...]] = {}
    names: dict[int, str] = {}
    annotations: dict[int, str] = {}
    categories: dict[int, str] = {}
    texts: dict[int, str] = {}
    open_: dict[int, tuple[str, int, Any]] = {}
    cleared = False
    for packet in pb.Trace.FromString(out.getvalue()).packet:
        assert packet.trusted_packet_sequence_id
        if packet.sequence_flags & pb.TracePacket.SEQ_INCREMENTAL_STATE_CLEARED:
            assert not cleared
            assert packet.trace_packet_defaults.timestamp_clock_id == pb.BUILTIN_CLOCK_MONOTONIC
            cleared = True
        names |= {each.iid: each.name for each in packet.interned_data.event_names}
        annotations |= {each.iid: each.name for each in packet.interned_data.debug_annotation_names}
        categories |= {each.iid: each.name for each in packet.interned_data.event_categories}
        texts |= {each.iid: each.str.decode() for each in packet.interned_data.debug_annotation_string_values}
        if packet.HasField("clock_snapshot"):
            found.snapshot = packet.clock_snapshot
        if packet.HasField("track_descriptor"):
            track = packet.track_descriptor
            assert track.uuid not in paths
            paths[track.uuid] = (*paths[track.parent_uuid], name_of(track)) if track.parent_uuid else (name_of(track),)
            assert paths[track.uuid] not in found.tracks or paths[track.uuid][0].startswith("GPU kernels")
            found.tracks[paths[track.uuid]] = track
        if not packet.HasField("track_event"):
            continue
        assert cleared
        assert packet.sequence_flags & pb.TracePacket.SEQ_NEEDS_INCREMENTAL_STATE
        event, time = packet.track_event, packet.timestamp - ZERO
        path = paths[event.track_uuid]
        if event.type == pb.TrackEvent.TYPE_COUNTER:
            assert found.tracks[path].HasField("counter")
            value = event.counter_value if event.HasField("counter_value") else event.double_counter_value
            found.values.setdefault(path, []).append((time, value))
        elif event.type == pb.TrackEvent.TYPE_SLICE_BEGIN:
            assert event.track_uuid not in open_, "slices of one track must not overlap"
            given_ = {
                annotations[each.name_iid]: texts[each.string_value_iid] if each.string_value_iid else each.uint_value
                for each in event.debug_annotations
            }
            (category,) = (categories[number] for number in event.category_iids)
            (count_of,) = given_.keys() & {"waits", "launches", "samples"}
            assert category == {"samples": "gpu"}.get(count_of, count_of)
            found.arguments[names[event.name_iid], time] = given_
            for flow in event.flow_ids:
                found.flows.setdefault(flow, []).append(("begins", names[event.name_iid], time))
            for flow in event.terminating_flow_ids:
                found.flows.setdefault(flow, []).append(("ends", names[event.name_iid], time))
            open_[event.track_uuid] = names[event.name_iid], time, given_[count_of]
        else:
            assert event.type == pb.TrackEvent.TYPE_SLICE_END
            name, begin, count = open_.pop(event.track_uuid)
            assert time > begin
            found.slices.setdefault(path, []).append((name, begin, time, count))
    assert not open_
    return found


def test_counters_have_the_totals_by_perfettos_definitions_as_its_ui_cannot_be_had_offline() -> None:
    found = read(given := export())
    per_reason = dict(zip(REASONS, given.profile.counts.sum(axis=0).tolist(), strict=True))
    sums = {path: sum(value for _, value in values) for path, values in found.values.items()}
    assert sums["GPU samples", "all reasons"] == given.profile.counts.sum()
    assert {reason: sums.get(("GPU samples", reason_name(reason)), 0) for reason in REASONS} == per_reason
    assert found.values["GPU samples", "stall: sbid"] == [(0, 7), (100 * MS, 0), (700 * MS, 0), (800 * MS, 0)]
    assert found.values["GPU samples", "all reasons"] == [(0, 8), (100 * MS, 0), (700 * MS, 9), (800 * MS, 0)]
    assert found.values["CPU samples",] == [(100 * MS, 4), (200 * MS, 6), (300 * MS, 0)]
    assert found.tracks["GPU samples", "stall: sbid"].counter.unit_name == "samples per 0.1 s"


def test_metrics_are_counters_with_units() -> None:
    found = read(export())
    path = "Metrics", "frequency-actual"
    assert found.tracks[path].counter.unit_name == "MHz"
    assert found.values[path] == [(50 * MS, 400.0), (150 * MS, 2400.5)]
    assert [track.counter.unit_name for path, track in found.tracks.items() if path[-1].startswith("cpu")] == ["%"]


def test_launches_are_slices_below_processes_and_threads() -> None:
    found = read(export())
    assert found.slices["app (7)", "app (7/7)", "matmul"] == [
        ("matmul \u00d7100", 0, 300 * MS, 100),
        ("matmul", 500 * MS, 500 * MS + 1000, 1),
    ]
    assert found.slices["app (7)", "app (7/7)", "reduce"] == [("reduce", 100 * MS, 100 * MS + 1000, 1)]
    counts = Counter(path[1] for path, slices in found.slices.items() for slice_ in slices for _ in range(slice_[3]))
    assert counts == {"app (7/7)": 102, "worker (7/9)": 7}


def test_when_kernels_were_seen_are_slices_with_their_stacks_and_flows_from_their_launches() -> None:
    found = read(executed())
    # those that are known to be of one queue are below it
    assert found.slices["GPU kernels card0, app 7, queue 0x5000", "matmul"] == [
        ("matmul", 50 * MS, 400 * MS, 6), ("matmul", 550 * MS, 600 * MS, 9),
    ]  # fmt: skip
    assert found.slices["GPU kernels card0", "matmul"] == [("matmul", 60 * MS, 60 * MS + 1000, 2)]
    assert found.slices["GPU kernels card1", "[unknown kernel]"] == [("[unknown kernel]", 900 * MS, 1000 * MS, 1)]
    assert found.arguments["matmul", 50 * MS] == {
        "samples": 6, "process": "app 7", "queue": "0x5000", "stack": "main",
    }  # fmt: skip
    assert found.arguments["matmul", 60 * MS]["queue"] == "unknown, or several"
    assert found.arguments["matmul", 60 * MS]["stack"].startswith("main;a\\x1b[2J")
    # from the run of launches that began last before the samples were seen
    assert sorted(found.flows.values()) == [
        [("ends", "matmul", 50 * MS), ("begins", "matmul \u00d7100", 0)],
        [("ends", "matmul", 60 * MS), ("begins", "matmul \u00d7100", 0)],
        [("ends", "matmul", 550 * MS), ("begins", "matmul", 500 * MS)],
    ]


def test_waits_are_slices_of_their_threads_too() -> None:
    given = export()
    assert given.launches is not None
    times = np.array([0.1, 0.3]), np.array([0.2, 0.4])
    of = np.zeros(2, np.int64), np.array([1, 1])
    waits = Launches(["zeWait"], given.launches.threads, *of, *times, np.array([1, 3]))
    found = read(replace(given, waits=waits))
    assert found.slices["app (7)", "worker (7/9)", "zeWait"] == [
        ("zeWait", 100 * MS, 200 * MS, 1),
        ("zeWait \u00d73", 300 * MS, 400 * MS, 3),
    ]
    assert {path: slices for path, slices in found.slices.items() if path[-1] != "zeWait"} == read(given).slices


def test_times_are_monotonic_with_a_snapshot_of_the_wall_clock() -> None:
    snapshot = read(export()).snapshot
    assert snapshot.primary_trace_clock == pb.BUILTIN_CLOCK_MONOTONIC
    assert {clock.clock_id: clock.timestamp for clock in snapshot.clocks} == {
        pb.BUILTIN_CLOCK_MONOTONIC: ZERO,
        pb.BUILTIN_CLOCK_REALTIME: 1_700_000_000 * 1_000_000_000,
    }


def test_each_gpu_has_its_own_counters() -> None:
    found = read(export(devices=("card0", "card1")))
    assert sum(value for _, value in found.values["GPU samples card0", "all reasons"]) == 15
    assert found.values["GPU samples card1", "stall: sbid"] == [(0, 2), (100 * MS, 0)]


def test_equal_pids_of_several_machines_stay_apart() -> None:
    found = read(export(hosts=("one", "two")))
    assert not any(track.HasField("process") for track in found.tracks.values())
    assert ("one app 7", "worker 9", "matmul") in found.slices
    assert [path[0] for path in found.slices if path[0].startswith("two")]


def test_hostile_names_are_escaped() -> None:
    found = read(export())
    texts = [text for path in (*found.tracks, *found.slices) for text in path]
    texts += [name for slices in found.slices.values() for name, *_ in slices]
    assert any("\\x1b[2J" in text for text in texts)
    assert all(text.isprintable() for text in texts)
    assert HOSTILE not in texts


def test_stalls_by_time_come_from_the_profile_by_interval() -> None:
    given = export()
    whole = replace(given.profile, interval=np.zeros_like(given.profile.interval), intervals=[50.0])
    found = read(replace(given, profile=whole, by_time=given.profile))
    assert found.values["GPU samples", "stall: send"] == [(0, 0), (100 * MS, 0), (700 * MS, 9), (800 * MS, 0)]


@pytest.mark.parametrize("seconds", [1e300, -1e300])
def test_absurd_times_give_a_valid_trace(seconds: float) -> None:
    given = export()
    series = [replace(given.series[0], seconds=np.array([seconds, seconds]))]
    assert len(read(replace(given, series=series)).values["Metrics", "frequency-actual"]) == 2


def test_a_capture_of_nothing_is_a_trace_of_nothing() -> None:
    found = read(Export(empty_profile(), interval_s=0.1))
    assert (found.slices, found.values) == ({}, {})


def perfetto_total(file: Path) -> int:
    trace = pb.Trace.FromString(file.read_bytes())
    names = {packet.track_descriptor.uuid: packet.track_descriptor.name for packet in trace.packet}
    events = [packet.track_event for packet in trace.packet if packet.HasField("track_event")]
    return int(sum(event.counter_value for event in events if names[event.track_uuid] == "all reasons"))


TOTALS = {"perfetto": perfetto_total}
