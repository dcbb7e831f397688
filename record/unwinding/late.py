"""Finishes stacks when a recording ends: of processes that were gone, or another program, before the learner looked.

What they had mapped is told by the side-band, and their files are opened as those are that name functions.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from iaprof.basics.errors import IaprofError
from iaprof.record.symbolize.symbolizer import RecordingSymbolizer
from iaprof.record.unwinding.misses import MOST_FAILURES, Miss
from iaprof.symbols.names.address_space import AddressSpaces
from iaprof.symbols.names.modules import Module, ModuleKind
from iaprof.symbols.unwind.code import Mapping
from iaprof.symbols.unwind.finishing import Finishing

MOST_SECONDS = 60.0


class LateFinishing:
    """Finishes the stacks of one recording."""

    def __init__(self, naming: RecordingSymbolizer, spaces: AddressSpaces, depth: int) -> None:
        """Args: opens files; what was mapped where; addresses that a stack can have at most."""
        self._naming, self._spaces, self._depth = naming, spaces, depth
        self._modules: list[Module] = []
        self._numbers: dict[Module, int] = {}
        self._of_mappings: dict[tuple[Mapping, ...], int] = {}

    def finish(self, copies: Iterable[NDArray[np.void]]) -> Iterator[bytes]:
        """Records of stack_dtype(depth), and PYTHON_STACK for those with such frames.

        Args:
            copies: COPY[n], those of one stack behind one another.
        """
        end = time.monotonic() + MOST_SECONDS
        records = (record for some in copies for record in some)
        failures = Counter[int]()  # by process
        with Finishing(lambda number: self._naming.open(self._modules[number])) as finishing:
            for _, of_one in groupby(records, key=lambda record: int(record["id"])):
                miss = None
                for record in of_one:
                    miss = miss or Miss(record.copy())
                    miss.add(record)
                if miss is None or time.monotonic() > end:
                    return
                if failures[miss.pid] == MOST_FAILURES:
                    continue
                try:
                    yield from self._finish(finishing, miss)
                except IaprofError:  # it stays as it is
                    failures[miss.pid] += 1

    def _finish(self, finishing: Finishing, miss: Miss) -> list[bytes]:
        told = self._spaces.mapped(int(miss.record["pid"]), int(miss.record["time"]))
        mappings = tuple(
            Mapping(start, end, 0 if module.kind is ModuleKind.VDSO else offset, self._number(module))
            for start, end, offset, module in told
        )
        space = self._of_mappings.setdefault(mappings, len(self._of_mappings))
        finished = finishing.finish(space, mappings, miss.copy(), miss.limit(self._depth))
        return miss.finished(finished, self._depth)

    def _number(self, module: Module) -> int:
        """Of a file; -1 of memory of no file."""
        if module.kind not in (ModuleKind.FILE, ModuleKind.VDSO):
            return -1
        if module not in self._numbers:
            self._numbers[module] = len(self._modules)
            self._modules.append(module)
        return self._numbers[module]
