"""The launch probes: the programs loaded, attached to libraries, its ring buffers mapped.

Reads come in bulk, as arrays; nothing here runs per launch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from errno import EINVAL

import numpy as np
from numpy.typing import NDArray

from iaprof.bpf.btf import Btf, BtfError
from iaprof.bpf.compile.compilation import Interruption
from iaprof.bpf.errors import BpfUnavailable
from iaprof.bpf.loader import Loader, Origin, close
from iaprof.bpf.maps import HashMap, PerCpuCounters, add_keys, remove_keys, wait_for_running_programs, write_slot
from iaprof.bpf.perf_event import online_cpus, possible_cpus
from iaprof.bpf.probes.driver_layout import (
    ARGUMENTS,
    MAX_CLASSES,
    MAX_GPUS,
    OWN_LAUNCHES,
    Action,
    Dispatch,
    Entry,
    Field,
    Layout,
    LayoutError,
)
from iaprof.bpf.probes.libraries import COMPILE, EXECUTE, LAUNCH, LIST_EVENT, Libraries, Way
from iaprof.bpf.probes.uprobe import Location, ProgramFor, UprobeLink, attach, close_all
from iaprof.bpf.probes.usdt import Probe
from iaprof.bpf.probes.waits import NO_SESSIONS, packed_wait_entry
from iaprof.bpf.programs import FOR_WAITS
from iaprof.bpf.ringbuffer import RingBuffer
from iaprof.bpf.structs import ENTRY, LAYOUT, MAX_STEPS, SETTINGS, Unit, What, Where, pack
from iaprof.formats.header.transfers import function_number
from iaprof.formats.header.waits import SHORT_NS, SITE, SITE_KEY, WAIT, WAITING, added_up_waits, unended_waits
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
    LaunchFlags,
    ListEvent,
    stack_dtype,
)

MAX_PROBES = 4096  # locations in all libraries together
MAX_LAYOUTS = 256  # drivers without probes
MAX_ENTRIES = 4096  # of all of them
COPY_PAGES = 16  # of a stack, that are copied at most
_PAGE = 4096
_NO_STEP = (0, 0, 0, 0, 0)
_ON_THE_WAY = max(What) + 1  # the first of the values that hold what lies on the way
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
_LIST_EVENTS = {
    Action.LIST_CLOSED: ListEvent.CLOSE,
    Action.LIST_RESET: ListEvent.RESET,
    Action.LIST_GONE: ListEvent.DESTROY,
}
_UNITS = {
    Action.TRANSFER: Unit.BYTES,
    Action.TRANSFER_REGION: Unit.REGION,
    Action.TRANSFER_SIZES: Unit.SIZES,
}


@dataclass(frozen=True)
class Sizes:
    """How much room the programs have; powers of two where pages are meant."""

    launch_pages: int = 1024  # 4 MiB: 27,000 launches
    stack_pages: int = 1024  # 4 MiB: 1,900 distinct stacks of 256 frames
    python_pages: int = 2048  # 8 MiB: 1,350 distinct stacks with frames of Python
    code_pages: int = 2048  # 8 MiB: 2,200 code objects
    pythons_remembered: int = 1 << 12
    copied_pages: int = 4096  # 16 MiB: 240 copies of stacks
    rule_bits: int = 15  # 2 MiB: 131,072 rules, once that many are known
    processes_remembered: int = 1 << 14
    ways_remembered: int = 1 << 14
    compiled_pages: int = 128
    sample_pages: int = 256  # 1 MiB: 20,000 CPU samples
    wait_pages: int = 256  # 1 MiB: 10,000 waits
    waiting_threads: int = 1 << 14
    wait_sites: int = 1 << 14
    piece_pages: int = 1024  # 4 MiB: more than one launch can send of name and code
    module_pages: int = 2048  # 8 MiB: twice what one launch can send of a module
    list_pages: int = 512  # 2 MiB: 15,000 calls that execute, close, reset or destroy command lists
    stacks_remembered: int = 1 << 16
    stack_id_bits: int = 62
    others_remembered: int = 1 << 16
    kernels_remembered: int = 1 << 14
    calls_remembered: int = 1 << 14  # of threads


def named_constants(depth: int, sizes: Sizes = Sizes(), offsets: KernelOffsets | None = None) -> dict[str, int]:
    """What the programs are loaded with, for stacks of at most `depth` frames, by name.

    Without `offsets` walks follow frame pointers.
    """
    cpus = len(online_cpus())
    return {
        "STACK_DEPTH": depth,
        "STACK_ID_BITS": sizes.stack_id_bits,
        "FRAME_POINTERS_ONLY": int(offsets is None),
        **(offsets or KernelOffsets(0, 0, 0, 0, 0, 0, 0)).named(),
        "COPY_PAGES": COPY_PAGES,
        "SAMPLE_WAKE_EVERY": _wake_every(sizes.sample_pages, CPU_SAMPLE.itemsize, cpus),
        "WAIT_SHORT_NS": SHORT_NS,
        "WAIT_WAKE_EVERY": _wake_every(sizes.wait_pages, WAIT.itemsize, cpus),
        "LAUNCH_WAKE_EVERY": _wake_every(sizes.launch_pages, LAUNCH_RECORD.itemsize, cpus),
        "STACK_WAKE_EVERY": _wake_every(sizes.stack_pages, stack_dtype(depth).itemsize, cpus),
        "CODE_WAKE_EVERY": _wake_every(sizes.code_pages, CODE.itemsize, cpus),
        "PIECE_WAKE_EVERY": _wake_every(sizes.piece_pages, CHUNK.itemsize, cpus),
        "MODULE_WAKE_EVERY": _wake_every(sizes.module_pages, CHUNK.itemsize, cpus),
        "LIST_WAKE_EVERY": _wake_every(sizes.list_pages, LIST_RECORD.itemsize, cpus),
    }


@dataclass(frozen=True)
class KernelOffsets:
    """Where the kernel has what tells the states of a process's mappings apart, in bytes."""

    task_group_leader: int
    task_start_boottime: int
    task_mm: int
    task_sas_ss_sp: int
    task_sas_ss_size: int
    task_fsbase: int
    mm_exec_vm: int

    def named(self) -> dict[str, int]:
        """As the programs are loaded with them, by name."""
        return {name.upper(): offset for name, offset in asdict(self).items()}


_TASK = (("group_leader",), ("start_boottime",), ("mm",), ("sas_ss_sp",), ("sas_ss_size",), ("thread", "fsbase"))


def kernel_offsets() -> KernelOffsets | None:
    """Those of the running kernel; None if its BTF does not tell."""
    try:
        btf = Btf()
        found = [btf.offset("task_struct", *names) for names in _TASK]
        found.append(btf.offset("mm_struct", "exec_vm"))
    except BtfError:
        return None
    offsets = [offset for offset in found if offset is not None]
    return KernelOffsets(*offsets) if len(offsets) == len(found) else None


def map_entries(sizes: Sizes = Sizes()) -> dict[str, int]:
    """For how many elements maps have room (ring buffers: bytes), by name; other maps have one element."""
    return {
        "probes": MAX_PROBES,
        "layouts": MAX_LAYOUTS,
        "entries": MAX_ENTRIES,
        "others": sizes.others_remembered,
        "stacks_sent": sizes.stacks_remembered,
        "kernels_seen": sizes.kernels_remembered,
        "occupants": sizes.kernels_remembered,
        "modules_seen": sizes.kernels_remembered,
        "calls": sizes.calls_remembered,
        "launches": sizes.launch_pages * _PAGE,
        "stacks": sizes.stack_pages * _PAGE,
        "python_stacks": sizes.python_pages * _PAGE,
        "codes": sizes.code_pages * _PAGE,
        "pythons": sizes.pythons_remembered,
        "python_threads": sizes.processes_remembered,
        "codes_checked": sizes.stacks_remembered,
        "codes_sent": sizes.stacks_remembered,
        "compilations": sizes.compiled_pages * _PAGE,
        "samples": sizes.sample_pages * _PAGE,
        "wait_entries": MAX_ENTRIES,
        "waits": sizes.waiting_threads,
        "wait_sites": sizes.wait_sites,
        "waited": sizes.wait_pages * _PAGE,
        "copies": sizes.copied_pages * _PAGE,
        "rules": 1 << sizes.rule_bits,
        "spaces": sizes.processes_remembered,
        "loads": sizes.processes_remembered,
        "ways": sizes.ways_remembered,
        "pieces": sizes.piece_pages * _PAGE,
        "modules": sizes.module_pages * _PAGE,
        "list_events": sizes.list_pages * _PAGE,
    }


class LaunchProbes:
    """The loaded programs and what they send.

    Where they have to be compiled, that goes on in a process apart; whatever is asked of them first waits for it, best
    `ready`.
    """

    def __init__(
        self,
        sizes: Sizes = Sizes(),
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
        write_slot(self._now().fds["layouts"], self._layouts, _packed_layout(layout))
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
            write_slot(fds["entries"], slot, _packed_entry(layout, entry, index))
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


def _packed_layout(layout: Layout) -> bytes:
    """LAYOUT; LayoutError where its programs have no room for all of it."""
    first, more = (*layout.address, None)[:2]
    where = {Where.CLASS: layout.kernel_class, Where.ADDRESS: first, Where.ADDRESS_MORE: more}
    start_of_memory, bytes_of_memory = layout.allocation
    what = {
        What.BINARY: layout.binary,
        What.BINARY_BYTES: layout.binary_size,
        What.CODE: layout.code,
        What.CODE_BYTES: layout.size,
        What.NAME: layout.name,
        What.ALLOCATION: start_of_memory,
        What.ALLOCATION_BYTES: bytes_of_memory,
        What.MODULE: layout.module,
    }
    scripts = [_steps(where), _steps(what)]
    if max(map(len, scripts)) > MAX_STEPS:
        raise LayoutError(f"its paths have more than {MAX_STEPS} steps together")
    classes = (layout.classes * MAX_CLASSES)[:MAX_CLASSES]
    steps = [number for script in scripts for step in (script + [_NO_STEP] * MAX_STEPS)[:MAX_STEPS] for number in step]
    start, end = layout.code_range or (0, 0)
    dispatch = layout.dispatch or Dispatch(0, 0, 0, (0, 0))
    of_dispatch = (dispatch.first, dispatch.many, dispatch.size, *dispatch.kernel)
    gpu, mask = (layout.gpu.path, MAX_GPUS - 1) if layout.gpu else ((0, 0, 0), 0)
    code = start, max(0, end - start)
    return pack(LAYOUT, *classes, *map(len, scripts), *steps, *code, *of_dispatch, *gpu, mask)


def _steps(fields: Mapping[Where, Field | None] | Mapping[What, Field | None]) -> list[tuple[int, ...]]:
    """STEPs that lead from a handle to values by their numbers, and walk shared ways once."""
    numbered = ((field, number) for number, field in fields.items() if field)
    ways = sorted((tuple(field.steps()), field.bits, number) for field, number in numbered)
    steps: list[tuple[int, ...]] = []
    way: list[tuple[int, int]] = []  # of what the values for the way hold now
    for path, bits, number in ways:
        *before, (last, per_gpu) = path
        while way != before[: len(way)]:
            way.pop()
        for offset, more in before[len(way) :]:
            steps.append((offset, 8, _ON_THE_WAY + len(way) - 1 if way else 0, _ON_THE_WAY + len(way), more))
            way.append((offset, more))
        steps.append((last, bits // 8, _ON_THE_WAY + len(way) - 1 if way else 0, number, per_gpu))
    return steps


def _packed_entry(layout: Layout | None, entry: Entry, index: int) -> bytes:
    """ENTRY, for the layout with this index; MAX_LAYOUTS for none."""
    offset = entry.offset - (layout.module_bias if layout and entry.action is Action.MODULE_GONE else 0)
    is_array = entry.count is not None
    registers = ARGUMENTS[entry.handle], ARGUMENTS[entry.count or 0]
    flags = LaunchFlags.OWN if entry.action in OWN_LAUNCHES else 0
    transfer, unit = function_number(entry.name), _UNITS.get(entry.action, Unit.NO_NUMBER)
    event = _LIST_EVENTS.get(entry.action, ListEvent.EXECUTE)
    in_list = bool(layout and layout.has_lists)
    numbers = (*registers, is_array, flags, offset, transfer, unit, entry.list_offset, in_list, event)
    return pack(ENTRY, entry.address, index, *numbers, entry.nested)


def _wake_every(pages: int, record: int, cpus: int) -> int:
    """Wakes the reader when a quarter of the buffer may be full, should all CPUs write alike."""
    return max(1, pages * _PAGE // (record + 8) // (4 * cpus))
