"""Opens the symbolizer of a report: names come from the capture first, then from files of this machine."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from iaprof.basics.errors import IaprofError
from iaprof.formats.capture.reader import CaptureReader
from iaprof.symbols.files.kallsyms import KernelSymbols
from iaprof.symbols.names.names import Symbolizer
from iaprof.symbols.names.rows import CaptureNames
from iaprof.symbols.symbolizers.binaries import Binaries
from iaprof.symbols.symbolizers.chain import SymbolizerChain
from iaprof.symbols.symbolizers.debuginfod import Debuginfod
from iaprof.symbols.symbolizers.generated import GeneratedCode
from iaprof.symbols.symbolizers.local_files import LocalFiles
from iaprof.symbols.symbolizers.this_boot import ThisBoot


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
