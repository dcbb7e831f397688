"""Queries a capture with DuckDB, an optional dependency.

Queries are untrusted: a user may have copied one from elsewhere. So DuckDB sees only the tables that are made here. It
may not open files or connections, load extensions, or see Python variables.

Captures are untrusted, too, so rows come from our checked reader, not from DuckDB's Parquet code. A table has a schema,
and a stream of rows that can be read repeatedly. Rows stream in batches, so that captures of any size can be queried.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from operator import methodcaller
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from iaprof.basics.errors import IaprofError, UsageError
from iaprof.formats.capture.limits import COMPILED, CaptureError
from iaprof.formats.capture.reader import CaptureReader
from iaprof.formats.capture.schema import KINDS, READ_COLUMNS, ROW_KINDS, sorted_kinds
from iaprof.formats.profile import Profile, StackOptions
from iaprof.formats.writers.profile_table import SCHEMA, profile_table
from iaprof.gpu.code import ADDRESS_MASK
from iaprof.gpu.samples import SampleLayout, SampleRows
from iaprof.gpu.vendors import SAMPLE_ROWS, layouts
from iaprof.report.gpu.module import GpuKernel, GpuModuleLoader
from iaprof.report.join.streams import streams
from iaprof.sandbox.memory import limit

if TYPE_CHECKING:
    import pyarrow as pa
    from duckdb import DuckDBPyConnection

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
     ("size", pa.uint64()), ("code", _text), ("simd", pa.uint16())]
)  # fmt: skip
_CALLED = {"process": "comm", "instruction": "mnemonic"}  # the names of these columns in other tables
_SAMPLES = pa.schema([f.with_name(_CALLED.get(f.name, f.name)) for f in SCHEMA if f.name != "device"])

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


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
    for name in dict.fromkeys(name for layout in _LAYOUTS if layout in used for name in layout.more_sql()):
        of_each = {layout: layout.more_sql().get(name, "NULL") for layout in _LAYOUTS}
        columns.append(f"({each(of_each.__getitem__)})::UBIGINT AS {name}")
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
            needed = np.array([layout.words > word for layout in _LAYOUTS])[layouts]
            has = needed | (reads[name].is_valid().to_numpy(zero_copy_only=False) & (word >= rows.required))
            if not np.array_equal(lengths[has], _lengths(reads[name])[has]):
                raise CaptureError(f"{self.capture.path} has stalls whose words do not belong together")
            if has.all():
                words.append(reads[name].flatten())
                continue
            values, there = np.zeros(int(lengths.sum()), np.uint64), np.repeat(has, lengths)
            values[there] = reads.filter(pa.array(has))[name].flatten().to_numpy()
            words.append(pa.array(values, mask=~there))
        words += [pa.nulls(int(lengths.sum()), pa.uint64())] * (_MOST_WORDS - len(words))
        each = [pa.array(np.repeat(reads[name].to_numpy(), lengths)) for name in READ_COLUMNS]
        return pa.RecordBatch.from_arrays([*each, pa.array(np.repeat(layouts, lengths)), *words], schema=_WORDS)

    def kernels(self) -> Iterator[pa.RecordBatch]:
        """Yields a row for each kernel of each module, and one without a kernel for each unreadable module."""
        known: dict[bytes, tuple[GpuKernel, ...]] = {}  # by digest: the first row with it has the module
        compiled = 0
        with GpuModuleLoader() as modules:
            for table in self.capture.tables("kernel", ("time_ns", "pid", "path", "digest", "elf", "base")):
                for index in range(len(table)):  # there are few modules
                    time_ns, pid, path, digest, elf, base = (table[name][index].as_py() for name in table.column_names)
                    if digest not in known and elf is not None:
                        known[digest] = modules.load(elf, None, only=()).kernels
                    compiled += len(known.get(digest, ())) + 1
                    self.capture.check_parts(compiled, COMPILED)
                    rows: list[tuple[Any, ...]] = [
                        (
                            each.demangled,
                            ((base or 0) + each.address) & ADDRESS_MASK,
                            each.size,
                            each.fingerprint,
                            each.simd or None,
                        )
                        for each in known.get(digest, ())
                    ]
                    columns = zip(*((time_ns, pid, path, *row) for row in rows or [(None,) * 5]), strict=True)
                    arrays = [pa.array(c, f.type) for c, f in zip(columns, _KERNELS, strict=True)]
                    yield pa.RecordBatch.from_arrays(arrays, schema=_KERNELS)


def _lengths(lists: pa.Array) -> NDArray[np.int64]:
    lengths: NDArray[np.int64] = pc.fill_null(pc.list_value_length(lists), 0).to_numpy().astype(np.int64)
    return lengths


def _samples(profile: Profile) -> Iterator[pa.RecordBatch]:
    """Yields a row for each stack, instruction and reason."""
    table = profile_table(profile, StackOptions()).drop_columns(["device"])
    yield from table.rename_columns(_SAMPLES.names).to_batches()


@contextlib.contextmanager
def interrupting(interrupt: Callable[[], None]) -> Iterator[None]:
    """Calls `interrupt` in a thread when a signal that ends the verb comes within the block.

    The signal's own handler is called as ever: when the main thread is back in Python.
    """
    if threading.current_thread() is not threading.main_thread():  # only there are signals handled
        yield
        return
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    waiting = threading.Thread(target=_wait, args=(reader, interrupt), daemon=True)
    before = signal.set_wakeup_fd(-1)
    try:
        with contextlib.suppress(RuntimeError):  # no memory for a thread: DuckDB's own look has to do
            waiting.start()
        signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        yield
    finally:
        signal.set_wakeup_fd(before)
        writer.close()
        if waiting.ident is not None:
            waiting.join()
        reader.close()


def _wait(reader: socket.socket, interrupt: Callable[[], None]) -> None:
    with contextlib.suppress(OSError):  # Ctrl-C ended the block before this began
        while number := reader.recv(1):
            if number[0] in _ENDING:
                interrupt()


_USUAL_MEMORY = 2 << 30  # bytes
_SHARE = 0.75  # DuckDB's share of the process's memory limit
_MAX_THREADS = 8
_ROWS_AT_ONCE = 4_096
_BATCH_ROWS = 1 << 16
_MAX_MESSAGE = 500
_NOTHING = "the query is empty: give it a SELECT"
_INTERRUPTED = "Query interrupted"  # the message of the RuntimeError that DuckDB's bindings raise on Ctrl-C
_SETTINGS = (
    "SET temp_directory = ''",  # else DuckDB would spill to the current folder
    "SET enable_external_access = false",
    "SET lock_configuration = true",  # the query cannot undo these settings
)


class Database:
    """A DuckDB connection with the tables of a capture; also a context manager."""

    def __init__(self, capture: CaptureReader, profile: Callable[[], Profile]) -> None:
        """Registers the tables, without reading any rows.

        Args:
            capture: the open capture.
            profile: joins the capture; called once, when a query reads samples.

        Raises:
            UsageError: DuckDB is not installed.
            IaprofError: DuckDB refuses a table.
        """
        try:
            import duckdb
        except ImportError:
            raise UsageError("queries need DuckDB, which is not installed: pip install 'iaprof[query]'") from None
        threads = min(len(os.sched_getaffinity(0)), _MAX_THREADS)
        self._memory = f"{int(_SHARE * (limit() or _USUAL_MEMORY)) >> 20}MiB"
        self._connection: DuckDBPyConnection = duckdb.connect(
            ":memory:", config={"memory_limit": self._memory, "threads": threads, "python_enable_replacements": False}
        )
        self._views = views(capture, profile)
        with contextlib.ExitStack() as opened:
            opened.callback(self._connection.close)
            opened.enter_context(interrupting(self._connection.interrupt))
            with self._translated():
                for setting in _SETTINGS[:2]:
                    self._connection.execute(setting)
                for view in self._views:
                    self._connection.register(view.name, view)
                self._connection.execute(f"CREATE VIEW stalls AS {stalls_sql(capture)}")
                self._connection.execute(_SETTINGS[2])
            self._until_exit = opened.pop_all()
        for view in self._views:
            view.will_be_read = True

    def __enter__(self) -> Database:
        """Returns the database."""
        return self

    def __exit__(self, *_: object) -> None:
        """Closes the connection."""
        self._until_exit.close()

    def tables(self) -> Iterator[tuple[str, str, list[str]]]:
        """Yields each table's name, a description of its rows, and its columns."""
        for view in self._views:
            if view.name == WORDS:
                columns = self._execute("SELECT * FROM stalls LIMIT 0")
                yield "stalls", "each record of samples: an address, and a counter for each reason", columns
            else:
                yield view.name, view.about, view.schema.names

    def query(self, sql: str) -> tuple[list[str], Iterator[list[tuple[Any, ...]]]]:
        """Runs a query; returns the names of the result's columns, and its rows in batches.

        Raises:
            IaprofError: the query fails, or the capture is damaged.
        """
        return self._execute(sql), self._rows()

    def query_batches(self, sql: str) -> tuple[pa.Schema, Iterator[pa.RecordBatch]]:
        """Runs a query; returns the schema of the result, and its rows as Arrow batches.

        Raises:
            IaprofError: the query fails, or the capture is damaged.
        """
        with self._translated():
            relation = self._connection.sql(sql)
        if relation is None:
            raise UsageError(_NOTHING)
        with self._translated():
            reader: pa.RecordBatchReader = relation.to_arrow_reader(_BATCH_ROWS)
            return reader.schema, self._batches(reader)

    def _execute(self, sql: str) -> list[str]:
        """Runs a query; returns the names of the result's columns."""
        with self._translated():
            self._connection.execute(sql)
            description = self._connection.description
        if not description:
            raise UsageError(_NOTHING)
        return [column[0] for column in description]

    def _batches(self, reader: pa.RecordBatchReader) -> Iterator[pa.RecordBatch]:
        while True:
            with self._translated():
                batch = next(reader, None)
            if batch is None:
                return
            yield batch

    def _translated(self) -> _TranslatedErrors:
        return _TranslatedErrors(self._views, self._memory)

    def _rows(self) -> Iterator[list[tuple[Any, ...]]]:
        while True:
            with self._translated():
                rows = self._connection.fetchmany(_ROWS_AT_ONCE)
            if not rows:
                return
            yield rows


class _TranslatedErrors:
    """Context manager that turns DuckDB's errors into one sentence, and raises the views' own errors unwrapped."""

    def __init__(self, views: list[View], memory: str) -> None:
        self._views, self._memory = views, memory

    def __enter__(self) -> None:
        """Does nothing."""

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        """Raises the translated error."""
        import duckdb

        if error is None:
            return
        if (ours := next((view.error for view in self._views if view.error is not None), None)) is not None:
            raise ours from None
        if isinstance(error, duckdb.InterruptException) or str(error) == _INTERRUPTED:
            raise KeyboardInterrupt from None
        if isinstance(error, duckdb.OutOfMemoryException):
            raise IaprofError(
                f"the query needs more memory than the {self._memory} it may use: let it read less, "
                "or allow more with --memory-limit"
            ) from None
        if isinstance(error, duckdb.Error):
            message = " ".join(str(error).partition("\n\nLINE ")[0].split())
            raise IaprofError(f"the query failed: {message[:_MAX_MESSAGE]}") from None
