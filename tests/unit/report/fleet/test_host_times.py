"""Samples by host and time: exact whatever the order, of bounded size, and drawn on the page."""

from __future__ import annotations

from io import StringIO
from pathlib import Path

import numpy as np
import pytest
from playwright.sync_api import Browser

from browser import opened, ready
from iaprof.formats import host_times
from iaprof.formats.export import About, Export
from iaprof.formats.host_times import MOST_COLUMNS, HostTimes
from iaprof.formats.page.html import HtmlPage
from iaprof.formats.page.panels import host_map
from iaprof.formats.profile import StackOptions
from thorough import thorough, usually
from unit.in_process import iaprof
from unit.profiles import profile
from unit.report.fleet.fleets import SAMPLES, copied

NS = 10**9
DAY = 1_795_219_200  # seconds: midnight, UTC


def cells(times: HostTimes) -> dict[tuple[str, int], int]:
    """Samples by host and the second at which the column begins."""
    columns = zip(times.host.tolist(), times.column.tolist(), times.samples.tolist(), strict=True)
    return {(times.hosts[host], column * times.width): count for host, column, count in columns}


def captures(number: int, seed: int = 1) -> list[tuple[str, int, int, int]]:
    """Hosts, begins, lengths and samples of captures within some days, of a second to two days each."""
    chance = np.random.default_rng(seed)
    return [
        (
            f"h{chance.integers(7)}",
            DAY * NS + int(chance.integers(5 * 86400 * NS)),
            int(chance.integers(NS, 2 * 86400 * NS)) if chance.random() < 0.3 else int(chance.integers(60 * NS)),
            int(chance.integers(10_000)),
        )
        for _ in range(number)
    ]


def of(some: list[tuple[str, int, int, int]]) -> HostTimes:
    hosts, begun, lengths, samples = zip(*some, strict=True)
    return HostTimes.of(hosts, begun, lengths, samples)


def test_sums_do_not_depend_on_their_order() -> None:
    made = captures(300)
    whole = of(made)
    assert whole.width == 3600
    assert int(whole.samples.sum()) == sum(samples for *_, samples in made)
    for size in (1, 7, 100):
        parts = [of(made[first : first + size]) for first in range(0, len(made), size)]
        assert size > 7 or len({part.width for part in parts}) > 1
        assert cells(HostTimes.total(parts)) == cells(whole)
        left = HostTimes.total(parts[:1])
        for part in parts[:0:-1]:
            left = HostTimes.total([part, left])
        assert cells(left) == cells(whole)


def test_samples_are_spread_over_the_time_of_a_capture() -> None:
    times = of([("a", DAY * NS + NS // 2, 2 * NS, 8), ("b", (DAY + 1) * NS, 0, 3), ("c", DAY * NS, NS, 0)])
    assert cells(times) == {("a", DAY): 2, ("a", DAY + 1): 4, ("a", DAY + 2): 2, ("b", DAY + 1): 3, ("c", DAY): 0}


def test_clocks_that_were_never_set_are_of_no_time() -> None:
    times = of([("a", 0, NS, 5), ("b", 86400 * NS, NS, 6), ("c", DAY * NS, NS, 7)])
    assert (times.timeless, cells(times), times.width) == (11, {("c", DAY): 7}, 1)
    empty = of([("a", 0, NS, 5)])
    assert host_map(HostTimes.total([empty, empty])) is None


@thorough
def test_size_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    # 1,000 hosts for four weeks, once in six hours
    monkeypatch.setattr(host_times, "_MOST_CELLS", 1 << 16)
    hosts = [f"node-{number:03}" for number in range(1_000)]
    parts = [
        HostTimes.of(hosts, [(DAY + 21_600 * turn) * NS] * len(hosts), [60 * NS] * len(hosts), [9] * len(hosts))
        for turn in range(4 * 28)
    ]
    times = HostTimes.total(parts)
    assert 1 << 14 < len(times.samples) <= 1 << 16
    assert int(times.samples.sum()) == 9 * 1_000 * 4 * 28
    found = host_map(times)
    assert found is not None
    assert len(found["rows"]) == 250 and found["columns"] <= MOST_COLUMNS
    assert sum(found["samples"]) == 9 * 1_000 * 4 * 28
    assert [row["hosts"] for row in found["rows"]] == [4] * 250
    assert found["rows"][0] == {"first": "node-000", "last": "node-003", "hosts": 4}
    page = StringIO()
    HtmlPage().write(Export(profile([]), About(), hosts=times), StackOptions(), page)
    assert len(page.getvalue()) < 1_000_000
    # as time goes on, columns get wider
    assert HostTimes.total([times, of([("z", (DAY + 10**9) * NS, NS, 1)])]).width == 28 * 86400
    # and so do they where memory is short
    monkeypatch.setattr(host_times, "_MOST_CELLS", 2_000)
    assert len(HostTimes.total([*parts]).samples) <= 2_000


@pytest.mark.parametrize(
    ("width", "dark"), usually([(800, True)], [(1400, False), (800, True), (390, False), (390, True)])
)
def test_the_page_shows_hosts_over_time(browser: Browser, tmp_path: Path, width: int, dark: bool) -> None:
    made = [
        (f"<b>{number}", (DAY + 3600 * hour) * NS, 60 * NS, 100 + hour) for number in range(9) for hour in range(48)
    ]
    page = StringIO()
    HtmlPage().write(Export(profile([]), About(), hosts=of([*made, ("x", 0, 0, 5)])), StackOptions(), page)
    (tmp_path / "page.html").write_text(page.getvalue())
    with opened(browser, tmp_path / "page.html", width, dark=dark) as shown:
        ready(shown)
        shown.wait_for_selector("#hosts .caption:not(:empty)")
        assert shown.evaluate("document.documentElement.scrollWidth") == width
        said = shown.text_content("#hosts [data-part=says]")
        assert said == "9 hosts, from 21 Nov 2026, 00:00 to 22 Nov 2026, 23:10 UTC." or width < 1400
        assert "The time of 5 samples is not known." in str(shown.text_content("#hosts .caption"))
        sums = shown.evaluate("iaprof.hosts.samples.reduce((sum, each) => sum + Math.max(each, 0), 0)")
        assert sum(samples for *_, samples in made) == sums
        # a cell says what it is, to the mouse and to the keyboard
        at = shown.evaluate("[iaprof.hosts.left + iaprof.hosts.cell / 2, iaprof.hosts.row * 1.5]")
        shown.hover("#hosts canvas", position={"x": at[0], "y": at[1]})
        assert str(shown.text_content("#hosts .tip")).startswith("<b>121 Nov 2026, 00:00 UTC")
        shown.focus("#hosts canvas")
        shown.keyboard.press("ArrowRight")
        shown.keyboard.press("ArrowDown")
        assert str(shown.text_content("#hosts [data-part=says]")).startswith("<b>1: 21 Nov 2026, 00:00 UTC")


@pytest.mark.usefixtures("here")
@thorough
def test_a_page_of_captures_has_their_hosts(tmp_path: Path, browser: Browser) -> None:
    for number in range(4):
        clock = {"monotonic_ns": 0, "realtime_ns": (DAY + 600 * number) * NS}
        copied(SAMPLES[-1], tmp_path / "captures" / f"{number}.parquet", f"node-{number % 2}", clock=clock)
    assert iaprof("report", tmp_path / "captures", "--cache=none", "-o", tmp_path / "page.html").code == 0
    with opened(browser, tmp_path / "page.html") as shown:
        ready(shown)
        rows = shown.evaluate("iaprof.hosts.data.rows.map((row) => row.first)")
        assert rows == ["node-0", "node-1"]
        sums = shown.evaluate("iaprof.hosts.data.samples.reduce((sum, each) => sum + each, 0)")
        assert sums == shown.evaluate("iaprof.model.data.kernels.samples")
    # one capture has no such picture
    assert iaprof("report", SAMPLES[-1], "-o", tmp_path / "one.html").code == 0
    with opened(browser, tmp_path / "one.html") as shown:
        ready(shown)
        assert shown.is_hidden("#hosts")
