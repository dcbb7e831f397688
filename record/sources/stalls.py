"""The source of EU stalls: a stream for each main GT, also of GPUs that appear later."""

from __future__ import annotations

import functools
import time
from collections.abc import Iterable
from typing import Any

from iaprof.basics.errors import UsageError
from iaprof.record.journal import Journal
from iaprof.record.loop import Loop
from iaprof.record.options import Options
from iaprof.record.sources import xe
from iaprof.record.sources.metrics import MeteredGt
from iaprof.record.sources.sampler import Sampler
from iaprof.record.sources.stall_stream import StallLoss, StallRead, StallStream
from iaprof.record.spool import FrameKind

TURN_NS = 10_000_000  # of one stream's reads, before the other streams' turns
RETRY_NS = 100_000_000  # between two attempts to open a stream again
DEVICE_CHECK_NS = 1_000_000_000  # between two checks for GPUs that appeared
LAST_READS_S = 2.0  # of the reads at the end: a GPU that samples faster than we read would never let us end


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
        self.on_new_gt = lambda _: None
        self._paused = False
        self._gone: set[StallStream] = set()  # ended streams that are tried again
        self._known = set(xe.render_nodes())
        devices, self.problems = xe.find_devices()
        try:
            for device in xe.choose(devices, options.devices):
                self.problems += self._open(device)
        except BaseException:
            self.close()
            raise
        if not self.streams:
            raise xe.DeviceError("; ".join(self.problems))

    def _open(self, device: xe.Device) -> list[str]:
        """Opens the streams of a device; returns why some could not be opened."""
        problems = []
        rate = xe.pick_rate(device, self._options.rate)
        for gt in device.gts:
            try:
                layout = device.layout(gt)
                self.streams.append(StallStream(device, gt, rate, layout, self._options.subsample))
            except xe.DeviceError as error:
                problems.append(str(error))
        return problems

    def header(self) -> dict[str, Any]:
        """See Source: all other rows refer to a stream by its index in this list."""
        return {"streams": [_describe(stream) for stream in self.streams]}

    def gts(self) -> list[MeteredGt]:
        """See Sampler."""
        return [MeteredGt(index, stream.device, stream.gt) for index, stream in enumerate(self.streams)]

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
            if loss := stream.resume():
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
                    part=len(columns),
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

    def _retry(self, stream: StallStream) -> None:
        if stream.fileno() is not None:
            self._gone.discard(stream)
            return
        self._loop.at(time.monotonic_ns() + RETRY_NS, functools.partial(self._retry, stream))
        self._read(stream)

    def _check_devices(self) -> None:
        for stream in self.streams:  # in case the driver did not report something
            self._read(stream)
        nodes = set(xe.render_nodes())
        for gone in self._known - nodes:
            self._journal.warn(f"{gone} vanished")
        new, self._known = nodes - self._known, nodes
        for path in sorted(new):
            self._add_device(path)

    def _add_device(self, path: str) -> None:
        now = time.monotonic_ns()
        try:
            device = xe.open_device(path)
        except xe.DeviceError as error:
            self._not_recorded(str(error), now)
            return
        if not xe.is_chosen(device, self._options.devices):
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
        for stream, metered in zip(self.streams[first:], self.gts()[first:], strict=True):
            self._journal.append("streams", _describe(stream))
            self._journal.warn(f"{path} appeared: its GT {stream.gt.id} is recorded too")
            self._wait_for(stream)
            self.on_new_gt(metered)
            if self._paused:
                stream.pause()
            elif loss := stream.resume():
                self._write_loss(stream, loss)

    def stop(self) -> None:
        """See Source."""
        for stream in self.streams:
            self._read_to_the_end(stream)
            if gap := stream.unfinished_gap():
                self._write_loss(stream, gap)
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
