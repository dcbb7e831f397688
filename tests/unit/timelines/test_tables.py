"""Tables as CSV and text."""

from __future__ import annotations

import csv
import io

import pyarrow as pa

from iaprof.timelines.outputs.tables import lines, rounded, write_csv, write_text

TABLE = pa.table(
    {
        "pid": [0, 1],
        "Name": ['a "b", c', "mm_[N]"],
        "Time": [32.92352, 1e300],
        "Start Time": [1475000719617.26349, float("nan")],
    }
)


def test_csv_has_all_digits_and_quotes_what_needs_it() -> None:
    output = io.BytesIO()
    write_csv(TABLE.slice(0, 1), output)
    assert list(csv.reader(io.StringIO(output.getvalue().decode()))) == [
        ["pid", "Name", "Time", "Start Time"],
        ["0", 'a "b", c', "32.92", "1475000719617.2634"],
    ]


def test_what_is_no_number_is_empty_and_huge_numbers_are_written() -> None:
    output = io.BytesIO()
    write_csv(TABLE, output)
    assert list(csv.reader(io.StringIO(output.getvalue().decode())))[2] == ["1", "mm_[N]", "1e+300", ""]
    assert rounded(TABLE).to_pylist()[1] == {"pid": 1, "Name": "mm_[N]", "Time": 1e300, "Start Time": None}


def test_text_is_aligned_and_clean() -> None:
    table = pa.table({"pid": [0, 10], "Name": ["a\x1b[31m", "bb"], "Time": [1.5, 22.25]})
    assert lines(table) == ["pid  Name        Time", "  0  a\\x1b[31m    1.5", " 10  bb         22.25"]
    output = io.BytesIO()
    write_text(table, output)
    assert output.getvalue().decode().splitlines() == lines(table)


def test_names_that_a_spreadsheet_would_run_get_an_apostrophe() -> None:
    names = ["=cmd|'/c calc'!A1", "+1", "-1", "@SUM(1)", "a=1", "", None]
    output = io.BytesIO()
    write_csv(pa.table({"Name": pa.array(names).dictionary_encode(), "Time": [-1.5] * len(names)}), output)
    rows = list(csv.DictReader(io.StringIO(output.getvalue().decode())))
    assert [row["Name"] for row in rows] == ["'=cmd|'/c calc'!A1", "'+1", "'-1", "'@SUM(1)", "a=1", "", ""]
    assert {row["Time"] for row in rows} == {"-1.50"}
