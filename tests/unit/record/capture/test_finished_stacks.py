"""Into which spool the recorder writes finished stacks, and how many copies of unfinished ones it keeps."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from iaprof.formats.wire.launches import COPY, stack_dtype
from iaprof.record.journal import OVERLAP_NS, Journal
from iaprof.record.sources import finished_stacks as module
from iaprof.record.sources.finished_stacks import FinishedStacks
from iaprof.record.spool import FrameKind, Spool, SpoolReader
from iaprof.record.unwinding.learner_process import DROPPED, DROPPED_MARK

DEPTH = 4


def copy(number: int) -> bytes:
    record = np.zeros(1, COPY)
    record["id"] = number
    return record.tobytes()


def stack(number: int, time_ns: int) -> bytes:
    record = np.zeros(1, stack_dtype(DEPTH))
    record["id"], record["time"] = number, time_ns
    return record.tobytes()


def journal(spool: Spool) -> Journal:
    return Journal(spool, warn=lambda _: None, inform=lambda _: None)


def ids(spool: Spool, *kinds: FrameKind) -> Iterator[int]:
    """The ids of stacks and copies in a spool."""
    reader = SpoolReader(spool.path)
    for frame in reader.frames(set(kinds)):
        yield int(np.frombuffer(frame.payload[:8], np.uint64)[0])
    reader.close()


@pytest.fixture
def spool(tmp_path: Path) -> Spool:
    """The first spool of a recording."""
    return Spool(tmp_path / "1.spool")


def test_a_stack_goes_where_its_launches_are(tmp_path: Path, spool: Spool) -> None:
    # given a second spool
    stacks, written = FinishedStacks(DEPTH, None), journal(spool)  # type: ignore[arg-type]
    stacks._journal = written
    other = Spool(tmp_path / "2.spool")
    written.switch_to(other)
    began = written._began_ns
    # when
    stacks._keep_finished([stack(1, began - 2 * OVERLAP_NS), stack(2, began - 1), stack(3, began + 1)])
    written.end_previous()
    stacks._keep_finished([stack(4, began - 2 * OVERLAP_NS), stack(5, began - 1)])
    # then
    assert list(ids(spool, FrameKind.STACKS)) == [1, 2]
    assert list(ids(other, FrameKind.STACKS)) == [2, 3, 5]


def test_so_many_copies_are_kept_and_the_others_are_counted(spool: Spool, monkeypatch: pytest.MonkeyPatch) -> None:
    # given
    monkeypatch.setattr(module, "MAX_COPIED_BYTES", 3 * COPY.itemsize)
    stacks = FinishedStacks(DEPTH, None)  # type: ignore[arg-type]
    stacks._journal = journal(spool)
    # when
    stacks._keep_finished([*map(copy, range(1, 6)), stack(9, 0), DROPPED.pack(DROPPED_MARK, 7)])
    stacks.losses()
    stacks.losses()
    # then
    assert list(ids(spool, FrameKind.COPY, FrameKind.STACKS)) == [1, 2, 3, 9]
    reader = SpoolReader(spool.path)
    losses = [json.loads(frame.payload) for frame in reader.frames({FrameKind.LOSS})]
    reader.close()
    told = [("stacks", "pages not copied", 2), ("stacks", "not finished", 7)]
    assert [(loss["source"], loss["what"], loss["count"]) for loss in losses] == told


def test_copies_of_cpu_samples_leave_room_for_those_of_launches(spool: Spool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_SAMPLES_BYTES", COPY.itemsize)
    stacks = FinishedStacks(DEPTH, None)  # type: ignore[arg-type]
    stacks._journal = journal(spool)
    of_samples = [np.frombuffer(copy(number), COPY).copy() for number in (1, 2, 3)]
    for each in of_samples:
        each["is_sample"] = 1
    stacks._keep_finished([*(each.tobytes() for each in of_samples), copy(4)])
    assert list(ids(spool, FrameKind.COPY)) == [1, 4]
    # and in the next file there is room again
    stacks.begin_part(0)
    stacks._keep_finished([of_samples[1].tobytes()])
    assert list(ids(spool, FrameKind.COPY)) == [1, 4, 2]


def test_what_has_another_length_is_a_loss_and_not_kept(spool: Spool) -> None:
    stacks = FinishedStacks(DEPTH, None)  # type: ignore[arg-type]
    stacks._journal = journal(spool)
    # when
    stacks._keep_finished([stack(1, 5), stack(2, 5)[:-8], stack(3, 5) + bytes(8), copy(4) + copy(5), b"m", copy(6)])
    # then
    assert list(ids(spool, FrameKind.STACKS, FrameKind.COPY)) == [1, 6]
    losses = [json.loads(frame.payload) for frame in SpoolReader(spool.path).frames({FrameKind.LOSS})]
    assert [(loss["source"], loss["what"], loss["count"]) for loss in losses] == [("stacks", "wrong length", 1)] * 4
