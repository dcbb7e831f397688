"""More shapes for unit/slow_shapes.py: time lines of very many ranks, and labels without end."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa

from unit.capturing import HEADER
from unit.slow_shapes import TRACES, i64, launched, on_host, pack, same_text, texts_of, traced

RANKS = 8000  # more are refused


def kernel_ranks(path: Path, values: int = 9_900_000, ranks: int = RANKS) -> Path:
    """Kernels of very many ranks, each with a charge."""
    rows = values // 12
    number = np.arange(rows)
    names = pa.DictionaryArray.from_arrays(
        pa.array((number // ranks % 7).astype(np.int32)), pa.array([f"k{n} Cmpt Exec" for n in range(7)])
    )
    columns = traced(rows, 16) | {"pid": i64(number % ranks), "name": names, "power": i64(number * 7)}
    counters = {f"ts{n}": i64(number * 1000 + 100 * n) for n in range(1, 6)}
    return pack(path, [("slice", columns | counters)], TRACES)


def collective_ranks(path: Path, values: int = 9_900_000, ranks: int = RANKS) -> Path:
    """Parts of one collective of very many ranks after the other, and a kernel before each."""
    rows = values // 14
    number = np.arange(rows)
    is_kernel = number // ranks % 2 == 0
    names = pa.DictionaryArray.from_arrays(
        pa.array(np.where(is_kernel, 0, 1).astype(np.int32)), pa.array(["k Cmpt Exec", "AllReduce"])
    )
    groups = pa.DictionaryArray.from_arrays(
        pa.array(np.where(is_kernel, 0, number // ranks % 1000).astype(np.int32), mask=is_kernel),
        pa.array([f"g{n}" for n in range(1000)]),
    )
    columns = traced(rows, 16) | {"pid": i64(number % ranks), "name": names, "group": groups}
    return pack(
        path, [("slice", columns | {"type": same_text("RecvRdma", rows), "peers": same_text("1", rows)})], TRACES
    )


def power_ranks(path: Path, values: int = 9_900_000, ranks: int = RANKS) -> Path:
    """Counters of power of very many ranks, and a slice."""
    rows = values // 8
    number = np.arange(rows)
    counter = {"time_ns": i64(10**9 + number * 1000), "pid": i64(number % ranks), "tid": i64(number % ranks),
               "name": same_text("power", rows), "series": same_text("W", rows),
               "value": pa.array((number % 300).astype(np.float64))}  # fmt: skip
    return pack(path, [("counter", counter), ("slice", traced(10, 1))], TRACES)


def slice_pairs(path: Path, values: int = 9_900_000) -> Path:
    """Pairs of slices that overlap, each pair in a process of its own."""
    rows = values // 10
    pids = {"pid": i64(np.arange(rows) // 2), "duration_ns": i64(np.full(rows, 1500))}
    return pack(path, [("slice", on_host(rows) | pids)], TRACES)


def marked_rows(path: Path, values: int = 9_900_000) -> Path:
    """Slices and marks, each with a row of its own."""
    rows = values // 20
    number = i64(np.arange(rows))
    slices = on_host(rows) | {"pid": number, "tid": number}
    members = ("time_ns", "file", "pid", "tid", "name")
    marks = {name: slices[name] for name in members} | {"phase": same_text("i", rows)}
    return pack(path, [("slice", slices), ("instant", marks)], TRACES)


def labels(path: Path, values: int = 9_900_000) -> Path:
    """Labels without end, with all names that --group-by could ask for."""
    return pack(path, launched(), {"labels": {f"k{n}": f"v{n}" for n in range(values // 30)}})


def long_labels(path: Path, values: int = 9_900_000) -> Path:
    """Labels with values, and names, of megabytes."""
    long = "x\x1b" * (values // 90)
    return pack(path, launched(), {"labels": {"k0": long, "k1": long, long: "v"}})


def labels_of_parts(path: Path, values: int = 9_900_000) -> Path:
    """Parts of a merged capture, each with 64 labels of its own."""
    parts = min(values // 9700, 1000)
    headers = [HEADER | {"labels": {f"k{n}": f"v{part}-{n}" for n in range(64)}} for part in range(parts)]
    return pack(path, launched(), {"parts": headers}, part=0)


def distinct_texts(path: Path, values: int = 9_900_000) -> Path:
    """Launches of kernels, each of a process with a container of its own."""
    rows = min(values // 40, 60_000)
    number = np.arange(rows)
    address = (1 << 28) + number * 64
    launch = {"time_ns": pa.array((10**9 + number).astype(np.uint64)), "pid": pa.array((number + 1).astype(np.uint32)),
              "tid": pa.array((number + 1).astype(np.uint32)), "size": pa.array(np.full(rows, 64, np.uint64)),
              "address": pa.array(address.astype(np.uint64)), "name": texts_of("n", rows, rows)}  # fmt: skip
    words = address.astype(np.uint64) >> np.uint64(3) | np.uint64(1 << 37)
    offsets = pa.array(np.array([0, rows], np.int32))
    stall = {"time_ns": pa.array([3 * 10**9], pa.uint64()), "begin_ns": pa.array([2 * 10**9], pa.uint64()),
             "w0": pa.ListArray.from_arrays(offsets, pa.array(words)),
             "w1": pa.ListArray.from_arrays(offsets, pa.array(np.zeros(rows, np.uint64)))}  # fmt: skip
    described = {"time_ns": pa.array(np.zeros(rows, np.uint64)), "pid": pa.array((number + 1).astype(np.uint32)),
                 "tid": pa.array((number + 1).astype(np.uint32)), "ppid": pa.array(np.ones(rows, np.uint32)),
                 "event": same_text("described", rows), "comm": same_text("c", rows),
                 "cgroup": texts_of("/docker/", rows, rows), "container": texts_of("c", rows, rows)}  # fmt: skip
    return pack(path, [("process", described), ("launch", launch), ("stall", stall)])
