"""`iaprof recover`: makes a capture of the spool of a recorder that died."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from iaprof.basics.errors import UsageError
from iaprof.basics.files import check_output
from iaprof.cli.options.captures import DEFAULT, existing
from iaprof.cli.options.symbol_options import WhichSymbols, which_symbols
from iaprof.cli.terminal.progress import Progress
from iaprof.cli.terminal.summary import say_end

EXAMPLES = """\b
Examples:
  sudo iaprof recover cap.parquet.spool                 writes cap.parquet
  sudo iaprof recover cap.parquet.spool -o saved.parquet
"""
_EXTENSION = ".spool"
_DEFAULT = DEFAULT.with_name(f"{DEFAULT.name}{_EXTENSION}")
_MOST_NAMED = 5  # spools, in a message


def recover(
    spool: Annotated[
        Path, typer.Argument(metavar="SPOOL", help="The spool that the recording left: CAPTURE.spool.")
    ] = _DEFAULT,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="The capture to write.  [default: SPOOL without .spool]",
            show_default=False,
        ),
    ] = None,
    symbols: WhichSymbols = "needed",
    force: Annotated[bool, typer.Option("--force", "-f", help="Replace an existing capture.")] = False,
) -> None:
    """Recover a recording whose recorder was killed.

    Converts its spool into a capture, which contains everything that the recorder had read. Keeps the spool.
    """
    which = which_symbols(symbols)
    from iaprof.record.capture.finish import finish, stack_finisher, symbol_writer
    from iaprof.record.spool import SpoolReader
    from iaprof.symbols.names.which import Symbols

    existing(spool, _absent)
    if spool.is_dir():
        raise UsageError(f"{spool} is a folder, not a spool: name the file CAPTURE{_EXTENSION} that a recording left")
    if output is None:
        if spool.suffix != _EXTENSION:
            raise UsageError(f"{spool} does not end in {_EXTENSION}: name the capture to write with -o")
        output = spool.with_suffix("")
    reader = SpoolReader(spool)
    check_output(output, force, spool)
    progress = Progress()
    on_terminal = sys.stderr is not None and sys.stderr.isatty()
    names = symbol_writer(which, progress.naming if on_terminal else _nothing)
    finished = finish(reader, output, None, None if which is Symbols.NONE else names, stack_finisher())
    progress.clear()
    reader.close()
    say_end("recover", output, finished.header, finished.size)


def _absent(spool: Path) -> str:
    beside = spool.with_name(f"{spool.name}{_EXTENSION}")
    if beside.is_file():
        return f"{spool} does not exist: run 'iaprof recover {beside}'"
    there = sorted(spool.parent.glob(f"*{_EXTENSION}"))[:_MOST_NAMED]
    spools = (
        f"its folder has {', '.join(each.name for each in there)}" if there else f"it is called CAPTURE{_EXTENSION}"
    )
    return f"{spool} does not exist: name the spool that a recording left; {spools}"


def _nothing(*_: object) -> None:
    pass
