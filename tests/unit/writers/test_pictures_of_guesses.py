"""Pictures mark frames that are guesses where there is room, before the name, and say once what the mark means."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from browser import opened, ready
from iaprof.formats.export import Export
from iaprof.formats.guesses import NOTE, SUFFIX
from iaprof.formats.page.data import short_texts
from iaprof.formats.profile import Code, Kernel, Launch, StackOptions
from iaprof.formats.writers import flame_svg
from iaprof.formats.writers.flame_svg import FlameSvg
from iaprof.report.views.browsing.tree import Tree
from unit.profiles import Row, counts, profile
from unit.writers.test_html_page import written

if TYPE_CHECKING:
    from playwright.sync_api import Browser

KERNEL, SEND = Kernel(4096, "k", "k.cl"), Code("send", ("k",), (1,))
GUESSED = Launch("app", 7, ("main", "solve_[guessed]", "blas"))
KNOWN = Launch("app", 7, ("main", "solve", "blas"))
ROWS = [Row(0, KNOWN, KERNEL, SEND, 0, counts(sbid=1)), Row(0, GUESSED, KERNEL, SEND, 0, counts(sbid=3))]
OPTIONS = StackOptions(components=("process", "cpu", "function"))
LABELS = """depth => {
  const { flame } = iaprof;
  let boxes = [flame.picture.root];
  for (let i = 0; i < depth; i++) boxes = boxes.flatMap((box) => flame.picture.on(box));
  return boxes.map((box) => labelled(flame.text(box), flame.picture, box));
}"""


def test_the_page(browser: Browser, tmp_path: Path) -> None:
    path = written(tmp_path / "page.html", Export(profile(ROWS)))
    with opened(browser, path) as window:
        page = ready(window)
        assert page.evaluate(LABELS, 3) == ["main"]
        assert page.evaluate(LABELS, 4) == ["? solve", "solve"]
        assert page.evaluate(LABELS, 5) == ["blas", "blas"]
        assert page.locator("#notes").inner_text() == NOTE
        # the mark can be searched for
        page.locator("#flame input[type=search]").fill("guessed")
        assert page.locator("#flame .share").inner_text() == "75.0 % matched, 1 name"


@pytest.mark.parametrize("is_first", [True, False])
def test_a_page_without_guesses_says_nothing_of_them(browser: Browser, tmp_path: Path, is_first: bool) -> None:
    path = written(tmp_path / "page.html", Export(profile(ROWS[:1] if is_first else ROWS[1:])))
    with opened(browser, path) as window:
        assert ready(window).locator("#notes").is_hidden() == is_first


def test_the_first_functions_of_a_program_stay_a_group(browser: Browser, tmp_path: Path) -> None:
    launch = Launch("app", 7, ("_start_[guessed]", "main"))
    path = written(tmp_path / "page.html", Export(profile([Row(0, launch, KERNEL, SEND, 0, counts(sbid=1))])))
    with opened(browser, path) as window:
        assert ready(window).locator("#flame button[value=libc]").count() == 1


def test_names_that_are_truncated_keep_their_mark() -> None:
    name = "x" * 1_000_000 + SUFFIX
    assert [text[-12:] for text in short_texts([name] * 1000)] == [f"x…{SUFFIX}"] * 1000
    launch = Launch("app", 7, (name,))
    (title,) = re.findall("<title>(x+.*?) ", svg_of([Row(0, launch, KERNEL, SEND, 0, counts(sbid=1))]))
    assert title == "x" * 1000 + f"..{SUFFIX}"


def svg_of(rows: list[Row]) -> str:
    out = io.StringIO()
    FlameSvg().write(Export(profile(rows)), OPTIONS, out)
    return out.getvalue()


def test_the_svg(browser: Browser, tmp_path: Path) -> None:
    path = tmp_path / "c.svg"
    path.write_text(svg_of(ROWS))
    # whether the script draws the names
    with opened(browser, path) as page:
        texts = page.locator("#frames text").all_text_contents()
        titles = page.locator("#frames title").all_text_contents()
    assert [text for text in texts if "solve" in text] == ["solve", "? solve"]
    assert "solve_[guessed] (C, 3 samples, 75.00 %)" in titles
    # or not
    assert ">? solve</text>" in path.read_text()
    assert f">{NOTE}</text>" in path.read_text()
    assert NOTE not in svg_of(ROWS[:1])


def test_the_svg_of_a_difference() -> None:
    out = io.StringIO()
    both = profile([ROWS[0], Row(1, GUESSED, KERNEL, SEND, 0, counts(sbid=3))], (0.0, 0.0))
    flame_svg.write_difference(both, ("before", "after"), OPTIONS, False, out)
    assert ">? solve</text>" in out.getvalue()
    assert f">{NOTE}</text>" in out.getvalue()


def test_the_interactive_view() -> None:
    tree = Tree(profile(ROWS))
    tree.open_branch(tree.root)
    assert sorted(tree.text(line.node) for line in tree.visible())[-2:] == ["solve", "solve_[guessed]"]
