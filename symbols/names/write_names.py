"""Writes the names of a capture's stacks into it: a `module` row for each module, and its `symbol` rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from iaprof.formats.capture.schema import KINDS
from iaprof.formats.capture.writer import CaptureWriter
from iaprof.symbols.names.modules import Module
from iaprof.symbols.names.names import Symbolized, Symbolizer
from iaprof.symbols.names.rows import FRAMES_PER_GROUP, module_row, symbol_rows

Progress = Callable[[int, int], None]
"""Takes the number of modules that are done, and of all modules."""


class _Cancelled(BaseException):
    """Derives from BaseException, so that no `except Exception` on the way up catches it."""


class Cancellation:
    """Lets a signal handler end symbolizing early."""

    def __init__(self) -> None:
        self.is_cancelled = False
        self._is_symbolizing = False

    def cancel(self) -> None:
        """Ends symbolizing, also in the middle of a module; a signal handler calls this.

        Raises:
            _Cancelled: a symbolizer is at work; `name` catches it.
        """
        self.is_cancelled = True
        if self._is_symbolizing:
            raise _Cancelled

    def name(
        self, symbolizer: Symbolizer, request: tuple[Module, NDArray[np.uint64], NDArray[np.uint64]]
    ) -> Symbolized | None:
        """Has a symbolizer name the addresses of a module; returns None if symbolizing was cancelled.

        Args:
            symbolizer: names the addresses.
            request: the arguments of Symbolizer.name.
        """
        try:
            try:
                self._is_symbolizing = True
                return None if self.is_cancelled else symbolizer.name(*request) or Symbolized()
            finally:
                self._is_symbolizing = False
        except _Cancelled:
            self._is_symbolizing = False
            return None


def write_names(
    writer: CaptureWriter,
    modules: Iterable[tuple[Module, NDArray[np.uint64], NDArray[np.uint64]]],
    symbolizer: Symbolizer,
    progress: Progress,
    cancellation: Cancellation | None = None,
    rewrite: Callable[[Module, Symbolized], tuple[Module, Symbolized]] | None = None,
) -> dict[str, Any]:
    """Names addresses and writes the rows.

    Args:
        writer: of the capture.
        modules: each module with its addresses and times, see StackAddresses.modules.
        symbolizer: names the addresses.
        progress: called before each module.
        cancellation: once cancelled, the remaining modules get no names.
        rewrite: changes a module and its names before they are written.

    Returns:
        Counts for the header: `modules`, `addresses`, `named` addresses and `skipped` modules.

    Raises:
        OSError: the disk is full, or the like.
    """
    requests = list(modules)
    counts = {"modules": len(requests), "addresses": 0, "named": 0, "skipped": 0}
    module_rows: list[dict[str, Any]] = []
    symbols: list[pa.StructArray] = []

    def flush() -> None:
        if symbols:
            writer.write("symbol", pa.concat_arrays(symbols))
            symbols.clear()

    cancellation = cancellation or Cancellation()
    for number, request in enumerate(requests):
        progress(number, len(requests))
        symbolized = cancellation.name(symbolizer, request)
        if symbolized is None:
            counts["skipped"] += 1
            symbolized = Symbolized(problem="naming was stopped before it was read")
        module, addresses, _ = request
        counts["addresses"] += len(addresses)
        counts["named"] += int((symbolized.names.find(addresses) >= 0).sum())
        if rewrite is not None:
            module, symbolized = rewrite(module, symbolized)
        module_rows.append(module_row(number, module, symbolized))
        for rows in symbol_rows(number, symbolized.names):
            symbols.append(rows)
            if sum(map(len, symbols)) >= FRAMES_PER_GROUP:
                flush()
    flush()
    if module_rows:
        writer.write("module", pa.array(module_rows, KINDS["module"]))
    return counts
