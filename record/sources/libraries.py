"""The source of drivers' libraries: puts probes into them when a process has mapped them."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from iaprof.bpf import processes
from iaprof.bpf.probes.launches import LaunchProbes
from iaprof.bpf.probes.libraries import Mapped, Outcome
from iaprof.formats.header.launch_warnings import (
    COPIES,
    DRAWS,
    OWN_KERNELS,
    SINGLE_STEPPED,
    UNPROBED,
    slow_launches_sentence,
)
from iaprof.formats.wire.process_maps import maps_of
from iaprof.record.journal import Journal
from iaprof.record.kernels.calibrating import Calibrator
from iaprof.record.loop import Loop
from iaprof.record.scope import Scope
from iaprof.record.sources.finished_stacks import FinishedStacks
from iaprof.record.sources.source import Source
from iaprof.record.symbolize.roots import Roots

TURN_NS = 10_000_000  # of probing libraries, before the other sources' turns
MOST_PATHS = 16  # of drivers that one process maps at once; more are ignored


class MappedLibraries(Source):
    """The drivers of running processes, and of those that map one later, which the source SideBand reports."""

    def __init__(
        self,
        probes: LaunchProbes,
        installed: Iterable[Outcome],
        scope: Scope | None,
        roots: Roots,
        stacks: FinishedStacks,
        calibrator: Calibrator,
    ) -> None:
        """Begins with the installed drivers, which no process needs to have mapped.

        Args:
            probes: put into the drivers.
            installed: the outcomes of putting probes into installed drivers.
            scope: the processes in scope; None for all.
            roots: keeps the root folders of processes that mapped a driver.
            stacks: gets told of these processes, and of those that run an interpreter.
            calibrator: calibrates drivers of unknown builds.
        """
        self._calibrator = calibrator
        self._probes, self._installed, self._scope, self._roots, self._stacks = probes, installed, scope, roots, stacks
        self._mapped: dict[int, Mapped] = {}  # by pid: libraries mapped since the last look, in order
        self._ready_ns = 0  # since when the drivers that were there at the start have probes
        self._libraries: list[dict[str, object]] = []  # of the header
        self._warned_of_waits = False

    def header(self) -> dict[str, Any]:
        """See Source."""
        return {"libraries": list(self._libraries)}

    def start(self, journal: Journal, loop: Loop) -> None:
        """See Source: attaches the probes."""
        self._journal, self._loop = journal, loop
        self._calibrator.ending = loop.forget
        self._calibrator.begun = lambda fd: loop.wait_for(fd, self._calibrated)
        self._tell_calibrated()
        self._add_outcomes(self._installed)
        self._add_outcomes(self._probes.libraries.running())
        chosen = set(self._scope.running if self._scope is not None else ())
        for pid in processes.running_pids():
            if pid in chosen:
                self._stacks.prepare(pid)
            elif b"python" in maps_of(pid):
                self._stacks.look_for_python(pid)
        self._ready_ns = time.monotonic_ns()

    def _calibrated(self) -> None:
        if path := self._calibrator.read():
            self._add_outcomes(self._probes.libraries.take_again(Path(path)))
        self._tell_calibrated()

    def _tell_calibrated(self) -> None:
        for sentence in self._calibrator.told:
            self._journal.warn(sentence)
        self._calibrator.told.clear()

    def mapped(self, time_ns: int, pid: int, path: bytes) -> None:
        """Notes that a process has mapped a file with a driver's name; `path` is its path in the process."""
        mapped = self._mapped.setdefault(pid, Mapped(time_ns, set()))
        if len(mapped.paths) < MOST_PATHS:
            mapped.paths.add(path)
        self._loop.keep_calling("libraries", self._probe_mapped)

    def _probe_mapped(self) -> None:
        """Probes the libraries of processes, for one turn: there may be many processes with long maps."""
        turn_ends = time.monotonic_ns() + TURN_NS
        while self._mapped and time.monotonic_ns() < turn_ends:
            pid = next(iter(self._mapped))
            mapped = self._mapped.pop(pid)
            self._roots.keep(pid)
            if self._is_in_scope(pid):
                self._stacks.prepare(pid)
            self._add_outcomes(self._probes.libraries.mapped(pid, mapped if self._is_counted(pid, mapped) else None))
        if not self._mapped:
            self._loop.stop_calling("libraries")

    def _add_outcomes(self, outcomes: Iterable[Outcome]) -> None:
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
            if outcome.draws:
                library[DRAWS] = True
            if outcome.waits and self._probes.records_waits:
                library["waits"] = outcome.waits
            self._libraries.append(library)
            self._journal.append("libraries", library)
            self._journal.inform(f"{outcome.path}: {outcome.probes} probes{f' ({way})' if way else ''}")
            if slow := slow_launches_sentence(library):
                self._journal.warn(slow)
            if (refused := self._probes.waits_refused) and not self._warned_of_waits:
                self._warned_of_waits = True
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
        """Whether a process counts if its launches may be missing: not one that ran before the recording."""
        return mapped.time_ns > self._ready_ns and self._is_in_scope(pid)

    def _is_in_scope(self, pid: int) -> bool:
        return self._scope is None or pid not in self._scope.others

    def count_missed(self) -> None:
        """Counts processes that ended before their drivers were probed, once all mappings are known."""
        for pid, mapped in self._mapped.items():
            if self._is_counted(pid, mapped):
                self._probes.libraries.count_if_ended(pid, mapped)

    def footer(self) -> dict[str, Any]:
        """See Source."""
        unprobed = self._probes.libraries.take_unprobed().to_json()
        return {UNPROBED: unprobed} if unprobed else {}
