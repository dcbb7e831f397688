"""Stdout, for verbs that print their answer."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from iaprof.basics.errors import IaprofError, UsageError
from iaprof.basics.files import replace_file


@contextlib.contextmanager
def utf8_stdout() -> Iterator[None]:
    """Makes stdout UTF-8 within the block, and flushes it at the end.

    Raises:
        IaprofError: stdout is closed or its disk is full, or a file that the answer needs cannot be opened.
    """
    if sys.stdout is None:
        raise IaprofError("the output cannot be written: there is no stdout")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(encoding="utf-8", newline="\n")
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        raise  # the normal end of `| head`
    except OSError as error:
        if error.filename is not None:  # of a file that the answer needs, not of stdout
            raise IaprofError(f"{os.fsdecode(error.filename)}: {error.strerror}") from error
        # Keeps Python from writing the buffered rest again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise IaprofError(f"the output cannot be written: {error.strerror}") from error


@contextlib.contextmanager
def open_output(output: Path | None, binary: bool = False, mode: int = 0o644) -> Iterator[IO[Any]]:
    """Stdout, or a file of that mode that gets its name when it is complete; binary, or UTF-8 text.

    Raises:
        IaprofError: the output cannot be written.
    """
    if output is not None and binary:
        with replace_file(output, mode) as file:
            yield file
        return
    if output is not None:
        with replace_file(output, mode) as file, io.TextIOWrapper(file, encoding="utf-8", newline="\n") as text:
            yield text
        return
    with utf8_stdout():
        yield sys.stdout.buffer if binary else sys.stdout


def is_terminal() -> bool:
    """Whether stdout is a terminal."""
    return sys.stdout is not None and sys.stdout.isatty()


def refuse_terminal(format_: str) -> None:
    """Checks that stdout is not a terminal, for formats that are not text for people.

    Raises:
        UsageError: it is one.
    """
    if is_terminal():
        raise UsageError(f"refusing to write {format_} output to a terminal: name a file with -o, or use a pipe")
