# SPDX-License-Identifier: Apache-2.0
"""Layouts of drivers as files, where to probe a function, and what `iaprof calibrate` makes of nonsense."""

import dataclasses
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from iaprof.bpf import driver_layout
from iaprof.bpf.driver_layout import (
    MAX_PATH,
    SHIPPED,
    Action,
    Entry,
    Field,
    Layout,
    LayoutError,
    find_layout,
    known_builds,
)
from iaprof.bpf.launches import _packed_layout
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
        {"size": {"path": [8] * (MAX_PATH + 1), "bits": 32}},
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


def test_paths_that_are_too_long_together_are_refused(layout: Layout) -> None:
    long, another, third = (Field((offset,) * MAX_PATH) for offset in (8, 16, 24))
    wide = dataclasses.replace(layout, kernel_class=long, address=(another,), device=None)

    assert len(_packed_layout(wide)) == len(_packed_layout(layout))
    with pytest.raises(LayoutError, match="steps together"):
        _packed_layout(dataclasses.replace(wide, device=(long, third)))


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


def test_others_may_enter_the_folders_of_calibrated_layouts(
    layout: Layout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibrate, "CACHE", tmp_path / "iaprof" / "layouts")
    before = os.umask(0o077)
    try:
        stored = calibrate.store(layout, None)
    finally:
        os.umask(before)
    assert [folder.stat().st_mode & 0o777 for folder in (stored.parent, stored.parent.parent)] == [0o755, 0o755]


def given_away(path: Path) -> None:
    os.chown(path, 65534, 0)


def writable(path: Path) -> None:
    path.chmod(0o666)


def no_file(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.root
@pytest.mark.parametrize("spoil", [given_away, writable, no_file])
def test_a_layout_that_a_stranger_could_have_written_is_not_believed(
    layout: Layout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spoil: Callable[[Path], None]
) -> None:
    monkeypatch.setattr(driver_layout, "CACHE", tmp_path)
    calibrated = dataclasses.replace(layout, build_id=layout.build_id[::-1])
    path = tmp_path / f"{calibrated.build_id}.json"
    path.write_text(calibrated.to_json())
    assert calibrated.build_id in known_builds()

    spoil(path)

    with pytest.raises(LayoutError, match="others than root and you can change it"):
        find_layout(calibrated.build_id)
    assert calibrated.build_id not in known_builds() and layout.build_id in known_builds()


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
