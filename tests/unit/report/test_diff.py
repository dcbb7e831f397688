"""`iaprof diff`: whole tables of two profiles, and differential stacks that flamegraph.pl draws red and blue."""

from __future__ import annotations

import io
import json
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest

from iaprof.cli.main import main
from iaprof.cli.terminal.answers import Answers
from iaprof.cli.terminal.difference_tables import BY, show
from iaprof.formats.profile import Code, Kernel, Launch, Profile, StackOptions
from iaprof.formats.writers.folded import DIFFERENCE_COMPONENTS, write_difference
from iaprof.report.views.difference import ENTRIES, difference, joined
from unit.capturing import capture, launch, record, stall
from unit.profiles import Row, counts, profile

FLAMEGRAPH = Path(sys.prefix) / "bin" / "flamegraph.pl"
SEND = Code("send", ("matmul", "dot(float)"), (4, 9))
MOV = Code("mov", ("matmul",), (3,))
ADD = Code("add", ("reduce",), (1,))


def run_of(pid: int, address: str, matmul: int, **kernels: int) -> Profile:
    """A run of a program, with its own pid and addresses, and samples of its kernels."""
    app = Launch("app", pid, ("main", "run(int)", address))
    made = Kernel(pid << 12, "matmul", "src/matmul.cl")
    found = [
        Row(0, app, made, SEND, 0x10 + pid, counts(sbid=matmul)),
        Row(0, app, made, MOV, 0x20 + pid, counts(sync=10)),
    ]
    for name, samples in kernels.items():
        code = Code("add", (name,), (1,))
        found.append(Row(0, app, Kernel(pid << 13, name, "src/r.cl"), code, 0, counts(active=samples)))
    return profile(found)


BEFORE = run_of(42, "0x7f0012", 60, reduce=20, gone=10)
AFTER = run_of(99, "0x5a5a5a", 30, reduce=40, fresh=120)


def printed(capsys: pytest.CaptureFixture[str], by: str, limit: int = 20, relative: bool = True) -> str:
    show(difference(joined(BEFORE, AFTER), by, limit, relative), Answers(), relative)
    return capsys.readouterr().out


def test_the_verb_offers_all_kinds_of_entries() -> None:
    assert ENTRIES == BY


def test_kernels(capsys: pytest.CaptureFixture[str]) -> None:
    assert printed(capsys, "kernel") == (
        " BEFORE    AFTER  CHANGE  MOST CHANGED        KERNEL\n"
        "  0.0 %   60.0 %   +60.0  active +60.0  new   fresh\n"
        " 70.0 %   20.0 %   -50.0  sbid -45.0          matmul\n"
        " 10.0 %    0.0 %   -10.0  active -10.0  gone  gone\n"
        " 20.0 %   20.0 %     0.0                      reduce\n"
        "100.0 %  100.0 %     0.0  active +50.0        (total)\n"
    )


def test_absolute_counts_of_functions(capsys: pytest.CaptureFixture[str]) -> None:
    assert printed(capsys, "function", relative=False) == (
        "BEFORE  AFTER  CHANGE  MOST CHANGED        FUNCTION\n"
        "     0    120    +120  active +120   new   fresh\n"
        "    60     30     -30  sbid -30            dot(float)\n"
        "    20     40     +20  active +20          reduce\n"
        "    10      0     -10  active -10    gone  gone\n"
        "    10     10       0                      matmul\n"
        "   100    200    +100  active +130         (total)\n"
    )


def test_stacks_are_compared_without_pids_and_addresses(capsys: pytest.CaptureFixture[str]) -> None:
    assert printed(capsys, "stack") == (
        " BEFORE    AFTER  CHANGE  MOST CHANGED    STACK\n"
        "100.0 %  100.0 %     0.0  active +50.0    [unnamed] < run(int) < main < app\n"
        "100.0 %  100.0 %     0.0  active +50.0    (total)\n"
    )


def test_entries_beyond_the_limit_share_a_row(capsys: pytest.CaptureFixture[str]) -> None:
    assert printed(capsys, "kernel", limit=1) == (
        " BEFORE    AFTER  CHANGE  MOST CHANGED       KERNEL\n"
        "  0.0 %   60.0 %   +60.0  active +60.0  new  fresh\n"
        "100.0 %   40.0 %   -60.0  sbid -45.0         (3 more)\n"
        "100.0 %  100.0 %     0.0  active +50.0       (total)\n"
    )


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    show(difference(joined(BEFORE, AFTER), "kernel", 2), Answers("json"), True)
    found = json.loads(capsys.readouterr().out)
    assert found["unit"] == "percent"
    assert [(each["kernel"], each["file"], each["state"]) for each in found["entries"]] == [
        ("fresh", "src/r.cl", "new"),
        ("matmul", "src/matmul.cl", "both"),
    ]
    second = found["entries"][1]
    assert (second["samples_before"], second["samples_after"]) == (70, 40)
    assert second["reasons"]["sbid"] == pytest.approx(-45)
    assert found["more"]["entries"] == 2
    assert sum(each["samples_after"] for each in (*found["entries"], found["more"])) == found["total"]["samples_after"]


@pytest.mark.parametrize("relative", [True, False])
@pytest.mark.parametrize("by", BY)
def test_an_empty_profile_against_another(by: str, relative: bool) -> None:
    empty = profile([])
    assert difference(joined(empty, empty), by, 20, relative).entries == []
    found = difference(joined(empty, AFTER), by, 20, relative)
    assert {entry.state for entry in found.entries} == {"new"}
    assert found.total.values == pytest.approx((0.0, 100.0 if relative else 200.0))
    found = difference(joined(BEFORE, empty), by, 20, relative)
    assert {entry.state for entry in found.entries} == {"gone"}


def folded(before: Profile, after: Profile, relative: bool) -> str:
    out = io.StringIO()
    write_difference(joined(before, after), StackOptions(components=DIFFERENCE_COMPONENTS), relative, out)
    return out.getvalue()


STACK = "app;main;run(int);[unnamed];-"


def test_differential_stacks() -> None:
    assert folded(BEFORE, AFTER, False) == (
        f"{STACK};src/matmul.cl_[G];matmul_[G];dot(float)_[G];send_[g];sbid_[g] 60 30\n"
        f"{STACK};src/matmul.cl_[G];matmul_[G];mov_[g];sync_[g] 10 10\n"
        f"{STACK};src/r.cl_[G];fresh_[G];add_[g];active_[g] 0 120\n"
        f"{STACK};src/r.cl_[G];reduce_[G];add_[g];active_[g] 20 40\n"
        "[gone] 10 0\n"
    )
    scaled = [line.rsplit(" ", 2)[1:] for line in folded(BEFORE, AFTER, True).splitlines()]
    assert scaled == [["60", "15"], ["10", "5"], ["0", "60"], ["20", "20"], ["10", "0"]]


@pytest.mark.parametrize("seed", range(5))
def test_scaled_counts_are_whole_and_add_up(seed: int) -> None:
    # given
    rng = random.Random(seed)
    app = Launch("app", 1, ("main",))
    names = [f"k{number}" for number in range(300)]

    def made(most: int) -> Profile:
        return profile(
            [
                Row(0, app, Kernel(0, name, ""), Code("add", (name,), ()), 0, counts(sbid=rng.randrange(most)))
                for name in names
            ]
        )

    before, after = made(rng.choice((3, 1000))), made(rng.choice((7, 100_000)))
    # when
    raw, scaled = (
        {stack: (int(old), int(new)) for stack, old, new in (line.rsplit(" ", 2) for line in text.splitlines())}
        for text in (folded(before, after, False), folded(before, after, True))
    )
    # then
    total = int(before.counts.sum())
    assert sum(old for old, _ in scaled.values()) == sum(new for _, new in scaled.values()) == total
    for stack, (old, new) in raw.items():
        expected = new * total / int(after.counts.sum())
        assert stack == "[gone]" or scaled.get(stack, (old, 0))[0] == old
        assert abs(scaled.get(stack, (old, 0))[1] - expected) < 1


def test_flamegraph_pl_draws_more_in_red_and_less_in_blue_as_difffolded_pl_cannot_be_had_offline() -> None:
    # when
    text = folded(BEFORE, AFTER, True)
    done = subprocess.run(["perl", str(FLAMEGRAPH)], input=text, capture_output=True, text=True, check=True)
    # then
    assert done.stderr == ""
    found = re.findall(r"<title>(\S+) \([^<]*</title><rect [^>]*fill=\"rgb\((\d+),(\d+),(\d+)\)\"", done.stdout)
    fills = [(name, tuple(map(int, colour))) for name, *colour in found]  # the leaves have the colours
    red, white = sorted(colour for name, colour in fills if name == "active_[g]")
    assert red[0] == 255 > red[1] == red[2]
    assert white == (255, 255, 255)
    (blue,) = (colour for name, colour in fills if name == "sbid_[g]")
    assert blue[0] == blue[1] < 255 == blue[2]


@pytest.fixture
def captures(tmp_path: Path) -> tuple[Path, Path]:
    made = []
    for number, sends in enumerate((1, 3)):
        made.append(
            capture(
                tmp_path / f"{number}.parquet",
                stall=[stall(9, record(0x8000_0001_0000, sbid=3), record(0x8000_0001_0008, send=sends))],
                launch=[launch(2, 7 + number, 0x8000_0001_0000, 11, name="matmul")],
            )
        )
    return made[0], made[1]


def iaprof(*words: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "iaprof", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)


def test_captures(captures: tuple[Path, Path], tmp_path: Path) -> None:
    done = iaprof("diff", *captures)
    assert done.stdout.splitlines()[1].split() == ["100.0", "%", "100.0", "%", "0.0", "send", "+25.0", "matmul"]
    assert [line.split(":")[0] for line in done.stderr.splitlines()] == [
        "[ iaprof diff 0.parquet",
        "[ iaprof diff 1.parquet",
    ]
    target = tmp_path / "out.folded"
    done = iaprof("diff", *captures, "-q", "--normalize", "none", "-o", target)
    assert (done.stdout, done.stderr) == ("", "")
    assert [line.rsplit(" ", 2)[1:] for line in target.read_text().splitlines()] == [["3", "3"], ["1", "3"]]


FORMATS = "table, json, csv, parquet, html, folded, svg"
EXTENSIONS = ".json, .csv, .parquet, .html, .folded, .collapsed or .svg"


@pytest.mark.parametrize(
    ("words", "message", "code"),
    [
        (("--by", "line"), "--by takes kernel, function, launcher, stack, not 'line'", 2),
        (("--normalize", "time"), "--normalize takes total, none, not 'time'", 2),
        (("--format", "svgs"), f"--format takes {FORMATS}, not 'svgs': did you mean svg?", 2),
        (("-o", "out.txt"), f"the name out.txt does not determine the format: end it in {EXTENSIONS}", 2),
        (("-o", "{0}.folded", "--json"), "--json and -o {0}.folded contradict each other: leave one of them out", 2),
        (("--format=svg", "-o", "x.csv"), "--format=svg and -o x.csv contradict each other: leave one of them out", 2),
        (("-o", "{1}", "-f"), "{1} is the input: name another file with -o", 1),
    ],
)  # fmt: skip
def test_what_makes_no_sense(
    words: tuple[str, ...],
    message: str,
    code: int,
    captures: tuple[Path, Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(
        "sys.argv", ["iaprof", "diff", *map(str, captures), *(word.format(*captures) for word in words)]
    )
    with pytest.raises(SystemExit) as ended:
        main()
    told = capsys.readouterr()
    assert (ended.value.code, told.out, told.err) == (code, "", f"iaprof: {message.format(*captures)}\n")
