"""Runs in a sandboxed child: reads pieces of JSON traces, given as bytes or as a range of an open file."""

from __future__ import annotations

import codecs
import gc
import os
import zlib
from dataclasses import asdict
from typing import Any

from iaprof.basics.heap import keep_freed
from iaprof.sandbox.memory import use_malloc
from iaprof.sandbox.reader import Operation, Refusal
from iaprof.timelines.reading import members
from iaprof.timelines.reading.source import ENCODINGS

_INFLATED = 1 << 22  # bytes at once
_GZIP = 16 + zlib.MAX_WBITS

_MOST_KEPT = 256 << 20  # freed bytes: each block needs arrays of the same sizes
_EVENT = b'{"name":"a","ph":"%b","pid":1,"tid":1,"ts":1.5,"dur":1.5,"args":{"TS1":"%b","value":2}}'
_SAMPLES = b",".join(_EVENT % (phase, b"0x1") for phase in (b"X", b"C", b"s", b"i")), _EVENT % (b"X", b"1.0")


def operations(_stage_seconds: float) -> dict[str, Operation]:
    """Returns the operations of this child, by name."""
    use_malloc()
    keep_freed(_MOST_KEPT)
    import numpy as np

    from iaprof.timelines.reading import piece_columns

    for sample in _SAMPLES:  # so that libraries import what they need before the sandbox forbids opening files
        piece_columns.read(sample, is_last=True)
    np.unique(np.zeros(1))
    for encoding in ENCODINGS:
        codecs.lookup(encoding)
    gc.disable()  # a piece is a hundred thousand dicts, without cycles
    return {"events": read_events, "members": read_members, "convert": _Converter().convert}


def content_of(parameters: dict[str, Any], data: bytearray, files: list[int]) -> bytes:
    """Returns the piece: `data`, or from `start` to `end` of the first file."""
    if "start" not in parameters:
        return bytes(data)
    chunks, at = [], parameters["start"]
    while at < parameters["end"] and (chunk := os.pread(files[0], parameters["end"] - at, at)):
        chunks.append(chunk)
        at += len(chunk)
    return b"".join(chunks)


def read_events(parameters: dict[str, Any], data: bytearray, files: list[int]) -> object:
    """Reads a piece of a list of events; writes its columns into the last file."""
    from iaprof.timelines.reading import answer, piece_columns

    found, piece, count = piece_columns.read(
        content_of(parameters, data, files), parameters["is_last"], parameters["is_lost"], parameters["gives_up"]
    )
    try:
        written = answer.write(found, files[-1])
    except OSError as error:
        raise Refusal("TooLarge", f"there is more in it than is kept ({error.strerror})") from None
    return {
        **written,
        "events": count,
        "dropped": {reason: number for reason, number in piece.dropped.items() if number},
        "consumed": piece.consumed,
        "ended": piece.ended,
        "lost": piece.lost,
        "bad_bytes": piece.bad_bytes,
    }


def read_members(parameters: dict[str, Any], data: bytearray, files: list[int]) -> object:
    """Reads a piece of the outermost object, outside the list of events."""
    state = members.State(**parameters["state"])
    found = members.scan(content_of(parameters, data, files), state, parameters["is_last"])
    return {**asdict(found), "state": asdict(found.state)}


class _Converter:
    """Unpacks compressed files, and makes UTF-8 of text in other encodings. It keeps its state from call to call."""

    def __init__(self) -> None:
        self._inflate: Any = None
        self._decoder: codecs.IncrementalDecoder | None = None

    def convert(self, parameters: dict[str, Any], data: bytearray, files: list[int]) -> object:
        """Converts a piece, and writes the result into the last file.

        parameters: `begins`: it is the first of a file; `gzip`: it is compressed; `encoding`: of text; none for bytes.

        Returns:
            `consumed`, bytes of the piece; `ended`, whether the rest of the file is not needed; `damaged`.
        """
        if parameters["begins"]:
            self._inflate = zlib.decompressobj(_GZIP) if parameters["gzip"] else None
            encoding = parameters["encoding"]
            self._decoder = codecs.getincrementaldecoder(encoding)("replace") if encoding else None
        content = content_of(parameters, data, files)
        ended = damaged = False
        plain, consumed = content, len(content)
        if self._inflate is not None:
            try:
                plain = self._inflate.decompress(content, _INFLATED)
                rest = self._inflate.unused_data if self._inflate.eof else self._inflate.unconsumed_tail
                consumed = len(content) - len(rest)
                if self._inflate.eof:
                    ended = rest[:2] != b"\x1f\x8b"  # another gzip member may follow
                    self._inflate = zlib.decompressobj(_GZIP)
            except zlib.error:
                plain, ended, damaged = b"", True, True
        text = plain if self._decoder is None else self._decoder.decode(plain, ended).encode("utf-8", "replace")
        view = memoryview(text)
        while view:
            view = view[os.write(files[-1], view) :]
        return {"bytes": len(text), "consumed": consumed, "ended": ended, "damaged": damaged}
