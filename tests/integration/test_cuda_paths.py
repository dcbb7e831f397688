"""Launches that our library in the process recognises, and that do not enter the kernel, have their own stacks."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pyarrow.compute as pc
import pytest

from iaprof.formats.capture.reader import CaptureReader
from iaprof.formats.wire.launches import LaunchFlags
from iaprof.record.spool import FrameKind
from integration.recording import BARE, CUDA_IN_TURN, IAPROF, iaprof, spool_of, spooled
from integration.test_cuda import LOAD, Recorded, launched, machine as machine
from pythons.frames import Frames, frames_of, frames_told
from standin.cuda.machine import Machine
from standin.cuda.runtime import REDUCE, SCALE, cubin
from thorough import thorough
from waiting import until

pytestmark = CUDA_IN_TURN
PROGRAMS = Path(__file__).parents[1] / "pythons" / "programs"


class Launched:
    """Launches of CUDA's program: other tests have programs of other drivers at the same time."""

    def __init__(self, path: Path) -> None:
        self.capture = CaptureReader(path)
        table = self.capture.table("launch")
        table = table.filter(pc.is_valid(table["correlation"]))  # CUDA's
        self.pid, self.number = Counter(table["pid"].to_pylist()).most_common(1)[0]
        self.table = table.filter(pc.equal(table["pid"], self.pid))
        others = self.capture.header["totals"]["launches"] - self.number
        self.in_kernel = self.capture.header["probes"]["launches"] - others
        """How many entered the kernel."""

    def wrong(self, told: dict[int, list[Frames]]) -> list[tuple[Frames, Frames]]:
        """Frames of Python of launches, and other ones that the program told of these: both by thread, in order.

        On a busy machine stacks are lost, as the program fills the ring buffer within milliseconds; that is counted.
        """
        lost = sum(each["count"] or 0 for each in self.capture.header["losses"] if each["source"] == "stacks")
        lacking = 0
        wrong = []
        found = frames_of(self.capture, self.pid)
        assert {tid: len(launches) for tid, launches in found.items()} == {tid: len(own) for tid, own in told.items()}
        for tid, launches in found.items():
            lacking += launches.count([])
            wrong += [pair for pair in zip(launches, told[tid], strict=True) if pair[0] and pair[0] != pair[1]]
        assert lacking <= lost
        return wrong


@pytest.fixture(scope="module")
def calls(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library with which Python launches."""
    made = tmp_path_factory.mktemp("calls") / "calls.so"
    subprocess.run(["cc", "-O1", "-shared", "-fPIC", "-o", made, PROGRAMS / "cuda_calls.c", "-ldl"], check=True)
    return made


def record_python(machine: Machine, *words: str | Path) -> None:
    """Records a program of Python; its last argument is a file for which it waits, until its interpreter is known."""
    capture, start = machine.folder / "cap", machine.folder / "start"
    python = sys._base_executable  # type: ignore[attr-defined]
    command = [*IAPROF, "record", "-o", capture, *BARE, "--", python, *words, start]
    with subprocess.Popen(command, env=os.environ | machine.env(), stderr=subprocess.PIPE, text=True) as recorder:
        until(lambda: spool_of(capture).exists() and spooled(capture, FrameKind.INTERPRETER), recorder)
        start.touch()
        _, said = recorder.communicate()
    assert recorder.returncode == 0, said


def test_every_launch_has_the_frames_that_the_program_tells(machine: Machine, calls: Path, tmp_path: Path) -> None:
    # when three threads launch from many paths again and again
    record_python(machine, PROGRAMS / "launches.py", calls, cubin(), REDUCE, tmp_path / "told", "150")
    # then each has its own frames, in its order
    found = Launched(machine.folder / "cap")
    told = frames_told(tmp_path / "told")
    assert found.wrong(told) == []
    assert len(told) == 3
    assert sum(map(len, told.values())) == found.number > 15_000
    # though many of them did not enter the kernel
    assert found.in_kernel < found.number * 3 // 4


def test_places_that_launch_by_turns_are_told_apart(machine: Machine) -> None:
    # when places launch the same kernel from the same frame, by turns
    turn = ("launch", REDUCE, "A", 3, 10, "launch", REDUCE, "B", 2, 10, "launch", REDUCE, "C", 1, 10)
    recorded = Recorded(machine, *LOAD, "repeat", 2000, *turn, "end", "sync")
    # then each stack has as many launches as its place
    found = Launched(recorded.path)
    assert sorted(Counter(found.table["stack"].to_pylist()).values()) == [2000, 4000, 6000]
    assert found.in_kernel < 6000


def test_more_threads_than_have_room(machine: Machine) -> None:
    # when threads come and go, and some are more than have room for paths
    recorded = Recorded(
        machine, *LOAD, "repeat", 3, "threads", 50, REDUCE, "A", 200, 10, "end", "launch", SCALE, "B", 500, 10, "sync"
    )
    # then nothing is missing
    assert launched(recorded) == {REDUCE: 30_000, SCALE: 500}
    launches = recorded.own("launch")
    executions = recorded.capture.table("execution")
    assert sorted(filter(None, launches["correlation"].to_pylist())) == sorted(executions["correlation"].to_pylist())
    assert set(Counter(launches["tid"].to_pylist()).values()) == {200, 500}


@thorough
def test_launches_faster_than_they_are_sent(machine: Machine) -> None:
    recorded = Recorded(machine, *LOAD, "launch", REDUCE, "A", 400_000, 1, "sync")
    assert launched(recorded) == {REDUCE: 400_000}
    assert not recorded.lost("lost")


@thorough
def test_each_output_file_has_its_launches_with_their_stacks(machine: Machine) -> None:
    # when the output changes while the program launches
    work = ("pace", 100, "launch", REDUCE, "A", 30_000, 10, "sync")
    command = machine.programs.command(*LOAD, *work)
    options = ("--switch-output=0.7s", "-o", machine.folder / "part")
    done = iaprof("record", *options, *BARE, "--", *command, env=machine.env())
    assert done.code == 0, done.err
    # then the files have all launches, once, and nearly all have their stack
    files = [Launched(path) for path in sorted(machine.folder.glob("part*"))]
    numbers: Counter[int] = Counter()
    without = 0
    for file in files:
        own = [row for row in file.table.to_pylist() if not row["flags"] & LaunchFlags.CARRIED]
        numbers.update(row["correlation"] for row in own)
        without += sum(row["stack"] == 0 for row in own)
    assert len(files) >= 3
    assert set(numbers.values()) == {1}
    assert len(numbers) == 30_000
    assert without <= 20 * len(files)
    assert files[1].in_kernel < files[1].number // 2


MANY_LINES = """
import sys, time
from launching import launch, prepare, wait_for
*told, start = sys.argv[1:]
prepare(*told)
wait_for(start)
exec("def rounds(number):\\n for _ in range(number):\\n" + "  launch()\\n" * 40)
for number in [*[1] * 60, 300]:
    rounds(number)
    time.sleep(0.05)
"""


def test_many_lines_that_launch_the_same_kernel_from_the_same_frame(
    machine: Machine, calls: Path, tmp_path: Path
) -> None:
    (program := tmp_path / "lines.py").write_text(f"import sys; sys.path.insert(0, {str(PROGRAMS)!r})\n{MANY_LINES}")
    record_python(machine, program, calls, cubin(), REDUCE, tmp_path / "told")
    found = Launched(machine.folder / "cap")
    assert found.wrong(frames_told(tmp_path / "told")) == []
    assert found.number == 40 * 360
    assert found.in_kernel < found.number // 4


CLOSES = """
import os, sys, tempfile
from launching import launch, prepare, wait_for
*told, folder, start = sys.argv[1:]
prepare(*told)
wait_for(start)
def one():
    launch()
def other():
    launch()
for _ in range(300):
    one()
shared = [int(fd) for fd in os.listdir("/proc/self/fd") if os.path.islink(f"/proc/self/fd/{fd}")
          and os.readlink(f"/proc/self/fd/{fd}").startswith("/memfd:iaprof")]
assert len(shared) == 1, shared
os.close(shared[0])
own = os.memfd_create("own")
if own != shared[0]:
    os.dup2(own, shared[0])
os.ftruncate(shared[0], 1 << 20)
for _ in range(300):
    other()
    one()
content = os.pread(shared[0], 1 << 20, 0)
open(folder + "/content", "w").write(str(sum(content)))
"""


def test_a_program_that_uses_our_descriptor_for_its_own_memory(machine: Machine, calls: Path, tmp_path: Path) -> None:
    # when a program closes our memory, and has its own under that number
    (program := tmp_path / "closes.py").write_text(f"import sys; sys.path.insert(0, {str(PROGRAMS)!r})\n{CLOSES}")
    record_python(machine, program, calls, cubin(), REDUCE, tmp_path / "told", tmp_path)
    # then nobody has written to it, and every launch is there with its frames
    assert (tmp_path / "content").read_text() == "0"
    found = Launched(machine.folder / "cap")
    assert found.wrong(frames_told(tmp_path / "told")) == []
    assert found.number == 900


def test_a_limit_of_files_sizes_does_not_end_the_program(machine: Machine) -> None:
    # given a program that may write small files only, which for shared memory counts, too
    words = " ".join(map(str, machine.programs.command(*LOAD, "launch", REDUCE, "A", 2000, 10, "sync")))
    command = ("sh", "-c", f"ulimit -f 2048; exec {words}")
    done = iaprof("record", "-o", machine.folder / "cap", *BARE, "--", *command, env=machine.env())
    assert done.code == 0, done.err
    assert Launched(machine.folder / "cap").number == 2000
