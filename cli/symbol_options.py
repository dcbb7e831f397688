"""The options that say where names of CPU frames are looked for, as several verbs have them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, TypeAlias

import typer

Symfs: TypeAlias = Annotated[
    Path | None, typer.Option("--symfs", metavar="DIR", help="Look for files below this folder, not in /.")
]
SymbolDirs: TypeAlias = Annotated[
    list[Path] | None, typer.Option("--symbol-dir", metavar="DIR", help="Look for files by build-id here too.")
]
Kallsyms: TypeAlias = Annotated[
    Path | None, typer.Option("--kallsyms", metavar="FILE", help="Names of the operating system's kernel.")
]
