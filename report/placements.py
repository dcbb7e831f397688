"""Which kernel lies where on the GPU, in which process, since when, and which launches it had.

A *placement* is one kernel of one module at one address in one process. Launches tell address and process; the debug
ELF that the process compiled before tells the rest. A *site* is a placement and a place in a program that launches it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from iaprof.formats.launches import LaunchFlags
from iaprof.report.gpu_module import GpuKernel, GpuModule

ADDRESS_MASK = (1 << 48) - 1
"""GPU addresses come sign-extended on some devices: they are compared by their 48 bits."""
MAX_KERNEL_BYTES = 1 << 28


@dataclass(frozen=True)
class Compilation:
    """A module that a process compiled."""

    time_ns: int
    pid: int
    module: GpuModule


@dataclass(frozen=True)
class Placement:
    """A kernel at its address. Without `kernel` only the launches tell of it."""

    pid: int
    address: int
    size: int
    kernel: GpuKernel | None
    name: str


@dataclass(frozen=True)
class Site:
    """A place in a program from which a placement is launched."""

    placement: int | None  # None: the address is in no known kernel
    pid: int
    comm: str
    stack: int  # stack id; 0 for none
    note: str = ""  # why there is no stack


@dataclass
class Launches:
    """Launches in order of time."""

    time: NDArray[np.uint64]
    site: NDArray[np.int64]


@dataclass
class Placed:
    """Everything that stalls can be joined to."""

    placements: list[Placement] = field(default_factory=list)
    sites: list[Site] = field(default_factory=list)
    by_placement: dict[int, Launches] = field(default_factory=dict)
    unlaunched: dict[int, int] = field(default_factory=dict)  # placement -> its site without a launch
    since: dict[int, int] = field(default_factory=dict)  # placement -> when it was compiled, ns; 0 when unknown

    def kernels_of(self, sites: Iterable[int]) -> set[GpuKernel]:
        """The known kernels that these sites, given by index, launch."""
        placements = {self.sites[site].placement for site in sites}
        kernels = (self.placements[index].kernel for index in placements if index is not None)
        return {kernel for kernel in kernels if kernel is not None}

    def add_site(self, site: Site) -> int:
        """The index of a new site."""
        self.sites.append(site)
        return len(self.sites) - 1


def place(launches: pa.Table, compilations: list[Compilation], scope: Sequence[int] | None = None) -> Placed:
    """Brings launches and modules together.

    Args:
        launches: columns time_ns, pid, comm, address, size, stack, name, flags of `launch` rows; any order.
        compilations: any order.
        scope: the processes that were to be recorded; None for all.
    """
    placed = Placed()
    compiled: dict[tuple[int, int], list[tuple[int, GpuKernel]]] = defaultdict(list)
    for compilation in sorted(compilations, key=lambda c: c.time_ns):
        for kernel in compilation.module.kernels:
            compiled[compilation.pid, kernel.address & ADDRESS_MASK].append((compilation.time_ns, kernel))

    used: set[tuple[int, int]] = set()
    if len(launches):
        used = _place_launches(placed, launches, compiled, scope)
    for (pid, address), versions in compiled.items():
        if (pid, address) not in used:
            for time, kernel in versions:
                index = _add_placement(placed, pid, address, kernel.size, kernel, kernel.name, time)
                site = Site(index, pid, "", 0, "[launch not recorded]")
                placed.unlaunched[index] = placed.add_site(site)
    return placed


def _add_placement(
    placed: Placed, pid: int, address: int, size: int, kernel: GpuKernel | None, name: str, since: int
) -> int:
    placed.placements.append(Placement(pid, address, min(size, MAX_KERNEL_BYTES), kernel, name))
    placed.since[len(placed.placements) - 1] = since
    return len(placed.placements) - 1


def _place_launches(
    placed: Placed,
    launches: pa.Table,
    compiled: dict[tuple[int, int], list[tuple[int, GpuKernel]]],
    scope: Sequence[int] | None,
) -> set[tuple[int, int]]:
    order = np.argsort(launches["time_ns"].to_numpy(), kind="stable")
    times, pids, stacks, sizes = (launches[name].to_numpy()[order] for name in ("time_ns", "pid", "stack", "size"))
    addresses = launches["address"].to_numpy()[order] & np.uint64(ADDRESS_MASK)
    comm_texts, comms = _texts(launches["comm"])
    name_texts, names = _texts(launches["name"])
    comms, names = comms[order], names[order]
    others = (launches["flags"].to_numpy()[order] & LaunchFlags.OTHER) != 0
    if scope is not None:
        others |= ~np.isin(pids, np.array(scope, np.int64))

    # Distinct kernels, then versions of each, then places that launch each version; all in order of their first launch.
    kernels, kernel_of = _distinct(pids, addresses)
    keys = list(zip(pids[kernels].tolist(), addresses[kernels].tolist(), strict=True))
    by_kernel = np.argsort(kernel_of, kind="stable")
    starts = np.searchsorted(kernel_of[by_kernel], np.arange(len(kernels) + 1))
    version = np.full(len(times), -1)
    for index, key in enumerate(keys):
        if key in compiled:
            members = by_kernel[starts[index] : starts[index + 1]]
            compile_times = np.array([time for time, _ in compiled[key]], np.uint64)
            version[members] = np.searchsorted(compile_times, times[members], side="right") - 1
    firsts, placement_of = _distinct(kernel_of, version)
    largest = np.zeros(len(firsts), np.uint64)
    np.maximum.at(largest, placement_of, sizes)
    before = len(placed.placements)
    for first, size in zip(firsts.tolist(), largest.tolist(), strict=True):
        (pid, address), number = keys[kernel_of[first]], int(version[first])
        since, kernel = compiled[pid, address][number] if number >= 0 else (0, None)
        name = kernel.name if kernel else name_texts[names[first]]
        _add_placement(placed, pid, address, max(size, kernel.size if kernel else 0), kernel, name, since)
    site_firsts, site_of = _distinct(placement_of, np.where(others, 0, stacks), np.where(others, -1, comms))
    first_site = len(placed.sites)
    for first in site_firsts.tolist():
        stack, comm, note = int(stacks[first]), comm_texts[comms[first]], "[no stack]"
        if others[first]:
            stack, comm, note = 0, "[other process]", "[not recorded]"
        placed.add_site(Site(before + int(placement_of[first]), int(pids[first]), comm, stack, "" if stack else note))
    by_placement = np.argsort(placement_of, kind="stable")
    starts = np.searchsorted(placement_of[by_placement], np.arange(len(firsts) + 1))
    for index in range(len(firsts)):
        members = by_placement[starts[index] : starts[index + 1]]
        placed.by_placement[before + index] = Launches(times[members], first_site + site_of[members])
    return set(keys)


def _texts(column: pa.ChunkedArray) -> tuple[list[str], NDArray[np.int64]]:
    """Distinct texts, and which of them each row has."""
    encoded = column.combine_chunks().dictionary_encode()
    return encoded.dictionary.to_pylist(), encoded.indices.to_numpy().astype(np.int64)


def _distinct(*columns: NDArray[Any]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Indices of the first row of each distinct combination, in order, and each row's combination."""
    group = np.zeros(len(columns[0]), np.int64)
    for column in columns:
        values = pa.array(column).dictionary_encode()
        both = pa.array(group * len(values.dictionary) + values.indices.to_numpy()).dictionary_encode()
        group = both.indices.to_numpy().astype(np.int64)
    # Dictionaries are in the order in which their values came: a group's first row is where the maximum so far grows.
    firsts = np.flatnonzero(np.diff(np.maximum.accumulate(group), prepend=-1))
    return firsts, group
