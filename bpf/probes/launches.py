"""The launch probes: loads the BPF programs, attaches them to libraries, and maps their ring buffers.

Ring buffers are read in bulk, as arrays; no Python code here runs per launch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from errno import EINVAL

import numpy as np
from numpy.typing import NDArray

from iaprof.bpf.bytecode import BpfUnavailable
from iaprof.bpf.compile.compilation import Interruption
from iaprof.bpf.driver_layout import (
    Action,
    Entry,
    Layout,
    LayoutError,
)
from iaprof.bpf.loader import Loader, Origin, Programs, close
from iaprof.bpf.maps import (
    HashMap,
    PerCpuCounters,
    RingBuffer,
    add_keys,
    remove_keys,
    wait_for_running_programs,
    write_slot,
)
from iaprof.bpf.perf_event import possible_cpus
from iaprof.bpf.probes.libraries import COMPILE, EXECUTE, LAUNCH, LIST_EVENT, MESSAGE, Libraries, Way
from iaprof.bpf.probes.packed_layout import packed_entry, packed_layout, packed_wait_entry
from iaprof.bpf.probes.usdt import Probe
from iaprof.bpf.programs import SAMPLE_PROGRAMS, WAIT_PROGRAMS
from iaprof.bpf.sizes import (
    DEFAULT_SIZES,
    MAX_ENTRIES,
    MAX_LAYOUTS,
    MAX_PROBES,
    PAGE_BYTES,
    Sizes,
    kernel_offsets,
    map_entries,
    program_constants,
)
from iaprof.bpf.structs import SETTINGS, pack
from iaprof.bpf.uprobe import Link, Location, ProgramFor, UprobeLink, attach, close_all
from iaprof.formats.header.waits import SITE, SITE_KEY, WAIT, WAITING, added_up_waits, unended_waits
from iaprof.formats.wire.launches import (
    CHUNK,
    CODE,
    COMPILED,
    CPU_SAMPLE,
    LAUNCH as LAUNCH_RECORD,
    LIST_EVENT as LIST_RECORD,
    MAX_DEPTH,
    MESSAGE as MESSAGE_RECORD,
    PATH as PATH_RECORD,
    PYTHON_STACK,
    Counter,
    stack_dtype,
)

NO_SESSIONS = "this kernel has no uprobe sessions, which came with Linux 6.13: boot a newer one"
_PROGRAMS = {  # by name of the USDT probe
    LAUNCH: "on_launch",
    COMPILE: "on_compile",
    EXECUTE: "on_probed_execute",
    LIST_EVENT: "on_probed_list_event",
    MESSAGE: "on_message",
}
_HANDLE_PROGRAMS = {
    Action.LAUNCH: "on_handle_launch",
    Action.LAUNCH_MANY: "on_handle_launch",
    Action.DRAW: "on_draw",
    Action.KERNEL_GONE: "on_kernel_gone",
    Action.SHADER_GONE: "on_shader_gone",
    Action.NAMED: "on_named",
    Action.MAKE: "on_make",
    Action.MAKE_TO_DRAW: "on_make",
    Action.MADE: "on_made",
    Action.MADE_TO_DRAW: "on_made",
    Action.MODULE_GONE: "on_module_gone",
    Action.EXECUTE: "on_execute",
    Action.SUBMIT: "on_submit",
    Action.INCLUDE: "on_execute",
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
    Action.OPERATION: "on_operation",
    Action.UPLOAD: "on_upload",
    Action.UPLOADED: "on_uploaded",
}


class LaunchProbes:
    """The loaded programs, and the ring buffers to which they write.

    If the programs have to be compiled, a child process does so; the first use of the programs waits for it. Call
    `ready` to wait explicitly.
    """

    def __init__(
        self,
        sizes: Sizes = DEFAULT_SIZES,
        ways: Sequence[Way] = tuple(Way),
        frame_pointers_only: bool = False,
        depth: int = MAX_DEPTH,
        waits: bool = False,
        cpu_samples: bool = True,
    ) -> None:
        """Loads the programs, or starts to compile them.

        Args:
            sizes: of maps and ring buffers.
            ways: the ways of recording launches that may be used.
            frame_pointers_only: walk stacks by frame pointers, even if the kernel's BTF has all that rules need.
            depth: maximum number of frames in a stack, at most MAX_DEPTH.
            waits: record waits, too, in drivers whose layout has functions that wait. While a thread waits, its stack
                has a changed return address.
            cpu_samples: load the programs that sample CPUs, too.

        Raises:
            BpfUnavailable: something is missing or not permitted.
        """
        self.depth = depth
        self._with_waits = waits
        self.waits_refused = ""  # why waits are not recorded in a driver whose layout has functions that wait
        self.sizes, self._stack = sizes, stack_dtype(self.depth)
        offsets = None if frame_pointers_only else kernel_offsets()
        self.follows_frame_pointers = offsets is None
        without = {*(() if waits else WAIT_PROGRAMS), *(() if cpu_samples else SAMPLE_PROGRAMS)}
        self._loader = Loader(program_constants(self.depth, sizes, offsets), map_entries(sizes), without)
        self._loaded: _LoadedPrograms | None = None
        self._settings = _Settings()
        self._links: list[Link] = []
        self._linker_links: list[Link] = []  # to dynamic linkers
        self._slots = 0  # number of used elements of the map `probes`
        self._layouts = self._entries = self._wait_entries = 0  # numbers of used elements of these maps
        self.libraries = Libraries(self._attach, self._attach_layout, ways, self._watch_unloads, self._attach_entries)

    def ready(self, interruption: Interruption | None = None) -> None:
        """Waits until the programs are loaded.

        Args:
            interruption: its `check` may raise an exception to end the wait.

        Raises:
            BpfUnavailable: something is missing; the text says how to get it.
        """
        if self._loaded is None:
            self._loaded = _LoadedPrograms(self._loader.wait(interruption), self.sizes, self._stack)

    def _wait_loaded(self) -> _LoadedPrograms:
        self.ready()
        assert self._loaded is not None
        return self._loaded

    @property
    def compile_cpu_seconds(self) -> float:
        """CPU time of the compiling process in seconds, after it has ended; 0 without one."""
        return self._loader.cpu_seconds

    @property
    def records_waits(self) -> bool:
        """Whether waits are requested, and the kernel and the layouts allow them."""
        return self._with_waits and not self.waits_refused

    @property
    def origin(self) -> Origin:
        """How the loaded programs were obtained."""
        return self._loader.origin

    @property
    def launches(self) -> RingBuffer:
        """The ring buffer of LAUNCH records."""
        return self._wait_loaded().launches

    @property
    def stacks(self) -> RingBuffer:
        """The ring buffer of records of stack_dtype(depth); read it after `launches`, to get all stacks of these."""
        return self._wait_loaded().stacks

    @property
    def python_stacks(self) -> RingBuffer:
        """The ring buffer of PYTHON_STACK records, each sent before its stack: read it after `stacks`."""
        return self._wait_loaded().python_stacks

    @property
    def codes(self) -> RingBuffer:
        """The ring buffer of CODE records."""
        return self._wait_loaded().codes

    @property
    def maps(self) -> Mapping[str, int]:
        """The descriptors of BPF maps and programs by name; this object closes them."""
        return self._wait_loaded().fds

    @property
    def compiled(self) -> RingBuffer:
        """The ring buffer of COMPILED records."""
        return self._wait_loaded().compiled

    @property
    def samples(self) -> RingBuffer:
        """The ring buffer of CPU_SAMPLE records, written while a CpuClock runs the program `on_sample` of `maps`."""
        return self._wait_loaded().samples

    @property
    def waits(self) -> RingBuffer:
        """The ring buffer of WAIT records."""
        return self._wait_loaded().waits

    @property
    def chunks(self) -> RingBuffer:
        """The ring buffer of CHUNK records with kernels' names and code."""
        return self._wait_loaded().chunks

    @property
    def modules(self) -> RingBuffer:
        """The ring buffer of CHUNK records with modules."""
        return self._wait_loaded().modules

    @property
    def list_events(self) -> RingBuffer:
        """The ring buffer of LIST_EVENT records."""
        return self._wait_loaded().list_events

    @property
    def messages(self) -> RingBuffer:
        """The ring buffer of MESSAGE records of our library in programs of NVIDIA's GPUs, without `pieces`."""
        return self._wait_loaded().messages

    @property
    def pieces(self) -> RingBuffer:
        """The ring buffer of those MESSAGE records that are pieces of cubins."""
        return self._wait_loaded().pieces

    @property
    def paths(self) -> RingBuffer:
        """The ring buffer of PATH records; read it before `launches`, to get the launches of all of these."""
        return self._wait_loaded().paths

    def _attach(self, file_fd: int, probes: Sequence[Probe]) -> str:
        fds = self._wait_loaded().fds
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
        write_slot(self._wait_loaded().fds["layouts"], self._layouts, packed_layout(layout))
        self._attach_entries(file_fd, list(zip(layout.entries, offsets, strict=True)), layout)
        self._layouts += 1

    def _attach_entries(self, file_fd: int, placed: Sequence[tuple[Entry, int]], layout: Layout | None = None) -> None:
        """Attaches programs to functions; `layout`, if given, is the one that `_attach_layout` is adding."""
        fds = self._wait_loaded().fds
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
        """Attaches the program for waits; if that fails, sets `waits_refused`, as launches can still be recorded."""
        if not self._with_waits:
            return
        fds = self._wait_loaded().fds
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

    def _watch_unloads(self, file_fd: int, changes: Sequence[tuple[int, int]]) -> None:
        locations = [Location(offset, 0, change) for offset, change in changes]
        self._linker_links += attach(file_fd, self._wait_loaded().fds["on_link_map_change"], locations).links

    def _link(self, file_fd: int, locations: Mapping[str, Sequence[Location]]) -> str:
        """Attaches programs, by name, to a file: all or none; returns why they may not run, or an empty string."""
        links: list[Link] = []
        doubts: list[str] = []
        self.need(locations)
        try:
            for program, where in locations.items():
                attached = attach(file_fd, self._wait_loaded().fds[program], where)
                links += attached.links
                doubts += filter(None, [attached.doubt])
        except OSError:
            close_all(links)
            raise
        self._links += links
        return doubts[0] if doubts else ""

    def need(self, names: Iterable[str]) -> None:
        """Loads programs that are loaded when a driver needs them, unless they are.

        Raises:
            OSError: the kernel refuses one.
        """
        self._wait_loaded().programs.need(names)

    def counters(self) -> dict[Counter, int]:
        """Returns the values of the programs' counters, summed over all CPUs."""
        totals = self._wait_loaded().counters.read()
        return {which: int(totals[which]) for which in Counter}

    def take_short_waits(self) -> NDArray[np.void]:
        """Returns the sums of short waits that were not sent yet, as WAIT[n], and deletes them."""
        self._settings = replace(self._settings, generation=self._settings.generation + 1)
        self._write_settings()
        wait_for_running_programs()  # from now on, no program adds to a sum of an older generation
        keys, sites = self._wait_loaded().wait_sites.read()
        is_old = keys["generation"] < self._settings.generation
        self._wait_loaded().wait_sites.delete_all(keys[is_old])
        return added_up_waits(keys[is_old], sites[is_old])

    def unended_waits(self, end_ns: int) -> NDArray[np.void]:
        """Returns the waits that have not ended yet, as WAIT[n], with the given end."""
        return unended_waits(*self._wait_loaded().waiting.read(), end_ns)

    def forget_waits(
        self, alive: Callable[[int, int], bool], end_ns: int, least: int | None = None
    ) -> NDArray[np.void]:
        """Removes threads that have ended, if the map has many; returns the waits in which they ended, as WAIT[n].

        Args:
            alive: whether a process (pid) has a thread (tid).
            end_ns: end of the returned waits, CLOCK_MONOTONIC.
            least: removes nothing up to this number of threads; None for half the size of the map.
        """
        waiting = self._wait_loaded().waiting
        tids, values = waiting.read()
        if len(tids) <= (self.sizes.waiting_threads // 2 if least is None else least):
            return unended_waits(tids[:0], values[:0], end_ns)
        pairs = zip(values["pid"].tolist(), tids.tolist(), strict=True)
        is_gone = np.array([not alive(pid, tid) for pid, tid in pairs], bool)
        waiting.delete(tids[is_gone])
        return unended_waits(tids[is_gone], values[is_gone], end_ns)

    def new_epoch(self) -> None:
        """Starts a new epoch, in which every stack is sent again, with another id.

        When this returns, all launches with stacks of the old epoch are in the ring buffer; launches with stacks of the
        new epoch may be there, too.
        """
        self._settings = replace(self._settings, epoch=self._settings.epoch + 1)
        self._write_settings()
        wait_for_running_programs()

    def exclude(self, pids: Iterable[int], launches: bool = True) -> None:
        """Makes CPU samples of these processes come without stacks, and launches also without name and comm.

        These launches have LaunchFlags.OTHER. Of more than `Sizes.others_remembered` processes, some are recorded in
        full.

        Args:
            pids: the processes.
            launches: whether it applies to launches, copies and waits, too; once it does, it does for all.
        """
        add_keys(self._wait_loaded().fds["others"], np.fromiter(pids, np.uint32))
        if launches and not self._settings.scoped:
            self._settings = replace(self._settings, scoped=True)
            self._write_settings()

    def include(self, pids: Iterable[int]) -> None:
        """Reverses `exclude` for these processes, as far as they are excluded."""
        remove_keys(self._wait_loaded().fds["others"], np.fromiter(pids, np.uint32))

    def _write_settings(self) -> None:
        write_slot(self._wait_loaded().fds["settings"], 0, self._settings.pack())

    def detach(self) -> None:
        """Detaches all probes; records in the ring buffers can still be read."""
        close_all([*self._links, *self._linker_links])
        self._links.clear()
        self._linker_links.clear()
        self._slots = self._layouts = self._entries = self._wait_entries = 0

    def close(self) -> None:
        """Detaches the probes, and closes programs, maps and ring buffers."""
        self._loader.close()
        self.detach()
        if self._loaded is not None:
            self._loaded.close()


@dataclass(frozen=True)
class _Settings:
    """The content of the map `settings`."""

    epoch: int = 0
    generation: int = 0
    scoped: bool = False

    def pack(self) -> bytes:
        return pack(SETTINGS, self.epoch, self.generation, self.scoped)


class _LoadedPrograms:
    """The loaded programs, with their maps and ring buffers."""

    def __init__(self, programs: Programs, sizes: Sizes, stack: np.dtype[np.void]) -> None:
        self.programs = programs
        self.fds = fds = programs.fds
        self._rings: list[RingBuffer] = []
        try:
            self.launches = self._ring("launches", sizes.launch_pages, LAUNCH_RECORD)
            self.stacks = self._ring("stacks", sizes.stack_pages, stack)
            self.python_stacks = self._ring("python_stacks", sizes.python_pages, PYTHON_STACK)
            self.codes = self._ring("codes", sizes.code_pages, CODE)
            self.compiled = self._ring("compilations", sizes.compiled_pages, COMPILED)
            self.samples = self._ring("samples", sizes.sample_pages, CPU_SAMPLE)
            self.waits = self._ring("waited", sizes.wait_pages, WAIT)
            self.chunks = self._ring("chunks", sizes.chunk_pages, CHUNK)
            self.modules = self._ring("modules", sizes.module_pages, CHUNK)
            self.list_events = self._ring("list_events", sizes.list_pages, LIST_RECORD)
            self.messages = self._ring("messages", sizes.message_pages, MESSAGE_RECORD)
            self.pieces = self._ring("pieces", sizes.piece_pages, MESSAGE_RECORD)
            self.paths = self._ring("paths", sizes.path_pages, PATH_RECORD)
        except OSError as error:
            self.close()
            raise BpfUnavailable(f"the BPF ring buffers cannot be mapped: {error}") from error
        self.waiting = HashMap(fds["waits"], np.dtype("<u4"), WAITING, sizes.waiting_threads)
        self.wait_sites = HashMap(fds["wait_sites"], SITE_KEY, SITE, sizes.wait_sites)
        self.counters = PerCpuCounters(fds["counters"], len(possible_cpus()), len(Counter))

    def _ring(self, name: str, pages: int, dtype: np.dtype[np.void]) -> RingBuffer:
        self._rings.append(RingBuffer(self.fds[name], pages * PAGE_BYTES, dtype))
        return self._rings[-1]

    def close(self) -> None:
        for ring in self._rings:
            ring.close()
        close(self.fds)
        self._rings.clear()
