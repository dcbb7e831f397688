"""`iaprof diff`: what changed between two captures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from iaprof.basics.errors import UsageError
from iaprof.basics.files import check_output, mode_of_report
from iaprof.basics.quantities import percent
from iaprof.cli.analysis import open_report
from iaprof.cli.fleet import ask_fleet, say_fleet
from iaprof.cli.fleet_tables import KEPT
from iaprof.cli.interactive.opening import Interactive, check_interactive, grouping_of, view_difference
from iaprof.cli.options.captures import DEFAULT, existing
from iaprof.cli.options.choices import checked_choice, one_of
from iaprof.cli.options.fleet_options import FleetOptions, is_several, with_fleet
from iaprof.cli.options.output_format import output_format
from iaprof.cli.options.selection import SelectionOptions, with_selection
from iaprof.cli.terminal.answers import OF_DIFFERENCES, TABLE, Answers, Force, limit_option
from iaprof.cli.terminal.entry_names import entry_titles, key_fields
from iaprof.cli.terminal.facts import matched_text, say_facts
from iaprof.cli.terminal.stdout import open_output, utf8_stdout
from iaprof.cli.terminal.table import COLD, STRONG, WARM, WEAK, Column, Table, terminal_width
from iaprof.cli.timelines.options import CompilerLog, Freq
from iaprof.cli.timelines.reports import (
    both_hold_time_lines,
    check_options,
    refuse_for_stalls,
    show_difference,
    stage_options,
)
from iaprof.formats.profile import StackOptions
from iaprof.formats.stores import shown
from iaprof.formats.writers.registry import Of, extensions

if TYPE_CHECKING:
    from iaprof.formats.profile import Profile
    from iaprof.report.facts import Facts
    from iaprof.report.views.difference import Change, Difference
    from iaprof.report.views.ranking import Key

BY = ("kernel", "function", "launcher", "stack")
BY_OF_TIME_LINES = ("kernel", "category")
OF_TIME_LINES = frozenset(
    {
        "before",
        "after",
        "by",
        "limit",
        "normalize",
        "format_",
        "as_json",
        "freq",
        "compiler_log",
        "per_rank",
        "quiet",
        "memory_limit",
    }
)
"""The options that captures of time lines take, too."""
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
_NORMALIZED = ("total", "none")
OF_STACKS = extensions(Of.STACKS_OF_DIFFERENCES)
"""By extension: the formats that show stacks of two captures."""
FORMATS = OF_DIFFERENCES | OF_STACKS


@with_fleet
@with_selection
def diff(
    choice: SelectionOptions,
    fleet: FleetOptions,
    context: typer.Context,
    before: Annotated[
        str, typer.Argument(metavar="BEFORE", help="A capture that 'iaprof record' wrote, or a folder, pattern or URL.")
    ],
    after: Annotated[str, typer.Argument(metavar="AFTER", help="The capture to compare it with.")] = str(DEFAULT),
    by: Annotated[
        str,
        typer.Option(
            "--by",
            metavar="WHAT",
            help=f"What a row is: {', '.join(BY)}; for time lines: kernel, category.",
            autocompletion=one_of(dict.fromkeys((*BY, *BY_OF_TIME_LINES))),
        ),
    ] = "kernel",
    limit: Annotated[int | None, limit_option("20; on a page 500, in a CSV or Parquet file all")] = None,
    normalize: Annotated[
        str | None,
        typer.Option(
            "--normalize",
            metavar="HOW",
            help="total: compare shares of the total; none: compare samples, or us for time lines (their default).",
            show_default=False,
            autocompletion=one_of(_NORMALIZED),
        ),
    ] = None,
    per_rank: Annotated[bool, typer.Option("--per-rank", help="For time lines: compare each rank separately.")] = False,
    freq: Freq = None,
    compiler_log: CompilerLog = None,
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
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="A .html, .svg, .folded, .json, .csv or .parquet file.",
            show_default=False,
        ),
    ] = None,
    force: Force = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    interactive: Interactive = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Do not print a summary to stderr.")] = False,
) -> None:
    """Print what changed between two captures.

    Prints a table of kernels, or of what --by selects, with the largest changes first; html, svg and folded text show
    stacks. Filters apply to both captures. Captures of traces are compared by the time of their slices.
    """
    if normalize is not None:
        checked_choice(normalize, _NORMALIZED, "--normalize")
    relative = normalize != "none"
    if interactive:
        check_interactive(context, (before, after), "by", "normalize")
        checked_choice(by, BY, "--by")
        view_difference(existing(Path(before)), existing(Path(after)), choice, grouping_of(by), relative, quiet)
        return
    chosen = output_format(FORMATS, TABLE, named=format_, as_json=as_json, output=output)
    if is_several([before]) or is_several([after]):
        checked_choice(by, BY, "--by")
        if chosen in OF_STACKS.values():
            raise UsageError(f"{chosen} is for two captures: choose another format")
        answers = Answers.chosen(output, as_json, force, [before, after], FORMATS, format_)
        diff_fleets((before, after), choice, fleet, by, answers.rows(limit), relative, answers, quiet)
        return
    fleet.refuse_for_one("diff")
    old_path, new_path = existing(Path(before)), existing(Path(after))
    if both_hold_time_lines(old_path, new_path):
        check_options(context, old_path, OF_TIME_LINES)
        checked_choice(by, BY_OF_TIME_LINES, "--by")
        checked_choice(chosen, (TABLE, "json"), "--format")
        options = stage_options(freq, compiler_log or ())
        limit = Answers().rows(limit)
        show_difference(old_path, new_path, by, limit, normalize == "total", per_rank, options, chosen == "json", quiet)
        return
    refuse_for_stalls(context, old_path, ("freq", "compiler_log", "per_rank"))
    checked_choice(by, BY, "--by")
    of_stacks = chosen in OF_STACKS.values()
    if of_stacks and output is not None:
        check_output(output, force, old_path)
        check_output(output, force, new_path)
    answers = Answers() if of_stacks else Answers.chosen(output, as_json, force, [before, after], FORMATS, format_)
    # Imported here, as other verbs start faster without it.
    from iaprof.report.views.difference import difference, joined

    with (
        open_report(old_path, choice, may_be_empty=True) as old,
        open_report(new_path, choice, may_be_empty=old.facts.stalls > 0) as new,
    ):
        both = joined(old.profile, new.profile)
    if of_stacks:
        from iaprof.formats.writers import flame_svg, folded

        stacks = StackOptions(components=folded.DIFFERENCE_COMPONENTS)
        with open_output(output, mode=mode_of_report(old_path, new_path)) as out:
            if chosen == "svg":
                flame_svg.write_difference(both, (old_path.name, new_path.name), stacks, relative, out)
            else:
                folded.write_difference(both, stacks, relative, out)
    else:
        facts = [(path.name, report.facts) for path, report in ((old_path, old), (new_path, new))]
        show(difference(both, by, answers.rows(limit), relative), answers, relative, facts, both=both)
    if not quiet:
        for path, report in ((old_path, old), (new_path, new)):
            say_facts(f"diff {path.name}", report.facts, report.header)


def diff_fleets(
    sides: tuple[str, str],
    choice: SelectionOptions,
    fleet: FleetOptions,
    by: str,
    limit: int,
    relative: bool,
    answers: Answers,
    quiet: bool,
) -> None:
    """Compares two sets of captures, and tells chance from change by how captures of a set differ among themselves."""
    from iaprof.report.fleet.comparison import movers

    if fleet.group_by:
        raise UsageError("--group-by is for top and report: diff compares two sets")
    by_capture = replace(fleet, group_by=("capture",))
    kept = frozenset(KEPT[by])
    reports = [ask_fleet([sides[0]], choice, by_capture, kept, may_be_empty=True)]
    one_matches = reports[0].total.facts.stalls > 0
    reports.append(ask_fleet([sides[1]], choice, by_capture, kept, may_be_empty=one_matches))
    found, chances = movers(reports[0].total, reports[1].total, by, limit, relative)
    facts = [(shown(side), report.total.facts) for side, report in zip(sides, reports, strict=True)]
    show(found, answers, relative, facts, chances)
    if not quiet:
        for side, report in zip(sides, reports, strict=True):
            say_fleet(f"diff {shown(side)}", report)


def show(
    found: Difference,
    answers: Answers,
    relative: bool,
    facts: Sequence[tuple[str, Facts]] = (),
    chances: Mapping[Key, float] | None = None,
    both: Profile | None = None,
) -> None:
    """Prints a difference.

    Args:
        found: the difference.
        answers: where it goes.
        relative: whether it is of shares.
        facts: the name and the facts of each side, for a page.
        chances: how likely an entry changes as much by chance.
        both: the stacks of both sides, for a page.
    """
    if answers.is_text:
        with utf8_stdout():
            _table(found, relative, chances or {}).print()
        return
    document = _as_dict(found, relative, chances or {})
    if answers.format == "html":
        document["sides"] = [
            {"name": name, "facts": f"{each.samples_text()}; {matched_text(each).rstrip('; ')}"} for name, each in facts
        ]
    answers.write(document, both)


def _table(difference: Difference, relative: bool, chances: Mapping[Key, float]) -> Table:
    unit = _SHARES if relative else _SAMPLES
    table = Table(
        Column("BEFORE", right=True),
        Column("AFTER", right=True),
        Column("CHANGE", right=True),
        *([Column("BY CHANCE", right=True)] if chances else []),
        Column("MOST CHANGED"),
        Column(""),
        Column(difference.by.upper(), flexible=True),
    )
    titles = entry_titles(difference.by, [entry.key for entry in difference.entries], terminal_width() is not None)
    rows = [(entry, title, "") for entry, title in zip(difference.entries, titles, strict=True)]
    if difference.more:
        rows.append((difference.rest, f"({difference.more:,} more)", WEAK))
    rows.append((difference.total, "(total)", STRONG))
    for entry, title, style in rows:
        before, after = (unit.value(value) for value in entry.values)
        change, most = unit.change(entry.change), unit.change(entry.reasons[entry.reason])
        colour = style or _COLOURS.get(change[0], "")
        reason = f"{entry.reason} {most}" if most[0] in _COLOURS else ""
        chance = [_chance(chances.get(entry.key))] if chances else []
        styles = (style, style, colour, *[style] * len(chance), style, style, style)
        table.add(before, after, change, *chance, reason, entry.state, title, style=styles)
    return table


def _chance(chance: float | None) -> str:
    return "" if chance is None else percent(chance) if chance >= 0.001 else "< 0.1 %"


_COLOURS = {"+": WARM, "-": COLD}  # the colours of differential flame graphs


class _Unit(NamedTuple):
    value: Callable[[float], str]
    change: Callable[[float], str]  # begins with its sign, unless shown as 0


_SHARES = _Unit(lambda value: f"{value:.1f} %", lambda value: f"{value:+.1f}" if abs(value) >= 0.05 else "0.0")
_SAMPLES = _Unit(lambda value: f"{value:,.0f}", lambda value: f"{value:+,.0f}" if value else "0")


def _as_dict(difference: Difference, relative: bool, chances: Mapping[Key, float]) -> dict[str, Any]:
    def by_chance(entry: Change) -> dict[str, float]:
        return {"by_chance": chances[entry.key]} if entry.key in chances else {}

    def sums(entry: Change) -> dict[str, Any]:
        before, after = entry.values
        return {
            "samples_before": entry.samples[0],
            "samples_after": entry.samples[1],
            "before": before,
            "after": after,
            "change": entry.change,
            "reasons": entry.reasons,
        }

    return {
        "by": difference.by,
        "unit": "percent" if relative else "samples",
        "entries": [
            {
                **key_fields(difference.by, entry.key),
                "state": entry.state or "both",
                **sums(entry),
                **by_chance(entry),
            }
            for entry in difference.entries
        ],
        "more": {"entries": difference.more, **sums(difference.rest)},
        "total": sums(difference.total),
    }
