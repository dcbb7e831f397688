"""The processes in scope: those of `-p`, or the command, and their children.

With `-p`, launches of all other processes are recorded in short: stalls carry no process, so only everybody's launches
tell which process launched last at an address. With `-p` and with a command, CPU samples of other processes have no
stack, but for the recorder's own processes: what it costs must be known. A process not yet known to be in or out of
scope is recorded in full: a race costs bytes, but no stack.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

from iaprof.basics.errors import UsageError
from iaprof.bpf.probes.launches import LaunchProbes
from iaprof.bpf.processes import parents
from iaprof.formats.wire.sideband import possible_exits, possible_forks, process_events
from iaprof.record.journal import Journal

ORPHAN_NS = 2_000_000_000  # how long a fork waits for its parent's fork to become known


class Scope:
    """Which processes are in scope, as processes fork and end."""

    def __init__(self, pids: Iterable[int] = (), of_launches: bool = True) -> None:
        """Begins with the chosen processes.

        Args:
            pids: the processes; empty if `add_command` adds one.
            of_launches: whether launches of other processes are recorded in short, not only CPU samples.

        Raises:
            UsageError: a process is not running.
        """
        self.pids = dict.fromkeys(pids)  # all that have been in scope, in order; ended ones, too
        for pid in self.pids:
            if not os.path.exists(f"/proc/{pid}"):
                raise UsageError(f"there is no process {pid}: -p takes the pids of running processes")
        self._of_launches = of_launches
        self._in_scope = set(self.pids)
        self.others: set[int] = set()
        self._own = {os.getpid()} - self._in_scope  # the recorder and its children
        self._command: int | None = None  # its pid until its fork is read
        self._orphans: list[tuple[int, int, int, bool]] = []  # forks of a parent that is not yet known to be in or out

    @property
    def running(self) -> list[int]:
        """The processes in scope that run, as far as forks and exits were read."""
        return sorted(self._in_scope)

    def start(self, journal: Journal, probes: LaunchProbes) -> None:
        """Excludes the running processes out of scope from the probes. Call it when forks are already recorded."""
        self._journal, self._probes = journal, probes
        children: dict[int, list[int]] = {}
        running = parents()
        for pid, parent in running.items():
            children.setdefault(parent, []).append(pid)
        self._own |= set(_below(self._own, children, self._in_scope))
        for pid in _below(self._in_scope, children, self._own):
            self._add(pid)
        self.others = running.keys() - self._in_scope - self._own
        self._exclude(self.others)

    def _exclude(self, pids: Iterable[int]) -> None:
        self._probes.exclude(pids, launches=self._of_launches)

    def _add(self, pid: int) -> None:
        self._in_scope.add(pid)
        if self._of_launches and pid not in self.pids:
            self.pids[pid] = None
            self._journal.append("scope", pid)

    def add_command(self, pid: int) -> None:
        """Adds the command, whose parent is the recorder: with `-p`, it is another process."""
        self._command = pid
        if self._of_launches:
            self.others.add(pid)
            self._exclude([pid])
        else:
            self._add(pid)

    def follow(self, records: Iterable[bytes]) -> None:
        """Follows forks and exits in side-band records of all CPUs."""
        # Most data has mappings only.
        read = [data for data in records if len(possible_forks(data)) or len(possible_exits(data)[0])]
        events = sorted([*self._orphans, *(event for data in read for event in process_events(data))])
        self._orphans = []
        for time_ns, pid, parent, begins in events:
            self.others.discard(pid)
            self._in_scope.discard(pid)
            self._own.discard(pid)
            if begins and pid == self._command:
                self.add_command(pid)
                self._command = None
            elif begins and parent in self._in_scope:
                self._add(pid)
            elif begins and parent in self._own:
                self._own.add(pid)
            elif begins and parent in self.others:
                self.others.add(pid)
            elif begins and events[-1][0] - time_ns < ORPHAN_NS:  # the parent's fork may be in another CPU's buffer
                self._orphans.append((time_ns, pid, parent, begins))
        touched = {pid for _, pid, _, _ in events}
        self._exclude(touched & self.others)
        self._probes.include(touched - self.others)


def _below(pids: set[int], children: dict[int, list[int]], without: set[int]) -> list[int]:
    """Returns the children of processes, and theirs, but for processes in `without` and those below them."""
    found, unvisited = dict.fromkeys(pids), list(pids)
    while unvisited:
        below = [pid for pid in children.get(unvisited.pop(), ()) if pid not in found and pid not in without]
        found |= dict.fromkeys(below)
        unvisited += below
    return [pid for pid in found if pid not in pids]
