"""Executions of kernels with their times on the GPU, where a vendor's library tells.

An execution names its launch by the process and a number, the correlation. A launch of a graph has many executions,
of different kernels. A launch without one, as its record was lost, stays as it is.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from iaprof.formats.capture.limits import EXECUTIONS
from iaprof.formats.capture.reader import CaptureReader
from iaprof.report.join.lifetimes import NEVER

COLUMNS = ("time_ns", "end_ns", "pid", "stream", "correlation", "address", "queue")
EXECUTION_COLUMNS = ("begin_ns", "end_ns", "stream")
"""What launches get: when they ran, 0 if that is unknown, and on which GPU."""
_CALL_NS = np.uint64(100_000_000)
"""A launch is recorded when its call ends: so long at most after its execution, if that was waited for."""
_Ints = NDArray[np.int64]
_Times = NDArray[np.uint64]


def has_executions(capture: CaptureReader) -> bool:
    """Whether a capture has executions with times."""
    return bool(capture.count("execution"))


def with_executions(capture: CaptureReader, launches: pa.Table) -> pa.Table:
    """Gives launches a row for each of their executions, with EXECUTION_COLUMNS in place of the correlation.

    Args:
        capture: has executions.
        launches: `launch` rows with pid, address, size, queue and correlation.

    Raises:
        CaptureError: these are absurdly many for the capture's size.
    """
    executions = capture.table("execution", COLUMNS)
    launch_of = _launches_of(launches, executions)
    joined = np.flatnonzero(launch_of >= 0)
    execution = joined[np.argsort(launch_of[joined], kind="stable")]
    of_launch = np.bincount(launch_of[joined], minlength=len(launches))
    count = np.maximum(of_launch, 1)
    capture.count_against(EXECUTIONS, int(count.sum()))
    row = np.repeat(np.arange(len(launches)), count)
    is_timed = (of_launch > 0)[row]
    table = launches.drop_columns(["correlation"]).take(pa.array(row))

    def told(name: str) -> _Times:
        values = np.zeros(len(row), np.uint64)
        values[is_timed] = executions[name].to_numpy()[execution]
        return values

    for name, source in zip(EXECUTION_COLUMNS, ("time_ns", "end_ns", "stream"), strict=True):
        table = table.append_column(name, pa.array(told(source)))
    # A graph's launch has no kernel: its executions have.
    address = told("address")
    changes: dict[str, tuple[NDArray[np.bool_], _Times]] = {
        "address": (address > 0, address),
        "size": (address > 0, np.zeros(len(row), np.uint64)),
        "queue": (np.ones(len(row), bool), told("queue")),
    }
    for name, (where, values) in changes.items():
        if name in table.column_names:
            column = np.where(where, values, table[name].to_numpy())
            table = table.set_column(table.schema.get_field_index(name), name, pa.array(column))
    return table


def _launches_of(launches: pa.Table, executions: pa.Table) -> _Ints:
    """Returns the launch of each execution: int64[executions], -1 for none.

    Another program in the same process begins again with the same numbers: so it is the last launch with an
    execution's number that was made before that execution ended. A call may end later than what it launched.
    """
    before = len(launches)
    pid, correlation, time = (
        np.concatenate([theirs.to_numpy().astype(np.uint64), executions[name].to_numpy().astype(np.uint64)])
        for name, theirs in (
            ("pid", launches["pid"]),
            ("correlation", launches["correlation"].fill_null(0)),
            ("end_ns", launches["time_ns"]),
        )
    )
    time[before:] = np.minimum(time[before:], NEVER - _CALL_NS) + _CALL_NS
    order = np.lexsort((time, correlation, pid))  # stable: launches come first
    is_launch = order < before
    last = np.maximum.accumulate(np.where(is_launch, np.arange(len(order)), 0))
    launch = order[last]
    found = ~is_launch & (launch < before) & (pid[launch] == pid[order]) & (correlation[order] > 0)
    found &= correlation[launch] == correlation[order]
    launch_of = np.full(len(order), -1)
    launch_of[order[found]] = launch[found]
    return launch_of[before:]


class RunningTimes:
    """How long each site's executions ran between two times."""

    def __init__(self, site: _Ints, stream: _Ints, begin: _Times, end: _Times, sites: int) -> None:
        """Sorts the executions.

        Args:
            site: int64[n].
            stream: int64[n], the GPU of each.
            begin: uint64[n], ns; executions that begin at 0 are not known, and left out.
            end: uint64[n], ns.
            sites: the number of sites.
        """
        known = np.flatnonzero((begin > 0) & (end > begin))
        self._streams = int(stream[known].max(initial=0)) + 1
        lane = (site * self._streams + stream)[known]
        self._origin = begin[known].min() if len(known) else np.uint64(0)
        begin, end = begin[known] - self._origin, end[known] - self._origin
        # Lane and time have to fit 64 bits together: only the times of a hostile capture become coarser for that.
        bits = (sites * self._streams + 1).bit_length() + (int(end.max(initial=0)) + 2).bit_length()
        self._coarse = np.uint64(max(bits - 63, 0))
        begin, end = begin >> self._coarse, end >> self._coarse
        self._width = np.uint64(int(end.max(initial=0)) + 2)
        self._begins, self._ends = _Sums(lane, begin, self._width), _Sums(lane, end, self._width)
        self.has_any = np.zeros(sites, bool)
        """bool[sites]: the site has executions with times."""
        self.has_any[site[known]] = True

    def between(self, site: _Ints, stream: int, since: _Times, until: _Times) -> NDArray[np.float64]:
        """Returns how long executions of each site ran on a GPU between two times, ns: float64[n].

        Executions at the same time count each.
        """
        if stream >= self._streams:
            return np.zeros(len(site))
        lane = (site * self._streams + stream).astype(np.uint64)
        since, until = (
            np.minimum((np.maximum(each, self._origin) - self._origin) >> self._coarse, self._width - np.uint64(1))
            for each in (since, until)
        )
        # Time before t: that since each begin before t, less that since each end before t. Modulo 2^64, this is exact.
        ran = [self._begins.since(lane, each) - self._ends.since(lane, each) for each in (since, until)]
        return (ran[1] - ran[0]).astype(np.float64) * 2.0 ** int(self._coarse)


class _Sums:
    """Times of lanes, to add up how long ago they were."""

    def __init__(self, lane: _Ints, time: _Times, width: np.uint64) -> None:
        order = np.lexsort((time, lane))
        self._width = width
        self._key = lane[order].astype(np.uint64) * width + time[order]
        self._sum = np.concatenate([np.zeros(1, np.uint64), np.cumsum(time[order], dtype=np.uint64)])

    def since(self, lane: NDArray[np.uint64], moment: _Times) -> _Times:
        """Returns the sum of the times since each of a lane's times before a moment: uint64[n], modulo 2^64."""
        first = np.searchsorted(self._key, lane * self._width)
        stop = np.searchsorted(self._key, lane * self._width + moment)
        found: _Times = (stop - first).astype(np.uint64) * moment - (self._sum[stop] - self._sum[first])
        return found


def sites_of_placements(placement_of_site: _Ints, placements: int) -> tuple[_Ints, _Ints]:
    """Returns the sites sorted by placement, and where each placement's begin: int64[n], int64[placements + 1]."""
    order = np.argsort(placement_of_site, kind="stable")
    return order, np.searchsorted(placement_of_site[order], np.arange(placements + 1))
