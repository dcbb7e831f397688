"""Trace Event Format (JSON): launches as slices of threads; stalls, CPU samples and metrics as counters.

The format is that of the document "Trace Event Format" (Chromium): events with a phase `ph` and times in microseconds.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterator
from typing import IO, Any

from iaprof.basics.clean import clean
from iaprof.formats.export import Executions, Export, Launches, OperatorSlices, Thread
from iaprof.formats.profile import StackOptions
from iaprof.formats.stacks.frames import StackTexts
from iaprof.formats.writers.writer import Needs, Writer

_COUNTERS = 1 << 22  # pid of the counters' process; no process has it (Linux's PID_MAX_LIMIT)

Event = dict[str, Any]


class Chrome(Writer):
    """The format of chrome://tracing, which Perfetto and others read, too."""

    interval_s = 0.1
    needs = Needs.TIME | Needs.CPU | Needs.SERIES | Needs.LAUNCHES
    has_stacks = False

    def write(self, export: Export, options: StackOptions, out: IO[str]) -> None:
        """Writes the document event by event."""
        about = export.about
        other_data = {"command": about.command, "host": about.host, "gpus": about.gpus, "begun": about.begun}
        out.write(f'{{"displayTimeUnit": "ms",\n"otherData": {json.dumps(other_data)},\n"traceEvents": [')
        separator = "\n"
        for event in _once(_events(export, options)):
            out.write(separator + json.dumps(event))
            separator = ",\n"
        out.write("\n]}\n")


def _once(events: Iterator[Event]) -> Iterator[Event]:
    """Leaves out what was said before of a process or a thread: only the first event of each kind counts."""
    said = set()
    for event in events:
        if event["ph"] == "M":
            about = event["name"], event["pid"], event["tid"]
            if about in said:
                continue
            said.add(about)
        yield event


def _events(export: Export, options: StackOptions) -> Iterator[Event]:
    # Imported here, so that the registry of formats loads without NumPy.
    from iaprof.formats.writers.timeline import cpu_samples, per_interval, stalls, unit

    yield _about("process_name", _COUNTERS, 0, name="GPU")
    yield _about("process_sort_index", _COUNTERS, 0, sort_index=-1)
    for found in stalls(export):
        name = per_interval(export, f"GPU samples {found.place}".strip())
        for second, counts in zip(found.seconds.tolist(), found.counts.tolist(), strict=True):
            yield _counter(name, second, {"samples": sum(counts)})
            yield _counter(f"{name}, by reason", second, dict(zip(found.names, counts, strict=True)))
    for series in export.series:
        name, of = unit(series.name)
        for second, value in zip(series.seconds.tolist(), series.values.tolist(), strict=True):
            yield _counter(f"{name} {series.place}".strip(), second, {of: value})
    cpu = cpu_samples(export)
    if cpu is not None:
        for second, (count,) in zip(cpu.seconds.tolist(), cpu.counts.tolist(), strict=True):
            yield _counter(per_interval(export, "CPU samples"), second, {"samples": count})
    numbers = _Numbers(), _Numbers()
    if export.executions is not None:
        yield from _executions(export.executions, export.launches, options, *numbers)
    if export.operators is not None:
        yield from _operators(export.operators, *numbers)
    if export.launches is not None:
        yield from _runs(export.launches, "launches", *numbers)
    if export.waits is not None:
        yield from _runs(export.waits, "waits", *numbers)


def _runs(launches: Launches, what: str, pids: _Numbers, tids: _Numbers) -> Iterator[Event]:
    from iaprof.formats.writers.timeline import rows, run_name

    for order, row in enumerate(rows(launches)):
        thread, kernel = launches.threads[row.thread], clean(launches.kernels[row.kernel])
        pid = pids.of((thread.host, thread.pid), thread.pid)
        yield _about("process_name", pid, 0, name=_process(thread))
        # Slices of a thread must not overlap, but runs of different kernels may: each kernel gets a thread of its own.
        tid = tids.of((what, row.thread, row.kernel), thread.tid)
        yield _about("thread_name", pid, tid, name=clean(f"{thread.comm} {thread.tid}: {kernel}"))
        yield _about("thread_sort_index", pid, tid, sort_index=order)
        for begin, end, count in zip(row.begins, row.ends, row.counts, strict=True):
            time = _microseconds(begin)
            yield {
                "ph": "X",
                "name": run_name(kernel, count),
                "cat": what,
                "pid": pid,
                "tid": tid,
                "ts": time,
                "dur": round(_microseconds(end) - time, 3),
                "args": {what: count},
            }


def _executions(
    executions: Executions, launches: Launches | None, options: StackOptions, pids: _Numbers, tids: _Numbers
) -> Iterator[Event]:
    """When kernels were seen: a thread for each stack that launches one, and flows from its launches.

    A GPU is a process, and so is each of its queues that is known (perfetto.py).
    """
    from iaprof.formats.writers.timeline import (
        kernels_title,
        launch_runs_of,
        process_text,
        queue_text,
        times_of,
    )

    known, stacks = [], StackTexts(options)
    for number, track in enumerate(executions.tracks):
        title = kernels_title(track)
        pid = pids.of(("GPU", title), 0)
        tid = tids.of(("GPU", number), 0)
        kernel, process = clean(track.kernel), process_text(track.launch)
        known.append(
            (
                {"name": kernel, "cat": "gpu", "pid": pid, "tid": tid},
                {"process": process, "queue": queue_text(track), "stack": stacks.of(track.launch)},
            )
        )
        yield _about("process_name", pid, 0, name=title)
        yield _about("process_sort_index", pid, 0, sort_index=-1)
        yield _about("thread_name", pid, tid, name=f"{kernel}, launched by {process}")
    sources = None if launches is None else launch_runs_of(executions, launches)
    columns = (executions.track, *times_of(executions, launches, sources), executions.count)
    of = [-1] * len(executions.track) if sources is None else sources.tolist()
    for flow, (source, number, begin, end, count) in enumerate(
        zip(of, *(column.tolist() for column in columns), strict=True)
    ):
        same, more = known[number]
        time = _microseconds(begin)
        args = {"samples": count, **more}
        yield {**same, "ph": "X", "ts": time, "dur": round(_microseconds(end) - time, 3), "args": args}
        if source >= 0 and launches is not None:
            thread, kernel_of = int(launches.thread[source]), int(launches.kernel[source])
            by = launches.threads[thread]
            pid = pids.of((by.host, by.pid), by.pid)
            tid = tids.of(("launches", thread, kernel_of), by.tid)
            flow_ = {"name": "launch", "cat": "launches", "id": flow}
            yield {**flow_, "ph": "s", "pid": pid, "tid": tid, "ts": _microseconds(float(launches.begin[source]))}
            yield {**flow_, "ph": "f", "bp": "e", "pid": same["pid"], "tid": same["tid"], "ts": time}


def _operators(operators: OperatorSlices, pids: _Numbers, tids: _Numbers) -> Iterator[Event]:
    """Operators of a thread are a thread of its own, above those of its launches, in which slices nest."""
    from iaprof.formats.writers.timeline import lanes, lanes_title

    announced = set()
    for lane in lanes(operators):
        thread = operators.threads[lane.thread]
        pid = pids.of((thread.host, thread.pid), thread.pid)
        tid = tids.of(("operators", lane.thread), thread.tid)
        if tid not in announced:
            announced.add(tid)
            yield _about("process_name", pid, 0, name=_process(thread))
            title = clean(f"{thread.comm} {thread.tid}".strip())
            yield _about("thread_name", pid, tid, name=f"{title}: {lanes_title(operators)}")
            yield _about("thread_sort_index", pid, tid, sort_index=-1)
        columns = (operators.begin[lane.rows], operators.end[lane.rows], operators.name[lane.rows])
        for begin, end, name in zip(*(column.tolist() for column in columns), strict=True):
            time = _microseconds(begin)
            event = {"ph": "X", "name": clean(operators.names[name]), "cat": "operator", "pid": pid, "tid": tid}
            yield {**event, "ts": time, "dur": round(_microseconds(end) - time, 3)}


def _process(thread: Thread) -> str:
    return clean(" ".join(word for word in (thread.host, thread.comm) if word))


class _Numbers:
    """Unique numbers for processes or threads: their pid or tid if it is free, or else a number that no process has."""

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}
        self._used: set[int] = set()
        self._next = _COUNTERS + 1

    def of(self, key: Hashable, own: int) -> int:
        """The number for a key; `own` is its pid or tid."""
        if key not in self._numbers:
            if own in self._used or not 0 < own < _COUNTERS:
                own, self._next = self._next, self._next + 1
            self._used.add(own)
            self._numbers[key] = own
        return self._numbers[key]


def _about(what: str, pid: int, tid: int, **args: str | int) -> Event:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": args}


def _counter(name: str, second: float, values: dict[str, float]) -> Event:
    return {"ph": "C", "name": clean(name), "pid": _COUNTERS, "tid": 0, "ts": _microseconds(second), "args": values}


def _microseconds(second: float) -> float:
    return round(second * 1e6, 3)
