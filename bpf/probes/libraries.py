"""Finds the drivers' libraries wherever they are, and attaches probes to them.

A library is a file, not a path: files with the same name can be different (system, conda, containers), and probes in a
file fire in every process that maps it, now or later. A mapped library is opened through /proc/PID/map_files, which is
the very file that the process mapped, even if its path leads elsewhere by now. Notes are read and probes are attached
through that one descriptor.
"""

from __future__ import annotations

import contextlib
import os
import stat
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import BinaryIO

from iaprof.basics.errors import IaprofError
from iaprof.basics.files import open_regular
from iaprof.bpf.accounts import ACCOUNTS, Places, may_read
from iaprof.bpf.driver_layout import TRANSFERS, Action, Entry, Layout, find_layout
from iaprof.bpf.probes.functions import cuda_entries, cuda_launches, injected_entries
from iaprof.bpf.probes.library_file import LibraryFile, changes_of_libraries, single_stepped
from iaprof.bpf.probes.usdt import Arg, Probe, read_probes
from iaprof.bpf.processes import running_pids, user_of
from iaprof.bpf.structs import ArgKind
from iaprof.formats.header.launch_warnings import Unprobed, driver_at
from iaprof.formats.wire.process_maps import lines, mappings, maps_of
from iaprof.sandbox.answering import ANSWERING

DRIVER_MAPPINGS = lines(
    rb".*(?:lib(?:ze_intel_gpu|cuda)\.so(?:\.[0-9.]+)?|lib(?:igdrcl|vulkan_intel)\.so|libiaprof_(?:inject|cuda)\.so)"
    rb"(?: \(deleted\))?",
    rights=rb"..x.",
)
"""Matches lines of /proc/PID/maps: executable mappings of drivers."""
LINKER_MAPPINGS = lines(rb".*/(?:ld-linux-x86-64\.so\.2|ld-2\.[0-9]+\.so)(?: \(deleted\))?", rights=rb"..x.")
"""Matches lines of /proc/PID/maps: executable mappings of glibc's dynamic linker; musl's never unmaps a library."""
NAMES = (
    *(b"libze_intel_gpu.so", b"libigdrcl.so", b"libvulkan_intel.so", b"libcuda.so"),
    *(b"libiaprof_inject.so", b"libiaprof_cuda.so"),
)
"""Every match of DRIVER_MAPPINGS contains one."""
INJECTED, CUDA, OPENCL, VULKAN = "libiaprof_inject.so", "libiaprof_cuda.so", "libigdrcl.so", "libvulkan_intel.so"
_INSTALLED = (
    *("libze_intel_gpu.so*", "libigdrcl.so", "intel-opencl/libigdrcl.so", "libvulkan_intel.so"),
    "libcuda.so.1",
)
_SELDOM_USED = (OPENCL, VULKAN)
SYSTEM_FOLDERS = (
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib64",
    "/usr/lib",
    "/usr/local/lib",
    "/usr/local/lib/x86_64-linux-gnu",
)
PROVIDER, CUDA_PROVIDER = "level_zero", "cuda"
CUDA_DRIVER = "libcuda.so"
LAUNCH, COMPILE = "launch_kernel", "compile_kernel"
EXECUTE, LIST_EVENT = "execute_lists", "list_event"  # probes that only the injected library has,
MESSAGE = "message"  # and only the one in programs of NVIDIA's GPUs
_LAUNCHING = (Action.LAUNCH, Action.LAUNCH_MANY, Action.DRAW)
# Anybody can map any number of files with these names. One user's files must not use up the limit for all.
MAX_LIBRARIES = 256
MAX_OF_ONE_USER = 16


_MAY_WAIT = (
    "neither root nor who started this recording mounted its file system, so opening a file in it may take forever: "
    "start the program by 'iaprof record --launches=inject -- COMMAND'"
)
_NO_ANSWER = (
    "its file system does not answer, such as one of a server that is gone: when it does, start the program again"
)


class Way(StrEnum):
    """How launches by a driver are recorded."""

    PROBES = "probes"  # by the driver's own USDT probes
    ATTACH = "attach"  # by probes at the entry points of a known driver layout
    INJECT = "inject"  # by the probes of a library that is injected into the command


@dataclass(frozen=True)
class Outcome:
    """The result of probing one library."""

    path: str
    probes: int  # number of attached probes
    problem: str = ""  # why it is not probed
    way: Way | None = None  # None if it is not probed
    build_id: str = ""  # in hexadecimal; empty if there is none, or it was not read
    doubt: str = ""  # why attached probes may not fire
    since_ns: int = 0  # when all probes were attached, CLOCK_MONOTONIC; 0 if it is not probed
    # Functions that launch, or names of probes, whose probed instruction the kernel single-steps:
    # formats.header.slow_launches.
    single_stepped: tuple[str, ...] = ()
    executions: bool = False  # whether executions of closed command lists are recorded
    copies: bool = False  # whether copies and fills are recorded
    own_kernels: bool = False  # whether launches of the driver's own kernels that copy and fill are recorded
    draws: bool = False  # whether Vulkan's draws are recorded
    outdated: bool = False  # whether its layout is Layout.is_outdated
    waits: int = 0  # number of probed functions that wait for the GPU
    unused: bool = False  # no process has mapped it yet; its problem is reported when one does


@dataclass(frozen=True)
class Mapped:
    """Files with drivers' names that a process has mapped."""

    time_ns: int  # of the first mapping, CLOCK_MONOTONIC
    paths: set[bytes]  # in the process's mount namespace


class Libraries:
    """The libraries that were found so far; each is probed once."""

    def __init__(
        self,
        attach: Callable[[int, Sequence[Probe]], str],
        attach_layout: Callable[[int, Layout, Sequence[int]], object],
        ways: Iterable[Way] = tuple(Way),
        watch_unloads: Callable[[int, Sequence[tuple[int, int]]], object] = lambda *_: None,
        attach_injected: Callable[[int, Sequence[tuple[Entry, int]]], object] = lambda *_: None,
    ) -> None:
        """Starts without libraries.

        Args:
            attach: attaches probes to an open library, all or none; returns why they may not fire, or an empty string;
                raises OSError if the kernel refuses.
            attach_layout: attaches probes to an open driver, given its layout and the file offset of each entry;
                raises OSError if the kernel refuses.
            ways: the ways that may be used.
            watch_unloads: attaches probes to an open dynamic linker, given what changes_of_libraries returns.
            attach_injected: attaches probes to the open injected library, given its functions that wait, copy and fill
                with their file offsets; raises OSError if the kernel refuses.
        """
        self._attach_injected = attach_injected
        self._watch_unloads = watch_unloads
        self._attach, self._attach_layout = attach, attach_layout
        self._ways = frozenset(ways)
        # Build-ids and names of drivers in which the injected library raises no probes; None if nothing is injected.
        self.not_injected: frozenset[str] | None = None
        self.calibrate: Callable[[int, str, str], str] = lambda *_: (
            ", so what programs dispatch is not recorded: run 'sudo iaprof calibrate LIBRARY'"
        )
        """Takes Mesa's driver of a build that this version does not know, or not all of (descriptor, path, build-id);
        returns what follows from that."""
        self.cuda_is_injected = False
        """Whether NVIDIA's driver loads our library into all programs that are recorded: it reports their launches."""
        # By inode (a file with probes keeps its inode), and by what `_take` calls `content`: CLOCK_MONOTONIC when the
        # probes were attached.
        self._attached: dict[tuple[int, ...], int] = {}
        self._taken_paths: set[bytes] = set()  # paths of the libraries taken so far, in this mount namespace
        self._unprobed = Unprobed()
        self._linkers: set[tuple[int, ...]] = set()  # inodes of dynamic linkers that were read
        self._linker_places = Places(MAX_LIBRARIES, MAX_OF_ONE_USER)
        self._refused: set[tuple[int, ...]] = set()  # `content` of libraries that are not probed: inodes may be reused
        self._places = Places(MAX_LIBRARIES, MAX_OF_ONE_USER)
        self._at_limit: set[str] = set()  # accounts for which an Outcome with that problem was yielded; also why

    def installed(self, folders: Iterable[str] = SYSTEM_FOLDERS) -> Iterator[Outcome]:
        """Probes the libraries in `folders`, before any process maps them.

        An OpenCL or Vulkan driver that cannot be probed is `unused`; it is tried again when a process maps it.
        """
        for folder in folders:
            for pattern in _INSTALLED:
                for path in sorted(Path(folder).glob(pattern)):
                    yield from self.take(path)

    def take(self, path: Path) -> Iterator[Outcome]:
        """Probes the library at `path`, before any process maps it."""
        yield from self._take(str(path), str(path))

    def take_again(self, path: Path) -> Iterator[Outcome]:
        """Probes a library that was not probed, after its layout has become known."""
        with contextlib.suppress(OSError):
            self._refused.discard(_content(path.stat()))
        yield from self.take(path)

    def running(self) -> Iterator[Outcome]:
        """Probes the libraries that running processes have mapped.

        Also watches this process's dynamic linker, so that libraries that new processes unmap are counted even before
        they map a driver.
        """
        self._watch_linker(os.getpid(), maps_of())
        for pid in running_pids():
            yield from self.mapped(pid)

    def mapped(self, pid: int, just: Mapped | None = None) -> Iterator[Outcome]:
        """Probes the libraries that one process has mapped.

        Args:
            pid: the process.
            just: what it has mapped since the last call, to count the process if its launches may be missing; None for
                a process that is not to be counted.
        """
        maps = maps_of(pid)
        drivers = list(mappings(maps, DRIVER_MAPPINGS))
        since = 0
        for found in drivers:
            path = found.name.decode("utf-8", "backslashreplace")
            if not may_read(pid, found.device, user_of):
                yield from self._once(pid, path, _MAY_WAIT)
                continue
            location = f"/proc/{pid}/map_files/{found.span}"
            if not ANSWERING.answers(found.device, location):
                yield from self._once(pid, path, _NO_ANSWER)
                continue
            since = max(since, (yield from self._take(location, path, pid)))
        if just is not None and since > just.time_ns and not all(map(self._is_reported, just.paths)):
            self._unprobed.waited(pid, since - just.time_ns)
        elif just is not None and not drivers:
            self._count_if_unprobed(pid, just)
        if drivers:  # drivers first, as the program may launch soon
            self._watch_linker(pid, maps)

    def count_if_ended(self, pid: int, just: Mapped) -> None:
        """Counts a process that has ended before its mappings were read."""
        if not maps_of(pid):
            self._count_if_unprobed(pid, just)

    def _count_if_unprobed(self, pid: int, just: Mapped) -> None:
        missed = just.paths - self._taken_paths
        if any(not self._is_reported(path) and self._injection_skips(os.fsdecode(path)) for path in missed):
            self._unprobed.gone(pid)

    def _is_reported(self, path: bytes) -> bool:
        """Whether our library, in the programs that are recorded, reports the launches by NVIDIA's driver at `path`."""
        return self.cuda_is_injected and is_cuda_driver(os.fsdecode(path))

    def take_unprobed(self) -> Unprobed:
        """Returns the processes that were counted since the last call."""
        unprobed, self._unprobed = self._unprobed, Unprobed()
        return unprobed

    def _watch_linker(self, pid: int, maps: bytes) -> None:
        """Attaches probes to a process's dynamic linker, so that BPF counts how often it unmaps libraries."""
        for found in mappings(maps, LINKER_MAPPINGS):
            location = f"/proc/{pid}/map_files/{found.span}"
            if not may_read(pid, found.device, user_of) or not ANSWERING.answers(found.device, location):
                continue
            with contextlib.suppress(OSError, IaprofError), open_regular(location) as file:
                status = os.fstat(file.fileno())
                inode = (status.st_dev, status.st_ino)
                if inode in self._linkers or self._linker_places.refusal(account := self._account_of(pid)):
                    continue
                self._linkers.add(inode)
                self._linker_places.take(account)
                if changes := changes_of_libraries(LibraryFile(file)):
                    self._watch_unloads(file.fileno(), changes)

    def _once(self, pid: int, path: str, problem: str) -> Iterator[Outcome]:
        """Yields an Outcome with a problem, once for each account."""
        if (once := f"{self._account_of(pid)}: {problem}") not in self._at_limit:
            self._at_limit.add(once)
            yield Outcome(path, 0, problem)

    def _account_of(self, pid: int) -> str:
        """Returns the account of who maps a library: not of its owner, as a container's root owns files as any user."""
        uid = user_of(pid) if pid else 0
        if uid is None:
            return "ended processes"
        return ACCOUNTS.of_process(pid, uid) if pid else ACCOUNTS.of_user(uid)

    def _take(self, location: str, path: str, pid: int = 0) -> Generator[Outcome, None, int]:
        """Probes one library, opened at `location`, for a process (0: none); returns since when it has probes, or 0."""
        try:
            fd = os.open(location, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
        except (FileNotFoundError, ProcessLookupError):
            return 0  # the process has ended, or has unmapped it
        except OSError as error:  # such as a file system of its user's that root may not enter
            yield from self._once(pid, path, f"it cannot be opened ({error.strerror})")
            return 0
        try:
            status = os.fstat(fd)
        except OSError:  # the file system has gone since, as FUSE's do with their server
            os.close(fd)
            return 0
        if not stat.S_ISREG(status.st_mode):
            os.close(fd)
            return 0
        with open(fd, "rb") as file:
            inode = (status.st_dev, status.st_ino)
            # Overlays of two containers show one file of their image with different devices, but otherwise equal. As a
            # probe is in the underlying file, a second probe would make each call fire twice.
            content = _content(status)
            since = self._attached.get(inode, 0) or self._attached.get(content, 0)
            if since or content in self._refused:
                return since
            if pid and _file_name(path) == CUDA:
                return 0  # of another recorder, which samples that program
            account = self._account_of(pid)
            if reason := self._places.refusal(account):
                if account not in self._at_limit:  # `reason` may change
                    self._at_limit.add(account)
                    yield Outcome(path, 0, f"of different libraries, {reason}: no more are probed for {account}")
                return 0
            outcome = self._probe(file, path)
            if outcome.problem and location == path and any(driver in path for driver in _SELDOM_USED):
                yield replace(outcome, unused=True)  # most machines have it, but few programs use it
                return 0
            self._places.take(account)
            with contextlib.suppress(OSError):
                self._taken_paths.add(os.fsencode(os.readlink(f"/proc/self/fd/{fd}")))
            if outcome.probes:
                self._attached |= dict.fromkeys((inode, content), outcome.since_ns)
            else:
                self._refused.add(content)
            yield outcome
            return outcome.since_ns

    def _probe(self, file: BinaryIO, path: str) -> Outcome:
        """Probes a library in the best way that is possible and allowed."""
        build_id, problem = "", ""
        try:
            library = LibraryFile(file)
            build_id = library.build_id()
            if is_cuda_driver(path):
                return self._probe_cuda(file, library, path, build_id)
            probes = self._probes_of(file, path)
            layout = find_layout(build_id) if not probes and Way.ATTACH in self._ways else None
            if (probes or layout) and self._is_probed_by_injection(path, build_id):
                return Outcome(path, 0, "its launches are recorded in the command only", None, build_id)
            if probes:
                doubt = self._attach(file.fileno(), probes)
                injected = injected_entries(library) if way_of(path) is Way.INJECT else []
                self._attach_injected(file.fileno(), injected)
                waits = sum(entry.is_wait for entry, _ in injected)
                since = time.monotonic_ns()
                slow = single_stepped(
                    file.fileno(), ((each.name, each.offset) for each in probes if each.name == LAUNCH)
                )
                lists = any(each.name == EXECUTE for each in probes)
                is_cuda = _file_name(path) == CUDA  # copies are recorded in the driver
                return Outcome(
                    path,
                    len(probes) + len(injected) - waits,
                    "",
                    way_of(path),
                    build_id,
                    doubt,
                    since,
                    slow,
                    executions=lists,
                    copies=is_cuda or any(entry.action in TRANSFERS for entry, _ in injected),
                    own_kernels=is_cuda,
                    waits=waits,
                )
            if layout:
                offsets = [library.offset(entry.address, executable=True) for entry in layout.entries]
                self._attach_layout(file.fileno(), layout, offsets)
                since = time.monotonic_ns()
                if layout.is_outdated:
                    self.calibrate(file.fileno(), path, build_id)  # for later recordings
                slow = single_stepped_launches(file.fileno(), layout, offsets)
                many = sum(entry.is_wait for entry in layout.entries)
                return Outcome(
                    path,
                    len(offsets) - many,
                    "",
                    Way.ATTACH,
                    build_id,
                    since_ns=since,
                    single_stepped=slow,
                    executions=layout.has_lists,
                    copies=layout.has_own_kernels,
                    own_kernels=layout.has_own_kernels or layout.has_operations,
                    draws=layout.has_draws,
                    outdated=layout.is_outdated,
                    waits=many,
                )
            problem = self._explain_unprobed(path, build_id, file.fileno())
        except OSError as error:
            problem = f"the kernel refuses probes in it ({error.strerror or error})"
        except IaprofError as error:
            problem = str(error)
        return Outcome(path, 0, problem, None, build_id)

    def _probe_cuda(self, file: BinaryIO, library: LibraryFile, path: str, build_id: str) -> Outcome:
        """Probes the functions of NVIDIA's driver that copy, fill and wait, and launch if our library is not there.

        What they launch has neither a name nor an address, as these are known to the driver only.
        """
        entries = cuda_entries(library)
        offsets = [] if self.cuda_is_injected else cuda_launches(library)
        if not entries and not offsets:
            return Outcome(path, 0, "it has none of CUDA's functions that launch, copy, fill and wait", None, build_id)
        unknown = (Arg(ArgKind.CONSTANT),) * 3
        if offsets:
            self._attach(file.fileno(), [Probe(CUDA_PROVIDER, LAUNCH, offset, 0, unknown) for offset in offsets])
        self._attach_injected(file.fileno(), entries)
        waits = sum(entry.is_wait for entry, _ in entries)
        return Outcome(
            path,
            len(entries) + len(offsets) - waits,
            "",
            Way.ATTACH,
            build_id,
            since_ns=time.monotonic_ns(),
            copies=True,
            own_kernels=True,  # their samples are counted, and their executions known
            waits=waits,
        )

    def _is_probed_by_injection(self, path: str, build_id: str) -> bool:
        """Whether the injected library raises probes for this driver: more probes would count launches twice."""
        return not is_injected(path) and not self._injection_skips(path, build_id)

    def _injection_skips(self, path: str, build_id: str = "") -> bool:
        """Whether no library is injected, or it raises no probes for this driver."""
        known_by = {build_id, driver_at(path)} - {""}
        return self.not_injected is None or not known_by.isdisjoint(self.not_injected)

    def _probes_of(self, file: BinaryIO, path: str) -> list[Probe]:
        if _file_name(path) == CUDA:
            return read_probes(file, CUDA_PROVIDER, (LAUNCH, MESSAGE))
        return read_probes(file, PROVIDER, (LAUNCH, COMPILE, EXECUTE, LIST_EVENT)) if way_of(path) in self._ways else []

    def _explain_unprobed(self, path: str, build_id: str, file: int) -> str:
        if is_injected(path) or not self._injection_skips(path, build_id):
            return ""  # the injected library records the launches, or it is another recorder's library
        if Way.ATTACH not in self._ways:
            return "it has no launch_kernel and compile_kernel probes; --launches=auto may have another way"
        unknown = f"its build ({build_id or 'without a build-id'}) is not known"
        if is_vulkan(path):
            return f"{unknown}{self.calibrate(file, path, build_id)}"
        could_have_probes = Way.PROBES in self._ways and OPENCL not in path
        return (
            f"{'it has no probes, and ' if could_have_probes else ''}{unknown}: run "
            "'sudo iaprof calibrate LIBRARY', or start the program by 'iaprof record --launches=inject -- COMMAND'"
        )


def single_stepped_launches(file_fd: int, layout: Layout, offsets: Sequence[int]) -> tuple[str, ...]:
    """Returns the names of a layout's functions that launch and whose probed instruction the kernel single-steps.

    Args:
        file_fd: descriptor of the driver.
        layout: its layout.
        offsets: file offsets of the layout's entries.
    """
    where = zip(layout.entries, offsets, strict=True)
    return single_stepped(file_fd, ((entry.name, at) for entry, at in where if entry.action in _LAUNCHING))


def _content(status: os.stat_result) -> tuple[int, ...]:
    """Identifies a file's content, also where overlays show it with different devices."""
    return status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_uid


def is_vulkan(path: str) -> bool:
    """Whether `path` names Mesa's Vulkan driver."""
    return _file_name(path) == VULKAN


def is_cuda_driver(path: str) -> bool:
    """Whether `path` names NVIDIA's driver."""
    return _file_name(path).startswith(CUDA_DRIVER)


def is_injected(path: str) -> bool:
    """Whether `path` names a library that iaprof puts into programs."""
    return _file_name(path) in (INJECTED, CUDA)


def _file_name(path: str) -> str:
    return path.rsplit("/", 1)[-1].removesuffix(" (deleted)")


def way_of(path: str) -> Way:
    """Returns the way of recording by the USDT probes of the library at `path`."""
    return Way.INJECT if is_injected(path) else Way.PROBES
