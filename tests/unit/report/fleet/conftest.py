"""Tasks in this process, for tests that are not about workers: starting these takes longer than most tests."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

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
