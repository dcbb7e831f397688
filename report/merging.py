"""Merges captures of several ranks or hosts, or the files of a rotated recording. Rows are copied unchanged.

Each capture is opened twice, one at a time: for its header, as headers determine the order of parts, and for its rows.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import iaprof
from iaprof.basics.errors import IaprofError, UsageError
from iaprof.basics.files import replace_file
from iaprof.formats.capture.limits import MAX_HEADER_BYTES, MAX_PARTS
from iaprof.formats.capture.merged import in_time_order, merged_members, recording_key
from iaprof.formats.capture.reader import CaptureReader
from iaprof.formats.capture.schema import KINDS
from iaprof.formats.capture.writer import CaptureWriter
from iaprof.report.archive.archiving import rows_of

Progress = Callable[[int, int], None]
"""Called with the number of rows written so far, and of all rows."""


@dataclass(frozen=True)
class Merged:
    """The written capture's header and size in bytes."""

    header: dict[str, Any]
    size: int


def merge(captures: Sequence[Path], output: Path, progress: Progress = lambda done, rows: None) -> Merged:
    """Writes one capture with all rows of several.

    Args:
        captures: files of any capture format; parts of merged captures become parts.
        output: the file to write; an existing one is replaced.
        progress: called as rows are written.

    Raises:
        CaptureError: a file is not a capture, or is damaged.
        UsageError: there are too many captures, or two of them are the same.
        IaprofError: the output cannot be written.
    """
    found: list[tuple[Path, list[dict[str, Any]]]] = []
    rows = length = 0
    kinds: set[str] = set()
    for path in captures:
        parts = CaptureReader(path).parts
        found.append((path, [_header(part) for part in parts]))
        length += len(json.dumps(found[-1][1]))
        if length > MAX_HEADER_BYTES // 2:  # the other half is for the sums
            raise UsageError(
                f"what the headers up to that of {path} say is too long for one file: merge fewer captures"
            )
        rows += sum(part.count(kind) for part in parts for kind in KINDS)
        kinds |= {kind for kind in KINDS for part in parts if part.count(kind)}
    _check(found)
    headers = [header for _, own in found for header in own]
    order = in_time_order(headers)
    numbers = {index: number for number, index in enumerate(order)}
    with replace_file(output) as file:
        writer = CaptureWriter(file, kinds)
        index = done = 0
        for path, own in found:
            parts = CaptureReader(path).parts
            if repr([_header(part) for part in parts]) != repr(own):  # unlike ==, repr treats NaN as equal to itself
                raise IaprofError(f"{path} was changed while it was read: try again")
            for part in parts:
                writer.begin_part(numbers[index])
                index += 1
                for kind in KINDS:
                    for table in part.tables(kind):
                        for some in rows_of(kind, table):
                            writer.write(kind, some)
                        done += len(table)
                        progress(done, rows)
        header = {"iaprof": iaprof.__version__, **merged_members([headers[index] for index in order])}
        writer.close(header)
        return Merged(header, file.tell())


def _header(part: CaptureReader) -> dict[str, Any]:
    """Returns a part's header, with the name of its original file."""
    return {"file": part.path.name, **part.header}


def _check(found: list[tuple[Path, list[dict[str, Any]]]]) -> None:
    number = sum(len(own) for _, own in found)
    if number > MAX_PARTS:
        raise UsageError(f"{number:,} captures are too many for one file: merge at most {MAX_PARTS:,}")
    known: dict[tuple[object, ...], Path] = {}
    for path, own in found:
        for same in known.keys() & set(map(recording_key, own)):
            twice = "was given twice" if known[same] == path else f"and {known[same]} are of the same recording"
            raise UsageError(f"{path} {twice}: merge each capture once")
        known |= dict.fromkeys(map(recording_key, own), path)
