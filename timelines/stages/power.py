"""Power, from the charge counters that kernels and copies carry.

The charge is read together with the counter TS4. The increase between two samples gives the mean power, which is a
point of the track at the earlier sample. power_ts3 does the same with TS3, and with cycles instead of microseconds.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from iaprof.timelines.device_clock import counter_time
from iaprof.timelines.dialects import Kind, find
from iaprof.timelines.grouped import rows_of
from iaprof.timelines.intervals import Union, ends
from iaprof.timelines.made_events import Track, add_points
from iaprof.timelines.options import CounterTrack, Options
from iaprof.timelines.placeholders import placed
from iaprof.timelines.trace import ABSENT, Power, Slices, Trace

STAGE = "PEC"
TRACK = Track("Power", "Watts", "Power4")
SHORTEST_NS = 100  # of a slice whose charge counts
MOST_WATTS = 100  # W: an AIU cannot draw more
LEAST_WATTS = 1  # W: an AIU draws more even when idle
SCALES = (12 / 512, 12 / 512 * 5.37 / 1000)
"""Watts per unit of charge per us, of the known versions of the runtime (IBM's AIU Trace Analyzer)."""
_ROUNDED = 1 + 1e-5  # a scale that is shown
CHARGE_MODULUS = 1 << 32
TS3, TS4 = 2, 3
_OF_SAMPLES = ("file", "pid", "name", "start", "duration", "counters", "power")

# The kind of a sample's slice, by its name; the first pattern that is found counts.
SAMPLES = (("DmaI", "DmaI"), ("DmaO", "DmaO"), ("AllGather", "AllGather"), ("AllReduce", "AllReduce"))
KERNEL, OTHER = "Cmpt Exec", "Other"


@dataclass(frozen=True)
class Intervals:
    """Intervals between samples of charge, in n rows: by pid and time."""

    file: NDArray[np.int32]
    pid: NDArray[np.int64]
    name: NDArray[np.int32]  # of the slice at its start
    start: NDArray[np.int64]  # ns
    end: NDArray[np.int64]  # ns
    charge: NDArray[np.int64]
    cycles: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.start)


def compute_power(trace: Trace, options: Options) -> None:
    """Adds the tracks of power that the options ask for."""
    if CounterTrack.POWER_TS4 in options.tracks:
        _add_by_ts4(trace, options)
    if CounterTrack.POWER_TS3 in options.tracks:
        _add_by_ts3(trace, options)


def mean_power(trace: Trace, options: Options) -> Power:
    """Returns the power between samples at TS4. It is computed for the first stage that asks, and kept for others."""
    if trace.power is None:
        found = _intervals(trace, options, TS4)
        rates = found.charge * 1000 / (found.end - found.start)
        watts = options.power_scale * rates
        watts = np.where(watts > MOST_WATTS, np.nan, watts)
        _warn_of_impossible(trace, rates, np.isnan(watts))
        trace.power = Power(found.file, found.pid, found.start, found.end, watts)
    return trace.power


def _warn_of_impossible(trace: Trace, rates: NDArray[np.float64], bad: NDArray[np.bool_]) -> None:
    """Warns of power that the device cannot draw, and suggests a scale if most values are such.

    Args:
        trace: gets the message.
        rates: float64[n], units of charge a us.
        bad: bool[n], with the scale that was given.
    """
    count = int(bad.sum())
    if not count:
        return
    if 2 * count <= len(bad):
        sentence = f"{count} of {len(bad)} values of power are above {MOST_WATTS} W and left out"
        trace.messages.warn(STAGE, f"{sentence}; is --power-scale right?")
        return
    scale = _fitting_scale(rates)
    shown = float(f"{scale:.6g}")
    watts = np.sort(rates[rates * shown <= MOST_WATTS * _ROUNDED] * shown)
    which = "All" if count == len(bad) else str(count)
    trace.messages.warn(
        STAGE,
        f"{which} of {len(bad)} values of power are above {MOST_WATTS} W, which the device cannot draw, and left out:"
        f" --power-scale={shown:g} gives {watts[0]:.1f} to {watts[-1]:.1f} W",
    )


def _fitting_scale(rates: NDArray[np.float64]) -> float:
    """Returns a known scale with which nine in ten values are power that the device can draw.

    If there is none, returns one with which they reach the most that it can draw: the true scale is at most that.
    """
    high = float(np.quantile(rates, 0.9))
    for scale in SCALES:
        if scale * float(np.median(rates)) >= LEAST_WATTS and scale * high <= MOST_WATTS:
            return scale
    return MOST_WATTS / high


def _add_by_ts4(trace: Trace, options: Options) -> None:
    found = mean_power(trace, options)
    good = ~np.isnan(found.watts)
    # The last interval of a pid also ends with a point, to show how long its power lasted.
    last = np.append(found.pid[1:] != found.pid[:-1], True)[: len(found)] & good
    rows = np.concatenate([np.flatnonzero(good), np.flatnonzero(last)])
    times = np.concatenate([found.start[good], found.end[last]])
    order = np.lexsort((times, found.pid[rows]))
    rows, times = rows[order], times[order]
    add_points(trace, TRACK, found.file[rows], found.pid[rows], times, found.watts[rows])


def _add_by_ts3(trace: Trace, options: Options) -> None:
    found = _intervals(trace, options, TS3)
    good = found.cycles > 0
    if bad := int((~good).sum()):
        trace.messages.warn(STAGE, f"{bad} of {len(found)} values of power span no cycles and are left out")
    power = np.round(found.charge / np.maximum(found.cycles, 1), 3)
    for kind, rows in _by_kind(trace, found.name, good):
        times = np.concatenate([found.start[rows], found.end[rows] - 1])
        values = np.concatenate([power[rows], np.zeros(len(rows))])
        both = np.concatenate([rows, rows])
        order = np.lexsort((times, found.pid[both]))
        both = both[order]
        track = Track(f"Power {kind}", "Watts", "Power3")
        add_points(trace, track, found.file[both], found.pid[both], times[order], values[order])


def _by_kind(trace: Trace, names: NDArray[np.int32], good: NDArray[np.bool_]) -> list[tuple[str, NDArray[np.int64]]]:
    left, found = good.copy(), []
    for kind, pattern in (*SAMPLES, (KERNEL, KERNEL), (OTHER, "")):
        of_kind = left & trace.texts.matches(names, pattern)
        left &= ~of_kind
        found.append((kind, np.flatnonzero(of_kind)))
    return found


def _intervals(trace: Trace, options: Options, counter: int) -> Intervals:
    """Returns the intervals between samples of charge, which are taken when a counter (its index) is read."""
    samples, times = _samples(trace, options, counter)
    next_ = np.flatnonzero(samples.pid[1:] == samples.pid[:-1]) + 1
    this = next_ - 1
    cycles = samples.counter(counter)
    return Intervals(
        samples.file[this],
        samples.pid[this],
        samples.name[this],
        times[this],
        times[next_],
        (samples.power[next_] - samples.power[this]) % CHARGE_MODULUS,
        cycles[next_] - cycles[this],
    )


def _samples(trace: Trace, options: Options, counter: int) -> tuple[Slices, NDArray[np.int64]]:
    """Returns the slices whose charge counts, and when it was read, by pid and time; each time once."""
    slices = trace.slices
    have = (slices.power != ABSENT) & (slices.power != 0) & ~trace.texts.matches(slices.name, " Prep") & placed(trace)
    if counter == TS4:
        have &= slices.duration > SHORTEST_NS
    samples = slices.take(have, _OF_SAMPLES)
    times = counter_time(trace.texts, samples, counter, options.soc_mhz)
    order = np.lexsort((samples.start, times, samples.pid))
    order = order[times[order] != ABSENT]
    samples, times = samples.take(order), times[order]
    first = np.append(True, (times[1:] != times[:-1]) | (samples.pid[1:] != samples.pid[:-1]))[: len(times)]
    if options.power_of_first:
        samples, times = samples.take(first), times[first]
        first = _not_after_kernel(trace, samples)
    return samples.take(first), times[first]


def _not_after_kernel(trace: Trace, samples: Slices) -> NDArray[np.bool_]:
    """Tells which samples stay: no kernel after a kernel, and no DmaI after a DmaO or a kernel that stayed."""
    is_kernel = trace.texts.matches(samples.name, KERNEL)
    is_in = trace.texts.matches(samples.name, " DmaI") & ~is_kernel
    is_out = trace.texts.matches(samples.name, " DmaO") & ~is_kernel & ~is_in
    # Samples that are neither kernels nor DmaI stay, and begin a run. In a run, nothing after the first kernel stays.
    new_pid = np.append(True, samples.pid[1:] != samples.pid[:-1])[: len(samples)]
    opens = new_pid | ~(is_kernel | is_in)
    run = np.cumsum(opens) - 1
    heads = np.flatnonzero(opens)
    kernels: NDArray[np.int64] = np.cumsum(is_kernel) - is_kernel  # before each sample
    after_kernel: NDArray[np.bool_] = kernels > kernels[heads][run]
    after_out = is_out[heads][run] & ~opens
    return np.asarray(opens | ~(after_kernel | (is_in & after_out)), bool)


def analyze_power_statistics(trace: Trace, options: Options) -> None:
    """Makes the table `power_stats`: each rank's power while kernels ran and while none did, weighted by time."""
    found = mean_power(trace, options)
    good = ~np.isnan(found.watts)
    kernels = trace.slices.take(find(trace, Kind.KERNEL))
    rows = []
    pids = np.unique(found.pid)
    of_pids = zip(pids.tolist(), rows_of(found.pid, pids), rows_of(kernels.pid, pids), strict=True)
    for pid, all_of_pid, its_kernels in of_pids:
        of_pid = all_of_pid[good[all_of_pid]]
        mine = kernels.take(its_kernels)
        busy = Union.of(mine.start, ends(mine)).within(found.start[of_pid], found.end[of_pid])
        idle = found.end[of_pid] - found.start[of_pid] - busy
        for scenario, durations in (("with kernels", busy), ("without kernels", idle)):
            rows.append({"pid": pid, "Scenario": scenario} | _statistics(durations / 1000, found.watts[of_pid]))
    if rows:
        trace.tables["power_stats"] = pa.Table.from_pylist(rows, _STATISTICS)
    else:
        trace.messages.warn(STAGE, "there are fewer than two samples of power, so no statistics of it")


_STATISTICS = pa.schema(
    [("pid", pa.int64()), ("Scenario", pa.string()),
     *((name, pa.float64()) for name in ("min_non_zero", "max", "mean_non_zero", "median_non_zero", "avg_total",
                                         "dur_total", "dur_non_zero"))]
)  # fmt: skip
"""Watts, null where no power is known, and us."""


def _statistics(durations: NDArray[np.float64], power: NDArray[np.float64]) -> dict[str, float | None]:
    """Returns statistics of power that held for durations in us; None where there is none."""
    some = durations > 0
    durations, power = durations[some], power[some]
    drawn = power > 0
    order = np.argsort(power[drawn], kind="stable")
    values, weights = power[drawn][order], durations[drawn][order]
    energy, total, spent = float((durations * power).sum()), float(durations.sum()), float(weights.sum())
    middle = int(np.searchsorted(np.cumsum(weights), spent / 2))
    return {
        "min_non_zero": float(values[0]) if len(values) else None,
        "max": float(power.max()) if len(power) else None,
        "mean_non_zero": energy / spent if spent else None,
        "median_non_zero": float(values[min(middle, len(values) - 1)]) if len(values) else None,
        "avg_total": energy / total if total else None,
        "dur_total": total,
        "dur_non_zero": spent,
    }
