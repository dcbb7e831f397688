"""The launch probes: the program compiled and loaded, attached to libraries, its ring buffers mapped.

Reads come in bulk, as arrays; nothing here runs per launch.
"""

from __future__ import annotations

import ctypes
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from iaprof.bpf.compiler import BpfUnavailable, compile_program
from iaprof.bpf.libraries import LAUNCH, Libraries
from iaprof.bpf.perf_event import online_cpus, possible_cpus
from iaprof.bpf.ringbuffer import RingBuffer
from iaprof.bpf.syscall import BPF_MAP_LOOKUP_ELEM, bpf
from iaprof.bpf.uprobe import Uprobe
from iaprof.bpf.usdt import Probe
from iaprof.formats.launches import COMPILED, LAUNCH as LAUNCH_RECORD, Counter, stack_dtype

MAX_PROBES = 4096  # locations in all libraries together
MAX_DEPTH = 1024  # frames; what a per-CPU map's value has room for, and more than perf's own limit in practice
_PAGE = 4096


@dataclass(frozen=True)
class Sizes:
    """How much room the programs have; powers of two where pages are meant."""

    launch_pages: int = 1024  # 4 MiB: 29,000 launches
    stack_pages: int = 1024  # 4 MiB: 4,000 distinct stacks of 127 frames
    compiled_pages: int = 128
    stacks_remembered: int = 1 << 16
    stack_id_bits: int = 62


def stack_depth() -> int:
    """The number of frames that the kernel walks at most: kernel.perf_event_max_stack."""
    return min(int(Path("/proc/sys/kernel/perf_event_max_stack").read_text()), MAX_DEPTH)


class LaunchProbes:
    """The loaded programs and what they send."""

    def __init__(self, sizes: Sizes = Sizes()) -> None:
        """Compiles and loads.

        Raises:
            BpfUnavailable: what is missing, and how to get it.
        """
        self.depth = stack_depth()
        stack = stack_dtype(self.depth)
        cpus = len(online_cpus())
        defines = {
            "MAX_PROBES": MAX_PROBES,
            "STACK_DEPTH": self.depth,
            "STACK_ID_BITS": sizes.stack_id_bits,
            "STACKS_REMEMBERED": sizes.stacks_remembered,
            "LAUNCH_PAGES": sizes.launch_pages,
            "STACK_PAGES": sizes.stack_pages,
            "COMPILED_PAGES": sizes.compiled_pages,
            "LAUNCH_WAKE_EVERY": _wake_every(sizes.launch_pages, LAUNCH_RECORD.itemsize, cpus),
            "STACK_WAKE_EVERY": _wake_every(sizes.stack_pages, stack.itemsize, cpus),
        }
        self._bpf = compile_program("launches.c", defines, ("on_launch", "on_compile"))
        try:
            self.launches = self._ring(b"launches", sizes.launch_pages, LAUNCH_RECORD)
            self.stacks = self._ring(b"stacks", sizes.stack_pages, stack)
            self.compiled = self._ring(b"compilations", sizes.compiled_pages, COMPILED)
        except OSError as error:
            raise BpfUnavailable(f"the BPF ring buffers cannot be mapped: {error}") from error
        self._counters = _CounterMap(self._bpf[b"counters"].map_fd)
        self._probes = self._bpf[b"probes"]
        self._attached: list[Uprobe] = []
        self.libraries = Libraries(self._attach)

    def _ring(self, name: bytes, pages: int, dtype: np.dtype[np.void]) -> RingBuffer:
        return RingBuffer(self._bpf[name].map_fd, pages * _PAGE, dtype)

    def _attach(self, file_fd: int, probe: Probe) -> None:
        slot = len(self._attached)
        if slot >= MAX_PROBES:
            raise OSError(f"more than {MAX_PROBES} probe locations in all libraries together")
        row: Any = self._probes.Leaf()
        ctypes.memmove(ctypes.byref(row), probe.pack(), ctypes.sizeof(row))
        self._probes[ctypes.c_int(slot)] = row
        program = self._bpf.funcs[b"on_launch" if probe.name == LAUNCH else b"on_compile"]
        self._attached.append(Uprobe(file_fd, probe.offset, probe.semaphore_offset, program.fd, slot))

    def counters(self) -> dict[Counter, int]:
        """What the programs counted so far, all CPUs together."""
        return self._counters.read()

    def detach(self) -> None:
        """Takes the probes out; what is in the ring buffers can still be read."""
        while self._attached:
            self._attached.pop().close()

    def close(self) -> None:
        """Gives everything back."""
        self.detach()
        for ring in (self.launches, self.stacks, self.compiled):
            ring.close()
        self._bpf.cleanup()


class _CounterMap:
    """The per-CPU counters, read with one system call; bcc's table opens files and makes a call for each."""

    def __init__(self, fd: int) -> None:
        self._key = ctypes.c_uint32(0)
        self._values = np.zeros((len(possible_cpus()), len(Counter)), np.uint64)
        # The part of union bpf_attr that BPF_MAP_LOOKUP_ELEM takes: map, key, value, flags.
        self._request = struct.pack("<IxxxxQQQ", fd, ctypes.addressof(self._key), self._values.ctypes.data, 0)

    def read(self) -> dict[Counter, int]:
        bpf(BPF_MAP_LOOKUP_ELEM, self._request)
        totals = self._values.sum(axis=0)
        return {which: int(totals[which]) for which in Counter}


def _wake_every(pages: int, record: int, cpus: int) -> int:
    """Wakes the reader when a quarter of the buffer may be full, should all CPUs write alike."""
    return max(1, pages * _PAGE // (record + 8) // (4 * cpus))
