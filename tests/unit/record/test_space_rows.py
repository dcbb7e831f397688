"""What finishing a capture keeps of days of mappings and processes: what its stacks need, and no more than it may."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from iaprof.formats.capture.reader import CaptureReader
from iaprof.formats.header.waits import WAIT, WaitFlags
from iaprof.formats.wire import sideband
from iaprof.formats.wire.launches import stack_dtype
from iaprof.formats.wire.sideband import mapping_record
from iaprof.record.capture.finish import finish
from iaprof.record.spool import FrameKind, Spool, SpoolReader
from iaprof.record.symbolize import needed
from iaprof.record.symbolize.needed import SymbolInputs

DEPTH = 2


def task(time: int, pid: int, parent: int, begins: bool = True, tid: int = 0) -> bytes:
    """A record of a fork or an exit, of a thread if `tid` is given."""
    body = struct.pack("<IIIIQ", pid, parent, tid or pid, parent, time)
    return sideband._record(sideband.FORK if begins else sideband.EXIT, 0, body, pid, time)


def mapped(time: int, pid: int, number: int = 0, path: bytes = b"/lib/x.so") -> bytes:
    return mapping_record(time, pid, 0x1000 * (number + 1), 0x1000, 0, path, b"", (1, 2, 3 + number))


def stack(pid: int, time: int, address: int = 0x1800) -> bytes:
    record = np.zeros(1, stack_dtype(DEPTH))
    record["id"], record["pid"], record["time"], record["depth"], record["ips"][0, 0] = pid, pid, time, 1, address
    return record.tobytes()


def finished(folder: Path, *frames: tuple[FrameKind, bytes]) -> tuple[CaptureReader, SymbolInputs]:
    """The capture of a spool with these frames, and what naming its stacks was given."""
    spool = Spool(folder / "s")
    for kind, payload in frames:
        spool.write(kind, payload, shape=DEPTH if kind is FrameKind.STACKS else 0, time=5)
    spool.close()
    given: list[SymbolInputs] = []

    def write_symbols(inputs: SymbolInputs, _: object) -> dict[str, Any]:
        given.append(inputs)
        return {}

    finish(SpoolReader(folder / "s"), folder / "c", write_symbols=write_symbols)
    return CaptureReader(folder / "c"), given[0]


def test_processes_without_stacks_take_no_memory(tmp_path: Path) -> None:
    # given 20,000 processes, each with a parent of its own, mappings and threads, one of which has a stack
    records = b"".join(
        task(pid, pid, 1 if pid % 2 else pid - 1)
        + mapped(pid, pid)
        + task(pid, pid, pid, tid=pid + 50_000)
        + task(pid, pid, pid, begins=False, tid=pid + 50_000)
        + task(pid, pid, 1, begins=False)
        for pid in range(10_001, 30_001)
    )
    # when
    reader, inputs = finished(tmp_path, (FrameKind.SIDEBAND, records), (FrameKind.STACKS, stack(20_002, 20_002)))
    # then the capture has all rows, and what was kept is that process's and its parent's
    assert (len(reader.table("mapping")), len(reader.table("process"))) == (20_000, 80_000)
    assert sorted(inputs.rows.table("mapping")["pid"].to_pylist()) == [20_001, 20_002]
    assert sorted(inputs.rows.table("process")["pid"].to_pylist()) == [20_001, 20_002]
    assert len(inputs.files._files) == 1
    assert [module.path for module in inputs.spaces.modules] == ["/lib/x.so"]


def test_what_an_ancestor_mapped_is_kept_whichever_buffer_was_read_first(tmp_path: Path) -> None:
    # given: 7 is a child of 6, 6 of 5, 5 of 4; 6's fork is in the buffer that is read last
    frames = [
        (FrameKind.SIDEBAND, mapped(1, 4) + task(2, 5, 4)),
        (FrameKind.SIDEBAND, task(4, 7, 6) + task(5, 9, 8)),
        (FrameKind.SIDEBAND, task(3, 6, 5)),
    ]
    # when
    _, inputs = finished(tmp_path, *frames, (FrameKind.STACKS, stack(7, 6)))
    # then
    assert [module.path for module in inputs.spaces.modules] == ["/lib/x.so"]
    assert inputs.rows.table("process")["pid"].to_pylist() == [5, 7, 6]


def test_the_end_of_a_thread_that_waited_is_kept(tmp_path: Path) -> None:
    waits = np.zeros(2, WAIT)
    waits["pid"], waits["tid"], waits["begin"], waits["end"] = (7, 8), (70, 80), 1, 90
    waits["flags"] = (WaitFlags.NOT_ENDED, 0)
    records = task(50, 7, 7, begins=False, tid=70) + task(60, 8, 8, begins=False, tid=80)
    reader, inputs = finished(tmp_path, (FrameKind.SIDEBAND, records), (FrameKind.WAITS, waits.tobytes()))
    assert inputs.rows.table("process")["tid"].to_pylist() == [70]
    assert reader.table("wait")["end_ns"].to_pylist() == [50, 90]


def test_a_process_with_too_many_mappings_costs_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # given a process that maps without end, and others that have stacks, too
    monkeypatch.setattr(needed, "MOST_ROWS", 1000)
    endless = b"".join(mapped(10, 66, number, b"/tmp/%d" % number) for number in range(2000))
    others = [mapped(pid, pid) for pid in (5, 7)]
    frames = [(FrameKind.SIDEBAND, others[0]), (FrameKind.SIDEBAND, endless), (FrameKind.SIDEBAND, others[1])]
    # when
    reader, inputs = finished(tmp_path, *frames, *((FrameKind.STACKS, stack(pid, 20)) for pid in (5, 66, 7)))
    # then the others' stacks are in their files, the capture has all rows, and it says what is missing
    assert inputs.rows.table("mapping")["pid"].to_pylist() == [5, 7]
    assert len(reader.table("mapping")) == 2002
    assert sorted(row["id"] > 0 for row in reader.table("stack").to_pylist()) == [True] * 3
    [loss] = [row for row in reader.table("loss").to_pylist() if row["what"] == "no room"]
    assert (loss["source"], loss["count"]) == ("names", 2000)
    assert "have no names" in loss["detail"]


def test_of_equal_processes_the_oldest_are_dropped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(needed, "MOST_ROWS", 100)
    frames = []
    for pid in range(1, 301):
        frames += [(FrameKind.SIDEBAND, mapped(pid, pid)), (FrameKind.STACKS, stack(pid, pid))]
    monkeypatch.setattr("iaprof.record.capture.finish.ROWS_PER_GROUP", 10)
    _, inputs = finished(tmp_path, *frames)
    kept = inputs.rows.table("mapping")["pid"].to_pylist()
    assert 50 <= len(kept) <= 100
    assert kept == list(range(301 - len(kept), 301))
    assert inputs.rows.dropped == 300 - len(kept)


def test_a_pid_that_no_process_has_is_harmless(tmp_path: Path) -> None:
    reader, inputs = finished(
        tmp_path,
        (FrameKind.SIDEBAND, mapped(1, (1 << 32) - 1) + task(2, (1 << 32) - 1, (1 << 32) - 2) + mapped(3, 4)),
        (FrameKind.STACKS, stack((1 << 32) - 1, 5)),
    )
    assert len(reader.table("mapping")) == 2
    assert inputs.rows.table("mapping")["pid"].to_pylist() == [(1 << 32) - 1]


def test_what_is_damaged_needs_nothing(tmp_path: Path) -> None:
    reader, inputs = finished(
        tmp_path, (FrameKind.STACKS, b"x"), (FrameKind.WAITS, b"y"), (FrameKind.SIDEBAND, b"z" * 9)
    )
    assert not inputs.rows.needed.pids.any()
    assert sum(row["what"] == "damaged" for row in reader.table("loss").to_pylist()) == 3
