"""The kernels with most samples, instruction by instruction, no more of them than a page should carry."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import numpy as np

from iaprof.report.facts import Report
from iaprof.report.gpu.source_files import SourceFiles
from iaprof.report.views.annotation import Listing, Row, alike, as_dict, listing

_MOST_KERNELS = 50
_MOST_BYTES = 3 << 20  # of all, as JSON
_MOST_ROWS = 2_000  # of one kernel that are shown whole; of a longer one so many that stalled, and what is around them
_AROUND = 2  # instructions before and behind each
_ROW_BYTES = 200  # of an instruction, names and text aside
_FRAME_BYTES = 40


def hot_listings(report: Report, sources: SourceFiles) -> list[dict[str, Any]]:
    """The hottest kernels, as annotation.as_dict has them.

    `left_out` says how many instructions of a very long kernel are not there. A kernel that has no room is left out.

    Args:
        report: with the texts of instructions.
        sources: has the lines of their source.
    """
    profile = report.profile
    samples = np.bincount(profile.kernel, profile.counts.sum(axis=1), len(profile.kernels)).astype(np.int64)
    by_name: dict[str, int] = {}
    for kernel, count in zip(profile.kernels, samples.tolist(), strict=True):
        if kernel is not None and count:
            by_name[kernel.symbol] = by_name.get(kernel.symbol, 0) + count
    hottest = set(sorted(by_name, key=lambda name: (-by_name[name], name))[:_MOST_KERNELS])
    groups = alike(profile, hottest, report.binary)
    found = []
    left = _MOST_BYTES
    for group in sorted(groups, key=lambda indices: -int(samples[indices].sum()))[:_MOST_KERNELS]:
        if left < _ROW_BYTES:
            break
        whole = listing(profile, group, report.binary)
        short = replace(whole, rows=_shortened(whole.rows))
        size = _bytes(short)
        if size <= left:
            left -= size
            found.append(as_dict(short, sources) | {"left_out": len(whole.rows) - len(short.rows)})
    return found


def _shortened(rows: tuple[Row, ...]) -> tuple[Row, ...]:
    """All rows, or where they are too many the hottest, those that they wait for, and those around them."""
    if len(rows) <= _MOST_ROWS:
        return rows
    index = {row.instruction.offset: at for at, row in enumerate(rows)}
    hottest = sorted((at for at, row in enumerate(rows) if row.samples), key=lambda at: -rows[at].samples)
    kept: set[int] = set()
    for at in hottest:
        waited = {index[offset] for wait in rows[at].waits for offset in wait.offsets if offset in index}
        more = waited.union(range(max(at - _AROUND, 0), min(at + _AROUND + 1, len(rows))))
        if len(kept) + len(more) > _MOST_ROWS:
            break
        kept |= more
    return _of(rows, kept)


def _of(rows: tuple[Row, ...], kept: Collection[int]) -> tuple[Row, ...]:
    return tuple(rows[at] for at in sorted(kept))


def _bytes(kernel: Listing) -> int:
    """How long its JSON will be, about; lines of source are bounded by their files."""
    frames = (len(row.instruction.frames) * _FRAME_BYTES + _names(row) for row in kernel.rows)
    return sum(_ROW_BYTES + len(row.instruction.text) + more for row, more in zip(kernel.rows, frames, strict=True))


def _names(row: Row) -> int:
    return sum(len(frame.function) + len(frame.file) for frame in row.instruction.frames)
