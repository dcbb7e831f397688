"""Tasks in this process, for tests that are not about workers: starting these takes longer than most tests."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from iaprof.report.fleet import engines
from iaprof.report.fleet.tasks import Answer, run


class Here:
    """An engine without processes."""

    workers = 2

    def answers(self, tasks: Iterable[engines.Task]) -> Iterator[Answer]:
        return map(run, tasks)

    def close(self) -> None:
        pass


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    open_engine = engines.open_engine
    monkeypatch.setattr(
        engines, "open_engine", lambda cluster, *limits: open_engine(cluster, *limits) if cluster else Here()
    )


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's cache that the tests of a file share: making the profiles in it would take most of their time."""
    return tmp_path_factory.mktemp("kept")
