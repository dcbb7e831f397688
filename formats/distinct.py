"""Rows of several columns: which are the same, and what their counts add up to."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def distinct(*columns: NDArray[Any]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The distinct rows of some columns, in ascending order.

    Args:
        columns: integers from 0 on [n] each; the first one sorts first. At least one column, n below 2^31.

    Returns:
        The index of the first row of each kind [k]; and which of the k each row is [n].
    """
    first = number = np.zeros(len(columns[0]), np.int64)
    for column in columns:
        width = int(column.max(initial=0)) + 1
        if width > len(column):  # so that keys have at most 62 bits
            found, column = np.unique(column, return_inverse=True)
            width = len(found)
        key = number * width + column.astype(np.int64)
        first, number = np.unique(key, return_index=True, return_inverse=True)[1:]
    return first, number


def summed(counts: NDArray[Any], number: NDArray[np.int64]) -> NDArray[Any]:
    """The counts [n, ...] of rows with one number added up [k, ...], by `number` [n], of which there are 0 to k - 1."""
    order = np.argsort(number, kind="stable")
    starts = np.flatnonzero(np.diff(number[order], prepend=-1))
    return np.add.reduceat(counts[order], starts) if len(starts) else counts
