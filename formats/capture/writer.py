"""The writer of captures: row groups with rows of one kind each. docs/capture-format.md describes the file."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, BinaryIO, Protocol

import pyarrow as pa
import pyarrow.parquet as pq

from iaprof.formats.capture.dictionaries import deduplicated
from iaprof.formats.capture.limits import HEADER_KEY, PARTS_PER_GROUP
from iaprof.formats.capture.schema import FIELDS, FORMAT, KINDS, REPEATS, SCHEMA, SPLIT

_SPLIT = [f"{name}.list.element" for name, field in FIELDS.items() if field.flags & SPLIT]
_DICTIONARY_TEXTS = [name for name, field in FIELDS.items() if field.is_dictionary]
_DICTIONARY = ["kind", "part", *(name for name, field in FIELDS.items() if field.flags & REPEATS)]
_BUFFER = 1 << 20  # bytes
_SMALL = 1 << 16  # rows up to this many bytes share a row group, which costs every reader 100 kB


def _as_written(field: pa.Field) -> pa.Field:
    members = [
        member.with_type(pa.dictionary(pa.int32(), member.type))
        if FIELDS[f"{field.name}.{member.name}"].is_dictionary
        else member
        for member in KINDS.get(field.name, ())
    ]
    return field.with_type(pa.struct(members)) if members else field


_WRITTEN = pa.schema([_as_written(field) for field in SCHEMA])


@dataclass(frozen=True)
class Written:
    """A capture that was written: its header, and its size in bytes."""

    header: dict[str, Any]
    size: int


class RowWriter(Protocol):
    """Takes the rows of a capture."""

    def write(self, kind: str, rows: pa.StructArray) -> None:
        """See CaptureWriter."""


class _Sink:
    """What Arrow writes to: the file until the writer goes, then nothing, as Arrow flushes and closes what it drops."""

    closed = False

    def __init__(self, file: BinaryIO) -> None:
        self.file: BinaryIO | None = file

    def write(self, data: bytes) -> None:
        if self.file is not None:
            self.file.write(data)

    def tell(self) -> int:
        return self.file.tell() if self.file is not None else 0

    def flush(self) -> None:
        """Leaves that to the caller, whose file it is."""

    def close(self) -> None:
        """Likewise."""


class CaptureWriter:
    """Writes a capture into an open file, row group by row group.

    All texts are written as dictionaries: a small capture may repeat long texts so often that nobody has the memory to
    write them plain. Other programs see plain strings.
    """

    def __init__(self, file: BinaryIO, kinds: Collection[str] | None = None) -> None:
        """Starts an empty capture.

        Args:
            file: receives it.
            kinds: keys of KINDS, those of the rows that may follow: the file has no columns for others, which would
                cost bytes in each row group; None for all.
        """
        self._schema = pa.schema(
            [each for each in _WRITTEN if kinds is None or each.name not in KINDS or each.name in kinds]
        )
        self._sink = _Sink(file)
        # Collects pages: for each write to a file of Python's, Arrow waits for Python's lock.
        self._pages = pa.BufferedOutputStream(pa.PythonFile(self._sink, "w"), _BUFFER)
        self._writer = pq.ParquetWriter(
            self._pages,
            self._schema,
            compression="zstd",
            use_dictionary=[*_DICTIONARY, *_DICTIONARY_TEXTS],
            use_byte_stream_split=_SPLIT,
            write_statistics=False,
            data_page_version="2.0",  # Arrow then copies large values, such as cubins, once less
            store_schema=False,  # other programs would get dictionaries
        )
        self._part: int | None = None
        self._shared: dict[str, dict[int | None, pa.StructArray]] = defaultdict(dict)  # small batches, by kind and part

    def __del__(self) -> None:
        """Prevents pyarrow from finishing the file, which may be closed already, if `close` was not called."""
        if hasattr(self, "_writer"):
            self._writer.is_open = False
            self._sink.file = None

    def begin_part(self, number: int) -> None:
        """Starts a part of a merged capture: following rows belong to it."""
        self._part = number

    def write(self, kind: str, rows: pa.StructArray) -> None:
        """Adds a row group; in a merged capture, small batches of several parts may share one.

        Args:
            kind: a key of KINDS, one of those that the capture was made for.
            rows: of that kind's type, any number. Texts may be dictionaries.

        Raises:
            OSError: the file cannot be written, for example because the disk is full.
        """
        if len(rows) == 0:
            return
        if kind not in self._schema.names:
            raise ValueError(f"the capture was made without {kind} rows")
        rows = _with_dictionaries(kind, rows)
        small = self._part is not None and rows.nbytes <= _SMALL
        shared = self._shared[kind]
        if not small or self._part in shared or len(shared) == PARTS_PER_GROUP:
            self._flush(kind)
        self._shared[kind][self._part] = rows
        if not small:
            self._flush(kind)

    def _flush(self, kind: str) -> None:
        shared = sorted(self._shared.pop(kind, {}).items())
        if not shared:
            return
        rows = shared[0][1]
        if len(shared) > 1:  # parts may have the same texts in their dictionaries
            rows = _with_dictionaries(kind, pa.concat_arrays([few for _, few in shared]))
        part = pa.concat_arrays([pa.repeat(pa.scalar(number, pa.uint16()), len(few)) for number, few in shared])
        columns = [pa.repeat(pa.scalar(kind, pa.string()), len(rows)), part]
        nulls = (
            pa.nulls(len(rows), field.type) for field in self._schema if field.name in KINDS and field.name != kind
        )
        columns += [rows if name == kind else next(nulls) for name in self._schema.names if name in KINDS]
        self._writer.write_table(pa.Table.from_arrays(columns, schema=self._schema), row_group_size=len(rows))

    def close(self, header: dict[str, Any]) -> None:
        """Writes the header and the footer.

        Raises:
            OSError: the file cannot be written, for example because the disk is full.
        """
        for kind in list(self._shared):
            self._flush(kind)
        self._writer.add_key_value_metadata({HEADER_KEY: json.dumps({**header, "format": FORMAT}).encode()})
        self._writer.close()
        self._pages.flush()


def _with_dictionaries(kind: str, rows: pa.StructArray) -> pa.StructArray:
    """The rows, with texts as dictionaries that have each text once and no others."""
    fields = list(_WRITTEN.field(kind).type)
    members = [
        deduplicated(member) if pa.types.is_dictionary(field.type) else member
        for member, field in zip(rows.flatten(), fields, strict=True)
    ]
    return pa.StructArray.from_arrays(members, fields=fields)
