"""Trace Event JSON, checked against the document "Trace Event Format"; trace viewers are not available offline."""

from __future__ import annotations

import io
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from iaprof.cli.main import main
from iaprof.formats.export import About, Executions, Export, Launches, Thread, Track
from iaprof.formats.profile import Launch, StackOptions, empty_profile, reason_name
from iaprof.formats.writers.registry import WRITERS
from iaprof.formats.writers.timeline import launch_runs_of, times_of
from iaprof.gpu.intel.reasons import REASONS
from iaprof.report.merging import merge
from unit.capturing import HEADER, capture, launch, record, stall
from unit.made_timelines import executed, export

Event = dict[str, Any]


def document(given: Export) -> dict[str, Any]:
    out = io.BytesIO()
    WRITERS["chrome"].write(given, StackOptions(), out)
    found: dict[str, Any] = json.loads(out.getvalue())
    return found


def events(given: Export, phase: str) -> list[Event]:
    return [event for event in document(given)["traceEvents"] if event["ph"] == phase]


def curve(given: Export, name: str) -> list[tuple[float, dict[str, float]]]:
    return [(event["ts"], event["args"]) for event in events(given, "C") if event["name"] == name]


def test_each_event_has_what_the_published_document_asks_for_as_viewers_cannot_be_had_offline() -> None:
    # given the fields that the document requires for each phase
    asked: dict[str, dict[str, Any]] = {
        "M": {"name": str, "pid": int, "tid": int, "args": dict},
        "C": {"name": str, "pid": int, "ts": (int, float), "args": dict},
        "X": {"name": str, "cat": str, "pid": int, "tid": int, "ts": (int, float), "dur": (int, float), "args": dict},
    }
    # when
    found = document(export())
    # then
    assert found["displayTimeUnit"] in ("ms", "ns")
    assert found["otherData"]["command"] == "app --fast"
    for event in found["traceEvents"]:
        for name, type_ in asked[event["ph"]].items():
            assert isinstance(event[name], type_) and type(event[name]) is not bool, (event, name)
    assert Counter(event["ph"] for event in found["traceEvents"]).keys() == asked.keys()


def test_counters_have_the_totals_of_the_profile() -> None:
    given = export()
    by_reason = curve(given, "GPU samples per 0.1 s, by reason")
    assert all(tuple(args) == tuple(map(reason_name, REASONS)) for _, args in by_reason)
    sums = [sum(args[reason_name(reason)] for _, args in by_reason) for reason in REASONS]
    assert sums == given.profile.counts.sum(axis=0).tolist()
    assert curve(given, "GPU samples per 0.1 s") == [
        (0, {"samples": 8}),
        (100_000, {"samples": 0}),
        (700_000, {"samples": 9}),
        (800_000, {"samples": 0}),
    ]
    assert curve(given, "CPU samples per 0.1 s") == [
        (100_000, {"samples": 4}),
        (200_000, {"samples": 6}),
        (300_000, {"samples": 0}),
    ]
    assert curve(given, "frequency-actual") == [(50_000, {"MHz": 400.0}), (150_000, {"MHz": 2400.5})]


def test_launches_are_slices_that_do_not_overlap() -> None:
    found = events(export(), "X")
    assert sum(event["args"]["launches"] for event in found) == 109
    ends: dict[tuple[int, int], float] = {}
    for event in sorted(found, key=lambda event: event["ts"]):
        row = event["pid"], event["tid"]
        assert event["ts"] > ends.get(row, -1)
        ends[row] = event["ts"] + event["dur"]
    assert found[0] == {
        "ph": "X",
        "name": "matmul \u00d7100",
        "cat": "launches",
        "pid": 7,
        "tid": 7,
        "ts": 0.0,
        "dur": 300_000.0,
        "args": {"launches": 100},
    }


def test_when_kernels_were_seen_are_slices_with_flows_from_their_launches() -> None:
    found = document(executed())["traceEvents"]
    slices = [event for event in found if event["ph"] == "X"]
    seen = [event for event in slices if event["cat"] == "gpu"]
    assert [(event["ts"], event["dur"], event["args"]["samples"]) for event in seen] == [
        (50_000, 350_000, 6), (60_000, 1, 2), (550_000, 50_000, 9), (900_000, 100_000, 1),
    ]  # fmt: skip
    assert seen[0]["args"] == {"samples": 6, "process": "app 7", "queue": "0x5000", "stack": "main"}
    names = {event["pid"]: event["args"]["name"] for event in found if event["name"] == "process_name"}
    assert [names[event["pid"]] for event in seen] == [
        "GPU kernels card0, app 7, queue 0x5000", "GPU kernels card0", "GPU kernels card0, app 7, queue 0x5000",
        "GPU kernels card1",
    ]  # fmt: skip
    starts, ends = ({event["id"]: event for event in found if event["ph"] == phase} for phase in "sf")
    assert [(starts[number]["ts"], ends[number]["ts"]) for number in starts] == [
        (0, 50_000), (0, 60_000), (500_000, 550_000),
    ]  # fmt: skip
    for kind, flows in (("launches", starts), ("gpu", ends)):
        places = {(event["pid"], event["tid"], event["ts"]) for event in slices if event["cat"] == kind}
        assert {(event["pid"], event["tid"], event["ts"]) for event in flows.values()} <= places


def rows(given: Export) -> list[str]:
    """Process and thread of each row of slices."""
    names = {(e["name"], e["pid"], e["tid"]): e["args"].get("name") for e in events(given, "M")}
    pairs = dict.fromkeys((event["pid"], event["tid"]) for event in events(given, "X"))
    return [f"{names['process_name', pid, 0]} | {names['thread_name', pid, tid]}" for pid, tid in pairs]


def test_rows_name_process_thread_and_kernel() -> None:
    assert rows(export())[:3] == ["app | app 7: matmul", "app | app 7: reduce", "app | worker 9: matmul"]


def test_each_process_and_thread_is_named_once() -> None:
    # given two kernels of one queue
    given = executed()
    seen = given.executions
    assert seen is not None
    more = replace(
        seen,
        tracks=[*seen.tracks, replace(seen.tracks[0], kernel="reduce")],
        track=np.append(seen.track, 3),
        begin=np.append(seen.begin, 0.5),
        end=np.append(seen.end, 0.5),
        count=np.append(seen.count, 1),
    )
    # when
    found = events(replace(given, executions=more), "M")
    # then
    said = Counter((event["name"], event["pid"], event["tid"]) for event in found)
    assert max(said.values()) == 1


def test_equal_pids_of_several_machines_are_several_processes() -> None:
    found = rows(export(hosts=("one", "two")))
    assert [row.split(" ")[0] for row in found] == ["one", "one", "one", "two"]


def test_hostile_names_are_escaped() -> None:
    out = io.BytesIO()
    WRITERS["chrome"].write(export(), StackOptions(), out)
    assert all(line.isprintable() for line in out.getvalue().decode().split("\n"))
    names = [event["name"] for event in document(export())["traceEvents"]] + rows(export())
    assert any("\\x1b[2J" in name for name in names)
    assert all(name.isprintable() for name in names)


def test_a_capture_of_nothing_is_a_document_without_curves() -> None:
    assert {event["ph"] for event in document(Export(empty_profile(), About(), 0.1))["traceEvents"]} == {"M"}


@pytest.mark.parametrize(
    ("time", "hosts", "seconds"), [([], {"one", "two"}, {1, 91}), (["--time=50%-100%"], {"two"}, {91})]
)
def test_the_verb_shows_all_of_a_merged_capture_or_a_share_of_the_time_of_all(
    time: list[str], hosts: set[str], seconds: set[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # given recordings of two machines, ten seconds each, the second one starting 90 s later
    second = 1_000_000_000
    for name, wall in (("one", 100), ("two", 190)):
        about = HEADER | {"host": {"name": name, "boot_id": name}, "end_ns": 11 * second}
        about["clock"] = {"monotonic_ns": second, "realtime_ns": wall * second}
        metric = {"time_ns": 2 * second, "stream": 0, "pid": None, "name": "power-a-W", "value": 5.0}
        capture(
            tmp_path / name,
            about,
            stall=[stall(2 * second + 9, record(0x1000, sbid=3), begin_ns=2 * second)],
            launch=[launch(2 * second, 7, 0x1000, name=name)],
            metric=[metric],
        )
    merge([tmp_path / "one", tmp_path / "two"], tmp_path / "m")
    # when
    out = tmp_path / "x.trace.json"
    monkeypatch.setattr("sys.argv", ["iaprof", "report", str(tmp_path / "m"), "-q", "-o", str(out), *time])
    with pytest.raises(SystemExit) as ended:
        main()
    # then launches, metrics and stalls have the same time base
    assert not ended.value.code
    found = json.loads(out.read_text())["traceEvents"]
    assert {event["name"] for event in found if event["ph"] == "X"} == hosts
    assert {event["ts"] // 1e6 for event in found if event["ph"] == "X"} == seconds
    assert {event["ts"] // 1e6 for event in found if event["name"].startswith("power")} == seconds
    stalled = {event["ts"] // 1e6 for event in found if event.get("args", {}).get("samples")}
    assert stalled == seconds


def chrome_total(file: Path) -> int:
    events = json.loads(file.read_text())["traceEvents"]
    counters = [event for event in events if event["ph"] == "C" and "by reason" in event["name"]]
    return int(sum(sum(event["args"].values()) for event in counters))


TOTALS = {"chrome": chrome_total}


def test_no_flow_leads_back_in_time_as_viewers_drop_those() -> None:
    # given reads with samples that began before the launches, which are at 0 s and 0.5 s
    given = executed()
    assert given.executions is not None
    given = replace(given, executions=replace(given.executions, begin=np.array([0.05, 0.06, 0.495, 0.9])))
    # when
    found = [event for event in document(given)["traceEvents"] if event["ph"] in "Xsf"]
    # then the samples are shown from the launch on
    ends = {event["id"]: event["ts"] for event in found if event["ph"] == "f"}
    assert sorted((event["ts"], ends[event["id"]]) for event in found if event["ph"] == "s") == [
        (0, 50_000), (0, 60_000), (500_000, 500_000),
    ]  # fmt: skip
    seen = [(event["ts"], event["dur"], event["args"]["samples"]) for event in found if event.get("cat") == "gpu"]
    assert seen == [(50_000, 350_000, 6), (60_000, 1, 2), (500_000, 100_000, 9), (900_000, 100_000, 1)]


@pytest.mark.parametrize(
    ("begin", "end", "source"),
    [
        (0.3, 0.6, 0),
        (0.495, 0.6, 1),  # launches follow the begin of a read
        (0.495, 0.499, 0),  # but not its end
        (-0.5, 0.6, 0),  # none is before: the first one while samples were seen
        (-0.5, -0.2, -1),
    ],
)
def test_the_launches_that_samples_come_from(begin: float, end: float, source: int) -> None:
    # given launches at 0 s and 0.5 s
    runs = np.zeros(2, np.int64)
    times = np.array([0.0, 0.5])
    launches = Launches(["matmul"], [Thread("app", 7, 7)], runs, runs, times, times, runs + 1)
    one = np.zeros(1, np.int64)
    track = Track("card0", "matmul", Launch("app", 7, ("main",)))
    seen = Executions([track], one, np.array([begin]), np.array([end]), one + 1)
    # when
    sources = launch_runs_of(seen, launches)
    begins, ends = times_of(seen, launches, sources)
    # then
    assert sources.tolist() == [source]
    assert begins[0] == (begin if source < 0 else max(begin, times[source]))
    assert begins[0] < ends[0]
