from __future__ import annotations

import numpy as np
from hypothesis import given, settings, strategies as st

from iaprof.timelines.trace import Dialect
from iaprof.timelines.views import labels, nesting
from unit.timelines.traces import slice_, trace

SLICES = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 12), st.integers(0, 8)), max_size=30)


def found(slices: list[tuple[int, int, int]]) -> list[int]:
    track, start, length = (np.array([each[n] for each in slices], np.int64) for n in range(3))
    return [int(row) for row in nesting.parents(track, start, start + length)]


def test_slices_inside_of_each_other() -> None:
    # a [0, 10] has b [1, 4] and d [4, 6], b has c [1, 2]; e is beside them, f in another track
    slices = [(0, 0, 10), (0, 1, 3), (0, 1, 1), (0, 4, 2), (0, 10, 3), (1, 2, 1)]
    assert found(slices) == [-1, 0, 1, 0, -1, -1]


def test_nothing_is_inside_of_a_slice_without_length() -> None:
    assert found([(0, 5, 0), (0, 5, 0), (0, 5, 2), (0, 7, 0)]) == [2, 2, -1, -1]


def _nests(slices: list[tuple[int, int, int]]) -> bool:
    ordered = sorted(slices, key=lambda each: (each[1], -each[2]))
    return not any(
        one[0] == other[0] and one[1] < other[1] < one[1] + one[2] < other[1] + other[2]
        for n, one in enumerate(ordered)
        for other in ordered[n + 1 :]
    )


@settings(max_examples=300, deadline=None)
@given(SLICES)
def test_finds_what_a_stack_finds(slices: list[tuple[int, int, int]]) -> None:
    kept: list[tuple[int, int, int]] = []
    for each in slices:  # only what does not overlap in part
        kept += [each] if _nests([*kept, each]) else []
    expected = [-1] * len(kept)
    open_: dict[int, list[int]] = {}
    for row in sorted(range(len(kept)), key=lambda row: (kept[row][1], -kept[row][2], row)):
        track, start, length = kept[row]
        stack = open_.setdefault(track, [])
        while stack and kept[stack[-1]][1] + kept[stack[-1]][2] <= start:
            stack.pop()
        expected[row] = stack[-1] if stack else -1
        if length:
            stack.append(row)
    assert found(kept) == expected


@settings(max_examples=200, deadline=None)
@given(SLICES)
def test_slices_that_overlap_in_part_have_a_parent_that_began_before(slices: list[tuple[int, int, int]]) -> None:
    for row, parent in enumerate(found(slices)):
        if parent >= 0:
            assert slices[parent][0] == slices[row][0]
            assert slices[parent][1] <= slices[row][1]


def test_self_times_are_without_what_is_inside() -> None:
    made = trace([slice_("a", 0, 10), slice_("b", 1, 3), slice_("c", 1, 1), slice_("d", 4, 2)])
    parent = np.array([-1, 0, 1, 0])
    assert nesting.self_times(made.slices, parent).tolist() == [5000, 2000, 1000, 2000]


def test_the_launch_of_a_slice_is_the_first_of_its_correlation_in_its_file() -> None:
    events = [
        slice_("wait", 30, 9, correlation=9, cat="runtime"),
        slice_("launch", 10, 2, correlation=9, cat="runtime"),
        slice_("gemm", 20, 5, correlation=9, cat="kernel"),
        slice_("other", 26, 5, correlation=8, cat="kernel"),
    ]
    made = trace(events, [slice_("gemm", 20, 5, correlation=9, cat="kernel")], dialect=Dialect.TORCH)
    assert nesting.launches(made.slices, labels.on_devices(made)).tolist() == [-1, -1, 1, -1, -1]
