"""What tests in several folders share: a browser, the process that reads files which name CPU frames, what is slow."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from iaprof.sandbox import parent
from iaprof.symbols.symbolizers.binaries import Binaries
from limits import MEASURED
from unit.forked_readers import ForkedReader

if TYPE_CHECKING:
    from playwright.sync_api import Browser

UNIT = Path(__file__).parent
SLOW = (
    "cli", "formats/test_hostile_captures.py", "formats/test_hostile_python.py",
    "formats/test_names_in_every_field.py", "formats/test_parts.py", "gpu/test_second_vendor.py", "project",
    "record/capture/test_dumped.py", "record/test_check.py", "record/test_check_pythons.py", "report/fleet",
    "report/gpu/test_decoder.py", "report/gpu/test_gpu_module.py", "report/join/test_crowds.py",
    "report/join/test_join_reference.py", "report/join/test_joining.py", "report/join/test_seen.py",
    "report/test_archive.py", "report/test_merge.py", "report/test_query.py", "report/together/test_clocks.py",
    "sandbox/test_deadline.py", "sandbox/test_sandbox.py", "symbols/names/test_generated.py",
    "symbols/names/test_local_files.py", "symbols/test_binaries.py", "symbols/test_outermost.py",
    "symbols/test_plt.py", "symbols/test_split_dwarf.py", "symbols/unwind/test_cfi.py",
    "symbols/unwind/test_unwind_walk.py", "symbols/unwind/test_walk_by_cfi.py",
    "timelines/reading/perfetto/test_hostile.py", "timelines/reading/test_expansion.py",
    "timelines/reading/test_block_columns.py", "timelines/reading/test_children.py", "timelines/test_grouped.py",
    "writers/test_flame_svg.py", "writers/test_html_page.py", "writers/test_html_stacks.py",
    "writers/test_pictures_of_guesses.py", "writers/test_readable.py", "writers/test_speedscope.py",
    "writers/test_traces_page.py",
)  # fmt: skip
"""Folders and files whose tests start the command, browsers or clusters, or read much: `make unit` leaves them out."""

STARTING = ("report/gpu/test_decoder.py", "report/gpu/test_gpu_module.py", "sandbox")
"""Those whose tests are about how reader processes start, and how they end."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {UNIT / each for each in SLOW}
    slow = {path: not places.isdisjoint((path, *path.parents)) for path in {item.path for item in items}}
    for item in items:
        if slow[item.path]:
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def forked_readers() -> Iterator[None]:
    yield
    ForkedReader.end()


@pytest.fixture(autouse=True, scope="module")
def readers_are_forks(request: pytest.FixtureRequest, forked_readers: None) -> Iterator[None]:
    """Readers start quickly in tests that are not about how they start, unless it is measured how long all takes."""
    is_about_them = any(UNIT / place in (request.path, *request.path.parents) for place in STARTING)
    with pytest.MonkeyPatch.context() as patch:
        if not is_about_them and MEASURED not in os.environ:
            patch.setattr(parent, "Worker", ForkedReader)
        yield


@pytest.fixture(scope="module")
def binaries(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Binaries]:
    with Binaries(tmp_path_factory.mktemp("cache")) as made:
        with open("/proc/self/exe", "rb") as file:
            made.facts(file.fileno())  # starts the child, which takes descriptors
        yield made


@pytest.fixture(scope="session")
def shared_browser() -> Iterator[tuple[Browser, asyncio.AbstractEventLoop]]:
    """A browser for all files, as starting one takes a second of CPU time, and the loop that playwright has running."""
    from browser import chromium

    with chromium() as made:
        loop = asyncio.get_running_loop()
        asyncio._set_running_loop(None)
        yield made, loop
        asyncio._set_running_loop(loop)


@pytest.fixture(scope="module")
def browser(shared_browser: tuple[Browser, asyncio.AbstractEventLoop]) -> Iterator[Browser]:
    """The browser, while the loop is its own: tests of other files have loops of theirs."""
    made, loop = shared_browser
    asyncio._set_running_loop(loop)
    yield made
    asyncio._set_running_loop(None)
