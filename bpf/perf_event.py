"""perf_event_open(2): the attribute structure, the constants that iaprof uses, and the call; and events of each CPU.

Source of layout and numbers: include/uapi/linux/perf_event.h, Linux 6.18.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import struct
from abc import ABC, abstractmethod
from collections.abc import Collection
from enum import IntFlag
from pathlib import Path

from iaprof.bpf.syscall import syscall

_SYS_PERF_EVENT_OPEN = 298  # x86-64
_FLAG_FD_CLOEXEC = 8
TYPE_SOFTWARE = 1
TYPE_TRACEPOINT = 2
COUNT_SW_CPU_CLOCK = 0
COUNT_SW_DUMMY = 9
READ_TIME_ENABLED = 1  # PERF_FORMAT_TOTAL_TIME_ENABLED
CLOCK_MONOTONIC = 1
FORMAT_GROUP = 1 << 3  # in `read_format`: read(2) returns a u64 count, then a u64 value per event, the leader's first

IOC_ENABLE = 0x2400
IOC_DISABLE = 0x2401
IOC_SET_OUTPUT = 0x2405
IOC_SET_BPF = 0x40042408
IOC_PERIOD = 0x40082404


class Sample(IntFlag):
    """Bits of `sample_type`."""

    TID = 1 << 1
    TIME = 1 << 2
    CPU = 1 << 7
    RAW = 1 << 10


class Flag(IntFlag):
    """Bits of the attribute's bit field."""

    DISABLED = 1 << 0
    EXCLUDE_IDLE = 1 << 7
    MMAP = 1 << 8
    COMM = 1 << 9
    TASK = 1 << 13
    WATERMARK = 1 << 14
    SAMPLE_ID_ALL = 1 << 18
    MMAP2 = 1 << 23
    COMM_EXEC = 1 << 24
    USE_CLOCKID = 1 << 25
    KSYMBOL = 1 << 29
    BUILD_ID = 1 << 34


class Attr(ctypes.Structure):
    """`struct perf_event_attr`, PERF_ATTR_SIZE_VER7 (128 bytes)."""

    _fields_ = (
        ("type", ctypes.c_uint32),
        ("size", ctypes.c_uint32),
        ("config", ctypes.c_uint64),
        ("sample_period", ctypes.c_uint64),
        ("sample_type", ctypes.c_uint64),
        ("read_format", ctypes.c_uint64),
        ("flags", ctypes.c_uint64),
        ("wakeup_watermark", ctypes.c_uint32),
        ("bp_type", ctypes.c_uint32),
        ("config1", ctypes.c_uint64),
        ("config2", ctypes.c_uint64),
        ("branch_sample_type", ctypes.c_uint64),
        ("sample_regs_user", ctypes.c_uint64),
        ("sample_stack_user", ctypes.c_uint32),
        ("clockid", ctypes.c_int32),
        ("sample_regs_intr", ctypes.c_uint64),
        ("aux_watermark", ctypes.c_uint32),
        ("sample_max_stack", ctypes.c_uint16),
        ("reserved_2", ctypes.c_uint16),
        ("aux_sample_size", ctypes.c_uint32),
        ("reserved_3", ctypes.c_uint32),
        ("sig_data", ctypes.c_uint64),
    )


def open_event(attr: Attr, pid: int, cpu: int, group_fd: int = -1) -> int:
    """Opens an event, in the group of the leader `group_fd` if given; returns its descriptor, close-on-exec.

    Raises:
        OSError: as in perf_event_open(2).
    """
    attr.size = ctypes.sizeof(Attr)
    return syscall(
        _SYS_PERF_EVENT_OPEN,
        ctypes.byref(attr),
        ctypes.c_int(pid),
        ctypes.c_int(cpu),
        ctypes.c_int(group_fd),
        ctypes.c_ulong(_FLAG_FD_CLOEXEC),
    )


class Going:
    """Tells whether an event that is enabled still counts: that of a CPU that went offline never does again."""

    def __init__(self, fd: int) -> None:
        """Takes an event whose `read_format` is READ_TIME_ENABLED; the caller closes it."""
        self._fd, self._enabled_ns = fd, 0

    def goes_on(self) -> bool:
        """Whether the event was enabled since the last call."""
        before = self._enabled_ns
        _, self._enabled_ns = struct.unpack("QQ", os.read(self._fd, 16))
        return self._enabled_ns > before


def online_cpus() -> list[int]:
    """Returns the numbers of the CPUs that are online."""
    return _cpus("online")


def possible_cpus() -> list[int]:
    """Returns the numbers of all CPUs that may ever be online; a per-CPU map has a value for each."""
    return _cpus("possible")


def _cpus(which: str) -> list[int]:
    """Reads a CPU list of sysfs, such as `0-3,6`."""
    cpus: list[int] = []
    for part in Path("/sys/devices/system/cpu", which).read_text().strip().split(","):
        first, _, last = part.partition("-")
        cpus.extend(range(int(first), int(last or first) + 1))
    return cpus


class EventsOfCpus(ABC):
    """Perf events of each online CPU, opened and closed as CPUs come and go."""

    def open_all(self) -> None:
        """Opens the events of all online CPUs; raises OSError as `follow_cpus` does."""
        try:
            while self.follow_cpus():  # the second time, it says what it could not open
                pass
        except OSError:
            self.close()
            raise

    def follow_cpus(self) -> list[int]:
        """Opens events for CPUs that have come online, whose numbers it returns; closes those of CPUs that have gone.

        The events of a CPU that has gone do not go on when it comes back, perhaps before anybody looks.

        Raises:
            OSError: no permission (CAP_PERFMON or root), or no memory to lock. If others were opened, the next call
                says so.
        """
        online = online_cpus()
        for cpu in [each for each in self._cpus() if each not in online or not self._goes_on(each)]:
            self._close_cpu(cpu)
        come: list[int] = []
        for cpu in [each for each in online if each not in self._cpus()]:
            try:
                self._open_cpu(cpu)
            except OSError as error:
                if error.errno == errno.ENODEV:  # the CPU has gone offline meanwhile
                    continue
                if come:
                    break
                raise
            come.append(cpu)
        return come

    @abstractmethod
    def _cpus(self) -> Collection[int]: ...

    @abstractmethod
    def _goes_on(self, cpu: int) -> bool: ...

    @abstractmethod
    def _open_cpu(self, cpu: int) -> None: ...

    @abstractmethod
    def _close_cpu(self, cpu: int) -> None: ...

    @abstractmethod
    def close(self) -> None:
        """Closes all events, for good."""


class CpuClock(EventsOfCpus):
    """A CPU-clock event on each online CPU, which runs a BPF program at a fixed rate; idle time does not count."""

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
        self.open_all()

    def follow_cpus(self) -> list[int]:
        """See EventsOfCpus."""
        return super().follow_cpus() if self._hz else []

    def _cpus(self) -> Collection[int]:
        return self._events

    def _goes_on(self, cpu: int) -> bool:
        return not self._on or self._going[cpu].goes_on()

    def _open_cpu(self, cpu: int) -> None:
        attr = Attr(type=TYPE_SOFTWARE, config=COUNT_SW_CPU_CLOCK, sample_period=1_000_000_000 // self._hz)
        attr.flags, attr.read_format = Flag.DISABLED | Flag.EXCLUDE_IDLE, READ_TIME_ENABLED
        event = self._events[cpu] = open_event(attr, -1, cpu)
        self._going[cpu] = Going(event)
        fcntl.ioctl(event, IOC_SET_BPF, self._program)
        if self._on:
            fcntl.ioctl(event, IOC_ENABLE, 0)

    def _close_cpu(self, cpu: int) -> None:
        os.close(self._events.pop(cpu))

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
        """See EventsOfCpus."""
        self._hz = 0
        while self._events:
            with contextlib.suppress(OSError):
                os.close(self._events.popitem()[1])
