"""Writes row groups in a thread: while one is compressed, the rows of the next are made."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Self

import pyarrow as pa

from iaprof.formats.capture.writer import RowWriter

_LARGE = 32 << 20  # bytes of a row group that is not in memory together with another one


class WritingThread:
    """Writes rows in the order in which they come, at most one row group behind; also a context manager.

    One thread at a time may use it.
    """

    def __init__(self, writer: RowWriter) -> None:
        """Begins with nothing to write; `writer` gets all rows."""
        self._writer = writer
        self._pool = ThreadPoolExecutor(1)
        self._last: Future[None] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, type_: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.shutdown()

    def write(self, kind: str, rows: pa.StructArray) -> None:
        """See CaptureWriter; raises what writing the rows before has raised."""
        self.wait()
        self._last = self._pool.submit(self._writer.write, kind, rows)
        if rows.nbytes >= _LARGE:
            self.wait()

    def wait(self) -> None:
        """Waits until all rows are written; raises what `write` raises."""
        last, self._last = self._last, None
        if last is not None:
            last.result()
