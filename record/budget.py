"""The budget of a recorder's CPU time (`--max-cpu`): what it uses, and when sampling is thinned or restored."""

from __future__ import annotations

import resource
import time
from collections import deque
from collections.abc import Sequence
from math import ceil, log2
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from iaprof.formats.header.budgets import BUDGET, THINNED, change, sampled
from iaprof.record.journal import Journal

if TYPE_CHECKING:
    from iaprof.record.sources.source import Source
NEAR = 0.85  # of the budget: sampling is thinned here, before the budget is passed
FAR = 0.4  # of the budget: a level may be restored, which at most doubles the use
SHORTEST_S = 5.0  # over which use is measured: the recorder works in bursts, for example when it begins another file
WINDOW_S = 60.0
CALM_S = 60.0  # of use below FAR until a level is restored
MOST_CALM_S = 960.0
SPREAD_S = 600.0  # over which the cost of a child that has ended counts, such as one that has written a capture
SLOWEST_METRICS_NS = 10_000_000_000


class Level(NamedTuple):
    """How densely to sample; 0: not at all."""

    cpu_hz: int  # CPU samples per second and CPU
    metric_interval_ns: int


def levels(full: Level) -> tuple[Level, ...]:
    """Returns the levels from `full` on: CPU samples are halved to 1 Hz, then none; then metrics get rarer."""
    found = [full]
    while found[-1].cpu_hz:
        found.append(Level(found[-1].cpu_hz // 2, full.metric_interval_ns))
    while 0 < found[-1].metric_interval_ns < SLOWEST_METRICS_NS:
        found.append(Level(0, min(found[-1].metric_interval_ns * 2, SLOWEST_METRICS_NS)))
    return tuple(found)


class Step(NamedTuple):
    """What a budget asks for."""

    level: Level
    share: float  # of one CPU: the use that led to it
    thinner: bool
    passed: bool = False  # nothing can be thinned any more, and the budget is passed


class Budget:
    """Decides about levels by what was used in a sliding window; it is told of that, and reads no clock or counter."""

    def __init__(self, share: float, full: Level) -> None:
        """Begins with the full level.

        Args:
            share: of one CPU that may be used, above 0.
            full: what is sampled as long as there is room.
        """
        self._share, self._levels, self._at = share, levels(full), 0
        self._samples: deque[tuple[float, float]] = deque()  # seconds, and CPU seconds used until then
        self._ended: deque[tuple[float, float]] = deque()  # when children ended, and what they had used
        self._ended_s: float | None = None
        self._calm_since: float | None = None
        self._calm_s = CALM_S
        self._restored_at: float | None = None
        self._was_passed = False

    @property
    def level(self) -> Level:
        """What is to be sampled now."""
        return self._levels[self._at]

    def add(self, now_s: float, used_s: float, ended_s: float = 0.0) -> Step | None:
        """Takes a measurement; call it about once a second.

        Args:
            now_s: the time, from any start.
            used_s: CPU seconds that were used until now, by all that runs.
            ended_s: those of children that have ended, until now; their cost counts over SPREAD_S.

        Returns:
            The step to take; None if nothing changes.
        """
        self._add_ended(now_s, ended_s)
        self._samples.append((now_s, used_s))
        while len(self._samples) > 2 and now_s - self._samples[1][0] >= WINDOW_S:
            self._samples.popleft()
        first_s, first_used_s = self._samples[0]
        if now_s - first_s < SHORTEST_S:
            return None
        share = max(used_s - first_used_s, 0.0) / (now_s - first_s) + sum(each for _, each in self._ended) / SPREAD_S
        if share > NEAR * self._share:
            return self._thinned(now_s, share)
        self._was_passed = False
        return self._restored(now_s, share)

    def _add_ended(self, now_s: float, ended_s: float) -> None:
        if self._ended_s is not None and ended_s > self._ended_s:
            self._ended.append((now_s, ended_s - self._ended_s))
        self._ended_s = ended_s
        while self._ended and now_s - self._ended[0][0] >= SPREAD_S:
            self._ended.popleft()

    def _thinned(self, now_s: float, share: float) -> Step | None:
        self._calm_since = None
        if self._at == len(self._levels) - 1:
            if share <= self._share or self._was_passed:
                return None
            self._was_passed = True
            return Step(self.level, share, thinner=True, passed=True)
        if self._restored_at is not None and now_s - self._restored_at < self._calm_s:
            self._calm_s = min(self._calm_s * 2, MOST_CALM_S)  # it was restored too early
        # A level halves at most: as many are skipped as a use far above the budget needs.
        skipped = max(1, ceil(log2(share / (NEAR * self._share))))
        return self._to(min(self._at + skipped, len(self._levels) - 1), share)

    def _restored(self, now_s: float, share: float) -> Step | None:
        if share > FAR * self._share or not self._at:
            self._calm_since = None
            return None
        if self._calm_since is None:
            self._calm_since = now_s
        if now_s - self._calm_since < self._calm_s:
            return None
        self._calm_since, self._restored_at = None, now_s
        return self._to(self._at - 1, share)

    def _to(self, at: int, share: float) -> Step:
        thinner, self._at = at > self._at, at
        last = self._samples[-1]
        self._samples.clear()  # what was used before says nothing of this level
        self._samples.append(last)
        return Step(self.level, share, thinner)


_PASSED = "--max-cpu is exceeded: launches and stalls alone need more, and are still recorded"


class BudgetKeeper:
    """Measures what a recording uses, has sources sample less or more, and writes down each change.

    It counts from the recording's beginning; what opening took does not count.
    """

    def __init__(self, share: float, full: Level, sources: Sequence[Source], journal: Journal) -> None:
        """Takes the budget.

        Args:
            share: of one CPU, above 0.
            full: what is sampled as long as there is room.
            sources: are told to sample less or more.
            journal: gets the changes.
        """
        self._share, self._full, self._sources, self._journal = share, full, sources, journal
        self._budget = Budget(share, full)
        self._last: dict[str, Any] | None = None  # the change that is in force
        self._measured_ns = time.monotonic_ns()

    def header(self) -> dict[str, Any]:
        """Returns the members of the header of an output file that begins now."""
        in_force = [self._last] if self._last is not None and self._budget.level != self._full else []
        return {BUDGET: round(self._share * 100, 4), THINNED: in_force}

    def measure(self) -> None:
        """Measures what was used, and changes how densely sources sample, if need be."""
        now = time.monotonic_ns()
        used = cpu_seconds() + sum(source.cpu_seconds + source.probe_seconds for source in self._sources)
        step = self._budget.add(now / 1e9, used, children_cpu_seconds())
        if step is not None and step.passed:
            self._journal.loss("budget", "passed", None, _PASSED, self._measured_ns, now)
            self._journal.warn(f"{_PASSED} ({step.share:.1%} of a CPU used, {self._share:.2%} allowed)")
        elif step is not None:
            for source in self._sources:
                source.thin(step.level)
            level = step.level
            self._last = change(now, level.cpu_hz, level.metric_interval_ns, step.share)
            self._journal.append(THINNED, self._last)
            why = "to stay within --max-cpu" if step.thinner else "because there is room again"
            what = sampled(level.cpu_hz, level.metric_interval_ns)
            self._journal.warn(f"{what} from now on, {why} ({step.share:.2%} of a CPU used, {self._share:.2%} allowed)")
        self._measured_ns = now


def cpu_seconds() -> float:
    """Returns user and system time of this process, without its children's."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def children_cpu_seconds() -> float:
    """Returns user and system time of this process's children that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def peak_bytes() -> int:
    """Returns the peak resident memory. Not from getrusage: its value can be that of the parent before exec."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0
