"""What the next output file gets of records that were read when the previous one ended."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import numpy as np

from iaprof.formats.header.waits import WAIT
from iaprof.formats.wire.launches import CODE, LAUNCH, MESSAGE, PATH, PYTHON_STACK, stack_dtype
from iaprof.record.sources.launches import Launches
from iaprof.record.sources.source import Sampler
from iaprof.record.spool import FrameKind

DEPTH = 16


class Ring:
    """A ring buffer with some records, which can be read once."""

    def __init__(self, dtype: Any = np.uint8, count: int = 0) -> None:
        self._records = np.zeros(count, dtype)

    def read(self) -> Any:
        read, self._records = self._records, self._records[:0]
        return read


class Code:
    """A source of GPU code without any."""

    def keep_chunks(self, pieces: Any, now: int) -> None:
        assert not len(pieces)


def test_stacks_of_the_first_launches_come_with_their_python() -> None:
    # given stacks of the new epoch, sent before the last launches of the old epoch were read
    rings = {name: Ring() for name in ("list_events", "samples", "compiled", "chunks", "modules")}
    rings |= {"stacks": Ring(stack_dtype(DEPTH), 2), "python_stacks": Ring(PYTHON_STACK, 2), "codes": Ring(CODE, 3)}
    rings |= {
        "launches": Ring(LAUNCH),
        "messages": Ring(MESSAGE),
        "pieces": Ring(MESSAGE),
        "paths": Ring(PATH),
        "waits": Ring(WAIT),
    }
    short = np.zeros(0, WAIT)
    probes = SimpleNamespace(**rings, depth=DEPTH, new_epoch=lambda: None, take_short_waits=lambda: short)
    launches = Launches(
        cast(Any, None), cast(Any, probes), cast(Any, Code()), cast(Any, None), Mock(), Mock(), Sampler()
    )
    written: list[tuple[FrameKind, int, int]] = []
    launches._journal = cast(
        Any, SimpleNamespace(write=lambda kind, data, time, shape=0: written.append((kind, len(data), shape)))
    )
    sent = [
        (FrameKind.STACKS, 2 * stack_dtype(DEPTH).itemsize, DEPTH),
        (FrameKind.PYTHON, 2 * PYTHON_STACK.itemsize, 0),
        (FrameKind.CODES, 3 * CODE.itemsize, 0),
    ]
    # when
    launches.end_part(5)
    assert written == sent
    launches.begin_part(6)
    # then both files have all stacks and frames of Python
    assert written == sent * 2
