"""Writing a capture: rows of one kind at a time, each in a row group. docs/capture-format.md describes the file."""

from __future__ import annotations

import json
from collections import defaultdict
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from iaprof.formats.capture.dictionaries import distinct
from iaprof.formats.capture.limits import HEADER_KEY, PARTS_PER_GROUP
from iaprof.formats.capture.schema import FORMAT, KINDS, MEMBERS, REPEATS, SCHEMA, SPLIT

_SPLIT = [f"{name}.list.element" for name, member in MEMBERS.items() if member.how & SPLIT]
_DICTIONARY_TEXTS = [name for name, member in MEMBERS.items() if member.is_dictionary]
_DICTIONARY = ["kind", "part", *(name for name, member in MEMBERS.items() if member.how & REPEATS)]
_SMALL = 1 << 16  # bytes of rows that share a group: each group costs 100 kB of whoever has the file open


def _as_written(field: pa.Field) -> pa.Field:
    members = [
        member.with_type(pa.dictionary(pa.int32(), member.type))
        if MEMBERS[f"{field.name}.{member.name}"].is_dictionary
        else member
        for member in KINDS.get(field.name, ())
    ]
    return field.with_type(pa.struct(members)) if members else field


_WRITTEN = pa.schema([_as_written(field) for field in SCHEMA])


class CaptureWriter:
    """Writes a capture into an open file, a row group at a time.

    Texts go into it as dictionaries, however long they are: the rows of a small file may say them so often that nobody
    has the memory to write each. Other programs see plain texts all the same.
    """

    def __init__(self, file: BinaryIO) -> None:
        """Begins with no rows."""
        self._writer = pq.ParquetWriter(
            file,
            _WRITTEN,
            compression="zstd",
            use_dictionary=[*_DICTIONARY, *_DICTIONARY_TEXTS],
            use_byte_stream_split=_SPLIT,
            write_statistics=False,
            store_schema=False,  # it would have other programs get dictionaries
        )
        self._part: int | None = None
        self._shared: dict[str, dict[int | None, pa.StructArray]] = defaultdict(dict)  # few rows of each part, by kind

    def __del__(self) -> None:
        """Whoever did not close it wants no end of it, and the file may be closed: pyarrow would complain on stderr."""
        if hasattr(self, "_writer"):
            self._writer.is_open = False

    def begin_part(self, number: int) -> None:
        """What is written from now on is of this part of a merged capture."""
        self._part = number

    def write(self, kind: str, rows: pa.StructArray) -> None:
        """Adds one row group; of a part, few rows may share one with those of the parts around it.

        Args:
            kind: a key of KINDS.
            rows: of that kind's type, any number. Texts may be dictionaries.

        Raises:
            OSError: the disk is full, or the like.
        """
        if len(rows) == 0:
            return
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
        rows = pa.concat_arrays([few for _, few in shared])
        part = pa.concat_arrays([pa.repeat(pa.scalar(number, pa.uint16()), len(few)) for number, few in shared])
        columns = [pa.repeat(pa.scalar(kind, pa.string()), len(rows)), part]
        if len(shared) > 1:  # the dictionaries of all in one may have a text twice
            rows = _with_dictionaries(kind, rows)
        columns += [rows if name == kind else pa.nulls(len(rows), _WRITTEN.field(name).type) for name in KINDS]
        self._writer.write_table(pa.Table.from_arrays(columns, schema=_WRITTEN), row_group_size=len(rows))

    def close(self, header: dict[str, Any]) -> None:
        """Writes the header and the end of the file.

        Raises:
            OSError: the disk is full, or the like.
        """
        for kind in list(self._shared):
            self._flush(kind)
        self._writer.add_key_value_metadata({HEADER_KEY: json.dumps({**header, "format": FORMAT}).encode()})
        self._writer.close()


def _with_dictionaries(kind: str, rows: pa.StructArray) -> pa.StructArray:
    """Rows whose texts are dictionaries of which each text is used, and in it once."""
    fields = list(_WRITTEN.field(kind).type)
    members = [
        distinct(member) if pa.types.is_dictionary(field.type) else member
        for member, field in zip(rows.flatten(), fields, strict=True)
    ]
    return pa.StructArray.from_arrays(members, fields=fields)
