"""Whole stacks of launches, for tests with LaunchProbes of their own: a learner finishes stacks and writes rules."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self

import numpy as np

from iaprof.bpf.probes.launches import LaunchProbes
from iaprof.formats.wire.launches import COPY, INTERPRETER, KEPT_SHIFT, PYTHON_STACK, stack_dtype
from iaprof.formats.wire.unwind_rules import Walked
from iaprof.record.unwinding.learner_process import DROPPED, LearnerProcess

LONGEST_S = 60


class Walking:
    """The learner of some probes; also a context manager."""

    def __init__(self, probes: LaunchProbes) -> None:
        """Starts the learner, and waits until it has finished what was copied before."""
        self._probes, self.learner = probes, LearnerProcess(LONGEST_S)
        self.learner.learn_from(probes)
        self._dtype = stack_dtype(probes.depth)
        self._stacks: dict[int, tuple[list[int], Walked]] = {}
        self.guessed: dict[int, list[bool]] = {}  # by stack id: whether each address was guessed
        self.finished = 0  # finished stacks
        self.kept: set[int] = set()  # ids of stacks whose copies were given back for the recording's end
        self._take(self.learner.wait())
        self.stacks()
        self._stacks.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.learner.close()

    def stacks(self) -> dict[int, tuple[list[int], Walked]]:
        """By id, of all stacks so far: addresses, and how the walk ended; stacks copied before are finished."""
        deadline = time.monotonic() + LONGEST_S
        while not self.learner.has_finished() and time.monotonic() < deadline:
            time.sleep(0.002)
            self._take(list(self.learner.read()))
        self._take(list(self.learner.read()))
        return self._stacks

    def _take(self, messages: list[bytes]) -> None:
        for record in self._probes.stacks.read():
            known = self._stacks.get(int(record["id"]))
            if known is None or known[1] is Walked.MISSED:
                self._add(record, [])
        for message in messages:
            if message.startswith(INTERPRETER) or len(message) in (PYTHON_STACK.itemsize, DROPPED.size):
                continue
            if len(message) == COPY.itemsize:
                self.kept.add(int(np.frombuffer(message, COPY)["id"][0]))
                continue
            (record,) = np.frombuffer(message, self._dtype)
            self.finished += 1
            before, _ = self._stacks.get(int(record["id"]), ([], None))
            self._add(record, before[: int(record["walked"]) >> KEPT_SHIFT])

    def _add(self, record: np.void, before: list[int]) -> None:
        number, depth = int(record["id"]), int(record["depth"])
        bits = np.unpackbits(record["guessed"].view(np.uint8), count=depth, bitorder="little")
        known = self.guessed.get(number, [])
        self.guessed[number] = known[: len(before)] + bits.astype(bool).tolist()
        if before and known[len(before)]:  # only BPF knows how it found this address
            self.guessed[number][len(before)] = True
        ips = before + record["ips"][:depth].tolist()
        self._stacks[number] = ips, Walked(int(record["walked"]) & (1 << KEPT_SHIFT) - 1)
