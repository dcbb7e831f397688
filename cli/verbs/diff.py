"""`iaprof diff`: what changed between two captures."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from iaprof.cli.options.captures import DEFAULT, FleetOptions
from iaprof.cli.options.declared import For, Given, Of
from iaprof.cli.options.selection import SelectionOptions
from iaprof.cli.options.shown import Comparison, Interactive, Quiet
from iaprof.cli.options.values import one_of
from iaprof.cli.subjects.choosing import sides_of
from iaprof.cli.subjects.subject import check_tree
from iaprof.cli.subjects.time_lines import BY as OF_TIME_LINES
from iaprof.cli.terminal.answers import OF_DIFFERENCES, OF_STACKS, TABLE, Answers, Force, limit_option
from iaprof.cli.terminal.difference_tables import BY
from iaprof.cli.timelines.options import LoggedDeviceOptions

EXAMPLES = """\b
Examples:
  iaprof diff old.parquet new.parquet               kernels, as shares of all
  iaprof diff old.parquet new.parquet -i            browse the differences in the terminal
  iaprof diff old.parquet new.parquet --by stack --normalize none
  iaprof diff old.parquet new.parquet -o d.svg      a flame graph, red where there is more
  iaprof diff old.parquet                           with iaprof.parquet
  iaprof diff run-1.parquet run-2.parquet --by category   of imported traces
  iaprof diff 'v41/*.parquet' 'v42/*.parquet'       many captures, and the chance of such changes
"""
FORMATS = OF_DIFFERENCES | OF_STACKS
_FILES = For(Of.STALLS | Of.SEVERAL)
_PRINTED = For(_FILES.of | Of.TIME_LINES)


@dataclass(frozen=True)
class DifferenceOutput:
    """The options that say in which format a difference is written, and where."""

    format_: Annotated[
        str | None,
        typer.Option(
            "--format",
            metavar="FORMAT",
            help="table; html or svg for a browser; folded for flamegraph.pl; json, csv or parquet. By -o's extension, "
            "else a table.",
            show_default=False,
            autocompletion=one_of(dict.fromkeys((TABLE, *FORMATS.values()))),
        ),
        _PRINTED,
    ] = None
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="A .html, .svg, .folded, .json, .csv or .parquet file.",
            show_default=False,
        ),
        _FILES,
    ] = None
    force: Annotated[Force, _FILES] = False
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON."), _PRINTED] = False


def diff(
    given: Given,
    *,
    before: Annotated[
        str, typer.Argument(metavar="BEFORE", help="A capture that 'iaprof record' wrote, or a folder, pattern or URL.")
    ],
    after: Annotated[str, typer.Argument(metavar="AFTER", help="The capture to compare it with.")] = str(DEFAULT),
    by: Annotated[
        str,
        typer.Option(
            "--by",
            metavar="WHAT",
            help=f"What a row is: {', '.join(BY)}; for time lines: {', '.join(OF_TIME_LINES)}.",
            autocompletion=one_of(dict.fromkeys((*BY, *OF_TIME_LINES))),
        ),
    ] = "kernel",
    limit: Annotated[int | None, limit_option("20; on a page 500, in a CSV or Parquet file all"), _PRINTED] = None,
    comparison: Comparison,
    device: LoggedDeviceOptions,
    output: DifferenceOutput,
    interactive: Interactive = False,
    quiet: Quiet = False,
    choice: SelectionOptions,
    fleet: FleetOptions,
) -> None:
    """Print what changed between two captures.

    Prints a table of kernels, or of what --by selects, with the largest changes first; html, svg and folded text show
    stacks. Filters apply to both captures. Captures of traces are compared by the time of their slices.
    """
    if interactive:
        check_tree(given)
    old, new = sides_of("diff", (before, after), choice, fleet, device)
    old.check(given)
    if interactive:
        old.tree_of_difference(new, by, comparison, quiet)
        return
    answers = Answers.chosen(output.output, output.as_json, output.force, [before, after], FORMATS, output.format_)
    old.difference(new, by, limit, comparison, answers, quiet)
