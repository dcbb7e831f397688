"""The data of the page's other panels as JSON, of bounded size however much was recorded.

Names are untrusted: they are cleaned here, and the page sets them as text only. Of many hosts, several share a row of
their heat map: those next to each other by name, with numbers in names as numbers.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from iaprof.basics.clean import clean
from iaprof.formats.energy import NJ_PER_J
from iaprof.formats.export import About, Export, Launches, OperatorSlices, Series
from iaprof.formats.host_times import HostTimes
from iaprof.formats.page.data import kernels_of_rows, shown_name
from iaprof.formats.profile import Profile
from iaprof.formats.writers.timeline import unit

_MOST_HOST_ROWS = 250
_LONGEST_HOST = 80  # characters of a name

_MOST_THREADS = 4
_MOST_SLICES = 3_000  # of a thread: three for each unit of the drawing's width
_DEEPEST = 12  # lanes


def host_map(times: HostTimes, most_rows: int = _MOST_HOST_ROWS) -> dict[str, Any] | None:
    """Returns the data of the heat map; None if it is of no capture known when it ran.

    Cells come as runs: those of a row, one after the other, each as the way from the one before, and its samples.

    Args:
        times: samples by host and time.
        most_rows: how many rows there may be.
    """
    if not len(times.host):
        return None
    known, host = np.unique(times.host, return_inverse=True)
    names = [times.hosts[number] for number in known.tolist()]
    order = sorted(range(len(names)), key=lambda number: _natural(names[number]))
    each = -(-len(names) // most_rows)  # hosts of a row
    row_of = np.empty(len(names), np.int64)
    row_of[order] = np.arange(len(names)) // each
    first = int(times.column.min())
    columns = int(times.column.max()) - first + 1
    cells, at = np.unique(row_of[host] * columns + times.column - first, return_inverse=True)
    samples = np.zeros(len(cells), np.int64)
    np.add.at(samples, at, times.samples)
    rows = [order[begin : begin + each] for begin in range(0, len(order), each)]
    return {
        "begin": first * times.width,
        "width": times.width,
        "columns": columns,
        "rows": [{"first": _short(names[row[0]]), "last": _short(names[row[-1]]), "hosts": len(row)} for row in rows],
        "steps": np.diff(cells, prepend=0).tolist(),
        "samples": samples.tolist(),
        "timeless": times.timeless,
    }


def _natural(name: str) -> list[tuple[int, int | str]]:
    """Returns a key that sorts node-2 before node-10."""
    parts = re.findall(r"[0-9]{1,18}|[^0-9]+", name)
    return [(0, int(part)) if part.isdecimal() else (1, part) for part in parts]


def _short(name: str) -> str:
    text = clean(name)
    return text if len(text) <= _LONGEST_HOST else f"{text[: _LONGEST_HOST - 1]}…"


def operators(found: OperatorSlices) -> dict[str, Any]:
    """Returns names, and for each thread its slices: begins, lengths, depths, numbers of names."""
    outermost = found.depth == 0
    busy = np.bincount(found.thread[outermost], (found.end - found.begin)[outermost], len(found.threads))
    busiest = [number for number in np.argsort(-busy, kind="stable").tolist() if busy[number]][:_MOST_THREADS]
    names: dict[str, int] = {}
    threads = []
    for number in busiest:
        own = np.flatnonzero((found.thread == number) & (found.depth < _DEEPEST))
        longest = own[np.argsort((found.begin - found.end)[own], kind="stable")[:_MOST_SLICES]]
        shown = longest[np.lexsort((found.depth[longest], found.begin[longest]))]
        thread = found.threads[number]
        threads.append(
            {
                "name": clean(f"{thread.host} {thread.comm} {thread.tid}").strip(),
                "all": int((found.thread == number).sum()),
                "begins": np.round(found.begin[shown], 9).tolist(),
                "lengths": np.round((found.end - found.begin)[shown], 9).tolist(),
                "depths": found.depth[shown].tolist(),
                "names": [
                    names.setdefault(clean(found.names[name]), len(names)) for name in found.name[shown].tolist()
                ],
            }
        )
    return {"threads": threads, "names": list(names)}


_MOST_KERNELS = 500  # rows of the table
_MOST_SERIES = 64
_MOST_POINTS = 2_000  # per series: two per pixel of a wide screen
_BINS = 400  # of launches over time
_MOST_ROWS = 8  # kernels in the chart of launches; the others share a row
_Ints = NDArray[np.int64]
_Floats = NDArray[np.float64]


def panels(export: Export) -> dict[str, Any]:
    """The panels' data.

    Args:
        export: with everything in HtmlPage.needs.
    """
    seconds = _seconds(export)
    return {
        "about": about_data(export.about),
        "kernels": _kernels(export),
        "series": [found for each in export.series[:_MOST_SERIES] if (found := _series(each))],
        "launches": _launches(export.launches, seconds) if export.launches is not None else None,
        "waits": _waits(export.waits, seconds) if export.waits is not None else None,
        "operators": operators(export.operators) if export.operators is not None else None,
        "hosts": host_map(export.hosts) if export.hosts is not None else None,
        "listings": [_listing(each, export.profile.reasons) for each in export.listings],
        "seconds": seconds,
    }


def _seconds(export: Export) -> float:
    """The length of the time line."""
    times = [each.seconds for each in export.series]
    if export.launches is not None:
        times.append(export.launches.end)
    if export.waits is not None:
        times.append(export.waits.end)
    ends = [export.about.seconds, *(float(each.max()) for each in times if len(each))]
    return max(end for end in ends if math.isfinite(end))


def about_data(about: About) -> dict[str, Any]:
    """The description of a capture, in clean texts."""
    return {
        "title": clean(about.title),
        "host": clean(about.host),
        "command": clean(about.command),
        "gpus": clean(about.gpus),
        "begun": about.begun,
        "seconds": about.seconds,
        "facts": [
            {"heading": clean(heading), "facts": [[clean(name), clean(text)] for name, text in facts]}
            for heading, facts in about.facts
        ],
        "headline": [clean(text) for text in about.headline],
        "warnings": [clean(text) for text in about.warnings],
    }


def _kernels(export: Export) -> dict[str, Any]:
    """The kernels with the most samples, by name, and the sum over all others."""
    profile = export.profile
    names, row_of = kernels_of_rows(profile)
    counts = np.zeros((len(names), len(profile.reasons)), np.int64)
    np.add.at(counts, row_of, profile.counts.astype(np.int64))
    samples = counts.sum(axis=1)
    energy = None
    if profile.energy is not None:
        energy = np.zeros(len(names), np.int64)
        np.add.at(energy, row_of, profile.energy)
    processes = _processes(profile, row_of, len(names))
    launches = [0] * len(names)
    files = [""] * len(names)
    stalled, first = np.unique(profile.kernel, return_index=True)
    for kernel, number in zip(stalled.tolist(), row_of[first].tolist(), strict=True):
        if (known := profile.kernels[kernel]) is not None:
            launches[number] += profile.launch_counts.get(kernel, 0)
            files[number] = files[number] or clean(known.file)
    listings: dict[str, list[int]] = {}
    for index, listing in enumerate(export.listings):
        listings.setdefault(shown_name(listing["kernel"]), []).append(index)
    order = [index for index in np.argsort(-samples, kind="stable").tolist() if samples[index]]
    shown, others = order[:_MOST_KERNELS], order[_MOST_KERNELS:]
    return {
        "rows": [
            {
                "name": names[index],
                "file": files[index],
                "counts": counts[index].tolist(),
                "launches": launches[index] if profile.launch_counts else None,
                "processes": int(processes[index]),
                **({} if energy is None else {"joules": int(energy[index]) / NJ_PER_J}),
                "listings": listings.get(names[index], []),
            }
            for index in shown
        ],
        "others": {
            "kernels": len(others),
            "counts": counts[others].sum(axis=0).tolist(),
            **({} if energy is None else {"joules": int(energy[others].sum()) / NJ_PER_J}),
        },
        "samples": int(samples.sum()),
    }


def _processes(profile: Profile, row_of: _Ints, kernels: int) -> _Ints:
    """The number of processes with stalls in each kernel: int64[kernels]."""
    of = {key: at for at, key in enumerate(dict.fromkeys((each.host, each.pid) for each in profile.launches if each))}
    process = np.array([of[each.host, each.pid] if each else -1 for each in profile.launches], np.int64)
    pairs = np.unique(row_of * (len(of) + 1) + process[profile.launch] + 1)
    kernel, known = np.divmod(pairs, len(of) + 1)
    return np.bincount(kernel[known > 0], minlength=kernels)


def _series(series: Series) -> dict[str, Any] | None:
    """A metric, reduced to the minimum and maximum of each bucket of time; None if it has no finite values."""
    finite = np.isfinite(series.seconds) & np.isfinite(series.values)
    seconds, values = series.seconds[finite], series.values[finite]
    if not len(values):
        return None
    name, of = unit(series.name)
    kept = _extremes(values, _MOST_POINTS)
    return {
        "name": clean(name).replace("-", " "),
        "unit": clean(of),
        "place": clean(series.place),
        "low": float(values.min()),
        "high": float(values.max()),
        "mean": float(values.mean()),
        "values": len(values),
        "x": np.round(seconds[kept], 4).tolist(),
        "y": [float(f"{value:.6g}") for value in values[kept].tolist()],
    }


def _extremes(values: _Floats, most: int) -> _Ints:
    """Ascending indices of at most `most` values: the minimum and maximum of each of equal buckets."""
    if len(values) <= most:
        return np.arange(len(values))
    bucket = np.arange(len(values)) * (most // 2) // len(values)
    order = np.lexsort((values, bucket))
    begins = np.searchsorted(bucket, np.arange(most // 2))
    ends = np.searchsorted(bucket, np.arange(most // 2), "right") - 1
    return np.unique(np.concatenate([order[begins], order[ends]]))


def _launches(launches: Launches, seconds: float) -> dict[str, Any]:
    """Launches of the busiest kernels in _BINS equal spans of time."""
    totals = np.bincount(launches.kernel, launches.count, len(launches.kernels)).astype(np.int64)
    busiest = [index for index in np.argsort(-totals, kind="stable").tolist() if totals[index]]
    row_of = np.full(len(launches.kernels), _MOST_ROWS)
    row_of[busiest[:_MOST_ROWS]] = np.arange(min(len(busiest), _MOST_ROWS))
    row = row_of[launches.kernel]
    edges = np.linspace(0, seconds, _BINS + 1)
    found = [(clean(launches.kernels[index]), number) for number, index in enumerate(busiest[:_MOST_ROWS])]
    if len(busiest) > _MOST_ROWS:
        found.append((f"{len(busiest) - _MOST_ROWS:,} others", _MOST_ROWS))
    rows = [
        {
            "name": name,
            "other": number == _MOST_ROWS,
            "counts": spread(
                launches.begin[row == number], launches.end[row == number], launches.count[row == number], edges
            ).tolist(),
        }
        for name, number in found
    ]
    return {"step": seconds / _BINS, "rows": rows, "launches": int(totals.sum()), "gap": launches.gap}


def _waits(waits: Launches, seconds: float) -> dict[str, Any]:
    """Microseconds of waiting per function in _BINS equal spans of time."""
    edges = np.linspace(0, seconds, _BINS + 1)
    us = np.rint((waits.end - waits.begin) * 1e6).astype(np.int64)
    totals = np.bincount(waits.kernel, us, len(waits.kernels))
    rows = []
    for number in np.argsort(-totals, kind="stable")[:_MOST_ROWS].tolist():
        own = waits.kernel == number
        found = spread(waits.begin[own], waits.end[own], us[own], edges)
        rows.append({"name": clean(waits.kernels[number]), "us": found.tolist()})
    return {"step": seconds / _BINS, "rows": rows}


def spread(begin: _Floats, end: _Floats, count: _Ints, edges: _Floats) -> _Ints:
    """Counts launches per span of time, spreading a run's launches evenly over it; the sum is exact.

    Args:
        begin: float64[n], seconds, of each run.
        end: float64[n], seconds, not before `begin`.
        count: int64[n], launches of the run.
        edges: float64[m + 1], ascending: the spans' limits. Launches beyond them count in the first or last span.
    """
    begin, end = np.clip(begin, edges[0], edges[-1]), np.clip(end, edges[0], edges[-1])
    length = end - begin
    at_once = length <= 0
    # Launches up to time t: the sum of rate * (t - begin) over the runs that have begun, less those that have ended.
    rate = np.where(at_once, 0, count / np.where(at_once, 1, length))
    so_far = _ramps(begin, rate, edges) - _ramps(end, rate, edges)
    found = np.diff(np.rint(so_far)).astype(np.int64)
    spans = len(edges) - 1
    found += np.bincount(_span_of(begin[at_once], edges), count[at_once], spans).astype(np.int64)
    # Rounding errors go to the span with the most launches, so that the sum is exact.
    found[int(np.argmax(found))] += int(count.sum()) - int(found.sum())
    return found


def _span_of(moments: _Floats, edges: _Floats) -> _Ints:
    return np.clip(np.searchsorted(edges, moments, "right") - 1, 0, len(edges) - 2)


def _ramps(begin: _Floats, rate: _Floats, moments: _Floats) -> _Floats:
    """The sum of rate * (t - begin) over all runs that began before t, for each t in `moments`."""
    order = np.argsort(begin, kind="stable")
    rates = np.concatenate([[0.0], np.cumsum(rate[order])])
    products = np.concatenate([[0.0], np.cumsum((rate * begin)[order])])
    begun = np.searchsorted(begin[order], moments)
    so_far: _Floats = rates[begun] * moments - products[begun]
    return so_far


def _listing(kernel: dict[str, Any], reasons: Sequence[str]) -> dict[str, Any]:
    """A kernel's annotated instructions for the page: distinct source places once, reasons by index."""
    places: dict[Any, int] = {}
    rows = []
    for row in kernel["instructions"]:
        frames = tuple((frame["function"], frame["file"], frame["line"]) for frame in row["frames"])
        rows.append(
            [
                row["offset"],
                clean(row["text"] or row["mnemonic"]),
                [[reasons.index(reason), count] for reason, count in row["reasons"].items()],
                [[wait["what"], list(wait["for"])] for wait in row["waits"]],
                places.setdefault((frames, row["source"]), len(places)),
            ]
        )
    return {
        "kernel": shown_name(kernel["kernel"]),
        "file": clean(kernel["file"]),
        "samples": kernel["samples"],
        "simd": kernel["simd"],
        "leftOut": kernel.get("left_out", 0),
        "rows": rows,
        "places": [_place(frames, source) for frames, source in places],
    }


def _place(frames: Sequence[tuple[str, str, int]], source: str | None) -> dict[str, Any]:
    return {
        "functions": [clean(function) for function, _, _ in frames],
        "file": clean(frames[-1][1]),
        "line": frames[-1][2],
        "source": clean(source) if source is not None else None,
    }
