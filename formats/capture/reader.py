"""The reader of captures: Parquet files with everything that a recording kept. docs/capture-format.md describes them.

A row has a `kind` and one struct column per kind, of which only the column of its kind is not null. All rows of a row
group have the same kind. The header is JSON in the file's key-value metadata, with the key `iaprof`.

A merged capture holds the rows of several recordings, its parts: the column `part` has their numbers, and the header's
`parts` their headers (formats/capture/merged.py). Small numbers of rows of several parts may share a row group.
"""

from __future__ import annotations

import contextlib
import copy
import os
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple, Self, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from iaprof.basics.finite_json import loads_finite
from iaprof.formats.capture import merged
from iaprof.formats.capture.dictionaries import decoded_bytes, with_null_rows
from iaprof.formats.capture.limits import (
    ADDRESSES,
    HEADER_KEY,
    MAX_EXPANSION,
    MAX_GROUP_BYTES,
    MAX_HEADER_BYTES,
    MAX_PARTS,
    MAX_ROWS,
    MAX_TEXT_BYTES,
    MAX_VALUE_BYTES,
    PARTS,
    PARTS_PER_GROUP,
    PYTHON_LINES,
    STREAMS,
    CaptureError,
    Ratio,
    check_ratio,
)
from iaprof.formats.capture.schema import (
    FIELDS,
    FORMAT,
    KINDS,
    NULLABLE,
    PARTS_SINCE,
    SCHEMA,
    WHOLE,
    absent_in,
)
from iaprof.formats.stores import StoredFile, without_credentials

if TYPE_CHECKING:
    from concurrent.futures import Future

_READERS = 2  # threads that read ahead
_AT_FIRST = 4  # row groups that are read before one is asked for
_LATER = 1  # while one is used: the CPU's caches still have what was just read
_TEXTS = ["kind", *(name for name, field in FIELDS.items() if field.is_text)]  # read as dictionaries


class _Rows(NamedTuple):
    """A range of rows of one kind and part in a row group."""

    group: int
    start: int
    end: int


class _Ahead:
    """Row groups in their order, which threads read before they are asked for."""

    def __init__(self, readers: list[Callable[[], pa.Table]]) -> None:
        """Does not read yet.

        Args:
            readers: what reads each row group.
        """
        self._readers, self._begun, self._has_threads = readers, 0, True
        self._reading: deque[Future[pa.Table]] = deque()

    def __enter__(self) -> Self:
        """Begins to read."""
        from concurrent.futures import ThreadPoolExecutor  # here, as only large captures need it

        self._threads = ThreadPoolExecutor(_READERS)
        self._begin(_AT_FIRST)
        return self

    def __exit__(self, *error: object) -> None:
        """Waits until no thread reads."""
        self._threads.shutdown(cancel_futures=True)

    def __iter__(self) -> Iterator[pa.Table]:
        """Yields the row groups."""
        for reader in self._readers:
            table = self._reading.popleft().result() if self._reading else reader()
            self._begin(_LATER - len(self._reading))
            yield table
            del table  # before the next one is waited for

    def _begin(self, most: int) -> None:
        for reader in self._readers[self._begun :][: max(most, 0)] if self._has_threads else ():
            try:
                self._reading.append(self._threads.submit(reader))
            except RuntimeError:  # no thread can start: a limit on processes, perhaps
                self._has_threads = False
                return
            self._begun += 1


class CaptureReader:
    """Reads an untrusted capture: checks everything before use.

    Rows are read part by part: whoever analyses a capture iterates over `parts`. A capture that is not merged is its
    own only part.
    """

    def __init__(self, path: Path | StoredFile) -> None:
        """Opens the file and reads the header.

        Raises:
                CaptureError: the file cannot be read; the text says why and what to do.
        """
        self.path = cast("Path", path)  # a StoredFile is only printed
        self.is_stored = isinstance(path, StoredFile)
        try:
            self.bytes = path.size if isinstance(path, StoredFile) else path.stat().st_size
            if not isinstance(path, StoredFile) and not path.is_file():
                raise CaptureError(f"{path} is not a file")
            if not isinstance(path, StoredFile):
                path.open("rb").close()  # whose error says why in a word, unlike Arrow's
            # Arrow opens a path of characters only if all of it is UTF-8, which no file name has to be.
            source = path.open() if isinstance(path, StoredFile) else pa.OSFile(os.fsencode(path))
            self._check_ends(self.bytes, source)
            self._most_bytes = max(MAX_VALUE_BYTES, MAX_EXPANSION * self.bytes)
            self._file = pq.ParquetFile(source, pre_buffer=self.is_stored)
        except OSError as error:
            if isinstance(error, pa.ArrowException) or error.strerror is None:
                raise self._unreadable(error) from error
            raise CaptureError(f"{without_credentials(str(path))} cannot be opened: {error.strerror}") from error
        except MemoryError as error:
            raise self._too_large("list of rows") from error
        except (pa.ArrowException, ValueError) as error:
            raise self._unreadable(error) from error
        self.header = self._read_header()
        self._check_schema()
        texts = [name for name in _TEXTS if name not in self._absent and name.split(".")[0] not in self._absent]
        try:  # now that the columns are known to exist
            self._file = pq.ParquetFile(
                source, metadata=self._file.metadata, read_dictionary=texts, pre_buffer=self.is_stored
            )
        except MemoryError as error:
            raise self._too_large("list of rows") from error
        except (OSError, pa.ArrowException, ValueError, KeyError) as error:
            raise self._unreadable(error) from error
        self._declared: dict[Ratio, int] = {}  # shared by all parts
        self._of_parts: dict[Ratio, dict[int, int]] = defaultdict(dict)  # likewise; by part
        self.label = ""  # the label of a part of a merged capture
        self._own: int | None = None if self.is_merged else 0  # the part whose rows are read
        self._groups = self._row_groups()

    @property
    def is_merged(self) -> bool:
        """Whether the capture holds the rows of several recordings."""
        return "parts" in self.header and self.header["format"] >= PARTS_SINCE

    @property
    def parts(self) -> list[CaptureReader]:
        """The recordings in the capture, each with its own header; all share one open file."""
        if not self.is_merged:
            return [self]
        headers = self.header["parts"]
        parts = []
        for number, (header, label) in enumerate(zip(headers, merged.part_labels(headers), strict=True)):
            part = copy.copy(self)
            part.header, part.label, part._own = header, label, number
            parts.append(part)
        return parts

    @property
    def has_cut_stacks(self) -> bool:
        """Whether wrong return addresses were cut from the stacks, as the recorder does since format 5."""
        return isinstance(self.header.get("stack_ends"), dict)  # not the format: captures can be rewritten

    @property
    def stall_records(self) -> int:
        """The number of stall records according to the header; 0 if it does not say."""
        totals = self.header.get("totals")
        stalls = totals.get("stalls") if isinstance(totals, dict) else None
        return stalls if type(stalls) is int and stalls > 0 else 0

    @property
    def number(self) -> int:
        """The number of this part in its file; 0 for a capture that is not merged."""
        return self._own or 0

    def _unreadable(self, error: BaseException) -> CaptureError:
        return CaptureError(f"{self.path} is damaged and cannot be read as a capture: {_first_line(error)}")

    def _too_large(self, what: str) -> CaptureError:
        return CaptureError(
            f"{self.path} needs more memory for its {what} than iaprof may take: it is very large, damaged, or made to "
            "do harm; if you trust it, allow more with --memory-limit"
        )

    def _check_ends(self, size: int, file: BinaryIO | pa.NativeFile) -> None:
        if size == 0:
            raise CaptureError(f"{self.path} is empty: the recording that should have filled it did not finish")
        start = file.read(4)
        file.seek(-min(size, 4), os.SEEK_END)
        end = file.read(4)
        if start == b"IAPS":
            raise CaptureError(f"{self.path} is the spool of an unfinished recording: iaprof recover {self.path}")
        if start != b"PAR1":
            raise CaptureError(
                f"{self.path} is not an iaprof capture (not a Parquet file): name a file that 'iaprof record' wrote"
            )
        if end != b"PAR1" or size < 12:
            raise CaptureError(f"{self.path} is cut short: copy it again from where it was recorded")

    def _read_header(self) -> dict[str, Any]:
        raw = (self._file.metadata.metadata or {}).get(HEADER_KEY)
        if raw is None:
            raise CaptureError(
                f"{self.path} is not an iaprof capture (another Parquet file): name a file that 'iaprof record' wrote"
            )
        try:
            header = loads_finite(raw) if len(raw) <= MAX_HEADER_BYTES else None
        except MemoryError as error:
            raise self._too_large("header") from error
        except (ValueError, RecursionError):
            header = None
        if not isinstance(header, dict) or type(header.get("format")) is not int or header["format"] < 1:
            raise CaptureError(f"{self.path} has a damaged header: copy it again from where it was recorded")
        if header["format"] > FORMAT:
            raise CaptureError(
                f"{self.path} is of format {header['format']}, this iaprof reads up to {FORMAT}: "
                "install a newer iaprof (pip install --upgrade iaprof)"
            )
        parts = header.get("parts", [{}]) if header["format"] >= PARTS_SINCE else [{}]
        if not isinstance(parts, list) or not 0 < len(parts) <= MAX_PARTS or not all(map(_is_of_a_part, parts)):
            raise CaptureError(
                f"{self.path} has a damaged header: what it says about its parts is not a list of headers"
            )
        self.check(len(parts), PARTS)
        streams = (each.get("streams") for each in (parts if "parts" in header else [header]))
        self.check(sum(len(each) for each in streams if isinstance(each, list)), STREAMS)
        return header

    def check(self, number: int, ratio: Ratio) -> None:
        """Checks how many of something the capture declares, as `check_ratio`.

        Raises:
                CaptureError: these are absurdly many for a file of its size.
        """
        check_ratio(self.path, self.bytes, number, ratio)

    def count_against(self, ratio: Ratio, number: int) -> None:
        """Adds to what the capture, with all its parts, has declared of something so far, and checks the sum.

        Raises:
                CaptureError: these are absurdly many for a file of its size.
        """
        self._declared[ratio] = self._declared.get(ratio, 0) + number
        self.check(self._declared[ratio], ratio)

    def check_parts(self, number: int, ratio: Ratio) -> None:
        """Checks how many of something this part and those that were checked before declare, each part once.

        Raises:
                CaptureError: these are absurdly many for a file of its size.
        """
        before = self._of_parts[ratio].get(self.number, 0)
        self._of_parts[ratio][self.number] = number
        self.count_against(ratio, number - before)

    def _check_schema(self) -> None:
        schema = self._file.schema_arrow
        later = absent_in(self.header["format"])
        self._absent: set[str] = set()
        for field in SCHEMA:
            index = schema.get_field_index(field.name)
            if index < 0 and (field.name in later or field.name in KINDS):  # it has no rows of this kind
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

    def _row_groups(self) -> list[dict[str, list[_Rows]]]:
        # Read kinds as data, not from the footer's statistics, and count values as they are read: pyarrow's accessors
        # for column metadata terminate the process if the footer is damaged.
        parts = len(self.header["parts"]) if self.is_merged else 1
        groups: list[dict[str, list[_Rows]]] = [defaultdict(list) for _ in range(parts)]
        rows_left = self._most_bytes // 8
        for index in range(self._file.metadata.num_row_groups):
            group = self._file.metadata.row_group(index)
            rows_left -= max(group.num_rows, 0)
            if not 0 <= group.num_rows <= min(MAX_ROWS, rows_left) or not 0 <= group.total_byte_size <= MAX_GROUP_BYTES:
                raise CaptureError(f"{self.path} is damaged: a row group of it declares an absurd size")
            if not group.num_rows:
                continue
            kinds, _ = self._runs(index, "kind")
            if len(kinds) != 1:
                raise CaptureError(f"{self.path} is damaged: a row group of it has rows of several kinds, or of none")
            if kinds[0] not in KINDS:
                continue  # of a later version of this format
            if kinds[0] in self._absent:
                raise CaptureError(f"{self.path} is damaged: it has no column '{kinds[0]}'")
            numbers, ends = self._runs(index, "part") if self.is_merged else ([0], [group.num_rows])
            if len(numbers) > PARTS_PER_GROUP or numbers != sorted(set(numbers)) or numbers[-1] >= parts:
                raise CaptureError(f"{self.path} is damaged: the parts of a row group are not in their order")
            for number, start, end in zip(numbers, [0, *ends], ends, strict=False):
                groups[number][kinds[0]].append(_Rows(index, start, end))
        return groups

    def _runs(self, index: int, name: str) -> tuple[list[Any], list[int]]:
        """The run values of a column without nulls (at most PARTS_PER_GROUP + 1), and the end of each run."""
        column = self._read(index, [name], name).column(0)
        with self._damaged(name):
            column.validate(full=True)
            values = pa.concat_arrays(column.unify_dictionaries().chunks)
            is_dictionary = pa.types.is_dictionary(values.type)
            runs = pc.run_end_encode(values.indices if is_dictionary else values)
            found = runs.values[: PARTS_PER_GROUP + 1]  # one too many, to detect more
            found = (values.dictionary.take(found) if is_dictionary else found).to_pylist()
            if None in found:
                raise ValueError(f"a row has no {name}")
            return found, runs.run_ends.to_pylist()[: len(found)]

    def _rows_of(self, kind: str) -> list[_Rows]:
        if self._own is None:
            raise CaptureError(
                f"{self.path} was merged from {len(self.header['parts']):,} captures, and this command reads one at a "
                "time: name one of those"
            )
        return self._groups[self._own].get(kind, [])

    def count(self, kind: str) -> int:
        """The number of rows of a kind, without reading them.

        Raises:
                CaptureError: the capture is merged: count in its parts instead.
        """
        return sum(rows.end - rows.start for rows in self._rows_of(kind))

    def _read(self, index: int, columns: list[str], what: str) -> pa.Table:
        with self._damaged(what):
            return self._file.read_row_group(index, columns=columns)

    def _can_read_ahead(self, groups: int) -> bool:
        return groups > _READERS and not self.is_stored and len(os.sched_getaffinity(0)) > 1

    @contextlib.contextmanager
    def _damaged(self, what: str) -> Iterator[None]:
        try:
            yield
        except MemoryError as error:
            raise self._too_large(f"{what} rows") from error
        except (OSError, pa.ArrowException, ValueError, IndexError) as error:
            raise CaptureError(f"{self.path} is damaged in its {what} rows: {_first_line(error)}") from error

    def groups(self, kind: str) -> int:
        """The number of row groups with rows of a kind."""
        return len(self._rows_of(kind))

    def tables(self, kind: str, columns: tuple[str, ...] = ()) -> Iterator[pa.Table]:
        """The rows of a kind, a table per row group, with the struct's fields as columns.

        Columns that are never null by the format have no nulls; texts are valid UTF-8, of bounded length, and
        dictionaries.

        Args:
            kind: a key of KINDS.
            columns: names of fields; all if empty.

        Raises:
            CaptureError: the file is damaged there, or the capture is merged: read its parts instead.
        """
        names = self._names_to_read(kind, columns)
        return self._checked_tables(
            kind, columns, (self._read(each.group, names, kind) for each in self._rows_of(kind))
        )

    @contextlib.contextmanager
    def tables_ahead(self, kind: str, columns: tuple[str, ...] = ()) -> Iterator[Iterator[pa.Table]]:
        """What `tables` returns, of which threads read the first row groups now, and later ones while others are used.

        Args:
            kind: a key of KINDS.
            columns: names of fields; all if empty.
        """
        groups = [each.group for each in self._rows_of(kind)]
        if not self._can_read_ahead(len(groups)):
            yield self.tables(kind, columns)
            return
        names = self._names_to_read(kind, columns)
        with _Ahead([partial(self._read, group, names, kind) for group in groups]) as tables:
            yield self._checked_tables(kind, columns, iter(tables))

    def _names_to_read(self, kind: str, columns: tuple[str, ...]) -> list[str]:
        present, there = self._present(kind, columns)
        # One column more tells how many rows there are, if the file has none of those.
        return [f"{kind}.{name}" for name in present or there[:1]]

    def _present(self, kind: str, columns: tuple[str, ...]) -> tuple[list[str], list[str]]:
        """Those of the columns, and all of the kind's, that the file has."""
        there = [name for name in _read_schema(kind, ()).names if f"{kind}.{name}" not in self._absent]
        return [name for name in _read_schema(kind, columns).names if name in there], there

    def _checked_tables(self, kind: str, columns: tuple[str, ...], tables: Iterator[pa.Table]) -> Iterator[pa.Table]:
        schema = _read_schema(kind, columns)
        present, _ = self._present(kind, columns)
        bytes_left = self._most_bytes
        groups = self._rows_of(kind)
        for (_, start, end), table in zip(groups, tables, strict=True):
            bytes_left -= table.nbytes
            with self._damaged(kind):
                rows = table.column(0)
                if bytes_left >= 0:
                    rows.validate(full=True)
                    bytes_left -= _repeated_bytes(kind, rows)
                if bytes_left < 0:
                    raise ValueError("they are absurdly many for a file of its size")
                if rows.null_count:
                    raise ValueError("a row of it has no value")
                if end - start < len(rows):
                    rows = _copied(rows, start, end)
                arrays = [
                    pa.chunked_array([_checked(rows_.field(f.name), f, kind) for rows_ in rows.chunks], f.type)
                    if f.name in present
                    else pa.nulls(len(rows), f.type)
                    for f in schema
                ]
            yield pa.Table.from_arrays(arrays, schema=schema)

    def stacks(self, ids: NDArray[np.uint64]) -> pa.Table:
        """The `stack` rows with these ids. CaptureError: see `tables`, or they name absurdly many places."""
        chosen = pa.array(ids)
        tables = [table.filter(pc.is_in(table["id"], chosen)) for table in self.tables("stack")]
        found = pa.concat_tables([_read_schema("stack", ()).empty_table(), *tables]).unify_dictionaries()
        addresses = pc.list_flatten(found["ips"])
        if len(addresses) > ADDRESSES.most:
            self.check(pc.count_distinct(addresses).as_py(), ADDRESSES)
        python = pc.list_flatten(found["python"])
        if len(python) > PYTHON_LINES.most:
            code, line = (pc.struct_field(python, name).to_numpy().astype(np.uint64) for name in ("code", "line"))
            self.check(pc.count_distinct(pa.array(code << np.uint64(32) | line)).as_py(), PYTHON_LINES)
        return found

    def table(self, kind: str, columns: tuple[str, ...] = ()) -> pa.Table:
        """All rows of a kind in one table, for kinds with few rows."""
        schema = _read_schema(kind, columns)
        with self._damaged(kind):
            return pa.concat_tables([schema.empty_table(), *self.tables(kind, columns)]).unify_dictionaries()


def _is_of_a_part(header: Any) -> bool:
    return isinstance(header, dict) and "parts" not in header


def _read_schema(kind: str, columns: tuple[str, ...]) -> pa.Schema:
    fields = [KINDS[kind].field(name) for name in columns] if columns else list(KINDS[kind])
    texts = {f.name for f in fields if FIELDS[f"{kind}.{f.name}"].is_text}
    return pa.schema([f.with_type(pa.dictionary(pa.int32(), f.type)) if f.name in texts else f for f in fields])


def _checked(values: pa.Array, field: pa.Field, kind: str) -> pa.Array:
    """A field's values in the type that `tables` returns; ValueError if they violate the format."""
    is_list = pa.types.is_list(values.type)
    nulls = values.null_count and f"{kind}.{field.name}" not in NULLABLE
    if nulls or (is_list and _has_nulls(values.flatten())):
        raise ValueError(f"column '{field.name}' has nulls")
    if pa.types.is_dictionary(values.type):
        texts = values.dictionary
        if texts.null_count:  # a valid encoding of nulls, used by other programs
            return _checked(with_null_rows(values), field, kind)
        longest = pc.max(pc.binary_length(texts)).as_py() or 0
        if not FIELDS[f"{kind}.{field.name}"].flags & WHOLE and longest > MAX_TEXT_BYTES:
            raise ValueError(f"a text in column '{field.name}' has {longest} bytes")
    return values.cast(field.type) if is_list else values


def _has_nulls(elements: pa.Array) -> bool:
    """Whether a list has a null element, or an element with a null field."""
    members = elements.flatten() if pa.types.is_struct(elements.type) else []
    return bool(elements.null_count or any(member.null_count for member in members))


def _repeated_bytes(kind: str, rows: pa.ChunkedArray) -> int:
    """The additional size, in bytes, of repeated binaries when each row has a copy of its own."""
    fields = [f for f in rows.type if FIELDS[f"{kind}.{f.name}"].flags & WHOLE and pa.types.is_dictionary(f.type)]
    columns = [chunk.field(f.name) for f in fields for chunk in rows.chunks]
    return sum(max(decoded_bytes(column) - column.dictionary.nbytes, 0) for column in columns)


def _copied(rows: pa.ChunkedArray, start: int, end: int) -> pa.ChunkedArray:
    """A copy of some rows by themselves: lists begin at 0, and dictionaries lack the texts of other rows."""
    taken = pa.concat_arrays(rows.take(pa.array(np.arange(start, end))).chunks)
    members = []
    for member in taken.flatten():
        if pa.types.is_dictionary(member.type):
            used = member.indices.dictionary_encode()
            member = pa.DictionaryArray.from_arrays(used.indices, member.dictionary.take(used.dictionary))
        members.append(member)
    return pa.chunked_array([pa.StructArray.from_arrays(members, fields=list(taken.type))])


def _alike(found: pa.DataType, wanted: pa.DataType) -> bool:
    if pa.types.is_dictionary(found):
        found = found.value_type
    if pa.types.is_list(wanted):
        return bool(pa.types.is_list(found) and found.value_type == wanted.value_type)
    return bool(found == wanted)


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
