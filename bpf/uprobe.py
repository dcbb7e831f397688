"""Loading a BPF program for uprobes, and attaching it to locations in a file, for every process that maps it.

By hand, not through bcc: its USDT support refuses probes with semaphores unless a process is named, and knows no
cookies. One link (Linux 6.6, uprobe-multi) takes all locations of a file, with the semaphores that the kernel keeps
raised as long as the link lives, and a cookie for each that tells the program which one.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from threading import Thread

from iaprof.bpf.syscall import BPF_LINK_CREATE, BPF_PROG_LOAD, bpf

_PROG_TYPE_KPROBE = 2  # enum bpf_prog_type; a uprobe's program is of this type
_TRACE_UPROBE_MULTI = 48  # enum bpf_attach_type, Linux 6.6
_LOG_BYTES = 1 << 20
_TRIES = 10


@dataclass(frozen=True)
class Location:
    """Where a program is attached. Offsets are bytes from the start of the file."""

    offset: int  # of the probed instruction
    semaphore_offset: int  # of the 16-bit semaphore; 0 for none
    cookie: int  # what bpf_get_attach_cookie gives the program


def load_uprobe_program(name: str, code: bytes) -> int:
    """A descriptor of the program.

    Args:
        name: shown by the kernel, cut at 15 bytes.
        code: instructions, with the descriptors of its maps in them.

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
            _PROG_TYPE_KPROBE,
            len(code) // 8,
            ctypes.addressof(instructions),
            ctypes.addressof(license_),
            *((0, 0, 0) if log is None else (1, len(log), ctypes.addressof(log))),
            0,
            0,
            name.encode(),
            0,
            _TRACE_UPROBE_MULTI,
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

    def __init__(self, file_fd: int, program_fd: int, locations: Sequence[Location]) -> None:
        """Attaches the program, to all of the locations or to none.

        Args:
            file_fd: the open library. Attaching goes through this very file, so that nobody can swap it meanwhile.
            program_fd: of the loaded program.
            locations: at least one.

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
            _TRACE_UPROBE_MULTI,
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
