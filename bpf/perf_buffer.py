"""Ring buffers into which the kernel writes the records of perf events, one for each CPU.

Source of the layout: `struct perf_event_mmap_page` in include/uapi/linux/perf_event.h, Linux 6.18.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import select
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator

import numpy as np

from iaprof.bpf.perf_event import IOC_DISABLE, Attr, EventsOfCpus, Going, open_event

_HEAD, _TAIL = 1024, 1032  # offsets in `struct perf_event_mmap_page`


class PerfBuffer:
    """The buffer of one event, mapped."""

    def __init__(self, fd: int, size: int) -> None:
        """Maps the buffer.

        Args:
            fd: the event's descriptor, which the caller closes.
            size: bytes of the data: pages, their number a power of two.

        Raises:
            OSError: no memory to lock.
        """
        self._size = size
        self._map = mmap.mmap(fd, size + mmap.PAGESIZE)
        self._head = np.frombuffer(self._map, np.uint64, 1, offset=_HEAD)
        self._tail = np.frombuffer(self._map, np.uint64, 1, offset=_TAIL)

    def read(self) -> bytes:
        """Returns the bytes of all complete records in order, and frees their space in the buffer."""
        head, tail = int(self._head[0]), int(self._tail[0])
        if head == tail:
            return b""
        start, stop = tail % self._size, head % self._size
        base = mmap.PAGESIZE
        if start < stop:
            data = self._map[base + start : base + stop]
        else:
            data = self._map[base + start : base + self._size] + self._map[base : base + stop]
        self._tail[0] = head
        return data

    def close(self) -> None:
        """Unmaps the buffer."""
        del self._head, self._tail
        self._map.close()


class CpuEvents(ABC):
    """The events of one CPU, and the buffer that they share. A subclass opens them."""

    def __init__(self, cpu: int, pages: int) -> None:
        """Opens the events and their buffer.

        Args:
            cpu: its number.
            pages: size of the data, a power of two.

        Raises:
            OSError: the CPU is offline (ENODEV), no permission, or no memory to lock.
        """
        self.cpu, self.size = cpu, pages * mmap.PAGESIZE
        self.fds: list[int] = []
        with contextlib.ExitStack() as opened:
            self.opened = opened
            fd = self.open_events()
            self._going = Going(fd)
            self._buffer = opened.enter_context(contextlib.closing(PerfBuffer(fd, self.size)))
            self.opened = opened.pop_all()

    @abstractmethod
    def open_events(self) -> int:
        """Opens the events with `open`; returns that of the buffer, whose `read_format` is READ_TIME_ENABLED."""

    def open(self, attr: Attr) -> int:
        """Opens an event on this CPU, for all processes."""
        fd = open_event(attr, -1, self.cpu)
        self.opened.callback(os.close, fd)
        self.fds.append(fd)
        return fd

    def goes_on(self) -> bool:
        """Whether the CPU has not been offline since the last call."""
        return self._going.goes_on()

    def read(self) -> bytes:
        """Returns the bytes of all complete records in order, and frees their space in the buffer."""
        return self._buffer.read()

    def stop(self) -> None:
        """Stops the events; records in the buffer can still be read."""
        for fd in self.fds:
            fcntl.ioctl(fd, IOC_DISABLE, 0)

    def close(self) -> None:
        """Closes the events and unmaps their buffer."""
        self.opened.close()


class BuffersOfCpus(EventsOfCpus):
    """The buffers of all CPUs, as one descriptor to wait on."""

    def __init__(self) -> None:
        """Opens a buffer for every CPU that is online.

        Raises:
            OSError: no permission (CAP_PERFMON or root), or no memory to lock.
        """
        self._events: dict[int, CpuEvents] = {}  # by CPU
        self._last_of_offline: list[tuple[int, bytes]] = []
        self._epoll = select.epoll()
        self.open_all()

    @abstractmethod
    def events_of(self, cpu: int) -> CpuEvents:
        """Opens the events of a CPU."""

    def _cpus(self) -> Collection[int]:
        return self._events

    def _goes_on(self, cpu: int) -> bool:
        return self._events[cpu].goes_on()

    def _open_cpu(self, cpu: int) -> None:
        events = self._events[cpu] = self.events_of(cpu)
        for fd in events.fds:
            self._epoll.register(fd, select.EPOLLIN)

    def _close_cpu(self, cpu: int) -> None:
        events = self._events.pop(cpu)
        self._last_of_offline.append((cpu, events.read()))
        for fd in events.fds:
            self._epoll.unregister(fd)
        events.close()

    def fileno(self) -> int:
        """Returns an epoll descriptor that is readable when an event wakes its reader.

        perf reports each event only once, so read before polling again.
        """
        return self._epoll.fileno()

    def read(self) -> Iterator[tuple[int, bytes]]:
        """Yields CPU and records of each CPU that has any."""
        last, self._last_of_offline = self._last_of_offline, []
        yield from ((cpu, data) for cpu, data in last if data)
        for cpu, events in self._events.items():
            if data := events.read():
                yield cpu, data

    def stop(self) -> None:
        """Stops the events; records in the buffers can still be read."""
        for events in self._events.values():
            events.stop()

    def close(self) -> None:
        """See EventsOfCpus."""
        self._epoll.close()
        for events in self._events.values():
            events.close()
