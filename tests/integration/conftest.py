"""What tests with another user share."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from integration.attacking import folder_of_the_other_user


@pytest.fixture(autouse=True, scope="session")
def as_from_a_terminal() -> None:
    """Recorders end by SIGHUP, unless nohup has them ignore it; so whoever runs the tests with it must not matter."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder of the other user's, below one that everyone may pass."""
    with folder_of_the_other_user() as path:
        yield path
