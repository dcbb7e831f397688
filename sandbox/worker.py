"""Child processes of iaprof: how they start, what they inherit, and how they end.

Every process that runs our code for another process is a Worker:

- It is a new interpreter, not a fork, with only the descriptors and the environment that it is given. Its stdin is the
  channel to this process, or /dev/null.
- It imports modules from the same folders as this process, whatever environment variables and the working directory
  are. A `bare` worker imports only from the standard library and the folder with this package. None runs the module
  site, nor what other packages have put into its .pth files.
- It has its own session: Ctrl-C reaches only this process. When the worker has ended, its own children are killed.
- Only this class waits for it, so its exit status and CPU time are known. As a file system in user space can block even
  a killed process, waits can have a time limit.

The worker itself gives up privileges and sets limits before it reads untrusted data (privileges.py). It defines the
protocol on the channel: `send` and `receive` transfer messages with open files; parent.py has calls with a deadline.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self, TypeVar

from iaprof.basics.libraries import ONE_THREAD
from iaprof.sandbox.deadline import CpuWaits, Deadline

_PACKAGES = str(Path(__file__).parents[2])  # the folder from which iaprof is imported
_LONGEST_MESSAGE = 1 << 16
_SO_SNDBUFFORCE = 32  # asm-generic/socket.h
_POLL_S = 0.001  # between two checks whether a child has ended
_TICKS = os.sysconf("SC_CLK_TCK")
Received = TypeVar("Received")


class Closing(ABC):
    """A context manager whose exit calls `close`."""

    @abstractmethod
    def close(self) -> None:
        """Releases the resource."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Worker(Closing):
    """A child process that runs a function; `close` kills it."""

    channel: socket.socket  # this process's end; only set if there is a channel

    def __init__(
        self,
        function: str,
        *arguments: object,
        channel: socket.SocketKind | None = None,
        queue_bytes: int = 0,
        files: Sequence[int] = (),
        environment: Mapping[str, str] | None = None,
        folder: str | None = None,
        output: int | IO[bytes] = subprocess.DEVNULL,
        errors: int | IO[bytes] | None = subprocess.DEVNULL,
        user: int | None = None,
        group: int | None = None,
        bare: bool = False,
        python: Sequence[str] | None = None,
        linker: Sequence[str] = (),
        nice: int | None = None,
    ) -> None:
        """Starts the child.

        Args:
            function: "module:function".
            arguments: of the function, which gets them as strings.
            channel: type of the Unix socket that the child has as descriptor 0; None for no channel.
            queue_bytes: size of the channel's buffer in each direction; 0 for the system's default.
            files: descriptors that the child inherits under the same numbers.
            environment: the child's whole environment, with ONE_THREAD; None for ONE_THREAD only.
            folder: the working directory; None for this process's.
            output: the child's stdout.
            errors: the child's stderr; None for this process's.
            user: the child's user and group id, without supplementary groups; None for this process's. The user needs
                no right to search the folders above the interpreter and its packages.
            group: the group id, where `user` is given and it is another one.
            bare: import no installed packages, and restrict none.
            python: the interpreter with its options, in place of this one.
            linker: the dynamic linker with its options, which starts the interpreter; none for the interpreter's own.
            nice: the nice value of the child and of its session; None for those of this process.

        Raises:
            OSError: the process cannot be started.
        """
        self._waits: CpuWaits | None = None
        self.status: int | None = None  # exit code, or minus the signal that ended the child; None before it was reaped
        self.cpu_seconds = 0.0  # CPU time of the child and the children it waited for; 0 before it was reaped
        module, _, name = function.partition(":")
        paths = [_PACKAGES] if bare else [*(path for path in sys.path if os.path.isabs(path)), _PACKAGES]
        environment = {**ONE_THREAD, **(environment or {})}
        with contextlib.ExitStack() as opened:
            if user is not None:
                of_user = _OpenPython(opened, paths)
                python, paths, files = of_user.command, of_user.paths, [*files, *of_user.files]
                environment["PYTHONHOME"] = of_user.home
            command = [*linker, *(python or _interpreter()), "-c", _program(module, name, len(arguments), bare)]
            if channel is not None:
                ours, theirs = map(opened.enter_context, socket.socketpair(socket.AF_UNIX, channel))
                for end in (ours, theirs) if queue_bytes else ():
                    with contextlib.suppress(OSError):  # needs root
                        end.setsockopt(socket.SOL_SOCKET, _SO_SNDBUFFORCE, queue_bytes)
            self._process = subprocess.Popen(
                [*command, *map(str, arguments), sys.prefix, *paths],
                stdin=subprocess.DEVNULL if channel is None else theirs.fileno(),
                stdout=output,
                stderr=errors,
                env=environment,
                cwd=folder,
                pass_fds=files,
                start_new_session=True,
                user=user,
                group=user if group is None or user is None else group,
                extra_groups=None if user is None else (),
            )
            if channel is not None:
                self.channel = socket.socket(fileno=ours.detach())
        self.pid = self._process.pid
        if nice is not None:
            with contextlib.suppress(OSError):  # only root may lower it
                os.setpriority(os.PRIO_PROCESS, self.pid, nice)
        _set_nice_of_session(self.pid, _nice_of_session() if nice is None else nice)

    def send(self, request: object, files: Sequence[int] = ()) -> None:
        """Sends JSON as one message on a SOCK_SEQPACKET channel, with open files.

        Raises:
            OSError: the child is dead.
        """
        socket.send_fds(self.channel, [json.dumps(request).encode()], files)

    def receive(self) -> tuple[Any, list[int]]:
        """Receives a message of JSON, and the open file that came with it, if any, which the caller closes.

        Raises:
            BlockingIOError, TimeoutError: no message has arrived; which one is raised depends on the channel's timeout.
            OSError: the child is dead.
        """
        message, files, _, _ = socket.recv_fds(self.channel, _LONGEST_MESSAGE, 1)
        if not message:
            raise ConnectionResetError
        return json.loads(message), files

    def within(self, seconds: float, receive: Callable[[], Received]) -> Received:
        """Receives from the channel within a time limit, in which the child's waiting for a CPU does not count.

        Args:
            seconds: the limit.
            receive: raises TimeoutError after the channel's timeout.

        Raises:
            TimeoutError: the time is over.
            OSError: the child is dead.
        """
        deadline = self.deadline(seconds)
        try:
            while True:
                self.channel.settimeout(deadline.left())
                with contextlib.suppress(TimeoutError):  # the deadline knows whether its time is over
                    return receive()
        finally:
            deadline.over()

    def deadline(self, seconds: float) -> Deadline:
        """Begins a time limit for the child, in which waiting for a CPU does not count."""
        if self._waits is None:
            self._waits = CpuWaits(self.pid)
        return Deadline(self._waits, seconds)

    def has_ended(self) -> bool:
        """Whether the child has ended; does not wait. If it has, kills the processes that it started and left."""
        return self._reap(os.WNOHANG)

    def wait(self, seconds: float | None = None) -> bool:
        """Waits until the child ends, or for this time; returns whether it has ended."""
        if seconds is None:
            return self._reap(0)
        deadline = time.monotonic() + seconds
        while not self.has_ended():
            if time.monotonic() >= deadline:
                return False
            time.sleep(_POLL_S)
        return True

    def _reap(self, options: int) -> bool:
        if self.status is None:
            try:
                if os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT | options) is None:
                    return False
                with contextlib.suppress(OSError):
                    os.killpg(self.pid, signal.SIGKILL)  # before wait4, after which the pid can be reused
                _, status, usage = os.wait4(self.pid, 0)
            except ChildProcessError:
                self.status = self.status or 0  # other code in this process has reaped it, perhaps a signal handler
            else:
                self.status = os.waitstatus_to_exitcode(status)
                self.cpu_seconds = usage.ru_utime + usage.ru_stime
            self._process.returncode = self.status  # so that Popen does not wait for it
        return True

    def cpu_seconds_so_far(self) -> float:
        """Returns the CPU time of the child and the children it waited for, also while it runs."""
        if self.has_ended():
            return self.cpu_seconds
        stat = Path(f"/proc/{self.pid}/stat").read_bytes()
        return sum(map(int, stat[stat.rindex(b")") + 2 :].split()[11:15])) / _TICKS

    def send_signal(self, number: int) -> None:
        """Sends a signal to the child's process group, unless the child has ended."""
        if not self.has_ended():
            os.killpg(self.pid, number)

    def kill(self) -> None:
        """Kills the child's process group; does not wait."""
        self.send_signal(signal.SIGKILL)

    def close(self, seconds: float | None = None) -> None:
        """Kills the child, and waits until it has ended, or for this time."""
        if hasattr(self, "channel"):
            self.channel.close()
        if self._waits is not None:
            self._waits.close()
        self.kill()
        self.wait(seconds)


def _nice_of_session() -> int:
    """Returns the nice value of this process's session, which can have a share of its own (sched(7), autogroup)."""
    try:
        return int(Path("/proc/self/autogroup").read_text().split()[-1])
    except (OSError, ValueError, IndexError):
        return 0


def _set_nice_of_session(pid: int, nice: int) -> None:
    """Sets the nice value of a process's session, if the kernel has one and lets this process."""
    if nice:
        with contextlib.suppress(OSError):
            Path(f"/proc/{pid}/autogroup").write_text(str(nice))


class _OpenPython:
    """This interpreter with its packages, as descriptors.

    Opening a path that begins with a descriptor takes no right to search the folders above, such as a private home.
    """

    def __init__(self, opened: contextlib.ExitStack, paths: Sequence[str]) -> None:
        """Opens them until `opened` closes them.

        Args:
            opened: closes the descriptors.
            paths: the folders to import from.
        """
        self.files: list[int] = []
        self._opened = opened
        options = ["-s", "-P", "-S", *(["-B"] if sys.dont_write_bytecode else [])]  # -I would ignore PYTHONHOME
        self.command = [self._open(os.path.realpath(sys.executable)), *options]
        self.home = self._open(sys.base_prefix)
        self.paths = [self._open(path) for path in paths if os.path.exists(path)]

    def _open(self, path: str) -> str:
        file = os.open(path, os.O_PATH | os.O_CLOEXEC)
        self._opened.callback(os.close, file)
        self.files.append(file)
        return f"/proc/self/fd/{file}"


def _interpreter() -> list[str]:
    """Returns the command of this interpreter with a Worker's options."""
    return [sys.executable, "-I", "-S", *(["-B"] if sys.dont_write_bytecode else [])]


def _program(module: str, name: str, arguments: int, bare: bool) -> str:
    """Returns the child's program; its arguments are those of the function, sys.prefix, and folders for sys.path."""
    end = arguments + 1
    imports = f"sys.prefix = sys.argv[{end}]; "
    if bare:
        imports += f"sys.path += sys.argv[{end + 1}:]"
    else:
        imports += (
            f"sys.path[:] = sys.argv[{end + 1}:]; from iaprof.basics.libraries import restrict_libraries as r; r()"
        )
    # What is imported stays, so that looking for garbage among it would be for nothing: it takes a fifth of the time.
    get_ready = f"gc.disable(); {imports}; from {module} import {name}; gc.freeze(); gc.enable()"
    return f"import gc, sys; {get_ready}; {name}(*sys.argv[1:{end}])"
