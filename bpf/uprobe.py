"""Attaching a loaded BPF program to a location in a file, for every process that maps it now or later.

By hand, not through bcc: its USDT support refuses probes with semaphores unless a process is named, and knows no
cookies. The kernel's uprobe PMU takes a file's path, an offset and the offset of a semaphore that it keeps raised as
long as the event lives; a BPF link ties the program to the event, with a cookie that tells the program which one.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import struct
from pathlib import Path

from iaprof.bpf.perf_event import IOC_ENABLE, Attr, open_event
from iaprof.bpf.syscall import BPF_LINK_CREATE, bpf

_BPF_PERF_EVENT = 41  # enum bpf_attach_type, Linux 5.15
_PMU = Path("/sys/bus/event_source/devices/uprobe")


class Uprobe:
    """An attachment; it ends with `close`, and when this process ends in any way."""

    def __init__(self, file_fd: int, offset: int, semaphore_offset: int, program_fd: int, cookie: int) -> None:
        """Attaches the program.

        Args:
            file_fd: the open library. Attaching goes through this very file, so that nobody can swap it meanwhile.
            offset: of the probed instruction in the file, bytes.
            semaphore_offset: of the 16-bit semaphore in the file, bytes; 0 for none. Below 4 GiB.
            program_fd: of the loaded program.
            cookie: what bpf_get_attach_cookie gives the program.

        Raises:
            OSError: the kernel has no uprobe PMU, or refused.
        """
        path = ctypes.create_string_buffer(f"/proc/self/fd/{file_fd}".encode())
        attr = Attr(type=int((_PMU / "type").read_text()))
        # The PMU's format files say that the semaphore's offset stands in config's upper half.
        attr.config = semaphore_offset << 32
        attr.config1 = ctypes.addressof(path)
        attr.config2 = offset
        attr.sample_period = 1
        self._fds = [open_event(attr, -1, 0)]
        try:
            link = struct.pack("<IIIIQ", program_fd, self._fds[0], _BPF_PERF_EVENT, 0, cookie)
            self._fds.append(bpf(BPF_LINK_CREATE, link))
            fcntl.ioctl(self._fds[0], IOC_ENABLE, 0)
        except OSError:
            self.close()
            raise

    def close(self) -> None:
        """Detaches: the breakpoint goes away and the semaphore is lowered."""
        while self._fds:
            os.close(self._fds.pop())
