"""SVG flame graphs: layout, sums, and the picture in a real browser."""

from __future__ import annotations

import base64
import io
import random
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from playwright.sync_api import Browser, Page

from browser import opened, until
from iaprof.formats.estimates import EXPLANATION
from iaprof.formats.export import About, CpuSamples, Export
from iaprof.formats.profile import Code, Kernel, Launch, StackOptions, reason_name
from iaprof.formats.stacks.flame_layout import SMALLEST, FlameLayout, frame_key, lay_out
from iaprof.formats.stacks.trees import stall_tree
from iaprof.formats.writers.flame_svg import FlameSvg, draw
from iaprof.formats.writers.folded import Folded
from thorough import usually
from unit.profiles import Row, counts, profile

SVG = "{http://www.w3.org/2000/svg}"
KERNEL = Kernel(0x8000FFBE0000, "matmul", "matmul.cl")
LAUNCH = Launch("app", 42, ("main", "run(int)"), ("do_syscall_64",))
OTHER = Launch("app", 42, ("main", "ns::idle()"))
SEND, MOV = Code("send", ("matmul", "dot(float)"), (4, 9)), Code("mov", ("matmul",), (0,))
ROWS = [
    Row(0, LAUNCH, KERNEL, SEND, 0x10, counts(active=5, sbid=55)),
    Row(0, LAUNCH, KERNEL, MOV, 0x20, counts(tdr=20)),
    Row(0, OTHER, KERNEL, MOV, 0x20, counts(tdr=20)),
]
SHORT = StackOptions(components=("process", "cpu", "function", "reason"))
SHORT_OPS = StackOptions(components=("process", "instruction"))
HOSTILE = (
    "<script>alert(1)</script>",
    "]]><script>alert(2)</script>",
    "</title></style><image href='x' onerror='alert(3)'/>",
    "\"><rect onload=alert(4) x='",
    "&lt;b&gt; &#x3c; %3Cscript%3E",
    "right‮to left\x1b[31m\x00\ud800\ufffe\n",
    "日本語" * 40,
    "\U0001f525" * 100,
    "",
)


def export(rows: list[Row] = ROWS, about: About | None = None) -> Export:
    return Export(profile(rows), about or About(host="lab-3", command="./app --fast", gpus="Arc B580"))


def written(made: Export, options: StackOptions = SHORT) -> str:
    out = io.StringIO()
    FlameSvg().write(made, options, out)
    return out.getvalue()


def boxes(layout: FlameLayout) -> list[list[tuple[str, int, int]]]:
    return [[(box.text, box.x, box.width) for box in row] for row in layout.rows]


def frames_in(svg: str) -> list[ElementTree.Element]:
    group = ElementTree.fromstring(svg).find(f"{SVG}g[@id='frames']")
    assert group is not None
    return group.findall(f"{SVG}g/{SVG}g")


class TestLayout:
    def test_the_layout_of_a_few_stacks(self) -> None:
        layout = lay_out(stall_tree(profile(ROWS), SHORT, frame_key))
        assert boxes(layout) == [
            [("all", 0, 100)],
            [("app", 0, 100)],
            [("main", 0, 100)],
            [("ns::idle()", 0, 20), ("run(int)", 20, 80)],
            [("matmul", 0, 20), ("do_syscall_64", 20, 80)],
            [("stall: tdr", 0, 20), ("matmul", 20, 80)],
            [("dot(float)", 20, 60), ("stall: tdr", 80, 20)],
            [("active", 20, 5), ("stall: sbid", 25, 55)],
        ]
        assert (layout.total, layout.left_out) == (100, 0)

    def test_small_frames_are_merged_per_parent(self) -> None:
        # When stacks below 10 % and 25 % are too small
        some = lay_out(stall_tree(profile(ROWS), SHORT, frame_key), 10)
        more = lay_out(stall_tree(profile(ROWS), SHORT, frame_key), 25)
        # Then rests below the limit have no box, and larger rests of a parent have one
        assert boxes(some)[-1] == [("stall: sbid", 20, 55)]
        assert some.left_out == 1
        assert boxes(more)[3:5] == [[("run(int)", 0, 80)], [("do_syscall_64", 0, 80)]]
        # When siblings are just as small
        rows = [*ROWS, Row(0, LAUNCH, KERNEL, SEND, 0x10, counts(sync=6, send=7))]
        joined = lay_out(stall_tree(profile(rows), SHORT, frame_key), 10)
        # Then their sum has a box
        assert boxes(joined)[-1] == [("stall: sbid", 20, 55), ("[below 10 %]", 75, 18)]

    @pytest.mark.parametrize("seed", range(12))
    def test_the_layout_equals_that_of_folded_lines(self, seed: int) -> None:
        # Given a random profile, and its folded stacks
        made = random_export(seed)
        options = StackOptions(inverted=seed % 2 == 1)
        limit = (0, 0.5, 3, 20)[seed % 4]
        folded = io.StringIO()
        Folded().write(made, options, folded)
        stacks = [line.rpartition(" ") for line in folded.getvalue().splitlines()]
        # When it is laid out
        layout = lay_out(stall_tree(made.profile, options, frame_key), limit)
        # Then the boxes equal those made stack by stack, without the separator of folded stacks
        plain = [
            ([re.sub(r"_\[[kGg]\]$", "", each) for each in stack.split(";") if each != "-"], int(n))
            for stack, _, n in stacks
        ]
        for frames, _ in plain:  # folded stacks alone call reasons as they call instructions
            at = 1 if options.inverted else -2
            frames[at] = reason_name(frames[at])
        assert boxes(layout) == plain_layout(plain, max(limit, SMALLEST))
        assert layout.total == int(made.profile.counts.sum())

    def test_the_limit_grows_until_the_file_fits(self) -> None:
        # Given a thousand instructions, each with one sample more than the previous
        codes = [Code(f"op{n}", ("matmul",), (0,)) for n in range(1000)]
        rows = [Row(0, LAUNCH, KERNEL, code, 0, counts(sbid=n + 1)) for n, code in enumerate(codes)]
        tree = stall_tree(profile(rows), SHORT_OPS, frame_key)
        # When the file may have some hundred boxes
        layout = lay_out(tree, most_bytes=200_000)
        # Then it has the largest, and one for the others
        *kept, (text, x, width) = boxes(layout)[-1]
        sizes = sorted(each for _, _, each in kept)
        assert len(kept) > 300
        assert sizes == list(range(sizes[0], 1001))
        assert (text, x, width) == (f"[below {layout.limit:g} %]", sum(sizes), layout.total - sum(sizes))
        assert 100 * (sizes[0] - 1) < layout.limit * layout.total <= 100 * sizes[0]
        assert layout.left_out == sizes[0] - 1
        out = io.StringIO()
        draw(layout, About(), StackOptions(), out)
        assert 50_000 < len("".join(re.findall("<g class.*", out.getvalue()))) < 200_000

    def test_deep_stacks_are_cut_at_the_maximum_depth(self) -> None:
        deep = Launch("app", 42, tuple(f"f{n}" for n in range(3000)))
        layout = lay_out(stall_tree(profile([Row(0, deep, KERNEL, MOV, 0, counts(tdr=3))]), SHORT, frame_key))
        assert len(layout.rows) == 1002
        assert boxes(layout)[-1] == [("[below 0.01 %]", 0, 3)]

    def test_an_empty_profile(self) -> None:
        assert boxes(lay_out(stall_tree(profile([]), SHORT, frame_key))) == [[("all", 0, 0)]]


def random_export(seed: int) -> Export:
    chance = random.Random(seed)
    launches = [
        Launch(chance.choice("pq"), chance.choice((1, 2)), tuple(chance.choices(("a", "b::c", "d(int)", "e"), k=depth)))
        for depth in (0, 1, 3, 3, 6)
    ]
    kernels = [Kernel(0x1000 * n, f"kernel{n}", chance.choice(("", "x.cl"))) for n in range(3)]
    codes = [Code(f"op{n}", ("kernel",) * (n % 2) + ("inlined",), (0,) * (n % 2 + 1)) for n in range(4)]
    rows = [
        Row(
            0,
            chance.choice(launches),
            chance.choice(kernels),
            chance.choice(codes),
            chance.randrange(5) * 16,
            counts(sbid=int(10 ** (4 * chance.random())), send=chance.randrange(3)),
        )
        for _ in range(chance.choice((3, 30, 200)))
    ]
    return Export(profile(rows))


def plain_layout(stacks: list[tuple[list[str], int]], limit: float) -> list[list[tuple[str, int, int]]]:
    whole = sum(count for _, count in stacks)
    rows: dict[int, list[tuple[str, int, int]]] = defaultdict(list)

    def place(text: str, inside: list[tuple[list[str], int]], x: int, depth: int) -> None:
        rows[depth].append((text, x, sum(count for _, count in inside)))
        below = defaultdict(list)
        for stack, count in inside:
            if stack:
                below[stack[0]].append((stack[1:], count))
        rest = 0
        for child in sorted(below):
            width = sum(count for _, count in below[child])
            if 100 * width >= limit * whole:
                place(child, below[child], x, depth + 1)
                x += width
            else:
                rest += width
        if rest and 100 * rest >= limit * whole:
            rows[depth + 1].append((f"[below {limit:g} %]", x, rest))

    place("all", stacks, 0, 0)
    return [sorted(rows[depth], key=lambda box: box[1]) for depth in sorted(rows)]


class TestFile:
    def test_the_elements_of_frames(self) -> None:
        rows = [ROWS[0]._replace(counts=counts(sbid=30)), ROWS[1]._replace(counts=counts(tdr=10))]
        text = written(export(rows), StackOptions(components=("process", "reason")))
        frames = text[text.index('<g id="frames"') : text.index('<g id="head"')]
        assert frames == (
            '<g id="frames" data-pad="10" data-letter="7.25" data-top="102" data-row="17">\n'
            '<g transform="translate(0,102)">\n'
            '<g class="k0" data-x="0" data-w="40"><title>all (40 samples, 100.00 %)</title>'
            '<rect x="10.00" width="979.50" height="16"/><text x="13.00" y="12">all</text></g>\n'
            '</g>\n<g transform="translate(0,119)">\n'
            '<g class="k0" data-x="0" data-w="40"><title>app (40 samples, 100.00 %)</title>'
            '<rect x="10.00" width="979.50" height="16"/><text x="13.00" y="12">app</text></g>\n'
            '</g>\n<g transform="translate(0,136)">\n'
            '<g class="k7" data-x="0" data-w="30"><title>stall: sbid (GPU instruction, 30 samples, 75.00 %)</title>'
            '<rect x="10.00" width="734.50" height="16"/><text x="13.00" y="12">stall: sbid</text></g>\n'
            '<g class="k7" data-x="30" data-w="10"><title>stall: tdr (GPU instruction, 10 samples, 25.00 %)</title>'
            '<rect x="745.00" width="244.50" height="16"/><text x="748.00" y="12">stall: tdr</text></g>\n'
            "</g>\n</g>\n"
        )

    def test_the_lines_above_the_picture(self) -> None:
        about = About("lab-3", "./app --fast", "Arc B580", 1_700_000_000.0, 12.34, (), ["2 % lost"])
        made = ElementTree.fromstring(written(export(about=about), StackOptions(percent_limit=10)))
        lines = [line[0].text for line in made.iter(f"{SVG}text") if "data-letter" in line.attrib]
        assert lines == [
            "./app --fast",
            "Arc B580 · lab-3 · 2023-11-14 22:13:20 UTC · 12.3 s",
            "100 GPU samples · 5.0 % active · 2 frames below 10 % not drawn",
            "2 % lost",
        ]
        legend = made.find(f".//{SVG}g[@id='legend']")
        assert legend is not None
        assert [text.text for text in legend.iter(f"{SVG}text")] == [
            "process", "C++", "C", "OS kernel", "GPU source", "GPU instruction",
        ]  # fmt: skip

    def test_cpu_samples(self) -> None:
        columns = (np.array([0, 1]), np.zeros(2, np.int64), np.array([7, 3]))
        text = written(
            Export(profile([]), cpu=CpuSamples([LAUNCH, OTHER], *columns)),
            StackOptions(components=("cpu",), cpu_samples=True),
        )
        assert [frame[0].text for frame in frames_in(text)] == [
            "all (10 samples, 100.00 %)",
            "main (C, 10 samples, 100.00 %)",
            "ns::idle() (C++, 3 samples, 30.00 %)",
            "run(int) (C++, 7 samples, 70.00 %)",
            "do_syscall_64 (OS kernel, 7 samples, 70.00 %)",
        ]
        assert "10 CPU samples" in text

    def test_hostile_names_keep_the_file_well_formed(self) -> None:
        text = written(hostile())
        titles = [frame[0].text or "" for frame in frames_in(text)]
        for name in HOSTILE[:5]:
            assert any(title.startswith(f"{name} (") for title in titles), name
        assert "right\\u202eto left\\x1b[31m\\x00\\ud800\\ufffe\\x0a (C, 1 samples, 11.11 %)" in titles

    def test_an_empty_profile_gives_a_picture(self) -> None:
        assert frames_in(written(export([])))[0][0].text == "all (0 samples, 0.00 %)"


def hostile() -> Export:
    rows = [
        Row(0, Launch(name, 1, (name,)), Kernel(0, name, name), Code(name, (name,), (0,)), 0, counts(sbid=1))
        for name in HOSTILE
    ]
    return export(rows, About("<host>&", "]]>", '"gpu"', warnings=[HOSTILE[0]]))


@pytest.fixture
def page(browser: Browser, tmp_path: Path) -> Iterator[Page]:
    with opened(browser, saved(tmp_path, written(export())), 1000, 800) as page:
        yield page


def saved(folder: Path, text: str) -> Path:
    path = folder / "flame.svg"
    path.write_text(text)
    return path


def shown(page: Page) -> dict[str, tuple[int, int]]:
    """Left and right edges of visible frames by title; the first of each title."""
    found = page.evaluate(
        """() => Array.from(document.querySelectorAll("#frames > g > g"))
            .filter((each) => each.getClientRects().length)
            .map((each) => [each, each.querySelector("rect").getBoundingClientRect()])
            .map(([each, place]) => [each.querySelector("title").textContent, place.left, place.right])"""
    )
    return {title.rpartition(" (")[0]: (round(left), round(right)) for title, left, right in reversed(found)}


def focused(page: Page) -> str:
    title: str = page.evaluate("document.activeElement.querySelector('title')?.textContent ?? ''")
    return title.rpartition(" (")[0]


def frame(page: Page, name: str) -> None:
    page.locator("#frames > g > g", has_text=name).first.click()


class TestInABrowser:
    def test_what_is_divided_is_said_in_a_line_that_fits_and_explained(self, browser: Browser, tmp_path: Path) -> None:
        # Given samples that are all divided, in a narrow window
        made = replace(profile(ROWS), divided=np.array([60, 20, 20], np.uint64))
        path = saved(tmp_path, written(replace(export(), profile=made)))
        with opened(browser, path, 800, 800) as page:
            line = page.locator("#head text.said").nth(2)
            # Then the line is whole
            assert line.evaluate("each => each.lastChild.data") == (
                "100.0 % of the samples are divided among stacks: what is marked ~ is an estimate. Hover to read why."
            )
            assert line.evaluate("each => each.getBBox().width") < 780
            # And its tooltip explains it
            assert (line.locator("title").text_content() or "").endswith(EXPLANATION)

    def test_zoom_and_reset(self, page: Page) -> None:
        # Given the whole picture
        whole = shown(page)
        assert whole["run(int)"] == (206, 990)
        # When a frame is clicked
        frame(page, "run(int)")
        # Then it and its callers have the full width, and its siblings are hidden
        zoomed = shown(page)
        assert zoomed["run(int)"] == zoomed["main"] == zoomed["all"] == (10, 990)
        assert zoomed["stall: sbid"] == (10 + round(980 * 5 / 80), 10 + round(980 * 60 / 80 - 0.5))
        assert "ns::idle()" not in zoomed
        assert page.text_content("#details") == "run(int) (C++, 80 samples, 80.00 %)"
        # When the zoom is reset
        page.get_by_text("Reset zoom").click()
        # Then everything is as before
        assert shown(page) == whole

    def test_search_shows_the_matched_share(self, page: Page) -> None:
        # When the search matches two nested frames and one elsewhere
        page.keyboard.press("Control+f")
        page.keyboard.type("SBID|^dot|idle")
        # Then nested matches count once
        assert page.text_content("#matched") == "Matched: 80.00 %"
        assert page.locator(".match").count() == 3
        # When zoomed
        frame(page, "run(int)")
        # Then the share is that of the visible samples
        assert page.text_content("#matched") == "Matched: 75.00 % of the zoomed frame"
        # When the pattern is invalid
        page.fill("input", "(")
        # Then the status says so
        assert page.text_content("#matched") == "not a regular expression"
        # When Escape is pressed
        page.keyboard.press("Escape")
        assert page.text_content("#matched") == ""
        assert page.locator(".match").count() == 0

    def test_keyboard(self, page: Page) -> None:
        page.keyboard.press("Tab")
        assert focused(page) == "all"
        for key in ("ArrowDown", "ArrowDown", "ArrowDown", "ArrowLeft"):
            page.keyboard.press(key)
        assert focused(page) == "ns::idle()"
        assert page.text_content("#details") == "ns::idle() (C++, 20 samples, 20.00 %)"
        assert page.evaluate("getComputedStyle(document.activeElement.querySelector('rect')).strokeWidth") == "2.5px"
        page.keyboard.press("Enter")
        assert shown(page)["ns::idle()"] == (10, 990)
        page.keyboard.press("ArrowUp")
        assert focused(page) == "main"
        page.keyboard.press("Escape")
        assert shown(page)["ns::idle()"] == (10, 206)
        page.keyboard.press("/")
        page.keyboard.type("main")
        assert page.text_content("#matched") == "Matched: 100.00 %"

    @pytest.mark.parametrize("inverted", [False, True])
    def test_the_root_is_at_the_top_until_flames_are_chosen(
        self, browser: Browser, tmp_path: Path, inverted: bool
    ) -> None:
        tops = """Array.from(document.querySelectorAll("#frames > g"), (row) => row.getBoundingClientRect().top)"""
        options = StackOptions(components=SHORT.components, inverted=inverted)
        with opened(browser, saved(tmp_path, written(export(), options))) as page:
            icicles = page.evaluate(tops)
            assert icicles == sorted(icicles)
            page.keyboard.press("Tab")
            page.keyboard.press("ArrowDown")
            assert focused(page) == ("stall: sbid" if inverted else "app")

            page.get_by_text("Flames").click()

            assert page.evaluate(tops) == icicles[::-1]
            frame(page, "all")
            page.keyboard.press("ArrowUp")
            assert focused(page) == ("stall: sbid" if inverted else "app")
            page.get_by_text("Icicles").click()
            assert page.evaluate(tops) == icicles

    def test_it_fits_the_window_and_narrow_frames_are_drawn(self, browser: Browser, tmp_path: Path) -> None:
        # Given a frame with a width of a seventh of a pixel
        rows = [*ROWS, Row(0, OTHER, KERNEL, MOV, 0, counts(sync=1))]
        rows[0] = rows[0]._replace(counts=counts(sbid=6900))
        with opened(browser, saved(tmp_path, written(export(rows))), 1400, 500) as page:
            assert shown(page)["all"] == (10, 1390)
            # When the keyboard zooms to it
            page.keyboard.press("Tab")
            for key in ("ArrowDown", "ArrowDown", "ArrowDown", "ArrowLeft", "ArrowDown", "ArrowDown", "ArrowLeft"):
                page.keyboard.press(key)
            page.keyboard.press("Enter")
            # Then it is readable, also after the window was resized
            assert shown(page)["stall: sync"] == (10, 1390)
            page.set_viewport_size({"width": 800, "height": 300})
            until(page, "document.documentElement.viewBox.baseVal.width === 800")
            assert shown(page)["stall: sync"][0] == 10
            label = page.locator("#frames > g > g", has_text="sync").locator("text")
            assert label.text_content() == "stall: sync"

    def test_zoomed_frames_scroll_into_view_between_title_and_details(self, browser: Browser, tmp_path: Path) -> None:
        # Given a picture higher than its window
        deep = Launch("app", 42, tuple(f"f{n}" for n in range(30)))
        text = written(export([Row(0, deep, KERNEL, MOV, 0, counts(tdr=3))]))
        with opened(browser, saved(tmp_path, text), 1000, 300) as page:
            where = """() => [...["head", "foot"].map((id) => document.getElementById(id)), document.activeElement]
                .map((each) => each.getBoundingClientRect()).map((each) => [each.top, each.bottom])"""
            # When walked from its root to its last row
            for key in ["Tab", *["ArrowDown"] * 33]:
                page.keyboard.press(key)
                # Then these are visible, and so are title and details
                until(page, "document.getElementById('head').getBoundingClientRect().top === 0")
                (_, head), (foot, last), (top, bottom) = page.evaluate(where)
                assert head < top < bottom < foot
                assert last == 300
            assert focused(page) == "stall: tdr"

    def test_hostile_names_run_no_script(self, browser: Browser, tmp_path: Path) -> None:
        with opened(browser, saved(tmp_path, written(hostile()))) as page:
            for name in HOSTILE[:8]:
                page.fill("input", re.escape(name[:20]))
                page.locator("#frames > g > g").nth(3).hover()
            frame(page, "alert(1)")
            assert page.locator("script").count() == 1
            assert page.locator("image, [onload], [onerror]").count() == 0

    def test_labels_stay_in_their_frames(self, browser: Browser, tmp_path: Path) -> None:
        with opened(browser, saved(tmp_path, written(hostile())), 1000, 600) as page:
            overhang = """() => Array.from(document.querySelectorAll("#frames > g > g > text"))
                .map((text) => text.getBoundingClientRect().right
                    - text.parentNode.querySelector("rect").getBoundingClientRect().right)"""
            assert max(page.evaluate(overhang)) < 1
            frame(page, "日本語")
            assert max(page.evaluate(overhang)) < 1

    @pytest.mark.parametrize("dark", usually([True], [False, True]))
    def test_as_an_image_it_shows_everything(self, browser: Browser, tmp_path: Path, dark: bool) -> None:
        # Given a page with the picture as an image, in which scripts do not run
        data = base64.b64encode(written(export()).encode()).decode()
        (tmp_path / "page.html").write_text(
            f'<meta charset="utf-8"><meta name="color-scheme" content="light dark">'
            f'<body style="margin:0"><img src="data:image/svg+xml;base64,{data}">'
        )
        with opened(browser, tmp_path / "page.html", 1000, 400, dark) as page:
            # When pixels are read: beside the frames, and in that of C++
            size, *colours = page.evaluate(
                """async () => {
                    const image = document.querySelector("img");
                    await image.decode();
                    const canvas = document.createElement("canvas");
                    [canvas.width, canvas.height] = [image.width, image.height];
                    const context = canvas.getContext("2d", { willReadFrequently: true });
                    context.drawImage(image, 0, 0);
                    const at = (x, y) => Array.from(context.getImageData(x, y, 1, 1).data.slice(0, 3));
                    return [[image.width, image.height], at(3, 3), at(800, image.height - 34 - 4 * 17 - 8)];
                }"""
            )
            # Then they have the expected colours
            assert size[0] == 1000
            assert colours == [[27, 27, 31] if dark else [255, 255, 255], [0x56, 0xBB, 0xEB]]


def svg_total(file: Path) -> int:
    said = re.search(r"([0-9,]+) GPU samples", file.read_text())
    assert said
    return int(said[1].replace(",", ""))


TOTALS = {"svg": svg_total}
