"""Finishes and names a recording's stacks when its capture is written, in `iaprof record` and `iaprof recover`."""

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
from iaprof.symbols.names.rows import Cancellation, Progress, write_names
from iaprof.symbols.names.which import Symbols

_NICE = 10  # a busy program on the same CPU gets ten times as much of it


def stack_finisher(kept_roots: Mapping[int, int] | None = None) -> FinishStacks:
    """Returns the function with which finish() finishes stacks that were not finished while recording.

    Args:
        kept_roots: see symbol_writer.
    """

    def finish(inputs: SymbolInputs, copies: Iterator[NDArray[np.void]], depth: int) -> Iterator[bytes]:
        from iaprof.record.symbolize.symbolizer import RecordingSymbolizer
        from iaprof.record.unwinding.late import LateFinishing

        mappings, processes = inputs.rows.table("mapping"), inputs.rows.table("process")
        roots: dict[int, int | str] = {**inputs.roots, **(kept_roots or {})}
        with RecordingSymbolizer(
            inputs.header, inputs.spaces, mappings, processes, False, inputs.files, roots, inputs.accounts
        ) as symbolizer:
            yield from LateFinishing(symbolizer, inputs.spaces, depth).finish(copies)

    return finish


def symbol_writer(
    which: Symbols, progress: Progress, kept_roots: Mapping[int, int] | None = None
) -> Callable[[SymbolInputs, CaptureWriter], dict[str, Any]]:
    """Returns the function with which finish() writes names. SIGINT ends that early, with the names found so far.

    Args:
        which: which addresses get names.
        progress: is called with the number of modules named so far, and of all.
        kept_roots: descriptors of roots that were kept open, by process.
    """

    def write(inputs: SymbolInputs, writer: CaptureWriter) -> dict[str, Any]:
        from iaprof.record.symbolize.symbolizer import RecordingSymbolizer

        before = cpu_seconds() + children_cpu_seconds()
        os.setpriority(os.PRIO_PROCESS, 0, _NICE)  # naming can wait, other programs cannot
        mappings, processes = inputs.rows.table("mapping"), inputs.rows.table("process")
        spaces = inputs.spaces
        modules = list(inputs.needed.modules(spaces))

        cancellation = Cancellation()

        def skip(_number: int, _frame: FrameType | None) -> None:
            cancellation.cancel()

        roots: dict[int, int | str] = {**inputs.roots, **(kept_roots or {})}
        everything = which is Symbols.ALL
        with RecordingSymbolizer(
            inputs.header, spaces, mappings, processes, everything, inputs.files, roots, inputs.accounts
        ) as symbolizer:
            previous = signal.signal(signal.SIGINT, skip)
            try:
                counts = write_names(writer, modules, symbolizer, progress, cancellation, inputs.add_names)
            finally:
                signal.signal(signal.SIGINT, previous)
        return {"which": which.value, **counts, "cpu_s": round(cpu_seconds() + children_cpu_seconds() - before, 3)}

    return write
