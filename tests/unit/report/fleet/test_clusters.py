"""Dask's clusters that are not as they should be: workers that end or hang, and schedulers of other versions."""

from __future__ import annotations

import contextlib
import operator
import os
import pickle
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from iaprof.basics.errors import IaprofError
from iaprof.report.fleet import cluster as clusters
from iaprof.report.fleet.cluster import Cluster
from iaprof.report.fleet.partial import nothing
from iaprof.report.fleet.processes import Processes
from iaprof.report.fleet.tasks import Answer, run
from iaprof.report.fleet.totals import Summary
from thorough import thorough, usually
from unit.report.fleet.fleets import SAMPLES
from unit.report.fleet.test_engines import asked, rows


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


@thorough
@pytest.mark.parametrize("happens", [restart, stop_for_a_while])
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
            status = Path(f"/proc/{pid}/status").read_text()
            # A child's own child runs a vendor's decoder (sandbox/programs.py), and has other limits.
            if _is_sandbox(pid) and not _is_sandbox(int(status.partition("PPid:\t")[2].split()[0])):
                found[pid] = "Seccomp:\t2\n" in status
    return found


def _is_sandbox(pid: int) -> bool:
    return b"iaprof.sandbox.child" in Path(f"/proc/{pid}/cmdline").read_bytes()


@pytest.mark.parametrize("engine", usually(["cluster"], ["processes", "cluster"]))
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
            r"the scheduler at tls://\S+ has distributed 2020.1.0, and this is",
        ),
        ({"packages": {}}, r"what answers at tls://\S+ is not a Dask scheduler, or has another version"),
        (None, r"what answers at tls://\S+ is not a Dask scheduler, or has another version"),
    ],
)
def test_a_scheduler_of_another_version_is_one_sentence(
    dask_cluster: Any, told: Any, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(dask_cluster.scheduler.handlers, "versions", lambda **_: told)
    with pytest.raises(IaprofError, match=said):
        Cluster(dask_cluster.scheduler_address)


def test_workers_without_iaprof_are_one_sentence(dask_cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*_: object) -> None:
        raise ModuleNotFoundError("No module named 'iaprof'\nand more")

    monkeypatch.setattr("distributed.Client.run", run)
    with pytest.raises(IaprofError, match=r"cannot run iaprof \S+ \(No module named 'iaprof'\): install it there"):
        Cluster(dask_cluster.scheduler_address)


def test_what_answers_nothing_is_no_scheduler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clusters, "_CONNECT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        with pytest.raises(IaprofError, match=f"no scheduler answers at tcp://127.0.0.1:{port}: start one with"):
            Cluster(f"tcp://127.0.0.1:{port}")


def test_no_room_for_the_threads_of_a_client_is_one_sentence(
    dask_cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("distributed.Client", refuse)
    with pytest.raises(IaprofError, match=r"^--cluster tls://\S+ cannot be used: can't start new thread$"):
        Cluster(dask_cluster.scheduler_address)


class Unreadable:
    """What a machine with other packages sends, which this one cannot make of its pickle."""

    def __reduce__(self) -> tuple[Any, ...]:
        return operator.attrgetter("gone"), (1,)


def _raises(*_: object) -> None:
    raise ModuleNotFoundError("No module named 'numpy._core'\nand more")


def _changed(change: Callable[[Any], Any]) -> Callable[..., list[Any]]:
    def answered(_: str, task: bytes, *limits: object) -> list[Any]:
        return [change(run(pickle.loads(task)))]

    return answered


def _with_rows(**columns: Callable[[Any], Any]) -> Callable[..., list[Any]]:
    def change(answer: Any) -> Any:
        rows = answer.partial.rows
        changed = replace(rows, **{name: of(getattr(rows, name)) for name, of in columns.items()})
        return replace(answer, partial=replace(answer.partial, rows=changed))

    return _changed(change)


BROKEN: dict[str, tuple[Callable[..., Any], str]] = {
    "nothing": (lambda *_: None, "not a list of answers"),
    "others": (lambda *_: [None], "not a list of answers"),
    "none": (lambda *_: [], "0 of 1 captures"),
    "an error": (_raises, r"failed \(ModuleNotFoundError: No module named 'numpy._core'\): install the same packages"),
    "unreadable": (lambda *_: [Unreadable()], r"failed \(AttributeError: "),
    "another capture": (
        _changed(lambda _: Answer(nothing([Summary("other", "", problem="x")]))),
        "not fit the task",
    ),
    "another segment": (_changed(lambda answer: replace(answer, unread="../x")), "not fit the task"),
    "a text": (_changed(lambda answer: replace(answer, segment="x")), "not fit the task"),
    "no totals": (
        _changed(lambda each: replace(each, partial=replace(each.partial, totals=None))),
        "not fit the task",
    ),
    "no launches": (
        _changed(lambda each: replace(each, partial=replace(each.partial, launches=[1] * len(each.partial.launches)))),
        "'launch' have another type",
    ),
    "launches too far": (
        _with_rows(launch=lambda column: column + 1000),
        "'launch' has numbers of entries",
    ),
    "negative kernels": (
        _with_rows(kernel=lambda column: column - 1000),
        "'kernel' has numbers of entries",
    ),
    "fractions": (_with_rows(counts=lambda column: column * 1.5), "'counts' has another type"),
    "negative samples": (_with_rows(counts=lambda column: -column), "'counts' is negative"),
    "more samples": (_with_rows(counts=lambda column: 2 * column), "its samples do not add up"),
    "a short column": (_with_rows(offset=lambda column: column[1:]), "'offset' has another type or size"),
}


class Done:
    """A task that a broken worker has done."""

    def __init__(self, answer: Callable[[], Any]) -> None:
        self.result = answer


@pytest.mark.parametrize("broken", usually(list(BROKEN)[::4], BROKEN))
def test_a_broken_worker_is_one_sentence(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # given a cluster whose workers answer, after a way through pickle, what no worker of ours does
    answered, said = BROKEN[broken]

    class Client:
        loop = None

        def submit(self, _: object, *arguments: Any, **__: object) -> Done:
            return Done(lambda: pickle.loads(pickle.dumps(answered(*arguments))))

    cluster = object.__new__(Cluster)
    cluster.workers, cluster._client, cluster._address, cluster._limits = 1, Client(), "tcp://x:1", (1, 1.0)
    monkeypatch.setattr("distributed.as_completed", lambda futures, **_: iter(futures))
    # when
    with pytest.raises(IaprofError, match=rf"^a worker of the cluster at tcp://x:1 .*{said}"):
        asked(cluster, *SAMPLES[:2])
