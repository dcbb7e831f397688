"""The source of GPU code: debug ELFs of compiled modules, and chunks of kernels and modules that BPF dumps."""

from __future__ import annotations

import json
import os
import time

import numpy as np
from numpy.typing import NDArray

from iaprof.formats.wire.launches import CHUNK, CHUNK_BYTES, ChunkOf
from iaprof.gpu.intel.zebin import placed_ranges
from iaprof.record.journal import Journal
from iaprof.record.kernels.collector import MAX_TOTAL_BYTES, DebugElfCollector, RefusedElf, TakenElf
from iaprof.record.kernels.drivers import Injection
from iaprof.record.loop import Loop
from iaprof.record.sources.source import Source
from iaprof.record.spool import FrameKind

COLLECTOR_WAIT_S = 3.0
MIN_CHUNK_BYTES = 4096  # what a chunk counts for at least: putting a million tiny ones together needs memory for each


class CodeObjects(Source):
    """The debug-ELF collector, and chunks of kernels and modules; BPF's records for both come from `Launches`."""

    def __init__(self, collector: DebugElfCollector, injection: Injection | None) -> None:
        """Args: the collector, which the caller closes, too; the injected library, whose debug ELFs are removed."""
        self._collector, self._injection = collector, injection
        if injection is not None:
            collector.own_folder = os.fsencode(injection.library.parent)
        self._chunk_bytes = 0

    def start(self, journal: Journal, loop: Loop) -> None:
        """See Source."""
        self._journal, self._loop = journal, loop
        self._wait_for_collector()

    def _wait_for_collector(self) -> None:
        self._collector_fd = self._collector.fileno()
        self._loop.wait_for(self._collector_fd, self.read)

    def ask(self, compiled: NDArray[np.void], now: int) -> None:
        """Has the debug ELFs of compiled modules taken: COMPILED[n]."""
        refused = self._collector.request(compiled)
        if refused:
            self._journal.loss("kernels", "refused", refused, "too many were compiled at once", now, now)

    def keep_chunks(self, chunks: NDArray[np.void], now: int) -> None:
        """Writes CHUNK[n] without the unused ends of their data."""
        if not len(chunks):
            return
        self._chunk_bytes += int(np.maximum(chunks["bytes"], MIN_CHUNK_BYTES).sum())
        if self._chunk_bytes > MAX_TOTAL_BYTES:
            detail = f"{MAX_TOTAL_BYTES >> 30} GiB of kernels were taken already"
            self._journal.loss("kernels", "refused", len(chunks), detail, now, now)
            return
        rows = chunks.view("u1").reshape(len(chunks), -1)
        ends = chunks["bytes"] + CHUNK.itemsize - CHUNK_BYTES
        for row, end in zip(rows, ends.tolist(), strict=True):
            self._journal.write(FrameKind.PIECE, row[:end].data, time=now)
        totals = self._journal.totals
        first = chunks["offset"] == 0
        totals.modules += int((first & (chunks["what"] == ChunkOf.MODULE)).sum())
        last = chunks["offset"] + chunks["bytes"] == chunks["total"]
        known = chunks[last & np.isin(chunks["what"], (ChunkOf.CODE, ChunkOf.SHADER))]
        if totals.kernels is not None:
            totals.kernels.add_code(zip(known["address"].tolist(), known["size"].tolist(), strict=True))

    def read(self) -> None:
        """See Source: writes the debug ELFs that the collector has read."""
        while (answer := self._collector.read()) is not None:
            self._keep_elf(answer)
        if self._collector.fileno() != self._collector_fd and not self._loop.closed:  # its child was replaced
            self._loop.forget(self._collector_fd)
            self._wait_for_collector()

    def _keep_elf(self, answer: TakenElf | RefusedElf) -> None:
        compiled = answer.compiled
        path = compiled.path.decode("utf-8", "backslashreplace")
        if isinstance(answer, RefusedElf):
            detail = f"{path} of process {compiled.pid}: {answer.reason}"
            self._journal.loss("kernels", "refused", 1, detail, compiled.time_ns, compiled.time_ns)
            self._journal.inform(f"not taken: {detail}")
            return
        about = {"pid": compiled.pid, "path": path, "digest": answer.digest, "size": answer.size}
        about["content"] = answer.content is not None
        meta = json.dumps(about).encode()
        content = answer.content or b""
        self._journal.write(FrameKind.KERNEL, meta, content, time=compiled.time_ns, shape=len(meta))
        self._journal.totals.modules += 1
        if self._injection is not None:
            self._injection.remove_elf(compiled.path)
        self._journal.inform(f"took {path} of process {compiled.pid}: {answer.size:,} bytes")
        if (kernels := self._journal.totals.kernels) is not None and answer.content is not None:
            kernels.add_code(placed_ranges(answer.content))

    def begin_part(self, since_ns: int) -> None:
        """See Source: modules are written with their content again."""
        self._collector.forget_contents()
        self._chunk_bytes = 0

    def finish(self) -> None:
        """See Source."""
        deadline = time.monotonic() + COLLECTOR_WAIT_S
        while not self._collector.idle and time.monotonic() < deadline:
            self.read()
            time.sleep(0.001)
        for refused in self._collector.close():
            self._keep_elf(refused)

    @property
    def cpu_seconds(self) -> float:
        """See Source."""
        return self._collector.cpu_seconds
