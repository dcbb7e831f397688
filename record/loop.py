"""The loop of a recording: descriptors that become readable, timers, and unfinished work.

One thread, one turn after the other. The loop does not know what is recorded.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import select
import time
from collections.abc import Callable, Hashable

Action = Callable[[], object]


class Loop:
    """Calls readers of descriptors, timers and unfinished work. Times are CLOCK_MONOTONIC in ns."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._readers: dict[int, Action] = {}
        self._timers: list[tuple[int, int, Action]] = []
        self._number = itertools.count()
        self._unfinished: dict[Hashable, Action] = {}

    def wait_for(self, fd: int, reader: Action, how: int = 0) -> None:
        """Calls `reader` whenever `fd` is readable.

        Args:
            fd: a descriptor of the caller's, who calls `forget` before closing it.
            reader: the function to call.
            how: EPOLLET, EPOLLONESHOT or 0.
        """
        self._epoll.register(fd, select.EPOLLIN | how)
        self._readers[fd] = reader

    def wait_again(self, fd: int, how: int = 0) -> None:
        """Waits again for a descriptor that is registered with EPOLLONESHOT."""
        self._epoll.modify(fd, select.EPOLLIN | how)

    def forget(self, fd: int) -> None:
        """Stops waiting for a descriptor."""
        if self._readers.pop(fd, None) is not None:
            with contextlib.suppress(OSError):  # the kernel has removed a closed one
                self._epoll.unregister(fd)

    def at(self, due_ns: int, action: Action) -> None:
        """Calls `action` once, at that time or soon after."""
        heapq.heappush(self._timers, (due_ns, next(self._number), action))

    def every(self, period_ns: int, action: Action) -> None:
        """Calls `action` once per period; periods that have passed meanwhile are skipped."""

        def beat(due: int) -> None:
            action()
            following = max(due + period_ns, time.monotonic_ns())
            self.at(following, lambda: beat(following))

        first = time.monotonic_ns() + period_ns
        self.at(first, lambda: beat(first))

    def keep_calling(self, key: Hashable, action: Action) -> None:
        """Calls `action` in every turn, without waiting in between, until `stop_calling(key)`."""
        self._unfinished[key] = action

    def stop_calling(self, key: Hashable) -> None:
        """Ends `keep_calling` for this key; does nothing without one."""
        self._unfinished.pop(key, None)

    def is_calling(self, key: Hashable) -> bool:
        """Whether `keep_calling` is in force for this key."""
        return key in self._unfinished

    def turn(self) -> None:
        """Waits for the next event, then calls the readers, unfinished work and timers that are due."""
        for fd, _ in self._epoll.poll(self._seconds_to_wait()):
            if reader := self._readers.get(fd):  # an earlier reader of this turn may have removed it
                reader()
        for action in list(self._unfinished.values()):
            action()
        now = time.monotonic_ns()
        while self._timers and self._timers[0][0] <= now:
            heapq.heappop(self._timers)[2]()

    def _seconds_to_wait(self) -> float:
        if self._unfinished:
            return 0
        if not self._timers:
            return -1
        return max(0, self._timers[0][0] - time.monotonic_ns()) / 1e9

    def close(self) -> None:
        """Closes the loop: it waits for nothing any more."""
        self._epoll.close()
        self._readers.clear()
        self._timers.clear()
        self._unfinished.clear()

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._epoll.closed
