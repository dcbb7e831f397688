"""What verbs print of time lines: tables that fit a terminal, their difference, and what the stages say."""

from __future__ import annotations

import json
import math
import sys
from collections import Counter
from typing import TYPE_CHECKING, Any

from iaprof.basics.clean import clean
from iaprof.cli.terminal.stdout import utf8_stdout
from iaprof.cli.terminal.table import COLD, STRONG, WARM, WEAK, Column, Table, coloured, terminal_width

if TYPE_CHECKING:
    import pyarrow as pa

    from iaprof.timelines.trace import Trace
    from iaprof.timelines.views.totals import Change, Difference, Use

_COLOURS = {"+": WARM, "-": COLD}  # as in other differences


def show_difference(found: Difference, as_json: bool) -> None:
    """Prints a difference."""
    with utf8_stdout():
        if as_json:
            print(json.dumps(_difference_dict(found), indent=2))
        else:
            _difference_table(found).print()


def _difference_table(found: Difference) -> Table:
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
    """Returns a single text where nothing changed, or where one of the runs has nothing."""
    if not each.before.calls:
        return after
    return before if before == after or not each.after.calls else f"{before} > {after}"


def _difference_dict(found: Difference) -> dict[str, Any]:
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


_MOST_NOTES = 64  # printed for each stage


def print_messages(trace: Trace, of: str = "") -> None:
    """Prints what the stages found, and which events they dropped, merged and made, to stderr.

    Args:
        trace: after its stages.
        of: the name of the trace, which begins each line; "" for none.
    """
    from iaprof.timelines.trace import Level

    of = f"{clean(of)}: " if of else ""
    notes: Counter[str] = Counter()
    for message in trace.messages.said:
        level = "warning: " if message.level is Level.WARNING else ""
        if not level:  # stages say them for each rank, and an untrusted trace can have a million ranks
            notes[message.stage] += 1
            if notes[message.stage] > _MOST_NOTES:
                continue
        print(f"iaprof: {of}{level}{message.stage}: {message.text}", file=sys.stderr)
    for stage, count in notes.items():
        if count > _MOST_NOTES:
            print(f"iaprof: {of}{stage}: and {count - _MOST_NOTES:,} more; --json has all", file=sys.stderr)
    for what, counts in (("dropped", trace.dropped), ("merged", trace.merged), ("made", trace.made)):
        if some := +counts:
            texts = ", ".join(f"{count:,} {reason}" for reason, count in some.items())
            print(f"iaprof: {of}events {what}: {texts}", file=sys.stderr)


_UJ_PER_J = 1e6
_UNKNOWN = "unknown"
_MOST_RANKS, _MOST_CATEGORIES = 256, 4096  # rows that are printed


def show(trace: Trace, limit: int) -> None:
    """Prints what the devices did: a line for each rank, the kernels that took longest, and what they were."""
    blocks = [
        block
        for block in (
            _ranks(trace),
            _waits(trace),
            _iterations(trace),
            _kernels(trace, limit),
            energy_lines(trace.tables.get("energy"), limit),
            _categories(trace),
        )
        if block
    ]
    if not blocks:
        print(_without_kernels(trace))
        return
    print("\n\n".join("\n".join(block) for block in blocks))


def _without_kernels(trace: Trace) -> str:
    from iaprof.timelines.trace import Dialect

    unknown = sum(file.dialect is Dialect.UNKNOWN for file in trace.files)
    if unknown:
        which = "the trace is" if len(trace.files) == 1 else f"{unknown:,} of {len(trace.files):,} traces are"
        return f"no kernels were found: {which} of an unknown dialect"
    return "no kernels were found in these traces"


def _ranks(trace: Trace) -> list[str]:
    active = trace.tables.get("active")
    if active is None or not active.num_rows:
        return []
    names = ["RANK", "ELAPSED", "KERNELS", "BUSY"]
    overlap = trace.tables.get("overlap")
    talks = {} if overlap is None else {row["pid"]: row for row in overlap.to_pylist() if row["Communication"]}
    if talks:
        names += ["COMMUNICATION", "OVERLAPPED"]
    table = Table(*(Column(name, right=True) for name in names))
    for row in active.slice(0, _MOST_RANKS).to_pylist():
        elapsed = _unless_unknown(row["Elapsed Time"], "{:,.3f} us")
        busy = _unless_unknown(row["Active percentage"], "{:.2f} %")
        cells = [str(row["pid"]), elapsed, f"{row['Total Kernel Time']:,.3f} us", busy]
        if talk := talks.get(row["pid"]):
            cells += [f"{talk['Communication']:,.3f} us", f"{talk['Overlap Percent']:.2f} %"]
        table.add(*cells, *[""] * (len(names) - len(cells)))
    if active.num_rows > _MOST_RANKS:  # an untrusted trace can have a million ranks
        more = f"({active.num_rows - _MOST_RANKS:,} more)"
        table.add("", "", "", more, *[""] * (len(names) - 4), style=WEAK)
    return table.lines(terminal_width(), coloured())


def _unless_unknown(value: float | None, text: str) -> str:
    return _UNKNOWN if value is None or math.isnan(value) else text.format(value)


def _waits(trace: Trace) -> list[str]:
    waits = trace.tables.get("imbalance_ranks")
    if waits is None or not any(waits["Waits"].to_pylist()):
        return []
    names = ("RANK", "COLLECTIVES", "WAITED US", "LONGEST", "LAST IN", "OTHERS WAITED")
    table = Table(*(Column(name, right=True) for name in names))
    for row in waits.slice(0, _MOST_RANKS).to_pylist():
        waited, longest, caused = (f"{row[name]:,.3f}" for name in ("Waits", "Longest Wait", "Longest Waits for It"))
        table.add(str(row["pid"]), f"{row['Collectives']:,}", waited, longest, f"{row['Last']:,}", caused)
    if waits.num_rows > _MOST_RANKS:
        table.add("", "", "", "", "", f"({waits.num_rows - _MOST_RANKS:,} more)", style=WEAK)
    return table.lines(terminal_width(), coloured())


def _iterations(trace: Trace) -> list[str]:
    iterations = trace.tables.get("iterations")
    rows = [row for row in iterations.to_pylist() if row["Iterations"]] if iterations is not None else []
    rows = rows[:_MOST_RANKS]
    if not rows:
        return []
    names = ("RANK", "ITERATIONS", "MEAN US", "STDEV", "MIN", "MAX", "SLOWEST")
    table = Table(*(Column(name, right=True) for name in names), Column("LONGER IN IT", flexible=True))
    for row in rows:
        numbers = ["" if row[name] is None else f"{row[name]:,.3f}" for name in ("Mean", "StDev", "Min", "Max")]
        longer = [(row["Idle Excess"], "idle"), (row["Kernel Excess"], row["Kernel"])]
        found = [f"+{value:,.3f} {name}" for value, name in longer if value is not None and round(value, 3) > 0]
        slowest = "" if row["Slowest"] is None else str(row["Slowest"])
        table.add(str(row["pid"]), f"{row['Iterations']:,}", *numbers, slowest, ", ".join(found))
    return table.lines(terminal_width(), coloured())


def _kernels(trace: Trace, limit: int) -> list[str]:
    summary = trace.tables.get("summary")
    if summary is None or not summary.num_rows:
        return []
    table = Table(
        *(Column(name, right=True) for name in ("TIME", "TOTAL US", "CALLS", "MEAN", "MIN", "MAX", "RANK")),
        Column("KERNEL", flexible=True),
    )
    rows = summary.to_pylist()
    rows.sort(key=lambda row: -row["Total Time"])
    for row in rows[: limit or None]:
        numbers = [f"{row[name]:,.3f}" for name in ("Mean", "Min", "Max")]
        share, total = f"{row['Time']:.2f} %", f"{row['Total Time']:,.3f}"
        table.add(share, total, f"{row['Calls']:,}", *numbers, str(row["pid"]), row["Name"])
    if limit and len(rows) > limit:
        table.add("", "", "", "", "", "", "", f"({len(rows) - limit:,} more)", style=WEAK)
    return table.lines(terminal_width(), coloured())


def energy_dict(energy: pa.Table, limit: int) -> dict[str, Any]:
    """Returns the energy of kernels and copies as JSON has it, those with most first, and that of idle devices."""
    rows = energy.to_pylist()
    ran, idle = ([row for row in rows if bool(row["Calls"]) is has] for has in (True, False))
    ran.sort(key=lambda row: -(row["Energy"] or 0))
    shown = ran[: limit or None]

    def joules(some: list[dict[str, Any]]) -> float | None:
        known = [row["Energy"] for row in some if row["Energy"] is not None]
        return round(float(sum(known)) / _UJ_PER_J, 9) if known or not some else None

    return {
        "by": "energy",
        "entries": [
            {"kernel": row["Name"], "rank": row["pid"], "calls": row["Calls"], "joules": joules([row])} for row in shown
        ],
        "more": {"entries": len(ran) - len(shown), "joules": joules(ran[len(shown) :])},
        "idle": [{"rank": row["pid"], "joules": joules([row])} for row in idle],
        "energy": {"selected": joules(ran), "idle": joules(idle), "total": joules(rows)},
    }


def energy_lines(energy: pa.Table | None, limit: int) -> list[str]:
    """Returns the table of energy as lines; none where there is no power."""
    if energy is None or not energy.num_rows:
        return []
    table = Table(
        *(Column(name, right=True) for name in ("ENERGY", "SHARE", "CALLS", "MEAN", "RANK")),
        Column("KERNEL OR COPY", flexible=True),
    )
    rows = energy.to_pylist()
    ran, idle = ([row for row in rows if bool(row["Calls"]) is has] for has in (True, False))
    ran.sort(key=lambda row: -(row["Energy"] or 0))
    more = len(ran) - limit if limit else 0
    for row in [*ran[: limit or None], None, *idle[:_MOST_RANKS]]:
        if row is None:
            if more > 0:
                table.add("", "", "", "", "", f"({more:,} more)", style=WEAK)
            continue
        style, calls = ("", f"{row['Calls']:,}") if row["Calls"] else (WEAK, "")
        if row["Energy"] is None:
            table.add(_UNKNOWN, "", calls, "", str(row["pid"]), row["Name"], style=style)
            continue
        share, mean = f"{row['Energy Percent']:.2f} %", f"{row['Mean Energy']:,.3f} uJ" if row["Calls"] else ""
        table.add(f"{row['Energy']:,.3f} uJ", share, calls, mean, str(row["pid"]), row["Name"], style=style)
    if len(idle) > _MOST_RANKS:
        table.add("", "", "", "", "", f"({len(idle) - _MOST_RANKS:,} more)", style=WEAK)
    return table.lines(terminal_width(), coloured())


def _categories(trace: Trace) -> list[str]:
    categories = trace.tables.get("categories")
    if categories is None or not categories.num_rows:
        return []
    table = Table(
        Column("RANK", right=True),
        Column("CATEGORY"),
        *(Column(name, right=True) for name in ("TIME", "US", "CALLS", "IDEAL US", "PT UTIL")),
    )
    for row in categories.slice(0, _MOST_CATEGORIES).to_pylist():
        if not row["Calls"]:
            continue
        style = STRONG if row["Category"] == "Total" else ""
        times = (f"{100 * row['Frac_Time']:.2f} %", f"{row['Kernel_Time']:,.3f}", f"{row['Calls']:,}")
        used = "" if row["PT_Util"] is None else f"{row['PT_Util']:.4f}"
        table.add(str(row["Pid"]), row["Category"], *times, f"{row['Ideal_Time']:,.3f}", used, style=style)
    return table.lines(terminal_width(), coloured())
