"""The page of time lines, in a browser."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page

from browser import opened, ready
from unit.cli.test_timeline_command import SAMPLE
from unit.in_process import iaprof

HOSTILE = "</script><script>document.title='run'</script>\u202e ${title} <img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two ranks with five passes of five kernels, the third slow on rank 1; kernels and hosts with hostile names."""
    folder = tmp_path_factory.mktemp("page")
    events: list[dict[str, Any]] = []
    for rank in (0, 1):
        time = 1000.0
        events.append({"ph": "X", "name": HOSTILE, "pid": rank, "tid": 9, "ts": time, "dur": 900})
        for number, letter in enumerate("abcde" * 5):
            length = 60 if (number, rank) == (12, 1) else 20
            counters = {
                f"TS{n}": str(int(1000 * t)) for n, t in enumerate((time, time, time, time + length, time + length), 1)
            }
            name = f"{HOSTILE} {letter} Cmpt Exec"
            events.append({"ph": "X", "name": name, "pid": rank, "tid": 1, "ts": time, "dur": length, "args": counters})
            time += length + 5
    source = folder / "<b>run.json"
    source.write_text(json.dumps(events))
    assert iaprof("import", source, "-o", folder / "run.parquet").code == 0
    assert iaprof("report", folder / "run.parquet", "-o", folder / "page.html", "-q").code == 0
    return folder / "page.html"


@pytest.fixture
def page(browser: Browser, file: Path) -> Iterator[Page]:
    with opened(browser, file) as made:
        ready(made)
        yield made


def headings(page: Page) -> list[str]:
    return page.locator("h2:visible").all_text_contents()


def test_it_has_pictures_and_tables(page: Page) -> None:
    assert page.locator("h1").text_content() == "<b>run.json"
    found = headings(page)
    assert found[:3] == ["Busy time", "Slices over time", "Iterations"]
    assert {"Ranks", "Kernels", "Kernels by cycles"} <= set(found)
    assert page.locator("#subtitle").text_content() == "2 ranks  ·  900 us"
    # kernels, and the host's slice, of each rank
    assert page.evaluate("iaprof.tracks.data.rows") == [
        [0, True, 0, 1100, 0], [0, False, 1000, 1000, 0], [1, True, 1, 1100, 0], [1, False, 1001, 1000, 0],
    ]  # fmt: skip
    assert page.evaluate("[...iaprof.tracks.data.arrays.slices].reduce((a, b) => a + b)") == 52


def test_names_are_texts_and_nothing_else(page: Page) -> None:
    assert page.title() == "<b>run.json"
    assert page.locator("img").count() == 0
    clean = HOSTILE.replace("\u202e", "\\u202e")
    cell = page.locator("section", has=page.get_by_role("heading", name="Kernels", exact=True)).locator("td").nth(1)
    assert cell.text_content() == f"{clean} c Cmpt Exec"  # which took longest


def test_the_slowest_iteration_is_named(page: Page) -> None:
    run = page.locator(".run", has_text="rank 1")
    # 125, 125, 165 and 125 us are 135 in the mean, and the kernel's 20, 20, 60 and 20 us are 30
    assert "mean 135 us" in run.inner_text()
    assert "slowest: number 2, +30 us" in run.inner_text()
    assert run.locator(".run-slowest").count() == 1


def test_a_range_of_the_heat_map_is_shown_below(page: Page) -> None:
    box = page.locator("#busy canvas").bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + 300, box["y"] + 10)
    page.mouse.down()
    page.mouse.move(box["x"] + 500, box["y"] + 10)
    page.mouse.up()
    begin, end, left, width = page.evaluate("[iaprof.view.begin, iaprof.view.end, iaprof.busy.left, iaprof.busy.width]")
    assert begin == pytest.approx((300 - left) / width * 900_000, abs=2300)
    assert end == pytest.approx((500 - left) / width * 900_000, abs=2300)
    page.keyboard.press("Escape")
    assert page.evaluate("iaprof.view.whole")


def test_keys_move_zoom_and_leave(page: Page) -> None:
    page.locator("#tracks [data-part=canvas]").focus()
    page.keyboard.press("+")
    assert page.evaluate("[iaprof.view.begin, iaprof.view.end]") == [225_000, 675_000]
    page.keyboard.press("ArrowRight")
    assert page.evaluate("[iaprof.view.begin, iaprof.view.end]") == [315_000, 765_000]
    page.keyboard.press("-")
    assert page.evaluate("iaprof.view.whole")
    page.locator("#busy canvas").focus()
    for key in ("ArrowDown", "ArrowRight", "Enter", "ArrowRight", "Enter"):
        page.keyboard.press(key)
    assert page.evaluate("[iaprof.view.begin, iaprof.view.end]") == [2250, 6750]
    page.keyboard.press("Escape")
    assert page.evaluate("iaprof.view.whole")


def test_a_slice_under_the_pointer_is_named(page: Page) -> None:
    box = page.locator("#tracks [data-part=canvas]").bounding_box()
    assert box is not None
    left, width = page.evaluate("[iaprof.tracks.left, iaprof.tracks.width]")
    page.mouse.move(box["x"] + left + width * 10 / 900, box["y"] + 5)
    tip = page.locator("#tracks .tip")
    assert "a Cmpt Exec" in tip.inner_text()
    assert "at 0 us, 20 us" in tip.inner_text()


def test_narrow_dark_and_without_iterations(browser: Browser, tmp_path: Path) -> None:
    assert iaprof("timeline", *SAMPLE, "-o", tmp_path / "out", "--html", "-q").code == 0
    with opened(browser, tmp_path / "out" / "page.html", width=400, dark=True) as page:
        ready(page)
        assert page.evaluate("document.documentElement.scrollWidth") <= 400
        found = headings(page)
        assert "Categories" in found
        assert "Iterations" not in found
        assert page.locator(".about-warnings li").count() >= 1
        page.locator("#theme").click()
        assert page.evaluate("document.documentElement.dataset.theme") == "light"


def test_energy_where_power_is_known(browser: Browser, file: Path, tmp_path: Path) -> None:
    events = []
    for number, charge in enumerate((0, 200_000, 300_000, 500_000)):
        ts = 1000 + 100 * number
        counters = {f"TS{n}": 1000 * each for n, each in enumerate((ts, ts, ts, ts + 60, ts + 60), 1)}
        events.append({"ph": "X", "name": "k Cmpt Exec", "pid": 0, "tid": 1, "ts": ts, "dur": 60,
                       "args": {**counters, "Power": charge + 1}})  # fmt: skip
    (tmp_path / "run.json").write_text(json.dumps(events))
    assert iaprof("timeline", tmp_path / "run.json", "-o", tmp_path / "out", "--html", "-q").code == 0
    with opened(browser, tmp_path / "out" / "page.html") as made:
        ready(made)
        assert "Energy" in headings(made)
        assert "[idle]" in made.locator("body").inner_text()
        table = made.locator("section", has=made.get_by_role("heading", name="Energy", exact=True))
        whole = table.inner_text()
        made.evaluate("iaprof.view.show(0, 180000)")
        # 46.875 W from 60 to 160 us, in the last 60 us of which the kernel ran, then 23.4375 W
        rows = [made.locator("td").all_inner_texts() for made in table.locator("tbody tr").all()]
        assert [(row[1], row[3]) for row in rows] == [("k Cmpt Exec", "2,812.5"), ("[idle]", "2,343.75")]
        assert "from 0 us to 180 us" in table.inner_text()
        made.keyboard.press("Escape")
        assert table.inner_text() == whole
    with opened(browser, file) as made:
        ready(made)
        assert "Energy" not in headings(made)
