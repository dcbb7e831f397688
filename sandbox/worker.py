"""A child process of iaprof's own: how it starts, what it gets, how long it is waited for, and how it ends.

Every process that runs our code for another one is a Worker. Of each of them holds:

- It is a new interpreter, not a fork, with the descriptors and the environment that it is given and no others. Its
  stdin is the channel to this process or /dev/null.
- No variable and no working directory changes what it imports: it finds modules where this process does. A `bare` one
  knows the standard library and the folder with this package only, and runs nothing at its start that is installed.
- It has a session of its own: Ctrl-C is this process's to handle, and what it starts is killed when it has ended.
- Nobody else waits for it, so that its exit status and CPU time are known. A file system in user space can keep even a
  killed process, so whoever waits may say for how long.

What it gives up and may use, it says itself before it looks at anybody's data (privileges.py). What goes through the
channel, the two agree on: `send` and `receive` are for messages with open files; parent.py has calls with a deadline.
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
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from iaprof.sandbox.closing import Closing

ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1"}
"""Environment of a child that gives up privileges: threads of NumPy's would keep what the main thread gives up."""
_PACKAGES = str(Path(__file__).parents[2])  # the folder from which iaprof is imported
_LONGEST_MESSAGE = 1 << 16
_SO_SNDBUFFORCE = 32  # asm-generic/socket.h
_POLL_S = 0.001  # between two looks whether a child has ended
_TICKS = os.sysconf("SC_CLK_TCK")


class Worker(Closing):
    """A child process that runs a function; its `close` kills it."""

    channel: socket.socket  # this process's end, if there is a channel

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
        bare: bool = False,
        python: Sequence[str] | None = None,
    ) -> None:
        """Starts it.

        Args:
            function: "module:function".
            arguments: of the function, which gets them as strings.
            channel: the type of the Unix socket that the child has as descriptor 0; None for none.
            queue_bytes: how much may wait in the channel each way; 0 for the system's default.
            files: descriptors that the child has under the same numbers.
            environment: all of it; None for an empty one.
            folder: the working directory; None for this process's.
            output: the child's stdout.
            errors: its stderr; None for this process's.
            user: whose it is from its first instruction on, without other groups; None for this process's.
            bare: without the module site, which keeps the start short.
            python: the interpreter with its options, in place of `interpreter()`.

        Raises:
            OSError: there is no room for another process.
        """
        self.status: int | None = None  # its exit code, or minus the signal that ended it; None before its end is seen
        self.cpu_seconds = 0.0  # that it and the children it waited for took, once its end is seen
        module, _, name = function.partition(":")
        paths = [_PACKAGES] if bare else [path for path in sys.path if os.path.isabs(path)]
        command = [*(python or interpreter(bare)), "-c", _program(module, name, len(arguments), bare)]
        with contextlib.ExitStack() as pair:
            if channel is not None:
                ours, theirs = map(pair.enter_context, socket.socketpair(socket.AF_UNIX, channel))
                for end in (ours, theirs) if queue_bytes else ():
                    with contextlib.suppress(OSError):  # only root may
                        end.setsockopt(socket.SOL_SOCKET, _SO_SNDBUFFORCE, queue_bytes)
            self._process = subprocess.Popen(
                [*command, *map(str, arguments), *paths],
                stdin=subprocess.DEVNULL if channel is None else theirs.fileno(),
                stdout=output,
                stderr=errors,
                env=environment or {},
                cwd=folder,
                pass_fds=files,
                start_new_session=True,
                user=user,
                group=user,
                extra_groups=None if user is None else (),
            )
            if channel is not None:
                self.channel = socket.socket(fileno=ours.detach())
        self.pid = self._process.pid

    def send(self, request: object, files: Sequence[int] = ()) -> None:
        """Sends JSON as one message of a SOCK_SEQPACKET channel, with open files; OSError where the child is dead."""
        socket.send_fds(self.channel, [json.dumps(request).encode()], files)

    def receive(self) -> tuple[Any, list[int]]:
        """A message of JSON, and the open file that came with it, if any, which the caller closes.

        Raises:
            BlockingIOError, TimeoutError: there is none; which one, and when, depends on the channel's timeout.
            OSError: the child is dead.
        """
        message, files, _, _ = socket.recv_fds(self.channel, _LONGEST_MESSAGE, 1)
        if not message:
            raise ConnectionResetError
        return json.loads(message), files

    def has_ended(self) -> bool:
        """Whether it has; never waits for that. What it started and left behind is killed then."""
        return self._see_end(os.WNOHANG)

    def wait(self, seconds: float | None = None) -> bool:
        """Waits until it ends, or for so long; gives whether it has ended."""
        if seconds is None:
            return self._see_end(0)
        deadline = time.monotonic() + seconds
        while not self.has_ended():
            if time.monotonic() >= deadline:
                return False
            time.sleep(_POLL_S)
        return True

    def _see_end(self, options: int) -> bool:
        if self.status is None:
            try:
                if os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT | options) is None:
                    return False
                with contextlib.suppress(OSError):
                    os.killpg(self.pid, signal.SIGKILL)  # before it is waited for: then the number can be another's
                _, status, usage = os.wait4(self.pid, 0)
            except ChildProcessError:
                self.status = self.status or 0  # something else in this process waited for it, perhaps a signal handler
            else:
                self.status = os.waitstatus_to_exitcode(status)
                self.cpu_seconds = usage.ru_utime + usage.ru_stime
            self._process.returncode = self.status  # Popen is not to wait for it
        return True

    def cpu_seconds_so_far(self) -> float:
        """CPU time that it and the children it waited for have taken, also while it runs."""
        if self.has_ended():
            return self.cpu_seconds
        stat = Path(f"/proc/{self.pid}/stat").read_bytes()
        return sum(map(int, stat[stat.rindex(b")") + 2 :].split()[11:15])) / _TICKS

    def send_signal(self, number: int) -> None:
        """Sends a signal to it and to what it has started, unless it has ended."""
        if not self.has_ended():
            os.killpg(self.pid, number)

    def kill(self) -> None:
        """Kills it and what it has started; does not wait."""
        self.send_signal(signal.SIGKILL)

    def close(self, seconds: float | None = None) -> None:
        """Kills it, and waits until it has ended, or for so long."""
        if hasattr(self, "channel"):
            self.channel.close()
        self.kill()
        self.wait(seconds)


def interpreter(bare: bool = False) -> list[str]:
    """This interpreter, with the options that a Worker starts it with."""
    return [sys.executable, "-I", *(["-S"] if bare else []), *(["-B"] if sys.dont_write_bytecode else [])]


def _program(module: str, name: str, arguments: int, bare: bool) -> str:
    """What the child runs: its arguments are those of the function, then the folders to import from."""
    end = arguments + 1
    imports = f"sys.path += sys.argv[{end}:]" if bare else f"sys.path[:] = sys.argv[{end}:]"
    return f"import sys; {imports}; from {module} import {name}; {name}(*sys.argv[1:{end}])"
