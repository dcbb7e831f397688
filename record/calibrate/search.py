"""The search of `iaprof calibrate`: paths from kernels' handles to what the driver's public calls say of them.

A path (a, b, c) leads from a handle h to what is at *(*(h + a) + b) + c, as in bpf.driver_layout. By chance a path may
lead anywhere, so it is kept only as long as it holds for every kernel that is shown, of whatever module.
This runs in the driver's process, and reads its memory by pread of /proc/self/mem: a wrong pointer harms nothing.
"""

from __future__ import annotations

import bisect
import os
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from iaprof.formats.wire.process_maps import Mapping, mappings, maps_of

DEPTH = 4  # offsets of a path: as many as NEO 26.27 needs; earlier ones need fewer
WINDOW = 4096  # bytes of an object that are looked at
MAX_OBJECTS = 20_000  # twenty times what a search of NEO 26.27 meets
MAX_CANDIDATES = 20_000  # of one kind
MOST_TOLD = 2_000  # of these, nearest first: those that go into the answer
NEIGHBOURS = 8  # words in which an allocation's size follows its address
MAX_BIAS = 64  # bytes: where in an object a handle of it may point
MAX_ALLOCATION = 1 << 32  # bytes: all instructions lie in one such piece of the GPU's address space
_PAGE = 4096
GPU_BITS = (1 << 48) - 1  # some drivers sign-extend GPU addresses, others do not
_WORD = 8
_LOWER = (1 << 32) - 1

Path = tuple[int, ...]
Candidate = tuple[Path, ...]  # one path, two that belong together, or one and a number


@dataclass(frozen=True)
class Kernel:
    """What the driver's public calls say of one kernel."""

    handle: int
    module: int  # its module's handle
    name: bytes
    address: int  # of its first instruction, for the GPU
    code: bytes
    binary: bytes  # the module's zebin


class Memory:
    """The memory of this very process."""

    def __init__(self) -> None:
        """Opens it: once this process has changed its user, it could not."""
        self._fd = os.open("/proc/self/mem", os.O_RDONLY | os.O_CLOEXEC)
        self._mappings: list[Mapping] = []
        self._starts: list[int] = []
        self._numbers: dict[tuple[int, int], int | None] = {}
        self._words: dict[int, array[int]] = {}

    def look_again(self) -> None:
        """Forgets what was read, and learns what is mapped now."""
        self._numbers.clear()
        self._words.clear()
        self._mappings = list(mappings(maps_of()))
        self._starts = [mapping.start for mapping in self._mappings]

    def mapping(self, address: int) -> Mapping | None:
        """Where an address lies."""
        index = bisect.bisect_right(self._starts, address) - 1
        return self._mappings[index] if index >= 0 and address < self._mappings[index].end else None

    def read(self, address: int, length: int) -> bytes:
        """What is there; shorter, or nothing, where there is less."""
        try:
            return os.pread(self._fd, length, address)
        except (OSError, OverflowError):
            return b""

    def words(self, address: int) -> array[int]:
        """The words of an object."""
        if address not in self._words:
            block = self.read(address, WINDOW)
            self._words[address] = array("Q", block[: len(block) // _WORD * _WORD])
        return self._words[address]

    def number(self, address: int, size: int = _WORD) -> int | None:
        """What is there as a number; read once, as most ways begin alike."""
        try:
            return self._numbers[address, size]
        except KeyError:
            found = self.read(address, size)
            number = int.from_bytes(found, "little") if len(found) == size else None
            return self._numbers.setdefault((address, size), number)

    def follow(self, handle: int, path: Path, size: int = _WORD) -> int | None:
        """The number to which a path leads."""
        at = handle
        for offset in path[:-1]:
            pointer = self.number(at + offset)
            if not pointer:
                return None
            at = pointer
        return self.number(at + path[-1], size)

    def is_object(self, address: int) -> bool:
        """Whether an object may lie there."""
        return address % _WORD == 0 and (found := self.mapping(address)) is not None and _is_allocated(found)


class Search:
    """Paths that hold for every kernel that was shown so far, by what they lead to."""

    def __init__(self, memory: Memory, driver: int) -> None:
        """Starts with no paths.

        Args:
            memory: of this process.
            driver: an address in the driver.
        """
        memory.look_again()
        mapping = memory.mapping(driver)
        self._memory = memory
        self._driver = mapping.file if mapping else None
        self.candidates: dict[str, list[Candidate]] = {}

    def find(self, kernels: Sequence[Kernel]) -> None:
        """Finds what holds for all of these; they should be of two modules, each with more kernels than one."""
        self._memory.look_again()
        leader = max(kernels, key=lambda kernel: kernel.address)  # not the first in its allocation
        objects = list(self._objects(sorted(kernels, key=lambda kernel: kernel is not leader)))
        distinct = {address for _prefix, address in objects}
        held = {address: list(self._in_object(address, leader)) for address in distinct}
        found: dict[str, list[Candidate]] = {"address": []}
        for prefix, address in objects:
            for kind, offsets, number in held[address]:
                paths = tuple((*prefix, offset) for offset in offsets)
                found.setdefault(kind, []).append((*paths, number) if number else paths)
        self.candidates = found
        self.keep(kernels)

        bases: dict[int, list[Path]] = {}  # of allocations, by how far behind them the code lies
        for base in {base for base, _size in self.candidates.get("allocation", ())}:
            distance = (leader.address - (self._memory.follow(leader.handle, base) or 0)) & GPU_BITS
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
        """Where in the driver's file an address of it lies; None for one that is elsewhere."""
        mapping = self._memory.mapping(address)
        if mapping is None or mapping.file != self._driver:
            return None
        return address - mapping.start + mapping.offset

    def places(self, functions: dict[str, int]) -> dict[str, int]:
        """Places in the driver's file of those of some functions that are in it, by name.

        Args:
            functions: their addresses.
        """
        return {name: place for name, address in functions.items() if (place := self.place(address)) is not None}

    def class_of(self, address: int) -> int | None:
        """Where in the driver's file the virtual table of an object is; None for what is none of the driver's."""
        table = self._memory.number(address) or 0
        mapping = self._memory.mapping(table)
        if mapping is None or mapping.file != self._driver or not self._is_virtual_table(table, mapping):
            return None
        return table - mapping.start + mapping.offset

    def keep(self, kernels: Sequence[Kernel]) -> None:
        """Drops what does not hold for all of these."""
        self._memory.look_again()
        for kind, of in self.candidates.items():
            held = [each for each in of if all(self.holds(kind, each, kernel) for kernel in kernels)]
            self.candidates[kind] = sorted(held, key=nearest)[:MAX_CANDIDATES]

    def _objects(self, kernels: Sequence[Kernel]) -> Iterator[tuple[Path, int]]:
        """What the first kernel's handle leads to by pointers that all kernels have; nearest first."""
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
        """What an object may hold of a kernel: the kind, one offset or two, and a number or none."""
        memory, length = self._memory, len(kernel.code)
        words = memory.words(address)
        for index, word in enumerate(words):
            if not word:
                continue
            at = _WORD * index
            if length in (word & _LOWER, word >> 32):
                yield "size", (at if word & _LOWER == length else at + 4,), ()
            distance = (kernel.address - word) & GPU_BITS
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
        """What the bytes at an address are the beginning of; empty for nothing that is searched."""
        there = self._memory.read(address, max(len(kernel.name) + 1, 16))
        if there.startswith(kernel.name + b"\0"):
            return "name"
        if there and kernel.code.startswith(there):
            return "code"
        return "binary" if there and kernel.binary.startswith(there) else ""

    def _is_virtual_table(self, address: int, mapping: Mapping) -> bool:
        """Whether it points to code of the driver from where only the dynamic linker wrote."""
        code = self._memory.mapping(self._memory.number(address) or 0)
        return (
            mapping.rights.startswith(b"r--") and code is not None and code.file == self._driver and b"x" in code.rights
        )

    def holds(self, kind: str, candidate: Candidate, kernel: Kernel) -> bool:
        """Whether a candidate of a kind holds for a kernel."""
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
                return (first + second - kernel.address) & GPU_BITS == 0
            case "allocation":
                return _spans(second, ((kernel.address - first) & GPU_BITS) + len(kernel.code))
            case "binary":
                return second == len(kernel.binary) and memory.read(first, second) == kernel.binary
        return False


def nearest(candidate: Candidate) -> tuple[int, Candidate]:
    """What candidates are sorted by: the shortest paths first, of these the smallest offsets."""
    return sum(map(len, candidate)), candidate


def _spans(size: int, needed: int) -> bool:
    """Whether it can be the size of an allocation that holds so many bytes."""
    return needed <= size <= MAX_ALLOCATION


def _is_allocated(mapping: Mapping) -> bool:
    """Whether it is memory that the process asked for."""
    return mapping.rights.startswith(b"rw") and not mapping.inode
