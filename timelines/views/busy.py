"""How busy each rank's device was over time, for heat maps."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from iaprof.formats.distinct import distinct_values
from iaprof.timelines.dialects import Kind, communicates, find
from iaprof.timelines.intervals import Union
from iaprof.timelines.placeholders import placed
from iaprof.timelines.trace import Trace
from iaprof.timelines.views import labels, nesting

CLASSES = ("device", "computation", "communication", "copies")
"""What a device is busy with: anything but preparations, kernels, collectives, and copies that belong to none."""
_PROCESS_GROUPS = "^(gloo|nccl|hccl|xccl|ucc|mpi):"
_BINS = 400
_MOST_RANKS = 256


@dataclass(frozen=True, eq=False)
class Busy:
    """Shares of time in which at least one slice of a class runs."""

    ranks: list[int]
    more: int  # ranks that were left out
    start: int  # ns
    length: int  # ns, of all bins
    percent: NDArray[np.int64]  # [classes, ranks, bins], 0 to 100; 0 only where there is nothing
    mean: NDArray[np.float64]  # [classes, ranks], percent of the whole time


def span(trace: Trace) -> tuple[int, int]:
    """Returns when the first slice begins and the last one ends, in ns; (0, 1) without slices that have times."""
    have_times = placed(trace)
    if not have_times.any():
        return 0, 1
    starts, until = (each[have_times] for each in nesting.times(trace.slices))
    return int(starts.min()), max(int(until.max()), int(starts.min()) + 1)


def classes(trace: Trace) -> NDArray[np.int64]:
    """Returns the class of each slice: an index into CLASSES, 0 for other slices of a device, -1 for those of hosts.

    Slices with names of PyTorch's process groups, such as `gloo:all_reduce`, are communication, even on hosts.
    """
    found = np.full(len(trace.slices), -1, np.int64)
    device, kernels = labels.on_devices(trace), find(trace, Kind.KERNEL) & ~communicates(trace)
    collective = find(trace, Kind.COLLECTIVE) & ~kernels
    found[device] = 0
    found[device & (find(trace, Kind.COPY_IN) | find(trace, Kind.COPY_OUT))] = CLASSES.index("copies")
    found[device & collective] = CLASSES.index("communication")
    found[trace.texts.matches(trace.slices.name, _PROCESS_GROUPS) & ~kernels] = CLASSES.index("communication")
    found[device & kernels] = CLASSES.index("computation")
    return found


def busy(trace: Trace) -> Busy:
    """Returns the shares of equal spans of time in which each rank's device was busy."""
    start, end = span(trace)
    edges = start + np.rint((end - start) * (np.arange(_BINS + 1) / _BINS)).astype(np.int64)
    low, high = edges[:-1], edges[1:]
    of = np.where(labels.on_devices(trace), classes(trace), -1)
    starts, until = nesting.times(trace.slices)
    of[find(trace, Kind.PREPARATION) | ~placed(trace)] = -1
    ranks = labels.ranks(trace)
    present = distinct_values(ranks[of >= 0]).tolist()
    shown = present[:_MOST_RANKS]
    percent = np.zeros((len(CLASSES), len(shown), _BINS), np.int64)
    mean = np.zeros((len(CLASSES), len(shown)))
    for at, rank in enumerate(shown):
        mine = np.flatnonzero((of >= 0) & (ranks == rank))
        for number in range(len(CLASSES)):
            rows = mine if number == 0 else mine[of[mine] == number]
            union = Union.of(starts[rows], until[rows])
            inside = union.within(low, high)
            share = np.divide(100.0 * inside, high - low, out=np.zeros(_BINS), where=high > low)
            percent[number, at] = np.where(inside > 0, np.clip(np.rint(share), 1, 100), 0)
            mean[number, at] = 100.0 * union.length / (end - start)
    return Busy(shown, len(present) - len(shown), start, end - start, percent, mean)
