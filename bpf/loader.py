"""Compiling and loading BPF programs in a process apart, which hands over their descriptors and ends.

The recorder stays small, and does other things while clang is at work.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from iaprof.bpf.compiler import BpfUnavailable
from iaprof.bpf.load_child import MAX_MESSAGE

TIMEOUT_S = 30.0  # it takes a third of a second of CPU
_MAX_FDS = 32
_PACKAGES = str(Path(__file__).parents[2])
_CHILD = "import sys; sys.path.append(sys.argv.pop()); from iaprof.bpf.load_child import main; main()"


class Interruption(Protocol):
    """What may end a wait: signals that came."""

    def fileno(self) -> int:
        """Readable when something came."""

    def clear(self) -> None:
        """Makes `fileno` wait again."""

    def check(self) -> None:
        """Raises what ends the wait, if that is what came."""


class Loader:
    """That process, from its start to its answer."""

    def __init__(
        self, sources: Sequence[str], defines: dict[str, int], functions: Sequence[str], maps: Sequence[str]
    ) -> None:
        """Starts it; the arguments are `compile_program`'s.

        Raises:
            BpfUnavailable: there is no room for another process.
        """
        self.cpu_seconds = 0.0  # that it took
        self._deadline = time.monotonic() + TIMEOUT_S
        self._child: subprocess.Popen[bytes] | None = None
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._folder = ""
        with theirs:
            try:
                # Ours, so that it goes away even if the process is killed.
                self._folder = tempfile.mkdtemp(prefix="iaprof-bpf-")
                self._child = subprocess.Popen(
                    # An interpreter that looks at no environment, no folder of the user's and no site-packages: what
                    # it imports is the standard library, this package, and bcc by its path.
                    [sys.executable, "-I", "-S", "-c", _CHILD, str(theirs.fileno()), _PACKAGES],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    cwd="/",
                    env={name: value for name, value in os.environ.items() if name != "LD_PRELOAD"},
                    start_new_session=True,  # Ctrl-C is the recorder's business
                )
            except OSError as error:
                self.close()
                raise BpfUnavailable(f"the process that compiles BPF cannot be started: {error.strerror}") from error
        request = {"folder": self._folder, "sources": sources, "defines": defines, "functions": functions, "maps": maps}
        with contextlib.suppress(OSError):  # it died already: `wait` says so
            self._channel.send(json.dumps(request).encode())

    def wait(self, interruption: Interruption | None = None) -> dict[str, int]:
        """The descriptors, close-on-exec, by the name of function or map; they are the caller's. To be called once.

        Args:
            interruption: may end the wait.

        Raises:
            BpfUnavailable: what is missing, and how to get it; or the process died or took too long.
        """
        try:
            self._wait_for_answer(interruption)
            try:
                message, fds, _, _ = socket.recv_fds(self._channel, MAX_MESSAGE, _MAX_FDS)
            except ConnectionResetError:  # before it read the request
                message, fds = b"", []
            if not message:
                raise BpfUnavailable(
                    f"the process that compiles BPF died ({self._reap()}): make sure that it gets 200 MB of memory"
                )
        finally:
            self.close()
        for fd in fds:
            os.set_inheritable(fd, False)
        answer = json.loads(message)
        if "error" in answer:
            raise BpfUnavailable(answer["error"])
        return dict(zip(answer["names"], fds, strict=True))

    def _wait_for_answer(self, interruption: Interruption | None) -> None:
        poll = select.poll()
        poll.register(self._channel, select.POLLIN)
        if interruption is not None:
            poll.register(interruption.fileno(), select.POLLIN)
        while True:
            ready = [fd for fd, _ in poll.poll(max(0.0, self._deadline - time.monotonic()) * 1000)]
            if interruption is not None:
                interruption.clear()
                interruption.check()
            if self._channel.fileno() in ready:
                return
            if not ready:
                raise BpfUnavailable(
                    f"compiling the BPF programs took longer than {TIMEOUT_S:g} s: record again when the machine "
                    "is less busy"
                )

    def _reap(self) -> str:
        """Waits for the process's end; says which it was."""
        assert self._child is not None
        _, status, usage = os.wait4(self._child.pid, 0)
        self.cpu_seconds = usage.ru_utime + usage.ru_stime
        code = self._child.returncode = os.waitstatus_to_exitcode(status)
        self._child = None
        return signal.Signals(-code).name if code < 0 else f"exit status {code}"

    def close(self) -> None:
        """Ends the process, whatever it does."""
        self._channel.close()
        if self._child is not None:
            os.kill(self._child.pid, signal.SIGKILL)  # Popen.kill would reap it, and its CPU time with it
            self._reap()
        shutil.rmtree(self._folder, ignore_errors=True)
