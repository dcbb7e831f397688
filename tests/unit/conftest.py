"""What tests in several folders share: a browser, and the process that reads files which name CPU frames."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from iaprof.symbols.symbolizers.binaries import Binaries

if TYPE_CHECKING:
    from playwright.sync_api import Browser


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
