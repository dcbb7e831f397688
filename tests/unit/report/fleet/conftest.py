"""Tasks in this process, for tests that are not about workers, as starting these takes longer; and a Dask cluster."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from iaprof.report.fleet import engines, processes
from iaprof.report.fleet.cluster import Cluster
from iaprof.report.fleet.tasks import Answer, run


class Here:
    """An engine without processes."""

    workers = 2

    def answers(self, tasks: Iterable[processes.Task]) -> Iterator[Answer]:
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


@pytest.fixture(scope="module")
def dask_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A cluster of Dask's with two workers, whose sockets are of no use to others: it has TLS, and no page for HTTP."""
    dask, distributed = pytest.importorskip("dask"), pytest.importorskip("distributed")
    keys = distributed.Security.temporary()
    own = [f"{role}.{part}" for role in ("client", "scheduler", "worker") for part in ("cert", "key")]
    settings = {
        **{f"distributed.comm.tls.{name}": getattr(keys, f"tls_{name}".replace(".", "_")) for name in own},
        "distributed.comm.tls.ca-file": keys.tls_ca_file,
        "distributed.scheduler.http.routes": [],
        "distributed.worker.http.routes": [],
    }
    with (
        dask.config.set(settings),
        distributed.LocalCluster(
            n_workers=2,
            threads_per_worker=1,
            protocol="tls",
            dashboard_address=None,
            local_directory=str(tmp_path_factory.mktemp("dask")),
            silence_logs=logging.CRITICAL,
        ) as started,
    ):
        yield started


@pytest.fixture(scope="module")
def cluster(dask_cluster: Any) -> Iterator[Cluster]:
    with Cluster(dask_cluster.scheduler_address) as connected:
        yield connected
