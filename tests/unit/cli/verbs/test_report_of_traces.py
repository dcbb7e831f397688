"""`iaprof report` of a capture that traces were imported to."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from unit.cli.test_timeline_command import DATA
from unit.in_process import iaprof


@pytest.fixture(scope="module")
def capture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("capture") / "run.parquet"
    assert iaprof("import", DATA / "sample_flex.json", "-o", path).code == 0
    return path


def test_folded_lines_add_up_to_the_time_in_kernels(capture: Path) -> None:
    done = iaprof("report", capture, "--freq", "557.1:1100", "-q")
    assert (done.code, done.err) == (0, "")
    lines = done.out.splitlines()
    assert all(line.startswith("rank 0;kernel;") for line in lines)
    # 2702.1217 us of kernels, of which two of 280.942 us are one in the other
    assert sum(int(line.rsplit(" ", 1)[1]) for line in lines) == pytest.approx((2702.1217 - 280.942) * 1000, abs=20)


def test_csv_and_parquet_have_the_same_rows(capture: Path, tmp_path: Path) -> None:
    assert iaprof("report", capture, "-o", tmp_path / "run.csv", "-q").code == 0
    target = tmp_path / "totals.parquet"
    assert iaprof("report", capture, "--format", "parquet", "-o", target, "-q").code == 0
    table = pq.read_table(target)
    rows = list(csv.DictReader(io.StringIO((tmp_path / "run.csv").read_text())))
    assert [row["name"] for row in rows] == table["name"].to_pylist()
    assert sum(table["calls"].to_pylist()) == 17
    assert [float(row["total_us"]) for row in rows] == table["total_us"].to_pylist()


def test_chrome_is_what_timeline_writes(capture: Path, tmp_path: Path) -> None:
    assert iaprof("timeline", capture, "-o", tmp_path / "out", "-q").code == 0
    assert iaprof("report", capture, "-o", tmp_path / "run.trace.json", "-q").code == 0
    one, other = (json.loads(path.read_text()) for path in (tmp_path / "out/trace.json", tmp_path / "run.trace.json"))
    assert one["traceEvents"] == other["traceEvents"]


def test_json_is_that_of_timeline(capture: Path) -> None:
    assert iaprof("report", capture, "--json", "-q").out == iaprof("timeline", capture, "--json", "-q").out


@pytest.mark.parametrize("name", ["svg", "speedscope"])
def test_stacks_for_viewers_are_in_nanoseconds(capture: Path, name: str) -> None:
    done = iaprof("report", capture, "--format", name, "-q")
    assert done.code == 0
    assert ('"unit": "nanoseconds"' if name == "speedscope" else " ns</text>") in done.out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--frames", "cpu"), "--frames is for stalls, and run.parquet holds time lines"),
        (("--pid", "3"), "--pid is for stalls"),
        (("--format", "pprof", "-o", "x.pprof"), "--format=pprof shows stalls"),
        (("--freq", "3x"), "3x is not a frequency in MHz"),
    ],
)
def test_what_is_for_stalls_is_refused(capture: Path, words: tuple[str, ...], message: str) -> None:
    done = iaprof("report", capture, *words)
    assert (done.code, len(done.err.splitlines())) == (2, 1)
    assert message in done.err
