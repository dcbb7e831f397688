"""`iaprof query`: every view against the capture, whole outputs, and what a query must not do."""

from __future__ import annotations

import csv
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from iaprof.basics.errors import IaprofError, UsageError
from iaprof.cli.main import main
from iaprof.cli.verbs import query as query_verb
from iaprof.formats.capture.limits import CaptureError, Ratio
from iaprof.formats.capture.reader import CaptureReader
from iaprof.formats.profile import Code, Kernel, Launch, Profile
from iaprof.gpu.intel import records
from iaprof.gpu.intel.reasons import REASONS
from iaprof.gpu.intel.records import RecordLayout
from iaprof.gpu.intel.zebin import read_zebin
from iaprof.report.views import sql
from iaprof.report.views.sql import Database, View
from unit.capturing import HEADER, capture, launch, record, stall
from unit.profiles import Row, counts, profile
from unit.zebins import debug_elf

APP = Launch("app", 7, ("main", "run;away"), ("do_syscall_64",))
MATMUL = Kernel(0x1000, "matmul", "src/matmul.cl")
SEND = Code("send", ("matmul", "dot(float)"), (4, 9), ("src/matmul.cl", "lib/vec.h"))
PROFILE = profile(
    [
        Row(0, APP, MATMUL, SEND, 0x10, counts(sbid=600, active=200)),
        Row(0, None, None, Code("[no binary]", (), ()), 0xABC0, counts(other=10)),
    ]
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    elf = debug_elf("bmg", "matmul")
    module = {"time_ns": 1, "pid": 7, "path": "/tmp/m.elf", "digest": bytes(32), "size": len(elf), "elf": elf}
    return capture(
        tmp_path / "cap.parquet",
        kernel=[module, {**module, "time_ns": 2, "elf": None}],
        stall=[stall(9, record(0x1000, sbid=3), record(0x1008, send=1)), stall(12), stall(15, record(0x1000, sbid=4))],
        launch=[launch(2, 7, 0x1000, name="matmul"), launch(3, 7, 0x1000, name="x\x1b[2J\n,y")],
    )


@pytest.fixture
def ask(path: Path) -> Iterator[Callable[[str], list[tuple[Any, ...]]]]:
    with Database(CaptureReader(path), lambda: PROFILE) as database:
        yield lambda asked: [row for rows in database.query(asked)[1] for row in rows]


Ask = Callable[[str], list[tuple[Any, ...]]]


def test_each_stall_record_is_a_row(ask: Ask) -> None:
    assert ask("SELECT time_ns, stream, ip, sbid, send FROM stalls") == [
        (9, 0, 0x1000, 3, 0),
        (9, 0, 0x1008, 0, 1),
        (15, 0, 0x1000, 4, 0),
    ]


def random_capture(path: Path, layouts: list[RecordLayout]) -> dict[str, Any]:
    """Writes random records with these layouts; returns the columns that the view must have."""
    rng = np.random.default_rng(5)
    versions = {records.PVC: [12, 60, 0], records.XE2: [20, 1, 0], records.XE3P: [35, 0, 0]}
    streams = [{"layout": layout.name, "ip_version": versions[layout]} for layout in layouts]
    rows = []
    expected: dict[str, list[int]] = {name: [] for name in ("stream", "ip", *REASONS)}
    for number, layout in enumerate(layouts):
        words = [rng.integers(0, 1 << 64, 50, np.uint64) for _ in range(layout.words)]
        lists = [column.tolist() for column in words] + [None] * (3 - layout.words)
        rows.append(
            {"time_ns": number, "begin_ns": 0, "stream": number, **dict(zip(("w0", "w1", "w2"), lists, strict=True))}
        )
        expected["stream"] += [number] * 50
        expected["ip"] += layout.ips(words).tolist()
        for reason in REASONS:
            expected[reason] += layout.counts(words, reason).tolist()
    capture(path, HEADER | {"streams": streams}, stall=rows)
    return expected


@pytest.mark.parametrize(
    "layouts", [[records.PVC], [records.XE2], [records.XE3P], [records.XE3P, records.PVC, records.XE2]]
)
def test_counters_are_what_the_report_counts(layouts: list[RecordLayout], tmp_path: Path) -> None:
    expected = random_capture(tmp_path / "cap.parquet", layouts)
    with Database(CaptureReader(tmp_path / "cap.parquet"), lambda: PROFILE) as database:
        names, rows = database.query(f"SELECT {', '.join(expected)} FROM stalls")
        found = [row for some in rows for row in some]
    assert {name: [row[at] for row in found] for at, name in enumerate(names)} == expected


def test_samples_are_the_profile(ask: Ask) -> None:
    stack = "main;run:away;do_syscall_64_[k]"
    where = (None, "app", 7, None, stack, "matmul", "lib/vec.h", "dot(float)", "send", 9, 0x10)
    assert sorted(ask("SELECT * FROM samples"), key=str) == sorted(
        [
            (*where, "sbid", 600, None),
            (*where, "active", 200, None),
            (None, None, None, None, None, "[unknown kernel]", "", "", "[no binary]", 0, 0xABC0, "other", 10, None),
        ],
        key=str,
    )


def test_kernels_are_those_of_each_module(ask: Ask) -> None:
    kernels = read_zebin(debug_elf("bmg", "matmul")).kernels
    assert ask("SELECT * FROM kernels") == [
        (time, 7, "/tmp/m.elf", each.name, each.address, each.size, each.fingerprint, 32)
        for time in (1, 2)
        for each in kernels
    ]


def test_a_view_can_be_read_twice_in_a_query(ask: Ask) -> None:
    assert ask("SELECT count(*) FROM stalls a JOIN stalls b USING (ip) JOIN launches l ON l.address = a.ip") == [(8,)]


def test_the_join_is_made_only_for_samples(path: Path) -> None:
    made = []

    def join() -> Profile:
        made.append(1)
        return PROFILE

    with Database(CaptureReader(path), join) as database:
        for text in (
            "SELECT count(*) AS samples FROM stalls",
            "WITH samples AS (SELECT 1) FROM samples",
            "SHOW TABLES",
        ):
            assert list(database.query(text)[1])
        assert not made
        for _ in range(2):
            assert list(database.query("SELECT sum(a.samples) FROM samples a, samples b")[1]) == [[(2430,)]]
        assert made == [1]


def test_every_kind_of_rows_has_a_readable_view(path: Path) -> None:
    with Database(CaptureReader(path), lambda: PROFILE) as database:
        tables = list(database.tables())
        assert {"stalls", "samples"} < {name for name, *_ in tables}
        for name, _, columns in tables:
            assert database.query(f"SELECT * FROM {name}")[0] == columns


@pytest.mark.parametrize(
    "text",
    [
        "SELECT * FROM read_text('{secret}')",
        "SELECT * FROM '{secret}'",
        "SELECT * FROM glob('{folder}/*')",
        "COPY launches TO '{folder}/out.csv'",
        "COPY (SELECT 1) TO '{folder}/out.parquet'",
        "EXPORT DATABASE '{folder}/out'",
        "ATTACH '{folder}/out.db'",
        "INSTALL httpfs",
        "LOAD '{secret}'",
        "SET enable_external_access = true",
        "SET temp_directory = '{folder}'",
        "SET memory_limit = '1TB'",
        "SELECT * FROM os",
        "SELECT getenv('HOME')",
    ],
)
def test_queries_cannot_access_files_or_network(text: str, ask: Ask, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "secret.csv").write_text("secret\n1\n")
    with pytest.raises(IaprofError, match=r"^the query failed: ") as refused:
        ask(text.format(secret=folder / "secret.csv", folder=folder))
    assert "\n" not in str(refused.value)
    assert os.listdir(folder) == ["secret.csv"]


def test_errors_are_a_sentence(ask: Ask) -> None:
    with pytest.raises(IaprofError) as wrong:
        ask("SELECT foo FROM stacks")
    assert str(wrong.value).startswith('the query failed: Binder Error: Referenced column "foo" not found')
    assert "LINE" not in str(wrong.value)
    with pytest.raises(UsageError, match="the query is empty: give it a SELECT"):
        ask(" ")


def test_memory_is_limited(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sql, "limit", lambda: 67 << 20)
    with (
        Database(CaptureReader(path), lambda: PROFILE) as database,
        pytest.raises(IaprofError, match="the query needs more memory than the 50MiB it may use: let it read less"),
    ):
        database.query("SELECT list(range) FROM range(100000000)")


def test_errors_in_the_capture_keep_their_message(tmp_path: Path) -> None:
    path = capture(tmp_path / "cap.parquet", stall=[stall(1, record(8), stream=3)])
    with Database(CaptureReader(path), lambda: PROFILE) as database:
        assert list(database.query("SELECT count(*) FROM launches")[1]) == [[(0,)]]
        with pytest.raises(IaprofError, match=r"cap.parquet has stalls of a stream that its header does not know$"):
            database.query("SELECT count(*) FROM stalls")


def test_words_of_different_lengths_are_refused(tmp_path: Path) -> None:
    row = {**stall(1, record(8)), "w1": [1, 2]}
    reader = CaptureReader(capture(tmp_path / "cap.parquet", stall=[row]))
    with (
        Database(reader, lambda: PROFILE) as database,
        pytest.raises(IaprofError, match="stalls whose words do not belong together"),
    ):
        database.query("SELECT count(*) FROM stalls")


def test_without_duckdb(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "duckdb", None)
    with pytest.raises(
        UsageError, match=r"^queries need DuckDB, which is not installed: pip install 'iaprof\[query\]'$"
    ):
        Database(CaptureReader(path), lambda: PROFILE)


def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    monkeypatch.setattr("sys.argv", ["iaprof", "query", *map(str, words)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert isinstance(ended.value.code, int)
    told = capsys.readouterr()
    return ended.value.code, told.out, told.err


LAUNCHES = "SELECT time_ns, name, NULL AS nothing, 1.5 AS x, 'ab'::BLOB AS bytes, ARRAY[1, 2] AS both FROM launches"


def test_a_table(path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, capsys, path, LAUNCHES) == (
        0,
        "time_ns  name            nothing    x  bytes  both\n"
        "      2  matmul                   1.5  6162   [1, 2]\n"
        "      3  x\\x1b[2J\\x0a,y           1.5  6162   [1, 2]\n",
        "",
    )


def test_csv_and_json(path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(monkeypatch, capsys, path, LAUNCHES, "--format", "csv")
    assert (code, list(csv.reader(io.StringIO(out)))) == (
        0,
        [
            ["time_ns", "name", "nothing", "x", "bytes", "both"],
            ["2", "matmul", "", "1.5", "6162", "[1, 2]"],
            ["3", "x\\x1b[2J\\x0a,y", "", "1.5", "6162", "[1, 2]"],
        ],
    )
    code, out, _ = run(monkeypatch, capsys, path, LAUNCHES, "--json")
    rest = {"nothing": None, "x": 1.5, "bytes": "6162", "both": [1, 2]}
    assert (code, json.loads(out)) == (
        0,
        [{"time_ns": 2, "name": "matmul", **rest}, {"time_ns": 3, "name": "x\x1b[2J\n,y", **rest}],
    )
    assert run(monkeypatch, capsys, path, "SELECT 1 AS a WHERE a = 2", "--json") == (0, "[\n]\n", "")
    assert run(monkeypatch, capsys, path, "SELECT 'nan'::FLOAT AS a", "--json") == (0, '[\n{"a": null}\n]\n', "")


def test_the_table_of_a_large_result_is_cut(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(query_verb, "MOST_ROWS", 2)
    code, out, told = run(monkeypatch, capsys, path, "SELECT range AS n FROM range(1000000)")
    assert (code, out) == (0, "n\n0\n1\n")
    assert told == "iaprof: only the first 2 rows are shown: --format csv and json give all\n"


def test_a_narrow_terminal_gets_a_line_per_value(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(query_verb, "terminal_width", lambda: 40)
    assert run(monkeypatch, capsys, path, f"{LAUNCHES} LIMIT 1")[1] == (
        "-- row 1\ntime_ns  2\nname     matmul\nnothing\nx        1.5\nbytes    6162\nboth     [1, 2]\n"
    )


def test_without_sql_the_tables_are_listed(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = run(monkeypatch, capsys, path)
    assert code == 0
    assert out.startswith(
        "stalls       each record of samples: an address, and a counter for each reason\n"
        "               time_ns, begin_ns, stream, ip, active, control, pipestall, send,\n"
        "               dist_acc, sbid, sync, inst_fetch, other, tdr\n"
        "samples      "
    )
    assert max(map(len, out.partition("\nExamples")[0].splitlines())) <= 80
    assert out.count("iaprof query") == 3
    tables = json.loads(run(monkeypatch, capsys, path, "--json")[1])["tables"]
    page = (Path(__file__).resolve().parents[3] / "docs" / "query.md").read_text()
    assert [table["name"] for table in tables][:2] == ["stalls", "samples"]
    for table in tables:
        assert f"`{table['name']}`" in page
        assert f"\n{table['name']:<12} {table['about']}\n" in f"\n{out}"


def test_the_examples_work(path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    queries = [each.replace("\n", " ") for each in query_verb.QUERIES.split('"')[1::2]]
    assert len(queries) == 3
    for text in queries:
        code, out, told = run(monkeypatch, capsys, path, text)
        assert (code, told) == (0, "")
        assert len(out.splitlines()) > 1


def test_invalid_queries_are_refused(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    message = "iaprof: --format takes table, json, csv, parquet, not 'xml'\n"
    assert run(monkeypatch, capsys, path, "SELECT 1", "--format", "xml") == (2, "", message)


@pytest.mark.parametrize("when", ["while the tables are registered", "in the query"])
def test_ctrl_c_ends_it(path: Path, when: str) -> None:
    # given a statement that takes hours, and Ctrl-C meanwhile
    endless = "SELECT count(*) FROM (SELECT unnest(range(100_000)) FROM range(1_000_000_000))"
    program = f"""
import os, signal, sys, threading
from iaprof.cli.start import main
from iaprof.report.views import sql
registering = {when == "while the tables are registered"}
if registering:
    sql._SETTINGS = ({endless!r}, *sql._SETTINGS)
sys.argv = ["iaprof", "query", {str(path)!r}, "SELECT 1" if registering else {endless!r}]
views, interrupt = sql.views, threading.Timer(0.5, os.kill, [os.getpid(), signal.SIGINT])
def found(*arguments):
    interrupt.start()
    return views(*arguments)
sql.views = found
main()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_ctrl_c_while_duckdb_asks_for_a_schema(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted:
        def __arrow_c_schema__(self) -> object:
            raise KeyboardInterrupt

    monkeypatch.setattr(sql, "views", lambda *_: [View("launches", "", Interrupted(), lambda: iter(()))])
    with pytest.raises(KeyboardInterrupt):
        Database(CaptureReader(path), lambda: PROFILE)


def test_the_process_ends_without_further_output(path: Path) -> None:
    command: list[str | Path] = [sys.executable, "-m", "iaprof", "query", path]
    command += ["SELECT sum(samples) AS n FROM samples"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert (done.stdout, done.stderr) == ("n\n8\n", "")


def test_a_module_that_absurdly_many_rows_have_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sql, "COMPILED", Ratio(1000, 1 << 20, "kernels"))
    elf = debug_elf("bmg", "matmul")
    module = {"time_ns": 1, "pid": 7, "path": "", "digest": bytes(32), "size": len(elf), "elf": elf, "base": None}
    for count in (100, 300):
        rows = [module, *({**module, "elf": None} for _ in range(count))]
        path = capture(tmp_path / f"{count}.parquet", HEADER, kernel=rows)
        with Database(CaptureReader(path), lambda: PROFILE) as database:
            if count == 100:
                assert list(database.query("SELECT count(*) FROM kernels")[1]) == [[(303,)]]
                continue
            with pytest.raises(CaptureError, match="--large"):
                list(database.query("SELECT count(*) FROM kernels")[1])
