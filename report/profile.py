"""Makes the report of one part of a capture: reads, joins and symbolizes it, and counts how samples were matched."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from iaprof.basics.heap import return_free_memory
from iaprof.basics.quantities import counted
from iaprof.formats.capture.limits import INSTRUCTIONS, SITES
from iaprof.formats.capture.reader import CaptureReader
from iaprof.formats.energy import whole_parts
from iaprof.formats.header.stacks import recorded, recorded_python
from iaprof.gpu.samples import ACTIVE
from iaprof.report.facts import CpuModule, Facts, Matched, Report
from iaprof.report.gauges import gauges
from iaprof.report.gpu.module import GpuModuleLoader
from iaprof.report.join.candidates import AMBIGUOUS, BEFORE_RECORDING, NOT_RECORDED, Method
from iaprof.report.join.energy import read_energy
from iaprof.report.join.executions import read_launches
from iaprof.report.join.joining import Helper, Task, helping, join
from iaprof.report.join.kernels import SampledKernels, instruction_starts
from iaprof.report.join.named import to_profile
from iaprof.report.join.operators import read_operators
from iaprof.report.join.placements import LAUNCH_COLUMNS, Placed, place_kernels
from iaprof.report.join.seen import Seen
from iaprof.report.join.selection import Selection, begun_ns
from iaprof.report.join.shares import Joined
from iaprof.report.join.streams import reasons_of, streams
from iaprof.symbols.cpu_frames import CpuFrames, FrameOptions
from iaprof.symbols.names.address_space import AddressSpaces
from iaprof.symbols.names.names import Symbolizer
from iaprof.symbols.names.rows import CaptureNames


@dataclass(frozen=True)
class ReportOptions:
    """The options of a report."""

    selection: Selection = Selection()  # noqa: RUF009 (it is frozen)
    interval_s: float = 0.0  # the length of an interval; 0: a single interval
    frame_options: FrameOptions = FrameOptions()  # noqa: RUF009 (it is frozen)
    texts: bool = False  # read the text of GPU instructions
    start_ns: int | None = None  # time 0 of the time range and intervals, CLOCK_MONOTONIC; None: the recording's start
    seen: bool = False  # find when samples of each kernel and stack were seen
    all_samples: bool = False  # CPU samples of the recorder and of processes out of scope, too
    merged: bool = False  # put each kernel's instructions into one row


def build(
    capture: CaptureReader,
    loader: GpuModuleLoader,
    options: ReportOptions = ReportOptions(),
    symbolizer: Symbolizer | None = None,
    progress: Callable[[int], None] = lambda records: None,
) -> Report:
    """Reads, joins and symbolizes a capture.

    Args:
        capture: an open capture, or a part of a merged one.
        loader: reads debug ELFs.
        options: the report's options.
        symbolizer: names the frames of CPU stacks; None: the capture's own names.
        progress: called now and then with the number of records joined so far.

    Raises:
        CaptureError: the capture is damaged.
        UsageError: the capture lacks something that the options name.
    """
    with helping(capture) as helper:
        return _build(capture, loader, options, symbolizer, progress, helper)


def _build(
    capture: CaptureReader,
    loader: GpuModuleLoader,
    options: ReportOptions,
    symbolizer: Symbolizer | None,
    progress: Callable[[int], None],
    helper: Helper | None,
) -> Report:
    facts = Facts()
    selection, interval_ns = options.selection, int(options.interval_s * 1e9)
    known = streams(capture.header)
    instruction_sets = [stream.instruction_set for stream in known]
    kernels = SampledKernels(capture, loader, instruction_sets, facts.problems, options.texts)
    operators = read_operators(capture)
    mark = operators.of_launches if operators else lambda launches: launches
    placed = place_kernels(
        read_launches(capture, LAUNCH_COLUMNS, selection.stack_of, mark=mark),
        kernels.compilations(),
        scope(capture.header),
        capture.table("process", ("time_ns", "pid", "tid", "event")),
        by_thread=bool(selection.tids),
        operators=operators.chains if operators else ((),),
    )
    del operators, mark  # before the stalls are read
    begin_ns = begun_ns(capture.header) if options.start_ns is None else options.start_ns
    row_filter = selection.row_filter(capture.header, begin_ns)
    return_free_memory()
    starts = instruction_starts(placed, kernels)
    energy = read_energy(capture, known, row_filter)
    seen = Seen(selection.reason_mask(reasons_of(known)), len(known)) if options.seen else None
    task = Task(placed, begin_ns, interval_ns, selection.rule, row_filter, starts, options.merged, energy, seen)
    joined, facts.records, crowded = join(capture, task, helper, progress)
    capture.check(len(np.unique(joined.site)), SITES)
    capture.check(len(np.unique(joined.ip)), INSTRUCTIONS)
    if crowded:
        facts.problems["in so many kernels that only some of these were looked at"] = [
            counted(crowded, "address", "addresses")
        ]
    return_free_memory()
    sampled = float(joined.joules.sum())
    joined = _selected(joined, reasons_of(known), selection, placed, capture)
    cpu = _frames(capture, joined, placed, options.frame_options, symbolizer or CaptureNames(capture))
    if selection.python is not None:
        matches = [bool(site.stack) and selection.matches_stack(cpu.frames(site.stack)) for site in placed.sites]
        joined = joined.only(np.array(matches, bool)[joined.site])
    totals = joined.counts.sum(axis=1).astype(np.int64)
    facts.stalls = int(totals.sum())
    facts.active = sum(int(joined.counts[:, at].sum()) for at, each in enumerate(reasons_of(known)) if each == ACTIVE)
    unknown = np.array([site.placement is None and not site.kernel_note for site in placed.sites])
    unlaunched = np.array([site.note in (BEFORE_RECORDING, NOT_RECORDED) for site in placed.sites])
    facts.unknown_kernel = int(totals[unknown[joined.site]].sum())
    facts.no_launch = int(totals[unlaunched[joined.site]].sum())
    weights = _weights(joined, placed, totals)
    facts.cpu_modules = _cpu_modules(cpu, weights)
    facts.whole, facts.python = cpu.ends(weights), cpu.python(weights)
    last = int(joined.interval.max()) if len(joined.interval) else -1
    intervals = [begin_ns / 1e9 + options.interval_s * number for number in range(last + 1)]
    measured = gauges(capture, begin_ns, interval_ns, len(intervals)) if interval_ns else {}
    kernels.read(placed.kernels_of(np.unique(joined.site).tolist()))
    profile, binaries, decoded = to_profile(joined, placed, kernels, cpu, known, options.merged)
    for path, names in cpu.shortened.items():
        problem = f"{counted(len(names), 'function name')} of more than 16 KiB: cut, with a hash at the end"
        facts.problems.setdefault(problem, []).append(path)
    placed_only = np.array([site.placement is not None for site in placed.sites])
    ambiguous = np.array([site.note == AMBIGUOUS for site in placed.sites])
    facts.matched = Matched(
        facts.stalls,
        int(totals[placed_only[joined.site]].sum()),
        int(totals[decoded].sum()),
        int(joined.alone.sum()),
        int(totals[ambiguous[joined.site]].sum()),
    )
    if energy is not None:
        facts.energy = energy.shared(sampled, float(joined.joules.sum()))
    has_stack = np.array([bool(site.stack) and not site.note for site in placed.sites])
    profile = replace(
        profile,
        intervals=intervals,
        divided=np.where(has_stack[joined.site], joined.counts.sum(axis=1) - joined.alone, np.uint64(0))
        if selection.rule.method is Method.PROPORTIONAL
        else None,
        energy=None if facts.energy is None else whole_parts(joined.joules, facts.energy.selected),
        gauges=measured,
        matched=facts.matched.shares(),
        whole=facts.whole,
        recorded=recorded(capture.header),
        python=facts.python,
        recorded_python=recorded_python(capture.header),
    )
    executions = None
    if seen is not None:
        executions = seen.executions(joined.site, joined.stream, totals, profile, placed.queue, begin_ns)
    return Report(profile, facts, capture.header, binaries, executions)


def _selected(
    joined: Joined, reasons: Sequence[str], selection: Selection, placed: Placed, capture: CaptureReader
) -> Joined:
    """Applies the filters by launch and reason."""
    counts = joined.counts * selection.reason_mask(reasons).astype(np.uint64)
    keep = np.asarray(counts.any(axis=1))
    if selection.by_site:
        keep &= selection.matching_sites(placed, capture)[joined.site]
    samples, before = counts.sum(axis=1), joined.counts.sum(axis=1)
    alone = np.minimum(joined.alone, samples)
    joules = joined.joules * np.divide(samples, before, out=np.zeros(len(samples)), where=before > 0)
    return replace(joined, counts=counts, alone=alone, joules=joules).only(keep)


def _frames(
    capture: CaptureReader, joined: Joined, placed: Placed, frame_options: FrameOptions, symbolizer: Symbolizer
) -> CpuFrames:
    """Symbolizes the launch stacks of the joined sites."""
    sites = np.unique(joined.site).tolist()
    ids = sorted({placed.sites[site].stack for site in sites} - {0})
    spaces = AddressSpaces(capture.table("mapping"), capture.table("process"))
    codes = capture.table("python_code")
    stacks = capture.stacks(np.array(ids, np.uint64))
    return CpuFrames(stacks, spaces, symbolizer, frame_options, capture.has_cut_stacks, codes)


def _weights(joined: Joined, placed: Placed, totals: NDArray[np.int64]) -> dict[int, int]:
    """Returns the samples of each launch stack, by its id."""
    by_site = np.bincount(joined.site, totals, len(placed.sites)).astype(np.int64)
    weights: dict[int, int] = {}
    for site, samples in zip(placed.sites, by_site.tolist(), strict=True):
        if site.stack and samples:
            weights[site.stack] = weights.get(site.stack, 0) + samples
    return weights


def _cpu_modules(cpu: CpuFrames, weights: dict[int, int]) -> list[CpuModule]:
    """Returns how the modules of launch stacks were symbolized, those with the most unnamed samples first."""
    shares = cpu.shares(weights)
    total = max(sum(weights.values()), 1)
    found = []
    for names in cpu.modules:
        samples, unnamed = shares.get(names.module.identity, (0, 0))
        found.append(CpuModule(names, samples / total, unnamed / total))
    return sorted(found, key=lambda module: (-module.unnamed, -module.share, module.names.module.path))


def scope(header: dict[str, Any]) -> list[int] | None:
    """Returns the pids that the user chose to record; None: all."""
    pids = header.get("scope")
    return [pid for pid in pids if type(pid) is int and 0 <= pid < 1 << 32] if isinstance(pids, list) else None
