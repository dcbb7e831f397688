"""The `iaprof` command: registers the verbs and, in one place, turns errors into messages."""

from __future__ import annotations

import signal
import sys
from typing import Annotated

import typer

import iaprof
from iaprof.basics.clean import clean
from iaprof.basics.errors import IaprofError, UsageError
from iaprof.cli.options.declared import with_options
from iaprof.cli.options.memory_limit import Limits, OneLimit, out_of_memory
from iaprof.cli.options.parsing import Refused, Verb, Verbs, sentence
from iaprof.cli.verbs import (
    annotate,
    archive,
    calibrate,
    check,
    devices,
    diff,
    flame,
    help as help_of,
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

_NAME = "iaprof"
app = typer.Typer(
    name=_NAME,
    cls=Verbs,
    help="Shows where Intel's and NVIDIA's GPUs stall, from main() to the instruction: record on one machine, report "
    "on any.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
# Options after the command's name belong to the command, with or without `--`.
app.command(cls=Verb, epilog=record.EXAMPLES, context_settings={"allow_interspersed_args": False})(
    with_options(record.record)
)
app.command(cls=Verb, epilog=flame.EXAMPLES, context_settings={"allow_interspersed_args": False})(flame.flame)
app.command(cls=Verb, epilog=report.EXAMPLES, short_help="Print where the GPU stalled, in any of many formats.")(
    with_options(report.report, Limits)
)
app.command(cls=Verb, epilog=top.EXAMPLES)(with_options(top.top, Limits))
app.command(name="annotate", cls=Verb, epilog=annotate.EXAMPLES)(with_options(annotate.annotate, Limits))
app.command(cls=Verb, epilog=diff.EXAMPLES)(with_options(diff.diff, Limits))
app.command(cls=Verb, epilog=info.EXAMPLES)(with_options(info.info, Limits))
app.command(cls=Verb, epilog=merge.EXAMPLES)(with_options(merge.merge, Limits))
app.command(
    name="import",
    cls=Verb,
    epilog=import_.EXAMPLES,
    short_help="Convert output and traces of other tools into a capture.",
)(with_options(import_.import_, Limits))
app.command(cls=Verb, epilog=timeline.EXAMPLES, short_help="Show what an accelerator did over time.")(
    with_options(timeline.timeline, Limits)
)
app.command(cls=Verb, epilog=query.EXAMPLES)(with_options(query.query, Limits))
app.command(cls=Verb, epilog=archive.EXAMPLES)(with_options(archive.archive, Limits))
app.command(cls=Verb, epilog=recover.EXAMPLES)(with_options(recover.recover, OneLimit))
app.command(cls=Verb, epilog=devices.EXAMPLES)(devices.devices)
app.command(cls=Verb, epilog=check.EXAMPLES)(check.check)
app.command(cls=Verb, epilog=calibrate.EXAMPLES, short_help="Learn the layout of a driver that iaprof does not know.")(
    calibrate.calibrate
)
app.command(name="help", cls=Verb, epilog=help_of.EXAMPLES)(help_of.help_)


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
    """Runs the command line; prints an error as one sentence on stderr, and exits with its exit code.

    The exit codes are those of docs/command-line.md: 0; 1 for errors; 2 for wrong usage; 130 after Ctrl-C; 141 if the
    reader of stdout closed it, in all formats.
    """
    try:
        status = app(prog_name=_NAME, standalone_mode=False) or 0
    except SystemExit as ended:
        if not isinstance(ended.__context__, BrokenPipeError):  # typer turns it into exit code 1
            raise
        status = 128 + signal.SIGPIPE
    except Refused as error:
        status = _usage(error)
    except IaprofError as error:
        status = _failed(str(error), error.exit_code)
    except MemoryError:
        status = _failed(out_of_memory())
    except Exception as error:
        if not _is_of_arrow(error):
            raise
        reason = clean((str(error).splitlines() or [type(error).__name__])[0][:200])
        status = _failed(f"a file that was read is damaged or malicious: Arrow says: {reason}")
    sys.exit(status)


def _failed(text: str, status: int = IaprofError.exit_code) -> int:
    print(f"iaprof: {clean(text)}", file=sys.stderr)
    return status


def _usage(error: Exception) -> int:
    """Prints what is wrong with the command line, or the help if it is empty; returns the exit code."""
    if type(error).__name__ == "NoArgsIsHelpError":
        print(error, file=sys.stderr)
        return UsageError.exit_code
    return _failed(sentence(error), UsageError.exit_code)


def _is_of_arrow(error: Exception) -> bool:
    """Whether Arrow raised the error. Imports Arrow only here, as verbs must start without it."""
    import pyarrow as pa

    return isinstance(error, pa.ArrowException)


if __name__ == "__main__":
    main()
