"""Whole names of kernels, from their modules: a launch record holds only 63 bytes of a name.

A launch gets the name of the kernel at its address that begins with these bytes. If kernels' addresses are unknown, it
gets the name only if exactly one kernel of the process begins so. Otherwise the name stays cut and ends in CUT: a guess
could name another kernel.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from iaprof.formats.capture.limits import MAX_TEXT_BYTES
from iaprof.formats.distinct import distinct_rows, distinct_texts
from iaprof.formats.wire.launches import NAME_BYTES
from iaprof.gpu.code import ADDRESS_MASK, canonical
from iaprof.gpu.elf_code import kernel_names
from iaprof.gpu.nvidia.architectures import is_cubin

CUT = "…"
CUT_BYTES = NAME_BYTES - 1  # length of a cut name in a launch record
MAX_KEPT_BYTES = 128 << 20  # of names; a kernel's name has some hundred
_NAME_COSTS = 1024  # bytes of memory that a name takes in addition


@dataclass(frozen=True)
class LaunchNames:
    """The names of some launches."""

    texts: list[str]
    indices: NDArray[np.int64]  # into `texts`, one for each launch


class KernelNames:
    """The names of a recording's kernels that are too long for a launch record."""

    def __init__(self) -> None:
        self._left = MAX_KEPT_BYTES
        # By process, address and the name's beginning: (time, name) of each kernel there, as addresses are reused.
        self._placed: dict[tuple[int, int, bytes], dict[tuple[int, bytes], None]] = defaultdict(dict)
        # By process and the name's beginning: names, and whether an address of the kernel is known.
        self._by_prefix: dict[tuple[int, bytes], dict[bytes, bool]] = defaultdict(dict)
        self._has_shaders = False
        self._by_digest: dict[str, list[tuple[bytes, int]]] = {}  # names and addresses of a module's kernels

    def add_module(self, pid: int, time_ns: int, digest: str, elf: bytes | None, base: int = 0) -> None:
        """Adds a module of a process.

        Args:
            pid: the process.
            time_ns: since when the process has the module.
            digest: of the ELF file.
            elf: the file; None if an earlier call had it.
            base: what is added to the addresses in the file.
        """
        if elf is not None and digest not in self._by_digest:
            names = kernel_names(elf, CUT_BYTES, MAX_TEXT_BYTES, are_placed=not is_cubin(elf))
            length = sum(len(name) + _NAME_COSTS for name, _ in names)
            self._by_digest[digest] = names if length <= self._left else []
            self._left -= min(length, self._left)
        for name, address in self._by_digest.get(digest, ()):
            self.add(pid, time_ns, canonical(base + address) if address else 0, name)

    def add(self, pid: int, time_ns: int, address: int, name: bytes) -> None:
        """Adds a kernel of a process; the address is 0 if unknown."""
        cost = len(name) + _NAME_COSTS
        if len(name) < CUT_BYTES or cost > self._left or len(_text(name).encode()) > MAX_TEXT_BYTES:
            return
        self._left -= cost
        prefix = name[:CUT_BYTES]
        known = self._by_prefix[pid, prefix]
        known[name] = known.get(name, False) or bool(address)
        if address:
            self._placed[pid, canonical(address), prefix][time_ns, name] = None

    def add_shader(self, pid: int, time_ns: int, address: int, name: bytes) -> None:
        """Adds the name of a shader, for launches that have none, as when its program gave it one later."""
        cost = len(name) + _NAME_COSTS
        if cost <= self._left:
            self._left -= cost
            self._has_shaders = True
            self._placed[pid, canonical(address), b""][time_ns, name] = None

    def for_launches(self, launches: NDArray[np.void]) -> LaunchNames:
        """Returns the names of LAUNCH[n]: whole, or cut and marked."""
        prefixes, indices = distinct_texts(launches["name"])
        texts = [_text(prefix) for prefix in prefixes]
        incomplete = (CUT_BYTES, 0) if self._has_shaders else (CUT_BYTES,)
        is_cut = np.array([len(prefix) in incomplete for prefix in prefixes], bool)
        rows = np.flatnonzero(is_cut[indices]) if len(prefixes) else np.empty(0, np.int64)
        if len(rows):
            self._complete(launches, rows, prefixes, texts, indices)
        return LaunchNames(texts, indices)

    def _complete(
        self,
        launches: NDArray[np.void],
        rows: NDArray[np.int64],
        prefixes: list[bytes],
        texts: list[str],
        indices: NDArray[np.int64],
    ) -> None:
        """Replaces cut names: changes `indices` at `rows`; adds each new name to `texts` once."""
        pids, addresses, times = (launches[name][rows] for name in ("pid", "address", "time"))
        addresses = addresses & np.uint64(ADDRESS_MASK)
        firsts, kind = distinct_rows(pids, *_halves(addresses), indices[rows])
        order = np.argsort(kind, kind="stable")
        ends = np.searchsorted(kind[order], np.arange(len(firsts)), "right")
        numbers: dict[str, int] = {}

        def number(text: str) -> int:
            if text not in numbers:
                numbers[text] = len(texts)
                texts.append(text)
            return numbers[text]

        result = np.empty(len(rows), np.int64)
        start = 0
        for first, end in zip(firsts.tolist(), ends.tolist(), strict=True):
            group_rows, start = order[start:end], end
            versions = self._versions(int(pids[first]), int(addresses[first]), prefixes[indices[rows[first]]])
            since = np.array([time for time, _ in versions], np.uint64)
            names = np.array([number(name) for _, name in versions], np.int64)
            version = np.searchsorted(since, times[group_rows], "right") - 1
            result[group_rows] = names[np.maximum(version, 0)]
        indices[rows] = result

    def _versions(self, pid: int, address: int, prefix: bytes) -> list[tuple[int, str]]:
        """Returns the kernel's names with their times, at least one."""
        if address and (placed := self._placed.get((pid, address, prefix))):
            return [(time, _text(name)) for time, name in sorted(placed)]
        known = self._by_prefix.get((pid, prefix), {})
        if len(known) == 1:
            [(name, is_placed)] = known.items()
            if not (address and is_placed):
                return [(0, _text(name))]
        return [(0, _text(prefix) + CUT if prefix else "")]


def _text(name: bytes) -> str:
    return name.decode("utf-8", "backslashreplace")


def _halves(addresses: NDArray[np.uint64]) -> Iterable[NDArray[np.uint64]]:
    """Splits addresses into 24-bit numbers, as distinct_rows needs."""
    return addresses >> np.uint64(24), addresses & np.uint64((1 << 24) - 1)
