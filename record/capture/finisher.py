"""Has captures made of spools by a process of its own, so that the recorder stays small and can go on recording."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from iaprof.basics.errors import IaprofError
from iaprof.basics.files import folder_descriptor
from iaprof.record.spool import Spool
from iaprof.sandbox.memory import MALLOC_ENVIRONMENT
from iaprof.sandbox.worker import Worker
from iaprof.symbols.names.which import Symbols


class Finisher:
    """One process that makes a capture, from its start to its answer."""

    def __init__(
        self, spool: Spool, symbols: Symbols, state_fd: int | None = None, roots: Mapping[int, int] | None = None
    ) -> None:
        """Starts the process, which waits for `go`.

        Args:
            spool: the spool to read.
            symbols: which names the capture gets.
            state_fd: descriptor of a file for the rotation state; None if no output file follows.
            roots: descriptors of root folders, by process: see Roots.by_process.

        Raises:
            IaprofError: the process cannot be started.
        """
        self._spool, self._state_fd, self._folder = spool, state_fd, folder_descriptor(spool.path)
        self._symbols, self._roots = symbols, dict(roots or {})
        self._answer: dict[str, Any] | None = None
        self._line = b""  # the last line, as far as it has come
        self.naming: tuple[int, int] | None = None  # modules named so far, and all of them; None before naming begins
        fds = [spool.fileno(), self._folder, *([] if state_fd is None else [state_fd]), *set(self._roots.values())]
        try:
            self._child = Worker(
                "iaprof.record.capture.finish:main",
                channel=socket.SOCK_STREAM,
                files=fds,
                environment=os.environ | MALLOC_ENVIRONMENT,
            )
        except OSError as error:
            raise IaprofError(f"the process that finishes captures cannot be started: {error.strerror}") from error

    def go(self, output: Path) -> None:
        """Has the capture made, in the spool's folder."""
        request = {
            "spool": self._spool.fileno(),
            "rotation_state": self._state_fd,
            "folder": self._folder,
            "output": str(output.absolute()),
            "symbols": self._symbols.value,
            "roots": self._roots,
        }
        with contextlib.suppress(OSError):  # the process has died: `result` reports it
            self._child.channel.sendall(json.dumps(request).encode() + b"\n")

    def fileno(self) -> int:
        """Returns a descriptor that is readable when `read` has something to read."""
        return self._child.channel.fileno()

    def read(self) -> bool:
        """Reads some of the process's messages; returns whether they have ended."""
        try:
            data = self._child.channel.recv(1 << 16)
        except ConnectionError:  # the process died before it read the request
            data = b""
        *lines, self._line = (self._line + data).split(b"\n")
        for line in lines:
            message = json.loads(line)
            if "naming" in message:
                self.naming = tuple(message["naming"])
            else:
                self._answer = message
        return not data

    def skip_names(self) -> None:
        """Ends the naming: the capture gets the names found so far."""
        self._child.send_signal(signal.SIGINT)

    def result(self) -> tuple[dict[str, Any], int]:
        """Waits for the capture; returns its header and bytes.

        Raises:
            IaprofError: the capture could not be made; no part of it is left, and the spool stays.
        """
        while not self.read():
            pass
        self._child.wait()
        if self._answer is None:
            raise IaprofError(f"the process that finishes the capture died (exit status {self._child.status})")
        if "error" in self._answer:
            raise IaprofError(self._answer["error"])
        return self._answer["header"], self._answer["size"]

    def close(self) -> None:
        """Ends the process at once; an unfinished capture is removed."""
        self._child.channel.close()
        self._child.send_signal(signal.SIGTERM)
        self._child.wait()
