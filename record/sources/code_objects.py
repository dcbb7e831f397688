"""The source of GPU code: debug ELFs of what was compiled, and what BPF copied of kernels when they were launched."""

from __future__ import annotations

import json
import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from iaprof.formats.wire.launches import CHUNK, CHUNK_BYTES, ChunkOf
from iaprof.formats.zebin import placed_ranges
from iaprof.record.capture.journal import Journal
from iaprof.record.capture.spool import FrameKind
from iaprof.record.kernels.collector import MAX_TOTAL_BYTES, Intake, RefusedElf, TakenElf
from iaprof.record.loop import Loop
from iaprof.record.sources.source import Source

INTAKE_WAIT_S = 3.0
MIN_PIECE_BYTES = 4096  # that one counts as: who puts a million tiny ones together needs memory for each


class CodeObjects(Source):
    """The intake of debug ELFs, and the pieces of kernels and modules; Launches hands on what BPF sends of both."""

    def __init__(self, intake: Intake) -> None:
        self._intake = intake
        self._piece_bytes = 0
        self.on_taken: Callable[[bytes], None] = lambda _: None  # is told the path of each debug ELF that was taken

    def start(self, journal: Journal, loop: Loop) -> None:
        """See Source."""
        self._journal, self._loop = journal, loop
        self._wait_for_intake()

    def _wait_for_intake(self) -> None:
        self._intake_fd = self._intake.fileno()
        self._loop.wait_for(self._intake_fd, self.read)

    def ask(self, compiled: NDArray[np.void], now: int) -> None:
        """Has the debug ELFs taken of modules that were compiled: COMPILED[n]."""
        refused = self._intake.ask(compiled)
        if refused:
            self._journal.loss("kernels", "refused", refused, "too many were compiled at once", now, now)

    def keep_pieces(self, pieces: NDArray[np.void], now: int) -> None:
        """Writes down CHUNK[n] without the room that they do not use: kernels are described once each."""
        if not len(pieces):
            return
        self._piece_bytes += int(np.maximum(pieces["bytes"], MIN_PIECE_BYTES).sum())
        if self._piece_bytes > MAX_TOTAL_BYTES:
            detail = f"{MAX_TOTAL_BYTES >> 30} GiB of kernels were taken already"
            self._journal.loss("kernels", "refused", len(pieces), detail, now, now)
            return
        rows = pieces.view("u1").reshape(len(pieces), -1)
        ends = pieces["bytes"] + CHUNK.itemsize - CHUNK_BYTES
        for row, end in zip(rows, ends.tolist(), strict=True):
            self._journal.write(FrameKind.PIECE, row[:end].data, time=now)
        totals = self._journal.totals
        first = pieces["offset"] == 0
        totals.modules += int((first & (pieces["what"] == ChunkOf.MODULE)).sum())
        last = pieces["offset"] + pieces["bytes"] == pieces["total"]
        known = pieces[last & (pieces["what"] == ChunkOf.CODE)]
        if totals.kernels is not None:
            totals.kernels.add_code(zip(known["address"].tolist(), known["size"].tolist(), strict=True))

    def read(self) -> None:
        """See Source: takes the debug ELFs that were read meanwhile."""
        while (answer := self._intake.read()) is not None:
            self._keep_elf(answer)
        if self._intake.fileno() != self._intake_fd and not self._loop.closed:  # its child was replaced
            self._loop.forget(self._intake_fd)
            self._wait_for_intake()

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
        self._journal.write(FrameKind.KERNEL, meta, content, time=compiled.time_ns, part=len(meta))
        self._journal.totals.modules += 1
        self.on_taken(compiled.path)
        self._journal.inform(f"took {path} of process {compiled.pid}: {answer.size:,} bytes")
        if (kernels := self._journal.totals.kernels) is not None and answer.content is not None:
            kernels.add_code(placed_ranges(answer.content))

    def begin_part(self, since_ns: int) -> None:
        """See Source: modules whose content was written come with it again."""
        self._intake.forget_contents()
        self._piece_bytes = 0

    def finish(self) -> None:
        """See Source."""
        deadline = time.monotonic() + INTAKE_WAIT_S
        while not self._intake.idle and time.monotonic() < deadline:
            self.read()
            time.sleep(0.001)
        for refused in self._intake.close():
            self._keep_elf(refused)

    @property
    def cpu_seconds(self) -> float:
        """See Source."""
        return self._intake.cpu_seconds

    def close(self) -> None:
        """Ends the intake's child."""
        self._intake.close()
