"""The `iaprof` command: its verbs, and the one place where errors become messages."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

import iaprof
from iaprof.cli import (
    annotate,
    archive,
    calibrate,
    check,
    devices,
    diff,
    flame,
    import_,
    info,
    merge,
    query,
    record,
    recover,
    report,
    top,
)
from iaprof.cli.grouped_help import Grouped
from iaprof.formats.errors import IaprofError
from iaprof.formats.profile import clean

app = typer.Typer(
    name="iaprof",
    help="Where Intel GPUs stall, from main() to the stalled instruction: record on one machine, report on any.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
# What follows the command's name belongs to the command, whether `--` stands before it or not.
app.command(epilog=record.EXAMPLES, context_settings={"allow_interspersed_args": False})(record.record)
app.command(epilog=flame.EXAMPLES, context_settings={"allow_interspersed_args": False})(flame.flame)
app.command(cls=Grouped, epilog=report.EXAMPLES)(report.report)
app.command(cls=Grouped, epilog=top.EXAMPLES)(top.top)
app.command(name="annotate", cls=Grouped, epilog=annotate.EXAMPLES)(annotate.annotate)
app.command(cls=Grouped, epilog=diff.EXAMPLES)(diff.diff)
app.command(epilog=info.EXAMPLES)(info.info)
app.command(epilog=merge.EXAMPLES)(merge.merge)
app.command(name="import", epilog=import_.EXAMPLES)(import_.import_)
app.command(epilog=query.EXAMPLES)(query.query)
app.command(epilog=archive.EXAMPLES)(archive.archive)
app.command(epilog=recover.EXAMPLES)(recover.recover)
app.command(epilog=devices.EXAMPLES)(devices.devices)
app.command(epilog=check.EXAMPLES)(check.check)
app.command(epilog=calibrate.EXAMPLES)(calibrate.calibrate)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"iaprof {iaprof.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Options of the command itself."""


def main() -> None:
    """Runs the command line; every error is one sentence on stderr and an exit code."""
    try:
        app()
    except IaprofError as error:
        print(f"iaprof: {clean(str(error))}", file=sys.stderr)
        sys.exit(error.exit_code)
    except MemoryError:
        print("iaprof: this needs more memory than there is for it", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
