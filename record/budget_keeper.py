"""Keeps a recording to its budget: measures its use, has sources sample less or more, writes down each change."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from iaprof.formats.header.budgets import BUDGET, THINNED, change, sampled
from iaprof.record.budget import Budget, Level
from iaprof.record.journal import Journal
from iaprof.record.own_cost import children_cpu_seconds, cpu_seconds
from iaprof.record.sources.source import Source

_PASSED = "--max-cpu is exceeded: launches and stalls alone need more, and are still recorded"


class BudgetKeeper:
    """A recording's budget, from its beginning; what opening took does not count."""

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
