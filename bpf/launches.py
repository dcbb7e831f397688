"""The launch probes: the program compiled and loaded, attached to libraries, its ring buffers mapped.

Reads come in bulk, as arrays; nothing here runs per launch.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from iaprof.bpf.compiler import BpfUnavailable
from iaprof.bpf.libraries import COMPILE, LAUNCH, Libraries
from iaprof.bpf.loader import Interruption, Loader
from iaprof.bpf.maps import PerCpuCounters, add_keys, remove_keys, wait_for_running_programs, write_slot
from iaprof.bpf.perf_event import online_cpus, possible_cpus
from iaprof.bpf.ringbuffer import RingBuffer
from iaprof.bpf.uprobe import Location, UprobeLink, close_all
from iaprof.bpf.usdt import Probe
from iaprof.formats.launches import COMPILED, LAUNCH as LAUNCH_RECORD, Counter, stack_dtype

MAX_PROBES = 4096  # locations in all libraries together
MAX_DEPTH = 1024  # frames; what a per-CPU map's value has room for, and more than perf's own limit in practice
_PAGE = 4096
_PROGRAMS = {LAUNCH: "on_launch", COMPILE: "on_compile"}  # by the probe's name
_MAPS = ("probes", "settings", "others", "counters", "launches", "stacks", "compilations")


@dataclass(frozen=True)
class Sizes:
    """How much room the programs have; powers of two where pages are meant."""

    launch_pages: int = 1024  # 4 MiB: 29,000 launches
    stack_pages: int = 1024  # 4 MiB: 4,000 distinct stacks of 127 frames
    compiled_pages: int = 128
    stacks_remembered: int = 1 << 16
    stack_id_bits: int = 62
    others_remembered: int = 1 << 16


def stack_depth() -> int:
    """The number of frames that the kernel walks at most: kernel.perf_event_max_stack."""
    return min(int(Path("/proc/sys/kernel/perf_event_max_stack").read_text()), MAX_DEPTH)


class LaunchProbes:
    """The loaded programs and what they send.

    Compiling them goes on in a process apart; whatever is asked of them first waits for it, best `ready`.
    """

    def __init__(self, sizes: Sizes = Sizes()) -> None:
        """Begins to compile and load.

        Raises:
            BpfUnavailable: no process can be started for it.
        """
        self.depth = stack_depth()
        self._sizes, self._stack = sizes, stack_dtype(self.depth)
        cpus = len(online_cpus())
        defines = {
            "MAX_PROBES": MAX_PROBES,
            "STACK_DEPTH": self.depth,
            "STACK_ID_BITS": sizes.stack_id_bits,
            "STACKS_REMEMBERED": sizes.stacks_remembered,
            "OTHERS_REMEMBERED": sizes.others_remembered,
            "LAUNCH_PAGES": sizes.launch_pages,
            "STACK_PAGES": sizes.stack_pages,
            "COMPILED_PAGES": sizes.compiled_pages,
            "LAUNCH_WAKE_EVERY": _wake_every(sizes.launch_pages, LAUNCH_RECORD.itemsize, cpus),
            "STACK_WAKE_EVERY": _wake_every(sizes.stack_pages, self._stack.itemsize, cpus),
        }
        self._loader = Loader("launches.c", defines, tuple(_PROGRAMS.values()), _MAPS)
        self._loaded: _Loaded | None = None
        self._settings = _Settings()
        self._links: list[UprobeLink] = []
        self._slots = 0  # of the `probes` map that are taken
        self.libraries = Libraries(self._attach)

    def ready(self, interruption: Interruption | None = None) -> None:
        """Waits until the programs are loaded.

        Args:
            interruption: may end the wait, by what its `check` raises.

        Raises:
            BpfUnavailable: what is missing, and how to get it.
        """
        if self._loaded is None:
            self._loaded = _Loaded(self._loader.wait(interruption), self._sizes, self._stack)

    def _now(self) -> _Loaded:
        self.ready()
        assert self._loaded is not None
        return self._loaded

    @property
    def compile_cpu_seconds(self) -> float:
        """CPU time of the process that compiled and loaded, once it did."""
        return self._loader.cpu_seconds

    @property
    def launches(self) -> RingBuffer:
        """Sends LAUNCH records."""
        return self._now().launches

    @property
    def stacks(self) -> RingBuffer:
        """Sends records of stack_dtype(depth). All that launches name which were read before were sent by then."""
        return self._now().stacks

    @property
    def compiled(self) -> RingBuffer:
        """Sends COMPILED records."""
        return self._now().compiled

    def _attach(self, file_fd: int, probes: Sequence[Probe]) -> None:
        fds, slot = self._now().fds, self._slots
        if slot + len(probes) > MAX_PROBES:
            raise OSError(f"more than {MAX_PROBES} probe locations in all libraries together")
        links: list[UprobeLink] = []
        try:
            for name, program in _PROGRAMS.items():
                locations = []
                for probe in (probe for probe in probes if probe.name == name):
                    write_slot(fds["probes"], slot, probe.pack())
                    locations.append(Location(probe.offset, probe.semaphore_offset, slot))
                    slot += 1
                if locations:
                    links.append(UprobeLink(file_fd, fds[program], locations))
        except OSError:
            close_all(links)
            raise
        self._links += links
        self._slots = slot

    def counters(self) -> dict[Counter, int]:
        """What the programs counted so far, all CPUs together."""
        totals = self._now().counters.read()
        return {which: int(totals[which]) for which in Counter}

    def new_epoch(self) -> None:
        """From now on every stack travels again, under another id.

        When it returns, every launch that names a stack of before is in the ring buffer; some that name one of
        the new epoch may be, too.
        """
        self._settings = replace(self._settings, epoch=self._settings.epoch + 1)
        self._write_settings()
        wait_for_running_programs()

    def exclude(self, pids: Iterable[int]) -> None:
        """From now on launches of these processes come without stack, name and comm, marked as OTHER's.

        Of more than `Sizes.others_remembered` some come in full all the same.
        """
        add_keys(self._now().fds["others"], np.fromiter(pids, np.uint32))
        if not self._settings.scoped:
            self._settings = replace(self._settings, scoped=True)
            self._write_settings()

    def include(self, pids: Iterable[int]) -> None:
        """Takes `exclude` back for these processes; others in it need never have been excluded."""
        remove_keys(self._now().fds["others"], np.fromiter(pids, np.uint32))

    def _write_settings(self) -> None:
        write_slot(self._now().fds["settings"], 0, self._settings.pack())

    def detach(self) -> None:
        """Takes the probes out; what is in the ring buffers can still be read."""
        close_all(self._links)
        self._links.clear()
        self._slots = 0

    def close(self) -> None:
        """Gives everything back."""
        self._loader.close()
        self.detach()
        if self._loaded is not None:
            self._loaded.close()


@dataclass(frozen=True)
class _Settings:
    """`struct settings` of launches.c."""

    epoch: int = 0
    scoped: bool = False

    def pack(self) -> bytes:
        return struct.pack("<QQ", self.epoch, self.scoped)


class _Loaded:
    """Programs and maps that are there."""

    def __init__(self, fds: dict[str, int], sizes: Sizes, stack: np.dtype[np.void]) -> None:
        self.fds = fds
        self._rings: list[RingBuffer] = []
        try:
            self.launches = self._ring("launches", sizes.launch_pages, LAUNCH_RECORD)
            self.stacks = self._ring("stacks", sizes.stack_pages, stack)
            self.compiled = self._ring("compilations", sizes.compiled_pages, COMPILED)
        except OSError as error:
            self.close()
            raise BpfUnavailable(f"the BPF ring buffers cannot be mapped: {error}") from error
        self.counters = PerCpuCounters(fds["counters"], len(possible_cpus()), len(Counter))

    def _ring(self, name: str, pages: int, dtype: np.dtype[np.void]) -> RingBuffer:
        self._rings.append(RingBuffer(self.fds[name], pages * _PAGE, dtype))
        return self._rings[-1]

    def close(self) -> None:
        for ring in self._rings:
            ring.close()
        while self.fds:
            os.close(self.fds.popitem()[1])
        self._rings.clear()


def _wake_every(pages: int, record: int, cpus: int) -> int:
    """Wakes the reader when a quarter of the buffer may be full, should all CPUs write alike."""
    return max(1, pages * _PAGE // (record + 8) // (4 * cpus))
