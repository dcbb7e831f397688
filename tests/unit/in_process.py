"""Runs verbs in this process: a hundred runs take two seconds, not a minute."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import NamedTuple
from unittest import mock

from typer.main import get_command

from iaprof.cli import main

_COMMAND = get_command(main.app)  # made once: this takes as long as a report of a few stalls


class Done(NamedTuple):
    """What a verb left behind."""

    code: int
    out: str
    err: str


def iaprof(*words: str | Path) -> Done:
    """What the command prints, neither stream being a terminal, and its exit code; exceptions come through."""
    written = io.BytesIO()
    out, err = io.TextIOWrapper(written, "utf-8"), io.StringIO()
    code: object = None
    argv = mock.patch("sys.argv", ["iaprof", *map(str, words)])
    with (
        argv,
        mock.patch.object(main, "app", _COMMAND),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            main.main()
        except SystemExit as ended:
            code = ended.code
    assert code is None or isinstance(code, int)
    out.flush()
    return Done(code or 0, written.getvalue().decode(), err.getvalue())
