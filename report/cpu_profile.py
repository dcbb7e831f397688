"""What the CPUs did while the GPU waited: the CPU samples of a capture, counted by stack."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from iaprof.formats.capture import KINDS, CaptureReader
from iaprof.formats.profile import Launch
from iaprof.symbols.address_space import AddressSpaces
from iaprof.symbols.cpu_frames import CpuFrames, Look
from iaprof.symbols.names import Naming


@dataclass(frozen=True)
class CpuProfile:
    """Samples by process and stacks."""

    samples: list[tuple[Launch, int]]
    cpu: CpuFrames


def build_cpu(capture: CaptureReader, naming: Naming, look: Look) -> CpuProfile:
    """Counts and names the CPU samples.

    Args:
        capture: the open capture.
        naming: names the frames.
        look: how they are to look.

    Raises:
        CaptureError: the capture is damaged.
    """
    counts: Counter[tuple[int, int, int]] = Counter()
    for table in capture.tables("cpu_sample", ("pid", "stack", "kernel_stack")):
        columns = np.stack([table[name].to_numpy().astype(np.uint64) for name in table.column_names], axis=1)
        distinct, times = np.unique(columns, axis=0, return_counts=True)
        for (pid, stack, kernel_stack), number in zip(distinct.tolist(), times.tolist(), strict=True):
            counts[pid, stack, kernel_stack] += number
    processes = capture.table("process")
    names = _names(processes)
    stacks = pa.concat_tables([pa.schema(list(KINDS["stack"])).empty_table(), *capture.tables("stack")])
    cpu = CpuFrames(stacks, AddressSpaces(capture.table("mapping"), processes), naming, look)
    samples = [
        (Launch(names.get(pid, ""), pid, cpu.frames(stack), cpu.frames(kernel_stack)), number)
        for (pid, stack, kernel_stack), number in counts.items()
    ]
    return CpuProfile(samples, cpu)


def _names(processes: pa.Table) -> dict[int, str]:
    """The last name of each process."""
    columns = [processes[name].to_pylist() for name in ("time_ns", "pid", "tid", "comm")]
    rows = sorted((time, pid, comm) for time, pid, tid, comm in zip(*columns, strict=True) if pid == tid and comm)
    return {pid: comm for _, pid, comm in rows}
