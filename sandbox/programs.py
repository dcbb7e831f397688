"""Runs programs of others on untrusted bytes for a process that gives up its rights, and so can start none itself.

Before it gives them up it opens each program: this forks a helper, which can do nothing but run that program, with one
of the lists of arguments that were named then. For each run the helper makes a process with fewer rights than its own:

- The user is nobody instead of root, without capabilities.
- It can read what it is given and the system's libraries (Landlock, Linux 5.13), and write to nothing but two pipes.
- It can start no process, connect to nothing, and use limited memory and time (a filter of system calls, limits).

The two talk in messages over a socket. As whoever asks may be under an attacker's control, the helper checks what it
gets. A new request ends the run of the one before, whose answer is then left out, so the caller may give up waiting at
any time.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import select
import signal
import socket
import struct
import time
from collections.abc import Sequence

from iaprof.gpu.instructions import Program
from iaprof.sandbox.privileges import RUNNING, filter_system_calls, give_up_privileges, only_read

FILE = "{file}"
"""The argument that becomes the path of the bytes."""
_REQUEST = struct.Struct("<QIQQd")  # number, choice, bytes, most bytes of output, seconds
_ANSWER = struct.Struct("<QiQQ")  # number, exit status or minus a signal, bytes of output and of errors
_NUMBER = struct.Struct("<Q")
_CHUNK = 32 << 10
_LONGEST = _CHUNK + 64
_MOST_DATA = 64 << 20
_MOST_OUTPUT = 256 << 20
_MOST_ERRORS = 64 << 10  # bytes; what is behind is left out
_MEMORY = 2 << 30
_LONGEST_RUN_S = 120.0
_LOOK_MS = 2  # between two looks at a program that is about to end
_LIBRARIES = ("/usr", "/lib", "/lib64", "/etc/ld.so.cache", "/nix/store", "/gnu/store")
_STOPPED = -1000  # the status of a run that had to be stopped
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE = 1, 4  # linux/prctl.h
_ANY_REQUEST, _PIECE = b"r", b"d"


def open_program(path: str, choices: Sequence[Sequence[str]]) -> Program:
    """Forks the helper of a program.

    Args:
        path: of the program: an ELF file.
        choices: lists of arguments, with FILE where the path of the bytes belongs.

    Raises:
        OSError: it cannot be opened, may not be executed, or is no ELF file.
    """
    program = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if os.pread(program, 4, 0) != b"\x7fELF" or not os.fstat(program).st_mode & 0o111:
            raise OSError(f"{path} is no program")
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        pid = os.fork()
        if not pid:
            try:
                ours.close()
                _Helper(theirs, program, [list(each) for each in choices]).serve()
            finally:
                os._exit(0)
        theirs.close()
        return _Program(ours)
    finally:
        os.close(program)


class _Program(Program):
    """See Program: the caller's side. It makes system calls only that the sandbox allows."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel.detach()
        self._number = 0

    def run(self, choice: int, data: bytes, most: int, seconds: float) -> tuple[int, bytes, bytes]:
        """See Program."""
        self._number += 1
        own = _NUMBER.pack(self._number)
        if len(data) > _MOST_DATA:
            raise OSError(f"{len(data)} bytes are more than it is given")
        os.write(self._channel, _ANY_REQUEST + _REQUEST.pack(self._number, choice, len(data), most, seconds))
        for at in range(0, len(data), _CHUNK):
            os.write(self._channel, _PIECE + own + data[at : at + _CHUNK])
        head = self._receive(own)
        _, status, length, error_length = _ANSWER.unpack(head)
        found = bytearray()
        while len(found) < length + error_length:
            found += self._receive(own)[_NUMBER.size :]
        if status == _STOPPED:
            raise TimeoutError("it took too long, or wrote too much")
        return status, bytes(found[:length]), bytes(found[length:])

    def _receive(self, own: bytes) -> bytes:
        """Returns the next message about the request with that number."""
        while message := os.read(self._channel, _LONGEST):
            if message.startswith(own):
                return message
        raise ConnectionResetError("the process that runs it has ended")


class _Replaced(Exception):
    """Another request came, or whoever asked has ended."""


class _Helper:
    """The helper's side."""

    def __init__(self, channel: socket.socket, program: int, choices: list[list[str]]) -> None:
        self._channel, self._program, self._choices = channel, program, choices
        self._libc = ctypes.CDLL(None)
        self._next = b""  # a request that came while another one was at work

    def serve(self) -> None:
        """Serves requests until the channel is closed."""
        os.chdir("/")
        _close_all_but({self._channel.fileno(), self._program})
        for number in range(3):  # the descriptors 0 to 2 exist, so that no pipe becomes one of them
            os.dup2(os.open(os.devnull, os.O_RDWR), number)
        give_up_privileges(
            {
                resource.RLIMIT_CORE: 0,
                resource.RLIMIT_NOFILE: 64,
                resource.RLIMIT_FSIZE: _MOST_DATA,
            }
        )
        self._libc.prctl(_PR_SET_DUMPABLE, *map(ctypes.c_ulong, (0, 0, 0, 0)))
        only_read(self._libc, _LIBRARIES, [self._program])
        while True:
            message = self._next or self._channel.recv(_LONGEST)
            self._next = b""
            if not message:
                return
            with contextlib.suppress(_Replaced):
                self._answer(message)

    def _answer(self, message: bytes) -> None:
        if not message.startswith(_ANY_REQUEST) or len(message) != 1 + _REQUEST.size:
            return
        number, choice, length, most, seconds = _REQUEST.unpack_from(message, 1)
        if choice >= len(self._choices) or length > _MOST_DATA:
            return
        own = _NUMBER.pack(number)
        code = os.memfd_create("code", os.MFD_CLOEXEC)
        try:
            left = length
            while left > 0:
                piece = self._channel.recv(_LONGEST)
                if not piece.startswith(_PIECE + own):
                    self._replace(piece)
                piece = piece[1 + len(own) :]
                os.write(code, piece)
                left -= len(piece)
            os.lseek(code, 0, os.SEEK_SET)
            status, output, errors = self._run(choice, code, min(most, _MOST_OUTPUT), min(seconds, _LONGEST_RUN_S))
        finally:
            os.close(code)
        self._send(_ANSWER.pack(number, status, len(output), len(errors)))
        for at in range(0, len(output) + len(errors), _CHUNK):
            both = output if at + _CHUNK <= len(output) else output + errors
            self._send(own + both[at : at + _CHUNK])

    def _replace(self, message: bytes) -> None:
        """Leaves the request at hand for what came in its place."""
        if not message:
            os._exit(0)
        self._next = message
        raise _Replaced

    def _send(self, message: bytes) -> None:
        waiting = select.poll()
        waiting.register(self._channel, select.POLLIN | select.POLLOUT)
        for _, events in waiting.poll():
            if events & (select.POLLIN | select.POLLHUP):
                self._replace(self._channel.recv(_LONGEST))
        self._channel.send(message, socket.MSG_NOSIGNAL)

    def _run(self, choice: int, code: int, most: int, seconds: float) -> tuple[int, bytes, bytes]:
        """Runs the program; returns its status, output and errors, or _STOPPED."""
        out, into = os.pipe2(os.O_CLOEXEC)
        errors, into_errors = os.pipe2(os.O_CLOEXEC)
        pid = _fork_without_handlers()
        if not pid:
            try:
                self._become(choice, code, into, into_errors, seconds)
            finally:
                os._exit(127)
        for each in (into, into_errors):
            os.close(each)
        status: int | None = None
        try:
            until = time.monotonic() + seconds
            output, error_output = self._outputs(out, errors, most, until)
            status = self._end(pid, until)
        except TimeoutError:
            return _STOPPED, b"", b""
        finally:
            if status is None:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            for each in (out, errors):
                os.close(each)
        return os.waitstatus_to_exitcode(status), output, error_output[:_MOST_ERRORS]

    def _outputs(self, out: int, errors: int, most: int, until: float) -> tuple[bytes, bytes]:
        """Returns what a program writes to both pipes until it closes them.

        Raises:
            TimeoutError: it takes too long, or writes more than `most` to one of them.
            _Replaced: another request came.
        """
        found: dict[int, bytearray] = {out: bytearray(), errors: bytearray()}
        waiting = select.poll()
        for each in (self._channel.fileno(), *found):
            waiting.register(each, select.POLLIN)
        left = set(found)
        while left:
            ready = waiting.poll(1000 * max(until - time.monotonic(), 0))
            if not ready:
                raise TimeoutError
            for file, _ in ready:
                if file == self._channel.fileno():
                    self._replace(self._channel.recv(_LONGEST))
                piece = os.read(file, _CHUNK)
                found[file] += piece
                if not piece:
                    waiting.unregister(file)
                    left.remove(file)
            if max(map(len, found.values())) > most:
                raise TimeoutError
        return bytes(found[out]), bytes(found[errors])

    def _end(self, pid: int, until: float) -> int:
        """Waits for a program that has closed its pipes; raises as `_outputs` does."""
        waiting = select.poll()
        waiting.register(self._channel, select.POLLIN)
        while True:
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                return status
            if time.monotonic() >= until:
                raise TimeoutError
            if waiting.poll(_LOOK_MS):
                self._replace(self._channel.recv(_LONGEST))

    def _become(self, choice: int, code: int, into: int, into_errors: int, seconds: float) -> None:
        """Becomes the program, with the rights that are left to it."""
        for file, number in ((code, 0), (into, 1), (into_errors, 2)):
            os.dup2(file, number)
        self._libc.prctl(_PR_SET_PDEATHSIG, *map(ctypes.c_ulong, (signal.SIGKILL, 0, 0, 0)))
        filter_system_calls(self._libc, RUNNING)
        arguments = [each.replace(FILE, "/proc/self/fd/0") for each in self._choices[choice]]
        limits = {
            resource.RLIMIT_CPU: int(seconds) + 1,
            resource.RLIMIT_FSIZE: 0,
            resource.RLIMIT_NPROC: 0,
            resource.RLIMIT_NOFILE: 16,
            resource.RLIMIT_AS: _MEMORY,  # last: this process may have more than the program gets
        }
        for kind, most in limits.items():
            resource.setrlimit(kind, (most, most))
        os.execve(self._program, ["program", *arguments], {"LC_ALL": "C"})  # noqa: S606


def _fork_without_handlers() -> int:
    """Forks a child that does nothing but become a program.

    The handlers that libraries have for forks stay out (`_Fork` of glibc 2.34 and musl 1.2.3; older ones run them):
    Arrow's, for one, aborts where its descriptors are closed.
    """
    fork = getattr(ctypes.PyDLL(None), "_Fork", os.fork)
    return int(fork())


def _close_all_but(kept: set[int]) -> None:
    """Closes all descriptors but these."""
    for entry in os.listdir("/proc/self/fd"):
        if int(entry) not in kept:
            with contextlib.suppress(OSError):
                os.close(int(entry))
