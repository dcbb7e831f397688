"""`iaprof top`: whole tables of profiles made by hand, exact sums, and user errors."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from iaprof.cli.main import main
from iaprof.cli.terminal.answers import Answers
from iaprof.cli.terminal.entry_names import entry_titles
from iaprof.cli.terminal.ranking_tables import BY, show
from iaprof.formats.profile import Code, Kernel, Launch, Profile
from iaprof.gpu.intel.reasons import REASONS
from iaprof.report.views.ranking import KEYS, Ranker
from unit.capturing import capture, launch, record, stall
from unit.profiles import Row, counts, profile, rows

APP = Launch("app", 42, ("main", "run(int)", "zeLaunch"), ("do_syscall_64",))
OTHER = Launch("app", 43, ("main", "warm_up()", "zeLaunch"), ("do_syscall_64",))
AMBIGUOUS = Launch("[ambiguous: 2 processes]", 0, ("[ambiguous]",))
MATMUL = Kernel(0x1000, "matmul", "src/matmul.cl")
ELSEWHERE = Kernel(0x9000, "matmul", "src/matmul.cl")
NAMESAKE = Kernel(0x5000, "scale", "src/b.cl")
SCALE = Kernel(0x4000, "scale", "src/a.cl")
SEND = Code("send", ("matmul", "dot(float)"), (4, 9), ("src/matmul.cl", "lib/vec.h"))
DEEP = Code("mad", ("matmul", "fib", "dot(float)", "fib"), (4, 1, 2, 3), ("src/matmul.cl", "f.h", "f.h", "f.h"))
MOV = Code("mov", ("scale",), (7,), ("",))
BARE = Code("[no binary]", (), ())
ROWS = [
    Row(0, APP, MATMUL, SEND, 0x10, counts(sbid=600, active=200)),
    Row(0, APP, MATMUL, DEEP, 0x20, counts(sync=100)),
    Row(0, OTHER, ELSEWHERE, SEND, 0x10, counts(sbid=50)),
    Row(1, OTHER, SCALE, MOV, 0x30, counts(pipestall=20)),
    Row(1, AMBIGUOUS, NAMESAKE, MOV, 0x30, counts(tdr=20)),
    Row(2, None, None, BARE, 0xABC0, counts(other=10)),
]
PROFILE = replace(profile(ROWS, (10.0, 11.0, 12.0)), launch_counts={0: 1000, 1: 200, 2: 3})


def printed(
    capsys: pytest.CaptureFixture[str], by: str, limit: int = 20, per_interval: bool = False, of: Profile = PROFILE
) -> str:
    show(of, by, limit, Answers(), per_interval)
    return capsys.readouterr().out


TABLES = {
    "kernel": """\
SAMPLES    SHARE  TOP REASON       LAUNCHES  PROCS  KERNEL
    950   95.0 %  sbid 68 %           1,200      2  matmul
     20    2.0 %  pipestall 100 %         3      1  scale src/a.cl
     20    2.0 %  tdr 100 %               0      0  scale src/b.cl
     10    1.0 %  other 100 %             0      0  [unknown kernel]
  1,000  100.0 %  sbid 65 %           1,203      2  (total)
""",
    "function": """\
SAMPLES    SHARE  INCLUSIVE  TOP REASON      FUNCTION
    850   85.0 %        950  sbid 76 %       dot(float)
    100   10.0 %        100  sync 100 %      fib
     40    4.0 %         40  pipestall 50 %  scale
     10    1.0 %         10  other 100 %     [unknown kernel]
      0    0.0 %        950                  matmul
  1,000  100.0 %             sbid 65 %       (total)
""",
    "line": """\
SAMPLES    SHARE  TOP REASON      LINE
    850   85.0 %  sbid 76 %       lib/vec.h:9
    100   10.0 %  sync 100 %      f.h:3
     40    4.0 %  pipestall 50 %  scale line 7
     10    1.0 %  other 100 %     [unknown kernel] [no line]
  1,000  100.0 %  sbid 65 %       (total)
""",
    "instruction": """\
SAMPLES    SHARE  TOP REASON       INSTRUCTION
    850   85.0 %  sbid 76 %        matmul+0x10 send
    100   10.0 %  sync 100 %       matmul+0x20 mad
     20    2.0 %  pipestall 100 %  scale+0x30 mov src/a.cl
     20    2.0 %  tdr 100 %        scale+0x30 mov src/b.cl
     10    1.0 %  other 100 %      [unknown kernel]+0xabc0 [no binary]
  1,000  100.0 %  sbid 65 %        (total)
""",
    "reason": """\
SAMPLES    SHARE  REASON
    650   65.0 %  sbid
    200   20.0 %  active
    100   10.0 %  sync
     20    2.0 %  pipestall
     20    2.0 %  tdr
     10    1.0 %  other
  1,000  100.0 %  (total)
""",
    "process": """\
SAMPLES    SHARE  TOP REASON   PROCESS
    900   90.0 %  sbid 67 %    app 42
     70    7.0 %  sbid 71 %    app 43
     20    2.0 %  tdr 100 %    [ambiguous: 2 processes]
     10    1.0 %  other 100 %  [unknown process]
  1,000  100.0 %  sbid 65 %    (total)
""",
    "launcher": """\
SAMPLES    SHARE  TOP REASON   LAUNCHER
    900   90.0 %  sbid 67 %    run(int)
     70    7.0 %  sbid 71 %    warm_up()
     20    2.0 %  tdr 100 %    [ambiguous]
     10    1.0 %  other 100 %  [unknown process]
  1,000  100.0 %  sbid 65 %    (total)
""",
    "stack": """\
SAMPLES    SHARE  TOP REASON   STACK
    900   90.0 %  sbid 67 %    do_syscall_64_[k] < zeLaunch < run(int) < main < app
     70    7.0 %  sbid 71 %    do_syscall_64_[k] < zeLaunch < warm_up() < main < app
     20    2.0 %  tdr 100 %    [ambiguous] < [ambiguous: 2 processes]
     10    1.0 %  other 100 %  [unknown process]
  1,000  100.0 %  sbid 65 %    (total)
""",
    "operator": """\
SAMPLES    SHARE  INCLUSIVE  TOP REASON  OPERATOR
  1,000  100.0 %      1,000  sbid 65 %   [no operator]
  1,000  100.0 %             sbid 65 %   (total)
""",
    "energy": """\
SAMPLES  TOP REASON       LAUNCHES  KERNEL
    950  sbid 68 %           1,200  matmul
     20  pipestall 100 %         3  scale src/a.cl
     20  tdr 100 %               0  scale src/b.cl
     10  other 100 %             0  [unknown kernel]
  1,000  sbid 65 %           1,203  (total)
""",
}


@pytest.mark.parametrize("by", TABLES)
def test_whole_tables(by: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert printed(capsys, by) == TABLES[by]


def test_the_verb_offers_all_kinds_of_entries() -> None:
    assert tuple(KEYS) == BY == tuple(TABLES)


def test_entries_beyond_the_limit_share_a_row(capsys: pytest.CaptureFixture[str]) -> None:
    assert printed(capsys, "kernel", limit=2) == (
        "SAMPLES    SHARE  TOP REASON       LAUNCHES  PROCS  KERNEL\n"
        "    950   95.0 %  sbid 68 %           1,200      2  matmul\n"
        "     20    2.0 %  pipestall 100 %         3      1  scale\n"
        "     30    3.0 %  tdr 67 %                0      0  (2 more)\n"
        "  1,000  100.0 %  sbid 65 %           1,203      2  (total)\n"
    )


def test_a_table_for_each_interval(capsys: pytest.CaptureFixture[str]) -> None:
    assert printed(capsys, "kernel", per_interval=True) == (
        "from 0.000 s\n"
        "SAMPLES    SHARE  TOP REASON  PROCS  KERNEL\n"
        "    950  100.0 %  sbid 68 %       2  matmul\n"
        "    950  100.0 %  sbid 68 %       2  (total)\n"
        "\n"
        "from 1.000 s\n"
        "SAMPLES    SHARE  TOP REASON       PROCS  KERNEL\n"
        "     20   50.0 %  pipestall 100 %      1  scale src/a.cl\n"
        "     20   50.0 %  tdr 100 %            0  scale src/b.cl\n"
        "     40  100.0 %  pipestall 50 %       1  (total)\n"
        "\n"
        "from 2.000 s\n"
        "SAMPLES    SHARE  TOP REASON   PROCS  KERNEL\n"
        "     10  100.0 %  other 100 %      0  [unknown kernel]\n"
        "     10  100.0 %  other 100 %      0  (total)\n"
    )


@pytest.mark.parametrize("by", BY)
def test_an_empty_profile_has_a_total_of_0(by: str, capsys: pytest.CaptureFixture[str]) -> None:
    heading, total = printed(capsys, by, of=profile([])).splitlines()
    assert heading.split()[0] == "SAMPLES"
    assert total.split()[:3] == (["0", "(total)"] if by == "energy" else ["0", "0.0", "%"])
    show(profile([]), by, 20, Answers("json"), True)
    assert json.loads(capsys.readouterr().out) == {"by": by, "intervals": []}


def test_a_terminal_shows_what_distinguishes_stacks() -> None:
    lambda_ = "infer(float (*)(int), char const*)::{lambda(float)#1}::operator()(float) const"
    keys = [
        ("app", ("zeLaunch", lambda_, "(anonymous namespace)::f(int)", "main")),
        ("app", ("zeLaunch", "main")),
        ("app", ("zeLaunch", "g()", "main")),
        ("[ambiguous: 2 processes]", ("[ambiguous]",)),
    ]
    assert entry_titles("stack", keys, short=True) == [
        "… < infer::{lambda#1}::operator() < (anonymous namespace)::f < …",
        "… < …",
        "… < g < …",
        "[ambiguous] < [ambiguous: 2 processes]",
    ]
    assert entry_titles("stack", keys[2:], short=True)[0] == "zeLaunch < g < main < app"
    assert (
        entry_titles("stack", keys, short=False)[0]
        == f"zeLaunch < {lambda_} < (anonymous namespace)::f(int) < main < app"
    )


def test_untrusted_names_stay_in_their_row(capsys: pytest.CaptureFixture[str]) -> None:
    hostile = "a\nb\x1b[31m\u202e\0"
    row = Row(
        0, Launch(hostile, 1, (hostile,)), Kernel(0, hostile, hostile), Code(hostile, (hostile,), (1,)), 0, [1] * 10
    )
    for by in BY:
        text = printed(capsys, by, of=profile([row]))
        assert len(text.splitlines()) == (12 if by == "reason" else 3)
        assert text.replace("\n", "").isprintable()


def test_json_has_whole_names_and_every_count(capsys: pytest.CaptureFixture[str]) -> None:
    show(PROFILE, "stack", 1, Answers("json"), False)
    found = json.loads(capsys.readouterr().out)
    assert found["entries"] == [
        {
            "process": "app",
            "stack": ["do_syscall_64_[k]", "zeLaunch", "run(int)", "main"],
            "samples": 900,
            "reasons": dict(zip(REASONS, counts(sbid=600, active=200, sync=100), strict=True)),
            "processes": 1,
        }
    ]
    assert (found["by"], found["more"]["entries"], found["more"]["samples"], found["total"]["samples"]) == (
        "stack",
        3,
        100,
        1000,
    )
    show(PROFILE, "instruction", 0, Answers("json"), True)
    second = json.loads(capsys.readouterr().out)["intervals"][1]
    assert second["start_s"] == 1.0
    assert [entry["offset"] for entry in second["entries"]] == [0x30, 0x30]
    assert second["more"]["entries"] == 0


def plain(of: Profile, by: str) -> Counter[object]:
    """Returns the samples of each key, added up row by row."""
    found: Counter[object] = Counter()
    for row in rows(of):
        kernel = (row.kernel.symbol, row.kernel.file) if row.kernel else (row.code.functions[0], "")
        for reason, count in zip(REASONS, row.counts, strict=True):
            key = {
                "kernel": kernel,
                "function": (row.code.functions[-1],),
                "instruction": (*kernel, row.offset, row.code.mnemonic),
                "reason": (reason,),
                "process": ("", row.launch.comm, row.launch.pid) if row.launch else ("", "[unknown process]", 0),
            }[by]
            found[key] += count
    return found


def random_rows(seed: int) -> list[Row]:
    rng = random.Random(seed)
    launches = [None, *(Launch(f"app{pid % 3}", pid, ("main",)) for pid in range(1, 6))]
    kernels = [None, *(Kernel(address, f"k{address % 4}", f"f{address % 3}") for address in range(9))]
    codes = [Code(rng.choice("ab"), tuple(rng.choice("xyz") for _ in range(rng.randrange(1, 5))), ()) for _ in range(9)]
    return [
        Row(
            interval,
            rng.choice(launches),
            rng.choice(kernels),
            rng.choice(codes),
            rng.randrange(4),
            [rng.randrange(9) * rng.randrange(2) for _ in REASONS],
        )
        for interval in sorted(rng.randrange(3) for _ in range(60))
    ]


@pytest.mark.parametrize("by", ["kernel", "function", "instruction", "reason", "process"])
@pytest.mark.parametrize("seed", range(4))
def test_tables_match_sums_row_by_row(by: str, seed: int) -> None:
    # given
    of = profile(random_rows(seed), (0.0, 1.0, 2.0))
    expected = plain(of, by)
    # when
    ranking, short = Ranker(of, by).table(0), Ranker(of, by).table(3)
    # then
    assert Counter({entry.key: entry.samples for entry in ranking.entries}) == expected
    samples = [entry.samples for entry in ranking.entries]
    assert samples == sorted(samples, reverse=True)
    assert [entry.samples for entry in short.entries] == [entry.samples for entry in ranking.entries[:3]]
    assert short.more == len(ranking.entries) - 3
    together = [sum(column) for column in zip(*(entry.counts for entry in (*short.entries, short.rest)), strict=True)]
    assert together == list(short.total.counts) == of.counts.sum(axis=0).tolist()


@pytest.mark.parametrize("seed", range(4))
def test_a_recursive_function_has_each_sample_once(seed: int) -> None:
    of = profile(random_rows(seed))
    expected: Counter[object] = Counter()
    for row in rows(of):
        expected.update({(function,): sum(row.counts) for function in set(row.code.functions)})
    found = Counter({entry.key: entry.inclusive for entry in Ranker(of, "function").table(0).entries})
    assert found == expected


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    return capture(
        tmp_path / "cap.parquet",
        stall=[stall(9, record(0x8000_0001_0000, sbid=3), record(0x8000_0001_0008, send=1))],
        launch=[launch(2, 7, 0x8000_0001_0000, 11, name="matmul")],
    )


def run(monkeypatch: pytest.MonkeyPatch, *words: object) -> int:
    monkeypatch.setattr("sys.argv", ["iaprof", *map(str, words)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert isinstance(ended.value.code, int)
    return ended.value.code


def iaprof(*words: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "iaprof", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)


def test_a_capture(recorded: Path) -> None:
    done = iaprof("top", recorded, "--reason", "sbid")
    assert done.stdout == (
        "SAMPLES    SHARE  TOP REASON  LAUNCHES  PROCS  KERNEL\n"
        "      3  100.0 %  sbid 100 %         1      1  matmul\n"
        "      3  100.0 %  sbid 100 %         1      1  (total)\n"
    )
    assert done.stderr.startswith("[ iaprof top: ")
    done = iaprof("top", recorded, "--per-interval", "--interval", "0.5", "-q")
    assert done.stdout.startswith("from 0.000 s\n")
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("--by", "colour"),
            "--by takes kernel, function, line, instruction, reason, process, launcher, stack, operator, energy, "
            "transfer, wait, not 'colour'",
        ),
        (("--interval", "0"), "--interval must be a number of seconds, 0.001 or more"),
        (("--interval", "nan"), "--interval must be a number of seconds, 0.001 or more"),
    ],
)
def test_what_makes_no_sense(
    words: tuple[str, ...],
    message: str,
    recorded: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(monkeypatch, "top", recorded, *words) == 2
    told = capsys.readouterr()
    assert (told.out, told.err) == ("", f"iaprof: {message}\n")
