# SPDX-License-Identifier: Apache-2.0
"""Copies and fills on Intel's real runtime: the program in copies.c, its ledger, and what the runtime prints.

What the runtime prints of each kernel that it launches is an oracle of its own: the recorder has no part in it.
"""

from __future__ import annotations

import json
import re
import subprocess
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from driver.driver import Driver, compile_workload, run_workload
from iaprof.formats.capture.reader import CaptureReader
from iaprof.record.kernels.drivers import built_library

PRINTS_KERNELS = {"PrintKernelDispatchParameters": "1"}
_KERNEL = re.compile(r"kernel, (\w+), grfCount")


@dataclass(frozen=True)
class Copies:
    """A line of the ledger: calls of one function on one command list, all from one function of the program."""

    pid: int
    list: str  # regular, immediate, or engine
    way: str  # the program's function
    function: str  # that it calls
    calls: int
    bytes: int | None  # of one call
    ns: float  # of one call, mean
    kernels: tuple[str, ...]  # that the runtime launched in all these calls, in order


def build(driver: Driver, folder: Path) -> Path:
    """Compile the program into `folder`."""
    return compile_workload("copies.c", "libze_loader.so.1", driver.folder, folder / "copies")


def places(driver: Driver, program: Path, folder: Path) -> dict[str, int]:
    """The addresses in the runtime's file of its functions that copy and fill, as its tables and it itself say."""
    words = [str(program), "--places", "1"]
    found: dict[str, int] = json.loads(run_workload(words, driver.environment("bmg"), folder))
    return found


def injected_library(capture: CaptureReader, pid: int) -> dict[str, Any]:
    """What the header says of the injected library that a process had mapped: other tests' programs have others."""
    mapped = {
        row["path"]
        for row in capture.table("mapping").to_pylist()
        if row["pid"] == pid and Path(row["path"]).name == built_library().name
    }
    (found,) = (each for each in capture.header["libraries"] if each["path"] in mapped)
    assert found["way"] == "inject"
    library: dict[str, Any] = found
    return library


def read_copies(stdout: str) -> list[Copies]:
    """What the program and the runtime printed."""
    return list(_read(stdout))


def _read(stdout: str) -> Iterator[Copies]:
    kernels: list[str] = []
    for line in stdout.splitlines():
        if found := _KERNEL.match(line):
            kernels.append(found[1])
        else:
            told = json.loads(line)
            size = told["bytes"] if told["bytes"] >= 0 else None
            yield Copies(**(told | {"bytes": size}), kernels=tuple(kernels))
            kernels.clear()


class Functions:
    """A program's functions, by binutils, at the addresses where a process has them."""

    def __init__(self, binary: Path, mappings: list[dict[str, Any]]) -> None:
        words = ["nm", "--defined-only", "--numeric-sort", str(binary)]
        lines = subprocess.run(words, capture_output=True, text=True, check=True).stdout.splitlines()
        known = [(int(line.split()[0], 16), line.split()[2]) for line in lines if line.split()[1] in "tT"]
        self._starts, self._names = [start for start, _ in known], [name for _, name in known]
        (self._mapping,) = (row for row in mappings if row["path"] == str(binary))

    def at(self, ip: int) -> str:
        """The function at an address of the program's code; empty for any other."""
        offset = ip - self._mapping["start"]
        if not 0 <= offset < self._mapping["length"]:
            return ""
        # In these programs code lies where it has its offset in the file.
        return self._names[bisect_right(self._starts, offset + self._mapping["offset"]) - 1]
