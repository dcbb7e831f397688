"""The order of events, and checks of it."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from iaprof.basics.quantities import counted
from iaprof.formats.distinct import groups
from iaprof.timelines.options import Options
from iaprof.timelines.stages.device_counters import are_rising
from iaprof.timelines.trace import Slices, Trace

_FEW_ROWS = 1 << 16  # rows that fit into two bytes, which are sorted in one pass


def by_row(slices: Slices) -> NDArray[np.intp]:
    """Returns the order of slices by pid, tid, start, and the longest first."""
    if not _unsorted(slices, True).any() and not np.isnan(slices.duration).any():
        # Already in order of time, as for outputs: only rows have to be grouped.
        number, first = groups(slices.pid, slices.tid)
        return np.argsort(number.astype(np.uint16) if len(first) < _FEW_ROWS else number, kind="stable")
    return np.lexsort((-slices.duration, slices.start, slices.tid, slices.pid))


def sort_by_row(trace: Trace, _: Options) -> None:
    """Sorts slices by pid, tid, start, and the longest first."""
    slices = trace.slices
    if _unsorted(slices, _same_row(slices)).any() or _rows_unsorted(slices):
        slices.keep(by_row(slices))


def sort_points(trace: Trace, _: Options) -> None:
    """Sorts values of counters by time."""
    trace.points.keep(np.argsort(trace.points.time, kind="stable"))


def sort_by_time(trace: Trace, options: Options) -> None:
    """Sorts slices by start, the longest first, and all other events by time."""
    slices = trace.slices
    if _unsorted(slices, True).any():
        slices.keep(np.lexsort((-slices.duration, slices.start)))
    sort_points(trace, options)
    trace.flows.keep(np.argsort(trace.flows.time, kind="stable"))
    trace.instants.keep(np.argsort(trace.instants.time, kind="stable"))


def _same_row(slices: Slices) -> NDArray[np.bool_]:
    """Tells whether a slice is in the row of the slice before: bool[n - 1]."""
    return np.asarray((slices.pid[1:] == slices.pid[:-1]) & (slices.tid[1:] == slices.tid[:-1]), bool)


def _unsorted(slices: Slices, same: NDArray[np.bool_] | bool) -> NDArray[np.bool_]:
    """Tells whether a slice starts before the one before, or at the same time and is longer: bool[n - 1]."""
    return np.asarray(_later(slices.start, slices.duration) & same, bool)


def _later(start: NDArray[np.int64], duration: NDArray[np.float64]) -> NDArray[np.bool_]:
    before, after = start[:-1], start[1:]
    longer = (before == after) & (duration[1:] > duration[:-1])
    return np.asarray((after < before) | longer, bool)


def _rows_unsorted(slices: Slices) -> bool:
    pids, tids = slices.pid, slices.tid
    return bool(((pids[1:] < pids[:-1]) | ((pids[1:] == pids[:-1]) & (tids[1:] < tids[:-1]))).any())


def assert_ts_sequence(trace: Trace, _: Options) -> None:
    """Warns of rows that are not in the order of time, and of kernels of a pid that overlap by their counters."""
    slices = trace.slices
    are = trace.texts.matches(slices.name, "Cmpt Exec") & are_rising(slices)
    if _rows_unsorted(slices):
        order = np.lexsort((slices.tid, slices.pid))  # is stable
        own = slices.tid[order]
        same = own[1:] == own[:-1]
        own = slices.pid[order]
        same &= own[1:] == own[:-1]
        unsorted = _later(slices.start[order], slices.duration[order]) & same
        rows = order[are[order]]
        del order, own, same
    else:
        unsorted = _unsorted(slices, _same_row(slices))
        rows = np.flatnonzero(are)
    if count := int(unsorted.sum()):
        _warn_once(trace, f"Found {counted(count, 'slice')} after a later one of the row")
    rows = rows[np.lexsort((slices.start[rows], slices.pid[rows]))]
    kernels = slices.take(rows)
    same = (np.diff(kernels.pid) == 0) & (np.diff(kernels.start) > 0)
    overlap = np.where(same, kernels.counter(3)[:-1] - kernels.counter(2)[1:], 0)
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
    """Warns, unless the same warning was given: the stages run several times."""
    if all(message.text != text for message in trace.messages.said):
        trace.messages.warn("TS_SEQUENCE", text)
