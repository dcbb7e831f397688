"""The launches of a capture as runs: those of one kernel by one thread that follow one another closely are one.

A recording can have a hundred million launches, and no picture has room for them. So row groups pass by, and only
runs are kept: where these become too many, what counts as closely grows until they are few enough.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from iaprof.formats.capture.reader import CaptureReader
from iaprof.formats.distinct import distinct
from iaprof.formats.export import Launches, Thread
from iaprof.formats.profile import UNKNOWN_KERNEL, Profile
from iaprof.formats.wire.launches import LaunchFlags
from iaprof.report.cpu_names import SymbolOptions, open_symbolizer
from iaprof.report.join.executions import RUNS_AT_ONCE, StackOf, expand_executions, read_fillings
from iaprof.report.join.placements import ADDRESS_MASK
from iaprof.report.join.selection import Selection
from iaprof.report.parts import host_of, starts_ns
from iaprof.report.profile import ReportOptions, scope
from iaprof.symbols.names.address_space import AddressSpaces
from iaprof.symbols.names.cpu_frames import CpuFrames
from iaprof.symbols.names.demangle import demangled

MOST_RUNS = 200_000
OTHERS = "[others]"
"""The kernel, and the thread, of what comes when there are too many of both."""
_FIRST_GAP_NS = 1_000_000
_LAST_GAP_NS = 1 << 62  # more than any time; doubled once more it fits into 63 bits
_MOST_PAIRS = MOST_RUNS // 2  # of a thread and a kernel: each has a run, whatever the gap
LATEST_NS = (1 << 62) - 1  # so that differences fit into 63 bits
_ROWS_AT_ONCE = 1 << 20
_COLUMNS = ("time_ns", "pid", "tid", "comm", "address", "name", "flags", "stack")
_Ints = NDArray[np.int64]


def launch_runs(
    capture: CaptureReader,
    options: ReportOptions,
    profile: Profile,
    most: int = MOST_RUNS,
    symbol_options: SymbolOptions = SymbolOptions(),  # noqa: B008 (it is frozen)
) -> Launches:
    """The launches that a selection keeps, by its times, processes, threads, cgroups, kernels and functions of Python.

    Copies and fills are among them, called as the function by which they are made: as kernels there are only those that
    the driver launches for them, and of a copy engine's none.

    Left out are those that say no more than that there was one (of processes that were not to be recorded), and those
    from before the capture was begun, which the file before it has. A launch does not tell its GPU: `--device` keeps
    all.

    Kernels are called as in the profile, where they have stalls there, else by the names that the launches give.

    Args:
        capture: the open capture.
        wanted: which part of it.
        profile: of the same selection.
        most: how many runs there can be.
        places: where names of CPU frames are looked for.

    Raises:
        CaptureError: the capture is damaged.
    """
    pairs, runs = _Pairs(options.selection, profile), Runs(most)
    parts = capture.parts
    for part, start_ns in zip(parts, starts_ns(capture), strict=True):
        host = host_of(part.header) if len(parts) > 1 else ""
        inside = options.selection.pids_in_cgroups(part) if options.selection.cgroups else None
        row_filter = options.selection.row_filter(part.header, start_ns)
        known = scope(part.header)
        stacks = _calling(part, options, symbol_options) if options.selection.python is not None else None
        for table in _tables(part, options.selection.stack_of):
            times, pids, flags = (table[name].to_numpy() for name in ("time_ns", "pid", "flags"))
            keep = (flags & (LaunchFlags.OTHER | LaunchFlags.CARRIED)) == 0
            keep &= (times >= np.uint64(row_filter.begin_ns)) & (times <= np.uint64(row_filter.end_ns))
            if known is not None:
                keep &= np.isin(pids, np.array(known, np.int64))
            if stacks is not None:
                keep &= np.isin(table["stack"].to_numpy(), stacks)
            pair = pairs.of(table if keep.all() else table.filter(pa.array(keep)), host, inside)
            since = np.minimum(times[keep], np.uint64(LATEST_NS)).astype(np.int64) - start_ns
            if (own := pair >= 0).any():
                runs.add(pair[own], since[own], *_several(table, keep, own, start_ns))
    pair, begin, end, count = runs.all()
    order = np.argsort(begin, kind="stable")
    thread_of, kernel_of = np.array(list(pairs.numbers), np.int64).reshape(-1, 2).T
    return Launches(
        list(pairs.kernels),
        list(pairs.threads),
        kernel_of[pair[order]],
        thread_of[pair[order]],
        begin[order] / 1e9,
        end[order] / 1e9,
        count[order],
        runs.gap_ns / 1e9,
    )


def _tables(part: CaptureReader, stack_of: StackOf) -> Iterator[pa.Table]:
    """The launches, and behind them copies and fills as if they were launches of kernels without an address."""
    yield from _launches(part, stack_of)
    same = [name for name in _COLUMNS if name not in ("address", "name")]
    for table in part.tables("transfer", (*same, "function")):
        columns = {name: table[name] for name in same}
        columns |= {"address": pa.chunked_array([np.zeros(len(table), np.uint64)]), "name": table["function"]}
        yield pa.table({name: columns[name] for name in _COLUMNS})


def _launches(part: CaptureReader, stack_of: StackOf) -> Iterator[pa.Table]:
    """The launches of a part, in tables; with `count` and `last_ns` where closed command lists were executed."""
    found = None
    if part.count("command_list"):
        found = read_fillings(part, part.table("launch", ("time_ns", "pid", "list")))
    if found is None:
        yield from part.tables("launch", _COLUMNS)
        return
    known, events = found
    appended, of, first = [], [np.empty(0, np.int64)], 0
    for table in part.tables("launch", _COLUMNS):
        filling = known.filling[first : first + len(table)]
        first += len(table)
        yield table.filter(pa.array(filling == RUNS_AT_ONCE))
        appended.append(table.filter(pa.array(filling >= 0)))
        of.append(filling[filling >= 0])
    if appended:
        launches = pa.concat_tables(appended).unify_dictionaries()
        yield expand_executions(launches, replace(known, filling=np.concatenate(of)), events, stack_of, _ROWS_AT_ONCE)


def _several(table: pa.Table, keep: NDArray[np.bool_], own: NDArray[np.bool_], start_ns: int) -> tuple[_Ints, ...]:
    """When the last of the launches was that each row stands for, and how many these are; nothing where it is one."""
    if "count" not in table.column_names:
        return ()
    last, count = (table[name].to_numpy()[keep][own] for name in ("last_ns", "count"))
    return np.minimum(last, np.uint64(LATEST_NS)).astype(np.int64) - start_ns, count.astype(np.int64)


def _calling(part: CaptureReader, options: ReportOptions, symbol_options: SymbolOptions) -> NDArray[np.uint64]:
    """The ids of the launches' stacks with a wanted function of Python, uint64[n]."""
    kinds = ("launch", "command_list", "transfer")
    met = [np.unique(table["stack"].to_numpy()) for kind in kinds for table in part.tables(kind, ("stack",))]
    ids = np.unique(np.concatenate([np.empty(0, np.uint64), *met]))
    spaces = AddressSpaces(part.table("mapping"), part.table("process"))
    with open_symbolizer(part, symbol_options) as names:
        codes = part.table("python_code")
        cpu = CpuFrames(part.stacks(ids), spaces, names, options.look, part.has_cut_stacks, codes)
    return np.array([id_ for id_ in ids.tolist() if options.selection.matches_stack(cpu.frames(id_))], np.uint64)


class _Pairs:
    """Numbers for pairs of a thread and a kernel, of those that are wanted."""

    def __init__(self, selection: Selection, profile: Profile) -> None:
        self.threads: dict[Thread, int] = {}
        self.kernels: dict[str, int] = {}
        self.numbers: dict[tuple[int, int], int] = {}  # by thread and kernel
        self._selection = selection
        self._names = _names(profile)

    def of(self, launches: pa.Table, host: str, inside: set[int] | None) -> _Ints:
        """The pair of each of these `launch` rows, -1 for what is not wanted; with `inside` of these pids only."""
        comms, names = (launches[name].unify_dictionaries().combine_chunks() for name in ("comm", "name"))
        pids, tids, addresses = (launches[name].to_numpy() for name in ("pid", "tid", "address"))
        columns = (pids, tids, addresses & np.uint64(ADDRESS_MASK), comms.indices.to_numpy(), names.indices.to_numpy())
        first, kind = distinct(*columns)
        comm_texts, name_texts = comms.dictionary.to_pylist(), names.dictionary.to_pylist()
        found = []
        for pid, tid, address, comm, name in zip(*(column[first].tolist() for column in columns), strict=True):
            thread = Thread(comm_texts[comm], pid, tid, host)
            found.append(self._number(thread, address, name_texts[name], inside))
        return np.array(found, np.int64)[kind]

    def _number(self, thread: Thread, address: int, name: str, inside: set[int] | None) -> int:
        selection = self._selection
        if (
            (selection.pids and thread.pid not in selection.pids)
            or (selection.tids and thread.tid not in selection.tids)
            or (selection.comms and thread.comm not in selection.comms)
            or (inside is not None and thread.pid not in inside)
        ):
            return -1
        kernel = self._names.get((thread.host, thread.pid, address), "") or demangled(name)
        kernel = kernel or (f"0x{address:x}" if address else UNKNOWN_KERNEL)
        if selection.kernel is not None and not selection.kernel.search(kernel):
            return -1
        if len(self.numbers) >= _MOST_PAIRS and (
            (self.threads.get(thread, -1), self.kernels.get(kernel, -1)) not in self.numbers
        ):
            thread, kernel = Thread(OTHERS, 0, 0), OTHERS
        pair = (
            self.threads.setdefault(thread, len(self.threads)),
            self.kernels.setdefault(kernel, len(self.kernels)),
        )
        return self.numbers.setdefault(pair, len(self.numbers))


def _names(profile: Profile) -> dict[tuple[str, int, int], str]:
    """What a kernel is called, by host, pid and address; "" where several were there in turn."""
    found: dict[tuple[str, int, int], str] = {}
    width = max(len(profile.kernels), 1)
    for pair in np.unique(profile.launch * width + profile.kernel).tolist():
        launch, kernel = profile.launches[pair // width], profile.kernels[pair % width]
        if launch is not None and kernel is not None:
            key = launch.host, launch.pid, kernel.address
            found[key] = kernel.symbol if found.get(key, kernel.symbol) == kernel.symbol else ""
    return found


class Runs:
    """Runs so far, and how far apart their launches can be."""

    def __init__(self, most: int, gap_ns: int = _FIRST_GAP_NS) -> None:
        self.gap_ns = gap_ns
        self._most = most
        self._parts: list[tuple[_Ints, ...]] = []
        self._waiting = 0

    def add(self, pair: _Ints, begin: _Ints, end: _Ints | None = None, count: _Ints | None = None) -> None:
        """Adds launches, or what ends later than it begins: int64[n] each, in any order; or so many, up to the end."""
        end, count = begin if end is None else end, np.ones_like(begin) if count is None else count
        self._parts.append((pair, begin, end, count))
        self._waiting += len(pair)
        if self._waiting > _ROWS_AT_ONCE:
            self.all()

    def all(self) -> tuple[_Ints, ...]:
        """Pair, begin, end and count of all runs: int64[n] each. Those of one pair are farther apart than the gap."""
        if not self._parts:
            return (np.empty(0, np.int64),) * 4
        columns = [np.concatenate(column) for column in zip(*self._parts, strict=True)]
        order = np.lexsort((columns[1], columns[0]))
        pair, begin, end, count = (column[order] for column in columns)
        # How far the runs of a pair have reached so far: ends by their ranks, so that pair and end fit into one number.
        ends, rank = np.unique(end, return_inverse=True)
        reach = ends[np.maximum.accumulate(pair * len(ends) + rank) % len(ends)]
        between = np.where(pair[1:] != pair[:-1], np.iinfo(np.int64).max, begin[1:] - reach[:-1])
        while (between > self.gap_ns).sum() >= self._most and self.gap_ns < _LAST_GAP_NS:
            self.gap_ns *= 2
        first = np.concatenate([[0], np.flatnonzero(between > self.gap_ns) + 1])
        runs = pair[first], begin[first], np.maximum.reduceat(end, first), np.add.reduceat(count, first)
        self._parts, self._waiting = [runs], 0
        return runs
