"""The flame graph's panel on the page: call tree, groups of frames, directions, time strip, links, help, paper."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page

from browser import drawn, opened, ready, until
from iaprof.formats.export import Export
from iaprof.formats.profile import Code, CodeKind, Kernel, Launch, Origin
from iaprof.gpu.intel.reasons import MEANINGS
from unit.profiles import Row, counts, profile
from unit.writers.test_html_page import ABOUT, CPU, INTERVALS, click, root, row, written

C_LIBRARY = Origin(CodeKind.C, "/lib/libc.so.6")
INTERPRETER = Origin(CodeKind.C, "/usr/bin/python3.11")
PYTHON = Origin(CodeKind.PYTHON, "", "model.py", 3)
RUNTIME = Origin(CodeKind.CPP, "/usr/lib/libze_intel_gpu.so.1")
OWN = Origin(CodeKind.CPP, "/opt/app/libnn.so", "nn.cpp", 12)
TRAIN = Launch(
    "python", 7, ("_start", "Py_RunMain", "py::train", "call", "nn::step()", "zeLaunch"), ("sys_ioctl",),
    origins=(OWN, INTERPRETER, PYTHON, INTERPRETER, OWN, RUNTIME),
)  # fmt: skip
IDLE = Launch("python", 7, ("_start", "Py_RunMain", "malloc"), origins=(OWN, INTERPRETER, C_LIBRARY))
MATMUL, SEND = Kernel(4096, "matmul", "matmul.cl"), Code("send", ("matmul",), (10,))
ROWS = [
    Row(0, TRAIN, MATMUL, SEND, 16, counts(sbid=40)),
    Row(60, TRAIN, MATMUL, SEND, 16, counts(sbid=30, active=10)),
    Row(120, IDLE, MATMUL, SEND, 16, counts(send=20)),
]
TOTAL = 100
ROOT = Path(__file__).resolve().parents[3]
EXPORT = Export(profile(ROWS, INTERVALS), ABOUT, 0.02, cpu=CPU)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("page") / "page.html", EXPORT)


@pytest.fixture
def page(browser: Browser, file: Path) -> Iterator[Page]:
    with opened(browser, file, 1400, 900) as made:
        yield ready(made)


def rows(page: Page) -> list[tuple[str, int, str]]:
    """The rows of the call tree that are open: share, level, name."""
    until(page, "document.querySelectorAll('.call').length === iaprof.flame.calls.rows.length")
    found = page.evaluate(
        """[...document.querySelectorAll(".call")].map((line) => [
             line.querySelector(".call-share").textContent, Number(line.getAttribute("aria-level")),
             line.querySelector(".call-hidden, b").textContent])"""
    )
    return [(share, level, name) for share, level, name in found]


TREE = [
    ("100.0 %", 1, "python"),
    ("100.0 %", 2, "7"),
    ("100.0 %", 3, "3 frames of C library, interpreter"),
    ("80.0 %", 4, "py::train"),
    ("80.0 %", 5, "1 frame of interpreter"),
    ("80.0 %", 6, "nn::step()"),
    ("80.0 %", 7, "2 frames of GPU runtime, OS kernel"),
    ("80.0 %", 8, "matmul.cl"),
    ("80.0 %", 9, "matmul"),
    ("80.0 %", 10, "send"),
    ("70.0 %", 11, "stall: sbid"),
    ("10.0 %", 11, "active"),
    ("20.0 %", 4, "matmul.cl"),
    ("20.0 %", 5, "matmul"),
    ("20.0 %", 6, "send"),
    ("20.0 %", 7, "stall: send"),
]


def test_the_flame_graph_is_on_the_first_screen(page: Page) -> None:
    top = {
        name: page.locator(selector).bounding_box()["y"]  # type: ignore[index]
        for name, selector in {"graph": "#flame [data-part=canvas]", "kernels": "#kernels", "heat": "#heat"}.items()
    }
    assert top["graph"] + 8 * 18 < 900
    assert top["graph"] < top["kernels"] < top["heat"]


def test_the_call_tree_groups_frames_until_they_are_asked_for(page: Page) -> None:
    page.click("button[value=tree]")

    assert rows(page) == TREE

    page.locator(".call-reveal").first.click()
    assert rows(page)[2:7] == [
        ("100.0 %", 3, "_start"),
        ("100.0 %", 4, "Py_RunMain"),
        ("80.0 %", 5, "py::train"),
        ("80.0 %", 6, "1 frame of interpreter"),
        ("80.0 %", 7, "nn::step()"),
    ]
    page.click("[data-part=groups] [value=interpreter]")
    until(page, "document.querySelectorAll('.call')[2].textContent.includes('C library')")
    assert [name for _, _, name in rows(page)][2:6] == ["1 frame of C library", "Py_RunMain", "py::train", "call"]


def test_keys_walk_the_call_tree(page: Page) -> None:
    page.keyboard.press("t")
    page.locator("[data-part=rows]").focus()
    assert page.locator("#flame .details").inner_text().startswith("python 100 samples, 100.0 %")

    for key in ("ArrowDown", "ArrowDown", "ArrowLeft"):
        page.keyboard.press(key)
    assert rows(page) == TREE[:3]
    said = "3 frames of C library, interpreter 100 samples, 100.0 % · _start, Py_RunMain, malloc"
    assert page.locator("#flame .details").inner_text() == said
    page.keyboard.press("*")
    assert rows(page) == TREE
    for key in ("ArrowRight", "s"):
        page.keyboard.press(key)
    assert [name for _, _, name in rows(page)][:1] == ["py::train"]
    page.keyboard.press("Escape")
    assert rows(page) == TREE


def test_a_search_in_the_call_tree_goes_from_match_to_match(page: Page) -> None:
    page.keyboard.press("t")
    page.keyboard.press("/")
    page.keyboard.type("^matmul$")
    page.keyboard.press("Enter")
    assert page.evaluate("iaprof.flame.calls.selected.value") == 80
    page.keyboard.press("Enter")
    assert page.evaluate("iaprof.flame.calls.selected.value") == 20
    drawn(page)
    assert page.locator(".call-match").all_inner_texts() == ["matmul", "matmul"]


def test_graph_and_tree_show_the_same_frame(page: Page) -> None:
    page.click("[data-part=groups] [value=interpreter]")  # not in the graph
    click(page, "nn::step()")
    page.keyboard.press("t")
    assert page.evaluate("iaprof.flame.text(iaprof.flame.calls.selected.box)") == "nn::step()"
    page.keyboard.press("t")
    assert page.evaluate("iaprof.flame.text(iaprof.flame.zoomed)") == "nn::step()"
    assert page.evaluate("iaprof.flame.view") == [0, 80]


def test_what_a_hidden_frame_called_is_called_by_its_caller(page: Page) -> None:
    assert row(page, 4) == {"Py_RunMain": 100}
    for group in ("interpreter", "libc"):
        page.click(f"[data-part=groups] [value={group}]")

    assert root(page) == TOTAL
    assert row(page, 3) == {"py::train": 80, "matmul.cl": 20}
    assert row(page, 4) == {"nn::step()": 80, "matmul": 20}
    page.evaluate("iaprof.model.select(1.2, 1.24)")
    assert row(page, 3) == {"py::train": 40}
    page.evaluate("iaprof.model.select(null)")
    page.click("button[value=inverted]")
    assert root(page) == TOTAL
    for group in ("interpreter", "libc"):
        page.click(f"[data-part=groups] [value={group}]")
    page.click("button[value=upright]")
    assert row(page, 4) == {"Py_RunMain": 100}


def test_a_zoom_goes_as_far_as_the_range_has_the_stack(page: Page) -> None:
    click(page, "nn::step()")
    page.evaluate("iaprof.model.select(2.4, 2.5)")  # without Python
    assert page.evaluate("iaprof.flame.text(iaprof.flame.zoomed)") == "Py_RunMain"


@pytest.mark.parametrize(
    ("group", "kind", "modules"),
    [
        ("interpreter", "C", ["python3.11", "libpython3.12.so.1.0", "libjvm.so", "node", "libruby-3.1.so"]),
        ("runtime", "C++", ["libze_loader.so.1", "libOpenCL.so.1", "libsycl.so.8", "libur_loader.so.0"]),
        ("runtime", "unknown", ["libigc.so.2", "libtbb.so.12", "libgomp.so.1", "libiomp5.so"]),
        ("libc", "C", ["libc.so.6", "libc-2.31.so", "ld-linux-x86-64.so.2", "ld-musl-x86_64.so.1", "libstdc++.so.6"]),
        ("kernel", "OS kernel", ["[kernel]"]),
        ("libc", "unknown", ["[vdso]"]),
        (None, "C", ["libcuts.so", "libmine.so", "pythonic", "javac-like", "libtorch_cpu.so", "app", "libze.so", ""]),
        (None, "Python", ["python3.11", ""]),
        (None, "GPU source", ["libc.so.6"]),
    ],
)  # fmt: skip
def test_a_group_is_known_by_its_modules(page: Page, group: str | None, kind: str, modules: list[str]) -> None:
    found = page.evaluate(
        """([kind, modules]) => modules.map((module) => {
             const groups = new FrameGroups({ kinds: [kind], modules: [module] });
             return (FRAME_GROUPS[groups.group({ kinds: [0], modules: [0] }, "f", 0)] || { key: null }).key;
           })""",
        [kind, modules],
    )
    assert dict(zip(modules, found, strict=True)) == dict.fromkeys(modules, group)


def test_flames_have_the_root_at_the_bottom(page: Page) -> None:
    tops = "['all', 'python'].map((text, depth) => iaprof.flame.topOf({ depth }))"
    assert page.evaluate(tops) == [0, 18]
    page.keyboard.press("i")
    high = page.evaluate("(iaprof.flame.rows - 1) * 18")
    assert page.evaluate(tops) == [high, high - 18]
    click(page, "py::train")
    assert page.evaluate("iaprof.flame.view") == [0, 80]
    page.keyboard.press("ArrowUp")
    assert page.locator("#flame .details").inner_text().startswith("call 80 samples")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("s")
    caption = page.locator("#flame [data-part=caption]").inner_text()
    assert caption.endswith("Below py::train: who calls it. Above: what it calls.")


def test_a_drag_over_the_strip_selects_a_range(page: Page) -> None:
    box = page.locator("[data-part=strip]").bounding_box()
    assert box is not None
    assert page.locator("[data-part=strip-says]").inner_text() == "Drag over the strip to select a range of time."
    page.mouse.move(box["x"] + box["width"] * 0.39, box["y"] + 10)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.41, box["y"] + 10, steps=3)
    page.mouse.up()
    assert root(page) == 40
    page.mouse.move(5, 5)
    said = page.locator("[data-part=strip-says]").inner_text()
    assert said == "Selected 1.16 s to 1.24 s: 40 GPU samples, 2 CPU samples."
    page.click("#times button")
    assert root(page) == TOTAL

    page.locator("[data-part=strip]").focus()
    for key in ("End", "Shift+ArrowLeft"):
        page.keyboard.press(key)
    assert page.evaluate("iaprof.model.selection.last") == 150
    page.keyboard.press("Escape")
    assert page.evaluate("iaprof.model.selection") is None


def test_the_help_has_keys_colours_and_reasons(page: Page) -> None:
    page.keyboard.press("?")
    terms = page.locator("#help [data-part=reasons] dt").all_inner_texts()
    meanings = page.locator("#help [data-part=reasons] dd").all_inner_texts()
    assert dict(zip(terms, meanings, strict=True)) == MEANINGS
    assert page.locator("#help [data-part=kinds] li").all_inner_texts() == [str(kind) for kind in CodeKind]
    page.keyboard.press("t")  # belongs to the page below it
    page.keyboard.press("Escape")
    assert page.locator("#help").is_hidden()
    assert page.evaluate("iaprof.flame.viewed") == "graph"


STATE = """({ selection: iaprof.model.selection, active: iaprof.model.active, kernel: iaprof.model.kernel,
    ...Object.fromEntries(["source", "viewed", "inverted", "upward", "colouring", "focus", "search"].map(
        (name) => [name, iaprof.flame[name]])),
    graph: [...iaprof.flame.hidden.graph], tree: [...iaprof.flame.hidden.tree],
    path: iaprof.flame.path(iaprof.flame.viewed === "tree" ? iaprof.flame.cursor : iaprof.flame.zoomed) })"""


@pytest.mark.parametrize(
    "actions",
    [
        """iaprof.model.select(1, 2); iaprof.flame.turn(true); iaprof.flame.leaveOut("libc", true);
           iaprof.flame.enter(iaprof.flame.follow(["python", "7", "Py_RunMain", "py::train"]));
           iaprof.flame.find("a|b"); iaprof.model.selectKernel("matmul")""",
        """iaprof.flame.look("tree"); iaprof.flame.show({ inverted: true, colouring: "reason" });
           iaprof.flame.leaveOut("runtime", false);
           iaprof.flame.calls.goto(iaprof.flame.follow(["stall: sbid", "send"]))""",
        """iaprof.flame.show({ focus: "nn::step()" }); iaprof.model.showActive(false)""",
        """iaprof.flame.show({ source: "cpu" })""",
    ],
)
def test_the_address_shows_the_same_again(browser: Browser, file: Path, page: Page, actions: str) -> None:
    page.evaluate(f"() => {{ {actions} }}")
    expected = page.evaluate(STATE)
    until(page, "location.hash !== ''")
    until(page, "location.hash === `#${iaprof.link.text()}`")
    address = page.evaluate("location.hash")

    with opened(browser, file, 1400, 900) as other:
        ready(other)
        first: dict[str, Any] = other.evaluate(STATE)
        other.evaluate("(hash) => { location.hash = hash; }", address)
        until(other, f"iaprof.link.text() === '{address[1:]}'")
        assert other.evaluate(STATE) == expected
        # when everything is as at first, then the address is as at first
        other.evaluate("location.hash = ''")
        until(other, "iaprof.link.text() === ''")
        assert other.evaluate(STATE) == first


def test_the_link_in_the_documentation(browser: Browser, file: Path) -> None:
    (address,) = re.findall(r"cap\.html(#\S+)", (ROOT / "docs" / "html.md").read_text())
    with opened(browser, file, 1400, 900) as page:
        ready(page)
        page.evaluate("(hash) => { location.hash = hash; }", address)
        until(page, "iaprof.flame.viewed === 'tree'")
        found = page.evaluate(STATE)
        assert (found["selection"]["begin"], found["selection"]["end"]) == (2.5, 3)  # the recording is of 3 s
        assert (found["search"], found["graph"], found["kernel"]) == ("matmul", [], None)


@pytest.mark.parametrize(
    "address",
    [
        "#time=9-1&samples=stallsRanges&view=x&order=&root=&colour=__proto__&without=constructor&function=1e9&frame=99.-1.x",
        "#time=1e400-2&function=toString&frame=__proto__&kernel=%3Cscript%3E&search=%3Cscript%3Ealert(1)%3C/script%3E",
        "#%00%ff&&&===",
    ],
)
def test_a_link_of_a_stranger_shows_only_what_there_is(browser: Browser, file: Path, page: Page, address: str) -> None:
    first = page.evaluate(STATE)
    with opened(browser, file, 1400, 900) as other:
        ready(other)
        other.evaluate("(hash) => { location.hash = hash; }", address)
        until(other, "iaprof.link.text() !== null")
        found = other.evaluate(STATE)
        assert {**found, "search": ""} == {**first, "search": ""}
        assert other.evaluate("document.scripts.length") == 1


def test_paper_is_light_and_has_the_whole_picture(browser: Browser, tmp_path: Path) -> None:
    deep = Launch("app", 7, tuple(f"f{number}" for number in range(90)))
    made = Export(profile([Row(0, deep, MATMUL, SEND, 16, counts(sbid=1))], INTERVALS), ABOUT, 0.02)
    with opened(browser, written(tmp_path / "page.html", made), 1000, 700, dark=True) as page:
        ready(page)
        shown = page.evaluate("iaprof.flame.height")
        assert page.pdf()[:5] == b"%PDF-"
        assert page.evaluate("[document.documentElement.dataset.theme, iaprof.flame.height]") == ["dark", shown]
        page.evaluate("dispatchEvent(new Event('beforeprint'))")
        page.emulate_media(media="print")
        assert page.evaluate("document.documentElement.dataset.theme") == "light"
        assert page.evaluate("iaprof.flame.height") == page.evaluate("iaprof.flame.rows * 18 + 1") > shown
        assert page.locator("#flame .tools").is_hidden()
        page.emulate_media(media="screen")  # a browser says that it has printed when the screen has the page again
        page.evaluate("dispatchEvent(new Event('afterprint'))")
        assert page.evaluate("[document.documentElement.dataset.theme, iaprof.flame.height]") == ["dark", shown]
