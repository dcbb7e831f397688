"""Runs verbs in forks of one process that has imported what takes long, and tells how much memory each took.

`python memory_runs.py`: each line of stdin is JSON, the words of a command line and where its output goes; each line of
stdout is the answer. A process apart: pytest's own memory would count as the verb's.
"""

from __future__ import annotations

import importlib
import json
import os
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
    """What a verb left behind."""

    code: int
    err: str
    peak: int  # bytes


class Runs:
    """The process that runs them; a context manager."""

    def __init__(self, folder: Path) -> None:
        """Starts it; what verbs print goes into files in the folder."""
        self._folder = folder
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | MALLOC_ENVIRONMENT,
            text=True,
        )

    def __enter__(self) -> Self:
        """Nothing more."""
        return self

    def __exit__(self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None) -> None:
        """Ends it."""
        self._process.communicate()

    def run(self, *words: str | Path) -> Run:
        """Runs a verb."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([str(self._folder), *map(str, words)]) + "\n")
        self._process.stdin.flush()
        status, peak = json.loads(self._process.stdout.readline())
        return Run(os.waitstatus_to_exitcode(status), (self._folder / "err").read_text(), peak)


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
        print(json.dumps([status, usage.ru_maxrss << 10]), flush=True)


def _run(folder: Path, words: list[str]) -> NoReturn:
    from iaprof.cli.main import main

    code: object = 70
    try:
        for number, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), number)
        sys.argv = ["iaprof", *words]
        main()
        code = 0
    except SystemExit as ended:
        code = ended.code or 0
    except BaseException:  # noqa: BLE001 (as the interpreter does at its end)
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 1)


if __name__ == "__main__":
    _main()
