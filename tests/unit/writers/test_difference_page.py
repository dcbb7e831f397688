"""The page of `iaprof diff -o FILE.html`: both captures as one flame graph; tests/unit/report/fleet has its table."""

from __future__ import annotations

from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page

from browser import opened, ready
from iaprof.formats.page.html import write_difference
from iaprof.formats.profile import Code, CodeKind, Kernel, Launch, Origin, Profile
from iaprof.report.views.difference import joined
from thorough import usually
from unit.profiles import Row, counts, profile
from unit.writers.test_html_page import HOSTILE

LESS = "\N{MINUS SIGN}"
MATMUL, SEND = Kernel(4096, "matmul", "matmul.cl"), Code("send", ("matmul",), (10,))
SUMS = {"samples_before": 200, "samples_after": 100, "before": 100.0, "after": 100.0, "change": 0.0, "reasons": {}}
DOCUMENT = {
    "by": "kernel",
    "unit": "percent",
    "entries": [],
    "more": {"entries": 0, **SUMS},
    "total": SUMS,
    "sides": [{"name": "old.parquet", "facts": "200 samples"}, {"name": "new.parquet", "facts": "100 samples"}],
}


def launch(name: str, folder: str) -> Launch:
    return Launch("app", 7, ("main", name), origins=(Origin(CodeKind.C, f"/{folder}/app"),) * 2)


def both_of(names: dict[str, tuple[int, int]]) -> Profile:
    """Two captures whose functions have so many samples before and after; builds are in different folders."""
    sides = [
        profile(
            [
                Row(0, launch(name, folder), MATMUL, SEND, 0, counts(sbid=samples[at]))
                for name, samples in names.items()
                if samples[at]
            ]
        )
        for at, folder in enumerate(("old", "new"))
    ]
    return joined(*sides)


def shown(page: Page) -> dict[str, list[object]]:
    """Frames of the graph below main: samples, colour, what is said of them."""
    found: dict[str, list[object]] = page.evaluate(
        """() => {
             const { flame } = iaprof, { picture } = flame;
             const main = picture.on(picture.on(picture.root)[0])[0];
             return Object.fromEntries(picture.on(main).map((box) =>
               [flame.text(box), [box.value, flame.theme.of(box).fill, flame.about(box)[1]]]));
           }"""
    )
    return found


NAMES = {"same": (40, 20), "more": (20, 30), "less": (100, 38), "gone": (40, 0), "new": (0, 12)}


@pytest.mark.parametrize("unit", ["percent", "samples"])
def test_frames_have_the_colours_of_what_changed(browser: Browser, tmp_path: Path, unit: str) -> None:
    path = tmp_path / "diff.html"
    with path.open("w") as out:
        write_difference({**DOCUMENT, "unit": unit}, out, both_of(NAMES))
    with opened(browser, path, 1400, 900) as page:
        ready(page)
        after = shown(page)
        more, less, plain = ("#b2182b", "#2166ac", "#dcdcd8")
        if unit == "percent":
            assert after == {
                "same": [20, plain, "before 20.0 %, after 20.0 %: 0.0"],
                "more": [30, more, "before 10.0 %, after 30.0 %: +20.0"],
                "less": [38, less, f"before 50.0 %, after 38.0 %: {LESS}12.0"],
                "new": [12, more, "before 0.0 %, after 12.0 %: +12.0"],
            }
        else:
            assert after["same"] == [20, less, f"before 40, after 20: {LESS}20"]
            assert after["more"] == [30, more, "before 20, after 30: +10"]
        page.click("button[value=before]")
        before = shown(page)
        assert {name: found[0] for name, found in before.items()} == {"same": 40, "more": 20, "less": 100, "gone": 40}
        for name in ("same", "more", "less"):
            assert before[name][1:] == after[name][1:]
        assert before["gone"][1] == less
        page.keyboard.press("t")
        page.locator(".call .call-samples").nth(1).wait_for()
        changes = page.locator(".call .call-samples").all_inner_texts()
        assert changes[:2] == (["0.0", "0.0"] if unit == "percent" else [f"{LESS}100"] * 2)


@pytest.mark.parametrize(("width", "dark"), usually([(390, False)], [(1400, True), (390, False)]))
def test_hostile_names_are_text(browser: Browser, tmp_path: Path, width: int, dark: bool) -> None:
    path = tmp_path / "diff.html"
    sides = [{"name": name, "facts": name} for name in HOSTILE[:2]]
    with path.open("w") as out:
        write_difference({**DOCUMENT, "sides": sides}, out, both_of(dict.fromkeys(HOSTILE, (1, 2))))
    with opened(browser, path, width, dark=dark) as page:
        ready(page)
        assert page.evaluate("document.documentElement.scrollWidth") == width
        assert page.evaluate("document.scripts.length") == 1
        assert HOSTILE[0] in page.locator("#flame [data-part=caption]").inner_text() + str(page.text_content("#about"))
        page.keyboard.press("?")
        assert page.locator("#help").is_visible()
