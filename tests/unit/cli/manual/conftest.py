"""The files that the build installs."""

from pathlib import Path

import pytest

from iaprof.cli.main import app
from iaprof.cli.manual.files import files


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A prefix with man pages and completions."""
    prefix = tmp_path_factory.mktemp("prefix")
    for name, text in files(app, "0.1.0", "2026-11-25").items():
        path = prefix / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return prefix
