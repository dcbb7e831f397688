"""Imports traces in Chrome's format: makes one capture of any number of files."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from iaprof.basics.errors import IaprofError
from iaprof.formats.capture.schema import KINDS
from iaprof.formats.capture.writer import CaptureWriter
from iaprof.report.traces.members import EVENTS
from iaprof.report.traces.pairs import Pairs
from iaprof.report.traces.pieces import PIECE_BYTES, Children, End, events
from iaprof.report.traces.source import Source
from iaprof.report.traces.tables import TableMaker
from iaprof.sandbox.answers import AnswerError, integer
from iaprof.sandbox.parent import SandboxError

_KINDS = ("slice", "counter", "flow", "instant")
_OWN = "Acelyzer"  # in otherData.Application of what the AIU Trace Analyzer wrote
_ALWAYS = ("deviceProperties", "distributedInfo")
_MOST_MEMBERS, _MOST_ALWAYS = 1 << 16, 1 << 20  # bytes of JSON, of all members of a file, and of each of those
_MOST_MEMBER_COUNT = 1000
_GROUP_ROWS, _GROUP_BYTES = 1 << 16, 12 << 20
_MOST_FILES = 1 << 16
_BLANK = b" \t\r\n"
_KNOWN_PHASES = frozenset("XBECstfbneiIRMPNODvVSTFpc(),=a")
_MOST_RANK = 1 << 31


@dataclass
class FileCounts:
    """What became of a file's events: `events` = rows of all kinds, dropped and merged ones together."""

    events: int = 0
    slices: int = 0
    counters: int = 0  # events; each has a row for each of its values
    flows: int = 0
    instants: int = 0
    dropped: Counter[str] = field(default_factory=Counter)  # by reason
    merged: Counter[str] = field(default_factory=Counter)
    zero_durations: int = 0  # among the slices
    counter_values: int = 0  # rows
    unknown_phases: int = 0  # among the instants
    cut_texts: int = 0
    cut_args: int = 0
    bad_values: int = 0

    def as_dict(self) -> dict[str, Any]:
        """Returns JSON."""
        return {name: dict(value) if isinstance(value, Counter) else value for name, value in vars(self).items()}


@dataclass
class FileFacts:
    """What was found in a file."""

    name: str
    dialect: str = "flex"
    rank: int = 0
    counts: FileCounts = field(default_factory=FileCounts)
    members: dict[str, Any] = field(default_factory=dict)
    members_left_out: int = 0
    problems: list[str] = field(default_factory=list)  # sentences about the file

    def as_dict(self) -> dict[str, Any]:
        """Returns JSON, for the header."""
        return {**vars(self), "counts": self.counts.as_dict()}


@dataclass
class TraceFacts:
    """What was found in all files."""

    files: list[FileFacts]
    first_ns: int | None
    last_ns: int | None


@dataclass
class _Known:
    """What only the end of a file told: it is read again with that."""

    own: set[int] = field(default_factory=set)  # files that are own output
    torch: set[int] = field(default_factory=set)


class _Again(Exception):
    """The files have to be read again."""


def is_trace(start: bytes) -> bool:
    """Whether a file that starts so may be a trace: JSON in any encoding, or compressed."""
    plain = start.removeprefix(b"\xef\xbb\xbf").replace(b"\0", b"").removeprefix(b"\xff\xfe").removeprefix(b"\xfe\xff")
    return start.startswith(b"\x1f\x8b") or plain.lstrip()[:1] in (b"{", b"[")


def import_traces(
    paths: Sequence[Path],
    output: BinaryIO,
    tell: Callable[[int], None],
    children: Children | None = None,
    piece_bytes: int = PIECE_BYTES,
    names: Sequence[str] = (),
) -> TraceFacts:
    """Writes a capture of traces.

    Args:
        paths: the files.
        output: receives the capture.
        tell: called with the number of bytes read so far.
        children: read the files; None for one on each CPU, two at most.
        piece_bytes: how much each gets at once.
        names: of the files, for messages and the header; their paths if empty.

    Raises:
        IaprofError: a file is no trace, or cannot be read.
        OSError: the capture cannot be written.
    """
    if len(paths) >= _MOST_FILES:
        raise IaprofError(f"{len(paths):,} files are too many for one capture: import at most {_MOST_FILES - 1:,}")
    known = _Known()
    own = children or Children(min(len(os.sched_getaffinity(0)), 2))
    try:
        while True:
            output.seek(0)
            output.truncate()
            writer = CaptureWriter(output)
            header: dict[str, Any] = {}
            try:
                facts = _Import(paths, names or [*map(str, paths)], writer, tell, own, known, piece_bytes).run()
                header = _header(facts)
                return facts
            except _Again:
                continue
            finally:
                writer.close(header)  # in any case, or pyarrow complains on stderr
    finally:
        if children is None:
            own.close()


class _Import:
    def __init__(
        self,
        paths: Sequence[Path],
        names: Sequence[str],
        writer: CaptureWriter,
        tell: Callable[[int], None],
        children: Children,
        known: _Known,
        piece_bytes: int,
    ) -> None:
        self._paths, self._names, self.tell = paths, names, tell
        self.children, self.known = children, known
        self.piece_bytes = piece_bytes
        self.groups = {kind: _Group(kind, writer) for kind in _KINDS}
        self.done = 0

    def run(self) -> TraceFacts:
        """Reads all files."""
        facts = []
        for number, (path, name) in enumerate(zip(self._paths, self._names, strict=True)):
            try:
                file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except OSError as error:
                raise IaprofError(f"{name} cannot be read: {error.strerror}") from error
            try:
                facts.append(_File(number, name, file, self).read())
            except (SandboxError, AnswerError) as error:
                raise IaprofError(f"{name} cannot be read: {error}") from error
            finally:
                self.done += os.fstat(file).st_size
                os.close(file)
        for group in self.groups.values():
            group.flush()
        firsts = [group.first_ns for group in self.groups.values() if group.first_ns is not None]
        lasts = [group.last_ns for group in self.groups.values() if group.last_ns is not None]
        return TraceFacts(facts, min(firsts, default=None), max(lasts, default=None))


class _File:
    """Reads a file."""

    def __init__(self, number: int, name: str, file: int, whole: _Import) -> None:
        self._number, self._name, self._whole = number, name, whole
        self._source = Source(file, name, whole.children.converter)
        self._facts = FileFacts(os.path.basename(name))
        self._counts = self._facts.counts
        self._is_own = number in whole.known.own
        self._is_torch = number in whole.known.torch
        self._maker = TableMaker(number, renames=not self._is_torch)
        self._pairs = Pairs()
        self._room = _MOST_MEMBERS  # bytes left

    def read(self) -> FileFacts:
        """Reads all of it; returns what it has."""
        at, start = self._start()
        if start == b"[":
            end = self._events(at)
            if end.ended:
                self._check_rest(end.at)
        else:
            self._object(at)
        self._pairs.finish()
        self._counts.dropped += self._pairs.dropped
        self._counts.merged["end of a slice"] += self._pairs.merged
        self._counts.merged = +self._counts.merged
        self._counts.dropped = +self._counts.dropped
        if self._source.is_damaged:
            self._facts.problems.append("its compressed data are damaged or cut short")
        self._facts.dialect = "torch" if "deviceProperties" in self._facts.members or self._is_torch else "flex"
        self._facts.rank = _rank(self._facts.members)
        return self._facts

    def _start(self) -> tuple[int, bytes]:
        """Returns where the outermost value begins, and its first character."""
        at = self._source.begin
        while True:
            data, is_last = self._source.bytes(at, 1 << 16)
            stripped = data.lstrip(_BLANK)
            if stripped:
                break
            if is_last:
                raise IaprofError(f"{self._name} is empty: it is no trace")
            at += len(data)
        first = stripped[:1]
        if first not in (b"[", b"{"):
            raise IaprofError(
                f"{self._name} is no trace: it is neither a list of events nor an object with traceEvents"
            )
        return at + len(data) - len(stripped) + 1, first

    def _object(self, at: int) -> None:
        source, size = self._source, self._whole.piece_bytes
        state: Any = {"key": None, "depth": 0, "in_text": False, "value": "", "too_long": False}
        has_events = False
        while True:
            span, stop, is_last = source.span(at, size)
            answer = self._whole.children.members(span, {"state": state, "is_last": is_last})
            match answer:
                case {
                    "state": dict(state), "members": list(members), "consumed": consumed, "events": bool(has_list),
                    "ended": bool(ended),
                }:  # fmt: skip
                    consumed = integer(consumed, stop - at + 1)
                case _:
                    raise AnswerError
            for member in members:
                has_events |= self._member(member)
            at += consumed
            if has_list:
                has_events = True
                end = self._events(at)
                at, size = end.at, self._whole.piece_bytes
                if not end.ended:
                    self._facts.problems.append("its list of events has no end: it may have been cut short")
                    break
            elif ended:
                self._check_rest(at)
                break
            elif is_last:
                self._facts.problems.append("it has no end: it may have been cut short")
                break
            elif not consumed:
                size = min(size * 4 + 1, 1 << 26)
            source.forget(at)
        if not has_events:
            raise IaprofError(f"{self._name} has no {EVENTS}: it is no trace")
        if "deviceProperties" in self._facts.members and not self._is_torch and self._maker.renamed:
            self._whole.known.torch.add(self._number)
            raise _Again
        application = self._facts.members.get("otherData")
        application = application.get("Application") if isinstance(application, dict) else None
        if isinstance(application, str) and _OWN in application and not self._is_own and self._counts.events:
            self._whole.known.own.add(self._number)
            raise _Again

    def _member(self, member: Any) -> bool:
        """Keeps a member; returns whether it is the events, in a form that has none."""
        match member:
            case [str(name), bool(is_read), value]:
                pass
            case _:
                raise AnswerError
        if name == EVENTS:
            self._facts.problems.append("its traceEvents are no list")
            return True
        kept = self._facts.members
        size = len(name) + len(json.dumps(value))
        if name == "deviceProperties" and not isinstance(value, list):
            value = []
        fits = size <= _MOST_ALWAYS if name in _ALWAYS else size <= self._room and len(kept) < _MOST_MEMBER_COUNT
        if not is_read or not fits:
            self._facts.members_left_out += 1
            if name == "deviceProperties":
                kept[name] = []
        else:
            kept[name] = value
            self._room -= 0 if name in _ALWAYS else size
        return False

    def _check_rest(self, at: int) -> None:
        data, _ = self._source.bytes(at, 1 << 16)
        if data.strip(_BLANK + b",\0"):
            self._facts.problems.append("it goes on behind the end of the trace, which was not read")

    def _events(self, at: int) -> End:
        end = End()
        whole, counts = self._whole, self._counts
        if "deviceProperties" in self._facts.members:
            self._is_torch, self._maker = True, TableMaker(self._number, renames=False)
        for piece in events(self._source, at, whole.children, end, whole.piece_bytes):
            counts.events += piece.events
            kept = piece.events - sum(piece.dropped.values())
            if kept < 0:
                raise AnswerError
            if self._is_own:
                counts.dropped["own output of the AIU Trace Analyzer"] += piece.events
            else:
                counts.dropped.update(piece.dropped)
                self._add(piece.columns, kept)
            whole.tell(whole.done + self._source.done)
        return end

    def _add(self, columns: Any, kept: int) -> None:
        counts = self._counts
        found = self._maker.tables(columns)
        counts.cut_texts += columns.cut_texts
        counts.cut_args += columns.cut_args
        counts.bad_values += columns.bad_values
        if "slice" in found:
            kept -= len(found["slice"])
            found["slice"] = self._pairs.slices(found["slice"])
            counts.slices += len(found["slice"])
            counts.zero_durations += pc.sum(pc.equal(found["slice"]["duration_ns"], 0)).as_py() or 0
        if "counter" in found:
            events = len(np.unique(columns.counters["event"]))
            kept -= events
            counts.counters += events
            counts.counter_values += len(found["counter"])
        if "flow" in found:
            kept -= len(found["flow"])
            counts.flows += len(found["flow"])
        if "instant" in found:
            kept -= len(found["instant"])
            counts.instants += len(found["instant"])
            phases = found["instant"]["phase"].value_counts().to_pylist()
            counts.unknown_phases += sum(each["counts"] for each in phases if each["values"] not in _KNOWN_PHASES)
        if kept:
            raise AnswerError
        for kind, table in found.items():
            self._whole.groups[kind].add(table)


class _Group:
    """Collects rows of a kind until they are worth a row group."""

    def __init__(self, kind: str, writer: CaptureWriter) -> None:
        self._kind, self._writer = kind, writer
        self._tables: list[pa.Table] = []
        self._rows = self._bytes = 0
        self.first_ns: int | None = None
        self.last_ns: int | None = None

    def add(self, table: pa.Table) -> None:
        """Adds rows."""
        if not len(table):
            return
        times = table["time_ns"]
        ends = pc.add(times, table["duration_ns"]) if self._kind == "slice" else times
        if self._kind == "instant":  # metadata may have no time
            times = ends = times.filter(pc.not_equal(table["phase"].cast(pa.string()), "M"))
        if len(times):
            first, last = pc.min(times).as_py(), pc.max(ends).as_py()
            self.first_ns = first if self.first_ns is None else min(self.first_ns, first)
            self.last_ns = last if self.last_ns is None else max(self.last_ns, last)
        self._tables.append(table)
        self._rows += len(table)
        self._bytes += table["args"].nbytes if "args" in table.column_names else 0
        if self._rows >= _GROUP_ROWS or self._bytes >= _GROUP_BYTES:
            self.flush()

    def flush(self) -> None:
        """Writes the rows."""
        if not self._tables:
            return
        table = pa.concat_tables(self._tables).unify_dictionaries().combine_chunks()
        self._tables, self._rows, self._bytes = [], 0, 0
        columns = [table[field.name] for field in KINDS[self._kind]]
        arrays = [pa.concat_arrays(column.chunks) for column in columns]
        fields = [field.with_type(array.type) for field, array in zip(KINDS[self._kind], arrays, strict=True)]
        self._writer.write(self._kind, pa.StructArray.from_arrays(arrays, fields=fields))


def _rank(members: Mapping[str, Any]) -> int:
    info = members.get("distributedInfo")
    rank = info.get("rank") if isinstance(info, dict) else None
    return rank if type(rank) is int and 0 <= rank < _MOST_RANK else 0


def _header(facts: TraceFacts) -> dict[str, Any]:
    """The header that a recorder would write, as far as traces have the facts."""
    counts = [file.counts for file in facts.files]
    first, last = facts.first_ns or 0, facts.last_ns or 0
    totals = {
        name: sum(getattr(each, name) for each in counts) for name in ("slices", "counter_values", "flows", "instants")
    }
    return {
        "clock": {"monotonic_ns": first, "realtime_ns": 0},
        "end_ns": last,
        "streams": [],
        "totals": totals,
        "losses": [],
        "imported": {"format": "trace", "files": len(facts.files)},
        "traces": [file.as_dict() for file in facts.files],
    }
