"""Whole names of kernels, from the modules of the process: a launch record holds only 63 bytes of a name.

A launch gets the name of the kernel at its address that begins with these bytes. If the addresses of kernels are not
known, it gets the name only if exactly one kernel of the process begins so. Otherwise the name stays cut and ends in
CUT, because a guess could be the name of another kernel.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from iaprof.formats.capture.limits import MAX_TEXT_BYTES
from iaprof.formats.distinct import distinct_rows
from iaprof.formats.wire.launches import NAME_BYTES
from iaprof.formats.zebin import canonical, kernel_names

CUT = "…"
CUT_BYTES = NAME_BYTES - 1  # what a launch has of a longer name
MAX_KEPT_BYTES = 128 << 20  # of names; a kernel's has some hundred
_NAME_COSTS = 1024  # bytes of memory that a name takes besides
_ADDRESS_MASK = np.uint64((1 << 48) - 1)


@dataclass(frozen=True)
class LaunchNames:
    """The names of some launches."""

    texts: list[str]
    of: NDArray[np.int64]  # of each launch, an index into `texts`


class KernelNames:
    """Names of kernels in the modules of a recording that are too long for a launch record."""

    def __init__(self) -> None:
        self._left = MAX_KEPT_BYTES
        # Time and name, by process, address and the name's beginning: there may be many names of one address.
        self._placed: dict[tuple[int, int, bytes], dict[tuple[int, bytes], None]] = defaultdict(dict)
        # Names, and whether a place is known.
        self._begin: dict[tuple[int, bytes], dict[bytes, bool]] = defaultdict(dict)
        self._of_module: dict[str, list[tuple[bytes, int]]] = {}  # by digest

    def add_module(self, pid: int, time_ns: int, digest: str, elf: bytes | None) -> None:
        """Adds a module of a process.

        Args:
            pid: of the process.
            time_ns: since when.
            digest: of the ELF file.
            elf: its content; None if an earlier call had it.
        """
        if elf is not None and digest not in self._of_module:
            names = kernel_names(elf, CUT_BYTES, MAX_TEXT_BYTES)
            length = sum(len(name) + _NAME_COSTS for name, _ in names)
            self._of_module[digest] = names if length <= self._left else []
            self._left -= min(length, self._left)
        for name, address in self._of_module.get(digest, ()):
            self.add(pid, time_ns, address, name)

    def add(self, pid: int, time_ns: int, address: int, name: bytes) -> None:
        """Adds a kernel of a process; at address 0 if its address is not known."""
        cost = len(name) + _NAME_COSTS
        if len(name) < CUT_BYTES or cost > self._left or len(_text(name).encode()) > MAX_TEXT_BYTES:
            return
        self._left -= cost
        begin = name[:CUT_BYTES]
        known = self._begin[pid, begin]
        known[name] = known.get(name, False) or bool(address)
        if address:
            self._placed[pid, canonical(address), begin][time_ns, name] = None

    def of(self, launches: NDArray[np.void]) -> LaunchNames:
        """The names of launches, given as LAUNCH[n]: whole, or cut and marked."""
        encoded = pa.array(launches["name"], pa.binary()).dictionary_encode()
        begins = [bytes(name).split(b"\0", 1)[0] for name in encoded.dictionary.to_pylist()]
        texts = [_text(begin) for begin in begins]
        of = encoded.indices.to_numpy().astype(np.int64)
        is_cut = np.array([len(begin) == CUT_BYTES for begin in begins], bool)
        rows = np.flatnonzero(is_cut[of]) if len(begins) else np.empty(0, np.int64)
        if len(rows):
            self._complete(launches, rows, begins, texts, of)
        return LaunchNames(texts, of)

    def _complete(
        self,
        launches: NDArray[np.void],
        rows: NDArray[np.int64],
        begins: list[bytes],
        texts: list[str],
        of: NDArray[np.int64],
    ) -> None:
        """Replaces the names of these rows in `of`; adds each new name to `texts` once."""
        pids, addresses, times = (launches[name][rows] for name in ("pid", "address", "time"))
        addresses = addresses & _ADDRESS_MASK
        firsts, kind = distinct_rows(pids, *_halves(addresses), of[rows])
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
            members, start = order[start:end], end
            versions = self._versions(int(pids[first]), int(addresses[first]), begins[of[rows[first]]])
            since = np.array([time for time, _ in versions], np.uint64)
            names = np.array([number(name) for _, name in versions], np.int64)
            version = np.searchsorted(since, times[members], "right") - 1
            result[members] = names[np.maximum(version, 0)]
        of[rows] = result

    def _versions(self, pid: int, address: int, begin: bytes) -> list[tuple[int, str]]:
        """What a kernel is called, since when; at least one name."""
        if address and (placed := self._placed.get((pid, address, begin))):
            return [(time, _text(name)) for time, name in sorted(placed)]
        known = self._begin.get((pid, begin), {})
        if len(known) == 1:
            [(name, is_placed)] = known.items()
            if not (address and is_placed):
                return [(0, _text(name))]
        return [(0, _text(begin) + CUT)]


def _text(name: bytes) -> str:
    return name.decode("utf-8", "backslashreplace")


def _halves(addresses: NDArray[np.uint64]) -> Iterable[NDArray[np.uint64]]:
    """Numbers of 24 bits, as `distinct` takes them."""
    return addresses >> np.uint64(24), addresses & np.uint64((1 << 24) - 1)
