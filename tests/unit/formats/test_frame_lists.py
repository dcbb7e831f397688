"""The frames of many launches as columns are those of each launch."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given, strategies as st

from iaprof.formats.profile import (
    UNKNOWN_PROCESS,
    Code,
    CodeKind,
    Kernel,
    Launch,
    Origin,
    StackOptions,
    empty_profile,
)
from iaprof.formats.stacks.frame_lists import FrameLists, launches_frames, stack_columns
from iaprof.formats.stacks.frames import (
    CPU_COMPONENTS,
    GPU_COMPONENTS,
    Frame,
    cpu_frame,
    gpu_frames,
    kernel_frame,
    process_frame,
    truncated_frame,
)

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


def frames_of(launch: Launch | None, most: int, components: list[str]) -> list[Frame]:
    """The frames of one launch, one by one."""
    if launch is None:
        return [process_frame(UNKNOWN_PROCESS)]
    origins = launch.origins or [None] * len(launch.stack)
    stack = [cpu_frame(text, origin) for text, origin in zip(launch.stack, origins, strict=True)]
    stack += [kernel_frame(text) for text in launch.kernel_stack]
    if 0 < most < len(stack):
        stack = [truncated_frame(), *stack[-most:]]
    found = {
        "host": [process_frame(launch.host)] if launch.host else [],
        "process": [process_frame(launch.comm)],
        "pid": [process_frame(str(launch.pid))] if launch.pid else [],
        "operator": [process_frame(each) for each in launch.operators],
        "cpu": stack,
    }
    return [frame for component in components for frame in found[component]]


@given(
    st.lists(launches(), max_size=6),
    st.integers(0, 4),
    st.lists(st.sampled_from(CPU_COMPONENTS), unique=True, min_size=1),
)
def test_frames_of_many_launches_are_those_of_each(some: list[Launch | None], most: int, components: list[str]) -> None:
    options = StackOptions(max_stack=most)
    found = launches_frames(some, options, components)
    expected = [frames_of(each, most, components) for each in some]
    assert lists_of(found) == expected
    assert lists_of(found.reversed()) == [each[::-1] for each in expected]
    assert found.texts(lambda frame: frame.text) == [[each.text for each in one] for one in expected]
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


KERNELS = [None, Kernel(1, "scale", "scale.cl"), Kernel(2, "scale", "other.cl")]
CODES = [
    Code(mnemonic, functions, lines[: len(functions)], ("", "lib.h")[: len(functions)])
    for mnemonic in ("send", "[no binary]")
    for functions in (("scale",), ("scale", "inlined"))
    for lines in ((0, 0), (3, 4))
]


@given(
    st.lists(st.tuples(st.integers(0, len(KERNELS) - 1), st.integers(0, len(CODES) - 1)), max_size=12),
    st.permutations(GPU_COMPONENTS),
    st.integers(1, len(GPU_COMPONENTS)),
)
def test_frames_of_gpu_code_are_those_of_each_row(rows: list[tuple[int, int]], order: list[str], most: int) -> None:
    kernel, code = np.array(rows, np.int64).reshape(-1, 2).T
    options = StackOptions(components=tuple(order[:most]), gpu_lines=True)
    profile = replace(empty_profile(), kernels=KERNELS, codes=CODES, kernel=kernel, code=code)
    [(lists, number)] = stack_columns(profile, options, np.arange(len(rows)), np.zeros(len(rows), np.int64))
    frames = lists_of(lists)
    assert [frames[each] for each in number.tolist()] == [
        gpu_frames(KERNELS[kernel], CODES[code], options, order[:most]) for kernel, code in rows
    ]
