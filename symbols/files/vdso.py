"""The vDSO: a small ELF file that the kernel maps into every process, and that is on no disk."""

from __future__ import annotations

import os

from iaprof.formats.wire.process_maps import lines, mappings, maps_of
from iaprof.symbols.names.modules import ModuleKind

_LINE = lines(rb"\[vdso\]")
_MOST_BYTES = 1 << 20  # it has a few pages


def open_vdso() -> int | None:
    """This process's own vDSO as an open file, an offset in it is an offset in the mapping; None where it has none.

    It is that of every 64-bit process since this machine was started, and of no other: for addresses that were recorded
    on another machine or before the last start, it may give wrong names.
    """
    for mapping in mappings(maps_of(), _LINE):
        with open("/proc/self/mem", "rb", buffering=0) as memory:
            content = os.pread(memory.fileno(), min(mapping.end - mapping.start, _MOST_BYTES), mapping.start)
        file = os.memfd_create("iaprof " + ModuleKind.VDSO)
        os.write(file, content)
        os.lseek(file, 0, os.SEEK_SET)
        return file
    return None
