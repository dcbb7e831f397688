"""One GT's EU-stall stream, read and kept whole.

Nothing is decoded here. The records of a read are kept as the two or three columns of 64-bit words that hold anything,
with the times of this read and of the previous one: the only times that stalls have.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from iaprof.gpu.intel.records import RECORD_BYTES, RecordLayout
from iaprof.record.sources import xe


class Subsample:
    """Chooses one of each N successive records at random: a periodic pattern in the stream distorts nothing."""

    def __init__(self, n: int, random: np.random.Generator | None = None) -> None:
        """Begins with the stream's first record.

        Args:
            n: one of so many records is kept; 1 keeps all.
            random: the source of randomness.
        """
        self._n = n
        self._random = random or np.random.default_rng()
        self._position = 0  # of the next record within its N
        self._chosen = self._choose(1)  # the position that is kept in that N

    def _choose(self, blocks: int) -> NDArray[np.int64]:
        return self._random.integers(0, self._n, blocks)

    def keep(self, count: int) -> NDArray[np.int64]:
        """Returns which of the next `count` records to keep: ascending indices, int64[about count / n]."""
        end = self._position + count
        blocks = -(-end // self._n)
        chosen = np.concatenate([self._chosen, self._choose(blocks - 1)]) if blocks > 1 else self._chosen
        places = np.arange(max(blocks, 1)) * self._n + chosen - self._position
        self._position = end % self._n
        self._chosen = chosen[-1:] if self._position or not count else self._choose(1)
        return places[(places >= 0) & (places < count)]


READ_BYTES = 4 << 20  # more than today's GPUs sample in 5 ms, after which the driver's next poll shows more
REOPEN_NS = 100_000_000
POLL_NS = 5_000_000  # between the driver's polls of the hardware's buffers: a read sees what the last poll saw


@dataclass(frozen=True)
class StallRead:
    """One read: columns of words, uint64[n] each, and the time in which the stalls happened (CLOCK_MONOTONIC ns)."""

    words: list[NDArray[np.uint64]]
    begin_ns: int
    time_ns: int


@dataclass(frozen=True)
class StallLoss:
    """Records were lost in this time; the hardware does not say how many."""

    what: str
    detail: str
    begin_ns: int
    time_ns: int


class StallStream:
    """A GT's stream. It reopens itself after a GPU reset."""

    def __init__(self, device: xe.Device, gt: xe.Gt, rate: int, layout: RecordLayout, subsample: int = 1) -> None:
        """Opens the stream; nothing is sampled before `resume`.

        Args:
            device: the GPU.
            gt: a GT of it.
            rate: GPU cycles between samples.
            layout: the layout of its records.
            subsample: keeps one of so many records.

        Raises:
            DeviceError: see xe.open_stream.
        """
        self.subsample = subsample
        self._subsample = Subsample(subsample) if subsample > 1 else None
        self._paused = True
        self.device, self.gt, self.rate, self.layout = device, gt, rate, layout
        self._overflow: StallLoss | None = None  # its time_ns is 0 until the hardware's buffers have been emptied
        self._buffer = np.empty((READ_BYTES // RECORD_BYTES, RECORD_BYTES // 8), np.uint64)
        self._view = self._buffer.data.cast("B")
        self._fd: int | None = xe.open_stream(device, gt, rate)
        self._begin_ns = self._start_ns = self._gap_from_ns = 0

    def _start(self) -> None:
        if self._fd is not None:
            xe.enable_stream(self._fd, self.device)
            self._start_ns = self._begin_ns = time.monotonic_ns()

    def pause(self) -> None:
        """Stops sampling; read what was sampled before."""
        self._paused = True
        if self._fd is not None:
            with contextlib.suppress(OSError):  # after a GPU reset, which `resume` handles
                xe.disable_stream(self._fd)

    def resume(self) -> StallLoss | None:
        """Starts sampling; returns a loss if that fails."""
        self._paused = False
        try:
            self._start()
        except xe.DeviceError:
            return self._gone(time.monotonic_ns(), errno.ENODEV)
        return None

    def fileno(self) -> int | None:
        """Returns a descriptor that is readable when records are; None while the stream has ended."""
        return self._fd

    def read(self) -> StallRead | StallLoss | None:
        """Makes one read; returns None if there is nothing more now.

        Call it until it returns None: each read makes the driver report the stream as unreadable, whatever is left.
        """
        if self._paused:
            return None
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
        count, rest = divmod(length, RECORD_BYTES)
        now = time.monotonic_ns()
        if rest:
            return StallLoss(
                "wrong length", f"{length:,} bytes, which are not whole records, were not read", begin, now
            )
        if count == 0:
            return None
        kept = self._buffer[:count] if self._subsample is None else self._buffer[self._subsample.keep(count)]
        return StallRead(self.layout.columns(kept), begin, now)

    def _seen_up_to(self, called: int) -> None:
        """Notes that what comes next was sampled after `called` less a poll: a read sees what the driver's poll saw."""
        self._begin_ns = max(self._start_ns, called - POLL_NS)
        if self._overflow is not None and not self._overflow.time_ns:
            # Only this read emptied the hardware's buffers: they may have dropped more until now.
            self._overflow = replace(self._overflow, time_ns=time.monotonic_ns())

    def _failed(self, error: OSError) -> StallRead | StallLoss | None:
        now = time.monotonic_ns()
        if error.errno == errno.EIO:
            # The stream has not ended: a buffer of the hardware was full. It does not count what it dropped.
            detail = "the hardware's buffers were full: it dropped records, and does not report how many"
            if self._overflow is None:
                self._overflow = StallLoss("overflow", detail, self._begin_ns, 0)
                return self.read()
            overflow, self._overflow = replace(self._overflow, time_ns=now), None
            return overflow
        return self._gone(now, error.errno or 0)

    def _gone(self, now: int, error: int) -> StallLoss:
        self._gap_from_ns, self._start_ns = self._begin_ns, now
        self.close()
        if error == errno.ENODEV:
            detail = "the GPU was reset or removed: its stream ended and is opened again"
            return StallLoss("reset", detail, self._gap_from_ns, now)
        detail = f"the stream ended ({os.strerror(error)}) and is opened again"
        return StallLoss("stream", detail, self._gap_from_ns, now)

    def _reopen(self) -> StallLoss | None:
        now = time.monotonic_ns()
        if now - self._start_ns < REOPEN_NS:
            return None
        self._start_ns = now
        try:
            if xe.pci_address(self.device.path) != self.device.pci_address:
                return None  # the render node belongs to another GPU now
            self._fd = xe.open_stream(self.device, self.gt, self.rate)
            self._start()
        except xe.DeviceError:
            self.close()
            return None
        return StallLoss(
            "gap", "nothing was sampled until the stream was open again", self._gap_from_ns, self._start_ns
        )

    def unfinished_gap(self) -> StallLoss | None:
        """Returns the loss for a stream that is still closed when the recording ends."""
        if self._fd is not None:
            return None
        exists = os.path.exists(self.device.path)
        detail = "nothing was sampled until the recording ended" + ("" if exists else ": the device vanished")
        return StallLoss("gap", detail, self._gap_from_ns, time.monotonic_ns())

    def close(self) -> None:
        """Closes the stream."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
