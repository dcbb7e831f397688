"""Finding the runtime's libraries, wherever they are, and keeping their probes attached.

A library is a file, not a path: the same name can be many files (system, conda, containers), and one file serves
every process that maps it, now or later. A mapped one is opened through /proc/PID/map_files, which is the very file
that the process mapped, whatever its path says by now; notes are read and probes attached through that one open file.
"""

from __future__ import annotations

import os
import re
import stat
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from iaprof.bpf.processes import running_pids
from iaprof.bpf.usdt import Probe, ProbeError, read_probes

# A line of /proc/PID/maps: an executable mapping of such a library, its range and its path.
MAPPING = re.compile(
    rb"^([0-9a-f]+)-([0-9a-f]+) ..x. \S+ \S+ \S+ +(.*libze_intel_gpu\.so(?:\.[0-9.]+)?(?: \(deleted\))?)$", re.MULTILINE
)
SYSTEM_FOLDERS = (
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib64",
    "/usr/lib",
    "/usr/local/lib",
    "/usr/local/lib/x86_64-linux-gnu",
)
PROVIDER = "level_zero"
LAUNCH, COMPILE = "launch_kernel", "compile_kernel"
# Anybody can map any number of files of that name. What one user's files take, others still have.
MAX_MAPS_BYTES = 16 << 20  # of a process: 100,000 mappings, and more than it can have unless somebody allowed it
MAX_LIBRARIES = 256
MAX_OF_ONE_OWNER = 16


@dataclass(frozen=True)
class Outcome:
    """What became of one library."""

    path: str
    probes: int  # that are attached
    problem: str = ""  # why not all are


class Libraries:
    """Every library seen so far; each is taken once."""

    def __init__(self, attach: Callable[[int, Sequence[Probe]], None]) -> None:
        """Starts with none.

        Args:
            attach: given the open library and probes of it; all or none; raises OSError where the kernel refuses.
        """
        self._attach = attach
        # A file with probes in it keeps its inode; that of another may become a new file's.
        self._attached: set[tuple[int, ...]] = set()
        self._refused: set[tuple[int, ...]] = set()
        self._by_owner: Counter[int] = Counter()
        self._full: set[int] = set()  # owners for whose files there was no room, as they were told

    def installed(self, folders: Iterable[str] = SYSTEM_FOLDERS) -> Iterator[Outcome]:
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
            with open(f"/proc/{pid}/maps", "rb") as file:
                maps = file.read(MAX_MAPS_BYTES)
        except OSError:
            return
        for found in MAPPING.finditer(maps):
            path = found[3].decode("utf-8", "backslashreplace")
            # Names in map_files have no leading zeros, addresses in maps may have.
            start, end = int(found[1], 16), int(found[2], 16)
            yield from self._take(f"/proc/{pid}/map_files/{start:x}-{end:x}", path)

    def _take(self, location: str, path: str) -> Iterator[Outcome]:
        try:
            fd = os.open(location, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
        except OSError:
            return  # the process ended, or unmapped it
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            os.close(fd)
            return
        with open(fd, "rb") as file:
            inode = (status.st_dev, status.st_ino)
            # The overlays of two containers show one file of their image on two devices, all else alike. A probe is
            # in the file below, so a second one would fire for both.
            content = (status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_uid)
            if inode in self._attached or content in self._attached or content in self._refused:
                return
            owner = status.st_uid
            if self._by_owner[owner] >= MAX_OF_ONE_OWNER or self._by_owner.total() >= MAX_LIBRARIES:
                if owner not in self._full:
                    self._full.add(owner)
                    yield Outcome(path, 0, f"user {owner} has too many different libraries: the rest is not probed")
                return
            self._by_owner[owner] += 1
            outcome = self._probe(file, path)
            if outcome.probes:
                self._attached |= {inode, content}
            else:
                self._refused.add(content)
            yield outcome

    def _probe(self, file: BinaryIO, path: str) -> Outcome:
        probes: list[Probe] = []
        problem = ""
        try:
            probes.extend(read_probes(file, PROVIDER, (LAUNCH, COMPILE)))
        except ProbeError as error:
            problem = str(error)
        if not probes:
            return Outcome(path, 0, problem or "it has no launch_kernel and compile_kernel probes")
        try:
            self._attach(file.fileno(), probes)
        except OSError as error:
            return Outcome(path, 0, f"the kernel refuses probes in it ({error.strerror or error})")
        return Outcome(path, len(probes), problem)
