"""Finds where instructions start in kernels that overlap kernels of other processes, to tell the processes apart."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from iaprof.report.gpu.module import GpuKernel
from iaprof.report.join.kernels import SampledKernels
from iaprof.report.join.overlaps import overlaps
from iaprof.report.join.placements import Placed

_LOW = (1 << 32) - 1  # the address bits that records of most GPUs hold


def instruction_starts(placed: Placed, kernels: SampledKernels) -> dict[int, NDArray[np.uint64]]:
    """Decodes kernels that overlap different code of another process.

    Returns:
        By placement: the offsets at which its instructions start, uint64[n], bytes, ascending. Kernels that cannot be
        decoded are missing.
    """
    placements = placed.placements
    pids = np.array([placement.pid for placement in placements], np.int64)
    first = np.array([placement.address & _LOW for placement in placements], np.uint64)
    behind = first + np.array([max(placement.size, 1) for placement in placements], np.uint64)
    pairs = overlaps(np.zeros(len(pids), np.uint64), first, behind)
    if pairs is None:
        overlapping = list(range(len(placements)))
    else:
        _, code = np.unique(np.array([placement.fingerprint for placement in placements]), return_inverse=True)
        differ = (pids[pairs[0]] != pids[pairs[1]]) & (code[pairs[0]] != code[pairs[1]])
        overlapping = np.unique(np.concatenate([each[differ] for each in pairs])).tolist()
    known = {index: placements[index].kernel for index in overlapping}
    kernels.read({kernel for kernel in known.values() if kernel is not None})
    offsets: dict[GpuKernel, NDArray[np.uint64]] = {}  # a thousand processes may have one kernel
    for kernel in known.values():
        decoded = kernels.loaded(kernel).decoded if kernel is not None and kernel not in offsets else None
        if kernel is not None and decoded is not None and len(decoded):
            offsets[kernel] = decoded.offset.astype(np.uint64)
    return {index: offsets[kernel] for index, kernel in known.items() if kernel in offsets}
