"""The one place for work on hostile bytes: a child process without privileges and with limits, which may die.

The parent's side: it starts the child when there is work, hands it a request, waits no longer than allowed, and starts
another when one died. A request may bring open files along: the child can open none itself. What a request may be,
and how the child gives up its rights, is sandbox.child's part.
The child may be in an attacker's hands: what it answers is JSON of bounded length, and callers check its shape.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import struct
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from iaprof.basics.errors import IaprofError
from iaprof.sandbox.closing import Closing
from iaprof.sandbox.worker import ONE_THREAD, Worker

REQUEST = struct.Struct("<QQ")  # bytes of JSON, then bytes of data; both follow
ANSWER = struct.Struct("<Q")  # bytes of JSON, which follow
LONGEST_DATA = 256 << 20  # bytes
_DYING_SECONDS = 2.0  # for a killed child to give back its memory

_ENVIRONMENT = ("IAPROF_IGA_LIBRARY", "LD_LIBRARY_PATH")  # Python's own library may be found by the second


class SandboxError(IaprofError):
    """The work was not done; the text says why."""


class SandboxDied(SandboxError):
    """The child died on its work, took too long, or answered nonsense. Another one takes its place."""


class SandboxRefused(SandboxError):
    """The child looked at the request and refused it."""

    def __init__(self, kind: str, message: str, details: object = None) -> None:
        """`kind` is the name of the child's exception, `details` what came with it, unchecked."""
        super().__init__(message)
        self.kind = kind
        self.details = details


@dataclass(frozen=True, slots=True)
class Limits:
    """What one child may use."""

    memory_bytes: int = 1 << 30  # Python and libiga64 (about 150 MiB) included
    seconds: float = 120.0  # for one request, by the clock and of CPU
    stage_seconds: float = 40.0  # for one stage of a request, which then fails alone
    answer_bytes: int = 64 << 20
    files: int = 0  # open files that one request may bring along
    mapped_bytes: int = 0  # of those files in memory at once, besides memory_bytes
    written_bytes: int = 0  # how long it may make a file that it is handed for writing


class Sandbox(Closing):
    """A child process for work on hostile bytes; also a context manager. One thread at a time may use it."""

    def __init__(self, reader: str, limits: Limits | None = None) -> None:
        """Starts nothing yet.

        Args:
            reader: name of the module that does the work, see sandbox.reader.
            limits: what the child may use.
        """
        self.reader = reader
        self.limits = limits or Limits()
        self._child: Worker | None = None

    @property
    def pid(self) -> int | None:
        """The child's process id, None while there is none."""
        return self._child.pid if self._child else None

    def close(self) -> None:
        """End the child, whatever it is doing. A later call starts another."""
        if self._child is not None:
            self._child.close(_DYING_SECONDS)
            self._child = None

    def call(
        self,
        operation: str,
        parameters: Mapping[str, object] | None = None,
        data: bytes = b"",
        fds: Sequence[int] = (),
        seconds: float | None = None,
    ) -> Any:
        """Have the child do one thing; returns its answer, whose shape the caller must check.

        Args:
            operation: which one.
            parameters: JSON.
            data: bytes for it to chew.
            fds: open files that it gets descriptors of, with the rights that they were opened with.
            seconds: for this request, instead of the limits'.

        Raises SandboxRefused with the child's reason, SandboxDied where it did not survive or keep within its limits,
        SandboxError where it could not be started.
        """
        if len(data) > LONGEST_DATA:
            raise SandboxError(f"it has {len(data)} bytes; more than {LONGEST_DATA} are not read")
        if len(fds) > self.limits.files:
            raise SandboxError(f"the reader process takes {self.limits.files} open files at most, not {len(fds)}")
        if self._child is not None and self._child.has_ended():
            self.close()  # it ended between two requests: that is nobody's fault now
        if self._child is None:
            self._start()
        allowed = self.limits.seconds if seconds is None else seconds
        request = {"operation": operation, "parameters": parameters or {}, "seconds": allowed}
        header = json.dumps(request).encode()
        try:
            answer = self._exchange(allowed, fds, REQUEST.pack(len(header), len(data)), header, data)
        except BaseException:
            self.close()  # what the child says next would answer this request, not the next one
            raise
        return self._result(answer)

    def _result(self, answer: Any) -> Any:
        """The answer's content, or the error that it tells of."""
        match answer:
            case {"ok": result}:
                return result
            case {"error": str(kind), "message": str(message), "details": details}:
                raise SandboxRefused(kind, message, details)
        self.close()
        raise SandboxDied("the reader process answered nonsense")

    def _start(self) -> None:
        if not sys.executable:
            raise SandboxError("the reader process cannot be started: this Python does not know its own path")
        try:
            self._child = Worker(
                "iaprof.sandbox.child:main",
                self.reader,
                json.dumps(asdict(self.limits)),
                channel=socket.SOCK_STREAM,
                environment={name: os.environ[name] for name in _ENVIRONMENT if name in os.environ} | ONE_THREAD,
            )
        except OSError as error:
            raise SandboxError(f"the reader process cannot be started: {error}") from None
        try:
            self._result(self._exchange(self.limits.seconds))  # it says when it is ready, or why it never will be
        except SandboxDied as error:
            raise SandboxError(f"the reader process could not start: {error}") from None
        except SandboxRefused as error:
            self.close()
            raise SandboxError(f"the reader process could not start: {error}") from None
        except BaseException:
            self.close()
            raise

    def _exchange(self, seconds: float, fds: Sequence[int] = (), *request: bytes) -> Any:
        """Send the request's parts, files with the first, and take one answer, within the time allowed."""
        assert self._child is not None
        channel = self._child.channel
        deadline = time.monotonic() + seconds
        try:
            for part in request:
                channel.settimeout(max(deadline - time.monotonic(), 0.001))
                if fds:
                    sent = socket.send_fds(channel, [part], fds, socket.MSG_NOSIGNAL)
                    part, fds = part[sent:], ()
                channel.sendall(part, socket.MSG_NOSIGNAL)  # whatever the process does about SIGPIPE
            (length,) = ANSWER.unpack(receive(channel, ANSWER.size, deadline))
            if length > self.limits.answer_bytes:
                raise SandboxDied("the reader process answered too much")
            return json.loads(receive(channel, length, deadline))
        except TimeoutError:
            self.close()
            raise SandboxDied(f"the reader process took longer than {seconds:g} s") from None
        except OSError:
            raise SandboxDied(f"the reader process {self._end()}") from None
        except (ValueError, RecursionError):
            raise SandboxDied("the reader process answered nonsense") from None

    def _end(self) -> str:
        """How the child ended, which it is doing or has done."""
        assert self._child is not None
        self._child.wait(5)
        code = self._child.status
        self.close()
        if code is not None and code < 0:
            with contextlib.suppress(ValueError):
                return f"died of {signal.Signals(-code).name}"
        return "ended" if code is None else f"ended with status {code}"


def receive(channel: socket.socket, length: int, deadline: float | None = None) -> bytearray:
    """So many bytes of a stream, before a time.monotonic().

    Raises:
        ConnectionResetError: the other end was closed.
        OSError: it is late, or dead.
    """
    received = bytearray(length)
    view = memoryview(received)
    while view:
        if deadline is not None:
            channel.settimeout(max(deadline - time.monotonic(), 0.001))
        count = channel.recv_into(view)
        if count == 0:
            raise ConnectionResetError
        view = view[count:]
    return received
