"""Rows of columns that have the same values."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


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
        if high - low < 4 * count:  # no need to sort
            code, codes = column.astype(np.int64) - low, high - low + 1
        else:
            distinct, code = np.unique(column, return_inverse=True)
            codes = len(distinct)
        key, size = key * codes + code, size * codes
        if size > 4 * count:
            distinct, key = np.unique(key, return_inverse=True)
            size = len(distinct)
    first = np.full(size, count, np.intp)
    first[key[::-1]] = np.arange(count - 1, -1, -1)  # the last that is written is the first row
    used = first < count
    return (np.cumsum(used) - 1)[key], first[used]
