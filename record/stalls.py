"""The source of EU stalls: one GT's stream, read whole and kept whole.

Nothing is decoded here. A read's records are kept as the two or three columns of 64-bit words that hold anything,
with the time of the read and of the one before: the only times that stalls have.
"""

from __future__ import annotations

import errno
import os
import time
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from iaprof.formats.stalls import RECORD_BYTES, Layout, significant_words
from iaprof.record import xe

READ_BYTES = 4 << 20  # more than becomes visible in one of the driver's 5 ms polls on the GPUs there are
REOPEN_NS = 100_000_000
POLL_NS = 5_000_000  # the driver looks this often at what the hardware wrote: until then a read does not see it


@dataclass(frozen=True)
class StallRead:
    """One read: words uint64[n] by column, and the span in which the stalls happened (CLOCK_MONOTONIC, ns)."""

    words: list[NDArray[np.uint64]]
    begin_ns: int
    time_ns: int


@dataclass(frozen=True)
class StallLoss:
    """Something of the stream was lost in this span; how much, the hardware does not say."""

    what: str
    detail: str
    begin_ns: int
    time_ns: int


class StallStream:
    """A GT's stream. After a GPU reset it opens itself again."""

    def __init__(self, device: xe.Device, gt: xe.Gt, rate: int, layout: Layout) -> None:
        """Opens it; nothing is sampled yet.

        Args:
            device: whose.
            gt: of that device.
            rate: GPU cycles between samples.
            layout: of its records.

        Raises:
            DeviceError: see xe.open_stream.
        """
        self.device, self.gt, self.rate, self.layout = device, gt, rate, layout
        self._overflow: StallLoss | None = None  # its time is 0 until the buffers were emptied
        self._buffer = np.empty((READ_BYTES // RECORD_BYTES, RECORD_BYTES // 8), np.uint64)
        self._view = self._buffer.data.cast("B")
        self._fd: int | None = xe.open_stream(device, gt, rate)
        self._begin_ns = self._start_ns = self._gap_from_ns = 0

    def start(self) -> None:
        """Begins to sample.

        Raises:
            DeviceError: the driver refuses.
        """
        if self._fd is not None:
            xe.enable_stream(self._fd, self.device)
            self._start_ns = self._begin_ns = time.monotonic_ns()

    def fileno(self) -> int | None:
        """Readable when records are; None while the stream is gone."""
        return self._fd

    def read(self) -> StallRead | StallLoss | None:
        """What one system call gives; None when there is nothing more now.

        To be called until it gives None: each read clears the driver's readiness, whatever is left.
        """
        if self._fd is None:
            return self._reopen()
        if self._overflow is not None and self._overflow.time_ns:
            overflow, self._overflow = self._overflow, None
            return overflow
        called = time.monotonic_ns()
        try:
            length = os.readv(self._fd, [self._view])
        except BlockingIOError:
            self._seen_up_to(called)
            return None
        except OSError as error:
            return self._failed(error)
        begin = self._begin_ns
        self._seen_up_to(called)
        count = length // RECORD_BYTES
        if count == 0:
            return None
        return StallRead(significant_words(self._buffer[:count], self.layout), begin, time.monotonic_ns())

    def _seen_up_to(self, called: int) -> None:
        """What comes next was sampled after this: a read takes the buffers in turn, and sees what the driver saw."""
        self._begin_ns = max(self._start_ns, called - POLL_NS)
        if self._overflow is not None and not self._overflow.time_ns:
            # It is this read that emptied the buffers: up to now they may have dropped more.
            self._overflow = replace(self._overflow, time_ns=time.monotonic_ns())

    def _failed(self, error: OSError) -> StallRead | StallLoss | None:
        now = time.monotonic_ns()
        if error.errno == errno.EIO:
            # Not an end: a buffer of the hardware was full. What it dropped, it does not count.
            detail = "the hardware's buffers were full: it dropped records, how many it does not say"
            if self._overflow is None:
                self._overflow = StallLoss("overflow", detail, self._begin_ns, 0)
                return self.read()
            overflow, self._overflow = replace(self._overflow, time_ns=now), None
            return overflow
        self._gap_from_ns, self._start_ns = self._begin_ns, now
        self.close()
        if error.errno == errno.ENODEV:
            return StallLoss("reset", "the GPU was reset: its stream ended and is opened again", self._gap_from_ns, now)
        return StallLoss("stream", f"the stream ended ({error.strerror}) and is opened again", self._gap_from_ns, now)

    def _reopen(self) -> StallLoss | None:
        now = time.monotonic_ns()
        if now - self._start_ns < REOPEN_NS:
            return None
        self._start_ns = now
        try:
            self._fd = xe.open_stream(self.device, self.gt, self.rate)
            self.start()
        except xe.DeviceError:
            self.close()
            return None
        return StallLoss(
            "gap", "nothing was sampled until the stream was open again", self._gap_from_ns, self._start_ns
        )

    def unfinished_gap(self) -> StallLoss | None:
        """The gap that is still open when the recording ends."""
        if self._fd is not None:
            return None
        detail = "nothing was sampled until the recording ended"
        return StallLoss("gap", detail, self._gap_from_ns, time.monotonic_ns())

    def close(self) -> None:
        """Ends sampling."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
