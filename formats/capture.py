"""The capture: one Parquet file with everything a recording kept. docs/capture-format.md is its description.

A row has a `kind` and one struct column per kind, of which only its own is not null; a row group holds rows of one
kind. The header is JSON in the file's key-value metadata under `iaprof`.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from iaprof.formats.errors import IaprofError

FORMAT = 3
HEADER_KEY = b"iaprof"

_u16, _u32, _u64 = pa.uint16(), pa.uint32(), pa.uint64()
_name = pa.string()
_words = pa.list_(pa.field("element", _u64, nullable=False))

KINDS: dict[str, pa.StructType] = {
    "stall": pa.struct(
        [("time_ns", _u64), ("begin_ns", _u64), ("stream", _u16), ("w0", _words), ("w1", _words), ("w2", _words)]
    ),
    "launch": pa.struct(
        [
            ("time_ns", _u64),
            ("pid", _u32),
            ("tid", _u32),
            ("cpu", _u32),
            ("comm", _name),
            ("iba", _u64),
            ("address", _u64),
            ("size", _u64),
            ("stack", _u64),
            ("name", _name),
            ("flags", _u32),
        ]
    ),
    "stack": pa.struct([("id", _u64), ("time_ns", _u64), ("pid", _u32), ("truncated", pa.bool_()), ("ips", _words)]),
    "mapping": pa.struct(
        [
            ("time_ns", _u64),
            ("pid", _u32),
            ("start", _u64),
            ("length", _u64),
            ("offset", _u64),
            ("path", _name),
            ("build_id", pa.binary()),
            ("inode", _u64),
        ]
    ),
    "process": pa.struct(
        [
            ("time_ns", _u64),
            ("pid", _u32),
            ("tid", _u32),
            ("ppid", _u32),
            ("event", _name),
            ("comm", _name),
            ("ns_pid", _u32),
            ("cgroup", _name),
            ("container", _name),
            ("uid", _u32),
            ("gid", _u32),
        ]
    ),
    "kernel": pa.struct(
        [
            ("time_ns", _u64),
            ("pid", _u32),
            ("path", _name),
            ("digest", pa.binary()),
            ("size", _u64),
            ("elf", pa.binary()),
        ]
    ),
    "metric": pa.struct([("time_ns", _u64), ("stream", _u16), ("pid", _u32), ("name", _name), ("value", pa.float64())]),
    "cpu_sample": pa.struct(
        [
            ("time_ns", _u64),
            ("pid", _u32),
            ("tid", _u32),
            ("cpu", _u32),
            ("stack", _u64),
            ("kernel_stack", _u64),
        ]
    ),
    "module": pa.struct(
        [
            ("id", _u32),
            ("what", _name),
            ("path", _name),
            ("build_id", pa.binary()),
            ("inode", _u64),
            ("pid", _u32),
            ("source", _name),
            ("problem", _name),
            ("frame_pointers", pa.bool_()),
        ]
    ),
    "symbol": pa.struct(
        [
            ("module", _u32),
            ("address", _u64),
            ("size", _u64),
            ("depth", _u16),
            ("function", _name),
            ("file", _name),
            ("line", _u32),
        ]
    ),
    "loss": pa.struct(
        [
            ("begin_ns", _u64),
            ("time_ns", _u64),
            ("source", _name),
            ("what", _name),
            ("count", _u64),
            ("detail", _name),
        ]
    ),
}
"""The struct column of each kind of row."""

SCHEMA = pa.schema([pa.field("kind", _name, nullable=False), *(pa.field(name, kind) for name, kind in KINDS.items())])

_TEXT_TYPES = (_name, pa.binary())
_TEXTS = [
    "kind",
    *(f"{name}.{member.name}" for name, kind in KINDS.items() for member in kind if member.type in _TEXT_TYPES),
]
"""What is read as dictionaries: a text that comes a million times is one text."""

_SPLIT = [f"stall.w{word}.list.element" for word in range(3)]
_DICTIONARY = [
    "kind",
    "stall.stream",
    *(f"launch.{name}" for name in ("pid", "tid", "cpu", "comm", "iba", "address", "size", "stack", "name", "flags")),
    "stack.pid",
    *(f"mapping.{name}" for name in ("pid", "path", "build_id")),
    *(f"process.{name}" for name in ("event", "comm", "ns_pid", "cgroup", "container")),
    *(f"loss.{name}" for name in ("source", "what", "detail")),
    *(f"metric.{name}" for name in ("stream", "pid", "name")),
    *(f"cpu_sample.{name}" for name in ("pid", "tid", "cpu", "stack", "kernel_stack")),
]

NULLABLE = {
    "stall.w2",
    "mapping.build_id",
    "mapping.inode",
    *(f"process.{name}" for name in ("ppid", "comm", "ns_pid", "cgroup", "container", "uid", "gid")),
    "module.build_id",
    "module.frame_pointers",
    "kernel.elf",
    "metric.stream",
    "metric.pid",
    "loss.count",
}
"""The members that may be null in a row of their kind."""

_SINCE = {
    2: {"cpu_sample", "process.ns_pid", "process.cgroup", "process.container", "metric.pid"},
    3: {"module", "symbol", "mapping.inode", "process.uid", "process.gid"},
}
"""Kinds and members that captures of earlier formats do not have: no such rows, and null for such members."""

# What a capture may declare. Ours are far below; a stranger's must not make us allocate and compute at will.
MAX_ROWS = 1 << 23  # in a row group
MAX_GROUP_BYTES = 1 << 31
MAX_HEADER_BYTES = 1 << 26
MAX_TEXT_BYTES = 1 << 14  # a path of 4,096 bytes of which each had to be escaped
MAX_VALUE_BYTES = 1 << 30  # of a kind's values in memory; those of a large capture may have more:
MAX_EXPANSION = 1000  # times the file's size. Real stalls have 4 times the bytes that they have in the file.


class CaptureError(IaprofError):
    """A file is no capture, or no whole one, or not one that this version reads."""


class CaptureWriter:
    """Writes a capture into an open file, a row group at a time."""

    def __init__(self, file: BinaryIO) -> None:
        """Begins with no rows."""
        self._writer = pq.ParquetWriter(
            file,
            SCHEMA,
            compression="zstd",
            use_dictionary=_DICTIONARY,
            use_byte_stream_split=_SPLIT,
            write_statistics=False,
        )

    def write(self, kind: str, rows: pa.StructArray) -> None:
        """Adds one row group.

        Args:
            kind: a key of KINDS.
            rows: of that kind's type, any number.

        Raises:
            OSError: the disk is full, or the like.
        """
        if len(rows) == 0:
            return
        columns = [pa.repeat(pa.scalar(kind, _name), len(rows))]
        columns += [rows if name == kind else pa.nulls(len(rows), type_) for name, type_ in KINDS.items()]
        self._writer.write_table(pa.Table.from_arrays(columns, schema=SCHEMA), row_group_size=len(rows))

    def close(self, header: dict[str, Any]) -> None:
        """Writes the header and the end of the file.

        Raises:
            OSError: the disk is full, or the like.
        """
        self._writer.add_key_value_metadata({HEADER_KEY: json.dumps({**header, "format": FORMAT}).encode()})
        self._writer.close()


class CaptureReader:
    """A capture from anyone: everything about it is checked before it is used."""

    def __init__(self, path: Path) -> None:
        """Opens it and reads the header.

        Raises:
            CaptureError: what it is instead of a capture that this version reads, and what to do.
        """
        self.path = path
        try:
            size = path.stat().st_size
            if not path.is_file():
                raise CaptureError(f"{path} is not a file")
            self._check_ends(size)
            self._most_bytes = max(MAX_VALUE_BYTES, MAX_EXPANSION * size)
            self._file = pq.ParquetFile(path, pre_buffer=False)
        except OSError as error:
            if isinstance(error, pa.ArrowException) or error.strerror is None:
                raise self._unreadable(error) from error
            raise CaptureError(f"{path} cannot be opened: {error.strerror}") from error
        except (pa.ArrowException, ValueError, MemoryError) as error:
            raise self._unreadable(error) from error
        self.header = self._read_header()
        self._check_schema()
        texts = [name for name in _TEXTS if name not in self._absent and name.split(".")[0] not in self._absent]
        try:  # again, now that it is known to have the columns
            self._file = pq.ParquetFile(path, metadata=self._file.metadata, read_dictionary=texts, pre_buffer=False)
        except (OSError, pa.ArrowException, ValueError, KeyError, MemoryError) as error:
            raise self._unreadable(error) from error
        self._kinds = self._row_groups()

    def _unreadable(self, error: BaseException) -> CaptureError:
        return CaptureError(f"{self.path} is damaged and cannot be read as a capture: {_first_line(error)}")

    def _check_ends(self, size: int) -> None:
        if size == 0:
            raise CaptureError(f"{self.path} is empty: the recording that should have filled it did not finish")
        with self.path.open("rb") as file:
            start = file.read(4)
            file.seek(-min(size, 4), os.SEEK_END)
            end = file.read(4)
        if start == b"IAPS":
            raise CaptureError(f"{self.path} is the spool of an unfinished recording: iaprof recover {self.path}")
        if start != b"PAR1":
            raise CaptureError(f"{self.path} is not an iaprof capture (it is no Parquet file)")
        if end != b"PAR1" or size < 12:
            raise CaptureError(f"{self.path} is cut short: copy it again from where it was recorded")

    def _read_header(self) -> dict[str, Any]:
        raw = (self._file.metadata.metadata or {}).get(HEADER_KEY)
        if raw is None:
            raise CaptureError(f"{self.path} is not an iaprof capture (it is some other Parquet file)")
        try:
            header = json.loads(raw) if len(raw) <= MAX_HEADER_BYTES else None
        except (ValueError, RecursionError):
            header = None
        if not isinstance(header, dict) or type(header.get("format")) is not int or header["format"] < 1:
            raise CaptureError(f"{self.path} has a damaged header: copy it again from where it was recorded")
        if header["format"] > FORMAT:
            raise CaptureError(
                f"{self.path} is of format {header['format']}, this iaprof reads up to {FORMAT}: "
                "install a newer iaprof (pip install --upgrade iaprof)"
            )
        return header

    def _check_schema(self) -> None:
        schema = self._file.schema_arrow
        later = {name for since, names in _SINCE.items() if self.header["format"] < since for name in names}
        self._absent: set[str] = set()
        for field in SCHEMA:
            index = schema.get_field_index(field.name)
            if index < 0 and field.name in later:
                self._absent.add(field.name)
                continue
            if index < 0:
                raise CaptureError(f"{self.path} is damaged: it has no column '{field.name}'")
            found = schema.field(index).type
            wanted = {f.name: f.type for f in field.type} if pa.types.is_struct(field.type) else {}
            if pa.types.is_struct(found) != bool(wanted) or (not wanted and not _alike(found, field.type)):
                raise CaptureError(f"{self.path} is damaged: column '{field.name}' is of type {found}")
            members = {f.name: f.type for f in found} if wanted else {}
            for name, type_ in wanted.items():
                if name not in members and f"{field.name}.{name}" in later:
                    self._absent.add(f"{field.name}.{name}")
                    continue
                if name not in members:
                    raise CaptureError(f"{self.path} is damaged: it has no column '{field.name}.{name}'")
                if not _alike(members[name], type_):
                    raise CaptureError(f"{self.path} is damaged: column '{field.name}.{name}' is of {members[name]}")

    def _row_groups(self) -> dict[str, list[int]]:
        # Kinds are read as data, not from the footer's statistics, and values counted when they are read: pyarrow's
        # accessors for what a footer says of columns end the process when a damaged one makes them throw.
        groups: dict[str, list[int]] = {kind: [] for kind in KINDS}
        rows_left = self._most_bytes // 8
        for index in range(self._file.metadata.num_row_groups):
            group = self._file.metadata.row_group(index)
            rows_left -= max(group.num_rows, 0)
            if not 0 <= group.num_rows <= min(MAX_ROWS, rows_left) or not 0 <= group.total_byte_size <= MAX_GROUP_BYTES:
                raise CaptureError(f"{self.path} is damaged: a row group of it declares an absurd size")
            if not group.num_rows:
                continue
            kind = self._kind(index)
            if kind in groups:  # a kind of a later version of this format is not ours to read
                groups[kind].append(index)
        return groups

    def _kind(self, index: int) -> str:
        column = self._read(index, ["kind"], "kind").column(0)
        with self._damaged("kind"):
            column.validate(full=True)
            kinds = pc.unique(column).to_pylist()
        if len(kinds) != 1 or kinds[0] is None:
            raise CaptureError(f"{self.path} is damaged: a row group of it is not of one kind")
        return str(kinds[0])

    def _read(self, index: int, columns: list[str], what: str) -> pa.Table:
        with self._damaged(what):
            return self._file.read_row_group(index, columns=columns)

    @contextlib.contextmanager
    def _damaged(self, what: str) -> Iterator[None]:
        try:
            yield
        except (OSError, pa.ArrowException, ValueError, IndexError, MemoryError) as error:
            raise CaptureError(f"{self.path} is damaged in its {what} rows: {_first_line(error)}") from error

    def tables(self, kind: str, columns: tuple[str, ...] = ()) -> Iterator[pa.Table]:
        """The rows of a kind, a table per row group, with the struct's members as columns.

        What the format says is never null is not; texts are valid UTF-8, of bounded length, and come as dictionaries.

        Args:
            kind: a key of KINDS.
            columns: which members; all when empty.

        Raises:
            CaptureError: the file is damaged in that place.
        """
        schema = _read_schema(kind, columns)
        bytes_left = self._most_bytes
        for index in self._kinds[kind]:
            present = [name for name in schema.names if f"{kind}.{name}" not in self._absent]
            table = self._read(index, [f"{kind}.{name}" for name in present], kind)
            bytes_left -= table.nbytes
            with self._damaged(kind):
                if bytes_left < 0:
                    raise ValueError("they are absurdly many for a file of its size")
                rows = table.column(0)
                rows.validate(full=True)
                if rows.null_count:
                    raise ValueError("a row of it is of no kind")
                arrays = [
                    pa.chunked_array([_checked(rows_.field(f.name), f, kind) for rows_ in rows.chunks], f.type)
                    if f.name in present
                    else pa.nulls(len(rows), f.type)
                    for f in schema
                ]
            yield pa.Table.from_arrays(arrays, schema=schema)

    def table(self, kind: str, columns: tuple[str, ...] = ()) -> pa.Table:
        """All rows of a kind at once, for kinds that are few."""
        schema = _read_schema(kind, columns)
        with self._damaged(kind):
            return pa.concat_tables([schema.empty_table(), *self.tables(kind, columns)]).unify_dictionaries()


def _read_schema(kind: str, columns: tuple[str, ...]) -> pa.Schema:
    fields = [KINDS[kind].field(name) for name in columns] if columns else list(KINDS[kind])
    return pa.schema([f.with_type(pa.dictionary(pa.int32(), f.type)) if f.type in _TEXT_TYPES else f for f in fields])


def _checked(values: pa.Array, field: pa.Field, kind: str) -> pa.Array:
    """The values of a member in the type that readers get; ValueError where they are not what the format says."""
    is_list = pa.types.is_list(values.type)
    nulls = values.null_count and f"{kind}.{field.name}" not in NULLABLE
    if nulls or (is_list and values.flatten().null_count):
        raise ValueError(f"column '{field.name}' has nulls")
    if pa.types.is_dictionary(values.type):
        texts = values.dictionary
        if texts.null_count:  # another program's way to say that the value is null
            return _checked(values.dictionary_decode().dictionary_encode(), field, kind)
        longest = pc.max(pc.binary_length(texts)).as_py() or 0
        if texts.type == _name and longest > MAX_TEXT_BYTES:
            raise ValueError(f"a text in column '{field.name}' has {longest} bytes")
    return values.cast(field.type) if is_list else values


def _alike(found: pa.DataType, wanted: pa.DataType) -> bool:
    if pa.types.is_dictionary(found):
        found = found.value_type
    if pa.types.is_list(wanted):
        return bool(pa.types.is_list(found) and found.value_type == wanted.value_type)
    return bool(found == wanted)


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
