# SPDX-License-Identifier: Apache-2.0
"""NVIDIA's runtime as a test without a GPU uses it: build it, start a program, read what was launched and sampled.

    programs = build()
    words = programs.command("load", cubin("kernels"), "launch", "reduce", "A", 1000, 500, "sync")
    environment = os.environ | programs.env(tmp_path / "ledger", faults=["dropped"], injected=library)
    subprocess.run(words, env=environment, check=True)
    (ledger,) = read_ledgers(tmp_path / "ledger")

What the driver does is in cuda.c, what CUPTI does and which faults there are in cupti.c, the program's words in prog.c;
nvml.c is the management library.
Kernels take the time that the program asks for, in real time; so 1000 launches of 500 us make half a second of samples:
1.5e9 / 2**period * multiprocessors a second. Times of a ledger are of CLOCK_MONOTONIC.
"""

import fcntl
import json
import os
import subprocess
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Self

SOURCES = Path(__file__).resolve().parent
CUBINS = SOURCES.parents[1] / "data" / "cubins"
HEADERS = ("abi.h", "shared.h", "runtime.py")
DRIVER = "libcuda.so.1"
CUPTI = "libcupti.so.13"
NVML = "libnvidia-ml.so.1"

SCALE = "_ZN4math5scaleIfEEvPT_PKS1_i"  # the kernels of cubin(...)
REDUCE = "reduce"
PLACES = "ABCD"  # where the program launches from: sites 1 to 4 of the ledger

# As in standin/runtime.py: every frame keeps its frame pointer, and none is left out.
FRAMES = ("-g", "-fno-omit-frame-pointer", "-fno-optimize-sibling-calls", "-fno-shrink-wrap")
COMMON = ("-std=gnu11", "-Wall", "-Wextra", "-Werror", "-pthread", *FRAMES, "-Wl,--build-id=sha1", "-Wl,-z,now")
LIBRARY_FLAGS = (*COMMON, "-O2", "-fPIC", "-shared", "-fvisibility=hidden", "-Wl,-rpath,$ORIGIN")
PROGRAM_FLAGS = (*COMMON, "-O1", "-Wl,-rpath,$ORIGIN")

REASONS = 40
FIRST_REASON = 2  # before it are counts that are no reasons; then each reason has two: all samples, those without issue


@dataclass(frozen=True)
class Programs:
    """The compiled parts, all in one folder."""

    folder: Path

    @property
    def program(self) -> Path:
        """The program that is profiled."""
        return self.folder / "prog"

    @property
    def drainer(self) -> Path:
        """A library to inject, which samples, and prints what it was handed out: drainer.c."""
        return self.folder / "libdrainer.so"

    def command(self, *words: str | float | Path) -> list[str]:
        """The command line of the program; prog.c says which words there are."""
        return [str(self.program), *map(str, words)]

    def env(self, ledger: Path, faults: Collection[str] = (), injected: Path | None = None) -> dict[str, str]:
        """The environment in which a program finds these libraries, and writes `ledger`.PID at its end."""
        environment = {"LD_LIBRARY_PATH": str(self.folder), "STANDIN_CUDA_LEDGER": str(ledger)}
        if faults:
            environment["STANDIN_CUDA_FAULTS"] = ",".join(faults)
        if injected:
            environment["CUDA_INJECTION64_PATH"] = str(injected)
        return environment


def build(folder: Path = SOURCES / "build") -> Programs:
    """Compile what is older than its sources into `folder`; tests that run at the same time do not meet half a file."""
    programs = Programs(folder)
    outputs = (
        (DRIVER, "cuda.c", (*LIBRARY_FLAGS, f"-Wl,-soname,{DRIVER}")),
        (CUPTI, "cupti.c", (*LIBRARY_FLAGS, f"-Wl,-soname,{CUPTI}")),
        (NVML, "nvml.c", (*LIBRARY_FLAGS, f"-Wl,-soname,{NVML}")),
        (programs.program.name, "prog.c", PROGRAM_FLAGS),
        (programs.drainer.name, "drainer.c", LIBRARY_FLAGS),
    )
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for name, source, flags in outputs:
            sources = [SOURCES / source, *(SOURCES / header for header in HEADERS)]
            if _is_old(folder / name, sources):
                _compile(folder / name, flags, sources[0])
    if os.geteuid() == 0:  # tests run through sudo must not lock out the user whose checkout it is
        owner = SOURCES.stat()
        for path in (folder, folder / ".lock", *(folder / name for name, _, _ in outputs)):
            os.chown(path, owner.st_uid, owner.st_gid)
    return programs


def _is_old(output: Path, sources: Sequence[Path]) -> bool:
    return not output.exists() or output.stat().st_mtime_ns <= max(source.stat().st_mtime_ns for source in sources)


def _compile(output: Path, flags: Sequence[str], source: Path) -> None:
    fresh = output.with_name(output.name + ".new")
    subprocess.run([os.environ.get("CC", "cc"), *flags, "-o", str(fresh), str(source), "-ldl"], check=True)
    fresh.rename(output)


def cubin(name: str = "kernels") -> Path:
    """A real cubin with the kernels SCALE and REDUCE: `kernels`, or `kernels-lineinfo` with lines."""
    return CUBINS / f"{name}.sm_90.cubin"


class Execution(NamedTuple):
    """One execution of a kernel."""

    correlation: int  # of the launch, or of the launch of its graph
    kernel: str
    site: int  # of the launch: 1 to 4 for places A to D
    stream: int
    context: int
    device: int
    begin: int  # CLOCK_MONOTONIC, ns
    end: int
    samples: int  # made while it executed, those of `lost` and `unread` included, those dropped not
    graph: int  # 0: of none
    node: int
    told: bool  # by an activity record that made sense


class Row(NamedTuple):
    """Samples of one instruction, in one module of one context, for one reason."""

    kernel: str
    crc: int  # of the cubin
    function: int  # its symbol's index
    pc: int  # from the kernel's begin
    reason: int
    context: int
    module: int
    samples: int


@dataclass(frozen=True)
class Context:
    """What was sampled of one context, in samples: each counts once, whether the scheduler issued meanwhile or not."""

    id: int
    device: int
    period: int  # 2**period cycles; 0 if it was not sampled
    enabled: bool  # at the end
    handed: int  # in rows
    dropped: int  # by the hardware, as told
    nonuser: int  # of kernels that are not the program's, as told
    lost: int  # by full buffers: nobody was told
    full: int  # how often the hardware's buffer was
    calls: int  # of cuptiPCSamplingGetData
    failures: int
    nonsense: int  # answers or rows that made no sense


@dataclass(frozen=True)
class Cubin:
    """A module."""

    module: int
    context: int
    crc: int
    size: int
    unloaded: bool


@dataclass(frozen=True)
class Ledger:
    """All that one process did."""

    pid: int
    written: int  # when; CLOCK_MONOTONIC, ns
    calls: dict[str, int]  # of the driver's functions that callbacks can see
    failed_calls: dict[str, int]
    delivered: int  # activity records
    dropped_records: int
    contexts: list[Context]
    cubins: list[Cubin]
    launches: dict[tuple[str, int], int]  # by kernel and site; each kernel of each launch of a graph counts
    captured: dict[str, int]  # launches into graphs, which executed nothing, by kernel
    executions: list[Execution]
    samples: list[Row]  # handed out
    unread: list[Row]  # made, and not handed out
    lost: list[Row]

    @classmethod
    def read(cls, path: Path) -> Self:
        """The ledger of one process."""
        told = json.loads(path.read_text())
        return cls(
            told["pid"],
            told["written"],
            {name: done for name, (done, _) in told["calls"].items()},
            {name: failed for name, (_, failed) in told["calls"].items() if failed},
            told["records"]["delivered"],
            told["records"]["dropped"],
            [Context(**context) for context in told["contexts"]],
            [Cubin(**cubin) for cubin in told["cubins"]],
            _added(told["launches"]),
            {
                kernel: sum(count for name, count in told["captured"] if name == kernel)
                for kernel, _ in told["captured"]
            },
            [Execution(*execution) for execution in told["executions"]],
            *([Row(*row) for row in told[name]] for name in ("samples", "unread", "lost")),
        )

    def handed(self) -> int:
        """Samples handed out, of all contexts."""
        return sum(context.handed for context in self.contexts)

    def by_kernel(self) -> Counter[str]:
        """Samples handed out, by kernel."""
        counts: Counter[str] = Counter()
        for row in self.samples:
            if is_reason(row.reason):
                counts[row.kernel] += row.samples
        return counts

    def made_by_site(self) -> Counter[tuple[str, int]]:
        """Samples made, by kernel and call site: what was handed out of them is not known by site, as with NVIDIA's."""
        counts: Counter[tuple[str, int]] = Counter()
        for execution in self.executions:
            counts[execution.kernel, execution.site] += execution.samples
        return counts


def _added(launches: Sequence[tuple[str, int, int]]) -> dict[tuple[str, int], int]:
    counts: Counter[tuple[str, int]] = Counter()
    for kernel, site, count in launches:
        counts[kernel, site] += count
    return dict(counts)


def _by_kernel(captured: Sequence[tuple[str, int]]) -> dict[str, int]:
    counts: Counter[str] = Counter()
    for kernel, count in captured:
        counts[kernel] += count
    return dict(counts)


def is_reason(index: int) -> bool:
    """Whether it counts all samples for a reason: their sum is the number of samples."""
    return index >= FIRST_REASON and index % 2 == 0


def read_ledgers(ledger: Path) -> list[Ledger]:
    """Those of all processes that have ended, by pid; a child of a process that used CUDA before the fork has none."""
    paths = [path for path in ledger.parent.glob(f"{ledger.name}.*") if path.suffix[1:].isdigit()]
    return sorted((Ledger.read(path) for path in paths), key=lambda each: each.pid)
