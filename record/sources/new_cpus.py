"""CPUs that come online while they are recorded: sources look for them, and say what they have missed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from iaprof.basics.quantities import in_ranges


class PerCpu(Protocol):
    """What has a perf event on each CPU."""

    def follow_cpus(self) -> list[int]:
        """Opens events for CPUs that have come online, whose numbers it returns.

        Raises:
            OSError: perf_event_open(2) failed.
        """


def new_cpus(events: PerCpu) -> tuple[list[int], str]:
    """Returns the CPUs that have come online, and why one of them cannot be watched; "" if all are."""
    try:
        return events.follow_cpus(), ""
    except OSError as error:
        return [], f"a CPU came online that cannot be watched (perf_event_open: {error.strerror})"


def came_online(cpus: Sequence[int]) -> str:
    """Says which CPUs have come online."""
    is_one = len(cpus) == 1
    which = f"CPU{'' if is_one else 's'} {in_ranges(cpus)}"
    return f"{which} came online, and {'was' if is_one else 'were'} not watched at first"
