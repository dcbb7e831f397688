"""The library of the join, in C, which works on whole columns without the interpreter's lock."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

NUMBER, ADDRESS = ctypes.c_uint64, ctypes.c_void_p
_PATH = Path(__file__).with_name("libiaprof_join.so")


@cache
def library() -> ctypes.CDLL:
    """Returns the library, of which every function has the types of its arguments."""
    found = ctypes.CDLL(str(_PATH))
    found.join_number.argtypes = [ADDRESS, ADDRESS, NUMBER, ADDRESS]
    found.join_number.restype = NUMBER
    found.join_pairs.argtypes = [ADDRESS, NUMBER, ADDRESS, NUMBER, ADDRESS, NUMBER, ADDRESS, ADDRESS]
    found.join_pairs.restype = ctypes.c_int64
    found.join_place.argtypes = [ADDRESS, ADDRESS]
    found.join_add.argtypes = [ADDRESS, ADDRESS, ADDRESS, NUMBER, ADDRESS, NUMBER]
    found.join_sum.argtypes = [ADDRESS, ADDRESS, ADDRESS, ADDRESS, NUMBER]
    found.launches_find.argtypes = [ADDRESS] * 6
    found.launches_find.restype = ctypes.c_int64
    found.launches_count.argtypes = [ADDRESS] * 9
    found.launches_count.restype = ctypes.c_int64
    found.launches_last.argtypes = [ADDRESS, ADDRESS, ADDRESS, NUMBER, ADDRESS]
    found.launches_last.restype = ctypes.c_int64
    return found


def data(column: NDArray[Any]) -> int:
    """Returns the address of a column's values, of 4 or 8 bytes each."""
    assert column.flags.c_contiguous and column.dtype.itemsize in (4, 8)
    return int(column.ctypes.data)


def check(result: int) -> None:
    """Raises AssertionError if a function has refused its columns."""
    if result < 0:
        raise AssertionError("the columns of records do not belong together")
