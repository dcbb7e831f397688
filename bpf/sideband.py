"""Reads perf's side-band of the whole machine, from a ring buffer per CPU.

The side-band records mappings, names, forks and exits. Its event is a `dummy` on each CPU, which counts nothing and
costs time only when a record is written. The bytes are returned as the kernel wrote them; formats/wire/sideband.py
decodes them after the recording.
"""

from __future__ import annotations

import mmap

from iaprof.bpf.perf_buffer import BuffersOfCpus, CpuEvents
from iaprof.bpf.perf_event import (
    CLOCK_MONOTONIC,
    COUNT_SW_DUMMY,
    READ_TIME_ENABLED,
    TYPE_SOFTWARE,
    Attr,
    Flag,
    Sample,
)

# Enough for 5,000 processes that each start a small program (some 660 bytes of records) in the 250 ms between two
# reads, even if all run on one CPU and the half-full buffer wakes nobody.
BUFFER_PAGES = 256
# Every record ends with these fields, so that it can be decoded without knowing the event.
_TRAILER = Sample.TID | Sample.TIME | Sample.CPU
_COMMON_FLAGS = Flag.SAMPLE_ID_ALL | Flag.USE_CLOCKID | Flag.WATERMARK
_SIDE_BAND_FLAGS = Flag.MMAP | Flag.MMAP2 | Flag.BUILD_ID | Flag.COMM | Flag.COMM_EXEC | Flag.TASK


class CpuSideBand(CpuEvents):
    """One CPU's side-band."""

    def open_events(self) -> int:
        """See CpuEvents."""
        # The first event only wakes the reader when executable memory is mapped. It is opened first because the kernel
        # serves the newest event first: the record is in the buffer before the reader wakes. Its page is mapped
        # read-only, so the kernel overwrites it in a ring and nobody has to empty it.
        wakes = self._open_dummy(Flag.MMAP, wakeup=1)
        self.opened.enter_context(mmap.mmap(wakes, 2 * mmap.PAGESIZE, prot=mmap.PROT_READ))
        return self._open_dummy(_SIDE_BAND_FLAGS, wakeup=self.size // 2)

    def _open_dummy(self, flags: Flag, wakeup: int) -> int:
        attr = Attr(type=TYPE_SOFTWARE, config=COUNT_SW_DUMMY, sample_period=1, wakeup_watermark=wakeup)
        attr.sample_type, attr.read_format = _TRAILER, READ_TIME_ENABLED
        attr.flags = flags | _COMMON_FLAGS
        attr.clockid = CLOCK_MONOTONIC
        return self.open(attr)


class SideBandBuffers(BuffersOfCpus):
    """The side-bands of all CPUs.

    The reader wakes when executable memory was mapped, or a buffer is half full. A mapped library may have to be probed
    at once; other records can wait for the next read.
    """

    def __init__(self, pages: int = BUFFER_PAGES) -> None:
        """Opens them; `pages` is the size of each CPU's data, a power of two."""
        self._pages = pages
        super().__init__()

    def events_of(self, cpu: int) -> CpuEvents:
        """See BuffersOfCpus."""
        return CpuSideBand(cpu, self._pages)
