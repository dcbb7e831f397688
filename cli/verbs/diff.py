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
from iaprof.cli.options.fleet_options import FleetOptions, is_several, with_fleet
from iaprof.cli.options.selection import SelectionOptions, with_selection
from iaprof.cli.options.timeline_options import CompilerLog, Freq
from iaprof.cli.terminal.answers import OF_DIFFERENCES, Answers, limit_option
from iaprof.cli.terminal.entry_names import checked_choice, entry_titles, key_fields
from iaprof.cli.terminal.facts import matched_text, say_facts
from iaprof.cli.terminal.stdout import open_output, utf8_stdout
from iaprof.cli.terminal.table import COLD, STRONG, WARM, WEAK, Column, Table, terminal_width
from iaprof.cli.time_lines import (
    both_hold_time_lines,
    check_options,
    refuse_for_stalls,
    show_difference,
    stage_options,
)
from iaprof.formats.profile import StackOptions
from iaprof.formats.urls import shown

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
  iaprof diff old.parquet new.parquet --by stack --normalize none
  iaprof diff old.parquet new.parquet --format folded | flamegraph.pl > d.svg
  iaprof diff run-1.parquet run-2.parquet --by category   of imported traces
  iaprof diff 'v41/*.parquet' 'v42/*.parquet'       many captures, and what chance can do
"""
_EXTENSIONS = (".folded", ".collapsed")


@with_fleet
@with_selection
def diff(
    choice: SelectionOptions,
    fleet: FleetOptions,
    context: typer.Context,
    before: Annotated[
        str, typer.Argument(metavar="BEFORE", help="A file that 'iaprof record' wrote; or a folder, pattern or URL.")
    ],
    after: Annotated[str, typer.Argument(metavar="AFTER", help="Another one.")],
    by: Annotated[
        str,
        typer.Option("--by", metavar="WHAT", help=f"What a row is: {', '.join(BY)}; of time lines: kernel, category."),
    ] = "kernel",
    limit: Annotated[int | None, limit_option("20; of a page 500, of a CSV or Parquet file all")] = None,
    normalize: Annotated[
        str | None,
        typer.Option(
            "--normalize",
            metavar="HOW",
            help="total: shares of all; none: samples as they are, or us, as for time lines without this option.",
            show_default=False,
        ),
    ] = None,
    per_rank: Annotated[bool, typer.Option("--per-rank", help="Of time lines: each rank for itself.")] = False,
    freq: Freq = None,
    compiler_log: CompilerLog = None,
    format_: Annotated[
        str | None,
        typer.Option("--format", metavar="FORMAT", help="table, or folded for flamegraph.pl.", show_default=False),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="FILE", help="A .html, .json, .csv, .parquet or .folded file.", show_default=False
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", "-f", help="Replace an existing output.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No summary on stderr.")] = False,
) -> None:
    """Print what changed between two captures.

    A table of kernels, or of what --by says, the largest changes first; with --format folded, both counts of every
    stack. Filters hold for both captures. Two captures of traces are compared by the time of their slices.
    """
    if normalize is not None:
        checked_choice(normalize, ("total", "none"), "--normalize")
    relative = normalize != "none"
    if is_several([before]) or is_several([after]):
        checked_choice(by, BY, "--by")
        if format_ not in (None, "table") or _format(output) == "folded":
            raise UsageError("folded text is for two captures: leave out --format, or name another file with -o")
        answers = Answers.chosen(output, as_json, force, [before, after], OF_DIFFERENCES)
        diff_fleets((before, after), choice, fleet, by, answers.rows(limit), relative, answers, quiet)
        return
    fleet.refuse_for_one("diff")
    old_path, new_path = Path(before), Path(after)
    if both_hold_time_lines(old_path, new_path):
        check_options(context, old_path, OF_TIME_LINES)
        checked_choice(by, BY_OF_TIME_LINES, "--by")
        checked_choice(format_ or "table", ("table",), "--format")
        options = stage_options(freq, compiler_log or ())
        limit = Answers().rows(limit)
        show_difference(old_path, new_path, by, limit, normalize == "total", per_rank, options, as_json, quiet)
        return
    refuse_for_stalls(context, old_path, ("freq", "compiler_log", "per_rank"))
    checked_choice(by, BY, "--by")
    folded = checked_choice(format_ or _format(output), ("table", "folded"), "--format") == "folded"
    if folded and as_json:
        raise UsageError("--json is not for folded text: leave one of them out")
    if folded and output is not None:
        check_output(output, force, old_path)
        check_output(output, force, new_path)
    answers = Answers() if folded else Answers.chosen(output, as_json, force, [before, after], OF_DIFFERENCES)
    # Imported here, as other verbs start faster without it.
    from iaprof.formats.writers import difffolded
    from iaprof.report.views.difference import difference, joined

    with open_report(old_path, choice) as old, open_report(new_path, choice) as new:
        both = joined(old.profile, new.profile)
    if folded:
        with open_output(output, mode=mode_of_report(old_path, new_path)) as out:
            difffolded.write(both, StackOptions(components=difffolded.COMPONENTS), relative, out)
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
    from iaprof.report.fleet.movers import movers

    if fleet.group_by:
        raise UsageError("--group-by is for top and report: diff compares two sets")
    by_capture = replace(fleet, group_by=("capture",))
    reports = [ask_fleet([side], choice, by_capture, frozenset(KEPT[by])) for side in sides]
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


def _format(output: Path | None) -> str:
    return "folded" if output is not None and output.name.endswith(_EXTENSIONS) else "table"


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
