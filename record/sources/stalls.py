"""The source of EU stalls: a stream for each main GT, also of GPUs that appear later.

Nothing is decoded here. The records of a read are kept as the two or three columns of 64-bit words that hold anything,
with the times of this read and of the previous one: the only times that stalls have.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from iaprof.basics.errors import UsageError
from iaprof.gpu.intel.records import RECORD_BYTES, RecordLayout
from iaprof.record.journal import Journal
from iaprof.record.loop import Loop
from iaprof.record.options import Options
from iaprof.record.sources import intel, render_nodes
from iaprof.record.sources.i915_metrics import I915Gt
from iaprof.record.sources.intel_metrics import IntelGt
from iaprof.record.sources.render_nodes import DeviceError
from iaprof.record.sources.source import Sampler
from iaprof.record.sources.stall_driver import POLL_NS, Device, Gt
from iaprof.record.sources.xe_metrics import XeGt
from iaprof.record.spool import FrameKind

TURN_NS = 10_000_000  # of one stream's reads, before the other streams' turns
RETRY_NS = 100_000_000  # between two attempts to open a stream again
DEVICE_CHECK_NS = 1_000_000_000  # between two checks for GPUs that appeared
LAST_READS_S = 2.0  # of the reads at the end: a GPU that samples faster than we read would never let us end

_METERED: dict[str, type[IntelGt]] = {"xe": XeGt, "i915": I915Gt}  # by the driver's name


class Stalls(Sampler):
    """All streams, read in turn."""

    def __init__(self, options: Options) -> None:
        """Opens the streams; nothing is sampled yet.

        Raises:
            DeviceError: there is no stream to record; the text says why.
            UsageError: there is no such device or rate.
        """
        self._options = options
        self.streams: list[StallStream] = []
        self.problems: list[str] = []  # why an existing GT is not recorded
        self._paused = False
        self._gone: set[StallStream] = set()  # ended streams that are tried again
        self._known = set(render_nodes.render_nodes())
        devices, self.problems = intel.find_devices()
        try:
            for device in intel.choose(devices, options.devices):
                self.problems += self._open(device)
        except BaseException:
            self.close()
            raise
        if not self.streams:
            raise DeviceError("; ".join(self.problems))

    def _open(self, device: Device) -> list[str]:
        """Opens the streams of a device; returns why some could not be opened."""
        problems = []
        rate = intel.pick_rate(device, self._options.rate)
        for gt in device.gts:
            try:
                layout = device.layout(gt)
                self.streams.append(StallStream(device, gt, rate, layout, self._options.subsample))
            except DeviceError as error:
                problems.append(str(error))
        return problems

    def header(self) -> dict[str, Any]:
        """See Source: all other rows refer to a stream by its index in this list."""
        return {"streams": [_describe(stream) for stream in self.streams]}

    def metered(self) -> list[IntelGt]:
        """See Sampler."""
        return [
            _METERED[stream.device.driver](index, stream.device, stream.gt) for index, stream in enumerate(self.streams)
        ]

    def start(self, journal: Journal, loop: Loop) -> None:
        """See Source."""
        self._journal, self._loop = journal, loop
        self._paused = True
        now = time.monotonic_ns()
        for problem in self.problems:
            self._not_recorded(problem, now)
        self._warn_of_guesses(self.streams)
        for stream in self.streams:
            self._wait_for(stream)
        loop.every(DEVICE_CHECK_NS, self._check_devices)

    def _not_recorded(self, problem: str, now: int) -> None:
        self._journal.loss("devices", "not recorded", None, problem, now, now)
        self._journal.warn(f"not recorded: {problem}")

    def _warn_of_guesses(self, streams: Iterable[StallStream]) -> None:
        """Warns of guessed record layouts, once for each GPU; the capture's header has it for each stream."""
        for guess in dict.fromkeys(stream.device.guess(stream.gt) for stream in streams):
            if guess:
                self._journal.warn(guess)

    def resume(self) -> None:
        """See Source."""
        self._paused = False
        for stream in self.streams:
            fd = stream.fileno()
            if loss := stream.resume():
                if fd is not None:
                    self._loop.forget(fd)
                self._write_loss(stream, loss)

    def pause(self) -> None:
        """See Source."""
        for stream in self.streams:
            self._read_to_the_end(stream)
            stream.pause()
        self._paused = True

    def _wait_for(self, stream: StallStream) -> None:
        fd = stream.fileno()
        if fd is not None:
            self._loop.wait_for(fd, functools.partial(self._read, stream))

    def _read(self, stream: StallStream) -> None:
        """Reads until nothing is left, or until the other streams' turns.

        The loop must be told of the rest: every read makes the driver report the stream as unreadable.
        """
        old_fd = stream.fileno()
        turn_ends = time.monotonic_ns() + TURN_NS
        self._loop.keep_calling(stream, functools.partial(self._read, stream))
        index = self.streams.index(stream)
        while time.monotonic_ns() < turn_ends:
            answer = stream.read()
            if answer is None:
                self._loop.stop_calling(stream)
                break
            if isinstance(answer, StallRead):
                self._journal.totals.records += len(answer.words[0])
                columns = [words.data for words in answer.words]
                self._journal.write(
                    FrameKind.STALLS,
                    *columns,
                    time=answer.time_ns,
                    begin=answer.begin_ns,
                    source=index,
                    shape=len(columns),
                )
                continue
            if old_fd is not None and stream.fileno() != old_fd:
                self._loop.forget(old_fd)
            self._write_loss(stream, answer)
            if stream.fileno() != old_fd and not self._loop.closed:
                self._wait_for(stream)
                old_fd = stream.fileno()

    def _write_loss(self, stream: StallStream, loss: StallLoss) -> None:
        source = f"stalls of {stream.device.path} GT {stream.gt.id}"
        self._journal.loss(source, loss.what, None, loss.detail, loss.begin_ns, loss.time_ns)
        if loss.what != "overflow":  # there may be thousands of these
            self._journal.warn(f"{source}: {loss.detail}")
        if stream.fileno() is None and stream not in self._gone:
            self._gone.add(stream)
            self._retry(stream)

    def _notice_reset(self, stream: StallStream) -> None:
        fd = stream.fileno()
        if fd is not None and not self._paused and (loss := stream.reset_meanwhile()):
            self._loop.forget(fd)
            self._write_loss(stream, loss)

    def _retry(self, stream: StallStream) -> None:
        if stream.fileno() is not None:
            self._gone.discard(stream)
            return
        self._loop.at(time.monotonic_ns() + RETRY_NS, functools.partial(self._retry, stream))
        self._read(stream)

    def _check_devices(self) -> None:
        for stream in self.streams:  # in case the driver did not report something
            self._read(stream)
            self._notice_reset(stream)
        nodes = set(render_nodes.render_nodes())
        for gone in self._known - nodes:
            self._journal.warn(f"{gone} vanished")
        new, self._known = nodes - self._known, nodes
        for path in sorted(new):
            self._add_device(path)

    def _add_device(self, path: str) -> None:
        now = time.monotonic_ns()
        try:
            device = intel.open_device(path)
        except DeviceError as error:
            self._not_recorded(str(error), now)
            return
        if not intel.is_chosen(device, self._options.devices):
            return
        if any(stream.device.pci_address == device.pci_address for stream in self.streams):
            return  # its streams reopen themselves
        first = len(self.streams)
        try:
            problems = self._open(device)
        except UsageError as error:  # the new device does not have the rate
            problems = [str(error)]
        for problem in problems:
            self._not_recorded(problem, now)
        self._warn_of_guesses(self.streams[first:])
        for stream in self.streams[first:]:
            self._journal.append("streams", _describe(stream))
            self._journal.warn(f"{path} appeared: its GT {stream.gt.id} is recorded too")
            self._wait_for(stream)
            if self._paused:
                stream.pause()
            elif loss := stream.resume():
                self._write_loss(stream, loss)

    def stop(self) -> None:
        """See Source."""
        for stream in self.streams:
            self._read_to_the_end(stream)
            self._notice_reset(stream)
            for loss in stream.unfinished():
                self._write_loss(stream, loss)
            stream.close()

    def _read_to_the_end(self, stream: StallStream) -> None:
        deadline = time.monotonic() + LAST_READS_S
        is_unfinished = True
        while is_unfinished and time.monotonic() < deadline:
            self._read(stream)
            is_unfinished = self._loop.is_calling(stream)
        if is_unfinished:
            self._loop.stop_calling(stream)
            now = time.monotonic_ns()
            detail = "more came than could be read when sampling ended"
            self._write_loss(stream, StallLoss("unread", detail, now, now))

    def close(self) -> None:
        """Closes all streams."""
        for stream in self.streams:
            stream.close()


def _describe(stream: StallStream) -> dict[str, Any]:
    device, gt = stream.device, stream.gt
    return {
        "driver": device.driver,
        "device": device.path,
        "card": device.card,
        "name": device.name,
        "pci_address": device.pci_address,
        "device_id": device.device_id,
        "revision": device.revision,
        "gt": gt.id,
        "tile": gt.tile,
        "xecores": gt.xecores,
        "ip_version": list(gt.ip_version),
        "layout": stream.layout.name,
        "layout_guessed": bool(device.guess(gt)),
        "rate_cycles": stream.rate,
        "subsample": stream.subsample,
        "xecore_buffer_bytes": device.xecore_buffer_bytes,
    }


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

    def __init__(self, device: Device, gt: Gt, rate: int, layout: RecordLayout, subsample: int = 1) -> None:
        """Opens the stream; nothing is sampled before `resume`.

        Args:
            device: the GPU.
            gt: a GT of it.
            rate: GPU cycles between samples.
            layout: the layout of its records.
            subsample: keeps one of so many records.

        Raises:
            DeviceError: see Driver.open_stream.
        """
        self.subsample = subsample
        self._subsample = Subsample(subsample) if subsample > 1 else None
        self._paused = True
        self.device, self.gt, self.rate, self.layout = device, gt, rate, layout
        self._overflow: StallLoss | None = None  # its time_ns is 0 until the hardware's buffers have been emptied
        self._buffer = np.empty((READ_BYTES // RECORD_BYTES, RECORD_BYTES // 8), np.uint64)
        self._view = self._buffer.data.cast("B")
        self._driver = intel.driver_of(device)
        self._fd: int | None = self._driver.open_stream(device, gt, rate)
        self._begin_ns = self._start_ns = self._gap_from_ns = 0
        self._emptied_ns = 0  # what the hardware dropped before this was told by reads until the last one found nothing
        self._resets, self._asked_ns = self._driver.resets(device, gt), 0  # how many, when that was asked last

    def _start(self, is_new: bool = False) -> None:
        if self._fd is None:
            return
        self._driver.enable_stream(self._fd, self.device)
        self._start_ns = self._asked_ns = time.monotonic_ns()
        if is_new or not self._begin_ns or not self._driver.keeps_unread:
            self._begin_ns = self._emptied_ns = self._start_ns

    def pause(self) -> None:
        """Stops sampling; read what was sampled before."""
        self._paused = True
        if self._fd is not None:
            with contextlib.suppress(OSError):  # after a GPU reset, which `resume` handles
                self._driver.disable_stream(self._fd)

    def resume(self) -> StallLoss | None:
        """Starts sampling; returns a loss if that fails."""
        self._paused = False
        if loss := self.reset_meanwhile():
            return loss
        try:
            self._start()
        except DeviceError:
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
            self._emptied_ns = self._begin_ns
            return None
        except OSError as error:
            return self._failed(error)
        begin = self._begin_ns
        self._seen_up_to(called)
        count, rest = divmod(length, RECORD_BYTES)
        now = time.monotonic_ns()
        if xecores := self._driver.dropping(self._buffer[:count]):
            self._overflow = StallLoss("overflow", _full(xecores), self._emptied_ns, now)
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
        if called - POLL_NS >= self._start_ns or not self._driver.keeps_unread:
            self._begin_ns = max(self._start_ns, called - POLL_NS)
        if self._overflow is not None and not self._overflow.time_ns:
            # Only this read emptied the hardware's buffers: they may have dropped more until now.
            self._overflow = replace(self._overflow, time_ns=time.monotonic_ns())

    def _failed(self, error: OSError) -> StallRead | StallLoss | None:
        now = time.monotonic_ns()
        if error.errno == self._driver.overflow_errno:
            # The stream has not ended: a buffer of the hardware was full. It does not count what it dropped.
            if self._overflow is None:
                self._overflow = StallLoss("overflow", _full(()), self._begin_ns, 0)
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
            if render_nodes.pci_address(self.device.path) != self.device.pci_address:
                return None  # the render node belongs to another GPU now
            self._fd = self._driver.open_stream(self.device, self.gt, self.rate)
            self._resets = self._driver.resets(self.device, self.gt)
            self._start(is_new=True)
        except DeviceError:
            self.close()
            return None
        return StallLoss(
            "gap", "nothing was sampled until the stream was open again", self._gap_from_ns, self._start_ns
        )

    def reset_meanwhile(self) -> StallLoss | None:
        """Ends the stream if the driver has counted a reset since the last call, as reads do not tell of it."""
        now = time.monotonic_ns()
        resets = self._driver.resets(self.device, self.gt)
        if self._fd is None or resets is None or self._resets is None or resets == self._resets:
            self._asked_ns, self._resets = now, resets
            return None
        self._begin_ns = min(self._begin_ns or now, self._asked_ns or now)
        return self._gone(now, errno.ENODEV)

    def unfinished(self) -> Iterator[StallLoss]:
        """Yields the losses that are still to be told when the recording ends."""
        if self._overflow is not None:
            yield replace(self._overflow, time_ns=self._overflow.time_ns or time.monotonic_ns())
        if self._fd is None:
            exists = os.path.exists(self.device.path)
            detail = "nothing was sampled until the recording ended" + ("" if exists else ": the device vanished")
            yield StallLoss("gap", detail, self._gap_from_ns, time.monotonic_ns())

    def close(self) -> None:
        """Closes the stream."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def _full(xecores: Sequence[int]) -> str:
    """Returns what an overflow is, in words; without XeCores, the driver does not say whose it is."""
    runs: list[list[int]] = []
    for xecore in xecores:
        if runs and xecore == runs[-1][-1] + 1:
            runs[-1][1:] = [xecore]
        else:
            runs.append([xecore])
    named = ", ".join("-".join(map(str, run)) for run in runs)
    of = f" of XeCore{'s' if len(xecores) > 1 else ''} {named}" if xecores else ""
    return f"the hardware's buffers{of} were full: it dropped records, and does not report how many"
