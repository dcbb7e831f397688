"""Finishes stacks when the recording ends: of processes that ended or executed a program before the learner read them.

The side-band has what these had mapped. The symbolizer opens their files.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from iaprof.basics.errors import IaprofError
from iaprof.formats.wire.unwind_rules import Walked
from iaprof.record.symbolize.symbolizer import RecordingSymbolizer
from iaprof.record.unwinding.unfinished import MOST_FAILURES, UnfinishedStack, copied_runs, finished_records
from iaprof.sandbox.deadline import patient_clock
from iaprof.symbols.names.address_space import AddressSpaces
from iaprof.symbols.names.names import Module, ModuleKind
from iaprof.symbols.unwind.finishing import Finishing, Mapping

MOST_SECONDS = 10.0
_LATEST = 5  # times as long, if it has to wait for a CPU
_PATIENCE_S = 10.0  # for one answer; longer than while recording, when launches wait for it
_TRIES = 3  # to open a file, whose process may end meanwhile


class LateFinishing:
    """Finishes stacks of one recording."""

    def __init__(self, symbolizer: RecordingSymbolizer, spaces: AddressSpaces, depth: int) -> None:
        """Args: opens files; knows what was mapped where; the most addresses of a stack."""
        self._symbolizer, self._spaces, self._depth = symbolizer, spaces, depth
        self._modules: list[Module] = []
        self._numbers: dict[Module, int] = {}
        self._space_numbers: dict[tuple[Mapping, ...], int] = {}
        self._unopened: set[int] = set()  # numbers of files that could not be had
        self._until: dict[Module, float] = {}  # when a file is not tried any more, patient_clock()

    def finish(self, copies: Iterable[NDArray[np.void]]) -> Iterator[bytes]:
        """Yields records of stack_dtype(depth), and of PYTHON_STACK for stacks with Python frames.

        Args:
            copies: arrays COPY[n], grouped by stack.
        """
        end, latest = patient_clock() + MOST_SECONDS, time.monotonic() + _LATEST * MOST_SECONDS
        runs = (run for array in copies for run in copied_runs(array))
        failures = Counter[int]()  # by process
        with Finishing(self._open, patience_s=_PATIENCE_S) as finishing:
            for _, of_stack in groupby(runs, key=lambda run: run.head.id):
                stack = None
                for run in of_stack:
                    stack = stack or UnfinishedStack(run.head)
                    stack.add(run)
                if stack is None or patient_clock() > end or time.monotonic() > latest:
                    return
                if failures[stack.pid] == MOST_FAILURES:
                    continue
                try:
                    yield from self._finish(finishing, stack)
                except IaprofError:  # the stack stays unfinished
                    failures[stack.pid] += 1

    def _open(self, number: int) -> int | None:
        """Opens the file of a module's number; None if it cannot be had."""
        module = self._modules[number]
        until = self._until.setdefault(module, patient_clock() + _PATIENCE_S)
        self._unopened.discard(number)
        for _ in range(_TRIES):
            file = self._symbolizer.open(module)
            if file is not None:
                return file
            if patient_clock() > until:
                break
        self._unopened.add(number)
        return None

    def _finish(self, finishing: Finishing, stack: UnfinishedStack) -> list[bytes]:
        mapped = self._spaces.mapped(stack.pid, stack.head.time)
        mappings = tuple(
            Mapping(start, end, 0 if module.kind is ModuleKind.VDSO else offset, self._number(module))
            for start, end, offset, module in mapped
        )
        space = self._space_numbers.setdefault(mappings, len(self._space_numbers))
        finished = finishing.finish(space, mappings, stack.copy(), stack.limit(self._depth))
        if self._unopened and any(self._is_unopened(mappings, address) for address in finished.ips.tolist()):
            # Nobody knows whether that code has call frame information, so a walk through it proves nothing.
            finished = replace(finished, ending=Walked.MISSED)
        return finished_records([(stack, finished)], self._depth)

    def _is_unopened(self, mappings: tuple[Mapping, ...], address: int) -> bool:
        """Whether an address is in a file that could not be had."""
        return any(each.start <= address < each.end and each.image in self._unopened for each in mappings)

    def _number(self, module: Module) -> int:
        """Returns the number of a file; -1 for memory of no file."""
        if module.kind not in (ModuleKind.FILE, ModuleKind.VDSO):
            return -1
        if module not in self._numbers:
            self._numbers[module] = len(self._modules)
            self._modules.append(module)
        return self._numbers[module]
