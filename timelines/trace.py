"""A trace as columns, on which stages work and which outputs show; its texts, and the messages of stages about it.

Times and durations are in ns. Times are integers: float64 resolves only 0.2 us at today's time since 1970. Durations
are float64, as cycles at some MHz are not whole ns.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from iaprof.formats.distinct import groups
from iaprof.timelines.columns import ABSENT as ABSENT, Columns as Columns, Repeated, chunks

NO_TEXT = -1  # the code of an absent text


class Texts:
    """Texts with codes, from 0 on. Regular expressions are matched once for each text, not for each event."""

    def __init__(self) -> None:
        """Starts without texts."""
        self._texts = pa.array([], pa.large_string())
        self._matches: dict[str, NDArray[np.bool_]] = {}  # by pattern
        self._codes: dict[str, int] = {}  # of texts that were asked for one at a time

    def __len__(self) -> int:
        return len(self._texts)

    def __getitem__(self, code: int) -> str:
        return str(self._texts[code])

    @property
    def values(self) -> pa.LargeStringArray:
        """All texts, by code."""
        return self._texts

    def codes(self, texts: pa.Array | pa.ChunkedArray | Sequence[str | None]) -> NDArray[np.int32]:
        """Returns the codes of texts, and adds those that are new; NO_TEXT for nulls."""
        array = texts if isinstance(texts, pa.Array | pa.ChunkedArray) else pa.array(texts, pa.large_string())
        if isinstance(array, pa.ChunkedArray):
            array = pa.concat_arrays(array.unify_dictionaries().chunks) if array.num_chunks else array.combine_chunks()
        encoded = array if pa.types.is_dictionary(array.type) else pc.dictionary_encode(array)
        distinct = encoded.dictionary.cast(pa.large_string())
        known = self._known(distinct)
        new = pc.unique(distinct.filter(pc.is_null(known)))
        if len(new):
            self._texts = pa.concat_arrays([self._texts, new])
            known = self._known(distinct)
        if not len(known):
            return np.full(len(encoded), NO_TEXT, np.int32)
        places = pc.fill_null(encoded.indices.cast(pa.int64()), 0).to_numpy(zero_copy_only=False)
        codes: NDArray[np.int32] = known.to_numpy(zero_copy_only=False).astype(np.int32)[places]
        codes[pc.is_null(encoded.indices).to_numpy(zero_copy_only=False)] = NO_TEXT
        return codes

    def _known(self, distinct: pa.LargeStringArray) -> pa.Int32Array:
        """Returns the codes of distinct texts; null for new ones."""
        if 4 * len(distinct) >= len(self._texts):
            return pc.index_in(distinct, value_set=self._texts)
        # Hashing the fewer ones, and looking all others up, takes a tenth of the time.
        places = pc.index_in(self._texts, value_set=distinct)
        found = np.flatnonzero(pc.is_valid(places).to_numpy(zero_copy_only=False))
        codes = np.full(len(distinct), NO_TEXT, np.int32)
        codes[places.take(pa.array(found)).to_numpy(zero_copy_only=False)] = found
        return pa.array(codes, mask=codes < 0)

    def code(self, text: str) -> int:
        """Returns the code of a text, and adds it if it is new."""
        if text not in self._codes:
            self._codes[text] = int(self.codes([text])[0])
        return self._codes[text]

    def matches(self, codes: NDArray[np.int32], pattern: str) -> NDArray[np.bool_]:
        """Tells for each code whether a regular expression (RE2) is found in its text; False for NO_TEXT."""
        found = self._matches.get(pattern, np.zeros(1, bool))
        known = len(found) - 1  # the last one is NO_TEXT's
        if known < len(self._texts):
            new = pc.match_substring_regex(self._texts[known:], pattern).to_numpy(zero_copy_only=False)
            self._matches[pattern] = found = np.concatenate([found[:-1], new, [False]])
        return np.asarray(found[codes], bool)

    def replaced(self, codes: NDArray[np.int32], pattern: str, replacement: str) -> NDArray[np.int32]:
        """Returns the codes of texts in which all matches of a regular expression (RE2) are replaced."""
        used = np.zeros(len(self._texts), bool)
        used[codes[codes >= 0]] = True
        used[used] = self.matches(np.flatnonzero(used).astype(np.int32), pattern)
        changed = np.flatnonzero(used)
        if not len(changed):
            return codes
        new = self.codes(pc.replace_substring_regex(self._texts.take(pa.array(changed)), pattern, replacement))
        table = np.arange(len(self._texts), dtype=np.int32)
        table[changed] = new
        return np.where(codes >= 0, table[np.maximum(codes, 0)], NO_TEXT).astype(np.int32)

    def taken(self, codes: NDArray[np.int32]) -> pa.LargeStringArray:
        """Returns the texts of codes; null for NO_TEXT."""
        return self._texts.take(pa.array(codes, mask=codes < 0))


class Level(IntEnum):
    """How important a message is."""

    NOTE = 0
    WARNING = 1


@dataclass(frozen=True)
class Message:
    """A sentence about a trace."""

    level: Level
    stage: str  # its identifier, such as OVC
    text: str


@dataclass
class Messages:
    """The messages of a trace, in order."""

    said: list[Message] = field(default_factory=list)

    def warn(self, stage: str, text: str) -> None:
        """Adds a warning."""
        self.said.append(Message(Level.WARNING, stage, text))

    def note(self, stage: str, text: str) -> None:
        """Adds a finding."""
        self.said.append(Message(Level.NOTE, stage, text))


MADE_OF_TEXT = 1 << 48
"""Pids, tids and identifiers from here on stand for texts: see timelines/reading/imported_file.py."""
MADE = -1
"""The row of an event that a stage made."""
MOST_RANK = 1 << 31
"""Ranks are less than this."""
HOST_PIDS = 1000
"""In FLEX files, the pid of a host's events is the rank plus this."""


class Dialect(StrEnum):
    """The tool that wrote a file, which tells what its events mean. Only in FLEX files, a pid is a rank."""

    FLEX = "flex"  # of the AIU's runtime
    TORCH = "torch"  # of PyTorch's profiler
    TORCH_NPU = "torch_npu"  # of PyTorch's profiler for Ascend NPUs
    UNITRACE = "unitrace"  # of Intel's tool for GPUs
    ROCPROF = "rocprof"  # of AMD's tools for GPUs
    UNKNOWN = "unknown"


def dialect_of(name: object) -> Dialect:
    """Returns the dialect in an untrusted header; FLEX if there is no such dialect."""
    return Dialect(name) if isinstance(name, str) and name in set(Dialect) else Dialect.FLEX


@dataclass(frozen=True)
class TraceFile:
    """One of the files that a trace was imported from: a job."""

    name: str  # without its folder
    dialect: Dialect
    rank: int  # of TORCH files; 0 if the file does not say
    devices: tuple[Mapping[str, Any], ...] = ()  # deviceProperties
    members: Mapping[str, Any] = field(default_factory=dict)  # other members of the file, beside the events
    is_output: bool = False  # iaprof wrote its events, see own_output.py


@dataclass
class Slices(Columns):
    """Slices: events with a duration (phase X), in n rows. Texts are codes of Trace.texts."""

    file: NDArray[np.int32]  # index into Trace.files
    pid: NDArray[np.int64]
    tid: NDArray[np.int64]
    name: NDArray[np.int32]
    category: NDArray[np.int32]
    start: NDArray[np.int64]  # ns
    duration: NDArray[np.float64]  # ns
    counters: NDArray[np.int64]  # [n, 5]: TS1 to TS5, cycles; ABSENT
    power: NDArray[np.int64]  # the charge counter; ABSENT
    bytes: NDArray[np.int64]  # ABSENT
    bandwidth: NDArray[np.float64]  # GB/s, as a copy says; NaN
    correlation: NDArray[np.int64]  # ABSENT
    device: NDArray[np.int64]  # ABSENT
    group: NDArray[np.int32]  # args.CollGroup
    type: NDArray[np.int32]  # args.Type of a collective's event
    peers: NDArray[np.int32]  # args.Peer or args.Peers
    row: NDArray[np.int64]  # number of its `slice` row in the capture; MADE
    extra: dict[str, NDArray[Any]] = field(default_factory=dict)
    """Further members of args, by name: numbers, bool, or codes of texts as int32."""

    @property
    def end(self) -> NDArray[np.float64]:
        """When they end, in ns; float64, so for differences of close times use start and duration."""
        return self.start + self.duration

    @property
    def has_counters(self) -> NDArray[np.bool_]:
        """Which slices have TS1: in FLEX files, those of devices."""
        return np.asarray(self.counter(0) != ABSENT, bool)

    def counter(self, number: int) -> NDArray[np.int64]:
        """Returns one of the counters, 0 for TS1, which takes less memory than all five."""
        counters = self.column("counters")
        return counters.column(number) if isinstance(counters, Repeated) else self.counters[:, number]

    def counters_by(self, indexes: NDArray[np.int8]) -> NDArray[np.int64]:
        """Returns one counter of each slice, by an index for each: int64[n]."""
        counters = self.column("counters")
        if isinstance(counters, Repeated):
            distinct, found = counters.distinct(), np.empty(len(self), np.int64)
            for chunk in chunks(len(self)):
                found[chunk] = distinct[counters.codes[chunk], indexes[chunk]]
            return found
        return np.asarray(self.counters[np.arange(len(self)), indexes])

    def shared_counters(self, rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]] | None:
        """Returns the distinct counters of some slices, as several slices of an operation have the same.

        Returns:
            int64[rows], the number of each row's counters, and int64[m], rows that have them; None if m is not small.
        """
        counters = self.column("counters")
        if not isinstance(counters, Repeated):
            return None
        number, first = groups(counters.codes[rows].astype(np.int64))
        return (number, rows[first]) if 2 * len(first) <= len(rows) else None

    def distinct_counters(self) -> tuple[NDArray[np.int64], NDArray[Any] | None]:
        """Returns counters that slices have, int64[m, 5], and the row of each slice's; None if each has its own row."""
        counters = self.column("counters")
        if isinstance(counters, Repeated):
            return counters.distinct(), counters.codes
        return self.counters, None

    def set_distinct_counters(self, counters: NDArray[np.int64]) -> None:
        """Replaces what `distinct_counters` returned."""
        stored = self.column("counters")
        self.counters = stored.with_table(counters) if isinstance(stored, Repeated) else counters  # type: ignore[assignment]

    @classmethod
    def of(cls, count: int, **columns: NDArray[Any]) -> Slices:
        """Returns rows with these columns. Other columns are absent, or 0, and `row` is MADE."""
        made: dict[str, NDArray[Any]] = {}
        for name in ("file", "name", "category", "group", "type", "peers"):
            made[name] = np.full(count, 0 if name == "file" else NO_TEXT, np.int32)
        for name in ("pid", "tid", "start"):
            made[name] = np.zeros(count, np.int64)
        for name in ("power", "bytes", "correlation", "device"):
            made[name] = np.full(count, ABSENT, np.int64)
        made |= {
            "duration": np.zeros(count), "bandwidth": np.full(count, np.nan),
            "counters": np.full((count, 5), ABSENT, np.int64), "row": np.full(count, MADE, np.int64),
        }  # fmt: skip
        made.update(columns)
        return cls(**made)  # type: ignore[arg-type]  # `extra` has its default


@dataclass
class Points(Columns):
    """Values of counters, events of phase C."""

    file: NDArray[np.int32]
    pid: NDArray[np.int64]
    tid: NDArray[np.int64]
    name: NDArray[np.int32]  # the track
    category: NDArray[np.int32]
    series: NDArray[np.int32]  # the member of args, such as Watts
    time: NDArray[np.int64]  # ns
    value: NDArray[np.float64]
    row: NDArray[np.int64]  # number of its `counter` row in the capture; MADE
    extra: dict[str, NDArray[Any]] = field(default_factory=dict)


@dataclass
class Marks(Columns):
    """Events without a duration: flows, instants, metadata, and the ends of asynchronous events."""

    file: NDArray[np.int32]
    pid: NDArray[np.int64]
    tid: NDArray[np.int64]
    phase: NDArray[np.int32]  # code of its letter: s t f i b e n M
    name: NDArray[np.int32]
    category: NDArray[np.int32]
    id: NDArray[np.int64]  # of flows and asynchronous events; ABSENT
    time: NDArray[np.int64]  # ns
    row: NDArray[np.int64]  # number of its row in the capture; MADE
    extra: dict[str, NDArray[Any]] = field(default_factory=dict)


@dataclass(frozen=True)
class Power:
    """Mean power between samples of charge, in n intervals: by pid and time."""

    file: NDArray[np.int32]
    pid: NDArray[np.int64]
    start: NDArray[np.int64]  # ns
    end: NDArray[np.int64]  # ns
    watts: NDArray[np.float64]  # NaN where it cannot be true

    def __len__(self) -> int:
        return len(self.start)


@dataclass
class Trace:
    """A trace with all its events, and the results of stages."""

    files: list[TraceFile]
    texts: Texts
    slices: Slices
    points: Points
    flows: Marks
    instants: Marks
    messages: Messages = field(default_factory=Messages)
    dropped: Counter[str] = field(default_factory=Counter)  # events that stages removed, by reason
    merged: Counter[str] = field(default_factory=Counter)  # events that were merged into another one, by reason
    made: Counter[str] = field(default_factory=Counter)  # events that stages made, by what they are
    tables: dict[str, pa.Table] = field(default_factory=dict)  # by name, such as "summary"
    power: Power | None = None  # by the counter TS4, after a stage computed it
    slices_without_time: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    """Rows of the capture, see placeholders.py."""
    points_without_time: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))

    def is_torch(self, columns: Slices | Points | Marks) -> NDArray[np.bool_]:
        """Tells whether events are of PyTorch's or other profilers' files, not of FLEX ones."""
        files = self.torch_files if self.files else np.zeros(1, bool)
        return np.asarray(files[columns.file], bool)

    @property
    def torch_files(self) -> NDArray[np.bool_]:
        """Tells which files are PyTorch's or other profilers', not FLEX: bool[files]."""
        return np.array([file.dialect is not Dialect.FLEX for file in self.files], bool)

    @property
    def is_output(self) -> bool:
        """Whether iaprof wrote the trace: stages do not change its events."""
        return any(file.is_output for file in self.files)

    @property
    def job_names(self) -> list[str]:
        """The names of the files, `args.jobname`; a name of several files is followed by the file's number."""
        names = Counter(file.name for file in self.files)
        return [
            f"{file.name}({number})" if names[file.name] > 1 else file.name for number, file in enumerate(self.files)
        ]

    def keep(self, mask: NDArray[np.bool_], reason: str) -> None:
        """Drops the slices that are not in the mask, and counts them."""
        if count := int(len(mask) - mask.sum()):
            self.dropped[reason] += count
            self.slices.keep(mask)

    def pack(self) -> None:
        """Packs the columns that stages have set."""
        for columns in (self.slices, self.points, self.flows, self.instants):
            columns.pack()
