"""Small captures that declare much: what a stranger could make to keep a reader busy. None of them is damaged."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from iaprof.formats.capture.limits import HEADER_KEY, MAX_PARTS
from iaprof.formats.capture.schema import FORMAT, KINDS, SCHEMA
from unit.bombs import write
from unit.capturing import HEADER

_SECOND = 10**9
_Columns = dict[str, pa.Array]


def empty_parts(path: Path, parts: int = MAX_PARTS) -> Path:
    """As many parts as there can be, of which no row is: 280 KB."""
    return _with_header(path, {"parts": [{}] * parts})


def metric_names(path: Path, names: int = 500_000) -> Path:
    """Metrics, each with a name of its own, and a launch with a stall."""
    return write(path, [("metric", _metrics([f"m{n:07}-W" for n in range(names)], stream=False)), *_launched()])


def energy_names(path: Path, names: int = 500_000) -> Path:
    """The same with names of meters, each of the only stream."""
    return write(path, [("metric", _metrics([f"energy-{n:07}-J" for n in range(names)], stream=True)), *_launched()])


def streams(path: Path, number: int = 70_000) -> Path:
    """So many streams in the header: 4.4 MB; and a launch with a stall."""
    entries = [{"layout": "xe2", "ip_version": [20, 1, 0], "device": f"d{n}"} for n in range(number)]
    return write(path, _launched(), {"streams": entries})


def mapped_processes(path: Path, processes: int = 800_000) -> Path:
    """Processes with a mapping each, and forks of one another."""
    number = np.arange(1, processes + 1, dtype=np.uint32)
    mapping = {"pid": pa.array(number), "length": _same(1 << 20, processes), "path": _again("/x", processes)}
    forks = {"pid": pa.array(number), "tid": pa.array(number), "ppid": pa.array(number - np.uint32(1)),
             "event": _again("fork", processes), "comm": _again("", processes)}  # fmt: skip
    return write(path, [("mapping", mapping), ("process", forks), *_launched()])


def cpu_stacks(path: Path, samples: int = 150_000) -> Path:
    """CPU samples, each of a process and a stack of its own."""
    number = np.arange(samples, dtype=np.uint64)
    sample = {"time_ns": _same(3 * _SECOND, samples), "pid": pa.array(number.astype(np.uint32)),
              "tid": pa.array(number.astype(np.uint32)), "stack": pa.array(number)}  # fmt: skip
    return write(path, [("cpu_sample", sample), *_launched()])


def cpu_samples(path: Path, samples: int = 1_400_000) -> Path:
    """CPU samples of one stack and 65,536 threads."""
    number = np.arange(samples, dtype=np.uint64)
    sample = {"time_ns": pa.array(2 * _SECOND + number * np.uint64(1000)), "stack": _same(1, samples),
              "pid": pa.array(np.full(samples, 7, np.uint32)),
              "tid": pa.array((number % np.uint64(1 << 16)).astype(np.uint32))}  # fmt: skip
    return write(path, [("cpu_sample", sample), *_launched()])


def stack_processes(path: Path, stacks: int = 50_000) -> Path:
    """Stacks of as many processes, each with a mapping."""
    number = np.arange(1, stacks + 1, dtype=np.uint32)
    type_ = KINDS["stack"].field("ips").type
    ips = pa.ListArray.from_arrays(pa.array(np.arange(stacks + 1, dtype=np.int32)), _same(16, stacks), type=type_)
    mapping = {"pid": pa.array(number), "length": _same(1 << 20, stacks), "path": _again("/x", stacks)}
    stack = {"id": pa.array(number.astype(np.uint64)), "pid": pa.array(number), "ips": ips}
    return write(path, [("mapping", mapping), ("stack", stack)])


def mapped_files(path: Path, files: int = 30_000) -> Path:
    """Files over each other in one process, the later ones on top, with a frame of a stack in each."""
    number = np.arange(files, dtype=np.uint64)
    paths = pa.DictionaryArray.from_arrays(pa.array(np.arange(files, dtype=np.int32)),
                                           pa.array([f"/f{n}" for n in range(files)]))  # fmt: skip
    pids = pa.array(np.full(files, 7, np.uint32))
    mapping = {"time_ns": pa.array(number), "pid": pids, "start": pa.array(number << np.uint64(12)),
               "length": _same(1 << 40, files), "path": paths}  # fmt: skip
    ips = pa.ListArray.from_arrays(pa.array(np.arange(files + 1, dtype=np.int32)),
                                   pa.array((number << np.uint64(12)) + np.uint64(8)),
                                   type=KINDS["stack"].field("ips").type)  # fmt: skip
    stack = {"id": pa.array(number), "pid": pids, "time_ns": pa.array(number), "ips": ips}
    return write(path, [("mapping", mapping), ("stack", stack), *_launched()[:2]])


def deep_stacks(path: Path, stacks: int = 450) -> Path:
    """Launches of a kernel each, with stacks of 1,000 addresses, all of them different, and a sample in each."""
    depth = 1000
    number = np.arange(1, stacks + 1, dtype=np.uint64)
    ips = pa.ListArray.from_arrays(pa.array(np.arange(stacks + 1, dtype=np.int32) * depth),
                                   pa.array(np.arange(stacks * depth, dtype=np.uint64) << np.uint64(4)),
                                   type=KINDS["stack"].field("ips").type)  # fmt: skip
    stack = {"id": pa.array(number), "pid": pa.array(np.full(stacks, 7, np.uint32)), "ips": ips}
    address = pa.array((number << np.uint64(6)) + np.uint64(1 << 28))
    launches = _launches(stacks, address=address, size=_same(64, stacks))
    return write(path, [("stack", stack), launches, _stalls(address.to_numpy())])


def kernels_over_each_other(path: Path, kernels: int = 5000) -> Path:
    """Kernels of one process that begin one after the other and all end at one address, and a sample in each."""
    number = np.arange(kernels, dtype=np.uint64)
    address = np.uint64(1 << 28) + number * np.uint64(64)
    launches = _launches(kernels, address=pa.array(address), size=pa.array(np.uint64(64) * (kernels - number)))
    return write(path, [launches, _stalls(address)])


def stacks_of_one_kernel(path: Path, stacks: int = 40_000) -> Path:
    """A kernel with so many stacks, and a sample at 2,000 addresses of it."""
    address = np.uint64(1 << 28) + np.arange(2000, dtype=np.uint64) * np.uint64(8)
    launches = _launches(stacks, address=_same(1 << 28, stacks), size=_same(16_000, stacks))
    return write(path, [launches, _stalls(address)])


def processes_at_one_address(path: Path, processes: int = 4000) -> Path:
    """So many processes with a kernel at one address, and 2,000 reads of one sample there."""
    pids = pa.array(np.arange(1, processes + 1, dtype=np.uint32))
    launches = _launches(processes, pid=pids, address=_same(1 << 28, processes), size=_same(64, processes))
    return write(path, [launches, _stalls(np.full(2000, 1 << 28, np.uint64), reads=2000)])


def distinct_launches(path: Path, launches: int = 280_000) -> Path:
    """Launches, each of a process, thread, kernel and stack of its own."""
    number = np.arange(1, launches + 1, dtype=np.uint32)
    names = pa.DictionaryArray.from_arrays(pa.array(np.arange(launches, dtype=np.int32)),
                                           pa.array([f"n{n}" for n in range(launches)]))  # fmt: skip
    threads = {name: pa.array(number) for name in ("pid", "tid")}
    return write(path, [_launches(launches, **threads, name=names, comm=names), *_launched()[1:]])


def stalling_kernels(path: Path, kernels: int = 400_000) -> Path:
    """Kernels side by side, each with a name and a stack of its own, and a sample in each."""
    address = np.uint64(1 << 28) + np.arange(kernels, dtype=np.uint64) * np.uint64(64)
    names = pa.DictionaryArray.from_arrays(pa.array(np.arange(kernels, dtype=np.int32)),
                                           pa.array([f"n{n}" for n in range(kernels)]))  # fmt: skip
    return write(
        path, [_launches(kernels, address=pa.array(address), size=_same(64, kernels), name=names), _stalls(address)]
    )


def _launches(rows: int, **columns: pa.Array) -> tuple[str, _Columns]:
    """Launches, each with a stack of its own; of process 7, without `pid`."""
    number = np.arange(rows, dtype=np.uint64)
    pids = {"pid": pa.array(np.full(rows, 7, np.uint32))}
    return "launch", {"time_ns": pa.array(2 * _SECOND + number), "stack": pa.array(number + 1)} | pids | columns


def _stalls(addresses: NDArray[np.uint64], reads: int = 1) -> tuple[str, _Columns]:
    """A sample at each address, in so many reads."""
    words = KINDS["stall"].field("w0").type
    offsets = pa.array(np.arange(reads + 1, dtype=np.int32) * (len(addresses) // reads))
    first = addresses >> np.uint64(3) | np.uint64(1 << 37)
    times = 3 * _SECOND + np.arange(reads, dtype=np.uint64) * np.uint64(1000)
    return "stall", {
        "time_ns": pa.array(times),
        "begin_ns": pa.array(times - np.uint64(_SECOND)),
        "w0": pa.ListArray.from_arrays(offsets, pa.array(first), type=words),
        "w1": pa.ListArray.from_arrays(offsets, pa.array(np.zeros(len(first), np.uint64)), type=words),
    }


def _metrics(names: list[str], stream: bool) -> _Columns:
    rows = len(names)
    return {
        "time_ns": pa.array(_SECOND + np.arange(rows, dtype=np.uint64) * np.uint64(1000)),
        "name": pa.DictionaryArray.from_arrays(pa.array(np.arange(rows, dtype=np.int32)), pa.array(names)),
        "value": pa.array(np.ones(rows)),
        "stream": pa.array(np.zeros(rows, np.uint16)) if stream else pa.nulls(rows, pa.uint16()),
        "pid": pa.nulls(rows, pa.uint32()),
    }


def _launched() -> list[tuple[str, _Columns]]:
    """A launch of one kernel with a stall."""
    launch = {"time_ns": _same(_SECOND, 1), "pid": pa.array([7], pa.uint32()), "size": _same(4096, 1),
              "stack": _same(1, 1), "name": pa.array(["k"])}  # fmt: skip
    words = KINDS["stall"].field("w0").type
    stall = {"time_ns": _same(3 * _SECOND, 1), "begin_ns": _same(2 * _SECOND, 1),
             "w0": pa.array([[1 << 37]], words), "w1": pa.array([[0]], words)}  # fmt: skip
    stack = {"id": _same(1, 1), "pid": pa.array([7], pa.uint32()), "time_ns": _same(3 * _SECOND, 1),
             "ips": pa.array([[16]], words)}  # fmt: skip
    return [("launch", launch), ("stall", stall), ("stack", stack)]


def _same(value: int, rows: int) -> pa.Array:
    return pa.array(np.full(rows, value, np.uint64))


def _again(text: str, rows: int) -> pa.DictionaryArray:
    return pa.DictionaryArray.from_arrays(pa.array(np.zeros(rows, np.int32)), pa.array([text]))


def _with_header(path: Path, members: dict[str, Any]) -> Path:
    with pq.ParquetWriter(path, SCHEMA) as writer:
        writer.add_key_value_metadata({HEADER_KEY: json.dumps({**HEADER, **members, "format": FORMAT}).encode()})
    return path


SLOW: dict[str, tuple[Callable[[Path, int], Path], int]] = {
    "empty_parts": (empty_parts, MAX_PARTS),
    "metric_names": (metric_names, 500_000),
    "energy_names": (energy_names, 500_000),
    "streams": (streams, 70_000),
    "mapped_processes": (mapped_processes, 800_000),
    "cpu_stacks": (cpu_stacks, 150_000),
    "cpu_samples": (cpu_samples, 1_400_000),
    "stack_processes": (stack_processes, 50_000),
    "kernels_over_each_other": (kernels_over_each_other, 5000),
    "stacks_of_one_kernel": (stacks_of_one_kernel, 40_000),
    "processes_at_one_address": (processes_at_one_address, 2600),
    "deep_stacks": (deep_stacks, 450),
    "mapped_files": (mapped_files, 16_000),
    "distinct_launches": (distinct_launches, 280_000),
    "stalling_kernels": (stalling_kernels, 65_000),
}
"""What makes each, and how much of it a capture of 10 MB can declare, by name."""
