"""What runs tasks, and processes of this machine that do. Answers come in any order."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from multiprocessing.connection import Connection, wait
from typing import Any, Protocol

from iaprof.basics.errors import IaprofError
from iaprof.formats.capture.limits import allow_large, is_large_allowed
from iaprof.report.fleet.sources import DEFAULT_TIMEOUT_S
from iaprof.report.fleet.tasks import Answer, MapTask, ReadTask, given_up, run
from iaprof.sandbox.memory import MALLOC_ENVIRONMENT, limit_memory
from iaprof.sandbox.worker import Closing, Worker

Task = MapTask | ReadTask
_PARENT_IS_GONE = 3  # exit code of a process
MOST_DEATHS = 3  # of workers with the same task
ADDRESSES = "tcp://HOST:PORT, tls://HOST:PORT or local:N"
"""What --cluster accepts."""
LOCAL = "local:"


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


class Processes(Closing):
    """Processes of this machine. One that dies, as happens when memory runs out, is replaced, and its task repeated."""

    def __init__(
        self, workers: int, memory_bytes: int = 0, timeout_s: float = DEFAULT_TIMEOUT_S, idle_s: float = 0.0
    ) -> None:
        """Starts no process yet.

        Args:
            workers: how many there are at most.
            memory_bytes: what each may take; 0: there is no limit.
            timeout_s: how long a task may take. One that takes longer is divided, or given up.
            idle_s: how long a process waits for a task before it ends; 0: for ever.
        """
        self.workers = workers
        self._memory_bytes = memory_bytes
        self._timeout_s = timeout_s
        self._idle_s = idle_s
        self._running: dict[Connection[Any, Any], tuple[Worker, Task, int, float]] = {}
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
            for pipe in wait(list(self._running), self._seconds_left()):
                assert isinstance(pipe, Connection)
                worker, task, deaths, _ = self._running.pop(pipe)
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
            yield from self._end_late(again)

    def _give(self, task: Task, deaths: int) -> None:
        worker, pipe = self._idle.pop() if self._idle else self._start()
        self._running[pipe] = worker, task, deaths, time.monotonic() + self._timeout_s
        with contextlib.suppress(OSError):  # it died: `wait` finds its end
            pipe.send(task)

    def _seconds_left(self) -> float:
        """Returns the time until the first process is late."""
        return max(min(deadline for *_, deadline in self._running.values()) - time.monotonic(), 0.0)

    def _end_late(self, again: deque[tuple[Task, int]]) -> Iterator[Answer]:
        """Ends the processes that take too long, and repeats their captures one by one, or gives them up."""
        now = time.monotonic()
        for pipe, (worker, task, _, deadline) in list(self._running.items()):
            if deadline <= now:
                del self._running[pipe]
                worker.close()
                pipe.close()
                yield from self._given_up(task, f"{{}} takes longer than {self._timeout_s:g} s (--timeout)", again)

    def _start(self) -> tuple[Worker, Connection[Any, Any]]:
        try:
            worker = Worker(
                "iaprof.report.fleet.processes:work",
                self._memory_bytes,
                self._idle_s,
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
        if deaths < MOST_DEATHS:
            again.append((task, deaths))
        else:
            yield from self._given_up(task, "the process that read {} died, as happens when memory runs out", again)

    def _given_up(self, task: Task, problem: str, again: deque[tuple[Task, int]]) -> Iterator[Answer]:
        if answer := given_up(task, problem):
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


def work(memory_bytes: str, idle_s: str, large: str = "0", pipe_fd: int = 0) -> None:
    """A process's main function: does tasks until its parent closes the pipe, is gone, or has nothing to do."""
    if int(memory_bytes):
        limit_memory(int(memory_bytes))
    if int(large):
        allow_large()
    threading.Thread(target=_end_with_parent, args=(pipe_fd,), daemon=True).start()
    with Connection(pipe_fd) as pipe, contextlib.suppress(EOFError, OSError):
        while pipe.poll(float(idle_s) or None):
            task = pipe.recv()
            try:
                answer: Answer | Exception = run(task)
            except Exception as error:  # noqa: BLE001 (`answers` raises it)
                answer = error
            pipe.send(answer)


def _end_with_parent(pipe_fd: int) -> None:
    """Ends this process as soon as its parent is gone, for whom it may still do a task of minutes."""
    hangup = select.poll()
    hangup.register(pipe_fd, 0)
    hangup.poll()
    os._exit(_PARENT_IS_GONE)
