"""`iaprof top`: a table of what stalls most."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from iaprof.basics.errors import UsageError
from iaprof.cli.options.captures import ONE, Captures, FleetOptions
from iaprof.cli.options.declared import For, Given, Of
from iaprof.cli.options.selection import SelectionOptions
from iaprof.cli.options.shown import Interactive, Intervals, Quiet, StackShape
from iaprof.cli.options.values import checked_choice, one_of
from iaprof.cli.subjects.choosing import subject_of_table
from iaprof.cli.subjects.live import Live
from iaprof.cli.subjects.subject import check_tree
from iaprof.cli.subjects.transfers import BY as TRANSFER
from iaprof.cli.subjects.waits import BY as WAIT
from iaprof.cli.terminal.answers import Answers, Force, Output, limit_option
from iaprof.cli.terminal.ranking_tables import BY
from iaprof.cli.timelines.options import FREQ, DeviceOptions

ALL = (*BY, TRANSFER, WAIT)
EXAMPLES = """\b
Examples:
  iaprof top cap.parquet                     the kernels that stall most
  iaprof top cap.parquet --by line -n 5      the five hottest source lines
  iaprof top cap.parquet --by stack | less   who launches it, whole stacks
  iaprof top both.parquet --by operator      operators of PyTorch, from a trace: see iaprof import --with
  iaprof top cap.parquet --by energy         joules of each kernel, and of the idle GPU
  iaprof top cap.parquet --by transfer       what is copied and filled, in bytes
  iaprof top cap.parquet --by wait           who waits for the GPU, and how long
  iaprof top cap.parquet -i                  browse it: tree, search, filters
  sudo iaprof top --live                     what all processes do now
  sudo iaprof top --live -o cap.parquet -- ./app   ./app, and keep a capture
  iaprof top cap.parquet --json | jq '.entries[0].reasons'
  iaprof top captures/ --group-by host       many captures, a table for each host
  iaprof top captures/ --group-by host --outliers   kernels for which hosts differ
  iaprof top captures/ --group-by host -o hosts.csv   all rows of all groups, in a file
"""
_PRINTED = For(Of.STALLS | Of.SEVERAL | Of.TIME_LINES)


@dataclass(frozen=True)
class TableOutput:
    """The options that say where a table goes; with --live, where the capture goes."""

    output: Output = None
    force: Force = False
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON."), _PRINTED] = False


@dataclass(frozen=True)
class Recording:
    """The options of a table that is recorded, and the one for the interactive view, which is before them."""

    interactive: Interactive = False
    live: Annotated[
        bool, typer.Option("--live", help="Record and show the stalls live; -o keeps a capture. Needs root.")
    ] = False
    duration: Annotated[
        float | None,
        typer.Option(
            "--duration", "-d", metavar="SECONDS", help="With --live: stop after this time.", show_default=False
        ),
    ] = None

    def __post_init__(self) -> None:
        """Checks the values."""
        if self.duration is not None and not self.live:
            raise UsageError("--duration is for --live, which records; choose times of a capture with --time")


@dataclass(frozen=True)
class EnergyOptions(DeviceOptions):
    """What is known of the devices of time lines, of which only the energy is shown."""

    freq: Annotated[str | None, FREQ, For(Of.TIME_LINES, "--freq is for --by energy of time lines: leave it out")] = (
        None
    )


def top(
    given: Given,
    *,
    captures: Captures = ONE,
    by: Annotated[
        str,
        typer.Option("--by", metavar="WHAT", help=f"What a row is: {', '.join(ALL)}.", autocompletion=one_of(ALL)),
        For(_PRINTED.of | Of.TREE),
    ] = "kernel",
    limit: Annotated[int | None, limit_option("20; in a CSV or Parquet file all"), _PRINTED] = None,
    intervals: Intervals,
    output: TableOutput,
    recording: Recording,
    device: EnergyOptions,
    quiet: Quiet = False,
    choice: SelectionOptions,
    fleet: FleetOptions,
) -> None:
    """Print what stalls most.

    Prints a table of kernels, or of what --by selects, with the most samples first. With --by transfer, a row is a
    function that copies or fills, with the most bytes first. Runs on any machine, without a GPU and without root.
    """
    checked_choice(by, ALL, "--by")
    if recording.live:
        command = captures if given.has("captures") else []
        live = Live("top", command, choice, output.output, output.force, recording.duration)
        live.check(given)
        live.table(by, 0, intervals, Answers(), quiet)
        return
    if recording.interactive:
        check_tree(given)
    subject = subject_of_table("top", captures, by, choice, fleet, device)
    subject.check(given)
    if recording.interactive:
        subject.tree(by, StackShape(), quiet)
        return
    answers = Answers.chosen(output.output, output.as_json, output.force, captures)
    subject.table(by, answers.rows(limit), intervals, answers, quiet)
