"""Makes SQL tables of a capture: each has a schema, and a stream of rows that can be read repeatedly.

Captures are untrusted, so rows come from our checked reader, not from DuckDB's Parquet code. They stream in batches, so
that captures of any size can be queried. sql.py runs the queries.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from operator import methodcaller
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from iaprof.formats.capture.limits import CaptureError
from iaprof.formats.capture.reader import CaptureReader
from iaprof.formats.capture.schema import KINDS, READ_COLUMNS, ROW_KINDS, sorted_kinds
from iaprof.formats.profile import Profile, StackOptions
from iaprof.formats.writers.profile_table import SCHEMA, profile_table
from iaprof.gpu.samples import SampleLayout, SampleRows
from iaprof.gpu.vendors import SAMPLE_ROWS, layouts
from iaprof.report.gpu.module import GpuModuleLoader
from iaprof.report.join.streams import streams

WORDS = "stall_words"  # the undecoded records; the view `stalls` decodes them
_FIRST = "launch", "command_list", "transfer", "stack", "python_code", "process", "metric", "loss", "mapping", "wait"
"""The kinds of rows that are listed first, in this order."""
_NAMES = {kind.name: (kind.view, kind.description) for kind in sorted_kinds(ROW_KINDS, _FIRST) if kind.view}
_LAYOUTS = tuple(layouts().values())
_text = pa.string()
_TEXTS = (_text, pa.binary())  # types of columns that stay dictionary-encoded
_MOST_WORDS = max(len(rows.columns) for rows in SAMPLE_ROWS)
_WORDS = pa.schema(
    [("time_ns", pa.uint64()), ("begin_ns", pa.uint64()), ("stream", pa.uint16()), ("layout", pa.uint8()),
     *((f"w{word}", pa.uint64()) for word in range(_MOST_WORDS))]
)  # fmt: skip
_KERNELS = pa.schema(
    [("time_ns", pa.uint64()), ("pid", pa.uint32()), ("path", _text), ("kernel", _text), ("address", pa.uint64()),
     ("size", pa.uint64()), ("code", _text)]
)  # fmt: skip
_CALLED = {"process": "comm", "instruction": "mnemonic"}  # the names of these columns in other tables
_SAMPLES = pa.schema([f.with_name(_CALLED.get(f.name, f.name)) for f in SCHEMA if f.name != "device"])


@dataclass
class View:
    """A table whose rows are made on demand, for Arrow's C stream interface, which DuckDB uses.

    DuckDB asks for the schema in the thread of the query, before it reads rows in threads of its own. Tables with
    `is_kept` make all rows when DuckDB asks for the schema.
    """

    name: str
    about: str
    schema: pa.Schema
    batches: Callable[[], Iterator[pa.RecordBatch]]
    is_kept: bool = False  # make all rows at once, and keep them
    will_be_read: bool = False  # from now on, DuckDB asks for the schema only to read rows
    error: BaseException | None = None  # raised here while DuckDB asked for rows: it only keeps its text
    _kept: list[pa.RecordBatch] | None = field(default=None, repr=False)

    def __arrow_c_schema__(self) -> object:
        """Returns the schema as a capsule."""
        with self._keeping_errors():
            if self.is_kept and self.will_be_read:
                self._keep()
            return self.schema.__arrow_c_schema__()

    def __arrow_c_stream__(self, requested_schema: object | None = None) -> object:
        """Returns all rows, from the first one, as a capsule."""
        with self._keeping_errors():
            rows = iter(self._keep()) if self.is_kept else self._rows()
            return pa.RecordBatchReader.from_batches(self.schema, rows).__arrow_c_stream__(requested_schema)

    def _keep(self) -> list[pa.RecordBatch]:
        if self._kept is None:
            self._kept = list(self._rows())
        return self._kept

    def _rows(self) -> Iterator[pa.RecordBatch]:
        with self._keeping_errors():
            yield from self.batches()

    @contextlib.contextmanager
    def _keeping_errors(self) -> Iterator[None]:
        try:
            yield
        except (Exception, KeyboardInterrupt) as error:
            self.error = error
            raise


def views(capture: CaptureReader, profile: Callable[[], Profile]) -> list[View]:
    """Returns the tables of a capture. In a merged capture, each begins with a column `part`.

    Args:
        capture: the open capture.
        profile: joins the capture; called only when samples are read.
    """
    parts = [_Part(part, number if capture.is_merged else None) for number, part in enumerate(capture.parts)]

    def from_parts(schema: pa.Schema, rows: Callable[[_Part], Iterator[pa.RecordBatch]]) -> dict[str, Any]:
        merged = pa.schema([pa.field("part", pa.uint16()), *schema]) if capture.is_merged else schema
        return {"schema": merged, "batches": lambda: (part.labelled(batch) for part in parts for batch in rows(part))}

    def of_kind(kind: str) -> View:
        name, about = _NAMES[kind]
        return View(name, about, **from_parts(_schema(kind), lambda part: part.rows(kind)))

    return [
        View(WORDS, "each record of EU stalls, as the GPU wrote it", **from_parts(_WORDS, _Part.words)),
        View(
            "samples",
            "the stalls joined to kernels, source and launching stacks",
            _SAMPLES,
            lambda: _samples(profile()),
            is_kept=True,
        ),
        of_kind("launch"),
        View("kernels", "the kernels in each recorded module", **from_parts(_KERNELS, _Part.kernels), is_kept=True),
        *(of_kind(kind) for kind in _NAMES if kind != "launch"),
    ]


def stalls_sql(capture: CaptureReader) -> str:
    """Returns the SELECT that decodes the records in WORDS into an address and counters."""
    used = {stream.layout for part in capture.parts for stream in streams(part.header)} or {_LAYOUTS[0]}

    def each(expression: Callable[[SampleLayout], str]) -> str:
        if len(used) == 1:
            return expression(*used)
        cases = " ".join(f"WHEN {_LAYOUTS.index(layout)} THEN {expression(layout)}" for layout in _LAYOUTS)
        return f"CASE layout {cases} END"

    columns = [*(["part"] if capture.is_merged else []), "time_ns", "begin_ns", "stream"]
    columns.append(f"{each(methodcaller('ip_sql'))} AS ip")
    type_ = "UTINYINT" if all(layout.most <= 0xFF for layout in used) else "UBIGINT"
    for name in dict.fromkeys(name for layout in _LAYOUTS if layout in used for name in layout.reasons):
        columns.append(f"({each(methodcaller('count_sql', name))})::{type_} AS {name}")
    return f"SELECT {', '.join(columns)} FROM {WORDS}"  # noqa: S608 (nothing of it is from the capture)


def _schema(kind: str) -> pa.Schema:
    return pa.schema([f.with_type(pa.dictionary(pa.int32(), f.type)) if f.type in _TEXTS else f for f in KINDS[kind]])


@dataclass(frozen=True)
class _Part:
    """A part of a capture."""

    capture: CaptureReader
    number: int | None  # None: the capture is not merged

    def labelled(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Adds the part's number as the first column."""
        if self.number is None:
            return batch
        number = pa.repeat(pa.scalar(self.number, pa.uint16()), len(batch))
        schema = pa.schema([pa.field("part", pa.uint16()), *batch.schema])
        return pa.RecordBatch.from_arrays([number, *batch.columns], schema=schema)

    def rows(self, kind: str) -> Iterator[pa.RecordBatch]:
        """Yields the rows of a kind."""
        schema = _schema(kind)
        for table in self.capture.tables(kind):
            yield from table.cast(schema).to_batches()

    def words(self) -> Iterator[pa.RecordBatch]:
        """Yields a row for each stall record."""
        known = streams(self.capture.header)
        layouts = np.array([_LAYOUTS.index(stream.layout) for stream in known], np.uint8)
        for rows in SAMPLE_ROWS:
            for table in self.capture.tables(rows.kind, (*READ_COLUMNS, *rows.columns)):
                for read in table.to_batches():
                    stream = read["stream"].to_numpy()
                    if len(stream) and int(stream.max()) >= len(known):
                        raise CaptureError(f"{self.capture.path} has stalls of a stream that its header does not know")
                    yield self._words(read, rows, layouts[stream])

    def _words(self, reads: pa.RecordBatch, rows: SampleRows, layouts: NDArray[np.uint8]) -> pa.RecordBatch:
        lengths = _lengths(reads[rows.columns[0]])
        words = []
        for word, name in enumerate(rows.columns):
            has = np.array([layout.words > word for layout in _LAYOUTS])[layouts]
            if not np.array_equal(lengths[has], _lengths(reads[name])[has]):
                raise CaptureError(f"{self.capture.path} has stalls whose words do not belong together")
            if has.all():
                words.append(reads[name].flatten())
                continue
            values = np.zeros(int(lengths.sum()), np.uint64)
            values[np.repeat(has, lengths)] = reads.filter(pa.array(has))[name].flatten().to_numpy()
            words.append(pa.array(values, mask=None if has.any() else np.ones(len(values), bool)))
        words += [pa.nulls(int(lengths.sum()), pa.uint64())] * (_MOST_WORDS - len(words))
        each = [pa.array(np.repeat(reads[name].to_numpy(), lengths)) for name in READ_COLUMNS]
        return pa.RecordBatch.from_arrays([*each, pa.array(np.repeat(layouts, lengths)), *words], schema=_WORDS)

    def kernels(self) -> Iterator[pa.RecordBatch]:
        """Yields a row for each kernel of each module, and one without a kernel for each unreadable module."""
        with GpuModuleLoader() as modules:
            for table in self.capture.tables("kernel", ("time_ns", "pid", "path", "elf")):
                for index in range(len(table)):  # there are few modules
                    time_ns, pid, path, elf = (table[name][index].as_py() for name in table.column_names)
                    found = modules.load(elf, None, only=()).kernels if elf is not None else ()
                    rows: list[tuple[Any, ...]] = [(k.demangled, k.address, k.size, k.fingerprint) for k in found]
                    columns = zip(*((time_ns, pid, path, *row) for row in rows or [(None,) * 4]), strict=True)
                    arrays = [pa.array(c, f.type) for c, f in zip(columns, _KERNELS, strict=True)]
                    yield pa.RecordBatch.from_arrays(arrays, schema=_KERNELS)


def _lengths(lists: pa.Array) -> NDArray[np.int64]:
    lengths: NDArray[np.int64] = pc.fill_null(pc.list_value_length(lists), 0).to_numpy().astype(np.int64)
    return lengths


def _samples(profile: Profile) -> Iterator[pa.RecordBatch]:
    """Yields a row for each stack, instruction and reason."""
    table = profile_table(profile, StackOptions()).drop_columns(["device"])
    yield from table.rename_columns(_SAMPLES.names).to_batches()
