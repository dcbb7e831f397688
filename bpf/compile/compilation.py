"""Compiles BPF programs in a child process, which frees clang's memory when it ends.

Files that the child reads become part of programs that run in the kernel. Its TMPDIR is therefore a new folder that
only root can enter: bcc unpacks kernel headers there, and would use headers that another user had put into /tmp. Of
this process's environment, the child gets only the name of the headers' folder, which must belong to root.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from iaprof.basics.files import only_root_can_change
from iaprof.bpf.bytecode import BpfUnavailable, Bytecode, from_text
from iaprof.bpf.compile.compiler import ANSWER, BCC_FOLDERS, REQUEST, Source
from iaprof.bpf.compile.headers import VARIABLE
from iaprof.sandbox.worker import Worker

_POLL_S = 0.05  # between two checks of an interruption
TIMEOUT_S = 60.0  # compiling takes half a second of CPU time, and two seconds if bcc unpacks headers
# Parents of the private folder, the first usable one is taken. TMPDIR is ignored, as it may name anybody's folder.
PARENTS = (Path("/var/cache/iaprof"), Path("/var/tmp"), Path("/run"))  # noqa: S108  /var/tmp only if it is root's and sticky
_PATH = "/usr/sbin:/usr/bin:/sbin:/bin"  # bcc may call modprobe and tar


class Interruption(Protocol):
    """Something that can end a wait, such as a signal."""

    def check(self) -> None:
        """Raises an exception if the wait should end."""


class Compilation:
    """A compilation in a child process, from the child's start to its result."""

    def __init__(
        self,
        source: Source,
        bcc_folders: Sequence[str] = BCC_FOLDERS,
        interpreter: Sequence[str] | None = None,
    ) -> None:
        """Starts the child process.

        Args:
            source: what to compile.
            bcc_folders: folders in which bcc may be.
            interpreter: the Python interpreter and its options; None for this process's.

        Raises:
            BpfUnavailable: the process or its folder could not be created.
        """
        self.cpu_seconds = 0.0  # CPU time of the child
        self._deadline = time.monotonic() + TIMEOUT_S
        self._child: Worker | None = None
        self._folder: Path | None = None
        try:
            # This process creates the folder, to remove it even if the child is killed.
            self._folder = _private_folder()
            request = {"source": json.loads(source.to_text()), "bcc_folders": list(bcc_folders)}
            (self._folder / REQUEST).write_text(json.dumps(request))
            # `bare`, as the child imports only the standard library, this package, and bcc by its path.
            self._child = Worker(
                "iaprof.bpf.compile.compiler:main",
                self._folder,
                environment=self._environment(self._folder),
                folder="/",
                bare=True,
                python=interpreter,
            )
        except OSError as error:
            self.close()
            raise BpfUnavailable(f"the process that compiles BPF cannot be started: {error.strerror}") from error

    @staticmethod
    def _environment(private: Path) -> dict[str, str]:
        kept = {VARIABLE: os.environ[VARIABLE]} if os.environ.get(VARIABLE) else {}
        return kept | {"PATH": _PATH, "HOME": str(private), "TMPDIR": str(private)}

    def wait(self, interruption: Interruption | None = None) -> Bytecode:
        """Waits for the compiled programs and returns them; may be called only once.

        Args:
            interruption: its `check` may raise an exception to end the wait.

        Raises:
            BpfUnavailable: something is missing (the text says how to get it), or the child died or took too long.
        """
        try:
            assert self._child is not None and self._folder is not None
            self._wait_for_end(self._child, interruption)
            code = self._child.status or 0
            end = signal.Signals(-code).name if code < 0 else f"exit status {code}"
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

    def _wait_for_end(self, child: Worker, interruption: Interruption | None) -> None:
        while not child.wait(_POLL_S):
            if interruption is not None:
                interruption.check()
            if time.monotonic() >= self._deadline:
                raise BpfUnavailable(
                    f"compiling the BPF programs took longer than {TIMEOUT_S:g} s: record again when the machine "
                    "is less busy"
                )

    def close(self) -> None:
        """Kills the child if it still runs, and removes its folder."""
        if self._child is not None:
            self._child.close()
            self.cpu_seconds = self._child.cpu_seconds
            self._child = None
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None


def _private_folder() -> Path:
    """Creates a folder of root's to which nobody else can add files, not even by renaming a folder above it.

    Raises:
        OSError: none of PARENTS is suitable.
    """
    refusal: OSError = FileNotFoundError(2, f"none of {', '.join(map(str, PARENTS))} is only root's")
    for parent in PARENTS:
        with contextlib.suppress(OSError):
            path = Path(tempfile.mkdtemp(prefix="compile-bpf-", dir=parent))
            if only_root_can_change(path):
                return path
            path.rmdir()
    raise refusal
