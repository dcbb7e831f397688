"""Stacks finished when the recording ends: files that cannot be opened, and processes that break the child."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from iaprof.basics.errors import IaprofError
from iaprof.formats.wire.launches import COPY, stack_dtype
from iaprof.formats.wire.unwind_rules import Walked
from iaprof.record.unwinding import late as module
from iaprof.record.unwinding.late import LateFinishing
from iaprof.record.unwinding.unfinished import MOST_FAILURES
from iaprof.symbols.names.names import Module, ModuleKind
from iaprof.symbols.unwind.cfi import CallFrames
from iaprof.symbols.unwind.finishing import PAGE, Finished, HowFound

DEPTH, BREAKS = 8, 666  # a process id
CODE = 0x10000  # where the program's entry point is mapped
PROGRAM = Module(ModuleKind.FILE, sys.executable)


class Spaces:
    """Address spaces without mappings, which note the processes asked for."""

    asked: list[int]

    def __init__(self) -> None:
        self.asked = []

    def mapped(self, pid: int, time_ns: int) -> list[Any]:
        self.asked.append(pid)
        return []


@pytest.fixture
def spaces(monkeypatch: pytest.MonkeyPatch) -> Spaces:
    spaces = Spaces()

    class Finishing:
        """A child that one process's stacks break."""

        def __init__(self, open_image: object, patience_s: float) -> None: ...

        def __enter__(self) -> Finishing:
            return self

        def __exit__(self, *_: object) -> None: ...

        def finish(self, *_: object) -> Finished:
            if spaces.asked[-1] == BREAKS:
                raise IaprofError("the child died")
            one = np.ones(1, np.uint64)
            return Finished(one, one * HowFound.INTERRUPTED, one, Walked.WHOLE)

    monkeypatch.setattr(module, "Finishing", Finishing)
    return spaces


def copies(*pids: int) -> Iterator[np.ndarray[Any, Any]]:
    """COPY[1] for each of these processes; the ids count from 1."""
    for number, pid in enumerate(pids, 1):
        records = np.zeros(1, COPY)
        records["id"], records["pid"], records["depth"], records["address"] = number, pid, 1, 4096
        yield records


class AtEntry:
    """Address spaces in which this program's entry point, which has no caller, is at CODE."""

    def mapped(self, pid: int, time_ns: int) -> list[tuple[int, int, int, Module]]:
        with open(sys.executable, "rb") as file:
            image = CallFrames(file.read())
        segment = next(each for each in image.loads if 0 <= image.header.entry - each.address < each.size)
        return [(CODE, CODE + PAGE, segment.offset + image.header.entry - segment.address, PROGRAM)]


class Symbolizer:
    """Opens the program, but not the first so many times."""

    def __init__(self, failures: int) -> None:
        self.failures = failures

    def open(self, module: Module) -> int | None:
        assert module == PROGRAM
        self.failures -= 1
        return None if self.failures >= 0 else os.open(module.path, os.O_RDONLY)


def ended(failures: int) -> list[Walked]:
    """How two stacks end whose program cannot be opened the first so many times."""
    records = np.zeros(2, COPY)
    records["id"], records["pid"], records["depth"], records["address"] = [1, 2], 7, 1, PAGE
    records["start"]["ip"], records["start"]["sp"] = CODE, PAGE
    late = LateFinishing(Symbolizer(failures), AtEntry(), DEPTH)  # type: ignore[arg-type]
    found = [np.frombuffer(message, stack_dtype(DEPTH))[0] for message in late.finish([records])]
    assert [record["ips"][: int(record["depth"])].tolist() for record in found] == [[CODE], [CODE]]
    return [Walked(int(record["walked"])) for record in found]


def test_a_file_that_is_not_opened_in_time_is_opened_again() -> None:
    assert ended(failures=1) == [Walked.WHOLE, Walked.WHOLE]


def test_code_in_a_file_that_cannot_be_opened_is_not_said_to_have_no_call_frame_information() -> None:
    assert ended(failures=1 << 10) == [Walked.MISSED, Walked.MISSED]


@pytest.mark.parametrize(("failures", "ending"), [(0, Walked.WHOLE), (1 << 10, Walked.MISSED)])
def test_a_stack_is_not_whole_if_the_way_leads_through_a_file_that_cannot_be_opened(
    monkeypatch: pytest.MonkeyPatch, failures: int, ending: Walked
) -> None:
    class Finishing:
        """A child that guesses the caller of code at CODE."""

        def __init__(self, open_image: Callable[[int], int | None], patience_s: float) -> None:
            self._open = open_image

        def __enter__(self) -> Finishing:
            return self

        def __exit__(self, *_: object) -> None: ...

        def finish(self, *_: object) -> Finished:
            if (file := self._open(0)) is not None:
                os.close(file)
            ips, how = np.array([CODE, 1], np.uint64), np.array([HowFound.INTERRUPTED, HowFound.BY_GUESS], np.uint64)
            return Finished(ips, how, np.zeros(2, np.uint64), Walked.WHOLE)

    monkeypatch.setattr(module, "Finishing", Finishing)
    late = LateFinishing(Symbolizer(failures), AtEntry(), DEPTH)  # type: ignore[arg-type]
    (message,) = late.finish(copies(7))
    assert Walked(int(np.frombuffer(message, stack_dtype(DEPTH))[0]["walked"])) is ending


def test_a_process_whose_stacks_break_the_child_does_not_stop_others(spaces: Spaces) -> None:
    late = LateFinishing(None, spaces, DEPTH)  # type: ignore[arg-type]
    messages = late.finish(copies(*[BREAKS] * (MOST_FAILURES + 3), 7, BREAKS, 8))
    # then the process's other stacks are not tried, and those of other processes are finished
    found = [np.frombuffer(message, stack_dtype(DEPTH))[0] for message in messages]
    assert [(int(record["id"]), int(record["pid"])) for record in found] == [
        (MOST_FAILURES + 4, 7),
        (MOST_FAILURES + 6, 8),
    ]
    assert spaces.asked == [BREAKS] * MOST_FAILURES + [7, 8]
