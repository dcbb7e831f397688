"""Makes the report of a capture: analyses each part separately, and merges their profiles.

Parts come from different recordings, files or hosts, so pids, addresses and stack ids are only valid within one part.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from iaprof.basics.errors import IaprofError
from iaprof.formats.capture.merged import UNKNOWN_WALL, start_wall_ns
from iaprof.formats.capture.reader import CaptureReader
from iaprof.formats.capture.schema import SAMPLE_KINDS
from iaprof.formats.energy import Energy
from iaprof.formats.export import Executions
from iaprof.formats.header.stack_counts import PythonCounts, WholeStacks, recorded, recorded_python
from iaprof.formats.profile import Launch, Profile, all_reasons
from iaprof.report.cpu_names import SymbolOptions, open_symbolizer
from iaprof.report.facts import Facts, Matched, Report
from iaprof.report.gpu.module import GpuKernel, GpuModuleLoader
from iaprof.report.imported import build_imported, can_select
from iaprof.report.join.selection import begun_ns, length_ns
from iaprof.report.profile import ReportOptions, build
from iaprof.symbols.symbolizers.binaries import Binaries

_MAX_HOST_CHARS = 255  # as for names in DNS
_MAX_LATER_NS = 1 << 62


def build_parts(
    capture: CaptureReader,
    loader: GpuModuleLoader,
    options: ReportOptions,
    symbol_options: SymbolOptions,
    progress: Callable[[int], None] = lambda records: None,
    binaries: Binaries | None = None,
) -> Report:
    """Reads, joins and symbolizes all parts of a capture.

    Args:
        capture: the open capture.
        loader: reads debug ELFs.
        options: the report's options; those for a merged capture have no `start_ns`.
        symbol_options: where to find names of CPU frames.
        progress: called now and then with the number of records joined so far.
        binaries: reads files of this machine; None for a new one.

    Raises:
        CaptureError: the capture is damaged.
        IaprofError: the capture has nothing but time lines.
        UsageError: the capture lacks something that the options name.
    """
    parts = capture.parts
    if not any(part.groups(kind) for part in parts for kind in (*SAMPLE_KINDS, "launch", "sample")) and any(
        part.groups(kind) for part in parts for kind in ("slice", "counter", "flow", "instant")
    ):
        raise IaprofError(
            f"{capture.path} has time lines, but no stalls: look at it with 'iaprof timeline', 'info' and 'query'"
        )
    joined = [part.header for part in parts if not part.groups("sample")]
    if joined:  # for imported captures, build_imported raises the error
        options.selection.check_devices(joined)
    starts = starts_ns(capture)
    options = resolve_time_range(capture, options)
    reports: list[Report] = []
    for start, part in zip(starts, parts, strict=True):
        if joined and part.groups("sample") and not can_select(options.selection):
            continue  # other parts can have what the selection filters by
        done = sum(report.facts.records for report in reports)
        of_part = replace(options, start_ns=start if options.start_ns is None else options.start_ns)
        report = _report(part, loader, of_part, symbol_options, partial(_report_progress, progress, done), binaries)
        reports.append(_with_host(report, host_of(part.header) if len(parts) > 1 else ""))
    return reports[0] if len(reports) == 1 else _merge_reports(capture, reports)


def resolve_time_range(capture: CaptureReader, options: ReportOptions) -> ReportOptions:
    """Converts a time range in shares to seconds: shares are of the whole capture, not of each part.

    Raises:
        UsageError: the time range is in shares, and the capture's length is unknown.
    """
    time_range = options.selection.time_range
    if time_range is None or len(capture.parts) == 1:
        return options
    return replace(options, selection=replace(options.selection, time_range=time_range.in_seconds(whole_ns(capture))))


def _report(
    part: CaptureReader,
    loader: GpuModuleLoader,
    options: ReportOptions,
    symbol_options: SymbolOptions,
    progress: Callable[[int], None],
    binaries: Binaries | None,
) -> Report:
    if part.groups("sample"):
        report, by_time = (
            None if length_s is None else build_imported(part, options.selection, int(length_s * 1e9), options.start_ns)
            for length_s in (options.interval_s, options.by_time_s)
        )
        assert report is not None
        return replace(report, by_time=None if by_time is None else by_time.profile)
    with open_symbolizer(part, symbol_options, binaries=binaries) as names:
        return build(part, loader, options, names, progress)


def _report_progress(progress: Callable[[int], None], before: int, done: int) -> None:
    progress(before + done)


def starts_ns(capture: CaptureReader) -> list[int]:
    """Returns time 0 of the whole capture on the clock of each part, CLOCK_MONOTONIC ns; may be negative.

    Time 0 is when the first part began. The wall clocks relate the parts, as each machine's monotonic clock has its own
    zero.
    """
    headers = [part.header for part in capture.parts]
    walls = [start_wall_ns(header) for header in headers]
    first = min(walls)
    later = (min(wall - first, _MAX_LATER_NS) if wall < UNKNOWN_WALL else 0 for wall in walls)
    return [begun_ns(header) - after for header, after in zip(headers, later, strict=True)]


def whole_ns(capture: CaptureReader) -> int:
    """Returns the time from the begin of the first part to the end of the last one, ns; 0 if unknown."""
    starts = zip(starts_ns(capture), capture.parts, strict=True)
    return max(begun_ns(part.header) - start + length_ns(part.header) for start, part in starts)


def host_of(header: dict[str, Any]) -> str:
    """Returns the name of the machine that recorded a part; "" if its header does not say."""
    host = header.get("host")
    name = host.get("name") if isinstance(host, dict) else None
    return name[:_MAX_HOST_CHARS] if isinstance(name, str) else ""


def _with_host(report: Report, host: str) -> Report:
    """Adds the host's name to the report's launches and devices, unless it is ""."""
    if not host:
        return report

    def with_host(profile: Profile) -> Profile:
        launches = [launch and replace(launch, host=host) for launch in profile.launches]
        return replace(profile, launches=launches, devices=[f"{host} {name}".strip() for name in profile.devices])

    return replace(
        report,
        profile=with_host(report.profile),
        by_time=None if report.by_time is None else with_host(report.by_time),
        executions=report.executions and report.executions.on(host),
    )


def _merge_reports(capture: CaptureReader, reports: list[Report]) -> Report:
    """Merges the reports of parts."""
    profiles = [report.profile for report in reports]
    launches: dict[Launch | None, int] = {}
    shifted: dict[str, list[Any]] = {"launch": [], "kernel": [], "code": [], "device": []}
    kernels, codes = 0, 0
    devices: dict[str, int] = {}
    for profile in profiles:
        numbers = np.array([launches.setdefault(launch, len(launches)) for launch in profile.launches], np.int64)
        shifted["launch"].append(numbers[profile.launch])
        shifted["kernel"].append(profile.kernel + kernels)
        shifted["code"].append(profile.code + codes)
        device_numbers = np.array([devices.setdefault(name, len(devices)) for name in profile.devices], np.int64)
        shifted["device"].append(device_numbers[profile.device])
        kernels, codes = kernels + len(profile.kernels), codes + len(profile.codes)
    columns = {name: np.concatenate(arrays) for name, arrays in shifted.items()}
    columns |= {
        name: np.concatenate([getattr(profile, name) for profile in profiles]) for name in ("interval", "offset")
    }
    reasons = all_reasons(profiles)
    columns["counts"] = np.concatenate([profile.counts_for(reasons) for profile in profiles])
    facts = _sum_facts([report.facts for report in reports])
    columns["energy"] = np.concatenate([_energy(profile) for profile in profiles])
    columns["divided"] = np.concatenate([_divided(profile) for profile in profiles])
    order = np.lexsort([columns[name] for name in ("offset", "kernel", "launch", "interval")])
    longest = max((profile.intervals for profile in profiles), key=len)
    begun = begun_ns(capture.header) / 1e9  # the merged header has the first part's clock
    if facts.energy is None:
        del columns["energy"]
    together = Profile(
        list(launches),
        [kernel for profile in profiles for kernel in profile.kernels],
        [code for profile in profiles for code in profile.codes],
        **{name: column[order] for name, column in columns.items()},
        reasons=reasons,
        intervals=[begun + moment - longest[0] for moment in longest],
        devices=list(devices),
        gauges={interval: each for profile in reversed(profiles) for interval, each in profile.gauges.items()},
        launch_counts=_launch_counts(profiles),
        matched=facts.matched.shares(),
        whole=facts.whole,
        recorded=recorded(capture.header),
        timed=facts.timed,
        python=facts.python,
        recorded_python=recorded_python(capture.header),
    )
    binaries: list[GpuKernel | None] = [binary for report in reports for binary in report.binaries]
    seen = [report.executions for report in reports if report.executions is not None]
    timed = [replace(report, profile=report.by_time, by_time=None) for report in reports if report.by_time is not None]
    by_time = _merge_reports(capture, timed).profile if timed else None
    return Report(together, facts, capture.header, binaries, Executions.joined(seen) if seen else None, by_time)


def _energy(profile: Profile) -> NDArray[np.int64]:
    return np.zeros(len(profile), np.int64) if profile.energy is None else profile.energy


def _divided(profile: Profile) -> NDArray[np.uint64]:
    return np.zeros(len(profile), np.uint64) if profile.divided is None else profile.divided


def _launch_counts(profiles: list[Profile]) -> dict[int, int]:
    counts: dict[int, int] = {}
    first = 0
    for profile in profiles:
        counts |= {first + kernel: count for kernel, count in profile.launch_counts.items()}
        first += len(profile.kernels)
    return counts


def _sum_facts(several: list[Facts]) -> Facts:
    facts = Facts(matched=Matched(*(sum(getattr(each.matched, f.name) for each in several) for f in fields(Matched))))
    facts.whole = WholeStacks.total(each.whole for each in several)
    facts.python = PythonCounts.total(each.python for each in several)
    known = [each.energy for each in several if each.energy is not None]
    facts.energy = Energy.sum(known) if known else None
    facts.timed = any(each.timed for each in several)
    for each in several:
        facts.records += each.records
        facts.stalls += each.stalls
        facts.active += each.active
        facts.unknown_kernel += each.unknown_kernel
        facts.no_launch += each.no_launch
        facts.cpu_modules += each.cpu_modules
        for problem, paths in each.problems.items():
            facts.problems.setdefault(problem, []).extend(paths)
    return facts
