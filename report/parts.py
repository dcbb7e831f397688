"""The report of a capture of several parts: each is analysed for itself, and their profiles put together.

Parts come from different recordings, files or hosts: pids, addresses and stacks of one mean nothing in another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from functools import partial
from typing import Any

import numpy as np

from iaprof.formats.capture import CaptureReader
from iaprof.formats.merged import UNKNOWN_WALL, wall_ns
from iaprof.formats.profile import Launch, Profile
from iaprof.report.cpu_names import Places, naming
from iaprof.report.facts import Facts, Matched, Report
from iaprof.report.gpu_module import GpuKernel, GpuModules
from iaprof.report.imported import build_imported, tells
from iaprof.report.profile import Wanted, build
from iaprof.report.selection import begun_ns, length_ns

_LONGEST_HOST = 255  # characters, as of any name of the kind
_MOST_LATER = 1 << 62  # ns


def build_parts(
    capture: CaptureReader,
    modules: GpuModules,
    wanted: Wanted,
    places: Places,
    progress: Callable[[int], None] = lambda records: None,
) -> Report:
    """Reads, joins and names a whole capture.

    Args:
        capture: the open capture.
        modules: reads debug ELFs.
        wanted: which part of it, and how.
        places: where names of CPU frames are looked for.
        progress: told now and then how many records are joined.

    Raises:
        CaptureError: the capture is damaged.
        UsageError: it has nothing of what was asked for by name.
    """
    parts = capture.parts
    later = _later([part.header for part in parts])
    joined = [part.header for part in parts if not part.groups("sample")]
    if joined:  # what was imported says itself that it has no devices
        wanted.selection.check_devices(joined)
    moments = wanted.selection.moments
    if moments is not None and len(parts) > 1:  # shares are of all, not of each part
        length = max(after + length_ns(part.header) for after, part in zip(later, parts, strict=True))
        wanted = replace(wanted, selection=replace(wanted.selection, moments=moments.of_length(length)))
    reports: list[Report] = []
    for after, part in zip(later, parts, strict=True):
        if joined and part.groups("sample") and not tells(wanted.selection):
            continue  # as others may have it
        # Times and intervals of all parts count from the same moment: the clocks' zeros may differ.
        since = replace(wanted, start_ns=begun_ns(part.header) - after)
        done = sum(report.facts.records for report in reports)
        report = _report(part, modules, since, places, partial(_tell, progress, done))
        reports.append(_labelled(report, _host(part.header) if len(parts) > 1 else ""))
    return reports[0] if len(reports) == 1 else _together(capture, reports)


def _report(
    part: CaptureReader, modules: GpuModules, wanted: Wanted, places: Places, progress: Callable[[int], None]
) -> Report:
    if part.groups("sample"):
        return build_imported(part, wanted.selection, int(wanted.interval_s * 1e9), wanted.start_ns)
    with naming(part, places) as names:
        return build(part, modules, wanted, names, progress)


def _tell(progress: Callable[[int], None], before: int, done: int) -> None:
    progress(before + done)


def _later(headers: Sequence[dict[str, Any]]) -> list[int]:
    """How much later than the first each part was begun, ns, by their wall clocks; 0 where nobody knows."""
    walls = [wall_ns(header) for header in headers]
    first = min(walls)
    return [min(wall - first, _MOST_LATER) if wall < UNKNOWN_WALL else 0 for wall in walls]


def _host(header: dict[str, Any]) -> str:
    """On which machine a part was recorded; "" where its header does not say."""
    host = header.get("host")
    name = host.get("name") if isinstance(host, dict) else None
    return name[:_LONGEST_HOST] if isinstance(name, str) else ""


def _labelled(report: Report, host: str) -> Report:
    """Launches with the name of their machine, where there are several parts."""
    launches = [launch and replace(launch, host=host) for launch in report.profile.launches]
    return replace(report, profile=replace(report.profile, launches=launches)) if host else report


def _together(capture: CaptureReader, reports: list[Report]) -> Report:
    """One report of all."""
    profiles = [report.profile for report in reports]
    launches: dict[Launch | None, int] = {}
    shifted: dict[str, list[Any]] = {"launch": [], "kernel": [], "code": []}
    kernels, codes = 0, 0
    for profile in profiles:
        numbers = np.array([launches.setdefault(launch, len(launches)) for launch in profile.launches], np.int64)
        shifted["launch"].append(numbers[profile.launch])
        shifted["kernel"].append(profile.kernel + kernels)
        shifted["code"].append(profile.code + codes)
        kernels, codes = kernels + len(profile.kernels), codes + len(profile.codes)
    columns = {name: np.concatenate(parts) for name, parts in shifted.items()}
    columns |= {
        name: np.concatenate([getattr(profile, name) for profile in profiles])
        for name in ("interval", "offset", "counts")
    }
    order = np.lexsort([columns[name] for name in ("offset", "kernel", "launch", "interval")])
    longest = max((profile.intervals for profile in profiles), key=len)
    begun = begun_ns(capture.header) / 1e9  # the first part's clock is that of all
    facts = _facts([report.facts for report in reports])
    together = Profile(
        list(launches),
        [kernel for profile in profiles for kernel in profile.kernels],
        [code for profile in profiles for code in profile.codes],
        **{name: column[order] for name, column in columns.items()},
        intervals=[begun + moment - longest[0] for moment in longest],
        gauges={interval: each for profile in reversed(profiles) for interval, each in profile.gauges.items()},
        launch_counts=_counts(profiles),
        matched=facts.matched.shares(),
    )
    binaries: list[GpuKernel | None] = [binary for report in reports for binary in report.binaries]
    return Report(together, facts, capture.header, binaries)


def _counts(profiles: list[Profile]) -> dict[int, int]:
    counts: dict[int, int] = {}
    first = 0
    for profile in profiles:
        counts |= {first + kernel: count for kernel, count in profile.launch_counts.items()}
        first += len(profile.kernels)
    return counts


def _facts(parts: list[Facts]) -> Facts:
    facts = Facts(matched=Matched(*(sum(getattr(part.matched, f.name) for part in parts) for f in fields(Matched))))
    for part in parts:
        facts.records += part.records
        facts.stalls += part.stalls
        facts.unknown_kernel += part.unknown_kernel
        facts.no_launch += part.no_launch
        facts.cpu_modules += part.cpu_modules
        for problem, paths in part.problems.items():
            facts.problems.setdefault(problem, []).extend(paths)
    return facts
