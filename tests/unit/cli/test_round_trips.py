"""Each format that `iaprof report` writes is read back with its values, or refused in a sentence, by `iaprof import`.

test_timeline_outputs_read_back.py has those of time lines.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from iaprof.formats.writers.registry import FORMATS
from iaprof.timelines.outputs import formats as time_lines
from thorough import usually
from unit.in_process import iaprof
from unit.timelines.clock_examples import E1

DATA = Path(__file__).resolve().parents[2] / "data"
STALLS = DATA / "captures" / "format-10.parquet"
READ = {"iaprof", "chrome", "perfetto"}


def test_the_formats_that_are_read_are_written() -> None:
    assert set(FORMATS) >= READ


@pytest.mark.parametrize("format_", usually(sorted(set(FORMATS) - READ)[::3], sorted(set(FORMATS) - READ)))
def test_others_are_refused_in_a_sentence(tmp_path: Path, format_: str) -> None:
    # Given a report of stalls, whose stacks begin with [unknown kernel] or a name
    (tmp_path / "trace.json").write_text(json.dumps([{"ph": "X", "name": "a", "pid": 0, "tid": 1, "ts": 1, "dur": 5}]))
    assert iaprof("import", DATA / "iaprof-text" / "2026.2.txt", "-o", tmp_path / "text.parquet", "-q").code == 0
    assert iaprof("import", tmp_path / "trace.json", "-o", tmp_path / "run.parquet", "-q").code == 0
    for number, capture in enumerate((STALLS, tmp_path / "text.parquet", tmp_path / "run.parquet")):
        if capture.name == "run.parquet" and format_ not in time_lines.FORMATS:
            continue
        report = tmp_path / f"report-{number}"
        assert iaprof("report", capture, "--format", format_, "-o", report, "-q").code == 0
        done = iaprof("import", report, "-o", tmp_path / "back.parquet")
        assert (done.code, done.out, done.err.count("\n")) == (1, "", 1), done.err
        assert "trace" in done.err
        assert not (tmp_path / "back.parquet").exists()


def test_the_text_of_intels_tool(tmp_path: Path) -> None:
    # Given a text, and what iaprof writes of it
    capture, again = tmp_path / "a.parquet", tmp_path / "b.parquet"
    assert iaprof("import", DATA / "iaprof-text" / "2026.2.txt", "-o", capture, "-q").code == 0
    first = iaprof("report", capture, "--format", "iaprof").out
    (tmp_path / "first.txt").write_text(first)
    assert iaprof("import", tmp_path / "first.txt", "-o", again, "-q").code == 0
    # Then that reads back to the same text and the same 85 samples
    assert iaprof("report", again, "--format", "iaprof").out == first
    stacks = [iaprof("report", each, "--format", "folded").out for each in (capture, again)]
    assert stacks[0] == stacks[1]
    assert sum(int(line.rsplit(" ", 1)[1]) for line in stacks[0].splitlines()) == 85


@pytest.mark.parametrize("stage", ["normalize_phase1", "event_sanity_checks", "event_categorizer", "compare_ranks"])
def test_dumps_give_the_tables_of_the_trace(tmp_path: Path, stage: str) -> None:
    (tmp_path / "job.json").write_text(json.dumps(E1))
    first, second = tmp_path / "first", tmp_path / "second"
    assert iaprof("timeline", tmp_path / "job.json", "-o", first, "-q", "--dump-after", stage).code == 0
    (dump,) = first.glob(f"*_{stage}.json")
    assert iaprof("timeline", dump, "-o", second, "-q").code == 0
    tables = sorted(path.name for path in first.glob("*.csv"))
    assert "summary.csv" in tables
    for name in ("active.csv", "kernels.csv", "summary.csv", "ts_analysis.csv"):
        assert (second / name).read_text() == (first / name).read_text()
