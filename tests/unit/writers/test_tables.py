"""The profile as CSV and Parquet: whole outputs, sums, and hostile names."""

from __future__ import annotations

import csv
import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from iaprof.basics.errors import UsageError
from iaprof.cli.main import main
from iaprof.cli.options.output_format import output_format
from iaprof.formats.export import Export
from iaprof.formats.profile import Code, Kernel, Launch, StackOptions, empty_profile
from iaprof.formats.writers.registry import EXTENSIONS, WRITERS
from unit.capturing import capture, launch, record, stall
from unit.profiles import Row, counts, profile

APP = Launch("app", 7, ("main", "run;away"), ("do_syscall_64",), "node1")
MATMUL = Kernel(0x1000, "matmul", "src/matmul.cl")
SEND = Code("send", ("matmul", "dot(float)"), (4, 9), ("src/matmul.cl", "lib/vec.h"))
PROFILE = profile(
    [
        Row(0, APP, MATMUL, SEND, 0x10, counts(sbid=600, active=200), "card0"),
        Row(3, None, None, Code("[no binary]", (), ()), 0xABC0, counts(other=10), "card0"),
    ],
    [5.0, 5.1, 5.2, 5.3],
)
EVIL = ['=cmd|"/C calc"!A0', "+1", "-1", "@SUM(A1)", 'a"b,c\nd', "\x1b[2J", "\u202eevil", "\t=1"]


def written(name: str, given: Export) -> bytes:
    out = io.BytesIO()
    WRITERS[name].write(given, StackOptions(), out)
    return out.getvalue()


def table(given: Export) -> pa.Table:
    return pq.read_table(io.BytesIO(written("parquet", given)))


def test_csv_is_a_row_per_stack_instruction_and_reason() -> None:
    assert written("csv", Export(PROFILE)).decode() == (
        '"host","process","pid","operators","stack","kernel","file","function","instruction","line","offset","device","reason",'
        '"samples","joules"\n'
        '"node1","app",7,,"main;run:away;do_syscall_64_[k]","matmul","lib/vec.h","dot(float)","send",9,16,"card0",'
        '"active",200,\n'
        '"node1","app",7,,"main;run:away;do_syscall_64_[k]","matmul","lib/vec.h","dot(float)","send",9,16,"card0",'
        '"sbid",600,\n'
        ',,,,,"[unknown kernel]","","","[no binary]",0,43968,"card0","other",10,\n'
    )


def test_parquet_has_the_same_rows_with_texts_as_dictionaries() -> None:
    found = table(Export(PROFILE))
    read = list(csv.DictReader(io.StringIO(written("csv", Export(PROFILE)).decode())))
    as_text = [{name: "" if value is None else str(value) for name, value in row.items()} for row in found.to_pylist()]
    assert as_text == read
    assert found.schema.field("stack").type == pa.dictionary(pa.int32(), pa.string())


@pytest.mark.parametrize("name", ["csv", "parquet"])
def test_rows_of_intervals_have_their_start(name: str) -> None:
    given = Export(PROFILE, interval_s=0.1)
    rows: list[dict[str, Any]] = (
        table(given).to_pylist()
        if name == "parquet"
        else list(csv.DictReader(io.StringIO(written("csv", given).decode())))
    )
    assert [float(row["seconds"]) for row in rows] == [0, 0, 0.3]
    assert sum(int(row["samples"]) for row in rows) == PROFILE.counts.sum()


def test_csv_escapes_formulas_and_line_breaks() -> None:
    # given names that a spreadsheet would evaluate, or that would break the table
    rows = [Row(0, replace(APP, comm=evil), Kernel(0, evil, evil), SEND, 1, counts(sbid=1), evil) for evil in EVIL]
    # when
    text = written("csv", Export(profile(rows))).decode()
    # then
    read = list(csv.DictReader(io.StringIO(text)))
    assert len(text.splitlines()) == len(read) + 1
    assert [row["process"] for row in read] == [
        "'=cmd|\"/C calc\"!A0", "'+1", "'-1", "'@SUM(A1)", 'a"b,c\\x0ad', "\\x1b[2J", "\\u202eevil", "\\x09=1"
    ]  # fmt: skip
    for row in read:
        assert (row["process"], row["process"]) == (row["kernel"], row["device"])
        assert not any(str(value).startswith(("=", "+", "-", "@")) for value in row.values())
    # and Parquet keeps them unescaped
    assert table(Export(profile(rows)))["process"].to_pylist()[0] == EVIL[0]


@pytest.mark.parametrize("name", ["csv", "parquet"])
def test_of_nothing_there_are_headings(name: str) -> None:
    given = Export(empty_profile())
    if name == "parquet":
        assert table(given).num_rows == 0
    else:
        assert len(written(name, given).decode().splitlines()) == 1


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("x.csv", "csv"),
        ("x.parquet", "parquet"),
        ("x.trace.json", "chrome"),
        ("x.json", "json"),
        ("x.pftrace", "perfetto"),
        ("x.perfetto-trace", "perfetto"),
        ("x.collapsed", "folded"),
    ],
)
def test_extensions_choose_formats(file: str, name: str) -> None:
    assert output_format(EXTENSIONS, "", named=None, as_json=False, output=Path(file)) == name


def test_other_extensions_tell_no_format() -> None:
    with pytest.raises(UsageError, match=r"^the name x\.txt does not determine the format: end it in \.folded, "):
        output_format(EXTENSIONS, "", named=None, as_json=False, output=Path("x.txt"))


@pytest.mark.parametrize("file", ["x.json", "x.trace.json", "x.txt", "x"])
def test_a_format_may_have_another_name(file: str) -> None:
    """Given --format, the extension may be one that no format has, or the end of the format's own."""
    assert output_format(EXTENSIONS, "", named="chrome", as_json=False, output=Path(file)) == "chrome"


def test_the_verb_writes_tables_but_never_over_its_capture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    # given
    monkeypatch.chdir(tmp_path)
    path = capture(
        tmp_path / "cap.parquet", stall=[stall(9, record(0x1000, sbid=3))], launch=[launch(2, 7, 0x1000, name="k")]
    )
    before = path.read_bytes()

    def report(*options: str) -> int:
        monkeypatch.setattr("sys.argv", ["iaprof", "report", "cap.parquet", "-q", *options])
        with pytest.raises(SystemExit) as ended:
            main()
        return int(ended.value.code or 0)

    # when the output has the capture's name, or stdout is a terminal
    assert report("--force", "-o", "cap.parquet") == 1
    assert report("-o", "table.parquet") == 0
    capsysbinary.readouterr()
    assert report("--format=parquet") == 0
    # then
    assert path.read_bytes() == before
    assert pq.read_table(io.BytesIO(capsysbinary.readouterr().out))["samples"].to_pylist() == [3]
    assert pq.read_table(tmp_path / "table.parquet")["kernel"].to_pylist() == ["k"]


def csv_total(file: Path) -> int:
    return sum(int(row["samples"]) for row in csv.DictReader(io.StringIO(file.read_text())))


def parquet_total(file: Path) -> int:
    return int(pq.read_table(file)["samples"].to_numpy().sum())


TOTALS = {"csv": csv_total, "parquet": parquet_total}
