"""The page of `--format=html`: its data adds up, and it works in a browser."""

from __future__ import annotations

import base64
import gzip
import io
import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from playwright.sync_api import Browser, Page

from browser import chromium, opened, ready, until
from iaprof.formats.export import About, CpuSamples, Export
from iaprof.formats.page.data import payload
from iaprof.formats.page.html import HtmlPage
from iaprof.formats.profile import Code, CodeKind, Kernel, Launch, Origin, Profile, StackOptions, reason_name
from iaprof.gpu.intel.reasons import REASONS
from limits import Within
from unit.profiles import Row, counts, profile

APP, LIB = Origin(CodeKind.C, "/opt/app/bin/app"), Origin(CodeKind.CPP, "/opt/app/lib/libnn.so", "nn.cpp", 12)
STEP = Origin(CodeKind.PYTHON, "", "model.py", 3)
TRAIN = Launch("python", 7, ("main", "nn::train()", "py::step:model.py"), origins=(APP, LIB, STEP))
INFER = Launch(
    "python", 7, ("main", "nn::infer()", "nn::apply()", "nn::infer()"), ("sys_ioctl",), origins=(APP, LIB, LIB, LIB)
)
MATMUL, SOFTMAX = Kernel(4096, "matmul", "/src/matmul.cl"), Kernel(8192, "softmax", "/src/softmax.cl")
SEND, ADD = Code("send", ("matmul",), (10,)), Code("add", ("softmax", "tile"), (4, 9))
ROWS = [
    Row(0, TRAIN, MATMUL, SEND, 16, counts(sbid=40, active=2)),
    Row(10, INFER, SOFTMAX, ADD, 32, counts(active=5)),
    Row(60, TRAIN, MATMUL, SEND, 16, counts(sbid=30)),
    Row(60, INFER, SOFTMAX, ADD, 32, counts(active=7, send=1)),
    Row(61, TRAIN, MATMUL, SEND, 24, counts(sbid=20)),
    Row(120, None, None, Code("[no binary]", (), ()), 64, counts(other=3)),
]
TOTAL = 108
INTERVALS = [0.02 * number for number in range(150)]
CPU = CpuSamples(
    [
        Launch("python", 7, ("main", "nn::train()")),
        Launch("python", 7, ("main", "wait()")),
        Launch("python", 7, ("main",)),
    ],
    np.array([0, 1, 1, 2]),
    np.array([5, 61, 140, 141]),
    np.array([3, 2, 4, 1]),
)
ABOUT = About(
    "box", "python train.py", "Battlemage", 1_700_000_000.0, 3.0, (("GPUs", (("card0", "xe"),)),), ("Much was lost.",)
)
EXPORT = Export(profile(ROWS, INTERVALS), ABOUT, 0.02, cpu=CPU)
HOSTILE = [
    "<script>document.title='run'</script>",
    "</script><script>document.title='run'</script>",
    "</style><img src=x onerror=\"document.title='run'\">",
    "\"'><b onclick=alert(1)>",
    "]]>-->",
    "\u202egnp.exe\u2028\u2029${title} $script %s {{x}}",
]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("page") / "page.html")


@pytest.fixture(scope="module")
def window(browser: Browser, file: Path) -> Iterator[Page]:
    with opened(browser, file) as made:
        yield made


@pytest.fixture
def page(window: Page, file: Path) -> Page:
    window.goto("about:blank")  # a reload would show what the test before has left in the address
    window.goto(file.as_uri())
    return ready(window)


def written(path: Path, export: Export = EXPORT, options: StackOptions = StackOptions()) -> Path:  # noqa: B008 - it is frozen
    out = io.StringIO()
    HtmlPage().write(export, options, out)
    path.write_text(out.getvalue(), encoding="utf-8")
    return path


def root(page: Page) -> int:
    """The total of the flame graph."""
    return int(page.evaluate("iaprof.flame.picture.root.value"))


def row(page: Page, depth: int) -> dict[str, int]:
    """The frames in a row of the flame graph, with their samples."""
    found: Counter[str] = Counter()
    for text, count in page.evaluate(
        """depth => {
              const { flame } = iaprof;
              let boxes = [flame.picture.root];
              if (depth < 0) boxes = [flame.picture.up];
              for (let i = 0; i < Math.abs(depth); i++) boxes = boxes.flatMap((box) => flame.picture.on(box));
              return boxes.map((box) => [flame.text(box), box.value]);
            }""",
        depth,
    ):
        found[text] += count
    return dict(found)


def place(page: Page, text: str) -> tuple[float, float]:
    """The centre of a frame on the canvas."""
    x, y = page.evaluate(
        """text => {
          const { flame } = iaprof;
          let boxes = [flame.picture.root];
          for (;;) {
            const found = boxes.find((box) => flame.text(box) === text);
            if (!boxes.length) throw new Error(`no frame ${text}`);
            if (found) {
              const [left, top, width] = flame.place(found);
              return [left + width / 2, top + 9];
            }
            boxes = boxes.flatMap((box) => flame.picture.on(box));
          }
        }""",
        text,
    )
    return x, y


def click(page: Page, text: str) -> None:
    x, y = place(page, text)
    page.locator("#flame [data-part=canvas]").click(position={"x": x, "y": y})


def in_range(first: int, last: int) -> int:
    return sum(sum(each.counts) for each in ROWS if first <= each.interval < last)


# ---- the data


def decoded(data: bytes) -> dict[str, dict[str, Any]]:
    """The trees of a payload, unpacked."""
    raw = gzip.decompress(data)
    end = 4 + int.from_bytes(raw[:4], "little")
    head = json.loads(raw[4:end])
    trees = {}
    for name, tree in head["trees"].items():
        trees[name] = {
            "texts": tree["texts"],
            "kernels": head["kernels"],
            "notes": head["notes"],
            "step": round(head["intervalSeconds"] / 0.02),
        }
        for key, width, count in tree["arrays"]:
            planes = np.frombuffer(raw, np.uint8, width * count, end).reshape(width, count)
            trees[name][key] = [sum(int(byte) << 8 * at for at, byte in enumerate(each)) for each in planes.T]
            end += width * count
    assert end == len(raw)
    return trees


def stacks(tree: dict[str, Any]) -> dict[tuple[tuple[str, ...], int, int], int]:
    """Samples by stack, reason and interval."""
    path: list[str] = []
    paths = []
    for depth, frame in zip(tree["depth"], tree["frame"], strict=True):
        path[max(int(depth) - 1, 0) :] = [str(tree["texts"][int(frame)])] if depth else []
        paths.append(tuple(path))
    found: dict[tuple[tuple[str, ...], int, int], int] = {}
    at = 0
    for interval, entries in enumerate(tree["perInterval"]):
        leaf = 0
        for _ in range(int(entries)):
            leaf += int(tree["entryLeaf"][at])
            key = (paths[int(tree["leafNode"][leaf])], int(tree["leafReason"][leaf]), interval)
            found[key] = found.get(key, 0) + int(tree["entryCount"][at])
            at += 1
    return found


def random_rows(seeds: Sequence[tuple[int, int, int, int, int]]) -> Profile:
    launches = [Launch("p", 1, ("a", "b")), Launch("p", 1, ("a", "c", "a")), Launch("q", 2, ())]
    kernels = [Kernel(1, "k", "f.cl"), Kernel(2, "l", ""), Kernel(3, "k", "g.cl")]
    codes = [Code("send", ("k",), (1,)), Code("add", ("k", "i"), (1, 2)), Code("mul", ("l",), (0,))]
    return profile(
        [
            Row(
                interval,
                launches[launch],
                kernels[kernel],
                codes[kernel],
                8,
                [count if i == r else 0 for i in range(10)],
            )
            for interval, launch, kernel, r, count in seeds
        ]
        or [Row(0, None, None, codes[0], 0, [0] * 10)],
        INTERVALS,
    )


_SEEDS = st.lists(
    st.tuples(st.integers(0, 99), st.integers(0, 2), st.integers(0, 2), st.integers(0, 9), st.integers(1, 2**40)),
    max_size=30,
)


@settings(max_examples=40, deadline=None)
@given(_SEEDS)
def test_every_stack_keeps_its_samples_by_reason_and_interval(seeds: list[tuple[int, int, int, int, int]]) -> None:
    made = random_rows(seeds)

    trees = decoded(payload(Export(made, interval_s=0.02), StackOptions(), {}))

    expected: dict[tuple[tuple[str, ...], int, int], int] = {}
    for interval, launch, kernel, reason, count in seeds:
        cpu = [("p", "1", "a", "b"), ("p", "1", "a", "c", "a"), ("q", "2")][launch]
        gpu = [("f.cl", "k", "send"), ("k", "i", "add"), ("g.cl", "l", "mul")][kernel]
        key = ((*cpu, *gpu, reason_name(REASONS[reason])), reason, interval)
        expected[key] = expected.get(key, 0) + count
    assert stacks(trees["stalls"]) == expected


@settings(max_examples=40, deadline=None)
@given(_SEEDS, st.integers(0, 12), st.integers(1, 8))
def test_merged_frames_keep_the_sums(
    seeds: list[tuple[int, int, int, int, int]], most_nodes: int, most_entries: int
) -> None:
    """In every interval, for every reason, and in every kept frame."""
    export = Export(random_rows(seeds), interval_s=0.02)
    whole = stacks(decoded(payload(export, StackOptions(), {}))["stalls"])

    trees = decoded(payload(export, StackOptions(), {}, most_nodes, most_entries))

    ranges = trees.get("stallsRanges", trees["stalls"])
    small = stacks(ranges)
    whole = longer(whole, ranges["step"])
    assert len(ranges["entryCount"]) <= most_entries or len(ranges["perInterval"]) == 1
    assert all(len(tree["depth"]) <= 2 * most_nodes + 2 for tree in trees.values())
    assert sum(trees["stalls"]["leafCount"]) == sum(whole.values())
    assert totals(small, reasons=True) == totals(whole, reasons=True)
    of_whole = totals(whole)
    assert all(of_whole[key] == count for key, count in totals(small).items() if "smaller]" not in str(key))


def longer(
    found: dict[tuple[tuple[str, ...], int, int], int], step: int
) -> dict[tuple[tuple[str, ...], int, int], int]:
    """The same samples by longer intervals."""
    sums: Counter[tuple[tuple[str, ...], int, int]] = Counter()
    for (stack, reason, interval), count in found.items():
        sums[stack, reason, interval // step] += count
    return sums


def totals(found: dict[tuple[tuple[str, ...], int, int], int], reasons: bool = False) -> dict[tuple[object, ...], int]:
    """Samples by interval and prefix of a stack, or by reason and interval."""
    sums: dict[tuple[object, ...], int] = {}
    for (stack, reason, interval), count in found.items():
        for key in [(reason, interval)] if reasons else [(stack[:end], interval) for end in range(len(stack) + 1)]:
            sums[key] = sums.get(key, 0) + count
    return sums


def test_frames_below_the_limit_are_merged() -> None:
    trees = decoded(payload(EXPORT, StackOptions(percent_limit=20), {}))

    found = stacks(trees["stalls"])

    assert sum(found.values()) == TOTAL
    assert {stack[-1] for stack, _, _ in found} == {"stall: sbid", "[1 smaller]", "[3 smaller]", "[10 smaller]"}
    assert trees["stalls"]["notes"] == [
        "14 of 23 frames of GPU samples are summed up as “[N smaller]”, with 16.7 % of the samples."
    ]


def test_names_are_bounded() -> None:
    launch = Launch("p", 1, tuple(f"{number}{'x' * 1_000_000}" for number in range(8)))
    made = profile([Row(0, launch, MATMUL, SEND, 0, counts(sbid=1))], INTERVALS)

    texts = decoded(payload(Export(made, interval_s=0.02), StackOptions(), {}))["stalls"]["texts"]

    assert sum(map(len, texts)) <= 4_000_000
    assert [text[:1] + text[-1:] for text in texts if len(text) > 100] == [f"{number}…" for number in range(8)]


# ---- the page


def test_the_graph_shows_all_samples_and_their_number(page: Page) -> None:
    assert root(page) == TOTAL
    assert row(page, 3) == {"main": 105, "stall: other": 3}
    assert row(page, 4) == {"nn::train()": 92, "nn::infer()": 13}
    assert (
        "What the GPU's threads did, whole recording: 108 samples"
        in page.locator("#flame [data-part=caption]").inner_text()
    )
    maps = page.locator("#heat figcaption").all_inner_texts()
    assert [text[:11] for text in maps] == ["GPU samples", "CPU samples"]
    assert page.locator("h1").inner_text() == "python train.py"
    assert page.locator("body").get_by_text("Much was lost.").count() == 1
    assert page.title() == "python train.py · Battlemage · box"


def test_clicks_and_keys_zoom(page: Page) -> None:
    click(page, "nn::infer()")
    assert page.evaluate("iaprof.flame.view") == [92, 105]
    assert page.locator("#flame .details").inner_text().startswith("nn::infer() 13 samples, 12.0 %")

    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowDown")
    assert page.locator("#flame .details").inner_text().startswith("nn::infer() 13 samples")
    page.keyboard.press("ArrowUp")
    page.keyboard.press("Enter")
    assert page.evaluate("iaprof.flame.path(iaprof.flame.zoomed)") == [
        "python",
        "7",
        "main",
        "nn::infer()",
        "nn::apply()",
    ]

    page.keyboard.press("Escape")
    assert page.evaluate("iaprof.flame.view") == [0, TOTAL]


def test_search_shows_the_share_of_stacks_with_a_match(page: Page) -> None:
    page.keyboard.press("/")
    page.keyboard.type("INFER|^softmax$")

    assert page.locator("#flame .share").inner_text() == "12.0 % matched, 2 names"

    page.keyboard.press("Escape")
    assert page.locator("#flame .share").is_hidden()
    page.fill("#flame [data-part=search]", "nn::train(")  # no regular expression
    assert page.locator("#flame .share").inner_text() == "85.2 % matched, 1 name"


def test_a_range_shows_its_own_samples(page: Page) -> None:
    for first, last in ((0, 60), (60, 61), (60, 150), (0, 150)):
        page.evaluate("([begin, end]) => iaprof.model.select(begin, end)", [first * 0.02, last * 0.02])
        assert root(page) == in_range(first, last)

    page.evaluate("iaprof.model.select(1.2, 1.24)")
    assert page.locator("#heat .says").inner_text() == "Selected 1.2 s to 1.24 s: 58 GPU samples, 2 CPU samples."
    page.click("button[value=cpu]")
    assert root(page) == 2
    page.click("#heat button")
    assert root(page) == 10
    assert page.locator("#heat .says").inner_text() == "Whole recording, 3 s: 108 GPU samples, 10 CPU samples."


def test_dragging_and_clicking_select_a_range(page: Page) -> None:
    canvas = page.locator("#heat canvas").first
    canvas.scroll_into_view_if_needed()
    box = canvas.bounding_box()
    assert box is not None
    cell = page.evaluate("iaprof.heat.cell")

    def at(interval: int) -> tuple[float, float]:
        return box["x"] + 46 + (interval // 50 + 0.5) * cell, box["y"] + (interval % 50) * 3 + 1

    page.mouse.move(*at(60))
    page.mouse.down()
    page.mouse.move(*at(110), steps=3)
    page.mouse.up()
    assert root(page) == in_range(60, 111)

    page.mouse.click(*at(61))
    page.mouse.click(*at(10))
    assert root(page) == in_range(10, 62)
    assert page.evaluate("[iaprof.model.selection.first, iaprof.model.selection.last]") == [10, 62]


def test_keys_select_a_range(page: Page) -> None:
    page.locator("#heat canvas").first.focus()
    for key in ("ArrowRight", "ArrowRight", *["ArrowDown"] * 10, "Enter", "ArrowDown", "Enter"):
        page.keyboard.press(key)

    assert root(page) == in_range(60, 62) == 58
    page.keyboard.press("Escape")
    assert root(page) == TOTAL


def test_leaves_first_begins_where_stacks_end(page: Page) -> None:
    page.click("button[value=inverted]")

    assert root(page) == TOTAL
    assert row(page, 1) == {"stall: sbid": 90, "active": 14, "stall: other": 3, "stall: send": 1}
    assert row(page, 2) == {"send": 92, "add": 13, "[unknown kernel]": 3}
    label = page.locator("#flame [data-part=canvas]").get_attribute("aria-label")
    assert label is not None
    assert label.startswith("Flame graph. What the GPU's threads did")


def test_a_function_shows_its_callers_and_callees(page: Page) -> None:
    page.locator("#flame [data-part=canvas]").focus()
    click(page, "nn::infer()")
    page.keyboard.press("s")

    assert root(page) == 13
    assert row(page, -1) == {"main": 13}
    assert row(page, 1) == {"nn::apply()": 13}
    caption = page.locator("#flame [data-part=caption]").inner_text()
    assert "13 samples of 108, 12.0 %, 92.3 % active. Above nn::infer(): who calls it." in caption

    page.click("text=Back to all stacks")
    assert root(page) == TOTAL


def test_a_kernel_leads_to_its_instructions(page: Page) -> None:
    assert page.locator("[data-part=kernel]").is_hidden()

    click(page, "matmul")
    page.click("[data-part=kernel]")

    assert page.evaluate("iaprof.model.kernel") == "matmul"


def test_colours_have_legends(page: Page) -> None:
    legend = page.locator("#flame .legend")
    kinds = ["process", "C++", "C", "Python", "OS kernel", "GPU source", "GPU instruction", "unknown"]
    assert legend.locator("li").all_inner_texts() == kinds

    page.select_option("[data-part=colouring]", "reason")
    assert legend.locator("li").all_inner_texts() == ["active", "send", "sbid", "other"]
    page.select_option("[data-part=colouring]", "module")
    assert legend.locator("li").all_inner_texts()[0] == "GPU"
    assert {"app", "libnn.so", "[kernel]"} <= set(legend.locator("li").all_inner_texts())


def test_cpu_samples_take_the_place_of_stalls(page: Page) -> None:
    page.click("button[value=cpu]")

    assert root(page) == 10
    assert row(page, 4) == {"wait()": 6, "nn::train()": 3}
    assert "What the CPUs did" in page.locator("#flame [data-part=caption]").inner_text()


def test_it_follows_the_systems_dark_mode(browser: Browser, file: Path) -> None:
    with opened(browser, file, dark=True) as page:
        ready(page)
        dark = page.evaluate("getComputedStyle(document.body).backgroundColor")
        page.click("#theme")
        light = page.evaluate("getComputedStyle(document.body).backgroundColor")

    assert (dark, light) == ("rgb(20, 21, 24)", "rgb(246, 246, 244)")


def test_it_fits_a_telephone(browser: Browser, file: Path) -> None:
    with opened(browser, file, width=400, height=800) as page:
        ready(page)

        assert page.evaluate("document.documentElement.scrollWidth") == 400
        click(page, "main")
        assert page.evaluate("iaprof.flame.view") == [0, 105]


def test_hostile_names_run_no_script(browser: Browser, tmp_path: Path) -> None:
    names = tuple(HOSTILE)
    launch = Launch(HOSTILE[0], 7, names, origins=tuple(Origin(CodeKind.C, name, name, 3) for name in names))
    rows = [Row(0, launch, Kernel(1, name, name), Code(name, (name,), (1,)), 8, counts(sbid=1)) for name in names]
    about = About(HOSTILE[1], HOSTILE[2], HOSTILE[5], 1.0, 3.0, ((HOSTILE[0], ((HOSTILE[1], HOSTILE[2]),)),), names)
    path = written(tmp_path / "page.html", Export(profile(rows, INTERVALS), about, 0.02, cpu=CPU))

    text = path.read_text()
    with opened(browser, path) as page:
        ready(page)
        page.locator("#flame [data-part=canvas]").focus()
        for key in ("ArrowDown", "ArrowDown", "ArrowDown", "s"):
            page.keyboard.press(key)
        shown = page.locator("#flame [data-part=caption]").inner_text()
        page.select_option("[data-part=colouring]", "module")
        texts = page.evaluate("iaprof.model.trees.stalls.texts")

        assert page.evaluate("[...document.scripts].length") == 1
        assert "run" not in page.title().split("'")[0]

    assert HOSTILE[0] in shown
    assert set(HOSTILE[:5]) < set(texts)
    assert "\\u202egnp.exe\\u2028\\u2029${title} $script %s {{x}}" in texts
    assert text.count("<script") == 2
    assert text.count("</script>") == 2
    assert "\u202e" not in text


def test_a_large_recording_shows_ranges_without_instructions(browser: Browser, tmp_path: Path) -> None:
    whole = profile([each._replace(interval=0) for each in ROWS])
    code = Code("[instructions]", ("matmul",), (0,))
    by_time = profile([each._replace(code=code, offset=0) for each in ROWS], INTERVALS)
    path = written(tmp_path / "page.html", Export(whole, ABOUT, 0.02, by_time))

    with opened(browser, path) as page:
        ready(page)
        assert root(page) == TOTAL
        assert "kernels are not split into instructions" in page.locator("#notes").inner_text()
        page.evaluate("iaprof.model.select(1.2, 1.24)")
        assert root(page) == in_range(60, 62)
        assert page.evaluate("[...iaprof.model.kernelsIn(1.2, 1.24)].map(([name, by]) => [name, by[5]])") == [
            ["matmul", 50],
            ["softmax", 0],
        ]


def test_a_range_names_kernels_like_the_table(browser: Browser, tmp_path: Path) -> None:
    notes = ["[ambiguous]", "[unknown kernel]", "k" * 3_000]
    rows = [Row(60, None, None, Code("[no binary]", (note,), ()), 64, counts(other=3)) for note in notes]
    path = written(tmp_path / "page.html", Export(profile(rows, INTERVALS), ABOUT, 0.02))

    with opened(browser, path) as page:
        ready(page)
        page.evaluate("iaprof.model.select(1.2, 1.22)")
        names = page.locator("tbody .kernels-name button").all_inner_texts()
        samples = page.locator("tbody .kernels-samples").all_inner_texts()

    assert dict(zip(names, samples, strict=True)) == {"[ambiguous]": "3", "[unknown kernel]": "3", "k" * 2_000: "3"}


def test_without_times_there_is_no_heat_map(browser: Browser, tmp_path: Path) -> None:
    path = written(tmp_path / "page.html", Export(profile([each._replace(interval=0) for each in ROWS])))

    with opened(browser, path) as page:
        ready(page)
        assert page.locator("#heat").is_hidden()
        assert root(page) == TOTAL


def test_the_maximum_of_frames_is_drawn_in_one_go(browser: Browser, tmp_path: Path, within: Within) -> None:
    # given a thousand functions that launch 74 instructions each
    launches = [Launch("app", 7, (f"f{number}",)) for number in range(1000)]
    codes = [Code(f"op{number}", ("matmul",), (0,)) for number in range(74)]
    launch, code = np.divmod(np.arange(74_000), 74)
    none = np.zeros(74_000, np.int64)
    by_reason = np.zeros((74_000, 10), np.uint64)
    by_reason[:, 5] = 1 + code % 7
    made = Profile(
        launches, [MATMUL], codes, none, launch, none, code, none.astype(np.uint64), by_reason, none, REASONS, [0.0]
    )
    path = written(tmp_path / "page.html", Export(made), StackOptions(components=("cpu", "instruction")))

    with opened(browser, path) as page:
        ready(page)
        # when shown at several zooms, and leaf first
        drawings = page.evaluate(
            """() => {
              const { flame } = iaprof, found = [];
              for (const inverted of [false, true]) {
                flame.show({ inverted });
                flame.drawNow(); // which makes what there is to draw
                for (let part = 1; part < 2000; part *= 2) {
                  flame.see(flame.picture.total / 3, flame.picture.total / part);
                  flame.drawNow();
                  found.push([flame.drawn, flame.lastDrawing]);
                }
              }
              return found;
            }"""
        )
        assert page.evaluate("iaprof.flame.tree.size") == 75_001

    # then each picture is drawn within a twentieth of a second
    assert max(frames for frames, _ in drawings) > 1000
    within.took(
        sorted(milliseconds for _, milliseconds in drawings)[-2] / 1000, 0.05
    )  # one may have to wait for another process


def test_an_empty_capture_gives_a_page(browser: Browser, tmp_path: Path) -> None:
    path = written(tmp_path / "page.html", Export(profile([]), ABOUT, 0.02))

    with opened(browser, path) as page:
        ready(page)
        assert root(page) == 0


def test_options_set_the_initial_view(browser: Browser, tmp_path: Path) -> None:
    options = StackOptions(inverted=True, cpu_samples=True)
    path = written(tmp_path / "page.html", EXPORT, options)

    with opened(browser, path) as page:
        ready(page)
        assert row(page, 1) == {"wait()": 6, "nn::train()": 3, "main": 1}


def test_only_its_own_script_may_run(file: Path) -> None:
    text = file.read_text()

    (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]*)"', text)
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe" not in policy
    assert not re.search(r"(src|href)=|@import|https?://(?!www\.w3\.org)", text.split('<script id="payload"')[0])
    data = re.findall(r'type="application/octet-stream;base64">([^<]*)<', text)[0]
    assert decoded(base64.b64decode(data))["cpu"]["leafCount"] == [1, 6, 3]


def test_a_click_keeps_the_scroll_position(browser: Browser, tmp_path: Path) -> None:
    # given stacks higher than the window
    deep = Launch("python", 7, tuple(f"f{number}" for number in range(100)))
    made = Export(profile([Row(0, deep, MATMUL, SEND, 16, counts(sbid=1))], INTERVALS), interval_s=0.02)
    with opened(browser, written(tmp_path / "page.html", made)) as page:
        ready(page)
        page.evaluate("iaprof.flame.scroller.scrollTop = 900")
        until(page, "iaprof.flame.top === 900")  # it is drawn there
        # when clicked for the first time
        click(page, "f60")
        # then
        assert page.evaluate("iaprof.flame.text(iaprof.flame.zoomed)") == "f60"
        assert page.evaluate("iaprof.flame.scroller.scrollTop") == 900


def html_total(file: Path) -> int:
    with chromium() as browser, opened(browser, file) as page:
        page.wait_for_selector("#content:not([hidden])")
        return sum(page.evaluate("[...window.iaprof.model.stallsPerInterval]"))


TOTALS = {"html": html_total}
