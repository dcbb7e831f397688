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
    READ_TIME_ENABLED,
    TYPE_SOFTWARE,
    Attr,
    Flag,
    Going,
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
        self._program, self._hz, self._on = program, hz, False
        self._events: dict[int, int] = {}  # descriptors, by CPU
        self._going: dict[int, Going] = {}
        try:
            while self.follow_cpus():  # the second time, it says what it could not open
                pass
        except OSError:
            self.close()
            raise

    def follow_cpus(self) -> list[int]:
        """Opens events for CPUs that have come online, whose numbers it returns; closes those of CPUs that have gone.

        Raises:
            OSError: as in __init__; a CPU cannot be sampled. If others were opened, the next call says so.
        """
        if not self._hz:
            return []
        online = online_cpus()
        for cpu in [
            each for each in self._events if each not in online or (self._on and not self._going[each].goes_on())
        ]:
            os.close(self._events.pop(cpu))
        come: list[int] = []
        for cpu in [each for each in online if each not in self._events]:
            try:
                come += [cpu] if self._open(cpu) else []
            except OSError:
                if come:
                    break
                raise
        return come

    def _open(self, cpu: int) -> bool:
        attr = Attr(type=TYPE_SOFTWARE, config=COUNT_SW_CPU_CLOCK, sample_period=1_000_000_000 // self._hz)
        attr.flags, attr.read_format = Flag.DISABLED | Flag.EXCLUDE_IDLE, READ_TIME_ENABLED
        try:
            event = self._events[cpu] = open_event(attr, -1, cpu)
        except OSError as error:
            if error.errno == errno.ENODEV:  # the CPU has gone offline meanwhile
                return False
            raise
        self._going[cpu] = Going(event)
        fcntl.ioctl(event, IOC_SET_BPF, self._program)
        if self._on:
            fcntl.ioctl(event, IOC_ENABLE, 0)
        return True

    def change(self, hz: int) -> None:
        """Changes the rate, whether the program runs or not.

        Args:
            hz: samples per second and CPU, above 0.

        Raises:
            OSError: the kernel refuses it.
        """
        self._hz = hz
        for event in self._events.values():
            fcntl.ioctl(event, IOC_PERIOD, struct.pack("Q", 1_000_000_000 // hz))

    def enable(self, on: bool) -> None:
        """Starts or stops running the program."""
        self._on = on
        for event in self._events.values():
            fcntl.ioctl(event, IOC_ENABLE if on else IOC_DISABLE, 0)

    def close(self) -> None:
        """Closes the events, for good."""
        self._hz = 0
        while self._events:
            with contextlib.suppress(OSError):
                os.close(self._events.popitem()[1])
