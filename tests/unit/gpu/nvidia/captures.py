"""Captures of an NVIDIA GPU made by hand: two processes that run the same cubin, each with addresses of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from iaprof.gpu.nvidia.cubin import read_cubin
from iaprof.gpu.nvidia.reasons import MEANINGS, PER_WORD, ROWS, WORDS
from iaprof.gpu.nvidia.records import MOST
from unit.capturing import HEADER, capture, launch
from unit.gpu.nvidia.cubins import SCALE

GPU = {"streams": [{"layout": "pc-samples", "ip_version": [9, 0], "card": "nvidia0", "name": "NVIDIA H200"}]}
PIDS = 7, 8
REASONS = list(MEANINGS)
Sample = tuple[int, str, int, int]  # address, reason, samples, latency samples among them


def base_of(pid: int) -> int:
    """As the source of samples gives them: a range of 1 GiB for each process."""
    return (pid & 0x3FFFF) << 30


def packed(addresses: NDArray[np.uint64], counts: NDArray[np.uint32]) -> list[NDArray[np.uint64]]:
    """Returns records as the columns of rows.

    Args:
        addresses: of the instructions, uint64[n].
        counts: uint32[n, twice the reasons], those of all samples, then those of latency.

    Returns:
        The columns, uint64[m] each. An instruction with a count above MOST has several records.
    """
    repeats = np.maximum(-(-counts.max(axis=1, initial=0).astype(np.int64) // MOST), 1)
    row = np.repeat(np.arange(len(counts)), repeats)
    number = np.arange(len(row)) - np.repeat(np.cumsum(repeats) - repeats, repeats)  # among its instruction's records
    left = counts[row].astype(np.int64) - number[:, None] * MOST
    parts = np.clip(left, 0, MOST).astype("<u2")
    kinds = np.zeros((len(row), 2, WORDS * PER_WORD), "<u2")
    kinds[:, :, : len(MEANINGS)] = parts.reshape(len(row), 2, len(MEANINGS))
    return [addresses[row], *kinds.reshape(len(row), 2 * WORDS * PER_WORD).view("<u8").T.copy()]


def reads(time_ns: int, samples: Sequence[Sample], with_latency: bool = True) -> dict[str, Any]:
    """A `pc_sample` row, which has a record for each sample."""
    counts = np.zeros((len(samples), 2 * len(REASONS)), np.uint32)
    for row, (_, reason, all_of_them, latency) in enumerate(samples):
        counts[row, REASONS.index(reason)] = all_of_them
        counts[row, len(REASONS) + REASONS.index(reason)] = latency
    columns = packed(np.array([address for address, *_ in samples], np.uint64), counts)
    lists = dict(zip(ROWS.columns, [column.tolist() for column in columns], strict=True))
    if not with_latency:
        lists |= dict.fromkeys(ROWS.columns[ROWS.required :])
    return {"time_ns": time_ns, "begin_ns": time_ns - 100, "stream": 0, **lists}


def two_processes(path: Path, cubin: bytes, samples: Mapping[int, Sequence[tuple[str, int, str, int, int]]]) -> Path:
    """A capture of PIDS.

    Args:
        path: where to write it.
        cubin: with the kernels SCALE and `reduce`, which both processes launch once at 50 ns.
        samples: by process: kernel, offset, reason, samples and latency samples, all of one read.
    """
    kernels = {kernel.name: kernel for kernel in read_cubin(cubin).kernels}
    row = {"time_ns": 1, "path": "[in memory]", "digest": sha256(cubin).digest(), "size": len(cubin)}
    return capture(
        path,
        HEADER | GPU,
        pc_sample=[
            reads(
                100 * (1 + number),
                [(base_of(pid) + kernels[name].address + offset, *rest) for name, offset, *rest in samples[pid]],  # type: ignore[misc]
            )
            for number, pid in enumerate(samples)
        ],
        launch=[
            launch(50 + number, pid, base_of(pid) + kernels[name].address, 1, kernels[name].size, name=name[:63])
            for pid in PIDS
            for number, name in enumerate((SCALE, "reduce"))
        ],
        stack=[
            {"id": 1, "time_ns": 50, "pid": pid, "truncated": False, "ips": [], "ended": "", "marks": None,
             "python": None, "python_ended": None}
            for pid in PIDS[:1]
        ],
        kernel=[
            {**row, "pid": pid, "elf": cubin if pid == PIDS[0] else None, "base": base_of(pid)} for pid in PIDS
        ],
    )  # fmt: skip
