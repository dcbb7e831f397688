"""The side-band while recording: kept as it comes, and looked at for libraries that are mapped and for who forks."""

from __future__ import annotations

import select
import time
from collections.abc import Callable

from iaprof.bpf.libraries import NAMES
from iaprof.bpf.sideband import SideBandBuffers
from iaprof.formats.wire.sideband import mapped_paths
from iaprof.record.journal import Journal
from iaprof.record.loop import Loop
from iaprof.record.spool import FrameKind

REST_NS = 10_000_000
PYTHON = b"python"  # in the names of interpreters, programs and libraries


class Watch:
    """The side-band buffers of all CPUs."""

    def __init__(self, buffers: SideBandBuffers) -> None:
        self._buffers = buffers

    def start(
        self,
        journal: Journal,
        loop: Loop,
        on_library: Callable[[int, int, bytes], None],
        on_python: Callable[[int], None],
        on_records: Callable[[list[bytes]], None] | None,
    ) -> None:
        """Begins to be read by `loop`.

        Args:
            journal: gets what comes.
            loop: calls back.
            on_library: is told when (CLOCK_MONOTONIC ns) which process mapped a file of a driver's name, and its path
                there.
            on_python: is told which process mapped a file of an interpreter's name.
            on_records: gets all records too, if somebody follows processes.
        """
        self._journal, self._loop, self._on_records = journal, loop, on_records
        self._on_library, self._on_python = on_library, on_python
        loop.wait_for(self._buffers.fileno(), self._read_and_rest, select.EPOLLONESHOT)
        self.read()

    def read(self) -> None:
        """Empties the buffers."""
        together = []
        for cpu, data in self._buffers.read():
            self._journal.write(FrameKind.SIDEBAND, data, time=time.monotonic_ns(), source=cpu)
            together.append(data)
            if names := [name for name in NAMES if name in data]:
                for time_ns, pid, path in mapped_paths(data):
                    if any(name in path for name in names):
                        self._on_library(time_ns, pid, path)
            if PYTHON in data:
                for pid in {pid for _, pid, path in mapped_paths(data) if PYTHON in path.rpartition(b"/")[2]}:
                    self._on_python(pid)
        if self._on_records is not None and together:
            self._on_records(together)

    def _read_and_rest(self) -> None:
        """Reads, and looks away for a moment: a busy machine maps and forks without end, and each one wakes us."""
        self.read()
        self._loop.at(time.monotonic_ns() + REST_NS, self._watch_again)

    def _watch_again(self) -> None:
        self._loop.wait_again(self._buffers.fileno(), select.EPOLLONESHOT)
        # perf tells of records once, and this has asked: what came during the rest is read now.
        self.read()

    def finish(self) -> None:
        """Ends it, and takes what is left."""
        self._buffers.stop()
        self.read()
