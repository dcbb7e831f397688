# SPDX-License-Identifier: Apache-2.0
"""Copies and fills on Intel's real runtime: the program in copies.c, its ledger, and what the runtime prints.

What the runtime prints of each kernel that it launches is an oracle of its own: the recorder has no part in it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from driver.driver import Driver, compile_workload, run_workload

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
