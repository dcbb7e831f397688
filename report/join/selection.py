"""The filters that all verbs share: which stalls, launches and samples a report is about."""

from __future__ import annotations

import fnmatch
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from iaprof.basics.errors import UsageError
from iaprof.formats.capture.dictionaries import number_texts, rows_equal
from iaprof.formats.capture.reader import CaptureReader
from iaprof.gpu.samples import ACTIVE
from iaprof.report.join.attribution import RowFilter
from iaprof.report.join.candidates import Rule
from iaprof.report.join.executions import StackOf
from iaprof.report.join.lifetimes import TimesByPid
from iaprof.report.join.placements import Placed
from iaprof.symbols.python.frames import python_function

COLUMNS = ("time_ns", "pid", "tid", "event", "cgroup", "container")


class Instances:
    """The processes that had a pid one after the other: each fork of it begins another one."""

    def __init__(self, processes: pa.Table) -> None:
        """Sorts the forks; `processes`: columns time_ns, pid, tid and event of `process` rows, in any order."""
        times, pids, tids = (processes[name].to_numpy() for name in ("time_ns", "pid", "tid"))
        begins = rows_equal(processes["event"], "fork") & (pids == tids)
        self._begins = TimesByPid(pids[begins], times[begins])
        self._factor = np.uint64(int(begins.sum()) + 1)

    def keys(self, pids: NDArray[np.integer], times: NDArray[np.integer]) -> NDArray[np.uint64]:
        """Returns a number for the process that had each pid at a time, ns: uint64[n]."""
        wide = pids.astype(np.uint64)
        found: NDArray[np.uint64] = wide * self._factor
        found += self._begins.at(wide, times.astype(np.uint64)).astype(np.uint64)
        return found


class InCgroups:
    """The processes that a filter by cgroup or container selects.

    Attributes:
        pids: those that such a process had at any time.
    """

    def __init__(self, processes: pa.Table, matches: Callable[[str, str], bool]) -> None:
        """Applies the filter.

        Args:
            processes: COLUMNS of `process` rows.
            matches: tells whether a cgroup and a container are selected; each is empty if there is none.
        """
        self._instances = Instances(processes)
        described = processes.filter(pa.array(rows_equal(processes["event"], "described")))
        cgroups, containers = dict[str | None, int](), dict[str | None, int]()
        cgroup, container = number_texts(described["cgroup"], cgroups), number_texts(described["container"], containers)
        names = [each or "" for each in cgroups], [each or "" for each in containers]
        pairs, which = np.unique(np.stack([cgroup, container], axis=1), axis=0, return_inverse=True)
        wanted = np.array([matches(names[0][one], names[1][other]) for one, other in pairs.tolist()], bool)
        chosen = wanted[which.reshape(-1)] if len(pairs) else np.zeros(0, bool)
        pids, times = described["pid"].to_numpy()[chosen], described["time_ns"].to_numpy()[chosen]
        self.pids: set[int] = set(np.unique(pids).tolist())
        self._keys = np.unique(self._instances.keys(pids, times))

    def has(self, pids: NDArray[np.integer], times: NDArray[np.integer]) -> NDArray[np.bool_]:
        """Tells whether the process that had each pid at a time, ns, is selected: bool[n]."""
        return np.isin(self._instances.keys(pids, times), self._keys)


_SECONDS = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "": 1.0}
_MAX_NS = (1 << 64) - 1
_MAX_S = 1e10  # later times in seconds mean the end: no recording takes three hundred years
_MAX_NAMES = 20  # in a message
_TIME = re.compile(r"([0-9]+(?:\.[0-9]*)?)(ns|us|ms|s|m|%|)")


@dataclass(frozen=True)
class TimeRange:
    """A time range of a recording, in seconds since its start or as shares of its length."""

    begin: float = 0.0
    end: float = float("inf")
    shares: bool = False
    text: str = field(default="", compare=False)  # as the user wrote it

    @classmethod
    def parse(cls, text: str) -> TimeRange:
        """Parses a range such as `1s-10s`, `500ms-`, `-2m` or `10%-20%`.

        Raises:
            UsageError: the text is not such a range.
        """
        bounds = text.replace(" ", "").split("-")
        found = [_TIME.fullmatch(bound) for bound in bounds]
        if (
            len(bounds) != 2
            or not any(bounds)
            or any(bound and not match for bound, match in zip(bounds, found, strict=True))
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
        return cls(begin, end, shares, text)

    def in_seconds(self, length_ns: int) -> TimeRange:
        """Converts shares to seconds, for a recording of this length.

        Raises:
            UsageError: the range is in shares, and the length is 0, which means unknown.
        """
        if not self.shares:
            return self
        if not length_ns:
            raise UsageError("this capture does not say how long it is: give --time in seconds, not in percent")
        # The last read may come after the recording's end, and belongs to it.
        end = float("inf") if self.end >= 1 else self.end * length_ns / 1e9
        return TimeRange(self.begin * length_ns / 1e9, end, text=self.text)

    def bounds_ns(self, start_ns: int) -> tuple[int, int]:
        """Returns the range's first and last ns on the clock of a recording that started at `start_ns`, at least 0.

        The last ns is the one before the range's end, so that adjacent ranges add up.
        """
        begin, after = (
            _MAX_NS if seconds >= _MAX_S else min(max(start_ns + round(seconds * 1e9), 0), _MAX_NS)
            for seconds in (self.begin, self.end)
        )
        return begin, after if after == _MAX_NS else max(after, 1) - 1


@dataclass(frozen=True)
class Selection:
    """The user's filters: None or empty selects everything."""

    rule: Rule = Rule()  # noqa: RUF009 (it is frozen)
    time_range: TimeRange | None = None
    pids: frozenset[int] = frozenset()
    tids: frozenset[int] = frozenset()
    comms: frozenset[str] = frozenset()
    kernel: re.Pattern[str] | None = None  # matches anywhere in a kernel's name
    devices: tuple[str, ...] = ()
    reasons: frozenset[str] = frozenset()
    cgroups: tuple[str, ...] = ()  # patterns of paths, or container ids
    python: re.Pattern[str] | None = None  # matches anywhere in the name of a Python function of the launch's stack
    active: bool = True  # samples in which the thread issued an instruction, besides stalls
    stack_of: StackOf = StackOf.APPEND  # which call launches of closed command lists take their stack from

    @property
    def by_site(self) -> bool:
        """Whether a filter depends on the site of the launch."""
        return bool(self.pids or self.tids or self.comms or self.kernel or self.cgroups)

    @property
    def by_process(self) -> bool:
        """Whether a filter depends on the process."""
        return bool(self.pids or self.comms or self.cgroups)

    def matches_stack(self, stack: Sequence[str]) -> bool:
        """Whether a stack with these frames has a Python function that `python` matches."""
        if self.python is None:
            return True
        names = filter(None, map(python_function, stack))
        return any(self.python.search(name) is not None for name in names)

    def matching_pids(self, capture: CaptureReader, names: Mapping[int, str]) -> set[int]:
        """Returns the pids that the filters select at any time, for rows without a launch, such as CPU samples.

        Args:
            capture: an open capture, or a part of a merged one.
            names: the process names by pid.
        """
        inside = self.in_cgroups(capture)
        return {
            pid
            for pid, name in names.items()
            if (not self.pids or pid in self.pids)
            and (not self.comms or name in self.comms)
            and (inside is None or pid in inside.pids)
        }

    def row_filter(self, header: dict[str, Any], start_ns: int | None = None) -> RowFilter:
        """Returns the filter by time and stream.

        Args:
            header: of the capture, or of a part of one.
            start_ns: what the time range is relative to, CLOCK_MONOTONIC ns; None: the recording's start.

        Raises:
            UsageError: the time range is in shares, and the recording's length is unknown.
        """
        begin, end = 0, _MAX_NS
        if self.time_range:
            start = begun_ns(header) if start_ns is None else start_ns
            begin, end = self.time_range.in_seconds(length_ns(header)).bounds_ns(start)
        return RowFilter(begin, end, self._streams(header))

    def check_devices(self, headers: Sequence[dict[str, Any]]) -> None:
        """Checks that each selected device is in one of these headers, which are those of a capture's parts.

        Raises:
            UsageError: a device is in none of them.
        """
        known = {name for header in headers for name in _streams_of(header)}
        for device in self.devices:
            if device not in known:
                there = sorted(name for name in known if "/" not in name)  # a path's last component is listed, too
                more = [f"and {len(there) - _MAX_NAMES:,} more"] if len(there) > _MAX_NAMES else []
                listed = ", ".join(there[:_MAX_NAMES] + more) or "none that has a name"
                raise UsageError(f"the capture has no device '{device}'; it has: {listed}")

    def _streams(self, header: dict[str, Any]) -> frozenset[int] | None:
        if not self.devices:
            return None
        known = _streams_of(header)
        return frozenset(index for device in self.devices for index in known.get(device, ()))

    def matching_sites(self, placed: Placed, capture: CaptureReader) -> NDArray[np.bool_]:
        """Whether the filters select each site: bool[sites]."""
        inside = self._sites_in_cgroups(placed, capture)
        kernels = [
            self.kernel is None or self.kernel.search(p.kernel.demangled if p.kernel else p.name) is not None
            for p in placed.placements
        ]
        return np.array(
            [
                (not self.pids or site.pid in self.pids)
                and (not self.tids or site.tid in self.tids)
                and (not self.comms or site.comm in self.comms)
                and inside[number]
                and (self.kernel is None or (site.placement is not None and kernels[site.placement]))
                for number, site in enumerate(placed.sites)
            ],
            bool,
        )

    def _sites_in_cgroups(self, placed: Placed, capture: CaptureReader) -> NDArray[np.bool_]:
        """Whether the process of each site was in a selected cgroup at the first of its launches: bool[sites]."""
        if (inside := self.in_cgroups(capture)) is None:
            return np.ones(len(placed.sites), bool)
        pids = np.array([site.pid for site in placed.sites], np.int64)
        found = np.isin(pids, np.fromiter(inside.pids, np.int64))  # of those without a launch, too
        launched, first = np.unique(placed.site, return_index=True)
        found[launched] = inside.has(pids[launched], placed.time[first])
        return found

    def in_cgroups(self, capture: CaptureReader) -> InCgroups | None:
        """Returns the processes in the selected cgroups or containers; None if all are selected."""
        if not self.cgroups:
            return None

        def matches(cgroup: str, container: str) -> bool:
            return any(_matches_cgroup(cgroup, container, pattern) for pattern in self.cgroups)

        return InCgroups(capture.table("process", COLUMNS), matches)

    def reason_mask(self, reasons: Sequence[str]) -> NDArray[np.bool_]:
        """Whether the filters select each of these reasons: bool[n]."""
        return np.array(
            [(not self.reasons or reason in self.reasons) and (self.active or reason != ACTIVE) for reason in reasons]
        )


def _streams_of(header: dict[str, Any]) -> dict[str, set[int]]:
    """Returns the indices of each device's streams, by each of the device's names."""
    known: dict[str, set[int]] = {}
    listed = header.get("streams")
    for index, stream in enumerate(listed if isinstance(listed, list) else []):
        names = [stream.get(key) for key in ("device", "card", "pci_address")] if isinstance(stream, dict) else []
        for name in names:
            if isinstance(name, str) and name:
                known.setdefault(name, set()).add(index)
                known.setdefault(os.path.basename(name), set()).add(index)
    return known


def _matches_cgroup(cgroup: str, container: str, pattern: str) -> bool:
    """Whether a filter selects a process by its cgroup (a path, one above it, or a pattern) or its container's id."""
    folder = pattern.rstrip("/") + "/"
    below = cgroup and (f"{cgroup}/".startswith(folder) or fnmatch.fnmatchcase(f"{cgroup}/", f"{folder}*"))
    return bool(below) or container == pattern or (len(pattern) >= 6 and container.startswith(pattern))


def begun_ns(header: dict[str, Any]) -> int:
    """Returns when a recording began, CLOCK_MONOTONIC ns; 0 if its header does not say."""
    clock = header.get("clock")
    start = clock.get("monotonic_ns") if isinstance(clock, dict) else None
    return start if type(start) is int and 0 <= start < 1 << 63 else 0


def length_ns(header: dict[str, Any]) -> int:
    """Returns the length of a recording, ns; 0 if its header does not say."""
    end, start = header.get("end_ns"), begun_ns(header)
    return end - start if type(end) is int and start < end < 1 << 63 else 0
