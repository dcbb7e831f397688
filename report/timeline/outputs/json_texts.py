"""Columns as JSON texts, whole columns at a time. Callers pass a chunk of rows whose texts stay below 2 GiB."""

from __future__ import annotations

import json

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from iaprof.report.timeline.trace import ABSENT

_NEEDS_ESCAPES = '[\\x00-\\x1f"\\\\\\x7f\\x{2028}\\x{2029}]'
_THOUSANDTHS = pa.array([f".{n:03}".rstrip("0") if n else "" for n in range(1000)], pa.string())


def quoted(texts: pa.Array) -> pa.Array:
    """Returns texts as JSON strings, of the same type; nulls stay null."""
    quote, nothing = pa.scalar('"', texts.type), pa.scalar("", texts.type)
    escaped = pc.fill_null(pc.match_substring_regex(texts, _NEEDS_ESCAPES), fill_value=False)
    plain = pc.binary_join_element_wise(quote, texts, quote, nothing)
    rows = np.flatnonzero(escaped.to_numpy(zero_copy_only=False))
    if not len(rows):
        return plain
    odd = pa.array([json.dumps(text) for text in texts.take(pa.array(rows)).to_pylist()], texts.type)
    return pc.replace_with_mask(plain, escaped, odd)


def microseconds(ns: NDArray[np.int64]) -> pa.StringArray:
    """Returns times in ns as JSON numbers in us, with up to three decimals."""
    size = np.abs(ns)
    whole = pa.array(size // 1000).cast(pa.string())
    sign = pc.if_else(pa.array(ns < 0), pa.scalar("-", pa.string()), pa.scalar("", pa.string()))
    return pc.binary_join_element_wise(sign, whole, _THOUSANDTHS.take(pa.array(size % 1000)), "")


def numbers(values: NDArray[np.generic]) -> pa.StringArray:
    """Returns numbers as JSON numbers, and True as true; null for False, ABSENT, NaN and infinity."""
    if values.dtype == bool:
        return pc.if_else(pa.array(values), pa.scalar("true", pa.string()), pa.scalar(None, pa.string()))
    if values.dtype.kind == "f":
        return pa.array(values, mask=~np.isfinite(values)).cast(pa.string())
    return pa.array(values, mask=values == ABSENT).cast(pa.string())


def member(name: str, values: pa.StringArray) -> pa.StringArray:
    """Returns members of objects, `"name":value,`; null where the value is."""
    if values.null_count == len(values):
        return values
    return pc.binary_join_element_wise(f"{json.dumps(name)}:", values, ",", "")


def objects(members: list[pa.StringArray], count: int) -> pa.StringArray:
    """Returns `count` objects of members, each with a comma after it; those that are null are left out."""
    # The commas are no separators of Arrow's join, which leaves out rows in which all members are null.
    used = [texts for texts in members if texts.null_count < count]
    if not used:
        return pa.repeat(pa.scalar("{}", pa.string()), count)
    inside = pc.binary_join_element_wise(*used, "", null_handling="replace", null_replacement="")
    return pc.binary_join_element_wise("{", pc.utf8_rtrim(inside, ","), "}", "")
