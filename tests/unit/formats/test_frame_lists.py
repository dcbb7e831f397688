"""The frames of many launches as columns are those of each launch."""

from __future__ import annotations

from hypothesis import given, strategies as st

from iaprof.formats.profile import CodeKind, Launch, Origin, StackOptions
from iaprof.formats.stacks.frame_lists import FrameLists, launches_frames
from iaprof.formats.stacks.frames import CPU_COMPONENTS, Frame, launch_frames

ORIGINS = [Origin(CodeKind.C, "/a.so"), Origin(CodeKind.C, "/a.so"), Origin(CodeKind.PYTHON, "/p", "p.py", 3)]
TEXT = st.sampled_from(["main", "py::f:p.py", "[unknown]", "-"])


@st.composite
def launches(draw: st.DrawFn) -> Launch | None:
    if draw(st.integers(0, 5)) == 0:
        return None
    stack = tuple(draw(st.lists(TEXT, max_size=4)))
    origins = tuple(draw(st.sampled_from(ORIGINS)) for _ in stack) if draw(st.booleans()) else ()
    kernel = tuple(draw(st.lists(TEXT, max_size=2)))
    operators = tuple(draw(st.lists(TEXT, max_size=2)))
    return Launch(
        draw(TEXT), draw(st.integers(0, 2)), stack, kernel, draw(st.sampled_from(["", "h"])), origins, operators
    )


def lists_of(found: FrameLists) -> list[list[Frame]]:
    ends = found.starts + found.lengths
    pairs = zip(found.starts.tolist(), ends.tolist(), strict=True)
    return [[found.frames[number] for number in found.numbers[start:end].tolist()] for start, end in pairs]


@given(
    st.lists(launches(), max_size=6),
    st.integers(0, 4),
    st.lists(st.sampled_from(CPU_COMPONENTS), unique=True, min_size=1),
)
def test_frames_of_many_launches_are_those_of_each(some: list[Launch | None], most: int, components: list[str]) -> None:
    options = StackOptions(max_stack=most)
    found = launches_frames(some, options, components)
    expected = [launch_frames(each, options, components) for each in some]
    assert lists_of(found) == expected
    assert lists_of(found.reversed()) == [each[::-1] for each in expected]
    assert found.joined(lambda frame: f"{frame.text};") == [
        "".join(f"{each.text};" for each in one) for one in expected
    ]
    # Frames are in the order in which the lists have them first, as trees number them.
    for lists in (found, found.reversed()):
        assert list(dict.fromkeys(lists.numbers.tolist())) == list(range(len(lists.frames)))


def test_lists_without_frames() -> None:
    found = launches_frames([], StackOptions(), CPU_COMPONENTS)
    assert (len(found), found.joined(lambda frame: frame.text)) == (0, [])
    assert lists_of(FrameLists.of([[], []])) == [[], []]
