"""GPU modules of many captures: machines run the same programs, so each distinct module is read once by a worker.

One sandboxed child reads those of all captures of a task: docs/security.md says what that means.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Collection

from iaprof.gpu.instructions import InstructionSet
from iaprof.report.gpu.module import GpuModule, GpuModuleLoader

_MOST_BYTES = 64 << 20  # of the modules that are remembered; what is made of them takes about as much


class RememberedModules(GpuModuleLoader):
    """A loader that remembers what it has read."""

    def __init__(self) -> None:
        """Remembers nothing yet."""
        super().__init__()
        self._read: OrderedDict[tuple[object, ...], tuple[frozenset[int] | None, GpuModule, int]] = OrderedDict()
        self._bytes = 0

    def load(
        self,
        elf: bytes,
        instruction_set: InstructionSet | None,
        only: Collection[int] | None = None,
        texts: bool = True,
    ) -> GpuModule:
        """See GpuModuleLoader."""
        key = hashlib.sha256(elf).digest(), instruction_set, texts, only is not None and not only
        wanted = None if only is None else frozenset(only)
        if key in self._read:
            there, module, _ = self._read[key]
            if there is None or (wanted is not None and wanted <= there):
                self._read.move_to_end(key)
                return module
            wanted = None if wanted is None else wanted | there
            self._forget(key)
        module = super().load(elf, instruction_set, wanted, texts)
        if not module.problems:
            self._read[key] = wanted, module, len(elf)
            self._bytes += len(elf)
            while self._bytes > _MOST_BYTES:
                self._forget(next(iter(self._read)))
        return module

    def _forget(self, key: tuple[object, ...]) -> None:
        self._bytes -= self._read.pop(key)[2]
