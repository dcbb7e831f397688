"""Lists the instructions of the kernels with most samples, limited to a reasonable size for an HTML page."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import numpy as np

from iaprof.report.facts import Report
from iaprof.report.gpu.source_files import SourceFiles
from iaprof.report.views.annotation import Listing, Row, as_dict, group_kernels, listing

_MAX_KERNELS = 50
_MAX_BYTES = 3 << 20  # of all listings, as JSON
_MAX_ROWS = 2_000  # of a listing; longer ones keep only instructions with stalls, their dependencies and context
_CONTEXT_ROWS = 2  # instructions before and after each one with stalls
_ROW_BYTES = 200  # of an instruction in JSON, without names and text
_FRAME_BYTES = 40


def hot_listings(report: Report, sources: SourceFiles) -> list[dict[str, Any]]:
    """Lists the hottest kernels, in the form of annotation.as_dict; leaves out kernels that would exceed _MAX_BYTES.

    A member `left_out` is the number of instructions omitted from a very long kernel.

    Args:
        report: must have the text of instructions.
        sources: the source files.
    """
    profile = report.profile
    samples = np.bincount(profile.kernel, profile.counts.sum(axis=1), len(profile.kernels)).astype(np.int64)
    by_name: dict[str, int] = {}
    for kernel, count in zip(profile.kernels, samples.tolist(), strict=True):
        if kernel is not None and count:
            by_name[kernel.symbol] = by_name.get(kernel.symbol, 0) + count
    hottest = set(sorted(by_name, key=lambda name: (-by_name[name], name))[:_MAX_KERNELS])
    groups = group_kernels(profile, hottest, report.binary)
    found = []
    bytes_left = _MAX_BYTES
    for group in sorted(groups, key=lambda indices: -int(samples[indices].sum()))[:_MAX_KERNELS]:
        if bytes_left < _ROW_BYTES:
            break
        whole = listing(profile, group, report.binary)
        shortened = replace(whole, rows=_shortened(whole.rows))
        size = _bytes(shortened)
        if size <= bytes_left:
            bytes_left -= size
            found.append(as_dict(shortened, sources) | {"left_out": len(whole.rows) - len(shortened.rows)})
    return found


def _shortened(rows: tuple[Row, ...]) -> tuple[Row, ...]:
    """Returns all rows; if too many, the hottest ones, those that they wait for, and the neighbours of the hottest."""
    if len(rows) <= _MAX_ROWS:
        return rows
    index = {row.instruction.offset: at for at, row in enumerate(rows)}
    hottest = sorted((at for at, row in enumerate(rows) if row.samples), key=lambda at: -rows[at].samples)
    kept: set[int] = set()
    for at in hottest:
        waited = {index[offset] for wait in rows[at].waits for offset in wait.offsets if offset in index}
        more = waited.union(range(max(at - _CONTEXT_ROWS, 0), min(at + _CONTEXT_ROWS + 1, len(rows))))
        if len(kept) + len(more) > _MAX_ROWS:
            break
        kept |= more
    return _rows_at(rows, kept)


def _rows_at(rows: tuple[Row, ...], kept: Collection[int]) -> tuple[Row, ...]:
    return tuple(rows[at] for at in sorted(kept))


def _bytes(kernel: Listing) -> int:
    """Estimates the length of a listing's JSON, bytes, without source lines, which the source files bound."""
    frames = (len(row.instruction.frames) * _FRAME_BYTES + _name_lengths(row) for row in kernel.rows)
    return sum(_ROW_BYTES + len(row.instruction.text) + more for row, more in zip(kernel.rows, frames, strict=True))


def _name_lengths(row: Row) -> int:
    return sum(len(frame.function) + len(frame.file) for frame in row.instruction.frames)
