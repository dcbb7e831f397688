"""The header member `unprobed`: processes that mapped a driver before it had probes, so that launches are missing.

A driver at a path that iaprof does not search, such as in a container, is found only when a process maps it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from iaprof.basics.quantities import counted

MEMBER = "unprobed"
_MOST_REMEMBERED = 4096  # processes; beyond that, some may count twice
_MOST = 1 << 63


@dataclass
class Unprobed:
    """Counts processes that mapped a driver before it had probes."""

    processes: int = 0  # processes that had mapped a driver before its probes were attached
    longest_ns: int = 0  # the longest time from a mapping to the probes
    ended: int = 0  # processes that ended, or unmapped the driver, before iaprof opened it
    _pids: set[int] = field(default_factory=set)

    def waited(self, pid: int, ns: int) -> None:
        """A process had mapped a driver for `ns` before it had probes."""
        self.longest_ns = max(self.longest_ns, ns)
        self.processes += pid not in self._pids
        self._remember(pid)

    def gone(self, pid: int) -> None:
        """A process ended before iaprof opened its driver."""
        self.ended += pid not in self._pids
        self._remember(pid)

    def _remember(self, pid: int) -> None:
        if len(self._pids) >= _MOST_REMEMBERED:
            self._pids.clear()
        self._pids.add(pid)

    def to_json(self) -> dict[str, int]:
        """The member; empty if there are no such processes."""
        if not self.processes and not self.ended:
            return {}
        return {"processes": self.processes, "longest_ns": self.longest_ns, "ended": self.ended}


def sentence(member: Any) -> str:
    """A sentence, without a full stop, about the member (untrusted); empty if there is nothing to say."""
    match member:
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
