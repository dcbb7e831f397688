"""Shows text that is longer than the terminal in a pager, as perf and git do."""

from __future__ import annotations

import contextlib
import io
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator

from iaprof.cli.terminal.stdout import utf8_stdout

_USUAL = "less"
_OPTIONS = "FRX"  # less: end if it fits one screen, pass colours on, leave the text on the screen


class _Screen(io.StringIO):
    """Takes what is printed for a terminal."""

    def isatty(self) -> bool:
        """Whether tables have the terminal's width and colours."""
        return True


@contextlib.contextmanager
def paged() -> Iterator[None]:
    """Keeps what the block prints on stdout, which is a terminal, and shows it after the block."""
    screen = _Screen()
    with contextlib.redirect_stdout(screen):
        yield
    show(screen.getvalue())


def show(text: str) -> None:
    """Prints a text, in the pager that PAGER names, or less, if it has more lines than the terminal.

    Raises:
        IaprofError: it cannot be printed.
    """
    words = _pager()
    if not words or text.count("\n") < shutil.get_terminal_size().lines:
        with utf8_stdout():
            sys.stdout.write(text)
        return
    environment = {"LESS": _OPTIONS, "LESSCHARSET": "utf-8", **os.environ}
    if "SUDO_UID" in os.environ:
        environment["LESSSECURE"] = "1"  # less would start any command as root
    with subprocess.Popen(words, stdin=subprocess.PIPE, env=environment) as pager:
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the pager's
        try:
            with contextlib.suppress(BrokenPipeError):  # it ended before it read everything
                pager.communicate(text.encode())
        finally:
            signal.signal(signal.SIGINT, before)


def _pager() -> list[str]:
    """The command of the pager; empty if there is none."""
    try:
        words = shlex.split(os.environ.get("PAGER", _USUAL))
    except ValueError:  # unbalanced quotes
        return []
    return words if words and words != ["cat"] and shutil.which(words[0]) else []
