"""Captures made by hand: a few lines that say what is in them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pyarrow as pa

from iaprof.formats.capture.reader import CaptureReader
from iaprof.formats.capture.schema import KINDS
from iaprof.formats.capture.writer import CaptureWriter
from iaprof.symbols.names.names import Symbolizer

HEADER: dict[str, Any] = {
    "clock": {"monotonic_ns": 1_000_000_000, "realtime_ns": 0},
    "streams": [{"layout": "xe2", "ip_version": [20, 1, 0]}],
    "totals": {},
    "losses": [],
}


def record(address: int, **counts: int) -> tuple[int, int]:
    """The two words of an Xe2 record."""
    first = {"tdr": 29, "other": 37, "control": 45, "pipestall": 53, "send": 61, "dist_acc": 69, "sbid": 77, "sync": 85,
             "inst_fetch": 93, "active": 101}  # fmt: skip
    value = (address & 0xFFFFFFFF) >> 3
    for reason, count in counts.items():
        value |= count << first[reason]
    return value & (1 << 64) - 1, value >> 64


def stall(time_ns: int, *records: tuple[int, int], stream: int = 0, begin_ns: int = 0) -> dict[str, Any]:
    """A `stall` row: one read, of what was sampled from `begin_ns` on."""
    words = [[word for word, _ in records], [word for _, word in records]]
    return {"time_ns": time_ns, "begin_ns": begin_ns, "stream": stream, "w0": words[0], "w1": words[1], "w2": None}


def launch(time_ns: int, pid: int, address: int, stack: int = 1, size: int = 64, **more: Any) -> dict[str, Any]:
    """A `launch` row."""
    row = {"time_ns": time_ns, "pid": pid, "tid": pid, "cpu": 0, "comm": "app", "iba": 0, "address": address,
           "size": size, "stack": stack, "name": "", "flags": 0, "list": 0, "correlation": None}  # fmt: skip
    return row | more


def capture(path: Path, header: dict[str, Any] | None = None, /, **kinds: list[dict[str, Any]]) -> Path:
    """A capture with one row group per kind, and without columns for other kinds."""
    with path.open("wb") as file:
        writer = CaptureWriter(file, kinds)
        for kind, rows in kinds.items():
            writer.write(kind, pa.array(rows, KINDS[kind]))
        writer.close(HEADER if header is None else header)
    return path


def named_by(
    symbolizer_of: Callable[[CaptureReader], Symbolizer],
) -> Callable[[CaptureReader], AbstractContextManager[Symbolizer]]:
    """What `archive` calls to open the symbolizer of each part."""
    return lambda part: nullcontext(symbolizer_of(part))
