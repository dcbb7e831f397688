"""Names as the rows of a capture: `module` says what was named and how that went, `symbol` has the names."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from iaprof.formats.capture.dictionaries import shared_texts
from iaprof.formats.capture.reader import CaptureReader
from iaprof.formats.capture.schema import KINDS
from iaprof.formats.ranges import ranges
from iaprof.symbols.names.modules import Module, ModuleKind
from iaprof.symbols.names.names import Named, Names

FRAMES_PER_GROUP = 1 << 18
_ABOUT = ("source", "problem", "frame_pointers", "outermost", "no_calls")  # how the naming of a module went
_LONGEST_TEXT = 1 << 12  # characters; a capture's texts have 16 KiB at most


def module_row(number: int, module: Module, named: Named) -> pa.StructArray:
    """The `module` row of one module."""
    row = {
        "id": number,
        "what": module.kind.value,
        "path": _valid(module.path),
        "build_id": module.build_id,
        "inode": module.inode,
        "pid": module.pid,
        "source": _valid(named.source),
        "problem": _valid(named.problem),
        "frame_pointers": named.frame_pointers,
        "outermost": None if named.outermost is None else named.outermost.tolist(),
        "no_calls": None if named.no_calls is None else named.no_calls.tolist(),
    }
    return pa.array([row], KINDS["module"])


def symbol_rows(number: int, names: Names) -> Iterator[pa.StructArray]:
    """The `symbol` rows of a module's names, at most FRAMES_PER_GROUP at once; functions and files are dictionaries."""
    counts = np.diff(names.starts)
    entries = np.repeat(np.arange(len(names)), counts)
    depths = ranges(0, counts)
    strings = pa.array([_valid(text) for text in names.strings], pa.string())
    for start in range(0, len(entries), FRAMES_PER_GROUP):
        part = slice(start, start + FRAMES_PER_GROUP)
        columns = [
            pa.repeat(pa.scalar(number, pa.uint32()), len(entries[part])),
            pa.array(names.addresses[entries[part]]),
            pa.array(names.sizes[entries[part]]),
            pa.array(depths[part].astype(np.uint16)),
            pa.DictionaryArray.from_arrays(pa.array(names.functions[part], pa.int32()), strings),
            pa.DictionaryArray.from_arrays(pa.array(names.files[part], pa.int32()), strings),
            pa.array(names.lines[part]),
        ]
        yield pa.StructArray.from_arrays(columns, names=[field.name for field in KINDS["symbol"]])


def _valid(text: str) -> str:
    return text[:_LONGEST_TEXT].encode("utf-8", "backslashreplace").decode()


class CaptureNames:
    """A Naming: what the capture itself names."""

    def __init__(self, capture: CaptureReader) -> None:
        """Reads all of it.

        Raises:
            CaptureError: the capture is damaged.
        """
        self._named: dict[tuple[object, ...], Named] = {}
        names = _names(capture)
        table = capture.table("module")
        columns = (
            shared_texts(table[name]) if pa.types.is_dictionary(table[name].type) else table[name].to_pylist()
            for name in (*("id", "what", "path", "build_id", "inode", "pid"), *_ABOUT)
        )
        for number, what, path, build_id, inode, pid, source, problem, keeps, *lists in zip(*columns, strict=True):
            if what not in set(ModuleKind):
                continue  # of a later version; there are few modules
            module = Module(ModuleKind(what), path, build_id, inode, pid)
            outermost, no_calls = (None if each is None else np.array(each, np.uint64) for each in lists)
            found = names.get(number, Names.of([]))
            self._named[module.identity] = Named(found, source, problem, keeps, outermost, no_calls)

    def name(self, module: Module, addresses: NDArray[np.uint64], times: NDArray[np.uint64]) -> Named | None:
        """See Naming."""
        return self._named.get(module.identity)


def _names(capture: CaptureReader) -> dict[int, Names]:
    """The names by module's id; what has no order or no size names nothing that it should not."""
    table = capture.table("symbol")
    if not len(table):
        return {}
    modules, addresses, sizes, depths, lines = (
        table[name].to_numpy() for name in ("module", "address", "size", "depth", "line")
    )
    functions, files = (table[name].combine_chunks() for name in ("function", "file"))
    strings, (function, file) = _one_table(functions, files)
    # The largest range first among those that begin together; then a range's frames by depth.
    order = np.lexsort((depths, ~sizes, addresses, modules))
    modules, addresses, sizes, depths, lines = (c[order] for c in (modules, addresses, sizes, depths, lines))
    function, file = function[order], file[order]
    begins = np.ones(len(modules), bool)
    begins[1:] = (modules[1:] != modules[:-1]) | (addresses[1:] != addresses[:-1]) | (sizes[1:] != sizes[:-1])
    first = np.flatnonzero(begins)
    found = {}
    numbers, lows = np.unique(modules, return_index=True)
    for number, low, high in zip(numbers.tolist(), lows.tolist(), [*lows[1:].tolist(), len(modules)], strict=True):
        heads = first[slice(*np.searchsorted(first, [low, high]))]
        starts = np.append(heads, high) - low
        # Each module has its own texts: who goes through all of one's must not go through everybody's.
        texts, indices = np.unique(np.concatenate([function[low:high], file[low:high]]), return_inverse=True)
        functions, files = np.split(indices.astype(np.int32), 2)
        own = [strings[text] for text in texts.tolist()]
        found[number] = Names(addresses[heads], sizes[heads], starts, functions, files, lines[low:high], own)
    return found


def _one_table(*columns: pa.Array) -> tuple[list[str], list[NDArray[np.int32]]]:
    """The texts of dictionary columns together, and each column as indices into them."""
    texts: list[str] = []
    indices = []
    for column in columns:
        column = pa.concat_arrays(column.chunks) if isinstance(column, pa.ChunkedArray) else column
        column = column if pa.types.is_dictionary(column.type) else pc.dictionary_encode(column)
        indices.append((column.indices.to_numpy(zero_copy_only=False) + len(texts)).astype(np.int32))
        texts += column.dictionary.to_pylist()
    return texts, indices
