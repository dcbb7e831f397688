"""Converts Intel's iaprof text to a capture: reads blocks of bounded size, writes row group by row group."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

from iaprof.basics.errors import IaprofError
from iaprof.formats.capture.writer import CaptureWriter
from iaprof.formats.imports.encoded_text import EncodedText
from iaprof.formats.imports.iaprof_lines import Facts, LineReader
from iaprof.formats.imports.iaprof_versions import line_reader

_BLOCK_BYTES = 1 << 22


def import_text(source: BinaryIO, name: str, output: BinaryIO, tell: Callable[[int], None]) -> Facts:
    """Writes a text's stalls and metrics as a capture with `sample` and `metric` rows.

    Args:
        source: the text, in either version and any encoding of Unicode, also compressed with gzip.
        name: the text's name for messages.
        output: receives the capture.
        tell: progress callback, called with the number of bytes read so far.

    Raises:
        IaprofError: the text is not in Intel's format, or a line has an invalid value.
        OSError: the text cannot be read, or the capture cannot be written.
    """
    writer = CaptureWriter(output, ("metric", "sample"))
    header: dict[str, Any] = {}
    try:
        lines = _read(source, name, writer, tell)
        header = _header(lines.facts)
    finally:
        writer.close(header)  # in any case, or pyarrow complains on stderr
    return lines.facts


def _read(source: BinaryIO, name: str, writer: CaptureWriter, tell: Callable[[int], None]) -> LineReader:
    lines: LineReader | None = None
    done, is_empty = 0, True
    try:
        for block in _blocks(EncodedText(source, name)):
            is_empty = is_empty and not block.strip()
            lines = lines or line_reader(block)
            if lines is None:
                break
            for kind, rows in lines.read(block):
                writer.write(kind, rows)
            done += len(block)
            tell(done)
    except ValueError as error:
        raise IaprofError(f"{name}, {error}") from None
    if is_empty:
        raise IaprofError(f"{name} is empty: pass an iaprof text or a trace")
    if lines is None or not lines.facts.intervals:
        raise IaprofError(f"{name} has no intervals: it is neither iaprof text nor a trace, or nothing was recorded")
    return lines


def _blocks(source: EncodedText) -> Iterator[bytes]:
    """Whole lines; finally the rest after the last line end."""
    rest = b""
    while data := source.read(_BLOCK_BYTES):
        end = data.rfind(b"\n") + 1
        if not end and len(rest) + len(data) > _BLOCK_BYTES:
            raise ValueError(f"which has a line of more than {_BLOCK_BYTES >> 20} MiB, is not an iaprof text")
        if end:
            yield rest + data[:end]
            rest = b""
        rest += data[end:]
    if rest:
        yield rest


def _header(facts: Facts) -> dict[str, Any]:
    """The header that a recorder would write, as far as the text has the facts."""
    return {
        "clock": {"monotonic_ns": facts.first_ns, "realtime_ns": 0},
        "end_ns": facts.last_ns,
        "streams": [],
        "totals": {"samples": facts.rows, "metrics": facts.metrics},
        "losses": [],
        "imported": {
            "format": facts.format,
            "interval_ns": facts.interval_ns,
            "cut_texts": facts.cut_texts,
            "unknown_lines": facts.unknown_lines,
        },
    }
