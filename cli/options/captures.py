"""The argument CAPTURE, which all verbs treat alike: without it, they read what 'iaprof record' writes by default."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, TypeAlias

import typer

from iaprof.basics.errors import IaprofError
from iaprof.formats.urls import without_credentials

DEFAULT = Path("iaprof.parquet")
Capture: TypeAlias = Annotated[Path, typer.Argument(metavar="CAPTURE", help="A capture that 'iaprof record' wrote.")]
FirstCapture: TypeAlias = Annotated[
    str | None,
    typer.Argument(metavar="CAPTURE", help=f"A file that 'iaprof record' wrote.  [default: {DEFAULT}]"),
]
"""A capture before another argument, which can be given without it: see capture_and."""


def existing(path: Path, absent: Callable[[Path], str] | None = None) -> Path:
    """Returns the path of a capture, or of another file.

    Args:
        path: the path.
        absent: says of another file than a capture what to do if it is not there.

    Raises:
        IaprofError: there is no such file.
    """
    try:
        path.stat()
    except FileNotFoundError:
        raise IaprofError((absent or _absent)(path)) from None
    except OSError:
        pass  # opening it says why
    return path


def capture_and(first: str | None, second: str | None) -> tuple[Path, str | None]:
    """Tells the two arguments of a verb apart, the first of which, CAPTURE, can be left out.

    A single argument is a capture if there is such a file, or if it is named like one.

    Raises:
        IaprofError: there is no such capture.
    """
    if first is not None and second is None and not first.endswith(DEFAULT.suffix) and not os.path.isfile(first):
        first, second = None, first
    return existing(DEFAULT if first is None else Path(first)), second


def _absent(path: Path) -> str:
    spool = path.with_name(f"{path.name}.spool")
    if spool.is_file():
        return (
            f"{path} does not exist, but {spool} does: wait until the recording has ended, or, if its recorder died, "
            f"run 'sudo iaprof recover {spool}'"
        )
    if path == DEFAULT:
        return f"{path} does not exist: run 'iaprof record' first, or name a capture"
    return f"{without_credentials(str(path))} does not exist: name a file that 'iaprof record' wrote"
