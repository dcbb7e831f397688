"""A recording, from what it opens to the end of its spool: no threads, nothing decoded, everything to the spool.

The parts know what they read and what they write; here is the order in which they begin, are looked at, and end. The
loop wakes when a stream has stalls, when a module was compiled or a library mapped, when a ring buffer fills, for
metrics, and otherwise once in TICK_NS to empty everything.
"""

from __future__ import annotations

import contextlib
import gc
import os
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import iaprof
from iaprof.basics.errors import IaprofError
from iaprof.bpf.cpu_clock import CpuClock
from iaprof.bpf.launches import LaunchProbes
from iaprof.bpf.perf_event import online_cpus
from iaprof.bpf.processes import snapshot
from iaprof.bpf.sideband import SideBandBuffers
from iaprof.formats.header.unprobed import MEMBER as UNPROBED
from iaprof.formats.wire.launches import Counter
from iaprof.record.command import PATIENCE_S, Command
from iaprof.record.control import COMMANDS, Control
from iaprof.record.drivers import Drivers
from iaprof.record.finisher import Finisher
from iaprof.record.intake import Intake
from iaprof.record.journal import BOTH_NS, Journal, Tell
from iaprof.record.loop import Loop
from iaprof.record.metrics import MeteredGt, Metrics
from iaprof.record.options import Options
from iaprof.record.own_cost import cpu_seconds, peak_bytes
from iaprof.record.roots import Roots
from iaprof.record.rotation import OnPart, Rotation, spool_path
from iaprof.record.scope import Scope
from iaprof.record.signals import StopSignals
from iaprof.record.sources.launches import Launches
from iaprof.record.sources.side_band import Watch
from iaprof.record.sources.stall_stream import StallStream
from iaprof.record.sources.stalls import Gpus
from iaprof.record.spool import FrameKind, Spool
from iaprof.symbols.names.boot import boot_id

TICK_NS = 250_000_000  # what a killed recorder has not yet written is no older than this
DRAIN_S = 0.02  # four of the driver's 5 ms polls: what was sampled last becomes visible
TURN_NS = 10_000_000  # of telling what runs, before others get theirs
NICE = -10
STATUS_NS = 500_000_000


@dataclass(frozen=True)
class Status:
    """How a recording goes, for whoever watches it."""

    seconds: float
    records: int
    launches: int
    lost: int  # as far as it is known how many
    losses: int  # times that something was lost
    kernels: int  # different ones that were launched
    matched: int  # of those, in a module that was taken
    bytes: int  # spooled
    cpu_s: float  # own
    paused: bool


@dataclass(frozen=True)
class Audience:
    """Who is told what while recording."""

    warn: Tell
    inform: Tell
    part: OnPart  # a capture that is whole while recording goes on
    status: Callable[[Status], None] | None = None
    naming: Callable[[int, int], None] | None = None  # modules that were named, and all of them


class Session:
    """One recording, from the opened devices to the closed spool."""

    def __init__(self, options: Options, signals: StopSignals, audience: Audience) -> None:
        """Opens everything that can fail, before anything is started.

        Args:
            options: what to record.
            signals: when to end.
            audience: is told how it goes.

        Raises:
            Interrupted: a signal came meanwhile.
            IaprofError: no device, no permission, no BPF, no room: what to do stands in it.
        """
        self._options, self._signals, self._audience = options, signals, audience
        self._command: Command | None = None
        self._finisher: Finisher | None = None
        self._stop = False
        self._pause_began: int | None = 0  # None while sampling
        self._opened = contextlib.ExitStack()
        self._kept = contextlib.ExitStack()  # until names were found, too
        try:
            self._open()
        except BaseException:
            self._opened.close()
            self._kept.close()
            raise

    def _open(self) -> None:
        options, opened = self._options, self._opened
        self._scope = Scope(options.pids) if options.pids else None
        self._control = Control(options.control) if options.control else None
        if self._control is not None:
            opened.callback(self._control.close)
        self._gpus = Gpus(options)
        opened.callback(self._gpus.close)
        # If it has to compile, that goes on while the rest is opened.
        self._probes = LaunchProbes(options.sizes, options.launches.ways, depth=options.max_stack, waits=options.waits)
        opened.callback(self._probes.close)
        self._intake = Intake()
        opened.callback(self._intake.close)
        self._signals.check()
        try:
            sideband = SideBandBuffers()
        except OSError as error:
            raise IaprofError(
                f"the machine's mappings and processes cannot be watched (perf_event_open: {error.strerror}): "
                "run iaprof with sudo, or set kernel.perf_event_paranoid to -1"
            ) from error
        opened.callback(sideband.close)
        self._watch = Watch(sideband)
        # Whatever is mapped from here on, the side-band tells.
        self._running = b"".join(snapshot(time.monotonic_ns()))
        self._signals.check()
        self._probes.ready(self._signals)
        self._signals.check()
        try:
            self._cpu_clock = CpuClock(self._probes.maps["on_sample"], options.cpu_hz)
        except OSError as error:
            raise IaprofError(
                f"CPUs cannot be sampled (perf_event_open: {error.strerror}): use --cpu-freq=0"
            ) from error
        opened.callback(self._cpu_clock.close)
        self._launches = Launches(self._probes, self._intake, self._scope)
        self._opened.callback(self._launches.close)
        try:
            self._launches.learn()
        except OSError as error:
            raise IaprofError(f"there is no room for the process that finishes stacks: {error.strerror}") from error
        self._roots = Roots()
        self._kept.callback(self._roots.close)
        self._launches.on_mapped = self._keep_root
        self._drivers = Drivers(self._probes.libraries, options.launches, bool(options.command))
        self._kept.callback(self._drivers.close)
        if self._drivers.injection:
            self._launches.on_taken = self._drivers.injection.forget
            self._intake.own_folder = os.fsencode(self._drivers.injection.library.parent)
        self._journal = Journal(Spool(spool_path(options.output)), self._audience.warn, self._audience.inform)
        if self._drivers.remark:
            self._journal.warn(self._drivers.remark)
        if self._probes.follows_frame_pointers:
            self._journal.warn(
                "the kernel's BTF does not say where it has a process's mappings: stacks are walked by frame pointers, "
                "and end in code without them"
            )

    @property
    def spool(self) -> Spool:
        """What is written now."""
        return self._journal.spool

    def run(self) -> int:
        """Records until the command ends, the time is over or a signal comes.

        Returns:
            The exit code of the command; 0 without one.

        Raises:
            Interrupted: a signal came before it began; there is no spool.
            IaprofError: the command cannot be started, and there is no spool; or the disk is full or the like, and the
                spool holds what came before.
        """
        with self._opened, contextlib.closing(Loop()) as self._loop:
            self._started = time.monotonic_ns()
            self._rotation = Rotation(self._options, self._journal, self._loop, self._roots, self._audience.part)
            self._opened.callback(self._rotation.close)
            try:
                self._begin()
            except BaseException:
                self.spool.close()
                self.spool.remove()
                raise
            self._signals.farewell = self._farewell
            gc.freeze()  # what is there now stays: looking through all of it would keep the loop from reading for long
            while not self._is_over():
                self._loop.turn()
                if self._signals.rotate or self._rotation.is_due:
                    self._rotate()
                if self._rotation.is_open and self._launches.has_finished_stacks():
                    self._rotation.end_part()
            self._end()
            return self._command.exit_code if self._command else 0

    # Beginning

    def _begin(self) -> None:
        journal, loop, options = self._journal, self._loop, self._options
        journal.json(FrameKind.HEADER, self._header())
        journal.write(FrameKind.SIDEBAND, self._running, time=self._started)
        del self._running
        follow = None
        if self._scope is not None:
            self._scope.start(journal, self._probes)
            follow = self._scope.follow
        self._roots.start(journal, loop)
        self._launches.start(journal, loop, self._on_process, self._drivers.outcomes)
        self._watch.start(journal, loop, self._launches.mapped, self._launches.look_for_python, follow)
        self._metrics = self._open_metrics()
        self._gpus.start(journal, loop, self._on_stream)
        loop.wait_for(self._signals.fileno(), self._on_signal)
        if self._control is not None:
            loop.wait_for(self._control.fileno(), self._obey)
        loop.every(TICK_NS, self._tick)
        if self._audience.status is not None:
            self._launches.count_kernels()
            loop.every(STATUS_NS, self._show_status)
        begins = time.monotonic_ns() + max(options.delay_ms, 0) * 1_000_000
        if options.delay_ms == 0:
            self._resume()
        else:
            self._pause_began = time.monotonic_ns()
            if options.delay_ms > 0:
                loop.at(begins, self._resume)
        if options.duration_s is not None:
            loop.at(begins + int(options.duration_s * 1e9), self._end_soon)
        if options.command:
            self._launches.wait_for_learner()
            self._signals.check()
            self._command = Command(options.command, self._signals, self._drivers.environment())
        with contextlib.suppress(OSError):
            # The hardware's buffers are full in milliseconds: who empties them must not wait for its turn behind the
            # programs that fill them. After the command was started, which is to run as it would without us.
            os.setpriority(os.PRIO_PROCESS, 0, NICE)

    def _open_metrics(self) -> Metrics | None:
        if not self._options.metric_interval_ns:
            return None
        gts = [MeteredGt(index, s.device, s.gt) for index, s in enumerate(self._gpus.streams)]
        metrics = Metrics(gts)
        self._opened.callback(metrics.close)
        for problem in metrics.problems:
            self._journal.inform(problem)
        self._loop.every(self._options.metric_interval_ns, self._measure)
        return metrics

    # While recording

    def _is_over(self) -> bool:
        if self._command is not None:
            return self._stop or not self._command.runs
        return self._stop or bool(self._signals.count)

    def _end_soon(self) -> None:
        self._stop = True

    def _on_signal(self) -> None:
        self._signals.clear()
        if self._command is not None:
            self._command.forward()
            if self._signals.count:  # it may have its own way to end, which is recorded too
                self._loop.at(time.monotonic_ns() + int(PATIENCE_S * 1e9), self._end_soon)

    def _keep_root(self, pid: int) -> None:
        if self._scope is None or pid not in self._scope.others:
            self._roots.keep(pid)

    def _on_process(self, pid: int) -> None:
        self._keep_root(pid)
        if self._metrics is not None:
            self._metrics.watch([pid])

    def _on_stream(self, stream: StallStream) -> None:
        if self._metrics is not None:
            self._metrics.add(MeteredGt(self._gpus.streams.index(stream), stream.device, stream.gt))

    def _obey(self) -> None:
        assert self._control is not None
        for command in self._control.read():
            if command == "closed":
                self._loop.forget(self._control.fileno())
                continue
            if command not in COMMANDS:
                self._journal.warn(f"--control: '{command}' is none of {', '.join(COMMANDS)}")
                continue
            if command == "enable":
                self._resume()
            elif command == "disable":
                self._pause()
            elif command == "snapshot":
                self._signals.rotate = True
            elif command == "stop":
                self._end_soon()
            self._control.acknowledge()

    def _resume(self) -> None:
        if self._pause_began is not None:
            self._note_pause()  # before: what is sampled from now on is of no pause
            self._gpus.resume()
            self._cpu_clock.enable(True)

    def _note_pause(self) -> None:
        if self._pause_began:
            self._journal.append("paused", [self._pause_began, time.monotonic_ns()])
        self._pause_began = None

    def _pause(self) -> None:
        """Launches go on: what the GPU executes after the pause may have been launched before its end."""
        if self._pause_began is None:
            time.sleep(DRAIN_S)
            self._gpus.pause()
            self._cpu_clock.enable(False)
            self._pause_began = time.monotonic_ns()

    def _measure(self) -> None:
        if self._metrics is not None and self._pause_began is None:
            self._metrics.sample()

    def _tick(self) -> None:
        self._launches.read()
        self._watch.read()
        self._launches.read_intake()
        self._write_metrics()
        most = self._options.max_bytes
        if most is not None and self._journal.earlier_bytes + self.spool.size >= most:
            self._journal.warn(f"--max-size: {most:,} bytes were recorded, the recording ends")
            self._end_soon()

    def _write_metrics(self) -> None:
        if self._metrics is not None:
            for meta, rows in self._metrics.take():
                self._journal.write(FrameKind.METRICS, meta, rows, time=time.monotonic_ns(), part=len(meta))

    def _show_status(self) -> None:
        if self._audience.status is not None:
            self._audience.status(self.status())

    def _rotate(self) -> None:
        if self._rotation.is_under_way:
            return  # a little later
        self._signals.rotate = False
        now = time.monotonic_ns()
        since = now - BOTH_NS  # launches that begin now are read late on a busy machine
        self._tick()
        self._launches.new_epoch(since)
        self._launches.read_counters()
        self._journal.json(FrameKind.END, self._footer(now))
        self._rotation.rotate()
        self._journal.json(FrameKind.HEADER, self._header())
        self._launches.describe_again(since)
        self._roots.tell_again()
        self._launches.take_modules_again()
        self._pieces = snapshot(since)
        self._loop.go_on_with("snapshot", self._tell_what_runs)

    def _tell_what_runs(self) -> None:
        turn_ends = time.monotonic_ns() + TURN_NS
        for piece in self._pieces:
            self._journal.write(FrameKind.SIDEBAND, piece, time=time.monotonic_ns())
            if time.monotonic_ns() > turn_ends:
                return
        self._loop.done_with("snapshot")

    def status(self) -> Status:
        """How it goes."""
        totals = self._journal.totals
        kernels, matched = self._launches.kernels.counts() if self._launches.kernels else (0, 0)
        return Status(
            seconds=(time.monotonic_ns() - self._started) / 1e9,
            records=totals.records,
            launches=totals.launches,
            lost=totals.lost,
            losses=totals.losses,
            kernels=kernels,
            matched=matched,
            bytes=self._journal.earlier_bytes + self.spool.size,
            cpu_s=cpu_seconds(),
            paused=self._pause_began is not None,
        )

    # The end

    def _farewell(self) -> str:
        return f"iaprof: stopped at once; 'iaprof recover {self.spool.path}' saves what was recorded\n"

    def _end(self) -> None:
        stopped = time.monotonic_ns()
        # It has what it imports when there is something to finish.
        self._finisher = Finisher(self.spool, self._options.symbols, roots=self._roots.by_process())
        if self._command is not None:
            self._command.end()
        time.sleep(DRAIN_S)
        self._gpus.finish()
        self._cpu_clock.close()
        self._launches.finish()
        self._watch.finish()
        self._launches.count_missed()
        self._roots.look()
        self._write_metrics()
        if self._pause_began is not None:
            self._note_pause()
        while self._loop.has_left("snapshot"):
            self._tell_what_runs()
        self._rotation.wait()
        self._journal.json(FrameKind.END, self._footer(stopped))
        self._finisher.go(self._options.output)

    def finish(self) -> tuple[dict[str, Any], int]:
        """Header and bytes of the capture of an ended recording; its spool is gone then.

        Raises:
            IaprofError: it cannot be made; the spool stays.
        """
        finisher = self._finisher
        assert finisher is not None
        is_naming = False
        while not finisher.read():
            if finisher.naming is not None:
                if not is_naming:
                    is_naming, self._signals.instead = True, finisher.skip_names
                if self._audience.naming is not None:
                    self._audience.naming(*finisher.naming)
        self._signals.instead = None
        header, size = finisher.result()
        self.spool.close()
        self.spool.remove()
        return header, size

    def close(self) -> None:
        """Ends what is still under way."""
        if self._finisher is not None:
            self._finisher.close()
        self._kept.close()

    @property
    def command_runs(self) -> bool:
        """Whether there is a command that did not end yet."""
        return self._command is not None and self._command.runs

    def wait_for_command(self) -> None:
        """Lets a command go on to its end whose recording could not; until a signal comes."""
        if self._command is not None:
            self._command.wait()

    # What the capture says of the recording

    def _header(self) -> dict[str, Any]:
        host, options = os.uname(), self._options
        return {
            "iaprof": iaprof.__version__,
            "host": {
                "name": host.nodename,
                "kernel": host.release,
                "machine": host.machine,
                "cpus": len(online_cpus()),
                "boot_id": boot_id(),
            },
            "python": platform.python_version(),
            "command": list(options.command),
            "arguments": sys.argv,
            "part": self._rotation.number,
            "clock": _clocks(),
            "stack_depth": self._probes.depth,
            "follows_frame_pointers": self._probes.follows_frame_pointers,
            "launches_by": str(options.launches),
            "waits_wanted": options.waits,
            "cpu_hz": options.cpu_hz,
            "metric_interval_ns": options.metric_interval_ns,
            "streams": self._gpus.describe(),
            "libraries": list(self._launches.libraries),
            **({"scope": list(self._scope.pids)} if self._scope else {}),
        }

    def _footer(self, stopped: int) -> dict[str, Any]:
        counters = self._probes.counters()
        unprobed = self._launches.unprobed()
        return {
            **({UNPROBED: unprobed} if unprobed else {}),
            "end_ns": stopped,
            "clock_end": _clocks(),
            "probes": {counter.name.lower(): value for counter, value in counters.items()},
            "cost": {
                "cpu_s": round(
                    cpu_seconds()
                    + self._intake.cpu_seconds
                    + self._probes.compile_cpu_seconds
                    + self._launches.learning_cpu_seconds,
                    3,
                ),
                "learn_cpu_s": round(self._launches.learning_cpu_seconds, 3),
                "compile_cpu_s": round(self._probes.compile_cpu_seconds, 3),
                "peak_bytes": peak_bytes(),
                "spool_bytes": self.spool.size,
                "probe_ns": counters[Counter.PROBE_NS],
            },
        }


def _clocks() -> dict[str, int]:
    """One moment on both clocks: the wall clock may be set while recording."""
    monotonic, realtime = time.monotonic_ns(), time.time_ns()
    return {"monotonic_ns": monotonic, "realtime_ns": realtime}
