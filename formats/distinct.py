"""Finds equal rows of several columns and adds up their counts."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def distinct_rows(*columns: NDArray[Any]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Finds the distinct rows of some columns.

    Args:
            columns: int [n] each, 0 or more; rows sort by the first column first. At least one column, n below 2^31.

    Returns:
            int64[k], the index of the first of each group of equal rows, in ascending order of rows;
            and int64[n], the group of each row.
    """
    first = number = np.zeros(len(columns[0]), np.int64)
    for column in columns:
        width = int(column.max(initial=0)) + 1
        if width > len(column):  # keeps keys below 2^62
            found, column = np.unique(column, return_inverse=True)
            width = len(found)
        key = number * width + column.astype(np.int64)
        first, number = np.unique(key, return_index=True, return_inverse=True)[1:]
    return first, number


def sum_groups(counts: NDArray[Any], number: NDArray[np.int64]) -> NDArray[Any]:
    """The sums [k, ...] of the counts [n, ...] of equal rows; `number` [n] is the second result of `distinct_rows`."""
    order = np.argsort(number, kind="stable")
    starts = np.flatnonzero(np.diff(number[order], prepend=-1))
    return np.add.reduceat(counts[order], starts) if len(starts) else counts
