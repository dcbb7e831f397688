"""Workers: what they answer does not depend on how many there are, where they are, or which of them die."""

from __future__ import annotations

import concurrent.futures
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

import iaprof
from iaprof.basics.errors import IaprofError, UsageError
from iaprof.report.fleet import engines, processes
from iaprof.report.fleet.cache import Cache
from iaprof.report.fleet.cluster import Cluster
from iaprof.report.fleet.fleet import ask
from iaprof.report.fleet.mapping import MapOptions
from iaprof.report.fleet.partial import Partial
from iaprof.report.fleet.processes import Engine, Processes
from iaprof.report.fleet.sources import find_sources
from iaprof.report.fleet.tasks import MapTask, Question, ReadTask
from iaprof.sandbox.memory import DEFAULT_BYTES
from thorough import thorough
from unit.report.fleet.fleets import SAMPLES
from waiting import LONGEST_WAIT_S

ALL = Question(frozenset({"launch", "kernel", "code", "device", "offset"}))


def asked(engine: Engine, *words: str | Path) -> Partial:
    sources = find_sources([str(word) for word in words])
    return ask(sources, ALL, MapOptions(), Cache("none", MapOptions()), engine)


def rows(total: Partial) -> set[tuple[object, ...]]:
    """Samples by what the numbers of launches and the like mean, which the order of the answers decides."""
    found = total.rows
    columns = zip(found.launch, found.kernel, found.code, found.offset, found.counts.tolist(), strict=True)
    return {
        (total.launches[launch], total.kernels[kernel], total.codes[code], int(offset), _named(total, counts))
        for launch, kernel, code, offset, counts in columns
    }


def _named(total: Partial, counts: list[int]) -> frozenset[tuple[str, int]]:
    return frozenset((reason, count) for reason, count in zip(total.reasons, counts, strict=True) if count)


@pytest.fixture(scope="module")
def expected() -> Iterator[set[tuple[object, ...]]]:
    with Processes(1) as one:
        found = rows(asked(one, SAMPLES[0].parent))
    assert len(found) > 500
    yield found


@thorough
def test_more_processes_answer_the_same(expected: set[tuple[object, ...]]) -> None:
    with Processes(3) as three:
        assert rows(asked(three, SAMPLES[0].parent)) == expected


@thorough
def test_a_process_that_is_killed_is_replaced(
    expected: set[tuple[object, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    killed: list[int] = []
    give = Processes._give

    def give_and_kill(self: Processes, task: processes.Task, deaths: int) -> None:
        give(self, task, deaths)
        if len(killed) < 3:
            worker = list(self._running.values())[-1][0]
            os.kill(worker.pid, signal.SIGKILL)
            killed.append(worker.pid)

    monkeypatch.setattr(Processes, "_give", give_and_kill)
    with Processes(2) as two:
        assert rows(asked(two, SAMPLES[0].parent)) == expected
    assert len(killed) == 3


def test_a_capture_that_kills_each_process_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    give = Processes._give

    def give_and_kill(self: Processes, task: processes.Task, deaths: int) -> None:
        give(self, task, deaths)
        assert isinstance(task, MapTask)
        if any(source.name == str(SAMPLES[0]) for source, _ in task.sources):
            os.kill(list(self._running.values())[-1][0].pid, signal.SIGKILL)

    monkeypatch.setattr(Processes, "_give", give_and_kill)
    with Processes(2) as two:
        total = asked(two, *SAMPLES[:4])
    assert {each.file: each.problem for each in total.totals.broken} == {
        str(SAMPLES[0]): f"the process that read {SAMPLES[0]} died, as happens when memory runs out"
    }
    assert (total.totals.captures, len(total.totals.broken)) == (4, 1)


def test_processes_end_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Processes(2)
    pids: list[int] = []

    def close_soon() -> None:
        pids.extend(worker.pid for worker, *_ in engine._running.values())
        raise KeyboardInterrupt

    monkeypatch.setattr(processes, "wait", lambda *_: close_soon())
    with pytest.raises(KeyboardInterrupt), engine:
        asked(engine, SAMPLES[0].parent)
    assert pids
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@thorough
def test_a_cluster_answers_the_same(cluster: Cluster, expected: set[tuple[object, ...]]) -> None:
    assert cluster.workers == 2
    assert rows(asked(cluster, SAMPLES[0].parent)) == expected


def test_a_cluster_of_which_a_worker_is_killed_answers_the_same(
    cluster: Cluster, expected: set[tuple[object, ...]]
) -> None:
    pid = next(iter(cluster._client.run(os.getpid).values()))
    killing = threading.Timer(0.2, os.kill, (pid, signal.SIGKILL))
    killing.start()
    assert rows(asked(cluster, SAMPLES[0].parent)) == expected
    killing.join()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.parametrize("error", [concurrent.futures.CancelledError, ConnectionResetError])
def test_a_scheduler_that_goes_away_is_one_sentence(
    cluster: Cluster, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(type(cluster._client), "submit", lost)
    with pytest.raises(IaprofError, match=r"the scheduler at tls://\S+ is gone"):
        asked(cluster, SAMPLES[0])


def test_there_are_as_many_processes_as_memory_has_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    monkeypatch.setattr(engines, "limit", lambda: 2 << 30)
    for gigabytes, expected in ((0, 1), (9, 4), (1024, 64)):
        monkeypatch.setattr(engines, "available", lambda gigabytes=gigabytes: gigabytes << 30)
        assert engines.open_engine(None).workers == expected


def test_processes_of_this_machine_are_as_many_as_the_user_says(monkeypatch: pytest.MonkeyPatch) -> None:
    # given a machine without Dask, and with little memory
    for name in ("dask", "distributed"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr(engines, "available", lambda: 0)
    monkeypatch.setattr(engines, "limit", lambda: 1 << 30)
    # when, then
    engine = engines.open_engine("local:3")
    assert (type(engine), engine.workers) == (Processes, 3)
    with closing(engine):
        assert not asked(engine, *SAMPLES[:4]).totals.broken
    with pytest.raises(IaprofError, match=r"^--cluster needs Dask: "):
        engines.open_engine("tcp://127.0.0.1:1")


@pytest.mark.parametrize("number", ["", "many", "0", "-1", "1025", "\u00b2", pytest.param("9" * 5000, id="long")])
def test_a_number_of_processes_is_from_1_to_1024(number: str) -> None:
    with pytest.raises(UsageError, match=r"^--cluster takes local: and a number of processes, not local:"):
        engines.open_engine(f"local:{number}")


def test_a_segment_that_kills_each_process_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    give = Processes._give

    def give_and_kill(self: Processes, task: processes.Task, deaths: int) -> None:
        give(self, task, deaths)
        os.kill(list(self._running.values())[-1][0].pid, signal.SIGKILL)

    monkeypatch.setattr(Processes, "_give", give_and_kill)
    with Processes(1) as one:
        (answer,) = one.answers([ReadTask("segment", b"", {}, ALL)])
    assert answer.unread == "segment"


@thorough
def test_a_process_that_hangs_is_ended_and_its_capture_named(
    expected: set[tuple[object, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    give = Processes._give

    def give_and_stop(self: Processes, task: processes.Task, deaths: int) -> None:
        give(self, task, deaths)
        assert isinstance(task, MapTask)
        if any(source.name == str(SAMPLES[0]) for source, _ in task.sources):
            os.kill(list(self._running.values())[-1][0].pid, signal.SIGSTOP)

    monkeypatch.setattr(Processes, "_give", give_and_stop)
    with Processes(1, timeout_s=8) as one:
        total = asked(one, *SAMPLES[:3])
    assert [(each.file, each.problem) for each in total.totals.broken] == [
        (str(SAMPLES[0]), f"{SAMPLES[0]} takes longer than 8 s (--timeout)")
    ]
    assert total.totals.captures == 3


def test_a_segment_whose_reading_hangs_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    give = Processes._give

    def give_and_stop(self: Processes, task: processes.Task, deaths: int) -> None:
        give(self, task, deaths)
        os.kill(list(self._running.values())[-1][0].pid, signal.SIGSTOP)

    monkeypatch.setattr(Processes, "_give", give_and_stop)
    with Processes(1, timeout_s=0.2) as one:
        (answer,) = one.answers([ReadTask("segment", b"", {}, ALL)])
    assert answer.unread == "segment"


def test_a_process_that_has_nothing_to_do_ends_and_is_replaced() -> None:
    with Processes(1, idle_s=0.2) as one:
        assert not asked(one, SAMPLES[0]).totals.broken
        ((worker, _),) = one._idle
        assert worker.wait(LONGEST_WAIT_S)
        assert not asked(one, SAMPLES[0]).totals.broken


def test_a_process_ends_with_its_parent() -> None:
    """A worker of Dask that is killed leaves none, whatever it does."""
    with Processes(1) as one:
        sources = [(source, source.name) for source in find_sources(list(map(str, SAMPLES)))]
        one._give(MapTask(sources, {name: [name] for _, name in sources}, MapOptions(), ALL), 0)
        ((pipe, (worker, *_)),) = one._running.items()
        pipe.close()
        assert worker.wait(LONGEST_WAIT_S)
        assert worker.status == 3
        one._running.clear()


def test_workers_of_another_version_are_one_sentence(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = iaprof.__version__
    monkeypatch.setattr(iaprof, "__version__", "0.0.1")
    with pytest.raises(IaprofError, match=f"a worker has iaprof {ours}, and this is 0.0.1: install one version"):
        asked(cluster, SAMPLES[0])
    monkeypatch.setattr(cluster, "close", lambda: None)
    with pytest.raises(IaprofError, match=f"workers at x have iaprof {ours}, and this is 0.0.1: install one version"):
        cluster._check_versions("x")


@thorough
def test_what_a_worker_of_a_cluster_starts_has_the_memory_limit(cluster: Cluster) -> None:
    def limits() -> set[str]:
        """The limits of the workers' children that do tasks."""
        workers = [Path(f"/proc/{pid}/task") for pid in cluster._client.run(os.getpid).values()]
        children = [(task / "children").read_text().split() for worker in workers for task in worker.iterdir()]
        found = set()
        for pid in (child for several in children for child in several):
            if b"fleet.processes" in Path(f"/proc/{pid}/cmdline").read_bytes():
                (line,) = (line for line in Path(f"/proc/{pid}/limits").read_text().splitlines() if "data size" in line)
                found.add(line.split()[3])
        return found

    seen = []
    for bytes_ in (700 << 20, 900 << 20):
        cluster._limits = bytes_, 600.0
        assert not asked(cluster, *SAMPLES).totals.broken
        seen.append(limits())
    cluster._limits = DEFAULT_BYTES, 600.0
    assert "unlimited" not in seen[0] | seen[1]
    assert max(map(int, seen[1])) - max(map(int, seen[0])) > 100 << 20


@thorough
def test_a_cluster_gives_a_capture_no_more_than_its_time(cluster: Cluster) -> None:
    cluster._limits = DEFAULT_BYTES, 0.001
    try:
        total = asked(cluster, SAMPLES[0])
    finally:
        cluster._limits = DEFAULT_BYTES, 600.0
    assert [each.problem for each in total.totals.broken] == [f"{SAMPLES[0]} takes longer than 0.001 s (--timeout)"]
