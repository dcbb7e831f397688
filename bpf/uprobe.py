"""Loads BPF programs for uprobes, and attaches them to locations in a file, for every process that maps the file.

Does not use bcc, whose USDT support requires a process for probes with semaphores, and has no cookies. A uprobe-multi
link (Linux 6.6) attaches a program to many locations of a file. Each location may have a semaphore, which the kernel
keeps raised as long as the link exists, and has a cookie that tells the program where it was hit.

Before Linux 6.6, each location has a perf event of the uprobe PMU (Linux 4.17, with semaphores 4.20), to which a link
with a cookie attaches the program (Linux 5.15).

The kernel allows only one semaphore per location. It refuses a link (EINVAL) if another tool has a uprobe there with
another semaphore or without one: see `attach`.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import struct
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from threading import Thread

from iaprof.bpf.perf_event import Attr, open_event
from iaprof.bpf.syscall import BPF_LINK_CREATE, BPF_PROG_LOAD, bpf

_PROG_TYPE_KPROBE, _PROG_TYPE_PERF_EVENT = 2, 7  # enum bpf_prog_type; programs for uprobes have the first type
_TRACE_UPROBE_MULTI, _TRACE_UPROBE_SESSION = 48, 57  # enum bpf_attach_type, Linux 6.6 and 6.13
_PERF_EVENT = 41  # likewise, Linux 5.15
_PMU_TYPE = Path("/sys/bus/event_source/devices/uprobe/type")
_SEMAPHORE_SHIFT = 32  # in the event's config, as format/ref_ctr_offset of the PMU says
_LOG_BYTES = (1 << 20, 1 << 28)  # before 6.4 a kernel keeps the beginning of a longer log, whose end has the reason
_RETURN_0 = bytes.fromhex("b7000000000000009500000000000000")  # r0 = 0; exit
_NOP = b"\x90"
_MOST_ONE_BY_ONE = 64  # locations that may each get a link; compilers emit only a few
COOKIES_SINCE = 5, 15
TOO_OLD = "this kernel has no cookies for uprobes, which came with Linux 5.15: boot a newer one"
TAKEN = (
    "another tool has a uprobe with another reference counter at the same place, which the kernel's log calls a "
    "ref_ctr_offset mismatch: end that tool, then record again"
)
WITHOUT_SEMAPHORE = (
    "another tool has a uprobe without a reference counter where one of its probes is, so that the probe's semaphore "
    "cannot be raised: the probe fires only while something else raises it; end that tool, then record again"
)
_TRIES = 10


@dataclass(frozen=True)
class Location:
    """A place where a program is attached. Offsets are in bytes from the start of the file."""

    offset: int  # of the probed instruction
    semaphore_offset: int  # of the 16-bit semaphore; 0 for none
    cookie: int  # returned to the program by bpf_get_attach_cookie


class ProgramFor(Enum):
    """What a program is attached to."""

    UPROBES = _TRACE_UPROBE_MULTI
    SESSIONS = _TRACE_UPROBE_SESSION  # if the program returns 0 at a function's entry, it also runs at its return
    PERF_EVENTS = 0


def load_program(name: str, code: bytes, kind: ProgramFor = ProgramFor.UPROBES) -> int:
    """Loads a program and returns its descriptor.

    Args:
        name: shown by the kernel, truncated to 15 bytes.
        code: instructions, with the descriptors of the program's maps.
        kind: what the program will be attached to.

    Raises:
        OSError: the kernel refused; the text ends with the last lines of the verifier's log.
    """
    instructions = ctypes.create_string_buffer(code, len(code))
    license_ = ctypes.create_string_buffer(b"GPL")  # required for helpers that walk stacks and read user memory

    def load(log: ctypes.Array[ctypes.c_char] | None) -> int:
        # The part of union bpf_attr for BPF_PROG_LOAD: type, count, instructions, license, log, kernel version, flags,
        # name, network device, expected attach type.
        attributes = struct.pack(
            "<IIQQIIQII15sxII",
            _PROG_TYPE_PERF_EVENT if kind is ProgramFor.PERF_EVENTS else _PROG_TYPE_KPROBE,
            len(code) // 8,
            ctypes.addressof(instructions),
            ctypes.addressof(license_),
            *((0, 0, 0) if log is None else (1, len(log), ctypes.addressof(log))),
            0,
            0,
            name.encode(),
            0,
            kind.value,
        )
        for _ in range(_TRIES - 1):
            with contextlib.suppress(BlockingIOError):  # a signal interrupted the call
                return bpf(BPF_PROG_LOAD, attributes)
        return bpf(BPF_PROG_LOAD, attributes)

    try:
        return load(None)
    except OSError as refusal:
        for size in _LOG_BYTES:
            log = ctypes.create_string_buffer(size)
            try:
                return load(log)
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    break
        said = log.value.decode(errors="replace").strip().splitlines()
        text = f"{refusal.strerror}; the verifier: {' / '.join(said[-3:-1])}" if said else refusal.strerror
        raise OSError(refusal.errno, text) from None


class Link(ABC):
    """An attachment of a program, which ends with `close` or with this process."""

    @abstractmethod
    def close(self) -> None:
        """Detaches the program: the kernel removes the breakpoints and lowers the semaphores."""


class PerfUprobe(Link):
    """A program attached to one location, by a perf event."""

    def __init__(self, file_fd: int, program_fd: int, location: Location) -> None:
        """Attaches the program; the arguments are those of UprobeLink.

        Raises:
            OSError: the kernel refused; the text says so if it lacks such links.
        """
        path = ctypes.create_string_buffer(f"/proc/self/fd/{file_fd}".encode())
        attr = Attr(
            type=int(_PMU_TYPE.read_text()),
            config=location.semaphore_offset << _SEMAPHORE_SHIFT,
            config1=ctypes.addressof(path),
            config2=location.offset,
        )
        self._fds = [open_event(attr, -1, 0)]  # an event of one CPU: its program runs on all
        # The part of union bpf_attr for BPF_LINK_CREATE: program, target, attach type, flags, cookie.
        attributes = struct.pack("<IIIIQ", program_fd, self._fds[0], _PERF_EVENT, 0, location.cookie)
        try:
            self._fds.append(bpf(BPF_LINK_CREATE, attributes))
        except OSError as refusal:
            self.close()
            if refusal.errno == errno.EINVAL:
                raise OSError(errno.EOPNOTSUPP, TOO_OLD) from refusal
            raise

    def close(self) -> None:
        """See Link."""
        while self._fds:
            os.close(self._fds.pop())


class UprobeLink(Link):
    """A program attached to many locations (Linux 6.6)."""

    def __init__(
        self, file_fd: int, program_fd: int, locations: Sequence[Location], kind: ProgramFor = ProgramFor.UPROBES
    ) -> None:
        """Attaches the program to all locations or to none.

        Args:
            file_fd: descriptor of the library; used to attach, so that nobody can replace the file meanwhile.
            program_fd: descriptor of the program.
            locations: at least one.
            kind: what the program was loaded for.

        Raises:
            OSError: the kernel does not have such links, or refused.
        """
        path = ctypes.create_string_buffer(f"/proc/self/fd/{file_fd}".encode())
        column = ctypes.c_uint64 * len(locations)
        offsets = column(*(location.offset for location in locations))
        semaphores = column(*(location.semaphore_offset for location in locations))
        cookies = column(*(location.cookie for location in locations))
        # The part of union bpf_attr for BPF_LINK_CREATE: program, target, attach type, flags; then path, offsets,
        # semaphores, cookies, count, flags, process (0 for all).
        attributes = struct.pack(
            "<IIIIQQQQIII",
            program_fd,
            0,
            kind.value,
            0,
            ctypes.addressof(path),
            ctypes.addressof(offsets),
            ctypes.addressof(semaphores),
            ctypes.addressof(cookies),
            len(locations),
            0,
            0,
        )
        self._fd = bpf(BPF_LINK_CREATE, attributes)

    def close(self) -> None:
        """See Link."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)


@dataclass(frozen=True)
class Attached:
    """The result of `attach`."""

    links: Sequence[Link]
    doubt: str = ""  # why the program may not run although it is attached


def attach(file_fd: int, program_fd: int, locations: Sequence[Location]) -> Attached:
    """Attaches the program to all locations or to none.

    If another tool has a uprobe without a semaphore at a location, the program is attached there without its semaphore.
    To raise the semaphore all the same, a program that does nothing is attached to the next instruction.

    Args:
        file_fd: descriptor of the library, as for UprobeLink.
        program_fd: descriptor of the program.
        locations: at least one.

    Raises:
        OSError: the kernel refused; the text says so if it lacks such links or another tool's uprobe is the reason.
    """
    try:
        return Attached([UprobeLink(file_fd, program_fd, locations)])
    except OSError as refusal:
        size = os.fstat(file_fd).st_size
        valid = all(each.offset < size and each.semaphore_offset % 2 == 0 for each in locations)
        guarded = any(each.semaphore_offset for each in locations)
        if refusal.errno != errno.EINVAL or not valid:
            raise
        attach_one: _AttachOne = _link_one if _knows_links(program_fd) else PerfUprobe
        if attach_one is _link_one and (not guarded or len(locations) > _MOST_ONE_BY_ONE):
            raise OSError(errno.EINVAL, TAKEN) from refusal
    with contextlib.ExitStack() as undo:
        links: list[Link] = []
        undo.callback(lambda: close_all(links))
        contested = _attach_one_by_one(file_fd, program_fd, locations, links, attach_one)
        raised = {each.semaphore_offset for each in locations if each not in contested}
        held = [
            _hold_semaphore(file_fd, each, links, attach_one)
            for each in contested
            if each.semaphore_offset not in raised
        ]
        undo.pop_all()
    return Attached(links, "" if all(held) else WITHOUT_SEMAPHORE)


def _knows_links(program_fd: int) -> bool:
    """Whether the kernel has links for uprobes: if so, attaching to a folder fails with another error than EINVAL."""
    folder = os.open("/", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        UprobeLink(folder, program_fd, [Location(0, 0, 0)]).close()
    except OSError as refusal:
        return refusal.errno != errno.EINVAL
    finally:
        os.close(folder)
    return True


_AttachOne = Callable[[int, int, Location], Link]


def _link_one(file_fd: int, program_fd: int, location: Location) -> Link:
    return UprobeLink(file_fd, program_fd, [location])


def _attach_one_by_one(
    file_fd: int, program_fd: int, locations: Sequence[Location], links: list[Link], attach_one: _AttachOne
) -> list[Location]:
    """Adds a link for each location to `links`; returns the locations that were attached without their semaphore."""
    contested = []
    for location in locations:
        try:
            links.append(attach_one(file_fd, program_fd, location))
            continue
        except OSError as refusal:
            if refusal.errno != errno.EINVAL:
                raise
        try:
            links.append(attach_one(file_fd, program_fd, replace(location, semaphore_offset=0)))
        except OSError as refusal:
            raise OSError(refusal.errno, TAKEN) from refusal
        contested.append(location)
    return contested


def _hold_semaphore(file_fd: int, location: Location, links: list[Link], attach_one: _AttachOne) -> bool:
    """Raises a location's semaphore with a probe at the next instruction; returns whether that worked."""
    if os.pread(file_fd, 1, location.offset) != _NOP:
        return False  # the start of the next instruction is unknown
    try:
        nothing = load_program("nothing", _RETURN_0)
    except OSError:
        return False
    try:
        links.append(attach_one(file_fd, nothing, replace(location, offset=location.offset + 1)))
    except OSError:
        return False
    finally:
        os.close(nothing)
    return True


def close_all(links: Iterable[Link]) -> None:
    """Closes links, in one thread per link.

    Closing a link waits some 50 ms until no program runs; links that are closed at the same time share that wait.
    """
    threads = []
    for link in links:
        thread = Thread(target=link.close)
        try:
            thread.start()
        except RuntimeError:  # no more threads can be started
            link.close()
        else:
            threads.append(thread)
    for thread in threads:
        thread.join()
