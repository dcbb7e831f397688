"""Processes that mapped a driver before it had probes, as launches in that time are missing: a header's `unprobed`.

A driver that lies where iaprof does not look, such as in a container, is found when a process maps it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from iaprof.basics.quantities import counted

MEMBER = "unprobed"
_MOST_REMEMBERED = 4096  # processes; of more, some may count twice
_MOST = 1 << 63


@dataclass
class Unprobed:
    """How many there are."""

    processes: int = 0  # that had mapped a driver when its probes were attached
    longest_ns: int = 0  # from the mapping until then, at most
    ended: int = 0  # processes that ended, or unmapped it, before anybody could look at the driver
    _pids: set[int] = field(default_factory=set)

    def waited(self, pid: int, ns: int) -> None:
        """A process had a driver mapped for so long without probes."""
        self.longest_ns = max(self.longest_ns, ns)
        self.processes += pid not in self._pids
        self._remember(pid)

    def gone(self, pid: int) -> None:
        """A process ended before its driver was looked at."""
        self.ended += pid not in self._pids
        self._remember(pid)

    def _remember(self, pid: int) -> None:
        if len(self._pids) >= _MOST_REMEMBERED:
            self._pids.clear()
        self._pids.add(pid)

    def to_json(self) -> dict[str, int]:
        """For the header; empty if there are none."""
        if not self.processes and not self.ended:
            return {}
        return {"processes": self.processes, "longest_ns": self.longest_ns, "ended": self.ended}


def sentence(said: Any) -> str:
    """One without its full stop for that member of a header, which may be anyone's; empty if there is nothing."""
    match said:
        case {"processes": int(processes), "longest_ns": int(longest), "ended": int(ended)} if all(
            type(number) is int and 0 <= number < _MOST for number in (processes, longest, ended)
        ):
            pass
        case _:
            return ""
    parts = []
    if processes:
        most = "up to " if processes > 1 else ""
        parts.append(
            f"{counted(processes, 'process', 'processes')} mapped a driver {most}{longest / 1e6:,.0f} ms before it had "
            "probes: launches in that time, if any, are missing"
        )
    if ended:
        it = "it" if ended == 1 else "they"
        parts.append(
            f"{counted(ended, 'process', 'processes')} mapped a driver and ended before it had probes: what {it} "
            "launched, if anything, is missing"
        )
    return "; ".join(parts)
