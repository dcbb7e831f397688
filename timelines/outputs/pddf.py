"""A row for each slice, for data frames: what the AIU Trace Analyzer writes with `-f pddf`, with its columns."""

from __future__ import annotations

from typing import BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pa_csv
from numpy.typing import NDArray

from iaprof.formats.texts import csv_texts
from iaprof.timelines.trace import ABSENT, NO_TEXT, Trace
from iaprof.timelines.views import labels, nesting

_CHUNK = 1 << 16  # rows
_US = pa.decimal128(22, 3)  # exact, and written without an exponent
SCHEMA = pa.schema(
    [("Rank", pa.int64()), ("Timestamp", _US), ("Duration", _US), ("Category", pa.string()),
     ("Event Name", pa.string()), ("Event CLass", pa.string()), ("Job", pa.string()), ("Size", pa.int64()),
     ("PT_Active", pa.float64())]
)  # fmt: skip
"""Times are numbers of us; `Size` is in bytes, `PT_Active` a fraction; 0 where they are not known."""


def write_pddf(trace: Trace, output: BinaryIO) -> None:
    """Writes the slices of a trace as CSV, by time."""
    slices = trace.slices
    ranks, lengths = labels.ranks(trace), nesting.lengths(slices)
    classes = slices.extra.get("class", np.full(len(slices), NO_TEXT, np.int32))
    active = slices.extra.get("pt_active", np.zeros(len(slices)))
    jobs = csv_texts(pa.array(trace.job_names, pa.string()))
    order = np.lexsort((-lengths, slices.start))
    with pa_csv.CSVWriter(output, SCHEMA, write_options=pa_csv.WriteOptions(quoting_style="needed")) as writer:
        for first in range(0, len(order), _CHUNK):
            rows = order[first : first + _CHUNK]
            size = slices.bytes[rows]
            columns = [
                pa.array(ranks[rows]),
                _us(slices.start[rows]),
                _us(lengths[rows]),
                _texts(trace, slices.category[rows], "other"),
                _texts(trace, slices.name[rows], ""),
                _texts(trace, classes[rows], "UNKNOWN"),
                jobs.take(pa.array(slices.file[rows])),
                pa.array(np.where(size == ABSENT, 0, size)),
                pa.array(np.nan_to_num(np.asarray(active[rows], float))),
            ]
            writer.write_batch(pa.record_batch(columns, SCHEMA))


def _us(ns: NDArray[np.int64]) -> pa.Array:
    """Returns ns as us with three decimals: Arrow's decimals are integers of 128 bits, the low half first."""
    halves = np.stack([ns, ns >> 63], axis=1)
    return pa.Array.from_buffers(_US, len(ns), [None, pa.py_buffer(np.ascontiguousarray(halves))])


def _texts(trace: Trace, codes: NDArray[np.int32], missing: str) -> pa.Array:
    return csv_texts(pc.fill_null(trace.texts.taken(codes), missing).cast(pa.string()))
