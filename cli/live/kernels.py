"""The kernels of a recording that goes on: their names and ranges, and the code of those that stall."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from iaprof.cli.live.sums import Launched
from iaprof.gpu.code import ADDRESS_MASK
from iaprof.gpu.instructions import InstructionSet
from iaprof.report.gpu.module import GpuKernel, GpuModuleLoader

MOST_BYTES = 256 << 20  # of debug ELFs that are kept
_REFRESH_S = 0.5  # that reading modules may take of a refresh


@dataclass(eq=False)
class LiveKernel:
    """A kernel at an address."""

    address: int  # canonical
    size: int  # bytes
    name: str  # "" if unknown
    digest: bytes = b""  # of its debug ELF; b"": there is none
    outline: GpuKernel | None = None
    code: GpuKernel | None = None  # with instructions; None: not read yet

    @property
    def symbol(self) -> str:
        """Its name, or its address."""
        return self.name or f"0x{self.address:x}"


class LiveKernels:
    """Kernels by address; where ranges overlap, the one that came last counts."""

    def __init__(self, loader: GpuModuleLoader) -> None:
        """Args: what reads debug ELFs, in its own process."""
        self._loader = loader
        self._elfs: dict[bytes, bytes] = {}  # by digest
        self._bytes = 0
        self._waiting: list[bytes] = []  # digests of debug ELFs that were not read yet
        self._by_address: dict[int, LiveKernel] = {}
        self._failed: set[LiveKernel] = set()

    def add_elf(self, elf: bytes) -> None:
        """Adds a debug ELF, which `read` reads."""
        digest = hashlib.sha256(elf).digest()
        if digest in self._elfs or self._bytes + len(elf) > MOST_BYTES:
            return
        self._elfs[digest] = elf
        self._bytes += len(elf)
        self._waiting.append(digest)

    def add_launches(self, launches: Iterable[Launched]) -> None:
        """Adds kernels that were launched, of which there may be no debug ELF."""
        for each in launches:
            known = self._by_address.get(each.address)
            if known is None or (known.outline is None and known.size != each.size):
                self._by_address[each.address] = LiveKernel(each.address, each.size, each.name)

    def read(self) -> None:
        """Reads the outlines of debug ELFs, as many as fit into a refresh."""
        begun = time.monotonic()
        while self._waiting and time.monotonic() - begun < _REFRESH_S:
            digest = self._waiting.pop(0)
            for outline in self._loader.load(self._elfs[digest], None, only=()).kernels:
                if outline.address:
                    size = max(outline.size, outline.code_size)
                    kernel = LiveKernel(outline.address, size, outline.demangled, digest, outline)
                    self._by_address[outline.address] = kernel

    def decode(self, kernel: LiveKernel, instruction_set: InstructionSet | None) -> bool:
        """Reads a kernel's instructions, if there is a debug ELF; returns whether that took time."""
        if kernel.code is not None or kernel.outline is None or kernel in self._failed:
            return False
        module = self._loader.load(self._elfs[kernel.digest], instruction_set, only=(kernel.address,))
        kernel.code = next((each for each in module.kernels if each.address == kernel.address), None)
        if kernel.code is None:
            self._failed.add(kernel)
        return True

    def at(self, addresses: NDArray[np.uint64], mask: int = ADDRESS_MASK) -> tuple[list[LiveKernel], NDArray[np.int64]]:
        """Finds the kernels at instruction addresses.

        Args:
            addresses: uint64[n], as many bits as records hold.
            mask: these bits.

        Returns:
            The kernels that were found, and the index among them for each address, -1 where there is none: int64[n].
        """
        kernels = list(self._by_address.values())
        starts = np.array([kernel.address & mask for kernel in kernels], np.uint64)
        order = np.argsort(starts, kind="stable")
        sizes = np.array([kernel.size for kernel in kernels], np.uint64)[order]
        starts = starts[order]
        place = np.searchsorted(starts, addresses, "right") - 1
        if not len(kernels):
            return [], place
        inside = (place >= 0) & (addresses - starts[place] < sizes[place])
        found, number = np.unique(order[place[inside]], return_inverse=True)
        where = np.full(len(addresses), -1)
        where[inside] = number
        return [kernels[each] for each in found.tolist()], where
