"""Stdout, for the verbs whose answer goes there."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from iaprof.basics.errors import IaprofError
from iaprof.basics.files import replacing


@contextlib.contextmanager
def answering() -> Iterator[None]:
    """Within this, what is printed is UTF-8; at the end it is written.

    Raises:
        IaprofError: there is no stdout, the disk behind it is full, or a file that the answer needs cannot be opened.
    """
    if sys.stdout is None:
        raise IaprofError("the answer cannot be written: there is no stdout")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(encoding="utf-8", newline="\n")
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        raise  # `| head`: nobody is told
    except OSError as error:
        if error.filename is not None:  # of what the answer is made of, which is not stdout
            raise IaprofError(f"{os.fsdecode(error.filename)}: {error.strerror}") from error
        # What could not be written must not be tried again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise IaprofError(f"the answer cannot be written: {error.strerror}") from error


@contextlib.contextmanager
def destination(output: Path | None, binary: bool = False) -> Iterator[IO[Any]]:
    """Stdout, or a file that gets its name when it is whole: for bytes, or for text in UTF-8.

    Raises:
        IaprofError: it cannot be written.
    """
    if output is not None and binary:
        with replacing(output, 0o644) as file:
            yield file
        return
    if output is not None:
        with replacing(output, 0o644) as file, io.TextIOWrapper(file, encoding="utf-8", newline="\n") as text:
            yield text
        return
    with answering():
        yield sys.stdout.buffer if binary else sys.stdout
