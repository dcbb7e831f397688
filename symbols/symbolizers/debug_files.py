"""Finds the separate debug files of an ELF file, and checks that they are of its build.

The caller opens them, as a recorder must not open files with its own rights. Files that dwz shares between several
debug files (.gnu_debugaltlink) are not searched for.
"""

from __future__ import annotations

import os
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from iaprof.symbols.symbolizers.binaries import Binaries, BinaryError, Facts

_SYSTEM = "usr/lib/debug"  # where distributions put debug files
_CHUNK = 1 << 20
_CRC_SECONDS = 5.0  # for the checksum of one file; it takes 1 s per GB


@dataclass(frozen=True)
class Candidate:
    """An open file."""

    file: int  # descriptor, which the receiver closes
    path: str  # as users see it


def debug_files(
    path: str,
    facts: Facts,
    roots: Sequence[Path],
    opener: Callable[[Path], int | None],
    binaries: Binaries,
    symbol_dirs: Sequence[Path] = (),
) -> Iterator[Candidate]:
    """Yields the debug files of an ELF file that can be opened and are of its build, the likeliest first.

    A debug file must have the same build-id; without a build-id, it must have the CRC-32 that .gnu_debuglink gives.

    Args:
        path: of the ELF file, absolute, below each of the roots.
        facts: about the ELF file.
        roots: root folders of systems.
        opener: opens a regular file for reading; returns None if it cannot.
        binaries: reads the opened files.
        symbol_dirs: more folders with a .build-id folder.
    """
    for place in dict.fromkeys(_places(path, facts, roots, symbol_dirs)):
        file = opener(place)
        if file is None:
            continue
        try:
            fits = _fits(file, facts, binaries)
        except BaseException:
            os.close(file)
            raise
        if fits:
            yield Candidate(file, str(place))
        else:
            os.close(file)


def build_id_path(build_id: bytes) -> Path:
    """Returns the path of the link to a build, without an extension: .build-id/ab/cdef..."""
    text = build_id.hex()
    return Path(".build-id", text[:2], text[2:])


def _places(path: str, facts: Facts, roots: Sequence[Path], symbol_dirs: Sequence[Path]) -> Iterator[Path]:
    if facts.build_id is not None:
        link = build_id_path(facts.build_id)
        for folder in (*(root / _SYSTEM for root in roots), *symbol_dirs):
            yield folder / link.with_name(f"{link.name}.debug")
    if facts.debuglink is not None:
        name, _ = facts.debuglink
        beside = os.path.dirname(path).lstrip("/")
        for root in roots:
            yield root / beside / name
            yield root / beside / ".debug" / name
            yield root / _SYSTEM / beside / name


def _fits(file: int, facts: Facts, binaries: Binaries) -> bool:
    """Tells whether a file is of the build with these facts, and has debug information or symbols."""
    try:
        own = binaries.facts(file)
    except BinaryError:
        return False
    if not own.has_debug_info and not own.has_symbols:
        return False
    if own.build_id is not None:
        return own.build_id == facts.build_id
    return facts.debuglink is not None and _crc32(file) == facts.debuglink[1]


def _crc32(file: int) -> int | None:
    """Returns the CRC-32 of the whole file; None if it cannot be read in time."""
    end = time.monotonic() + _CRC_SECONDS
    value = at = 0
    try:
        while chunk := os.pread(file, _CHUNK, at):
            value, at = zlib.crc32(chunk, value), at + len(chunk)
            if time.monotonic() > end:
                return None
    except OSError:
        return None
    return value
