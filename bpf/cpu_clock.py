"""A perf CPU-clock event on each CPU that runs a BPF program at a fixed rate."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import struct

from iaprof.bpf.perf_event import (
    COUNT_SW_CPU_CLOCK,
    IOC_DISABLE,
    IOC_ENABLE,
    IOC_PERIOD,
    IOC_SET_BPF,
    TYPE_SOFTWARE,
    Attr,
    Flag,
    online_cpus,
    open_event,
)


class CpuClock:
    """The clock events of all online CPUs; they do not count idle time."""

    def __init__(self, program: int, hz: int) -> None:
        """Opens the events; the program does not run before `enable`.

        Args:
            program: descriptor of a program for perf events; the caller closes it.
            hz: samples per second and CPU; 0 opens no events.

        Raises:
            OSError: no permission (CAP_PERFMON or root).
        """
        self._events: list[int] = []
        try:
            for cpu in online_cpus() if hz else ():
                self._open(cpu, program, hz)
        except OSError:
            self.close()
            raise

    def _open(self, cpu: int, program: int, hz: int) -> None:
        attr = Attr(type=TYPE_SOFTWARE, config=COUNT_SW_CPU_CLOCK, sample_period=1_000_000_000 // hz)
        attr.flags = Flag.DISABLED | Flag.EXCLUDE_IDLE
        try:
            self._events.append(open_event(attr, -1, cpu))
        except OSError as error:
            if error.errno == errno.ENODEV:  # the CPU has gone offline meanwhile
                return
            raise
        fcntl.ioctl(self._events[-1], IOC_SET_BPF, program)

    def change(self, hz: int) -> None:
        """Changes the rate, whether the program runs or not.

        Args:
            hz: samples per second and CPU, above 0.

        Raises:
            OSError: the kernel refuses it.
        """
        for event in self._events:
            fcntl.ioctl(event, IOC_PERIOD, struct.pack("Q", 1_000_000_000 // hz))

    def enable(self, on: bool) -> None:
        """Starts or stops running the program."""
        for event in self._events:
            fcntl.ioctl(event, IOC_ENABLE if on else IOC_DISABLE, 0)

    def close(self) -> None:
        """Closes the events."""
        while self._events:
            with contextlib.suppress(OSError):
                os.close(self._events.pop())
