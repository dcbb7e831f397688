"""The join of a large capture, whose row groups threads read ahead: that changes nothing but the time it takes."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from iaprof.formats.capture.limits import CaptureError
from iaprof.formats.capture.reader import CaptureReader
from iaprof.formats.capture.schema import KINDS
from iaprof.formats.capture.writer import CaptureWriter
from iaprof.formats.profile import Profile
from iaprof.report.cpu_names import SymbolOptions
from iaprof.report.gpu.module import GpuModuleLoader
from iaprof.report.join.candidates import Method, Rule
from iaprof.report.join.selection import Selection, TimeRange
from iaprof.report.merging import merge
from iaprof.report.parts import build_parts
from iaprof.report.profile import ReportOptions, build
from thorough import thorough, usually
from unit.capturing import HEADER, launch, record, stall

MS, S = 1_000_000, 1_000_000_000
KERNELS = [0x8000_0001_0000 + 0x400 * number for number in range(6)]
STREAMS = [{"layout": "xe2", "ip_version": [20, 1, 0], "card": card} for card in ("card0", "card1")]
GROUPS = 9
READS = GROUPS * 4


def made(path: Path, seed: int = 1, groups: int = GROUPS, **header: Any) -> Path:
    """A capture of 3 s: three processes with overlapping kernels, each launched from several stacks."""
    rng = random.Random(seed)
    launches = [
        launch(S + rng.randrange(200 * MS, 2_500 * MS), pid, address + 0x100 * (pid % 2), rng.randrange(1, 4),
               size=0x300, name=f"k{address:x}", comm=f"app{pid}", tid=pid + rng.randrange(2))
        for pid in (7, 8, 9) for address in rng.sample(KERNELS, 4) for _ in range(rng.randrange(1, 12))
    ]  # fmt: skip
    reads = []
    for number in range(READS):
        end = S + (number + 1) * 80 * MS
        addresses = [rng.choice(KERNELS) + 8 * rng.randrange(130) for _ in range(30)]
        records = [record(address, sbid=rng.randrange(1, 9), send=rng.randrange(3)) for address in addresses]
        reads.append(stall(end, *records, stream=number % 2, begin_ns=end - 85 * MS))
    each = READS // groups
    return written(path, launches, [reads[first : first + each] for first in range(0, READS, each)], **header)


def written(path: Path, launches: list[dict[str, Any]], groups: list[list[dict[str, Any]]], **header: Any) -> Path:
    """A capture with these row groups of stalls."""
    with path.open("wb") as file:
        writer = CaptureWriter(file)
        for group in groups:
            writer.write("stall", pa.array(group, KINDS["stall"]))
        writer.write("launch", pa.array(launches, KINDS["launch"]))
        writer.close(HEADER | {"streams": STREAMS, "end_ns": 4 * S} | header)
    return path


@pytest.fixture(params=["ahead", "one by one"])
def order(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How row groups are read, on any number of cores."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1} if request.param == "ahead" else {0})
    return str(request.param)


def content(profile: Profile) -> dict[str, Any]:
    """Returns the profile's members, arrays as bytes."""
    return {name: each.tobytes() if hasattr(each, "tobytes") else each for name, each in vars(profile).items()}


def reported(path: Path, wanted: ReportOptions) -> tuple[dict[str, Any], int, int]:
    """Returns the profile, and the numbers of records and samples."""
    with GpuModuleLoader() as modules:
        reader = CaptureReader(path)
        # Merged captures would start processes that symbolize frames, of which these captures have none.
        report = (
            build_parts(reader, modules, wanted, SymbolOptions())
            if reader.is_merged
            else build(reader, modules, wanted)
        )
    return content(report.profile), report.facts.records, report.facts.stalls


ALL = Selection()
CHOICES = {
    "proportional": ReportOptions(),
    "latest": ReportOptions(Selection(Rule(Method.LATEST))),
    "none": ReportOptions(Selection(Rule(Method.NONE))),
    "split": ReportOptions(Selection(Rule(split_ambiguous=True))),
    "none, split": ReportOptions(Selection(Rule(Method.NONE, split_ambiguous=True))),
    "a short horizon": ReportOptions(Selection(Rule(window_ns=5 * MS))),
    "intervals": ReportOptions(interval_s=0.25),
    "a time": ReportOptions(Selection(time_range=TimeRange.parse("300ms-2s")), interval_s=0.5),
    "a share of the time": ReportOptions(Selection(time_range=TimeRange.parse("10%-60%"))),
    "a device": ReportOptions(Selection(devices=("card1",))),
    "a process": ReportOptions(Selection(pids=frozenset({8}))),
    "threads": ReportOptions(Selection(tids=frozenset({7, 9, 10}))),
    "a kernel": ReportOptions(Selection(kernel=re.compile("k80000001(04|08)00"))),
    "a reason": ReportOptions(Selection(comms=frozenset({"app9"}), reasons=frozenset({"send"}))),
}


@pytest.mark.parametrize("choice", usually(list(CHOICES)[::3], CHOICES))
def test_a_report_does_not_depend_on_row_groups_or_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, choice: str
) -> None:
    for seed in (1, 5):
        several = reported(made(tmp_path / "several", seed), CHOICES[choice])
        one = reported(made(tmp_path / "one", seed, groups=1), CHOICES[choice])
        with monkeypatch.context() as patch:
            patch.setattr(os, "sched_getaffinity", lambda pid: {0})
            assert reported(tmp_path / "several", CHOICES[choice]) == several == one
        assert one[1] >= one[2] // 11 > 0


@thorough
def test_the_parts_of_a_merged_capture_are_the_same_on_two_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [
        made(
            tmp_path / str(seed), seed, host={"name": f"node{seed}"}, clock={"monotonic_ns": S, "realtime_ns": seed * S}
        )
        for seed in (4, 5)
    ]
    # given parts with too many reads for a shared row group
    monkeypatch.setattr("iaprof.formats.capture.writer._SMALL", 0)
    merge(paths, tmp_path / "m")
    two = reported(tmp_path / "m", ReportOptions(interval_s=0.5))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0})
    assert reported(tmp_path / "m", ReportOptions(interval_s=0.5)) == two
    assert two[1] == sum(reported(path, ReportOptions())[1] for path in paths) == 2 * READS * 30


def test_row_groups_come_in_their_order_and_their_threads_end(tmp_path: Path, order: str) -> None:
    reader = CaptureReader(made(tmp_path / "c"))
    before = set(threading.enumerate())  # some may be other tests', and end meanwhile
    ends: list[int] = []
    most = 0
    with reader.tables_ahead("stall", ("time_ns",)) as tables:
        for table in tables:
            ends += table["time_ns"].to_pylist()
            most = max(most, len(set(threading.enumerate()) - before))
    assert ends == sorted(ends)
    assert len(ends) == READS
    assert most == (2 if order == "ahead" else 0)
    # also if somebody reads no further
    with reader.tables_ahead("stall", ("time_ns",)) as tables:
        next(tables)
    assert set(threading.enumerate()) <= before


@pytest.mark.parametrize("group", [0, 1, 2, 3])
@pytest.mark.usefixtures("order")
def test_a_damaged_row_group_has_one_message(tmp_path: Path, group: int) -> None:
    # given reads of an unknown stream in one of the row groups, and then reads without words
    for wrong, message in (
        (stall(2 * S, record(64, sbid=1), stream=2), "stream that its header does not name$"),
        (stall(2 * S) | {"w0": None}, "is damaged in its stall rows: column 'w0' has nulls$"),
    ):
        groups = [[stall(2 * S, record(64, sbid=1))] for _ in range(4)]
        groups[group] = [wrong]
        with pytest.raises(CaptureError, match=message):
            reported(written(tmp_path / "c", [], groups), ReportOptions())


@pytest.mark.parametrize("error", [MemoryError, OSError("the disk is gone"), KeyboardInterrupt])
@pytest.mark.usefixtures("order")
def test_what_ends_the_reading_of_a_row_group_ends_the_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException | type[BaseException]
) -> None:
    path = made(tmp_path / "c")
    before, reads = set(threading.enumerate()), count()

    def read(self: CaptureReader, index: int, columns: list[str], what: str) -> pa.Table:
        with self._damaged(what):
            if columns[0].startswith("stall") and next(reads) == 3:
                raise error
            return self._file.read_row_group(index, columns=columns)

    monkeypatch.setattr(CaptureReader, "_read", read)
    with pytest.raises((CaptureError, KeyboardInterrupt)) as raised:
        reported(path, ReportOptions())
    said = str(raised.value)
    assert "needs more memory for its stall rows" in said or "stall rows: the disk is gone" in said or not said
    assert set(threading.enumerate()) <= before


def test_without_room_for_threads_row_groups_are_read_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = made(tmp_path / "c")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    expected = reported(path, ReportOptions())

    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with CaptureReader(path).tables_ahead("stall", ("time_ns",)) as tables:
        ends = [table["time_ns"].to_pylist() for table in tables]
    assert len(ends) == GROUPS
    monkeypatch.undo()
    assert reported(path, ReportOptions()) == expected


# Ctrl-C


@pytest.fixture
def report(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A report in a session of its own whose reading never ends."""
    words = ["iaprof", "report", str(made(tmp_path / "c")), "-o", str(tmp_path / "x.folded")]
    script = f"""
import os, sys
os.sched_getaffinity = lambda pid: {{0, 1}}  # on one core no thread would read
sys.argv = {words}
import time
from iaprof.cli.start import main
from iaprof.formats.capture import reader
read_ahead = reader._Ahead.__iter__
def slowly(self):
    for table in read_ahead(self):
        print("reading", flush=True)
        while True:
            time.sleep(0.01)  # not long: a signal that comes right before does not end it
reader._Ahead.__iter__ = slowly
main()
"""
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True) as process:
        try:
            yield process
        finally:
            process.kill()


def test_ctrl_c_leaves_no_process_and_no_file(report: subprocess.Popen[bytes], tmp_path: Path) -> None:
    # given threads that read
    assert report.stdout is not None
    assert report.stdout.readline() == b"reading\n"
    # when a terminal signals its foreground process group
    os.killpg(report.pid, signal.SIGINT)
    _, said = report.communicate(timeout=120)
    # then
    assert report.returncode not in (0, 1)
    assert b"Traceback" not in said, said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c"]
