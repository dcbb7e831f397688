"""The names of a recording, written when its capture is: by `iaprof record` and `iaprof recover`."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from iaprof.formats.capture.writer import CaptureWriter
from iaprof.record.own_cost import children_cpu_seconds, cpu_seconds
from iaprof.record.symbolize.needed import FinishStacks, SymbolInputs
from iaprof.symbols.names.which import Symbols
from iaprof.symbols.names.write_names import Patience, Progress, write_names

_NICE = 19


def late_stacks(kept: Mapping[int, int] | None = None) -> FinishStacks:
    """What finish() takes to finish stacks that were not finished while recording.

    Args:
        kept: see recorded_symbols.
    """

    def finish(recorded: SymbolInputs, copies: Iterator[NDArray[np.void]], depth: int) -> Iterator[bytes]:
        from iaprof.record.symbolize.symbolizer import RecordedNaming
        from iaprof.record.unwinding.late import LateFinishing

        mappings, processes = recorded.table("mapping"), recorded.table("process")
        roots: dict[int, int | str] = {**recorded.roots, **(kept or {})}
        with RecordedNaming(
            recorded.header, recorded.spaces, mappings, processes, False, recorded.files, roots
        ) as naming:
            yield from LateFinishing(naming, recorded.spaces, depth).finish(copies)

    return finish


def recorded_symbols(
    which: Symbols, progress: Progress, kept: Mapping[int, int] | None = None
) -> Callable[[SymbolInputs, CaptureWriter], dict[str, Any]]:
    """What finish() takes to write names; SIGINT ends it early, with what has names by then.

    Args:
        which: of the names.
        progress: is told how it goes.
        kept: descriptors of roots that were kept open, by process.
    """

    def write(recorded: SymbolInputs, writer: CaptureWriter) -> dict[str, Any]:
        from iaprof.record.symbolize.symbolizer import RecordedNaming

        before = cpu_seconds() + children_cpu_seconds()
        os.setpriority(os.PRIO_PROCESS, 0, _NICE)  # the machine has better things to do
        mappings, processes = recorded.table("mapping"), recorded.table("process")
        spaces = recorded.spaces
        modules = list(recorded.needed.modules(spaces))

        patience = Patience()

        def skip(_number: int, _frame: FrameType | None) -> None:
            patience.end()

        roots: dict[int, int | str] = {**recorded.roots, **(kept or {})}
        everything = which is Symbols.ALL
        with RecordedNaming(recorded.header, spaces, mappings, processes, everything, recorded.files, roots) as naming:
            previous = signal.signal(signal.SIGINT, skip)
            try:
                counts = write_names(writer, modules, naming, progress, patience, recorded.add_names)
            finally:
                signal.signal(signal.SIGINT, previous)
        return {"which": which.value, **counts, "cpu_s": round(cpu_seconds() + children_cpu_seconds() - before, 3)}

    return write
