"""What the AIU Trace Analyzer gets wrong without a word, through the command: ranks, jobs, tables, filters."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from thorough import thorough
from unit.in_process import Done, iaprof
from unit.timelines.clock_examples import E1, e6
from unit.timelines.traces import Event, slice_

LOG = " Ideal/Total Cycles \n{lines}\n====== Perf Summary End ======\n"


def kernel(name: str, ts: int, dur: int, **others: Any) -> Event:
    """A kernel whose counters are 1000 times the time."""
    return slice_(f"{name} Cmpt Exec", ts, dur, [1000 * ts] * 3 + [1000 * (ts + dur)] * 2, **others)


def run(folder: Path, files: Sequence[Any], *options: str | Path) -> Done:
    """Runs the command on files with these contents, with all that it writes in `out`."""
    paths = [folder / f"job {number},x.json" for number in range(len(files))]
    for path, content in zip(paths, files, strict=True):
        path.write_text(json.dumps(content))
    done = iaprof("timeline", *paths, "-o", folder / "out", "--force", *options)
    assert done.code == 0, done.err
    return done


def rows(folder: Path, table: str) -> list[dict[str, str]]:
    """The rows of a table."""
    return list(csv.DictReader((folder / "out" / f"{table}.csv").read_text().splitlines()))


def slices(folder: Path, name: str = "trace.json") -> list[dict[str, Any]]:
    """The slices of a trace that was written."""
    events = json.loads((folder / "out" / name).read_text())["traceEvents"]
    return [event for event in events if event["ph"] == "X"]


def test_four_ranks_in_a_file_of_the_runtime_stay_four(tmp_path: Path) -> None:
    run(tmp_path, [[kernel("k", 1000 + 100 * rank, 50, pid=rank) for rank in range(4)]], "--tb")
    assert [row["pid"] for row in rows(tmp_path, "active")] == ["0", "1", "2", "3"]
    for rank in range(4):
        name = f"trace_worker_{rank}.pt.trace.json"
        step, own = slices(tmp_path, name)
        assert (step["name"], step["ts"], step["ts"] + step["dur"] >= own["ts"] + own["dur"]) == (
            "ProfilerStep#0",
            own["ts"],
            True,
        )
        assert own["pid"] == rank
        described = json.loads((tmp_path / "out" / name).read_text())
        assert [device["id"] for device in described["deviceProperties"]] == [rank]
    assert not (tmp_path / "out" / "trace_worker_4.pt.trace.json").exists()


def test_jobs_of_the_same_name_keep_apart(tmp_path: Path) -> None:
    paths = []
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        paths.append(tmp_path / folder / "job.json")
        paths[-1].write_text(json.dumps([kernel(folder, 1000, 50)]))
    (tmp_path / "other.json").write_text(json.dumps([kernel("c", 2000, 50)]))
    assert iaprof("timeline", *paths, tmp_path / "other.json", "-o", tmp_path / "out", "--pddf", "-q").code == 0
    jobs = {event["name"][0]: event["args"]["jobname"] for event in slices(tmp_path)}
    assert jobs == {"a": "job.json(0)", "b": "job.json(1)", "c": "other.json"}
    done = iaprof("timeline", *paths, "--filter", r"args.jobname:\(1\)$", "--json", "-q")
    assert json.loads(done.out)["events"]["dropped"] == {"filter": 1}


@thorough
def test_results_do_not_change_from_run_to_run(tmp_path: Path) -> None:
    for number, content in enumerate((E1, *e6())):
        (tmp_path / f"{number}.json").write_text(json.dumps(content))
    words = ["timeline", *(f"{number}.json" for number in range(3)), "-q", "--flow", "--collectives", "-o", "out", "-f"]
    written = []
    for seed in ("1", "2"):
        command = [sys.executable, "-c", "from iaprof.cli.main import main; main()", *words]
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        subprocess.run(command, check=True, capture_output=True, cwd=tmp_path, env=environment)
        written.append({path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()})
    assert written[0] == written[1]
    assert "stats_summary.csv" in written[0]


def test_each_rank_has_its_log_and_a_job_that_fits_none_is_said(tmp_path: Path) -> None:
    for rank, name in enumerate("ab"):
        (tmp_path / f"{rank}.log").write_text(LOG.format(lines=f"{name}-opCatBmm {11000 * (rank + 1)}"))
    files = [[kernel("a", 1000, 50)], [kernel("b", 1000, 50, pid=1)], [kernel("z", 3000, 50, pid=1)]]
    done = run(tmp_path, files, "-c", str(tmp_path / "0.log"), "-c", str(tmp_path / "1.log"))
    ideal = {row["Pid"]: row["Ideal_Cyc"] for row in rows(tmp_path, "categories") if row["Category"] == "Bmm"}
    assert ideal == {"0": "11000", "1": "22000"}
    assert "1 of 3 jobs run no kernel of any table" in done.err
    assert {event.get("cat") for event in slices(tmp_path)} == {"kernel"}  # the category does not replace it


def test_autopilot_counts_its_total_once(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("DSM-AutoPilot BEGIN\n" + LOG.format(lines="Total\t\t55000"))
    run(tmp_path, [[kernel("a", 1000, 50), kernel("b", 1100, 50)]], "-c", str(tmp_path / "log"), "-q")
    total = next(row for row in rows(tmp_path, "categories") if row["Category"] == "Total")
    assert (total["Ideal_Cyc"], total["Kernel_Time"], total["PT_Util"]) == ("55000", "100.0000", "0.5000")


@pytest.mark.parametrize(
    ("filters", "kept"),
    [
        (["name:^a_1,2:3 "], ["b", "c"]),
        (["name:^a", "name:^b"], ["c"]),
        (["args.TS3:^1[01]"], ["c"]),
    ],
)
def test_filters_with_commas_and_colons_and_two_of_an_attribute(
    tmp_path: Path, filters: list[str], kept: list[str]
) -> None:
    events = [kernel(name, 1000 + 100 * number, 50) for number, name in enumerate(("a_1,2:3", "b", "c"))]
    run(tmp_path, [events], *(word for each in filters for word in ("--filter", each)), "--keep-names", "-q")
    assert [event["name"].split()[0] for event in slices(tmp_path)] == kept


def test_a_limit_counts_only_what_it_says(tmp_path: Path) -> None:
    marks = [{"ph": phase, "name": "m", "pid": 0, "tid": 1, "ts": ts} for ts in (900, 950) for phase in "iM"]
    events = [*marks, kernel("a", 1000, 50), kernel("b", 1100, 50)]
    run(tmp_path, [events], "--limit", '{"count": 1, "no_count_types": "iM"}', "-q")
    assert [event["name"][0] for event in slices(tmp_path)] == ["a"]


def test_infinity_metadata_without_a_time_and_bytes_as_text(tmp_path: Path) -> None:
    signal = {"name": "s DmaO", "ts": 1060, "dur": 5, "args": {"Bytes": "128"}}
    counters = {f"TS{n}": str(1060000 + n * 1000) for n in range(1, 6)}
    events = [
        kernel("k", 1000, 50),
        {"ph": "X", "pid": 0, "tid": 1, **signal, "args": {**counters, "Bytes": "128"}},
        kernel("l", 1100, 50),
        {"ph": "C", "name": "c", "pid": 0, "ts": 1, "args": {"x": 1e999, "y": 2}},
        {"ph": "M", "name": "process_name", "pid": 0, "args": {"name": "p"}},
        {"ph": "X", "name": "nan", "pid": 0, "tid": 1, "ts": float("nan"), "dur": 1},
    ]
    done = run(tmp_path, [events])
    text = (tmp_path / "out" / "trace.json").read_text()
    assert "Infinity" not in text and "NaN" not in text
    assert "1 event dropped: 1 without a time" in done.err
    assert "members that should be numbers or texts and are not: 1" in done.err
    assert '"name":"p"' in text
    assert [event["args"]["class"] for event in slices(tmp_path) if "DmaO" in event["name"]] == [
        "MAIU_PROTOCOL_SIGNAL_DATA"
    ]


def test_numbers_that_no_json_has_beside_the_events(tmp_path: Path) -> None:
    file = tmp_path / "job.json"
    text = json.dumps({"traceEvents": [kernel("k", 1000, 50)], "scale": [float("inf"), float("nan"), 1.5]})
    file.write_text(text.replace("Infinity", "1e999"))
    assert iaprof("timeline", file, "-o", tmp_path / "out", "-q").code == 0
    written = json.loads((tmp_path / "out" / "trace.json").read_text(), parse_constant=lambda name: 1 / 0)
    assert written["scale"] == [None, None, 1.5]
