"""The page's panels: sums, bounds, and behaviour in a browser."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from playwright.sync_api import Browser, Page

from browser import opened, ready
from iaprof.cli.main import main
from iaprof.formats.export import About, Export, Launches, Series, Thread
from iaprof.formats.page.html import HtmlPage
from iaprof.formats.page.panels import panels, spread
from iaprof.formats.profile import Code, Kernel, Launch, Profile, StackOptions
from iaprof.gpu.intel.reasons import REASONS
from iaprof.report.facts import Facts, Report
from iaprof.report.gpu.module import GpuKernel
from iaprof.report.gpu.source_files import SourceFiles
from iaprof.report.views import annotation as module
from iaprof.report.views.annotation import hot_listings
from unit.profiles import Row, counts, profile
from unit.report.gpu import test_annotate
from unit.report.gpu.test_annotate import PROFILE, by_hand
from unit.zebins import FOLDER

recorded = test_annotate.recorded
APP, OTHER = Launch("app", 7, ("main",)), Launch("app", 8, ("main",))
MIXED = '<script>alert(1)</script>"\u202e]]></style>'
CLEAN = '<script>alert(1)</script>"\\u202e]]></style>'
NO_CODE = Code("[no binary]", ("[unknown kernel]",), (0,))


def made_of(*kernels: str, launched: dict[int, int] | None = None) -> Profile:
    """Kernels with a row each and descending numbers of samples."""
    rows = [
        Row(0, APP, Kernel(64 * at, name, ""), Code("mov", (name,), (0,)), 0, counts(sbid=len(kernels) - at))
        for at, name in enumerate(kernels)
    ]
    return replace(profile(rows), launch_counts=launched or {})


def series(values: Any, name: str = "frequency-actual-MHz", step: float = 0.01) -> Series:
    return Series(name, "card0", (np.arange(len(values)) * step).astype(np.float64), np.array(values, np.float64))


def launches(runs: list[tuple[int, float, float, int]], names: list[str]) -> Launches:
    kernel, begin, end, count = (np.array(column) for column in zip(*runs, strict=True))
    return Launches(names, [Thread("app", 7, 7)], kernel, kernel * 0, begin, end, count)


def test_kernels_by_name() -> None:
    rows = [
        Row(0, APP, Kernel(64, "dot", ""), Code("mov", ("dot",), (0,)), 0, counts(sbid=3, active=1)),
        Row(1, OTHER, Kernel(128, "dot", "/dot\n.cl"), Code("mov", ("dot",), (0,)), 0, counts(sbid=2)),
        Row(1, None, Kernel(192, MIXED, ""), Code("mov", (MIXED,), (0,)), 0, counts(tdr=40)),
        Row(1, APP, None, NO_CODE, 5, counts(other=7)),
        Row(1, None, None, Code("", ("[ambiguous]",), (0,)), 5, counts(other=1)),
    ]
    found = panels(Export(replace(profile(rows, (0.0, 1.0)), launch_counts={0: 5, 1: 6})))["kernels"]
    assert found == {
        "rows": [
            {"name": CLEAN, "file": "", "counts": counts(tdr=40), "launches": 0, "processes": 0, "listings": []},
            {"name": "[unknown kernel]", "file": "", "counts": counts(other=7), "launches": 0, "processes": 1,
             "listings": []},
            {"name": "dot", "file": "/dot\\x0a.cl", "counts": counts(sbid=5, active=1), "launches": 11, "processes": 2,
             "listings": []},
            {"name": "[ambiguous]", "file": "", "counts": counts(other=1), "launches": 0, "processes": 0,
             "listings": []},
        ],
        "others": {"kernels": 0, "counts": counts()},
        "samples": 54,
    }  # fmt: skip


def test_kernels_beyond_the_maximum_share_a_row() -> None:
    names = [f"kernel {number}" for number in range(620)]
    found = panels(Export(made_of(*names)))["kernels"]
    assert [row["name"] for row in found["rows"]] == names[:500]
    assert found["others"] == {"kernels": 120, "counts": counts(sbid=sum(range(121)))}
    assert found["samples"] == sum(range(621)) == sum(sum(row["counts"]) for row in found["rows"]) + 7260
    assert {row["launches"] for row in found["rows"]} == {None}  # unknown


def test_an_empty_export() -> None:
    found = panels(Export(profile([])))
    assert found["kernels"] == {"rows": [], "others": {"kernels": 0, "counts": counts()}, "samples": 0}
    assert (found["series"], found["launches"], found["listings"], found["seconds"]) == ([], None, [], 0.0)


def test_texts_about_the_capture_are_clean() -> None:
    about = About("h\n", MIXED, "g", 5.0, 7.0, [("Group", [("name\x1b", MIXED)])], [MIXED], [MIXED])
    found = panels(Export(profile([]), about))["about"]
    assert found == {
        "title": f"{CLEAN} · g · h\\x0a", "host": "h\\x0a", "command": CLEAN, "gpus": "g", "begun": 5.0, "seconds": 7.0,
        "facts": [{"heading": "Group", "facts": [["name\\x1b", CLEAN]]}], "headline": [CLEAN], "warnings": [CLEAN],
    }  # fmt: skip


def test_a_short_series_keeps_its_values() -> None:
    (found,) = panels(Export(profile([]), series=[series([400, float("nan"), 2400.123456789, float("inf"), 800])]))[
        "series"
    ]
    assert found == {
        "name": "frequency actual", "unit": "MHz", "place": "card0", "low": 400.0, "high": 2400.123456789,
        "mean": pytest.approx(1200.041152), "values": 3, "x": [0.0, 0.02, 0.04], "y": [400.0, 2400.12, 800.0],
    }  # fmt: skip


def test_a_long_series_keeps_its_peaks() -> None:
    values = np.random.default_rng(1).normal(1000, 1, 100_000)
    values[[5, 77_777, 99_999]] = 5_000, -3_000, 9_000
    (found,) = panels(Export(profile([]), series=[series(values)]))["series"]
    assert len(found["x"]) == len(found["y"]) == 2_000
    assert found["x"] == sorted(found["x"])
    points = dict(zip(found["x"], found["y"], strict=True))
    assert (points[0.05], points[777.77], points[999.99]) == (5_000, -3_000, 9_000)
    assert set(found["y"]) <= {float(f"{value:.6g}") for value in values.tolist()}


def test_series_are_bounded() -> None:
    many = [series([number], f"power-{number}-W") for number in range(80)] + [series([])]
    assert [each["name"] for each in panels(Export(profile([]), series=many))["series"]] == [
        f"power {number}" for number in range(64)
    ]
    assert panels(Export(profile([]), series=[series([float("nan")])]))["series"] == []


def test_launches_of_the_busiest_kernels_and_the_others() -> None:
    names = [f"kernel {number}" for number in range(12)]
    runs = [(number, 0.1 * number, 0.1 * number + 0.7, 100 * (12 - number)) for number in range(12)]
    found = panels(Export(profile([]), About(seconds=2.0), launches=launches(runs, names)))["launches"]
    assert [(row["name"], row["other"], sum(row["counts"])) for row in found["rows"]] == [
        *((f"kernel {number}", False, 100 * (12 - number)) for number in range(8)),
        ("4 others", True, 400 + 300 + 200 + 100),
    ]
    assert (found["step"], found["launches"]) == (2.0 / 400, 100 * sum(range(13)))
    first = found["rows"][0]["counts"]
    assert (min(first[:139]), max(first[:139]), sum(first[141:])) == (8, 9, 0)  # 1,200 in 0.7 s: 140 of 400 spans


def test_waits_by_function_are_spread_over_time() -> None:
    runs = [(0, 0.0, 0.5, 1), (1, 1.0, 1.25, 2), (0, 1.0, 1.5, 1)]
    found = panels(Export(profile([]), About(seconds=2.0), waits=launches(runs, ["zeA", "zeB"])))["waits"]
    assert [(row["name"], sum(row["us"])) for row in found["rows"]] == [("zeA", 1_000_000), ("zeB", 250_000)]
    assert found["step"] == 2.0 / 400
    first = found["rows"][0]["us"]
    # in each span of 5 ms, one thread waits all the time, or none does
    assert (set(first[:100]), set(first[100:200]), set(first[200:300]), set(first[300:])) == ({5000}, {0}, {5000}, {0})
    assert panels(Export(profile([])))["waits"] is None


@given(st.integers(0, 1 << 32), st.integers(1, 40), st.integers(1, 30))
@settings(max_examples=30, deadline=None)
def test_spread_launches_add_up(seed: int, runs: int, spans: int) -> None:
    rng = random.Random(seed)
    begin = np.array([rng.uniform(-1, 11) for _ in range(runs)])
    end = begin + np.array([rng.choice([0.0, rng.uniform(0, 5)]) for _ in range(runs)])
    count = np.array([rng.randrange(1, 1_000_000) for _ in range(runs)])
    edges = np.linspace(0, 10, spans + 1)
    found = spread(begin, end, count, edges)
    assert found.sum() == count.sum()
    for span, (first, last) in enumerate(pairwise(edges)):
        expected = 0.0
        for a, b, n in zip(begin.clip(0, 10), end.clip(0, 10), count, strict=True):
            if b > a:
                expected += n * max(min(b, last) - max(a, first), 0) / (b - a)
            elif first <= a < last or (a == 10 and last == 10):
                expected += n
        assert abs(found[span] - expected) <= spans + 1


def listings_of(binaries: list[GpuKernel | None], found: Profile, sources: SourceFiles | None = None) -> Any:
    return hot_listings(Report(found, Facts(), {}, binaries), sources or SourceFiles(()))


def test_the_page_has_the_listings_of_annotate(tmp_path: Path) -> None:
    (tmp_path / "vec.h").write_text("dot();\x1b\n")
    found = listings_of([by_hand(), by_hand(), None], PROFILE, SourceFiles([tmp_path]))
    assert [(each["kernel"], each["samples"], each["left_out"]) for each in found] == [
        ("matmul", 12_783, 0), ("dot(float*)", 217, 0)
    ]  # fmt: skip
    page = panels(Export(PROFILE, listings=found))
    assert [row["listings"] for row in page["kernels"]["rows"]] == [[0], [1]]
    matmul = page["listings"][0]
    assert matmul["places"] == [
        {"functions": ["matmul"], "file": "/build/src/matmul.cl", "line": 3, "source": None},
        {"functions": ["matmul", "dot(float)"], "file": "/build/src/vec.h", "line": 1, "source": "dot();\\x1b"},
    ]
    offset, text, reasons, waits, place = matmul["rows"][2]
    assert (offset, text.split(), place) == (0x20, ["sync.nop", "null", "{Compacted,$2.dst}"], 1)
    assert (reasons, waits) == ([[REASONS.index("sync"), 12_000]], [["$2.dst", [0x10]]])
    assert sum(count for row in matmul["rows"] for _, count in row[2]) == matmul["samples"] == 12_783


def test_a_long_kernel_keeps_what_is_hot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MAX_ROWS", 4)
    monkeypatch.setattr(module, "_CONTEXT_ROWS", 0)
    found = listings_of([by_hand(), by_hand(), None], PROFILE)
    # The hottest, its source operand's instruction, and the next hottest; two offsets lie beyond the code.
    assert [row["offset"] for row in found[0]["instructions"]] == [0x10, 0x20, 0x28]
    assert found[0]["left_out"] == 2
    (listing, *_) = panels(Export(PROFILE, listings=found))["listings"]
    assert (listing["leftOut"], listing["simd"]) == (2, 16)


def test_listings_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"kernel {number:03}" for number in range(60)]
    assert [each["kernel"] for each in listings_of([], made_of(*names))] == names[:50]
    monkeypatch.setattr(module, "_MAX_BYTES", 5_000)
    kept = [each["kernel"] for each in listings_of([], made_of("x" * 9_000, *names))]
    assert kept == names[: len(kept)]  # only the long name does not fit
    assert 10 < len(kept) < 25


# In a browser.

SECONDS = 4.0
INTERVALS = 200


def everything() -> Export:
    """Four seconds with two alternating kernels, a small one, and one without a name."""
    turns = [PROFILE.kernels[0], PROFILE.kernels[2], Kernel(0x7000, MIXED, "/a/<b>.cl")]
    rows = []
    for interval in range(INTERVALS):
        kernel = turns[(interval // 50) % 2]
        assert kernel is not None
        code = Code("sync", (kernel.symbol,), (3,))
        rows.append(
            Row(interval, APP, kernel, code, 0x20, counts(sync=(40, 30)[(interval // 50) % 2], active=interval % 5))
        )
    hostile = turns[2]
    assert hostile is not None
    rows.append(Row(120, OTHER, hostile, Code("mov", (MIXED,), (1,)), 0, counts(send=9)))
    found = replace(profile(rows, [0.02 * n for n in range(INTERVALS)]), launch_counts={0: 40, 1: 2})
    times = np.arange(40) / 10
    return Export(
        found,
        About("node1", f"./train {MIXED}", "Battlemage", 1.8e9, SECONDS,
              [("Recording", [("host", "node1"), ("command", MIXED)]), ("Lost", [("", "nothing")])],
              [f"lost while recording: half of {MIXED}"]),
        0.02,
        series=[Series("frequency-actual-MHz", "", times, times * 500 + 400),
                Series("cpu-percent", MIXED, times, times), Series("cpu-percent", "other", times, times / 2),
                Series("busy-copy-percent", "", times, times * 0)],
        launches=launches([(0, 0.0, 1.0, 700), (1, 1.0, 2.0, 300)], ["matmul", MIXED]),
        listings=hot_listings(Report(PROFILE, Facts(), {}, [by_hand(), by_hand(), None]), SourceFiles(())),
    )  # fmt: skip


@pytest.fixture(scope="module")
def page_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "page.html"
    with path.open("w", encoding="utf-8") as out:
        HtmlPage().write(everything(), StackOptions(), out)
    return path


@pytest.fixture(scope="module")
def wide(browser: Browser, page_path: Path) -> Iterator[Page]:
    with opened(browser, page_path) as page:
        ready(page)
        yield page


@pytest.fixture
def page(wide: Page) -> Page:
    """The page as it opens."""
    wide.evaluate("iaprof.model.select(null); iaprof.model.selectKernel(null)")
    wide.fill(".kernels-filter", "")
    while wide.locator("th.kernels-samples").get_attribute("aria-sort") != "descending":
        wide.click("th.kernels-samples button")
    return wide


def table(page: Page) -> list[tuple[str, str]]:
    names = page.locator("tbody .kernels-name button").all_inner_texts()
    return list(zip(names, page.locator("tbody .kernels-samples").all_inner_texts(), strict=True))


def samples(begin: int, end: int, first: int) -> int:
    """Values of the first or second kernel, in some intervals."""
    return sum((40, 30)[first] + number % 5 for number in range(begin, end) if (number // 50) % 2 == first)


def test_the_page_shows_what_was_recorded_and_lost(page: Page) -> None:
    assert page.locator(".about-warnings li").all_inner_texts() == [f"lost while recording: half of {CLEAN}"]
    assert page.locator(".about-group dd").all_inner_texts()[:3] == ["node1", CLEAN, "nothing"]
    # The warnings are above all sections.
    assert page.evaluate("document.querySelector('.about-warnings').getBoundingClientRect().bottom") <= page.evaluate(
        "document.querySelector('main section:not([hidden])').getBoundingClientRect().top"
    )


def test_the_table_of_kernels(page: Page) -> None:
    whole = [("matmul", f"{samples(0, 200, 0):,}"), ("dot(float*)", f"{samples(0, 200, 1):,}"), (CLEAN, "9")]
    assert table(page) == whole
    assert page.locator("thead th").nth(4).inner_text() == "Top reason"
    assert page.locator("tbody tr").nth(0).inner_text().split("\t")[-3:] == ["sync 95.2 %", "40", "1"]
    label = page.locator("tbody .reasons").nth(2).get_attribute("aria-label")
    assert label == f"{CLEAN}: send 100.0 %"
    page.click("th.kernels-samples button")
    assert table(page) == whole[::-1]
    page.click("th.kernels-name button")
    assert [name for name, _ in table(page)] == sorted([CLEAN, "dot(float*)", "matmul"])
    page.click("th.kernels-samples button")
    page.fill(".kernels-filter", "<B>")
    assert table(page) == whole[2:]
    assert page.locator(".kernels-state").inner_text().startswith("1 of 3 kernels match. Whole recording: ")


def test_a_range_counts_its_own_samples(page: Page) -> None:
    page.evaluate("iaprof.model.select(0.5, 1.5)")
    assert table(page) == [
        ("matmul", f"{samples(25, 75, 0):,}"), ("dot(float*)", f"{samples(25, 75, 1):,}"), (CLEAN, "0")
    ]  # fmt: skip
    total = samples(25, 75, 0) + samples(25, 75, 1)
    assert page.locator(".kernels-state").inner_text() == (
        f"0.5 s to 1.5 s: {total:,} samples. Launches and processes are those of the whole recording."
    )


def test_dragging_over_the_time_line_selects(page: Page) -> None:
    plot = page.locator(".time-metric .time-plot").first
    plot.scroll_into_view_if_needed()
    box = plot.bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + box["width"] * 0.25, box["y"] + 9)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.5, box["y"] + 9)
    assert page.locator(".time-now").inner_text() == "2.00 s"
    page.mouse.up()
    chosen = page.evaluate("iaprof.model.selection")
    assert (chosen["begin"], chosen["end"]) == (pytest.approx(1.0, abs=0.03), pytest.approx(2.0, abs=0.03))
    assert page.locator(".time-reading").all_inner_texts()[:1] == ["0/s"]  # of matmul, which had ended
    brush = page.locator(".time-brush").first
    assert float(brush.evaluate("brush => parseFloat(brush.style.left)")) == pytest.approx(25, abs=1)
    page.mouse.click(box["x"] + 5, box["y"] + 9)
    assert page.evaluate("iaprof.model.selection") is None
    assert brush.is_hidden()


def test_keys_move_along_the_time_line(page: Page) -> None:
    page.locator(".timeline").focus()
    for key in ["Home"] + ["ArrowRight"] * 10 + ["Shift+ArrowRight"] * 20:
        page.keyboard.press(key)
    chosen = page.evaluate("iaprof.model.selection")
    where = page.locator(".time-now").inner_text()
    assert (chosen["end"] - chosen["begin"], where) == (pytest.approx(0.8), f"{chosen['end']:.2f} s")
    page.keyboard.press("Escape")
    assert page.evaluate("iaprof.model.selection") is None


def test_the_contents_of_the_time_line(page: Page) -> None:
    names = page.locator(".time-name").all_inner_texts()
    assert names == ["matmul", CLEAN, "samples", "frequency actual", "cpu"]
    assert page.locator(".time-range").all_inner_texts()[-2:] == ["400 to 2350 MHz", "0 to 3.9 %"]
    assert page.locator(".time-key").all_inner_texts() == [CLEAN, "other"]
    assert page.locator(".time-never").inner_text() == "Always 0: busy copy."


def test_the_instructions_of_a_kernel(page: Page) -> None:
    page.locator("tbody .kernels-name button").first.click()
    offsets = page.locator(".listing-offset").all_inner_texts()
    assert offsets == ["0x0", "0x10", "0x20", "0x28", "0x30"]
    assert page.locator(".listing-samples").all_inner_texts() == ["", "81", "12,000", "702", ""]
    hottest = page.locator(".listing-row.hottest")
    assert hottest.locator(".listing-text").inner_text() == "sync.nop null {Compacted,$2.dst}"
    assert hottest.locator(".listing-place").inner_text() == "vec.h:1"
    page.locator(".listing-row").first.hover()
    assert page.locator(".awaited").count() == 0
    hottest.hover()
    assert page.locator(".awaited .listing-offset").all_inner_texts() == ["0x10"]
    said = page.locator(".listing-said")
    assert said.inner_text() == "0x20 · 12,000 samples, sync 100.0 % · waits for 0x10 send.ugm ($2.dst)"
    hottest.focus()
    page.keyboard.press("Enter")  # to the instruction it waits for
    assert page.evaluate("document.activeElement.querySelector('.listing-offset').textContent") == "0x10"
    page.keyboard.press("End")
    assert said.inner_text() == "0x30 · no samples"
    page.keyboard.press("h")
    assert said.inner_text().startswith("0x20 ")


def test_a_kernel_without_instructions_shows_a_note(page: Page) -> None:
    page.evaluate("name => iaprof.model.selectKernel(name)", CLEAN)
    assert page.locator(".listing h3").inner_text() == CLEAN
    assert "the hottest kernels only" in page.locator(".listing-note").inner_text()
    page.click(".listing-header button")
    assert page.locator(".listing").is_hidden()
    assert page.evaluate("document.activeElement.textContent") == CLEAN  # the focus returns
    page.evaluate("iaprof.model.selectKernel('beyond the table')")
    assert page.locator(".listing h3").inner_text() == "beyond the table"


def test_on_a_telephone_in_the_dark(browser: Browser, page_path: Path) -> None:
    with opened(browser, page_path, width=400, dark=True) as small:
        ready(small)
        small.locator("tbody .kernels-name button").first.click()
        assert small.locator(".listing-row").count() == 5
        assert small.evaluate("document.documentElement.scrollWidth") == 400
        for part in ("#timeline", "#kernels", "#about"):
            assert small.evaluate(f"document.querySelector('{part}').scrollWidth") <= 400
        shown = small.evaluate("getComputedStyle(document.querySelector('.time-area')).fill")
        assert shown == "rgb(125, 183, 255)"  # --series-0 of the dark theme


def run(monkeypatch: pytest.MonkeyPatch, *words: object) -> int:
    monkeypatch.setattr("sys.argv", ["iaprof", "report", "--quiet", *map(str, words)])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


def test_a_report_with_lines_of_source(
    recorded: Path, tmp_path: Path, browser: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tile.h").write_text((FOLDER / "src/lib/tile.h").read_text())
    page_path = tmp_path / "page.html"
    assert run(monkeypatch, recorded, "-o", page_path, "--source-dir", tmp_path) == 0
    with opened(browser, page_path) as page:
        ready(page)
        warnings = page.locator(".about-warnings li").all_inner_texts()
        assert warnings == [f"{tmp_path}/tile.h was changed after the recording began: its lines may differ"]
        page.locator("tbody .kernels-name button").click()
        hottest = page.locator(".listing-row.hottest")
        assert hottest.locator(".listing-offset").inner_text() == "0x2a8"
        assert hottest.locator(".listing-place").inner_text() == "tile.h:7"
        assert (
            "    sum = fma(a[row * n + k], b[k * n + col], sum);" in page.locator(".listing-source").all_text_contents()
        )


def test_only_the_page_shows_source(
    recorded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, recorded, "--format", "folded", "--source-dir", tmp_path) == 2
    assert capsys.readouterr().err == ("iaprof: --source-dir is for --format=html: folded shows no lines of source\n")
    assert run(monkeypatch, recorded, "-o", tmp_path / "x.html", "--source-dir", tmp_path / "none") == 2
    assert "is not a folder that can be read" in capsys.readouterr().err
    assert not (tmp_path / "x.html").exists()
