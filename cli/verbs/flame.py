"""`iaprof flame`: records a command and makes a page of it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from iaprof.basics.clean import clean
from iaprof.basics.errors import IaprofError, UsageError
from iaprof.basics.files import check_output
from iaprof.cli.options.captures import FleetOptions
from iaprof.cli.options.declared import Given
from iaprof.cli.options.memory_limit import Large, MemoryLimit, apply_limit, memory_bytes
from iaprof.cli.options.selection import SelectionOptions
from iaprof.cli.options.shown import StackShape
from iaprof.cli.terminal.destination import open_in_browser
from iaprof.cli.terminal.summary import say
from iaprof.cli.timelines.options import DeviceOptions
from iaprof.cli.verbs.record import RecordingOptions, record
from iaprof.cli.verbs.report import Browsers, ReportOutput, report
from iaprof.formats.capture.limits import allow_large
from iaprof.sandbox.memory import default_limit, use_malloc

EXAMPLES = """\b
Examples:
  sudo iaprof flame -- ./app               iaprof.html, while ./app runs
  sudo iaprof flame -o app.html -- ./app   app.html, and app.parquet beside it
  sudo iaprof flame -d 10                  ten seconds of everything
"""


def flame(
    command: Annotated[list[str] | None, typer.Argument(metavar="-- COMMAND", hidden=True)] = None,
    output: Annotated[
        Path,
        typer.Option(
            "--output", "-o", metavar="FILE", help="The page to write. The capture gets the same name with .parquet."
        ),
    ] = Path("iaprof.html"),
    force: Annotated[bool, typer.Option("--force", "-f", help="Replace existing files.")] = False,
    duration: Annotated[
        float | None,
        typer.Option("--duration", "-d", metavar="SECONDS", help="Stop after this time.", show_default=False),
    ] = None,
    memory_limit: MemoryLimit = None,
    large: Large = False,
    open_: Annotated[bool, typer.Option("--open", help="Show the page in a browser.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but errors.")] = False,
) -> None:
    """Record COMMAND and write an HTML page.

    Runs iaprof record and report in turn. Writes the page, which any browser can open, and the capture, from which
    iaprof report makes all other formats. Exits with COMMAND's exit code. Needs root.
    """
    if not command and duration is None:
        raise UsageError("name a COMMAND to record, or a --duration")
    if os.geteuid() != 0:
        raise IaprofError("recording needs root: run it with sudo")
    if output.suffix not in (".html", ".htm"):
        raise UsageError(f"{output} has to be a page: call it {output.name}.html")
    capture = output.with_suffix(".parquet")
    for path in (output, capture):
        check_output(path, force)
    most = memory_bytes(memory_limit)
    use_malloc()
    status = _recorded(capture, command, duration, force, quiet)
    apply_limit(most or default_limit())  # set only now, as the recorder has no limit
    if large:
        allow_large()
    report(
        Given({}),
        captures=[str(capture)],
        output=ReportOutput(output=output, force=force),
        shape=StackShape(),
        browsers=Browsers(),
        device=DeviceOptions(),
        quiet=quiet,
        choice=SelectionOptions(),
        fleet=FleetOptions(),
    )
    if not quiet:
        say(clean(f"iaprof: {output} opens in any browser; {capture} is the capture"))
    if open_:
        open_in_browser(output.absolute().as_uri())
    if status:
        raise typer.Exit(status)


def _recorded(capture: Path, command: list[str] | None, duration: float | None, force: bool, quiet: bool) -> int:
    """Records; returns the command's exit code."""
    try:
        record(command=command, recording=RecordingOptions(capture, force=force, duration=duration), quiet=quiet)
    except typer.Exit as ended:
        return ended.exit_code
    return 0
