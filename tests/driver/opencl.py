# SPDX-License-Identifier: Apache-2.0
"""Intel's real OpenCL runtime without a GPU, as a test uses it: the same as driver.py for the program in opencl.c.

opencl = build(driver, folder)
kernels = opencl.run("bmg", [MATMUL], "--launches", 1000, folder=folder)
"""

from __future__ import annotations

import os
import struct
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from driver.driver import LIBRARIES, ZEBINS, Driver, compile_workload, read_lines, run_workload, zebin
from iaprof.bpf.driver_layout import Field
from iaprof.bpf.probes.library_file import LibraryFile

MATMUL = ZEBINS / "src" / "matmul.cl"
WAYS = ("in-order", "out-of-order", "task", "count")
on_tiles = pytest.mark.parametrize(
    ("hierarchy", "options"),
    [
        ("COMPOSITE", ("--parts", 1)),
        ("COMPOSITE", ("--parts", 1, "--gpu", 1)),
        ("COMPOSITE", ()),
        ("FLAT", ("--gpu", 1)),
    ],
    ids=["first", "second", "whole", "flat"],
)
"""How programs see a GPU of two tiles (ZE_FLAT_DEVICE_HIERARCHY), and the workload's options that choose a tile."""


@dataclass(frozen=True)
class Kernel:
    """A line of the ledger: one kernel of one program as one thread created, launched and released it."""

    pid: int
    tid: int
    round: int
    program: str  # the file's name
    name: str
    handle: int  # cl_kernel: a pointer of that process
    gpu_address: int  # of its first instruction: CL_KERNEL_BINARY_GPU_ADDRESS_INTEL, 48 bits
    debug_elf: Path  # CL_PROGRAM_DEBUG_INFO_INTEL
    isa: Path  # CL_KERNEL_BINARY_PROGRAM_INTEL: code and padding
    launches: dict[str, int]  # by way


class Memory:
    """A process's."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._fd = os.open(f"/proc/{pid}/mem", os.O_RDONLY)

    def close(self) -> None:
        os.close(self._fd)

    def read(self, address: int, size: int) -> bytes:
        """What is there, or OSError."""
        return os.pread(self._fd, size, address)

    def follow(self, handle: int, field: Field) -> int:
        """The field of a kernel, or OSError where a pointer leads nowhere."""
        *before, last = field.path
        for offset in before:
            (handle,) = struct.unpack("<Q", self.read(handle + offset, 8))
        return int.from_bytes(self.read(handle + last, field.bits // 8), "little")

    def start_of(self, library: Path) -> int:
        """Where its virtual address 0 is."""
        lines = Path(f"/proc/{self._pid}/maps").read_text().splitlines()
        return min(int(line.split("-")[0], 16) for line in lines if line.endswith(str(library.resolve())))


def opencl_without_a_gpu(library: Path | str) -> dict[str, str]:
    """The settings that OpenCL's runtime, this library, needs besides those of `driver.without_a_gpu`."""
    return {
        "EnableTimestampWaitForQueues": "0",  # nobody writes time stamps: clFinish would wait for them for ever
        "OCL_ICD_VENDORS": str(library),
    }


@dataclass(frozen=True)
class OpenCL:
    """The runtime and the program that was built against its loader."""

    driver: Driver
    workload: Path
    library: Path  # the runtime itself

    def environment(self, device: str) -> dict[str, str]:
        """What makes the runtime believe in a GPU, one of driver.DEVICES."""
        return self.driver.environment(device) | opencl_without_a_gpu(self.library)

    def programs(self, device: str) -> list[Path]:
        """Ten kernels: source, SPIR-V and native ones."""
        return [MATMUL, self.driver.spirv / "matmul-g.spv", zebin(device, "matmul"), zebin(device, "attention")]

    def command(self, programs: Sequence[Path], *options: str | int) -> list[str]:
        """The command line of the workload."""
        return [str(word) for word in (self.workload, *options, *programs)]

    def of_an_unknown_build(self, folder: Path) -> OpenCL:
        """The same with a copy of the runtime in `folder`, which has a build-id that there never was."""
        original = self.library.read_bytes()
        with self.library.open("rb") as file:
            known = bytes.fromhex(LibraryFile(file).build_id())
        copy = folder / self.library.name
        copy.write_bytes(original.replace(known, os.urandom(len(known)), 1))
        return replace(self, library=copy)

    def run(self, device: str, programs: Sequence[Path], *options: str | int, folder: Path) -> list[Kernel]:
        """Run the workload in `folder`, where it leaves its files; gives its ledger, or raises CalledProcessError."""
        return read_ledger(run_workload(self.command(programs, *options), self.environment(device), folder), folder)

    @contextmanager
    def step(self, device: str, folder: Path, **settings: str) -> Iterator[Iterator[tuple[Kernel, Memory]]]:
        """Run the workload as `run` does; gives each kernel while it is there, with the memory that it lies in."""
        command = self.command(self.programs(device), "--step")
        environment = self.environment(device) | settings
        with subprocess.Popen(
            command, cwd=folder, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as process:
            yield self._steps(process, folder)
        assert process.returncode == 0

    def _steps(self, process: subprocess.Popen[str], folder: Path) -> Iterator[tuple[Kernel, Memory]]:
        assert process.stdin and process.stdout
        memory = Memory(process.pid)
        for line in process.stdout:
            yield read_ledger(line, folder)[0], memory
            process.stdin.write("\n")
            process.stdin.flush()
        memory.close()


def build(driver: Driver, folder: Path) -> OpenCL:
    """Compile the workload into `folder`."""
    workload = compile_workload("opencl.c", "libOpenCL.so.1", driver.folder, folder / "opencl")
    return OpenCL(driver, workload, driver.folder / LIBRARIES / "intel-opencl/libigdrcl.so")


def read_ledger(stdout: str, folder: Path) -> list[Kernel]:
    """What the workload printed, when it ran in `folder`."""
    return [Kernel(**told) for told in read_lines(stdout, folder)]
