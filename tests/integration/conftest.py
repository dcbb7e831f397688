"""What tests with another user share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from integration.attacking import folder_of_the_other_user


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder of the other user's, below one that everyone may pass."""
    with folder_of_the_other_user() as path:
        yield path
