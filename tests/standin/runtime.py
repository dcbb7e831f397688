# SPDX-License-Identifier: Apache-2.0
"""The stand-in's runtime and the program that uses it, as a test or the demo needs them: built, and how to call them."""

import fcntl
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

SOURCES = Path(__file__).resolve().parent
ZEBIN = SOURCES.parent / "data" / "zebin"
_INPUTS = ("ze.c", "ze_api.h", "probes.d", "protocol.h", "workload.cpp", "runtime.py")
_WARNINGS = ("-Wall", "-Wextra", "-Werror")
# Stacks are walked by frame pointers, and a call in last place must not take its caller's frame away.
_FRAMES = ("-g", "-fno-omit-frame-pointer", "-mno-omit-leaf-frame-pointer", "-fno-optimize-sibling-calls")


@dataclass(frozen=True)
class Programs:
    """The compiled parts."""

    library: Path
    workload: Path


def build(folder: Path = SOURCES / "build") -> Programs:
    """Compile into `folder` what is older than its sources."""
    folder.mkdir(parents=True, exist_ok=True)
    programs = Programs(folder / "libze_intel_gpu.so.1", folder / "workload")
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        newest = max((SOURCES / name).stat().st_mtime_ns for name in _INPUTS)
        if all(path.exists() and path.stat().st_mtime_ns > newest for path in (programs.library, programs.workload)):
            return programs
        probes = SOURCES / "probes.d"
        include = ("-I", str(folder), "-I", str(SOURCES))
        cc, cxx = os.environ.get("CC", "cc"), os.environ.get("CXX", "c++")
        _run("dtrace", "-h", "-s", probes, "-o", folder / "probes.h")
        library = (cc, "-std=gnu11", "-O2", "-fPIC", "-fvisibility=hidden", "-pthread", *_WARNINGS, *_FRAMES, *include)
        _run(*library, "-c", SOURCES / "ze.c", "-o", folder / "ze.o")
        _run("dtrace", "-G", "-s", probes, "-o", folder / "probes.o", folder / "ze.o")
        fresh = folder / "new.so"
        _run(cc, "-shared", "-Wl,-soname,libze_intel_gpu.so.1", "-o", fresh, folder / "ze.o", folder / "probes.o")
        fresh.rename(programs.library)
        program = (cxx, "-std=c++17", "-O1", "-pthread", *_WARNINGS, *_FRAMES, *include)
        fresh = folder / "new"
        _run(*program, SOURCES / "workload.cpp", "-o", fresh, programs.library, "-Wl,-rpath,$ORIGIN")
        fresh.rename(programs.workload)
    return programs


def _run(*command: str | Path) -> None:
    subprocess.run([str(word) for word in command], check=True)


def debug_elf(device: str, module: str) -> Path:
    """A real kernel module as the driver returned it: `matmul` or `attention` for bmg, lnl, pvc or ptl."""
    return ZEBIN / device / f"{module}.debug.elf"


def command(elfs: list[Path], *options: str | int | float, programs: Programs | None = None) -> list[str]:
    """The command line of the workload, with further options as it has them."""
    built = programs or build()
    words = [str(built.workload)]
    for elf in elfs:
        words += ["--elf", str(elf)]
    return [*words, *(str(option) for option in options)]
