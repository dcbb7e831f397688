"""The order of events, and checks of it."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from iaprof.basics.quantities import counted
from iaprof.report.timeline.options import Options
from iaprof.report.timeline.stages.counters import rising
from iaprof.report.timeline.trace import Slices, Trace


def by_row(slices: Slices) -> NDArray[np.intp]:
    """Returns the order of slices by pid, tid, start, and the longest first."""
    return np.lexsort((-slices.duration, slices.start, slices.tid, slices.pid))


def sort_by_row(trace: Trace, _: Options) -> None:
    """Sorts slices by pid, tid, start, and the longest first."""
    slices = trace.slices
    if _unsorted(slices, _same_row(slices)).any() or _rows_unsorted(slices):
        trace.slices = slices.take(by_row(slices))


def sort_points(trace: Trace, _: Options) -> None:
    """Sorts values of counters by time."""
    trace.points = trace.points.take(np.argsort(trace.points.time, kind="stable"))


def sort_by_time(trace: Trace, options: Options) -> None:
    """Sorts slices by start, the longest first, and all other events by time."""
    slices = trace.slices
    if _unsorted(slices, True).any():
        trace.slices = slices.take(np.lexsort((-slices.duration, slices.start)))
    sort_points(trace, options)
    trace.flows = trace.flows.take(np.argsort(trace.flows.time, kind="stable"))
    trace.instants = trace.instants.take(np.argsort(trace.instants.time, kind="stable"))


def _same_row(slices: Slices) -> NDArray[np.bool_]:
    """Tells whether a slice is in the row of the slice before: bool[n - 1]."""
    return np.asarray((slices.pid[1:] == slices.pid[:-1]) & (slices.tid[1:] == slices.tid[:-1]), bool)


def _unsorted(slices: Slices, same: NDArray[np.bool_] | bool) -> NDArray[np.bool_]:
    """Tells whether a slice starts before the one before, or then and is longer: bool[n - 1]."""
    before, after = slices.start[:-1], slices.start[1:]
    longer = (before == after) & (slices.duration[1:] > slices.duration[:-1])
    return np.asarray(((after < before) | longer) & same, bool)


def _rows_unsorted(slices: Slices) -> bool:
    pids, tids = slices.pid, slices.tid
    return bool(((pids[1:] < pids[:-1]) | ((pids[1:] == pids[:-1]) & (tids[1:] < tids[:-1]))).any())


def assert_ts_sequence(trace: Trace, _: Options) -> None:
    """Warns of rows that are not in the order of time, and of kernels of a pid that overlap by their counters."""
    slices = trace.slices
    if _rows_unsorted(slices):
        slices = slices.take(np.lexsort((slices.tid, slices.pid)))  # is stable
    if count := int(_unsorted(slices, _same_row(slices)).sum()):
        _warn_once(trace, f"Found {counted(count, 'slice')} after a later one of the row")
    kernels = slices.take(trace.texts.matches(slices.name, "Cmpt Exec") & rising(slices.counters))
    kernels = kernels.take(np.lexsort((kernels.start, kernels.pid)))
    same = (np.diff(kernels.pid) == 0) & (np.diff(kernels.start) > 0)
    overlap = np.where(same, kernels.counters[:-1, 3] - kernels.counters[1:, 2], 0)
    if count := int((overlap > 0).sum()):
        text = (
            f"Of {counted(len(kernels), 'kernel')}, {count:,} started (TS3) before the one before ended (TS4),"
            f" by up to {counted(int(overlap.max()), 'cycle')}"
        )
        _warn_once(trace, text)


def assert_global_ts_sequence(trace: Trace, _: Options) -> None:
    """Warns of slices that are not in the order of time."""
    if count := int(_unsorted(trace.slices, True).sum()):
        _warn_once(trace, f"Found {counted(count, 'slice')} of all rows after a later one")


def _warn_once(trace: Trace, text: str) -> None:
    """Warns, unless the same was said: the stages run several times."""
    if all(message.text != text for message in trace.messages.said):
        trace.messages.warn("TS_SEQUENCE", text)
