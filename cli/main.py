"""The `iaprof` command: registers the verbs and, in one place, turns errors into messages."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

import iaprof
from iaprof.basics.errors import IaprofError
from iaprof.cli.options.grouped_help import Grouped
from iaprof.cli.options.memory_limit import out_of_memory, with_limits, with_memory_limit
from iaprof.cli.verbs import (
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
    timeline,
    top,
)
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
# Options after the command's name belong to the command, with or without `--`.
app.command(epilog=record.EXAMPLES, context_settings={"allow_interspersed_args": False})(record.record)
app.command(epilog=flame.EXAMPLES, context_settings={"allow_interspersed_args": False})(flame.flame)
app.command(cls=Grouped, epilog=report.EXAMPLES)(with_limits(report.report))
app.command(cls=Grouped, epilog=top.EXAMPLES)(with_limits(top.top))
app.command(name="annotate", cls=Grouped, epilog=annotate.EXAMPLES)(with_limits(annotate.annotate))
app.command(cls=Grouped, epilog=diff.EXAMPLES)(with_limits(diff.diff))
app.command(epilog=info.EXAMPLES)(with_limits(info.info))
app.command(epilog=merge.EXAMPLES)(with_limits(merge.merge))
app.command(name="import", epilog=import_.EXAMPLES)(with_limits(import_.import_))
app.command(cls=Grouped, epilog=timeline.EXAMPLES)(with_limits(timeline.timeline))
app.command(epilog=query.EXAMPLES)(with_limits(query.query))
app.command(epilog=archive.EXAMPLES)(with_limits(archive.archive))
app.command(epilog=recover.EXAMPLES)(with_memory_limit(recover.recover))
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
    """Runs the command line; prints an error as one sentence on stderr, and exits with its exit code."""
    try:
        app()
    except IaprofError as error:
        print(f"iaprof: {clean(str(error))}", file=sys.stderr)
        sys.exit(error.exit_code)
    except MemoryError:
        print(f"iaprof: {out_of_memory()}", file=sys.stderr)
        sys.exit(1)
    except Exception as error:
        if not _is_of_arrow(error):
            raise
        reason = clean((str(error).splitlines() or [type(error).__name__])[0][:200])
        print(f"iaprof: a file that was read is damaged, or made to do harm: Arrow says: {reason}", file=sys.stderr)
        sys.exit(1)


def _is_of_arrow(error: Exception) -> bool:
    """Whether Arrow raised the error. Imports Arrow only here, as verbs must start without it."""
    import pyarrow as pa

    return isinstance(error, pa.ArrowException)


if __name__ == "__main__":
    main()
