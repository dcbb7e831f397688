"""Tables of kernels: how long they take, how much of the time they run, and in which phases they spend cycles."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from iaprof.timelines.dialects import Kind, find
from iaprof.timelines.grouped import Groups, rows_of
from iaprof.timelines.intervals import Union, ends, lengths_of_unions
from iaprof.timelines.options import Options
from iaprof.timelines.placeholders import placed
from iaprof.timelines.stages.energy import share_energy
from iaprof.timelines.stages.power import mean_power
from iaprof.timelines.trace import ABSENT, Slices, Trace

NUMBER, PLACEHOLDER = r"[_-]\d+", "_[N]"  # in names, so that kernels of a kind are one row
PHASES = ("TS2-1", "TS3-2", "TS4-3", "TS5-4")


def calculate_stats(trace: Trace, options: Options) -> None:
    """Makes the tables `summary`, `active`, `ts_analysis` and `kernels`, and `energy` where power is known."""
    is_kernel = find(trace, Kind.KERNEL)
    kernels = trace.slices.take(is_kernel)
    names = trace.texts.replaced(kernels.name, NUMBER, PLACEHOLDER)
    _summarize(trace, kernels, names)
    _measure_activity(trace, kernels, placed(trace)[is_kernel])
    _measure_phases(trace, kernels, names)
    _break_down(trace, kernels, names, options)
    share_energy(trace, options, NUMBER, PLACEHOLDER)


def _summarize(trace: Trace, kernels: Slices, names: NDArray[np.int32]) -> None:
    groups = Groups(kernels.pid, names)
    duration = np.maximum(kernels.duration, 0) / 1000
    total, pid = groups.sum(duration), groups.key(kernels.pid)
    of_pid = Groups(pid)
    whole = of_pid.sum(total)[of_pid.numbers]
    order = np.lexsort((-total, pid))
    columns = {
        "Time": np.divide(total * 100, whole, out=np.zeros(len(groups)), where=whole > 0),
        "Total Time": total,
        "Calls": groups.counts,
        **_statistics(groups, duration),
        "pid": pid,
    }
    table = {name: values[order] for name, values in columns.items()}
    trace.tables["summary"] = pa.table(table | {"Name": trace.texts.taken(groups.key(names)[order])})


def _statistics(groups: Groups, values: NDArray[Any], prefix: str = "") -> dict[str, NDArray[Any]]:
    return {
        f"{prefix}Mean": groups.mean(values),
        f"{prefix}Median": groups.median(values),
        f"{prefix}Min": groups.min(values),
        f"{prefix}Max": groups.max(values),
        f"{prefix}StDev": groups.stdev(values),
    }


def _measure_activity(trace: Trace, kernels: Slices, have_times: NDArray[np.bool_]) -> None:
    """Makes the table of each rank's kernels: their time added up, and the share of time in which at least one runs."""
    groups = Groups(kernels.pid)
    total = groups.sum(np.maximum(kernels.duration, 0))
    start, until, number = kernels.start[have_times], ends(kernels)[have_times], groups.numbers[have_times]
    known = Groups(number)
    at = known.key(number)  # ranks with a kernel that has a time
    first, last, elapsed = (np.full(len(groups), np.nan) for _ in range(3))
    first[at], last[at] = known.min(start), known.max(until)
    elapsed[at] = known.max(until) - known.min(start)
    busy = lengths_of_unions(start, until, number, len(groups))
    trace.tables["active"] = pa.table(
        {
            "Total Kernel Time": total / 1000,
            "Elapsed Time": elapsed / 1000,
            "Start Time": first / 1000,
            "End Time": last / 1000,
            "Active percentage": np.divide(busy * 100.0, elapsed, out=np.full(len(groups), np.nan), where=elapsed > 0),
            "pid": groups.key(kernels.pid),
        }
    )


def _with_counters(kernels: Slices, names: NDArray[np.int32]) -> tuple[Slices, NDArray[np.int32]]:
    complete = (kernels.counters != ABSENT).all(axis=1)
    return kernels.take(complete), names[complete]


def _measure_phases(trace: Trace, kernels: Slices, names: NDArray[np.int32]) -> None:
    """Makes the table of the cycles between counters, by pid and total duration as the summary."""
    kernels, names = _with_counters(kernels, names)
    groups = Groups(kernels.pid, names)
    pid = groups.key(kernels.pid)
    order = np.lexsort((-groups.sum(kernels.duration), pid))
    columns: dict[str, NDArray[Any]] = {"Calls": groups.counts}
    cycles = np.diff(kernels.counters, axis=1)
    for number, phase in enumerate(PHASES):
        columns |= _statistics(groups, cycles[:, number], f"{phase}_")
    columns["pid"] = pid
    table = {name: values[order] for name, values in columns.items()}
    trace.tables["ts_analysis"] = pa.table(table | {"Name": trace.texts.taken(groups.key(names)[order])})


def _break_down(trace: Trace, kernels: Slices, names: NDArray[np.int32], options: Options) -> None:
    """Makes the table of all cycles of each kernel, by what they were spent on, and its mean power."""
    kernels, names = _with_counters(kernels, names)
    groups = Groups(kernels.pid, names)
    pid = groups.key(kernels.pid)
    energy, measured = _energy(trace, kernels, options)
    watt_us, us = groups.sum(energy), groups.sum(measured)
    cycles = [groups.sum(each) for each in np.diff(kernels.counters, axis=1).T]
    whole = np.sum(cycles, axis=0) if len(groups) else np.zeros(0, np.int64)
    order = np.lexsort((-whole, pid))
    columns = {
        "pid": pid,
        "Calls": groups.counts,
        "Cycles": whole,
        "Copy In": cycles[0],
        "Prepare": cycles[1],
        "Execute": cycles[2],
        "Copy Out": cycles[3],
        "Execute Percent": np.divide(cycles[2] * 100.0, whole, out=np.zeros(len(groups)), where=whole > 0),
        "Mean Watts": np.divide(watt_us, us, out=np.full(len(groups), np.nan), where=us > 0),
    }
    table = {name: values[order] for name, values in columns.items()}
    trace.tables["kernels"] = pa.table(table | {"Name": trace.texts.taken(groups.key(names)[order])})


def _energy(trace: Trace, kernels: Slices, options: Options) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Returns the energy of each kernel (watts times us), and for how many us its power is known."""
    found = mean_power(trace, options)
    power = found.watts
    energy, measured = np.zeros(len(kernels)), np.zeros(len(kernels))
    good = np.flatnonzero(~np.isnan(power))
    begin, until = kernels.start, ends(kernels)
    pids = np.unique(found.pid[good])
    for its, mine in zip(rows_of(found.pid[good], pids), rows_of(kernels.pid, pids), strict=True):
        of_pid = good[its]
        start, end = found.start[of_pid], found.end[of_pid]
        used = np.append(0.0, np.cumsum(power[of_pid] * ((end - start) / 1000)))
        spent = _until(until[mine], start, end, used, power[of_pid])
        energy[mine] = spent - _until(begin[mine], start, end, used, power[of_pid])
        measured[mine] = Union.of(start, end).within(begin[mine], until[mine]) / 1000
    return energy, measured


def _until(
    times: NDArray[np.int64],
    start: NDArray[np.int64],
    end: NDArray[np.int64],
    used: NDArray[np.float64],
    power: NDArray[np.float64],
) -> NDArray[np.float64]:
    """Returns the energy before times, of intervals in order; `used`: before each of them."""
    place = np.searchsorted(start, times, side="right") - 1
    inside = np.maximum(place, 0)
    partly = power[inside] * ((np.minimum(times, end[inside]) - start[inside]) / 1000)
    return np.asarray(np.where(place >= 0, used[inside] + partly, 0.0), float)
