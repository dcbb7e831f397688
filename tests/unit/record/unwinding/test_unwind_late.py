"""Stacks finished when the recording ends: processes that break the child leave time for others."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from iaprof.basics.errors import IaprofError
from iaprof.formats.wire.launches import COPY, stack_dtype
from iaprof.formats.wire.unwind_rules import Walked
from iaprof.record.unwinding import late as module
from iaprof.record.unwinding.late import LateFinishing
from iaprof.record.unwinding.unfinished import MOST_FAILURES
from iaprof.symbols.unwind.finishing import Finished
from iaprof.symbols.unwind.walk import HowFound

DEPTH, BREAKS = 8, 666  # a process id


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
            return Finished([1], [HowFound.INTERRUPTED], Walked.WHOLE)

    monkeypatch.setattr(module, "Finishing", Finishing)
    return spaces


def copies(*pids: int) -> Iterator[np.ndarray[Any, Any]]:
    """COPY[1] for each of these processes; the ids count from 1."""
    for number, pid in enumerate(pids, 1):
        records = np.zeros(1, COPY)
        records["id"], records["pid"], records["depth"], records["address"] = number, pid, 1, 4096
        yield records


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
