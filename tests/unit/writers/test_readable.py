"""Pages at three widths, light and dark: nothing is cut off, names can be told apart, and texts have contrast."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from playwright.sync_api import Browser, Page

from browser import opened, ready
from iaprof.formats.export import Export
from iaprof.formats.page.html import write_difference
from iaprof.formats.profile import Kernel
from thorough import usually
from unit.profiles import Row, counts, profile
from unit.writers.test_difference_page import DOCUMENT, NAMES, both_of
from unit.writers.test_html_page import ABOUT, INTERVALS, SEND, TRAIN, written

SCREENS = [(width, dark) for width in (1400, 800, 390) for dark in (False, True)]
KERNELS = ["multiply_local_access", "multiply_local_access_and_tiling", "attention_scores"]
CONTRAST = 4.5  # of texts, WCAG 2.2, 1.4.3
TEXTS_WITHOUT_CONTRAST = """(least) => {
  const parts = (colour) => colour.match(/[\\d.]+/g).map(Number);
  const light = (rgb) => {
    const linear = (share) => (share <= 0.04045 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4);
    const [r, g, b] = rgb.map((part) => linear(part / 255));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (element) => {
    const [r, g, b, alpha = 1] = parts(getComputedStyle(element).backgroundColor);
    if (alpha === 1 || !element.parentElement) return [r, g, b];
    const under = behind(element.parentElement);
    return [r, g, b].map((part, at) => alpha * part + (1 - alpha) * under[at]);
  };
  const ratio = (one, other) => {
    const [low, high] = [light(one), light(other)].sort((a, b) => a - b);
    return (high + 0.05) / (low + 0.05);
  };
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT), found = new Set();
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement, style = getComputedStyle(element);
    if (!walker.currentNode.data.trim() || !element.checkVisibility()) continue;
    if (element.closest(":disabled, svg, script, style")) continue;
    const contrast = ratio(parts(style.color).slice(0, 3), behind(element));
    if (contrast < least) found.add(`${element.className || element.localName}: ${contrast.toFixed(2)}`);
  }
  return [...found];
}"""
CUT_OFF = """() => [...document.querySelectorAll("main section *, header *")].filter((element) => {
  const box = element.getBoundingClientRect();
  return element.checkVisibility() && box.width && box.right > innerWidth + 0.5;
}).map((element) => element.className || element.localName)"""


@pytest.fixture(scope="module")
def stalls(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page whose table of kernels has all columns."""
    rows = [Row(0, TRAIN, Kernel(4096 * at, name, "/src/matmul.cl"), SEND, 16, counts(sbid=at, active=1))
            for at, name in enumerate(KERNELS, 1)]  # fmt: skip
    found = profile(rows, INTERVALS)
    found = replace(found, energy=np.full(len(found.counts), 10**12))
    return written(tmp_path_factory.mktemp("stalls") / "page.html", Export(found, ABOUT, 0.02))


@pytest.fixture(scope="module")
def difference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("difference") / "page.html"
    entries = [
        {"kernel": name, "file": "/src/matmul.cl", "state": "changed", "samples_before": 9, "samples_after": 7,
         "before": 50.0, "after": 40.0, "change": -10.0, "reasons": {"sbid": -10.0}}
        for name in KERNELS
    ]  # fmt: skip
    with path.open("w") as out:
        write_difference({**DOCUMENT, "entries": entries}, out, both_of(NAMES))
    return path


def readable(page: Page, width: int) -> None:
    assert page.evaluate("document.documentElement.scrollWidth") == width
    assert page.evaluate(CUT_OFF) == []
    assert page.evaluate(TEXTS_WITHOUT_CONTRAST, CONTRAST) == []


@pytest.mark.parametrize(("width", "dark"), SCREENS)
def test_a_page_of_stalls_can_be_read(browser: Browser, stalls: Path, width: int, dark: bool) -> None:
    with opened(browser, stalls, width, dark=dark) as page:
        ready(page)
        assert page.locator("th.kernels-joules").is_visible()
        readable(page, width)
        # names of kernels that begin alike are whole
        for name in page.locator(".kernels-name button").all():
            assert name.evaluate("(element) => element.scrollWidth <= element.clientWidth")
            assert name.evaluate("(element) => element.scrollHeight <= element.clientHeight")
        page.keyboard.press("t")
        page.locator(".call").first.wait_for()
        readable(page, width)


@pytest.mark.parametrize(("width", "dark"), usually(SCREENS[::3], SCREENS))
def test_a_page_of_differences_can_be_read(browser: Browser, difference: Path, width: int, dark: bool) -> None:
    with opened(browser, difference, width, dark=dark) as page:
        ready(page)
        readable(page, width)
        page.keyboard.press("t")
        # the tree tells by how much each function changed, on a telephone, too
        change = page.locator(".call .call-samples").first
        change.wait_for()
        readable(page, width)
        assert change.evaluate("(element) => element.scrollWidth <= element.clientWidth")
