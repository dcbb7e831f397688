"""How often the device's 32-bit counters wrapped, and the device's frequency as measured by the host's clock."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from iaprof.basics.quantities import counted
from iaprof.timelines.dialects import windows
from iaprof.timelines.options import Options
from iaprof.timelines.placeholders import placed
from iaprof.timelines.stages.device_counters import WRAP, are_rising
from iaprof.timelines.trace import ABSENT, Slices, Trace

_TOLERANCE = 0.1
"""A frequency that differs from the given one by more (MHz), or a ratio by more, causes a warning."""
_WRONG_EPOCH = 0.2
"""If jobs' frequencies differ by more than this fraction of their mean, a counter was assigned to a wrong epoch."""
_UNSURE = 0.25
"""An epoch is unsure if host and device differ by more than this fraction of the time in which the counter wraps."""
_OF_DEVIATION = 1.2533 * 1.4826
"""The standard error of a median is this times the median distance from it, divided by the square root of the count."""
_MOST_EPOCHS = 1 << 29  # so that the counters fit in 63 bits


def normalize_phase2(trace: Trace, options: Options) -> None:
    """Adds the wraps of the counters since the first slice of a pid, keeps their number as `OVC`, and estimates MHz."""
    slices = trace.slices
    first, last = windows(trace.texts, slices.name)
    # Counters that are all 0 were never read.
    rows = np.flatnonzero(are_rising(slices) & (slices.counter(4) > 0) & placed(trace))
    if not len(rows):
        return
    reference = slices.counters_by(first)
    rows = rows[np.lexsort((rows, slices.start[rows], slices.pid[rows]))]
    begins = np.diff(slices.pid[rows], prepend=slices.pid[rows[0]] - 1) != 0
    epoch = _epochs(trace, slices.start[rows], reference[rows], begins, options.soc_mhz)
    _add_wraps(slices, rows, epoch)
    slices.extra["OVC"] = np.full(len(slices), ABSENT, np.int64)
    slices.extra["OVC"][rows] = epoch
    if long := int((slices.duration[rows] > WRAP * 1e3 / options.soc_mhz).sum()):
        text = f"Found {counted(long, 'slice')} longer than the counters need to wrap: wraps inside may be missing"
        trace.messages.warn("OVC", text)
    reference[rows] += epoch * WRAP
    kernels = rows[trace.texts.matches(slices.name[rows], "Cmpt Exec")]
    _recommend(trace, rows, kernels, reference, first * 5 + last, options.soc_mhz)
    _report_frequencies(trace, kernels, options.soc_mhz)


def _add_wraps(slices: Slices, rows: NDArray[np.intp], epoch: NDArray[np.int64]) -> None:
    """Adds the wraps of some slices to their counters."""
    if not epoch.any():
        return
    counters, of_slice = slices.distinct_counters()
    if of_slice is not None:
        of_distinct = np.zeros(len(counters), np.int64)
        of_distinct[of_slice[rows]] = epoch
        if (of_distinct[of_slice[rows]] == epoch).all():
            slices.set_distinct_counters(counters + (of_distinct * WRAP)[:, None])
            return
    counters = slices.counters.copy()
    counters[rows] += (epoch * WRAP)[:, None]
    slices.counters = counters


def _epochs(
    trace: Trace,
    start: NDArray[np.int64],
    reference: NDArray[np.int64],
    begins: NDArray[np.bool_],
    soc_mhz: float,
) -> NDArray[np.int64]:
    """Returns how often the counter wrapped since the first row of a pid.

    Each row is compared with the one before, so that the error of an inexact frequency does not add up.

    Args:
        trace: gets a warning of jumps that are unsure.
        start: int64[m], ns, by pid and time.
        reference: int64[m], cycles: the counter at `start`.
        begins: bool[m]: the first row of a pid.
        soc_mhz: the counter's frequency.
    """
    elapsed = np.diff(start, prepend=start[0]) * (soc_mhz / 1e3)
    wraps = np.where(begins, 0.0, (elapsed - np.diff(reference, prepend=reference[0])) / WRAP)
    steps = np.rint(wraps)
    if unsure := int((np.abs(wraps - steps) > _UNSURE).sum()):
        trace.messages.warn(
            "OVC", f"Guessed the wraps before {counted(unsure, 'slice')}: host and device differed by a lot"
        )
    total = np.cumsum(steps)
    pid = np.cumsum(begins) - 1
    return np.asarray(np.clip(total - total[begins][pid], -_MOST_EPOCHS, _MOST_EPOCHS), np.int64)


def _recommend(
    trace: Trace,
    rows: NDArray[np.intp],
    kernels: NDArray[np.intp],
    reference: NDArray[np.int64],
    window: NDArray[np.int8],
    soc_mhz: float,
) -> None:
    """Recommends a frequency if the one between jobs differs, and kernels' durations fit it better.

    Counters of the same kind are compared: of the first slices with the same window of two jobs of a pid. Jobs that are
    half of all jobs apart give longer, so more exact, spans than adjacent ones.

    Args:
        trace: gets the message.
        rows: intp[m]: slices with counters, by pid and time.
        kernels: intp[k]: the kernels among them.
        reference: int64[n], cycles: the counter at a slice's start.
        window: int8[n]: the kind of a slice's window.
        soc_mhz: the frequency that was given.
    """
    slices = trace.slices
    by_job = rows[np.lexsort((slices.start[rows], slices.file[rows], window[rows], slices.pid[rows]))]
    keys = np.stack([slices.pid[by_job], window[by_job], slices.file[by_job]])
    first = by_job[np.concatenate(([True], (np.diff(keys) != 0).any(0)))]
    first = first[np.lexsort((slices.start[first], window[first], slices.pid[first]))]
    bounds = np.flatnonzero((np.diff(np.stack([slices.pid[first], window[first]])) != 0).any(0)) + 1
    group = np.searchsorted(bounds, np.arange(len(first)), "right")
    sizes = np.bincount(group)
    earlier = np.flatnonzero(np.arange(len(first)) - np.concatenate(([0], bounds))[group] < (sizes - sizes // 2)[group])
    later = earlier + (sizes // 2)[group[earlier]]
    a, b = first[earlier], first[later]
    apart = (later > earlier) & (slices.start[b] > slices.start[a]) & (slices.file[b] != slices.file[a])
    a, b = a[apart], b[apart]
    if not len(a):
        return
    ns, cycles = slices.start[b] - slices.start[a], reference[b] - reference[a]
    frequencies = cycles * 1e3 / ns
    mhz = float(np.median(frequencies))
    least, most = float(frequencies.min()), float(frequencies.max())
    if most - least > _WRONG_EPOCH * abs(float(frequencies.mean())):
        trace.messages.warn(
            "FREQ",
            f"The frequency between jobs is from {least:.3f} to {most:.3f} MHz:"
            " some counters may be assigned to a wrong epoch",
        )
    elif abs(mhz - soc_mhz) > _TOLERANCE:
        drift = float(np.abs(cycles * 1e3 / soc_mhz - ns).max()) / 1e3
        text = f"Between jobs the device's clock drifts by up to {drift:.3f} us from the host's"
        measured, error = _measured_mhz(slices, kernels)
        if abs(mhz - measured) < abs(soc_mhz - measured) or abs(mhz - measured) <= error or np.isnan(measured):
            text += f": use --freq={mhz:.3f}"
        else:
            text += (
                f", as if it had {mhz:.3f} MHz, but by their durations kernels ran at {measured:.3f} MHz, to which"
                f" --freq={soc_mhz:g} is closer: keep it, and do not rely on the time between jobs"
            )
        trace.messages.warn("FREQ", text)


def _measured_mhz(slices: Slices, kernels: NDArray[np.intp]) -> tuple[float, float]:
    """Returns the frequency by the durations of kernels, and three standard errors of it; NaN without kernels.

    Both are of medians, as the host measures a few durations much too long.
    """
    cycles, ns = slices.counter(3)[kernels] - slices.counter(2)[kernels], slices.duration[kernels]
    mhz = cycles[(ns > 0) & (cycles > 0)] * 1e3 / ns[(ns > 0) & (cycles > 0)]
    if not len(mhz):
        return np.nan, np.nan
    middle = float(np.median(mhz))
    return middle, 3 * _OF_DEVIATION * float(np.median(np.abs(mhz - middle))) / len(mhz) ** 0.5


def _report_frequencies(trace: Trace, kernels: NDArray[np.intp], soc_mhz: float) -> None:
    """Reports at which frequencies kernels ran, by their durations and by the intervals between them.

    The mean is that of the means of pids. For the first kernel of a pid, a kernel at the same time as the one before,
    and one whose counter fell since, as after a reset, the frequency of the duration replaces that of the interval.
    """
    slices = trace.slices
    cycles = slices.counter(3)[kernels] - slices.counter(2)[kernels]
    measured = (slices.duration[kernels] > 0) & (cycles > 0)
    if left_out := int(len(measured) - measured.sum()):
        trace.messages.note("FREQ", f"Left out {counted(left_out, 'kernel')} without a duration or without cycles")
    kernels, cycles = kernels[measured], cycles[measured]
    if not len(kernels):
        return
    by_duration = cycles * 1e3 / slices.duration[kernels]
    pid = np.unique(slices.pid[kernels], return_inverse=True)[1]
    ns = np.diff(slices.start[kernels], prepend=slices.start[kernels[0]])
    steps = np.diff(slices.counter(2)[kernels], prepend=slices.counter(2)[kernels[0]])
    same_pid = np.diff(pid, prepend=-1) == 0
    if same_time := int((same_pid & (ns <= 0)).sum()):
        text = (
            f"Found {counted(same_time, 'kernel')} that started at the time of the one before, so without an interval"
        )
        trace.messages.warn("FREQ", text)
    by_interval = np.where(same_pid & (ns > 0) & (steps > 0), steps * 1e3 / np.maximum(ns, 1), by_duration)
    for kind, mhz in (("durations of", by_duration), ("intervals between", by_interval)):
        mean = float(np.mean(np.bincount(pid, mhz) / np.bincount(pid)))
        if mean == 0:
            continue
        spread, ratio = round(float(np.ptp(mhz)) / mean, 3), round(soc_mhz / mean, 3)
        text = (
            f"The {kind} kernels give {mhz.min():.2f}/{mean:.2f}/{mhz.max():.2f} MHz (min/mean/max);"
            f" rel_range={spread}, input_soc_freq/detected={ratio}"
        )
        odd = spread > _TOLERANCE or abs(1 - ratio) > _TOLERANCE
        (trace.messages.warn if odd else trace.messages.note)("FREQ", text)
