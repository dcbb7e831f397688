"""Counts records: the words of a row group as columns, and sums by read, cell and address."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from iaprof.formats.capture.limits import CaptureError
from iaprof.gpu.samples import SampleLayout

_MAX_SLOTS_PER_RECORD = 8  # a table with more slots for each record is slower than sorting


def dense_pairs(
    read: NDArray[np.int64], cell: NDArray[np.int64], reads: int, cells: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Returns the distinct values of read * cells + cell, ascending, and the index among these for each record."""
    key = read * cells + cell
    if reads * cells > _MAX_SLOTS_PER_RECORD * len(key) + _MAX_SLOTS_PER_RECORD:
        found, which = np.unique(key, return_inverse=True)
        return found, which.astype(np.int64)
    there = np.zeros(reads * cells, bool)
    there[key] = True
    return np.flatnonzero(there), (np.cumsum(there, dtype=np.int64) - 1)[key]


def sum_by_address(
    layout: SampleLayout,
    reasons: Sequence[str],
    pair_of: NDArray[np.int64],
    place: NDArray[np.int64],
    places: NDArray[np.int64],
    words: list[NDArray[np.uint64]],
) -> tuple[NDArray[np.int64], NDArray[np.int64], list[NDArray[np.float64]]]:
    """Adds up the records of each (pair, address).

    Args:
        layout: the records' layout.
        reasons: the reasons to count.
        pair_of: int64[records], the record's (read, cell) pair.
        place: int64[records], the number of the record's address within its cell.
        places: int64[pairs], the number of addresses in the pair's cell.
        words: the records' words, uint64[records] each.

    Returns:
        The rows' pairs, places, and counts by reason. A record may have a row of its own.
    """
    first = np.cumsum(places) - places
    size = int(places.sum())
    if size > _MAX_SLOTS_PER_RECORD * len(pair_of):  # too sparse for a table
        return pair_of, place, [layout.counts(words, reason).astype(np.float64) for reason in reasons]
    key = first[pair_of] + place
    records = np.bincount(key, minlength=size)
    rows = np.flatnonzero(records)
    counts: list[NDArray[np.float64]] = []
    # Several counters are digits of one number, to save passes: sums below 2^53 are exact in floating point.
    bits = int(records.max() * layout.most).bit_length()
    together = max(1, min(53 // bits, len(reasons)))
    for group in range(0, len(reasons), together):
        some = reasons[group : group + together]
        packed = np.zeros(len(key), np.uint64)
        for digit, reason in enumerate(some):
            layout.add_counts(words, reason, digit * bits, packed)
        sums = np.bincount(key, packed.astype(np.float64), size)[rows].astype(np.int64)
        counts += [(sums >> (digit * bits) & ((1 << bits) - 1)).astype(np.float64) for digit in range(len(some))]
    pair = np.repeat(np.arange(len(places)), np.diff(np.searchsorted(rows, np.append(first, size))))
    return pair, rows - first[pair], counts


def flatten_words(rows: pa.Table, layout: SampleLayout) -> tuple[list[NDArray[np.uint64]], NDArray[np.int64]]:
    """Returns the words of all records, uint64[records] each, and the number of records of each read.

    Raises:
        CaptureError: the lists of words differ in length, or one is missing: these are not rows of that layout.
    """
    columns, lengths = [], np.empty(0, np.int64)
    for word, name in enumerate(layout.rows.columns[: layout.words]):
        if name not in rows.column_names:
            raise CaptureError("the capture has stalls of a stream that has other rows")
        column = rows[name]
        lists = column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
        if lists.null_count:
            raise CaptureError(f"the capture has stalls without their word {word}")
        here = np.diff(lists.offsets.to_numpy())
        if word and not np.array_equal(here, lengths):
            raise CaptureError("the capture has stalls whose words do not belong together")
        lengths = here.astype(np.int64)
        columns.append(lists.flatten().to_numpy())
    return columns, lengths
