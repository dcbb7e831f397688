"""The `iaprof` command: knows the verbs and, in one place, turns errors into messages."""

from __future__ import annotations

import signal
import sys
from collections.abc import Mapping
from typing import Annotated, ClassVar

import typer

import iaprof
from iaprof.basics.clean import clean
from iaprof.basics.errors import IaprofError, UsageError
from iaprof.cli.options.memory_limit import out_of_memory
from iaprof.cli.options.parsing import Known, Refused, Verbs, sentence

_NAME = "iaprof"
_NO_THREAD = "can't start new thread"  # Python's message
_LIMIT = "iaprof.cli.options.memory_limit:OneLimit"
_LIMITS = "iaprof.cli.options.memory_limit:Limits"


class _Verbs(Verbs):
    """The verbs, in the order of the help, each with what it says there."""

    KNOWN: ClassVar[Mapping[str, Known]] = {
        "record": Known(
            "iaprof.cli.verbs.record:record", "Record stalls of GPUs, launches and GPU kernels.", command=True
        ),
        "flame": Known("iaprof.cli.verbs.flame:flame", "Record COMMAND and write an HTML page.", command=True),
        "report": Known(
            "iaprof.cli.verbs.report:report",
            short_help="Print where the GPU stalled, in any of many formats.",
            applied=_LIMITS,
        ),
        "top": Known("iaprof.cli.verbs.top:top", "Print what stalls most.", applied=_LIMITS),
        "annotate": Known(
            "iaprof.cli.verbs.annotate:annotate",
            "Print a kernel's instructions and how each of them stalled.",
            applied=_LIMITS,
        ),
        "diff": Known("iaprof.cli.verbs.diff:diff", "Print what changed between two captures.", applied=_LIMITS),
        "info": Known("iaprof.cli.verbs.info:info", "Show what a capture contains.", applied=_LIMITS),
        "merge": Known("iaprof.cli.verbs.merge:merge", "Merge several captures into one.", applied=_LIMITS),
        "import": Known(
            "iaprof.cli.verbs.import_:import_",
            short_help="Convert output and traces of other tools into a capture.",
            applied=_LIMITS,
        ),
        "timeline": Known(
            "iaprof.cli.verbs.timeline:timeline", short_help="Show what an accelerator did over time.", applied=_LIMITS
        ),
        "query": Known("iaprof.cli.verbs.query:query", "Query a capture with SQL.", applied=_LIMITS),
        "archive": Known(
            "iaprof.cli.verbs.archive:archive",
            "Write a capture whose frames have names on any machine.",
            applied=_LIMITS,
        ),
        "recover": Known(
            "iaprof.cli.verbs.recover:recover", "Recover a recording whose recorder was killed.", applied=_LIMIT
        ),
        "devices": Known("iaprof.cli.verbs.devices:devices", "List the GPUs."),
        "check": Known("iaprof.cli.verbs.check:check", "Check whether this machine can record."),
        "calibrate": Known(
            "iaprof.cli.verbs.calibrate:calibrate", short_help="Learn the layout of a driver that iaprof does not know."
        ),
        "help": Known("iaprof.cli.verbs.help:help_", "Print the help of a command."),
    }


app = typer.Typer(
    name=_NAME,
    cls=_Verbs,
    help="Shows where Intel's and NVIDIA's GPUs stall, from main() to the instruction: record on one machine, report "
    "on any.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


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
        if isinstance(error, RuntimeError) and str(error) == _NO_THREAD:
            status = _failed(out_of_memory())  # for its stack
        elif _is_of_arrow(error):
            reason = clean((str(error).splitlines() or [type(error).__name__])[0][:200])
            status = _failed(f"a file that was read is damaged or malicious: Arrow says: {reason}")
        else:
            raise
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
