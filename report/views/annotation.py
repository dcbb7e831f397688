"""Lists a kernel's instructions with their stalls, for `iaprof annotate`; for HTML pages, those with most samples."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from iaprof.formats.profile import Profile
from iaprof.gpu import vendors
from iaprof.gpu.instructions import Dependencies, Wait
from iaprof.report.facts import Report
from iaprof.report.gpu.module import GpuFrame, GpuKernel, InstructionInfo
from iaprof.report.gpu.source_files import SourceFiles
from iaprof.report.profile import MAX_LISTED, hottest
from iaprof.report.views.launchers import by_launcher

Binary = Callable[[int], GpuKernel | None]
"""Returns the code of a kernel, by its index in the profile, with the text of instructions; None if unknown."""

_MAX_BYTES = 3 << 20  # of all listings, as JSON
_MAX_ROWS = 2_000  # of a listing; longer ones keep only instructions with stalls, their dependencies and context
_CONTEXT_ROWS = 2  # instructions before and after each one with stalls
_ROW_BYTES = 200  # of an instruction in JSON, without names and text
_FRAME_BYTES = 40


@dataclass(frozen=True, slots=True)
class Row:
    """An instruction and its stalls."""

    instruction: InstructionInfo
    counts: tuple[int, ...]  # samples, by reason
    waits: tuple[Wait, ...]  # those that can cause its stalls

    @property
    def samples(self) -> int:
        """Samples of all reasons."""
        return sum(self.counts)


@dataclass(frozen=True)
class Listing:
    """A kernel with its instructions: all placements of the same code under the same name."""

    symbol: str
    file: str  # "": unknown
    simd: int  # lanes of its instructions that each thread executes; 0: unknown
    processes: int  # that have stalls in it
    launches: int  # recorded launches
    share: float  # of all samples, 0 to 1
    reasons: Sequence[str]
    counts: tuple[int, ...]  # samples, by reason
    rows: tuple[Row, ...]  # by offset
    launchers: tuple[tuple[str, int], ...] = ()  # functions that launch it, and their samples, most first

    @property
    def samples(self) -> int:
        """Samples of all reasons."""
        return sum(self.counts)

    @cached_property
    def hottest(self) -> Row:
        """The row with most samples; the first one if there are several."""
        return max(self.rows, key=lambda row: row.samples)


def matching_kernels(profile: Profile, pattern: str) -> list[str]:
    """Finds the names of kernels with stalls, most samples first.

    An exact name wins. Otherwise the pattern is a regular expression; if nothing matches, or it is not a valid one, it
    is searched for literally, as C++ names are full of brackets.
    """
    samples = np.bincount(profile.kernel, profile.counts.sum(axis=1), len(profile.kernels))
    by_name: dict[str, float] = {}
    for kernel, count in zip(profile.kernels, samples.tolist(), strict=True):
        if kernel is not None and count:
            by_name[kernel.symbol] = by_name.get(kernel.symbol, 0) + count
    if pattern in by_name:
        return [pattern]
    names = sorted(by_name, key=lambda name: (-by_name[name], name))
    try:
        found = [name for name in names if re.search(pattern, name)]
    except (re.error, OverflowError, RecursionError):  # a{99999999999}, thousands of brackets
        found = []
    return found or [name for name in names if pattern in name]


def listings(profile: Profile, names: Sequence[str], binary: Binary) -> list[Listing]:
    """Lists the kernels with these names, most samples first. Different code has different listings."""
    found = [listing(profile, indices, binary) for indices in group_kernels(profile, names, binary)]
    return sorted((each for each in found if each.samples), key=lambda each: (-each.samples, each.symbol))


def group_kernels(profile: Profile, names: Collection[str], binary: Binary) -> list[list[int]]:
    """Groups the kernels with these names, given by index in the profile, by name, file and code."""
    found: dict[tuple[str, str, str], list[int]] = {}
    for index in np.unique(profile.kernel).tolist():
        kernel = profile.kernels[index]
        if kernel is not None and kernel.symbol in names:
            code = binary(index)
            found.setdefault((kernel.symbol, kernel.file, code.fingerprint if code else ""), []).append(index)
    return list(found.values())


def listing(profile: Profile, indices: Sequence[int], binary: Binary) -> Listing:
    """Lists one kernel: a group of the profile's kernels with the same name, file and code."""
    kernel = profile.kernels[indices[0]]
    assert kernel is not None
    own = profile.only(np.isin(profile.kernel, indices))
    offsets, first, which = np.unique(own.offset, return_index=True, return_inverse=True)
    mnemonics = [profile.codes[code].mnemonic for code in own.code[first].tolist()]
    counts = np.zeros((len(offsets), len(profile.reasons)), np.uint64)
    np.add.at(counts, which, own.counts)
    launches = [profile.launches[index] for index in np.unique(own.launch).tolist()]
    code = binary(indices[0])
    return Listing(
        symbol=kernel.symbol,
        file=kernel.file,
        simd=code.simd if code else 0,
        processes=len({(launch.host, launch.pid) for launch in launches if launch is not None}),
        launches=sum(profile.launch_counts.get(index, 0) for index in indices),
        share=int(counts.sum()) / max(int(profile.counts.sum()), 1),
        reasons=profile.reasons,
        counts=tuple(counts.sum(axis=0).tolist()),
        launchers=tuple(by_launcher(profile.launches, own.launch, own.counts.sum(axis=1, dtype=np.uint64)).items()),
        rows=_rows(
            kernel.symbol,
            code,
            profile.reasons,
            dict(zip(offsets.tolist(), mnemonics, strict=True)),
            counts,
        ),
    )


def _rows(
    symbol: str,
    code: GpuKernel | None,
    names: Sequence[str],
    mnemonics: Mapping[int, str],
    counts: NDArray[np.uint64],
) -> tuple[Row, ...]:
    """Makes rows for every instruction up to the kernel's end, and for other offsets with stalls.

    Args:
        symbol: the kernel's name.
        code: its code; None: unknown.
        names: the stall reasons.
        mnemonics: of the offsets with stalls, in the order of `counts`.
        counts: uint64[offsets, reasons].
    """
    stalled: dict[int, tuple[int, ...]] = dict(zip(mnemonics, map(tuple, counts.tolist()), strict=True))
    instructions = {each.offset: each for each in code.instructions if each.offset < code.size} if code else {}
    for offset in stalled.keys() - instructions.keys():
        if code is None:
            frames = (GpuFrame(symbol, "", 0),)
            instructions[offset] = InstructionInfo(offset, 0, mnemonics[offset], "", (), frames)
        else:
            instructions[offset] = code.at(offset)
    dependencies = vendors.by_name(code.vendor).dependencies(code.instructions) if code else Dependencies()
    none = (0,) * len(names)
    rows = []
    for offset in sorted(instructions):
        own = stalled.get(offset, none)
        reasons = {reason for reason, count in zip(names, own, strict=True) if count}
        waits = dependencies.waits(offset) if reasons else ()
        rows.append(Row(instructions[offset], own, tuple(w for w in waits if reasons.intersection(w.reasons))))
    return tuple(rows)


def as_dict(listing: Listing, sources: SourceFiles) -> dict[str, Any]:
    """Returns a listing for JSON, with the source lines that `sources` has."""
    return {
        "kernel": listing.symbol,
        "file": listing.file,
        "simd": listing.simd or None,
        "samples": listing.samples,
        "share": listing.share,
        "processes": listing.processes,
        "launches": listing.launches,
        "launchers": [{"launcher": name, "samples": samples} for name, samples in listing.launchers],
        "reasons": dict(zip(listing.reasons, listing.counts, strict=True)),
        "instructions": [_row_as_dict(row, listing.reasons, sources) for row in listing.rows],
    }


def _row_as_dict(row: Row, reasons: Sequence[str], sources: SourceFiles) -> dict[str, Any]:
    instruction = row.instruction
    last = instruction.frames[-1]
    return {
        "offset": instruction.offset,
        "mnemonic": instruction.mnemonic,
        "text": instruction.text,
        "samples": row.samples,
        "reasons": {reason: count for reason, count in zip(reasons, row.counts, strict=True) if count},
        "waits": [{"what": wait.what, "for": wait.offsets} for wait in row.waits],
        "frames": [{"function": each.function, "file": each.file, "line": each.line} for each in instruction.frames],
        "source": sources.line(last.file, last.line),
    }


def hot_listings(report: Report, sources: SourceFiles) -> list[dict[str, Any]]:
    """Lists the hottest kernels, in the form of annotation.as_dict; leaves out kernels that would exceed _MAX_BYTES.

    A member `left_out` is the number of instructions omitted from a very long kernel.

    Args:
        report: must have the text of the instructions of these kernels.
        sources: the source files.
    """
    profile = report.profile
    samples = np.bincount(profile.kernel, profile.counts.sum(axis=1), len(profile.kernels)).astype(np.int64)
    groups = group_kernels(profile, hottest(profile), report.binary)
    found = []
    bytes_left = _MAX_BYTES
    for group in sorted(groups, key=lambda indices: -int(samples[indices].sum()))[:MAX_LISTED]:
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
