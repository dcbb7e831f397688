"""`iaprof timeline` from the command line: what it prints and writes."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path
from typing import Any

import pytest

from unit.in_process import iaprof

DATA = Path(__file__).resolve().parents[1] / "report" / "timeline" / "data"
SAMPLE = (str(DATA / "sample_flex.json"), "-c", str(DATA / "sample_compiler_log.txt"), "--freq", "557.1:1100")


def rows(path: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(path.read_text().splitlines()))


def test_the_sample_of_the_runtime(tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = iaprof("timeline", *SAMPLE, "-o", out)
    # the numbers that the AIU Trace Analyzer prints
    assert done.code == 0
    assert "11,763.227 us  2,702.122 us  22.97 %" in done.out
    (active,) = rows(out / "active.csv")
    assert (active["Total Kernel Time"], active["Active percentage"]) == ("2702.1217", "22.97")
    total = next(row for row in rows(out / "categories.csv") if row["Category"] == "Total")
    assert (total["Ideal_Time"], total["Ideal_Cyc"], total["PT_Util"]) == ("505.7600", "556336", "0.1872")
    assert "Total" in (out / "categories.txt").read_text()
    assert sum(int(row["Calls"]) for row in rows(out / "summary.csv")) == 17
    trace = json.loads((out / "trace.json").read_text())
    assert sum(event["ph"] == "X" for event in trace["traceEvents"]) == 17
    assert trace["deviceProperties"] == [{"id": 0, "type": "AIU", "name": "AIU"}]


def test_traces_and_the_capture_of_them_give_the_same(tmp_path: Path) -> None:
    assert iaprof("import", SAMPLE[0], "-o", tmp_path / "run.parquet").code == 0
    from_capture = iaprof("timeline", tmp_path / "run.parquet", *SAMPLE[1:], "-o", tmp_path / "a", "-q")
    from_traces = iaprof("timeline", *SAMPLE, "-o", tmp_path / "b", "-q")
    assert (from_capture.code, from_capture.out) == (0, from_traces.out)
    for path in sorted((tmp_path / "a").iterdir()):
        one, other = (
            [line for line in (tmp_path / folder / path.name).read_text().splitlines() if "CmdLine" not in line]
            for folder in "ab"
        )
        assert one == other, path.name


def test_json_has_everything(tmp_path: Path) -> None:
    def no_constant(name: str) -> Any:
        raise ValueError(name)

    done = iaprof("timeline", *SAMPLE, "--json")
    found = json.loads(done.out, parse_constant=no_constant)
    assert found["files"] == [{"name": "sample_flex.json", "dialect": "flex", "rank": 0}]
    assert found["events"]["slices"] == 17
    assert found["tables"]["active"][0]["Active percentage"] == 22.97
    assert {"level": "note", "stage": "ITSTATS", "text": "[0] avg_iteration_time=0.0, iterations=0"} in found[
        "messages"
    ]


def test_dumps_and_files_for_tensorboard(tmp_path: Path) -> None:
    done = iaprof("timeline", *SAMPLE, "-o", tmp_path, "--tb", "--dump-after", "normalize_phase1", "-q")
    assert (done.code, done.err) == (0, "")
    (dump,) = tmp_path.glob("*_normalize_phase1.json")
    # which is before numbers are taken out of names
    numbered = re.compile(r"_\d+ Cmpt Exec$")
    names = [[event["name"] for event in json.loads(path.read_text())["traceEvents"]]
             for path in (dump, tmp_path / "trace.json")]  # fmt: skip
    assert [any(map(numbered.search, each)) for each in names] == [True, False]
    worker = json.loads((tmp_path / "trace_worker_0.pt.trace.json").read_text())
    assert sum(event["ph"] == "X" for event in worker["traceEvents"]) == 17


def test_stages_are_listed_with_what_a_profile_turns_off() -> None:
    everything = iaprof("timeline", "--list-stages").out
    minimal = iaprof("timeline", "--list-stages", "--profile", "minimal").out
    assert "  off  " not in everything
    assert minimal.count("  off  ") > 10
    assert len(minimal.splitlines()) == len(everything.splitlines())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "name a capture or traces"),
        (("x.json", "--freq", "0"), "0 is no frequency in MHz"),
        (("x.json", "--freq", "1:2:3"), "1:2:3 is no frequency"),
        (("x.json", "--counters", "watts"), "there is no watts; there are power_ts4"),
        (("x.json", "--counters", "power_ts3,power_ts4"), "give one of them"),
        (("x.json", "--overlap", "stack"), "there is no stack; there are tid, drop, async, shift, warn"),
        (("x.json", "--align-ranks", "loose"), "there is no loose"),
        (("x.json", "--filter", "name"), "name is no ATTRIBUTE:REGEX"),
        (("x.json", "--filter", "name:["), "is no ATTRIBUTE:REGEX"),
        (("x.json", "--limit", '{"first": 3}'), "is no JSON object with count"),
        (("x.json", "--limit", '{"skip": "3"}'), "has a value that is no number"),
        (("x.json", "--stages", "none_such"), "there is no stage none_such"),
        (("x.json", "--profile", "none_such"), "there is no profile none_such"),
        (("x.json", "--dump-after", "all"), "--dump-after needs a folder"),
        (("x.json", "--power-stats", "--counters", "none"), "--power-stats needs the counter power_ts4"),
    ],
)
def test_wrong_usage_is_one_sentence(words: tuple[str, ...], message: str) -> None:
    done = iaprof("timeline", *words)
    assert done.code == 2
    assert message in done.err
    assert len(done.err.splitlines()) == 1


def test_files_that_are_not_there_or_in_the_way(tmp_path: Path) -> None:
    done = iaprof("timeline", tmp_path / "absent.json")
    assert (done.code, done.err.count("\n")) == (1, 1)
    (tmp_path / "file").touch()
    assert "is no folder" in iaprof("timeline", *SAMPLE, "-o", tmp_path / "file").err
    assert "is not empty" in iaprof("timeline", *SAMPLE, "-o", tmp_path).err
    assert iaprof("timeline", *SAMPLE, "-o", tmp_path, "--force").code == 0
