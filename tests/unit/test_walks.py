"""Where stacks are cut, which of them are one then, and where they are said to end: on recordings that never were."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from iaprof.formats.capture import KINDS, CaptureReader
from iaprof.formats.launches import LAUNCH, LaunchFlags, stack_dtype, unchecked_stack_dtype
from iaprof.formats.sideband import comm_record, mapping_record
from iaprof.record.finish import finish
from iaprof.record.spool import FrameKind, Spool, SpoolReader
from iaprof.record.walks import Walked, Walks
from iaprof.symbols.address_space import AddressSpaces

DEPTH = 6
PID, OTHER = 7, 8
DRIVER, LIBRARY, JIT = 0x10000, 0x20000, 0x30000  # where code is; each of 64 KiB
HEAP = 0x900000
CALL = (0xE8 << 24, 0)  # the bytes before and from an address on: call rel32, whose first byte is 5 before
DATA, UNREAD = (0x1122334455667788, 0), (0, 0)
SIGNAL_RETURN = (0, 0x0F0000000FC0C748)
GOROUTINE = (0x90 << 56, 0xE8)
Around = tuple[int, int]


def stack(id_: int, *frames: tuple[int, Around], pid: int = PID, checked: bool = True) -> np.ndarray[Any, Any]:
    """One record, from (address, bytes) with the innermost first."""
    record = np.zeros(1, stack_dtype(DEPTH) if checked else unchecked_stack_dtype(DEPTH))
    record["id"], record["time"], record["pid"], record["depth"] = id_, 100, pid, len(frames)
    for index, (address, around) in enumerate(frames):
        record["ips"][0, index] = address
        if checked:
            record["around"][0, index] = around
    return record


def launches(*stacks: int, flags: int = 0) -> np.ndarray[Any, Any]:
    found = np.zeros(len(stacks), LAUNCH)
    found["stack"], found["pid"], found["time"], found["flags"] = stacks, PID, 200, flags
    return found


def mappings(time: int = 1, pid: int = PID) -> bytes:
    files = (DRIVER, b"/opt/libze_intel_gpu.so.1"), (LIBRARY, b"/opt/libfoo.so"), (JIT, b"//anon")
    told = (mapping_record(time, pid, start, 0x10000, 0, path, b"", (8, 1, start)) for start, path in files)
    return comm_record(time, pid, b"app") + b"".join(told)


def finished(folder: Path, *frames: tuple[FrameKind, bytes, int]) -> CaptureReader:
    spool = Spool(folder / "cap.spool")
    spool.write(FrameKind.HEADER, b"{}", time=1)
    for kind, payload, part in frames:
        spool.write(kind, payload, time=300, part=part)
    spool.write(FrameKind.END, b"{}", time=400)
    spool.close()
    finish(SpoolReader(folder / "cap.spool"), folder / "cap.parquet")
    return CaptureReader(folder / "cap.parquet")


def stacks_of(reader: CaptureReader) -> dict[int, list[int]]:
    return {row["id"]: row["ips"] for row in reader.table("stack").to_pylist()}


@pytest.mark.parametrize(
    "stray",
    [
        (HEAP, CALL),  # a call stands before it, and nothing says that it is code
        (LIBRARY + 0x100, DATA),  # a pointer to a function
        (0, UNREAD), (1 << 63, UNREAD),
    ],
)  # fmt: skip
def test_a_stack_ends_at_the_first_that_is_no_return_address(tmp_path: Path, stray: tuple[int, Around]) -> None:
    # given what would be a frame behind one that is none
    raw = stack(5, (DRIVER, DATA), (LIBRARY + 8, CALL), stray, (LIBRARY + 64, CALL))
    # when, though the mappings come last
    frames = (FrameKind.STACKS, raw.tobytes(), DEPTH), (FrameKind.SIDEBAND, mappings(), 0)
    reader = finished(tmp_path, *frames)
    # then
    assert stacks_of(reader) == {5: [DRIVER, LIBRARY + 8]}


def test_what_are_return_addresses_stays(tmp_path: Path) -> None:
    good = (DRIVER, DATA), (LIBRARY + 8, CALL), (JIT + 8, CALL), (LIBRARY + 16, SIGNAL_RETURN), (DRIVER + 3, UNREAD)
    raw = stack(5, *good, (LIBRARY + 32, GOROUTINE))
    reader = finished(tmp_path, (FrameKind.SIDEBAND, mappings(), 0), (FrameKind.STACKS, raw.tobytes(), DEPTH))
    assert stacks_of(reader)[5] == [*(address for address, _ in good), LIBRARY + 32]
    assert reader.table("stack")["truncated"].to_pylist() == [True]


def test_generated_code_may_push_what_it_is_returned_to(tmp_path: Path) -> None:
    # given what Java's interpreter does: it pushes an address that stands behind a jump
    jump = (int.from_bytes(bytes.fromhex("537f000041ff24da"), "little"), 0x1)
    raw = stack(5, (DRIVER, DATA), (JIT + 8, jump), (LIBRARY + 8, CALL), (LIBRARY + 16, jump))
    reader = finished(tmp_path, (FrameKind.SIDEBAND, mappings(), 0), (FrameKind.STACKS, raw.tobytes(), DEPTH))
    # then that is one there, and in a file it is none
    assert stacks_of(reader) == {5: [DRIVER, JIT + 8, LIBRARY + 8]}


def test_stacks_that_are_equal_when_cut_are_one(tmp_path: Path) -> None:
    # given one path with four kinds of data behind it, the same of another process, and another path
    path = (DRIVER, DATA), (LIBRARY + 8, CALL)
    tails = [[(HEAP + 64 * number, DATA)] * 4 for number in range(4)]
    raw = [stack(10 + number, *path, *tail) for number, tail in enumerate(tails)]
    raw += [stack(20, *path, pid=OTHER), stack(30, path[0], (LIBRARY + 9, CALL))]
    sent = launches(10, 11, 11, 12, 13, 20, 30, 0, 99)
    reader = finished(
        tmp_path,
        (FrameKind.SIDEBAND, mappings() + mappings(pid=OTHER), 0),
        (FrameKind.STACKS, np.concatenate(raw[:2]).tobytes(), DEPTH),
        (FrameKind.LAUNCHES, sent.tobytes(), 0),
        (FrameKind.STACKS, np.concatenate(raw[1:]).tobytes(), DEPTH),  # one of them comes again
        (FrameKind.LAUNCHES, launches(13, flags=LaunchFlags.CARRIED).tobytes(), 0),
    )
    # then
    both = [DRIVER, LIBRARY + 8]
    assert stacks_of(reader) == {10: both, 20: both, 30: [DRIVER, LIBRARY + 9]}
    assert sorted(reader.table("launch")["stack"].to_pylist()) == sorted([10] * 6 + [20, 30, 0, 99])
    assert reader.header["totals"]["stacks"] == 3
    # and what is not named is of the unknown: what was carried over was counted before
    ends = reader.header["stack_ends"]["launches"]
    assert ends == {"stacks": 7, "whole": 0, "unknown": 7, "ends": [{"library": "libfoo.so", "count": 7}], "more": 0}


def test_a_deep_stack_that_is_cut_is_not_truncated(tmp_path: Path) -> None:
    deep = stack(5, (DRIVER, DATA), *[(LIBRARY + 8, CALL)] * (DEPTH - 1))
    cut = stack(6, (DRIVER, DATA), *[(LIBRARY + 8, CALL)] * (DEPTH - 2), (HEAP, DATA))
    payload = np.concatenate([deep, cut]).tobytes()
    reader = finished(tmp_path, (FrameKind.SIDEBAND, mappings(), 0), (FrameKind.STACKS, payload, DEPTH))
    assert dict(zip(*(reader.table("stack")[name].to_pylist() for name in ("id", "truncated")), strict=True)) == {
        5: True,
        6: False,
    }


def test_a_spool_of_before_has_its_stacks_cut_by_mappings(tmp_path: Path) -> None:
    raw = stack(5, (DRIVER, DATA), (LIBRARY + 8, DATA), (HEAP, DATA), checked=False)
    frames = (FrameKind.SIDEBAND, mappings(), 0), (FrameKind.UNCHECKED_STACKS, raw.tobytes(), DEPTH)
    assert stacks_of(finished(tmp_path, *frames)) == {5: [DRIVER, LIBRARY + 8]}


def test_without_any_mapping_of_a_process_its_calls_count(tmp_path: Path) -> None:
    raw = stack(5, (DRIVER, DATA), (LIBRARY + 8, CALL), (HEAP, DATA))
    assert stacks_of(finished(tmp_path, (FrameKind.STACKS, raw.tobytes(), DEPTH))) == {5: [DRIVER, LIBRARY + 8]}


def spaces(*records: dict[str, Any]) -> AddressSpaces:
    rows = [dict.fromkeys(field.name for field in KINDS["mapping"]) | record for record in records]
    mapped = pa.Table.from_struct_array(pa.array(rows, KINDS["mapping"]))
    return AddressSpaces(mapped, pa.schema(list(KINDS["process"])).empty_table())


def walked(time: int, *ips: int) -> Walked:
    ones = np.ones(1, np.uint64)
    return Walked(np.array([PID], np.uint32), ones * np.uint64(time), np.array([len(ips)]), np.array(ips, np.uint64))


def library(time: int) -> dict[str, Any]:
    return {"time_ns": time, "pid": PID, "start": LIBRARY, "length": 0x10000, "offset": 0, "path": "/opt/libfoo.so"}


def test_a_mapping_counts_when_it_was_there() -> None:
    walks = Walks(spaces({**library(1), "start": DRIVER}, library(10**12)), True)
    # before, unless it is by the little that reading the mappings of a running process takes
    for time, depth in ((100, 1), (10**12 - 10**8, 2), (10**12, 2)):
        cut, _ = walks.cut(walked(time, DRIVER, LIBRARY + 8, HEAP))
        assert cut.depths.tolist() == [depth]


def test_where_mappings_were_lost_a_call_is_enough() -> None:
    code = np.array([0, (0xE8 << 24) | 1, 0x1100000000000001], np.uint64)
    for complete, depth in ((True, 1), (False, 2)):
        stacks = walked(100, DRIVER, LIBRARY + 8, HEAP)
        stacks = Walked(stacks.pids, stacks.times, stacks.depths, stacks.ips, code)
        cut, ends = Walks(spaces({**library(1), "start": DRIVER}), complete).cut(stacks)
        assert cut.depths.tolist() == [depth]
        assert ends.addresses.tolist() == [0 if depth == 1 else LIBRARY + 7]


def test_where_mappings_were_lost_a_sample_goes_on_as_far_as_code_is_known() -> None:
    # given samples, of whose code no bytes came, through code whose mapping was lost, and with data behind
    for complete, depth in ((True, 1), (False, 3)):
        walks = Walks(spaces({**library(1), "start": DRIVER}, library(1)), complete)
        cut, ends = walks.cut(walked(100, DRIVER, JIT + 8, LIBRARY + 8, HEAP))
        assert cut.depths.tolist() == [depth]
        assert ends.addresses.tolist() == [0 if depth == 1 else LIBRARY + 7 - LIBRARY]


def test_a_damaged_frame_of_mappings_is_a_loss_of_them(tmp_path: Path) -> None:
    raw = stack(5, (DRIVER, DATA), (JIT + 0x10008, CALL), (LIBRARY + 8, CALL))
    told = (FrameKind.SIDEBAND, mappings() + bytes(3), 0), (FrameKind.STACKS, raw.tobytes(), DEPTH)
    assert stacks_of(finished(tmp_path, *told)) == {5: [DRIVER, JIT + 0x10008, LIBRARY + 8]}


def test_nothing_is_cut_of_nothing() -> None:
    empty = Walked(np.zeros(0, np.uint32), np.zeros(0, np.uint64), np.zeros(0, np.int64), np.zeros(0, np.uint64))
    cut, ends = Walks(spaces(), True).cut(empty)
    assert len(cut.depths) == len(ends.modules) == 0
