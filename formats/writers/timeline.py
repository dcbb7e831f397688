"""Counters by interval and launches in rows, for formats that show time lines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from iaprof.basics.clean import clean
from iaprof.formats.export import Executions, Export, Launches, OperatorSlices, Track
from iaprof.formats.profile import UNKNOWN_PROCESS, Launch, reason_name

_LATEST_S = 4e9  # limits times: their ns, added to those of time 0, fit into 63 bits
_READ_S = 0.01  # a launch may follow the begin of the read in which its first samples come
_SHORTEST_S = 1e-6  # makes single launches visible; runs in a row are farther apart than this


def nanoseconds(seconds: NDArray[np.float64] | Sequence[float]) -> NDArray[np.int64]:
    """Converts seconds since time 0 to ns."""
    return np.rint(np.clip(np.asarray(seconds, np.float64), -_LATEST_S, _LATEST_S) * 1e9).astype(np.int64)


@dataclass(frozen=True, eq=False)
class Intervals:
    """Counts by interval. Empty intervals are left out, except after others, where a viewer's curve returns to 0."""

    place: str  # the GPU; "" if there is only one
    seconds: NDArray[np.float64]  # [n], start of each interval, since time 0
    counts: NDArray[np.int64]  # [n, m]
    names: Sequence[str]  # [m], what is counted; reasons have the names that they have among other names


def stalls(export: Export) -> list[Intervals]:
    """Samples by reason, for each GPU that has any."""
    profile = export.profile if export.by_time is None else export.by_time
    counts = profile.counts.astype(np.int64)
    names = [reason_name(reason) for reason in profile.reasons]
    found = []
    for number, device in enumerate(profile.devices):
        own = profile.device == number
        if own.any():
            place = device if len(profile.devices) > 1 else ""
            found.append(_by_interval(export, place, profile.interval[own], counts[own], names))
    return found or [_by_interval(export, "", profile.interval, counts, names)]


def cpu_samples(export: Export) -> Intervals | None:
    """CPU samples (m = 1); None if there are none."""
    cpu = export.cpu
    if cpu is None or not len(cpu.count):
        return None
    return _by_interval(export, "", cpu.interval, cpu.count.reshape(-1, 1), ("samples",))


def _by_interval(
    export: Export, place: str, interval: NDArray[np.int64], counts: NDArray[np.int64], names: Sequence[str]
) -> Intervals:
    numbers = np.unique(np.concatenate([interval, interval + 1]))
    found = np.zeros((len(numbers), counts.shape[1]), np.int64)
    np.add.at(found, np.searchsorted(numbers, interval), counts)
    return Intervals(place, numbers * export.interval_s, found, names)


def per_interval(export: Export, what: str) -> str:
    """The title of a counter: `stalls per 0.1 s`."""
    return f"{what} per {export.interval_s:g} s" if export.interval_s else what


def unit(metric: str) -> tuple[str, str]:
    """Splits a metric's name into its name and its unit, in the usual notation."""
    name, _, end = metric.rpartition("-")
    return (name, {"percent": "%", "C": "°C"}.get(end, end)) if name else (metric, "")


@dataclass(frozen=True, eq=False)
class Rows:
    """Runs, each at least 1 us long, in rows by thread and kernel.

    A thread's runs of different kernels may overlap, those of a row do not.
    """

    rows: Sequence[tuple[int, int]]  # indexes into Launches.threads and Launches.kernels
    row: NDArray[np.int64]  # [n], index into rows
    begins: NDArray[np.float64]  # [n], seconds
    ends: NDArray[np.float64]  # [n], seconds
    counts: NDArray[np.int64]  # [n]
    names: Sequence[str]  # [n]
    order: NDArray[np.int64]  # [n], their numbers in Launches


def in_rows(launches: Launches) -> Rows:
    """Puts launches in rows."""
    order = np.lexsort((launches.begin, launches.kernel, launches.thread))
    thread, kernel, begin, count = (getattr(launches, name)[order] for name in ("thread", "kernel", "begin", "count"))
    is_first = (np.diff(thread, prepend=-1) != 0) | (np.diff(kernel, prepend=-1) != 0)
    kernels = [clean(name) for name in launches.kernels]
    names = [run_name(kernels[of], runs) for of, runs in zip(kernel.tolist(), count.tolist(), strict=True)]
    rows = [*zip(thread[is_first].tolist(), kernel[is_first].tolist(), strict=True)]
    ends = np.maximum(launches.end[order], begin + _SHORTEST_S)
    return Rows(rows, np.cumsum(is_first) - 1, begin, ends, count, names, order)


def launch_runs_of(executions: Executions, launches: Launches) -> NDArray[np.int64]:
    """The run of launches from which each run of samples came: int64[n], -1 if none is known.

    It is the last one of the same kernel by the same process that began before the samples were seen, or else the
    first one while they were. None begins after its run of samples ends.
    """
    if not len(launches.begin):
        return np.full(len(executions.track), -1)
    pairs, pair_of = np.unique(launches.thread * len(launches.kernels) + launches.kernel, return_inverse=True)
    numbers: dict[tuple[str, int, str], int] = {}
    number_of = []
    for thread, kernel in (divmod(pair, len(launches.kernels)) for pair in pairs.tolist()):
        key = launches.threads[thread].host, launches.threads[thread].pid, launches.kernels[kernel]
        number_of.append(numbers.setdefault(key, len(numbers)))
    own = np.array(number_of, np.int64)[pair_of]
    wanted = [
        numbers.get((each.launch.host, each.launch.pid, each.kernel), -1) if each.launch else -1
        for each in executions.tracks
    ]
    of = np.array(wanted, np.int64)[executions.track]
    begins, rank = np.unique(launches.begin, return_inverse=True)
    order = np.lexsort((rank, own))
    sorted_keys = (own * (len(begins) + 1) + rank)[order]

    # How many launches, of this order, began before a time, for each run of samples.
    after = np.searchsorted(
        sorted_keys,
        of * (len(begins) + 1)
        + np.searchsorted(begins, np.minimum(executions.begin + _READ_S, executions.end), side="right"),
    )

    def checked(at: NDArray[np.int64]) -> NDArray[np.int64]:
        found = order[np.clip(at, 0, len(order) - 1)]
        there = (at >= 0) & (at < len(order)) & (own[found] == of) & (launches.begin[found] <= executions.end)
        return np.where(there, found, -1)

    before = checked(after - 1)
    return np.where(before >= 0, before, checked(after))


def times_of(
    executions: Executions, launches: Launches | None, sources: NDArray[np.int64] | None
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The begins and ends of runs of samples, in seconds.

    A run begins with its first read, but not before the launches that it came from: viewers drop a flow that leads
    back in time. It ends with its last read, and at least 1 us after its begin.

    Args:
        executions: the runs.
        launches: runs of launches; None: unknown.
        sources: the run of launches from which each run of samples came, -1 if none is known; None: of none.
    """
    begin = executions.begin
    if launches is not None and sources is not None and len(launches.begin):
        begin = np.where(sources >= 0, np.maximum(begin, launches.begin[sources]), begin)
    return begin, np.maximum(executions.end, begin + _SHORTEST_S)


def process_text(launch: Launch | None) -> str:
    """The process of a launch: name, number and host as far as known."""
    words = (launch.comm, str(launch.pid or ""), launch.host) if launch else (UNKNOWN_PROCESS,)
    return clean(" ".join(word for word in words if word))


def kernels_title(track: Track) -> str:
    """The name of what a track is in: the GPU, and where it is known, the process and queue of its launches."""
    of = f", {process_text(track.launch)}, queue 0x{track.queue:x}" if track.queue else ""
    return clean(f"GPU kernels {track.device}".strip()) + of


def queue_text(track: Track) -> str:
    """The queue of a track's launches, as an argument."""
    return f"0x{track.queue:x}" if track.queue else "unknown, or several"


@dataclass(frozen=True, eq=False)
class Lane:
    """Operators of one thread and depth, which do not overlap."""

    thread: int  # index into OperatorSlices.threads
    depth: int
    rows: NDArray[np.int64]  # [n], of the slices, by time


def lanes(operators: OperatorSlices) -> Iterator[Lane]:
    """Operators in lanes, by thread and depth."""
    order = np.lexsort((operators.begin, operators.depth, operators.thread))
    thread, depth = operators.thread[order], operators.depth[order]
    first = np.flatnonzero((np.diff(thread, prepend=-1) != 0) | (np.diff(depth, prepend=-1) != 0))
    for start, stop in pairwise([*first.tolist(), len(order)]):
        yield Lane(int(thread[start]), int(depth[start]), order[start:stop])


def lanes_title(operators: OperatorSlices) -> str:
    """The title of their track: how many are shown if it is not all."""
    shown = len(operators.name)
    return "operators" if shown == operators.all else f"operators, the {shown:,} longest of {operators.all:,}"


def run_name(kernel: str, count: int) -> str:
    """The title of a run."""
    return kernel if count == 1 else f"{kernel} ×{count:,}"  # noqa: RUF001 (it is the sign of multiplication)
