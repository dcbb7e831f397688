"""Finding the runtime's libraries, wherever they are, and keeping their probes attached.

A library is a file, not a path: the same name can be many files (system, conda, containers), and one file serves
every process that maps it, now or later. A mapped one is opened through /proc/PID/map_files, which is the very file
that the process mapped, whatever its path says by now; notes are read and probes attached through that one open file.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from iaprof.bpf.processes import running_pids
from iaprof.bpf.usdt import Probe, ProbeError, read_probes

LIBRARY = re.compile(rb"libze_intel_gpu\.so(\.[0-9.]+)?( \(deleted\))?$")
SYSTEM_FOLDERS = (
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib64",
    "/usr/lib",
    "/usr/local/lib",
    "/usr/local/lib/x86_64-linux-gnu",
)
PROVIDER = "level_zero"
LAUNCH, COMPILE = "launch_kernel", "compile_kernel"
MAX_LIBRARIES = 64
MAX_LOCATIONS = 16  # of probes in one library; compilers inline a probe's function a few times at most


@dataclass(frozen=True)
class Outcome:
    """What became of one library."""

    path: str
    probes: int
    problem: str = ""


class Libraries:
    """Every library seen so far; each is taken once."""

    def __init__(self, attach: Callable[[int, Probe], None]) -> None:
        """Starts with none.

        Args:
            attach: given the open library and a probe of it; raises OSError where the kernel refuses.
        """
        self._attach = attach
        self._seen: set[tuple[int, int]] = set()
        self._full = False

    def installed(self, folders: Iterator[str] | tuple[str, ...] = SYSTEM_FOLDERS) -> Iterator[Outcome]:
        """Takes the libraries that lie in `folders`, before any process maps them."""
        for folder in folders:
            for path in sorted(Path(folder).glob("libze_intel_gpu.so*")):
                yield from self._take(str(path), str(path))

    def running(self) -> Iterator[Outcome]:
        """Takes the libraries that running processes have mapped."""
        for pid in running_pids():
            yield from self.mapped(pid)

    def mapped(self, pid: int) -> Iterator[Outcome]:
        """Takes the libraries that one process has mapped."""
        try:
            lines = Path(f"/proc/{pid}/maps").read_bytes().splitlines()
        except OSError:
            return
        for line in lines:
            fields = line.split(maxsplit=5)
            if len(fields) == 6 and b"x" in fields[1] and LIBRARY.search(fields[5]):
                path = fields[5].decode("utf-8", "backslashreplace")
                yield from self._take(f"/proc/{pid}/map_files/{fields[0].decode()}", path)

    def _take(self, location: str, path: str) -> Iterator[Outcome]:
        try:
            fd = os.open(location, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
        except OSError:
            return  # the process ended, or unmapped it
        status = os.fstat(fd)
        key = (status.st_dev, status.st_ino)
        if not stat.S_ISREG(status.st_mode) or key in self._seen:
            os.close(fd)
            return
        with open(fd, "rb") as file:
            if len(self._seen) >= MAX_LIBRARIES:
                if not self._full:
                    self._full = True
                    yield Outcome(path, 0, f"more than {MAX_LIBRARIES} different libraries: the rest is not probed")
                return
            self._seen.add(key)
            try:
                probes = read_probes(file, PROVIDER, (LAUNCH, COMPILE))[:MAX_LOCATIONS]
                for probe in probes:
                    self._attach(fd, probe)
            except (ProbeError, OSError) as error:
                yield Outcome(path, 0, str(error))
                return
            yield Outcome(path, len(probes), "" if probes else "it has no launch_kernel and compile_kernel probes")
