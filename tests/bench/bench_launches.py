"""What a launch costs the application while it is recorded, by the number of frames of its stack.

A program launches in a loop and measures itself, in turn without a recorder and with one. It is compiled twice: without
frame pointers, as compilers do unless told otherwise, and with them. In the second, stacks are also walked by frame
pointers alone, as they are on a kernel without BTF. Every launch has to be in the captures, and of the stacks that were
walked by rules 99.9 % have to be whole and as deep as they should be.

    sudo .venv/bin/python tests/bench/bench_launches.py [--rounds 5]
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

import pyarrow as pa
import pyarrow.compute as pc

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.measuring import Recorder, machine, needs_root, print_table
from iaprof.formats.capture.reader import CaptureReader
from iaprof.formats.wire.launches import LaunchFlags
from standin import runtime
from standin.hardware import Hardware

FRAMES = (8, 16, 64, 127)
MOST_NS = {16: 2200, 64: 3000, 127: 4000}  # that a launch may take more, from so many frames without frame pointers
LAUNCHES = 20_000  # of each depth in each round
LEAST_WHOLE = 0.999  # of stacks; when launches begin, the learner may be late
UNPROBED_NS = 100.0  # more than a launch takes that no recorder looks at
ALONE, BY_RULES, BY_POINTERS = "alone", "by rules", "by frame pointers"
OPTIONS = ("--cpu-freq", "0", "--metric-interval", "0")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="how often each is measured, in turn")
    arguments = parser.parse_args()
    needs_root("recording")
    print(machine())
    with tempfile.TemporaryDirectory(prefix="iaprof-bench-") as name, Hardware(Path(name) / "gpu") as hardware:
        os.environ["STANDIN_DUMP_DIR"] = name
        measure(Path(name), hardware, arguments.rounds)


def measure(folder: Path, hardware: Hardware, rounds: int) -> None:
    with (
        Program(folder / "without", True, "-fomit-frame-pointer") as without,
        Program(folder / "with", False, *runtime.FRAMES) as with_pointers,
    ):
        by_rules, by_pointers = Walked(), Walked()
        for _ in range(rounds):
            without.take(ALONE)
            with_pointers.take(ALONE)
            record(hardware, folder / "rules.parquet", BY_RULES, (without, with_pointers), by_rules)
            record(hardware, folder / "pointers.parquet", BY_POINTERS, (with_pointers,), by_pointers)
    kinds = (
        ("compiled without, by rules", without, BY_RULES),
        ("compiled with, by rules", with_pointers, BY_RULES),
        ("compiled with, by frame pointers", with_pointers, BY_POINTERS),
    )
    rows = [row(what, program, how, frames) for what, program, how in kinds for frames in FRAMES]
    heads = ["frame pointers and walk", "frames", "not recorded", "recorded", "10 - 90 %", "added", "at most"]
    print_table(
        f"ns of a launch in the application: medians of {rounds} x 10 parts of {LAUNCHES // 10:,}, in turn", heads, rows
    )
    print(f"\n  by rules: {by_rules.told()}\n  by frame pointers: {by_pointers.told()}")
    if max(statistics.median(each.times[ALONE, frames]) for each in (without, with_pointers) for frames in FRAMES) > (
        UNPROBED_NS
    ):
        sys.exit("another recorder has run on this machine at the same time: these figures are worth nothing")
    if not by_rules.is_right:
        sys.exit("stacks are not whole, or not as deep as they should be: these figures are worth nothing")
    late = [frames for frames, most in MOST_NS.items() if without.added(BY_RULES, frames) > most]
    if late:
        sys.exit(f"a launch takes longer than it may from {', '.join(map(str, late))} frames")


class Program:
    """launching.c, which runs and waits to be told to measure itself; also a context manager."""

    def __init__(self, path: Path, is_usual: bool, *flags: str) -> None:
        """Compiles it, with the stand-in's library beside it, and starts it."""
        library = runtime.build().library
        source = Path(__file__).with_name("launching.c")
        common = ["-std=gnu11", "-O2", "-Wall", "-Wextra", "-Werror", "-Wl,-z,now", f"-I{runtime.SOURCES}"]
        links = [str(library), f"-Wl,-rpath,{library.parent}"]
        subprocess.run([os.environ.get("CC", "cc"), *common, *flags, "-o", path, source, *links], check=True)
        words = [path, runtime.debug_elf("bmg", "attention"), "attention_scores", LAUNCHES, *FRAMES]
        self._process = subprocess.Popen(
            list(map(str, words)), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.pid, self.is_usual = self._process.pid, is_usual  # as software is installed
        self.times: dict[tuple[str, int], list[float]] = {}  # ns of a launch, by how it was recorded and frames

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._process.communicate()

    def take(self, how: str) -> None:
        """One round."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        for frames in FRAMES:
            parts = [float(word) for word in self._process.stdout.readline().split()]
            if not parts:
                raise RuntimeError("the program ended")
            self.times.setdefault((how, frames), []).extend(parts)

    def added(self, how: str, frames: int) -> float:
        """By which a launch takes longer, ns."""
        return statistics.median(self.times[how, frames]) - statistics.median(self.times[ALONE, frames])


@dataclass
class Walked:
    """What the captures of all rounds say of the programs' stacks."""

    launched: int = 0  # by the programs
    presumed: int = 0  # launches that got the stack of another one while that was copied
    stacks: Counter[tuple[int, str]] = field(default_factory=Counter)  # launches by depth of their stack and its end
    probe_ns: list[float] = field(default_factory=list)  # means of each round

    @property
    def is_right(self) -> bool:
        """Whether the launches have whole stacks, as many of each depth as there should be."""
        least = LEAST_WHOLE * self.launched / len(FRAMES)
        return all(self.stacks[frames, "whole"] >= least for frames in FRAMES)

    def add(self, capture: Path, pids: Sequence[int]) -> None:
        """Adds a round of these processes."""
        reader = CaptureReader(capture)
        self.launched += len(FRAMES) * LAUNCHES * len(pids)
        self.probe_ns.append(reader.header["probes"]["probe_ns"] / max(1, reader.header["probes"]["launches"]))
        launches = reader.table("launch", ("pid", "stack", "flags"))
        launches = launches.filter(pc.is_in(launches["pid"], pa.array(pids, launches["pid"].type)))
        self.presumed += pc.sum(pc.not_equal(pc.bit_wise_and(launches["flags"], int(LaunchFlags.PRESUMED)), 0)).as_py()
        ends = {
            row["id"]: (len(row["ips"]), row["ended"] or "by frame pointers")
            for row in reader.table("stack").to_pylist()
        }
        for each in launches["stack"].value_counts().to_pylist():
            self.stacks[ends.get(each["values"], (0, "none"))] += each["counts"]

    def told(self) -> str:
        """In a line."""
        stacks = ", ".join(
            f"{depth} frames {ended} ({count:,})" for (depth, ended), count in sorted(self.stacks.items())
        )
        return (
            f"{self.launched - self.stacks.total():,} of {self.launched:,} launches lost, {self.presumed:,} presumed; "
            f"{statistics.median(self.probe_ns):,.0f} ns in BPF on average; stacks: {stacks}"
        )


def record(hardware: Hardware, capture: Path, how: str, programs: Sequence[Program], walked: Walked) -> None:
    """A round of the programs, one after the other, while it is recorded."""
    with Recorder(hardware, capture, OPTIONS, frame_pointers_only=how == BY_POINTERS) as recorder:
        for program in programs:
            program.take(how)
        recorder.stop()
    if CaptureReader(capture).header["follows_frame_pointers"] != recorder.frame_pointers_only:
        raise RuntimeError("the recorder walked stacks in another way than was to be measured")
    walked.add(capture, [program.pid for program in programs])


def row(what: str, program: Program, how: str, frames: int) -> list[str]:
    """Of the table."""
    before, after = (statistics.median(program.times[each, frames]) for each in (ALONE, how))
    low, *_, high = statistics.quantiles(program.times[how, frames], n=10)
    spread = f"{low:,.0f} - {high:,.0f}"
    most = f"{MOST_NS[frames]:,}" if how == BY_RULES and program.is_usual and frames in MOST_NS else ""
    return [what, f"{frames}", f"{before:.1f}", f"{after:,.0f}", spread, f"{after - before:,.0f}", most]


if __name__ == "__main__":
    main()
