"""What the benchmarks share: the machine's name, tables, CPU clocks of other processes, a recorder that is recording.

Numbers come from a machine that does other things, too: whoever measures takes turns between the things compared,
repeats, and prints the median.
"""

from __future__ import annotations

import ctypes
import datetime
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from integration.recording import until_recording
from stacks.without_btf import WITHOUT_BTF
from standin.hardware import Hardware

IAPROF = [sys.executable, "-m", "iaprof"]
SETTLE_S = 0.5  # for the processes that a recorder has started to begin, too
_PIDFD_GETFD = 438
_TICKS = os.sysconf("SC_CLK_TCK")


def machine() -> str:
    """CPU, cores, kernel, Python and date, in a line."""
    model = "an unknown CPU"
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    host = os.uname()
    cores = len(os.sched_getaffinity(0))
    virtual = ", virtual" if "hypervisor" in Path("/proc/cpuinfo").read_text() else ""
    python = ".".join(str(number) for number in sys.version_info[:3])
    date = datetime.datetime.now(datetime.UTC).date()
    return f"{model}, {cores} cores{virtual}; {host.sysname} {host.release} {host.machine}; Python {python}; {date}"


def print_table(title: str, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Prints a table whose first column is text and whose others are numbers."""
    every = [list(heads), *(list(row) for row in rows)]
    widths = [max(len(row[column]) for row in every) for column in range(len(heads))]
    print(f"\n{title}\n")
    for row in every:
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        print("  " + "   ".join(cells).rstrip())
    sys.stdout.flush()


def map_of(recorder: int, **wanted: str) -> int:
    """A descriptor of a recorder's BPF map, which whoever calls this closes.

    Args:
        recorder: its process.
        wanted: what /proc's fdinfo says of the map: map_type, key_size, value_size, max_entries.
    """
    for entry in Path(f"/proc/{recorder}/fdinfo").iterdir():
        told = dict(line.split(":", 1) for line in entry.read_text().splitlines() if ":" in line)
        if all(told.get(name, "").strip() == value for name, value in wanted.items()):
            break
    else:
        raise RuntimeError(f"the recorder has no such map: {wanted}")
    process = os.pidfd_open(recorder)
    fd: int = ctypes.CDLL(None).syscall(_PIDFD_GETFD, process, int(entry.name), 0)
    os.close(process)
    if fd < 0:
        raise RuntimeError("the recorder's map cannot be had")
    return fd


def needs_root(what: str) -> None:
    """Ends the script with a sentence when it is not run by root."""
    if os.geteuid() != 0:
        sys.exit(f"{what} needs root: run it with sudo, or as `make bench` or `make soak` do")


def cpu_seconds(pid: int) -> float:
    """CPU that a process has used, all its threads together, to the nanosecond.

    Raises:
        OSError: there is no such process.
    """
    return time.clock_gettime((~pid << 3) | 2)  # CPUCLOCK_SCHED of linux/posix-timers.h


def scaled(value: float) -> str:
    """A size in MB, of 1,000,000 bytes."""
    return f"{value / 1e6:,.0f} MB"


@dataclass(frozen=True)
class Ended:
    """A process that ended, and what it used."""

    code: int
    cpu_s: float  # user and system, of its children that it waited for, too
    peak_bytes: int  # of its largest process
    wall_s: float


def wait_for(process: subprocess.Popen[Any], started: float) -> Ended:
    """Waits for a process that began at `started` (time.monotonic)."""
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    cpu = usage.ru_utime + usage.ru_stime
    return Ended(process.returncode, cpu, usage.ru_maxrss * 1024, time.monotonic() - started)


def run(command: Sequence[str | Path], errors: Path, env: dict[str, str] | None = None) -> Ended:
    """Runs a command, its output to nowhere and its errors into a file."""
    started = time.monotonic()
    with errors.open("wb") as file:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=file, env=os.environ | (env or {})
        )
        return wait_for(process, started)


class Memory(threading.Thread):
    """Watches the memory of a process and all that it started: proportional shares, added up, ten times a second."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self._pid = pid
        self.seen: list[tuple[float, int]] = []  # time.monotonic, bytes
        self._stopped = threading.Event()

    def run(self) -> None:
        while not self._stopped.wait(0.1):
            self.seen.append((time.monotonic(), sum(map(_share, _family(self._pid)))))

    def stop(self) -> None:
        self._stopped.set()
        self.join()

    def most(self, begin: float = 0, end: float = float("inf")) -> int:
        """The most in that span."""
        return max((size for moment, size in self.seen if begin <= moment <= end), default=0)


def _family(pid: int) -> list[int]:
    return [pid, *(member for child in _children(pid) for member in _family(child))]


def _children(pid: int) -> list[int]:
    try:
        return list(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))
    except OSError:
        return []


@dataclass(frozen=True)
class Part:
    """One of the recorder's processes, and what it has used so far."""

    name: str
    cpu_s: float  # of its children that have ended, too
    peak_bytes: int  # resident, what it shares with others included
    share_bytes: int  # proportional, now


def parts(pid: int, parent: str = "") -> list[Part]:
    """The processes of a recorder, itself first."""
    command = Path(f"/proc/{pid}/cmdline").read_text()
    if "collector_child" in command:
        name = f"opens files for the {parent}"
    elif "unwind.reader" in command:
        name = "reads call frame information"
    else:
        name = "learner" if "unwinding.learner" in command else "recorder"
    status = Path(f"/proc/{pid}/status").read_text()
    if "VmHWM:" not in status:
        raise ProcessLookupError(f"process {pid} has just ended")
    peak = int(status.partition("VmHWM:")[2].split()[0]) * 1024
    part = Part(name, cpu_seconds(pid) + _ended_cpu_seconds(pid), peak, _share(pid))
    return [part, *(each for child in _children(pid) for each in parts(child, name))]


def _ended_cpu_seconds(pid: int) -> float:
    """CPU of children that have ended, and that the process has waited for."""
    stat = Path(f"/proc/{pid}/stat").read_text()
    return sum(map(int, stat.rpartition(") ")[2].split()[13:15])) / _TICKS


def _share(pid: int) -> int:
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return 0
    return int(text.partition("Pss:")[2].split()[0]) * 1024 if "Pss:" in text else 0


def imports() -> int:
    """Bytes of a process that has imported pyarrow and numpy and does nothing with them."""
    code = (
        "import pyarrow.parquet, numpy; "
        "text = open('/proc/self/smaps_rollup').read(); print(text.partition('Pss:')[2].split()[0])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return int(done.stdout) * 1024


@dataclass
class Recorder:
    """`iaprof record` on the stand-in's hardware, from the moment that it records until it is told to end."""

    hardware: Hardware
    capture: Path
    options: Sequence[str] = ()
    frame_pointers_only: bool = False  # as where the kernel's BTF does not tell what rules need
    ended: Ended | None = field(default=None, init=False)
    starting_cpu_s: float = field(default=0.0, init=False)  # used before it recorded: importing, loading BPF

    def __enter__(self) -> Self:
        words = [*IAPROF, "record", "--quiet", "--force", "--symbols", "none", "-o", str(self.capture), *self.options]
        # Set for itself only: what it starts would not get it from a program that starts it.
        words = ["env", *(f"{name}={value}" for name, value in self.hardware.env().items()), *words]
        words = [*WITHOUT_BTF, *words] if self.frame_pointers_only else words
        self.process = subprocess.Popen(words, stdin=subprocess.DEVNULL)
        try:
            until_recording(self.process)
        except AssertionError as error:
            self.process.kill()
            raise RuntimeError("the recorder did not start; what it said is above") from error
        time.sleep(SETTLE_S)
        self.starting_cpu_s = self.cpu_s()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.ended is None:
            self.process.kill()
            self.process.wait()

    def cpu_s(self) -> float:
        """CPU that it and the processes that it started have used so far."""
        return sum(part.cpu_s for part in self.parts())

    def parts(self) -> list[Part]:
        """Its processes, itself first."""
        return parts(self.process.pid)

    def stop(self) -> Ended:
        """Ends the recording. Its wall time counts from here: how long finishing took."""
        told = time.monotonic()
        self.process.send_signal(signal.SIGINT)
        self.ended = wait_for(self.process, told)
        if self.ended.code != 0:
            raise RuntimeError(f"the recorder ended with {self.ended.code}; what it said is above")
        return self.ended
