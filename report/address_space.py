"""What was mapped where in which process at which time, told from the side-band of a capture.

A mapping lasts until another covers it, until the process executes another program, or for good; a forked process
begins with its parent's.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import pyarrow as pa

_MAX_FORKS = 64  # generations that share a mapping; a loop in a capture from a stranger ends here


@dataclass(frozen=True, slots=True)
class Mapping:
    """Executable memory of a process."""

    time_ns: int
    start: int
    length: int
    offset: int  # of the first byte in the file
    path: str
    build_id: bytes | None


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
        self._mappings: dict[int, list[Mapping]] = defaultdict(list)
        names = ("time_ns", "pid", "start", "length", "offset", "path", "build_id")
        columns = [mappings[name].to_pylist() for name in names]
        for time, pid, start, length, offset, path, build_id in zip(*columns, strict=True):
            self._mappings[pid].append(Mapping(time, start, length, offset, path or "", build_id))
        for rows in self._mappings.values():
            rows.sort(key=lambda mapping: mapping.time_ns, reverse=True)
        self._execs: dict[int, list[int]] = defaultdict(list)
        self._forks: dict[int, list[tuple[int, int]]] = defaultdict(list)
        columns = [processes[name].to_pylist() for name in ("time_ns", "pid", "tid", "ppid", "event")]
        for time, pid, tid, ppid, event in zip(*columns, strict=True):
            if event == "exec":
                self._execs[pid].append(time)
            elif event == "fork" and pid == tid and ppid is not None and ppid != pid:
                self._forks[pid].append((time, ppid))

    def find(self, pid: int, address: int, time_ns: int) -> Place | None:
        """The file that `address` belonged to in process `pid` at a time; None where nothing is known of it."""
        for _ in range(_MAX_FORKS):
            born, parent = max((fork for fork in self._forks[pid] if fork[0] <= time_ns), default=(0, None))
            begun = max((time for time in self._execs[pid] if born <= time <= time_ns), default=born)
            for mapping in self._mappings[pid]:
                # A process's own first mappings carry the time of its exec or come after it.
                if begun <= mapping.time_ns <= time_ns and 0 <= address - mapping.start < mapping.length:
                    return Place(mapping.path, mapping.build_id, address - mapping.start + mapping.offset)
            if parent is None or begun != born:
                return None
            pid, time_ns = parent, born
        return None
