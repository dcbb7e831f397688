"""Where tasks run: in processes of this machine (processes.py), or on a Dask cluster (cluster.py)."""

from __future__ import annotations

import os
import re

from iaprof.basics.errors import UsageError
from iaprof.formats.stores import shown
from iaprof.report.fleet.processes import LOCAL, Engine, Processes
from iaprof.report.fleet.sources import DEFAULT_TIMEOUT_S
from iaprof.sandbox.memory import DEFAULT_BYTES, available, limit

_MOST_LOCAL = 1024  # processes


def open_engine(cluster: str | None, timeout_s: float = DEFAULT_TIMEOUT_S) -> Engine:
    """Opens the engine that the user wants. Its processes may take as much memory as this one (--memory-limit).

    Args:
        cluster: the address of Dask's scheduler, or `local:N` for N processes of this machine; None: one for each
            core, if memory has room for them.
        timeout_s: how long a capture may take; one that takes longer is left out.

    Raises:
        UsageError: it is neither.
        IaprofError: the scheduler does not answer, or is of another version.
    """
    memory_bytes = limit() or DEFAULT_BYTES
    if cluster is None:
        workers = max(1, min(len(os.sched_getaffinity(0)), available() // memory_bytes))
    elif cluster.startswith(LOCAL):
        workers = _number_of_processes(cluster)
    else:
        from iaprof.report.fleet.cluster import Cluster

        return Cluster(cluster, memory_bytes, timeout_s)
    return Processes(workers, limit() or 0, timeout_s)


def _number_of_processes(cluster: str) -> int:
    number = cluster.removeprefix(LOCAL)
    if not re.fullmatch("[0-9]{1,9}", number) or not 0 < int(number) <= _MOST_LOCAL:
        raise UsageError(f"--cluster takes {LOCAL} and a number of processes, not {shown(cluster)}")
    return int(number)
