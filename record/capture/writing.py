"""Writes row groups in a thread: while one is compressed, the rows of the next are made."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import ParamSpec, Self

import pyarrow as pa

from iaprof.formats.capture.writer import RowWriter

P = ParamSpec("P")
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
        self._is_alone = False  # no thread can start

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, type_: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.shutdown()

    def write(self, kind: str, rows: pa.StructArray) -> None:
        """See CaptureWriter; raises what writing the rows before has raised."""
        self.wait()
        if self._is_alone:
            self._writer.write(kind, rows)
            return
        self._last, self._is_alone = run_in(self._pool, self._writer.write, kind, rows)
        if rows.nbytes >= _LARGE:
            self.wait()

    def wait(self) -> None:
        """Waits until all rows are written; raises what `write` raises."""
        last, self._last = self._last, None
        if last is not None:
            last.result()


def run_in(
    pool: ThreadPoolExecutor, call: Callable[P, None], *arguments: P.args, **named: P.kwargs
) -> tuple[Future[None], bool]:
    """Makes a call in a pool's thread, or at once where none can start; raises what it raises then.

    Returns:
        The call, and whether no thread could start: the pool is not to be used again, as it would repeat the call.
    """
    try:
        return pool.submit(call, *arguments, **named), False
    except RuntimeError:  # a limit on processes or memory, perhaps
        call(*arguments, **named)
    done = Future[None]()
    done.set_result(None)
    return done, True
