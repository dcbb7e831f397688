"""`iaprof record`: from a running machine to a capture."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from iaprof.cli.summary import end_line
from iaprof.formats.errors import IaprofError, UsageError
from iaprof.formats.files import check_output

EXAMPLES = """\b
Examples:
  sudo iaprof record -o cap.parquet -- ./app     while ./app runs
  sudo iaprof record -d 10                       ten seconds of everything that runs
  sudo iaprof record                             until Ctrl-C
"""


def record(
    command: Annotated[
        list[str] | None, typer.Argument(metavar="-- COMMAND", help="Record while this runs.", show_default=False)
    ] = None,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="The capture to write.")] = Path(
        "iaprof.parquet"
    ),
    duration: Annotated[
        float | None,
        typer.Option("--duration", "-d", metavar="SECONDS", min=0.0, help="End after this time.", show_default=False),
    ] = None,
    force: Annotated[bool, typer.Option("--force", "-f", help="Replace an existing capture.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but errors.")] = False,
) -> None:
    """Record EU stalls, launches and GPU kernels.

    The capture holds the EU stalls of the GPUs, the launches with their CPU stacks, and the kernels' binaries, of
    all processes of the machine, also those that start later: until COMMAND ends, the time is over, or Ctrl-C (or
    SIGTERM). A second Ctrl-C quits at once and leaves the spool, which 'iaprof recover' reads. The exit
    code is COMMAND's. Needs root.
    """
    if os.geteuid() != 0:
        raise IaprofError("recording needs root: run it with sudo")
    if duration is not None and duration <= 0:
        raise UsageError("--duration must be more than 0 seconds")
    check_output(output, force)
    # Imported here, so that `iaprof report` needs none of what recording needs.
    from iaprof.record.finish import finish
    from iaprof.record.session import Options, Session
    from iaprof.record.spool import SpoolReader

    session = Session(Options(output, tuple(command or ()), duration))
    status = session.run()
    reader = SpoolReader(session.spool.path)
    finished = finish(reader, output)
    reader.close()
    session.spool.remove()
    if not quiet:
        print(end_line("record", output, finished.header, finished.size), file=sys.stderr)
    if status:
        raise typer.Exit(status)
