"""The header's member `traces`: the files that time lines were imported from. Headers are untrusted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

MEMBER = "traces"
_LIMIT = 1 << 63


@dataclass(frozen=True)
class TraceFile:
    """A file, as its import described it."""

    name: str
    dialect: str
    ranks: list[int]  # of its devices; files of before there was this member have one
    events: int
    dropped: int
    merged: int  # into others


def trace_files(header: dict[str, Any], cleaned: Callable[[str], str]) -> list[TraceFile]:
    """Returns the files of a capture; `cleaned` makes texts safe for a terminal."""
    found = header.get(MEMBER)
    files = [each if isinstance(each, dict) else {} for each in (found if isinstance(found, list) else [])]
    return [
        TraceFile(
            cleaned(_text(each.get("name"))),
            cleaned(_text(each.get("dialect"))),
            _ranks(each),
            *(_number(_counts(each).get("events")), _sum(_counts(each), "dropped"), _sum(_counts(each), "merged")),
        )
        for each in files
    ]


def _ranks(file: dict[str, Any]) -> list[int]:
    ranks = file.get("ranks")
    return [_number(each) for each in ranks] if isinstance(ranks, list) else [_number(file.get("rank"))]


def _counts(file: dict[str, Any]) -> dict[str, Any]:
    counts = file.get("counts")
    return counts if isinstance(counts, dict) else {}


def _sum(counts: dict[str, Any], name: str) -> int:
    found = counts.get(name)
    return sum(map(_number, found.values())) if isinstance(found, dict) else 0


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _number(value: Any) -> int:
    return value if type(value) is int and 0 <= value < _LIMIT else 0
