"""From a capture to the rows that writers print: read, joined, named.

Also counts: what went in is what came out, and where it went.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from iaprof.formats.capture import KINDS, CaptureReader
from iaprof.formats.profile import Instruction, Kernel, Launch, Profile, Row
from iaprof.report.attribution import Joined, Stream, join, streams
from iaprof.report.gauges import gauges
from iaprof.report.gpu_module import GpuKernel, GpuModules
from iaprof.report.kernels import KernelNames, SampledKernels
from iaprof.report.placements import Placed, Placement, Site, place
from iaprof.report.platforms import Platform
from iaprof.symbols.address_space import AddressSpaces
from iaprof.symbols.cpu_frames import CpuFrames, Look, ModuleNames
from iaprof.symbols.names import Naming
from iaprof.symbols.rows import CaptureNames


@dataclass(frozen=True)
class CpuModule:
    """How one module of the launching stacks was named."""

    names: ModuleNames
    share: float  # of the samples with a stack, those with a frame in it
    unnamed: float  # and those with a frame in it that has no name


@dataclass
class Facts:
    """What a report should say about itself."""

    records: int = 0
    stalls: int = 0  # samples: the sum of all counts
    unknown_kernel: int = 0  # of those, in no known kernel
    no_launch: int = 0  # in a known kernel of which no launch was recorded
    problems: dict[str, list[str]] = field(default_factory=dict)  # and the paths of the modules that have it
    cpu_modules: list[CpuModule] = field(default_factory=list)


@dataclass
class Report:
    """A profile, and what is to be said about it."""

    profile: Profile
    facts: Facts


def build(
    capture: CaptureReader,
    modules: GpuModules,
    interval_s: float = 0.0,
    naming: Naming | None = None,
    look: Look = Look(),  # noqa: B008 (it is frozen)
) -> Report:
    """Reads and joins a whole capture; naming happens while the rows are taken.

    Args:
        capture: the open capture.
        modules: reads debug ELFs.
        interval_s: length of an interval; 0 for everything in one.
        naming: names the frames of CPU stacks; without, the capture itself.
        look: how CPU frames are to look.

    Raises:
        CaptureError: the capture is damaged.
    """
    facts = Facts()
    known = streams(capture.header)
    platforms = [Platform.from_ip_version(*stream.ip_version) for stream in known]
    kernels = SampledKernels(capture, modules, platforms, facts.problems)
    launches = capture.table("launch", ("time_ns", "pid", "comm", "address", "size", "stack", "name", "flags"))
    placed = place(launches, kernels.compilations(), _scope(capture.header))
    start_ns = _start_ns(capture.header)
    joined, facts.records = join(capture, placed, start_ns, int(interval_s * 1e9))
    totals = joined.counts.sum(axis=1)
    facts.stalls = int(totals.sum())
    unknown = np.array([site.placement is None for site in placed.sites])
    unlaunched = np.zeros(len(placed.sites), bool)
    unlaunched[list(placed.unlaunched.values())] = True
    facts.unknown_kernel = int(totals[unknown[joined.site]].sum())
    facts.no_launch = int(totals[unlaunched[joined.site]].sum())
    spaces = AddressSpaces(capture.table("mapping"), capture.table("process"))
    weights = _weights(joined, placed, totals)
    stacks = _stacks(capture, weights)
    cpu = CpuFrames(stacks, spaces, naming or CaptureNames(capture), look)
    facts.cpu_modules = _shares(cpu, weights)
    last = int(joined.interval.max()) if len(joined.interval) else -1
    intervals = [start_ns / 1e9 + interval_s * number for number in range(last + 1)]
    measured = gauges(capture, start_ns, int(interval_s * 1e9), len(intervals)) if interval_s else {}
    kernels.read(placed.kernels_of(np.unique(joined.site).tolist()))
    names = KernelNames(kernels)
    return Report(Profile(_rows(joined, placed, names, cpu, known, kernels), intervals, measured), facts)


def _weights(joined: Joined, placed: Placed, totals: NDArray[np.int64]) -> dict[int, int]:
    """The samples of each launching stack, by its id."""
    by_site = np.bincount(joined.site, totals, len(placed.sites)).astype(np.int64)
    weights: dict[int, int] = {}
    for site, samples in zip(placed.sites, by_site.tolist(), strict=True):
        if site.stack and samples:
            weights[site.stack] = weights.get(site.stack, 0) + samples
    return weights


def _stacks(capture: CaptureReader, wanted: Collection[int]) -> pa.Table:
    """The `stack` rows with these ids."""
    ids = pa.array(sorted(wanted), pa.uint64())
    tables = [table.filter(pc.is_in(table["id"], ids)) for table in capture.tables("stack")]
    return pa.concat_tables([pa.schema(list(KINDS["stack"])).empty_table(), *tables])


def _shares(cpu: CpuFrames, weights: dict[int, int]) -> list[CpuModule]:
    """How the modules of the launching stacks were named, those with the most unnamed samples first."""
    shares = cpu.shares(weights)
    all_ = max(sum(weights.values()), 1)
    found = []
    for told in cpu.modules:
        samples, unnamed = shares.get(told.module.identity, (0, 0))
        found.append(CpuModule(told, samples / all_, unnamed / all_))
    return sorted(found, key=lambda module: (-module.unnamed, -module.share, module.names.module.path))


def _scope(header: dict[str, Any]) -> list[int] | None:
    """The processes that were to be recorded; None for all."""
    pids = header.get("scope")
    return [pid for pid in pids if type(pid) is int and 0 <= pid < 1 << 32] if isinstance(pids, list) else None


def _start_ns(header: dict[str, Any]) -> int:
    clock = header.get("clock")
    start = clock.get("monotonic_ns") if isinstance(clock, dict) else None
    return start if isinstance(start, int) and 0 <= start < 1 << 63 else 0


def _rows(
    joined: Joined,
    placed: Placed,
    names: KernelNames,
    cpu: CpuFrames,
    known: list[Stream],
    read: SampledKernels,
) -> Iterator[Row]:
    launches: dict[int, Launch | None] = {}
    kernels: dict[int, Kernel | None] = {}
    instructions: dict[tuple[int, int | None, int], Instruction] = {}
    columns = (joined.interval.tolist(), joined.stream.tolist(), joined.site.tolist(), joined.ip.tolist())
    for interval, stream, index, ip, counts in zip(*columns, joined.counts.tolist(), strict=True):
        site = placed.sites[index]
        if index not in launches:
            launches[index] = _launch(site, cpu)
        placement = None if site.placement is None else placed.placements[site.placement]
        if index not in kernels:
            kernels[index] = _kernel(placement, names, read)
        offset = ip if placement is None else (ip - placement.address) & known[stream].layout.address_mask
        key = (stream, site.placement, offset)
        if key not in instructions:
            kernel = read.on(stream, placement.kernel) if placement and placement.kernel else None
            instructions[key] = _instruction(placement, kernel, offset, names)
        yield Row(interval, launches[index], kernels[index], instructions[key], tuple(counts))


def _launch(site: Site, cpu: CpuFrames) -> Launch | None:
    if site.placement is None:
        return None
    frames = cpu.frames(site.stack) if site.stack else ()
    return Launch(site.comm, site.pid, frames or (site.note or "[stack lost]",))


def _kernel(placement: Placement | None, names: KernelNames, read: SampledKernels) -> Kernel | None:
    if placement is None:
        return None
    file = read.whole(placement.kernel).file if placement.kernel else ""
    return Kernel(placement.address, names.name(placement), file)


def _instruction(placement: Placement | None, kernel: GpuKernel | None, offset: int, names: KernelNames) -> Instruction:
    if placement is None or kernel is None:
        return Instruction(offset, "[no binary]", (names.name(placement) if placement else "",), (0,))
    info = kernel.at(offset)
    inside = info.frames[1:]  # of the kernel itself, which is called what it is called everywhere
    return Instruction(
        offset,
        info.mnemonic,
        (names.name(placement), *(frame.function for frame in inside)),
        tuple(frame.line for frame in info.frames),
        tuple(frame.file for frame in info.frames),
    )
