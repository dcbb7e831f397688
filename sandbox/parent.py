"""The parent's side of the sandbox: a child process without privileges and with limits that parses hostile bytes.

The parent starts the child when there is work, sends it requests, waits for answers up to a time limit, and starts
another child if one dies. A request may include open files, as the child cannot open any. sandbox.child gives up the
child's rights and serves the requests.

As an attacker may control the child, its answers are JSON, or bytes, of limited length. The module that sends a request
knows the layout of the answer, and checks it with the functions here.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import sys
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from iaprof.basics.errors import IaprofError
from iaprof.sandbox.deadline import Deadline
from iaprof.sandbox.messages import ANSWER, IS_BYTES, LONGEST_DATA, REQUEST, receive
from iaprof.sandbox.privileges import NOBODY
from iaprof.sandbox.worker import Closing, Worker

_EXIT_SECONDS = 2.0  # for a killed child to free its memory

_ENVIRONMENT = (
    "IAPROF_IGA_LIBRARY", "IAPROF_NVDISASM", "PATH", "CUDA_HOME", "CUDA_PATH",  # which decoders there are
    "LD_LIBRARY_PATH",  # Python may need it to find its own library
)  # fmt: skip


class SandboxError(IaprofError):
    """A request was not answered; the text says why."""


class SandboxDied(SandboxError):
    """The child died, took too long, or sent an invalid answer. The next request starts another child."""


class SandboxSlow(SandboxDied):
    """The child took too long."""


class SandboxRefused(SandboxError):
    """The child refused the request."""

    def __init__(self, kind: str, message: str, details: object = None) -> None:
        """Args: `kind` of the child's Refusal, or name of its exception; text; the Refusal's `details`, unchecked."""
        super().__init__(message)
        self.kind = kind
        self.details = details


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of a child."""

    memory_bytes: int = 1 << 30  # including Python and libiga64 (about 150 MiB)
    seconds: float = 120.0  # for one request, of CPU time, and of elapsed time without that of waiting for a CPU
    stage_seconds: float = 40.0  # of elapsed time for one stage of a request; if it takes longer, only that stage fails
    answer_bytes: int = 64 << 20
    files: int = 0  # maximum number of open files in a request
    mapped_bytes: int = 0  # of these files that may be mapped at once, in addition to memory_bytes
    written_bytes: int = 0  # maximum length of a file that the child writes
    user: tuple[int, int] = (NOBODY, NOBODY)  # in place of root: for a parent that gives up root, its own, to kill it


class Sandbox(Closing):
    """A child process that parses hostile bytes; only one thread at a time may use it."""

    def __init__(self, reader: str, limits: Limits | None = None) -> None:
        """Does not start the child yet.

        Args:
            reader: name of the module with the operations, see sandbox.reader.
            limits: of the child.
        """
        self.reader = reader
        self.limits = limits or Limits()
        self._child: Worker | None = None
        self._is_ready = False  # the child has said so

    @property
    def pid(self) -> int | None:
        """The child's process id; None if no child runs."""
        return self._child.pid if self._child else None

    def begin(self) -> None:
        """Starts the child, which gets ready while this process does something else; an error comes with a call."""
        if self._child is None:
            with contextlib.suppress(SandboxError):
                self._start()

    def close(self) -> None:
        """Kills the child; a later call starts another."""
        if self._child is not None:
            self._child.close(_EXIT_SECONDS)
            self._child, self._is_ready = None, False

    def call(
        self,
        operation: str,
        parameters: Mapping[str, object] | None = None,
        data: bytes = b"",
        fds: Sequence[int] = (),
        seconds: float | None = None,
    ) -> Any:
        """Runs an operation in the child and returns its answer, which the caller must check.

        Args:
            operation: its name.
            parameters: of the operation, JSON.
            data: bytes for the operation.
            fds: descriptors of open files, which the child gets with the same access rights.
            seconds: time limit for this request, in place of that in `limits`. Waiting for a CPU does not count.

        Raises:
            SandboxRefused: the child refused the request; the text is its reason.
            SandboxDied: the child died or exceeded its limits.
            SandboxError: the child could not be started, or the request is too large.
        """
        if len(data) > LONGEST_DATA:
            raise SandboxError(f"it has {len(data)} bytes; more than {LONGEST_DATA} are not read")
        if len(fds) > self.limits.files:
            raise SandboxError(f"the reader process takes {self.limits.files} open files at most, not {len(fds)}")
        if self._child is not None and self._child.has_ended():
            self.close()  # the child ended between two requests, which is not an error of this one
        if self._child is None:
            self._start()
        if not self._is_ready:
            self._wait_until_ready()
        allowed = self.limits.seconds if seconds is None else seconds
        request = {"operation": operation, "parameters": parameters or {}, "seconds": allowed}
        header = json.dumps(request).encode()
        try:
            answer = self._exchange(allowed, fds, REQUEST.pack(len(header), len(data)), header, data)
        except BaseException:
            self.close()  # else the child's late answer to this request would be taken for that to the next one
            raise
        return self._result(answer)

    def _result(self, answer: Any) -> Any:
        """Returns the answer's content, or raises the error that it contains."""
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
                environment={name: os.environ[name] for name in _ENVIRONMENT if name in os.environ},
            )
        except OSError as error:
            raise SandboxError(f"the reader process cannot be started: {error}") from None

    def _wait_until_ready(self) -> None:
        try:
            self._result(self._exchange(self.limits.seconds))  # the first message: ready, or an error
        except (SandboxDied, SandboxRefused) as error:
            self.close()
            raise SandboxError(f"the reader process could not start: {error}") from None
        except BaseException:
            self.close()
            raise
        self._is_ready = True

    def _exchange(self, seconds: float, fds: Sequence[int] = (), *request: bytes) -> Any:
        """Sends the parts of a request, with the files, and receives the answer, within the time limit."""
        assert self._child is not None
        channel = self._child.channel
        deadline = self._child.deadline(seconds)
        try:
            for part in request:
                _send(channel, part, fds, deadline)
                fds = ()
            (length,) = ANSWER.unpack(receive(channel, ANSWER.size, deadline))
            if length & ~IS_BYTES > self.limits.answer_bytes:
                raise SandboxDied("the reader process answered too much")
            answer = receive(channel, length & ~IS_BYTES, deadline)
            return {"ok": answer} if length & IS_BYTES else json.loads(answer)
        except TimeoutError:
            deadline.over()
            self.close()
            raise SandboxSlow(f"the reader process took longer than {seconds:g} s") from None
        except OSError:
            deadline.over()  # while the child is there
            raise SandboxDied(f"the reader process {self._describe_end()}") from None
        except (ValueError, RecursionError):
            raise SandboxDied("the reader process answered nonsense") from None
        finally:
            deadline.over()

    def _describe_end(self) -> str:
        """Waits for the child's end, and returns how it ended."""
        assert self._child is not None
        self._child.wait(5)
        code = self._child.status
        self.close()
        if code is not None and code < 0:
            with contextlib.suppress(ValueError):
                return f"died of {signal.Signals(-code).name}"
        return "ended" if code is None else f"ended with status {code}"


def _send(channel: socket.socket, data: bytes, fds: Sequence[int], deadline: Deadline) -> None:
    """Sends bytes, with files if there are any; raises OSError, also when the deadline has passed."""
    view = memoryview(data)
    while view:
        channel.settimeout(deadline.left())
        files = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", fds))] if fds else []
        with contextlib.suppress(TimeoutError):  # the deadline knows whether its time is over
            view = view[channel.sendmsg([view], files, socket.MSG_NOSIGNAL) :]  # as the process may not ignore SIGPIPE
            fds = ()


LARGEST = 1 << 48  # addresses, offsets and lines
_LONGEST_SENTENCE = 600
_SURROGATE = re.compile("[\ud800-\udfff]")


class AnswerError(IaprofError):
    """The child's answer is invalid: it is broken, or controlled by an attacker."""

    def __init__(self) -> None:
        super().__init__("the reader process answered nonsense")


def integers(value: Any, limit: int = LARGEST, lowest: int = 0) -> list[int]:
    """Checks a list of integers from `lowest` up to, but not including, `limit`."""
    if not isinstance(value, list) or not set(map(type, value)) <= {int}:
        raise AnswerError
    if value and not (lowest <= min(value) and max(value) < limit):
        raise AnswerError
    return value


def integer(value: Any, limit: int = LARGEST) -> int:
    """Checks an integer from 0 up to, but not including, `limit`."""
    return integers([value], limit)[0]


def string_list(value: Any) -> list[str]:
    """Checks a list of strings that can be encoded: JSON allows lone surrogates, which encoders refuse."""
    strings = any_list(value)
    for each in strings:
        if not isinstance(each, str) or not (each.isascii() or _SURROGATE.search(each) is None):
            raise AnswerError
    return strings


def string(value: Any) -> str:
    """Checks a string that can be encoded."""
    return string_list([value])[0]


def sentence(text: str) -> str:
    """Makes the child's text safe to print: one line of limited length, without characters that control a terminal."""
    text = text if len(text) <= _LONGEST_SENTENCE else text[:_LONGEST_SENTENCE] + "..."
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)


def any_list(value: Any) -> list[Any]:
    """Checks a list, but not its elements."""
    if not isinstance(value, list):
        raise AnswerError
    return value


def ascending(offsets: Sequence[int]) -> None:
    """Checks that each offset is larger than the one before."""
    if any(later <= earlier for earlier, later in pairwise(offsets)):
        raise AnswerError
