"""perf's side-band: mappings, names, forks and exits of the whole machine, from a ring buffer per CPU.

The events count nothing (a `dummy` per CPU) and cost nothing but when a process maps, forks or ends. The bytes are
handed on as the kernel wrote them; formats/sideband.py reads them when the recording is over.
"""

from __future__ import annotations

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

BUFFER_PAGES = 128
_HEAD, _TAIL = 1024, 1032  # bytes into `struct perf_event_mmap_page`
_FLAGS = (
    Flag.MMAP
    | Flag.MMAP2
    | Flag.BUILD_ID
    | Flag.COMM
    | Flag.COMM_EXEC
    | Flag.TASK
    | Flag.SAMPLE_ID_ALL
    | Flag.USE_CLOCKID
    | Flag.WATERMARK
)


class CpuSideBand:
    """One CPU's buffer."""

    def __init__(self, cpu: int, pages: int = BUFFER_PAGES) -> None:
        """Opens the event and its buffer.

        Args:
            cpu: which.
            pages: of data, a power of two.

        Raises:
            OSError: no permission, or no memory to lock.
        """
        self.cpu = cpu
        attr = Attr(type=TYPE_SOFTWARE, config=COUNT_SW_DUMMY, sample_period=1)
        attr.sample_type = Sample.TID | Sample.TIME | Sample.CPU
        attr.flags = _FLAGS
        attr.clockid = CLOCK_MONOTONIC
        # Woken at the first record: a library that was just mapped wants its probes at once. The session keeps a
        # busy machine from waking it for every one.
        attr.wakeup_watermark = 1
        self._fd = open_event(attr, -1, cpu)
        self._size = pages * mmap.PAGESIZE
        try:
            self._map = mmap.mmap(self._fd, self._size + mmap.PAGESIZE)
        except OSError:
            os.close(self._fd)
            raise
        self._head = np.frombuffer(self._map, np.uint64, 1, offset=_HEAD)
        self._tail = np.frombuffer(self._map, np.uint64, 1, offset=_TAIL)

    def fileno(self) -> int:
        """Readable when there are records; tells of each once."""
        return self._fd

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
        fcntl.ioctl(self._fd, IOC_DISABLE, 0)

    def close(self) -> None:
        """Gives the event and its buffer back."""
        del self._head, self._tail
        self._map.close()
        os.close(self._fd)


class SideBandBuffers:
    """The buffers of all CPUs, as one descriptor to wait on."""

    def __init__(self) -> None:
        """Opens a buffer for every CPU that is online.

        Raises:
            OSError: no permission (CAP_PERFMON or root), or no memory to lock.
        """
        self._buffers: list[CpuSideBand] = []
        self._epoll = select.epoll()
        try:
            for cpu in online_cpus():
                self._buffers.append(CpuSideBand(cpu))
                self._epoll.register(self._buffers[-1], select.EPOLLIN)
        except OSError:
            self.close()
            raise

    def fileno(self) -> int:
        """Readable when a CPU has records. perf tells of records once: who asks again has to read first."""
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
