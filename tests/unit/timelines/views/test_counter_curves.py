"""What the page shows beside slices: counters over time, units, and colours."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from iaprof.formats.capture.reader import CaptureReader
from iaprof.formats.page.panels import about_data
from iaprof.report.about import about
from iaprof.timelines import registry
from iaprof.timelines.options import Options
from iaprof.timelines.outputs import page
from iaprof.timelines.outputs.chrome import write_chrome
from iaprof.timelines.trace import Trace
from iaprof.timelines.views.busy import CLASSES, busy
from iaprof.timelines.views.counter_curves import curves
from iaprof.timelines.views.picture import picture
from unit.in_process import iaprof
from unit.timelines.clock_examples import E1, e6
from unit.timelines.traces import Event, slice_, trace

COUNTERS = (0, 0, 0, 1, 1)


def point(ts: float, value: float, name: str = "Power", unit: str = "Watts", pid: int = 0) -> Event:
    return {"ph": "C", "name": name, "ts": ts, "pid": pid, "args": {unit: value}}


def finished(*files: list[Event], **options: Any) -> Trace:
    made = trace(*files)
    registry.run(made, Options(**options), [True] * len(registry.STAGES), lambda number, stage: None)
    return made


def test_a_counter_is_a_curve_from_the_first_slice_on() -> None:
    # Given 100 us of a rank, whose power is known from 10 us on, and a value before the first slice
    made = trace([slice_("k Cmpt Exec", 1000, 100, COUNTERS), point(1060, 2.5), point(1010, 4), point(900, 1)])
    (curve,), more = curves(made)
    assert (curve.owner, curve.name, curve.unit, more) == ("rank 0", "Power", "Watts", 0)
    assert (curve.time.tolist(), curve.value.tolist()) == ([0, 10_000, 60_000], [1, 4, 2.5])


def test_of_many_values_the_largest_of_each_span_is_shown() -> None:
    # Given 100,000 values in 100 ms, one of them far above all others
    values = [point(ts, 99 if ts == 777 else ts % 7) for ts in range(100_000)]
    (curve,), _ = curves(trace([slice_("k Cmpt Exec", 0, 100_000, COUNTERS), *values]))
    assert len(curve.time) == 1000
    assert curve.value.max() == 99
    assert curve.time[curve.value.argmax()] == 777_000
    assert set(curve.value.tolist()) == {6, 99}  # each span has 100 values, so one with 6 at least


def test_curves_are_told_apart_by_process_name_and_unit_and_are_of_bounded_number() -> None:
    events = [point(5, 1, "Power", pid=0), point(5, 1, "Power", pid=1), point(5, 1, "BW", "GBps", pid=-1)]
    events += [point(5, 1, f"c{number}", pid=2) for number in range(100)]
    found, more = curves(trace([slice_("k Cmpt Exec", 0, 10, COUNTERS), *events]))
    assert [(each.owner, each.name) for each in found[:4]] == [
        ("all ranks", "BW"), ("rank 0", "Power"), ("process 1", "Power"), ("process 2", "c0"),
    ]  # fmt: skip
    assert (len(found), more) == (64, 39)


def test_the_page_has_power_pt_active_preparations_and_the_bandwidth_of_collectives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given two ranks with an all-reduce, and an operation with charge counters
    (tmp_path / "job.json").write_text(json.dumps([*E1, *({**event, "pid": 1} for event in E1)]))
    for number, events in enumerate(e6()):
        (tmp_path / f"rank-{number}.json").write_text(json.dumps(events))
    (tmp_path / "compile.log").write_text(
        "~~~~ Ideal/Total Cycles ~~~~\nk_1-opCatBmm 22000\nm_2-opCatX 0\n====== Perf Summary End ======\n"
    )
    payload = written(tmp_path, monkeypatch, "job.json", "-c", str(tmp_path / "compile.log"))
    shown = {(each["owner"], each["name"], each["unit"]) for each in payload["counters"]["curves"]}
    assert {
        ("rank 0", "Power", "Watts"), ("rank 0", "PT Active", "Percent"), ("rank 1", "ConcurrentPreps", "Concurrency"),
    } <= shown  # fmt: skip
    payload = written(tmp_path, monkeypatch, "rank-0.json", "rank-1.json", "--collectives")
    (curve,) = [each for each in payload["counters"]["curves"] if each["name"] == "Coll_Bandwidth"]
    # 8000 bytes in 100 us
    assert (curve["owner"], curve["unit"], curve["y"]) == ("all ranks", "GBps", [0.08, 0])


def test_columns_have_units(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "job.json").write_text(json.dumps(E1))
    tables = {each["title"]: each["columns"] for each in written(tmp_path, monkeypatch, "job.json")["tables"]}
    units = {title: {each["name"]: each["unit"] for each in columns} for title, columns in tables.items()}
    assert units["Kernels"]["Total Time"] == units["Ranks"]["Elapsed Time"] == "us"
    assert (units["Kernels"]["Time"], units["Kernels"]["Calls"], units["Energy"]["Energy"]) == ("%", "", "uJ")


def written(folder: Path, monkeypatch: pytest.MonkeyPatch, *words: str) -> dict[str, Any]:
    """Writes the page of traces, and returns its texts and tables."""
    found: dict[str, Any] = {}
    monkeypatch.setattr(page, "packed", lambda tree, arrays: found.update(tree["panels"]) or b"")
    monkeypatch.chdir(folder)
    assert iaprof("timeline", *words, "-o", folder / "out", "--html", "-q", "-f").code == 0
    return found


def test_durations_below_a_second_are_in_smaller_units(tmp_path: Path) -> None:
    # Given 400 us of a trace
    (tmp_path / "job.json").write_text(json.dumps(E1))
    assert iaprof("import", tmp_path / "job.json", "-o", tmp_path / "run.parquet", "-q").code == 0
    assert "duration       400 us" in iaprof("info", tmp_path / "run.parquet").out
    facts = about_data(about(CaptureReader(tmp_path / "run.parquet")))["facts"]
    assert "400 us" in [text for group in facts for _, text in group["facts"]]


def test_slices_of_process_groups_are_communication_also_of_hosts() -> None:
    names = ("gloo:all_reduce", "nccl:broadcast", "nccl_setup")
    made = trace(
        [
            *(slice_(name, 100 * number, 50, pid=5, tid=number) for number, name in enumerate(names)),
            slice_("k Cmpt Exec", 0, 300, COUNTERS, tid=9),
        ]
    )
    communication, computation = CLASSES.index("communication"), CLASSES.index("computation")
    assert sorted(picture(made).kind.tolist()) == sorted([communication, communication, -1, computation])
    # and a host's are no work of its device
    assert busy(made).percent[communication].max() == 0


def test_the_process_of_all_ranks_has_a_name() -> None:
    for collectives in (False, True):
        made = finished(*e6(), collectives=collectives)
        output = io.BytesIO()
        write_chrome(made, {}, {}, output)
        events = json.loads(output.getvalue())["traceEvents"]
        assert any(event["ph"] == "C" and event["pid"] == -1 for event in events)
        names = [event["args"]["name"] for event in events if event["name"] == "process_name" and event["pid"] == -1]
        assert names == ["CollectiveBW"]
