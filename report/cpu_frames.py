"""Names for the addresses of CPU stacks: each distinct place in a file is named once."""

from __future__ import annotations

import os
from functools import cache

import pyarrow as pa

from iaprof.report.address_space import AddressSpaces, Place
from iaprof.report.demangle import demangled
from iaprof.report.elf_symbols import ElfSymbols, open_module

TRUNCATED = "[truncated]"
DEEPEST_STACK = 1024  # frames; recorders keep fewer


class CpuFrames:
    """Names frames of the stacks of one capture."""

    def __init__(self, stacks: pa.Table, spaces: AddressSpaces) -> None:
        """Keeps what is needed for looking up.

        Args:
            stacks: `stack` rows.
            spaces: of the same capture.
        """
        self._rows = {int(stack): index for index, stack in enumerate(stacks["id"].to_numpy())}
        self._stacks = stacks
        self._spaces = spaces
        self._modules: dict[tuple[str, bytes | None], ElfSymbols | None] = {}
        self._name = cache(self._find_name)
        self.frames = cache(self._find_frames)

    def _find_frames(self, stack: int) -> tuple[str, ...]:
        """The stack's frames, outermost first; empty where the stack is not in the capture."""
        row = self._rows.get(stack)
        if row is None:
            return ()
        pid, time_ns, truncated, ips = (self._stacks[name][row] for name in ("pid", "time_ns", "truncated", "ips"))
        addresses = ips.values[:DEEPEST_STACK].to_pylist()
        # All but the innermost are return addresses: the call is before them.
        calls = [ip - 1 if depth else ip for depth, ip in enumerate(addresses) if ip]
        places = self._spaces.find(pid.as_py(), calls, time_ns.as_py())
        names = [self._name(place) if place else f"0x{ip:x}" for place, ip in zip(places, calls, strict=True)]
        more = truncated.as_py() or len(ips.values) > DEEPEST_STACK
        return (*((TRUNCATED,) if more else ()), *reversed(names))

    def _find_name(self, place: Place) -> str:
        name = self._symbol(place)
        return demangled(name) if name else unnamed(place)

    def _symbol(self, place: Place) -> str | None:
        key = (place.path, place.build_id)
        if key not in self._modules:
            self._modules[key] = open_module(*key)
        module = self._modules[key]
        return module.name(place.offset) if module else None


def unnamed(place: Place) -> str:
    """What stands for a frame whose function has no name: `[libfoo.so+0x1234]`, an offset in the file."""
    if place.path.startswith("["):  # [vdso] and its like
        return place.path
    if place.path in ("", "//anon"):
        return "[anon]"
    return f"[{os.path.basename(place.path)}+0x{place.offset:x}]"
