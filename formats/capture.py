"""The capture: one Parquet file with everything a recording kept. docs/capture-format.md is its description.

A row has a `kind` and one struct column per kind, of which only its own is not null; a row group holds rows of one
kind. The header is JSON in the file's key-value metadata under `iaprof`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from iaprof.formats.errors import IaprofError

FORMAT = 1
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
        ]
    ),
    "process": pa.struct(
        [("time_ns", _u64), ("pid", _u32), ("tid", _u32), ("ppid", _u32), ("event", _name), ("comm", _name)]
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
    "metric": pa.struct([("time_ns", _u64), ("stream", _u16), ("name", _name), ("value", pa.float64())]),
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

_SPLIT = [f"stall.w{word}.list.element" for word in range(3)]
_DICTIONARY = [
    "kind",
    "stall.stream",
    *(f"launch.{name}" for name in ("pid", "tid", "cpu", "comm", "iba", "address", "size", "stack", "name", "flags")),
    "stack.pid",
    *(f"mapping.{name}" for name in ("pid", "path", "build_id")),
    *(f"process.{name}" for name in ("event", "comm")),
    *(f"loss.{name}" for name in ("source", "what", "detail")),
    *(f"metric.{name}" for name in ("stream", "name")),
]

# What a capture may declare. Ours have row groups far below; a stranger's must not make us allocate at will.
MAX_ROWS = 1 << 26
MAX_ROW_GROUP_BYTES = 1 << 31
MAX_HEADER_BYTES = 1 << 26


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
        self._writer.add_key_value_metadata({HEADER_KEY: json.dumps({"format": FORMAT, **header}).encode()})
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
            self._file = pq.ParquetFile(path, read_dictionary=[], pre_buffer=False)
        except OSError as error:
            if isinstance(error, pa.ArrowException) or error.strerror is None:
                raise CaptureError(
                    f"{path} is damaged and cannot be read as a capture: {_first_line(error)}"
                ) from error
            raise CaptureError(f"{path} cannot be opened: {error.strerror}") from error
        except (pa.ArrowException, ValueError) as error:
            raise CaptureError(f"{path} is damaged and cannot be read as a capture: {_first_line(error)}") from error
        self.header = self._read_header()
        self._check_schema()
        self._kinds = self._row_groups()

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
        if not isinstance(header, dict) or not isinstance(header.get("format"), int):
            raise CaptureError(f"{self.path} has a damaged header: copy it again from where it was recorded")
        if header["format"] > FORMAT:
            raise CaptureError(
                f"{self.path} is of format {header['format']}, this iaprof reads up to {FORMAT}: "
                "install a newer iaprof (pip install --upgrade iaprof)"
            )
        return header

    def _check_schema(self) -> None:
        schema = self._file.schema_arrow
        for field in SCHEMA:
            index = schema.get_field_index(field.name)
            if index < 0:
                raise CaptureError(f"{self.path} is damaged: it has no column '{field.name}'")
            found = schema.field(index).type
            wanted = {f.name: f.type for f in field.type} if pa.types.is_struct(field.type) else {}
            if pa.types.is_struct(found) != bool(wanted) or (not wanted and found != field.type):
                raise CaptureError(f"{self.path} is damaged: column '{field.name}' is of type {found}")
            members = {f.name: f.type for f in found} if wanted else {}
            for name, type_ in wanted.items():
                if name not in members:
                    raise CaptureError(f"{self.path} is damaged: it has no column '{field.name}.{name}'")
                if not _alike(members[name], type_):
                    raise CaptureError(f"{self.path} is damaged: column '{field.name}.{name}' is of {members[name]}")

    def _row_groups(self) -> dict[str, list[int]]:
        # Kinds are read as data, not from the footer's statistics: pyarrow's accessors for those end the process
        # when a damaged footer makes them throw.
        groups: dict[str, list[int]] = {kind: [] for kind in KINDS}
        for index in range(self._file.metadata.num_row_groups):
            group = self._file.metadata.row_group(index)
            if not 0 < group.num_rows <= MAX_ROWS or not 0 <= group.total_byte_size <= MAX_ROW_GROUP_BYTES:
                raise CaptureError(f"{self.path} is damaged: a row group of it declares an absurd size")
            kinds = pc.unique(self._read(index, ["kind"], "kind").column(0)).to_pylist()
            if len(kinds) != 1:
                raise CaptureError(f"{self.path} is damaged: a row group of it is not of one kind")
            if kinds[0] in groups:  # a kind of a later version of this format is not ours to read
                groups[kinds[0]].append(index)
        return groups

    def _read(self, index: int, columns: list[str], what: str) -> pa.Table:
        try:
            return self._file.read_row_group(index, columns=columns)
        except (OSError, pa.ArrowException, ValueError, MemoryError) as error:
            raise CaptureError(f"{self.path} is damaged in its {what} rows: {_first_line(error)}") from error

    def tables(self, kind: str, columns: tuple[str, ...] = ()) -> Iterator[pa.Table]:
        """The rows of a kind, a table per row group, with the struct's members as columns.

        Args:
            kind: a key of KINDS.
            columns: which members; all when empty.

        Raises:
            CaptureError: the file is damaged in that place.
        """
        wanted = columns or tuple(field.name for field in KINDS[kind])
        for index in self._kinds[kind]:
            table = self._read(index, [f"{kind}.{name}" for name in wanted], kind)
            try:
                rows = table.column(0).combine_chunks()
                rows = rows.chunk(0) if isinstance(rows, pa.ChunkedArray) else rows
                arrays = [rows.field(name) for name in wanted]
                arrays = [a.cast(KINDS[kind].field(n).type) for a, n in zip(arrays, wanted, strict=True)]
            except (OSError, pa.ArrowException, ValueError, MemoryError, IndexError) as error:
                raise CaptureError(f"{self.path} is damaged in its {kind} rows: {_first_line(error)}") from error
            yield pa.Table.from_arrays(arrays, names=list(wanted))

    def table(self, kind: str, columns: tuple[str, ...] = ()) -> pa.Table:
        """All rows of a kind at once, for kinds that are few."""
        wanted = columns or tuple(field.name for field in KINDS[kind])
        empty = pa.schema([KINDS[kind].field(name) for name in wanted]).empty_table()
        return pa.concat_tables([empty, *self.tables(kind, wanted)], promote_options="permissive")


def _alike(found: pa.DataType, wanted: pa.DataType) -> bool:
    if pa.types.is_list(wanted):
        return bool(pa.types.is_list(found) and found.value_type == wanted.value_type)
    return bool(found == wanted)


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
