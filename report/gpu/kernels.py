"""The kernels of a capture's GPU modules: all of them in outline, those with stalls whole; and what they are called.

Placing needs names, addresses and sizes only. Instructions and source frames, which take most of the time, are read of
kernels that have stalls alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from enum import IntEnum
from queue import SimpleQueue
from typing import Any

from iaprof.formats.capture.reader import CaptureReader
from iaprof.report.gpu.module import GpuKernel, GpuModule, GpuModuleLoader
from iaprof.report.join.placements import Compilation, Placement

_MANY = 200  # kernels, for which a second process that reads them is worth its start
_SHOWN_DIGITS = 6  # of a hash that tells kernels apart; more where it does not


class SampledKernels:
    """Reads a capture's modules, each once per content: first `compilations`, then `read`, then the others."""

    def __init__(
        self,
        capture: CaptureReader,
        modules: GpuModuleLoader,
        platforms: list[IntEnum | None],
        problems: dict[str, list[str]],
        texts: bool = False,
    ) -> None:
        """`platforms` are the streams' GPUs; to `problems` go what could not be read, and the modules' paths.

        With `texts` instructions have their whole text.
        """
        self._capture = capture
        self._modules = modules
        self._platforms = platforms
        self._problems = problems
        self._texts = texts
        self._outlines: dict[bytes, GpuModule] = {}  # by digest
        self._whole: dict[GpuKernel, dict[IntEnum | None, GpuKernel]] = {}  # by the kernel in outline

    def compilations(self) -> list[Compilation]:
        """Every module of the capture, its kernels in outline."""
        found = []
        for digest, path, elf, time_ns, pid in self._rows("time_ns", "pid"):
            key = digest.as_py()
            if key not in self._outlines and elf.is_valid:
                self._outlines[key] = self._modules.load(elf.as_py(), None, only=())
                self._tell(self._outlines[key].problems, path)
            if key in self._outlines:
                found.append(Compilation(time_ns.as_py(), pid.as_py(), self._outlines[key]))
        return found

    def read(self, kernels: Collection[GpuKernel]) -> None:
        """Read those of these kernels, given in outline, that were not read yet.

        Where the GPUs are of several generations, as each one's in turn.
        """
        wanted: dict[bytes, set[int]] = {}
        for key, module in self._outlines.items():
            if addresses := {k.address for k in module.kernels if k in kernels and k not in self._whole}:
                wanted[key] = addresses
        with contextlib.ExitStack() as opened:
            readers = [self._modules]
            if sum(map(len, wanted.values())) >= _MANY:
                readers.append(opened.enter_context(type(self._modules)()))
            workers = opened.enter_context(ThreadPoolExecutor(len(readers)))
            free = SimpleQueue[GpuModuleLoader]()
            for reader in readers:
                free.put(reader)
            platforms = dict.fromkeys(self._platforms) or dict.fromkeys([None])
            asked = []
            for digest, path, elf in self._rows():
                if digest.as_py() in wanted and elf.is_valid:
                    only = wanted.pop(digest.as_py())
                    words = (free, elf.as_py(), list(platforms), only, self._texts)
                    asked.append((self._outlines[digest.as_py()], path, only, workers.submit(_load, *words)))
            for outline, path, only, loaded in asked:
                told = set(outline.problems)
                for platform, module in loaded.result().items():
                    self._tell([problem for problem in module.problems if problem not in told], path)
                    told.update(module.problems)
                    for kernel, whole in zip(outline.kernels, module.kernels, strict=False):
                        if kernel.address in only and kernel in kernels:
                            self._whole.setdefault(kernel, {})[platform] = whole

    def whole(self, kernel: GpuKernel) -> GpuKernel:
        """A kernel that was given in outline, as one for the first stream's GPU."""
        return next(iter(self._whole.get(kernel, {}).values()), kernel)

    def on(self, stream: int, kernel: GpuKernel) -> GpuKernel:
        """A kernel that was given in outline, as one for that stream's GPU."""
        return self._whole.get(kernel, {}).get(self._platforms[stream], kernel)

    def __iter__(self) -> Iterator[GpuKernel]:
        """Those that were read, as for the first stream's GPU."""
        return map(self.whole, self._whole)

    def _rows(self, *columns: str) -> Iterator[list[Any]]:
        """Digest, path, debug ELF and these columns of every module, as Arrow has them."""
        for table in self._capture.tables("kernel", ("digest", "path", "elf", *columns)):
            for index in range(len(table)):  # modules, of which there are few
                yield [table[name][index] for name in ("digest", "path", "elf", *columns)]

    def _tell(self, problems: Collection[str], path: Any) -> None:
        for problem in problems:
            self._problems.setdefault(problem, []).append(str(path.as_py()))


def _load(
    free: SimpleQueue[GpuModuleLoader], elf: bytes, platforms: list[IntEnum | None], only: set[int], texts: bool
) -> dict[IntEnum | None, GpuModule]:
    """Reads a module for each platform, by whichever reader has nothing to do."""
    reader = free.get()
    try:
        return {platform: reader.load(elf, platform, only, texts) for platform in platforms}
    finally:
        free.put(reader)


class KernelNames:
    """What kernels are called: where different ones have one name and file, a hash of the code tells them apart."""

    def __init__(self, kernels: SampledKernels) -> None:
        self._kernels = kernels
        codes: dict[tuple[str, str], set[str]] = {}
        for kernel in kernels:
            codes.setdefault((kernel.demangled, kernel.file), set()).add(kernel.fingerprint)
        self._digits = {key: _digits(prints) for key, prints in codes.items() if len(prints) > 1}

    def name(self, placement: Placement) -> str:
        """Of the kernel that lies there."""
        if placement.kernel is None:
            return placement.name or f"0x{placement.address:x}"
        kernel = self._kernels.whole(placement.kernel)
        digits = self._digits.get((kernel.demangled, kernel.file))
        if digits is not None:
            return f"{kernel.demangled} [code {kernel.fingerprint[:digits]}]"
        return kernel.demangled or f"0x{placement.address:x}"


def _digits(prints: set[str]) -> int:
    """How many of their first digits tell these hashes apart."""
    digits = _SHOWN_DIGITS
    while digits < 64 and len({each[:digits] for each in prints}) < len(prints):
        digits += 1
    return digits
