"""How long the stages of a time line take that measure and classify, on a million made-up slices.

    .venv/bin/python tests/bench/bench_timeline_tables.py [--slices 1000000] [--ranks 4]

A job of each rank is half kernels with their preparations and copies, and half all-reduces of all ranks.
"""

from __future__ import annotations

import argparse
import resource
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.measuring import print_table
from iaprof.report.timeline.options import CounterTrack, Options
from iaprof.report.timeline.registry import STAGES, Stage, run
from iaprof.report.timeline.texts import Texts
from iaprof.report.timeline.trace import ABSENT, Dialect, Marks, Points, Slices, Trace, TraceFile

WINDOWS = {"DmaI": (0, 1), "Cmpt Prep": (1, 2), "Cmpt Exec": (2, 3), "DmaO": (3, 4)}
OPERATION_NS, KERNELS, WORD = 400_000, 200, 50


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slices", type=int, default=1_000_000)
    parser.add_argument("--ranks", type=int, default=4)
    arguments = parser.parse_args()
    made = trace(arguments.slices, arguments.ranks)
    rows: list[list[str]] = []
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        lines = "".join(f"k_{number % WORD}_{number}-opCatBmm_fp16 {100 * number}\n" for number in range(KERNELS))
        log.write_text(f"~~~~ Ideal/Total Cycles ~~~~\n{lines}====== Perf Summary End ======\n")
        options = {
            "without -R": Options(tracks=frozenset(CounterTrack), compiler_logs=(str(log),), power_statistics=True),
            "with -R, merged": Options(
                tracks=frozenset(CounterTrack), flows=True, collectives=True, merge_sends=True, keep_names=False
            ),
        }
        for name, asked in options.items():
            copied = trace(arguments.slices, arguments.ranks)
            begun = [time.process_time()]

            def after(
                _: int, stage: Stage, name: str = name, copied: Trace = copied, begun: list[float] = begun
            ) -> None:
                now = time.process_time()
                rows.append([name, stage.name, f"{now - begun[0]:.2f}", str(len(copied.slices))])
                begun[0] = time.process_time()

            run(copied, asked, [True] * len(STAGES), after)
            print(name, {key: table.num_rows for key, table in copied.tables.items()}, dict(copied.made))
            for message in copied.messages.said[:5]:
                print("   ", message.text)
    print_table("CPU seconds of stages", ["options", "stage", "CPU s", "slices after it"], rows)
    total = sum(float(row[2]) for row in rows if row[0] == "without -R")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"{len(made.slices)} slices: {total:.1f} CPU s without -R; peak of all {peak:.0f} MiB")


def trace(count: int, ranks: int) -> Trace:
    """A trace in which an operation has four slices, and an all-reduce in a chain five for two ranks."""
    texts = Texts()
    operations = count // 2 // 4 // ranks
    parts = [_operations(texts, operations, rank) for rank in range(ranks)]
    parts += _all_reduces(texts, count // 2 // (4 * ranks), ranks)
    slices = _joined(parts)
    slices = slices.take(np.lexsort((-slices.duration, slices.start, slices.tid, slices.pid)))
    slices.row = np.arange(len(slices))
    files = [TraceFile(f"rank_{rank}.json", Dialect.FLEX, 0) for rank in range(ranks)]
    none32, none64 = np.zeros(0, np.int32), np.zeros(0, np.int64)
    points = Points(none32, none64, none64, none32, none32, none32, none64, np.zeros(0), none64)
    marks = Marks(none32, none64, none64, none32, none32, none32, none64, none64, none64)
    return Trace(files, texts, slices, points, marks, marks.take(np.zeros(0, np.int64)))


def _joined(parts: list[Slices]) -> Slices:
    names = [name for name in parts[0].__dataclass_fields__ if name != "extra"]
    columns: dict[str, Any] = {name: np.concatenate([getattr(part, name) for part in parts]) for name in names}
    return Slices(**columns)


def _slices(texts: Texts, names: Sequence[str | None], rank: int, **columns: NDArray[Any]) -> Slices:
    codes = texts.codes(names)
    count = len(codes)
    same: dict[str, NDArray[Any]] = {"file": np.full(count, rank, np.int32), "pid": np.full(count, rank, np.int64)}
    return Slices.of(count, **same, name=codes, **columns)


def _operations(texts: Texts, count: int, rank: int) -> Slices:
    start = np.arange(count, dtype=np.int64) * OPERATION_NS + 10**15
    cycles = np.arange(count, dtype=np.int64) * OPERATION_NS
    steps = np.cumsum([0, 10_000, 20_000, 50_000, 5_000])
    counters = cycles[:, None] + steps
    parts: list[Slices] = []
    names = [f"k_{number % WORD}_{number}" for number in (np.arange(count) % KERNELS).tolist()]
    for tid, (suffix, (low, high)) in enumerate(WINDOWS.items()):
        parts.append(
            _slices(
                texts, [f"{name} {suffix}" for name in names], rank,
                tid=np.full(count, 1000 + 100 * tid), start=start + steps[low],
                duration=np.full(count, float(steps[high] - steps[low])), counters=counters,
                power=np.arange(1, count + 1) * 600_000 % 2**32,
                bytes=np.full(count, 4096 if suffix.startswith("Dma") else ABSENT),
            )
        )  # fmt: skip
    return _joined(parts)


def _all_reduces(texts: Texts, count: int, ranks: int) -> list[Slices]:
    """Chains: each rank but the last sends to the next, and the last one multicasts; 64 groups take turns."""
    last = ranks - 1
    events: list[tuple[int, str, str, str | None, int, int]] = []  # rank, name, type, peers, start, duration
    for rank in range(last):
        sync = f"s{rank}_r{rank + 1}_{rank}"
        at = 110_000 + rank * 30_000
        events.append((rank, f"Send|[sync={{}}_{sync}] DmaO", "SingleCast", str(rank + 1), at, 20_000))
        events.append((rank + 1, f"Recv|[4096B] [sync={{}}_{sync}] DmaI", "WDone Barrier", str(rank), at, 20_001))
    sync, at = f"s{last}_rall_{last}", 110_000 + last * 30_000
    others = ",".join(map(str, range(last)))
    events.append((last, f"Send|- Set BcList [sync={{}}_{sync}] DmaO", "Set BCList", others, at, 5_000))
    for rank in range(last):
        name = f"Send|- Xseg to rank {rank} [sync={{}}_{sync}] DmaO"
        events.append((last, name, "MultiCast XSEG", str(rank), at + 1_000, 5_000))
        events.append((rank, f"Recv|[4096B] [sync={{}}_{sync}] DmaI", "WDone Barrier", str(last), at, 60_000))
    events.append((last, f"Send|Data [sync={{}}_{sync}] DmaO", "MultiCast", None, at + 10_000, 50_000))
    made = max(count * 4 * ranks // len(events), 1)
    groups = [f"AllReduce_all_reduce_{number % 64}" for number in range(made)]
    start = np.arange(made, dtype=np.int64) * OPERATION_NS + 10**15
    parts = []
    for number, (rank, pattern, type_, peers, at, duration) in enumerate(events):
        kind, _, rest = pattern.partition("|")
        message = len(events) if kind == "Send" and rank == last else number
        names = [f"SenRdma{kind}_{100 * each + message} " + rest.format(group) for each, group in enumerate(groups)]
        first = start - 10**15 + at
        low, high = (3, 4) if kind == "Send" else (0, 1)
        counters = np.repeat(first[:, None], 5, axis=1)
        counters[:, high:] += duration
        parts.append(
            _slices(
                texts, names, rank,
                tid=np.full(made, 2000 + low), start=start + at, duration=np.full(made, float(duration)),
                counters=counters, bytes=np.full(made, 4096), group=texts.codes(groups),
                type=texts.codes([type_] * made), peers=texts.codes([peers] * made),
            )
        )  # fmt: skip
    return parts


if __name__ == "__main__":
    main()
