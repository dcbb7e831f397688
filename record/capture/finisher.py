"""Making captures of spools in a process apart: the recorder stays small, and goes on meanwhile when it rotates."""

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
from iaprof.record.capture.spool import Spool
from iaprof.sandbox.memory import MALLOC_ENVIRONMENT
from iaprof.sandbox.worker import Worker
from iaprof.symbols.names.which import Symbols


class Finisher:
    """One such process, from its start to its answer."""

    def __init__(
        self, spool: Spool, symbols: Symbols, carry: int | None = None, roots: Mapping[int, int] | None = None
    ) -> None:
        """Starts it; it waits for `go`.

        Args:
            spool: that it will read.
            symbols: which names the capture gets.
            carry: descriptor for what the next output file needs of this one, if there is a next one.
            roots: descriptors of processes' roots, for who has no such process any more.

        Raises:
            IaprofError: there is no room for another process.
        """
        self._spool, self._carry, self._folder = spool, carry, folder_descriptor(spool.path)
        self._symbols, self._roots = symbols, dict(roots or {})
        self._answer: dict[str, Any] | None = None
        self._line = b""  # the last one, as far as it came
        self.naming: tuple[int, int] | None = None  # modules that were named, and all of them, once that began
        fds = [spool.fileno(), self._folder, *([] if carry is None else [carry]), *set(self._roots.values())]
        try:
            self._child = Worker(
                "iaprof.record.capture.finish_child:main",
                channel=socket.SOCK_STREAM,
                files=fds,
                environment=os.environ | MALLOC_ENVIRONMENT,
            )
        except OSError as error:
            raise IaprofError(f"the process that finishes captures cannot be started: {error.strerror}") from error

    def go(self, output: Path) -> None:
        """Lets it make the capture, in the spool's folder."""
        request = {
            "spool": self._spool.fileno(),
            "carry": self._carry,
            "folder": self._folder,
            "output": str(output.absolute()),
            "symbols": self._symbols.value,
            "roots": self._roots,
        }
        with contextlib.suppress(OSError):  # it died: `result` says so
            self._child.channel.sendall(json.dumps(request).encode() + b"\n")

    def fileno(self) -> int:
        """Readable when `read` has something to read."""
        return self._child.channel.fileno()

    def read(self) -> bool:
        """Reads a piece of what it says; gives whether that was the last."""
        try:
            piece = self._child.channel.recv(1 << 16)
        except ConnectionError:  # it died before it read what it is to do
            piece = b""
        *told, self._line = (self._line + piece).split(b"\n")
        for line in told:
            said = json.loads(line)
            if "naming" in said:
                self.naming = tuple(said["naming"])
            else:
                self._answer = said
        return not piece

    def skip_names(self) -> None:
        """Lets it end with the names that it has."""
        self._child.send_signal(signal.SIGINT)

    def result(self) -> tuple[dict[str, Any], int]:
        """Header and bytes of the capture that was made; waits for it.

        Raises:
            IaprofError: none could be made; nothing is left of it, the spool stays.
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
        """Ends it, whatever it does; an unfinished capture is taken away."""
        self._child.channel.close()
        self._child.send_signal(signal.SIGTERM)
        self._child.wait()
