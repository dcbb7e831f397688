"""This boot of the machine: its id, whether a capture is of it, and the vDSO, which no file on disk has.

The vDSO is a small ELF image that the Linux kernel maps into every process.
"""

from __future__ import annotations

import os
from pathlib import Path

from iaprof.formats.wire.process_maps import lines, mappings, maps_of

_LINE = lines(rb"\[vdso\]")
_MOST_BYTES = 1 << 20  # it has a few pages


def boot_id() -> str:
    """Returns the id that the Linux kernel generates at each boot; empty if it cannot be read."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def is_same_boot(header: dict[str, object]) -> bool:
    """Tells from a capture's header whether it was recorded on this machine since it booted."""
    host = header.get("host")
    return isinstance(host, dict) and bool(boot_id()) and host.get("boot_id") == boot_id()


def open_vdso() -> int | None:
    """Copies this process's vDSO into an open file, at the offsets that it has in the mapping; None without a vDSO.

    All 64-bit processes have the same vDSO until the machine reboots. For addresses from another machine or an earlier
    boot it may give wrong names.
    """
    for mapping in mappings(maps_of(), _LINE):
        with open("/proc/self/mem", "rb", buffering=0) as memory:
            content = os.pread(memory.fileno(), min(mapping.end - mapping.start, _MOST_BYTES), mapping.start)
        file = os.memfd_create("iaprof vdso")
        os.write(file, content)
        os.lseek(file, 0, os.SEEK_SET)
        return file
    return None
