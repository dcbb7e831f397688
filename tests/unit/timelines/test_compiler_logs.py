from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from iaprof.timelines import compiler_logs
from iaprof.timelines.compiler_logs import CompilerLog, IdealTable, read

SAMPLE = Path(__file__).parent / "data" / "sample_compiler_log.txt"
BEGIN, END = "~~~~ Ideal/Total Cycles ~~~~\n", "====== Perf Summary End ======\n"


def log(path: Path, text: str) -> CompilerLog:
    (path / "log.txt").write_text(text)
    return read(str(path / "log.txt"))


def test_a_real_log() -> None:
    found = read(str(SAMPLE))
    (table,) = found.tables
    assert (len(table.kernels), table.ideal_cycles, table.total) == (17, 556336, 556336)
    assert (table.cycles["addmm_MatMul"], table.categories["mean"]) == (2048, "Pooling")
    assert "mean" not in table.cycles
    assert (found.is_autopilot, found.problems) == (False, [])


def test_lines_of_all_kinds(tmp_path: Path) -> None:
    # Given kernels with and without a category, one that comes twice, and others that do not count
    lines = """a-opCatBmm_fp16   100
b-NA 7
c  5
a-opCatScalar 3
a_Precompute-opCatX 9
a-LxPreload 9
not a kernel 9
-opCatX 9
d-opCatX  0
Total   115
"""
    found = log(tmp_path, "before-opCatX 1\n" + BEGIN + lines + END + "after-opCatX 1\n")

    # Then the first line of a kernel counts
    assert found.tables == [
        IdealTable(
            "UNKN",
            ["a", "b", "c", "a", "d"],
            {"a": 100, "b": 7, "c": 5},
            {"a": "Bmm_fp16", "b": "NotAvailable", "c": "Total", "d": "X"},
            115,
        )
    ]


def test_phases_and_autopilot(tmp_path: Path) -> None:
    one = BEGIN + "k 1\n" + END
    found = log(tmp_path, f"{one} PREFILL \n{one}DECODING\n{one}  DECODING\n{one}DSM-AutoPilot BEGIN\n")
    assert [table.phase for table in found.tables] == ["UNKN", "TTFT", "TTFT", "ITL"]
    assert found.is_autopilot


def test_what_cannot_be_read_is_said(tmp_path: Path) -> None:
    (tmp_path / "inductor-spyre").mkdir()
    cut = log(tmp_path, BEGIN + "k 1\n")
    os.mkfifo(tmp_path / "pipe")
    assert cut.problems == [f"{tmp_path}/log.txt ends within a table, which is left out."]
    assert read(str(tmp_path)).problems == [f"{tmp_path} has no table of ideal cycles."]
    assert read(str(tmp_path / "none")).problems == [f"{tmp_path}/none is neither a file nor a folder."]
    assert read(str(tmp_path / "pipe")).problems == [f"{tmp_path}/pipe is neither a file nor a folder."]
    assert read(str(tmp_path / "inductor-spyre")).problems == [
        f"{tmp_path}/inductor-spyre has no folder inductor-spyre."
    ]
    assert len(read("a\0b").problems) == 1


def test_bounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = BEGIN + "k 1\n" + END
    monkeypatch.setattr(compiler_logs, "MOST_TABLES", 2)
    assert log(tmp_path, one * 3).problems == [f"{tmp_path}/log.txt has more than 2 tables; the others are not read."]
    monkeypatch.setattr(compiler_logs, "MOST_KERNELS", 1)
    many = log(tmp_path, BEGIN + "k 1\nl 99999999999999999999\nm 1\n" + END)
    assert many.tables[0].kernels == ["k"]
    assert len(many.problems) == 1
    monkeypatch.setattr(compiler_logs, "MOST_BYTES", 100)
    assert log(tmp_path, one * 3).tables[0].kernels == ["k"]
    monkeypatch.undo()
    monkeypatch.setattr(compiler_logs, "MOST_LINE_BYTES", 40)
    assert log(tmp_path, BEGIN + "x" * 40 + "k 1\n" + END).tables[0].kernels == []


def test_a_folder_of_ideal_cycles(tmp_path: Path) -> None:
    # Given a kernel of two operations, one of none, and files of other forms
    deep = "[" * 100_000
    nan = '[{"ideal_cycles": NaN}]'
    files = {
        "sdsc_a": json.dumps(
            [{"ideal_cycles": 100, "op_category": "Scalar"}, {"ideal_cycles": 900, "op_category": "Bmm_fp16"}]
        ),
        "sdsc_b": '[{"ideal_cycles": 0, "op_category": 7}]',
        "sdsc_c": "[]",
        "w": deep, "x": "{}", "y": nan, "z": '[{"op_category": "Bmm_fp16"}]',
    }  # fmt: skip
    for kernel, text in files.items():
        (tmp_path / "inductor-spyre" / kernel / "perf").mkdir(parents=True)
        (tmp_path / "inductor-spyre" / kernel / "perf" / "ideal_cycles.json").write_text(text)
    (tmp_path / "inductor-spyre" / "sdsc_d").mkdir()

    found = read(str(tmp_path))

    # Then a kernel takes what its operations take, and its category is that of the longest
    categories = {"sdsc_a": "Bmm_fp16", "sdsc_b": "NotAvailable", "sdsc_c": "NotAvailable"}
    assert found.tables == [IdealTable("UNKN", ["sdsc_a", "sdsc_b", "sdsc_c"], {"sdsc_a": 1000}, categories)]
    assert len(found.problems) == 4


def test_the_ideal_cycles_of_one_kernel(tmp_path: Path) -> None:
    folder = tmp_path / "sdsc_a" / "perf"
    folder.mkdir(parents=True)
    for path in (folder / "ideal_cycles.json", tmp_path / "other.json"):
        path.write_text('[{"ideal_cycles": 100, "op_category": "Scalar"}]')
    (tmp_path / "bad.json").write_text("{")
    names = [read(str(path)).tables[0].cycles for path in (folder / "ideal_cycles.json", tmp_path / "other.json")]
    assert names == [{"sdsc_a": 100}, {"other": 100}]
    bad = read(str(tmp_path / "bad.json"))
    assert (bad.tables, len(bad.problems)) == ([], 1)


LINES = st.sampled_from([BEGIN, END, "a 1\n", "a-opCatB 2\n", " PREFILL\n", "\n", "DSM-AutoPilot BEGIN\n"])


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.binary(max_size=40) | LINES.map(str.encode), max_size=20))
def test_never_raises(tmp_path: Path, parts: list[bytes]) -> None:
    path = tmp_path / "log.txt"
    path.write_bytes(b"".join(parts))
    found = read(str(path))
    assert found.tables or found.problems
