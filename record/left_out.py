"""Which CPU samples reports leave out: those of the recorder's own processes, and those of processes out of scope.

The header has the recorder's pid, the command's, and the pids that were in scope when the file began; the side-band has
what ran then, and all forks. A pid that is used again belongs to the process that forked last.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from iaprof.formats.wire.sideband import Processes

RECORDER = "recorder_pid"
"""The header's pid of the recorder; its children are its own, but for the command."""
COMMAND = "command_pid"
"""The header's pid of the command and the time, CLOCK_MONOTONIC ns, after which it was forked, in a list."""
SCOPE = "sampled_pids"
"""The header's list of the processes that were in scope when the file began; without it, all are."""


class Whose(IntEnum):
    """To whom a process belongs."""

    SCOPE = 0
    RECORDER = 1
    OTHER = 2


class _Tasks:
    """Columns of a kind of process event, as arrays: a recording can have a million."""

    def __init__(self) -> None:
        self.time, self.pid, self.parent = array("Q"), array("I"), array("I")

    def add(self, time: int, pid: int, parent: int) -> None:
        self.time.append(time)
        self.pid.append(pid)
        self.parent.append(parent)


class LeftOut:
    """The processes of a file: to whom each belongs."""

    def __init__(self) -> None:
        self._tasks = {"running": _Tasks(), "fork": _Tasks()}
        self._changes: tuple[NDArray[np.uint64], NDArray[np.uint64], NDArray[np.uint8]] | None = None

    def add(self, processes: Processes) -> None:
        """Adds the processes that ran, and those that forked; call it for all before `whose`."""
        columns = processes.time, processes.pid, processes.tid, processes.ppid, processes.event
        for time, pid, tid, parent, event in zip(*columns, strict=True):
            if pid == tid and parent is not None and event in self._tasks:
                self._tasks[event].add(time, pid, parent)

    def whose(
        self, header: Mapping[str, Any], pids: NDArray[np.uint32], times: NDArray[np.uint64]
    ) -> NDArray[np.uint8]:
        """Returns to whom the process belongs that had each pid at a time: uint8[n] of Whose.

        Args:
            header: of the file; without RECORDER, as of earlier versions, all processes are in scope.
            pids: uint32[n].
            times: uint64[n], CLOCK_MONOTONIC ns.
        """
        if self._changes is None:
            self._changes = self._sorted_changes(header)
        # A key is a pid, and below it the number of distinct times of changes up to a time.
        distinct, keys, whose = self._changes
        first = pids.astype(np.uint64) << np.uint64(32)
        at = np.searchsorted(keys, first + np.searchsorted(distinct, times, "right").astype(np.uint64), "right")
        is_known = at > np.searchsorted(keys, first)
        return np.where(is_known, whose[at - 1], _default(header)).astype(np.uint8)

    def _sorted_changes(
        self, header: Mapping[str, Any]
    ) -> tuple[NDArray[np.uint64], NDArray[np.uint64], NDArray[np.uint8]]:
        """Returns the distinct times of changes, uint64[m]; their keys in order, uint64[n], and Whose, uint8[n].

        The last change is of no process, so that there is one.
        """
        changes = np.array([*self._all_changes(header), ((1 << 32) - 1, 0, Whose.SCOPE)], np.uint64)
        distinct, place = np.unique(changes[:, 1], return_inverse=True)
        keys = (changes[:, 0] << np.uint64(32)) + place.reshape(-1).astype(np.uint64) + np.uint64(1)
        order = np.argsort(keys, kind="stable")
        return distinct, keys[order], changes[order, 2].astype(np.uint8)

    def _all_changes(self, header: Mapping[str, Any]) -> list[tuple[int, int, int]]:
        """Follows the processes; returns the changes: pid, time, Whose."""
        recorder = _number(header.get(RECORDER))
        if not recorder:
            return []
        default = _default(header)
        command, since = [*map(_number, _items(header.get(COMMAND))), 0, 0][:2]
        of_command = default if "scope" in header else Whose.SCOPE  # with -p, it is out of scope
        chosen = {pid for pid in map(_number, _items(header.get(SCOPE))) if pid}
        own = self._below({recorder}, chosen | {command})
        known = dict.fromkeys(self._below(chosen, own | {command}), Whose.SCOPE) | dict.fromkeys(own, Whose.RECORDER)
        if command:
            known[command] = of_command
        changes = [(pid, 0, int(whose)) for pid, whose in known.items()]
        forks = self._tasks["fork"]
        order = np.argsort(np.frombuffer(forks.time, np.uint64), kind="stable").tolist()
        for time, pid, parent in ((forks.time[at], forks.pid[at], forks.parent[at]) for at in order):
            is_command = pid == command and parent == recorder and time >= since
            whose = of_command if is_command else known.get(parent, default)
            if known.get(pid, default) != whose:
                known[pid] = whose
                changes.append((pid, time, int(whose)))
        return changes

    def _below(self, pids: set[int], without: set[int]) -> set[int]:
        """Returns these processes and, of those that ran first, the ones below them, but for those in `without`."""
        running = self._tasks["running"]
        time, pid, parent = (np.array(column) for column in (running.time, running.pid, running.parent))
        is_first = time == time.min(initial=(1 << 64) - 1)
        pid, parent = pid[is_first], parent[is_first]
        found = pids
        while True:
            below = set(pid[np.isin(parent, list(found))].tolist()) - without | pids
            if below <= found:
                return found
            found = found | below


def _default(header: Mapping[str, Any]) -> Whose:
    """Returns to whom processes belong of which nothing is known."""
    is_scoped = isinstance(header.get(SCOPE), list) and _number(header.get(RECORDER))
    return Whose.OTHER if is_scoped else Whose.SCOPE


def _number(value: object) -> int:
    """Returns a pid or a time of a header; 0 if it is none."""
    return value if type(value) is int and 0 < value < 1 << 63 else 0


def _items(value: object) -> list[object]:
    return value if isinstance(value, list) else []
