"""Stalls in Chrome's format: launches as slices of threads; stalls, CPU samples and metrics as counters."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import IO, Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from iaprof.basics.clean import clean
from iaprof.formats import chrome
from iaprof.formats.chrome import Member, member, numbers, quoted
from iaprof.formats.export import Executions, Export, Launches, OperatorSlices, Thread
from iaprof.formats.profile import StackOptions
from iaprof.formats.stacks.frames import StackTexts
from iaprof.formats.writers.timeline import (
    cpu_samples,
    in_rows,
    kernels_title,
    lanes,
    lanes_title,
    launch_runs_of,
    nanoseconds,
    per_interval,
    process_text,
    queue_text,
    stalls,
    times_of,
    unit,
)
from iaprof.formats.writers.writer import Needs, Writer

_COUNTERS = 1 << 22  # pid of the counters' process; no process has it (Linux's PID_MAX_LIMIT)


class Chrome(Writer):
    """The format of chrome://tracing, which Perfetto and others read, too."""

    interval_s = 0.1
    needs = Needs.TIME | Needs.CPU | Needs.SERIES | Needs.LAUNCHES | Needs.ABOUT
    binary = True
    has_stacks = False

    def write(self, export: Export, options: StackOptions, out: IO[bytes]) -> None:
        """Writes the document: what processes and threads are called, and then their events."""
        about, trace = export.about, _Trace()
        chunks = [*_counters(export)]
        launched = None
        if export.launches is not None:
            launched, slices = _runs(trace, export.launches, "launches")
            chunks += slices
        if export.executions is not None:
            chunks += _executions(trace, export.executions, export.launches, launched, options)
        if export.operators is not None:
            chunks += _operators(trace, export.operators)
        if export.waits is not None:
            chunks += _runs(trace, export.waits, "waits")[1]
        other_data = {"command": about.command, "host": about.host, "gpus": about.gpus, "begun": about.begun}
        chrome.write(out, {"displayTimeUnit": "ms", "otherData": other_data}, trace.said.values(), chunks)


def _counters(export: Export) -> Iterator[pa.StringArray]:
    for found in stalls(export):
        name = per_interval(export, f"GPU samples {found.place}".strip())
        yield from _counter(name, found.seconds, {"samples": found.counts.sum(axis=1)})
        yield from _counter(f"{name}, by reason", found.seconds, dict(zip(found.names, found.counts.T, strict=True)))
    for series in export.series:
        name, of = unit(series.name)
        yield from _counter(f"{name} {series.place}".strip(), series.seconds, {of: series.values})
    cpu = cpu_samples(export)
    if cpu is not None:
        yield from _counter(per_interval(export, "CPU samples"), cpu.seconds, {"samples": cpu.counts[:, 0]})


def _counter(name: str, seconds: NDArray[np.float64], values: dict[str, NDArray[Any]]) -> Iterator[pa.StringArray]:
    times = nanoseconds(seconds)
    names, on = _texts([clean(name)], np.zeros(len(times), np.int64)), np.tile([_COUNTERS, 0], (len(times), 1))

    def make(place: list[Member], part: slice) -> pa.StringArray:
        return chrome.counters(place, times[part], [member(each, numbers(of[part])) for each, of in values.items()])

    return _parts(names, "", on, make)


def _runs(trace: _Trace, launches: Launches, what: str) -> tuple[NDArray[np.int64], Iterator[pa.StringArray]]:
    """Returns the pid and the tid of each run, [n, 2], and the runs as slices.

    Slices of a thread must not overlap, but runs of different kernels may: each kernel gets a thread of its own.
    """
    found, places = in_rows(launches), np.zeros((len(launches.begin), 2), np.int64)
    of_rows = []
    for rank, (number, kernel) in enumerate(found.rows):
        thread = launches.threads[number]
        title = f"{thread.comm} {thread.tid}: {launches.kernels[kernel]}"
        of_rows.append(trace.thread(thread, (what, number, kernel), title, rank))
    places[found.order] = on = _places(of_rows)[found.row]
    names = quoted(pa.array(found.names, pa.string()))
    return places, _slices(names, what, on, (found.begins, found.ends), {what: numbers(found.counts)})


def _executions(
    trace: _Trace,
    executions: Executions,
    launches: Launches | None,
    launched: NDArray[np.int64] | None,
    options: StackOptions,
) -> Iterator[pa.StringArray]:
    """When kernels were seen: a thread for each stack that launches one, and flows from its launches.

    A GPU is a process, and so is each of its queues that is known (perfetto.py).
    """
    texts, of = StackTexts(options), executions.track
    places, kernels, processes, queues, stacks = [], [], [], [], []
    for number, track in enumerate(executions.tracks):
        title = kernels_title(track)
        places.append((trace.pids.of(("GPU", title), 0), trace.tids.of(("GPU", number), 0)))
        kernels.append(clean(track.kernel))
        processes.append(process_text(track.launch))
        queues.append(queue_text(track))
        stacks.append(texts.of(track.launch))
        trace.say("process_name", places[-1][0], name=title)
        trace.say("process_sort_index", places[-1][0], sort_index=-1)
        trace.say("thread_name", *places[-1], name=f"{kernels[-1]}, launched by {processes[-1]}")
    on = _places(places)[of]
    args = {"samples": numbers(executions.count)}
    args |= {name: _texts(each, of) for name, each in (("process", processes), ("queue", queues), ("stack", stacks))}
    sources = None if launches is None else launch_runs_of(executions, launches)
    begins, ends = times_of(executions, launches, sources)
    yield from _slices(_texts(kernels, of), "gpu", on, (begins, ends), args)
    if launches is not None and launched is not None and sources is not None:
        flows = np.flatnonzero(sources >= 0)
        yield from _flows("s", flows, launched[sources[flows]], launches.begin[sources[flows]])
        yield from _flows("f", flows, on[flows], begins[flows])


def _flows(
    phase: str, ids: NDArray[np.int64], on: NDArray[np.int64], seconds: NDArray[np.float64]
) -> Iterator[pa.StringArray]:
    times, same = nanoseconds(seconds), np.zeros(len(ids), np.int64)
    phases, binding = _texts([phase], same), _texts(["e"], same if phase == "f" else same - 1)

    def make(place: list[Member], part: slice) -> pa.StringArray:
        return chrome.marks(phases[part], place, times[part], ids[part], member("bp", binding[part]))

    return _parts(_texts(["launch"], same), "launches", on, make)


def _operators(trace: _Trace, operators: OperatorSlices) -> Iterator[pa.StringArray]:
    """Operators of a thread are a thread of its own, above those of its launches, in which slices nest."""
    names = [clean(name) for name in operators.names]
    for lane in lanes(operators):
        thread = operators.threads[lane.thread]
        title = f"{f'{thread.comm} {thread.tid}'.strip()}: {lanes_title(operators)}"
        place = trace.thread(thread, ("operators", lane.thread), title, -1)
        times = operators.begin[lane.rows], operators.end[lane.rows]
        of = operators.name[lane.rows]
        yield from _slices(_texts(names, of), "operator", np.tile(_places([place]), (len(of), 1)), times, {})


def _slices(
    names: chrome.Texts,
    category: str,
    on: NDArray[np.int64],
    seconds: tuple[NDArray[np.float64], NDArray[np.float64]],
    args: Mapping[str, chrome.Texts],
) -> Iterator[pa.StringArray]:
    """Returns slices.

    Args:
        names: JSON of n names.
        category: of all of them.
        on: int64[n, 2], pids and tids.
        seconds: float64[n] each, begins and ends.
        args: JSON of n values, by name.
    """
    begins, ends = map(nanoseconds, seconds)

    def make(place: list[Member], part: slice) -> pa.StringArray:
        members = [member(name, values[part]) for name, values in args.items()]
        return chrome.slices(place, begins[part], (ends - begins)[part], members)

    return _parts(names, category, on, make)


def _places(places: Sequence[tuple[int, int]]) -> NDArray[np.int64]:
    return np.array(places, np.int64).reshape(-1, 2)


def _parts(
    names: chrome.Texts, category: str, on: NDArray[np.int64], make: Callable[[list[Member], slice], pa.StringArray]
) -> Iterator[pa.StringArray]:
    """Returns what `make` makes of some events at a time, for which it gets what all events have."""
    for start in range(0, len(names), chrome.MOST_ROWS):
        part = slice(start, start + chrome.MOST_ROWS)
        kinds = _texts([category], np.zeros(len(names[part]), np.int64)) if category else None
        yield make(chrome.place(names[part], kinds, *map(numbers, on[part].T)), part)


def _texts(texts: Sequence[str], codes: NDArray[np.int64]) -> pa.DictionaryArray:
    """Returns texts by their codes, as JSON; null for -1."""
    return pa.DictionaryArray.from_arrays(pa.array(codes, mask=codes < 0), quoted(pa.array(texts, pa.string())))


class _Trace:
    """What is said of processes and threads."""

    def __init__(self) -> None:
        self.said: dict[tuple[str, int, int], dict[str, Any]] = {}
        self.pids, self.tids = _Numbers(), _Numbers()
        self.say("process_name", _COUNTERS, name="GPU")
        self.say("process_sort_index", _COUNTERS, sort_index=-1)

    def say(self, what: str, pid: int, tid: int = 0, **args: str | int) -> None:
        """Says something of a process or a thread; only the first event of each kind counts."""
        self.said.setdefault((what, pid, tid), {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": args})

    def thread(self, thread: Thread, key: Hashable, title: str, rank: int) -> tuple[int, int]:
        """Returns the pid and the tid of what is shown of a thread, and says what these are called."""
        pid, tid = self.pids.of((thread.host, thread.pid), thread.pid), self.tids.of(key, thread.tid)
        self.say("process_name", pid, name=clean(" ".join(word for word in (thread.host, thread.comm) if word)))
        self.say("thread_name", pid, tid, name=clean(title))
        self.say("thread_sort_index", pid, tid, sort_index=rank)
        return pid, tid


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
