"""A recording, from what it opens to the end of its spool: no threads, nothing decoded, everything to the spool.

Sources know what they read and what they write (sources/source.py); here is when they begin, are asked, and end. The
loop wakes when a source's descriptor is readable or its time comes, and otherwise once in TICK_NS to empty everything.
"""

from __future__ import annotations

import contextlib
import gc
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from iaprof.record.capture.finisher import Finisher
from iaprof.record.capture.journal import BOTH_NS, Journal, Tell
from iaprof.record.capture.rotation import OnPart, Rotation, spool_path
from iaprof.record.capture.spool import FrameKind, Spool
from iaprof.record.command import PATIENCE_S, Command
from iaprof.record.control import COMMANDS, Control
from iaprof.record.header import footer, header
from iaprof.record.launched_kernels import Kernels
from iaprof.record.loop import Loop
from iaprof.record.options import Options
from iaprof.record.own_cost import cpu_seconds
from iaprof.record.scope import Scope
from iaprof.record.signals import StopSignals
from iaprof.record.sources.opening import open_sources
from iaprof.record.symbolize.roots import Roots

TICK_NS = 250_000_000  # what a killed recorder has not yet written is no older than this
DRAIN_S = 0.02  # four of the driver's 5 ms polls: what was sampled last becomes visible
LOSSES_NS = 1_000_000_000
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
        options = self._options
        scope = Scope(options.pids) if options.pids else None
        self._control = Control(options.control) if options.control else None
        if self._control is not None:
            self._opened.callback(self._control.close)
        self._roots = Roots()
        self._kept.callback(self._roots.close)
        self._sources = open_sources(options, scope, self._roots, self._signals, self._opened, self._kept)
        self._journal = Journal(Spool(spool_path(options.output)), self._audience.warn, self._audience.inform)

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
                if self._rotation.is_open and all(source.has_ended_part() for source in self._sources):
                    self._rotation.end_part()
            self._end()
            return self._command.exit_code if self._command else 0

    # Beginning

    def _begin(self) -> None:
        journal, loop, options = self._journal, self._loop, self._options
        journal.json(FrameKind.HEADER, header(options, self._rotation.number, self._sources))
        self._roots.start(journal, loop)
        for source in self._sources:
            source.start(journal, loop)
        loop.wait_for(self._signals.fileno(), self._on_signal)
        if self._control is not None:
            loop.wait_for(self._control.fileno(), self._obey)
        loop.every(TICK_NS, self._tick)
        loop.every(LOSSES_NS, self._note_losses)
        if self._audience.status is not None:
            journal.totals.kernels = Kernels()
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
            for source in self._sources:
                source.ready()
            self._signals.check()
            self._command = Command(options.command, self._signals, self._environment())
        with contextlib.suppress(OSError):
            # The hardware's buffers are full in milliseconds: who empties them must not wait for its turn behind the
            # programs that fill them. After the command was started, which is to run as it would without us.
            os.setpriority(os.PRIO_PROCESS, 0, NICE)

    def _environment(self) -> dict[str, str] | None:
        """Of the command; None where it is ours."""
        ours = environment = dict(os.environ)
        for source in self._sources:
            environment = source.environment(environment)
        return None if environment is ours else environment

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
            for source in self._sources:
                source.resume()

    def _note_pause(self) -> None:
        if self._pause_began:
            self._journal.append("paused", [self._pause_began, time.monotonic_ns()])
        self._pause_began = None

    def _pause(self) -> None:
        """Launches go on: what the GPU executes after the pause may have been launched before its end."""
        if self._pause_began is None:
            time.sleep(DRAIN_S)
            for source in self._sources:
                source.pause()
            self._pause_began = time.monotonic_ns()

    def _tick(self) -> None:
        for source in self._sources:
            source.read()
        most = self._options.max_bytes
        if most is not None and self._journal.earlier_bytes + self.spool.size >= most:
            self._journal.warn(f"--max-size: {most:,} bytes were recorded, the recording ends")
            self._end_soon()

    def _note_losses(self) -> None:
        for source in self._sources:
            source.losses()

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
        for source in self._sources:
            source.end_part(since)
        self._note_losses()
        self._journal.json(FrameKind.END, footer(now, self.spool.size, self._sources))
        self._rotation.rotate()
        self._journal.json(FrameKind.HEADER, header(self._options, self._rotation.number, self._sources))
        for source in self._sources:
            source.begin_part(since)
        self._roots.tell_again()

    def status(self) -> Status:
        """How it goes."""
        totals = self._journal.totals
        kernels, matched = totals.kernels.counts() if totals.kernels else (0, 0)
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
        for source in self._sources:
            source.stop()
        for source in self._sources:
            source.finish()
        self._note_losses()
        self._roots.look()
        if self._pause_began is not None:
            self._note_pause()
        self._rotation.wait()
        self._journal.json(FrameKind.END, footer(stopped, self.spool.size, self._sources))
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
