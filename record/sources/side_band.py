"""The source of what becomes of processes: perf's side-band, kept as it comes, and what runs already in the same form.

It is looked at for libraries and interpreters that are mapped, and for who forks.
"""

from __future__ import annotations

import select
import time
from collections.abc import Callable, Iterator

from iaprof.basics.errors import IaprofError
from iaprof.bpf.probes.libraries import NAMES
from iaprof.bpf.processes import snapshot
from iaprof.bpf.sideband import SideBandBuffers
from iaprof.formats.wire.sideband import mapped_paths
from iaprof.record.capture.journal import Journal
from iaprof.record.capture.spool import FrameKind
from iaprof.record.loop import Loop
from iaprof.record.sources.source import Source

REST_NS = 10_000_000
TURN_NS = 10_000_000  # of telling what runs, before others get theirs
PYTHON = b"python"  # in the names of interpreters, programs and libraries


class SideBand(Source):
    """The side-band buffers of all CPUs."""

    def __init__(self) -> None:
        """Opens them, and looks at what runs.

        Raises:
            IaprofError: they cannot be opened.
        """
        try:
            self._buffers = SideBandBuffers()
        except OSError as error:
            raise IaprofError(
                f"the machine's mappings and processes cannot be watched (perf_event_open: {error.strerror}): "
                "run iaprof with sudo, or set kernel.perf_event_paranoid to -1"
            ) from error
        # Whatever is mapped from here on, the side-band tells.
        self._running = b"".join(snapshot(time.monotonic_ns()))
        self._told_again: Iterator[bytes] = iter(())  # what runs, as far as the next file was not yet told
        self.on_library: Callable[[int, int, bytes], None] = lambda *_: None
        """Is told when (CLOCK_MONOTONIC ns) which process mapped a file of a driver's name, and its path there."""
        self.on_python: Callable[[int], None] = lambda _: None
        """Is told which process mapped a file of an interpreter's name."""
        self.on_records: Callable[[list[bytes]], None] | None = None
        """Gets all records, if somebody follows processes."""
        self.on_end: Callable[[], None] = lambda: None
        """Is called when nothing more will be told."""

    def start(self, journal: Journal, loop: Loop) -> None:
        """See Source."""
        self._journal, self._loop = journal, loop
        journal.write(FrameKind.SIDEBAND, self._running, time=time.monotonic_ns())
        del self._running
        loop.wait_for(self._buffers.fileno(), self._read_and_rest, select.EPOLLONESHOT)
        self.read()

    def read(self) -> None:
        """See Source: empties the buffers."""
        together = []
        for cpu, data in self._buffers.read():
            self._journal.write(FrameKind.SIDEBAND, data, time=time.monotonic_ns(), source=cpu)
            together.append(data)
            if names := [name for name in NAMES if name in data]:
                for time_ns, pid, path in mapped_paths(data):
                    if any(name in path for name in names):
                        self.on_library(time_ns, pid, path)
            if PYTHON in data:
                for pid in {pid for _, pid, path in mapped_paths(data) if PYTHON in path.rpartition(b"/")[2]}:
                    self.on_python(pid)
        if self.on_records is not None and together:
            self.on_records(together)

    def _read_and_rest(self) -> None:
        """Reads, and looks away for a moment: a busy machine maps and forks without end, and each one wakes us."""
        self.read()
        self._loop.at(time.monotonic_ns() + REST_NS, self._watch_again)

    def _watch_again(self) -> None:
        self._loop.wait_again(self._buffers.fileno(), select.EPOLLONESHOT)
        # perf tells of records once, and this has asked: what came during the rest is read now.
        self.read()

    def begin_part(self, since_ns: int) -> None:
        """See Source: what runs."""
        self._told_again = snapshot(since_ns)
        self._loop.keep_calling(self, self._tell_what_runs)

    def _tell_what_runs(self) -> None:
        turn_ends = time.monotonic_ns() + TURN_NS
        for piece in self._told_again:
            self._journal.write(FrameKind.SIDEBAND, piece, time=time.monotonic_ns())
            if time.monotonic_ns() > turn_ends:
                return
        self._loop.stop_calling(self)

    def finish(self) -> None:
        """See Source."""
        self._buffers.stop()
        self.read()
        self.on_end()
        while self._loop.is_calling(self):
            self._tell_what_runs()

    def close(self) -> None:
        """Gives the buffers back."""
        self._buffers.close()
