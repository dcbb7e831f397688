# SPDX-License-Identifier: Apache-2.0
"""Intel's real runtime without a GPU, as a test uses it: build the workload, run it, read its ledger.

    driver = build(folder)                               # a C program, against Debian unstable's Level Zero
    kernels = driver.run("bmg", [driver.spirv / "matmul.spv"], "--launches", 1000, folder=folder)

Modules, GPU addresses, launches and their completion are real; nothing is computed. What the program can do is said in
workload.c, and where the runtime comes from in scripts/test-driver.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from iaprof.bpf.probes.library_file import LibraryFile

HERE = Path(__file__).resolve().parent
ZEBINS = HERE.parent / "data" / "zebin"
LIBRARIES = "usr/lib/x86_64-linux-gnu"  # in the prepared folder

# What NEO calls them, and slices x subslices x EUs. tests/data/zebin/ptl was compiled for the larger Panther Lake.
DEVICES = {"bmg": ("bmg", "5x4x8"), "lnl": ("lnl", "1x8x8"), "ptl": ("ptl-h", "3x4x8"), "pvc": ("pvc", "2x8x8")}

WAYS = ("immediate", "regular", "cooperative", "indirect", "multiple", "parameters", "arguments")

# Stacks are what a profiler is tested with, so frame pointers are kept. The loader is unstable's, whose C library has
# functions that the one beside the compiler lacks.
FRAMES = ("-fno-omit-frame-pointer", "-fno-optimize-sibling-calls")
FLAGS = ("-std=gnu11", "-O1", "-g", *FRAMES, "-Wall", "-Wextra", "-Werror", "-pthread", f"-I{HERE.parent / 'standin'}")
LINK = ("-Wl,--allow-shlib-undefined", "-Wl,--disable-new-dtags", "-Wl,--build-id=sha1")


@dataclass(frozen=True)
class Kernel:
    """A line of the ledger: one kernel of one module as one thread created, launched and destroyed it.

    Addresses are GPU addresses of the first instruction as the runtime gave them: it sign-extends some of them.
    """

    pid: int
    tid: int
    round: int
    module: str  # the file's name
    name: str
    handle: int  # ze_kernel_handle_t: a pointer of that process
    function_pointer: int  # zeModuleGetFunctionPointer
    base_address: int  # zexKernelGetBaseAddress, the driver's extension
    debug_elf: Path  # what zetModuleGetDebugInfo gave
    isa: Path  # what zeKernelGetBinaryExp gave: code and padding
    launches: dict[str, int]  # by way
    ns: dict[str, float]  # that the program's thread spent on a launch, mean, by way


@dataclass(frozen=True)
class Driver:
    """The runtime's folder, the program that was built against it, and which copy of the runtime that finds."""

    folder: Path
    workload: Path
    library: Path  # the runtime itself

    @property
    def build_id(self) -> str:
        """The runtime's, in hexadecimal."""
        with self.library.open("rb") as file:
            return LibraryFile(file).build_id()

    @property
    def spirv(self) -> Path:
        """The folder of matmul.spv and matmul-g.spv, which has debug information."""
        return self.folder / "kernels"

    def environment(self, device: str) -> dict[str, str]:
        """What makes the runtime believe in a GPU, one of DEVICES."""
        return os.environ | without_a_gpu(device, self.library)

    def command(self, modules: Sequence[Path], *options: str | int) -> list[str]:
        """The command line of the workload."""
        return [str(word) for word in (self.workload, *options, *modules)]

    def run(self, device: str, modules: Sequence[Path], *options: str | int, folder: Path) -> list[Kernel]:
        """Run the workload in `folder`, where it leaves its files; gives its ledger, or raises CalledProcessError."""
        return read_ledger(run_workload(self.command(modules, *options), self.environment(device), folder), folder)


def without_a_gpu(device: str, library: Path | str) -> dict[str, str]:
    """Settings with which the runtime, whose Level Zero library this is, believes in a GPU, one of DEVICES."""
    product, hardware = DEVICES[device]
    return {
        "NEOReadDebugKeys": "1",
        "SetCommandStreamReceiver": "1",  # no kernel driver: commands go to where a simulator would read them
        "UseAubStream": "0",
        "UseBindlessMode": "0",
        "ProductFamilyOverride": product,
        "HardwareInfoOverride": hardware,
        "NEO_CACHE_PERSISTENT": "0",  # compile every time, and leave nothing in the user's cache
        "ZE_ENABLE_ALT_DRIVERS": str(library),  # the loader looks in the machine's folders only
    }


def run_workload(command: Sequence[str], environment: Mapping[str, str], folder: Path) -> str:
    """Run a workload in `folder`, where it leaves its files; gives what it prints, or raises CalledProcessError."""
    done = subprocess.run(
        command,
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        timeout=300,
        check=True,
        text=True,
    )
    return done.stdout


def build(folder: Path) -> Driver:
    """Compile the workload into `folder`; where the runtime is not there yet, download it."""
    script = HERE.parents[1] / "scripts" / "test-driver"
    prepared = Path(subprocess.run([script], stdout=subprocess.PIPE, check=True, text=True).stdout.strip())
    workload = compile_workload("workload.c", "libze_loader.so.1", prepared, folder / "workload")
    return Driver(prepared, workload, prepared / LIBRARIES / "libze_intel_gpu.so.1")


def compile_workload(source: str, loader: str, prepared: Path, workload: Path) -> Path:
    """Compile a program of this folder against a loader of the prepared one, with whose C library it runs."""
    libraries = prepared / LIBRARIES
    places = (f"-Wl,-rpath,{libraries}", f"-Wl,--dynamic-linker,{libraries / 'ld-linux-x86-64.so.2'}")
    sources = (f"-I{prepared / 'usr/include'}", str(HERE / source), str(libraries / loader))
    subprocess.run([os.environ.get("CC", "cc"), *FLAGS, *LINK, *places, *sources, "-o", str(workload)], check=True)
    return workload


def of_an_unknown_build(driver: Driver, folder: Path) -> Driver:
    """The same with a copy of the runtime in `folder`, which has a build-id that there never was."""
    known = bytes.fromhex(driver.build_id)
    copy = folder / driver.library.name
    copy.write_bytes(driver.library.read_bytes().replace(known, os.urandom(len(known)), 1))
    return replace(driver, library=copy)


def read_ledger(stdout: str, folder: Path) -> list[Kernel]:
    """What the workload printed, when it ran in `folder`."""
    return [Kernel(**told) for told in read_lines(stdout, folder)]


def read_lines(stdout: str, folder: Path) -> Iterator[dict[str, Any]]:
    """Of each kernel, what a workload says of it: the members of a ledger's Kernel."""
    for line in stdout.splitlines():
        told = json.loads(line)
        told["name"] = told.pop("kernel")
        told["debug_elf"] = folder / told["debug_elf"]
        told["isa"] = folder / told["isa"]
        yield told


def zebin(device: str, module: str) -> Path:
    """A module as Intel's compiler wrote it with -g: `matmul` or `attention` for one of DEVICES."""
    return ZEBINS / device / f"{module}.zebin"
