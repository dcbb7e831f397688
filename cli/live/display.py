"""The process that shows a recording while it goes on: it has the rights of the user behind sudo.

The recorder starts it with the terminal, a descriptor of the spool and one of a pipe that gets what the command and the
recorder print. It imports and starts everything that needs more rights, gives up its rights, and only then reads.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import resource
import socket
import time
from collections import deque
from pathlib import Path
from typing import Any, ClassVar

from rich.cells import cell_len
from textual.binding import Binding, BindingType

from iaprof.basics.clean import clean
from iaprof.basics.quantities import in_bytes
from iaprof.cli.interactive.dialogs import TextScreen
from iaprof.cli.interactive.view import View
from iaprof.cli.live.state import LiveState
from iaprof.cli.terminal.summary import say
from iaprof.gpu.vendors import VENDORS, layouts
from iaprof.report.gpu.decoder import gpu_sandbox
from iaprof.report.gpu.module import GpuModuleLoader
from iaprof.sandbox.parent import Limits
from iaprof.sandbox.privileges import give_up_privileges

REFRESH_S = 1.0
_CHANNEL = 0  # descriptor: messages of the recorder, as JSON
_MEMORY_BYTES = 4 << 30  # of addresses; the sums take some hundred MB at most
_LINES = 1000  # of what is printed, that are kept
_LAST_LINES = 20  # of them, that are printed at the end if something failed
_LONGEST_MESSAGE = 1 << 16
_IMPORTED_LATE = (  # by textual, when it needs them
    "rich.ansi", "textual.drivers.headless_driver", "textual.drivers.linux_driver", "textual.layouts.factory",
    "textual.layouts.grid", "textual.layouts.horizontal", "textual.layouts.stream", "textual.layouts.vertical",
    "textual.pilot", "textual.scrollbar",
)  # fmt: skip


def main(title: str, spool: str, terminal: str, printed: str, uid: str, gid: str) -> None:
    """Shows the recording until the user quits or the recorder closes the channel.

    Args:
        title: of the view.
        spool: descriptor of the spool, for reading.
        terminal: descriptor of the terminal, for reading.
        printed: descriptor of a pipe with what the command prints.
        uid: the user to become.
        gid: the user's group.
    """
    channel = socket.socket(fileno=os.dup(_CHANNEL))
    os.dup2(int(terminal), 0)
    user = int(uid), int(gid)
    sandbox = gpu_sandbox(Limits(user=user))  # who may end it, as this process must
    loader = GpuModuleLoader(sandbox)
    loader.load(b"", None, only=())  # starts its process, which this one may not be able to start later
    state = LiveState(Path(f"/proc/self/fd/{spool}"), loader)
    _import_the_rest()
    give_up_privileges({resource.RLIMIT_CORE: 0, resource.RLIMIT_FSIZE: 0, resource.RLIMIT_AS: _MEMORY_BYTES}, user)
    view = LiveView(title, state, channel, int(printed))
    view.run()
    for line in view.last_lines():
        say(line)
    sandbox.close()


def _import_the_rest() -> None:
    """Imports what would be imported later: the user may be unable to read where it is installed."""
    layouts()
    for vendor in VENDORS:
        vendor.code_reader()
        vendor.dependencies(())
    for name in _IMPORTED_LATE:
        importlib.import_module(name)
    cell_len("\u6f22")  # loads the widths of Unicode's characters


class LiveView(View):
    """The view of a recording that goes on."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("z", "clear", "Zero"),
        Binding("p", "pause", "Pause"),
        Binding("v", "printed", "Output"),
    ]

    def __init__(self, title: str, state: LiveState, channel: socket.socket, printed: int) -> None:
        """Args: the title; the sums; the recorder's messages; a pipe with what is printed."""
        self._heading, self._state, self._channel, self._pipe = title, state, channel, printed
        self._printed = deque[str](maxlen=_LINES)
        self._partial = ""  # the last line, as far as it has come
        self._status: dict[str, Any] = {}
        self._before: tuple[dict[str, Any], float, float] = ({}, time.monotonic(), time.process_time())
        self._is_paused = self._is_ended = False
        channel.setblocking(False)
        os.set_blocking(printed, False)
        super().__init__(state.contents(title, "waiting for the first samples", 1.0))

    def on_mount(self) -> None:
        """Begins to refresh."""
        self.set_interval(REFRESH_S, self._read_spool)
        self.set_interval(REFRESH_S / 5, self._take_messages)

    def _take_messages(self) -> None:
        """Takes the recorder's messages and what was printed."""
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self._pipe, 1 << 16):
                *lines, self._partial = (self._partial + data.decode("utf-8", "backslashreplace")).split("\n")
                self._printed += lines
                self._partial = self._partial[-_LONGEST_MESSAGE:]
        try:
            while message := self._channel.recv(_LONGEST_MESSAGE):
                self._status = json.loads(message)
                if self._status.get("ended"):
                    self._is_ended = True
        except BlockingIOError:
            return
        except OSError:
            pass
        self.exit()  # the recorder closed the channel, or was killed: nobody may be left to quit

    def _read_spool(self) -> None:
        """Reads what was recorded, and shows it unless the view is paused or a dialog is open."""
        if self._is_paused:
            return
        seconds = self._state.read()
        with contextlib.suppress(OSError):
            self._channel.send(json.dumps({"read": self._state.position}).encode(), socket.MSG_NOSIGNAL)
        if len(self.screen_stack) == 1:
            self.stalls.show_contents(self._state.contents(self._heading, self._costs(), seconds))

    def _costs(self) -> str:
        """Rates and costs since the last refresh."""
        now, status = (self._status, time.monotonic(), time.process_time()), self._status
        before, then, used = self._before
        if not status:
            return "waiting for the recorder"
        self._before = now
        if self._is_ended:
            return "the recording has ended"
        span = max(status["seconds"] - before.get("seconds", 0.0), 1e-3)
        recorder = 100 * (status["cpu_s"] - before.get("cpu_s", 0.0)) / span
        own = 100 * (now[2] - used) / max(now[1] - then, 1e-3)
        parts = [
            f"{(status['records'] - before.get('records', 0)) / span:,.0f} records/s",
            f"{(status['launches'] - before.get('launches', 0)) / span:,.0f} launches/s",
            f"lost {status['lost']:,}" if status["lost"] or not status["losses"] else f"lost {status['losses']} times",
            f"CPU: recorder {recorder:.1f} %, view {own:.1f} %",
        ]
        if "bytes" in status:
            parts.append(f"spool {in_bytes(status['bytes'])}")
        if self._state.damaged:
            parts.append(f"{self._state.damaged} damaged frames")
        return "; ".join(parts)

    def last_lines(self) -> list[str]:
        """The end of what was printed, if recording or the command failed."""
        has_failed = not self._is_ended or self._status.get("status")
        lines = [*self._printed, *([self._partial] if self._partial else [])]
        return [clean(line) for line in lines[-_LAST_LINES:]] if has_failed else []

    def action_clear(self) -> None:
        """Begins to count anew."""
        self._state.clear()

    def action_pause(self) -> None:
        """Stops refreshing, or goes on."""
        self._is_paused = not self._is_paused
        self.notify(
            "The view is paused; the recording goes on." if self._is_paused else "The view goes on.", markup=False
        )

    def action_printed(self) -> None:
        """Shows what the command printed."""
        if len(self.screen_stack) == 1:
            lines = [clean(line) for line in (*self._printed, self._partial)]
            self.push_screen(TextScreen("What was printed", lambda width: lines, lambda lines: len(lines)))
