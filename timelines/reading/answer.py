"""How a child returns columns: arrays in a file, whose names and lengths are in its answer. The parent checks them."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from iaprof.sandbox.parent import AnswerError, any_list, integer, string

ABSENT = int(np.iinfo(np.int64).min)
NO_TEXT = -1
MADE = 1 << 48
"""Numbers from here on stand for pids and tids that are texts: above every pid, and still exact in JavaScript."""
PHASES = "XBE"  # of slices, by number
KINDS = ("slices", "counters", "flows", "instants")
CODES = frozenset({"name", "category", "series", "phase", "group", "type", "peers", "pid_text", "tid_text", "id_text"})
_INTEGERS = frozenset(
    {
        "time_ns", "duration_ns", "pid", "tid", "id", "power", "bytes", "correlation", "device", "external_id",
        "python_id", "event", "args_row", "args_length", *(f"ts{number}" for number in range(1, 6)),
    }
)  # fmt: skip
DOUBLES = frozenset({"bandwidth", "value"})
_TYPES: dict[str, np.dtype[Any]] = {np.dtype(name).char: np.dtype(name) for name in ("<i8", "<i4", "<f8", "u1")}
_LIMIT = 1 << 31
_ALIGNED = 16  # bytes: Arrow's code may crash on columns that are not

Table = dict[str, NDArray[Any]]


@dataclass
class Columns:
    """The columns of a piece, by kind of row; a column that is absent in all rows may be missing.

    Texts are codes of `texts`; a pid, tid or id that is not an integer has its code in `pid_text`, `tid_text` or
    `id_text`. JSON texts of args follow each other in `args`, for the rows in `args_row`, with `args_length` bytes.
    """

    slices: Table = field(default_factory=dict)
    counters: Table = field(default_factory=dict)
    flows: Table = field(default_factory=dict)
    instants: Table = field(default_factory=dict)
    texts: list[str] = field(default_factory=list)
    cut_texts: int = 0
    cut_args: int = 0  # rows whose args are too long, and were left out
    bad_values: int = 0  # members that should be numbers and are not


def write(columns: Columns, file: int) -> dict[str, Any]:
    """Writes columns into a file; returns the answer that `read` needs, as JSON."""
    texts = "\0".join(text.replace("\0", "\ufffd") for text in columns.texts).encode()
    arrays: list[NDArray[Any]] = []
    tables = {}
    for kind in KINDS:
        table: Table = getattr(columns, kind)
        tables[kind] = [[name, values.dtype.char, len(values)] for name, values in table.items()]
        arrays += table.values()
    for array in (*arrays, np.frombuffer(texts, np.uint8)):
        view = memoryview(array.tobytes() + bytes(-array.nbytes % _ALIGNED))
        while view:
            view = view[os.write(file, view) :]
    counts = {name: getattr(columns, name) for name in ("cut_texts", "cut_args", "bad_values")}
    return {"tables": tables, "texts": len(columns.texts), "text_bytes": len(texts), **counts}


def read(answer: Any, content: bytes) -> Columns:
    """Checks what a child wrote.

    Raises:
        AnswerError: the answer and the file do not agree.
    """
    if not isinstance(answer, dict) or not isinstance(answer.get("tables"), dict):
        raise AnswerError
    at = 0
    tables: dict[str, Table] = {}
    for kind in KINDS:
        table: Table = {}
        for each in any_list(answer["tables"].get(kind)):
            if not isinstance(each, list) or len(each) != 3:
                raise AnswerError
            name, type_, count = string(each[0]), _TYPES.get(string(each[1])), integer(each[2], _LIMIT)
            if type_ is None or at + count * type_.itemsize > len(content):
                raise AnswerError
            table[name] = np.frombuffer(content, type_, count, at)
            at += count * type_.itemsize
            at += -at % _ALIGNED
        tables[kind] = table
    end = at + integer(answer.get("text_bytes"), _LIMIT)
    if end > len(content):
        raise AnswerError
    text = str(memoryview(content)[at:end], "utf-8", "replace")
    texts = text.split("\0") if integer(answer.get("texts"), _LIMIT) else []
    if len(texts) != answer["texts"] or any(len(each) > 1 << 14 for each in texts):
        raise AnswerError
    for kind, table in tables.items():
        _check(kind, table, len(texts))
    counts = {name: integer(answer.get(name)) for name in ("cut_texts", "cut_args", "bad_values")}
    return Columns(**tables, texts=texts, **counts)  # type: ignore[arg-type]


def _check(kind: str, table: Table, texts: int) -> None:
    if not table:
        return
    own = {"counters": {"series", "value", "event"}, "slices": {"duration_ns"}}
    needed = {"time_ns", "pid", "tid", "name"} | own.get(kind, {"phase", "id"})
    if not needed <= table.keys():
        raise AnswerError
    rows = len(table["time_ns"])
    for name, values in table.items():
        if kind == "slices" and name == "phase":
            good = values.dtype == np.uint8 and len(values) == rows and int(values.max()) < len(PHASES)
        elif name == "args":
            good = values.dtype == np.uint8
        elif name in ("args_row", "args_length"):
            good = values.dtype == np.int64 and bool((values >= 0).all())
        elif name in CODES:
            good = values.dtype == np.int32 and len(values) == rows
            good = good and bool(((values >= NO_TEXT) & (values < texts)).all())
        elif name in _INTEGERS:
            good = values.dtype == np.int64 and len(values) == rows
        elif name in DOUBLES:
            good = values.dtype == np.float64 and len(values) == rows
        else:
            good = False
        if not good:
            raise AnswerError
    needs_text = (
        np.ones(rows, bool) if kind != "slices" or "phase" not in table else table["phase"] != PHASES.index("E")
    )
    if not all((table[name][needs_text] >= 0).all() for name in ("name", "series", "phase") if name in table):
        raise AnswerError
    if "args" in table:
        at, lengths = table.get("args_row"), table.get("args_length")
        if at is None or lengths is None or len(at) != len(lengths) or int(lengths.sum()) != len(table["args"]):
            raise AnswerError
        if len(at) and (int(at.max()) >= rows or bool((np.diff(at) <= 0).any())):
            raise AnswerError
