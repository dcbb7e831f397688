"""Markers and counters of the Firefox Profiler's format: when kernels were launched and seen, waits, and metrics.

Fields are those of src/types/profile.ts and markers.ts of firefox-devtools/profiler.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from iaprof.basics.clean import clean
from iaprof.formats.export import Executions, Export, Launches, Series
from iaprof.formats.profile import UNKNOWN_PROCESS, Launch, StackOptions
from iaprof.formats.stacks.frames import StackTexts
from iaprof.formats.writers.timeline import run_name, unit

Process = tuple[str, str, int]
"""Host, name and pid."""
_INTERVAL = 1  # the phase of markers with a begin and an end
_DISPLAY = ["marker-chart", "marker-table", "timeline-overview"]


def _schema(name: str, label: str, description: str, fields: Sequence[tuple[str, str, str]]) -> dict[str, Any]:
    return {
        "name": name,
        "tooltipLabel": label,
        "tableLabel": "{marker.data.kernel}",
        "chartLabel": "{marker.data.kernel}",
        "description": description,
        "display": _DISPLAY,
        "fields": [{"key": key, "label": title, "format": format_} for key, title, format_ in fields],
    }


SCHEMAS = [
    _schema(
        "Execution",
        "on the GPU: {marker.data.kernel}",
        "From the first to the last of successive reads with samples of a kernel that one stack launched.",
        (
            ("kernel", "Kernel", "unique-string"),
            ("samples", "Samples", "integer"),
            ("gpu", "GPU", "unique-string"),
            ("stack", "Launched by", "unique-string"),
        ),
    ),
    _schema(
        "Launches",
        "launches: {marker.data.kernel}",
        "Launches of a kernel by a thread that closely follow each other.",
        (("kernel", "Kernel", "unique-string"), ("count", "Launches", "integer"), ("thread", "Thread", "tid")),
    ),
    _schema(
        "Waits",
        "waits: {marker.data.kernel}",
        "A thread that waits for the GPU.",
        (("kernel", "Function", "unique-string"), ("count", "Waits", "integer"), ("thread", "Thread", "tid")),
    ),
]


class Markers:
    """The markers of each process."""

    def __init__(self, string: Callable[[str], int], category: int) -> None:
        """Starts without markers.

        Args:
            string: returns the index of a text.
            category: of all markers.
        """
        self._string = string
        self._category = category
        self._rows: dict[Process, list[tuple[float, float, int, dict[str, Any]]]] = {}

    def add(self, export: Export, options: StackOptions) -> None:
        """Adds the runs of an export."""
        if export.executions is not None:
            self._executions(export.executions, options)
        for runs, type_ in ((export.launches, "Launches"), (export.waits, "Waits")):
            if runs is not None:
                self._runs(runs, type_)

    def processes(self) -> list[Process]:
        """Returns those that have any."""
        return list(self._rows)

    def table(self, process: Process) -> dict[str, Any]:
        """Returns the markers of a process, by their begin."""
        rows = sorted(self._rows.pop(process, []), key=lambda row: row[:3])
        return {
            "data": [row[3] for row in rows],
            "name": [row[2] for row in rows],
            "startTime": [round(row[0] * 1e3, 6) for row in rows],
            "endTime": [round(row[1] * 1e3, 6) for row in rows],
            "phase": [_INTERVAL] * len(rows),
            "category": [self._category] * len(rows),
            "length": len(rows),
        }

    def _executions(self, executions: Executions, options: StackOptions) -> None:
        stacks = StackTexts(options)
        shared = [
            {
                "type": "Execution",
                "kernel": self._string(each.kernel),
                "gpu": self._string(each.device),
                "stack": self._string(stacks.of(each.launch)),
            }
            for each in executions.tracks
        ]
        rows = [self._rows.setdefault(process_key(each.launch), []) for each in executions.tracks]
        columns = (executions.track, executions.begin, executions.end, executions.count)
        for track, begin, end, count in zip(*(column.tolist() for column in columns), strict=True):
            rows[track].append((begin, end, shared[track]["kernel"], {**shared[track], "samples": count}))

    def _runs(self, runs: Launches, type_: str) -> None:
        names = [self._string(name) for name in runs.kernels]
        rows = [self._rows.setdefault((each.host, each.comm or UNKNOWN_PROCESS, each.pid), []) for each in runs.threads]
        columns = (runs.thread, runs.kernel, runs.begin, runs.end, runs.count)
        for thread, kernel, begin, end, count in zip(*(column.tolist() for column in columns), strict=True):
            name = self._string(run_name(runs.kernels[kernel], count))
            data = {"type": type_, "kernel": names[kernel], "count": count, "thread": runs.threads[thread].tid}
            rows[thread].append((begin, end, name, data))


def process_key(launch: Launch | None) -> Process:
    """Returns the process of a launch."""
    return (launch.host, launch.comm or UNKNOWN_PROCESS, launch.pid) if launch else ("", UNKNOWN_PROCESS, 0)


def counters(series: Sequence[Series], pid: str) -> list[dict[str, Any]]:
    """Returns the metrics as counters, which the profiler draws as lines.

    Args:
        series: the metrics.
        pid: of the first thread, to which they are attached, as a counter needs a process.
    """
    return [_counter(each, pid, weight) for weight, each in enumerate(series)]


def _counter(series: Series, pid: str, weight: int) -> dict[str, Any]:
    name, of = unit(series.name)
    finite = np.isfinite(series.seconds) & np.isfinite(series.values)
    label = clean(f"{name.replace('-', ' ')} {series.place}".strip()) + (f", {clean(of)}" if of else "")
    value = {"type": "value", "source": "accumulated", "format": {"unit": "number"}, "label": clean(of) or "value"}
    return {
        "name": label,
        "category": "metric",
        "description": label,
        "pid": pid,
        "mainThreadIndex": 0,
        "samples": {
            "time": (series.seconds[finite] * 1e3).round(6).tolist(),
            # The profiler adds up what a counter changes by.
            "count": np.diff(series.values[finite], prepend=0.0).round(9).tolist(),
            "length": int(finite.sum()),
        },
        "display": {
            "graphType": "line-accumulated",
            "unit": "",
            "color": "blue",
            "markerSchemaLocation": None,
            "sortWeight": 50 + weight,
            "label": label,
            "tooltipRows": [value],
        },
    }
