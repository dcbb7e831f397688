"""Makes the report of one part of a capture: reads, joins and names it, and counts how samples were matched."""

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
from iaprof.formats.distinct import distinct_values, numbered, order_by
from iaprof.formats.energy import whole_parts
from iaprof.formats.header.stack_counts import recorded, recorded_python
from iaprof.formats.profile import Code, Kernel, Launch, Profile
from iaprof.gpu.code import ADDRESS_MASK
from iaprof.gpu.instructions import UNDECODABLE
from iaprof.gpu.samples import ACTIVE
from iaprof.report.facts import CpuModule, Facts, Matched, Report
from iaprof.report.gauges import gauges
from iaprof.report.gpu.module import NO_BINARY, NO_DECODER, NO_INSTRUCTION, GpuKernel, GpuModuleLoader
from iaprof.report.join.candidates import AMBIGUOUS, BEFORE_RECORDING, NOT_RECORDED, Method
from iaprof.report.join.energy import ReadEnergy, read_energy
from iaprof.report.join.executions import read_launches
from iaprof.report.join.jobs import jobs_of
from iaprof.report.join.joining import Task, join, samples_ahead
from iaprof.report.join.kernels import KernelNames, SampledKernels, instruction_starts
from iaprof.report.join.operators import read_operators
from iaprof.report.join.placements import LAUNCH_COLUMNS, Placed, Placement, Site, place_kernels
from iaprof.report.join.seen import Seen
from iaprof.report.join.selection import Selection, begun_ns
from iaprof.report.join.shares import Joined
from iaprof.report.join.streams import Stream, reasons_of, streams
from iaprof.symbols.cpu_frames import CpuFrames, FrameOptions
from iaprof.symbols.names.address_space import AddressSpaces
from iaprof.symbols.names.names import Symbolizer
from iaprof.symbols.names.rows import CaptureNames

NO_INSTRUCTIONS = (NO_BINARY, NO_DECODER, NO_INSTRUCTION, UNDECODABLE)
"""Mnemonics that stand for an unknown instruction."""
MAX_LISTED = 50
"""The most kernels whose instructions a page lists."""
ANY_INSTRUCTION = "[any instruction]"
"""The mnemonic that stands for all instructions of a kernel together."""


def to_profile(
    joined: Joined,
    placed: Placed,
    kernels: SampledKernels,
    cpu: CpuFrames,
    known: Sequence[Stream],
    merged: bool = False,
) -> tuple[Profile, list[GpuKernel | None], NDArray[np.bool_]]:
    """Makes a profile of joined stalls.

    Args:
        joined: counts by site and address.
        placed: what the sites refer to.
        kernels: the sites' kernels, already read.
        cpu: the frames of the sites' stacks.
        known: the streams, by index.
        merged: put each kernel's instructions into one row.

    Returns:
        The profile, without intervals; each of its kernels in outline, None if unknown; and whether each of its rows
        has a decoded instruction: bool[n].
    """
    names = KernelNames(kernels)
    sites, launch = numbered(joined.site)
    launches = [_launch(placed.sites[site], cpu, placed.operators) for site in sites.tolist()]
    # The profile has a kernel for each placement, and one for all sites without a placement.
    placement_of_site = np.array([-1 if s.placement is None else s.placement for s in placed.sites], np.int64)
    placements, kernel = numbered(placement_of_site[joined.site])
    where = [placed.placements[index] if index >= 0 else None for index in placements.tolist()]
    codes: dict[Code, int] = {}
    code = np.zeros(len(joined.ip), np.int64)
    offset = joined.ip.copy()
    groups, group_of = numbered(kernel * len(known) + joined.stream)
    order = order_by(group_of)
    ends = np.searchsorted(group_of[order], np.arange(len(groups) + 1))
    for index, group in enumerate(groups.tolist()):
        rows = order[ends[index] : ends[index + 1]]
        number, stream = divmod(group, len(known))
        placement = where[number]
        if placement is None:
            code[rows] = _unknown(placed, joined.site[rows], codes)
            continue
        if merged:
            code[rows] = codes.setdefault(Code(ANY_INSTRUCTION, (names.name(placement),), (0,)), len(codes))
            offset[rows] = 0
            continue
        offset[rows] = (joined.ip[rows] - np.uint64(placement.address)) & np.uint64(known[stream].layout.address_mask)
        code[rows] = _codes(placement, names, kernels, stream, offset[rows], codes)
    devices = list(dict.fromkeys(stream.device for stream in known))
    device_of = np.array([devices.index(stream.device) for stream in known], np.int64)
    instructions = np.array([each.mnemonic not in NO_INSTRUCTIONS for each in codes], bool)
    profile = Profile(
        launches,
        [None if each is None else _kernel(each, names, kernels) for each in where],
        list(codes),
        joined.interval,
        launch,
        kernel,
        code,
        offset,
        joined.counts,
        device_of[joined.stream] if known else joined.stream,
        reasons_of(known),
        [],
        devices or ("",),
        launch_counts=_launch_counts(placed, placements),
    )
    outlines = [each.kernel if each is not None else None for each in where]
    return profile, outlines, instructions[code] if len(code) else np.empty(0, bool)


def hottest(profile: Profile) -> set[str]:
    """Returns the names of the kernels with most samples, at most MAX_LISTED."""
    samples = np.bincount(profile.kernel, profile.counts.sum(axis=1), len(profile.kernels)).astype(np.int64)
    by_name: dict[str, int] = {}
    for kernel, count in zip(profile.kernels, samples.tolist(), strict=True):
        if kernel is not None and count:
            by_name[kernel.symbol] = by_name.get(kernel.symbol, 0) + count
    return set(sorted(by_name, key=lambda name: (-by_name[name], name))[:MAX_LISTED])


def _launch_counts(placed: Placed, placements: NDArray[np.int64]) -> dict[int, int]:
    placement_of_site = np.array([-1 if site.placement is None else site.placement for site in placed.sites], np.int64)
    counts = np.zeros(len(placed.placements), np.int64)
    np.add.at(counts, placement_of_site[placed.site], placed.count)
    return {number: int(counts[index]) for number, index in enumerate(placements.tolist()) if index >= 0}


def _launch(site: Site, cpu: CpuFrames, operators: Sequence[tuple[str, ...]]) -> Launch | None:
    if site.placement is None and not site.comm:
        return None
    if site.note == AMBIGUOUS:
        return Launch(site.comm, 0, ())
    frames = cpu.frames(site.stack) if site.stack else ()
    inside = operators[site.operator]
    if not frames:
        return Launch(site.comm, site.pid, (site.note or "[stack lost]",), operators=inside)
    return Launch(site.comm, site.pid, frames, origins=cpu.origins(site.stack), operators=inside)


def _kernel(placement: Placement, names: KernelNames, kernels: SampledKernels) -> Kernel:
    file = kernels.loaded(placement.kernel).file if placement.kernel else ""
    return Kernel(placement.address, names.name(placement), file)


def _unknown(placed: Placed, sites: NDArray[np.int64], codes: dict[Code, int]) -> NDArray[np.int64]:
    """Returns the codes of sites without a placement, whose kernel is unknown or one of several: int64[n]."""
    kinds, kind_of = np.unique(sites, return_inverse=True)
    notes = [placed.sites[site].kernel_note for site in kinds.tolist()]
    numbers = [codes.setdefault(Code(NO_BINARY, (note,) if note else (), ()), len(codes)) for note in notes]
    return np.array(numbers, np.int64)[kind_of]


def _codes(
    placement: Placement,
    names: KernelNames,
    kernels: SampledKernels,
    stream: int,
    offsets: NDArray[np.uint64],
    codes: dict[Code, int],
) -> NDArray[np.int64]:
    """Returns the codes of a kernel's instructions at these offsets: int64[n]. Adds new ones to `codes`."""
    name = names.name(placement)
    if placement.kernel is None:
        return np.full(len(offsets), codes.setdefault(Code(NO_BINARY, (name,), (0,)), len(codes)))
    found, which = kernels.loaded_for(stream, placement.kernel).codes_at(offsets)
    numbers = []
    places: dict[int, tuple[Any, ...]] = {}  # by the frames, which `found` keeps: many instructions have the same ones
    for mnemonic, frames in found:
        if (place := places.get(id(frames))) is None:
            # The outermost function is the kernel itself: it keeps the name that it has everywhere else.
            functions = (name, *(frame.function for frame in frames[1:]))
            place = functions, tuple(frame.line for frame in frames), tuple(frame.file for frame in frames)
            places[id(frames)] = place
        numbers.append(codes.setdefault(Code(mnemonic, *place), len(codes)))
    return np.array(numbers, np.int64)[which]


@dataclass(frozen=True)
class ReportOptions:
    """The options of a report."""

    selection: Selection = Selection()  # noqa: RUF009 (it is frozen)
    interval_s: float = 0.0  # the length of an interval; 0: a single interval
    frame_options: FrameOptions = FrameOptions()  # noqa: RUF009 (it is frozen)
    texts: bool = False  # read the text of GPU instructions
    texts_of_hottest: bool = False  # only of the kernels that `hottest` names
    start_ns: int | None = None  # time 0 of the time range and intervals, CLOCK_MONOTONIC; None: the recording's start
    seen: bool = False  # find when samples of each kernel and stack were seen
    all_samples: bool = False  # CPU samples of the recorder and of processes out of scope, too
    by_time_s: float | None = None
    """The length of the intervals of `Report.by_time`, which has each kernel's instructions in one row; None: none."""


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
    facts = Facts()
    selection, interval_ns = options.selection, int(options.interval_s * 1e9)
    known = streams(capture.header)
    instruction_sets = [stream.instruction_set for stream in known]
    texts_of_all = options.texts and not options.texts_of_hottest
    kernels = SampledKernels(capture, loader, instruction_sets, facts.problems, texts_of_all)
    with samples_ahead(capture) as samples:  # threads read the first ones while launches are placed
        placed = _placed(capture, kernels, selection)
        begin_ns = begun_ns(capture.header) if options.start_ns is None else options.start_ns
        row_filter = selection.row_filter(capture.header, begin_ns)
        return_free_memory()
        mask = min((stream.layout.address_mask for stream in known), default=ADDRESS_MASK)
        starts = instruction_starts(placed, kernels, mask)
        energy = read_energy(capture, known, row_filter)
        seen = Seen(selection.reason_mask(reasons_of(known)), len(known)) if options.seen else None
        by_time_ns = None if options.by_time_s is None else int(options.by_time_s * 1e9)
        task = Task(placed, begin_ns, interval_ns, selection.rule, row_filter, starts, by_time_ns, energy, seen)
        joined, facts.records, crowded, beside, by_time = join(capture, task, samples, progress)
    capture.check(len(distinct_values(joined.site)), SITES)
    capture.check(len(distinct_values(joined.ip)), INSTRUCTIONS)
    if crowded:
        facts.problems["in so many kernels that only some of these were looked at"] = [
            counted(crowded, "address", "addresses")
        ]
    if beside:
        facts.problems["sampled while programs whose launches are not recorded had work on a GPU, too"] = [
            counted(beside, "stall record")
        ]
    return_free_memory()
    found = _Found(capture, placed, kernels, known, begin_ns, energy, seen, symbolizer or CaptureNames(capture))
    report = _report(found, joined, options, facts)
    if by_time is not None:
        timed = replace(options, interval_s=options.by_time_s or 0.0, seen=False, texts=False)
        report = replace(report, by_time=_report(found, by_time, timed, Facts(), merged=True).profile)
    return report


def _placed(capture: CaptureReader, kernels: SampledKernels, selection: Selection) -> Placed:
    """Returns all that stalls can be joined to."""
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
    placed.jobs = jobs_of(capture, (each.pid for each in placed.placements))
    return placed


@dataclass(frozen=True)
class _Found:
    """What stalls were joined to."""

    capture: CaptureReader
    placed: Placed
    kernels: SampledKernels
    known: list[Stream]
    begin_ns: int
    energy: ReadEnergy | None
    seen: Seen | None
    symbolizer: Symbolizer


def _report(found: _Found, joined: Joined, options: ReportOptions, facts: Facts, merged: bool = False) -> Report:
    """Makes a report of joined stalls.

    Args:
        found: what they were joined to.
        joined: the stalls.
        options: the report's options.
        facts: gets the facts about the report.
        merged: put each kernel's instructions into one row.
    """
    capture, placed, kernels, known, begin_ns, energy = (
        found.capture,
        found.placed,
        found.kernels,
        found.known,
        found.begin_ns,
        found.energy,
    )
    selection, interval_ns = options.selection, int(options.interval_s * 1e9)
    sampled = float(joined.joules.sum())
    joined = _selected(joined, reasons_of(known), selection, placed, capture)
    cpu = _frames(capture, joined, placed, options.frame_options, found.symbolizer)
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
    kernels.read(placed.kernels_of(distinct_values(joined.site).tolist()))
    profile, sampled_kernels, decoded = to_profile(joined, placed, kernels, cpu, known, merged)
    if options.texts and options.texts_of_hottest:
        names = hottest(profile)
        kernels.read(
            {
                each
                for each, kernel in zip(sampled_kernels, profile.kernels, strict=True)
                if each is not None and kernel is not None and kernel.symbol in names
            },
            texts=True,
        )
    binaries = [each and kernels.loaded(each) for each in sampled_kernels]
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
    facts.timed = placed.executions is not None
    if energy is not None:
        facts.energy = energy.shared(sampled, float(joined.joules.sum()))
    has_stack = np.array([bool(site.stack) and not site.note for site in placed.sites])
    profile = replace(
        profile,
        intervals=intervals,
        divided=np.where(has_stack[joined.site], joined.counts.sum(axis=1) - joined.alone, np.uint64(0))
        if selection.rule.method is Method.PROPORTIONAL
        else None,
        timed=placed.executions is not None,
        energy=None if facts.energy is None else whole_parts(joined.joules, facts.energy.selected),
        gauges=measured,
        matched=facts.matched.shares(),
        whole=facts.whole,
        recorded=recorded(capture.header),
        python=facts.python,
        recorded_python=recorded_python(capture.header),
    )
    executions = None
    if options.seen and found.seen is not None:
        executions = found.seen.executions(joined.site, joined.stream, totals, profile, placed.queue, begin_ns)
    return Report(profile, facts, capture.header, binaries, executions)


def _selected(
    joined: Joined, reasons: Sequence[str], selection: Selection, placed: Placed, capture: CaptureReader
) -> Joined:
    """Applies the filters by launch and reason."""
    counted_reasons = selection.reason_mask(reasons)
    if counted_reasons.all() and not selection.by_site:
        return joined  # its rows have samples
    counts = joined.counts * counted_reasons.astype(np.uint64)
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
    sites = distinct_values(joined.site).tolist()
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
