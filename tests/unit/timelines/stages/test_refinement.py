from __future__ import annotations

import pytest

from iaprof.timelines.options import Options
from iaprof.timelines.stages.order import sort_by_time
from iaprof.timelines.stages.refinement import keep_phases, place_on_devices, strip_numbers
from iaprof.timelines.trace import Dialect, Marks, Trace
from unit.timelines.examples import all_reduce, launch, launched, member, names, two_operations
from unit.timelines.traces import Event, slice_, trace

COUNTERS = (1, 2, 3, 4, 5)


def categories(made: Trace) -> list[str | None]:
    found: list[str | None] = made.texts.taken(made.slices.category).to_pylist()
    return found


def flow(phase: str, ts: float, pid: int, tid: int, file_id: int = 1) -> Event:
    return {"ph": phase, "id": file_id, "name": "f", "cat": "c", "pid": pid, "tid": tid, "ts": ts}


def metadata(marks: Marks, made: Trace) -> list[tuple[int, str, str | int]]:
    """The metadata that stages made: pid, name, value."""
    found: list[tuple[int, str, str | int]] = []
    for row in range(len(marks)):
        name = made.texts[marks.name[row]]
        member_ = {"process_name": "name", "process_labels": "labels"}.get(name)
        value = made.texts[marks.extra[member_][row]] if member_ else int(marks.extra["sort_index"][row])
        found.append((int(marks.pid[row]), name, value))
    return found


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("conv_1 Cmpt Exec", "conv Cmpt Exec"),
        ("conv2d_12_x3 Cmpt Exec", "convd_x Cmpt Exec"),
        ("V2_V3x_4", "V2_V3x"),
        ("aV_2", "aV"),
        ("2x_3", "2x"),
        ("7", "7"),
        ("a1", "a"),
        ("plain", "plain"),
    ],
)
def test_numbers_leave_names(name: str, expected: str) -> None:
    made = trace([slice_(name, 0, 1, COUNTERS)])
    strip_numbers(made, Options())
    assert names(made) == [expected]
    assert member(made, "orig_name") == [name if name != expected else None]


def test_names_of_the_host_keep_their_numbers() -> None:
    made = launched()
    strip_numbers(made, Options())
    assert names(made) == ["aiuLaunchControlBlocks", "aiuScheduleWait", "Memcpy (HtoD)", "mm", "add"]
    made = trace([slice_("k_1", 0, 1)])
    strip_numbers(made, Options())
    assert names(made) == ["k_1"]


def test_slices_of_a_device_and_its_host() -> None:
    made = two_operations()
    place_on_devices(made, Options())
    assert made.slices.pid.tolist() == [1000, 1000, 0, 0, 0, 0, 0, 0]
    copy, kernel = "gpu_memcpy", "kernel"
    assert categories(made) == ["cpu_op", "cpu_op", copy, kernel, kernel, kernel, copy, kernel]
    assert made.slices.device[2:].tolist() == [0] * 6
    assert made.slices.extra["rank"].tolist() == [0] * 8
    assert metadata(made.instants, made) == [
        (1000, "process_name", "Host0"), (1000, "process_labels", "Host0"), (1000, "process_sort_index", 0),
        (0, "process_name", "AIU Device0"), (0, "process_labels", "AIU Device0"), (0, "process_sort_index", 1),
    ]  # fmt: skip
    assert made.instants.time.tolist() == [900000] * 3 + [975000] * 3
    assert made.made == {"names and places of processes": 6}


def test_ranks_in_one_file_stay_ranks() -> None:
    # Given four ranks in a file
    slices = [slice_("k Cmpt Exec", 0, 1, COUNTERS, pid=pid) for pid in range(4)]
    made = trace([*slices, slice_("h", 0, 1, pid=3, cat="mine")])
    place_on_devices(made, Options())
    assert made.slices.pid.tolist() == [0, 1, 2, 3, 1003]
    assert made.slices.device[:4].tolist() == [0, 1, 2, 3]
    assert categories(made)[4] == "mine"


def test_categories_of_collectives() -> None:
    made = all_reduce()
    place_on_devices(made, Options())
    note, kernel = "user_annotation", "kernel"
    assert categories(made) == [kernel, note, note, kernel, kernel, note, note, note, note, note, kernel]


def test_what_belongs_to_a_moved_slice_moves() -> None:
    # Given a host's and a device's slices on rows of their own and on a common one, and marks on all of them
    made = trace(
        [
            slice_("host", 0, 100, pid=2, tid=1),
            slice_("k Cmpt Exec", 10, 10, COUNTERS, pid=2, tid=2),
            slice_("host", 0, 100, pid=2, tid=3),
            slice_("k Cmpt Exec", 10, 10, COUNTERS, pid=2, tid=3),
            flow("s", 5, 2, 1),
            flow("f", 10, 2, 2),
            flow("f", 50, 2, 2),
            flow("f", 20, 2, 3),
            flow("f", 21, 2, 3),
            flow("f", 5, 2, 9),
            {"ph": "i", "name": "i", "pid": 2, "tid": 1, "ts": 5, "s": "t"},
            {"ph": "C", "name": "c", "pid": 2, "ts": 5, "args": {"v": 1}},
            {"ph": "C", "name": "c", "pid": 7, "ts": 5, "args": {"v": 1}},
        ]
    )
    place_on_devices(made, Options())
    assert made.slices.pid.tolist() == [1002, 2, 1002, 2]
    assert made.flows.pid.tolist() == [1002, 2, 2, 2, 1002, 1002]
    assert made.instants.pid.tolist()[0] == 1002
    assert made.points.pid.tolist() == [1002, 7]


def test_flows_of_torch_follow_the_device_to_its_rank() -> None:
    # Given rank 1's file, whose device's slices have moved to pid 1, but not its flow's end
    events = [*launch(device=1), flow("f", 1070, 0, 7, 9)]
    made = trace(launch(), events, dialect=Dialect.TORCH, ranks=(0, 1))
    place_on_devices(made, Options())
    assert made.flows.pid.tolist() == [4000, 4000, 1]
    assert made.slices.pid.tolist() == [4000, 4000, 0, 0, 0, 4000, 4000, 1, 1, 1]
    assert made.slices.extra["rank"].tolist() == [0] * 5 + [1] * 5
    assert len(made.instants) == 0


def everything() -> Trace:
    return trace(
        [
            slice_("a", 5, 1),
            slice_("b", 0, 1),
            slice_("c", 0, 9),
            {"ph": "C", "name": "c", "ts": 7, "args": {"v": 1}},
            {"ph": "C", "name": "c", "ts": 5, "args": {"v": 2}},
            flow("f", 9, 0, 1),
            flow("s", 8, 0, 1),
            {"ph": "i", "name": "i", "ts": 5},
            {"ph": "M", "name": "m", "ts": 0},
        ]
    )


def test_only_phases_that_are_asked_for() -> None:
    made = everything()
    keep_phases(made, Options(phases="XsM"))
    assert [len(each) for each in (made.slices, made.points, made.flows, made.instants)] == [3, 0, 1, 1]
    assert made.dropped == {"phases not asked for": 4}
    keep_phases(made, Options(phases="C"))
    assert [len(each) for each in (made.slices, made.points, made.flows, made.instants)] == [0, 0, 0, 0]
    assert made.dropped == {"phases not asked for": 9}


def test_sorts_by_time_and_the_longest_first() -> None:
    made = everything()
    sort_by_time(made, Options())
    assert names(made) == ["c", "b", "a"]
    assert (made.points.time.tolist(), made.flows.time.tolist()) == ([5000, 7000], [8000, 9000])
    assert made.instants.time.tolist() == [0, 5000]
