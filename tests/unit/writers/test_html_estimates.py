"""The page says which samples are active and which are divided among stacks, and leaves active ones out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest

from browser import opened, ready
from iaprof.formats.export import About, Export
from iaprof.formats.profile import Code, Kernel, Launch
from unit.profiles import Row, counts, profile
from unit.writers.test_html_page import written

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

K, L = Kernel(4096, "both", "k.cl"), Kernel(8192, "own", "k.cl")
SEND, OWN = Code("send", ("both",), (1,)), Code("send", ("own",), (2,))
F, G = (Launch("app", 7, ("main", name, "launch")) for name in "fg")
ROWS = [
    Row(0, F, K, SEND, 0, counts(sbid=6, active=2)),
    Row(0, F, L, OWN, 0, counts(send=8)),
    Row(1, G, K, SEND, 0, counts(sbid=4)),
]
LABELS = """depth => {
  const { flame } = iaprof;
  let boxes = [flame.picture.root];
  for (let i = 0; i < depth; i++) boxes = boxes.flatMap((box) => flame.picture.on(box));
  return boxes.map((box) => `${labelled(flame.text(box), flame.picture, box)} ${box.value}`);
}"""


@pytest.fixture(scope="module")
def page(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    made = replace(profile(ROWS, (0.0, 0.5)), divided=np.array([8, 0, 4], np.uint64))
    path = written(tmp_path_factory.mktemp("page") / "page.html", Export(made, About(seconds=1.0), 0.5))
    with opened(browser, path) as window:
        yield ready(window)


def test_it_says_what_is_active_and_divided_and_why(page: Page) -> None:
    said = page.locator("#flame [data-part=caption]").inner_text()
    assert said.startswith("What the GPU's threads did, whole recording: 20 samples, 10.0 % active.")
    divided = page.locator("#flame .divided")
    assert divided.inner_text().startswith("60.0 % of the samples are divided among stacks")
    assert "in proportion to their launches" not in divided.inner_text()
    divided.locator("summary").click()
    assert "in proportion to their launches" in divided.inner_text()


def test_frames_from_where_the_stacks_part_are_marked(page: Page) -> None:
    assert page.evaluate(LABELS, 3) == ["main 20"]
    assert page.evaluate(LABELS, 4) == ["~ f 16", "~ g 4"]
    assert page.evaluate(LABELS, 6) == ["~ k.cl 16", "~ k.cl 4"]
    assert sorted(page.evaluate(LABELS, 7)) == ["own 8", "~ both 4", "~ both 8"]


def test_with_the_leaves_first_gpu_code_and_what_all_share_is_certain(page: Page) -> None:
    page.get_by_text("Leaves first").click()
    assert sorted(page.evaluate(LABELS, 1)) == ["active 2", "stall: sbid 10", "stall: send 8"]
    assert "launch 10" in page.evaluate(LABELS, 5)
    assert {"~ f 6", "~ g 4"} <= set(page.evaluate(LABELS, 6))
    page.get_by_text("Callers first").click()


def test_active_samples_are_left_out_everywhere_and_come_back(page: Page) -> None:
    switch = page.get_by_label("Active samples")
    switch.uncheck()
    said = page.locator("#flame [data-part=caption]").inner_text()
    assert said.startswith("Where the GPU's threads waited, whole recording: 18 samples.")
    assert "18 samples" in page.locator(".kernels-state").inner_text()
    assert page.evaluate("iaprof.model.stallsPerInterval.reduce((sum, each) => sum + each)") == 18
    switch.check()
    assert "20 samples, 10.0 % active" in page.locator("#flame [data-part=caption]").inner_text()
