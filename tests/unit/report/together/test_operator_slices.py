"""Operators over launches over stalls: in Perfetto's traces, in Chrome's, and on the page."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as pb

from iaprof.formats.capture.reader import CaptureReader
from iaprof.formats.page.panels import operators
from iaprof.report.profile import ReportOptions
from iaprof.report.views.thread_runs import operator_slices
from unit.in_process import iaprof as run
from unit.report.together import runs
from unit.report.together.test_clocks import joined, with_events

COUNT = 66  # operators, annotations and modules: of 68 slices, one is a Python function, and one is the profiler's own


@pytest.fixture
def both(tmp_path: Path) -> Path:
    capture, _ = joined(tmp_path, with_events(runs.calls()))
    return capture.path


def test_slices_have_the_times_of_the_capture(both: Path) -> None:
    found = operator_slices(CaptureReader(both), ReportOptions())
    assert found is not None and (len(found.name), found.all) == (COUNT, COUNT)
    at = found.names.index("aten::relu")
    (row,) = np.flatnonzero(found.name == at)
    begin_ns = runs.monotonic_ns(4568708871139.075) - runs.header()["clock"]["monotonic_ns"]
    assert found.begin[row] == begin_ns / 1e9
    assert found.end[row] == (begin_ns + 18808) / 1e9
    assert found.depth[row] == 2  # in the module Net_0, in the annotation
    assert [(each.pid, each.tid) for each in found.threads] == [(runs.PID, runs.PID)]


def test_only_the_longest_are_shown_and_how_many_there_are_is_said(both: Path) -> None:
    found = operator_slices(CaptureReader(both), ReportOptions(), most=2)
    assert found is not None and found.all == COUNT
    assert [found.names[name] for name in found.name] == ["## forward ##", "nn.Module: Net_0"]


def test_perfetto_has_tracks_of_operators_above_those_of_launches(both: Path, tmp_path: Path) -> None:
    assert run("report", both, "-o", tmp_path / "x.pftrace").code == 0
    trace = pb.Trace()
    trace.ParseFromString((tmp_path / "x.pftrace").read_bytes())
    tracks = {packet.track_descriptor.uuid: packet.track_descriptor for packet in trace.packet
              if packet.HasField("track_descriptor")}  # fmt: skip
    thread = next(uuid for uuid, each in tracks.items() if each.HasField("thread") and each.thread.tid == runs.PID)
    own = {uuid: each for uuid, each in tracks.items() if each.parent_uuid == thread}
    assert {(each.name, each.sibling_order_rank) for each in own.values()} == {
        ("operators", 0), ("gemm_kernel", 1), (runs.RELU, 1), ("at::mm_kernel(float)", 1),
    }  # fmt: skip
    lanes = [uuid for uuid, each in own.items() if each.name == "operators"]
    names: dict[int, str] = {}
    open_: dict[int, int] = {}
    seen = []
    for packet in trace.packet:
        names |= {each.iid: each.name for each in packet.interned_data.event_names}
        event = packet.track_event
        if event.track_uuid in lanes and event.type == pb.TrackEvent.TYPE_SLICE_BEGIN:
            assert event.track_uuid not in open_, "slices of a lane overlap"
            open_[event.track_uuid] = packet.timestamp
            seen.append((names[event.name_iid], packet.timestamp))
        elif event.track_uuid in lanes:
            assert packet.timestamp >= open_.pop(event.track_uuid)
    assert len(seen) == COUNT and not open_
    assert ("aten::relu", runs.monotonic_ns(4568708871139.075)) in seen


def test_chrome_has_them_on_a_thread_of_their_own(both: Path, tmp_path: Path) -> None:
    assert run("report", both, "-o", tmp_path / "x.trace.json").code == 0
    events = json.loads((tmp_path / "x.trace.json").read_text())["traceEvents"]
    own = [event for event in events if event.get("cat") == "operator"]
    assert len(own) == COUNT
    others = {event["tid"] for event in events if event["ph"] == "X" and event.get("cat") != "operator"}
    assert len({event["tid"] for event in own}) == 1 and not others & {own[0]["tid"]}


def test_the_page_has_lanes_of_the_busiest_threads(both: Path) -> None:
    found = operator_slices(CaptureReader(both), ReportOptions())
    assert found is not None
    (thread,) = operators(found)["threads"]
    assert thread["all"] == COUNT
    assert operators(found)["names"][thread["names"][0]] == "## forward ##"
    assert thread["lengths"][0] == 445.181e-6


def test_a_capture_without_a_trace_has_none(tmp_path: Path) -> None:
    assert operator_slices(CaptureReader(runs.recorded(tmp_path / "cap.parquet")), ReportOptions()) is None


def test_crossing_slices_of_one_depth_are_cut(tmp_path: Path) -> None:
    event = {"ph": "X", "cat": "cpu_op", "pid": runs.PID, "tid": runs.PID}
    crossing = [{**event, "name": "a", "ts": 4568708873000.0, "dur": 10.0},
                {**event, "name": "b", "ts": 4568708873005.0, "dur": 10.0}]  # fmt: skip
    both, _ = joined(tmp_path, with_events(crossing))
    found = operator_slices(both, ReportOptions())
    assert found is not None
    lengths = {found.names[name]: round((end - begin) * 1e9) for name, begin, end
               in zip(found.name, found.begin, found.end, strict=True)}  # fmt: skip
    assert (lengths["a"], lengths["b"]) == (5000, 10000)
