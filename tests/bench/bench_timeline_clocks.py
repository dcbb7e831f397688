"""How much CPU each stage of a time line needs, for a million slices of the AIU's runtime.

The trace is made here: operations of four slices (DmaI, Cmpt Prep, Cmpt Exec, DmaO) with counters that wrap, on some
ranks, host slices instead of a fifth of them, and an AllReduce every thousand operations. A twentieth of the slices
overlaps another one of its row in part.

    .venv/bin/python tests/bench/bench_timeline_clocks.py [--slices 1000000] [--overlap tid] [--all-overlap]
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.measuring import machine, print_table
from iaprof.report.timeline import registry
from iaprof.report.timeline.options import Options, Overlap
from iaprof.report.timeline.texts import Texts
from iaprof.report.timeline.trace import Dialect, Marks, Points, Slices, Trace, TraceFile

RANKS, JOBS = 4, 10
PARTS = ("DmaI", "Cmpt Prep", "Cmpt Exec", "DmaO")
CYCLES = np.array([0, 10_000, 30_000, 80_000, 85_000])  # of an operation, at 1000 MHz


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slices", type=int, default=1_000_000)
    parser.add_argument("--overlap", type=Overlap, default=Overlap.TID, choices=list(Overlap))
    parser.add_argument("--all-overlap", action="store_true", help="each slice overlaps the one before in part")
    parser.add_argument("--all-options", action="store_true", help="run stages that options must ask for, too")
    arguments = parser.parse_args()
    print(machine())
    trace = made(arguments.slices, all_overlap=arguments.all_overlap)
    options = Options(overlap=arguments.overlap)
    if arguments.all_options:
        options = Options(
            overlap=arguments.overlap, align_jobs=True, drop_globals=True, dilate_ranks=True, most_extra_tids=-1
        )
    rows, before = [], time.process_time()

    def after(_: int, stage: registry.Stage) -> None:
        nonlocal before
        used = time.process_time() - before
        rows.append([stage.name, f"{used:.3f} s"])
        before = time.process_time()

    begin = time.process_time()
    registry.run(trace, options, [True] * len(registry.STAGES), after)
    rows.append(["all", f"{time.process_time() - begin:.3f} s"])
    print_table(f"Stages, {arguments.slices:,} slices", ["stage", "CPU"], rows)
    for message in trace.messages.said:
        print(f"  {message.level.name} {message.stage} {message.text}")


def made(count: int, *, all_overlap: bool) -> Trace:
    """Returns a trace of about that many slices."""
    random = np.random.default_rng(1)
    texts = Texts()
    operation, part = np.divmod(np.arange(count), len(PARTS))
    rank, number = operation % RANKS, operation // RANKS
    job = number * JOBS // (int(number.max()) + 1)
    begin_us = 1.7e15 / 1000 + number * 100.0
    step = CYCLES[part + 1] - CYCLES[part]
    start = np.round(begin_us * 1000).astype(np.int64) + CYCLES[part] - random.integers(0, 500, count)
    names = texts.codes([f"mm_{kind} {each}" for kind in range(500) for each in PARTS])
    reduces = number % 1000 == 999
    groups = texts.codes([f"AllReduce_all_reduce_{each}" for each in range(int(number.max()) // 1000 + 1)])
    raw = ((number * 100_000 + rank * 500_000)[:, None] + CYCLES) % (1 << 32)
    multicast, receipt = reduces & (rank == RANKS - 1) & (part == 3), reduces & (rank < RANKS - 1) & (part == 0)
    raw[receipt, 1:] = ((number * 100_000 + rank * 500_000)[receipt] + CYCLES[4])[:, None] % (1 << 32)
    tid = 10 + part
    duration = step + random.integers(0, 500, count).astype(np.float64)
    tid[random.random(count) < 0.001] = 11
    if all_overlap:
        tid[:], duration[:] = 10, 1_000_000.0
        raw = np.full_like(raw, np.iinfo(np.int64).min)
    host = random.random(count) < 0.2
    raw[host] = np.iinfo(np.int64).min
    slices = Slices.of(
        count,
        file=(rank * JOBS + job).astype(np.int32),
        pid=rank.astype(np.int64),
        tid=tid.astype(np.int64),
        name=names[(number % 500) * 4 + part],
        start=start,
        duration=duration,
        counters=raw,
        power=np.cumsum(np.full(count, 1000)),
        group=np.where(multicast | receipt, groups[number // 1000], -1).astype(np.int32),
        type=np.where(multicast, texts.code("MultiCast"), -1).astype(np.int32),
        row=np.arange(count),
    )
    files = [TraceFile(f"rank_{each // JOBS}-job-{each % JOBS}.json", Dialect.FLEX, 0) for each in range(RANKS * JOBS)]
    return Trace(files, texts, slices, _no_points(), _no_marks(), _no_marks())


def _no_points() -> Points:
    codes, integers = np.zeros(0, np.int32), np.zeros(0, np.int64)
    return Points(codes, integers, integers, codes, codes, codes, integers, np.zeros(0), integers)


def _no_marks() -> Marks:
    codes, integers = np.zeros(0, np.int32), np.zeros(0, np.int64)
    return Marks(codes, integers, integers, codes, codes, codes, integers, integers, integers)


if __name__ == "__main__":
    main()
