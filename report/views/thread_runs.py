"""What threads did, for time lines: launches, waits, and the operators of a framework.

Launches of a kernel by a thread in close succession are merged into runs. So are waits, by thread and function, if they
are too many; short waits, which the recorder only adds up, have no times and are left out. Operators are from the
traces that were joined to a capture, on the threads of the capture.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from iaprof.formats.capture.reader import CaptureReader
from iaprof.formats.distinct import distinct_rows
from iaprof.formats.export import Launches, OperatorSlices, Thread
from iaprof.formats.header.waits import WaitFlags
from iaprof.formats.profile import UNKNOWN_KERNEL, Profile
from iaprof.formats.wire.launches import LaunchFlags
from iaprof.gpu.code import ADDRESS_MASK
from iaprof.report.cpu_names import SymbolOptions, open_symbolizer
from iaprof.report.join.executions import RUNS_AT_ONCE, StackOf, expand_executions, read_fillings
from iaprof.report.join.operators import HostSlices, depths, read_host_slices
from iaprof.report.join.selection import Selection
from iaprof.report.parts import host_of, starts_ns
from iaprof.report.profile import ReportOptions, scope
from iaprof.report.runs import MAX_NS, MAX_RUNS, Pairs, Runs
from iaprof.report.views.process_names import COLUMNS as NAMED_BY, process_names
from iaprof.symbols.cpu_frames import CpuFrames
from iaprof.symbols.names.address_space import AddressSpaces
from iaprof.symbols.names.demangle import demangled

_ROWS_AT_ONCE = 1 << 20
_LAUNCH_COLUMNS = ("time_ns", "pid", "tid", "comm", "address", "name", "flags", "stack")
_Ints = NDArray[np.int64]

_WAIT_COLUMNS = ("time_ns", "end_ns", "pid", "tid", "comm", "function", "flags")

MOST_SLICES = 200_000  # the longest ones are shown


def launch_runs(
    capture: CaptureReader,
    options: ReportOptions,
    profile: Profile,
    max_runs: int = MAX_RUNS,
    symbol_options: SymbolOptions = SymbolOptions(),  # noqa: B008 (it is frozen)
) -> Launches:
    """Returns the launches that a selection's times, processes, threads, cgroups, kernels and Python functions keep.

    Copies and fills are included under the name of the function that makes them, as the driver may use a copy engine
    for them instead of kernels.

    Launches of processes that the user did not choose to record are left out: only their number is known. So are
    launches from before this file of a rotated recording. `--device` keeps all launches, which do not tell their GPU.

    A kernel has its name in the profile if it has stalls, else the name in its launches.

    Args:
        capture: the open capture.
        options: the report's options.
        profile: of the same selection.
        max_runs: the number of runs beyond which the gap grows.
        symbol_options: where to find names of CPU frames.

    Raises:
        CaptureError: the capture is damaged.
    """
    pairs, runs = _Pairs(options.selection, profile), Runs(max_runs)
    parts = capture.parts
    for part, start_ns in zip(parts, starts_ns(capture), strict=True):
        host = host_of(part.header) if len(parts) > 1 else ""
        inside = options.selection.in_cgroups(part)
        row_filter = options.selection.row_filter(part.header, start_ns)
        recorded_pids = scope(part.header)
        stacks = _matching_stacks(part, options, symbol_options) if options.selection.python is not None else None
        for table in _tables(part, options.selection.stack_of):
            times, pids, flags = (table[name].to_numpy() for name in ("time_ns", "pid", "flags"))
            keep = (flags & (LaunchFlags.OTHER | LaunchFlags.CARRIED)) == 0
            keep &= (times >= np.uint64(row_filter.begin_ns)) & (times <= np.uint64(row_filter.end_ns))
            if recorded_pids is not None:
                keep &= np.isin(pids, np.array(recorded_pids, np.int64))
            if stacks is not None:
                keep &= np.isin(table["stack"].to_numpy(), stacks)
            if inside is not None:
                keep &= inside.has(pids, times)
            pair = pairs.number_launches(table if keep.all() else table.filter(pa.array(keep)), host)
            since = np.minimum(times[keep], np.uint64(MAX_NS)).astype(np.int64) - start_ns
            if (own := pair >= 0).any():
                runs.add(pair[own], since[own], *_last_and_count(table, keep, own, start_ns))
    return runs.launches(pairs)


def _tables(part: CaptureReader, stack_of: StackOf) -> Iterator[pa.Table]:
    """Yields the launches, then copies and fills as launches of kernels without an address."""
    yield from _launches(part, stack_of)
    shared = [name for name in _LAUNCH_COLUMNS if name not in ("address", "name")]
    for table in part.tables("transfer", (*shared, "function")):
        columns = {name: table[name] for name in shared}
        columns |= {"address": pa.chunked_array([np.zeros(len(table), np.uint64)]), "name": table["function"]}
        yield pa.table({name: columns[name] for name in _LAUNCH_COLUMNS})


def _launches(part: CaptureReader, stack_of: StackOf) -> Iterator[pa.Table]:
    """Yields the launches of a part; the last table has `count` and `last_ns` if closed lists were executed."""
    found = None
    if part.count("command_list"):
        found = read_fillings(part, part.table("launch", ("time_ns", "pid", "list")))
    if found is None:
        yield from part.tables("launch", _LAUNCH_COLUMNS)
        return
    known, events = found
    appended, fillings, first = [], [np.empty(0, np.int64)], 0
    for table in part.tables("launch", _LAUNCH_COLUMNS):
        filling = known.filling[first : first + len(table)]
        first += len(table)
        yield table.filter(pa.array(filling == RUNS_AT_ONCE))
        appended.append(table.filter(pa.array(filling >= 0)))
        fillings.append(filling[filling >= 0])
    if appended:
        launches = pa.concat_tables(appended).unify_dictionaries()
        yield expand_executions(
            launches, replace(known, filling=np.concatenate(fillings)), events, stack_of, _ROWS_AT_ONCE
        )


def _last_and_count(
    table: pa.Table, keep: NDArray[np.bool_], own: NDArray[np.bool_], start_ns: int
) -> tuple[_Ints, ...]:
    """Returns each row's last launch, ns since `start_ns`, and its number of launches; () if that is 1 for all."""
    if "count" not in table.column_names:
        return ()
    last, count = (table[name].to_numpy()[keep][own] for name in ("last_ns", "count"))
    return np.minimum(last, np.uint64(MAX_NS)).astype(np.int64) - start_ns, count.astype(np.int64)


def _matching_stacks(part: CaptureReader, options: ReportOptions, symbol_options: SymbolOptions) -> NDArray[np.uint64]:
    """Returns the ids of the launches' stacks with a selected Python function: uint64[n]."""
    kinds = ("launch", "command_list", "transfer")
    ids_of_kinds = [np.unique(table["stack"].to_numpy()) for kind in kinds for table in part.tables(kind, ("stack",))]
    ids = np.unique(np.concatenate([np.empty(0, np.uint64), *ids_of_kinds]))
    spaces = AddressSpaces(part.table("mapping"), part.table("process"))
    with open_symbolizer(part, symbol_options) as names:
        codes = part.table("python_code")
        cpu = CpuFrames(part.stacks(ids), spaces, names, options.frame_options, part.has_cut_stacks, codes)
    return np.array([id_ for id_ in ids.tolist() if options.selection.matches_stack(cpu.frames(id_))], np.uint64)


class _Pairs(Pairs):
    """Numbers the selected pairs of a thread and a kernel."""

    def __init__(self, selection: Selection, profile: Profile) -> None:
        super().__init__()
        self._selection = selection
        self._names = _names(profile)

    def number_launches(self, launches: pa.Table, host: str) -> _Ints:
        """Returns the number of each launch's pair: int64[n]; -1: not selected.

        Args:
            launches: `launch` rows.
            host: the name of the part's machine; "" for a single part.
        """
        comms, names = (launches[name].unify_dictionaries().combine_chunks() for name in ("comm", "name"))
        pids, tids, addresses = (launches[name].to_numpy() for name in ("pid", "tid", "address"))
        columns = (pids, tids, addresses & np.uint64(ADDRESS_MASK), comms.indices.to_numpy(), names.indices.to_numpy())
        first, kind = distinct_rows(*columns)
        comm_texts, name_texts = comms.dictionary.to_pylist(), names.dictionary.to_pylist()
        found = []
        for pid, tid, address, comm, name in zip(*(column[first].tolist() for column in columns), strict=True):
            thread = Thread(comm_texts[comm], pid, tid, host)
            found.append(self._number_pair(thread, address, name_texts[name]))
        return np.array(found, np.int64)[kind]

    def _number_pair(self, thread: Thread, address: int, name: str) -> int:
        selection = self._selection
        if (
            (selection.pids and thread.pid not in selection.pids)
            or (selection.tids and thread.tid not in selection.tids)
            or (selection.comms and thread.comm not in selection.comms)
        ):
            return -1
        kernel = self._names.get((thread.host, thread.pid, address), "") or demangled(name)
        kernel = kernel or (f"0x{address:x}" if address else UNKNOWN_KERNEL)
        if selection.kernel is not None and not selection.kernel.search(kernel):
            return -1
        return self.number(thread, kernel)


def _names(profile: Profile) -> dict[tuple[str, int, int], str]:
    """Returns the kernels' names in a profile, by host, pid and address; "" if several kernels had the address."""
    found: dict[tuple[str, int, int], str] = {}
    width = max(len(profile.kernels), 1)
    for pair in np.unique(profile.launch * width + profile.kernel).tolist():
        launch, kernel = profile.launches[pair // width], profile.kernels[pair % width]
        if launch is not None and kernel is not None:
            key = launch.host, launch.pid, kernel.address
            found[key] = kernel.symbol if found.get(key, kernel.symbol) == kernel.symbol else ""
    return found


def wait_runs(capture: CaptureReader, options: ReportOptions, max_runs: int = MAX_RUNS) -> Launches:
    """Returns the waits that a selection's times, processes and threads keep, with functions in place of kernels.

    Args:
        capture: the open capture.
        options: the report's options.
        max_runs: the number of waits beyond which they are merged.

    Raises:
        CaptureError: the capture is damaged.
    """
    selection, runs, pairs = options.selection, Runs(max_runs, 1), Pairs()
    parts = capture.parts
    for part, start_ns in zip(parts, starts_ns(capture), strict=True):
        host = host_of(part.header) if len(parts) > 1 else ""
        row_filter = selection.row_filter(part.header, start_ns)
        names = process_names(part.table("process"))
        pids = selection.matching_pids(part, names) if selection.by_process else None
        inside = selection.in_cgroups(part)
        wanted_pids = None if pids is None else np.array(sorted(pids), np.int64)
        for table in part.tables("wait", _WAIT_COLUMNS):
            begin, end, pid, tid, flags = (
                table[name].to_numpy() for name in ("time_ns", "end_ns", "pid", "tid", "flags")
            )
            keep = (flags & WaitFlags.ADDED_UP) == 0
            keep &= (end >= np.uint64(row_filter.begin_ns)) & (begin <= np.uint64(row_filter.end_ns))
            if wanted_pids is not None:
                keep &= np.isin(pid, wanted_pids)
            if inside is not None:
                keep &= inside.has(pid, begin)
            if selection.tids:
                keep &= np.isin(tid, np.array(sorted(selection.tids), np.int64))
            if not keep.any():
                continue
            comm, function = (table[name].unify_dictionaries().combine_chunks() for name in ("comm", "function"))
            columns = [pid, tid, comm.indices.to_numpy(), function.indices.to_numpy()]
            first, kind = distinct_rows(*(column[keep] for column in columns))
            texts, function_names = comm.dictionary.to_pylist(), function.dictionary.to_pylist()
            numbers = []
            for pid_, thread, comm_, which in zip(*(column[keep][first].tolist() for column in columns), strict=True):
                key = Thread(texts[comm_] or names.get(pid_, ""), pid_, thread, host)
                numbers.append(pairs.number(key, function_names[which]))
            since, until = (
                np.minimum(column[keep], np.uint64(MAX_NS)).astype(np.int64) - start_ns for column in (begin, end)
            )
            runs.add(np.array(numbers, np.int64)[kind], since, np.maximum(until, since))
    return runs.launches(pairs)


def operator_slices(capture: CaptureReader, options: ReportOptions, most: int = MOST_SLICES) -> OperatorSlices | None:
    """Returns the operators of the selected times, processes and threads; None if the capture has none.

    Args:
        capture: the open capture.
        options: the report's options.
        most: how many; of more, the longest.

    Raises:
        CaptureError: the capture is damaged.
    """
    names: dict[str, int] = {}
    threads: dict[Thread, int] = {}
    columns: list[tuple[_Ints, ...]] = []
    for part, start_ns in zip(capture.parts, starts_ns(capture), strict=True):
        slices = read_host_slices(part)
        if slices is None:
            continue
        processes = process_names(part.table("process", NAMED_BY))
        host = host_of(part.header) if len(capture.parts) > 1 else ""
        known = [Thread(processes.get(pid, ""), pid, tid, host) for pid, tid in slices.threads]
        pids = options.selection.matching_pids(part, {each.pid: each.comm for each in known})
        chosen = np.array([_is_chosen(each, options.selection, pids) for each in known], bool)
        number = np.array([threads.setdefault(each, len(threads)) for each in known], np.int64)
        row_filter = options.selection.row_filter(part.header, start_ns)
        begin, end = slices.nesting.begin, slices.nesting.end
        keep = chosen[slices.nesting.thread]
        keep &= (end > min(row_filter.begin_ns, 1 << 62)) & (begin <= min(row_filter.end_ns, 1 << 62))
        texts = np.array([names.setdefault(name, len(names)) for name in slices.names], np.int64)
        depth = depths(slices.nesting.parents())
        found = (
            number[slices.nesting.thread],
            texts[slices.name],
            depth,
            begin - start_ns,
            _clipped(slices, depth) - start_ns,
        )
        columns.append(tuple(column[keep] for column in found))
    if not columns:
        return None
    thread, name, depth, begin, end = (np.concatenate(column) for column in zip(*columns, strict=True))
    longest = np.sort(np.argsort(begin - end, kind="stable")[:most])
    whole = OperatorSlices(list(names), list(threads), name, thread, depth, begin / 1e9, end / 1e9, len(name))
    return whole if len(longest) == len(name) else whole.only(longest)


def _is_chosen(thread: Thread, selection: Selection, pids: set[int]) -> bool:
    return thread.pid in pids and (not selection.tids or thread.tid in selection.tids)


def _clipped(slices: HostSlices, depth: _Ints) -> _Ints:
    """Returns when slices end, at most when the next one of their thread and depth begins: rounded times may cross."""
    nesting = slices.nesting
    order = np.lexsort((nesting.begin, depth, nesting.thread))
    same = (nesting.thread[order][1:] == nesting.thread[order][:-1]) & (depth[order][1:] == depth[order][:-1])
    end = nesting.end.copy()
    before = order[:-1][same]
    end[before] = np.minimum(end[before], nesting.begin[order[1:][same]])
    return end
