"""The search of `iaprof calibrate`: paths from kernels' handles to what the driver's public calls say of the kernels.

A path (a, b, c) leads from a handle h to what is at *(*(h + a) + b) + c, as in bpf.driver_layout. A path can
lead to a value by chance, so it is kept only while it holds for every kernel that is shown, of whatever module. This
runs in the driver's process and reads its memory by pread of /proc/self/mem: a wrong pointer does no harm.
"""

from __future__ import annotations

import bisect
import os
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from iaprof.formats.wire.process_maps import Mapping, mappings, maps_of
from iaprof.gpu.code import ADDRESS_MASK

DEPTH = 4  # offsets of a path: NEO 26.27 needs as many, earlier versions fewer
WINDOW = 4096  # bytes of an object that are searched
MAX_OBJECTS = 20_000  # twenty times as many as in NEO 26.27
MAX_CANDIDATES = 20_000  # of one kind
MOST_ANSWERED = 2_000  # of these, those that go into the answer, nearest first
NEIGHBOURS = 8  # words after an allocation's address that may be its size
MAX_BIAS = 64  # bytes: how far into an object a handle of it may point
MAX_ALLOCATION = 1 << 32  # bytes: instructions lie in one range of the GPU's address space of this size
_PAGE = 4096
_WORD = 8
_LOWER = (1 << 32) - 1

Path = tuple[int, ...]
Candidate = tuple[Path, ...]  # one path, two that belong together, or one and a number


@dataclass(frozen=True)
class Kernel:
    """What the driver's public calls say of a kernel."""

    handle: int
    module: int  # its module's handle
    name: bytes
    address: int  # of its first instruction, in the GPU's address space
    code: bytes
    binary: bytes  # the module's zebin


class Memory:
    """Reads the memory of this process."""

    def __init__(self) -> None:
        """Opens the memory, which is not possible after a change of user."""
        self._fd = os.open("/proc/self/mem", os.O_RDONLY | os.O_CLOEXEC)
        self._mappings: list[Mapping] = []
        self._starts: list[int] = []
        self._numbers: dict[tuple[int, int], int | None] = {}
        self._words: dict[int, array[int]] = {}

    def refresh(self) -> None:
        """Forgets what was read, and reads the current mappings."""
        self._numbers.clear()
        self._words.clear()
        self._mappings = list(mappings(maps_of()))
        self._starts = [mapping.start for mapping in self._mappings]

    def mapping(self, address: int) -> Mapping | None:
        """Returns the mapping of an address."""
        index = bisect.bisect_right(self._starts, address) - 1
        return self._mappings[index] if index >= 0 and address < self._mappings[index].end else None

    def read(self, address: int, length: int) -> bytes:
        """Reads bytes; returns fewer, or none, if they cannot be read."""
        try:
            return os.pread(self._fd, length, address)
        except (OSError, OverflowError):
            return b""

    def words(self, address: int) -> array[int]:
        """Reads the 64-bit words of an object."""
        if address not in self._words:
            block = self.read(address, WINDOW)
            self._words[address] = array("Q", block[: len(block) // _WORD * _WORD])
        return self._words[address]

    def number(self, address: int, size: int = _WORD) -> int | None:
        """Reads a number; cached, as most paths begin alike."""
        try:
            return self._numbers[address, size]
        except KeyError:
            data = self.read(address, size)
            number = int.from_bytes(data, "little") if len(data) == size else None
            return self._numbers.setdefault((address, size), number)

    def follow(self, handle: int, path: Path, size: int = _WORD) -> int | None:
        """Returns the number to which a path leads; None if it leads nowhere."""
        at = handle
        for offset in path[:-1]:
            pointer = self.number(at + offset)
            if not pointer:
                return None
            at = pointer
        return self.number(at + path[-1], size)

    def is_object(self, address: int) -> bool:
        """Whether an object may lie there."""
        return address % _WORD == 0 and (mapping := self.mapping(address)) is not None and _is_allocated(mapping)


class Search:
    """Finds paths that hold for every kernel shown so far."""

    def __init__(self, memory: Memory, driver: int) -> None:
        """Begins without paths.

        Args:
            memory: of this process.
            driver: an address in the driver.
        """
        memory.refresh()
        mapping = memory.mapping(driver)
        self._memory = memory
        self._driver = mapping.file if mapping else None
        self.candidates: dict[str, list[Candidate]] = {}

    def find(self, kernels: Sequence[Kernel]) -> None:
        """Finds paths that hold for all of these kernels: best of two modules, with several kernels each."""
        self._memory.refresh()
        leader = max(kernels, key=lambda kernel: kernel.address)  # not the first kernel in its allocation
        objects = list(self._objects(sorted(kernels, key=lambda kernel: kernel is not leader)))
        distinct = {address for _prefix, address in objects}
        contents = {address: list(self._in_object(address, leader)) for address in distinct}
        candidates: dict[str, list[Candidate]] = {"address": []}
        for prefix, address in objects:
            for kind, offsets, number in contents[address]:
                paths = tuple((*prefix, offset) for offset in offsets)
                candidates.setdefault(kind, []).append((*paths, number) if number else paths)
        self.candidates = candidates
        self.keep(kernels)

        bases: dict[int, list[Path]] = {}  # paths to allocations, by the distance from their start to the code
        for base in {base for base, _size in self.candidates.get("allocation", ())}:
            distance = (leader.address - (self._memory.follow(leader.handle, base) or 0)) & ADDRESS_MASK
            if distance:
                bases.setdefault(distance, []).append(base)
        distances = {
            address: [(_WORD * index, word) for index, word in enumerate(self._memory.words(address)) if word in bases]
            for address in distinct
        }
        for prefix, address in objects:
            for at, distance in distances[address]:
                self.candidates["address"] += [(base, (*prefix, at)) for base in bases[distance]]
        self.keep(kernels)

    def place(self, address: int) -> int | None:
        """Returns the place in the driver's file of an address; None if it is outside of the driver."""
        mapping = self._memory.mapping(address)
        if mapping is None or mapping.file != self._driver:
            return None
        return address - mapping.start + mapping.offset

    def places(self, functions: dict[str, int]) -> dict[str, int]:
        """Returns the places in the driver's file of functions, by name; without those outside of it.

        Args:
            functions: addresses of functions, by name.
        """
        return {name: place for name, address in functions.items() if (place := self.place(address)) is not None}

    def class_of(self, address: int) -> int | None:
        """Returns the place in the driver's file of an object's virtual table; None for an object not of the driver."""
        table = self._memory.number(address) or 0
        mapping = self._memory.mapping(table)
        if mapping is None or mapping.file != self._driver or not self._is_virtual_table(table, mapping):
            return None
        return table - mapping.start + mapping.offset

    def keep(self, kernels: Sequence[Kernel]) -> None:
        """Drops paths that do not hold for all of these kernels."""
        self._memory.refresh()
        for kind, candidates in self.candidates.items():
            held = [
                candidate for candidate in candidates if all(self.holds(kind, candidate, kernel) for kernel in kernels)
            ]
            self.candidates[kind] = sorted(held, key=nearest)[:MAX_CANDIDATES]

    def _objects(self, kernels: Sequence[Kernel]) -> Iterator[tuple[Path, int]]:
        """Yields the objects that the first kernel's handle leads to, by paths that all kernels have; nearest first."""
        memory, left = self._memory, MAX_OBJECTS
        level: list[tuple[Path, list[int]]] = [((), [kernel.handle for kernel in kernels])]
        for depth in range(DEPTH):
            further = []
            for prefix, addresses in level[:left]:
                yield prefix, addresses[0]
                if depth == DEPTH - 1:
                    continue
                for index, word in enumerate(memory.words(addresses[0])):
                    if word and memory.is_object(word):
                        at = _WORD * index
                        words = [word, *(memory.number(address + at) or 0 for address in addresses[1:])]
                        if all(map(memory.is_object, words)):
                            further.append(((*prefix, at), words))
            left -= len(level[:left])
            level = further

    def _in_object(self, address: int, kernel: Kernel) -> Iterator[tuple[str, Path, Path]]:
        """Yields what an object may hold of a kernel: the kind, one or two offsets, and a number or none."""
        memory, length = self._memory, len(kernel.code)
        words = memory.words(address)
        for index, word in enumerate(words):
            if not word:
                continue
            at = _WORD * index
            if length in (word & _LOWER, word >> 32):
                yield "size", (at if word & _LOWER == length else at + 4,), ()
            distance = (kernel.address - word) & ADDRESS_MASK
            if distance == 0:
                yield "address", (at,), ()
            if distance < MAX_ALLOCATION and word % _PAGE == 0:
                for behind, size in enumerate(words[index + 1 : index + NEIGHBOURS], 1):
                    if _spans(size, distance + length):
                        yield "allocation", (at, at + _WORD * behind), ()
            elif word >= _PAGE and (mapping := memory.mapping(word)):
                if 0 <= kernel.module - word < MAX_BIAS:
                    yield "module", (at,), (kernel.module - word,)
                elif mapping.file == self._driver:
                    if self._is_virtual_table(word, mapping):
                        yield "kernel_class", (at,), (word - mapping.start + mapping.offset,)
                elif _is_allocated(mapping) and (kind := self._kind(word, kernel)):
                    if kind != "binary":
                        yield kind, (at,), ()
                        continue
                    for behind, size in enumerate(words):
                        if size == len(kernel.binary):
                            yield kind, (at, _WORD * behind), ()

    def _kind(self, address: int, kernel: Kernel) -> str:
        """Returns the kind of what begins with the bytes at an address; empty for none."""
        data = self._memory.read(address, max(len(kernel.name) + 1, 16))
        if data.startswith(kernel.name + b"\0"):
            return "name"
        if data and kernel.code.startswith(data):
            return "code"
        return "binary" if data and kernel.binary.startswith(data) else ""

    def _is_virtual_table(self, address: int, mapping: Mapping) -> bool:
        """Whether an address in read-only memory of the driver points to the driver's code."""
        code = self._memory.mapping(self._memory.number(address) or 0)
        return (
            mapping.rights.startswith(b"r--") and code is not None and code.file == self._driver and b"x" in code.rights
        )

    def holds(self, kind: str, candidate: Candidate, kernel: Kernel) -> bool:
        """Whether a candidate holds for a kernel."""
        memory = self._memory
        size = 4 if kind == "size" else _WORD
        first = memory.follow(kernel.handle, candidate[0], size)
        if first is None:
            return False
        match kind:
            case "size":
                return first == len(kernel.code)
            case "code":
                return memory.read(first, len(kernel.code)) == kernel.code
            case "name":
                return memory.read(first, len(kernel.name) + 1) == kernel.name + b"\0"
            case "module":
                return first == kernel.module - candidate[1][0]
            case "kernel_class":
                return self.place(first) == candidate[1][0]
        second = memory.follow(kernel.handle, candidate[1]) if len(candidate) > 1 else 0
        if second is None:
            return False
        match kind:
            case "address":
                return (first + second - kernel.address) & ADDRESS_MASK == 0
            case "allocation":
                return _spans(second, ((kernel.address - first) & ADDRESS_MASK) + len(kernel.code))
            case "binary":
                return second == len(kernel.binary) and memory.read(first, second) == kernel.binary
        return False


def nearest(candidate: Candidate) -> tuple[int, Candidate]:
    """Returns the sort key of candidates: shortest paths first, then smallest offsets."""
    return sum(map(len, candidate)), candidate


def _spans(size: int, needed: int) -> bool:
    """Whether `size` can be that of an allocation with so many bytes."""
    return needed <= size <= MAX_ALLOCATION


def _is_allocated(mapping: Mapping) -> bool:
    """Whether a mapping is memory that the process has allocated."""
    return mapping.rights.startswith(b"rw") and not mapping.inode
