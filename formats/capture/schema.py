"""The schema of captures: each kind of row is described once, for writing, reading, counting, listing and redaction.

KINDS is in the order of the file's columns. docs/capture-format.md explains the fields.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntFlag

import pyarrow as pa

from iaprof.gpu.intel.reasons import REASONS

FORMAT = 8


class How(IntFlag):
    """Properties of a field, as flags."""

    NULL = 1  # may be null in a row of its kind
    REPEATS = 2  # values repeat: dictionary-encoded, like all texts
    SPLIT = 4  # byte stream split encoding for list elements, whose upper bytes are alike
    WHOLE = 8  # a binary of any length that seldom repeats: plain encoding
    DROPPED = 16  # redaction sets it to null


NULL, REPEATS, SPLIT, WHOLE, DROPPED = How
_u16, _u32, _u64, _bool, _double = pa.uint16(), pa.uint32(), pa.uint64(), pa.bool_(), pa.float64()
_text, _binary = pa.string(), pa.binary()
_words = pa.list_(pa.field("element", _u64, nullable=False))
_marks = pa.list_(pa.field("element", pa.uint8(), nullable=False))
_python = pa.list_(pa.field("element", pa.struct([("code", _u32), ("line", _u32), ("at", _u16)]), nullable=False))
_TEXTS = (_text, _binary)


@dataclass(frozen=True)
class Member:
    """A field of a kind of row: a child of the kind's struct column."""

    name: str
    type: pa.DataType
    how: int = 0  # flags, see How
    since: int = 1  # the first format that has it
    says: str = ""  # what its texts name, if redaction replaces them: report/redaction.py

    @property
    def is_text(self) -> bool:
        """Whether the reader returns it as a dictionary, so that a text that repeats a million times is stored once."""
        return self.type in _TEXTS

    @property
    def is_dictionary(self) -> bool:
        """Whether it is dictionary-encoded text in the file."""
        return self.is_text and not self.how & WHOLE


@dataclass(frozen=True)
class Kind:
    """A kind of row."""

    name: str
    members: tuple[Member, ...]
    since: int = 1  # the first format that has it
    view: str = ""  # name of its table in `iaprof query`; "" if it has none
    about: str = ""  # description of the rows
    count: str = ""  # key of their number in `iaprof info --json`; "" if not listed
    label: str = ""  # label of that number in `iaprof info`; "" if not listed

    @property
    def struct(self) -> pa.StructType:
        """The type of the kind's column."""
        return pa.struct([(each.name, each.type) for each in self.members])


ROWS = (
    Kind(
        "stall",
        (
            Member("time_ns", _u64),
            Member("begin_ns", _u64),
            Member("stream", _u16, REPEATS),
            Member("w0", _words, SPLIT),
            Member("w1", _words, SPLIT),
            Member("w2", _words, NULL | SPLIT),
        ),
        count="stall_reads",
    ),
    Kind(
        "launch",
        (
            Member("time_ns", _u64),
            Member("pid", _u32, REPEATS),
            Member("tid", _u32, REPEATS),
            Member("cpu", _u32, REPEATS),
            Member("comm", _text, says="process"),
            Member("iba", _u64, REPEATS),
            Member("address", _u64, REPEATS),
            Member("size", _u64, REPEATS),
            Member("stack", _u64, REPEATS),
            Member("name", _text, says="kernel"),
            Member("flags", _u32, REPEATS),
            Member("list", _u64, NULL | REPEATS, since=8),
        ),
        view="launches",
        about="each launch of a kernel",
        count="launches",
        label="launches",
    ),
    Kind(
        "command_list",
        (
            Member("time_ns", _u64),
            Member("pid", _u32, REPEATS),
            Member("tid", _u32, REPEATS),
            Member("cpu", _u32, REPEATS),
            Member("comm", _text, says="process"),
            Member("event", _text),
            Member("list", _u64, REPEATS),
            Member("queue", _u64, REPEATS),
            Member("stack", _u64, REPEATS),
            Member("flags", _u32, REPEATS),
        ),
        since=8,
        view="command_lists",
        about="when command lists were executed, closed, reset or destroyed",
    ),
    Kind(
        "stack",
        (
            Member("id", _u64),
            Member("time_ns", _u64),
            Member("pid", _u32, REPEATS),
            Member("truncated", _bool),
            Member("ips", _words),
            Member("ended", _text, NULL, since=6),
            Member("marks", _marks, NULL, since=6),
            Member("python", _python, NULL, since=7),
            Member("python_ended", _text, NULL, since=7),
        ),
        view="stacks",
        about="the distinct stacks, which launches and CPU samples name by id",
        count="stacks",
        label="stacks",
    ),
    Kind(
        "transfer",
        (
            Member("time_ns", _u64),
            Member("pid", _u32, REPEATS),
            Member("tid", _u32, REPEATS),
            Member("cpu", _u32, REPEATS),
            Member("comm", _text, says="process"),
            Member("stack", _u64, REPEATS),
            Member("function", _text),
            Member("bytes", _u64, NULL | REPEATS),
            Member("flags", _u32, REPEATS),
        ),
        since=8,
        view="transfers",
        about="each call that copies or fills memory",
        count="transfers",
        label="transfers",
    ),
    Kind(
        "python_code",
        (
            Member("id", _u32),
            Member("name", _text, says="function"),
            Member("file", _text, says="path"),
            Member("first_line", _u32),
        ),
        since=7,
        view="python_codes",
        about="the code objects of Python, which frames of stacks name by id",
        count="python_codes",
        label="Python code",
    ),
    Kind(
        "mapping",
        (
            Member("time_ns", _u64),
            Member("pid", _u32, REPEATS),
            Member("start", _u64),
            Member("length", _u64),
            Member("offset", _u64),
            Member("path", _text, says="path"),
            Member("build_id", _binary, NULL),
            Member("inode", _u64, NULL | DROPPED, since=3),
        ),
        view="mappings",
        about="which files were mapped where",
        count="mappings",
        label="mappings",
    ),
    Kind(
        "process",
        (
            Member("time_ns", _u64),
            Member("pid", _u32),
            Member("tid", _u32),
            Member("ppid", _u32, NULL),
            Member("event", _text),
            Member("comm", _text, NULL, says="process"),
            Member("ns_pid", _u32, NULL | REPEATS, since=2),
            Member("cgroup", _text, NULL, since=2, says="path"),
            Member("container", _text, NULL, since=2, says="container"),
            Member("uid", _u32, NULL | DROPPED, since=3),
            Member("gid", _u32, NULL | DROPPED, since=3),
        ),
        view="processes",
        about="what became of processes and threads",
        count="process_events",
        label="process events",
    ),
    Kind(
        "kernel",
        (
            Member("time_ns", _u64),
            Member("pid", _u32),
            Member("path", _text, says="path"),
            Member("digest", _binary),
            Member("size", _u64),
            Member("elf", _binary, NULL | WHOLE),
        ),
        count="modules",
        label="GPU modules",
    ),
    Kind(
        "metric",
        (
            Member("time_ns", _u64),
            Member("stream", _u16, NULL | REPEATS),
            Member("pid", _u32, NULL | REPEATS, since=2),
            Member("name", _text),
            Member("value", _double),
        ),
        view="metrics",
        about="frequencies, powers, temperatures and the like, over time",
        count="metrics",
        label="metrics",
    ),
    Kind(
        "cpu_sample",
        (
            Member("time_ns", _u64),
            Member("pid", _u32, REPEATS),
            Member("tid", _u32, REPEATS),
            Member("cpu", _u32, REPEATS),
            Member("stack", _u64, REPEATS),
            Member("kernel_stack", _u64, REPEATS),
        ),
        since=2,
        view="cpu_samples",
        about="what the CPUs did meanwhile",
        count="cpu_samples",
        label="CPU samples",
    ),
    Kind(
        "wait",
        (
            Member("time_ns", _u64),
            Member("end_ns", _u64),
            Member("waited_ns", _u64),
            Member("count", _u64, REPEATS),
            Member("pid", _u32, REPEATS),
            Member("tid", _u32, REPEATS),
            Member("comm", _text, says="process"),
            Member("function", _text),
            Member("handle", _u64, REPEATS),
            Member("stack", _u64, REPEATS),
            Member("flags", _u32, REPEATS),
        ),
        since=8,
        view="waits",
        about="waits for the GPU: who, how long, from where",
        count="waits",
        label="wait rows",
    ),
    Kind(
        "module",
        (
            Member("id", _u32),
            Member("what", _text),
            Member("path", _text),
            Member("build_id", _binary, NULL),
            Member("inode", _u64),
            Member("pid", _u32),
            Member("source", _text),
            Member("problem", _text),
            Member("frame_pointers", _bool, NULL),
            Member("outermost", _words, NULL, since=5),
            Member("no_calls", _words, NULL, since=5),
        ),
        since=3,
        view="modules",
        about="the files that have CPU frames",
        count="named_modules",
    ),
    Kind(
        "symbol",
        (
            Member("module", _u32),
            Member("address", _u64),
            Member("size", _u64),
            Member("depth", _u16),
            Member("function", _text),
            Member("file", _text),
            Member("line", _u32),
        ),
        since=3,
        view="symbols",
        about="the names of CPU frames",
        count="symbols",
        label="symbols",
    ),
    Kind(
        "sample",
        (
            Member("time_ns", _u64),
            Member("comm", _text, says="sampled process"),
            Member("pid", _u32, REPEATS),
            Member("stack", _text, says="stack"),
            Member("address", _u64, REPEATS),
            Member("kernel", _text, says="sampled kernel"),
            Member("file", _text, says="path"),
            Member("offset", _u64),
            Member("mnemonic", _text),
            *(Member(reason, _u64) for reason in REASONS),
        ),
        since=4,
        count="imported_samples",
        label="imported rows",
    ),
    Kind(
        "loss",
        (
            Member("begin_ns", _u64),
            Member("time_ns", _u64),
            Member("source", _text),
            Member("what", _text),
            Member("count", _u64, NULL),
            Member("detail", _text),
        ),
        view="losses",
        about="what was lost while recording",
    ),
)
KINDS: dict[str, pa.StructType] = {kind.name: kind.struct for kind in ROWS}
"""The type of the struct column of each kind."""
MEMBERS = {f"{kind.name}.{member.name}": member for kind in ROWS for member in kind.members}
"""Fields by `KIND.FIELD`."""
SCHEMA = pa.schema(
    [
        pa.field("kind", _text, nullable=False),
        pa.field("part", _u16),  # null unless merged
        *(pa.field(name, kind) for name, kind in KINDS.items()),
    ]
)
NULLABLE = {name for name, member in MEMBERS.items() if member.how & NULL}
"""The fields that may be null in a row of their kind, as `KIND.FIELD`."""
PARTS_SINCE = 4


def in_order(kinds: Sequence[Kind], first: Sequence[str]) -> list[Kind]:
    """Sorts kinds: those in `first` in that order, then all others."""
    place = {name: number for number, name in enumerate(first)}
    return sorted(kinds, key=lambda kind: place.get(kind.name, len(place)))


def later_than(format_: int) -> set[str]:
    """The kinds, and the fields as `KIND.FIELD`, that a format does not have: it has no such rows, or null values."""
    later = {kind.name for kind in ROWS if kind.since > format_}
    later |= {name for name, member in MEMBERS.items() if member.since > format_}
    return later | ({"part"} if format_ < PARTS_SINCE else set())
