"""Runs in a sandboxed child: reads pieces of traces, which it gets as bytes, or as a part of an open file."""

from __future__ import annotations

import codecs
import gc
import os
import zlib
from dataclasses import asdict
from typing import Any

import numpy as np

from iaprof.report.traces import answer, columns, events, members
from iaprof.report.traces.numbers import integers, nanoseconds
from iaprof.report.traces.source import ENCODINGS
from iaprof.sandbox.reader import Operation, Refusal

_INFLATED = 1 << 22  # bytes at once
_GZIP = 16 + zlib.MAX_WBITS


def operations(_stage_seconds: float) -> dict[str, Operation]:
    """Returns the operations of this child, by name."""
    (
        nanoseconds([b"1.5"]),
        integers([b"1"]),
    )  # makes NumPy import what it needs, before the sandbox forbids opening files
    np.unique(np.zeros(1))
    for encoding in ENCODINGS:
        codecs.lookup(encoding)
    gc.disable()  # a piece is a hundred thousand dicts, without cycles
    return {"events": read_events, "members": read_members, "convert": _Converter().convert}


def _content(parameters: dict[str, Any], data: bytearray, files: list[int]) -> bytes:
    """Returns the piece: `data`, or from `start` to `end` of the first file."""
    if "start" not in parameters:
        return bytes(data)
    parts, at = [], parameters["start"]
    while at < parameters["end"] and (part := os.pread(files[0], parameters["end"] - at, at)):
        parts.append(part)
        at += len(part)
    return b"".join(parts)


def read_events(parameters: dict[str, Any], data: bytearray, files: list[int]) -> object:
    """Reads a piece of a list of events; writes its columns into the last file."""
    piece = events.read(
        _content(parameters, data, files), parameters["is_last"], parameters["is_lost"], parameters["gives_up"]
    )
    count = len(piece.events) + sum(piece.dropped.values())
    dropped = piece.dropped
    found = columns.columns_of(piece.events, dropped)
    try:
        written = answer.write(found, files[-1])
    except OSError as error:
        raise Refusal("TooLarge", f"there is more in it than is kept ({error.strerror})") from None
    return {
        **written,
        "events": count,
        "dropped": {reason: number for reason, number in dropped.items() if number},
        "consumed": piece.consumed,
        "ended": piece.ended,
        "lost": piece.lost,
    }


def read_members(parameters: dict[str, Any], data: bytearray, files: list[int]) -> object:
    """Reads a piece of the outermost object, outside the list of events."""
    state = members.State(**parameters["state"])
    found = members.scan(_content(parameters, data, files), state, parameters["is_last"])
    return {**asdict(found), "state": asdict(found.state)}


class _Converter:
    """Makes UTF-8 of compressed files, and of files in other encodings. It keeps its state from call to call."""

    def __init__(self) -> None:
        self._inflate: Any = None
        self._decoder: codecs.IncrementalDecoder | None = None

    def convert(self, parameters: dict[str, Any], data: bytearray, files: list[int]) -> object:
        """Converts a piece, and writes what it becomes into the last file.

        parameters: `begins`: it is a file's first; `gzip`: it is compressed; `encoding`: of the text.

        Returns:
            `consumed`, bytes of the piece; `ended`, whether what follows is of no use; `damaged`.
        """
        if parameters["begins"]:
            self._inflate = zlib.decompressobj(_GZIP) if parameters["gzip"] else None
            self._decoder = codecs.getincrementaldecoder(parameters["encoding"])("replace")
        assert self._decoder is not None
        content = _content(parameters, data, files)
        ended = damaged = False
        plain, consumed = content, len(content)
        if self._inflate is not None:
            try:
                plain = self._inflate.decompress(content, _INFLATED)
                rest = self._inflate.unused_data if self._inflate.eof else self._inflate.unconsumed_tail
                consumed = len(content) - len(rest)
                if self._inflate.eof:
                    ended = rest[:2] != b"\x1f\x8b"  # another member may follow
                    self._inflate = zlib.decompressobj(_GZIP)
            except zlib.error:
                plain, ended, damaged = b"", True, True
        text = self._decoder.decode(plain, ended).encode("utf-8", "replace")
        view = memoryview(text)
        while view:
            view = view[os.write(files[-1], view) :]
        return {"bytes": len(text), "consumed": consumed, "ended": ended, "damaged": damaged}
