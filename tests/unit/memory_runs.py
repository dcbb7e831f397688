"""Runs verbs in forks of one process that has imported the slow modules, and measures each verb's memory.

`python memory_runs.py`: each line of stdin is JSON, a folder for the output and the words of a command line; each line
of stdout is JSON, exit status and memory. This is a separate process, as pytest's own memory would count as the verb's.
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
import subprocess
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import NoReturn, Self

from iaprof.sandbox.memory import MALLOC_ENVIRONMENT


@dataclass(frozen=True)
class Run:
    """The result of a verb."""

    code: int
    err: str
    peak: int  # bytes of resident memory
    cpu_s: float  # seconds of CPU time


class Runs:
    """The process that runs verbs; a context manager."""

    def __init__(self, folder: Path) -> None:
        """Starts the process; verbs' output goes to files in the folder."""
        self._folder = folder
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | MALLOC_ENVIRONMENT,
            text=True,
        )

    def __enter__(self) -> Self:
        """Returns itself."""
        return self

    def __exit__(self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None) -> None:
        """Ends the process."""
        self._process.communicate()

    def run(self, *words: str | Path) -> Run:
        """Runs a verb."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([str(self._folder), *map(str, words)]) + "\n")
        self._process.stdin.flush()
        status, peak, cpu_s = json.loads(self._process.stdout.readline())
        return Run(os.waitstatus_to_exitcode(status), (self._folder / "err").read_text(), peak, cpu_s)


def _main() -> None:
    for name in (
        "cli.main",
        "report.archive",
        "report.merging",
        "report.exporting",
        "report.views.sql",
        "record.capture.finish",
    ):
        importlib.import_module(f"iaprof.{name}")
    importlib.import_module("duckdb")
    for line in sys.stdin:
        folder, *words = json.loads(line)
        child = os.fork()
        if child == 0:
            _run(Path(folder), words)
        _, status, usage = os.wait4(child, 0)
        print(json.dumps([status, usage.ru_maxrss << 10, usage.ru_utime + usage.ru_stime]), flush=True)


def _run(folder: Path, words: list[str]) -> NoReturn:
    from iaprof.cli.main import main

    code: object = 70
    try:
        for number, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), number)
        sys.argv = ["iaprof", *words]
        if words[0] == "flame":
            _record_nothing()
        main()
        code = 0
    except SystemExit as ended:
        code = ended.code or 0
    except BaseException:  # noqa: BLE001 (prints it, like the interpreter)
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 1)


def _record_nothing() -> None:
    """Lets `iaprof flame -- CAPTURE` find a copy of a capture where it has recorded one: recording needs root."""
    from iaprof.cli.verbs import flame

    def copy(capture: Path, command: list[str] | None, duration: float | None, force: bool, quiet: bool) -> int:
        assert command is not None
        shutil.copy(command[0], capture)
        return 0

    flame._recorded = copy
    os.geteuid = lambda: 0


if __name__ == "__main__":
    _main()
