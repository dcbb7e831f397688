"""What launches cost the recorder: to learn a program's paths, and from then on.

A program that is compiled without frame pointers launches from many paths, of 16 frames, all in turn. The first table
is of its first seconds, in which 500 paths become known: the CPU that the recorder's processes use, and what the
capture's header says of the learner (cost.learn_cpu_s). The second table is of later: 1,000 paths are known, and
launches come at a steady rate.

    sudo .venv/bin/python tests/bench/bench_paths.py [--rounds 3] [--seconds 8]
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pyarrow.compute as pc

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.many_paths import FRAMES, ManyPaths, build, launched
from bench.measuring import Part, Recorder, machine, needs_root, print_table
from iaprof.formats.capture.reader import CaptureReader
from standin.hardware import Hardware

NEW_PATHS, NEW_RATE, TIMES = 500, 1000, 4  # launches a second, and from each path
OWN = (1, 8)  # functions of each path that no other goes through
LEARNING_S = 1.0  # of CPU, at most
STEADY_PATHS, RATES = 1000, (0, 10_000, 50_000)
OF_A_CORE = 0.05  # at most, at the highest rate
LEARNT_S = 2.5  # until when all paths are known
NOTHING_ELSE = ("--cpu-freq", "0", "--metric-interval", "0")
LEARNER = ("learner", "reads call frame information", "opens files for the learner")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="how often learning is measured")
    parser.add_argument("--seconds", type=float, default=8.0, help="for which the recorder's CPU is measured")
    arguments = parser.parse_args()
    needs_root("recording")
    print(machine())
    with tempfile.TemporaryDirectory(prefix="iaprof-bench-") as name, Hardware(Path(name) / "gpu") as hardware:
        os.environ["STANDIN_DUMP_DIR"] = name
        learning = measure_learning(Path(name), hardware, arguments.rounds)
        steady = measure_steady(Path(name), hardware, arguments.seconds)
    if learning > LEARNING_S:
        sys.exit(f"learning {NEW_PATHS} paths took {learning:.2f} s of CPU, more than {LEARNING_S:g} s")
    if steady > OF_A_CORE:
        sys.exit(f"the recorder took {steady:.1%} of a core, more than {OF_A_CORE:.0%}")


@dataclass(frozen=True)
class Learnt:
    """The first launches of a program."""

    starting_s: float  # of CPU: the learner and its children, before the program began
    spent: Mapping[str, float]  # CPU seconds since then, by process
    told_s: float  # by the capture: all of the learner's
    ends: Counter[str]  # launches by how their stacks ended
    lost: int
    missed: int
    copies_lost: int

    @property
    def learning_s(self) -> float:
        """Of CPU, of the learner and its children, from the program's start on."""
        return sum(self.spent.get(name, 0.0) for name in LEARNER)


def measure_learning(folder: Path, hardware: Hardware, rounds: int) -> float:
    """The most that a program took."""
    programs = [build(folder, NEW_PATHS, own) for own in OWN]
    found = [[learn(folder / "new.parquet", hardware, program) for program in programs] for _ in range(rounds)]
    rows, ends, most = [], Counter[str](), 0.0
    for own, of_program in zip(OWN, zip(*found, strict=True), strict=True):
        median = statistics.median(each.learning_s for each in of_program)
        most = max(most, median)
        starting = statistics.median(each.starting_s for each in of_program)
        told = statistics.median(each.told_s for each in of_program)
        recorder = statistics.median(each.spent["recorder"] for each in of_program)
        counts = [f"{sum(getattr(each, name) for each in of_program):,}" for name in ("missed", "copies_lost", "lost")]
        rows.append([f"{own}", *(f"{each:.2f} s" for each in (starting, median, LEARNING_S, told, recorder)), *counts])
        ends.update(sum((each.ends for each in of_program), Counter()))
    heads = ["own frames", "learner starts", "learns", "at most", "capture says", "recorder", "missed", "not copied"]
    title = f"CPU for {NEW_PATHS} new paths at {NEW_RATE:,} launches/s, {TIMES} launches from each; of {rounds} times"
    print_table(title, [*heads, "lost"], rows)
    print(f"\n  stacks of all launches: {', '.join(f'{count:,} {ended}' for ended, count in ends.most_common())}")
    return most


def learn(capture: Path, hardware: Hardware, program: ManyPaths) -> Learnt:
    with Recorder(hardware, capture, NOTHING_ELSE) as recorder:
        before = by_name(recorder.parts())
        process = program.start(NEW_PATHS * TIMES, NEW_RATE)
        made = launched(process)
        time.sleep(1)
        after = by_name(recorder.parts())
        recorder.stop()
    header = CaptureReader(capture).header
    ends = stacks_of(capture, process.pid)
    return Learnt(
        sum(before.get(name, 0.0) for name in LEARNER),
        {name: used - before.get(name, 0.0) for name, used in after.items()},
        header["cost"]["learn_cpu_s"],
        ends,
        made - ends.total(),
        header["probes"]["stacks_missed"],
        header["probes"]["copies_lost"],
    )


def by_name(parts: list[Part]) -> dict[str, float]:
    """CPU seconds."""
    return {part.name: part.cpu_s for part in parts}


def stacks_of(capture: Path, pid: int, since_ns: int = 0) -> Counter[str]:
    """How many launches of a process have a stack that ended so."""
    reader = CaptureReader(capture)
    launches = reader.table("launch", ("pid", "stack", "time_ns"))
    wanted = pc.and_(pc.equal(launches["pid"], pid), pc.greater_equal(launches["time_ns"], since_ns))
    stacks = reader.table("stack", ("id", "ips", "ended"))
    depths = pc.list_value_length(stacks["ips"])
    ends = pc.if_else(pc.and_(pc.equal(depths, FRAMES), pc.equal(stacks["ended"], "whole")), "whole", "not whole")
    known = dict(zip(stacks["id"].to_pylist(), ends.to_pylist(), strict=True))
    found: Counter[str] = Counter()
    for each in launches.filter(wanted)["stack"].value_counts().to_pylist():
        found[known.get(each["values"], "none")] += each["counts"]
    return found


def measure_steady(folder: Path, hardware: Hardware, seconds: float) -> float:
    """The share of a core at the highest rate."""
    program = build(folder, STEADY_PATHS, 1)
    rows, share = [], 0.0
    others = 0
    for rate in RATES:
        capture = folder / "steady.parquet"
        with Recorder(hardware, capture) as recorder:
            process = program.start(int(rate * (seconds + 2 * LEARNT_S)), rate) if rate else None
            time.sleep(LEARNT_S)
            before, began, began_ns = by_name(recorder.parts()), time.monotonic(), time.monotonic_ns()
            time.sleep(seconds)
            after, took = by_name(recorder.parts()), time.monotonic() - began
            made = launched(process) if process is not None else 0
            ended = recorder.stop()
        spent = {name: used - before.get(name, 0.0) for name, used in after.items()}
        share = sum(spent.values()) / took
        ends = stacks_of(capture, process.pid if process is not None else -1)
        later = stacks_of(capture, process.pid if process is not None else -1, began_ns)
        others += CaptureReader(capture).header["probes"]["launches"] - made
        size = capture.stat().st_size / made if made else 0.0
        learner = sum(spent.get(name, 0.0) for name in LEARNER)
        rows.append(
            [
                f"{rate:,} launches/s" if rate else "none",
                f"{made - ends.total():,}",
                f"{100 * later['whole'] / later.total():.2f} %" if later.total() else "-",
                f"{100 * share:.2f} %",
                f"{100 * learner / took:.2f} %",
                f"{size:.1f}" if made else "-",
                f"{ended.peak_bytes / 1e6:,.0f} MB",
            ]
        )
    heads = ["launches", "lost", "whole stacks", "of one core", "of that the learner", "bytes/launch", "peak memory"]
    print_table(f"The recorder with all defaults, {STEADY_PATHS:,} known paths, over {seconds:g} s", heads, rows)
    if others:
        print(f"\n  other programs on this machine launched at the same time, {others:,} times: measure again")
    return share


if __name__ == "__main__":
    main()
