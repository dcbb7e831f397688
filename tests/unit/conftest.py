"""What tests of the files that name CPU frames share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from iaprof.symbols.names.binaries import Binaries


@pytest.fixture(scope="module")
def binaries(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Binaries]:
    with Binaries(tmp_path_factory.mktemp("cache")) as made:
        with open("/proc/self/exe", "rb") as file:
            made.facts(file.fileno())  # starts the child, which takes descriptors
        yield made
