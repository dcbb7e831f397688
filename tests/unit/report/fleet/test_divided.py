"""What is divided among stacks in reports of several captures: said, and marked as in a report of each capture."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser

from browser import opened, ready
from iaprof.report.fleet.cache import NONE
from thorough import usually
from unit.capturing import HEADER, capture, launch, record, stall
from unit.in_process import iaprof
from unit.report.fleet.fleets import as_json
from unit.writers.test_html_estimates import LABELS

pytestmark = pytest.mark.usefixtures("here")
BOTH, OWN = 0x8000_0001_0000, 0x8000_0002_0000
SENTENCE = "of the samples are divided among stacks that launched the same kernel at about"


def recorded(path: Path, both: int, own: int, comm: str = "app", *, deeper: bool = False) -> Path:
    """Two stacks of a process launch the kernel `both` at once, and one of these alone `own`.

    Args:
        path: where to write it.
        both: samples of one, in all instructions.
        own: samples of the other.
        comm: the process's name.
        deeper: whether the stacks part a frame below main.
    """
    at = 1_000_000_000
    launches = [
        launch(at, 7, BOTH, 1, name="both", comm=comm),
        launch(at, 7, BOTH, 2, name="both", comm=comm),
        launch(at, 7, OWN, 1, name="own", comm=comm),
    ]
    names = ["main", "load", "train"]  # at 0x1000, 0x2000 and 0x3000
    stacks = [
        {"id": number, "time_ns": 1, "pid": 7, "truncated": False, "ips": ips}
        for number, ips in enumerate(
            ([0x3001, 0x2001, 0x1001], [0x1001, 0x2001, 0x1001]) if deeper else ([0x2001, 0x1001], [0x3001, 0x1001]), 1
        )
    ]
    generated: dict[str, Any] = {"path": "//anon", "build_id": None, "inode": 0, "pid": 7}
    mapping = generated | {"time_ns": 0, "start": 0x1000, "length": 0x3000, "offset": 0}
    module = generated | {"id": 1, "what": "generated", "source": "perf map", "problem": "", "frame_pointers": None,
                          "outermost": None, "no_calls": None}  # fmt: skip
    symbols = [
        {"module": 1, "address": 0x1000 * number, "size": 64, "depth": 0, "function": name, "file": "", "line": 0}
        for number, name in enumerate(names, 1)
    ]
    read = stall(at + 10_000_000, record(BOTH, sbid=both), record(OWN, send=own), begin_ns=at)
    return capture(
        path, HEADER | {"host": {"name": path.stem, "boot_id": path.stem}},
        launch=launches, stack=stacks, stall=[read], mapping=[mapping], module=[module], symbol=symbols,
    )  # fmt: skip


@pytest.fixture
def fleet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two captures of one program, and one of another program whose kernel has the same name."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    folder = tmp_path / "captures"
    folder.mkdir()
    recorded(folder / "a.parquet", 8, 10)
    recorded(folder / "b.parquet", 20, 6)
    recorded(folder / "c.parquet", 12, 4, comm="other")
    return folder


def entries(by: str, *words: str | Path) -> dict[str, Any]:
    found = as_json("top", "-q", *words, f"--by={by}")
    assert not found["more"]["entries"]
    return found


@pytest.mark.parametrize("cache", [(), (f"--cache={NONE}",)], ids=["kept", "none"])
@pytest.mark.parametrize("by", usually(["stack", "process"], ["stack", "launcher", "process", "operator"]))
def test_tables_have_the_sums_of_the_captures_own(fleet: Path, by: str, cache: tuple[str, ...]) -> None:
    # given the tables of each capture, and the profiles of all
    singles = [entries(by, path) for path in sorted(fleet.iterdir())]
    entries(by, fleet, *cache)
    # when they are added up, from what is kept
    found = entries(by, fleet, *cache)
    # then each row has what is divided in the captures
    key = ("process", "stack") if by == "stack" else (by,)
    sums: dict[str, int] = {}
    for single in singles:
        for each in single["entries"]:
            name = repr([each[part] for part in key])
            sums[name] = sums.get(name, 0) + each["divided"]
    assert {repr([each[part] for part in key]): each["divided"] for each in found["entries"]} == sums
    assert found["total"]["divided"] == sum(single["total"]["divided"] for single in singles) == 40


def test_a_table_says_how_much_is_divided_and_marks_rows(fleet: Path) -> None:
    done = iaprof("top", "-q", fleet, "--by=stack")
    assert done.out.startswith(f"66.7 % {SENTENCE}")
    first, *rows, total = [line.split()[0] for line in done.out.splitlines()[3:]]
    assert (first, total) == ("SAMPLES", "60")
    assert rows
    assert all(row.startswith("~") for row in rows)
    # when rows are kernels or processes, which have all of what is divided
    for by in ("kernel", "process"):
        exact = iaprof("top", "-q", fleet, f"--by={by}")
        assert (exact.code, exact.err) == (0, "")
        # then nothing is an estimate
        assert "~" not in exact.out


def test_each_group_says_its_own(fleet: Path) -> None:
    done = iaprof("top", "-q", fleet, "--by=stack", "--group-by=capture")
    assert [re.sub("[^0-9.]", "", line[:6]) for line in done.out.splitlines() if SENTENCE in line] == [
        "76.9", "44.4", "75.0",
    ]  # fmt: skip


def boxes(text: str) -> list[tuple[str, str]]:
    """The mark of each frame of a picture, "" if it has none, and what is said of it."""
    return sorted(re.findall('<g class="k[^>]*?(data-mark="~ ")?><title>([^<]*)', text))


@pytest.mark.parametrize("words", [(), ("--inverted",)], ids=["callers", "leaves"])
def test_a_picture_marks_what_that_of_the_merged_captures_marks(
    fleet: Path, tmp_path: Path, words: tuple[str, ...]
) -> None:
    # given captures whose stacks part in other places, and these as one capture, in which parts stay apart
    recorded(fleet / "d.parquet", 30, 2, deeper=True)
    assert iaprof("merge", *sorted(fleet.iterdir()), "-o", tmp_path / "merged.parquet").code == 0
    frames = "--frames=process,cpu,function,instruction,reason"
    # when each is drawn
    pictures = []
    for captures in (tmp_path / "merged.parquet", fleet):
        assert iaprof("report", captures, "-q", "-o", tmp_path / "f.svg", "--force", frames, *words).code == 0
        pictures.append((tmp_path / "f.svg").read_text())
    # then both say and mark the same
    assert all(f"76.1 % {SENTENCE}" in text for text in pictures)
    assert boxes(pictures[0]) == boxes(pictures[1])
    assert len({mark for mark, _ in boxes(pictures[0])}) == 2


def test_rare_stacks_that_became_one_have_nothing_divided(fleet: Path, tmp_path: Path) -> None:
    done = iaprof("report", fleet, "-q", "-o", tmp_path / "f.svg", "--percent-limit", "95")
    assert done.code == 0
    assert SENTENCE not in (tmp_path / "f.svg").read_text()


def test_the_page_says_it(browser: Browser, fleet: Path, tmp_path: Path) -> None:
    assert iaprof("report", fleet, "-q", "-o", tmp_path / "page.html").code == 0
    with opened(browser, tmp_path / "page.html") as window:
        assert ready(window).locator("#flame .divided").inner_text().startswith(f"66.7 % {SENTENCE}")
        assert sorted(window.evaluate(LABELS, 1)) == ["app 44", "other 16"]
        assert sorted(window.evaluate(LABELS, 2)) == ["main 16", "main 44"]
        assert sorted(window.evaluate(LABELS, 3)) == ["~ load 10", "~ load 30", "~ train 14", "~ train 6"]
