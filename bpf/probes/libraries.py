"""Finding the drivers' libraries, wherever they are, and keeping probes in them.

A library is a file, not a path: the same name can be many files (system, conda, containers), and one file serves
every process that maps it, now or later. A mapped one is opened through /proc/PID/map_files, which is the very file
that the process mapped, whatever its path says by now; notes are read and probes attached through that one open file.
"""

from __future__ import annotations

import contextlib
import os
import stat
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import BinaryIO

from iaprof.basics.errors import IaprofError
from iaprof.bpf.probes.driver_layout import TRANSFERS, Action, Entry, Layout, find_layout
from iaprof.bpf.probes.emulation import single_stepped
from iaprof.bpf.probes.injected import injected_entries
from iaprof.bpf.probes.library_file import LibraryFile, load_functions
from iaprof.bpf.probes.usdt import Probe, read_probes
from iaprof.bpf.processes import running_pids
from iaprof.formats.header.no_launches import driver_at
from iaprof.formats.header.unprobed import Unprobed
from iaprof.formats.wire.process_maps import lines, mappings, maps_of

MAPPING = lines(
    rb".*(?:libze_intel_gpu\.so(?:\.[0-9.]+)?|libigdrcl\.so|libiaprof_inject\.so)(?: \(deleted\))?", rights=rb"..x."
)
"""Executable mappings of a driver."""
C_LIBRARY = lines(
    rb".*/(?:libc\.so\.6|libc-2\.[0-9]+\.so|libdl\.so\.2|libdl-2\.[0-9]+\.so|ld-musl-x86_64\.so\.1|libc\.musl-x86_64\.so\.1)"
    rb"(?: \(deleted\))?",
    rights=rb"..x.",
)
"""What may have dlopen."""
NAMES = (b"libze_intel_gpu.so", b"libigdrcl.so", b"libiaprof_inject.so")  # of which what MAPPING finds has one
INJECTED, OPENCL = "libiaprof_inject.so", "libigdrcl.so"
_INSTALLED = ("libze_intel_gpu.so*", "libigdrcl.so", "intel-opencl/libigdrcl.so")
SYSTEM_FOLDERS = (
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib64",
    "/usr/lib",
    "/usr/local/lib",
    "/usr/local/lib/x86_64-linux-gnu",
)
PROVIDER = "level_zero"
LAUNCH, COMPILE = "launch_kernel", "compile_kernel"
EXECUTE, LIST_EVENT = "execute_lists", "list_event"  # of the injected library only
_LAUNCHING = (Action.LAUNCH, Action.LAUNCH_MANY)
# Anybody can map any number of files of that name. What one user's files take, others still have.
MAX_LIBRARIES = 256
MAX_OF_ONE_OWNER = 16


class Way(StrEnum):
    """How launches are had."""

    PROBES = "probes"  # the driver's own
    ATTACH = "attach"  # by the layout of a driver without
    INJECT = "inject"  # by the probes of a library that a command is started with


@dataclass(frozen=True)
class Outcome:
    """What became of one library."""

    path: str
    probes: int  # that are attached
    problem: str = ""  # why not all are
    way: Way | None = None  # None where there are none
    build_id: str = ""  # in hexadecimal; empty where there is none, or it was not looked at
    doubt: str = ""  # why probes that are attached may not fire
    since_ns: int = 0  # when all of them were attached, CLOCK_MONOTONIC; 0 where there are none
    # Functions that launch, or names of probes, where the probed instruction is single-stepped: formats.slow_launches.
    single_stepped: tuple[str, ...] = ()
    executions: bool = False  # whether it is seen when closed command lists are executed
    copies: bool = False  # copies and fills are recorded
    own_kernels: bool = False  # and the driver's own kernels that do them
    waits: int = 0  # functions in which its layout says that programs wait
    unused: bool = False  # its problem matters once a process maps it, and is told then


@dataclass(frozen=True)
class Mapped:
    """That a process mapped files which have libraries' names."""

    time_ns: int  # the first one, CLOCK_MONOTONIC
    paths: set[bytes]  # as the process has them


class Libraries:
    """Every library seen so far; each is taken once."""

    def __init__(
        self,
        attach: Callable[[int, Sequence[Probe]], str],
        attach_layout: Callable[[int, Layout, Sequence[int]], object],
        ways: Iterable[Way] = tuple(Way),
        watch_loads: Callable[[int, Sequence[int]], object] = lambda *_: None,
        attach_injected: Callable[[int, Sequence[tuple[Entry, int]]], object] = lambda *_: None,
    ) -> None:
        """Starts with none.

        Args:
            attach: given the open library and probes of it; all or none; gives why they may not fire all the same, or
                nothing; raises OSError where the kernel refuses.
            attach_layout: likewise, given a driver's layout and the file offset of each of its entries.
            ways: that may be used.
            watch_loads: given an open C library and where it loads other libraries.
            attach_injected: given the open library that commands are started with, and its functions that wait, copy
                and fill, with their file offsets; raises OSError where the kernel refuses.
        """
        self._attach_injected = attach_injected
        self._watch_loads = watch_loads
        self._attach, self._attach_layout = attach, attach_layout
        self._ways = frozenset(ways)
        # Build-ids and names of drivers that the injected library leaves alone; None where nothing is injected.
        self.not_injected: frozenset[str] | None = None
        # A file with probes in it keeps its inode; that of another may become a new file's.
        self._attached: dict[tuple[int, ...], int] = {}  # and since when
        self._paths: set[bytes] = set()  # of those that were taken, as we have them
        self._unprobed = Unprobed()
        self._loading: set[tuple[int, ...]] = set()  # C libraries that were looked at
        self._refused: set[tuple[int, ...]] = set()
        self._by_owner: Counter[int] = Counter()
        self._full: set[int] = set()  # owners for whose files there was no room, as they were told

    def installed(self, folders: Iterable[str] = SYSTEM_FOLDERS) -> Iterator[Outcome]:
        """Takes the libraries that lie in `folders`, before any process maps them.

        One of OpenCL that has no probes is `unused`: it is given again when a process maps it.
        """
        for folder in folders:
            for pattern in _INSTALLED:
                for path in sorted(Path(folder).glob(pattern)):
                    yield from self.take(path)

    def take(self, path: Path) -> Iterator[Outcome]:
        """Takes the library at `path`, before any process maps it."""
        yield from self._take(str(path), str(path))

    def running(self) -> Iterator[Outcome]:
        """Takes the libraries that running processes have mapped.

        Programs that start from now on and have our C library are known to load libraries before they map a driver.
        """
        self._watch_c_libraries(os.getpid(), maps_of())
        for pid in running_pids():
            yield from self.mapped(pid)

    def mapped(self, pid: int, just: Mapped | None = None) -> Iterator[Outcome]:
        """Takes the libraries that one process has mapped.

        Args:
            pid: of the process.
            just: what it has mapped since this was called last for it, so that it is counted if launches may be
                missing; None if it is not to be counted.
        """
        maps = maps_of(pid)
        drivers = list(mappings(maps, MAPPING))
        since = 0
        for found in drivers:
            path = found.name.decode("utf-8", "backslashreplace")
            since = max(since, (yield from self._take(f"/proc/{pid}/map_files/{found.span}", path)))
        if just is not None and since > just.time_ns:
            self._unprobed.waited(pid, since - just.time_ns)
        elif just is not None and not drivers:
            self._gone(pid, just)
        if drivers:  # after the drivers, as a program may launch soon
            self._watch_c_libraries(pid, maps)

    def missed(self, pid: int, just: Mapped) -> None:
        """Counts a process if it has ended, and nobody looked at what it had mapped."""
        if not maps_of(pid):
            self._gone(pid, just)

    def _gone(self, pid: int, just: Mapped) -> None:
        missed = just.paths - self._paths
        if any(self._is_left_alone(os.fsdecode(path)) for path in missed):
            self._unprobed.gone(pid)

    def take_unprobed(self) -> Unprobed:
        """The processes that were counted since this was called last."""
        unprobed, self._unprobed = self._unprobed, Unprobed()
        return unprobed

    def _watch_c_libraries(self, pid: int, maps: bytes) -> None:
        """Sees to it that BPF learns when a process of a driver's loads or unloads libraries."""
        for found in mappings(maps, C_LIBRARY):
            with (
                contextlib.suppress(OSError, IaprofError),
                open_regular(f"/proc/{pid}/map_files/{found.span}") as file,
            ):
                status = os.fstat(file.fileno())
                inode = (status.st_dev, status.st_ino)
                if inode in self._loading or len(self._loading) >= MAX_LIBRARIES:
                    continue
                self._loading.add(inode)
                offsets = load_functions(LibraryFile(file))
                if offsets:
                    self._watch_loads(file.fileno(), offsets)

    def _take(self, location: str, path: str) -> Generator[Outcome, None, int]:
        """Takes one; returns since when it has probes, 0 if it has none."""
        try:
            fd = os.open(location, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
        except OSError:
            return 0  # the process ended, or unmapped it
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            os.close(fd)
            return 0
        with open(fd, "rb") as file:
            inode = (status.st_dev, status.st_ino)
            # The overlays of two containers show one file of their image on two devices, all else alike. A probe is
            # in the file below, so a second one would fire for both.
            content = (status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_uid)
            since = self._attached.get(inode, 0) or self._attached.get(content, 0)
            if since or content in self._refused:
                return since
            owner = status.st_uid
            if self._by_owner[owner] >= MAX_OF_ONE_OWNER or self._by_owner.total() >= MAX_LIBRARIES:
                if owner not in self._full:
                    self._full.add(owner)
                    yield Outcome(path, 0, f"user {owner} has too many different libraries: the rest is not probed")
                return 0
            outcome = self._probe(file, path)
            if outcome.problem and location == path and OPENCL in path:
                yield replace(outcome, unused=True)  # most machines have it, and most programs use none of it
                return 0
            self._by_owner[owner] += 1
            with contextlib.suppress(OSError):
                self._paths.add(os.fsencode(os.readlink(f"/proc/self/fd/{fd}")))
            if outcome.probes:
                self._attached |= dict.fromkeys((inode, content), outcome.since_ns)
            else:
                self._refused.add(content)
            yield outcome
            return outcome.since_ns

    def _probe(self, file: BinaryIO, path: str) -> Outcome:
        """Probes it in the best way that it has."""
        build_id, problem = "", ""
        try:
            library = LibraryFile(file)
            build_id = library.build_id()
            probes = self._probes_of(file, path)
            layout = find_layout(build_id) if not probes and Way.ATTACH in self._ways else None
            if (probes or layout) and self._is_injected_into(path, build_id):
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
                    copies=any(entry.action in TRANSFERS for entry, _ in injected),
                    waits=waits,
                )
            if layout:
                offsets = [library.offset(entry.address, executable=True) for entry in layout.entries]
                self._attach_layout(file.fileno(), layout, offsets)
                since = time.monotonic_ns()
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
                    own_kernels=layout.has_own_kernels,
                    waits=many,
                )
            problem = self._no_way(path, build_id)
        except OSError as error:
            problem = f"the kernel refuses probes in it ({error.strerror or error})"
        except IaprofError as error:
            problem = str(error)
        return Outcome(path, 0, problem, None, build_id)

    def _is_injected_into(self, path: str, build_id: str) -> bool:
        """Whether the command's library raises probes for this driver: others here would count launches twice."""
        return not is_injected(path) and not self._is_left_alone(path, build_id)

    def _is_left_alone(self, path: str, build_id: str = "") -> bool:
        """Whether the command's library, if there is one, raises no probes for this driver."""
        known_by = {build_id, driver_at(path)} - {""}
        return self.not_injected is None or not known_by.isdisjoint(self.not_injected)

    def _probes_of(self, file: BinaryIO, path: str) -> list[Probe]:
        return read_probes(file, PROVIDER, (LAUNCH, COMPILE, EXECUTE, LIST_EVENT)) if way_of(path) in self._ways else []

    def _no_way(self, path: str, build_id: str) -> str:
        if is_injected(path) or not self._is_left_alone(path, build_id):
            return ""  # the command's launches are recorded all the same, or its library is another recorder's
        if Way.ATTACH not in self._ways:
            return "it has no launch_kernel and compile_kernel probes; --launches=auto may have another way"
        unknown = f"its build ({build_id or 'without a build-id'}) is not known"
        could_have_probes = Way.PROBES in self._ways and OPENCL not in path
        return (
            f"{'it has no probes, and ' if could_have_probes else ''}{unknown}: run "
            "'sudo iaprof calibrate LIBRARY', or start the program by 'iaprof record --launches=inject -- COMMAND'"
        )


def single_stepped_launches(file_fd: int, layout: Layout, offsets: Sequence[int]) -> tuple[str, ...]:
    """Names of a layout's functions that launch and are probed where the kernel single-steps.

    Args:
        file_fd: the open driver.
        layout: of it.
        offsets: in the file, of the layout's entries.
    """
    where = zip(layout.entries, offsets, strict=True)
    return single_stepped(file_fd, ((entry.name, at) for entry, at in where if entry.action in _LAUNCHING))


def open_regular(location: str) -> BinaryIO:
    """A regular file. OSError if it is none, or cannot be opened."""
    fd = os.open(location, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError("it is no regular file")
    return open(fd, "rb")


def is_injected(path: str) -> bool:
    """Whether it is the library that commands are started with."""
    return path.rsplit("/", 1)[-1].removesuffix(" (deleted)") == INJECTED


def way_of(path: str) -> Way:
    """Which way the probes of the library at `path` are."""
    return Way.INJECT if is_injected(path) else Way.PROBES
