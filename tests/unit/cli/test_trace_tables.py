"""What `iaprof timeline` prints of a trace, from tables made by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pytest

from iaprof.cli.timelines.tables import show
from unit.in_process import iaprof
from unit.timelines.traces import trace


def printed(capsys: pytest.CaptureFixture[str], limit: int = 10, **tables: pa.Table) -> list[str]:
    made = trace([])
    made.tables.update(tables)
    show(made, limit)
    return capsys.readouterr().out.splitlines()


def test_communication_beside_computation_and_who_waits(capsys: pytest.CaptureFixture[str]) -> None:
    active = pa.table(
        {"pid": [0, 1], "Elapsed Time": [200.0, 200.0], "Total Kernel Time": [80.0, 90.0],
         "Active percentage": [40.0, 45.0]}
    )  # fmt: skip
    overlap = pa.table({"pid": [0, 1], "Communication": [142.0, 0.0], "Overlap Percent": [28.169, 0.0]})
    waits = pa.table(
        {"pid": [0, 1], "Collectives": [2, 2], "Waits": [0.0, 12.5], "Longest Wait": [0.0, 12.5], "Last": [2, 0],
         "Longest Waits for It": [12.5, 0.0]}
    )  # fmt: skip
    assert printed(capsys, active=active, overlap=overlap, imbalance_ranks=waits) == [
        "RANK     ELAPSED    KERNELS     BUSY  COMMUNICATION  OVERLAPPED",
        "   0  200.000 us  80.000 us  40.00 %     142.000 us     28.17 %",
        "   1  200.000 us  90.000 us  45.00 %",
        "",
        "RANK  COLLECTIVES  WAITED US  LONGEST  LAST IN  OTHERS WAITED",
        "   0            2      0.000    0.000        2         12.500",
        "   1            2     12.500   12.500        0          0.000",
    ]


def test_a_rank_without_communication_has_neither(capsys: pytest.CaptureFixture[str]) -> None:
    active = pa.table(
        {"pid": [0], "Elapsed Time": [200.0], "Total Kernel Time": [80.0], "Active percentage": [40.0]}
    )  # fmt: skip
    overlap = pa.table({"pid": [0], "Communication": [0.0], "Overlap Percent": [0.0]})
    assert printed(capsys, active=active, overlap=overlap)[0].split() == ["RANK", "ELAPSED", "KERNELS", "BUSY"]


def test_a_trace_without_kernels_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert printed(capsys) == ["no kernels were found in these traces"]


def test_energy_of_a_thousand_idle_devices_is_cut(capsys: pytest.CaptureFixture[str]) -> None:
    count = 1000
    joules = [3.0, 2.0, *[1.0] * (count + 1)]
    energy = pa.table(
        {"Energy": joules, "Energy Percent": joules, "Mean Energy": joules, "Calls": [1, 2, 1, *[0] * count],
         "pid": range(count + 3), "Name": ["a", "b", "c", *["[idle]"] * count]}
    )  # fmt: skip
    lines = printed(capsys, 2, energy=energy)
    assert [line.split()[-1] for line in lines[1:3]] == ["a", "b"]
    assert lines[3].strip() == "(1 more)"
    assert lines[-1].strip() == "(744 more)"
    assert len(lines) == 1 + 2 + 1 + 256 + 1


def test_what_is_not_known_is_called_unknown(capsys: pytest.CaptureFixture[str]) -> None:
    active = pa.table(
        {"pid": [0], "Elapsed Time": [float("nan")], "Total Kernel Time": [80.0], "Active percentage": [None]}
    )  # fmt: skip
    energy = pa.table(
        {"Energy": [None, 5.0, None], "Energy Percent": [None, 100.0, None], "Mean Energy": [None, 5.0, None],
         "Calls": [3, 1, 0], "pid": [0, 0, 0], "Name": ["a", "b", "[idle]"]}
    )  # fmt: skip
    lines = [line.split() for line in printed(capsys, active=active, energy=energy)]
    assert lines[1] == ["0", "unknown", "80.000", "us", "unknown"]
    assert lines[4:] == [
        ["5.000", "uJ", "100.00", "%", "1", "5.000", "uJ", "0", "b"],
        ["unknown", "3", "0", "a"],
        ["unknown", "0", "[idle]"],
    ]


def test_categories_without_calls_are_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    categories = pa.table(
        {"Pid": [0, 0], "Category": ["other", "Bmm"], "Frac_Time": [0.0, 1.0], "Kernel_Time": [0.0, 5.0],
         "Calls": [0, 1], "Ideal_Time": [0.0, 1.0], "PT_Util": [0.0, 0.2]}
    )  # fmt: skip
    assert [line.split()[1] for line in printed(capsys, categories=categories)] == ["CATEGORY", "Bmm"]


def charged(folder: Path, power: bool = True) -> Path:
    """Imports kernels of a rank with a charge counter: 46.875 W for 100 us, 60 of them in the kernel."""
    events = []
    for number, charge in enumerate((0, 200_000)):
        ts = 1000 + 100 * number
        counters = {f"TS{n}": 1000 * each for n, each in enumerate((ts, ts, ts, ts + 60, ts + 60), 1)}
        args = counters | ({"Power": charge + 1} if power else {})
        events.append({"ph": "X", "name": "k Cmpt Exec", "pid": 0, "tid": 1, "ts": ts, "dur": 60, "args": args})
    (folder / "run.json").write_text(json.dumps(events))
    assert iaprof("import", folder / "run.json", "-o", folder / "run.parquet", "-q").code == 0
    return folder / "run.parquet"


def test_top_shows_energy_of_traces(tmp_path: Path) -> None:
    capture = charged(tmp_path)
    shown = iaprof("top", capture, "--by", "energy", "-q")
    assert [line.split() for line in shown.out.splitlines()] == [
        ["ENERGY", "SHARE", "CALLS", "MEAN", "RANK", "KERNEL", "OR", "COPY"],
        ["2,812.500", "uJ", "60.00", "%", "2", "2,812.500", "uJ", "0", "k", "Cmpt", "Exec"],
        ["1,875.000", "uJ", "40.00", "%", "0", "[idle]"],
    ]
    assert json.loads(iaprof("top", capture, "--by", "energy", "--json", "-q", "--freq", "1000").out) == {
        "by": "energy",
        "entries": [{"kernel": "k Cmpt Exec", "rank": 0, "calls": 2, "joules": 0.0028125}],
        "more": {"entries": 0, "joules": 0.0},
        "idle": [{"rank": 0, "joules": 0.001875}],
        "energy": {"selected": 0.0028125, "idle": 0.001875, "total": 0.0046875},
    }
    rows = tmp_path / "energy.csv"
    assert iaprof("top", capture, "--by", "energy", "-q", "-o", rows).code == 0
    assert rows.read_text() == '"kernel","rank","calls","joules"\n"k Cmpt Exec",0,2,0.0028125\n'


def test_energy_of_several_traces_adds_up(tmp_path: Path) -> None:
    # given two captures with the same kernel, and one without power
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    (tmp_path / "none").mkdir()
    captures = [charged(tmp_path / "one"), charged(tmp_path / "two"), charged(tmp_path / "none", power=False)]

    # when their energy is asked for
    found = iaprof("top", *captures, "--by", "energy", "--json", "--freq", "1000")

    # then it is that of both, and one is said to have none
    document = json.loads(found.out)
    assert document["entries"] == [{"kernel": "k Cmpt Exec", "rank": 0, "calls": 4, "joules": 0.005625}]
    assert document["energy"] == {"selected": 0.005625, "idle": 0.00375, "total": 0.009375}
    assert (document["captures"], document["without_power"]) == (3, [str(captures[2])])
    assert "1 capture without power" in found.err

    # and a folder names them, too; the table has one row for each rank and name
    shown = iaprof("top", tmp_path, "--by", "energy", "-q").out.splitlines()
    assert [line.split()[:4] for line in shown[1:]] == [
        ["5,625.000", "uJ", "60.00", "%"],
        ["3,750.000", "uJ", "40.00", "%"],
    ]

    # and groups, or a capture of stalls among them, are refused in a sentence
    assert "--group-by is for stalls" in iaprof("top", tmp_path, "--by", "energy", "--group-by", "host").err
    stalls = Path(__file__).parents[2] / "data/captures/format-8.parquet"
    refused = iaprof("top", *captures, stalls, "--by", "energy")
    assert (refused.code, refused.out) == (2, "")
    assert "format-8.parquet holds no time lines" in refused.err


def test_top_by_energy_of_traces_refuses_what_it_cannot_do(tmp_path: Path) -> None:
    capture = charged(tmp_path, power=False)
    found = iaprof("top", capture, "--by", "energy")
    assert (found.code, found.out) == (1, "")
    assert "has no power of its devices" in found.err
    for arguments, said in (
        (("--kernel", "k"), "--kernel is for stalls"),
        (("--per-interval",), "--per-interval is for"),
    ):
        refused = iaprof("top", capture, "--by", "energy", *arguments)
        assert refused.code == 2
        assert said in refused.err
    assert iaprof("top", capture, "--freq", "5").code == 2
