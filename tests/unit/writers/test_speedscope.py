"""speedscope's format: checked by its schema, and by speedscope itself, which `make setup` gets from npm."""

import io
import json
import re
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from playwright.sync_api import Browser, Page

from iaprof.formats.export import Export
from iaprof.formats.profile import StackOptions
from iaprof.formats.writers.speedscope import Speedscope
from thorough import thorough
from unit import stalled

PAGES = Path(sys.prefix) / "lib/speedscope"


def written(export: Export, options: StackOptions | None = None) -> Any:
    out = io.StringIO()
    Speedscope().write(export, options or StackOptions(), out)
    document = json.loads(out.getvalue())
    jsonschema.validate(document, json.loads((PAGES / "file-format-schema.json").read_text()))
    return document


def stacks(document: Any, number: int = 0) -> list[str]:
    frames = document["shared"]["frames"]
    profile = document["profiles"][number]
    assert profile["endValue"] == sum(profile["weights"])
    return [
        f"{';'.join(frames[frame]['name'] for frame in stack)} {weight}"
        for stack, weight in zip(profile["samples"], profile["weights"], strict=True)
    ]


def test_stalls_and_cpu_samples_are_a_profile_each() -> None:
    document = written(stalled.export())
    cpu, gpu = "app;42;main;nn::run(int);do_syscall_64_[k]", "src/matmul.cl_[G];matmul_[G];dot(float)_[G];send_[g]"
    # in the order of intervals
    assert sorted(stacks(document)[:3]) == [
        f"app;42;main;nn::run(int);do_syscall_64_[k];{gpu};active 10",
        f"app;42;main;nn::run(int);do_syscall_64_[k];{gpu};stall: sbid 70",
        "app;42;main;src/matmul.cl_[G];matmul_[G];mov_[g];stall: tdr 20",
    ]
    assert stacks(document)[3] == f"Web Content;7;[libfoo.so+0x1f0];{gpu};stall: send 5"
    assert sorted(stacks(document)[4:]) == [
        "[unknown process];[unknown kernel]_[G];stall: control 3",
        f"{cpu};{gpu};stall: sbid 2",
    ]
    assert stacks(document, 1) == ["app;42;main;wait 3", "swapper;cpu_idle_[k] 2", "app;42;main;wait 1"]
    assert [(each["name"], each["unit"]) for each in document["profiles"]] == [
        ("GPU samples", "none"),
        ("CPU samples", "none"),
    ]
    assert (document["name"], document["exporter"].split()[0]) == ("app --fast · Battlemage · north", "iaprof")


def test_a_function_is_one_frame_whatever_line_calls() -> None:
    frames = written(stalled.export())["shared"]["frames"]
    assert [each for each in frames if each["name"] in ("main", "nn::run(int)", "matmul_[G]", "dot(float)_[G]")] == [
        {"name": "main", "file": "src/main.c"},  # called at lines 12 and 15
        {"name": "nn::run(int)", "file": "nn/run.cpp", "line": 40},
        {"name": "matmul_[G]", "file": "src/matmul.cl"},
        {"name": "dot(float)_[G]", "file": "src/vec.h", "line": 9},
    ]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (StackOptions(components=("reason",)), [
            "active 10", "stall: control 3", "stall: sbid 2", "stall: sbid 70", "stall: send 5", "stall: tdr 20",
        ]),
        (StackOptions(components=("function", "offset"), inverted=True, percent_limit=25), [
            "0x10_[g];dot(float)_[G];matmul_[G] 5", "0x10_[g];dot(float)_[G];matmul_[G] 80",
            "[below 25 %] 20", "[below 25 %] 5",
        ]),
        (StackOptions(components=("process", "reason"), cpu_samples=True), ["app 1", "app 3", "swapper 2"]),
        (StackOptions(components=("host",)), ["[unknown process] 3", "[unknown] 100", "[unknown] 2", "north 5"]),
    ],
)  # fmt: skip
def test_chosen_components(options: StackOptions, expected: list[str]) -> None:
    assert sorted(stacks(written(stalled.export(), options))) == expected


def test_an_empty_capture_gives_a_document() -> None:
    document = written(stalled.export([], cpu=False))
    assert [(each["samples"], each["weights"]) for each in document["profiles"]] == [([], [])]


def test_hostile_names_stay_names() -> None:
    document = written(stalled.hostile())
    assert document["profiles"][0]["endValue"] == sum(range(1, len(stalled.HOSTILE) + 1))
    assert all(each["name"].isprintable() for each in document["shared"]["frames"])


@pytest.mark.parametrize(
    ("export", "total"), [pytest.param(stalled.export(), 110, marks=thorough), (stalled.hostile(), 253)]
)
def test_speedscope_shows_every_stall(export: Export, total: int, browser: Browser, tmp_path: Path) -> None:
    # given
    path = tmp_path / "cap.speedscope.json"
    with path.open("w", encoding="utf-8") as out:
        Speedscope().write(export, StackOptions(), out)
    page, problems = _speedscope(browser)
    # when it loads the file and lists functions
    page.set_input_files("input[type=file]", path)
    page.get_by_text("Sandwich").click()
    table = page.locator("tr", has_text="%")
    table.first.wait_for()
    rows = [" ".join(row.split()) for row in table.all_inner_texts()]
    # then shares relate to all stalls, and self samples add up to them
    assert sum(int(found[1]) for row in rows if (found := re.match(r"\d+ \(.+?%\) (\d+) \(", row))) == total
    if total == stalled.SAMPLES:
        assert "72 (65%) 72 (65%) stall: sbid" in rows
        assert "107 (97%) 0 (<0.01%) matmul_[G]" in rows
        page.keyboard.press("n")
        page.get_by_text("CPU samples (2/2)").wait_for()
    assert problems == []
    page.context.close()


def _speedscope(browser: Browser) -> tuple[Page, list[str]]:
    """speedscope's page, which may read its own files only; and the errors on it so far."""
    page = browser.new_context(viewport={"width": 1280, "height": 4000}).new_page()
    problems: list[str] = []
    page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("dialog", lambda dialog: problems.append(f"dialog: {dialog.message}"))
    allowed = (PAGES.as_uri() + "/", "data:", "blob:")
    page.on("request", lambda each: None if each.url.startswith(allowed) else problems.append(f"asked for {each.url}"))
    page.goto((PAGES / "index.html").as_uri())
    return page, problems


def speedscope_total(file: Path) -> int:
    profiles = json.loads(file.read_text())["profiles"]
    return sum(sum(profile["weights"]) for profile in profiles if "GPU" in profile["name"])


TOTALS = {"speedscope": speedscope_total}
