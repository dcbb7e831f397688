"""The vDSO: a small ELF image that the Linux kernel maps into every process; no file on disk has it."""

from __future__ import annotations

import os

from iaprof.formats.wire.process_maps import lines, mappings, maps_of
from iaprof.symbols.names.modules import ModuleKind

_LINE = lines(rb"\[vdso\]")
_MOST_BYTES = 1 << 20  # it has a few pages


def open_vdso() -> int | None:
    """Copies this process's vDSO into an open file, at the offsets that it has in the mapping; None without a vDSO.

    All 64-bit processes have the same vDSO until the machine reboots. For addresses from another machine or an earlier
    boot it may give wrong names.
    """
    for mapping in mappings(maps_of(), _LINE):
        with open("/proc/self/mem", "rb", buffering=0) as memory:
            content = os.pread(memory.fileno(), min(mapping.end - mapping.start, _MOST_BYTES), mapping.start)
        file = os.memfd_create("iaprof " + ModuleKind.VDSO)
        os.write(file, content)
        os.lseek(file, 0, os.SEEK_SET)
        return file
    return None
