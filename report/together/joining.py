"""Writes a capture that has the rows of another one and traces of the same run, whose clocks it joins."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from iaprof.basics.errors import IaprofError, UsageError
from iaprof.formats.capture.limits import MAX_HEADER_BYTES
from iaprof.formats.capture.reader import CaptureReader
from iaprof.formats.capture.schema import KINDS, SAMPLE_KINDS
from iaprof.formats.capture.writer import CaptureWriter
from iaprof.formats.distinct import distinct_rows
from iaprof.formats.header.traces import KEY, MEMBER, MOST_THREADS, TraceClock
from iaprof.report.archive.archiving import rows_of
from iaprof.report.together.clocks import RecordedClocks, TraceTimes, clock_of, lasting, moved
from iaprof.report.together.launches import KernelTexts, recorded_launches, traced_launches
from iaprof.report.together.matching import Recorded

KINDS_OF_TRACES = ("slice", "counter", "flow", "instant")
_TOTALS = ("slices", "counter_values", "flows", "instants")
_MOST_FILES = 1 << 16
_Ints = NDArray[np.int64]


@dataclass(frozen=True)
class JoinedTrace:
    """A trace, and how its clock was joined."""

    name: str
    clock: TraceClock


def check_stalls(capture: CaptureReader) -> None:
    """Checks that traces can be joined to a capture.

    Raises:
        UsageError: it is a merged one, or one of traces only.
    """
    if capture.is_merged:
        raise UsageError(f"{capture.path} was merged from several recordings: pass the one of the same run with --with")
    if not any(capture.count(kind) for kind in (*SAMPLE_KINDS, "launch", "cpu_sample", "metric")):
        raise UsageError(
            f"{capture.path} was not recorded by 'iaprof record': pass the capture of the same run with --with"
        )


def join_traces(capture: CaptureReader, traces: CaptureReader, output: BinaryIO) -> list[JoinedTrace]:
    """Writes all rows of a capture, and those of traces with the times of the capture's clock.

    Args:
        capture: of the run, see `check_stalls`.
        traces: of the same run, as the import wrote them.
        output: receives the capture.

    Raises:
        CaptureError: the capture is damaged.
        IaprofError: the clock of a trace cannot be joined.
        OSError: the output cannot be written.
    """
    described = _described(traces.header)
    known = _described(capture.header)
    if len(known) + len(described) >= _MOST_FILES:
        raise IaprofError(f"{capture.path} has too many traces already: join fewer")
    clocks = _clocks(capture, traces, described)
    entries = [{**each, KEY: clock.as_dict()} for each, clock in zip(described, clocks, strict=True)]
    header = {**capture.header, MEMBER: [*known, *entries], "totals": _totals(capture.header, traces.header)}
    if len(json.dumps(header)) > MAX_HEADER_BYTES:
        raise IaprofError(f"what the headers of {capture.path} and of the traces say is too long: join fewer traces")
    writer = CaptureWriter(output)
    try:
        for kind in KINDS:
            for table in capture.tables(kind):
                for rows in rows_of(kind, table):
                    writer.write(kind, rows)
        for kind in KINDS_OF_TRACES:
            for table in traces.tables(kind):
                for rows in rows_of(kind, _moved(table, clocks, len(known))):
                    writer.write(kind, rows)
    finally:
        writer.close(header)  # in any case, or pyarrow complains on stderr
    return [JoinedTrace(str(each.get("name", "")), clock) for each, clock in zip(described, clocks, strict=True)]


def _described(header: dict[str, Any]) -> list[dict[str, Any]]:
    found = header.get(MEMBER)
    return [each if isinstance(each, dict) else {} for each in found] if isinstance(found, list) else []


def _clocks(capture: CaptureReader, traces: CaptureReader, described: list[dict[str, Any]]) -> list[TraceClock]:
    texts = KernelTexts()
    launches = traced_launches(traces, texts)
    seen = recorded_launches(capture, texts)
    whole = texts.whole()
    recorded = Recorded(seen.renamed(whole))
    clocks = RecordedClocks.of(capture.header)
    spans = _spans(traces, len(described))
    inside = _namespaced(capture)
    pids = _pids(traces, len(described)) if inside else [set()] * len(described)
    found = [
        clock_of(
            TraceTimes.of(each, *spans[file]),
            launches[file].renamed(whole) if file in launches else None,
            recorded,
            clocks,
        )
        for file, each in enumerate(described)
    ]
    return [_with_namespaces(clock, inside, own) for clock, own in zip(found, pids, strict=True)]


def _namespaced(capture: CaptureReader) -> dict[int, int]:
    """Returns the pids of processes by what they are in their own namespace, where that tells one process."""
    if not capture.count("process"):
        return {}
    rows = capture.table("process", ("pid", "ns_pid")).to_pylist()
    outside = {row["pid"] for row in rows}
    found: dict[int, set[int]] = {}
    for row in rows:
        if row["ns_pid"]:
            found.setdefault(row["ns_pid"], set()).add(row["pid"])
    return {inner: pid.pop() for inner, pid in found.items() if len(pid) == 1 and inner not in outside}


def _pids(traces: CaptureReader, files: int) -> list[set[int]]:
    """Returns the pids that slices of each file have."""
    found: list[set[int]] = [set() for _ in range(files)]
    for table in traces.tables("slice", ("file", "pid")):
        first, _ = distinct_rows(table["file"].to_numpy().astype(np.int64), table["pid"].to_numpy())
        some = table.take(pa.array(first))
        for file, pid in zip(some["file"].to_pylist(), some["pid"].to_pylist(), strict=True):
            found[file].add(pid)
    return found


def _with_namespaces(clock: TraceClock, inside: Mapping[int, int], pids: Collection[int]) -> TraceClock:
    """Adds main threads of processes without launches that fit: of other threads no number outside is known."""
    told = {pid for pid, _ in clock.threads}
    more = {(pid, pid): (inside[pid], inside[pid]) for pid in sorted(pids) if pid in inside and pid not in told}
    room = max(MOST_THREADS - len(clock.threads), 0)
    return replace(clock, threads={**clock.threads, **dict([*more.items()][:room])}) if more else clock


def _spans(traces: CaptureReader, files: int) -> list[tuple[int, int]]:
    """Returns the first and the last time of each file, of its slices if it has any; 0 if it has no times."""
    spans = []
    for kind in KINDS_OF_TRACES:
        first, last = np.full(files, np.iinfo(np.int64).max), np.full(files, np.iinfo(np.int64).min)
        for table in traces.tables(kind, ("time_ns", "file")):
            times, file = table["time_ns"].to_numpy(), table["file"].to_numpy()
            np.minimum.at(first, file, times)
            np.maximum.at(last, file, times)
        spans.append((first.tolist(), last.tolist()))
    return [
        next(((first[file], last[file]) for first, last in spans if first[file] <= last[file]), (0, 0))
        for file in range(files)
    ]


def _moved(table: pa.Table, clocks: Sequence[TraceClock], first_file: int) -> pa.Table:
    """Puts rows on the capture's clock, and numbers their files after those that it has."""
    file = table["file"].to_numpy().astype(np.int64)
    columns = {
        "time_ns": pa.array(moved(table["time_ns"].to_numpy(), file, clocks)),
        "file": pa.array((file + first_file).astype(np.uint16)),
    }
    if "duration_ns" in table.column_names and any(clock.rate for clock in clocks):
        columns["duration_ns"] = pa.array(lasting(table["duration_ns"].to_numpy(), file, clocks))
    for name, values in columns.items():
        table = table.set_column(table.schema.get_field_index(name), name, values)
    return table


def _totals(header: dict[str, Any], of_traces: dict[str, Any]) -> dict[str, Any]:
    """Returns the capture's totals, with the rows of the traces added."""
    mine, theirs = (each if isinstance(each := found.get("totals"), dict) else {} for found in (header, of_traces))
    added = {name: _number(mine.get(name)) + _number(theirs.get(name)) for name in _TOTALS}
    return {**mine, **added}


def _number(value: Any) -> int:
    return value if type(value) is int and value >= 0 else 0
