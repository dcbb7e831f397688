"""Which stalls a report is about: the filters that all verbs have in common."""

from __future__ import annotations

import fnmatch
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from iaprof.basics.errors import UsageError
from iaprof.formats.capture.dictionaries import numbered
from iaprof.formats.capture.reader import CaptureReader
from iaprof.formats.distinct import distinct
from iaprof.report.join.attribution import RowFilter
from iaprof.report.join.candidates import Rule
from iaprof.report.join.executions import StackOf
from iaprof.report.join.placements import Placed
from iaprof.symbols.python.without_interpreter import python_function

_SECONDS = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "": 1.0}
_MAX_NS = (1 << 64) - 1  # of times, ns
_MAX_S = 1e10  # of times in seconds: no recording takes three hundred years
_MAX_NAMES = 20  # in a message
_TIME = re.compile(r"([0-9]+(?:\.[0-9]*)?)(ns|us|ms|s|m|%|)")


@dataclass(frozen=True)
class TimeRange:
    """A part of a recording, as seconds since its start or as shares of its length."""

    begin: float = 0.0
    end: float = float("inf")
    shares: bool = False

    @classmethod
    def parse(cls, text: str) -> TimeRange:
        """Reads `1s-10s`, `500ms-`, `-2m` or `10%-20%`.

        Raises:
            UsageError: it is nothing of the kind.
        """
        parts = text.replace(" ", "").split("-")
        found = [_TIME.fullmatch(part) for part in parts]
        if (
            len(parts) != 2
            or not any(parts)
            or any(part and not match for part, match in zip(parts, found, strict=True))
        ):
            raise UsageError(f"--time takes a part of the recording such as 1s-10s, 500ms- or 10%-20%, not '{text}'")
        units = {match[2] for match in found if match}
        shares = "%" in units
        if shares and units != {"%"}:
            raise UsageError(f"--time takes either times or percentages, not '{text}'")
        values = [float(match[1]) * (0.01 if shares else _SECONDS[match[2]]) if match else None for match in found]
        begin, end = values[0] or 0.0, float("inf") if values[1] is None else values[1]
        if begin >= end:
            raise UsageError(f"--time has to end after it begins, and '{text}' does not")
        return cls(begin, end, shares)

    def in_seconds(self, length_ns: int) -> TimeRange:
        """The same part of a recording that is so long, in seconds.

        Raises:
            UsageError: it is a share, and nobody knows of what: the length is 0.
        """
        if not self.shares:
            return self
        if not length_ns:
            raise UsageError("this capture does not say how long it is: give --time in seconds, not in percent")
        # What is read last, at its end, belongs to a recording.
        end = float("inf") if self.end >= 1 else self.end * length_ns / 1e9
        return TimeRange(self.begin * length_ns / 1e9, end)

    def bounds_ns(self, start_ns: int) -> tuple[int, int]:
        """The part's first and last ns, by the clock of a recording that started then; none is before the clock's 0.

        Its end is the first ns of what comes after, so that parts side by side add up.
        """
        begin, after = (
            _MAX_NS if seconds >= _MAX_S else min(max(start_ns + round(seconds * 1e9), 0), _MAX_NS)
            for seconds in (self.begin, self.end)
        )
        return begin, after if after == _MAX_NS else max(after, 1) - 1


@dataclass(frozen=True)
class Selection:
    """What is wanted; None or empty: everything."""

    rule: Rule = Rule()  # noqa: RUF009 (it is frozen)
    time_range: TimeRange | None = None
    pids: frozenset[int] = frozenset()
    tids: frozenset[int] = frozenset()
    comms: frozenset[str] = frozenset()
    kernel: re.Pattern[str] | None = None  # found anywhere in a kernel's name
    devices: tuple[str, ...] = ()
    reasons: frozenset[str] = frozenset()
    cgroups: tuple[str, ...] = ()  # patterns of paths, or containers' ids
    python: re.Pattern[str] | None = None  # found anywhere in the name of a Python function of the launching stack
    stack_of: StackOf = StackOf.APPEND  # whose stack launches of closed command lists have

    @property
    def by_site(self) -> bool:
        """Whether it depends on who launched."""
        return bool(self.pids or self.tids or self.comms or self.kernel or self.cgroups)

    @property
    def by_process(self) -> bool:
        """Whether it depends on the process."""
        return bool(self.pids or self.comms or self.cgroups)

    def matches_stack(self, stack: Sequence[str]) -> bool:
        """Whether a stack with these frames has a wanted function of Python."""
        if self.python is None:
            return True
        names = filter(None, map(python_function, stack))
        return any(self.python.search(name) is not None for name in names)

    def matching_pids(self, capture: CaptureReader, names: Mapping[int, str]) -> set[int]:
        """Those of some processes, by pid, that are wanted: of CPU samples, which know no more than that."""
        inside = self.pids_in_cgroups(capture) if self.cgroups else None
        return {
            pid
            for pid, name in names.items()
            if (not self.pids or pid in self.pids)
            and (not self.comms or name in self.comms)
            and (inside is None or pid in inside)
        }

    def row_filter(self, header: dict[str, Any], start_ns: int | None = None) -> RowFilter:
        """Which reads are wanted.

        Args:
            header: of the capture, or of a part of one.
            start_ns: from when times count; None for the recording's start.

        Raises:
            UsageError: there is no such time.
        """
        begin, end = 0, _MAX_NS
        if self.time_range:
            start = begun_ns(header) if start_ns is None else start_ns
            begin, end = self.time_range.in_seconds(length_ns(header)).bounds_ns(start)
        return RowFilter(begin, end, self._streams(header))

    def check_devices(self, headers: Sequence[dict[str, Any]]) -> None:
        """Makes sure that each wanted device is in one of these headers: parts of a capture may have different ones.

        Raises:
            UsageError: one is not.
        """
        known = {name for header in headers for name in _streams_of(header)}
        for device in self.devices:
            if device not in known:
                there = sorted(name for name in known if "/" not in name)  # paths are there by their last part, too
                more = [f"and {len(there) - _MAX_NAMES:,} more"] if len(there) > _MAX_NAMES else []
                listed = ", ".join(there[:_MAX_NAMES] + more) or "none that has a name"
                raise UsageError(f"the capture has no device '{device}'; it has: {listed}")

    def _streams(self, header: dict[str, Any]) -> frozenset[int] | None:
        if not self.devices:
            return None
        known = _streams_of(header)
        return frozenset(index for device in self.devices for index in known.get(device, ()))

    def matching_sites(self, placed: Placed, capture: CaptureReader) -> NDArray[np.bool_]:
        """Which sites are wanted: bool[sites]."""
        pids = self.pids_in_cgroups(capture) if self.cgroups else None
        kernels = [
            self.kernel is None or self.kernel.search(p.kernel.demangled if p.kernel else p.name) is not None
            for p in placed.placements
        ]
        return np.array(
            [
                (not self.pids or site.pid in self.pids)
                and (not self.tids or site.tid in self.tids)
                and (not self.comms or site.comm in self.comms)
                and (pids is None or site.pid in pids)
                and (self.kernel is None or (site.placement is not None and kernels[site.placement]))
                for site in placed.sites
            ],
            bool,
        )

    def pids_in_cgroups(self, capture: CaptureReader) -> set[int]:
        """The processes that were in the wanted cgroups."""
        found = set()
        for rows in capture.tables("process", ("pid", "cgroup", "container")):
            cgroups, containers = dict[str | None, int](), dict[str | None, int]()
            columns = rows["pid"].to_numpy(), numbered(rows["cgroup"], cgroups), numbered(rows["container"], containers)
            first, _ = distinct(*columns)
            names = list(cgroups), list(containers)
            for pid, cgroup, container in zip(*(column[first].tolist() for column in columns), strict=True):
                texts = names[0][cgroup] or "", names[1][container] or ""
                if any(_matches_cgroup(*texts, wanted) for wanted in self.cgroups):
                    found.add(pid)
        return found

    def reason_mask(self, reasons: Sequence[str]) -> NDArray[np.bool_]:
        """Which of these reasons are wanted: bool[n]."""
        return np.array([not self.reasons or reason in self.reasons for reason in reasons])


def _streams_of(header: dict[str, Any]) -> dict[str, set[int]]:
    """The streams of each device, by all of its names."""
    known: dict[str, set[int]] = {}
    listed = header.get("streams")
    for index, stream in enumerate(listed if isinstance(listed, list) else []):
        names = [stream.get(key) for key in ("device", "card", "pci_address")] if isinstance(stream, dict) else []
        for name in names:
            if isinstance(name, str) and name:
                known.setdefault(name, set()).add(index)
                known.setdefault(os.path.basename(name), set()).add(index)
    return known


def _matches_cgroup(cgroup: str, container: str, wanted: str) -> bool:
    """Whether a cgroup is the wanted one, or below it or one of that pattern; or a container is meant by its id."""
    folder = wanted.rstrip("/") + "/"
    below = cgroup and (f"{cgroup}/".startswith(folder) or fnmatch.fnmatchcase(f"{cgroup}/", f"{folder}*"))
    return bool(below) or container == wanted or (len(wanted) >= 6 and container.startswith(wanted))


def begun_ns(header: dict[str, Any]) -> int:
    """When a recording was begun, CLOCK_MONOTONIC ns; 0 where its header does not say."""
    clock = header.get("clock")
    start = clock.get("monotonic_ns") if isinstance(clock, dict) else None
    return start if type(start) is int and 0 <= start < 1 << 63 else 0


def length_ns(header: dict[str, Any]) -> int:
    """How long a recording took, ns; 0 where its header does not say."""
    end, start = header.get("end_ns"), begun_ns(header)
    return end - start if type(end) is int and start < end < 1 << 63 else 0
