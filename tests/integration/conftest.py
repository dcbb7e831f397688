"""What tests share that record: a machine on which others record, too, and another user."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from integration.attacking import folder_of_the_other_user


@pytest.fixture(autouse=True, scope="session")
def addresses_of_its_own() -> Iterator[None]:
    """Places modules where no other worker's are.

    A recorder sees all launches of the machine, and stalls say an address but no process: were two workers' kernels at
    one address, each would share its stalls out to the other's launches. Modules lie at the upper end of a heap of
    4 GiB, and a test places them up to some MiB lower. A worker's begin 64 MiB below those of the one before; nobody's
    are where they are without any of this.
    """
    with pytest.MonkeyPatch.context() as patch:
        worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
        patch.setenv("STANDIN_ADDRESS_DELTA", str(-(worker + 1) * (64 << 20)))
        yield


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder of the other user's, below one that everyone may pass."""
    with folder_of_the_other_user() as path:
        yield path
