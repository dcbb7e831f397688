"""The source of mappings, names, forks and exits: perf's side-band, and the running processes in the same form."""

from __future__ import annotations

import select
import time
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from iaprof.basics.errors import IaprofError
from iaprof.bpf.probes.libraries import NAMES
from iaprof.bpf.processes import snapshot
from iaprof.bpf.sideband import SideBandBuffers
from iaprof.formats.wire.sideband import mapped_paths, possible_exits, possible_mappings
from iaprof.record.journal import Journal
from iaprof.record.loop import Loop
from iaprof.record.scope import Scope
from iaprof.record.sources.finished_stacks import FinishedStacks
from iaprof.record.sources.launches import Launches
from iaprof.record.sources.libraries import MappedLibraries
from iaprof.record.sources.new_cpus import NewCpus
from iaprof.record.sources.source import Source
from iaprof.record.spool import FrameKind

REST_NS = 10_000_000  # between two reads
TURN_NS = 10_000_000  # of writing what runs, before the other sources' turns
PYTHON = b"python"  # in the names of interpreters: programs and libraries
LARGE_BYTES = 4 << 20  # of executable memory of a file, whose call frame information takes long to read from a disk
MOST_LARGE = 1 << 12  # of these files, that are remembered


class SideBand(Source):
    """The side-band buffers of all CPUs."""

    def __init__(
        self, launches: Launches, libraries: MappedLibraries, stacks: FinishedStacks, followed: Scope | None = None
    ) -> None:
        """Opens the buffers, and reads from /proc what runs.

        Args:
            launches: gets told of processes whose first thread has exited.
            libraries: gets told of mapped files that are named like a driver, and when all records have been read.
            stacks: gets told of processes that mapped a file with an interpreter's name.
            followed: gets all records, for forks and exits; None: nobody does.

        Raises:
            IaprofError: the buffers cannot be opened.
        """
        try:
            self._buffers = SideBandBuffers()
        except OSError as error:
            raise IaprofError(
                f"the machine's mappings and processes cannot be watched (perf_event_open: {error.strerror}): "
                "run iaprof with sudo, or set kernel.perf_event_paranoid to -1"
            ) from error
        self._new_cpus = NewCpus(self._buffers, "side-band", "mappings, names, forks and exits there")
        self._launches, self._libraries, self._stacks, self._followed = launches, libraries, stacks, followed
        self._large: set[bytes] = set()  # files of which a process has mapped LARGE_BYTES
        self._has_finished = False
        # The side-band has whatever is mapped from now on.
        self._running = b"".join(snapshot(time.monotonic_ns()))
        self._snapshot: Iterator[bytes] = iter(())  # what runs, as far as it is not yet in the next output file

    def start(self, journal: Journal, loop: Loop) -> None:
        """See Source."""
        self._journal, self._loop = journal, loop
        journal.write(FrameKind.SIDEBAND, self._running, time=time.monotonic_ns())
        del self._running
        loop.wait_for(self._buffers.fileno(), self._read_and_rest, select.EPOLLONESHOT)
        self.read()

    def read(self) -> None:
        """See Source: empties the buffers."""
        records = []
        for cpu, data in self._buffers.read():
            self._journal.write(FrameKind.SIDEBAND, data, time=time.monotonic_ns(), source=cpu)
            records.append(data)
            if names := [name for name in NAMES if name in data]:
                for time_ns, pid, path in mapped_paths(data):
                    if any(name in path for name in names):
                        self._libraries.mapped(time_ns, pid, path)
            if PYTHON in data:
                for pid in {pid for _, pid, path in mapped_paths(data) if PYTHON in path.rpartition(b"/")[2]}:
                    self._stacks.look_for_python(pid)
            self._prepare(*possible_mappings(data, LARGE_BYTES))
        if self._followed is not None and records:
            self._followed.follow(records)
        for data in records:
            for pid, time_ns in zip(*(column.tolist() for column in possible_exits(data)), strict=True):
                self._launches.ended(pid, time_ns)

    def _prepare(self, pids: NDArray[np.uint32], files: NDArray[np.uint64]) -> None:
        """Has the learner open the files of processes that map new ones: else first launches may wait for the disk."""
        for pid, file in zip(pids.tolist(), map(bytes, files), strict=True):
            if file not in self._large and (self._followed is None or pid not in self._followed.others):
                self._large.add(file)
                self._stacks.prepare(pid)
        if len(self._large) > MOST_LARGE:
            self._large.clear()

    def _read_and_rest(self) -> None:
        """Reads, then rests: on a busy machine, which maps and forks all the time, every record would wake us."""
        self.read()
        self._loop.at(time.monotonic_ns() + REST_NS, self._watch_again)

    def _watch_again(self) -> None:
        self._loop.wait_again(self._buffers.fileno(), select.EPOLLONESHOT)
        # perf reported these records during the rest, and does not report them again.
        self.read()

    def begin_part(self, since_ns: int) -> None:
        """See Source: writes what runs."""
        self._snapshot = snapshot(since_ns)
        self._loop.keep_calling(self, self._write_snapshot)

    def _write_snapshot(self) -> None:
        turn_ends = time.monotonic_ns() + TURN_NS
        for chunk in self._snapshot:
            self._journal.write(FrameKind.SIDEBAND, chunk, time=time.monotonic_ns())
            if time.monotonic_ns() > turn_ends:
                return
        self._loop.stop_calling(self)

    def losses(self) -> None:
        """See Source: what happened on a CPU that came online, before its buffer was opened."""
        if self._has_finished:
            return
        if self._new_cpus.look(self._journal):
            self.begin_part(time.monotonic_ns())

    def finish(self) -> None:
        """See Source."""
        self._has_finished = True
        self._buffers.stop()
        self.read()
        self._libraries.count_missed()
        while self._loop.is_calling(self):
            self._write_snapshot()

    def close(self) -> None:
        """Gives the buffers back."""
        self._buffers.close()
