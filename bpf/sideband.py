"""perf's side-band of the whole machine, from a ring buffer per CPU.

It is what is mapped, named, forked and ended. Its event counts nothing (a `dummy` per CPU) and costs nothing but when a
process does such a thing. The bytes are handed on as the kernel wrote them; formats/wire/sideband.py reads them when
the recording is over.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import select
from collections.abc import Iterator

import numpy as np

from iaprof.bpf.perf_event import (
    CLOCK_MONOTONIC,
    COUNT_SW_DUMMY,
    IOC_DISABLE,
    TYPE_SOFTWARE,
    Attr,
    Flag,
    Sample,
    online_cpus,
    open_event,
)

# Room for what 5,000 processes write that start a small program each (some 660 bytes), in the 250 ms between two
# reads, even were they all on one CPU and nobody woken by a buffer that is half full.
BUFFER_PAGES = 256
_HEAD, _TAIL = 1024, 1032  # bytes into `struct perf_event_mmap_page`
# Every record ends with these: who reads a buffer need not know the event.
_TRAILER = Sample.TID | Sample.TIME | Sample.CPU
_ANY = Flag.SAMPLE_ID_ALL | Flag.USE_CLOCKID | Flag.WATERMARK
_SIDE_BAND = Flag.MMAP | Flag.MMAP2 | Flag.BUILD_ID | Flag.COMM | Flag.COMM_EXEC | Flag.TASK


class CpuSideBand:
    """One CPU's buffer."""

    def __init__(self, cpu: int, pages: int = BUFFER_PAGES) -> None:
        """Opens the events and their buffer.

        Args:
            cpu: which.
            pages: of data, a power of two.

        Raises:
            OSError: the CPU is offline (ENODEV), no permission, or no memory to lock.
        """
        self.cpu = cpu
        self._size = pages * mmap.PAGESIZE
        with contextlib.ExitStack() as opened:
            # The kernel serves its newest event first: the bell is older than the buffer's event, so that what it
            # rings for is there. Its page is read-only, and so written round and round, and nobody has to empty it.
            self.bell = self._open(opened, Flag.MMAP, wakeup=1)
            opened.enter_context(mmap.mmap(self.bell, 2 * mmap.PAGESIZE, prot=mmap.PROT_READ))
            self.buffer = self._open(opened, _SIDE_BAND, wakeup=self._size // 2)
            self._map = opened.enter_context(mmap.mmap(self.buffer, self._size + mmap.PAGESIZE))
            self._opened = opened.pop_all()
        self._head = np.frombuffer(self._map, np.uint64, 1, offset=_HEAD)
        self._tail = np.frombuffer(self._map, np.uint64, 1, offset=_TAIL)

    def _open(self, opened: contextlib.ExitStack, flags: Flag, wakeup: int) -> int:
        attr = Attr(type=TYPE_SOFTWARE, config=COUNT_SW_DUMMY, sample_period=1, wakeup_watermark=wakeup)
        attr.sample_type = _TRAILER
        attr.flags = flags | _ANY
        attr.clockid = CLOCK_MONOTONIC
        fd = open_event(attr, -1, self.cpu)
        opened.callback(os.close, fd)
        return fd

    def read(self) -> bytes:
        """All whole records that are there, in order; the room they took is given back."""
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
        """No more records come; those in the buffer can still be read."""
        for fd in (self.bell, self.buffer):
            fcntl.ioctl(fd, IOC_DISABLE, 0)

    def close(self) -> None:
        """Gives the events and their buffer back."""
        del self._head, self._tail
        self._opened.close()


class SideBandBuffers:
    """The buffers of all CPUs, as one descriptor to wait on."""

    def __init__(self, pages: int = BUFFER_PAGES) -> None:
        """Opens a buffer for every CPU that is online.

        Args:
            pages: of data for each CPU, a power of two.

        Raises:
            OSError: no permission (CAP_PERFMON or root), or no memory to lock.
        """
        self._buffers: list[CpuSideBand] = []
        self._epoll = select.epoll()
        try:
            for cpu in online_cpus():
                try:
                    buffer = CpuSideBand(cpu, pages)
                except OSError as error:
                    if error.errno == errno.ENODEV:  # it went offline since
                        continue
                    raise
                self._buffers.append(buffer)
                for fd in (buffer.bell, buffer.buffer):
                    self._epoll.register(fd, select.EPOLLIN)
        except OSError:
            self.close()
            raise

    def fileno(self) -> int:
        """Readable when executable memory was mapped, as its probes are wanted at once, or a buffer is half full.

        All else waits for the next read. perf tells of each once: who asks again has to read first.
        """
        return self._epoll.fileno()

    def read(self) -> Iterator[tuple[int, bytes]]:
        """The records of each CPU that has any."""
        for buffer in self._buffers:
            if data := buffer.read():
                yield buffer.cpu, data

    def stop(self) -> None:
        """No more records come; those in the buffers can still be read."""
        for buffer in self._buffers:
            buffer.stop()

    def close(self) -> None:
        """Gives everything back."""
        self._epoll.close()
        for buffer in self._buffers:
            buffer.close()
