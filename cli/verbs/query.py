"""`iaprof query`: SQL queries over a capture."""

from __future__ import annotations

import csv
import itertools
import json
import math
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from iaprof.basics.errors import UsageError
from iaprof.cli.analysis import open_report
from iaprof.cli.options.selection import SelectionOptions
from iaprof.cli.terminal.stdout import utf8_stdout
from iaprof.cli.terminal.summary import say
from iaprof.cli.terminal.table import WEAK, Column, Table, coloured, terminal_width
from iaprof.formats.formulas import without_formula
from iaprof.formats.profile import clean

if TYPE_CHECKING:
    from iaprof.formats.profile import Profile
    from iaprof.report.views.sql import Database

QUERIES = """\
  iaprof query cap.parquet "SELECT comm, count(*) FROM launches GROUP BY ALL"
  iaprof query cap.parquet "SELECT kernel, line, reason, sum(samples) AS n
      FROM samples GROUP BY ALL ORDER BY n DESC LIMIT 10"
  iaprof query cap.parquet "SELECT time_ns // 1000000 AS ms, sum(sbid) AS sbid
      FROM stalls GROUP BY ms ORDER BY ms" --format csv
"""
EXAMPLES = f"""\b
Examples:
  iaprof query cap.parquet                     the tables and their columns
{QUERIES}"""
MOST_ROWS = 10_000  # in a printed table
_NARROWEST = 60


def query(
    capture: Annotated[Path, typer.Argument(metavar="CAPTURE", help="A file that 'iaprof record' wrote.")],
    sql: Annotated[
        str | None, typer.Argument(metavar="SQL", help="A query; without, the tables are listed.", show_default=False)
    ] = None,
    format_: Annotated[str, typer.Option("--format", metavar="FORMAT", help="table, csv or json.")] = "table",
    as_json: Annotated[bool, typer.Option("--json", help="The same as --format json.")] = False,
) -> None:
    """Ask a capture in SQL.

    Queries see the capture's tables and no file or network. Needs DuckDB: pip install 'iaprof[query]'.
    """
    wanted = "json" if as_json else format_
    if wanted not in _FORMATS:
        raise UsageError(f"there is no format '{wanted}': choose one of {', '.join(_FORMATS)}")
    from iaprof.formats.capture.reader import CaptureReader
    from iaprof.report.views.sql import Database

    with Database(CaptureReader(capture), lambda: _profile(capture)) as database:
        if sql is None:
            with utf8_stdout():
                _list(database, as_json=wanted == "json")
            return
        names, rows = database.query(sql)
        with utf8_stdout():
            _FORMATS[wanted](names, itertools.chain.from_iterable(rows))


def _profile(capture: Path) -> Profile:
    from iaprof.report.join.selection import Selection

    with open_report(capture, SelectionOptions(Selection())) as report:
        return report.profile


def _list(database: Database, as_json: bool) -> None:
    tables = list(database.tables())
    if as_json:
        print(json.dumps({"tables": [{"name": n, "about": a, "columns": c} for n, a, c in tables]}, indent=2))
        return
    width = max(terminal_width() or 80, _NARROWEST)
    for name, about, columns in tables:
        print(f"{name:<12} {about}")
        margin = " " * 15
        print(textwrap.fill(", ".join(columns), width, initial_indent=margin, subsequent_indent=margin))
    print(f"\nExamples:\n{QUERIES}", end="")


def _print_table(names: list[str], rows: Iterator[tuple[Any, ...]]) -> None:
    shown = list(itertools.islice(rows, MOST_ROWS))
    numbers = [any(_is_number(row[at]) for row in shown) for at in range(len(names))]
    longest = [max((len(_text(row[at])) for row in shown), default=0) for at in range(len(names))]
    widest = max(range(len(names)), key=lambda at: (not numbers[at], longest[at]))
    table = Table(*(Column(clean(n), right=numbers[at], flexible=at == widest) for at, n in enumerate(names)))
    for row in shown:
        table.add(*map(_text, row))
    width = terminal_width()
    lines = table.lines(width, coloured())
    plain = table.lines(width, colours=False) if width is not None else []
    if width is not None and max(map(len, plain)) > width:
        lines = list(_records(names, shown))
    print("\n".join(lines))
    if next(rows, None) is not None:
        say(f"iaprof: only the first {MOST_ROWS:,} rows are shown: --format csv and json give all")


def _records(names: list[str], rows: Iterable[tuple[Any, ...]]) -> Iterator[str]:
    """A line per value, for rows that are wider than the terminal."""
    margin = max(map(len, names))
    for number, row in enumerate(rows):
        yield f"\x1b[{WEAK}m-- row {number + 1}\x1b[0m" if coloured() else f"-- row {number + 1}"
        for name, value in zip(names, row, strict=True):
            yield f"{clean(name):<{margin}}  {clean(_text(value))}".rstrip()


def _print_csv(names: list[str], rows: Iterator[tuple[Any, ...]]) -> None:
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(clean(without_formula(name)) for name in names)
    writer.writerows(map(_cell, row) for row in rows)


def _cell(value: Any) -> str:
    return clean(without_formula(value) if isinstance(value, str) else _text(value))


def _print_json(names: list[str], rows: Iterator[tuple[Any, ...]]) -> None:
    print("[", end="")
    for number, row in enumerate(rows):
        values = dict(zip(names, map(_json, row), strict=True))
        print(f"{',' if number else ''}\n{json.dumps(values)}", end="")
    print("\n]")


_FORMATS: dict[str, Callable[[list[str], Iterator[tuple[Any, ...]]], None]] = {
    "table": _print_table,
    "csv": _print_csv,
    "json": _print_json,
}


def _is_number(value: object) -> bool:
    return isinstance(value, int | float | Decimal) and not isinstance(value, bool)


def _text(value: object) -> str:
    """A value for tables and CSV: empty for null, hexadecimal for bytes."""
    if value is None:
        return ""
    return value.hex() if isinstance(value, bytes) else str(value)


def _json(value: Any) -> Any:
    """A value for JSON; types that JSON lacks, such as bytes and times, become text."""
    if isinstance(value, float | Decimal):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, list | tuple):
        return [_json(each) for each in value]
    if isinstance(value, dict):
        return {str(name): _json(each) for name, each in value.items()}
    return value if value is None or isinstance(value, bool | int | str) else _text(value)
