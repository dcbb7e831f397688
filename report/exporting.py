"""Makes the export of a capture: everything that its writer needs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np

from iaprof.formats.capture.reader import CaptureReader
from iaprof.formats.export import CpuSamples, Export
from iaprof.formats.profile import Launch
from iaprof.formats.writers.writer import Needs
from iaprof.report.cpu_names import SymbolOptions, open_symbolizer
from iaprof.report.facts import Report
from iaprof.report.gpu.module import GpuModuleLoader
from iaprof.report.gpu.source_files import NO_SOURCES, SourceFiles
from iaprof.report.parts import build_parts, host_of, resolve_time_range, starts_ns, whole_ns
from iaprof.report.profile import ReportOptions

_MAX_ROWS_BY_TIME = 4_000_000  # stall records; each can become a row of an interval, together some hundred MB
_MAX_INTERVALS = 30_000  # ten minutes in intervals of 20 ms
_STEPS = (1, 2, 5, 10, 30, 60, 300, 600, 1800, 3600)  # multiples of the usual interval


def build_export(
    capture: CaptureReader,
    loader: GpuModuleLoader,
    options: ReportOptions,
    symbol_options: SymbolOptions,
    needs: Needs,
    progress: Callable[[int], None] = lambda records: None,
    sources: SourceFiles = NO_SOURCES,
) -> tuple[Export, Report]:
    """Reads, joins and symbolizes what the writer needs of a capture.

    Args:
        capture: the open capture.
        loader: reads debug ELFs.
        options: the report's options; the intervals are those of all views.
        symbol_options: where to find names of CPU frames.
        needs: what the writer needs.
        progress: called now and then with the number of records joined so far.
        sources: source files for the listings.

    Returns:
        The export, and the report of stalls that it was made of.

    Raises:
        CaptureError: the capture is damaged.
        UsageError: the capture lacks something that the options name.
    """
    options = resolve_time_range(capture, options)
    large = Needs.TIME in needs and capture.stall_records > _MAX_ROWS_BY_TIME
    # Which kernels of a merged capture have most samples is known when all its parts are joined.
    whole = replace(options, texts_of_hottest=len(capture.parts) == 1)
    whole = replace(whole, texts=Needs.LISTINGS in needs, seen=Needs.LAUNCHES in needs)
    if large:
        whole = replace(whole, interval_s=0.0, by_time_s=options.interval_s)
    report = build_parts(capture, loader, whole, symbol_options, progress)
    cpu = cpu_samples(capture, options, symbol_options) if Needs.CPU in needs else None
    shown = (
        _shown(capture, report, options, symbol_options, needs, sources) if needs & ~(Needs.TIME | Needs.CPU) else {}
    )
    export = Export(
        report.profile,
        interval_s=options.interval_s,
        by_time=report.by_time,
        cpu=cpu,
        executions=report.executions,
        **shown,
    )
    return export, report


def _shown(
    capture: CaptureReader,
    report: Report,
    options: ReportOptions,
    symbol_options: SymbolOptions,
    needs: Needs,
    sources: SourceFiles,
) -> dict[str, Any]:
    """Returns what an export has for pictures and pages besides samples, by the names of its members."""
    # Imported here, as folded stacks have nothing of it.
    from iaprof.report.about import about
    from iaprof.report.views.annotation import hot_listings
    from iaprof.report.views.series import series
    from iaprof.report.views.thread_runs import launch_runs, operator_slices, wait_runs

    found: dict[str, Any] = {}
    with ThreadPoolExecutor(1) as thread:
        listings = thread.submit(hot_listings, report, sources) if Needs.LISTINGS in needs else None
        if Needs.LAUNCHES in needs:
            found["launches"] = launch_runs(capture, options, report.profile, symbol_options=symbol_options)
        if listings is not None:
            found["listings"] = listings.result()
    if Needs.ABOUT in needs:
        found["about"] = about(capture, report.facts, sources, options.selection)
    if Needs.SERIES in needs:
        found["series"] = series(capture, options)
    if Needs.LAUNCHES in needs:
        found |= {"waits": wait_runs(capture, options), "operators": operator_slices(capture, options)}
    return found


def cpu_samples(capture: CaptureReader, options: ReportOptions, symbol_options: SymbolOptions) -> CpuSamples:
    """Returns the symbolized CPU samples of all parts of a capture.

    Raises:
        CaptureError: the capture is damaged.
    """
    from iaprof.report.views.cpu_profile import build_cpu  # here, as most reports have none

    launches: list[Launch] = []
    columns = []
    left_out: Counter[str] = Counter()
    for part, start_ns in zip(capture.parts, starts_ns(capture), strict=True):
        host = host_of(part.header) if len(capture.parts) > 1 else ""
        with open_symbolizer(part, symbol_options) as names:
            found = build_cpu(part, names, replace(options, start_ns=start_ns))
        columns.append(np.stack([found.launch + len(launches), found.interval, found.count]))
        left_out += found.left_out
        launches += [replace(launch, host=host) for launch in found.launches]
    launch, interval, count = np.concatenate(columns, axis=1)
    return CpuSamples(launches, launch, interval, count, left_out)


def fitting_interval(capture: CaptureReader, usual_s: float) -> float:
    """Returns an interval length, a multiple of the usual one, for at most _MAX_INTERVALS intervals; 0 if that is 0."""
    if not usual_s:
        return 0.0
    length = whole_ns(capture) / 1e9
    return next((usual_s * step for step in _STEPS if length <= usual_s * step * _MAX_INTERVALS), usual_s * _STEPS[-1])
