"""The rotation state: what the next output file needs of the one before, and no more."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from iaprof.formats.wire.launches import LAUNCH, LIST_EVENT, LaunchFlags, ListEvent, stack_dtype
from iaprof.formats.wire.sideband import SideBand, decode, mapping_record, running_record
from iaprof.record.capture import rotation_state
from iaprof.record.capture.rotation_state import LINGER_NS, RotationState
from iaprof.record.spool import FrameKind, Spool, SpoolReader, framed

DEPTH = 4
SECOND = 1_000_000_000


def launches(*rows: tuple[int, int, int, int]) -> bytes:
    """LAUNCH records of (time, pid, address, stack)."""
    records = np.zeros(len(rows), LAUNCH)
    for record, (time, pid, address, stack) in zip(records, rows, strict=True):
        record["time"], record["pid"], record["address"], record["stack"] = time, pid, address, stack
    return records.tobytes()


def stacks(*ids: int) -> bytes:
    records = np.zeros(len(ids), stack_dtype(DEPTH))
    records["id"], records["depth"] = ids, 2
    return records.tobytes()


def appended(*rows: tuple[int, int, int, int, int]) -> bytes:
    """LAUNCH records of (time, pid, address, stack, list)."""
    records = np.zeros(len(rows), LAUNCH)
    for record, row in zip(records, rows, strict=True):
        for name, value in zip(("time", "pid", "address", "stack", "list"), row, strict=True):
            record[name] = value
    return records.tobytes()


def events(*rows: tuple[int, int, ListEvent, int, tuple[int, ...]]) -> bytes:
    """LIST_EVENT records of (time, pid, event, stack, lists)."""
    records = np.zeros(len(rows), LIST_EVENT)
    for record, (time, pid, event, stack, lists) in zip(records, rows, strict=True):
        record["time"], record["pid"], record["event"], record["stack"] = time, pid, event, stack
        record["count"], record["lists"][: len(lists)] = len(lists), lists
    return records.tobytes()


def kept_launches(frames: list[tuple[FrameKind, bytes, int]]) -> set[tuple[int, int, int]]:
    """Launches in the rotation state, all marked: (time, address, list)."""
    found = [np.frombuffer(data, LAUNCH) for kind, data, _ in frames if kind is FrameKind.LAUNCHES]
    rows = np.concatenate([np.empty(0, LAUNCH), *found])
    assert (rows["flags"] == LaunchFlags.CARRIED).all()
    return {tuple(row) for row in rows[["time", "address", "list"]].tolist()}


def kept_events(frames: list[tuple[FrameKind, bytes, int]]) -> set[tuple[int, str, int]]:
    """Events in the rotation state, all marked, of one list each: (time, event, list)."""
    found = [np.frombuffer(data, LIST_EVENT) for kind, data, _ in frames if kind is FrameKind.LISTS]
    rows = np.concatenate([np.empty(0, LIST_EVENT), *found])
    assert (rows["flags"] == LaunchFlags.CARRIED).all()
    assert (rows["count"] == 1).all()
    return {(int(row["time"]), ListEvent(row["event"]).name, int(row["lists"][0])) for row in rows}


def kernel(pid: int, digest: str, content: bytes) -> tuple[bytes, bytes]:
    about = {"pid": pid, "path": "/x", "digest": digest, "size": 3, "content": bool(content)}
    return json.dumps(about).encode(), content


def ended(pid: int, time: int) -> bytes:
    body = struct.pack("<IIIIQ", pid, 1, pid, 1, time) + struct.pack("<IIQII", pid, pid, time, 0, 0)
    return struct.pack("<IHH", 4, 0, 8 + len(body)) + body


def state_frames(folder: Path) -> list[tuple[FrameKind, bytes, int]]:
    """The frames of the rotation state, from the spool in `folder`."""
    reader, state = SpoolReader(folder / "s"), RotationState()
    for frame in reader.frames():
        state.add(frame)
    fd = os.open(folder / "carry", os.O_RDWR | os.O_CREAT)
    with mock.patch.dict(framed.__kwdefaults__, {"mark": b"another!"}):  # in another process, as when recording
        state.write(reader, fd)
    other = Spool(folder / "t")
    other.take_over(fd)
    os.close(fd)
    assert other.size == (folder / "t").stat().st_size
    other.close()
    return [(frame.kind, frame.payload, frame.shape) for frame in SpoolReader(folder / "t").frames()]


def test_kernels_that_are_too_many_to_carry_are_a_counted_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("iaprof.record.capture.rotation_state.MAX_LAUNCHES", 3)
    launches = np.zeros(8, LAUNCH)
    launches["pid"], launches["time"] = 7, SECOND
    launches["address"] = np.arange(8) * 256
    spool = Spool(tmp_path / "s")
    spool.write(FrameKind.LAUNCHES, launches.tobytes(), time=SECOND)
    spool.close()
    frames = state_frames(tmp_path)
    (loss,) = [json.loads(payload) for kind, payload, _ in frames if kind is FrameKind.LOSS]
    assert (loss["source"], loss["what"], loss["count"]) == ("launches", "not carried", 5)
    (carried,) = [np.frombuffer(payload, LAUNCH) for kind, payload, _ in frames if kind is FrameKind.LAUNCHES]
    assert sorted(carried["address"].tolist()) == [5 * 256, 6 * 256, 7 * 256]


def test_each_kernel_s_last_launch_is_kept_with_stack_and_modules(tmp_path: Path) -> None:
    # given
    alive, gone, lingering = 10, 11, 12
    now = 100 * SECOND
    spool = Spool(tmp_path / "s")
    spool.write(FrameKind.STACKS, stacks(1, 2, 3, 4), shape=DEPTH, time=1)
    rows = [(1, alive, 0x100, 1), (2, alive, 0x200, 2), (3, gone, 0x100, 3), (4, alive, 0x100, 4), (5, lingering, 7, 1)]
    spool.write(FrameKind.LAUNCHES, launches(*rows[:2]), time=2)
    spool.write(FrameKind.LAUNCHES, launches(*rows[2:]), time=5)
    for number, (pid, digest, content) in enumerate(
        [(gone, "aa", b"one"), (alive, "aa", b""), (gone, "bb", b"two"), (alive, "cc", b"dri"), (alive, "cc", b"")]
    ):
        meta, elf = kernel(pid, digest, content)
        spool.write(FrameKind.KERNEL, meta, elf, shape=len(meta), time=number)
    ends = ended(gone, now - LINGER_NS - 1) + ended(lingering, now - LINGER_NS + SECOND)
    spool.write(FrameKind.SIDEBAND, ends, time=now)
    spool.close()
    # when
    frames = state_frames(tmp_path)
    # then
    found = np.concatenate([np.frombuffer(data, LAUNCH) for kind, data, _ in frames if kind is FrameKind.LAUNCHES])
    assert sorted(zip(found["time"], found["pid"], found["stack"], strict=True)) == [
        (2, alive, 2), (4, alive, 4), (5, lingering, 1),
    ]  # fmt: skip
    assert (found["flags"] == LaunchFlags.CARRIED).all()
    kept = np.concatenate(
        [np.frombuffer(data, stack_dtype(part)) for kind, data, part in frames if kind is FrameKind.STACKS]
    )
    assert sorted(kept["id"]) == [1, 2, 4]
    assert (kept["time"] == now).all()
    # and a running process keeps its content, whichever process had it first
    modules = [(json.loads(data[:part]), data[part:]) for kind, data, part in frames if kind is FrameKind.KERNEL]
    assert {about["digest"] for about, _ in modules} == {"aa", "cc"}
    assert {about["digest"]: elf for about, elf in modules if elf} == {"aa": b"one", "cc": b"dri"}


def test_mappings_of_ended_processes_and_their_parents_are_kept(tmp_path: Path) -> None:
    # given a process that ended just now, whose parent mapped what it runs, and an unrelated process
    now, parent, child, stranger = 100 * SECOND, 5, 12, 13
    spool = Spool(tmp_path / "s")
    spool.write(FrameKind.LAUNCHES, launches((5, child, 7, 1), (6, stranger, 7, 1)), time=6)
    mapped = [mapping_record(1, pid, 0x1000, 0x1000, 0, b"/x", b"id", (0, 0, 0)) for pid in (parent, child, stranger)]
    begun = running_record(1, parent, 1) + running_record(2, child, parent) + running_record(2, stranger, 1)
    spool.write(FrameKind.SIDEBAND, b"".join(mapped) + begun + ended(child, now - SECOND), time=now)
    spool.close()
    # when
    found = SideBand()
    for kind, payload, _ in state_frames(tmp_path):
        if kind is FrameKind.SIDEBAND:
            decode(payload, found)
    # then
    assert found.mappings.pid == [parent, child]
    assert list(zip(found.processes.pid, found.processes.ppid, strict=True)) == [(parent, 1), (child, parent)]


def test_a_spool_without_launches_leaves_no_rotation_state(tmp_path: Path) -> None:
    Spool(tmp_path / "s").close()
    assert state_frames(tmp_path) == []


A, B, C, D = 0xA0, 0xB0, 0xC0, 0xD0


@pytest.mark.parametrize("most", [1, 1 << 17])
def test_launches_in_lists_that_may_be_executed_later_are_kept(
    most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # given that launches in no list are dropped early, or never
    monkeypatch.setattr(rotation_state, "MOST_APPENDED", max(most, 4))
    pid = 10
    spool = Spool(tmp_path / "s")
    spool.write(FrameKind.STACKS, stacks(1, 2, 3, 4, 5), shape=DEPTH, time=1)
    # given a list that was executed, one that was filled twice, one that was destroyed, and one that is being filled
    rows = [(1, pid, 0x100, 1, A), (2, pid, 0x200, 2, A), (3, pid, 0x300, 3, B), (4, pid, 0x400, 3, C)]
    spool.write(FrameKind.LAUNCHES, appended(*rows), time=4)
    spool.write(FrameKind.LISTS, events((5, pid, ListEvent.CLOSE, 0, (A,)), (6, pid, ListEvent.CLOSE, 0, (B,))), time=6)
    for time in range(7, 40):
        spool.write(FrameKind.LISTS, events((time, pid, ListEvent.EXECUTE, 4, (A, B))), time=time)
    spool.write(
        FrameKind.LISTS, events((50, pid, ListEvent.RESET, 0, (B,)), (51, pid, ListEvent.DESTROY, 0, (C,))), time=51
    )
    spool.write(FrameKind.LAUNCHES, appended((52, pid, 0x500, 3, B), (53, pid, 0x600, 5, D)), time=53)
    spool.close()

    # when
    frames = state_frames(tmp_path)

    # then launches in a list keep it, and the last launches of other kernels have none
    assert kept_launches(frames) == {
        (1, 0x100, A),
        (2, 0x200, A),
        (52, 0x500, B),
        (53, 0x600, D),
        (3, 0x300, 0),
        (4, 0x400, 0),
    }
    assert kept_events(frames) == {
        (5, "CLOSE", A),
        (39, "EXECUTE", A),
        (6, "CLOSE", B),
        (39, "EXECUTE", B),
        (50, "RESET", B),
    }
    kept = [np.frombuffer(data, stack_dtype(DEPTH)) for kind, data, _ in frames if kind is FrameKind.STACKS]
    assert sorted(np.concatenate(kept)["id"].tolist()) == [1, 2, 3, 4, 5]


def test_lists_of_ended_processes_are_dropped(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "s")
    spool.write(FrameKind.LAUNCHES, appended((1, 10, 0x100, 1, A)), time=1)
    spool.write(FrameKind.LISTS, events((2, 10, ListEvent.EXECUTE, 1, (A,))), time=2)
    spool.write(FrameKind.SIDEBAND, ended(10, 3), time=3 + 2 * LINGER_NS)
    spool.close()
    frames = state_frames(tmp_path)
    assert (kept_launches(frames), kept_events(frames)) == (set(), set())


def test_what_has_no_room_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rotation_state, "MOST_APPENDED", 2)
    spool = Spool(tmp_path / "s")
    spool.write(FrameKind.LAUNCHES, appended(*((n, 10, n * 64, 1, A) for n in range(1, 6))), time=5)
    spool.write(FrameKind.LISTS, events((6, 10, ListEvent.CLOSE, 0, (A,))), time=6)
    spool.close()
    frames = state_frames(tmp_path)
    assert {row for row in kept_launches(frames) if row[2]} == {(4, 4 * 64, A), (5, 5 * 64, A)}
    losses = [json.loads(data) for kind, data, _ in frames if kind is FrameKind.LOSS]
    assert [(loss["source"], loss["what"], loss["count"]) for loss in losses] == [("launches", "not carried", 3)]
