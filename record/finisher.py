"""Making captures of spools in a process apart: the recorder stays small, and goes on meanwhile when it rotates."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from iaprof.basics.errors import IaprofError
from iaprof.basics.files import folder_of
from iaprof.record.spool import Spool
from iaprof.sandbox.memory import MALLOC
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
        self._spool, self._carry, self._folder = spool, carry, folder_of(spool.path)
        self._symbols, self._roots = symbols, dict(roots or {})
        self._answer: dict[str, Any] | None = None
        self._line = b""  # the last one, as far as it came
        self.naming: tuple[int, int] | None = None  # modules that were named, and all of them, once that began
        fds = [spool.fileno(), self._folder, *([] if carry is None else [carry]), *set(self._roots.values())]
        try:
            self._child = subprocess.Popen(
                # -P: not from whatever folder the user stands in.
                [sys.executable, "-P", "-m", "iaprof.record.finish_child"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=os.environ | MALLOC,
                pass_fds=fds,
                start_new_session=True,  # Ctrl-C is the recorder's business
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
        assert self._child.stdin is not None
        with contextlib.suppress(OSError):  # it died: `result` says so
            self._child.stdin.write(json.dumps(request).encode() + b"\n")
            self._child.stdin.flush()

    def fileno(self) -> int:
        """Readable when `read` has something to read."""
        assert self._child.stdout is not None
        return self._child.stdout.fileno()

    def read(self) -> bool:
        """Reads a piece of what it says; gives whether that was the last."""
        piece = os.read(self.fileno(), 1 << 16)
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
        with contextlib.suppress(ProcessLookupError):
            self._child.send_signal(signal.SIGINT)

    def result(self) -> tuple[dict[str, Any], int]:
        """Header and bytes of the capture that was made; waits for it.

        Raises:
            IaprofError: none could be made; nothing is left of it, the spool stays.
        """
        while not self.read():
            pass
        status = self._child.wait()
        if self._answer is None:
            raise IaprofError(f"the process that finishes the capture died (exit status {status})")
        if "error" in self._answer:
            raise IaprofError(self._answer["error"])
        return self._answer["header"], self._answer["size"]

    def close(self) -> None:
        """Ends it, whatever it does; an unfinished capture is taken away."""
        for pipe in (self._child.stdin, self._child.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        if self._child.poll() is None:
            self._child.terminate()
            self._child.wait()
