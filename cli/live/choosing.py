"""The options of `iaprof top --live`, as those of a recording."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from iaprof.basics.errors import IaprofError, UsageError
from iaprof.basics.files import check_output
from iaprof.cli.interactive.opening import check_terminal, given

if TYPE_CHECKING:
    from iaprof.cli.options.selection import SelectionOptions

_TAKEN = frozenset(("captures", "live", "interactive", "output", "force", "duration", "pid", "device", "quiet"))


def show_live(
    context: typer.Context,
    command: Sequence[str],
    choice: SelectionOptions,
    output: Path | None,
    force: bool,
    duration: float | None,
    quiet: bool,
) -> None:
    """Records and shows it while it goes on.

    Args:
        context: of the verb.
        command: what to start and record; empty for all that runs.
        choice: of which processes and devices.
        output: the capture to write; None for none.
        force: replace an existing capture.
        duration: seconds, after which the recording ends; None: when the user quits.
        quiet: print no last line.

    Raises:
        UsageError: an option has no effect here, or this is not a terminal.
        IaprofError: this is not root, textual is not installed, or recording failed.
    """
    for name in given(context, _TAKEN):
        raise UsageError(f"{name} has no effect with --live: leave out one of them")
    if duration is not None and not 0 < duration < 1e9:
        raise UsageError("--duration must be more than 0 seconds")
    if output is not None and output.suffix != ".parquet":
        raise UsageError(f"with --live, -o names a capture: call it {output.name}.parquet")
    check_terminal("--live")
    if os.geteuid() != 0:
        raise IaprofError("recording needs root: run it with sudo")
    if output is not None:
        check_output(output, force)
    # Imported here, as other uses of `iaprof top` load nothing of the recorder.
    from iaprof.cli.live.recording import record_live
    from iaprof.record.options import Options

    options = Options(
        output=output or Path("live.parquet"),
        command=tuple(command),
        duration_s=duration,
        pids=tuple(sorted(choice.selection.pids)),
        devices=choice.selection.devices,
        is_kept=output is not None,
        cpu_hz=Options.cpu_hz if output is not None else 0,  # the view shows neither CPU samples nor metrics
        metric_interval_ns=Options.metric_interval_ns if output is not None else 0,
    )
    title = f"live: {' '.join(command) or 'all processes'}{f', writes {output}' if output else ''}"
    if status := record_live(options, title, quiet):
        raise typer.Exit(status)
