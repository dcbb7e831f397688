"""Names for the addresses of CPU stacks: each distinct address of a process is looked up once."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cache

import numpy as np
import pyarrow as pa

from iaprof.report.address_space import AddressSpaces, Place
from iaprof.report.demangle import demangled
from iaprof.report.elf_symbols import ElfSymbols, open_module

TRUNCATED = "[truncated]"


@dataclass(frozen=True)
class Stack:
    """One stack as it was recorded: addresses uint64[n], innermost first."""

    pid: int
    time_ns: int
    ips: tuple[int, ...]
    truncated: bool


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

    def frames(self, stack: int) -> tuple[str, ...]:
        """The stack's frames, outermost first; empty where the stack is not in the capture."""
        row = self._rows.get(stack)
        if row is None:
            return ()
        values = {name: self._stacks[name][row].as_py() for name in ("pid", "time_ns", "truncated")}
        ips = np.asarray(self._stacks["ips"][row].as_py() or [], np.uint64).tolist()
        # All but the innermost are return addresses: the call is before them.
        calls = [ip - 1 if depth else ip for depth, ip in enumerate(ips) if ip]
        names = [self._name(values["pid"], ip, values["time_ns"]) for ip in calls]
        return (*((TRUNCATED,) if values["truncated"] else ()), *reversed(names))

    def _find_name(self, pid: int, ip: int, time_ns: int) -> str:
        place = self._spaces.find(pid, ip, time_ns)
        if place is None:
            return f"0x{ip:x}"
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
