"""Reads the kernels of a capture's GPU modules, names them, and finds where instructions start in some.

Placements need only names, addresses and sizes, so all kernels are first read in outline. Instructions and source
frames, which take most of the time, are only read for kernels with stalls. Where instructions start is needed for
kernels that overlap kernels of other processes, to tell the processes apart.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any

import numpy as np
from numpy.typing import NDArray

from iaprof.formats.capture.limits import COMPILED, GPU_MODULES
from iaprof.formats.capture.reader import CaptureReader
from iaprof.gpu import vendors
from iaprof.gpu.instructions import InstructionSet
from iaprof.report.gpu.module import GpuKernel, GpuModule, GpuModuleLoader
from iaprof.report.join.lifetimes import overlaps
from iaprof.report.join.placements import Compilation, Placed, Placement

_MIN_CODES_FOR_TWO = 200  # different ones: starting a second process that reads kernels pays off
_MIN_DIGITS = 6  # of a fingerprint in a kernel's name; more if these are not unique


class SampledKernels:
    """The kernels of a capture, each distinct module read once. Call `compilations` first, then `read`."""

    def __init__(
        self,
        capture: CaptureReader,
        loader: GpuModuleLoader,
        instruction_sets: list[InstructionSet | None],
        problems: dict[str, list[str]],
        texts: bool = False,
    ) -> None:
        """Prepares reading.

        Args:
            capture: an open capture, or a part of a merged one.
            loader: reads the modules.
            instruction_sets: that of each stream's GPU; None: unknown.
            problems: gets sentences about what could not be read, each with the paths of the modules concerned.
            texts: also read the text of instructions.
        """
        self._capture = capture
        self._loader = loader
        self._instruction_sets = instruction_sets
        self._problems = problems
        self._texts = texts
        self._outlines: dict[bytes, GpuModule] = {}  # by digest
        self._loaded: dict[GpuKernel, dict[InstructionSet | None, GpuKernel]] = {}  # by the kernel in outline
        self._with_texts: set[GpuKernel] = set()  # those of these, in outline, that were read with texts

    def compilations(self) -> list[Compilation]:
        """Returns every module of the capture, with kernels in outline.

        Raises:
            CaptureError: these are absurdly many for the capture's size, or their kernels are.
        """
        digests: set[bytes] = set()
        for table in self._capture.tables("kernel", ("digest",)):
            digests.update(table["digest"].unique().to_pylist())
        self._capture.check_parts(len(digests), GPU_MODULES)
        found = []
        compiled = 0
        for digest, path, elf, time_ns, pid, base in self._rows("time_ns", "pid", "base"):
            key = digest.as_py()
            if key not in self._outlines and elf.is_valid:
                self._outlines[key] = self._loader.load(elf.as_py(), None, only=())
                self._add_problems(self._outlines[key].problems, path)
            if key in self._outlines:
                compiled += len(self._outlines[key].kernels) + 1
                self._capture.check_parts(compiled, COMPILED)
                found.append(Compilation(time_ns.as_py(), pid.as_py(), self._outlines[key], base.as_py() or 0))
        return found

    def read(self, kernels: Collection[GpuKernel], texts: bool = False) -> None:
        """Reads instructions and frames of these kernels, given in outline, unless already read.

        If the streams' GPUs have several instruction sets, each kernel is read once for each of them.

        Args:
            kernels: which to read.
            texts: also read the text of their instructions, if that is not read of all kernels.
        """
        texts |= self._texts
        addresses_of: dict[bytes, set[int]] = {}
        codes: set[str] = set()  # each is decoded once
        for key, module in self._outlines.items():
            if unread := [each for each in module.kernels if each in kernels and not self._is_read(each, texts)]:
                addresses_of[key] = {each.address for each in unread}
                codes.update(each.fingerprint for each in unread)
        with contextlib.ExitStack() as stack:
            loaders = [self._loader]
            together = any(vendors.by_name(each.vendor).decodes_together for each in kernels)
            if len(codes) >= _MIN_CODES_FOR_TWO and not together:
                loaders.append(stack.enter_context(type(self._loader)()))
            workers = stack.enter_context(ThreadPoolExecutor(len(loaders)))
            free = SimpleQueue[GpuModuleLoader]()
            for loader in loaders:
                free.put(loader)
            wanted = []
            for digest, path, elf in self._rows():
                if digest.as_py() in addresses_of and elf.is_valid:
                    only = addresses_of.pop(digest.as_py())
                    outline = self._outlines[digest.as_py()]
                    wanted.append((outline, path, only, elf.as_py(), self._sets_of(outline.kernels[0].vendor)))
            for outline, _, only, elf, own in wanted:
                if len(wanted) > 1 and vendors.by_name(outline.kernels[0].vendor).decodes_together:
                    for each in filter(None, own):
                        self._loader.expect(elf, each, only)
            pending = [
                (outline, path, only, workers.submit(_load, free, elf, own, only, texts))
                for outline, path, only, elf, own in wanted
            ]
            for outline, path, only, loading in pending:
                reported = set(outline.problems)
                again = any(kernel in self._loaded for kernel in outline.kernels if kernel.address in only)
                for instruction_set, module in loading.result().items():
                    self._add_problems([each for each in module.problems if each not in reported], path, again)
                    reported.update(module.problems)
                    for kernel, loaded in zip(outline.kernels, module.kernels, strict=False):
                        if kernel.address in only and kernel in kernels:
                            self._loaded.setdefault(kernel, {})[instruction_set] = loaded
                            if texts:
                                self._with_texts.add(kernel)

    def _is_read(self, kernel: GpuKernel, texts: bool) -> bool:
        return kernel in (self._with_texts if texts else self._loaded)

    def loaded(self, kernel: GpuKernel) -> GpuKernel:
        """Returns a kernel, given in outline, as read for the first stream's GPU; as is if not read."""
        return next(iter(self._loaded.get(kernel, {}).values()), kernel)

    def loaded_for(self, stream: int, kernel: GpuKernel) -> GpuKernel:
        """Returns a kernel, given in outline, as read for that stream's GPU; as is if not read."""
        return self._loaded.get(kernel, {}).get(self._instruction_sets[stream], kernel)

    def __iter__(self) -> Iterator[GpuKernel]:
        """Yields the kernels that were read, with their instructions for the first stream's GPU."""
        return map(self.loaded, self._loaded)

    def _sets_of(self, vendor: str) -> list[InstructionSet | None]:
        """Returns the instruction sets that code of a vendor can be of; [None] if that is unknown."""
        every = dict.fromkeys(self._instruction_sets)
        return [each for each in every if each is None or each.vendor == vendor] or [None]

    def _rows(self, *columns: str) -> Iterator[list[Any]]:
        """Yields digest, path, debug ELF and the given columns of every module, as Arrow scalars."""
        for table in self._capture.tables("kernel", ("digest", "path", "elf", *columns)):
            for index in range(len(table)):  # there are few modules
                yield [table[name][index] for name in ("digest", "path", "elf", *columns)]

    def _add_problems(self, problems: Collection[str], path: Any, again: bool = False) -> None:
        for problem in problems:
            paths = self._problems.setdefault(problem, [])
            if not again or str(path.as_py()) not in paths:
                paths.append(str(path.as_py()))


def _load(
    free: SimpleQueue[GpuModuleLoader],
    elf: bytes,
    instruction_sets: list[InstructionSet | None],
    only: set[int],
    texts: bool,
) -> dict[InstructionSet | None, GpuModule]:
    """Reads a module for each instruction set, with a loader that is free."""
    loader = free.get()
    try:
        return {each: loader.load(elf, each, only, texts) for each in instruction_sets}
    finally:
        free.put(loader)


class KernelNames:
    """Names of kernels. If different kernels share a name and a file, the names have a hash of the code, too."""

    def __init__(self, kernels: SampledKernels) -> None:
        self._kernels = kernels
        codes: dict[tuple[str, str], set[str]] = {}
        for kernel in kernels:
            codes.setdefault((kernel.demangled, kernel.file), set()).add(kernel.fingerprint)
        self._digits = {key: _digits(fingerprints) for key, fingerprints in codes.items() if len(fingerprints) > 1}

    def name(self, placement: Placement) -> str:
        """Returns the name of a placement's kernel; its address in hexadecimal if it has no name."""
        if placement.kernel is None:
            return placement.name or f"0x{placement.address:x}"
        kernel = self._kernels.loaded(placement.kernel)
        digits = self._digits.get((kernel.demangled, kernel.file))
        if digits is not None:
            return f"{kernel.demangled} [code {kernel.fingerprint[:digits]}]"
        return kernel.demangled or f"0x{placement.address:x}"


def _digits(fingerprints: set[str]) -> int:
    """Returns how many leading digits make these hashes unique, at least _MIN_DIGITS."""
    digits = _MIN_DIGITS
    while digits < 64 and len({each[:digits] for each in fingerprints}) < len(fingerprints):
        digits += 1
    return digits


def instruction_starts(placed: Placed, kernels: SampledKernels, mask: int) -> dict[int, NDArray[np.uint64]]:
    """Decodes kernels that overlap different code of another process.

    Args:
        placed: the placements.
        kernels: reads their code.
        mask: the address bits that all records hold.

    Returns:
        By placement: the offsets at which its instructions start, uint64[n], bytes, ascending. Kernels that cannot be
        decoded are missing.
    """
    placements = placed.placements
    pids = np.array([placement.pid for placement in placements], np.int64)
    first = np.array([placement.address & mask for placement in placements], np.uint64)
    behind = first + np.array([max(placement.size, 1) for placement in placements], np.uint64)
    pairs = overlaps(np.zeros(len(pids), np.uint64), first, behind)
    if pairs is None:
        overlapping = list(range(len(placements)))
    else:
        _, code = np.unique(np.array([placement.fingerprint for placement in placements]), return_inverse=True)
        differ = (pids[pairs[0]] != pids[pairs[1]]) & (code[pairs[0]] != code[pairs[1]])
        overlapping = np.unique(np.concatenate([each[differ] for each in pairs])).tolist()
    known = {index: placements[index].kernel for index in overlapping}
    kernels.read({kernel for kernel in known.values() if kernel is not None})
    offsets: dict[GpuKernel, NDArray[np.uint64]] = {}  # a thousand processes may have one kernel
    for kernel in known.values():
        decoded = kernels.loaded(kernel).decoded if kernel is not None and kernel not in offsets else None
        if kernel is not None and decoded is not None and len(decoded):
            offsets[kernel] = decoded.offset.astype(np.uint64)
    return {index: offsets[kernel] for index, kernel in known.items() if kernel in offsets}
