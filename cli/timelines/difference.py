"""The difference of two time lines: a table, or JSON."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from iaprof.cli.terminal.stdout import utf8_stdout
from iaprof.cli.terminal.table import COLD, STRONG, WARM, WEAK, Column, Table

if TYPE_CHECKING:
    from iaprof.timelines.views.totals import Change, Difference, Use

_COLOURS = {"+": WARM, "-": COLD}  # as in other differences


def show(found: Difference, as_json: bool) -> None:
    """Prints a difference."""
    with utf8_stdout():
        if as_json:
            print(json.dumps(_as_dict(found), indent=2))
        else:
            _table(found).print()


def _table(found: Difference) -> Table:
    unit = " %" if found.is_relative else " US"
    per_rank = any(each.key and each.key[0] is not None for each in found.entries)
    has_ideal = any(use.ideal_us is not None for use in (found.total.before, found.total.after))
    last = "PT UTIL" if has_ideal else "MEAN US"  # both are more than a terminal of 80 columns has room for
    table = Table(
        *(Column(name, right=True) for name in (f"BEFORE{unit}", f"AFTER{unit}", "CHANGE", "CALLS", last)),
        Column(""),
        *([Column("RANK", right=True)] if per_rank else []),
        Column(found.by.upper(), flexible=True),
    )
    rows = [(each, "", _name(each)) for each in found.entries]
    if found.more:
        rows.append((found.rest, WEAK, f"({found.more:,} more)"))
    rows.append((found.total, STRONG, "(total)"))
    shown = _fraction if has_ideal else _mean
    digits = 2 if found.is_relative else 3
    for each, style, name in rows:
        change = f"{each.change:+,.{digits}f}"
        change = change if any(digit in change for digit in "123456789") else "0"
        cells = [
            *(f"{value:,.{digits}f}" for value in each.values),
            change,
            _both(f"{each.before.calls:,}", f"{each.after.calls:,}", each),
            _both(shown(each.before), shown(each.after), each),
            each.state,
            *([str(each.key[0]) if each.key and each.key[0] is not None else ""] if per_rank else []),
            name,
        ]
        styles = [style] * len(cells)
        styles[2] = style or _COLOURS.get(change[0], "")
        table.add(*cells, style=styles)
    return table


def _name(each: Change) -> str:
    assert each.key is not None
    _, side, name = each.key
    return f"{name or '(none)'} on {side}s" if side else name or "(unnamed)"


def _mean(use: Use) -> str:
    return f"{use.mean_us:,.3f}"


def _fraction(use: Use) -> str:
    return "" if use.utilization is None else f"{use.utilization:.4f}"


def _both(before: str, after: str, each: Change) -> str:
    """One text where nothing changed, or where there is nothing in one of the runs."""
    if not each.before.calls:
        return after
    return before if before == after or not each.after.calls else f"{before} > {after}"


def _as_dict(found: Difference) -> dict[str, Any]:
    def sums(each: Change) -> dict[str, Any]:
        return {
            "calls_before": each.before.calls,
            "calls_after": each.after.calls,
            "us_before": each.before.us,
            "us_after": each.after.us,
            "mean_us_before": each.before.mean_us,
            "mean_us_after": each.after.mean_us,
            **({"ideal_us_before": each.before.ideal_us} if each.before.ideal_us is not None else {}),
            **({"ideal_us_after": each.after.ideal_us} if each.after.ideal_us is not None else {}),
            "before": each.values[0],
            "after": each.values[1],
            "change": each.change,
        }

    def keys(each: Change) -> dict[str, Any]:
        assert each.key is not None
        rank, side, name = each.key
        return ({"rank": rank} if rank is not None else {}) | ({"side": side} if side else {}) | {found.by: name}

    return {
        "by": found.by,
        "unit": "percent" if found.is_relative else "us",
        "entries": [{**keys(each), "state": each.state or "both", **sums(each)} for each in found.entries],
        "more": {"entries": found.more, **sums(found.rest)},
        "total": sums(found.total),
    }
