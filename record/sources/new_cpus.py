"""CPUs that come online while they are recorded: sources look for them, and say what they have missed."""

from __future__ import annotations

import time
from collections.abc import Sequence

from iaprof.basics.quantities import in_ranges
from iaprof.bpf.perf_event import EventsOfCpus
from iaprof.record.journal import Journal


class NewCpus:
    """Looks for CPUs that have come online, and writes a loss of what was missed there."""

    def __init__(self, events: EventsOfCpus, source: str, missed: str) -> None:
        """Begins with the CPUs that are watched.

        Args:
            events: those of the CPUs.
            source: of losses, for instance `side-band`.
            missed: what is lost on a CPU before it is watched.
        """
        self._events, self._source, self._missed = events, source, missed
        self._looked_ns, self._problem = time.monotonic_ns(), ""

    def look(self, journal: Journal) -> bool:
        """Opens events for CPUs that have come online; returns whether there are any."""
        now, come, problem = time.monotonic_ns(), [], ""
        try:
            come = self._events.follow_cpus()
        except OSError as error:
            problem = f"a CPU came online that cannot be watched (perf_event_open: {error.strerror})"
        if come or problem not in ("", self._problem):
            detail = f"{problem or _came_online(come)}: {self._missed}"
            journal.loss(self._source, "lost", None, detail, self._looked_ns, now)
        self._looked_ns, self._problem = now, problem
        return bool(come)


def _came_online(cpus: Sequence[int]) -> str:
    is_one = len(cpus) == 1
    which = f"CPU{'' if is_one else 's'} {in_ranges(cpus)}"
    return f"{which} came online, and {'was' if is_one else 'were'} not watched at first"
