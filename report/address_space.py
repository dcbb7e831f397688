"""What was mapped where in which process at which time, told from the side-band of a capture.

A mapping lasts until another covers it, until the process executes another program, or for good; a forked process
begins with its parent's.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from iaprof.report.layers import Layers

_MAX_FORKS = 16  # generations that share a mapping; a loop in a capture from a stranger ends here
_LAST_ADDRESS = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Place:
    """An address as a place in a file."""

    path: str
    build_id: bytes | None
    offset: int  # in the file, bytes


class AddressSpaces:
    """All processes of a capture."""

    def __init__(self, mappings: pa.Table, processes: pa.Table) -> None:
        """Sorts the rows by process and time.

        Args:
            mappings: `mapping` rows.
            processes: `process` rows.
        """
        self._times, self._starts, self._lengths, self._offsets = (
            mappings[name].to_numpy() for name in ("time_ns", "start", "length", "offset")
        )
        self._paths, self._build_ids = mappings["path"], mappings["build_id"]
        pids = mappings["pid"].to_numpy()
        order = np.argsort(pids, kind="stable")
        found, firsts = np.unique(pids[order], return_index=True)
        self._rows = dict(zip(found.tolist(), np.split(order, firsts[1:]), strict=False))
        self._layers: dict[int, Layers] = {}
        self._execs: dict[int, list[int]] = defaultdict(list)
        self._forks: dict[int, list[tuple[int, int]]] = defaultdict(list)
        columns = [processes[name].to_pylist() for name in ("time_ns", "pid", "tid", "ppid", "event")]
        for time, pid, tid, ppid, event in zip(*columns, strict=True):
            if event == "exec":
                self._execs[pid].append(time)
            elif event == "fork" and pid == tid and ppid is not None and ppid != pid:
                self._forks[pid].append((time, ppid))
        for execs in self._execs.values():
            execs.sort()
        for forks in self._forks.values():
            forks.sort()

    def find(self, pid: int, addresses: list[int], time_ns: int) -> list[Place | None]:
        """The files that `addresses` belonged to in process `pid` at a time; None where nothing is known of one."""
        places: list[Place | None] = [None] * len(addresses)
        left = np.arange(len(addresses))
        wanted = np.array(addresses, np.uint64)
        for _ in range(_MAX_FORKS):
            forks, execs = self._forks.get(pid, []), self._execs.get(pid, [])
            fork = bisect_right(forks, time_ns, key=lambda fork: fork[0])
            born, parent = forks[fork - 1] if fork else (0, None)
            exec_ = bisect_right(execs, time_ns)
            begun = max(execs[exec_ - 1] if exec_ else 0, born)
            rows = self._last_mappings(pid, wanted[left], time_ns)
            # A process's own first mappings carry the time of its exec or come after it.
            found = (rows >= 0) & (self._times[rows] >= begun) if len(self._times) else rows >= 0
            for index, row in zip(left[found].tolist(), rows[found].tolist(), strict=True):
                places[index] = self._place(row, addresses[index])
            left = left[~found]
            if parent is None or begun != born or not len(left):
                break
            pid, time_ns = parent, born
        return places

    def _place(self, row: int, address: int) -> Place:
        offset = address - int(self._starts[row]) + int(self._offsets[row])
        return Place(self._paths[row].as_py(), self._build_ids[row].as_py(), offset & _LAST_ADDRESS)

    def _last_mappings(self, pid: int, addresses: NDArray[np.uint64], time_ns: int) -> NDArray[np.int64]:
        """The rows of the process itself that cover the addresses, the last ones up to a time; -1 for none."""
        rows = self._rows.get(pid)
        if rows is None:
            return np.full(len(addresses), -1)
        if pid not in self._layers:
            starts = self._starts[rows]
            # What ends behind the last address ends there.
            ends = starts + np.minimum(self._lengths[rows], np.uint64(_LAST_ADDRESS) - starts)
            self._layers[pid] = Layers(starts, ends, self._times[rows], np.arange(len(rows)))
        layers = self._layers[pid]
        found = layers.last(layers.pieces(addresses), np.full(len(addresses), time_ns, np.uint64))
        return np.where(found >= 0, rows[found], -1)
