"""Reads JSON without NaN and infinity, which JSON does not have but Python's reader accepts, and would write again."""

from __future__ import annotations

import json
import math
from typing import Any


def loads_finite(text: str | bytes, strict: bool = True) -> Any:
    """Returns what a JSON text says, with None for NaN, infinity and numbers that are too large for float64.

    Args:
        text: the JSON.
        strict: whether control characters in strings are an error.

    Raises:
        ValueError: it is none.
        RecursionError: it is nested too deeply.
    """
    return json.loads(text, strict=strict, parse_constant=lambda _: None, parse_float=_finite)


def _finite(text: str) -> float | None:
    number = float(text)
    return number if math.isfinite(number) else None
