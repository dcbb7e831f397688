"""What tests with another user share."""

from __future__ import annotations

from pathlib import Path

import pytest

from integration.attacking import folder_of_the_other_user


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of the other user's, below one that everyone may pass."""
    return folder_of_the_other_user(tmp_path)
