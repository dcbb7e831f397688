"""Computes metrics from the raw numbers that the recorder kept, by whole columns.

The bytes are untrusted (`iaprof recover`): what they declare is checked before use.
"""

from __future__ import annotations

import functools
import json
import math
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from iaprof.formats.capture.metrics import MISSING, PROCESS_WIDTH, Derivation, Metric
from iaprof.formats.capture.schema import KINDS, make_rows

MAX_DESCRIPTION = 1 << 18  # bytes
MAX_WIDTH = 1024  # numbers per row
MAX_NAME = 128
MAX_VALUES = 1 << 22  # per batch


def check(meta: bytes, rows: bytes) -> int:
    """Validates a batch and returns the maximum number of values it can give; `decode` accepts every valid batch.

    Raises:
            ValueError: the batch is malformed.
    """
    stream, width, metrics = _described(meta)
    if len(rows) % (8 * width):
        raise ValueError("its length is not that of whole rows")
    table = np.frombuffer(rows, "<u8").reshape(-1, width)
    if stream is None and len(table) and table[:, 1].max() >= 1 << 32:
        raise ValueError("it has an absurd pid")
    count = len(table) * len(metrics)
    if count > MAX_VALUES:
        raise ValueError("it has absurdly many values")
    return count


def decode(meta: bytes, *batches: bytes) -> pa.StructArray:
    """The `metric` rows of batches with the same description; many batches take hardly longer than one.

    Values compare a row with the one before: the first row (of each process) gives none. Nor does a number that is
    missing, or smaller than the one before, as its counter was reset.

    Args:
            meta: from `describe` or `describe_processes`.
            batches: rows of little-endian u64, each row beginning with its time, CLOCK_MONOTONIC ns.

    Raises:
            ValueError: a batch is malformed.
    """
    for rows in batches:
        check(meta, rows)
    stream, width, metrics = _described(meta)
    table = np.frombuffer(b"".join(batches), "<u8").reshape(-1, width)
    if stream is None:
        table = table[np.lexsort((table[:, 0], table[:, 2], table[:, 1]))]
    spans = _growth(table[:, 0])
    follows = spans > 0
    if stream is None:
        follows &= (table[1:, 1:3] == table[:-1, 1:3]).all(axis=1)
    else:  # rows may be missing between batches
        ends = np.cumsum([len(rows) // (8 * width) for rows in batches], dtype=np.int64) - 1
        follows[ends[(ends >= 0) & (ends < len(follows))]] = False
    parts = [_rows(stream, table[1:], metric.name, *_values(metric, table, spans), follows) for metric in metrics]
    return pa.concat_arrays([pa.array([], KINDS["metric"]), *parts])


@functools.lru_cache(64)
def _described(meta: bytes) -> tuple[int | None, int, tuple[Metric, ...]]:
    if len(meta) > MAX_DESCRIPTION:
        raise ValueError("its description is absurdly long")
    try:
        about = json.loads(meta)
        stream, width = about["stream"], about["width"]
        if stream is None:
            if width != PROCESS_WIDTH:
                raise ValueError("it has no rows of processes")
        elif type(stream) is not int or not 0 <= stream < 1 << 16:
            raise ValueError("its stream is not a number from 0 to 65535")
        if type(width) is not int or not 1 <= width <= MAX_WIDTH or len(about["metrics"]) > MAX_WIDTH:
            raise ValueError("it has absurdly many columns")
        return stream, width, tuple(_metric(entry, width) for entry in about["metrics"])
    except (KeyError, TypeError, OverflowError, RecursionError) as error:
        raise ValueError("it does not describe metrics") from error


def _metric(entry: dict[str, Any], width: int) -> Metric:
    name, scale = entry["name"], float(entry["scale"])
    columns, of = tuple(entry["columns"]), tuple(entry["of"])
    if not isinstance(name, str) or not name.isprintable() or not 0 < len(name) <= MAX_NAME:
        raise ValueError("a metric of it has no name")
    if any(type(column) is not int or not 1 <= column < width for column in columns + of):
        raise ValueError("a metric of it names a column that it does not have")
    if (
        not columns
        or bool(of) != (entry["how"] == Derivation.SHARE)
        or len(columns) + len(of) > width
        or not math.isfinite(scale)
    ):
        raise ValueError("a metric of it makes no sense")
    return Metric(name, Derivation(entry["how"]), columns, of, scale)


def _growth(column: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Differences between consecutive rows of a counter, modulo 2^64: int64[n - 1]; negative after a reset."""
    return (column[1:] - column[:-1]).view(np.int64)


def _values(
    metric: Metric, table: NDArray[np.uint64], spans: NDArray[np.int64]
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """The values of rows 1 to n - 1, float64[n - 1], and which of them are valid, bool[n - 1]."""
    there = np.ones(len(spans), bool)
    for column in metric.columns + metric.of:
        missing = table[:, column] == MISSING
        there &= ~missing[1:]
        if metric.how is not Derivation.VALUE:
            there &= ~missing[:-1] & (_growth(table[:, column]) >= 0)
    with np.errstate(all="ignore"):
        match metric.how:
            case Derivation.VALUE:
                values = _sum([table[1:, column].view(np.int64) for column in metric.columns])
            case Derivation.STEP:
                values = _sum([_growth(table[:, column]) for column in metric.columns])
            case Derivation.RATE:
                values = _sum([_growth(table[:, column]) for column in metric.columns]) / (spans / 1e9)
            case Derivation.SHARE:
                whole = _sum([_growth(table[:, column]) for column in metric.of])
                there &= whole > 0
                values = np.minimum(_sum([_growth(table[:, column]) for column in metric.columns]) / whole, 1)
        values = values * metric.scale
    return values, there & np.isfinite(values)


def _sum(columns: list[NDArray[np.int64]]) -> NDArray[np.float64]:
    total: NDArray[np.float64] = np.sum(columns, axis=0, dtype=np.float64)
    return total


def _rows(
    stream: int | None,
    table: NDArray[np.uint64],
    name: str,
    values: NDArray[np.float64],
    there: NDArray[np.bool_],
    follows: NDArray[np.bool_],
) -> pa.StructArray:
    keep = there & follows
    count = int(keep.sum())
    fields = {field.name: field.type for field in KINDS["metric"]}
    streams = pa.repeat(pa.scalar(stream, fields["stream"]), count)
    columns = {
        "time_ns": pa.array(np.ascontiguousarray(table[keep, 0]), fields["time_ns"]),
        "stream": pa.nulls(count, fields["stream"]) if stream is None else streams,
        "pid": pa.nulls(count, fields["pid"]) if stream is not None else table[keep, 1].astype(np.uint32),
        "name": pa.repeat(pa.scalar(name, fields["name"]), count),
        "value": values[keep],
    }
    return make_rows("metric", columns)
