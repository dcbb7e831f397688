"""Distinct rows of columns: their numbers, and sums of equal ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import pyarrow as pa

_PART = 1 << 16  # rows
_FEW = 1 << 10  # rows, which take less time to sort at once
_DIGIT_BITS = 16  # which NumPy sorts without comparing
_MANY, _SAMPLE = 1 << 17, 1 << 14  # rows


def distinct(values: NDArray[Any]) -> NDArray[Any]:
    """Returns the distinct values of a column, ascending. Of many, NumPy's own hash table takes 100 times as long."""
    ordered = np.sort(values)
    return ordered[np.append(True, ordered[1:] != ordered[:-1])] if len(ordered) else ordered


def numbered(values: NDArray[Any]) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """Returns the distinct values of an integer column, ascending, and the number of each row's among these: int64[n].

    Of many rows it takes half of the time of np.unique, or less.
    """
    count = len(values)
    low, high = (int(values.min()), int(values.max())) if count else (0, 0)
    bits = count.bit_length()
    if not count or (high - low).bit_length() + bits > 63:
        if _are_few(values):
            return _hashed(values)
        distinct, number = np.unique(values, return_inverse=True)
        return distinct, number.astype(np.int64)
    wide = values if values.dtype.itemsize == 8 else values.astype(np.int64)
    above, lowest = (wide - wide.dtype.type(low)).astype(np.int64), values.dtype.type(low)
    if high - low < 4 * count:  # no need to sort
        used = np.zeros(high - low + 1, bool)
        used[above] = True
        return np.flatnonzero(used).astype(values.dtype) + lowest, (np.cumsum(used) - 1)[above]
    if _are_few(values):
        return _hashed(values)
    # The values and their rows in one number each: sorting these is faster than finding an order.
    both = above << bits
    both |= np.arange(count)
    both.sort()
    row = both & ((1 << bits) - 1)
    both >>= bits
    new = np.ones(count, bool)
    np.not_equal(both[1:], both[:-1], out=new[1:])
    number = np.empty(count, np.int64)
    number[row] = np.cumsum(new) - 1
    return both[new].astype(values.dtype) + lowest, number


def _are_few(values: NDArray[Any]) -> bool:
    """Whether many rows have few distinct values, as far as a sample of them tells."""
    return len(values) >= _MANY and len(np.unique(values[:: len(values) // _SAMPLE])) < _SAMPLE * 7 // 8


def _hashed(values: NDArray[Any]) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """Returns what `numbered` does, in a fifth of the time if there are few distinct values."""
    import pyarrow as pa

    encoded = pa.array(values).dictionary_encode()
    distinct = encoded.dictionary.to_numpy()
    order = np.argsort(distinct)
    number = np.empty(len(distinct), np.int64)
    number[order] = np.arange(len(distinct))
    return distinct[order], number[encoded.indices.to_numpy()]


def sums_of(values: NDArray[np.int64], counts: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Adds up the counts, not below 0, of each value, not below 0: the distinct values, ascending, and their sums."""
    bits = int(counts.max(initial=0)).bit_length()
    if int(values.max(initial=0)).bit_length() + bits > 63:
        distinct, number = numbered(values)
        return distinct, sum_groups(counts, number)
    both = values << bits
    both |= counts
    # Each value's counts come after each other, which is faster than finding an order. Values that nearly ascend are
    # sorted in parts that fit into the CPU's caches; then there is little left to do.
    for begin in range(0, len(both), _PART):
        both[begin : begin + _PART].sort()
    both.sort(kind="stable")
    counts = both & ((1 << bits) - 1)
    both >>= bits
    new = np.ones(len(both), bool)
    np.not_equal(both[1:], both[:-1], out=new[1:])
    return both[new], np.add.reduceat(counts, np.flatnonzero(new)) if len(both) else counts


def order_by(*columns: NDArray[Any]) -> NDArray[np.intp]:
    """Returns the order that sorts rows by integer columns, the first one before the second: intp[n].

    Equal rows stay in their order. Many rows take a third of np.lexsort's time, or less.
    """
    if len(columns[0]) < _FEW:
        return np.lexsort(columns[::-1])
    order = None
    for column in columns[::-1]:
        low, high = int(column.min()), int(column.max())
        above = column.astype(np.uint64) - np.uint64(low % (1 << 64))  # negative ones wrap around, and back
        if order is not None:
            above = above[order]
        if (above[1:] >= above[:-1]).all():
            continue
        for shift in range(0, bits := (high - low).bit_length(), _DIGIT_BITS):
            by_digit = np.argsort((above >> np.uint64(shift)).astype(np.uint16), kind="stable")
            order = by_digit if order is None else order[by_digit]
            if shift + _DIGIT_BITS < bits:
                above = above[by_digit]
    return np.arange(len(columns[0])) if order is None else order


def groups(*columns: NDArray[Any]) -> tuple[NDArray[np.int64], NDArray[np.intp]]:
    """Numbers the distinct values of integer columns in the order of these values.

    Returns:
        int64[n], the number of each row's values, and intp[groups], the first row that has them.
    """
    count = len(columns[0])
    key, size = np.zeros(count, np.int64), 1
    if not count:
        return key, np.zeros(0, np.intp)
    for column in columns:
        low, high = int(column.min()), int(column.max())
        if low == high:
            continue
        if high - low < 4 * count:  # no need to sort
            wide = column if column.dtype.itemsize == 8 else column.astype(np.int64)
            code = (wide - wide.min() if low else wide).astype(np.int64, copy=False)
            codes = high - low + 1
        else:
            distinct, code = numbered(column)
            codes = len(distinct)
        key, size = (key * codes + code, size * codes) if size > 1 else (code, codes)
        if size > 4 * count:
            distinct, key = numbered(key)
            size = len(distinct)
    first = np.full(size, count, np.intp)
    first[key[::-1]] = np.arange(count - 1, -1, -1)  # the last that is written is the first row
    used = first < count
    if not used.all():
        return (np.cumsum(used) - 1)[key], first[used]
    return key.copy() if any(key is column for column in columns) else key, first


def distinct_values(values: NDArray[Any]) -> NDArray[Any]:
    """Returns the distinct values of an integer column, ascending: of many in a hundredth of np.unique's time."""
    if not len(values):
        return values
    low, high = int(values.min()), int(values.max())
    if high - low < 4 * len(values):
        used = np.zeros(high - low + 1, bool)
        for begin in range(0, len(values), _PART):
            used[values[begin : begin + _PART] - low] = True
        return np.flatnonzero(used).astype(values.dtype) + low
    ordered = np.sort(values)
    return np.asarray(ordered[np.append(True, ordered[1:] != ordered[:-1])])


def few(values: NDArray[Any], absent: NDArray[np.bool_]) -> tuple[pa.Int32Array, NDArray[Any]] | None:
    """Returns integers as numbers, null where they are absent, of the distinct ones; None if these may be many."""
    import pyarrow as pa

    present = values[~absent] if absent.any() else values
    if not len(present):
        return None
    low, high = int(present.min()), int(present.max())
    if high - low >= len(values):
        return None
    at = np.where(absent, 0, values - low) if len(present) < len(values) else values - low
    used = np.zeros(high - low + 1, bool)
    used[at] = True
    number = np.cumsum(used, dtype=np.int32) - 1
    return pa.array(number[at], mask=absent), np.flatnonzero(used).astype(values.dtype) + low


def distinct_texts(texts: NDArray[np.bytes_]) -> tuple[list[bytes], NDArray[np.int64]]:
    """Returns distinct texts of fixed size, each up to its first NUL, in the order in which they come first.

    Returns:
        texts, of which those that differ behind a NUL are the same, and the index of each row's among them: int64[n].
    """
    import pyarrow as pa

    # Texts of variable size would come in several chunks if all together have more than 16 MiB.
    content = pa.py_buffer(np.ascontiguousarray(texts))
    encoded = pa.FixedSizeBinaryArray.from_buffers(pa.binary(texts.dtype.itemsize), len(texts), [None, content])
    encoded = encoded.dictionary_encode()
    distinct = [bytes(text).split(b"\0", 1)[0] for text in encoded.dictionary.to_pylist()]
    return distinct, encoded.indices.to_numpy().astype(np.int64)


def distinct_rows(*columns: NDArray[Any]) -> tuple[NDArray[np.intp], NDArray[np.int64]]:
    """Returns what `groups` does, the first rows before the numbers."""
    number, first = groups(*columns)
    return first, number


def sum_groups(counts: NDArray[Any], number: NDArray[np.int64]) -> NDArray[Any]:
    """The sums [k, ...] of the counts [n, ...] of equal rows; `number` [n] is the second result of `distinct_rows`."""
    order = order_by(number)
    starts = np.flatnonzero(np.diff(number[order], prepend=-1))
    return np.add.reduceat(counts[order], starts) if len(starts) else counts
