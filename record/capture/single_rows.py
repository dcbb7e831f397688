"""Rows of a capture that come one by one, as JSON documents in the spool."""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa

from iaprof.formats.capture.schema import KINDS, NULLABLE


def json_object(data: bytes) -> dict[str, Any]:
    """The JSON object that `data` is; ValueError if it is none."""
    value = json.loads(data)
    if not isinstance(value, dict):
        raise ValueError("it is no JSON object")
    return value


def single_row(kind: str, row: dict[str, Any]) -> pa.StructArray:
    """One row of a kind; ValueError, TypeError or OverflowError if a value is not of its member's type."""
    missing = [name for name, value in row.items() if value is None and f"{kind}.{name}" not in NULLABLE]
    if missing:
        raise ValueError(f"it has no {missing[0]}")
    return pa.array([row], KINDS[kind])
