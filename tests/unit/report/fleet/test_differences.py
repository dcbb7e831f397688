"""Differences as files: of two captures, and of two sets."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from playwright.sync_api import Browser
from pyarrow import csv

from browser import opened, ready
from thorough import thorough, usually
from unit.in_process import iaprof
from unit.report.fleet.conftest import Here
from unit.report.fleet.fleets import SAMPLES, as_json, copied

pytestmark = pytest.mark.usefixtures("here")


@pytest.fixture
def sets(tmp_path: Path, kept: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Two sets of captures."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(kept))
    for number in range(3):
        copied(SAMPLES[-1], tmp_path / "old" / f"{number}.parquet", f"h{number}")
        copied(SAMPLES[0], tmp_path / "new" / f"{number}.parquet", f"h{number}")
    return [tmp_path / "old", tmp_path / "new"]


@pytest.mark.parametrize(
    ("kind", "by"),
    usually([("sets", "stack")], [(kind, by) for kind in ("sets", "captures") for by in ("kernel", "stack")]),
)
def test_differences_are_files(sets: list[Path], tmp_path: Path, kind: str, by: str) -> None:
    both = sets if kind == "sets" else [SAMPLES[-1], SAMPLES[0]]
    words: list[str | Path] = ["diff", "-q", *both, f"--by={by}"]
    document = as_json(*words, "-n0")
    for extension in ("json", "csv", "parquet"):
        done = iaprof(*words, "-n0", "-o", tmp_path / f"out.{extension}")
        assert (done.code, done.out) == (0, ""), done.err
    assert json.loads((tmp_path / "out.json").read_text()) == document
    for table in (csv.read_csv(tmp_path / "out.csv"), pq.read_table(tmp_path / "out.parquet")):
        assert table["change"].to_pylist() == pytest.approx([each["change"] for each in document["entries"]])
        assert table["change_sbid"].to_pylist() == pytest.approx(
            [each["reasons"]["sbid"] for each in document["entries"]]
        )
        assert ("by_chance" in table.column_names) == (kind == "sets")
    again = iaprof(*words, "-o", tmp_path / "out.csv")
    assert (again.code, "exists" in again.err) == (1, True)


@thorough
def test_chances_do_not_depend_on_the_order_in_which_workers_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    formats = {int(path.stem.removeprefix("format-")): path for path in SAMPLES}
    for number, (before, after) in enumerate(zip((9, 8, 7, 6), (1, 10, 11, 2), strict=True)):  # not all are alike
        copied(formats[before], tmp_path / "old" / f"{number}.parquet", f"h{number}")
        copied(formats[after], tmp_path / "new" / f"{number}.parquet", f"h{number}")
    words: list[str | Path] = ["diff", "-q", tmp_path / "old", tmp_path / "new", "-n0", "--by=kernel"]
    found = as_json(*words)
    assert all(0 < each["by_chance"] < 1 for each in found["entries"])
    in_order = Here.answers
    monkeypatch.setattr(Here, "answers", lambda self, tasks: reversed(list(in_order(self, tasks))))
    assert as_json(*words) == found


@pytest.mark.parametrize(("width", "dark"), [(1400, False), (800, True), (390, True)])
def test_a_difference_is_a_page(sets: list[Path], tmp_path: Path, browser: Browser, width: int, dark: bool) -> None:
    document = as_json("diff", "-q", *sets, "-n500")
    done = iaprof("diff", *sets, "-o", tmp_path / "diff.html")
    assert (done.code, done.out) == (0, ""), done.err
    assert (tmp_path / "diff.html").stat().st_size < 100_000
    with opened(browser, tmp_path / "diff.html", width, dark=dark) as shown:
        ready(shown)
        assert shown.evaluate("document.documentElement.scrollWidth") == width
        names = shown.locator("tbody .difference-name span").all_text_contents()
        assert names == [*(each["kernel"] for each in document["entries"]), "(total)"]
        shown.fill("[data-part=filter]", document["entries"][1]["kernel"].upper())
        found = shown.locator("tbody .difference-name span").all_text_contents()
        assert document["entries"][1]["kernel"] in found and "(total)" not in found
        shown.fill("[data-part=filter]", "")
        shown.click("th.difference-name button")
        names = shown.locator("tbody .difference-name span").all_text_contents()[:-1]
        assert names == sorted(names)
        text = shown.text_content("#about")
        assert all(str(each) in str(text) for each in sets)


def test_names_are_text_only(tmp_path: Path, browser: Browser) -> None:
    """In a page, whatever strangers called their kernels."""
    from iaprof.formats.page.html import write_difference

    sums = {
        "samples_before": 1,
        "samples_after": 2,
        "before": 1.0,
        "after": 2.0,
        "change": 1.0,
        "reasons": {"sbid": 1.0},
    }
    entry = {"process": "<i>p", "stack": ["<script>alert(1)</script>", "b\x1b"], "state": "new", **sums}
    hostile = {
        "by": "stack",
        "unit": "samples",
        "entries": [entry],
        "more": {"entries": 3, **sums},
        "total": sums,
        "sides": [{"name": "</title><b>", "facts": "<b>"}, {"name": "y", "facts": ""}],
    }
    with (tmp_path / "page.html").open("w") as file:
        write_difference(hostile, file)
    with opened(browser, tmp_path / "page.html") as shown:
        ready(shown)
        names = shown.locator("tbody .difference-name span").all_text_contents()
        assert names == ["<script>alert(1)</script>\nb\\x1b\n<i>p", "(3 more)", "(total)"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["-o", "{tmp}/x.txt"], "does not determine the format"),
        (["-o", "{tmp}/x.html", "--json"], "contradict each other"),
        (["-o", "{tmp}/x.folded"], "folded is for two captures"),
        (["-o", "{tmp}/old/0.parquet", "--force"], "is the input"),
    ],
)
def test_what_contradicts_itself_is_one_sentence(sets: list[Path], tmp_path: Path, words: list[str], said: str) -> None:
    done = iaprof("diff", *sets, *(word.format(tmp=tmp_path) for word in words))
    assert done.code in (1, 2)
    assert said in done.err and done.out == ""
