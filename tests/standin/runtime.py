# SPDX-License-Identifier: Apache-2.0
"""The stand-in's runtime and the program that is profiled, as a test uses them: build, start, read what was launched.

    words = command([debug_elf("bmg", "matmul")], "--launches", 1000, "--threads", 4)
    done = subprocess.run(words, env=os.environ | {"STANDIN_DIR": str(hardware.folder)}, stdout=PIPE, check=True)
    launches = sum(summary.launches for summary in read_summaries(done.stdout))

What the runtime does is in ze.c, what the program can do in workload.cpp. The GPU that they talk to is hardware.py's.
"""

import fcntl
import json
import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

SOURCES = Path(__file__).resolve().parent
ZEBINS = SOURCES.parent / "data" / "zebin"
LIBRARY = "libze_intel_gpu.so.1"

# Every frame keeps its frame pointer from its first instruction to its last, and no frame is left out: stacks are what
# is tested. -z now, so that the dynamic linker is never between a launch and the runtime.
FRAMES = ("-g", "-fno-omit-frame-pointer", "-fno-optimize-sibling-calls", "-fno-shrink-wrap")
COMMON = ("-Wall", "-Wextra", "-Werror", "-pthread", *FRAMES, "-Wl,--build-id=sha1", "-Wl,-z,now")
LIBRARY_FLAGS = ("-std=gnu11", "-O2", "-fPIC", "-shared", "-fvisibility=hidden", f"-Wl,-soname,{LIBRARY}", *COMMON)
PROGRAM_FLAGS = ("-std=c++17", "-O1", "-mno-omit-leaf-frame-pointer", *COMMON, "-Wl,-rpath,$ORIGIN")


@dataclass(frozen=True)
class Programs:
    """The compiled parts. They find each other: the program looks for the library in its own folder."""

    library: Path
    workload: Path


def build(folder: Path = SOURCES / "build") -> Programs:
    """Compile what is older than its sources into `folder`; tests that run at the same time do not meet half a file."""
    programs = Programs(folder / LIBRARY, folder / "workload")
    probes = (folder / "probes.h", folder / "probes.o")
    sources = [SOURCES / name for name in ("ze.c", "ze_api.h", "protocol.h", "probes.d", "runtime.py")]
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if _is_old(programs.library, sources):
            for option, output in zip(("-h", "-G"), probes, strict=True):
                # dtrace leaves its temporary files where it is started
                command = ["dtrace", option, "-s", str(SOURCES / "probes.d"), "-o", str(output)]
                subprocess.run(command, cwd=folder, check=True)
            _compile("CC", "cc", programs.library, LIBRARY_FLAGS, [SOURCES / "ze.c", probes[1]])
        if _is_old(programs.workload, [SOURCES / "workload.cpp", *sources]):
            _compile("CXX", "c++", programs.workload, PROGRAM_FLAGS, [SOURCES / "workload.cpp", programs.library])
    if os.geteuid() == 0:  # tests run through sudo must not lock out the user whose checkout it is
        owner = SOURCES.stat()
        for path in (folder, folder / ".lock", *probes, programs.library, programs.workload):
            if path.stat().st_uid != owner.st_uid:  # otherwise it is changed, and names of it are read anew
                os.chown(path, owner.st_uid, owner.st_gid)
    return programs


def _is_old(output: Path, sources: Sequence[Path]) -> bool:
    return not output.exists() or output.stat().st_mtime_ns <= max(source.stat().st_mtime_ns for source in sources)


def _compile(variable: str, compiler: str, output: Path, flags: Sequence[str], inputs: Sequence[Path]) -> None:
    fresh = output.with_name(output.name + ".new")
    includes = (f"-I{output.parent}", f"-I{SOURCES}")
    command = [os.environ.get(variable, compiler), *flags, *includes, "-o", str(fresh), *map(str, inputs)]
    subprocess.run(command, check=True)
    fresh.rename(output)


def debug_elf(device: str, module: str) -> Path:
    """A real module as Intel's driver returned it: `matmul` or `attention` for bmg, lnl, ptl or pvc."""
    return ZEBINS / device / f"{module}.debug.elf"


def command(elfs: Sequence[Path], *options: str | float, programs: Programs | None = None) -> list[str]:
    """The command line of the program; workload.cpp says which options there are."""
    words = [str((programs or build()).workload)]
    for elf in elfs:
        words += ["--elf", str(elf)]
    return words + [str(option) for option in options]


@dataclass(frozen=True)
class Summary:
    """What one process of the program did."""

    pid: int
    launches: int
    modules: int  # how many were created, those created again included
    seconds: float  # of launching
    gpu: str  # "done": it executed everything; "none": none was looked for; "lost"
    kernels: dict[str, int]  # launches by name
    ns_per_launch: int | None  # mean, of a thread that launched as fast as possible


def read_summaries(stdout: str) -> list[Summary]:
    """What the program printed; a line per process."""
    summaries = []
    for line in stdout.splitlines():
        told = json.loads(line)
        summaries.append(
            Summary(
                told["pid"],
                told["launches"],
                told["modules"],
                told["seconds"],
                told["gpu"],
                told["kernels"],
                told.get("ns_per_launch"),
            )
        )
    return summaries
