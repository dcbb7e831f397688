"""From a capture to the rows that writers print: read, joined, named.

Also counts: what went in is what came out, and where it went.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
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
from iaprof.report.gpu_module import GpuKernel, GpuModule, GpuModules
from iaprof.report.placements import Compilation, Placed, Placement, Site, place
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
    loaded = _Modules(modules, platforms)
    compilations = _compilations(capture, loaded, facts)
    launches = capture.table("launch", ("time_ns", "pid", "comm", "address", "size", "stack", "name", "flags"))
    placed = place(launches, compilations, _scope(capture.header))
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
    names = _KernelNames(placed.placements)
    return Report(Profile(_rows(joined, placed, names, cpu, known, loaded), intervals, measured), facts)


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


class _Modules:
    """The capture's modules. Where its GPUs are of several generations, a module is read as each one's in turn."""

    def __init__(self, modules: GpuModules, platforms: list[Platform | None]) -> None:
        self._modules = modules
        self._platforms = platforms
        self._as_read: dict[int, dict[Platform | None, GpuKernel]] = {}  # by the id of the kernel as the first one's

    def load(self, elf: bytes) -> GpuModule:
        """The module as one for the first stream's GPU."""
        platforms = dict.fromkeys(self._platforms) or {None: None}
        read = {platform: self._modules.load(elf, platform) for platform in platforms}
        first = next(iter(read.values()))
        for platform, module in read.items():
            for kernel, same in zip(first.kernels, module.kernels, strict=False):
                self._as_read.setdefault(id(kernel), {})[platform] = same
        return first

    def on(self, stream: int, kernel: GpuKernel) -> GpuKernel:
        """A kernel that `load` gave, as one for that stream's GPU."""
        return self._as_read[id(kernel)].get(self._platforms[stream], kernel)


def _compilations(capture: CaptureReader, modules: _Modules, facts: Facts) -> list[Compilation]:
    """Every module of the capture, read once per content."""
    read: dict[bytes, GpuModule] = {}
    found = []
    for table in capture.tables("kernel", ("time_ns", "pid", "path", "digest", "elf")):
        for index in range(len(table)):  # modules, of which there are few
            time_ns, pid, path, digest, elf = (column[index] for column in table.columns)
            key = digest.as_py()
            if key not in read and elf.is_valid:
                read[key] = modules.load(elf.as_py())
                for problem in read[key].problems:
                    facts.problems.setdefault(problem, []).append(str(path.as_py()))
            if key in read:
                found.append(Compilation(time_ns.as_py(), pid.as_py(), read[key]))
    return found


class _KernelNames:
    """What kernels are called: where different ones have one name and file, a hash of the code tells them apart."""

    def __init__(self, placements: Sequence[Placement]) -> None:
        called: dict[tuple[str, str], list[GpuKernel]] = {}
        for kernel in {id(p.kernel): p.kernel for p in placements}.values():
            if kernel is not None:
                called.setdefault((kernel.demangled, kernel.file), []).append(kernel)
        self._ambiguous = {
            names
            for names, kernels in called.items()
            if len(kernels) > 1 and len({kernel.signature for kernel in kernels}) > 1
        }

    def name(self, placement: Placement) -> str:
        """Of the kernel that lies there."""
        kernel = placement.kernel
        if kernel is None:
            return placement.name or f"0x{placement.address:x}"
        if (kernel.demangled, kernel.file) in self._ambiguous:
            return f"{kernel.demangled} [code {kernel.signature}]"
        return kernel.demangled or f"0x{placement.address:x}"


def _rows(
    joined: Joined,
    placed: Placed,
    names: _KernelNames,
    cpu: CpuFrames,
    known: list[Stream],
    modules: _Modules,
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
            kernels[index] = _kernel(placement, names)
        offset = ip if placement is None else (ip - placement.address) & known[stream].layout.address_mask
        key = (stream, site.placement, offset)
        if key not in instructions:
            kernel = modules.on(stream, placement.kernel) if placement and placement.kernel else None
            instructions[key] = _instruction(placement, kernel, offset, names)
        yield Row(interval, launches[index], kernels[index], instructions[key], tuple(counts))


def _launch(site: Site, cpu: CpuFrames) -> Launch | None:
    if site.placement is None:
        return None
    frames = cpu.frames(site.stack) if site.stack else ()
    return Launch(site.comm, site.pid, frames or (site.note or "[stack lost]",))


def _kernel(placement: Placement | None, names: _KernelNames) -> Kernel | None:
    if placement is None:
        return None
    return Kernel(placement.address, names.name(placement), placement.kernel.file if placement.kernel else "")


def _instruction(
    placement: Placement | None, kernel: GpuKernel | None, offset: int, names: _KernelNames
) -> Instruction:
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
