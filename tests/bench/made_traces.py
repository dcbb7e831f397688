"""Traces for the benchmarks of the stages of time lines, as columns; bench_timeline.py makes files.

An operation of the AIU's runtime has four slices (PARTS), all with the same five counters.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from iaprof.timelines.trace import ABSENT, Dialect, Marks, Points, Slices, Texts, Trace, TraceFile

RANKS, JOBS = 4, 10
PARTS = ("DmaI", "Cmpt Prep", "Cmpt Exec", "DmaO")
CYCLES = np.array([0, 10_000, 30_000, 80_000, 85_000])  # of an operation, at 1000 MHz
OPERATION_NS, KERNELS, WORD = 400_000, 200, 50


def wrapping(count: int, *, all_overlap: bool) -> Trace:
    """Returns a trace of the AIU's runtime for the stages of clocks.

    It has operations of four slices with counters that wrap, on some ranks, host slices instead of a fifth of them,
    and an AllReduce every thousand operations. A twentieth of the slices overlaps another one of its row in part.

    Args:
        count: of slices.
        all_overlap: each slice overlaps the one before in part.
    """
    chosen = np.random.default_rng(1)
    texts = Texts()
    operation, part = np.divmod(np.arange(count), len(PARTS))
    rank, number = operation % RANKS, operation // RANKS
    job = number * JOBS // (int(number.max()) + 1)
    begin_us = 1.7e15 / 1000 + number * 100.0
    step = CYCLES[part + 1] - CYCLES[part]
    start = np.round(begin_us * 1000).astype(np.int64) + CYCLES[part] - chosen.integers(0, 500, count)
    names = texts.codes([f"mm_{kind} {each}" for kind in range(500) for each in PARTS])
    reduces = number % 1000 == 999
    groups = texts.codes([f"AllReduce_all_reduce_{each}" for each in range(int(number.max()) // 1000 + 1)])
    raw = ((number * 100_000 + rank * 500_000)[:, None] + CYCLES) % (1 << 32)
    multicast, receipt = reduces & (rank == RANKS - 1) & (part == 3), reduces & (rank < RANKS - 1) & (part == 0)
    raw[receipt, 1:] = ((number * 100_000 + rank * 500_000)[receipt] + CYCLES[4])[:, None] % (1 << 32)
    tid = 10 + part
    duration = step + chosen.integers(0, 500, count).astype(np.float64)
    tid[chosen.random(count) < 0.001] = 11
    if all_overlap:
        tid[:], duration[:] = 10, 1_000_000.0
        raw = np.full_like(raw, np.iinfo(np.int64).min)
    host = chosen.random(count) < 0.2
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


def chains(count: int, ranks: int) -> Trace:
    """Returns a trace of the AIU's runtime for the stages of tables.

    A job of each rank is half kernels with their preparations and copies, four slices each, and half all-reduces of
    all ranks in chains, five slices for two ranks.
    """
    texts = Texts()
    operations = count // 2 // 4 // ranks
    parts = [_operations(texts, operations, rank) for rank in range(ranks)]
    parts += _all_reduces(texts, count // 2 // (4 * ranks), ranks)
    slices = _joined(parts)
    slices = slices.take(np.lexsort((-slices.duration, slices.start, slices.tid, slices.pid)))
    slices.row = np.arange(len(slices))
    files = [TraceFile(f"rank_{rank}.json", Dialect.FLEX, 0) for rank in range(ranks)]
    return Trace(files, texts, slices, _no_points(), _no_marks(), _no_marks())


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
    counters = cycles[:, None] + CYCLES
    parts: list[Slices] = []
    names = [f"k_{number % WORD}_{number}" for number in (np.arange(count) % KERNELS).tolist()]
    for part, suffix in enumerate(PARTS):
        parts.append(
            _slices(
                texts, [f"{name} {suffix}" for name in names], rank,
                tid=np.full(count, 1000 + 100 * part), start=start + CYCLES[part],
                duration=np.full(count, float(CYCLES[part + 1] - CYCLES[part])), counters=counters,
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


def _no_points() -> Points:
    codes, integers = np.zeros(0, np.int32), np.zeros(0, np.int64)
    return Points(codes, integers, integers, codes, codes, codes, integers, np.zeros(0), integers)


def _no_marks() -> Marks:
    codes, integers = np.zeros(0, np.int32), np.zeros(0, np.int64)
    return Marks(codes, integers, integers, codes, codes, codes, integers, integers, integers)
