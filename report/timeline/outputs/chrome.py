"""Chrome's Trace Event format: https://ui.perfetto.dev and chrome://tracing show it, and TensorBoard reads it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from iaprof.report.timeline.arguments import Arguments
from iaprof.report.timeline.outputs.json_texts import member, microseconds, numbers, objects, quoted
from iaprof.report.timeline.trace import ABSENT, Columns, Marks, Points, Slices, Trace

_CHUNK = 1 << 16  # events
_INTERNAL = ("sync",)  # members that only stages use

Format = Callable[[NDArray[np.int64]], pa.StringArray]
"""Returns the JSON of some rows of one kind of event."""


def write_chrome(
    trace: Trace,
    arguments: Mapping[str, Arguments],
    settings: Mapping[str, Any],
    output: BinaryIO,
    rows: Rows | None = None,
) -> None:
    """Writes a trace, its events in order of time.

    Args:
        trace: the trace.
        arguments: of imported events, by kind of row: slice, flow and instant.
        settings: members of otherData.
        output: receives the JSON.
        rows: a choice of events; None for all.
    """
    writer = _Events(trace, arguments)
    output.write(_head(trace, settings).encode() + b'"traceEvents":[\n')
    separator = b""
    for chunk in writer.chunks(rows or Rows.all(trace)):
        # One buffer a chunk: a list of texts would be as many Python objects.
        text = pc.binary_join(pa.ListArray.from_arrays(pa.array([0, len(chunk)], pa.int32()), chunk), ",\n")
        output.write(separator)
        output.write(text.buffers()[2])
        separator = b",\n"
    output.write(b"\n]}\n")


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
    def all(cls, trace: Trace) -> Rows:
        """Chooses all events."""
        return cls(*(np.arange(len(columns)) for columns in _kinds(trace)))

    @classmethod
    def of_pids(cls, trace: Trace, pids: NDArray[np.int64]) -> Rows:
        """Chooses the events of some processes."""
        return cls(*(np.flatnonzero(np.isin(columns.pid, pids)) for columns in _kinds(trace)))


def _kinds(trace: Trace) -> tuple[Slices, Points, Marks, Marks]:
    return trace.slices, trace.points, trace.flows, trace.instants


def _head(trace: Trace, settings: Mapping[str, Any]) -> str:
    """Returns the object's start: the files' own members, those of the first file first, and ours."""
    members: dict[str, Any] = {}
    for file in trace.files:
        for name, value in file.members.items():
            if name not in ("traceEvents", "distributedInfo", "otherData", "deviceProperties"):
                members.setdefault(name, value)
    devices: dict[str, Mapping[str, Any]] = {}
    for file in trace.files:
        for device in file.devices:
            devices.setdefault(str(device.get("id")), device)
    of_flex = trace.slices.device[(trace.slices.device != ABSENT) & ~trace.is_torch(trace.slices)]
    for rank in np.unique(of_flex).tolist():
        devices.setdefault(str(rank), {"id": rank, "type": "AIU", "name": "AIU"})
    head = {
        "deviceProperties": list(devices.values()),
        "traceName": "iaprof",
        "displayTimeUnit": "ns",
        **members,
        "otherData": {"Application": "iaprof", **settings},
    }
    return json.dumps(head, indent=1)[:-2] + ",\n"


class _Events:
    """Formats events."""

    def __init__(self, trace: Trace, arguments: Mapping[str, Arguments]) -> None:
        self._trace, self._arguments = trace, arguments
        self._texts = quoted(trace.texts.values)
        self._jobs = quoted(pa.array([file.name for file in trace.files], pa.string()))
        self._formats: tuple[Format, ...] = (self._slices, self._points, self._flows, self._instants)

    def chunks(self, rows: Rows) -> Iterator[pa.StringArray]:
        """Yields the JSON of events in order of time, the longest first where they begin together."""
        kinds = np.repeat(np.arange(4), [len(each) for each in rows.kinds])
        numbers_ = np.concatenate(rows.kinds)
        trace = self._trace
        points = trace.points
        times = [trace.slices.start, points.time, trace.flows.time, trace.instants.time]
        time = np.concatenate([column[each] for column, each in zip(times, rows.kinds, strict=True)])
        length = np.zeros(len(time))
        length[: len(rows.kinds[0])] = trace.slices.duration[rows.kinds[0]]
        order = np.lexsort((-length, time))
        for start in range(0, len(order), _CHUNK):
            chosen = order[start : start + _CHUNK]
            place = np.argsort(kinds[chosen], kind="stable")
            texts = [
                self._formats[kind](numbers_[chosen[kinds[chosen] == kind]])
                for kind in range(4)
                if np.any(kinds[chosen] == kind)
            ]
            back = np.empty(len(place), np.int64)
            back[place] = np.arange(len(place))
            yield pa.concat_arrays(texts).take(pa.array(back))

    def _text(self, codes: NDArray[np.int32]) -> pa.StringArray:
        return self._texts.take(pa.array(codes, mask=codes < 0)).cast(pa.string())

    def _where(self, columns: Slices | Points | Marks) -> list[pa.StringArray]:
        return [
            member("name", self._text(columns.name)),
            member("cat", self._text(columns.category)),
            member("pid", numbers(columns.pid)),
            member("tid", numbers(columns.tid)),
        ]

    def _extra(self, columns: Columns) -> list[pa.StringArray]:
        members = []
        for name, values in columns.extra.items():
            if name not in _INTERNAL:
                texts = self._text(values) if values.dtype == np.int32 else numbers(values)
                members.append(member(name, texts))
        return members

    def _slices(self, rows: NDArray[np.int64]) -> pa.StringArray:
        slices = self._trace.slices.take(rows)
        args = [member(f"TS{n}", _decimal(slices.counters[:, n - 1])) for n in range(1, 6)]
        args += [
            member("Power", _decimal(slices.power)),
            member("bytes", numbers(slices.bytes)),
            member("memory bandwidth (GB/s)", numbers(slices.bandwidth)),
            member("correlation", numbers(slices.correlation)),
            member("device", numbers(slices.device)),
            member("CollGroup", self._text(slices.group)),
            member("Type", self._text(slices.type)),
            member("Peer", self._text(slices.peers)),
            member("jobname", self._jobs.take(pa.array(slices.file))),
        ]
        args += [*self._extra(slices), self._imported("slice", slices.row)]
        return objects(
            [
                _constant('"ph":"X",', len(rows)),
                *self._where(slices),
                member("ts", microseconds(slices.start)),
                member("dur", microseconds(np.rint(slices.duration).astype(np.int64))),
                member("args", objects(args, len(rows))),
            ],
            len(rows),
        )

    def _points(self, rows: NDArray[np.int64]) -> pa.StringArray:
        points = self._trace.points.take(rows)
        values = pc.binary_join_element_wise(
            self._text(points.series), ":", pc.fill_null(numbers(points.value), "0"), ""
        )
        return objects(
            [
                _constant('"ph":"C",', len(rows)),
                *self._where(points),
                member("ts", microseconds(points.time)),
                member("args", objects([values], len(rows))),
            ],
            len(rows),
        )

    def _flows(self, rows: NDArray[np.int64]) -> pa.StringArray:
        flows = self._trace.flows.take(rows)
        # An arrow ends at the slice that encloses its end, not at the next one to begin.
        is_end = self._trace.texts.matches(flows.phase, "^f$")
        binding = pc.if_else(pa.array(is_end), pa.scalar('"bp":"e",'), pa.scalar(None, pa.string()))
        return self._marks("flow", flows, [binding])

    def _instants(self, rows: NDArray[np.int64]) -> pa.StringArray:
        return self._marks("instant", self._trace.instants.take(rows), [])

    def _marks(self, kind: str, marks: Marks, more: list[pa.StringArray]) -> pa.StringArray:
        return objects(
            [
                member("ph", self._text(marks.phase)),
                *self._where(marks),
                member("ts", microseconds(marks.time)),
                member("id", numbers(marks.id)),
                *more,
                member("args", objects([*self._extra(marks), self._imported(kind, marks.row)], len(marks))),
            ],
            len(marks),
        )

    def _imported(self, kind: str, rows: NDArray[np.int64]) -> pa.StringArray:
        arguments = self._arguments.get(kind)
        return pa.nulls(len(rows), pa.string()) if arguments is None else arguments.take(rows)


def _constant(text: str, count: int) -> pa.StringArray:
    return pa.repeat(pa.scalar(text, pa.string()), count)


def _decimal(values: NDArray[np.int64]) -> pa.StringArray:
    """Returns counters as texts in decimal, as the AIU's runtime writes them; null for ABSENT."""
    return pc.binary_join_element_wise('"', pa.array(values, mask=values == ABSENT).cast(pa.string()), '"', "")
