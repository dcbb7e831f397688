# SPDX-License-Identifier: Apache-2.0
"""The OpenCL workload's ledger: that it can be believed, and that the layout that ships leads to what it says."""

import itertools
import subprocess
from collections import Counter, defaultdict
from pathlib import Path

import pytest

from driver.driver import DEVICES, zebin
from driver.opencl import WAYS, Kernel, OpenCL
from iaprof.bpf.driver_layout import Field, Layout, find_layout
from iaprof.gpu.code import canonical
from iaprof.gpu.intel.zebin import read_zebin

MULTIPLY = ("multiply_basic", "multiply_local_access", "multiply_local_access_and_tiling")
THREADS, ROUNDS, LAUNCHES = 3, 2, 5


@pytest.fixture(scope="module")
def layout(opencl: OpenCL) -> Layout:
    """The one that ships for this build."""
    notes = subprocess.run(["readelf", "-n", opencl.library], capture_output=True, check=True, text=True).stdout
    build_id = notes.split("Build ID:")[1].split()[0]
    layout = find_layout(build_id)
    assert layout is not None, f"no layout ships for {build_id}: Debian unstable has another build by now"
    return layout


@pytest.fixture(scope="module", params=DEVICES)
def kernels(opencl: OpenCL, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Kernel]:
    """Source, SPIR-V and native programs in three threads, twice."""
    device = request.param
    counts = f"--threads {THREADS} --rounds {ROUNDS} --launches {LAUNCHES}".split()
    return opencl.run(device, opencl.programs(device), *counts, folder=tmp_path_factory.mktemp(device))


def test_each_thread_launches_every_kernel_in_every_way(kernels: list[Kernel]) -> None:
    expected = {("attention.zebin", "attention_scores")}
    expected |= set(itertools.product(["matmul.cl", "matmul-g.spv", "matmul.zebin"], MULTIPLY))

    by_thread = defaultdict(set)
    for kernel in kernels:
        by_thread[kernel.round, kernel.tid].add((kernel.program, kernel.name))

    assert Counter(a_round for a_round, _tid in by_thread) == dict.fromkeys(range(ROUNDS), THREADS)
    assert all(found == expected for found in by_thread.values())
    assert len(kernels) == len(by_thread) * len(expected)
    assert all(kernel.launches == dict.fromkeys(WAYS, LAUNCHES) for kernel in kernels)


def test_all_that_the_runtime_says_of_a_kernel_agrees(kernels: list[Kernel]) -> None:
    for kernel in kernels:
        (placed,) = [k for k in read_zebin(kernel.debug_elf.read_bytes()).kernels if k.name == kernel.name]

        assert kernel.gpu_address == placed.address
        assert kernel.isa.read_bytes() == placed.code


def test_kernels_that_live_at_the_same_time_do_not_overlap(kernels: list[Kernel]) -> None:
    living = defaultdict(set)
    for kernel in kernels:
        end = kernel.gpu_address + kernel.isa.stat().st_size
        living[kernel.round].add((kernel.gpu_address, end, kernel.program, kernel.name))

    for places in living.values():
        ordered = sorted(places)
        assert len(ordered) == 10, "every thread sees a kernel at the same place"
        for (_, end, *_), (start, *_) in itertools.pairwise(ordered):
            assert end <= start


@pytest.mark.parametrize("device", DEVICES)
def test_a_kernel_s_handle_leads_to_what_the_runtime_says(
    opencl: OpenCL, layout: Layout, device: str, tmp_path: Path
) -> None:
    assert layout.allocation and layout.name
    written = Field((*layout.allocation[0].path[:-1], 0x50))  # where the driver wrote what lies in the allocation
    seen = 0
    with opencl.step(device, tmp_path) as kernels:
        for kernel, memory in kernels:
            isa, handle = kernel.isa.read_bytes(), kernel.handle
            address = sum(memory.follow(handle, field) for field in layout.address)
            start, size = (memory.follow(handle, field) for field in layout.allocation)
            assert layout.module and layout.binary and layout.binary_size
            binary = memory.read(memory.follow(handle, layout.binary), memory.follow(handle, layout.binary_size))
            seen += 1

            assert memory.follow(handle, layout.kernel_class) - memory.start_of(opencl.library) in layout.classes
            assert canonical(address) == kernel.gpu_address
            assert start <= address <= address + len(isa) <= start + size
            assert memory.read(memory.follow(handle, written), len(isa)) == isa
            assert memory.follow(handle, layout.size) == len(isa)
            assert memory.read(memory.follow(handle, layout.code), len(isa)) == isa
            name = memory.read(memory.follow(handle, layout.name), len(kernel.name) + 1)
            assert name == kernel.name.encode() + b"\0"
            assert kernel.name in [each.name for each in read_zebin(binary).kernels]
            if kernel.program.endswith(".zebin"):
                assert binary == zebin(device, kernel.program.removesuffix(".zebin")).read_bytes()
    assert seen == 10


def test_where_kernels_share_memory_the_layout_leads_to_no_address(
    opencl: OpenCL, layout: Layout, tmp_path: Path
) -> None:
    with opencl.step("bmg", tmp_path, EnableIsaAllocationPool="1") as kernels:
        for kernel, memory in kernels:
            with pytest.raises(OSError):
                memory.follow(kernel.handle, layout.address[0])


def test_a_program_that_the_runtime_refuses_is_told(opencl: OpenCL, tmp_path: Path) -> None:
    damaged = tmp_path / "damaged.zebin"
    damaged.write_bytes(b"\x7fELF")

    command, environment = opencl.command([damaged]), opencl.environment("bmg")
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)

    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith(f"opencl: {damaged}: -")
