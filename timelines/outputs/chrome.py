"""Time lines in Chrome's format: one file, or one for each rank, as TensorBoard's PyTorch plugin reads them.

The plugin only measures events inside of steps (torch_tb_profiler 0.4.3, profiler/event_parser.py: StepParser).
Without slices `ProfilerStep#N`, the step is the time of the host's operators; without operators, its time is negative.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from iaprof.formats import chrome
from iaprof.formats.chrome import MOST_ROWS, Member, Texts, few_numbers, member, numbers, quoted, shared
from iaprof.formats.distinct import distinct_values, few
from iaprof.formats.profile import StackOptions
from iaprof.timelines.arguments import Arguments
from iaprof.timelines.grouped import Groups, rows_of
from iaprof.timelines.intervals import FARTHEST
from iaprof.timelines.made_events import unique_ids
from iaprof.timelines.outputs.event_order import EventKind, EventOrder
from iaprof.timelines.outputs.formats import TimeLine
from iaprof.timelines.own_output import FILES, described
from iaprof.timelines.placeholders import placed
from iaprof.timelines.stages.iterations import STEP
from iaprof.timelines.trace import ABSENT, HOST_PIDS, MADE_OF_TEXT, Columns, Marks, Points, Slices, Trace
from iaprof.timelines.views import nesting

_MOST_TEXTS = 1 << 30  # bytes of an array of type string
INTERNAL = ("sync", "bp", "energy_uj")  # columns that only stages and tables use, or that are not members of args

_ORIGINAL = r'"o{}":(?P<original>"(?:[^"\\]|\\.)*")'
_TO_SEVERAL = "^Set BCList$"  # the type of events whose peers are a list, also of one

Format = Callable[[NDArray[np.int64]], pa.StringArray]
"""Returns the JSON of some rows of one kind of event, each after the separator."""


def write_report(shown: TimeLine, _: StackOptions, out: BinaryIO) -> None:
    """Writes what `iaprof timeline -o` writes as trace.json."""
    with shown.arguments() as given:
        write_chrome(shown.trace, given, {"CmdLine": shown.command, FILES: described(shown.trace)}, out)


def write_chrome(
    trace: Trace,
    arguments: Mapping[str, Arguments],
    settings: Mapping[str, Any],
    output: BinaryIO,
    rows: Rows | None = None,
    rank: int | None = None,
) -> None:
    """Writes a trace, its events in order of time.

    Args:
        trace: the trace.
        arguments: of imported events, by kind of row: slice, flow and instant.
        settings: members of otherData.
        output: receives the JSON.
        rows: a choice of events; None for all.
        rank: whose device is described; None for all.
    """
    ChromeWriter(trace, arguments, settings).write(output, rows, rank)


class ChromeWriter:
    """Writes a trace into several files, each with some of its events."""

    def __init__(self, trace: Trace, arguments: Mapping[str, Arguments], settings: Mapping[str, Any]) -> None:
        """Takes what write_chrome does."""
        self._trace, self._settings = trace, settings
        self._events = _Events(trace, arguments)
        self._devices = _devices(trace)

    def write(
        self,
        output: BinaryIO,
        rows: Rows | None = None,
        rank: int | None = None,
        first: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        """Writes a file, as write_chrome does; `first` are further events, before the others."""
        own = [device for device in self._devices if rank is None or device.get("id") == rank]
        chrome.write(output, _head(self._trace, self._settings, own), first, self._events.chunks(rows))


class Rows:
    """A choice of a trace's events: row numbers for each kind."""

    def __init__(
        self,
        slices: NDArray[np.int64],
        points: NDArray[np.int64],
        flows: NDArray[np.int64],
        instants: NDArray[np.int64],
    ) -> None:
        self.kinds = (slices, points, flows, instants)

    @classmethod
    def of_pids(cls, trace: Trace, pids: NDArray[np.int64]) -> Rows:
        """Chooses the events of some processes."""
        return cls(*(np.flatnonzero(np.isin(columns.pid, pids)) for columns in _kinds(trace)))


def _kinds(trace: Trace) -> tuple[Slices, Points, Marks, Marks]:
    return trace.slices, trace.points, trace.flows, trace.instants


def _devices(trace: Trace) -> list[Mapping[str, Any]]:
    """Returns the devices of the files, each id once, and those of the ranks in files that describe none."""
    devices: dict[str, Mapping[str, Any]] = {}
    for file in trace.files:
        for device in file.devices:
            devices.setdefault(str(device.get("id")), device)
    of_flex = trace.slices.device[(trace.slices.device != ABSENT) & ~trace.is_torch(trace.slices)]
    for rank in distinct_values(of_flex).tolist():
        devices.setdefault(str(rank), {"id": rank, "type": "AIU", "name": "AIU"})
    return list(devices.values())


def _head(trace: Trace, settings: Mapping[str, Any], devices: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns what is before the events: the files' own members, those of the first file first, and ours."""
    members: dict[str, Any] = {}
    for file in trace.files:
        for name, value in file.members.items():
            if name not in ("traceEvents", "distributedInfo", "otherData", "deviceProperties"):
                members.setdefault(name, value)
    return {
        "deviceProperties": devices,
        "traceName": "iaprof",
        "displayTimeUnit": "ns",
        **members,
        "otherData": {"Application": "iaprof", **settings},
    }


class _Values:
    """Which values of counters are one event: different series of a counter that are next to each other at one time."""

    def __init__(self, points: Points) -> None:
        new = np.ones(len(points), bool)
        new[1:] = False
        for name in ("file", "pid", "tid", "name", "category", "time"):
            key = getattr(points, name)
            new[1:] |= key[1:] != key[:-1]
        self.is_first = new
        self._events: Groups | None = None
        if new.all():  # each value is an event, which needs no memory
            return
        run = np.cumsum(new)
        alike = Groups(run, points.series)
        nth = np.empty(len(points), np.int64)  # a series that comes again is of a further event
        nth[alike.order] = np.arange(len(points)) - np.repeat(alike.firsts, alike.counts)
        self._events = Groups(run, nth)
        self.is_first = np.zeros(len(points), bool)
        self.is_first[self._events.order[self._events.firsts]] = True

    def of_events(self, rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Returns the rows of the values of events, by the rows of their first ones, and where each event's begin."""
        if self._events is None:
            return rows, np.arange(len(rows) + 1)
        events = self._events.numbers[rows]
        counts = self._events.counts[events]
        offsets = np.append(0, np.cumsum(counts))
        places = np.repeat(self._events.firsts[events] - offsets[:-1], counts) + np.arange(offsets[-1])
        return self._events.order[places], offsets


class _Originals:
    """The pids, or tids, of PyTorch's files that are texts, such as "Spans", for which a trace has numbers."""

    def __init__(self, trace: Trace, arguments: Mapping[str, Arguments], name: str) -> None:
        kinds: dict[str, Slices | Marks] = {"slice": trace.slices, "flow": trace.flows, "instant": trace.instants}
        found: dict[int, str] = {}
        for kind, columns in kinds.items():
            given, of_kind = arguments.get(kind), getattr(columns, name)
            rows = np.flatnonzero((of_kind >= MADE_OF_TEXT) & (columns.row >= 0))
            rows = rows[trace.is_torch(columns)[rows]] if len(rows) else rows
            if given is None or not len(rows):
                continue
            distinct, first = np.unique(of_kind[rows], return_index=True)
            texts = pc.extract_regex(given.take(columns.row[rows[first]]), _ORIGINAL.format(name))
            for number, text in zip(distinct.tolist(), texts.to_pylist(), strict=True):
                if text is not None:
                    found.setdefault(number, text["original"])
        self._numbers = np.array(sorted(found), np.int64)
        self._texts = pa.array([found[number] for number in sorted(found)], pa.string())

    def texts(self, values: NDArray[np.int64]) -> Texts:
        """Returns the JSON of pids or tids."""
        if not len(self._numbers):
            return few_numbers(values)
        plain = numbers(values)
        place = np.minimum(np.searchsorted(self._numbers, values), len(self._numbers) - 1)
        return pc.if_else(pa.array(self._numbers[place] == values), self._texts.take(pa.array(place)), plain)


def _numbers(values: NDArray[Any]) -> Texts:
    return few_numbers(values) if values.dtype == np.int64 else numbers(values)


def _counters(slices: Slices) -> list[Member]:
    counters = slices.counters
    found = [member(f"TS{n}", numbers(counters[:, n - 1]), '"') for n in range(1, 6)]
    return [*found, member("Power", numbers(slices.power), '"')]


def _taken_out(imported: Member, name: str) -> tuple[Member, pa.StringArray]:
    """Takes a text member of events that the import put before their args out of these; returns both."""
    members: pa.StringArray = imported.values
    pattern = f'^"{name}":(?P<value>"[^"\\\\]*")(?:,|$)'
    found = pc.struct_field(pc.extract_regex(members, pattern), "value")
    if found.null_count == len(found):
        return imported, found
    rest = pc.replace_substring_regex(members, pattern, "")
    return Member("", pc.if_else(pc.equal(rest, ""), pa.scalar(None, pa.string()), rest), ","), found


def _rows(chosen: NDArray[np.int64] | None, places: Any) -> Any:
    """Returns row numbers by places among those that are chosen; None chooses all."""
    return places if chosen is None else chosen[places]


class _Events:
    """Formats events."""

    def __init__(self, trace: Trace, arguments: Mapping[str, Arguments]) -> None:
        self._trace, self._arguments = trace, arguments
        self._texts = quoted(trace.texts.values)
        if self._texts.nbytes < _MOST_TEXTS:
            self._texts = self._texts.cast(pa.string())
        self._jobs = quoted(pa.array(trace.job_names, pa.string()))
        self._values = _Values(trace.points)
        self._originals = [_Originals(trace, arguments, name) for name in ("pid", "tid")]
        self._ids = {"flow": unique_ids(trace.flows), "instant": unique_ids(trace.instants)}
        self._formats: tuple[Format, ...] = (self._slices, self._points, self._flows, self._instants)

    def chunks(self, rows: Rows | None) -> Iterator[pa.StringArray]:
        """Yields the JSON of events in order of time, the longest first where they begin together.

        Each is after the separator, including the first one.
        """
        for chosen, of_kinds in self._in_order(rows):
            places = [np.flatnonzero(of_kinds == kind) for kind in range(4)]
            texts = [self._formats[kind](chosen[at]) for kind, at in enumerate(places) if len(at)]
            if len(texts) == 1:
                yield texts[0]
                continue
            back = np.empty(len(chosen), np.int64)
            back[np.concatenate(places)] = np.arange(len(chosen))
            yield pa.concat_arrays(texts).take(pa.array(back))

    def _in_order(self, rows: Rows | None) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
        """Yields the row numbers of events, and their kinds, in order of time."""
        trace = self._trace
        chosen: list[NDArray[np.int64] | None] = [None] * 4 if rows is None else [*rows.kinds]
        first, values = self._values.is_first, chosen[1]
        if not first.all():
            chosen[1] = np.flatnonzero(first) if values is None else values[first[values]]
        columns = [trace.slices.start, trace.points.time, trace.flows.time, trace.instants.time]
        counts = np.array([len(column if each is None else each) for column, each in zip(columns, chosen, strict=True)])
        duration = trace.slices.duration

        def times(column: NDArray[np.int64], rows_: NDArray[np.int64] | None) -> EventKind:
            return EventKind(len(column if rows_ is None else rows_), lambda span: column[_rows(rows_, span)])

        def shortest_last(events: NDArray[np.int64]) -> NDArray[np.float64]:
            found = np.zeros(len(events))
            of_slices = events < counts[0]
            found[of_slices] = -duration[_rows(chosen[0], events[of_slices])]
            return found

        ends = np.cumsum(counts)
        kinds = [times(column, each) for column, each in zip(columns, chosen, strict=True)]
        for events, _ in EventOrder(kinds).chunks(shortest_last, MOST_ROWS):
            of_kinds = np.searchsorted(ends, events, "right")
            numbers_ = events - (ends - counts)[of_kinds]
            for kind, own in enumerate(chosen):
                of_kind = of_kinds == kind
                numbers_[of_kind] = _rows(own, numbers_[of_kind])
            yield numbers_, of_kinds

    def _text(self, codes: NDArray[np.int32]) -> pa.StringArray:
        return self._texts.take(pa.array(codes, mask=codes < 0)).cast(pa.string())

    def _coded(self, codes: NDArray[np.int32]) -> Texts:
        found = few(codes, codes < 0)
        return self._text(codes) if found is None else pa.DictionaryArray.from_arrays(found[0], self._text(found[1]))

    def _where(self, columns: Slices | Points | Marks) -> list[Member]:
        pids, tids = (each.texts(of) for each, of in zip(self._originals, (columns.pid, columns.tid), strict=True))
        return chrome.place(self._coded(columns.name), self._coded(columns.category), pids, tids)

    def _extra(self, columns: Columns) -> list[Member]:
        members = []
        for name, values in columns.extra.items():
            if name not in INTERNAL:
                members.append(member(name, self._coded(values) if values.dtype == np.int32 else _numbers(values)))
        return members

    def _slices(self, rows: NDArray[np.int64]) -> pa.StringArray:
        slices = self._trace.slices.take(rows)
        args = [
            *self._counted(slices, rows),
            member("bytes", few_numbers(slices.bytes)),
            member("memory bandwidth (GB/s)", numbers(slices.bandwidth)),
            member("correlation", numbers(slices.correlation)),
            member("device", few_numbers(slices.device)),
            member("CollGroup", self._coded(slices.group)),
            member("Type", self._coded(slices.type)),
            *self._peers(slices),
            member("jobname", pa.DictionaryArray.from_arrays(pa.array(slices.file), self._jobs)),
        ]
        # What stages found out comes last: of members with the same name, the last one counts.
        args = [self._imported("slice", slices.row), *args, *self._extra(slices)]
        durations = np.rint(np.clip(slices.duration, -FARTHEST, FARTHEST)).astype(np.int64)
        return chrome.slices(self._where(slices), slices.start, durations, args)

    def _counted(self, slices: Slices, rows: NDArray[np.int64]) -> list[Member]:
        """Returns the members with the counters of slices, which stand in some rows."""
        found = self._trace.slices.shared_counters(rows)
        if found is None:
            return _counters(slices)
        number, first = found
        distinct = self._trace.slices.take(first, ("counters", "power"))
        if np.array_equal(distinct.power[number], slices.power):
            return [shared(_counters(distinct), number)]
        return [shared(_counters(distinct)[:-1], number), _counters(slices)[-1]]

    def _peers(self, slices: Slices) -> list[Member]:
        """Returns the members for ranks, as runtimes call them: `Peers` of those that can be several."""
        texts = self._trace.texts
        several = pa.array(texts.matches(slices.type, _TO_SEVERAL) | texts.matches(slices.peers, ","))
        peers, none = self._text(slices.peers), pa.scalar(None, pa.string())
        return [
            member("Peer", pc.if_else(several, none, peers)),
            member("Peers", pc.if_else(several, peers, none)),
        ]

    def _points(self, rows: NDArray[np.int64]) -> pa.StringArray:
        points = self._trace.points.take(rows)
        members, offsets = self._values.of_events(rows)
        series, value = self._trace.points.series[members], self._trace.points.value[members]
        texts = pc.binary_join_element_wise(self._text(series), ":", pc.fill_null(numbers(value), "0"), "")
        values = pc.binary_join(pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), texts), ",")
        return chrome.counters(self._where(points), points.time, [Member("", values, ",")])

    def _flows(self, rows: NDArray[np.int64]) -> pa.StringArray:
        flows = self._trace.flows.take(rows)
        is_end = self._trace.texts.matches(flows.phase, "^f$")
        binding = pc.if_else(pa.array(is_end), pa.scalar('"e"'), pa.scalar(None, pa.string()))
        imported, _ = _taken_out(self._imported("flow", flows.row), "bp")
        return self._marks("flow", rows, flows, imported, member("bp", binding))

    def _instants(self, rows: NDArray[np.int64]) -> pa.StringArray:
        instants = self._trace.instants.take(rows)
        imported, scope = _taken_out(self._imported("instant", instants.row), "s")
        return self._marks("instant", rows, instants, imported, member("s", scope))

    def _marks(
        self, kind: str, rows: NDArray[np.int64], marks: Marks, imported: Member, more: Member
    ) -> pa.StringArray:
        args = [imported, *self._extra(marks)]
        return chrome.marks(self._coded(marks.phase), self._where(marks), marks.time, self._ids[kind][rows], more, args)

    def _imported(self, kind: str, rows: NDArray[np.int64]) -> Member:
        arguments = self._arguments.get(kind)
        return Member("", pa.nulls(len(rows), pa.string()) if arguments is None else arguments.take(rows), ",")


MOST_WORKERS = 1024  # files: a stranger's trace can have a million pids


def workers(trace: Trace) -> Iterator[tuple[int, Rows]]:
    """Yields the ranks, and the events of each: of its device, of its host, and of the files of its rank."""
    torch = trace.torch_files
    ranks_of_files = np.array([file.rank for file in trace.files], np.int64)
    kinds = (trace.slices, trace.points, trace.flows, trace.instants)
    ranks = []
    for columns in kinds:
        of_torch = torch[columns.file]
        of_pid = np.where(columns.pid >= HOST_PIDS, columns.pid - HOST_PIDS, columns.pid)
        ranks.append(np.where(of_torch, ranks_of_files[columns.file], of_pid))
    # Counters of all ranks together have a pid of -1.
    wanted = np.unique(np.concatenate([ranks[0], ranks_of_files[torch]]))
    wanted = wanted[wanted >= 0]
    if len(wanted) > MOST_WORKERS:
        text = (
            f"There are {len(wanted):,} ranks: files for TensorBoard were written for the first {MOST_WORKERS:,} only"
        )
        trace.messages.warn("TB", text)
        wanted = wanted[:MOST_WORKERS]
    for rank, *rows in zip(wanted.tolist(), *(rows_of(of_kind, wanted) for of_kind in ranks), strict=True):
        yield rank, Rows(*rows)


def step_of(trace: Trace, rank: int, rows: Rows) -> list[Mapping[str, Any]]:
    """Returns the event of a step around all slices of a rank of the AIU's runtime, whose traces mark none.

    It is in whole us, and a us longer, as the plugin's floats do not resolve ns at today's times. A rank of which
    PyTorch has a trace gets none: that has steps, or operators.
    """
    own = rows.kinds[0][placed(trace)[rows.kinds[0]]]
    if (
        not len(own)
        or trace.is_torch(trace.slices)[own].any()
        or trace.texts.matches(trace.slices.name[own], STEP).any()
    ):
        return []
    starts, until = (each[own] for each in nesting.times(trace.slices))
    first, last = int(starts.min()) // 1000, -(-int(until.max()) // 1000) + 1
    place = {"pid": rank + HOST_PIDS, "tid": 0, "ts": first, "dur": last - first}
    job = trace.job_names[int(trace.slices.file[own[0]])]
    return [{"ph": "X", "name": "ProfilerStep#0", "cat": "user_annotation", **place, "args": {"jobname": job}}]
