"""Waits of captures: sums, selections and time lines, and invalid headers."""

from __future__ import annotations

import json
import os
import re
import struct
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from iaprof.cli.main import main
from iaprof.cli.verbs import record as record_command
from iaprof.formats.capture.reader import CaptureReader
from iaprof.formats.header.waits import WAIT, WAITING, WaitFlags, WaitTotals, total_waits, unended_waits
from iaprof.record.capture.finish import finish
from iaprof.record.options import Options
from iaprof.record.spool import FrameKind, Spool, SpoolReader
from iaprof.report.profile import ReportOptions
from iaprof.report.views.thread_runs import wait_runs
from unit.capturing import HEADER, capture
from unit.in_process import iaprof

S = 1_000_000_000
KEPT = Path(__file__).parents[3] / "data" / "captures" / "format-8.parquet"


def wait(begin: int, ns: int, tid: int = 7, function: str = "zeCommandQueueSynchronize", **more: Any) -> dict[str, Any]:
    row = {"time_ns": begin, "end_ns": begin + ns, "waited_ns": ns, "count": 1, "pid": 7, "tid": tid, "comm": "app"}
    return row | {"function": function, "handle": 0x1000, "stack": 0, "flags": 0} | more


WAITS = [
    wait(S, 100_000_000),
    wait(2 * S, 300_000_000),
    wait(3 * S, 50_000_000, tid=8, function="zeEventHostSynchronize", handle=0x2000),
    wait(3 * S + 60_000_000, 50_000_000, tid=8, function="zeEventHostSynchronize", handle=0x3000),
    wait(4 * S, S, tid=8, waited_ns=5_000_000, count=1000, flags=int(WaitFlags.ADDED_UP)),
    wait(6 * S, 2 * S, pid=9, tid=9, comm="", flags=int(WaitFlags.NOT_ENDED)),
]


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    about = HEADER | {"end_ns": 11 * S, "clock": {"monotonic_ns": S, "realtime_ns": 100 * S}}
    named = {"time_ns": S, "ppid": None, "event": "running", "ns_pid": None, "cgroup": None, "container": None}
    processes = [named | {"pid": pid, "tid": pid, "comm": "app", "uid": None, "gid": None} for pid in (7, 9)]
    capture(tmp_path / "c", about, wait=WAITS, process=processes)
    return tmp_path / "c"


def run(monkeypatch: pytest.MonkeyPatch, *words: object) -> int:
    monkeypatch.setattr("sys.argv", ["iaprof", *map(str, words)])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


def table(recorded: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    assert run(monkeypatch, "top", recorded, "--by=wait", "--json", "-q", *words) == 0
    return json.loads(capsys.readouterr().out)


def test_waits_are_ranked_by_time_and_add_up(
    recorded: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = table(recorded, monkeypatch, capsys)
    assert [(row["pid"], row["function"], row["waited_ns"], row["waits"]) for row in found["entries"]] == [
        (9, "zeCommandQueueSynchronize", 2 * S, 1),
        (7, "zeCommandQueueSynchronize", 405_000_000, 1002),
        (7, "zeEventHostSynchronize", 100_000_000, 2),
    ]
    assert [row["objects"] for row in found["entries"]] == [1, 1, 2]
    assert [row["handle"] for row in found["entries"]] == ["0x1000", "0x1000", None]
    assert found["total"] == {
        "waited_ns": sum(row["waited_ns"] for row in WAITS),
        "waits": 1005,
        "longest_ns": 2 * S,
        "not_ended": 1,
    }
    assert found["more"] == 0
    assert table(recorded, monkeypatch, capsys, "-n", "1")["total"] == found["total"]


def test_a_selection_keeps_times_processes_and_threads(
    recorded: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def waited(*words: str) -> int:
        return int(table(recorded, monkeypatch, capsys, *words)["total"]["waited_ns"])

    assert waited("--tid", "8") == 105_000_000
    assert waited("--pid", "9") == 2 * S
    assert waited("--time", "0.9s-1.5s") == 300_000_000
    # a wait counts as a whole if it overlaps the time range
    assert waited("--time", "6s-6.5s") == 2 * S


def test_intervals_add_up(recorded: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    found = table(recorded, monkeypatch, capsys, "--per-interval")
    sums = {part["start_s"]: part["total"]["waited_ns"] for part in found["intervals"]}
    assert sums == {0: 100_000_000, 1: 300_000_000, 2: 100_000_000, 3: 5_000_000, 5: 2 * S}


def test_folded_stacks_count_microseconds(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, "report", "--waits", "-q", KEPT) == 0
    out = capsys.readouterr().out
    rows = CaptureReader(KEPT).table("wait").to_pylist()
    us = Counter(line.rsplit(" ", 1)[0] for line in out.splitlines())
    assert max(us.values()) == 1
    assert (
        sum(int(line.rsplit(" ", 1)[1]) for line in out.splitlines()) == sum(row["waited_ns"] for row in rows) // 1000
    )
    assert any(";py::Layer.forward:/opt/example/train.py;" in line for line in out.splitlines())


def test_time_lines_have_all_waits_but_short_ones(
    recorded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(monkeypatch, "report", recorded, "-q", "-o", tmp_path / "x.trace.json") == 0
    slices = [each for each in json.loads((tmp_path / "x.trace.json").read_text())["traceEvents"] if each["ph"] == "X"]
    assert {each["cat"] for each in slices} == {"waits"}
    assert [(each["name"], each["ts"], each["dur"], each["args"]) for each in slices if each["pid"] == 7] == [
        ("zeCommandQueueSynchronize", 0.0, 100_000.0, {"waits": 1}),
        ("zeCommandQueueSynchronize", 1_000_000.0, 300_000.0, {"waits": 1}),
        ("zeEventHostSynchronize", 2_000_000.0, 50_000.0, {"waits": 1}),
        ("zeEventHostSynchronize", 2_060_000.0, 50_000.0, {"waits": 1}),
    ]
    assert [(each["ts"], each["dur"]) for each in slices if each["pid"] == 9] == [(5_000_000.0, 2_000_000.0)]


def test_an_unended_wait_lasts_until_its_thread_ends(tmp_path: Path) -> None:
    # given a thread that ends, and an earlier one with the same tid
    waiting = np.zeros(2, WAITING)
    waiting["since"], waiting["pid"], waiting["function"] = [5 * S, 6 * S], 7, 1
    rows = unended_waits(np.array([70, 71], np.uint32), waiting, 20 * S)
    assert rows["waited"].tolist() == [15 * S, 14 * S]
    spool = Spool(tmp_path / "s")
    spool.write(FrameKind.WAITS, rows.tobytes(), time=1)
    for time, tid in ((4 * S, 70), (9 * S, 70), (10 * S, 72)):
        spool.write(FrameKind.SIDEBAND, exit_record(time, 7, tid), time=time)
    spool.close()
    # when
    finish(SpoolReader(tmp_path / "s"), tmp_path / "c")
    # then
    found = CaptureReader(tmp_path / "c")
    assert [row["waited_ns"] for row in found.table("wait").to_pylist()] == [4 * S, 14 * S]
    assert found.header["waits"] == {"waits": 2, "waited_ns": 18 * S, "short": 0, "not_ended": 2}


def exit_record(time: int, pid: int, tid: int) -> bytes:
    """A PERF_RECORD_EXIT with the sample_id fields that the recorder asks for."""
    body = struct.pack("<IIIIQ", pid, 1, tid, 1, time) + struct.pack("<IIQII", pid, tid, time, 0, 0)
    return struct.pack("<IHH", 4, 0, 8 + len(body)) + body


def test_invalid_wait_records_in_a_spool_are_damage(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "s")
    spool.write(FrameKind.WAITS, bytes(WAIT.itemsize + 1), time=1)
    noise = np.frombuffer(np.random.default_rng(1).bytes(50 * WAIT.itemsize), WAIT)
    spool.write(FrameKind.WAITS, noise.tobytes(), time=2)
    spool.close()
    finish(SpoolReader(tmp_path / "s"), tmp_path / "c")
    found = CaptureReader(tmp_path / "c")
    assert len(found.table("wait")) == 50
    assert set(found.table("wait")["function"].to_pylist()) == {"[unknown function]"}
    assert [loss["source"] for loss in found.table("loss").to_pylist()][:1] == ["spool"]


@pytest.mark.parametrize(
    "junk", [None, 1, "x", [], {}, {"waits": 1}, {"waits": -1, "waited_ns": 0, "short": 0, "not_ended": 0}]
)
def test_untrusted_headers(junk: Any) -> None:
    assert WaitTotals.from_header({"waits": junk}) is None
    assert total_waits([{"waits": junk}, {}]) is None
    good = {"waits": 3, "waited_ns": 10, "short": 1, "not_ended": 0}
    assert total_waits([{"waits": junk}, {"waits": good}, {"waits": good}]) == WaitTotals(6, 20, 2, 0)


@pytest.mark.parametrize("verb", [("top", "--by=wait"), ("report", "--waits")])
@pytest.mark.parametrize(
    ("header", "said"),
    [
        ({}, "iaprof: this capture has no waits: record with 'iaprof record --waits'"),
        ({"waits_wanted": True}, "iaprof: no waits were recorded: nothing waited, .*; waits lost: 1,000"),
    ],
)
def test_why_a_capture_has_no_waits(tmp_path: Path, verb: tuple[str, ...], header: dict[str, Any], said: str) -> None:
    losses = {"losses": [{"source": "waits", "what": "lost", "count": 1000}]}
    done = iaprof(*verb, capture(tmp_path / "c", HEADER | losses | header))
    assert (done.code, done.out) == (1, "")
    assert re.fullmatch(f"{said}\n", done.err)


@pytest.mark.parametrize(("words", "asked"), [((), False), (("--waits",), True)])
def test_waits_are_recorded_only_if_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], asked: bool
) -> None:
    options: list[Options] = []

    def record(given: Options, *_: object) -> int:
        options.append(given)
        return 0

    monkeypatch.setattr(record_command, "_record", record)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert run(monkeypatch, "record", "-o", tmp_path / "c", *words) == 0
    assert [each.waits for each in options] == [asked]


def test_waits_of_threads_beyond_the_limit_share_a_row(recorded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("iaprof.report.runs.MAX_PAIRS", 1)
    found = wait_runs(CaptureReader(recorded), ReportOptions())
    assert [thread.comm for thread in found.threads] == ["app", "[others]"]
    assert found.kernels == ["zeCommandQueueSynchronize", "[others]"]
    assert found.count.sum() == 5  # all but those that the recorder added up
