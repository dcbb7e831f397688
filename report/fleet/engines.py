"""Where tasks run: in processes of this machine, or on a Dask cluster. Answers come in any order."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import importlib
import logging
import os
import socket
from collections import deque
from collections.abc import Iterable, Iterator
from multiprocessing.connection import Connection, wait
from typing import Any, Protocol

from iaprof.basics.errors import IaprofError, UsageError
from iaprof.formats.capture.limits import allow_large, is_large_allowed
from iaprof.formats.profile import clean
from iaprof.report.fleet.sources import EXTRA
from iaprof.report.fleet.tasks import Answer, MapTask, ReadTask, given_up, run
from iaprof.sandbox.closing import Closing
from iaprof.sandbox.memory import DEFAULT_BYTES, MALLOC_ENVIRONMENT, available, limit, limit_memory
from iaprof.sandbox.worker import Worker

LOCAL = "local:"
Task = MapTask | ReadTask
_MOST_DEATHS = 3  # of workers with the same task
_CONNECT_S = 10
_EACH = 2  # tasks that a Dask worker has at once, so that it does not wait for the next one


class Engine(Protocol):
    """Runs tasks."""

    workers: int

    def answers(self, tasks: Iterable[Task]) -> Iterator[Answer]:
        """Runs the tasks, and yields their answers as they come.

        Raises:
            IaprofError: the workers cannot go on.
        """

    def close(self) -> None:
        """Ends the workers, whatever they do."""


def open_engine(cluster: str | None) -> Engine:
    """Opens the engine that the user wants.

    Args:
        cluster: the address of Dask's scheduler, or `local:N` for a cluster of N workers here; None: processes.

    Raises:
        UsageError: it is neither.
        IaprofError: the scheduler does not answer, or is of another version.
    """
    if cluster is not None:
        return Cluster(cluster)
    # Each process may take as much memory as this one (--memory-limit): not more of them than memory has room for.
    return Processes(max(1, min(len(os.sched_getaffinity(0)), available() // (limit() or DEFAULT_BYTES))))


class Processes(Closing):
    """Processes of this machine. One that dies, as happens when memory runs out, is replaced, and its task repeated."""

    def __init__(self, workers: int) -> None:
        """Starts no process yet."""
        self.workers = workers
        self._running: dict[Connection[Any, Any], tuple[Worker, Task, int]] = {}
        self._idle: list[tuple[Worker, Connection[Any, Any]]] = []

    def answers(self, tasks: Iterable[Task]) -> Iterator[Answer]:
        """See Engine."""
        left = iter(tasks)
        again: deque[tuple[Task, int]] = deque()
        while True:
            while len(self._running) < self.workers:
                task, deaths = again.popleft() if again else (next(left, None), 0)
                if task is None:
                    break
                self._give(task, deaths)
            if not self._running:
                return
            for pipe in wait(list(self._running)):
                assert isinstance(pipe, Connection)
                worker, task, deaths = self._running.pop(pipe)
                try:
                    found: Any = pipe.recv()
                except (EOFError, OSError):
                    worker.close()
                    pipe.close()
                    yield from self._after_death(task, deaths + 1, again)
                    continue
                self._idle.append((worker, pipe))
                if isinstance(found, BaseException):
                    raise found
                yield found

    def _give(self, task: Task, deaths: int) -> None:
        worker, pipe = self._idle.pop() if self._idle else self._start()
        self._running[pipe] = worker, task, deaths
        with contextlib.suppress(OSError):  # it died: `wait` finds its end
            pipe.send(task)

    def _start(self) -> tuple[Worker, Connection[Any, Any]]:
        try:
            worker = Worker(
                "iaprof.report.fleet.engines:work",
                limit() or 0,
                int(is_large_allowed()),
                channel=socket.SOCK_STREAM,
                environment=os.environ | MALLOC_ENVIRONMENT,
                errors=None,
            )
        except OSError as error:
            raise IaprofError(f"no process can be started for the captures: {error.strerror}") from error
        return worker, Connection(worker.channel.detach())

    def _after_death(self, task: Task, deaths: int, again: deque[tuple[Task, int]]) -> Iterator[Answer]:
        """Repeats a dead worker's task, its captures one by one if it keeps dying, to find the one that kills it."""
        if deaths < _MOST_DEATHS:
            again.append((task, deaths))
        elif answer := given_up(task, "the process that read"):
            yield answer
        else:
            assert isinstance(task, MapTask)
            again.extend((each, 0) for each in task.divided())

    def close(self) -> None:
        """See Engine."""
        for pipe, (worker, *_) in self._running.items():
            worker.close()
            pipe.close()
        for worker, pipe in self._idle:
            worker.close()
            pipe.close()
        self._running.clear()
        self._idle.clear()


def work(memory_bytes: str, large: str = "0", pipe_fd: int = 0) -> None:
    """A process's main function: does tasks until its parent closes the pipe, or is gone."""
    if int(memory_bytes):
        limit_memory(int(memory_bytes))
    if int(large):
        allow_large()
    with Connection(pipe_fd) as pipe, contextlib.suppress(EOFError, OSError):
        while True:
            task = pipe.recv()
            try:
                answer: Answer | Exception = run(task)
            except Exception as error:  # noqa: BLE001 (`answers` raises it)
                answer = error
            pipe.send(answer)


class Cluster(Closing):
    """A Dask cluster, whose workers need nothing but an iaprof of this version."""

    def __init__(self, address: str) -> None:
        """Connects to the scheduler, or starts a cluster here.

        Raises:
            UsageError: the address is none.
            IaprofError: Dask is missing, the scheduler does not answer, or it or a worker is of another version.
        """
        try:
            distributed: Any = importlib.import_module("distributed")
        except ImportError:
            raise IaprofError(f"--cluster needs Dask: {EXTRA}") from None
        self._opened = contextlib.ExitStack()
        self._address = address
        try:
            place = self._started(distributed, address) if address.startswith(LOCAL) else address
            self._client = self._opened.enter_context(
                distributed.Client(place, timeout=_CONNECT_S, set_as_default=False)
            )
        except (OSError, TimeoutError):
            raise IaprofError(f"no scheduler answers at {clean(address)}: start one with 'dask scheduler'") from None
        except ValueError as error:
            raise UsageError(f"--cluster takes tcp://HOST:PORT or {LOCAL}N: {clean(str(error))}") from None
        self._check_versions(address)
        self.workers = max(len(self._client.scheduler_info()["workers"]), 1)

    def _started(self, distributed: Any, address: str) -> Any:
        number = address.removeprefix(LOCAL)
        if not number.isdigit() or not 0 < int(number) <= 1024:
            raise UsageError(f"--cluster takes {LOCAL} and a number of processes, not {clean(address)}")
        return self._opened.enter_context(
            distributed.LocalCluster(
                n_workers=int(number),
                threads_per_worker=1,
                processes=True,
                dashboard_address=None,
                silence_logs=logging.CRITICAL,  # Ctrl-C ends all at once, of which Dask would tell much
            )
        )

    def _check_versions(self, address: str) -> None:
        try:
            self._client.get_versions(check=True)
            of_workers = set(self._client.run(version).values())
        except (ValueError, ImportError, AttributeError) as error:
            self.close()
            why = clean(str(error).splitlines()[0])
            raise IaprofError(f"the cluster at {clean(address)} has other versions than this machine: {why}") from None
        if others := of_workers - {version()}:
            self.close()
            raise IaprofError(
                f"workers at {clean(address)} have iaprof {', '.join(sorted(others))}, and this is {version()}: "
                "install one version everywhere"
            )

    def answers(self, tasks: Iterable[Task]) -> Iterator[Answer]:
        """See Engine."""
        distributed: Any = importlib.import_module("distributed")
        left = iter(tasks)
        given: dict[Any, Task] = {}

        def give() -> Iterator[Any]:
            for task in left:
                with self._scheduler_stays():
                    future = self._client.submit(run, task, pure=False, retries=_MOST_DEATHS)
                given[future] = task
                yield future
                return

        first = [future for _ in range(_EACH * self.workers) for future in give()]
        running = distributed.as_completed(first, loop=self._client.loop)
        for future in running:
            task = given.pop(future)
            try:
                with self._scheduler_stays():
                    answer = future.result()
                yield answer
            except distributed.KilledWorker:
                if lost := given_up(task, "workers that read"):
                    yield lost
                else:
                    assert isinstance(task, MapTask)
                    for each in task.divided():
                        again = self._client.submit(run, each, pure=False, retries=_MOST_DEATHS)
                        given[again] = each
                        running.add(again)
            for following in give():
                running.add(following)

    @contextlib.contextmanager
    def _scheduler_stays(self) -> Iterator[None]:
        try:
            yield
        except (asyncio.CancelledError, concurrent.futures.CancelledError, OSError):
            raise IaprofError(
                f"the scheduler at {clean(self._address)} is gone: the captures that it had done are kept; try again"
            ) from None

    def close(self) -> None:
        """See Engine."""
        self._opened.close()


def version() -> str:
    """Returns the version of iaprof, in whatever process."""
    import iaprof

    return iaprof.__version__
