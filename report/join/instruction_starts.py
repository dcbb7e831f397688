"""Where the instructions of kernels start, for telling apart processes whose kernels lie over each other."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from iaprof.report.gpu.kernels import SampledKernels
from iaprof.report.join.overlaps import overlaps
from iaprof.report.join.placements import Placed

_LOW = (1 << 32) - 1  # what most GPUs' records hold of an address


def instruction_starts(placed: Placed, kernels: SampledKernels) -> dict[int, NDArray[np.uint64]]:
    """The offsets in bytes at which instructions start, ascending, of placements that lie over another process's.

    Only such kernels are read, and only those that differ; what cannot be decoded is not in it.
    """
    placements = placed.placements
    pids = np.array([placement.pid for placement in placements], np.int64)
    first = np.array([placement.address & _LOW for placement in placements], np.uint64)
    behind = first + np.array([max(placement.size, 1) for placement in placements], np.uint64)
    pairs = overlaps(np.zeros(len(pids), np.uint64), first, behind)
    if pairs is None:
        wanted = list(range(len(placements)))
    else:
        _, code = np.unique(np.array([placement.fingerprint for placement in placements]), return_inverse=True)
        differ = (pids[pairs[0]] != pids[pairs[1]]) & (code[pairs[0]] != code[pairs[1]])
        wanted = np.unique(np.concatenate([each[differ] for each in pairs])).tolist()
    known = {index: placements[index].kernel for index in wanted}
    kernels.read({kernel for kernel in known.values() if kernel is not None})
    found = {}
    for index, kernel in known.items():
        decoded = kernels.whole(kernel).decoded if kernel is not None else None
        if decoded is not None and len(decoded):
            found[index] = decoded.offset.astype(np.uint64)
    return found
