"""Energy: divides the power of a device over time among the slices that ran on it, and idle time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from iaprof.formats.energy import MOST_J, NJ_PER_J, whole_parts
from iaprof.timelines.dialects import Kind, find
from iaprof.timelines.grouped import Groups, rows_of
from iaprof.timelines.intervals import FARTHEST, ends
from iaprof.timelines.options import Options
from iaprof.timelines.placeholders import placed_points
from iaprof.timelines.stages.power import mean_power
from iaprof.timelines.trace import Slices, Trace

TABLE = "energy"
OF_SLICES = "energy_uj"
IDLE = "[idle]"
UNITS = {"Watts": 1.0, "W": 1.0, "mW": 1e-3}  # the series of counters of power, in watts; NVML has mW
OF_POWER = f"^({'|'.join(UNITS)})$"
"""The series of counters of power, as a regular expression."""
_Ints = NDArray[np.int64]
_Floats = NDArray[np.float64]


@dataclass(frozen=True)
class DevicePower:
    """Power of a device, which holds for each interval: these are in order, and do not overlap."""

    start: _Ints  # [n], ns
    end: _Ints  # [n], ns
    watts: _Floats  # [n]

    def at(self, times: _Ints) -> _Floats:
        """Returns the power just after each time; NaN where it is not known."""
        if not len(self.start):
            return np.full(len(times), np.nan)
        place = np.maximum(np.searchsorted(self.start, times, "right") - 1, 0)
        holds = (self.start[place] <= times) & (times < self.end[place])
        return np.asarray(np.where(holds, self.watts[place], np.nan), np.float64)


@dataclass(frozen=True)
class Spent:
    """A device's energy from its first edge to each edge. Edges are where power changes, or a slice begins or ends."""

    edges: _Ints  # [n], ns
    each: _Floats  # [n], joules of a slice that ran all the time; slices that run at once share it equally
    idle: _Floats  # [n], joules while nothing ran
    known: _Ints  # [n], ns in which power was known
    idle_known: bool  # power was known while nothing ran, or something ran all the time
    total: float  # joules

    @classmethod
    def of(cls, power: DevicePower, starts: _Ints, until: _Ints) -> Spent:
        """Divides the power of a device among slices, given by their starts and ends in ns."""
        edges = np.unique(np.concatenate([power.start, power.end, starts, until]))
        begun, ended = (np.searchsorted(np.sort(each), edges[:-1], "right") for each in (starts, until))
        running = begun - ended
        watts, ns = power.at(edges[:-1]), np.diff(edges)
        has_power, rests = ~np.isnan(watts), running == 0
        spent = np.where(has_power, watts, 0.0) * ns / 1e9
        known = np.append(0, np.cumsum(np.where(has_power, ns, 0)))
        each = np.append(0.0, np.cumsum(np.where(running > 0, spent / np.maximum(running, 1), 0.0)))
        idle = np.append(0.0, np.cumsum(np.where(rests, spent, 0.0)))
        return cls(edges, each, idle, known, bool((has_power & rests).any() or not rests.any()), float(spent.sum()))

    def of_slices(self, starts: _Ints, until: _Ints) -> _Floats:
        """Returns the joules of slices, all of whose starts and ends are edges; NaN where no power was known."""
        begin, end = np.searchsorted(self.edges, starts), np.searchsorted(self.edges, until)
        # For a slice without a length, the next edge.
        after = np.minimum(np.maximum(end, begin + 1), len(self.edges) - 1)
        return np.where(self.known[after] > self.known[begin], self.each[end] - self.each[begin], np.nan)

    def at(self, values: _Floats, times: _Ints) -> _Floats:
        """Returns `each` or `idle` at given times, interpolated between edges."""
        first = self.edges[0]
        return np.asarray(np.interp(times - first, self.edges - first, values), np.float64)


def share_energy(trace: Trace, options: Options, pattern: str, placeholder: str) -> None:
    """Makes the table `energy`: microjoules of each device's kernels and copies, and of the idle device.

    Slices that run at once share it equally. Without power, there is no table. Slices get `energy_uj`, which is NaN
    where the power of their device was not known; `Measured` counts the others, and `Energy` is null without any.

    Args:
        trace: with tracks of power, or charge counters.
        options: the scale of the charge.
        pattern: a regular expression: its matches in names are replaced.
        placeholder: the replacement.
    """
    powers = device_powers(trace, options)
    if not powers:
        return
    running = np.flatnonzero(find(trace, Kind.DEVICE) & ~find(trace, Kind.PREPARATION))
    ran = trace.slices.take(running)
    names = trace.texts.replaced(ran.name, pattern, placeholder)
    rows = dict(_by_pid(ran.pid, np.arange(len(ran))))
    none = np.zeros(0, np.intp)
    tables = []
    of_slices = np.full(len(trace.slices), np.nan)
    for pid, power in sorted(powers.items()):
        own = rows.get(pid, none)
        found = _of_device(trace, pid, power, ran.take(own), names[own])
        if found is not None:
            table, joules = found
            tables.append(table)
            of_slices[running[own]] = joules * 1e6
    if tables:
        trace.tables[TABLE] = pa.concat_tables(tables)
        trace.slices.extra[OF_SLICES] = of_slices


def summed(tables: Sequence[pa.Table]) -> pa.Table:
    """Adds up the tables `energy` of several traces, by rank and name."""
    every = pa.concat_tables(tables)
    every = every.append_column("is_idle", pc.equal(every["Calls"], 0))  # a kernel may be called [idle], too
    found = every.group_by(["pid", "is_idle", "Name"], use_threads=False).aggregate(
        [("Energy", "sum"), ("Calls", "sum"), ("Measured", "sum")]
    )
    found = found.sort_by([("pid", "ascending"), ("is_idle", "ascending"), ("Energy_sum", "descending")])
    names = ("pid", "Energy_sum", "Calls_sum", "Measured_sum")
    pid, energy, calls, measured = (found[name].to_numpy() for name in names)
    return _table(pid, energy, Groups(pid), calls, measured, found["Name"])


def _table(
    pid: _Ints, energy: _Floats, ranks: Groups, calls: _Ints, measured: _Ints, names: pa.Array | pa.ChunkedArray
) -> pa.Table:
    """Returns the table `energy` of microjoules, NaN where they are not known."""
    columns = {
        "Energy Percent": 100 * energy / ranks.sum(np.nan_to_num(energy))[ranks.numbers],
        "Energy": energy,
        "Calls": calls,
        "Measured": measured,
        "Mean Energy": energy / np.maximum(measured, 1),
    }
    return pa.table(
        {"pid": pid} | {name: pa.array(each, from_pandas=True) for name, each in columns.items()}
    ).append_column("Name", names)


def device_powers(trace: Trace, options: Options) -> dict[int, DevicePower]:
    """Returns the power of each device by pid: from its charge counters, or from counters of watts in the trace."""
    charged = mean_power(trace, options)
    good = np.flatnonzero(~np.isnan(charged.watts))
    found = {
        pid: DevicePower(charged.start[rows], charged.end[rows], charged.watts[rows])
        for pid, rows in _by_pid(charged.pid[good], good)
    }
    points = trace.points.take(trace.texts.matches(trace.points.series, OF_POWER))
    usable = np.isfinite(points.value) & (points.value >= 0) & (np.abs(points.time) < FARTHEST)
    points = points.take(usable & placed_points(trace, points))
    for pid, rows in _by_pid(points.pid, np.arange(len(points))):
        mine = points.take(rows)
        one = (mine.name == mine.name[0]) & (mine.series == mine.series[0])
        mine = mine.take(one)  # one track: other tracks are components of it, or the same again
        unit = UNITS[trace.texts[int(mine.series[0])] or ""]
        mine = mine.take(np.argsort(mine.time, kind="stable"))
        if pid not in found and len(mine) > 1:
            found[pid] = DevicePower(mine.time[:-1], mine.time[1:], mine.value[:-1] * unit)
    return found


def _by_pid(pids: _Ints, rows: NDArray[np.intp]) -> Iterator[tuple[int, NDArray[np.intp]]]:
    """Yields each pid with its rows, in their order."""
    distinct = np.unique(pids)
    yield from zip(distinct.tolist(), (rows[places] for places in rows_of(pids, distinct)), strict=True)


def _of_device(
    trace: Trace, pid: int, power: DevicePower, ran: Slices, names: NDArray[np.int32]
) -> tuple[pa.Table, _Floats] | None:
    """Returns the table of a device, and the joules of its slices; None if it used nothing, or impossibly much."""
    starts, until = np.clip(ran.start, -FARTHEST, FARTHEST), ends(ran)
    spent = Spent.of(power, starts, until)
    total = spent.total
    if not 0 < total <= MOST_J:
        return None
    energy = spent.of_slices(starts, until)
    groups = Groups(names)
    joules = np.append(groups.sum(np.nan_to_num(energy)), spent.idle[-1])
    whole = whole_parts(np.maximum(joules, 0), round(total * NJ_PER_J))
    order = np.append(np.argsort(-whole[:-1], kind="stable"), len(groups))
    calls = np.append(groups.counts, 0)
    measured = np.append(groups.sum((~np.isnan(energy)).astype(np.int64)), 0)
    is_known = np.append(measured[:-1] > 0, spent.idle_known)
    called = [*trace.texts.taken(groups.key(names)).to_pylist(), IDLE]
    pids = np.full(len(whole), pid)
    microjoules = np.where(is_known, whole / 1000, np.nan)[order]
    text = pa.array([called[at] for at in order.tolist()], pa.string())
    return _table(pids, microjoules, Groups(pids), calls[order], measured[order], text), energy
