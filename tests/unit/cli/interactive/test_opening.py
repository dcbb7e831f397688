"""Opening the interactive view: in a terminal, and what is said where it cannot be."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from iaprof.basics.errors import IaprofError, UsageError
from iaprof.cli.options.captures import FleetOptions
from iaprof.cli.options.selection import SelectionOptions
from iaprof.cli.options.shown import Comparison
from iaprof.cli.subjects import subject
from iaprof.cli.subjects.several import Several
from iaprof.cli.subjects.stalls import interval_of
from terminals import Terminal
from unit.capturing import HEADER, capture, launch, record, stall
from unit.in_process import iaprof
from waiting import LONGEST_WAIT_S

KERNEL = 0x10_0000_2000


@pytest.fixture
def cap(tmp_path: Path) -> Path:
    header = HEADER | {"end_ns": 2_000_000_000}
    launches = [launch(1_000_000_000, 7, KERNEL, name="[red]scale")]
    stalls = [stall(1_100_000_000, record(KERNEL + 0x10, sbid=4)), stall(1_600_000_000, record(KERNEL + 0x20, send=2))]
    return capture(tmp_path / "cap.parquet", header, launch=launches, stall=stalls)


@pytest.mark.parametrize(
    ("words", "columns", "texts"),
    [
        (("report", "-i"), 80, ["6 samples", "app 7", "[red]scale", "Quit"]),
        (("top", "-i", "--by", "reason"), 200, ["REASON", "sbid 100 %", "66.7 %", "Quit"]),
        (("diff", "-i", "{cap}"), 80, ["6 samples before, 6 after", "MOST CHANGED", "[red]scale"]),
    ],
)
def test_a_terminal_gets_the_view_and_is_left_as_it_was(
    cap: Path, words: tuple[str, ...], columns: int, texts: list[str]
) -> None:
    # given
    command = [sys.executable, "-m", "iaprof", *(word.format(cap=cap) for word in words), cap]
    # when
    with Terminal(command, os.environ, columns, 24) as terminal:
        terminal.until(*texts)
        terminal.press("q")
        # then
        assert terminal.wait() == 0
        terminal.until("6 samples; matched to a kernel 100.0 %")
        assert termios.tcgetattr(terminal.fd) == terminal.modes


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (("report", "-i", "--json"), "--json has no effect on the interactive view: leave out one of them"),
        (("report", "-i", "-o", "x"), "--output has no effect on the interactive view: leave out one of them"),
        (
            ("top", "-i", "--per-interval"),
            "--per-interval has no effect on the interactive view: leave out one of them",
        ),
        (("top", "-i", "--live", "--by", "reason"), "--by has no effect with --live: leave out one of them"),
        (("top", "--live", "-o", "x.csv"), "with --live, -o names a capture: call it x.csv.parquet"),
        (("top", "--live", "-d", "0"), "--duration must be more than 0 seconds"),
        (("top", "--live"), "--live needs a terminal for its input, output and errors"),
        (("top", "-d", "1"), "--duration is for --live, which records; choose times of a capture with --time"),
        (("report", "-i"), "--interactive needs a terminal for its input, output and errors"),
    ],
)
def test_what_cannot_be_is_one_sentence(words: tuple[str, ...], error: str) -> None:
    assert iaprof(*words) == (2, "", f"iaprof: {error}\n")


def test_sets_of_captures_have_no_tree_of_their_difference() -> None:
    one = Several("diff", ["."], SelectionOptions(), FleetOptions())
    with pytest.raises(UsageError, match="compares two captures: 'iaprof merge' makes one of several"):
        one.tree_of_difference(one, "kernel", Comparison(), quiet=False)


def on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("stdin", "stdout", "stderr"):
        monkeypatch.setattr(f"iaprof.cli.subjects.subject.sys.{name}", type("", (), {"isatty": lambda self: True})())


def test_without_textual_it_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    # given
    on_a_terminal(monkeypatch)
    monkeypatch.setattr(subject, "find_spec", lambda name: None)
    # when
    with pytest.raises(IaprofError) as raised:
        subject.check_terminal("--live")
    # then
    assert str(raised.value) == (
        "the interactive view needs textual: install it with pip install 'iaprof[interactive]'"
    )


def test_several_captures_are_shown_as_their_sum(cap: Path, tmp_path: Path) -> None:
    # given
    (tmp_path / "other.parquet").write_bytes(cap.read_bytes())
    command = [sys.executable, "-m", "iaprof", "report", "-i", "--cache", "none", tmp_path]
    # when
    with Terminal(command, os.environ, 80, 24) as terminal:
        terminal.until("2 captures", "12 samples", "[red]scale")
        terminal.press("q")
        # then
        assert terminal.wait() == 0
        terminal.until("2 captures, 4 stall records, 12 samples")


def test_time_lines_are_a_tree_of_slices(tmp_path: Path) -> None:
    # given a host's slice that launches one of a device
    events = [
        {"ph": "X", "name": "train", "cat": "cpu_op", "pid": 1, "tid": 7, "ts": 0, "dur": 1000},
        {"ph": "X", "name": "aten::mm", "cat": "cpu_op", "pid": 1, "tid": 7, "ts": 100, "dur": 250},
    ]
    (tmp_path / "t.json").write_text(json.dumps({"traceEvents": events}))
    assert iaprof("import", tmp_path / "t.json", "-o", tmp_path / "t.parquet", "-q").code == 0
    # when
    with Terminal([sys.executable, "-m", "iaprof", "report", "-i", tmp_path / "t.parquet"], os.environ, 80, 24) as term:
        # then
        term.until("1.000 ms", "TIME ms", "TOP CATEGORY", "host 100 %", "train", "0.250", "aten::mm", "Quit")
        # when: the innermost first
        term.press("2")
        # then
        term.until("0.750")
        term.press("q")
        assert term.wait() == 0


@pytest.mark.parametrize("is_ignored", [False, True])
def test_a_terminal_that_goes_ends_the_view(cap: Path, is_ignored: bool) -> None:
    # given a terminal that controls no session, whose end sends no SIGHUP
    ours, theirs = pty.openpty()
    hangup = signal.signal(signal.SIGHUP, signal.SIG_IGN if is_ignored else signal.SIG_DFL)
    command = [sys.executable, "-m", "iaprof", "report", "-i", str(cap)]
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True)
    signal.signal(signal.SIGHUP, hangup)
    os.close(theirs)
    try:
        drawn = b""
        while b"Quit" not in drawn:
            drawn += os.read(ours, 1 << 16)
        # when
        os.close(ours)
        # then
        assert process.wait(LONGEST_WAIT_S) == -signal.SIGHUP
    finally:
        process.kill()


@pytest.mark.parametrize("by", ["transfer", "wait", "energy"])
def test_a_table_without_stalls_has_no_tree(by: str) -> None:
    with pytest.raises(UsageError, match=f"no tree of --by {by}: choose from kernel, line"):
        subject.grouping_of(by)


@pytest.mark.parametrize(
    ("seconds", "expected"), [(1.0, 0.01), (10.37, 0.1), (300.0, 2), (86_400.0, 600), (1e6, 0.0), (0.0, 0.0)]
)
def test_a_recording_is_divided_into_two_hundred_intervals_at_most(
    tmp_path: Path, seconds: float, expected: float
) -> None:
    header = HEADER | {"end_ns": 1_000_000_000 + int(seconds * 1e9)}
    assert interval_of(capture(tmp_path / "c", header, stall=[stall(1, record(8, sbid=1))])) == expected
