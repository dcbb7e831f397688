"""Reads perf's side-band of the whole machine, from a ring buffer per CPU.

The side-band records mappings, names, forks and exits. Its event is a `dummy` on each CPU, which counts nothing and
costs time only when a record is written. The bytes are returned as the kernel wrote them; formats/wire/sideband.py
decodes them after the recording.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import select
from collections.abc import Collection, Iterator

import numpy as np

from iaprof.bpf.perf_event import (
    CLOCK_MONOTONIC,
    COUNT_SW_DUMMY,
    IOC_DISABLE,
    READ_TIME_ENABLED,
    TYPE_SOFTWARE,
    Attr,
    EventsOfCpus,
    Flag,
    Going,
    Sample,
    open_event,
)

# Enough for 5,000 processes that each start a small program (some 660 bytes of records) in the 250 ms between two
# reads, even if all run on one CPU and the half-full buffer wakes nobody.
BUFFER_PAGES = 256
_HEAD, _TAIL = 1024, 1032  # offsets in `struct perf_event_mmap_page`
# Every record ends with these fields, so that it can be decoded without knowing the event.
_TRAILER = Sample.TID | Sample.TIME | Sample.CPU
_COMMON_FLAGS = Flag.SAMPLE_ID_ALL | Flag.USE_CLOCKID | Flag.WATERMARK
_SIDE_BAND_FLAGS = Flag.MMAP | Flag.MMAP2 | Flag.BUILD_ID | Flag.COMM | Flag.COMM_EXEC | Flag.TASK


class CpuSideBand:
    """One CPU's buffer."""

    def __init__(self, cpu: int, pages: int = BUFFER_PAGES) -> None:
        """Opens the events and their buffer.

        Args:
            cpu: its number.
            pages: size of the data, a power of two.

        Raises:
            OSError: the CPU is offline (ENODEV), no permission, or no memory to lock.
        """
        self.cpu = cpu
        self._size = pages * mmap.PAGESIZE
        with contextlib.ExitStack() as opened:
            # This event only wakes the reader when executable memory is mapped. It is opened first because the kernel
            # serves the newest event first: the record is in the buffer before the reader wakes. Its page is mapped
            # read-only, so the kernel overwrites it in a ring and nobody has to empty it.
            self.wakeup_fd = self._open(opened, Flag.MMAP, wakeup=1)
            opened.enter_context(mmap.mmap(self.wakeup_fd, 2 * mmap.PAGESIZE, prot=mmap.PROT_READ))
            self.buffer_fd = self._open(opened, _SIDE_BAND_FLAGS, wakeup=self._size // 2)
            self._going = Going(self.buffer_fd)
            self._map = opened.enter_context(mmap.mmap(self.buffer_fd, self._size + mmap.PAGESIZE))
            self._opened = opened.pop_all()
        self._head = np.frombuffer(self._map, np.uint64, 1, offset=_HEAD)
        self._tail = np.frombuffer(self._map, np.uint64, 1, offset=_TAIL)

    def _open(self, opened: contextlib.ExitStack, flags: Flag, wakeup: int) -> int:
        attr = Attr(type=TYPE_SOFTWARE, config=COUNT_SW_DUMMY, sample_period=1, wakeup_watermark=wakeup)
        attr.sample_type, attr.read_format = _TRAILER, READ_TIME_ENABLED
        attr.flags = flags | _COMMON_FLAGS
        attr.clockid = CLOCK_MONOTONIC
        fd = open_event(attr, -1, self.cpu)
        opened.callback(os.close, fd)
        return fd

    def goes_on(self) -> bool:
        """Whether the CPU has not been offline since the last call."""
        return self._going.goes_on()

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

    def stop(self) -> None:
        """Stops the events; records in the buffer can still be read."""
        for fd in (self.wakeup_fd, self.buffer_fd):
            fcntl.ioctl(fd, IOC_DISABLE, 0)

    def close(self) -> None:
        """Closes the events and unmaps their buffer."""
        del self._head, self._tail
        self._opened.close()


class SideBandBuffers(EventsOfCpus):
    """The buffers of all CPUs, as one descriptor to wait on."""

    def __init__(self, pages: int = BUFFER_PAGES) -> None:
        """Opens a buffer for every CPU that is online.

        Args:
            pages: size of each CPU's data, a power of two.

        Raises:
            OSError: no permission (CAP_PERFMON or root), or no memory to lock.
        """
        self._pages = pages
        self._buffers: dict[int, CpuSideBand] = {}  # by CPU
        self._last_of_offline: list[tuple[int, bytes]] = []
        self._epoll = select.epoll()
        self.open_all()

    def _cpus(self) -> Collection[int]:
        return self._buffers

    def _goes_on(self, cpu: int) -> bool:
        return self._buffers[cpu].goes_on()

    def _open_cpu(self, cpu: int) -> None:
        buffer = self._buffers[cpu] = CpuSideBand(cpu, self._pages)
        for fd in (buffer.wakeup_fd, buffer.buffer_fd):
            self._epoll.register(fd, select.EPOLLIN)

    def _close_cpu(self, cpu: int) -> None:
        buffer = self._buffers.pop(cpu)
        self._last_of_offline.append((cpu, buffer.read()))
        for fd in (buffer.wakeup_fd, buffer.buffer_fd):
            self._epoll.unregister(fd)
        buffer.close()

    def fileno(self) -> int:
        """Returns an epoll descriptor that is readable when executable memory was mapped, or a buffer is half full.

        A mapped library may have to be probed at once; other records can wait for the next read. perf reports each
        event only once, so read before polling again.
        """
        return self._epoll.fileno()

    def read(self) -> Iterator[tuple[int, bytes]]:
        """Yields CPU and records of each CPU that has any."""
        last, self._last_of_offline = self._last_of_offline, []
        yield from ((cpu, data) for cpu, data in last if data)
        for cpu, buffer in self._buffers.items():
            if data := buffer.read():
                yield cpu, data

    def stop(self) -> None:
        """Stops the events; records in the buffers can still be read."""
        for buffer in self._buffers.values():
            buffer.stop()

    def close(self) -> None:
        """See EventsOfCpus."""
        self._epoll.close()
        for buffer in self._buffers.values():
            buffer.close()
