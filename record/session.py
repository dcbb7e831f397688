"""A recording: one loop over the sources, no threads, nothing decoded, everything to the spool.

The loop wakes when a stream has stalls, when a module was compiled or a library mapped, when a ring buffer fills, and
otherwise once in TICK_NS to empty them all.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import platform
import resource
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import iaprof
from iaprof.bpf.launches import LaunchProbes, Sizes
from iaprof.bpf.libraries import SYSTEM_FOLDERS, Outcome
from iaprof.bpf.perf_event import online_cpus
from iaprof.bpf.processes import snapshot
from iaprof.bpf.sideband import SideBandBuffers
from iaprof.formats.errors import IaprofError
from iaprof.formats.launches import Counter
from iaprof.formats.sideband import mapped_paths
from iaprof.record import xe
from iaprof.record.intake import Intake, RefusedElf, TakenElf
from iaprof.record.signals import StopSignals
from iaprof.record.spool import FrameKind, Spool
from iaprof.record.stalls import StallLoss, StallRead, StallStream

TICK_NS = 250_000_000  # what a killed recorder has not yet written is no older than this
GONE_TICK_NS = 100_000_000  # while a stream waits to be opened again
COUNTERS_EVERY_NS = 1_000_000_000
SIDEBAND_REST_NS = 10_000_000
TURN_NS = 10_000_000  # of one stream's reads, or of looking for libraries, before the others get theirs
DRAIN_S = 0.02  # four of the driver's 5 ms polls: what was sampled last becomes visible
LAST_READS_S = 2.0  # a GPU that samples faster than we read would never let us end
COMMAND_WAIT_S = 1.0
INTAKE_WAIT_S = 3.0
_LIBRARY = b"libze_intel_gpu.so"

_LOSSES = {
    Counter.LAUNCHES_LOST: ("launches", "lost", "no room in the ring buffer"),
    Counter.BAD_ARGS: ("launches", "unreadable", "the probe's arguments could not be read"),
    Counter.STACKS_LOST: ("stacks", "lost", "no room in the ring buffer; those launches have no stack"),
    Counter.STACKS_FAILED: ("stacks", "failed", "the kernel could not walk them; those launches have no stack"),
    Counter.COMPILED_LOST: ("kernels", "lost", "a module was compiled whose path could not be kept"),
}


@dataclass(frozen=True)
class Options:
    """What to record."""

    output: Path
    command: tuple[str, ...] = ()
    duration_s: float | None = None
    sizes: Sizes = field(default_factory=Sizes)


class Session:
    """One recording, from the opened devices to the closed spool."""

    def __init__(self, options: Options, signals: StopSignals) -> None:
        """Opens everything that can fail, before anything is started.

        Args:
            options: what to record.
            signals: when to end.

        Raises:
            Interrupted: a signal came meanwhile.
            IaprofError: no device, no permission, no BPF, no room: what to do stands in it.
        """
        self._options = options
        self._signals = signals
        self._command: subprocess.Popen[bytes] | None = None
        self._unread: set[StallStream] = set()
        self._mapping: dict[int, None] = {}  # processes that mapped a library, in order
        self._libraries: list[dict[str, Any]] = []
        self._last_counters: dict[Counter, int] = dict.fromkeys(Counter, 0)
        self._counters_ns = self._tick_ns = time.monotonic_ns()
        self._sideband_due_ns = 0  # when to wait for it again; 0 while we do
        self._opened = contextlib.ExitStack()
        try:
            self._open()
        except BaseException:
            self._opened.close()
            raise

    def _open(self) -> None:
        self._streams = self._open_streams()
        self._signals.check()
        self._intake = Intake()  # before BPF's compiler makes this process large
        self._opened.callback(self._intake.close)
        self._signals.check()
        self._probes = LaunchProbes(self._options.sizes)
        self._opened.callback(self._probes.close)
        self._signals.check()
        try:
            self._sideband = SideBandBuffers()
        except OSError as error:
            raise IaprofError(
                f"the machine's mappings and processes cannot be watched (perf_event_open: {error.strerror}): "
                "run iaprof with sudo, or set kernel.perf_event_paranoid to -1"
            ) from error
        self._opened.callback(self._sideband.close)
        self.spool = Spool(spool_path(self._options.output))

    def _open_streams(self) -> list[StallStream]:
        devices, problems = xe.find_devices()
        streams: list[StallStream] = []
        for device in devices:
            for gt in device.gts:
                try:
                    streams.append(StallStream(device, gt, device.rates[-1], device.layout(gt)))
                except xe.DeviceError as error:
                    problems.append(str(error))
                else:
                    self._opened.callback(streams[-1].close)
        if not streams:
            raise IaprofError("; ".join(problems))
        self._not_recorded = problems
        return streams

    def run(self) -> int:
        """Records until the command ends, the time is over or a signal comes.

        Returns:
            The exit code of the command; 0 without one.

        Raises:
            Interrupted: a signal came before it began; there is no spool.
            IaprofError: the command cannot be started, and there is no spool; or the disk is full or the like, and the
                spool holds what came before.
        """
        with self._opened:
            started = time.monotonic_ns()
            try:
                self._begin(started)
            except BaseException:
                self.spool.close()
                self.spool.remove()
                raise
            self._signals.farewell = self._farewell
            self._loop(started)
            self._end()
            return self._command_status()

    def _begin(self, started: int) -> None:
        self._write_json(FrameKind.HEADER, self._header(started))
        self.spool.write(FrameKind.SIDEBAND, snapshot(), time=time.monotonic_ns())
        self._took(self._probes.libraries.installed(self._library_folders()))
        self._took(self._probes.libraries.running())
        for problem in self._not_recorded:
            self._loss("devices", "not recorded", None, problem, started, started)
        for stream in self._streams:
            stream.start()
        if self._options.command:
            self._signals.check()
            self._start_command()

    # The loop

    def _loop(self, started: int) -> None:
        end_ns = started + int(self._options.duration_s * 1e9) if self._options.duration_s else None
        readers: dict[int, Callable[[], None]] = {}
        with select.epoll() as epoll:
            self._epoll, self._readers = epoll, readers
            self._wait_for(self._signals.fileno(), self._signals.clear)
            for stream in self._streams:
                self._wait_for_stream(stream)
            # Told once per wake-up that a program asked for. Else we would be woken by each launch that comes while
            # we read those before it.
            for ring in (self._probes.launches, self._probes.stacks, self._probes.compiled):
                self._wait_for(ring.fileno(), self._read_rings, select.EPOLLET)
            self._wait_for(self._sideband.fileno(), self._rest_sideband, select.EPOLLONESHOT)
            self._read_sideband()
            self._wait_for_intake()
            while not self._signals.count:
                now = time.monotonic_ns()
                if end_ns and now >= end_ns:
                    break
                if 0 < self._sideband_due_ns <= now:
                    self._watch_sideband()
                for fd, _ in epoll.poll(self._seconds_to_wait(now, end_ns)):
                    if reader := readers.get(fd):  # one of the others may have taken it away
                        reader()
                for stream in list(self._unread):
                    self._read_stalls(stream)
                self._attach_libraries()
                if time.monotonic_ns() - self._tick_ns >= self._tick_length():
                    self._tick()
                if self._command is not None and self._command.poll() is not None:
                    break

    def _wait_for(self, fd: int, reader: Callable[[], None], how: int = 0) -> None:
        self._epoll.register(fd, select.EPOLLIN | how)
        self._readers[fd] = reader

    def _wait_for_stream(self, stream: StallStream) -> None:
        fd = stream.fileno()
        if fd is not None:
            self._wait_for(fd, functools.partial(self._read_stalls, stream))

    def _tick_length(self) -> int:
        return GONE_TICK_NS if any(stream.fileno() is None for stream in self._streams) else TICK_NS

    def _seconds_to_wait(self, now: int, end_ns: int | None) -> float:
        if self._unread or self._mapping:
            return 0
        due = self._tick_ns + self._tick_length()
        if end_ns:
            due = min(due, end_ns)
        if self._sideband_due_ns:
            due = min(due, self._sideband_due_ns)
        return max(0, due - now) / 1e9

    def _rest_sideband(self) -> None:
        """Reads, and looks away for a moment: a busy machine maps and forks without end, and each one wakes us."""
        self._read_sideband()
        self._sideband_due_ns = time.monotonic_ns() + SIDEBAND_REST_NS

    def _watch_sideband(self) -> None:
        """Waits for the side-band again after its rest."""
        self._sideband_due_ns = 0
        self._epoll.modify(self._sideband.fileno(), select.EPOLLIN | select.EPOLLONESHOT)
        # perf tells of records once, and this has asked: what came during the rest is read now.
        self._read_sideband()

    def _tick(self) -> None:
        for stream in self._streams:
            self._read_stalls(stream)
        self._read_rings()
        self._read_sideband()
        self._read_intake()
        now = self._tick_ns = time.monotonic_ns()
        if now - self._counters_ns >= COUNTERS_EVERY_NS:
            self._read_counters()

    def _wait_for_intake(self) -> None:
        self._intake_fd = self._intake.fileno()
        self._wait_for(self._intake_fd, self._read_intake)

    # The sources

    def _read_stalls(self, stream: StallStream) -> None:
        """Reads until there is nothing more, or until the turn is over: then the stream is in `_unread`.

        It has to be remembered, as every read makes the driver forget that the stream was readable.
        """
        index = self._streams.index(stream)
        before = stream.fileno()
        turn_ends = time.monotonic_ns() + TURN_NS
        self._unread.add(stream)
        while time.monotonic_ns() < turn_ends:
            got = stream.read()
            if got is None:
                self._unread.discard(stream)
                break
            if isinstance(got, StallRead):
                columns = [words.data for words in got.words]
                self.spool.write(
                    FrameKind.STALLS, *columns, time=got.time_ns, begin=got.begin_ns, source=index, part=len(columns)
                )
                continue
            self._stall_loss(stream, got)
            if stream.fileno() != before and not self._epoll.closed:
                if before is not None:  # its descriptor is closed, and so no longer waited for
                    self._readers.pop(before, None)
                self._wait_for_stream(stream)
                before = stream.fileno()

    def _stall_loss(self, stream: StallStream, loss: StallLoss) -> None:
        source = f"stalls of {stream.device.path} GT {stream.gt.id}"
        self._loss(source, loss.what, None, loss.detail, loss.begin_ns, loss.time_ns)

    def _read_rings(self) -> None:
        # In this order: a launch's stack was sent before it, so all that these launches name will be there.
        launches = self._probes.launches.read()
        stacks = self._probes.stacks.read()
        now = time.monotonic_ns()
        if len(stacks):
            payload = stacks.view("u1").data
            self.spool.write(FrameKind.STACKS, payload, time=now, part=self._probes.depth)
        if len(launches):
            self.spool.write(FrameKind.LAUNCHES, launches.view("u1").data, time=now)
        compiled = self._probes.compiled.read()
        if len(compiled):
            refused = self._intake.ask(compiled)
            if refused:
                self._loss("kernels", "refused", refused, "too many were compiled at once", now, now)

    def _read_intake(self) -> None:
        while (answer := self._intake.read()) is not None:
            self._keep_elf(answer)
        if self._intake.fileno() != self._intake_fd and not self._epoll.closed:  # its child was replaced
            del self._readers[self._intake_fd]
            self._wait_for_intake()

    def _keep_elf(self, answer: TakenElf | RefusedElf) -> None:
        compiled = answer.compiled
        path = compiled.path.decode("utf-8", "backslashreplace")
        if isinstance(answer, RefusedElf):
            detail = f"{path} of process {compiled.pid}: {answer.reason}"
            self._loss("kernels", "refused", 1, detail, compiled.time_ns, compiled.time_ns)
            return
        about = {"pid": compiled.pid, "path": path, "digest": answer.digest, "size": answer.size}
        about["content"] = answer.content is not None
        meta = json.dumps(about).encode()
        self.spool.write(FrameKind.KERNEL, meta, answer.content or b"", time=compiled.time_ns, part=len(meta))

    def _read_sideband(self) -> None:
        for cpu, data in self._sideband.read():
            self.spool.write(FrameKind.SIDEBAND, data, time=time.monotonic_ns(), source=cpu)
            if _LIBRARY in data:
                self._mapping |= {pid: None for pid, path in mapped_paths(data) if _LIBRARY in path}

    def _attach_libraries(self) -> None:
        """Looks into the processes that mapped a library. Their maps may be long, and they may be many: one turn."""
        turn_ends = time.monotonic_ns() + TURN_NS
        while self._mapping and time.monotonic_ns() < turn_ends:
            pid = next(iter(self._mapping))
            del self._mapping[pid]
            self._took(self._probes.libraries.mapped(pid))

    def _read_counters(self) -> None:
        """Writes down what the BPF programs could not send since the last look."""
        now, counters = time.monotonic_ns(), self._probes.counters()
        for counter, (source, what, detail) in _LOSSES.items():
            lost = counters[counter] - self._last_counters[counter]
            if lost:
                self._loss(source, what, lost, detail, self._counters_ns, now)
        self._last_counters, self._counters_ns = counters, now

    def _took(self, outcomes: Iterator[Outcome]) -> None:
        for outcome in outcomes:
            now = time.monotonic_ns()
            self._libraries.append({"path": outcome.path, "probes": outcome.probes, "since_ns": now})
            if outcome.problem:
                self._loss("launches", "library", None, f"{outcome.path} is not probed: {outcome.problem}", now, now)

    def _loss(self, source: str, what: str, count: int | None, detail: str, begin: int, now: int) -> None:
        row = {"source": source, "what": what, "count": count, "detail": detail}
        self._write_json(FrameKind.LOSS, row, time_ns=now, begin_ns=begin)

    def _write_json(self, kind: FrameKind, value: dict[str, Any], time_ns: int = 0, begin_ns: int = 0) -> None:
        self.spool.write(kind, json.dumps(value).encode(), time=time_ns or time.monotonic_ns(), begin=begin_ns)

    # Beginning and end

    def _library_folders(self) -> tuple[str, ...]:
        folders = os.environ.get("LD_LIBRARY_PATH", "").split(":") if self._options.command else []
        return (*SYSTEM_FOLDERS, *(folder for folder in folders if folder))

    def _start_command(self) -> None:
        try:
            self._command = subprocess.Popen(self._options.command)
        except OSError as error:
            raise IaprofError(f"{self._options.command[0]} cannot be started: {error.strerror}") from error

    def _command_status(self) -> int:
        if self._command is None:
            return 0
        status = self._command.returncode
        return 128 - status if status is not None and status < 0 else status or 0

    def _farewell(self) -> str:
        return f"iaprof: stopped at once; 'iaprof recover {self.spool.path}' saves what was recorded\n"

    @property
    def command_runs(self) -> bool:
        """Whether there is a command that did not end yet."""
        return self._command is not None and self._command.poll() is None

    def wait_for_command(self) -> None:
        """Lets a command go on to its end whose recording could not; until a signal comes."""
        while self.command_runs and not self._signals.count:
            select.select([self._signals], [], [], 1.0)
            self._signals.clear()

    def _end(self) -> None:
        stopped = time.monotonic_ns()
        if self._command is not None and self.command_runs:
            self._command.terminate()  # as perf does when it is interrupted
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._command.wait(COMMAND_WAIT_S)
        time.sleep(DRAIN_S)
        for stream in self._streams:
            self._read_last_stalls(stream)
            stream.close()
        self._probes.detach()
        self._sideband.stop()
        self._read_rings()
        deadline = time.monotonic() + INTAKE_WAIT_S
        while not self._intake.idle and time.monotonic() < deadline:
            self._read_intake()
            time.sleep(0.001)
        for refused in self._intake.close():
            self._keep_elf(refused)
        self._read_sideband()
        self._read_counters()
        self._write_json(FrameKind.END, self._footer(stopped))

    def _read_last_stalls(self, stream: StallStream) -> None:
        deadline = time.monotonic() + LAST_READS_S
        self._read_stalls(stream)
        while stream in self._unread and time.monotonic() < deadline:
            self._read_stalls(stream)
        if stream in self._unread:
            now = time.monotonic_ns()
            detail = "more came than could be read when the recording ended"
            self._stall_loss(stream, StallLoss("unread", detail, now, now))
        if gap := stream.unfinished_gap():
            self._stall_loss(stream, gap)

    def _header(self, started: int) -> dict[str, Any]:
        host = os.uname()
        return {
            "iaprof": iaprof.__version__,
            "host": {
                "name": host.nodename,
                "kernel": host.release,
                "machine": host.machine,
                "cpus": len(online_cpus()),
            },
            "python": platform.python_version(),
            "command": list(self._options.command),
            "arguments": sys.argv,
            "clock": {"monotonic_ns": started, "realtime_ns": time.time_ns() - (time.monotonic_ns() - started)},
            "stack_depth": self._probes.depth,
            "streams": [
                {
                    "device": stream.device.path,
                    "pci_address": stream.device.pci_address,
                    "device_id": stream.device.device_id,
                    "revision": stream.device.revision,
                    "gt": stream.gt.id,
                    "tile": stream.gt.tile,
                    "ip_version": list(stream.gt.ip_version),
                    "layout": stream.layout.value,
                    "rate_cycles": stream.rate,
                    "xecore_buffer_bytes": stream.device.xecore_buffer_bytes,
                }
                for stream in self._streams
            ],
        }

    def _footer(self, stopped: int) -> dict[str, Any]:
        usage = resource.getrusage(resource.RUSAGE_SELF)
        counters = self._probes.counters()
        return {
            "end_ns": stopped,
            "libraries": self._libraries,
            "probes": {counter.name.lower(): value for counter, value in counters.items()},
            "cost": {
                "cpu_s": round(usage.ru_utime + usage.ru_stime + self._intake.cpu_seconds, 3),
                "peak_bytes": usage.ru_maxrss * 1024,
                "spool_bytes": self.spool.size,
                "probe_ns": counters[Counter.PROBE_NS],
            },
        }


def spool_path(output: Path) -> Path:
    """Where the spool of a capture lies while it is recorded."""
    return output.with_name(output.name + ".spool")
