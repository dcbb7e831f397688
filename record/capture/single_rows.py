"""Rows that come one by one, as JSON objects in the spool."""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa

from iaprof.formats.capture.schema import KINDS, NULLABLE


def json_object(data: bytes) -> dict[str, Any]:
    """Parses a JSON object; raises ValueError if `data` is none."""
    value = json.loads(data)
    if not isinstance(value, dict):
        raise ValueError("it is not a JSON object")
    return value


def single_row(kind: str, row: dict[str, Any]) -> pa.StructArray:
    """Makes one row; raises ValueError, TypeError or OverflowError if a value does not have its member's type."""
    missing = [name for name, value in row.items() if value is None and f"{kind}.{name}" not in NULLABLE]
    if missing:
        raise ValueError(f"it has no {missing[0]}")
    return pa.array([row], KINDS[kind])
