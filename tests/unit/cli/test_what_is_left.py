"""What verbs leave for others: files only for those who may read the capture, no formulas, no hidden letters."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from iaprof.basics.clean import clean
from thorough import usually
from unit.capturing import HEADER, capture, launch, record, stall
from unit.in_process import iaprof
from unit.timelines.clock_examples import E1

ADDRESS = 0x8000_0001_0000


def made(folder: Path, name: str = "k") -> Path:
    stalls = [stall(9, record(ADDRESS, sbid=3))]
    return capture(folder / "c.parquet", stall=stalls, launch=[launch(2, 7, ADDRESS, 11, name=name, comm=name)])


@pytest.mark.parametrize(
    ("given", "expected"),
    usually([(0o640, 0o640), (0o666, 0o644)], [(0o600, 0o600), (0o640, 0o640), (0o644, 0o644), (0o666, 0o644)]),
)
def test_who_may_not_read_a_capture_may_not_read_its_report(given: int, expected: int, tmp_path: Path) -> None:
    folder = tmp_path / "captures"
    folder.mkdir()
    other = made(folder).rename(tmp_path / "other")
    source = made(folder)
    source.chmod(given)
    other.chmod(0o644)
    for words in (
        ("report", source, "-o", tmp_path / "page.html"),
        ("report", source, "-o", tmp_path / "table.parquet"),
        ("report", other, source, "-o", tmp_path / "both.folded"),
        ("report", folder / "*.parquet", other, "-o", tmp_path / "pattern.svg"),
        ("top", source, "-o", tmp_path / "top.csv"),
        ("top", folder, "-o", tmp_path / "folder.json"),
        ("diff", other, source, "-o", tmp_path / "diff.html"),
        ("diff", other, folder, "-o", tmp_path / "sides.json"),
        ("diff", other, source, "--format=folded", "-o", tmp_path / "diff.folded"),
    ):
        done = iaprof(*words, "-q")
        assert done.code == 0, done.err
        output = words[words.index("-o") + 1]
        assert os.stat(output).st_mode & 0o777 == expected, words


@pytest.mark.root
@pytest.mark.parametrize(("given", "expected"), [(0o640, 0o600), (0o660, 0o600), (0o644, 0o644)])
def test_another_group_may_not_read_a_report_that_only_the_captures_group_may(
    given: int, expected: int, tmp_path: Path
) -> None:
    source, output = made(tmp_path), tmp_path / "top.json"
    os.chown(source, -1, os.getegid() + 1)
    source.chmod(given)
    done = iaprof("top", source, "-o", output, "-q")
    assert done.code == 0, done.err
    assert os.stat(output).st_mode & 0o777 == expected


def test_of_captures_in_a_store_only_the_owner_may_read_a_report(tmp_path: Path) -> None:
    capture, output = made(tmp_path), tmp_path / "stored.json"
    capture.chmod(0o644)
    done = iaprof("top", f"file://{capture}", "-o", output, "-q")
    assert done.code == 0, done.err
    assert os.stat(output).st_mode & 0o777 == 0o600


def test_who_may_not_read_a_trace_may_not_read_what_is_made_of_it(tmp_path: Path) -> None:
    import json

    trace = tmp_path / "t.json"
    trace.write_text(json.dumps(E1))
    trace.chmod(0o600)
    done = iaprof("timeline", trace, "-o", tmp_path / "out", "--html", "--pddf", "--tb", "-q")
    assert done.code == 0, done.err
    files = [path for path in (tmp_path / "out").iterdir() if path.is_file()]
    assert len(files) > 4
    assert {path.stat().st_mode & 0o777 for path in files} == {0o600}


@pytest.mark.parametrize("name", ["=cmd|' /C calc'!A0", "+1", "-2+3", "@SUM(1)", "\t=1", "\r=1", "\uff1d1", "\uff201"])
def test_a_query_writes_no_formula(name: str, tmp_path: Path) -> None:
    done = iaprof("query", made(tmp_path, name), "SELECT name, -1 AS n FROM launches", "--format=csv")
    assert done.code == 0, done.err
    written = done.out.splitlines()[1].lstrip('"')
    assert written.startswith(("'", "\\x"))
    assert done.out.rstrip().endswith(",-1")  # a number is none


_CODES = [0x3164, 0x034F, 0xFE0F, 0xFE00, 0x115F, 0x1160, 0xFFA0, 0x17B4, 0x2800, 0xE0100, 0x180B, 0x13441, 0x16FE4,
          0x1D159]  # fmt: skip


@pytest.mark.parametrize("code", _CODES)
def test_letters_that_show_nothing_are_written_out(code: int, tmp_path: Path) -> None:
    name = f"ker{chr(code)}nel"
    assert clean(name) in (f"ker\\u{code:04x}nel", f"ker\\U{code:08x}nel", f"ker\\u{code:x}nel")
    done = iaprof("report", made(tmp_path, name), "-q")
    assert chr(code) not in done.out
    assert clean("\u00e9\u4e2d\u0301 \ud55c") == "\u00e9\u4e2d\u0301 \ud55c"  # what is seen stays


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("verb", ["archive", "merge"])
def test_a_verb_that_is_ended_leaves_no_file(verb: str, number: signal.Signals, tmp_path: Path) -> None:
    # given a verb that is writing, and stays at it
    code = """
import sys, time
from iaprof.formats.capture.writer import CaptureWriter
from iaprof.cli.main import main
def write(*_):
    print("writing", flush=True)
    time.sleep(60)
CaptureWriter.write = write
main()
"""
    other = capture(tmp_path / "d.parquet", HEADER | {"end_ns": 5, "part": 1}, launch=[launch(2, 7, ADDRESS, 11)])
    sources = [made(tmp_path), *([other] if verb == "merge" else [])]
    words: list[str | Path] = [sys.executable, "-c", code, verb, *sources, "-o", tmp_path / "out"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as running:
        assert running.stdout is not None
        assert running.stdout.readline() == "writing\n"
        assert len(list(tmp_path.glob(".iaprof-*.tmp"))) == 1
        # when
        begun = time.monotonic()
        running.send_signal(number)
        running.wait(30)
    # then it is gone, with what it had begun
    assert time.monotonic() - begun < 30
    assert running.returncode == -number
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c.parquet", "d.parquet"]


@pytest.mark.parametrize(
    ("wall_s", "said"),
    [
        (10.5, None),
        (3610, "went on by 1:00:00 h more than the recording's: the machine was suspended for that time"),
        (4, "was set back by 6.00 s"),
    ],
)
def test_a_suspend_is_a_gap_that_info_tells(wall_s: float, said: str | None, tmp_path: Path) -> None:
    second = 10**9
    clocks = {
        "clock": {"monotonic_ns": 5 * second, "realtime_ns": 10**18},
        "clock_end": {"monotonic_ns": 15 * second, "realtime_ns": 10**18 + int(wall_s * second)},
    }
    done = iaprof("info", capture(tmp_path / "c", HEADER | clocks, launch=[launch(2, 7, ADDRESS, 11)]))
    told = " ".join(done.out.split())
    assert ("the wall clock" in told) is (said is not None)
    assert said is None or said in told
