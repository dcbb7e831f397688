# SPDX-License-Identifier: Apache-2.0
"""Recording OpenCL programs on Intel's real runtime: the capture says what the workload's ledger says."""

import subprocess
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from driver.driver import zebin
from driver.opencl import MATMUL, Kernel, OpenCL, on_tiles, read_ledger
from iaprof.formats.capture.reader import CaptureReader
from iaprof.gpu.code import canonical
from iaprof.gpu.intel.zebin import CALLED_FUNCTIONS, read_zebin
from integration.recording import BARE, IAPROF
from standin.hardware import Hardware

pytestmark = pytest.mark.bpf


@dataclass(frozen=True)
class Recording:
    """Of the workload: what it said, and its rows in the capture."""

    kernels: list[Kernel]
    launches: list[dict[str, Any]]
    modules: list[bytes]  # debug ELFs


def record(
    opencl: OpenCL, device: str, folder: Path, programs: list[Path], *options: str | int, **settings: str
) -> Recording:
    """Records the workload in `folder`, with these settings of the driver besides."""
    words = ["record", "-o", "capture", *BARE, "--", *opencl.command(programs, *options)]
    with Hardware(folder / "gpu", device) as hardware:
        # The library is probed before it is mapped: its probes come too late for a short program otherwise.
        environment = opencl.environment(device) | hardware.env() | settings
        environment["LD_LIBRARY_PATH"] = str(opencl.library.parent)
        done = subprocess.run(
            [*IAPROF, *words], cwd=folder, env=environment, capture_output=True, text=True, timeout=300
        )
    assert done.returncode == 0, done.stderr
    kernels = read_ledger(done.stdout, folder)
    launches, modules = (
        [row for row in CaptureReader(folder / "capture").table(kind).to_pylist() if row["pid"] == kernels[0].pid]
        for kind in ("launch", "kernel")
    )
    elfs = {row["digest"]: row["elf"] for row in modules if row["elf"] is not None}
    return Recording(kernels, launches, [elfs[row["digest"]] for row in modules])


def placed(debug_elfs: Iterable[bytes]) -> set[tuple[str, int, bytes, bool]]:
    """Name, address and code of their kernels, and whether there is DWARF."""
    zebins = [read_zebin(elf) for elf in debug_elfs]
    return {(kernel.name, kernel.address, kernel.code, zebin.has_debug) for zebin in zebins for kernel in zebin.kernels}


def test_launches_and_kernels_are_recorded(opencl: OpenCL, tmp_path: Path) -> None:
    # given: programs that are released while kernels of theirs are in use, and built again
    options = ("--threads", 3, "--rounds", 8, "--launches", 5)

    recording = record(opencl, "pvc", tmp_path, opencl.programs("pvc"), *options)

    launched: Counter[tuple[int, int, int, str]] = Counter()
    for kernel in recording.kernels:
        size = kernel.isa.stat().st_size
        launched[kernel.tid, kernel.gpu_address, size, kernel.name] += sum(kernel.launches.values())
    rows = recording.launches
    assert Counter((row["tid"], canonical(row["address"]), row["size"], row["name"]) for row in rows) == launched
    assert placed(recording.modules) == placed(kernel.debug_elf.read_bytes() for kernel in recording.kernels)


def in_debug_elf(kernel: Kernel) -> int:
    """Where it lies on the GPU of the work: of a kernel for several GPUs, clGetKernelInfo tells of the first."""
    (address,) = [
        each.address for each in read_zebin(kernel.debug_elf.read_bytes()).kernels if each.name == kernel.name
    ]
    return address


@pytest.mark.parametrize("device", ["bmg", "pvc"])
def test_a_kernel_for_two_gpus_is_recorded_where_each_has_it(opencl: OpenCL, device: str, tmp_path: Path) -> None:
    # given: a program of the second GPU alone, so that the next has its kernels elsewhere there than on the first
    programs, options = [zebin(device, "attention"), MATMUL], ("--gpu", 1, "--launches", 5)

    recording = record(opencl, device, tmp_path, programs, *options, CreateMultipleRootDevices="2")

    assert sum(kernel.gpu_address != in_debug_elf(kernel) for kernel in recording.kernels) == 3
    places = Counter((row["name"], canonical(row["address"])) for row in recording.launches)
    assert places == {(kernel.name, in_debug_elf(kernel)): 20 for kernel in recording.kernels}
    assert placed(recording.modules) == placed(kernel.debug_elf.read_bytes() for kernel in recording.kernels)


@on_tiles
def test_launches_on_tiles_are_recorded(
    opencl: OpenCL, hierarchy: str, options: tuple[str | int, ...], tmp_path: Path
) -> None:
    # given: a GPU of two tiles, of which programs have sub-devices, or which they see as two GPUs
    programs, settings = [zebin("pvc", "attention"), MATMUL], {"ZE_FLAT_DEVICE_HIERARCHY": hierarchy}

    recording = record(
        opencl, "pvc", tmp_path, programs, *options, "--launches", 5, CreateMultipleSubDevices="2", **settings
    )

    places = Counter((row["name"], canonical(row["address"])) for row in recording.launches)
    assert places == {(kernel.name, kernel.gpu_address): 20 for kernel in recording.kernels}
    assert len(places) == 4
    assert placed(recording.modules) == placed(kernel.debug_elf.read_bytes() for kernel in recording.kernels)


def test_kernels_of_a_large_module_that_are_hardly_launched_are_whole_and_so_are_their_names(
    opencl: OpenCL, tmp_path: Path
) -> None:
    # given kernels whose names begin alike, of a program with more than 2 MB of constant data, which ends at once
    names = [
        "_ZTSN4sycl3_V16detail18RoundedRangeKernelINS0_4itemILi1ELb1EEE_" + "x" * 40 + each for each in ("1", "22")
    ]
    kernels = "\n".join(
        f"__kernel void {name}(__global int *to) {{ to[get_global_id(0)] = table[get_global_id(0)].s0 + {number}; }}"
        for number, name in enumerate(names)
    )
    source = tmp_path / "large.cl"
    # (IGC takes no array of more than 65,532 elements)
    source.write_text(f"__constant ulong8 table[45000] = {{[44999] = (ulong8)(1)}};\n{kernels}\n")

    recording = record(opencl, "bmg", tmp_path, [source], "--launches", 1)

    assert {len(name) > 63 for name in names} == {True} and names[0][:63] == names[1][:63]
    assert min(map(len, recording.modules)) > 2_500_000
    of_driver = placed(kernel.debug_elf.read_bytes() for kernel in recording.kernels)
    assert placed(recording.modules) == {kernel for kernel in of_driver if kernel[0] != CALLED_FUNCTIONS}
    launched: Counter[tuple[int, str]] = Counter()
    for kernel in recording.kernels:
        launched[kernel.gpu_address, kernel.name] += sum(kernel.launches.values())
    assert Counter((canonical(row["address"]), row["name"]) for row in recording.launches) == launched
    assert {name for _, name in launched} == set(names)
    assert max(launched.values()) < 6
