# SPDX-License-Identifier: Apache-2.0
"""Recording the workload on Intel's real runtime, while the stand-in's hardware executes where that placed the kernels.

What is compared with what: the workload's own ledger says which kernels were launched, from which call path, how often,
and what the runtime says of each; the stand-in's ledger says which stalls there were at which address.
"""

from __future__ import annotations

import re
import subprocess
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from driver.driver import WAYS, Driver, Kernel, read_ledger, zebin
from iaprof.formats.capture.reader import CaptureReader
from iaprof.gpu.code import canonical
from iaprof.gpu.intel.zebin import read_zebin
from integration.recording import BARE, IAPROF
from standin.hardware import Hardware, Ledger
from waiting import until

EACH_WAY = ("--ways", ",".join(WAYS), "--one-way")
# All processes have their kernels at the same addresses: in whose name one executes, nobody can know.
_REPORT = ("--frames=cpu,function,line,reason,offset", "--split-ambiguous")
_MARKS = re.compile(r"( \[code [0-9a-f]+\])?_\[[gG]\]$")  # of GPU frames; the code tells kernels of one name apart
_LINE = re.compile(r"(\S+ )?line \d+")  # a frame
# A row of `readelf --debug-dump=decodedline`: file, line ("-" where a sequence ends), address.
_ROW = re.compile(r"^(\S+)\s+(\d+|-)\s+0x([0-9a-f]+)", re.MULTILINE)

Launches = Counter[tuple[int, int, int, int, str]]
"""How often, by process, thread, address, bytes and name of the kernel."""
Stalls = Counter[tuple[str, str, str, str, int]]
"""How many, by the program's call path, kernel, file and line, reason, offset."""


@dataclass(frozen=True)
class Recording:
    """A capture of the workload, what was said meanwhile, and the truth."""

    capture: Path
    said: str  # on stderr
    kernels: list[Kernel]
    ledger: Ledger


def modules(driver: Driver, device: str) -> list[Path]:
    """Seven kernels, one for each way: native modules with debug information, SPIR-V without.

    What the runtime's compiler makes of SPIR-V with -g has lines in one process and none in the next, and of processes
    with kernels at the same addresses nobody can tell whose stalls they are.
    """
    return [zebin(device, "matmul"), zebin(device, "attention"), driver.spirv / "matmul.spv"]


def record(driver: Driver, device: str, folder: Path, way: str, command: Sequence[str]) -> Recording:
    """Records a command of `driver` to its end, in `folder`; it has to work."""
    with Hardware(folder / "gpu", device) as hardware:
        done = run_recorder(folder, driver.environment(device) | hardware.env(), way, command)
    return Recording(folder / "capture", done.stderr, read_ledger(done.stdout, folder), hardware.ledger())


def record_running(driver: Driver, device: str, folder: Path, command: Sequence[str]) -> Recording:
    """The same of a command that has its kernels before the recorder starts, and launches when that is ready."""
    go = folder / "go"
    with Hardware(folder / "gpu", device) as hardware:
        environment = driver.environment(device) | hardware.env()
        words = [*command, "--wait-file", str(go)]
        program = subprocess.Popen(words, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True)
        try:
            until((folder / "go.ready").exists, program)
            # What the recorder starts, it starts when its probes are in.
            script = f"touch {go}; until grep -q '^State:.Z' /proc/{program.pid}/status; do sleep 0.05; done"
            done = run_recorder(folder, environment, "attach", ["sh", "-c", script])
        finally:
            go.touch()
            printed, _ = program.communicate()
    assert program.returncode == 0
    return Recording(folder / "capture", done.stderr, read_ledger(printed, folder), hardware.ledger())


def run_recorder(
    folder: Path, environment: dict[str, str], way: str, command: Sequence[str]
) -> subprocess.CompletedProcess[str]:
    words = [*IAPROF, "record", "-o", "capture", *BARE, f"--launches={way}", "--", *command]
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done


def recorded_launches(recording: Recording) -> Launches:
    """As the capture has them, without those of other programs on the machine."""
    pids = {kernel.pid for kernel in recording.kernels}
    rows = [row for row in CaptureReader(recording.capture).table("launch").to_pylist() if row["pid"] in pids]
    return Counter((row["pid"], row["tid"], canonical(row["address"]), row["size"], row["name"]) for row in rows)


def launched(kernels: Iterable[Kernel]) -> Launches:
    """As the workload and its runtime have them."""
    launches: Launches = Counter()
    for kernel in kernels:
        address, size = canonical(kernel.function_pointer), kernel.isa.stat().st_size
        launches[kernel.pid, kernel.tid, address, size, kernel.name] += sum(kernel.launches.values())
    return launches


def recorded_code(recording: Recording) -> set[tuple[int, str, int, bytes]]:
    """Process, name, address and code of every kernel that a debug ELF in the capture places."""
    rows = CaptureReader(recording.capture).table("kernel").to_pylist()
    elfs = {row["digest"]: read_zebin(row["elf"]) for row in rows if row["elf"] is not None}
    return {
        (row["pid"], kernel.name, kernel.address, kernel.code) for row in rows for kernel in elfs[row["digest"]].kernels
    }


def code(kernels: Iterable[Kernel]) -> set[tuple[int, str, int, bytes]]:
    """The same of every kernel that was launched, as its runtime has it."""
    return {
        (kernel.pid, kernel.name, canonical(kernel.function_pointer), kernel.isa.read_bytes())
        for kernel in kernels
        if kernel.launches
    }


def reported_stalls(recording: Recording) -> Stalls:
    """As a report of the capture has them."""
    done = subprocess.run([*IAPROF, "report", recording.capture, *_REPORT], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    paths = {row.stack for row in recording.ledger.rows}
    stalls: Stalls = Counter()
    for text in done.stdout.splitlines():
        frames, count = text.rsplit(" ", 1)
        cpu, gpu = frames.split(";-;")
        path = next((path for path in paths if f";{path};" in f";{cpu};"), cpu)
        kernel, *rest, reason, offset = (_MARKS.sub("", frame) for frame in gpu.split(";"))
        line = next((frame for frame in rest if _LINE.fullmatch(frame)), "")
        stalls[path, kernel, line, reason, int(offset, 16)] += int(count)
    return stalls


def produced_stalls(recording: Recording) -> Stalls:
    """As the stand-in and the debug information have them."""
    lines = {(kernel.function_pointer, kernel.name): _Lines(kernel) for kernel in recording.kernels}
    stalls: Stalls = Counter()
    for row in recording.ledger.rows:
        if row.captured:
            line = lines[row.address, row.kernel].at(row.offset)
            stalls[row.stack, row.kernel, line, row.reason, row.offset] += row.captured
    return stalls


class _Lines:
    """A kernel's lines, by binutils; the frame of a line names its file where that is not the one of the kernel."""

    def __init__(self, kernel: Kernel) -> None:
        words = ["readelf", "-W", "--debug-dump=decodedline", str(kernel.debug_elf)]
        text = subprocess.run(words, capture_output=True, text=True, check=True).stdout
        start, end = canonical(kernel.base_address), canonical(kernel.base_address) + kernel.isa.stat().st_size
        rows = [(canonical(int(address, 16)) - start, file, line) for file, line, address in _ROW.findall(text)]
        self._rows = sorted((row for row in rows if 0 <= row[0] < end - start), key=lambda row: row[0])

    def at(self, offset: int) -> str:
        number = bisect_right(self._rows, offset, key=lambda row: row[0])
        if not number:
            return ""
        _, file, line = self._rows[number - 1]
        if line in ("0", "-"):
            return ""
        return f"line {line}" if file == self._rows[0][1] else f"{file} line {line}"
