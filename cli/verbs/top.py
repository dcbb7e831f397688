"""`iaprof top`: a table of what stalls most."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from iaprof.basics.errors import IaprofError, UsageError
from iaprof.cli.analysis import open_report
from iaprof.cli.interactive.opening import Interactive, check_interactive, grouping_of, view as view_interactively
from iaprof.cli.live.choosing import show_live
from iaprof.cli.options.captures import existing
from iaprof.cli.options.choices import checked_choice, one_of
from iaprof.cli.options.fleet_options import ONE, Captures, FleetOptions, is_several, with_fleet
from iaprof.cli.options.selection import SelectionOptions, with_selection
from iaprof.cli.terminal.answers import Answers, Force, Output, limit_option
from iaprof.cli.terminal.facts import say_facts
from iaprof.cli.terminal.ranking_tables import BY, ENERGY, OPERATOR, show
from iaprof.cli.terminal.stdout import utf8_stdout
from iaprof.cli.terminal.summary import say
from iaprof.cli.terminal.wait_facts import say_waits
from iaprof.cli.timelines.options import Freq
from iaprof.cli.timelines.reports import (
    check_options,
    hold_time_lines,
    holds_time_lines,
    is_given,
    show_energy,
    stage_options,
)
from iaprof.cli.verbs.top_transfers import say_unrecorded, show_transfers
from iaprof.cli.verbs.top_waits import BY as WAIT, top_waits

if TYPE_CHECKING:
    pass

OF_TIME_LINES = frozenset(
    ("captures", "by", "limit", "output", "force", "as_json", "freq", "quiet", "memory_limit", "large")
)
"""The options that a capture of time lines takes, too, with --by energy."""
TRANSFER = "transfer"
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


@with_fleet
@with_selection
def top(
    choice: SelectionOptions,
    fleet: FleetOptions,
    context: typer.Context,
    captures: Captures = ONE,
    by: Annotated[
        str,
        typer.Option("--by", metavar="WHAT", help=f"What a row is: {', '.join(ALL)}.", autocompletion=one_of(ALL)),
    ] = "kernel",
    limit: Annotated[int | None, limit_option("20; in a CSV or Parquet file all")] = None,
    per_interval: Annotated[bool, typer.Option("--per-interval", help="Print a table for each interval.")] = False,
    interval: Annotated[float, typer.Option("--interval", metavar="SECONDS", help="Length of intervals.")] = 1.0,
    outliers: Annotated[
        bool, typer.Option("--outliers", help="With --group-by: show kernels whose stalls differ between groups.")
    ] = False,
    percentiles: Annotated[
        bool,
        typer.Option("--percentiles", help="With --group-by: show p50, p90 and p99 of each row's share in the groups."),
    ] = False,
    output: Output = None,
    force: Force = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    interactive: Interactive = False,
    live: Annotated[
        bool, typer.Option("--live", help="Record and show the stalls live; -o keeps a capture. Needs root.")
    ] = False,
    duration: Annotated[
        float | None,
        typer.Option(
            "--duration", "-d", metavar="SECONDS", help="With --live: stop after this time.", show_default=False
        ),
    ] = None,
    freq: Freq = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Do not print a summary to stderr.")] = False,
) -> None:
    """Print what stalls most.

    Prints a table of kernels, or of what --by selects, with the most samples first. With --by transfer, a row is a
    function that copies or fills, with the most bytes first. Runs on any machine, without a GPU and without root.
    """
    checked_choice(by, ALL, "--by")
    if live:
        command = captures if is_given(context, "captures") else []
        show_live(context, command, choice, output, force, duration, quiet)
        return
    if duration is not None:
        raise UsageError("--duration is for --live, which records; choose times of a capture with --time")
    if interactive:
        check_interactive(context, captures, "by")
        view_interactively("top", captures, choice, fleet, grouping_of(by), quiet=quiet)
        return
    if not 0.001 <= interval < 1e9:
        raise UsageError("--interval must be a number of seconds, 0.001 or more")
    is_of_traces = by == ENERGY and (
        hold_time_lines(captures) if is_several(captures) else holds_time_lines(existing(Path(captures[0])))
    )
    if freq is not None and not is_of_traces:
        raise UsageError("--freq is for --by energy of time lines: leave it out")
    answers = Answers.chosen(output, as_json, force, captures)
    limit = answers.rows(limit)
    if is_of_traces:
        check_options(context, Path(captures[0]), OF_TIME_LINES)
        show_energy(captures, stage_options(freq), limit, answers, quiet)
        return
    if is_several(captures):
        if per_interval:
            raise UsageError("--per-interval is for one capture; --group-by day or hour divides several")
        from iaprof.cli.fleet_tables import top_fleet  # which imports this module

        top_fleet(captures, choice, fleet, by, limit, answers, outliers=outliers, percentiles=percentiles, quiet=quiet)
        return
    if outliers or percentiles:
        raise UsageError(f"--{'outliers' if outliers else 'percentiles'} is for several captures, with --group-by")
    fleet.refuse_for_one("top")
    capture = existing(Path(captures[0]))
    if by == TRANSFER:
        if per_interval:
            raise UsageError("--by transfer has no table for each interval: choose times with --time")
        with utf8_stdout():
            reader = show_transfers(capture, choice, limit, answers)
        if not quiet:
            say_unrecorded(reader)
        return
    if by == WAIT:
        choice.refuse_filters_of_stalls("--by wait")
        with utf8_stdout():
            reader = top_waits(capture, choice, limit, interval if per_interval else 0.0, answers)
        if not quiet:
            say_waits("top", reader)
        return
    with open_report(capture, choice, interval if per_interval else 0.0) as report, utf8_stdout():
        if by == ENERGY and report.facts.energy is None:
            raise IaprofError(
                f"{capture} has no energy of its GPUs: record with metrics where the driver has a sensor (iaprof check)"
            )
        show(report.profile, by, limit, answers, per_interval, report.facts.energy)
        has_operators = by != OPERATOR or any(launch and launch.operators for launch in report.profile.launches)
    if not quiet:
        if not has_operators:
            say("iaprof: warning: the capture has no operators: join a trace of the same run with iaprof import --with")
        say_facts("top", report.facts, report.header)
