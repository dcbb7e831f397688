"""The difference of two profiles of stalls: a table, or a document."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from iaprof.basics.quantities import percent
from iaprof.cli.terminal.answers import Answers
from iaprof.cli.terminal.entry_names import entry_titles, key_fields
from iaprof.cli.terminal.facts import matched_text
from iaprof.cli.terminal.stdout import utf8_stdout
from iaprof.cli.terminal.table import COLD, STRONG, WARM, WEAK, Column, Table, terminal_width

if TYPE_CHECKING:
    from iaprof.formats.profile import Profile
    from iaprof.report.facts import Facts
    from iaprof.report.views.difference import Change, Difference
    from iaprof.report.views.ranking import Key

BY = ("kernel", "function", "launcher", "stack")


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
