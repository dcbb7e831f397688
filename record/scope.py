"""`-p`: the processes that are meant, and their children; launches of all others are kept as short as can be.

They are kept at all because stalls carry no process: who launched last at an address is known only from everybody's
launches. A process of which nobody knows yet whose it is is recorded in full, so that a race costs bytes and no stack.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

from iaprof.basics.errors import UsageError
from iaprof.bpf.probes.launches import LaunchProbes
from iaprof.bpf.processes import parents
from iaprof.formats.wire.sideband import process_events
from iaprof.record.capture.journal import Journal

ORPHAN_NS = 2_000_000_000  # after which a process's parent is not waited for any longer


class Scope:
    """Which processes are meant, as they fork and end."""

    def __init__(self, pids: Iterable[int]) -> None:
        """Begins with these.

        Raises:
            UsageError: one of them is not running.
        """
        self.pids = dict.fromkeys(pids)  # in order; those that ended, too
        for pid in self.pids:
            if not os.path.exists(f"/proc/{pid}"):
                raise UsageError(f"there is no process {pid}: -p takes the pids of running processes")
        self._meant = set(self.pids)
        self.others: set[int] = set()
        self._orphans: list[tuple[int, int, int, bool]] = []  # forks of whose parent nothing is known yet

    def start(self, journal: Journal, probes: LaunchProbes) -> None:
        """Tells the probes who is not meant. To be called when forks are watched already."""
        self._journal, self._probes = journal, probes
        running = parents()
        children: dict[int, list[int]] = {}
        for pid, parent in running.items():
            children.setdefault(parent, []).append(pid)
        left = list(self._meant)
        while left:
            for pid in children.get(left.pop(), ()):
                if pid not in self._meant:
                    self._add(pid)
                    left.append(pid)
        self.others = running.keys() - self._meant
        probes.exclude(self.others)

    def _add(self, pid: int) -> None:
        self._meant.add(pid)
        if pid not in self.pids:
            self.pids[pid] = None
            self._journal.append("scope", pid)

    def follow(self, records: Iterable[bytes]) -> None:
        """Looks at side-band records, of all CPUs, for processes that fork and end."""
        events = sorted([*self._orphans, *(event for data in records for event in process_events(data))])
        self._orphans = []
        for time, pid, parent, begins in events:
            self.others.discard(pid)
            self._meant.discard(pid)
            if begins and parent in self._meant:
                self._add(pid)
            elif begins and parent in self.others:
                self.others.add(pid)
            elif begins and events[-1][0] - time < ORPHAN_NS:  # its parent's fork may be in another CPU's buffer
                self._orphans.append((time, pid, parent, begins))
        touched = {pid for _, pid, _, _ in events}
        self._probes.exclude(touched & self.others)
        self._probes.include(touched - self.others)
