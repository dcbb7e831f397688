"""What `iaprof timeline` writes, and reads again: the same events and the same tables."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from thorough import usually
from unit.in_process import iaprof
from unit.timelines.clock_examples import E1, e6
from unit.timelines.examples import launch
from unit.timelines.traces import Event

STALLS = Path(__file__).resolve().parents[2] / "data" / "captures" / "format-10.parquet"
LOG = "~~~~ Ideal/Total Cycles ~~~~\nk_1-opCatBmm_fp16 22000\nm_2-opCatScalar 0\n====== Perf Summary End ======\n"


def torch(events: Sequence[Event], rank: int) -> dict[str, Any]:
    info = {"rank": rank, "world_size": 2}
    return {"deviceProperties": [{"id": 0, "name": "AIU"}], "distributedInfo": info, "traceEvents": list(events)}


def flow_end(pid: int) -> Event:
    return {"ph": "f", "id": 9, "cat": "ac2g", "name": "ac2g", "pid": pid, "tid": 7, "ts": 1070, "bp": "e"}


TRACES: dict[str, list[Any]] = {
    "an operation": [E1],
    "two ranks in one file": [[*E1, *({**event, "pid": 1} for event in E1)]],
    "a collective of two ranks": e6(),
    "two ranks of torch": [torch([*launch(4000 + rank), flow_end(0)], rank) for rank in (0, 1)],
    "torch and flex": [E1, torch([*launch(4000), flow_end(0)], 3)],
    "two files of one name": [E1, [{**event, "pid": 1} for event in E1]],
}


def events_of(path: Path, without_names: bool) -> Counter[str]:
    """The events of a trace but for metadata; `without_names`: and the names of flows, which Perfetto's have not."""
    found: Counter[str] = Counter()
    for event in json.loads(path.read_text())["traceEvents"]:
        if without_names and event["ph"] in "stf":
            event |= {"name": "", "cat": "", "args": {}, "ts": round(event["ts"])}  # the closer edge of its slice
        if event["ph"] == "C" and without_names:
            event.pop("cat", None)
        if event["ph"] != "M":
            found[json.dumps(event, sort_keys=True)] += 1
    return found


def write_all(inputs: Sequence[Path], folder: Path, *options: str | Path) -> None:
    assert iaprof("timeline", *inputs, "-o", folder, "-q", *options).code == 0


def written(folder: Path, content: Sequence[Any], same_name: bool = False) -> list[Path]:
    paths = []
    for number, each in enumerate(content):
        path = folder / str(number) / ("job.json" if same_name else f"job-{number}.json")
        path.parent.mkdir()
        path.write_text(json.dumps(each))
        paths.append(path)
    return paths


def check(first: Path, name: str, second: Path) -> None:
    """Reads an output, and checks that what is written of it is the same: all events, and every table."""
    done = iaprof("timeline", first / name, "-o", second)
    assert done.code == 0
    assert "output of iaprof, so its events stay as they are" in done.err
    perfetto = name.endswith("pftrace")
    assert events_of(second / "trace.json", perfetto) == events_of(first / "trace.json", perfetto)
    tables = sorted(path.name for path in first.glob("*.csv"))
    assert sorted(path.name for path in second.glob("*.csv")) == tables
    for table in tables:
        assert (second / table).read_text() == (first / table).read_text(), table


@pytest.mark.parametrize("name", ["trace.json", "trace.pftrace"])
@pytest.mark.parametrize("of", usually(list(TRACES)[::2], TRACES))
def test_an_output_reads_back_to_what_was_written(tmp_path: Path, of: str, name: str) -> None:
    write_all(written(tmp_path, TRACES[of], of == "two files of one name"), tmp_path / "first")
    check(tmp_path / "first", name, tmp_path / "second")


@pytest.mark.parametrize("format_", ["chrome", "perfetto"])
def test_so_does_a_report(tmp_path: Path, format_: str) -> None:
    # Given a trace and the report of its capture in one format
    first, capture = tmp_path / "first", tmp_path / "run.parquet"
    inputs = written(tmp_path, TRACES["torch and flex"])
    write_all(inputs, first)
    assert iaprof("import", *inputs, "-o", capture, "-q").code == 0
    name = {"chrome": "report.json", "perfetto": "report.pftrace"}[format_]
    assert iaprof("report", capture, "--format", format_, "-o", first / name, "-q").code == 0
    check(first, name, tmp_path / "second")


@pytest.mark.parametrize("of", ["a collective of two ranks", "two ranks of torch"])
def test_the_workers_of_tensorboard_together_are_the_trace(tmp_path: Path, of: str) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    write_all(written(tmp_path, TRACES[of]), first, "--tb")
    workers = sorted(first.glob("*.pt.trace.json"))
    assert iaprof("timeline", *workers, "-o", second, "-q").code == 0
    of_workers = sum((events_of(path, False) for path in workers), Counter())
    assert events_of(second / "trace.json", False) == of_workers
    for table in first.glob("*.csv"):
        assert (second / table.name).read_text() == table.read_text(), table.name


def test_what_a_compiler_log_told_stays(tmp_path: Path) -> None:
    (tmp_path / "job.json").write_text(json.dumps(E1))
    (tmp_path / "compile.log").write_text(LOG)
    first, second = tmp_path / "first", tmp_path / "second"
    write_all([tmp_path / "job.json"], first, "-c", tmp_path / "compile.log")
    assert iaprof("timeline", first / "trace.json", "-o", second, "-q", "--pddf").code == 0
    assert events_of(second / "trace.json", False) == events_of(first / "trace.json", False)
    assert any('"PT Active"' in event for event in events_of(second / "trace.json", False))
    # 22000 ideal cycles at 1100 MHz are 20 us of 50
    assert [
        line.split(",")[-1] for line in (second / "pddf.csv").read_text().splitlines() if "k Cmpt Exec" in line
    ] == ["0.4"]


def test_an_output_and_another_trace_are_not_mixed(tmp_path: Path) -> None:
    (tmp_path / "job.json").write_text(json.dumps(E1))
    assert iaprof("timeline", tmp_path / "job.json", "-o", tmp_path / "out", "-q").code == 0
    done = iaprof("timeline", tmp_path / "out" / "trace.json", tmp_path / "job.json")
    assert done.code == 1
    assert "trace.json is output of iaprof, and job.json is not: read the one or the other" in done.err


def test_a_dump_is_no_output(tmp_path: Path) -> None:
    # Given the trace before its slices were put on processes of hosts and devices
    (tmp_path / "job.json").write_text(json.dumps(E1))
    words = ("timeline", tmp_path / "job.json", "-o", tmp_path / "out", "-q", "--dump-after", "normalize_phase1")
    assert iaprof(*words).code == 0
    (dump,) = (tmp_path / "out").glob("*_normalize_phase1.json")
    # Then stages still run on it
    assert "stay as they are" not in iaprof("timeline", dump).err


@pytest.mark.parametrize("format_", ["chrome", "perfetto"])
def test_a_report_of_stalls_reads_back(tmp_path: Path, format_: str) -> None:
    # Given a capture of stalls as a trace, and what Chrome's format says of it
    written_, reference = tmp_path / "trace", tmp_path / "trace.json"
    assert iaprof("report", STALLS, "--format", format_, "-o", written_, "-q").code == 0
    assert iaprof("report", STALLS, "--format", "chrome", "-o", reference, "-q").code == 0
    events = json.loads(reference.read_text())["traceEvents"]
    expected = sorted((event["name"], round(1000 * event["dur"])) for event in events if event["ph"] == "X")
    # Then the import has each slice with its name and length, and each flow
    assert iaprof("import", written_, "-o", tmp_path / "run.parquet", "-q").code == 0
    words = ("query", tmp_path / "run.parquet")
    found = iaprof(*words, "SELECT name, duration_ns FROM slices", "--format=json").out
    assert sorted((row["name"], row["duration_ns"]) for row in json.loads(found)) == expected
    flows = iaprof(*words, "SELECT count(*) AS n FROM flows", "--format=json").out
    assert json.loads(flows) == [{"n": sum(event["ph"] in "stf" for event in events)}]
