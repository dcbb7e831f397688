"""What a recording waits for: descriptors that become readable, times that come, and work that was left for later.

One thread, one turn after the other. Nothing here knows what is recorded.
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
    """Who waits for what. Times are CLOCK_MONOTONIC in ns."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._readers: dict[int, Action] = {}
        self._timers: list[tuple[int, int, Action]] = []
        self._number = itertools.count()
        self._left: dict[Hashable, Action] = {}

    def wait_for(self, fd: int, reader: Action, how: int = 0) -> None:
        """Calls `reader` whenever `fd` is readable.

        Args:
            fd: stays the caller's, who calls `forget` before it is closed.
            reader: to call.
            how: EPOLLET or EPOLLONESHOT, if so wanted.
        """
        self._epoll.register(fd, select.EPOLLIN | how)
        self._readers[fd] = reader

    def wait_again(self, fd: int, how: int = 0) -> None:
        """Waits once more for a descriptor that was waited for with EPOLLONESHOT."""
        self._epoll.modify(fd, select.EPOLLIN | how)

    def forget(self, fd: int) -> None:
        """No longer waits for a descriptor."""
        if self._readers.pop(fd, None) is not None:
            with contextlib.suppress(OSError):  # a closed one is gone already
                self._epoll.unregister(fd)

    def at(self, due_ns: int, action: Action) -> None:
        """Calls `action` once, at that time or soon after."""
        heapq.heappush(self._timers, (due_ns, next(self._number), action))

    def every(self, period_ns: int, action: Action) -> None:
        """Calls `action` in this rhythm from now on; a beat that was missed is left out."""

        def beat(due: int) -> None:
            action()
            following = max(due + period_ns, time.monotonic_ns())
            self.at(following, lambda: beat(following))

        first = time.monotonic_ns() + period_ns
        self.at(first, lambda: beat(first))

    def go_on_with(self, what: Hashable, action: Action) -> None:
        """Calls `action` in every turn, and does not wait in between, until `done_with`."""
        self._left[what] = action

    def done_with(self, what: Hashable) -> None:
        """Nothing is left of that work."""
        self._left.pop(what, None)

    def has_left(self, what: Hashable) -> bool:
        """Whether something is left of that work."""
        return what in self._left

    def turn(self) -> None:
        """Waits for whatever comes first, and sees to all that has come."""
        for fd, _ in self._epoll.poll(self._seconds_to_wait()):
            if reader := self._readers.get(fd):  # one of the others may have taken it away
                reader()
        for action in list(self._left.values()):
            action()
        now = time.monotonic_ns()
        while self._timers and self._timers[0][0] <= now:
            heapq.heappop(self._timers)[2]()

    def _seconds_to_wait(self) -> float:
        if self._left:
            return 0
        if not self._timers:
            return -1
        return max(0, self._timers[0][0] - time.monotonic_ns()) / 1e9

    def close(self) -> None:
        """Waits for nothing any more."""
        self._epoll.close()
        self._readers.clear()
        self._timers.clear()
        self._left.clear()

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._epoll.closed
