# SPDX-License-Identifier: Apache-2.0
"""What the preloaded library tells of OpenCL programs is what the workload says."""

from __future__ import annotations

import subprocess
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from driver.copies import Functions
from driver.driver import DEVICES, zebin
from driver.injecting import Recorder, ledger_elfs, run
from driver.opencl import MATMUL, WAYS, Kernel, OpenCL, on_tiles, read_ledger
from iaprof.bpf.probes.library_file import LibraryFile
from iaprof.formats.capture.reader import CaptureReader
from iaprof.gpu.intel.zebin import read_zebin
from iaprof.record.kernels.drivers import built_library
from integration.recording import BARE, IAPROF
from standin.hardware import Hardware

pytestmark = pytest.mark.bpf

TWO_GPUS = {"CreateMultipleRootDevices": "2"}
KINDS = ("launch", "kernel", "mapping", "stack")


def in_debug_elf(kernel: Kernel) -> tuple[int, int]:
    """Address and bytes of its code on the GPU of the work: clGetKernelInfo tells of one GPU only."""
    zebin = read_zebin(kernel.debug_elf.read_bytes())
    (placed,) = [(each.address, len(each.code)) for each in zebin.kernels if each.name == kernel.name]
    return placed


def ledger_launches(kernels: Sequence[Kernel]) -> Counter[tuple[Any, ...]]:
    counted: Counter[tuple[Any, ...]] = Counter()
    for kernel in kernels:
        counted[kernel.pid, kernel.tid, *in_debug_elf(kernel), kernel.name.encode()] += sum(kernel.launches.values())
    return counted


def run_workload(
    opencl: OpenCL,
    recorder: Recorder,
    device: str,
    folder: Path,
    programs: Sequence[Path],
    *options: str | int,
    **settings: str,
) -> list[Kernel]:
    """Run it with the library and these settings of the driver besides."""
    environment = recorder.injection.environment(opencl.environment(device) | settings)
    done = run(opencl.command(programs, *options), environment, folder)
    assert (done.returncode, done.stderr) == (0, "")
    return read_ledger(done.stdout, folder)


@pytest.mark.parametrize("device", DEVICES)
def test_it_tells_what_the_ledger_says(opencl: OpenCL, recorder: Recorder, device: str, tmp_path: Path) -> None:
    """Given threads that launch in every way, and programs that are released while kernels of theirs are in use."""
    counts = ("--threads", 3, "--rounds", 3, "--launches", 5)

    kernels = run_workload(opencl, recorder, device, tmp_path, opencl.programs(device), *counts)

    assert {in_debug_elf(kernel) == (kernel.gpu_address, kernel.isa.stat().st_size) for kernel in kernels} == {True}
    assert {way for kernel in kernels for way in kernel.launches} == set(WAYS)
    assert recorder.launches() == ledger_launches(kernels)
    assert recorder.elfs() == ledger_elfs(kernels)
    assert not recorder.left()


@pytest.mark.parametrize("device", ["bmg", "pvc"])
@pytest.mark.parametrize("gpu", [0, 1])
def test_a_kernel_for_two_gpus_is_told_where_each_has_it(
    opencl: OpenCL, recorder: Recorder, device: str, gpu: int, tmp_path: Path
) -> None:
    """Given a program of one GPU alone, so that the next has its kernels elsewhere there than on the other."""
    programs, options = [zebin(device, "attention"), MATMUL], ("--gpu", gpu, "--threads", 2, "--rounds", 3)

    kernels = run_workload(opencl, recorder, device, tmp_path, programs, *options, "--launches", 5, **TWO_GPUS)

    elsewhere = {kernel.name for kernel in kernels if kernel.gpu_address != in_debug_elf(kernel)[0]}
    assert len(elsewhere) == (3 if gpu else 0)
    assert recorder.launches() == ledger_launches(kernels)
    told, expected = recorder.elfs(), ledger_elfs(kernels)
    assert told >= expected
    assert told.total() == expected.total() + 3, "in each round, the other GPU's of the program that is for both"


@pytest.mark.parametrize("gpu", [0, 1])
def test_programs_that_are_built_for_one_gpu_of_several_are_told(
    opencl: OpenCL, recorder: Recorder, gpu: int, tmp_path: Path
) -> None:
    """The driver has no size for the others' debug ELFs, and gives those that there are at their GPU's place."""
    programs, options = [MATMUL, opencl.driver.spirv / "matmul-g.spv"], ("--gpu", gpu, "--one", 1, "--rounds", 2)

    kernels = run_workload(opencl, recorder, "bmg", tmp_path, programs, *options, **TWO_GPUS)

    assert len(kernels) == 12
    assert recorder.launches() == ledger_launches(kernels)
    assert recorder.elfs() == ledger_elfs(kernels)


def test_programs_that_are_released_by_their_callback_are_told(
    opencl: OpenCL, recorder: Recorder, tmp_path: Path
) -> None:
    kernels = run_workload(opencl, recorder, "bmg", tmp_path, [MATMUL], "--twins", 1, "--rounds", 3)

    assert recorder.launches() == ledger_launches(kernels)
    elfs, expected = recorder.elfs(), ledger_elfs(kernels)
    assert elfs >= expected
    assert elfs.total() == 2 * expected.total()


def test_kernels_that_are_launched_in_turn_stay_known(opencl: OpenCL, recorder: Recorder, tmp_path: Path) -> None:
    """Given more kernels of two GPUs than there are sets in the library, and threads that launch the same ones."""
    source = tmp_path / "many.cl"
    source.write_text("\n".join(f"__kernel void each_{n}(__global int *to) {{ *to = {n}; }}" for n in range(300)))

    kernels = run_workload(
        opencl, recorder, "bmg", tmp_path, [source], "--gpu", 1, "--threads", 3, "--launches", 2, **TWO_GPUS
    )

    assert len(kernels) == 3 * 300
    assert recorder.launches() == ledger_launches(kernels)


def test_a_handle_that_becomes_another_kernel_s_leads_to_that(
    opencl: OpenCL, recorder: Recorder, tmp_path: Path
) -> None:
    """Given kernels of which each is released before the next one is created."""
    source = tmp_path / "many.cl"
    source.write_text("\n".join(f"__kernel void each_{n}(__global int *to) {{ *to = {n}; }}" for n in range(16)))

    kernels = run_workload(opencl, recorder, "bmg", tmp_path, [source], "--gpu", 1, "--brief", 1, **TWO_GPUS)

    assert len(kernels) == len({in_debug_elf(kernel) for kernel in kernels}) == 16
    assert len({kernel.handle for kernel in kernels}) < 16
    assert recorder.launches() == ledger_launches(kernels)
    assert recorder.elfs() >= ledger_elfs(kernels)


@on_tiles
def test_launches_on_tiles_are_told(
    opencl: OpenCL, recorder: Recorder, hierarchy: str, options: tuple[str | int, ...], tmp_path: Path
) -> None:
    """Given a GPU of two tiles, of which programs have sub-devices, or which they see as two GPUs."""
    settings = {"ZE_FLAT_DEVICE_HIERARCHY": hierarchy, "CreateMultipleSubDevices": "2"}

    kernels = run_workload(opencl, recorder, "pvc", tmp_path, [zebin("pvc", "attention"), MATMUL], *options, **settings)

    assert len(kernels) == 4
    assert recorder.launches() == ledger_launches(kernels)
    assert recorder.elfs() == ledger_elfs(kernels)


def test_programs_that_are_linked_are_told(opencl: OpenCL, recorder: Recorder, tmp_path: Path) -> None:
    kernels = run_workload(opencl, recorder, "lnl", tmp_path, [MATMUL], "--link", 1)

    assert len(kernels) == 3
    assert recorder.launches() == ledger_launches(kernels)
    assert recorder.elfs() == ledger_elfs(kernels)


def test_kernels_that_share_memory_are_told(opencl: OpenCL, recorder: Recorder, tmp_path: Path) -> None:
    """Which the layout of NEO 26.27 does not lead to."""
    programs = opencl.programs("bmg")

    kernels = run_workload(opencl, recorder, "bmg", tmp_path, programs, EnableIsaAllocationPool="1")

    assert len(kernels) == 10
    assert recorder.launches() == ledger_launches(kernels)
    assert recorder.elfs() == ledger_elfs(kernels)


@pytest.mark.parametrize("by", ["build-id", "name"])
def test_a_driver_that_is_recorded_in_another_way_is_left_alone(
    opencl: OpenCL, recorder: Recorder, by: str, tmp_path: Path
) -> None:
    with opencl.library.open("rb") as file:
        build_id = LibraryFile(file).build_id()
    skip = recorder.injection.library.with_name("skip")
    skip.write_text(f"{'0' * 40}\n{build_id if by == 'build-id' else opencl.library.name}\n")

    kernels = run_workload(opencl, recorder, "bmg", tmp_path, [MATMUL])
    skip.write_text("")

    assert len(kernels) == 3
    assert not recorder.launches()
    assert not recorder.elfs()


# --- a whole recording


@pytest.mark.parametrize("launches", ["auto", "inject"])
def test_a_command_of_an_unknown_build_is_recorded(opencl: OpenCL, launches: str, tmp_path: Path) -> None:
    """With stacks through the function that was called to the program's; by itself, and where it is asked for."""
    unknown = opencl.of_an_unknown_build(tmp_path)
    words = [*IAPROF, "record", "-o", "capture", *BARE, f"--launches={launches}", "--"]
    with Hardware(tmp_path / "gpu", "bmg") as hardware:
        environment = unknown.environment("bmg") | hardware.env()
        command = [*words, *unknown.command(unknown.programs("bmg"), "--launches", 5)]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    said = "is not known; the command is started as with --launches=inject"
    assert (said in " ".join(done.stderr.split())) == (launches == "auto")
    kernels = read_ledger(done.stdout, tmp_path)
    capture = CaptureReader(tmp_path / "capture")
    rows = {kind: [row for row in capture.table(kind).to_pylist() if row["pid"] == kernels[0].pid] for kind in KINDS}
    # then
    expected: Counter[tuple[Any, ...]] = Counter()
    for kernel in kernels:
        expected[kernel.tid, *in_debug_elf(kernel), kernel.name] += sum(kernel.launches.values())
    assert Counter((row["tid"], row["address"], row["size"], row["name"]) for row in rows["launch"]) == expected
    elfs = {row["digest"]: row["elf"] for row in rows["kernel"] if row["elf"] is not None}
    assert {elfs[row["digest"]] for row in rows["kernel"]} == {kernel.debug_elf.read_bytes() for kernel in kernels}
    (ours,) = (row for row in rows["mapping"] if Path(row["path"]).name == built_library().name)
    called = Functions(built_library(), [ours | {"path": str(built_library())}])
    named = Functions(unknown.workload, rows["mapping"])
    stacks = {row["id"]: row["ips"] for row in rows["stack"]}
    ways = Counter[tuple[str, str]]()
    for row in rows["launch"]:
        ips = stacks[row["stack"]]
        ways[called.at(ips[0]), next(name for ip in ips if (name := named.at(ip)))] += 1
    assert ways == {
        ("clEnqueueNDRangeKernel", "launch"): 2 * 10 * 5,
        ("clEnqueueTask", "launch_task"): 10 * 5,
        ("clEnqueueNDCountKernelINTEL", "launch_count"): 10 * 5,
    }
