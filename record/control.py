"""`--control`: another program says when to record, in perf's words, through a FIFO or an inherited descriptor.

Commands end in a newline: `enable`, `disable`, `snapshot` (a new output file), `stop`, `ping`. Each known command is
answered with `ack` if there is a descriptor for it; of an unknown one the user is warned.
"""

from __future__ import annotations

import contextlib
import os
import select
import stat
from collections.abc import Iterator

from iaprof.basics.clean import clean
from iaprof.basics.errors import UsageError

COMMANDS = ("enable", "disable", "snapshot", "stop", "ping")
MAX_BYTES = 4096  # of a command without its newline


class Control:
    """The descriptors of `fifo:CTL[,ACK]` or `fd:CTL[,ACK]`."""

    def __init__(self, text: str) -> None:
        """Opens the descriptors.

        Raises:
            UsageError: the text has another form, or names no FIFO or open descriptor.
        """
        form, _, names = text.partition(":")
        command, _, ack = names.partition(",")
        if form not in ("fifo", "fd") or not command:
            raise UsageError(f"--control takes fifo:PATH[,PATH] or fd:NUMBER[,NUMBER], not '{text}'")
        open_end = _open_fifo if form == "fifo" else _take_fd
        self._ack: int | None = None
        self._fd = open_end(command)
        self._unfinished = b""
        try:
            _check_waits(self._fd, command)
            self._ack = open_end(ack) if ack else None
        except UsageError:
            self.close()
            raise

    def fileno(self) -> int:
        """Returns a descriptor that is readable when there are commands, or when no more can come."""
        return self._fd

    def read(self) -> Iterator[str]:
        """Reads the commands that have come, once `fileno` is readable; yields `closed` when no more can come.

        Unknown commands are yielded unchanged.
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
        *lines, self._unfinished = (self._unfinished + data).split(b"\n")
        if len(self._unfinished) > MAX_BYTES:
            lines, self._unfinished = [*lines, self._unfinished[:64]], b""
        for line in lines:
            if words := line.replace(b"\0", b"").strip():
                yield clean(words.decode("utf-8", "backslashreplace"))

    def acknowledge(self) -> None:
        """Sends `ack`: a command was executed."""
        if self._ack is not None:
            with contextlib.suppress(OSError):  # nobody listens
                if select.select([], [self._ack], [], 0)[1]:  # not when the pipe is full of acks that nobody reads
                    os.write(self._ack, b"ack\n")

    def close(self) -> None:
        """Closes the descriptors."""
        for fd in (self._fd, self._ack):
            if fd is not None:
                os.close(fd)
        self._ack = None


def _open_fifo(path: str) -> int:
    try:
        # For writing, too: so open() does not wait for a writer, and reading does not end when the writer closes.
        fd = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    except OSError as error:
        raise UsageError(f"--control: {path} cannot be opened: {error.strerror}; make it with mkfifo") from error
    if not stat.S_ISFIFO(os.fstat(fd).st_mode):
        os.close(fd)
        raise UsageError(f"--control: {path} is not a FIFO; make one with mkfifo")
    return fd


def _check_waits(fd: int, name: str) -> None:
    """Raises UsageError if one cannot wait for commands, as in a file or folder."""
    with select.epoll() as waiting:
        try:
            waiting.register(fd, select.EPOLLIN)
        except OSError as error:
            raise UsageError(
                f"--control: {name} is a file, folder or device, which cannot be waited for: use a pipe"
            ) from error


def _take_fd(number: str) -> int:
    try:
        fd = os.dup(int(number))
        os.set_inheritable(fd, False)
    except (ValueError, OSError, OverflowError) as error:
        raise UsageError(f"--control: {number} is not an open descriptor") from error
    return fd
