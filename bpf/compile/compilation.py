"""Compiles BPF programs in a child process, so that clang's memory is freed when it ends.

What the child reads becomes part of programs that run in the kernel. So its TMPDIR is a new folder that only root can
enter: bcc unpacks kernel headers there, and in /tmp it would use headers that another user put there. From our
environment the child gets only the name of the headers' folder, which must belong to root.
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

from iaprof.bpf.bytecode import Bytecode, from_text
from iaprof.bpf.compile.child import ANSWER, REQUEST
from iaprof.bpf.compile.compiler import BCC_FOLDERS, Source
from iaprof.bpf.compile.headers import VARIABLE, only_root_changes
from iaprof.bpf.errors import BpfUnavailable
from iaprof.sandbox.worker import Worker

_LOOK_S = 0.05  # between two looks at an interruption
TIMEOUT_S = 60.0  # it takes half a second of CPU, and two where bcc unpacks headers
# Folders for what is private: the first is where disks are, the second is in memory. Not those that TMPDIR may name.
PARENTS = (Path("/var/cache/iaprof"), Path("/var/tmp"), Path("/run"))  # noqa: S108  /var/tmp only if it is root's and sticky
_PATH = "/usr/sbin:/usr/bin:/sbin:/bin"  # bcc may call modprobe and tar


class Interruption(Protocol):
    """Something that may end a wait, such as a signal."""

    def check(self) -> None:
        """Raises an exception if what arrived ends the wait."""


class Compilation:
    """The child process, from its start to its answer."""

    def __init__(
        self,
        source: Source,
        bcc_folders: Sequence[str] = BCC_FOLDERS,
        interpreter: Sequence[str] | None = None,
    ) -> None:
        """Starts it.

        Args:
            source: what to compile.
            bcc_folders: where bcc may be.
            interpreter: a Python and its options, in place of this one.

        Raises:
            BpfUnavailable: there is no room for another process, or for its folder.
        """
        self.cpu_seconds = 0.0  # that it took
        self._deadline = time.monotonic() + TIMEOUT_S
        self._child: Worker | None = None
        self._folder: Path | None = None
        try:
            # Ours, so that it goes away even if the process is killed.
            self._folder = _private_folder()
            request = {"source": json.loads(source.to_text()), "bcc_folders": list(bcc_folders)}
            (self._folder / REQUEST).write_text(json.dumps(request))
            # What it imports is the standard library, this package, and bcc by its path.
            self._child = Worker(
                "iaprof.bpf.compile.child:main",
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
        """What was compiled. To be called once.

        Args:
            interruption: may end the wait.

        Raises:
            BpfUnavailable: what is missing, and how to get it; or the process died or took too long.
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
        while not child.wait(_LOOK_S):
            if interruption is not None:
                interruption.check()
            if time.monotonic() >= self._deadline:
                raise BpfUnavailable(
                    f"compiling the BPF programs took longer than {TIMEOUT_S:g} s: record again when the machine "
                    "is less busy"
                )

    def close(self) -> None:
        """Ends the process, whatever it does."""
        if self._child is not None:
            self._child.close()
            self.cpu_seconds = self._child.cpu_seconds
            self._child = None
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
