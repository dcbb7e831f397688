"""`iaprof query`: SQL queries over a capture."""

from __future__ import annotations

import csv
import itertools
import json
import math
import textwrap
from collections.abc import Callable, Iterable, Iterator
from decimal import Decimal
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any

import typer

from iaprof.basics.clean import clean
from iaprof.basics.errors import UsageError
from iaprof.cli.options.captures import FirstCapture, capture_and
from iaprof.cli.options.selection import SelectionOptions
from iaprof.cli.options.values import one_of
from iaprof.cli.subjects.stalls import open_report
from iaprof.cli.terminal.answers import FORMATS, TABLE, Answers, Force, Output
from iaprof.cli.terminal.stdout import open_output
from iaprof.cli.terminal.summary import say
from iaprof.cli.terminal.table import WEAK, Column, Table, coloured, terminal_width
from iaprof.formats.texts import csv_text

if TYPE_CHECKING:
    from iaprof.formats.profile import Profile
    from iaprof.report.views.sql import Database

QUERIES = """\
  iaprof query cap.parquet "SELECT comm, count(*) FROM launches GROUP BY ALL"
  iaprof query cap.parquet "SELECT kernel, line, reason, sum(samples) AS n
      FROM samples GROUP BY ALL ORDER BY n DESC LIMIT 10"
  iaprof query cap.parquet "SELECT time_ns // 1000000 AS ms, sum(sbid) AS sbid
      FROM stalls GROUP BY ms ORDER BY ms" -o q.csv
"""
EXAMPLES = f"""\b
Examples:
  iaprof query                                 the tables of iaprof.parquet, and their columns
{QUERIES}"""
MOST_ROWS = 10_000  # in a printed table
_NARROWEST = 60


def query(
    first: FirstCapture = None,
    second: Annotated[
        str | None, typer.Argument(metavar="SQL", help="A query. Without one, list the tables.", show_default=False)
    ] = None,
    format_: Annotated[
        str | None,
        typer.Option(
            "--format",
            metavar="FORMAT",
            help="table, csv, json or parquet; by -o's extension, else a table.",
            show_default=False,
            autocompletion=one_of([TABLE, *FORMATS.values()]),
        ),
    ] = None,
    output: Output = None,
    force: Force = False,
    as_json: Annotated[bool, typer.Option("--json", help="The same as --format json.")] = False,
) -> None:
    """Query a capture with SQL.

    Queries can read the capture's tables, but no other file and no network. Needs DuckDB: pip install
    'iaprof[query]'.
    """
    capture, sql = capture_and(first, second)
    answers = Answers.chosen(output, as_json, force, [str(capture)], named=format_)
    if sql is None and answers.format not in ("", "json"):
        raise UsageError(f"{answers.format} is for the rows of a query: name one, or print the tables as text or JSON")
    from iaprof.formats.capture.reader import CaptureReader
    from iaprof.report.views.sql import Database

    with Database(CaptureReader(capture), lambda: _profile(capture)) as database:
        if sql is None:
            with open_output(output, mode=answers.mode) as out:
                _list(database, out, as_json=answers.format == "json")
        elif answers.format == "parquet":
            _write_parquet(database, sql, answers)
        else:
            names, rows = database.query(sql)
            with open_output(output, mode=answers.mode) as out:
                _WRITERS[answers.format](names, itertools.chain.from_iterable(rows), out)


def _write_parquet(database: Database, sql: str, answers: Answers) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema, batches = database.query_batches(sql)
    with (
        open_output(answers.output, binary=True, mode=answers.mode) as out,
        pq.ParquetWriter(pa.PythonFile(out, "w"), schema, compression="zstd") as writer,
    ):
        for batch in batches:
            writer.write_batch(batch)


def _profile(capture: Path) -> Profile:
    with open_report(capture, SelectionOptions()) as report:
        return report.profile


def _list(database: Database, out: IO[str], as_json: bool) -> None:
    tables = list(database.tables())
    if as_json:
        document = {"tables": [{"name": n, "about": a, "columns": c} for n, a, c in tables]}
        print(json.dumps(document, indent=2), file=out)
        return
    width = max(terminal_width() or 80, _NARROWEST)
    for name, about, columns in tables:
        print(f"{name:<12} {about}")
        margin = " " * 15
        print(textwrap.fill(", ".join(columns), width, initial_indent=margin, subsequent_indent=margin))
    print(f"\nExamples:\n{QUERIES}", end="")


def _print_table(names: list[str], rows: Iterator[tuple[Any, ...]], _: IO[str]) -> None:
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


def _write_csv(names: list[str], rows: Iterator[tuple[Any, ...]], out: IO[str]) -> None:
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(map(csv_text, names))
    writer.writerows(map(_cell, row) for row in rows)


def _cell(value: Any) -> str:
    return csv_text(value) if isinstance(value, str) else clean(_text(value))


def _write_json(names: list[str], rows: Iterator[tuple[Any, ...]], out: IO[str]) -> None:
    out.write("[")
    for number, row in enumerate(rows):
        values = dict(zip(names, map(_json, row), strict=True))
        out.write(f"{',' if number else ''}\n{json.dumps(values)}")
    out.write("\n]\n")


_WRITERS: dict[str, Callable[[list[str], Iterator[tuple[Any, ...]], IO[str]], None]] = {
    "": _print_table,
    "csv": _write_csv,
    "json": _write_json,
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
