"""The symbolizer of a report: names come from the capture first, then from files of this machine."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from iaprof.basics.errors import IaprofError
from iaprof.formats.capture.reader import CaptureReader
from iaprof.symbols.files.symbol_lists import KernelSymbols
from iaprof.symbols.names.names import NO_NAMES, Module, Names, Symbolized, Symbolizer
from iaprof.symbols.names.rows import CaptureNames
from iaprof.symbols.symbolizers.binaries import Binaries
from iaprof.symbols.symbolizers.debuginfod import Debuginfod
from iaprof.symbols.symbolizers.generated import GeneratedCode
from iaprof.symbols.symbolizers.local_files import LocalFiles
from iaprof.symbols.symbolizers.this_boot import ThisBoot


class SymbolizerChain:
    """A Symbolizer that asks others in order."""

    def __init__(self, symbolizers: Sequence[Symbolizer]) -> None:
        """Takes the symbolizers, the first to ask first."""
        self._symbolizers = symbolizers

    def name(self, module: Module, addresses: NDArray[np.uint64], times: NDArray[np.uint64]) -> Symbolized:
        """See Symbolizer.

        The result has the problems of those that did not name everything only if names are missing in the end; those of
        the one that named the rest are of what else is missing, such as lines.
        """
        parts: list[Names] = []
        sources: dict[str, None] = {}
        problems: dict[str, None] = {}
        others: dict[str, None] = {}
        frame_pointers = None
        outermost: NDArray[np.uint64] | None = None
        no_calls: NDArray[np.uint64] | None = None
        for symbolizer in self._symbolizers:
            if not len(addresses):
                break
            symbolized = symbolizer.name(module, addresses, times)
            if symbolized is None:
                continue
            has_name = symbolized.names.find(addresses) >= 0
            if len(symbolized.names):
                parts.append(symbolized.names)
            if has_name.any() and symbolized.source:
                sources[symbolized.source] = None
            if symbolized.problem:
                (others if has_name.all() else problems)[symbolized.problem] = None
            frame_pointers = symbolized.frame_pointers if frame_pointers is None else frame_pointers
            outermost = _union(outermost, symbolized.outermost)
            no_calls = _union(no_calls, symbolized.no_calls)
            addresses, times = addresses[~has_name], times[~has_name]
        names = Names.joined(parts) if parts else NO_NAMES
        problem = "; ".join({**problems, **others} if len(addresses) else others)
        return Symbolized(names, "; ".join(sources), problem, frame_pointers, outermost, no_calls)


def _union(first: NDArray[np.uint64] | None, second: NDArray[np.uint64] | None) -> NDArray[np.uint64] | None:
    if first is None or second is None:
        return second if first is None else first
    return np.union1d(first, second)


@dataclass(frozen=True)
class SymbolOptions:
    """The user's options for finding symbols, besides those in the capture and this system."""

    symfs: Path | None = None
    symbol_dirs: tuple[Path, ...] = ()
    kallsyms: Path | None = None


@contextlib.contextmanager
def open_symbolizer(
    capture: CaptureReader,
    symbol_options: SymbolOptions,
    everything: bool = False,
    binaries: Binaries | None = None,
) -> Iterator[Symbolizer]:
    """Opens the symbolizer chain.

    Args:
        capture: the capture, or part of one, whose stacks are symbolized.
        symbol_options: the user's options.
        everything: have local files name all of their functions, not only sampled ones.
        binaries: reads local files; None for a new one, whose child process is started when it is needed.

    Raises:
        IaprofError: a file or folder that the user named cannot be used.
    """
    for folder in (*([symbol_options.symfs] if symbol_options.symfs else ()), *symbol_options.symbol_dirs):
        if not folder.is_dir():
            raise IaprofError(f"{folder} is not a folder")
    with contextlib.ExitStack() as opened:
        if binaries is None:
            binaries = opened.enter_context(Binaries())
        generated = opened.enter_context(GeneratedCode())
        found: list[Symbolizer] = [CaptureNames(capture)]
        if symbol_options.kallsyms is not None:
            found.append(_kallsyms(symbol_options.kallsyms))
        found.append(
            LocalFiles(
                binaries, symbol_options.symfs, symbol_options.symbol_dirs, Debuginfod.of_environment(), everything
            )
        )
        found.append(ThisBoot(capture.header, binaries, generated))
        yield SymbolizerChain(found)


def _kallsyms(path: Path) -> KernelSymbols:
    try:
        with path.open("rb") as file:
            return KernelSymbols(file, str(path))
    except OSError as error:
        raise IaprofError(f"{path} cannot be read: {error.strerror}") from error
