"""Tables and documents of a ranking: what stalls most."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from iaprof.cli.terminal.answers import Answers
from iaprof.cli.terminal.entry_names import entry_titles, key_fields
from iaprof.cli.terminal.table import STRONG, WEAK, Column, Table, terminal_width
from iaprof.formats.estimates import MARK, divided_text, is_marked

if TYPE_CHECKING:
    from iaprof.formats.energy import Energy
    from iaprof.formats.profile import Profile
    from iaprof.report.views.ranking import Entry, Ranking

BY = ("kernel", "function", "line", "instruction", "reason", "process", "launcher", "stack", "operator", "energy")
OPERATOR, ENERGY = "operator", "energy"
NJ_PER_J = 10**9
EXPLAINED = "docs/attribution.md says how they are divided."
_WIDTH = 100  # of a text that is not a row of a table, if no terminal says another


def show(
    profile: Profile, by: str, limit: int, answers: Answers, per_interval: bool, energy: Energy | None = None
) -> None:
    """Prints a profile's table, or a table for each interval with samples; `energy` is that of all the time."""
    from iaprof.report.views.ranking import Ranker

    ranker = Ranker(profile, by)
    ends = profile.stack_ends() | ({} if energy is None else {"energy": _energy_dict(energy)})
    if not per_interval:
        ranking = ranker.table(limit)
        if answers.is_text:
            print_table(ranking, energy if by == ENERGY else None)
        else:
            answers.write({**ranking_dict(ranking), **ends})
    elif not answers.is_text:
        tables = [{"start_s": start, **ranking_dict(ranker.table(limit, rows))} for start, rows in _intervals(profile)]
        answers.write({"by": by, "intervals": tables, **ends})
    else:
        for number, (start, rows) in enumerate(_intervals(profile)):
            print(f"{chr(10) if number else ''}from {start:.3f} s")
            print_table(ranker.table(limit, rows))


def _intervals(profile: Profile) -> Iterator[tuple[float, slice]]:
    """Intervals with rows: their start in seconds since the first of all, and the slice of their rows."""
    import numpy as np

    numbers, firsts = np.unique(profile.interval, return_index=True)
    ends = [*firsts.tolist(), len(profile)]
    for number, first, end in zip(numbers.tolist(), ends, ends[1:], strict=False):
        yield profile.intervals[number] - profile.intervals[0], slice(first, end)


def print_table(ranking: Ranking, energy: Energy | None = None, *, has_processes: bool = True) -> None:
    """Prints the table; with `energy`, it has rows for what no entry has, and the sum of all."""
    total = ranking.total
    titles = entry_titles(ranking.by, [entry.key for entry in ranking.entries], terminal_width() is not None)
    if any(map(_is_estimate, (*ranking.entries, ranking.rest))):
        text = f"{divided_text(total.divided or 0, total.samples, ranking.timed)} {EXPLAINED}"
        print(f"{textwrap.fill(text, terminal_width() or _WIDTH)}\n")
    rows = [(entry, title, "") for entry, title in zip(ranking.entries, titles, strict=True)]
    if ranking.more:
        rows.append((ranking.rest, f"({ranking.more:,} more)", WEAK))
    if energy is not None:
        nothing = replace(total, reasons=(), counts=(), processes=0, launches=None)
        rows += [(replace(nothing, energy=part), title, WEAK) for part, title in _beside(energy) if part]
        total = replace(total, energy=energy.total)
    rows.append((total, "(total)", STRONG))
    shown = [
        column
        for column in _COLUMNS
        if ranking.by in column.of
        and (has_processes or column.heading != "PROCS")
        and any(column.cell(entry, total) for entry, *_ in rows)
    ]
    heading = "KERNEL" if ranking.by == ENERGY else ranking.by.upper()
    table = Table(*(Column(each.heading, right=each.right) for each in shown), Column(heading, flexible=True))
    for entry, title, style in rows:
        table.add(*(column.cell(entry, total) for column in shown), title, style=style)
    table.print()


def _beside(energy: Energy) -> Iterator[tuple[int, str]]:
    yield energy.others, "[kernels that are not selected]"
    yield energy.unsampled, "[busy without stalls]"
    yield energy.idle, "[idle]"


def _energy_dict(energy: Energy) -> dict[str, float]:
    parts = {"selected": energy.selected, "not_selected": energy.others, "busy_without_stalls": energy.unsampled,
             "idle": energy.idle, "total": energy.total}  # fmt: skip
    return {f"{name}_joules": part / NJ_PER_J for name, part in parts.items()}


class _Column(NamedTuple):
    heading: str
    cell: Callable[[Entry, Entry], str]  # from an entry and the total
    of: tuple[str, ...] = BY  # values of --by whose tables have the column, unless it would be empty
    right: bool = True


_OF_SAMPLES = tuple(by for by in BY if by != ENERGY)
_COLUMNS = (
    _Column("JOULES", lambda entry, _: _joules(entry), (ENERGY,)),
    _Column(
        "SHARE", lambda entry, total: _percent(entry.energy or 0, total.energy, 1) if total.energy else "", (ENERGY,)
    ),
    _Column("SAMPLES", lambda entry, total: _samples(entry, total) if entry.reasons else ""),
    _Column("SHARE", lambda entry, total: _percent(entry.samples, total.samples, 1), _OF_SAMPLES),
    _Column("JOULES", lambda entry, _: _joules(entry), _OF_SAMPLES),
    _Column("INCLUSIVE", lambda entry, _: _number(entry.inclusive)),
    _Column("TOP REASON", lambda entry, _: _reason(entry), tuple(by for by in BY if by != "reason"), right=False),
    _Column("LAUNCHES", lambda entry, _: _number(entry.launches)),
    _Column("PROCS", lambda entry, _: f"{entry.processes:,}", ("kernel",)),
)


def _is_estimate(entry: Entry) -> bool:
    return is_marked(entry.divided or 0, entry.samples)


def _samples(entry: Entry, total: Entry) -> str:
    """The samples, marked if they are an estimate; the total is exact."""
    return f"{MARK if entry is not total and _is_estimate(entry) else ''}{entry.samples:,}"


def _joules(entry: Entry) -> str:
    return "" if entry.energy is None else f"{entry.energy / NJ_PER_J:,.3f}"


def _number(number: int | None) -> str:
    return "" if number is None else f"{number:,}"


def _reason(entry: Entry) -> str:
    """The most frequent reason and its share."""
    return f"{entry.reason} {_percent(max(entry.counts), entry.samples, 0)}" if entry.samples else ""


def _percent(part: float, whole: float, digits: int) -> str:
    return f"{100 * part / whole if whole else 0:.{digits}f} %"


def ranking_dict(ranking: Ranking) -> dict[str, Any]:
    """Returns a table as JSON has it."""

    def sums(entry: Entry) -> dict[str, Any]:
        found: dict[str, Any] = {
            "samples": entry.samples,
            "reasons": dict(zip(entry.reasons, entry.counts, strict=True)),
            "processes": entry.processes,
        }
        optional: dict[str, Any] = {"launches": entry.launches, "inclusive": entry.inclusive}
        optional["divided"] = entry.divided
        optional["joules"] = None if entry.energy is None else entry.energy / NJ_PER_J
        return found | {name: value for name, value in optional.items() if value is not None}

    return {
        "by": ranking.by,
        "entries": [{**key_fields(ranking.by, entry.key), **sums(entry)} for entry in ranking.entries],
        "more": {"entries": ranking.more, **sums(ranking.rest)},
        "total": sums(ranking.total),
    }
