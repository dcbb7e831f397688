# SPDX-License-Identifier: Apache-2.0
"""Layouts of drivers as files, where to probe a function, and what `iaprof calibrate` makes of nonsense."""

import dataclasses
import json
from pathlib import Path

import pytest

from iaprof.bpf import driver_layout
from iaprof.bpf.driver_layout import MAX_STEPS, SHIPPED, Action, Entry, Layout, LayoutError, find_layout
from iaprof.record import calibrate
from iaprof.record.calibrate_entry import probe_offset

SHIPPED_FILES = sorted(SHIPPED.glob("*.json"))


@pytest.fixture
def layout() -> Layout:
    return Layout.from_json(SHIPPED_FILES[0].read_bytes())


@pytest.mark.parametrize("path", SHIPPED_FILES, ids=lambda path: path.stem[:8])
def test_each_layout_that_ships_is_found_by_its_name(path: Path) -> None:
    found = find_layout(path.stem)

    assert found and found.build_id == path.stem
    assert Layout.from_json(found.to_json()) == found
    assert {entry.action for entry in found.entries} >= {Action.LAUNCH, Action.KERNEL_GONE}


@pytest.mark.parametrize(
    "wrong",
    [
        {"build_id": "../../etc/passwd"},
        {"entries": []},
        {"classes": []},
        {"classes": list(range(9))},
        {"address": []},
        {"size": {"path": [], "bits": 32}},
        {"size": {"path": [8] * (MAX_STEPS + 1), "bits": 32}},
        {"size": {"path": [-8], "bits": 32}},
        {"size": {"path": [8], "bits": 16}},
        {"size": {"path": ["8"], "bits": 32}},
        {"binary": None},
        {"module_bias": -8},
        {"name": None},
    ],
    ids=str,
)
def test_what_is_no_layout_is_refused(layout: Layout, wrong: dict[str, object]) -> None:
    told = json.loads(layout.to_json()) | wrong

    with pytest.raises(LayoutError):
        Layout.from_json(json.dumps(told))


@pytest.mark.parametrize("text", ["", "[]", "{}", "null", '"layout"', "[" * 100_000, "\0"], ids=lambda text: text[:9])
def test_what_is_no_json_object_is_refused(text: str) -> None:
    with pytest.raises(LayoutError):
        Layout.from_json(text)


def test_an_array_of_kernels_needs_its_length(layout: Layout) -> None:
    entry = Entry("many", Action.LAUNCH_MANY, 0x1000, handle=2)

    with pytest.raises(LayoutError):
        Layout.from_json(dataclasses.replace(layout, entries=(*layout.entries, entry)).to_json())


@pytest.mark.parametrize("action", [Action.KERNEL_GONE, Action.MODULE_GONE])
def test_what_ends_a_handle_has_to_be_seen(layout: Layout, action: Action) -> None:
    entries = tuple(entry for entry in layout.entries if entry.action is not action)

    with pytest.raises(LayoutError):
        Layout.from_json(dataclasses.replace(layout, entries=entries).to_json())


def test_calibrated_layouts_are_found_and_shipped_ones_come_first(
    layout: Layout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver_layout, "CACHE", tmp_path)
    monkeypatch.setattr(calibrate, "CACHE", tmp_path)
    calibrated = dataclasses.replace(layout, build_id=layout.build_id[::-1], version="calibrated")

    stored = calibrate.store(calibrated, None)
    calibrate.store(dataclasses.replace(layout, version="calibrated"), None)

    assert stored.parent == tmp_path and stored.stat().st_mode & 0o777 == 0o644
    assert find_layout(calibrated.build_id) == calibrated
    assert find_layout(layout.build_id) == layout
    assert find_layout("../" + calibrated.build_id) is None
    stored.write_text("{}")
    with pytest.raises(LayoutError, match="remove it"):
        find_layout(calibrated.build_id)


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("f30f1efa 4157", 4),  # endbr64; push %r15
        ("4157", 0),
        ("f30f1efa 4883ec78 55", 0),  # sub comes first
        ("f30f1efa 4885ff 0f8440010000", 7),  # test %rdi,%rdi; je
        ("f30f1efa 4d85c0 7402", 7),  # test %r8,%r8; je
        ("f30f1efa 4885ff 4883ec08", 0),
        ("f30f1efa 488507 7402", 0),  # test of memory
        ("f30f1efa 48c7c100000000", 0),
        ("f30f1efa e900000000", 4),
        ("f30f1efa ff2500000000", 0),  # jmp through memory
        ("f30f1efa 90", 4),
        ("", 0),
    ],
)
def test_a_probe_goes_where_the_kernel_emulates_and_nothing_has_changed(code: str, expected: int) -> None:
    assert probe_offset(bytes.fromhex(code)) == expected


@pytest.mark.parametrize(
    "told",
    [
        [],
        {},
        {"version": "1", "functions": {}},
        {"version": "1", "functions": {"zeKernelDestroy": "x"}, "candidates": {}},
        {"version": "1", "functions": {}, "candidates": {"module": [[[8]]]}},
        {"version": "1", "functions": {}, "candidates": {"size": [[[]]]}},
        {"version": "1", "functions": {}, "candidates": {"size": [7]}},
        {"version": "1", "functions": {}, "candidates": []},
    ],
    ids=str,
)
def test_nonsense_of_a_driver_is_told_from_an_answer(told: object) -> None:
    with pytest.raises((ValueError, KeyError, TypeError, AttributeError)):
        calibrate._read(told)
