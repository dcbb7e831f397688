"""`iaprof diff` of captures that traces were imported to."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from unit.capturing import capture, record, stall
from unit.cli.test_timeline_command import DATA
from unit.in_process import iaprof


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The sample, and the same with a kernel of another name."""
    folder = tmp_path_factory.mktemp("runs")
    text = (DATA / "sample_flex.json").read_text()
    (folder / "new.json").write_text(text.replace('"mean Cmpt', '"median Cmpt'))
    for name, source in (("a", DATA / "sample_flex.json"), ("b", folder / "new.json")):
        assert iaprof("import", source, "-o", folder / f"{name}.parquet").code == 0
    return folder / "a.parquet", folder / "b.parquet"


def test_a_kernel_of_another_name(runs: tuple[Path, Path]) -> None:
    done = iaprof("diff", *runs, "--freq", "557.1:1100", "-q", "-n", "2")
    assert (done.code, done.err) == (0, "")
    assert done.out.splitlines() == [
        "BEFORE US   AFTER US  CHANGE  CALLS  MEAN US        KERNEL",
        "    2.064      0.000  -2.064      1    2.064  gone  mean Cmpt Exec",
        "    0.000      2.064  +2.064      1    2.064  new   median Cmpt Exec",
        "2,700.057  2,700.057       0     16  168.754        (8 more)",
        "2,702.122  2,702.122       0     17  158.948        (total)",
    ]


def test_json_of_categories_by_rank(runs: tuple[Path, Path]) -> None:
    found = json.loads(iaprof("diff", *runs, "--by", "category", "--per-rank", "--json", "-q").out)
    assert (found["by"], found["unit"], len(found["entries"])) == ("category", "us", 1)
    entry = found["entries"][0]
    assert (entry["rank"], entry["side"], entry["category"], entry["state"]) == (0, "device", "kernel", "both")
    assert (entry["calls_before"], entry["calls_after"], entry["change"]) == (17, 17, 0)


def test_with_a_compilers_log_categories_are_of_operations(runs: tuple[Path, Path]) -> None:
    log = ("-c", DATA / "sample_compiler_log.txt", "--freq", "557.1:1100")
    done = iaprof("diff", *runs, *log, "--by", "category", "-q", "-n", "1")
    lines = done.out.splitlines()
    assert lines[0].endswith("PT UTIL    CATEGORY")
    assert " 0.1872 " in lines[-1] and lines[-1].endswith("(total)")
    total = json.loads(iaprof("diff", *runs, *log, "--json", "-q").out)["total"]
    assert round(total["ideal_us_before"], 2) == 505.76


def test_messages_say_of_which_run_they_are(runs: tuple[Path, Path]) -> None:
    lines = iaprof("diff", *runs).err.splitlines()
    assert any(line.startswith("iaprof: a.parquet: warning: FREQ: ") for line in lines)
    assert any(line.startswith("iaprof: b.parquet: warning: FREQ: ") for line in lines)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--by", "stack"), "--by takes kernel, category, not 'stack'"),
        (("--pid", "3"), "--pid is for stalls, and a.parquet holds time lines"),
        (("--format", "folded"), "--format takes table, json, not 'folded'"),
    ],
)
def test_what_is_for_stalls_is_refused(runs: tuple[Path, Path], words: tuple[str, ...], message: str) -> None:
    done = iaprof("diff", *runs, *words)
    assert (done.code, len(done.err.splitlines())) == (2, 1)
    assert message in done.err


def test_stalls_cannot_be_compared_to_time_lines(runs: tuple[Path, Path], tmp_path: Path) -> None:
    stalls = capture(tmp_path / "stalls.parquet", stall=[stall(10, record(0x1000, active=1))])
    for pair in ((runs[0], stalls), (stalls, runs[0])):
        done = iaprof("diff", *pair)
        assert done.code == 2
        assert done.err == (
            "iaprof: a.parquet holds time lines and stalls.parquet stalls: compare two captures of the same kind\n"
        )
    for words in (("diff", stalls, stalls, "--per-rank"), ("report", stalls, "--freq", "1000")):
        done = iaprof(*words)
        assert done.code == 2
        assert " is for time lines, and stalls.parquet holds stalls: leave it out" in done.err
