"""`iaprof record`: records a capture."""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from iaprof.basics.clean import clean
from iaprof.basics.errors import IaprofError, UsageError
from iaprof.basics.files import check_output
from iaprof.cli.options.captures import DEFAULT
from iaprof.cli.options.symbol_options import WhichSymbols, which_symbols
from iaprof.cli.options.values import checked_choice, one_of, percent, pids, size, size_or_time
from iaprof.cli.terminal.progress import Printer, Progress
from iaprof.cli.terminal.summary import end_line, launch_warnings, say_end
from iaprof.formats.header.labels import parse_labels

if TYPE_CHECKING:
    from iaprof.record.options import Options
    from iaprof.record.session import Callbacks
    from iaprof.record.signals import StopSignals
    from iaprof.record.unwinding.learner_process import LearnerProcess

EXAMPLES = """\b
Examples:
  sudo iaprof record -o cap.parquet -- ./app     while ./app runs
  sudo iaprof record -d 10                       ten seconds of everything
  sudo iaprof record -p 1234 -d 10               process 1234 and its children
  sudo iaprof record --device card1 --rate fast  one GPU, sampled more often
  sudo iaprof record --switch-output=10m --max-files=6   keep the last hour
  sudo iaprof record                             until Ctrl-C
"""
_LAUNCHES = ("auto", "probes", "attach", "inject")


@dataclass(frozen=True)
class RecordingOptions:
    """The options of a recording."""

    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="The capture to write.")] = DEFAULT
    force: Annotated[bool, typer.Option("--force", "-f", help="Replace an existing capture.")] = False
    all_: Annotated[
        bool, typer.Option("--all", "-a", help="Record all processes, CPU samples of others than COMMAND's, too.")
    ] = False
    processes: Annotated[
        list[str] | None,
        typer.Option("--pid", "-p", metavar="PID,...", help="Record only these processes and their children."),
    ] = None
    devices: Annotated[
        list[str] | None,
        typer.Option("--device", metavar="DEVICE", help="Record only this GPU: card, PCI address or render node."),
    ] = None
    duration: Annotated[
        float | None,
        typer.Option("--duration", "-d", metavar="SECONDS", help="Stop after this time.", show_default=False),
    ] = None
    delay: Annotated[
        int,
        typer.Option("--delay", "-D", metavar="MS", help="Start sampling after MS; -1: when --control enables it."),
    ] = 0
    rate: Annotated[
        str | None,
        typer.Option("--rate", metavar="RATE", help="Sample at this rate, a name or GPU cycles from 'iaprof devices'."),
    ] = None
    subsample: Annotated[
        int, typer.Option("--subsample", metavar="N", help="Keep one of every N stall records.", show_default=False)
    ] = 1
    launches: Annotated[
        str,
        typer.Option(
            "--launches",
            metavar="WAY",
            help="How to record launches: auto, probes, attach or inject.",
            autocompletion=one_of(_LAUNCHES),
        ),
    ] = "auto"
    waits: Annotated[
        bool,
        typer.Option("--waits", help="Record which threads wait for the GPU, and how long. Read docs/waits.md first."),
    ] = False
    cpu_freq: Annotated[
        int, typer.Option("--cpu-freq", metavar="HZ", help="Take HZ CPU samples per second; 0: none.")
    ] = 49
    max_stack: Annotated[
        int, typer.Option("--max-stack", metavar="N", help="Keep at most N innermost frames of a stack.")
    ] = 256
    metric_interval: Annotated[
        float, typer.Option("--metric-interval", metavar="MS", help="Read metrics every MS; 0: never.")
    ] = 10
    control: Annotated[
        str | None,
        typer.Option(
            "--control", metavar="fifo:CTL[,ACK]", help="Accept the commands enable, disable, snapshot, stop and ping."
        ),
    ] = None
    switch_output: Annotated[
        str | None,
        typer.Option(
            "--switch-output", metavar="SIZE|TIME", help="Start a new file after this size (500M) or time (10m)."
        ),
    ] = None
    max_files: Annotated[
        int | None, typer.Option("--max-files", metavar="N", help="Keep only the last N files.", show_default=False)
    ] = None
    max_total: Annotated[
        str | None,
        typer.Option("--max-total", metavar="SIZE", help="Remove the oldest files of this name when all exceed SIZE."),
    ] = None
    max_cpu: Annotated[
        str | None,
        typer.Option(
            "--max-cpu", metavar="PERCENT", help="Sample less before recording uses more than PERCENT of one CPU."
        ),
    ] = None
    max_size: Annotated[str | None, typer.Option("--max-size", metavar="SIZE", help="Stop when SIZE was recorded.")] = (
        None
    )
    label: Annotated[
        list[str] | None,
        typer.Option("--label", metavar="NAME=VALUE", help="Label the capture, to find and group it later."),
    ] = None
    symbols: WhichSymbols = "needed"

    def check(self, command: Sequence[str]) -> None:
        """Checks the values for a recording of a command, or of none.

        Raises:
            UsageError: a value is invalid, or two contradict each other.
            IaprofError: the capture may not be written.
        """
        if pids(self.processes) and self.all_:
            raise UsageError("-a and -p exclude each other")
        if self.duration is not None and not 0 < self.duration < 1e9:
            raise UsageError("--duration must be more than 0 seconds")
        if self.delay < -1:
            raise UsageError("--delay takes milliseconds, or -1")
        if self.delay == -1 and self.control is None:
            raise UsageError("--delay -1 waits for --control, which is not given")
        if not 1 <= self.subsample <= 1 << 30:
            raise UsageError("--subsample takes 1 or more")
        if not 0 <= self.cpu_freq <= 10_000:
            raise UsageError("--cpu-freq takes 0 to 10000 Hz")
        if self.metric_interval and not 1 <= self.metric_interval <= 1e6:
            raise UsageError("--metric-interval takes 1 ms or more, or 0")
        if self.max_files is not None and self.max_files < 1:
            raise UsageError("--max-files takes 1 or more")
        checked_choice(self.launches, _LAUNCHES, "--launches")
        if self.launches == "inject" and not command:
            raise UsageError("--launches inject works in the command that it starts: name one after --")
        which_symbols(self.symbols)
        if self.max_total and not self.switch_output:
            raise UsageError("--max-total removes earlier files of --switch-output, which is not given")
        check_output(self.output, self.force or self._keep_earlier)

    @property
    def _keep_earlier(self) -> bool:
        return self.switch_output is not None and not self.force

    def of(self, command: Sequence[str]) -> Options:
        """Returns the values for a recording of a command, or of none; UsageError if one is invalid."""
        # Imported here and below, so that other verbs load nothing of the recorder.
        from iaprof.formats.wire.launches import MAX_DEPTH
        from iaprof.record.options import LaunchesBy, Options

        if not 1 <= self.max_stack <= MAX_DEPTH:
            raise UsageError(f"--max-stack takes 1 to {MAX_DEPTH} frames")

        switch_bytes, switch_s = (
            size_or_time(self.switch_output, "--switch-output") if self.switch_output else (None, None)
        )
        return Options(
            output=self.output,
            command=tuple(command),
            duration_s=self.duration,
            delay_ms=self.delay,
            pids=pids(self.processes),
            all_samples=self.all_,
            devices=tuple(name for text in self.devices or () for name in text.split(",") if name),
            rate=self.rate,
            subsample=self.subsample,
            launches=LaunchesBy(self.launches),
            waits=self.waits,
            cpu_hz=self.cpu_freq,
            max_stack=self.max_stack,
            metric_interval_ns=int(self.metric_interval * 1e6),
            control=self.control,
            switch_bytes=switch_bytes,
            switch_s=switch_s,
            keep_earlier=self._keep_earlier,
            max_files=self.max_files,
            max_cpu=percent(self.max_cpu, "--max-cpu") / 100 if self.max_cpu else None,
            max_total=size(self.max_total, "--max-total") if self.max_total else None,
            symbols=which_symbols(self.symbols),
            max_bytes=size(self.max_size, "--max-size") if self.max_size else None,
            labels=parse_labels(self.label or ()),
        )


def record(
    *,
    command: Annotated[list[str] | None, typer.Argument(metavar="-- COMMAND", hidden=True)] = None,
    recording: RecordingOptions,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but errors.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Also report libraries and modules.")] = False,
) -> None:
    """Record stalls of GPUs, launches and GPU kernels.

    Records until COMMAND exits, the duration elapses, or Ctrl-C (SIGTERM, SIGHUP). The capture contains samples of
    what stalls on the GPUs (EU stalls of Intel's, PC samples of NVIDIA's), launches with their CPU stacks, the
    kernels' binaries, CPU samples and metrics. Then iaprof adds the names of the functions in the stacks; Ctrl-C ends
    that early. A second Ctrl-C during recording quits at once and leaves the spool for 'iaprof recover'. SIGUSR2
    starts a new file. Signals are forwarded to COMMAND, and record exits with its exit code. Needs root. NVIDIA's
    GPUs are sampled only in COMMAND and its children.
    """
    if os.geteuid() != 0:
        raise IaprofError("recording needs root: run it with sudo")
    recording.check(command or ())
    from iaprof.record.signals import StopSignals
    from iaprof.record.unwinding.learner_process import LearnerProcess

    # The learner starts while this process imports the rest.
    with StopSignals() as signals, contextlib.closing(LearnerProcess()) as learner:
        status = _record(recording.of(command or ()), signals, quiet, verbose, learner)
    if status:
        raise typer.Exit(status)


def _record(options: Options, signals: StopSignals, quiet: bool, verbose: bool, learner: LearnerProcess) -> int:
    """Records and finishes the capture; returns the command's exit code.

    Raises:
        IaprofError: recording failed; the text says where to find what was recorded before, if anything was.
    """
    from iaprof.record.session import Session

    with Printer() as printer:
        progress = Progress(printer)
        session = Session(options, signals, _callbacks(progress, quiet, verbose), learner)
        try:
            status = session.run()
            header, size = session.finish()
        except Exception as error:
            progress.clear()
            what = str(error) if isinstance(error, IaprofError) else f"this is a bug, please report it: {_place(error)}"
            if session.spool.path.exists():
                what += f"; 'iaprof recover {session.spool.path} -o FILE' saves what was recorded before"
            if session.command_runs:
                progress.say(f"iaprof: {clean(what)}; the command continues, and iaprof waits for it")
                session.wait_for_command()
                return IaprofError.exit_code
            failure = IaprofError(what)
            failure.exit_code = getattr(error, "exit_code", IaprofError.exit_code)
            raise failure from error
        finally:
            session.close()
        progress.clear()
    if not quiet:
        say_end("record", options.output, header, size)
    return status


def _callbacks(progress: Progress, quiet: bool, verbose: bool) -> Callbacks:
    """The callbacks for messages: none if quiet, and a status line only on a terminal."""
    from iaprof.record.session import Callbacks

    def tell(text: str) -> None:
        progress.say(f"iaprof: {clean(text)}")

    def part(path: Path, header: dict[str, Any], size: int) -> None:
        progress.say(end_line("record", path, header, size))
        for warning in launch_warnings(header):
            progress.say(warning)

    def nothing(*_: object) -> None:
        pass

    if quiet:
        return Callbacks(nothing, nothing, nothing)
    on_terminal = sys.stderr is not None and sys.stderr.isatty()
    inform = tell if verbose else nothing
    return Callbacks(
        tell, inform, part, progress.show if on_terminal else None, progress.naming if on_terminal else None
    )


def _place(error: Exception) -> str:
    """The type, text and place of an exception, for a bug report."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__} ({error}) at {Path(last.filename).name}:{last.lineno}"
