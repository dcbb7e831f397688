"""Dask's clusters that are not as they should be: workers that end or hang, and schedulers of other versions."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from iaprof.basics.errors import IaprofError
from iaprof.report.fleet import cluster as clusters
from iaprof.report.fleet.cluster import Cluster
from iaprof.report.fleet.engines import Processes
from thorough import usually
from unit.report.fleet.fleets import SAMPLES
from unit.report.fleet.test_engines import asked, rows


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster("local:2") as started:
        yield started


@pytest.fixture(scope="module")
def expected() -> set[tuple[object, ...]]:
    with Processes(1) as one:
        return rows(asked(one, SAMPLES[0].parent))


def restart(client: Any) -> None:
    """What a scheduler does whose workers are to have another memory limit, or are moved."""
    client.restart_workers(list(client.scheduler_info()["workers"]))


def stop_for_a_while(client: Any) -> None:
    """A worker that is much slower than the others."""
    pid = next(iter(client.run(os.getpid).values()))
    os.kill(pid, signal.SIGSTOP)
    threading.Timer(2.0, os.kill, (pid, signal.SIGCONT)).start()


@pytest.mark.parametrize("happens", usually([restart], [restart, stop_for_a_while]))
def test_what_happens_to_workers_changes_no_result(
    cluster: Cluster, expected: set[tuple[object, ...]], happens: Callable[[Any], None]
) -> None:
    # given workers that have begun
    begun = threading.Event()
    answers = Cluster.answers

    def watched(self: Cluster, tasks: Any) -> Iterator[Any]:
        for answer in answers(self, tasks):
            begun.set()
            yield answer

    def change() -> None:
        assert begun.wait(60)
        happens(cluster._client)

    changing = threading.Thread(target=change)
    # when
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Cluster, "answers", watched)
        changing.start()
        found = rows(asked(cluster, SAMPLES[0].parent))
    changing.join()
    # then, and afterwards
    assert found == expected
    assert rows(asked(cluster, SAMPLES[0].parent)) == expected


def below(pid: int) -> Iterator[int]:
    """The processes that a process has started, and those that these have."""
    try:
        threads = list(Path(f"/proc/{pid}/task").iterdir())
        children = [int(child) for thread in threads for child in (thread / "children").read_text().split()]
    except OSError:  # it has ended
        return
    for child in children:
        yield child
        yield from below(child)


def confined() -> dict[int, bool]:
    """The processes below this one that read what captures contain, and whether a filter of system calls is on."""
    found = {}
    for pid in below(os.getpid()):
        with contextlib.suppress(OSError):
            if b"iaprof.sandbox.child" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found[pid] = "Seccomp:\t2\n" in Path(f"/proc/{pid}/status").read_text()
    return found


@pytest.mark.parametrize("engine", ["processes", "cluster"])
def test_workers_read_modules_in_sandboxes(engine: str, cluster: Cluster) -> None:
    def last_seen() -> dict[int, bool]:
        last: dict[int, bool] = {}
        ended = threading.Event()

        def watch() -> None:
            while not ended.wait(0.002):
                last.update(confined())

        watching = threading.Thread(target=watch)
        with Processes(1) as one:
            watching.start()
            asked(cluster if engine == "cluster" else one, SAMPLES[0].parent)
            ended.set()
            watching.join()
        return last

    # (on a busy machine one may have ended before it was seen with its filter, but not each time)
    found = last_seen()
    for _ in range(9):
        if not found or all(found.values()):
            break
        found = last_seen()
    assert found and all(found.values())


@pytest.mark.parametrize(
    ("told", "said"),
    [
        (
            {"packages": {"distributed": "2020.1.0"}},
            r"the scheduler at tcp://\S+ has distributed 2020.1.0, and this is",
        ),
        ({"packages": {}}, r"what answers at tcp://\S+ is not a Dask scheduler, or has another version"),
        (None, r"what answers at tcp://\S+ is not a Dask scheduler, or has another version"),
    ],
)
def test_a_scheduler_of_another_version_is_one_sentence(
    cluster: Cluster, told: Any, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler = cluster._client.cluster.scheduler
    monkeypatch.setitem(scheduler.handlers, "versions", lambda **_: told)
    with pytest.raises(IaprofError, match=said):
        Cluster(scheduler.address)


def test_workers_without_iaprof_are_one_sentence(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*_: object) -> None:
        raise ModuleNotFoundError("No module named 'iaprof'\nand more")

    monkeypatch.setattr(type(cluster._client), "run", run)
    with pytest.raises(IaprofError, match=r"cannot run iaprof \S+ \(No module named 'iaprof'\): install it there"):
        Cluster(cluster._client.cluster.scheduler.address)


def test_what_answers_nothing_is_no_scheduler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clusters, "_CONNECT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        with pytest.raises(IaprofError, match=f"no scheduler answers at tcp://127.0.0.1:{port}: start one with"):
            Cluster(f"tcp://127.0.0.1:{port}")
