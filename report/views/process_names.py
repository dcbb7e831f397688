"""The names of processes, from a capture's process events."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from iaprof.formats.capture.dictionaries import number_texts, rows_equal

COLUMNS = ("time_ns", "pid", "tid", "ppid", "event", "comm")


def process_names(processes: pa.Table) -> dict[int, str]:
    """Returns the last name of each process, by pid.

    A process that was forked, and was not named since, has the name that its parent had then.

    Args:
        processes: `process` rows, at least COLUMNS.
    """
    texts: dict[str | None, int] = {}
    comm = number_texts(processes["comm"], texts)
    time, pid, tid = (processes[name].to_numpy() for name in ("time_ns", "pid", "tid"))
    ppid = processes["ppid"].fill_null(0).to_numpy()
    names = [text or "" for text in texts]
    place = np.empty(len(names), np.int64)  # the alphabetical order decides between names of the same time
    place[sorted(range(len(names)), key=names.__getitem__)] = np.arange(len(names))
    is_named = (pid == tid) & np.array([name != "" for name in names], bool)[comm]
    is_fork = (pid == tid) & (pid != ppid) & rows_equal(processes["event"], "fork") & ~is_named
    rows = np.flatnonzero(is_named | is_fork)
    rows = rows[np.lexsort((place[comm[rows]], is_named[rows], time[rows]))]
    # By process, then in this order: a fork refers to the last row of the parent that comes before it.
    count, at = len(rows), np.arange(len(rows))
    keys = pid[rows].astype(np.int64) * count + at
    by_process = np.argsort(keys)
    whose = pid[rows[by_process]]
    before = np.searchsorted(keys[by_process], ppid[rows].astype(np.int64) * count + at) - 1
    has_parent = (before >= 0) & (whose[before] == ppid[rows])
    named_by = np.where(is_named[rows], at, np.where(has_parent, by_process[before], count))
    named_by = np.append(named_by, count)  # stands for no name
    while not np.array_equal(named_by, further := named_by[named_by]):
        named_by = further
    is_last = np.append(whose[1:] != whose[:-1], True)[:count]
    last = by_process[is_last]
    last = last[named_by[last] < count]
    return dict(zip(pid[rows[last]].tolist(), map(names.__getitem__, comm[rows[named_by[last]]].tolist()), strict=True))
