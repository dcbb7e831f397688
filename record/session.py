"""A recording: one loop over the sources, no threads, nothing decoded, everything to the spool.

The loop wakes when a stream has stalls, when a module was compiled or a library mapped, and otherwise once in
TICK_NS to empty the ring buffers.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import resource
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import iaprof
from iaprof.bpf import sideband
from iaprof.bpf.launches import LaunchProbes, Sizes
from iaprof.bpf.libraries import SYSTEM_FOLDERS, Outcome
from iaprof.bpf.perf_event import online_cpus
from iaprof.bpf.processes import snapshot
from iaprof.formats.errors import IaprofError
from iaprof.formats.launches import Counter
from iaprof.formats.sideband import mapped_paths
from iaprof.record import xe
from iaprof.record.intake import Intake, RefusedElf, TakenElf
from iaprof.record.spool import FrameKind, Spool
from iaprof.record.stalls import StallLoss, StallRead, StallStream

TICK_NS = 100_000_000
COUNTERS_EVERY_NS = 1_000_000_000
SIDEBAND_REST_NS = 10_000_000
TURN_NS = 10_000_000  # of one stream's reads, before the others get theirs
DRAIN_S = 0.02  # four of the driver's 5 ms polls: what was sampled last becomes visible
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

    def __init__(self, options: Options) -> None:
        """Opens everything that can fail, before anything is started.

        Raises:
            IaprofError: no device, no permission, no BPF, no room: what to do stands in it.
        """
        self._options = options
        self._command: subprocess.Popen[bytes] | None = None
        self._signals = 0
        self._unread: set[StallStream] = set()
        self._notes: list[str] = []
        self._libraries: list[dict[str, Any]] = []
        self._last_counters: dict[Counter, int] = dict.fromkeys(Counter, 0)
        self._counters_ns = self._tick_ns = time.monotonic_ns()
        self._sideband_due_ns = 1  # when to wait for it again; 0 while we do
        self._opened = contextlib.ExitStack()
        try:
            self._open()
        except BaseException:
            self._opened.close()
            raise

    def _open(self) -> None:
        self._streams = self._open_streams(xe.find_devices())
        for stream in self._streams:
            self._opened.callback(stream.close)
        self._intake = Intake()  # before BPF's compiler makes this process large
        self._opened.callback(self._intake.close)
        self._probes = LaunchProbes(self._options.sizes)
        self._opened.callback(self._probes.close)
        try:
            self._sideband = sideband.open_all()
        except OSError as error:
            raise IaprofError(
                f"the machine's mappings and processes cannot be watched (perf_event_open: {error.strerror}): "
                "run iaprof with sudo, or set kernel.perf_event_paranoid to -1"
            ) from error
        for buffer in self._sideband:
            self._opened.callback(buffer.close)
        self.spool = Spool(spool_path(self._options.output))
        self._opened.callback(self.spool.close)

    def _open_streams(self, devices: list[xe.Device]) -> list[StallStream]:
        streams: list[StallStream] = []
        problems: list[str] = []
        for device in devices:
            for gt in device.gts:
                try:
                    streams.append(StallStream(device, gt, device.rates[-1], device.layout(gt)))
                except xe.DeviceError as error:
                    problems.append(str(error))
        if not streams:
            raise IaprofError("; ".join(problems))
        self._notes += problems
        return streams

    def run(self) -> int:
        """Records until the command ends, the time is over or a signal comes.

        Returns:
            The exit code of the command; 0 without one.

        Raises:
            IaprofError: the disk is full, or the command cannot be started; the spool holds what came before.
        """
        with self._opened, self._signal_wakeups() as wakeups:
            started = time.monotonic_ns()
            self._write_json(FrameKind.HEADER, self._header(started))
            self.spool.write(FrameKind.SIDEBAND, snapshot(), time=time.monotonic_ns())
            self._took(self._probes.libraries.installed(self._library_folders()))
            self._took(self._probes.libraries.running())
            for note in self._notes:
                self._loss("devices", "not recorded", None, note, started, started)
            for stream in self._streams:
                stream.start()
            self._start_command()
            self._loop(wakeups, started)
            self._end()
            return self._command_status()

    # The loop

    def _loop(self, wakeups: socket.socket, started: int) -> None:
        end_ns = started + int(self._options.duration_s * 1e9) if self._options.duration_s else None
        with selectors.DefaultSelector() as selector:
            selector.register(wakeups, selectors.EVENT_READ, self._read_wakeups)
            for stream in self._streams:
                selector.register(stream.fileno() or -1, selectors.EVENT_READ, stream)
            for ring in (self._probes.launches, self._probes.stacks, self._probes.compiled):
                selector.register(ring, selectors.EVENT_READ, self._read_rings)
            self._register_intake(selector)
            while self._signals == 0 and not (end_ns and time.monotonic_ns() >= end_ns):
                now = time.monotonic_ns()
                self._watch_sideband(selector, now)
                due = min(self._tick_ns + TICK_NS, end_ns or now + TICK_NS, self._sideband_due_ns or now + TICK_NS)
                events = selector.select(0 if self._unread else max(0.0, (due - now) / 1e9))
                for stream in list(self._unread):
                    self._read_stalls(stream, selector)
                for reader in dict.fromkeys(key.data for key, _ in events):
                    if isinstance(reader, StallStream):
                        self._read_stalls(reader, selector)
                    elif reader == self._rest_sideband:
                        self._rest_sideband(selector)
                    elif reader == self._read_wakeups:
                        self._read_wakeups(wakeups)
                    else:
                        reader()
                if time.monotonic_ns() - self._tick_ns >= TICK_NS:
                    self._tick(selector)
                if self._command is not None and self._command.poll() is not None:
                    break

    def _watch_sideband(self, selector: selectors.BaseSelector, now: int) -> None:
        """Waits for the side-band again after its rest."""
        if not 0 < self._sideband_due_ns <= now:
            return
        self._sideband_due_ns = 0
        for buffer in self._sideband:
            selector.register(buffer, selectors.EVENT_READ, self._rest_sideband)
        # perf's poll tells of records once, and registering has asked: what came during the rest is read now.
        self._read_sideband()

    def _rest_sideband(self, selector: selectors.BaseSelector) -> None:
        """Reads, and looks away for a moment: a busy machine maps and forks without end, and each one wakes us."""
        self._read_sideband()
        for buffer in self._sideband:
            selector.unregister(buffer)
        self._sideband_due_ns = time.monotonic_ns() + SIDEBAND_REST_NS

    def _tick(self, selector: selectors.BaseSelector) -> None:
        for stream in self._streams:
            self._read_stalls(stream, selector)
        self._read_rings()
        self._read_sideband()
        self._read_intake()
        self._register_intake(selector)
        now = self._tick_ns = time.monotonic_ns()
        if now - self._counters_ns >= COUNTERS_EVERY_NS:
            self._read_counters()

    def _register_intake(self, selector: selectors.BaseSelector) -> None:
        """The intake's descriptor changes when its child is replaced."""
        registered = {key.fd for key in selector.get_map().values()}
        if self._intake.fileno() not in registered:
            for key in [key for key in selector.get_map().values() if key.data == self._read_intake]:
                selector.unregister(key.fileobj)
            selector.register(self._intake.fileno(), selectors.EVENT_READ, self._read_intake)

    # The sources

    def _read_stalls(self, stream: StallStream, selector: selectors.BaseSelector | None = None) -> None:
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
            else:
                self._stall_loss(stream, got)
        after = stream.fileno()
        if selector is not None and after != before:
            if before is not None:
                selector.unregister(before)
            if after is not None:
                selector.register(after, selectors.EVENT_READ, stream)

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
            for refused in self._intake.ask(compiled):
                self._keep_elf(refused)

    def _read_intake(self) -> None:
        while (answer := self._intake.read()) is not None:
            self._keep_elf(answer)

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
        for buffer in self._sideband:
            data = buffer.read()
            if not data:
                continue
            self.spool.write(FrameKind.SIDEBAND, data, time=time.monotonic_ns(), source=buffer.cpu)
            if _LIBRARY in data:
                for pid in {pid for pid, path in mapped_paths(data) if _LIBRARY in path}:
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
        if not self._options.command:
            return
        try:
            self._command = subprocess.Popen(self._options.command)
        except OSError as error:
            self.spool.remove()
            raise IaprofError(f"{self._options.command[0]} cannot be started: {error.strerror}") from error

    def _command_status(self) -> int:
        if self._command is None:
            return 0
        status = self._command.returncode
        return 128 - status if status is not None and status < 0 else status or 0

    def _end(self) -> None:
        stopped = time.monotonic_ns()
        if self._command is not None and self._command.poll() is None:
            self._command.terminate()  # as perf does when it is interrupted
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._command.wait(1.0)
        time.sleep(DRAIN_S)
        for stream in self._streams:
            self._read_stalls(stream)
            while stream in self._unread:
                self._read_stalls(stream)
            if gap := stream.unfinished_gap():
                self._stall_loss(stream, gap)
            stream.close()
        self._probes.detach()
        for buffer in self._sideband:
            buffer.stop()
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

    # Signals

    @contextlib.contextmanager
    def _signal_wakeups(self) -> Iterator[socket.socket]:
        """SIGINT and SIGTERM end the recording; a second one ends the process, and the spool stays."""
        ours, pythons = socket.socketpair()
        ours.setblocking(False)
        pythons.setblocking(False)
        previous = {number: signal.signal(number, self._on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
        previous[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, lambda *_: None)
        wakeup = signal.set_wakeup_fd(pythons.fileno(), warn_on_full_buffer=False)
        try:
            yield ours
        finally:
            signal.set_wakeup_fd(wakeup)
            for number, handler in previous.items():
                if number == signal.SIGCHLD:
                    signal.signal(number, handler)
            ours.close()
            pythons.close()

    def _on_signal(self, *_: object) -> None:
        self._signals += 1
        if self._signals > 1:
            message = f"iaprof: stopped at once; 'iaprof recover {self.spool.path}' saves what was recorded\n"
            os.write(2, message.encode())
            os._exit(130)

    def _read_wakeups(self, wakeups: socket.socket) -> None:
        with contextlib.suppress(BlockingIOError):
            while wakeups.recv(4096):
                pass


def spool_path(output: Path) -> Path:
    """Where the spool of a capture lies while it is recorded."""
    return output.with_name(output.name + ".spool")
