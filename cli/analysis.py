"""From a capture's path and what the user chose to a report: what all verbs that look at stalls have in common."""

from __future__ import annotations

import contextlib
import resource
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from iaprof.cli.selection import Choice

if TYPE_CHECKING:
    from iaprof.report.cpu_names import Places
    from iaprof.report.facts import Report

_PATIENCE_S = 1.0  # without a word


@contextlib.contextmanager
def analysed(
    capture: Path,
    choice: Choice,
    interval_s: float = 0.0,
    *,
    texts: bool = False,
    lines: bool = False,
    interpreter: bool = False,
) -> Iterator[Report]:
    """The report of a capture; what it holds can be used within.

    Args:
        capture: the file.
        choice: which stalls, and where names come from.
        interval_s: length of an interval; 0 for everything in one.
        texts: GPU instructions with their whole text.
        lines: CPU frames with file and line.
        interpreter: CPython's own frames between Python functions, too.

    Raises:
        CaptureError: it is no capture, or a damaged one.
        UsageError: it has nothing of what was asked for by name.
    """
    from iaprof.formats.capture import CaptureReader
    from iaprof.report.gpu_module import GpuModules
    from iaprof.report.memory import keep_little
    from iaprof.report.parts import build_parts
    from iaprof.report.profile import Wanted
    from iaprof.symbols.cpu_frames import Look

    limit_memory(capture)
    keep_little()
    reader = CaptureReader(capture)
    wanted = Wanted(choice.selection, interval_s, Look(choice.inlines, lines, interpreter), texts)
    with GpuModules() as modules, joining(_records(reader.header)) as progress:
        yield build_parts(reader, modules, wanted, places(choice), progress)


def places(choice: Choice) -> Places:
    """Where names of CPU frames are looked for."""
    from iaprof.report.cpu_names import Places

    return Places(choice.symfs, choice.symbol_dirs, choice.kallsyms)


def limit_memory(capture: Path) -> None:
    """Makes a capture that expands without bound an error here, before the whole machine has no memory left.

    A report of a real capture takes far less: some hundred MB, and a multiple of the capture's size.
    """
    limit = (4 << 30) + 64 * (capture.stat().st_size if capture.is_file() else 0)
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    resource.setrlimit(resource.RLIMIT_DATA, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))


@contextlib.contextmanager
def joining(records: int) -> Iterator[Callable[[int], None]]:
    """Tells on a terminal how the joining goes, once it takes over a second: called with the records that are done."""
    begun = time.monotonic()
    drawn = False

    def progress(done: int) -> None:
        nonlocal drawn
        if time.monotonic() - begun > _PATIENCE_S:
            share = f" ({100 * done / records:.0f} %)" if 0 < records >= done else ""
            sys.stderr.write(f"\r\x1b[Kjoining stalls to launches: {done / 1e6:,.1f} M records{share}")
            sys.stderr.flush()
            drawn = True

    terminal = sys.stderr is not None and sys.stderr.isatty()
    try:
        yield progress if terminal else lambda done: None
    finally:
        if drawn:
            sys.stderr.write("\r\x1b[K")


def _records(header: dict[str, object]) -> int:
    totals = header.get("totals")
    stalls = totals.get("stalls") if isinstance(totals, dict) else None
    return stalls if type(stalls) is int and stalls > 0 else 0
