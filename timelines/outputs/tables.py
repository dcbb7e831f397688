"""Tables of a trace as CSV, as text for people, and with its messages as JSON.

JSON is `--json` of `iaprof timeline`, and `iaprof report --format=json`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import IO, Any, BinaryIO

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pa_csv
from rich.cells import cell_len

from iaprof.basics.clean import clean
from iaprof.formats.profile import StackOptions
from iaprof.formats.texts import csv_texts
from iaprof.formats.writers import table_csv, table_parquet
from iaprof.timelines.grouped import Groups
from iaprof.timelines.outputs.formats import TimeLine
from iaprof.timelines.trace import Dialect, Trace
from iaprof.timelines.views import labels
from iaprof.timelines.views.totals import totals

TABLES = (
    "summary", "active", "ts_analysis", "kernels", "overlap", "imbalance", "imbalance_ranks", "energy", "categories",
    "categories_cycles", "utilization", "power_stats", "stats_summary", "iterations", "iteration_times",
)  # fmt: skip
"""The names of all tables that stages make; a folder of an earlier run can have any of them."""
_DECIMALS, _PERCENT_DECIMALS = 4, 2
_LARGEST = 1e30  # a smaller number fits into 38 digits, decimals included
_PERCENTAGES = ("Time", "Active percentage")


def rounded(table: pa.Table) -> pa.Table:
    """Returns a table with up to 4 decimals, percentages with 2, and null for what is not a number."""
    columns = []
    for name, column in _columns(table):
        if pa.types.is_floating(column.type):
            finite = pc.if_else(pc.is_finite(column), column, pa.scalar(None, column.type))
            columns.append(pc.round(finite, _decimals(name)))
        else:
            columns.append(column)
    return pa.table(columns, names=table.column_names)


def _columns(table: pa.Table) -> Iterator[tuple[str, pa.ChunkedArray]]:
    return zip(table.column_names, table.columns, strict=True)


def _decimals(name: str) -> int:
    return _PERCENT_DECIMALS if name in _PERCENTAGES or name.endswith("Percent") else _DECIMALS


def _in_csv(name: str, column: pa.ChunkedArray) -> pa.ChunkedArray:
    if _is_text(column.type):
        return csv_texts(column.cast(pa.large_string()))
    return _with_fixed_decimals(name, column)


def _with_fixed_decimals(name: str, column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Returns numbers with all their digits: Arrow writes large ones with an exponent."""
    if not pa.types.is_floating(column.type):
        return column
    largest = pc.max(pc.abs(column)).as_py() or 0
    return column.cast(pa.decimal128(38, _decimals(name))) if largest < _LARGEST else column


def write_csv(table: pa.Table, output: BinaryIO) -> None:
    """Writes a table as CSV (RFC 4180), with its column names."""
    columns = [_in_csv(name, column) for name, column in _columns(rounded(table))]
    pa_csv.write_csv(pa.table(columns, names=table.column_names), output, pa_csv.WriteOptions(quoting_style="needed"))


def write_totals_csv(shown: TimeLine, _: StackOptions, out: BinaryIO) -> None:
    """Writes the totals of all slices as CSV."""
    table_csv.write_table(totals(shown.trace), out)


def write_totals_parquet(shown: TimeLine, _: StackOptions, out: BinaryIO) -> None:
    """Writes the totals of all slices as Parquet."""
    table_parquet.write_table(totals(shown.trace), out)


def write_text(table: pa.Table, output: BinaryIO) -> None:
    """Writes a table with aligned columns, numbers to the right."""
    output.write("".join(f"{line}\n" for line in lines(table)).encode())


def lines(table: pa.Table) -> list[str]:
    """Returns a table as lines with aligned columns."""
    columns = [[clean(_shown(value)) for value in column.to_pylist()] for column in rounded(table).columns]
    names = table.column_names
    right = [not _is_text(column.type) for column in table.columns]
    widths = [max(map(cell_len, [name, *cells])) for name, cells in zip(names, columns, strict=True)]
    rows = [names, *map(list, zip(*columns, strict=True))]
    return [_line(row, widths, right) for row in rows]


def _is_text(type_: pa.DataType) -> bool:
    value = type_.value_type if pa.types.is_dictionary(type_) else type_
    return bool(pa.types.is_string(value) or pa.types.is_large_string(value))


def _shown(value: object) -> str:
    return "" if value is None else f"{value:.15g}" if isinstance(value, float) else str(value)


def _line(cells: Sequence[str], widths: Sequence[int], right: Sequence[bool]) -> str:
    padded = []
    for cell, width, is_right in zip(cells, widths, right, strict=True):
        space = " " * (width - cell_len(cell))
        padded.append(space + cell if is_right else cell + space)
    return "  ".join(padded).rstrip()


_PIECES_AT_ONCE = 1 << 16


def write_json(shown: TimeLine, _: StackOptions, out: IO[str]) -> None:
    """Writes a trace's tables and messages."""
    write_document(shown.trace, out)


def write_document(trace: Trace, out: IO[str]) -> None:
    """Writes a trace's tables and messages, and what became of its events."""
    pieces = json.JSONEncoder(indent=2).iterencode(_as_dict(trace))
    while text := "".join(islice(pieces, _PIECES_AT_ONCE)):  # all of a large table's would need half a gigabyte
        out.write(text)
    out.write("\n")


def _ranks(trace: Trace) -> list[list[int]]:
    """Returns the ranks of each file's slices, ascending; of a file of PyTorch without slices, the rank in the file."""
    file, rank = trace.slices.file, labels.ranks(trace)
    both = Groups(file, rank)
    found: list[list[int]] = [[] for _ in trace.files]
    for number, its_rank in zip(both.key(file).tolist(), both.key(rank).tolist(), strict=True):
        found[number].append(its_rank)
    return [
        own or ([each.rank] if each.dialect is Dialect.TORCH else [])
        for each, own in zip(trace.files, found, strict=True)
    ]


def _as_dict(trace: Trace) -> dict[str, Any]:
    return {
        "files": [
            {"name": file.name, "dialect": str(file.dialect), "rank": own[0] if len(own) == 1 else None, "ranks": own}
            for file, own in zip(trace.files, _ranks(trace), strict=True)
        ],
        "events": {
            "slices": len(trace.slices),
            "counters": len(trace.points),
            "flows": len(trace.flows),
            "instants": len(trace.instants),
            "dropped": dict(+trace.dropped),
            "merged": dict(+trace.merged),
            "made": dict(+trace.made),
        },
        "tables": {name: rounded(table).to_pylist() for name, table in trace.tables.items()},
        "messages": [
            {"level": each.level.name.lower(), "stage": each.stage, "text": each.text} for each in trace.messages.said
        ],
    }
