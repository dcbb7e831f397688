"""`-p`: the chosen processes and their children; launches of all other processes are recorded in short.

Those are needed because stalls carry no process: only everybody's launches tell which process launched last at an
address. A process not yet known to be in or out of scope is recorded in full: a race costs bytes, but no stack.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

from iaprof.basics.errors import UsageError
from iaprof.bpf.probes.launches import LaunchProbes
from iaprof.bpf.processes import parents
from iaprof.formats.wire.sideband import process_events
from iaprof.record.capture.journal import Journal

ORPHAN_NS = 2_000_000_000  # how long a fork waits for its parent's fork to become known


class Scope:
    """Which processes are in scope, as processes fork and end."""

    def __init__(self, pids: Iterable[int]) -> None:
        """Begins with the chosen processes.

        Raises:
            UsageError: a process is not running.
        """
        self.pids = dict.fromkeys(pids)  # all that have been in scope, in order; ended ones, too
        for pid in self.pids:
            if not os.path.exists(f"/proc/{pid}"):
                raise UsageError(f"there is no process {pid}: -p takes the pids of running processes")
        self._in_scope = set(self.pids)
        self.others: set[int] = set()
        self._orphans: list[tuple[int, int, int, bool]] = []  # forks of a parent that is not yet known to be in or out

    def start(self, journal: Journal, probes: LaunchProbes) -> None:
        """Excludes the running processes out of scope from the probes. Call it when forks are already recorded."""
        self._journal, self._probes = journal, probes
        running = parents()
        children: dict[int, list[int]] = {}
        for pid, parent in running.items():
            children.setdefault(parent, []).append(pid)
        unvisited = list(self._in_scope)
        while unvisited:
            for pid in children.get(unvisited.pop(), ()):
                if pid not in self._in_scope:
                    self._add(pid)
                    unvisited.append(pid)
        self.others = running.keys() - self._in_scope
        probes.exclude(self.others)

    def _add(self, pid: int) -> None:
        self._in_scope.add(pid)
        if pid not in self.pids:
            self.pids[pid] = None
            self._journal.append("scope", pid)

    def follow(self, records: Iterable[bytes]) -> None:
        """Follows forks and exits in side-band records of all CPUs."""
        events = sorted([*self._orphans, *(event for data in records for event in process_events(data))])
        self._orphans = []
        for time, pid, parent, begins in events:
            self.others.discard(pid)
            self._in_scope.discard(pid)
            if begins and parent in self._in_scope:
                self._add(pid)
            elif begins and parent in self.others:
                self.others.add(pid)
            elif begins and events[-1][0] - time < ORPHAN_NS:  # the parent's fork may be in another CPU's buffer
                self._orphans.append((time, pid, parent, begins))
        touched = {pid for _, pid, _, _ in events}
        self._probes.exclude(touched & self.others)
        self._probes.include(touched - self.others)
