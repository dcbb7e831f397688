"""The launch probes: the programs loaded, attached to libraries, its ring buffers mapped.

Reads come in bulk, as arrays; nothing here runs per launch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from errno import EINVAL

import numpy as np
from numpy.typing import NDArray

from iaprof.bpf.compile.compilation import Interruption
from iaprof.bpf.errors import BpfUnavailable
from iaprof.bpf.loader import Loader, Origin, close
from iaprof.bpf.maps import HashMap, PerCpuCounters, add_keys, remove_keys, wait_for_running_programs, write_slot
from iaprof.bpf.perf_event import possible_cpus
from iaprof.bpf.probes.driver_layout import (
    Action,
    Entry,
    Layout,
    LayoutError,
)
from iaprof.bpf.probes.libraries import COMPILE, EXECUTE, LAUNCH, LIST_EVENT, Libraries, Way
from iaprof.bpf.probes.packed_layout import packed_entry, packed_layout
from iaprof.bpf.probes.uprobe import Location, ProgramFor, UprobeLink, attach, close_all
from iaprof.bpf.probes.usdt import Probe
from iaprof.bpf.probes.waits import NO_SESSIONS, packed_wait_entry
from iaprof.bpf.programs import FOR_WAITS
from iaprof.bpf.ringbuffer import RingBuffer
from iaprof.bpf.sizes import (
    _PAGE,
    DEFAULT_SIZES,
    MAX_ENTRIES,
    MAX_LAYOUTS,
    MAX_PROBES,
    Sizes,
    kernel_offsets,
    map_entries,
    named_constants,
)
from iaprof.bpf.structs import SETTINGS, pack
from iaprof.formats.header.waits import SITE, SITE_KEY, WAIT, WAITING, added_up_waits, unended_waits
from iaprof.formats.wire.launches import (
    CHUNK,
    CODE,
    COMPILED,
    CPU_SAMPLE,
    LAUNCH as LAUNCH_RECORD,
    LIST_EVENT as LIST_RECORD,
    MAX_DEPTH,
    PYTHON_STACK,
    Counter,
    stack_dtype,
)

_PROGRAMS = {  # by the probe's name
    LAUNCH: "on_launch",
    COMPILE: "on_compile",
    EXECUTE: "on_probed_execute",
    LIST_EVENT: "on_probed_list_event",
}
_HANDLE_PROGRAMS = {
    Action.LAUNCH: "on_handle_launch",
    Action.LAUNCH_MANY: "on_handle_launch",
    Action.KERNEL_GONE: "on_kernel_gone",
    Action.MODULE_GONE: "on_module_gone",
    Action.EXECUTE: "on_execute",
    Action.LIST_CLOSED: "on_list_event",
    Action.LIST_RESET: "on_list_event",
    Action.LIST_GONE: "on_list_event",
    Action.TRANSFER: "on_transfer",
    Action.TRANSFER_REGION: "on_transfer",
    Action.TRANSFER_SIZES: "on_transfer",
    Action.TRANSFER_UNKNOWN: "on_transfer",
    Action.MAY_COPY: "on_may_copy",
    Action.OWN_LAUNCH: "on_own_launch",
    Action.OWN_LAUNCHES: "on_own_launches",
}


class LaunchProbes:
    """The loaded programs and what they send.

    Where they have to be compiled, that goes on in a process apart; whatever is asked of them first waits for it, best
    `ready`.
    """

    def __init__(
        self,
        sizes: Sizes = DEFAULT_SIZES,
        ways: Sequence[Way] = tuple(Way),
        frame_pointers_only: bool = False,
        depth: int = MAX_DEPTH,
        waits: bool = False,
    ) -> None:
        """Loads, or begins to compile.

        Args:
            sizes: how much room they have.
            ways: to get at launches, the best first.
            frame_pointers_only: walks by frame pointers, also if the kernel tells what rules need.
            depth: frames of a stack, at most MAX_DEPTH.
            waits: records waits, too, where a driver's layout tells where they are. While a thread waits, there
                is another return address on its stack.

        Raises:
            BpfUnavailable: what is missing or not permitted.
        """
        self.depth = depth
        self._with_waits = waits
        self.waits_refused = ""  # why waits are not recorded in a driver whose layout has some
        self.sizes, self._stack = sizes, stack_dtype(self.depth)
        offsets = None if frame_pointers_only else kernel_offsets()
        self.follows_frame_pointers = offsets is None
        without = () if waits else FOR_WAITS
        self._loader = Loader(named_constants(self.depth, sizes, offsets), map_entries(sizes), without)
        self._loaded: _Loaded | None = None
        self._settings = _Settings()
        self._links: list[UprobeLink] = []
        self._watches: list[UprobeLink] = []  # in C libraries
        self._slots = 0  # of the `probes` map that are taken
        self._layouts = self._entries = self._wait_entries = 0  # of those maps that are taken
        self.libraries = Libraries(self._attach, self._attach_layout, ways, self._watch_loads, self._attach_entries)

    def ready(self, interruption: Interruption | None = None) -> None:
        """Waits until the programs are loaded.

        Args:
            interruption: may end the wait, by what its `check` raises.

        Raises:
            BpfUnavailable: what is missing, and how to get it.
        """
        if self._loaded is None:
            self._loaded = _Loaded(self._loader.wait(interruption), self.sizes, self._stack)

    def _now(self) -> _Loaded:
        self.ready()
        assert self._loaded is not None
        return self._loaded

    @property
    def compile_cpu_seconds(self) -> float:
        """CPU time of the process that compiled, if there was one, once it did."""
        return self._loader.cpu_seconds

    @property
    def records_waits(self) -> bool:
        """Whether waits are wanted, and nothing refused them."""
        return self._with_waits and not self.waits_refused

    @property
    def origin(self) -> Origin:
        """Where the programs come from, once they are loaded."""
        return self._loader.origin

    @property
    def launches(self) -> RingBuffer:
        """Sends LAUNCH records."""
        return self._now().launches

    @property
    def stacks(self) -> RingBuffer:
        """Sends records of stack_dtype(depth). All that launches name which were read before were sent by then."""
        return self._now().stacks

    @property
    def python_stacks(self) -> RingBuffer:
        """Sends PYTHON_STACK records, each after the record of its stack."""
        return self._now().python_stacks

    @property
    def codes(self) -> RingBuffer:
        """Sends CODE records."""
        return self._now().codes

    @property
    def maps(self) -> Mapping[str, int]:
        """The descriptors of BPF maps and programs by name; they stay this object's."""
        return self._now().fds

    @property
    def compiled(self) -> RingBuffer:
        """Sends COMPILED records."""
        return self._now().compiled

    @property
    def samples(self) -> RingBuffer:
        """Sends CPU_SAMPLE records, while a CpuClock runs `on_sample` of `maps`."""
        return self._now().samples

    @property
    def waits(self) -> RingBuffer:
        """Sends WAIT records."""
        return self._now().waits

    @property
    def pieces(self) -> RingBuffer:
        """Sends CHUNK records of names and code."""
        return self._now().pieces

    @property
    def modules(self) -> RingBuffer:
        """Sends CHUNK records of modules."""
        return self._now().modules

    @property
    def list_events(self) -> RingBuffer:
        """Sends LIST_EVENT records."""
        return self._now().list_events

    def _attach(self, file_fd: int, probes: Sequence[Probe]) -> str:
        fds = self._now().fds
        if self._slots + len(probes) > MAX_PROBES:
            raise OSError(f"more than {MAX_PROBES} probe locations in all libraries together")
        locations = defaultdict(list)
        for slot, probe in enumerate(probes, self._slots):
            write_slot(fds["probes"], slot, probe.pack())
            locations[_PROGRAMS[probe.name]].append(Location(probe.offset, probe.semaphore_offset, slot))
        doubt = self._link(file_fd, locations)
        self._slots += len(probes)
        return doubt

    def _attach_layout(self, file_fd: int, layout: Layout, offsets: Sequence[int]) -> None:
        if self._layouts >= MAX_LAYOUTS:
            raise OSError("there is no room for another driver's layout")
        write_slot(self._now().fds["layouts"], self._layouts, packed_layout(layout))
        self._attach_entries(file_fd, list(zip(layout.entries, offsets, strict=True)), layout)
        self._layouts += 1

    def _attach_entries(self, file_fd: int, placed: Sequence[tuple[Entry, int]], layout: Layout | None = None) -> None:
        """Attaches functions that have a layout, which is at the next slot, or need none."""
        fds = self._now().fds
        if self._entries + self._wait_entries + len(placed) > MAX_ENTRIES:
            raise OSError("there is no room for another driver's functions")
        index = self._layouts if layout else MAX_LAYOUTS
        locations = defaultdict(list)
        own = [(entry, offset) for entry, offset in placed if not entry.is_wait]
        for slot, (entry, offset) in enumerate(own, self._entries):
            write_slot(fds["entries"], slot, packed_entry(layout, entry, index))
            locations[_HANDLE_PROGRAMS[entry.action]].append(Location(offset, 0, slot))
        self._link(file_fd, locations)
        self._entries += len(own)
        self._attach_waits(file_fd, [(entry, offset) for entry, offset in placed if entry.is_wait])

    def _attach_waits(self, file_fd: int, entries: Sequence[tuple[Entry, int]]) -> None:
        """Without them launches are recorded all the same."""
        if not self._with_waits:
            return
        fds = self._now().fds
        locations = []
        try:
            for slot, (entry, offset) in enumerate(entries, self._wait_entries):
                write_slot(fds["wait_entries"], slot, packed_wait_entry(entry))
                locations.append(Location(offset, 0, slot))
            if locations:
                self._links.append(UprobeLink(file_fd, fds["on_wait"], locations, ProgramFor.SESSIONS))
        except OSError as refusal:
            self.waits_refused = NO_SESSIONS if refusal.errno == EINVAL else f"the kernel refuses ({refusal.strerror})"
        except LayoutError as error:
            self.waits_refused = str(error)
        else:
            self._wait_entries += len(entries)

    def _watch_loads(self, file_fd: int, offsets: Sequence[int]) -> None:
        locations = [Location(offset, 0, 0) for offset in offsets]
        self._watches += attach(file_fd, self._now().fds["on_load"], locations).links

    def _link(self, file_fd: int, locations: Mapping[str, Sequence[Location]]) -> str:
        """Attaches programs, given by their names, in a file: all or none; gives why they may not run, or nothing."""
        links: list[UprobeLink] = []
        doubts: list[str] = []
        try:
            for program, where in locations.items():
                attached = attach(file_fd, self._now().fds[program], where)
                links += attached.links
                doubts += filter(None, [attached.doubt])
        except OSError:
            close_all(links)
            raise
        self._links += links
        return doubts[0] if doubts else ""

    def counters(self) -> dict[Counter, int]:
        """What the programs counted so far, all CPUs together."""
        totals = self._now().counters.read()
        return {which: int(totals[which]) for which in Counter}

    def take_short_waits(self) -> NDArray[np.void]:
        """Sums of short waits that were not sent yet, as WAIT[n]; others begin."""
        return added_up_waits(*self._now().wait_sites.take())

    def unended_waits(self, end_ns: int) -> NDArray[np.void]:
        """Waits that are still going on, as WAIT[n], as long as they have taken until then."""
        return unended_waits(*self._now().waiting.read(), end_ns)

    def forget_waits(
        self, alive: Callable[[int, int], bool], end_ns: int, least: int | None = None
    ) -> NDArray[np.void]:
        """Makes room where many threads have waited that are no more; gives the waits in which they ended, as WAIT[n].

        Args:
            alive: whether a process has a thread.
            end_ns: since when they are known to have ended.
            least: threads that are many; half of those that there is room for when left out.
        """
        waiting = self._now().waiting
        tids, values = waiting.read()
        if len(tids) <= (self.sizes.waiting_threads // 2 if least is None else least):
            return unended_waits(tids[:0], values[:0], end_ns)
        pairs = zip(values["pid"].tolist(), tids.tolist(), strict=True)
        is_gone = np.array([not alive(pid, tid) for pid, tid in pairs], bool)
        waiting.delete(tids[is_gone])
        return unended_waits(tids[is_gone], values[is_gone], end_ns)

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
        close_all([*self._links, *self._watches])
        self._links.clear()
        self._watches.clear()
        self._slots = self._layouts = self._entries = self._wait_entries = 0

    def close(self) -> None:
        """Gives everything back."""
        self._loader.close()
        self.detach()
        if self._loaded is not None:
            self._loaded.close()


@dataclass(frozen=True)
class _Settings:
    """SETTINGS."""

    epoch: int = 0
    scoped: bool = False

    def pack(self) -> bytes:
        return pack(SETTINGS, self.epoch, self.scoped)


class _Loaded:
    """Programs and maps that are there."""

    def __init__(self, fds: dict[str, int], sizes: Sizes, stack: np.dtype[np.void]) -> None:
        self.fds = fds
        self._rings: list[RingBuffer] = []
        try:
            self.launches = self._ring("launches", sizes.launch_pages, LAUNCH_RECORD)
            self.stacks = self._ring("stacks", sizes.stack_pages, stack)
            self.python_stacks = self._ring("python_stacks", sizes.python_pages, PYTHON_STACK)
            self.codes = self._ring("codes", sizes.code_pages, CODE)
            self.compiled = self._ring("compilations", sizes.compiled_pages, COMPILED)
            self.samples = self._ring("samples", sizes.sample_pages, CPU_SAMPLE)
            self.waits = self._ring("waited", sizes.wait_pages, WAIT)
            self.pieces = self._ring("pieces", sizes.piece_pages, CHUNK)
            self.modules = self._ring("modules", sizes.module_pages, CHUNK)
            self.list_events = self._ring("list_events", sizes.list_pages, LIST_RECORD)
        except OSError as error:
            self.close()
            raise BpfUnavailable(f"the BPF ring buffers cannot be mapped: {error}") from error
        self.waiting = HashMap(fds["waits"], np.dtype("<u4"), WAITING, sizes.waiting_threads)
        self.wait_sites = HashMap(fds["wait_sites"], SITE_KEY, SITE, sizes.wait_sites)
        self.counters = PerCpuCounters(fds["counters"], len(possible_cpus()), len(Counter))

    def _ring(self, name: str, pages: int, dtype: np.dtype[np.void]) -> RingBuffer:
        self._rings.append(RingBuffer(self.fds[name], pages * _PAGE, dtype))
        return self._rings[-1]

    def close(self) -> None:
        for ring in self._rings:
            ring.close()
        close(self.fds)
        self._rings.clear()
