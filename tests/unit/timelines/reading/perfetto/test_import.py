"""Perfetto's traces as captures, compared with what an independent reader finds, and with values worked out by hand."""

from __future__ import annotations

import gzip
import math
from collections import Counter
from typing import Any

import pytest
from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as pb

from iaprof.timelines.reading.imported_file import FileFacts
from unit.timelines.reading.importing import rows_without_file
from unit.timelines.reading.perfetto.making import (
    BEGIN,
    BOOTTIME,
    CLEARED,
    COUNTER,
    END,
    INSTANT,
    MONOTONIC,
    NEEDS,
    Maker,
    annotate,
    compressed,
    random_trace,
)
from unit.timelines.reading.perfetto.oracle import Oracle

WHOLE = 1 << 20
MADE = 1 << 48
Rows = dict[str, list[dict[str, Any]]]
COLUMNS = {"TS1": "ts1"}


def read(made: Maker, piece_bytes: int = WHOLE) -> tuple[Rows, FileFacts]:
    return rows_without_file(made.bytes(), piece_bytes)


def columns(rows: list[dict[str, Any]], *names: str) -> list[tuple[Any, ...]]:
    return [tuple(row[name] for name in names) for row in rows]


def check(content: bytes, rows: Rows, facts: FileFacts) -> None:
    """Compares rows with those of an independent reader."""
    expected = Oracle(content).read()
    slices = columns(rows["slice"], "time_ns", "duration_ns", "pid", "tid", "name", "category")
    assert Counter(slices) == Counter(expected.slices)
    assert Counter(columns(rows["flow"], "time_ns", "pid", "tid", "id")) == Counter(expected.flows)
    instants = [row for row in rows["instant"] if row["phase"] != "M"]
    assert Counter(columns(instants, "time_ns", "pid", "tid", "phase", "name")) == Counter(expected.instants)
    values = columns(rows["counter"], "time_ns", "pid", "tid", "name", "series", "value")
    assert len(values) == len(expected.counters)
    for found, wanted in zip(sorted(values), sorted(expected.counters), strict=True):
        assert found[:-1] == wanted[:-1]
        assert found[-1] == pytest.approx(wanted[-1], rel=1e-12)
    known = {name: facts.counts.dropped[name] for name in expected.dropped}
    assert known == expected.dropped
    given = dict(zip(expected.slices, expected.args, strict=True))
    for row, key in zip(rows["slice"], slices, strict=True):
        if slices.count(key) == 1:
            args = dict(given[key])
            ts1 = args.pop("TS1", None)
            assert row["ts1"] == (int(ts1, 0) if isinstance(ts1, str) else ts1)
            assert (row["args"] or {}) == args


@pytest.mark.parametrize("seed", range(12))
def test_random_traces_are_read_as_by_a_reader_that_goes_packet_by_packet(seed: int) -> None:
    content = random_trace(seed)
    check(content, *rows_without_file(content, WHOLE))


@pytest.mark.parametrize("seed", range(4))
def test_pieces_compressed_files_and_compressed_packets_give_the_same_rows(seed: int) -> None:
    content = random_trace(seed, 150)
    rows, facts = rows_without_file(content, WHOLE)
    for other, piece_bytes in ((content, 1500), (gzip.compress(content), WHOLE), (compressed(content), WHOLE)):
        found, again = rows_without_file(other, piece_bytes)
        for kind in rows:  # metadata come at the end of each piece
            assert sorted(map(repr, found[kind])) == sorted(map(repr, rows[kind]))
        assert again.counts == facts.counts


def test_slices_of_threads_get_their_times_names_and_arguments() -> None:
    made = Maker()
    made.process(1, 7, "app")
    made.thread(2, 7, 8, "worker", 1)
    outer = made.event(BEGIN, 1000, 2, "outer")
    annotate(outer, "TS1", "0x10")
    annotate(outer, "debug.Power", 5)
    annotate(outer, "args.note", "hi")
    made.slice(1200, 1300, 2, "inner")
    annotate(made.event(END, 1500, 2), "late", 1.5)
    rows, facts = read(made)
    assert columns(rows["slice"], "time_ns", "duration_ns", "pid", "tid", "name") == [
        (1200, 100, 7, 8, "inner"), (1000, 500, 7, 8, "outer"),
    ]  # fmt: skip
    outer_row = rows["slice"][1]
    assert (outer_row["ts1"], outer_row["power"], outer_row["args"]) == (16, 5, {"note": "hi", "late": 1.5})
    assert columns(rows["instant"], "phase", "pid", "tid", "name", "args") == [
        ("M", 7, 0, "process_name", {"name": "app"}), ("M", 7, 8, "thread_name", {"name": "worker"}),
    ]  # fmt: skip
    assert facts.dialect == "flex"
    assert facts.counts.events == 6
    assert facts.counts.merged == {"end of a slice": 2}


def test_a_trace_that_no_tool_is_known_for_keeps_its_names() -> None:
    made = Maker()
    made.thread(2, 7, 8)
    made.slice(1, 2, 2, "RDMA Receive")
    rows, facts = read(made)
    assert facts.dialect == "unknown"
    assert rows["slice"][0]["name"] == "RDMA Receive"


def test_tracks_that_are_no_threads_get_numbers_of_their_own_below_their_process_or_outermost_track() -> None:
    made = Maker()
    made.process(1, 7, "app")
    made.track(5, "lane", 1)
    made.track(6, "alone")
    made.track(9, "below", 6)
    for uuid in (1, 5, 6, 9):
        made.slice(10, 20, uuid, f"of {uuid}")
    rows, _ = read(made)
    places = {row["name"]: (row["pid"], row["tid"]) for row in rows["slice"]}
    assert places == {
        "of 1": (7, MADE + 1),
        "of 5": (7, MADE + 5),
        "of 6": (MADE + 6, MADE + 6),
        "of 9": (MADE + 6, MADE + 9),
    }
    names = {(row["name"], row["pid"], row["tid"]): row["args"]["name"] for row in rows["instant"]}
    assert names == {
        ("process_name", 7, 0): "app",
        ("thread_name", 7, MADE + 5): "lane",
        ("thread_name", MADE + 6, MADE + 6): "alone",
        ("process_name", MADE + 6, 0): "alone",
        ("thread_name", MADE + 6, MADE + 9): "below",
    }


def test_tracks_in_a_circle_end_somewhere() -> None:
    made = Maker()
    made.track(5, "a", 6)
    made.track(6, "b", 5)
    made.slice(1, 2, 5, "x")
    rows, _ = read(made)
    assert rows["slice"][0]["tid"] == MADE + 5


@pytest.mark.parametrize("piece_bytes", [80, WHOLE])
def test_tracks_may_be_described_after_their_events(piece_bytes: int) -> None:
    made = Maker()
    for number in range(8):
        made.slice(10 * number, 10 * number + 5, 2, "early")
    made.thread(2, 7, 8)
    rows, facts = read(made, piece_bytes)
    assert {(row["pid"], row["tid"]) for row in rows["slice"]} == {(7, 8)}
    assert facts.problems == []


def test_tracks_that_nobody_describes_are_told() -> None:
    made = Maker()
    made.slice(1, 2, 77, "x")
    rows, facts = read(made)
    assert (rows["slice"][0]["pid"], rows["slice"][0]["tid"]) == (0, MADE + 77)
    assert facts.problems == ["tracks that are not described: 1"]


def test_clocks_are_converted_by_the_last_snapshot_before_a_time() -> None:
    made = Maker()
    for boot, monotonic in ((1000, 100), (5000, 4000)):
        snapshot = made.packet().clock_snapshot
        snapshot.clocks.add(clock_id=BOOTTIME, timestamp=boot)
        snapshot.clocks.add(clock_id=MONOTONIC, timestamp=monotonic)
    for time in (50, 100, 3999, 4000, 4100):
        made.event(INSTANT, time, 0, "x")
        made.trace.packet[-1].timestamp_clock_id = MONOTONIC
    rows, facts = read(made)
    assert [row["time_ns"] for row in rows["instant"]] == [950, 1000, 4899, 5000, 5100]
    assert facts.problems == []


def test_times_of_a_clock_without_a_snapshot_are_taken_as_they_are_and_told() -> None:
    made = Maker()
    made.event(INSTANT, 5, 0, "x")
    made.trace.packet[-1].timestamp_clock_id = BOOTTIME
    made.event(INSTANT, 6, 0, "y")
    made.trace.packet[-1].timestamp_clock_id = 129
    rows, facts = read(made)
    assert [row["time_ns"] for row in rows["instant"]] == [5, 6]
    assert facts.problems == ["times of clocks that no snapshot relates to the trace's, taken as they are: 1"]


def test_differences_of_old_traces_count_from_the_threads_reference() -> None:
    made = Maker()
    packet = made.begin()
    descriptor = packet.thread_descriptor
    descriptor.pid, descriptor.tid, descriptor.reference_timestamp_us = 7, 8, 1000
    for delta, absolute in ((5, 0), (0, 2000), (10, 0)):
        packet = made.packet(1, sequence_flags=NEEDS)
        event = packet.track_event
        event.type, event.name = INSTANT, "x"
        if absolute:
            event.timestamp_absolute_us = absolute
        else:
            event.timestamp_delta_us = delta
    event = made.packet(2).track_event
    event.type, event.timestamp_delta_us = INSTANT, 1
    rows, facts = read(made)
    assert columns(rows["instant"], "time_ns", "pid", "tid") == [
        (1_005_000, 7, 8), (2_000_000, 7, 8), (1_015_000, 7, 8),
    ]  # fmt: skip
    assert facts.counts.dropped == {"without a time": 1}


def test_events_of_chromes_format_inside_become_what_they_are_there() -> None:
    made = Maker()
    made.thread(2, 7, 8)
    for phase, members in {
        "X": {"duration_us": 3}, "b": {"unscoped_id": 4}, "e": {"global_id": 4}, "s": {"local_id": 5}, "I": {},
    }.items():  # fmt: skip
        event = made.event(0, 1000, 2, f"a {phase}")
        event.legacy_event.phase = ord(phase)
        for name, value in members.items():
            setattr(event.legacy_event, name, value)
    event.legacy_event.pid_override, event.legacy_event.tid_override = 70, 80
    rows, facts = read(made)
    assert columns(rows["slice"], "time_ns", "duration_ns", "name") == [(1000, 3000, "a X")]
    assert columns(rows["instant"], "phase", "id", "pid") == [("b", 4, 7), ("e", 4, 7), ("i", None, 70)]
    assert columns(rows["flow"], "phase", "id", "name") == [("s", 5, "a s")]
    assert facts.counts.unknown_phases == 0


@pytest.mark.parametrize("piece_bytes", [60, WHOLE])
def test_flows_start_go_on_and_end_and_may_start_again(piece_bytes: int) -> None:
    made = Maker()
    made.thread(2, 7, 8)
    for number, members in enumerate(("flow_ids", "flow_ids", "terminating_flow_ids", "flow_ids", "flow_ids")):
        getattr(made.event(INSTANT, 10 * number, 2, "x"), members).append(1 << 63 | 5)
    rows, _ = read(made, piece_bytes)
    assert columns(rows["flow"], "time_ns", "phase") == [(0, "s"), (10, "t"), (20, "f"), (30, "s"), (40, "t")]
    assert {row["id"] for row in rows["flow"]} == {5 - (1 << 63)}
    assert {(row["name"], row["category"]) for row in rows["flow"]} == {("flow", "flow")}


def test_values_of_counters_have_units_and_factors_and_add_up_where_they_are_differences() -> None:
    made = Maker()
    made.process(1, 7)
    power = made.track(20, "Power", 1)
    power.counter.unit_name = "W"
    size = made.track(21, "moved", 1)
    size.counter.unit, size.counter.unit_multiplier = pb.CounterDescriptor.UNIT_SIZE_BYTES, 1024
    size.counter.is_incremental = True
    made.begin()
    for time, track, value in ((1, 20, 2.5), (2, 21, 1), (3, 21, 2), (4, 20, 3)):
        event = made.event(COUNTER, time, track)
        if isinstance(value, float):
            event.double_counter_value = value
        else:
            event.counter_value = value
    made.event(COUNTER, 5, 20)
    made.event(COUNTER, 6, 20).double_counter_value = math.nan
    rows, facts = read(made)
    assert columns(rows["counter"], "time_ns", "pid", "name", "series", "value") == [
        (1, 7, "Power", "W", 2.5), (2, 7, "moved", "bytes", 1024.0), (3, 7, "moved", "bytes", 3072.0),
        (4, 7, "Power", "W", 3.0),
    ]  # fmt: skip
    assert facts.counts.dropped == {"counter without a value": 2}


def test_what_was_lost_is_dropped_until_the_state_is_cleared() -> None:
    made = Maker()
    made.begin()
    for number, flags in enumerate((NEEDS, NEEDS, 0, CLEARED | NEEDS)):
        made.event(INSTANT, number, 0, f"event {number}")
        made.trace.packet[-1].sequence_flags = flags
        made.trace.packet[-1].previous_packet_dropped = int(number == 1)
    rows, facts = read(made)
    assert [row["name"] for row in rows["instant"]] == ["event 0", "event 2", "event 3"]
    assert facts.counts.dropped == {"after lost packets": 1}


def test_packets_that_are_not_read_are_counted_by_kind_and_what_describes_the_trace_is_not() -> None:
    made = Maker()
    made.event(INSTANT, 1, 0, "x")
    for _ in range(3):
        made.packet().ftrace_events.cpu = 1
    made.packet().for_testing.str = "x"
    made.packet().trace_config.duration_ms = 5
    _, facts = read(made)
    assert facts.counts.dropped == {"packets of ftrace_events": 3, "packets of field 900": 1}
    assert facts.counts.events == 5


def test_values_inside_others_in_both_forms_become_json() -> None:
    made = Maker()
    event = made.slice(1, 2, 0, "x")
    annotate(event, "dict", {"a": 1, "b": [True, "z", {"c": 0.5}]})
    nested = event.debug_annotations.add(name="old").nested_value
    nested.nested_type = pb.DebugAnnotation.NestedValue.DICT
    nested.dict_keys.append("k")
    nested.dict_values.add(int_value=-3)
    event.debug_annotations.add(name="json").legacy_json_value = '{"q": [1, NaN]}'
    event.debug_annotations.add(name="none").legacy_json_value = "{"
    event.debug_annotations.add(name="p").pointer_value = 255
    annotate(event, "inf", math.inf)
    event.debug_annotations.add(name="empty")
    rows, facts = read(made)
    assert rows["slice"][0]["args"] == {
        "dict": {"a": 1, "b": [True, "z", {"c": 0.5}]}, "old": {"k": -3}, "json": {"q": [1, None]}, "none": "{",
        "p": "0xff", "inf": None, "empty": None,
    }  # fmt: skip
    assert facts.problems == ["args that are nested too deeply, too many, or of unknown kinds: 1"]


def test_members_of_another_form_stay_in_args_and_are_counted() -> None:
    made = Maker()
    event = made.slice(1, 2, 0, "x")
    annotate(event, "TS1", "twelve")
    annotate(event, "Bytes", 2.0)
    annotate(event, "Peers", 3)
    annotate(event, "memory bandwidth (GB/s)", "1.5")
    rows, facts = read(made)
    row = rows["slice"][0]
    assert (row["ts1"], row["bytes"], row["peers"], row["bandwidth"]) == (None, 2, "3", 1.5)
    assert row["args"] == {"TS1": "twelve"}
    assert facts.counts.bad_values == 1


def stage(made: Maker, time: int | None, event_id: int, **members: Any) -> Any:
    """Adds a stage of a GPU's queue."""
    packet = made.packet(sequence_flags=NEEDS)
    if time is not None:
        packet.timestamp = time
    packet.gpu_render_stage_event.event_id = event_id
    for name, value in members.items():
        setattr(packet.gpu_render_stage_event, name, value)
    return packet.gpu_render_stage_event


def with_stages() -> Maker:
    """A slice of a thread, and three stages of two queues."""
    made = Maker()
    begun = made.begin()
    begun.interned_data.event_names.add(iid=3, name="gemm")
    for iid, (name, category) in enumerate((("compute ring", 0), ("Compute", 2), ("copy ring", 0), ("Blit", 0)), 1):
        begun.interned_data.gpu_specifications.add(iid=iid, name=name, category=category)
    made.thread(2, 7, 8, "worker")
    made.event(BEGIN, 900, 2, "outer")
    event = stage(made, 1000, 10, duration=500, hw_queue_iid=1, stage_iid=2, name_iid=3, submission_id=4)
    event.launch.grid_size.x, event.launch.grid_size.y, event.launch.workgroup_size.x = 16, 2, 64
    event.extra_data.add(name='shader "a"', value="x\ny")
    stage(made, 1600, 11, duration=50, hw_queue_iid=3, stage_iid=4, gpu_id=1, context=1 << 40)
    stage(made, 1700, 12, hw_queue_iid=1, stage_iid=2)
    made.event(END, 2000, 2)
    return made


@pytest.mark.parametrize("piece_bytes", [WHOLE, 60])
def test_stages_of_gpus_are_slices_of_their_queues(piece_bytes: int) -> None:
    rows, facts = read(with_stages(), piece_bytes)
    first, second, third, outer = sorted(rows["slice"], key=lambda row: row["duration_ns"], reverse=True)[1:] + [
        row for row in rows["slice"] if row["name"] == "outer"
    ]
    wanted = ("time_ns", "duration_ns", "name", "category", "device")
    assert columns([first, second, third, outer], *wanted) == [
        (1000, 500, "gemm", "kernel", 0), (1600, 50, "Blit", "gpu_render_stage", 1), (1700, 0, "Compute", "kernel", 0),
        (900, 1100, "outer", None, None),
    ]  # fmt: skip
    assert first["args"] == {
        "event_id": 10, "submission_id": 4, "grid": [16, 2, 0], "block": [64, 0, 0], 'shader "a"': "x\ny",
    }  # fmt: skip
    assert second["args"] == {"event_id": 11, "context": 1 << 40}
    # each GPU is a process, each of its queues a thread
    named = {(row["name"], row["pid"], row["tid"]): row["args"]["name"] for row in rows["instant"]}
    assert named["process_name", first["pid"], 0] == "GPU 0"
    assert named["process_name", second["pid"], 0] == "GPU 1"
    assert named["thread_name", first["pid"], first["tid"]] == "compute ring"
    assert named["thread_name", second["pid"], second["tid"]] == "copy ring"
    assert (third["pid"], third["tid"]) == (first["pid"], first["tid"])
    assert (first["pid"] >= MADE) and (outer["pid"], outer["tid"]) == (7, 8)
    assert not facts.counts.dropped


def test_stages_in_the_older_form_have_the_names_that_were_listed() -> None:
    made = Maker()
    listed = made.packet(timestamp=1).gpu_render_stage_event.specifications
    listed.hw_queue.add(name="queue A")
    for name in ("Binning", "Render"):
        listed.stage.add(name=name)
    for event_id, stage_id in enumerate((1, 0, 9)):
        made.packet(timestamp=100 * (1 + event_id)).gpu_render_stage_event.MergeFrom(
            pb.GpuRenderStageEvent(event_id=event_id, duration=10, hw_queue_id=0, stage_id=stage_id)
        )
    rows, facts = read(made)
    assert columns(rows["slice"], "time_ns", "name") == [(100, "Render"), (200, "Binning"), (300, "stage 9")]
    assert {row["args"]["name"] for row in rows["instant"]} == {"GPU 0", "queue A"}
    assert facts.counts.events == 3 + 2


def test_stages_without_a_time_after_lost_packets_or_damaged_are_counted() -> None:
    made = Maker()
    made.begin()
    stage(made, None, 1)
    made.packet(1, previous_packet_dropped=1)
    stage(made, 5, 2)
    made.packet(2, timestamp=5).gpu_render_stage_event.event_id = 3
    content = made.bytes() + bytes.fromhex("0a0740 05 aa03 02 0880".replace(" ", ""))
    rows, facts = rows_without_file(content, WHOLE)
    assert columns(rows["slice"], "time_ns", "name") == [(5, "stage 0")]
    assert facts.counts.dropped == {"without a time": 1, "after lost packets": 1, "damaged": 1}
