"""Launches' stacks in a capture: finished ones replace unfinished ones, equal ones are one row, with their ends."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from iaprof.formats.capture.reader import CaptureReader
from iaprof.formats.wire.launches import COPY, CPU_SAMPLE, KEPT_SHIFT, LAUNCH, LaunchFlags, stack_dtype
from iaprof.formats.wire.sideband import comm_record, mapping_record
from iaprof.formats.wire.unwind_rules import Walked
from iaprof.record.capture.finish import finish
from iaprof.record.spool import FrameKind, Spool, SpoolReader
from iaprof.record.stacks import launch_stacks
from iaprof.record.symbolize.needed import FinishStacks
from iaprof.symbols.cpu_frames import CpuFrames
from iaprof.symbols.names.address_space import AddressSpaces
from iaprof.symbols.names.rows import CaptureNames

DEPTH = 6
PID, OTHER = 7, 8
DRIVER, LIBRARY = 0x10000, 0x20000  # where code is; each of 64 KiB
PATH = (DRIVER + 1, LIBRARY + 8, LIBRARY + 64)


@pytest.fixture(autouse=True, params=[1, 4 << 20], ids=["at once", "together"])
def gathered(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are made of each frame by itself, and of many together."""
    monkeypatch.setattr(launch_stacks, "_GATHERED_BYTES", request.param)


def stack(
    id_: int,
    *ips: int,
    pid: int = PID,
    walked: int = Walked.WHOLE,
    guessed: int = 0,
    interrupted: int = 0,
) -> bytes:
    """One record, the innermost address first; `guessed` and `interrupted` are bits."""
    record = np.zeros(1, stack_dtype(DEPTH))
    record["id"], record["time"], record["pid"], record["depth"] = id_, 100, pid, len(ips)
    record["walked"], record["guessed"][0, 0], record["interrupted"][0, 0] = walked, guessed, interrupted
    record["ips"][0, : len(ips)] = ips
    return record.tobytes()


def launches(*stacks: int, flags: int = 0) -> bytes:
    found = np.zeros(len(stacks), LAUNCH)
    found["stack"], found["pid"], found["time"], found["flags"] = stacks, PID, 200, flags
    return found.tobytes()


def mappings(pid: int = PID) -> bytes:
    files = (DRIVER, b"/opt/libze_intel_gpu.so.1"), (LIBRARY, b"/opt/libfoo.so")
    counts = (mapping_record(1, pid, start, 0x10000, 0, path, b"", (8, 1, start)) for start, path in files)
    return comm_record(1, pid, b"app") + b"".join(counts)


def captured(
    folder: Path,
    *frames: tuple[FrameKind, bytes],
    finish_stacks: FinishStacks | None = None,
    follows_frame_pointers: bool = False,
) -> CaptureReader:
    spool = Spool(folder / "cap.spool")
    header = {"stack_depth": DEPTH, "follows_frame_pointers": follows_frame_pointers}
    spool.write(FrameKind.HEADER, json.dumps(header).encode(), time=1)
    spool.write(FrameKind.SIDEBAND, mappings() + mappings(OTHER), time=2)
    for kind, payload in frames:
        spool.write(kind, payload, time=300, shape=DEPTH)
    spool.write(FrameKind.END, b"{}", time=400)
    spool.close()
    finish(SpoolReader(folder / "cap.spool"), folder / "cap.parquet", finish_stacks=finish_stacks)
    return CaptureReader(folder / "cap.parquet")


def rows(reader: CaptureReader) -> dict[int, dict[str, Any]]:
    return {row["id"]: row for row in reader.table("stack").to_pylist()}


def ends(reader: CaptureReader) -> dict[str, Any]:
    found: dict[str, Any] = reader.header["stack_ends"]["launches"]
    return found


def test_stacks_that_come_one_by_one_share_a_row_group(tmp_path: Path) -> None:
    folders = tmp_path / "one", tmp_path / "many"
    for folder, count in zip(folders, (1, 50), strict=True):
        folder.mkdir()
        found = captured(folder, *((FrameKind.STACKS, stack(number + 1, DRIVER + number)) for number in range(count)))
        assert len(rows(found)) == count
    one, many = (pq.read_metadata(folder / "cap.parquet").num_row_groups for folder in folders)
    assert one == many


def test_stacks_by_frame_pointers_are_cut_where_they_leave_the_code(tmp_path: Path) -> None:
    # given the same path twice, followed by different data; a deep one; and one that the side-band does not know
    whole = [DRIVER + number for number in range(DEPTH)]
    sent = [stack(5, *PATH, 0x900000), stack(6, *PATH, 0x910000, LIBRARY + 8), stack(8, 1, 2, 3, pid=99)]
    sent = [*sent, stack(7, *whole, walked=Walked.DEEP, guessed=0b111110)]
    reader = captured(
        tmp_path,
        *((FrameKind.STACKS, each) for each in sent),
        (FrameKind.LAUNCHES, launches(5, 6, 7, 8)),
        follows_frame_pointers=True,
    )
    # then the first two are one row, which does not say how it ended, nor that its callers are guesses
    found = rows(reader)
    assert {id_: row["ips"] for id_, row in found.items()} == {5: [*PATH], 7: whole, 8: [1, 2, 3]}
    assert {id_ for id_, row in found.items() if row["truncated"]} == {7}
    assert {(row["ended"], row["marks"]) for row in found.values()} == {(None, None)}
    assert reader.table("launch")["stack"].to_pylist() == [5, 5, 7, 8]
    assert [ends(reader)[name] for name in ("stacks", "whole", "deep", "guessed")] == [4, 0, 1, 0]


def test_stacks_say_how_they_ended(tmp_path: Path) -> None:
    every = [stack(10 + how, *PATH[: 1 + how % 3], walked=how) for how in Walked]
    reader = captured(
        tmp_path,
        *((FrameKind.STACKS, each) for each in every),
        (FrameKind.LAUNCHES, launches(*(10 + how for how in Walked))),
    )
    names = ("whole", "deep", "unfinished", "nowhere", "memory", "damaged", "stuck")
    assert {id_ - 10: row["ended"] for id_, row in rows(reader).items()} == dict(enumerate(names))
    assert [id_ - 10 for id_, row in rows(reader).items() if row["truncated"]] == [Walked.DEEP]
    # and those that are not whole are counted where they end
    assert [ends(reader)[name] for name in ("stacks", "whole", "unknown", "deep", "guessed")] == [7, 1, 0, 1, 0]
    assert ends(reader)["ends"] == [
        {"library": "libfoo.so", "count": 4, "deep": 1},
        {"library": "libze_intel_gpu.so.1", "count": 2, "deep": 0},
    ]
    assert ends(reader)["cut"] == 5
    (process,) = ends(reader)["processes"]
    assert (process["pid"], process["stacks"], process["count"], process["deep"]) == (PID, 7, 6, 1)


def test_a_finished_stack_takes_the_place_of_the_one_that_bpf_sent(tmp_path: Path) -> None:
    # given a finished stack that comes before the unfinished one, and one that comes after it
    sent = [stack(id_, *PATH[:1], walked=Walked.MISSED) for id_ in (5, 6)]
    reader = captured(
        tmp_path,
        (FrameKind.STACKS, sent[0] + stack(6, *PATH)),
        (FrameKind.STACKS, stack(5, *PATH) + sent[1]),
        (FrameKind.LAUNCHES, launches(5, 6)),
    )
    # then each pair is one row
    assert [(row["ips"], row["ended"]) for row in rows(reader).values()] == [([*PATH], "whole")]
    assert len(set(reader.table("launch")["stack"].to_pylist()) & rows(reader).keys()) == 1


@pytest.mark.parametrize("is_early", [False, True])
def test_a_stack_finished_from_the_middle_has_bpf_s_addresses_first(tmp_path: Path, is_early: bool) -> None:
    sent = stack(5, 1, 2, 3, walked=Walked.MISSED, guessed=0b100)
    rest = stack(5, 3, 4, 5, 6, 7, walked=Walked.STUCK | 2 << KEPT_SHIFT, guessed=0b1000, interrupted=0b10)
    # which the recorder may read before BPF's part, and twice
    parts = [sent, rest, rest][:: -1 if is_early else 1]
    (row,) = rows(captured(tmp_path, *((FrameKind.STACKS, part) for part in parts))).values()
    assert row["ips"] == [1, 2, 3, 4, 5, 6]  # no more than the limit
    assert row["marks"] == [0, 0, 1, 2, 0, 1]  # where BPF's walk ended is a guess, too
    assert row["ended"] == "stuck"


@pytest.mark.parametrize(
    "more", [stack(5, 1, 2, 3, walked=Walked.MISSED), stack(5, 2, 3, walked=Walked.MISSED | 1 << KEPT_SHIFT)]
)
def test_a_stack_that_is_still_not_finished_has_what_was_found_since(tmp_path: Path, more: bytes) -> None:
    (row,) = rows(
        captured(tmp_path, (FrameKind.STACKS, stack(5, 1, 2, walked=Walked.MISSED)), (FrameKind.STACKS, more))
    ).values()
    assert (row["ips"], row["ended"]) == ([1, 2, 3], "unfinished")


def test_the_end_of_a_stack_without_its_beginning_is_dropped(tmp_path: Path) -> None:
    (row,) = rows(captured(tmp_path, (FrameKind.STACKS, stack(5, 3, 4, walked=2 << KEPT_SHIFT)))).values()
    assert (row["ips"], row["ended"]) == ([], "unfinished")


def test_marks_are_where_there_are_some(tmp_path: Path) -> None:
    sent = stack(5, *PATH, interrupted=1) + stack(6, *PATH, 9, guessed=0b110, interrupted=0b1000)
    found = rows(captured(tmp_path, (FrameKind.STACKS, sent)))
    assert found[5]["marks"] is None  # the innermost address is never a return address
    assert found[6]["marks"] == [0, 1, 1, 2]


def test_launches_with_guessed_callers_are_counted(tmp_path: Path) -> None:
    sent = stack(5, *PATH) + stack(6, *PATH[:2], guessed=0b10) + stack(7, 9, guessed=0b1, walked=Walked.STUCK)
    reader = captured(tmp_path, (FrameKind.STACKS, sent), (FrameKind.LAUNCHES, launches(5, 6, 6, 7)))
    # then none of them is whole, whether it reaches the program's start or not
    names = ("stacks", "whole", "guessed", "guessed_early", "cut")
    assert [ends(reader)[name] for name in names] == [4, 1, 3, 1, 0]
    # and reports count the same from the stacks themselves
    stacks = reader.stacks(np.array([5, 6, 7], np.uint64))
    spaces = AddressSpaces(reader.table("mapping"), reader.table("process"))
    found = CpuFrames(stacks, spaces, CaptureNames(reader), are_cut=True).ends({5: 1, 6: 2, 7: 1})
    assert found.to_json() == ends(reader)
    assert found.text("launches").startswith("1 of 4 launches (25.0 %) have a whole stack, 3 (75.0 %) a guessed one; ")


def test_equal_stacks_are_one_unless_they_ended_differently(tmp_path: Path) -> None:
    sent = stack(5, *PATH) + stack(6, *PATH) + stack(7, *PATH, walked=Walked.STUCK) + stack(8, *PATH, pid=OTHER)
    reader = captured(
        tmp_path,
        (FrameKind.STACKS, sent),
        (FrameKind.STACKS, sent),
        (FrameKind.LAUNCHES, launches(5, 6, 6, 7, 8, 0, 99)),
        (FrameKind.LAUNCHES, launches(6, flags=LaunchFlags.CARRIED)),
    )
    assert rows(reader).keys() == {5, 7, 8}
    assert sorted(reader.table("launch")["stack"].to_pylist()) == [0, 5, 5, 5, 5, 7, 8, 99]
    assert reader.header["totals"]["stacks"] == 3
    assert (ends(reader)["stacks"], ends(reader)["whole"]) == (5, 4)  # what was carried over was counted before


def test_a_stack_with_a_guess_is_not_taken_for_one_without(tmp_path: Path) -> None:
    # given the same addresses, found without a guess and with one, whichever comes first
    for name, order in (("a", (0, 0b10)), ("b", (0b10, 0))):
        sent = b"".join(stack(5 + at, *PATH, guessed=guessed) for at, guessed in enumerate(order))
        (tmp_path / name).mkdir()
        reader = captured(tmp_path / name, (FrameKind.STACKS, sent), (FrameKind.LAUNCHES, launches(5, 6)))
        assert (ends(reader)["whole"], ends(reader)["guessed"]) == (1, 1)
        assert {bool(row["marks"]) for row in rows(reader).values()} == {False, True}


def not_finished(reader: CaptureReader) -> list[int]:
    losses = reader.table("loss").to_pylist()
    return [loss["count"] for loss in losses if (loss["source"], loss["what"]) == ("stacks", "not finished")]


def test_copies_of_unfinished_stacks_are_finished_at_the_end(tmp_path: Path) -> None:
    # given copies of three stacks, of which one was finished while recording
    copies = np.zeros(6, COPY)
    copies["id"], copies["address"] = [5, 5, 6, 6, 7, 7], [4096, 8192] * 3
    given: list[list[int]] = []

    def finish_stacks(recorded: object, some: Any, depth: int) -> Any:
        assert depth == DEPTH
        for records in some:
            given.append(records["id"].tolist())
            if records["id"][0] == 5 and len(given) == 1:
                yield stack(5, *PATH[1:])

    sent = b"".join(stack(id_, *PATH[:1], walked=Walked.MISSED) for id_ in (5, 6, 7)) + stack(6, *PATH)
    frames = [(FrameKind.COPY, copies[at : at + 1].tobytes()) for at in range(6)]
    reader = captured(
        tmp_path,
        *frames,
        (FrameKind.STACKS, sent),
        (FrameKind.LAUNCHES, launches(5, 6, 7)),
        (FrameKind.LAUNCHES, launches(5, 5, 7, flags=LaunchFlags.PRESUMED)),
        finish_stacks=finish_stacks,
    )
    # then the other two are finished
    assert given == [[5], [5], [7], [7]]
    assert sorted(row["ended"] for row in rows(reader).values()) == ["unfinished", "whole", "whole"]
    assert not_finished(reader) == [1]
    # and the header says how many launches have late stacks, and which process has the unfinished one
    counts = ends(reader)
    assert (counts["stacks"], counts["whole"], counts["late"], counts["presumed"]) == (6, 4, 3, 3)
    (process,) = counts["processes"]
    assert process == {"pid": PID, "stacks": 6, "count": 2, "deep": 0, "guessed": 0, "late": 3, "presumed": 3}


def test_stacks_for_which_there_is_no_time_at_the_end_are_counted(tmp_path: Path) -> None:
    # given copies of three stacks, and time for one
    copies = np.zeros(6, COPY)
    copies["id"] = [5, 5, 6, 6, 7, 7]

    def finish_stacks(recorded: object, some: Any, depth: int) -> Any:
        yield stack(int(next(some)["id"][0]), *PATH)

    frames = [(FrameKind.COPY, copies[at : at + 1].tobytes()) for at in range(6)]
    sent = b"".join(stack(id_, *PATH[:1], walked=Walked.MISSED) for id_ in (5, 6, 7))
    reader = captured(tmp_path, *frames, (FrameKind.STACKS, sent), finish_stacks=finish_stacks)
    # then the others are counted
    assert not_finished(reader) == [2]


def test_whose_processes_are_is_known_when_their_stacks_are_finished(tmp_path: Path) -> None:
    # as their files are opened with these rights
    described: list[tuple[int, int]] = []

    def finish_stacks(recorded: Any, some: Any, depth: int) -> Any:
        for row in recorded.rows.table("process").to_pylist():
            if row["event"] == "described":
                described.append((row["pid"], row["uid"]))
        yield from ()

    copies = np.zeros(1, COPY)
    copies["id"], copies["pid"], copies["address"] = 5, PID, 4096
    captured(
        tmp_path,
        (FrameKind.STACKS, stack(5, *PATH[:1], walked=Walked.MISSED)),
        (FrameKind.COPY, copies.tobytes()),
        (FrameKind.PROCESS, json.dumps({"pid": PID, "uid": 1000, "gid": 1000}).encode()),
        finish_stacks=finish_stacks,
    )
    assert described == [(PID, 1000)]


@pytest.mark.parametrize("kind", ["launches", "cpu_samples"])
def test_what_was_finished_late_or_presumed_is_counted_by_process(tmp_path: Path, kind: str) -> None:
    # given three equal stacks, of which one was finished while recording, and one of another process
    ids = {5: PID, 6: PID, 7: PID, 8: OTHER}
    late = (5, 7, 8)
    copies = np.zeros(len(late), COPY)
    copies["id"] = late

    def finish_stacks(recorded: object, some: Any, depth: int) -> Any:
        for records in some:
            yield stack(int(records["id"][0]), *PATH, pid=ids[int(records["id"][0])])

    missed = b"".join(stack(id_, *PATH[:1], pid=pid, walked=Walked.MISSED) for id_, pid in ids.items())
    counts = {5: 3, 6: 40, 7: 2, 8: 1}
    records = np.zeros(sum(counts.values()), LAUNCH if kind == "launches" else CPU_SAMPLE)
    records["stack"] = np.repeat([*counts], [*counts.values()])
    records["pid"] = np.where(records["stack"] == 8, OTHER, PID)
    records["flags"][[0, 4, -1]] = LaunchFlags.PRESUMED  # one of 5, one of 6, the one of 8
    # when
    reader = captured(
        tmp_path,
        (FrameKind.STACKS, missed),
        (FrameKind.COPY, copies.tobytes()[: COPY.itemsize]),
        (FrameKind.COPY, copies.tobytes()[COPY.itemsize : 2 * COPY.itemsize]),
        (FrameKind.COPY, copies.tobytes()[2 * COPY.itemsize :]),
        (FrameKind.STACKS, stack(6, *PATH)),
        (FrameKind.LAUNCHES if kind == "launches" else FrameKind.CPU_SAMPLES, records.tobytes()),
        finish_stacks=finish_stacks,
    )
    # then
    assert len(rows(reader)) == 2
    counts = reader.header["stack_ends"][kind]
    assert (counts["stacks"], counts["whole"], counts["late"], counts["presumed"]) == (46, 46, 3 + 2 + 1, 3)
    nothing = {"count": 0, "deep": 0, "guessed": 0}
    assert counts["processes"] == [
        {"pid": PID, "stacks": 45, **nothing, "late": 5, "presumed": 2},
        {"pid": OTHER, "stacks": 1, **nothing, "late": 1, "presumed": 1},
    ]


def test_guessed_callers_are_counted_by_library(tmp_path: Path) -> None:
    # given guessed callers of code in the library, in the driver, and twice in the library, each with a whole stack
    sent = (
        stack(5, LIBRARY + 1, DRIVER + 8, LIBRARY + 64, guessed=0b10)
        + stack(6, LIBRARY + 1, DRIVER + 8, LIBRARY + 64, LIBRARY + 65, guessed=0b100)
        + stack(7, DRIVER, LIBRARY + 8, LIBRARY + 64, guessed=0b100, pid=OTHER)
        + stack(8, DRIVER, LIBRARY + 8, LIBRARY + 65, LIBRARY + 66, guessed=0b1100)
        + stack(9, DRIVER, LIBRARY + 9)
    )
    reader = captured(tmp_path, (FrameKind.STACKS, sent), (FrameKind.LAUNCHES, launches(5, 6, 6, 7, 8, 9)))
    counts = ends(reader)
    assert (counts["stacks"], counts["whole"], counts["guessed"], counts["ends"]) == (6, 1, 5, [])
    assert counts["guesses"] == [
        {"library": "libfoo.so", "count": 3},
        {"library": "libze_intel_gpu.so.1", "count": 2},
    ]
    assert [(each["pid"], each["stacks"], each["guessed"]) for each in counts["processes"]] == [
        (PID, 5, 4),
        (OTHER, 1, 1),
    ]
    # and reports derive the same from the stacks themselves
    stacks = reader.stacks(np.array([5, 6, 7, 8, 9], np.uint64))
    spaces = AddressSpaces(reader.table("mapping"), reader.table("process"))
    weights = {5: 1, 6: 2, 7: 1, 8: 1, 9: 1}
    assert CpuFrames(stacks, spaces, CaptureNames(reader), are_cut=True).ends(weights).to_json() == counts


def test_a_stack_with_an_unknown_ending_is_unfinished(tmp_path: Path) -> None:
    (row,) = rows(captured(tmp_path, (FrameKind.STACKS, stack(5, *PATH, walked=200)))).values()
    assert row["ended"] == "unfinished"


def test_frames_that_nobody_sends_are_counted_or_cost_nothing(tmp_path: Path) -> None:
    # given frames without a record, and parts of one stack with different limits
    rest = np.zeros(1, stack_dtype(1))
    rest["id"], rest["walked"], rest["depth"] = 5, Walked.WHOLE | 2 << KEPT_SHIFT, 1
    spool = Spool(tmp_path / "s")
    spool.write(FrameKind.HEADER, json.dumps({"stack_depth": DEPTH}).encode(), time=1)
    for kind, payload, depth in (
        (FrameKind.COPY, b"", 0), (FrameKind.STACKS, b"", DEPTH), (FrameKind.STACKS, rest.tobytes(), 1),
        (FrameKind.STACKS, stack(5, *PATH, walked=Walked.MISSED), DEPTH),
    ):  # fmt: skip
        spool.write(kind, payload, time=300, shape=depth)
    spool.close()
    # when
    finish(SpoolReader(tmp_path / "s"), tmp_path / "c", finish_stacks=lambda *_: iter(()))
    # then
    reader = CaptureReader(tmp_path / "c")
    assert rows(reader).keys() == {5}
    lost = [row["detail"] for row in reader.table("loss").to_pylist() if row["what"] == "damaged"]
    assert lost == ["a frame of COPY: it has no stack"]
