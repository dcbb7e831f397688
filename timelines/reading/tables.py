"""Makes Arrow tables, with the fields of a capture's rows, of a child's columns."""

from __future__ import annotations

import hashlib

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from iaprof.formats.capture.schema import FIELDS, KINDS, NULLABLE
from iaprof.sandbox.parent import AnswerError
from iaprof.timelines.reading.answer import ABSENT, MADE, NO_TEXT, Columns, Table

_HASH_BYTES = 5
_FLEX_NAMES = (("RDMA", "Rdma"), ("Receive", "Recv"))


class TableMaker:
    """Makes tables of one file's rows."""

    def __init__(self, file: int, renames: bool) -> None:
        """Args: the number of the file; whether names get the words that newer runtimes use."""
        self._file = file
        self._renames = renames
        self.renamed = False  # whether a name was changed

    def tables(self, columns: Columns) -> dict[str, pa.Table]:
        """Returns the rows of a piece by kind; those of `slice` have `phase`, too, if not all are X.

        Raises:
            AnswerError: the child's args are not text.
        """
        texts = pa.array(columns.texts, pa.string())
        names = texts
        if self._renames:
            for old, new in _FLEX_NAMES:
                names = pc.replace_substring(names, old, new)
            self.renamed |= not names.equals(texts)
        kinds = {
            "slice": columns.slices, "counter": columns.counters, "flow": columns.flows, "instant": columns.instants,
        }  # fmt: skip
        return {kind: self._table(kind, table, texts, names) for kind, table in kinds.items() if table}

    def _table(self, kind: str, table: Table, texts: pa.Array, names: pa.Array) -> pa.Table:
        count = len(table["time_ns"])
        arrays, fields = [], []
        for field in KINDS[kind]:
            values = table.get(field.name)
            if field.name == "file":
                array = pa.array(np.full(count, self._file, np.uint16))
            elif field.name == "args":
                array = _args(table, count)
            elif field.type == pa.string():
                array = _coded(values, names if field.name == "name" else texts, count)
            elif field.name in ("pid", "tid", "id") and f"{field.name}_text" in table:
                array = _numbered(table, field.name, texts)
            elif values is None:
                array = pa.nulls(count, field.type)
            elif f"{kind}.{field.name}" in NULLABLE:
                array = pa.array(values, mask=np.isnan(values) if values.dtype == np.float64 else values == ABSENT)
            else:
                array = pa.array(values)
            arrays.append(array)
            fields.append(pa.field(field.name, array.type))
        if "phase" in table and kind == "slice":
            arrays.append(pa.array(table["phase"]))
            fields.append(pa.field("phase", pa.uint8()))
        return pa.Table.from_arrays(arrays, schema=pa.schema(fields))


def _coded(codes: NDArray[np.int32] | None, texts: pa.Array, count: int) -> pa.Array:
    if codes is None:
        return pa.DictionaryArray.from_arrays(pa.nulls(count, pa.int32()), pa.array([], pa.string()))
    absent = codes == NO_TEXT
    indices = pa.array(codes, mask=absent) if absent.any() else pa.array(codes)
    return pa.DictionaryArray.from_arrays(indices, texts)


def _numbered(table: Table, name: str, texts: pa.Array) -> pa.Array:
    """Returns pids, tids or ids; for those that are texts, numbers made of these."""
    numbers, codes = table[name].copy(), table[f"{name}_text"]
    used, of_row = np.unique(codes[codes >= 0], return_inverse=True)
    made = np.array([number_of(text) for text in texts.take(pa.array(used)).to_pylist()], np.int64)
    numbers[codes >= 0] = made[of_row]
    return pa.array(numbers, mask=numbers == ABSENT) if name == "id" else pa.array(numbers)


def number_of(text: str) -> int:
    """Returns the number that stands for a pid, tid or id that is not an integer."""
    digest = hashlib.sha256(text.encode("utf-8", "replace")).digest()
    return MADE + int.from_bytes(digest[:_HASH_BYTES], "big")


def _args(table: Table, count: int) -> pa.Array:
    if "args" not in table:
        return pa.nulls(count, pa.string())
    lengths = np.zeros(count, np.int64)
    lengths[table["args_row"]] = table["args_length"]
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)]).astype(np.int32)
    valid = np.packbits(lengths > 0, bitorder="little")
    buffers = [pa.py_buffer(valid), pa.py_buffer(offsets), pa.py_buffer(table["args"])]
    array = pa.Array.from_buffers(pa.string(), count, buffers)
    try:
        array.validate(full=True)
    except pa.ArrowInvalid:
        raise AnswerError from None
    return array


def is_text(kind: str, name: str) -> bool:
    """Whether a field of a kind is a dictionary of texts."""
    return FIELDS[f"{kind}.{name}"].is_dictionary
