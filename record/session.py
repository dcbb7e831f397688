"""A recording, from opening its sources to the end of its spool: no threads, nothing decoded, everything to the spool.

Sources know what they read and write (sources/source.py); the session calls their methods in order. The loop wakes
when a source's descriptor is readable or a timer is due, at the latest after TICK_NS to empty all buffers.
"""

from __future__ import annotations

import contextlib
import gc
import os
import platform
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import iaprof
from iaprof.basics.errors import IaprofError
from iaprof.basics.libraries import users_environment
from iaprof.bpf.perf_event import online_cpus
from iaprof.formats.header.labels import MEMBER as LABELS
from iaprof.formats.header.members import MEMBERS
from iaprof.record.budget import BudgetKeeper, Level, cpu_seconds, peak_bytes
from iaprof.record.capture.rotation import Finisher, OnPart, Rotation, keep_earlier, spool_path
from iaprof.record.control import COMMANDS, Control
from iaprof.record.journal import OVERLAP_NS, Journal, LaunchedKernels, MessageHandler
from iaprof.record.left_out import COMMAND
from iaprof.record.loop import Loop
from iaprof.record.options import Options
from iaprof.record.scope import Scope
from iaprof.record.signals import StopSignals
from iaprof.record.sources.opening import open_sources
from iaprof.record.sources.source import Source
from iaprof.record.spool import FrameKind, Spool
from iaprof.record.symbolize.roots import Roots
from iaprof.record.unwinding.learner_process import LearnerProcess
from iaprof.symbols.names.boot import boot_id

TICK_NS = 250_000_000  # what a killed recorder had not written yet is no older than this
DRAIN_S = 0.02  # four of the driver's 5 ms polls, after which the last samples are visible
LOSSES_NS = 1_000_000_000
BUDGET_NS = 1_000_000_000
NICE = -10
STATUS_NS = 500_000_000


@dataclass(frozen=True)
class Status:
    """The state of a recording, for its status line."""

    seconds: float
    records: int
    launches: int
    lost: int  # as far as the number is known
    losses: int  # events, each of which lost something
    kernels: int  # distinct ones that were launched
    matched: int  # those of them whose code was taken
    bytes: int  # of all spools
    cpu_s: float  # of the recorder
    paused: bool


@dataclass(frozen=True)
class Callbacks:
    """What a session calls while recording."""

    warn: MessageHandler
    inform: MessageHandler
    part: OnPart  # for each capture that is finished while recording goes on
    status: Callable[[Status], None] | None = None
    naming: Callable[[int, int], None] | None = None  # modules named so far, and all of them


class Session:
    """One recording, from the opened sources to the finished capture."""

    def __init__(
        self, options: Options, signals: StopSignals, callbacks: Callbacks, learner: LearnerProcess | None = None
    ) -> None:
        """Opens everything that can fail, before anything starts.

        Args:
            options: what to record.
            signals: end the recording.
            callbacks: report its progress.
            learner: finishes stacks. It may be started before this module is imported, which takes as long.

        Raises:
            Interrupted: a signal came meanwhile.
            IaprofError: no device, no permission, no BPF, no room; the text says what to do.
        """
        self._options, self._signals, self._callbacks = options, signals, callbacks
        self._command: Command | None = None
        self._command_pid: list[int] = []  # and the time before its start, CLOCK_MONOTONIC ns
        self._finisher: Finisher | None = None
        self._keeper: BudgetKeeper | None = None
        self._stop = False
        self._pause_began: int | None = 0  # None while sampling
        self._until_end = contextlib.ExitStack()
        self._until_close = contextlib.ExitStack()  # what naming needs, too
        try:
            self._open(learner)
        except BaseException:
            self._until_end.close()
            self._until_close.close()
            raise

    def _open(self, learner: LearnerProcess | None) -> None:
        options = self._options
        scope = Scope(options.pids) if options.pids else None
        is_sampled = options.cpu_hz > 0 and not options.all_samples
        self._sampled = scope or (Scope(of_launches=False) if options.command and is_sampled else None)
        self._control = Control(options.control) if options.control else None
        if self._control is not None:
            self._until_end.callback(self._control.close)
        self._roots = Roots(scope)
        self._until_close.callback(self._roots.close)
        self._sources = open_sources(
            options, scope, self._sampled, self._roots, self._signals, self._until_end, self._until_close, learner
        )
        self._journal = Journal(Spool(spool_path(options.output)), self._callbacks.warn, self._callbacks.inform)
        if options.keep_earlier:
            self._keep_earlier()

    def _keep_earlier(self) -> None:
        """Names a finished file of an earlier recording, which may be one of a service that was restarted."""
        try:
            kept = keep_earlier(self._options.output)
        except IaprofError:
            self.discard()
            raise
        if kept is not None:
            self._callbacks.inform(f"{self._options.output} is {kept.name} now")

    @property
    def spool(self) -> Spool:
        """The spool that is written now."""
        return self._journal.spool

    def run(self) -> int:
        """Records until the command exits, the duration elapses or a signal comes.

        Returns:
            The exit code of the command; 0 without one.

        Raises:
            Interrupted: a signal came before the recording began; no spool is left.
            IaprofError: the command cannot be started, and no spool is left; or writing failed, and the spool stays
                with what came before.
        """
        with self._until_end, contextlib.closing(Loop()) as self._loop:
            self._started = time.monotonic_ns()
            self._rotation = Rotation(self._options, self._journal, self._loop, self._roots, self._callbacks.part)
            self._until_end.callback(self._rotation.close)
            try:
                self._begin()
            except BaseException:
                self.discard()
                raise
            self._signals.exit_message = self._exit_message
            gc.freeze()  # these objects stay: traversing them at a collection would keep the loop from reading
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
        if options.max_cpu is not None:
            full = Level(options.cpu_hz, options.metric_interval_ns)
            self._keeper = BudgetKeeper(options.max_cpu, full, self._sources, journal)
        journal.json(FrameKind.HEADER, self._header())
        self._roots.start(journal, loop)
        for source in self._sources:
            source.start(journal, loop)
        loop.wait_for(self._signals.fileno(), self._on_signal)
        if self._control is not None:
            loop.wait_for(self._control.fileno(), self._obey)
        loop.every(TICK_NS, self._tick)
        loop.every(LOSSES_NS, self._note_losses)
        if self._keeper is not None:
            loop.every(BUDGET_NS, self._keeper.measure)
        if self._callbacks.status is not None:
            journal.totals.kernels = LaunchedKernels()
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
            self._start_command()
        with contextlib.suppress(OSError):
            # The hardware's buffers fill in milliseconds: the recorder must run before the programs that fill them.
            # Only now, as the command would inherit it.
            os.setpriority(os.PRIO_PROCESS, 0, NICE)

    def _start_command(self) -> None:
        since_ns = time.monotonic_ns()
        self._command = Command(self._options.command, self._signals, self._environment())
        self._command_pid = [self._command.pid, since_ns]
        for item in self._command_pid:
            self._journal.append(COMMAND, item)
        if self._sampled is not None:
            self._sampled.add_command(self._command.pid)

    def _header(self) -> dict[str, Any]:
        """Returns the header of the output file that begins now."""
        members = header(self._options, self._rotation.number, self._sources) | self._rotation.files.header()
        members |= {COMMAND: self._command_pid} if self._command_pid else {}
        return members | (self._keeper.header() if self._keeper is not None else {})

    def _footer(self, end_ns: int) -> dict[str, Any]:
        """Returns what is added to the header of the file that ends."""
        return footer(end_ns, self.spool.size, self._sources) | self._rotation.files.header()

    def _environment(self) -> dict[str, str]:
        """Returns the command's environment."""
        environment = users_environment()
        for source in self._sources:
            environment = source.environment(environment)
        return environment

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
            if self._signals.count:  # the command may end later, and that is recorded, too
                self._loop.at(time.monotonic_ns() + int(PATIENCE_S * 1e9), self._end_soon)

    def _obey(self) -> None:
        assert self._control is not None
        for command in self._control.read():
            if command == "closed":
                self._loop.forget(self._control.fileno())
                continue
            if command not in COMMANDS:
                self._journal.warn(f"--control: '{command}' is not one of {', '.join(COMMANDS)}")
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
            self._note_pause()  # before resuming: no sample lies in a pause
            for source in self._sources:
                source.resume()

    def _note_pause(self) -> None:
        if self._pause_began:
            self._journal.append("paused", [self._pause_began, time.monotonic_ns()])
        self._pause_began = None

    def _pause(self) -> None:
        """Pauses sampling, not launches: the GPU may execute after the pause what was launched in it."""
        if self._pause_began is None:
            time.sleep(DRAIN_S)
            for source in self._sources:
                source.pause()
            self._pause_began = time.monotonic_ns()

    def _tick(self) -> None:
        for source in self._sources:
            source.read()
        limit = self._options.max_bytes
        if limit is not None and self._journal.earlier_bytes + self.spool.size >= limit:
            self._journal.warn(f"--max-size: {limit:,} bytes were recorded; the recording ends")
            self._end_soon()

    def _note_losses(self) -> None:
        for source in self._sources:
            source.losses()

    def _show_status(self) -> None:
        if self._callbacks.status is not None:
            self._callbacks.status(self.status())

    def _rotate(self) -> None:
        if self._rotation.is_under_way:
            return  # tried again in the next turn
        self._signals.rotate = False
        now = time.monotonic_ns()
        since = now - OVERLAP_NS  # launches that begin now are read late on a busy machine
        self._tick()
        for source in self._sources:
            source.end_part(since)
        self._note_losses()
        self._journal.json(FrameKind.END, self._footer(now))
        self._rotation.rotate()
        self._journal.json(FrameKind.HEADER, self._header())
        for source in self._sources:
            source.begin_part(since)
        self._roots.write_again()

    def status(self) -> Status:
        """Returns the state of the recording."""
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

    def _exit_message(self) -> str:
        return f"iaprof: stopped at once; 'iaprof recover {self.spool.path}' saves what was recorded\n"

    def _end(self) -> None:
        stopped = time.monotonic_ns()
        if self._options.is_kept:
            # Started now, so that its imports are done when the spool is complete.
            self._finisher = Finisher(self.spool, self._options.symbols, roots=self._roots.by_process())
        if self._command is not None:
            number = self._command.killed_by
            if number and number not in _BY_USERS:
                self._callbacks.warn(f"signal {number} ({signal.strsignal(number) or 'unknown'}) ended the command")
            self._command.end()
        time.sleep(DRAIN_S)
        for source in self._sources:
            source.stop()
        for source in self._sources:
            source.finish()
        self._note_losses()
        self._roots.release_unused()
        if self._pause_began is not None:
            self._note_pause()
        self._rotation.wait()
        self._journal.json(FrameKind.END, self._footer(stopped))
        if self._finisher is not None:
            self._finisher.go(self._options.output)

    def finish(self) -> tuple[dict[str, Any], int]:
        """Waits for the capture of an ended recording, and deletes the spool; returns the capture's header and bytes.

        Raises:
            IaprofError: the capture cannot be made; the spool stays.
        """
        finisher = self._finisher
        assert finisher is not None
        is_naming = False
        while not finisher.read():
            if finisher.naming is not None:
                if not is_naming:
                    is_naming, self._signals.call_once = True, finisher.skip_names
                if self._callbacks.naming is not None:
                    self._callbacks.naming(*finisher.naming)
        self._signals.call_once = None
        made = finisher.result()
        self.discard()
        self._signals.exit_message = lambda: "iaprof: stopped at once; the capture is written\n"
        return made

    def discard(self) -> None:
        """Deletes the spool: of an ended recording that is not kept, for instance."""
        self.spool.close()
        self.spool.remove()

    def close(self) -> None:
        """Ends the process that makes the capture, and closes what naming needed."""
        if self._finisher is not None:
            self._finisher.close()
        self._until_close.close()

    @property
    def is_ending(self) -> bool:
        """Whether the recording was told to end."""
        return self._stop or bool(self._signals.count)

    @property
    def command_runs(self) -> bool:
        """Whether there is a command that has not ended yet."""
        return self._command is not None and self._command.runs

    def wait_for_command(self) -> None:
        """Waits until the command ends or a signal comes, though its recording has failed."""
        if self._command is not None:
            self._command.wait()


# The signals by which users and shells end commands
_BY_USERS = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGPIPE, signal.SIGTERM)
PATIENCE_S = 3.0  # how long a command that handles the ending signal itself may go on running
WAIT_S = 1.0  # how long `end` waits for the command after SIGTERM


class Command:
    """The recorded command, from its start on."""

    def __init__(self, words: tuple[str, ...], signals: StopSignals, environment: Mapping[str, str]) -> None:
        """Starts the command with our standard input and output.

        Args:
            words: the program and its arguments.
            signals: forwards those meant for the command.
            environment: of the command.

        Raises:
            IaprofError: the command cannot be started.
        """
        self._signals = signals
        signals.take_for_command()
        try:
            self._process = subprocess.Popen(words, env=environment)
        except OSError as error:
            raise IaprofError(f"{words[0]} cannot be started: {error.strerror}") from error

    @property
    def pid(self) -> int:
        """Its process."""
        return self._process.pid

    @property
    def runs(self) -> bool:
        """Whether the command has not ended yet."""
        return self._process.poll() is None

    @property
    def killed_by(self) -> int:
        """The number of the signal that ended the command; 0 for none."""
        return max(-(self._process.poll() or 0), 0)

    @property
    def exit_code(self) -> int:
        """The command's exit code, 128 + signal number if a signal ended it; 0 while it runs."""
        return 128 + self.killed_by if self.killed_by else self._process.returncode or 0

    def forward(self) -> None:
        """Sends the command the signals that came for it."""
        for number in self._signals.to_forward():
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    def end(self) -> None:
        """Sends SIGTERM, and waits WAIT_S for the command's end."""
        if self.runs:
            self._process.terminate()  # as perf does when it is interrupted
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(WAIT_S)

    def wait(self) -> None:
        """Waits until the command ends or a signal comes, though its recording has failed."""
        while self.runs and not self._signals.count:
            select.select([self._signals], [], [], 1.0)
            self._signals.clear()
            self.forward()


_COST = ("cpu_s", "learn_cpu_s", "compile_cpu_s", "peak_bytes", "spool_bytes", "probe_ns")
"""The order of the members of `cost`."""


def header(options: Options, part: int, sources: Sequence[Source]) -> dict[str, Any]:
    """Returns the header as it is known when output file number `part` begins."""
    host = os.uname()
    members: dict[str, Any] = {
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
        LABELS: dict(options.labels),
        "part": part,
        "clock": _clocks(),
    }
    for source in sources:
        members |= source.header()
    return _in_order(members, MEMBERS)


def footer(end_ns: int, spool_bytes: int, sources: Sequence[Source]) -> dict[str, Any]:
    """Returns the members that are added to the header when an output file ends."""
    members: dict[str, Any] = {"end_ns": end_ns, "clock_end": _clocks()}
    cost: dict[str, Any] = {}
    for source in sources:
        of_source = source.footer()
        cost |= of_source.pop("cost", {})
        members |= of_source
    cost |= {
        "cpu_s": round(cpu_seconds() + sum(source.cpu_seconds for source in sources), 3),
        "peak_bytes": peak_bytes(),
        "spool_bytes": spool_bytes,
    }
    return _in_order(members | {"cost": _in_order(cost, _COST)}, MEMBERS)


def _in_order(members: dict[str, Any], order: Iterable[str]) -> dict[str, Any]:
    """Sorts members; those that the order does not have come last."""
    place = {name: number for number, name in enumerate(order)}
    return dict(sorted(members.items(), key=lambda member: place.get(member[0], len(place))))


def _clocks() -> dict[str, int]:
    """Returns the current time on both clocks: the wall clock may be set while recording."""
    monotonic, realtime = time.monotonic_ns(), time.time_ns()
    return {"monotonic_ns": monotonic, "realtime_ns": realtime}
