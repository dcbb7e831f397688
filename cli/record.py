"""`iaprof record`: from a running machine to a capture."""

from __future__ import annotations

import os
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from iaprof.cli.summary import end_line, say
from iaprof.formats.errors import IaprofError, UsageError
from iaprof.formats.files import check_output
from iaprof.formats.profile import clean

if TYPE_CHECKING:
    from iaprof.record.session import Options
    from iaprof.record.signals import StopSignals

EXAMPLES = """\b
Examples:
  sudo iaprof record -o cap.parquet -- ./app     while ./app runs
  sudo iaprof record -d 10                       ten seconds of everything that runs
  sudo iaprof record                             until Ctrl-C
"""


def record(
    command: Annotated[list[str] | None, typer.Argument(metavar="-- COMMAND", hidden=True)] = None,
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
    SIGTERM, or SIGHUP). A second Ctrl-C quits at once and leaves the spool, which 'iaprof recover' reads. The exit
    code is COMMAND's. Needs root.
    """
    if os.geteuid() != 0:
        raise IaprofError("recording needs root: run it with sudo")
    if duration is not None and duration <= 0:
        raise UsageError("--duration must be more than 0 seconds")
    check_output(output, force)
    # Imported here, so that `iaprof report` needs none of what recording needs.
    from iaprof.record.signals import StopSignals

    with StopSignals() as signals:
        from iaprof.record.session import Options

        status = _record(Options(output, tuple(command or ()), duration), signals, quiet)
    if status:
        raise typer.Exit(status)


def _record(options: Options, signals: StopSignals, quiet: bool) -> int:
    """Records and finishes; gives the exit code of the command.

    Raises:
        IaprofError: the sentence says where what was recorded can be found, if anything was.
    """
    from iaprof.record.finish import finish
    from iaprof.record.session import Session

    session = Session(options, signals)
    try:
        status = session.run()
        reader = session.spool.reader()
        finished = finish(reader, options.output)
        reader.close()
    except Exception as error:
        what = str(error) if isinstance(error, IaprofError) else f"this should not have happened: {_place(error)}"
        if session.spool.path.exists():
            what += f"; what was recorded before is saved by 'iaprof recover {session.spool.path} -o FILE'"
        if session.command_runs:
            say(f"iaprof: {clean(what)}; the command goes on, and is waited for")
            session.wait_for_command()
            return IaprofError.exit_code
        failure = IaprofError(what)
        failure.exit_code = getattr(error, "exit_code", IaprofError.exit_code)
        raise failure from error
    session.spool.remove()
    if not quiet:
        say(end_line("record", options.output, finished.header, finished.size))
    return status


def _place(error: Exception) -> str:
    """What a bug report needs."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__} ({error}) at {Path(last.filename).name}:{last.lineno}"
