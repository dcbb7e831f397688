"""Loading a BPF program for uprobes, and attaching it to locations in a file, for every process that maps it.

By hand, not through bcc: its USDT support refuses probes with semaphores unless a process is named, and knows no
cookies. One link (Linux 6.6, uprobe-multi) takes all locations of a file, with the semaphores that the kernel keeps
raised as long as the link lives, and a cookie for each that tells the program which one.

The kernel allows one semaphore for each place. It refuses ours (EINVAL) if another tool has a uprobe there with another
semaphore or with none: see `attach`.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from threading import Thread

from iaprof.bpf.syscall import BPF_LINK_CREATE, BPF_PROG_LOAD, bpf

_PROG_TYPE_KPROBE, _PROG_TYPE_PERF_EVENT = 2, 7  # enum bpf_prog_type; a uprobe's program is of the first
_TRACE_UPROBE_MULTI, _TRACE_UPROBE_SESSION = 48, 57  # enum bpf_attach_type, Linux 6.6 and 6.13
_LOG_BYTES = 1 << 20
_NOTHING = bytes.fromhex("b7000000000000009500000000000000")  # r0 = 0; exit
_NOP = b"\x90"
_MOST_ONE_BY_ONE = 64  # locations of a program in a library; compilers make a few
TOO_OLD = "this kernel has no uprobe-multi links, which came with Linux 6.6: boot a newer one"
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
    """Where a program is attached. Offsets are bytes from the start of the file."""

    offset: int  # of the probed instruction
    semaphore_offset: int  # of the 16-bit semaphore; 0 for none
    cookie: int  # what bpf_get_attach_cookie gives the program


class ProgramFor(Enum):
    """What a program is attached to."""

    UPROBES = _TRACE_UPROBE_MULTI
    SESSIONS = _TRACE_UPROBE_SESSION  # it also runs where the probed function returns, if it gave 0 before
    PERF_EVENTS = 0


def load_program(name: str, code: bytes, kind: ProgramFor = ProgramFor.UPROBES) -> int:
    """A descriptor of the program.

    Args:
        name: shown by the kernel, cut at 15 bytes.
        code: instructions, with the descriptors of its maps in them.
        kind: what it is for.

    Raises:
        OSError: the kernel refused; the text ends with what its verifier said.
    """
    instructions = ctypes.create_string_buffer(code, len(code))
    license_ = ctypes.create_string_buffer(b"GPL")  # which stack walks and reads of user memory ask for

    def load(log: ctypes.Array[ctypes.c_char] | None) -> int:
        # The part of union bpf_attr that BPF_PROG_LOAD takes: type, count, instructions, license, log, kernel version,
        # flags, name, network device, expected attach type.
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
            with contextlib.suppress(BlockingIOError):  # a signal came, and its handler has run by now
                return bpf(BPF_PROG_LOAD, attributes)
        return bpf(BPF_PROG_LOAD, attributes)

    try:
        return load(None)
    except OSError as refusal:
        log = ctypes.create_string_buffer(_LOG_BYTES)
        try:
            return load(log)
        except OSError:
            said = log.value.decode(errors="replace").strip().splitlines()
            text = f"{refusal.strerror}; the verifier: {' / '.join(said[-3:-1])}" if said else refusal.strerror
            raise OSError(refusal.errno, text) from None


class UprobeLink:
    """An attachment; it ends with `close`, and when this process ends in any way."""

    def __init__(
        self, file_fd: int, program_fd: int, locations: Sequence[Location], kind: ProgramFor = ProgramFor.UPROBES
    ) -> None:
        """Attaches the program, to all of the locations or to none.

        Args:
            file_fd: the open library. Attaching goes through this very file, so that nobody can swap it meanwhile.
            program_fd: of the loaded program.
            locations: at least one.
            kind: what the program was loaded for.

        Raises:
            OSError: the kernel does not know such links, or refused.
        """
        path = ctypes.create_string_buffer(f"/proc/self/fd/{file_fd}".encode())
        column = ctypes.c_uint64 * len(locations)
        offsets = column(*(location.offset for location in locations))
        semaphores = column(*(location.semaphore_offset for location in locations))
        cookies = column(*(location.cookie for location in locations))
        # The part of union bpf_attr that BPF_LINK_CREATE takes: program, target, attach type, flags; then path,
        # offsets, semaphores, cookies, count, flags, process (0: every one).
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
        """Detaches: the breakpoints go away, the semaphores are lowered, and no program of this link runs any more."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)


@dataclass(frozen=True)
class Attached:
    """What `attach` did."""

    links: list[UprobeLink]
    doubt: str = ""  # why the program may not run although it is attached


def attach(file_fd: int, program_fd: int, locations: Sequence[Location]) -> Attached:
    """Attaches the program, to all of the locations or to none.

    Where another tool has a uprobe without a semaphore, it is attached without, and a program that does nothing to the
    instruction behind it, with the semaphore: that raises it all the same.

    Args:
        file_fd: the open library, as UprobeLink takes it.
        program_fd: of the loaded program.
        locations: at least one.

    Raises:
        OSError: the kernel refused; where it does not know such links, or another tool's uprobe is why, it says so.
    """
    try:
        return Attached([UprobeLink(file_fd, program_fd, locations)])
    except OSError as refusal:
        size = os.fstat(file_fd).st_size
        valid = all(each.offset < size and each.semaphore_offset % 2 == 0 for each in locations)
        guarded = any(each.semaphore_offset for each in locations)
        if refusal.errno != errno.EINVAL or not valid:
            raise
        if not _knows_links(program_fd):
            raise OSError(errno.EINVAL, TOO_OLD) from refusal
        if not guarded or len(locations) > _MOST_ONE_BY_ONE:
            raise OSError(errno.EINVAL, TAKEN) from refusal
    with contextlib.ExitStack() as undo:
        links: list[UprobeLink] = []
        undo.callback(lambda: close_all(links))
        contested = _attach_one_by_one(file_fd, program_fd, locations, links)
        raised = {each.semaphore_offset for each in locations if each not in contested}
        held = [_hold_semaphore(file_fd, each, links) for each in contested if each.semaphore_offset not in raised]
        undo.pop_all()
    return Attached(links, "" if all(held) else WITHOUT_SEMAPHORE)


def _knows_links(program_fd: int) -> bool:
    """Whether the kernel has links for uprobes: one that has says of a folder that it is no file."""
    folder = os.open("/", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        UprobeLink(folder, program_fd, [Location(0, 0, 0)]).close()
    except OSError as refusal:
        return refusal.errno != errno.EINVAL
    finally:
        os.close(folder)
    return True


def _attach_one_by_one(
    file_fd: int, program_fd: int, locations: Sequence[Location], links: list[UprobeLink]
) -> list[Location]:
    """Adds a link for each location to `links`; gives those that had to be attached without their semaphore."""
    contested = []
    for location in locations:
        try:
            links.append(UprobeLink(file_fd, program_fd, [location]))
            continue
        except OSError as refusal:
            if refusal.errno != errno.EINVAL:
                raise
        try:
            links.append(UprobeLink(file_fd, program_fd, [replace(location, semaphore_offset=0)]))
        except OSError as refusal:
            raise OSError(refusal.errno, TAKEN) from refusal
        contested.append(location)
    return contested


def _hold_semaphore(file_fd: int, location: Location, links: list[UprobeLink]) -> bool:
    """Raises a location's semaphore from the instruction behind it; gives whether that worked."""
    if os.pread(file_fd, 1, location.offset) != _NOP:
        return False  # where the next instruction begins is not known
    try:
        nothing = load_program("nothing", _NOTHING)
    except OSError:
        return False
    try:
        links.append(UprobeLink(file_fd, nothing, [replace(location, offset=location.offset + 1)]))
    except OSError:
        return False
    finally:
        os.close(nothing)
    return True


def close_all(links: Iterable[UprobeLink]) -> None:
    """Closes links, all at once.

    The kernel makes each one wait some 50 ms for programs that may be running, and those that wait together wait
    once: hence the threads, which do nothing else.
    """
    threads = []
    for link in links:
        thread = Thread(target=link.close)
        try:
            thread.start()
        except RuntimeError:  # no room for more
            link.close()
        else:
            threads.append(thread)
    for thread in threads:
        thread.join()
