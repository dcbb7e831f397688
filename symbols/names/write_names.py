"""Writing into a capture what names its stacks: each module is asked for once, and what came of it is a row."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from iaprof.formats.capture.writer import CaptureWriter
from iaprof.symbols.names.modules import Module
from iaprof.symbols.names.names import Named, Naming
from iaprof.symbols.names.rows import FRAMES_PER_GROUP, module_row, symbol_rows

Progress = Callable[[int, int], None]
"""Is told how many modules of how many are done."""


class _Over(BaseException):
    """No Exception, so that nothing on the way can take it for one of its own."""


class Patience:
    """Whether whoever waits for the names still wants to."""

    def __init__(self) -> None:
        self.is_over = False
        self._asking = False

    def end(self) -> None:
        """Ends the naming, also in the middle of a module's; to be called by a signal's handler."""
        self.is_over = True
        if self._asking:
            raise _Over

    def ask(self, naming: Naming, asked: tuple[Module, NDArray[np.uint64], NDArray[np.uint64]]) -> Named | None:
        """What `naming` says of a module; None when the patience ended."""
        try:
            try:
                self._asking = True
                return None if self.is_over else naming.name(*asked) or Named()
            finally:
                self._asking = False
        except _Over:
            self._asking = False
            return None


def write_names(
    writer: CaptureWriter,
    modules: Iterable[tuple[Module, NDArray[np.uint64], NDArray[np.uint64]]],
    naming: Naming,
    progress: Progress,
    patience: Patience | None = None,
    rewrite: Callable[[Module, Named], tuple[Module, Named]] | None = None,
) -> dict[str, Any]:
    """Names addresses and writes the rows.

    Args:
        writer: of the capture.
        modules: what each has to name, see Needed.modules.
        naming: knows the names.
        progress: is told before each module.
        patience: when it is over, the modules that are left get no names.
        rewrite: changes what is written of a module.

    Returns:
        For the header: `modules`, `addresses` and of those `named`, and `skipped` modules.

    Raises:
        OSError: the disk is full, or the like.
    """
    wanted = list(modules)
    counts = {"modules": len(wanted), "addresses": 0, "named": 0, "skipped": 0}
    module_rows: list[pa.StructArray] = []
    symbols: list[pa.StructArray] = []

    def flush() -> None:
        if symbols:
            writer.write("symbol", pa.concat_arrays(symbols))
            symbols.clear()

    patience = patience or Patience()
    for number, asked in enumerate(wanted):
        progress(number, len(wanted))
        named = patience.ask(naming, asked)
        if named is None:
            counts["skipped"] += 1
            named = Named(problem="naming was ended before its turn came")
        module, addresses, _ = asked
        counts["addresses"] += len(addresses)
        counts["named"] += int((named.names.find(addresses) >= 0).sum())
        if rewrite is not None:
            module, named = rewrite(module, named)
        module_rows.append(module_row(number, module, named))
        for rows in symbol_rows(number, named.names):
            symbols.append(rows)
            if sum(map(len, symbols)) >= FRAMES_PER_GROUP:
                flush()
    flush()
    if module_rows:
        writer.write("module", pa.concat_arrays(module_rows))
    return counts
