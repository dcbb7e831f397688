"""The second process of a large capture's join: it changes nothing but the time that a report takes.

Most tests have its code run by a thread, with everything going through a pipe as it does between two processes; the
others start one.
"""

from __future__ import annotations

import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from iaprof.basics.errors import IaprofError
from iaprof.formats.capture.limits import CaptureError
from iaprof.formats.capture.reader import CaptureReader
from iaprof.formats.capture.schema import KINDS
from iaprof.formats.capture.writer import CaptureWriter
from iaprof.formats.profile import Profile
from iaprof.report.cpu_names import SymbolOptions
from iaprof.report.gpu.module import GpuModuleLoader
from iaprof.report.join import joining
from iaprof.report.join.candidates import Method, Rule
from iaprof.report.join.joining import Helper, Task, helping, join
from iaprof.report.join.placements import LAUNCH_COLUMNS, Placed, place_kernels
from iaprof.report.join.selection import Selection, TimeRange
from iaprof.report.join.shares import Joined
from iaprof.report.merging import merge
from iaprof.report.parts import build_parts
from iaprof.report.profile import ReportOptions, build
from thorough import thorough
from unit.builds import no_descriptor_is_lost
from unit.capturing import HEADER, launch, record, stall
from waiting import until

MS, S = 1_000_000, 1_000_000_000
KERNELS = [0x8000_0001_0000 + 0x400 * number for number in range(6)]
STREAMS = [{"layout": "xe2", "ip_version": [20, 1, 0], "card": card} for card in ("card0", "card1")]
GROUPS = 9


def made(path: Path, seed: int = 1, **header: Any) -> Path:
    """A capture of 3 s: three processes with overlapping kernels, each launched from several stacks."""
    rng = random.Random(seed)
    launches = [
        launch(S + rng.randrange(200 * MS, 2_500 * MS), pid, address + 0x100 * (pid % 2), rng.randrange(1, 4),
               size=0x300, name=f"k{address:x}", comm=f"app{pid}", tid=pid + rng.randrange(2))
        for pid in (7, 8, 9) for address in rng.sample(KERNELS, 4) for _ in range(rng.randrange(1, 12))
    ]  # fmt: skip
    reads = []
    for number in range(GROUPS * 4):
        end = S + (number + 1) * 80 * MS
        addresses = [rng.choice(KERNELS) + 8 * rng.randrange(130) for _ in range(30)]
        records = [record(address, sbid=rng.randrange(1, 9), send=rng.randrange(3)) for address in addresses]
        reads.append(stall(end, *records, stream=number % 2, begin_ns=end - 85 * MS))
    return written(path, launches, [reads[first : first + 4] for first in range(0, len(reads), 4)], **header)


def written(path: Path, launches: list[dict[str, Any]], groups: list[list[dict[str, Any]]], **header: Any) -> Path:
    """A capture with these row groups of stalls."""
    with path.open("wb") as file:
        writer = CaptureWriter(file)
        for group in groups:
            writer.write("stall", pa.array(group, KINDS["stall"]))
        writer.write("launch", pa.array(launches, KINDS["launch"]))
        writer.close(HEADER | {"streams": STREAMS, "end_ns": 4 * S} | header)
    return path


class Thread(threading.Thread):
    """Stands in for a process."""

    def __init__(self, _: str, memory_bytes: int, **__: Any) -> None:
        self.channel, theirs = socket.socketpair()
        super().__init__(target=joining.help_other, args=[str(memory_bytes), theirs.detach()], daemon=True)
        self.start()

    def close(self) -> None:
        """Does nothing: the thread ends by itself."""
        self.join(0.001)


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs two threads instead of two processes."""
    monkeypatch.setattr(joining, "Worker", Thread)
    in_two(monkeypatch)


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs two processes, on any number of cores."""
    in_two(monkeypatch)


def in_two(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joining, "_FEWEST_GROUPS", 2)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})


def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joining, "_FEWEST_GROUPS", 1 << 30)


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


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.usefixtures("threads")
def test_a_report_is_the_same_on_one_core_and_on_two(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, choice: str
) -> None:
    for seed in (1, 5):
        path = made(tmp_path / "c", seed)
        two = reported(path, CHOICES[choice])
        with monkeypatch.context() as patch:
            alone(patch)
            one = reported(path, CHOICES[choice])
        assert two == one
        assert one[1] >= one[2] // 11 > 0


@pytest.mark.usefixtures("threads")
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
    alone(monkeypatch)
    assert reported(tmp_path / "m", ReportOptions(interval_s=0.5)) == two
    assert two[1] == sum(reported(path, ReportOptions())[1] for path in paths) == 2 * GROUPS * 4 * 30


def joined(reader: CaptureReader, helper: Helper | None) -> tuple[Joined, Placed, int]:
    placed = place_kernels(reader.table("launch", LAUNCH_COLUMNS), [])
    found, records, *_ = join(reader, Task(placed, S), helper)
    return found, placed, records


def columns(found: Joined, placed: Placed) -> dict[str, Any]:
    return {name: each.tobytes() for name, each in vars(found).items()} | {"sites": placed.sites}


@pytest.mark.usefixtures("processes")
def test_the_second_process_joins_its_half_and_ends(tmp_path: Path) -> None:
    reader = CaptureReader(made(tmp_path / "c"))
    with no_descriptor_is_lost(sockets=True):
        with helping(reader) as helper:
            assert helper is not None
            process = helper._process
            found, placed, records = joined(reader, helper)
        one, same_placed, same_records = joined(reader, None)
        assert columns(found, placed) == columns(one, same_placed)
        assert records == same_records == GROUPS * 4 * 30
        assert_gone(process.pid)
        del helper, process


def assert_gone(pid: int | None) -> None:
    """Asserts that the process is not even a zombie."""
    with pytest.raises(ChildProcessError):
        os.waitpid(pid or 0, os.WNOHANG)
    assert not os.path.exists(f"/proc/{pid}")


ENDED = r"^the second process that joins the stalls of .*/c was ended, as happens when memory runs out: try again$"


@pytest.mark.parametrize("when", ["it starts", "it reads its task", "it sends what it found"])
@pytest.mark.usefixtures("processes")
def test_a_killed_second_process_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    # given a task and an answer that are too long for a pipe
    many = 10 if when == "it starts" else 20_000
    addresses = [KERNELS[0] + 0x100 * number for number in range(many)]
    launches = [launch(S, 7, address, 1, size=0x100) for address in addresses]
    records = [record(address + 8, sbid=1) for address in addresses]
    reader = CaptureReader(written(tmp_path / "c", launches, [[stall(2 * S, *records)]] * 4))
    task = Task(place_kernels(reader.table("launch", LAUNCH_COLUMNS), []), S)
    with helping(reader) as helper:
        assert helper is not None
        process = helper._process
        # when
        if when == "it starts":
            process.kill()
            helper.give(task)
        elif when == "it reads its task":
            process.send_signal(signal.SIGSTOP)
            threading.Timer(0.05, process.kill).start()
            helper.give(task)
        else:
            helper.give(task)
            assert helper._pipe.poll(30)
            status = Path(f"/proc/{process.pid}/status")
            until(lambda: "\nState:\tS" in status.read_text())  # it has filled the pipe then
            process.kill()
        # then
        with pytest.raises(IaprofError, match=ENDED):
            helper.answer()
    assert_gone(process.pid)


def test_one_process_joins_all_if_no_second_can_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(command: list[str], **_: Any) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    path = made(tmp_path / "c")
    expected = reported(path, ReportOptions())
    in_two(monkeypatch)
    monkeypatch.setattr(subprocess, "Popen", refuse)
    assert reported(path, ReportOptions()) == expected


@pytest.mark.parametrize("group", [0, 1, 2, 3])
@pytest.mark.usefixtures("threads")
def test_a_damaged_row_group_has_one_message_in_either_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, group: int
) -> None:
    # given reads of an unknown stream in one of the row groups, and then reads without words
    for wrong in (stall(2 * S, record(64, sbid=1), stream=2), stall(2 * S) | {"w0": None}):
        groups = [[stall(2 * S, record(64, sbid=1))] for _ in range(4)]
        groups[group] = [wrong]
        path = written(tmp_path / "c", [], groups)
        with monkeypatch.context() as patch, pytest.raises(CaptureError) as expected:
            alone(patch)
            reported(path, ReportOptions())
        with pytest.raises(CaptureError) as raised:
            reported(path, ReportOptions())
        assert str(raised.value) == str(expected.value)
        assert re.search("stream that its header does not name|is damaged in its stall rows", str(raised.value))


@pytest.mark.parametrize("seed", [2, None])
@pytest.mark.usefixtures("threads")
def test_a_replaced_or_deleted_capture_is_not_joined(tmp_path: Path, seed: int | None) -> None:
    # given a capture that is replaced or deleted before the second process opens it
    reader = CaptureReader(made(tmp_path / "c"))
    (tmp_path / "c").unlink()
    if seed is not None:
        made(tmp_path / "c", seed, end_ns=5 * S)
    message = "c cannot be opened" if seed is None else r"c was changed while it was read: try again$"
    with pytest.raises(IaprofError, match=message), helping(reader) as helper:
        joined(reader, helper)


@pytest.mark.usefixtures("threads")
def test_a_memory_error_in_the_second_process_is_a_memory_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    share = joining._share

    def scarce(capture: Any, task: Any, which: tuple[int, int], progress: Any) -> Any:
        if which[0] == 1:
            raise MemoryError
        return share(capture, task, which, progress)

    monkeypatch.setattr(joining, "_share", scarce)
    with pytest.raises(MemoryError):
        reported(made(tmp_path / "c"), ReportOptions())


# Ctrl-C


@pytest.fixture
def report(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A report that two processes make in a session of its own, and that never ends."""
    words = ["iaprof", "report", str(made(tmp_path / "c")), "-o", str(tmp_path / "x.folded")]
    script = f"""
import os, sys
os.sched_getaffinity = lambda pid: {{0, 1}}  # on one core there would be one
sys.argv = {words}
import time
from iaprof.cli.start import main
from iaprof.report.join import joining
def work(*_):
    while True:
        time.sleep(0.01)  # not long: a signal that comes right before does not end it
joining._share = work  # in this process; the second one does its share
main()
"""
    with subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.PIPE, start_new_session=True) as process:
        try:
            yield process
        finally:
            process.kill()


def helpers(pid: int) -> list[int]:
    """Returns the second processes of a process."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in children if b"help_other" in Path(f"/proc/{child}/cmdline").read_bytes()]


def test_ctrl_c_leaves_no_process_and_no_file(report: subprocess.Popen[bytes], tmp_path: Path) -> None:
    # given a second process that has just started
    until(lambda: helpers(report.pid), report)
    (helper,) = helpers(report.pid)
    # when a terminal signals its foreground process group
    os.killpg(report.pid, signal.SIGINT)
    _, said = report.communicate(timeout=120)
    # then
    assert report.returncode not in (0, 1)
    assert b"Traceback" not in said, said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c"]
    until(lambda: not os.path.exists(f"/proc/{helper}"))
