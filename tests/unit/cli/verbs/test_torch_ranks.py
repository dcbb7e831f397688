"""Traces of two of PyTorch's ranks, each of which calls its device process 0: the command keeps them apart."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from unit.in_process import iaprof
from unit.timelines.examples import launch


def metadata(name: str, pid: int | str, **args: Any) -> dict[str, Any]:
    """An event that names, labels or sorts a process."""
    return {"ph": "M", "name": name, "pid": pid, "ts": 0, "args": args}


def of_rank(rank: int) -> dict[str, Any]:
    """E11 as the file of a rank."""
    span = {"ph": "X", "name": "span", "cat": "Trace", "pid": "Spans", "tid": "PyTorch (0)", "ts": 1000, "dur": 3,
            "args": {"nested": {"a": {"b": {}}}, "class": "mine"}}  # fmt: skip
    return {
        "deviceProperties": [{"id": 0, "name": f"AIU{rank}"}],
        "distributedInfo": {"rank": rank, "world_size": 2},
        "traceEvents": [
            *launch(pid=4000 + rank), span,
            metadata("process_labels", 0, labels="AIU 0"), metadata("process_labels", 4000 + rank, labels="CPU"),
            metadata("process_sort_index", 0, sort_index=5), metadata("process_sort_index", 4000 + rank, sort_index=7),
        ],
    }  # fmt: skip


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    for rank in (0, 1):
        (folder / f"{rank}.json").write_text(json.dumps(of_rank(rank)))
    done = iaprof("timeline", folder / "0.json", folder / "1.json", "-o", folder / "out", "--tb", "-q")
    assert done.code == 0, done.err
    return folder / "out"


def trace(path: Path) -> dict[str, Any]:
    """A trace as JSON."""
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def test_each_device_is_on_its_rank(out: Path) -> None:
    events = trace(out / "trace.json")["traceEvents"]
    slices = sorted((event["pid"], event["name"]) for event in events if event["ph"] == "X" and event["tid"] == 7)
    assert slices == [(rank, name) for rank in (0, 1) for name in ("Memcpy (HtoD)", "add", "mm")]
    # the reference's points; with both devices as one, there were 8 GB/s
    points = sorted((event["pid"], event["ts"], event["args"]) for event in events if event["ph"] == "C")
    assert points == [(rank, ts, {"GB/s": value}) for rank in (0, 1) for ts, value in ((1050, 4), (1060, 0))]
    arrows = [(event["ph"], event["pid"]) for event in events if event["ph"] in "sf" and event["id"] > 9]
    assert sorted(arrows) == [
        *(("f", pid) for pid in (0, 0, 1, 1, 4000, 4001)), *(("s", pid) for pid in (0, 1, 4000, 4000, 4001, 4001)),
    ]  # fmt: skip


def test_processes_are_labelled_and_sorted_by_rank(out: Path) -> None:
    whole = trace(out / "trace.json")
    marks = sorted((e["name"], e["pid"], *e["args"].values()) for e in whole["traceEvents"] if e["ph"] == "M")
    assert marks == [
        ("process_labels", 0, "AIU 0"), ("process_labels", 1, "AIU 1"),
        ("process_labels", 4000, "CPU"), ("process_labels", 4001, "CPU"),
        ("process_sort_index", 0, 15), ("process_sort_index", 1, 123015),
        ("process_sort_index", 4000, 0), ("process_sort_index", 4001, 123000),
    ]  # fmt: skip
    assert whole["deviceProperties"] == [{"id": 0, "name": "AIU0"}, {"id": 1, "name": "AIU1"}]


def test_tensorboard_gets_the_events_and_the_device_of_each_rank(out: Path) -> None:
    for rank in (0, 1):
        worker = trace(out / f"trace_worker_{rank}.pt.trace.json")
        assert worker["deviceProperties"] == [{"id": rank, "name": f"AIU{rank}"}]
        assert {event["pid"] for event in worker["traceEvents"]} == {rank, 4000 + rank, "Spans"}
        assert sum(event["ph"] == "X" for event in worker["traceEvents"]) == 6


def test_texts_as_pids_and_nested_arguments_are_as_they_were(out: Path) -> None:
    spans = [event for event in trace(out / "trace.json")["traceEvents"] if event["name"] == "span"]
    assert [(event["pid"], event["tid"]) for event in spans] == [("Spans", "PyTorch (0)")] * 2
    assert [event["args"]["nested"] for event in spans] == [{"a": {"b": {}}}] * 2
    assert {event["args"]["class"] for event in spans} == {"OTHER"}  # what stages found, not what was there
