# SPDX-License-Identifier: Apache-2.0
"""Programs of both runtimes do the same, and leave the same files, with and without the preloaded library."""

from __future__ import annotations

import dataclasses
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from driver import driver as level_zero, opencl as of_opencl
from driver.driver import Driver, zebin
from driver.injecting import ALL_WAYS, files_of, run
from driver.opencl import MATMUL, OpenCL
from iaprof.record.kernels.drivers import Injection

pytestmark = pytest.mark.bpf

DIFFERENT = {"pid": 0, "tid": 0, "handle": 0, "ns": {}, "debug_elf": Path(), "isa": Path()}
"""What differs between two runs of a workload: ids, handles, durations, and paths with ids."""


@dataclass(frozen=True)
class Workload:
    """The workload of a runtime."""

    runtime: Driver | OpenCL
    read_ledger: Callable[[str, Path], Sequence[Any]]
    programs: list[Path]  # with three kernels
    more: list[Path]  # programs besides one that the runtime may refuse
    options: tuple[str, ...]

    def told(self, done: subprocess.CompletedProcess[str], folder: Path) -> tuple[object, ...]:
        """Returns what a run did, in an order that does not depend on which thread printed first."""
        kernels = self.read_ledger(done.stdout, folder)
        same = [
            dataclasses.replace(kernel, **{name: each for name, each in DIFFERENT.items() if hasattr(kernel, name)})
            for kernel in kernels
        ]
        return done.returncode, done.stderr, sorted(map(repr, same)), files_of(folder)


@pytest.fixture(params=["level-zero", "opencl"])
def workload(request: pytest.FixtureRequest, driver: Driver, opencl: OpenCL) -> Workload:
    if request.param == "opencl":
        return Workload(opencl, of_opencl.read_ledger, [MATMUL], [MATMUL], ())
    return Workload(driver, level_zero.read_ledger, [zebin("bmg", "matmul")], [], ALL_WAYS)


@pytest.mark.parametrize("damaged", [False, True])
def test_a_program_does_the_same_and_leaves_the_same_files_as_without(
    workload: Workload, damaged: bool, tmp_path: Path
) -> None:
    """Given a workload that ends well, and one whose program the runtime refuses."""
    program = zebin("bmg", "matmul")
    if damaged:
        (tmp_path / "damaged.zebin").write_bytes(program.read_bytes()[:100])
        program = tmp_path / "damaged.zebin"
    options = ("--threads", "2", "--rounds", "2", *workload.options)
    command = workload.runtime.command([program, *workload.more], *options)
    environment = workload.runtime.environment("bmg")
    injection = Injection()
    plain = run(command, environment, tmp_path / "without")

    injected = run(command, injection.environment(environment), tmp_path / "with")

    assert plain.returncode == damaged
    assert bool(plain.stdout) != damaged
    assert workload.told(injected, tmp_path / "with") == workload.told(plain, tmp_path / "without")
    injection.close()


def test_nothing_is_written_while_nobody_records(workload: Workload, tmp_path: Path) -> None:
    injection = Injection()
    environment = injection.environment(workload.runtime.environment("bmg"))

    done = run(workload.runtime.command(workload.programs), environment, tmp_path)

    assert len(workload.read_ledger(done.stdout, tmp_path)) == 3
    assert {path.name for path in injection.library.parent.iterdir()} == {"skip", injection.library.name}
    injection.close()
