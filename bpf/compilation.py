"""Compiles BPF programs in a child process, so that clang's memory is freed when it ends.

What the child reads becomes part of programs that run in the kernel. So its TMPDIR is a new folder that only root can
enter: bcc unpacks kernel headers there, and in /tmp it would use headers that another user put there. From our
environment the child gets only the name of the headers' folder, which must belong to root.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from iaprof.bpf.bytecode import Bytecode, from_text
from iaprof.bpf.compile_child import ANSWER, REQUEST
from iaprof.bpf.compiler import BCC_FOLDERS, Source
from iaprof.bpf.errors import BpfUnavailable
from iaprof.bpf.headers import VARIABLE, only_root_changes

TIMEOUT_S = 60.0  # it takes half a second of CPU, and two where bcc unpacks headers
# Folders for what is private: the first is where disks are, the second is in memory. Not those that TMPDIR may name.
PARENTS = (Path("/var/cache/iaprof"), Path("/var/tmp"), Path("/run"))  # noqa: S108  /var/tmp only if it is root's and sticky
_PACKAGES = str(Path(__file__).parents[2])
_CHILD = "import sys; sys.path.append(sys.argv.pop()); from iaprof.bpf.compile_child import main; main()"
_PATH = "/usr/sbin:/usr/bin:/sbin:/bin"  # bcc may call modprobe and tar


class Interruption(Protocol):
    """Something that may end a wait, such as a signal."""

    def fileno(self) -> int:
        """A descriptor that is readable when something arrived."""

    def clear(self) -> None:
        """Makes `fileno` unreadable again."""

    def check(self) -> None:
        """Raises an exception if what arrived ends the wait."""


class Compilation:
    """The child process, from its start to its answer."""

    def __init__(
        self,
        source: Source,
        bcc_folders: Sequence[str] = BCC_FOLDERS,
        # An interpreter that looks at no environment, no folder of the user's and no site-packages: what it imports is
        # the standard library, this package, and bcc by its path.
        interpreter: Sequence[str] = (sys.executable, "-I", "-S"),
    ) -> None:
        """Starts it.

        Args:
            source: what to compile.
            bcc_folders: where bcc may be.
            interpreter: a Python and its options.

        Raises:
            BpfUnavailable: there is no room for another process, or for its folder.
        """
        self.cpu_seconds = 0.0  # that it took
        self._deadline = time.monotonic() + TIMEOUT_S
        self._child: subprocess.Popen[bytes] | None = None
        self._folder: Path | None = None
        try:
            # Ours, so that it goes away even if the process is killed.
            self._folder = _private_folder()
            request = {"source": json.loads(source.to_text()), "bcc_folders": list(bcc_folders)}
            (self._folder / REQUEST).write_text(json.dumps(request))
            self._child = subprocess.Popen(
                [*interpreter, "-c", _CHILD, str(self._folder), _PACKAGES],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd="/",
                env=self._environment(self._folder),
                start_new_session=True,  # Ctrl-C is the recorder's business
            )
        except OSError as error:
            self.close()
            raise BpfUnavailable(f"the process that compiles BPF cannot be started: {error.strerror}") from error

    @staticmethod
    def _environment(private: Path) -> dict[str, str]:
        kept = {VARIABLE: os.environ[VARIABLE]} if os.environ.get(VARIABLE) else {}
        return kept | {"PATH": _PATH, "HOME": str(private), "TMPDIR": str(private)}

    def wait(self, interruption: Interruption | None = None) -> Bytecode:
        """What was compiled. To be called once.

        Args:
            interruption: may end the wait.

        Raises:
            BpfUnavailable: what is missing, and how to get it; or the process died or took too long.
        """
        try:
            self._wait_for_end(interruption)
            end = self._reap()
            assert self._folder is not None
            try:
                answer = json.loads((self._folder / ANSWER).read_text())
            except (OSError, ValueError):
                raise BpfUnavailable(
                    f"the process that compiles BPF died ({end}): make sure that it gets 200 MB of memory"
                ) from None
        finally:
            self.close()
        if "error" in answer:
            raise BpfUnavailable(answer["error"])
        return from_text(answer["bytecode"])

    def _wait_for_end(self, interruption: Interruption | None) -> None:
        assert self._child is not None
        ended = os.pidfd_open(self._child.pid)
        try:
            poll = select.poll()
            poll.register(ended, select.POLLIN)
            if interruption is not None:
                poll.register(interruption.fileno(), select.POLLIN)
            while True:
                ready = [fd for fd, _ in poll.poll(max(0.0, self._deadline - time.monotonic()) * 1000)]
                if interruption is not None:
                    interruption.clear()
                    interruption.check()
                if ended in ready:
                    return
                if not ready:
                    raise BpfUnavailable(
                        f"compiling the BPF programs took longer than {TIMEOUT_S:g} s: record again when the machine "
                        "is less busy"
                    )
        finally:
            os.close(ended)

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
        if self._child is not None:
            os.kill(self._child.pid, signal.SIGKILL)  # Popen.kill would reap it, and its CPU time with it
            self._reap()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None


def _private_folder() -> Path:
    """A new folder of root's, where nobody else can put anything, not even by renaming a folder above.

    Raises:
        OSError: there is no place for one.
    """
    refusal: OSError = FileNotFoundError(2, f"none of {', '.join(map(str, PARENTS))} is only root's")
    for parent in PARENTS:
        with contextlib.suppress(OSError):
            path = Path(tempfile.mkdtemp(prefix="compile-bpf-", dir=parent))
            if only_root_changes(path):
                return path
            path.rmdir()
    raise refusal
