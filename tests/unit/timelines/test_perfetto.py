"""Perfetto's format as it is written, read by an independent reader of Perfetto's definitions."""

from __future__ import annotations

import io
import json
import random
from collections import Counter
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as pb

from iaprof.timelines.arguments import Arguments
from iaprof.timelines.columns import Narrow
from iaprof.timelines.outputs import perfetto
from iaprof.timelines.outputs.perfetto import write_perfetto
from iaprof.timelines.trace import ABSENT, Trace
from unit.timelines.reading.perfetto.oracle import MADE, Oracle
from unit.timelines.traces import shared_counters, slice_, trace

COUNTERS = [1000000, 1010000, 1030000, 1080000, 1085000]


def written(of: Trace, **arguments: list[str | None]) -> bytes:
    output = io.BytesIO()
    write_perfetto(of, {kind: Arguments([pa.array(texts, pa.string())]) for kind, texts in arguments.items()}, output)
    return output.getvalue()


def tracks(content: bytes) -> dict[tuple[str, ...], Any]:
    """Descriptors by the names of the tracks from the outermost one on."""
    found: dict[int, tuple[str, ...]] = {0: ()}
    result = {}
    for packet in pb.Trace.FromString(content).packet:
        if packet.HasField("track_descriptor"):
            track = packet.track_descriptor
            name = track.process.process_name or track.thread.thread_name or track.name
            found[track.uuid] = (*found[track.parent_uuid], name)
            assert found[track.uuid] not in result
            result[found[track.uuid]] = track
    return result


def flows(content: bytes) -> list[tuple[int, str, int, bool]]:
    """Flows: the time, type and track of the event, the flow's id, and whether it ends."""
    found = []
    for packet in pb.Trace.FromString(content).packet:
        event = packet.track_event
        found += [(packet.timestamp, pb.TrackEvent.Type.Name(event.type)[5:], each, False) for each in event.flow_ids]
        found += [
            (packet.timestamp, pb.TrackEvent.Type.Name(event.type)[5:], each, True)
            for each in event.terminating_flow_ids
        ]
    return found


def test_ranks_and_hosts_are_processes_with_threads_and_counters_with_units() -> None:
    made = trace(
        [
            slice_("k_1 Cmpt Exec", 1, 5, COUNTERS, tid=1000),
            slice_("copy", 2, 3, pid=1000, tid=1000),
            {"ph": "C", "name": "Power", "ts": 3, "pid": 0, "args": {"Watts": 1.5}},
            {"ph": "C", "name": "BW all", "ts": 3, "pid": -1, "args": {"GBps": 2.0}},
            {"ph": "M", "name": "thread_name", "pid": 1000, "tid": 1000},
        ]
    )
    content = written(made, instant=['{"name":"main"}'])
    found = tracks(content)
    assert {*found} == {
        ("rank 0",), ("rank 0", "device 1000"), ("host of rank 0",), ("host of rank 0", "main"), ("rank 0", "Power"),
        ("BW all",),
    }  # fmt: skip
    assert found["rank 0",].process.HasField("pid")
    thread = found["rank 0", "device 1000"].thread
    assert (thread.pid, thread.tid) == (0, 1000)
    assert found["rank 0", "Power"].counter.unit_name == "Watts"
    values = [packet.track_event.double_counter_value for packet in pb.Trace.FromString(content).packet
              if packet.track_event.type == pb.TrackEvent.TYPE_COUNTER]  # fmt: skip
    assert values == [1.5, 2.0]


def test_slices_keep_times_in_ns_categories_and_all_arguments_with_their_types() -> None:
    made = trace([slice_("k_1 Cmpt Exec", 1.001, 50.5, COUNTERS, Power=1000, cat="kernel", tid=7, CollGroup="G")])
    made.slices.extra |= {
        "class": made.texts.codes(["COMPUTE_EXEC"]), "OVC": np.array([0]), "none": np.array([ABSENT]),
        "core used": np.array([True]), "pt_active": np.array([0.4]),
    }  # fmt: skip
    imported = {"a": -3, "b": 1.5, "c": "é\n", "d": True, "e": None, "f": {"x": [1]}, "g": 2**63, "h": 10**400}
    found = Oracle(written(made, slice=[json.dumps(imported)])).read()
    assert found.slices == [(1001, 50500, 0, 7, "k_1 Cmpt Exec", "kernel")]
    (args,) = found.args
    counters = {f"TS{number}": value for number, value in enumerate(COUNTERS, 1)}
    expected = {"a": -3, "b": 1.5, "c": "é\n", "d": True, "f": '{"x": [1]}', "g": 2**63, "h": str(10**400)}
    assert args == counters | expected | {
        "Power": 1000, "CollGroup": "G", "class": "COMPUTE_EXEC", "OVC": 0, "core used": True, "pt_active": 0.4,
        "jobname": "job-0.json",
    }  # fmt: skip


def test_slices_that_touch_nest_have_no_length_or_overlap_come_back_as_they_were() -> None:
    spans = [(0, 100), (100, 50), (100, 0), (110, 10), (110, 10), (150, 0), (150, 20), (160, 30), (165, 60), (165, 60)]
    made = trace([slice_(f"s{number}", time, length) for number, (time, length) in enumerate(spans)])
    content = written(made)
    found = Oracle(content).read()
    expected = [(1000 * time, 1000 * length, f"s{number}") for number, (time, length) in enumerate(spans)]
    assert sorted((time, length, name) for time, length, _, _, name, _ in found.slices) == sorted(expected)
    # From 165 to 225 fits neither beside 150 to 170 nor beside 160 to 190.
    rows = ["thread 1", "thread 1 (row 2)", "thread 1 (row 3)"]
    assert {*tracks(content)} == {("process 0",), *(("process 0", row) for row in rows)}


@pytest.mark.parametrize("seed", range(6))
def test_random_slices_come_back(seed: int) -> None:
    rng = random.Random(seed)
    events = [
        slice_(
            rng.choice(["a", "b", "ü"]), rng.randrange(300) / 8, rng.choice([0, 0.125, 1, 7, 40]), tid=rng.randrange(3)
        )
        for _ in range(300)
    ]
    found = Oracle(written(trace(events))).read()
    expected = Counter((round(event["ts"] * 1000), round(event["dur"] * 1000), event["name"]) for event in events)
    assert Counter((time, length, name) for time, length, _, _, name, _ in found.slices) == expected
    assert not found.dropped


def test_ends_are_rounded_down_so_that_slices_that_follow_do_not_overlap() -> None:
    made = trace([slice_("a", 0, 0), slice_("b", 0.101, 1)])
    made.slices.duration = np.array([101.6, 1000.0])
    assert len(tracks(written(made))) == 2
    assert [each[:2] for each in Oracle(written(made)).read().slices] == [(0, 101), (101, 1000)]


def test_flows_are_parts_of_the_innermost_slice_at_the_edge_that_is_closer() -> None:
    made = trace(
        [
            slice_("launch", 10, 20, pid=1),
            slice_("inner", 12, 4, pid=1),
            slice_("kernel", 70, 50, tid=2),
            {"ph": "s", "id": 9, "ts": 13, "pid": 1, "tid": 1, "cat": "ac2g"},
            {"ph": "s", "id": 8, "ts": 16, "pid": 1, "tid": 1, "cat": "ac2g", "name": "behind inner"},
            {"ph": "f", "id": 9, "ts": 119.999, "pid": 0, "tid": 2, "cat": "ac2g"},
            {"ph": "s", "id": 9, "ts": 120, "pid": 0, "tid": 2, "cat": "sync"},
            {"ph": "f", "id": 9, "ts": 500, "pid": 0, "tid": 2, "cat": "sync", "name": "alone"},
        ]
    )
    assert sorted(flows(written(made))) == [
        (10000, "SLICE_BEGIN", 8, False), (12000, "SLICE_BEGIN", 9, False), (120000, "SLICE_END", 9, True),
        (120000, "SLICE_END", 10, False), (500000, "INSTANT", 10, True),
    ]  # fmt: skip


def test_flows_find_their_slices_where_times_are_as_far_apart_as_numbers_go() -> None:
    far = 9e15  # us: twice as many ns do not fit
    flow = {"ph": "s", "pid": 0}
    made = trace(
        [
            *(slice_("long", 0, far + 8, tid=tid) for tid in (1, 2, 3)),
            *(slice_("short", far, 8, tid=tid) for tid in (1, 2, 3)),
            *({**flow, "id": tid, "tid": tid, "ts": 1} for tid in (1, 2, 3)),
            *({**flow, "id": 3 + tid, "tid": tid, "ts": far + 1} for tid in (1, 2, 3)),
        ]
    )
    assert sorted(flows(written(made))) == [
        *((0, "SLICE_BEGIN", number, False) for number in (1, 2, 3)),
        *((9 * 10**18, "SLICE_BEGIN", number, False) for number in (4, 5, 6)),
    ]


def test_flows_of_two_files_with_one_id_are_two_flows() -> None:
    files = [[slice_("x", 1, 5, pid=pid), {"ph": "s", "id": 3, "ts": 2, "pid": pid, "tid": 1}] for pid in (1, 2)]
    assert {id_ for _, _, id_, _ in flows(written(trace(*files)))} == {3, 4}


def test_instants_and_asynchronous_events_come_back() -> None:
    made = trace(
        [
            {"ph": "i", "name": "mark", "ts": 5, "tid": 4},
            {"ph": "b", "name": "op", "id": 7, "ts": 6, "tid": 4},
            {"ph": "e", "name": "op", "id": 7, "ts": 9, "tid": 4},
            {"ph": "M", "name": "process_name", "pid": 0},
        ]
    )
    found = Oracle(written(made, instant=['{"s":"t"}', None, None, '{"name":"AIU"}'])).read()
    events = [event for event in found.instants if event[3] != "M"]
    assert events == [(5000, 0, 4, "i", "mark"), (6000, 0, 4, "b", "op"), (9000, 0, 4, "e", "op")]


def test_a_trace_that_begins_before_0_is_moved_to_begin_at_0() -> None:
    found = Oracle(written(trace([slice_("a", -2, 1), slice_("b", 3, 1)]))).read()
    assert [each[0] for each in found.slices] == [0, 5000]


def test_odd_processes_and_threads_are_named_tracks() -> None:
    made = trace([slice_("a", 1, 1, pid=MADE + 5, tid=MADE + 6), slice_("b", 1, 1, pid=-7, tid=-1)])
    assert {*tracks(written(made))} == {
        (f"process {MADE + 5}",), (f"process {MADE + 5}", f"thread {MADE + 6}"), ("process -7",),
        ("process -7", "thread -1"),
    }  # fmt: skip


@pytest.mark.parametrize("at_once", [1, 2, 3, 7])
def test_tracks_are_the_same_however_many_are_described_at_once(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # given processes of one and of several threads, overlapping slices, a device, counters with and without a process
    spans = [(7, 1, 0, 9), (7, 1, 3, 9), (7, 2, 0, 1), (8, 1, 0, 1), (MADE + 9, 1, 0, 1), (MADE + 9, 3, 0, 1)]
    points = [(7, "a"), (7, "b"), (-1, "a"), (9, "a"), (-1, "b")]
    made = trace(
        [
            *(slice_("s", start, length, pid=pid, tid=tid) for pid, tid, start, length in spans),
            slice_("k Cmpt Exec", 1, 5, COUNTERS, pid=3, tid=4),
            *({"ph": "C", "name": name, "ts": 3, "pid": pid, "args": {"u": 1}} for pid, name in points),
            *({"ph": "M", "name": name, "pid": 7, "tid": 1} for name in ("process_name", "process_labels")),
        ]
    )
    texts: list[str | None] = ['{"name":"p\\n"}', '{"labels":"l"}']
    expected = written(made, instant=texts)
    assert {("p\\x0a (l)", "thread 1 (row 2)"), ("p\\x0a (l)", "b"), ("a",), ("process 9", "a")} <= {*tracks(expected)}
    # when
    monkeypatch.setattr(perfetto, "_TRACKS_AT_ONCE", at_once)
    # then
    assert written(made, instant=texts) == expected


def test_a_trace_without_events() -> None:
    assert len(pb.Trace.FromString(written(trace([]))).packet) == 1


@pytest.mark.parametrize("is_power_shared", [True, False])
def test_counters_that_slices_share_are_written_as_those_of_each_slice(is_power_shared: bool) -> None:
    # given
    operations = [0, 0, 1, 1, 1, 1, 2, 2, 2]
    plain, packed = shared_counters(operations, is_power_shared), shared_counters(operations, is_power_shared)
    # when
    packed.slices.pack(0)
    # then
    assert packed.slices.shared_counters(np.arange(9)) is not None
    assert written(packed) == written(plain)


def test_tracks_of_many_counters_unpack_no_column_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    # given as many values as are packed, of many counters
    count, tracks_ = 1 << 16, 2000
    made = trace([{"ph": "C", "name": "c", "ts": 0, "args": {"s": 1}}])
    made.points = made.points.take(np.zeros(count, np.int64))
    made.points.pid = np.arange(count) % tracks_
    made.points.time = np.arange(count) * 1000
    made.pack()
    unpacked = Counter[str]()

    def counted(self: Narrow) -> Any:
        unpacked["columns"] += 1
        return values(self)

    values = Narrow.values
    monkeypatch.setattr(Narrow, "values", counted)

    # when they are written, then each has a track, and columns were unpacked for chunks and not for tracks
    found = pb.Trace.FromString(written(made)).packet
    assert sum(packet.track_descriptor.HasField("counter") for packet in found) == tracks_
    assert unpacked["columns"] < 100
