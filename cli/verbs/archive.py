"""`iaprof archive`: copies a capture and adds the symbols that its stacks need."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from iaprof.basics.clean import clean
from iaprof.basics.errors import UsageError
from iaprof.basics.files import check_output
from iaprof.basics.quantities import in_bytes
from iaprof.cli.options.captures import DEFAULT, Capture, existing
from iaprof.cli.options.symbol_options import Kallsyms, SymbolDirs, Symfs
from iaprof.cli.options.values import checked_choice, one_of
from iaprof.cli.terminal.progress import Progress
from iaprof.cli.terminal.summary import say

if TYPE_CHECKING:
    from iaprof.report.archive.pseudonyms import Pseudonyms
    from iaprof.report.cpu_names import SymbolOptions

EXAMPLES = """\b
Examples:
  iaprof archive cap.parquet -o named.parquet               adds the names known here
  iaprof archive cap.parquet -o named.parquet --symbols all
  iaprof archive cap.parquet -o public.parquet --redact     to show to anyone
"""
_SYMBOLS = ("needed", "all")


def archive(
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="The capture to write.")],
    capture: Capture = DEFAULT,
    force: Annotated[bool, typer.Option("--force", "-f", help="Replace an existing capture.")] = False,
    symbols: Annotated[
        str,
        typer.Option(
            "--symbols",
            metavar="WHICH",
            help="Names of what the stacks need (needed), or of all functions (all).",
            autocompletion=one_of(_SYMBOLS),
        ),
    ] = "needed",
    kernels: Annotated[
        bool | None,
        typer.Option(
            "--kernels/--no-kernels",
            help="Include GPU kernels' binaries.  [default: yes, but not with --redact]",
            show_default=False,
        ),
    ] = None,
    redact: Annotated[
        bool, typer.Option("--redact", help="Replace names, paths, commands and hosts with hashes.")
    ] = False,
    redact_key: Annotated[
        Path | None,
        typer.Option(
            "--redact-key",
            metavar="FILE",
            help="Read the key of --redact's hashes from FILE, or create it. Archives with the same key have the same "
            "hashes. Keep it secret.",
            show_default="a new one each time",
        ),
    ] = None,
    symfs: Symfs = None,
    symbol_dirs: SymbolDirs = None,
    kallsyms: Kallsyms = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but errors.")] = False,
) -> None:
    """Write a capture whose frames have names on any machine.

    Adds names for the addresses of CPU stacks, as 'iaprof record' does when it ends. They come from the files of
    this machine, by build-id. The recorded addresses do not change, except with --redact.
    """
    checked_choice(symbols, _SYMBOLS, "--symbols")
    if redact_key is not None and not redact:
        raise UsageError("--redact-key is for --redact")
    check_output(output, force, existing(capture))
    from iaprof.report.archive.pseudonyms import Pseudonyms, read_key
    from iaprof.report.cpu_names import SymbolOptions

    pseudonyms = Pseudonyms(None if redact_key is None else read_key(redact_key)) if redact else None
    keep_kernels = not redact if kernels is None else kernels
    options = SymbolOptions(symfs, tuple(symbol_dirs or ()), kallsyms)
    _archive(capture, output, options, symbols == "all", pseudonyms, keep_kernels, quiet)


def _archive(
    capture: Path,
    output: Path,
    options: SymbolOptions,
    of_all: bool,
    pseudonyms: Pseudonyms | None,
    keep_kernels: bool,
    quiet: bool,
) -> None:
    """Writes the archive; `of_all`: with the names of all functions."""
    from iaprof.formats.capture.reader import CaptureReader
    from iaprof.report.archive.archiving import archive as write
    from iaprof.report.cpu_names import open_symbolizer

    progress = Progress()
    on_terminal = not quiet and sys.stderr is not None and sys.stderr.isatty()

    def tell(done: int, modules: int) -> None:
        if on_terminal:
            progress.naming(done, modules)

    archived = write(
        CaptureReader(capture),
        output,
        lambda part: open_symbolizer(part, options, of_all),
        tell,
        pseudonyms,
        keep_kernels,
    )
    progress.clear()
    if not quiet:
        counts = archived.header["symbols"]
        say(
            clean(
                f"[ iaprof archive: wrote {in_bytes(archived.size)} to {output}; "
                f"{counts['named']:,} of {counts['addresses']:,} addresses in {counts['modules']:,} files have names ]"
            )
        )
