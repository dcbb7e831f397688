"""A recording while it goes on: `iaprof top --live`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import typer

from iaprof.basics.errors import IaprofError, UsageError
from iaprof.basics.files import check_output
from iaprof.cli.options.declared import For, Of
from iaprof.cli.options.selection import SelectionOptions
from iaprof.cli.options.shown import Intervals
from iaprof.cli.subjects.subject import Subject, check_terminal
from iaprof.cli.terminal.answers import Answers


@dataclass(frozen=True)
class Live(Subject):
    """A recording that begins now.

    Attributes:
        command: what to start and record; empty for all that runs.
        choice: of which processes and devices.
        output: the capture to write; None for none.
        force: replace an existing capture.
        duration_s: after which the recording ends; None: when the user quits.
    """

    of: ClassVar = Of.LIVE
    command: Sequence[str]
    choice: SelectionOptions
    output: Path | None
    force: bool
    duration_s: float | None

    def refusal(self, option: str, what: For) -> str:
        """See Subject."""
        return self._refusal(option, what.of)

    def _refusal(self, option: str, of: Of) -> str:
        return f"{option} has no effect with --live: leave out one of them"

    def table(self, by: str, limit: int, intervals: Intervals, answers: Answers, quiet: bool) -> None:
        """Records, and shows a tree of kernels until the user quits; see Subject.

        Raises:
            IaprofError: this is not root, textual is not installed, or recording failed.
            UsageError: this is not a terminal, or a value is invalid.
        """
        if self.duration_s is not None and not 0 < self.duration_s < 1e9:
            raise UsageError("--duration must be more than 0 seconds")
        if self.output is not None and self.output.suffix != ".parquet":
            raise UsageError(f"with --live, -o names a capture: call it {self.output.name}.parquet")
        check_terminal("--live")
        if os.geteuid() != 0:
            raise IaprofError("recording needs root: run it with sudo")
        if self.output is not None:
            check_output(self.output, self.force)
        # Imported here, as other uses of `iaprof top` load nothing of the recorder.
        from iaprof.cli.live.recording import record_live
        from iaprof.record.options import Options

        is_kept, selection = self.output is not None, self.choice.selection
        options = Options(
            output=self.output or Path("live.parquet"),
            command=tuple(self.command),
            duration_s=self.duration_s,
            pids=tuple(sorted(selection.pids)),
            devices=selection.devices,
            is_kept=is_kept,
            cpu_hz=Options.cpu_hz if is_kept else 0,  # the view shows neither CPU samples nor metrics
            metric_interval_ns=Options.metric_interval_ns if is_kept else 0,
        )
        title = f"live: {' '.join(self.command) or 'all processes'}{f', writes {self.output}' if is_kept else ''}"
        if status := record_live(options, title, quiet):
            raise typer.Exit(status)
