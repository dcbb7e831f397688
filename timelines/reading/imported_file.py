"""A file that is imported, in any format: the facts found in it, and the rows made of it."""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from iaprof.formats.capture.schema import FIELDS, KINDS, NULLABLE
from iaprof.sandbox.parent import AnswerError
from iaprof.timelines.reading.answer import ABSENT, MADE, NO_TEXT, Columns, Table
from iaprof.timelines.reading.children import Children, Read
from iaprof.timelines.reading.dialect_detection import FLEX, Signs
from iaprof.timelines.reading.pairs import Pairs
from iaprof.timelines.reading.source import Source

_HASH_BYTES = 5
_FLEX_NAMES = (("RDMA", "Rdma"), ("Receive", "Recv"))


class TableMaker:
    """Makes tables of one file's rows."""

    def __init__(self, file: int, renames: bool) -> None:
        """Args: the number of the file; whether names are changed to those of newer runtimes."""
        self._file = file
        self._renames = renames
        self.renamed = False  # whether a name was changed

    def tables(self, columns: Columns) -> dict[str, pa.Table]:
        """Returns the rows of a piece by kind; those of `slice` have `phase`, too, if not all are X.

        Raises:
            AnswerError: the child's args are not text.
        """
        texts = pa.array(columns.texts, pa.string())
        names = texts
        if self._renames:
            for old, new in _FLEX_NAMES:
                names = pc.replace_substring(names, old, new)
            self.renamed |= not names.equals(texts)
        kinds = {
            "slice": columns.slices, "counter": columns.counters, "flow": columns.flows, "instant": columns.instants,
        }  # fmt: skip
        return {kind: self._table(kind, table, texts, names) for kind, table in kinds.items() if table}

    def _table(self, kind: str, table: Table, texts: pa.Array, names: pa.Array) -> pa.Table:
        count = len(table["time_ns"])
        arrays, fields = [], []
        for member in KINDS[kind]:
            values = table.get(member.name)
            if member.name == "file":
                array = pa.array(np.full(count, self._file, np.uint16))
            elif member.name == "args":
                array = _args(table, count)
            elif member.type == pa.string():
                array = _coded(values, names if member.name == "name" else texts, count)
            elif member.name in ("pid", "tid", "id") and f"{member.name}_text" in table:
                array = _numbered(table, member.name, texts)
            elif values is None:
                array = pa.nulls(count, member.type)
            elif f"{kind}.{member.name}" in NULLABLE:
                array = pa.array(values, mask=np.isnan(values) if values.dtype == np.float64 else values == ABSENT)
            else:
                array = pa.array(values)
            arrays.append(array)
            fields.append(pa.field(member.name, array.type))
        if "phase" in table and kind == "slice":
            arrays.append(pa.array(table["phase"]))
            fields.append(pa.field("phase", pa.uint8()))
        return pa.Table.from_arrays(arrays, schema=pa.schema(fields))


def _coded(codes: NDArray[np.int32] | None, texts: pa.Array, count: int) -> pa.Array:
    if codes is None:
        return pa.DictionaryArray.from_arrays(pa.nulls(count, pa.int32()), pa.array([], pa.string()))
    absent = codes == NO_TEXT
    indices = pa.array(codes, mask=absent) if absent.any() else pa.array(codes)
    return pa.DictionaryArray.from_arrays(indices, texts)


def _numbered(table: Table, name: str, texts: pa.Array) -> pa.Array:
    """Returns pids, tids or ids; those that are texts get numbers."""
    numbers, codes = table[name].copy(), table[f"{name}_text"]
    used, of_row = np.unique(codes[codes >= 0], return_inverse=True)
    made = np.array([number_of(text) for text in texts.take(pa.array(used)).to_pylist()], np.int64)
    numbers[codes >= 0] = made[of_row]
    return pa.array(numbers, mask=numbers == ABSENT) if name == "id" else pa.array(numbers)


def number_of(text: str) -> int:
    """Returns the number in place of a pid, tid or id that is not an integer."""
    digest = hashlib.sha256(text.encode("utf-8", "replace")).digest()
    return MADE + int.from_bytes(digest[:_HASH_BYTES], "big")


def _args(table: Table, count: int) -> pa.Array:
    if "args" not in table:
        return pa.nulls(count, pa.string())
    lengths = np.zeros(count, np.int64)
    lengths[table["args_row"]] = table["args_length"]
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)]).astype(np.int32)
    valid = np.packbits(lengths > 0, bitorder="little")
    buffers = [pa.py_buffer(valid), pa.py_buffer(offsets), pa.py_buffer(table["args"])]
    array = pa.Array.from_buffers(pa.string(), count, buffers)
    try:
        array.validate(full=True)
    except pa.ArrowInvalid:
        raise AnswerError from None
    return array


def is_text(kind: str, name: str) -> bool:
    """Whether a field of a kind is a dictionary of texts."""
    return FIELDS[f"{kind}.{name}"].is_dictionary


MOST_RANKS = 64  # of a file, that the header names
_KNOWN_PHASES = frozenset("XBECstfbneiIRMPNODvVSTFpc(),=a")


@dataclass
class FileCounts:
    """The counts of a file's events. `events` is the sum of rows of all kinds, dropped and merged events."""

    events: int = 0
    slices: int = 0
    counters: int = 0  # events; each has a row for each of its values
    flows: int = 0
    instants: int = 0
    dropped: Counter[str] = field(default_factory=Counter)  # by reason
    merged: Counter[str] = field(default_factory=Counter)
    zero_durations: int = 0  # among the slices
    zero_durations_with_cycles: int = 0  # among these: TS1 and TS5 differ
    counter_values: int = 0  # rows
    unknown_phases: int = 0  # among the instants
    cut_texts: int = 0
    cut_args: int = 0
    bad_values: int = 0
    bad_bytes: int = 0  # that are not UTF-8, and became `?`

    def as_dict(self) -> dict[str, Any]:
        """Returns JSON."""
        return {name: dict(value) if isinstance(value, Counter) else value for name, value in vars(self).items()}


@dataclass
class FileFacts:
    """The facts that were found in a file."""

    name: str
    dialect: str = FLEX
    rank: int | None = None  # None if nothing tells it
    ranks: list[int] = field(default_factory=list)  # of its devices, ascending; at most MOST_RANKS
    counts: FileCounts = field(default_factory=FileCounts)
    members: dict[str, Any] = field(default_factory=dict)
    members_left_out: int = 0
    problems: list[str] = field(default_factory=list)  # sentences about the file

    def as_dict(self) -> dict[str, Any]:
        """Returns JSON, for the header."""
        return {**vars(self), "counts": self.counts.as_dict()}


class ReadAgain(Exception):
    """The end of a file showed that it was read wrongly: all files have to be read again, with a Remembered."""


@dataclass
class Remembered:
    """What was found out about a file when it was read before."""

    is_own: bool = False  # it is output of the AIU Trace Analyzer
    keeps_names: bool = False  # its names are not changed: it is not of the AIU's runtime
    has_tracks: bool = False  # its child knows all tracks from the last reading
    needs_zstd: bool = False  # it has packets that only some children can unpack


@dataclass
class Reading:
    """How files are read."""

    children: Children
    piece_bytes: int
    tell: Callable[[int], None]  # called with the bytes of the file that were read
    add: Callable[[str, pa.Table], None]  # called with rows of a kind


class ImportedFile:
    """A file that is being read: the reader of its format calls `add` for each piece."""

    def __init__(self, number: int, source: Source, reading: Reading, remembered: Remembered) -> None:
        """Args: the file's number, its bytes, how it is read, and what is known of it before."""
        self.source, self.reading, self.remembered = source, reading, remembered
        self.name, self._number = source.name, number
        self.facts = FileFacts(os.path.basename(source.name))
        self.maker = TableMaker(number, renames=not remembered.keeps_names)
        self._pairs = Pairs()
        self.signs = Signs()
        self._pids: set[int] = set()  # of slices with counters of a device

    def keep_names(self) -> None:
        """Keeps the file's names unchanged. It is called before the first rows."""
        self.remembered.keeps_names = True
        self.maker = TableMaker(self._number, renames=False)

    def find_dialect(self) -> None:
        """Finds the dialect, after all of the file was read.

        Raises:
            ReadAgain: names were changed that have to stay as they are.
        """
        facts = self.facts
        facts.dialect = self.signs.dialect(facts.members)
        facts.rank = self.signs.rank()
        if facts.dialect != FLEX and self.maker.renamed:
            self.remembered.keeps_names = True
            raise ReadAgain

    def finish(self) -> FileFacts:
        """Returns the facts about the file, after all of it was read."""
        counts = self.facts.counts
        self._pairs.finish()
        counts.dropped += self._pairs.dropped
        counts.merged["end of a slice"] += self._pairs.merged
        counts.merged = +counts.merged
        counts.dropped = +counts.dropped
        self.facts.ranks = sorted(self._pids)[:MOST_RANKS] if self.facts.dialect == FLEX else []
        if self.source.is_damaged:
            self.facts.problems.append("its compressed data are damaged or cut short")
        return self.facts

    def add(self, read: Read) -> None:
        """Adds the content of a piece.

        Raises:
            AnswerError: its counts do not add up.
        """
        counts = self.facts.counts
        counts.events += read.events
        counts.bad_bytes += read.bad_bytes
        kept = read.events - sum(read.dropped.values())
        if kept < 0:
            raise AnswerError
        if self.remembered.is_own:
            counts.dropped["own output of the AIU Trace Analyzer"] += read.events
        else:
            counts.dropped.update(read.dropped)
            self._add_rows(read.columns, kept)
        self.reading.tell(self.source.done)

    def _add_rows(self, columns: Columns, kept: int) -> None:
        counts = self.facts.counts
        found = self.maker.tables(columns)
        self.signs.add(columns, found)
        counts.cut_texts += columns.cut_texts
        counts.cut_args += columns.cut_args
        counts.bad_values += columns.bad_values
        if "slice" in found:
            kept -= len(found["slice"])
            found["slice"] = self._pairs.slices(found["slice"])
            counts.slices += len(found["slice"])
            self._add_pids(found["slice"])
            without = found["slice"].filter(pc.equal(found["slice"]["duration_ns"], 0))
            counts.zero_durations += len(without)
            counts.zero_durations_with_cycles += pc.sum(pc.not_equal(without["ts1"], without["ts5"])).as_py() or 0
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
            self.reading.add(kind, table)

    def _add_pids(self, slices: pa.Table) -> None:
        if len(self._pids) < MOST_RANKS:
            pids = pc.unique(slices.filter(pc.is_valid(slices["ts1"]))["pid"]).slice(0, MOST_RANKS)
            self._pids.update(pids.to_pylist())
