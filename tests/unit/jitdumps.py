"""Jitdumps made by hand: a function per record."""

from __future__ import annotations

import struct
from collections.abc import Sequence

HEADER = struct.Struct("<4sIIIIIQQ")


def header(version: int = 1, flags: int = 0, size: int = HEADER.size) -> bytes:
    return HEADER.pack(b"DTiJ", version, size, 62, 0, 77, 1, flags)


def _record(kind: int, time: int, body: bytes) -> bytes:
    return struct.pack("<IIQ", kind, 16 + len(body), time) + body


def load(
    time: int,
    address: int,
    code: bytes,
    name: str | bytes,
    *,
    number: int = 0,
    code_size: int | None = None,
    terminated: bool = True,
) -> bytes:
    """JIT_CODE_LOAD; `code_size` is a false size of the code."""
    fixed = struct.pack("<IIQQQQ", 77, 78, address, address, len(code) if code_size is None else code_size, number)
    text = name.encode() if isinstance(name, str) else name
    return _record(0, time, fixed + text + (b"\0" if terminated else b"") + code)


def move(time: int, old: int, new: int, size: int, *, number: int) -> bytes:
    """JIT_CODE_MOVE."""
    return _record(1, time, struct.pack("<IIQQQQQ", 77, 78, new, old, new, size, number))


def debug_info(
    time: int, address: int, entries: Sequence[tuple[int, int, bytes]], *, count: int | None = None
) -> bytes:
    """JIT_CODE_DEBUG_INFO with (address, line, file)."""
    body = struct.pack("<QQ", address, len(entries) if count is None else count)
    body += b"".join(struct.pack("<QII", at, line, 0) + file + b"\0" for at, line, file in entries)
    return _record(2, time, body)


def close(time: int) -> bytes:
    """JIT_CODE_CLOSE."""
    return _record(3, time, b"")


def unwinding_info(time: int) -> bytes:
    """JIT_CODE_UNWINDING_INFO."""
    return _record(4, time, struct.pack("<QQQ", 8, 8, 8) + bytes(8))
