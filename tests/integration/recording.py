"""Recording and reporting as a user does, by the installed command, and comparing with what the stand-in produced."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import pytest

from iaprof.formats.capture.reader import CaptureReader
from iaprof.record.session import NICE, TICK_NS
from iaprof.record.spool import FrameKind, SpoolReader
from iaprof.sandbox import memory
from standin import runtime
from standin.hardware import Hardware, Ledger
from unit import in_process
from waiting import LONGEST_WAIT_S, until

READING = ("annotate", "diff", "info", "query", "report", "top")
IAPROF = [sys.executable, "-m", "iaprof"]
BARE = ("--symbols", "none", "--cpu-freq", "0")  # naming all that runs, and sampling CPUs, take longer than most tests
# One worker has these, one after the other: those that crowd the machine with hostile or many processes, which every
# recorder of that time sees, and those that this would disturb, as they count losses.
IN_TURN = pytest.mark.xdist_group("in-turn")
CUDA_IN_TURN = pytest.mark.xdist_group("cuda")  # these, too: a recorder gets what the libraries of other recorders send
MOST_OWN_BYTES = 1 << 30  # of a process of tests, in which commands may run
LAUNCH_FUNCTION = "zeCommandListAppendLaunchKernel"


@dataclass(frozen=True)
class Finished:
    """A command that ended."""

    code: int
    out: str
    err: str


def iaprof(*words: str | Path, env: dict[str, str] | None = None, cwd: Path | None = None) -> Finished:
    """Runs the command; in this process, where it only reads a capture, which takes half a second less."""
    has_room = memory.used()[1] < MOST_OWN_BYTES  # which counts towards the command's limit
    if words[0] in READING and "--live" not in words and env is None and cwd is None and has_room:
        try:
            return Finished(*in_process.iaprof(*words))
        finally:
            memory.lift_limit()  # which a recorder would inherit
    command = [*IAPROF, *(str(word) for word in words)]
    done = subprocess.run(command, env=os.environ | (env or {}), cwd=cwd, capture_output=True, text=True, timeout=300)
    return Finished(done.returncode, done.stdout, done.stderr)


def one_sentence(text: str) -> bool:
    """Whether the command said one sentence, in a line of its own."""
    return text.startswith("iaprof: ") and text.count("\n") == 1 and "Traceback" not in text


def environment(hardware: Hardware) -> dict[str, str]:
    """What a recorder gets: the stand-in's hardware, and a command's library where it is probed before it is mapped.

    The probes of a library that is mapped while recording come some 35 ms later, or more on a machine that is busy
    with other things: a test that counts everything must not depend on that.
    """
    return hardware.env() | {"LD_LIBRARY_PATH": str(runtime.build().library.parent)}


def record(hardware: Hardware, capture: Path, *words: str | Path) -> Finished:
    """Records on the stand-in's hardware; it has to work."""
    done = iaprof("record", "-o", capture, *BARE, *words, env=environment(hardware))
    assert done.code == 0, done.err
    return done


def start(
    hardware: Hardware, capture: Path, *words: str | Path, stderr: int | IO[str] = subprocess.PIPE
) -> subprocess.Popen[str]:
    """A recorder that has begun."""
    command = [*IAPROF, "record", "-o", str(capture), *BARE, *map(str, words)]
    recorder = subprocess.Popen(command, env=os.environ | environment(hardware), stderr=stderr, text=True)
    until_recording(recorder)
    return recorder


def until_recording(recorder: subprocess.Popen[Any]) -> None:
    """Waits until a recorder samples, and has started the command: raising its priority is its last step."""
    until(lambda: os.getpriority(os.PRIO_PROCESS, recorder.pid) == NICE, recorder)


def voluntary_switches(pid: int) -> int:
    """Returns how often a process has waited for something."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("voluntary_ctxt_switches:")))


def cpu_seconds(pid: int) -> float:
    """The CPU time that a process has used, in all its threads, in the kernel, too."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def spool_of(capture: Path) -> Path:
    """What a recorder writes until it has ended."""
    return capture.with_name(capture.name + ".spool")


def spooled(capture: Path, kind: FrameKind) -> list[dict[str, Any]]:
    """What a recorder has written so far of a kind of frames that is JSON."""
    reader = SpoolReader(spool_of(capture))
    try:
        return [json.loads(frame.payload) for frame in reader.frames({kind})]
    finally:
        reader.close()


def has_met(capture: Path, library: Path) -> bool:
    """Whether a recorder has put its probes into a library."""
    appended = spooled(capture, FrameKind.APPEND)
    return any(row["path"] == str(library) for rows in appended for row in rows.get("libraries", ()))


def launched(hardware: Hardware) -> int:
    """Returns how many launches programs have made."""
    return sum(launch.count for launch in hardware.ledger().launches)


def until_ticked(capture: Path, recorder: subprocess.Popen[str]) -> None:
    """Waits until all that happened up to now is in the spool: a tick, which ends with metrics, came after another."""
    asked = time.monotonic_ns()

    def ticked() -> bool:
        reader = SpoolReader(spool_of(capture))
        times = [frame.time for frame in reader.frames({FrameKind.METRICS}) if frame.time > asked]
        reader.close()
        return bool(times) and max(times) - min(times) > TICK_NS // 2

    until(ticked, recorder)


def stalls_in_spool(capture: Path) -> int:
    """Stall records that a recorder has written so far."""
    reader = SpoolReader(spool_of(capture))
    try:
        return sum(len(frame.payload) // (8 * frame.shape) for frame in reader.frames({FrameKind.STALLS}))
    finally:
        reader.close()


def has_stalls(capture: Path) -> bool:
    """Whether a recorder has written stalls."""
    reader = SpoolReader(spool_of(capture))
    try:
        return any(True for _ in reader.frames({FrameKind.STALLS}))
    finally:
        reader.close()


def ended(recorder: subprocess.Popen[str], interrupt: bool = True) -> str:
    """What a recorder said (to a pipe) that ended well, as it was told to or by itself."""
    if interrupt:
        recorder.send_signal(signal.SIGINT)
    _, errors = recorder.communicate(timeout=LONGEST_WAIT_S)
    assert recorder.returncode == 0, errors
    return errors or ""


def copy_of_build(folder: Path) -> Path:
    """A folder with the stand-in's library and program, as new files: probes go by file."""
    shutil.copytree(runtime.build().library.parent, folder)  # with their times: nothing is compiled again
    return folder


def folded(capture: Path) -> str:
    """The capture's folded stacks."""
    done = iaprof("report", capture)
    assert done.code == 0, done.err
    return done.out


def counted(folded_text: str) -> Iterator[tuple[str, int]]:
    """The stacks of folded text, each with its count."""
    for line in folded_text.splitlines():
        stack, _, count = line.rpartition(" ")
        yield stack, int(count)


Samples = Counter[tuple[str, int, str]]
"""Samples by kernel, offset and reason."""


def gpu_functions(gpu: list[str]) -> list[str]:
    """Names of GPU functions among frames, without what tells kernels of one name apart: others record such, too."""
    return [re.sub(r"( \[code [0-9a-f]+\])?_\[G\]$", "", frame) for frame in gpu if frame.endswith("_[G]")]


def by_instruction(text: str, ledger: Ledger) -> Samples:
    """Samples of folded stacks by kernel, offset and reason."""
    kernels = {row.kernel for row in ledger.rows}
    samples: Samples = Counter()
    for line in text.splitlines():
        stack, count = line.rsplit(" ", 1)
        gpu = stack.split(";-;")[1].split(";")
        functions = gpu_functions(gpu)
        kernel = next((function for function in functions if function in kernels), functions[-1])
        samples[kernel, int(gpu[-1].removesuffix("_[g]"), 16), gpu[-2].removesuffix("_[g]")] += int(count)
    return samples


def by_stack(text: str, ledger: Ledger) -> Counter[tuple[int, str, str]]:
    """Samples of folded stacks by process, launching stack as the ledger has it, and kernel."""
    stacks = sorted({row.stack for row in ledger.rows}, key=len, reverse=True)
    kernels = {row.kernel for row in ledger.rows}
    samples: Counter[tuple[int, str, str]] = Counter()
    for line in text.splitlines():
        stack, count = line.rsplit(" ", 1)
        cpu, gpu = stack.split(";-;")
        _, pid, *frames = cpu.split(";")
        assert frames[-1] == LAUNCH_FUNCTION, line
        user = ";".join(frames[:-1])
        label = next((label for label in stacks if user == label or user.endswith(";" + label)), user)
        kernel = next(function for function in gpu_functions(gpu.split(";")) if function in kernels)
        samples[int(pid), label, kernel] += int(count)
    return samples


def ledger_by_instruction(ledger: Ledger) -> Samples:
    """What the stand-in says was there to be read."""
    samples: Samples = Counter()
    for row in ledger.rows:
        if row.captured:
            samples[row.kernel, row.offset, row.reason] += row.captured
    return samples


def ledger_by_stack(ledger: Ledger) -> Counter[tuple[int, str, str]]:
    """The same by process, launching stack and kernel."""
    samples: Counter[tuple[int, str, str]] = Counter()
    for row in ledger.rows:
        if row.captured:
            samples[row.pid, row.stack, row.kernel] += row.captured
    return samples


def losses(capture: Path, ledger: Ledger) -> list[dict[str, Any]]:
    """The capture's rows of what was lost, but for other tests': drivers, and modules of processes that ended soon."""
    ours, own = {str(launch.pid) for launch in ledger.launches}, str(runtime.build().library.parent)
    rows = CaptureReader(capture).table("loss").to_pylist()
    rows = [row for row in rows if row["what"] != "library" or row["detail"].startswith(own)]
    owners = (re.search(r" of process (\d+): ", row["detail"]) for row in rows)
    return [row for row, owner in zip(rows, owners, strict=True) if owner is None or owner[1] in ours]


def lost_launches(losses: list[dict[str, Any]]) -> int:
    """How many launches were lost, by rows of what was lost: those that found the ring buffer full."""
    return sum(loss["count"] for loss in losses if (loss["source"], loss["what"]) == ("launches", "lost"))


def recorded_launches(capture: Path, ledger: Ledger) -> int:
    """Launches in the capture by the processes of this stand-in; others may run on the machine at the same time."""
    ours = {launch.pid for launch in ledger.launches}
    return sum(pid in ours for pid in CaptureReader(capture).table("launch", ("pid",))["pid"].to_pylist())
