"""Records for `iaprof top --live`: the recorder is this process, and what shows it a child with fewer rights."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import tempfile
import termios
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

from iaprof.basics.clean import clean
from iaprof.basics.errors import IaprofError
from iaprof.basics.files import sudo_user
from iaprof.cli.terminal.summary import say, say_end
from iaprof.record.options import Options
from iaprof.record.session import Callbacks, Session, Status
from iaprof.record.signals import StopSignals
from iaprof.sandbox.privileges import NOBODY
from iaprof.sandbox.worker import Worker

_ENVIRONMENT = ("TERM", "COLORTERM", "LANG", "LC_ALL", "LC_CTYPE", "NO_COLOR", "TMUX", "IAPROF_IGA_LIBRARY")
_END_S = 3.0  # for the display to leave the terminal as it was
_WAIT_S = 0.2  # between two looks at signals
_BLOCK = 4096  # bytes
_LEAVE = "\x1b[?1049l\x1b[?25h\x1b[?1000l\x1b[?1003l\x1b[?1006l\x1b[?2004l\x1b[<u"  # what a killed display left set


def record_live(options: Options, title: str, quiet: bool) -> int:
    """Records and shows it until the user quits, or the recording ends and the user quits.

    Args:
        options: what to record; a capture is made if they say so.
        title: of the view.
        quiet: print no last line.

    Returns:
        The exit code of the command; 0 without one.

    Raises:
        IaprofError: recording failed; the text says what is left of it.
    """
    with StopSignals() as signals, contextlib.ExitStack() as left:
        if not options.is_kept:
            folder = tempfile.mkdtemp(prefix="iaprof-live-")  # only this user may read it
            left.callback(shutil.rmtree, folder, ignore_errors=True)
            options = replace(options, output=Path(folder, "live.parquet"))
        display = _Display(title, signals)
        session = Session(options, signals, Callbacks(_say, _nothing, _nothing, display.show))
        left.callback(session.close)
        try:
            with display.running(session, options.is_kept):
                status = session.run()
                display.ended(status)
        except Exception:
            if options.is_kept and session.spool.path.exists():
                say(clean(f"iaprof: 'iaprof recover {session.spool.path} -o FILE' saves what was recorded"))
            raise
        if not options.is_kept:
            session.discard()
        else:
            header, size = session.finish()
            if not quiet:
                say_end("record", options.output, header, size)
        if display.failure:
            raise IaprofError(display.failure)
        return status


class _Display:
    """The child that shows the recording."""

    def __init__(self, title: str, signals: StopSignals) -> None:
        self._title, self._signals = title, signals
        self._child: Worker | None = None
        self._session: Session | None = None
        self._is_kept = False
        self.failure = ""  # how it ended, if not because the user quit

    @contextlib.contextmanager
    def running(self, session: Session, is_kept: bool) -> Iterator[None]:
        """Shows a recording within the block; what is printed there goes to the display."""
        self._session, self._is_kept = session, is_kept
        state = termios.tcgetattr(0)
        with contextlib.ExitStack() as opened:
            kept = [os.dup(number) for number in range(3)]
            pipe, into = os.pipe()
            nothing = os.open(os.devnull, os.O_RDONLY)
            spool = os.open(f"/proc/self/fd/{session.spool.fileno()}", os.O_RDONLY)
            for each in (*kept, pipe, into, nothing, spool):
                opened.callback(os.close, each)
            self._child = self._started(kept, pipe, spool)
            previous = signal.signal(signal.SIGWINCH, self._resized)
            for number, target in enumerate((nothing, into, into)):
                os.dup2(target, number)
            try:
                yield
            finally:
                self._end()
                for number, target in enumerate(kept):
                    os.dup2(target, number)
                signal.signal(signal.SIGWINCH, previous)
                if self._child.status:
                    os.write(2, _LEAVE.encode())
                    self.failure = f"the display ended with status {self._child.status}: please report this"
                termios.tcsetattr(0, termios.TCSADRAIN, state)

    def _started(self, terminal: list[int], pipe: int, spool: int) -> Worker:
        uid, gid = sudo_user() or (NOBODY, NOBODY)
        return Worker(
            "iaprof.cli.live.display:main",
            self._title,
            *(spool, terminal[0], pipe, uid, gid),
            channel=socket.SOCK_SEQPACKET,
            files=(spool, terminal[0], pipe),
            environment={name: os.environ[name] for name in _ENVIRONMENT if name in os.environ},
            output=terminal[1],
            errors=terminal[2],
        )

    def _resized(self, number: int, _: FrameType | None) -> None:
        if self._child is not None:
            self._child.send_signal(number)  # it has a session of its own, to which the terminal sends nothing

    def show(self, status: Status) -> None:
        """Sends the recording's state, and does what the display asks for."""
        assert self._child is not None and self._session is not None
        if self._child.has_ended():
            if not self._session.is_ending:
                os.kill(os.getpid(), signal.SIGTERM)  # as if the user had ended the recording
            return
        members = ["seconds", "records", "launches", "lost", "losses", "cpu_s", *(["bytes"] if self._is_kept else [])]
        self._send({name: getattr(status, name) for name in members})
        with contextlib.suppress(OSError, ValueError):
            while True:
                self._child.channel.setblocking(False)
                request, _ = self._child.receive()
                read = request.get("read") if isinstance(request, dict) else None
                if not self._is_kept and type(read) is int:
                    self._session.spool.release(min(read, self._session.spool.size) // _BLOCK * _BLOCK)

    def _send(self, message: dict[str, Any]) -> None:
        assert self._child is not None
        with contextlib.suppress(OSError):
            self._child.channel.setblocking(False)
            self._child.channel.send(json.dumps(message).encode(), socket.MSG_NOSIGNAL)

    def ended(self, status: int) -> None:
        """Tells the display that the recording has ended, and waits until the user quits or a signal comes."""
        assert self._child is not None
        self._send({"ended": True, "status": status})
        while not self._signals.count and not self._child.wait(_WAIT_S):
            pass

    def _end(self) -> None:
        assert self._child is not None
        self._child.channel.close()
        if not self._child.wait(_END_S):
            self._child.close(_END_S)


def _say(text: str) -> None:
    say(f"iaprof: {clean(text)}")


def _nothing(*_: object) -> None:
    pass
