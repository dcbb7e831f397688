"""Which processes were in cgroups or containers: a pid may be used again, by a process that is in another container."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from iaprof.formats.capture.dictionaries import number_texts, rows_equal
from iaprof.report.join.lifetimes import TimesByPid

COLUMNS = ("time_ns", "pid", "tid", "event", "cgroup", "container")


class Instances:
    """The processes that had a pid one after the other: each fork of it begins another one."""

    def __init__(self, processes: pa.Table) -> None:
        """Sorts the forks; `processes`: columns time_ns, pid, tid and event of `process` rows, in any order."""
        times, pids, tids = (processes[name].to_numpy() for name in ("time_ns", "pid", "tid"))
        begins = rows_equal(processes["event"], "fork") & (pids == tids)
        self._begins = TimesByPid(pids[begins], times[begins])
        self._factor = np.uint64(int(begins.sum()) + 1)

    def keys(self, pids: NDArray[np.integer], times: NDArray[np.integer]) -> NDArray[np.uint64]:
        """Returns a number for the process that had each pid at a time, ns: uint64[n]."""
        wide = pids.astype(np.uint64)
        found: NDArray[np.uint64] = wide * self._factor
        found += self._begins.at(wide, times.astype(np.uint64)).astype(np.uint64)
        return found


class InCgroups:
    """The processes that a filter by cgroup or container selects.

    Attributes:
        pids: those that such a process had at any time.
    """

    def __init__(self, processes: pa.Table, matches: Callable[[str, str], bool]) -> None:
        """Applies the filter.

        Args:
            processes: COLUMNS of `process` rows.
            matches: tells whether a cgroup and a container are selected; each is empty if there is none.
        """
        self._instances = Instances(processes)
        described = processes.filter(pa.array(rows_equal(processes["event"], "described")))
        cgroups, containers = dict[str | None, int](), dict[str | None, int]()
        cgroup, container = number_texts(described["cgroup"], cgroups), number_texts(described["container"], containers)
        names = [each or "" for each in cgroups], [each or "" for each in containers]
        pairs, which = np.unique(np.stack([cgroup, container], axis=1), axis=0, return_inverse=True)
        wanted = np.array([matches(names[0][one], names[1][other]) for one, other in pairs.tolist()], bool)
        chosen = wanted[which.reshape(-1)] if len(pairs) else np.zeros(0, bool)
        pids, times = described["pid"].to_numpy()[chosen], described["time_ns"].to_numpy()[chosen]
        self.pids: set[int] = set(np.unique(pids).tolist())
        self._keys = np.unique(self._instances.keys(pids, times))

    def has(self, pids: NDArray[np.integer], times: NDArray[np.integer]) -> NDArray[np.bool_]:
        """Tells whether the process that had each pid at a time, ns, is selected: bool[n]."""
        return np.isin(self._instances.keys(pids, times), self._keys)
