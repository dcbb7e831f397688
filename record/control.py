"""`--control`: another program says when to record, in perf's words, through a FIFO or an inherited descriptor.

Commands end in a newline: `enable`, `disable`, `snapshot` (a new output file), `stop`, `ping`. Each that is understood
is answered with `ack` when there is a descriptor for it; what is not understood is told to the user.
"""

from __future__ import annotations

import contextlib
import os
import select
import stat
from collections.abc import Iterator

from iaprof.basics.errors import UsageError
from iaprof.formats.profile import clean

COMMANDS = ("enable", "disable", "snapshot", "stop", "ping")
MAX_BYTES = 4096  # of a command without its newline


class Control:
    """The descriptors of `fifo:CTL[,ACK]` or `fd:CTL[,ACK]`."""

    def __init__(self, text: str) -> None:
        """Opens them.

        Raises:
            UsageError: it is of another form, or what it names is no FIFO or descriptor.
        """
        how, _, names = text.partition(":")
        command, _, ack = names.partition(",")
        if how not in ("fifo", "fd") or not command:
            raise UsageError(f"--control takes fifo:PATH[,PATH] or fd:NUMBER[,NUMBER], not '{text}'")
        opened = _open_fifo if how == "fifo" else _take_fd
        self._ack: int | None = None
        self._fd = opened(command)
        self._rest = b""
        try:
            self._ack = opened(ack) if ack else None
        except UsageError:
            self.close()
            raise

    def fileno(self) -> int:
        """Readable when there are commands, or when nobody can send any more."""
        return self._fd

    def read(self) -> Iterator[str]:
        """The commands that came, when `fileno` is readable; `closed` when no more can come.

        What is none of COMMANDS comes as it is.
        """
        try:
            data = os.read(self._fd, MAX_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            yield "closed"
            return
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > MAX_BYTES:
            lines, self._rest = [*lines, self._rest[:64]], b""
        for line in lines:
            if words := line.replace(b"\0", b"").strip():
                yield clean(words.decode("utf-8", "backslashreplace"))

    def acknowledge(self) -> None:
        """Says that a command was obeyed."""
        if self._ack is not None:
            with contextlib.suppress(OSError):  # nobody listens
                if select.select([], [self._ack], [], 0)[1]:  # else nobody has read the earlier ones
                    os.write(self._ack, b"ack\n")

    def close(self) -> None:
        """Closes them."""
        for fd in (self._fd, self._ack):
            if fd is not None:
                os.close(fd)
        self._ack = None


def _open_fifo(path: str) -> int:
    try:
        # For writing too: so that it neither waits for somebody to open the other end nor ends when they close it.
        fd = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    except OSError as error:
        raise UsageError(f"--control: {path} cannot be opened: {error.strerror}; make it with mkfifo") from error
    if not stat.S_ISFIFO(os.fstat(fd).st_mode):
        os.close(fd)
        raise UsageError(f"--control: {path} is no FIFO; make one with mkfifo")
    return fd


def _take_fd(number: str) -> int:
    try:
        fd = os.dup(int(number))
        os.set_inheritable(fd, False)
    except (ValueError, OSError, OverflowError) as error:
        raise UsageError(f"--control: {number} is no open descriptor") from error
    return fd
