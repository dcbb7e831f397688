"""Which kernel lies where on the GPU, in which process, since when, and which launches it had.

A *placement* is one kernel of one module at one address in one process. Launches tell address and process; the debug
ELF that the process compiled before tells the rest. A *site* is a placement and a place in a program that launches it.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

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

    def add_site(self, site: Site) -> int:
        """The index of a new site."""
        self.sites.append(site)
        return len(self.sites) - 1


def place(launches: pa.Table, compilations: list[Compilation]) -> Placed:
    """Brings launches and modules together.

    Args:
        launches: columns time_ns, pid, comm, address, size, stack, name of `launch` rows; any order.
        compilations: any order.
    """
    placed = Placed()
    compiled: dict[tuple[int, int], list[tuple[int, GpuKernel]]] = defaultdict(list)
    for compilation in sorted(compilations, key=lambda c: c.time_ns):
        for kernel in compilation.module.kernels:
            compiled[compilation.pid, kernel.address & ADDRESS_MASK].append((compilation.time_ns, kernel))

    used: set[tuple[int, int]] = set()
    if len(launches):
        used = _place_launches(placed, launches, compiled)
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
    placed: Placed, launches: pa.Table, compiled: dict[tuple[int, int], list[tuple[int, GpuKernel]]]
) -> set[tuple[int, int]]:
    order = np.argsort(launches["time_ns"].to_numpy(), kind="stable")
    times = launches["time_ns"].to_numpy()[order]
    comms = launches["comm"].combine_chunks().dictionary_encode()
    names = launches["name"].combine_chunks().dictionary_encode()
    columns = {
        "pid": launches["pid"].to_numpy()[order].astype(np.uint64),
        "address": launches["address"].to_numpy()[order] & np.uint64(ADDRESS_MASK),
        "size": launches["size"].to_numpy()[order],
        "stack": launches["stack"].to_numpy()[order],
        "comm": comms.indices.fill_null(0).to_numpy(zero_copy_only=False)[order].astype(np.uint64),
        "name": names.indices.fill_null(0).to_numpy(zero_copy_only=False)[order].astype(np.uint64),
    }
    comm_texts, name_texts = comms.dictionary.to_pylist(), names.dictionary.to_pylist()

    # Distinct kernels, then distinct places among the launches of each version of a kernel.
    kernels, which = _distinct(columns["pid"], columns["address"])
    by_kernel = np.argsort(which, kind="stable")  # stable: in order of time within a kernel
    starts = np.searchsorted(which[by_kernel], np.arange(len(kernels) + 1))
    used = set()
    for index, first in enumerate(kernels):
        members = by_kernel[starts[index] : starts[index + 1]]
        pid, address = int(columns["pid"][first]), int(columns["address"][first])
        used.add((pid, address))
        versions = compiled.get((pid, address), [])
        compile_times = np.array([time for time, _ in versions], np.uint64)
        version = np.searchsorted(compile_times, times[members], side="right") - 1
        for number in np.unique(version):
            launched = members[version == number]
            kernel = versions[number][1] if number >= 0 else None
            size = max(int(columns["size"][launched].max()), kernel.size if kernel else 0)
            name = kernel.name if kernel else name_texts[int(columns["name"][launched[0]])] or ""
            since = versions[number][0] if number >= 0 else 0
            placement = _add_placement(placed, pid, address, size, kernel, name, since)
            firsts, place_of = _distinct(columns["stack"][launched], columns["comm"][launched])
            sites = []
            for first_launch in launched[firsts]:
                stack = int(columns["stack"][first_launch])
                comm = comm_texts[int(columns["comm"][first_launch])] or ""
                sites.append(placed.add_site(Site(placement, pid, comm, stack, "" if stack else "[no stack]")))
            placed.by_placement[placement] = Launches(times[launched], np.array(sites, np.int64)[place_of])
    return used


def _distinct(*columns: NDArray[np.uint64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Indices of the first row of each distinct combination, and each row's combination."""
    keys = np.stack(columns, axis=1)
    _, first, inverse = np.unique(keys, axis=0, return_index=True, return_inverse=True)
    return first, inverse.reshape(-1)
