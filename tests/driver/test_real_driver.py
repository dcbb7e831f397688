# SPDX-License-Identifier: Apache-2.0
"""The workload's ledger: that it can be believed, since recordings will be compared with it."""

import itertools
import subprocess
from collections import Counter, defaultdict
from pathlib import Path

import pytest

from driver.driver import DEVICES, WAYS, Driver, Kernel, zebin
from iaprof.gpu.code import canonical
from iaprof.gpu.intel.zebin import read_zebin

MATMUL = ("multiply_basic", "multiply_local_access", "multiply_local_access_and_tiling")
PROCESSES, THREADS, ROUNDS, LAUNCHES = 2, 3, 2, 5
AT_ONCE = 9  # launches of one call of the multiple form: workload.c


@pytest.fixture(scope="module", params=DEVICES)
def kernels(driver: Driver, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Kernel]:
    """Native modules and SPIR-V, with debug information and without, in two processes with three threads, twice."""
    device = request.param
    modules = [zebin(device, "matmul"), zebin(device, "attention")]
    modules += [driver.spirv / "matmul.spv", driver.spirv / "matmul-g.spv"]
    counts = f"--processes {PROCESSES} --threads {THREADS} --rounds {ROUNDS} --launches {LAUNCHES}".split()
    folder = tmp_path_factory.mktemp(device)
    return driver.run(device, modules, *counts, "--ways", ",".join(WAYS), folder=folder)


def test_each_thread_of_each_process_launches_every_kernel_in_every_way(kernels: list[Kernel]) -> None:
    expected = {("attention.zebin", "attention_scores")}
    expected |= set(itertools.product(["matmul.zebin", "matmul.spv", "matmul-g.spv"], MATMUL))

    by_thread = defaultdict(set)
    for kernel in kernels:
        by_thread[kernel.pid, kernel.round, kernel.tid].add((kernel.module, kernel.name))

    assert len({kernel.pid for kernel in kernels}) == PROCESSES
    threads_of = Counter((pid, a_round) for pid, a_round, _tid in by_thread)
    assert sorted(threads_of.values()) == [THREADS] * PROCESSES * ROUNDS
    assert {a_round for _pid, a_round in threads_of} == set(range(ROUNDS))
    assert all(found == expected for found in by_thread.values())
    assert len(kernels) == len(by_thread) * len(expected)
    each = dict.fromkeys(WAYS, LAUNCHES) | {"multiple": AT_ONCE * LAUNCHES}
    assert all(kernel.launches == each for kernel in kernels)


def test_all_that_the_runtime_says_of_a_kernel_agrees(kernels: list[Kernel]) -> None:
    for kernel in kernels:
        (placed,) = [k for k in read_zebin(kernel.debug_elf.read_bytes()).kernels if k.name == kernel.name]

        assert canonical(kernel.function_pointer) == placed.address
        assert kernel.function_pointer >> 48 in (0, 0xFFFF)
        assert canonical(kernel.base_address) == placed.address
        assert kernel.isa.read_bytes() == placed.code


def test_kernels_that_live_at_the_same_time_do_not_overlap(kernels: list[Kernel]) -> None:
    living = defaultdict(set)
    for kernel in kernels:
        start = canonical(kernel.base_address)
        place = (start, start + kernel.isa.stat().st_size, kernel.module, kernel.name)
        living[kernel.pid, kernel.round].add(place)

    for places in living.values():
        ordered = sorted(places)
        assert len(ordered) == 10, "every thread sees a kernel at the same place"
        for (_, end, *_), (start, *_) in itertools.pairwise(ordered):
            assert end <= start


def test_dwarf_is_in_modules_with_debug_information_only(kernels: list[Kernel]) -> None:
    has_debug = {kernel.module: read_zebin(kernel.debug_elf.read_bytes()).has_debug for kernel in kernels}

    assert has_debug == {"matmul.zebin": True, "attention.zebin": True, "matmul-g.spv": True, "matmul.spv": False}


def test_a_module_that_the_runtime_refuses_is_told(driver: Driver, tmp_path: Path) -> None:
    damaged = tmp_path / "damaged.zebin"
    damaged.write_bytes(zebin("bmg", "matmul").read_bytes()[:100])

    command = driver.command([damaged])
    done = subprocess.run(command, cwd=tmp_path, env=driver.environment("bmg"), capture_output=True, text=True)

    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith("workload: zeModuleCreate(")
