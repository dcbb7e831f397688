"""The source of what is said of drivers' libraries: they get probes when a process has mapped them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

from iaprof.bpf import processes
from iaprof.bpf.probes.launches import LaunchProbes
from iaprof.bpf.probes.libraries import Mapped, Outcome
from iaprof.formats.header.slow_launches import MEMBER as SINGLE_STEPPED, sentence
from iaprof.formats.header.unprobed import MEMBER as UNPROBED
from iaprof.formats.header.unrecorded_copies import MEMBER as COPIES, OWN_KERNELS
from iaprof.formats.wire.process_maps import maps_of
from iaprof.record.capture.journal import Journal
from iaprof.record.loop import Loop
from iaprof.record.scope import Scope
from iaprof.record.sources.source import Source

TURN_NS = 10_000_000  # of looking for libraries, before others get theirs
MOST_PATHS = 16  # of drivers that one process mapped at once, that are remembered


class MappedLibraries(Source):
    """The drivers of processes that run already and of those that map one later. SideBand tells of these."""

    def __init__(self, probes: LaunchProbes, there: Iterable[Outcome], scope: Scope | None) -> None:
        """Begins with the drivers that nobody needs to have mapped yet.

        Args:
            probes: that drivers get.
            there: what became of these drivers.
            scope: which processes are meant; None for all.
        """
        self._probes, self._there, self._scope = probes, there, scope
        self._mapping: dict[int, Mapped] = {}  # by process that mapped a library, in order
        self._ready_ns = 0  # since when probes are in the drivers that were there
        self._libraries: list[dict[str, object]] = []  # as the header has them
        self._told_of_waits = False  # that they are not recorded
        self.on_mapped: Callable[[int], None] = lambda _: None  # is told the pid of who mapped a library
        self.on_python: Callable[[int], None] = lambda _: None  # is told who runs an interpreter already

    def header(self) -> dict[str, Any]:
        """See Source."""
        return {"libraries": list(self._libraries)}

    def start(self, journal: Journal, loop: Loop) -> None:
        """See Source: attaches the probes."""
        self._journal, self._loop = journal, loop
        self._took(self._there)
        self._took(self._probes.libraries.running())
        for pid in processes.running_pids():
            if b"python" in maps_of(pid):
                self.on_python(pid)
        self._ready_ns = time.monotonic_ns()

    def mapped(self, time_ns: int, pid: int, path: bytes) -> None:
        """A process mapped a file that has a library's name, and this path for the process."""
        mapped = self._mapping.setdefault(pid, Mapped(time_ns, set()))
        if len(mapped.paths) < MOST_PATHS:
            mapped.paths.add(path)
        self._loop.keep_calling("libraries", self._look_into_processes)

    def _look_into_processes(self) -> None:
        """Their maps may be long, and they may be many: one turn."""
        turn_ends = time.monotonic_ns() + TURN_NS
        while self._mapping and time.monotonic_ns() < turn_ends:
            pid = next(iter(self._mapping))
            mapped = self._mapping.pop(pid)
            self.on_mapped(pid)
            self._took(self._probes.libraries.mapped(pid, mapped if self._is_counted(pid, mapped) else None))
        if not self._mapping:
            self._loop.stop_calling("libraries")

    def _took(self, outcomes: Iterable[Outcome]) -> None:
        for outcome in outcomes:
            now = time.monotonic_ns()
            way = str(outcome.way) if outcome.way else None
            since = outcome.since_ns or now
            library: dict[str, object] = {"path": outcome.path, "probes": outcome.probes, "since_ns": since, "way": way}
            if outcome.probes:
                library["executions"] = outcome.executions
            if outcome.single_stepped:
                library[SINGLE_STEPPED] = list(outcome.single_stepped)
            if outcome.way:
                library[COPIES] = outcome.copies
                library[OWN_KERNELS] = outcome.own_kernels
            if outcome.waits and self._probes.records_waits:
                library["waits"] = outcome.waits
            self._libraries.append(library)
            self._journal.append("libraries", library)
            self._journal.inform(f"{outcome.path}: {outcome.probes} probes{f' ({way})' if way else ''}")
            if slow := sentence(library):
                self._journal.warn(slow)
            if (refused := self._probes.waits_refused) and not self._told_of_waits:
                self._told_of_waits = True
                self._journal.loss("waits", "not recorded", None, f"{outcome.path}: {refused}", now, now)
                self._journal.warn(f"waits for the GPU are not recorded in {outcome.path}: {refused}")
            if outcome.problem:
                problem = f"{outcome.path} is not probed: {outcome.problem}"
                self._journal.loss("launches", "library", None, problem, now, now)
                self._journal.warn(problem)
            if outcome.doubt:
                self._journal.loss("launches", "library", None, f"{outcome.path}: {outcome.doubt}", now, now)
                self._journal.warn(f"{outcome.path}: {outcome.doubt}")

    def _is_counted(self, pid: int, mapped: Mapped) -> bool:
        """Whether it matters that launches may be missing: not of processes that ran before the recording."""
        return mapped.time_ns > self._ready_ns and (self._scope is None or pid not in self._scope.others)

    def count_missed(self) -> None:
        """Counts processes that ended before anybody could look at their drivers, once all mappings were told."""
        for pid, mapped in self._mapping.items():
            if self._is_counted(pid, mapped):
                self._probes.libraries.missed(pid, mapped)

    def footer(self) -> dict[str, Any]:
        """See Source."""
        unprobed = self._probes.libraries.take_unprobed().to_json()
        return {UNPROBED: unprobed} if unprobed else {}
