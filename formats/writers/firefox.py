"""The Firefox Profiler's processed profile format (https://profiler.firefox.com), as JSON.

Version 63, of 2026, as docs-developer/CHANGELOG-formats.md and src/types/ (profile.ts, markers.ts) of
firefox-devtools/profiler describe it; the profiler upgrades older versions. Each process has a thread for stalls and
one for CPU samples; all threads share the tables of stacks, frames and functions. Markers and counters show when
kernels were launched and seen, waits, and metrics.

The profiler draws a thread's CPU use over time. Here it is the number of samples in an interval relative to the busiest
interval of any process. Within an interval, each stack lasts for its share of the samples.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from iaprof import __version__
from iaprof.basics.clean import clean
from iaprof.formats.distinct import distinct_rows, sum_groups
from iaprof.formats.export import About, CpuSamples, Executions, Export, Launches, Series
from iaprof.formats.profile import UNKNOWN_PROCESS, CodeKind, Launch, Profile, StackOptions, reason_name
from iaprof.formats.stacks.frames import UNKNOWN_FRAME, Frame, StackTexts
from iaprof.formats.stacks.trees import Tree, stalls_by_time, viewer_tree, without_components, without_offsets
from iaprof.formats.writers.timeline import run_name, unit
from iaprof.formats.writers.writer import Needs, Writer

Process = tuple[str, str, int]
"""Host, name and pid."""
_INTERVAL = 1  # the phase of markers with a begin and an end
_DISPLAY = ["marker-chart", "marker-table", "timeline-overview"]

_VERSION = 63
_GECKO_VERSION = 34  # current at that time; nothing here depends on it
_COLORS = {  # the profiler's nearest colours to formats/stacks/flame_layout.py; it uses grey for "no category"
    CodeKind.UNKNOWN: "grey",
    CodeKind.PROCESS: "darkgrey",
    CodeKind.CPP: "lightblue",
    CodeKind.C: "blue",
    CodeKind.PYTHON: "yellow",
    CodeKind.JIT: "green",
    CodeKind.KERNEL: "purple",
    CodeKind.SOURCE: "orange",
    CodeKind.INSTRUCTION: "red",
}
_CATEGORY = {kind: number for number, kind in enumerate(_COLORS)}
_LIBRARY = 1  # the profiler's number for this type of resource
_FULL = 1e9  # "CPU" units per ms in the busiest interval, enough to resolve the shortest stack
_STALLS = "GPU samples"
_MEMBERS_AT_ONCE = 1000
_OF_PROCESSES = ("host", "process", "pid")
_Ints = NDArray[np.int64]
_NONE = np.empty(0, np.int64)


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


class Firefox(Writer):
    """Stalls and CPU samples over time, as tracks of each process."""

    needs = Needs.TIME | Needs.CPU | Needs.SERIES | Needs.LAUNCHES | Needs.ABOUT
    interval_s = 0.05  # shorter intervals enlarge the file, and a screen shows some hundred

    def write(self, export: Export, options: StackOptions, out: IO[str]) -> None:
        """Writes the threads of stalls and CPU samples, or of CPU samples only."""
        length_s = export.interval_s or export.about.seconds or 1.0
        sources: list[tuple[str, Profile | CpuSamples, StackOptions]] = []
        if not options.cpu_samples:
            sources.append((_STALLS, *stalls_by_time(export, without_offsets(options))))
        if export.cpu is not None:
            sources.append(("CPU samples", export.cpu, options))
        reasons = [reason_name(reason) for reason in export.profile.reasons]
        tables = _Tables(reasons if "reason" in options.components else ())
        threads = []
        for name, source, its_options in sources:
            tree = viewer_tree(source, without_components(its_options, _OF_PROCESSES), _key)
            threads += _threads(name, tree, tables.stacks(tree), length_s * 1e3)
        _add_markers(threads, export, options, tables)
        _sort_threads(threads)
        pid = threads[0]["pid"] if threads else ""
        _write_json(
            {
                "meta": _meta(export.about, reasons, length_s * 1e3) | _initial_view(threads),
                "libs": tables.libs,
                "shared": tables.shared(),
                "threads": threads,
                "counters": counters(export.series, pid) if threads else [],
            },
            out,
        )
        out.write("\n")


def _write_json(value: Any, out: IO[str]) -> None:
    """Writes JSON, the members of lists by the thousand: `json.dump` runs Python for each number.

    Lists may be arrays of indices, int64[n]; -1 becomes null.
    """
    if isinstance(value, np.ndarray):
        out.write("[")
        for first in range(0, len(value), _MEMBERS_AT_ONCE):
            members = [None if each < 0 else each for each in value[first : first + _MEMBERS_AT_ONCE].tolist()]
            out.write((", " if first else "") + json.dumps(members)[1:-1])
        out.write("]")
    elif not value or not isinstance(value, (dict, list)):
        out.write(json.dumps(value))
    elif isinstance(value, dict):
        for number, (name, member) in enumerate(value.items()):
            out.write(f"{', ' if number else '{'}{json.dumps(name)}: ")
            _write_json(member, out)
        out.write("}")
    else:
        for first in range(0, len(value), _MEMBERS_AT_ONCE):
            out.write((", " if first else "[") + json.dumps(value[first : first + _MEMBERS_AT_ONCE])[1:-1])
        out.write("]")


def _add_markers(threads: list[dict[str, Any]], export: Export, options: StackOptions, tables: _Tables) -> None:
    """Adds markers to the threads of GPU samples, and threads for processes that have only markers."""
    markers = Markers(tables.string, _CATEGORY[CodeKind.SOURCE])
    if not options.cpu_samples:
        markers.add(export, options)
    known = {thread["pid"]: thread for thread in threads if thread["name"] == _STALLS}
    for process in markers.processes():
        thread = _thread(_STALLS, process, {"stack": [], "time": [], "weight": [], "weightType": "samples",
                                            "threadCPUDelta": [], "length": 0})  # fmt: skip
        if thread["pid"] not in known:
            known[thread["pid"]] = thread
            threads.append(thread)
        merged = markers.table(process)
        into = known[thread["pid"]]["markers"]
        for name, column in merged.items():
            into[name] += column


def _sort_threads(threads: list[dict[str, Any]]) -> None:
    """Sorts threads: processes with the most stalls first, and in a process the thread of stalls first."""
    most: dict[str, tuple[int, int]] = {}
    for thread in threads:
        of_gpu = thread["name"] == _STALLS
        mine = of_gpu, sum(thread["samples"]["weight"])
        most[thread["pid"]] = max(most.get(thread["pid"], (False, 0)), mine)
    threads.sort(key=lambda thread: (most[thread["pid"]], thread["pid"], thread["name"] == _STALLS), reverse=True)
    seen = set()
    for thread in threads:
        thread["isMainThread"] = thread["pid"] not in seen
        seen.add(thread["pid"])


def _initial_view(threads: list[dict[str, Any]]) -> dict[str, Any]:
    """The initially visible tracks: those of processes with stalls; if there are none, the profiler chooses."""
    stalled = {thread["pid"] for thread in threads if thread["name"] == _STALLS}
    visible = [number for number, thread in enumerate(threads) if thread["pid"] in stalled]
    return {"initialVisibleThreads": visible, "initialSelectedThreads": visible[:1]} if visible else {}


def _key(frame: Frame) -> tuple[str, CodeKind, str, str, int]:
    return frame.name, frame.kind, frame.module, frame.file, frame.line


def _meta(about: About, reasons: Sequence[str], interval_ms: float) -> dict[str, Any]:
    sections = [*about.facts, *([("Warnings", [("", text) for text in about.warnings])] if about.warnings else [])]
    return {
        "version": _GECKO_VERSION,
        "preprocessedProfileVersion": _VERSION,
        "interval": interval_ms,
        "startTime": about.begun * 1e3,
        "processType": 0,
        "product": "iaprof",
        "importedFrom": f"iaprof {__version__}",
        "stackwalk": 1,
        "symbolicated": True,
        "categories": [
            {
                "name": kind.value,
                "color": color,
                "subcategories": ["Other", *(reasons if kind is CodeKind.INSTRUCTION else ())],
            }
            for kind, color in _COLORS.items()
        ],
        "markerSchema": SCHEMAS,
        "sampleUnits": {"time": "ms", "eventDelay": "ms", "threadCPUDelta": "variable CPU cycles"},
        "usesOnlyOneStackType": True,
        "sourceCodeIsNotOnSearchfox": True,
        "keepProfileThreadOrder": True,
        "extra": [
            {
                "label": heading,
                "entries": [{"label": name or heading, "format": "string", "value": text} for name, text in group],
            }
            for heading, group in sections
        ],
    }


class _Tables:
    """The tables that threads share: strings, libraries, files, functions, frames and stacks."""

    def __init__(self, reasons: Sequence[str]) -> None:
        """Starts with empty tables; `reasons`: names of stall reasons that are frames."""
        self._reasons = reasons
        self._strings: dict[str, int] = {}
        self.libs: list[dict[str, Any]] = []
        self._resources: dict[str, int] = {}
        self._sources: dict[str, int] = {}
        self._functions: dict[tuple[str, CodeKind, str, str], int] = {}
        self._frames: list[tuple[int, int | None, int, int | None]] = []  # function, category, subcategory, line
        self._parents: list[_Ints] = []  # of each tree; -1 for none
        self._frame_of: list[_Ints] = []
        self._stacks = 0

    def stacks(self, tree: Tree) -> int:
        """Adds the stacks of a tree; returns the (virtual) stack index of its root."""
        first_frame, root = len(self._frames), self._stacks - 1
        self._frames += [self._frame(frame) for frame in tree.frames]
        self._frame_of.append(tree.frame[1:] + first_frame)
        self._parents.append(np.where(tree.parent[1:] > 0, root + tree.parent[1:], -1))
        self._stacks += len(tree.parent) - 1
        return root

    def string(self, text: str) -> int:
        return self._strings.setdefault(clean(text), len(self._strings))

    def _frame(self, frame: Frame) -> tuple[int, int | None, int, int | None]:
        function = self._functions.setdefault(_key(frame)[:-1], len(self._functions))
        category: int | None = _CATEGORY[frame.kind]
        subcategory = 0
        if frame.kind is CodeKind.INSTRUCTION and self._reasons:
            if frame.name in self._reasons:
                subcategory = self._reasons.index(frame.name) + 1
            elif frame.name.startswith("0x"):
                category = None  # inherits the category of the reason above it
        return function, category, subcategory, frame.line or None

    def _resource(self, kind: CodeKind, module: str) -> int:
        name = "GPU" if kind in (CodeKind.SOURCE, CodeKind.INSTRUCTION) else module
        if name and name not in self._resources:
            self._resources[name] = len(self._resources)
            path, file = clean(name), clean(os.path.basename(name))
            self.libs.append(
                {"arch": "", "name": file, "path": path, "debugName": file, "debugPath": path}
                | {"breakpadId": "", "codeId": None}
            )
        return self._resources.get(name, -1)

    def _source(self, file: str) -> int | None:
        return self._sources.setdefault(file, len(self._sources)) if file else None

    def shared(self) -> dict[str, Any]:
        """The tables, as columns."""
        functions = [
            (self.string(name or UNKNOWN_FRAME), self._resource(kind, module), self._source(file))
            for name, kind, module, file in self._functions
        ]
        function, category, subcategory, line = ([frame[column] for frame in self._frames] for column in range(4))
        many, few, files = len(self._frames), len(functions), len(self._sources)
        return {
            "stackTable": {
                "frame": np.concatenate([_NONE, *self._frame_of]),
                "prefix": np.concatenate([_NONE, *self._parents]),
                "length": self._stacks,
            },
            "frameTable": {
                "address": [-1] * many,
                "inlineDepth": [0] * many,
                "category": category,
                "subcategory": subcategory,
                "func": function,
                "nativeSymbol": [None] * many,
                "innerWindowID": [None] * many,
                "line": line,
                "column": [None] * many,
                "length": many,
            },
            "funcTable": {
                "name": [name for name, _, _ in functions],
                "isJS": [False] * few,
                "relevantForJS": [False] * few,
                "resource": [resource for _, resource, _ in functions],
                "source": [source for _, _, source in functions],
                "lineNumber": [None] * few,
                "columnNumber": [None] * few,
                "length": few,
            },
            "resourceTable": {
                "lib": list(range(len(self.libs))),
                "name": [self.string(lib["name"]) for lib in self.libs],
                "host": [None] * len(self.libs),
                "type": [_LIBRARY] * len(self.libs),
                "length": len(self.libs),
            },
            "nativeSymbols": {"libIndex": [], "address": [], "name": [], "functionSize": [], "length": 0},
            "sources": {
                "id": [None] * files,
                "filename": [self.string(file) for file in self._sources],
                "startLine": [1] * files,
                "startColumn": [1] * files,
                "sourceMapURL": [None] * files,
                "length": files,
            },
            "stringArray": list(self._strings),
        }


def _threads(name: str, tree: Tree, root: int, length_ms: float) -> list[dict[str, Any]]:
    """A thread for each process, with samples in order of time.

    Args:
        name: of the threads.
        tree: its rows are the samples.
        root: the result of `_Tables.stacks` for the tree.
        length_ms: length of an interval.
    """
    processes = list(dict.fromkeys(process_key(launch) for launch in tree.launches))
    index = {process: number for number, process in enumerate(processes)}
    process_of = np.array([index[process_key(launch)] for launch in tree.launches], np.int64)[tree.launch]
    first, number = distinct_rows(process_of, tree.interval, tree.node)
    process, interval, node = process_of[first], tree.interval[first], tree.node[first]
    weight = sum_groups(tree.count, number)
    time_ms, gap, rate = _divide_intervals(process, interval, weight, length_ms)
    # A sample without a stack ends each gap: otherwise the next sample would extend over the gap.
    process = np.insert(process, gap, process[gap])
    stack = np.insert(node + root, gap, -1)
    time_ms = np.insert(time_ms, gap, interval[gap] * length_ms).round(6)
    weight, rate = np.insert(weight, gap, 0), np.insert(rate, gap, 0.0)
    used = np.rint(rate * np.diff(time_ms, prepend=0.0) * _FULL).astype(np.int64)
    threads = []
    starts = np.flatnonzero(np.diff(process, prepend=-1))
    for start, end in pairwise([*starts.tolist(), len(process)]):
        rows = slice(start, end)
        samples = {
            "stack": [number if number >= 0 else None for number in stack[rows].tolist()],
            "time": time_ms[rows].tolist(),
            "weight": weight[rows].tolist(),
            "weightType": "samples",
            "threadCPUDelta": used[rows].tolist(),
            "length": end - start,
        }
        threads.append(_thread(name, processes[process[start]], samples))
    return threads


def _divide_intervals(
    process: _Ints, interval: _Ints, weight: _Ints, length_ms: float
) -> tuple[NDArray[Any], _Ints, NDArray[Any]]:
    """Divides intervals among their stacks in proportion to their weights.

    Args:
        process: int64[n], ascending.
        interval: int64[n], ascending within a process.
        weight: int64[n].
        length_ms: length of an interval.

    Returns:
        The ends of stacks, in ms [n]; indices of stacks that follow a gap [m]; the interval's samples relative to the
        maximum of all intervals [n].
    """
    starts = np.flatnonzero((np.diff(process, prepend=-1) != 0) | (np.diff(interval, prepend=-1) != 0))
    group = np.repeat(np.arange(len(starts)), np.diff(starts, append=len(process)))
    ends = np.cumsum(weight)
    before = (ends - weight)[starts]
    total = np.add.reduceat(weight, starts) if len(starts) else weight
    time_ms = (interval + (ends - before[group]) / total[group]) * length_ms
    follows = (np.diff(process[starts], prepend=-1) == 0) & (np.diff(interval[starts], prepend=-1) == 1)
    return time_ms, starts[~follows], (total / total.max(initial=1))[group]


def _thread(name: str, process: tuple[str, str, int], samples: dict[str, Any]) -> dict[str, Any]:
    host, comm, pid = process
    # The profiler groups threads by pid, which it treats as text: it need not be a number.
    return {
        "name": name,
        "processName": clean(f"{comm} on {host}" if host else comm),
        "processType": "default",
        "pid": clean(f"{pid} on {host}" if host else f"{pid}" if pid else comm),
        "tid": clean(f"{name} of {pid or comm} {host}".strip()),
        "processStartupTime": 0,
        "processShutdownTime": None,
        "registerTime": 0,
        "unregisterTime": None,
        "pausedRanges": [],
        "samples": samples,
        "markers": {
            "data": [],
            "name": [],
            "startTime": [],
            "endTime": [],
            "phase": [],
            "category": [],
            "length": 0,
        },
    }
