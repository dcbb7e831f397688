"""Converts names to and from a capture's `module` and `symbol` rows, and names its addresses."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from iaprof.formats.capture.dictionaries import shared_texts
from iaprof.formats.capture.reader import CaptureReader
from iaprof.formats.capture.schema import KINDS
from iaprof.formats.capture.writer import RowWriter
from iaprof.formats.ranges import ranges
from iaprof.symbols.names.names import Module, ModuleKind, Names, Symbolized, Symbolizer, shortened

FRAMES_PER_GROUP = 1 << 18
_ABOUT = ("source", "problem", "frame_pointers", "outermost", "no_calls")  # members that Symbolized has, too

Progress = Callable[[int, int], None]
"""Takes the number of modules that are done, and of all modules."""


def module_row(number: int, module: Module, symbolized: Symbolized) -> dict[str, Any]:
    """Returns the members of a module's `module` row; `number` is its id."""
    return {
        "id": number,
        "what": module.kind.value,
        "path": _valid(module.path),
        "build_id": module.build_id,
        "inode": module.inode,
        "pid": module.pid,
        "source": _valid(symbolized.source),
        "problem": _valid(symbolized.problem),
        "frame_pointers": symbolized.frame_pointers,
        "outermost": symbolized.outermost,
        "no_calls": symbolized.no_calls,
    }


def symbol_rows(number: int, names: Names) -> Iterator[pa.StructArray]:
    """Yields the `symbol` rows of the module with this id, at most FRAMES_PER_GROUP at a time."""
    counts = np.diff(names.starts)
    entries = np.repeat(np.arange(len(names)), counts)
    depths = ranges(0, counts)
    strings = pa.array([_valid(text) for text in names.strings], pa.string())
    for start in range(0, len(entries), FRAMES_PER_GROUP):
        piece = slice(start, start + FRAMES_PER_GROUP)
        columns = [
            pa.repeat(pa.scalar(number, pa.uint32()), len(entries[piece])),
            pa.array(names.addresses[entries[piece]]),
            pa.array(names.sizes[entries[piece]]),
            pa.array(depths[piece].astype(np.uint16)),
            pa.DictionaryArray.from_arrays(pa.array(names.functions[piece], pa.int32()), strings),
            pa.DictionaryArray.from_arrays(pa.array(names.files[piece], pa.int32()), strings),
            pa.array(names.lines[piece]),
        ]
        yield pa.StructArray.from_arrays(columns, names=[field.name for field in KINDS["symbol"]])


def _valid(text: str) -> str:
    """Returns a text for a capture, which has 16 KiB at most, all of it UTF-8."""
    return shortened(text.encode("utf-8", "backslashreplace").decode())


class CaptureNames:
    """A Symbolizer with the names that a capture contains."""

    def __init__(self, capture: CaptureReader) -> None:
        """Reads all names.

        Raises:
            CaptureError: the capture is damaged.
        """
        self._symbolized: dict[tuple[object, ...], Symbolized] = {}  # by the module's identity
        names, nothing = _names(capture), Names.of([])
        table = capture.table("module")
        columns = (
            shared_texts(table[name]) if pa.types.is_dictionary(table[name].type) else table[name].to_pylist()
            for name in (*("id", "what", "path", "build_id", "inode", "pid"), *_ABOUT)
        )
        for number, kind, path, build_id, inode, pid, source, problem, has_pointers, *lists in zip(
            *columns, strict=True
        ):
            if kind not in set(ModuleKind):
                continue  # a later version of iaprof wrote the capture
            module = Module(ModuleKind(kind), path, build_id, inode, pid)
            outermost, no_calls = (None if column is None else np.array(column, np.uint64) for column in lists)
            own = names.get(number, nothing)
            self._symbolized[module.identity] = Symbolized(own, source, problem, has_pointers, outermost, no_calls)

    def name(self, module: Module, addresses: NDArray[np.uint64], times: NDArray[np.uint64]) -> Symbolized | None:
        """See Symbolizer."""
        return self._symbolized.get(module.identity)


def _names(capture: CaptureReader) -> dict[int, Names]:
    """Returns the names of each module, by its id. Rows may come in any order and with any sizes."""
    table = capture.table("symbol")
    if not len(table):
        return {}
    modules, addresses, sizes, depths, lines = (
        table[name].to_numpy() for name in ("module", "address", "size", "depth", "line")
    )
    functions, files = (table[name].combine_chunks() for name in ("function", "file"))
    strings, (function, file) = _one_table(functions, files)
    # Of ranges that begin at the same address the largest comes first. The frames of a range are sorted by depth.
    order = np.lexsort((depths, ~sizes, addresses, modules))
    modules, addresses, sizes, depths, lines = (c[order] for c in (modules, addresses, sizes, depths, lines))
    function, file = function[order], file[order]
    begins = np.ones(len(modules), bool)
    begins[1:] = (modules[1:] != modules[:-1]) | (addresses[1:] != addresses[:-1]) | (sizes[1:] != sizes[:-1])
    first = np.flatnonzero(begins)
    names = {}
    numbers, lows = np.unique(modules, return_index=True)
    for number, low, high in zip(numbers.tolist(), lows.tolist(), [*lows[1:].tolist(), len(modules)], strict=True):
        heads = first[slice(*np.searchsorted(first, [low, high]))]
        starts = np.append(heads, high) - low
        # Each module gets only its own texts: going through them must not take as long as through all of a capture.
        texts, indices = np.unique(np.concatenate([function[low:high], file[low:high]]), return_inverse=True)
        functions, files = np.split(indices.astype(np.int32), 2)
        own = [strings[text] for text in texts.tolist()]
        names[number] = Names(addresses[heads], sizes[heads], starts, functions, files, lines[low:high], own)
    return names


def _one_table(*columns: pa.Array) -> tuple[list[str], list[NDArray[np.int32]]]:
    """Returns the texts of several columns as one list, and each column as indices into it."""
    texts: list[str] = []
    indices = []
    for column in columns:
        column = pa.concat_arrays(column.chunks) if isinstance(column, pa.ChunkedArray) else column
        column = column if pa.types.is_dictionary(column.type) else pc.dictionary_encode(column)
        indices.append((column.indices.to_numpy(zero_copy_only=False) + len(texts)).astype(np.int32))
        texts += column.dictionary.to_pylist()
    return texts, indices


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
    writer: RowWriter,
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
