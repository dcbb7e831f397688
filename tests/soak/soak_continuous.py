"""A day of a recorder that stays, in minutes: many short programs, many files, little room on disk.

    sudo .venv/bin/python tests/soak/soak_continuous.py [SECONDS] [--programs N] [--files N]

A day of `--switch-output 10m` has 144 files, and here 1,440 programs, one for each minute, several at a time, each with
processes and modules of its own. The day takes as long as the programs do; only a file that is asked for waits until
the one before is finished, as two requests at once would make one file. The script fails if

- the memory or the descriptors of the recorder's processes grow after the first quarter,
- a stall or launch is in no file, and no file counts it as lost (others' are told apart by their name),
- finished files take more room than `--max-total`, or the files do not say how many were removed,
- a process of the recorder, a spool or a temporary file is left.

Files are read as soon as they are finished, as an upload would do, since the oldest are removed.
"""

from __future__ import annotations

import argparse
import collections
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.measuring import Recorder, machine, needs_root, print_table, scaled
from iaprof.formats.capture.reader import CaptureReader
from iaprof.formats.wire.launches import LaunchFlags
from integration.recording import has_met
from standin import runtime
from standin.hardware import Hardware
from waiting import until

MINUTES = 1440
FILES = 144
AT_ONCE = 2
GROWTH = 1.1  # of the medians of the second and the last quarter
SLACK_BYTES = 8 << 20  # of the allocator
MORE_DESCRIPTORS = 16
PROGRAM = f"tenant-{os.getpid()}"  # by which its launches are known
ROOM_FILES = 12  # so many of the first files fit


@dataclass
class Files:
    """What the finished files say, the removed ones too."""

    folder: Path
    read: set[str] = field(default_factory=set)
    stalls: int = 0
    launches: int = 0
    lost: collections.Counter[str] = field(default_factory=collections.Counter)
    unknown: set[str] = field(default_factory=set)  # losses whose number is not known
    removed: int = 0
    most_bytes: int = 0
    first_bytes: list[int] = field(default_factory=list)

    def look(self) -> None:
        """Reads the headers of files that have come."""
        total = 0
        for path in sorted(self.folder.glob("day.2*.parquet")):
            try:
                size = path.stat().st_size
                if path.name not in self.read:
                    self.add(path)
            except FileNotFoundError:
                continue  # removed meanwhile
            total += size
        self.most_bytes = max(self.most_bytes, total)

    def wait(self, number: int, recorder: Recorder) -> None:
        """Waits until as many files have come."""

        def have_come() -> bool:
            self.look()
            return len(self.read) == number

        until(have_come, recorder.process)

    def add(self, path: Path) -> None:
        """Reads one file's header, and whose launches it has."""
        capture = CaptureReader(path)
        header = capture.header
        for table in capture.tables("launch", ("comm", "flags")):
            is_new = (table["flags"].to_numpy() & LaunchFlags.CARRIED) == 0  # else it is in the previous file, too
            self.launches += table["comm"].filter(pa.array(is_new)).to_pylist().count(PROGRAM)
        self.read.add(path.name)
        self.first_bytes.append(path.stat().st_size)
        self.stalls += header["totals"]["stalls"]
        self.removed = max(self.removed, header["removed_files"]["files"])
        for loss in header["losses"]:
            name = f"{loss['source']} {loss['what']}"
            if loss["count"] is None:
                self.unknown.add(name)
            else:
                self.lost[name] += loss["count"]


@dataclass
class Use:
    """Memory and descriptors of the recorder's own process and its lasting children, over time."""

    bytes: list[int] = field(default_factory=list)
    descriptors: list[int] = field(default_factory=list)

    def look(self, recorder: Recorder) -> None:
        """Measures once; processes that write captures come and go, and are left out."""
        try:
            own, *others = recorder.parts()
            learner = sum(part.share_bytes for part in others if part.name == "learner")
            descriptors = len(os.listdir(f"/proc/{recorder.process.pid}/fd"))
        except OSError:  # one has just ended
            return
        self.bytes.append(own.share_bytes + learner)
        self.descriptors.append(descriptors)

    def problems(self) -> list[str]:
        """What has grown from the second quarter to the last one."""
        found = []
        quarter = max(len(self.bytes) // 4, 1)
        early, late = self.bytes[quarter : 2 * quarter], self.bytes[-quarter:]
        before, after = statistics.median(early or self.bytes), statistics.median(late)
        if after > before * GROWTH + SLACK_BYTES:
            found.append(f"memory grew from {scaled(before)} to {scaled(after)}")
        few, many = self.descriptors[quarter : 2 * quarter] or self.descriptors, self.descriptors[-quarter:]
        if statistics.median(many) > statistics.median(few) + MORE_DESCRIPTORS:
            found.append(f"descriptors grew from {statistics.median(few):.0f} to {statistics.median(many):.0f}")
        return found


class Tenants:
    """Short programs that come and go."""

    def __init__(self, hardware: Hardware, seed: int) -> None:
        self._env = os.environ | {"STANDIN_DIR": str(hardware.folder)}
        self._random = random.Random(seed)
        self._running: list[subprocess.Popen[str]] = []
        self.launches = 0
        # A pid would tell less: on a busy machine others get the same one later.
        self._program = hardware.folder / PROGRAM
        self._program.symlink_to(runtime.build().workload)

    def start(self) -> None:
        """Starts one, when there is room; takes what others said."""
        while len(self._running) >= AT_ONCE:
            self._take(self._running.pop(0))
        module = runtime.debug_elf("bmg", self._random.choice(["matmul", "attention"]))
        words: list[str | float] = []
        for option, value in (
            ("--launches", self._random.randint(20, 400)),
            ("--duration-us", self._random.choice([100, 400])),
            ("--threads", self._random.randint(1, 3)),
            ("--processes", self._random.randint(1, 2)),
            ("--depth", self._random.randint(2, 40)),
        ):
            words += [option, value]
        command = [str(self._program), *runtime.command([module], *words)[1:]]
        self._running.append(subprocess.Popen(command, env=self._env, stdout=subprocess.PIPE, text=True))

    def end(self) -> None:
        """Waits for all."""
        while self._running:
            self._take(self._running.pop(0))

    def _take(self, program: subprocess.Popen[str]) -> None:
        out, _ = program.communicate(timeout=120)
        if program.returncode:
            raise RuntimeError(f"a program of the stand-in ended with {program.returncode}")
        for summary in runtime.read_summaries(out):
            self.launches += summary.launches


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("seconds", type=float, nargs="?", default=3600.0, help="give up after this time")
    parser.add_argument("--programs", type=int, default=MINUTES)
    parser.add_argument("--files", type=int, default=FILES)
    parser.add_argument("--room", type=int, default=0, help="bytes for --max-total; without: found by a first hour")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    needs_root("recording")
    print(machine(), flush=True)
    with tempfile.TemporaryDirectory(prefix="iaprof-soak-") as name:
        folder = Path(name)
        room = arguments.room or _size_of_files(folder, arguments.seed, arguments.programs // arguments.files)
        return _day(folder, room, arguments)


def _size_of_files(folder: Path, seed: int, programs: int) -> int:
    """Records a few programs, and returns the room for ROOM_FILES files of as many."""
    with Hardware(folder / "first") as hardware, Recorder(hardware, folder / "first.parquet") as recorder:
        tenants = Tenants(hardware, seed)
        for _ in range(programs):
            tenants.start()
        tenants.end()
        recorder.stop()
    return (folder / "first.parquet").stat().st_size * ROOM_FILES


def _day(folder: Path, room: int, arguments: argparse.Namespace) -> int:
    output = folder / "day.parquet"
    files, use = Files(folder), Use()
    problems: list[str] = []
    asked = 0  # files
    began = time.monotonic()
    every = max(arguments.programs // arguments.files, 1)
    options = ("--switch-output=1h", f"--max-total={room}B", "--max-cpu=50%")
    with Hardware(folder / "gpu") as hardware, Recorder(hardware, output, options) as recorder:
        first = subprocess.Popen(
            runtime.command([runtime.debug_elf("bmg", "matmul")], "--launches", 10),
            env=os.environ | {"STANDIN_DIR": str(hardware.folder)}, stdout=subprocess.DEVNULL,
        )  # fmt: skip
        first.wait()  # the library has no probes before its first program: docs/troubleshooting.md
        until(lambda: has_met(output, runtime.build().library), recorder.process)
        tenants = Tenants(hardware, arguments.seed)
        for number in range(1, arguments.programs + 1):
            tenants.start()
            files.look()
            use.look(recorder)
            if number % every == 0 and number < arguments.programs:
                files.wait(asked, recorder)
                asked += 1
                recorder.process.send_signal(signal.SIGUSR2)
            if time.monotonic() - began > arguments.seconds:
                problems.append(f"only {number:,} programs ran in {arguments.seconds:g} s")
                break
        tenants.end()
        hardware.wait()
        ended = recorder.stop()
        files.look()
        files.add(output)
        ledger = hardware.ledger()
    problems += use.problems()
    problems += _differences("stalls", ledger.records_produced, files.stalls, files)
    problems += _differences("launches", tenants.launches, files.launches, files)
    if len(files.read) != asked + 1:
        problems.append(f"{len(files.read)} files came, of {asked + 1}")
    if files.most_bytes > room + max(files.first_bytes):  # seen between a file's coming and the removal
        problems.append(f"finished files took {scaled(files.most_bytes)}, with room for {scaled(room)}")
    left = sum(path.stat().st_size for path in folder.glob("day.2*.parquet"))
    if left > room:
        problems.append(f"{scaled(left)} of finished files are left, with room for {scaled(room)}")
    there = len(list(folder.glob("day.2*.parquet")))
    if files.removed != len(files.read) - 1 - there or not files.removed:
        problems.append(f"{files.removed} files are said to be removed, of {len(files.read) - 1} there are {there}")
    problems += [f"{path.name} is left" for path in (*folder.glob("*.spool"), *folder.glob(".iaprof-*"))]
    print_table(
        "a day of a recorder that stays",
        ("programs", "files", "removed", "launches", "stalls", "lost", "memory by quarter", "peak", "descriptors"),
        [(
            f"{number:,}", f"{len(files.read):,}", f"{files.removed:,}", f"{tenants.launches:,}",
            f"{ledger.records_produced:,}", f"{sum(files.lost.values()):,}",
            " ".join(scaled(statistics.median(each)) for each in np.array_split(use.bytes, 4) if len(each)),
            scaled(ended.peak_bytes), str(use.descriptors[-1]),
        )],
    )  # fmt: skip
    for problem in problems:
        print(f"FAILED: {problem}")
    return 1 if problems else 0


def _differences(what: str, made: int, found: int, files: Files) -> list[str]:
    """What is in no file and is not told; more than was made is wrong, too. Others' may be among what is lost."""
    told = sum(count for name, count in files.lost.items() if name.startswith(what))
    if any(name.startswith(what) for name in files.unknown):  # a number that nobody knows
        return [] if found <= made else [f"{found:,} {what} are in files, of {made:,}"]
    return (
        []
        if found <= made <= found + told
        else [f"of {made:,} {what}, {found:,} are in files and {told:,} told as lost"]
    )


if __name__ == "__main__":
    sys.exit(main())
