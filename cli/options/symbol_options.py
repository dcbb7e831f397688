"""The options that say where to look for symbols of CPU code, shared by several verbs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, TypeAlias

import typer

from iaprof.cli.options.values import checked_choice, one_of
from iaprof.symbols.names.which import Symbols

NAMES = "CPU symbols"
"""The heading of these options in grouped help."""
WhichSymbols: TypeAlias = Annotated[
    str,
    typer.Option(
        "--symbols",
        metavar="WHICH",
        help="Which names to put into the capture: needed, all or none.",
        autocompletion=one_of(Symbols),
    ),
]
Symfs: TypeAlias = Annotated[
    Path | None,
    typer.Option("--symfs", metavar="DIR", help="Look for files below DIR instead of /.", rich_help_panel=NAMES),
]
SymbolDirs: TypeAlias = Annotated[
    list[Path] | None,
    typer.Option("--symbol-dir", metavar="DIR", help="Also look for files in DIR, by build-id.", rich_help_panel=NAMES),
]
Kallsyms: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        "--kallsyms", metavar="FILE", help="Read the Linux kernel's symbols from FILE.", rich_help_panel=NAMES
    ),
]


def which_symbols(text: str) -> Symbols:
    """Parses the value of `--symbols`.

    Raises:
        UsageError: the value is none of the choices.
    """
    return Symbols(checked_choice(text, Symbols, "--symbols"))
