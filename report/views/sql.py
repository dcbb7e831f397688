"""Queries a capture with DuckDB, an optional dependency.

Queries are untrusted: a user may have copied one from elsewhere. So DuckDB sees only the tables of sql_tables.py. It
may not open files or connections, load extensions, or see Python variables.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from iaprof.basics.errors import IaprofError, UsageError
from iaprof.formats.capture.reader import CaptureReader
from iaprof.formats.profile import Profile
from iaprof.report.views.sql_tables import WORDS, View, stalls_sql, views
from iaprof.sandbox.memory import limit

if TYPE_CHECKING:
    import pyarrow as pa
    from duckdb import DuckDBPyConnection

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


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
                yield "stalls", "each record of EU stalls: an address and ten counters", columns
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
