"""What tests in several folders share: a browser, the process that reads files which name CPU frames, what is slow."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from iaprof.symbols.symbolizers.binaries import Binaries

if TYPE_CHECKING:
    from playwright.sync_api import Browser

UNIT = Path(__file__).parent
SLOW = (
    "cli", "project", "report/fleet", "report/join/test_crowds.py", "report/join/test_joining.py",
    "report/test_archive.py", "formats/test_hostile_captures.py", "formats/test_hostile_python.py",
    "formats/test_names_in_every_field.py", "gpu/test_second_vendor.py", "symbols/test_split_dwarf.py",
    "timelines/reading/test_expansion.py", "writers/test_html_stacks.py",
)  # fmt: skip
"""Folders and files whose tests start the command, browsers or clusters, or read much: `make unit` leaves them out."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = [UNIT / each for each in SLOW]
    for item in items:
        if any(place in (item.path, *item.path.parents) for place in places):
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="module")
def binaries(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Binaries]:
    with Binaries(tmp_path_factory.mktemp("cache")) as made:
        with open("/proc/self/exe", "rb") as file:
            made.facts(file.fileno())  # starts the child, which takes descriptors
        yield made


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    from browser import chromium

    with chromium() as made:
        yield made
