"""From a capture to everything that a writer asks for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from iaprof.formats.capture.reader import CaptureReader
from iaprof.formats.export import CpuSamples, Export
from iaprof.formats.profile import Launch, Profile
from iaprof.formats.writers.writer import Needs
from iaprof.gpu.intel.reasons import REASONS
from iaprof.report.about import about
from iaprof.report.cpu_names import SymbolOptions, open_symbolizer
from iaprof.report.facts import Report
from iaprof.report.gpu.module import GpuModuleLoader
from iaprof.report.gpu.source_files import NO_SOURCES, SourceFiles
from iaprof.report.parts import build_parts, host_of, of_all, starts_ns, whole_ns
from iaprof.report.profile import ReportOptions
from iaprof.report.views.cpu_profile import build_cpu
from iaprof.report.views.hot_listings import hot_listings
from iaprof.report.views.launch_runs import launch_runs
from iaprof.report.views.series import series
from iaprof.report.views.wait_runs import wait_runs

_MOST_AT_ONCE = 4_000_000  # stall records, each of which may become a row of an interval: some hundred MB
_MOST_INTERVALS = 30_000  # ten minutes of fiftieths of seconds
_STEPS = (1, 2, 5, 10, 30, 60, 300, 600, 1800, 3600)  # by which intervals grow


def build_export(
    capture: CaptureReader,
    modules: GpuModuleLoader,
    options: ReportOptions,
    symbol_options: SymbolOptions,
    needs: Needs,
    progress: Callable[[int], None] = lambda records: None,
    sources: SourceFiles = NO_SOURCES,
) -> tuple[Export, Report]:
    """Reads, joins and names what is needed of a capture.

    Args:
        capture: the open capture.
        modules: reads debug ELFs.
        wanted: which part of it, and how; its intervals are those of all that has any.
        places: where names of CPU frames are looked for.
        needs: of the writer.
        progress: told now and then how many records are joined.
        sources: has lines for the listings.

    Raises:
        CaptureError: the capture is damaged.
        UsageError: it has nothing of what was asked for by name.
    """
    options = of_all(capture, options)
    large = Needs.TIME in needs and capture.stall_records > _MOST_AT_ONCE
    whole = replace(options, texts=Needs.LISTINGS in needs, interval_s=0.0 if large else options.interval_s)
    report = build_parts(capture, modules, whole, symbol_options, progress)
    by_time = (
        build_parts(capture, modules, replace(options, merged=True), symbol_options, progress).profile
        if large
        else None
    )
    cpu = cpu_samples(capture, options, symbol_options) if Needs.CPU in needs else None
    listings = hot_listings(report, sources) if Needs.LISTINGS in needs else ()
    export = Export(
        report.profile,
        about(capture, report.facts, sources, options.selection),
        options.interval_s,
        by_time,
        cpu,
        series=series(capture, options) if Needs.SERIES in needs else (),
        launches=launch_runs(capture, options, report.profile, symbol_options=symbol_options)
        if Needs.LAUNCHES in needs
        else None,
        waits=wait_runs(capture, options) if Needs.LAUNCHES in needs else None,
        listings=listings,
    )
    return export, report


def cpu_samples(capture: CaptureReader, options: ReportOptions, symbol_options: SymbolOptions) -> CpuSamples:
    """The CPU samples of all parts of a capture, named.

    Raises:
        CaptureError: the capture is damaged.
    """
    launches: list[Launch] = []
    columns = []
    for part, start_ns in zip(capture.parts, starts_ns(capture), strict=True):
        host = host_of(part.header) if len(capture.parts) > 1 else ""
        with open_symbolizer(part, symbol_options) as names:
            found = build_cpu(part, names, replace(options, start_ns=start_ns))
        columns.append(np.stack([found.launch + len(launches), found.interval, found.count]))
        launches += [replace(launch, host=host) for launch in found.launches]
    launch, interval, count = np.concatenate(columns, axis=1)
    return CpuSamples(launches, launch, interval, count)


def nothing() -> Profile:
    """The profile of no stalls."""
    none = np.empty(0, np.int64)
    counts = np.empty((0, len(REASONS)), np.uint64)
    return Profile((), (), (), none, none, none, none, none.astype(np.uint64), counts, none, REASONS, ())


def fitting_interval(capture: CaptureReader, usual_s: float) -> float:
    """The length of intervals that are not too many for the whole of a capture: a multiple of the usual one."""
    if not usual_s:
        return 0.0
    length = whole_ns(capture) / 1e9
    return next((usual_s * step for step in _STEPS if length <= usual_s * step * _MOST_INTERVALS), usual_s * _STEPS[-1])
