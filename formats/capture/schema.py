"""The schema of captures: each kind of row is described once, for writing, reading, counting, listing and redaction.

KINDS is in the order of the file's columns. docs/capture-format.md explains the fields.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntFlag
from typing import Any

import pyarrow as pa
from numpy.typing import NDArray

from iaprof.gpu.vendors import FIRST_REASONS, SAMPLE_ROWS

FORMAT = 12


class FieldFlags(IntFlag):
    """Properties of a field, as flags."""

    NULL = 1  # may be null in a row of its kind
    REPEATS = 2  # values repeat: dictionary-encoded, like all texts
    SPLIT = 4  # byte stream split encoding for list elements, whose upper bytes are alike
    WHOLE = 8  # a binary of any length that seldom repeats: plain encoding
    DROPPED = 16  # redaction sets it to null
    TIME = 32  # a time of a clock, which redaction moves


NULL, REPEATS, SPLIT, WHOLE, DROPPED, TIME = FieldFlags
_u16, _u32, _u64, _bool, _double = pa.uint16(), pa.uint32(), pa.uint64(), pa.bool_(), pa.float64()
_i64 = pa.int64()
_text, _binary = pa.string(), pa.binary()
WORDS = pa.list_(pa.field("element", _u64, nullable=False))
"""The type of lists of 64-bit words."""
_marks = pa.list_(pa.field("element", pa.uint8(), nullable=False))
_python = pa.list_(pa.field("element", pa.struct([("code", _u32), ("line", _u32), ("at", _u16)]), nullable=False))
_TEXTS = (_text, _binary)


@dataclass(frozen=True)
class Field:
    """A field of a kind of row: a child of the kind's struct column."""

    name: str
    type: pa.DataType
    flags: int = 0  # of FieldFlags
    since: int = 1  # the first format that has it
    identifies: str = ""  # what its texts name, if redaction replaces them: report/archive/redaction.py

    @property
    def is_text(self) -> bool:
        """Whether the reader returns it as a dictionary, so that a text that repeats a million times is stored once."""
        return self.type in _TEXTS

    @property
    def is_dictionary(self) -> bool:
        """Whether it is dictionary-encoded text in the file."""
        return self.is_text and not self.flags & WHOLE


@dataclass(frozen=True)
class RowKind:
    """A kind of row."""

    name: str
    fields: tuple[Field, ...]
    since: int = 1  # the first format that has it
    view: str = ""  # name of its table in `iaprof query`; "" if it has none
    description: str = ""  # of the rows, in `iaprof query`
    count: str = ""  # key of their number in `iaprof info --json`; "" if not listed
    label: str = ""  # label of that number in `iaprof info`; "" if not listed
    recorded: bool = True  # whether recorders write it, not only imports

    @property
    def struct(self) -> pa.StructType:
        """The type of the kind's column."""
        return pa.struct([(each.name, each.type) for each in self.fields])


READ_COLUMNS = ("time_ns", "begin_ns", "stream")
"""The first fields of all rows of samples: when the read was made, since when its samples can be, the stream."""
SAMPLE_KINDS = tuple(rows.kind for rows in SAMPLE_ROWS)
"""The kinds of rows of samples, one for each vendor."""
ROW_KINDS = (
    *(
        RowKind(
            rows.kind,
            (
                Field("time_ns", _u64, TIME),
                Field("begin_ns", _u64, TIME),
                Field("stream", _u16, REPEATS),
                *(
                    Field(name, WORDS, SPLIT if number < rows.required else NULL | SPLIT)
                    for number, name in enumerate(rows.columns)
                ),
            ),
            since=rows.since,
        )
        for rows in SAMPLE_ROWS
    ),
    RowKind(
        "launch",
        (
            Field("time_ns", _u64, TIME),
            Field("pid", _u32, REPEATS),
            Field("tid", _u32, REPEATS),
            Field("cpu", _u32, REPEATS),
            Field("comm", _text, identifies="process"),
            Field("iba", _u64, REPEATS),
            Field("address", _u64, REPEATS),
            Field("size", _u64, REPEATS),
            Field("stack", _u64, REPEATS),
            Field("name", _text, identifies="kernel"),
            Field("flags", _u32, REPEATS),
            Field("list", _u64, NULL | REPEATS, since=8),
            Field("correlation", _u64, NULL, since=11),
        ),
        view="launches",
        description="each launch of a kernel",
        count="launches",
        label="launches",
    ),
    RowKind(
        "execution",
        (
            Field("time_ns", _u64, TIME),
            Field("end_ns", _u64, TIME),
            Field("pid", _u32, REPEATS),
            Field("stream", _u16, REPEATS),
            Field("correlation", _u64),
            Field("address", _u64, REPEATS),
            Field("queue", _u64, REPEATS),
        ),
        since=11,
        view="executions",
        description="when launches ran on a GPU of NVIDIA's",
        count="timed_executions",
        label="timed executions",
    ),
    RowKind(
        "gpu_job",
        (
            Field("time_ns", _u64, TIME),
            Field("end_ns", _u64, NULL | TIME),
            Field("queued_ns", _u64, NULL | TIME),
            Field("pid", _u32, REPEATS),
            Field("queue", _text, NULL),
            Field("device", _text, NULL),
            Field("at_once", _bool),
        ),
        since=12,
        view="gpu_jobs",
        description="when the kernel's scheduler had given a process's work to a GPU",
        count="gpu_jobs",
        label="GPU jobs",
    ),
    RowKind(
        "command_list",
        (
            Field("time_ns", _u64, TIME),
            Field("pid", _u32, REPEATS),
            Field("tid", _u32, REPEATS),
            Field("cpu", _u32, REPEATS),
            Field("comm", _text, identifies="process"),
            Field("event", _text),
            Field("list", _u64, REPEATS),
            Field("queue", _u64, REPEATS),
            Field("stack", _u64, REPEATS),
            Field("flags", _u32, REPEATS),
        ),
        since=8,
        view="command_lists",
        description="executions, resets and other events of command lists",
    ),
    RowKind(
        "stack",
        (
            Field("id", _u64),
            Field("time_ns", _u64, TIME),
            Field("pid", _u32, REPEATS),
            Field("truncated", _bool),
            Field("ips", WORDS),
            Field("ended", _text, NULL, since=6),
            Field("marks", _marks, NULL, since=6),
            Field("python", _python, NULL, since=7),
            Field("python_ended", _text, NULL, since=7),
        ),
        view="stacks",
        description="the distinct stacks, which launches and CPU samples name by id",
        count="stacks",
        label="stacks",
    ),
    RowKind(
        "transfer",
        (
            Field("time_ns", _u64, TIME),
            Field("pid", _u32, REPEATS),
            Field("tid", _u32, REPEATS),
            Field("cpu", _u32, REPEATS),
            Field("comm", _text, identifies="process"),
            Field("stack", _u64, REPEATS),
            Field("function", _text),
            Field("bytes", _u64, NULL | REPEATS),
            Field("flags", _u32, REPEATS),
        ),
        since=8,
        view="transfers",
        description="each call that copies or fills memory",
        count="transfers",
        label="transfers",
    ),
    RowKind(
        "python_code",
        (
            Field("id", _u32),
            Field("name", _text, identifies="function"),
            Field("file", _text, identifies="path"),
            Field("first_line", _u32),
        ),
        since=7,
        view="python_codes",
        description="the code objects of Python, which frames of stacks name by id",
        count="python_codes",
        label="Python code",
    ),
    RowKind(
        "mapping",
        (
            Field("time_ns", _u64, TIME),
            Field("pid", _u32, REPEATS),
            Field("start", _u64),
            Field("length", _u64),
            Field("offset", _u64),
            Field("path", _text, identifies="path"),
            Field("build_id", _binary, NULL),
            Field("inode", _u64, NULL | DROPPED, since=3),
        ),
        view="mappings",
        description="which files were mapped where",
        count="mappings",
        label="mappings",
    ),
    RowKind(
        "process",
        (
            Field("time_ns", _u64, TIME),
            Field("pid", _u32),
            Field("tid", _u32),
            Field("ppid", _u32, NULL),
            Field("event", _text),
            Field("comm", _text, NULL, identifies="process"),
            Field("ns_pid", _u32, NULL | REPEATS, since=2),
            Field("cgroup", _text, NULL, since=2, identifies="path"),
            Field("container", _text, NULL, since=2, identifies="container"),
            Field("uid", _u32, NULL | DROPPED, since=3),
            Field("gid", _u32, NULL | DROPPED, since=3),
        ),
        view="processes",
        description="what became of processes and threads",
        count="process_events",
        label="process events",
    ),
    RowKind(
        "kernel",
        (
            Field("time_ns", _u64, TIME),
            Field("pid", _u32),
            Field("path", _text, identifies="path"),
            Field("digest", _binary),
            Field("size", _u64),
            Field("elf", _binary, NULL | WHOLE),
            Field("base", _u64, NULL, since=11),
        ),
        count="modules",
        label="GPU modules",
    ),
    RowKind(
        "metric",
        (
            Field("time_ns", _u64, TIME),
            Field("stream", _u16, NULL | REPEATS),
            Field("pid", _u32, NULL | REPEATS, since=2),
            Field("name", _text),
            Field("value", _double),
        ),
        view="metrics",
        description="frequencies, powers, temperatures and the like, over time",
        count="metrics",
        label="metrics",
    ),
    RowKind(
        "cpu_sample",
        (
            Field("time_ns", _u64, TIME),
            Field("pid", _u32, REPEATS),
            Field("tid", _u32, REPEATS),
            Field("cpu", _u32, REPEATS),
            Field("stack", _u64, REPEATS),
            Field("kernel_stack", _u64, REPEATS),
            Field("left_out", _text, NULL, since=10),
        ),
        since=2,
        view="cpu_samples",
        description="what the CPUs did meanwhile",
        count="cpu_samples",
        label="CPU samples",
    ),
    RowKind(
        "wait",
        (
            Field("time_ns", _u64, TIME),
            Field("end_ns", _u64, TIME),
            Field("waited_ns", _u64),
            Field("count", _u64, REPEATS),
            Field("pid", _u32, REPEATS),
            Field("tid", _u32, REPEATS),
            Field("comm", _text, identifies="process"),
            Field("function", _text),
            Field("handle", _u64, REPEATS),
            Field("stack", _u64, REPEATS),
            Field("flags", _u32, REPEATS),
        ),
        since=8,
        view="waits",
        description="waits for the GPU: who, how long, from where",
        count="waits",
        label="wait rows",
    ),
    RowKind(
        "module",
        (
            Field("id", _u32),
            Field("what", _text),
            Field("path", _text),
            Field("build_id", _binary, NULL),
            Field("inode", _u64),
            Field("pid", _u32),
            Field("source", _text),
            Field("problem", _text),
            Field("frame_pointers", _bool, NULL),
            Field("outermost", WORDS, NULL, since=5),
            Field("no_calls", WORDS, NULL, since=5),
        ),
        since=3,
        view="modules",
        description="the files that have CPU frames",
        count="named_modules",
    ),
    RowKind(
        "symbol",
        (
            Field("module", _u32),
            Field("address", _u64),
            Field("size", _u64),
            Field("depth", _u16),
            Field("function", _text),
            Field("file", _text),
            Field("line", _u32),
        ),
        since=3,
        view="symbols",
        description="the names of CPU frames",
        count="symbols",
        label="symbols",
    ),
    RowKind(
        "sample",
        (
            Field("time_ns", _u64, TIME),
            Field("comm", _text, identifies="sampled process"),
            Field("pid", _u32, REPEATS),
            Field("stack", _text, identifies="stack"),
            Field("address", _u64, REPEATS),
            Field("kernel", _text, identifies="sampled kernel"),
            Field("file", _text, identifies="path"),
            Field("offset", _u64),
            Field("mnemonic", _text),
            *(Field(reason, _u64) for reason in FIRST_REASONS),
        ),
        since=4,
        count="imported_samples",
        label="imported rows",
        recorded=False,
    ),
    RowKind(
        "slice",
        (
            Field("time_ns", _i64, TIME),
            Field("duration_ns", _i64),
            Field("file", _u16, REPEATS),
            Field("pid", _i64, REPEATS),
            Field("tid", _i64, REPEATS),
            Field("name", _text, identifies="slice"),
            Field("category", _text, NULL, identifies="category"),
            *(Field(f"ts{number}", _i64, NULL) for number in range(1, 6)),
            Field("power", _i64, NULL),
            Field("bytes", _i64, NULL | REPEATS),
            Field("correlation", _i64, NULL),
            Field("device", _i64, NULL | REPEATS),
            Field("external_id", _i64, NULL),
            Field("python_id", _i64, NULL),
            Field("bandwidth", _double, NULL),
            Field("group", _text, NULL, identifies="group"),
            Field("type", _text, NULL, identifies="type"),
            Field("peers", _text, NULL, identifies="peers"),
            Field("args", _text, NULL | WHOLE | DROPPED),
        ),
        since=9,
        view="slices",
        description="what took time, of imported traces",
        count="slices",
        label="slices",
        recorded=False,
    ),
    RowKind(
        "counter",
        (
            Field("time_ns", _i64, TIME),
            Field("file", _u16, REPEATS),
            Field("pid", _i64, REPEATS),
            Field("tid", _i64, REPEATS),
            Field("name", _text, identifies="slice"),
            Field("category", _text, NULL, identifies="category"),
            Field("series", _text, identifies="series"),
            Field("value", _double),
        ),
        since=9,
        view="counters",
        description="values of counters, of imported traces",
        count="counter_values",
        label="counter values",
        recorded=False,
    ),
    *(
        RowKind(
            kind,
            (
                Field("time_ns", _i64, TIME),
                Field("file", _u16, REPEATS),
                Field("pid", _i64, REPEATS),
                Field("tid", _i64, REPEATS),
                Field("phase", _text, identifies="phase"),
                Field("name", _text, identifies="slice"),
                Field("category", _text, NULL, identifies="category"),
                Field("id", _i64, NULL),
                Field("args", _text, NULL | WHOLE | DROPPED),
            ),
            since=9,
            view=f"{kind}s",
            description=description,
            count=f"{kind}s",
            label=label,
            recorded=False,
        )
        for kind, description, label in (
            ("flow", "starts, steps and ends of flows, of imported traces", "flow events"),
            ("instant", "all other events of imported traces", "other events"),
        )
    ),
    RowKind(
        "loss",
        (
            Field("begin_ns", _u64, TIME),
            Field("time_ns", _u64, TIME),
            Field("source", _text),
            Field("what", _text),
            Field("count", _u64, NULL),
            Field("detail", _text),
        ),
        view="losses",
        description="what was lost while recording",
    ),
)
KINDS: dict[str, pa.StructType] = {kind.name: kind.struct for kind in ROW_KINDS}
"""The type of the struct column of each kind."""
RECORDED = frozenset(kind.name for kind in ROW_KINDS if kind.recorded)
"""The kinds that recorders write."""
FIELDS = {f"{kind.name}.{field.name}": field for kind in ROW_KINDS for field in kind.fields}
"""Fields by `KIND.FIELD`."""
SCHEMA = pa.schema(
    [
        pa.field("kind", _text, nullable=False),
        pa.field("part", _u16),  # null unless merged
        *(pa.field(name, kind) for name, kind in KINDS.items()),
    ]
)
NULLABLE = {name for name, field in FIELDS.items() if field.flags & NULL}
"""The fields that may be null in a row of their kind, as `KIND.FIELD`."""
PARTS_SINCE = 4


def make_rows(kind: str, columns: Mapping[str, pa.Array | NDArray[Any]]) -> pa.StructArray:
    """Makes rows of a kind.

    Args:
        kind: a key of KINDS.
        columns: by the names of all fields of the kind: arrays of equal lengths and of the fields' types; texts may be
            dictionaries.

    Raises:
        ArrowTypeError, ArrowInvalid: a column has another type or length.
        TypeError: a field is missing, or the kind has none of that name.
    """
    fields = list(KINDS[kind])
    if columns.keys() != {field.name for field in fields}:
        wrong = sorted(columns.keys() ^ {field.name for field in fields})
        raise TypeError(f"fields of {kind} rows are missing or unknown: {', '.join(wrong)}")
    arrays = [x if isinstance(x := columns[field.name], pa.Array) else pa.array(x) for field in fields]
    fields = [
        field.with_type(array.type) if array.type == pa.dictionary(pa.int32(), field.type) else field
        for field, array in zip(fields, arrays, strict=True)
    ]
    return pa.StructArray.from_arrays(arrays, fields=fields)


def sorted_kinds(kinds: Sequence[RowKind], first: Sequence[str]) -> list[RowKind]:
    """Sorts kinds: those in `first` in that order, then all others."""
    place = {name: number for number, name in enumerate(first)}
    return sorted(kinds, key=lambda kind: place.get(kind.name, len(place)))


def absent_in(format_: int) -> set[str]:
    """The kinds, and the fields as `KIND.FIELD`, that a format does not have: it has no such rows, or null values."""
    later = {kind.name for kind in ROW_KINDS if kind.since > format_}
    later |= {name for name, field in FIELDS.items() if field.since > format_}
    return later | ({"part"} if format_ < PARTS_SINCE else set())
