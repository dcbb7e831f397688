"""One recording of programs that are, or say that they are, Python: each begins when the recorder knows that.

with Recording(folder) as recording:
    pid = recording.run([python, "program.py", ..., go], go)
frames_of(recording.reader, pid)
"""

from __future__ import annotations

import os
import subprocess
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from iaprof.formats.capture.reader import CaptureReader
from iaprof.record.spool import FrameKind
from integration.recording import ended, environment, has_met, spooled, start
from pythons.interpreters import HERE
from standin import runtime
from standin.hardware import Hardware
from waiting import LONGEST_WAIT_S, until

PROGRAMS = HERE / "programs"


class Recording:
    """A recorder of the whole machine; a context manager, which ends it."""

    def __init__(self, folder: Path) -> None:
        """Args: for its files."""
        self.folder, self.capture = folder, folder / "cap.parquet"
        self.hardware = Hardware(folder / "gpu", "bmg")

    def __enter__(self) -> Self:
        self.hardware.__enter__()
        self._recorder = start(self.hardware, self.capture)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            if kind is None:
                ended(self._recorder)
        finally:
            _kill(self._recorder)
            self.hardware.__exit__(kind, error, at)

    def started(self, program: list[str]) -> subprocess.Popen[bytes]:
        """A program, with the stand-in's hardware."""
        return subprocess.Popen(program, env=os.environ | environment(self.hardware))

    def run(self, program: list[str], *goes: Path) -> int:
        """Runs a program, and gives its process's number; see `wait`."""
        return self.wait(self.started(program), *goes)

    def wait(self, program: subprocess.Popen[bytes], *goes: Path) -> int:
        """Waits for a program, and gives its process's number.

        Args:
            program: that is running.
            goes: files that it waits for: for each, until the recorder has probed the driver and knows one more
                interpreter in it.
        """
        try:
            for number, go in enumerate(goes, 1):
                self.let_go(program, go, number)
            assert program.wait(LONGEST_WAIT_S) == 0
        finally:
            _kill(program)
        return program.pid

    def let_go(self, program: subprocess.Popen[bytes], go: Path, number: int = 1) -> None:
        """Makes a file once the recorder has probed the driver and knows that many interpreters in a program."""

        def known() -> bool:
            is_known = self._known(program.pid) >= number and has_met(self.capture, runtime.build().library)
            return is_known or program.poll() is not None

        until(known, self._recorder)
        assert program.poll() is None
        go.touch()

    def _known(self, pid: int) -> int:
        """Interpreters of a process."""
        return sum(told["pid"] == pid for told in spooled(self.capture, FrameKind.INTERPRETER))

    @cached_property
    def reader(self) -> CaptureReader:
        """Of the capture, when all is over."""
        return CaptureReader(self.capture)


def _kill(process: subprocess.Popen[Any]) -> None:
    """Ends what a test that failed left."""
    if process.poll() is None:
        process.kill()
        process.wait()


def arguments(folder: Path, told: Path) -> list[str]:
    """Of programs that launch as launching.py does: what for, and the file to tell it."""
    library, linked = folder / "libcalls.so", runtime.build().library
    if not library.exists():
        words = ("cc", *runtime.COMMON, "-O2", "-fPIC", "-shared", f"-I{runtime.SOURCES}")
        source = PROGRAMS / "launching_calls.c"
        subprocess.run([*words, source, linked, f"-Wl,-rpath,{linked.parent}", "-o", library], check=True)
    return [str(word) for word in (library, runtime.debug_elf("bmg", "matmul"), "multiply_basic", told)]
