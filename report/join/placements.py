"""Finds which kernel lies where on the GPU, in which process, from when to when, and its launches.

A *placement* is one kernel of one code object at one address in one process. A launch gives the address and the
process; the debug ELF that the process compiled before it gives the rest. A *site* is a placement and the call stack
that launches it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from iaprof.formats.distinct import order_by
from iaprof.formats.wire.launches import LaunchFlags
from iaprof.gpu.code import ADDRESS_MASK
from iaprof.report.gpu.module import GpuKernel, GpuModule
from iaprof.report.join.executions import only_one
from iaprof.report.join.jobs import Jobs
from iaprof.report.join.lifetimes import NEVER, Lives, superseded
from iaprof.report.join.timed import EXECUTION_COLUMNS

MAX_KERNEL_BYTES = 1 << 28

LAUNCH_COLUMNS = ("time_ns", "pid", "tid", "comm", "address", "size", "stack", "name", "flags", "list")
"""The columns of `launch` rows that `place_kernels` needs."""
OPERATOR_COLUMN = "operator"
"""The column with the number of the operators in which a launch was made, if a capture has any."""


@dataclass(frozen=True)
class Compilation:
    """A code object that a process compiled."""

    time_ns: int
    pid: int
    module: GpuModule
    base: int = 0  # what is added to the addresses of the module's kernels


@dataclass(frozen=True)
class Placement:
    """A kernel at its address. Without `kernel`, it is only known from launches."""

    pid: int
    address: int
    size: int
    kernel: GpuKernel | None
    name: str
    since: int = 0  # when it was compiled, ns; 0: before the recording
    fingerprint: str = ""  # of its code; "": unknown


@dataclass(frozen=True)
class Site:
    """A placement and the call stack that launches it."""

    placement: int | None  # None: the address is in no known kernel, or in one of several
    pid: int
    comm: str
    stack: int  # stack id; 0: none
    note: str = ""  # why there is no stack, as a frame
    tid: int = 0  # 0 unless sites are by thread
    kernel_note: str = ""  # why there is no placement, as a frame
    operator: int = 0  # index into Placed.operators


@dataclass(frozen=True)
class Executions:
    """When each launch ran on the GPU."""

    begin: NDArray[np.uint64]  # [launches], ns; 0: unknown
    end: NDArray[np.uint64]  # [launches], ns
    stream: NDArray[np.int64]  # [launches], the GPU's


@dataclass
class Placed:
    """Everything that stalls can be joined to: placements, sites and launches."""

    placements: list[Placement] = field(default_factory=list)
    sites: list[Site] = field(default_factory=list)
    time: NDArray[np.uint64] = field(default_factory=lambda: np.empty(0, np.uint64))  # [launches], ns, ascending
    site: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))  # [launches]
    count: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))  # [launches], equal ones at a time
    ended: NDArray[np.uint64] = field(default_factory=lambda: np.empty(0, np.uint64))
    """[placements]: until when each can have run, ns; NEVER if nothing says so."""
    launched: NDArray[np.bool_] = field(default_factory=lambda: np.empty(0, bool))
    """[placements]: whether launches of each were recorded."""
    operators: Sequence[tuple[str, ...]] = ((),)
    """Chains of operators in which launches were made, outermost first; number 0 is none."""
    executions: Executions | None = None
    """When launches ran; None: not known of any."""
    jobs: Jobs | None = None
    """The jobs of the kernel's GPU scheduler; None: they are not known, or not all of them."""
    queue: NDArray[np.uint64] = field(default_factory=lambda: np.empty(0, np.uint64))
    """[sites with launches]: the handle of the queue of all launches of each; 0: unknown, or there are several."""

    def kernels_of(self, sites: Iterable[int]) -> set[GpuKernel]:
        """Returns the known kernels that these sites, given by index, launch."""
        placements = {self.sites[site].placement for site in sites}
        kernels = (self.placements[index].kernel for index in placements if index is not None)
        return {kernel for kernel in kernels if kernel is not None}

    def add_site(self, site: Site) -> int:
        """Adds a site and returns its index."""
        self.sites.append(site)
        return len(self.sites) - 1


def place_kernels(
    launches: pa.Table,
    compilations: list[Compilation],
    scope: Sequence[int] | None = None,
    processes: pa.Table | None = None,
    by_thread: bool = False,
    operators: Sequence[tuple[str, ...]] = ((),),
) -> Placed:
    """Combines launches and code objects to placements and sites.

    Args:
        launches: LAUNCH_COLUMNS of `launch` rows, in any order; with `count` if a row stands for several launches.
        compilations: in any order.
        scope: pids of the processes that the user chose to record; None: all.
        processes: columns time_ns, pid, tid and event of `process` rows, for when processes ended.
        by_thread: make launches of different threads different sites.
        operators: what OPERATOR_COLUMN refers to, if the launches have it.
    """
    placed = Placed(operators=operators)
    compiled: dict[tuple[int, int], list[tuple[int, GpuKernel]]] = defaultdict(list)
    for compilation in sorted(compilations, key=lambda c: c.time_ns):
        for kernel in compilation.module.kernels:
            address = (compilation.base + kernel.address) & ADDRESS_MASK
            compiled[compilation.pid, address].append((compilation.time_ns, kernel))
    used: set[tuple[int, int]] = set()
    if len(launches):
        used = _place_launches(placed, launches, compiled, scope, by_thread)
    placed.launched = np.ones(len(placed.placements), bool)
    for (pid, address), versions in compiled.items():
        if (pid, address) not in used:
            for time, kernel in versions:
                _add_placement(placed, pid, address, kernel.size, kernel, kernel.name, time)
    placed.launched = np.append(placed.launched, np.zeros(len(placed.placements) - len(placed.launched), bool))
    placed.ended = _ends(placed, processes)
    return placed


def _ends(placed: Placed, processes: pa.Table | None) -> NDArray[np.uint64]:
    """Returns until when each placement can have run: uint64[placements], ns."""
    if not placed.placements:
        return np.empty(0, np.uint64)
    pids, starts, sizes, since = (
        np.array([getattr(placement, name) for placement in placed.placements], np.uint64)
        for name in ("pid", "address", "size", "since")
    )
    first, last = np.full(len(pids), NEVER, np.uint64), np.zeros(len(pids), np.uint64)
    placement_of = np.array([site.placement for site in placed.sites], np.int64)[placed.site]
    np.minimum.at(first, placement_of, placed.time)
    np.maximum.at(last, placement_of, placed.time)
    born = np.where(first == NEVER, since, first)
    replaced = superseded(pids, starts, starts + np.maximum(sizes, np.uint64(1)), since, last)
    gone = Lives(processes).ends(pids, born, last) if processes is not None else np.full(len(pids), NEVER, np.uint64)
    return np.minimum(replaced, gone)


def _add_placement(
    placed: Placed, pid: int, address: int, size: int, kernel: GpuKernel | None, name: str, since: int
) -> int:
    placed.placements.append(
        Placement(pid, address, min(size, MAX_KERNEL_BYTES), kernel, name, since, kernel.fingerprint if kernel else "")
    )
    return len(placed.placements) - 1


def _place_launches(
    placed: Placed,
    launches: pa.Table,
    compiled: dict[tuple[int, int], list[tuple[int, GpuKernel]]],
    scope: Sequence[int] | None,
    by_thread: bool,
) -> set[tuple[int, int]]:
    times = launches["time_ns"].to_numpy()
    # Mostly they are in order already.
    order = slice(None) if (times[1:] >= times[:-1]).all() else np.argsort(times, kind="stable")
    times, pids = times[order], launches["pid"].to_numpy()[order]
    placement_of, keys = _placements_of(placed, launches, order, pids, times, compiled)
    # Distinct sites, in the order of their first launches.
    foreign = (launches["flags"].to_numpy()[order] & LaunchFlags.OTHER) != 0
    if scope is not None:
        foreign |= ~np.isin(pids, np.array(scope, np.int64))
    comm_texts, comms = _distinct_texts(launches["comm"])
    stacks, comms = launches["stack"].to_numpy()[order], comms[order]
    marked = [stacks, comms]
    threads = operators = None
    if by_thread:
        marked.append(threads := launches["tid"].to_numpy()[order])
    if OPERATOR_COLUMN in launches.column_names:
        marked.append(operators := np.where(foreign, 0, launches[OPERATOR_COLUMN].to_numpy()[order]))
    if foreign.any():
        marked[:2] = np.where(foreign, 0, stacks), np.where(foreign, -1, comms)
    site_firsts, site_of = _distinct(placement_of, *marked)
    for first in site_firsts.tolist():
        stack, comm, note = int(stacks[first]), comm_texts[comms[first]], "[no stack]"
        if foreign[first]:
            stack, comm, note = 0, "[other process]", "[not recorded]"
        numbers = int(placement_of[first]), int(pids[first])
        thread, operator = (0 if each is None else int(each[first]) for each in (threads, operators))
        placed.add_site(Site(*numbers, comm, stack, "" if stack else note, thread, operator=operator))
    placed.time, placed.site = times, site_of
    if "queue" in launches.column_names:
        placed.queue = only_one(site_of, launches["queue"].to_numpy()[order], len(site_firsts))
    if set(EXECUTION_COLUMNS) <= set(launches.column_names):
        begin, end, stream = (launches[name].to_numpy()[order] for name in EXECUTION_COLUMNS)
        placed.executions = Executions(begin, end, stream.astype(np.int64))
    has_counts = "count" in launches.column_names
    placed.count = launches["count"].to_numpy()[order].astype(np.int64) if has_counts else np.ones(len(times), np.int64)
    return set(keys)


def _placements_of(
    placed: Placed,
    launches: pa.Table,
    order: slice | NDArray[np.intp],
    pids: NDArray[Any],
    times: NDArray[np.uint64],
    compiled: dict[tuple[int, int], list[tuple[int, GpuKernel]]],
) -> tuple[NDArray[np.int64], list[tuple[int, int]]]:
    """Adds the placements of launches: kernels and their versions, in the order of their first launches.

    Args:
        placed: gets the placements.
        launches: see `place_kernels`.
        order: sorts them by time.
        pids: integers[launches], in this order.
        times: uint64[launches], ns, in this order.
        compiled: by process and address, when kernels were compiled there.

    Returns:
        The placement of each launch, int64[launches] in this order; and the process and address of each kernel.
    """
    sizes = launches["size"].to_numpy()[order]
    addresses = launches["address"].to_numpy()[order] & np.uint64(ADDRESS_MASK)
    kernels, kernel_of = _distinct(pids, addresses)
    keys = list(zip(pids[kernels].tolist(), addresses[kernels].tolist(), strict=True))
    del addresses
    by_kernel = order_by(kernel_of)
    starts = np.searchsorted(kernel_of[by_kernel], np.arange(len(kernels) + 1))
    version = np.full(len(times), -1)
    for index, key in enumerate(keys):
        if key in compiled:
            members = by_kernel[starts[index] : starts[index + 1]]
            compile_times = np.array([time for time, _ in compiled[key]], np.uint64)
            version[members] = np.searchsorted(compile_times, times[members], side="right") - 1
    del by_kernel
    firsts, placement_of = _distinct(kernel_of, version)
    largest = np.zeros(len(firsts), np.uint64)
    np.maximum.at(largest, placement_of, sizes)
    name_texts, names = _distinct_texts(launches["name"])
    names = names[order]
    for first, size in zip(firsts.tolist(), largest.tolist(), strict=True):
        (pid, address), number = keys[kernel_of[first]], int(version[first])
        since, kernel = compiled[pid, address][number] if number >= 0 else (0, None)
        name = kernel.name if kernel else name_texts[names[first]]
        _add_placement(placed, pid, address, max(size, kernel.size if kernel else 0), kernel, name, since)
    return placement_of, keys


def _distinct_texts(column: pa.ChunkedArray) -> tuple[list[str], NDArray[np.int32]]:
    """Returns the distinct texts, and for each row the index of its text."""
    encoded = column.combine_chunks().dictionary_encode()
    return encoded.dictionary.to_pylist(), encoded.indices.to_numpy()


def _distinct(*columns: NDArray[Any]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Groups equal rows: returns the first row of each group, in order of first appearance, and each row's group."""
    numbers, groups = np.zeros(len(columns[0]), np.int32), 1
    for column in columns:
        values = pa.array(column).dictionary_encode()
        if len(values.dictionary) <= 1:
            continue
        if groups > 1:
            both = numbers * np.int64(len(values.dictionary))
            both += values.indices.to_numpy()
            values = pa.array(both).dictionary_encode()
        numbers, groups = values.indices.to_numpy(), len(values.dictionary)
    group = numbers.astype(np.int64)
    # Arrow numbers dictionary values in order of first appearance.
    firsts = np.empty(groups if len(group) else 0, np.int64)
    firsts[group[::-1]] = np.arange(len(group))[::-1]  # the last that is written is the first row
    return firsts, group
